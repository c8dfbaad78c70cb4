"""The command line as a newcomer meets it: text, a table, and one clear line for each mistake."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import call

import generate
from batch import Request
from more import generate as running
from more.generate import read_prompts
from more.simulate import simulate
from nano_sarathi import LLM, SamplingParams, StreamedToken


def test_streams_text_and_ends_with_a_table() -> None:
    """With nothing but the text on its streams."""
    flags = ["--policy", "sarathi", "--chunk-size", "64", "--max-tokens", "24", "--ignore-eos"]
    done = call(generate, "The with statement", *flags)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    text, table = done.stdout.split("\npolicy ")
    assert text.startswith("The with statement") and len(text) > len("The with statement") + 20
    for line in ("decode        23 tokens", "iterations    24 in", "mean batch    1.00"):
        assert line in table, table


def test_rates_are_of_the_iterations_that_did_it() -> None:
    trace = simulate([Request(0, range(64), 9)], "llama-13b", policy="sarathi", chunk_size=64)
    said = running.table(LLM("demo", device="cpu"), trace)
    prefill, *decodes = (each.seconds for each in trace.iterations)
    assert f"64 tokens, {64 / prefill:.0f} tokens/s" in said
    assert f"8 tokens, {8 / sum(decodes):.0f} tokens/s" in said


def test_the_cache_takes_what_the_prompts_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is longer than the model allows is refused as ever."""
    made: list[LLM] = []

    def make(*names: object, **options: object) -> LLM:
        made.append(LLM(*names, **options))
        return made[-1]

    monkeypatch.setattr(running, "LLM", make)
    texts = "def open(", 50 * "a new list "
    assert call(generate, *texts, "--max-tokens", 5).returncode == 0
    longest = max(len(made[0].tokenizer.encode(text)) for text in texts)
    assert made[0].max_length == made[0].cache.length == longest + 4
    assert call(generate, *texts, "--max-tokens", 5, "--beams", 2).returncode == 0
    assert made[1].max_length == longest


def test_an_interrupt_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in mid-word: a shell's prompt comes on a line of its own."""

    def interrupted(*arguments: object) -> Iterator[StreamedToken]:
        yield StreamedToken(0, 1, " stat", None)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    done = call(generate, "The with")
    assert (done.returncode, done.stdout, done.stderr) == (130, "The with stat\n", "interrupted\n")


def test_several_prompts_make_a_batch(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    # with a mark first, as some editors write it
    prompts.write_text("The with statement\n\nReturn a new list\n", encoding="utf-8-sig")
    outputs = []
    for policy in ("baseline", "sarathi"):
        flags = ["--file", prompts, "--max-tokens", 12, "--dtype", "float32", "--policy", policy]
        done = call(generate, "class Path:", *flags, "--chunk-size", 8)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout[: done.stdout.index("policy  ")])
    for text in ("--- 2 of 3\nThe with statement", "--- 3 of 3\nReturn a new list"):
        assert text in outputs[0]
    assert outputs[0] == outputs[1], "the policy changes the time, never the text"


def test_a_line_ends_at_a_newline_only(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("one\x0cpage\u2028and\x85more\r\nThe with statement".encode())
    assert read_prompts([], prompts) == ["one\x0cpage\u2028and\x85more", "The with statement"]


@pytest.mark.parametrize("flags", [[], ["--temperature", 1], ["--beams", 2], ["--cache", "paged"]])
def test_broken_logits_end_their_prompt_with_one_line(broken: Path, flags: list) -> None:
    """The others are printed as without them, and the table, too."""
    flags = ["--model", broken, "--dtype", "float64", "--max-tokens", 8, *flags]
    both = call(generate, "def open(", "§ 1", *flags)
    alone = call(generate, "§ 1", *flags)
    line = "the model's logits are NaN or infinite: look at --check, and at other dtypes\n"
    assert (both.returncode, both.stderr) == (2, f"error: prompt 2 of 2: {line}")
    assert (alone.returncode, alone.stderr) == (2, f"error: prompt 1 of 1: {line}")
    fine = call(generate, "def open(", "def", *flags)
    first = re.split("--- (prompt )?2", fine.stdout)[0]
    assert fine.returncode == 0 and both.stdout.startswith(first) and "mean batch" in both.stdout


def test_each_prompt_draws_its_own_numbers() -> None:
    """The same prompt twice gives two texts, and the same two with the same seed."""

    def texts(seed: int) -> list[str]:
        flags = ["--temperature", 1, "--seed", seed, "--max-tokens", 16, "--dtype", "float32"]
        done = call(generate, "def open(", "def open(", *flags)
        assert done.returncode == 0, done.stderr
        return re.findall(r"--- \d of 2\n(.*?)\n\n(?=---|policy)", done.stdout, flags=re.DOTALL)

    first, second = texts(3)
    assert first != second
    assert texts(3) == [first, second]
    assert texts(4)[0] == second, "prompt i draws from seed + i"


def test_stop_tokens_of_a_prompt_join_the_models() -> None:
    params = [SamplingParams(stop_ids=(3,)), SamplingParams(stop_ids=(3,), ignore_eos=True)]
    llm = LLM("demo", device="cpu", max_length=128)
    llm.stop_ids = frozenset({7})
    made = llm._requests([[1], [2]], params, None)
    assert [request.stop_ids for request in made] == [{3, 7}, {3}]


def test_a_prompt_that_is_no_text() -> None:
    done = call(generate, "--max-tokens", "2", "\udcff\udcfe")  # as Python reads what is no UTF-8
    assert done.returncode in (0, 2), done.stderr
