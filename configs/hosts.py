"""The host: the CPU's part of an iteration. A GPU may have to wait. Pure data, with sources.

Kernels do not explain all of an iteration. Before each one, a serving engine schedules and prepares
its inputs. After it, the engine reads the tokens and prepares the answers. Early engines did this
one after the other. Today's do it while the GPU runs the iteration before (async scheduling).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Seconds of the host: `iteration`, and `request` for each request in the batch.

    overlapped: the host works while the GPU runs the iteration before; else the GPU waits. We
    compare with the kernels of this iteration, as if the one before took as long. gap: for each
    iteration, seconds that the GPU waits even then. A beam search is one request. factor: on all
    of it, where a server was measured (more/serving/anchor.py).
    """

    iteration: float = 0.0
    request: float = 0.0
    overlapped: bool = False
    gap: float = 0.0
    factor: float = 1.0
    source: str = ""

    def around(self, kernels: float, requests: int) -> float:
        """Seconds of an iteration whose kernels take `kernels` seconds."""
        own = self.iteration + self.request * requests
        return self.factor * (self.gap + (max(kernels, own) if self.overlapped else kernels + own))


VLLM = "github.com/vllm-project/vllm"
HOSTS: dict[str, Host] = {
    # where nothing is known, as of SARATHI's, Orca's and TD-Pipe's own software
    "none": Host(source="not counted"),
    "vllm-2024": Host(
        5e-3,
        3.2e-3 / 31,
        source=f"{VLLM}/issues/6854 (2024): a GPU waits 5 to 13 ms in each step. We take 5, and"
        " for each request what /issues/6913 has: 0.2 ms for the outputs of 1 request, 3.4 ms for"
        " those of 32 (Llama-3-70B, four H100). Beyond 32, that is an extrapolation: 31 ms at 256",
    ),
    "vllm-2025": Host(
        request=5.5e-3 / 256,
        source=f"{VLLM}/issues/10634 (November 2024): 5 to 6 ms between two decodes of 256 requests"
        " (Llama-2-7B). That all of it grows with the requests is our reading",
    ),
    "vllm-async": Host(
        request=5.5e-3 / 256,
        overlapped=True,
        gap=1.6e-4,
        source=f"{VLLM}/pull/11133, a prototype on one GPU: with async scheduling, 5 to 6 ms become"
        " 150 to 170 us (256 requests). /pull/27614 makes async scheduling the default",
    ),
    "sglang-0.3": Host(
        4.6e-4,
        9.5e-6,
        source="github.com/sgl-project/sglang: overlapped scheduling saves 0.6 of 5.2 ms with 16"
        " requests (/pull/5608) and a tenth of the throughput with 740 (/pull/1738), 75 ms. 0.4 is"
        " the first version that has it by default",
    ),
    # experiments/serve_phases.py prints these three numbers
    "sarathi-artefact": Host(
        1.923e-2,
        9.618e-4,
        source="github.com/microsoft/sarathi-serve, osdi-experiments/figure-2: Yi-34B on two A100s,"
        " iterations of 1 and 128 decodes beyond our kernels",
    ),
    "sarathi-artefact-constant": Host(5.735e-2, source="the same, 32 decodes; for all iterations"),
}
