"""The hunt, lesson 6: a property that finds mistakes. About 10 lines.

You have met schedulers that are wrong and still generate the right tokens. Write a property that
holds for every run of SARATHI, and fails for wrong ones. It must find at least half of the
mistakes: SARATHI with one thing wrong.
"""

from types import SimpleNamespace


def bad(run: SimpleNamespace) -> bool:
    """Whether this run breaks a rule of SARATHI.

    run.max_batch_size (B), run.chunk_size (C)
    run.prompts   the prompt of each request, a list of tokens; all wait from the start, in order,
                  and the memory is enough for all
    run.most      output tokens of each request, a list; none stops earlier
    run.batches   [chunks, decodes] of each iteration. A chunk is [request, start, length]; decodes
                  are request numbers. A run of a broken policy may stop early.
    """
    raise NotImplementedError
