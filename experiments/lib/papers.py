"""Sarathi-Serve's deployments and data sets (Sec 5, Table 2), and how policies look in pictures."""

from dataclasses import dataclass

from batch import Request
from experiments.lib.common import paper_numbers
from experiments.lib.look import SERIES
from serving.capacity import Deployment
from serving.traffic import Lengths, LogNormal, make_requests, poisson

# How a policy looks in every picture of serving.
LOOKS = {
    "vllm_v0": SERIES[0],
    "orca": SERIES[2],
    "sarathi_serve": SERIES[1],
    "chunked_only": SERIES[4],
    "hybrid_only": SERIES[3],
}

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
