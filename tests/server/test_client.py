"""Inputs by name become tensors of the right type, or a sentence; answers share a stream."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult
from tritonclient.grpc.service_pb2 import (
    ModelInferResponse,  # pyright: ignore[reportAttributeAccessIssue]
)
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from gptoss_backend import client
from gptoss_backend.client import ChatClient, RequestFailed, as_tensors, as_values
from gptoss_engine.types import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value", "kind", "shape"),
    [
        ("text_input", "hé", "BYTES", [1]),
        ("stop_words", ["a", "b"], "BYTES", [2]),
        ("input_ids", [1, 2, 3], "INT32", [3]),
        ("stream", True, "BOOL", [1]),
        ("temperature", 0.5, "FP32", [1]),
        ("max_tokens", 2**31 - 1, "INT32", [1]),
        ("seed", 2**64 - 1, "UINT64", [1]),
    ],
)
def test_types(name: str, value: Any, kind: str, shape: list[int]) -> None:
    (tensor,) = as_tensors({name: value})
    assert (tensor.name(), tensor.datatype(), tensor.shape()) == (name, kind, shape)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("max_tokens", 3_000_000_000, r"max_tokens must be in \[-2147483648, 2147483647\], got 3"),
        ("input_ids", [1, 2**31], r"input_ids must be in \[.*\], got 2147483648"),
        ("seed", 2**64, r"seed must be in \[0, 18446744073709551615\], got 18446744073709551616"),
        ("seed", -1, r"seed must be in \[0, 18446744073709551615\], got -1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        as_tensors({name: value})


def test_values_are_what_tritonclient_reads() -> None:
    arrays = {
        "text_output": np.array(["hé\n".encode()], dtype=np.object_),
        "error": np.array([b""], dtype=np.object_),
        "token_ids": np.array([7, -1, 2**31 - 1], dtype=np.int32),
        "index": np.array([2**32 - 1], dtype=np.uint32),
        "cumulative_logprob": np.array([-0.7], dtype=np.float32),
        "is_it": np.array([True]),
    }
    kinds = ("BYTES", "BYTES", "INT32", "UINT32", "FP32", "BOOL")
    response = ModelInferResponse()
    for (name, array), kind in zip(arrays.items(), kinds, strict=True):
        response.outputs.add(name=name, datatype=kind, shape=array.shape)
        is_text = kind == "BYTES"
        content = serialize_byte_tensor(array).item() if is_text else array.tobytes()
        response.raw_output_contents.append(content)
    result = InferResult(response)
    values = as_values(response)
    for name in arrays:
        array = result.as_numpy(name)
        assert array is not None
        each = array.tolist() if name == "token_ids" else array.tolist()[0]
        assert values[name] == (each.decode() if isinstance(each, bytes) else each), name
    assert (values["text_output"], values["token_ids"]) == ("hé\n", [7, -1, 2**31 - 1])


def test_no_token_is_an_empty_list() -> None:
    response = ModelInferResponse(raw_output_contents=[b""])
    response.outputs.add(name="token_ids", datatype="INT32", shape=[0])
    assert as_values(response) == {"token_ids": []}


class _Server:
    """In tritonclient's place: `says` has what each stream is told; `calls`, what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.callback: Callable[[Any, Any], None]

    def start_stream(self, callback: Callable[[Any, Any], None]) -> None:
        self.calls.append("start")
        self.callback = callback

    def async_stream_infer(self, model: str, *_: Any, **__: Any) -> None:
        self.calls.append(model)
        if model == "refused":
            self.fail("no")
        else:
            self.respond(is_last=False)
            self.respond(is_last=True)

    def stop_stream(self, *, cancel_requests: bool = False) -> None:
        self.calls.append("cancel" if cancel_requests else "stop")

    def close(self) -> None:
        self.calls.append("close")

    def respond(self, *, is_last: bool) -> None:
        response = ModelInferResponse(raw_output_contents=[np.arange(2, dtype=np.int32).tobytes()])
        response.outputs.add(name="token_ids", datatype="INT32", shape=[2])
        response.parameters["triton_final_response"].bool_param = is_last
        self.callback(SimpleNamespace(get_response=lambda: response), None)

    def fail(self, sentence: str) -> None:
        self.callback(None, InferenceServerException(sentence))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Server:
    server = _Server()
    monkeypatch.setattr(client.tritonclient, "InferenceServerClient", lambda *_, **__: server)
    return server


def _ask(connection: ChatClient, model: str = "asked") -> list[dict[str, Any]]:
    return list(connection.stream(model, {}))


def test_answers_share_a_stream(server: _Server) -> None:
    with ChatClient("host:1") as connection:
        assert _ask(connection) == _ask(connection) == [{"token_ids": [0, 1]}] * 2
    assert server.calls == ["start", "asked", "asked", "close"]


def test_who_leaves_early_cancels_and_hears_nothing_of_it_later(server: _Server) -> None:
    with ChatClient("host:1") as connection:
        responses = connection.stream("left", {})
        next(responses)
        responses.close()
        assert len(_ask(connection)) == 2
    assert server.calls == ["start", "left", "cancel", "start", "asked", "close"]


def test_a_failed_request_leaves_no_stream(server: _Server) -> None:
    with ChatClient("host:1") as connection:
        with pytest.raises(RequestFailed, match="no"):
            _ask(connection, "refused")
        assert len(_ask(connection)) == 2
    assert server.calls == ["start", "refused", "stop", "start", "asked", "close"]


def test_a_stream_that_broke_meanwhile_fails_nobody(server: _Server) -> None:
    with ChatClient("host:1") as connection:
        _ask(connection)
        server.fail("the server has gone")
        assert len(_ask(connection)) == 2
    assert server.calls == ["start", "asked", "stop", "start", "asked", "close"]


def test_a_stream_in_use_is_nobody_elses(server: _Server) -> None:
    with ChatClient("host:1") as connection:
        _ask(connection)
        first = connection.stream("first", {})
        next(first)
        _ask(connection)  # tritonclient would refuse it.
    assert server.calls == ["start", "asked", "first", "start", "asked", "close"]


def test_inputs_that_cannot_be_sent_open_no_stream(server: _Server) -> None:
    with ChatClient("host:1") as connection, pytest.raises(InvalidRequest):
        list(connection.stream("asked", {"seed": -1}))
    assert server.calls == ["close"]
