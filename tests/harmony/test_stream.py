"""The stream against the documents' table of faults, and against random token soup."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import openai_harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_harmony.stream import HarmonyStream, opening_of
from gptoss_harmony.types import ChatDelta, FinishReason
from gptoss_harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    FIRST_CONTROL,
    MESSAGE,
    NUM_TOKENS,
    RETURN,
    START,
    Vocabulary,
)

# The table's shorthand: S start, E end, M message, CH channel, CON constrain, R return.
SHORTHAND = {
    "S": START,
    "E": END,
    "M": MESSAGE,
    "CH": CHANNEL,
    "CON": CONSTRAIN,
    "R": RETURN,
    "CALL": CALL,
    "EOT": END_OF_TEXT,
    "RESERVED": 200_013,
    "BEYOND": NUM_TOKENS + 5,
}


@dataclass
class Answer:
    """An answer's deltas, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, deltas: Sequence[ChatDelta]) -> "Answer":
        answer = cls()
        for delta in deltas:
            assert answer.finish_reason is None, "a delta after the last"
            answer.finish_reason = delta.finish_reason
            if delta.channel == "reasoning":
                answer.reasoning += delta.text
            elif delta.channel == "content":
                answer.content += delta.text
            elif delta.tool_call_index == len(answer.calls):
                answer.calls.append((delta.recipient or "", delta.text))
            else:
                assert delta.tool_call_index == len(answer.calls) - 1
                name, arguments = answer.calls[-1]
                assert delta.recipient == name
                answer.calls[-1] = (name, arguments + delta.text)
        return answer


def tokens(vocabulary: Vocabulary, *parts: str | int | bytes) -> list[int]:
    """Shorthand words become control tokens, other text ordinary ones, bytes byte tokens."""
    token_ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
        elif isinstance(part, bytes):
            token_ids += [vocabulary.token_bytes.index(bytes([byte])) for byte in part]
        elif part in SHORTHAND:
            token_ids.append(SHORTHAND[part])
        else:
            token_ids += vocabulary.encode(part)
    return token_ids


def call_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def read(
    vocabulary: Vocabulary,
    parts: Sequence[str | int | bytes],
    finish_reason: FinishReason = "stop",
    *,
    one_by_one: bool = False,
    **options: Any,
) -> tuple[Answer, HarmonyStream]:
    options = {"tool_names": ("f", "now"), **options}
    stream = HarmonyStream(vocabulary, new_call_id=call_ids(), **options)
    token_ids = tokens(vocabulary, *parts)
    chunks = [[token_id] for token_id in token_ids] if one_by_one else [token_ids]
    deltas = [delta for chunk in chunks for delta in stream.push(chunk)]
    deltas += stream.push([], finish_reason)
    return Answer.of(deltas), stream


CALL_F = ("CH", "commentary to=functions.f ", "CON", "json", "M", '{"a":1}', "CALL")
A_CALL = Answer(calls=[("f", '{"a":1}')], finish_reason="tool_calls")
NEXT = ("E", "S", "assistant")
FINAL_X = ("CH", "final", "M", "x", "R")
TABLE: list[tuple[str, tuple[Any, ...], FinishReason, Answer]] = [
    # Ends of every kind.
    *(
        (f"answer, {end}", ("CH", "final", "M", "Answer", *end), "stop", Answer("", "Answer"))
        for end in [
            ("E", "R"),
            ("R",),
            ("E", "E"),
            ("E", "CALL"),
            ("CALL",),
            ("EOT",),
            (),
            ("E", " and plain words", "R"),
            ("E", " and plain words"),
        ]
    ),
    # Resynchronising.
    (
        "a doubled start",
        ("CH", "analysis", "M", "t", "E", "S", "S", "assistant", "CH", "final", "M", "x"),
        "stop",
        Answer("t", "x"),
    ),
    (
        "a digit before start",
        ("CH", "analysis", "M", "t", "E", "7", "S", "assistant", *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    ("a channel without a name", ("CH", "M", "text"), "stop", Answer("", "text")),
    ("no channel at all", ("M", "text", "R"), "stop", Answer("", "text")),
    ("an unknown channel", ("CH", "thoughts", "M", "text", "R"), "stop", Answer("", "text")),
    (
        "an unknown channel before the answer",
        ("CH", "thoughts", "M", "t", *NEXT, *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    (
        "no start between messages",
        ("CH", "analysis", "M", "t", "E", *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    (
        "no end between messages",
        ("CH", "analysis", "M", "t", "S", "assistant", *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    (
        "a channel inside content",
        ("CH", "analysis", "M", "t", *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    (
        "no role",
        ("CH", "analysis", "M", "t", "E", "S", *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    (
        "channel glued to the role",
        ("CH", "analysis", "M", "t", "E", "S", "assistantfinal", "M", "x", "R"),
        "stop",
        Answer("t", "x"),
    ),
    ("a doubled channel", ("CH", "final", *FINAL_X), "stop", Answer("", "x")),
    ("a doubled message", ("CH", "final", "M", "M", "x", "R"), "stop", Answer("", "x")),
    # Text where no text is due is an answer, if there is no other.
    (
        "prose, then analysis and final",
        ("Let me think.", *NEXT, "CH", "analysis", "M", "Hm.", *NEXT, *FINAL_X),
        "stop",
        Answer("Let me think.\nHm.", "x"),
    ),
    ("prose alone", ("It is 42.", "R"), "stop", Answer("", "It is 42.")),
    ("prose, cut", ("It is",), "length", Answer("", "It is")),
    (
        "prose after the reasoning",
        ("CH", "analysis", "M", "t", "E", "It is 42.", "R"),
        "stop",
        Answer("t", "It is 42."),
    ),
    (
        "prose after start",
        ("CH", "analysis", "M", "t", *NEXT, "It is 42.", "R"),
        "stop",
        Answer("t", "It is 42."),
    ),
    ("no message token", ("CH", "final", " It is 42.", "R"), "stop", Answer("", "It is 42.")),
    # Broken headers.
    ("a header cut", ("CH", "fin"), "length", Answer()),
    ("a whole header cut", ("CH", "final"), "length", Answer()),
    ("a recipient cut", (" to",), "length", Answer()),
    ("a later recipient cut", ("CH", "analysis", "M", "t", *NEXT, " to"), "length", Answer("t")),
    (
        "a broken header",
        ("CH", "??", *NEXT, "CH", "analysis", "M", "t", *NEXT, *FINAL_X),
        "stop",
        Answer("t", "x"),
    ),
    ("nothing", (), "stop", Answer()),
    ("only an end", ("R",), "stop", Answer()),
    # Others' words are not the assistant's.
    (
        "a user's message",
        (
            "CH",
            "final",
            "M",
            "x",
            "E",
            "S",
            "user",
            "M",
            "Go on",
            *NEXT,
            "CH",
            "final",
            "M",
            "y",
            "R",
        ),
        "stop",
        Answer("", "x\ny"),
    ),
    (
        "a tool's result",
        (
            "S",
            "functions.f to=assistant",
            "CH",
            "commentary",
            "M",
            "{}",
            *NEXT,
            "CH",
            "final",
            "M",
            "y",
            "R",
        ),
        "stop",
        Answer("", "y"),
    ),
    # Calls.
    (
        "a note to the assistant itself",
        ("CH", "commentary to=assistant", "M", "note", *NEXT, *FINAL_X),
        "stop",
        Answer("note", "x"),
    ),
    (
        "recipient in the role",
        ("S", "assistant to=functions.f", "CH", "commentary ", *CALL_F[2:]),
        "stop",
        A_CALL,
    ),
    (
        "recipient at once",
        (" to=functions.f", "CH", "commentary ", "CON", "json", "M", '{"a":1}', "CALL"),
        "stop",
        A_CALL,
    ),
    ("recipient in the channel", CALL_F, "stop", A_CALL),
    (
        "constrain without its space",
        ("CH", "commentary to=functions.f", "CON", "json", "M", '{"a":1}', "CALL"),
        "stop",
        A_CALL,
    ),
    ("no constrain", ("CH", "commentary to=functions.f", *CALL_F[4:]), "stop", A_CALL),
    ("json as a word", ("CH", "commentary to=functions.f json", *CALL_F[4:]), "stop", A_CALL),
    (
        "json as a word of the role",
        (" to=functions.f json", "CH", "commentary", *CALL_F[4:]),
        "stop",
        A_CALL,
    ),
    (
        "constrained twice over",
        ("CH", "commentary to=functions.f ", "CON", "json ", "CON", "json", *CALL_F[4:]),
        "stop",
        A_CALL,
    ),
    ("a call on analysis", ("CH", "analysis to=functions.f", *CALL_F[4:]), "stop", A_CALL),
    ("a call on no channel", (" to=functions.f", *CALL_F[4:]), "stop", A_CALL),
    ("a bare name", ("CH", "commentary to=f ", *CALL_F[2:]), "stop", A_CALL),
    (
        "a control token after the name",
        ("CH", "commentary to=functions.f", "RESERVED", "x ", *CALL_F[2:]),
        "stop",
        A_CALL,
    ),
    (
        "a channel token after the name",
        (" to=functions.f", "CH", "CH", "commentary", *CALL_F[4:]),
        "stop",
        A_CALL,
    ),
    (
        "a control token spelled out after the name",
        ("CH", "commentary to=functions.f<|constrain|>json", *CALL_F[4:]),
        "stop",
        A_CALL,
    ),
    (
        "a function that was not offered",
        ("CH", "commentary to=functions.g", "M", "{}", "CALL"),
        "stop",
        Answer("{}"),
    ),
    ("no call token", CALL_F[:-1], "stop", A_CALL),
    ("no call token, cut", CALL_F[:-1], "length", replace(A_CALL, finish_reason="length")),
    (
        "half the JSON, cut",
        ("CH", "commentary to=functions.f", "M", '{"a"'),
        "length",
        Answer(calls=[("f", '{"a"')]),
    ),
    (
        "half the JSON, ended by nothing",
        ("CH", "commentary to=functions.f", "M", '{"a"'),
        "stop",
        Answer(calls=[("f", '{"a"')], finish_reason="length"),
    ),
    (
        "no arguments",
        (" to=functions.now", "CH", "commentary", "M", "CALL"),
        "stop",
        Answer(calls=[("now", "{}")], finish_reason="tool_calls"),
    ),
    (
        "no arguments and no message",
        (" to=functions.now", "CH", "commentary", "CALL"),
        "stop",
        Answer(calls=[("now", "{}")], finish_reason="tool_calls"),
    ),
    (
        "no arguments and no message, ended like a text",
        (" to=functions.now", "CH", "commentary", *NEXT, *FINAL_X),
        "stop",
        Answer("", "x", [("now", "{}")], "tool_calls"),
    ),
    (
        "a call's header, cut",
        (" to=functions.now", "CH", "commentary"),
        "length",
        Answer(),
    ),
    (
        "constrain before the channel",
        (" to=functions.f ", "CON", "json", "CH", "commentary", *CALL_F[4:]),
        "stop",
        A_CALL,
    ),
    ("constrain before a text's channel", ("CON", "CH", "analysis", "M", "t"), "stop", Answer("t")),
    (
        "no arguments, cut",
        (" to=functions.now", "CH", "commentary", "M"),
        "length",
        Answer(calls=[("now", "")]),
    ),
    (
        "arguments without a message token",
        ("CH", "commentary to=functions.f ", "CON", 'json{"a":1}', "CALL"),
        "stop",
        A_CALL,
    ),
    (
        "reasoning, a preamble, a call",
        (
            "CH",
            "analysis",
            "M",
            "t",
            *NEXT,
            "CH",
            "commentary",
            "M",
            "Let me look.",
            *NEXT,
            *CALL_F,
        ),
        "stop",
        replace(A_CALL, reasoning="t", content="Let me look."),
    ),
    (
        "two calls",
        (*CALL_F[:-1], *NEXT, "CH", "commentary to=functions.now", "M", "CALL"),
        "stop",
        Answer(calls=[("f", '{"a":1}'), ("now", "{}")], finish_reason="tool_calls"),
    ),
    (
        "two calls and nothing between",
        (*CALL_F[:-1], "S", "assistant", "CH", "commentary to=functions.now", "M", "CALL"),
        "stop",
        Answer(calls=[("f", '{"a":1}'), ("now", "{}")], finish_reason="tool_calls"),
    ),
    ("JSON as the answer", ("CH", "final", "M", '{"x":[]}', "R"), "stop", Answer("", '{"x":[]}')),
    # Characters.
    (
        "a lone byte, then text, then a message",
        ("CH", "analysis", "M", b"\xe2", "ab", b"\xf0\x9f", *NEXT, "CH", "final", "M", "ok", "R"),
        "stop",
        Answer("\ufffdab\ufffd", "ok"),
    ),
    (
        "the limit inside a character",
        ("CH", "final", "M", "ok", "😀".encode()[:3]),
        "length",
        Answer("", "ok\ufffd"),
    ),
    (
        "characters over many tokens",
        ("CH", "final", "M", "👩‍🚀".encode(), " 中文 ä", "日".encode(), "R"),
        "stop",
        Answer("", "👩‍🚀 中文 ä日"),
    ),
    (
        "half a character never meets the next message",
        (
            "CH",
            "final",
            "M",
            "😀".encode()[:2],
            *NEXT,
            "CH",
            "analysis",
            "M",
            "😀".encode()[2:],
            "R",
        ),
        "stop",
        Answer("\ufffd\ufffd", "\ufffd"),
    ),
    # Ids that the model has no text for.
    (
        "ids beyond the vocabulary",
        ("BEYOND", "CH", -1, "final", "M", "a", "BEYOND", "b", "R"),
        "stop",
        Answer("", "ab"),
    ),
    (
        "reserved ids inside content",
        ("CH", "final", "M", "a", "RESERVED", "b", "CON", "c", "R"),
        "stop",
        Answer("", "abc"),
    ),
    # Ends that the engine alone knows.
    ("all in reasoning", ("CH", "analysis", "M", "Let me"), "length", Answer("Let me")),
    ("aborted", ("CH", "final", "M", "x"), "abort", Answer("", "x")),
    ("failed", ("CH", "final", "M", "x"), "error", Answer("", "x")),
    ("a call, aborted", CALL_F[:-1], "abort", replace(A_CALL, finish_reason="abort")),
    (
        "several in one chunk",
        ("CH", "analysis", "M", "t", *NEXT, "CH", "final", "M", "Hi", "R"),
        "stop",
        Answer("t", "Hi"),
    ),
]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "one by one"])
@pytest.mark.parametrize(
    ("parts", "finish_reason", "expected"),
    [case[1:] for case in TABLE],
    ids=[case[0] for case in TABLE],
)
def test_the_table_of_faults(
    loaded: Vocabulary,
    parts: tuple[Any, ...],
    finish_reason: FinishReason,
    expected: Answer,
    one_by_one: bool,
) -> None:
    answer, stream = read(loaded, parts, finish_reason, one_by_one=one_by_one)
    if expected.finish_reason is None:
        expected = replace(expected, finish_reason=finish_reason)
    assert answer == expected
    assert stream.finish_reason == expected.finish_reason


STOP_WORDS: list[tuple[str, tuple[Any, ...], Answer]] = [
    ("in analysis", ("CH", "analysis", "M", "an END", "R"), Answer("an END", "")),
    ("in final", ("CH", "final", "M", "an END of", "R"), Answer("", "an ")),
    ("in a preamble", ("CH", "commentary", "M", "an END of", "R"), Answer("", "an ")),
    ("over tokens", ("CH", "final", "M", "an E", "N", "D of", "R"), Answer("", "an ")),
    ("only begun", ("CH", "final", "M", "an EN", "R"), Answer("", "an EN")),
    ("begun twice", ("CH", "final", "M", "EEN", "END", "R"), Answer("", "EEN")),
    (
        "across a header",
        ("CH", "commentary", "M", "an EN", *NEXT, "CH", "final", "M", "D x", "R"),
        Answer("", "an EN\nD x"),
    ),
    ("in a header", ("CH", "final END", "M", "x", "R"), Answer("", "x")),
    ("the control token of that name", ("CH", "final", "M", "x", "E", "R"), Answer("", "x")),
    ("in arguments", ("CH", "commentary to=functions.f", "M", '{"END":1}', "CALL"), A_CALL),
    ("in an answer without a header", ("an END of", "R"), Answer("", "an ")),
    ("the first of several", ("CH", "final", "M", "a STOP b END", "R"), Answer("", "a ")),
    ("as the first thing", ("CH", "final", "M", "END", "R"), Answer("", "")),
]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "one by one"])
@pytest.mark.parametrize(
    ("parts", "expected"), [case[1:] for case in STOP_WORDS], ids=[case[0] for case in STOP_WORDS]
)
def test_stop_words_match_visible_text_alone(
    loaded: Vocabulary, parts: tuple[Any, ...], expected: Answer, one_by_one: bool
) -> None:
    answer, _ = read(loaded, parts, one_by_one=one_by_one, stop_words=("END", "STOP"))
    if expected.calls:
        expected = replace(expected, calls=[("f", '{"END":1}')])
    assert answer == replace(expected, finish_reason=expected.finish_reason or "stop")


def test_a_stop_word_ends_the_answer_before_the_engine_does(loaded: Vocabulary) -> None:
    stream = HarmonyStream(loaded, stop_words=("END",))
    assert stream.finish_reason is None
    deltas = stream.push(tokens(loaded, "CH", "final", "M", "one END two"))
    assert Answer.of(deltas) == Answer("", "one ", finish_reason="stop")
    assert stream.finish_reason == "stop"
    assert stream.push(tokens(loaded, " three"), "length") == []


def test_text_that_may_begin_a_stop_word_is_held_back_and_no_more(loaded: Vocabulary) -> None:
    stream = HarmonyStream(loaded, stop_words=("END",))
    assert Answer.of(stream.push(tokens(loaded, "CH", "final", "M", "an E"))).content == "an "
    assert Answer.of(stream.push(tokens(loaded, "N"))).content == ""
    assert Answer.of(stream.push(tokens(loaded, "O"))).content == "ENO"


def test_text_comes_as_soon_as_its_characters_are_whole(loaded: Vocabulary) -> None:
    stream = HarmonyStream(loaded)
    stream.push(tokens(loaded, "CH", "final", "M"))
    texts = [
        "".join(delta.text for delta in stream.push([token_id]))
        for token_id in tokens(loaded, "a", "😀".encode(), " b")
    ]
    assert texts == ["a", "", "", "", "😀", " b"]


def test_a_call_is_announced_before_its_arguments(loaded: Vocabulary) -> None:
    stream = HarmonyStream(loaded, tool_names=("f",), new_call_id=lambda: "call_x")
    first = stream.push(tokens(loaded, *CALL_F[:5]))
    assert first == [ChatDelta("tool_call", "", recipient="f", tool_call_id="call_x")]
    rest = stream.push(tokens(loaded, *CALL_F[5:]), "stop")
    assert [(delta.channel, delta.text) for delta in rest] == [
        ("tool_call", '{"a":1}'),
        ("content", ""),
    ]


def test_call_ids_differ(loaded: Vocabulary) -> None:
    streams = [HarmonyStream(loaded, tool_names=("f",)) for _ in range(2)]
    call_ids = [stream.push(tokens(loaded, *CALL_F))[0].tool_call_id for stream in streams]
    assert all(call_id and call_id.startswith("call_") for call_id in call_ids)
    assert call_ids[0] != call_ids[1]


@pytest.mark.parametrize(
    ("parts", "repairs"),
    [
        (("CH", "analysis", "M", "t", *NEXT, *FINAL_X), {}),
        (CALL_F, {}),
        (("CH", "final", "M", "x", "E", "9", "R"), {"stray_text": 1, "stray_token": 1}),
        (
            ("CH", "final", "M", "x", "RESERVED", "BEYOND"),
            {"stray_token": 1, "out_of_vocabulary": 1},
        ),
        (("CH", "?", "E"), {"broken_header": 1}),
        (("CH", "final words", "R"), {"missing_message": 1}),
        (("CH", "M", "x", "R"), {"missing_channel": 1}),
        (("CH", "analysis", "M", "t", "E", "CH", "final", "M", "x"), {"missing_start": 1}),
        (("CH", "analysis", "M", "t", "S", "assistant", "CH", "final", "M"), {"missing_end": 1}),
        (("S", "user", "M", "x", "R"), {"broken_header": 1, "foreign_role": 1}),
        (("CH", "commentary to=functions.g", "M", "CALL"), {"unknown_tool": 1}),
        (("CH", "commentary to=f", "M", "CALL"), {"bare_tool_name": 1}),
    ],
)
def test_repairs_are_counted_by_kind(
    loaded: Vocabulary, parts: tuple[Any, ...], repairs: dict[str, int]
) -> None:
    _, stream = read(loaded, parts)
    assert dict(stream.repairs) == repairs


def test_tokens_are_counted_by_channel(loaded: Vocabulary) -> None:
    parts = ("CH", "analysis", "M", "one two three", *NEXT, "CH", "commentary", "M")
    parts = (*parts, "four five", *NEXT, *CALL_F)
    _, stream = read(loaded, parts)
    num_tokens = {"reasoning": 3, "content": 2, "tool_call": len(loaded.encode('{"a":1}'))}
    assert dict(stream.num_tokens) == num_tokens


def test_content_positions_point_at_the_tokens_of_content(loaded: Vocabulary) -> None:
    stream = HarmonyStream(loaded)
    stream.push(tokens(loaded, "CH", "analysis", "M", "t"))
    assert stream.content_positions == []
    chunk = tokens(loaded, *NEXT, "CH", "final", "M", "one two", "E")
    stream.push(chunk)
    texts = [loaded.token_bytes[chunk[position]] for position in stream.content_positions]
    assert texts == [b"one", b" two"]
    stream.push([], "stop")
    assert stream.content_positions == []


# Raw prompts: the answer goes on where the prompt leaves off.
@pytest.mark.parametrize(
    ("prompt", "parts", "expected"),
    [
        (("S", "user", "M", "Hi", *NEXT), ("CH", "final", "M", "x"), ("", "x")),
        (("S", "assistant", "CH", "final", "M", "The answer"), (" is 4",), ("", " is 4")),
        (("S", "assistant", "CH", "analysis", "M", "Hm"), ("!", "E", "M", "x"), ("!", "x")),
        (("S", "assistant", "CH"), ("analysis", "M", "x"), ("x", "")),
        (("S", "user", "M", "Hi", "E"), ("S", "assistant", "CH", "final", "M", "x"), ("", "x")),
        (("S", *FINAL_X[:-1], "E"), ("S", "assistant", "CH", "final", "M", "y"), ("", "y")),
        (("S", "assistant", *FINAL_X[:-1]), ("E", *NEXT[1:], *FINAL_X), ("", "x")),
        (("Once upon",), (" a time", "R"), ("", " a time")),
    ],
)
def test_an_opening_sets_the_state(
    loaded: Vocabulary, prompt: tuple[str, ...], parts: tuple[str, ...], expected: tuple[str, str]
) -> None:
    opening = opening_of(tokens(loaded, *prompt), loaded)
    answer, stream = read(loaded, parts, opening=opening)
    assert (answer.reasoning, answer.content) == expected
    assert sum(stream.num_tokens.values()) <= len(tokens(loaded, *parts))


def test_a_raw_prompt_offers_every_function(loaded: Vocabulary) -> None:
    answer, _ = read(
        loaded, ("CH", "commentary to=functions.anything", "M", "{}", "CALL"), tool_names=None
    )
    assert answer.calls == [("anything", "{}")]
    answer, _ = read(loaded, ("CH", "commentary to=python", "M", "{}", "CALL"), tool_names=None)
    assert answer == Answer("{}", finish_reason="stop")


# Random traffic. Fragments are what models really emit, in any order; the cut is arbitrary.
FRAGMENTS: list[str | int | bytes] = [
    *("S", "E", "M", "CH", "CON", "R", "CALL", "EOT", "RESERVED", "BEYOND", -3, 200_000, 2**31),
    *("assistant", "user", "functions.f", "analysis", "commentary", "final", "json", " to="),
    *(
        " to=functions.f",
        " to=f",
        "to=functions.nope",
        "functions.",
        '{"a":',
        "1}",
        "{}",
        " ",
        "\n",
    ),
    *("Hello", " END", " EN", "D", "中", "😀", b"\xf0", b"\x9f", b"\x80", b"\xff", b"\xe2"),
]
WELL_FORMED: list[tuple[str | int | bytes, ...]] = [
    ("CH", "analysis", "M", "thinking", *NEXT),
    ("CH", "final", "M", "The END of 😀", "R"),
    ("CH", "commentary", "M", "Let me look.", *NEXT),
    CALL_F,
]
SOUP = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS).map(lambda part: (part,)),
        st.sampled_from(WELL_FORMED),
        st.integers(0, FIRST_CONTROL - 1).map(lambda token_id: (token_id,)),
    ),
    max_size=25,
).map(lambda groups: [part for group in groups for part in group])
CUTS = st.lists(st.integers(1, 7), max_size=60)
REASONS: list[FinishReason] = ["stop", "length", "abort", "error"]


def joined(deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
    merged: list[ChatDelta] = []
    for delta in deltas:
        if merged and replace(merged[-1], text="") == replace(delta, text=""):
            merged[-1] = replace(merged[-1], text=merged[-1].text + delta.text)
        elif delta.text or delta.finish_reason or delta.channel == "tool_call":
            merged.append(delta)
    return merged


@given(
    parts=SOUP,
    cuts=CUTS,
    reason=st.sampled_from(REASONS),
    stop_words=st.sampled_from([(), ("END",), ("END", "N", "😀", "D\nH")]),
    tool_names=st.sampled_from([(), ("f",), None]),
)
@settings(max_examples=1500, deadline=None)
def test_any_cut_of_any_stream_gives_the_same_events(
    loaded: Vocabulary,
    parts: list[str | int | bytes],
    cuts: list[int],
    reason: FinishReason,
    stop_words: tuple[str, ...],
    tool_names: tuple[str, ...] | None,
) -> None:
    token_ids = tokens(loaded, *parts)
    seen: list[Any] = []
    for sizes in (cuts, [], itertools.repeat(1)):
        stream = HarmonyStream(
            loaded, tool_names=tool_names, stop_words=stop_words, new_call_id=call_ids()
        )
        deltas: list[ChatDelta] = []
        content_tokens: list[int] = []
        num_taken = 0
        rest = token_ids
        for size in sizes:
            if not rest:
                break
            chunk, rest = rest[:size], rest[size:]
            deltas += stream.push(chunk)
            content_tokens += [chunk[position] for position in stream.content_positions]
            num_taken += stream.num_taken
        deltas += stream.push(rest, reason)
        content_tokens += [rest[position] for position in stream.content_positions]
        num_taken += stream.num_taken
        events = joined(deltas)
        assert [delta.finish_reason for delta in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == stream.finish_reason
        assert stream.push([1, 2, 3], "stop") == []
        assert stream.num_taken == 0
        text = "".join(delta.text for delta in events)
        assert not any(control in text for control in ("<|start|>", "<|end|>", "<|message|>"))
        counts = (num_taken, dict(stream.repairs), +stream.num_tokens)
        assert stop_words or num_taken == len(token_ids)
        seen.append((events, counts, content_tokens))
    assert seen[0] == seen[1] == seen[2]


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["analysis", "commentary", "final", "call"]),
        st.text(min_size=1, max_size=30).filter(lambda text: "\ufffd" not in text),
    ),
    min_size=1,
    max_size=5,
)


@given(messages=MESSAGES)
@settings(max_examples=150, deadline=None)
def test_well_formed_answers_are_read_as_openai_harmony_reads_them(
    loaded: Vocabulary, messages: list[tuple[str, str]]
) -> None:
    token_ids: list[int] = []
    for channel, text in messages:
        is_call = channel == "call"
        header = "commentary to=functions.f " if is_call else channel
        parts = ["S", "assistant", "CH", header, *(["CON", "json"] if is_call else []), "M"]
        text = json.dumps({"text": text}) if is_call else text
        token_ids += [*tokens(loaded, *parts), *loaded.encode(text), END]
    token_ids = token_ids[2:-1]  # after the prompt's start and role, before the last end
    oracle = openai_harmony.StreamableParser(
        loaded.encoding, openai_harmony.Role.ASSISTANT, strict=True
    )
    for token_id in token_ids:
        oracle.process(token_id)
    oracle.process_eos()
    read_by_oracle = Answer(finish_reason="stop")
    for message in oracle.messages:
        text = "".join(getattr(content, "text", "") for content in message.content)
        if message.recipient:
            read_by_oracle.calls.append((message.recipient.removeprefix("functions."), text))
            read_by_oracle.finish_reason = "tool_calls"
        elif message.channel == "analysis":
            read_by_oracle.reasoning += ("\n" if read_by_oracle.reasoning else "") + text
        else:
            read_by_oracle.content += ("\n" if read_by_oracle.content else "") + text
    stream = HarmonyStream(loaded, tool_names=("f",))
    assert Answer.of(stream.push(token_ids, "stop")) == read_by_oracle
    assert not stream.repairs


@pytest.mark.parametrize("filler", [" ", "to=", "word ", "to= "])
@pytest.mark.parametrize("header", [("CH",), ("CON",), ()])
def test_an_endless_header_costs_no_more_than_its_length(
    loaded: Vocabulary, header: tuple[str, ...], filler: str
) -> None:
    parts = (*header, filler * 100_000)
    start = time.process_time()
    answer, _ = read(loaded, parts, "length")
    assert time.process_time() - start < 1.0
    assert answer.finish_reason == "length"


def test_a_token_costs_microseconds(loaded: Vocabulary) -> None:
    text = "The quick brown fox jumps over the lazy dog. 中文 😀 " * 500
    token_ids = tokens(loaded, "CH", "final", "M", text)
    best = float("inf")
    for _ in range(3):
        stream = HarmonyStream(loaded)
        start = time.process_time()
        content = "".join(d.text for token_id in token_ids for d in stream.push([token_id]))
        best = min(best, time.process_time() - start)
        assert content == text
    assert best / len(token_ids) < 20e-6, "four times what a quiet machine takes"
