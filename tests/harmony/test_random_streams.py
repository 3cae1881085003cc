"""Any cut of any stream gives the same events: 20,000 of them, and a check that the check bites."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from gptoss_harmony.stream import HarmonyStream
from gptoss_harmony.vocabulary import END, Vocabulary

from .random_streams import Generator, check, run

SEED = 20_000
NUM_STREAMS = 20_000
PARTS = 8  # so that a failure is found early, and a slow machine shows progress


@pytest.mark.parametrize("part", range(PARTS))
def test_any_cut_of_any_stream_gives_the_same_events(loaded: Vocabulary, part: int) -> None:
    each = NUM_STREAMS // PARTS
    seen = run(loaded, SEED, range(part * each, (part + 1) * each))
    assert seen["streams"] == each
    # All kinds of ends, outcomes and repairs are among them.
    assert {f"end {reason}" for reason in ("stop", "length", "tool_calls", "abort", "error")} < set(
        seen
    )
    assert {f"call {outcome}" for outcome in ("whole", "invalid", "cut", "unknown")} < set(seen)
    kinds = (
        *("broken_header", "missing_message", "missing_channel", "missing_start", "missing_end"),
        *("stray_text", "stray_token", "out_of_vocabulary", "foreign_role", "unknown_tool"),
    )
    assert {f"repair {kind}" for kind in kinds} < set(seen)


def test_a_stream_is_made_by_its_number(loaded: Vocabulary) -> None:
    ones = [Generator(loaded, 1).make(number) for number in range(50)]
    assert ones == [Generator(loaded, 1).make(number) for number in range(50)]
    assert ones != [Generator(loaded, 2).make(number) for number in range(50)]


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(make: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    FAULTS[make.__name__] = make
    return make


@fault
def a_chunk_is_decoded_alone(patch: pytest.MonkeyPatch) -> None:
    push = HarmonyStream.push

    def alone(stream: HarmonyStream, token_ids: list[int], reason: object = None) -> object:
        stream._decoder.reset()
        return push(stream, token_ids, reason)  # pyright: ignore[reportArgumentType]

    patch.setattr(HarmonyStream, "push", alone)


@fault
def a_stop_word_is_looked_for_chunk_by_chunk(patch: pytest.MonkeyPatch) -> None:
    init = HarmonyStream.__init__

    def hasty(stream: HarmonyStream, *arguments: Any, **options: Any) -> None:
        init(stream, *arguments, **options)
        stream._is_content_checked = False

    patch.setattr(HarmonyStream, "__init__", hasty)


@fault
def a_bad_end_raises(patch: pytest.MonkeyPatch) -> None:
    take_end = HarmonyStream._take_end

    def strict(stream: HarmonyStream, end: int) -> None:
        if stream._header is None and stream._target is None:
            raise ValueError("unexpected end")
        take_end(stream, end)

    patch.setattr(HarmonyStream, "_take_end", strict)


@fault
def a_finished_call_is_lost(patch: pytest.MonkeyPatch) -> None:
    append = HarmonyStream._append

    def forgetful(stream: HarmonyStream, channel: str, text: str) -> None:
        if channel != "tool_call" or stream._num_calls < 2:
            append(stream, channel, text)  # pyright: ignore[reportArgumentType]

    patch.setattr(HarmonyStream, "_append", forgetful)


@fault
def a_control_token_shows(patch: pytest.MonkeyPatch) -> None:
    take_end = HarmonyStream._take_end

    def show(stream: HarmonyStream, end: int) -> None:
        if stream._target == "content" and end == END:
            stream._append("content", "<|end|>")
        take_end(stream, end)

    patch.setattr(HarmonyStream, "_take_end", show)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_stream_is_found(
    loaded: Vocabulary, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"^seed 1, stream \d+: "):
        run(loaded, 1, range(2000))


def test_a_stream_that_was_left_whole_is_checked_by_value(loaded: Vocabulary) -> None:
    generator = Generator(loaded, 3)
    streams = [generator.make(number) for number in range(200)]
    whole = [each for each in streams if each.meant is not None and not each.is_truncated]
    assert len(whole) > 10
    for stream in whole:
        assert stream.meant is not None
        stream.meant["reasoning"] = stream.meant.get("reasoning", "") + "!"
        with pytest.raises(AssertionError):
            check(loaded, stream, random.Random(0))
