"""Generated tokens to channels: a state machine that recovers, never raises, and never lies.

A message is `<|start|>` header `<|message|>` content and an end token; a header is a role, then
perhaps `<|channel|>` and a channel's name, then perhaps `<|constrain|>` and a content type, with
` to=recipient` in either of the first two. Generated tokens are untrusted input: whatever does
not fit is repaired, and each repair is counted by kind in `HarmonyStream.repairs`:

    broken_header     a header that ends without a message and holds nothing to show
    missing_message   a header that runs on into text without <|message|>
    missing_channel   a message without a channel that the format knows
    missing_start     <|channel|> or <|message|> where <|start|> is due
    missing_end       a new message begins inside the content of another
    stray_text        text between messages
    stray_token       a control token where it means nothing
    out_of_vocabulary a token id that the model does not have
    foreign_role      a message in the name of somebody else than the assistant
    unknown_tool      a message to a function that was not offered
    bare_tool_name    an offered function called without its namespace
"""

import codecs
import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gptoss_harmony.types import Channel, ChatDelta, FinishReason
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

_ENDS = frozenset((END, RETURN, CALL, END_OF_TEXT))
_CHANNELS: dict[str, Channel] = {
    "analysis": "reasoning",
    "commentary": "content",  # a preamble to tool calls, meant for the user
    "final": "content",
}
_USERS = frozenset(("user", "all"))
_ROLE = re.compile(r"\s*((?:assistant)+|(?:user|system|developer|tool|functions|browser|python)\b)")
_RECIPIENT = re.compile(r"to=(\S*)")
_WORD = re.compile(r"\s*(\w*)")
_CONTENT_TYPE = re.compile(r"\s*(?:json|code|text)\b\s*")

Target = Literal["reasoning", "content", "tool_call", "unplaced", "dropped"]
"""Where a message's content goes; "unplaced" until the next message or the end decides."""


@dataclass(slots=True)
class _Header:
    """A header's bytes as they come, parted by the control token before them."""

    role: bytearray = field(default_factory=bytearray)
    channels: list[bytearray] = field(default_factory=list)
    content_type: bytearray | None = None

    def add_channel(self) -> None:
        self.channels.append(bytearray())
        self.content_type = None  # it stands after the channel, or means nothing

    def part(self) -> bytearray:
        """Where the next text belongs."""
        if self.content_type is not None:
            return self.content_type
        return self.channels[-1] if self.channels else self.role


@dataclass(frozen=True, slots=True)
class _Address:
    """What a header says: by whom, on which channel, to whom; and text that is no header."""

    is_foreign: bool
    channel: str | None
    recipient: str | None
    prose: str
    """Text before the first <|channel|> that belongs to no header."""
    rest: str
    """Text after the channel's name and content type: content, if <|message|> is missing."""


class HarmonyStream:
    """One answer's tokens in, its deltas out; any cut into chunks gives the same joined deltas.

    tool_names: the functions offered; None offers any function by its full name (raw prompts).
    stop_words: end the answer where one appears in content; it is not part of the text.
    opening: the header that the prompt has begun (`opening_of`); None is the assistant's own.

    Two messages on one channel are set apart by a line break. A message without a channel waits
    for the next one, which makes it reasoning, or for the end, which makes it content.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        tool_names: Collection[str] | None = (),
        stop_words: Sequence[str] = (),
        opening: Sequence[int] | None = None,
        new_call_id: Callable[[], str] | None = None,
    ) -> None:
        self.repairs: Counter[str] = Counter()
        self.num_tokens: Counter[Channel] = Counter()
        """Tokens of text so far by channel; headers and control tokens belong to none."""
        self.content_positions: list[int] = []
        """Which of the tokens last pushed are text of the content channel."""
        self.num_taken = 0
        """How many of the tokens last pushed belong to the answer: what follows a stop word is the
        engine's run-ahead."""
        self.finish_reason: FinishReason | None = None
        """Set once the answer is over. If the engine has not said so yet, abort it."""

        self._token_bytes = vocabulary.token_bytes
        self._tool_names = None if tool_names is None else frozenset(tool_names)
        self._stop_words = tuple(word for word in stop_words if word)
        self._stop_prefixes = frozenset(
            word[:length] for word in self._stop_words for length in range(1, len(word))
        )
        self._longest_prefix = max(map(len, self._stop_prefixes), default=0)
        self._new_call_id = new_call_id or (lambda: f"call_{uuid.uuid4().hex[:24]}")

        # At most one of the two is set: a header being read, or a message's content.
        self._header: _Header | None = None
        self._target: Target | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()  # of the open message, not decoded yet
        self._num_message_tokens = 0  # of the open message, not counted yet
        self._held = ""  # content that may begin a stop word
        self._unplaced: tuple[str, int] | None = None  # a message without a channel; its tokens
        self._stray = bytearray()  # text between messages: the answer, if there is no other
        self._num_calls = 0
        self._call: ChatDelta | None = None  # the last call's first delta
        self._call_pieces: list[str] = []
        self._message_number = 0
        self._last_message: dict[Channel, int] = {}  # with text, by channel
        self._deltas: list[ChatDelta] = []

        if opening is None:
            opening = (START, *vocabulary.encode("assistant"))
        for token_id in opening:
            self._take(token_id)
        self.repairs.clear()  # those of the prompt

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> list[ChatDelta]:
        """The deltas of some more tokens. With a finish_reason they are the last.

        The reason of the last delta: "length", "abort" and "error" as the engine says; else
        "tool_calls" if there was a call; else "stop". After the end nothing comes.
        """
        self.content_positions = []
        self.num_taken = 0
        for position, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                break
            self.num_taken += 1
            is_text = 0 <= token_id < FIRST_CONTROL
            if is_text and self._target is not None:
                self._bytes += self._token_bytes[token_id]
                self._num_message_tokens += 1
                if self._target == "content":
                    self.content_positions.append(position)
                    # Token by token, so that a match does not depend on the cut into chunks.
                    if self._stop_words:
                        self._flush()
            else:
                self._take(token_id)
        if self.finish_reason is None:
            self._flush()
        if self.finish_reason is None and finish_reason is not None:
            self._finish(finish_reason)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _take(self, token_id: int) -> None:
        if not 0 <= token_id < NUM_TOKENS:
            self.repairs["out_of_vocabulary"] += 1
        elif token_id < FIRST_CONTROL:
            self._take_text(self._token_bytes[token_id])
        elif token_id == START:
            self._take_start()
        elif token_id == CHANNEL:
            self._require_header().add_channel()
        elif token_id == CONSTRAIN and self._header is not None:
            self._header.content_type = bytearray()
        elif token_id == MESSAGE and self._target is None:
            self._open_message(_read(self._require_header()))
        elif token_id in _ENDS:
            self._take_end(token_id)
        else:
            self.repairs["stray_token"] += 1
            if self._header is not None:
                self._header.part().extend(b" ")  # a name ends at any control token

    def _take_text(self, text: bytes) -> None:
        if self._target is not None:
            self._bytes += text
            self._num_message_tokens += 1
        elif self._header is not None:
            self._header.part().extend(text)
        else:
            self.repairs["stray_text"] += 1
            self._stray += text

    def _take_start(self) -> None:
        if self._header is not None:
            self._leave_header(None)
        elif self._target is not None:
            self.repairs["missing_end"] += 1
            self._close_message()
        self._header = _Header()

    def _require_header(self) -> _Header:
        if self._target is not None:
            self.repairs["missing_end"] += 1
            self._close_message()
        if self._header is None:
            self.repairs["missing_start"] += 1
            self._header = _Header()
        return self._header

    def _take_end(self, end: int) -> None:
        if self._header is not None:
            self._leave_header(end)
        elif self._target is not None:
            self._close_message()
        else:
            self.repairs["stray_token"] += 1

    def _leave_header(self, end: int | None) -> None:
        """The header ended without <|message|>: a call without arguments, text, or nothing.

        end: the token that ended it; None when another message or the end of all did.
        """
        assert self._header is not None
        address, self._header = _read(self._header), None
        is_call = self._tool(address.recipient) is not None and end is not None
        if address.is_foreign:
            self.repairs["foreign_role"] += 1
        elif is_call or address.rest:
            self.repairs["missing_message"] += 1
            self._open_message(address)
            self._bytes += address.rest.encode()
            self._close_message(is_cut=end is None)
        elif address.prose and not (end is None and "to=".startswith(address.prose.strip())):
            self.repairs["missing_message"] += 1
            self._hold_unplaced(address.prose)
        else:
            self.repairs["broken_header"] += 1

    def _open_message(self, address: _Address) -> None:
        self._header = None
        self._settle_unplaced("reasoning")
        if address.prose:
            self.repairs["missing_message"] += 1
            self._message_number += 1
            self._write("reasoning", address.prose)
        self._stray.clear()
        self._message_number += 1
        self._decoder.reset()
        tool = self._tool(address.recipient)
        if address.is_foreign:
            self.repairs["foreign_role"] += 1
            self._target = "dropped"
        elif tool is not None:
            if address.recipient == tool:
                self.repairs["bare_tool_name"] += 1
            self._target = "tool_call"
            self._open_call(tool)
        else:
            self._target = self._channel_target(address)

    def _channel_target(self, address: _Address) -> Target:
        if address.recipient is not None and address.recipient.startswith("functions."):
            self.repairs["unknown_tool"] += 1
        if address.channel is None:
            self.repairs["missing_channel"] += 1
            return "unplaced" if address.recipient is None else "reasoning"
        if address.channel == "commentary" and address.recipient not in (None, *_USERS):
            return "reasoning"  # addressed to somebody, and not to the user
        return _CHANNELS[address.channel]

    def _tool(self, recipient: str | None) -> str | None:
        """The function that a recipient names, if it was offered."""
        if recipient is None:
            return None
        name = recipient.removeprefix("functions.")
        if self._tool_names is None:
            return name if name and name != recipient else None
        return name if name in self._tool_names else None

    def _open_call(self, tool: str) -> None:
        self._call = ChatDelta(
            "tool_call",
            recipient=tool,
            tool_call_id=self._new_call_id(),
            tool_call_index=self._num_calls,
        )
        self._num_calls += 1
        self._call_pieces.clear()
        self._deltas.append(self._call)

    def _close_message(self, *, is_cut: bool = False) -> None:
        self._flush(is_last=True)
        if self._target == "tool_call":
            if not is_cut and not "".join(self._call_pieces).strip():
                self._write("tool_call", "{}")
        elif self._target == "content":
            self._release_held()
        self._target = None

    def _flush(self, *, is_last: bool = False) -> None:
        """Writes what the open message has so far, up to its last whole character."""
        target = self._target
        if target is None or (target == "unplaced" and not is_last):
            return
        text = self._decoder.decode(bytes(self._bytes), is_last)
        num_tokens = self._num_message_tokens
        self._bytes.clear()
        self._num_message_tokens = 0
        if target == "unplaced":
            self._hold_unplaced(text, num_tokens)
        elif target != "dropped":
            self.num_tokens[target] += num_tokens
            self._write(target, text)

    def _hold_unplaced(self, text: str, num_tokens: int = 0) -> None:
        self._settle_unplaced("reasoning")
        self._unplaced = (text, num_tokens)

    def _settle_unplaced(self, channel: Channel) -> None:
        if self._unplaced is None:
            return
        (text, num_tokens), self._unplaced = self._unplaced, None
        self._message_number += 1
        self.num_tokens[channel] += num_tokens
        self._write(channel, text)

    def _write(self, channel: Channel, text: str) -> None:
        if channel == "content" and self._stop_words:
            text = self._without_stop_word(self._held + text)
        self._append(channel, text)

    def _append(self, channel: Channel, text: str) -> None:
        if not text or self.finish_reason is not None:
            return
        if channel == "tool_call":
            assert self._call is not None
            self._call_pieces.append(text)
            delta = replace(self._call, text=text)
        else:
            if self._last_message.setdefault(channel, self._message_number) < self._message_number:
                text = "\n" + text
                self._last_message[channel] = self._message_number
            delta = ChatDelta(channel, text)
        self._deltas.append(delta)

    def _without_stop_word(self, text: str) -> str:
        """The part of the text that is safe to show; the rest is held, or the answer ends."""
        self._held = ""
        starts = [start for word in self._stop_words if (start := text.find(word)) >= 0]
        if starts:
            self._append("content", text[: min(starts)])
            self._end("stop")
            return ""
        for length in range(min(self._longest_prefix, len(text)), 0, -1):
            if text[-length:] in self._stop_prefixes:
                self._held = text[-length:]
                return text[:-length]
        return text

    def _release_held(self) -> None:
        text, self._held = self._held, ""
        self._append("content", text)

    def _finish(self, reason: FinishReason) -> None:
        is_call_cut = self._target == "tool_call" or self._header is not None
        if self._header is not None:
            self._leave_header(None)
        elif self._target is not None:
            self._close_message(is_cut=reason != "stop")
        if self._unplaced is None and not self._num_calls and "content" not in self._last_message:
            self._unplaced = (self._stray.decode(errors="replace"), 0)
        self._settle_unplaced("content")
        self._release_held()
        if self.finish_reason is None:
            self._end(reason, is_call_cut=is_call_cut)

    def _end(self, reason: FinishReason, *, is_call_cut: bool = False) -> None:
        if reason == "stop" and self._num_calls:
            is_whole = not is_call_cut or _is_json("".join(self._call_pieces))
            reason = "tool_calls" if is_whole else "length"
        self.finish_reason = reason
        self._deltas.append(ChatDelta("content", finish_reason=reason))


def opening_of(prompt: Sequence[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    """The header with which a prompt leaves off, without content: it is not part of the answer.

    Empty where the prompt's last message is over. A prompt without any message is plain text,
    which the answer continues as plain text.
    """
    starts = [position for position, token_id in enumerate(prompt) if token_id == START]
    if not starts:
        return (START, CHANNEL, *vocabulary.encode("final"), MESSAGE)
    opening = tuple(prompt[starts[-1] :])
    if not _ENDS.isdisjoint(opening):
        return ()
    return opening[: opening.index(MESSAGE) + 1] if MESSAGE in opening else opening


def _read(header: _Header) -> _Address:
    role_text = header.role.decode(errors="replace")
    role = _ROLE.match(role_text)
    prose = role_text[role.end() :] if role else role_text
    recipient: str | None = None
    channel: str | None = None
    rest = ""
    if found := _RECIPIENT.match(prose.lstrip()):
        recipient, rest, prose = found[1], found.string[found.end() :], ""
    elif (word := _WORD.match(prose)) and word[1] in _CHANNELS and not prose[word.end() :].strip():
        channel, prose = word[1], ""  # <|channel|> is missing, the name stands glued to the role
    for part in header.channels:
        text = part.decode(errors="replace")
        if found := _RECIPIENT.search(text):
            recipient = recipient or found[1]
            text = f"{text[: found.start()]} {text[found.end() :]}"
        word = _WORD.match(text)
        if word and word[1] in _CHANNELS:
            channel, rest = word[1], text[word.end() :]
        else:
            # One unknown word is a channel's name; more are a text.
            rest = text if len(text.split()) > 1 else ""
    if header.content_type is not None:
        text = header.content_type.decode(errors="replace")
        word = _WORD.match(text)
        rest = text[word.end() :] if word else text
    rest = _CONTENT_TYPE.sub("", rest, count=1) if _CONTENT_TYPE.match(rest) else rest.lstrip()
    if recipient is not None:
        # Text that spells a control token cannot be part of a name.
        recipient = recipient.partition("<|")[0] or None
    if role is not None and not role[1].startswith("assistant"):
        return _Address(is_foreign=True, channel=None, recipient=None, prose="", rest="")
    return _Address(
        is_foreign=False,
        channel=channel,
        recipient=recipient,
        prose=prose if prose.strip() else "",
        rest=rest,
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
