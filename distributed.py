"""A real pipeline: the model's layers spread over processes, micro-batches in flight.

    python distributed.py --stages 2 "def open(" "The list type" --policy sarathi
    python distributed.py --stages 2 --model laptop --lengths 512:16,300:8,700:12
    torchrun --nproc-per-node 2 distributed.py ...

The first command starts two processes on this machine. The second makes up three prompts: 512:16
is a prompt of 512 tokens, with 16 output tokens. torchrun starts the processes itself, on many
nodes too (docs/pipelines.md). pipeline/stages.py says what they do.
"""

import command.enter  # noqa: F401
import fast.first  # before torch  # noqa: F401

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from command.checks import WHY_BROKEN, UserError
from command.cli import MARK, end_with, run_main, write_file
from command.flags import Flag, Parser
from configs import MODELS
from engine import LLM, RequestOutput, SamplingParams
from fast import native
from fast.backends import check_backend
from loading import checkpoint, files
from loading.load import choose_length
from loading.policyfile import load_policies, warn_if_crowded
from pictures import perfetto
from pipeline import BUBBLES, even_layers
from pipeline.launch import NotMet, launch, meet, read_place, reason, stage_device, take_cores
from pipeline.policies import (
    PIPELINE_POLICIES,
    is_for_pipelines,
    make_micro_batches,
    policy_names,
    unmeasured,
)
from pipeline.stages import PipelineLLM
from scheduler import make_scheduler
from serving.calibration import cost_here, this_machine

__all__ = ["PipelineLLM"]

GRACE = 5.0  # s. Most mistakes are found by all stages. Then the others wait: stage 0 prints first


FLAGS = {
    "stages": Flag("processes to start, unless torchrun starts them", 2),
    "port": Flag("port at which the processes meet", shown="a free one"),
    "model": Flag(f"model: demo, a Hugging Face directory, or one of {', '.join(MODELS)}", "demo"),
    "policy": Flag(f"policy, one of {', '.join([policy_names(), *PIPELINE_POLICIES])}", "sarathi"),
    "policy_file": Flag(repeated=True),
    "calibration": Flag("calibration of this machine, for policies that ask what a batch costs",
                        shown="results/calibration-MODEL.json"),
    "chunk_size": Flag(default=256),
    "max_batch_size": Flag("requests in one micro-batch", 4),
    "micro_batches": Flag(shown="one for each stage"),
    "max_tokens": Flag("output tokens of each prompt", 32),
    "max_length": Flag("most tokens of prompt and output", shown="the model's"),
    "lengths": Flag(repeated=True),
    "repeats": Flag("runs of each workload", 1),
    **dict.fromkeys(("dtype", "device", "attention"), Flag(default="auto")),
    "check": Flag(),
    "perfetto": Flag("write the last run for https://ui.perfetto.dev (JSON)"),
    "json": Flag("write every run's times"),
}  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__, FLAGS)
    parser.add_argument("prompts", nargs="*", help="texts to complete, all at once")
    args = parser.parse_args()
    for path in args.policy_file or ():
        load_policies(path)
    return args


@dataclass(frozen=True)
class Work:
    policy: str
    prompts: Sequence[str] | list[list[int]]
    params: SamplingParams | list[SamplingParams]


def read_sizes(text: str, policy: str) -> tuple[str, list[tuple[int, int]]]:
    """From "P:N,P:N" or "POLICY@P:N,P:N": the policy, and tokens of each prompt and output."""
    own, _, sizes = text.rpartition("@")
    try:
        pairs = [tuple(int(number) for number in pair.split(":")) for pair in sizes.split(",")]
        lengths = [(prompt, output) for prompt, output in pairs if prompt > 0 and output > 0]
    except ValueError:
        raise UserError(
            f"--lengths {text!r} is not a list of prompt:output tokens, such as 512:16,300:8"
        ) from None
    if len(lengths) < len(pairs):
        raise UserError(f"--lengths {text!r}: every prompt and output needs at least one token")
    return own or policy, lengths


def check_sizes(text: str, longest: int) -> None:
    """A UserError if a prompt and its output take more than `longest` tokens."""
    for prompt, output in read_sizes(text, "")[1]:
        if prompt + output - 1 > longest:
            raise UserError(
                f"--lengths {text!r}: {prompt} prompt tokens + {output} output tokens - 1 exceed"
                f" the {longest} tokens that max_length allows"
            )


def make_work(text: str, policy: str, llm: LLM) -> Work:
    """Prompts of made-up tokens. A UserError before any is made, if one is too long."""
    check_sizes(text, llm.max_length)
    policy, lengths = read_sizes(text, policy)
    vocabulary = llm.config.vocab_size
    prompts = [
        [(31 * index + 7 * place) % vocabulary for place in range(prompt)]
        for index, (prompt, _) in enumerate(lengths)
    ]
    params = [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in lengths]
    return Work(policy, prompts, params)


def serve(args: argparse.Namespace) -> None:
    """Make this process's stage, and run every workload. Process 0 prints the results."""
    names = ("policy", "chunk_size", "max_batch_size", "max_length", "dtype", "device", "attention")
    options = {name: getattr(args, name) for name in names} | {"check_weights": args.check}
    llm = PipelineLLM(args.model, micro_batches=args.micro_batches, **options)
    llm.cost = cost_here(llm.config.name, str(llm.device), str(llm.dtype), args.calibration)
    works = [make_work(text, args.policy, llm) for text in args.lengths or []]
    if args.prompts or not works:
        prompts = args.prompts or ["def open(", "The list type", "Return True if"]
        works.insert(0, Work(args.policy, prompts, SamplingParams(max_tokens=args.max_tokens)))
    for policy in dict.fromkeys(work.policy for work in works):
        if llm.stage == 0 and not is_for_pipelines(policy):
            warn_if_crowded(policy, llm.micro_batch_size, llm.chunk_size)
    found = []
    dtype = str(llm.dtype).removeprefix("torch.")
    for number in range(args.repeats):
        for index, work in enumerate(works):
            llm.policy = work.policy
            outputs = llm.generate(work.prompts, work.params)
            if llm.stage > 0:
                continue
            place = {"mark": MARK, "workload": index, "repeat": number}
            found.append(place | summary(llm, outputs))
            if number == args.repeats - 1:
                print_texts(work.prompts, outputs)
                where = f"{llm.config.name} on {llm.device.type}, {dtype}"
                print(f"model     {where}, attention by {llm.attention}")
                report(llm, outputs)
    if llm.stage == 0 and args.json:
        write_file(args.json, json.dumps(found, indent=1) + "\n")
    if llm.stage == 0 and args.perfetto:
        where = f"{llm.stages} stages, {this_machine(str(llm.device))}, {dtype}"
        run = perfetto.About("measured", llm.config.name, where, llm.policy, budget_of(llm))
        perfetto.save_stages(args.perfetto, {llm.policy: llm.pipeline}, about={llm.policy: run})
        print(f"wrote {args.perfetto}: open it on https://ui.perfetto.dev")


def summary(llm: PipelineLLM, outputs: Sequence[RequestOutput]) -> dict:
    trace = llm.pipeline
    names = ("seconds", "bubble_share", "busy", "idle")
    numbers = {name: getattr(trace, name) for name in names} | {"hop": llm.hop}
    return numbers | {"steps": trace.count, "tokens": [output.token_ids for output in outputs]}


def budget_of(llm: LLM) -> int | None:
    """C in tokens; a policy may have one of its own. None: it has whole prompts only."""
    if is_for_pipelines(llm.policy):
        return None
    return make_scheduler(llm.policy, 1, llm.chunk_size).chunk_size


def print_texts(prompts: Sequence, outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        why = f"\n{WHY_BROKEN}" if output.finish_reason == "error" else ""
        if output.text or why:
            print(f"{prompt}{output.text}{why}\n---")


def report(llm: PipelineLLM, outputs: Sequence[RequestOutput]) -> None:
    trace, stage_seconds = llm.pipeline, llm.stages * llm.pipeline.seconds
    budget = budget_of(llm)
    size = "whole prompts" if budget is None else f"C = {budget}"
    print(
        f"policy    {llm.policy}, {size}, B = {llm.micro_batch_size},"
        f" {llm.micro_batches} micro-batches, {llm.stages} stages"
    )
    print(
        f"run       {len(outputs)} requests, {trace.count} steps in {trace.seconds:.2f} s,"
        f" {trace.requests.rates}"
    )
    print(f"own time  of the policy: {trace.requests.own_time}")
    if trace.history:
        phases = [phase for phase, _ in groupby(phase for *_, phase in trace.history)]
        print(
            f"phases    {phases.count('prefill')} of prefills, {phases.count('decode')} of decodes"
        )
    busy = [f"stage {i} {100 * work / trace.seconds:.0f} %" for i, work in enumerate(trace.busy)]
    idle = [f"{name} {100 * s / stage_seconds:.1f} %" for name, s in trace.idle.items() if s > 0]
    print(f"busy      {', '.join(busy)}")
    print(f"idle      {', '.join(idle)}")
    print(f"bubbles   {100 * trace.bubble_share:.1f} % of all stages' time ({', '.join(BUBBLES)})")


def check(args: argparse.Namespace) -> None:
    """Find mistakes early, before any process starts and any weight is read."""
    SamplingParams(max_tokens=args.max_tokens)
    policies = [read_sizes(text, args.policy)[0] for text in args.lengths or []]
    policies = policies if policies and not args.prompts else [args.policy, *policies]
    count = args.stages if args.micro_batches is None else args.micro_batches
    for policy in policies:
        make_micro_batches(
            policy, count, args.stages, args.max_batch_size, args.chunk_size, seconds_of=unmeasured
        )


def main() -> None:
    args = parse_args()
    if "RANK" not in os.environ:
        check(args)
        # a hub id is downloaded here, once, and not by every process
        directory = files.find(args.model)
        config = MODELS[args.model] if directory is None else checkpoint.load_config(directory)
        even_layers(config.n_layer, args.stages)
        for text in args.lengths or []:
            check_sizes(text, choose_length(config, args.max_length))
        device = stage_device(args.device, 0, args.stages)
        check_backend(args.attention, device)
        if device.type == "cpu" and args.attention in ("auto", "native"):
            # compiles here, if it must, and not in every stage
            native.usable(torch.device("cpu"), torch.float32, 64, 1)
        launch(args.stages, args.port, hide_gpus=device.type == "cpu")
        return
    place = read_place(os.environ)
    if place.launcher is not None:
        end_with(place.launcher)
    try:
        if place.stage == 0:
            check(args)
        device = stage_device(args.device, place.local, place.local_stages)
        args.device = str(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            take_cores(place.local, place.local_stages)
        meet(place, device)
        serve(args)
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        is_ours = place.launcher is not None  # then it says why another stage has ended
        if place.stage == 0 or (isinstance(error, NotMet) and not is_ours):
            raise
        # stage 0 has probably found the same mistake: its launcher ends us during this sleep
        time.sleep(GRACE)
        if isinstance(error, NotMet):
            raise
        raise UserError(f"stage {place.stage}: {error}") from None
    # torch.distributed's other errors, and gloo's, are plain RuntimeErrors
    except RuntimeError as error:
        words = ("gloo", "nccl", "connection")
        if not isinstance(error, dist.DistError) and not any(
            word in str(error).lower() for word in words
        ):
            raise
        time.sleep(GRACE)  # the other may have said why it has ended
        raise UserError(
            f"stage {place.stage} has lost another stage, which has ended ({reason(error)})"
        ) from None


if __name__ == "__main__":
    run_main(main)
