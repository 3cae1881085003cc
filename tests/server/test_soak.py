"""`gptoss soak`, short; and that it sees what must not be."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gptoss_backend.cli.soak import Ask, Ends, Memory, _one, asks
from gptoss_backend.client import RequestFailed

SHORT = 100


@pytest.mark.server
@pytest.mark.timeout(200)
def test_a_short_soak_ends_well() -> None:
    command = (sys.executable, "-c", "from gptoss_backend.cli import main; main()", "soak")
    flags = ("--num-requests", str(SHORT), "--connections", "16")
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["problems"] == []
    ends = line["ends"]
    assert sum(ends.values()) == line["requests"] == SHORT
    assert (ends["malformed: refused"], ends["beyond limits: refused"]) == (5, 5)
    assert ends["cancelled: left"] == 10
    assert len(line["memory_mb"]) >= 4, "the server and three models"


class Told:
    """A client of which each request is told these responses, and then this error."""

    def __init__(self, *finish_reasons: str, error: str = "") -> None:
        self._finish_reasons = finish_reasons
        self._error = error

    def stream(self, model: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for reason in self._finish_reasons:
            yield {"finish_reason": reason}
        if self._error:
            raise RequestFailed(self._error)


@pytest.mark.parametrize(
    ("kind", "told", "end", "problem"),
    [
        ("answered", Told("", "stop"), "stop", ""),
        ("answered", Told("", ""), "failed", "0 ends"),
        ("answered", Told("stop", "stop"), "went on", "behind the end"),
        ("answered", Told("", error="broken"), "failed", "broken"),
        ("cancelled", Told("", ""), "left", ""),
        ("malformed", Told(error="messages must be JSON"), "refused", ""),
        ("malformed", Told("stop"), "refused", "ended ['stop']"),
        ("beyond limits", Told("", error="too long"), "refused", "too long"),
    ],
)
def test_an_end_too_few_or_too_many_is_seen(kind: str, told: Any, end: str, problem: str) -> None:
    ends = Ends()
    _one(told, Ask(kind, {}), ends)
    assert ends.counts == {f"{kind}: {end}": 1}
    assert [problem in each for each in ends.problems] == ([True] if problem else [])


def test_of_each_kind_there_is_its_share() -> None:
    kinds = [ask.kind for ask in asks(1000, seed=1)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "answered": 800,
        "cancelled": 100,
        "malformed": 50,
        "beyond limits": 50,
    }
    assert asks(1000, seed=1) == asks(1000, seed=1) != asks(1000, seed=2)


def test_memory_is_told_of_each_part_of_the_time() -> None:
    memory = Memory(1)
    memory.samples = [
        (float(at), {7: 10_000_000 + 1_000_000 * at, 8: 5_000_000}) for at in range(26)
    ]
    memory.samples[13][1][9] = 1  # has ended since
    parts = memory.of_parts(since=10.0)
    assert parts == {7: [pytest.approx(20.5 + 2 * part) for part in range(8)], 8: [5.0] * 8}
    assert Memory(1).of_parts(0.0) == {}
