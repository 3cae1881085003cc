"""`gptoss bench decode` on a CPU, small: real sequences that decode together."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gptoss_backend.cli.bench.engines import Deadline
from gptoss_engine.engine import Engine
from gptoss_engine.types import TokenChunk

from ..conftest import Run


def test_every_cell_is_a_line(gptoss: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    prompts: set[tuple[int, ...]] = set()
    step, add = Engine.step, Engine.add

    def counted(self: Engine) -> list[TokenChunk]:
        chunks = step(self)
        steps.append(len(chunks))
        return chunks

    def seen(self: Engine, request: Any) -> None:
        prompts.add(request.token_ids)
        add(self, request)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(Engine, "add", seen)
    path, picture = tmp_path / "lines.jsonl", tmp_path / "plot.svg"
    done = gptoss(
        *("bench", "decode", "--batches", "1,3", "--contexts", "40,20", "--steps", "6"),
        *("--warm-up", "2", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
        *("--output", path, "--plot", picture, "--gpu-price", "3.6"),
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cells = [(line["context"], line["batch"]) for line in lines]
    assert cells == [(20, 1), (20, 3), (40, 1), (40, 3)]
    for line in lines:
        assert line["benchmark"] == "decode"
        assert line["tokens"] is None
        low, high = line["spread_ms"]
        assert 0 < low <= line["ms"] <= high
        assert line["steps"] == 6
        assert line["tokens_per_s_user"] == pytest.approx(1e3 / line["ms"], rel=1e-3)
        assert line["tokens_per_s"] == pytest.approx(1e3 * line["batch"] / line["ms"], rel=1e-3)
        assert line["dollars_per_million"] == pytest.approx(line["ms"] / line["batch"], rel=1e-3)
        # Those that stayed from one sequence to three are older.
        slack = 2 if line["batch"] == 1 else 10
        assert line["context"] - 1 <= line["mean_context"] <= line["context"] + slack
    # No two sequences had a prompt in common, and each context was computed once.
    assert len(prompts) == 2 * 3
    assert {len(prompt) for prompt in prompts} == {20 - 2 - 3, 40 - 2 - 3}
    # All of a cell's sequences decoded in each of its steps.
    assert steps.count(3) >= 2 * (2 + 6)
    assert "<svg" in picture.read_text()


def test_a_budget_leaves_out_what_comes_later(gptoss: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = iter((False, False, True))
    monkeypatch.setattr(Deadline, "has_passed", property(lambda _: next(passed)))
    done = gptoss(
        *("bench", "decode", "--batches", "1,2,3", "--contexts", "16", "--steps", "2"),
        *("--budget", "4", "--device", "cpu"),
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines() if line[0] == "{"]
    assert [line["batch"] for line in lines] == [1, 2]
    assert "decode of 3 at 16: not run, 4 s were spent\n" in done.err


def test_traces_are_of_steady_steps(gptoss: Run, tmp_path: Path) -> None:
    done = gptoss(
        *("bench", "decode", "--batches", "2", "--contexts", "20", "--steps", "2"),
        *("--profile", tmp_path),
    )
    assert done.code == 0, done.err
    assert "decode of 2 at 20" in done.out
    assert json.loads((tmp_path / "decode-2x20.json").read_text())["traceEvents"]


def test_a_cell_that_preempted_has_no_time(gptoss: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer pages than the sequences come to need, as if nobody had counted.
    module = sys.modules["gptoss_backend.cli.bench.decode"]  # the package's name is the command's
    monkeypatch.setattr(module, "misfit", lambda *_: "")
    done = gptoss(
        *("bench", "decode", "--batches", "1,3,4", "--contexts", "20", "--steps", "16"),
        *("--warm-up", "1", "--num-pages", "10", "--page-size", "8", "--max-num-seqs", "4"),
    )
    assert done.code == 0, done.err
    one, three, four = [json.loads(line) for line in done.out.splitlines() if line[0] == "{"]
    assert one["ms"] > 0
    assert three["left_out"] == four["left_out"] == "sequences were preempted"


def test_what_does_not_fit_says_so(gptoss: Run) -> None:
    done = gptoss(
        *("bench", "decode", "--batches", "1,4", "--contexts", "64", "--steps", "2"),
        *("--warm-up", "1", "--num-pages", "24", "--page-size", "8", "--max-num-seqs", "4"),
    )
    assert done.code == 0, done.err
    one, four = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert one["ms"] > 0
    assert four["ms"] is None
    assert four["left_out"].endswith("tokens of KV, 192 there")
