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
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.preprocess_model import model_folder

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# The engine is never silent for a second while a generation is open.
_TIME_TO_LIVE_SECONDS = 300.0

logger = logging.getLogger(__name__)


class _Generation:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_aborted = False
        self.seen_at = time.monotonic()


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._format = HarmonyFormat.load(model_folder(args))
        self._generations: dict[str, _Generation] = {}
        self._swept_at = time.monotonic()
        self._metrics = _Metrics()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._handle(request, sender)
            except Exception as error:
                logger.exception("an answer could not be parsed")
                _fail(sender, str(error), pb_utils.TritonError.INTERNAL)
        self._sweep()

    def _handle(self, request: Any, sender: Any) -> None:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        response = _engine_response(inputs)
        generation = self._generation(response, _text(inputs["context"]))
        reply = None
        if not generation.is_aborted:
            reply = generation.answer.push(response)
            has_left = response.finish_reason is None and request.is_cancelled()
            if has_left or (generation.answer.finish_reason and not response.finish_reason):
                generation.is_aborted = True
                _abort(response.generation_id, "abort" if has_left else "stop")
        if response.finish_reason:
            del self._generations[response.generation_id]
            self._metrics.count(generation.answer)
        if response.finish_reason == "error" and not generation.is_aborted:
            error = json.loads(_text(inputs["error"]))
            _fail(sender, error["message"], getattr(pb_utils.TritonError, error["code"]))
        elif reply is None:
            sender.send(flags=_FINAL)
        else:
            sender.send(pb_utils.InferenceResponse(_outputs(reply)), flags=_FINAL)

    def _generation(self, response: EngineResponse, context: str) -> _Generation:
        known = self._generations.get(response.generation_id)
        if known is None:
            if response.sequence_number != 0:
                raise RuntimeError(f"the state of generation {response.generation_id} is lost")
            known = _Generation(Answer(AnswerContext.from_json(context), self._format))
            self._generations[response.generation_id] = known
        known.seen_at = time.monotonic()
        return known

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
        self._metrics: dict[tuple[str, str], Any] = {}

    def count(self, answer: Answer) -> None:
        for channel, number in answer.harmony.num_tokens.items():
            self._add(self._tokens, "channel", channel, number)
        for kind, number in answer.harmony.repairs.items():
            self._add(self._repairs, "kind", kind, number)

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


def _abort(generation_id: str, reason: Literal["abort", "stop"]) -> None:
    request = pb_utils.InferenceRequest(
        model_name="gpt_oss_engine",
        requested_output_names=[],
        inputs=[_bytes("abort", generation_id)],
        parameters={"reason": reason},
    )
    for _ in request.exec(decoupled=True):
        pass


def _fail(sender: Any, message: str, code: int) -> None:
    error = pb_utils.TritonError(message, code)
    sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)


def _text(tensor: np.ndarray) -> str:
    return tensor.reshape(-1)[0].decode("utf-8")


def _bytes(name: str, value: str) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))


def _count(name: str, value: int) -> Any:
    return pb_utils.Tensor(name, np.array([value], dtype=np.uint32))
