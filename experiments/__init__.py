"""One script for each figure and table of the papers.

What they share lies in experiments/lib: common, look, papers, steady, calibration, measuring,
figure.
"""

import command.enter  # noqa: F401  its scripts import it as `enter`
