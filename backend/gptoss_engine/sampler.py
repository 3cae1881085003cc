"""How rows of logits become tokens: what each row asks for, and what comes back to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptoss_engine.guides import fill_masks
from gptoss_engine.penalties import Entries
from gptoss_engine.sequence import ScheduledStep, Sequence
from gptoss_engine.types import TokenLogprob
from gptoss_kernels.ops import Operators, Penalties, SamplingRows

Wait = Callable[[torch.cuda.Event], object]
PENALIZED_ROWS = 32  # at a time: of gpt-oss's vocabulary 26 MB in fp32
_LEAST_ENTRIES = 64


class Sampling(NamedTuple):
    """ops.SamplingRows of a step's S rows, on the host."""

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniforms: np.ndarray
    top_k: np.ndarray
    masked_start: np.ndarray
    masked_ids: np.ndarray
    num_top: np.ndarray

    @classmethod
    def build(cls, due: Rows[tuple[Sequence, int]], vocab_size: int) -> Sampling:
        """due: for each row its sequence, and how many of the sequence's output tokens precede."""
        params = [sequence.sampling for sequence, _ in due]
        seeds = np.array([sequence.seed for sequence, _ in due], dtype=np.uint64)
        indices = np.array([index for _, index in due], dtype=np.uint64)
        masked = [
            [token_id for token_id in sequence.stop_token_ids if token_id < vocab_size]
            if index < sequence.sampling.min_tokens and sequence.matcher is None
            else ()
            for sequence, index in due
        ]
        told = (-1 if p.logprobs is None else min(p.logprobs, vocab_size) for p in params)
        return cls(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            top_p=np.array([p.top_p for p in params], dtype=np.float64),
            min_p=np.array([p.min_p for p in params], dtype=np.float64),
            uniforms=uniforms(seeds, indices),
            top_k=np.array([p.top_k for p in params], dtype=np.int32),
            masked_start=np.cumsum([0, *map(len, masked)], dtype=np.int32),
            masked_ids=np.array([each for ids in masked for each in ids], dtype=np.int32),
            num_top=np.array([*told], dtype=np.int32),
        )

    @property
    def num_rows(self) -> int:
        return len(self.temperature)

    @property
    def is_told(self) -> bool:
        """Whether a row asks for log-probabilities."""
        return bool((self.num_top >= 0).any())

    def filled(self, num_rows: int) -> Sampling:
        """As many rows; those beyond are greedy, and nothing is told of them."""
        spare = num_rows - self.num_rows
        if not spare:
            return self

        def filled(array: np.ndarray, value: float) -> np.ndarray:
            return np.concatenate((array, np.full(spare, value, dtype=array.dtype)))

        return Sampling(
            temperature=filled(self.temperature, 0),
            top_p=filled(self.top_p, 1),
            min_p=filled(self.min_p, 0),
            uniforms=filled(self.uniforms, 0),
            top_k=filled(self.top_k, 0),
            masked_start=filled(self.masked_start, self.masked_start[-1]),
            masked_ids=self.masked_ids,
            num_top=filled(self.num_top, -1),
        )

    def to(self, device: torch.device) -> SamplingRows:
        return SamplingRows(*(torch.from_numpy(array).to(device) for array in self))


class Penalized(NamedTuple):
    """Rows of a step that are penalised or biased, on the host: how their tokens are chosen.

    kept int64 [G]: of which of the step's rows each is, -1 where it fills; all else as
    ops.SamplingRows and ops.Penalties have it.
    """

    sampling: Sampling
    kept: np.ndarray
    rows: np.ndarray
    newest: np.ndarray
    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray
    start: np.ndarray
    token_ids: np.ndarray
    counts: np.ndarray
    biases: np.ndarray

    @classmethod
    def build(
        cls, step: ScheduledStep, due_rows: Rows[int], vocab_size: int, most_entries: int
    ) -> tuple[Penalized, ...]:
        """due_rows: by token that is due, the row of the step's input ids before it.

        Such parts that none has more entries. Each is filled up to few numbers of rows and of
        entries, powers of two below PENALIZED_ROWS: launches are prepared by size.
        """
        parts: list[list[_PenalizedRow]] = [[]]
        num_entries = index = 0
        for item in step.items:
            sequence = item.sequence
            if sequence.history is not None and item.is_sampled:
                assert item.num_due == 1, "whose tokens count is not guessed for"
                entries = sequence.history.entries(sequence.token_ids)
                num_entries += len(entries.token_ids)
                if num_entries > most_entries:
                    parts.append([])
                    num_entries = len(entries.token_ids)
                is_counted = sequence.sampling.is_penalized
                newest = due_rows[index] if item.is_pending and is_counted else -1
                due = (sequence, item.num_output_tokens)
                parts[-1].append(_PenalizedRow(index, newest, due, entries))
            index += item.num_due
        return tuple(cls._of(rows, vocab_size) for rows in parts)

    @classmethod
    def _of(cls, given: list[_PenalizedRow], vocab_size: int) -> Penalized:
        count = len(given)
        size = 1 << (count - 1).bit_length()
        if size > PENALIZED_ROWS:
            size = -(-count // PENALIZED_ROWS) * PENALIZED_ROWS
        sizes = [len(each.entries.token_ids) for each in given]
        most = max(_LEAST_ENTRIES, 1 << (sum(sizes) - 1).bit_length())
        columns = zip(*(each.entries for each in given), strict=True)
        token_ids, counts, biases = (
            np.concatenate((*column, np.zeros(most - sum(sizes), column[0].dtype)))
            for column in columns
        )
        params = [each.due[0].sampling for each in given]

        def filled(values: Iterable[float], value: float, dtype: type) -> np.ndarray:
            array = np.full(size, value, dtype)
            array[:count] = [*values]
            return array

        return cls(
            sampling=Sampling.build([each.due for each in given], vocab_size).filled(size),
            kept=filled((each.row for each in given), -1, np.int64),
            rows=filled((each.row for each in given), given[0].row, np.int32),
            newest=filled((each.newest for each in given), -1, np.int32),
            repetition=filled((p.repetition_penalty for p in params), 1, np.float32),
            frequency=filled((p.frequency_penalty for p in params), 0, np.float32),
            presence=filled((p.presence_penalty for p in params), 0, np.float32),
            start=np.cumsum([0, *sizes, *[0] * (size - count)], dtype=np.int32),
            token_ids=token_ids,
            counts=counts,
            biases=biases,
        )

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (*self.sampling, *self[1:])

    @classmethod
    def most_bytes(cls, num_rows: int, num_masked: int, num_entries: int) -> int:
        """Of the arrays of so many rows, with so many masked tokens each."""
        num_rows = max(num_rows + PENALIZED_ROWS, _LEAST_ENTRIES)
        return (76 + 4 * num_masked) * num_rows + 12 * num_entries + 1024


class _PenalizedRow(NamedTuple):
    row: int
    newest: int
    due: tuple[Sequence, int]
    entries: Entries


class Guided(NamedTuple):
    """What some of a step's rows may become, on the host: rows int32 [G], of those that are sampled
    after, -1 for none; masks int32 [G, ceil(V / 32)] as ops.mask_logits takes them."""

    rows: np.ndarray
    masks: np.ndarray

    @classmethod
    def build(cls, due: Rows[tuple[Sequence, int]], vocab_size: int) -> Guided:
        """due: as Sampling has it, of a step that is guided. Filled up to a power of two: launches
        are prepared by size."""
        guided = [
            (row, sequence, sequence.matcher, index)
            for row, (sequence, index) in enumerate(due)
            if sequence.matcher is not None
        ]
        size = 1 << (len(guided) - 1).bit_length()
        rows = np.full(size, -1, dtype=np.int32)
        masks = np.zeros((size, -(-vocab_size // 32)), dtype=np.int32)
        rows[: len(guided)] = [row for row, *_ in guided]
        fill_masks([matcher for _, _, matcher, _ in guided], masks)
        for mask, (_, sequence, _, index) in zip(masks, guided, strict=False):
            if index < sequence.sampling.min_tokens:
                _forbid(mask, [id_ for id_ in sequence.stop_token_ids if id_ < vocab_size])
        return cls(rows, masks)


def _forbid(mask: np.ndarray, token_ids: list[int]) -> None:
    """Take these from the mask, unless nothing else is in it."""
    left = mask.view(np.uint32).copy()
    for token_id in token_ids:
        left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if left.any():
        mask[:] = left.view(np.int32)


class Sampled:
    """The tokens of a step's rows, as soon as they are on the host."""

    def __init__(
        self,
        parts: tuple[Tensor, ...],
        num_top: np.ndarray,
        event: torch.cuda.Event | None,
        wait: Wait,
    ) -> None:
        self._parts = parts
        self._num_top = num_top
        self._event = event
        self._wait = wait

    def result(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """The tokens, and what was asked to be told of them; waits until the device is so far.

        NO_TOKEN where a row's logits were not numbers.
        """
        if self._event is not None:
            self._wait(self._event)
        token_ids, *told = (part.tolist() for part in self._parts)
        if not told:
            return token_ids, [None] * len(token_ids)
        return token_ids, [
            TokenLogprob(
                logprob,
                tuple(
                    (token_id, value)
                    for token_id, value in zip(ids[:count], values[:count], strict=True)
                    if value > -math.inf  # else it could not come
                ),
            )
            if count >= 0
            else None
            for count, logprob, ids, values in zip(self._num_top.tolist(), *told, strict=True)
        ]


class Sampler:
    """Chooses a step's tokens on the device, and sends them to the host while that goes on.

    wait: until an event has happened.
    """

    def __init__(self, ops: Operators, wait: Wait = torch.cuda.Event.synchronize) -> None:
        self._ops = ops
        self._wait = wait

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        seats: Tensor | None = None,
        last_token_ids: Tensor | None = None,
    ) -> Tensor:
        """[S, V] -> int64 [S], and to last_token_ids[seats], if they are given

        Nothing but one operator, so that it can stand in a CUDA graph.
        """
        return self._ops.sample(logits, rows, seats, last_token_ids)

    def choose_penalized(
        self,
        logits: Tensor,
        input_ids: Tensor,
        token_ids: Tensor,
        arrays: Rows[Tensor],
        room: Tensor,
    ) -> None:
        """The tokens of penalised rows once more, in place.

        logits [S, V], which stay what the model said; input_ids int64 [T]; token_ids int64 [S];
        arrays: Penalized.arrays; room fp32 [R, V], as many rows as are penalised at a time.
        """
        sampling, (kept, *columns) = SamplingRows(*arrays[:8]), arrays[8:]
        penalties = Penalties(*columns)
        for first in range(0, len(kept), len(room)):
            last = min(first + len(room), len(kept))
            out = room[: last - first]
            self._ops.penalize_logits(logits, input_ids, penalties.of_rows(first, last), out)
            self._ops.sample(out, sampling.of_rows(first, last), kept[first:last], token_ids)

    def fetch(
        self, token_ids: Tensor, logits: Tensor, rows: SamplingRows, sampling: Sampling
    ) -> Sampled:
        """Enqueues what brings to the host what was chosen of `logits`, and waits for nothing.

        Log-probabilities are of what the model said, before stop tokens are masked and anything is
        penalised or biased, but of what a guide has left of it. Rows beyond those of `sampling`,
        which fill a batch, are left out.
        """
        count = sampling.num_rows
        parts = (token_ids[:count],)
        if sampling.is_told:
            parts += self._ops.logprobs(logits[:count], *parts, rows.num_top[:count])
        if logits.device.type != "cuda":
            # A later step may write to the same memory.
            return Sampled(
                tuple(part.clone() for part in parts), sampling.num_top, None, self._wait
            )
        on_host = tuple(_pinned_like(part) for part in parts)
        for part, copy in zip(parts, on_host, strict=True):
            self._ops.transfer(part, copy)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(logits.device))
        return Sampled(on_host, sampling.num_top, event, self._wait)


def _pinned_like(tensor: Tensor) -> Tensor:
    """From what PyTorch keeps of earlier steps."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits, each of (seed, index) and nothing else: uint64 -> fp64

    The index-th output of the SplitMix64 stream (Steele, Lea, Flood 2014) whose state is the mixed
    seed: so an answer's randomness knows neither its batch, nor its device, nor a preemption.
    """
    state = _mix(seeds) + (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
