"""The adapter on the way out, without a server: who hears what when something fails."""

import importlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gptoss_harmony.answer import Answer, AnswerContext
from gptoss_harmony.vocabulary import Vocabulary

_CONTEXT = AnswerContext(format={"stop_words": ["END"]}, stream=True).to_json()


class Bench:
    """The model, an engine that is told of aborts, and one generation's responses."""

    def __init__(self, triton: Any, request_type: Any, vocabulary: Vocabulary) -> None:
        module = importlib.import_module("gptoss_harmony.postprocess_model")
        self.model = module.TritonPythonModel()
        self.model.initialize({"model_config": "{}"})
        self.encode = vocabulary.encode_raw
        self.triton = triton
        self.request_type = request_type
        self.aborts: list[tuple[str, str]] = []
        self.num_failing_aborts = 0
        self.num_pushed = 0
        self.address = "@gptoss-test-nobody"
        triton.execute_elsewhere = self._abort

    def _abort(self, request: Any) -> list[Any]:
        assert request.model_name == "gpt_oss_engine"
        (tensor,) = request.inputs
        assert tensor.name() == "abort"
        self.aborts.append((tensor.as_numpy()[0].decode(), request.parameters["reason"]))
        if len(self.aborts) <= self.num_failing_aborts:
            error = self.triton.TritonError("not now", self.triton.TritonError.INTERNAL)
            return [self.triton.InferenceResponse(error=error)]
        return []

    def push(
        self,
        text: str = "",
        reason: str = "",
        *,
        has_left: bool = False,
        error: dict[str, str] | None = None,
    ) -> Any:
        """What the client gets for the engine's next response."""
        said = {
            "generation_id": "g",
            "sequence_number": self.num_pushed,
            "token_ids": [*self.encode(text)],
            "logprobs": [],
            "finish_reason": reason,
            "error": error,
            "usage": {"num_prompt_tokens": 1, "num_cached_tokens": 0, "num_output_tokens": 1},
            "acknowledge": self.address,
        }
        if not self.num_pushed:
            said["context"] = _CONTEXT
        request = self.request_type(response=json.dumps(said))
        request.has_left = has_left
        self.num_pushed += 1
        self.model.execute([request])
        [sent] = request.sent
        return sent


@pytest.fixture
def bench(triton: Any, request_type: Any, loaded: Vocabulary) -> Iterator[Bench]:
    made = Bench(triton, request_type, loaded)
    yield made
    made.model.finalize()


def _is_idle(bench: Bench) -> bool:
    return not bench.model._generations


def test_a_silent_stream_gets_a_sign_of_life_now_and_then(bench: Bench) -> None:
    assert bench.push("<|channel|>final") is None
    bench.model._generations["g"].sent_at -= 1.1
    sign = bench.push(" ")
    assert (sign.outputs["text_output"], sign.outputs["finish_reason"]) == (b"", b"")
    assert sign.outputs["num_output_tokens"] == 3
    assert bench.push(" ") is None
    assert bench.push("<|message|>Hi").outputs["text_output"] == b"Hi"


def test_an_answer_comes_and_goes(bench: Bench) -> None:
    assert bench.push() is None
    assert bench.push("<|channel|>final<|message|>Hi").outputs["text_output"] == b"Hi"
    assert bench.push("<|return|>", "stop").outputs["finish_reason"] == b"stop"
    assert bench.aborts == []
    assert _is_idle(bench)


def test_each_response_is_acknowledged_whatever_becomes_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as engine:
        engine.bind("\0gptoss-test-postprocess")
        engine.settimeout(10)
        bench.address = "@gptoss-test-postprocess"
        bench.push()
        bench.push("<|channel|>final<|message|>Hi")
        monkeypatch.setattr(Answer, "push", lambda *_: 1 / 0)
        assert bench.push("x").has_error()
        assert bench.push("y", "abort") is None
        assert [engine.recv(100) for _ in range(4)] == [b"g 0", b"g 1", b"g 2", b"g 3"]


def test_replies_that_say_the_same_share_no_values_with_others(bench: Bench) -> None:
    said = [
        bench.push("<|channel|>analysis<|message|>Hm"),
        bench.push(" and"),
        bench.push("<|end|>"),
    ]
    said += [bench.push("<|start|>assistant<|channel|>final<|message|>Hi"), bench.push(" you")]
    said.append(bench.push("<|return|>", "stop"))
    assert said[2] is None
    outputs = [each.outputs for each in said if each is not None]
    assert [each["reasoning_output"] for each in outputs] == [b"Hm", b" and", b"", b"", b""]
    assert [each["text_output"] for each in outputs] == [b"", b"", b"Hi", b" you", b""]
    assert [each["finish_reason"] for each in outputs] == [b"", b"", b"", b"", b"stop"]
    assert [each["num_output_tokens"] for each in outputs] == [4, 1, 7, 1, 1]
    assert [each["num_reasoning_tokens"] for each in outputs] == [1, 1, 0, 0, 0]
    assert [each["num_input_tokens"] for each in outputs] == [0, 0, 0, 0, 1]
    assert {each["tool_calls"] for each in outputs} == {b"[]"}


@pytest.mark.parametrize("code", ["CANCELLED", "INTERNAL"])
def test_an_error_of_the_engine_is_passed_on_with_its_code(bench: Bench, code: str) -> None:
    bench.push()
    failed = bench.push("x", "error", error={"code": code, "message": "no more"})
    assert failed.error().message() == "no more"
    assert failed.error().code() == getattr(bench.triton.TritonError, code)
    assert _is_idle(bench)


def test_an_answer_that_cannot_be_parsed_fails_once_and_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of ours")

    bench.push()
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "push", fail)
        failed = bench.push("x")
        assert failed.error().message() == "a bug of ours"
        assert failed.error().code() == bench.triton.TritonError.INTERNAL
        assert bench.aborts == [("g", "abort")]
        assert bench.push("y") is None
    assert bench.push("z") is None
    assert bench.push("", "abort") is None
    assert bench.aborts == [("g", "abort")]
    assert _is_idle(bench)


def test_a_lost_state_fails_once_and_ends(bench: Bench) -> None:
    bench.push()
    bench.model._generations.clear()
    assert "state of generation g is lost" in bench.push("x").error().message()
    assert bench.aborts == [("g", "abort")]
    assert bench.push("y") is None
    assert bench.push("", "abort") is None
    assert _is_idle(bench)


def test_an_answer_that_fails_with_its_last_response_needs_no_abort(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answer, "push", lambda *_: 1 / 0)
    assert bench.push("x", "stop").has_error()
    assert bench.aborts == []
    assert _is_idle(bench)


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_an_abort_that_fails_is_tried_again(bench: Bench, reason: str) -> None:
    bench.num_failing_aborts = 2
    bench.push()
    if reason == "stop":
        sent = bench.push("<|channel|>final<|message|>The END")
        assert sent.outputs["text_output"] == b"The "
        assert sent.outputs["finish_reason"] == b"stop"
    else:
        bench.push("<|channel|>final<|message|>The", has_left=True)
    assert bench.push("x") is None
    assert bench.push("y") is None
    assert bench.push("z") is None
    assert bench.aborts == [("g", reason)] * 3
    assert bench.push("", "abort") is None
    assert _is_idle(bench)


def test_what_an_answer_held_is_counted(bench: Bench, triton: Any) -> None:
    bench.push()
    bench.push(
        "<|channel|>analysis<|message|>one two<|end|><|channel|>final<|message|>three<|end|>"
    )
    bench.push(
        "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>", "stop"
    )
    values = {name: family.values for name, family in triton.MetricFamily.families.items()}
    assert values == {
        "gptoss:channel_tokens_total": {"reasoning": 3, "content": 1},
        "gptoss:harmony_repairs_total": {"missing_start": 1, "unknown_tool": 1},
        "gptoss:tool_calls_total": {"unknown": 1},
    }
    bench.num_pushed = 0
    bench.push("<|channel|>final<|message|>three", "length")
    assert values["gptoss:channel_tokens_total"] == {"reasoning": 3, "content": 2}
