"""The mask of a chunk, and the back ends against each other (native.cpp: test_native.py).

Of promise 1, course/prove.py proves what holds for all lengths.
"""

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from shared import assert_within, attend_spans, attention_case, spans_bound

import attention
import engine
import loop
import scheduler
from attention import PLAIN, chunk_mask
from configs import ModelConfig
from course import prove
from kvcache import KVCache
from more.beam import attention as beams
from more.fast import backends, native
from more.fast.backends import BACKENDS, fastest
from more.loading import variants
from nano_sarathi import LLM, SamplingParams


def test_stacked_chunk_masks_are_the_lower_triangle() -> None:
    """Promise 1 (SARATHI, Sec 4.2 and Fig 6), for all prompt lengths up to 64 and all chunk sizes:
    exact, Boolean.
    """
    for length in range(1, 65):
        triangle = torch.ones(length, length, dtype=torch.bool).tril()
        for chunk_size in range(1, length + 1):
            stacked = torch.zeros(length, length, dtype=torch.bool)
            for start in range(0, length, chunk_size):
                end = min(start + chunk_size, length)
                stacked[start:end, :end] = chunk_mask(start, end - start)
            assert torch.equal(stacked, triangle), (length, chunk_size)


def test_promise_1_is_proved_for_all_lengths(capsys: pytest.CaptureFixture) -> None:
    """The code itself runs on symbols, and z3 finds no numbers that make a claim false."""
    prove.prove()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-2]] == 7 * ["proved"]


def test_xformers_own_masks_are_those_of_chunks() -> None:
    """The paper's library states Fig 6, on every CPU; and the mask that more/fast/cuda.py takes."""
    bias = pytest.importorskip("xformers.ops.fmha.attn_bias")
    padded = bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
    for start, length in ((0, 12), (8, 4), (5, 7), (11, 1), (0, 1)):
        end = start + length
        mask = chunk_mask(start, length)
        own = bias.LowerTriangularFromBottomRightMask().materialize((length, end))
        assert torch.equal(own == 0, mask)
        hybrid = padded.from_seqlens(q_seqlen=[length, 1], kv_padding=16, kv_seqlen=[end, 9])
        seen = hybrid.materialize((length + 1, 2 * 16)) == 0  # a chunk in slot 0, a decode in 1
        expected = torch.zeros(length + 1, 2 * 16, dtype=torch.bool)
        expected[:length, :end], expected[length, 16 : 16 + 9] = mask, True
        assert torch.equal(seen, expected), (start, length)


# Claims of prove.py, and mistakes that make them false: what stands in a file, and what does then.
TRIANGLE = "return column <= row"
LEGAL = "if not chunk.start == request.prefilled < end <= request.prefill_length:"
NEXT = "return Chunk(request, start, min(room, request.prefill_length - start))"
MISTAKES = {
    "rows of a chunk's mask": {
        "a token does not see itself": (
            attention,
            TRIANGLE,
            "return (column < row) | (column == 0)",
        ),
        "no triangle inside a chunk": (attention, TRIANGLE, "return column <= row + length"),
        "rows count from 0 in later chunks, too": (
            attention,
            "row = torch.arange(start, start + length,",
            "row = torch.arange(length,",
        ),
        "the keys of earlier chunks are hidden": (
            attention,
            TRIANGLE,
            "return (column <= row) & (column >= start)",
        ),
    },
    "`sdpa` of": {
        "a decode misses its last token": (
            attention,
            "        if length == 1:\n",
            "        context -= length == 1\n        key = keys[:, slot, :context]\n"
            + "        value = values[:, slot, :context]\n        if length == 1:\n",
        ),
        "a later chunk is taken for a whole prompt": (
            attention,
            "elif length == context:",
            "elif length > 1:",
        ),
    },
    "`near` (layers": {
        "a row sees a token more than its window": (
            variants,
            "first = max(0, start + 1 - window)",
            "first = max(0, start - window)",
        ),
        "no window inside a chunk": (
            variants,
            ".triu(start - first + 1 - window)",
            "",
        ),
    },
    "`next_chunk` fills": {
        "a chunk is one token short": (
            scheduler,
            NEXT,
            NEXT.replace("min(room", "max(1, -1 + min(room") + ")",
        ),
        "a chunk runs past the end of its prompt": (
            scheduler,
            NEXT,
            "return Chunk(request, start, room)",
        ),
        "each chunk starts at the first token again": (
            scheduler,
            NEXT,
            NEXT.replace("start,", "0,"),
        ),
    },
    "any policy": {
        "only the last chunk counts as prefilled": (
            scheduler,
            "request.prefilled = request.context = chunk.start + chunk.length",
            "request.prefilled = request.context = chunk.length",
        ),
        "a chunk may leave tokens out": (loop, LEGAL, LEGAL.replace("==", ">=")),
        "a chunk may run past the end of its prompt": (
            loop,
            LEGAL,
            LEGAL.replace(" <= request.prefill_length", ""),
        ),
    },
}


def planted(module: ModuleType, old: str, new: str) -> ModuleType:
    """The same file with a mistake in it. No other file knows it."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1
    twin = ModuleType(module.__name__)
    exec(compile(text.replace(old, new), module.__file__, "exec"), vars(twin))  # noqa: S102
    return twin


@pytest.mark.parametrize(
    ("claim", "mistake"), [(claim, each) for claim, own in MISTAKES.items() for each in own]
)
def test_a_mistake_has_a_counterexample(claim: str, mistake: str) -> None:
    """A proof that nothing refutes would prove nothing."""
    module, old, new = MISTAKES[claim][mistake]
    twin = planted(module, old, new)
    refuted = {
        what: found
        for what, found in prove.claims(**{module.__name__.rpartition(".")[2]: twin})
        if found
    }
    [numbers] = [found for what, found in refuted.items() if what.startswith(claim)]
    print(f"{mistake}: {prove.shown(numbers)}")
    if claim.startswith("rows of a chunk's mask"):  # it is one for numbers, too
        start, length, row, key = (int(numbers[each]) for each in ("start", "length", "row", "key"))
        wrong, right = (each.chunk_mask(start, length)[row, key] for each in (twin, attention))
        assert wrong != right


def test_two_parts_of_a_softmax_need_their_factors() -> None:
    twin = planted(beams, "share = (most - largest).exp()", "share = (most - most).exp()")
    assert prove.two_parts_are_the_whole(twin.two_segments)


CASES = {
    "whole prompt": (7, [2], [7]),
    "later chunk": (5, [0], [23]),
    "first chunk of one row": (1, [3], [1]),
    "decodes": (1, [3, 0, 2], [9, 31, 1]),
    "all slots decode": (1, [0, 1, 2, 3], [32, 1, 17, 5]),
    "several chunks": (3, [1, 3], [3, 20]),
}


def in_float64(arguments: tuple) -> tuple:
    return tuple(part.double() for part in arguments[:3]) + arguments[3:]


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_sdpa_equals_math(case: str, n_kv_head: int) -> None:
    arguments = attention_case(CASES[case], 16, n_kv_head, torch.float64, 32)
    expected = attend_spans(BACKENDS["math"], *arguments)
    for sdpa in (PLAIN["sdpa"], BACKENDS["sdpa"]):
        assert_within(attend_spans(sdpa, *arguments), expected, 2 * spans_bound(*arguments))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_stays_close_to_float64(case: str) -> None:
    arguments = attention_case(CASES[case], 16, 2, torch.bfloat16, 32)
    rounding = spans_bound(*arguments, scores=torch.bfloat16)
    exact = attend_spans(BACKENDS["math"], *in_float64(arguments))
    for backend in (BACKENDS["math"], PLAIN["sdpa"], BACKENDS["sdpa"]):
        rounded = attend_spans(backend, *arguments)
        assert rounded.dtype == torch.bfloat16
        assert_within(rounded, exact, rounding)
    q, *rest = arguments  # long queries: here it shows if `math` rounds its scores
    arguments = (16 * q, *rest)
    exact = attend_spans(BACKENDS["math"], *in_float64(arguments))
    assert_within(attend_spans(BACKENDS["math"], *arguments), exact, spans_bound(*arguments))


class OfTriton(Exception):
    """Its compiler raises kinds of its own."""


def test_the_fastest_is_chosen_by_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    takes = {"slow": 0.02, "quick": 0.0}

    def attend_layer(name: str, qkv: torch.Tensor) -> torch.Tensor:
        if name == "broken":
            raise OfTriton("not on this GPU")
        calls.append(name)
        return qkv

    for name in (*takes, "broken"):
        made = partial(lambda name, batch, cache: lambda layer, qkv: attend_layer(name, qkv), name)
        monkeypatch.setitem(BACKENDS, name, made)
    cache = KVCache(ModelConfig("tiny", 1, 4, 32, 48, 97, 64, n_kv_head=2), 3, 32)
    names = ["slow", "broken", "quick"]
    with monkeypatch.context() as patch:
        patch.setattr(backends, "synchronized_clock", lambda _: sum(takes[each] for each in calls))
        assert fastest(4, cache, names, repeats=2) == "quick"
        # decodes and a chunk, once to warm up, in two layers
        assert calls.count("slow") == calls.count("quick") == 2 * 3 * 2
        assert fastest(4, cache, ["quick", "slow"], repeats=2) == "quick"
    calls.clear()
    assert fastest(4, cache, ["slow"]) == "slow" and not calls, "nothing to measure"
    assert fastest(4, cache, ["sdpa", "math"], repeats=1) in ("sdpa", "math")  # real ones run


@pytest.mark.parametrize("winner", ["sdpa", "native"])
def test_an_unknown_cpu_is_measured(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an ARM one. What won runs, and its small operators with it."""
    if not native.usable(torch.device("cpu"), torch.float32, 64, 1):
        pytest.skip("needs a C++ compiler")
    asked = []

    def fastest(n_head: int, cache: KVCache, names: list[str]) -> str:
        asked.append(names)
        return winner

    monkeypatch.setattr(backends, "fastest", fastest)
    monkeypatch.setattr(backends, "X86", False)
    llm = LLM("demo", device="cpu", dtype="float32")
    assert asked == [["sdpa", "native"]] and llm.attention == winner
    assert isinstance(llm.model.norm, torch.nn.RMSNorm) == (winner == "sdpa")
    asked = "def open(", SamplingParams(max_tokens=8)
    plain = engine.LLM("demo", dtype="float32")
    assert llm.generate(*asked)[0].text == plain.generate(*asked)[0].text
