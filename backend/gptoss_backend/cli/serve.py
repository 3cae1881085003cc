"""`gptoss serve`: a tritonserver in the foreground, until a signal drains and stops it."""

import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.options import with_engine_config
from gptoss_backend.pulse import Pulse
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

_CHECK_SECONDS = 0.5


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
    config: EngineConfig,
) -> None:
    """Start tritonserver with the ensemble `gpt_oss`, and keep it until SIGTERM or Ctrl-C."""
    console = Console(stderr=True)
    ports = Ports(http_port, grpc_port, metrics_port, host)
    stopping = _stop_on_signals()
    with TritonServer(config, ports, log_file and log_file.absolute()) as server:
        if not _wait_ready(server, start_seconds, console, stopping):
            return
        typer.echo(
            f"ready: HTTP http://{ports.url('http')}, gRPC {ports.url('grpc')}, "
            f"metrics http://{ports.url('metrics')}/metrics, log {server.log_path}"
        )
        with Pulse(server, probe_seconds) as pulse:
            while not stopping.wait(_CHECK_SECONDS):
                server.check()
                pulse.check()
        console.print(f"draining for at most {drain_seconds:g} seconds; a second signal ends it")
        started = time.monotonic()
        if not server.drain(drain_seconds):
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
