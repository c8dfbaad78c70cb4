"""What a GPU charges for a batch, kernel by kernel: the numbers of docs/what-a-gpu-charges.md.

    python experiments/charges.py                            Llama-3.1-8B on an A100, today's vLLM
    python experiments/charges.py --gpu h100 --model yi-34b  another GPU, another model

All is predicted, and printed in a second; what is paper or measured says so.
"""

import enter  # noqa: F401

import statistics
import textwrap
from dataclasses import replace

from command.cli import run_main
from command.flags import Flag
from configs import GPUS, MODELS, lookup
from configs.constants import SINCE, SOFTWARE
from costmodel import KERNELS, CostModel, make_batch
from experiments import law_kernels
from experiments.lib.common import paper_numbers
from experiments.lib.flags import ScriptParser, model_flag
from experiments.lib.measured_kernels import by_size, read_kernels
from experiments.serve_phases import NODE, saturating_tokens
from loading.priced import priced_model

FLAGS = {
    "model": model_flag("llama3.1-8b"),
    "gpu": Flag(f"GPU, one of {', '.join(GPUS)}", "a100-80gb"),
    "software": Flag("software whose constants the cost model takes", "vllm", choices=SOFTWARE),
}
# Kinds and groups of kernels (measured_kernels.SIZES) whose error says something of its own.
WHERE = (
    ("product", "rows 4096"), ("product", "rows 8192"),
    ("decode", "batch 1"), ("decode", "KV heads 1"),
    ("all-reduce", "64 KiB"), ("all-reduce", "512 KiB"), ("all-reduce", "8192 KiB"),
)  # fmt: skip


def products(cost: CostModel, tokens: int) -> float:
    """ms of all products of an iteration, without the head."""
    return 1e3 * sum(cost.linears(tokens).values())


def roofline(cost: CostModel) -> list[str]:
    peak, bandwidth = cost.gpu.peak, cost.gpu.bandwidth
    rates = f"{peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s"
    return [f"{rates}: {peak / bandwidth:.0f} FLOPs for each byte"]


def few_tokens(cost: CostModel) -> list[str]:
    lines = []
    for tokens in (1, 64, 256, 1024):
        ms = products(cost, tokens)
        lines.append(f"{tokens:5} tokens {ms:7.2f} ms, {1e3 * ms / tokens:8.1f} us for each")
    return [*lines, f"one decode costs as much as {saturating_tokens(cost):.0f} tokens of a prompt"]


def tiles(cost: CostModel) -> list[str]:
    """The chosen model and GPU, and SARATHI's own example."""
    lines = [f"{tokens} tokens {products(cost, tokens):7.2f} ms" for tokens in (256, 257)]
    old, paper = CostModel(MODELS["llama-13b"], GPUS["a6000"], software="sarathi"), paper_numbers()
    times = [1e3 * old.seconds(make_batch([(0, tokens, tokens)])) for tokens in (256, 257)]
    stated = [paper[f"f7_{tokens}"] for tokens in (256, 257)]
    for what, (one, more) in (("fitted", times), ("paper", stated)):
        lines.append(f"SARATHI Fig 7, {what}: {one:.1f} ms, and with one token more {more:.1f} ms")
    return [*lines, *one_row_more("h100"), *one_row_more("l40s")]


def measured_products(gpu: str) -> dict[tuple[int, ...], float]:
    """Seconds by (rows, outputs, inputs), of the kernels that the repository holds."""
    return {
        each.shape: each.seconds
        for each in read_kernels()
        if (each.gpu, each.kind) == (gpu, "product")
    }


def one_row_more(gpu: str) -> list[str]:
    """What row 257 costs in vLLM's kernels: the median over all weight matrices measured at both.

    The A100 was not measured at 257 rows.
    """
    seconds = measured_products(gpu)
    pairs = [((256, *rest), (257, *rest)) for rows, *rest in seconds if rows == 256]
    pairs = [(one, more) for one, more in pairs if more in seconds]
    law = CostModel(MODELS["llama3.1-8b"], GPUS[gpu], software="vllm")
    steps = [
        statistics.median(time(more) / time(one) - 1 for one, more in pairs)
        for time in (seconds.__getitem__, lambda shape: law.linear(shape[0], shape[2], shape[1]))
    ]
    measured, ours = (f"{100 * step:+.0f} %" for step in steps)
    return [f"{len(pairs)} products of vLLM on {gpu:4}: measured {measured}, predicted {ours}"]


def waves(cost: CostModel, software: str) -> list[str]:
    """The rates, and those that were measured; "-" where the repository holds no such kernel."""
    lines, inputs, rows = [], 4096, (256, 1024, 4096)
    seconds = measured_products(cost.gpu.name) if software == "vllm" else {}

    def rate(tokens: int, outputs: int, time: float) -> str:
        return f"{2e-12 * tokens * inputs * outputs / time:4.0f}"

    for outputs in (2048, 4096, 16384):
        ours = [rate(n, outputs, cost.linear(n, inputs, outputs)) for n in rows]
        lines.append(f"{inputs} x {outputs:5}, predicted: {' '.join(ours)} TFLOP/s")
        times = [seconds.get((n, outputs, inputs)) for n in rows]
        if any(times):
            shown = [
                rate(n, outputs, time) if time else "   -"
                for n, time in zip(rows, times, strict=True)
            ]
            lines.append(f"{'measured':>23}: {' '.join(shown)}")
    return ["256, 1024, 4096 rows:", *lines]


def starts(cost: CostModel) -> list[str]:
    own, layers = cost.efficiency, cost.model.n_layer
    start = 1e3 * (
        (4 * layers + 1) * own.overhead + layers * (KERNELS * own.launch + own.decode_start)
    )
    whole = 1e3 * cost.seconds(make_batch(decodes=1))
    count = (4 + KERNELS + 1) * layers + 1
    return [f"one decode, {count} kernels: {whole:.1f} ms, of which {start:.1f} ms are starts"]


def prompts(cost: CostModel) -> list[str]:
    lines = []
    for tokens in (1024, 4096, 16384):
        operators = cost.operators(make_batch([(0, tokens, tokens)]))
        share = 100 * operators["attn"] / sum(operators.values())
        chunks = sum(cost.chunk_attention(start, 512) for start in range(0, tokens, 512))
        ratio = chunks / cost.chunk_attention(0, tokens)
        lines.append(
            f"{tokens:5} tokens: {share:2.0f} % of the time; in chunks of 512 {ratio:.2f}x"
        )
    return lines


def decodes(cost: CostModel) -> list[str]:
    lines = []
    for size, context in ((1, 1024), (32, 1024), (32, 8192)):
        attention = 1e3 * cost.operators(make_batch(decodes=size, context=context))["attn"]
        ms = products(cost, size)
        lines.append(f"{size:3} x {context}: attention {attention:6.2f} ms, products {ms:5.2f} ms")
    return lines


def hybrid() -> list[str]:
    """Of SARATHI's software: no other was measured with both in one batch."""
    old = CostModel(MODELS["llama-13b"], GPUS["a6000"], software="sarathi")
    layer = 1e6 * old.efficiency.hybrid
    whole = 1e3 * old.attention(make_batch([(0, 1021, 1024)], decodes=3))
    return [f"{layer:.0f} us a layer: {1e-3 * layer * old.model.n_layer:.1f} of {whole:.1f} ms"]


def all_reduces(cost: CostModel, software: str) -> list[str]:
    lines = []
    for name, batch in (
        ("prompt of 2048", make_batch([(0, 2048, 2048)])), ("32 decodes", make_batch(decodes=32)),
    ):  # fmt: skip
        for tp in (2, 8):
            if cost.model.n_head % tp:
                continue
            operators = CostModel(cost.model, cost.gpu, tp=tp, software=software).operators(batch)
            whole = sum(operators.values())
            gain, share = cost.seconds(batch) / whole, 100 * operators["all_reduce"] / whole
            lines.append(f"{name:14}, TP{tp}: {gain:.1f}x as fast, {share:2.0f} % all-reduces")
    return lines


def host() -> list[str]:
    """Whole iterations of Sarathi-Serve's artefact: Yi-34B on two A100s."""
    cost, lines = replace(NODE, host="sarathi-serve").cost_model, []
    for name, what, batch in (
        ("prefill_4096", "prompt of 4096", make_batch([(0, 4096, 4096)])),
        ("decode_1", "1 decode", make_batch(decodes=1)),
        ("decode_32", "32 decodes", make_batch(decodes=32)),
        ("decode_128", "128 decodes", make_batch(decodes=128)),
    ):
        kernels, whole = 1e3 * cost.kernels(batch), 1e3 * cost.seconds(batch)
        line = f"{what:14}: kernels {kernels:4.0f} ms, with the host {whole:4.0f} ms"
        lines.append(f"{line}, paper {paper_numbers()[f'ss_yi_{name}']:4.0f} ms")
    return lines


def errors() -> list[str]:
    """Medians of |error| of kernels that were held out of the fit, and signed medians of some."""
    found = {gpu: law_kernels.priced(gpu) for gpu in law_kernels.TODAY}
    lines = []
    for gpu, kinds in found.items():
        cells = [f"{kind} {law_kernels.median_error(rows):.1f} %" for kind, rows in kinds.items()]
        lines += [f"{gpu:9}: {', '.join(cells[:4])}", 11 * " " + ", ".join(cells[4:])]
    lines.append(f"signed: {', '.join(found)}")
    for kind, group in WHERE:
        cells = []
        for kinds in found.values():
            error = {row.kernel: row.error for row in kinds[kind] if row.held_out and row.counts}
            middle = statistics.median(error[each] for each in by_size(kind, list(error))[group])
            cells.append(f"{middle:+6.1f} %")
        lines.append(f"  {kind:10} from {group:10}: {', '.join(cells)}")
    return lines


def sections(cost: CostModel, software: str) -> dict[str, list[str]]:
    """Lines by the heading that they stand under in docs/what-a-gpu-charges.md."""
    return {
        "Two rates: the roofline": roofline(cost),
        "Few tokens cost as much as one": few_tokens(cost),
        "Tiles: one token more": tiles(cost),
        "Waves: SMs that wait": waves(cost, software),
        "The price of a kernel": starts(cost),
        "Attention of a prompt": prompts(cost),
        "Attention of decodes": decodes(cost),
        "Chunks and decodes in one batch": hybrid(),
        "All-reduces": all_reduces(cost, software),
        "What is not in the price": host(),
        "How good the law is": errors(),
    }


def main() -> None:
    options = ScriptParser(__doc__, FLAGS).parse_args()
    model, gpu = priced_model(options.model), lookup(GPUS, options.gpu, "GPU")
    cost = CostModel(model, gpu, software=options.software)
    print(f"{model.name} on {gpu.name}, software {options.software}, {SINCE[options.software]}")
    if doubts := cost.doubts():
        print(textwrap.fill(f"Note: {doubts}", 100))
    for heading, lines in sections(cost, options.software).items():
        print(f"\n{heading}\n")
        for line in lines:
            print(f"  {line}")


if __name__ == "__main__":
    run_main(main)
