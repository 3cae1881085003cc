"""One HTTP request from its body to the last byte of its answer.

An answer is written as fast as its client reads it and no faster: while a write waits, nothing is
read from the ensemble, so that what waits is in tritonserver's and the engine's hands, which end it
by its token limit; and a client that takes nothing for `slow_reader_seconds` counts as gone. When a
client is gone its generation is aborted.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from gptoss_harmony.types import shown
from gptoss_openai.choices import inputs_of_choices, together
from gptoss_openai.config import GatewayConfig
from gptoss_openai.ensemble import Ensemble, Reply
from gptoss_openai.errors import ApiError, Names
from gptoss_openai.events import KEEP_ALIVE, as_bytes
from gptoss_openai.metrics import GatewayMetrics
from gptoss_openai.parameters import Inputs, parse_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_KEEP_ALIVE_SECONDS = 10.0
# Of a body that is too large, what is still read, so that its sender gets to the answer.
_DISCARDED_BODIES = 4
# Larger bodies are read in a thread, so that they hold up nobody's stream for long, and so are
# schemas, of which a few hundred bytes can mean megabytes.
_LARGE_BYTES = 2**16
_WITH_SCHEMAS = ("tools", "response_format", "text")
_SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


log = logging.getLogger(__name__)


def _shutting_down() -> ApiError:
    return ApiError(503, "the gateway is shutting down: try again")


class Answer(Protocol):
    """What chat.py, completions.py and responses.py make of a body."""

    stream: bool
    num_choices: int
    inputs: Inputs
    names: Names

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]: ...
    def push(self, reply: Reply) -> bytes: ...
    def end(self) -> bytes: ...
    def fail(self, error: ApiError) -> bytes: ...


class _ReaderIsGone(Exception):
    pass


class Exchanges:
    """All that are under way, of all routes."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.ensemble: Ensemble
        self._open: set[_Exchange] = set()
        self._is_cut = False

    def route(self, name: str, read: Callable[[dict[str, Any], str], Answer]) -> "_Route":
        """An ASGI application. read: a body and the owner of its key to an Answer, or ApiError."""
        return _Route(self, name, read)

    async def run(self, exchange: "_Exchange") -> None:
        if self._is_cut:  # Its body came late.
            raise _shutting_down()
        self._open.add(exchange)
        try:
            await exchange.run()
        finally:
            self._open.remove(exchange)

    def cut(self) -> None:
        """End every open answer with an error, and begin none: the gateway stops."""
        self._is_cut = True
        for exchange in self._open:
            exchange.cut()


class _Route:
    def __init__(
        self, exchanges: Exchanges, name: str, read: Callable[[dict[str, Any], str], Answer]
    ) -> None:
        self._exchanges = exchanges
        self._name = name
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._exchanges.config)
        if body is None:
            return
        began = time.monotonic()
        answer = await self._answer(body, scope["state"]["owner"])
        del body  # An answer may take minutes.
        exchange = _Exchange(self._exchanges, answer, receive, send)
        try:
            await self._exchanges.run(exchange)
        finally:
            if exchange.began_at:
                seconds = exchange.began_at - began
                self._exchanges.metrics.first_byte.labels(self._name).observe(seconds)

    async def _answer(self, raw: bytes, owner: str) -> Answer:
        is_large = len(raw) > _LARGE_BYTES
        body = await asyncio.to_thread(parse_body, raw) if is_large else parse_body(raw)
        check_model(body.get("model"), self._exchanges.config.model_name)
        if is_large or any(body.get(name) for name in _WITH_SCHEMAS):
            return await asyncio.to_thread(self._read, body, owner)
        return self._read(body, owner)


def check_model(model: Any, served: str) -> None:
    if model is None:
        raise ApiError(400, "model must be given", param="model", code="missing_required_parameter")
    if model != served:
        raise ApiError(
            404,
            f"the model {shown(model)} does not exist here; {shown(served)} does",
            param="model",
            code="model_not_found",
        )


async def read_body(scope: Scope, receive: Receive, config: GatewayConfig) -> bytes | None:
    """None when the client left before its end. ApiError: too large, too slow, or not JSON."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    limit = config.max_body_bytes
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(config.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                num_bytes += len(message["body"])
                if num_bytes <= limit:
                    parts.append(message["body"])
                if not message.get("more_body") or num_bytes > _DISCARDED_BODIES * limit:
                    break
    except TimeoutError:
        raise ApiError(
            408, f"the body must arrive within {config.body_seconds:g} seconds"
        ) from None
    if num_bytes > limit:
        raise ApiError(413, f"the body must be at most {limit} bytes", code="body_too_large")
    if kind != b"application/json":
        # A web page may send other kinds without asking first (CORS).
        raise ApiError(
            415,
            f"the header Content-Type must be application/json, got {kind.decode('latin-1')!r}",
            code="unsupported_media_type",
        )
    return b"".join(parts)


def _checked(reply: Reply) -> Reply:
    if reply.finish_reason in ("abort", "error"):
        raise ApiError(
            499, "the answer was cancelled: its deadline has passed, or the server stops"
        )
    return reply


class _Exchange:
    """An answer on its way to one client. began_at: of what the model said; 0 before.

    The task that answers ends by itself, or it is cancelled: once, for the reason that came first.
    """

    began_at = 0.0

    def __init__(
        self,
        exchanges: Exchanges,
        answer: Answer,
        receive: Receive,
        send: Send,
    ) -> None:
        self._config = exchanges.config
        self._metrics = exchanges.metrics
        self._ensemble = exchanges.ensemble
        self._answer = answer
        self._receive = receive
        self._send = send
        self._sent_at = time.monotonic()
        self._work: asyncio.Task[Any] | None = None
        self._reason = ""
        self._has_ended = False

    async def run(self) -> None:
        """Until the answer has ended, or its client is gone."""
        self._work = asyncio.current_task()
        leaving = asyncio.create_task(self._wait_until_gone())
        try:
            await self._run()
        except asyncio.CancelledError:
            if not (self._reason and self._work):
                raise
            self._work.uncancel()
            self._metrics.cut.labels(self._reason).inc()
            if self._reason == "shutdown":
                await self._fail(_shutting_down())
        finally:
            leaving.cancel()

    def cut(self) -> None:
        """The gateway stops. Once: another time would cut the error that tells of it."""
        self._end("shutdown")

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end("client_gone")

    def _end(self, reason: str) -> None:
        if self._work and not (self._reason or self._has_ended):
            self._reason = reason
            self._work.cancel()

    async def _run(self) -> None:
        try:
            await self._stream() if self._answer.stream else await self._whole()
        except _ReaderIsGone:
            self._metrics.cut.labels("slow_reader").inc()
        except ApiError as error:
            await self._fail(error)
        except Exception:
            log.exception("an answer failed")
            await self._fail(ApiError(500, "the gateway failed; its log says how"))

    async def _whole(self) -> None:
        async with aclosing(self._ask()) as replies:
            answer = self._answer.whole([_checked(reply) async for reply in replies])
        self.began_at = time.monotonic()
        await self._respond(200, as_bytes(answer))

    async def _stream(self) -> None:
        async with aclosing(self._ask()) as replies:
            async for reply in replies:
                content = self._answer.push(_checked(reply))
                if not content and time.monotonic() - self._sent_at > _KEEP_ALIVE_SECONDS:
                    content = KEEP_ALIVE
                # The headers wait for the first sign of life: a refusal has a status of its own.
                if not self.began_at:
                    self.began_at = time.monotonic()
                    await self._begin(200, [*_SSE])
                if content:
                    await self._write(content)
        await self._write(self._answer.end(), is_last=True)

    def _ask(self) -> AsyncGenerator[Reply, None]:
        answer = self._answer
        if answer.num_choices == 1:
            return self._ensemble.ask(answer.inputs, answer.names)
        every = inputs_of_choices(answer.inputs, answer.num_choices)
        return together([self._ensemble.ask(inputs, answer.names) for inputs in every])

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _fail(self, error: ApiError) -> None:
        with contextlib.suppress(_ReaderIsGone):
            if self.began_at:
                if not self._reason:  # Its status, 200, would not tell.
                    self._metrics.cut.labels("failed").inc()
                await self._write(self._answer.fail(error), is_last=True)
            else:
                await self._respond(error.status, as_bytes(error.body()), error.headers)

    async def _respond(
        self, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        pairs = {"content-type": "application/json", "content-length": str(len(body))}
        lines = [(k.encode(), v.encode()) for k, v in {**pairs, **(headers or {})}.items()]
        await self._begin(status, lines)
        await self._write(body, is_last=True)

    async def _write(self, content: bytes, *, is_last: bool = False) -> None:
        await self._put({"type": "http.response.body", "body": content, "more_body": not is_last})
        self._sent_at = time.monotonic()
        self._has_ended = is_last

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._config.slow_reader_seconds):
                await self._send(message)
        except TimeoutError:
            raise _ReaderIsGone from None
