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
    options = {"tool_names": ("f", "now", "get_code"), **options}
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
    (
        "a digit before start, and no answer",
        ("CH", "analysis", "M", "t", "E", "7", "S", "assistant", "CH", "analysis", "M", "u"),
        "length",
        Answer("t\nu"),
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
    # A recipient, however it is spelled.
    *(
        (f"the recipient in {' '.join(header)}", (*header, "M", '{"a":1}', "CALL"), "stop", A_CALL)
        for header in [
            ("CH", "commentary to= functions.f"),
            ("CH", 'commentary to="functions.f"'),
            ("CH", "commentary to=functions.f, "),
            ("CH", "commentary to=functions.f()"),
            ("CH", "commentary to=functions.f. json"),
            ("CH", "commentary to=functions.fjson"),
            ("CH", "to=functions.f commentary"),
            ("CH", "commentary", "CON", " to=functions.f json"),
            ("CH", "commentary", "CON", "json to=functions.f"),
            ("CH", "commentary code to=functions.f"),
            ("CH", "commentary", "CH", "commentary to=functions.f"),
            ("CH", "--commentary to=functions.f"),
            # <|channel|> is missing, its name is not.
            (" to=functions.fcommentary", "CON", "json"),
            (" to=functions.f commentary json",),
            ("commentary to=functions.f", "CON", "json"),
            ("S", "assistantcommentary to=functions.f"),
            ("S", "commentary to=functions.f json"),
        ]
    ),
    (
        "arguments glued to the name",
        ("CH", "commentary to=functions.f", '{"a":1}', "CALL"),
        "stop",
        A_CALL,
    ),
    (
        "a name that ends in a content type",
        ("CH", "commentary to=functions.get_code", "M", "{}", "CALL"),
        "stop",
        Answer(calls=[("get_code", "{}")], finish_reason="tool_calls"),
    ),
    (
        "another namespace",
        ("CH", "commentary to=tools.f", "M", "{}", "CALL"),
        "stop",
        Answer("{}"),
    ),
    (
        "a call to the user",
        ("CH", "commentary to=user", "M", "Hello", "E"),
        "stop",
        Answer("", "Hello"),
    ),
    # A channel, however it is spelled.
    *(
        (f"the channel {name!r}", ("CH", name, "M", "t", *NEXT, *FINAL_X), "stop", Answer("t", "x"))
        for name in ("Analysis", "ANALYSIS ", "analysisanalysis", "--analysis", "analysis code")
    ),
    (
        "a content type and no message token",
        ("CH", "final", "CON", "x", "R"),
        "stop",
        Answer("", "x"),
    ),
    ("a content type, cut", ("CH", "final", "CON", "js"), "length", Answer()),
    ("a content type as a word, cut", ("CH", "final js"), "length", Answer()),
    ("a recipient cut after a channel", ("CH", "commentary to"), "length", Answer()),
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
        (("CH", "commentary to=functions.fjson", "M", "CALL"), {"glued_tool_name": 1}),
    ],
)
def test_repairs_are_counted_by_kind(
    loaded: Vocabulary, parts: tuple[Any, ...], repairs: dict[str, int]
) -> None:
    _, stream = read(loaded, parts)
    assert dict(stream.repairs) == repairs


@pytest.mark.parametrize(
    ("parts", "reason", "calls"),
    [
        (CALL_F, "stop", {"whole": 1}),
        ((*CALL_F[:-1], *NEXT, *CALL_F), "stop", {"whole": 2}),
        (CALL_F[:-1], "length", {"whole": 1}),  # only its end is missing
        (("CH", "commentary to=functions.now", "M", "CALL"), "stop", {"whole": 1}),
        (("CH", "commentary to=functions.f", "M", '{"a":', "CALL"), "stop", {"invalid": 1}),
        (("CH", "commentary to=functions.f", "M", "[1]", "CALL"), "stop", {"invalid": 1}),
        (("CH", "commentary to=functions.f", "M", '{"a":'), "length", {"cut": 1}),
        (("CH", "commentary to=functions.f", "M", '{"a":'), "stop", {"cut": 1}),
        (("CH", "commentary to=functions.f", "M", '{"a":'), "abort", {"cut": 1}),
        (("CH", "commentary to=functions.g", "M", "{}", "CALL"), "stop", {"unknown": 1}),
        (("CH", "analysis to=python code", "M", "1+1", "CALL"), "stop", {"unknown": 1}),
        (FINAL_X, "stop", {}),
    ],
)
def test_calls_are_counted_by_outcome(
    loaded: Vocabulary, parts: tuple[Any, ...], reason: FinishReason, calls: dict[str, int]
) -> None:
    _, stream = read(loaded, parts, reason)
    assert dict(stream.calls) == calls


BUILTINS = ("browser.search", "browser.open", "browser.find", "python")
BUILTIN_CALLS: list[tuple[tuple[Any, ...], FinishReason, Answer]] = [
    (
        ("CH", "analysis to=python code", "M", 'print("é")\n', "CALL"),
        "stop",
        Answer(calls=[("python", '{"code": "print(\\"é\\")\\n"}')], finish_reason="tool_calls"),
    ),
    (
        (" to=python", "CH", "analysis code", "M", "1", "CALL"),
        "stop",
        Answer(calls=[("python", '{"code": "1"}')], finish_reason="tool_calls"),
    ),
    (
        ("CH", "analysis to=python code", "M", "1 + "),
        "length",
        Answer(calls=[("python", '{"code": "1 + ')]),
    ),
    (
        ("CH", "analysis to=python code", "M", "CALL"),
        "stop",
        Answer(calls=[("python", '{"code": ""}')], finish_reason="tool_calls"),
    ),
    (
        ("CH", "analysis to=functions.python", "M", "1", "CALL"),
        "stop",
        Answer(calls=[("python", '{"code": "1"}')], finish_reason="tool_calls"),
    ),
    (
        ("CH", "analysis to=browser.search code", "M", '{"query":"x"}', "CALL"),
        "stop",
        Answer(calls=[("browser.search", '{"query":"x"}')], finish_reason="tool_calls"),
    ),
    (
        ("CH", "commentary to=functions.browser.open", "M", "CALL"),
        "stop",
        Answer(calls=[("browser.open", "{}")], finish_reason="tool_calls"),
    ),
    (
        ("CH", "analysis to=browser.click", "M", "{}", *NEXT, *FINAL_X),
        "stop",
        Answer("{}", "x"),
    ),
    (
        ("CH", "analysis to=browser.find", "M", "{}", *NEXT, *CALL_F),
        "stop",
        Answer(calls=[("browser.find", "{}"), ("f", '{"a":1}')], finish_reason="tool_calls"),
    ),
]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "one by one"])
@pytest.mark.parametrize(("parts", "reason", "expected"), BUILTIN_CALLS)
def test_builtin_tools_calls_come_out_as_calls(
    loaded: Vocabulary,
    parts: tuple[Any, ...],
    reason: FinishReason,
    expected: Answer,
    one_by_one: bool,
) -> None:
    answer, _ = read(loaded, parts, reason, one_by_one=one_by_one, builtin_names=BUILTINS)
    assert answer == replace(expected, finish_reason=expected.finish_reason or reason)


def test_builtin_tools_that_nobody_offered_get_no_call(loaded: Vocabulary) -> None:
    for recipient in BUILTINS:
        parts = ("CH", f"analysis to={recipient} code", "M", "1", *NEXT, *FINAL_X)
        answer, _ = read(loaded, parts)
        assert answer == Answer("1", "x", finish_reason="stop")


def test_a_function_named_python_is_no_program(loaded: Vocabulary) -> None:
    answer, _ = read(loaded, ("CH", "commentary to=python", "M", "{}"), tool_names=("python",))
    assert answer.calls == [("python", "{}")]


def test_tokens_are_counted_by_channel(loaded: Vocabulary) -> None:
    parts = ("CH", "analysis", "M", "one two three", *NEXT, "CH", "commentary", "M")
    parts = (*parts, "four five", *NEXT, *CALL_F)
    _, stream = read(loaded, parts)
    num_tokens = {"reasoning": 3, "content": 2, "tool_call": len(loaded.encode('{"a":1}'))}
    assert dict(stream.num_tokens) == num_tokens


def content_of(
    vocabulary: Vocabulary, parts: Sequence[str | int | bytes], **options: Any
) -> list[str]:
    """The texts of the tokens that the stream calls content, pushed one by one."""
    token_ids = tokens(vocabulary, *parts)
    stream = HarmonyStream(vocabulary, **options)
    numbers = [
        number
        for each in token_ids
        for _ in [stream.push([each])]
        for number in stream.content_tokens
    ]
    stream.push([], "stop")
    numbers += stream.content_tokens
    return [vocabulary.token_bytes[token_ids[number]].decode() for number in numbers]


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        (("CH", "analysis", "M", "t", *NEXT, "CH", "final", "M", "one two", "E"), ["one", " two"]),
        (("CH", "commentary", "M", "a b", *NEXT, *CALL_F), ["a", " b"]),
        # What became content only at the end.
        (("M", "one two", "R"), ["one", " two"]),
        (("CH", "thoughts", "M", "a", *NEXT, "CH", "thoughts", "M", "b"), ["b"]),
        (("It is", "R"), ["It", " is"]),
        (("CH", "analysis", "M", "t", "E", "It is", "R"), ["It", " is"]),
        (("CH", "final", " It is", "R"), [" It", " is"]),
        (("CH", "final ", "CON", "json", "{}", "R"), ["{}"]),
        # A message in the same header.
        (("S", "assistant", "CH", "final", "M", "x", "E"), ["x"]),
    ],
)
def test_content_tokens_are_those_of_the_text(
    loaded: Vocabulary, parts: tuple[Any, ...], texts: list[str]
) -> None:
    assert content_of(loaded, parts, tool_names=("f",)) == texts


@pytest.mark.parametrize(
    ("text", "texts"),
    [
        (("one two END three",), ["one", " two", " END"]),
        (("one two",), ["one", " two"]),
        (("one", " E", "N", "D"), ["one", " E"]),  # the blank of " E" is shown
        (("one", " E", "N", "O"), ["one", " E", "N", "O"]),
        (("END",), []),
    ],
)
def test_a_stop_words_tokens_are_no_content(
    loaded: Vocabulary, text: tuple[str, ...], texts: list[str]
) -> None:
    parts = ("CH", "final", "M", *text, "R")
    assert content_of(loaded, parts, stop_words=("END",)) == texts


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
        # A prompt that leaves off in a header that is none.
        (("S", "Once upon"), (" a time", "R"), ("", " a time")),
        (("S", "assistant", "CH", "final Once"), (" upon", "R"), ("", " upon")),
    ],
)
def test_an_opening_sets_the_state(
    loaded: Vocabulary, prompt: tuple[str, ...], parts: tuple[str, ...], expected: tuple[str, str]
) -> None:
    opening = opening_of(tokens(loaded, *prompt), loaded)
    answer, stream = read(loaded, parts, opening=opening)
    assert (answer.reasoning, answer.content) == expected
    assert "".join(content_of(loaded, parts, opening=opening)) == expected[1]
    assert sum(stream.num_tokens.values()) <= len(tokens(loaded, *parts))


def test_a_raw_prompt_offers_every_function(loaded: Vocabulary) -> None:
    answer, _ = read(
        loaded, ("CH", "commentary to=functions.anything", "M", "{}", "CALL"), tool_names=None
    )
    assert answer.calls == [("anything", "{}")]
    answer, _ = read(loaded, ("CH", "commentary to=python", "M", "{}", "CALL"), tool_names=None)
    assert answer == Answer("{}", finish_reason="stop")


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
