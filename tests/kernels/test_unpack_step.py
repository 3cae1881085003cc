"""unpack_step in CUDA C++, emulated and on a GPU, against steps.unpack_step: every number."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from gptoss_kernels import steps
from gptoss_kernels.cuda.unpack_step import unpack_step
from gptoss_kernels.steps import NO_SEAT, PENDING, StepItem, StepTensors

from .emulator import EmulationError, emulated, guarded, replacing
from .wrong_tensors import every_second, other_device

POISON = -7
WINDOW = 128
SEATS = 6


@dataclass(frozen=True)
class Case:
    """What the operator gets."""

    items: Tensor
    words: Tensor
    last_token_ids: Tensor
    full_by_seat: Tensor
    window_by_seat: Tensor
    out: StepTensors
    page_size: int

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        return self.full_by_seat, self.window_by_seat

    def run(self, operator: Callable[..., None] = unpack_step) -> None:
        operator(
            *(self.items, self.words, self.last_token_ids, *self.kept, self.out),
            page_size=self.page_size,
            window=WINDOW,
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> Case:
        """Every tensor, the step's own memory too, through `move`."""
        inputs = {
            name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **inputs, out=StepTensors(*map(move, self.out)))


def random_case(
    sizes: tuple[int, ...], page_size: int = 16, seed: int = 0, *, fillers: tuple[int, ...] = ()
) -> Case:
    """Sequences with so many rows, at any position, some of whose pages are new; then such as only
    fill a batch. A sequence of one row may be pending."""
    chance = random.Random(seed)
    width = 4096 // page_size
    full_by_seat, window_by_seat = torch.randint(10_000, (2, SEATS, width), dtype=torch.int32)
    seats = chance.sample(range(SEATS), len(sizes))
    items, words, row = [], [3, 1, 4], 0
    for seat, num_rows in zip(seats, sizes, strict=True):
        position = chance.randrange(4096 - num_rows + 1)
        end = (position + num_rows - 1) // page_size + 1
        new_full, new_window = (chance.randrange(min(end, 4) + 1) for _ in range(2))
        begin = len(words)
        is_pending = num_rows == 1 and chance.random() < 0.5
        words += [PENDING] if is_pending else [chance.randrange(1000) for _ in range(num_rows)]
        words += [chance.randrange(10_000) for _ in range(new_full + new_window)]
        full, window = (end - new_full, new_full), (end - new_window, new_window)
        items.append(StepItem(seat, position, row, num_rows, begin, *full, *window))
        row += num_rows
    for num_rows in fillers:
        items.append(StepItem(NO_SEAT, 0, row, num_rows, 0))
        row += num_rows
    longest = max(item.position + item.num_rows for item in items)
    needed = -(-longest // page_size)
    out = StepTensors.empty(row, len(items), needed + chance.randrange(width - needed + 1), "cpu")
    for each in out:
        each.fill_(POISON)
    return Case(
        torch.tensor(items, dtype=torch.int32),
        torch.tensor(words, dtype=torch.int32),
        torch.randint(1000, 2000, (SEATS + 1,)),
        full_by_seat,
        window_by_seat,
        out,
        page_size,
    )


def copied(case: Case) -> Case:
    return case.moved(torch.clone)


def differing(case: Case, expected: Case) -> list[str]:
    names = [name for name in case.out._fields if not same(case.out, expected.out, name)]
    kept = ("full_by_seat", "window_by_seat")
    return names + [name for name in kept if not same(case, expected, name)]


def same(left: object, right: object, name: str) -> bool:
    return torch.equal(getattr(left, name).cpu(), getattr(right, name).cpu())


def check(case: Case, context: contextlib.AbstractContextManager[object] | None = None) -> None:
    expected = copied(case)
    expected.run(steps.unpack_step)
    with context or emulated():
        case.run()
    assert differing(case, expected) == []


SIZES = [(1,), (1, 1, 1, 1, 1, 1), (1, 17, 1), (300, 1, 8), (1, 2500)]


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_reference(sizes: tuple[int, ...], page_size: int) -> None:
    for seed in range(3):
        check(random_case(sizes, page_size, seed), emulated(seed))


def test_sequences_that_fill_a_batch_are_stored_nowhere_and_keep_nothing() -> None:
    case = random_case((1, 1), fillers=(1, 0, 40))
    before = copied(case)
    check(case)
    rows = slice(2, 43)
    assert case.out.input_ids[rows].tolist() == [-1] * 41
    assert case.out.positions[rows].tolist() == [0, *range(40)]
    assert case.out.full_slots[rows].tolist() == [-1] * 41
    assert case.out.window_slots[rows].tolist() == [-1] * 41
    assert case.out.seq_lens[2:].tolist() == [1, 0, 40]
    assert case.out.query_start.tolist() == [0, 1, 2, 3, 3, 43]
    for table in (case.out.full_tables, case.out.window_tables):
        assert table[2, :1].tolist() == [0]
        assert table[4, :3].tolist() == [0] * 3
    seated = case.items[:2, 0].tolist()
    others = [seat for seat in range(SEATS) if seat not in seated]
    for now, then in zip(case.kept, before.kept, strict=True):
        assert torch.equal(now[others], then[others])


def test_a_step_by_hand() -> None:
    """Page 16, seat 2: position 31 of a chunk of 3, whose last two are in a new page."""
    width = 3
    full = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]], dtype=torch.int32)
    window = full + 20
    words = [100, 101, 102, 40, 50, PENDING]
    items = [StepItem(2, 31, 0, 3, 0, 2, 1, 2, 1), StepItem(0, 2, 3, 1, 5, 1, 0, 1, 0)]
    out = StepTensors.empty(4, 2, width, "cpu")
    for each in out:
        each.fill_(POISON)
    case = Case(
        torch.tensor(items, dtype=torch.int32),
        torch.tensor(words, dtype=torch.int32),
        torch.tensor([777, 778, 779]),
        full,
        window,
        out,
        16,
    )
    check(case)
    assert out.input_ids.tolist() == [100, 101, 102, 777]
    assert out.positions.tolist() == [31, 32, 33, 2]
    assert out.full_slots.tolist() == [12 * 16 + 15, 40 * 16, 40 * 16 + 1, 5 * 16 + 2]
    assert out.window_slots.tolist() == [32 * 16 + 15, 50 * 16, 50 * 16 + 1, 25 * 16 + 2]
    assert out.query_start.tolist() == [0, 3, 4]
    assert out.seq_lens.tolist() == [34, 3]
    assert out.full_tables.tolist() == [[11, 12, 40], [5, POISON, POISON]]
    assert out.window_tables.tolist() == [[31, 32, 50], [25, POISON, POISON]]
    assert full.tolist() == [[5, 6, 7], [8, 9, 10], [11, 12, 40]]
    assert window[2].tolist() == [31, 32, 50]


WRONG_LINES = {
    "the seat's page before it is new": ("beyond < uint32_t(count)", "false"),
    "new pages are forgotten": ("    full.keep(share);\n", ""),
    "the window's are": ("    window.keep(share);\n", ""),
    "of the other group": ("window_pages, item.window_column", "full_pages, item.window_column"),
    "no pending token": ("token_id < 0 && seat >= 0", "false"),
    "the neighbour's last token": ("last_token_ids[seat]", "last_token_ids[seat + 1]"),
    "the window begins too late": (
        "item.position - arguments.sliding_window + 1",
        "item.position - arguments.sliding_window + 1 + 256",
    ),
    "the last page is missing": ("((length - 1) >> shift) + 1", "(length - 1) >> shift"),
    "one length for all": ("item.position + item.num_rows;", "item.num_rows;"),
    "the first row's slot": ("full.slot(position, shift)", "full.slot(item.position, shift)"),
    "no end": ("if (sequence == arguments.num_sequences - 1)", "if (false)"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_of_the_kernel_is_seen(name: str) -> None:
    def check_all() -> None:
        for seed in range(20):
            case = random_case((1, 40, 1, 300), 16, seed)
            check(case, emulated(change=replacing(*WRONG_LINES[name])))

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_beyond_a_tensor_is_touched(sizes: tuple[int, ...]) -> None:
    check(random_case(sizes, fillers=(1,)).moved(guarded))


def test_a_careless_kernel_is_seen() -> None:
    case = random_case((1, 40), fillers=(1,)).moved(guarded)
    careless = replacing("i < end; i += share.step", "i <= arguments_end; i += share.step")
    with (
        pytest.raises(EmulationError, match="which is no memory"),
        emulated(change=lambda text: careless(text).replace("arguments_end", "end + 4096")),
    ):
        case.run()


WAIT = "    wait_for_previous_kernels();\n    allow_next_kernel();\n"
LATER = "    const long long table ="


def test_what_came_before_is_read_after_the_wait() -> None:
    def waits_late(source: str) -> str:
        return source.replace(WAIT, "").replace(LATER, WAIT + LATER)

    def is_right(seed: int, change: Callable[[str], str] | None = None) -> bool:
        case = random_case((1, 40, 1), seed=seed)
        expected = copied(case)
        expected.run(steps.unpack_step)
        with emulated(seed, late=(case.items, case.words, case.last_token_ids), change=change):
            case.run()
        return differing(case, expected) == []

    assert all(is_right(seed) for seed in range(3))
    with pytest.raises((AssertionError, EmulationError)):
        assert all(is_right(seed, change=waits_late) for seed in range(3))


@pytest.mark.parametrize("operator", [unpack_step, steps.unpack_step])
@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("items", lambda x: x[:, :8], r"items must be \[B, 9\], B at least 1, got \[2, 8\]"),
        ("items", lambda x: x[:0], r"items must be \[B, 9\], B at least 1, got \[0, 9\]"),
        ("items", lambda x: x.long(), "items must be torch.int32, got torch.int64"),
        ("items", every_second, "items must be contiguous"),
        ("words", lambda x: x.long(), "words must be torch.int32"),
        ("words", other_device, "words must be on the device of items, got meta and cpu"),
        ("last_token_ids", lambda x: x[:5], "last_token_ids must be of 6 seats at least, got 5"),
        ("last_token_ids", lambda x: x.int(), "last_token_ids must be torch.int64"),
        ("full_by_seat", lambda x: x[0], r"full_by_seat must be \[seats, P\], got \[256\]"),
        ("window_by_seat", lambda x: x[:, :9], r"window_by_seat must be \[6, 256\], got \[6, 9\]"),
    ],
)
def test_bad_input_is_refused(
    operator: Callable[..., None], name: str, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    case = random_case((1, 40))
    with pytest.raises(ValueError, match=sentence):
        replace(case, **{name: change(getattr(case, name))}).run(operator)


@pytest.mark.parametrize("name", StepTensors._fields)
def test_room_of_another_size_is_refused(name: str) -> None:
    case = random_case((1, 40))
    out = case.out._replace(**{name: getattr(case.out, name)[:-1]})
    with pytest.raises(ValueError, match=r"(must be \[)"):
        replace(case, out=out).run()


def test_tables_wider_than_a_seats_are_refused() -> None:
    case = random_case((1, 40))
    out = case.out._replace(full_tables=torch.zeros(2, 257, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"full_tables must be \[B, P\], P at most 256"):
        replace(case, out=out).run()


def test_fewer_rows_sequences_and_columns_in_the_same_memory() -> None:
    room = StepTensors.empty(50, 8, 256, "cpu")
    part = room.first(7, 3, 32)
    assert [list(each.shape) for each in part] == [[7]] * 4 + [[4], [3], [3, 32], [3, 32]]
    for each, whole in zip(part, room, strict=True):
        assert each.is_contiguous()
        assert each.data_ptr() == whole.data_ptr()


def test_pages_of_a_size_that_attention_does_not_take_are_refused() -> None:
    with emulated(), pytest.raises(ValueError, match=r"page_size must be one of 16, .*, got 48"):
        replace(random_case((1,)), page_size=48).run()


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="items must be on a GPU, got cpu"):
        random_case((1,)).run()


# --- on a GPU alone ---


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_on_a_gpu_it_is_the_reference(sizes: tuple[int, ...]) -> None:
    for seed in range(5):
        case = random_case(sizes, 64, seed, fillers=(1, 300))
        there = case.moved(lambda tensor: tensor.cuda())
        there.run()
        case.run(steps.unpack_step)
        assert differing(there, case) == []


@pytest.mark.gpu
def test_a_captured_graph_is_eager() -> None:
    cases = [random_case((1, 1, 1), 64, seed, fillers=(1,)) for seed in range(3)]
    # A graph's tables have room for sequences of any length.
    width = cases[0].full_by_seat.shape[1]
    cases = [replace(case, out=StepTensors.empty(4, 4, width, "cpu")) for case in cases]
    for case in cases:
        for each in case.out:
            each.fill_(POISON)
    there = cases[0].moved(lambda tensor: tensor.cuda())
    room = torch.zeros(100, dtype=torch.int32, device="cuda")
    there = replace(there, words=room)
    there.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.run()
    for case in cases:
        case.run(steps.unpack_step)
        for name in ("items", "last_token_ids", "full_by_seat", "window_by_seat"):
            getattr(there, name).copy_(getattr(case, name))
        room[: len(case.words)] = case.words.cuda()
        for each in there.out:
            each.fill_(POISON)
        graph.replay()
        assert differing(there, case) == []
