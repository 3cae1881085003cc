"""Models for several ranks, and ranks as threads of the test's own process, connected by gloo."""

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from gptoss_engine import parallel
from gptoss_engine.shards import Rank
from gptoss_kernels.ops import Reduction, load_reduction

from ..tiny_checkpoint import TinySize, original_tensors, write

CPU = torch.device("cpu")
# Heads and experts for 8 ranks, blocks of 128 for as many, the last of which is half full.
SIZE = TinySize(layers=2, heads=16, kv_heads=8, head_dim=16, experts=8, intermediate=1088)

Result = TypeVar("Result")


def write_checkpoint(folder: Path) -> Path:
    """Random weights whose biases behind attention and the experts are as large as what they give:
    one that is added by each rank, or by none, shows in every token."""
    tensors = original_tensors(SIZE, seed=3)
    for name in tensors:
        if name.endswith(("out.bias", "mlp2_bias")):
            tensors[name] *= 8
    write(folder, tensors, SIZE.original_config())
    return folder


def on_each(tp: int, ep: int, run: Callable[[Rank, Reduction], Result]) -> list[Result]:
    """What `run` gives on each of so many ranks, which are threads and connected."""

    def rank_of(index: int, folder: str) -> Result:
        rank = Rank(index, tp, ep)
        store = FileStore(f"{folder}/store", tp)
        store.set_timeout(timedelta(seconds=30))
        group = parallel._group(store, rank, CPU)
        figures: Any = {"columns": SIZE.hidden, "max_tokens": 512}
        return run(rank, load_reduction("reference", group, CPU, **figures))

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(tp) as threads:
        return [*threads.map(lambda index: rank_of(index, folder), range(tp))]
