"""Processes at the other end of a socket: how they start, and how they ended."""

import os
import signal
import sys
from pathlib import Path

import pytest

from gptoss_engine import children
from gptoss_engine.children import how_it_ended, sendable, start_child
from gptoss_engine.config import InvalidConfig

pytestmark = pytest.mark.timeout(60)


def run(descriptor: int) -> None:
    """What the children here do: they end as they are told."""
    with os.fdopen(descriptor, "rb", buffering=0) as told:
        os.write(descriptor, os.environ["GPTOSS_TEST_WORD"].encode())
        how = told.read(1)
    os.kill(os.getpid(), signal.SIGKILL) if how == b"k" else os._exit(how[0])


@pytest.mark.parametrize(
    ("order", "how"),
    [(b"k", "was killed by signal 9 (Killed)"), (b"\x07", "ended with exit code 7")],
)
def test_a_child_has_its_socket_and_its_environment_and_an_end(
    order: bytes, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    process, connection = start_child("tests.engine.test_children", {"GPTOSS_TEST_WORD": "ready"})
    with connection:
        assert connection.recv(5) == b"ready"
        assert how_it_ended(process, 0) == "closed the connection"
        connection.sendall(order)
        assert how_it_ended(process, 30) == how


class Unreadable(Exception):
    """Pickled with one argument, but made of two."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def test_an_error_is_sent_as_it_is_or_in_its_words() -> None:
    assert isinstance(sendable(InvalidConfig("tp")), InvalidConfig)
    error = sendable(Unreadable("no ", "luck"))
    assert (type(error), str(error)) == (RuntimeError, "Unreadable: no luck")


def test_the_interpreter_is_found_beside_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(
        InvalidConfig, match="engine_process must be off, and tp and dp 1: there is no python3"
    ):
        start_child("anything")
    (tmp_path / "bin").mkdir()
    for name in ("python3", f"python3.{sys.version_info.minor}"):
        path = tmp_path / "bin" / name
        path.touch()
        assert children.python() == str(path)
