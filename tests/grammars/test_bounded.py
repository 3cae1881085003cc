"""Whatever a grammar does, who asked goes on."""

import threading
import time

import pytest

from gptoss_grammars import RefusedGrammar, bounded, one_line

SECONDS = 30.0  # a limit for what should take milliseconds


def descend(depth: int) -> int:
    return 0 if depth == 0 else 1 + descend(depth - 1)


def test_the_answer_is_the_works() -> None:
    here = threading.get_ident()
    assert bounded(threading.get_ident, SECONDS) != here
    size = threading.stack_size()
    assert bounded(lambda: descend(500), SECONDS) == 500
    assert threading.stack_size() == size, "other threads have the stack that they had"


class Panic(BaseException):
    """As what Rust's panics become."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_what_is_raised_is_a_refusal_in_one_line(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("index\n  out of bounds")

    with pytest.raises(RefusedGrammar, match=r"^index out of bounds$"):
        bounded(fail, SECONDS)


def test_who_takes_too_long_is_left_alone_and_four_of_them_hold_all_places() -> None:
    may_end, ended = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        may_end.wait(SECONDS)
        ended.release()

    try:
        for _ in range(4):
            with pytest.raises(RefusedGrammar, match=r"^it takes longer than 0\.01 s$"):
                bounded(hang, 0.01)
        started = time.monotonic()
        with pytest.raises(RefusedGrammar, match=r"^others have taken longer than 0\.01 s"):
            bounded(lambda: 1, 0.01)
        assert time.monotonic() - started < SECONDS / 2
    finally:
        may_end.set()
    for _ in range(4):
        assert ended.acquire(timeout=SECONDS)
    assert bounded(lambda: 2, SECONDS) == 2, "a place is free again"


def test_a_librarys_words_are_one_line_of_a_sentence() -> None:
    assert one_line("a\n  b <non-verbose/> c") == "a b c"
    assert len(one_line("x" * 1000)) == 300
