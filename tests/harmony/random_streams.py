"""Random answers for the stream, and what must hold for each; also a program for a long run.

    python tests/harmony/random_streams.py --streams 1000000 --seed 1 --output report.json

An answer is generated as the model writes one, and then perhaps mutated, truncated, or replaced by
soup. Whatever it is, any cut into chunks gives the same events; nothing raises; nothing that
spells a control token comes out. What was generated and left whole comes out as it was meant, and
what was only truncated is the beginning of that.
"""

import argparse
import itertools
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptoss_harmony import vocabulary
from gptoss_harmony.stream import HarmonyStream
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

CONTROL_TEXT = re.compile(
    r"<\|(?:start|end|message|channel|constrain|return|call|startoftext|endoftext|reserved_\d+)\|>"
)
CONTROLS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL, END_OF_TEXT)
NO_TOKENS = (200_000, 200_013, NUM_TOKENS - 1, NUM_TOKENS, NUM_TOKENS + 5, -1, -3, 2**31)
TEXTS = (
    *("Hello", " world", "The END of it", " EN", "D", "\n", "\n\n", " ", "42", "3.14", "ENDEND"),
    *("中文字", "😀", "👩‍🚀 ok", " naïve", "e\u0301", "日本", "a\r\nb", "\ttab", "`code`", "**b**"),
    *('{"a": 1}', "[1, 2]", "<b>", "<|", "|>", "to=", "to=functions.f", "assistant", "final"),
    *("Let me look that up.", "The quick brown fox jumps over the lazy dog.", "STOP"),
)
ARGUMENTS = ("{}", '{"a": 1}', '{"city": "Zürich", "days": [1, 2]}', '{"q": "END"}', '{"x": "中"}')
HALF_HEADERS = (
    *("assistant", "user", "functions.f", "analysis", "commentary", "final", "json", " to=", "to"),
    *(" to=functions.f", " to=f", "to=functions.nope", "functions.", " code", "Final", "--"),
    *('{"a":', "1}", "system", "python", "browser.search", "to=python", ",", '"', ".", "f"),
)
TOOLS: tuple[tuple[str, ...] | None, ...] = ((), ("f",), ("f", "now", "get_code"), None)
BUILTINS = ((), (), ("browser.search", "browser.open", "browser.find", "python"))
STOP_WORDS = ((), (), (), ("END",), ("END", "N", "😀", "D\nH"), ("\n\n",), ("ok", "o"))
REASONS: tuple[FinishReason, ...] = ("stop", "stop", "length", "abort", "error")


@dataclass
class Stream:
    """One answer's tokens and how they are read. meant: what comes out, where that is known."""

    token_ids: list[int]
    options: dict[str, Any]
    reason: FinishReason
    meant: dict[str, str] | None = None
    is_truncated: bool = False


class Generator:
    """Streams by number: the same seed and number make the same one."""

    def __init__(self, loaded: Vocabulary, seed: int) -> None:
        self._seed = seed
        self._texts = [(text, loaded.encode(text)) for text in TEXTS]
        self._encoded = {text: loaded.encode(text) for text in (*ARGUMENTS, *HALF_HEADERS)}
        self._encode = loaded.encode
        self._bytes = [loaded.token_bytes.index(bytes([byte])) for byte in range(256)]
        self._openings = (
            (START, *loaded.encode("assistant"), CHANNEL, *loaded.encode("final"), MESSAGE),
            (START, *loaded.encode("assistant"), CHANNEL),
            (),
        )

    def make(self, number: int) -> Stream:
        chance = random.Random(f"{self._seed}/{number}")
        options: dict[str, Any] = {
            "tool_names": chance.choice(TOOLS),
            "builtin_names": chance.choice(BUILTINS),
            "stop_words": chance.choice(STOP_WORDS),
        }
        reason = chance.choice(REASONS)
        kind = chance.random()
        if kind < 0.15:
            return Stream(self._soup(chance), options, reason)
        token_ids, meant = self._answer(chance, options)
        if kind < 0.30:
            return Stream(token_ids, options, "stop", None if options["stop_words"] else meant)
        if kind < 0.45:
            del token_ids[chance.randrange(len(token_ids)) :]
            known = None if options["stop_words"] else meant
            return Stream(token_ids, options, reason, known, is_truncated=True)
        if chance.random() < 0.2:
            options["opening"] = chance.choice(self._openings)
        for _ in range(chance.randint(1, 5)):
            self._mutate(chance, token_ids)
        return Stream(token_ids, options, reason)

    def _text(self, chance: random.Random) -> tuple[str, list[int]]:
        texts, token_ids = [], []
        for _ in range(chance.randint(1, 4)):
            text, encoded = chance.choice(self._texts)
            texts.append(text)
            token_ids += encoded
        return "".join(texts), token_ids

    def _answer(
        self, chance: random.Random, options: dict[str, Any]
    ) -> tuple[list[int], dict[str, str]]:
        """An answer as the model writes one, after the prompt's `<|start|>assistant`."""
        token_ids: list[int] = []
        meant: dict[str, str] = {}
        names = [*(options["tool_names"] or ()), *options["builtin_names"]]
        num_calls = 0

        def open_message() -> None:
            if token_ids:
                token_ids.extend((START, *self._encoded["assistant"]))

        def say(channel: str, shown: str, end: int) -> None:
            open_message()
            text, encoded = self._text(chance)
            token_ids.extend((CHANNEL, *self._encoded[channel], MESSAGE, *encoded, end))
            meant[shown] = f"{meant[shown]}\n{text}" if shown in meant else text

        for _ in range(chance.randint(0, 2)):
            say("analysis", "reasoning", END)
        if names and chance.random() < 0.7:
            if chance.random() < 0.4:
                say("commentary", "content", END)
            for _ in range(chance.randint(1, 3)):
                name = chance.choice(names)
                open_message()
                self._call(chance, token_ids, name, meant, num_calls)
                num_calls += 1
        if not num_calls or chance.random() < 0.2:
            say("final", "content", RETURN)
        return token_ids, meant

    def _call(
        self,
        chance: random.Random,
        token_ids: list[int],
        name: str,
        meant: dict[str, str],
        number: int,
    ) -> None:
        is_builtin = name == "python" or name.startswith("browser.")
        recipient = self._encode(f" to={name if is_builtin else f'functions.{name}'}")
        channel = self._encoded["analysis" if is_builtin else "commentary"]
        if chance.random() < 0.5:
            token_ids += (*recipient, CHANNEL, *channel)
        else:
            token_ids += (CHANNEL, *channel, *recipient)
        kind = chance.random()
        if kind < 0.6:
            token_ids += (*self._encode(" "), CONSTRAIN, *self._encoded["json"])
        elif kind < 0.8:
            token_ids += self._encoded[" code"]
        if name == "python":
            text, encoded = self._text(chance)
            arguments = json.dumps({"code": text}, ensure_ascii=False)
        else:
            arguments = chance.choice(ARGUMENTS)
            encoded = self._encoded[arguments]
        token_ids += (MESSAGE, *encoded, chance.choice((CALL, CALL, END)))
        meant[f"call {number} {name}"] = arguments

    def _fragment(self, chance: random.Random) -> Sequence[int]:
        kind = chance.random()
        if kind < 0.45:
            return (chance.choice(CONTROLS),)
        if kind < 0.70:
            return self._encoded[chance.choice(HALF_HEADERS)]
        if kind < 0.80:
            return chance.choice(self._texts)[1]
        if kind < 0.88:
            return (self._bytes[chance.randrange(256)],)
        if kind < 0.94:
            return (chance.randrange(FIRST_CONTROL),)
        return (chance.choice(NO_TOKENS),)

    def _soup(self, chance: random.Random) -> list[int]:
        count = chance.randint(0, 25)
        return [token_id for _ in range(count) for token_id in self._fragment(chance)]

    def _mutate(self, chance: random.Random, token_ids: list[int]) -> None:
        begin = chance.randint(0, len(token_ids))
        end = min(len(token_ids), begin + chance.randint(1, 4))
        match chance.randrange(5):
            case 0:
                del token_ids[begin:end]
            case 1:
                token_ids[begin:begin] = self._fragment(chance)
            case 2:
                token_ids[begin:end] = self._fragment(chance)
            case 3:
                token_ids[begin:begin] = token_ids[begin:end]
            case _:
                target = chance.randint(0, len(token_ids))
                moved = token_ids[begin:end]
                del token_ids[begin:end]
                token_ids[target:target] = moved


def cuts(chance: random.Random, length: int) -> Iterator[Iterator[int]]:
    """Sizes of chunks: all at once, token by token, and as under speculation, a few a step."""
    yield iter((length,))
    yield itertools.repeat(1)
    # Empty chunks, too: the engine gives signs of life.
    yield iter(lambda: chance.randrange(7), -1)


def call_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def joined(deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
    """Deltas of one text made one; empty ones are gone, but for a call's first and the last."""
    merged: list[ChatDelta] = []
    for delta in deltas:
        if merged and replace(merged[-1], text="") == replace(delta, text=""):
            merged[-1] = replace(merged[-1], text=merged[-1].text + delta.text)
        elif delta.text or delta.finish_reason or delta.channel == "tool_call":
            merged.append(delta)
    return merged


@dataclass
class Reading:
    """All that one cut of a stream gave."""

    events: list[ChatDelta]
    counts: tuple[Any, ...]
    content_tokens: list[int] = field(default_factory=list)


def read_cut(loaded: Vocabulary, stream: Stream, sizes: Iterator[int]) -> Reading:
    harmony = HarmonyStream(loaded, new_call_id=call_ids(), **stream.options)
    deltas: list[ChatDelta] = []
    content_tokens: list[int] = []
    num_taken = position = 0
    undecided = -1000
    total = len(stream.token_ids)
    while True:
        end = min(total, position + next(sizes))
        is_last = end == total
        chunk = stream.token_ids[position:end]
        deltas += harmony.push(chunk, stream.reason if is_last else None)
        assert not harmony.content_tokens or harmony.content_tokens[0] >= undecided
        undecided = harmony.first_undecided
        content_tokens += harmony.content_tokens
        num_taken += harmony.num_taken
        position = end
        if is_last:
            break
    assert harmony.push([1, START, 2], "stop") == []
    assert harmony.num_taken == 0
    assert deltas[-1].finish_reason == harmony.finish_reason
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    counts = (num_taken, dict(harmony.repairs), dict(harmony.calls), +harmony.num_tokens)
    return Reading(joined(deltas), counts, content_tokens)


def shown(events: Sequence[ChatDelta]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for delta in events:
        name = delta.channel
        if delta.channel == "tool_call":
            name = f"call {delta.tool_call_index} {delta.recipient}"
        if delta.text:
            texts[name] = texts.get(name, "") + delta.text
    return texts


def check(loaded: Vocabulary, stream: Stream, chance: random.Random) -> Reading:
    """Raises AssertionError where something does not hold that must."""
    first, *others = (
        read_cut(loaded, stream, sizes) for sizes in cuts(chance, len(stream.token_ids))
    )
    for other in others:
        assert other == first
    num_taken, repairs, _, _ = first.counts
    assert stream.options["stop_words"] or num_taken == len(stream.token_ids)
    texts = shown(first.events)
    assert not any(CONTROL_TEXT.search(text) for text in texts.values())
    assert first.content_tokens == sorted(set(first.content_tokens))
    assert set(first.content_tokens) <= set(range(num_taken))
    content = texts.get("content", "")
    if not repairs and not stream.options["stop_words"] and "\ufffd" not in content:
        data = b"".join(loaded.token_bytes[stream.token_ids[n]] for n in first.content_tokens)
        # Messages are set apart by line breaks, which no token brought.
        assert content.replace("\n", "") == data.decode().replace("\n", "")
    if stream.meant is not None and not stream.is_truncated:
        assert not repairs
        assert texts == stream.meant
    elif stream.meant is not None:
        for name, text in texts.items():
            if text != "{}":  # what a call without arguments gets
                whole = stream.meant.get(name, "")
                begun = text.removesuffix('"}').rstrip("\ufffd")  # a program is closed
                assert whole.startswith(begun), (name, whole)
    return first


def run(loaded: Vocabulary, seed: int, numbers: range) -> Counter[str]:
    """Checks the streams with these numbers; an AssertionError names the stream."""
    generator = Generator(loaded, seed)
    seen: Counter[str] = Counter()
    for number in numbers:
        stream = generator.make(number)
        try:
            reading = check(loaded, stream, random.Random(number))
        except Exception as error:
            raise AssertionError(f"seed {seed}, stream {number}: {error!r}: {stream}") from error
        num_taken, repairs, calls, _ = reading.counts
        seen.update(streams=1, tokens=num_taken)
        seen.update({f"repair {kind}": count for kind, count in repairs.items()})
        seen.update({f"call {outcome}": count for outcome, count in calls.items()})
        seen[f"end {reading.events[-1].finish_reason}"] += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="the report, else printed")
    arguments = parser.parse_args()
    loaded = vocabulary.load()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    started, started_cpu = time.monotonic(), time.process_time()
    seen: Counter[str] = Counter()
    for begin in range(0, arguments.streams, 10_000):
        seen += run(loaded, arguments.seed, range(begin, min(begin + 10_000, arguments.streams)))
        print(f"{seen['streams']} streams, {time.monotonic() - started:.0f} s", file=sys.stderr)
    report = {
        "seed": arguments.seed,
        **dict(sorted(seen.items())),
        "failures": 0,
        "wall_s": round(time.monotonic() - started),
        "cpu_s": round(time.process_time() - started_cpu),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
