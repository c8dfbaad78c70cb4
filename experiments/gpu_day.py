"""All that is worth knowing about this engine on your GPU: ten minutes, one file to send back.

    make gpu                                             the largest of MODELS that fits this card
    python experiments/gpu_day.py --only decode,prefill  some steps
    python experiments/gpu_day.py --device cpu           a rehearsal: the demo model on a CPU

The most useful step runs first, in a worker process and with a limit of its own. If it fails, hangs
or breaks the device, the next one goes on. Each result is on the disk, and in the zip, before the
next step begins. Predictions are the cost model's, with vLLM's constants.
"""

import command.first  # before torch  # noqa: F401
import enter  # noqa: F401

import gc
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.metadata import distributions
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
from torch.utils.benchmark import Timer

import experiments
from command.checks import UserError, lookup
from command.cli import cores, run_main
from command.flags import Flag
from configs import GPUS, gpu_named
from costmodel import CostModel, make_batch
from experiments.lib.colours import COLOURS
from experiments.lib.common import ROOT, set_wide
from experiments.lib.engines import Real
from experiments.lib.flags import ScriptParser
from experiments.lib.measuring import batch_runner, hardware_of
from experiments.lib.rows import Rows, print_rows
from experiments.lib.study import Panel, draw_panels, finish
from more.fast import cuda
from more.fast.graphs import copy_rate
from more.fast.kernels import report
from nano_sarathi import LLM, SamplingParams

MODEL_FOR = {56e9: "llama-13b", 22e9: "llama3.1-8b", 0: "llama3.2-3b"}  # from so many bytes on
WAY = "back", "small", "graphs", "start", "riders"  # small: whose small operators
UNITS = {"iteration": "ms", "share": "%"}
# rows of gpu.jsonl that are iterations, what they are compared with, and what grows
KINDS = ("decodes", "a copy", "B"), ("chunk", "a large product", "tokens")
LOOKS = {"predicted": COLOURS["black"], "graphs": COLOURS["blue"], "no graphs": COLOURS["orange"]}
SHOW = {"ylabel": "% of the ceiling", "ylim": (0, 150), "yticks": range(0, 101, 20)}  # legend above
OURS = {"back": ("rows", "predicted"), "small": ("triton", None), "start": (0, None)}
TITLE = "Speed of an iteration, as a share of what a simpler job reaches on the same GPU"
PANELS = [
    Panel(
        x,
        "share",
        ("back", "graphs", "riders"),
        facet="model",
        where={"kind": kind, **OURS},
        log="x",
        title=f"{kind}; ceiling: {of}",
        colours=LOOKS,
        show=SHOW,
    )
    for kind, of, x in KINDS
]


def note(out: Path, step: str, **row: object) -> None:
    with open(out / "gpu.jsonl", "a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"step": step, **row}, default=str))


class Day:
    """What the steps share: where results go, and what runs."""

    def __init__(self, out: Path, device: str) -> None:
        self.out = out
        self.device = torch.device(device)
        self.now = ""
        self.cuda = self.device.type == "cuda"
        self.model = self.second = "demo"
        self.length = 1024 if self.cuda else 256
        self.slots = 18 if self.cuda else 4
        self.repeats = 10 if self.cuda else 2
        self.gpu: str | None = None  # None: nothing is predicted
        if self.cuda:
            memory = torch.cuda.get_device_properties(self.device).total_memory
            self.model = next(name for least, name in MODEL_FOR.items() if memory >= least)
            self.second = "llama3.2-3b" if self.model != "llama-13b" else "llama3.1-8b"
            name = gpu_named(torch.cuda.get_device_name())
            self.gpu = name if name in GPUS else None

    def note(self, **row: object) -> None:
        note(self.out, self.now, **row)

    def llm(self, model: str, slots: int, back: str = "auto", graphs: str = "auto") -> LLM:
        gc.collect()  # one at a time: two would not fit
        sizes = {"max_batch_size": slots, "max_length": self.length, "device": self.device}
        return LLM(model, attention=back, cuda_graphs=graphs, **sizes)

    def iterations(self, llm: LLM, what: str, cases: list[tuple], work: Callable) -> None:
        """Measured and predicted. cases: with batches. work: of a batch, in the ceiling's unit."""
        small = "triton" if cuda.small_operators(llm.device, llm.dtype) else "pytorch"
        where = {"kind": what, "model": llm.config.name, "hardware": hardware_of(llm)}
        graphs = "graphs" if llm.graphs else "no graphs"
        way = {"back": llm.attention, "small": small, "graphs": graphs}
        batches = [batch for _, batch in cases]
        run = lambda engine, batch: {"seconds": engine.seconds(batch)}
        rows = Real(llm, self.repeats).answers(run, [{"batch": batch} for batch in batches])
        ways = [("measured", way, [row["seconds"] for row in rows])]
        if self.gpu:
            cost = CostModel(llm.config, GPUS[self.gpu], software="vllm")
            ways.append(("predicted", {"back": "predicted"}, list(map(cost.seconds, batches))))
        for source, way, found in ways:
            for (case, batch), seconds in zip(cases, found, strict=True):
                times = {"iteration": 1e3 * seconds, "rate": work(batch) / seconds}
                self.note(what=what, source=source, **where, **way, **case, **times)

    def run(self, name: str, *command: object) -> None:
        command = [sys.executable, *map(str, command)]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self.note(what=name, rc=found.returncode, said=(found.stdout + found.stderr)[-5000:])


def ceilings(day: Day) -> None:
    """What this machine is, and gives at most: bytes/s of a copy, FLOP/s of a product."""
    packages = sorted(f"{d.name}=={d.version}" for d in distributions())
    day.note(what="report", lines=report(), cpus=os.cpu_count(), packages=packages)
    for asked in ("nvidia-smi", "git log -1 --format=%H"):
        found = subprocess.run(["sh", "-c", asked], capture_output=True, text=True, check=False)
        day.note(what=asked, said=found.stdout[-4000:])
    size, n = (2**32, 8192) if day.cuda else (2**24, 512)
    x, y = (torch.randn(n, n, device=day.device).bfloat16() for _ in range(2))
    product = Timer("x @ y", globals={"x": x, "y": y})
    seconds = min(product.timeit(5).times[0] for _ in range(3))
    day.note(what="a copy", unit="GB/s", value=1e-9 * copy_rate(day.device, size))
    day.note(what="a large product", unit="TFLOP/s", value=2e-12 * n**3 / seconds)


def decodes_of(day: Day, llm: LLM, *sizes: int) -> None:
    """Iterations of decodes: ms, and GB/s of weights, keys and values."""
    weights = 2 * llm.config.parameters
    each = day.length * llm.config.kv_bytes_per_token(2)
    cases = [({"B": B}, make_batch(decodes=B, context=day.length)) for B in sizes]
    read = lambda batch: 1e-9 * (weights + len(batch.decodes) * each)
    day.iterations(llm, "decodes", cases, read)


def decode(day: Day) -> None:
    """Each back end; with and without graphs; with PyTorch's small operators and with Triton's."""
    sizes = (1, 2, 4, 8, 16, 32) if day.cuda else (1, 2)
    of_torch = lambda *_: None  # no kernels of Triton
    of_triton = cuda.small_operators
    ways = [
        ("rows", "off", of_torch),
        ("rows", "off", of_triton),
        ("rows", "on", of_torch),
        ("rows", "on", of_triton),
        ("xformers", "off", of_triton),
        ("sdpa", "off", of_triton),
    ]
    for back, graphs, small in ways:
        # a UserError: it cannot run here
        with suppress(UserError), mock.patch.object(cuda, "small_operators", small):
            decodes_of(day, day.llm(day.model, max(sizes), back, graphs), *sizes)


def prefill(day: Day) -> None:
    """Chunks and whole prompts, alone and beside decodes."""
    llm = day.llm(day.model, day.slots)
    length = day.length
    places = [(0, length >> shift) for shift in range(5)] + [(length // 2, length // 4)]
    cases = []
    for riders in (0, min(7, day.slots - 1)):
        for start, n in places:
            batch = make_batch([(start, n, length)], riders, length)
            cases.append(({"start": start, "riders": riders, "tokens": n}, batch))
    done = lambda batch: 2e-12 * llm.config.parameters * batch.num_tokens
    day.iterations(llm, "chunk", cases, done)


def figures(day: Day, model: str = "", **turns: int) -> None:
    """Scripts with --measure: on a GPU, the paper's cases (`Study.here`). turns: of each."""
    for name, repeats in turns.items():
        gc.collect()
        given = [f"--device={day.device}", f"--repeats={repeats}", f"--out={day.out}"]
        given += [f"--model={model if day.cuda and model else day.model}"]
        given += [] if day.cuda else ["--quick"]
        experiments.studies()[name].run(["--measure", "--force", *given])


def tests(day: Day) -> None:
    """float64 on CUDA under all policies, with graphs and without; back ends beside `math`."""
    processes = min(5, cores() // 2) if day.cuda else 0
    where = "tests" if day.cuda else "tests/test_graphs.py"
    options = ["-q", "-m", "cuda", "-p", "no:cacheprovider", "--tb=short", "-rfE", "-n"]
    day.run("tests", "-m", "pytest", *options, processes, where)


def second_model(day: Day) -> None:
    """Heads that share keys, with graphs and without; greedy and drawn tokens."""
    sizes = (1, 8, 64) if day.cuda else (1, 2)
    for graphs in ("off", "on") if day.cuda else ("off",):
        decodes_of(day, day.llm(day.second, max(sizes), graphs=graphs), *sizes)
    llm = day.llm(day.second, 8)
    drawn = {"temperature": 1.0}
    for given in ({}, drawn, drawn | {"top_k": 50}, drawn | {"top_p": 0.9}):
        params = SamplingParams(33 if day.cuda else 4, ignore_eos=True, seed=1, **given)
        for _ in range(3):
            llm.generate([[5 + i, 7, 9] * 20 for i in range(8)], params)
        found = [each.seconds for each in llm.trace.iterations if not each.num_chunks]
        day.note(what="sampling", **given, B=8, ms=1e3 * statistics.median(found))


def profile(day: Day) -> None:
    """Which kernels take the time of decodes."""
    batch = make_batch(decodes=8, context=day.length)
    run = batch_runner(day.llm(day.model, 8), False)
    for _ in range(3):
        run(batch)
    with torch.profiler.profile() as found:
        run(batch)
    table = found.key_averages().table("self_device_time_total", 25, max_name_column_width=60)
    (day.out / "profile_decodes.txt").write_text(table)


def validate(day: Day) -> None:
    """A calibration of this card, and what it predicts of whole runs."""
    saved = day.out / "calibration.json"
    quick = [] if day.cuda else ["--quick"]
    options = ["--model", day.model, "--device", day.device, "--json", saved, "--seconds", 25]
    day.run("calibrate", "experiments/calibrate.py", *options, *quick)
    options = ["--calibration", saved, "--samples", 5, "--repeats", 1, "--out", day.out]
    day.run("validate", "experiments/validate.py", *options, *quick)


STEPS: dict[str, tuple[int, Callable]] = {  # limit in s, function; the worthiest first
    "ceilings": (60, ceilings),
    "decode": (90, decode),
    "prefill": (60, prefill),
    "figures": (60, partial(figures, fig8=10, table2=10, fig7=10)),
    "tests": (170, tests),
    "fig9_table4": (120, partial(figures, fig9=1, table4=1)),
    "second_model": (60, second_model),
    "profile": (30, profile),
    "large": (90, partial(figures, model="llama-33b", table4=1)),
    "more_figures": (150, partial(figures, fig13=1, fig3=2, fig4=2)),
    "validate": (110, validate),
}


def work(pipe: Connection, out: Path, device: str, names: list[str]) -> None:
    """The worker: runs the steps. It sends how each has failed; "": it has not."""
    os.setsid()  # whatever it starts ends with it
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    day = Day(out, device)
    pipe.send("ready")  # torch is imported
    for name in names:
        day.now = name
        failed = ""
        gc.collect()
        torch.cuda.empty_cache()
        try:
            STEPS[name][1](day)
        except Exception as error:  # noqa: BLE001  the next step goes on
            failed = "".join(traceback.format_exception(error))[-3000:]
        pipe.send(failed)


def drive(out: Path, device: str, names: list[str], seconds: float) -> list[str]:
    """Runs workers until all steps are done, or time is over. Returns the steps that are not."""
    left = [*names]
    begin = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    while left and time.monotonic() - begin < seconds:
        pipe, its = spawn.Pipe(duplex=False)
        worker = spawn.Process(target=work, args=(its, out, device, left))
        worker.start()
        its.close()
        broken = False
        try:
            with suppress(EOFError):  # the first step says how it ended
                pipe.poll(begin + seconds - time.monotonic()) and pipe.recv()
            while left and not broken and time.monotonic() - begin < seconds:
                print(f"{time.monotonic() - begin:4.0f} s: {left[0]}", flush=True)
                since = time.monotonic()
                limit = max(0, min(STEPS[left[0]][0], begin + seconds - since))
                try:
                    failed = pipe.recv() if pipe.poll(limit) else f"ended after {limit:.0f} s"
                except EOFError:
                    worker.join()
                    failed = f"ended itself, status {worker.exitcode}"
                # an error of CUDA's loses the context: the next step wants a new process
                broken = failed.startswith("ended ") or "CUDA error" in failed
                note(out, left.pop(0), what="end", seconds=time.monotonic() - since, failed=failed)
                bundle(out)
        finally:  # Ctrl-C, too
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.join()
    return left


def read(out: Path, what: str = "") -> list[dict]:
    """The rows of one kind, each once. The last of a worker may be half a line."""
    rows = []
    for line in dict.fromkeys((out / "gpu.jsonl").read_text(encoding="utf-8").splitlines()):
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if what in ("", row["what"])]


def bundle(out: Path) -> None:
    with zipfile.ZipFile(out / "gpu-day.zip", "w", zipfile.ZIP_DEFLATED) as made:
        for each in sorted(out.rglob("*")):  # a rehearsal's figures are in quick/
            if each.suffix != ".zip" and each.is_file():
                made.write(each, each.relative_to(out))


def summarize(out: Path, left: list[str]) -> str:
    """Writes summary.txt, gpu.csv and gpu.png, of what is there. Returns the summary."""
    found = Rows((), UNITS)
    set_wide(True)
    with open(out / "summary.txt", "w", encoding="utf-8") as file, redirect_stdout(file):
        print("This engine on a GPU\n")
        for row in read(out, "end"):
            last = (row["failed"].strip().splitlines() or ["ok"])[-1]
            print(f"{row['step']}: {row['seconds']:.0f} s, {last[:200]}")
        print(*(f"{name}: not run" for name in left), sep="\n")
        for kind, of, x in KINDS:
            top = (read(out, of) or [{"value": float("inf"), "unit": ""}])[-1]
            for row in read(out, kind):
                row |= {"share": 100 * row.pop("rate") / top["value"]}
                found.append({key: row[key] for key in row if key not in ("step", "what")})
            title = f"{of}: {top['value']:.4g} {top['unit']}"
            print_rows(found.where(kind=kind), ["model", *WAY, x, *UNITS], title)
    if panels := [panel for panel in PANELS if panel.rows(found)]:
        one = Rows((row | {"source": "measured"} for row in found), UNITS)  # one panel for both
        finish(out / "gpu.csv", found, lambda rows: draw_panels(one, panels, TITLE))
    return (out / "summary.txt").read_text(encoding="utf-8")


def main() -> None:
    flags = {
        "out": Flag("", ROOT / "build" / "gpu"),
        "seconds": Flag("time for all steps", 560.0),
        "device": Flag("cpu rehearses with the demo model", "cuda"),
        "only": Flag(f"steps, of {', '.join(STEPS)}", shown="all of them"),
    }
    options = ScriptParser(__doc__, flags).parse_args()
    out = options.out.resolve()
    names = ["ceilings", *options.only.split(",")] if options.only else STEPS  # shares need them
    for name in names:
        lookup(STEPS, name, "step")
    if options.device != "cpu" and not torch.cuda.is_available():
        raise UserError("no GPU is here: --device cpu rehearses")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.jsonl").unlink(missing_ok=True)
    left = drive(out, options.device, [*dict.fromkeys(names)], options.seconds)
    print(summarize(out, left), f"\nsend back {out / 'gpu-day.zip'}", sep="")
    bundle(out)


if __name__ == "__main__":
    run_main(main)
