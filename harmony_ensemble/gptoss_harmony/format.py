"""The interface that every chat format has, and Harmony's: prompts in, answers' streams out.

Loaded by entry point (group "gptoss.formats"), so that neither the engine's column nor the
command line imports this package by name. The ensemble's two adapters have the parameter `format`.
"""

import datetime
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, Self

from gptoss_harmony import chat, render, vocabulary
from gptoss_harmony.builtin_tools import function_names
from gptoss_harmony.guide import Guide, chat_guide, raw_guide
from gptoss_harmony.stream import HarmonyStream, opening_of
from gptoss_harmony.types import (
    CallOutcome,
    Channel,
    ChatDelta,
    ChatRequest,
    FinishReason,
    Prompt,
    TextFormat,
)
from gptoss_harmony.vocabulary import Vocabulary


class ChatStream(Protocol):
    """One answer's tokens in, its deltas out; `HarmonyStream` says what each of these means."""

    repairs: Counter[str]
    calls: Counter[CallOutcome]
    num_tokens: Counter[Channel]
    content_tokens: list[int]
    num_taken: int
    finish_reason: FinishReason | None

    @property
    def first_undecided(self) -> int: ...

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> list[ChatDelta]: ...


class ChatFormat(Protocol):
    """What the adapters and the command line know of a format."""

    vocabulary: Vocabulary

    @classmethod
    def load(cls, checkpoint_folder: Path | None = None) -> Self:
        """Loads what the format needs, or fails with a sentence: at start, never at a request."""
        ...

    def parse_chat(self, **inputs: Any) -> ChatRequest:
        """A checked request from OpenAI's JSON texts, by field name (`chat.parse_chat`)."""
        ...

    def parse_text(self, text: str, **inputs: Any) -> ChatRequest:
        """The same from the text of one user message."""
        ...

    def render_chat(self, request: ChatRequest) -> Prompt: ...

    def render_raw(self, text: str) -> Prompt: ...

    def guide(
        self, prompt: Prompt, request: ChatRequest | None, text_format: TextFormat | None = None
    ) -> Guide | None:
        """The grammar that the whole answer follows, for the engine; None if it may be anything.
        text_format: of a raw prompt's answer."""
        ...

    def stream_context(
        self, prompt: Prompt, request: ChatRequest | None, stop_words: Sequence[str] = ()
    ) -> dict[str, Any]:
        """What `stream` needs, as JSON, to travel with the prompt. No request: a raw prompt."""
        ...

    def stream(self, context: Mapping[str, Any]) -> ChatStream: ...


class FormatMissing(RuntimeError):
    """No installed format has the configured name: says which there are."""


def load_format(name: str, checkpoint_folder: Path | None = None) -> ChatFormat:
    """The format of that name, loaded. Raises FormatMissing, or what its `load` raises."""
    known = {each.name: each for each in entry_points(group="gptoss.formats")}
    if name not in known:
        raise FormatMissing(f"format must be one of {', '.join(sorted(known))}, got {name!r}")
    return known[name].load().load(checkpoint_folder)


class HarmonyFormat:
    """gpt-oss's format. Safe to share between threads; a stream is one answer's own."""

    def __init__(self, loaded: Vocabulary, *, today: datetime.date | None = None) -> None:
        """today: the date that every prompt shows; None is the day of the request."""
        self.vocabulary = loaded
        self._today = today

    @classmethod
    def load(cls, checkpoint_folder: Path | None = None) -> Self:
        return cls(vocabulary.load(checkpoint_folder))

    def parse_chat(self, **inputs: Any) -> ChatRequest:
        return chat.parse_chat(**inputs)

    def parse_text(self, text: str, **inputs: Any) -> ChatRequest:
        return chat.parse_text(text, **inputs)

    def render_chat(self, request: ChatRequest) -> Prompt:
        return render.render_chat(self.vocabulary, request, self._today)

    def render_raw(self, text: str) -> Prompt:
        return render.render_raw(self.vocabulary, text)

    def guide(
        self, prompt: Prompt, request: ChatRequest | None, text_format: TextFormat | None = None
    ) -> Guide | None:
        if request is not None:
            return chat_guide(request)
        if text_format is None:
            return None
        opening = opening_of(prompt.token_ids, self.vocabulary)
        return raw_guide(opening, self.vocabulary, text_format)

    def stream_context(
        self, prompt: Prompt, request: ChatRequest | None, stop_words: Sequence[str] = ()
    ) -> dict[str, Any]:
        context: dict[str, Any] = {"tool_names": None, "opening": [], "stop_words": []}
        context["opening"] = list(opening_of(prompt.token_ids, self.vocabulary))
        context["stop_words"] = list(chat.check_stop_words(stop_words))
        if request is not None:
            context["tool_names"] = list(chat.tool_names(request))
            context["builtin_names"] = list(function_names(request.builtin_tools))
        return context

    def stream(self, context: Mapping[str, Any] | None = None) -> HarmonyStream:
        """Without a context: an answer after `<|start|>assistant`, no tools, no stop words."""
        given = context or {}
        tool_names: Collection[str] | None = given.get("tool_names", ())
        return HarmonyStream(
            self.vocabulary,
            tool_names=tool_names,
            builtin_names=given.get("builtin_names", ()),
            stop_words=given.get("stop_words", ()),
            opening=given.get("opening"),
        )
