"""Grammars within bounds, for whoever refuses one and for whoever follows one.

The format's side checks a grammar by the name of its field, the engine's compiles it before it is
admitted, and both must outlive any. So what both keep to stands here, with nothing of either.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

MAX_GUIDE_LENGTH = 65_536
"""Characters of a whole guide. llguidance compiles nearly all of them within a second."""
_MOST_WORDS = 300  # characters of a library's sentence
# llguidance goes down a chain of rules or references by recursion, and without a stack for it the
# process ends. The longest chains of MAX_GUIDE_LENGTH took 32 MiB; what is not used costs nothing.
_STACK_BYTES = 256 * 2**20
_stack_size = threading.Lock()  # the process has but one for threads to come
# Of what is compiled, or took too long, which nothing can stop.
_places = threading.BoundedSemaphore(4)


class RefusedGrammar(ValueError):
    """Says in one line why there is no answer."""


def bounded(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns, from a thread that has room for any grammar's recursion.

    RefusedGrammar where it raises anything, a panic of Rust's too, or takes longer: then it goes on
    in vain, since nothing stops it. Four may be at it, others wait for as long at most.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001  a panic of Rust's is no Exception
            answer.set_exception(RefusedGrammar(one_line(str(error))))
        finally:
            _places.release()

    if not _places.acquire(timeout=seconds):
        raise RefusedGrammar(f"others have taken longer than {seconds:g} s and still do")
    with _stack_size:
        others = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(others)
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise RefusedGrammar(f"it takes longer than {seconds:g} s") from None


def one_line(text: str) -> str:
    """A library's words, which may be many lines, as part of a sentence."""
    words = " ".join(text.replace("<non-verbose/>", "").split())
    return words if len(words) <= _MOST_WORDS else f"{words[: _MOST_WORDS - 1]}…"
