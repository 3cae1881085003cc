"""gpt-oss's own tools: described as openai-harmony does, called and answered as it renders it."""

import datetime
import json
from typing import Any

import pytest
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    Role,
    SystemContent,
    ToolDescription,
)

from gptoss_harmony.builtin_tools import FUNCTIONS, code_of, function_names
from gptoss_harmony.chat import parse_chat
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.render import render_chat
from gptoss_harmony.types import ChatRequest, InvalidChat, UnsupportedChat
from gptoss_harmony.vocabulary import Vocabulary

TODAY = datetime.date(2025, 6, 28)
BROWSER, PYTHON = {"type": "browser"}, {"type": "python"}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "Time."}}
USER = {"role": "user", "content": "Hi"}


def chat(*messages: Any, tools: list[Any], **fields: Any) -> ChatRequest:
    return parse_chat(messages=json.dumps([USER, *messages]), tools=json.dumps(tools), **fields)


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **fields}


def by_openai_harmony(loaded: Vocabulary, tools: list[Any], *history: Message) -> tuple[int, ...]:
    content = SystemContent.new().with_conversation_start_date(TODAY.isoformat())
    content = content.with_browser_tool() if BROWSER in tools else content
    content = content.with_python_tool() if PYTHON in tools else content
    messages = [Message.from_role_and_content(Role.SYSTEM, content)]
    if NOW in tools:
        functions = [ToolDescription.new(**NOW["function"])]
        developer = DeveloperContent.new().with_function_tools(functions)
        messages.append(Message.from_role_and_content(Role.DEVELOPER, developer))
    messages.append(Message.from_role_and_content(Role.USER, "Hi"))
    conversation = Conversation.from_messages([*messages, *history])
    return tuple(loaded.encoding.render_conversation_for_completion(conversation, Role.ASSISTANT))


@pytest.mark.parametrize(
    "tools", [[BROWSER], [PYTHON], [PYTHON, BROWSER], [BROWSER, NOW], [NOW, PYTHON, BROWSER]]
)
def test_the_description_is_openai_harmonys(loaded: Vocabulary, tools: list[Any]) -> None:
    assert render_chat(loaded, chat(tools=tools), TODAY).token_ids == by_openai_harmony(
        loaded, tools
    )


def test_calls_and_results_are_openai_harmonys(loaded: Vocabulary) -> None:
    request = chat(
        call("1", "browser.search", '{"query": "x"}'),
        result("1", "a page", name="browser.search"),
        call("2", "python", '{"code": "print(1)\\n"}'),
        result("2", "1"),
        tools=[BROWSER, PYTHON],
    )

    def called(recipient: str, text: str) -> Message:
        message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel("analysis")
        return message.with_recipient(recipient).with_content_type("code")

    def answered(author: str, text: str) -> Message:
        message = Message.from_author_and_content(Author.new(Role.TOOL, author), text)
        return message.with_channel("analysis").with_recipient("assistant")

    assert render_chat(loaded, request, TODAY).token_ids == by_openai_harmony(
        loaded,
        [BROWSER, PYTHON],
        called("browser.search", '{"query": "x"}'),
        answered("browser.search", "a page"),
        called("python", "print(1)\n"),
        answered("python", "1"),
    )


def test_nothing_is_offered_unasked(loaded: Vocabulary) -> None:
    """Neither in the prompt, nor in what the answer's stream takes for a call."""
    harmony = HarmonyFormat(loaded)
    for request in (
        chat(tools=[]),
        chat(tools=[NOW]),
        chat(tools=[BROWSER, PYTHON], tool_choice="none"),
    ):
        prompt = render_chat(loaded, request, TODAY)
        text = loaded.decode(prompt.token_ids)
        assert "browser" not in text
        assert "python" not in text
        assert harmony.stream_context(prompt, request)["builtin_names"] == []


def test_a_call_round_trips(loaded: Vocabulary) -> None:
    """What the model wrote, through the client's history, is what it reads again."""
    harmony = HarmonyFormat(loaded, today=TODAY)
    request = chat(tools=[BROWSER, PYTHON])
    prompt = harmony.render_chat(request)
    for name, text in (("python", 'print("\\n")  # "ü"\n'), ("browser.open", '{"id": 1}')):
        written = f" to={name}<|channel|>analysis code<|message|>{text}<|call|>"
        stream = harmony.stream(harmony.stream_context(prompt, request))
        deltas = stream.push(loaded.encode_raw(written), "stop")
        arguments = "".join(delta.text for delta in deltas if delta.channel == "tool_call")
        assert deltas[0].recipient == name
        assert json.loads(arguments)
        again = chat(call("1", name, arguments), result("1", "ok"), tools=[BROWSER, PYTHON])
        history = loaded.decode(harmony.render_chat(again).token_ids)
        assert f"<|start|>assistant{written}<|start|>{name} to=assistant" in history
        assert loaded.decode(prompt.token_ids).removesuffix("<|start|>assistant") in history


def test_a_users_function_may_be_named_python(loaded: Vocabulary) -> None:
    own = {"type": "function", "function": {"name": "python"}}
    request = chat(call("1", "python", '{"code": "1"}'), result("1", "1"), tools=[own])
    text = loaded.decode(render_chat(loaded, request, TODAY).token_ids)
    assert ' to=functions.python<|channel|>commentary <|constrain|>json<|message|>{"code"' in text
    with pytest.raises(InvalidChat, match="a function 'python' beside the tool of that name"):
        chat(tools=[own, PYTHON])


def test_calls_that_were_made_stay_what_they_were(loaded: Vocabulary) -> None:
    history = (call("1", "python", '{"code": "1+1"}'), result("1", "2"))
    text = loaded.decode(
        render_chat(loaded, chat(*history, tools=[PYTHON], tool_choice="none"), TODAY).token_ids
    )
    assert " to=python<|channel|>analysis code<|message|>1+1<|call|><|start|>python to=a" in text


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ('{"code": "a\\nb"}', "a\nb"),
        ("print(1)", "print(1)"),
        ('{"code": 1}', '{"code": 1}'),
        ('{"code": "a", "b": 1}', '{"code": "a", "b": 1}'),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_a_program_is_taken_out_of_its_json(arguments: str, code: str) -> None:
    assert code_of(arguments) == code


@pytest.mark.parametrize(
    ("tool", "kind", "words"),
    [
        ({"type": "web_search"}, UnsupportedChat, "one of function, browser, python, got"),
        ({"type": ["browser"]}, UnsupportedChat, "one of function, browser, python, got"),
        ({"type": "browser", "backend": "x"}, InvalidChat, 'unknown field "backend"'),
    ],
)
def test_other_tools_are_refused_in_words(tool: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        chat(tools=[tool])
    with pytest.raises(InvalidChat, match=r'tools\[1\].type "browser" is given twice'):
        chat(tools=[BROWSER, BROWSER])


def test_a_browsers_name_is_no_function(loaded: Vocabulary) -> None:
    with pytest.raises(InvalidChat, match="name must be 1 to 64"):
        chat(call("1", "browser.click", "{}"), tools=[BROWSER])
    with pytest.raises(InvalidChat, match=r"name must be 'browser\.open', as in the call"):
        chat(
            call("1", "browser.open", "{}"),
            result("1", "x", name="browser.find"),
            tools=[BROWSER],
        )
    assert function_names(tuple(FUNCTIONS)) == (
        *("browser.search", "browser.open", "browser.find", "python"),
    )
