"""response_format, tool_choice and guides: what is taken, what is refused, and in which words."""

import json
from typing import Any

import pytest

from gptoss_harmony.chat import parse_chat
from gptoss_harmony.structured import (
    MAX_GUIDE_LENGTH,
    check_schema,
    guided_decoding,
    response_format,
)
from gptoss_harmony.types import ChatRequest, InvalidChat, TextFormat

USER = {"role": "user", "content": "Hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, parameters: Any = CITY, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def chat(**fields: Any) -> ChatRequest:
    for name, value in fields.items():
        fields[name] = value if isinstance(value, str) else json.dumps(value)
    return parse_chat(messages=json.dumps([USER]), **fields)


@pytest.mark.parametrize(
    ("choice", "use", "only"),
    [
        ("auto", "auto", None),
        ('"required"', "required", None),
        ("required", "required", None),
        ({"type": "function", "function": {"name": "g"}}, "required", "g"),
    ],
)
def test_tool_choice(choice: Any, use: str, only: str | None) -> None:
    request = chat(tools=[tool("f"), tool("g")], tool_choice=choice)
    assert (request.tool_use, request.only_tool) == (use, only)
    assert len(request.tools) == 2, "the prompt shows all of them"


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("sometimes", 'tool_choice must be auto, none, required or an object, got "sometimes"'),
        ({"type": "function"}, 'tool_choice must be {"type": "function", '),
        ({"type": "tool", "function": {"name": "f"}}, 'tool_choice must be {"type": "function", '),
        ({"type": "function", "function": {"name": "h"}}, 'must name one of the tools, got "h"'),
        ("{", "tool_choice is not JSON"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: Any, sentence: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        chat(tools=[tool("f")], tool_choice=choice)
    assert sentence in str(refused.value)


def test_a_call_that_must_be_needs_tools() -> None:
    with pytest.raises(InvalidChat, match="tool_choice required needs tools, got none"):
        chat(tool_choice="required")
    request = chat(tools=[{"type": "browser"}], tool_choice="required")
    assert request.tool_use == "required"


def test_arguments_that_are_strict_or_must_come_have_a_schema_that_can_be_followed() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    assert chat(tools=[tool("f", odd)]).tools
    assert chat(tools=[tool("f", odd)], tool_choice="required").tools, "what is odd is left out"
    path = r"^tools\[0\]\.function\.parameters"
    with pytest.raises(InvalidChat, match=f"{path} cannot be followed: Unknown format: odd"):
        chat(tools=[tool("f", odd, strict=True)])
    endless = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    with pytest.raises(InvalidChat, match=f"{path} cannot be followed: Unsatisfiable schema"):
        chat(tools=[tool("f", endless)], tool_choice="required")
    with pytest.raises(InvalidChat, match=r"^tools\[0\]\.function\.strict must be true or false"):
        chat(tools=[tool("f", strict="yes")])


def test_parallel_calls_may_be_refused() -> None:
    for given, expected in ((None, True), (True, True), (False, False)):
        request = parse_chat(messages=json.dumps([USER]), parallel_tool_calls=given)
        assert request.parallel_calls is expected


def test_response_format() -> None:
    assert response_format({"type": "text"}) is None
    found = response_format({"type": "json_object"})
    assert found == TextFormat("json_schema", schema={"type": "object"})
    given = {"name": "city", "schema": CITY, "strict": True, "description": "Where\nit is."}
    found = response_format({"type": "json_schema", "json_schema": given})
    expected = TextFormat("json_schema", schema=CITY, name="city", description="Where\nit is.")
    assert found == expected


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY, **fields}}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("text", "response_format is not JSON"),
        ([], "response_format.type must be text, json_object or json_schema, got []"),
        ({"type": "xml"}, 'json_object or json_schema, got "xml"'),
        ({"type": "json_schema"}, "response_format.json_schema must be an object with name and"),
        (schema_format(name=""), "response_format.json_schema.name must be a name of 1 to 64"),
        (schema_format(name="a\nb"), "response_format.json_schema.name must be a name of 1 to 64"),
        (schema_format(strict=1), "response_format.json_schema.strict must be true or false"),
        (schema_format(schema=None), "response_format.json_schema.schema must be a JSON schema"),
        (schema_format(description=3), "response_format.json_schema.description must be a string"),
        (schema_format(extra=3), 'unknown field "extra" in response_format.json_schema; known'),
        (
            schema_format(schema={"type": "array", "contains": {}, "uniqueItems": True}),
            'schema cannot be followed: Unimplemented keys: ["contains", "uniqueItems"]',
        ),
        (schema_format(schema={"enum": ["\ud800"]}), "schema holds half a character"),
        (
            schema_format(schema={"enum": ["x" * MAX_GUIDE_LENGTH]}),
            f"schema must have at most {MAX_GUIDE_LENGTH} characters as a grammar, got ",
        ),
    ],
)
def test_a_format_that_cannot_be_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        chat(response_format=value)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("guide_type", "guide", "expected"),
    [
        ("json", None, TextFormat("json_schema", schema={"type": ["object", "array"]})),
        ("json", "", TextFormat("json_schema", schema={"type": ["object", "array"]})),
        ("json_schema", json.dumps(CITY), TextFormat("json_schema", schema=CITY)),
        ("regex", "a/b|c", TextFormat("lark", text=r"start: /a\/b|c/")),
        ("lark", 'start: "a"', TextFormat("lark", text='start: "a"')),
    ],
)
def test_guides(guide_type: str, guide: str | None, expected: TextFormat) -> None:
    assert guided_decoding(guide_type, guide) == expected


@pytest.mark.parametrize("guide_type", ["ebnf_grammar", "ebnf"])
def test_a_guide_in_ebnf_becomes_lark(guide_type: str) -> None:
    found = guided_decoding(guide_type, 'root ::= "yes" | word\nword ::= [a-z]+\n')
    assert found is not None
    assert found.kind == "lark"
    assert "start" in found.text


@pytest.mark.parametrize(
    ("guide_type", "guide", "sentence"),
    [
        (None, "{}", "guided_decoding_guide needs guided_decoding_guide_type, got none"),
        ("xml", "{}", "guided_decoding_guide_type must be one of json, json_schema, regex, ebnf_"),
        ("json", "{}", "guided_decoding_guide is not taken with type json, got"),
        ("regex", "", "guided_decoding_guide must be given with guided_decoding_guide_type regex"),
        ("json_schema", "{", "guided_decoding_guide must be JSON: "),
        ("json_schema", "[]", "guided_decoding_guide must be a JSON schema (an object), got []"),
        ("json_schema", '{"not": {}}', 'guide cannot be followed: Unimplemented keys: ["not"]'),
        ("regex", "(", "guided_decoding_guide cannot be followed: "),
        ("lark", "start: x", "guided_decoding_guide cannot be followed: "),
        ("ebnf_grammar", "root ::= (", "guided_decoding_guide is no grammar (root ::= …): "),
        ("lark", "#" * (MAX_GUIDE_LENGTH + 1), "guided_decoding_guide must have at most 65536"),
    ],
)
def test_a_guide_that_cannot_be_is_refused(
    guide_type: str | None, guide: str, sentence: str
) -> None:
    with pytest.raises(InvalidChat) as refused:
        guided_decoding(guide_type, guide)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_chain_is_too_long_for_the_stack() -> None:
    """An overflow would end the server's process for this model."""
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(4000))
    chain = f'start: a0\n{rules}a4000: "a"'
    assert guided_decoding("lark", chain) == TextFormat("lark", text=chain)
    schemas = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1200)}
    schema = {"$defs": schemas | {"a1200": {}}, "$ref": "#/$defs/a0"}
    assert guided_decoding("json_schema", json.dumps(schema)) is not None


def test_both_at_once_are_refused() -> None:
    given = {"guided_decoding_guide_type": "json", "response_format": {"type": "json_object"}}
    with pytest.raises(InvalidChat, match="response_format and guided_decoding_guide cannot be"):
        chat(**given)
    assert chat(guided_decoding_guide_type="json", response_format={"type": "text"}).text_format


def _patterns(number: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"(a|b)*a(a|b){{{20 + each}}}"} for each in range(number)]


def _referring(patterns: list[dict[str, Any]]) -> dict[str, Any]:
    """Each of them refers to the next."""
    parts = {
        f"d{place}": {**each, "$ref": f"#/$defs/d{place + 1}"}
        for place, each in enumerate(patterns)
    }
    return {"$defs": {**parts, f"d{len(parts)}": {"type": "string"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": _patterns(12)},
        {"allOf": [{"properties": {"a": each}} for each in _patterns(12)]},
        {"properties": {"a": {"allOf": _patterns(12)}}},
        _referring(_patterns(12)),
    ],
)
def test_patterns_that_take_too_long_together_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidChat, match=r"^p must have at most 8 patterns .*, got 12$"):
        check_schema("p", schema)


def test_patterns_beside_each_other_are_as_many_as_one_likes() -> None:
    described = {"title": "T", "anyOf": [*_patterns(12), {"$ref": "#/$defs/n", "description": "D"}]}
    names = {f"p{place}": each for place, each in enumerate(_patterns(12))}
    properties = {**names, "a": described, "allOf": {"allOf": [{"type": "integer"}]}}
    check_schema(
        "p", {"type": "object", "properties": properties, "$defs": {"n": {"type": "null"}}}
    )


def test_equal_patterns_are_one() -> None:
    check_schema("p", {"allOf": [{"type": "string", "pattern": "^a+$"}] * 12})
