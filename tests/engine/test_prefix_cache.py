import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptoss_engine.config import EngineConfig
from gptoss_engine.engine import Engine
from gptoss_engine.page_pool import PagePool
from gptoss_engine.prefix_cache import PageKeys, PrefixCache
from gptoss_engine.runner import load_runner
from gptoss_engine.sequence import ScheduledStep
from gptoss_engine.types import GenerationRequest, TokenChunk

from ..tiny_checkpoint import TinyCheckpoint
from .fakes import FakeRunner, answer, fake_engine, request
from .stepping import sequence

PAGE = 4


def test_a_key_is_of_all_tokens_up_to_its_pages_end() -> None:
    keys = PageKeys(page_size=PAGE)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]

    def of(token_ids: list[int], salt: str = "") -> list[bytes]:
        found: list[bytes] = []
        keys.extend(found, token_ids, salt)
        return found

    assert len(of(tokens)) == 2, "one a whole page"
    assert of(tokens) == of(tokens[:8]) == of(tokens + tokens)[:2]
    by_steps: list[bytes] = []
    for end in range(len(tokens)):
        keys.extend(by_steps, tokens[:end])
    assert by_steps == of(tokens)
    for index in range(8):
        other = [*tokens]
        other[index] += 1
        assert [a == b for a, b in zip(of(tokens), of(other), strict=True)] == [index >= 4, False]
    assert not {*of(tokens)} & {*of(tokens, "ours")}
    assert of([1] * 8)[0] != of([1] * 8)[1]
    elsewhere: list[bytes] = []
    PageKeys(page_size=PAGE).extend(elsewhere, tokens)
    assert not {*of(tokens)} & {*elsewhere}, "another engine's keys are others"


@given(
    full=st.lists(st.booleans(), min_size=6, max_size=6),
    window=st.lists(st.booleans(), min_size=6, max_size=6),
    num_tokens=st.integers(1, 27),
    sliding_window=st.integers(1, 14),
)
def test_a_hit_is_the_longest_whose_next_query_sees_all_it_needs(
    full: list[bool], window: list[bool], num_tokens: int, sliding_window: int
) -> None:
    pools = PagePool(6, PAGE), PagePool(6, PAGE)
    cache = PrefixCache(*pools, sliding_window)
    made = sequence([*range(num_tokens)])
    keys: list[bytes] = []
    cache.keys.extend(keys, [*range(27)])
    for pool, are_there in zip(pools, (full, window), strict=True):
        for key, is_there in zip(keys, are_there, strict=False):
            page = pool.allocate()
            if is_there:
                pool.register(page, key)

    def is_hit(num_pages: int) -> bool:
        seen = range(max(num_pages * PAGE - sliding_window + 1, 0), num_pages * PAGE)
        return (
            num_pages * PAGE < num_tokens
            and all(full[:num_pages])
            and all(window[position // PAGE] for position in seen)
        )

    hit = cache.find(made)
    assert len(hit.full) == max(count for count in range(7) if is_hit(count))
    assert hit.full == [pools[0].find(key) for key in keys[: len(hit.full)]]
    window_keys = keys[len(hit.full) - len(hit.window) : len(hit.full)]
    assert hit.window == [pools[1].find(key) for key in window_keys]


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, TokenChunk]:
    """All of them at once, to their ends: their last chunks, and each answer as it has to be."""
    sequences = [engine.prepare(one) for one in requests]
    window = engine.runner.model_config.sliding_window
    expected = {each.generation_id: answer(each, window)[0] for each in sequences}
    for each in sequences:
        engine.admit(each)
    found: dict[str, tuple[int, ...]] = dict.fromkeys(expected, ())
    ends = {}
    while engine.has_work:
        for chunk in engine.step():
            found[chunk.generation_id] += chunk.token_ids
            if chunk.finish_reason:
                ends[chunk.generation_id] = chunk
    assert found == expected
    stats = engine.stats()
    assert stats.num_used_pages == stats.num_used_window_pages == 0
    return ends


def cached_tokens(engine: Engine, *prompts: tuple[int, ...], salt: str = "") -> list[int]:
    """What each of these prompts, one behind the other, finds."""
    found = []
    for number, prompt in enumerate(prompts):
        one = replace(request(str(number), prompt, max_tokens=2), cache_salt=salt)
        found.append(run(engine, one)[str(number)].num_cached_tokens)
    return found


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_last_token_is_always_computed(is_asynchronous: bool) -> None:
    engine = fake_engine(FakeRunner(is_asynchronous=is_asynchronous))
    prompt = tuple(range(16))
    assert cached_tokens(engine, prompt, prompt, prompt[:9], prompt[:8]) == [0, 12, 8, 4]
    stats = engine.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (16 + 16 + 9 + 8, 24)


def test_without_it_nothing_is_shared() -> None:
    engine = fake_engine(enable_prefix_caching=False)
    assert cached_tokens(engine, (1,) * 16, (1,) * 16) == [0, 0]
    assert engine.stats().num_queried_tokens == 0


def test_a_salt_is_shared_with_nobody_else() -> None:
    engine = fake_engine()
    prompt = tuple(range(16))
    assert cached_tokens(engine, prompt, salt="a") == [0]
    assert cached_tokens(engine, prompt) == [0]
    assert cached_tokens(engine, prompt, salt="b") == [0]
    assert cached_tokens(engine, prompt, salt="a") == [12]


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_answer_is_found_by_what_follows_it(is_asynchronous: bool) -> None:
    """As a tool's result does."""
    engine = fake_engine(FakeRunner(is_asynchronous=is_asynchronous))
    prompt = tuple(range(10))
    one = request("a", prompt, max_tokens=12, ignore_eos=True)
    told = answer(engine.prepare(one), 4)[0]
    run(engine, one)
    # 21 tokens were computed: the last one is an answer's end, which nobody reads.
    assert cached_tokens(engine, (*prompt, *told, 1, 2, 3)) == [20]


def test_prompts_that_come_together_are_computed_once() -> None:
    """Also in one step, in which the first computes what the second reads."""
    launched: list[int] = []
    runner = FakeRunner(on_launch=lambda step: launched.extend(i.num_tokens for i in step.items))
    engine = fake_engine(runner, max_num_batched_tokens=32)
    prompt = tuple(range(20))
    ends = run(engine, *(request(name, prompt, seed=5, max_tokens=1) for name in "abc"))
    assert [ends[name].num_cached_tokens for name in "abc"] == [0, 16, 16]
    assert launched == [20, 4, 4]


def test_what_others_own_already_takes_no_room() -> None:
    """Ten pages; each of three needs eight, seven of them the same."""
    engine = fake_engine(FakeRunner(num_pages=12), max_num_batched_tokens=64)
    prompt = tuple(range(28))
    for name in "abc":
        engine.add(request(name, (*prompt, ord(name) % 50), max_tokens=2, ignore_eos=True))
    engine.step()
    assert engine.stats().num_running == 3
    while engine.has_work:
        engine.step()
    assert engine.stats().num_preemptions == 0


def test_where_prompts_part_is_kept_for_the_third() -> None:
    """Between them come others, whose pages of window layers take those in the prompts' middle."""
    engine = fake_engine(FakeRunner(num_window_pages=12, num_pages=200))
    system = tuple(range(24))
    found = []
    for number in range(5):
        asked = tuple(range(30 + 10 * number, 40 + 10 * number))
        found += cached_tokens(engine, (*system, *asked))
        assert cached_tokens(engine, tuple((7 * number + 3 * i) % 90 for i in range(50))) == [0]
    assert found == [0, 0, 24, 24, 24]


def test_ends_of_prompts_outlive_the_middle_of_others() -> None:
    engine = fake_engine(FakeRunner(num_window_pages=8, sliding_window=4, num_pages=200))
    prompt = tuple(range(21))
    assert cached_tokens(engine, prompt) == [0]
    for number in range(2):
        long = tuple((number + i) % 90 for i in range(50))
        assert cached_tokens(engine, long[::-1]) == [0]
    assert cached_tokens(engine, (*prompt, 1, 2, 3)) == [20]


def test_who_is_preempted_finds_its_own_pages() -> None:
    """All that no older one has needed meanwhile."""
    computed = 0

    def launched(step: ScheduledStep) -> None:
        nonlocal computed
        computed += sum(item.num_tokens for item in step.items)

    def work(*, enable_prefix_caching: bool) -> tuple[int, int]:
        nonlocal computed
        computed = 0
        runner = FakeRunner(num_pages=12, on_launch=launched)
        engine = fake_engine(runner, enable_prefix_caching=enable_prefix_caching)
        requests = [
            request(name, tuple(range(start, start + 14)), max_tokens=20, ignore_eos=True)
            for name, start in (("a", 0), ("b", 40))
        ]
        ends = run(engine, *requests)
        assert ends["b"].num_cached_tokens == 0, "of its first start"
        return engine.stats().num_preemptions, computed

    preemptions, cold = work(enable_prefix_caching=False)
    again, warm = work(enable_prefix_caching=True)
    assert preemptions == again == 1
    assert warm < cold


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_tenth_turn_of_a_chat_computes_no_more_than_the_second(is_asynchronous: bool) -> None:
    """The answers' reasoning is not in the next prompt, so that only prompts are prefixes."""
    runner = FakeRunner(
        num_pages=200, num_window_pages=40, max_model_len=400, is_asynchronous=is_asynchronous
    )
    engine = fake_engine(runner)
    chance = random.Random(0)
    prompt = tuple(chance.choices(range(90), k=50))
    computed = []
    for turn in range(1, 11):
        one = request(str(turn), prompt, max_tokens=30, ignore_eos=True)
        end = run(engine, one)[str(turn)]
        computed.append(len(prompt) - end.num_cached_tokens)
        # Others come between.
        run(engine, request("other", tuple(chance.choices(range(90), k=60)), max_tokens=5))
        prompt = (*prompt, *chance.choices(range(90), k=20))
    assert computed[0] == 50
    assert computed[1] <= 20 + PAGE
    assert all(each <= 20 + PAGE for each in computed[1:])
    assert computed[9] <= computed[1]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def model_requests() -> list[GenerationRequest]:
    """Prompts with common beginnings, greedy and drawn, on both sides of the window's 128."""
    chance = random.Random(1)
    stems = [tuple(chance.choices(range(512), k=220)) for _ in range(3)]
    return [
        request(
            str(number),
            chance.choice(stems)[: chance.randint(1, 220)]
            + tuple(chance.choices(range(512), k=chance.randint(0, 30))),
            temperature=number % 2,
            seed=number,
            max_tokens=chance.randint(1, 20),
            ignore_eos=True,
        )
        for number in range(24)
    ]


def model_answers(config: EngineConfig) -> tuple[dict[str, tuple[int, ...]], Engine]:
    engine = Engine(config, load_runner(config))
    waiting = model_requests()
    found: dict[str, tuple[int, ...]] = {one.generation_id: () for one in waiting}
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop())
        for chunk in engine.step():
            found[chunk.generation_id] = (*found[chunk.generation_id], *chunk.token_ids)
    return found, engine


@pytest.mark.parametrize(
    ("num_pages", "overlap", "kv_cache"),
    [(100, "off", "bf16"), (18, "off", "bf16"), (18, "on", "bf16"), (100, "on", "fp8")],
)
def test_a_hit_says_what_a_cold_start_does(
    tiny_checkpoint: TinyCheckpoint,
    one_thread: None,
    num_pages: int,
    overlap: Literal["off", "on"],
    kv_cache: Literal["bf16", "fp8"],
) -> None:
    """The reference model in fp32, token for token, with pages that go to others."""
    config = EngineConfig(
        model=str(tiny_checkpoint.huggingface),
        device="cpu",
        dtype="float32",
        page_size=16,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=100,
        num_pages=num_pages,
        num_window_pages=60,
        overlap=overlap,
        kv_cache=kv_cache,
    )
    found, engine = model_answers(config)
    cold, cold_engine = model_answers(replace(config, enable_prefix_caching=False))
    assert found == cold
    assert cold_engine.stats().num_hit_tokens == 0
    assert engine.stats().num_hit_tokens > 500
    assert (engine.stats().num_preemptions > 0) == (num_pages == 18)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_nobody_finds_keys_that_are_not_numbers(
    tiny_checkpoint: TinyCheckpoint, one_thread: None, overlap: Literal["off", "on"]
) -> None:
    config = EngineConfig(
        model=str(tiny_checkpoint.huggingface),
        device="cpu",
        page_size=16,
        max_model_len=320,
        max_num_seqs=4,
        num_pages=40,
        num_window_pages=40,
        overlap=overlap,
    )
    runner = load_runner(config)
    engine = Engine(config, runner)
    embedding = runner._model.weights.embedding
    right = embedding[7].clone()
    prompt = (*range(20), 7, *range(30))
    ends = []
    for value in (torch.full_like(right, torch.nan), right):
        embedding[7] = value
        engine.add(request("a", prompt, max_tokens=2, ignore_eos=True))
        while engine.has_work:
            ends += [chunk for chunk in engine.step() if chunk.finish_reason]
    assert [(end.finish_reason, end.num_cached_tokens) for end in ends] == [
        ("error", 0),
        ("length", 0),
    ]
