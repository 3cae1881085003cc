"""OpenAI's chat fields to the ensemble's inputs, and replies to chunks and whole completions."""

import json
import random
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gptoss_openai.chat import ChatAnswer
from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError, from_sentence

from .fakes import MESSAGES, MODEL, events_of, joined

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
TOP = {"token": "Hi", "logprob": -0.1, "bytes": [72, 105]}
REPLIES = [
    Reply(reasoning="Let me ", num_output_tokens=2, num_reasoning_tokens=2),
    Reply(reasoning="see.", num_output_tokens=1, num_reasoning_tokens=1),
    Reply(text="Hi ", num_output_tokens=1, logprobs=[{**TOP, "top_logprobs": [TOP]}]),
    Reply(),
    Reply(text="you", num_output_tokens=1, logprobs=[{**TOP, "top_logprobs": []}]),
    Reply(tool_calls=[CALL]),
    Reply(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}], num_output_tokens=2),
    Reply(tool_calls=[{"index": 0, "function": {"arguments": ":1}"}}], num_output_tokens=2),
    Reply(tool_calls=[{**CALL, "index": 1, "id": "call_2"}], num_output_tokens=1),
    Reply(finish_reason="tool_calls", num_input_tokens=9, num_cached_tokens=4),
]


def _chat(**fields: Any) -> ChatAnswer:
    return ChatAnswer({"model": MODEL, "messages": MESSAGES, **fields})


def test_parameters_map_one_to_one() -> None:
    answer = _chat(
        max_completion_tokens=5,
        temperature=0,
        top_p=0.5,
        seed=2**64 - 1,
        stop=["a", "b"],
        tools=[TOOL],
        tool_choice="auto",
        reasoning_effort="low",
        logprobs=True,
        top_logprobs=3,
        n=1,
        response_format={"type": "text"},
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        top_k=4,
        min_p=0.1,
        min_tokens=2,
        ignore_eos=True,
        cache_salt="ours",
        stream=True,
    )
    inputs = {**answer.inputs}
    for name in ("messages", "tools", "response_format", "logit_bias"):
        value = inputs.pop(name)
        assert isinstance(value, bytes)
        assert json.loads(value) is not None
    assert inputs == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 2**64 - 1,
        "stop_words": [b"a", b"b"],
        "tool_choice": b"auto",
        "reasoning_effort": b"low",
        "return_logprobs": True,
        "top_logprobs": 3,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_k": 4,
        "min_p": 0.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "cache_salt": b"ours",
        "stream": True,
    }


def test_null_is_not_given() -> None:
    names = ("temperature", "stop", "tools", "n", "seed", "max_tokens", "functions", "stream")
    assert set(_chat(**dict.fromkeys(names)).inputs) == {"messages", "stream"}
    assert set(_chat(stop=[]).inputs) == {"messages", "stream"}


def test_harmless_fields_are_accepted() -> None:
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "modalities": ["text"],
        "verbosity": "medium",
        "prediction": {"type": "content"},
    }
    assert set(_chat(**fields).inputs) == {"messages", "stream"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 129}, "n", "invalid_value"),
        ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"temperature": 1e39}, "temperature", "invalid_value"),
        ({"temperature": 10**400}, "temperature", "invalid_value"),
        ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"seed": 2**64}, "seed", "invalid_value"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"stop": [1]}, "stop", "invalid_value"),
        ({"stop": ["x" * 300]}, "stop[0]", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"logprobs": 3}, "logprobs", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
        ({"tools": {}}, "tools", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.type",
            "unsupported_parameter",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tool_choice": 7}, "tool_choice", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "also": 1}}},
            "response_format.json_schema.also",
            "unknown_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "also": 1}]},
            "messages[0].also",
            "unknown_parameter",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hello"}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "tool", "content": "x", "tool_call_id": "y"}]},
            "messages[0].tool_call_id",
            "invalid_value",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refusal:
        _chat(**fields)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, param, code)
    assert param.partition(".")[0] in refusal.value.message


def test_messages_come_back_as_the_clients_helpers_have_them() -> None:
    """`parse` and `stream` of OpenAI's client add what they have read to what was said."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": {**function, "parsed_arguments": {}}}
    refused = {"type": "refusal", "refusal": "No."}
    given = [
        *MESSAGES,
        {"role": "assistant", "content": "", "parsed": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [refused], "parsed": {"a": 1}, "tool_calls": None},
    ]
    content = _chat(messages=given).inputs["messages"]
    assert isinstance(content, bytes)
    assert json.loads(content) == [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
        given[2],
        {"role": "assistant", "content": [{"type": "text", "text": "No."}], "tool_calls": None},
    ]
    assert "parsed" in given[1]  # What a client gave is not changed.


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("skip_special_tokens", True, False),
        ("include_stop_str_in_output", False, True),
        ("best_of", 1, 2),
        ("length_penalty", 1.0, 2.0),
        ("use_beam_search", False, True),
        ("stop_token_ids", [], [7]),
        ("add_generation_prompt", True, False),
        ("continue_final_message", False, True),
        ("include_reasoning", True, False),
        ("chat_template_kwargs", {}, {"enable_thinking": False}),
        ("structured_outputs", None, {"regex": "a"}),
        ("guided_json", None, {"type": "object"}),
    ],
)
def test_what_clients_of_vllm_send_is_known(name: str, neutral: Any, other: Any) -> None:
    assert set(_chat(**{name: neutral}).inputs) == {"messages", "stream"}
    with pytest.raises(ApiError) as refusal:
        _chat(**{name: other})
    assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")


def test_sentences_have_the_clients_words() -> None:
    names = _chat(max_completion_tokens=2, response_format={"type": "json_object"}).names
    for sentence, said, param in (
        (
            "min_tokens must be at most max_tokens (2), got 5",
            "min_tokens must be at most max_completion_tokens (2), got 5",
            "min_tokens",
        ),
        (
            "guide cannot be compiled: too big",
            "response_format cannot be compiled: too big",
            "response_format",
        ),
    ):
        error = from_sentence(sentence, names)
        assert (error.status, error.message, error.param) == (400, said, param)
    of_tools = from_sentence("guide cannot be compiled: too big", _chat(tools=[TOOL]).names)
    assert (of_tools.param, of_tools.message) == ("tools", "tools cannot be compiled: too big")


def test_seeds_of_all_integers_of_64_bits_are_taken() -> None:
    assert _chat(seed=-1).inputs["seed"] == 2**64 - 1
    assert _chat(seed=-(2**63)).inputs["seed"] == 2**63


def test_no_top_logprobs_need_no_logprobs() -> None:
    assert _chat(logprobs=False, top_logprobs=0).inputs["top_logprobs"] == 0


def test_the_nearest_name_is_said() -> None:
    with pytest.raises(ApiError, match="did you mean 'temperature'"):
        _chat(temprature=1)


def test_chunks_are_one_completion() -> None:
    answer = _chat(
        stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1
    )
    *events, done = events_of(b"".join([*map(answer.push, REPLIES), answer.end()]))
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(each, strict=True) for each in events]
    assert len({(each.id, each.created, each.model) for each in chunks}) == 1
    *chunks, last = chunks
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not any(each.choices[0].delta.role for each in chunks[1:])
    assert [each.usage for each in chunks] == [None] * len(chunks)
    assert (last.choices, last.usage is not None) == ([], True)
    reasons = [each.choices[0].finish_reason for each in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]
    deltas = [call for each in chunks for call in each.choices[0].delta.tool_calls or ()]
    for index, call_id in enumerate(("call_1", "call_2")):
        first, *others = [each for each in deltas if each.index == index]
        assert (first.id, first.type, first.function and first.function.name) == (
            call_id,
            "function",
            "f",
        )
        assert not any(each.id or each.type for each in others)


def test_no_usage_unless_it_is_asked_for() -> None:
    answer = _chat(stream=True)
    events = events_of(b"".join([*map(answer.push, REPLIES), answer.end()]))
    assert not any("usage" in each for each in events[:-1])


def test_a_reply_with_nothing_to_show_is_no_chunk() -> None:
    answer = _chat(stream=True)
    assert answer.push(Reply()) == b""
    assert len(events_of(answer.push(Reply(finish_reason="length")))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_streamed_and_whole_agree(seed: int) -> None:
    chance = random.Random(seed)
    kept = [each for each in REPLIES[:5] if chance.random() < 0.8]
    end = REPLIES[5:] if seed % 2 else [Reply(finish_reason="stop", num_output_tokens=1)]
    replies = [*kept, *end]
    fields = {"logprobs": True, "top_logprobs": 1}
    streamed = _chat(stream=True, stream_options={"include_usage": True}, **fields)
    events = events_of(b"".join([*map(streamed.push, replies), streamed.end()]))[:-1]
    whole = ChatCompletion.model_validate(_chat(**fields).whole([joined(replies)]), strict=True)
    (choice,) = whole.choices
    deltas = [each["choices"][0] for each in events[:-1]]

    def said(name: str) -> str:
        return "".join(each["delta"].get(name) or "" for each in deltas)

    assert said("content") == (choice.message.content or "")
    reasoning = getattr(choice.message, "reasoning_content", "")
    assert said("reasoning_content") == reasoning
    assert deltas[-1]["finish_reason"] == choice.finish_reason
    assert choice.logprobs is not None
    logprobs = [
        entry for each in deltas if each["logprobs"] for entry in each["logprobs"]["content"]
    ]
    assert len(logprobs) == len(choice.logprobs.content or [])
    assert whole.usage is not None
    assert events[-1]["usage"] == whole.usage.model_dump(exclude_none=True)
    calls: dict[int, str] = {}
    for call in (call for each in deltas for call in each["delta"].get("tool_calls", ())):
        calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    arguments = [getattr(each, "function").arguments for each in choice.message.tool_calls or ()]  # noqa: B009
    assert [*calls.values()] == arguments


def test_all_tokens_in_reasoning_leave_no_content() -> None:
    reply = Reply(reasoning="Hm", finish_reason="length", num_output_tokens=3)
    (choice,) = _chat().whole([reply])["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Hm"
    assert choice["finish_reason"] == "length"


def test_an_answer_without_a_word_is_an_empty_text_and_a_call_has_none() -> None:
    (said,) = _chat().whole([Reply(reasoning="Hm", finish_reason="stop")])["choices"]
    assert said["message"]["content"] == ""
    (called,) = _chat().whole([Reply(tool_calls=[CALL], finish_reason="tool_calls")])["choices"]
    assert called["message"]["content"] is None


def test_where_a_call_stood_is_not_told() -> None:
    reply = Reply(text="a", tool_calls=[{**CALL, "after": [0, 0]}], finish_reason="tool_calls")
    assert b"after" not in _chat(stream=True).push(reply)
    (choice,) = _chat().whole([reply])["choices"]
    assert "after" not in choice["message"]["tool_calls"][0]


def test_whole_calls_have_no_places() -> None:
    (choice,) = _chat().whole([joined(REPLIES)])["choices"]
    first, second = choice["message"]["tool_calls"]
    assert first == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":1}'},
    }
    assert second["id"] == "call_2"
