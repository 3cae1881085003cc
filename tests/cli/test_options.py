"""The configuration's flags, as every command that runs the engine has them."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from gptoss_backend.cli.options import engine_config
from gptoss_engine.config import EngineConfig

from .conftest import Run


@pytest.mark.parametrize("command", [("serve",), ("chat",), ("generate", "Hi")])
def test_kernels_that_cannot_run_here_are_refused_before_a_server_starts(
    gptoss: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.delattr("gptoss_backend.server.TritonServer.__enter__")
    done = gptoss(*command, "--device", "cpu", "--gemm", "cuda")
    assert done.code == 2
    assert done.err == (
        "gptoss: gemm must be auto or reference on a cpu, got cuda: its kernels need a GPU\n"
    )


def test_a_flag_wins_over_the_file_and_the_file_over_the_commands_own_default(
    tmp_path: Path,
) -> None:
    seen: list[tuple[str, EngineConfig]] = []

    @engine_config(max_num_seqs=7, stream_interval=3, num_pages=9)
    def command(word: Annotated[str, typer.Argument()], *, config: EngineConfig) -> None:
        seen.append((word, config))

    app = typer.Typer()
    app.command()(command)
    file = tmp_path / "config.toml"
    file.write_text("stream_interval = 4\nnum_pages = 10\n")
    app(["hi", "--config", str(file), "--num-pages", "11"], standalone_mode=False)
    ((word, config),) = seen
    assert word == "hi"
    assert (config.max_num_seqs, config.stream_interval, config.num_pages) == (7, 4, 11)


def test_help_has_the_defaults_of_a_gpu_and_of_the_command(
    gptoss: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "Default: 64, on a GPU 512" in gptoss("serve", "--help").out
    decode = gptoss("bench", "decode", "--help").out
    assert "Default: 128" in decode
    assert "Default: 2048, on a GPU 8192" in decode
