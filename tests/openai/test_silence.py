"""An ensemble that says nothing any more, or is gone without a word: no answer waits for ever."""

import threading
import time
from typing import Any

import pytest

from gptoss_openai.config import GatewayConfig
from gptoss_openai.ensemble import Reply

from .fakes import ANSWER, Relay, eventually, running
from .test_http import LONG, _read_to_the_end, _wait_until_held

NEVER = threading.Event()


def test_a_stream_that_falls_silent_ends_with_an_error_and_its_generation_too() -> None:
    with running(silent_seconds=0.3) as stack:
        stack.fake.script = lambda _: [Reply(text="a"), NEVER]
        answer = stack.chat(stream=True)
        assert answer.status == 200
        assert answer.events[-1] == "[DONE]"
        error = answer.events[-2]["error"]
        assert (error["code"], error["type"]) == ("timeout", "server_error")
        assert error["message"] == "the model's server has said nothing for 0.3 seconds"
        eventually(lambda: stack.fake.num_cancelled == 1, 5)


@pytest.mark.parametrize(
    ("stream", "limit"), [(True, {"silent_seconds": 0.3}), (False, {"whole_seconds": 0.3})]
)
def test_a_request_without_any_answer_is_504(stream: bool, limit: dict[str, Any]) -> None:
    with running(**limit) as stack:
        stack.fake.script = lambda _: [NEVER]
        answer = stack.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        eventually(lambda: stack.fake.num_cancelled == 1, 5)
        stack.fake.script = lambda _: ANSWER
        assert stack.chat(stream=stream).status == 200


def test_signs_of_life_are_no_silence() -> None:
    """A stream that is queued gets empty replies."""
    with running(silent_seconds=1.0) as stack:
        stack.fake.script = lambda _: [*(0.3, Reply()) * 6, *ANSWER]
        assert stack.chat(stream=True).status == 200


def test_a_slow_reader_is_not_the_ensembles_silence() -> None:
    with running(silent_seconds=1.0) as stack:
        stack.fake.script = lambda _: [*LONG[:2000], Reply(finish_reason="stop")]
        with stack.connect({"stream": True}) as client:
            assert client.recv(100)
            began = time.monotonic()
            stack.fake.script = lambda _: ANSWER
            _wait_until_held(stack)
            eventually(lambda: time.monotonic() - began > 1.5, 5)
            assert b"data: [DONE]" in _read_to_the_end(client)


def test_a_whole_answer_may_be_silent_for_longer() -> None:
    with running(silent_seconds=0.1) as stack:
        stack.fake.script = lambda _: [0.5, *ANSWER]
        assert stack.chat().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_ensemble_that_is_gone_without_a_word_is_noticed(stream: bool) -> None:
    relay = Relay()
    with running(relay=relay, peer_seconds=0.8) as stack:
        stack.fake.script = lambda _: [Reply(text="a"), NEVER] if stream else [NEVER]
        with stack.connect({"stream": stream}) as client:
            if stream:
                assert client.recv(100)
            eventually(lambda: len(stack.fake.requests) == 1, 5)
            relay.is_silent = True
            if stream:
                told = _read_to_the_end(client)
                assert b'"code":"unavailable"' in told
                assert b"does not answer" in told
            else:
                assert client.recv(4096).startswith(b"HTTP/1.1 503 ")
        # Whoever comes next has a connection of its own, and none of the old one's streams.
        relay.is_silent = False
        stack.fake.script = lambda _: ANSWER
        before = relay.num_connections
        assert stack.chat(stream=stream).status == 200
        assert relay.num_connections == before + 1


def test_who_read_slowly_when_it_was_gone_is_told_too() -> None:
    relay = Relay()
    with running(relay=relay, peer_seconds=0.8, slow_reader_seconds=60) as stack:
        stack.fake.script = lambda _: LONG
        with stack.connect({"stream": True}) as client:
            assert client.recv(100)
            stack.fake.script = lambda _: ANSWER
            _wait_until_held(stack)
            relay.is_silent = True
            assert stack.chat().status == 503
            began = time.monotonic()
            assert b"does not answer" in _read_to_the_end(client)
            assert time.monotonic() - began < 10


def test_a_request_to_an_ensemble_that_is_gone_is_not_held() -> None:
    relay = Relay()
    with running(relay=relay, peer_seconds=0.8) as stack:
        assert stack.chat(stream=True).status == 200  # It has left a stream for the next one.
        relay.is_silent = True
        for stream in (False, True):
            answer = stack.chat(stream=stream)
            assert (answer.status, answer.error["code"]) == (503, "unavailable")


def test_an_ensemble_that_is_busy_or_not_ready_is_not_gone() -> None:
    with running(peer_seconds=0.4) as stack:
        stack.fake.is_ready = False
        stack.fake.script = lambda _: [1.5, *ANSWER]
        assert stack.chat().status == 200


def test_by_default_no_queue_and_no_prefill_is_taken_for_silence() -> None:
    config = GatewayConfig()
    # The ensemble gives each stream a sign of life once a second, and a whole answer none: 131,072
    # tokens at 32 ms, what a full engine takes, are 70 minutes.
    assert config.silent_seconds >= 60
    assert config.whole_seconds > 131_072 * 0.032
