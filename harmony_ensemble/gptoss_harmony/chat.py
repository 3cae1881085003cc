"""OpenAI's chat JSON, checked and brought into one shape: the only door for users' messages.

Every refusal is a sentence with the field's path, the value and what would be right. What comes
out (`ChatRequest.messages`) is normalised, so that rendering needs no checks:

- content is a string (null, absent and lists of text parts are resolved);
- earlier reasoning stands in `reasoning_content`;
- `tool_calls` is absent or not empty, each call with an id, a name, arguments as a string, and the
  type "function", or "builtin" for one of gpt-oss's own tools;
- a tool message's `tool_call_id` names an earlier call, and results stand in their calls' order.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from gptoss_harmony import structured
from gptoss_harmony.builtin_tools import CODE_TOOL, FUNCTIONS, function_names
from gptoss_harmony.tools import check_schema
from gptoss_harmony.types import (
    ChatRequest,
    InvalidChat,
    ReasoningEffort,
    ToolUse,
    UnsupportedChat,
    check_text,
    nearest,
    shown,
)

MAX_STOP_WORDS = 16
MAX_STOP_WORD_LENGTH = 256

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EFFORTS = get_args(ReasoningEffort)
_TEXT = '{"type": "text"}'

# Fields that clients echo from our own replies, with the values that mean nothing.
_ECHOED = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
_FIELDS = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": (
        *("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"),
        *_ECHOED,
    ),
    "tool": ("role", "content", "name", "tool_call_id"),
}


def parse_chat(
    *,
    messages: str,
    tools: str | None = None,
    tool_choice: str | None = None,
    reasoning_effort: str | None = None,
    response_format: str | None = None,
    parallel_tool_calls: bool | None = None,
    guided_decoding_guide_type: str | None = None,
    guided_decoding_guide: str | None = None,
) -> ChatRequest:
    """One chat from its JSON texts, by OpenAI's field names; None or "" means not given.

    Raises `InvalidChat`, or `UnsupportedChat` for what OpenAI has and this build has not.
    """
    checked_tools = parse_tools(tools) if tools else Tools()
    tool_use, only_tool = _tool_choice(tool_choice, checked_tools)
    offered = Tools() if tool_use == "none" else checked_tools
    if tool_use == "required":
        _check_arguments(offered, only_tool)
    text_format = structured.response_format(_json("response_format", response_format or _TEXT))
    guided = structured.guided_decoding(guided_decoding_guide_type, guided_decoding_guide)
    return ChatRequest(
        # Calls that were made are what they were, whether more are wanted or not.
        messages=parse_messages(messages, checked_tools.builtins),
        tools=offered.functions,
        builtin_tools=offered.builtins,
        reasoning_effort=_effort(reasoning_effort),
        tool_use=tool_use,
        only_tool=only_tool,
        parallel_calls=parallel_tool_calls is not False,
        text_format=structured.refuse_both(text_format, guided),
    )


def parse_text(text: str, **inputs: Any) -> ChatRequest:
    """The same from the text of one user message."""
    return parse_chat(messages=user_message(text), **inputs)


def user_message(text: str) -> str:
    """A plain text as the JSON of a chat with one user message."""
    if not check_text("text_input", text):
        raise InvalidChat("text_input is empty")
    return json.dumps([{"role": "user", "content": text}])


def check_stop_words(words: Sequence[str]) -> tuple[str, ...]:
    """Stop strings within their limits."""
    if len(words) > MAX_STOP_WORDS:
        raise InvalidChat(f"stop_words must be at most {MAX_STOP_WORDS} texts, got {len(words)}")
    for number, word in enumerate(words):
        path = f"stop_words[{number}]"
        if not 1 <= len(check_text(path, word)) <= MAX_STOP_WORD_LENGTH:
            raise InvalidChat(
                f"{path} must have 1 to {MAX_STOP_WORD_LENGTH} characters, got {len(word)}"
            )
    return tuple(words)


def tool_names(request: ChatRequest) -> tuple[str, ...]:
    """The functions that the model may call."""
    return tuple(tool["function"]["name"] for tool in request.tools)


def _json(path: str, text: str) -> Any:
    if not text.strip():
        raise InvalidChat(f"{path} is empty; it must be JSON")
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise InvalidChat(
            f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:
        raise InvalidChat(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidChat(f"{path} is nested too deeply") from None


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown(text)} is larger than any number")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _object(path: str, value: object, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidChat(f"{path} must be an object, got {shown(value)}")
    for field in value:
        if field not in fields:
            hint = nearest(field, fields) or f"; known: {', '.join(fields)}"
            raise InvalidChat(f"{path} has an unknown field {shown(field)}{hint}")
    return value


def parse_messages(text: str, builtin_tools: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
    """A JSON array of chat messages, checked and normalised.

    builtin_tools: those that the chat offers. A call to `python` is to that one if it is among
    them; the browser's names can mean nothing else.
    """
    messages = _json("messages", text)
    if not isinstance(messages, list) or not messages:
        raise InvalidChat(f"messages must be a list of at least one message, got {shown(messages)}")
    builtin_names = frozenset(function_names(("browser", *builtin_tools)))
    called: dict[str, str] = {}  # the function's name by the call's id
    checked: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        checked.append(_message(f"messages[{number}]", message, called, builtin_names))
        for call in checked[-1].get("tool_calls", ()):
            called[call["id"]] = call["function"]["name"]
    return tuple(_results_in_call_order(checked))


def _results_in_call_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """In Harmony a result has no id: its place alone says which call it answers."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}  # of the last calls, by id
    results: list[dict[str, Any]] = []
    for message in (*messages, None):
        if message is not None and message["role"] == "tool":
            results.append(message)
            continue
        # Answers to older calls keep their place, before these.
        ordered += sorted(results, key=lambda each: places.get(each["tool_call_id"], -1))
        results.clear()
        if message is not None:
            ordered.append(message)
            if calls := message.get("tool_calls"):
                places = {call["id"]: place for place, call in enumerate(calls)}
    return ordered


def _message(
    path: str, message: object, called: Mapping[str, str], builtin_names: Collection[str]
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidChat(f"{path} must be an object, got {shown(message)}")
    role = message.get("role")
    if role == "function":
        raise UnsupportedChat(f"{path}.role 'function' is not supported; use 'tool'")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidChat(f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(role)}")
    fields = _object(path, message, _FIELDS[role])
    checked: dict[str, Any] = {"role": role}
    if fields.get("name") is not None:
        known = builtin_names if role == "tool" else ()
        checked["name"] = _name(f"{path}.name", fields["name"], known)
    if role == "assistant":
        return checked | _assistant_fields(path, fields, builtin_names)
    checked["content"] = _content(f"{path}.content", fields.get("content"))
    if role == "tool":
        call_id = check_text(f"{path}.tool_call_id", fields.get("tool_call_id"))
        if call_id not in called:
            raise InvalidChat(
                f"{path}.tool_call_id must be the id of an earlier tool call, got {shown(call_id)}"
            )
        if checked.get("name", called[call_id]) != called[call_id]:
            raise InvalidChat(
                f"{path}.name must be {called[call_id]!r}, as in the call, got "
                f"{shown(checked['name'])}; it may be left out"
            )
        checked["tool_call_id"] = call_id
    return checked


def _assistant_fields(
    path: str, fields: Mapping[str, Any], builtin_names: Collection[str]
) -> dict[str, Any]:
    for field, neutral in _ECHOED.items():
        if fields.get(field) not in (None, neutral):
            raise UnsupportedChat(f"{path}.{field} is not supported; leave it out")
    content = fields.get("content")
    checked: dict[str, Any] = {
        "content": "" if content is None else _content(f"{path}.content", content)
    }
    reasoning = [
        check_text(f"{path}.{field}", fields[field])
        for field in ("reasoning_content", "reasoning")
        if fields.get(field) is not None
    ]
    if len(set(reasoning)) > 1:
        raise InvalidChat(f"{path}.reasoning and {path}.reasoning_content differ; give one")
    if reasoning and reasoning[0]:
        checked["reasoning_content"] = reasoning[0]
    calls = fields.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise InvalidChat(f"{path}.tool_calls must be a list, got {shown(calls)}")
    if calls:
        checked["tool_calls"] = _tool_calls(f"{path}.tool_calls", calls, builtin_names)
    return checked


def _tool_calls(
    path: str, calls: Sequence[object], builtin_names: Collection[str]
) -> list[dict[str, Any]]:
    checked: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    for number, call in enumerate(calls):
        where = f"{path}[{number}]"
        fields = _object(where, call, ("id", "type", "function", "index", "after"))
        call_id = check_text(f"{where}.id", fields.get("id"))
        if not call_id:
            raise InvalidChat(f"{where}.id is empty")
        if call_id in call_ids:
            raise InvalidChat(f"{where}.id {shown(call_id)} is given twice in one message")
        call_ids.add(call_id)
        if fields.get("type", "function") != "function":
            raise UnsupportedChat(f"{where}.type must be 'function', got {shown(fields['type'])}")
        function = _object(f"{where}.function", fields.get("function"), ("name", "arguments"))
        name = _name(f"{where}.function.name", function.get("name"), builtin_names)
        checked.append(
            {
                "id": call_id,
                "type": "builtin" if name in builtin_names else "function",
                "function": {
                    "name": name,
                    "arguments": _arguments(f"{where}.function.arguments", function),
                },
            }
        )
    return checked


def _arguments(path: str, function: Mapping[str, Any]) -> str:
    """A string as it is, an object as compact JSON, nothing as {}."""
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return check_text(path, json.dumps(arguments, ensure_ascii=False))
    if arguments is None:
        return "{}"
    if not isinstance(arguments, str):
        raise InvalidChat(f"{path} must be a string of JSON, got {shown(arguments)}")
    return check_text(path, arguments) or "{}"


def _content(path: str, content: object) -> str:
    if isinstance(content, str):
        return check_text(path, content)
    if not isinstance(content, list):
        raise InvalidChat(f"{path} must be a string or a list of text parts, got {shown(content)}")
    texts: list[str] = []
    for number, part in enumerate(content):
        where = f"{path}[{number}]"
        if not isinstance(part, dict):
            raise InvalidChat(f"{where} must be an object, got {shown(part)}")
        if part.get("type") != "text":
            raise UnsupportedChat(
                f"{where}.type must be 'text', got {shown(part.get('type'))}; the model reads "
                "text alone"
            )
        fields = _object(where, part, ("type", "text"))
        texts.append(check_text(f"{where}.text", fields.get("text")))
    return "".join(texts)


def _name(path: str, name: object, builtin_names: Collection[str] = ()) -> str:
    if not isinstance(name, str) or not (name in builtin_names or _NAME.fullmatch(name)):
        raise InvalidChat(
            f"{path} must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -, got {shown(name)}"
        )
    return name


class Tools(NamedTuple):
    """functions: {"type": "function", "function": {name, …}}. builtins: gpt-oss's own, by name."""

    functions: tuple[dict[str, Any], ...] = ()
    builtins: tuple[str, ...] = ()


def parse_tools(text: str) -> Tools:
    """A JSON array of tools, checked."""
    tools = _json("tools", text)
    if not isinstance(tools, list):
        raise InvalidChat(f"tools must be a list, got {shown(tools)}")
    checked: list[dict[str, Any]] = []
    builtins: list[str] = []
    names: set[str] = set()
    size = 0
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if isinstance(kind, str) and kind in FUNCTIONS:
            _object(path, tool, ("type",))
            if kind in builtins:
                raise InvalidChat(f"{path}.type {shown(kind)} is given twice")
            builtins.append(kind)
            continue
        if kind != "function":
            known = ", ".join(("function", *FUNCTIONS))
            raise UnsupportedChat(f"{path}.type must be one of {known}, got {shown(kind)}")
        fields = _object(path, tool, ("type", "function"))
        function = _function(f"{path}.function", fields.get("function"))
        parameters = f"{path}.function.parameters"
        size = check_schema(parameters, function.get("parameters", {}), size)
        if function["name"] in names:
            raise InvalidChat(f"{path}.function.name {shown(function['name'])} is given twice")
        names.add(function["name"])
        checked.append({"type": "function", "function": function})
    if CODE_TOOL in builtins and CODE_TOOL in names:
        raise InvalidChat(
            f"tools have a function {CODE_TOOL!r} beside the tool of that name; rename the function"
        )
    return Tools(tuple(checked), tuple(builtins))


def _function(path: str, function: object) -> dict[str, Any]:
    fields = _object(path, function, ("name", "description", "parameters", "strict"))
    checked: dict[str, Any] = {"name": _name(f"{path}.name", fields.get("name"))}
    if fields.get("description") is not None:
        checked["description"] = check_text(f"{path}.description", fields["description"])
    if not isinstance(fields.get("strict"), bool | None):
        raise InvalidChat(f"{path}.strict must be true or false, got {shown(fields['strict'])}")
    parameters = fields.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise InvalidChat(
                f"{path}.parameters must be a JSON schema (an object), got {shown(parameters)}"
            )
        check_text(f"{path}.parameters", json.dumps(parameters, ensure_ascii=False))
        checked["parameters"] = parameters
    if fields.get("strict"):
        checked["strict"] = True
        structured.check_schema(f"{path}.parameters", parameters or {})
    return checked


def _tool_choice(choice: str | None, tools: Tools) -> tuple[ToolUse, str | None]:
    value: object = choice or "auto"
    if isinstance(value, str) and value.lstrip().startswith(("{", '"')):
        value = _json("tool_choice", value)
    names = [tool["function"]["name"] for tool in tools.functions]
    return structured.tool_choice(value, names, has_tools=bool(names or tools.builtins))


def _check_arguments(tools: Tools, only_tool: str | None) -> None:
    """Of those that may be called where one must be: what the grammar cannot hold is left out."""
    for number, tool in enumerate(tools.functions):
        function = tool["function"]
        if only_tool in (None, function["name"]) and not function.get("strict"):
            path = f"tools[{number}].function.parameters"
            structured.check_schema(path, function.get("parameters", {}), is_strict=False)


def _effort(effort: str | None) -> ReasoningEffort:
    if not effort:
        return "medium"
    for known in _EFFORTS:
        if effort == known:
            return known
    raise InvalidChat(f"reasoning_effort must be one of {', '.join(_EFFORTS)}, got {shown(effort)}")
