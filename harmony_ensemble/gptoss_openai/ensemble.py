"""The ensemble over gRPC: inputs by name in, replies out, as they come.

tritonclient's generated stub and messages, without its wrappers of numpy arrays: a request is made
and a response is read where it lies, which keeps the gateway's share of the first token small. For
the same reason a stream stays open for the next request: to open one takes a millisecond.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_openai.config import GatewayConfig
from gptoss_openai.errors import ApiError, Names, from_sentence
from gptoss_openai.parameters import PARAMETERS, Inputs, Value

MODEL = "gpt_oss"

_MOST_IDLE_STREAMS = 64
_READY_SECONDS = 2.0
_EOF = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # What is read ahead of a client who reads slowly: gRPC's own estimate was 5 MB a stream.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    # A server that was restarted is found again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Channels with the same options would share one connection, also a dead one.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One response of the ensemble; texts and counts are those of this response.

    tool_calls: OpenAI's deltas; `after` on a call's first says how much of this response's
    reasoning and text stood before it, all of both where it is not there.
    logprobs: OpenAI's entries, one a token of `text`.
    finish_reason: empty but on the last.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    index: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def call_deltas(self) -> list[dict[str, Any]]:
        """OpenAI's alone."""
        return [
            {name: value for name, value in call.items() if name != "after"}
            for call in self.tool_calls
        ]


class Ensemble:
    """One connection to the tritonserver at `config.url`, made within a running loop.

    A server whose machine or network is gone closes nothing, so it is asked for a sign of life
    while answers are open. By a request of its own and not by gRPC's pings: tritonserver takes two
    of them in ten minutes, and ends the connection, with all answers on it, for a third.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._connection = _Connection(config.url)
        self._watch = asyncio.create_task(self._keep_watch())

    async def close(self) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._connection.channel.close()

    async def is_ready(self) -> bool:
        return await self._connection.is_ready(_READY_SECONDS) is True

    async def _keep_watch(self) -> None:
        seconds = self._config.peer_seconds
        while True:
            await asyncio.sleep(seconds / 4)
            connection = self._connection
            num_heard = connection.num_heard
            if not connection.waiting or await connection.is_ready(seconds * 3 / 4) is not None:
                continue
            if connection.waiting and connection.num_heard == num_heard:
                self._connection = _Connection(self._config.url)
                await connection.lose(f"the model's server at {self._config.url} does not answer")

    async def ask(self, inputs: Inputs, names: Names) -> AsyncGenerator[Reply, None]:
        """The replies to one request; ApiError when it is refused or fails.

        Whoever closes the generator before its end, or is cancelled in it, aborts the generation.
        """
        config, connection = self._config, self._connection
        seconds = config.silent_seconds if inputs["stream"] else config.whole_seconds
        call, response = await connection.open(_request(inputs), seconds)
        is_over = False
        try:
            while True:
                if response is _EOF:
                    raise ApiError(503, "the model's server has closed the stream: try again")
                if response.error_message:
                    raise from_sentence(response.error_message, names)
                infer = response.infer_response
                is_over = infer.parameters["triton_final_response"].bool_param
                if infer.outputs:
                    yield _reply(infer)
                if is_over:
                    return
                response = await connection.hear(call, seconds)
        except grpc.aio.AioRpcError as error:
            raise _failure(error.code(), error.details()) from None
        finally:
            connection.release(call, is_free=is_over)


class _Connection:
    """A channel and the streams on it; lost as a whole, once the server does not answer.

    waiting: by when each response that is due must come. num_heard: those that came.
    """

    def __init__(self, url: str) -> None:
        is_local = url.startswith(("127.0.0.1:", "localhost:", "[::1]:"))
        # A proxy that the environment names is no way to this machine.
        options = (*_CHANNEL, ("grpc.enable_http_proxy", 0)) if is_local else _CHANNEL
        self.channel = grpc.aio.insecure_channel(url, options=options)
        self.waiting: set[asyncio.Timeout] = set()
        self.num_heard = 0
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self._idle: list[Any] = []
        self._lost = ""

    async def is_ready(self, seconds: float) -> bool | None:
        """None when there was no answer in this time."""
        request = _messages("ModelReadyRequest")(name=MODEL)
        try:
            return (await self._stub.ModelReady(request, timeout=seconds)).ready
        except grpc.aio.AioRpcError as error:
            return None if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else False

    async def open(self, request: Any, seconds: float) -> tuple[Any, Any]:
        """A stream on which the request was sent, and the first response to it.

        An idle stream may have broken meanwhile, which shows only now.
        """
        while True:
            self._check()
            is_idle = bool(self._idle)
            call = self._idle.pop() if is_idle else self._stub.ModelStreamInfer()
            try:
                response = await self.hear(call, seconds, request)
            except asyncio.InvalidStateError:  # It had failed before it was written to.
                if not is_idle:
                    details = await call.details()
                    raise _failure(await call.code(), details) from None
            except grpc.aio.AioRpcError as error:
                if not is_idle:
                    raise _failure(error.code(), error.details()) from None
            except BaseException:
                call.cancel()
                raise
            else:
                if response is not _EOF or not is_idle:
                    return call, response

    async def hear(self, call: Any, seconds: float, request: Any = None) -> Any:
        """The next response on a stream, behind the request if there is one to send.

        ApiError when it does not come within `seconds`, or the server is lost.
        """
        self._check()
        try:
            async with asyncio.timeout(seconds) as limit:
                self.waiting.add(limit)
                try:
                    if request is not None:
                        await call.write(request)
                    response = await call.read()
                finally:
                    self.waiting.remove(limit)
        except TimeoutError:
            self._check()
            sentence = f"the model's server has said nothing for {seconds:g} seconds"
            raise ApiError(504, sentence) from None
        self.num_heard += 1
        return response

    def _check(self) -> None:
        if self._lost:
            raise ApiError(503, self._lost)

    def release(self, call: Any, *, is_free: bool) -> None:
        """is_free: whether the stream may serve another request."""
        if is_free and not self._lost and len(self._idle) < _MOST_IDLE_STREAMS:
            self._idle.append(call)
        else:
            call.cancel()

    async def lose(self, sentence: str) -> None:
        """Everybody who waits on it gets the sentence."""
        self._lost = sentence
        while self._idle:
            self._idle.pop().cancel()
        # Each is woken by its limit: a stream that is cancelled before it began wakes nobody.
        for limit in self.waiting:
            limit.reschedule(asyncio.get_running_loop().time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while self.waiting:
                    await asyncio.sleep(0.01)
        await self.channel.close()


def _failure(code: grpc.StatusCode, details: str | None) -> ApiError:
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ApiError(503, f"the model's server cannot be reached: {details}")
    return ApiError(500, f"the model's server failed: {details}")


def _messages(name: str) -> Callable[..., Any]:
    """A message of the protocol: the generated module has no types."""
    return getattr(service_pb2, name)


def _request(inputs: Inputs) -> Any:
    request = _messages("ModelInferRequest")(model_name=MODEL)
    # So that the end of an answer shows, and the stream can be used again.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        if name in PARAMETERS and isinstance(value, bytes):
            request.parameters[name].string_param = value.decode()
            continue
        datatype, shape, content = _tensor(name, value)
        request.inputs.add(name=name, datatype=datatype, shape=[shape])
        request.raw_input_contents.append(content)
    return request


def _tensor(name: str, value: Value) -> tuple[str, int, bytes]:
    match value:
        case bytes():
            return "BYTES", 1, _sized(value)
        case list():
            return "BYTES", len(value), b"".join(map(_sized, value))
        case bool():
            return "BOOL", 1, struct.pack("<?", value)
        case int() if name == "seed":
            return "UINT64", 1, struct.pack("<Q", value)
        case int():
            return "INT32", 1, struct.pack("<i", value)
        case float():
            return "FP32", 1, struct.pack("<f", value)


def _sized(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def _reply(response: Any) -> Reply:
    contents = response.raw_output_contents
    places = {output.name: place for place, output in enumerate(response.outputs)}

    def text(name: str) -> str:
        return contents[places[name]][4:].decode()

    def number(name: str) -> int:
        return int.from_bytes(contents[places[name]], "little")

    calls, logprobs = text("tool_calls"), text("logprobs")
    return Reply(
        text=text("text_output"),
        reasoning=text("reasoning_output"),
        tool_calls=[] if calls == "[]" else json.loads(calls),
        logprobs=[] if logprobs == "[]" else json.loads(logprobs),
        finish_reason=text("finish_reason"),
        index=number("index"),
        num_input_tokens=number("num_input_tokens"),
        num_cached_tokens=number("num_cached_tokens"),
        num_output_tokens=number("num_output_tokens"),
        num_reasoning_tokens=number("num_reasoning_tokens"),
    )
