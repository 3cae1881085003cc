import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from gptoss_kernels.cuda.gemm_fp8 import Tile
from gptoss_kernels.cuda.runtime import Cubin

# Tiny tensors gain nothing from threads, which wait for each other long on a busy machine.
torch.set_num_threads(1)


@pytest.fixture
def compile_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Iterable[Tile]], list[Cubin]]:
    """Compiles afresh, in other processes: the compiler ends its own on malformed assembly."""
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))

    def compile_all(tiles: Iterable[Tile]) -> list[Cubin]:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
            return list(pool.map(Tile.compile, tiles))

    return compile_all
