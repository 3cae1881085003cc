"""A streaming gRPC client of the ensemble `gpt_oss`, and of any decoupled model."""

import json
import queue
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.service_pb2 import (
    ModelInferRequest,  # pyright: ignore[reportAttributeAccessIssue]
)
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from gptoss_engine.types import InvalidRequest

_ANY_LENGTH = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# A proxy that the environment names is no way to this machine.
_NO_PROXY = [("grpc.enable_http_proxy", 0)]


class RequestFailed(RuntimeError):
    """The server refused or failed a request, or is not there: its own sentence."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call; id and name are empty but on the first piece."""

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """One response of the ensemble. finish_reason is empty on all but the last."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    finish_reason: str
    outputs: Mapping[str, Any] = field(repr=False)
    """Every output by name."""


class ChatClient:
    """One connection to a server at `url` (host:port of gRPC); one request at a time.

    Its stream stays open between answers: to open one takes longer than all else that a client
    does. So leave it by `with`, or close it: an open stream keeps a thread.
    """

    def __init__(self, url: str) -> None:
        is_local = url.startswith(("127.0.0.1:", "localhost:", "[::1]:"))
        options = [*_ANY_LENGTH, *(_NO_PROXY if is_local else ())]
        self._channel = grpc.insecure_channel(url, options)
        self._service = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        # The stream, while it is open and no request has it.
        self._idle: _Stream | None = None

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._channel.close()

    def ask(self, **fields: Any) -> Generator[ChatResponse, None, None]:
        """Stream the answer to one request; `fields` are the ensemble's inputs by name.

        Closing the generator before its end cancels the request: the engine stops within moments.
        """
        with closing(self.stream("gpt_oss", {"stream": True, **fields})) as responses:
            for outputs in responses:
                yield _chat_response(outputs)

    def stream(
        self, model: str, inputs: Mapping[str, Any], *, timeout_seconds: float | None = None
    ) -> Generator[dict[str, Any], None, None]:
        """The responses of any decoupled model, each its outputs by name: text, number or list."""
        return self.responses(as_request(model, inputs, timeout_seconds))

    def responses(self, request: ModelInferRequest) -> Generator[dict[str, Any], None, None]:
        """Likewise, of a request that `as_request` made."""
        stream, self._idle = self._idle, None
        if stream is None or not stream.responses.is_active():
            stream = _Stream(self._service)
        is_over = False
        try:
            stream.requests.put(request)
            while not is_over:
                # Read here: a thread that called back would have to wait for its turn first.
                answer = next(stream.responses)
                if answer.error_message:
                    raise RequestFailed(answer.error_message)
                response = answer.infer_response
                is_over = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield as_values(response)
        except grpc.RpcError as error:
            raise RequestFailed(stream.responses.details() or str(error)) from None
        except StopIteration:
            raise RequestFailed("the server has closed the stream") from None
        finally:
            if is_over:
                self._idle = stream
            else:
                stream.cancel()


class _Stream:
    """An open stream: what is put into `requests` is sent, and `responses` has what comes."""

    def __init__(self, service: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Errors come as sentences without their codes: the header `triton_grpc_error`, which asks
        # for codes, makes the 2.51 server crash sooner or later.
        self.responses: Any = service.ModelStreamInfer(iter(self.requests.get, None))

    def cancel(self) -> None:
        self.responses.cancel()
        self.requests.put(None)  # Or the thread that sends would wait for one for ever.


def as_request(
    model: str, inputs: Mapping[str, Any], timeout_seconds: float | None = None
) -> ModelInferRequest:
    """A request for responses of which the last one says so, with inputs by name.

    Raises InvalidRequest for a number that its type cannot hold.
    """
    request = ModelInferRequest(model_name=model)
    for name, array in as_arrays(inputs).items():
        kind = np_to_triton_dtype(array.dtype)
        request.inputs.add(name=name, datatype=kind, shape=array.shape)
        is_text = kind == "BYTES"
        request.raw_input_contents.append(_with_lengths(array) if is_text else array.tobytes())
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if timeout_seconds is not None:
        request.parameters["timeout"].int64_param = int(timeout_seconds * 1e6)
    return request


def as_arrays(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Inputs by name: text, flags, numbers, lists of texts or of token ids, each as its type.

    Raises InvalidRequest for a number that its type cannot hold.
    """
    return {name: _array(name, value) for name, value in inputs.items()}


def _array(name: str, value: Any) -> np.ndarray:
    if isinstance(value, (str, bytes)):
        value = [value]
    if isinstance(value, Sequence):
        if all(issubclass(kind, int) for kind in set(map(type, value))):
            return _integers(name, value, np.int32)
        encoded = [each.encode() if isinstance(each, str) else each for each in value]
        return np.array(encoded, dtype=np.object_)
    if type(value) is int:
        return _integers(name, [value], np.uint64 if name == "seed" else np.int32)
    return np.array([value], dtype=np.bool_ if isinstance(value, bool) else np.float32)


def _integers(name: str, values: Sequence[int], dtype: type[np.integer]) -> np.ndarray:
    limits = np.iinfo(dtype)
    if values and not limits.min <= min(values) <= max(values) <= limits.max:
        wrong = next(value for value in values if not limits.min <= value <= limits.max)
        raise InvalidRequest(f"{name} must be in [{limits.min}, {limits.max}], got {wrong}")
    return np.array(values, dtype=dtype)


def _with_lengths(texts: np.ndarray) -> bytes:
    """As BYTES travel: each element behind its length, four bytes."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts.tolist())


def as_values(response: Any) -> dict[str, Any]:
    """The outputs of a ModelInferResponse by name: text, a number, or the list of token_ids.

    Read where they lie: InferResult.as_numpy takes 0.3 ms for eight of them.
    """
    outputs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _value(output, content) for output, content in outputs}


def _value(output: Any, content: bytes) -> Any:
    if output.datatype == "BYTES":  # one element: its length, four bytes, and itself
        return content[4:].decode()
    array = np.frombuffer(content, dtype=triton_to_np_dtype(output.datatype))
    return array.tolist() if output.name == "token_ids" else array[0].item()


def _chat_response(outputs: Mapping[str, Any]) -> ChatResponse:
    calls = [
        ToolCallDelta(
            index=call["index"],
            call_id=call.get("id", ""),
            name=call.get("function", {}).get("name", ""),
            arguments=call.get("function", {}).get("arguments", ""),
        )
        for call in json.loads(outputs["tool_calls"])
    ]
    return ChatResponse(
        text=outputs["text_output"],
        reasoning=outputs["reasoning_output"],
        tool_calls=tuple(calls),
        finish_reason=outputs["finish_reason"],
        outputs=outputs,
    )
