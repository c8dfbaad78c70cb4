"""The course: its commands, its checks, the page. Right answers pass, planted mistakes fail."""

import ast
import doctest
import json
import random
import re
import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import pytest
import torch

from batch import Batch
from command.checks import UserError
from command.cli import to_run
from course import __main__ as commands
from course import doctor, drive, exercises, page
from course import picture as painted
from course.browser import in_browser
from course.check import e04, e07, final, frame, hunt
from course.check.frame import Broken, examine, judged, lines, same
from course.exercises import EXERCISES, STUBS, UNWRITTEN, AnswerError, Exercise, find, hints, load
from course.local import asker
from course.picture import picture
from course.plants import named, plants, right, unwritten
from course.reference import solution
from course.sketch import Bar, Mark, Panel, alike, svg
from executor import ModelExecutor
from kvcache import KVCache
from more.pipeline.account import BUBBLES, PipelineTrace, Step
from more.pipeline.phases import share_out
from tests import spawn
from timeline import Life, Trace

ROOT = Path(__file__).parent.parent
COURSE = ROOT / "course"
SLOW = ("8", "13", "hunt", "final")  # their self-tests take seconds


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A student's folder, and not the one of whoever runs the tests."""
    folder = tmp_path / "mine"
    lessons = tmp_path / "notebooks"
    lessons.mkdir()
    for module in ("__main__", "local"):
        monkeypatch.setattr(f"course.{module}.MINE", folder)
    monkeypatch.setattr(commands, "NOTEBOOKS", lessons)
    return folder


def checked(exercise: Exercise, source: str) -> list[str]:
    ask = asker(exercise, load(source, f"{exercise.file}.py"))
    return lines(exercise, examine(exercise, ask, 1))


# ---------------------------------------------------------------------------------- the commands


def test_start_copies_all_stubs_and_overwrites_nothing(mine: Path) -> None:
    commands.start()
    names = {f"{exercise.file}.py" for exercise in EXERCISES.values()}
    assert {path.name for path in mine.iterdir()} == names and len(names) == 15
    copies = {f"my_{path.stem}.ipynb" for path in exercises.LESSONS}
    assert {path.name for path in (mine.parent / "notebooks").iterdir()} == copies
    copy = mine.parent / "notebooks" / "my_06_policies.ipynb"
    (mine / "e06.py").write_text("my work")
    copy.write_text("my predictions")
    (mine / "e07.py").unlink()
    commands.start()
    assert (mine / "e06.py").read_text() == "my work" and (mine / "e07.py").exists()
    assert copy.read_text() == "my predictions"


def test_a_copy_of_a_lesson_has_all_but_its_outputs(mine: Path) -> None:
    commands.start()
    for lesson in exercises.LESSONS:
        path = mine.parent / "notebooks" / f"my_{lesson.stem}.ipynb"
        ours, copy = (json.loads(each.read_text()) for each in (lesson.with_suffix(".ipynb"), path))
        assert [each["source"] for each in copy["cells"]] == [
            each["source"] for each in ours["cells"]
        ]
        assert not any(each.get("outputs") for each in copy["cells"])
        assert "outputs_hidden" not in path.read_text(), (
            "a reader who runs a cell sees what it says"
        )
        nbformat.validate(copy)


def test_a_mistake_is_planted_where_nobody_has_written(
    mine: Path, capsys: pytest.CaptureFixture
) -> None:
    commands.plant("1")  # no folder yet
    commands.start()
    for name, file in {"p40a": "e12.py", " 40B": "e12.py", "01": "e06.py"}.items():
        commands.plant(name)
        assert (mine / file).read_text("utf-8") == named(name).source, name
    capsys.readouterr()
    assert not commands.check(find("5"), 1) and str(mine / "e05.py") in capsys.readouterr().out
    assert not commands.check(find("12"), 1) and "X2 fails" in capsys.readouterr().out
    (mine / "e12.py").write_text("my work")
    with pytest.raises(UserError, match="e12.py is not as we wrote it"):
        commands.plant("40a")
    assert (mine / "e12.py").read_text() == "my work"


def test_alone_it_lists_its_commands() -> None:
    assert "python -m course check 6 " in spawn.run("-m", "course").stdout


def test_without_z3_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    monkeypatch.delitem(sys.modules, "course.prove", raising=False)
    monkeypatch.setattr(sys, "argv", ["course", "prove"])
    with pytest.raises(UserError, match="prove needs z3: pip install z3-solver"):
        commands.main()


def test_an_exercise_has_many_names() -> None:
    assert {find(key).key for key in ("6", "06", "E6", "e06", " e6 ")} == {"6"}
    assert find("Hunt").file == "hunt"
    assert {len(hints(exercise)) for exercise in EXERCISES.values()} == {3}


def test_submit_packs_the_exercises_alone(mine: Path, capsys: pytest.CaptureFixture) -> None:
    commands.start()
    (mine / "e09.py").write_bytes((COURSE / "reference.py").read_bytes())
    for other in ("e10.py", "e11.py"):
        (mine / other).unlink()
    (mine / "diary.txt").write_text("not for the lecturer")
    capsys.readouterr()
    commands.submit()
    said = capsys.readouterr().out
    assert "not written yet: e01.py e02.py" in said and "e09" not in said and "e10" not in said
    with zipfile.ZipFile(mine / "submission.zip") as packed:
        names = {f"{each.file}.py" for each in EXERCISES.values()}
        assert set(packed.namelist()) == names - {"e10.py", "e11.py"}


# ---------------------------------------------------------- the course checks what it says


def stub_source(exercise: Exercise) -> str:
    return (STUBS / f"{exercise.file}.py").read_text("utf-8")


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if key in SLOW else ()) for key in EXERCISES]
)
def test_right_answers_pass_and_planted_mistakes_are_caught(key: str) -> None:
    exercise = EXERCISES[key]
    name = f"{exercise.file}.py"
    truth = solution(exercise.file)
    stub = load(stub_source(exercise), name)
    answers = [load(right(exercise.file), name)]
    if key == "2":
        answers.append(truth)
    for module in answers:
        verdict = examine(exercise, asker(exercise, module), 0)
        assert verdict.failure is None, lines(exercise, verdict)
    assert examine(exercise, asker(exercise, stub), 0).failure.says == UNWRITTEN
    for plant in plants():
        if plant.exercise == key:
            verdict = examine(exercise, asker(exercise, plant.load()), 0)
            said = "\n".join(lines(exercise, verdict))
            assert verdict.failure and verdict.failure.prop == plant.caught_by, (plant.name, said)
            assert plant.message in said, plant.name
    for function in unwritten(stub_source(exercise)):  # a stub may leave out what has a default
        mine, theirs = (signature(attrgetter(function)(each)).parameters for each in (stub, truth))
        needed = [key for key, each in theirs.items() if key in mine or each.default is each.empty]
        assert list(mine) == needed, function


def test_a_planted_mistake_changes_one_place() -> None:
    misfit = replace(named("27a"), change=[["times.tokens", "times.token"]])
    with pytest.raises(UserError, match="p27a: 'times.tokens' stands there 4 times, and must once"):
        misfit.load()


def test_a_verdict_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second for each answer of the student's code, on a clock of our own."""
    exercise = find("1")
    asked = []
    mine = asker(exercise, load(right(exercise.file), "e01.py"))
    monkeypatch.setattr(frame, "time", SimpleNamespace(perf_counter=lambda: 9 + len(asked) / 4))
    verdict = examine(exercise, lambda case: asked.append(case) or mine(case), 0)
    assert verdict.failure is None and verdict.seconds == len(asked) / 4 > 1
    assert f"{len(asked)} cases, {len(asked) / 4:.1f} s. Held: " in lines(exercise, verdict)[0]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: pass", ("Your code has run", "does a loop never end? (line 2 of e01.py)")),
        ("rows + 1", ("Your function returned None: is `return` missing?",)),
        (
            "def inner():\n        return rows + None\n    return inner()",
            (
                "Your code raised an error.",
                "TypeError",
                "(line 3 of e01.py)",
                "rows = 1, cached = 0, model = llama-13b, gpu = a6000\n",
            ),
        ),
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
    done = spawn.run("-c", code)
    assert all(each in done.stdout for each in words), done.stdout


@pytest.mark.parametrize(
    ("key", "old", "new", "words"),
    [
        (
            "6",
            "[self.plan(request, room)]",
            "self.plan(request, room)",
            "which takes what your code has returned",
        ),
        (
            "6",
            "[self.plan(request, room)]",
            "self.plan(request, room)",
            "Return one, also of a single thing",
        ),
        ("1", "return max(", "return 1e3 * max(", "in milliseconds? It must be in seconds."),
        ("1", "return max(", "return 1, max(", "got       [1, 0.0330"),
        (
            "6",
            "request =",
            "len(self.waiting) > 1 and self.waiting.pop()\n        request =",
            "requests [1] never do",
        ),
        ("8", "        return chunks\n", "        return chunks[::-1]\n", "K5 fails"),
        ("8", "        return request\n", "", "Does `preempt` return the request?"),
        ("2", "(self.v, v)", "(self.v, k)", "in v of layer"),
        ("3", "return column <= row", "return (column <= row).int()", "torch.int32"),
        (
            "5",
            "Rows(tokens, slots, positions,",
            "Rows(tokens[::-1], slots[::-1], positions[::-1],",
            "R1 fails",
        ),
    ],
)
def test_a_check_names_the_cause(key: str, old: str, new: str, words: str) -> None:
    source = right(find(key).file)
    assert old in source and words in "\n".join(checked(find(key), source.replace(old, new)))


def test_a_check_tells_a_file_that_does_not_load(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.mkdir()
    for source, words in (
        (None, "python -m course start"),
        (b"x = 1\ndef f(:\n", r"SyntaxError.*\(line 2 of e09.py\)"),
        (b"x = '\xe9'\n", "UnicodeDecodeError"),
        (b"raise SystemExit(0)\n", "SystemExit"),
    ):
        if source:
            (mine / "e09.py").write_bytes(source)
        with pytest.raises(UserError, match=words):
            commands.check(find("9"), 1)
    windows = right("e09").replace("\n", "\r\n").encode()
    (mine / "e09.py").write_bytes(b"\xef\xbb\xbf" + windows)
    monkeypatch.setattr("sys.argv", ["course", "check", "9"])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert not ended.value.code, "it passes"


def test_all_exercises_are_checked_in_a_line_each(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    commands.start()
    (mine / "e05.py").write_text(right("e05"))
    (mine / "e09.py").write_text("def f(:")
    (mine / "e10.py").unlink()
    monkeypatch.setattr("course.local.find_spec", lambda name: None)  # no torch
    monkeypatch.setattr("sys.argv", ["course", "check"])
    capsys.readouterr()
    commands.main()
    told = capsys.readouterr().out.splitlines()
    assert len(told) == len(EXERCISES) + 2 and told[-2] == "1 of 15 passed, 9 not written yet"
    how = f"{to_run('install')} .venv/bin/python -m course"
    assert told[1] == f"E2     not tried: E2 needs torch: {how}"
    assert told[4] == "E5     passed" and told[5] == "E6     not written yet"
    assert "SyntaxError" in told[8] and "is not there" in told[9]


def test_a_student_reads_expected_got_and_a_sentence() -> None:
    told = "\n".join(checked(find("6"), named("1").source))
    assert f"```text\n{told}\n```" in (COURSE / "README.md").read_text("utf-8")


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


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"a": [1, NaN]}', "[" * 9999])
def test_an_answer_has_no_number_that_is_none(text: str) -> None:
    with pytest.raises(AnswerError):
        exercises.read_answer(text)


def test_answers_are_compared_part_by_part() -> None:
    nan = float("nan")
    assert same({"a": [1, 2.0, None]}, {"a": [1, 2.0 + 1e-12, None]}, 1e-9) and same(2.0, 2)
    for wanted, got in (
        (1.0, nan),
        (1.0, True),
        (1, True),
        (1, 1.0),
        (0, None),
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([1], "1"),
        ({"a": 1}, {"a": 1, "b": 2}),
        (1.0, "1.0"),
        (1.0, 1.0 + 1e-6),
        ("1", 1),
    ):
        assert not same(wanted, got, 1e-9), (wanted, got)


def test_a_batch_is_told_with_the_last_row_of_a_chunk() -> None:
    batch = {"chunks": [[3, 2, 9]], "decodes": [], "model": {"name": "m"}, "gpu": {"name": "g"}}
    assert e07.told(batch) == "chunk 3 to 4 (m on g)"


def test_attention_that_looks_elsewhere_finds_no_number() -> None:
    for seed in range(9):
        case = e04.draw(random.Random(seed), 2)
        seen = dict(zip(case["slots"], case["contexts"], strict=True))
        for slot, rows in enumerate(case["values"][0]):
            numbers = [place for place, row in enumerate(rows) if row[0] == row[0]]
            assert numbers == list(range(seen.get(slot, 0)))


def test_every_mistake_of_the_hunt_can_be_found_and_half_is_enough() -> None:
    """Whatever the seed is: 4 is one that once showed a mistake in fewer runs."""
    [case], [other] = (hunt.cases(random.Random(seed)) for seed in (4, 5))
    tags = Counter(case["_tags"])
    titles = list(hunt.mistakes())
    assert {*titles} == tags.keys() - {hunt.REFERENCE} and case["runs"] != other["runs"]
    assert min(tags.values()) >= hunt.FEWEST and tags[hunt.REFERENCE] > tags.total() / 2
    half = -(-len(titles) // 2)
    for count, prop in ((half, None), (half - 1, "H2")):
        failure = hunt.judge(case, [tag in titles[:count] for tag in case["_tags"]])
        assert (failure and failure.prop) == prop


def test_a_score_needs_an_honest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from scheduler import SarathiServe\n\nclass Mine(SarathiServe):\n"
    source += "    def schedule(self, now):\n        for r in self.running:\n"
    source += "            r.ends_after = min(r.ends_after, 30)\n"
    source += "        return super().schedule(now)\n"
    ask = asker(EXERCISES["final"], load(source, "final.py"))
    with pytest.raises(Broken) as caught:
        final.score(ask, random.Random(1), {}, {})
    failure = caught.value.failure
    assert failure.prop == "K10" and failure.where == "a hidden workload"
    found = iter([10.0, 0.5, 1.0, 1.0, 1.0, float("inf")])  # of a policy, sarathi_serve, a policy
    monkeypatch.setattr(final, "BASELINE", {})
    monkeypatch.setattr(final, "capacity_of", lambda ask, requests: next(found))
    scores = [final.score(None, random.Random(1), {}, {}) for _ in range(2)]
    assert scores[0].startswith("1.250 ") and scores[1].startswith("none: ")
    # nobody may be parked for long, and no request after its first token
    assert final.meets([0.05] * 199 + [1.0], [4.0] * 10)
    assert not final.meets([0.06] * 100, [4.0]) and not final.meets([0.05] * 199 + [1.1], [4.0])
    assert not final.meets([0.05] * 100, [4.0] * 8 + [4.1] * 2)


# ---------------------------------------------------------------------- pictures, and the page


@pytest.mark.parametrize("key", ["3", "10"])
def test_a_picture_shows_both(key: str, tmp_path: Path) -> None:
    from course.paint import figure_of

    plant = next(plant for plant in plants() if plant.exercise == key)
    shown = picture(find(key), plant.load())
    assert [panel.title for panel in shown] == ["what it should be", "yours"]
    figure = figure_of("<both>", shown)
    assert [axes.get_title() for axes in figure.axes] == [panel.title for panel in shown]
    path = tmp_path / "picture.png"
    figure.savefig(path, dpi=40)
    assert path.stat().st_size > 3000
    assert [axes.yaxis_inverted() for axes in figure.axes] == [panel.down for panel in shown]


def test_a_picture_shows_what_happened() -> None:
    """Each painter, with an answer that is put together by hand."""
    row = {"preempted": [], "chunks": [[0, 0, 3, 9], [1, 0, 0, 9]], "decodes": [2]}
    shapes = painted.batches({"C": 4}, {"rows": [row]}, True).shapes
    bars = {each.label: (each.y, each.height) for each in shapes if isinstance(each, Bar)}
    assert bars["chunk of request 0"] == (0, 3) and bars["decodes"] == (3, 1)
    assert [each.label for each in shapes if isinstance(each, Mark)] == ["no tokens"]
    answer = [{"shape": [2, 2], "rows": ["11", "01"]}]
    panel = painted.masks({"whole": 2, "chunks": [[0, 2]]}, answer, True)
    hues = [each.colour for each in panel.shapes if isinstance(each, Bar)]
    seen = [dict(panel.legend)[hue] for hue in hues]
    assert seen == ["seen", "seen, but must not be", "not seen, but must be", "seen"]
    case = {
        "slots": 1,
        "operations": [["allocate"], ["extend", 0, 2], ["extend", 0, 1], ["free", 0]],
    }
    assert painted.occupied(case, [0, 0, 2, None]) == [[0], [2], [3], [-1]]


def test_svg_has_the_axes_and_no_text_of_its_own() -> None:
    wide, high = (
        Panel([Bar(0, 0, 1, 1, "red")], (0, x), (0, y), "", "<&>") for x, y in ((4, 2), (2, 4))
    )
    both = alike([wide, high])
    assert [(each.x, each.y) for each in both] == [((0, 4), (0, 4))] * 2
    tops = []
    for panel in (wide, replace(wide, down=True)):
        root = ElementTree.fromstring(svg(panel))
        [bar] = [each for each in root if each.get("fill") == "red"]
        tops.append(float(bar.get("y")))
    assert tops[0] > tops[1], "a bar from 0 stands below, or hangs above"


def asked(call: str, **question: object) -> dict:
    tell = str  # any text: a slow machine tells how far it is
    return json.loads(in_browser(json.dumps({"call": call} | question), tell))


def test_the_page_draws_what_the_command_draws() -> None:
    code = named("1").source
    told = asked("check", exercise="6", code=code)
    assert told["draw"] and told["failure"]["prop"] == "K1"
    assert asked("check", exercise="6", code=code, seed=2)["failure"] != told["failure"]
    shown = asked("picture", exercise="6", code=code)["svg"]
    assert len(shown) == 2 and "C = 16" in shown[1]
    with pytest.raises(UserError, match="no picture"):
        picture(find("3"), load("def chunk_mask(start, length):\n    return 5\n", "e03.py"))


def test_the_page_has_all_that_its_python_reads(tmp_path: Path) -> None:
    """Without any package, from the written folder alone: right answers and pictures."""
    written = page.write(tmp_path / "site", npm=tmp_path)
    manifest = json.loads((tmp_path / "site" / "manifest.json").read_text("utf-8"))
    assert {*manifest["book"]} == {name[5:] for name in written if name.startswith("book/")}
    torch = [each["name"] for each in manifest["exercises"] if each["torch"]]
    assert torch == ["E2", "E3", "E4"]
    assert page.EDITOR not in written and not manifest["editor"]
    code = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path / 'site' / 'book')!r})\n"
        "from course.browser import in_browser\n"
        "for key in ('1', 'hunt'):\n"
        "    question = {'exercise': key, 'code': 'from course.reference import *\\n'}\n"
        "    for call in ('check', 'picture'):\n"
        "        print(in_browser(json.dumps(question | {'call': call}), print)[:50])\n"
    )
    done = spawn.run("-I", "-S", "-B", "-c", code, cwd=tmp_path)
    assert done.stdout.count('{"passed": true') == 2, done
    assert done.stdout.count('{"svg": ["<svg') == 1, done


def test_the_deck_has_each_picture_with_the_lectures_words(tmp_path: Path) -> None:
    from pptx import Presentation

    from course import slides

    drawn = slides.SLIDES
    slides.slides(tmp_path, force=False)
    pages = list(Presentation(tmp_path / slides.DECK).slides)
    assert [page.shapes.title.text for page in pages] == [slide.caption for slide in drawn]
    assert all(len(page.shapes) == 2 for page in pages), "a title and a picture"
    asked = [". Ask first: " in page.notes_slide.notes_text_frame.text for page in pages]
    minutes = [slide.minute for slide in drawn]
    assert asked == [minute not in minutes[:i] for i, minute in enumerate(minutes)]
    head = (tmp_path / f"{drawn[0].name}.png").read_bytes()[:24]
    assert (int.from_bytes(head[16:20]), int.from_bytes(head[20:24])) == (1920, 1080)
    for path in tmp_path.glob("*.png"):
        path.unlink()
    with pytest.raises(UserError, match="lecture.pptx"):  # a lecturer may have changed it
        slides.slides(tmp_path, force=False)


def test_the_doctor_runs_on_an_old_python_without_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("__init__.py", "__main__.py", "doctor.py"):
        ast.parse((COURSE / name).read_text("utf-8"), feature_version=(3, 8))
    command = [sys.executable, "-S", "-m", "course", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "MISSING no numpy, " in done.stdout
    assert "E2 to E4" in done.stdout
    monkeypatch.setattr(doctor, "TOO_OLD", True)
    state, said = doctor.python()
    assert state == doctor.MISSING and "install a 64-bit Python 3.11 or newer" in said
    monkeypatch.setattr(doctor, "CHECKS", [lambda: (doctor.NOTE, "no browser")])
    assert doctor.doctor()


# --------------------------------------------------------------------------------- the documents


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


def test_the_readme_and_the_lessons_list_all_exercises() -> None:
    text = (COURSE / "README.md").read_text("utf-8")
    for exercise in EXERCISES.values():
        [row] = [line for line in text.splitlines() if line.startswith(f"| {exercise.name} |")]
        assert exercise.title in row and f" {exercise.lines} |" in row
        told = set(re.findall(r"\b[A-Z]\d+\b", row.partition(exercise.title)[2]))
        assert told == set(exercise.check.PROPERTIES), exercise.name
        lesson = exercises.LESSONS[exercise.lesson - 1].read_text("utf-8")
        tail = lesson.rpartition("# %% [markdown]")[2]
        assert f"python -m course check {exercise.key}" in tail, exercise.name


def test_the_labs_answers_name_what_catches_a_mistake() -> None:
    text = (COURSE / "instructor" / "lab.md").read_text("utf-8")
    told = re.findall(r"\(mistake (\w+),\s(\w+)\)", text)
    assert len(told) > 7 and all(named(name).caught_by == prop for name, prop in told)


def test_the_worked_example_of_a_block_table_is_what_the_solution_does() -> None:
    text = ast.get_docstring(ast.parse(stub_source(find("13"))))
    shown = doctest.DocTestParser().get_examples(text)
    names = {"Blocks": solution("e13").Blocks}
    test = doctest.DocTest(shown, names, "e13", None, None, None)
    assert len(shown) > 5 and doctest.DocTestRunner(verbose=False).run(test).failed == 0


# ------------------------------------------------------- the reference does what the project does


def flatten(batch: Batch, slot_of: dict[int, int], used: list[int]) -> SimpleNamespace:
    """`ModelExecutor.flatten`, with a cache that has no tensors."""
    executor = ModelExecutor.__new__(ModelExecutor)
    executor.cache = KVCache.__new__(KVCache)
    executor.cache.used, executor.cache.slots, executor.cache.length = used, len(used), 10**6
    executor.slot_of, executor.model = slot_of, SimpleNamespace(device=torch.device("cpu"))
    flat = executor.flatten(batch)
    return SimpleNamespace(**{name: getattr(flat, name).tolist() for name in drive.FIELDS})


def life(times: SimpleNamespace) -> Life:
    return Life(0, times.arrival, 1, times.scheduled, times.tokens)


def idle(seconds: list[list[float]], starts: list[list[float]]) -> dict[str, float]:
    trace = PipelineTrace(len(seconds[0]), 1)
    for work, began in zip(seconds, starts, strict=True):
        trace.record(Step(0, 0, 1, [*began], [*work]), Batch([], []), [])
    trace.close()
    waits = sum(trace.idle[cause] for cause in (*BUBBLES, "starved"))
    return {name: trace.idle[name] for name in ("start-up", "drain")} | {"bubble": waits}


OWN = {
    "5": {"flatten": flatten},
    "9": {
        "ttft": lambda times: life(times).ttft,
        "tbts": lambda times: life(times).tbt,
        "stalls": lambda times, bound: [
            stall[1:] for stall in Trace(lives={0: life(times)}).stalls(bound)
        ],
    },
    "10": {"idle": idle},
    "11": {
        "share_out": lambda own, withheld, total, groups, most: share_out(
            "window", own, withheld, total, groups, 0, most
        )
    },
}


@pytest.mark.parametrize("key", OWN)
def test_the_projects_own_code_passes(key: str) -> None:
    exercise = EXERCISES[key]
    ours = SimpleNamespace(**vars(solution(exercise.file)) | OWN[key])
    for case in exercise.check.cases(random.Random(0)):
        answer = getattr(drive, exercise.file)(ours, case)
        assert exercise.check.judge(case, answer) is None
