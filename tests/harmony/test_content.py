"""Stop words, against the plainest way to look for them."""

import random
import time

import pytest

from gptoss_harmony.content import StoppableText

ALPHABET = "abAB\n中"


def plainly(text: str, words: tuple[str, ...]) -> tuple[str, bool]:
    """What is shown of a text, and whether a word ended it: that which is complete first."""
    for end in range(1, len(text) + 1):
        lengths = [len(word) for word in words if text[:end].endswith(word)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def test_it_is_over_where_the_first_word_is_complete() -> None:
    for number in range(3000):
        chance = random.Random(number)
        words = tuple(
            "".join(chance.choices(ALPHABET[: chance.randint(1, 6)], k=chance.randint(1, 5)))
            for _ in range(chance.randint(0, 4))
        )
        pieces = [
            "".join(chance.choices(ALPHABET[: chance.randint(1, 6)], k=chance.randint(0, 4)))
            for _ in range(chance.randint(0, 12))
        ]
        stoppable, shown, tokens, is_over = StoppableText(words), "", [], False
        starts = [len("".join(pieces[:place])) for place in range(len(pieces))]
        for token, piece in enumerate(pieces):
            written = stoppable.write(piece, [token])
            shown += written.text
            tokens += written.tokens
            seen = "".join(pieces[: token + 1])
            # Nothing is held back that begins no word, and nothing shown that may begin one.
            begun = max(
                (n for word in words for n in range(len(word)) if seen.endswith(word[:n])),
                default=0,
            )
            is_over = written.is_over
            if is_over:
                break
            assert shown == seen[: len(seen) - begun]
            first = stoppable.first_token
            assert first is None or tokens == list(range(first))
        else:
            written = stoppable.release()
            shown += written.text
            tokens += written.tokens
            assert tokens == list(range(len(pieces)))
        assert (shown, is_over) == plainly("".join(pieces), words), (number, words, pieces)
        if is_over:
            assert tokens == [place for place, start in enumerate(starts) if start < len(shown)]
        assert stoppable.first_token is None
        assert stoppable.release().text == ""


def test_many_long_words_cost_no_more_than_one() -> None:
    """Sixteen words of 256 characters, and a text that nearly holds them all the time."""
    words = tuple("a" * 200 + chr(ord("b") + number) * 56 for number in range(16))
    StoppableText(words)
    stoppable = StoppableText(words)
    start = time.process_time()
    for token in range(20_000):
        stoppable.write("aaaa", [token])
    assert (time.process_time() - start) / 20_000 < 30e-6


@pytest.mark.parametrize("words", [(), ("",)])
def test_without_words_all_is_written_at_once(words: tuple[str, ...]) -> None:
    stoppable = StoppableText(words)
    assert stoppable.stop_words == ()
    assert stoppable.write("END", [3]) == ("END", [3], False)
    assert stoppable.release() == ("", [], False)
