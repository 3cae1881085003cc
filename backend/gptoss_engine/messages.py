"""What an engine's own process and its parent tell each other, over one pair of sockets.

Each message is one pickle. A command has its length before it, four bytes: the child takes all that
have come at once. Both ends are this package in the same
Python, and nobody else holds the sockets. What is said often is plain tuples: those C reads and
writes alone, 64 chunks in some 20 us, where a frozen dataclass takes some microseconds each, and
several times that in a process that has just slept.
"""

import pickle
import struct
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from gptoss_engine.config import EngineConfig
from gptoss_engine.types import EngineStats, FinishReason, GenerationRequest, SamplingParams

PICKLE_PROTOCOL = 5
LOG_FORMAT = "%(asctime)s %(name)s: %(message)s"  # of both processes, which share a log

# The generation's number, and the fields of a TokenChunk behind generation_id.
Chunk = tuple[int, tuple[Any, ...]]


# An EngineStats and a SamplingParams as the tuples of their fields.
stats_values = attrgetter(*(field.name for field in fields(EngineStats)))
_sampling_values = attrgetter(*(field.name for field in fields(SamplingParams)))


class Start(NamedTuple):
    """The first word to a child. loader: "module:function", which makes an Engine of the config."""

    config: EngineConfig
    loader: str


class Ready(NamedTuple):
    """The first word of a child; an exception in its place is why the engine cannot be loaded."""

    stats: EngineStats


class Submit(NamedTuple):
    """number: the parent's own for this generation. sampling: the fields of a SamplingParams.

    Answered with an exception, or with None, or by a report that has it among the admitted.
    """

    number: int
    generation_id: str
    token_ids: tuple[int, ...]
    sampling: tuple[Any, ...]
    deadline: float | None
    cache_salt: str

    @classmethod
    def of(cls, number: int, request: GenerationRequest) -> "Submit":
        return cls(
            *(number, request.generation_id, request.token_ids),
            _sampling_values(request.sampling),
            *(request.deadline, request.cache_salt),
        )

    @property
    def request(self) -> GenerationRequest:
        sampling = SamplingParams(*self.sampling)
        return GenerationRequest(
            self.generation_id, self.token_ids, sampling, self.deadline, self.cache_salt
        )


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
    """All that a step brought, or the answer to the command of that number. Sent as a plain tuple.

    stats: the fields of an EngineStats. admitted: numbers of generations; whoever has a chunk was
    admitted, too.
    """

    stats: tuple[Any, ...]
    is_broken: bool
    chunks: Sequence[Chunk] = ()
    admitted: Sequence[int] = ()
    answer: tuple[int, bool | Exception | None] | None = None


_LENGTH = struct.Struct("<I")


def framed(command: object) -> bytes:
    data = pickle.dumps(command, PICKLE_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def unframed(data: bytearray) -> tuple[list[Any], int]:
    """The commands that are whole, and how many bytes they take."""
    commands: list[Any] = []
    start = 0
    with memoryview(data) as view:
        while start + _LENGTH.size <= len(view):
            (length,) = _LENGTH.unpack_from(view, start)
            end = start + _LENGTH.size + length
            if end > len(view):
                break
            commands.append(pickle.loads(view[start + _LENGTH.size : end]))
            start = end
    return commands, start
