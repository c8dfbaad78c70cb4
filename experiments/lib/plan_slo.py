"""What the user of plan.py expects: of latencies, which make an Slo; and the price of a GPU."""

import re
from argparse import ArgumentTypeError, Namespace

from command.checks import LONGEST_WORD, UserError
from command.flags import ABOVE_ZERO, Flag
from serving.capacity import PER_REQUEST, STRICT, Bound, Slo

BOUND = re.compile(r"(tbt|ttft|tpot|e2e)(?::p(50|90|95|99))?:([^:]+)")


def bound_of(text: str) -> tuple[str, int | None, float]:
    """The name, the percent if there is one, and the milliseconds of a --slo."""
    found = BOUND.fullmatch(text)
    try:
        milliseconds = ABOVE_ZERO(found[3]) if found else None
    except ArgumentTypeError:
        milliseconds = None
    if milliseconds is None:
        raise ArgumentTypeError(
            f"{text[:LONGEST_WORD]!r} is not NAME:pP:MS, such as tpot:p95:30. It takes"
            " tbt, tpot, ttft or e2e; p50, p90, p95 or p99; and a number above 0"
        )
    return found[1], int(found[2]) if found[2] else None, milliseconds


def slo_of(options: Namespace, decode_iteration: float) -> Slo:
    """What --slo and its shorthands say. Where nothing bounds the TBT or the TPOT: STRICT."""
    given, share = list(options.slo or ()), options.attainment
    given += [("tbt", 99, options.tbt_slo)] if options.tbt_slo else []
    given += [("ttft", 90, options.ttft_slo)] if options.ttft_slo else []
    if share is not None:
        if not given or any(percent or name not in PER_REQUEST for name, percent, _ in given):
            raise UserError(
                "--attainment needs limits of a request, without a percentile, and nothing else:"
                " such as --slo ttft:500 --slo tpot:30 --slo e2e:9000"
            )
        given = [(name, share, limit) for name, _, limit in given]
    elif without := [(name, limit) for name, percent, limit in given if not percent]:
        name, limit = without[0]
        raise UserError(
            f"--slo {name}:{limit:g} has no percentile: give one, such as {name}:p95:{limit:g}; or"
            " give --attainment PERCENT"
        )
    elif not {"tbt", "tpot"} & {name for name, *_ in given}:
        given.insert(0, ("tbt", 99, 1e3 * STRICT * decode_iteration))
    bounds = (Bound(name, percent, limit / 1e3) for name, percent, limit in given)
    return Slo(tuple(bounds), share is not None)


SLO_FLAGS = {
    "slo": Flag("bound, in ms, of ttft, tpot (a request's mean time per output token), e2e, or tbt"
                " (single times between tokens), at p50, p90, p95 or p99: tpot:p95:30",
                shown="--tbt-slo", repeated=True, type=bound_of),
    "tbt_slo": Flag("short for --slo tbt:p99:MS", shown="5 decode iterations, unless --slo bounds"
                    " the tbt or the tpot"),
    "ttft_slo": Flag("short for --slo ttft:p90:MS"),
    "attainment": Flag("goodput: so many percent of the requests meet all --slo at once, which then"
                       " have no percentile: ttft:500"),
    "dollars_per_gpu_hour": Flag("price, for the dollars per million output tokens"),
}  # fmt: skip
