"""The Responses API: items to messages, replies to items and to events in pairs, and the store."""

import json
import random
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gptoss_openai import responses
from gptoss_openai.ensemble import Reply
from gptoss_openai.errors import ApiError
from gptoss_openai.responses import ResponseAnswer
from gptoss_openai.store import ResponseStore

from .fakes import ANSWER, MODEL, events_of, joined
from .test_chat import REPLIES

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO = [each for each in ANSWER if isinstance(each, Reply)]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
REASONED = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore(10, 2**20)


def _ask(kept: ResponseStore, /, **fields: Any) -> ResponseAnswer:
    return ResponseAnswer({"model": MODEL, "input": "Hello", **fields}, kept, "me")


def _messages(answer: ResponseAnswer) -> list[dict[str, Any]]:
    content = answer.inputs["messages"]
    assert isinstance(content, bytes)
    return json.loads(content)


def _events(answer: ResponseAnswer, replies: list[Reply]) -> list[dict[str, Any]]:
    return events_of(b"".join([*map(answer.push, replies), answer.end()]))


def test_parameters_map_one_to_one(store: ResponseStore) -> None:
    answer = _ask(
        store,
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        top_logprobs=2,
        seed=3,
        tools=[{**TOOL, "strict": False}],
        tool_choice="none",
        instructions="Be brief.",
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "text"}},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        stream=True,
        stream_options={"include_obfuscation": False},
        user="me",
        truncation="disabled",
        background=False,
        parallel_tool_calls=True,
    )
    inputs = {**answer.inputs}
    tools = inputs.pop("tools")
    assert isinstance(tools, bytes)
    (tool,) = json.loads(tools)
    assert tool["function"] == {"name": "f", "parameters": {"type": "object"}, "strict": False}
    assert _messages(answer) == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    del inputs["messages"], inputs["response_format"]
    assert inputs == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_logprobs": 2,
        "seed": 3,
        "return_logprobs": True,
        "tool_choice": b"none",
        "reasoning_effort": b"high",
        "stream": True,
        "parallel_tool_calls": True,
    }


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tool_choice_is_sent_as_a_chats(
    store: ResponseStore, monkeypatch: pytest.MonkeyPatch, choice: Any, sent: Any
) -> None:
    monkeypatch.setattr(responses, "check", lambda *_: None)
    content = _ask(store, tools=[TOOL], tool_choice=choice).inputs["tool_choice"]
    assert isinstance(content, bytes)
    assert (content.decode() if isinstance(sent, str) else json.loads(content)) == sent


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}},
            "text.format.name",
            "invalid_value",
        ),
        ({"input": None}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [7]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "a"}, {"role": "user"}]},
            "input[1].content",
            "invalid_value",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input[0].call_id",
            "invalid_value",
        ),
        (
            {"input": [REASONED, CALLED, {**CALLED, "call_id": "c2", "arguments": 7}]},
            "input[2].arguments",
            "invalid_value",
        ),
        ({"input": [REASONED, {**CALLED, "name": "a b"}]}, "input[1].name", "invalid_value"),
        ({"input": [CALLED, CALLED]}, "input[1].call_id", "invalid_value"),
        ({"input": [{**CALLED, "call_id": None}]}, "input[0].call_id", "invalid_value"),
        (
            {"input": [CALLED, {"type": "function_call_output", "call_id": "c1", "output": 7}]},
            "input[1].output",
            "invalid_value",
        ),
        (
            {"input": [REASONED, {"type": "message", "role": "assistant", "content": 7}]},
            "input[1].content",
            "invalid_value",
        ),
        ({"instructions": "x" * 2**23}, "input", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "unsupported_parameter",
        ),
        ({"tools": [{**TOOL, "also": 1}]}, "tools[0].also", "unknown_parameter"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "also": 1}}},
            "text.format.also",
            "unknown_parameter",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "invalid_value"),
        ({"instructions": 7}, "instructions", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
        ({"max_tool_calls": 1}, "max_tool_calls", "unsupported_parameter"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        ({"text": {"x": 1}}, "text.x", "unknown_parameter"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": 7}, "tools", "invalid_value"),
        ({"include": "x"}, "include", "invalid_value"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"store": 1}, "store", "invalid_value"),
    ],
)
def test_refusals_name_the_field(
    store: ResponseStore, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        _ask(store, **fields)
    assert (refusal.value.status, refusal.value.param, refusal.value.code) == (400, param, code)
    for internal in ("messages[", "tool_calls[", "tool_call_id", "json_schema.", "response_format"):
        assert internal not in refusal.value.message


def test_items_of_one_turn_are_one_message(store: ResponseStore) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I "}, {"text": "ask."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "x"}],
        },
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "?"},
        {"type": "message", "role": "assistant", "content": "Sunny."},
        {"type": "message", "role": "assistant", "content": "And warm."},
        {"type": "message", "role": "user", "content": "Thanks"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ]
    assert _messages(_ask(store, input=items)) == [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Wait."}],
            "reasoning_content": "I ask.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "And warm."},
        {"role": "user", "content": "Thanks"},
    ]


def _random_replies(seed: int) -> list[Reply]:
    """Any pieces in any order; but a call's arguments end where another piece begins."""
    chance = random.Random(seed)
    replies: list[Reply] = []
    num_calls = 0
    is_in_call = False
    for _ in range(chance.randrange(12)):
        kind = chance.randrange(5)
        is_in_call = is_in_call and kind > 1
        if kind == 0:
            replies.append(Reply(reasoning=chance.choice(["hm", "é"]), num_output_tokens=1))
        elif kind == 1:
            replies.append(Reply(text="so", num_output_tokens=1, logprobs=REPLIES[2].logprobs))
        elif kind == 2:
            replies.append(Reply())
        elif is_in_call and chance.random() < 0.7:
            delta = {"index": num_calls - 1, "function": {"arguments": "{"}}
            text = chance.choice(["", "behind it"])
            replies.append(Reply(text=text, tool_calls=[delta], num_output_tokens=1))
            is_in_call = not text
        else:
            call = {"index": num_calls, "id": f"call_{num_calls}", "type": "function"}
            call["function"] = {"name": "f", "arguments": chance.choice(["", "{}"])}
            replies.append(Reply(text="why", tool_calls=[call], num_output_tokens=2))
            num_calls += 1
            is_in_call = True
    reason = chance.choice(["stop", "length"])
    return [*replies, Reply(finish_reason=reason, num_input_tokens=9)]


@pytest.mark.parametrize("seed", range(100))
def test_events_come_in_pairs_and_add_up(store: ResponseStore, seed: int) -> None:
    events = _events(_ask(store, stream=True, tools=[TOOL]), _random_replies(seed))
    for each in events:
        EVENT.validate_python(each)
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    is_cut = events[-1]["type"] == "response.incomplete"
    assert last["status"] == ("incomplete" if is_cut else "completed")
    assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    Response.model_validate(last)
    open_items: dict[int, dict[str, Any]] = {}
    done: list[dict[str, Any]] = []
    open_parts: set[str] = set()
    deltas: dict[str, str] = {}
    for event in events[2:-1]:
        place = event["output_index"]
        match event["type"]:
            case "response.output_item.added":
                assert not open_items
                assert place == len(done)
                open_items[place] = event["item"]
            case "response.content_part.added":
                open_parts.add(event["item_id"])
                assert event["part"]["text"] == ""
            case "response.content_part.done":
                open_parts.remove(event["item_id"])
                assert event["part"]["text"] == deltas.get(event["item_id"], "")
            case "response.output_item.done":
                assert open_items.pop(place)["id"] == event["item"]["id"]
                assert not open_parts
                done.append(event["item"])
            case kind if kind.endswith(".delta"):
                assert open_items[place]["id"] == event["item_id"]
                deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
            case kind:
                assert kind.endswith(".done")
                said = event.get("text", event.get("arguments"))
                assert said == deltas.get(event["item_id"], "")
    assert not open_items
    assert done == last["output"]
    assert all(each["status"] == "completed" for each in done[:-1])
    if not is_cut:
        assert any(each["type"] != "reasoning" for each in done)


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**each, "id": ""} for each in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


@pytest.mark.parametrize("replies", [REPLIES, HELLO, HELLO[-1:]])
def test_streamed_and_whole_agree(store: ResponseStore, replies: list[Reply]) -> None:
    streamed = _events(_ask(store, stream=True), replies)[-1]["response"]
    whole = _ask(store).whole([joined(replies)])
    Response.model_validate(whole)
    assert _without_ids(streamed) == _without_ids(whole)


def _call(index: int, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"index": index, "id": f"c{index}", "type": "function", "function": function, **more}


def _says(*tokens: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"logprob": -0.5, "top_logprobs": []}
    return {"logprobs": [{"token": each, "bytes": [*each.encode()], **entry} for each in tokens]}


# By turns, as a model may: it thinks and speaks, and calls, more than once.
TURNS = [
    Reply(reasoning="One."),
    Reply(text="Wait.", **_says("Wait", ".")),
    Reply(tool_calls=[_call(0)]),
    Reply(reasoning="\nTwo."),
    Reply(tool_calls=[_call(1)]),
    Reply(text="\nAh, é", **_says("Ah", ", é")),
    Reply(tool_calls=[_call(2)]),
    Reply(text="\n\nx\n", **_says("\n", "x", "\n")),
    Reply(tool_calls=[_call(3)]),
    Reply(text="\ny", **_says("y"), finish_reason="tool_calls"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_items_stand_as_they_arrived(store: ResponseStore, stream: bool) -> None:
    replies = TURNS if stream else [joined(TURNS)]
    events = _events(_ask(store, stream=True), replies)
    output = events[-1]["response"]["output"]
    said = [
        each["call_id"] if each["type"] == "function_call" else each["content"][0]["text"]
        for each in output
    ]
    assert said == ["One.", "Wait.", "c0", "Two.", "c1", "Ah, é", "c2", "\nx\n", "c3", "y"]
    added = [each for each in events if each["type"] == "response.output_item.added"]
    assert [each["output_index"] for each in added] == [*range(10)]
    assert [each["item"]["id"] for each in added] == [each["id"] for each in output]
    logprobs = [each["content"][0]["logprobs"] for each in output if each["type"] == "message"]
    tokens = [[entry["token"] for entry in each] for each in logprobs]
    assert tokens == [["Wait", "."], ["Ah", ", é"], ["\n", "x", "\n"], ["y"]]


def test_a_stream_that_came_in_few_pieces_has_the_same_items(store: ResponseStore) -> None:
    whole = _without_ids(_ask(store, stream=True).whole(TURNS))
    for cut in range(1, len(TURNS)):
        pieces = [joined(TURNS[:cut]), joined(TURNS[cut:])]
        assert _without_ids(_ask(store, stream=True).whole(pieces)) == whole


def test_an_empty_answer_is_an_empty_message(store: ResponseStore) -> None:
    events = _events(_ask(store, stream=True), [Reply(finish_reason="stop")])
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert item["status"] == "completed"


def test_what_was_cut_is_incomplete(store: ResponseStore) -> None:
    reply = Reply(reasoning="Hm", finish_reason="length", num_output_tokens=3)
    whole = _ask(store).whole([reply])
    assert [each["status"] for each in whole["output"]] == ["incomplete"]
    assert Response.model_validate(whole).output_text == ""


def test_a_chain_of_responses_is_a_chat(store: ResponseStore) -> None:
    first = _ask(store, instructions="One", tools=[TOOL]).whole([joined(REPLIES)])
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": "21"}
        for number in (1, 2)
    ]
    answer = _ask(
        store, instructions="Two", input=outputs, tools=[TOOL], previous_response_id=first["id"]
    )
    roles = [each["role"] for each in _messages(answer)]
    assert roles == ["developer", "user", "assistant", "tool", "tool"]
    assert _messages(answer)[0]["content"] == "Two"
    turn = _messages(answer)[2]
    assert turn["reasoning_content"] == "Let me see."
    assert [call["id"] for call in turn["tool_calls"]] == ["call_1", "call_2"]
    second = answer.whole([joined(HELLO)])
    assert second["previous_response_id"] == first["id"]
    third = _ask(store, input="More", previous_response_id=second["id"])
    roles = [each["role"] for each in _messages(third)]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_what_is_not_stored_cannot_be_named(store: ResponseStore) -> None:
    first = _ask(store, store=False).whole([Reply(finish_reason="stop")])
    assert first["store"] is False
    assert len(store) == 0
    with pytest.raises(ApiError, match="names no stored response"):
        _ask(store, previous_response_id=first["id"])


def test_a_failure_is_an_error_event(store: ResponseStore) -> None:
    answer = _ask(store, stream=True)
    begun = answer.push(Reply(text="a"))
    *_, last = events_of(begun + answer.fail(ApiError(500, "broken")))
    EVENT.validate_python(last)
    assert (last["type"], last["message"], last["error"]["message"]) == (
        "error",
        "broken",
        "broken",
    )
    assert len(store) == 0
