"""One script for each figure and table of the papers, over `common.py`."""
