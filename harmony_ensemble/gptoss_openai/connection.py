"""One connection of a client: uvicorn's, within limits of size, time and number.

A proxy before the gateway has such limits, too; but keys are known only behind a request's head, so
until there anybody can hold what a connection costs.
"""

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptoss_openai.config import GatewayConfig
from gptoss_openai.errors import ApiError
from gptoss_openai.events import as_bytes

# Of a request's line and its headers together.
_MOST_HEAD_BYTES = 2**16
# Who reads a body says that it was late, before the connection ends without a word.
_LAST_WORD_SECONDS = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """limits: those of a subclass, by `bounded`.

    The read of the socket that a head begins in is not counted: it may hold another's body.
    """

    limits = GatewayConfig()

    _num_head_bytes = 0
    _is_in_body = _has_spoken = False
    _due: asyncio.TimerHandle | None = None
    """By when the head, or the body, must be there: while one is being waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        most = self.limits.max_connections
        if len(self.connections) > most:
            self._refuse(ApiError(503, f"{most} connections are open, as many as are allowed"))
            return
        self._wait(self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._has_spoken = True
        self._num_head_bytes += len(data)
        super().data_received(data)
        self._wait_for_more()
        is_too_long = not self._is_in_body and self._num_head_bytes > _MOST_HEAD_BYTES
        if is_too_long and not self.transport.is_closing():
            self.send_400_response(f"the head must be at most {_MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body, self._num_head_bytes = False, 0
        self._stop_waiting()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _wait_for_more(self) -> None:
        """Of a request that has not come as a whole, as most do."""
        if self._due is not None or self.transport.is_closing():
            return
        if self._is_in_body:
            self._wait(self.limits.body_seconds + _LAST_WORD_SECONDS)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait(self.limits.head_seconds)

    def _wait(self, seconds: float) -> None:
        self._due = self.loop.call_later(seconds, self._be_late)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _be_late(self) -> None:
        if self.pipeline:  # An earlier request is being answered: nobody asks for this one yet.
            self._wait(self.limits.body_seconds)
        elif self._has_spoken and not self._is_in_body:
            seconds = self.limits.head_seconds
            sentence = f"the request's head must arrive within {seconds:g} seconds"
            self._refuse(ApiError(408, sentence))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Outside of any request."""
        self._stop_waiting()
        body = as_bytes(error.body())
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            *(f"{name}: {value}" for name, value in error.headers.items() if name != "connection"),
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def bounded(config: GatewayConfig) -> type[BoundedProtocol]:
    """uvicorn makes one of these for each connection, and has no place for its limits."""
    return type("Connection", (BoundedProtocol,), {"limits": config})
