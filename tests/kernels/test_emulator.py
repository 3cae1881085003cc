"""The emulator of Hopper: kernels that are right on an H200 are right on it, wrong ones are seen.

The wrong ones are the served kernels with one line changed. What no served kernel needs is shown by
small kernels of their own.
"""

import ctypes
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Dispatched, Mixture, empty_scale
from gptoss_kernels.cuda import compiler, runtime
from gptoss_kernels.cuda.attention import attention
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.compiler import KernelSpec, wgmma_source
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.linear_fp8 import LinearTile, linear_fp8
from gptoss_kernels.cuda.linear_fp8_few import FewTile
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.cuda.rows import RowLayout
from gptoss_kernels.testing import norm_error

from . import attention_cases
from .emulator import CompilationError, EmulationError, emulated, guarded, replacing
from .expert_products import SWIGLU, dequantised, exact, spread

SEEDS = pytest.mark.parametrize("seed", range(3))
BOUND = 2e-3  # rounding to bf16 alone costs 1.7e-3
ATTENTION_BOUND = 3e-3
SWIGLU_BOUND = 5e-3  # values next to the middle of a step of e4m3 go either way

Change = Callable[[str], str] | None


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = reference.quantise(x.bfloat16())
    room = empty_scale(x.shape[0], x.shape[1], "cpu")
    return values, room.copy_(scale)


# ---- kernels that are right --------------------------------------------------------------------


def rms_norm_error(seed: int, change: Change = None) -> float:
    hidden, update = normal(5, 1088).bfloat16(), normal(5, 1088).bfloat16()
    weight, expected_hidden = normal(1088).exp(), hidden.clone()
    expected = reference.rms_norm_fp8(expected_hidden, weight, 1e-5, update)
    with emulated(seed, change=change, late=[hidden, update]):
        out = rms_norm_fp8(hidden, weight, 1e-5, update, layout=RowLayout(1, 5, 2))
    if not torch.equal(hidden, expected_hidden):
        return math.inf
    return norm_error(dequantised(*out), dequantised(*expected))


def combine_error(seed: int, change: Change = None) -> float:
    """inf but for equal bits, as of dispatch."""
    outputs, rows = normal(12, 320).bfloat16(), torch.arange(12).roll(5).view(3, 4).int()
    weights, residual = normal(3, 4).bfloat16(), normal(3, 320).bfloat16()
    expected = [reference.combine(outputs, rows, weights, residual=r) for r in (None, residual)]
    with emulated(seed, change=change, late=[outputs, rows, weights, residual]):
        found = [combine(outputs, rows, weights, residual=r) for r in (None, residual)]
    return 0 if all(map(torch.equal, found, expected)) else math.inf


def dispatch_error(launches: Literal[1, 3, 4], seed: int, change: Change = None) -> float:
    """Of several launches what the first one's inputs are is known to the others."""
    x, chosen = normal(9, 320).bfloat16(), normal(9, 8).topk(4).indices
    expected = reference.dispatch_fp8(x, chosen, 8)
    with emulated(seed, change=change, late=[x, chosen] if launches == 1 else []):
        found = dispatch_fp8(x, chosen, 8, launches=launches)
    pairs = zip(found, expected, strict=True)
    return 0 if all(torch.equal(a.float(), b.float()) for a, b in pairs) else math.inf


def linear_error(
    tile: LinearTile | FewTile, seed: int, change: Change = None, *, has_residual: bool = True
) -> float:
    """Where the kernel before it writes what may change until the last moment, but for one seed."""
    is_few = isinstance(tile, FewTile)
    m, n, k = (tile.tokens - 1, 136, tile.k) if is_few else (2 * tile.rows + 5, 136, 5 * 128 + 16)
    x, x_scale = quantised(normal(m, k))
    weight, weight_scale = normal(n, k).to(torch.float8_e4m3fn), normal(2, -(-k // 128)).exp()
    bias, residual = normal(n) * 30, normal(m, n).bfloat16() * 30 if has_residual else None
    exact_product = (x.double() * spread(x_scale, k)) @ (
        weight.double() * spread(weight_scale, k).repeat_interleave(128, 0)[:n]
    ).t()
    expected = exact_product + bias + (0 if residual is None else residual.double())
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    late = [x, x_scale, *([] if residual is None else [residual])] if seed else []
    with emulated(seed, change=change, num_multiprocessors=2, late=late):
        linear_fp8(x, x_scale, weight, weight_scale, bias, residual=residual, out=out, tile=tile)
    return norm_error(out, expected)


def grouped_inputs(rows: tuple[int, ...], n: int, k: int) -> list[Tensor]:
    x, x_scale = quantised(normal(sum(rows), k))
    starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    weight = normal(len(rows), n, k).to(torch.float8_e4m3fn)
    weight_scale = normal(len(rows), -(-n // 128), -(-k // 128)).exp()
    return [x, x_scale, starts, weight, weight_scale, normal(len(rows), n)]


def grouped_error(rows: tuple[int, ...], swiglu: bool, seed: int, change: Change = None) -> float:
    inputs = grouped_inputs(rows, 256, 272)
    late = inputs[: 3 if swiglu else 2]  # without it, starts were there for the product before
    with emulated(seed, change=change, num_multiprocessors=6, late=late):
        if not swiglu:
            return norm_error(grouped_linear_fp8(*inputs), exact(*inputs))
        values, scale = grouped_swiglu_fp8(*inputs, **SWIGLU)
    inner = reference.swiglu(exact(*inputs).float(), **SWIGLU)
    expected = reference.quantise(inner, 128)
    return norm_error(dequantised(values, scale), dequantised(*expected))


def attention_error(sequences: list[tuple[int, int]], seed: int, change: Change = None) -> float:
    case = attention_cases.make_case(sequences, heads=(16, 2))
    with emulated(seed, change=change, resident=3):
        return norm_error(case.run(attention), attention_cases.exact(case))


NARROW = LinearTile(24, m_groups=1, k_groups=2)
IN_THREE = LinearTile(40, m_groups=1, k_groups=3)
HASTY = replace(NARROW, hastens=True)
ODD_RING = LinearTile(192, m_groups=1, k_groups=2)  # a slot is each warpgroup's in turn
BOXES = LinearTile(128, m_groups=1, waves=2, stores_boxes=True)
SHARED_X = LinearTile(64, m_groups=1, stores_boxes=True, cluster_n=2)
SHARED_WEIGHT = LinearTile(64, m_groups=1, stores_boxes=True, cluster_m=2)
# Of the second a warp has two blocks of K; a block has rows of two of the weight's scales.
FEW_ROWS, FEW_LONG_ROWS = FewTile(656, 40), FewTile(2128, 24, tokens=16)
FEW, MANY = (1, 0, 9, 2), (70, 0, 9, 20)
DECODES, PREFILLS = [(1500, 1), (64, 1), (700, 3)], [(300, 200), (129, 9), (330, 150)]


@SEEDS
def test_quantise(seed: int) -> None:
    x = normal(5, 320).bfloat16()
    x[1, ::3] = 0
    with emulated(seed):
        values, scale = quantise(x)
    expected = reference.quantise(x)
    assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scale, expected[1])


@SEEDS
def test_rms_norm(seed: int) -> None:
    assert rms_norm_error(seed) < BOUND


@SEEDS
@pytest.mark.parametrize("layout", [RowLayout(1, 5, 2), RowLayout(2, 3, 1)], ids=str)
def test_norm_of_what_experts_gave(seed: int, layout: RowLayout) -> None:
    mixture = Mixture(
        normal(20, 1088).bfloat16(),
        torch.randperm(20, generator=torch.Generator().manual_seed(seed)).int().view(5, 4),
        normal(5, 4).bfloat16(),
    )
    hidden, weight = normal(5, 1088).bfloat16(), normal(1088).exp()
    expected_hidden = hidden.clone()
    expected = reference.rms_norm_fp8(expected_hidden, weight, 1e-5, mixture)
    with emulated(seed, late=(mixture.outputs,)):
        out = rms_norm_fp8(hidden, weight, 1e-5, mixture, layout=layout)
    assert torch.equal(hidden, expected_hidden)
    assert norm_error(dequantised(*out), dequantised(*expected)) < BOUND


def test_a_norm_that_reads_outputs_early_is_seen() -> None:
    rows = torch.arange(20, dtype=torch.int32).view(5, 4)
    mixture = Mixture(normal(20, 320).bfloat16(), rows, normal(5, 4).bfloat16())
    hidden, weight = normal(5, 320).bfloat16(), normal(320).exp()
    expected = hidden.clone()
    reference.rms_norm_fp8(expected, weight, 1e-5, mixture)
    mixed = "mix(x, arguments.update, choices, columns, place, &x);"
    loaded = "x.load(hidden, inside, place);\n    wait"

    def change(text: str) -> str:
        return text.replace(mixed, "").replace(loaded, loaded.replace("wait", f"{mixed} wait"))

    found = []
    for seed in range(6):
        found.append(hidden.clone())
        with emulated(seed, late=(mixture.outputs,), change=change):
            rms_norm_fp8(found[-1], weight, 1e-5, mixture)
    assert not all(torch.equal(each, expected) for each in found)


@SEEDS
def test_combine(seed: int) -> None:
    assert combine_error(seed) == 0


@SEEDS
def test_a_weight_of_zero_adds_nothing_whatever_lies_in_its_row(seed: int) -> None:
    outputs, rows = normal(12, 320).bfloat16(), torch.arange(12).view(3, 4).int()
    weights, residual = normal(3, 4).bfloat16(), normal(3, 320).bfloat16()
    weights[0, 1:3] = weights[1] = 0
    outputs[rows[0, 1]] = torch.nan
    rows[0, 2], rows[1, 0], rows[2, 3] = -1, 12, -1
    with emulated(seed):
        out = combine(outputs, rows, weights, residual=residual)
    known = rows.clone()
    known[1, 0] = -1
    expected = reference.combine(outputs, known, weights, residual=residual)
    assert torch.equal(out[:2], expected[:2])
    assert torch.equal(out[1], residual[1])
    assert bool(out[2].isnan().all())


@SEEDS
@pytest.mark.parametrize("launches", [1, 3, 4])
def test_dispatch(launches: Literal[1, 3, 4], seed: int) -> None:
    assert dispatch_error(launches, seed) == 0


@pytest.mark.parametrize("num_own", [0, 4])
@pytest.mark.parametrize("launches", [1, 3, 4])
def test_dispatch_writes_nothing_for_another_ranks_experts(
    launches: Literal[1, 3, 4], num_own: int
) -> None:
    x, chosen = normal(9, 320).bfloat16(), normal(9, 8).topk(4).indices
    chosen = torch.where(chosen < num_own, chosen, -1)
    values, scale = torch.full((36, 320), 0x7F, dtype=torch.uint8), empty_scale(36, 320, "cpu")
    starts, rows = (torch.empty(shape, dtype=torch.int32) for shape in ((9,), (9, 4)))
    room = Dispatched(values.view(torch.float8_e4m3fn), scale.fill_(torch.nan), starts, rows)
    with emulated(1):
        dispatch_fp8(x, chosen, 8, launches=launches, out=room)
    expected = reference.dispatch_fp8(x, chosen, 8)
    end = int(expected.expert_start[-1])
    assert torch.equal(room.expert_start, expected.expert_start)
    assert torch.equal(room.rows, expected.rows)
    assert torch.equal(values[:end], expected.values[:end].view(torch.uint8))
    assert torch.equal(scale[:end], expected.scale[:end])
    assert bool((values[end:] == 0x7F).all())
    assert bool(scale[end:].isnan().all())


@SEEDS
@pytest.mark.parametrize(
    "tile",
    [NARROW, HASTY, IN_THREE, ODD_RING, BOXES, SHARED_X, SHARED_WEIGHT, FEW_ROWS, FEW_LONG_ROWS],
    ids=str,
)
def test_linear(tile: LinearTile | FewTile, seed: int) -> None:
    assert linear_error(tile, seed, has_residual=seed != 1) < BOUND


@SEEDS
@pytest.mark.parametrize("sequences", [DECODES, PREFILLS], ids=["decodes", "prefills"])
def test_attention(sequences: list[tuple[int, int]], seed: int) -> None:
    assert attention_error(sequences, seed) < ATTENTION_BOUND


@SEEDS
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_grouped(rows: tuple[int, ...], swiglu: bool, seed: int) -> None:
    assert grouped_error(rows, swiglu, seed) < (SWIGLU_BOUND if swiglu else BOUND)


# ---- kernels that are wrong --------------------------------------------------------------------

WAIT = "    wait_for_previous_kernels();\n"
FEW_ROWS_RESIDUAL = "    if constexpr (HAS_RESIDUAL) output.load_residual(arguments, first);\n"
COMBINE_LOADS = """    allow_next_kernel();
    if (token >= arguments.num_tokens) return;

    Row sums;
    Choices choices;
    choices.load(arguments.mixture, token);
"""
# Of eight seeds one must see it; most are seen by each of them.
MUTANTS = {
    "a slot is read before it is full": (
        lambda *given: linear_error(BOXES, *given),
        "barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);",
        "",
    ),
    "the first turn of the ring is waited for": (
        lambda *given: linear_error(BOXES, *given),
        "ring.phase ^ 1);",
        "ring.phase);",
    ),
    "a slot is released before its products are done": (
        lambda *given: linear_error(BOXES, *given),
        """wgmma_wait<0>();
            fence_registers(partial[target]);
            if (done == STEPS - 1) release();""",
        """release();
            wgmma_wait<0>();""",
    ),
    "a slot is released by too many": (
        lambda *given: linear_error(BOXES, *given),
        "if (lane == 0) barrier_arrive(empty);",
        "barrier_arrive(empty);",
    ),
    "sums are used before the products are done": (
        lambda *given: linear_error(BOXES, *given),
        "                wgmma_wait<0>();",
        "                wgmma_wait<1>();",
    ),
    "no fence before the products": (
        lambda *given: linear_error(BOXES, *given),
        "        wgmma_fence();",
        "",
    ),
    "the first product adds to what was there": (
        lambda *given: linear_error(BOXES, *given),
        "weight + 2 * k, k != 0);",
        "weight + 2 * k, 1);",
    ),
    "both operands exchanged": (
        lambda *given: linear_error(BOXES, *given),
        '"l"(MATRIX_DESCRIPTOR_HIGH | a), "l"(MATRIX_DESCRIPTOR_HIGH | b)',
        '"l"(MATRIX_DESCRIPTOR_HIGH | b), "l"(MATRIX_DESCRIPTOR_HIGH | a)',
    ),
    "8 rows are 512 bytes from the next 8": (
        lambda *given: linear_error(BOXES, *given),
        "uint64_t(1024 >> 4)",
        "uint64_t(512 >> 4)",
    ),
    "a box is stored before all have written it": (
        lambda *given: linear_error(BOXES, *given),
        "shared_fence();\n            __syncwarp();",
        "shared_fence();",
    ),
    "a box is stored without a fence": (
        lambda *given: linear_error(BOXES, *given),
        "shared_fence();\n            __syncwarp();",
        "__syncwarp();",
    ),
    "a box is overwritten while it is stored": (
        lambda *given: linear_error(BOXES, *given),
        "if (lane == 0) store_wait<0>();  // what was here has been read",
        "",
    ),
    "a residual is added before it is there": (
        lambda *given: linear_error(BOXES, *given),
        "barrier_wait(residual_barrier(), residual_phase);",
        "",
    ),
    "more bytes come than are expected": (
        lambda *given: linear_error(BOXES, *given),
        "barrier_expect(full, slot_bytes);",
        "barrier_expect(full, slot_bytes - 16);",
    ),
    "barriers are used before they are initialised": (
        lambda *given: linear_error(BOXES, *given),
        "CLUSTER > 1 ? cluster_sync() : __syncthreads();",
        "",
    ),
    "sums are handed over before they are taken": (
        lambda *given: linear_error(NARROW, *given),
        "if (!is_first) named_sync(SUM_FREE_BARRIER + group, 256);",
        "",
    ),
    "a residual is on its way before the kernel before has ended": (
        lambda *given: linear_error(HASTY, *given),
        f"k_group != 0) return;\n    {WAIT}",
        "k_group != 0) return;\n",
    ),
    "of all tiles the first one's residual is added": (
        lambda *given: linear_error(HASTY, *given),
        "start_residual(row, column, tile == first);",
        "start_residual(row, column, true);",
    ),
    "the turn before another warpgroup's is taken for the own one": (
        lambda *given: linear_error(ODD_RING, *given),
        "if constexpr (K_GROUPS > 1)\n            barrier_wait(shared + EMPTY",
        "if constexpr (K_GROUPS > 2)\n            barrier_wait(shared + EMPTY",
    ),
    "a cluster's block releases its own slot alone": (
        lambda *given: linear_error(SHARED_X, *given),
        "barrier_arrive(empty, lane);",
        "barrier_arrive(empty, cluster_rank());",
    ),
    "a cluster's block ends before the other one": (
        lambda *given: linear_error(SHARED_WEIGHT, *given),
        "        __syncwarp();\n        cluster_sync();\n",
        "",
    ),
    "a tile of few rows' weight is read before it is there": (
        lambda *given: linear_error(FEW_ROWS, *given),
        "        barrier_wait(shared + FULL_OFFSET + tile * 8, 0);\n",
        "",
    ),
    "few rows' barriers are waited for before they are initialised": (
        lambda *given: linear_error(FEW_ROWS, *given),
        "    __syncthreads();  // the barriers are initialised\n",
        "",
    ),
    "few rows' sums are added up before all warps left theirs": (
        lambda *given: linear_error(FEW_ROWS, *given),
        "    __syncthreads();\n    output.store",
        "    output.store",
    ),
    "few rows' residual is read before the kernel before has ended": (
        lambda *given: linear_error(FEW_ROWS, *given),
        f"{WAIT}    allow_next_kernel();\n{FEW_ROWS_RESIDUAL}",
        f"{FEW_ROWS_RESIDUAL}{WAIT}    allow_next_kernel();\n",
    ),
    "few rows of x are read before the kernel before has ended": (
        lambda *given: linear_error(FEW_ROWS, *given),
        WAIT,
        "",
    ),
    "lower rows of a tile take the upper rows' scale": (
        lambda *given: linear_error(FEW_ROWS, *given),
        "(first + tile * TILE + UNIT) / 128 != block",
        "(first + tile * TILE) / 128 != block",
    ),
    "sums of a row are read before all warps wrote theirs": (
        rms_norm_error,
        "        __syncthreads();\n",
        "",
    ),
    "a norm reads its row before the kernel before has ended": (
        rms_norm_error,
        f"{WAIT}    x.load(hidden, inside, place);\n    if (arg",
        f"    x.load(hidden, inside, place);\n{WAIT}    if (arg",
    ),
    "what experts gave is known before the kernel before has ended": (
        combine_error,
        f"{WAIT}{COMBINE_LOADS}",
        f"{COMBINE_LOADS}{WAIT}",
    ),
    "rows of experts are sent for before the kernel before has ended": (
        lambda *given: grouped_error(MANY, False, *given),
        f"{WAIT}    allow_next_kernel();\n    for (; !all",
        "    allow_next_kernel();\n    for (; !all",
    ),
    "sums are left before all lanes wrote theirs": (
        lambda *given: attention_error(DECODES, *given),
        "__syncwarp();\n        if (lane == 0) barrier_arrive(left(",
        "if (lane == 0) barrier_arrive(left(",
    ),
    "sums are taken before all lanes read theirs": (
        lambda *given: attention_error(DECODES, *given),
        "            __syncwarp();\n#pragma unroll\n            for (int i = 0; i < AT_ONCE; ++i)\n"
        "                if (lane == 0 && i < count)",
        "            for (int i = 0; i < AT_ONCE; ++i)\n"
        "                if (lane == 0 && i < count)",
    ),
    "a prefill's slot is released before all lanes read it": (
        lambda *given: attention_error(PREFILLS, *given),
        "__syncwarp();\n        if (lane == 0) barrier_arrive(empty);",
        "if (lane == 0) barrier_arrive(empty);",
    ),
    "a job is overwritten before all have it": (
        lambda *given: grouped_error(MANY, False, *given),
        "            barrier_wait(shared + JOB_EMPTY_OFFSET, phase);\n",
        "",
    ),
    "the other block's maxima are not waited for": (
        lambda *given: grouped_error(MANY, True, *given),
        "barrier_wait(full, turn / 2 % 2);",
        "",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    error_of, old, new = MUTANTS[name]
    for seed in range(8):
        try:
            if not error_of(seed, replacing(old, new)) < SWIGLU_BOUND:
                return
        except EmulationError:
            return
    pytest.fail(f"no seed sees it: {name}")


def test_a_change_that_changes_nothing_is_not_taken_for_a_wrong_kernel() -> None:
    with pytest.raises(ValueError, match="changed nothing"):
        rms_norm_error(0, replacing("no such line"))


LOAD = "    x.load(arguments.x + row * arguments.x_stride, arguments.columns, place);\n"


def quantise_late(seed: int, change: Change = None) -> bool:
    """Whether it is right where the kernel before it writes `x` until the last moment."""
    x = normal(5, 320).bfloat16()
    expected = reference.quantise(x)
    with emulated(seed, change=change, late=[x]):
        values, scale = quantise(x)
    return torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(
        scale, expected[1]
    )


def test_what_the_kernel_before_wrote_is_read_after_the_wait() -> None:
    def too_late(text: str) -> str:
        return text.replace(LOAD, LOAD + WAIT).replace(WAIT, "", 1)

    assert all(quantise_late(seed) for seed in range(4))
    assert not all(quantise_late(seed, too_late) for seed in range(4))


def test_a_kernel_that_writes_before_the_wait_or_never_waits_is_told() -> None:
    with pytest.raises(EmulationError, match="writes before the kernels before this one"):
        quantise_late(0, replacing(WAIT, ""))
    nothing = torch.zeros(1)
    with pytest.raises(EmulationError, match="block 0 never waits for the kernels before this one"):
        run("", nothing, nothing, kind=-1)


@pytest.mark.parametrize("columns", [8, 24])
def test_guarded_memory_ends_where_a_tensor_does(columns: int) -> None:
    x = normal(3, columns)
    copy = guarded(x)
    assert torch.equal(copy, x)
    assert guarded(x[:0]).shape == (0, columns)
    read = "if (thread == 1) floats[0] = reinterpret_cast<float*>(arguments.data)[arguments.kind];"
    run(read, copy, torch.zeros(1), kind=x.numel() - 1)
    with pytest.raises(EmulationError, match=r"thread 1: reads or writes .*, which is no memory"):
        run(read, copy, torch.zeros(1), kind=x.numel())


# ---- small kernels -----------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("out", ctypes.c_void_p), ("kind", ctypes.c_int))


# What the emulator is held to, an H200 must be held to as well.
MACHINES = pytest.mark.parametrize(
    "machine", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
)
SHARED_BYTES = 65_536
MMA = (Path(compiler.__file__).parent / "mma.cuh").read_text()
HEAD = """
struct Arguments {
    unsigned char* data;
    unsigned char* out;
    int kind;  // for the body; negative: it does not even wait for the kernels before
};

extern "C" __global__ void small(const __grid_constant__ Arguments arguments,
                                 const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int thread = threadIdx.x, lane = thread % 32;
    if (arguments.kind >= 0) wait_for_previous_kernels();
    float* const floats = reinterpret_cast<float*>(arguments.out);
"""


def run(
    body: str,
    data: Tensor,
    out: Tensor,
    *,
    functions: str = "",
    threads: int = 128,
    kind: int = 0,
    seed: int = 0,
    grid: int = 1,
    box: tuple[int, ...] = (),
    swizzle: int = 0,
    seconds: int = 60,
    machine: str = "emulator",
) -> None:
    """A kernel `small` with this body; `map` is one of `data`, where there is a box."""
    generated = MMA + functions + HEAD + body + "}\n"
    spec = KernelSpec("small", (), generated=generated, shared_bytes=SHARED_BYTES)
    is_gpu = machine == "gpu"
    given, result = (data.cuda(), out.cuda()) if is_gpu else (data, out)
    with nullcontext() if is_gpu else emulated(seed, seconds=seconds):
        tensor_map = runtime.tensor_map(given, box, swizzle) if box else runtime.TensorMap()
        arguments = Arguments(given.data_ptr(), result.data_ptr(), kind)
        launch = runtime.Launch(runtime.load(spec, 0), grid, threads, (arguments, tensor_map))
        launch(torch.cuda.current_stream().cuda_stream if is_gpu else 0)
    out.copy_(result)


FAULTS = [
    (
        "if (thread == 5) { barrier_init(shared, 1); barrier_wait(shared, 0); }",
        r"deadlock\n.*threads 0-4, 6-127 have ended\n.*threads 5 wait at the mbarrier at 0x400 for "
        r"parity 0 \(phase 0: 1 of 1 arrivals and 0 bytes to come\) \(hopper.cuh:\d+ < generated",
    ),
    (
        "if (thread == 0) { barrier_init(shared, 1); barrier_expect(shared, 64); "
        "barrier_arrive(shared); }",
        "block 0, thread 0: arrives at .* which has had its 1 arrivals and waits for 64 bytes",
    ),
    ("barrier_arrive(shared + 8);", "there is no mbarrier at shared address 0x408"),
    ("barrier_init(shared, 1);", "initialised twice"),
    (
        "if (thread == 0) { barrier_init(shared, 2); store_shared(shared, 1); "
        "barrier_arrive(shared); }",
        "the mbarrier at shared address 0x400 was overwritten",
    ),
    ("floats[0] = load_shared(shared + 65536);", r"4 bytes at .*0x10400; the block has 65536"),
    ("memory[65536 + thread % 4] = 0;", "wrote beyond its dynamic shared memory"),
    ("store_shared(shared + 8, 0, 0, 0, 0);", "0x408, which is no multiple of 16"),
    (
        "uint32_t words[4]; load_matrices(shared + lane * 16 + 8, words);",
        "no multiple of 16",
    ),
    ("load_box(shared + 1024 * 9 + 128, &map, shared, 0, 0);", "no multiple of 1024"),
    ("load_box(shared, &map, shared + 32768, -4, 0);", "a bulk load of rows from byte -8 on"),
    ("store_box(&map, shared, 12, 0);", "a bulk store of rows from byte 24 on, which is no multip"),
    ("store_box(&map, shared, 0, 0); __syncwarp();", "ends before its bulk stores were waited for"),
    (
        "if (thread == 0) { store_shared(shared, 1.f); store_box(&map, shared, 0, 0); "
        "store_wait<0>(); }",
        "a bulk store at shared address 0x400, where thread 0 of block 0 stored without",
    ),
    (
        "if (thread == 0) { barrier_init(shared + 32768, 1); barrier_expect(shared + 32768, 1024); "
        "load_box(shared, &map, shared + 32768, 0, 0); }",
        "ends while a copy into its memory is under way",
    ),
    (
        "if (thread == 0) { barrier_init(shared + 32768, 1); barrier_expect(shared + 32768, 1024); "
        "load_box(shared, &map, shared + 32768, 0, 0); store_shared(shared + 1020, 0); }",
        "a store at shared address 0x7fc, while a copy into it is under way",
    ),
    (
        "if (thread == 3) copy_async(shared + 8, arguments.data, true);",
        "thread 3: a store at shared address 0x408, which is no multiple of 16",
    ),
    (
        "if (thread == 3) copy_async(shared, arguments.data + 8, true);",
        "cp.async of 16 bytes from .*8, which is no multiple of that",
    ),
    (
        "copy_async(shared + thread * 16, arguments.data, true); copy_wait<0>();",
        "ends while a thread's copy into its memory is under way",
    ),
    (
        "for (int i = 0; i < 9; ++i) copy_async(shared, arguments.data, true);",
        "a store at shared address 0x400, while a copy into it is under way",
    ),
    (
        "if (thread == 0) { store_box(&map, shared, 0, 0); store_shared(shared + 64, 0); }",
        "a store at shared address 0x440, while a wgmma or a bulk store reads it",
    ),
    (
        "float sums[4]; const uint32_t a = matrix_descriptor(shared); wgmma_fence(); "
        "wgmma_e4m3<8>(sums, a, a, 0); if (thread == 9) store_shared(shared + 128, 0);",
        "thread 9: a store at shared address 0x480, while a wgmma or a bulk store reads it",
    ),
    (
        "if (lane < 9) __syncwarp(); else __shfl_sync(~0u, lane, 0);",
        "where other lanes of the warp",
    ),
    ("if (lane < 9) __syncwarp(0xFF);", "with a mask 0xff without this lane"),
    ("if (lane < 31) __syncwarp();", "wait for lanes of their warp in __syncwarp, mask 0xffffffff"),
    ("named_sync(1, thread < 64 ? 96 : 128);", "for (96|128) threads, where others wait for"),
    ("named_arrive(1, 128); if (thread < 32) named_arrive(1, 128);", "arrives twice at named"),
    ("if (thread < 96) named_sync(1, 128);", r"wait at named barrier 1 \(96 of 128 threads"),
    ("*reinterpret_cast<volatile int*>(8) = 1;", "reads or writes 0x8, which is no memory"),
    ("if (thread < 32) store_global((unsigned short*)arguments.out + 1, 0u);", "no multiple of"),
    ("__trap();", "__trap"),
    ("floats[0] = arguments.kind / (thread / 1000);", "block 0, thread .*: divides by zero"),
    (
        "float sums[4]; const uint32_t a = matrix_descriptor(shared); "
        "wgmma_e4m3<8>(sums, a, a, 0);",
        r"without a wgmma\.fence",
    ),
    (
        "float sums[4]; wgmma_fence(); "
        "wgmma_e4m3<8>(sums, matrix_descriptor(shared), matrix_descriptor(shared), 0);",
        "ends while a wgmma is under way",
    ),
    (
        "float sums[4]; wgmma_fence(); "
        "wgmma_e4m3<8>(sums, matrix_descriptor(shared), matrix_descriptor(shared), 0); "
        "wgmma_commit(); sums[1] = 0; wgmma_wait<0>();",
        "wrote to the sums of a wgmma that is under way",
    ),
    (
        "float sums[4]; uint32_t a[4] = {}; wgmma_fence(); "
        "wgmma_bf16_registers<8>(sums, a, matrix_descriptor(shared), 0); "
        'wgmma_commit(); a[3] = 1; asm volatile("" : "+r"(a[3])::"memory"); wgmma_wait<0>();',
        "wrote to the registers of a matrix while a wgmma that reads them",
    ),
]


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[body for body, _ in FAULTS])
def test_a_fault_is_told(number: int) -> None:
    """All in one kernel, which compiles once."""
    cases = "".join(f"case {i}: {{ {body} break; }}\n" for i, (body, _) in enumerate(FAULTS))
    body = f"switch (arguments.kind) {{ {cases} }}"
    functions = wgmma_source(8) + wgmma_source(8, "bf16", a_in_registers=True)
    data = torch.zeros(8, 64, dtype=torch.bfloat16)
    with pytest.raises(EmulationError, match=FAULTS[number][1]):
        run(body, data, data.clone(), functions=functions, kind=number, box=(8, 64), swizzle=128)


STORE = (
    'asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %1, %1, %1};" '
    ':: "l"(own), "r"(turn) : "memory");'
)
LOOK = (
    'asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];" '
    ': "=r"(seen.x), "=r"(seen.y), "=r"(seen.z), "=r"(seen.w) : "l"(peer) : "memory");'
)
MEETING = f"""
    int* const own = reinterpret_cast<int*>(arguments.out);
    const int* const peer = reinterpret_cast<int*>(arguments.data);
    if (thread) return;
    const int turn = own[4] + 1;
    {STORE}
    int4 seen;
    do {{ {LOOK} }} while (seen.x < turn);
    own[5] |= seen.y < turn || seen.z < turn || seen.w < turn;
    own[4] = turn;
"""


def meet(seed: int, ranks: int) -> Tensor:
    """Of two ranks: what each has sent, how often it has launched, whether it saw half a vector.

    By `ranks` at a time.
    """
    memory = torch.zeros(2, 8, dtype=torch.int32)
    spec = KernelSpec("small", (), generated=MMA + HEAD + MEETING + "}\n")
    with emulated(seed, seconds=1) as emulation:
        launches = []
        for rank in (0, 1):
            arguments = Arguments(memory[1 - rank].data_ptr(), memory[rank].data_ptr(), 0)
            given = (arguments, runtime.TensorMap())
            launches.append(runtime.Launch(runtime.load(spec, 0), 1, 32, given))
        with emulation.together(ranks):
            for launch in launches * 3:
                launch(0)
    return memory


def test_ranks_run_at_once_and_each_has_its_launches_one_after_the_other() -> None:
    found = [meet(seed, 2) for seed in range(12)]
    for memory in found:
        assert memory[:, :5].tolist() == [[3] * 5] * 2
    assert {bool(memory[:, 5].any()) for memory in found} == {False, True}
    with pytest.raises(EmulationError, match="no end in sight"):
        meet(0, 1)


def test_ranks_that_launch_something_else_are_refused() -> None:
    def launch(*all_rows: int) -> None:
        with emulated() as emulation, emulation.together(2):
            for rows in all_rows:
                quantise(torch.zeros(rows, 128).bfloat16())

    for all_rows in ((1, 2), (1, 1, 1), ()):
        with pytest.raises(ValueError, match="one kernel with one grid, all as often"):
            launch(*all_rows)


@pytest.mark.parametrize(
    "loop", ['while (thread == 3) asm volatile("");', "while (thread == 3) __nanosleep(1);"]
)
def test_a_kernel_without_an_end_is_given_up(loop: str) -> None:
    with pytest.raises(EmulationError, match="no end in sight"):
        run(loop, torch.zeros(1), torch.zeros(1), seconds=1)


def test_what_the_compiler_or_the_emulator_does_not_know_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = torch.zeros(1)
    with pytest.raises(CompilationError, match=r"does not know the PTX instruction tanh\.approx"):
        run('asm("tanh.approx.bf16 %0, %0;" : "+r"(lane));', nothing, nothing)
    with pytest.raises(CompilationError, match=r"g\+\+ refused a kernel.*\n.*no_such"):
        run("no_such_thing();", nothing, nothing)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilationError, match=r"kernels by g\+\+, and there is none"):
        run("floats[1] = 1;", nothing, nothing)


def swizzled(rows: Tensor, span: int) -> Tensor:
    """A matrix of 16 bits as bytes in shared memory, from a multiple of 1024 on.

    Slabs of `span` bytes of all rows, one after the other; 16 bytes are moved within a row by the
    row's number (`span` 16: not at all).
    """
    slabs = rows.contiguous().view(torch.uint8).unflatten(1, (-1, span // 16, 16))
    place = torch.arange(len(rows)) * span // 128 % 8 % (span // 16)
    unit = torch.arange(span // 16)[None] ^ place[:, None]
    return slabs.transpose(0, 1).gather(2, unit[None, :, :, None].expand_as(slabs.transpose(0, 1)))


@pytest.mark.parametrize("span", [16, 32, 64, 128])
@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("transposes_b", [False, True])
@MACHINES
def test_products_of_a_warpgroup(
    machine: str, transposes_b: bool, a_in_registers: bool, span: int
) -> None:
    """[64, 64] @ [64, 128], the second one along K or with adjacent columns."""
    a, b = normal(64, 64).bfloat16(), normal(64, 128).bfloat16()
    data = torch.zeros(3, 16_384, dtype=torch.uint8)
    images = (swizzled(a, span), swizzled(b if transposes_b else b.t(), span), a.view(torch.uint8))
    for room, image in zip(data, images, strict=True):
        room[: image.numel()] = image.flatten()
    # A descriptor says how far it is to the next 8 rows and to the next slab; of matrices that are
    # neither along K nor swizzled, the other way round.
    a_slab, b_slab = 64 * span, (64 if transposes_b else 128) * span
    a_next, b_next = (a_slab, 8 * span), (b_slab, 8 * span)
    if transposes_b and span == 16:
        b_next = b_next[::-1]
    swizzle = {16: 0, 128: 1, 64: 2, 32: 3}[span]
    source = wgmma_source(128, "bf16", a_in_registers=a_in_registers, transposes_b=transposes_b)
    for matrix, (_, stride) in (("a", a_next), ("b", b_next)):
        high = f"(uint64_t({swizzle}) << 62 | uint64_t({stride} >> 4) << 32)"
        source = source.replace(f"MATRIX_DESCRIPTOR_HIGH | {matrix}", f"{high} | {matrix}")
    body = f"""
    for (int i = thread * 16; i < 32768; i += 2048) {{
        const int4 v = *reinterpret_cast<int4*>(arguments.data + i);
        store_shared(shared + i, v.x, v.y, v.z, v.w);
    }}
    shared_fence();
    __syncthreads();
    const int row = thread / 32 * 16 + lane / 4;
    float sums[64];
    uint32_t a[4][4];
    for (int i = 0; i < 16; ++i)
        a[i / 4][i % 4] = *reinterpret_cast<uint32_t*>(
            arguments.data + 32768 + (row + i % 2 * 8) * 128 + i / 2 * 16 + lane % 4 * 4);
    wgmma_fence();
    for (int k = 0; k < 4; ++k) {{
        const int first = k * 32 / {span}, rest = k * 32 % {span};
        const uint32_t a_place = shared + first * {a_slab} + rest;
        const uint32_t b_place = shared + 16384 +
            ({int(transposes_b)} ? k * 16 * {span} : first * {b_slab} + rest);
        const uint32_t a_matrix = {a_next[0]} >> 4 << 16 | a_place >> 4;
        const uint32_t b_matrix = {b_next[0]} >> 4 << 16 | b_place >> 4;
        {source.split("void ")[1].split("(")[0]}<128>(
            sums, {"a[k]" if a_in_registers else "a_matrix"}, b_matrix, k != 0);
    }}
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(sums);
    for (int i = 0; i < 64; ++i)
        floats[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
    """
    for seed in range(2):
        out = torch.full((64, 128), torch.nan)
        run(body, data, out, functions=source, seed=seed, machine=machine)
        assert norm_error(out, a.double() @ b.double()) < 1e-6


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@MACHINES
def test_products_of_a_warp(machine: str, kind: str) -> None:
    """[16, 16] @ [16, 8] from matrices in shared memory, the second one transposed on its way."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
    a, b = normal(16, 16).to(dtype), normal(16, 8).to(dtype)
    data, out = torch.cat([a.flatten(), b.flatten()]), torch.full((16, 8), torch.nan)
    body = f"""
    for (int i = 0; i < 12; ++i)
        store_shared(shared + i * 128 + lane * 4,
                     reinterpret_cast<int*>(arguments.data)[i * 32 + lane]);
    __syncwarp();
    uint32_t a[4], b[4];
    load_matrices(shared + lane % 16 * 32 + lane / 16 * 16, a);
    load_matrices_transposed(shared + 512 + lane % 16 * 16, b);
    float sums[4] = {{}};
    multiply_{kind}(sums, a, {{b[0], b[1]}});
    for (int i = 0; i < 4; ++i)
        floats[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    """
    run(body, data, out, threads=32, machine=machine)
    assert norm_error(out, a.double() @ b.double()) < 1e-6


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    "place", [(0, 0, 0), (-8, 1, -1), (64, -2, 1), (-72, 0, 0), (0, 7, 0), (0, 0, -2)], ids=str
)
@MACHINES
def test_boxes(machine: str, place: tuple[int, int, int], swizzle: int) -> None:
    """Of three dimensions, over every edge and all beyond one: what lies beyond reads as zero."""
    data = normal(3, 7, 72).bfloat16()
    columns = swizzle // 2 or 40
    box = (2, 4, columns)
    padded = torch.zeros(3 + 4, 7 + 8, 72 + 160, dtype=torch.bfloat16)
    padded[2:5, 4:11, 80:152] = data
    z, y, x = place[2] + 2, place[1] + 4, place[0] + 80
    expected = padded[z : z + 2, y : y + 4, x : x + columns].reshape(8, columns)
    image = swizzled(expected, swizzle) if swizzle else expected.contiguous()
    image = image.flatten().view(torch.uint8)
    body = f"""
    const uint32_t barrier = shared + 8192;
    if (thread == 0) {{
        barrier_init(barrier, 1);
        barrier_expect(barrier, {image.numel()});
        load_box(shared, &map, barrier, {place[0]}, {place[1]}, {place[2]});
    }}
    __syncthreads();
    barrier_wait(barrier, 0);
    for (int i = thread; i < {image.numel()}; i += 128) arguments.out[i] = memory[i];
    """
    for seed in range(3):
        out = torch.full((image.numel(),), 0x77, dtype=torch.uint8)
        run(body, data, out, box=box, swizzle=swizzle, seed=seed, machine=machine)
        assert torch.equal(out, image)


@MACHINES
def test_copies_of_a_thread(machine: str) -> None:
    """Two groups, of which the first is waited for; and an empty one. Odd lanes copy zeros."""
    body = """
    // Not a sum with a uniform part: see test_copies_are_assembled_as_they_should_be.
    const uint32_t place = __shfl_sync(~0u, shared + thread * 16, lane);
    for (int i = 0; i < 2; ++i) {
        copy_async(place + i * 2048, arguments.data + (i * 128 + thread) * 16, lane % 2 == 0);
        copy_commit();
    }
    copy_wait<1>();
    __syncthreads();
    floats[thread] = load_shared(shared + (thread ^ 2) * 16);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    floats[128 + thread] = load_shared(shared + (128 + (thread ^ 2)) * 16 + 12);
"""
    data = torch.randn(256, 4)
    seen = torch.arange(128).bitwise_xor(2)
    expected = torch.cat((data[seen, 0], data[128 + seen, 3])) * (torch.arange(256) % 2 == 0)
    for seed in range(4):
        out = torch.full((256,), torch.nan)
        run(body, data, out, seed=seed, machine=machine)
        assert torch.equal(out, expected)


def test_a_thread_that_does_not_wait_for_its_copies_shows() -> None:
    body = """
    copy_async(shared + thread * 16, arguments.data + thread * 16, true);
    copy_commit();
    copy_wait<1>();
    floats[thread] = load_shared(shared + thread * 16);
    copy_wait<0>();
"""
    outs = [torch.zeros(128) for _ in range(6)]
    for seed, out in enumerate(outs):
        run(body, torch.randn(128, 4), out, seed=seed)
    assert any(bool(out.isnan().any()) for out in outs)


def test_what_a_stored_box_covers_beyond_the_matrix_is_not_written() -> None:
    around = torch.full((12, 16), 7.0)
    matrix = around[2:10, 4:12]
    body = """
    store_shared(shared + thread * 4, float(thread));
    shared_fence();
    __syncthreads();
    if (thread == 0) {
        store_box(&map, shared, 4, -6);
        store_wait<0>();
    }
    """
    run(body, matrix, matrix, box=(16, 8))
    expected = torch.full((12, 16), 7.0)
    expected[2:10, 8:12] = torch.arange(128.0).view(16, 8)[6:14, :4]
    assert torch.equal(around, expected)


@pytest.mark.parametrize(
    ("instruction", "dtype"),
    [
        ("cvt.rn.bf16x2.f32 %0, %1, %2;", torch.bfloat16),
        ("cvt.rn.f16x2.f32 %0, %1, %2;", torch.float16),
        (
            "{.reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, %1, %2; mov.b32 %0, {pair, 0};}",
            torch.float8_e4m3fn,
        ),
    ],
)
@MACHINES
def test_every_rounding_is_torchs(machine: str, instruction: str, dtype: torch.dtype) -> None:
    """All bf16, and fp32 between and beside those; e4m3 saturates."""
    bits = torch.arange(0x10000, dtype=torch.int32) << 16
    values = torch.cat([bits, bits + 0x8000, bits + 0x7FFF, bits + 1, bits + 0x1234])
    data = values.view(torch.float32)
    data = data[~data.isnan()].clone()
    data = data[: len(data) // 2 * 2]
    expected = data.to(dtype)
    if dtype == torch.float8_e4m3fn:
        expected = data.clamp(-448, 448).to(dtype)
    words = torch.zeros(len(data) // 2, dtype=torch.int32)
    body = f"""
    for (int i = thread; i < {len(words)}; i += 128) {{
        const float* pair = reinterpret_cast<float*>(arguments.data) + 2 * i;
        asm("{instruction}" : "=r"(reinterpret_cast<uint32_t*>(arguments.out)[i])
            : "f"(pair[1]), "f"(pair[0]));
    }}
    """
    run(body, data, words, machine=machine)
    size = expected.element_size()
    ours = words.view(torch.uint8).view(-1, 4)[:, : 2 * size].flatten()
    assert torch.equal(ours, expected.view(torch.uint8).flatten())


@MACHINES
def test_an_approximate_inverse_may_be_off_by_its_last_bit(machine: str) -> None:
    """Not of powers of two. One step of Newton's takes it to that of a division, of all bf16 whose
    inverse is no denormal number."""
    data = (torch.arange(0x0080, 0x7E80, dtype=torch.int32) << 16).view(torch.float32)
    out = torch.zeros(2, len(data))
    body = f"""
    for (int i = thread; i < {len(data)}; i += 128) {{
        const float value = reinterpret_cast<float*>(arguments.data)[i];
        const float near = reciprocal_approx(value);
        floats[i] = near;
        floats[{len(data)} + i] = fmaf(fmaf(-value, near, 1.f), near, near);
    }}
    """
    run(body, data, out, machine=machine)
    near, rounded = out
    apart = (near.view(torch.int32) - (1 / data).view(torch.int32)).abs()
    assert torch.equal(rounded, 1 / data)
    assert 0 < int(apart.max()) <= 1
    assert bool((apart.view(-1, 128)[:, 0] == 0).all())


@MACHINES
def test_lanes_of_a_warp_tell_each_other(machine: str) -> None:
    out = torch.full((8, 32), -1, dtype=torch.int32)
    body = """
    int* const results = reinterpret_cast<int*>(arguments.out) + lane;
    const int own = lane * lane;
    results[0] = __shfl_sync(~0u, own, 5);
    results[32] = __shfl_xor_sync(~0u, own, 3);
    results[64] = __shfl_up_sync(~0u, own, 2);
    results[96] = __shfl_down_sync(~0u, own, 2, 8);
    results[128] = int(__ballot_sync(~0u, lane % 3 == 0));
    results[160] = int(__match_any_sync(~0u, lane / 7));
    results[192] = __reduce_add_sync(~0u, own);
    results[224] = lane < 16 ? __reduce_add_sync(0xFFFFu, own) : __any_sync(0xFFFF0000u, lane == 3);
    """
    run(body, out, out, threads=32, machine=machine)
    lane = torch.arange(32)
    own = lane**2
    ballot = sum(1 << i for i in range(0, 32, 3))
    same = [sum(1 << j for j in range(32) if j // 7 == i // 7) for i in range(32)]
    expected = [
        own[5].expand(32),
        own[lane ^ 3],
        own[torch.where(lane < 2, lane, lane - 2)],
        own[torch.where(lane % 8 < 6, lane + 2, lane)],
        torch.tensor(ballot).expand(32),
        torch.tensor(same),
        own.sum().expand(32),
        torch.where(lane < 16, own[:16].sum(), 0),
    ]
    assert torch.equal(out.long() & 0xFFFFFFFF, torch.stack(expected))


def test_variables_of_the_device_stay_and_blocks_come_in_any_order() -> None:
    functions = "__device__ int arrived;\n"
    body = """
    __shared__ int turn, others[3];
    if (thread == 0) turn = atomicAdd(&arrived, 1);
    __syncthreads();
    others[thread % 3] = turn;
    if (thread == 100) reinterpret_cast<int*>(arguments.out)[blockIdx.x] = turn;
    """
    nothing, orders = torch.zeros(1), []
    for launch in range(4):
        out = torch.full((6,), -1, dtype=torch.int32)
        run(body, nothing, out, functions=functions, grid=6, seed=launch)
        assert sorted(out.tolist()) == list(range(launch * 6, launch * 6 + 6))
        orders.append((out - launch * 6).tolist())
    assert orders.count(orders[0]) < 4
