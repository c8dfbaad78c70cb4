"""A client in a process of its own, for serve_overhead.py and serve_peer.py. It needs no torch.

It reads a line of JSON, sends its bodies to the server all at once, and answers with a line when
the last answer is whole: {"seconds", "tokens", "events"}. If the line has arrivals, each body is
sent at its time, and the answer tells of each stream: {"streams"}. Then it waits for the next line.
"""

import asyncio
import json
import sys
import time

from experiments.lib.clients import streamed

HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\nConnection: close\r\n\r\n"
)


async def ask(port: int, body: dict) -> tuple[int, int]:
    """Output tokens of one answer, and in how many events they came. Raises on any error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    writer.write(HEAD.format(len(data)).encode() + data)
    answer = await reader.read()  # to its end: the server closes
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(answer.decode())
    if not body["stream"]:
        return json.loads(rest)["usage"]["completion_tokens"], 0
    events = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]", "the stream has no end"
    return json.loads(events[-2])["usage"]["completion_tokens"], len(events) - 2


async def ask_all(port: int, bodies: list[dict]) -> dict[str, float]:
    begin = time.perf_counter()
    found = await asyncio.gather(*[ask(port, body) for body in bodies])
    seconds = time.perf_counter() - begin
    tokens, events = [sum(column) for column in zip(*found, strict=True)]
    return {"seconds": seconds, "tokens": tokens, "events": events}


async def ask_over_time(port: int, bodies: list[dict], arrivals: list[float]) -> dict[str, list]:
    """Send body i at arrivals[i] s. Of each stream: (seconds, text) of its events, in order.

    The seconds count from the first moment of all, as arrivals do. Raises on any error.
    """
    begin = time.perf_counter()

    async def one(body: dict, arrival: float) -> list[tuple[float, str]]:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        stream = await streamed(("127.0.0.1", port), body)
        if stream.error:
            raise RuntimeError(stream.error)
        moments = [moment - begin for moment in stream.moments]
        return list(zip(moments, stream.pieces, strict=True))

    pairs = zip(bodies, arrivals, strict=True)
    return {"streams": await asyncio.gather(*[one(*pair) for pair in pairs])}


if __name__ == "__main__":
    for line in sys.stdin:
        question = json.loads(line)
        run = ask_over_time if "arrivals" in question else ask_all
        print(json.dumps(asyncio.run(run(**question))), flush=True)
