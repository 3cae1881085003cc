"""The arithmetic of a GPU's memory, with the published models and an H200's figures."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptoss_engine import loading
from gptoss_engine.capacity import TRIAL, Capacity, beside_weights, fitted, least_step_bytes
from gptoss_engine.checkpoints.random_checkpoint import Like, RandomCheckpoint
from gptoss_engine.config import (
    GPU_MAX_NUM_BATCHED_TOKENS,
    GPU_MAX_NUM_SEQS,
    EngineConfig,
    InvalidConfig,
)
from gptoss_engine.kv_cache import PageBytes, PageCounts, pages_for, window_pages
from gptoss_engine.loading import load_weights
from gptoss_engine.memory import free_for_pages, left_free
from gptoss_engine.shards import Rank

MB = 10**6
H200 = 139 * 2**30
CONTEXT = 600_000_000  # of the driver, PyTorch and its libraries
GRAPHS = 500_000_000
CUDA = torch.device("cuda")
CONFIG = EngineConfig(
    max_num_seqs=GPU_MAX_NUM_SEQS, max_num_batched_tokens=GPU_MAX_NUM_BATCHED_TOKENS
)


def weight_bytes(like: Like) -> int:
    plan = loading._Plan(RandomCheckpoint(like), "fp8", torch.bfloat16, Rank(), "auto")
    return plan.allocate(torch.device("meta")).num_bytes


def a_gpu_of(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total)
    )


@pytest.mark.parametrize(
    ("like", "cache", "num_tokens", "window"),
    [
        # 512 windows of 3 pages, the 128 of a step, and two more.
        ("120b", torch.bfloat16, 600_000, 1666),
        # An eighth of all.
        ("120b", torch.float8_e4m3fn, 1_200_000, 2793),
        ("20b", torch.bfloat16, 4_300_000, 9728),
    ],
)
def test_an_h200_holds_the_models_beside_so_many_tokens(
    monkeypatch: pytest.MonkeyPatch, like: Like, cache: torch.dtype, num_tokens: int, window: int
):
    model = RandomCheckpoint(like).config
    step = least_step_bytes(CONFIG, model)
    used = weight_bytes(like) + step * 5 // 4 + CONTEXT + GRAPHS
    a_gpu_of(monkeypatch, H200, H200 - used)
    free = free_for_pages(CUDA, CONFIG.gpu_memory_utilization)
    counts = pages_for(free, CONFIG, model, cache)
    assert counts.full * 64 >= num_tokens
    assert counts.window == window
    pages = counts.num_bytes(CONFIG, model, cache)
    assert used + sum(pages) <= 0.98 * H200
    assert used + sum(pages) + pages.full // counts.full > 0.98 * H200


def test_a_step_holds_what_its_mixture_of_experts_does():
    """Counted by hand, for one token of the 120b: 2880 wide everywhere, 23 scales a row."""
    model = RandomCheckpoint("120b").config
    a_token = 3 * 2880 * 2 + 4 * (2880 + 23 * 4 + 2880 + 23 * 4 + 2880 * 2)
    assert least_step_bytes(CONFIG, model) == 8192 * a_token
    few = replace(CONFIG, max_num_seqs=256, max_num_batched_tokens=256)
    assert least_step_bytes(few, model) == 256 * 201_088 * 2, "a row of logits each"


def test_what_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch):
    source = RandomCheckpoint("120b")
    a_gpu_of(monkeypatch, 80 * 2**30, 79 * 2**30)
    beside = beside_weights(CONFIG, source.config, torch.bfloat16, CUDA)
    with pytest.raises(InvalidConfig) as refused:
        load_weights(source, "fp8", torch.bfloat16, CUDA, beside=beside)
    assert str(refused.value) == (
        "the weights of random 120b, seed 0 take 118.2 GB with weights fp8, a step of 8192 tokens "
        "525.1 MB, window layers' pages of 512 sequences 3.9 GB, full layers' pages 2.4 MB, what "
        "gpu_memory_utilization (0.98) leaves free 1.7 GB, and 84.8 GB of memory are free on cuda; "
        "they would take 64.4 GB with weights mxfp4"
    )


def test_what_stands_beside_the_weights_counts(monkeypatch: pytest.MonkeyPatch):
    """The weights alone would fit; to the byte."""
    source = RandomCheckpoint("tiny", num_layers=1, vocab_size=64)
    plan = loading._Plan(source, "bf16", torch.bfloat16, Rank(), "auto")
    needed = plan.allocate(torch.device("meta")).num_bytes
    monkeypatch.setattr(loading, "free_memory", lambda device: needed + 7)
    cpu = torch.device("cpu")
    load_weights(source, "bf16", torch.bfloat16, cpu, beside={"this": 4, "that": 3})
    with pytest.raises(InvalidConfig, match=r"weights bf16, this 4 bytes, that 4 bytes, and"):
        load_weights(source, "bf16", torch.bfloat16, cpu, beside={"this": 4, "that": 4})


def test_configured_pages_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch):
    model = RandomCheckpoint("20b").config
    a_gpu_of(monkeypatch, H200, H200)
    config = replace(CONFIG, num_pages=10, num_window_pages=5)
    beside = beside_weights(config, model, torch.bfloat16, CUDA)
    a_page = 12 * 2 * 64 * 8 * 64 * 2
    assert [*beside.values()][1:3] == [5 * a_page, 10 * a_page]


class Gpu:
    """A GPU's memory, and a runner on it that takes what a real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int, weights: int) -> None:
        self.total, self.free, self.weights = total, total - CONTEXT - weights, weights
        self.built: list[PageCounts] = []
        self.trials: list[bool] = []
        self.kernels, self.step, self.graphs = 200 * MB, 700 * MB, 500 * MB
        self.left_over = 900 * MB  # of loading
        self.free -= self.left_over
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(cuda, "get_device_name", lambda device: "a GPU")

    def fit(self, config: EngineConfig, like: Like = "120b") -> PageCounts:
        model = RandomCheckpoint(like).config

        def build(counts: PageCounts, is_trial: bool) -> Runner:
            self.trials.append(is_trial)
            return Runner(self, counts, sum(counts.num_bytes(config, model, torch.bfloat16)))

        return fitted(build, config, model, torch.bfloat16, CUDA, self.weights).counts

    def take(self, size: int) -> None:
        if size > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.free -= size

    def empty_cache(self) -> None:
        self.free, self.left_over = self.free + self.left_over, 0

    def snapshot(self) -> list[dict[str, Any]]:
        pools = ((0, 0), self.step), ((0, 1), self.graphs)
        return [{"device": 0, "segment_pool_id": p, "total_size": size} for p, size in pools]


class Runner:
    def __init__(self, gpu: Gpu, counts: PageCounts, pages: int) -> None:
        self.gpu, self.counts = gpu, counts
        self.itself = self  # so that it goes with the garbage alone
        self.size = pages + gpu.step + gpu.graphs
        gpu.take(self.size + (0 if gpu.built else gpu.kernels))
        gpu.built.append(counts)

    def __del__(self) -> None:
        self.gpu.left_over += getattr(self, "size", 0)


def test_pages_are_what_steps_and_graphs_leave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gpu = Gpu(monkeypatch, H200, weight_bytes("120b"))
    with caplog.at_level("INFO"):
        counts = gpu.fit(CONFIG)
    assert gpu.built == [TRIAL, counts]
    assert gpu.trials == [True, False]
    assert 600_000 < counts.full * 64 < 620_000
    # As much as may be used, to a page of 18 layers.
    assert 0 <= gpu.free - left_free(H200, 0.98) < 18 * 2 * 64 * 8 * 64 * 2
    assert "118.2 GB weights, 700.0 MB activations, 500.0 MB CUDA graphs" in caplog.text


def test_configured_pages_are_built_at_once(monkeypatch: pytest.MonkeyPatch):
    gpu = Gpu(monkeypatch, H200, weight_bytes("120b"))
    config = replace(CONFIG, num_pages=9, num_window_pages=7)
    assert gpu.fit(config) == PageCounts(9, 7)
    assert gpu.trials == [False]


@pytest.mark.parametrize(
    ("total", "config", "sentence"),
    [
        (
            119_000_000_000,
            CONFIG,
            r"249.3 MB are free on cuda beside the weights: too little for 75.5 MB of pages and "
            r"steps of 8192 tokens \(max_num_batched_tokens\) and 512 sequences \(max_num_seqs\)",
        ),
        (123_000_000_000, CONFIG, r"gpu_memory_utilization \(0.98\) leaves no page for the full"),
        (
            H200,
            replace(CONFIG, num_pages=20_000, num_window_pages=900),
            r"30.5 GB are free on cuda beside the weights: too little for 49.3 GB of pages",
        ),
    ],
)
def test_what_has_no_room_beside_the_weights_is_said(
    monkeypatch: pytest.MonkeyPatch, total: int, config: EngineConfig, sentence: str
):
    gpu = Gpu(monkeypatch, total, weight_bytes("120b"))
    with pytest.raises(InvalidConfig, match=sentence):
        gpu.fit(config)


def test_the_capacity_is_said_in_words():
    capacity = Capacity(
        weights=118_200_000_000,
        activations=700_000_000,
        graphs=400_000_000,
        left=4_500_000_000,
        counts=PageCounts(full=9_600, window=898),
        pages=PageBytes(full=22_600_000_000, window=2_100_000_000),
        page_size=64,
        max_num_seqs=256,
        max_model_len=131_072,
    )
    assert str(capacity) == (
        "room for 614,400 tokens: 75 sequences of 8,192 at once, at most 256. Memory: 118.2 GB "
        "weights, 700.0 MB activations, 400.0 MB CUDA graphs, 22.6 GB pages of full layers, 2.1 GB "
        "pages of window layers, 4.5 GB left"
    )
    short = replace(capacity, max_model_len=100)
    assert "256 sequences of 100 at once" in str(short)


def test_no_room_is_said_with_what_gives_it():
    model = RandomCheckpoint("120b").config
    given = "gpu_memory_utilization (0.98)"
    sentence = r"gpu_memory_utilization \(0\.98\) leaves no page for the full layers: the window .*"
    with pytest.raises(InvalidConfig, match=sentence + r"max_num_seqs \(512\) .* take 3\.93 GB"):
        pages_for(2_000_000_000, CONFIG, model, torch.bfloat16, given)
    assert window_pages(CONFIG, model) == 1666
