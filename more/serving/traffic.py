"""Requests over time: when they arrive, their prompts' lengths, and their output tokens.

All random numbers have a seed. Arrivals, prompts and outputs draw from separate streams. So a
change of one does not change the others. Times are in seconds, lengths in tokens. If a trace says n
output tokens, the request has max_tokens = n: the prefill yields the first of them.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from batch import LATEST, Request
from command.checks import MOST_SEED, UserError, check_number, check_whole
from more.loading.requests import listed
from more.loading.tables import is_json, read_table
from more.paged.prompts import HASHED, hashed
from more.serving.search import FASTEST

ARRIVALS, PROMPTS, OUTPUTS = range(3)  # the streams of one seed
# Bounds of what may be asked for. Beyond them, numpy's 64-bit numbers or the memory run out.
MOST_REQUESTS = 10**7
MOST_TOKENS = 10**7  # of one prompt, or of one output
MOST_CV = 1e6
MOST_BYTES, MOST_JSON = 10**9, 10**8  # of a trace file
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
        request_id, request.prompt, request.max_tokens, request.stop_ids, arrival, tags=request.tags
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

# What a trace file calls its columns: ours, the Azure LLM inference traces', Vidur's and
# Sarathi-Serve's, TD-Pipe's (its benchmark/benchmark_throughput_predict.py reads the last two),
# BurstGPT's (github.com/HPMLL/BurstGPT), and those of the objects that OpenAI's API answers.
HEADERS = {
    "arrival": ("arrival", "TIMESTAMP", "arrived_at", "Timestamp", "created", "created_at"),
    "prompt": ("prompt_tokens", "ContextTokens", "num_prefill_tokens", "input_token_length",
               "Request tokens", "usage.prompt_tokens", "usage.input_tokens"),
    "output": ("output_tokens", "GeneratedTokens", "num_decode_tokens", "output_token_length",
               "Response tokens", "usage.completion_tokens", "usage.output_tokens"),
}  # fmt: skip
TEXTS = "conversations"  # of ShareGPT
Lines, Count = list[tuple[str, list[str]]], Callable[[str], int]  # places and cells; tokens
Counter = Callable[[], Count | None]  # loads a tokenizer, if there is one
# Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces): its times are milliseconds.
MOONCAKE = {"arrival": ("timestamp",), "prompt": ("input_length",), "output": ("output_length",)}
HASHES = "hash_ids"
# Words of a name that may be an arrival: "sentAt" has one of them.
ARRIVES = re.compile("arriv.*|timestamps?|created|sent|date")


def read_trace(path: Path | str, counter: Counter = lambda: None) -> list[Request]:
    """The requests of a CSV, JSON or JSONL file, in order of arrival. The first arrives at 0 s.

    It sorts the lines of a file that has another order, and says so in a line. The header (in
    NAME.json and NAME.jsonl: the objects' names) has three columns, see HEADERS. All other columns
    are the request's tags: their names and texts, for a policy that reads them. If objects have no
    times, all requests come at once; but a name such as `sent_at` may be an arrival: it is refused.
    Arrivals are seconds, or all of them are dates and times (ISO 8601). A file with an
    `input_length` is one of Mooncake's: there they are milliseconds, and prompts whose `hash_ids`
    begin alike share these blocks of 512 tokens. No other prompts share anything. Lengths are whole
    numbers of tokens, at least 1. Requests of BurstGPT, or of a log with `usage`, without tokens
    have failed: they are left out, and a line says how many. For a wrong cell, the UserError names
    file, line (in JSON: row) and column. counter: of the tokens of ShareGPT's texts.
    """
    header, lines = read_table(path, MOST_JSON if is_json(path) else MOST_BYTES)
    if TEXTS in header and not {"prompt_tokens", "output_tokens"} & {*header}:
        header, lines = counted(path, header, lines, counter())
    columns = find_columns(path, header)
    for place, cells in lines:
        if len(cells) != len(header):
            said = f"{len(cells)} cells, and the header has {len(header)}"
            raise UserError(f"{path}, {place}: {said}")
    if columns["arrival"][0] == len(header):
        print(f"{path}: no {' or '.join(HEADERS['arrival'])}: all requests come at once")
        lines = [(place, [*cells, "0"]) for place, cells in lines]
    if columns["output"][1].startswith(("Response", "usage.")):
        named = HEADERS["prompt"] + HEADERS["output"]
        sizes = [place for place, name in enumerate(header) if name in named]
        kept = [line for line in lines if sum(line[1][at] not in ("", "0") for at in sizes) > 1]
        if len(kept) < len(lines):
            print(f"{path}: left out {len(lines) - len(kept)} of {len(lines)} requests: no tokens")
        lines = kept
    if not lines:
        raise UserError(f"{path}: no requests below the header; a trace needs at least one")
    rows = read_rows(path, columns, lines)
    prompts = read_prompts(path, header, lines, [prompt for _, prompt, _ in rows])
    known = {name for _, name in columns.values()}
    known |= {HASHES, TEXTS} if has_blocks(header) else {TEXTS}
    places = [place for place, name in enumerate(header) if name not in known]
    tags = [{header[place]: cells[place].strip() for place in places} for _, cells in lines]
    early = sum(after[0] < before[0] for before, after in pairwise(rows))
    if early:
        print(f"{path}: sorted by arrival: {early} of {len(rows)} lines stood after a later one")
    order = sorted(range(len(rows)), key=lambda line: rows[line][0])
    first = rows[order[0]][0]
    return [
        Request(i, prompts[line], output, arrival=arrival - first, tags=tags[line])
        for i, line in enumerate(order)
        for arrival, _, output in [rows[line]]
    ]


def counted(
    path: Path | str, header: list[str], lines: Lines, count: Count | None
) -> tuple[list[str], Lines]:
    """With the tokens of a conversation's first text and of its second.

    As in vLLM's benchmark, the first is the prompt, whoever wrote it.
    """
    if count is None:
        raise UserError(
            f"{path}: its {TEXTS} are texts; plan.py counts their tokens where --model is a folder"
            " with a tokenizer.json, or a hub id on this disk"
        )
    place, found = header.index(TEXTS), []
    for line, cells in lines:
        with suppress(ValueError, TypeError, KeyError):  # not two texts
            prompt, answer = (count(each["value"]) for each in json.loads(cells[place])[:2])
            found += [(line, [*cells, f"{prompt}", f"{answer}"])] if prompt and answer else []
    print(f"{path}: {len(found)} of {len(lines)} conversations have a prompt and an answer")
    return [*header, "prompt_tokens", "output_tokens"], found


def find_columns(path: Path | str, header: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Place and name of each of the three columns. A JSON or JSONL file may have no times."""
    found = {}
    for column, allowed in (MOONCAKE if "input_length" in header else HEADERS).items():
        name = next((name for name in allowed if name in header), None)
        if name is None and column == "arrival" and is_json(path):
            if suspect := next(filter(may_be_arrival, header), None):
                raise UserError(
                    f"{path}, row 1: `{suspect[:60]}` may be an arrival: rename it"
                    f" `{allowed[0]}`, or leave it out for all at once"
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
    """By a word of it."""
    return any(ARRIVES.fullmatch(word.lower()) for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name))


def read_rows(path: Path | str, columns: dict[str, tuple[int, str]], lines: Lines) -> list[tuple]:
    """Arrival, prompt tokens and output tokens of each line."""
    length = tokens, f"a whole number of tokens, at least 1 and at most {MOST_TOKENS}"
    readers = {
        "arrival": (number, "a number of seconds (or, in all lines, a date and time)"),
        "prompt": length,
        "output": length,
    }
    place, name = columns["arrival"]
    _, first = lines[0]
    if name == "timestamp":
        readers["arrival"] = milliseconds, "a number of milliseconds"
    elif is_date(first[place]):
        readers["arrival"] = date, "a date and time, as in the first line"
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
    """Whether it is a file of Mooncake's that says which blocks its prompts have."""
    return {"input_length", HASHES} <= set(header)


def read_prompts(
    path: Path | str, header: Sequence[str], lines: Lines, lengths: Sequence[int]
) -> list[Sequence[int]]:
    """A prompt of each of these lengths: of its blocks, where a file of Mooncake's has their ids.

    Ids are numbered as they come, so that they may be of any size.
    """
    if not has_blocks(header):
        return list(map(range, lengths))
    numbers, prompts, place = {}, [], header.index(HASHES)
    for (line, cells), length in zip(lines, lengths, strict=True):
        text = cells[place].strip()
        ids, wanted = parsed_ids(text), -(-length // HASHED)
        if ids and len(ids) != wanted or ids is None:
            raise UserError(
                f"{path}, {line}, column {HASHES}: {text[:60]!r} is no list of {wanted} whole"
                f" numbers, one for each {HASHED} of its {length} tokens"
            )
        own = [numbers.setdefault(each, len(numbers)) for each in ids]
        prompts.append(hashed(own, length) if own else range(length))
    return prompts


def parsed_ids(text: str) -> list[int] | None:
    """The whole numbers of a JSON list; [] for an empty cell; None for all else."""
    try:
        ids = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return None
    return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else None


def number(text: str) -> float:
    value = float(text)
    if not abs(value) <= LATEST:
        raise ValueError(text)
    return value


def milliseconds(text: str) -> float:
    """Seconds."""
    return number(text) / 1000


def date(text: str) -> float:
    """Seconds since 1970 of a date and time. Without a time zone, it is UTC."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST_TOKENS:
        raise ValueError(text)
    return value


def is_date(text: str) -> bool:
    try:
        date(text.strip())
    except ValueError:
        return False
    return not text.strip().isdecimal()  # 20231116 could be either
