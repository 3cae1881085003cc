"""Who counts as alive: whoever computes a token, for anybody."""

import threading
from collections.abc import Callable

import pytest

from gptoss_backend.pulse import Pulse

WAIT_SECONDS = 10
LIMIT, LOOK = 0.2, 0.01


class Hangs(Exception):
    pass


class FakeServer:
    """It tells `tokens` one by one, the last one for ever; `answers` is asked by each probe."""

    def __init__(self, tokens: list[float | None], answers: Callable[[], bool]) -> None:
        self._tokens = tokens
        self._answers = answers
        self._changed = threading.Condition()
        self.num_looks = 0
        self.num_probes = 0

    def num_tokens(self, seconds: float) -> float | None:
        assert seconds == LIMIT
        with self._changed:
            self.num_looks += 1
            self._changed.notify_all()
            return self._tokens.pop(0) if len(self._tokens) > 1 else self._tokens[0]

    def computes(self, seconds: float) -> bool:
        assert 0 < seconds <= LIMIT
        with self._changed:
            self.num_probes += 1
            self._changed.notify_all()
        return self._answers()

    def failure(self, what: str) -> Exception:
        return Hangs(what)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS)


def _dies(pulse: Pulse) -> None:
    pause = threading.Event()
    for _ in range(1000):
        pulse.check()
        pause.wait(0.01)


def test_an_idle_server_that_answers_lives() -> None:
    server = FakeServer([5.0], answers=lambda: True)
    with Pulse(server, LIMIT, LOOK) as pulse:
        server.wait(lambda: server.num_probes > 20)
        pulse.check()


def test_a_busy_server_is_never_asked() -> None:
    server = FakeServer([float(count) for count in range(100)], answers=lambda: False)
    with Pulse(server, LIMIT, LOOK) as pulse:
        server.wait(lambda: server.num_looks > 50)
        pulse.check()
    assert server.num_probes == 0


@pytest.mark.parametrize("tokens", [5.0, None])
def test_a_server_that_computes_nothing_is_dead(tokens: float | None) -> None:
    server = FakeServer([tokens], answers=lambda: False)
    with Pulse(server, LIMIT, LOOK) as pulse, pytest.raises(Hangs, match=r"within 0\.2 seconds"):
        _dies(pulse)
    assert server.num_probes > 0


def test_a_request_in_a_full_queue_lives_by_the_tokens_of_others() -> None:
    # Nothing moves at the look; the probe is refused, and by then the others' tokens have come.
    tokens: list[float | None] = [float(each // 3) for each in range(300)]
    server = FakeServer(tokens, answers=lambda: False)
    with Pulse(server, LIMIT, LOOK) as pulse:
        server.wait(lambda: server.num_probes > 0 and server.num_looks > 4)
        pulse.check()


def test_a_probe_that_hangs_ends_no_watch() -> None:
    gate = threading.Event()
    server = FakeServer([5.0], answers=lambda: gate.wait(WAIT_SECONDS) and False)
    with Pulse(server, LIMIT, LOOK):
        server.wait(lambda: server.num_probes > 0)
    gate.set()
