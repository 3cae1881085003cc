"""What one step's forward pass reads, and how the host sends it: unpack_step's types, and itself.

The host knows a step as a few numbers for each sequence. It sends them in one piece; the device
knows the rest: page tables by seat, to which a step adds, and the tokens that the step before
chose.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gptoss_kernels import contracts

PENDING = -1  # for a token id: the one that the sequence's seat chose last
# Of a sequence that is there to fill a batch: it is stored nowhere and has no words; its token ids,
# -1, are none, so that its rows are NaN and no expert is read for them. It may have no row at all.
NO_SEAT = -1


class StepItem(NamedTuple):
    """One sequence of a step, as a row of int32.

    seat: where its pages and its last token are kept; NO_SEAT for none. position: of its first row,
    in the sequence. row: its first, in the batch. words: where its own begin: the token ids of its
    num_rows rows, then num_full_pages new pages, whose first is its page number full_column, then
    those of the window's group.
    """

    seat: int
    position: int
    row: int
    num_rows: int
    words: int
    full_column: int = 0
    num_full_pages: int = 0
    window_column: int = 0
    num_window_pages: int = 0


class StepTensors(NamedTuple):
    """What a forward pass reads of T rows of B sequences, whose page tables have P columns.

    Fewer columns than a seat has will do, where no sequence is that long.

    input_ids, positions, full_slots, window_slots [T] int64; query_start [B + 1], seq_lens [B],
    full_tables, window_tables [B, P] int32: as ops.rope_and_cache_write and ops.attention take
    them. Only those columns of a table hold something that a row sees.
    """

    input_ids: Tensor
    positions: Tensor
    full_slots: Tensor
    window_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    full_tables: Tensor
    window_tables: Tensor

    @classmethod
    def empty(
        cls, num_rows: int, num_sequences: int, table_width: int, device: torch.device | str
    ) -> "StepTensors":
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            input_ids=empty(num_rows, dtype=torch.int64),
            positions=empty(num_rows, dtype=torch.int64),
            full_slots=empty(num_rows, dtype=torch.int64),
            window_slots=empty(num_rows, dtype=torch.int64),
            query_start=empty(num_sequences + 1),
            seq_lens=empty(num_sequences),
            full_tables=empty(num_sequences, table_width),
            window_tables=empty(num_sequences, table_width),
        )

    def first(self, num_rows: int, num_sequences: int, table_width: int) -> "StepTensors":
        """The same memory, for fewer rows, sequences and columns, tables laid out anew."""

        def table(room: Tensor) -> Tensor:
            shape = (num_sequences, table_width)
            return room.view(-1)[: num_sequences * table_width].view(shape)

        return StepTensors(
            input_ids=self.input_ids[:num_rows],
            positions=self.positions[:num_rows],
            full_slots=self.full_slots[:num_rows],
            window_slots=self.window_slots[:num_rows],
            query_start=self.query_start[: num_sequences + 1],
            seq_lens=self.seq_lens[:num_sequences],
            full_tables=table(self.full_tables),
            window_tables=table(self.window_tables),
        )


def unpack_step(
    items: Tensor,
    words: Tensor,
    last_token_ids: Tensor,
    full_by_seat: Tensor,
    window_by_seat: Tensor,
    out: StepTensors,
    *,
    page_size: int,
    window: int,
) -> None:
    """Fills `out` with the step that `items` [B, 9] and `words` [W], int32, describe: see StepItem.

    full_by_seat, window_by_seat [seats, P] int32: each seat's pages so far; the step's are added.
    last_token_ids [seats or more] int64: what each seat chose last. A sequence's table gets the
    columns up to its last token, in the window's group from the first that its first row sees on.
    Without a seat all of its pages are page 0, nothing is stored and nothing kept. Values are not
    checked: rows, pages and words lie where StepItem says, within the tensors.
    """
    check(items, words, last_token_ids, full_by_seat, window_by_seat, out)
    num_seats = len(full_by_seat)
    for index, fields in enumerate(items.tolist()):
        item = StepItem(*fields)
        has_seat = 0 <= item.seat < num_seats
        sizes = (item.num_rows, item.num_full_pages, item.num_window_pages)
        if not has_seat:
            sizes = (0, 0, 0)
        token_ids, new_full, new_window = words[item.words :][: sum(sizes)].split(sizes)
        end = item.position + item.num_rows
        positions = torch.arange(item.position, end, device=words.device)
        rows = slice(item.row, item.row + item.num_rows)
        out.input_ids[rows] = token_ids.long() if has_seat else -1
        if has_seat:
            out.input_ids[rows][token_ids == PENDING] = last_token_ids[item.seat]
        out.positions[rows] = positions
        out.query_start[index : index + 2] = torch.tensor((rows.start, rows.stop))
        out.seq_lens[index] = end
        first_seen = max(item.position - window + 1, 0) // page_size
        for by_seat, tables, slots, column, pages, first in (
            (full_by_seat, out.full_tables, out.full_slots, item.full_column, new_full, 0),
            (
                *(window_by_seat, out.window_tables, out.window_slots),
                *(item.window_column, new_window, first_seen),
            ),
        ):
            seen = slice(first, (end - 1) // page_size + 1)
            if has_seat:
                kept = by_seat[item.seat]
                kept[column : column + len(pages)] = pages
                tables[index, seen] = kept[seen]
                slots[rows] = kept[positions // page_size].long() * page_size
                slots[rows] += positions % page_size
            else:
                tables[index, seen], slots[rows] = 0, -1


def check(
    items: Tensor,
    words: Tensor,
    last_token_ids: Tensor,
    full_by_seat: Tensor,
    window_by_seat: Tensor,
    out: StepTensors,
) -> None:
    """All that unpack_step demands but values, which stay on the device."""
    num_fields = len(StepItem._fields)
    if items.dim() != 2 or items.shape[1] != num_fields or not len(items):
        raise ValueError(f"items must be [B, {num_fields}], B at least 1, got {list(items.shape)}")
    if full_by_seat.dim() != 2:
        raise ValueError(f"full_by_seat must be [seats, P], got {list(full_by_seat.shape)}")
    num_sequences, (num_seats, width) = len(items), full_by_seat.shape
    if len(last_token_ids) < num_seats:
        raise ValueError(
            f"last_token_ids must be of {num_seats} seats at least, got {len(last_token_ids)}"
        )
    num_rows = out.input_ids.numel()
    if out.full_tables.dim() != 2 or out.full_tables.shape[1] > width:
        raise ValueError(
            f"full_tables must be [B, P], P at most {width}, got {list(out.full_tables.shape)}"
        )
    out_width = out.full_tables.shape[1]
    int32, int64 = torch.int32, torch.int64
    for name, tensor, dtype, shape in (
        ("items", items, int32, (num_sequences, num_fields)),
        ("words", words, int32, (words.numel(),)),
        ("last_token_ids", last_token_ids, int64, (last_token_ids.numel(),)),
        ("full_by_seat", full_by_seat, int32, (num_seats, width)),
        ("window_by_seat", window_by_seat, int32, (num_seats, width)),
        *((name, getattr(out, name), int64, (num_rows,)) for name in out._fields[:4]),
        ("query_start", out.query_start, int32, (num_sequences + 1,)),
        ("seq_lens", out.seq_lens, int32, (num_sequences,)),
        ("full_tables", out.full_tables, int32, (num_sequences, out_width)),
        ("window_tables", out.window_tables, int32, (num_sequences, out_width)),
    ):
        contracts.check_type(name, tensor, dtype, items, "items")
        contracts.check_shape(name, tensor, shape)
        contracts.check_contiguous(name, tensor)
