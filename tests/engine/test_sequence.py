from gptoss_engine.sequence import ScheduledItem, Sequence, Status

from .fakes import request


def make(**sampling: object) -> Sequence:
    return Sequence.from_request(
        request("a", (5, 6, 7), deadline=9.0, **sampling),
        seed=3,
        max_tokens=4,
        eos_token_ids=frozenset({1, 2}),
        arrival_time=8.0,
    )


def test_a_sequence_begins_as_its_prompt_and_waits() -> None:
    sequence = make()
    assert sequence.token_ids == [5, 6, 7]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (3, 0)
    assert (sequence.num_computed_tokens, sequence.num_uncomputed_tokens) == (0, 3)
    assert sequence.status is Status.WAITING
    assert (sequence.arrival_time, sequence.deadline) == (8.0, 9.0)
    assert (sequence.page_tables.full, sequence.page_tables.window) == ([], [])


def test_two_sequences_share_no_pages() -> None:
    make().page_tables.full.append(1)
    assert make().page_tables.full == []


def test_what_ends_a_generation() -> None:
    assert make().stop_token_ids == {1, 2}
    assert make(stop_token_ids=[7]).stop_token_ids == {1, 2, 7}
    assert make(stop_token_ids=[2, 7], ignore_eos=True).stop_token_ids == {2, 7}
    assert make(ignore_eos=True).stop_token_ids == frozenset()


def test_the_next_token_is_due_with_the_last_known_one() -> None:
    sequence = make()
    assert not ScheduledItem.of(sequence, 2).is_sampled
    assert ScheduledItem.of(sequence, 3).is_sampled
    sequence.num_computed_tokens = 3
    sequence.token_ids.append(8)
    assert (sequence.num_output_tokens, sequence.num_uncomputed_tokens) == (1, 1)
    assert ScheduledItem.of(sequence, 1).is_sampled


def test_guesses_take_positions_too() -> None:
    item = ScheduledItem.of(make(), 3, draft_token_ids=(8, 9))
    assert (item.num_slots, item.is_sampled) == (5, True)
