"""A client in a process of its own, for experiments/serve_overhead.py. It needs no torch.

It reads a line of JSON, sends its bodies to the server all at once, and answers with a line when
the last answer is whole: {"seconds", "tokens", "events"}. Then it waits for the next line.
"""

import asyncio
import json
import sys
import time

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


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(ask_all(**json.loads(line)))), flush=True)
