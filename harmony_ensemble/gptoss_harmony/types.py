"""What flows through a chat format: `ChatRequest` -> `Prompt` -> (engine) -> `ChatDelta`.

The engine's own types are not imported: between the two stand token ids and JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

ReasoningEffort = Literal["low", "medium", "high"]
ToolUse = Literal["auto", "none", "required"]
Channel = Literal["reasoning", "content", "tool_call"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
CallOutcome = Literal["whole", "invalid", "cut", "unknown"]
"""How a tool call ended: its arguments are a JSON object, or are none, or were cut off; or nobody
offered such a function, so that it became reasoning."""


class InvalidChat(ValueError):
    """The caller's fault, found before admission: names the field, the value and the limit."""


class UnsupportedChat(InvalidChat):
    """A known field with a value that this build does not implement: named, never ignored."""


@dataclass(frozen=True, slots=True)
class TextFormat:
    """What the final message's text must be: JSON of a schema, or what a Lark grammar describes.

    name, description: of a schema that the prompt shows to the model; without a name it does not.
    """

    kind: Literal["json_schema", "lark"]
    schema: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    name: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat, as OpenAI's JSON has it once parsed and checked.

    messages: OpenAI chat messages (role, content, name, tool_calls, tool_call_id, …).
    tools: OpenAI function tools, each {"type": "function", "function": {name, …}}.
    builtin_tools: those of gpt-oss's own that are offered, by name.
    tool_use: "required" demands a call, of only_tool if that is given; "none" offers no tools.
    parallel_calls: whether there may be several calls in one answer.
    text_format: what the final message must be; None is any text.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    builtin_tools: tuple[str, ...] = ()
    reasoning_effort: ReasoningEffort = "medium"
    tool_use: ToolUse = "auto"
    only_tool: str | None = None
    parallel_calls: bool = True
    text_format: TextFormat | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine gets: the rendered chat, and the ids that end an answer."""

    token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of one answer. Joined in order, the pieces of a channel are its whole text.

    channel "tool_call": recipient is the function's name, tool_call_id its id, text a piece of
    the arguments' JSON; tool_call_index counts the calls of one answer from 0.
    finish_reason stands on the last delta alone.
    """

    channel: Channel
    text: str = ""
    recipient: str | None = None
    tool_call_id: str | None = None
    tool_call_index: int = 0
    finish_reason: FinishReason | None = None


def shown(value: object) -> str:
    """A value as JSON, cut short, for a sentence that refuses it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_text(path: str, value: object) -> str:
    """The value, if it is a string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InvalidChat(f"{path} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidChat(
            f"{path} holds half a character (a lone surrogate) at position {error.start}"
        ) from None
    return value


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for an unknown name, or nothing when no known name is near."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
