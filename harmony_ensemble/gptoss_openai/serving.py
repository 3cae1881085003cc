"""Runs the gateway with uvicorn until it is told to stop.

The entry point `openai` (group `gptoss.gateways`) names this module: `check` and `serve` are what
the command line knows of it.
"""

import asyncio
import dataclasses
import logging
import signal
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gptoss_openai.app import Gateway
from gptoss_openai.config import GatewayConfig
from gptoss_openai.hosts import default_hosts

# Between the error that ends an open answer and the end of its connection.
_LAST_WORDS_SECONDS = 2
_BACKLOG = 2048
# Of a request's line and its headers together.
_MOST_HEAD_BYTES = 2**16
# Longer than clients keep idle connections, so that none sends into one that is being closed.
_KEEP_ALIVE_SECONDS = 75


def check(settings: Mapping[str, Any]) -> None:
    """Raise InvalidGateway if a setting is wrong."""
    GatewayConfig.from_mapping(settings)


def serve(settings: Mapping[str, Any], listener: socket.socket) -> None:
    """Answer what connects to `listener` until SIGTERM or SIGINT, then drain.

    settings: `GatewayConfig`'s, by name. InvalidGateway when one is wrong. A second signal cuts
    what is still open.
    """
    config = GatewayConfig.from_mapping(settings)
    if not config.api_keys and not config.allowed_hosts:
        config = dataclasses.replace(config, allowed_hosts=default_hosts(listener))
    gateway = Gateway(config)
    tune(listener, config)
    server = _Server(
        uvicorn.Config(
            gateway.app,
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(config.drain_seconds) + _LAST_WORDS_SECONDS,
        ),
        gateway,
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(server.serve(sockets=[listener]))


def tune(listener: socket.socket, config: GatewayConfig) -> None:
    """Options that every accepted connection has from its listener."""
    # The connection of who does not read ends, too: closing it waits for what was written.
    user_timeout = int(1e3 * config.slow_reader_seconds)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout)
    # asyncio sets it on sockets that know their protocol's number, which not every listener does;
    # without it a client waits 40 ms for what follows an answer's first packet.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, but that what comes before a body is limited: keys are known only behind it.

    The read of the socket that a head begins in is not counted: it may hold another's body.
    """

    _num_head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        is_too_long = self._is_in_head and self._num_head_bytes > _MOST_HEAD_BYTES
        if is_too_long and not self.transport.is_closing():
            self.send_400_response(f"The head must be at most {_MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()


class _Server(uvicorn.Server):
    """uvicorn's, but that open answers end with an error before their connections are cut."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises them again at its end; a drained gateway has ended as it should.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """A signal: drain, and cut at the second one or when the time is over."""
        if self.should_exit:
            self._gateway.exchanges.cut()
            return
        self.should_exit = True
        self._gateway.is_draining = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._gateway.config.drain_seconds, self._gateway.exchanges.cut)
