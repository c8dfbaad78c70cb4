"""Sarathi-Serve, Fig 3, 4, 5 and 6: throughput of prefill and decode, and what their time goes to.

    python experiments/serve_phases.py      predicted for Mistral-7B on an A100, Yi-34B on two, and
                                            LLaMA2-70B on four; seconds, no GPU needed

One prompt fills the GPU, so a larger batch of prompts is hardly faster. A decode-only batch reads
all weights for B tokens, so its throughput grows with B. In both, most of the time goes to the
linear operators. These read their weights once for all tokens of a batch: more tokens do more FLOPs
per byte (Fig 5), and up to the knee they cost hardly more than one (Fig 6). The paper sees the knee
at 500 to 600 tokens. Ours is where the line of large batches reaches the cost of one token.

Sarathi-Serve's artefact has the times of whole iterations of Yi-34B on two A100s: the stars of the
second row. We price the GPU's work alone. The difference is what the software of that time took
beside it. Two numbers of a `Host` ("sarathi-artefact" in configs/hosts.py) make the iterations of 1
and of 128 decodes right. All other iterations with this host are predictions.
"""

import enter  # noqa: F401

import matplotlib.pyplot as plt

from batch import Batch
from configs.hosts import HOSTS, Host
from costmodel import CostModel, make_batch
from experiments.lib.claims import flat, rises
from experiments.lib.common import paper_numbers
from experiments.lib.engines import Sweep, cases
from experiments.lib.papers import MISTRAL
from experiments.lib.rows import Row, Rows, print_rows
from experiments.lib.study import Panel, Study
from more.serving.capacity import Deployment

# the artefact's machine
NODE = Deployment("yi-34b", tp=2, gpu="a100-80gb-pcie")
FOUR = Deployment("llama2-70b", tp=4)  # of Fig 5 and 6
LENGTH = 1024  # tokens of a prompt in Fig 3, and of a decode's context
LARGE_SHARE = 80  # %: what the paper states
# of the artefact's runs (osdi-experiments/figure-2)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SHAPES = cases(phase="prefill", L=PROMPTS, B=1) + cases(phase="decode", L=LENGTH, B=BATCH_SIZES)
TOKENS = (1, 4, 16, 64, 128, 256, 384, 512, 640, 768, 1024, 2048, 4096)  # of a hybrid batch
FIG_3 = f"(Fig 3) {LENGTH} tokens each"
MANY_PROMPTS = cases(phase="prefill", L=LENGTH, B=BATCH_SIZES[1:])
# those whose times we take; its 256 tokens were the first batch of a run, and took longer than 512
MEASURED = {
    **{f"ss_yi_prefill_{L}": {"phase": "prefill", "L": L} for L in PROMPTS if L != 256},
    **{f"ss_yi_decode_{B}": {"phase": "decode", "B": B} for B in (1, 8, 32, 128)},
}
TABLE_2 = {  # the artefact's osdi-experiments/table-2: chunk, decodes
    "prefill": make_batch([(0, 1024, 1024)]),
    "hybrid": make_batch([(0, 1021, 1024)], decodes=3),
    "decode": make_batch(decodes=4),
}
PARTS = ("linear", "attention", "others")
ERRORS = {"error": "iteration", "error with the host": "with the host"}


def parts(cost: CostModel, batch: Batch) -> dict[str, float]:
    """Seconds of the linear operators, of attention, and of all else."""
    linear = sum(cost.linears(batch.num_tokens).values())
    operators = cost.operators(batch)
    others = sum(operators.values()) - linear - operators["attn"]
    return {"linear": linear, "attention": operators["attn"], "others": others}


def saturating_tokens(cost: CostModel) -> float:
    """Tokens at which a straight line through the origin reaches the cost of one token.

    The line has the slope of large batches. So many prompt tokens, at the rate of large batches,
    take the linear operators as long as one decode does.
    """
    low, high, many = (sum(cost.linears(tokens).values()) for tokens in (1, 4096, 8192))
    return low / ((many - high) / 4096)


def linears(engine: Deployment, tokens: int) -> Row:
    """Of a hybrid batch: ms of all linear operators, and the FLOPs per byte of a layer's."""
    cost = engine.cost_model
    shapes = cost.shapes.values()  # (inputs, outputs) of each product, on one GPU
    flops = sum(2 * tokens * i * o for i, o in shapes)
    moved = sum((i * o + tokens * (i + o)) * cost.bytes_per_value for i, o in shapes)
    ms = 1e3 * sum(cost.linears(tokens).values())
    return {"linear operators": ms, "intensity": flops / moved}


def knee(engine: Deployment) -> Row:
    gpu = engine.cost_model.gpu
    return {
        "knee": saturating_tokens(engine.cost_model),
        "FLOP to bandwidth ratio": gpu.peak / gpu.bandwidth,
    }


def mark_knees(axes: plt.Axes, rows: Rows) -> None:
    style = {"color": "black", "linewidth": 1.8}
    axes.axvline(saturating_tokens(FOUR.cost_model), linestyle="--", label="knee: ours", **style)
    stated = paper_numbers()["ss_knee"]
    axes.axvline(stated, linestyle=":", label=f"knee: the paper's, from {stated:g}", **style)


def iteration(engine: Deployment, phase: str, L: int, B: int) -> Row:
    """ms of B whole prompts of L tokens, or of B decodes that attend to L tokens.

    The parts are in ms per token.
    """
    is_prefill = phase == "prefill"
    batch = make_batch([(0, L, L)] * B) if is_prefill else make_batch(decodes=B, context=L)
    seconds = parts(engine.cost_model, batch)
    tokens = batch.num_tokens
    whole = sum(seconds.values())
    return {
        "iteration": 1e3 * whole,
        "throughput": tokens / whole,
        **{name: 1e3 * value / tokens for name, value in seconds.items()},
        "share of linear": 100 * seconds["linear"] / whole,
    }


def of_artefact(engine: Deployment, phase: str, L: int, B: int) -> Row:
    """ms of `iteration`, and with the artefact's host."""
    ms = iteration(engine, phase, L, B)["iteration"]
    return {"iteration": ms, "with the host": 1e3 * HOSTS["sarathi-artefact"].around(1e-3 * ms, B)}


def beyond(B: int) -> float:
    """Seconds of the artefact's iteration of B decodes that no kernel explains."""
    kernels = NODE.cost_model.kernels(make_batch(decodes=B, context=LENGTH))
    return 1e-3 * paper_numbers()[f"ss_yi_decode_{B}"] - kernels


def host_of_artefact() -> Host:
    """The host that makes the artefact's iterations of 1 and of 128 decodes what they took."""
    few = 1
    many = max(BATCH_SIZES)
    request = (beyond(many) - beyond(few)) / (many - few)
    return Host(beyond(few) - few * request, request)


def linear_operators(engine: Deployment, batch: str) -> Row:
    """ms of those of a batch of the artefact's table."""
    return {"linear operators": 1e3 * parts(engine.cost_model, TABLE_2[batch])["linear"]}


def one_decode(engine: Deployment) -> Row:
    return {"prefill tokens as dear as one decode": saturating_tokens(engine.cost_model)}


def compare(rows: Rows) -> None:
    """Errors beside the artefact's times, and what the paper states of the shares."""
    for number, case in MEASURED.items():
        for row in rows.where("with the host", **case):
            for error, quantity in ERRORS.items():
                row[error] = 100 * (row[quantity] / paper_numbers()[number] - 1)
    own = rows.where("share of linear")
    large = Rows(row for row in own if row["share of linear"] >= LARGE_SHARE)
    rows.add(which="smallest", **{"share of linear": min(own.column("share of linear"))})
    for phase, key, case in (("prefill", "L", {"B": 1}), ("decode", "B", {})):
        if found := large.where(phase=phase, **case).column(key):
            rows.add(**{f"largest {phase} with a share of {LARGE_SHARE} %": max(found)})


def report(rows: Rows) -> None:
    host = host_of_artefact()
    each = f"{1e3 * host.request:.4f} ms for each request"
    alone = f"{1e3 * beyond(32):.2f} ms"
    print(f"\nthe artefact's host: {1e3 * host.iteration:.2f} ms and {each}; 32 decodes: {alone}")
    columns = ("phase", "L", "B", *ERRORS.values(), *ERRORS)
    print_rows(rows.where(next(iter(ERRORS))), columns, "Yi-34B on two A100s beside the artefact")


# what a bar or a point stands for: a prompt, or a batch of decodes
PRINTED = ("throughput", "iteration", "linear operators")
ONE_BY_ONE = {"L": {"phase": "prefill", "B": 1}, "B": {"phase": "decode"}}


STUDY = Study(
    "serve_phases",
    __doc__,
    [
        Sweep(iteration, [MISTRAL], [*SHAPES, *MANY_PROMPTS]),
        Sweep(of_artefact, [NODE], SHAPES),
        Sweep(linear_operators, [NODE], cases(batch=list(TABLE_2))),
        Sweep(one_decode, [MISTRAL], [{}]),
        Sweep(linears, [FOUR], cases(tokens=TOKENS)),
        Sweep(knee, [FOUR], [{}]),
    ],
    units={
        **dict.fromkeys(("iteration", "with the host"), "ms"),
        **dict.fromkeys(ERRORS, "%"),
        "throughput": "tokens/s",
        **dict.fromkeys(PARTS, "ms per token"),
        "share of linear": "%",
        "linear operators": "ms",
        "prefill tokens as dear as one decode": "tokens",
        **dict.fromkeys(("intensity", "FLOP to bandwidth ratio"), "FLOP/B"),
        "knee": "tokens",
        f"largest prefill with a share of {LARGE_SHARE} %": "tokens",
        f"largest decode with a share of {LARGE_SHARE} %": "requests",
    },
    title="Sarathi-Serve Fig 3 to 6",
    panels=[
        Panel("B", "throughput", "phase", where={"L": LENGTH}, title=FIG_3, log="xy"),
        *[
            Panel(key, PARTS, kind="stacks", where=case, title="(Fig 4)")
            for key, case in ONE_BY_ONE.items()
        ],
        *[
            Panel(
                key,
                ("iteration", "with the host"),
                where=case | {"model": NODE.model},
                title="one iteration",
                log="xy",
                show={"ylabel": "time (ms)"},
            )
            for key, case in ONE_BY_ONE.items()
        ],
        Panel(
            "tokens",
            "intensity",
            where={"model": FOUR.model},
            title="(Fig 5)",
            rule="FLOP to bandwidth ratio",
            log="xy",
        ),
        Panel(
            "tokens",
            "linear operators",
            where={"model": FOUR.model},
            title="(Fig 6)",
            log="xy",
            also=mark_knees,
        ),
    ],
    columns=4,
    paper={
        "ss_linear_share": ("share of linear", {"which": "smallest"}),
        "ss_knee": ("knee", {}),
        "ss_decode_eq_prefill": ("prefill tokens as dear as one decode", {}),
        **{name: ("iteration", {"model": NODE.model, **case}) for name, case in MEASURED.items()},
        **{f"ss_yi_linear_{name}": ("linear operators", {"batch": name}) for name in TABLE_2},
    },
    derive=compare,
    report=report,
    claims=lambda rows: {
        "one prompt fills the GPU": flat(rows, "throughput", "B", phase="prefill", L=LENGTH),
        "decodes need a large batch": rises(rows, "throughput", "B", phase="decode"),
        "more tokens do more FLOPs per byte": rises(rows, "intensity", "tokens"),
    },
    shown=lambda row, name: name in PRINTED or not {"L", "tokens"} & row.keys(),
)

if __name__ == "__main__":
    STUDY.main()
