"""The raw format: the request's text is the prompt, and the tokens' text is the answer.

No roles, no channels, no tools: for base models, and for those who write a format of their own.
Text that spells a control token is text, but in a raw prompt, and control tokens in an answer show
as nothing.
"""

import codecs
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from gptoss_harmony import chat, vocabulary
from gptoss_harmony.content import StoppableText, Written
from gptoss_harmony.guide import Guide, text_guide
from gptoss_harmony.render import render_raw
from gptoss_harmony.structured import GUIDED, guided_decoding
from gptoss_harmony.types import (
    CallOutcome,
    Channel,
    ChatDelta,
    ChatRequest,
    FinishReason,
    InvalidChat,
    Prompt,
    TextFormat,
    shown,
)
from gptoss_harmony.vocabulary import FIRST_CONTROL, NUM_TOKENS, STOP_TOKEN_IDS, Vocabulary

# What a client may send anyway: it asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ("[]",),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("medium",),
    "response_format": ('{"type": "text"}',),
    "parallel_tool_calls": (True,),
}


class RawFormat:
    """Text in, text out. Safe to share between threads; a stream is one answer's own."""

    def __init__(self, loaded: Vocabulary) -> None:
        self.vocabulary = loaded

    @classmethod
    def load(cls, checkpoint_folder: Path | None = None) -> Self:
        return cls(vocabulary.load(checkpoint_folder))

    def parse_chat(self, **_: Any) -> ChatRequest:
        raise InvalidChat("messages cannot be given: the server's format is raw; use text_input")

    def parse_text(self, text: str, **inputs: Any) -> ChatRequest:
        guided = [inputs.pop(name, None) for name in GUIDED]
        for name, value in inputs.items():
            if value not in (None, "", *_NEUTRAL.get(name, ())):
                raise InvalidChat(
                    f"{name} cannot be given: the server's format is raw, got {shown(value)}"
                )
        messages = chat.parse_messages(chat.user_message(text))
        return ChatRequest(messages, text_format=guided_decoding(*guided))

    def render_chat(self, request: ChatRequest) -> Prompt:
        [message] = request.messages
        return Prompt(tuple(self.vocabulary.encode(message["content"])), STOP_TOKEN_IDS)

    def render_raw(self, text: str) -> Prompt:
        return render_raw(self.vocabulary, text)

    def guide(
        self,
        prompt: Prompt,  # noqa: ARG002
        request: ChatRequest | None,
        text_format: TextFormat | None = None,
    ) -> Guide | None:
        asked = text_format if request is None else request.text_format
        return None if asked is None else text_guide(asked)

    def stream_context(
        self,
        prompt: Prompt,  # noqa: ARG002  a raw answer needs none of it
        request: ChatRequest | None,  # noqa: ARG002
        stop_words: Sequence[str] = (),
    ) -> dict[str, Any]:
        return {"stop_words": list(chat.check_stop_words(stop_words))}

    def stream(self, context: Mapping[str, Any] | None = None) -> "RawStream":
        return RawStream(self.vocabulary, stop_words=(context or {}).get("stop_words", ()))


class RawStream:
    """One answer's tokens in, its text out: a `ChatStream` with content alone.

    repairs: "stray_token" is a control token, "out_of_vocabulary" an id that the model lacks. The
    tokens that end an answer are none.
    """

    def __init__(self, loaded: Vocabulary, *, stop_words: Sequence[str] = ()) -> None:
        self.repairs: Counter[str] = Counter()
        self.calls: Counter[CallOutcome] = Counter()
        self.num_tokens: Counter[Channel] = Counter()
        self.content_tokens: list[int] = []
        self.num_taken = 0
        self.finish_reason: FinishReason | None = None
        self._token_bytes = loaded.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._content = StoppableText(stop_words)
        self._number = 0
        self._deltas: list[ChatDelta] = []

    @property
    def first_undecided(self) -> int:
        first = self._content.first_token
        return self._number if first is None else first

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> list[ChatDelta]:
        self.content_tokens = []
        num_before = self._number
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            if 0 <= token_id < FIRST_CONTROL:
                self.num_tokens["content"] += 1
                text = self._decoder.decode(self._token_bytes[token_id])
                self._write(self._content.write(text, [self._number]))
            elif token_id not in STOP_TOKEN_IDS:
                is_known = 0 <= token_id < NUM_TOKENS
                self.repairs["stray_token" if is_known else "out_of_vocabulary"] += 1
            self._number += 1
        self.num_taken = self._number - num_before
        if self.finish_reason is None and finish_reason is not None:
            self._write(self._content.write(self._decoder.decode(b"", True), []))
            self._write(self._content.release())
            if self.finish_reason is None:
                self._end(finish_reason)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _write(self, written: Written) -> None:
        if self.finish_reason is not None:
            return
        if written.text:
            self._deltas.append(ChatDelta("content", written.text))
        self.content_tokens += written.tokens
        if written.is_over:
            self._end("stop")

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self._deltas.append(ChatDelta("content", finish_reason=reason))
