"""ScheduledStep -> Batch: what one forward pass reads, flat over all sequences."""

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptoss_engine.sampler import Sampling
from gptoss_engine.sequence import ScheduledItem, ScheduledStep
from gptoss_kernels.ops import MAXIMUM_DECODE_QUERIES, Decodes


@dataclass(frozen=True, slots=True)
class PageGroup:
    """page_tables [B, P] int32, by position // page_size, -1 for no page; slot_mapping [T] int64:
    where the step's own tokens go, page * page_size + offset."""

    page_tables: Tensor
    slot_mapping: Tensor

    @classmethod
    def build(
        cls,
        tables: list[list[int]],
        positions: list[range],
        page_size: int,
        device: torch.device,
    ) -> "PageGroup":
        padded = np.full((len(tables), max(map(len, tables), default=0)), -1, dtype=np.int32)
        slots = []
        for row, (table, new) in enumerate(zip(tables, positions, strict=True)):
            padded[row, : len(table)] = table
            position = np.arange(new.start, new.stop)
            slots.append(padded[row, position // page_size] * page_size + position % page_size)
        slot_mapping = np.concatenate(slots).astype(np.int64)
        assert slot_mapping.min() >= 0, "a token has no page to be stored in"
        return cls(_tensor(padded, device), _tensor(slot_mapping, device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one forward pass reads: one step's tokens, sequence after sequence.

    input_ids, positions [T] int64; decodes: the sequences at the front, with few rows each;
    query_start [B + 1] int32: where each sequence's rows begin; seq_lens [B] int32: tokens in the
    cache once the step is done; full, window: the page groups.
    """

    input_ids: Tensor
    positions: Tensor
    decodes: Decodes
    query_start: Tensor
    seq_lens: Tensor
    full: PageGroup
    window: PageGroup


class DueRows(NamedTuple):
    """The rows after which a token is due: the last ones of their sequences.

    rows [S] int64, ascending; num_of_decodes: how many of them are rows of Inputs.decodes.
    """

    rows: Tensor
    num_of_decodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Inputs):
    """A step as a CPU builds it: the plain twin of what device_steps.py sends to a GPU.

    pending_rows, pending_seats [K] int64: the rows whose input, -1 until it is put there, was
    chosen by the step before, and its seat; due: the rows after which a token is due, a sequence's
    last token and its drafts; sample_seats [S] int64: their sequences' seats; sampling: how these
    rows become tokens.
    """

    pending_rows: Tensor
    pending_seats: Tensor
    due: DueRows
    sample_seats: Tensor
    sampling: Sampling

    @classmethod
    def build(
        cls, step: ScheduledStep, *, page_size: int, vocab_size: int, device: torch.device
    ) -> "Batch":
        """step has at least one item, and every item at least one token."""
        assert step.items
        assert all(item.num_tokens > 0 for item in step.items)
        positions = [_positions(item) for item in step.items]
        query_start = np.cumsum([0, *map(len, positions)], dtype=np.int32)
        input_ids: list[int] = []
        pending: list[tuple[int, int]] = []
        sample_rows: list[int] = []
        sample_seats: list[int] = []
        for item, end in zip(step.items, query_start[1:].tolist(), strict=True):
            sequence, first = item.sequence, item.first
            if item.is_pending:
                assert item.num_slots == 1
                pending.append((len(input_ids), item.seat))
                input_ids.append(-1)
            else:
                input_ids += sequence.token_ids[first : first + item.num_tokens]
                input_ids += item.draft_token_ids
            sample_rows += range(end - item.num_due, end)
            sample_seats += [item.seat] * item.num_due
        decodes = leading_decodes([len(each) for each in positions])
        tables = [item.sequence.page_tables for item in step.items]
        return cls(
            input_ids=_tensor(np.array(input_ids, dtype=np.int64), device),
            positions=_tensor(
                np.concatenate([np.arange(p.start, p.stop) for p in positions]), device
            ),
            pending_rows=_tensor(np.array([row for row, _ in pending], dtype=np.int64), device),
            pending_seats=_tensor(np.array([seat for _, seat in pending], dtype=np.int64), device),
            decodes=decodes,
            query_start=_tensor(query_start, device),
            seq_lens=_tensor(np.array([p.stop for p in positions], dtype=np.int32), device),
            due=DueRows(
                rows=_tensor(np.array(sample_rows, dtype=np.int64), device),
                num_of_decodes=sum(item.num_due for item in step.items[: decodes.num_sequences]),
            ),
            sample_seats=_tensor(np.array(sample_seats, dtype=np.int64), device),
            sampling=Sampling.build(step.due, vocab_size),
            full=PageGroup.build([t.full for t in tables], positions, page_size, device),
            window=PageGroup.build([t.window for t in tables], positions, page_size, device),
        )


def leading_decodes(num_queries: list[int]) -> Decodes:
    """Of sequences with so many rows each, as many at the front as may be called decodes."""
    few = list(takewhile(lambda count: count <= MAXIMUM_DECODE_QUERIES, num_queries))
    return Decodes(len(few), sum(few), max(few, default=0))


def _positions(item: ScheduledItem) -> range:
    return range(item.first, item.first + item.num_slots)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
