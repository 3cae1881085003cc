"""One answer on its way out: streamed and whole replies agree, counts add up, one end."""

import dataclasses
import json
import random
from typing import Any

import pytest

from gptoss_harmony.answer import Answer, AnswerContext, EngineResponse, Reply
from gptoss_harmony.chat import parse_messages
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.vocabulary import Vocabulary

_CALL = (
    "<|channel|>analysis<|message|>Thinking.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)
_ANSWER = (
    "<|channel|>analysis<|message|>Thinking hard.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Forty-two it is. 🙂<|return|>"
)


@pytest.fixture(scope="module")
def harmony(loaded: Vocabulary) -> HarmonyFormat:
    return HarmonyFormat(loaded)


def _run(
    harmony: HarmonyFormat, text: str, *, cut: int = 1, reason: Any = "stop", **context: Any
) -> tuple[list[Reply], Answer]:
    """All replies to the tokens of `text`, given `cut` at a time."""
    format_context = {"tool_names": ["f"], **context.pop("format", {})}
    answer = Answer(AnswerContext(format=format_context, **context), harmony)
    token_ids = harmony.vocabulary.encode_raw(text)
    replies = []
    for sequence_number, start in enumerate(range(0, len(token_ids), cut)):
        piece = tuple(token_ids[start : start + cut])
        reply = answer.push(
            EngineResponse(
                generation_id="g",
                sequence_number=sequence_number,
                token_ids=piece,
                logprobs=tuple((-0.5, [(token_id, -0.5)]) for token_id in piece),
                finish_reason=reason if start + cut >= len(token_ids) else None,
                num_prompt_tokens=11,
                num_cached_tokens=3,
            )
        )
        replies += [] if reply is None else [reply]
    return replies, answer


def _joined(replies: list[Reply]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for delta in (delta for reply in replies for delta in reply.tool_calls):
        if "id" in delta:
            assert delta["index"] == len(calls)
            calls.append({"name": delta["function"]["name"], "arguments": ""})
        calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return {
        "calls": calls,
        "text": "".join(reply.text_output for reply in replies),
        "reasoning": "".join(reply.reasoning_output for reply in replies),
        "logprobs": [entry for reply in replies for entry in reply.logprobs],
        "cumulative_logprob": replies[-1].cumulative_logprob,
        "num_output_tokens": sum(reply.num_output_tokens for reply in replies),
        "num_reasoning_tokens": sum(reply.num_reasoning_tokens for reply in replies),
    }


@pytest.mark.parametrize("text", [_CALL, _ANSWER])
def test_streamed_and_whole_agree_however_cut(harmony: HarmonyFormat, text: str) -> None:
    (whole,), _ = _run(harmony, text, return_logprobs=True)
    for cut in (1, 2, 3, 5, 100):
        replies, _ = _run(harmony, text, cut=cut, stream=True, return_logprobs=True)
        assert _joined(replies) == _joined([whole])
        assert [each.finish_reason for each in replies[:-1]] == [""] * (len(replies) - 1)
        assert replies[-1].finish_reason == whole.finish_reason
        assert [each.num_input_tokens for each in replies] == [0] * (len(replies) - 1) + [11]
        assert replies[-1].num_cached_tokens == 3
    assert whole.num_output_tokens == len(harmony.vocabulary.encode_raw(text))


def test_whole_answer(harmony: HarmonyFormat) -> None:
    (reply,), answer = _run(harmony, _ANSWER)
    assert reply.text_output == "Forty-two it is. 🙂"
    assert reply.reasoning_output == "Thinking hard."
    assert reply.finish_reason == answer.finish_reason == "stop"
    assert reply.num_reasoning_tokens == len(harmony.vocabulary.encode("Thinking hard."))
    assert reply.logprobs == []


def test_tool_call_has_openais_shape(harmony: HarmonyFormat) -> None:
    (reply,), _ = _run(harmony, _CALL)
    (call,) = reply.tool_calls
    assert call == {
        "index": 0,
        "id": call["id"],
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert reply.finish_reason == "tool_calls"
    replies, _ = _run(harmony, _CALL, stream=True)
    deltas = [delta for each in replies for delta in each.tool_calls]
    assert [sorted(delta) for delta in deltas[1:]] == [["function", "index"]] * (len(deltas) - 1)
    assert all("name" not in delta["function"] for delta in deltas[1:])


def test_where_a_call_stood_is_told_if_text_follows_it(harmony: HarmonyFormat) -> None:
    again = _CALL.replace("Thinking.", "Again.").replace("<|call|>", "<|end|>")
    text = _CALL.replace("<|call|>", "<|end|><|start|>assistant") + again
    text += "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    text += _CALL.partition("assistant")[2]
    (reply,), _ = _run(harmony, text)
    assert reply.reasoning_output == "Thinking.\nAgain."
    assert reply.text_output == "Wait."
    first, second, third = reply.tool_calls
    assert first["after"] == [len("Thinking."), 0]
    assert second["after"] == [len("Thinking.\nAgain."), 0]
    assert "after" not in third
    replies, _ = _run(harmony, text, stream=True)
    assert not any("after" in delta for each in replies for delta in each.tool_calls)
    (sent_back,) = parse_messages(
        json.dumps([{"role": "assistant", "tool_calls": reply.tool_calls}])
    )
    assert "after" not in sent_back["tool_calls"][0]


def test_logprobs_are_those_of_the_visible_text(harmony: HarmonyFormat) -> None:
    (reply,), _ = _run(harmony, _ANSWER, return_logprobs=True)
    content = b"".join(bytes(entry["bytes"]) for entry in reply.logprobs)
    assert content.decode() == reply.text_output
    for entry in reply.logprobs:
        assert entry["top_logprobs"] == [{k: entry[k] for k in ("token", "logprob", "bytes")}]
    assert reply.cumulative_logprob == -0.5 * reply.num_output_tokens
    json.dumps(reply.logprobs)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It is 42.<|return|>", "It is 42."),
        ("<|message|>It is 42.<|return|>", "It is 42."),
        ("<|channel|>thoughts<|message|>It is 42.<|return|>", "It is 42."),
        ("<|channel|>analysis<|message|>Hm<|end|>It is 42.<|return|>", "It is 42."),
        (_CALL, ""),
    ],
)
def test_text_that_is_content_only_at_the_end_has_logprobs_too(
    harmony: HarmonyFormat, text: str, shown: str
) -> None:
    for cut in (1, 3, 100):
        replies, _ = _run(harmony, text, cut=cut, stream=True, return_logprobs=True)
        joined = _joined(replies)
        assert joined["text"] == shown
        assert "".join(entry["token"] for entry in joined["logprobs"]) == shown


def test_each_replys_logprobs_are_those_of_its_own_text(harmony: HarmonyFormat) -> None:
    """Also while a stop word may have begun: the entries wait as their text does."""
    context = {"stop_words": [" it was"]}
    text = "<|channel|>final<|message|>Forty-two it is.<|return|>"
    replies, _ = _run(harmony, text, stream=True, format=context, return_logprobs=True)
    for reply in replies:
        assert "".join(entry["token"] for entry in reply.logprobs) == reply.text_output
    assert [each.text_output for each in replies if each.text_output] == [
        *("Fort", "y", "-two", " it is", "."),
    ]


def test_control_tokens_among_the_likeliest_have_no_text(harmony: HarmonyFormat) -> None:
    answer = Answer(AnswerContext(format={}, stream=True, return_logprobs=True), harmony)
    token_ids = harmony.vocabulary.encode_raw("<|channel|>final<|message|>x")
    top = [(200_002, -0.1), (200_007, -0.2), (token_ids[-1], -0.3)]
    response = EngineResponse("g", 0, tuple(token_ids), ((-0.3, top),) * 4, None, 1, 0)
    reply = answer.push(response)
    assert reply is not None
    [entry] = reply.logprobs
    assert entry["top_logprobs"] == [
        {"token": "", "logprob": -0.1, "bytes": None},
        {"token": "", "logprob": -0.2, "bytes": None},
        {"token": "x", "logprob": -0.3, "bytes": [120]},
    ]
    assert "<|" not in json.dumps(reply.logprobs)


def test_an_answer_that_is_all_reasoning_says_so(harmony: HarmonyFormat) -> None:
    text = "<|channel|>analysis<|message|>Let me think about it"
    (reply,), _ = _run(harmony, text, reason="length", return_logprobs=True)
    assert (reply.text_output, reply.reasoning_output) == ("", "Let me think about it")
    assert reply.finish_reason == "length"
    assert reply.num_reasoning_tokens == len(harmony.vocabulary.encode("Let me think about it"))
    assert reply.logprobs == []


def test_a_stop_word_ends_the_answer_before_the_engine_does(harmony: HarmonyFormat) -> None:
    context = {"stop_words": ["two"]}
    replies, answer = _run(harmony, _ANSWER, stream=True, format=context)
    assert "".join(each.text_output for each in replies) == "Forty-"
    assert [each.finish_reason for each in replies if each.finish_reason] == ["stop"]
    assert replies[-1].num_input_tokens == 11
    assert answer.finish_reason == "stop"


def test_what_follows_a_stop_word_is_not_counted_however_cut(harmony: HarmonyFormat) -> None:
    stop_words = {"stop_words": ["-two it"]}
    until = _ANSWER.partition(" is.")[0]
    num_tokens = len(harmony.vocabulary.encode_raw(until))
    for cut in (1, 2, 3, 5, 100):
        replies, _ = _run(
            harmony, _ANSWER, cut=cut, stream=True, format=stop_words, return_logprobs=True
        )
        joined = _joined(replies)
        assert joined["text"] == "Forty"
        assert joined["num_output_tokens"] == num_tokens
        assert joined["cumulative_logprob"] == -0.5 * num_tokens
        # The stop word's own tokens are read, but they are no content.
        assert "".join(entry["token"] for entry in joined["logprobs"]) == "Forty"


def test_echo_stands_first(harmony: HarmonyFormat) -> None:
    (reply,), _ = _run(harmony, _ANSWER, echo="Q: ")
    assert reply.text_output.startswith("Q: Forty")


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_the_engines_reason_is_told(harmony: HarmonyFormat, reason: str) -> None:
    (reply,), _ = _run(harmony, _ANSWER.removesuffix("<|return|>"), reason=reason)
    assert reply.finish_reason == reason


def test_context_survives_its_json() -> None:
    context = AnswerContext(
        format={"tool_names": ["f"], "opening": [1]}, stream=True, echo="é\n", return_logprobs=True
    )
    assert AnswerContext.from_json(context.to_json()) == context


def test_every_output_is_in_every_reply(harmony: HarmonyFormat) -> None:
    replies, _ = _run(harmony, _ANSWER, cut=random.Random(0).randrange(1, 4), stream=True)
    names = [each.name for each in dataclasses.fields(Reply)]
    assert len(names) == 10
    assert all(getattr(reply, name) is not None for reply in replies for name in names)
