"""A profiler's events become time by operator, and kernels find their operators."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gptoss_backend.cli.bench.floors import Floor
from gptoss_backend.cli.bench.profiles import (
    Profile,
    operator_of,
    profile_table,
    profiled,
    summarised,
)
from gptoss_backend.cli.errors import CommandFailed


@dataclass(frozen=True)
class Range:
    start: float
    end: float

    def elapsed_us(self) -> float:
        return self.end - self.start


def event(device: str, name: str, start: float, end: float) -> Any:
    return SimpleNamespace(
        device_type=SimpleNamespace(name=device),
        name=name,
        time_range=Range(start, end),
        self_cpu_time_total=end - start,
    )


def test_kernels_count_and_overlap_does_not_count_twice() -> None:
    profile = summarised(
        [
            event("CPU", "aten::mm", 0, 10_000),
            event("CUDA", "grouped_fp8", 1000, 3000),
            event("CUDA", "grouped_fp8", 2500, 4000),
            event("CUDA", "attention_decode", 5000, 5500),
        ],
        num_steps=2,
    )
    assert profile.step_ms == pytest.approx(4.5 / 2)
    assert profile.busy_ms == pytest.approx(3.5 / 2)
    assert profile.by_operator == {
        "experts": (pytest.approx(3.5 / 2), 1),
        "attention": (pytest.approx(0.25), 0.5),
    }


@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        ("attention_prefill_fp8", "attention"),
        ("experts_fp8_few", "experts"),
        ("grouped_fp8", "experts"),
        ("dispatch_count", "dispatch"),
        ("choose_experts", "router"),
        ("rms_norm_fp8", "norms"),
        ("reduction", "sums of ranks"),
        ("linear_fp8", "qkv and output"),
        ("linear", "products in bf16"),
        ("rope_and_cache_write", "RoPE and cache write"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products in bf16"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
            "PyTorch: vectorized_elementwise_kernel<4, at::nat",
        ),
    ],
)
def test_a_kernel_has_an_operator(kernel: str, operator: str) -> None:
    assert operator_of(kernel) == operator


def test_every_kernel_of_ours_has_one() -> None:
    import gptoss_kernels.cuda

    sources = [*Path(gptoss_kernels.cuda.__path__[0]).glob("*.cu")]
    assert len(sources) > 10
    unknown = {path.stem for path in sources if operator_of(path.stem).startswith("PyTorch")}
    assert unknown == set()


def test_shares_are_of_the_step_and_of_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(10.0, 9.0, {"experts": (6.0, 36), "norms": (3.0, 73)})
    floors = {"experts": Floor(3e-3, 1e-3), "unembedding": Floor(1e-3, 0)}
    Console(width=200).print(profile_table("a step", profile, floors))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["experts", "6.000", "60.0%", "36", "3.000", "50%", "3.000"],
        ["norms", "3.000", "30.0%", "73", "", "", "3.000"],
        ["nothing at work", "1.000", "10.0%", "", "", "", ""],
        ["floor of unembedding", "", "", "", "1.000", "", ""],
        ["step", "10.000", "100.0%", "", "4.000", "40%", "6.000"],
    ]


def test_what_is_small_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Profile(1.0, 1.0, {f"operator {n}": (1 / (n + 1), 1.0) for n in range(25)})
    Console(width=200).print(profile_table("a step", profile, {}))
    printed = capsys.readouterr().out
    assert "5 others" in printed
    assert "operator 19" in printed
    assert "operator 20" not in printed


def test_a_trace_for_chrome(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"

    def run() -> None:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))

    profile = profiled(run, path)
    assert profile.by_operator["aten::mm"][1] == 1
    assert 0 < profile.busy_ms <= profile.step_ms
    names = {each.get("name") for each in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandFailed, match="cannot write"):
        profiled(lambda: None, tmp_path / "file" / "trace.json")
