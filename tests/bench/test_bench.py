"""That the benchmark's modules fit together without a GPU: from times to the tables."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """All of them: bench_gemm imports what runs. They import each other as scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: importlib.import_module(name) for name in ("bench_gemm", "measuring", "table")}


def test_times_become_lines_and_lines_a_table(modules, monkeypatch, tmp_path, capsys) -> None:
    measuring, table = modules["measuring"], modules["table"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(measuring, "command_output", lambda *command: "580.159.04")

    def timing(burst: float, sustained: float | None = None):
        spreads = [
            measuring.Spread(0.9 * ms, ms, 1.1 * ms, 1980, 600) if ms else None
            for ms in (burst, sustained)
        ]
        return measuring.Timing(*spreads)

    def line(benchmark: str, times, **own: object) -> str:
        made = measuring.result_line(benchmark, times, "ours", "command", "abc1234")
        return json.dumps({**made, "date": "2026-11-30", **own})

    grouped = {
        "ours": timing(0.8, 1.0),
        "DeepGEMM contiguous 128 (no bias), sgl-deep-gemm 0.1.5": timing(0.9, 1.05),
        "Humming, humming-kernels 0.1.20": timing(0.85, 1.2),
        "Humming MXFP4 x FP8, humming-kernels 0.1.20": timing(0.1, 0.1),
        "Triton-lang": timing(1.5, 1.6),
    }
    lines = [
        line(
            *("moe_gemm", grouped),
            model="120b",
            tokens=2048,
            floor_ms=0.4,
            tflops=715.0,
            swiglu_group=128,
            weight_values="mxfp4",
        ),
        line("linear", grouped, n=5120, k=2880, tokens=8, floor_ms=0.4, tflops=34.0),
        line("quantise", {"ours": timing(0.01)}, tokens=8, floor_ms=0.008, tb_per_s=3.4),
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    assert capsys.readouterr().out.splitlines() == [
        "| operator | bound by | tokens | burst, us | sustained, us | rate | share of floor "
        "| best peer, us |",
        "|-|-|-|-|-|-|-|-|",
        "| `linear_fp8`, N = 5120, K = 2880 | memory | 8 | 800.0 | 1000.0 | 2.25 TB/s | 50% "
        "| Humming: 850.0, sustained DeepGEMM contiguous 128 (no bias): 1050.0 |",
        "| both grouped products, 120b | tensor cores | 2048 | 800.0 | 1000.0 | 715 TFLOP/s | 50% "
        "| Humming: 850.0, sustained DeepGEMM contiguous 128 (no bias): 1050.0 |",
        "| `quantise` | memory | 8 | 10.0 |  | 3.40 TB/s | 80% |  |",
        "",
        "Measured: 2026-11-30, abc1234, NVIDIA H200 (3 rows)",
        "",
        "| operator | tokens | CUDA C++, us | Triton-lang | deepgemm operators |",
        "|-|-|-|-|-|",
        "| `linear_fp8`, N = 5120, K = 2880 | 8 | 800.0 | 1500.0 |  |",
        "| both grouped products, 120b | 2048 | 800.0 | 1500.0 |  |",
    ]


def test_what_was_recorded_still_makes_a_table(modules, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py"])
    modules["table"].main()
    assert "| `linear_fp8`, N = 5120, K = 2880 |" in capsys.readouterr().out


def test_the_command_explains_itself(modules, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gemm.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        modules["bench_gemm"].main()
    assert ended.value.code == 0
    assert "sustained" in capsys.readouterr().out


def test_without_a_gpu_it_is_a_sentence(modules, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gemm.py", "dense"])
    with pytest.raises(SystemExit, match="no CUDA device was found"):
        modules["bench_gemm"].main()


def test_an_output_that_cannot_be_written_is_said_before(
    modules, monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["bench_gemm.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        modules["bench_gemm"].main()
    assert ended.value.code == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no figures of linear, "),
        (b'{"benchmark": "serve"}\n', "no figures of linear, "),
        (b'{"benchmark": "serve"}\ngarbage', ":2 is no JSON line: "),
        (b"[1]", ":1 is no line of a benchmark's results"),
        (b'{"benchmark": "linear", "model": null}', ":1 has no tokens, ms, "),
        (b"\xd0\x00", "is no text"),
        (None, "No such file"),
    ],
)
def test_a_file_without_figures_is_a_sentence(
    modules, monkeypatch, tmp_path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "lines.jsonl"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    with pytest.raises(SystemExit) as ended:
        modules["table"].main()
    assert str(ended.value.code).startswith("table.py: ")
    assert sentence in str(ended.value.code)
