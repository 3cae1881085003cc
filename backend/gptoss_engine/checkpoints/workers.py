"""Work on checkpoints by all cores: bands of rows, made ahead of the thread that takes them."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from gptoss_kernels.fp8 import BLOCK

ROWS_AT_ONCE = 4 * BLOCK  # of a matrix: its temporaries have some megabytes
MAX_WORKERS = 16  # one thread takes what they make

Result = TypeVar("Result")


def bands(size: int, at_once: int = ROWS_AT_ONCE) -> list[slice]:
    return [slice(first, min(first + at_once, size)) for first in range(0, size, at_once)]


def expert_bands(shape: tuple[int, ...]) -> list[tuple[int, slice]]:
    return [(expert, rows) for expert in range(shape[0]) for rows in bands(shape[1])]


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """About one thread a core; torch and the disk release the interpreter's lock.

    In them torch starts no threads of its own, so that all sums are added in one order everywhere.
    """
    _keep_freed_memory()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor = ThreadPoolExecutor(num_workers(), "worker")
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(num_threads)


def num_workers() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


def _keep_freed_memory() -> None:
    """glibc hands the larger pieces back to the system until one of nearly 32 MiB was freed.

    Temporaries are then not made of new pages each time, which took more than half of all time.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def in_order(
    executor: ThreadPoolExecutor,
    function: Callable[..., Result],
    arguments: Iterable[tuple[Any, ...]],
) -> Iterator[Result]:
    """The results in the order of the arguments, at most a few of them ahead of who takes them."""
    pending: deque[Future[Result]] = deque()
    for each in arguments:
        pending.append(executor.submit(function, *each))
        if len(pending) > 2 * num_workers():
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
