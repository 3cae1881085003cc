"""`gptoss` in this process, as a shell would see it."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gptoss_backend.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def gptoss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["gptoss", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        printed = capsys.readouterr()
        return Done(caught.value.code, printed.out, printed.err)

    return run
