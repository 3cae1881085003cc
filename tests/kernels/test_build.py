"""All kernels that are served compile for Hopper, here without a GPU, and lose no speed."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from gptoss_kernels.cuda import build
from gptoss_kernels.cuda.combine import choose_combine_layout
from gptoss_kernels.cuda.combine import spec as combine_spec
from gptoss_kernels.cuda.compiler import Cubin, KernelSpec, wgmma_source
from gptoss_kernels.cuda.dispatch_fp8 import specs as dispatch_specs
from gptoss_kernels.cuda.experts_fp8 import FewExpertsTile
from gptoss_kernels.cuda.grouped_fp8 import choose_tile as choose_grouped_tile
from gptoss_kernels.cuda.linear import choose_tile as choose_rows_tile
from gptoss_kernels.cuda.linear_fp8 import choose as choose_linear_tile
from gptoss_kernels.cuda.linear_fp8_few import FewTile
from gptoss_kernels.cuda.logprobs import spec as logprobs_spec
from gptoss_kernels.cuda.mask_logits import spec as mask_logits_spec
from gptoss_kernels.cuda.norm_route import RouteTile, choice_spec
from gptoss_kernels.cuda.penalize_logits import spec as penalize_logits_spec
from gptoss_kernels.cuda.quantise import spec as quantise_spec
from gptoss_kernels.cuda.reduction import ONE_SHOT_BYTES
from gptoss_kernels.cuda.reduction import choose_layout as choose_reduction_layout
from gptoss_kernels.cuda.reduction import spec as reduction_spec
from gptoss_kernels.cuda.rms_norm_fp8 import spec as rms_norm_spec
from gptoss_kernels.cuda.rows import choose_layout
from gptoss_kernels.cuda.sample import spec as sample_spec
from gptoss_kernels.cuda.sampling import choose_cluster
from gptoss_kernels.cuda.select_rows import ROW_BYTES
from gptoss_kernels.cuda.select_rows import spec as select_rows_spec

# Its sums, one a thread and row, want more registers than 24.
SUMS = """
extern "C" __global__ void sums(const float* x, float* out) {
    float sum[64] = {};
    for (int i = 0; i < 1024; ++i)
        for (int j = 0; j < 64; ++j) sum[j] += x[i * 64 + j] * x[i * j];
    for (int j = 0; j < 64; ++j) out[threadIdx.x * 64 + j] = sum[j];
}
"""


class Deadly(KernelSpec):
    """Ends the process that it is sent to, as the compiler ends it on some malformed assembly."""

    def __reduce__(self) -> tuple[Callable[[], NoReturn], tuple[()]]:
        return os.abort, ()


def only(spec: KernelSpec, cache: Path) -> build.Built:
    (built,) = build.build([spec], jobs=1, cache=cache)
    return built


# The one place where the tests compile all that is served: 40 s on two cores.
@pytest.mark.timeout(600)
def test_all_served_kernels_are_fit_to_be_served() -> None:
    """Into the usual cache, where other tests find them; its keys are all that code depends on."""
    specs = build.served_kernels()
    built = {each.spec: each for each in build.build(specs, jobs=2)}
    assert set(built) == set(specs)
    for spec, each in built.items():
        assert each.faults == (), spec
        assert spec.is_hot
        assert each.cubin is not None
        assert each.cubin.registers > 0
        assert spec.name.encode() in each.cubin.image


def test_what_is_served_is_what_operators_choose() -> None:
    served = set(build.served_kernels())
    for m in (1, 7, 12, 64, 65, 127, 128, 129, 193, 1000, 8192, 32768, 99_999, 131_072):
        for n, k in ((5120, 2880), (2880, 4096), (512, 128), (128, 256), (320, 4096)):
            tile = choose_linear_tile(m, n, k, 132)
            assert {tile.spec, replace(tile, has_residual=True).spec} <= served
        for experts, x_group, out_group in ((32, 64, 64), (128, 128, 128), (8, 128, 64)):
            tile = choose_grouped_tile(m * 4, experts, x_group=x_group)
            swiglu = {"x_group": 128, "swiglu": True, "out_group": out_group}
            assert tile.spec in served
            assert choose_grouped_tile(m * 4, experts, **swiglu).spec in served
        layout = choose_layout(m, 2880)
        assert quantise_spec(layout, 128) in served
        for is_fp8, chosen in product((True, False), (0, 1, 4)):
            assert rms_norm_spec(layout, is_fp8=is_fp8, num_chosen=chosen) in served
        assert combine_spec(choose_combine_layout(m, 2880, 4), 4) in served
        for ranks, (chosen, is_fp8) in product((2, 4, 8), ((0, 0), (1, 0), (4, 0), (1, 1), (4, 1))):
            options = {"num_chosen": chosen, "has_norm": bool(is_fp8), "is_fp8": bool(is_fp8)}
            two_shot = ranks > 2 and m > ONE_SHOT_BYTES // 5760
            reducing = choose_reduction_layout(m, 2880, ranks)
            assert reduction_spec(reducing, ranks, two_shot=two_shot, **options) in served
        assert {select_rows_spec(layout, row_type) for row_type in ROW_BYTES} <= served
    for m, k in product((1, 8, 9, 32), (2880, 320, 128)):
        rows_tile = choose_rows_tile(m, 201_088, k)
        assert rows_tile is not None
        assert rows_tile.spec in served
    for has_residual in (False, True):
        quantising = FewTile(4096, 16, quantises=True, has_residual=has_residual)
        assert quantising.spec in served
    for (hidden, inner, chosen), stages in product(
        ((2880, 2880, 4), (320, 1088, 4), (128, 128, 2)), (3, 4)
    ):
        assert FewExpertsTile(hidden, 2 * inner, chosen, True, stages).spec in served
        assert FewExpertsTile(inner, hidden, chosen, False, stages).spec in served
    for experts, ahead in product((32, 128), (2, 4)):
        assert FewExpertsTile(2880, 5760, 4, True, 3, experts, ahead).spec in served
        assert FewExpertsTile(2880, 2880, 4, False, 3, experts).spec in served
    assert set(dispatch_specs(2880, 128, 4).values()) <= served
    for columns, experts, chosen in ((2880, 128, 4), (2880, 32, 4), (320, 16, 4), (128, 8, 2)):
        routes = {RouteTile(columns, experts, chosen).spec, choice_spec(experts, chosen)}
        assert routes <= served
    for rows in (1, 8, 9, 128):
        assert sample_spec(201_088, cluster=choose_cluster(rows)) in served
    assert logprobs_spec(201_088) in served
    assert {mask_logits_spec(), penalize_logits_spec()} <= served
    for rows in (1, 9):
        spec = sample_spec(201_088, torch.float32, cluster=choose_cluster(rows))
        assert spec in served
    assert len({str(spec) for spec in served}) == len(served)


def test_what_a_rank_takes_is_not_what_one_alone_does() -> None:
    two = set(build.rank_kernels(2))
    assert not two & set(build.served_kernels())
    assert set(dispatch_specs(2880, 64, 4).values()) <= two
    assert {
        FewTile(2048, 16, quantises=True).spec,
        quantise_spec(choose_layout(1, 2048), 128),
    } <= two
    assert build.rank_kernels(1) == ()
    with pytest.raises(ValueError, match="must divide 8 key-value heads and 32 experts, got 3"):
        build.rank_kernels(3)


def test_a_kernel_that_spills_is_caught(tmp_path: Path) -> None:
    free = KernelSpec("sums", (), generated=SUMS)
    assert only(free, tmp_path).faults == ()
    capped = replace(free, flags=("--maxrregcount=24",))
    spills, *others = only(capped, tmp_path).faults
    assert spills.startswith("spills ")
    assert any(other.startswith("has a stack frame of ") for other in others)
    # Whoever says that it is not hot may do so.
    assert only(replace(capped, is_hot=False), tmp_path).faults == ()


def test_a_warning_of_lost_performance_is_caught() -> None:
    warning = "ptxas info : (C7514) Potential Performance Loss: wgmma.mma_async is serialized"
    cubin = Cubin(b"", 168, 0, 0, 0, warnings=(warning,))
    assert build.Built(KernelSpec("slow", ()), cubin).faults == (warning,)


def test_a_serialised_product_is_warned_about(tmp_path: Path) -> None:
    # Sums that are read while they are still added up: the compiler waits for each instruction.
    text = """
    extern "C" __global__ void waits(float* out, uint32_t a, uint32_t b) {
        float sums[12] = {};
        for (int i = 0; i < 4; ++i) {
            wgmma_e4m3<24>(sums, a + i, b + i, 1);
            sums[0] += 1;
        }
        for (int i = 0; i < 12; ++i) out[i] = sums[i];
    }
    """
    spec = KernelSpec("waits", (), generated=wgmma_source(24) + text)
    assert any("Performance Loss" in fault for fault in only(spec, tmp_path).faults)


def test_a_refused_kernel_says_why(tmp_path: Path) -> None:
    built = only(KernelSpec("broken", (), generated="int x = missing;"), tmp_path)
    assert built.cubin is None
    assert 'identifier "missing" is undefined' in built.faults[0]


def test_a_compiler_that_dies_costs_its_own_kernel_alone(tmp_path: Path) -> None:
    """By the first of its process's kernels, and by one that follows another."""
    kernels = [
        Deadly("deadly", ()),
        KernelSpec("sums", (), generated=SUMS),
        Deadly("as deadly", ()),
        KernelSpec("sums", (), generated=SUMS, is_hot=False),
    ]
    results = {each.spec: each for each in build.build(kernels, jobs=1, cache=tmp_path)}
    ended = ("its compiler's process ended with SIGABRT",)
    assert [results[kernel].faults for kernel in kernels] == [ended, (), ended, ()]


def test_what_was_built_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("sums", (), generated=SUMS)
    built = only(spec, tmp_path)
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", None)
    assert spec.compile() == built.cubin


def test_a_cache_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    built = only(KernelSpec("sums", (), generated=SUMS), tmp_path)
    assert "cannot be kept in" in built.faults[0]


def test_the_compiling_processes_import_no_torch() -> None:
    program = "import sys, gptoss_kernels.cuda.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
