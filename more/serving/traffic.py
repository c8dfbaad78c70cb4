"""Requests over time: when they arrive, their prompts' lengths, and their output tokens.

All random numbers have a seed. Arrivals, prompts and outputs draw from separate streams. So a
change of one does not change the others. Times are in seconds, lengths in tokens. If a trace says n
output tokens, the request ends after n: the prefill yields the first of them. It might have gone on
to max_tokens, if the trace has such a column; else that is n, too.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from batch import LATEST, Request
from command.checks import MOST_SEED, UserError, check_number, check_whole
from command.cli import ROOT
from more.loading.requests import listed
from more.loading.tables import is_json, read_table
from more.paged.prompts import HASHED, hashed, turns
from more.serving.search import FASTEST

OURS = ROOT / "experiments"  # the traces that ship with the project
ARRIVALS, PROMPTS, OUTPUTS = range(3)  # the streams of one seed
# Bounds of what may be asked for. Beyond them, numpy's 64-bit numbers or the memory run out.
MOST_REQUESTS = 10**7
MOST_TOKENS = 10**7  # of one prompt, or of one output
MOST_CV = 1e6
MOST_JSON = 10**8  # letters of the cells of a trace
MINUTE = 60.0  # s


def stream(seed: int, which: int) -> np.random.Generator:
    check_whole("seed", seed, 0, MOST_SEED)
    return np.random.default_rng([seed, which])


# ----------------------------------------------------------------------------------------- arrivals


def gamma(count: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """`count` arrival times at `rate` requests per second, with gamma-distributed gaps.

    Gaps have mean 1 / rate and deviation cv / rate. They are drawn at rate 1 and then divided. So a
    seed gives the same pattern at every rate. cv 1: Poisson; above 1: bursts; 0: evenly, one every
    1 / rate seconds.
    """
    check_whole("count", count, 0, MOST_REQUESTS)
    check_number("rate", rate, 1 / FASTEST, FASTEST, "number of requests per second")
    check_number("cv", cv, 0, MOST_CV)
    if 0 < cv < 1 / MOST_CV:
        raise UserError(f"cv is {cv}; it must be 0, or a number from {1 / MOST_CV:g}")
    gaps = stream(seed, ARRIVALS).gamma(1 / cv**2, cv**2, count) if cv else np.ones(count)
    return (np.cumsum(gaps) / rate).tolist()


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """`count` arrival times of a Poisson process, `rate` requests/s (Sarathi-Serve, Sec 5)."""
    return gamma(count, rate, 1.0, seed)


def busy_times(requests: Sequence[Request]) -> tuple[float, float | None] | None:
    """Arrivals per second: their mean rate, and that of the busiest minute.

    The busiest minute may begin at any arrival. It is None if all come within a minute. Returns
    None if all come at once: then the times say nothing.
    """
    arrivals = np.sort([request.arrival for request in requests])
    if not len(arrivals) or arrivals[0] == arrivals[-1]:
        return None
    span = arrivals[-1] - arrivals[0]
    if span * FASTEST < len(arrivals):  # as good as at once
        return None
    within = np.searchsorted(arrivals, arrivals + MINUTE) - np.arange(len(arrivals))
    busiest = float(within.max()) / MINUTE if span > MINUTE else None
    return float((len(arrivals) - 1) / span), busiest


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """New requests of the same lengths, in the same order.

    Their arrivals are scaled so that `rate` of them come per second on average.
    """
    check_number("rate", rate, 1 / FASTEST, FASTEST, "number of requests per second")
    requests = listed(requests)
    if not requests:
        raise UserError("no requests: a rate needs at least one")
    first = min(request.arrival for request in requests)
    last = max(request.arrival for request in requests)
    factor = (len(requests) - 1) / rate / (last - first) if last > first else 0.0
    return [copy_of(each, each.request_id, (each.arrival - first) * factor) for each in requests]


def copy_of(request: Request, request_id: int, arrival: float) -> Request:
    """A new request like this one, with another id and another arrival."""
    return Request(
        request_id,
        request.prompt,
        request.max_tokens,
        request.stop_ids,
        arrival,
        tags=request.tags,
        ends_after=request.ends_after,
    )


# ------------------------------------------------------------------------------------------ lengths


class Lengths(Protocol):
    """A distribution over numbers of tokens."""

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """`count` whole numbers of tokens, each at least 1."""


@dataclass(frozen=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return np.full(count, self.tokens)


@dataclass(frozen=True)
class Uniform:
    """Every whole number from low to high (both included) has the same probability."""

    low: int
    high: int

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class Zipf:
    """Whole numbers from low to high by Zipf's law: many are short, few are long.

    The k-th of low, low + 1, ..., high has a probability proportional to 1 / k^exponent, as in
    Vidur's generator of request lengths (arXiv 2405.05465).
    """

    low: int
    high: int
    exponent: float = 1.0

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        lengths = np.arange(self.low, self.high + 1)
        weights = (np.arange(len(lengths)) + 1.0) ** -self.exponent
        return generator.choice(lengths, count, p=weights / weights.sum())


@dataclass(frozen=True)
class LogNormal:
    """A log-normal with the given median and 90th percentile, rounded to whole tokens.

    longest: a longer draw becomes `longest` (None: no bound). As long as the median and the P90 are
    below it, they do not change. Drawing again instead would lower both.
    """

    median: float
    p90: float
    longest: int | None = None

    def draw(self, count: int, generator: np.random.Generator) -> np.ndarray:
        sigma = math.log(self.p90 / self.median) / NormalDist().inv_cdf(0.9)
        drawn = np.rint(self.median * np.exp(sigma * generator.standard_normal(count)))
        longest = MOST_TOKENS if self.longest is None else self.longest
        return np.clip(drawn, 1, longest).astype(np.int64)


def make_requests(
    arrivals: Sequence[float],
    prompts: Lengths,
    outputs: Lengths,
    seed: int = 0,
    max_length: int | None = None,
) -> list[Request]:
    """One request for each arrival time, with drawn lengths and placeholder prompts.

    max_length: most tokens of prompt and output together. A longer prompt is cut, so that both fit.
    """
    prompt_tokens = prompts.draw(len(arrivals), stream(seed, PROMPTS))
    output_tokens = outputs.draw(len(arrivals), stream(seed, OUTPUTS))
    if max_length is not None:
        check_whole("max_length", max_length, 2, MOST_TOKENS)
        output_tokens = np.minimum(output_tokens, max_length - 1)
        prompt_tokens = np.minimum(prompt_tokens, max_length - output_tokens)
    return [
        Request(i, range(prompt), output, arrival=arrival)
        for i, (arrival, prompt, output) in enumerate(
            zip(arrivals, prompt_tokens.tolist(), output_tokens.tolist(), strict=True)
        )
    ]


# ------------------------------------------------------------------------------------------- traces

# What a trace file calls its arrivals, prompt tokens and output tokens, by whose format it is. Of
# TD-Pipe: its benchmark/benchmark_throughput_predict.py. BurstGPT: github.com/HPMLL/BurstGPT.
# Mooncake: github.com/kvcache-ai/Mooncake, FAST25-release/traces. OpenAI: what its API answers.
BATCH = "response.body."  # where the output of OpenAI's Batch API has an answer
FORMATS = {
    "our own format": ("arrival", "prompt_tokens", "output_tokens"),
    "DistServe's format": ("arrival_s", "prompt_tokens", "output_tokens"),
    "Azure's format": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Vidur's and Sarathi-Serve's format": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "TD-Pipe's format": ("", "input_token_length", "output_token_length"),
    "BurstGPT's format": ("Timestamp", "Request tokens", "Response tokens"),
    "answers of OpenAI's API": ("created", "usage.prompt_tokens", "usage.completion_tokens"),
    "responses of OpenAI's API": ("created_at", "usage.input_tokens", "usage.output_tokens"),
    "output of OpenAI's Batch API": (
        "",
        f"{BATCH}usage.prompt_tokens",
        f"{BATCH}usage.completion_tokens",
    ),
    "output of OpenAI's Batch API, of responses": (
        "",
        f"{BATCH}usage.input_tokens",
        f"{BATCH}usage.output_tokens",
    ),
    "Mooncake's format": ("", "input_length", "output_length"),
}
HEADERS = {"arrival": (), "prompt": (), "output": ()}
for names in FORMATS.values():
    for column, name in zip(HEADERS, names, strict=True):
        if name and name not in HEADERS[column]:
            HEADERS[column] += (name,)
IN_MS = ("arrival_ms", "timestamp_ms")
HEADERS["arrival"] += ("timestamp_s", *IN_MS)
SIZES = HEADERS["prompt"] + HEADERS["output"]
LIMIT = "max_tokens"  # where outputs were shorter than they might have been
STAMP = "timestamp"  # of Mooncake, Bailian and guidellm, in two units: see `stamped`
LEAST_GAP = 20  # between two stamps, on average. As ms, these are 50 requests/s
# Bailian alone has the first
CHAT_ID = "chat_id"
HASHES = "hash_ids"
CHATS = ("session_id", "conversation_id")  # requests of one are the turns of a chat
BAILIAN = 16  # tokens of its blocks
TEXTS = ("conversations", "conversation", "items")  # of ShareGPT, and of files made of it
# places and cells; tokens
Lines = list[tuple[str, list[str]]]
Count = Callable[[str], int]
Counter = Callable[[], Count | None]  # loads a tokenizer, if there is one
# Words of a name that may be an arrival: "sentAt" has one of them.
ARRIVES = re.compile("arriv.*|timestamps?|created|sent|date")


def read_trace(path: Path | str, counter: Counter = lambda: None) -> list[Request]:
    """The requests of a CSV, JSON or JSONL file, in order of arrival. The first arrives at 0 s.

    The header (in NAME.json and NAME.jsonl: the objects' names) has three columns, see FORMATS. A
    line says whose format it is, and the unit of the arrivals. All other columns are the request's
    tags: their names and texts, for a policy that reads them. If objects have no times, all
    requests come at once; but a name such as `sent_at` may be an arrival: it is refused. Arrivals
    are seconds, or all of them are dates and times (ISO 8601), or milliseconds where the name says
    so; of a `timestamp`, see `stamped`. Lines in another order are sorted, and a line says so.
    Prompts whose `hash_ids` begin alike share these blocks of 512 tokens, or of 16 (Bailian). Of
    one `session_id`, a prompt begins with the prompt and the answer before it, if it is longer than
    both. No other prompts share anything. Lengths are whole numbers of tokens, at least 1. Requests
    without tokens of BurstGPT (they have failed), of OpenAI and of ShareGPT are left out, and a
    line says how many. A column `max_tokens` has the limit of each output, which a policy may know;
    its true length no policy knows. For a wrong cell, the UserError names file, line (in JSON: row)
    and column. counter: of the tokens of ShareGPT's texts.
    """
    texts = Conversations(path, counter)
    header, lines = read_table(path, MOST_JSON, texts.counted)
    columns = find_columns(path, header)
    for place, cells in lines:
        if len(cells) != len(header):
            said = f"{len(cells)} cells, and the header has {len(header)}"
            raise UserError(f"{path}, {place}: {said}")
    timeless = columns["arrival"][0] == len(header)
    if timeless:
        lines = [(place, [*cells, "0"]) for place, cells in lines]
    if texts.found or columns["output"][1].startswith(("Response", "usage.", BATCH)):
        sizes = [place for place, name in enumerate(header) if name in SIZES]
        kept = []
        for place, cells in lines:
            written = [at for at in sizes if cells[at] not in ("", "0")]
            if len(written) > 1:
                kept.append((place, cells))
        if len(kept) < len(lines):
            print(f"{path}: left out {len(lines) - len(kept)} of {len(lines)} requests: no tokens")
        lines = kept
    if not lines:
        raise UserError(f"{path}: no requests below the header; a trace needs at least one")
    rows = read_rows(path, columns, lines)
    prompts, block = read_prompts(path, header, lines, [prompt for _, prompt, _ in rows])
    arrival, *sizes = (name for _, name in columns.values())
    whose = format_of(arrival, sizes)
    unit = "seconds"
    second = 1.0
    if is_date(lines[0][1][columns["arrival"][0]]):
        unit = "dates and times (without a zone: UTC)"
    elif arrival == STAMP:
        whose, unit, second = stamped(header, block, [arrival for arrival, _, _ in rows])
    elif arrival in IN_MS:
        unit = "ms"
        second = 1e-3
    chats = next((place for place, name in enumerate(header) if name in CHATS and not block), None)
    times = "no arrivals, so all requests come at once" if timeless else f"{arrival} in {unit}"
    said = texts.found or f"{whose}; tokens: {', '.join(sizes)}"
    said += "" if chats is None else f"; turns of a chat by {header[chats]}"
    if Path(path).resolve().parent != OURS:  # else nothing is guessed
        print(f"{path}: read as {said}; {times}")
    limits = read_limits(path, header, lines, [output for _, _, output in rows])
    known = {name for _, name in columns.values()} | {LIMIT}
    known |= {HASHES} if has_blocks(header) else set()
    places = [place for place, name in enumerate(header) if name not in known]
    tags = []
    for _, cells in lines:
        tags.append({header[place]: cells[place].strip() for place in places})
    early = sum(after[0] < before[0] for before, after in pairwise(rows))
    if early:
        print(
            f"{path}: sorted by arrival: {early} of {len(rows)} lines stood after a later one;"
            " of several runs in one file, give one"
        )
    order = sorted(range(len(rows)), key=lambda line: rows[line][0])
    first = rows[order[0]][0]
    if chats is not None:
        told = turns((lines[line][1][chats].strip(), *rows[line][1:]) for line in order)
        prompts = dict(zip(order, told, strict=True))
    requests = []
    for i, line in enumerate(order):
        arrival, _, output = rows[line]
        moment = second * (arrival - first)
        own = {"arrival": moment, "tags": tags[line], "ends_after": output}
        requests.append(Request(i, prompts[line], limits[line], **own))
    return requests


class Conversations:
    """Counts the tokens of conversations, so that no text stays in memory.

    As in vLLM's benchmark, the first text is the prompt, whoever wrote it, and the second is the
    answer. found: how a file with such texts is read; "" until one was counted.
    """

    def __init__(self, path: Path | str, counter: Counter):
        self.path = path
        self.counter = counter
        self.found = ""
        self.count: Count | None = None

    def counted(self, row: dict[str, object]) -> dict[str, object]:
        """An object without its texts, and with their tokens: 0 of a text that is not there.

        What has lengths, or no texts, stays as it is.
        """
        texts = next((row[name] for name in TEXTS if isinstance(row.get(name), list)), None)
        if texts is None or row.keys() & SIZES:
            return row
        rest = {name: value for name, value in row.items() if name not in TEXTS}
        self.count = self.count or self.counter()
        if self.count is None:
            raise UserError(
                f"{self.path}: its conversations are texts; plan.py counts their tokens where"
                " --model is a folder with a tokenizer.json, or a hub id on this disk"
            )
        self.found = "ShareGPT's format; tokens: of a first text and its answer, by --model"
        prompt, answer = map(self.tokens, [*texts, None, None][:2])
        return rest | {"prompt_tokens": prompt, "output_tokens": answer}

    def tokens(self, turn: object) -> int:
        said = turn if isinstance(turn, dict) else {}
        text = said.get("value", said.get("content"))
        with suppress(ValueError):  # not a text of this tokenizer
            return self.count(text) if isinstance(text, str) else 0
        return 0


def format_of(arrival: str, sizes: Sequence[str]) -> str:
    """Whose format has these names."""
    own = [whose for whose, names in FORMATS.items() if [*names[1:]] == [*sizes]]
    exact = [whose for whose in own if FORMATS[whose][0] == arrival]
    return next(iter(exact + own), "a mix of formats")


def stamped(header: Sequence[str], block: int, stamps: Sequence[float]) -> tuple[str, str, float]:
    """Whose format it is with a `timestamp`, its unit in words, and in seconds.

    Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) are seconds; ids of chats, or
    blocks of 16 tokens, tell it. Mooncake's are milliseconds; blocks of 512 tokens tell it.
    guidellm's (github.com/vllm-project/guidellm, docs/guides) are seconds. Without blocks, the
    numbers must tell these two apart, by a rule. The words say what of it decided.
    """
    if CHAT_ID in header or block == BAILIAN:
        return "Bailian's format", "seconds", 1.0
    if block == HASHED:
        return "Mooncake's format", "ms", 1e-3
    gap = (max(stamps) - min(stamps)) / max(1, len(stamps) - 1)
    whole = all(float(stamp).is_integer() for stamp in stamps)
    if max(stamps) > LATEST:
        why = "too large for seconds"
    elif whole and gap >= LEAST_GAP:
        why = f"whole numbers, {LEAST_GAP} or more apart on average"
    else:
        why = f"less than {LEAST_GAP} apart on average" if whole else "not all whole numbers"
        unit = f"seconds, because they are {why}; if they are ms, rename it timestamp_ms"
        return "guidellm's format", unit, 1.0
    unit = f"ms, because they are {why}; if they are seconds, rename it timestamp_s"
    return "Mooncake's format", unit, 1e-3


def find_columns(path: Path | str, header: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Place and name of each of the three columns. A JSON or JSONL file may have no times."""
    found = {}
    for column, allowed in HEADERS.items():
        if column == "arrival" and "input_length" in header:
            allowed = (STAMP, *allowed)
        name = next((name for name in allowed if name in header), None)
        if name is None and column == "arrival" and is_json(path):
            if suspect := next(filter(may_be_arrival, header), None):
                raise UserError(
                    f"{path}, row 1: `{suspect[:60]}` may be an arrival: rename it `arrival_s`"
                    " or `arrival_ms`, or leave it out for all at once"
                )
            found[column] = len(header), column  # a column more: all come at once
            continue
        if name is None:
            raise UserError(
                f"{path}, {'row' if is_json(path) else 'line'} 1: no column for the {column} in"
                f" {','.join(header)[:200]!r}; name one of them {' or '.join(allowed)}"
            )
        if header.count(name) > 1:
            raise UserError(f"{path}, line 1: two columns are called {name}: leave one out")
        found[column] = header.index(name), name
    return found


def may_be_arrival(name: str) -> bool:
    """By a word of it. (A batch has no arrivals: `created` is when an answer was made.)"""
    return not name.startswith(BATCH) and any(
        ARRIVES.fullmatch(word.lower()) for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)
    )


def read_rows(path: Path | str, columns: dict[str, tuple[int, str]], lines: Lines) -> list[tuple]:
    """Arrival, prompt tokens and output tokens of each line. Of a date: its seconds."""
    place, name = columns["arrival"]
    _, first = lines[0]
    most = 1e3 * LATEST if name in (STAMP, *IN_MS) else LATEST  # of ms; a clock has no later s
    wanted = f"a number of at most {most:g} (or, in all lines, a date and time)"
    readers = {
        "arrival": (partial(number, most=most), wanted),
        "prompt": LENGTH,
        "output": LENGTH,
    }
    if is_date(first[place]):
        readers["arrival"] = date, "a date and time, as in the first line"
    return read_cells(path, columns, lines, readers)


def read_limits(
    path: Path | str, header: Sequence[str], lines: Lines, outputs: Sequence[int]
) -> list[int]:
    """max_tokens of each line; without such a column, its output tokens."""
    if LIMIT not in header:
        return list(outputs)
    columns = {LIMIT: (header.index(LIMIT), LIMIT)}
    limits = [limit for (limit,) in read_cells(path, columns, lines, {LIMIT: LENGTH})]
    for (line, _), limit, output in zip(lines, limits, outputs, strict=True):
        if limit < output:
            raise UserError(
                f"{path}, {line}, column {LIMIT}: {limit} is less than its {output} output tokens"
            )
    return limits


def read_cells(
    path: Path | str,
    columns: dict[str, tuple[int, str]],
    lines: Lines,
    readers: dict[str, tuple[Callable[[str], float], str]],
) -> list[tuple]:
    """The values of these columns in each line. readers: of each column, and what it reads."""
    rows = []
    for line, cells in lines:
        values = []
        for column, (place, name) in columns.items():
            read, wanted = readers[column]
            text = cells[place].strip()
            try:
                values.append(read(text))
            except ValueError:
                raise UserError(
                    f"{path}, {line}, column {name}: {text[:60]!r} is not {wanted}"
                ) from None
        rows.append(tuple(values))
    return rows


def has_blocks(header: Sequence[str]) -> bool:
    """Whether it says which blocks its prompts have, as Mooncake's and Bailian's files do."""
    return {"input_length", HASHES} <= set(header)


def read_prompts(
    path: Path | str, header: Sequence[str], lines: Lines, lengths: Sequence[int]
) -> tuple[list[Sequence[int]], int]:
    """A prompt of each of these lengths, and the tokens of a block; 0: the file states no blocks.

    A prompt is of its blocks, where the file has their ids. These are numbered as they come, so
    that they may be of any size. Bailian's blocks are told by its names, or by as many ids.
    """
    if not has_blocks(header):
        return list(map(range, lengths)), 0
    place = header.index(HASHES)
    every = [parsed_ids(cells[place].strip()) for _, cells in lines]
    sizes = [BAILIAN] if CHAT_ID in header else [HASHED, BAILIAN]
    known = [(len(ids), length) for ids, length in zip(every, lengths, strict=True) if ids]
    fits = lambda size: all(count == -(-length // size) for count, length in known)
    block = next(filter(fits, sizes), sizes[0])
    numbers = {}
    prompts = []
    for (line, cells), ids, length in zip(lines, every, lengths, strict=True):
        wanted = -(-length // block)
        if ids and len(ids) != wanted or ids is None:
            raise UserError(
                f"{path}, {line}, column {HASHES}: {cells[place].strip()[:60]!r} is no list of"
                f" {wanted} whole numbers, one for each {block} of its {length} tokens"
            )
        own = [numbers.setdefault(each, len(numbers)) for each in ids]
        prompts.append(hashed(own, length, block) if own else range(length))
    return prompts, block


def parsed_ids(text: str) -> list[int] | None:
    """The whole numbers of a JSON list; [] for an empty cell; None for all else."""
    try:
        ids = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else None


def number(text: str, most: float) -> float:
    value = float(text)
    if not abs(value) <= most:
        raise ValueError(text)
    return value


def date(text: str) -> float:
    """Seconds since 1970 of a date and time. Without a time zone, it is UTC."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST_TOKENS:
        raise ValueError(text)
    return value


LENGTH = tokens, f"a whole number of tokens, at least 1 and at most {MOST_TOKENS}"


def is_date(text: str) -> bool:
    try:
        date(text.strip())
    except ValueError:
        return False
    return not text.strip().isdecimal()  # 20231116 could be either
