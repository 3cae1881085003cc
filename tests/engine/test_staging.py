"""What is sent of a step, and what the device makes of it, against the batch that a CPU builds."""

import random
from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gptoss_engine.batch import Batch, PageGroup
from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.page_pool import PagePool
from gptoss_engine.scheduler import Scheduler
from gptoss_engine.sequence import (
    PageTables,
    ScheduledItem,
    ScheduledStep,
    Sequence,
    StepOutput,
)
from gptoss_engine.staging import COPIES, KnownPages, StagedStep, Staging
from gptoss_engine.staging import _rounded as staging_size
from gptoss_kernels import ops
from gptoss_kernels.steps import PENDING, StepItem, StepTensors, unpack_step

from .stepping import GREEDY, sequence

CPU = torch.device("cpu")
PAGE_SIZE, WINDOW, SEATS, COLUMNS = 4, 10, 4, 16
VOCABULARY = 97


class Device:
    """What a GPU knows: pages and last tokens by seat. Whatever nobody wrote is poison."""

    def __init__(self) -> None:
        self.known = KnownPages(SEATS, PAGE_SIZE, WINDOW)
        self.full, self.window = (
            torch.full((SEATS, COLUMNS), -7, dtype=torch.int32) for _ in range(2)
        )
        self.last_token_ids = torch.full((SEATS,), -9)

    def unpacked(self, step: ScheduledStep) -> StepTensors:
        return self.run(StagedStep.build(step, self.known))

    def run(self, staged: StagedStep) -> StepTensors:
        items, words = (torch.from_numpy(each.copy()) for each in staged.arrays())
        out = StepTensors.empty(staged.num_rows, len(items), COLUMNS, CPU)
        for each in out:
            each.fill_(-7)
        unpack_step(
            *(items, words, self.last_token_ids, self.full, self.window, out),
            page_size=PAGE_SIZE,
            window=WINDOW,
        )
        return out


def built(step: ScheduledStep, last_token_ids: Tensor) -> Batch:
    batch = Batch.build(step, page_size=PAGE_SIZE, vocab_size=VOCABULARY, device=CPU)
    batch.input_ids[batch.pending_rows] = last_token_ids[batch.pending_seats]
    return batch


def assert_equal(out: StepTensors, batch: Batch) -> None:
    assert out.input_ids.tolist() == batch.input_ids.tolist()
    assert out.positions.tolist() == batch.positions.tolist()
    assert out.query_start.tolist() == batch.query_start.tolist()
    assert out.seq_lens.tolist() == batch.seq_lens.tolist()
    assert out.full_slots.tolist() == batch.full.slot_mapping.tolist()
    assert out.window_slots.tolist() == batch.window.slot_mapping.tolist()
    first_rows = batch.query_start[:-1].long()
    for index, (position, length) in enumerate(
        zip(batch.positions[first_rows].tolist(), batch.seq_lens.tolist(), strict=True)
    ):
        end = (length - 1) // PAGE_SIZE + 1
        first_seen = max(position - WINDOW + 1, 0) // PAGE_SIZE
        for table, group, first in (
            (out.full_tables, batch.full, 0),
            (out.window_tables, batch.window, first_seen),
        ):
            assert seen(table, index, first, end) == seen(group, index, first, end)


def seen(tables: Tensor | PageGroup, index: int, first: int, end: int) -> list[int]:
    rows = tables.page_tables if isinstance(tables, PageGroup) else tables
    return rows[index, first:end].tolist()


def steps(seed: int, num_full: int, num_window: int, *, overlaps: bool) -> Iterator[ScheduledStep]:
    """Of a scheduler under random traffic: sequences that come, end, and are preempted.

    overlaps: a step's tokens are told only when the next one was scheduled.
    """
    chance = random.Random(seed)
    full = PagePool(num_full, PAGE_SIZE)
    scheduler = Scheduler(
        max_num_seqs=SEATS,
        max_num_batched_tokens=chance.randint(SEATS, 20),
        full=full,
        window=PagePool(num_window, PAGE_SIZE),
        sliding_window=WINDOW,
        max_num_tokens=min(COLUMNS * PAGE_SIZE, full.num_tokens),
        decoder=PlainDecoder(),
        has_prefix_cache=True,
    )
    prompts = [[chance.randrange(VOCABULARY) for _ in range(25)] for _ in range(8)]
    before: list[tuple[ScheduledStep, StepOutput]] = []
    for number in range(60):
        while chance.random() < 0.4:
            made = sequence(chance.choice(prompts)[: chance.randint(1, 25)])
            made.generation_id = f"{number}.{chance.random()}"
            made.max_tokens = chance.randint(1, scheduler.max_num_tokens - 25)
            made.stop_token_ids = frozenset(range(5))
            scheduler.add(made)
        if chance.random() < 0.05 and scheduler.running:
            scheduler.abort(chance.choice(scheduler.running).generation_id)
        step = scheduler.schedule()
        if step.items:
            yield step
        chosen = tuple(
            (chance.randrange(VOCABULARY),) if item.is_sampled else () for item in step.items
        )
        before.append((step, StepOutput(chosen, tuple(() for _ in chosen))))
        while len(before) > overlaps:
            scheduler.update(*before.pop(0))


@given(st.integers(0, 2**32), st.integers(8, 30), st.integers(7, 20), st.booleans())
@settings(deadline=None, max_examples=50)
def test_the_device_finds_what_the_cpu_builds_under_any_load(
    seed: int, num_full: int, num_window: int, overlaps: bool
) -> None:
    """Seats that go to others, pages given back, sequences that start again."""
    device, chance = Device(), random.Random(seed)
    for step in steps(seed, num_full, num_window, overlaps=overlaps):
        batch = built(step, device.last_token_ids)
        assert_equal(device.unpacked(step), batch)
        for item in step.items:
            if item.is_sampled:
                device.last_token_ids[item.seat] = chance.randrange(VOCABULARY)


def test_such_loads_preempt_reuse_seats_and_have_pending_tokens() -> None:
    """What the test above would not see if it did not happen."""
    preempted, owners, pending, chunks = 0, set(), 0, 0
    for seed in range(20):
        for step in steps(seed, 12, 10, overlaps=True):
            preempted += len(step.preempted)
            owners |= {(seed, item.seat, id(item.sequence)) for item in step.items}
            pending += sum(item.is_pending for item in step.items)
            chunks += sum(item.first > 0 and item.num_tokens > 1 for item in step.items)
    assert min(preempted, pending, chunks, len(owners) - 20 * SEATS) > 20


def seated(seat: int, num_tokens: int, full: list[int], window: list[int]) -> Sequence:
    made = sequence([(7 * i) % VOCABULARY for i in range(num_tokens)], GREEDY)
    made.seat, made.page_tables = seat, PageTables(full, window)
    return made


def test_only_new_pages_are_sent_and_of_the_window_only_what_is_seen() -> None:
    known = KnownPages(SEATS, PAGE_SIZE, WINDOW)
    made = seated(2, 30, [5, 6, 7, 8, 9], [1, 2, 3, 4, 0])
    made.num_computed_tokens = 0
    items, words = built_with(known, ScheduledItem.of(made, 20))
    assert items == [StepItem(2, 0, 0, 20, 0, 0, 5, 0, 5)]
    assert words == [*made.token_ids[:20], 5, 6, 7, 8, 9, 1, 2, 3, 4, 0]
    made.num_computed_tokens = 20
    made.page_tables.full += [10, 11, 12]
    made.page_tables.window[:] = [-1, -1, 3, 4, 0, 9, 8, 7]
    items, words = built_with(known, ScheduledItem.of(made, 9))
    assert items == [StepItem(2, 20, 0, 9, 0, 5, 3, 5, 3)]
    assert words == [*made.token_ids[20:29], 10, 11, 12, 9, 8, 7]
    made.num_computed_tokens = 29
    assert built_with(known, ScheduledItem.of(made, 1)) == (
        [StepItem(2, 29, 0, 1, 0)],
        [made.token_ids[29]],
    )
    # The first step of a sequence whose keys are all there already: what nobody sees is not sent.
    other = seated(1, 30, [*range(8)], [-1, -1, -1, -1, -1, 5, 6, 7])
    other.num_computed_tokens = 29
    items, words = built_with(known, ScheduledItem.of(other, 1))
    assert items == [StepItem(1, 29, 0, 1, 0, 0, 8, 5, 3)]
    assert words == [other.token_ids[29], *range(8), 5, 6, 7]


def built_with(known: KnownPages, *items: ScheduledItem) -> tuple[list[StepItem], list[int]]:
    return described(StagedStep.build(ScheduledStep(items), known))


def described(staged: StagedStep) -> tuple[list[StepItem], list[int]]:
    items, words = staged.arrays()
    return [StepItem(*row) for row in items.tolist()], words.tolist()


def test_who_lost_its_pages_and_finds_the_same_seat_brings_all_of_them() -> None:
    known = KnownPages(SEATS, PAGE_SIZE, WINDOW)
    made = seated(2, 6, [5, 6], [1, 2])
    built_with(known, ScheduledItem.of(made, 6))
    made.page_tables.full[:], made.page_tables.window[:] = [8, 9], [3, 4]
    made.num_computed_tokens = 5  # as after a hit of a prefix, some day
    step = ScheduledStep((ScheduledItem.of(made, 1),), preempted=(made,))
    items, _ = described(StagedStep.build(step, known))
    assert items == [StepItem(2, 5, 0, 1, 0, 0, 2, 0, 2)]
    # A sequence that was preempted before its first step is nobody whom the device knows.
    known.forget((seated(0, 1, [], []),))


def test_pending_tokens_and_drafts() -> None:
    known = KnownPages(SEATS, PAGE_SIZE, WINDOW)
    pending = seated(0, 3, [5], [1])
    pending.num_computed_tokens, pending.num_pending_tokens = 3, 1
    guessing = seated(1, 5, [6, 7], [2, 3])
    guessing.num_computed_tokens = 4
    items, words = built_with(
        known, ScheduledItem.of(pending, 1), ScheduledItem.of(guessing, 1, (40, 41))
    )
    assert words == [PENDING, 5, 1, guessing.token_ids[4], 40, 41, 6, 7, 2, 3]
    assert items[1] == StepItem(1, 4, 1, 3, 3, 0, 2, 0, 2)


def test_fillers_lie_behind_decodes_and_at_the_end_and_are_stored_nowhere() -> None:
    device = Device()
    decode, prompt = seated(2, 6, [7, 8], [3, 4]), seated(1, 6, [5, 6], [1, 2])
    decode.num_computed_tokens = 5
    step = ScheduledStep((ScheduledItem.of(decode, 1), ScheduledItem.of(prompt, 6)))
    staged = StagedStep.build(step, device.known, 1, 2)
    assert (staged.num_sequences, staged.num_rows) == (4, 9)
    staged = staged.filled(7, 14)
    out = device.run(staged)
    assert out.query_start.tolist() == [0, 1, 2, 3, 9, 9, 9, 14]
    assert out.seq_lens.tolist() == [6, 1, 1, 6, 0, 0, 5]
    assert out.positions.tolist() == [5, 0, 0, *range(6), *range(5)]
    assert out.input_ids.tolist() == [decode.token_ids[5], -1, -1, *prompt.token_ids, *[-1] * 5]
    for slots in (out.full_slots, out.window_slots):
        assert slots.tolist()[1:3] == [-1, -1]
        assert slots.tolist()[9:] == [-1] * 5
        assert min(slots.tolist()[3:9]) >= 0
    assert device.full[0].tolist() == [-7] * COLUMNS
    # Decodes alone, and nothing at all.
    alone = StagedStep.build(ScheduledStep((ScheduledItem.of(decode, 1),)), device.known, 1, 2)
    assert device.run(alone).query_start.tolist() == [0, 1, 2, 3]
    assert alone.filled(3, 3) is alone
    nothing = StagedStep.build(ScheduledStep(()), device.known, 0, 2)
    assert device.run(nothing).query_start.tolist() == [0, 1, 2]


def test_words_are_at_least_as_many_as_are_asked_for() -> None:
    device = Device()
    step = ScheduledStep((ScheduledItem.of(seated(1, 6, [5, 6], [1, 2]), 6),))
    staged = StagedStep.build(step, device.known)
    assert [len(staged.arrays(count)[1]) for count in (0, 10, 12)] == [10, 10, 12]
    assert staged.arrays(12)[1].tolist()[:10] == staged.words.tolist()


@pytest.mark.parametrize("tables", [([5], [1, 2]), ([5, 6], [1]), ([5, 6], [1, -1])])
def test_a_token_without_a_page_is_our_own_bug(tables: tuple[list[int], list[int]]) -> None:
    made = seated(2, 6, *tables)
    with pytest.raises(AssertionError, match="no page"):
        built_with(KnownPages(SEATS, PAGE_SIZE, WINDOW), ScheduledItem.of(made, 6))


def copied(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


@pytest.mark.gpu
def test_what_is_sent_arrives_on_a_gpu_before_the_next_kernel_reads_it() -> None:
    """Steps of all sizes one behind the other, none of them waited for, each read by a kernel that
    begins early, behind one that tells the host of the step before."""
    operators = ops.load("cuda", "cuda")
    staging = Staging(300_000, torch.device("cuda"), operators.transfer)
    told = torch.empty(4, dtype=torch.int64, pin_memory=True)
    table = torch.arange(8, device="cuda", dtype=torch.bfloat16)[:, None].repeat(1, 16)
    rows, found = [], []
    with torch.inference_mode():
        for turn in range(60):
            count = (10, 9000, 35_000)[turn % 3]
            rows.append(np.arange(count) // 7 % 8 if turn % 2 else np.arange(count) % 8)
            (part,) = staging.send([rows[-1]])
            found.append(operators.select_rows(table, staging.tensor(part)))
            operators.transfer(staging.tensor(part)[:4], told)
    for expected, each in zip(rows, found, strict=True):
        assert np.array_equal(each[:, 3].float().cpu().numpy(), expected)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["int32", "int64", "float64"]),
            st.lists(st.integers(0, 30), min_size=1, max_size=3),
        ),
        max_size=8,
    )
)
def test_what_is_sent_arrives(shapes: list[tuple[str, list[int]]]) -> None:
    staging = Staging(2_000_000, CPU, copied)
    for _ in range(COPIES + 1):
        arrays = [
            np.arange(np.prod(shape), dtype=dtype).reshape(shape) + index
            for index, (dtype, shape) in enumerate(shapes)
        ]
        parts = staging.send(arrays)
        for each, part in zip(arrays, parts, strict=True):
            found = staging.tensor(part)
            assert found.data_ptr() % 16 == staging.tensor(parts[0]).data_ptr() % 16
            assert np.array_equal(found.numpy(), each)
            assert found.numpy().dtype == each.dtype


def test_what_is_sent_has_few_sizes() -> None:
    sizes: list[int] = []

    def transfer(source: Tensor, target: Tensor) -> None:
        assert len(source) == len(target)
        sizes.append(len(source))
        target.copy_(source)

    staging = Staging(300_000, CPU, transfer)
    for count in (1, 100, 256, 257, 4097, 16_384, 16_385, 33_000, 75_000):
        (part,) = staging.send([np.arange(count, dtype=np.int32)])
        assert staging.tensor(part).tolist() == [*range(count)]
    assert sizes == [1024, 1024, 1024, 2048, 18_432, 65_536, 73_728, 147_456, 327_680]
    assert len({staging_size(count) for count in range(1, 300_000)}) < 70


def test_the_same_shapes_lie_at_the_same_addresses_until_one_differs() -> None:
    staging = Staging(1000, CPU, copied)
    one, two, three = (np.zeros(count, dtype=np.int32) for count in (5, 3, 9))
    first = staging.send([one, two, two])
    assert staging.send([one, two, three])[:2] == first[:2]
    assert [part.offset for part in staging.send([one, three, two])] == [0, 32, 80]


def test_more_than_there_is_room_for_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="more than 1024 bytes"):
        Staging(100, CPU, copied).send([np.zeros(129, dtype=np.int64)])
