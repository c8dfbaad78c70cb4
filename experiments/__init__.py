"""One script for each figure and table of the papers, over a few shared modules: common, look,
workloads, measuring, figure.
"""
