from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gptoss_engine.config import InvalidConfig
from gptoss_engine.decoding import Decoder
from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.page_pool import GONE, PagePool
from gptoss_engine.scheduler import Scheduler
from gptoss_engine.sequence import NO_SEAT, ScheduledItem, ScheduledStep, Sequence, Status
from gptoss_engine.types import TokenChunk

from .fakes import EOS, FakeRunner, GuessingDecoder, Launched, answer, request


def make_scheduler(
    runner: FakeRunner,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 8,
    decoder: Decoder | None = None,
    has_prefix_cache: bool = True,
) -> Scheduler:
    full = PagePool(runner.num_pages, runner.page_size)
    return Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        full=full,
        window=PagePool(runner.num_window_pages, runner.page_size),
        sliding_window=runner.sliding_window,
        max_num_tokens=min(runner.max_model_len, full.num_tokens),
        decoder=decoder or PlainDecoder(),
        has_prefix_cache=has_prefix_cache,
    )


def make_sequence(
    generation_id: str,
    prompt_length: int,
    max_tokens: int,
    *,
    deadline: float | None = None,
    prompt: int | None = None,
    **sampling: Any,
) -> Sequence:
    """A prompt that no other generation id has unless one is named, and no end token unless asked
    for."""
    number = int.from_bytes(generation_id.encode(), "big")
    start = number if prompt is None else prompt
    token_ids = tuple((start * 31 + i * 7) % 89 for i in range(prompt_length))
    sampling = {"ignore_eos": True} | sampling
    return Sequence.from_request(
        request(generation_id, token_ids, deadline=deadline, **sampling),
        seed=number,
        max_tokens=max_tokens,
        eos_token_ids=frozenset({EOS}),
        arrival_time=1.0,
    )


def run(scheduler: Scheduler, runner: FakeRunner) -> tuple[ScheduledStep, list[TokenChunk]]:
    step = scheduler.schedule()
    sizes = [(item.sequence.generation_id, item.num_tokens) for item in step.items]
    assert len({generation_id for generation_id, _ in sizes}) == len(sizes)
    return step, scheduler.update(step, runner.run(step))


def run_to_end(scheduler: Scheduler, runner: FakeRunner) -> dict[str, list[TokenChunk]]:
    chunks: dict[str, list[TokenChunk]] = {}
    while scheduler.has_work:
        for chunk in run(scheduler, runner)[1]:
            chunks.setdefault(chunk.generation_id, []).append(chunk)
    return chunks


def tokens_of(chunks: list[TokenChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def sizes(step: ScheduledStep) -> list[tuple[str, int]]:
    return [(item.sequence.generation_id, item.num_tokens) for item in step.items]


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 19, 2))
    taken = []
    while scheduler.has_work:
        step, _ = run(scheduler, runner)
        taken.append(sizes(step))
    assert taken == [[("a", 8)], [("a", 8)], [("a", 3)], [("a", 1)]]


def test_decodes_come_first_and_prefills_share_what_they_leave() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 2, 9))
    run(scheduler, runner)
    for name, length in (("b", 9), ("c", 3), ("d", 3)):
        scheduler.add(make_sequence(name, length, 9))
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 7)]
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 2), ("c", 3), ("d", 2)]
    # d's chunk is its last token: as good as a decode.
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_a_decode_goes_before_the_chunk_of_an_older_prefill() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 20, 9))
    run(scheduler, runner)
    scheduler.add(make_sequence("b", 1, 9))
    scheduler.max_num_batched_tokens = 13
    assert sizes(run(scheduler, runner)[0]) == [("b", 1), ("a", 12)]
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 1)]


def test_no_more_than_max_num_seqs_run() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 1, 2))
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 1)]
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 1)]
    assert sizes(run(scheduler, runner)[0]) == [("c", 1)]


def test_when_pages_run_out_the_last_admitted_goes_back_to_the_head_of_the_queue() -> None:
    runner = FakeRunner(page_size=2, num_pages=7)
    scheduler = make_scheduler(runner)
    sequences = {name: make_sequence(name, 3, 7) for name in "abc"}
    for sequence in sequences.values():
        scheduler.add(sequence)
    run(scheduler, runner)
    assert [sequence.generation_id for sequence in scheduler.running] == ["a", "b"]
    preempted = []
    while not preempted:
        step, _ = run(scheduler, runner)
        preempted = [sequence.generation_id for sequence in step.preempted]
    assert preempted == ["b"]
    b = sequences["b"]
    assert (b.status, b.num_computed_tokens) == (Status.WAITING, 0)
    assert b.num_output_tokens > 0
    assert (b.page_tables.full, b.page_tables.window, b.seat) == ([], [], NO_SEAT)
    assert [sequence.generation_id for sequence in scheduler.waiting] == ["b", "c"]
    run_to_end(scheduler, runner)
    for sequence in sequences.values():
        expected, _ = answer(sequence, runner.sliding_window)
        assert tuple(sequence.token_ids[3:]) == expected
    assert scheduler.num_preemptions > 0


def test_nobody_restarts_in_the_step_that_took_its_pages() -> None:
    class WrongForB(PlainDecoder):
        """b's guesses are all wrong, so it holds more pages than it needs to restart."""

        guesses = True

        def propose(self, sequence: Sequence) -> tuple[int, ...]:
            return (96, 96, 96) if sequence.generation_id == "b" else ()

        def accept(self, draft: tuple[int, ...], sampled: tuple[int, ...]) -> tuple[int, ...]:
            return sampled[:1]

    runner = FakeRunner(page_size=1, num_pages=5, sliding_window=1)
    scheduler = make_scheduler(runner, decoder=WrongForB())
    scheduler.add(make_sequence("a", 1, 2))
    scheduler.add(make_sequence("b", 1, 4))
    step, _ = run(scheduler, runner)
    assert (sizes(step), scheduler.full.num_free) == ([("a", 1), ("b", 1)], 0)
    step, _ = run(scheduler, runner)
    assert sizes(step) == [("a", 1)]
    assert [sequence.status for sequence in step.preempted] == [Status.WAITING]


def test_a_prefill_chunk_shrinks_to_the_free_pages_before_anyone_is_preempted() -> None:
    runner = FakeRunner(page_size=2, num_pages=16, num_window_pages=6, sliding_window=2)
    scheduler = make_scheduler(runner, max_num_batched_tokens=16)
    scheduler.add(make_sequence("a", 18, 2))
    scheduler.add(make_sequence("b", 2, 9))
    assert sizes(run(scheduler, runner)[0]) == [("a", 12)]
    step, _ = run(scheduler, runner)
    assert (sizes(step), step.preempted) == ([("a", 6), ("b", 2)], ())


def test_the_youngest_keeps_its_pages_while_it_waits_for_one() -> None:
    runner = FakeRunner(page_size=2, num_pages=5)
    scheduler = make_scheduler(runner)
    a, b = make_sequence("a", 4, 3), make_sequence("b", 3, 4)
    scheduler.add(a)
    scheduler.add(b)
    assert sizes(run(scheduler, runner)[0]) == [("a", 4), ("b", 3)]
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 1)]
    step, _ = run(scheduler, runner)
    assert (sizes(step), step.preempted) == ([("a", 1)], ())
    assert (b.status, b.num_computed_tokens) == (Status.RUNNING, 4)
    assert sizes(run(scheduler, runner)[0]) == [("b", 1)]
    run_to_end(scheduler, runner)
    assert tuple(b.token_ids[3:]) == answer(b, runner.sliding_window)[0]


def test_a_new_sequence_leaves_each_running_one_a_page_to_grow_by() -> None:
    runner = FakeRunner(page_size=4, num_pages=3)
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 4, 4))
    scheduler.add(make_sequence("b", 5, 2))
    assert sizes(run(scheduler, runner)[0]) == [("a", 4)]
    assert sizes(run(scheduler, runner)[0]) == [("a", 1)]
    run(scheduler, runner)
    run(scheduler, runner)
    assert sizes(run(scheduler, runner)[0]) == [("b", 5)]
    assert scheduler.num_preemptions == 0


def test_a_window_that_grows_is_left_a_page() -> None:
    runner = FakeRunner(page_size=4, num_window_pages=3)
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 4, 9))
    scheduler.add(make_sequence("b", 5, 2))
    while "a" in scheduler:
        assert sizes(run(scheduler, runner)[0])[0][0] == "a"
        assert [sequence.generation_id for sequence in scheduler.waiting] == ["b"]
    run_to_end(scheduler, runner)
    assert scheduler.num_preemptions == 0


def test_a_window_that_cannot_grow_is_left_no_page() -> None:
    """A window of 4 touches 2 pages at the most, and so do all of a's from its fifth token on."""
    runner = FakeRunner(page_size=4, num_window_pages=4)
    scheduler = make_scheduler(runner)
    sequences = [make_sequence("a", 4, 20), make_sequence("b", 5, 20)]
    scheduler.add(sequences[0])
    run(scheduler, runner)
    scheduler.add(sequences[1])
    scheduler.add(make_sequence("c", 1, 1))
    assert sizes(run(scheduler, runner)[0]) == [("a", 1), ("b", 5)]
    assert scheduler.window.num_free == 0
    run_to_end(scheduler, runner)
    assert scheduler.num_preemptions == 0
    for sequence in sequences:
        prompt = sequence.num_prompt_tokens
        assert tuple(sequence.token_ids[prompt:]) == answer(sequence, runner.sliding_window)[0]


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    runner = FakeRunner(page_size=4, num_pages=4)
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 4, 3))
    scheduler.add(make_sequence("b", 13, 1))
    scheduler.add(make_sequence("c", 1, 1))
    assert sizes(run(scheduler, runner)[0]) == [("a", 4)]
    assert [s.generation_id for s in scheduler.waiting] == ["b", "c"]
    run(scheduler, runner)
    assert sizes(run(scheduler, runner)[0]) == [("a", 1)]
    assert sizes(run(scheduler, runner)[0]) == [("b", 8)]


@pytest.mark.parametrize("sliding_window", [1, 2, 3, 4, 5, 8])
def test_only_what_the_step_sees_of_the_window_has_pages(sliding_window: int) -> None:
    runner = FakeRunner(page_size=2, sliding_window=sliding_window)
    scheduler = make_scheduler(runner)
    sequence = make_sequence("a", 21, 20)
    scheduler.add(sequence)
    while True:
        step = scheduler.schedule()
        (item,) = step.items
        first_seen = max(0, item.first - sliding_window + 1)
        held = [page != GONE for page in sequence.page_tables.window]
        assert held == [2 * index + 1 >= first_seen for index in range(len(held))]
        if item.num_tokens == 1:
            assert sum(held) <= scheduler.max_window_pages
        assert GONE not in sequence.page_tables.full
        scheduler.update(step, runner.run(step))
        if sequence.status is Status.FINISHED:
            break
    assert tuple(sequence.token_ids[21:]) == answer(sequence, sliding_window)[0]
    assert scheduler.full.num_used == scheduler.window.num_used == 0


def test_one_window_must_fit_its_pool() -> None:
    with pytest.raises(InvalidConfig, match=r"num_window_pages must be at least 3, .* got 2"):
        make_scheduler(FakeRunner(page_size=4, num_window_pages=2, sliding_window=8))
    # Sequences that are shorter than the window never need as many.
    make_scheduler(FakeRunner(page_size=4, num_window_pages=2, sliding_window=8, max_model_len=8))


def test_abort_ends_a_generation_wherever_it_is_and_only_once() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=2)
    for name, length in (("decoding", 2), ("prefilling", 12), ("waiting", 3)):
        scheduler.add(make_sequence(name, length, 9))
    run(scheduler, runner)
    for name in ("waiting", "prefilling", "decoding"):
        chunk = scheduler.abort(name, "because")
        assert chunk is not None
        assert (chunk.generation_id, chunk.finish_reason, chunk.error) == (name, "abort", "because")
        assert name not in scheduler
        assert scheduler.abort(name) is None
    assert not scheduler.has_work
    assert scheduler.full.num_used == scheduler.window.num_used == scheduler.num_waiting_tokens == 0
    assert scheduler.num_finished == {"abort": 3}


def test_deadlines_of_ended_generations_do_not_gather() -> None:
    scheduler = make_scheduler(FakeRunner())
    for number in range(1000):
        scheduler.add(make_sequence(str(number), 3, 9, deadline=1e9 + number))
        scheduler.abort(str(number))
    scheduler.add(make_sequence("last", 3, 9, deadline=5.0))
    assert len(scheduler._deadlines) <= 100
    assert [chunk.generation_id for chunk in scheduler.expire(5.0)] == ["last"]


def test_a_deadline_ends_waiting_and_running_generations_and_is_named() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner, max_num_seqs=1)
    for name, deadline in (("a", 5.0), ("b", 3.5), ("c", 9.0), ("d", None)):
        scheduler.add(make_sequence(name, 3, 9, deadline=deadline))
    run(scheduler, runner)
    assert scheduler.expire(3.0) == []
    expired = scheduler.expire(5.0)
    assert [(chunk.generation_id, chunk.finish_reason) for chunk in expired] == [
        ("b", "abort"),
        ("a", "abort"),
    ]
    assert "the deadline, 2.500 s after the request's arrival" in expired[0].error
    assert scheduler.expire(5.0) == []
    assert scheduler.full.num_used == 0
    scheduler.abort("c")
    # The same id once more, with more time: the old deadline is not its own.
    scheduler.add(make_sequence("c", 3, 9, deadline=20.0))
    assert scheduler.expire(10.0) == []
    assert len(scheduler.expire(20.0)) == 1
    assert "d" in scheduler


def test_a_stop_token_is_part_of_the_answer_and_beats_the_length() -> None:
    runner = FakeRunner()
    free = make_sequence("a", 3, 5)
    tokens, reason = answer(free, runner.sliding_window)
    assert (len(tokens), reason) == (5, "length")
    for index in (0, 2, 4):
        scheduler = make_scheduler(runner)
        scheduler.add(make_sequence("a", 3, 5, stop_token_ids=[tokens[index]]))
        chunks = run_to_end(scheduler, runner)["a"]
        assert tokens_of(chunks) == tokens[: tokens.index(tokens[index]) + 1]
        assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 3, 5))
    chunks = run_to_end(scheduler, runner)["a"]
    assert (tokens_of(chunks), chunks[-1].finish_reason) == (tokens, "length")
    assert {chunk.num_prompt_tokens for chunk in chunks} == {3}
    assert (scheduler.num_prompt_tokens, scheduler.num_generated_tokens) == (3, 5)


def test_logprobs_stay_with_their_tokens() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner, decoder=GuessingDecoder(runner.sliding_window))
    scheduler.add(make_sequence("a", 3, 9, logprobs=0))
    scheduler.add(make_sequence("b", 3, 9))
    chunks = run_to_end(scheduler, runner)
    for chunk in chunks["a"]:
        assert [-entry.logprob for entry in chunk.logprobs] == list(chunk.token_ids)
    assert all(chunk.logprobs == () for chunk in chunks["b"])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 20])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_accepted_guesses_give_the_plain_answer_in_fewer_steps(
    max_tokens: int, length: int
) -> None:
    runner = FakeRunner(page_size=2)
    sequences = [make_sequence(name, 3, max_tokens) for name in "abc"]
    expected = [answer(sequence, runner.sliding_window)[0] for sequence in sequences]
    decoder = GuessingDecoder(runner.sliding_window, length)
    scheduler = make_scheduler(runner, decoder=decoder)
    for sequence in sequences:
        scheduler.add(sequence)
    num_steps = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert all(
            len(item.sequence.token_ids) + len(item.draft_token_ids) < 3 + max_tokens
            for item in step.items
        ), "the last token needs no guess after it"
        assert all(item.num_tokens == 1 for item in step.items if item.num_output_tokens), (
            "accepted guesses are in the cache"
        )
        scheduler.update(step, runner.run(step))
        num_steps += 1
        assert sum(item.num_slots for item in step.items) <= scheduler.max_num_batched_tokens
    assert [tuple(sequence.token_ids[3:]) for sequence in sequences] == expected
    assert num_steps < max_tokens or max_tokens < 4
    assert scheduler.full.num_used == scheduler.window.num_used == 0


def test_a_stop_token_among_accepted_guesses_cuts_what_follows_it() -> None:
    runner = FakeRunner()
    scheduler = make_scheduler(runner, decoder=GuessingDecoder(runner.sliding_window, 5))
    free = make_sequence("a", 3, 12)
    tokens, _ = answer(free, runner.sliding_window)
    scheduler.add(free)
    longest = max(run_to_end(scheduler, runner)["a"], key=lambda chunk: len(chunk.token_ids))
    assert len(longest.token_ids) >= 3
    stop = longest.token_ids[1]
    scheduler.add(make_sequence("a", 3, 12, stop_token_ids=[stop]))
    chunks = run_to_end(scheduler, runner)["a"]
    assert tokens_of(chunks) == tokens[: tokens.index(stop) + 1]
    assert chunks[-1].finish_reason == "stop"


def begin(
    scheduler: Scheduler, runner: FakeRunner
) -> tuple[ScheduledStep, Callable[[], list[TokenChunk]]]:
    """The next step, launched, and what updates with its result."""
    step = scheduler.schedule()
    launched = runner.launch(step)
    return step, lambda: scheduler.update(step, launched.result())


def test_the_token_of_the_step_that_is_out_is_the_next_ones_input() -> None:
    runner = FakeRunner(is_asynchronous=True)
    scheduler = make_scheduler(runner)
    sequence = make_sequence("a", 11, 9)
    scheduler.add(sequence)
    _, end_first = begin(scheduler, runner)
    found = []
    for _ in range(4):
        step, end_next = begin(scheduler, runner)
        (item,) = step.items
        found.append((item.first, item.num_tokens, item.num_output_tokens, item.is_pending))
        end_first()
        end_first = end_next
    # The prompt's second chunk is known; then each token but the step's own is in the cache.
    assert found == [(8, 3, 0, False), (11, 1, 1, True), (12, 1, 2, True), (13, 1, 3, True)]
    assert tuple(sequence.token_ids[11:]) == answer(sequence, runner.sliding_window)[0][:3]


def test_who_ends_with_the_token_that_is_pending_makes_room_at_once() -> None:
    """As if the step had run: nobody waits longer for a place than in the plain loop."""
    runner = FakeRunner(num_pages=2, is_asynchronous=True)
    scheduler = make_scheduler(runner, max_num_seqs=1)
    a, b = make_sequence("a", 5, 1), make_sequence("b", 5, 2)
    scheduler.add(a)
    scheduler.add(b)
    first, end_first = begin(scheduler, runner)
    second, end_second = begin(scheduler, runner)
    assert (sizes(first), sizes(second)) == ([("a", 5)], [("b", 5)])
    assert first.items[0].seat == second.items[0].seat
    assert (a.status, a.page_tables.full, "a" in scheduler) == (Status.ENDING, [], True)
    assert tokens_of(end_first()) == answer(a, runner.sliding_window)[0]
    assert (a.status, "a" in scheduler, scheduler.num_finished) == (
        *(Status.FINISHED, False),
        {"length": 1},
    )
    end_second()
    run_to_end(scheduler, runner)
    assert tuple(b.token_ids[5:]) == answer(b, runner.sliding_window)[0]


def test_an_abort_ends_who_would_have_ended_with_the_step() -> None:
    runner = FakeRunner(is_asynchronous=True)
    scheduler = make_scheduler(runner)
    scheduler.add(make_sequence("a", 3, 1))
    _, end = begin(scheduler, runner)
    assert scheduler.schedule().items == ()
    chunk = scheduler.abort("a")
    assert (chunk and chunk.finish_reason, scheduler.has_work) == ("abort", False)
    assert end() == []


def test_a_stop_token_that_is_known_late_costs_a_token_that_nobody_hears_of() -> None:
    runner = FakeRunner(is_asynchronous=True)
    scheduler = make_scheduler(runner)
    tokens, _ = answer(make_sequence("a", 3, 9), runner.sliding_window)
    scheduler.add(make_sequence("a", 3, 9, stop_token_ids=[tokens[0]]))
    _, end_first = begin(scheduler, runner)
    second, end_second = begin(scheduler, runner)
    assert sizes(second) == [("a", 1)]
    (chunk,) = end_first()
    assert (chunk.token_ids, chunk.finish_reason) == (tokens[:1], "stop")
    assert scheduler.full.num_used == scheduler.window.num_used == 0
    # Another one gets its id, its seat and its pages while that token is still computed.
    again = make_sequence("a", 6, 2)
    scheduler.add(again)
    third, end_third = begin(scheduler, runner)
    assert third.items[0].seat == second.items[0].seat
    assert end_second() == []
    end_third()
    run_to_end(scheduler, runner)
    assert tuple(again.token_ids[6:]) == answer(again, runner.sliding_window)[0]
    assert (scheduler.num_generated_tokens, scheduler.num_prompt_tokens) == (3, 9)


@pytest.mark.parametrize("ends", [False, True])
def test_who_is_preempted_while_its_step_is_out_gets_its_token(ends: bool) -> None:
    runner = FakeRunner(page_size=2, num_pages=5, is_asynchronous=True)
    scheduler = make_scheduler(runner)
    a, b = make_sequence("a", 4, 6), make_sequence("b", 1, 6)
    tokens, _ = answer(b, runner.sliding_window)
    if ends:
        b = make_sequence("b", 1, 6, stop_token_ids=[tokens[2]])
    scheduler.add(a)
    scheduler.add(b)
    out: deque[Callable[[], list[TokenChunk]]] = deque()
    preempted: tuple[Sequence, ...] = ()
    while not preempted:
        step, end = begin(scheduler, runner)
        preempted = step.preempted
        out.append(end)
        if len(out) == 2 and not preempted:
            out.popleft()()
    assert preempted == (b,)
    assert (b.num_output_tokens, b.num_pending_tokens, b.num_computed_tokens) == (2, 1, 0)
    assert scheduler.num_waiting_tokens == 3
    told = [chunk for chunk in out.popleft()() if chunk.generation_id == "b"]
    assert [(c.token_ids, c.finish_reason) for c in told] == [
        (tokens[2:3], "stop" if ends else None)
    ]
    assert (scheduler.num_waiting_tokens, b.num_pending_tokens) == (0 if ends else 4, 0)
    assert ([*scheduler.waiting] == []) == ends
    out.popleft()()
    run_to_end(scheduler, runner)
    assert tuple(b.token_ids[1:]) == (tokens[:3] if ends else tokens)
    assert tuple(a.token_ids[4:]) == answer(a, runner.sliding_window)[0]


def test_the_next_chunk_gets_the_window_pages_that_the_chunk_before_still_reads() -> None:
    """Nothing is written to them before it has run, so two chunks need no more pages than one."""
    runner = FakeRunner(page_size=2, num_window_pages=5, sliding_window=4, is_asynchronous=True)
    scheduler = make_scheduler(runner)
    sequence = make_sequence("a", 14, 2)
    scheduler.add(sequence)
    _, end_first = begin(scheduler, runner)
    first_pages = set(sequence.page_tables.window)
    step, end_second = begin(scheduler, runner)
    assert sizes(step) == [("a", 6)]
    assert first_pages & set(sequence.page_tables.window[4:])
    end_first()
    end_second()
    run_to_end(scheduler, runner)
    assert tuple(sequence.token_ids[14:]) == answer(sequence, runner.sliding_window)[0]


def test_who_guesses_must_know_all_tokens() -> None:
    runner = FakeRunner(is_asynchronous=True)
    scheduler = make_scheduler(runner, decoder=GuessingDecoder(runner.sliding_window))
    scheduler.add(make_sequence("a", 3, 9))
    begin(scheduler, runner)
    with pytest.raises(AssertionError, match="must know all tokens"):
        scheduler.schedule()


class Traffic(RuleBasedStateMachine):
    """Requests, aborts, deadlines and steps in any order, on caches that are mostly too small.

    If overlapped, all of it happens while a step is out.
    """

    @initialize(
        page_size=st.integers(1, 4),
        sliding_window=st.integers(1, 7),
        extra_pages=st.integers(0, 12),
        extra_window_pages=st.integers(0, 6),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 8),
        mode=st.sampled_from(["plain", "overlapped", "overlapped", "guessing"]),
        has_prefix_cache=st.booleans(),
    )
    def begin(
        self,
        page_size: int,
        sliding_window: int,
        extra_pages: int,
        extra_window_pages: int,
        max_num_seqs: int,
        extra_budget: int,
        mode: str,
        has_prefix_cache: bool,
    ) -> None:
        self.num_out = 1 if mode == "overlapped" else 0
        self.runner = FakeRunner(
            page_size=page_size,
            num_pages=2 + extra_pages,
            num_window_pages=(sliding_window - 2) // page_size + 2 + extra_window_pages,
            sliding_window=sliding_window,
            max_model_len=24,
            is_asynchronous=mode == "overlapped",
        )
        self.scheduler = make_scheduler(
            self.runner,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            decoder=GuessingDecoder(sliding_window) if mode == "guessing" else None,
            has_prefix_cache=has_prefix_cache,
        )
        self.contents: dict[bytes, tuple[str | int, ...]] = {}
        self.out: deque[tuple[ScheduledStep, Launched]] = deque()
        self.sequences: list[Sequence] = []
        self.answers: dict[str, tuple[tuple[int, ...], str]] = {}
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.now = 0.0

    @rule(
        prompt_length=st.integers(1, 23),
        prompt=st.sampled_from([None, 1, 2]),
        salt=st.sampled_from(["", "", "ours"]),
        max_tokens=st.integers(1, 12),
        seconds=st.one_of(st.none(), st.integers(1, 20)),
        sampling=st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0, 1]),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.sampled_from([[], [7], [*range(0, 97, 5)]]),
                "min_tokens": st.integers(0, 3),
            }
        ),
    )
    def add(
        self,
        prompt_length: int,
        prompt: int | None,
        salt: str,
        max_tokens: int,
        seconds: int | None,
        sampling: dict[str, Any],
    ) -> None:
        limit = self.scheduler.max_num_tokens
        sampling["min_tokens"] = min(sampling["min_tokens"], max_tokens)
        prompt_length = min(prompt_length, limit - 1)
        sequence = make_sequence(
            f"{len(self.sequences)}",
            prompt_length,
            min(max_tokens, limit - prompt_length),
            deadline=None if seconds is None else self.now + seconds,
            prompt=prompt,
            **sampling,
        )
        sequence.cache_salt = salt
        self.sequences.append(sequence)
        self.answers[sequence.generation_id] = answer(sequence, self.runner.sliding_window)
        self.chunks[sequence.generation_id] = []
        self.scheduler.add(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        was_open = sequence.status is not Status.FINISHED
        chunk = self.scheduler.abort(sequence.generation_id)
        assert (chunk is not None) == was_open
        self.receive([chunk] if chunk else [])

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.receive(self.scheduler.expire(self.now))
        late = [s for s in self.scheduler.waiting if s.deadline and s.deadline <= self.now]
        assert late == []

    @rule()
    def fail(self) -> None:
        """Rare, or nothing would ever end by itself: only with everybody running."""
        if len(self.scheduler.running) == self.scheduler.max_num_seqs:
            self.receive(self.scheduler.finish_all("error", "broken"))
            assert not self.scheduler.has_work

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.scheduler.has_work or self.out:
                self.step()
                self.pages_and_queues_are_whole()

    def step(self) -> None:
        scheduler = self.scheduler
        before = {s: s.num_computed_tokens for s in self.sequences}
        running, has_cache = {*scheduler.running}, scheduler.prefix_cache is not None
        pools = (scheduler.full, scheduler.window)
        # One that is nobody's may go, and hold the same again.
        found = [
            [pool.key(page) if pool.num_owners(page) else None for page in range(pool.num_pages)]
            for pool in pools
        ]
        step = scheduler.schedule()
        assert sum(item.num_slots for item in step.items) <= scheduler.max_num_batched_tokens
        assert len(step.items) <= len(scheduler.running) <= scheduler.max_num_seqs
        served = [item.sequence for item in step.items]
        assert not scheduler.running or scheduler.running[0] in served, "the oldest advances"
        for item in step.items:
            assert item.sequence.status is Status.RUNNING
            assert item.seat == item.sequence.seat
            if item.sequence in running:
                assert item.first == before[item.sequence]
            else:
                assert item.first % scheduler.full.page_size == 0
                assert has_cache or item.first == 0
            self.writes_to_no_page_that_is_found(item, found)
            assert item.sequence.num_computed_tokens > item.first
        assert all(s in scheduler.waiting and s.num_computed_tokens == 0 for s in step.preempted)
        is_prefill = [not item.is_decode for item in step.items]
        assert is_prefill == sorted(is_prefill), "decodes first"
        for group in (is_prefill.index(True) if True in is_prefill else len(served),):
            assert in_order(self.sequences, served[:group])
            assert in_order(self.sequences, served[group:])
        if step.items:
            self.out.append((step, self.runner.launch(step)))
        self.pages_and_queues_are_whole()
        if len(self.out) > self.num_out or not step.items:
            self.update()

    def writes_to_no_page_that_is_found(
        self, item: ScheduledItem, found: list[list[bytes | None]]
    ) -> None:
        """found: the keys that owned pages of each group had before the step."""
        scheduler, tables = self.scheduler, item.sequence.page_tables
        pools = (scheduler.full, tables.full), (scheduler.window, tables.window)
        written = range(item.first, item.first + item.num_slots)
        for (pool, table), keys in zip(pools, found, strict=True):
            for page in {table[position // pool.page_size] for position in written}:
                assert pool.num_owners(page) == 1 or pool.key(page) not in keys
                assert pool.key(page) is None or keys[page] != pool.key(page)

    def update(self) -> None:
        step, launched = self.out.popleft()
        output = launched.result()
        open_ = [item.sequence for item in step.items if item.sequence.status != Status.FINISHED]
        chunks = self.scheduler.update(step, output)
        due = [item.sequence.generation_id for item in step.items if item.is_sampled]
        told = [chunk.generation_id for chunk in chunks]
        assert told == [s.generation_id for s in open_ if s.generation_id in due]
        self.receive(chunks)

    def receive(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            earlier = self.chunks[chunk.generation_id]
            assert not any(c.finish_reason for c in earlier), "nothing follows the final chunk"
            earlier.append(chunk)
            tokens, reason = self.answers[chunk.generation_id]
            got = tokens_of(earlier)
            assert got == tokens[: len(got)]
            if chunk.finish_reason in ("stop", "length"):
                assert (got, chunk.finish_reason) == (tokens, reason)

    @invariant()
    def pages_and_queues_are_whole(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        places = {Status.WAITING: scheduler.waiting, Status.RUNNING: scheduler.running}
        still_open = [*scheduler.running, *scheduler.waiting]
        assert in_order(self.sequences, still_open), "first come, first served"
        for sequence in self.sequences:
            for status, place in places.items():
                assert sum(s is sequence for s in place) == (sequence.status is status)
            is_finished = sequence.status is Status.FINISHED
            assert (sequence.generation_id in scheduler) != is_finished
            finals = [c for c in self.chunks[sequence.generation_id] if c.finish_reason]
            assert len(finals) == is_finished
            if sequence.status is not Status.RUNNING:
                assert not sequence.page_tables.full
                assert not sequence.page_tables.window
                assert sequence.seat == NO_SEAT
        seats = [s.seat for s in scheduler.running]
        assert sorted(seats + scheduler._free_seats) == [*range(scheduler.max_num_seqs)]
        assert scheduler.num_waiting_tokens == sum(len(s.token_ids) for s in scheduler.waiting)
        for pool, group in ((scheduler.full, "full"), (scheduler.window, "window")):
            owned = Counter(
                page for s in still_open for page in getattr(s.page_tables, group) if page != GONE
            )
            assert len(owned) == pool.num_used
            assert all(pool.num_owners(page) == count for page, count in owned.items())
            assert all(pool.key(page) is not None for page, count in owned.items() if count > 1)
        for sequence in self.sequences:
            for number, key in enumerate(sequence.page_keys, start=1):
                held = sequence.token_ids[: number * scheduler.full.page_size]
                same = (sequence.cache_salt, *held)
                assert self.contents.setdefault(key, same) == same

    def teardown(self) -> None:
        """No starvation: each step gives the oldest at least one of all its tokens."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(
            s.num_prompt_tokens + s.max_tokens
            for s in self.sequences
            if s.status is not Status.FINISHED
        )
        for _ in range(bound + 2 * self.num_out):
            if not self.scheduler.has_work and not self.out:
                break
            self.step()
            self.pages_and_queues_are_whole()
        assert not self.scheduler.has_work
        assert not self.out
        assert self.scheduler.full.num_used == self.scheduler.window.num_used == 0


def in_order(everybody: list[Sequence], some: list[Sequence]) -> bool:
    """Whether `some` stand in the order in which everybody arrived."""
    arrivals: Iterator[Sequence] = iter(everybody)
    return all(any(sequence is arrival for arrival in arrivals) for sequence in some)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
