"""`gptoss serve`: a tritonserver in the foreground, until a signal drains and stops it.

Beside it runs OpenAI's API, in a process of its own (gateway.py).
"""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gptoss_backend.cli import gateway_flags as flags
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.formats import find_format
from gptoss_backend.cli.options import with_engine_config
from gptoss_backend.gateway import Gateway, bind
from gptoss_backend.pulse import Pulse
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

_CHECK_SECONDS = 0.5
_GATEWAY_SECONDS = 30.0
# After the engine has drained, what is on its way to clients still arrives.
_LAST_WORDS_SECONDS = 5.0


@with_engine_config
def serve(
    *,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535)] = 8002,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long running generations may take to finish.")
    ] = 30.0,
    start_seconds: Annotated[
        float, typer.Option(min=1, help="How long the first inference may take to come.")
    ] = 600.0,
    probe_seconds: Annotated[
        float,
        typer.Option(
            min=1,
            help="A server that computes no token in this time, though one was asked for, hangs: "
            "it is stopped. Must be longer than any step of the engine.",
        ),
    ] = 60.0,
    log_file: Annotated[
        Path | None, typer.Option(help="The server's log. [default: in a temporary folder]")
    ] = None,
    format_name: Annotated[
        str, typer.Option("--format", help="Of chats: harmony; raw is text in and text out.")
    ] = "harmony",
    openai: Annotated[
        bool, typer.Option(help="Serve OpenAI's API, too.", rich_help_panel="OpenAI gateway")
    ] = True,
    openai_port: flags.Port = flags.DEFAULT_PORT,
    openai_model_name: flags.ModelName = None,
    openai_key_file: flags.KeyFile = None,
    openai_cors_origin: flags.CorsOrigins = None,
    openai_allowed_hosts: flags.AllowedHosts = None,
    openai_max_body: flags.MaxBody = flags.DEFAULT_MAX_BODY_MIB,
    openai_max_stored: flags.MaxStored = flags.DEFAULT_MAX_STORED,
    openai_slow_reader_seconds: flags.SlowReader = flags.DEFAULT_SLOW_READER_SECONDS,
    openai_silent_seconds: flags.Silent = flags.DEFAULT_SILENT_SECONDS,
    openai_whole_seconds: flags.Whole = flags.DEFAULT_WHOLE_SECONDS,
    config: EngineConfig,
) -> None:
    """Start tritonserver with the ensemble `gpt_oss`, and keep it until SIGTERM or Ctrl-C."""
    find_format(format_name)
    console = Console(stderr=True)
    ports = Ports(http_port, grpc_port, metrics_port, host)
    settings = flags.gateway_settings(
        url=ports.url("grpc"),
        model_name=openai_model_name or flags.default_model_name(config),
        key_file=openai_key_file,
        cors_origin=openai_cors_origin,
        allowed_hosts=openai_allowed_hosts,
        max_body=openai_max_body,
        max_stored=openai_max_stored,
        slow_reader_seconds=openai_slow_reader_seconds,
        silent_seconds=openai_silent_seconds,
        whole_seconds=openai_whole_seconds,
        drain_seconds=drain_seconds + _LAST_WORDS_SECONDS,
    )
    if openai:
        flags.load_checked(settings)
    stopping = _stop_on_signals()
    log_path = log_file and log_file.absolute()
    with (
        bind(host, openai_port, "--openai-port") if openai else nullcontext() as listener,
        TritonServer(config, ports, log_path, chat_format=format_name) as server,
    ):
        if not _wait_ready(server, start_seconds, console, stopping):
            return
        with _gateway(server, settings, listener) as running:
            typer.echo(
                f"ready: HTTP http://{ports.url('http')}, gRPC {ports.url('grpc')}, "
                f"metrics http://{ports.url('metrics')}/metrics, "
                + (f"OpenAI {running.url}/v1, " if running else "")
                + f"log {server.log_path}"
            )
            with Pulse(server, probe_seconds) as pulse:
                while not stopping.wait(_CHECK_SECONDS):
                    server.check()
                    pulse.check()
                    if running:
                        running.check()
            console.print(
                f"draining for at most {drain_seconds:g} seconds; a second signal ends it"
            )
            _drain(server, running, drain_seconds)


@contextmanager
def _gateway(
    server: TritonServer, settings: dict[str, Any], listener: socket.socket | None
) -> Iterator[Gateway | None]:
    """OpenAI's API on `listener`, ready; none without one."""
    if listener is None:
        yield None
        return
    with Gateway(flags.NAME, settings, listener, server.log_path) as running:
        running.wait_ready(_GATEWAY_SECONDS)
        yield running


def _drain(server: TritonServer, running: Gateway | None, seconds: float) -> None:
    """The gateway takes no more requests while the engine finishes those that it has."""
    started = time.monotonic()
    if running:
        running.end()
    has_finished = server.drain(seconds)
    if running:
        running.stop(_LAST_WORDS_SECONDS)
    if not has_finished:
        raise CommandFailed(
            f"some generations were cut after {time.monotonic() - started:.1f} seconds"
        )


def _stop_on_signals() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; the second one interrupts whatever is being done."""
    stopping = threading.Event()

    def handle(_signal: int, _frame: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stopping


class _Stopped(Exception):
    pass


def _wait_ready(
    server: TritonServer, seconds: float, console: Console, stopping: threading.Event
) -> bool:
    """False when a signal came first."""
    with console.status(f"starting tritonserver (log {server.log_path})") as status:

        def show(elapsed: float) -> None:
            if stopping.is_set():
                raise _Stopped
            status.update(f"starting tritonserver, {elapsed:.0f} s (log {server.log_path})")

        try:
            server.wait_ready(seconds, show)
        except _Stopped:
            return False
    return True
