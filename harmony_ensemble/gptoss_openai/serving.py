"""Runs the gateway with uvicorn until it is told to stop.

The entry point `openai` (group `gptoss.gateways`) names this module: `check` and `serve` are what
the command line knows of it.
"""

import asyncio
import dataclasses
import gc
import logging
import resource
import signal
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from gptoss_openai.app import Gateway
from gptoss_openai.config import GatewayConfig
from gptoss_openai.connection import bounded
from gptoss_openai.hosts import default_hosts

# Between the error that ends an open answer and the end of its connection.
_LAST_WORDS_SECONDS = 2
_BACKLOG = 2048
# Beside its connections: libraries, the way to the ensemble, the log.
_OTHER_FILES = 128
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
    _allow_files(config.max_connections + _OTHER_FILES)
    server = _Server(
        uvicorn.Config(
            gateway.app,
            http=bounded(config),
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
    gc.freeze()  # What was imported stays: looking through it took tens of milliseconds each time.
    asyncio.run(server.serve(sockets=[listener]))


def _allow_files(number: int) -> None:
    """A shell's limit of open files is often 1024: half of the requests that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tune(listener: socket.socket, config: GatewayConfig) -> None:
    """Options that every accepted connection has from its listener."""
    # The connection of who does not read ends, too: closing it waits for what was written.
    user_timeout = int(1e3 * config.slow_reader_seconds)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout)
    # asyncio sets it on sockets that know their protocol's number, which not every listener does;
    # without it a client waits 40 ms for what follows an answer's first packet.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
