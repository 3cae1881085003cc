"""A grammar for a whole answer in Harmony: what the engine holds a model to, from the first token.

Reasoning is free, and so are preambles where a call follows; headers are what the format has; the
final message is the given text, or a call's arguments are its schema's, and then comes the token
that ends the answer. The engine knows nothing of it: it gets `{"type", "value"}`, a grammar over
tokens in which control tokens stand by their ids. Nothing that the prompt says switches it on or
off.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gptoss_harmony.builtin_tools import function_names
from gptoss_harmony.structured import check_length, schema_grammar
from gptoss_harmony.types import ChatRequest, InvalidChat, TextFormat
from gptoss_harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    FIRST_CONTROL,
    MESSAGE,
    RETURN,
    START,
    Vocabulary,
)

Guide = dict[str, str]

# By token, not by character: of reasoning nothing is asked, not even whole characters.
_COMMON = f"""
think: analysis next
quiet: (analysis | preamble) next
next: <[{START}]> "assistant"
analysis: <[{CHANNEL}]> "analysis" <[{MESSAGE}]> free <[{END}]>
preamble: <[{CHANNEL}]> "commentary" <[{MESSAGE}]> free <[{END}]>
free: <[0-{FIRST_CONTROL - 1}]>*
typed: " "? <[{CONSTRAIN}]> "json"
coded: " "? <[{CONSTRAIN}]>? ("code" | "json")
end: <[{RETURN},{END_OF_TEXT}]>
"""
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


def chat_guide(request: ChatRequest) -> Guide | None:
    """None where the answer may be anything."""
    builtins = function_names(request.builtin_tools)
    is_strict = any(tool["function"].get("strict") for tool in request.tools)
    must_call, text_format = request.tool_use == "required", request.text_format
    if request.tools or builtins:
        is_needed = must_call or is_strict or text_format or not request.parallel_calls
        if not is_needed:
            return None
        final, bodies = _final(text_format)
        calls, schemas = _calls(request, builtins)
        if must_call:
            start = "quiet* calls"
        elif text_format:  # A preamble is content, and the text would not be the format's.
            start = "think* final | quiet* calls"
        else:
            start = "quiet* (final | calls)"
        return _composed("tools", start, [final, *calls], bodies | schemas)
    # A model that has called before may do so again, also where nobody offers it anything.
    has_called = any(message.get("tool_calls") for message in request.messages)
    if text_format is None and not (request.tool_use == "none" and has_called):
        return None
    final, bodies = _final(text_format)
    return _composed("response_format", "think* final", [final], bodies)


def raw_guide(opening: Sequence[int], vocabulary: Vocabulary, text_format: TextFormat) -> Guide:
    """Of what follows a prompt that its author wrote. opening: the header that it leaves off in."""
    final, bodies = _final(text_format)
    in_analysis, in_final = (
        f"<|start|>assistant<|channel|>{channel}<|message|>" for channel in ("analysis", "final")
    )
    starts = {
        "": "next think* final",
        "<|start|>assistant": "think* final",
        in_analysis: f"free <[{END}]> next think* final",
        # Also where there is no message at all, and the answer goes on with the text.
        "<|start|><|channel|>final<|message|>": "body end",
        in_final: "body end",
    }
    start = starts.get(vocabulary.decode(opening))
    if start is None:
        raise InvalidChat(
            "guided_decoding_guide needs a raw prompt that ends with <|start|>assistant, or inside "
            "a message of the assistant's in analysis or final"
        )
    return _composed("guided_decoding_guide", start, [final], bodies)


def text_guide(text_format: TextFormat) -> Guide:
    """Of an answer that is nothing but its text."""
    final, bodies = _final(text_format)
    return _composed("guided_decoding_guide", "body end", [final], bodies)


def _composed(
    path: str, start: str, rules: Sequence[str], bodies: Mapping[str, Mapping[str, Any]]
) -> Guide:
    lark = "\n".join([f"start: {start}", *rules]) + _COMMON
    grammars = [{"name": "answer", "lark_grammar": lark}]
    grammars += [{"name": name, **body} for name, body in bodies.items()]
    value = json.dumps(grammars)
    check_length(path, value)
    return {"type": "grammars", "value": value}


def _final(text_format: TextFormat | None) -> tuple[str, dict[str, dict[str, Any]]]:
    """The final message's rule, and the grammar of its text."""
    final = f'final: <[{CHANNEL}]> "final" typed? <[{MESSAGE}]> body end\nbody: '
    if text_format is None:
        return f"{final}free", {}
    if text_format.kind == "json_schema":
        return f"{final}@text", {"text": schema_grammar(text_format.schema)}
    return f"{final}@text", {"text": {"lark_grammar": text_format.text}}


def _calls(
    request: ChatRequest, builtins: Sequence[str]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Rules of the calls that may come, and their arguments' grammars."""
    rules: list[str] = []
    schemas: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    for number, tool in enumerate(request.tools):
        function = tool["function"]
        if request.only_tool not in (None, function["name"]):
            continue
        is_strict = bool(function.get("strict"))
        arguments = "free"
        if is_strict or request.tool_use == "required":
            schema = function.get("parameters", _NO_ARGUMENTS)
            arguments = f"@arguments_{number}"
            schemas[f"arguments_{number}"] = schema_grammar(schema, is_strict=is_strict)
        header = _addressed("commentary", f"functions.{function['name']}")
        rules.append(f"call_{number}: {header} typed? <[{MESSAGE}]> {arguments}")
        names.append(f"call_{number}")
    if request.only_tool is None:
        for number, name in enumerate(builtins):
            header = _addressed("analysis", name)
            rules.append(f"builtin_{number}: {header} coded? <[{MESSAGE}]> free")
            names.append(f"builtin_{number}")
    more = f"(<[{END}]> next quiet* call)* " if request.parallel_calls else ""
    rules += [f"calls: call {more}<[{CALL}]>", f"call: {' | '.join(names)}"]
    return rules, schemas


def _addressed(channel: str, recipient: str) -> str:
    """A header's beginning: the recipient stands in the role or in the channel."""
    role, slot = json.dumps(f" to={recipient}"), json.dumps(f"{channel} to={recipient}")
    return f'({role} <[{CHANNEL}]> "{channel}" | <[{CHANNEL}]> {slot})'
