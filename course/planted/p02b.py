"""One chunk in a batch of Sarathi-Serve."""

from scheduler import Sarathi

exercise = "8"
caught_by = "K3"
message = "Rows that stay empty"


class SarathiServe(Sarathi):
    pass
