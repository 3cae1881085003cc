"""A step as the host sends it to a GPU: in one copy, and only what is not known there yet.

The device keeps by seat the pages of the running sequences and the tokens that they chose last.
`ops.unpack_step` makes of both what the forward pass reads.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Arrays
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep, Sequence
from gptoss_kernels.ops import NO_SEAT, PENDING, StepItem

ALIGNMENT = 16  # bytes: of each array, as kernels read it
_UNIT = 1024  # bytes that are sent, at least
COPIES = 3  # of the memory that is sent: two steps may be under way while a third is written


class Part(NamedTuple):
    """Where one of the arrays that were sent lies."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


_TYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


class Staging:
    """Memory on the device that one kernel a step fills from the host's.

    Whatever its size: the copy engine begins later, and kernels that begin early wait for kernels.

    The same shapes lie at the same addresses, whatever a graph or another step read there: copies
    and readers take turns on one stream. On a CPU the copy is made at once.

    transfer: ops.transfer.
    """

    def __init__(
        self, num_bytes: int, device: torch.device, transfer: Callable[[Tensor, Tensor], None]
    ) -> None:
        num_bytes = _rounded(num_bytes)
        self._transfer = transfer
        self._is_cuda = device.type == "cuda"
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._host = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
            for _ in range(COPIES)
        ]
        self._written = [each.numpy() for each in self._host]
        # Until then a copy reads what the host may not write again.
        self._copied = [torch.cuda.Event() for _ in range(COPIES)] if self._is_cuda else []
        self._next = 0

    def send(self, arrays: Arrays[np.ndarray]) -> tuple[Part, ...]:
        """Enqueue the copy of contiguous arrays on the current stream."""
        turn = self._next
        self._next = (turn + 1) % COPIES
        if self._is_cuda:
            self._copied[turn].synchronize()
        memory = self._written[turn]
        parts = []
        end = 0
        for each in arrays:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + each.nbytes
            assert end <= len(memory), f"a step of more than {len(memory)} bytes"
            memory[offset:end] = each.reshape(-1).view(np.uint8)
            parts.append(Part(offset, each.shape, _TYPES[each.dtype]))
        end = _rounded(end)
        self._transfer(self._host[turn][:end], self._device[:end])
        if self._is_cuda:
            self._copied[turn].record()
        return tuple(parts)

    def tensor(self, part: Part) -> Tensor:
        """What was sent there, on the device; another step will be."""
        offset, shape, dtype = part
        memory = self._device[offset : offset + prod(shape) * dtype.itemsize]
        return memory.view(dtype).view(shape)


def _rounded(num_bytes: int) -> int:
    """Up, to few numbers: for each one a launch is prepared."""
    unit = max(_UNIT, 2 ** max(num_bytes - 1, 0).bit_length() // 16)
    return -(-num_bytes // unit) * unit


class NewPages(NamedTuple):
    """Of a sequence: the pages that the device does not have, from a column of its table on, in
    both page groups."""

    full_column: int
    full: list[int]
    window_column: int
    window: list[int]


class KnownPages:
    """Which pages of which sequence the device has at each seat.

    The first step of a sequence, or of its new start after it was preempted, finds nothing there.
    """

    def __init__(self, num_seats: int, page_size: int, sliding_window: int) -> None:
        self._page_size = page_size
        self._sliding_window = sliding_window
        self._owner: list[PageTables | None] = [None] * num_seats
        self._num_full = [0] * num_seats
        self._num_window = [0] * num_seats

    def forget(self, sequences: Arrays[Sequence]) -> None:
        """Of sequences that lost their pages."""
        for sequence in sequences:
            if sequence.page_tables in self._owner:
                self._owner[self._owner.index(sequence.page_tables)] = None

    def add(self, item: ScheduledItem) -> NewPages | None:
        """What the item brings, if anything; from now on the device has it.

        Of the window's group nothing that none of its tokens sees.
        """
        seat, tables, first = item.seat, item.sequence.page_tables, item.first
        num_full, num_window = len(tables.full), len(tables.window)
        last = (first + item.num_slots - 1) // self._page_size
        assert last < num_full, "a token has no page to be stored in"
        assert last < num_window, "a token has no page to be stored in"
        if self._owner[seat] is not tables or first == 0:
            self._owner[seat] = tables
            self._num_full[seat] = self._num_window[seat] = 0
        full_column, window_column = self._num_full[seat], self._num_window[seat]
        if full_column == num_full and window_column == num_window:  # As of most decodes.
            return None
        self._num_full[seat], self._num_window[seat] = num_full, num_window
        first_seen = (first - self._sliding_window + 1) // self._page_size
        window_column = max(window_column, first_seen)
        new = NewPages(
            *(full_column, tables.full[full_column:]),
            *(window_column, tables.window[window_column:]),
        )
        assert -1 not in new.window, "a token has no page to be stored in"
        return new


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step in the words of ops.unpack_step: StepItems one after another, and the words.

    num_rows: of all num_sequences together.
    """

    items: "array[int]"
    words: "array[int]"
    num_sequences: int
    num_rows: int

    @classmethod
    def build(
        cls, step: ScheduledStep, known: KnownPages, num_first: int = 0, num_fillers: int = 0
    ) -> "StagedStep":
        """With fillers of one row behind the first items. The device knows the step's pages now."""
        known.forget(step.preempted)
        items, words = array("i"), array("i")
        row = 0
        for index, item in enumerate(step.items):
            if index == num_first:
                row = _fill(items, row, (1,) * num_fillers)
            begin, num_slots = len(words), item.num_slots
            if item.is_pending:
                assert num_slots == 1
                words.append(PENDING)
            else:
                words.extend(item.sequence.token_ids[item.first : item.first + item.num_tokens])
                words.extend(item.draft_token_ids)
            items.extend((item.seat, item.first, row, num_slots, begin))
            new = known.add(item)
            if new is None:
                items.extend((0, 0, 0, 0))
            else:
                items.extend((new.full_column, len(new.full), new.window_column, len(new.window)))
                words.extend(new.full)
                words.extend(new.window)
            row += num_slots
        if num_first == len(step.items):
            row = _fill(items, row, (1,) * num_fillers)
        return cls(items, words, len(step.items) + num_fillers, row)

    def filled(self, num_sequences: int, num_rows: int) -> "StagedStep":
        """As many, the last of which has all rows that are missing."""
        spare = num_sequences - self.num_sequences
        if not spare:
            assert num_rows == self.num_rows
            return self
        items = self.items[:]
        _fill(items, self.num_rows, (*(0,) * (spare - 1), num_rows - self.num_rows))
        return StagedStep(items, self.words, num_sequences, num_rows)

    def arrays(self, num_words: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """items [B, 9] and words [W] int32, at least so many words."""
        words = self.words + array("i", bytes(4 * max(num_words - len(self.words), 0)))
        items = np.frombuffer(self.items, dtype=np.int32).reshape(-1, len(StepItem._fields))
        return items, np.frombuffer(words, dtype=np.int32)


def _fill(items: "array[int]", row: int, counts: tuple[int, ...]) -> int:
    """Sequences of so many rows that are none, from that row on; the row behind them."""
    for count in counts:
        items.extend(StepItem(NO_SEAT, 0, row, count, 0))
        row += count
    return row
