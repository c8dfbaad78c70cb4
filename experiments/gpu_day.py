"""All that is worth knowing about this engine on your GPU: ten minutes, one file to send back.

    make gpu                                          LLaMA-13B, as the paper; 28 GB of memory
    python experiments/gpu_day.py --only decode,fig3     some steps
    python experiments/gpu_day.py --device cpu           a rehearsal: the demo model on a CPU

Steps run in the order of their worth, each under a limit of its own, in a worker process. If a step
fails, the next one goes on. If it hangs or breaks the device, the worker is ended, and a new one
goes on behind it. Each result is on the disk before the next one begins, and the zip is written
again after each step. Predictions are the cost model's, with vLLM's constants.
"""

import enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import gc
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

import executor
import experiments
from batch import Batch
from command.checks import UserError, lookup
from command.cli import run_main
from command.flags import Flag
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from engine import LLM, SamplingParams
from executor import synchronized_clock
from experiments.lib.common import ROOT
from experiments.lib.engines import Priced, Real, rows_of
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import batch_runner, hardware_of, place
from experiments.lib.rows import Rows
from experiments.lib.study import finish
from experiments.table4 import gains
from fast import cuda
from fast.kernels import report
from loading.device import batch_bytes
from model import untimed

STEPS: dict[str, tuple[int, Callable]] = {}  # name -> (limit in s, function), the worthiest first
NAMES = {"h200": "H200", "h100-pcie": "H100 PCIe", "h100": "H100", "a100-80gb": "A100",
         "l40s": "L40S", "t4": "T4", "a10": "A10", "l4": "L4", "rtx4090": "4090"}  # fmt: skip


def step(limit: int) -> Callable:
    def add(function: Callable) -> Callable:
        STEPS[function.__name__] = limit, function
        return function

    return add


class Day:
    """What the steps share: where results go, and a model that is loaded once."""

    def __init__(self, out: Path, small: str) -> None:
        self.out, self.small, self.now = out, small, ""
        self.device = torch.device("cpu" if small == "cpu" else "cuda")
        self.cuda = self.device.type == "cuda"
        small_ones = {"cpu": ("demo", "demo"), "fake": ("laptop", "llama3.2-3b")}
        self.model, self.second = small_ones.get(small, ("llama-13b", "llama3.1-8b"))
        self.length, self.slots, self.repeats = (256, 4, 2) if small else (1024, 18, 5)
        self.loaded: tuple[tuple, LLM] | None = None
        name = torch.cuda.get_device_name() if self.cuda else ""
        self.gpu = next((gpu for gpu, part in NAMES.items() if part in name), "h100")

    def note(self, **row: object) -> None:
        with open(self.out / "gpu.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.now, **row}, default=str) + "\n")

    def forget(self) -> None:
        """Give the memory of the model back."""
        self.loaded = None
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def llm(self, model: str, slots: int, length: int, back: str = "auto", graphs: str = "auto"):
        """One at a time: two would not fit."""
        key = model, back, graphs
        if self.loaded is None or self.loaded[0] != key:
            self.forget()
            sizes = {"max_batch_size": slots, "max_length": length, "device": str(self.device)}
            self.loaded = key, LLM(model, attention=back, cuda_graphs=graphs, **sizes)
            llm = self.loaded[1]
            self.note(what="load", model=model, chosen=llm.attention, graphs=bool(llm.graphs))
        llm = self.loaded[1]
        if (llm.cache.slots, llm.max_length) != (slots, length):
            llm.resize_cache(slots, length)
        return llm

    def predicted(self, model: str, batch: Batch) -> float:
        """ms"""
        return 1e3 * CostModel(MODELS[model], GPUS[self.gpu], software="vllm").seconds(batch)

    def seconds(self, run: Callable, count: int) -> float:
        """Of one run, the mean of `count` in a row, the median of three times."""
        found = []
        for _ in range(4):
            begin = synchronized_clock(self.device)
            for _ in range(count):
                run()
            found.append((synchronized_clock(self.device) - begin) / count)
        return statistics.median(found[1:])


# ------------------------------------------------------------------------------------------- steps


@step(40)
def environment(day: Day) -> None:
    day.note(what="report", lines=report(), python=platform.python_version(), cpus=os.cpu_count())
    day.note(what="packages", said=sorted(f"{d.name}=={d.version}" for d in distributions()))
    for command in ("nvidia-smi", "git log -1 --format=%H", "lscpu"):
        found = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        day.note(what=command, said=(found.stdout + found.stderr)[-6000:])


@step(40)
def ceilings(day: Day) -> None:
    """What the card gives at most: bytes/s of a copy, FLOP/s of a product; a launch's price."""
    size, n = (2**22, 256) if day.small else (2**32, 8192)
    pair = torch.ones(2, size, dtype=torch.uint8, device=day.device)
    copy = day.seconds(lambda: pair[0].copy_(pair[1]), 5)
    day.note(what="copy", unit="GB/s", value=2 * size / copy / 1e9)
    x, y = (torch.randn(n, n, device=day.device).bfloat16() for _ in range(2))
    gemm = day.seconds(lambda: x @ y, 5)
    day.note(what="gemm", unit="TFLOP/s", value=2 * n**3 / gemm / 1e12)
    cost = CostModel(MODELS[day.model], GPUS[day.gpu], software="vllm")
    for inputs, outputs in MODELS[day.model].linears.values():
        weight = torch.randn(outputs, inputs, device=day.device).bfloat16()
        for rows in (1, 8, 64, 128, 256, 512, 1024, 2048):
            x = torch.randn(rows, inputs, device=day.device).bfloat16()
            taken = day.seconds(lambda x=x, weight=weight: F.linear(x, weight), 20)
            priced = cost.linear(rows, inputs, outputs)
            day.note(what="linear", inputs=inputs, outputs=outputs, rows=rows, ms=1e3 * taken,
                     predicted_ms=1e3 * priced)  # fmt: skip
    tiny = torch.zeros(8, device=day.device)
    begin = time.perf_counter()
    for _ in range(1000):
        tiny.add_(1)
    day.note(what="launch", unit="us", value=1e3 * (time.perf_counter() - begin))


def decodes_of(
    day: Day, model: str, back: str, graphs: str, sizes: tuple[int, ...], small: str = "triton"
) -> None:
    """Iterations of decodes: ms, bytes read, what the host takes. small: whose small operators."""
    config, length = MODELS[model], day.length
    llm = day.llm(model, max(sizes), length, back, graphs)
    run, runs = batch_runner(llm, False), llm.make_executor()
    for decodes in sizes:
        batch = make_batch(decodes=decodes, context=length)
        for _ in range(3):
            run(batch)
        seconds = statistics.median(run(batch).seconds for _ in range(2 * day.repeats))
        place(runs, batch)
        flat = runs.flatten(batch)
        begin = time.perf_counter()
        runs.forward(flat, untimed)
        host = time.perf_counter() - begin  # no wait: until all is launched
        size = 2 * config.parameters + decodes * length * config.kv_bytes_per_token(2)
        day.note(what="decodes", model=model, back=llm.attention, graphs=bool(llm.graphs),
                 small=small, B=decodes, L=length, ms=1e3 * seconds, host_ms=1e3 * host,
                 GBs=size / seconds / 1e9, predicted_ms=day.predicted(model, batch))  # fmt: skip


@step(90)
def decode(day: Day) -> None:
    """Each back end; with and without graphs; with PyTorch's small operators and with Triton's."""
    if not day.cuda:
        return decodes_of(day, day.model, "sdpa", "off", (1, 2))
    sizes = (1, 2) if day.small else (1, 2, 4, 8, 16, 32)
    for graphs in ("off", "on"):
        with mock.patch.object(cuda, "small_operators", lambda *_: None):
            decodes_of(day, day.model, "rows", graphs, sizes, "pytorch")
        day.forget()
        decodes_of(day, day.model, "rows", graphs, sizes)
    for back in ("xformers", "sdpa"):
        with suppress(UserError):  # it cannot run here
            decodes_of(day, day.model, back, "off", sizes[:4:3])


@step(60)
def prefill(day: Day) -> None:
    """Chunks and whole prompts, alone and beside decodes."""
    llm, config, length = day.llm(day.model, day.slots, day.length), MODELS[day.model], day.length
    run = batch_runner(llm, False)
    shapes = [(0, n) for n in (64, 128, 256, 512, 1024) if n <= length]
    shapes.append((length // 2, length // 4))
    for riders in (0, min(7, day.slots - 1)):
        for start, n in shapes:
            batch = make_batch([(start, n, length)], riders, length)
            for _ in range(3):
                run(batch)
            seconds = statistics.median(run(batch).seconds for _ in range(day.repeats))
            day.note(what="chunk", start=start, rows=n, riders=riders, ms=1e3 * seconds,
                     TFLOPs=2 * config.parameters * (n + riders) / seconds / 1e12,
                     predicted_ms=day.predicted(day.model, batch))  # fmt: skip


@step(20)
def memory(day: Day) -> None:
    """A batch's intermediate results, beside what is kept free for them."""
    run = batch_runner(day.llm(day.model, day.slots, day.length), False)
    run(make_batch(decodes=1, context=5))
    if day.small != "fake" and day.cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(make_batch([(0, day.length, day.length)], day.slots - 1, day.length))
        kept = batch_bytes(MODELS[day.model], day.slots, day.length, 2)
        day.note(what="memory", used=torch.cuda.max_memory_allocated() - before, kept=kept)


def figure(day: Day, name: str, wanted: Callable[[dict], bool], repeats: int) -> None:
    """A study's own function at the paper's cases: measured, predicted for this GPU, published."""
    study = experiments.studies()[name]
    sweep = next(each for each in study.swept(day.small != "") if each.on and each.cases)
    cases = [case for case in sweep.cases if wanted(case)]
    if day.small:
        least = {"L": 64, "B": 2, "C": 16}
        cases = [{k: min(v, least.get(k, v)) if isinstance(v, int) else v for k, v in case.items()}
                 for case in cases[:2]]  # fmt: skip
    length, most = (max(case.get(key, 1) for case in cases) for key in "LB")
    real = Real(day.llm(day.model, max(most, 2), max(length, 32)), repeats)
    rows = rows_of("measured", [(real, case) for case in cases], real.rows(sweep.run, cases))
    jobs = [(engine, case) for engine in sweep.on for case in cases]
    rows += rows_of("predicted", jobs, [sweep.run(engine, **case) for engine, case in jobs])
    if day.cuda:
        here = Priced(day.model, day.gpu, software="vllm")
        own = rows_of(
            "predicted", [(here, c) for c in cases], [sweep.run(here, **c) for c in cases]
        )
        for row in own:
            day.note(what="predicted", figure=name, **row)
    found = Rows(rows, study.units)
    with suppress(Exception):  # some cases of all: what a study says of all may not exist
        study.derive(found)
    found = Rows([*found, *study.published(found)], study.units)
    finish(day.out / f"{name}.csv", found, study.picture)


@step(60)
def fig7_fig8_table2(day: Day) -> None:
    sizes = (2, 4, 6, 9, 18)
    figure(day, "fig8", lambda c: c["L"] == 1024 and c["B"] in sizes, day.repeats)
    figure(day, "table2", lambda c: True, day.repeats)
    figure(day, "fig7", lambda c: c["L"] % 64 in (0, 1), day.repeats)


@step(170)
def tests(day: Day) -> None:
    """float64 on CUDA under all policies, with graphs and without; back ends beside `math`."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider",
               "--tb=short", "-rfE", "-n", str(min(5, os.cpu_count() // 2)), "tests"]  # fmt: skip
    command[-3:] = ["0", "tests/test_graphs.py"] if day.small else command[-2:]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (day.out / "tests.log").write_text(found.stdout + found.stderr)
    day.note(what="pytest", rc=found.returncode, said=found.stdout[-1500:])


@step(120)
def fig9_table4(day: Day) -> None:
    sweep = experiments.studies()["fig9"].swept()[0]
    found = [case["PD"] for case in sweep.cases if case["L"] == 1024]
    places = {min(found, key=lambda pd: abs(pd - ratio)) for ratio in (7, 14, 28, 50)}
    figure(day, "fig9", lambda c: c["L"] == 1024 and c["C"] >= 256 and c["PD"] in places, 1)
    figure(day, "table4", lambda c: True, 1)


@step(40)
def fig3(day: Day) -> None:
    figure(day, "fig3", lambda c: True, 2)


@step(60)
def sampling(day: Day) -> None:
    """8 requests, greedy and drawn: ms of an iteration of the whole engine."""
    llm = day.llm(day.second, 8, day.length)
    for name, given in (("greedy", {}), ("drawn", {"temperature": 1.0}),
                        ("top_k", {"temperature": 1.0, "top_k": 50}),
                        ("top_p", {"temperature": 1.0, "top_p": 0.9})):  # fmt: skip
        params = SamplingParams(4 if day.small else 33, ignore_eos=True, seed=1, **given)
        for _ in range(3):
            llm.generate([[5 + i, 7, 9] * 20 for i in range(8)], params)
        ends = [each.seconds for each in llm.trace.iterations if not each.num_chunks]
        day.note(what="sampling", kind=name, B=8, ms=1e3 * statistics.median(ends))


@step(60)
def second_model(day: Day) -> None:
    """Heads that share keys; graphs on and off."""
    for graphs in ("off", "on") if day.cuda else ("off",):
        decodes_of(day, day.second, "auto", graphs, (1, 2) if day.small else (1, 8, 64))


@step(30)
def profile(day: Day) -> None:
    """Which kernels take the time: of decodes, and of a hybrid batch."""
    run, length = batch_runner(day.llm(day.model, day.slots, day.length), False), day.length
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * day.cuda
    for name, batch in (
        ("decodes", make_batch(decodes=min(8, day.slots), context=length)),
        ("hybrid", make_batch([(length // 2, length // 4, length)], min(7, day.slots - 1), length)),
    ):
        for _ in range(3):
            run(batch)
        with torch.profiler.profile(activities=kinds) as found:
            run(batch)
        by = "self_device_time_total" if day.cuda else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60)
        (day.out / f"profile_{name}.txt").write_text(table)


@step(90)
def large(day: Day) -> None:
    """LLaMA-33B, 65 GB: Table 4's case of 1K."""
    model, case = ("llama-33b", {"L": 1024, "B": 10, "PD": 28, "C": 256})
    if day.small:
        model, case = day.model, {"L": 64, "B": 3, "PD": 7.0, "C": 16}
    real = Real(day.llm(model, case["B"], case["L"]), 1)
    day.note(what="table4", model=model, hardware=hardware_of(real.llm), **case,
             predicted=gains(Priced(model, day.gpu, software="vllm"), **case),
             measured=real.rows(gains, [case]))  # fmt: skip


@step(110)
def fig13(day: Day) -> None:
    figure(day, "fig13", lambda c: c["L"] == 1024 and c["C"] in (64, 128, 256, 512), 1)


@step(60)
def fig4(day: Day) -> None:
    fits = lambda c: c["L"] * c["B"] <= 8192 and (c["phase"] != "decode" or c["B"] <= 32)
    figure(day, "fig4", fits, 2)


@step(110)
def validate(day: Day) -> None:
    """A calibration of this card, and what it predicts of whole runs."""
    day.forget()
    device, saved = str(day.device), str(day.out / "calibration.json")
    quick = ["--quick"] if day.small else []
    for script, *more in (
        ["calibrate", "--model", day.model, "--json", saved, "--seconds", "25", "--device", device],
        ["validate", "--calibration", saved, "--samples", "5", "--repeats", "1", "--out", day.out],
    ):
        command = [sys.executable, f"experiments/{script}.py", *map(str, more), *quick]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        said = (found.stdout + found.stderr)[-5000:]
        day.note(what=script, rc=found.returncode, said=said)


# ----------------------------------------------------------------------------------- worker, driver


def fake(stack: ExitStack) -> None:
    """A GPU without numbers: what runs there is all but the numbers."""
    from tests.fake_cuda import fake_cuda

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _: random.random())
    stack.enter_context(mock.patch.object(torch.cuda, "Event", lambda **_: event))
    stack.enter_context(mock.patch.object(torch.cuda, "_sleep", lambda _: None))
    stack.enter_context(mock.patch.object(executor, "sample", lambda logits, _: [1] * len(logits)))
    stack.enter_context(fake_cuda((9, 0), memory=84e9))


def work(out: Path, small: str, names: list[str]) -> None:
    """The worker. A step that breaks the device ends it: its CUDA context is lost."""
    with ExitStack() as stack:
        if small == "fake":
            fake(stack)
        day = Day(out, small)
        for name in names:
            day.now, begin, failed = name, time.perf_counter(), ""
            day.note(what="begin", at=time.time())
            try:
                STEPS[name][1](day)
            except BaseException as error:  # noqa: BLE001  the next step goes on
                failed = "".join(traceback.format_exception(error))[-3000:]
            day.note(what="end", seconds=time.perf_counter() - begin, failed=failed)
            if "CUDA error" in failed:
                os._exit(3)


def read(out: Path) -> list[dict]:
    file = out / "gpu.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def drive(out: Path, small: str, left: list[str], seconds: float) -> list[str]:
    """Runs workers until all steps are done, or time is over. Returns the steps that are not."""
    begin = time.monotonic()
    while left and time.monotonic() - begin < seconds:
        code = "from pathlib import Path; from experiments.gpu_day import work; "
        mine = [sys.executable, "-c", code + f"work(Path({str(out)!r}), {small!r}, {left!r})"]
        with open(out / "log.txt", "a") as log:
            worker = subprocess.Popen(
                mine, stdout=log, stderr=log, start_new_session=True, cwd=ROOT
            )
        done, since, now, bundled = set(), time.time(), left[0], 0
        try:
            while worker.poll() is None:
                time.sleep(0.2)
                rows = read(out)
                done = {row["step"] for row in rows if row["what"] == "end"}
                begun = [row for row in rows if row["what"] == "begin" and row["step"] in left]
                if begun:
                    now, since = begun[-1]["step"], begun[-1]["at"]
                if len(done) > bundled:
                    bundled = len(done)
                    print(f"{now}: {time.monotonic() - begin:.0f} s", flush=True)
                    bundle(out)
                late = now not in done and time.time() - since > STEPS[now][0]
                if late or time.monotonic() - begin > seconds:
                    break
        finally:  # Ctrl-C, too
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        if now not in {row["step"] for row in read(out) if row["what"] == "end"}:
            late = {"step": now, "what": "end", "failed": f"ended, status {worker.returncode}"}
            with open(out / "gpu.jsonl", "a") as file:
                file.write("\n" * (not file.tell()) + json.dumps(late) + "\n")
        done = {row["step"] for row in read(out) if row["what"] == "end"}
        left = [name for name in left if name not in done]
    return left


def bundle(out: Path) -> None:
    with zipfile.ZipFile(out / "gpu-day.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for each in sorted(out.iterdir()):
            if each.suffix != ".zip" and each.is_file():
                made.write(each, each.name)


def summarize(out: Path, left: list[str]) -> None:
    """summary.md and gpu.png, of what is there."""
    rows, lines = read(out), ["# This engine on a GPU", ""]
    for row in rows:
        if row["what"] == "end":
            last = (row["failed"].strip().splitlines() or ["ok"])[-1]
            lines.append(f"- {row['step']}: {row.get('seconds', 0):.0f} s, {last[:200]}")
    lines += [f"- {name}: not run" for name in left]
    top = {row["what"]: row["value"] for row in rows if "value" in row}
    tops = {"decodes": ("GBs", top.get("copy")), "chunk": ("TFLOPs", top.get("gemm"))}
    lines += ["", ", ".join(f"{name} {value:.0f}" for name, value in top.items()), ""]
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    for axes, (kind, (key, most)) in zip(panels, tops.items(), strict=True):
        groups: dict[str, list] = {}
        for row in (row for row in rows if row["what"] == kind and most):
            share = 100 * row[key] / most
            case = {k: v for k, v in row.items() if k in ("model", "back", "graphs", "small",
                    "B", "start", "rows", "riders")}  # fmt: skip
            said = " ".join(f"{k}={v}" for k, v in case.items())
            ours = f"{row['ms']:.2f} ms (predicted {row['predicted_ms']:.2f}), {share:.0f} %"
            lines.append(f"- {kind} {said}: {ours}")
            x = case.pop("B" if kind == "decodes" else "rows")
            name = " ".join(f"{k} {v}" for k, v in case.items())
            groups.setdefault(name, []).append((x, share))
        for name, points in groups.items():
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
        what = {"decodes": "decodes of a batch", "chunk": "tokens of a chunk"}[kind]
        of = {"decodes": "% of the copy's bytes/s", "chunk": "% of the product's FLOP/s"}[kind]
        axes.set(xscale="log", xlabel=what, ylabel=of, ylim=(0, 100))
        if groups:
            axes.legend(fontsize=7)
    figure.savefig(out / "gpu.png", dpi=120)
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    words = f"the steps to take, of {', '.join(STEPS)}"
    flags = {
        "out": Flag("", ROOT / "build" / "gpu"),
        "seconds": Flag("time for all steps", 560.0),
        "device": Flag("cpu rehearses with the demo model", "cuda"),
        "only": Flag(words, shown="all of them"),
    }
    options = ScriptParser(__doc__, flags).parse_args()
    out, names = options.out.resolve(), [*STEPS]
    if options.only:
        names = [lookup(STEPS, name, "step") and name for name in options.only.split(",")]
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UserError("no GPU is here; --device cpu rehearses")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.jsonl").unlink(missing_ok=True)
    left = drive(out, "cpu" if options.device == "cpu" else "", names, options.seconds)
    summarize(out, left)
    bundle(out)
    print((out / "summary.md").read_text(), f"\nsend back {out}/gpu-day.zip", sep="")


if __name__ == "__main__":
    run_main(main)
