"""All that is worth knowing about this engine on your GPU: ten minutes, one file to send back.

    make gpu                                             the largest of MODELS that fits this card
    python experiments/gpu_day.py --only decode,prefill  some steps
    python experiments/gpu_day.py --device cpu           a rehearsal: the demo model on a CPU

The most useful step runs first. Each has a limit of its own, in a worker process. If a step fails,
the next one goes on. If it hangs or breaks the device, its process is ended, and a new one takes
the next step. Each result is on the disk before the next one begins, and the zip is written again
after each step. Predictions are the cost model's, with vLLM's constants.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import csv
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from unittest import mock

import torch
from matplotlib import pyplot as plt

import experiments
from batch import Batch
from command.checks import UserError, lookup
from command.cli import run_main
from command.flags import Flag
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from engine import LLM, SamplingParams
from executor import synchronized_clock
from experiments.lib import look
from experiments.lib.common import ROOT
from experiments.lib.engines import Priced, Real, rows_of
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import batch_runner, place
from experiments.lib.rows import Rows
from experiments.lib.study import finish
from experiments.table4 import gains
from fast import cuda
from fast.kernels import report
from loading.device import batch_bytes
from model import untimed

STEPS: dict[str, tuple[int, Callable]] = {}  # name -> (limit in s, function), the worthiest first
WORKER = "from pathlib import Path; from experiments.gpu_day import work"
CASE = "model", "back", "graphs", "small", "start", "riders"
COLUMNS = "kind", *CASE, "tokens", "B", "ms", "predicted_ms", "share"  # of gpu.csv
# rows of gpu.jsonl that are iterations, what they are compared with, and what grows
KINDS = ("decodes", "a copy", "B"), ("chunk", "a large product", "tokens")
MODEL_FOR = {56e9: "llama-13b", 22e9: "llama3.1-8b", 0: "llama3.2-3b"}  # from so many bytes on
CARDS = {  # a part of the card's name: ours. The first that fits
    "H100 PCIe": "h100-pcie", "H100": "h100", "H200": "h200", "B200": "b200", "L40S": "l40s",
    "A100-SXM4-40GB": "a100-40gb", "A100": "a100-80gb", "A6000": "a6000", "A10": "a10",
    "A30": "a30", "A40": "a40", "L20": "l20", "L4": "l4", "T4": "t4", "4090": "rtx4090",
    "3090": "rtx3090",
}  # fmt: skip


def step(limit: int) -> Callable:
    def add(function: Callable) -> Callable:
        STEPS[function.__name__] = limit, function
        return function

    return add


class Day:
    """What the steps share: where results go, and a model that is loaded once."""

    def __init__(self, out: Path, device: str) -> None:
        self.out, self.device, self.now = out, torch.device(device), ""
        self.cuda = self.device.type == "cuda"
        self.model = self.second = "demo"
        self.length, self.slots, self.repeats = (1024, 18, 5) if self.cuda else (256, 4, 2)
        self.loaded: tuple[tuple, LLM] | None = None
        self.gpu: str | None = None  # None: nothing is predicted
        if self.cuda:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            self.model = next(name for least, name in MODEL_FOR.items() if memory >= least)
            self.second = "llama3.2-3b" if self.model != "llama-13b" else "llama3.1-8b"
            name = torch.cuda.get_device_name()
            self.gpu = next((gpu for part, gpu in CARDS.items() if part in name), None)

    def note(self, **row: object) -> None:
        with open(self.out / "gpu.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.now, **row}, default=str) + "\n")

    def llm(
        self, model: str, slots: int, length: int, back: str = "auto", graphs: str = "auto"
    ) -> LLM:
        """One at a time: two would not fit."""
        key = model, back, graphs
        if self.loaded is None or self.loaded[0] != key:
            self.loaded = None
            gc.collect()
            sizes = {"max_batch_size": slots, "max_length": length, "device": self.device}
            self.loaded = key, LLM(model, attention=back, cuda_graphs=graphs, **sizes)
        llm = self.loaded[1]
        if (llm.cache.slots, llm.max_length) != (slots, length):
            llm.resize_cache(slots, length)
        return llm

    def predicted(self, model: str, batch: Batch) -> float:
        """ms; NaN for a card that configs/ does not know"""
        if self.gpu is None:
            return float("nan")
        return 1e3 * CostModel(MODELS[model], GPUS[self.gpu], software="vllm").seconds(batch)

    def timed(self, run: Callable[[Batch], object], batch: Batch) -> float:
        """Seconds of an iteration: the median, once it is warm, and recorded where it can be."""
        for _ in range(3):
            run(batch)
        return statistics.median(run(batch).seconds for _ in range(2 * self.repeats))

    def run(self, name: str, *command: object) -> None:
        command = [sys.executable, *map(str, command)]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self.note(what=name, rc=found.returncode, said=(found.stdout + found.stderr)[-5000:])


# ------------------------------------------------------------------------------------------- steps


@step(60)
def ceilings(day: Day) -> None:
    """What this machine is, and gives at most: bytes/s of a copy, FLOP/s of a product."""
    packages = sorted(f"{d.name}=={d.version}" for d in distributions())
    day.note(what="report", lines=report(), cpus=os.cpu_count(), packages=packages)
    for command in ("nvidia-smi", "git log -1 --format=%H"):
        found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        day.note(what=command, said=found.stdout[-4000:])

    def seconds(run: Callable, count: int) -> float:
        run()
        begin = synchronized_clock(day.device)
        for _ in range(count):
            run()
        return (synchronized_clock(day.device) - begin) / count

    size, n = (2**32, 8192) if day.cuda else (2**24, 512)
    pair = torch.ones(2, size, dtype=torch.uint8, device=day.device)
    copy = min(seconds(lambda: pair[0].copy_(pair[1]), 5) for _ in range(3))
    x, y = (torch.randn(n, n, device=day.device).bfloat16() for _ in range(2))
    gemm = min(seconds(lambda: x @ y, 5) for _ in range(3))
    day.note(what="a copy", unit="GB/s", value=2e-9 * size / copy)
    day.note(what="a large product", unit="TFLOP/s", value=2e-12 * n**3 / gemm)


def how(llm: LLM) -> dict[str, object]:
    """What runs an iteration. small: whose small operators."""
    small = "triton" if cuda.small_operators(llm.device, llm.dtype) else "pytorch"
    return {"back": llm.attention, "graphs": bool(llm.graphs), "small": small}


def decodes_of(day: Day, model: str, back: str, graphs: str, sizes: tuple[int, ...]) -> None:
    """Iterations of decodes: ms, bytes read, what the host takes."""
    config, length = MODELS[model], day.length
    llm = day.llm(model, max(sizes), length, back, graphs)
    run, runs = batch_runner(llm, False), llm.make_executor()
    for decodes in sizes:
        batch = make_batch(decodes=decodes, context=length)
        seconds = day.timed(run, batch)
        place(runs, batch)
        flat = runs.flatten(batch)
        begin = time.perf_counter()
        runs.forward(flat, untimed)
        host = time.perf_counter() - begin  # no wait: until all is launched
        size = 2 * config.parameters + decodes * length * config.kv_bytes_per_token(2)
        case = {"model": model, **how(llm)}
        times = {"ms": 1e3 * seconds, "predicted_ms": day.predicted(model, batch)}
        rate = 1e-9 * size / seconds
        day.note(what="decodes", **case, B=decodes, **times, host_ms=1e3 * host, rate=rate)


@step(90)
def decode(day: Day) -> None:
    """Each back end; with and without graphs; with PyTorch's small operators and with Triton's."""
    sizes = (1, 2, 4, 8, 16, 32) if day.cuda else (1, 2)
    for graphs in ("off", "on") if day.cuda else ():
        with mock.patch.object(cuda, "small_operators", lambda *_: None):
            decodes_of(day, day.model, "rows", graphs, sizes)
        day.loaded = None
        decodes_of(day, day.model, "rows", graphs, sizes)
    for back in ("xformers", "sdpa"):
        with suppress(UserError):  # it cannot run here
            decodes_of(day, day.model, back, "off", sizes[::3])


@step(60)
def prefill(day: Day) -> None:
    """Chunks and whole prompts, alone and beside decodes; and the memory that they take."""
    llm, config, length = day.llm(day.model, day.slots, day.length), MODELS[day.model], day.length
    run = batch_runner(llm, False)
    for riders in (0, min(7, day.slots - 1)):
        for start, n in [(0, length >> shift) for shift in range(5)] + [(length // 2, length // 4)]:
            batch = make_batch([(start, n, length)], riders, length)
            seconds = day.timed(run, batch)
            case = {"model": day.model, **how(llm), "start": start, "riders": riders, "tokens": n}
            times = {"ms": 1e3 * seconds, "predicted_ms": day.predicted(day.model, batch)}
            rate = 2e-12 * config.parameters * (n + riders) / seconds
            day.note(what="chunk", **case, **times, rate=rate)
    if day.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(make_batch([(0, length - 1, length)], day.slots - 1, length))
        used = torch.cuda.max_memory_allocated() - before
        day.note(what="memory", used=used, kept=batch_bytes(config, day.slots, length, 2))


def figure(day: Day, name: str, wanted: Callable[[dict], bool], repeats: int) -> None:
    """A study's own function at the paper's cases: measured, predicted for this GPU, published."""
    study = experiments.studies()[name]
    sweep = next(each for each in study.swept(not day.cuda) if each.on and each.cases)
    cases = [case for case in sweep.cases if wanted(case)]
    if not day.cuda:
        least = {"L": 64, "B": 2, "C": 16}
        cases = [c | {k: min(v, c[k]) for k, v in least.items() if k in c} for c in cases[:2]]
    length, most = (max(case.get(key, 1) for case in cases) for key in "LB")
    real = Real(day.llm(day.model, max(most, 2), max(length, 32)), repeats)
    rows = rows_of("measured", [(real, case) for case in cases], real.rows(sweep.run, cases))
    for engine in sweep.on:
        jobs = [(engine, case) for case in cases]
        rows += rows_of("predicted", jobs, [sweep.run(engine, **case) for case in cases])
    for case in cases if day.gpu else ():  # no second GPU in a picture
        here = Priced(day.model, day.gpu, software="vllm")
        day.note(what="figure", figure=name, **case, predicted=sweep.run(here, **case))
    found = Rows(rows, study.units)
    with suppress(Exception):  # some cases of all: what a study says of all may not exist
        study.derive(found)
    found = Rows([*found, *study.published(found)], study.units)
    finish(day.out / f"{name}.csv", found, study.picture)


@step(60)
def figures(day: Day) -> None:
    """Fig 7 and 8, Table 2."""
    sizes = (2, 4, 6, 9, 18)
    figure(day, "fig8", lambda c: c["L"] == 1024 and c["B"] in sizes, day.repeats)
    figure(day, "table2", lambda c: True, day.repeats)
    figure(day, "fig7", lambda c: c["L"] % 64 in (0, 1), day.repeats)


@step(170)
def tests(day: Day) -> None:
    """float64 on CUDA under all policies, with graphs and without; back ends beside `math`."""
    processes = min(5, os.cpu_count() // 2) if day.cuda else 0
    where = "tests" if day.cuda else "tests/test_graphs.py"
    options = ["-q", "-m", "cuda", "-p", "no:cacheprovider", "--tb=short", "-rfE", "-n"]
    day.run("tests", "-m", "pytest", *options, processes, where)


@step(120)
def fig9_table4(day: Day) -> None:
    sweep = experiments.studies()["fig9"].swept()[0]
    found = [case["PD"] for case in sweep.cases if case["L"] == 1024]
    places = {min(found, key=lambda pd: abs(pd - ratio)) for ratio in (7, 14, 28, 50)}
    figure(day, "fig9", lambda c: c["L"] == 1024 and c["C"] >= 256 and c["PD"] in places, 1)
    figure(day, "table4", lambda c: True, 1)


@step(60)
def second_model(day: Day) -> None:
    """Heads that share keys, with graphs and without; greedy and drawn tokens."""
    for graphs in ("off", "on") if day.cuda else ("off",):
        decodes_of(day, day.second, "auto", graphs, (1, 8, 64) if day.cuda else (1, 2))
    llm, drawn = day.llm(day.second, 8, day.length), {"temperature": 1.0}
    for given in ({}, drawn, drawn | {"top_k": 50}, drawn | {"top_p": 0.9}):
        params = SamplingParams(33 if day.cuda else 4, ignore_eos=True, seed=1, **given)
        for _ in range(3):
            llm.generate([[5 + i, 7, 9] * 20 for i in range(8)], params)
        found = [each.seconds for each in llm.trace.iterations if not each.num_chunks]
        day.note(what="sampling", **given, B=8, ms=1e3 * statistics.median(found))


@step(30)
def profile(day: Day) -> None:
    """Which kernels take the time: of decodes, and of a hybrid batch."""
    run, length = batch_runner(day.llm(day.model, day.slots, day.length), False), day.length
    riders = min(7, day.slots - 1)
    for name, batch in (
        ("decodes", make_batch(decodes=riders + 1, context=length)),
        ("hybrid", make_batch([(length // 2, length // 4, length)], riders, length)),
    ):
        day.timed(run, batch)
        with torch.profiler.profile() as found:
            run(batch)
        by = "self_device_time_total" if day.cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
        (day.out / f"profile_{name}.txt").write_text(table)


@step(90)
def large(day: Day) -> None:
    """LLaMA-33B, 65 GB: Table 4's case of 1K."""
    model, case = "llama-33b", {"L": 1024, "B": 10, "PD": 28, "C": 256}
    if not day.cuda:
        model, case = day.model, {"L": 64, "B": 3, "PD": 7.0, "C": 16}
    real = Real(day.llm(model, case["B"], case["L"]), 1)
    day.note(what="table4", model=model, **case, measured=real.rows(gains, [case]))


@step(150)
def more_figures(day: Day) -> None:
    """Fig 13, 3 and 4."""
    figure(day, "fig13", lambda c: c["L"] == 1024 and c["C"] in (64, 128, 256, 512), 1)
    figure(day, "fig3", lambda c: True, 2)
    fits = lambda c: c["L"] * c["B"] <= 8192 and (c["phase"] != "decode" or c["B"] <= 32)
    figure(day, "fig4", fits, 2)


@step(110)
def validate(day: Day) -> None:
    """A calibration of this card, and what it predicts of whole runs."""
    day.loaded = None
    gc.collect()
    if day.cuda:
        torch.cuda.empty_cache()
    saved, quick = day.out / "calibration.json", [] if day.cuda else ["--quick"]
    model = ["--model", day.model, "--device", day.device]
    where = ["--json", saved, "--seconds", 25]
    day.run("calibrate", "experiments/calibrate.py", *model, *where, *quick)
    options = ["--calibration", saved, "--samples", 5, "--repeats", 1, "--out", day.out]
    day.run("validate", "experiments/validate.py", *options, *quick)


# ----------------------------------------------------------------------------------- worker, driver


def work(out: Path, device: str, names: list[str]) -> None:
    """The worker. A step that breaks the device ends it: its CUDA context is lost."""
    day = Day(out, device)
    for name in names:
        day.now, begin, failed = name, time.perf_counter(), ""
        day.note(what="begin", at=time.time())
        try:
            STEPS[name][1](day)
        except Exception as error:  # noqa: BLE001  the next step goes on
            failed = "".join(traceback.format_exception(error))[-3000:]
        day.note(what="end", seconds=time.perf_counter() - begin, failed=failed)
        if "CUDA error" in failed:
            os._exit(3)


def read(out: Path, what: str = "") -> list[dict]:
    """The rows so far, of one kind. The last line may be half written."""
    file = out / "gpu.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if what in ("", row["what"])]


def drive(out: Path, device: str, left: list[str], seconds: float) -> list[str]:
    """Runs workers until all steps are done, or time is over. Returns the steps that are not."""
    begin = time.monotonic()
    while left and time.monotonic() - begin < seconds:
        code = f"{WORKER}; work(Path({str(out)!r}), {device!r}, {left!r})"
        command = [sys.executable, "-c", code]
        with open(out / "log.txt", "a") as log:
            to = {"stdout": log, "stderr": log, "start_new_session": True, "cwd": ROOT}
            worker = subprocess.Popen(command, **to)
        now, since, known = left[0], time.time(), 0
        try:
            while worker.poll() is None and time.monotonic() - begin < seconds:
                time.sleep(0.2)
                done = {row["step"] for row in read(out, "end")}
                for row in read(out, "begin"):
                    now, since = (row["step"], row["at"]) if row["step"] in left else (now, since)
                if len(done) > known:
                    known = len(done)
                    print(f"{time.monotonic() - begin:4.0f} s: {now}", flush=True)
                    bundle(out)
                if now not in done and time.time() - since > STEPS[now][0]:
                    break
        finally:  # Ctrl-C, too
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        if now not in {row["step"] for row in read(out, "end")}:
            row = {"step": now, "what": "end", "failed": f"ended, status {worker.returncode}"}
            with open(out / "gpu.jsonl", "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(row) + "\n")  # its last line may be half written
        done = {row["step"] for row in read(out, "end")}
        left = [name for name in left if name not in done]
    return left


def bundle(out: Path) -> None:
    with zipfile.ZipFile(out / "gpu-day.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for each in sorted(out.iterdir()):
            if each.suffix != ".zip" and each.is_file():
                made.write(each, each.name)


def summarize(out: Path, left: list[str]) -> str:
    """Writes summary.md, gpu.csv and gpu.png, of what is there. Returns the summary."""
    lines, found = ["# This engine on a GPU", ""], []
    for row in read(out, "end"):
        last = (row["failed"].strip().splitlines() or ["ok"])[-1]
        lines.append(f"- {row['step']}: {row.get('seconds', 0):.0f} s, {last[:200]}")
    lines += [f"- {name}: not run" for name in left]
    look.use_style()
    figure, panels = plt.subplots(1, 2, figsize=(15, 6.5), layout="constrained")
    for axes, (kind, of, x) in zip(panels, KINDS, strict=True):
        top = (read(out, of) or [{"value": float("inf"), "unit": ""}])[-1]
        lines += ["", f"{of}: {top['value']:.4g} {top['unit']}", ""]
        groups: dict[str, list] = {}
        for row in read(out, kind):
            row |= {"kind": kind, "share": round(100 * row["rate"] / top["value"])}
            said = f"{row['model']}, {row['back']}, {row['small']}'s small operators"
            said += ", graphs" if row["graphs"] else ""
            if kind == "chunk":
                said += f", from token {row['start']}, beside {row['riders']} decodes"
            hope = f" (predicted {row['predicted_ms']:.2f})" if row["predicted_ms"] > 0 else ""
            took = f"{row['ms']:.2f} ms{hope}, {row['share']} %"
            lines.append(f"- {row[x]} {'decodes' if x == 'B' else 'tokens'}, {said}: {took}")
            hoped = row["share"] * row["ms"] / row["predicted_ms"]
            groups.setdefault(said, []).append((row[x], row["share"], hoped))
            found.append(row)
        for name, points in groups.items():
            places, shares, hoped = zip(*sorted(points), strict=True)
            (line,) = axes.plot(places, shares, "o-", label=name)
            axes.plot(places, hoped, ":", color=line.get_color())
        what = "decodes of 1 token each" if x == "B" else "tokens of a chunk"
        axes.set(xlabel=what, ylabel=f"% of what {of} reaches, {top['unit']}", ylim=(0, 105))
        axes.set_title("measured; dotted: predicted")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        if groups:
            axes.legend(fontsize=7)
    figure.savefig(out / "gpu.png", dpi=120)
    with open(out / "gpu.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(found)
    text = "\n".join(lines) + "\n"
    (out / "summary.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    flags = {
        "out": Flag("", ROOT / "build" / "gpu"),
        "seconds": Flag("time for all steps", 560.0),
        "device": Flag("cpu rehearses with the demo model", "cuda"),
        "only": Flag(f"steps, of {', '.join(STEPS)}", shown="all of them"),
    }
    options = ScriptParser(__doc__, flags).parse_args()
    out, names = options.out.resolve(), [*STEPS]
    if options.only:  # shares need the ceilings
        names = [*dict.fromkeys(["ceilings", *options.only.split(",")])]
        for name in names:
            lookup(STEPS, name, "step")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UserError("no GPU is here: --device cpu rehearses")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.jsonl").unlink(missing_ok=True)
    left = drive(out, options.device, names, options.seconds)
    print(summarize(out, left), f"\nsend back {out / 'gpu-day.zip'}", sep="")
    bundle(out)


if __name__ == "__main__":
    run_main(main)
