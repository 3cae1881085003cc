"""What an engine's own process and its parent tell each other, over one pair of sockets.

Each message is one pickle, which says itself where it ends. Both ends are this package in the same
Python, and nobody else holds the sockets. Chunks are plain tuples: those C reads and writes
alone, 64 of them in some 20 us, where a frozen dataclass takes some microseconds each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gptoss_engine.config import EngineConfig
from gptoss_engine.types import EngineStats, FinishReason, GenerationRequest

PICKLE_PROTOCOL = 5
LOG_FORMAT = "%(asctime)s %(name)s: %(message)s"  # of both processes, which share a log

# The generation's number, and the fields of a TokenChunk behind generation_id.
Chunk = tuple[int, tuple[Any, ...]]


class Start(NamedTuple):
    """The first word to a child. loader: "module:function", which makes an Engine of the config."""

    config: EngineConfig
    loader: str


class Ready(NamedTuple):
    """The first word of a child; an exception in its place is why the engine cannot be loaded."""

    stats: EngineStats


class Submit(NamedTuple):
    """number: the parent's own for this generation. Answered with None or an exception."""

    number: int
    request: GenerationRequest


class Abort(NamedTuple):
    generation_id: str
    error: str
    reason: FinishReason


class Drain(NamedTuple):
    """Answered when the last final chunk was told: whether all generations ended by themselves."""

    number: int
    seconds: float


class Stop(NamedTuple):
    """Everybody's final chunk, and then the child ends."""


class Report(NamedTuple):
    """All that a step brought, or the answer to the command of that number."""

    stats: EngineStats
    is_broken: bool
    chunks: Sequence[Chunk] = ()
    answer: tuple[int, bool | Exception | None] | None = None
