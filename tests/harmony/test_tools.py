"""TypeScript of tools: openai-harmony's where it says all, goldens where it gives up."""

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import DeveloperContent, Message, Role, ToolDescription

from gptoss_harmony.tools import MAX_SCHEMA_DEPTH, MAX_TYPES_SIZE, check_schema, render_tools
from gptoss_harmony.types import InvalidChat
from gptoss_harmony.vocabulary import Vocabulary

LINE = st.text(
    alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters='"\\'),
    min_size=1,
    max_size=12,
)
KEY = st.from_regex(r"[A-Za-z_$][A-Za-z0-9_.$-]{0,8}", fullmatch=True)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """What openai-harmony renders in full: no unions in arrays, no enums but of strings."""
    kinds = ["string", "number", "integer", "boolean", "enum", "list of types", "any"]
    kinds += ["object", "array", "oneOf"] if depth else []
    kind = draw(st.sampled_from(kinds))
    schema: dict[str, Any] = {"type": kind}
    match kind:
        case "any":
            schema = {}
        case "enum":
            schema = {"type": "string", "enum": draw(st.lists(LINE, min_size=1, max_size=3))}
        case "list of types":
            names = st.sampled_from(["string", "number", "boolean", "null"])
            schema = {"type": draw(st.lists(names, min_size=1, max_size=3, unique=True))}
        case "object":
            members = draw(st.dictionaries(KEY, schemas(depth=depth - 1), max_size=3))
            schema["properties"] = members
            schema["required"] = [key for key in members if draw(st.booleans())]
        case "array":
            simple = ("enum", "oneOf", "nullable")
            items = schemas(depth=depth - 1).filter(
                lambda made: (
                    isinstance(made.get("type"), str) and not any(key in made for key in simple)
                )
            )
            if draw(st.booleans()):
                schema["items"] = draw(items)
        case "oneOf":
            # A union in a union writes an enum's default in quotes, anywhere else it has none.
            variant = schemas(depth=depth - 1).filter(lambda made: "oneOf" not in made)
            variants = draw(st.lists(variant, min_size=1, max_size=3))
            schema = {"oneOf": variants}
    if draw(st.booleans()):
        # A union's description that its first variant repeats is lost by openai-harmony.
        schema["description"] = draw(LINE) + (" of all" if kind == "oneOf" else "")
    # openai-harmony takes a null anywhere inside an object for the object's own.
    has_null = any(null in repr(schema) for null in ("null", "None"))
    if draw(st.booleans()) and kind != "oneOf" and not has_null:
        schema["nullable"] = True
    if draw(st.integers(0, 3)) == 0:
        schema["title"] = draw(LINE)
    if draw(st.integers(0, 3)) == 0:
        schema["examples"] = draw(st.lists(LINE, max_size=2))
    if draw(st.booleans()):
        schema["default"] = draw(
            st.one_of(
                LINE,
                st.none(),
                st.booleans(),
                st.integers(-9, 9),
                st.sampled_from([0.5, -1.25, 1e21]),
            )
            if kind != "enum"
            else st.sampled_from(schema["enum"])
        )
    return schema


def by_openai_harmony(vocabulary: Vocabulary, *functions: dict[str, Any]) -> str:
    content = DeveloperContent.new().with_function_tools(
        [ToolDescription.new(**function) for function in functions]
    )
    message = Message.from_role_and_content(Role.DEVELOPER, content)
    text = vocabulary.decode(vocabulary.encoding.render(message))
    return text.removeprefix("<|start|>developer<|message|>").removesuffix("<|end|>")


def by_us(*functions: dict[str, Any]) -> str:
    return render_tools([{"type": "function", "function": function} for function in functions])


@given(
    members=st.dictionaries(KEY, schemas(), max_size=4),
    description=st.one_of(st.just(""), LINE, st.lists(LINE, min_size=2).map("\n".join)),
)
@settings(max_examples=200, deadline=None)
def test_what_openai_harmony_renders_in_full_is_rendered_the_same(
    loaded: Vocabulary, members: dict[str, Any], description: str
) -> None:
    parameters = {"type": "object", "properties": members, "required": list(members)[:1]}
    check_schema("parameters", parameters)
    function = {"name": "f", "description": description, "parameters": parameters}
    assert by_us(function) == by_openai_harmony(loaded, function)


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "description": "All.", "properties": {"a": {"type": "string"}}},
        {"type": "object", "properties": {"a": True, "b": {}}, "required": ["a", "nowhere"]},
        {"type": "string"},
        {"oneOf": [{"type": "string"}, {"type": "number", "description": "n"}]},
        *(
            {"type": "object", "properties": {"a": {"type": kind, "default": default}}}
            for kind in ("string", "object")
            for default in (False, 0, None, "", 1e30, 1e-7, -0.0, [1, "ü"], {"b": 1.5, "a": {}})
        ),
    ],
)
def test_edges_are_openai_harmonys(loaded: Vocabulary, parameters: Any) -> None:
    functions = [
        {"name": "f", "description": "Does\nit.\n\n", "parameters": parameters},
        {"name": "g", "description": "", "parameters": parameters},
    ]
    assert by_us(*functions) == by_openai_harmony(loaded, *functions)


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
GOLDENS: list[tuple[str, Any, str]] = [
    ("anyOf", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "x?: string | null,"),
    (
        "anyOf with descriptions",
        {"anyOf": [{"type": "string", "description": "a"}, {"type": "null"}]},
        "x?: \n     | string // a\n     | null,",
    ),
    ("null", {"type": "null"}, "x?: null,"),
    ("const", {"const": "a"}, 'x?: "a",'),
    ("enum of integers", {"type": "integer", "enum": [1, 2]}, "x?: 1 | 2,"),
    (
        "enum of all kinds",
        {"enum": ["a", 1, None, True, 'q"']},
        'x?: "a" | 1 | null | true | "q\\"",',
    ),
    (
        "array of enums",
        {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        'x?: ("a" | "b")[],',
    ),
    ("array of one", {"type": "array", "items": {"enum": ["a"]}}, 'x?: "a"[],'),
    (
        "array of unions",
        {"type": "array", "items": {"type": ["string", "number"]}},
        "x?: (string | number)[],",
    ),
    (
        "array of oneOf",
        {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "number"}]}},
        "x?: (\n     | string\n     | number\n)[],",
    ),
    (
        "array of nullables",
        {"type": "array", "items": {"type": "string", "nullable": True}},
        "x?: (string | null)[],",
    ),
    (
        "array or null",
        {"type": ["array", "null"], "items": {"type": "string"}},
        "x?: string[] | null,",
    ),
    (
        "object or null",
        {"type": ["object", "null"], "properties": {"a": {"type": "string"}}},
        "x?: {\n    a?: string,\n    } | null,",
    ),
    ("tuple", {"prefixItems": [{"type": "string"}, {"type": "number"}]}, "x?: [string, number],"),
    ("types that are one", {"type": ["integer", "number"]}, "x?: number,"),
    (
        "typed keys",
        {"type": "object", "additionalProperties": {"type": "number"}},
        "x?: {\n    [key: string]: number,\n    },",
    ),
    (
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}},
                {"anyOf": [{"type": "string"}, {"type": "null"}]},
            ]
        },
        "x?: {\n    a?: string,\n    } & (string | null),",
    ),
    ("allOf of one", {"allOf": [{"type": "string"}]}, "x?: string,"),
    ("no type but properties", {"properties": {"a": {}}}, "x?: {\n    a?: any,\n    },"),
    ("no type but items", {"items": {"type": "string"}}, "x?: string[],"),
    (
        "oneOf with null",
        {"oneOf": [{"type": "string"}, {"type": "null"}]},
        "x?:\n | string\n | null\n,",
    ),
    (
        "nullable oneOf",
        {"oneOf": [{"type": "string"}], "nullable": True},
        "x?:\n | string\n | null\n,",
    ),
    (
        "examples",
        {"type": "integer", "examples": [1, "a"]},
        '// Examples:\n// - 1\n// - "a"\nx?: number,',
    ),
    # A line break ends no comment.
    (
        "description",
        {"type": "string", "description": "a\n}) => any;"},
        "// a\n// }) => any;\nx?: string,",
    ),
    ("title", {"type": "string", "title": "a\nb"}, "// a\n// b\n//\nx?: string,"),
    ("default", {"type": "string", "default": "a\nb"}, 'x?: string, // default: "a\\nb"'),
    ("enum's default", {"enum": ["a\nb"], "default": "a\nb"}, 'x?: "a\\nb", // default: "a\\nb"'),
    (
        "example",
        {"type": "string", "examples": ["a\nb"]},
        '// Examples:\n// - "a\\nb"\nx?: string,',
    ),
    (
        "an object's description",
        {"type": "object", "description": "a\nb"},
        "// a\n// b\nx?:     // a\n    // b\n{\n    },",
    ),
    (
        "a variant's description",
        {"oneOf": [{"type": "string", "description": "a\nb"}]},
        "x?:\n | string // a b\n,",
    ),
    (
        "a description that the first variant repeats",
        {"description": "a", "oneOf": [{"type": "string", "description": "a"}]},
        "// a\nx?:\n | string\n,",
    ),
    # References.
    ("a reference", {"$ref": "#/$defs/City"}, "// A city.\nx?: string,"),
    (
        "a reference with words of its own",
        {"$ref": "#/$defs/City", "description": "Home.", "default": "Oslo"},
        '// Home.\nx?: string, // default: "Oslo"',
    ),
    (
        "a reference to itself",
        {"$ref": "#/$defs/Node"},
        "x?: {\n    next?: any,\n    },",
    ),
    ("references in a list", {"type": "array", "items": {"$ref": "#/$defs/City"}}, "x?: string[],"),
    ("an escaped reference", {"$ref": "#/$defs/a~1b"}, "x?: number,"),
]
DEFS = {
    "City": {"type": "string", "description": "A city."},
    "Node": NODE,
    "a/b": {"type": "number"},
}


@pytest.mark.parametrize(
    ("schema", "golden"), [case[1:] for case in GOLDENS], ids=[case[0] for case in GOLDENS]
)
def test_what_openai_harmony_gives_up_is_complete(schema: Any, golden: str) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    check_schema("parameters", parameters)
    text = by_us({"name": "f", "parameters": parameters})
    assert text == (
        "# Tools\n\n## functions\n\nnamespace functions {\n\n"
        f"type f = (_: {{\n{golden}\n}}) => any;\n\n}} // namespace functions"
    )


def test_odd_keys_are_openai_harmonys(loaded: Vocabulary) -> None:
    keys = [
        "my key",
        "a-b",
        "",
        'a"b',
        "日本",
        "1",
        "$ref",
        "a/b",
        "a\\b",
        "<|end|>",
        " x ",
        "a?",
        "a:",
    ]
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in keys}}
    check_schema("parameters", parameters)
    function = {"name": "f", "description": "d", "parameters": parameters}
    assert by_us(function) == by_openai_harmony(loaded, function)


def test_three_levels_deep(loaded: Vocabulary) -> None:
    deepest = {
        "d": {"type": "string", "enum": ["x", "y"], "default": "x", "description": "deep"},
        "e": {"type": "boolean", "default": False},
    }
    rows = {"type": "array", "items": {"type": "object", "properties": deepest, "required": ["d"]}}
    middle = {"type": "object", "properties": {"c": rows}, "required": ["c"]}
    outer = {"type": "object", "description": "outer", "properties": {"b": middle}}
    either = {
        "oneOf": [
            {"type": "object", "properties": {"k": {"type": "integer"}}},
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        ]
    }
    members = {
        "a": outer,
        "n": {"type": "number", "default": 0},
        "z": {"type": "string", "default": ""},
        "q": {"type": "string", "default": None},
        "o": either,
    }
    parameters = {"type": "object", "properties": members, "required": ["a"]}
    check_schema("parameters", parameters)
    function = {"name": "f", "description": "", "parameters": parameters}
    assert by_us(function) == by_openai_harmony(loaded, function)
    assert by_us(function).split("\n\n")[3] == (
        "type f = (_: {\n"
        "// outer\n"
        "a:     // outer\n"
        "{\n"
        "    b?: {\n"
        "        c: {\n"
        "            // deep\n"
        '            d: "x" | "y", // default: x\n'
        "            e?: boolean, // default: false\n"
        "            }[],\n"
        "        },\n"
        "    },\n"
        "n?: number, // default: 0\n"
        'z?: string, // default: ""\n'
        "q?: string, // default: null\n"
        "o?:\n"
        " | {\n"
        "   k?: number,\n"
        "   }\n"
        " | number[][]\n"
        ",\n"
        "}) => any;"
    )


def test_a_key_with_a_line_break_stays_on_its_line() -> None:
    parameters = {"type": "object", "properties": {"a\nb": {"type": "string"}}}
    assert '{\n"a\\nb"?: string,\n}' in by_us({"name": "f", "parameters": parameters})


def test_pydantics_schema_keeps_everything() -> None:
    """As `model_json_schema` writes optional fields, nested models and literals."""
    parameters = {
        "$defs": {
            "Unit": {"enum": ["C", "F"], "title": "Unit", "type": "string"},
            "Place": {
                "properties": {"city": {"title": "City", "type": "string"}},
                "required": ["city"],
                "title": "Place",
                "type": "object",
            },
        },
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}], "default": None},
            "days": {"items": {"type": "integer"}, "type": "array"},
        },
        "required": ["place"],
        "type": "object",
    }
    check_schema("parameters", parameters)
    assert by_us({"name": "f", "parameters": parameters}).split("\n\n")[3] == (
        "type f = (_: {\n// Place\n//\nplace: {\n    // City\n    //\n    city: string,\n    },\n"
        'unit?: "C" | "F" | null, // default: null\ndays?: number[],\n}) => any;'
    )


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_deep_and_endless_schemas_are_refused() -> None:
    check_schema("p", nested(MAX_SCHEMA_DEPTH))
    with pytest.raises(InvalidChat, match=f"nested deeper than {MAX_SCHEMA_DEPTH} schemas"):
        check_schema("p", nested(MAX_SCHEMA_DEPTH + 1))
    # Forty lines that stand for 2**40 members.
    doubling: dict[str, Any] = {"d0": {"type": "string"}}
    for number in range(1, 40):
        reference = {"$ref": f"#/$defs/d{number - 1}"}
        doubling[f"d{number}"] = {"type": "object", "properties": {"a": reference, "b": reference}}
    with pytest.raises(InvalidChat, match=f"above {MAX_TYPES_SIZE} characters"):
        check_schema("p", {"$ref": "#/$defs/d39", "$defs": doubling})


def chain(length: int) -> dict[str, Any]:
    """A type within a type, each behind a reference."""
    links: dict[str, Any] = {"d0": {"type": "string"}}
    for number in range(1, length + 1):
        links[f"d{number}"] = {"items": {"$ref": f"#/$defs/d{number - 1}"}}
    return {"items": {"$ref": f"#/$defs/d{length}"}, "$defs": links}


def test_depth_counts_references() -> None:
    schema = chain(MAX_SCHEMA_DEPTH - 1)
    check_schema("p", schema)
    assert f"string{'[]' * MAX_SCHEMA_DEPTH}" in by_us({"name": "f", "parameters": schema})
    aliases = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(50_000)}
    for endless in (
        chain(MAX_SCHEMA_DEPTH),
        chain(2000),
        {"$ref": "#/$defs/d0", "$defs": {**aliases, "d50000": {}}},
    ):
        with pytest.raises(InvalidChat, match=f"deeper than {MAX_SCHEMA_DEPTH} schemas, reference"):
            check_schema("p", endless)


LONG = "x" * 40_000
LONG_PARTS: list[dict[str, Any]] = [
    {"description": LONG},
    {"description": "\n" * 10_000},
    {"title": LONG},
    {"const": LONG},
    {"enum": [LONG]},
    {"enum": ["\x01" * 10_000]},
    {"examples": [LONG]},
    {"default": LONG},
    {"enum": ["a"], "default": LONG},
    {"properties": {LONG: True}},
    {"properties": {"a": {"anyOf": [{"description": LONG}, {"default": LONG}]}}},
    {"oneOf": [{"description": LONG}]},
    {"required": ["a"] * 40_000},
    {f"x{number}": 1 for number in range(10_000)},
]


@pytest.mark.parametrize("part", LONG_PARTS, ids=lambda part: "+".join(list(part)[:3]))
def test_a_long_part_that_is_referred_to_often_is_refused_early(part: dict[str, Any]) -> None:
    """Some kilobytes must not become gigabytes, nor minutes."""
    members = {f"m{number}": {"$ref": "#/$defs/Long"} for number in range(20_000)}
    schema = {"type": "object", "properties": members, "$defs": {"Long": part}}
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidChat, match=f"types above {MAX_TYPES_SIZE} characters"):
            check_schema("p", schema)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * MAX_TYPES_SIZE
    assert time.process_time() - start < 5.0


def test_the_limit_is_on_all_tools_together() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": LONG}}}
    size = check_schema("p", schema)
    assert len(LONG) < size < 2 * len(LONG)
    assert check_schema("q", schema, size) == 2 * size
    check_schema("q", schema, MAX_TYPES_SIZE - size)
    with pytest.raises(InvalidChat, match=r"^q brings the tools' types above"):
        check_schema("q", schema, MAX_TYPES_SIZE - size + 1)


@given(
    schema=st.recursive(
        st.one_of(st.booleans(), st.none(), st.integers(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    [
                        *("type", "properties", "items", "oneOf", "anyOf", "allOf", "$ref", "enum"),
                        *("default", "description", "required", "const", "nullable", "$defs", "x"),
                    ]
                ),
                st.one_of(inner, st.sampled_from(["string", "object", "array", "#", "#/$defs/x"])),
                max_size=4,
            ),
        ),
        max_leaves=12,
    )
)
@settings(max_examples=500, deadline=None)
def test_any_json_is_refused_in_words_or_rendered(schema: Any) -> None:
    try:
        check_schema("p", schema)
    except InvalidChat:
        return
    if isinstance(schema, dict):
        text = by_us({"name": "f", "parameters": schema})
        assert text == by_us({"name": "f", "parameters": json.loads(json.dumps(schema))})
        assert text.endswith(") => any;\n\n} // namespace functions")
