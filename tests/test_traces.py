"""What a run leaves for a paper: a table of requests, metrics by tag, a trace in little memory."""

import csv
import json
import tracemalloc
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from shared import ran

import plan
from batch import Request
from command.checks import UserError
from command.cli import write_table
from configs import MODELS
from experiments import serve_latency
from experiments.lib.papers import MISTRAL, Recorded
from experiments.lib.rows import read_rows
from more.apart.simulate import simulate_fleet
from more.loading.tables import read_table
from more.serving.capacity import Deployment
from more.serving.lengths import TAG, length_error, tag_lengths
from more.serving.traffic import Uniform, at_rate, gamma, make_requests, poisson, read_trace
from more.simulate import simulate
from scheduler import make_scheduler
from timeline import COLUMNS, Life, Trace

EXAMPLES = Path(__file__).parent.parent / "examples"
USERS = EXAMPLES / "users.csv"
SIZES = {"max_batch_size": 4, "chunk_size": 128}
SHORT = Uniform(20, 300), Uniform(1, 30)

pytestmark = pytest.mark.usefixtures("sketches")


def tagged(count: int = 60, rate: float = 10.0) -> list[Request]:
    requests = make_requests(poisson(count, rate), *SHORT)
    for request in requests:
        request.tags = {"user": ("ann,", "bob", "eve")[request.request_id % 3]}
    return requests


# ---------------------------------------------------------------------------------- tables and tags


def test_a_table_has_a_row_for_each_request(tmp_path: Path) -> None:
    """Each time as `Life` has it, to the last digit."""
    trace = simulate(tagged(), policy="sarathi_serve", cache_tokens=700, **SIZES)
    assert sum(life.preemptions for life in trace.lives.values()), "a preemption is in it"
    write_table(tmp_path / "run.csv", trace.rows())
    with open(tmp_path / "run.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*COLUMNS, "tag_user"] and len(rows) == 60
    for row in rows:
        life = trace.lives[int(row["request"])]
        assert float(row["ttft"]) == life.ttft and float(row["latency"]) == life.latency
        assert float(row["longest_tbt"] or "0") == max(life.tbt, default=0.0)
        assert int(row["preemptions"]) == life.preemptions and row["ended"] == "1"
        assert row["policy"] == "sarathi_serve" and row["tag_user"] == life.tags["user"]
    write_table(tmp_path / "run.csv", trace.rows())  # ours may be replaced


TEXTS = {
    "=1+1": "'=1+1", "+1+1": "'+1+1", "-1+1": "'-1+1", "@SUM(A1)": "'@SUM(A1)", " =1": "' =1",
    "'=1": "''=1", "\uff1d1": "'\uff1d1", "\t=1": "\\t=1", "\x1b[2J": "\\x1b[2J",
    "-1": "-1", "+2.5e3": "+2.5e3", "ann,": "ann,", "'t Hooft": "'t Hooft", "": "",
    "a\nb": "a\\nb", "C:\\x": "C:\\x", "\U000e0001": "\\U000e0001",
}  # fmt: skip


def test_no_spreadsheet_computes_what_a_client_sent(tmp_path: Path) -> None:
    lives = {i: Life(i, 1.0, 5, 2.0, tags={"user": text}) for i, text in enumerate(TEXTS)}
    write_table(path := tmp_path / "run.csv", Trace(lives=lives).rows())
    with open(path, newline="", encoding="utf-8") as file:
        assert [row["tag_user"] for row in csv.DictReader(file)] == list(TEXTS.values())


# ------------------------------------------------------------------------- what prompts share

CACHED = {"model": "llama3.1-8b", "gpu": "h100", "policy": "sarathi_serve", "chunk_size": 512}
CACHED |= {"cache": "paged", "prefix_caching": True}


def hits(requests: list[Request], layout: str, **options: object) -> list[int]:
    """Tokens of each prompt that another has left in the cache of one or several engines."""
    if layout:
        ways = {"router": "by_prefix", "layout": layout}
        trace = simulate_fleet(requests, **ways, **CACHED, **options).requests
    else:
        trace = simulate(requests, **CACHED, **options)
    return [trace.lives[i].cached for i in sorted(trace.lives)]


# two prompts of 1,800 tokens, with 2 of 4 blocks in common; one that is all of another; an end that
# is alike below another beginning; and nothing known
STATED = [[7, 8, 9, 2**70], [7, 8, 1, 2], [7, 8, 9, 2**70], [5, 8, 9, 2**70], None, None]


@pytest.mark.parametrize("size, most", {16: 1792, 1: 1799, 1000: 1000}.items())
@pytest.mark.parametrize("layout", ["", "2", "1p1d"])
def test_mooncakes_blocks_are_shared(tmp_path: Path, layout: str, size: int, most: int) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 1800, "output_length": 9}
    lines = [
        json.dumps(row | {"timestamp": 1e4 * i} | ({"hash_ids": ids} if ids else {}))
        for i, ids in enumerate(STATED)
    ]
    path.write_text("\n".join(lines))
    found = hits(at_rate(read_trace(path), 0.5), layout, block_size=size)
    assert found == [0, 1024 // size * size, most, 0, 0, 0]


# ------------------------------------------------------------------ whose file, and in which unit

LENGTHS = {"input_length": 33, "output_length": 9}
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "turn": 1, "type": "text"}
MS = "if they are ms, rename it timestamp_ms"
SECONDS = "if they are seconds, rename it timestamp_s"
STAMPS = [  # what else a row has, its arrivals, how the last of them is read, and what is said
    (LENGTHS | BAILIAN, "timestamp", [0, 2.5, 10], 10, "Bailian: seconds"),
    (LENGTHS | BAILIAN, "timestamp", [0, 30, 60], 60, "Bailian: seconds"),
    (LENGTHS | {"hash_ids": [1, 2, 3]}, "timestamp", [0, 30, 60], 60, "Bailian: seconds"),
    (LENGTHS, "timestamp", [0.0, 0.5, 90.5], 90.5,
     f"guidellm: seconds, because they are not all whole numbers; {MS}"),
    (LENGTHS, "timestamp", [0, 1, 2], 2,
     f"guidellm: seconds, because they are less than 20 apart on average; {MS}"),
    (LENGTHS | {"hash_ids": [1]}, "timestamp", [0, 9.5, 20], 0.02, "Mooncake: ms"),
    (LENGTHS, "timestamp", [0, 30, 60], 0.06,
     f"Mooncake: ms, because they are whole numbers, 20 or more apart on average; {SECONDS}"),
    (LENGTHS, "timestamp", [1.7e12, 1.7e12 + 2], 0.002,
     f"Mooncake: ms, because they are too large for seconds; {SECONDS}"),
    (LENGTHS, "timestamp_ms", [1, 2, 3.5], 0.0025, "Mooncake: ms"),
    (LENGTHS, "timestamp_s", [0, 300, 900], 900, "Mooncake: seconds"),
    (LENGTHS, "timestamp", ["2024-01-01", "2024-01-02"], 86400,
     "Mooncake: dates and times (without a zone: UTC)"),
]  # fmt: skip


@pytest.mark.parametrize("rest, name, stamps, last, told", STAMPS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_three_formats_have_one_name_and_two_units(
    rest, name, stamps, last, told, suffix, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Where the names cannot tell, a rule does. The line says what of it, and what overrules it."""
    rows = [rest | {name: stamp} for stamp in stamps]
    path = tmp_path / f"trace.{suffix}"
    if suffix == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "\n".join(map(json.dumps, rows))
        path.write_text(lines if suffix == "jsonl" else json.dumps(rows))
    assert read_trace(path)[-1].arrival == pytest.approx(last)
    whose, _, unit = told.partition(": ")
    sizes = "input_length, output_length"
    said = f"{path}: read as {whose}'s format; tokens: {sizes}; {name} in {unit}\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "header, unit",
    [
        ("our own format: arrival,prompt_tokens,output_tokens", "seconds"),
        ("our own format: arrival_ms,prompt_tokens,output_tokens", "ms"),
        ("DistServe's format: arrival_s,prompt_tokens,output_tokens", "seconds"),
        ("BurstGPT's format: Timestamp,Request tokens,Response tokens", "seconds"),
        (
            "Vidur's and Sarathi-Serve's format: arrived_at,num_prefill_tokens,num_decode_tokens",
            "seconds",
        ),
        ("a mix of formats: arrival,num_prefill_tokens,output_tokens", "seconds"),
    ],
)
def test_each_format_is_named(
    header: str, unit: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whose, _, names = header.partition(": ")
    (path := tmp_path / "trace.csv").write_text(f"{names}\n2,30,4\n4,50,6\n")
    found = [(each.arrival, len(each.prompt), each.max_tokens) for each in read_trace(path)]
    assert found == [(0, 30, 4), (0.002 if unit == "ms" else 2, 50, 6)]
    arrival, _, sizes = names.partition(",")
    said = f"{path}: read as {whose}; tokens: {sizes.replace(',', ', ')}; {arrival} in {unit}\n"
    assert capsys.readouterr().out == said


def test_a_limit_stands_beside_the_true_length(tmp_path: Path) -> None:
    """Which is shorter: only the run knows it."""
    (path := tmp_path / "trace.csv").write_text(
        "arrival,prompt_tokens,output_tokens,max_tokens,user\n0,30,4,100,ann\n9,50,6,6,bob\n"
    )
    found = at_rate(read_trace(path), 1.0)
    assert [(each.max_tokens, each.ends_after) for each in found] == [(100, 4), (6, 6)]
    assert found[0].tags == {"user": "ann"}, "a limit is no tag"
    assert [len(life.tokens) for life in simulate(found).lives.values()] == [4, 6]


def test_bailians_blocks_have_16_tokens(tmp_path: Path) -> None:
    row = BAILIAN | {"input_length": 40, "output_length": 9}
    lines = [json.dumps(row | {"timestamp": 9 * i, "hash_ids": [5, i, 6]}) for i in (7, 8)]
    (path := tmp_path / "trace.jsonl").write_text("\n".join(lines))
    assert hits(read_trace(path), "", block_size=16) == [0, 16]


def test_chats_by_session(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Turns are in order of arrival, whatever the order of the lines. The name is a tag, too."""
    lines = "2,30,5,a", "1,10,5,a", "1.5,30,5,b"
    (path := tmp_path / "chats.csv").write_text(
        "\n".join(["arrival,prompt_tokens,output_tokens,session_id", *lines])
    )
    first, other, second = read_trace(path)
    assert "; turns of a chat by session_id; " in capsys.readouterr().out
    assert second.prompt[:10] == first.prompt[:] and len(second.prompt) == 30
    assert not {*other.prompt} & {*second.prompt} and other.tags == {"session_id": "b"}


def test_a_batch_of_openais_comes_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its `created` is when an answer was made. Requests that failed are left out."""
    for names in (("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")):
        usage = dict(zip(names, (22, 2), strict=True)) | {"details": {"cached": 0}}
        bodies = [{"created": 1711652795 + 60 * i, "usage": usage} for i in range(2)]
        bodies.append({"error": {"message": "no"}})
        answers = [{"status_code": 200, "body": body} for body in bodies] + [None]
        rows = [{"custom_id": f"r{i}", "response": each} for i, each in enumerate(answers)]
        (path := tmp_path / "output.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found = [
            (r.arrival, len(r.prompt), r.max_tokens, r.tags["custom_id"]) for r in read_trace(path)
        ]
        assert found == [(0, 22, 2, "r0"), (0, 22, 2, "r1")]
        said = capsys.readouterr().out
        assert "left out 2 of 4" in said and "read as output of OpenAI's Batch API" in said
        assert "no arrivals, so all requests come at once" in said


# ----------------------------------------------------------------------------- lists of any size


@pytest.mark.parametrize("block", [1, 7, 64, 2**20])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_objects_are_read_in_blocks_of_any_size(
    suffix: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also letters of several bytes, brackets in texts, and blanks between."""
    rows = [{"a": ']},[{ \\"é€𝄞'[: i % 16], "b": {"c": [i, {"d": None}]}} for i in range(40)]
    texts = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows)]
    text = "\n".join(texts) if suffix == "jsonl" else "\ufeff [ " + " ,\n ".join(texts) + "\t]\n\n"
    (path := tmp_path / f"mine.{suffix}").write_text(text, encoding="utf-8")
    monkeypatch.setattr("command.cli.BLOCK", block)
    monkeypatch.setattr("more.loading.tables.BLOCK", block)
    header, lines = read_table(path, 10**6)
    assert header == ["a", "b.c"] and [place for place, _ in lines][::39] == (
        ["row 1", "row 40"] if suffix == "json" else ["line 1", "line 40"]
    )
    assert [(a, json.loads(c)) for _, (a, c) in lines] == [(r["a"], r["b"]["c"]) for r in rows]


def test_sharegpt_takes_the_memory_of_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list, as it is published. No text stays, and no limit on what stays is met."""
    turns = [{"from": "human", "value": "why " * 500}, {"from": "gpt", "value": "so " * 400}]
    one = json.dumps({"id": "x", "conversations": turns})
    (path := tmp_path / "ShareGPT.json").write_text(f"[{', '.join([one] * 1000)}]")
    monkeypatch.setattr("command.cli.BLOCK", 2**16)
    monkeypatch.setattr("more.loading.tables.BLOCK", 2**16)
    monkeypatch.setattr("more.serving.traffic.MOST_JSON", 10**5)
    tracemalloc.start()
    found = read_trace(path, lambda: lambda text: text.count(" "))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {(len(each.prompt), each.max_tokens) for each in found} == {(500, 400)}
    assert len(found) == 1000 and most < path.stat().st_size / 2


@pytest.mark.parametrize("name, key", [("conversation", "content"), ("items", "value")])
def test_other_names_of_sharegpts_texts(name: str, key: str, tmp_path: Path) -> None:
    """With lengths, the same names are tags. `response` and `usage` alone are no lengths."""
    row = {name: [{key: "so it is"}, {key: "why"}], "response": "why", "usage": {"model": "m"}}
    lengths = {"usage": {"prompt_tokens": 5, "completion_tokens": 6}}
    tags = {"response": "why", "usage.model": "m"}
    kept = {name: json.dumps(row[name]), "response": "why"}
    for more, size, left in ({}, (3, 1), tags), (lengths, (5, 6), kept):
        (path := tmp_path / "mine.jsonl").write_text(json.dumps(row | more))
        (found,) = read_trace(path, lambda: lambda text: len(text.split()))
        assert (len(found.prompt), found.max_tokens, found.tags) == (*size, left)


def test_what_is_too_long_for_an_engine_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A figure and a plan follow one rule; `simulate` names it."""
    path = tmp_path / "trace.csv"
    small = Deployment("llama-13b")
    path.write_text("arrival,prompt_tokens,output_tokens\n0,9,9\n1,4000,97\n2,4000,98\n")
    with pytest.raises(UserError, match="request 2: .*; more.loading.requests.short_enough leaves"):
        simulate(read_trace(path), small.model)
    left = f"left out: 1 of 3 requests, which are longer than {MODELS[small.model].max_length}"
    for engines in ((small,), (MISTRAL, small)):
        data = Recorded(path, engines=engines)
        assert len(small.serve(data.requests(9, 1.0), "sarathi_serve", 512).finished) == 2
        assert left in capsys.readouterr().out
    assert len(Recorded(path, engines=(MISTRAL,)).every) == 3
    asked = ["--requests-file", path, "--model", small.model, "--tbt-slo", "200"]
    question, _ = plan.prepare(plan.read_options(map(str, asked)))
    assert len(question.traffic.prompts) == 2 and left in capsys.readouterr().out


# ------------------------------------------------------------------------------ nothing is kept


@pytest.mark.parametrize("policy", ["sarathi_serve", "request_level"])
@pytest.mark.parametrize("cache_tokens", [None, 700])
def test_one_by_one_is_the_same_run(policy: str, cache_tokens: int | None) -> None:
    """Also where several requests arrive at once."""
    options = {"policy": policy, "cache_tokens": cache_tokens, **SIZES}

    def made() -> list[Request]:
        arrivals = [round(each, 1) for each in gamma(60, 10.0, 3.0)]
        assert any(one == other for one, other in pairwise(arrivals))
        return make_requests(arrivals, *SHORT)

    kept = simulate(made(), **options)
    lives = []
    passing = simulate(iter(made()), done=lives.append, **options)
    assert {life.request_id: life for life in lives} == kept.lives
    assert passing.schedules >= kept.schedules > 0, "what is kept jumps"
    assert not (passing.lives or passing.iterations or passing.finished or passing.preempted)


def test_a_request_is_made_when_the_one_before_it_arrives() -> None:
    drawn = []
    ended = []

    def made() -> Iterator[Request]:
        for i in range(50):
            drawn.append(i)
            yield Request(i, range(100), 5, arrival=10.0 * i)

    def done(life: Life) -> None:
        ended.append(life.request_id)
        assert len(drawn) <= len(ended) + 1

    simulate(made(), done=done)
    assert ended == drawn == list(range(50))


# --------------------------------------------------------------------------- from file to figure


def test_who_was_away_is_lifted() -> None:
    """To the least of those who wait; if nobody does, to who left the queue last (VTC, Alg. 2)."""
    scheduler = make_scheduler("vtc", 2, 100)
    ids = count()

    def come(user: str, prompt: int = 10) -> None:
        scheduler.add(Request(next(ids), range(prompt), 5, tags={"user": user}))

    def run() -> None:
        batch = scheduler.schedule(0.0)
        scheduler.update(batch, [7] * len(batch.sampled))

    come("ann")
    run()
    assert scheduler.served == {"ann": 12} and not scheduler.waiting
    come("bob")
    assert scheduler.served["bob"] == 12, "ann's request has left the queue, and it still runs"
    run()
    assert scheduler.served == {"ann": 14, "bob": 24}
    come("eve", 50), come("ann"), come("cem")
    assert scheduler.served == {"ann": 24, "bob": 24, "eve": 24, "cem": 24}
    scheduler.served["eve"] = 100
    for request in [each for each in scheduler.waiting if each.tags["user"] != "eve"]:
        scheduler.cancel(request)
    come("dan")
    assert scheduler.served["dan"] == 100, "eve alone waits"


def test_the_shortest_output_is_next_and_who_tells_none_is_last() -> None:
    """A gap in a column tells none. (What nobody can read is refused: tests/test_policies.py.)"""
    told = ("900", "7", "", "30.0", None)
    requests = [
        Request(i, [1], 9, tags={} if tag is None else {TAG: tag}) for i, tag in enumerate(told)
    ]
    trace = simulate(requests, policy="srpt:0", max_batch_size=1)
    assert [request for request, _ in trace.finished] == [1, 3, 0, 2, 4]


@pytest.mark.usefixtures("sketches")
def test_a_figure_by_tag(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """With the requests, the policy, the model and the GPU of a user."""
    flags = "--model llama3.1-8b --gpu h100 --tp 1 --max-batch-size 4 --by user --rate 9 20 --quick"
    files = ("--policy", "vtc", "--requests-file", USERS, "--out", tmp_path)
    ran(serve_latency, *flags.split(), *files)
    name = tmp_path / "quick" / "serve_latency-users-llama3.1-8b-h100-tp1-B4-vtc-rate9-rate20"
    rows = read_rows(name.with_name(name.name + ".csv"))
    assert name.with_name(name.name + ".png").exists()
    own = rows.where(policy="vtc", rate=20)
    assert [row.get("tag") for row in own] == [None, "user=ann", "user=bob", "user=eve"]
    assert set(rows.column("model")) == {"llama3.1-8b"} and set(rows.column("hardware")) == {"h100"}
    figure = serve_latency.STUDY.picture(rows)
    plt.close(figure)
    assert [axes.get_title() for axes in figure.axes] == 2 * ["all", *own.column("tag")]
    capsys.readouterr()
    serve_latency.by_policy(rows)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rate", "policy", "C", "all", *own.column("tag")] in table
    line = ["20", "vtc", "512", *(f"{row['median TTFT']:#.3g}" for row in own)]
    assert line in table, "a user beside the other"


# -------------------------------------------------------------------------------- predicted lengths


def test_lengths_are_predicted_with_a_stated_error() -> None:
    requests = make_requests(poisson(2000, 1.0), *SHORT)
    errors = {}
    for name in ("oracle", "classes=0.9", "classes=0.5", "constant=15"):
        assert tag_lengths(requests, name) == requests
        errors[name] = length_error(requests)
    pair = tag_lengths([Request(0, [1], 10), Request(1, [1], 20)], "constant=15")
    assert length_error(pair) == pytest.approx(1 / 3), "5 tokens of 15, on average"
    assert errors["oracle"] == 0 < errors["classes=0.9"] < errors["classes=0.5"]
    assert {request.tags[TAG] for request in requests} == {"15"}
    tag_lengths(requests, "oracle")
    assert all(int(request.tags[TAG]) == request.max_tokens for request in requests)
