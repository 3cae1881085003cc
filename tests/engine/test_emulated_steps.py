"""Whole steps of a GPU by the Hopper kernels, on the emulator, beside the same by the reference.

What fills a step is in it: rows that are NaN go through every kernel, and must change nothing.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.config import EngineConfig
from gptoss_engine.device_steps import DeviceSteps
from gptoss_engine.graphs import GraphShape, StepGraphs
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.loading import load_weights
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.staging import StagedStep
from gptoss_engine.types import SamplingParams
from gptoss_kernels import composed, reference
from gptoss_kernels.composed import ComposedOperators
from gptoss_kernels.cuda import operators as cuda
from gptoss_kernels.ops import SamplingRows
from gptoss_kernels.testing import norm_error

from ..kernels.emulator import emulated
from .stepping import sequence
from .test_device_steps import Recorded

CPU = torch.device("cpu")
PAGE_SIZE, PAGES, SEATS, MAX_MODEL_LEN = 16, 8, 12, 128


class Kernels(ComposedOperators):
    """All but the copy from and to pinned memory, which needs a GPU."""

    def __init__(self) -> None:
        super().__init__(cuda, cuda, cuda)
        self.transfer = reference.transfer


class Watched:
    """Operators, and the logits and tokens of the last step."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators
        self.logits = self.token_ids = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def sample(self, logits: Tensor, rows: SamplingRows, *kept: Tensor) -> Tensor:
        self.logits, self.token_ids = logits, self._operators.sample(logits, rows, *kept)
        return self.token_ids


@pytest.fixture(scope="module")
def model() -> GptOss:
    """Two layers, one of them with a window."""
    source = RandomCheckpoint("tiny", num_layers=2, vocab_size=512)
    weights = load_weights(source, "fp8", torch.bfloat16, CPU)
    return GptOss(source.config, weights, rope_table(source.config, MAX_MODEL_LEN, reference))


@dataclass
class Device:
    operators: Watched
    steps: DeviceSteps
    cache: KVCache

    @property
    def cached(self) -> list[Tensor]:
        return [*self.cache.keys, *self.cache.values]


def device(model: GptOss, operators: Any) -> Device:
    """Whose cache holds noise."""
    num_pages = PAGES * SEATS
    cache = KVCache.allocate(
        model.config,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_window_pages=num_pages,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for index, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.normal_(generator=torch.Generator().manual_seed(index))
    watched: Any = Watched(operators)
    config = EngineConfig(
        device="cpu", page_size=PAGE_SIZE, max_num_seqs=SEATS, max_num_batched_tokens=64
    )
    steps = DeviceSteps(
        *(model, cache, watched, config),
        num_pages=num_pages,
        num_window_pages=num_pages,
        max_model_len=MAX_MODEL_LEN,
        capture=None,
    )
    return Device(watched, steps, cache)


def step_of(parts: list[tuple[int, int]]) -> ScheduledStep:
    """Of sequences with so many tokens in the cache, and so many new ones; every third is drawn."""
    items = []
    for seat, (known, new) in enumerate(parts):
        sampling = SamplingParams(temperature=0.8 if seat % 3 == 0 else 0.0, top_p=0.9)
        token_ids = [(7 * k * k + seat) % 512 for k in range(known + new)]
        made = sequence(token_ids, sampling, seat, num_computed_tokens=known, seat=seat)
        pages = [*range(PAGES * seat, PAGES * (seat + 1))][: -(-(known + new) // PAGE_SIZE)]
        made.page_tables = PageTables(pages, pages)
        items.append(ScheduledItem.of(made, new))
    return ScheduledStep(tuple(items))


DECODES = [(position, 1) for position in (5, 15, 16, 40, 63, 64, 90, 100, 126)]  # of 12 rows


@pytest.mark.parametrize(
    ("parts", "shape", "most_at_once"),
    [
        (DECODES, GraphShape(12), 64),
        ([(0, 25)], GraphShape(0, 32, 1), 64),
        ([*DECODES, (10, 21), (0, 9)], GraphShape(12, 48, 3), 64),
        ([*DECODES, (10, 25)], None, 64),
        ([*DECODES, (10, 25)], None, 30),
    ],
    ids=["graph", "graph of a prefill", "graph of both", "mixed", "mixed, experts in pieces"],
)
def test_a_step_by_kernels_is_that_of_the_reference(
    model: GptOss,
    parts: list[tuple[int, int]],
    shape: GraphShape | None,
    most_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(composed, "MAXIMUM_TOKENS", most_at_once)
    plain, ours = device(model, reference), device(model, Kernels())
    before = [each.clone() for each in ours.cached]
    output = plain.steps.launch(step_of(parts)).result()
    capture, step = Recorded(), step_of(parts)
    with emulated(3, num_multiprocessors=8, seconds=300), torch.inference_mode():
        if shape and shape.num_decodes:
            # A graph has no room for so many pages: they are there from now on.
            StagedStep.build(step, ours.steps._known)
            for table in (ours.steps._full, ours.steps._window):
                table.copy_(torch.arange(PAGES * SEATS).view(SEATS, PAGES))
        if shape:
            ours.steps._mixed_shapes = (shape,)
            ours.steps._graphs = StepGraphs(ours.steps._graph_step, (shape,), capture)
        found = ours.steps.launch(step).result()
    assert len(capture.replayed) == (shape is not None)

    count = len(parts)
    assert norm_error(ours.operators.logits[:count], plain.operators.logits[:count]) < 5e-2
    assert [len(each) for each in found.token_ids] == [len(each) for each in output.token_ids]
    num_fillers = shape.num_sampled - count if shape else 0
    assert ours.operators.token_ids[count:].tolist() == [-1] * num_fillers
    kept = ours.steps._last_token_ids[:count].tolist()
    assert kept == [token_id for (token_id,) in found.token_ids]
    for old, new, expected in zip(before, ours.cached, plain.cached, strict=True):
        changed, should = (
            (old.view(torch.int16) != each.view(torch.int16)).any(-1).any(1)
            for each in (new, expected)
        )
        assert torch.equal(changed, should)
        assert norm_error(new, expected) < 2e-2
