"""The Triton model `harmony_postprocess`: one request is one response of the engine.

State by generation id, from the engine's outputs alone. It may send one response, or none, to each
request; the client's one stream is made of all of them. A client that left is only visible here:
the engine is told with one control request.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from gptoss_harmony.answer import Answer, AnswerContext, EngineResponse, Reply
from gptoss_harmony.preprocess_model import configured_format

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Of silence. The engine speaks every 0.3 s, with n > 60 open generations every n / 200 s.
_TIME_TO_LIVE_SECONDS = 300.0
# A stream with nothing to show (queued, prefilling, in a header) still gets a sign of life: over
# HTTP, tritonserver notices that a client has left only when it writes to it.
_KEEP_ALIVE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class _Generation:
    """answer: None until the first response was read.

    end_reason: why the engine shall end it before its time; the client hears nothing more.
    """

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.end_reason: Literal["abort", "stop"] | None = None
        self.is_engine_told = False
        self.seen_at = self.sent_at = time.monotonic()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._format = configured_format(args)
        self._generations: dict[str, _Generation] = {}
        self._swept_at = time.monotonic()
        self._metrics = _Metrics()
        self._acknowledging = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._tensors = _Tensors()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                sender.send(self._handle(request), flags=_FINAL)
            except Exception as error:
                logger.exception("a response of the engine could not be passed on")
                sender.send(_error(str(error), pb_utils.TritonError.INTERNAL), flags=_FINAL)
        self._sweep()

    def finalize(self) -> None:
        self._acknowledging.close()

    def _handle(self, request: Any) -> Any | None:
        """What the client gets for one response of the engine, if anything."""
        [tensor] = request.inputs()
        said = json.loads(_text(tensor.as_numpy()))
        self._acknowledge(said)
        response = _engine_response(said)
        generation = self._generations.setdefault(response.generation_id, _Generation())
        generation.seen_at = time.monotonic()
        sent = None
        if generation.end_reason is None:
            try:
                sent = self._push(generation, response, said)
                if request.is_cancelled():
                    generation.end_reason = "abort"
            except Exception as error:
                logger.exception("generation %s: its answer is lost", response.generation_id)
                generation.end_reason = "abort"
                sent = _error(str(error), pb_utils.TritonError.INTERNAL)
        if response.finish_reason:
            del self._generations[response.generation_id]
            if generation.answer is not None:
                self._metrics.count(generation.answer)
        elif generation.end_reason is not None and not generation.is_engine_told:
            generation.is_engine_told = _end(response.generation_id, generation.end_reason)
        return sent

    def _acknowledge(self, said: Mapping[str, Any]) -> None:
        """Tell the engine that it may send another one."""
        address = said["acknowledge"].replace("@", "\0", 1)
        word = f"{said['generation_id']} {said['sequence_number']}"
        try:
            self._acknowledging.sendto(word.encode(), socket.MSG_DONTWAIT, address)
        except OSError as error:
            logger.warning("generation %s: not acknowledged: %s", said["generation_id"], error)

    def _push(
        self, generation: _Generation, response: EngineResponse, said: Mapping[str, Any]
    ) -> Any | None:
        if generation.answer is None:
            if response.sequence_number != 0:
                raise RuntimeError(f"the state of generation {response.generation_id} is lost")
            context = AnswerContext.from_json(said["context"])
            generation.answer = Answer(context, self._format)
        is_due = generation.seen_at - generation.sent_at > _KEEP_ALIVE_SECONDS
        reply = generation.answer.push(response, is_due=is_due)
        if reply is not None:
            generation.sent_at = generation.seen_at
        if generation.answer.finish_reason:
            generation.end_reason = "stop"
        if response.finish_reason == "error":
            error = said["error"]
            return _error(error["message"], getattr(pb_utils.TritonError, error["code"]))
        return None if reply is None else pb_utils.InferenceResponse(self._tensors.of(reply))

    def _sweep(self) -> None:
        """An error in the middle of an ensemble's stream can lose the response that ends it."""
        now = time.monotonic()
        if now - self._swept_at < _TIME_TO_LIVE_SECONDS / 10:
            return
        self._swept_at = now
        for generation_id, generation in list(self._generations.items()):
            if now - generation.seen_at > _TIME_TO_LIVE_SECONDS:
                logger.warning("generation %s: no end came, its state is dropped", generation_id)
                del self._generations[generation_id]


class _Metrics:
    def __init__(self) -> None:
        family = pb_utils.MetricFamily
        self._tokens = family(
            name="gptoss:channel_tokens_total",
            description="Generated tokens of text by channel",
            kind=family.COUNTER,
        )
        self._repairs = family(
            name="gptoss:harmony_repairs_total",
            description="Repairs of generated Harmony by kind",
            kind=family.COUNTER,
        )
        self._calls = family(
            name="gptoss:tool_calls_total",
            description="Generated tool calls by outcome",
            kind=family.COUNTER,
        )
        self._metrics: dict[tuple[str, str], Any] = {}

    def count(self, answer: Answer) -> None:
        for channel, number in answer.stream.num_tokens.items():
            self._add(self._tokens, "channel", channel, number)
        for kind, number in answer.stream.repairs.items():
            self._add(self._repairs, "kind", kind, number)
        for outcome, number in answer.stream.calls.items():
            self._add(self._calls, "outcome", outcome, number)

    def _add(self, family: Any, label: str, value: str, number: int) -> None:
        metric = self._metrics.get((label, value))
        if metric is None:
            metric = self._metrics[label, value] = family.Metric(labels={label: value})
        metric.increment(number)


def _engine_response(said: Mapping[str, Any]) -> EngineResponse:
    return EngineResponse(
        generation_id=said["generation_id"],
        sequence_number=said["sequence_number"],
        token_ids=tuple(said["token_ids"]),
        logprobs=tuple((logprob, top) for logprob, top in said["logprobs"]),
        finish_reason=said["finish_reason"] or None,
        num_prompt_tokens=said["usage"]["num_prompt_tokens"],
        num_cached_tokens=said["usage"]["num_cached_tokens"],
    )


class _Tensors:
    """A reply as the ensemble's outputs. What most replies say is made once, and lies there."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str | int | float], Any] = {}

    def of(self, reply: Reply) -> list[Any]:
        return [
            self._text("text_output", reply.text_output),
            self._text("reasoning_output", reply.reasoning_output),
            self._text("tool_calls", _json_list(reply.tool_calls)),
            self._count("index", 0),
            self._text("finish_reason", reply.finish_reason),
            self._count("num_input_tokens", reply.num_input_tokens),
            self._count("num_output_tokens", reply.num_output_tokens),
            self._count("num_reasoning_tokens", reply.num_reasoning_tokens),
            self._count("num_cached_tokens", reply.num_cached_tokens),
            self._logprob("cumulative_logprob", reply.cumulative_logprob),
            self._text("logprobs", _json_list(reply.logprobs)),
        ]

    def _text(self, name: str, value: str) -> Any:
        return _bytes(name, value) if value not in ("", "[]") else self._common(_bytes, name, value)

    def _count(self, name: str, value: int) -> Any:
        return _count(name, value) if value > 1 else self._common(_count, name, value)

    def _logprob(self, name: str, value: float) -> Any:
        return _float(name, value) if value else self._common(_float, name, value)

    def _common(self, make: Callable[[str, Any], Any], name: str, value: str | float) -> Any:
        made = self._made.get((name, value))
        if made is None:
            made = self._made[name, value] = make(name, value)
        return made


def _json_list(values: list[dict[str, Any]]) -> str:
    return json.dumps(values) if values else "[]"


def _end(generation_id: str, reason: Literal["abort", "stop"]) -> bool:
    """Tells the engine that nobody needs more of a generation; whether it has heard."""
    request = pb_utils.InferenceRequest(
        model_name="gpt_oss_engine",
        requested_output_names=[],
        inputs=[_bytes("abort", generation_id)],
        parameters={"reason": reason},
    )
    try:
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise RuntimeError(response.error().message())
    except Exception:
        logger.exception("generation %s: the engine was not told to end it", generation_id)
        return False
    return True


def _error(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _text(tensor: np.ndarray) -> str:
    return tensor.reshape(-1)[0].decode("utf-8")


def _bytes(name: str, value: str) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.uint32))


def _float(name: str, value: float) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.float32))
