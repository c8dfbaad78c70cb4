"""Two chunks in a batch of SARATHI."""

from scheduler import SarathiServe

exercise = "6"
caught_by = "K4"
message = "Several chunks are Sarathi-Serve's"


class Sarathi(SarathiServe):
    pass
