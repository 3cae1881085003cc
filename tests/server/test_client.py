"""Inputs by name become tensors of the right type, or a sentence; answers share a stream."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferResult, service_pb2_grpc
from tritonclient.grpc.service_pb2 import (
    ModelInferResponse,  # pyright: ignore[reportAttributeAccessIssue]
    ModelStreamInferResponse,  # pyright: ignore[reportAttributeAccessIssue]
)
from tritonclient.utils import serialize_byte_tensor

from gptoss_backend.client import ChatClient, RequestFailed, as_arrays, as_request, as_values
from gptoss_engine.types import InvalidRequest

from .clients import eventually


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
    request = as_request("model", {name: value})
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == (name, kind, shape)
    # Sent as tritonclient sends it.
    (array,) = as_arrays({name: value}).values()
    expected = InferInput(name, shape, kind)
    expected.set_data_from_numpy(array)
    assert [*request.raw_input_contents] == [expected._get_content()]


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
        as_request("model", {name: value})


def test_a_request_asks_for_its_end_and_carries_its_limit() -> None:
    plain, limited = as_request("a", {}), as_request("b", {}, 0.25)
    assert (plain.model_name, limited.model_name) == ("a", "b")
    assert plain.parameters["triton_enable_empty_final_response"].bool_param
    assert "timeout" not in plain.parameters
    assert limited.parameters["timeout"].int64_param == 250_000


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


class _Server(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`calls` has what it was asked, each stream's begin and how it ended.

    "refused" gets an error, "stays" one response and then none, whatever else two responses.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.calls: list[str] = []

    def ModelStreamInfer(  # noqa: N802
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[ModelStreamInferResponse]:
        self._note("start")
        context.add_callback(lambda: self._note("end"))
        for request in request_iterator:
            self._note(request.model_name)
            if request.model_name == "refused":
                yield ModelStreamInferResponse(error_message="no")
                continue
            if request.model_name == "broken":
                context.abort(grpc.StatusCode.UNAVAILABLE, "the server has gone")
            yield _two_tokens(is_last=False)
            if request.model_name != "stays":
                yield _two_tokens(is_last=True)

    def _note(self, call: str) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()

    def wait(self, *calls: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.calls == [*calls], 10), self.calls


def _two_tokens(*, is_last: bool) -> ModelStreamInferResponse:
    response = ModelInferResponse(raw_output_contents=[np.arange(2, dtype=np.int32).tobytes()])
    response.outputs.add(name="token_ids", datatype="INT32", shape=[2])
    response.parameters["triton_final_response"].bool_param = is_last
    return ModelStreamInferResponse(infer_response=response)


@contextmanager
def _serving(server: _Server, port: int = 0) -> Iterator[str]:
    with ThreadPoolExecutor(8) as threads:
        grpc_server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(server, grpc_server)
        url = f"127.0.0.1:{grpc_server.add_insecure_port(f'127.0.0.1:{port}')}"
        grpc_server.start()
        try:
            yield url
        finally:
            grpc_server.stop(None).wait()


@pytest.fixture
def server() -> _Server:
    return _Server()


@pytest.fixture
def url(server: _Server) -> Iterator[str]:
    with _serving(server) as url:
        yield url


def _ask(connection: ChatClient, model: str = "asked") -> list[dict[str, Any]]:
    return list(connection.stream(model, {}))


def test_answers_share_a_stream(server: _Server, url: str) -> None:
    with ChatClient(url) as connection:
        assert _ask(connection) == _ask(connection) == [{"token_ids": [0, 1]}] * 2
        assert server.calls == ["start", "asked", "asked"]
    server.wait("start", "asked", "asked", "end")


def test_who_leaves_early_cancels_and_hears_nothing_of_it_later(server: _Server, url: str) -> None:
    with ChatClient(url) as connection:
        responses = connection.stream("stays", {})
        next(responses)
        responses.close()
        server.wait("start", "stays", "end")
        assert len(_ask(connection)) == 2
    server.wait("start", "stays", "end", "start", "asked", "end")


def test_a_failed_request_leaves_no_stream(server: _Server, url: str) -> None:
    with ChatClient(url) as connection:
        with pytest.raises(RequestFailed, match="no"):
            _ask(connection, "refused")
        server.wait("start", "refused", "end")
        assert len(_ask(connection)) == 2


def test_a_stream_that_breaks_says_why(server: _Server, url: str) -> None:
    with ChatClient(url) as connection:
        _ask(connection)
        with pytest.raises(RequestFailed, match="the server has gone"):
            _ask(connection, "broken")
        assert len(_ask(connection)) == 2


def test_a_stream_that_broke_meanwhile_fails_nobody(server: _Server) -> None:
    with _serving(server) as url:
        connection = ChatClient(url)
        _ask(connection)
        idle = connection._idle
        assert idle is not None
    has_ended = threading.Event()
    if idle.responses.add_callback(has_ended.set):
        assert has_ended.wait(10)
    with connection, _serving(server, int(url.rpartition(":")[2])):
        assert len(_ask(connection)) == 2


def test_a_server_that_is_not_there_is_said(server: _Server) -> None:
    with _serving(server) as url:
        pass
    with ChatClient(url) as connection, pytest.raises(RequestFailed, match="onnect"):
        _ask(connection)


def test_a_stream_in_use_is_nobody_elses(server: _Server, url: str) -> None:
    with ChatClient(url) as connection:
        _ask(connection)
        first = connection.stream("stays", {})
        next(first)
        assert len(_ask(connection)) == 2
        assert server.calls == ["start", "asked", "stays", "start", "asked"]
        first.close()


def test_inputs_that_cannot_be_sent_open_no_stream(server: _Server, url: str) -> None:
    with ChatClient(url) as connection, pytest.raises(InvalidRequest):
        list(connection.stream("asked", {"seed": -1}))
    assert server.calls == []


def test_no_thread_of_a_closed_client_is_left(url: str) -> None:
    before = _num_threads()
    for model in ("asked", "refused", "stays"):
        with ChatClient(url) as connection, suppress(RequestFailed):
            list(islice(connection.stream(model, {}), 1 if model == "stays" else None))
    eventually(lambda: _num_threads() <= before, 10)


def _num_threads() -> int:
    """Without those of the test's server."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(not name.startswith("ThreadPoolExecutor") for name in names)
