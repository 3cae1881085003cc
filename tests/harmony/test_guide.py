"""Grammars of whole answers: which streams of tokens they take, and that these are what was asked.

A stream is written as Harmony's text, its control tokens spelled out.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from gptoss_harmony.chat import parse_chat
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.guide import Guide, chat_guide
from gptoss_harmony.raw import RawFormat
from gptoss_harmony.structured import guided_decoding
from gptoss_harmony.types import ChatRequest, InvalidChat, TextFormat
from gptoss_harmony.vocabulary import NUM_TOKENS, STOP_TOKEN_IDS, Vocabulary

USER = {"role": "user", "content": "Hi"}
CALLED = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
]
HISTORY = [
    USER,
    {"role": "assistant", "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
]


def object_of(name: str, value_type: str) -> dict[str, Any]:
    properties = {name: {"type": value_type}}
    closed = {"required": [name], "additionalProperties": False}
    return {"type": "object", "properties": properties} | closed


CITY, NUMBER = object_of("city", "string"), object_of("n", "integer")

THINK = "<|channel|>analysis<|message|>Let me see: {<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
IN_ROLE = " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>"
IN_CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"


def tool(name: str, parameters: Any = CITY, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("get"), tool("get_number", NUMBER)]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}


def chat(messages: Any = (USER,), **fields: Any) -> ChatRequest:
    for name, value in fields.items():
        is_plain = isinstance(value, str | bool)
        fields[name] = value if is_plain else json.dumps(value)
    return parse_chat(messages=json.dumps(messages), **fields)


Takes = Callable[[Guide | None, str], bool]


@pytest.fixture(scope="session")
def takes(tokens: LLTokenizer, loaded: Vocabulary) -> Takes:
    """Whether an answer may be this, and nothing may follow; a mask allows each of its tokens."""

    def check(guide: Guide | None, text: str) -> bool:
        assert guide is not None
        matcher = started(tokens, guide)
        for token_id in loaded.encode_raw(text):
            if matcher.is_stopped() or not matcher.consume_token(token_id):
                return False
        return matcher.is_stopped()

    return check


def started(tokens: LLTokenizer, guide: Guide) -> LLMatcher:
    assert guide["type"] == "grammars"
    matcher = LLMatcher(tokens, json.dumps({"grammars": json.loads(guide["value"])}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": True, "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
    ],
)
def test_where_nothing_is_asked_for_there_is_no_guide(fields: dict[str, Any]) -> None:
    assert chat_guide(chat(**fields)) is None


def test_the_final_message_is_the_format_and_reasoning_is_free(takes: Takes) -> None:
    guide = chat_guide(chat(response_format=SCHEMA))
    for before in ("", THINK, THINK * 3):
        for typed in ("", " <|constrain|>json", "<|constrain|>json"):
            final = FINAL.replace("<|message|>", f"{typed}<|message|>")
            assert takes(guide, f'{before}{final}{{"n": -7}}<|return|>')
            assert takes(guide, f'{before}{final}{{\n  "n": 12\n}}<|return|>')
            assert takes(guide, f'{before}{final}{{\r\n\t"n": 12\r\n}}<|return|>')
    for wrong in (
        f"{FINAL}Hello<|return|>",
        f'{FINAL}{{"n": "x"}}<|return|>',
        f'{FINAL}{{"n": 1<|return|>',
        f'{FINAL}{{"n": 1}}',
        f'{FINAL}{{"n": 1}} and more<|return|>',
        f'{FINAL}{{"n": 1}}<|end|>',
        f'{FINAL}{{"n": 1}}<|call|>',
        f'{PREAMBLE}{FINAL}{{"n": 1}}<|return|>',
        '{"n": 1}<|return|>',
        '<|channel|>analysis<|message|>{"n": 1}<|return|>',
        f'{IN_ROLE.format("get")}{{"city": "x"}}<|call|>',
        f'{FINAL}{{  "n": 1}}<|return|>',
        f'{FINAL}{{\n\n"n": 1}}<|return|>',
        f'{FINAL}{{\n{" " * 65}"n": 1}}<|return|>',
    ):
        assert not takes(guide, wrong), wrong


def test_a_json_object_is_any(takes: Takes) -> None:
    guide = chat_guide(chat(response_format={"type": "json_object"}))
    assert (
        takes(guide, f'{THINK}{FINAL}{{"a": [1, {{"b": null}}], "c": "<|end|>"}}<|return|>')
        is False
    )
    assert takes(guide, f'{THINK}{FINAL}{{"a": [1, {{"b": null}}], "c": "ü"}}<|return|>')
    assert not takes(guide, f"{FINAL}[1]<|return|>")


def test_reasoning_may_be_any_tokens_but_control_ones(
    tokens: LLTokenizer, loaded: Vocabulary
) -> None:
    """Also halves of characters."""
    matcher = started(tokens, chat_guide(chat(response_format=SCHEMA)) or {})
    for token_id in loaded.encode_raw("<|channel|>analysis<|message|>"):
        assert matcher.consume_token(token_id)
    half = loaded.token_bytes.index(b"\xf0")
    assert matcher.consume_tokens([half, half, *loaded.encode("ok")])
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    assert len(allowed) == 199_998 + 1
    assert allowed[-1] == 200_007, "nothing but <|end|> beside all text"


def test_tools_beside_a_format(takes: Takes) -> None:
    """A preamble comes with a call alone: else the content would be more than the format."""
    guide = chat_guide(chat(tools=TOOLS, response_format=SCHEMA))
    assert takes(guide, f'{THINK}{FINAL}{{"n": 1}}<|return|>')
    assert takes(guide, f"{THINK}{PREAMBLE}{IN_CHANNEL.format('get')}anything<|call|>")
    assert not takes(guide, f'{PREAMBLE}{FINAL}{{"n": 1}}<|return|>')


def test_a_call_must_come(takes: Takes) -> None:
    guide = chat_guide(chat(tools=TOOLS, tool_choice="required"))
    for header in (IN_ROLE, IN_CHANNEL):
        for before in ("", THINK, THINK + PREAMBLE):
            assert takes(guide, f'{before}{header.format("get")}{{"city": "Ulm"}}<|call|>')
            assert takes(guide, f'{before}{header.format("get_number")}{{"n": 3}}<|call|>')
        plain = header.replace(" <|constrain|>json", "")
        assert takes(guide, f'{plain.format("get")}{{"city": "Ulm"}}<|call|>')
        first = f'{header.format("get")}{{"city": "Ulm"}}<|end|><|start|>assistant'
        assert takes(guide, f'{first}{THINK}{header.format("get_number")}{{"n": 3}}<|call|>')
    for wrong in (
        f"{FINAL}No.<|return|>",
        f'{IN_ROLE.format("get")}{{"n": 3}}<|call|>',
        f'{IN_ROLE.format("other")}{{"city": "x"}}<|call|>',
        f'{IN_ROLE.format("get_num")}{{"city": "x"}}<|call|>',
        f'{IN_ROLE.format("get")}{{"city": "x"}}<|return|>',
        f'{IN_ROLE.format("get")}{{"city": "x"}}<|end|>',
        f"{IN_ROLE.format('get')}<|call|>",
        f"{PREAMBLE}<|return|>",
    ):
        assert not takes(guide, wrong), wrong


def test_one_call_alone(takes: Takes) -> None:
    call = f'{IN_CHANNEL.format("get")}{{"city": "Ulm"}}'
    for choice in ("required", "auto"):
        guide = chat_guide(chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False))
        assert takes(guide, f"{call}<|call|>")
        assert not takes(guide, f"{call}<|end|><|start|>assistant{call}<|call|>")
        assert takes(guide, f"{THINK}{FINAL}Hello.<|return|>") == (choice == "auto")


def test_the_named_one(takes: Takes) -> None:
    named = {"type": "function", "function": {"name": "get_number"}}
    guide = chat_guide(chat(tools=[*TOOLS, {"type": "browser"}], tool_choice=named))
    assert takes(guide, f'{THINK}{IN_ROLE.format("get_number")}{{"n": 3}}<|call|>')
    assert not takes(guide, f'{IN_ROLE.format("get")}{{"city": "Ulm"}}<|call|>')
    assert not takes(guide, " to=browser.search<|channel|>analysis code<|message|>{}<|call|>")


def test_strict_arguments_follow_their_schema_whoever_chooses_the_call(takes: Takes) -> None:
    guide = chat_guide(chat(tools=[tool("get", strict=True), tool("free", NUMBER)]))
    assert takes(guide, f'{IN_ROLE.format("get")}{{"city": "Ulm"}}<|call|>')
    assert not takes(guide, f'{IN_ROLE.format("get")}{{"town": "Ulm"}}<|call|>')
    assert takes(guide, f'{IN_ROLE.format("free")}{{"town": "Ulm"}}<|call|>')
    assert takes(guide, f"{THINK}{PREAMBLE}{FINAL}Hello.<|return|>")


def test_a_function_without_parameters_takes_none(takes: Takes) -> None:
    guide = chat_guide(chat(tools=[tool("now", None)], tool_choice="required"))
    assert takes(guide, f"{IN_ROLE.format('now')}{{}}<|call|>")
    assert not takes(guide, f'{IN_ROLE.format("now")}{{"a": 1}}<|call|>')


def test_what_is_odd_in_a_schema_is_left_out_where_it_is_not_strict(takes: Takes) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    guide = chat_guide(chat(tools=[tool("f", odd)], tool_choice="required"))
    assert takes(guide, f'{IN_ROLE.format("f")}{{"a": "anything"}}<|call|>')
    assert not takes(guide, f'{IN_ROLE.format("f")}{{"a": 1}}<|call|>')


def test_gpt_oss_own_tools_may_be_called(takes: Takes) -> None:
    given = [{"type": "browser"}, {"type": "python"}, tool("get")]
    guide = chat_guide(chat(tools=given, tool_choice="required"))
    for header in (
        " to=browser.search<|channel|>analysis code<|message|>",
        "<|channel|>analysis to=browser.search code<|message|>",
        "<|channel|>analysis to=browser.open <|constrain|>json<|message|>",
        "<|channel|>analysis to=python code<|message|>",
        " to=python<|channel|>analysis<|message|>",
    ):
        assert takes(guide, f"{THINK}{header}print(1)<|call|>"), header


def test_where_no_tool_is_wanted_none_that_was_called_before_is_called(takes: Takes) -> None:
    request = chat(HISTORY, tools=TOOLS, tool_choice="none")
    guide = chat_guide(request)
    assert takes(guide, f"{THINK}{FINAL}Three.<|return|>")
    assert not takes(guide, f"{IN_ROLE.format('f')}{{}}<|call|>")
    assert chat_guide(chat(HISTORY, tools=TOOLS)) is None


@pytest.mark.parametrize(
    ("guide_type", "guide", "right", "wrong"),
    [
        ("json", "", "[1]", "1"),
        ("json_schema", '{"enum": ["a/b"]}', '"a/b"', '"a"'),
        ("regex", "[a-c]{2}/[0-9]", "ab/7", "ab/"),
        ("regex", "^(yes|no)$", "yes", "maybe"),
        ("lark", 'start: "x" word\nword: /[a-z]+/', "xyz", "x1"),
        ("ebnf_grammar", 'root ::= "yes" | "no" [0-9]\n', "no7", "no"),
    ],
)
def test_guides_hold_the_final_message(
    takes: Takes, guide_type: str, guide: str, right: str, wrong: str
) -> None:
    made = chat_guide(chat(guided_decoding_guide_type=guide_type, guided_decoding_guide=guide))
    assert takes(made, f"{THINK}{FINAL}{right}<|return|>")
    assert not takes(made, f"{THINK}{FINAL}{wrong}<|return|>")


# ---- raw prompts -------------------------------------------------------------------------------

YES = TextFormat("lark", text='start: "yes"')


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", f"{THINK}{FINAL}yes<|return|>"),
        ("<|start|>user<|message|>Hi<|end|>", f"<|start|>assistant{FINAL}yes<|return|>"),
        (
            "<|start|>assistant<|channel|>analysis<|message|>So",
            f" be it.<|end|><|start|>assistant{FINAL}yes<|return|>",
        ),
        ("<|start|>assistant<|channel|>final<|message|>", "yes<|return|>"),
        ("Once upon", "yes<|endoftext|>"),
    ],
)
def test_a_raw_prompt_is_gone_on_with(
    takes: Takes, loaded: Vocabulary, prompt: str, answer: str
) -> None:
    harmony = HarmonyFormat(loaded)
    guide = harmony.guide(harmony.render_raw(prompt), None, YES)
    assert takes(guide, answer)
    assert not takes(guide, answer.replace("yes", "no"))
    assert harmony.guide(harmony.render_raw(prompt), None) is None


def test_a_raw_prompt_that_leaves_off_elsewhere_is_refused(loaded: Vocabulary) -> None:
    harmony = HarmonyFormat(loaded)
    prompt = harmony.render_raw("<|start|>assistant<|channel|>comm")
    with pytest.raises(InvalidChat, match="guided_decoding_guide needs a raw prompt that ends"):
        harmony.guide(prompt, None, YES)


def test_in_the_raw_format_the_text_is_all(takes: Takes, loaded: Vocabulary) -> None:
    raw = RawFormat(loaded)
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "yes"}
    request = raw.parse_text("Once", **guided)
    prompt = raw.render_chat(request)
    for guide in (raw.guide(prompt, request), raw.guide(prompt, None, YES)):
        assert takes(guide, "yes<|endoftext|>")
        assert not takes(guide, "no<|endoftext|>")
    assert raw.guide(prompt, raw.parse_text("Once")) is None


def test_a_guide_is_as_long_as_the_engine_takes() -> None:
    many = [tool(f"f{i}", {"enum": ["x" * 3000]}) for i in range(25)]
    with pytest.raises(InvalidChat, match="tools must have at most 65536 characters as a grammar"):
        chat_guide(chat(tools=many, tool_choice="required"))


# ---- answers without any sense -----------------------------------------------------------------


def test_whatever_a_model_says_its_stream_is_what_was_asked_for(
    tokens: LLTokenizer, loaded: Vocabulary
) -> None:
    """Random tokens that may come, and of headers and texts any: content or calls fit."""
    harmony = HarmonyFormat(loaded)
    chance = random.Random(0)
    small = {
        "type": "object",
        "properties": {
            "a": {"enum": ["x", 1, None]},
            "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "c": {"type": "string", "maxLength": 5},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    }
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": small}}
    outcomes: set[str] = set()
    for number in range(60):
        fields: dict[str, Any] = [
            {"response_format": formats},
            {"tools": [tool("f", small)], "tool_choice": "required"},
            {"tools": [tool("f", small, strict=True)], "response_format": formats},
        ][number % 3]
        request = chat(**fields)
        matcher = started(tokens, chat_guide(request) or {})
        token_ids = _walk(matcher, chance)
        assert token_ids[-1] in STOP_TOKEN_IDS
        prompt = harmony.render_chat(request)
        stream = harmony.stream(harmony.stream_context(prompt, request))
        deltas = stream.push(token_ids, "stop")
        joined: dict[Any, str] = {}
        for delta in deltas:
            key = (delta.channel, delta.tool_call_index)
            joined[key] = joined.get(key, "") + delta.text
        reason = deltas[-1].finish_reason
        outcomes.add(str(reason))
        wanted = "content" if reason == "stop" else "tool_call"
        texts = [text for (channel, _), text in joined.items() if channel == wanted]
        assert texts
        for text in texts:
            value = json.loads(text)
            assert list(value) == ["a", "b", "c"]
            assert value["a"] in ("x", 1, None)
        assert not stream.repairs
    assert outcomes == {"stop", "tool_calls"}


def _walk(matcher: LLMatcher, chance: random.Random) -> list[int]:
    """Ends of messages and spaces are likelier than among 200,000 tokens: else none would come."""
    token_ids: list[int] = []
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:NUM_TOKENS])
        control = allowed[allowed >= 199_998]
        few = control if len(control) and chance.random() < 0.5 else allowed
        token_ids.append(int(few[chance.randrange(len(few))]))
        assert matcher.consume_token(token_ids[-1])
        assert len(token_ids) < 3000
    return token_ids


def test_guided_decoding_alone_is_none() -> None:
    assert guided_decoding(None, None) is None
    assert guided_decoding("", "") is None
