"""What the user sees, on its way out: text that may begin a stop word is held back."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """text to show, and the tokens that have a part in it. is_over: a stop word follows it."""

    text: str
    tokens: Sequence[int]
    is_over: bool = False


class StoppableText:
    """Content with stop words. Given token by token, what it writes depends on no cut into chunks.

    A token whose text begins inside a stop word, or after it, is never written.
    """

    def __init__(self, stop_words: Sequence[str]) -> None:
        self.stop_words = tuple(word for word in stop_words if word)
        self._prefixes = frozenset(
            word[:length] for word in self.stop_words for length in range(1, len(word))
        )
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        self._held = ""
        self._tokens: list[tuple[int, int]] = []  # where in it a token begins, its number

    @property
    def first_token(self) -> int | None:
        """The first of the tokens that are held back."""
        return self._tokens[0][1] if self._tokens else None

    def write(self, text: str, tokens: Sequence[int]) -> Written:
        """What may be shown by now: all but an end that may begin a stop word."""
        if not self.stop_words:
            return Written(text, tokens)
        begin = len(self._held)
        self._held += text
        self._tokens += [(begin, token) for token in tokens]
        starts = [start for word in self.stop_words if (start := self._held.find(word)) >= 0]
        if starts:
            written = self._write(min(starts))
            self._held, self._tokens = "", []
            return Written(written.text, written.tokens, is_over=True)
        for length in range(min(self._longest_prefix, len(self._held)), 0, -1):
            if self._held[-length:] in self._prefixes:
                return self._write(len(self._held) - length)
        return self._write(len(self._held))

    def release(self) -> Written:
        """All that is held: nothing follows that could make it a stop word."""
        written = Written(self._held, [token for _, token in self._tokens])
        self._held, self._tokens = "", []
        return written

    def _write(self, end: int) -> Written:
        text, self._held = self._held[:end], self._held[end:]
        written = [token for begin, token in self._tokens if begin < end]
        self._tokens = [(begin - end, token) for begin, token in self._tokens if begin >= end]
        return Written(text, written)
