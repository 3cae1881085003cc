"""The Triton model `harmony_postprocess`: one request is one response of the engine.

State by generation id, from the engine's outputs alone. It may send one response, or none, to each
request; the client's one stream is made of all of them. A client that left is only visible here:
the engine is told with one control request.
"""

import json
import logging
import time
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

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                sender.send(self._handle(request), flags=_FINAL)
            except Exception as error:
                logger.exception("a response of the engine could not be passed on")
                sender.send(_error(str(error), pb_utils.TritonError.INTERNAL), flags=_FINAL)
        self._sweep()

    def _handle(self, request: Any) -> Any | None:
        """What the client gets for one response of the engine, if anything."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        response = _engine_response(inputs)
        generation = self._generations.setdefault(response.generation_id, _Generation())
        generation.seen_at = time.monotonic()
        sent = None
        if generation.end_reason is None:
            try:
                sent = self._push(generation, response, inputs)
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

    def _push(
        self, generation: _Generation, response: EngineResponse, inputs: dict[str, np.ndarray]
    ) -> Any | None:
        if generation.answer is None:
            if response.sequence_number != 0:
                raise RuntimeError(f"the state of generation {response.generation_id} is lost")
            context = AnswerContext.from_json(_text(inputs["context"]))
            generation.answer = Answer(context, self._format)
        is_due = generation.seen_at - generation.sent_at > _KEEP_ALIVE_SECONDS
        reply = generation.answer.push(response, is_due=is_due)
        if reply is not None:
            generation.sent_at = generation.seen_at
        if generation.answer.finish_reason:
            generation.end_reason = "stop"
        if response.finish_reason == "error":
            error = json.loads(_text(inputs["error"]))
            return _error(error["message"], getattr(pb_utils.TritonError, error["code"]))
        return None if reply is None else pb_utils.InferenceResponse(_outputs(reply))

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


def _engine_response(inputs: dict[str, np.ndarray]) -> EngineResponse:
    usage = json.loads(_text(inputs["usage"]))
    logprobs = json.loads(_text(inputs["logprobs"]) or "[]")
    return EngineResponse(
        generation_id=_text(inputs["generation_id"]),
        sequence_number=int(inputs["sequence_number"].item()),
        token_ids=tuple(inputs["token_ids"].tolist()),
        logprobs=tuple((logprob, top) for logprob, top in logprobs),
        finish_reason=_text(inputs["finish_reason"]) or None,  # pyright: ignore[reportArgumentType]
        num_prompt_tokens=usage["num_prompt_tokens"],
        num_cached_tokens=usage["num_cached_tokens"],
    )


def _outputs(reply: Reply) -> list[Any]:
    return [
        _bytes("text_output", reply.text_output),
        _bytes("reasoning_output", reply.reasoning_output),
        _bytes("tool_calls", json.dumps(reply.tool_calls)),
        _count("index", 0),
        _bytes("finish_reason", reply.finish_reason),
        _count("num_input_tokens", reply.num_input_tokens),
        _count("num_output_tokens", reply.num_output_tokens),
        _count("num_reasoning_tokens", reply.num_reasoning_tokens),
        _count("num_cached_tokens", reply.num_cached_tokens),
        pb_utils.Tensor("cumulative_logprob", np.array([reply.cumulative_logprob], np.float32)),
        _bytes("logprobs", json.dumps(reply.logprobs)),
    ]


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
