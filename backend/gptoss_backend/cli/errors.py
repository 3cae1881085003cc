"""How a command fails: in sentences on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class CommandFailed(RuntimeError):
    """A command could not do what it was asked: the message is what the user reads."""


def say(error: BaseException) -> None:
    """The error, if it has words, and its notes."""
    for sentence in (str(error), *getattr(error, "__notes__", ())):
        if sentence:
            print(f"gptoss: {sentence}", file=sys.stderr)  # noqa: T201


@contextmanager
def interruptible() -> Iterator[None]:
    """What an interruption leaves is said here: typer ends the command without a word."""
    try:
        yield
    except KeyboardInterrupt as error:
        say(error)
        raise
