import json
import time
from typing import Any

import pytest

from gptoss_harmony.chat import (
    MAX_STOP_WORDS,
    check_stop_words,
    parse_chat,
    parse_messages,
    parse_tools,
    tool_names,
    user_message,
)
from gptoss_harmony.types import InvalidChat, UnsupportedChat

USER = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a":"b"}'},
}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does f.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def messages(*given: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in parse_messages(json.dumps(list(given)))]


def calling(**changes: Any) -> dict[str, Any]:
    return {**CALLING, "tool_calls": [{**CALL, **changes}]}


def tool(**changes: Any) -> dict[str, Any]:
    return {**TOOL, "function": {**TOOL["function"], **changes}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (USER, {"role": "user", "content": "Hi"}),
        ({**USER, "name": "ann"}, {"role": "user", "content": "Hi", "name": "ann"}),
        ({**USER, "name": None}, {"role": "user", "content": "Hi"}),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]},
            {"role": "user", "content": "ab"},
        ),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            # As OpenAI's own client echoes a reply.
            {
                "role": "assistant",
                "content": "x",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": None,
            },
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": []},
            {"role": "assistant", "content": "x"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
        ),
        (CALLING, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        (calling(index=0), {"role": "assistant", "content": "", "tool_calls": [CALL]}),
    ],
)
def test_messages_come_out_in_one_shape(given: Any, expected: dict[str, Any]) -> None:
    assert messages(given) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":"b"}', '{"a":"b"}'),
        (' { "a" :1} ', ' { "a" :1} '),
        ("not JSON <|end|>", "not JSON <|end|>"),
        ({"a": "ü"}, '{"a": "ü"}'),
        ("", "{}"),
        (None, "{}"),
    ],
)
def test_arguments_are_verbatim_or_serialised_once(arguments: Any, expected: str) -> None:
    function = {"name": "f", "arguments": arguments}
    [message] = messages(calling(function=function))
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_a_result_belongs_to_an_earlier_call() -> None:
    assert messages(USER, CALLING, RESULT)[2] == RESULT
    for orphans in ([USER, RESULT], [USER, RESULT, CALLING]):
        with pytest.raises(InvalidChat, match=r"messages\[1\].tool_call_id .* earlier tool call"):
            messages(*orphans)


def test_results_stand_in_the_order_of_their_calls() -> None:
    ids = ("x", "y", "z")
    asked = {**CALLING, "tool_calls": [{**CALL, "id": each} for each in ids]}
    results = [{**RESULT, "tool_call_id": each, "content": each} for each in "zxy"]
    ordered = messages(USER, asked, *results, USER, asked, *results[1:])
    assert [each["content"] for each in ordered if each["role"] == "tool"] == [*"xyz", *"xy"]
    assert [each["role"] for each in ordered[:2]] == ["user", "assistant"]


def test_a_results_name_is_its_calls() -> None:
    assert messages(CALLING, {**RESULT, "name": "f"})[1]["name"] == "f"
    with pytest.raises(InvalidChat, match=r"messages\[1\].name must be 'f', as in the call"):
        messages(CALLING, {**RESULT, "name": "g"})


REFUSED: list[tuple[Any, str]] = [
    ({"role": "user"}, "messages[0].content must be a string or a list of text parts, got null"),
    ({"role": "user", "content": 3}, "messages[0].content must be a string or a list"),
    ({"role": "user", "content": {"a": 1}}, 'got {"a": 1}'),
    ({"role": "user", "content": ["x"]}, 'messages[0].content[0] must be an object, got "x"'),
    ({"role": "user", "content": [{"type": "text"}]}, "content[0].text must be a string, got null"),
    (
        {"role": "user", "content": [{"type": "text", "text": "x", "txet": 1}]},
        "messages[0].content[0] has an unknown field \"txet\"; did you mean 'text'?",
    ),
    (
        {"role": "wizard", "content": "x"},
        "role must be one of system, developer, user, assistant, ",
    ),
    ({"role": "wizard", "content": "x"}, 'tool, got "wizard"'),
    ({"role": ["user"], "content": "x"}, "messages[0].role must be one of"),
    ({"content": "x"}, "messages[0].role must be one of"),
    ("Hi", 'messages[0] must be an object, got "Hi"'),
    ({**USER, "contnet": "x"}, "unknown field \"contnet\"; did you mean 'content'?"),
    ({**USER, "zzz": "x"}, 'unknown field "zzz"; known: role, content, name'),
    ({**USER, "tool_calls": [CALL]}, 'messages[0] has an unknown field "tool_calls"'),
    ({**USER, "name": "a b"}, "messages[0].name must be 1 to 64 of the characters"),
    ({**USER, "name": ""}, "messages[0].name must be 1 to 64 of the characters"),
    ({**USER, "content": "a\ud800b"}, "half a character (a lone surrogate) at position 1"),
    ({**RESULT, "tool_call_id": None}, "messages[0].tool_call_id must be a string, got null"),
    ({**CALLING, "tool_calls": "f"}, 'messages[0].tool_calls must be a list, got "f"'),
    ({**CALLING, "tool_calls": [3]}, "messages[0].tool_calls[0] must be an object, got 3"),
    ({**CALLING, "tool_calls": [CALL, CALL]}, 'tool_calls[1].id "c1" is given twice'),
    (calling(id=""), "messages[0].tool_calls[0].id is empty"),
    (calling(id=None), "messages[0].tool_calls[0].id must be a string, got null"),
    (calling(function=None), "tool_calls[0].function must be an object, got null"),
    (calling(function={"name": "f<|end|>"}), 'got "f<|end|>"'),
    (calling(function={"name": "f", "arguments": 3}), "must be a string of JSON, got 3"),
    (
        {"role": "assistant", "reasoning": "a", "reasoning_content": "b"},
        "messages[0].reasoning and messages[0].reasoning_content differ",
    ),
    ({"role": "assistant", "reasoning": 3}, "messages[0].reasoning must be a string, got 3"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_bad_message_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        messages(given)
    assert words in str(refused.value)
    assert not isinstance(refused.value, UnsupportedChat)


UNSUPPORTED: list[tuple[Any, str]] = [
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "messages[0].content[0].type must be 'text', got \"image_url\"",
    ),
    ({"role": "function", "name": "f", "content": "x"}, "messages[0].role 'function'"),
    ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ({"role": "assistant", "refusal": "No."}, "messages[0].refusal is not supported"),
    (calling(type="custom"), "messages[0].tool_calls[0].type must be 'function'"),
]


@pytest.mark.parametrize(("given", "words"), UNSUPPORTED, ids=[words for _, words in UNSUPPORTED])
def test_what_is_not_built_is_named(given: Any, words: str) -> None:
    with pytest.raises(UnsupportedChat) as refused:
        messages(given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "messages is empty; it must be JSON"),
        (" \n", "messages is empty; it must be JSON"),
        ("[", "messages is not JSON: Expecting value at line 1, column 2"),
        ("[]", "messages must be a list of at least one message, got []"),
        ("{}", "messages must be a list of at least one message, got {}"),
        ('"Hi"', 'messages must be a list of at least one message, got "Hi"'),
        ('[{"role": "user", "content": NaN}]', "messages is not JSON: NaN is no JSON number"),
        ('[{"role": 1e999}]', 'messages is not JSON: "1e999" is larger than any number'),
        ("[" * 200_000, "messages is nested too deeply"),
        ('[{"role": ' + "9" * 5000 + "}]", "messages is not JSON: "),
    ],
)
def test_what_is_no_list_of_messages_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        parse_chat(messages=text)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 300


BAD_TOOLS: list[tuple[Any, str]] = [
    ({}, "tools must be a list, got {}"),
    ([3], "tools[0] must be an object, got 3"),
    ([{}], "tools[0].function must be an object, got null"),
    ([{**TOOL, "extra": 1}], 'tools[0] has an unknown field "extra"'),
    ([tool(naem="x")], "tools[0].function has an unknown field \"naem\"; did you mean 'name'?"),
    ([tool(name="get weather")], "tools[0].function.name must be 1 to 64 of the characters"),
    ([tool(name="f" * 65)], "tools[0].function.name must be 1 to 64"),
    ([tool(name="f<|call|>")], 'got "f<|call|>"'),
    ([tool(name="functions.f")], 'got "functions.f"'),
    ([TOOL, TOOL], 'tools[1].function.name "f" is given twice'),
    ([tool(description=3)], "tools[0].function.description must be a string, got 3"),
    ([tool(parameters="x")], "tools[0].function.parameters must be a JSON schema"),
    ([tool(parameters={"type": "objekt"})], "parameters.type must be one of string, number,"),
    ([tool(parameters={"type": "object", "properties": []})], "parameters.properties must be an"),
    (
        [tool(parameters={"type": "object", "properties": {"a": "string"}})],
        'tools[0].function.parameters.properties.a must be a JSON schema (an object), got "string"',
    ),
    ([tool(parameters={"type": "object", "required": "a"})], "parameters.required must be a list"),
    ([tool(parameters={"$ref": "#/$defs/A"})], "parameters refers to '#/$defs/A', which it does"),
    ([tool(parameters={"description": "\ud800"})], "parameters holds half a character"),
]


@pytest.mark.parametrize(("given", "words"), BAD_TOOLS, ids=[words for _, words in BAD_TOOLS])
def test_a_bad_tool_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        parse_chat(messages=json.dumps([USER]), tools=json.dumps(given))
    assert words in str(refused.value)


def test_many_tools_are_limited_together() -> None:
    """Two megabytes that would be a hundred, each tool for itself far below the limit."""
    members = {f"m{number}": {"$ref": "#/$defs/Long"} for number in range(90)}
    parameters = {"properties": members, "$defs": {"Long": {"description": "x" * 4000}}}
    tools = [tool(name=f"f{number}", parameters=parameters) for number in range(300)]
    with pytest.raises(
        InvalidChat, match=r"^tools\[11\].function.parameters brings the tools' type"
    ):
        parse_tools(json.dumps(tools))


def test_tools_that_are_not_built_are_named() -> None:
    with pytest.raises(UnsupportedChat, match=r"tools\[0\]"):
        parse_tools('[{"type": "web_search"}]')


def test_a_chat_with_everything() -> None:
    request = parse_chat(
        messages=json.dumps([USER, CALLING, RESULT]),
        tools=json.dumps([TOOL, tool(name="g", description=None, parameters=None, strict=False)]),
        tool_choice="auto",
        reasoning_effort="high",
        response_format='{"type": "text"}',
        parallel_tool_calls=True,
    )
    assert [message["role"] for message in request.messages] == ["user", "assistant", "tool"]
    assert tool_names(request) == ("f", "g")
    assert request.tools[0] == TOOL
    assert request.reasoning_effort == "high"


def test_what_is_not_given_has_its_default() -> None:
    request = parse_chat(messages=json.dumps([USER]))
    assert request.tools == ()
    assert request.reasoning_effort == "medium"


@pytest.mark.parametrize("choice", ["none", '"none"'])
def test_tool_choice_none_offers_no_tools(choice: str) -> None:
    request = parse_chat(messages=json.dumps([USER]), tools=json.dumps([TOOL]), tool_choice=choice)
    assert request.tools == ()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("tool_choice", "sometimes", InvalidChat),
        ("tool_choice", "{", InvalidChat),
        ("response_format", "text", InvalidChat),
        ("reasoning_effort", "extreme", InvalidChat),
        ("reasoning_effort", "High", InvalidChat),
    ],
)
def test_a_bad_choice_is_refused_by_name(field: str, value: Any, kind: type[InvalidChat]) -> None:
    with pytest.raises(InvalidChat) as refused:
        parse_chat(messages=json.dumps([USER]), **{field: value})
    assert type(refused.value) is kind
    assert field in str(refused.value)


def test_a_plain_text_is_one_users_message() -> None:
    request = parse_chat(messages=user_message('Say "<|end|>" ü'))
    assert request.messages == ({"role": "user", "content": 'Say "<|end|>" ü'},)
    with pytest.raises(InvalidChat, match="text_input is empty"):
        user_message("")
    with pytest.raises(InvalidChat, match="text_input holds half a character"):
        user_message("Hi\udcff")


def test_checking_is_linear() -> None:
    """Four megabytes of whatever costs the most are checked within seconds, not minutes."""
    calls = [{**CALL, "id": str(number)} for number in range(20_000)]
    results = [{**RESULT, "tool_call_id": call["id"]} for call in calls]
    start = time.process_time()
    parse_messages(json.dumps([{**CALLING, "tool_calls": calls}, *results]))
    parse_messages(json.dumps([{**USER, "content": [{"type": "text", "text": "a"}] * 110_000}]))
    with pytest.raises(InvalidChat, match="unknown field"):
        parse_messages(json.dumps([{**USER, "z" * 4_000_000: 1}]))
    assert time.process_time() - start < 5.0


def test_stop_words_have_limits() -> None:
    assert check_stop_words(["END", "ü"]) == ("END", "ü")
    for bad, words in [
        (["x"] * (MAX_STOP_WORDS + 1), f"at most {MAX_STOP_WORDS} texts, got {MAX_STOP_WORDS + 1}"),
        (["a", ""], r"stop_words\[1\] must have 1 to 256 characters, got 0"),
        (["a" * 257], r"stop_words\[0\] must have 1 to 256 characters, got 257"),
        (["\udcff"], r"stop_words\[0\] holds half a character"),
    ]:
        with pytest.raises(InvalidChat, match=words):
            check_stop_words(bad)
