"""An ensemble without a model: a gRPC server that says what a test tells it to, and its gateway."""

import asyncio
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import uvicorn
from tritonclient.grpc import service_pb2, service_pb2_grpc

from gptoss_openai.app import Gateway
from gptoss_openai.config import GatewayConfig
from gptoss_openai.connection import bounded
from gptoss_openai.ensemble import Reply
from gptoss_openai.serving import tune

MODEL = "gpt-oss-demo"
MESSAGES = [{"role": "user", "content": "Hello"}]

# A reply, a sentence that fails the request, something to wait for, or seconds of silence.
Step = Reply | str | threading.Event | float
ANSWER: tuple[Step, ...] = (
    Reply(reasoning="Hm", num_output_tokens=1, num_reasoning_tokens=1),
    Reply(text="Hi ", num_output_tokens=1),
    Reply(),
    Reply(text="there", num_output_tokens=1),
    Reply(finish_reason="stop", num_input_tokens=7, num_cached_tokens=2, num_output_tokens=1),
)


class FakeEnsemble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """script(inputs): the steps of the answer to a request. requests: the inputs of each."""

    def __init__(self) -> None:
        self.script: Callable[[dict[str, Any]], Sequence[Step]] = lambda _: ANSWER
        self.requests: list[dict[str, Any]] = []
        self.is_ready = True
        self.num_streams = self.num_cancelled = self.num_sent = 0

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        assert request.name == "gpt_oss"
        return _message("ModelReadyResponse")(ready=self.is_ready)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        self.num_streams += 1
        async for request in request_iterator:
            inputs = _values(request)
            self.requests.append(inputs)
            try:
                async for response in self._responses(inputs):
                    yield response
                    self.num_sent += 1
            except (asyncio.CancelledError, GeneratorExit):
                self.num_cancelled += 1
                raise

    async def _responses(self, inputs: dict[str, Any]) -> AsyncIterator[Any]:
        steps = [*self.script(inputs)]
        if not inputs["stream"]:
            steps = _joined(steps)
        for number, step in enumerate(steps):
            if isinstance(step, threading.Event):
                while not step.is_set():
                    await asyncio.sleep(0.005)
                continue
            if isinstance(step, float | int):
                await asyncio.sleep(step)
                continue
            response = _message("ModelStreamInferResponse")()
            if isinstance(step, str):
                response.error_message = f"in ensemble 'gpt_oss', {step}"
            else:
                _fill(response.infer_response, step)
                is_last = number == len(steps) - 1
                response.infer_response.parameters["triton_final_response"].bool_param = is_last
            yield response


def _joined(steps: Sequence[Step]) -> list[Step]:
    """What the ensemble makes of an answer that is not streamed."""
    replies = [step for step in steps if isinstance(step, Reply)]
    others: list[Step] = [step for step in steps if not isinstance(step, Reply)]
    if not replies or any(isinstance(step, str) for step in others):
        return others
    calls: dict[int, dict[str, Any]] = {}
    num_reasoning = num_text = 0
    for reply in replies:
        for delta in reply.tool_calls:
            index = delta["index"]
            if index in calls:
                calls[index]["function"]["arguments"] += delta["function"]["arguments"]
                continue
            calls[index] = json.loads(json.dumps(delta))
            if "id" in delta:
                reasoning, text = delta.get("after", (len(reply.reasoning), len(reply.text)))
                calls[index]["after"] = [num_reasoning + reasoning, num_text + text]
        num_reasoning += len(reply.reasoning)
        num_text += len(reply.text)
    whole = Reply(
        text="".join(each.text for each in replies),
        reasoning="".join(each.reasoning for each in replies),
        tool_calls=[*calls.values()],
        logprobs=[entry for each in replies for entry in each.logprobs],
        finish_reason=replies[-1].finish_reason,
        num_input_tokens=replies[-1].num_input_tokens,
        num_cached_tokens=replies[-1].num_cached_tokens,
        num_output_tokens=sum(each.num_output_tokens for each in replies),
        num_reasoning_tokens=sum(each.num_reasoning_tokens for each in replies),
    )
    return [*others, whole]


def joined(steps: Sequence[Reply]) -> Reply:
    (whole,) = _joined(steps)
    assert isinstance(whole, Reply)
    return whole


def _message(name: str) -> Any:
    return getattr(service_pb2, name)


def _values(request: Any) -> dict[str, Any]:
    formats = {"BOOL": "<?", "INT32": "<i", "UINT64": "<Q", "FP32": "<f"}
    values: dict[str, Any] = {
        name: parameter.string_param
        for name, parameter in request.parameters.items()
        if not name.startswith("triton_")
    }
    for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype != "BYTES":
            (values[tensor.name],) = struct.unpack(formats[tensor.datatype], content)
            continue
        texts: list[str] = []
        while content:
            (size,) = struct.unpack("<I", content[:4])
            texts.append(content[4 : 4 + size].decode())
            content = content[4 + size :]
        assert list(tensor.shape) == [len(texts)]
        values[tensor.name] = texts if tensor.name == "stop_words" else texts[0]
    return values


def _fill(response: Any, reply: Reply) -> None:
    outputs = {
        "text_output": reply.text,
        "reasoning_output": reply.reasoning,
        "tool_calls": json.dumps(reply.tool_calls),
        "index": reply.index,
        "finish_reason": reply.finish_reason,
        "num_input_tokens": reply.num_input_tokens,
        "num_cached_tokens": reply.num_cached_tokens,
        "num_output_tokens": reply.num_output_tokens,
        "num_reasoning_tokens": reply.num_reasoning_tokens,
        "cumulative_logprob": -1.5,
        "logprobs": json.dumps(reply.logprobs),
    }
    for name, value in outputs.items():
        match value:
            case str():
                datatype, content = "BYTES", struct.pack("<I", len(value.encode())) + value.encode()
            case float():
                datatype, content = "FP32", struct.pack("<f", value)
            case _:
                datatype, content = "UINT32", struct.pack("<I", value)
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(content)


class Relay:
    """A network between the gateway and its ensemble that can fall silent: nothing is closed,
    and nothing comes through any more, also where another connection is made."""

    def __init__(self) -> None:
        self.is_silent = False
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, to_port: int) -> int:
        self._to_port = to_port
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        there = await asyncio.open_connection("127.0.0.1", self._to_port)
        for pair in ((reader, there[1]), (there[0], writer)):
            self._tasks.add(asyncio.create_task(self._forward(*pair)))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while content := await reader.read(2**16):
                if not self.is_silent:
                    writer.write(content)
        finally:
            writer.close()


class Stack:
    """A gateway before a FakeEnsemble, both in one thread's event loop.

    is_tuned: whether its socket has the options that a gateway's has. relay: what stands between
    the two, if anything.
    """

    def __init__(self, config: dict[str, Any], *, is_tuned: bool, relay: Relay | None) -> None:
        self._is_tuned = is_tuned
        self._relay = relay
        self.fake = FakeEnsemble()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._config = config
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.gateway: Gateway
        self.loop: asyncio.AbstractEventLoop

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._ensemble, port = await self._start_ensemble(0)
        if self._relay is not None:
            port = await self._relay.start(port)
        gateway_config = GatewayConfig(url=f"127.0.0.1:{port}", **self._config)
        if self._is_tuned:
            tune(self._listener, gateway_config)
        self.gateway = Gateway(gateway_config)
        config = uvicorn.Config(
            self.gateway.app,
            http=bounded(gateway_config),
            lifespan="on",
            log_config=None,
            timeout_graceful_shutdown=5,
        )
        self._uvicorn = uvicorn.Server(config)
        self.loop.call_soon(self._ready.set)
        await self._uvicorn.serve([self._listener])
        await self._ensemble.stop(None)
        if self._relay is not None:
            await self._relay.stop()

    async def _start_ensemble(self, port: int) -> tuple[Any, int]:
        server = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self.fake, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    def stop_ensemble(self) -> None:
        self._call(self._ensemble.stop(None))

    def restart_ensemble(self) -> None:
        self.stop_ensemble()
        port = int(self.gateway.config.url.rpartition(":")[2])
        self._ensemble, _ = self._call(self._start_ensemble(port))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def request(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> "Answer":
        """body: sent as JSON, or as it is where it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        kind = {} if body is None else {"Content-Type": "application/json"}
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, content, {**kind, **(headers or {})})
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer

    def chat(self, **fields: Any) -> "Answer":
        return self.request(
            "/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, **fields}
        )

    def connect(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """A request whose answer nobody has read yet."""
        content = json.dumps({"model": MODEL, "messages": MESSAGES, **body}).encode()
        connection = socket.socket()
        connection.settimeout(20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self.port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        return connection

    @property
    def num_connections(self) -> int:
        """Those that are open now."""
        return len(self._uvicorn.server_state.connections)

    def metric(self, name: str) -> float:
        """The sum over its labels that are asked for: the line's beginning."""
        lines = self.request("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Of a refusal: message, type, param, code, all four of them."""
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """Of a stream, the [DONE] at its end as a text."""
        return events_of(self.body)


def events_of(body: bytes) -> list[Any]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def running(*, is_tuned: bool = True, relay: Relay | None = None, **config: Any) -> Iterator[Stack]:
    stack = Stack(config, is_tuned=is_tuned, relay=relay)
    stack.start()
    try:
        yield stack
    finally:
        stack.stop()


def eventually(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until `condition` held; fails when it does not hold in time."""
    started = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started < seconds, f"not true within {seconds} seconds"
        pause.wait(0.01)
    return time.monotonic() - started
