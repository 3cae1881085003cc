import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine, EngineLoop
from gptoss_engine.runner import load_runner
from gptoss_engine.sequence import ScheduledStep, Sequence
from gptoss_engine.types import GenerationRequest, InvalidRequest, TokenChunk, Unavailable

from ..tiny_checkpoint import TinyCheckpoint
from .fakes import (
    SECONDS,
    Client,
    Clock,
    FakeRunner,
    GuessingDecoder,
    answer,
    fake_engine,
    request,
)

MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["plain", "overlapped"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """fake_engine, whose steps run one after another, or each is scheduled while one runs."""

    def make(runner: FakeRunner | None = None, **config: object) -> Engine:
        runner = runner or FakeRunner()
        runner.is_asynchronous = request.param == "overlapped"
        engine = fake_engine(runner, **config)
        assert engine.is_overlapped == runner.is_asynchronous
        return engine

    return make


def run_to_end(engine: Engine) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    while engine.has_work:
        chunks += engine.step()
    return chunks


def tokens_of(chunks: list[TokenChunk], generation_id: str) -> tuple[int, ...]:
    return tuple(t for c in chunks if c.generation_id == generation_id for t in c.token_ids)


def clock_of(engine: Engine) -> Clock:
    clock = engine._clock
    assert isinstance(clock, Clock)
    return clock


@pytest.mark.parametrize(
    ("token_ids", "sampling", "sentence"),
    [
        ((), {}, "the prompt (input_ids) must hold at least 1 token, got none"),
        ((5, 97), {}, "input_ids must be in [0, 96], got 97 at index 1"),
        ((-1, 5), {}, "input_ids must be in [0, 96], got -1 at index 0"),
        (
            (5,),
            {"stop_token_ids": [96, 97]},
            "stop_token_ids must be in [0, 96], got 97 at index 1",
        ),
        (
            (5,) * 64,
            {},
            "the prompt (input_ids) must hold at most 63 tokens, so that max_model_len (64) leaves "
            "one to generate, got 64",
        ),
    ],
)
def test_what_can_never_run_is_refused_in_words(
    token_ids: tuple[int, ...], sampling: dict[str, Any], sentence: str
) -> None:
    engine = fake_engine()
    with pytest.raises(InvalidRequest) as refused:
        engine.add(request("a", token_ids, **sampling))
    assert str(refused.value) == sentence
    assert not engine.has_work


def test_a_prompt_that_the_cache_can_never_hold_is_refused() -> None:
    engine = fake_engine(FakeRunner(num_pages=5))
    with pytest.raises(InvalidRequest) as refused:
        engine.add(request("a", (5,) * 20))
    assert str(refused.value) == (
        "the prompt (input_ids) must hold at most 19 tokens, so that the KV cache (20 tokens) can "
        "ever hold it and one generated, got 20"
    )
    engine.add(request("a", (5,) * 19, ignore_eos=True))
    chunks = run_to_end(engine)
    assert (len(tokens_of(chunks, "a")), chunks[-1].finish_reason) == (1, "length")


def test_a_cache_that_holds_nothing_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"num_pages \(1\) of page_size 1 hold 1 tokens"):
        fake_engine(FakeRunner(page_size=1, num_pages=1))


def test_an_open_generation_id_is_refused_and_a_finished_one_is_free(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(request("a"))
    with pytest.raises(InvalidRequest, match="generation_id must be unique, got 'a'"):
        engine.add(request("a"))
    run_to_end(engine)
    engine.add(request("a"))


@pytest.mark.parametrize(
    ("given", "default", "resolved"),
    [(5, 0, 5), (5, 9, 5), (None, 9, 9), (None, 0, 61), (None, 99, 61), (1000, 9, 61)],
)
def test_max_tokens_is_the_requests_the_default_or_what_the_context_leaves(
    make_engine: MakeEngine, given: int | None, default: int, resolved: int
) -> None:
    engine = make_engine(default_max_tokens=default)
    sequence = engine.prepare(request("a", max_tokens=given, ignore_eos=True))
    assert sequence.max_tokens == resolved
    engine.admit(sequence)
    chunks = run_to_end(engine)
    assert (len(tokens_of(chunks, "a")), chunks[-1].finish_reason) == (resolved, "length")


def test_a_seed_is_drawn_unless_given() -> None:
    engine = fake_engine()
    assert engine.prepare(request("a", seed=7)).seed == 7
    drawn = {engine.prepare(request("a", seed=None)).seed for _ in range(4)}
    assert len(drawn) == 4
    assert all(0 <= seed < 2**64 for seed in drawn)


def test_the_checkpoints_end_tokens_stop_unless_ignored() -> None:
    engine = fake_engine()
    eos = engine.runner.model_config.eos_token_ids
    assert engine.prepare(request("a")).stop_token_ids == eos
    assert engine.prepare(request("a", ignore_eos=True)).stop_token_ids == frozenset()


def test_min_tokens_holds_the_end_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    everything = [*range(90)]
    engine.add(request("a", stop_token_ids=everything, min_tokens=0))
    engine.add(request("b", stop_token_ids=everything, min_tokens=6))
    chunks = run_to_end(engine)
    assert len(tokens_of(chunks, "a")) == 1
    assert len(tokens_of(chunks, "b")) >= 7


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("num_pages", [9, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [4, 7, 200])
def test_an_answer_does_not_depend_on_company_chunks_or_preemption(
    make_engine: MakeEngine, temperature: int, num_pages: int, max_num_batched_tokens: int
) -> None:
    engine = make_engine(
        FakeRunner(num_pages=num_pages, sliding_window=6),
        max_num_batched_tokens=max_num_batched_tokens,
    )
    draw = random.Random(0)
    expected: dict[str, tuple[int, ...]] = {}
    for index in range(12):
        prompt = tuple(draw.choices(range(97), k=draw.randint(1, 20)))
        sequence = engine.prepare(
            request(f"{index}", prompt, temperature=temperature, seed=index, max_tokens=16)
        )
        expected[f"{index}"], _ = answer(sequence, 6)
        engine.admit(sequence)
    chunks = run_to_end(engine)
    assert {name: tokens_of(chunks, name) for name in expected} == expected
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_pages == 9)
    assert (stats.num_used_pages, stats.num_used_window_pages) == (0, 0)


@st.composite
def loads(draw: st.DrawFn) -> list[list[GenerationRequest]]:
    """What arrives before each step."""
    arrivals: list[list[GenerationRequest]] = []
    for number in range(draw(st.integers(1, 10))):
        prompt = tuple((number * 31 + i * 7) % 89 for i in range(draw(st.integers(1, 12))))
        max_tokens = draw(st.integers(1, 12))
        sampling = {
            "max_tokens": max_tokens,
            "min_tokens": draw(st.integers(0, max_tokens)),
            "temperature": draw(st.sampled_from([0, 1])),
            "logprobs": draw(st.sampled_from([None, 0])),
            "ignore_eos": True,
        }
        one = request(str(number), prompt, seed=number, **sampling)
        arrivals += [[]] * draw(st.integers(0, 3))
        arrivals += [[one]]
    return arrivals


def with_stop_tokens(load: list[list[GenerationRequest]]) -> list[list[GenerationRequest]]:
    stop = tuple(range(0, 97, 6))
    return [
        [replace(one, sampling=replace(one.sampling, stop_token_ids=stop)) for one in arriving]
        for arriving in load
    ]


@given(
    load=loads(),
    page_size=st.integers(1, 4),
    sliding_window=st.integers(1, 6),
    num_pages=st.integers(24, 40),
    extra_window_pages=st.integers(0, 30),
    max_num_seqs=st.integers(1, 4),
    extra_budget=st.integers(0, 8),
)
def test_the_overlapped_loop_is_the_plain_one(
    load: list[list[GenerationRequest]],
    page_size: int,
    sliding_window: int,
    num_pages: int,
    extra_window_pages: int,
    max_num_seqs: int,
    extra_budget: int,
) -> None:
    """Token for token; and step for step, unless a token ends an answer by what it is."""

    def run(load: list[list[GenerationRequest]], *, is_asynchronous: bool) -> tuple[Any, Any]:
        steps: list[list[tuple[str, int, int]]] = []
        runner = FakeRunner(
            page_size=page_size,
            num_pages=num_pages // page_size,
            num_window_pages=(sliding_window - 2) // page_size + 2 + extra_window_pages,
            sliding_window=sliding_window,
            is_asynchronous=is_asynchronous,
            on_launch=lambda step: steps.append(
                [(item.sequence.generation_id, item.first, item.num_slots) for item in step.items]
            ),
        )
        engine = fake_engine(
            runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra_budget
        )
        assert engine.is_overlapped == is_asynchronous
        chunks: dict[str, list[TokenChunk]] = {}
        for arriving in load:
            for one in arriving:
                engine.add(one)
            for chunk in engine.step():
                chunks.setdefault(chunk.generation_id, []).append(chunk)
        while engine.has_work:
            for chunk in engine.step():
                chunks.setdefault(chunk.generation_id, []).append(chunk)
        stats = engine.stats()
        assert (stats.num_used_pages, stats.num_used_window_pages) == (0, 0)
        return (chunks, stats), steps

    assert run(load, is_asynchronous=True) == run(load, is_asynchronous=False)
    load = with_stop_tokens(load)
    (overlapped, stats), _ = run(load, is_asynchronous=True)
    (plain, plain_stats), _ = run(load, is_asynchronous=False)
    assert overlapped == plain
    assert stats.num_finished == plain_stats.num_finished
    assert stats.num_generated_tokens == plain_stats.num_generated_tokens


def test_a_step_is_launched_while_one_runs_whose_tokens_wait_for_no_other() -> None:
    events: list[str] = []
    runner = FakeRunner(
        is_asynchronous=True,
        on_launch=lambda _: events.append("launch"),
        on_result=lambda _: events.append("result"),
    )
    engine = fake_engine(runner)
    engine.add(request("a", max_tokens=3, ignore_eos=True))
    while engine.has_work:
        events += ["token" for _ in engine.step()]
    assert events == [
        *("launch",),
        *("launch", "result", "token"),
        *("launch", "result", "token"),
        *("result", "token"),
    ]


def test_a_token_is_heard_while_the_next_step_runs() -> None:
    gate = Gate()
    with running(fake_engine(FakeRunner(is_asynchronous=True, on_run=gate))) as loop:
        client = submit(loop, "a", max_tokens=3, ignore_eos=True)
        for num_heard in range(3):
            gate.wait()
            assert not client.has_more
            gate.let()
            assert client.next().token_ids
            assert len(client.token_ids) == num_heard + 1


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("overlap", ["auto", "on", "off"])
def test_the_loop_is_overlapped_where_a_runner_is_asynchronous_unless_chosen(
    overlap: str, is_asynchronous: bool
) -> None:
    runner = FakeRunner(is_asynchronous=is_asynchronous)
    engine = fake_engine(runner, overlap=overlap)
    assert engine.is_overlapped == {"auto": is_asynchronous, "on": True, "off": False}[overlap]
    engine.add(request("a", max_tokens=9))
    expected, _ = answer(engine.prepare(request("a", max_tokens=9)), runner.sliding_window)
    assert tokens_of(run_to_end(engine), "a") == expected


def test_a_decoder_that_guesses_gets_the_plain_loop() -> None:
    runner = FakeRunner(is_asynchronous=True)
    config = EngineConfig(page_size=4, overlap="on")
    engine = Engine(config, runner, decoder=GuessingDecoder(runner.sliding_window))
    assert not engine.is_overlapped
    engine.add(request("a", max_tokens=20, ignore_eos=True))
    chunks = run_to_end(engine)
    sequence = engine.prepare(request("a", max_tokens=20, ignore_eos=True))
    assert tokens_of(chunks, "a") == answer(sequence, runner.sliding_window)[0]
    assert len(chunks) < 20


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and lose much to waiting for it."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model_engine_config(tiny_checkpoint: TinyCheckpoint) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_checkpoint.huggingface),
        device="cpu",
        dtype="float32",
        page_size=16,
        max_model_len=320,
        max_num_seqs=6,
        num_pages=100,
        num_window_pages=160,
    )


def model_requests() -> list[GenerationRequest]:
    """Greedy and drawn answers, to prompts on both sides of the window's 128 tokens."""
    draw = random.Random(0)
    return [
        request(
            f"{length} tokens at temperature {temperature}",
            tuple(draw.choices(range(512), k=length)),
            temperature=temperature,
            seed=length,
            max_tokens=24,
            ignore_eos=True,
        )
        for length in (1, 15, 127, 130, 64, 200)
        for temperature in (0, 1)
    ]


@pytest.fixture(scope="module")
def model_answers(
    model_engine_config: EngineConfig, one_thread: None
) -> dict[str, tuple[int, ...]]:
    """Each answer by an engine of its own, its prompt in one piece."""
    runner = load_runner(model_engine_config)
    answers = {}
    for one in model_requests():
        engine = Engine(model_engine_config, runner)
        engine.add(one)
        answers[one.generation_id] = tokens_of(run_to_end(engine), one.generation_id)
    assert {len(token_ids) for token_ids in answers.values()} == {24}
    assert len(set(answers.values())) == len(answers)
    return answers


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "overlap"), [(2048, "off"), (48, "off"), (48, "on")]
)
@pytest.mark.parametrize("num_pages", [100, 18])
def test_the_models_answers_do_not_depend_on_company_chunks_or_preemption(
    model_engine_config: EngineConfig,
    model_answers: dict[str, tuple[int, ...]],
    num_pages: int,
    max_num_batched_tokens: int,
    overlap: Literal["on", "off"],
) -> None:
    """The reference model, in fp32."""
    config = replace(
        model_engine_config,
        num_pages=num_pages,
        max_num_batched_tokens=max_num_batched_tokens,
        overlap=overlap,
    )
    engine = Engine(config, load_runner(config))
    for one in model_requests():
        engine.add(one)
    chunks = run_to_end(engine)
    assert {name: tokens_of(chunks, name) for name in model_answers} == model_answers
    assert (engine.stats().num_preemptions > 0) == (num_pages == 18)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_logits_that_are_not_numbers_end_their_own_generation_alone(
    model_engine_config: EngineConfig,
    model_answers: dict[str, tuple[int, ...]],
    overlap: Literal["on", "off"],
) -> None:
    requests = model_requests()
    used = {*chain(*model_answers.values(), *(one.token_ids for one in requests))}
    wrong = min({*range(512)} - used)
    runner = load_runner(replace(model_engine_config, overlap=overlap))
    runner._model.weights.embedding[wrong] = torch.nan
    engine = Engine(
        replace(model_engine_config, overlap=overlap, max_num_batched_tokens=48), runner
    )
    for number in range(3):
        engine.add(request(f"wrong {number}", (*range(60), wrong), max_tokens=9))
    for one in requests:
        engine.add(one)
    chunks = run_to_end(engine)
    assert {name: tokens_of(chunks, name) for name in model_answers} == model_answers
    ends = [chunk for chunk in chunks if chunk.generation_id.startswith("wrong")]
    sentence = "the model's logits behind 61 tokens are not numbers"
    assert [(end.finish_reason, end.error, end.token_ids) for end in ends] == [
        ("error", sentence, ())
    ] * 3
    assert not engine.is_broken
    assert engine.stats().num_used_pages == engine.stats().num_used_window_pages == 0


@pytest.mark.parametrize("num_pages", [100, 18])
def test_the_models_answers_do_not_depend_on_guesses(
    model_engine_config: EngineConfig, model_answers: dict[str, tuple[int, ...]], num_pages: int
) -> None:
    """Several tokens a step, greedy and drawn, with one guess in five wrong."""

    class Remembering(GuessingDecoder):
        def propose(self, sequence: Sequence) -> tuple[int, ...]:
            at = sequence.num_output_tokens
            known = model_answers[sequence.generation_id][at : at + self.length]
            return tuple(
                token_id + 1 if index % 5 == 4 else token_id
                for index, token_id in enumerate(known, start=at)
            )

    config = replace(model_engine_config, num_pages=num_pages)
    engine = Engine(config, load_runner(config), decoder=Remembering(sliding_window=128))
    for one in model_requests():
        engine.add(one)
    chunks = run_to_end(engine)
    assert {name: tokens_of(chunks, name) for name in model_answers} == model_answers
    assert len(chunks) < len(model_answers) * 24 / 2


def test_a_request_without_a_deadline_gets_the_default_one() -> None:
    engine = fake_engine(default_timeout_seconds=5, max_num_seqs=1)
    engine.add(request("default", max_tokens=50, ignore_eos=True))
    engine.add(request("longer", deadline=110.0))
    engine.add(request("late", deadline=99.0))
    chunks = engine.step()
    assert [(c.generation_id, c.finish_reason) for c in chunks] == [
        ("late", "abort"),
        ("default", None),
    ]
    clock_of(engine).now += 5
    chunks = engine.step()
    assert (chunks[0].generation_id, chunks[0].finish_reason) == ("default", "abort")
    assert "the deadline, 5.000 s after the request's arrival, has passed" in chunks[0].error
    assert chunks[1].generation_id == "longer"


def test_deadlines_alone_need_no_forward_pass(make_engine: MakeEngine) -> None:
    runner = FakeRunner(on_run=lambda step: pytest.fail("nothing was left to run"))
    engine = make_engine(runner)
    engine.add(request("a", deadline=100.0))
    assert [chunk.finish_reason for chunk in engine.step()] == ["abort"]
    assert engine.step() == []


def test_a_failed_step_ends_everybody_and_the_engine() -> None:
    def fail_at_a_decode(step: ScheduledStep) -> None:
        if step.items[0].sequence.num_output_tokens:
            raise RuntimeError("the device is gone")

    engine = fake_engine(FakeRunner(on_run=fail_at_a_decode), max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        engine.add(request(name, (1,) * (2 if name == "decoding" else 20), max_tokens=9))
    engine.add(request("late", deadline=101.0))
    assert not engine.is_broken
    engine.step()
    clock_of(engine).now += 1
    chunks = engine.step()
    sentence = "the engine failed: RuntimeError: the device is gone"
    assert [(c.generation_id, c.finish_reason, c.token_ids) for c in chunks] == [
        ("late", "abort", ()),
        ("decoding", "error", ()),
        ("prefilling", "error", ()),
        ("waiting", "error", ()),
    ]
    assert {chunk.error for chunk in chunks[1:]} == {sentence}
    assert engine.is_broken
    assert engine.step() == []
    with pytest.raises(Unavailable, match=sentence):
        engine.add(request("next"))
    stats = engine.stats()
    assert (stats.num_used_pages, stats.num_used_window_pages, stats.num_running) == (0, 0, 0)
    assert stats.num_finished == {"abort": 1, "error": 3}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("CUDA error: no\nFor debugging\n", "RuntimeError: CUDA error: no"),
        ("", "RuntimeError"),
        ("\n two\nlines", "RuntimeError: two"),
    ],
)
def test_a_failure_is_told_by_its_first_line(
    make_engine: MakeEngine, message: str, told: str
) -> None:
    def fail(step: ScheduledStep) -> None:
        raise RuntimeError(message)

    engine = make_engine(FakeRunner(on_run=fail))
    engine.add(request("a"))
    (chunk,) = run_to_end(engine)
    assert chunk.error == engine.failure == f"the engine failed: {told}"


@pytest.mark.parametrize("fails_at", ["launch", "result"])
def test_a_step_that_fails_while_another_is_out_ends_everybody(fails_at: str) -> None:
    asked: list[int] = []

    def fail(step: ScheduledStep) -> None:
        if step.items[0].num_output_tokens == 2:
            raise RuntimeError("the device is gone")

    runner = FakeRunner(is_asynchronous=True, on_result=lambda _: asked.append(1))
    setattr(runner, {"launch": "on_launch", "result": "on_run"}[fails_at], fail)
    engine = fake_engine(runner, max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        engine.add(request(name, (1,) * (2 if name == "decoding" else 40), max_tokens=9))
    chunks = run_to_end(engine)
    finals = [(c.generation_id, c.finish_reason) for c in chunks if c.finish_reason]
    assert finals == [("decoding", "error"), ("prefilling", "error"), ("waiting", "error")]
    assert chunks[-3:] == [chunk for chunk in chunks if chunk.finish_reason]
    assert len(tokens_of(chunks, "decoding")) == (1 if fails_at == "launch" else 2)
    assert len(asked) == (1 if fails_at == "launch" else 3), "a broken device is asked no more"
    assert (engine.is_broken, engine.has_work, engine.step()) == (True, False, [])
    assert (engine.stats().num_used_pages, engine.stats().num_running) == (0, 0)


def test_a_step_in_vain_is_waited_for_before_the_engine_rests() -> None:
    runner = FakeRunner(is_asynchronous=True)
    engine = fake_engine(runner)
    (stop, *_), _ = answer(engine.prepare(request("a", ignore_eos=True)), runner.sliding_window)
    engine.add(request("a", stop_token_ids=[stop]))
    assert engine.step() == []
    assert [chunk.finish_reason for chunk in engine.step()] == ["stop"]
    stats = engine.stats()
    assert (stats.num_running, stats.num_used_pages, stats.num_used_window_pages) == (0, 0, 0)
    assert (engine.has_work, len(runner.out)) == (True, 1)
    assert engine.step() == []
    assert (engine.has_work, len(runner.out)) == (False, 0)


def test_stop_waits_for_the_step_that_is_out() -> None:
    gate = Gate()
    runner = FakeRunner(is_asynchronous=True, on_run=gate)
    with running(fake_engine(runner)) as loop:
        client = submit(loop, "a", **FOREVER)
        gate.let()
        client.next()
        gate.wait()
        stopper = threading.Thread(target=loop.stop)
        stopper.start()
        refuse_from_now_on(loop)
        gate.let(2)
        stopper.join(SECONDS)
        assert not stopper.is_alive()
        assert client.final().finish_reason == "abort"
        assert not runner.out
        assert not loop.is_broken


def test_a_fault_breaks_an_engine_that_rests_and_ends_what_is_open() -> None:
    closed = threading.Event()
    gate = Gate()
    for is_idle in (True, False):
        runner = FakeRunner(on_run=gate, on_close=closed.set)
        with running(fake_engine(runner)) as loop:
            client = None if is_idle else submit(loop, "a", **FOREVER)
            if not is_idle:
                gate.wait()
            runner.fault = "rank 1 fell off"
            gate.let()
            if client is not None:
                final = client.final()
                assert (final.finish_reason, final.error) == (
                    "error",
                    "the engine failed: rank 1 fell off",
                )
            assert closed.wait(SECONDS)
            assert loop.is_broken
            with pytest.raises(Unavailable, match="rank 1 fell off"):
                submit(loop, "b")
        closed.clear()


def test_a_fault_while_requests_are_admitted_is_what_they_hear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    runner = FakeRunner(on_run=gate)
    engine = fake_engine(runner)
    admit = engine.admit

    def admit_late(sequence: Sequence) -> None:
        if sequence.generation_id == "b":
            runner.fault = "rank 1 fell off"
        admit(sequence)

    monkeypatch.setattr(engine, "admit", admit_late)
    with running(engine) as loop:
        first = submit(loop, "a", **FOREVER)
        gate.wait()
        late = submit(loop, "b")
        gate.let()
        for client in (first, late):
            final = client.final()
            assert (final.finish_reason, final.error) == (
                "error",
                "the engine failed: rank 1 fell off",
            )
            assert not client.has_more
    assert engine.stats().num_running == 0


def test_a_loop_closes_its_runner_behind_the_last_step() -> None:
    events: list[str] = []
    runner = FakeRunner(
        on_run=lambda _: events.append("run"), on_close=lambda: events.append("close")
    )
    with running(fake_engine(runner)) as loop:
        submit(loop, "a", max_tokens=2, ignore_eos=True).final()
        assert "close" not in events
    assert events == ["run", "run", "close"]


def test_stats_say_what_is_going_on() -> None:
    engine = fake_engine(max_num_seqs=1)
    engine.add(request("a", (1, 2, 3, 4, 5), max_tokens=3, ignore_eos=True))
    engine.add(request("b", (1, 2), max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 1, 2)
    assert (stats.num_used_pages, stats.num_pages) == (2, 64)
    assert (stats.num_used_window_pages, stats.num_window_pages) == (2, 64)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (5, 1)
    assert stats.num_finished == {}
    assert engine.abort("b") is not None
    run_to_end(engine)
    later = engine.stats()
    assert (later.num_running, later.num_waiting, later.num_used_pages) == (0, 0, 0)
    assert (later.num_prompt_tokens, later.num_generated_tokens) == (5, 3)
    assert later.num_finished == {"length": 1, "abort": 1}
    assert stats.num_finished == {}, "what was read stays as it was"


class Gate:
    """Holds each step until it is let through, so that a test knows where the loop stands."""

    def __init__(self) -> None:
        self.is_reached = threading.Semaphore(0)
        self.is_open = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self, step: ScheduledStep) -> None:
        self.is_reached.release()
        assert self.is_open.acquire(timeout=SECONDS)
        if self.error:
            raise self.error

    def wait(self) -> None:
        assert self.is_reached.acquire(timeout=SECONDS)

    def let(self, num_steps: int = 1) -> None:
        self.is_open.release(num_steps)


@contextmanager
def running(engine: Engine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    try:
        yield loop
    finally:
        loop.stop()
        assert not loop._thread.is_alive()
        assert loop._open == {}
        stats = loop.stats
        assert (stats.num_waiting, stats.num_running) == (0, 0)
        assert (stats.num_used_pages, stats.num_used_window_pages) == (0, 0)


def submit(loop: EngineLoop, generation_id: str, **sampling: Any) -> Client:
    client = Client()
    loop.submit(request(generation_id, **sampling), client)
    return client


FOREVER: dict[str, Any] = {"max_tokens": 61, "ignore_eos": True}


def test_the_loop_answers_as_the_engine_does(make_engine: MakeEngine) -> None:
    alone = make_engine()
    alone.add(request("a", max_tokens=20))
    expected = run_to_end(alone)
    with running(make_engine()) as loop:
        for name in "ab":
            client = submit(loop, "a", max_tokens=20)
            client.final()
            assert client.chunks == expected, name
            assert not client.has_more


def test_a_refused_request_raises_where_it_was_submitted_and_hears_nothing(
    make_engine: MakeEngine,
) -> None:
    with running(make_engine()) as loop:
        client = Client()
        with pytest.raises(InvalidRequest, match="at least 1 token"):
            loop.submit(request("a", ()), client)
        assert submit(loop, "a", max_tokens=1).final().finish_reason
        assert not client.has_more


def test_an_admission_tells_what_submit_would_raise(make_engine: MakeEngine) -> None:
    with running(make_engine()) as loop:
        client = Client()
        refused = loop.admission(request("a", ()), client)
        assert isinstance(refused.exception(0), InvalidRequest)
        assert loop.admission(request("a", max_tokens=1), client).result(0) is None
        assert client.final().finish_reason == "length"


def test_a_loop_delivers_once_a_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, entered = make_engine(), []
    step, num_steps = engine.step, []

    def counted() -> list[TokenChunk]:
        num_steps.append(1)
        return step()

    @contextmanager
    def delivering() -> Iterator[None]:
        entered.append(1)
        yield

    monkeypatch.setattr(engine, "step", counted)
    loop, client = EngineLoop(engine, delivering), Client()
    loop.submit(request("a", max_tokens=3, ignore_eos=True), client)
    client.final()
    loop.stop()
    # At its end it tells everybody who is left, and everybody who came too late.
    assert len(entered) == len(num_steps) + 2


def test_whoever_begins_launches_where_nothing_runs() -> None:
    launching: list[str] = []
    gate = Gate()
    runner = FakeRunner(
        is_asynchronous=True,
        on_launch=lambda step: launching.append(threading.current_thread().name),
        on_run=gate,
    )
    own = threading.current_thread().name
    with running(fake_engine(runner)) as loop:
        first, second = Client(), Client()
        loop.begin()
        assert launching == [], "nothing was submitted"
        loop.submit(request("a", max_tokens=2, ignore_eos=True), first, begins=True)
        loop.submit(request("b", max_tokens=2, ignore_eos=True), second, begins=True)
        assert launching == []
        loop.begin()
        gate.wait()  # The loop's own thread asks for what was launched.
        assert launching[0] == own
        assert set(launching[1:]) == {"gptoss-engine"}, "the next one, meanwhile"
        third = Client()
        loop.submit(request("c", max_tokens=1), third, begins=True)
        loop.begin()
        gate.let(4)
        for client in (first, second, third):
            assert client.final().finish_reason == "length"
        assert launching.count(own) == 1


def test_a_launch_that_fails_ends_all_whoever_began(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: ScheduledStep) -> None:
        raise RuntimeError("no launch")

    with running(fake_engine(FakeRunner(is_asynchronous=True, on_launch=broken))) as loop:
        client = Client()
        loop.submit(request("a"), client, begins=True)
        loop.begin()
        assert client.final().error == "the engine failed: RuntimeError: no launch"
        assert loop.is_broken

    engine = fake_engine(FakeRunner(is_asynchronous=True))
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    with running(engine) as loop:
        client = Client()
        loop.submit(request("a"), client, begins=True)
        loop.begin()
        assert client.final().error.startswith("the engine loop failed: ZeroDivisionError")


def test_a_loop_says_whenever_it_has_nothing_to_do(make_engine: MakeEngine) -> None:
    idle = threading.Semaphore(0)
    loop = EngineLoop(make_engine(), idle=idle.release)
    for name in "ab":
        assert idle.acquire(timeout=SECONDS)
        assert not idle.acquire(blocking=False)
        submit(loop, name, max_tokens=3).final()
    loop.stop()


def test_an_open_generation_id_is_refused_by_the_loop_too(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        client = submit(loop, "a", max_tokens=1)
        with pytest.raises(InvalidRequest, match="generation_id must be unique, got 'a'"):
            submit(loop, "a")
        gate.let()
        client.final()


def test_abort_ends_a_running_a_waiting_and_a_just_arrived_generation() -> None:
    gate = Gate()
    with running(fake_engine(FakeRunner(on_run=gate), max_num_seqs=1)) as loop:
        active = submit(loop, "running", **FOREVER)
        gate.wait()
        waiting = submit(loop, "waiting", **FOREVER)
        gate.let()
        gate.wait()
        arrived = submit(loop, "arrived", **FOREVER)
        last = submit(loop, "last", max_tokens=1)
        for name in ("running", "waiting", "arrived", "running", "unknown"):
            loop.abort(name, "the client left")
        gate.let(2)
        for client, num_tokens in ((active, 2), (waiting, 0), (arrived, 0)):
            final = client.final()
            assert (final.finish_reason, final.error) == ("abort", "the client left")
            assert (len(client.token_ids), client.has_more) == (num_tokens, False)
        assert last.final().finish_reason == "length"


def test_a_reader_of_the_tokens_can_end_a_generation_as_stopped(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        client = submit(loop, "a", **FOREVER)
        gate.wait()
        loop.abort("a", reason="stop")
        gate.let(2)
        assert (client.final().finish_reason, client.has_more) == ("stop", False)
        assert loop.stats.num_finished == {"stop": 1}


def test_an_abort_that_comes_too_late_changes_nothing(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        client = submit(loop, "a", max_tokens=1)
        gate.wait()
        loop.abort("a")
        gate.let()
        assert client.final().finish_reason == "length"
        loop.abort("a")
        again = submit(loop, "a", max_tokens=1)
        gate.let()
        assert again.final().finish_reason == "length"
        assert not client.has_more


def test_the_queues_limits_refuse_with_unavailable() -> None:
    gate = Gate()
    engine = fake_engine(
        FakeRunner(on_run=gate), max_num_seqs=1, max_waiting_requests=2, max_waiting_tokens=9
    )
    with running(engine) as loop:
        clients = [submit(loop, "a", max_tokens=2, ignore_eos=True)]
        gate.let()
        clients[0].next()
        gate.wait()
        gate.wait()
        clients += [submit(loop, name, max_tokens=1) for name in "bc"]
        with pytest.raises(Unavailable, match=r"as many as max_waiting_requests \(2\) allows"):
            submit(loop, "d")
        gate.let()
        gate.wait()
        with pytest.raises(Unavailable, match=r"4 more would exceed max_waiting_tokens \(9\)"):
            loop.submit(request("d", (1, 2, 3, 4)), Client())
        clients.append(submit(loop, "d", max_tokens=1))
        gate.let(3)
        assert [client.final().finish_reason for client in clients] == ["length"] * 4


def test_one_long_prompt_may_wait_whatever_the_token_limit(make_engine: MakeEngine) -> None:
    with running(make_engine(max_waiting_tokens=2, max_waiting_requests=0)) as loop:
        assert submit(loop, "a", max_tokens=1).final().finish_reason == "length"


def test_who_finds_a_free_place_is_taken_whatever_the_limits(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(
        FakeRunner(on_run=gate), max_num_seqs=4, max_waiting_requests=0, max_waiting_tokens=5
    )
    with running(engine) as loop:
        clients = [submit(loop, "a", max_tokens=1)]
        gate.wait()
        for name in "bcd":
            clients.append(Client())
            loop.submit(request(name, (1, 2, 3), max_tokens=1), clients[-1])
        with pytest.raises(Unavailable):
            submit(loop, "e")
        gate.let(3)
        assert [client.final().finish_reason for client in clients] == ["length"] * 4


def test_a_place_is_free_before_its_last_chunk_is_heard(make_engine: MakeEngine) -> None:
    with running(make_engine(max_num_seqs=1, max_waiting_requests=0)) as loop:
        again: queue.SimpleQueue[Client] = queue.SimpleQueue()
        loop.submit(
            request("a", max_tokens=1), lambda _: again.put(submit(loop, "b", max_tokens=1))
        )
        assert again.get(timeout=SECONDS).final().finish_reason == "length"


def test_the_deadline_of_a_waiting_request_fires(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(FakeRunner(on_run=gate), max_num_seqs=1)
    with running(engine) as loop:
        active = submit(loop, "a", max_tokens=2, ignore_eos=True)
        gate.wait()
        waiting = Client()
        loop.submit(request("b", deadline=105.0), waiting)
        clock_of(engine).now = 105.0
        gate.let(2)
        assert waiting.final().finish_reason == "abort"
        assert "the deadline, 5.000 s" in waiting.chunks[-1].error
        assert active.final().finish_reason == "length"


def test_drain_lets_the_open_ones_end_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate), max_num_seqs=1)) as loop:
        clients = [submit(loop, name, max_tokens=2, ignore_eos=True) for name in "ab"]
        gate.wait()
        drained: queue.SimpleQueue[bool] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: drained.put(loop.drain(SECONDS)))
        thread.start()
        refuse_from_now_on(loop)
        with pytest.raises(Unavailable, match="draining"):
            submit(loop, "c")
        gate.let(4)
        assert drained.get(timeout=SECONDS)
        thread.join()
        for client in clients:
            assert client.has_more, "all is delivered before drain returns"
            assert client.final().finish_reason == "length"
            assert len(client.token_ids) == 2


def refuse_from_now_on(loop: EngineLoop) -> None:
    """Wait until the loop's door is shut."""
    with loop._condition:
        loop._condition.wait_for(lambda: loop._refusal, SECONDS)


def test_a_generation_is_open_until_its_final_chunk_is_delivered(make_engine: MakeEngine) -> None:
    is_told, may_go_on = threading.Event(), threading.Event()

    def on_chunk(chunk: TokenChunk) -> None:
        is_told.set()
        assert may_go_on.wait(SECONDS)

    with running(make_engine()) as loop:
        loop.submit(request("a", max_tokens=1), on_chunk)
        assert is_told.wait(SECONDS)
        with pytest.raises(InvalidRequest, match="still open"):
            submit(loop, "a")
        may_go_on.set()
        assert loop.drain(SECONDS)


def test_drain_cuts_at_its_limit(make_engine: MakeEngine) -> None:
    with running(make_engine(FakeRunner(max_model_len=8000, num_pages=2000))) as loop:
        client = submit(loop, "a", max_tokens=7000, ignore_eos=True)
        client.next()
        assert not loop.drain(0.0)
        assert loop.drain(0.0), "nothing is open any more"
        assert client.final().finish_reason == "abort"
        assert client.chunks[-1].error == (
            "the engine is shutting down and waited 0 s for this generation"
        )


def test_stop_ends_what_is_open_and_what_only_just_arrived() -> None:
    gate = Gate()
    with running(fake_engine(FakeRunner(on_run=gate), max_num_seqs=1)) as loop:
        clients = [submit(loop, "a", **FOREVER)]
        gate.wait()
        clients += [submit(loop, name, **FOREVER) for name in "bc"]
        stopper = threading.Thread(target=loop.stop)
        stopper.start()
        refuse_from_now_on(loop)
        gate.let()
        stopper.join()
        for client in clients:
            assert client.final().finish_reason == "abort"
            assert client.chunks[-1].error == "the engine is stopped"
            assert client.chunks[-1].num_prompt_tokens == 3
            assert not client.has_more
        with pytest.raises(Unavailable, match="stopped"):
            submit(loop, "d")
        assert not loop.is_broken


def test_drain_says_that_stop_has_cut_somebody(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        client = submit(loop, "a", **FOREVER)
        gate.wait()
        drained: queue.SimpleQueue[bool] = queue.SimpleQueue()
        drainer = threading.Thread(target=lambda: drained.put(loop.drain(SECONDS)))
        drainer.start()
        refuse_from_now_on(loop)
        stopper = threading.Thread(target=loop.stop)
        stopper.start()
        with loop._condition:
            loop._condition.wait_for(lambda: loop._is_stopping, SECONDS)
        gate.let(2)
        stopper.join()
        assert client.final().finish_reason == "abort"
        assert not drained.get(timeout=SECONDS)
        drainer.join()


def test_a_broken_engine_tells_everybody_and_takes_nobody(make_engine: MakeEngine) -> None:
    gate = Gate()
    gate.error = RuntimeError("the device is gone")
    with running(make_engine(FakeRunner(on_run=gate), max_num_seqs=1)) as loop:
        clients = [submit(loop, "a")]
        gate.wait()
        clients += [submit(loop, name) for name in "bc"]
        assert not loop.is_broken
        gate.let()
        for client in clients:
            final = client.final()
            assert final.finish_reason == "error"
            assert final.error == "the engine failed: RuntimeError: the device is gone"
            assert final.num_prompt_tokens == 3
            assert not client.has_more
        assert loop.is_broken
        with pytest.raises(Unavailable, match="the device is gone"):
            submit(loop, "d")
        assert loop.drain(SECONDS)


def test_a_bug_of_our_own_is_a_broken_engine_too(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
    with running(engine) as loop:
        final = submit(loop, "a").final()
        assert (final.finish_reason, loop.is_broken) == ("error", True)
        assert "ZeroDivisionError" in final.error


def test_even_a_loop_that_dies_says_so_to_everybody(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    engine = make_engine(FakeRunner(on_run=gate))
    loop = EngineLoop(engine)
    client = submit(loop, "a", **FOREVER)
    gate.wait()
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    gate.let()
    assert client.final().finish_reason == "error"
    assert loop.is_broken
    loop.stop()


def test_a_callback_that_raises_costs_only_its_own_generation(make_engine: MakeEngine) -> None:
    class Bad(Client):
        def __call__(self, chunk: TokenChunk) -> None:
            super().__call__(chunk)
            raise RuntimeError("not my day")

    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        good = submit(loop, "good", max_tokens=4, ignore_eos=True)
        bad = Bad()
        loop.submit(request("bad", **FOREVER), bad)
        gate.let(6)
        assert good.final().finish_reason == "length"
        bad.next()
        assert not bad.has_more
        assert loop.drain(SECONDS)


def test_stats_count_who_has_only_just_arrived(make_engine: MakeEngine) -> None:
    gate = Gate()
    with running(make_engine(FakeRunner(on_run=gate))) as loop:
        clients = [submit(loop, "a", max_tokens=1)]
        gate.wait()
        clients += [submit(loop, name, max_tokens=1) for name in "bc"]
        waiting_in_engine = loop._stats.num_waiting
        assert loop.stats.num_waiting == waiting_in_engine + 2
        gate.let(3)
        for client in clients:
            client.final()
        assert loop.drain(SECONDS)
        assert loop.stats.num_waiting == 0
        assert loop.stats.num_finished == {"length": 3}


@pytest.mark.parametrize("ending", ["drain", "stop", "failure"])
def test_traffic_from_many_threads_ends_exactly_once_each(
    make_engine: MakeEngine, ending: str
) -> None:
    runner = FakeRunner(num_pages=12, num_window_pages=14)
    if ending == "failure":
        runner.on_run = failing_after(150)
    engine = make_engine(runner, max_num_seqs=6, max_num_batched_tokens=12)
    answers: dict[str, tuple[tuple[int, ...], str]] = {}
    clients: dict[str, Client] = {}

    def user(loop: EngineLoop, number: int) -> None:
        draw = random.Random(number)
        for index in range(25):
            name = f"{number}.{index}"
            prompt = tuple(draw.choices(range(97), k=draw.randint(1, 12)))
            one = request(name, prompt, max_tokens=draw.randint(1, 20), seed=index)
            client = Client()
            try:
                loop.submit(one, client)
            except Unavailable:
                return
            answers[name] = answer(engine.prepare(one), runner.sliding_window)
            clients[name] = client
            fate = draw.random()
            if fate < 0.3:
                for _ in range(draw.randint(0, 3)):
                    if client.next().finish_reason:
                        break
                loop.abort(name)
            elif fate < 0.6:
                client.final()

    with running(engine) as loop:
        users = [threading.Thread(target=user, args=(loop, number)) for number in range(6)]
        for thread in users:
            thread.start()
        if ending == "stop":
            loop.stop()
        for thread in users:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert loop.drain(SECONDS)

    for name, client in clients.items():
        if not (client.chunks and client.chunks[-1].finish_reason):
            client.final()
        assert not client.has_more
        assert [bool(c.finish_reason) for c in client.chunks[:-1]] == [False] * (
            len(client.chunks) - 1
        )
        tokens, reason = answers[name]
        assert client.token_ids == tokens[: len(client.token_ids)]
        if client.chunks[-1].finish_reason in ("stop", "length"):
            assert (client.token_ids, client.chunks[-1].finish_reason) == (tokens, reason)
    if ending == "drain":
        assert len(clients) == 150


def failing_after(num_steps: int) -> Callable[[ScheduledStep], None]:
    left = iter(range(num_steps))

    def on_run(step: ScheduledStep) -> None:
        if next(left, None) is None:
            raise RuntimeError("the device is gone")

    return on_run
