"""Connections that send nothing, or half a request, or are too many, are not held."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gptoss_openai.ensemble import Reply

from .fakes import ANSWER, Stack, eventually, running


@contextmanager
def _connected(stack: Stack) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=10) as client:
        yield client


def _answer(client: socket.socket) -> tuple[int, dict[str, str]]:
    """The status and the error of a connection that ends with it."""
    received = b""
    while piece := client.recv(2**16):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


def _read_answer(client: socket.socket) -> None:
    """Of a connection that goes on."""
    received = b""
    while not received.endswith(b"}"):
        piece = client.recv(2**16)
        assert piece
        received += piece


def test_who_sends_nothing_is_let_go() -> None:
    with running(head_seconds=0.3) as stack, _connected(stack) as client:
        eventually(lambda: stack.num_connections == 1, 5)
        assert client.recv(100) == b""
        eventually(lambda: stack.num_connections == 0, 5)


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\nx-a: b\r\n"])
def test_half_a_head_is_408(sent: bytes) -> None:
    with running(head_seconds=0.3) as stack, _connected(stack) as client:
        client.sendall(sent)
        status, error = _answer(client)
        assert (status, error["code"]) == (408, "timeout")
        assert error["message"] == "the request's head must arrive within 0.3 seconds"


def test_a_head_has_its_time_however_often_a_byte_comes() -> None:
    with running(head_seconds=0.5) as stack, _connected(stack) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        client.settimeout(0.05)

        def is_answered() -> bool:
            client.sendall(b"x")
            try:
                return client.recv(100).startswith(b"HTTP/1.1 408 ")
            except TimeoutError:
                return False

        assert 0.3 < eventually(is_answered, 5) < 3


@pytest.mark.parametrize("sent", [b"GET /hea", b"\r\n"])
def test_so_has_the_next_one_on_a_connection(sent: bytes) -> None:
    with running(head_seconds=0.3) as stack, _connected(stack) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        _read_answer(client)
        client.sendall(sent)
        assert _answer(client)[0] == 408


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/models"), ("GET", "/health")])
def test_a_body_that_nobody_reads_must_come_too(method: str, path: str) -> None:
    with running(head_seconds=0.3, body_seconds=0.3) as stack, _connected(stack) as client:
        client.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        _read_answer(client)
        client.sendall(b"x")
        assert client.recv(1000) == b""
        eventually(lambda: stack.num_connections == 0, 5)


def test_an_answer_may_take_longer_and_a_next_request_wait_for_its_end() -> None:
    with running(head_seconds=0.3, body_seconds=0.3) as stack:
        goes_on = threading.Event()
        stack.fake.script = lambda _: [Reply(text="a"), 1.5, goes_on, *ANSWER]
        with stack.connect({"stream": True}) as client:
            client.sendall(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            assert client.recv(100)
            threading.Timer(1.0, goes_on.set).start()
            received = b""
            while piece := client.recv(2**16):
                received += piece
            # The body of the second one never comes, for which nobody waits any longer.
            assert received.index(b"data: [DONE]") < received.index(b"HTTP/1.1 405 ")


def test_connections_are_limited() -> None:
    with running(max_connections=2) as stack, ExitStack() as held:
        clients = [held.enter_context(_connected(stack)) for _ in range(2)]
        eventually(lambda: stack.num_connections == 2, 5)
        with _connected(stack) as third:
            status, error = _answer(third)
        assert (status, error["code"]) == (503, "unavailable")
        assert error["message"] == "2 connections are open, as many as are allowed"
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: stack.num_connections == 0, 5)
        assert stack.chat().status == 200


def test_what_is_no_request_is_400(stack: Stack) -> None:
    with _connected(stack) as client:
        client.sendall(b"NONSENSE\r\n\r\n")
        status, error = _answer(client)
    assert (status, error["type"]) == (400, "invalid_request_error")
