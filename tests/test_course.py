"""The course: its commands, what its self-test finds, and submissions that attack the grader."""

import ast
import base64
import csv
import doctest
import errno
import json
import os
import random
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from watch import alive, children_of, wait_for

from command.checks import UserError
from course import __main__ as commands
from course import doctor, grade, page, predictions, selftest
from course.browser import in_browser
from course.check import final, hunt
from course.check.frame import ANSWER, examine, judged, lines, same
from course.check.rounds import judge_record
from course.drive import serve
from course.exercises import EXERCISES, AnswerError, find, load, read_answer
from course.feedback import Grade, harmless, predicted
from course.local import asker
from course.picture import picture
from course.plants import named, plants, unwritten
from course.predictions import Outcome
from course.sandbox import PROTECTIONS
from course.sketch import Words, svg
from course.submissions import Submission
from course.worker import processor_clock
from scheduler import Sarathi
from tests import warm

ROOT = Path(__file__).parent.parent
COURSE = ROOT / "course"
RIGHT = (
    "def right(rows, cached, model, gpu):\n"
    "    weights = model.n_layer * model.layer_weights\n"
    "    size = 2 * weights + cached * model.kv_bytes_per_token()\n"
    "    return max(size / gpu.bandwidth, 2 * rows * weights / gpu.peak)\n"
)
POSIX = pytest.mark.skipif(os.name != "posix", reason="it needs signals and links")


def zipped(name: str | zipfile.ZipInfo, data: bytes, how: int = zipfile.ZIP_DEFLATED) -> str:
    """A zip of one file, as base64."""
    out = BytesIO()
    with zipfile.ZipFile(out, "w", how) as packed:
        packed.writestr(name, data)
    return base64.b64encode(out.getvalue()).decode()


def far() -> str:
    """A zip whose file lies beyond all that can be counted."""
    info = zipfile.ZipInfo("e01.py")
    info.extra = struct.pack("<HHQ", 1, 8, 2**64 - 1)
    data = bytearray(base64.b64decode(zipped(info, b"x = 1")))
    place = data.rindex(b"PK\1\2") + 42
    data[place : place + 4] = b"\xff" * 4  # the offset is in `extra`
    return base64.b64encode(data).decode()


FAR = far()


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A student's folder, and not the one of whoever runs the tests."""
    folder = tmp_path / "mine"
    monkeypatch.setattr(commands, "MINE", folder)
    monkeypatch.setattr("course.local.MINE", folder)
    return folder


# ---------------------------------------------------------------------------------- the commands


def test_start_copies_all_stubs_and_overwrites_nothing(mine: Path) -> None:
    commands.start()
    names = {f"{exercise.file}.py" for exercise in EXERCISES.values()}
    assert {path.name for path in mine.iterdir()} == names and len(names) == 15
    (mine / "e06.py").write_text("my work")
    (mine / "e07.py").unlink()
    commands.start()
    assert (mine / "e06.py").read_text() == "my work" and (mine / "e07.py").exists()


def test_a_mistake_is_planted_where_nobody_has_written(
    mine: Path, capsys: pytest.CaptureFixture
) -> None:
    commands.plant("1")  # no folder yet
    commands.start()
    for name, file in {"p40a": "e12.py", " 40B": "e12.py", "01": "e06.py"}.items():
        commands.plant(name)
        assert (mine / file).read_text("utf-8") == named(name).source, name
    capsys.readouterr()
    assert not commands.check(find("12"), 1) and "X2 fails" in capsys.readouterr().out
    (mine / "e12.py").write_text("my work")
    with pytest.raises(UserError, match="e12.py is not as we wrote it"):
        commands.plant("40a")
    assert (mine / "e12.py").read_text() == "my work"


@pytest.mark.parametrize("key", ["6", "06", "E6", "e06", " e6 "])
def test_an_exercise_has_many_names(key: str) -> None:
    assert find(key).key == "6" and find("Hunt").file == "hunt"


def test_hints_come_one_after_the_other(mine: Path, capsys: pytest.CaptureFixture) -> None:
    commands.start()
    capsys.readouterr()
    told = []
    for _ in range(4):
        commands.hint(find("6"), None)
        told.append(capsys.readouterr().out)
    assert len(set(told[:3])) == 3, "three levels"
    assert told[3] != told[2] and told[2].splitlines()[-1] in told[3], "the last again, and said so"
    (mine / "hints.json").write_text("damaged")
    commands.hint(find("6"), None)
    assert capsys.readouterr().out == told[0]


def test_every_exercise_has_three_hints() -> None:
    for exercise in EXERCISES.values():
        text = (COURSE / "hints" / f"{exercise.file}.md").read_text("utf-8")
        assert re.findall(r"^## (\d)$", text, re.MULTILINE) == ["1", "2", "3"], exercise.file


def test_submit_packs_the_exercises_alone(mine: Path) -> None:
    commands.start()
    (mine / "diary.txt").write_text("not for the lecturer")
    commands.submit()
    with zipfile.ZipFile(mine / "submission.zip") as packed:
        assert set(packed.namelist()) == {f"{each.file}.py" for each in EXERCISES.values()}


def test_submit_says_how_far_a_student_is(mine: Path, capsys: pytest.CaptureFixture) -> None:
    commands.start()
    (mine / "e09.py").write_bytes((COURSE / "reference.py").read_bytes())
    (mine / "e10.py").write_text("starts = None\n")
    for key in ("9", "10"):
        commands.check(find(key), 1)
    (mine / "predictions.json").write_text('{"3.1": {}, "10.2": {}}')
    capsys.readouterr()
    commands.submit()
    told = capsys.readouterr().out.splitlines()
    assert told[1:3] == ["passed when last checked: E9", "not passed yet: E10"]
    assert told[3] == "not written yet: E1 E2 E3 E4 E5 E6 E7 E8 E11 E12 E13 Hunt Final"
    assert told[4] == "predictions: lessons 3, 10"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: pass", ("Your code has run", "does a loop never end? (line 2 of e01.py)")),
        ("rows + 1", ("Your function returned None: is `return` missing?",)),
        ("return rows + 'a'", ("Your code raised an error.", "TypeError", "(line 2 of e01.py)")),
        ("return rows + 'a'", ("rows = 1, cached = 0, model = llama-13b, gpu = a6000\n",)),
        ("return 0.0", ("F1 fails", "  1 row, 0 cached tokens")),
    ],
)
def test_a_check_says_what_kind_of_failure_it_is(body: str, words: tuple[str, ...]) -> None:
    """In another process: a loop without end runs on until its process ends."""
    answer = f"def iteration_floor(rows, cached, model, gpu):\n    {body}\n"
    code = (
        "import course.local as local, course.exercises as e, course.check.frame as frame\n"
        "local.LONGEST, e1 = 0.3, e.find('1')\n"
        f"ask = local.asker(e1, e.load({answer!r}, 'e01.py'))\n"
        "print('\\n'.join(frame.lines(e1, frame.examine(e1, ask, 1))))\n"
    )
    done = warm.run("-c", code)
    assert all(each in done.stdout for each in words), done.stdout


@pytest.mark.parametrize(
    ("key", "body", "words"),
    [
        ("6", "return [next_chunk(request, max(0, room))] if request else []",
         ["The batch is full. Without room"]),
        ("6", "return next_chunk(request, max(0, room)) if request else []",
         ["TypeError", "which takes what your code has returned", "output tokens): 1 + "]),
        ("8", "self.waiting.rotate(-1)", ["left end of self.waiting"]),
        ("8", "return None", ["Does `preempt` return the request?"]),
    ],
)  # fmt: skip
def test_a_check_names_the_cause(key: str, body: str, words: list[str]) -> None:
    name = {"6": "Sarathi", "8": "SarathiServe"}[key]
    source = f"from scheduler import {name} as Right, next_chunk\n\n\nclass {name}(Right):\n"
    if key == "6":
        source += "    def prefills(self, rows):\n        room = self.chunk_size - rows\n"
        source += f"        request = next(self.started_then_new(), None)\n        {body}\n"
    else:
        source += (
            "    def preempt(self, request=None):\n        request = super().preempt(request)\n"
        )
        source += f"        {body}\n        return request\n"
    file = f"{find(key).file}.py"
    told = lines(find(key), examine(find(key), asker(find(key), load(source, file)), 1))
    assert all(any(each in line for line in told) for each in words), told


def test_predictions_are_kept_before_the_lesson_answers(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(predictions, "MINE", mine)
    for lesson, path in enumerate(predictions.LESSONS, 1):
        assert path.name.startswith(f"{lesson:02d}_")
        found = predictions.questions(lesson)
        assert len(found) == path.read_text("utf-8").count("Predict first") >= 3
        assert all(5 < len(text) < 600 and "#" not in text for text in found), lesson
    answers = iter(["a tenth", "", "as long"])
    assert predictions.predict(1, lambda prompt: next(answers, "later")) >= 3
    kept = json.loads((mine / "predictions.json").read_text("utf-8"))
    assert kept["1.1"]["answer"] == "a tenth" and "1.2" not in kept
    asked = []
    predictions.predict(1, lambda prompt: asked.append(prompt) or "again")
    assert len(asked) == 1, "only what has no answer is asked"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", None)
    assert predictions.predict(2) == 0 and "nobody answers" in capsys.readouterr().out
    with pytest.raises(UserError, match="lesson is 99"):
        predictions.questions(99)
    (mine / "predictions.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        predictions.predict(1)


def test_a_check_tells_a_file_that_does_not_load(mine: Path) -> None:
    mine.mkdir()
    with pytest.raises(UserError, match="python -m course start"):
        commands.check(find("9"), 1)
    (mine / "e09.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UserError, match=r"SyntaxError.*\(line 2 of e09.py\)"):
        commands.check(find("9"), 1)
    (mine / "e09.py").write_bytes(b"x = '\xe9'\n")
    with pytest.raises(UserError, match="UnicodeDecodeError"):
        commands.check(find("9"), 1)
    right = (COURSE / "reference.py").read_text("utf-8")
    (mine / "e09.py").write_bytes(b"\xef\xbb\xbf" + right.replace("\n", "\r\n").encode())
    assert commands.check(find("9"), 1), "an editor of Windows"
    (mine / "e09.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UserError, match="SystemExit"):
        commands.check(find("9"), 1)


@pytest.mark.slow
def test_no_torch_for_exercises_1_and_6_to_13() -> None:
    """In a fresh interpreter: references and checks of all that says it needs none."""
    code = (
        "import sys\nfrom course import __main__, grade, selftest\n"
        "from course.check.frame import examine\nfrom course.exercises import EXERCISES\n"
        "from course.local import asker\nfrom course.reference import solution\n"
        "for each in EXERCISES.values():\n"
        "    if not each.torch:\n"
        "        assert not examine(each, asker(each, solution(each.file)), 5).failure, each.key\n"
        "print('torch' in sys.modules, sum(not each.torch for each in EXERCISES.values()))\n"
    )
    done = warm.fresh("-c", code)
    assert done.stdout.split() == ["False", "11"], done.stderr


@pytest.mark.parametrize(
    "key", ["3", "5", "8", "10", "11", "12", "13", pytest.param("hunt", marks=pytest.mark.slow)]
)
def test_a_picture_shows_both(key: str, tmp_path: Path) -> None:
    """By matplotlib, and as SVG with the same words."""
    from course.paint import figure_of

    exercise = find(key)
    plant = next(plant for plant in plants() if plant.exercise == key)
    shown = picture(exercise, plant.load())
    assert [panel.title for panel in shown] == ["what it should be", "yours"]
    figure = figure_of("<both>", shown)
    assert [axes.get_title() for axes in figure.axes] == [panel.title for panel in shown]
    path = tmp_path / "picture.png"
    figure.savefig(path, dpi=40)
    assert path.stat().st_size > 3000
    for panel in shown:
        drawn = ElementTree.fromstring(svg(panel))
        words = {
            "".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")
        }
        wanted = {panel.title, panel.y_label, *panel.x_label.split("\n"), *panel.key}
        wanted |= {row for each in panel.shapes if isinstance(each, Words)
                   for row in str(each.text).split("\n")}  # fmt: skip
        assert words >= wanted - {""}
    broken = load("def chunk_mask(start, length):\n    return 5\n", "e03.py")
    with pytest.raises(UserError, match="no picture"):
        picture(find("3"), broken)


def test_the_failing_case_is_drawn_if_it_fits() -> None:
    code = named("1").source
    told = json.loads(in_browser(json.dumps({"call": "check", "exercise": "6", "code": code}), int))
    assert told["draw"] and told["case"]["C"] == 4
    question = {"call": "picture", "exercise": "6", "code": code, "case": told["case"]}
    shown = json.loads(in_browser(json.dumps(question), int))
    assert "C = 4" in shown["svg"][1] and shown["words"] == "The smallest case that was found."
    question["case"]["requests"] *= 100
    shown = json.loads(in_browser(json.dumps(question), int))
    assert "C = 16" in shown["svg"][1] and shown["words"] == "A case that is always the same."


def test_a_chunk_of_no_tokens_is_seen() -> None:
    """Its bar has no height: without a mark, both pictures look the same."""
    code = (
        "from scheduler import IterationLevel, next_chunk\n"
        "class Sarathi(IterationLevel):\n"
        "    name = 'sarathi'\n"
        "    def prefills(self, rows):\n"
        "        request = next(iter(self.started()), None) or self.admit()\n"
        "        return [next_chunk(request, self.chunk_size - rows)] if request else []\n"
    )
    told = json.loads(in_browser(json.dumps({"call": "check", "exercise": "6", "code": code}), int))
    question = {"call": "picture", "exercise": "6", "code": code, "case": told["case"]}
    shown = json.loads(in_browser(json.dumps(question), int))
    right, own = shown["svg"]
    assert told["case"] and "no tokens" in own and "no tokens" not in right


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"call": "check", "exercise": "6", "code": "def"}, "e06.py cannot be loaded: SyntaxError"),
        ({"call": "check", "exercise": "14", "code": ""}, "unknown exercise '14'"),
        ({"call": "own"}, "unknown call 'own'"),
        ({"call": "unpack", "zip": "UEsDBA=="}, "this zip cannot be read"),
        ({"call": "unpack", "zip": zipped("e01.py", b"\xff")}, "a file of this zip is no text"),
        ({"call": "unpack", "zip": zipped("diary.txt", b"")}, "this zip has none of e01.py"),
        ({"call": "unpack", "zip": zipped("__MACOSX/e01.py", b"")}, "this zip has none of e01.py"),
        ({"call": "unpack", "zip": zipped("e01.py", b"0" * 9_000_000)}, "e01.py cannot be read: a"),
        ({"call": "unpack", "zip": zipped("e01.py", b"", zipfile.ZIP_LZMA)}, "e01.py cannot be re"),
        ({"call": "unpack", "zip": FAR}, "e01.py cannot be read: "),
        ({"call": "pack", "files": {"e01.py": "0" * 65537}}, "e01.py is above 64 kB"),
    ],
)
def test_the_page_gets_one_sentence_for_a_mistake(question: dict, words: str) -> None:
    said = json.loads(in_browser(json.dumps(question), int))
    assert said["error"].startswith(words) and "\n" not in said["error"]


def test_the_page_has_all_that_its_python_reads(tmp_path: Path) -> None:
    """Without any package, from the written folder alone: a right answer and a picture."""
    written = page.write(tmp_path / "site", npm=tmp_path)
    manifest = json.loads((tmp_path / "site" / "manifest.json").read_text("utf-8"))
    assert {*manifest["book"]} == {name[5:] for name in written if name.startswith("book/")}
    assert [each["name"] for each in manifest["exercises"] if each["torch"]] == [
        "E2", "E3", "E4", "E5",
    ]  # fmt: skip
    assert page.EDITOR not in written and not manifest["editor"]
    code = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path / 'site' / 'book')!r})\n"
        "from course.browser import in_browser\n"
        "for key in ('1', '7', '12', 'hunt'):\n"
        "    question = {'exercise': key, 'code': 'from course.reference import *\\n'}\n"
        "    for call in ('check', 'picture'):\n"
        "        print(in_browser(json.dumps(question | {'call': call}), print)[:50])\n"
    )
    done = warm.fresh("-I", "-S", "-B", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('{"passed": true') == done.stdout.count('{"svg": ["<svg') == 4


def test_a_stub_is_not_written_yet_in_a_check_and_in_a_picture(
    mine: Path, capsys: pytest.CaptureFixture
) -> None:
    commands.start()
    capsys.readouterr()
    assert not commands.check(find("6"), 1)
    said = capsys.readouterr().out.strip()
    assert said == "E6 SARATHI's chunk: not written yet (NotImplementedError)"
    with pytest.raises(UserError) as caught:
        commands.draw(find("6"), force=False)
    assert str(caught.value) == said


def test_the_deck_has_each_picture_with_the_lectures_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pptx import Presentation

    from course import slides

    def draw() -> plt.Figure:
        return plt.figure()

    drawn = [replace(slide, draw=draw) for slide in slides.SLIDES]
    monkeypatch.setattr(slides, "SLIDES", drawn)
    slides.slides(tmp_path, force=False)
    pages = list(Presentation(tmp_path / slides.DECK).slides)
    assert [page.shapes.title.text for page in pages] == [slide.caption for slide in drawn]
    assert all(len(page.shapes) == 2 for page in pages), "a title and a picture"
    said = [page.notes_slide.notes_text_frame.text for page in pages]
    lecture = " ".join((COURSE / "instructor" / "lecture90.md").read_text("utf-8").split())
    assert all(re.sub(r"\s+", " ", text)[-60:] in lecture for text in said), "no copy elsewhere"
    asked = ["Ask first" in text for text in said]
    minutes = [slide.when for slide in drawn]
    first = [
        when.startswith("minute") and when not in minutes[:i] for i, when in enumerate(minutes)
    ]
    assert asked == first
    head = (tmp_path / f"{drawn[0].name}.png").read_bytes()[:24]
    assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1920, 1080)
    with pytest.raises(UserError, match="lecture.pptx"):  # a lecturer may have changed it
        slides.slides(tmp_path, force=False)
    slides.slides(tmp_path, force=True)


# ---------------------------------------------------------------------------- the doctor


def test_the_doctor_runs_on_an_old_python_without_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__init__.py", "__main__.py", "doctor.py"):
        ast.parse((COURSE / name).read_text("utf-8"), feature_version=(3, 8))
    done = subprocess.run(
        [sys.executable, "-S", "-m", "course", "doctor"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert (
        "MISSING numpy (not there), " in done.stdout and "note    no torch. E2 to E5" in done.stdout
    )
    assert "ok      Python 3" in done.stdout
    monkeypatch.setattr(doctor.sys, "version_info", (3, 8, 10, "final", 0))
    state, said = doctor.python()
    assert state == doctor.MISSING and "install a 64-bit Python 3.11 or newer" in said


# ------------------------------------------------------------- the self-test finds what is wrong


def only(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr(selftest, "EXERCISES", {key: EXERCISES[key]})


def test_there_are_at_least_thirty_mistakes_and_every_exercise_has_some() -> None:
    found = plants()
    assert len(found) >= 30 and {plant.exercise for plant in found} == set(EXERCISES)
    assert {plant.name[1:3] for plant in found} >= {f"{number:02d}" for number in range(1, 31)}
    for plant in found:
        known = {ANSWER, *EXERCISES[plant.exercise].check.PROPERTIES}
        assert plant.caught_by in known, plant.name


def test_a_mistake_that_is_caught_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "9")
    assert selftest.selftest() == []
    plant = named("27a")
    elsewhere = {"caught_by": "T2"}, {"message": "no such words"}, {"change": ()}  # right, at last
    for fields in elsewhere:
        monkeypatch.setattr(selftest, "plants", lambda fields=fields: [replace(plant, **fields)])
        assert len(selftest.selftest()) == 1, fields
    misfit = replace(plant, change=[["times.tokens", "times.token"]])
    with pytest.raises(
        UserError, match="planted.toml, p27a: 'times.tokens' stands there 4 times, and must once"
    ):
        misfit.load()


def test_a_stub_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only(monkeypatch, "9")
    monkeypatch.setattr(selftest, "STUBS", tmp_path)
    text = (COURSE / "stubs" / "e09.py").read_text("utf-8")
    (tmp_path / "e09.py").write_text(text.replace("bound: float", "limit: float"))
    assert ["stalls" in line for line in selftest.selftest()] == [True]
    (tmp_path / "e09.py").write_text((COURSE / "reference.py").read_text("utf-8"))
    assert any("does not fail as a stub" in line for line in selftest.selftest())


def test_a_wrong_reference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "9")
    monkeypatch.setattr(selftest, "solution", lambda file: named("27c").load())
    assert selftest.selftest()[0] == "e09: the reference fails"


def test_a_student_reads_expected_got_and_a_sentence() -> None:
    exercise = find("6")
    verdict = examine(exercise, asker(exercise, named("1").load()), 1)
    told = "\n".join(lines(exercise, verdict))
    assert f"```text\n{told}\n```" in (COURSE / "README.md").read_text("utf-8")
    assert verdict.failure.prop == "K1" and all(len(line) <= 110 for line in told.splitlines())
    for words in ("K1 fails", "the smallest case", "expected  at most C", "got  ", "C counts"):
        assert words in told


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key == "hunt" else ()) for key in EXERCISES]
)
def test_an_answer_of_another_form_fails_and_raises_nothing(key: str) -> None:
    """What a worker may say instead of an answer."""
    check = EXERCISES[key].check
    case = check.cases(random.Random(3))[0]
    for answer in (None, [], {}, "x", 10**400, float("nan"), [[[]]], {"rows": [{}]}, True, -1):
        if judged(check.judge, case, answer) is None:
            assert key == "7" and answer is None, f"{key} takes {answer!r}"


def test_every_mistake_of_the_hunt_can_be_found() -> None:
    """Whatever the seed is: 4 is one that once showed a mistake in fewer runs."""
    tags = Counter(hunt.cases(random.Random(4))[0]["_tags"])
    assert set(hunt.mistakes()) == tags.keys() - {hunt.REFERENCE}
    assert min(tags.values()) >= hunt.FEWEST and tags[hunt.REFERENCE] > tags.total() / 2


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"a": [1, NaN]}', "[" * 9999, "x"])
def test_an_answer_has_no_number_that_is_none(text: str) -> None:
    with pytest.raises(AnswerError):
        read_answer(text)


def test_answers_are_compared_part_by_part() -> None:
    nan = float("nan")
    assert same({"a": [1, 2.0, None]}, {"a": [1, 2.0 + 1e-12, None]}, 1e-9) and same(2.0, 2)
    for wanted, got in (
        (1.0, nan), (1.0, True), (1, True), (1, 1.0), (0, None), ([1, 2], [2, 1]), ([1], [1, 1]),
        ([1], "1"), ({"a": 1}, {"a": 1, "b": 2}), (1.0, "1.0"), (1.0, 1.0 + 1e-6), ("1", 1),
    ):  # fmt: skip
        assert not same(wanted, got, 1e-9), (wanted, got)


# ------------------------------------------------------------------------ submissions that attack

PATCHES = """import course.exercises, json, sys
    for name in list(sys.modules):
        if hasattr(sys.modules[name], 'judge'): sys.modules[name].judge = lambda *a: None
    json.dumps = lambda *a, **k: '{"answer": "passed"}'
    return 0.0"""
BABBLES = """import os
    for number in range(30):
        try: os.write(number, b'[' * 9999 + bytes([10]))
        except OSError: pass"""
FORGES = """import os
    for number in range(30):
        try: os.write(number, b'0 {"answer": 0.0}' + bytes([10]))
        except OSError: pass
    return 1.0"""
# It says the right answer itself, and more.
FRAMES = """import json, os
    said = json.dumps({"answer": right(rows, cached, model, gpu)}).encode() + bytes([10])
    for number in range(3, 40):
        try: os.write(number, DATA)
        except OSError: pass"""
FLOODS = """import os
    for number in range(3, 30):
        try:
            while True: os.write(number, b'x' * 9999)
        except OSError: pass"""
ATTACKS: dict[str, tuple[str, str]] = {
    # name: (the protection that it needs, or "", what iteration_floor does before its right answer)
    "exits": ("", "raise SystemExit(0)"),
    "leaves": ("", "import os; os._exit(0)"),
    "hangs": ("", "while True: pass"),
    "sleeps": ("", "import time; time.sleep(10**6)"),
    "recurses": ("", "return iteration_floor(rows, cached, model, gpu)"),
    "eats": ("memory", "x = [bytearray(1 << 28) for _ in range(40)]"),
    "forks": ("processes", "import os\n    if os.fork() == 0: os._exit(0)"),
    "bombs": ("processes", "import os\n    while True: os.fork()"),
    "starts": ("processes", "import subprocess; subprocess.run(['/bin/true'], check=True)"),
    "reads": ("files", "open(SECRET).read()"),
    "lists": ("files", "import os; os.listdir(FOLDER)"),
    "project": ("files", "open(PROJECT).read()"),
    "writes": ("files", "open(SECRET, 'a').write('x')"),
    "home": ("files", "open(TRACE, 'w').write('x')"),
    "kills": ("signals", "import os; os.kill(PARENT, 0)"),
    "calls": ("network", "import socket; socket.create_connection(('127.0.0.1', PORT), 1)"),
    "patches": ("", PATCHES),
    "babbles": ("", BABBLES),
    "floods": ("", FLOODS),
    "forges": ("", FORGES),
    "says more": ("", FRAMES.replace("DATA", "said + b'boom boom' + bytes([10])")),
    "says no time": ("", FRAMES.replace("DATA", "said + b'nan ' + said")),
    "says twice": ("", FRAMES.replace("DATA", "said")),
    "says half": ("", FRAMES.replace("DATA", "said[:9]")),
    "says late": ("", FRAMES.replace("DATA", "b'boom' + bytes([10]) + said")),
    "says megabytes": ("", FRAMES.replace("DATA", "said + bytes(9 << 20)")),
    "lies": ("", "return float('nan')"),
}  # fmt: skip


def attack(body: str, **names: object) -> str:
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    arguments = "rows, cached, model, gpu"
    function = f"def iteration_floor({arguments}):\n    {body}\n    return right({arguments})\n"
    return head + RIGHT + function


@pytest.mark.slow
@POSIX
def test_attacks_earn_nothing_and_harm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder, secret, homes = tmp_path / "handed in", tmp_path / "secret.py", tmp_path / "homes"
    folder.mkdir()
    homes.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(homes))
    monkeypatch.setattr(grade, "CASE", 1.0)  # who hangs or sleeps has no more
    monkeypatch.setattr(grade, "PATIENCE", 5)
    trace = Path("/tmp") / f"left-{os.getpid()}-{tmp_path.name}"
    secret.write_text(attack("pass"))  # whoever gets hold of it passes
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "SECRET": str(secret), "FOLDER": str(tmp_path), "PARENT": os.getpid(),
            "PROJECT": str(ROOT / "scheduler.py"), "PORT": server.getsockname()[1],
            "TRACE": str(trace),
        }  # fmt: skip
        for name, (_, body) in ATTACKS.items():
            (folder / name).mkdir()
            (folder / name / "e01.py").write_text(attack(body, **names))
        for name in ("good", "link", "pipe", "latin"):
            (folder / name).mkdir()
        (folder / "good" / "e01.py").write_text(attack("pass"))
        (folder / "good" / "e09.py").write_text("import os; os._exit(3)")
        (folder / "good" / "e10.py").write_text(
            named("28a").source.replace("late = 0.0", "late = s")
        )
        (folder / "link" / "e01.py").symlink_to(secret)
        os.mkfifo(folder / "pipe" / "e01.py")
        (folder / "latin" / "e01.py").write_bytes(b"# \xe9\n" + attack("pass").encode())
        (folder / "elsewhere").symlink_to(tmp_path)
        with zipfile.ZipFile(folder / "rare.zip", "w", zipfile.ZIP_LZMA) as packed:
            packed.writestr("e01.py", attack("pass"))
        with zipfile.ZipFile(folder / "zipped.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("e01.py", attack("pass"))
        data = bytearray((folder / "zipped.zip").read_bytes())
        data[45:60] = bytes(15)
        (folder / "torn.zip").write_bytes(data)
        out = tmp_path / "grades.csv"
        grades = {each.name: each for each in grade.grade(folder, out, 1, 4, None, False)}
    held = grades["good"].held
    for name, (needs, _) in ATTACKS.items():
        if not needs or needs in held:
            # an answer that is said twice may count for the next case, too: so any property
            lost = ("answer", "time", *find("1").check.PROPERTIES)
            assert grades[name].results["1"] in lost, name
    good = grades["good"].results
    assert good["1"] == "passed" and good["9"] == "answer" and good["10"] == "answer"
    assert good["6"] == "-"
    assert grades["zipped.zip"].results["1"] == "passed"
    for name in ("link", "pipe", "latin", "rare.zip", "torn.zip"):  # classroom.py has others
        assert grades[name].results["1"] == "refused", name
    assert "elsewhere" not in grades, "a link to a folder is left alone"
    assert secret.read_text() == attack("pass")
    assert not list(homes.iterdir())
    assert "files" not in held or not trace.exists()
    head, *rows = csv.reader(out.read_text().splitlines())
    assert head[:3] == ["submission", "1", "2"] and len(rows) == len(grades)
    assert {row[-2] for row in rows} == {"1"}, "the seed"
    [first] = {row[-1] for row in rows}
    assert first.startswith("graded without a container")
    assert capsys.readouterr().out.startswith(first)
    for each in PROTECTIONS:
        assert each in first.partition("NOT PROTECTED")[0] or each in first.partition("NOT")[2]
    with pytest.raises(UserError, match="grades.csv. is there already"):
        grade.grade(folder, out, 1, 2, None, False)


LINUX = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
# It cannot be talked to, and nothing that runs in its process can end it. Where it may start
# processes, it hides some: TRACE, if it can be written, says which.
HIDES = """import ctypes, os, signal
def iteration_floor(*_):
    for number in range(1, 32):
        try: signal.signal(number, signal.SIG_IGN)
        except OSError: pass
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    for _ in range(2):
        try:
            if os.fork() == 0:
                os.setsid()
                if os.fork(): os._exit(0)
                break
        except OSError: pass
    try:
        with open(TRACE, 'a') as file: file.write(f'{os.getpid()} ')
    except OSError: pass
    ctypes.PyDLL(None).sleep(100000)
"""


def test_the_folder_of_a_grader_that_was_killed_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = pytest.importorskip("fcntl").LOCK_NB
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, living, other = (
        tmp_path / name for name in (f"{grade.FOLDER}1", f"{grade.FOLDER}2", "x")
    )
    for folder in (dead, living, other):
        (folder / "home").mkdir(parents=True)
    lock = grade.locked(living)
    assert lock is not None and grade.locked(living, now) is None
    with grade.workplace() as place:
        assert (
            set(tmp_path.iterdir()) == {living, other, place} and grade.locked(place, now) is None
        )
    assert set(tmp_path.iterdir()) == {living, other}
    os.close(lock)
    (tmp_path / f"{grade.FOLDER}link").symlink_to(other)
    with grade.workplace() as place:
        assert not living.exists() and (other / "home").exists()


@POSIX
def test_signals_are_an_exit_unless_they_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup ignores SIGHUP: then a terminal that closes does not end grading."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught, grade.ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def ask_line(case: dict) -> bytes:
    return b"9 " + json.dumps({"file": "e01", "case": case}).encode() + b"\n"


def setup_line(source: str) -> bytes:
    setup = {"files": {"e01": source}, "torch": False, "memory": 1 << 30, "seconds": 60}
    return b"9 " + json.dumps(setup).encode() + b"\n"


E1 = {key: each for key, each in find("1").check.cases(random.Random(1))[0].items() if key != "_"}


@LINUX
@pytest.mark.parametrize("asked", [False, True])
def test_what_a_submission_hides_ends_with_its_worker(tmp_path: Path, asked: bool) -> None:
    """Without any fence: it starts processes in sessions of their own, and they hear of nothing."""
    code = "import course.worker as w\nw.isolate, w.fence = list, lambda *_: []\nw.main()\n"
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    trace = tmp_path / "trace"
    worker.stdin.write(setup_line(f"TRACE = {str(trace)!r}\n{HIDES}") + ask_line(E1))
    worker.stdin.flush()
    wait_for(lambda: trace.exists() and len(trace.read_text().split()) == 3)
    hidden = [int(pid) for pid in trace.read_text().split()]
    assert all(map(alive, hidden))
    worker.terminate() if asked else worker.stdin.close()
    worker.wait(100)
    assert not any(map(alive, hidden))
    worker.stdout.close()


needs_processor_clock = pytest.mark.skipif(
    processor_clock(os.getpid()) is time.monotonic, reason="another process's clock is not told"
)


@LINUX
@needs_processor_clock
def test_a_machine_that_is_busy_changes_no_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that gets no processor for longer than its time keeps its time; one that uses
    the processor does not."""
    monkeypatch.setattr(grade, "PATIENCE", 1000)
    loops = "def iteration_floor(rows, *_):\n    while rows < 2: pass\n    return 1.0\n"
    worker = grade.Worker({"e01": loops}, [], threading.Event(), tmp_path)
    answers = {"file": "e01", "case": E1 | {"rows": 2}}
    try:
        [student] = children_of(worker.process.pid)
        assert worker.exchange(answers, grade.CASE) == {"answer": 1.0}
        os.kill(student, signal.SIGSTOP)
        timer = threading.Timer(0.5, os.kill, (student, signal.SIGCONT))
        timer.start()
        assert worker.exchange(answers, 0.2) == {"answer": 1.0}
        with pytest.raises(AnswerError, match="no answer in time"):
            worker.exchange({"file": "e01", "case": E1}, 0.2)
    finally:
        worker.close()
    assert not alive(student) and not list(tmp_path.iterdir())


@LINUX
@needs_processor_clock
def test_all_seconds_of_the_processor_are_charged(tmp_path: Path) -> None:
    """The student's code measures itself: no answer is too short to be counted."""
    measures = (
        "import time\ndef iteration_floor(*_):\n    began = time.process_time()\n"
        "    while (took := time.process_time() - began) < 0.03: pass\n    return took\n"
    )
    worker = grade.Worker({"e01": measures}, [], threading.Event(), tmp_path)
    try:
        asked = [worker.exchange({"file": "e01", "case": E1}, grade.CASE) for _ in range(5)]
    finally:
        worker.close()
    assert worker.spent >= sum(said["answer"] for said in asked) - 1e-6


def test_where_the_processors_clock_is_refused_the_wall_clock_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(clock: int) -> float:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(time, "clock_gettime", refused, raising=False)
    assert processor_clock(os.getpid()) is time.monotonic


@POSIX
def test_a_line_that_is_forged_is_no_answer_and_hides_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a worker whose student's code can write to the grader's pipe itself."""
    forged = ("nan", "inf", "-1", "boom", "", "-", "9" * 400, "\xff")
    python = tmp_path / "python"
    lines = "".join(f"echo '{head} {{\"answer\": 1.0}}'\n" for head in forged)
    started, right = "echo '0 {\"held\": []}'", "echo '0.25 {\"answer\": 1.0}'"
    python.write_text(f"#!/bin/sh\n{started}\n{lines}{right}\nexec cat >/dev/null\n", "utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    worker = grade.Worker({}, [], threading.Event(), tmp_path)
    try:
        for head in forged:
            with pytest.raises(AnswerError, match="no answer"):
                worker.exchange({}, 1.0)
            assert 0 <= worker.spent < float("inf"), head
        before = worker.spent
        assert worker.exchange({}, 1.0) == {"answer": 1.0} and worker.spent >= before + 0.25
    finally:
        worker.close()


def test_a_question_to_a_worker_that_has_gone_leaves_nothing_to_write(tmp_path: Path) -> None:
    """What a pipe still holds is written when it is collected: else a traceback comes then."""
    worker = grade.Worker({}, [], threading.Event(), tmp_path)
    worker.close()
    with pytest.raises(AnswerError):
        worker.exchange({}, 1.0)
    assert worker.process.stdin.closed


@POSIX
def test_a_worker_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho a traceback >&2\necho the reason >&2\necho >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"^a worker did not start: the reason \(.*worker\)$"):
        grade.Worker({}, [], threading.Event(), tmp_path)


def test_the_first_line_says_what_is_not_protected() -> None:
    def line(*held: list[str]) -> str:
        return grade.protection([Grade(Submission("a"), held=each) for each in held], [])

    assert "NOT PROTECTED: memory, processes, files, network, signals" in line([])
    assert line(list(PROTECTIONS)).endswith("are protected") and "NOT" not in line(
        list(PROTECTIONS)
    )
    assert line(list(PROTECTIONS), ["memory"]).endswith(
        "NOT PROTECTED: processes, files, network, signals"
    )


def test_names_cannot_run_in_a_spreadsheet_or_a_terminal() -> None:
    assert harmless("=1+1") == "'=1+1" and harmless("\x1b[2J") == "\\x1b[2J"
    assert len(harmless("x" * 999)) == 60 and harmless("Zoë") == "Zoë"


def test_two_students_never_become_one_name() -> None:
    """Long names, and what a terminal obeys or a spreadsheet computes."""
    long = "Ana Maria " * 9
    names = [f"{long}{number}{long}" for number in (1234567, 1234568)]
    names += ["a\x1bb", "a\x1cb", "a?b", "=1", "'=1", "山田\u3000太郎", "\udcff", "\udcfe"]
    grades = [Grade(Submission(name), {"e01": "-"}) for name in names]
    rows = list(csv.DictReader(StringIO(grade.table(grades, {"e01": 1.0}, 0, "x"))))
    told = [row["submission"] for row in rows]
    assert len(set(told)) == len({row["page"] for row in rows}) == len(names)
    assert told[:2] == names[:2] and told[-3] == names[-3] and told[-1] == "\\udcfe"
    said = [Submission("a", predictions={"q": "x" * 300 + end}) for end in ("", "y")]
    page = predicted([Grade(each) for each in said], {"q": ("1.1", Outcome("q", "", "", ""))})
    assert page.count("<td>1</td>") == 2


@POSIX
def test_a_container_gets_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A stand-in for docker: it writes down its arguments, and runs what follows the image."""
    log, engine, program = (tmp_path / name for name in ("log", "docker", "docker.py"))
    words = shlex.join([sys.executable, str(program)])  # no first line of a script holds a space
    engine.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.write_text(
        "import os, sys, json\n"
        f"open({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
        "if sys.argv[1] == 'run':\n"
        "    place = sys.argv.index('an-image') + 2\n"
        f"    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[place:]])\n"
        "sys.exit(sys.argv[1] == 'image' and sys.argv[3] != 'an-image')\n"
    )
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "all"
    (folder / "anna").mkdir(parents=True)
    (folder / "anna" / "e01.py").write_text(attack("pass"))
    [found] = grade.grade(folder, tmp_path / "out.csv", 1, 1, "an-image", False)
    assert found.results["1"] == "passed"
    assert capsys.readouterr().out.startswith("graded in a container (docker): time, memory")
    asked, started, ended = map(json.loads, log.read_text().splitlines())
    assert asked == ["image", "inspect", "an-image"] and ended[0] == "kill"
    for flag in ("--network=none", "--read-only", "--cap-drop=ALL", "--user=65534:65534"):
        assert flag in started
    assert f"--name={ended[1]}" in started
    assert not any(each.startswith(("-v", "--volume", "--mount")) for each in started)
    with pytest.raises(UserError, match="no image 'another'"):
        grade.container_of("another")


# The project is forgotten: where torch is there already, it is, too.
RECIPE = """
import pathlib, sys
project = {each for each in sys.path if (pathlib.Path(each) / "scheduler.py").exists()}
ours = {path.stem for each in project for path in pathlib.Path(each).iterdir()}
for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
    del sys.modules[name]
sys.path[:] = [sys.argv[1], *(each for each in sys.path if each not in project)]
from course import worker, drive, local
for name in worker.OPEN + worker.WITH_TORCH:
    worker.import_module(name)
print(drive.__file__.startswith(sys.argv[1]), len(drive.DRIVERS))
"""


def test_the_images_recipe_has_all_that_a_worker_needs(tmp_path: Path) -> None:
    """The files that it copies are enough, without the project behind them."""
    text = (COURSE / "instructor" / "Dockerfile").read_text("utf-8")
    for sources, place in re.findall(r"^COPY (.*) (\S+)$", text, re.MULTILINE):
        (tmp_path / place).mkdir(exist_ok=True)
        for name in sources.split():
            (tmp_path / place / Path(name).name).write_bytes((ROOT / name).read_bytes())
    done = warm.run("-c", RECIPE, tmp_path, cwd=tmp_path)
    assert done.stdout.split() == ["True", "15"], done.stderr
    assert "\nUSER 65534:65534\n" in text


def test_the_lectures_schedule_is_sarathis() -> None:
    """The four requests on paper."""
    prompts, outputs = (40, 90, 20, 30), (4, 3, 6, 2)
    requests = [
        [[0] * prompt, most, [], 0.0] for prompt, most in zip(prompts, outputs, strict=True)
    ]
    record = serve(Sarathi, {"B": 4, "C": 64, "cache": None, "requests": requests})
    text = (COURSE / "instructor" / "lecture90.md").read_text("utf-8")
    shown = re.findall(r"^\| (\d) \| (.+) \| (.+) \| (\d+) \| (.+) \|$", text, re.MULTILINE)
    assert len(shown) >= 4
    for (_, chunk, decodes, rows, sampled), row in zip(shown, record["rows"], strict=False):
        [[i, start, length, whole]] = row["chunks"]
        assert chunk == f"request {i}, tokens {start}-{start + length - 1}"
        wanted = sorted(row["decodes"], reverse=True)
        assert decodes == (", ".join(map(str, wanted)) or "-")
        assert int(rows) == length + len(wanted)
        told = ([i] if start + length == whole else []) + wanted
        assert sampled == (", ".join(map(str, told)) or "-")


# ---------------------------------------------------------------------------------- the documents


def test_the_map_names_what_exists() -> None:
    text = (COURSE / "MAP.md").read_text("utf-8")
    rows = re.findall(r"^\| .+ \| `(.+)` \| `(.+)` \|$", text, re.MULTILINE)
    assert len(rows) == text.count("\n| ") - 1 >= 30
    for file, name in rows:
        body = ast.parse((ROOT / file).read_text("utf-8")).body
        for each in name.split("."):
            found = [node for node in body if getattr(node, "name", None) == each]
            assert found, f"MAP.md: {file} has no {name}"
            body = found[0].body


def test_the_readme_lists_all_exercises_and_properties() -> None:
    text = (COURSE / "README.md").read_text("utf-8")
    for exercise in EXERCISES.values():
        [row] = [line for line in text.splitlines() if line.startswith(f"| {exercise.name} |")]
        assert exercise.title in row and f" {exercise.lines} |" in row
        told = set(re.findall(r"\b[A-Z]\d+\b", row.partition(exercise.title)[2]))
        assert told == set(exercise.check.PROPERTIES), exercise.name


PARKS = """from batch import Batch
from scheduler import SarathiServe, next_chunk

class Mine(SarathiServe):
    touched = ()
    def schedule(self, now):
        for request in [r for r in self.running if PARKED(r)]:
            self.preempt(request)
        new = next((r for r in self.waiting if r.request_id not in self.touched), None)
        room = len(self.running) < self.max_batch_size
        if new and room and self.memory.capacity is None:
            self.waiting.remove(new)
            self.waiting.appendleft(new)
            self.touched = (*self.touched, new.request_id)
            decodes = self.decodes()
            return Batch([next_chunk(self.admit(), SIZE)], decodes)
        return super().schedule(now)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parked", "size"),
    [("r.prefilled == 1 < len(r.prompt)", 1), ("len(r.output) == 1 and not r.in_prefill", 500)],
)
def test_a_policy_that_parks_requests_scores_less(parked: str, size: int) -> None:
    """One starts all requests early, and one gives all their first tokens early; then they wait."""
    rng = random.Random(4)
    source = PARKS.replace("PARKED(r)", f"{parked} and self.waiting").replace("SIZE", str(size))
    ask = asker(EXERCISES["final"], load(source, "final.py"))
    score = final.score(ask, rng, {}, {})
    assert float(score.split()[0]) < 1, score


def test_a_score_needs_an_honest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from scheduler import SarathiServe\n\nclass Mine(SarathiServe):\n"
    source += "    def schedule(self, now):\n        for r in self.running:\n"
    source += (
        "            r.max_tokens = min(r.max_tokens, 30)\n        return super().schedule(now)\n"
    )
    exercise = EXERCISES["final"]
    verdict = examine(exercise, asker(exercise, load(source, "final.py")), 1)
    assert verdict.failure.prop == "K10" and verdict.failure.where == "a hidden workload"
    monkeypatch.setattr(final, "capacity_of", lambda ask, requests: float("inf"))
    assert final.score(None, random.Random(1), {}, {}).startswith("none: ")


@pytest.mark.slow
def test_tokens_alone_do_not_find_all_mistakes() -> None:
    """The README counts those that keep all tokens, and every slot comes back."""
    kept = 0
    for plant in plants():
        if plant.exercise in ("6", "8"):
            module = plant.load()
            make = module.Sarathi if plant.exercise == "6" else module.SarathiServe
            drawn = EXERCISES[plant.exercise].check.cases(random.Random(f"0 {plant.exercise}"))
            cases = [case for case in drawn if "preempt" not in case]
            rules = ("K0", "K6", "K7", "K8", "K10")
            kept += not any(judge_record(case, serve(make, case), rules) for case in cases)
    words = {10: "Ten", 11: "Eleven", 12: "Twelve", 13: "Thirteen", 14: "Fourteen"}
    assert f"{words[kept]} of the planted mistakes" in (COURSE / "README.md").read_text("utf-8")


def test_the_documents_name_commands_that_exist() -> None:
    named = [
        command
        for path in (ROOT / "course").rglob("*.md")
        for command in re.findall(r"python -m course (\w+)", path.read_text("utf-8"))
    ]
    assert len(named) > 5 and all(command in commands.__doc__ for command in named)


def test_every_lesson_ends_with_its_exercise() -> None:
    for exercise in EXERCISES.values():
        [lesson] = (ROOT / "notebooks").glob(f"{exercise.lesson:02d}_*.py")
        tail = lesson.read_text("utf-8").rpartition("# %% [markdown]")[2]
        assert f"python -m course check {exercise.key}" in tail, f"{lesson.name}: {exercise.name}"


def test_the_worked_example_of_a_block_table_is_what_the_solution_does() -> None:
    exercise = find("13")
    text = ast.get_docstring(ast.parse(selftest.stub_source(exercise)))
    shown = doctest.DocTestParser().get_examples(text)
    names = {"Blocks": selftest.solution(exercise.file).Blocks}
    test = doctest.DocTest(shown, names, exercise.file, None, None, None)
    assert len(shown) > 5 and doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_the_stubs_hold_no_solution() -> None:
    """Whatever a stub leaves to the student is a docstring and `raise`."""
    for exercise in EXERCISES.values():
        functions = unwritten(selftest.stub_source(exercise))
        assert functions, exercise.file
        for name, function in functions.items():
            docstring, end = function.body
            assert ast.get_docstring(function) and ast.unparse(end).endswith("Error"), name
            assert isinstance(docstring, ast.Expr)
