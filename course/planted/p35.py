"""It waits for two prompts before it starts one."""

from batch import Batch
from scheduler import SarathiServe

exercise = "final"
caught_by = "K8"
message = "Nothing else will wake them"


class Mine(SarathiServe):
    def schedule(self, now: float) -> Batch | None:
        if not self.running and len(self.waiting) < 2:
            return None
        return super().schedule(now)
