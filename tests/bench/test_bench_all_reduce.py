"""That the benchmark of the reduction leaves no rank behind, and its lines become rows."""

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

RANK = """
import os, sys, time
rank = sys.argv[sys.argv.index("--rank") + 1]
open(os.environ["FOLDER"] + "/" + rank, "w").write(str(os.getpid()))
assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
assert os.environ["NCCL_NVLS_ENABLE"] == "0"
if rank == "1":
    {last}
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("bench_all_reduce")


@pytest.mark.parametrize(
    ("last", "status"), [("pass", 0), ("sys.exit(3)", 3), ("time.sleep(60)", 1)]
)
def test_no_rank_is_left_behind(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: str, status: int
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(last=last))
    monkeypatch.setattr(bench, "__file__", str(script))
    monkeypatch.setattr(bench, "PATIENCE", 5.0)
    monkeypatch.setattr(sys, "argv", ["bench_all_reduce.py", "fused"])
    monkeypatch.setenv("FOLDER", str(tmp_path))
    started = time.monotonic()
    assert bench.start_ranks(argparse.Namespace(ranks=2)) == status
    assert time.monotonic() - started < 30
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_its_lines_are_rows_of_the_table(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = {"benchmark": "all_reduce", "model": None, "tokens": 8, "ms": 0.005, "floor_ms": 0.001}
    line |= {"date": "2026-11-30", "commit": "abc", "device": "H200", "bound_by": "the link"}
    line |= {"tb_per_s": 0.08, "peers": {"NCCL, 2.28.9": 0.012}, "tp": 2}
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line | {"run": run}) for run in ("sum", "fused")))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    importlib.import_module("table").main()
    rest = "2 ranks | the link | 8 | 5.0 |  | 0.08 TB/s | 20% | NCCL: 12.0 |"
    assert capsys.readouterr().out.splitlines()[2:4] == [
        f"| `reduction` and the norm, {rest}",
        f"| `reduction` alone, {rest}",
    ]
