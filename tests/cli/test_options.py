"""The configuration's flags, as every command that runs the engine has them."""

import pytest

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
