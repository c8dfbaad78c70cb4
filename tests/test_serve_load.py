"""serve.py under load: experiments/serve_load.py, its smaller case, with nothing lost or mixed."""

from argparse import Namespace

import pytest

from experiments import serve_load

pytestmark = pytest.mark.slow


def test_load() -> None:
    """No token is lost, mixed or there twice; no slot is lost; and every accepted stream ends."""
    options = Namespace(quick=True, seconds=5, requests=600, seed=1)
    found = {name: dict(rows) for name, rows in serve_load.measure(options)}
    for name, rows in found.items():
        assert rows["wrong"] == rows["cut"] == 0, name
    streams, hung, slow, end = found.values()
    assert streams["streams, right"] >= serve_load.QUICK_STREAMS and streams["refused"] == 0
    assert hung["hung up early"] == 200 and hung["the others: right"] == 400
    assert hung["requests left in the engine"] == hung["share of the cache left in use"] == 0
    assert float(hung["after"]) < float(hung["server's memory, MB: before"]) + 100
    assert slow["right"] == 6 * serve_load.MEASURED
    accepted = end["accepted, and not at their end at kill -TERM"]
    assert end["right"] >= accepted > 0 == end["exit status"]
    assert end["right"] + end["refused with 503"] == end["streams asked for"]
