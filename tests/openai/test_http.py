"""Over HTTP, before a fake ensemble: statuses and shapes of errors, who left, who reads slowly."""

import http.client
import json
import socket
import threading
import time
from typing import Any

import pytest

from gptoss_openai.chat import ChatAnswer
from gptoss_openai.ensemble import Reply

from .fakes import ANSWER, MESSAGES, MODEL, Stack, Step, eventually, running

LONG = tuple(Reply(text="x" * 1000, num_output_tokens=1) for _ in range(20_000))
CHAT = {"model": MODEL, "messages": MESSAGES}


def test_a_whole_chat(stack: Stack) -> None:
    answer = stack.chat(temperature=0.5)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.json["choices"][0]["message"]["content"] == "Hi there"
    (inputs,) = stack.fake.requests
    assert json.loads(inputs.pop("messages")) == MESSAGES
    assert inputs == {"stream": False, "temperature": 0.5}


def test_a_streamed_chat(stack: Stack) -> None:
    answer = stack.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.events[-1] == "[DONE]"
    texts = [each["choices"][0]["delta"].get("content") for each in answer.events[:-1]]
    assert "".join(filter(None, texts)) == "Hi there"


@pytest.mark.parametrize(
    ("sentence", "status", "code", "param"),
    [
        ("temperature must be in [0, 100], got 101.0", 400, "invalid_value", "temperature"),
        (
            "n is not built in this version and takes nothing but 1",
            400,
            "unsupported_parameter",
            "n",
        ),
        ("max_tokens must be in [1, 9], got 0", 400, "invalid_value", "max_completion_tokens"),
        (
            "the prompt (input_ids) must hold at most 9 tokens, so that max_model_len (10) leaves "
            "one to generate, got 12",
            400,
            "context_length_exceeded",
            "messages",
        ),
        ("9 requests wait for a place, as many as …: try again later", 503, "unavailable", None),
        ("the engine is draining: it takes no new requests", 503, "unavailable", None),
        ("guide cannot be compiled: grammar too big", 400, "invalid_value", "tools"),
        ("guide cannot be given here: no vocabulary", 400, "unsupported_parameter", "tools"),
        ("the engine failed: CUDA error", 503, "unavailable", None),
        ("the model's logits behind 3 tokens are not numbers", 500, "internal_error", None),
        ("list index out of range", 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_ensemble_refuses_has_its_status(
    stack: Stack, stream: bool, sentence: str, status: int, code: str, param: str | None
) -> None:
    stack.fake.script = lambda _: [sentence]
    answer = stack.chat(stream=stream, max_completion_tokens=5)
    assert answer.status == status
    assert answer.error["code"] == code
    assert answer.error["param"] == param
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert answer.error["type"] == kind
    said = sentence.replace("max_tokens must", "max_completion_tokens must")
    if code == "context_length_exceeded":
        said = (
            "the maximum context length is 10 tokens: messages must hold at most 9, so that one is "
            "left to generate, got 12"
        )
    assert answer.error["message"] == said.replace("guide cannot", "tools cannot")
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_deadline_is_499_and_in_a_stream_an_error_and_the_end(stack: Stack, path: str) -> None:
    stack.fake.script = lambda _: [Reply(text="a"), Reply(finish_reason="abort")]
    body = {"model": MODEL} | _prompt(path)
    whole = stack.request(f"/v1/{path}", body)
    assert (whole.status, whole.error["code"]) == (499, "cancelled")
    streamed = stack.request(f"/v1/{path}", {**body, "stream": True})
    assert streamed.status == 200
    events = streamed.events
    assert (events.pop() if path != "responses" else "[DONE]") == "[DONE]"
    assert events[-1]["error"] == whole.error
    if path == "responses":
        assert events[-1]["type"] == "error"
        assert events[-1]["code"] == "cancelled"


def test_a_failure_in_a_stream_is_an_error_event_and_the_end(stack: Stack) -> None:
    stack.fake.script = lambda _: [Reply(text="a"), "the model's logits are not numbers"]
    failed = 'gptoss:gateway_cut_answers_total{reason="failed"}'
    before = stack.metric(failed)
    answer = stack.chat(stream=True)
    assert answer.status == 200
    assert stack.metric(failed) == before + 1
    assert answer.events[-2]["error"]["code"] == "internal_error"
    assert answer.events[-1] == "[DONE]"
    assert stack.chat().status == 500
    assert stack.metric(failed) == before + 1  # Its status tells of it.
    stack.fake.script = lambda _: ANSWER
    assert stack.chat().status == 200


def _prompt(path: str) -> dict[str, Any]:
    name = {"completions": "prompt", "responses": "input"}.get(path, "messages")
    return {name: MESSAGES if name == "messages" else "Hello"}


@pytest.mark.parametrize(
    ("body", "status", "param", "sentence"),
    [
        (b"[", 400, None, "the body is not JSON"),
        (b"[]", 400, None, "the body must be a JSON object, got []"),
        (b'{"a": NaN}', 400, None, "NaN is no JSON number"),
        (b'{"a": 1e999}', 400, None, "larger than any number"),
        (b"[" * 100_000, 400, None, "the body is not JSON"),
        (b'{"a": "\\ud800"}', 400, None, "half a character"),
        (b"\xff", 400, None, "the body is not JSON: it must be UTF-8, got byte 0xff at 0"),
        (b'{"a": "\xed\xa0\x80"}', 400, None, "must be UTF-8, got byte 0xed at 7"),
        ('{"a": "\\ud800"}'.encode("utf-16"), 400, None, "must be UTF-8, got byte 0xff at 0"),
        ({}, 400, "model", "model must be given"),
        ({"model": "gpt-4"}, 404, "model", '"gpt-4" does not exist here; "gpt-oss-demo" does'),
        ({"model": ["x"]}, 404, "model", "does not exist"),
        ({"model": MODEL}, 400, "messages", "messages must be given"),
    ],
)
def test_bodies_that_are_refused(
    stack: Stack, body: Any, status: int, param: str | None, sentence: str
) -> None:
    answer = stack.request("/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert sentence in answer.error["message"]
    assert not stack.fake.requests


def test_other_kinds_of_content_are_refused(stack: Stack) -> None:
    headers = {"Content-Type": "text/plain"}
    answer = stack.request("/v1/chat/completions", CHAT, headers=headers)
    assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/responses/resp_1", 404, "not_found"),
        ("DELETE", "/v1/responses/resp_1", 404, "not_found"),
    ],
)
def test_routes_that_are_not(stack: Stack, method: str, path: str, status: int, code: str) -> None:
    answer = stack.request(path, method=method)
    assert (answer.status, answer.error["code"]) == (status, code)


def test_models(stack: Stack) -> None:
    listed = stack.request("/v1/models").json
    assert [each["id"] for each in listed["data"]] == [MODEL]
    assert stack.request(f"/v1/models/{MODEL}").json == listed["data"][0]


def test_a_model_whose_name_has_slashes() -> None:
    with running(model_name="openai/gpt-oss-20b") as stack:
        assert stack.request("/v1/models/openai/gpt-oss-20b").status == 200


def test_health_is_the_models(stack: Stack) -> None:
    assert stack.request("/health").status == 200
    stack.fake.is_ready = False
    assert stack.request("/health").status == 503
    stack.fake.is_ready = True


def test_keys() -> None:
    with running(api_keys=("one", "two")) as stack:
        for header in (None, "Bearer three", "Bearer", "Basic one", "one", "Bearer one two"):
            headers = {} if header is None else {"Authorization": header}
            for path, body in (("/v1/models", None), ("/v1/chat/completions", CHAT)):
                answer = stack.request(path, body, headers=headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), header
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert stack.request("/v1/models", headers=headers).status == 200
        assert stack.request("/health").status == stack.request("/metrics").status == 200


def test_a_stored_response_is_its_keys_alone() -> None:
    with running(api_keys=("one", "two")) as stack:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"model": MODEL, "input": "Hello"}
        stored = stack.request("/v1/responses", body, headers=mine).json["id"]
        path = f"/v1/responses/{stored}"
        assert stack.request(path, headers=other).status == 404
        follow = {**body, "previous_response_id": stored}
        refused = stack.request("/v1/responses", follow, headers=other)
        assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
        assert stack.request("/v1/responses", follow, headers=mine).status == 200
        assert stack.request(path, headers=mine).json["id"] == stored
        assert stack.request(path, method="DELETE", headers=other).status == 404
        assert stack.request(path, method="DELETE", headers=mine).json["deleted"] is True
        assert stack.request(path, headers=mine).status == 404


def test_cors_is_off(stack: Stack) -> None:
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = stack.request("/v1/models", method="OPTIONS", headers=headers)
    assert answer.status == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_cors_for_a_known_origin() -> None:
    with running(cors_origins=("https://a.example",), api_keys=("k",)) as stack:
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            headers = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            answer = stack.request("/v1/chat/completions", method="OPTIONS", headers=headers)
            assert answer.status == status
        # What is refused can be read, too.
        answer = stack.request("/v1/models", headers={"Origin": "https://a.example"})
        assert answer.status == 401
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("size", [1001, 3500, 100_000])
def test_a_body_that_is_too_large_is_413(size: int) -> None:
    with running(max_body_bytes=1000) as stack:
        answer = stack.chat(user="x" * size)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert answer.error["message"] == "the body must be at most 1000 bytes"
        assert stack.chat().status == 200


def test_a_body_that_does_not_come_is_408() -> None:
    with running(body_seconds=0.2) as stack, socket.socket() as client:
        client.settimeout(10)
        client.connect(("127.0.0.1", stack.port))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        assert b" 408 " in client.recv(4096)


@pytest.mark.parametrize("head", [b"GET /", b"GET /health HTTP/1.1\r\nx: "])
def test_a_head_without_end_is_cut(stack: Stack, head: bytes) -> None:
    with socket.socket() as client:
        client.settimeout(10)
        client.connect(("127.0.0.1", stack.port))
        with pytest.raises(ConnectionError):  # noqa: PT012  whichever write comes too late
            client.sendall(head)
            for _ in range(64):
                client.sendall(b"x" * 2**20)
    eventually(lambda: not stack.num_connections, 10)


def test_a_long_head_and_many_requests_on_one_connection_are_taken(stack: Stack) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=20)
    for _ in range(3):
        connection.request("GET", "/health", headers={"x-long": "x" * 60_000})
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.close()


def test_a_head_may_begin_behind_a_long_body(stack: Stack) -> None:
    content = json.dumps({**CHAT, "user": "x" * 150_000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(content) + content
    with socket.socket() as client:
        client.settimeout(20)
        client.connect(("127.0.0.1", stack.port))
        client.sendall(asked + b"GET /hea")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"lth HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        received = b""
        while piece := client.recv(2**16):
            received += piece
        assert b'{"status":"ok"}' in received


def test_more_requests_than_may_be_open_are_503() -> None:
    with running(max_open_requests=1) as stack:
        goes_on = threading.Event()
        stack.fake.script = lambda _: [Reply(text="a"), goes_on, *ANSWER]
        with stack.connect({"stream": True}) as first:
            assert first.recv(100)
            refused = stack.chat()
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert stack.request("/health").status == 200
            goes_on.set()
            _read_to_the_end(first)
        assert stack.chat().status == 200


def _read_to_the_end(client: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = client.recv(2**16)
        assert piece, "cut"
        received += piece
    return received


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_generation(stack: Stack, stream: bool) -> None:
    never = threading.Event()
    stack.fake.script = lambda _: [Reply(text="a"), never]
    if not stream:
        stack.fake.script = lambda _: [never]
    before = stack.fake.num_cancelled
    left = stack.metric('gptoss:gateway_cut_answers_total{reason="client_gone"}')
    with stack.connect({"stream": stream}) as client:
        eventually(lambda: len(stack.fake.requests) == 1, 5)
        if stream:
            assert client.recv(100)
    assert eventually(lambda: stack.fake.num_cancelled == before + 1, 5) < 1
    assert stack.metric('gptoss:gateway_cut_answers_total{reason="client_gone"}') == left + 1
    eventually(lambda: stack.metric("gptoss:gateway_open_requests") == 1, 5)


def _wait_until_held(stack: Stack) -> None:
    """Until nothing comes from the ensemble but the answers to others, which do come."""

    def is_held() -> bool:
        before = stack.fake.num_sent
        for _ in range(20):
            assert stack.chat(stream=True).status == 200
        return stack.fake.num_sent == before + 20 * len(ANSWER)

    eventually(is_held, 20)


def test_a_slow_reader_holds_up_the_ensemble_and_nobody_else() -> None:
    with running(slow_reader_seconds=60) as stack:
        stack.fake.script = lambda _: LONG
        with stack.connect({"stream": True}) as slow:
            assert slow.recv(100)
            stack.fake.script = lambda _: ANSWER
            _wait_until_held(stack)
            assert stack.fake.num_sent < len(LONG) / 2
        eventually(lambda: stack.fake.num_cancelled == 1, 5)


def test_who_reads_nothing_is_gone() -> None:
    with running(slow_reader_seconds=0.3) as stack:
        stack.fake.script = lambda _: LONG
        with stack.connect({"stream": True}) as client:
            # By the gateway's clock or the kernel's.
            eventually(lambda: stack.metric("gptoss:gateway_cut_answers_total") == 1, 10)
            eventually(lambda: stack.fake.num_cancelled == 1, 5)
            stack.fake.script = lambda _: ANSWER
            assert stack.chat().status == 200
            # The kernel lets go of what was written and never read.
            eventually(lambda: stack.metric("gptoss:gateway_open_requests") == 1, 5)
            eventually(lambda: not stack.num_connections, 10)
            assert client.recv(100)


def test_a_reader_whom_the_kernel_thinks_alive_is_gone_too() -> None:
    with running(is_tuned=False, slow_reader_seconds=0.3) as stack:
        stack.fake.script = lambda _: LONG
        name = 'gptoss:gateway_cut_answers_total{reason="slow_reader"}'
        with stack.connect({"stream": True}):
            eventually(lambda: stack.metric(name) == 1, 20)
            eventually(lambda: stack.fake.num_cancelled == 1, 5)


def test_answers_that_are_cut_end_with_an_error_and_none_begins() -> None:
    with running() as stack:
        never = threading.Event()
        stack.fake.script = lambda _: [Reply(text="a"), never]
        with stack.connect({"stream": True}) as streamed, stack.connect({}) as whole:
            assert streamed.recv(100)
            eventually(lambda: len(stack.fake.requests) == 2, 5)
            stack.loop.call_soon_threadsafe(stack.gateway.exchanges.cut)
            told = _read_to_the_end(streamed)
            assert b'"code":"unavailable"' in told
            assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert whole.recv(4096).startswith(b"HTTP/1.1 503 ")
        assert stack.metric('gptoss:gateway_cut_answers_total{reason="shutdown"}') == 2
        late = stack.chat()
        assert (late.status, late.headers["retry-after"]) == (503, "1")
        assert len(stack.fake.requests) == 2


def test_a_second_cut_leaves_the_error_of_the_first() -> None:
    with running(slow_reader_seconds=60) as stack:
        stack.fake.script = lambda _: LONG
        with stack.connect({"stream": True}) as client:
            assert client.recv(100)
            stack.fake.script = lambda _: ANSWER
            _wait_until_held(stack)  # And so its error will be.
            name = 'gptoss:gateway_cut_answers_total{reason="shutdown"}'
            for _ in range(2):
                stack.loop.call_soon_threadsafe(stack.gateway.exchanges.cut)
                eventually(lambda: stack.metric(name) == 1, 5)
            assert b'"code":"unavailable"' in _read_to_the_end(client)


def test_answers_share_a_stream_to_the_ensemble() -> None:
    with running() as stack:
        for _ in range(5):
            assert stack.chat(stream=True).status == stack.chat().status == 200
        assert stack.fake.num_streams == 1
        stack.fake.script = lambda _: ["temperature must be in [0, 100], got 101"]
        assert stack.chat().status == 400
        stack.fake.script = lambda _: ANSWER
        assert stack.chat().status == 200
        assert stack.fake.num_streams == 2


def test_an_ensemble_that_is_gone_is_503() -> None:
    with running() as stack:
        assert stack.chat().status == 200
        stack.stop_ensemble()
        answer = stack.chat()
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert stack.request("/health").status == 503


def test_an_ensemble_that_was_started_again_is_found_again() -> None:
    with running() as stack:
        for _ in range(3):
            assert stack.chat(stream=True).status == 200
            stack.restart_ensemble()
            assert stack.chat().status == 200


@pytest.mark.parametrize("name", ["push", "whole"])
def test_a_bug_is_a_500_or_an_error_event(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(ChatAnswer, name, broken)
    answer = stack.chat(stream=name == "push")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert stack.fake.num_cancelled
    monkeypatch.setattr(ChatAnswer, "__init__", broken)
    assert stack.chat().error["message"] == "the gateway failed; its log says how"


def test_an_ensemble_that_dies_in_a_stream_is_an_error_event() -> None:
    with running() as stack:
        never = threading.Event()
        stack.fake.script = lambda _: [Reply(text="a"), never]
        with stack.connect({"stream": True}) as client:
            assert client.recv(100)
            stack.stop_ensemble()
            assert b'"code":"unavailable"' in _read_to_the_end(client)


def test_the_body_of_a_large_request_is_read_in_a_thread(stack: Stack) -> None:
    messages = [{"role": "user", "content": "x" * 200_000}]
    assert stack.chat(messages=messages).status == 200
    refused = stack.chat(messages=[{"role": "user", "content": "x" * 5_000_000}])
    assert (refused.status, refused.error["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_schema_that_takes_long_holds_up_nobody(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, path: str, field: dict[str, Any]
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    was_free: list[bool] = []

    def slow(*_: Any) -> None:
        begun.set()
        was_free.append(goes_on.wait(5))

    module = "chat" if path == "chat/completions" else "responses"
    monkeypatch.setattr(f"gptoss_openai.{module}.check", slow)
    body = {"model": MODEL, **_prompt(path), **field}
    asking = threading.Thread(target=lambda: stack.request(f"/v1/{path}", body))
    asking.start()
    assert begun.wait(5)
    assert stack.request("/health").status == 200
    goes_on.set()
    asking.join()
    assert was_free == [True]


def test_many_at_once(stack: Stack) -> None:
    answers: list[bool] = []

    def ask(number: int) -> None:
        words = f"number {number}"
        answer = stack.chat(messages=[{"role": "user", "content": words}], stream=True)
        answers.append(words in answer.body.decode())

    stack.fake.script = _echo
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 40
    assert time.monotonic() - started < 20


def _echo(inputs: dict[str, Any]) -> list[Step]:
    (message,) = json.loads(inputs["messages"])
    return [Reply(text=message["content"]), Reply(finish_reason="stop")]
