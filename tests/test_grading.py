"""Grading: what it reads, submissions that attack it, and what it gives back."""

import csv
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from watch import alive, children_of, wait_for

from command.checks import UserError
from configs import GPUS, MODELS
from costmodel import CostModel, make_batch
from course import feedback, grade, sandbox
from course.drive import answer_of
from course.exercises import EXERCISES, STUBS, AnswerError, find
from course.feedback import Grade, harmless
from course.grade import Worker
from course.handed import LONGEST_FILE
from course.plants import named, right
from course.reference import solution
from course.sandbox import PROTECTIONS
from course.submissions import Submission, submissions
from tests import spawn

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, links and /proc")


def graded(folder: Path, *only: str, **options: object) -> list[Grade]:
    """Grade with seed 1; the table goes to grades.csv beside the folder."""
    out = options.pop("out", folder.parent / "grades.csv")
    return grade.grade(folder, out, 1, only=only or EXERCISES, **options)


def pack(path: Path, files: dict[str | zipfile.ZipInfo, str], how: int = 0) -> None:
    """A zip, stored if nothing else is said."""
    with zipfile.ZipFile(path, "w", how) as packed:
        for name, text in files.items():
            packed.writestr(name, text)


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


# ------------------------------------------------------------------------- the names of files


CLASS = {  # who handed in -> the file that a platform gives, and what is read of it
    "Grün_7_assignsubmission_file_": ("/e06.py", "x = 1"),
    "Ö_8_assignsubmission_file_": ("/a.zip", "x = 2"),
    "doe_1_2_submission.zip": ("", "x = 2"),
    "doe_LATE_3_4_submission-1.ZIP": ("", "x = 2"),
}


def test_a_zip_of_a_whole_class_is_graded_as_its_folder_is(tmp_path: Path) -> None:
    """Each student has a folder or a zip. A file beside them is nobody's, and is named."""
    inside = {
        "..\\mine\\e06.py": "x = 2",
        "./e07.py": "some tools write it so",
        "__MACOSX/e06.py": "",
    }
    pack(tmp_path / "zip.zip", inside)
    handed_in = {
        who + name: (tmp_path / "zip.zip").read_bytes() if name != "/e06.py" else text
        for who, (name, text) in CLASS.items()
    }
    pack(tmp_path / "A.ZIP", handed_in | {"doe_1_3_e06.py": "whose?"})
    with zipfile.ZipFile(tmp_path / "A.ZIP") as packed:
        packed.extractall(tmp_path / "folder")
    for place in (tmp_path / "A.ZIP", tmp_path / "folder"):
        found, left = submissions(place)
        assert {each.name: each.files["e06"] for each in found} == {
            who: text for who, (_, text) in CLASS.items()
        }
        assert found[-1].files["e07"] == "some tools write it so"
        assert left == ["doe_1_3_e06.py"]


def test_what_counts_in_a_whole_clone_and_what_is_named(tmp_path: Path) -> None:
    """A browser numbers what comes again; these names sort before the first one's."""
    doe = tmp_path / "doe"
    for folder in ("check", "mine", "stubs"):
        write(doe / "my" / "nano" / "course" / folder, {"e06.py": folder})
    write(doe / "x", {"e08.py": "deep", "e09 (1).py": "later", "e09.py": "first"})
    (doe / "e10.py").write_text("#" * (LONGEST_FILE + 1))
    pack(doe / "bomb.zip", {"../../e11.py": "#" * (100 << 20)}, zipfile.ZIP_DEFLATED)
    (doe / "e08.py").write_text("high")
    (doe / "essay.docx").write_bytes(b"\xff")
    for name, text in (("submission", "1"), ("submission (1)", "2"), ("submission(2)", "3")):
        pack(doe / f"{name}.zip", {"e07.py": text})
    (doe / "submission(3).zip").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    found, empty = submissions(tmp_path)[0]
    assert (empty.name, empty.files) == ("empty", {})
    assert found.files == {"e06": "mine", "e07": "3", "e08": "high", "e09": "later"}
    assert found.refused["e10"] == found.refused["e11"] == "above 64 kB"
    notes = "\n".join(found.notes)
    assert "e07 came more than once: submission(2).zip/e07.py counts" in notes
    assert "my/nano/course/mine/e06.py counts" in notes and "essay.docx. No exercise" in notes
    assert "Not read: submission(3).zip: " in notes


def test_a_link_reads_nobody_elses_work(tmp_path: Path) -> None:
    ben = tmp_path / "ben"
    eve = tmp_path / "eve"
    write(ben, {"e06.py": "ben's"})
    eve.mkdir()
    (eve / "e06.py").symlink_to(ben / "e06.py")
    (eve / "below").symlink_to(ben)
    (tmp_path / "e06.py").symlink_to(ben / "e06.py")
    (tmp_path / "link.zip").symlink_to(ben / "e06.py")
    link = zipfile.ZipInfo("e06.py")
    link.external_attr = 0o120777 << 16
    pack(tmp_path / "zip.zip", {link: "ben/e06.py"})
    os.mkfifo(ben / "pipe.zip")  # whoever opens it waits
    os.mkfifo(ben / "e07.py")
    found, left = submissions(tmp_path)
    assert found[0].refused["e07"] == "no file" and "Not read: below. " in found[1].notes[0]
    assert {each.name: each.files for each in found if each.files} == {"ben": {"e06": "ben's"}}
    assert {each.name: each.refused["e06"] for each in found[1:]} == {
        "eve": "a link",
        "link.zip": "link.zip: a link",
        "zip.zip": "a link",
    }
    assert left == ["e06.py"]


# ------------------------------------------------------------------------ submissions that attack

PATCHES = """import course.exercises, json, sys
    for name in list(sys.modules):
        if hasattr(sys.modules[name], 'judge'): sys.modules[name].judge = lambda *a: None
    json.dumps = lambda *a, **k: '{"answer": "passed"}'
    return 0.0"""
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
    "prints": ("", "while True: print('x' * (1 << 20))"),
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
    "floods": ("", FLOODS),
    "forges": ("", FORGES),
    "says more": ("", FRAMES.replace("DATA", "said + b'boom boom' + bytes([10])")),
    "says half": ("", FRAMES.replace("DATA", "said[:9]")),
    "says late": ("", FRAMES.replace("DATA", "b'boom' + bytes([10]) + said")),
    "says megabytes": ("", FRAMES.replace("DATA", "said + bytes(9 << 20)")),
    "lies": ("", "return float('nan')"),
}


def attack(body: str, **names: object) -> str:
    """Code that passes E1, once it has done something else."""
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    arguments = "rows, cached, model, gpu"
    function = f"def iteration_floor({arguments}):\n    {body}\n    return right({arguments})\n"
    return f"{right('e01')}\nright = iteration_floor\n{head}\n{function}"


@pytest.mark.slow
def test_attacks_earn_nothing_and_harm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "handed in"
    secret = tmp_path / "secret.py"
    homes = tmp_path / "homes"
    homes.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(homes))
    monkeypatch.setattr(grade, "CASE", 1.0)  # who hangs or sleeps has no more
    monkeypatch.setattr(grade, "PATIENCE", 5)
    trace = Path("/tmp") / f"left-{os.getpid()}-{tmp_path.name}"
    passes = attack("pass")
    secret.write_text(passes)  # whoever gets hold of it passes
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "SECRET": str(secret),
            "FOLDER": str(tmp_path),
            "PARENT": os.getpid(),
            "PROJECT": str(ROOT / "scheduler.py"),
            "PORT": server.getsockname()[1],
            "TRACE": str(trace),
        }
        for name, (_, body) in ATTACKS.items():
            write(folder / name, {"e01.py": attack(body, **names)})
        write(folder / "good", {"e01.py": passes, "e09.py": "import os; os._exit(3)"})
        (folder / "good" / "e10.py").write_text(right("e10"))  # the next one has a new worker
        write(folder / "latin", {"e01.py": b"# \xe9\n" + passes.encode()})
        pack(folder / "torn.zip", {"e01.py": passes}, zipfile.ZIP_DEFLATED)
        data = bytearray((folder / "torn.zip").read_bytes())
        data[45:60] = bytes(15)
        (folder / "torn.zip").write_bytes(data)
        out = tmp_path / "grades.csv"
        grades = {each.name: each for each in grade.grade(folder, out, 1)}
    held = grades["good"].held
    for name, (needs, _) in ATTACKS.items():
        if not needs or needs in held:
            # an answer that is said twice may count for the next case, too: so any property
            lost = ("answer", "endless", "load", "time", *find("1").check.PROPERTIES)
            assert grades[name].results["1"] in lost, name
    good = grades["good"].results
    assert [good[key] for key in ("1", "6", "9", "10")] == ["passed", "-", "answer", "passed"]
    assert grades["latin"].results["1"] == grades["torn.zip"].results["1"] == "refused"
    assert secret.read_text() == passes and not list(homes.iterdir())
    assert "files" not in held or not trace.exists()
    [first] = {row["protection"] for row in csv.DictReader(out.read_text().splitlines())}
    assert first.startswith("graded on ")
    assert capsys.readouterr().out.startswith(first)


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
E1 = {key: each for key, each in find("1").check.cases(random.Random(1))[0].items() if key != "_"}
ASKED = {"file": "e01", "case": E1}


@pytest.mark.parametrize("asked", [False, True])
def test_what_a_submission_hides_ends_with_its_worker(tmp_path: Path, asked: bool) -> None:
    """Without any fence: it starts processes in sessions of their own, and they hear of nothing."""
    code = "import course.worker as w\nw.isolate, w.fence = list, lambda *_: []\nw.main()\n"
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    trace = tmp_path / "trace"
    files = {"e01": f"TRACE = {str(trace)!r}\n{HIDES}"}
    for line in ({"files": files, "torch": False, "memory": 1 << 30, "seconds": 60}, ASKED):
        worker.stdin.write(b"9 " + json.dumps(line).encode() + b"\n")
    worker.stdin.flush()
    wait_for(lambda: trace.exists() and len(trace.read_text().split()) == 3)
    hidden = [int(pid) for pid in trace.read_text().split()]
    assert all(map(alive, hidden))
    worker.terminate() if asked else worker.stdin.close()
    worker.wait(100)
    assert not any(map(alive, hidden))
    worker.stdout.close()


@pytest.fixture
def worker_of(tmp_path: Path) -> Iterator:
    """Starts a worker with a text of E1; at the end it is closed, and leaves nothing."""
    started = []

    def start(source: str = "") -> Worker:
        started.append(Worker({"e01": source}, tmp_path))
        return started[-1]

    yield start
    for worker in started:
        worker.close()
        assert not worker.home.exists()


def test_a_machine_that_is_busy_changes_no_grade(
    worker_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission that gets no processor for longer than its time keeps its time; one that uses
    the processor does not. It measures itself: no answer is too short to be counted."""
    monkeypatch.setattr(grade, "PATIENCE", 1000)
    worker = worker_of(
        "import time\ndef iteration_floor(rows, *_):\n    began = time.process_time()\n"
        "    while rows < 2 or (took := time.process_time() - began) < 0.03: pass\n"
        "    return took\n"
    )
    answers = {"file": "e01", "case": E1 | {"rows": 2}}
    [student] = children_of(worker.process.pid)
    took = [worker.exchange(answers, grade.CASE)["answer"] for _ in range(5)]
    assert sum(took) - 1e-6 <= worker.spent < 2 * sum(took)
    os.kill(student, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (student, signal.SIGCONT))
    timer.start()
    assert worker.exchange(answers, 0.2)["answer"] >= 0.03
    with pytest.raises(AnswerError, match="no answer in time"):
        worker.exchange(ASKED, 0.2)
    worker.close()
    assert not alive(student)


def test_no_exercise_takes_the_time_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a worker: it answers the cases of E1, in 4 s each. All others take 10 s."""
    limits = []

    class Slow:
        held = ()
        spent = 0.0

        def __init__(self, *_: object) -> None: ...

        def close(self) -> None: ...

        def exchange(self, asked: dict, seconds: float) -> dict:
            limits.append(seconds)
            if seconds <= 0:
                raise AnswerError("none")
            if asked["file"] == "e01":
                self.spent += 4.0
                return {"answer": answer_of("e01", solution("e01"), asked["case"])}
            self.spent += 10.0
            return {"error": "wrong"}

    monkeypatch.setattr(grade, "Worker", Slow)
    keys = ("1", "6", "7", "9", "10", "11", "12")
    write(tmp_path / "all" / "anna", {f"{find(key).file}.py": "x = 1" for key in keys})
    [found] = graded(tmp_path / "all", *keys)
    assert limits == [5, 5, 5, 3, -1, 5, 5, 5, 5, 4]  # of 15 s; of 60 s
    assert [*found.results.values()] == ["answer"] + ["load"] * 5 + ["time"]


def test_a_fence_limits_what_is_taken_on_top() -> None:
    code = "from course.sandbox import limit\nlimit(64 << 20, 9)\nprint(len(bytearray(56 << 20)))\n"
    done = spawn.run("-c", f"{code}bytearray(128 << 20)\n")
    assert done.stdout == f"{56 << 20}\n" and done.stderr.endswith("MemoryError\n")


def test_a_network_that_cannot_be_given_up_is_not_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for status, held in ((-1, []), (0, ["network", "signals"])):
        calls = SimpleNamespace(unshare=lambda _, status=status: status)
        monkeypatch.setattr(sandbox.ctypes, "CDLL", lambda _, calls=calls: calls)
        assert sandbox.isolate() == held


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A script of the shell takes the place of Python, so of all workers."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_a_line_that_is_forged_is_no_answer_and_hides_no_time(
    tmp_path: Path, worker_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a worker whose student's code can write to the grader's pipe itself."""
    forged = ("nan", "inf", "-1", "boom", "", "-", "9" * 400, "\xff")
    answer = '{"answer": 1.0}'
    said = ['0 {"held": []}', *(f"{head} {answer}" for head in forged), f"0.25 {answer}"]
    script = "\n".join(f"echo '{line}'" for line in said)
    stand_in(monkeypatch, tmp_path, f"{script}\nexec cat >/dev/null")
    worker = worker_of()
    for head in forged:
        with pytest.raises(AnswerError, match="no answer"):
            worker.exchange({}, 1.0)
        assert 0 <= worker.spent < float("inf"), head
    before = worker.spent
    assert worker.exchange({}, 1.0) == {"answer": 1.0} and worker.spent >= before + 0.25
    worker.close()
    with pytest.raises(AnswerError):
        worker.exchange({}, 1.0)
    assert worker.process.stdin.closed, "else a traceback comes when it is collected"


def test_two_lines_for_one_case_are_no_answer(worker_of) -> None:
    worker = worker_of(attack(FRAMES.replace("DATA", "said + said")))
    with pytest.raises(AnswerError, match="no answer"):
        worker.exchange(ASKED, grade.CASE)


def test_a_worker_that_does_not_start_says_why(
    tmp_path: Path, worker_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo a traceback >&2\necho the reason >&2\necho >&2\nexit 1"
    stand_in(monkeypatch, tmp_path, script)
    with pytest.raises(UserError, match="^a worker did not start: the reason$"):
        worker_of()


def test_the_first_line_says_what_is_not_protected() -> None:
    def line(*held: list[str]) -> str:
        return grade.protection([Grade(Submission("a"), held=each) for each in held])

    every = list(PROTECTIONS)
    assert "NOT PROTECTED: memory, processes, files, network, signals" in line([])
    assert line(every).endswith("are protected") and "NOT" not in line(every)
    told = line(every, ["memory"])
    assert told.endswith("NOT PROTECTED: processes, files, network, signals")


# ----------------------------------------------------------------- what a student gets back


def test_the_rubric_is_read_from_its_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = feedback.RUBRIC.read_text("utf-8")
    monkeypatch.setattr(feedback, "RUBRIC", tmp_path / "rubric.md")
    feedback.RUBRIC.write_text(text.replace("| E6 | 10 |", "| E6 | 12.5 |"))
    assert feedback.rubric()["6"] == 12.5
    feedback.RUBRIC.write_text(text.replace("| E6 | 10 |", "| E6 | ten |"))
    with pytest.raises(UserError, match=r"no row '\| E6 \| POINTS \|'"):
        feedback.rubric()


NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\ud800\u202e\x1b[2J$title"


def test_a_page_shows_what_a_stranger_wrote_and_obeys_none_of_it(tmp_path: Path) -> None:
    handed = Submission(NASTY, notes=[NASTY])
    results = dict.fromkeys(EXERCISES, "-") | {"6": "passed", "7": "Q1", "8": "refused"}
    one = Grade(handed, results, told={"6": ["E6 passed"], "7": [NASTY]})
    feedback.write_feedback(tmp_path, [one, one], feedback.rubric(), 5)
    first, second = sorted(tmp_path.glob("*.html"))
    ours = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "pre"}
    text = first.read_text("utf-8")
    assert second.read_text("utf-8") == text, "names collide: two pages"
    assert {*re.findall(r"<(\w+)", text)} <= ours | {"table", "tr", "th", "td", "section"}
    assert not re.search(r"<[^>]* on\w+=", text)
    assert "&lt;script&gt;" in text and not re.search("[\u202e\x1b\ud800]", text)
    said = "10 of 95 points|check 7 --seed 5|white-space: pre-wrap;|>not yet: Q1<"
    assert [each for each in said.split("|") if each not in text] == []
    told = feedback.results_json(one, feedback.rubric(), 5, "protected")["tests"]
    passed = [each["name"] for each in told if each["status"] == "passed"]
    assert passed == ["E6 SARATHI's chunk"] and len(told) == len(EXERCISES)


def test_a_page_says_what_happened_as_the_command_line_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(grade, "CASE", 0.5)
    files = {"e01.py": "while True: pass", "e06.py": "if", "e09.py": "import os\nos._exit(0)"}
    files["e13.py"] = "\n"
    files["e12.py"] = "def reorder(*_):\n    raise NotImplementedError\nextend = reorder"
    pack(tmp_path / "Anna.Zip", files | {"six.py": ""})
    [found] = graded(tmp_path, out=tmp_path / "grades.csv")
    said, told = capsys.readouterr()
    assert "\nAnna.Zip: Not read: Anna.Zip...y. No exercise" in said
    assert told == "graded 1 of 1: Anna.Zip, 0\n"
    page = (tmp_path / "grades_feedback" / f"{found.page(1)}.html").read_text("utf-8")
    told = dict(re.findall("<h2>(E[0-9]+)</h2>(.*)", page))
    assert "not yet. Your code has run 0.5 s: does a loop never end?" in told["E1"]
    assert re.search("not yet. e06.py cannot be loaded: SyntaxError: [^<]*</pre></sec", told["E6"])
    assert "not yet. Your code ended its process" in told["E9"]
    assert "E12 the table of a beam search: not written yet" in told["E12"]
    assert "raised" not in page and page.count("not yet: no valid answer") == 2
    assert [found.results[key] for key in ("1", "6", "13")] == ["endless", "syntax", "empty"]
    assert "E1 endless, 1 of 1 submissions: not yet: no answer in time" in said
    assert "<h1>Anna</h1>" in page and "(here for E1)" in page


def test_an_interrupt_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(grade, "harmless", lambda _: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(grade.os, "_exit", sys.exit)
    write(tmp_path / "anna", {"e01.py": "pass"})
    with pytest.raises(SystemExit, match="130"):
        graded(tmp_path, out=tmp_path / "grades.csv")
    assert capsys.readouterr().err == "interrupted\n"


def test_two_students_never_become_one_name() -> None:
    """Long names, and what a terminal obeys or a spreadsheet computes."""
    assert harmless("=1+1") == "'=1+1" and harmless("\x1b[2J") == "\\x1b[2J"
    assert len(harmless("x" * 999)) == 60 and harmless("Zoë") == "Zoë"
    long = "Ana Maria " * 9
    names = [f"{long}{number}{long}" for number in (1234567, 1234568)]
    names += ["a\x1bb", "a\x1cb", "a?b", "=1", "'=1", "山田\u3000太郎", "\udcff", "\udcfe"]
    grades = [Grade(Submission(name), {"e01": "-"}) for name in names]
    rows = list(csv.DictReader(StringIO(grade.table(grades, {"e01": 1.0}, 0, "x"))))
    told = [row["submission"] for row in rows]
    assert len(set(told)) == len({row["page"] for row in rows}) == len(names)
    assert told[:2] == names[:2] and told[-3] == names[-3] and told[-1] == "\\udcfe"


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
    handed_in = ("1", "2", "9", "12")  # with torch and without it
    files = [EXERCISES[key].file for key in handed_in]
    write(tmp_path / "submission", {f"{file}.py": right(file) for file in files})
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


def test_only_what_was_set_is_graded_and_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker gets no other file, and no stub: those of E2 to E4 would need torch."""
    given: list[list[str]] = []

    class Seen(Worker):
        def __init__(self, files: dict[str, str], *more: object) -> None:
            given.append(list(files))
            super().__init__(files, *more)

    monkeypatch.setattr(grade, "Worker", Seen)
    prints = "print('no answer', flush=True)\n"
    files = {f"{name}.py": right(name) + prints for name in ("e01", "e12")}
    files["e06.py"] = named("1").source
    write(tmp_path / "all" / "anna", files)
    stub = (STUBS / "e02.py").read_text("utf-8").replace("\n", "\r\n")
    (tmp_path / "all" / "anna" / "e02.py").write_bytes(stub.encode())
    out = tmp_path / "grades.csv"
    [found] = graded(tmp_path / "all", "2", "6", "9", "12")
    assert found.results == {"2": "stub", "6": "K1", "9": "-", "12": "passed"}
    assert given == [["e06", "e12"]]
    [row] = csv.DictReader(out.read_text("utf-8").splitlines())
    assert list(row)[:7] == ["submission", "2", "6", "9", "12", "passed", "points"]
    page = (tmp_path / "grades_feedback" / row["page"]).read_text("utf-8")
    assert "<b>3 of 23 points</b>" in page and "E1 " not in page
    with pytest.raises(UserError, match="grades.csv' is there already: .* --out, .*ARGS=--force"):
        graded(tmp_path / "all")
    out.unlink()
    with pytest.raises(UserError, match="grades_feedback' is there already: .* --out, "):
        graded(tmp_path / "all")


def test_graded_again_nobody_keeps_an_old_page(tmp_path: Path) -> None:
    """A student who hands in late moves all numbers behind: an old page must not stay beside."""
    grades = [Grade(Submission(name), dict.fromkeys(EXERCISES, "-")) for name in "ac"]
    points = feedback.rubric()
    own = tmp_path / "002_notes.html"
    own.write_text("the lecturer's")
    feedback.write_feedback(tmp_path, grades, points, 5)
    grades.insert(1, Grade(Submission("b"), dict.fromkeys(EXERCISES, "-")))
    feedback.write_feedback(tmp_path, grades, points, 5)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"001_a.html", "002_b.html", "003_c.html", "002_notes.html"} and own.read_text()


def test_the_quiz_says_what_the_cost_model_predicts() -> None:
    cost = CostModel(MODELS["llama-13b"], GPUS["a6000"])
    quiz = (ROOT / "course/instructor/quiz.md").read_text("utf-8")
    question, answers = quiz.split("\n## Answers\n")
    for text, decodes, context in ((question, 1, 256), (answers, 4, 256), (answers, 4, 2048)):
        seconds = cost.seconds(make_batch(decodes=decodes, context=context))
        assert f" {1e3 * seconds:.0f} ms" in text
