"""An anchor: a benchmark of the user's own server, which tells how its iterations differ from ours.

It reads the JSON file of `vllm bench serve --save-result`, the JSONL file of SGLang's
bench_serving, or guidellm's benchmarks.json. Loads are replayed in the simulation: as many
requests, as long, sent as they were. No torch.

One load gives a factor on the seconds of every iteration: with it, the prediction meets the
measurement. Of two loads, the lightest and the heaviest of a file give a factor and a gap, so that
an iteration takes factor x (ours + gap). The gap is what each iteration takes beside its kernels,
however large it is. It may be negative: then light iterations are priced too long. A middle load is
left out, and says what the anchor is worth. What remains is in `compared`.

Lengths are each request's own where the file has them. Else they are the mean, for all requests.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from batch import Request
from command.checks import MOST, UserError, range_of, shown
from command.cli import read_text
from configs import GPU
from costmodel import make_batch
from more.loading.priced import shape_of
from more.serving.capacity import Deployment
from more.serving.comparison import OURS, Anchor, Compared, measure_of
from more.serving.engines import SGLANG_PREFILL, sglang_defaults, vllm_defaults
from more.serving.planner import MOST as MOST_REPLAYED
from more.serving.traffic import FASTEST, MOST_JSON, MOST_REQUESTS, MOST_TOKENS, at_rate, gamma
from timeline import Trace

STATISTICS = ("mean", "median", "P99")
QUANTITIES = (
    "requests",
    "output",
    *(f"{s} {of}" for of in ("TTFT", "TPOT", "ITL") for s in STATISTICS),
)
# a server's iterations take from 1/FAR of ours to FAR of them; TURNS: of a search for the factor
FAR = 16.0
TURNS = 12
FAILED = 0.1  # share of requests, at most
FEW = 32  # requests: of fewer, a server's first ones are most
# of a replay: iterations, about, and output tokens
STEPS = 60_000
MOST_OUTPUT = 2 * 10**7
SAME = "are --model, --gpu and --tp those of the server?"
FORMAT = re.compile("fp[48]|..fp4|awq|gptq|int[48]|w[48]a[0-9]+|[48]bit|gguf")  # of weights
# Of two loads: their iterations differ by so much at least, or a gap would be of noise. ROUNDS: of
# a search for both numbers; SHARE: of our shortest iteration, which must remain
APART = 1.2
ROUNDS = 3
CHECKED = 3  # loads of a file, of which one is left out
SHARE = 0.2
BUSY = 0.75  # of the clients, on average: then they limit the load, and not the rate
LATENCY = 10.0**9  # ms
# vllm-project/guidellm, src/guidellm/benchmark/schemas: vLLM's name of a number, and its place in
# `metrics`. Its time_per_output_token counts the first token, too: it is no TPOT.
GUIDELLM = {
    "completed": "request_totals.successful",
    "errored": "request_totals.errored",
    "total_input_tokens": "prompt_token_count.successful.total_sum",
    "total_output_tokens": "output_token_count.successful.total_sum",
    "request_throughput": "requests_per_second.successful.mean",
    "output_throughput": "output_tokens_per_second.successful.mean",
    "mean_ttft_ms": "time_to_first_token_ms.successful.mean",
    "mean_itl_ms": "inter_token_latency_ms.successful.mean",
}
UNSET = ("", "auto", "default", "none", "null")  # texts of a setting that leave it to the engine
OFF = ("0", "false")
Load = TypeVar("Load")
STRATEGIES = ("synchronous", "concurrent", "throughput", "constant", "poisson")  # steady ones


@dataclass(frozen=True)
class Run:
    """One load of a benchmark, and what was measured: see `measure_of`.

    lengths: prompt and output tokens of each request. clients: of a closed loop. rate: requests/s,
    whose gaps have this `cv`; without both, all requests come at once. budget, size, tp: C, B and
    TP of the server; None: unknown. said: by the reader of the file.
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
    policy: str = OURS
    defaults: Callable[[GPU], tuple[int, int]] = vllm_defaults  # C and B of the engine
    said: Sequence[str] = ()
    tp: int | None = None
    quantization: str = ""  # of the weights; "": unknown

    @property
    def load(self) -> str:
        if self.clients:
            return f"{self.clients} clients" if self.clients > 1 else "1 client"
        return f"{self.rate:.4g} requests/s" if self.rate else "all at once"

    @property
    def at_once(self) -> float:
        """Requests in flight, by Little's law; 0: the file has no latencies."""
        later = self.measured.get("mean TPOT") or self.measured.get("mean ITL", 0)
        output = statistics.fmean(output for _, output in self.lengths)
        latency = self.measured.get("mean TTFT", 0) + later * output
        return self.measured["requests"] * latency / 1e3

    @property
    def alike(self) -> bool:
        """All requests are as long, but for a token (of `even`)."""
        return all(max(sizes) - min(sizes) <= 1 for sizes in zip(*self.lengths, strict=True))

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
        requests = [
            Request(i, range(prompt), output, arrival=arrivals[i] if self.rate else 0.0)
            for i, (prompt, output) in enumerate(lengths)
        ]
        # vLLM's benchmark, too, stretches what it draws, so that the mean rate is as asked
        return at_rate(requests, self.rate) if self.rate else requests

    def too_fast(self, replica: Deployment) -> bool:
        """Whether the GPUs cannot compute all these tokens, even at their peak."""
        model = replica.cost_model.model
        peak = replica.gpus * replica.cost_model.gpu.peak * (2 if model.weights == "fp8" else 1)
        sizes = {name: inputs * outputs for name, (inputs, outputs) in model.linears.items()}
        ffn = sizes.pop("ffn_ln1") + sizes.pop("ffn_ln2")
        weights = model.n_layer * (sum(sizes.values()) + max(1, model.chosen) * ffn)
        means = map(statistics.fmean, zip(*self.lengths, strict=True))
        prompt, output = (2 * weights * mean / peak for mean in means)  # s
        first = self.measured.get("mean TTFT", math.inf)
        return self.measured["requests"] * (prompt + output) > 1 or 1e3 * prompt > first

    def notes(self, replica: Deployment) -> list[str]:
        """What the user should know."""
        count = len(self.lengths)
        model = replica.cost_model.model
        found = list(self.said)
        ours, theirs = (re.sub(r"\W|_", "", name.lower()) for name in (model.name, self.model))
        known = shape_of(self.model)
        shape = attrgetter("linears", "parameters", "chosen")
        if shape(known) != shape(model) if known else ours not in theirs and theirs:
            found.append(f"its model is {shown(self.model)}, and --model {model.name}: the same?")
        packed = formats(f"{self.model} {self.quantization}")
        own = formats(f"{model.name} {model.weights}")
        if (known or packed) and packed != own:
            each = (" ".join(sorted(names)) or "16 bits" for names in (packed, own))
            found.append("its weights are of {}, and ours of {}: the same?".format(*each))
        if self.tp not in (None, replica.tp):
            found.append(f"its server has TP {self.tp}, and --tp {replica.tp}: the same?")
        if self.too_fast(replica):
            found.append(
                "Warning: faster than this GPU at its peak: a prefix cache had the prompts. Send"
                " new\n  ones (another --seed), or start the server with"
                " --no-enable-prefix-caching (SGLang:\n  --disable-radix-cache)"
            )
        if not self.detailed:
            found.append("lengths are the means; with --save-detailed, each request's own")
        if self.failed:
            found.append(f"{self.failed} requests failed: without them")
        if count < FEW:
            found.append(f"{count} requests: a server's first ones are slow; send {FEW} or more")
        return found


def formats(text: str) -> set[str]:
    """The formats of weights that are words of a text."""
    return set(filter(FORMAT.fullmatch, re.split(r"[\W_]+", text.lower())))


# --------------------------------------------------------------------------------------- the files


def number_of(
    where: str,
    entry: Mapping[str, object],
    key: str,
    least: float,
    most: float = MOST,
    whole: bool = False,
    needed: bool = True,
) -> float | None:
    """The number of a key; None: it is not there, or left to the engine. Raises UserError for all
    else.

    where: what an error calls the object.
    """
    value = entry.get(key)
    if isinstance(value, str):  # of --metadata
        if value.lower() in UNSET and not needed:
            return None
        value = int(value) if re.fullmatch("-?[0-9]{1,9}", value) else value
    if value is not None or needed:
        range_of(least, most, whole=whole).check(f"{where}: {key}", value)
    return value


def even(count: int, prompts: int, outputs: int) -> list[tuple[int, int]]:
    """Lengths of requests, as even as these totals of `count` requests allow."""
    places = range(min(count, MOST_REPLAYED) + 1)
    ends = [(i * prompts // count, i * outputs // count) for i in places]
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(ends)]


def of_guidellm(where: str, entry: Mapping[str, object]) -> dict[str, object]:
    """One of guidellm's benchmarks, under vLLM's names."""

    def at(place: str) -> object:
        value = entry
        for name in place.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    found = dict(entry)
    kind = at("config.strategy.type_")
    requests = at("requests.successful")
    for key, place in GUIDELLM.items():
        found[key] = at(f"metrics.{place}")
        if found[key] is not None or not key.endswith("_ms"):
            range_of(0, 1e15, whole=False).check(f"{where}: metrics.{place}", found[key])
        if key.endswith("_tokens"):
            found[key] = round(found[key])
    if kind not in STRATEGIES:
        allowed = ", ".join(STRATEGIES)
        raise UserError(f"{where}: config.strategy.type_ is {shown(kind)}; it must be of {allowed}")
    for key, name in (("input_lens", "prompt_tokens"), ("output_lens", "output_tokens")):
        if isinstance(requests, list) and len(requests) == found["completed"]:
            found[key] = [each.get(name) or 0 for each in requests if isinstance(each, dict)]
    clients = at("config.strategy.streams") or at("config.strategy.max_concurrency")
    found["max_concurrency"] = 1 if kind == "synchronous" else clients
    found["request_rate"] = at("config.strategy.rate") or "inf"
    found["burstiness"] = math.inf if kind == "constant" else 1.0
    found["num_prompts"] = found["completed"] + found["errored"]
    return found | {"model_id": at("config.backend.model")}


def run_of(where: str, entry: object) -> Run:
    """An object of `vllm bench serve` or bench_serving, or one of guidellm's benchmarks."""
    said = ["read as vLLM's format: latencies in ms"]
    policy = OURS
    flags = {}
    if isinstance(entry, dict) and "metrics" in entry:
        entry = of_guidellm(where, entry)
        said = ["read as guidellm's format: latencies in ms. It names no engine: vLLM is taken"]
    if not isinstance(entry, dict) or "completed" not in entry:
        raise UserError(
            f"{where}: {shown(entry)} is no object with a key completed, as `vllm bench serve"
            " --save-result` and SGLang's bench_serving write it, nor guidellm's benchmarks"
        )
    if sglang := str(entry.get("backend")).startswith("sglang"):
        flags = entry["server_info"] if isinstance(entry.get("server_info"), dict) else {}
        policy = OURS if flags.get("enable_mixed_chunk") else "prefill_first"
    flag = partial(number_of, where, flags, least=1, whole=True, needed=False)
    budget = number_of(where, flags, "chunked_prefill_size", -1, whole=True, needed=False)
    if budget is not None and budget < 1:  # -1: off; SGLang takes 0 as well
        budget = flag("max_prefill_tokens") or SGLANG_PREFILL
        policy = f"vllm_v0:{budget}"
    elif str(entry.get("enable_chunked_prefill")).lower() in OFF:  # of --metadata
        policy = "hybrid_only"
    if sglang:
        said = [f"read as SGLang's format: latencies in ms, batches of {policy}"]
    if policy not in (OURS, "prefill_first"):
        said.append(f"its server has no chunked prefill: {policy} runs whole prompts")
    number = partial(number_of, where, entry)
    whole = partial(number, whole=True)
    maybe = partial(number, whole=True, needed=False)
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
    rate = entry.get("request_rate")
    burst = entry.get("burstiness")
    if not clients and rate is None:
        raise UserError(
            f"{where}: neither request_rate nor max_concurrency; give one, request_rate as"
            ' "inf" for all at once'
        )
    rate = (
        None
        if rate in (None, "inf", "Infinity", math.inf)
        else number("request_rate", 1e-6, FASTEST)
    )
    if clients and rate:  # Little's law: how many ran at once
        later = measured.get("mean TPOT") or measured.get("mean ITL", 0)
        each = measured.get("mean TTFT", 0) + later * outputs / done
        busy = measured["requests"] * each / 1e3 >= BUSY * clients
        clients, rate = (clients, None) if busy else (None, rate)
    if burst not in (None, math.inf):
        burst = number("burstiness", 1e-6, FASTEST)
    # of an even share, where several replicas stand behind one address
    shared = flag("dp_size") or 1
    apart = flags.get("enable_dp_attention")
    if apart and shared > 1:
        said.append(f"its attention is of {shared} replicas (enable_dp_attention), and ours of one")
    replicas = maybe("data_parallel_size", 1) or (1 if apart else shared)
    if replicas > 1:
        if clients and clients < replicas:
            raise UserError(f"{where}: {clients} clients for {replicas} replicas; give each one")
        said.append(f"one of {replicas} replicas, with its even share of the load")
        measured |= {name: measured[name] / replicas for name in QUANTITIES[:2]}
        lengths = lengths[::replicas]
        if clients:
            clients //= replicas
        if rate:
            rate /= replicas
    model = entry.get("model_id") or flags.get("model_path")
    packed = entry.get("quantization") or flags.get("quantization")
    return Run(
        where,
        lengths,
        measured,
        clients,
        rate,
        1.0 if burst is None else burst**-0.5,
        model if isinstance(model, str) else "",
        maybe("max_num_batched_tokens", 1) or budget,
        maybe("max_num_seqs", 1) or flag("max_running_requests"),
        failed,
        bool(own),
        policy,
        sglang_defaults if sglang else vllm_defaults,
        said,
        maybe("tensor_parallel_size", 1) or flag("tp_size"),
        packed if isinstance(packed, str) else "",
    )


def detailed(where: str, entry: Mapping[str, object]) -> list[tuple[int, int]]:
    """Each request's own lengths, of --save-detailed; those that failed have no output."""
    sides = [entry.get(name) for name in ("input_lens", "output_lens")]
    if sides == [None, None]:
        return []
    if not all(isinstance(side, list) for side in sides) or len(sides[0]) != len(sides[1]):
        raise UserError(f"{where}: input_lens and output_lens: give two lists of the same length")
    for value in (value for side in sides for value in side):
        range_of(0, MOST_TOKENS).check(f"{where}: one of input_lens or output_lens", value)
    found = [(prompt, output) for prompt, output in zip(*sides, strict=True) if prompt and output]
    if not found:
        raise UserError(f"{where}: no request has both a prompt and an output")
    return found


def read_load(path: Path) -> Run:
    """The load of a benchmark file; of several, the middle one. Raises UserError."""
    runs = read_loads(path)
    return runs[len(runs) // 2]


def read_loads(path: Path) -> list[Run]:
    """The loads of a benchmark file, the lightest first: the fewest requests in flight.

    Raises UserError if none can be read.
    """
    text = read_text(path, MOST_JSON).strip()
    decoder = json.JSONDecoder()
    entries = []
    while text or not entries:
        try:
            entry, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a JSON file of loads ({error})") from None
        entries = [*entries, entry]
        text = text[end:].lstrip()
    if isinstance(entries[0], dict) and isinstance(entries[0].get("benchmarks"), list):
        entries = [entries[0] | each for each in entries[0]["benchmarks"] if isinstance(each, dict)]
    runs = []
    refused = []
    for entry in entries or [None]:
        try:
            runs.append(run_of(str(path), entry))
        except UserError as error:
            refused.append(error)
    if not runs:
        raise refused[0] from None
    if refused:
        which = f"{len(runs)} of {len(entries)} loads can be read: {refused[0]}"
        runs = [replace(run, said=[which, *run.said]) for run in runs]
    return sorted(runs, key=lambda run: (run.at_once, run.measured["requests"]))


# -------------------------------------------------------------------------------------- the factor


def scaled(replica: Deployment, factor: float, gap: float = 0.0) -> Deployment:
    """One whose iterations take `factor` x (ours + `gap` seconds)."""
    host = replica.cost_model.host
    return replace(replica, host=replace(host, factor=factor, gap=host.gap + gap))


def anchored(anchor: Anchor, replica: Deployment, other: Deployment) -> Deployment:
    """Another layout, as the anchor of `replica` has it.

    A gap above 0 is the host's time: it is the same for all. One below 0 is of kernels: as the
    kernels, it is shorter on more GPUs, and is shared by the stages.
    """
    gap = anchor.gap
    if gap < 0:
        gap *= shortest(other) / shortest(replica) / other.stages
    return scaled(other, anchor.factor, gap)


def shortest(replica: Deployment) -> float:
    """Seconds of an iteration of one decode."""
    return replica.cost_model.seconds(make_batch(decodes=1, context=2))


def find_factor(seen: Callable[[float], float], wanted: float, is_time: bool) -> float:
    """The factor on iterations with which `seen(factor)` is what was measured.

    A throughput is matched where the load waits for nothing but iterations: so it falls by that
    factor. (On a pipeline, hops take a little time, too.) A time grows with the factor: bisection
    on a logarithmic scale.
    """
    if not is_time:
        return seen(1.0) / wanted
    least = 1 / (2 * FAR)
    most = 2 * FAR
    for _ in range(TURNS):
        middle = math.sqrt(least * most)
        least, most = (middle, most) if seen(middle) < wanted else (least, middle)
    return math.sqrt(least * most)


def replay(
    run: Run, replica: Deployment, factor: float = 1.0, gap: float = 0.0, step: float = 0.0
) -> Trace:
    """The load on a replica, if its iterations take `factor` x (ours + `gap` seconds).

    The server has the C and B of the run, or its engine's defaults. step: see `run_closed`.
    """
    server, budget = server_of(run, replica)
    server = scaled(server, factor, gap)
    return server.serve(run.requests(), run.policy, budget, run.clients, step=step)


def server_of(run: Run, replica: Deployment) -> tuple[Deployment, int]:
    """The replica with the server's B, and its C."""
    usual, size = run.defaults(replica.cost_model.gpu)
    return replace(replica, max_batch_size=run.size or size), run.budget or usual


def check(run: Run, replica: Deployment) -> None:
    """Raises UserError where the replica cannot have run the load."""
    server, budget = server_of(run, replica)
    cache_tokens = server.holds(budget)
    if run.clients and replica.stages > 1:
        raise UserError(f"{run.where}: {run.load}: a closed loop needs --pp 1")
    longest = max(each.most_cached for each in run.requests())
    if longest > cache_tokens:
        room = f"a cache of {cache_tokens} here"
        raise UserError(f"{run.where}: a request of {longest} tokens, and {room}; {SAME}")


def factor_of(replica: Deployment, run: Run, gap: float = 0.0) -> float:
    """With it, the run's `matched` is as measured."""
    matched = run.matched
    return find_factor(
        lambda factor: measure_of(matched, replay(run, replica, factor, gap)),
        run.measured[matched],
        matched != "output",
    )


def iteration_of(replica: Deployment, run: Run, factor: float, gap: float) -> float:
    return mean_iteration(replay(run, replica, factor, gap), run.matched != "output")


def mean_iteration(trace: Trace, is_time: bool) -> float:
    """Mean seconds of an iteration. is_time: of those that a time between tokens is the mean of."""
    iterations = trace.iterations
    weights = [each.num_decodes if is_time else 1 for each in iterations]
    total = sum(each.seconds * weight for each, weight in zip(iterations, weights, strict=True))
    return total / sum(weights)


def find_line(
    light: Load,
    heavy: Load,
    least: float,
    factor_of: Callable[[Load, float], float],
    iteration_of: Callable[[Load, float, float], float],
) -> tuple[float, float] | str:
    """The factor and the gap (s) with which both loads are as measured; or why there are none.

    If iterations of ours take x1 and x2 seconds, and those of the server t1 and t2: the line
    through both points. In a closed loop or a burst, batches are the same with any factor and gap,
    and the first line is it. At a rate they are not: a few rounds.

    least: seconds of our shortest iteration. factor_of: (load, gap) -> the factor with which that
    load is as measured. iteration_of: (load, factor, gap) -> mean seconds of an iteration.
    """
    gap = 0.0
    for _ in range(ROUNDS):
        ours = []
        theirs = []
        for load in (light, heavy):
            factor = factor_of(load, gap)
            theirs.append(iteration_of(load, factor, gap))
            ours.append(theirs[-1] / factor - gap)
        if max(ours) < APART * min(ours):
            return f"iterations of both loads are alike (less than a factor of {APART:g})"
        factor = (theirs[1] - theirs[0]) / (ours[1] - ours[0])
        if not 1 / FAR <= factor <= FAR:
            return f"the factor would be {factor:.3g}; {1 / FAR:g} to {FAR:g} is allowed"
        gap = theirs[0] / factor - ours[0]
        if gap < (SHARE - 1) * least:
            return f"the gap would be {1e3 * gap:.3g} ms, nearly all of our shortest iteration"
    return factor, gap


def anchor_of(path: Path, replica: Deployment) -> Anchor:
    """Replays the file's loads on a replica. A file of one load gives a factor alone.

    The server had its engine's defaults for that GPU, unless the file says otherwise. Raises
    UserError where it cannot have run the load, or its factor is none of a server.
    """
    runs = read_loads(path)
    middle = runs[len(runs) // 2]
    notes = middle.notes(replica)
    used = [middle]
    gap = 0.0
    for run in (runs[0], middle, runs[-1]):
        check(run, replica)
    line = "" if len(runs) < 2 else "a pipeline has no gap of its own"
    if len(runs) > 1 and replica.stages == 1:
        own = partial(factor_of, replica), partial(iteration_of, replica)
        line = find_line(runs[0], runs[-1], shortest(replica), *own)
    if isinstance(line, str):
        factor = factor_of(replica, middle)
        if not 1 / FAR <= factor <= FAR:
            wanted = middle.measured[middle.matched]
            raise UserError(
                f"{path}: {middle.matched} of {wanted:.4g} takes iterations of {factor:.3g} x ours;"
                f" {1 / FAR:g} to {FAR:g} is allowed; {SAME}"
            )
    else:
        factor, gap = line
        used = [runs[0], runs[-1]]
    if line and isinstance(line, str):
        notes.append(f"one factor, of the middle load of {len(runs)}: {line}")
    if replica.cost_model.model.weights == "fp8" and len(runs) < CHECKED:
        notes.append(
            "weights of fp8: is its cache of fp8, too? If the plan's is not, an anchor makes other"
            f" loads\n  worse. {CHECKED} loads in one file tell: the middle one is a check"
        )
    loads = [compare(run, replica, factor, gap, matched=True) for run in used]
    left = runs[len(runs) // 2] if len(used) == 2 else runs[-1]
    if left not in used:
        loads.append(compare(left, replica, factor, gap, matched=False))
    return Anchor(path.name, factor, gap, loads, notes)


def compare(run: Run, replica: Deployment, factor: float, gap: float, matched: bool) -> Compared:
    """One load: measured, ours, and ours with factor and gap."""
    server, budget = server_of(run, replica)
    traces = [replay(run, replica), replay(run, replica, factor, gap)]
    numbers = {}
    for name in QUANTITIES:
        if name in run.measured:
            numbers[name] = [run.measured[name], *(measure_of(name, trace) for trace in traces)]
    title = f"{run.load}: {len(run.lengths)} requests, C = {budget}, B = {server.size(budget)}"
    spread = {}
    if run.clients and run.clients > 1 and run.alike:
        latency = statistics.fmean(life.latency for life in traces[1].lives.values())
        apart = replay(run, replica, factor, gap, step=latency / run.clients)
        spread = {name: measure_of(name, apart) for name in numbers if name.endswith("TTFT")}
    return Compared(title, run.matched, numbers, matched, spread)
