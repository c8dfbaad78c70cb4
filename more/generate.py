"""What generate.py runs, once its flags are read. It needs torch."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from command.checks import WHY_BROKEN, UserError
from command.cli import MARK, progress, read_text, write_file
from command.flags import LAYOUTS, TOKENS
from configs import ModelConfig
from more.fast.backends import choose_backend
from more.loading.device import check_memory, choose_dtype
from more.loading.files import for_text
from more.loading.load import find_model, late_tokenizer
from more.loading.policyfile import warn_if_crowded
from more.loading.tokenizer import load_tokenizer
from more.pictures import perfetto
from more.pipeline import BUBBLES, even_layers
from more.pipeline.launch import Place, joined, launch, stage_device
from more.pipeline.policies import is_for_pipelines, make_micro_batches, unmeasured
from more.pipeline.stages import PipelineLLM
from more.serving.calibration import cost_here, this_machine
from nano_sarathi import LLM, BeamSearchParams, SamplingParams
from scheduler import make_scheduler
from timeline import Trace

OF_ONE = ("beams", "cache", "block_size", "prefix_caching", "cuda_graphs")  # no stage takes them
OF_STAGES = ("micro_batches", "deal", "lengths", "json")


@dataclass(frozen=True)
class Work:
    """What runs at once, under one policy."""

    policy: str
    prompts: Sequence[str] | list[list[int]]
    params: SamplingParams | list[SamplingParams]
    longest: int  # tokens that one of them takes at most


def placed(args: argparse.Namespace) -> Place | None:
    """Where this process is in a pipeline. Raises UserError for flags that do not fit that."""
    place = Place.here()
    if place is not None and args.stages not in (1, place.stages):
        raise UserError(f"--stages is {args.stages}, and WORLD_SIZE {place.stages}: leave one out")
    staged = args.stages > 1 or place is not None
    for name in OF_ONE if staged else OF_STAGES:
        if getattr(args, name) not in (None, False, "auto"):
            where = "for one process" if staged else "for several processes: give --stages, too"
            raise UserError(f"--{name.replace('_', '-')} is {where}")
    return place


def beam_params(args: argparse.Namespace) -> BeamSearchParams | None:
    """What --beams asks for. Raises UserError if an option is given that does nothing."""
    usual = {"temperature": 0, "top_k": 0, "top_p": 1}
    given = {name: getattr(args, name) for name in usual if getattr(args, name) != usual[name]}
    flags = [f"--{name.replace('_', '-')} is {value}" for name, value in given.items()]
    if args.beams is None:
        for name in ("length_penalty", "n", "cache"):
            if getattr(args, name) not in (None, *LAYOUTS):
                raise UserError(
                    f"--{name.replace('_', '-')} is for beam search only: give --beams too"
                )
        if flags and "temperature" not in given:
            raise UserError(f"{flags[0]}, and nothing is drawn: give --temperature too")
        return None
    if flags:
        raise UserError(f"{flags[0]}; a beam search does not sample: leave it out")
    return BeamSearchParams(
        args.beams,
        args.max_tokens,
        args.n,
        ignore_eos=args.ignore_eos,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
    )


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of a file. Raises UserError if there is none."""
    prompts = list(prompts)
    if file:
        try:
            text = read_text(file)
        except UserError as error:
            raise UserError(f"cannot read prompts from {str(file)!r}: {error}") from None
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        # splitlines() would also split at odd characters
        prompts += [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(
            "no prompt: give one on the command line, or a file with --file; with --stages,"
            " --lengths 512:16 makes one up"
        )
    return prompts


def made_up(text: str, policy: str, config: ModelConfig) -> Work:
    """Prompts of made-up tokens. text: "P:N,P:N" or "POLICY@P:N,P:N".

    P tokens and N output tokens each. Raises UserError.
    """
    own, _, sizes = text.rpartition("@")
    pairs = [tuple(map(TOKENS.read, pair.split(":"))) for pair in sizes.split(",")]
    if any(len(pair) != 2 or None in pair for pair in pairs):
        raise UserError(
            f"--lengths {text!r} is not a list of prompt:output tokens, at least 1 each, such as"
            " 512:16,300:8"
        )
    if (most := max(map(sum, pairs)) - 1) > config.longest:
        raise UserError(
            f"--lengths {text!r}: prompt and output take up to {most} tokens, and {config.name}"
            f" allows {config.longest}"
        )
    prompts = []
    params = []
    for index, (prompt, output) in enumerate(pairs):
        prompts.append([(31 * index + 7 * place) % config.vocab_size for place in range(prompt)])
        params.append(SamplingParams(max_tokens=output, ignore_eos=True))
    return Work(own or policy, prompts, params, most)


def plan_work(args: argparse.Namespace, config: ModelConfig, directory: Path | None) -> list[Work]:
    """What is to run. Raises UserError if there is text, and the model has no tokenizer."""
    works = [made_up(text, args.policy, config) for text in args.lengths or ()]
    if works and not (args.prompts or args.file):
        return works
    prompts = read_prompts(args.prompts, args.file)
    params = SamplingParams(
        args.max_tokens, args.temperature, args.top_k, args.top_p, ignore_eos=args.ignore_eos
    )
    if directory is None:
        raise UserError(
            f"model {args.model!r} has random weights and no tokenizer: for text choose"
            f" {for_text(args.model)}"
        )
    tokenizer = load_tokenizer(directory) or late_tokenizer(config, directory, 0)
    texts = [text.encode(errors="replace").decode() for text in prompts]  # `LLM` refuses others
    longest = max(len(tokenizer.encode(text)) for text in texts)
    longest += 0 if args.beams else args.max_tokens - 1  # the last one is not fed back
    return [*works, Work(args.policy, prompts, params, longest)]


def stream_one(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    """Returns the finish_reason, as the two functions below."""
    tokens = llm.stream(prompt, params)  # complains before anything is printed
    try:
        print(prompt, end="", flush=True)
        for token in tokens:
            print(token.text, end="", flush=True)
    finally:  # after Ctrl-C, too: what comes next has a line of its own
        print()
    print()
    return [token.finish_reason]


def run_batch(llm: LLM, prompts: list[str], params: SamplingParams) -> list[str]:
    texts = [""] * len(prompts)
    reasons = [""] * len(prompts)
    for token in progress(llm.stream(prompts, params), "tokens"):
        texts[token.index] += token.text
        reasons[token.index] = token.finish_reason or ""
    print_texts(prompts, texts)
    return reasons


def print_texts(prompts: Sequence[str], texts: Sequence[str]) -> None:
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        print(f"--- {index + 1} of {len(prompts)}\n{prompt}{text}\n")


def search_beams(llm: LLM, prompts: list[str], params: BeamSearchParams, cache: str) -> list[str]:
    outputs = llm.beam_search(prompts, params, cache=cache)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        for rank, sequence in enumerate(output.sequences, 1):
            ended = {"stop": "ended", "length": "cut at max_tokens", "error": "broken"}
            of = f"prompt {number} of {len(prompts)}, " if len(prompts) > 1 else ""
            print(
                f"--- {of}beam {rank} of {params.beam_width}, score {sequence.score:.4g},"
                f" {ended[sequence.finish_reason]}"
            )
            print(f"{prompt}{sequence.text}\n")
    return [output.sequences[0].finish_reason for output in outputs]


def table(llm: LLM, trace: Trace, beams: bool = False) -> str:
    """The rates of a run, as rows.

    The prefill rate counts only the seconds of iterations with prompt tokens. The decode rate
    counts only those with decodes. The seconds of a hybrid batch count for both.
    """
    decodes = "steps" if beams else "tokens"  # of all searches
    prefill = sum(i.seconds for i in trace.iterations if i.num_prefill_tokens)
    decode = sum(iteration.seconds for iteration in trace.iterations if iteration.num_decodes)
    budget = budget_of(llm)
    staged = isinstance(llm, PipelineLLM)
    size = "whole prompts" if budget is None else f"C = {budget}"
    most = llm.micro_batch_size if staged else llm.max_batch_size
    rows = [
        ("policy", f"{llm.policy}, {size}, B = {most}"),
        ("prefill", rate(trace.num_prefill_tokens, prefill)),
        ("decode", rate(trace.num_decodes, decode, decodes)),
        ("throughput", trace.rates),
        ("policy's time", trace.own_time),
        ("iterations", f"{len(trace.iterations)} in {trace.seconds:.2f} s"),
        ("mean batch", f"{trace.mean_batch_size:.2f} requests"),
        ("model", f"{llm.config.name}, {llm.config.parameters / 1e6:.1f} M parameters"),
        ("device, dtype", f"{llm.device}, {dtype_of(llm)}, attention by {llm.attention}"),
        *(of_stages(llm) if staged else ()),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def of_stages(llm: PipelineLLM) -> Iterator[tuple[str, str]]:
    """When the stages of a pipeline worked, and why they waited."""
    trace = llm.pipeline
    stage_seconds = llm.stages * llm.pipeline.seconds
    yield "stages", f"{llm.stages}, {llm.micro_batches} micro-batches"
    if trace.history:
        phases = [phase for phase, _ in groupby(trace.history, itemgetter(-1))]
        prefills = phases.count("prefill")
        decodes = phases.count("decode")
        yield "phases", f"{prefills} of prefills, {decodes} of decodes"
    busy = [f"stage {i} {100 * work / trace.seconds:.0f} %" for i, work in enumerate(trace.busy)]
    idle = [f"{name} {100 * s / stage_seconds:.1f} %" for name, s in trace.idle.items() if s > 0]
    yield "busy", f"{100 * trace.busy_share:.0f} %: {', '.join(busy)}"
    yield "idle", ", ".join(idle)
    yield "bubbles", f"{100 * trace.bubble_share:.1f} % of all stages' time ({', '.join(BUBBLES)})"


def budget_of(llm: LLM) -> int | None:
    """C in tokens; a policy may have one of its own. None: it has whole prompts only."""
    if is_for_pipelines(llm.policy):
        return None
    return make_scheduler(llm.policy, 1, llm.chunk_size).chunk_size


def dtype_of(llm: LLM) -> str:
    return str(llm.dtype).removeprefix("torch.")


def rate(count: int, seconds: float, what: str = "tokens") -> str:
    return f"{count} {what}, {count / seconds:.0f} {what}/s" if count else "none"


def start(
    args: argparse.Namespace, works: Sequence[Work], config: ModelConfig, length: int
) -> None:
    """Run this command once for each stage. First, find mistakes, and compile what is missing."""
    device = stage_device(args.device, 0, args.stages)
    even_layers(config.n_layer, args.stages)
    count = args.micro_batches or args.stages
    size = args.max_batch_size
    for work in works:
        sizes = count, args.stages, size, args.chunk_size
        make_micro_batches(work.policy, *sizes, seconds_of=unmeasured, deal=args.deal or "queue")
    dtype = choose_dtype(args.dtype, device)
    choose_backend(args.attention, device, dtype, config)
    if device.type == "cpu":  # all stages share its memory
        check_memory(config, count * size, length, dtype, device)
    launch(args.stages, hide_gpus=device.type == "cpu")


def run_stages(llm: PipelineLLM, works: Sequence[Work], path: Path | None) -> list[str]:
    """Run all, in every stage. Stage 0 prints the results. Returns why each output ended."""
    found = []
    reasons = []
    for work in works:
        llm.policy = work.policy
        if llm.stage == 0 and not is_for_pipelines(work.policy):
            warn_if_crowded(work.policy, llm.micro_batch_size, llm.chunk_size)
        outputs = llm.generate(work.prompts, work.params)
        reasons += [output.finish_reason for output in outputs]
        if llm.stage > 0:
            continue
        names = ("seconds", "bubble_share", "busy", "idle")
        numbers = {name: getattr(llm.pipeline, name) for name in names} | {"hop": llm.hop}
        tokens = [output.token_ids for output in outputs]
        found.append({"mark": MARK} | numbers | {"tokens": tokens})
        if isinstance(work.prompts[0], str):
            print_texts(work.prompts, [output.text for output in outputs])
        print(table(llm, llm.trace))
    if path and llm.stage == 0:
        write_file(path, json.dumps(found, indent=1) + "\n")
    return reasons


def run_one(
    args: argparse.Namespace, work: Work, beams: BeamSearchParams | None, options: dict
) -> tuple[LLM, list[str]]:
    """Run it in this process. options: of `LLM`. Returns why each output ended, too."""
    llm = LLM(
        args.model,
        **options,
        time_operators=args.perfetto is not None,
        cache="slots" if beams or args.cache is None else args.cache,
        block_size=args.block_size,
        prefix_caching=args.prefix_caching,
        cuda_graphs=args.cuda_graphs,
    )
    warn_if_crowded(llm.policy, llm.max_batch_size, llm.chunk_size)
    take_prices(llm, args.calibration)
    if beams:
        cache = "segment" if args.cache is None else args.cache
        reasons = search_beams(llm, work.prompts, beams, cache)
    elif len(work.prompts) == 1:
        reasons = stream_one(llm, work.prompts[0], work.params)
    else:
        reasons = run_batch(llm, work.prompts, work.params)
    print(table(llm, llm.trace, beams is not None))
    return llm, reasons


def take_prices(llm: LLM, calibration: Path | None) -> None:
    """Of batches, for policies that ask: from a calibration of the device that `llm` runs on."""
    llm.cost = cost_here(llm.config.name, str(llm.device), str(llm.dtype), calibration)


def save(path: Path, llm: LLM) -> None:
    """Write the run for ui.perfetto.dev."""
    where = f"{this_machine(str(llm.device))}, {dtype_of(llm)}"
    name = llm.policy
    if isinstance(llm, PipelineLLM):
        where = f"{llm.stages} stages, {where}"
    run = {name: perfetto.About("measured", llm.config.name, where, name, budget_of(llm))}
    if isinstance(llm, PipelineLLM):
        perfetto.save_stages(path, {name: llm.pipeline}, about=run)
    else:
        perfetto.save(path, {name: llm.trace}, about=run)
    print(f"\nwrote {path}: open it on https://ui.perfetto.dev")


def run(args: argparse.Namespace) -> None:
    """All that generate.py does with its flags. Raises UserError for those that do not fit."""
    place = placed(args)
    beams = beam_params(args)
    config, directory = find_model(args.model)
    works = plan_work(args, config, directory)
    needed = max(1, min(max(work.longest for work in works), config.longest))
    length = needed if args.max_length is None else args.max_length
    if place is None and args.stages > 1:
        start(args, works, config, length)
        return
    names = ("policy", "chunk_size", "max_batch_size", "dtype", "device", "attention", "seed")
    options = {name: getattr(args, name) for name in names}
    options |= {"max_length": length, "check_weights": args.check}
    if place is not None:
        with joined(place, args.device) as device:
            options |= {"device": str(device), "micro_batches": args.micro_batches}
            options["deal"] = args.deal or "queue"
            llm = PipelineLLM(args.model, **options)
            take_prices(llm, args.calibration)
            reasons = run_stages(llm, works, args.json)
        if llm.stage > 0:
            return
    else:
        [work] = works  # several only by --lengths, which is for stages
        llm, reasons = run_one(args, work, beams, options)
    if args.perfetto:
        save(args.perfetto, llm)
    if broken := [str(number) for number, why in enumerate(reasons, 1) if why == "error"]:
        raise UserError(f"prompt {', '.join(broken)} of {len(reasons)}: {WHY_BROKEN}")
