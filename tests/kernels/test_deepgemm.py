"""DeepGEMM's products with bias, SwiGLU and padding around them, against the reference; bad input.

What is around the products is compiled without a GPU, and interpreted beside a stand-in for the
library. The tests on a GPU are skipped only where the library is not installed: it is an extra.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import pytest
import torch
from triton import knobs

from gptoss_kernels import deepgemm, reference
from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.deepgemm import DeepGemmError, library, padded_rows
from gptoss_kernels.testing import norm_error
from gptoss_kernels.triton_lang.device import INTERPRETED

from ..extras import needs_deep_gemm
from .triton_lang_compiler import compiling_for
from .triton_lang_interpreter import REMARKS, interpret, round_as_hardware_does

pytestmark = pytest.mark.filterwarnings(*REMARKS)
DEVICE = "cpu" if INTERPRETED else "cuda"
Operand = tuple[torch.Tensor, torch.Tensor]


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """With the library itself."""
    return pytest.mark.gpu(needs_deep_gemm(test))


# With the library on a GPU, or where kernels are interpreted with the stand-in.
runs = (lambda test: test) if INTERPRETED else on_gpu

# Two roundings to bf16, of the product and of the sum, of 1.7e-3 each.
LINEAR_BOUND = 4e-3
# SwiGLU sees a product that was rounded to bf16, which is `of_rounded_product` below. The library's
# own sums are 3e-4 of the product's norm off at most: tensor cores keep some 13 bits of a sum of
# 128. Sums so disturbed, and rounded, give another e4m3 for 1.0 to 1.6 % of the values, since what
# lies near the middle of a step may go either way; dequantised they are 3.3e-3 to 5.4e-3 apart.
SAME_BOUND, SAME_SHARE = 8e-3, 3e-2
# What the rounding itself costs, 2^-9 of a product at most, against the function without it: 4.5e-3
# to 8.8e-3, in 4 to 6 % of the values. With an alpha of 1.65 a third differs.
ROUNDED_BOUND, ROUNDED_SHARE = 1.5e-2, 0.1
# Of one value: the step of bf16 between 4 and 8 is 0.03, which a bias may leave a sum of 2 with. Of
# 4000 scales the worst was 1.9e-2 off.
SCALE_BOUND = 4e-2
MANY_VALUES = 1000  # of fewer, a single one that goes the other way is 3e-2 of the norm
SWIGLU = {"alpha": 1.702, "limit": 7.0, "group": 128}

# Rows of each expert: experts without rows at all places, edges of the library's alignment of 128,
# all rows on one. The library compiles anew for each number of experts, hence few of those.
ROWS = (
    (0, 0, 0, 1, 0, 0),
    (128, 0, 1, 127, 129, 0),
    (0, 257, 0, 0, 0, 700),
    (0, 0, 513, 0, 0, 0),
    (33,) * 40,
)
SHAPES = ((64, 144), (320, 2880))
if INTERPRETED:  # a program takes a millisecond
    ROWS = ((0, 0, 0, 1, 0, 0), (0, 129, 0, 1, 3, 0))
    SHAPES = ((64, 144), (144, 1040))
DENSE = ((1, 128, 128), (3, 320, 2880), (257, 2880, 4096))[: 2 if INTERPRETED else 3]


class StandIn:
    """What the library is asked for, in fp32: blocks of rows by their expert, none of -1."""

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 128

    def fp8_gemm_nt(self, x: Operand, weight: Operand, out: torch.Tensor) -> None:
        rows, columns = x[0].shape
        assert x[1].stride() == empty_scale(rows, columns, "cpu").stride()
        scale = weight[1].repeat_interleave(128, dim=0)[: len(weight[0])]
        out.copy_(dequantised(*x) @ dequantised(weight[0], scale).t())

    def m_grouped_fp8_gemm_nt_contiguous(
        self, x: Operand, weight: Operand, out: torch.Tensor, experts: torch.Tensor
    ) -> None:
        out.fill_(torch.nan)
        for first in range(0, len(out), 128):
            block, expert = slice(first, first + 128), int(experts[first])
            if expert >= 0:
                x_scale = empty_scale(128, x[0].shape[1], "cpu").copy_(x[1][block])
                own_weight = (weight[0][expert], weight[1][expert])
                self.fp8_gemm_nt((x[0][block], x_scale), own_weight, out[block])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepgemm, "library", StandIn)
    monkeypatch.setattr(deepgemm.contracts, "check_gpu", lambda x: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


if INTERPRETED:

    @pytest.fixture(autouse=True)
    def _instead_of_a_gpu(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
        round_as_hardware_does(monkeypatch)


def random_inputs(
    rows: tuple[int, ...], n: int, k: int, device: str = DEVICE
) -> list[torch.Tensor]:
    """Inputs whose products and biases are about 2, so that SwiGLU's clamps and curve matter."""
    torch.manual_seed(sum(rows) + n + k)
    total, num_experts = sum(rows), len(rows)
    x_scale = empty_scale(total, k, device)
    x_scale.copy_((torch.rand(x_scale.shape) + 0.5) / 64)
    weight_scale = torch.rand(num_experts, -(-n // 128), -(-k // 128)) + 0.5
    x = (torch.randn(total, k) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = torch.randn(num_experts, n, k).mul_(32).clamp_(-448, 448).to(torch.float8_e4m3fn)
    starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    bias = torch.randn(num_experts, n) * 2
    others = (starts, weight, weight_scale / (32 * k**0.5), bias)
    return [x.to(device), x_scale, *(tensor.to(device) for tensor in others)]


def dense_inputs(m: int, n: int, k: int, device: str = DEVICE) -> list[torch.Tensor]:
    x, x_scale, _, weight, weight_scale, bias = random_inputs((m,), n, k, device)
    return [x, x_scale, weight[0], weight_scale[0], bias[0]]


def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.double() * scale.double().repeat_interleave(128, dim=1)[:, : values.shape[1]]


def of_rounded_product(
    inputs: list[torch.Tensor], disturbance: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The function that this path computes: the product alone, which is about 1, is rounded."""
    no_bias, bias = [*inputs[:5], torch.zeros_like(inputs[5])], inputs[5]
    sums = reference.grouped_linear_fp8(*no_bias, dtype=torch.float32)
    rounded = (sums + disturbance * torch.randn_like(sums)).bfloat16().float()
    rounded += bias.repeat_interleave(inputs[2].diff(), dim=0)
    return reference.quantise(reference.swiglu(rounded, SWIGLU["alpha"], SWIGLU["limit"]))


def is_close(
    out: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[torch.Tensor, torch.Tensor],
    bound: float,
    share: float,
) -> bool:
    """Few values differ, none by much: by their share, by the norm, and by the scales."""
    if not torch.allclose(out[1], expected[1], rtol=SCALE_BOUND, atol=0):
        return False
    differing = (out[0].view(torch.uint8) != expected[0].view(torch.uint8)).sum()
    if differing > max(3, share * out[0].numel()):
        return False
    is_small = out[0].numel() < MANY_VALUES
    return is_small or norm_error(dequantised(*out), dequantised(*expected)) < bound


@runs
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), DENSE)
def test_linear_error_is_that_of_two_roundings(m, n, k, has_bias, has_residual) -> None:
    *product, bias = dense_inputs(m, n, k)
    options = {
        "bias": bias if has_bias else None,
        "residual": torch.randn(m, n, device=DEVICE).bfloat16() if has_residual else None,
    }
    out = deepgemm.linear_fp8(*product, **options)
    expected = reference.linear_fp8(*product, **options, dtype=torch.float32)
    assert norm_error(out, expected) < LINEAR_BOUND
    for name in options:
        if options[name] is not None:
            without = deepgemm.linear_fp8(*product, **{**options, name: None})
            assert norm_error(without, expected) > 10 * LINEAR_BOUND


@runs
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_grouped_linear_error_is_that_of_two_roundings(rows, n, k) -> None:
    inputs = random_inputs(rows, n, k)
    out = deepgemm.grouped_linear_fp8(*inputs)
    assert norm_error(out, reference.grouped_linear_fp8(*inputs)) < LINEAR_BOUND
    # A bias of another expert, or the product of one, must show.
    wrong = reference.grouped_linear_fp8(*[*inputs[:5], inputs[5].roll(1, 1)])
    assert norm_error(out, wrong) > 10 * LINEAR_BOUND


@runs
@pytest.mark.parametrize(("inner", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_swiglu_is_that_of_a_rounded_product(rows, inner, k) -> None:
    inputs = random_inputs(rows, 2 * inner, k)
    out = deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
    assert out[1].stride() == empty_scale(len(out[0]), inner, DEVICE).stride()
    assert is_close(out, of_rounded_product(inputs), SAME_BOUND, SAME_SHARE)
    function = reference.grouped_swiglu_fp8(*inputs, **SWIGLU)
    assert is_close(out, function, ROUNDED_BOUND, ROUNDED_SHARE)
    for wrong in wrong_functions(inputs):
        assert not is_close(out, wrong, ROUNDED_BOUND, ROUNDED_SHARE)


@pytest.mark.parametrize(("inner", "k"), SHAPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_rounding_the_product_is_within_its_bound_and_a_mistake_is_not(rows, inner, k) -> None:
    """The bounds above, without a GPU: of sums disturbed as the library's are."""
    inputs = random_inputs(rows, 2 * inner, k, "cpu")
    same = of_rounded_product(inputs)
    function = reference.grouped_swiglu_fp8(*inputs, **SWIGLU)
    out = of_rounded_product(inputs, disturbance=3e-4)
    assert is_close(out, same, SAME_BOUND, SAME_SHARE)
    assert is_close(out, function, ROUNDED_BOUND, ROUNDED_SHARE)
    for wrong in wrong_functions(inputs):
        assert not is_close(out, wrong, ROUNDED_BOUND, ROUNDED_SHARE)


def wrong_functions(inputs: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a slightly wrong curve, and of another column's bias."""
    other_bias = [*inputs[:5], inputs[5].roll(2, 1)]
    return [
        reference.grouped_swiglu_fp8(*inputs, **{**SWIGLU, "alpha": 1.65}),
        reference.grouped_swiglu_fp8(*other_bias, **SWIGLU),
    ]


@runs
def test_a_scale_with_more_room_between_its_columns_gives_the_same() -> None:
    x, x_scale, *others = dense_inputs(5, 320, 2880)
    roomy = empty_scale(64, 2880, DEVICE).fill_(torch.nan)[:5]
    roomy.copy_(x_scale)
    assert roomy.stride() != x_scale.stride()
    expected = deepgemm.linear_fp8(*[x, x_scale, *others])
    assert torch.equal(deepgemm.linear_fp8(*[x, roomy, *others]), expected)


@runs
def test_one_nan_makes_its_group_nan_and_no_other() -> None:
    inputs = random_inputs((3, 2, 0, 0, 0, 0), 2 * 320, 2880)
    inputs[5][1, 2 * 130] = torch.nan  # the gate of column 130 of the second expert
    values, scale = deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
    expected = torch.zeros(5, 320, dtype=torch.bool, device=DEVICE)
    expected[3:, 128:256] = True
    assert torch.equal(dequantised(values, scale).isnan(), expected)


@on_gpu
def test_a_graph_follows_the_offsets_that_change_on_the_device() -> None:
    rows, others = (5, 0, 130, 0, 0, 0), (0, 134, 0, 0, 0, 1)
    inputs = random_inputs(rows, 2 * 64, 144)
    deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scale = deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
    inputs[2].copy_(torch.tensor([0, *accumulate(others)], dtype=torch.int32))
    graph.replay()
    expected = of_rounded_product(inputs)
    assert is_close((values, scale), expected, SAME_BOUND, SAME_SHARE)


@runs
def test_no_rows() -> None:
    inputs = random_inputs((0, 0), 2 * 64, 144)
    values, scale = deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
    assert (values.shape, scale.shape) == ((0, 64), (0, 1))
    assert deepgemm.grouped_linear_fp8(*inputs).shape == (0, 128)
    assert deepgemm.linear_fp8(*dense_inputs(0, 64, 144)).shape == (0, 64)


@pytest.mark.parametrize("group", [64, 32])
def test_another_group_is_refused(group, stand_in) -> None:
    inputs = random_inputs((2,), 2 * 64, 144, "cpu")
    with pytest.raises(ValueError, match=f"group must be 128 with DeepGEMM, got {group}"):
        deepgemm.grouped_swiglu_fp8(*inputs, **{**SWIGLU, "group": group})


@pytest.mark.skipif(INTERPRETED, reason="the stand-in takes tensors on the CPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda: deepgemm.linear_fp8(*dense_inputs(2, 64, 144, "cpu")),
        lambda: deepgemm.grouped_linear_fp8(*random_inputs((2,), 64, 144, "cpu")),
        lambda: deepgemm.grouped_swiglu_fp8(*random_inputs((2,), 64, 144, "cpu"), **SWIGLU),
    ],
)
def test_tensors_on_the_cpu_are_refused(call) -> None:
    with pytest.raises(ValueError, match="x must be on a GPU, got cpu"):
        call()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({3: lambda weight: weight[:, :, :128]}, "must agree in K"),
        ({5: lambda bias: bias.bfloat16()}, "bias must be torch.float32, got torch.bfloat16"),
        ({4: lambda scale: scale[:, :1]}, r"weight_scale must be \[2, 2, 2\], got \[2, 1, 2\]"),
        ({2: lambda starts: starts.long()}, "expert_start must be torch.int32"),
        ({1: lambda scale: scale.contiguous()}, "x_scale must be stored by column"),
    ],
)
def test_bad_tensors_are_refused_before_the_library_is_needed(
    change, sentence, monkeypatch
) -> None:
    monkeypatch.setattr(deepgemm.contracts, "check_gpu", lambda x: None)
    monkeypatch.setattr(deepgemm, "library", partial(pytest.fail, "the library was asked for"))
    inputs = random_inputs((3, 2), 2 * 80, 144, "cpu")
    for index, make in change.items():
        inputs[index] = make(inputs[index])
    for call in (
        deepgemm.grouped_linear_fp8,
        partial(deepgemm.grouped_swiglu_fp8, **SWIGLU),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(*inputs)


def test_a_missing_library_is_named_with_how_to_install_it(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(deepgemm.importlib, "import_module", missing)
    with pytest.raises(DeepGemmError, match=r'pip install "gptoss-backend\[deepgemm\]"'):
        library.__wrapped__()


@pytest.mark.parametrize(
    "rows", [(1,), (0, 1, 0), (128,), (129, 0), (1,) * 7, (127, 128, 129), (2, 0, 500)], ids=str
)
def test_padded_rows_hold_any_layout(rows) -> None:
    needed = sum(-(-own // 128) * 128 for own in rows)
    assert needed <= padded_rows(sum(rows), len(rows), 128) <= needed + 128 * len(rows)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
def test_what_is_around_the_products_compiles_for_hopper_without_spills(
    tmp_path, stand_in, monkeypatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(StandIn, "m_grouped_fp8_gemm_nt_contiguous", lambda *operands: None)
    inputs = random_inputs((2, 0, 6), 2 * 2880, 2880, "cpu")
    dense = dense_inputs(2, 320, 2880, "cpu")
    with compiling_for(90) as compiled:
        deepgemm.grouped_swiglu_fp8(*inputs, **SWIGLU)
        deepgemm.grouped_linear_fp8(*inputs)
        deepgemm.linear_fp8(*dense, residual=torch.zeros(2, 320).bfloat16())
    assert len(compiled) == 5  # rows are filled up before each of the two
    for kernel in compiled:
        assert (kernel.stack_bytes, kernel.local_bytes) == (0, 0), kernel.name


@pytest.mark.skipif(INTERPRETED, reason="would start itself")
def test_the_interpreter_agrees() -> None:
    """The tests above, in a process that interprets what they launch beside the stand-in."""
    interpret(__file__)
