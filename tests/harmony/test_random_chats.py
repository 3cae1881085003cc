"""Random chats, rendered: every text stands in its message exactly, as text; prompts are prefixes.

What a prompt should hold is told here once more, message by message, from the documents alone.
"""

import datetime
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from gptoss_harmony.chat import parse_chat
from gptoss_harmony.format import HarmonyFormat
from gptoss_harmony.request import read_request
from gptoss_harmony.types import InvalidChat
from gptoss_harmony.vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FIRST_CONTROL,
    MESSAGE,
    START,
    Vocabulary,
)

TODAY = datetime.date(2025, 6, 28)
NUM_CHATS = 1000
SEED = 7

FRAGMENTS = (
    *(
        "Hello",
        " world",
        "",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "42",
        "The quick brown fox.",
        "a" * 50,
    ),
    *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>final", "<|message|>", "<|"),
    *("<|constrain|>json", "<|endoftext|>", "<|reserved_200014|>", "<|end|><|start|>system", "|>"),
    *(
        "中文字",
        "😀",
        "👩‍🚀",
        "e\u0301",
        "\u200d",
        "\x00",
        "\x1f",
        "\u2028",
        "\ufeff",
        "ﷺ",
        "\U0001f1e9",
    ),
    *('{"a": 1}', "to=functions.f", "assistant", "# Tools", "# Instructions\n\n", "// x", "}"),
)


def text_of(chance: random.Random, *, is_filled: bool = False) -> str:
    kind = chance.random()
    if kind < 0.1:
        codes = [chance.randrange(0x11_0000) for _ in range(chance.randint(1, 20))]
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    else:
        text = "".join(chance.choice(FRAGMENTS) for _ in range(chance.randint(0, 5)))
    return text or ("x" if is_filled else "")


def content_of(chance: random.Random, text: str) -> Any:
    """The text as a client may send it: whole, or in parts."""
    if chance.random() < 0.7:
        return text
    cut = chance.randint(0, len(text))
    parts = [text[:cut], text[cut:]] if chance.random() < 0.7 else [text]
    return [{"type": "text", "text": part} for part in parts]


class Chat:
    """A random chat as a client sends it, turn by turn, and the messages that a prompt shows."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._num_calls = 0
        self.tools = [self._tool(name) for name in ("f", "get_weather")[: chance.randint(0, 2)]]
        self.builtins = [{"type": kind} for kind in ("browser", "python") if chance.random() < 0.2]
        self.messages: list[dict[str, Any]] = []
        self.shown: list[tuple[str, str, int]] = []  # header, text, end
        self.reasoning: list[int] = []  # places in `shown`: dropped once the turn is over
        if chance.random() < 0.6:
            text = text_of(chance)
            self._add(chance.choice(("system", "developer")), text)
            self.instructions = f"# Instructions\n\n{text}" if text else ""
        else:
            self.instructions = ""

    def _tool(self, name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"a": {"description": text_of(self._chance)}}}
        function = {"name": name, "description": text_of(self._chance), "parameters": schema}
        return {"type": "function", "function": function}

    def _add(self, role: str, text: str, **fields: Any) -> dict[str, Any]:
        message = {"role": role, "content": content_of(self._chance, text), **fields}
        self.messages.append(message)
        return message

    def _name(self, message: dict[str, Any], author: str) -> str:
        if self._chance.random() > 0.1:
            return author
        message["name"] = self._chance.choice(("ann", "A-1_b"))
        return f"{author}:{message['name']}"

    def open_turn(self) -> None:
        """A user's message, and perhaps instructions before it."""
        if self.messages and self._chance.random() < 0.2:
            text = text_of(self._chance, is_filled=True)
            author = self._name(
                self._add(self._chance.choice(("system", "developer")), text), "developer"
            )
            self.shown.append((author, f"# Instructions\n\n{text}", END))
        text = text_of(self._chance)
        self.shown.append((self._name(self._add("user", text), "user"), text, END))
        self._forget_reasoning()

    def call(self) -> None:
        """One to three calls of the model, and their results, perhaps out of order."""
        names = [tool["function"]["name"] for tool in self.tools]
        names += ["browser.search"] if {"type": "browser"} in self.builtins else []
        names += ["python"] if {"type": "python"} in self.builtins else []
        if not names:
            return
        text, reasoning = text_of(self._chance), text_of(self._chance)
        message = self._add("assistant", text)
        author = self._name(message, "assistant")
        if reasoning:
            message[self._chance.choice(("reasoning", "reasoning_content"))] = reasoning
            self.reasoning.append(len(self.shown))
            self.shown.append((f"{author}<channel>analysis", reasoning, END))
        if text:
            self.shown.append((f"{author}<channel>commentary", text, END))
        calls: list[dict[str, Any]] = []
        results: list[tuple[dict[str, Any], tuple[str, str, int]]] = []
        for _ in range(self._chance.randint(1, 3)):
            name = self._chance.choice(names)
            call, shown, result = self._call(author, name)
            calls.append(call)
            self.shown.append(shown)
            results.append(result)
        message["tool_calls"] = calls
        self.shown += [shown for _, shown in results]
        self._chance.shuffle(results)
        self.messages += [message for message, _ in results]

    def _call(self, author: str, name: str) -> tuple[Any, Any, Any]:
        self._num_calls += 1
        call_id = f"call_{self._num_calls}"
        text, answer = text_of(self._chance, is_filled=True), text_of(self._chance)
        if name == "python":
            arguments: Any = json.dumps({"code": text})
        elif self._chance.random() < 0.3:
            arguments = {"a": text}
            text = json.dumps(arguments, ensure_ascii=False)
        else:
            arguments = text
        call = {"id": call_id, "function": {"name": name, "arguments": arguments}}
        result = {
            "role": "tool",
            "tool_call_id": call_id,
            "content": content_of(self._chance, answer),
        }
        if name in ("python", "browser.search"):
            shown = (f"{author} to={name}<channel>analysis code", text, CALL)
            return call, shown, (result, (f"{name} to=assistant<channel>analysis", answer, END))
        header = f"{author} to=functions.{name}<channel>commentary <constrain>json"
        answered = (f"functions.{name} to=assistant<channel>commentary", answer, END)
        return call, (header, text, CALL), (result, answered)

    def close_turn(self) -> None:
        """The model's answer."""
        text = text_of(self._chance, is_filled=True)
        message = self._add("assistant", text, reasoning_content=text_of(self._chance))
        self.shown.append((f"{self._name(message, 'assistant')}<channel>final", text, END))
        self._forget_reasoning()

    def _forget_reasoning(self) -> None:
        for place in reversed(self.reasoning):
            del self.shown[place]
        self.reasoning.clear()

    def render(self, harmony: HarmonyFormat) -> tuple[int, ...]:
        """Through the whole door, without the opening of the next answer."""
        inputs = {"messages": json.dumps(self.messages).encode()}
        if self.tools or self.builtins:
            inputs["tools"] = json.dumps([*self.tools, *self.builtins]).encode()
        request = read_request(inputs, {}).chat
        assert request is not None
        token_ids = harmony.render_chat(request).token_ids
        assert token_ids[-2:] == (START, *harmony.vocabulary.encode("assistant"))
        return token_ids[:-2]


def messages_of(loaded: Vocabulary, token_ids: tuple[int, ...]) -> list[tuple[str, str, int]]:
    """A prompt's messages: header, text, end. Control tokens part them, and are nowhere else."""
    messages: list[tuple[str, str, int]] = []
    header, text = "", ""
    pending: list[int] = []
    marks = {CHANNEL: "<channel>", CONSTRAIN: "<constrain>"}
    for token_id in token_ids:
        if token_id < FIRST_CONTROL:
            pending.append(token_id)
            continue
        text, pending = loaded.decode(pending), []
        if token_id == START:
            assert text == ""
            header = ""
        elif token_id in marks:
            header += text + marks[token_id]
        elif token_id == MESSAGE:
            header += text
        else:
            assert token_id in (END, CALL)
            messages.append((header, text, token_id))
    assert pending == []
    return messages


def test_every_text_is_in_its_message_exactly(loaded: Vocabulary) -> None:
    harmony = HarmonyFormat(loaded, today=TODAY)
    for number in range(NUM_CHATS):
        chance = random.Random(f"{SEED}/{number}")
        chat = Chat(chance)
        last: tuple[int, ...] = ()
        for turn in range(chance.randint(1, 3)):
            chat.open_turn()
            opened = chat.render(harmony)
            assert opened[: len(last)] == last, (number, turn)
            last = opened
            inside = opened
            for _ in range(chance.randint(0, 2)):
                chat.call()
                longer = chat.render(harmony)
                assert longer[: len(inside)] == inside, (number, turn)
                inside = longer
            system, *messages = messages_of(loaded, inside)
            assert system[0] == "system"
            if chat.instructions or chat.tools:
                header, text, _ = messages.pop(0)
                assert header == "developer"
                assert text.startswith(chat.instructions)
                if not chat.tools:
                    assert text == chat.instructions
                for tool in chat.tools:
                    for line in tool["function"]["description"].removesuffix("\n").split("\n"):
                        assert line.removesuffix("\r") in text
            assert messages == chat.shown, (number, turn)
            if turn < 2 or chance.random() < 0.5:
                chat.close_turn()
                finished = chat.render(harmony)
                assert messages_of(loaded, finished)[-1] == chat.shown[-1]
                assert finished[: len(opened)] == opened, (number, turn)
                last = finished


CHARACTERS = (
    *("a", "Z", "0", " ", "\n", "\t", "\r", "\r\n", "-", "=", "*", "#", "/", ".", "_", "'", '"'),
    *("\\", "\x00", "\x1c", "\u0301", "\u200d", "\u2028", "é", "中", "😀", "{", "<", "<|end|>"),
)
MEGABYTE = 2**20
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}


def calling(text: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": text}}],
    }


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


USER = {"role": "user", "content": "Hi"}
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "user": lambda text: {"messages": [{"role": "user", "content": text}]},
    "system": lambda text: {"messages": [{"role": "system", "content": text}, USER]},
    "arguments": lambda text: {"messages": [USER, calling(text)]},
    "reasoning": lambda text: {"messages": [USER, {**CALLED, "reasoning": text}]},
    "result": lambda text: {
        "messages": [USER, CALLED, {"role": "tool", "tool_call_id": "1", "content": text}]
    },
    "name": lambda text: {"messages": [{**USER, "name": text}]},
    "tool's name": lambda text: {"messages": [USER], "tools": function(name=text)},
    "description": lambda text: {"messages": [USER], "tools": function(description=text)},
    "property": lambda text: {
        "messages": [USER],
        "tools": function(parameters={"properties": {text: {"type": "string"}}}),
    },
    "default": lambda text: {
        "messages": [USER],
        "tools": function(parameters={"properties": {"a": {"default": text}}}),
    },
}
HARDEST = ("-", "a", "\n", "<|end|>")


@pytest.mark.parametrize(
    ("place", "character"),
    [
        *(("user", character) for character in CHARACTERS),
        *((place, character) for place in PLACES if place != "user" for character in HARDEST),
    ],
)
def test_a_megabyte_of_one_character_costs_no_more_than_a_second(
    loaded: Vocabulary, place: str, character: str
) -> None:
    text = character * (MEGABYTE // len(character.encode()))
    inputs = {name: json.dumps(value).encode() for name, value in PLACES[place](text).items()}
    if any(len(value) > 4 * MEGABYTE for value in inputs.values()):
        inputs = {
            name: json.dumps(value, ensure_ascii=False).encode()
            for name, value in PLACES[place](text).items()
        }
    harmony = HarmonyFormat(loaded, today=TODAY)
    start = time.process_time()
    refusal, shown = "", ""
    try:
        request = read_request(inputs, {}).chat
        assert request is not None
        shown = loaded.decode(harmony.render_chat(request).token_ids)
    except InvalidChat as error:
        refusal = str(error)
    # A quiet machine takes 0.1 s for most, 0.8 s for dashes.
    assert time.process_time() - start < 1.5
    if refusal:
        assert "name" in place or max(map(len, inputs.values())) > 4 * MEGABYTE
        assert len(refusal) < 300
    elif place == "description":
        assert text.replace("\n", "") in shown  # a comment has slashes before each line
    elif place in ("default", "property"):
        assert text in shown or json.dumps(text) in shown
    else:
        assert text in shown


@pytest.mark.parametrize("character", ["a", " ", "<|end|>", "中"])
def test_a_raw_prompt_costs_no_more(loaded: Vocabulary, character: str) -> None:
    harmony = HarmonyFormat(loaded)
    text = character * (MEGABYTE // len(character.encode()))
    start = time.process_time()
    prompt = harmony.render_raw(text)
    harmony.stream_context(prompt, None)
    assert time.process_time() - start < 1.0
    assert loaded.decode(prompt.token_ids) == text


def test_rendering_is_linear_in_messages_and_in_text(loaded: Vocabulary) -> None:
    """Four times as much takes less than eight times as long."""
    harmony = HarmonyFormat(loaded, today=TODAY)

    def seconds(num_turns: int, repeats: int) -> float:
        turn = [
            {"role": "user", "content": "Hi there. " * repeats},
            {**calling('{"a": 1}'), "content": "Look. " * repeats},
            {"role": "tool", "tool_call_id": "1", "content": "word " * repeats},
            {"role": "assistant", "content": "Ho. " * repeats},
        ]
        text = json.dumps(turn * num_turns)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            harmony.render_chat(parse_chat(messages=text))
            best = min(best, time.process_time() - start)
        return best

    assert seconds(2000, 1) < 8 * seconds(500, 1)
    assert seconds(2, 80_000) < 8 * seconds(2, 20_000)
