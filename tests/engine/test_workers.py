"""Bands, and results in the order of their arguments whatever the order of their making."""

import os
import threading

import pytest
import torch

from gptoss_engine.checkpoints.workers import (
    MAX_WORKERS,
    ROWS_AT_ONCE,
    bands,
    expert_bands,
    in_order,
    workers,
)


def test_bands_cover_every_row_once() -> None:
    for size in (0, 1, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 5760):
        rows = [row for band in bands(size) for row in range(size)[band]]
        assert rows == [*range(size)]
        assert all(band.start % 128 == 0 for band in bands(size))
    assert bands(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert expert_bands((2, 600, 5)) == [
        (expert, rows) for expert in (0, 1) for rows in (slice(0, 512), slice(512, 600))
    ]


def test_results_come_in_order_and_few_are_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    first_may_end = threading.Event()
    started: list[int] = []

    def work(number: int) -> int:
        started.append(number)
        if number == 0:
            assert first_may_end.wait(60)
        if number == 4:  # four were done before the first
            first_may_end.set()
        return number

    with workers() as executor:
        results = in_order(executor, work, [(number,) for number in range(40)])
        assert next(results) == 0
        assert 4 in started
        assert max(started) <= 5
        assert [*results] == [*range(1, 40)]


def test_an_error_comes_where_its_result_would() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError(number)
        return number

    with workers() as executor:
        results = in_order(executor, work, [(number,) for number in range(8)])
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="3"):
            next(results)


def test_torch_has_one_thread_in_each_and_its_own_number_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with workers() as executor:
            assert executor.submit(torch.get_num_threads).result() == 1
            assert executor._max_workers == MAX_WORKERS
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
