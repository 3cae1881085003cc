"""What the user sees, on its way out: text that may begin a stop word is held back."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Written(NamedTuple):
    """text to show, and the tokens that have a part in it. is_over: a stop word follows it."""

    text: str
    tokens: Sequence[int]
    is_over: bool = False


class StoppableText:
    """Content with stop words: it is over where the first of them is complete.

    Given token by token, it writes the same text and tokens however the answer is cut into chunks.
    A token whose text begins inside a stop word, or after it, is never written.
    """

    def __init__(self, stop_words: Sequence[str]) -> None:
        self.stop_words = tuple(word for word in stop_words if word)
        self._matcher = _matcher(self.stop_words)
        self._state = 0
        self._held = ""
        self._tokens: list[tuple[int, int]] = []  # where in it a token begins, its number

    @property
    def first_token(self) -> int | None:
        """The first of the tokens that are held back."""
        return self._tokens[0][1] if self._tokens else None

    def write(self, text: str, tokens: Sequence[int]) -> Written:
        """What may be shown by now: all but an end that may begin a stop word."""
        matcher = self._matcher
        if not self.stop_words or (
            text and not self._held and not self._tokens and matcher.first.isdisjoint(text)
        ):
            return Written(text, tokens)
        begin = len(self._held)
        self._held += text
        self._tokens += [(begin, token) for token in tokens]
        state = self._state
        for position, character in enumerate(text, begin + 1):
            while state and character not in matcher.follow[state]:
                state = matcher.fallback[state]
            state = matcher.follow[state].get(character, 0)
            if length := matcher.complete[state]:
                written = self._write(position - length)
                self.release()
                return Written(written.text, written.tokens, is_over=True)
        self._state = state
        return self._write(len(self._held) - matcher.depth[state])

    def release(self) -> Written:
        """All that is held: nothing follows that could make it a stop word."""
        written = Written(self._held, [token for _, token in self._tokens])
        self._state, self._held, self._tokens = 0, "", []
        return written

    def _write(self, end: int) -> Written:
        text, self._held = self._held[:end], self._held[end:]
        written = [token for begin, token in self._tokens if begin < end]
        self._tokens = [(begin - end, token) for begin, token in self._tokens if begin >= end]
        return Written(text, written)


class _Matcher(NamedTuple):
    """Aho and Corasick's automaton: one step a character, whatever the number of words.

    A state is a beginning of a word; state 0 is none. follow: the longer beginning that a
    character makes. fallback: the longest other beginning with which this one ends. depth: its
    length. complete: the length of the longest word with which it ends, or 0.
    """

    first: frozenset[str]
    follow: list[dict[str, int]]
    fallback: list[int]
    depth: list[int]
    complete: list[int]


@lru_cache(maxsize=16)
def _matcher(words: tuple[str, ...]) -> _Matcher:
    matcher = _Matcher(frozenset(word[0] for word in words), [{}], [0], [0], [0])
    for word in words:
        state = 0
        for character in word:
            if character not in matcher.follow[state]:
                matcher.follow[state][character] = len(matcher.follow)
                matcher.follow.append({})
                matcher.fallback.append(0)
                matcher.depth.append(matcher.depth[state] + 1)
                matcher.complete.append(0)
            state = matcher.follow[state][character]
        matcher.complete[state] = len(word)
    waiting = deque(matcher.follow[0].values())
    while waiting:
        state = waiting.popleft()
        for character, longer in matcher.follow[state].items():
            waiting.append(longer)
            back = matcher.fallback[state]
            while back and character not in matcher.follow[back]:
                back = matcher.fallback[back]
            back = matcher.follow[back].get(character, 0)
            matcher.fallback[longer] = back if back != longer else 0
            matcher.complete[longer] = max(matcher.complete[longer], matcher.complete[back])
    return matcher
