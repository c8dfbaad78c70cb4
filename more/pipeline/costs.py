"""What a batch costs on each stage of a pipeline, and between two stages. In seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from batch import Batch
from command.checks import UserError, shown
from configs import Link
from costmodel import CostModel, make_batch


class StageCosts:
    """Seconds of a batch on each stage, from the whole model's cost model.

    layers: how many each stage has. All layers cost the same, with their all-reduces. The last
    stage also has the head. The first one has the embedding. That is a look-up, which the cost
    model does not count. The first one also waits for the host, which prepares each batch there.
    """

    def __init__(self, cost_model: CostModel, layers: Sequence[int]):
        if sum(layers) != cost_model.model.n_layer or min(layers) < 1:
            raise UserError(
                f"stages have {list(layers)} layers; each needs at least one, and all together"
                f" {cost_model.model.n_layer}, as the model has"
            )
        self.cost_model = cost_model
        self.layers = list(layers)
        self.shares = [count / cost_model.model.n_layer for count in layers]
        others = cost_model.others
        self._head = cache(lambda tokens, sampled: others(tokens, sampled) - others(tokens, 0))

    def __call__(self, batch: Batch) -> list[float]:
        if len(self.shares) == 1:
            return [self.cost_model.seconds(batch)]
        whole = self.cost_model.kernels(batch)
        host = self.cost_model.host
        head = self._head(*self.cost_model.rows(batch))
        first, *seconds = [(whole - head) * share for share in self.shares]
        seconds[-1] += head
        first = host.around(first, len(batch.decodes) + len(batch.chunks))
        return [first, *(host.factor * each for each in seconds)]


def seconds_of_rows(cost_model: CostModel) -> Callable[[int], float]:
    """A function: n -> seconds of one iteration on the whole model, which prefills n tokens.

    TD-Pipe measures the same, and uses it for n decodes, too (profiler-results of its artefact).
    The host is left out: stage 0 alone waits for it, and n decodes are more than one request.
    """
    return cache(lambda rows: cost_model.kernels(make_batch([(0, rows, rows)])))


def even_layers(n_layer: int, stages: int) -> list[int]:
    """Layers of each stage, as evenly as possible.

    If they do not divide evenly, the last stages get one less: the last one also has the head.
    """
    if type(stages) is not int or not 1 <= stages <= n_layer:
        raise UserError(
            f"stages is {shown(stages)}; a model of {n_layer} layers allows 1 to {n_layer}"
        )
    return [n_layer // stages + (stage < n_layer % stages) for stage in range(stages)]


@dataclass(frozen=True)
class Hop:
    """The way from one stage to the next: T rows of H activations.

    A stage sends while it computes the next micro-batch.
    """

    latency: float = 0.0  # s
    seconds_per_token: float = 0.0

    @staticmethod
    def over(link: Link, cost_model: CostModel) -> "Hop":
        """Every GPU of a stage sends all rows to its peer over a port of its own.

        We assume that the link reaches the same share of its data sheet as the memory does.
        """
        if not isinstance(link, Link):
            raise UserError(
                f"{link.name} joins the GPUs of a stage; give one link between two stages"
            )
        size = cost_model.model.hidden * cost_model.bytes_per_value
        return Hop(link.latency, size / link.reached(cost_model.efficiency.memory))
