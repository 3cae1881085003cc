"""What an answer must be: OpenAI's response_format and tool_choice, TensorRT-LLM's guides, checked.

Whatever llguidance cannot hold an answer to is refused here, by the field's name and in the
library's words. The engine compiles it once more, with the header and all around it.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from gptoss_grammars import MAX_GUIDE_LENGTH, RefusedGrammar, bounded, one_line
from gptoss_harmony.types import (
    InvalidChat,
    TextFormat,
    ToolUse,
    UnsupportedChat,
    check_text,
    shown,
)

GUIDED = ("guided_decoding_guide_type", "guided_decoding_guide")
"""TensorRT-LLM's fields."""
GUIDE_TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "ebnf", "lark")
# Of one place, a space or a new line and its indentation: an answer of nothing but white space
# would be JSON that is not done yet, for ever.
_WHITESPACE = r" |\r?\n[ \t]{0,64}"
# Of a schema whose parts may have to hold at once: to find out whether a text can match all of
# them takes llguidance 10 ms with 8 patterns, 10 s with 14, and its limits do not end it.
_MOST_JOINED_PATTERNS = 8
_JOINING = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
_NAMING = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_SAYS_NOTHING = frozenset(
    ("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description")
) | {"examples", "readOnly", "title", "writeOnly"}
# The worst of MAX_GUIDE_LENGTH that a model could be held to took half a second.
_CHECK_SECONDS = 5.0


def tool_choice(
    value: object, function_names: Collection[str], *, has_tools: bool
) -> tuple[ToolUse, str | None]:
    """Whether tools are called, and which one alone. value: parsed JSON, or a plain word."""
    if isinstance(value, dict):
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if value.get("type") != "function" or not isinstance(name, str):
            raise InvalidChat(
                'tool_choice must be {"type": "function", "function": {"name": …}} where it is an '
                f"object, got {shown(value)}"
            )
        if name not in function_names:
            raise InvalidChat(f"tool_choice must name one of the tools, got {shown(name)}")
        return "required", name
    if value not in ("auto", "none", "required"):
        raise InvalidChat(
            f"tool_choice must be auto, none, required or an object, got {shown(value)}"
        )
    if value == "required" and not has_tools:
        raise InvalidChat("tool_choice required needs tools, got none")
    return value, None  # pyright: ignore[reportReturnType]


def response_format(value: object) -> TextFormat | None:
    """OpenAI's, parsed; None for text."""
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return TextFormat("json_schema", schema={"type": "object"})
        case "json_schema":
            assert isinstance(value, dict)
            return _json_schema(value.get("json_schema"))
    raise InvalidChat(
        "response_format.type must be text, json_object or json_schema, got "
        f"{shown(kind if isinstance(value, dict) else value)}"
    )


def _json_schema(value: object) -> TextFormat:
    path = "response_format.json_schema"
    if not isinstance(value, dict):
        raise InvalidChat(f"{path} must be an object with name and schema, got {shown(value)}")
    for key in value:
        if key not in ("name", "description", "schema", "strict"):
            raise InvalidChat(
                f"unknown field {shown(key)} in {path}; known: name, description, schema, strict"
            )
    name, description, schema = (value.get(key) for key in ("name", "description", "schema"))
    if not isinstance(name, str) or not name or len(name) > 64 or not name.isprintable():
        raise InvalidChat(f"{path}.name must be a name of 1 to 64 characters, got {shown(name)}")
    if description is not None:
        check_text(f"{path}.description", description)
    if not isinstance(schema, dict):
        raise InvalidChat(f"{path}.schema must be a JSON schema (an object), got {shown(schema)}")
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidChat(f"{path}.strict must be true or false, got {shown(value['strict'])}")
    check_text(f"{path}.schema", json.dumps(schema, ensure_ascii=False))
    check_schema(f"{path}.schema", schema)
    return TextFormat("json_schema", schema=schema, name=name, description=description or "")


def guided_decoding(guide_type: str | None, guide: str | None) -> TextFormat | None:
    """TensorRT-LLM's pair of fields; None where neither is given."""
    if not guide_type:
        if guide:
            raise InvalidChat("guided_decoding_guide needs guided_decoding_guide_type, got none")
        return None
    path = "guided_decoding_guide"
    if guide_type not in GUIDE_TYPES:
        raise InvalidChat(
            f"guided_decoding_guide_type must be one of {', '.join(GUIDE_TYPES)}, "
            f"got {shown(guide_type)}"
        )
    if guide_type == "json":
        if guide:
            raise InvalidChat(f"{path} is not taken with type json, got {shown(guide)}")
        return TextFormat("json_schema", schema={"type": ["object", "array"]})
    if not guide:
        raise InvalidChat(f"{path} must be given with guided_decoding_guide_type {guide_type}")
    match guide_type:
        case "json_schema":
            try:
                schema = json.loads(guide)
            except (ValueError, RecursionError) as error:
                raise InvalidChat(f"{path} must be JSON: {error}") from None
            if not isinstance(schema, dict):
                raise InvalidChat(f"{path} must be a JSON schema (an object), got {shown(schema)}")
            check_text(path, json.dumps(schema, ensure_ascii=False))
            check_schema(path, schema)
            return TextFormat("json_schema", schema=schema)
        case "regex":
            lark = f"start: /{regex_to_lark(guide)}/"
        case "lark":
            lark = guide
        case _:
            lark = _from_ebnf(path, guide)
    check_grammar(path, {"lark_grammar": lark})
    return TextFormat("lark", text=lark)


def _from_ebnf(path: str, text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # noqa: BLE001  the library's reader raises many kinds
        raise InvalidChat(f"{path} is no grammar (root ::= …): {one_line(str(error))}") from None


def check_schema(path: str, schema: Mapping[str, Any], *, is_strict: bool = True) -> None:
    """Raises InvalidChat where answers cannot be held to the schema."""
    patterns: set[str] = set()
    if _joins(schema, patterns) and len(patterns) > _MOST_JOINED_PATTERNS:
        raise InvalidChat(
            f"{path} must have at most {_MOST_JOINED_PATTERNS} patterns where allOf, or anyOf and "
            f"$ref beside other keys, join parts of it, got {len(patterns)}"
        )
    check_grammar(path, schema_grammar(schema, is_strict=is_strict))


def _joins(schema: object, patterns: set[str]) -> bool:
    """Whether parts of a schema may have to hold at once; adds its patterns to `patterns`."""
    is_joined = False
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            for key, value in part.items():
                is_named = key in _NAMING and isinstance(value, dict)
                waiting += value.values() if is_named else [value]
            joining = part.keys() & _JOINING
            said = part.keys() - _SAYS_NOTHING
            all_of = part.get("allOf")
            is_several = isinstance(all_of, list) and len(all_of) > 1
            is_joined |= bool(joining) and (len(said) > 1 or is_several)
            if isinstance(pattern := part.get("pattern"), str):
                patterns.add(pattern)
    return is_joined


def check_grammar(path: str, grammar: Mapping[str, Any]) -> None:
    """The same of one of a guide's grammars."""
    text = json.dumps({"grammars": [grammar]})
    check_length(path, text)
    try:
        is_error, words = bounded(
            lambda: LLMatcher.validate_grammar_with_warnings(text), _CHECK_SECONDS
        )
    except RefusedGrammar as error:
        raise InvalidChat(f"{path} cannot be followed: {error}") from None
    if is_error:
        raise InvalidChat(f"{path} cannot be followed: {one_line(words[0])}")


def check_length(path: str, text: str) -> None:
    """The engine's limit, by the name of the field."""
    if len(text) > MAX_GUIDE_LENGTH:
        raise InvalidChat(
            f"{path} must have at most {MAX_GUIDE_LENGTH} characters as a grammar, got {len(text)}"
        )


def schema_grammar(schema: Mapping[str, Any], *, is_strict: bool = True) -> dict[str, Any]:
    """As llguidance takes it. is_strict: what it does not know is refused, and not left out."""
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if not is_strict:
        options["lenient"] = True
    return {"json_schema": {**schema, "x-guidance": options}}


def refuse_both(one: TextFormat | None, other: TextFormat | None) -> TextFormat | None:
    """Whichever is given."""
    if one is not None and other is not None:
        raise UnsupportedChat("response_format and guided_decoding_guide cannot be given together")
    return one or other
