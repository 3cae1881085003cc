"""The OpenAI gateway's flags, of `gptoss gateway` and `gptoss serve`, and what they mean to it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gptoss_backend.gateway import load_gateway
from gptoss_engine.config import EngineConfig, InvalidConfig

NAME = "openai"
DEFAULT_PORT = 9000
DEFAULT_MAX_BODY_MIB = 8
DEFAULT_MAX_STORED = 1000
DEFAULT_SLOW_READER_SECONDS = 30.0
DEFAULT_SILENT_SECONDS = 60.0
DEFAULT_WHOLE_SECONDS = 7200.0

_PANEL = "OpenAI gateway"

Port = Annotated[int, typer.Option(min=1, max=65535, rich_help_panel=_PANEL)]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help="A file with an API key a line; who has none of them is refused. Without it everybody "
        "may ask.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="What clients call the model.",
        show_default="gpt-oss-demo, or the checkpoint's folder",
        rich_help_panel=_PANEL,
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        help="A web page's origin, such as https://chat.example, that may ask; * is any.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="A host name that requests may be sent to, without a port; * is any, loopback this "
        "machine's own.",
        show_default="loopback on such an address without keys, else any",
        rich_help_panel=_PANEL,
    ),
]
MaxBody = Annotated[
    int, typer.Option(min=1, help="Limit of a request, in MiB.", rich_help_panel=_PANEL)
]
MaxStored = Annotated[
    int,
    typer.Option(
        min=0,
        help="Responses that previous_response_id may name, in 256 MiB at most.",
        rich_help_panel=_PANEL,
    ),
]
SlowReader = Annotated[
    float,
    typer.Option(
        min=0.1,
        help="Who takes nothing of a waiting answer for so long is gone.",
        rich_help_panel=_PANEL,
    ),
]
Silent = Annotated[
    float,
    typer.Option(
        min=0.1,
        help="A stream ends with an error when the model's server says nothing for so long; it "
        "says something every second.",
        rich_help_panel=_PANEL,
    ),
]
Whole = Annotated[
    float,
    typer.Option(
        min=0.1,
        help="How long the model's server may take for an answer that is not streamed.",
        rich_help_panel=_PANEL,
    ),
]


def load_checked(settings: dict[str, Any]) -> Any:
    """The gateway's program, which takes these settings."""
    program = load_gateway(NAME)
    try:
        program.check(settings)
    except ValueError as error:
        raise InvalidConfig(str(error)) from error
    return program


def gateway_settings(
    *,
    url: str,
    model_name: str,
    key_file: Path | None,
    cors_origin: list[str] | None,
    allowed_hosts: list[str] | None,
    max_body: int,
    max_stored: int,
    slow_reader_seconds: float,
    silent_seconds: float,
    whole_seconds: float,
    drain_seconds: float,
) -> dict[str, Any]:
    """By the gateway's own names."""
    return {
        "url": url,
        "model_name": model_name,
        "api_keys": [] if key_file is None else _read_keys(key_file),
        "cors_origins": cors_origin or [],
        "allowed_hosts": [each.lower() for each in allowed_hosts or ()],
        "max_body_bytes": max_body * 2**20,
        "max_stored_responses": max_stored,
        "slow_reader_seconds": slow_reader_seconds,
        "silent_seconds": silent_seconds,
        "whole_seconds": whole_seconds,
        "drain_seconds": drain_seconds,
    }


def default_model_name(config: EngineConfig) -> str:
    """What OpenAI's clients call the model of an engine."""
    if config.random_weights:
        return f"gpt-oss-random-{config.random_weights}"
    return "gpt-oss-demo" if config.model == "demo" else Path(config.model).name


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read API keys from {path}: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InvalidConfig(f"{path} must hold an API key a line, got none")
    return keys
