"""A real pipeline: the model's layers spread over processes, micro-batches in flight, bubbles
measured.

    python distributed.py --stages 2 "def open(" "The list type" --policy sarathi      two processes
                                                                                       on this
                                                                                       machine
    python distributed.py --stages 2 --model laptop --workload 512:16,300:8,700:12     prompt and
                                                                                       output
                                                                                       tokens, made
                                                                                       up
    torchrun --nproc-per-node 2 distributed.py ...                                     the same, and
                                                                                       over many
                                                                                       nodes (see
                                                                                       the README)

Every process runs this file with the same arguments, makes the same requests, and keeps its own
layers (`PipelineLLM`). Process 0 is stage 0 and has the schedulers, one for each micro-batch, the
same as everywhere here:

    stage 0      schedules, runs its layers            --- plan and activations (T, H) --->
                 stage 1, 2, ...
    last stage   runs its layers and the head, samples     --- tokens --->     stage 0

A plan is what a stage needs to know of a batch: slots, positions, spans. Messages are sent while
the next micro-batch is computed; what is received is waited for, and that waiting is the bubble.
Each stage keeps the times of its work; at the end stage 0 collects them into the same account that
the simulator fills (`pipeline.PipelineTrace`).

torch.distributed carries the messages: gloo on CPUs, NCCL between GPUs. We use its `isend` and
`recv` and not its `pipelining` package, which knows the schedules of training, where all
micro-batches are known beforehand. Nor is there tensor parallelism here: `parallelize_module` cuts
a weight's rows into contiguous blocks, and ours are fused (q, k and v in preproj, gate and up in
ffn_ln1), so that a block would not hold whole heads. Unfused, a layer would have two more products
and a second form in the checkpoint loader.
"""

import argparse
import json
import os
import pickle
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import checkpoint
import files
import native
import perfetto
from attention import check_backend
from cli import Parser, run_main
from configs import MODELS, UserError
from engine import LLM, RequestOutput, SamplingParams, choose_device, memory_of
from executor import ModelExecutor, synchronized_clock
from model import FlatBatch, Transformer
from pipeline import BUBBLES, PipelineTrace, Step, dealer, even_layers
from sampling import sample
from scheduler import NOTHING_SCHEDULED, POLICIES, Batch, Request, make_scheduler

GRACE = 2.0  # s in which stage 0 gets to say a mistake that all stages find
LAUNCHED = "PIPELINE_LAUNCHED"  # an environment variable: `launch` has started this process
Times = list[tuple[float, float]]  # start and end of a stage's work on each step


class Wire:
    """Messages between stages, in order: a plan (any Python object), and rows of activations with
    it. Sending never waits.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device):
        self.hidden, self.dtype, self.device = hidden, dtype, device
        # plans and tokens; activations take the default group, NCCL on GPUs
        self.control = dist.new_group(backend="gloo")
        # what must stay alive until it has left
        self.sending: deque[tuple[list, list[Tensor]]] = deque()

    def send(self, to: int, plan: object, x: Tensor | None = None) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(plan)), dtype=torch.uint8)
        header = torch.tensor([len(data), 0 if x is None else len(x)])
        works = [
            dist.isend(header, to, group=self.control),
            dist.isend(data, to, group=self.control),
        ]
        if x is not None:
            works.append(dist.isend(x.contiguous(), to))
        self.sending.append((works, [header, data, x]))
        while self.sending and all(work.is_completed() for work in self.sending[0][0]):
            self.sending.popleft()

    def receive(self, source: int) -> tuple[object, Tensor | None]:
        """The next message: the plan, and x (T, H) if there was one."""
        header = torch.empty(2, dtype=torch.long)
        dist.recv(header, source, group=self.control)
        size, rows = header.tolist()
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, source, group=self.control)
        x = None
        if rows:
            x = torch.empty(rows, self.hidden, dtype=self.dtype, device=self.device)
            dist.recv(x, source)
        return pickle.loads(data.numpy().tobytes()), x

    def flush(self) -> None:
        """Wait until everything has left."""
        while self.sending:
            for work in self.sending.popleft()[0]:
                work.wait()


class PipelineLLM(LLM):
    """An LLM that is one stage of a pipeline. Every process of the group makes the same one and
    calls `generate` with the same arguments.

    The outputs come from process 0; elsewhere `generate` returns an empty list. max_batch_size and
    cache_tokens are those of one micro-batch; micro_batches: how many are in flight, None: as many
    as stages. Other options: see `LLM`. After a call, `pipeline` on process 0 tells when which
    stage worked and why it waited.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        max_batch_size: int = 8,
        micro_batches: int | None = None,
        **options,
    ):
        self.stage, self.stages = dist.get_rank(), dist.get_world_size()
        self.micro_batches = self.stages if micro_batches is None else micro_batches
        for option, value in (
            ("micro_batches", self.micro_batches),
            ("max_batch_size", max_batch_size),
        ):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{option} is {value}; it must be a whole number, at least 1")
        self.micro_batch_size = max_batch_size
        super().__init__(
            model,
            max_batch_size=max_batch_size * self.micro_batches,
            layers=self._own_layers,
            **options,
        )
        self.wire = Wire(self.config.hidden, self.dtype, self.device)
        self.offset = self._clock_offset()
        self.pipeline: PipelineTrace | None = None

    def _own_layers(self, n_layer: int) -> range:
        counts = even_layers(n_layer, self.stages)
        start = sum(counts[: self.stage])
        own = range(start, start + counts[self.stage])
        processes, memory = (
            int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            memory_of(torch.device("cpu")),
        )
        with torch.device("meta"):  # allocates nothing
            weights = (
                sum(weight.numel() for weight in Transformer(self.config, own).parameters())
                * self.dtype.itemsize
            )
        if self.device.type == "cpu" and memory is not None and processes * weights > memory:
            raise UserError(
                f"each of {processes} processes on this machine needs {weights / 1e9:.1f} GB for"
                f" its layers of {self.config.name}, but together they have {memory / 1e9:.1f} GB"
                " of memory: choose a smaller model, or fewer processes on each machine"
            )
        return own

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def generate(
        self,
        prompts: str | Sequence,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        arrival_times: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        if self.stage == 0:
            return super().generate(prompts, sampling_params, arrival_times)
        self._follow(self._requests(prompts, sampling_params, arrival_times))
        return []

    def _run(self, requests: list[Request]) -> Iterator[tuple[Batch, list[int]]]:
        """Stage 0: the loop of `engine.run`, with several micro-batches on their way at a time."""
        schedulers = [
            make_scheduler(self.policy, self.micro_batch_size, self.chunk_size, self.cache_tokens)
            for _ in range(self.micro_batches)
        ]
        give = dealer(schedulers, "queue")
        self.cache.reset()
        executor = ModelExecutor(self.model, self.cache, self.attend)
        samplers = {request.request_id: request.sampler for request in requests}
        arriving = deque(sorted(requests, key=lambda request: request.arrival))
        # micro-batches that may be scheduled, the one that came back first ahead
        back = deque(range(self.micro_batches))
        # the others, in the order in which they will come back
        flying: deque[tuple[int, Batch, Tensor | list[int]]] = deque()
        waiting: set[int] = set()  # without work
        log: list[tuple[int, Batch, str, list[Request]]] = []
        times: Times = []
        preempted: list[tuple[Request, float]] = []
        dist.barrier(group=self.wire.control)
        origin = executor.origin = time.perf_counter()
        while arriving or flying or any(scheduler.has_work for scheduler in schedulers):
            while arriving and arriving[0].arrival <= executor.now():
                give(arriving.popleft())
            for number in list(back):
                batch = schedulers[number].schedule(executor.now())
                while schedulers[number].preempted:
                    preempted.append((schedulers[number].preempted[-1], executor.now()))
                    executor.release(schedulers[number].preempted.pop())
                if batch is None:
                    waiting.add(number)
                    continue
                schedulers[number].check_batch(batch)
                shortage = ""
                if self.micro_batches - len(waiting) < self.stages or number in waiting:
                    shortage = (
                        "starved"
                        if arriving or number in waiting or self.micro_batches < self.stages
                        else "drain"
                    )
                    waiting.discard(number)
                back.remove(number)
                start = time.perf_counter()
                flat = executor.flatten(batch)
                result = self._compute(
                    flat, None, [samplers[request.request_id] for request in batch.sampled]
                )
                times.append((start, time.perf_counter()))
                if not self.is_last:
                    self.wire.send(1, self._plan(flat, batch), result)
                flying.append((number, batch, result))
                log.append((number, batch, shortage, []))
                break
            else:
                if not flying:
                    if not arriving:
                        raise next(
                            scheduler for scheduler in schedulers if scheduler.has_work
                        ).broken(NOTHING_SCHEDULED)
                    executor.wait_until(arriving[0].arrival)
                    continue
                number, batch, result = flying.popleft()
                tokens = result if self.is_last else self.wire.receive(self.stages - 1)[0]
                ended = schedulers[number].update(batch, tokens)
                log[len(log) - len(flying) - 1][3].extend(ended)
                for request in ended:
                    executor.release(request)
                back.append(number)
                yield batch, tokens
        self._stop(times)
        self._account(
            log,
            [[(s - origin, e - origin) for s, e in stage] for stage in self._collect(times)],
            preempted,
        )

    def _plan(self, flat: FlatBatch, batch: Batch) -> tuple:
        """What the stages after this one need to know of a batch."""
        ids = [request.request_id for request in batch.sampled]
        return (
            flat.slots.tolist(),
            flat.positions.tolist(),
            flat.spans,
            flat.logit_rows.tolist(),
            ids,
        )

    def _follow(self, requests: list[Request]) -> None:
        """The other stages: receive, compute, send, until stage 0 has had enough."""
        samplers = {request.request_id: request.sampler for request in requests}
        times: Times = []
        dist.barrier(group=self.wire.control)
        while (message := self.wire.receive(self.stage - 1))[0] is not None:
            # NCCL's recv returns before the activations are there
            start = synchronized_clock(self.device)
            (slots, positions, spans, logit_rows, ids), x = message
            rows = [
                torch.tensor(numbers, dtype=torch.long, device=self.device)
                for numbers in (slots, positions, logit_rows)
            ]
            # tokens are stage 0's business
            flat = FlatBatch(rows[0], rows[0], rows[1], spans, rows[2])
            result = self._compute(flat, x, [samplers[request_id] for request_id in ids])
            times.append((start, time.perf_counter()))
            if self.is_last:
                self.wire.send(0, result)
            else:
                self.wire.send(self.stage + 1, message[0], result)
        self._stop(times)
        self._collect(times)

    def _compute(self, flat: FlatBatch, x: Tensor | None, samplers: list) -> Tensor | list[int]:
        """This stage's part of a batch: activations (T, H), or on the last stage the tokens."""
        result = self.model(flat, self.cache, self.attend, x=x)
        if self.is_last:
            result = sample(result, samplers)
        synchronized_clock(self.device)
        return result

    def _stop(self, times: Times) -> None:
        if not self.is_last:
            self.wire.send(self.stage + 1, None)
        self.wire.flush()

    def _collect(self, times: Times) -> list[Times]:
        """Everybody's times, on stage 0's clock; on stage 0 alone."""
        gathered = [None] * self.stages if self.stage == 0 else None
        mine = [(start - self.offset, end - self.offset) for start, end in times]
        dist.gather_object(mine, gathered, group=self.wire.control)
        return gathered

    def _account(
        self, log: list, times: list[Times], preempted: list[tuple[Request, float]]
    ) -> None:
        """The simulator's account, from measured times."""
        trace = PipelineTrace(self.stages, self.micro_batches, keep=True)
        steps = []
        for index, (number, batch, _, _) in enumerate(log):
            starts, ends = zip(*[stage[index] for stage in times], strict=True)
            seconds = [end - start for start, end in zip(starts, ends, strict=True)]
            steps.append(
                Step(number, batch.num_prefill_tokens, batch.num_tokens, list(starts), seconds)
            )
        self.hop = measured_hop(steps)
        for step, (_, batch, shortage, ended) in zip(steps, log, strict=True):
            trace.record(
                step, batch, ended, shortage, way=self.stages * self.hop if self.stages > 1 else 0.0
            )
        for request, moment in preempted:
            trace.preempt(request, moment)
        trace.close()
        self.pipeline, self.trace = trace, trace.requests

    def _clock_offset(self) -> float:
        """Seconds by which this process's clock is ahead of stage 0's: none on one machine; between
        nodes, from the quickest of some exchanges.
        """
        best, offset = float("inf"), 0.0
        for stage in range(1, self.stages):
            for _ in range(10):
                if self.stage == 0:
                    asked = time.perf_counter()
                    self.wire.send(stage, asked)
                    self.wire.receive(stage)
                    self.wire.send(stage, time.perf_counter())
                elif self.stage == stage:
                    asked = self.wire.receive(0)[0]
                    here = time.perf_counter()
                    self.wire.send(0, None)
                    answered = self.wire.receive(0)[0]
                    if answered - asked < best:
                        best, offset = answered - asked, here - (asked + answered) / 2
        self.wire.flush()  # stage 0 may be about to end, with a mistake
        return offset


def measured_hop(steps: Sequence[Step]) -> float:
    """Seconds from the end of a step's work on one stage to its start on the next, where that was
    idle: the median.
    """
    gaps = []
    for before, step in pairwise(steps):
        for stage in range(1, len(step.starts)):
            left = step.starts[stage - 1] + step.seconds[stage - 1]
            if before.starts[stage] + before.seconds[stage] < left:
                gaps.append(step.starts[stage] - left)
    return max(0.0, statistics.median(gaps)) if gaps else 0.0


# ------------------------------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", help="texts to complete, all at once")
    parser.add_argument(
        "--stages",
        type=int,
        default=2,
        metavar="S",
        help="processes to start, where torchrun has not (default: 2)",
    )
    parser.add_argument(
        "--port", type=int, metavar="PORT", help="for them to find each other (default: a free one)"
    )
    parser.add_argument(
        "--model",
        default="demo",
        help=f"demo, a Hugging Face directory, or one of {', '.join(MODELS)} (default: demo)",
    )
    parser.add_argument(
        "--policy", default="sarathi", help=f"one of {', '.join(POLICIES)} (default: sarathi)"
    )
    parser.add_argument("--chunk-size", type=int, default=256, metavar="C", help="(default: 256)")
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=4,
        metavar="B",
        help="requests in one micro-batch (default: 4)",
    )
    parser.add_argument(
        "--micro-batches", type=int, metavar="M", help="in flight (default: one for each stage)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=32,
        metavar="N",
        help="output tokens of each prompt (default: 32)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="L",
        help="longest prompt + output, in tokens (default: the model's)",
    )
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="P:N,...",
        help="instead of prompts: P made-up tokens, N to generate",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="run it so many times (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="auto, float32, bfloat16, float16 or float64 (default: auto)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument(
        "--attention", default="auto", help="auto, native, sdpa, math or xformers (default: auto)"
    )
    parser.add_argument(
        "--check", action="store_true", help="look for NaN and infinity in the weights"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the last run for https://ui.perfetto.dev (JSON)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's times")
    return parser.parse_args()


@dataclass(frozen=True)
class Work:
    policy: str
    prompts: Sequence[str] | list[list[int]]
    params: SamplingParams | list[SamplingParams]


def read_workload(text: str, policy: str, vocabulary: int) -> Work:
    """Prompts of made-up tokens, from "P:N,P:N" or "POLICY@P:N,P:N"."""
    own, _, sizes = text.rpartition("@")
    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in sizes.split(",")]
        lengths = [(prompt, output) for prompt, output in pairs if prompt > 0 and output > 0]
    except ValueError:
        raise UserError(
            f"--workload {text!r} is not a list of prompt:output tokens, such as 512:16,300:8"
        ) from None
    if len(lengths) < len(pairs):
        raise UserError(f"--workload {text!r}: every prompt and output needs at least one token")
    prompts = [
        [(31 * index + 7 * place) % vocabulary for place in range(prompt)]
        for index, (prompt, _) in enumerate(lengths)
    ]
    return Work(
        own or policy,
        prompts,
        [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in lengths],
    )


def serve(args: argparse.Namespace) -> None:
    """Make this process's stage, and run every workload; process 0 tells what came of it."""
    llm = PipelineLLM(
        args.model,
        policy=args.policy,
        chunk_size=args.chunk_size,
        max_batch_size=args.max_batch_size,
        micro_batches=args.micro_batches,
        max_length=args.max_length,
        dtype=args.dtype,
        device=args.device,
        attention=args.attention,
        check=args.check,
    )
    works = [read_workload(text, args.policy, llm.config.vocab_size) for text in args.workload]
    if args.prompts or not works:
        prompts = args.prompts or ["def open(", "The list type", "Return True if"]
        works.insert(0, Work(args.policy, prompts, SamplingParams(max_tokens=args.max_tokens)))
    found = []
    for number in range(args.repeats):
        for index, work in enumerate(works):
            llm.policy = work.policy
            outputs = llm.generate(work.prompts, work.params)
            if llm.stage > 0:
                continue
            found.append({"workload": index, "repeat": number} | summary(llm, outputs))
            if number == args.repeats - 1:
                report(llm, work.prompts, outputs)
    if llm.stage == 0 and args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if llm.stage == 0 and args.trace:
        perfetto.save_stages(args.trace, {llm.policy: llm.pipeline})


def summary(llm: PipelineLLM, outputs: Sequence[RequestOutput]) -> dict:
    trace = llm.pipeline
    numbers = {
        "seconds": trace.seconds,
        "bubble_share": trace.bubble_share,
        "busy": trace.busy,
        "idle": trace.idle,
        "hop": llm.hop,
    }
    return numbers | {"steps": trace.count, "tokens": [output.token_ids for output in outputs]}


def report(llm: PipelineLLM, prompts: Sequence, outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.text:
            print(f"{prompt}{output.text}\n---")
    trace, whole = llm.pipeline, llm.stages * llm.pipeline.seconds
    print(
        f"policy    {llm.policy}, C = {llm.chunk_size}, B = {llm.micro_batch_size},"
        f" {llm.micro_batches} micro-batches, {llm.stages} stages"
    )
    dtype = str(llm.dtype).removeprefix("torch.")
    print(
        f"model     {llm.config.name} on {llm.device.type}, {dtype}, attention by {llm.attention}"
    )
    print(
        f"run       {len(outputs)} requests, {trace.count} steps in {trace.seconds:.2f} s,"
        f" {trace.requests.throughput:.0f} tokens/s"
    )
    print(
        "busy     "
        f" {', '.join(f'stage {stage} {100 * busy / trace.seconds:.0f} %' for stage, busy in enumerate(trace.busy))}"
    )
    print(
        "idle     "
        f" {', '.join(f'{cause} {100 * idle / whole:.1f} %' for cause, idle in trace.idle.items() if idle > 0)}"
    )
    print(f"bubbles   {100 * trace.bubble_share:.1f} % of all stages' time ({', '.join(BUBBLES)})")


def launch(stages: int, port: int | None) -> None:
    """What torchrun does, on one machine: start a process for each stage, and end all when one
    fails. Leaves none behind.
    """
    with socket.socket() as probe:
        # as torch does: a port that has just been left counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--port {port} cannot be used ({error}): give another, or none"
            ) from None
        port = probe.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end in any case
    group = {
        "WORLD_SIZE": stages,
        "LOCAL_WORLD_SIZE": stages,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
    }
    children: list[subprocess.Popen] = []
    try:
        for stage in range(stages):
            environment = group | {"RANK": stage, "LOCAL_RANK": stage}
            environment = os.environ | {name: str(value) for name, value in environment.items()}
            children.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
        while not (
            failed := {
                stage: child.returncode for stage, child in enumerate(children) if child.poll()
            }
        ):
            if all(child.poll() == 0 for child in children):
                return
            time.sleep(0.02)
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
        for child in children:
            child.wait()
    for stage, status in failed.items():
        if status < 0:  # it could say nothing itself
            raise UserError(
                f"stage {stage} was ended by {signal.Signals(-status).name}; the others are stopped"
            )
    raise SystemExit(next(iter(failed.values())))


def end_with(parent: int) -> None:
    """Wait until the launcher is gone, killed so that it could not end us, and end."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def check(args: argparse.Namespace) -> None:
    """Complain about what can be told before any process is started or any weight read."""
    if args.repeats < 1:
        raise UserError(f"--repeats is {args.repeats}; it must be at least 1")
    SamplingParams(max_tokens=args.max_tokens)
    for text in args.workload:
        make_scheduler(
            read_workload(text, args.policy, vocabulary=1).policy,
            args.max_batch_size,
            args.chunk_size,
        )
    for file in (args.trace, args.json):
        try:
            perfetto.output_file(str(file or os.devnull))
        except argparse.ArgumentTypeError as error:
            raise UserError(str(error)) from None


def reason(error: Exception) -> str:
    """The first sentence of what a C++ library says, without the place in its source."""
    return re.sub(r"^\[\S+\] *", "", files.first_line(error)).split(". ")[0]


def take_cores(local: int, processes: int) -> None:
    """This machine's cores are divided among its processes, each as many threads as cores.

    Pinned to them, where the system can: woken by a message, a process is else put onto the core of
    its sender, and both compute on one core while another idles.
    """
    cores = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    share = len(cores) // processes
    torch.set_num_threads(max(1, share))
    if share > 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[local * share : (local + 1) * share])


def main() -> None:
    args = parse_args()
    if "RANK" not in os.environ:
        check(args)
        # a hub id is downloaded here, once, and not by every process
        directory = files.find(args.model)
        config = MODELS[args.model] if directory is None else checkpoint.load_config(directory)
        even_layers(config.n_layer, args.stages)
        device = choose_device(args.device)
        check_backend(args.attention, device)
        if device.type == "cpu" and args.attention in ("auto", "native"):
            # compiles here, if it must, and not in every stage
            native.usable(torch.device("cpu"), torch.float32, 64, 1)
        launch(args.stages, args.port)
        return
    if LAUNCHED in os.environ:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    try:
        if rank == 0:
            check(args)
        device = choose_device(args.device)
        if device.type == "cuda":
            args.device = f"cuda:{local}"
            torch.cuda.set_device(choose_device(args.device))
        else:
            take_cores(local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10)
        )
        serve(args)
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        if rank == 0:
            raise
        # most mistakes are everybody's: stage 0 says them, and whoever has started us ends us
        # meanwhile
        time.sleep(GRACE)
        raise UserError(f"stage {rank}: {error}") from None
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"stage {rank} cannot meet the others at {address} ({reason(error)})"
        ) from None
    # torch.distributed's other errors, and gloo's, are plain RuntimeErrors
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in ("gloo", "nccl", "connection")):
            raise
        raise UserError(
            f"stage {rank} has lost another, which has ended ({reason(error)})"
        ) from None


if __name__ == "__main__":
    run_main(main)
