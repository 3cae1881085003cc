"""That the benchmark of sampling judges tokens before it times anything, without a GPU."""

import importlib
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gptoss_kernels import reference


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("bench_sampling")
    monkeypatch.setattr(module, "VOCABULARY", 5000)
    return module


@pytest.mark.parametrize("kind", ["greedy", "temperature", "top_k", "top_p"])
def test_right_tokens_are_timed_and_wrong_ones_are_not(bench: ModuleType, kind: str) -> None:
    logits = bench.logits_of(20, 2, "cpu")

    def ours():
        return partial(reference.sample, rows=bench.rows_of(kind, 20, "cpu"))

    for make in (ours, lambda: bench.by_torch(kind)):
        call = bench.checked(kind, make, logits)
        bench.check(kind, logits[1], call(1))
    if kind != "temperature":  # of which any token is right

        def least():
            return partial(torch.argmin, dim=-1)

        with pytest.raises(ArithmeticError, match="must not be"):
            bench.checked(kind, least, logits)
