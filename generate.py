"""Text in, text out.

    python generate.py "Return True if" --policy sarathi --chunk-size 64 --max-tokens 64
    python generate.py "Return True if" --beams 4 --max-tokens 32
    python generate.py "def open(" "The list type" --stages 2
    python generate.py --stages 2 --model llama-0.2b --lengths 512:16,300:8,700:12

One prompt is streamed. Several prompts, or a file with one prompt on each line, run as a batch.
--beams prints the best sequences of a beam search, with their scores. --stages spreads the model's
layers over processes of this machine; torchrun starts them on many (docs/pipelines.md). --lengths
512:16 makes up a prompt of 512 tokens, with 16 output tokens. A short table at the end says what
the run did.
"""

import command.enter  # noqa: F401

import argparse

from command.cli import run_main
from command.flags import Flag, Parser
from more.loading.policyfile import load_files
from more.pipeline.policies import policy_names

FLAGS = {
    "file": Flag(),
    "model": Flag("model: demo, a Hugging Face directory, or a hub id", "demo"),
    "policy": Flag(f"policy, one of {policy_names()}; with --stages, td_pipe", "sarathi"),
    "policy_file": Flag(repeated=True),
    "calibration": Flag(shown="results/calibration-MODEL.json"),
    "chunk_size": Flag(default=64),
    "max_batch_size": Flag(default=8),
    "max_length": Flag(
        "most tokens of prompt and output; with --beams, of the prompt",
        shown="what the prompts need",
    ),
    "max_tokens": Flag(default=64),
    "temperature": Flag(default=0),
    "top_k": Flag(default=0),
    "top_p": Flag(default=1),
    "beams": Flag("search with BW beams, instead of sampling; each takes a token of C"),
    "n": Flag(shown="all"),
    "cache": Flag(shown="slots; with --beams, segment"),
    "block_size": Flag(shown="16"),
    "prefix_caching": Flag(),
    "length_penalty": Flag(shown="1"),
    "seed": Flag(default=0),
    "ignore_eos": Flag(),
    **dict.fromkeys(("dtype", "device", "attention", "cuda_graphs"), Flag(default="auto")),
    "perfetto": Flag("write the run, operator by operator, for https://ui.perfetto.dev (JSON)"),
    "check": Flag(),
    "stages": Flag("processes to start, unless torchrun starts them", 1),
    "micro_batches": Flag(
        "with --stages: micro-batches of --max-batch-size requests each", shown="one for each stage"
    ),
    "deal": Flag(
        "with --stages: how micro-batches get requests: queue, turns, any, or ahead (any,"
        " and a prompt's next chunk follows at once)",
        shown="queue",
    ),
    "lengths": Flag(repeated=True),
    "json": Flag("with --stages: write every run's times"),
}


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__.splitlines()[0], FLAGS)
    parser.add_argument("prompts", nargs="*", help="one or more prompts")
    args = parser.parse_args()
    load_files(args.policy_file, args.policy)
    return args


def main() -> None:
    args = parse_args()
    from more.generate import run  # here: it needs torch, and --help does not

    run(args)


if __name__ == "__main__":
    run_main(main)
