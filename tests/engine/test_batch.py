import pytest
import torch

from gptoss_engine.batch import Batch
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep, Sequence
from gptoss_engine.types import SamplingParams
from gptoss_kernels.ops import Decodes

from .stepping import GREEDY, sequence, uniforms_of

CPU = torch.device("cpu")


def build(*items: ScheduledItem, vocab_size: int = 100) -> Batch:
    return Batch.build(ScheduledStep(items), page_size=4, vocab_size=vocab_size, device=CPU)


def tables(full: list[int], window: list[int]) -> PageTables:
    return PageTables(full=full, window=window)


def decode(
    sampling: SamplingParams = GREEDY, seed: int = 0, stop: tuple[int, ...] = ()
) -> Sequence:
    """Ten prompt tokens and two of the answer, the last not yet computed."""
    made = sequence(
        list(range(10)),
        sampling,
        seed,
        num_computed_tokens=11,
        page_tables=tables([7, 2, 5], [-1, 3, 9]),
        stop_token_ids=frozenset(stop),
    )
    made.token_ids += [41, 42]
    return made


def test_a_chunk_a_whole_prompt_and_a_decode_lie_flat_one_after_another():
    chunk = sequence(list(range(20, 30)), num_computed_tokens=3, page_tables=tables([1, 6], [8, 0]))
    prompt = sequence([50, 51], page_tables=tables([4], [2]))
    last = decode()
    batch = build(
        ScheduledItem.of(chunk, 4), ScheduledItem.of(prompt, 2), ScheduledItem.of(last, 1)
    )
    assert batch.input_ids.tolist() == [23, 24, 25, 26, 50, 51, 42]
    assert batch.positions.tolist() == [3, 4, 5, 6, 0, 1, 11]
    assert batch.query_start.tolist() == [0, 4, 6, 7]
    assert batch.seq_lens.tolist() == [7, 2, 12]
    assert batch.due.rows.tolist() == [5, 6]  # the chunk's last token is not the prompt's
    assert batch.full.page_tables.tolist() == [[1, 6, -1], [4, -1, -1], [7, 2, 5]]
    assert batch.window.page_tables.tolist() == [[8, 0, -1], [2, -1, -1], [-1, 3, 9]]
    assert batch.full.slot_mapping.tolist() == [7, 24, 25, 26, 16, 17, 23]
    assert batch.window.slot_mapping.tolist() == [35, 0, 1, 2, 8, 9, 39]
    assert batch.query_start.dtype == batch.seq_lens.dtype == torch.int32
    assert batch.full.page_tables.dtype == torch.int32


def test_decodes_are_the_sequences_at_the_front_with_few_rows():
    def short(count: int) -> ScheduledItem:
        made = sequence(list(range(count)), page_tables=tables([0, 1, 2], [0, 1, 2]))
        return ScheduledItem.of(made, count)

    one, eight, nine = short(1), short(8), short(9)
    assert build(one, eight, nine, one).decodes == Decodes(2, 9, 8)
    assert build(one, one).decodes == Decodes(2, 2, 1)
    assert build(nine, one).decodes == Decodes(0, 0, 0)


def test_drafts_follow_the_known_tokens_and_are_all_sampled_after():
    item = ScheduledItem.of(decode(SamplingParams(seed=5), seed=5), 1, draft_token_ids=())
    assert build(item).due.rows.tolist() == [0]
    made = decode(SamplingParams(), seed=5)
    made.page_tables = tables([7, 2, 5, 1], [-1, 3, 9, 0])
    batch = build(ScheduledItem.of(made, 1, draft_token_ids=(60, 61)))
    assert batch.input_ids.tolist() == [42, 60, 61]
    assert batch.positions.tolist() == [11, 12, 13]
    assert batch.seq_lens.tolist() == [14]
    assert batch.due.rows.tolist() == [0, 1, 2]
    assert batch.full.slot_mapping.tolist() == [23, 4, 5]
    assert batch.sampling.uniforms.tolist() == uniforms_of(5, 2, 3, 4)


def test_an_item_is_a_snapshot_of_its_sequence():
    made = decode(SamplingParams(seed=5, min_tokens=3), seed=5, stop=(7,))
    item = ScheduledItem.of(made, 1)
    made.num_computed_tokens, made.num_pending_tokens, made.seat = 12, 1, 3
    made.token_ids += [43]
    batch = build(item)
    assert batch.input_ids.tolist() == [42]
    assert (batch.positions.tolist(), batch.seq_lens.tolist()) == ([11], [12])
    assert (batch.pending_rows.tolist(), batch.sample_seats.tolist()) == ([], [-1])
    assert batch.sampling.masked_ids.tolist() == [7]
    assert batch.sampling.uniforms.tolist() == uniforms_of(5, 2)


def test_a_pending_token_is_found_by_its_seat():
    pending = decode(SamplingParams(seed=5, min_tokens=4), seed=5, stop=(7,))
    pending.num_computed_tokens, pending.num_pending_tokens, pending.seat = 11, 1, 6
    del pending.token_ids[-1]
    prompt = sequence([50, 51], page_tables=tables([4], [2]), seat=2)
    chunk = sequence([60, 61], page_tables=tables([8], [8]), seat=3)
    batch = build(*(ScheduledItem.of(s, n) for s, n in ((prompt, 2), (pending, 1), (chunk, 1))))
    assert batch.input_ids.tolist() == [50, 51, -1, 60]
    assert batch.positions.tolist() == [0, 1, 11, 0]
    assert batch.pending_rows.tolist() == [2]
    assert batch.pending_seats.tolist() == [6]
    assert batch.due.rows.tolist() == [1, 2]
    assert batch.sample_seats.tolist() == [2, 6]
    assert batch.sampling.masked_start.tolist() == [0, 0, 1]
    assert batch.sampling.uniforms.tolist() == [*uniforms_of(0, 0), *uniforms_of(5, 2)]


def test_a_token_without_a_page_is_our_own_bug():
    made = decode()
    made.page_tables.window[2] = -1
    with pytest.raises(AssertionError, match="no page"):
        build(ScheduledItem.of(made, 1))
