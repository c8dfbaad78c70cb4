"""Sarathi-Serve's deployments, data sets and capacities (Sec 5, Table 2); looks of policies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import matplotlib.pyplot as plt

from batch import Request
from configs import UserError
from experiments.lib.common import paper_numbers
from experiments.lib.look import COLOURS, SERIES, labelled_bars
from serving.capacity import Deployment, Load, capacity
from serving.traffic import Lengths, LogNormal, at_rate, make_requests, poisson

# How a policy looks in every picture that compares policies: colour and marker.
LOOKS = {
    "vllm_v0": SERIES[0],
    "orca": SERIES[2],
    "sarathi_serve": SERIES[1],
    "chunked_only": SERIES[4],
    "hybrid_only": SERIES[3],
    "request_level": SERIES[7],
    "sarathi": SERIES[5],
    "dynamic": SERIES[6],
    "td_pipe": (COLOURS["green"], "H"),  # as in TD-Pipe's own figures, where orca is not
}


def look_of(policy: str) -> tuple[str, str]:
    """Colour and marker of a policy in LOOKS; black crosses for any other."""
    return LOOKS.get(policy, (COLOURS["black"], "x"))


MISTRAL, YI = Deployment("mistral-7b"), Deployment("yi-34b", tp=2)


@dataclass(frozen=True)
class Dataset:
    """Log-normal lengths with a published median and P90.

    Requests are no longer than `max_length`, as the paper filtered them.
    """

    name: str
    prompts: Lengths
    outputs: Lengths
    max_length: int

    @staticmethod
    def published(name: str, max_length: int) -> "Dataset":
        """chat (openchat_sharegpt4) or arxiv (arxiv_summarization), from Table 2.

        Each data set has two unverified percentiles among its four.
        """
        numbers = paper_numbers()
        prompts, outputs = (
            LogNormal(numbers[f"ss_data_{name}_{what}_p50"], numbers[f"ss_data_{name}_{what}_p90"])
            for what in ("prompt", "output")
        )
        return Dataset(name, prompts, outputs, max_length)

    def requests(self, count: int, rate: float = 1.0, seed: int = 0) -> list[Request]:
        """`count` requests with Poisson arrivals."""
        return make_requests(
            poisson(count, rate, seed), self.prompts, self.outputs, seed, self.max_length
        )


CHAT, ARXIV = Dataset.published("chat", 8192), Dataset.published("arxiv", 16384)

# --------------------------------------------------------------------------------------- capacities

OURS, RIVALS = "sarathi_serve", ("vllm_v0", "orca")
POLICIES = (*RIVALS, OURS)


@dataclass(frozen=True)
class Job:
    """The capacities of one policy on one deployment for one set of requests, under all SLOs."""

    deployment: Deployment
    data: str
    policy: str


def capacities(
    job: Job,
    requests: Sequence[Request],
    slos: Mapping[str, tuple[float, int]],
    precision: float,
    starts: Mapping[str, float] | None = None,
    factor: float = 2.0,
) -> dict[str, float]:
    """Name of the SLO -> requests per second.

    slos: name -> bound in seconds, and token budget. starts: name -> the rate where its search
    begins (1 request per second). factor: see `capacity`. Raises UserError where all requests are
    served at any rate.
    """

    @cache
    def load(rate: float, budget: int) -> Load:
        return Load.of(job.deployment.serve(at_rate(requests, rate), job.policy, budget))

    found = {}
    for name, (bound, budget) in slos.items():
        size = budget if job.policy == OURS else 1  # the others have none: one run serves all SLOs

        def load_at(rate: float, size: int = size) -> Load:
            # two ways to the same rate differ in their last digits
            return load(round(rate, 6), size)

        start = starts[name] if starts else 1.0
        try:
            found[name] = capacity(load_at, bound, precision, start, factor)
        except UserError as error:
            where = f"{job.data}, {len(requests)} requests on {label(job.deployment)}"
            where += f" under {job.policy}, {name} SLO of {bound:.2g} s"
            raise UserError(f"{where}: {error}; give more or longer ones") from None
    return found


def label(deployment: Deployment) -> str:
    return f"{deployment.model} {deployment.layout}"


def draw_capacities(
    axes: plt.Axes, rates: Mapping[str, float], groups: Sequence[str], slo: str
) -> None:
    """Bars for each policy and group, where there is a rate.

    rates: requests per second by "policy, group slo".
    """
    for number, policy in enumerate(POLICIES):
        heights = {
            place + 0.27 * (number - 1): rates[f"{policy}, {group} {slo}"]
            for place, group in enumerate(groups)
            if f"{policy}, {group} {slo}" in rates
        }
        labelled_bars(axes, heights, 0.26, color=LOOKS[policy][0], label=policy)
    axes.set(ylabel="requests per second", title=f"capacity, {slo} SLO (predicted)")
