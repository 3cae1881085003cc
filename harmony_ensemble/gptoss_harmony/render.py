"""A checked chat to Harmony tokens, and raw Harmony text to tokens.

Where openai-harmony defines a rendering, this is it byte for byte. Text and control tokens never
meet in one string: whatever a user writes is encoded as ordinary tokens.

History is rendered so that a chat's tokens are a prefix of the next turn's:
- the first message, if system or developer, becomes the instructions; later ones stay in place;
- reasoning of a turn that is over (a final answer or a user message follows) is dropped, that of
  a turn still calling tools is kept;
- a finished message ends with <|end|>, a tool call with <|call|>.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openai_harmony import ToolNamespaceConfig

from gptoss_harmony.builtin_tools import CODE_TOOL, code_of
from gptoss_harmony.tools import render_namespace, render_tools
from gptoss_harmony.types import ChatRequest, Prompt, TextFormat, check_text
from gptoss_harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    STOP_TOKEN_IDS,
    Vocabulary,
)

_INSTRUCTING = ("system", "developer")


def render_chat(
    vocabulary: Vocabulary, request: ChatRequest, today: datetime.date | None = None
) -> Prompt:
    """The prompt of the next assistant turn. today: the date that the model is told."""
    rendering = _Rendering(vocabulary)
    rendering.add("system", system_text(request, today or datetime.date.today()))
    messages = list(request.messages)
    author, sections = "developer", []
    if messages and messages[0]["role"] in _INSTRUCTING:
        first = messages.pop(0)
        author = _author(first)
        sections += [_instructions(first["content"])] if first["content"] else []
    if request.tools:
        sections.append(render_tools(request.tools))
    if request.text_format is not None and request.text_format.name:
        sections.append(_response_format(request.text_format))
    if sections:
        rendering.add(author, "\n\n".join(sections))
    _add_history(rendering, messages)
    rendering.open("assistant")
    return Prompt(tuple(rendering.token_ids), STOP_TOKEN_IDS)


def render_raw(vocabulary: Vocabulary, text: str) -> Prompt:
    """A prompt that its author wrote in Harmony: text that spells a control token becomes it."""
    return Prompt(tuple(vocabulary.encode_raw(check_text("text_input", text))), STOP_TOKEN_IDS)


def system_text(request: ChatRequest, today: datetime.date) -> str:
    """The system message's text. Commentary is a channel only for those who have tools."""
    has_tools = bool(request.tools or request.builtin_tools)
    channels = "analysis, commentary, final" if has_tools else "analysis, final"
    lines = [
        "You are ChatGPT, a large language model trained by OpenAI.",
        "Knowledge cutoff: 2024-06",
        f"Current date: {today.isoformat()}",
        "",
        f"Reasoning: {request.reasoning_effort}",
        "",
        *((_render_builtin_tools(request.builtin_tools), "") if request.builtin_tools else ()),
        f"# Valid channels: {channels}. Channel must be included for every message.",
    ]
    if request.tools:
        lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
    return "\n".join(lines)


def _instructions(text: str) -> str:
    return f"# Instructions\n\n{text}"


def _response_format(text_format: TextFormat) -> str:
    """So that the model knows what it is held to. Each line of the description is a comment."""
    lines = [f"// {line}" for line in text_format.description.splitlines()]
    schema = json.dumps(text_format.schema, ensure_ascii=False)
    return "\n".join(["# Response Formats", "", f"## {text_format.name}", "", *lines, schema])


class _Rendering:
    """Harmony messages, appended one after another."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_ids: list[int] = []
        self._encode = vocabulary.encode

    def open(self, author: str) -> None:
        self.token_ids += (START, *self._encode(author))

    def add(self, author: str, text: str, channel: str | None = None, *, end: int = END) -> None:
        self.open(author)
        if channel is not None:
            self.token_ids += (CHANNEL, *self._encode(channel))
        self._add_text(text, end)

    def add_call(self, author: str, function: Mapping[str, Any], *, is_builtin: bool) -> None:
        name, arguments = function["name"], function["arguments"]
        if is_builtin:
            # As the model was trained: in its reasoning, and "code" whatever the text is.
            text = code_of(arguments) if name == CODE_TOOL else arguments
            self.add(f"{author} to={name}", text, "analysis code", end=CALL)
            return
        self.open(f"{author} to=functions.{name}")
        self.token_ids += (CHANNEL, *self._encode("commentary"))
        self.token_ids += (*self._encode(" "), CONSTRAIN, *self._encode("json"))
        self._add_text(arguments, CALL)

    def _add_text(self, text: str, end: int) -> None:
        self.token_ids.append(MESSAGE)
        self.token_ids += self._encode(text)
        self.token_ids.append(end)


def _add_history(rendering: _Rendering, messages: Sequence[Mapping[str, Any]]) -> None:
    first_open = _first_message_of_open_turn(messages)
    authors: dict[str, tuple[str, str]] = {}  # of a call's result, and its channel, by id
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        match role:
            case "system" | "developer":
                if content:
                    rendering.add(_author(message), _instructions(content))
            case "user":
                rendering.add(_author(message), content)
            case "tool":
                author, channel = authors[message["tool_call_id"]]
                rendering.add(f"{author} to=assistant", content, channel)
            case "assistant":
                reasoning = message.get("reasoning_content")
                if reasoning and position >= first_open:
                    rendering.add(_author(message), reasoning, "analysis")
                calls = message.get("tool_calls", ())
                if content:
                    rendering.add(_author(message), content, "commentary" if calls else "final")
                for call in calls:
                    function, is_builtin = call["function"], call["type"] == "builtin"
                    name = function["name"]
                    authors[call["id"]] = (
                        (name, "analysis") if is_builtin else (f"functions.{name}", "commentary")
                    )
                    rendering.add_call(_author(message), function, is_builtin=is_builtin)


def _author(message: Mapping[str, Any]) -> str:
    # A system message is the user's, too: Harmony's own comes from us alone.
    role = "developer" if message["role"] == "system" else message["role"]
    name = message.get("name")
    return f"{role}:{name}" if name else role


def _first_message_of_open_turn(messages: Sequence[Mapping[str, Any]]) -> int:
    """Everything before it belongs to turns that are over."""
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        is_final = message["role"] == "assistant" and not message.get("tool_calls")
        if message["role"] == "user" or (is_final and message["content"]):
            return position + 1
    return 0


@functools.cache
def _render_builtin_tools(tools: tuple[str, ...]) -> str:
    """The system message's section on tools, byte for byte openai-harmony's."""
    sections = ["# Tools"]
    for tool in sorted(tools):
        config = getattr(ToolNamespaceConfig, tool)()
        functions = [function.model_dump(exclude_none=True) for function in config.tools]
        if functions:
            sections.append(render_namespace(tool, functions, config.description or ""))
        else:
            sections.append(f"## {tool}\n\n{config.description}")
    return "\n\n".join(sections)
