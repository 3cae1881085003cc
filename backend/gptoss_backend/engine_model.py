"""The Triton model `gpt_oss_engine`: tensors in, token ids out, over an engine.

Each request becomes one generation with an id minted here (client ids are often empty, and
repeat). What is wrong with a request is answered at once with a code; once admitted, a failure
travels as data (finish_reason "error"), because an error in the middle of a stream reaches an
ensemble's client without an end.

Two requests carry no prompt: input `abort` ends a generation (postprocess sends it when its client
has left or, with the parameter `reason` "stop", when a stop word has ended the answer), and the
parameter `drain` with the key of the process that started this server refuses new requests and is
answered when the last generation has ended.
"""

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from gptoss_backend.metrics import EngineMetrics, Finished
from gptoss_backend.pacing import Acknowledgements
from gptoss_backend.parameters import (
    abort_reason,
    cache_salt,
    drain_order,
    own_parameters,
    timeout_seconds,
)
from gptoss_backend.server import CONTROL_KEY_VARIABLE
from gptoss_backend.streams import Stream, StreamResponse, Streams
from gptoss_engine.config import EngineConfig
from gptoss_engine.engine_process import EngineProcess, is_apart
from gptoss_engine.messages import LOG_FORMAT
from gptoss_engine.replicas import Replicas
from gptoss_engine.types import (
    GenerationRequest,
    InvalidRequest,
    SamplingParams,
    TokenChunk,
    Unavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from gptoss_engine.engine import EngineLoop

_METRICS_SECONDS = 0.25
_LAST_WORDS_SECONDS = 5.0
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

logger = logging.getLogger(__name__)


def start_engine(
    config: EngineConfig, delivering: Callable[[], AbstractContextManager[Any]]
) -> "EngineLoop | EngineProcess | Replicas":
    if config.dp > 1:
        return Replicas(config, delivering)
    if is_apart(config):
        return EngineProcess(config, delivering)
    from gptoss_engine.engine import EngineLoop, keep_for_good, load_engine  # brings torch

    engine = load_engine(config)
    keep_for_good()
    return EngineLoop(engine, delivering)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        parameters = json.loads(args["model_config"]).get("parameters", {})
        config = EngineConfig.from_mapping(
            {name: value["string_value"] for name, value in parameters.items()}
        )
        self._control_key = os.environ.get(CONTROL_KEY_VARIABLE)
        self._streams = Streams(
            config.stream_interval,
            self._abort,
            self._record,
            sends_itself=config.dp > 1 or is_apart(config),
        )
        self._acknowledgements = Acknowledgements(self._streams.acknowledge)
        self._engine = start_engine(config, self._streams.at_once)
        self._metrics = EngineMetrics(pb_utils, args["model_name"], args["model_version"])
        self._stopped = threading.Event()
        self._reporter = threading.Thread(target=self._report, name="metrics", daemon=True)
        self._reporter.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._handle(request, sender)
            except Exception as error:  # noqa: BLE001  whatever it is, the client is told
                _refuse(sender, error)

    def finalize(self) -> None:
        self._engine.stop()
        self._streams.close()
        self._acknowledgements.close()
        self._stopped.set()
        self._reporter.join()

    def _handle(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = own_parameters(request.parameters())
        if "abort" in inputs:
            if "input_ids" in inputs:
                raise InvalidRequest("abort and input_ids cannot be given together")
            reason = abort_reason(parameters)
            self._engine.abort(_text("abort", inputs["abort"]), reason=reason)
            sender.send(flags=_FINAL)
            return
        if "drain" in parameters:
            self._drain(sender, *drain_order(parameters))
            return
        timeout = timeout_seconds(request.timeout(), parameters)
        # As an ensemble asks that maps nothing else.
        is_packed = [*request.requested_output_names()] == ["response"]
        self._generate(inputs, timeout, cache_salt(parameters), sender, is_packed)

    def _generate(
        self,
        inputs: dict[str, np.ndarray],
        timeout: float | None,
        salt: str,
        sender: Any,
        is_packed: bool,
    ) -> None:
        if "input_ids" not in inputs:
            raise InvalidRequest("input_ids must be given: the token ids of the prompt")
        generation = GenerationRequest(
            generation_id=uuid.uuid4().hex,
            token_ids=tuple(inputs["input_ids"].tolist()),
            sampling=SamplingParams.from_mapping(_json_object("sampling", inputs)),
            deadline=None if timeout is None else time.monotonic() + timeout,
            cache_salt=salt,
        )
        context = _text("context", inputs["context"]) if "context" in inputs else ""
        if is_packed:
            address = self._acknowledgements.address
            client = _PackedClient(sender, generation.generation_id, context, address)
        else:
            client = _TritonClient(sender, generation.generation_id, context)
        stream = Stream(generation.generation_id, client, is_paced=is_packed)

        def answered(admission: Future[Any]) -> None:
            error = admission.exception()
            if error is None:
                self._streams.open(stream)
                client.prepare(len(generation.token_ids))
            else:
                _refuse(sender, error)

        # Not waited for: the next request could not be read meanwhile.
        admission = self._engine.admission(
            generation, lambda chunk: self._streams.push(stream, chunk)
        )
        admission.add_done_callback(answered)

    def _drain(self, sender: Any, key: str, seconds: float) -> None:
        if not self._control_key or key != self._control_key:
            raise InvalidRequest("drain must carry the key of the process that started the server")

        def answer() -> None:
            has_finished_all = self._engine.drain(seconds)
            self._streams.wait_empty(_LAST_WORDS_SECONDS)
            reason = "stop" if has_finished_all else "abort"
            client = _TritonClient(sender, generation_id="", context="")
            client.send(StreamResponse(0, TokenChunk("", finish_reason=reason)))

        threading.Thread(target=answer, name="drain", daemon=True).start()

    def _abort(self, generation_id: str) -> None:
        self._engine.abort(generation_id)

    def _record(self, stream: Stream) -> None:
        first = stream.first_token_at
        self._metrics.finished(
            Finished(
                num_tokens=stream.num_tokens,
                first_token=None if first is None else first - stream.opened_at,
                last_token=time.monotonic() - stream.opened_at,
            )
        )

    def _report(self) -> None:
        while not self._stopped.wait(_METRICS_SECONDS):
            is_broken = self._engine.is_broken
            if is_broken:
                # Every open generation gets its error, and counts.
                self._streams.wait_empty(_LAST_WORDS_SECONDS)
            try:
                self._metrics.flush(self._engine.stats)
            except Exception:
                logger.exception("the metrics were not told")
            if is_broken:  # A fresh process is the only way on.
                logger.critical("the engine is broken: this process ends")
                sys.stderr.flush()
                os._exit(1)


class _TritonClient:
    """The way back to one request: a chunk as the engine model's outputs."""

    def __init__(self, sender: Any, generation_id: str, context: str) -> None:
        self._sender = sender
        self._generation_id = generation_id
        self._context = context
        self._made: dict[str, tuple[str | tuple[int, ...], Any]] = {}

    def prepare(self, num_prompt_tokens: int) -> None:
        """Make what the first response will have, while its token is computed."""
        self._outputs(StreamResponse(0, TokenChunk("", (0,), num_prompt_tokens=num_prompt_tokens)))

    def send(self, response: StreamResponse) -> None:
        flags = _FINAL if response.is_last else 0
        self._sender.send(pb_utils.InferenceResponse(self._outputs(response)), flags=flags)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def _outputs(self, response: StreamResponse) -> list[Any]:
        chunk = response.chunk
        logprobs, error = _logprobs(chunk), _error(chunk)
        values = {
            "generation_id": self._generation_id,
            "sequence_number": (response.sequence_number,),
            "token_ids": chunk.token_ids,
            "logprobs": json.dumps(logprobs) if logprobs else "",
            "finish_reason": chunk.finish_reason or "",
            "error": json.dumps(error) if error else "",
            "usage": json.dumps(_usage(chunk)),
            "context": self._context,
        }
        return [self._tensor(name, value) for name, value in values.items()]

    def _tensor(self, name: str, value: str | tuple[int, ...]) -> Any:
        """The one that was sent last, if it says the same: the server reads it where it lies."""
        made = self._made.get(name)
        if made is None or made[0] != value:
            made = self._made[name] = value, _tensor(name, value)
        return made[1]


class _PackedClient(_TritonClient):
    """The same in one output: a tensor more is 20 us more in the server's processes.

    acknowledge: an address of Acknowledgements.
    """

    def __init__(self, sender: Any, generation_id: str, context: str, acknowledge: str) -> None:
        super().__init__(sender, generation_id, context)
        self._acknowledge = acknowledge

    def prepare(self, num_prompt_tokens: int) -> None:
        pass

    def _outputs(self, response: StreamResponse) -> list[Any]:
        chunk = response.chunk
        values = {
            "generation_id": self._generation_id,
            "sequence_number": response.sequence_number,
            "token_ids": chunk.token_ids,
            "logprobs": _logprobs(chunk),
            "finish_reason": chunk.finish_reason or "",
            "error": _error(chunk),
            "usage": _usage(chunk),
            "acknowledge": self._acknowledge,
        }
        if response.sequence_number == 0:
            values["context"] = self._context
        return [_tensor("response", json.dumps(values))]


def _usage(chunk: TokenChunk) -> dict[str, int]:
    return {
        "num_prompt_tokens": chunk.num_prompt_tokens,
        "num_cached_tokens": chunk.num_cached_tokens,
        "num_output_tokens": len(chunk.token_ids),
    }


def _logprobs(chunk: TokenChunk) -> list[Any]:
    return [[each.logprob, each.top] for each in chunk.logprobs]


def _error(chunk: TokenChunk) -> dict[str, str] | None:
    code = "CANCELLED" if chunk.finish_reason == "abort" else "INTERNAL"
    return {"code": code, "message": chunk.error} if chunk.error else None


def _refuse(sender: Any, error: BaseException) -> None:
    match error:
        case Unsupported():
            code = pb_utils.TritonError.UNSUPPORTED
        case InvalidRequest():
            code = pb_utils.TritonError.INVALID_ARG
        case Unavailable():
            code = pb_utils.TritonError.UNAVAILABLE
        case _:
            logger.error("a request failed before its admission", exc_info=error)
            code = pb_utils.TritonError.INTERNAL
    refusal = pb_utils.TritonError(str(error), code)
    sender.send(pb_utils.InferenceResponse(error=refusal), flags=_FINAL)


def _text(name: str, tensor: np.ndarray) -> str:
    try:
        return tensor.reshape(-1)[0].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} must be UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _json_object(name: str, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    if name not in inputs:
        return {}
    text = _text(name, inputs[name]) or "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # too many digits is a plain ValueError
        raise InvalidRequest(f"{name} must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {type(value).__name__}")
    return value


def _tensor(name: str, value: str | tuple[int, ...]) -> Any:
    if isinstance(value, str):
        return pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))
    return pb_utils.Tensor(name, np.array(value, dtype=np.int32))
