"""The final project: any policy that keeps the rules; its score is a capacity."""

import random
from dataclasses import replace
from math import inf

from course.check.frame import MALFORMED, Broken, Failure
from course.check.rounds import SENTENCES, Replay, judge_record, workloads
from course.drive import serve
from course.exercises import AnswerError, Ask
from course.reference import Final
from more.serving.search import AlwaysServed, largest_rate, percentile

PROPERTIES = {name: SENTENCES[name] for name in ("K0", "K6", "K7", "K8", "K10")}
PRICED = {"model": "mistral-7b", "gpu": "a100-80gb", "B": 12, "C": 512, "cache": None}
# s: of the P99 TBT, of any gap, and of the P90 TTFT
SLO = 0.05
STALL = 1.0
FIRST = 4.0
MOST = 2.0  # times Sarathi-Serve: more in one workload does not make up for the other
# requests of a workload; how exact a capacity is
COUNT = 48
STEP = 1.05


def cases(rng: random.Random) -> list[dict]:
    return workloads(rng, 100) + workloads(rng, 150, memory=True)


def judge(case: dict, answer: dict) -> Failure | None:
    return judge_record(case, answer, PROPERTIES)


def hidden(rng: random.Random) -> list[list[list]]:
    """Two workloads: chats, and summaries of long texts. Requests as `drive.make_requests` has
    them; prompts of zeros, because the smaller cases have looked at tokens."""
    found = []
    for middle, output in ((500, 250), (2500, 60)):
        moment = 0.0
        requests = []
        for _ in range(COUNT):
            moment += rng.expovariate(1.0)
            length = min(6000, max(16, int(rng.lognormvariate(0, 0.7) * middle)))
            most = min(400, max(4, int(rng.lognormvariate(0, 0.6) * output)))
            requests.append([length, most, [], moment])
        found.append(requests)
    return found


def meets(gaps: list[float], ttfts: list[float]) -> bool:
    """Whether a run is fast enough. Not serving's `Load`: with its median, half may starve.

    A policy could park each request once, for long: the P99 of all gaps does not see that. It
    could also run one prompt token early, and then let the request wait. Hence the other two.
    """
    longest = max(gaps, default=0.0)
    return percentile(gaps, 99) <= SLO and longest <= STALL and percentile(ttfts, 90) <= FIRST


def capacity_of(ask: Ask, requests: list[list]) -> float:
    """Requests per second that meet the SLO; the checker's own clock prices every batch."""

    def served(rate: float) -> bool:
        scaled = [[p, most, stops, arrival / rate] for p, most, stops, arrival in requests]
        case = PRICED | {"requests": scaled}
        answer = ask(case)
        try:
            replay = Replay(case, answer, PROPERTIES)
            replay.run()
        except MALFORMED:
            raise AnswerError("no record of a schedule") from None
        except Broken as broken:
            raise Broken(replace(broken.failure, where="a hidden workload", table=())) from None
        return meets(replay.trace.tbts, replay.trace.ttfts)

    try:
        return largest_rate(served, STEP, start=4.0)
    except AlwaysServed:
        return inf


BASELINE: dict[str, list[float]] = {}  # of sarathi_serve, by the state of the draws


def score(ask: Ask, rng: random.Random, case: dict, answer: object) -> str:
    """The mean of two capacities over Sarathi-Serve's, each at most MOST."""
    workload = hidden(rng)
    key = str(workload[0][0][3])
    found = [capacity_of(ask, each) for each in workload]
    if key not in BASELINE:
        BASELINE[key] = [capacity_of(lambda case: serve(Final, case), each) for each in workload]
    if inf in found:
        return "none: a workload meets the bounds at every rate, which no honest policy does"
    pairs = zip(found, BASELINE[key], strict=True)
    ratio = sum(min(mine / base, MOST) for mine, base in pairs) / 2
    names = zip(("chats", "long texts"), found, BASELINE[key], strict=True)
    rates = ", ".join(f"{name} {rate:.2f} ({base:.2f})" for name, rate, base in names)
    return (
        f"{ratio:.3f} (sarathi_serve: 1). Requests/s, in brackets those of sarathi_serve: {rates}."
        f" Bounds: P99 of the gaps {SLO:g} s, longest gap {STALL:g} s, P90 of the first tokens"
        f" {FIRST:g} s. Another seed draws other requests, and gives another score."
    )
