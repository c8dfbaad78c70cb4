"""The loop on a virtual clock: how long a schedule takes on a GPU that you do not have. No torch.

`simulate` runs the same `Loop` and the same `Scheduler` as the real engine. Only the executor
differs: it asks the cost model for the seconds of a batch, and moves a virtual clock by them.

more/simulate.py adds what is not the subject: more policies and more models.
"""

from collections.abc import Iterable

from batch import Batch, Request
from command.checks import lookup
from configs import GPUS, LINKS, MODELS, ModelConfig
from configs.hosts import HOSTS, Host
from costmodel import CostModel
from loop import Loop, Result
from scheduler import make_scheduler
from timeline import Trace


class CostExecutor:
    """Runs nothing. Its clock is virtual, its tokens are all 0."""

    def __init__(self, cost_model: CostModel):
        self.cost_model = cost_model
        self.cost = cost_model.seconds
        self.clock = 0.0  # s

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        self.clock = moment

    def execute(self, batch: Batch) -> Result:
        seconds = self.cost_model.seconds(batch)
        self.clock += seconds
        return Result([0] * len(batch.sampled), seconds)

    def release(self, request: Request) -> None:
        pass


def make_cost_model(
    model: str | ModelConfig,
    gpu: str,
    tp: int,
    link: str | None,
    software: str,
    host: str | Host = "none",
) -> CostModel:
    """Look up model, GPU, link, software and host by name, and price with them.

    link: None is the GPU's own. Model and host may also be ones of your own.

    If the software was not measured on this GPU, the model's `guess` says so.
    """
    return CostModel(
        model if isinstance(model, ModelConfig) else lookup(MODELS, model, "model"),
        lookup(GPUS, gpu, "GPU"),
        tp=tp,
        link=None if link is None else lookup(LINKS, link, "link"),
        software=software,
        host=host if isinstance(host, Host) else lookup(HOSTS, host, "host"),
    )


def simulate(
    requests: Iterable[Request],
    model: str | ModelConfig = "llama-13b",
    gpu: str = "a6000",
    *,
    policy: str = "sarathi",
    chunk_size: int = 256,
    max_batch_size: int = 18,
    cache_tokens: int | None = None,
    tp: int = 1,
    link: str | None = None,
    software: str = "xformers-2023",
    host: str | Host = "none",
) -> Trace:
    """Predicted times of these requests, with placeholder tokens.

    tp: GPUs that share the model. link: joins them, a name of configs.LINKS; None: the GPU's own.
    software: a name of costmodel.SOFTWARE, which docs/what-a-gpu-charges.md explains: the constants
    are fitted to its measurements. The default is SARATHI's; "vllm" is today's. If it was not
    measured on this GPU, the trace's `guess` says whose constants are taken.
    host: a name of configs.hosts.HOSTS: the CPU's time for each iteration.

    What does not fit the GPU's memory is priced all the same: `guess` says so. Without
    cache_tokens, B requests run at once (`costmodel.requests_that_fit` says how many fit).
    """
    cost_model = make_cost_model(model, gpu, tp, link, software, host)
    scheduler = make_scheduler(policy, max_batch_size, chunk_size, cache_tokens)
    trace = run_all(Loop(scheduler, CostExecutor(cost_model)), requests)
    trace.guess = cost_model.doubts(cache_tokens)
    return trace


def run_all(loop: Loop, requests: Iterable[Request]) -> Trace:
    """Add the requests, and run the loop to its end."""
    for request in sorted(requests, key=lambda request: request.arrival):
        loop.add(request)
    return loop.run()
