"""Function tools to the TypeScript that Harmony shows to the model, and the checks before.

Byte for byte openai-harmony's rendering wherever that says what the schema says. Where it drops a
construct (`$ref`, `anyOf`, `allOf`, `const`, enums that are not of strings, `null`, tuples, typed
keys), leaves brackets away, or lets a line break end a comment, the rendering here is complete.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gptoss_harmony.types import InvalidChat, shown

MAX_SCHEMA_DEPTH = 64
MAX_TYPES_SIZE = 4 * 2**20
"""Of all tools of a chat, in characters: by references a short schema can stand for an endless
type. A part counts for at least _PART_SIZE, and everything else that is looked at for one."""
_PART_SIZE = 40

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_PLAIN_TYPES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")  # line breaks among them
_EXPONENT = re.compile(r"e\+?(-?)0*(\d)")

Schema = Mapping[str, Any]


def render_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The developer message's section on tools."""
    functions = [tool["function"] for tool in tools]
    return f"# Tools\n\n{render_namespace('functions', functions)}"


def render_namespace(
    name: str, functions: Sequence[Mapping[str, Any]], description: str = ""
) -> str:
    """One namespace of functions, each {name, description, parameters}, under its heading."""
    comment = _comment(description, "") if description else ""
    sections = [f"## {name}", f"{comment}namespace {name} {{", *map(_declaration, functions)]
    return "\n\n".join([*sections, f"}} // namespace {name}"])


def check_schema(path: str, schema: object, size: int = 0) -> int:
    """Raises `InvalidChat` with the path of the first thing that is no JSON schema.

    size: that of the schemas before it, against MAX_TYPES_SIZE; returns it with this one's.
    """
    _check(path, schema, 0)
    if not isinstance(schema, Mapping):
        return size
    writer = _TypeWriter(schema, size)
    try:
        writer.write(schema, "")
    except _Refused as refused:
        raise InvalidChat(f"{path}{refused}") from None
    return writer.size


def _declaration(function: Mapping[str, Any]) -> str:
    description = function.get("description") or ""
    comment = _comment(description, "") if description else ""
    parameters = function.get("parameters")
    arguments = ""
    if parameters is not None:
        arguments = f"_: {_TypeWriter(parameters).write(parameters, '').text}"
    return f"{comment}type {function['name']} = ({arguments}) => any;"


class _Refused(ValueError):
    """Continues a sentence that begins with the schema's path."""


class _Type(NamedTuple):
    text: str
    is_compound: bool = False
    """A union or an intersection: in brackets where something follows."""

    def grouped(self) -> str:
        if not self.is_compound:
            return self.text
        return f"({self.text}\n)" if self.text.startswith("\n") else f"({self.text})"


class _TypeWriter:
    """One tool's parameters as a type. References are looked up in `root`."""

    def __init__(self, root: Schema, size: int = 0) -> None:
        self.size = size
        self._root = root
        self._depth = 0

    def write(self, schema: object, indent: str, within: frozenset[str] = frozenset()) -> _Type:
        """within: the references being expanded; one of them again is `any`."""
        self._check_depth(self._depth)
        self._depth += 1
        written = self._write(*self._resolve(schema, within), indent)
        self._depth -= 1
        return written

    def _write(self, schema: Schema, within: frozenset[str], indent: str) -> _Type:
        if variants := schema.get("oneOf"):
            text = "".join(
                f"\n{indent} | {self._variant(variant, indent, within)}" for variant in variants
            )
            return _Type(text, is_compound=True)
        if variants := schema.get("anyOf"):
            return self._any_of(variants, indent, within)
        if parts := schema.get("allOf"):
            return self._all_of(schema, parts, indent, within)
        if "const" in schema:
            return _Type(self._counted(_literal(schema["const"])))
        if values := schema.get("enum"):
            text = self._counted(" | ".join(map(_literal, values)))
            return _Type(text, is_compound=len(values) > 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = [self._of_kind(schema, one, indent, within).grouped() for one in kind]
            texts = list(dict.fromkeys(kinds))
            return _Type(" | ".join(texts) or "any", is_compound=len(texts) > 1)
        if kind is None:
            kind = _implied_kind(schema)
        return self._of_kind(schema, kind, indent, within)

    def _resolve(self, schema: object, within: frozenset[str]) -> tuple[Schema, frozenset[str]]:
        if not isinstance(schema, Mapping):
            schema = {}
        self._count_part(schema)
        while (reference := schema.get("$ref")) is not None:
            if reference in within:
                return {}, within
            within = within | {reference}
            self._check_depth(len(within))
            siblings = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**self._look_up(reference), **siblings}
            self._count_part(schema)
        return schema, within

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_SCHEMA_DEPTH:
            raise _Refused(
                f" is nested deeper than {MAX_SCHEMA_DEPTH} schemas, references expanded"
            )

    def _count_part(self, schema: Schema) -> None:
        lengths = (len(value) for value in schema.values() if isinstance(value, list))
        self._count(_PART_SIZE + len(schema) + sum(lengths))

    def _counted(self, text: str) -> str:
        self._count(len(text))
        return text

    def _count(self, size: int) -> None:
        self.size += size
        if self.size > MAX_TYPES_SIZE:
            raise _Refused(
                f" brings the tools' types above {MAX_TYPES_SIZE} characters, references expanded"
            )

    def _look_up(self, reference: str) -> Schema:
        target: object = self._root
        for key in reference.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        if not reference.startswith("#") or not isinstance(target, Mapping):
            raise _Refused(f" refers to {reference!r}, which it does not hold")
        return target

    def _of_kind(self, schema: Schema, kind: str, indent: str, within: frozenset[str]) -> _Type:
        if kind == "object":
            return _Type(self._object(schema, indent, within))
        if kind == "array":
            return _Type(self._array(schema, indent, within))
        return _Type(_PLAIN_TYPES.get(kind, "any"))

    def _object(self, schema: Schema, indent: str, within: frozenset[str]) -> str:
        comment = self._counted(_described(schema, indent))
        required = frozenset(schema.get("required", ()))
        members = [
            self._member(key, value, key in required, indent, within)
            for key, value in schema.get("properties", {}).items()
        ]
        extra = schema.get("additionalProperties")
        if isinstance(extra, Mapping) and extra:
            value = self.write(extra, f"{indent}    ", within).text
            members.append(f"{indent}[key: string]: {value},\n")
        return f"{comment}{{\n{''.join(members)}{indent}}}"

    def _array(self, schema: Schema, indent: str, within: frozenset[str]) -> str:
        items = schema.get("prefixItems", schema.get("items"))
        if items is None:
            return "Array<any>"
        if isinstance(items, list):
            return f"[{', '.join(self.write(item, indent, within).text for item in items)}]"
        return f"{self._nullable(items, indent, within).grouped()}[]"

    def _member(
        self, key: str, schema: object, is_required: bool, indent: str, within: frozenset[str]
    ) -> str:
        schema, inside = self._resolve(schema, within)
        comments: list[str] = []
        if isinstance(title := schema.get("title"), str):
            comments.append(f"{_comment(title, indent)}{indent}//\n")
        description = _described(schema, indent)
        if "oneOf" not in schema:
            comments.append(description)
        if examples := schema.get("examples"):
            comments.append(f"{indent}// Examples:\n")
            comments += [_comment(f"- {_literal(example)}", indent) for example in examples]
        default = _default(schema)
        head = f"{indent}{_key(key)}{'' if is_required else '?'}:"
        if "oneOf" in schema:
            comments.append(description)
            comments += [f"{indent}// {default}\n"] if default else []
        comment = self._counted("".join(comments))
        self._count(len(head) + len(default))
        if "oneOf" not in schema:
            value = self._nullable(schema, f"{indent}    ", inside).text
            trailing = f" // {default}" if default else ""
            return f"{comment}{head} {value},{trailing}\n"
        own = schema.get("description")
        lines = [
            # The first variant's description gives way to the property's own.
            self._variant(variant, indent, inside, is_described=own is None or number > 0, own=own)
            for number, variant in enumerate(schema["oneOf"])
        ]
        if schema.get("nullable") is True and not self._allows_null(schema, inside):
            lines.append("null")
        union = "".join(f"{indent} | {line}\n" for line in lines)
        return f"{comment}{head}\n{union}{indent},\n"

    def _variant(
        self,
        variant: object,
        indent: str,
        within: frozenset[str],
        *,
        is_described: bool = True,
        own: str | None = None,
    ) -> str:
        """own: the property's description, which no variant repeats."""
        variant, within = self._resolve(variant, within)
        notes = []
        description = variant.get("description")
        if is_described and description not in (None, own):
            notes.append(" ".join(description.splitlines()))
        if default := _default(variant):
            notes.append(default)
        note = self._counted(f" // {' '.join(notes)}" if notes else "")
        return self._nullable(variant, f"{indent}   ", within).text + note

    def _nullable(self, schema: object, indent: str, within: frozenset[str]) -> _Type:
        written = self.write(schema, indent, within)
        resolved, _ = self._resolve(schema, within)
        if resolved.get("nullable") is not True or self._allows_null(resolved, within):
            return written
        return _Type(f"{written.text} | null", is_compound=True)

    def _allows_null(self, schema: object, within: frozenset[str]) -> bool:
        """Whether null is among a type's alternatives already."""
        schema, within = self._resolve(schema, within)
        kind = schema.get("type")
        alternatives = [*(schema.get("oneOf") or ()), *(schema.get("anyOf") or ())]
        return (
            kind == "null"
            or (isinstance(kind, list) and "null" in kind)
            or None in (schema.get("enum") or ())
            or ("const" in schema and schema["const"] is None)
            or any(self._allows_null(alternative, within) for alternative in alternatives)
        )

    def _any_of(self, variants: Sequence[object], indent: str, within: frozenset[str]) -> _Type:
        lines = [self._variant(variant, indent, within) for variant in variants]
        if any("//" in line for line in lines):
            text = "".join(f"\n{indent} | {line}" for line in lines)
        else:
            text = " | ".join(dict.fromkeys(lines))
        return _Type(text, is_compound=len(lines) > 1)

    def _all_of(
        self, schema: Schema, parts: Sequence[object], indent: str, within: frozenset[str]
    ) -> _Type:
        own = {key: value for key, value in schema.items() if key in ("type", "properties")}
        written = [self.write(part, indent, within) for part in (*parts, *([own] if own else ()))]
        if len(written) == 1:
            return written[0]
        return _Type(" & ".join(part.grouped() for part in written), is_compound=True)


def _comment(text: str, indent: str) -> str:
    """Every line of the text behind its own slashes."""
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    return "".join(f"{indent}// {line}\n" for line in lines)


def _described(schema: Schema, indent: str) -> str:
    description = schema.get("description")
    return _comment(description, indent) if isinstance(description, str) else ""


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return ""
    default = schema["default"]
    # openai-harmony leaves an enum's default without quotes.
    is_bare = isinstance(default, str) and bool(schema.get("enum")) and not _CONTROL.search(default)
    return f"default: {default if is_bare else _literal(default)}"


def _literal(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _EXPONENT.sub(r"e\1\2", text) if isinstance(value, float) else text


def _key(key: str) -> str:
    return json.dumps(key) if _CONTROL.search(key) else key


def _implied_kind(schema: Schema) -> str:
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "any"


def _check(path: str, schema: object, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidChat(f"{path} must be a JSON schema (an object), got {shown(schema)}")
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidChat(f"{path} is nested deeper than {MAX_SCHEMA_DEPTH} schemas")
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if one is not None and one not in _TYPES:
            raise InvalidChat(
                f"{path}.type must be one of {', '.join(_TYPES)} or a list of them, "
                f"got {shown(one)}"
            )
    _check_words(path, schema)
    for where, part in _parts(path, schema):
        _check(where, part, depth + 1)


def _check_words(path: str, schema: Schema) -> None:
    expected: dict[str, tuple[type, str]] = {
        "$ref": (str, "a string"),
        "title": (str, "a string"),
        "description": (str, "a string"),
        "enum": (list, "a list"),
        "examples": (list, "a list"),
        "required": (list, "a list of property names"),
        "nullable": (bool, "true or false"),
        "oneOf": (list, "a list of schemas"),
        "anyOf": (list, "a list of schemas"),
        "allOf": (list, "a list of schemas"),
        "prefixItems": (list, "a list of schemas"),
        "properties": (dict, "an object of schemas"),
        "$defs": (dict, "an object of schemas"),
        "definitions": (dict, "an object of schemas"),
    }
    for word, (kind, words) in expected.items():
        if word in schema and not isinstance(schema[word], kind):
            raise InvalidChat(f"{path}.{word} must be {words}, got {shown(schema[word])}")
    for number, name in enumerate(schema.get("required", ())):
        if not isinstance(name, str):
            raise InvalidChat(f"{path}.required[{number}] must be a string, got {shown(name)}")


def _parts(path: str, schema: Schema) -> Iterator[tuple[str, object]]:
    for word in ("properties", "$defs", "definitions"):
        for name, part in schema.get(word, {}).items():
            yield f"{path}.{word}.{name}", part
    for word in ("oneOf", "anyOf", "allOf", "prefixItems"):
        for number, part in enumerate(schema.get(word, ())):
            yield f"{path}.{word}[{number}]", part
    items = schema.get("items")
    for number, part in enumerate(items if isinstance(items, list) else ()):
        yield f"{path}.items[{number}]", part
    for word in ("items", "additionalProperties"):
        if word in schema and not isinstance(schema[word], list):
            yield f"{path}.{word}", schema[word]
