"""`gptoss bench ops` on a CPU, small: every operator of real steps, timed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gptoss_backend.cli.bench.floors import Work, floors
from gptoss_backend.cli.bench.ops import TimedOperators, floor_ms
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint

from ..conftest import Run


def test_every_operator_of_a_step_is_a_line(gptoss: Run, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = gptoss(
        *("bench", "ops", "--batches", "3", "--context", "20", "--length", "24", "--repeats", "2"),
        *("--weights", "fp8", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
        *("--output", path),
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    works = {(line["batch"], line["tokens"], line["context"]) for line in lines}
    assert works == {(1, 24, 24), (3, 3, 20)}
    calls = {line["operator"]: line["calls"] for line in lines if line["batch"] == 3}
    # The demo has four layers, every second one with a window.
    assert calls["attention, full"] == calls["attention, window"] == 2
    assert calls["experts"] == calls["norm_route"] == 4
    assert calls["norm_linear, 512 x 128"] == calls["linear, 128 x 256"] == 4
    assert calls["norm_linear, 201088 x 128"] == calls["embedding"] == 1
    # 24 tokens are two steps of 16.
    assert next(line["calls"] for line in lines if line["operator"] == "experts") == 8
    for line in lines:
        low, high = line["spread_ms"]
        assert 0 < low <= line["ms"] <= high
    assert "operators of 3 x 1 at 20" in done.out


def test_calls_give_what_the_operators_give() -> None:
    seen: list[tuple[Any, ...]] = []

    def double(x: int, *, extra: int = 0) -> int:
        seen.append((x, extra))
        return 2 * x + extra

    timer = TimedOperators(cast(Any, SimpleNamespace(double=double)), repeats=3)
    assert timer.double(2) == 4
    assert (timer.times, len(seen)) == ({}, 1)
    with timer:
        assert [timer.double(5, extra=1) for _ in range(4)] == [11] * 4
    assert timer.calls == {"double": 4}
    assert len(timer.times["double"]) == 2 * 3  # of two calls, each repeated
    assert seen[1:] == [(5, 1)] * (4 + 2 * 3)
    with timer:
        pass
    assert (timer.times, timer.calls) == ({}, {})


def test_floors_of_projections_add_up() -> None:
    model = RandomCheckpoint("120b").config
    work = Work(32, 1, 8192, "fp8", "bf16")
    known = floors(model, work)
    parts = [
        floor_ms(model, work, label) or 0
        for label in ("norm_linear, 5120 x 2880", "linear, 2880 x 4096")
    ]
    assert sum(parts) == pytest.approx(known["qkv and output"].ms)
    assert floor_ms(model, work, "norm_linear, 201088 x 2880") == known["unembedding"].ms
    assert floor_ms(model, work, "attention, full") == known["attention, full"].ms
    assert floor_ms(model, work, "sample") is None
