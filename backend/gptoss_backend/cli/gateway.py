"""`gptoss gateway`: OpenAI's API in front of a tritonserver that runs, here or elsewhere."""

from typing import Annotated

import typer

from gptoss_backend.address import authority
from gptoss_backend.cli import gateway_flags as flags
from gptoss_backend.gateway import bind
from gptoss_engine.config import EngineConfig


def gateway(
    *,
    url: Annotated[
        str, typer.Option(help="gRPC host:port of the tritonserver; an IPv6 address in brackets.")
    ] = ("127.0.0.1:8001"),
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: flags.Port = flags.DEFAULT_PORT,
    model_name: flags.ModelName = None,
    key_file: flags.KeyFile = None,
    cors_origin: flags.CorsOrigins = None,
    allowed_hosts: flags.AllowedHosts = None,
    max_body: flags.MaxBody = flags.DEFAULT_MAX_BODY_MIB,
    max_stored: flags.MaxStored = flags.DEFAULT_MAX_STORED,
    slow_reader_seconds: flags.SlowReader = flags.DEFAULT_SLOW_READER_SECONDS,
    silent_seconds: flags.Silent = flags.DEFAULT_SILENT_SECONDS,
    whole_seconds: flags.Whole = flags.DEFAULT_WHOLE_SECONDS,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="How long open answers may take to finish.")
    ] = 30.0,
) -> None:
    """Serve OpenAI's API in front of a running tritonserver, until SIGTERM or Ctrl-C."""
    settings = flags.gateway_settings(
        url=url,
        model_name=model_name or flags.default_model_name(EngineConfig()),
        key_file=key_file,
        cors_origin=cors_origin,
        allowed_hosts=allowed_hosts,
        max_body=max_body,
        max_stored=max_stored,
        slow_reader_seconds=slow_reader_seconds,
        silent_seconds=silent_seconds,
        whole_seconds=whole_seconds,
        drain_seconds=drain_seconds,
    )
    program = flags.load_checked(settings)
    with bind(host, port, "--port") as listener:
        listener.listen()  # Who reads the line below may connect.
        typer.echo(f"listening: OpenAI http://{authority(host, port)}/v1, in front of {url}")
        program.serve(settings, listener)
