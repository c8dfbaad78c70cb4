"""Text in, text out.

    python generate.py "Return True if" --policy sarathi --chunk-size 64 --max-tokens 64
    python generate.py "Return True if" --beams 4 --max-tokens 32

One prompt is streamed. Several prompts, or a file with one prompt on each line, run as a batch.
--beams prints the best sequences of a beam search, with their scores. A short table at the end says
what the run did.
"""

import command.enter  # noqa: F401

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from command.checks import WHY_BROKEN, UserError
from command.cli import progress, read_text, run_main
from command.flags import LAYOUTS, Flag, Parser
from engine import LLM, BeamSearchParams, SamplingParams, StreamedToken
from loading.files import for_text
from loading.load import find_model, late_tokenizer
from loading.policyfile import load_files, warn_if_crowded
from loading.tokenizer import load_tokenizer
from pictures import perfetto
from pipeline.policies import policy_names
from scheduler import make_scheduler
from serving.calibration import cost_here, this_machine
from timeline import Trace

MOST_BYTES = 10**8  # of a file of prompts


FLAGS = {
    "file": Flag("UTF-8 text file with one prompt on each line; empty lines are skipped"),
    "model": Flag("model: demo, a Hugging Face directory, or a hub id", "demo"),
    "policy": Flag(f"policy, one of {policy_names()}", "sarathi"),
    "policy_file": Flag(repeated=True),
    "calibration": Flag("calibration of this machine, for policies that ask what a batch costs",
                        shown="results/calibration-MODEL.json"),
    "chunk_size": Flag(default=64),
    "max_batch_size": Flag(default=8),
    "max_length": Flag("most tokens of prompt and output; with --beams, of the prompt",
                       shown="what the prompts need"),
    "max_tokens": Flag("output tokens at most", 64),
    "temperature": Flag(default=0),
    "top_k": Flag(default=0),
    "top_p": Flag(default=1),
    "beams": Flag("search with BW beams, instead of sampling; each takes a token of C"),
    "n": Flag("with --beams: print the N best", shown="all"),
    "cache": Flag(shown="slots; with --beams, segment"),
    "block_size": Flag(shown="16"),
    "prefix_caching": Flag(),
    "length_penalty": Flag("with --beams: score = log-probability / length ** X, X from -10 to 10",
                           shown="1"),
    "seed": Flag("seed of the sampling", 0),
    "ignore_eos": Flag(),
    **dict.fromkeys(("dtype", "device", "attention", "cuda_graphs"), Flag(default="auto")),
    "perfetto": Flag("write the run, operator by operator, for https://ui.perfetto.dev (JSON)"),
    "check": Flag(),
}  # fmt: skip


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], FLAGS)
    parser.add_argument("prompts", nargs="*", help="one or more prompts")
    args = parser.parse_args()
    load_files(args.policy_file, args.policy)
    return args


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
        args.beams, args.max_tokens, args.n, ignore_eos=args.ignore_eos,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
    )  # fmt: skip


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of a file. Raises UserError if there is none."""
    prompts = list(prompts)
    if file:
        try:
            text = read_text(file, MOST_BYTES)
        except UserError as error:
            raise UserError(f"cannot read prompts from {str(file)!r}: {error}") from None
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        # splitlines() would also split at odd characters
        prompts += [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError("no prompt: give one on the command line, or a file with --file")
    return prompts


def longest(args: argparse.Namespace, prompts: Sequence[str]) -> int:
    """Tokens that a request takes at most, if the model allows so many.

    Raises UserError if there is no such model, or if it has no tokenizer.
    """
    config, directory = find_model(args.model)
    if directory is None:
        raise UserError(
            f"model {args.model!r} has random weights and no tokenizer: for text choose"
            f" {for_text(args.model)}"
        )
    tokenizer = load_tokenizer(directory) or late_tokenizer(config, directory, 0)
    texts = [text.encode(errors="replace").decode() for text in prompts]  # `LLM` refuses others
    output = 0 if args.beams else args.max_tokens - 1  # the last one is not fed back
    most = max(len(tokenizer.encode(text)) for text in texts) + output
    return max(1, min(most, config.longest))


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


def ended(tokens: Iterator[StreamedToken], pieces: list[str], reasons: list[str]) -> Iterator[None]:
    """Gather the text of all tokens in `pieces`. Yields after each request that ends."""
    for token in tokens:
        pieces[token.index] += token.text
        if token.finish_reason:
            reasons[token.index] = token.finish_reason
            yield


def run_batch(llm: LLM, prompts: list[str], params: SamplingParams) -> list[str]:
    pieces, reasons = [""] * len(prompts), [""] * len(prompts)
    tokens = llm.stream(prompts, params)
    for _ in progress(ended(tokens, pieces, reasons), "requests", len(prompts)):
        pass
    for index, (prompt, text) in enumerate(zip(prompts, pieces, strict=True)):
        print(f"--- {index + 1} of {len(prompts)}\n{prompt}{text}\n")
    return reasons


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
    budget = make_scheduler(llm.policy, 1, llm.chunk_size).chunk_size  # the policy may have its own
    rows = [
        ("policy", f"{llm.policy}, C = {budget}, B = {llm.max_batch_size}"),
        ("prefill", rate(trace.num_prefill_tokens, prefill)),
        ("decode", rate(trace.num_decodes, decode, decodes)),
        ("throughput", trace.rates),
        ("policy's time", trace.own_time),
        ("iterations", f"{len(trace.iterations)} in {trace.seconds:.2f} s"),
        ("mean batch", f"{trace.mean_batch_size:.2f} requests"),
        ("model", f"{llm.config.name}, {llm.config.parameters / 1e6:.1f} M parameters"),
        (
            "device, dtype",
            f"{llm.device}, {str(llm.dtype).removeprefix('torch.')}, attention by {llm.attention}",
        ),
    ]
    return "\n".join(f"{name:<14}{value}" for name, value in rows)


def rate(count: int, seconds: float, what: str = "tokens") -> str:
    return f"{count} {what}, {count / seconds:.0f} {what}/s" if count else "none"


def main() -> None:
    args = parse_args()
    prompts = read_prompts(args.prompts, args.file)
    params = SamplingParams(
        args.max_tokens, args.temperature, args.top_k, args.top_p, ignore_eos=args.ignore_eos
    )
    beams = beam_params(args)
    length = longest(args, prompts)  # complains before the weights are loaded
    llm = LLM(
        args.model,
        policy=args.policy,
        chunk_size=args.chunk_size,
        max_batch_size=args.max_batch_size,
        max_length=length if args.max_length is None else args.max_length,
        cache="slots" if beams or args.cache is None else args.cache,
        block_size=args.block_size,
        prefix_caching=args.prefix_caching,
        dtype=args.dtype,
        device=args.device,
        attention=args.attention,
        time_operators=args.perfetto is not None,
        seed=args.seed,  # each request adds its number: the same prompt twice draws two texts
        check_weights=args.check,
        cuda_graphs=args.cuda_graphs,
    )
    warn_if_crowded(llm.policy, llm.max_batch_size, llm.chunk_size)
    llm.cost = cost_here(llm.config.name, str(llm.device), str(llm.dtype), args.calibration)
    if beams:
        reasons = search_beams(llm, prompts, beams, "segment" if args.cache is None else args.cache)
    elif len(prompts) == 1:
        reasons = stream_one(llm, prompts[0], params)
    else:
        reasons = run_batch(llm, prompts, params)
    print(table(llm, llm.trace, beams is not None))
    if args.perfetto:
        where = f"{this_machine(str(llm.device))}, {str(llm.dtype).removeprefix('torch.')}"
        budget = make_scheduler(llm.policy, 1, llm.chunk_size).chunk_size
        run = perfetto.About("measured", llm.config.name, where, llm.policy, budget)
        perfetto.save(args.perfetto, {llm.policy: llm.trace}, about={llm.policy: run})
        print(f"\nwrote {args.perfetto}: open it on https://ui.perfetto.dev")
    if broken := [str(number) for number, why in enumerate(reasons, 1) if why == "error"]:
        raise UserError(f"prompt {', '.join(broken)} of {len(prompts)}: {WHY_BROKEN}")


if __name__ == "__main__":
    run_main(main)
