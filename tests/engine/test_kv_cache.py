from dataclasses import replace

import pytest
import torch

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine
from gptoss_engine.kv_cache import KVCache, PageCounts, max_model_len, window_pages
from gptoss_engine.sequence import ScheduledStep

from .fakes import FakeRunner, model_config, request

# Two layers, one of each kind, one KV head of 4: 2 * 4 * 4 bytes a token and layer in fp32.
MODEL = model_config(sliding_window=128, max_model_len=4096)
CONFIG = EngineConfig(
    page_size=64, max_num_seqs=2, max_num_batched_tokens=640, enable_prefix_caching=False
)


def test_configured_counts_are_kept():
    counts = PageCounts.derive(
        replace(CONFIG, num_pages=7, num_window_pages=5), MODEL, torch.float32
    )
    assert counts == PageCounts(full=7, window=5)


def test_derived_counts_serve_all_sequences_and_no_more():
    # Two windows and the next tokens touch 3 pages each, a step's tokens fill 10, and the piece of
    # a prompt begins and ends within pages.
    assert PageCounts.derive(CONFIG, MODEL, torch.float32) == PageCounts(full=128, window=18)
    short = replace(CONFIG, max_model_len=100)
    assert PageCounts.derive(short, MODEL, torch.float32) == PageCounts(full=4, window=4)


def test_a_prefix_cache_gives_window_layers_an_eighth():
    config = replace(CONFIG, kv_cache_gigabytes=0.008, max_num_seqs=64)
    of_seats = PageCounts.derive(config, MODEL, torch.float32).window
    assert of_seats == 64 * 3 + 12
    counts = PageCounts.derive(replace(config, enable_prefix_caching=True), MODEL, torch.float32)
    assert counts.window == 8_000_000 // 8 // (64 * 32) > of_seats
    assert counts.full == 8_000_000 // (64 * 32) - counts.window
    few = replace(config, enable_prefix_caching=True, kv_cache_gigabytes=0.002)
    assert PageCounts.derive(few, MODEL, torch.float32).window == of_seats, "what seats need"
    # Whoever says how many there are has said it.
    given = replace(config, enable_prefix_caching=True, num_pages=100)
    assert PageCounts.derive(given, MODEL, torch.float32) == PageCounts(100, of_seats)


def engine_of_32_seats(
    page_size: int, sliding_window: int, is_asynchronous: bool, *, max_tokens: int
) -> tuple[Engine, FakeRunner]:
    """With window pages as they are derived for steps of max_tokens."""
    config = EngineConfig(
        page_size=page_size, max_num_seqs=32, max_num_batched_tokens=max_tokens, max_model_len=64
    )
    model = model_config(sliding_window=sliding_window, max_model_len=64)
    runner = FakeRunner(
        page_size=page_size,
        num_pages=32 * 64 // page_size,
        num_window_pages=window_pages(config, model),
        sliding_window=sliding_window,
        is_asynchronous=is_asynchronous,
    )
    return Engine(config, runner), runner


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize(("page_size", "sliding_window"), [(4, 4), (4, 7), (1, 4), (8, 4)])
def test_derived_window_pages_never_run_short(
    page_size: int, sliding_window: int, is_asynchronous: bool
):
    """All sequences in step with each other, so that all windows cross a page's border at once."""
    engine, _ = engine_of_32_seats(page_size, sliding_window, is_asynchronous, max_tokens=32)
    for index in range(32):
        engine.add(request(str(index), (1,), max_tokens=40, ignore_eos=True))
    for index in range(32, 48):
        engine.add(request(str(index), (1,) * (index % 9 + 12), max_tokens=30, ignore_eos=True))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.num_preemptions, stats.num_finished["length"]) == (0, 48)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize(("page_size", "sliding_window"), [(4, 4), (4, 7), (1, 4), (8, 4)])
def test_derived_window_pages_keep_nobody_from_a_seat(
    page_size: int, sliding_window: int, is_asynchronous: bool
):
    """While anyone waits, all seats are taken, wherever the others' windows lie."""
    engine, runner = engine_of_32_seats(page_size, sliding_window, is_asynchronous, max_tokens=64)
    for index in range(72):
        prompt = (1,) * (index % 9 + 2 * sliding_window)
        engine.add(request(str(index), prompt, max_tokens=30 - index % 5, ignore_eos=True))
    num_full = 0

    def launched(step: ScheduledStep) -> None:
        nonlocal num_full
        # Where the budget is spent on prompts nobody can begin.
        is_spent = sum(item.num_slots for item in step.items) == 64
        scheduler = engine.scheduler
        assert is_spent or not scheduler.waiting or len(scheduler.running) == 32
        num_full += len(scheduler.running) == 32

    runner.on_launch = launched
    while engine.has_work:
        engine.step()
    assert num_full > 30
    assert engine.stats().num_preemptions == 0


def test_derived_counts_fit_the_memory():
    config = replace(CONFIG, kv_cache_gigabytes=0.001, max_num_seqs=32)
    window = 32 * 3 + 12
    in_all = 1_000_000 // (64 * 32)
    counts = PageCounts.derive(config, MODEL, torch.float32)
    assert counts == PageCounts(full=in_all - window, window=window)


def test_bf16_gets_twice_the_pages_of_fp32():
    config = replace(CONFIG, kv_cache_gigabytes=0.001, num_window_pages=10, max_num_seqs=100)
    fp32 = PageCounts.derive(config, MODEL, torch.float32).full
    bf16 = PageCounts.derive(config, MODEL, torch.bfloat16).full
    assert abs(bf16 + 10 - 2 * (fp32 + 10)) <= 1


def test_no_room_for_full_layers_is_a_sentence():
    config = replace(CONFIG, kv_cache_gigabytes=0.001, num_window_pages=1000)
    with pytest.raises(InvalidConfig, match=r"kv_cache_gigabytes \(0\.001\) leaves no page"):
        PageCounts.derive(config, MODEL, torch.float32)


def test_max_model_len_is_at_most_the_checkpoints():
    assert max_model_len(CONFIG, MODEL) == 4096
    assert max_model_len(replace(CONFIG, max_model_len=100), MODEL) == 100
    with pytest.raises(InvalidConfig, match="at most the checkpoint's 4096, got 4097"):
        max_model_len(replace(CONFIG, max_model_len=4097), MODEL)


def test_each_layer_has_the_pages_of_its_group():
    cache = KVCache.allocate(
        MODEL,
        page_size=16,
        num_pages=5,
        num_window_pages=3,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for tensors in (cache.keys, cache.values):
        assert [tensor.shape for tensor in tensors] == [(3, 1, 16, 4), (5, 1, 16, 4)]
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    assert cache.keys[0].data_ptr() != cache.values[0].data_ptr()
