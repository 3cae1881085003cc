"""What may be on its way through an ensemble, and who says that it has arrived."""

import queue
import socket

import pytest

from gptoss_backend import pacing
from gptoss_backend.pacing import Acknowledgements, Pacer

MOST = 8


def filled(*, is_acknowledged: bool = True) -> Pacer:
    """One that has no room, if it counts."""
    pacer = Pacer()
    if is_acknowledged:
        pacer.acknowledge("before", 0)
    for number in range(MOST):
        pacer.sent("g", number, float(number))
    return pacer


def test_there_is_room_for_so_many() -> None:
    pacer = Pacer()
    pacer.acknowledge("before", 0)
    assert pacer.room(0.0) == MOST
    pacer.sent("g", 0, 0.0)
    pacer.sent("h", 0, 0.0)
    assert pacer.room(0.0) == MOST - 2
    pacer.acknowledge("g", 0)
    pacer.acknowledge("g", 0)
    pacer.acknowledge("nobody", 3)
    assert pacer.room(0.0) == MOST - 1


def test_who_acknowledges_nothing_is_not_waited_for() -> None:
    pacer = filled(is_acknowledged=False)
    assert pacer.room(0.0) > 1000
    pacer.acknowledge("g", 0)
    assert pacer.room(0.0) == 1


def test_what_is_lost_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_PATIENCE_SECONDS", 10.0)
    pacer = filled()
    assert pacer.room(10.0) == 0
    assert pacer.room(10.5) == 1
    assert pacer.room(12.5) == 3
    assert pacer.room(100.0) == MOST


def test_acknowledgements_arrive_and_nonsense_does_not() -> None:
    heard: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    acknowledgements = Acknowledgements(lambda *what: heard.put(what))
    address = acknowledgements.address.replace("@", "\0", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for word in (b"g 0", b"g", b"g x", b"g 1 2", b"\xff 1", b"h 17"):
            sender.sendto(word, address)
        assert [heard.get(timeout=10) for _ in range(2)] == [("g", 0), ("h", 17)]
        acknowledgements.close()
        with pytest.raises(ConnectionRefusedError):
            sender.sendto(b"g 1", address)
    assert heard.empty()
