"""experiments/serve_peer.py, small: two servers of ours, and what the client makes of streams."""

import sys
from pathlib import Path

import pytest
from conftest import call
from watch import alive, wait_for

from experiments import serve_peer
from experiments.lib import peers
from experiments.lib.peers import Server
from experiments.lib.rows import SPREAD, read_rows
from experiments.serve_peer import Found, Run, make_load, run_load
from timeline import Life


@pytest.mark.slow
def test_each_server_is_measured_at_each_load(tmp_path: Path) -> None:
    done = call(serve_peer, "--quick", "--seconds", 1, "--out", tmp_path)
    assert done.returncode in (0, None), done.stderr
    path = tmp_path / "serve_peer_ours"
    rows = read_rows(path.with_suffix(".csv"))
    burst = rows.one("burst", server=serve_peer.OURS)
    names = serve_peer.OURS, serve_peer.AGAIN
    cases = [(name, load) for load in serve_peer.SHARES for name in names]
    assert [(row["server"], row["load"]) for row in rows.where("load")] == cases
    for row in rows.where("load"):
        for latency in serve_peer.LATENCIES:
            ends = {row[latency + end] for end in SPREAD}
            assert ends == {row[latency]} and row[latency] >= 0  # of one round
        assert row["rate"] == pytest.approx(row["load"] * burst, rel=1e-4)
        assert row["throughput"] > 0
    same, of = done.stdout.split("first tokens that are equal: ")[1].split("\n")[0].split(" of ")
    assert same == of and int(of) >= serve_peer.FEWEST
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_times_of_a_stream_by_hand() -> None:
    """Tokens of one event come together: 0.5, 0.7 and 0.7 s, after an arrival at 0.1 s."""
    bodies, arrivals = [{"prompt": [1, 2], "max_tokens": 3}], [0.1]
    server, events = Server("it", 1), [(0.5, " 7"), (0.7, " 8 9")]
    run = run_load(lambda *_, **__: {"streams": [events]}, server, (bodies, arrivals))
    assert run.texts == [" 7 8 9"] and run.seconds == 0.7 and run.output_tokens == 3
    found = Found("it", 0.3, 1.0, [run])
    assert found.spread("TTFT", "median") == pytest.approx((400, 400, 400))
    assert found.spread("TBT", "median") == pytest.approx((100, 100, 100))
    assert found.spread("normalised latency", "P99") == pytest.approx((200, 200, 200))
    assert found.throughput == pytest.approx(3 / 0.7)
    with pytest.raises(serve_peer.UserError, match="it gave 1 tokens where 3 were asked"):
        run_load(lambda *_, **__: {"streams": [events[:1]]}, server, (bodies, arrivals))


def test_a_round_counts_with_all_its_tokens() -> None:
    """A value is over the requests of all rounds, its range over the rounds."""
    runs = [
        Run([Life(0, 0.0, 1, 0.0, [ttft]) for ttft in ttfts], [], 1.0)
        for ttfts in ([0.1, 0.2, 0.3], [0.4])
    ]
    assert Found("it", 0.3, 1.0, runs).spread("TTFT", "median") == pytest.approx((250, 200, 400))


def test_a_load_is_the_same_at_every_rate_but_for_its_arrivals() -> None:
    slow, fast = [make_load(5, rate, 3, 100, quick=True) for rate in (1.0, 4.0)]
    assert slow[0] == fast[0] != make_load(5, 1.0, 4, 100, quick=True)[0]
    assert slow[1] == pytest.approx([4 * moment for moment in fast[1]])
    assert make_load(5, float("inf"), 3, 100, quick=True) == (slow[0], [0.0] * 5)


def test_a_server_that_ends_says_why() -> None:
    command = [sys.executable, "-c", "print('first', flush=True); raise SystemExit('no room')"]
    with (
        pytest.raises(serve_peer.UserError, match="it does not answer: no room"),
        peers.served("it", peers.free_port(), command),
    ):
        pass


def test_all_processes_of_a_server_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's server has processes of its own."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"print(child.pid, file=open({str(file)!r}, 'w'), flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(peers, "answers", lambda port: file.exists() and file.read_text())
    with peers.served("it", 1, [sys.executable, "-c", code]) as server:
        assert server == Server("it", 1)
        child = int(file.read_text())
        assert alive(child)
    wait_for(lambda: not alive(child))
