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
    glued_tool_name   an offered function with a channel or a content type glued to its name
"""

import codecs
import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from gptoss_harmony.builtin_tools import CODE_TOOL
from gptoss_harmony.content import StoppableText, Written
from gptoss_harmony.types import CallOutcome, Channel, ChatDelta, FinishReason
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
# A name ends where no name goes on: at white space, a quote, a brace, control text.
_RECIPIENT = re.compile(r"to=\s*[\"'`]?([\w.-]*)[\"'`]?")
_CHANNEL = re.compile(r"[\W_]*(analysis|commentary|final)\1*(?!\w)", re.IGNORECASE)
_CONTENT_TYPE = re.compile(r"\s*(?:json|code|text)\b\s*")
_GLUED = re.compile(r"(?:analysis|commentary|final|json|code)$")
_MAX_NAME_LENGTH = 128  # of a name that is searched for glued words

Target = Literal["reasoning", "content", "tool_call", "unplaced", "dropped"]
"""Where a message's content goes; "unplaced" until the next message or the end decides."""

Pieces = list[tuple[str, int]]
"""Text token by token, each with the token's number; a token that ends no character has ""."""


class _Text:
    """Bytes of a header as they come, and which token brought which."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._tokens: list[tuple[int, int]] = []  # where a token's bytes end, its number

    def add(self, data: bytes, token: int) -> None:
        self._bytes += data
        self._tokens.append((len(self._bytes), token))

    def end_word(self) -> None:
        self._bytes += b" "

    @property
    def first_token(self) -> int | None:
        return self._tokens[0][1] if self._tokens else None

    def decode(self) -> str:
        """Broken bytes become lone surrogates, so that lengths can be told in bytes."""
        return self._bytes.decode(errors="surrogateescape")

    def pieces(self, text: str | None = None) -> Pieces:
        """The text of its tokens, or of those that have a part in `text`, with which it ends.

        The prompt's tokens, whose numbers are below 0, are no part of the answer.
        """
        end = len(self._bytes)
        start = 0 if text is None else end - len(text.encode(errors="surrogateescape"))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces: Pieces = []
        last = len(self._tokens) - 1
        for place, (token_end, token) in enumerate(self._tokens):
            if token_end > start:
                piece = decoder.decode(bytes(self._bytes[start:token_end]), place == last)
                pieces.append((piece, token))
                start = token_end
        return [(piece, token) for piece, token in pieces if token >= 0]


@dataclass(slots=True)
class _Header:
    """A header's text as it comes, parted by the control token before it."""

    first_token: int
    role: _Text = field(default_factory=_Text)
    channels: list[_Text] = field(default_factory=list)
    content_type: _Text | None = None

    def add_channel(self) -> None:
        self.channels.append(_Text())
        self.content_type = None  # it stands after the channel, or means nothing

    def part(self) -> _Text:
        """Where the next text belongs."""
        if self.content_type is not None:
            return self.content_type
        return self.channels[-1] if self.channels else self.role


@dataclass(frozen=True, slots=True)
class _Address:
    """What a header says: by whom, on which channel, to whom; and text that is no header."""

    is_foreign: bool = False
    channel: str | None = None
    recipient: str | None = None
    prose: Pieces = field(default_factory=list)
    """Text before the first <|channel|> that belongs to no header."""
    rest: Pieces = field(default_factory=list)
    """Text after the channel's name and content type: content, if <|message|> is missing."""
    is_rest_a_type: bool = False
    """Whether the rest may be nothing but an unknown content type."""


class HarmonyStream:
    """One answer's tokens in, its deltas out; any cut into chunks gives the same joined deltas.

    tool_names: the functions offered; None offers any function by its full name (raw prompts).
    builtin_names: gpt-oss's own functions that are offered, which have no namespace of ours. A
        program for CODE_TOOL comes as JSON: {"code": "…"}.
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
        builtin_names: Collection[str] = (),
        stop_words: Sequence[str] = (),
        opening: Sequence[int] | None = None,
        new_call_id: Callable[[], str] | None = None,
    ) -> None:
        self.repairs: Counter[str] = Counter()
        self.calls: Counter[CallOutcome] = Counter()
        """Tool calls that are over, by outcome."""
        self.num_tokens: Counter[Channel] = Counter()
        """Tokens of text so far by channel; headers and control tokens belong to none."""
        self.content_tokens: list[int] = []
        """Which of the answer's tokens, numbered from 0, are the content of the last push."""
        self.num_taken = 0
        """How many of the tokens last pushed belong to the answer: what follows a stop word is the
        engine's run-ahead."""
        self.finish_reason: FinishReason | None = None
        """Set once the answer is over. If the engine has not said so yet, abort it."""

        self._token_bytes = vocabulary.token_bytes
        self._tool_names = None if tool_names is None else frozenset(tool_names)
        self._builtin_names = frozenset(builtin_names)
        self._content = StoppableText(stop_words)
        self._is_content_checked = bool(self._content.stop_words)
        self._new_call_id = new_call_id or (lambda: f"call_{uuid.uuid4().hex[:24]}")

        self._number = 0  # of the token that is being read
        # At most one of the two is set: a header being read, or a message's content.
        self._header: _Header | None = None
        self._target: Target | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = bytearray()  # of the open message, not decoded yet
        self._message_tokens: list[int] = []  # of the open message, not written yet
        self._unplaced: Pieces = []  # a message without a channel
        self._stray = _Text()  # text between messages: the answer, if there is no other
        self._num_calls = 0
        self._call: ChatDelta | None = None  # the last call's first delta
        self._call_pieces: list[str] = []
        self._message_number = 0
        self._last_message: dict[Channel, int] = {}  # with text, by channel
        self._deltas: list[ChatDelta] = []

        if opening is None:
            opening = (START, *vocabulary.encode("assistant"))
        self._number -= len(opening)  # the prompt's tokens have numbers below 0
        for token_id in opening:
            self._take(token_id)
            self._number += 1
        self.repairs.clear()  # those of the prompt

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> list[ChatDelta]:
        """The deltas of some more tokens. With a finish_reason they are the last.

        The reason of the last delta: "length", "abort" and "error" as the engine says; else
        "tool_calls" if there was a call; else "stop". After the end nothing comes.
        """
        self.content_tokens = []
        num_before = self._number
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            if 0 <= token_id < FIRST_CONTROL and self._target is not None:
                self._bytes += self._token_bytes[token_id]
                self._message_tokens.append(self._number)
                # Token by token, so that a match does not depend on the cut into chunks.
                if self._target == "unplaced" or (
                    self._is_content_checked and self._target == "content"
                ):
                    self._flush()
            else:
                self._take(token_id)
            self._number += 1
        self.num_taken = self._number - num_before
        if self.finish_reason is None:
            self._flush()
        if self.finish_reason is None and finish_reason is not None:
            self._finish(finish_reason)
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def first_undecided(self) -> int:
        """No token before this one will be content that was not given yet."""
        waiting = [self._number]
        if self._header is not None:
            waiting.append(self._header.first_token)
        if self._unplaced:
            waiting.append(self._unplaced[0][1])
        for first in (self._content.first_token, self._stray.first_token):
            if first is not None:
                waiting.append(first)
        return min(waiting)

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
            self._header.content_type = _Text()
        elif token_id == MESSAGE and self._target is None:
            self._open_message(_read(self._require_header()))
        elif token_id in _ENDS:
            self._take_end(token_id)
        else:
            self.repairs["stray_token"] += 1
            if self._header is not None:
                self._header.part().end_word()  # a name ends at any control token

    def _take_text(self, text: bytes) -> None:
        if self._target is not None:
            self._bytes += text
            self._message_tokens.append(self._number)
        elif self._header is not None:
            self._header.part().add(text, self._number)
        else:
            self.repairs["stray_text"] += 1
            self._stray.add(text, self._number)

    def _take_start(self) -> None:
        if self._header is not None:
            self._leave_header(None)
        elif self._target is not None:
            self.repairs["missing_end"] += 1
            self._close_message()
        self._header = _Header(self._number)

    def _require_header(self) -> _Header:
        if self._target is not None:
            self.repairs["missing_end"] += 1
            self._close_message()
        if self._header is None:
            self.repairs["missing_start"] += 1
            self._header = _Header(self._number)
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
        rest = "".join(text for text, _ in address.rest).strip()
        prose = "".join(text for text, _ in address.prose).strip()
        # What was cut may be the beginning of a recipient, or of a content type.
        is_begun = end is None and (address.is_rest_a_type or _begins_a_word(rest))
        if address.is_foreign:
            self.repairs["foreign_role"] += 1
        elif is_call or (rest and not is_begun):
            self.repairs["missing_message"] += 1
            self._open_message(address)
            self._write_rest(address.rest)
            self._close_message(is_cut=end is None, has_end=end is not None)
        elif prose and not (end is None and "to=".startswith(prose)):
            self.repairs["missing_message"] += 1
            self._settle_unplaced("reasoning")
            self._unplaced = address.prose
        else:
            self.repairs["broken_header"] += 1

    def _write_rest(self, pieces: Pieces) -> None:
        """The open message's content, which came before its message token was due."""
        if self._target == "unplaced":
            self._unplaced = pieces
        elif self._target is not None and self._target != "dropped":
            self._write_pieces(self._target, pieces)

    def _open_message(self, address: _Address) -> None:
        self._header = None
        self._settle_unplaced("reasoning")
        if address.prose:
            self.repairs["missing_message"] += 1
            self._message_number += 1
            self._write_pieces("reasoning", address.prose)
        self._stray = _Text()
        self._message_number += 1
        tool = self._tool(address.recipient)
        if address.is_foreign:
            self.repairs["foreign_role"] += 1
            self._target = "dropped"
        elif tool is not None:
            if tool not in self._builtin_names and address.recipient != f"functions.{tool}":
                is_bare = address.recipient == tool
                self.repairs["bare_tool_name" if is_bare else "glued_tool_name"] += 1
            self._target = "tool_call"
            self._open_call(tool)
        else:
            self._target = self._channel_target(address)

    def _channel_target(self, address: _Address) -> Target:
        if address.recipient is not None and _is_tools(address.recipient):
            self.repairs["unknown_tool"] += 1
            self.calls["unknown"] += 1
        if address.channel is None:
            self.repairs["missing_channel"] += 1
            return "unplaced" if address.recipient is None else "reasoning"
        if address.channel == "commentary" and address.recipient not in (None, *_USERS):
            return "reasoning"  # addressed to somebody, and not to the user
        return _CHANNELS[address.channel]

    def _tool(self, recipient: str | None) -> str | None:
        """The function that a recipient names, if it was offered."""
        if recipient is None or recipient in self._builtin_names:
            return recipient
        name = recipient.removeprefix("functions.")
        if self._tool_names is None:
            return name if name and name != recipient else None
        # Whole first: a function's own name may end in such a word.
        while name not in self._tool_names and name not in self._builtin_names:
            glued = _GLUED.search(name) if len(name) <= _MAX_NAME_LENGTH else None
            if glued is None:
                return None
            name = name[: glued.start()]
        return name

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
        if self._is_code:
            self._append("tool_call", '{"code": "')

    @property
    def _is_code(self) -> bool:
        """Whether the open call is a program and not JSON."""
        return (
            self._call is not None
            and self._call.recipient == CODE_TOOL
            and CODE_TOOL in self._builtin_names
        )

    def _close_message(self, *, is_cut: bool = False, has_end: bool = True) -> None:
        """is_cut: by the token limit or the like. has_end: whether the model ended it."""
        self._flush(is_last=True)
        if self._target == "tool_call":
            self._close_call(is_cut=is_cut, has_end=has_end)
        elif self._target == "content":
            self._write_content(self._content.release())
        self._target = None

    def _close_call(self, *, is_cut: bool, has_end: bool) -> None:
        if not is_cut and self._is_code:
            self._append("tool_call", '"}')
        elif not is_cut and not "".join(self._call_pieces).strip():
            self._append("tool_call", "{}")
        if isinstance(_parsed("".join(self._call_pieces)), dict):
            self.calls["whole"] += 1
        else:
            self.calls["invalid" if has_end else "cut"] += 1

    def _flush(self, *, is_last: bool = False) -> None:
        """Writes what the open message has so far, up to its last whole character."""
        target = self._target
        if target is None:
            return
        text = self._decoder.decode(bytes(self._bytes), is_last)
        tokens = self._message_tokens
        self._bytes.clear()
        self._message_tokens = []
        if target == "unplaced":
            self._hold_unplaced(text, tokens)
        elif target != "dropped":
            self.num_tokens[target] += len(tokens)
            self._write(target, text, tokens)

    def _hold_unplaced(self, text: str, tokens: Sequence[int]) -> None:
        if tokens:
            self._unplaced += [*(("", token) for token in tokens[:-1]), (text, tokens[-1])]
        elif text:  # what was left of a broken character
            before, token = self._unplaced[-1]
            self._unplaced[-1] = (before + text, token)

    def _settle_unplaced(self, channel: Channel) -> None:
        if self._unplaced:
            pieces, self._unplaced = self._unplaced, []
            self._message_number += 1
            self._write_pieces(channel, pieces)

    def _write_pieces(self, channel: Channel, pieces: Pieces) -> None:
        tokens = [token for _, token in pieces]
        self.num_tokens[channel] += len(tokens)
        if channel == "content" and self._is_content_checked:
            for text, token in pieces:
                self._write(channel, text, [token])
        else:
            self._write(channel, "".join(text for text, _ in pieces), tokens)

    def _write(self, channel: Channel, text: str, tokens: Sequence[int]) -> None:
        if channel == "content":
            self._write_content(self._content.write(text, tokens))
        elif channel == "tool_call" and self._is_code:
            self._append(channel, json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._append(channel, text)

    def _write_content(self, written: Written) -> None:
        if self.finish_reason is not None:
            return
        self._append("content", written.text)
        self.content_tokens += written.tokens
        if written.is_over:
            self._end("stop")

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

    def _finish(self, reason: FinishReason) -> None:
        is_call_cut = self._target == "tool_call" or self._header is not None
        if self._header is not None:
            self._leave_header(None)
        elif self._target is not None:
            self._close_message(is_cut=reason != "stop", has_end=False)
        if not self._unplaced and not self._num_calls and "content" not in self._last_message:
            self._unplaced = self._stray.pieces()
        self._settle_unplaced("content")
        self._write_content(self._content.release())
        if self.finish_reason is None:
            self._end(reason, is_call_cut=is_call_cut)

    def _end(self, reason: FinishReason, *, is_call_cut: bool = False) -> None:
        if reason == "stop" and self._num_calls:
            is_cut = is_call_cut and _parsed("".join(self._call_pieces)) is None
            reason = "length" if is_cut else "tool_calls"
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
    role_text = header.role.decode()
    role = _ROLE.match(role_text)
    if role is not None and not role[1].startswith("assistant"):
        return _Address(is_foreign=True)
    channel, recipient, rest, prose = _read_role(role_text[role.end() :] if role else role_text)
    rest_of = header.role
    is_rest_a_type = False
    for part in header.channels:
        found, text = _without_recipient(part.decode())
        recipient = recipient or found
        rest_of = part
        if named := _CHANNEL.match(text):
            channel, rest = named[1].lower(), text[named.end() :]
        else:
            # One unknown word is a channel's name; more are a text.
            rest = text if len(text.split()) > 1 else ""
    if header.content_type is not None:
        found, rest = _without_recipient(header.content_type.decode())
        recipient = recipient or found
        rest_of = header.content_type
        is_rest_a_type = len(rest.split()) < 2 and not _CONTENT_TYPE.match(rest)
    rest = _CONTENT_TYPE.sub("", rest, count=1) if _CONTENT_TYPE.match(rest) else rest.lstrip()
    return _Address(
        channel=channel,
        recipient=recipient,
        prose=header.role.pieces(prose) if prose.strip() else [],
        rest=rest_of.pieces(rest) if rest.strip() else [],
        is_rest_a_type=is_rest_a_type,
    )


def _read_role(text: str) -> tuple[str | None, str | None, str, str]:
    """What follows a role: a channel, a recipient and what stands behind it; or prose.

    The channel's name stands here where <|channel|> is missing.
    """
    named = _CHANNEL.match(text)
    after = text[named.end() :] if named else text
    channel = named[1].lower() if named else None
    if found := _RECIPIENT.match(after.lstrip()):
        return channel, found[1].rstrip(".") or None, found.string[found.end() :], ""
    if named and not after.strip():
        return channel, None, "", ""
    return None, None, "", text


def _without_recipient(text: str) -> tuple[str | None, str]:
    found = _RECIPIENT.search(text)
    if found is None:
        return None, text
    # A sentence's full stop is no part of a name.
    return found[1].rstrip(".") or None, f"{text[: found.start()]} {text[found.end() :]}"


def _begins_a_word(text: str) -> bool:
    """Whether a text may be the beginning of something that headers have."""
    return any(word.startswith(text) for word in ("to=", "json", "code", "text"))


def _is_tools(recipient: str) -> bool:
    """Whether a recipient is a function's name, whoever offers it."""
    return recipient.startswith(("functions.", "browser.")) or recipient == CODE_TOOL


def _parsed(text: str) -> object:
    """JSON's value; None where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
