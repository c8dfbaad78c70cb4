"""An anchor: a benchmark of the user's own server, which tells how its iterations differ from ours.

It reads the JSON file of `vllm bench serve --save-result`, of one load. That load is replayed in
the simulation: as many requests, as long, sent as they were. One factor on the seconds of every
iteration then makes the prediction meet the measurement. One factor cannot mend all: what remains
is in `compared`. No torch.

Lengths are each request's own with --save-detailed. Else they are the mean, for all requests.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from batch import Request
from command.checks import MOST, UserError, range_of, shown
from command.cli import read_text
from more.serving.comparison import OURS, Anchor, measure_of
from more.serving.engines import vllm_defaults
from more.serving.planner import MOST as MOST_REPLAYED
from more.serving.planner import Replica
from more.serving.traffic import FASTEST, MOST_JSON, MOST_REQUESTS, MOST_TOKENS, gamma
from timeline import Trace

STATISTICS = ("mean", "median", "P99")
QUANTITIES = ("requests", "output", *(f"{s} {of}" for of in ("TTFT", "TPOT", "ITL")
              for s in STATISTICS))  # fmt: skip
# a server's iterations take from 1/FAR of ours to FAR of them; TURNS: of a search for the factor
FAR, TURNS = 16.0, 12
FAILED = 0.1  # share of requests, at most
FEW = 32  # requests: of fewer, a server's first ones are most
STEPS, MOST_OUTPUT = 60_000, 2 * 10**7  # of a replay: iterations, about, and output tokens
SAME = "are --model, --gpu and --tp those of the server?"
BUSY = 0.75  # of the clients, on average: then they limit the load, and not the rate
LATENCY = 10.0**9  # ms


@dataclass(frozen=True)
class Run:
    """One load of a benchmark, and what was measured: see `measure_of`.

    lengths: prompt and output tokens of each request. clients: of a closed loop. rate: requests/s,
    whose gaps have this `cv`; without both, all requests come at once. budget, size: C and B of the
    server; None: unknown.
    """

    where: str
    lengths: list[tuple[int, int]]
    measured: dict[str, float]
    clients: int | None = None
    rate: float | None = None
    cv: float = 1.0
    model: str = ""
    budget: int | None = None
    size: int | None = None
    failed: int = 0
    detailed: bool = False  # lengths are each request's own

    @property
    def load(self) -> str:
        if self.clients:
            return f"{self.clients} clients" if self.clients > 1 else "1 client"
        return f"{self.rate:.4g} requests/s" if self.rate else "all at once"

    @property
    def matched(self) -> str:
        """The quantity that the factor makes equal.

        In a closed loop, or a burst, the server decides how many tokens it makes in a second. At a
        rate, the load does. And where each request's lengths are unknown, so is how empty the
        batches are while the longest requests end. Then the mean time between tokens tells. Raises
        UserError.
        """
        found = next((name for name in ("mean TPOT", "mean ITL") if name in self.measured), None)
        if not self.rate and (self.detailed or not found or len(set(self.lengths)) == 1):
            return "output"
        if not found:
            raise UserError(
                f"{self.where}: at {self.load}, without a time between tokens (mean_tpot_ms), it"
                " says nothing of the iterations; send all at once, or with --max-concurrency"
            )
        return found

    def requests(self) -> list[Request]:
        """Those that are replayed: all, or as many as take about STEPS iterations."""
        most = float(MOST_REPLAYED)
        if self.clients:
            each = statistics.fmean(output for _, output in self.lengths)
            most = max(self.clients, STEPS * self.clients / each)
        elif self.rate:
            most = max(FEW, STEPS * self.rate * self.measured[self.matched] / 1e3)
        lengths = self.lengths[: int(min(most, MOST_REPLAYED))]
        if (tokens := sum(output for _, output in lengths)) > MOST_OUTPUT:
            raise UserError(f"{self.where}: {tokens} output tokens; {MOST_OUTPUT} can be replayed")
        arrivals = gamma(len(lengths), self.rate or FASTEST, self.cv if self.rate else 0.0)
        return [
            Request(i, range(prompt), output, arrival=arrivals[i] if self.rate else 0.0)
            for i, (prompt, output) in enumerate(lengths)
        ]

    def notes(self, model: str) -> list[str]:
        """What the user should know. model: of --model."""
        count, found = len(self.lengths), []
        ours, theirs = (
            re.sub(r"\W|_", "", name.lower()) for name in (Path(model).name, self.model)
        )
        if theirs and ours not in theirs:
            found.append(f"its model_id is {shown(self.model)}, and --model {model}: the same?")
        if not self.detailed:
            found.append("lengths are the means; with --save-detailed, each request's own")
        if self.failed:
            found.append(f"{self.failed} requests failed: without them")
        if count < FEW:
            found.append(f"{count} requests: a server's first ones are slow; send {FEW} or more")
        return found


# --------------------------------------------------------------------------------------- the files


def number_of(
    where: str, entry: Mapping[str, object], key: str, least: float, most: float = MOST,
    whole: bool = False, needed: bool = True,
) -> float | None:  # fmt: skip
    """The number of a key; None: it is not there, or null. Raises UserError for all else.

    where: what an error calls the object.
    """
    value = entry.get(key)
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:  # of --metadata
        value = int(value)
    if value is not None or needed:
        range_of(least, most, whole=whole).check(f"{where}: {key}", value)
    return value


def even(count: int, prompts: int, outputs: int) -> list[tuple[int, int]]:
    """Lengths of requests, as even as these totals of `count` requests allow."""
    places = range(min(count, MOST_REPLAYED) + 1)
    ends = [(i * prompts // count, i * outputs // count) for i in places]
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(ends)]


def of_vllm(where: str, entry: Mapping[str, object]) -> Run:
    """An object of `vllm bench serve`."""
    number = partial(number_of, where, entry)
    whole, maybe = partial(number, whole=True), partial(number, whole=True, needed=False)
    if ramp := entry.get("ramp_up_strategy"):
        raise UserError(f"{where}: ramp_up_strategy is {shown(ramp)}; a steady load is needed")
    asked = maybe("num_prompts", 1, MOST_REQUESTS) or 0
    done = whole("completed", 1, MOST_REQUESTS)
    if (failed := max(0, asked - done)) > FAILED * asked:
        raise UserError(
            f"{where}: {failed} of {asked} requests failed; at most {100 * FAILED:g} % may"
        )
    prompts = whole("total_input_tokens", done, MOST_TOKENS * done)
    outputs = whole("total_output_tokens", done, MOST_TOKENS * done)
    own = detailed(where, entry)
    lengths = own or even(done, prompts, outputs)
    times = {
        name: number(f"{name.lower().replace(' ', '_')}_ms", 0, LATENCY, needed=False)
        for name in QUANTITIES[2:]
    }
    measured = {
        "requests": number("request_throughput", 1 / FASTEST, FASTEST),
        "output": number("output_throughput", 1 / FASTEST, FASTEST),
    } | {name: value for name, value in times.items() if value}  # 0: no request had one
    clients = maybe("max_concurrency", 1)
    rate, shape = entry.get("request_rate"), entry.get("burstiness")
    if not clients and rate is None:
        raise UserError(
            f"{where}: neither request_rate nor max_concurrency; give one, request_rate as"
            ' "inf" for all at once'
        )
    rate = None if rate in (None, "inf", math.inf) else number("request_rate", 1e-6, FASTEST)
    if clients and rate:  # Little's law: how many ran at once
        each = measured.get("mean TTFT", 0) + measured.get("mean TPOT", 0) * outputs / done
        busy = measured["requests"] * each / 1e3 >= BUSY * clients
        clients, rate = (clients, None) if busy else (None, rate)
    if shape not in (None, math.inf):
        shape = number("burstiness", 1e-6, FASTEST)
    model = entry.get("model_id")
    return Run(
        where, lengths, measured, clients, rate, 1.0 if shape is None else shape**-0.5,
        model if isinstance(model, str) else "",
        maybe("max_num_batched_tokens", 1),
        maybe("max_num_seqs", 1), failed, bool(own),
    )  # fmt: skip


def detailed(where: str, entry: Mapping[str, object]) -> list[tuple[int, int]]:
    """Each request's own lengths, of --save-detailed; those that failed have no output."""
    sides = [entry.get(f"{side}_lens") for side in ("input", "output")]
    if sides == [None, None]:
        return []
    for side, values in zip(("input", "output"), sides, strict=True):
        if not isinstance(values, list) or not 0 < len(values) <= MOST_REQUESTS:
            raise UserError(f"{where}: {side}_lens is {shown(values)}; a list is needed")
        for place, value in enumerate(values):
            range_of(0, MOST_TOKENS).check(f"{where}: {side}_lens[{place}]", value)
    if len(sides[0]) != len(sides[1]):
        raise UserError(
            f"{where}: {len(sides[0])} input_lens and {len(sides[1])} output_lens; there"
            " must be one of each for a request"
        )
    found = [(prompt, output) for prompt, output in zip(*sides, strict=True) if prompt and output]
    if not found:
        raise UserError(f"{where}: no request has both a prompt and an output")
    return found


def read_load(path: Path) -> Run:
    """The load of a benchmark file. Raises UserError."""
    text = read_text(path, MOST_JSON)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file of one load ({error})") from None
    if not isinstance(found, dict) or "completed" not in found:
        raise UserError(
            f"{path}: {shown(found)} is no object with a key completed, as `vllm bench serve"
            " --save-result` writes it of one load"
        )
    return of_vllm(str(path), found)


# -------------------------------------------------------------------------------------- the factor


def scaled(replica: Replica, factor: float) -> Replica:
    """One whose iterations take `factor` times as long."""
    cost = copy(replica.cost)
    cost.host = replace(cost.host, factor=factor)
    return replace(replica, cost=cost)


def find_factor(seen: Callable[[float], float], wanted: float, is_time: bool) -> float:
    """The factor on iterations with which `seen(factor)` is what was measured.

    A throughput is matched where the load waits for nothing but iterations: so it falls by that
    factor. (On a pipeline, hops take a little time, too.) A time grows with the factor: bisection
    on a logarithmic scale.
    """
    if not is_time:
        return seen(1.0) / wanted
    least, most = 1 / (2 * FAR), 2 * FAR
    for _ in range(TURNS):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if seen(middle) < wanted else (least, middle)
    return math.sqrt(least * most)


def replay(run: Run, server: Replica, budget: int, factor: float = 1.0) -> Trace:
    """The load on a replica that has the server's C and B, if iterations take `factor` as long."""
    return scaled(server, factor).serve(run.requests(), OURS, budget, run.clients)


def anchor_of(path: Path, replica: Replica, model: str) -> Anchor:
    """Replays the file's load on a replica. model: of --model.

    The server had vLLM's defaults for that GPU, unless the file (--metadata) says otherwise. Raises
    UserError where it cannot have run the load, or its factor is none of a server.
    """
    run = read_load(path)
    usual, size = vllm_defaults(replica.cost.gpu)
    server, budget = replace(replica, max_batch_size=run.size or size), run.budget or usual
    cache_tokens = server.holds(budget)
    if run.clients and replica.stages > 1:
        raise UserError(f"{path}: {run.load}: a closed loop needs --pp 1")
    longest = max(each.most_cached for each in run.requests())
    if cache_tokens is not None and longest > cache_tokens:
        raise UserError(
            f"{path}: a request of {longest} tokens, and a cache of {cache_tokens} here; {SAME}"
        )
    matched, wanted = run.matched, run.measured[run.matched]
    factor = find_factor(
        lambda factor: measure_of(matched, replay(run, server, budget, factor)), wanted,
        matched != "output",
    )  # fmt: skip
    if not 1 / FAR <= factor <= FAR:
        raise UserError(
            f"{path}: {matched} of {wanted:.4g} takes iterations of {factor:.3g} x ours;"
            f" {1 / FAR:g} to {FAR:g} is allowed; {SAME}"
        )
    traces = [replay(run, server, budget, each) for each in (1.0, factor)]
    compared = {
        name: [run.measured[name], *(measure_of(name, trace) for trace in traces)]
        for name in QUANTITIES
        if name in run.measured
    }
    title = f"{run.load}: {len(run.lengths)} requests, C = {budget}, B = {server.size(budget)}"
    return Anchor(path.name, factor, title, matched, compared, run.notes(model))
