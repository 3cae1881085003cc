"""A vocabulary of 512 tokens for tiny models, schemas whose answers end, and what fits them."""

import json
import random
from typing import Any

from gptoss_engine.guides import Guides, Vocabulary

VOCAB_SIZE = 512
EOS = 2
CONTROL = (EOS, 510, 511)
_WORDS = ('{"', '":', '","', '"}', "true", "false", "null", '["', "123", "the", " a", "é", "日本")


def vocabulary() -> Vocabulary:
    """All bytes but one, some longer tokens, and three that spell nothing."""
    longer = [word.encode() for word in _WORDS]
    longer += [bytes([97 + i % 26, 97 + i // 26]) for i in range(VOCAB_SIZE - 256 - len(longer))]
    tokens = [bytes([byte]) for byte in range(256)] + longer
    for token_id in CONTROL:
        tokens[token_id] = f"<{token_id}>".encode()
    return Vocabulary(tokens, CONTROL, lambda text: [*text.encode()])


def guides() -> Guides:
    return Guides(vocabulary, vocab_size=VOCAB_SIZE, eos_token_ids={EOS, 200_002})


def text_of(token_ids: tuple[int, ...] | list[int]) -> str:
    """What they spell, without what spells nothing."""
    tokens = vocabulary().token_bytes
    return b"".join(tokens[id_] for id_ in token_ids if id_ not in CONTROL).decode()


def schema_guide(schema: dict[str, Any]) -> dict[str, str]:
    """In compact JSON, so that no answer is spaces."""
    compact = {"x-guidance": {"whitespace_flexible": False}, **schema}
    return {"type": "json_schema", "value": json.dumps(compact)}


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of which every answer has an end: texts, lists and numbers have limits."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"] * 2
    match chance.choice(kinds):
        case "string":
            low = chance.randrange(4)
            return {"type": "string", "minLength": low, "maxLength": low + chance.randrange(6)}
        case "integer":
            low = chance.randrange(-200, 200)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(300)}
        case "enum":
            return {"enum": chance.sample([1, "two", None, True, "drei", -4], 3)}
        case "const":
            return {"const": chance.choice(["fixed", 7, None, False])}
        case "object":
            names = chance.sample(["a", "b", 'quo"te', "é", "long_name", ""], chance.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(chance, depth + 1) for name in names},
                "required": [name for name in names if chance.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            low = chance.randrange(3)
            items = random_schema(chance, depth + 1)
            most = low + chance.randrange(3)
            return {"type": "array", "items": items, "minItems": low, "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is what one of these schemas describes."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(value == each and type(value) is type(each) for each in allowed)
    match schema["type"]:
        case "string":
            return isinstance(value, str) and (
                schema["minLength"] <= len(value) <= schema["maxLength"]
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "object":
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(fits(each, schema["properties"][name]) for name, each in value.items())
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(fits(each, schema["items"]) for each in value)
            )
        case kind:
            return type(value) is {"boolean": bool, "null": type(None)}[kind]
