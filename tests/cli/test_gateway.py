"""The OpenAI gateway's flags: what they mean, and which are refused before anything starts."""

import socket
from pathlib import Path
from typing import Any

import pytest

from gptoss_backend.cli import gateway_flags as flags
from gptoss_engine.config import EngineConfig, InvalidConfig

from .conftest import Run


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (EngineConfig(), "gpt-oss-demo"),
        (EngineConfig(model="/models/gpt-oss-20b"), "gpt-oss-20b"),
        (EngineConfig(random_weights="20b"), "gpt-oss-random-20b"),
    ],
)
def test_a_model_is_called_by_its_folder(config: EngineConfig, name: str) -> None:
    assert flags.default_model_name(config) == name


def _settings(path: Path | None, hosts: list[str] | None = None) -> dict[str, Any]:
    settings = flags.gateway_settings(
        url="host:1",
        model_name="m",
        key_file=path,
        cors_origin=None,
        allowed_hosts=hosts,
        max_body=8,
        max_stored=1,
        slow_reader_seconds=30.0,
        silent_seconds=60.0,
        whole_seconds=7200.0,
        drain_seconds=30.0,
    )
    flags.load_checked(settings)
    return settings


def _keys(path: Path | None) -> list[str]:
    return _settings(path)["api_keys"]


def test_hosts_are_the_same_in_any_case() -> None:
    assert _settings(None, ["Chat.Example"])["allowed_hosts"] == ["chat.example"]
    assert _settings(None)["allowed_hosts"] == []


def test_keys_stand_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n  two \n")
    assert _keys(path) == ["one", "two"]
    assert _keys(None) == []


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_keys_lets_nobody_in_by_mistake(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(InvalidConfig, match="must hold an API key a line, got none"):
        _keys(path)


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_what_is_refused_before_anything_starts(gptoss: Run, command: str) -> None:
    prefix = "--openai-" if command == "serve" else "--"
    done = gptoss(command, f"{prefix}key-file", "/no/such/file")
    assert done.code == 2
    assert "cannot read API keys from /no/such/file" in done.err
    done = gptoss(command, f"{prefix}model-name", " ", f"{prefix}cors-origin", "")
    assert done.code == 2
    assert "cors_origins must not hold an empty text" in done.err
    done = gptoss(command, f"{prefix}allowed-hosts", "")
    assert done.code == 2
    assert "allowed_hosts must not hold an empty text" in done.err
    names = ("slow-reader-seconds", "silent-seconds", "whole-seconds")
    for flag in (*(f"{prefix}{name}" for name in names), "--drain-seconds"):
        for seconds in ("inf", "3e6"):
            done = gptoss(command, flag, seconds)
            assert done.code == 2
            assert "_seconds must be at most 604800, got " in done.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = gptoss(command, f"{prefix}port", port)
    assert done.code == 1
    assert f"cannot use port {port} on 127.0.0.1" in done.err
    assert f"{prefix}port" in done.err
