"""OpenAI's HTTP API over a runner: a body comes in, requests go to the engine, tokens come back.

    POST /v1/completions, /v1/chat/completions    text; with "stream": true, token by token
    GET  /v1/models, /v1/models/NAME              the model that is served
    GET  /health                                  whether it is alive, and how many it serves

The engine's thread hands over all tokens of an iteration together, in `Api.deliver`. Everything
else here runs in asyncio's thread.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

import batch
from command.checks import MOST_SEED, WHY_BROKEN, UserError, shown
from command.cli import one_line
from more.loading.hub import text_of
from more.web.runner import Delta, Full, Runner, Stopping, why
from more.web.schemas import Body, Chat, Completion, Refused, read, read_json
from more.web.text import Words, dumps

DEFAULT_TOKENS = 16  # of a completion without max_tokens, as OpenAI has it; a chat may go on
EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
END = b"data: [DONE]\n\n"
JSON = "application/json"
LONGEST_HEADER = 400  # letters

log = logging.getLogger("nano-sarathi")


class Choice:
    """One choice of an answer, and the engine's request that makes it.

    text: what is not sent yet. count: its tokens. reason: why it has ended.
    """

    def __init__(self, answer: "Answer", index: int, request: batch.Request, words: Words):
        self.answer = answer
        self.index = index
        self.request = request
        self.words = words
        self.text = []
        self.count = 0
        self.reason: str | None = None
        self.fault: Refused | None = None  # why it has no text

    def take(self, delta: Delta) -> None:
        """Add the request's next token, or its end."""
        if self.reason is not None:  # a stop string has ended it; the engine did not know yet
            return
        reason = delta.finish_reason
        stop_id = delta.finish_reason == "stop"
        self.answer.policies.pop(delta.policy, None)  # the newest is the last
        self.answer.policies[delta.policy] = None
        if delta.token == batch.BROKEN:
            raise Refused(500, WHY_BROKEN, kind="server_error", code="no_numbers")
        if delta.refused:
            raise Refused(400, delta.refused, code="refused_by_policy")
        if delta.token is not None:
            self.count += 1
            if not stop_id:  # the token that ends a text does not belong to it
                self.text.append(self.words.add(delta.token))
        if reason is not None and not self.words.stopped:
            self.text.append(self.words.end())
        if self.words.stopped:
            if reason is None:
                self.answer.api.runner.cancel(self.request)
            reason = "stop"
        self.reason = reason
        self.answer.wake(self)

    def hang_up(self, reason: str = "abort") -> None:
        """Cancel the request: nobody waits for it any more."""
        if self.reason is None:
            self.answer.api.runner.cancel(self.request)
            self.reason = reason
            self.answer.wake(self)


class Answer:
    """All choices of one HTTP request, a completion or a chat."""

    def __init__(self, api: "Api", body: Body, request_id: str, log: dict):
        self.api = api
        self.body = body
        self.log = log
        self.is_chat = isinstance(body, Chat)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}"
        self.created = int(time.time())
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        # news: choices with something new, in order
        self.fresh = asyncio.Event()
        self.news = {}
        self.policies: dict[str, None] = {}  # that gave it its tokens

    def wake(self, choice: Choice) -> None:
        self.news[choice] = None
        self.fresh.set()

    @property
    def served_by(self) -> str:
        """The policies that gave it its tokens so far; before the first one, what is in force."""
        return "; ".join(self.policies) or self.api.runner.in_force

    @property
    def usage(self) -> dict[str, int]:
        output = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }

    @asynccontextmanager
    async def attended(self, receive: Receive) -> AsyncIterator[None]:
        """If the client goes away inside this block, its requests end at the next step."""
        watch = asyncio.create_task(self.hang_up_with(receive))
        try:
            yield
        finally:
            watch.cancel()
            for choice in self.choices:
                choice.hang_up()
            self.log["tokens"] = self.prompt_tokens, self.usage["completion_tokens"]

    async def hang_up_with(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.log["gone"] = True
        for choice in self.choices:
            choice.hang_up()

    async def changes(self) -> AsyncIterator[Choice]:
        """Each choice when it has something new, until all have ended."""
        while self.news or any(choice.reason is None for choice in self.choices):
            await self.fresh.wait()
            self.fresh.clear()
            news = self.news
            self.news = {}
            for choice in news:
                yield choice

    def failure(self) -> Refused | None:
        """Why this answer is incomplete; None: it is complete."""
        reasons = {choice.reason for choice in self.choices}
        if fault := next((choice.fault for choice in self.choices if choice.fault), None):
            return fault
        if "error" in reasons:
            last = next(reversed(self.policies))
            told = f"the engine failed under the policy {last}, and was restarted"
            return Refused(
                500,
                f"{told}: {self.api.runner.error}",
                kind="server_error",
                code="engine_failed",
                headers={"x-should-retry": "false"},  # else a client would hide it by asking again
            )
        if "reject" in reasons:
            return Refused(429, "the policy refuses to serve this request", code="rejected")
        if "abort" in reasons:
            return turned_away(Stopping())
        return None

    # ---- whole

    async def whole(self, receive: Receive) -> Response:
        async with self.attended(receive):
            async for _ in self.changes():
                pass
        if failure := self.failure():
            raise failure
        choices = [
            self.shown(each, self.said("".join(each.text)), each.reason) for each in self.choices
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return Response(dumps(self.head(kind, choices) | {"usage": self.usage}), media_type=JSON)

    def said(self, text: str) -> dict:
        if self.is_chat:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"text": text}

    def piece(self, text: str) -> dict:
        if self.is_chat:
            return {"delta": {"content": text} if text else {}}
        return {"text": text}

    def shown(self, choice: Choice, said: dict, reason: str | None) -> dict:
        return {"index": choice.index, **said, "logprobs": None, "finish_reason": reason}

    def head(self, kind: str, choices: list[dict]) -> dict:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.api.name,
            "system_fingerprint": self.served_by,
            "choices": choices,
        }

    # ---- as it comes

    async def stream(self, receive: Receive) -> AsyncIterator[bytes]:
        """Server-sent events. All tokens that wait to be sent go into one event."""
        async with self.attended(receive):
            begun = set()
            async for choice in self.changes():
                # with its first token, as in vLLM: load generators take it for that
                if self.is_chat and choice not in begun:
                    first = {"delta": {"role": "assistant", "content": ""}}
                    yield self.event(choice, first, None)
                begun.add(choice)
                text = "".join(choice.text)
                choice.text = []
                if text or choice.reason in ("stop", "length"):
                    yield self.event(choice, self.piece(text), choice.reason)
            if failure := self.failure():
                yield line_of(failure.json())
            elif self.body.with_usage:
                yield line_of(self.head(self.part, []) | {"usage": self.usage})
            yield END

    @property
    def part(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def event(self, choice: Choice, said: dict, reason: str | None) -> bytes:
        event = self.head(self.part, [self.shown(choice, said, reason)])
        if self.body.usage_each_time:
            event["usage"] = self.usage
        elif self.body.with_usage:
            event["usage"] = None
        return line_of(event)


def line_of(event: dict) -> bytes:
    return b"data: " + dumps(event) + b"\n\n"


class Events(Response):
    """A streamed answer: the status at once, the rest piece by piece."""

    def __init__(self, answer: Answer):
        self.answer = answer
        self.status_code = 200
        self.background = None
        self.init_headers(EVENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self.answer.stream(receive)) as stream:
            async for event in stream:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Api:
    """What the endpoints share.

    name: of the model, as clients call it. lenient: leave out parameters that are not known, or not
    supported. loop: asyncio's; it is set before the first request.
    """

    def __init__(self, engine, name: str, lenient: bool = False):
        self.engine = engine
        self.name = name
        self.lenient = lenient
        self.tokenizer = engine.tokenizer
        self.started = int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None
        self.runner: Runner | None = None

    def deliver(self, news: list[tuple[Choice | None, Delta]]) -> None:
        """Called in the engine's thread: wakes asyncio once for all streams."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(hand_out, news)

    # ---- requests

    async def answer(self, request: Request, body: Body) -> Response:
        self.check_model(body.model)
        self.check_number(body)
        log = request.scope.get("log", {})
        request_id = request.scope.get("id", "none")
        answer = Answer(self, body, request_id, log)
        prompts = await self.prompts(body)
        answer.prompt_tokens = sum(map(len, prompts))
        requests = self.requests(body, prompts)
        for index, each in enumerate(requests):
            words = Words(self.decode, body.stops)
            answer.choices.append(Choice(answer, index, each, words))
        self.runner.submit(requests, answer.choices)
        return Events(answer) if body.stream else await answer.whole(request.receive)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            raise Refused(
                404,
                f"no model {shown(name)} is served here: use {self.name!r}",
                "model",
                "model_not_found",
            )

    def check_number(self, body: Body) -> None:
        """Before any work: a short body may ask for 1024 x 128 choices."""
        prompts = len(body.prompts) if isinstance(body, Completion) else 1
        if (number := prompts * body.n) > self.runner.most:
            raise Refused(400, f"{number} requests at once; the server holds {self.runner.most}")

    def requests(self, body: Body, prompts: list[list[int]]) -> list[batch.Request]:
        """n requests for each prompt. Choice k of a prompt draws with the seed + k, as in vLLM."""
        stop_ids = frozenset() if body.ignore_eos else self.engine.stop_ids
        # placeholders of a priced engine end no text
        own = () if self.engine.priced else (*body.stop_token_ids, *self.special(body.stops))
        stop_ids = stop_ids.union(own)
        label = "chat" if isinstance(body, Chat) else "text"
        seed = secrets.randbits(62) if body.seed in (None, -1) else body.seed
        most = self.engine.max_length
        found = []
        for number, prompt in enumerate(prompts):
            tokens = body.max_tokens
            if tokens is None:
                tokens = DEFAULT_TOKENS if isinstance(body, Completion) else most - len(prompt) + 1
            if len(prompt) + tokens - 1 > most or tokens < 1:
                usual = "" if body.max_tokens else ", its default"
                what = f" and max_tokens is {tokens}{usual}" if tokens > 0 else ""
                raise Refused(
                    400,
                    f"prompt {number} has {len(prompt)} tokens{what}; prompt and output may"
                    f" have {most + 1} together",
                    "prompt",
                    "context_length_exceeded",
                )
            for choice in range(body.n):
                sampler = self.engine.sampler(
                    (seed + choice) % (MOST_SEED + 1),
                    temperature=body.temperature,
                    top_k=max(0, body.top_k),
                    top_p=body.top_p,
                )
                tags = {"label": label, **body.tags}  # label: for the live page
                found.append(batch.Request(0, prompt, tokens, stop_ids, sampler=sampler, tags=tags))
        return found

    # ---- text

    async def prompts(self, body: Body) -> list[list[int]]:
        if isinstance(body, Chat):
            return [await self.chat_tokens(body)]
        found = []
        for number, prompt in enumerate(body.prompts):
            ids = await self.tokens(prompt) if isinstance(prompt, str) else prompt
            if not ids:
                raise Refused(
                    400, f"prompt {number} is empty; it needs at least one token", "prompt"
                )
            found.append(ids)
        return found

    async def chat_tokens(self, body: Chat) -> list[int]:
        messages = [message.as_template_wants() for message in body.messages]
        if self.engine.priced:  # no template, no tokens: only their number counts
            return await self.tokens("\n".join(text_of(each["content"]) for each in messages))
        if not self.has_template:
            raise Refused(
                400,
                f"{self.name} has no chat template: use /v1/completions",
                "messages",
                "no_chat_template",
            )
        options = body.chat_template_kwargs
        try:
            return await asyncio.to_thread(self.tokenizer.chat, messages, options)
        except UserError as error:
            raise Refused(400, str(error), "messages") from None

    async def tokens(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise Refused(400, f"{self.name} has no tokenizer: give token ids", "prompt")
        return await asyncio.to_thread(self.tokenizer.encode, text)

    @property
    def has_template(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.chat is not None

    def special(self, stops: Sequence[str]) -> list[int]:
        """Of stop strings, those that are a special token: no text has them, for `decode` leaves
        them out.
        """
        known = self.tokenizer.special if self.tokenizer else {}
        own = [known[stop] for stop in stops if stop in known]
        return [token for token in own if token < self.engine.vocab_size]

    def decode(self, tokens: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    # ---- what it says of itself

    def model(self) -> dict:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "nano-sarathi",
            "max_model_len": self.engine.max_length,
            "priced": self.engine.priced,
            "description": self.engine.description,
            "chat": self.has_template,
        }


def turned_away(error: Full | Stopping) -> Refused:
    """The answer to those who ask for too much, or too late."""
    if isinstance(error, Full):
        return Refused(
            429,
            str(error),
            code="queue_full",
            kind="rate_limit_error",
            headers={"Retry-After": "1"},
        )
    return Refused(
        503, str(error), code="shutting_down", kind="server_error", headers={"Retry-After": "10"}
    )


def hand_out(news: list[tuple[Choice | None, Delta]]) -> None:
    for choice, delta in news:
        try:
            if choice is not None:
                choice.take(delta)
        except Exception as error:
            known = isinstance(error, Refused | UserError)
            choice.fault = (
                error
                if isinstance(error, Refused)
                else Refused(
                    500,
                    f"an output token has no text: {why(error)}",
                    kind="server_error",
                    code="no_text",
                )
            )
            log.error(
                "request %d: %s",
                choice.request.request_id,
                choice.fault.message,
                exc_info=None if known else error,
            )
            choice.hang_up("error")


def router(api: Api) -> APIRouter:
    routes = APIRouter()

    async def answered(request: Request, kind: type[Body]) -> Response:
        body = read(kind, read_json(await request.body()), api.lenient)
        if body._ignored:
            told = one_line(", ".join(body._ignored))[:LONGEST_HEADER].strip()
            told = told.encode("ascii", "backslashreplace")
            request.scope["log"]["headers"] = [(b"x-ignored", told)]
        return await api.answer(request, body)

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answered(request, Completion)

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answered(request, Chat)

    @routes.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [api.model()]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        api.check_model(name)
        return JSONResponse(api.model())

    @routes.get("/health")
    async def health() -> Response:
        state = api.runner.state()
        word = "the engine has ended"
        if state["alive"]:
            word = "shutting down" if state["draining"] else "ok"
        told = {"status": word, "failures": state["failures"], "last_error": state["error"]}
        told |= {name: state[name] for name in ("running", "waiting")}  # requests
        return JSONResponse(told, 200 if word == "ok" else 503)

    return routes
