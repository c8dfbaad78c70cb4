"""What grading reads and gives back: names of files, pages, Gradescope's results."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from command.checks import UserError
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from course import feedback, predictions
from course.exercises import EXERCISES, STUBS
from course.feedback import Grade
from course.grade import Worker, grade
from course.plants import right
from course.submissions import CANVAS, Submission, submission, submissions
from tests import classroom

ROOT = Path(__file__).parent.parent
INSTRUCTOR = ROOT / "course" / "instructor"


def by_name(folder: Path) -> dict[str, Submission]:
    return {each.name: each for each in submissions(folder)[0]}


# ------------------------------------------------------------------------- the names of files


@pytest.mark.parametrize(
    ("name", "who", "user", "late", "own"),
    [
        ("doe_123_456_e06.py", "doe", "123", False, "e06.py"),
        ("doejane_LATE_123_456_submission.zip", "doejane", "123", True, "submission.zip"),
        ("o_neil_5_7_e06-1.py", "o_neil", "5", False, "e06-1.py"),
        ("müller_12_13_e06 (2).py", "müller", "12", False, "e06 (2).py"),
        ("anon_x7Q_77_e06.py", None, "anon_x7Q", False, "e06.py"),
        ("LATE_anon_x7Q_77_e06.py", None, "anon_x7Q", True, "e06.py"),
        ("doe_1_2_a_3_4_e06.py", "doe", "1", False, "a_3_4_e06.py"),
    ],
)
def test_a_name_of_canvas_is_taken_apart(
    name: str, who: str, user: str, late: bool, own: str
) -> None:
    found = CANVAS.fullmatch(name)
    assert found.group("who", "user", "name") == (who, user, own) and bool(found["late"]) == late


def test_the_files_of_canvas_become_a_submission_for_each_student(tmp_path: Path) -> None:
    """Two students of one name; a file handed in again, which Canvas renames; a late zip."""
    for name in ("doe_1_20_e06.py", "doe_1_9_e06-1.py", "doe_2_30_e06.py", "doe_1_21_E7 (3).py"):
        (tmp_path / name).write_text(name)
    with zipfile.ZipFile(tmp_path / "roe_LATE_3_40_submission-2.zip", "w") as packed:
        packed.writestr("..\\mine\\e06.py", "in a folder of Windows")
        packed.writestr("./e07.py", "as some tools write it")
        packed.writestr("__MACOSX/e06.py", "no program")
    (tmp_path / "e06.py").write_text("whose?")
    (tmp_path / "notes.txt").write_text("the lecturer's")
    found, left, classes, apart = submissions(tmp_path)
    files = {each.name: each.files for each in found}
    assert files == {
        "doe_1": {"e06": "doe_1_20_e06.py", "e07": "doe_1_21_E7 (3).py"},
        "doe_2": {"e06": "doe_2_30_e06.py"},
        "roe_3": {"e06": "in a folder of Windows", "e07": "as some tools write it"},
    }
    assert [each.late for each in found] == [False, False, True]
    assert "more than once: e06.py counts" in found[0].notes[0], "the file with the higher number"
    assert left == ["e06.py", "notes.txt"] and not classes and not apart


@pytest.mark.parametrize(
    "name", ["hw_2026_1117_{}.zip", "cs_2026_{}_doe.zip", "cs_2026_{}_e06.py", "a_LATE_1_{}_e06.py"]
)
def test_names_that_only_look_like_canvas_mix_nobodys_work(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    """And the console says it: they may be one student's all the same."""
    paths = [tmp_path / name.format(number) for number in (17, 18)]
    for path in paths:
        if path.suffix == ".py":
            path.write_text(path.name)
        else:
            classroom.pack(path, {"e06.py": path.name}, zipfile.ZIP_STORED)
    found = by_name(tmp_path)
    assert [found[path.name].files["e06"] for path in paths] == [path.name for path in paths]
    assert all(found[path.name].late == ("LATE" in name) for path in paths)
    grade(tmp_path, tmp_path / "grades.csv", 1, 1, None, False, only=["1"])
    assert f"look like one student's: {paths[0].name}, {paths[1].name}: " in capsys.readouterr().out


CLASSES = ("doe_1_2_e06.py", "long_LATE_1_2_e06-1.zip", "Grün_7_assignsubmission_file_/e06.py",
           "Grün_7_assignsubmission_file_e06.py", "all/anna/e06.py all/ben/e06.py",
           "anna.zip ben.ZIP")  # fmt: skip


@pytest.mark.parametrize("names", CLASSES)
def test_a_zip_of_a_whole_class_is_no_students(tmp_path: Path, names: str) -> None:
    """The others are graded, and the error comes last. A long zip says its first name alone."""
    text = "#" * (1 << 20 if "long" in names else 5)
    classroom.pack(tmp_path / "A.ZIP", dict.fromkeys(names.split(), text), zipfile.ZIP_STORED)
    mine = dict.fromkeys(["mine/e06.py", "mine/submission.zip", "mine/old/e06.py", "e09.py"], text)
    for out in ("none.csv", "grades.csv"):
        with pytest.raises(UserError, match="^not graded, for several .* in it: A.ZIP: unpack it"):
            grade(tmp_path, tmp_path / out, 1, 1, None, False, only=["1"])
        classroom.pack(tmp_path / "mine.zip", mine, zipfile.ZIP_STORED)
    [row] = csv.DictReader((tmp_path / "grades.csv").read_text("utf-8").splitlines())
    assert row["submission"] == "mine.zip" and not (tmp_path / "none.csv").exists()


def test_a_zip_that_canvas_named_is_a_class_if_two_students_are_in_it(tmp_path: Path) -> None:
    for name, others in (("doe_1_2_mine.zip", "3_4"), ("cs_2026_17_all.zip", "9_4")):
        files = ["lab_3_4_e06.py", f"lab_{others}_e07.py", "e01.py"]
        classroom.pack(tmp_path / name, dict.fromkeys(files, "#"), zipfile.ZIP_STORED)
    found, _, classes, _ = submissions(tmp_path)
    assert [each.name for each in found] == ["doe_1"] and classes == ["cs_2026_17_all.zip"]


def test_what_counts_in_a_whole_clone_and_what_is_named(tmp_path: Path) -> None:
    deep = tmp_path / "doe" / "my" / "nano" / "course"
    for folder in ("check", "mine", "stubs"):
        (deep / folder).mkdir(parents=True)
        (deep / folder / "e06.py").write_text(folder)
    (deep / "mine" / "predictions.json").write_text("[")
    (tmp_path / "doe" / "elsewhere").symlink_to(tmp_path)
    [doe] = submissions(tmp_path)[0]
    notes = "\n".join(doe.notes)
    assert doe.files == {"e06": "mine"} and "my/nano/course/mine/e06.py counts" in notes
    assert "Not read: elsewhere." in notes and "predictions.json: it has no answers" in notes


def test_a_folder_may_hold_a_zip_and_a_folder(tmp_path: Path) -> None:
    """As Moodle and a hasty student make them. What has no name of ours is told."""
    place = tmp_path / "Doe Jane_77_assignsubmission_file_"
    (place / "mine").mkdir(parents=True)
    (place / "mine" / "e09.py").write_text("nine")
    (place / "essay.docx").write_bytes(b"\xff")
    with zipfile.ZipFile(place / "submission (1).zip", "w") as packed:
        packed.writestr("e06.py", "six")
    [found] = submissions(tmp_path)[0]
    assert found.files == {"e09": "nine", "e06": "six"} and not found.refused
    assert found.notes == ["Not read: essay.docx. No exercise has this name."]


@pytest.mark.parametrize("second", ["submission (1).zip", "submission-1.zip"])
def test_of_two_zips_in_a_folder_the_one_that_was_made_later_counts(
    tmp_path: Path, second: str
) -> None:
    """A browser and Canvas number what comes again; these names sort before the first one's."""
    classroom.pack(tmp_path / "submission.zip", {"e06.py": "first"}, zipfile.ZIP_STORED)
    classroom.pack(tmp_path / second, {"mine/e06.py": "second"}, zipfile.ZIP_STORED)
    found = submission("a", [tmp_path])
    assert found.files == {"e06": "second"} and not found.refused
    assert found.notes == [f"e06 came more than once: {second}/mine/e06.py counts."]
    (tmp_path / second).write_bytes(b"PK")
    found = submission("a", [tmp_path])
    assert found.files == {"e06": "first"} and f"Not read: {second}: " in found.notes[0]


@pytest.mark.skipif(os.name != "posix", reason="it needs links")
def test_a_link_reads_nobody_elses_work(tmp_path: Path) -> None:
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "e06.py").write_text("ben's")
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve" / "e06.py").symlink_to(tmp_path / "ben" / "e06.py")
    (tmp_path / "eve" / "below").symlink_to(tmp_path / "ben")
    (tmp_path / "eve_1_2_e06.py").symlink_to(tmp_path / "ben" / "e06.py")
    link = zipfile.ZipInfo("e06.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "zip.zip", "w") as packed:
        packed.writestr(link, "ben/e06.py")
    os.mkfifo(tmp_path / "ben" / "pipe.zip")  # whoever opens it waits
    os.mkfifo(tmp_path / "ben" / "e07.py")
    found, left, *_ = submissions(tmp_path)
    assert found[0].refused["e07"] == "no file"
    assert {each.name: each.files for each in found if each.files} == {"ben": {"e06": "ben's"}}
    assert found[1].refused == found[2].refused == {"e06": "a link"} and left == ["eve_1_2_e06.py"]


@pytest.mark.parametrize("text", ["", "[", "[1]", "[" * 9999, '{"1": 2}', '{"1": {"answer": 3}}'])
def test_predictions_of_another_form_are_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "predictions.json").write_text(text)
    (tmp_path / "e06.py").write_text("x = 1")
    found = submission("a", [tmp_path])
    assert found.predictions == {} and found.files == {"e06": "x = 1"}


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_passes_flags_on_and_a_folder_whatever_its_name(tmp_path: Path) -> None:
    """No part of the name runs."""
    python, ran, name = tmp_path / "python", tmp_path / "ran", '../my "class"; `touch ran` $HOME'
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    for target, told in ("grade", ["grade", name]), ("pictures-for-slides", ["slides"]):
        done = ("-o", ".venv/run.stamp", "-o", ".venv/room.stamp")
        given = (f"BIN={tmp_path}", f"DIR={name}", "ARGS=--force")
        command = ["make", "-s", "-f", ROOT / "Makefile", *done, target, *given]
        said = subprocess.check_output(command, cwd=tmp_path, text=True)
        assert [*told, "--force"] == [line for line in said.splitlines() if line[:4] != "make"][2:]
    assert not ran.exists()


# ----------------------------------------------------------------- what a student gets back


def test_the_rubric_is_read_from_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert feedback.rubric().keys() == EXERCISES.keys()
    text = feedback.RUBRIC.read_text("utf-8")
    [(whole, checks, hand)] = re.findall(r"(\d+) points: (\d+) by the checks, (\d+) by hand", text)
    assert sum(feedback.rubric().values()) == int(checks) == int(whole) - int(hand)
    monkeypatch.setattr(feedback, "RUBRIC", tmp_path / "rubric.md")
    feedback.RUBRIC.write_text(text.replace("| E6 | 10 |", "| E6 | 12.5 |"))
    assert feedback.rubric()["6"] == 12.5
    feedback.RUBRIC.write_text(text.replace("| E6 | 10 |", "| E6 | ten |"))
    with pytest.raises(UserError, match=r"no row '\| E6 \| POINTS \|'"):
        feedback.rubric()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found |= {tag, *(name for name, _ in attrs if name.startswith("on"))}


NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\ud800\u202e\x1b[2J$title"


def made(tmp_path: Path, **fields: object) -> Path:
    """The folder of feedback for a made-up grade."""
    handed = Submission(NASTY, notes=[NASTY], predictions={NASTY: NASTY})
    handed.predictions |= {predictions.outcomes(3)[0].question: NASTY}
    results = dict.fromkeys(EXERCISES, "-") | {"6": "passed", "7": "Q1", "8": "refused"}
    told = {"6": ["E6 passed"], "7": [NASTY]}
    one = Grade(handed, results, told=told, **fields)
    (tmp_path / "f").mkdir()
    feedback.write_feedback(tmp_path / "f", [one, one], feedback.rubric(), 5, "protected")
    return tmp_path / "f"


def test_a_page_shows_what_a_stranger_wrote_and_obeys_none_of_it(tmp_path: Path) -> None:
    folder = made(tmp_path)
    pages = sorted(folder.glob("*.html"))
    assert len(pages) == 3 and len(list(folder.glob("*.json"))) == 2, "names collide: two pages"
    ours = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "pre", "em"}
    for page in pages:
        text, tags = page.read_text("utf-8"), Tags()
        tags.feed(text)
        assert tags.found <= ours | {"table", "tr", "th", "td", "section", "code"}, page.name
        assert "&lt;script&gt;" in text and not re.search("[\u202e\x1b\ud800]", text)
    student = pages[0].read_text("utf-8")
    said = "10 of 95 points|check 7 --seed 5|white-space: pre;|are in lesson 3|>not\xa0yet:\xa0Q1<"
    assert [each for each in said.split("|") if each not in student] == []
    assert "<p>E7</p><pre>  a\n  b</pre>" == "".join(feedback.paragraphs("E7\n\n  a\n  b"))


def test_a_page_says_what_happened_as_the_command_line_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("course.grade.CASE", 0.5)
    files = {"e01.py": "while True: pass", "e06.py": "if", "e09.py": "import os\nos._exit(0)"}
    files["e12.py"] = "def reorder(*_):\n    raise NotImplementedError\nextend = reorder"
    classroom.pack(tmp_path / "Anna.Zip", files, zipfile.ZIP_STORED)
    [found] = grade(tmp_path, tmp_path / "grades.csv", 1, 1, None, False)
    page = (tmp_path / "grades_feedback" / f"{found.page(1)}.html").read_text("utf-8")
    told = dict(re.findall("<h2>(E[0-9]+)</h2>(.*)", page))
    assert "not yet. Your code has run 0.5 s: does a loop never end?</p>" in told["E1"]
    assert re.search("not yet. e06.py cannot be loaded: SyntaxError: [^<]*</p></sec", told["E6"])
    assert "not yet. Your code ended its process" in told["E9"]
    assert "E12 the table of a beam search: not written yet" in told["E12"]
    assert "raised" not in page and page.count("not yet: no valid answer") == 4
    assert "<h1>Anna</h1>" in page and "(here for E1)" in page


def test_a_page_shows_a_prediction_beside_what_came_out(tmp_path: Path) -> None:
    outcome = predictions.outcomes(3)[0]
    for page in sorted(made(tmp_path).glob("*.html")):
        text = page.read_text("utf-8")
        assert feedback.marked(outcome.question) in text, page.name
        assert feedback.marked(outcome.explained) in text, page.name


@pytest.mark.slow
def test_gradescope_runs_what_make_packs(tmp_path: Path) -> None:
    """Right answers get their points. If the grader stops, there are no results."""
    if not (ROOT / ".git").exists() or shutil.which("bash") is None:
        pytest.skip("no git, or no bash")
    place = tmp_path / "autograder.zip"
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ngradescope:\n")[2]
    line = recipe.partition("\n\n")[0].replace("build/autograder.zip", str(place))
    for old, new in (("\\\n", " "), ("@", ""), ("$$", "$")):
        line = line.replace(old, new)
    subprocess.run(["sh", "-c", line], cwd=ROOT, check=True, capture_output=True)
    shutil.unpack_archive(place, tmp_path / "source")
    (tmp_path / "submission").mkdir()
    handed_in = ("1", "2", "9", "12")  # with torch and without it
    for key in handed_in:
        file = EXERCISES[key].file
        (tmp_path / "submission" / f"{file}.py").write_text(right(file))
    results = tmp_path / "results" / "results.json"
    for python in ("/bin/false", sys.executable):
        environment = os.environ | {"AUTOGRADER": str(tmp_path), "PYTHON": python}
        command = ["bash", tmp_path / "source" / "run_autograder"]
        done = subprocess.run(command, env=environment, check=False, capture_output=True)
        assert (done.returncode == 0) == results.exists() == (python != "/bin/false"), done.stderr
    found = json.loads(results.read_text("utf-8"))
    assert found["output_format"] == found["test_output_format"] == "text", "never as HTML"
    points = list(feedback.rubric().values())
    for key, most, each in zip(EXERCISES, points, found["tests"], strict=True):
        passed = key in handed_in
        assert (each["status"] == "passed") == passed and each["output"]
        assert (each["score"], each["max_score"]) == (most if passed else 0, most)


def test_nothing_of_the_lecturers_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all" / "anna").mkdir(parents=True)
    (tmp_path / "all" / "anna" / "e01.py").write_text(right("e01"))
    out = tmp_path / "grades.csv"
    grade(tmp_path / "all", out, 1, 1, None, False)
    [row] = csv.DictReader(out.read_text("utf-8").splitlines())
    assert row["points"] == "4" and (tmp_path / "grades_feedback" / f"{row['page']}").exists()
    with pytest.raises(UserError, match="grades.csv' is there already: .* --out, .*ARGS=--force"):
        grade(tmp_path / "all", out, 1, 1, None, False)
    out.unlink()
    with pytest.raises(UserError, match="grades_feedback' is there already: .* --feedback, "):
        grade(tmp_path / "all", out, 1, 1, None, False)
    ignored = ["git", "check-ignore", "grades.csv", "grades_feedback/1.html"]
    asked = subprocess.run(ignored, cwd=ROOT, check=False, capture_output=True, text=True)
    assert len(asked.stdout.splitlines()) == 2 or not (ROOT / ".git").exists()


def test_graded_again_nobody_keeps_an_old_page(tmp_path: Path) -> None:
    """A student who hands in late moves all numbers behind: an old page must not stay beside."""
    grades = [Grade(Submission(name), dict.fromkeys(EXERCISES, "-")) for name in "ac"]
    points, own = feedback.rubric(), tmp_path / "002_notes.html"
    own.write_text("the lecturer's")
    feedback.write_feedback(tmp_path, grades, points, 5, "protected")
    grades.insert(1, Grade(Submission("b"), dict.fromkeys(EXERCISES, "-")))
    feedback.write_feedback(tmp_path, grades, points, 5, "protected")
    names = {path.stem for path in tmp_path.iterdir()} - {"predictions"}
    assert names == {"001_a", "002_b", "003_c", "002_notes"} and own.read_text()


def test_only_what_was_set_is_graded_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker gets no other file, and no stub: those of E2 to E5 would need torch."""
    given: list[list[str]] = []

    class Seen(Worker):
        def __init__(self, files: dict[str, str], *more: object) -> None:
            given.append(list(files))
            super().__init__(files, *more)

    monkeypatch.setattr("course.grade.Worker", Seen)
    (tmp_path / "all" / "anna").mkdir(parents=True)
    for name in ("e01", "e12"):
        (tmp_path / "all" / "anna" / f"{name}.py").write_text(right(name))
    shutil.copy(STUBS / "e02.py", tmp_path / "all" / "anna")
    out = tmp_path / "grades.csv"
    [found] = grade(tmp_path / "all", out, 1, 1, None, False, only=["2", "9", "12"])
    assert found.results == {"2": "stub", "9": "-", "12": "passed"} and given == [["e12"]]
    assert out.read_text("utf-8").startswith("submission,2,9,12,passed,points")
    page = (tmp_path / "grades_feedback" / f"{found.page(1)}.html").read_text("utf-8")
    assert "<b>3 of 13 points</b>" in page and "E1 " not in page


@pytest.mark.slow
def test_a_class_gets_what_it_must(tmp_path: Path) -> None:
    """All ways to hand in, right and wrong answers, and hostile submissions, together."""
    wanted = classroom.make(tmp_path / "class", 5, 3, ("1", "2", "6", "7", "8", "9", "12"))
    out = tmp_path / "grades.csv"
    grades = {each.name: each for each in grade(tmp_path / "class", out, 5, 2, None, False)}
    assert grades.keys() == wanted.keys()
    for name, results in wanted.items():
        assert {key: grades[name].results[key] for key in results} == results, name
    assert not Path("/tmp/escaped").exists()


# ------------------------------------------------------------------------- predictions


def test_what_came_out_is_that_of_the_same_question() -> None:
    for lesson in range(1, len(predictions.LESSONS) + 1):
        found = predictions.outcomes(lesson)
        assert [each.question for each in found] == predictions.questions(lesson)
        assert all(each.printed or "picture" in each.where for each in found), lesson


def test_a_student_sees_a_prediction_beside_the_result_and_no_result_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "MINE", tmp_path)
    first, second, *_ = predictions.outcomes(3)
    predictions.record("3.1", first.question, "4 x 12")
    told = "\n".join(predictions.compare(3))
    assert "you said: 4 x 12" in told and first.explained in told
    assert first.printed.splitlines()[0] in told
    assert second.explained not in told and "not yet: 3.2" in told


# --------------------------------------------------------------------------------- quiz


def test_the_quiz_says_what_the_cost_model_predicts() -> None:
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])
    question, answers = (INSTRUCTOR / "quiz.md").read_text("utf-8").split("\n## Answers\n")
    for text, decodes, context in ((question, 1, 256), (answers, 4, 256), (answers, 4, 2048)):
        seconds = cost.seconds(make_batch(decodes=decodes, context=context))
        assert f" {1e3 * seconds:.0f} ms" in text
