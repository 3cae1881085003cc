"""That the benchmark of sampling judges tokens before it times anything, without a GPU."""

import importlib
import json
import sys
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


def test_its_lines_are_rows_of_the_table(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = {"benchmark": "sample", "model": None, "tokens": 8, "ms": 0.01, "floor_ms": 0.001}
    line |= {"peers": {"PyTorch": 0.05}, "date": "2026-11-30", "commit": "abc", "device": "H200"}
    lines = [line | {"kind": "top_k", "inputs": inputs} for inputs in ("warm", "cold")]
    lines.append(line | {"benchmark": "logprobs", "inputs": "warm"})
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    importlib.import_module("table").main()
    rest = "| memory | 8 | 10.0 |  | 0.45 TB/s | 10% | PyTorch: 50.0 |"
    assert capsys.readouterr().out.splitlines()[2:5] == [
        f"| `sample`, top_k, logits beyond L2 {rest}",
        f"| `sample`, top_k {rest}",
        f"| `logprobs` {rest}",
    ]
