"""The FP8 function of the reference operators, against float64 on the same quantised numbers.

As in test_reference.py, a bound comes with wrong twins that exceed it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.fp8 import E4M3, Fp8Weight, num_blocks
from gptoss_kernels.mxfp4 import Mxfp4Weight, block_scale, dequantise
from gptoss_kernels.testing import rel_error

from ..numbers import MAGNITUDES, by_block, by_group, nearest, same_bytes

BOUND = 2e-6  # up to 45 sums of groups, each scaled and added in fp32
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
AnyWeight = Tensor | Fp8Weight | Mxfp4Weight
GROUPS = pytest.mark.parametrize("group", [128, 64])


def random(*shape: int, seed: int = 0, std: float = 1.0, dtype=torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(dtype)


def e4m3(*shape: int, seed: int = 0) -> Tensor:
    return (random(*shape, seed=seed) * 60).clamp(-448, 448).to(E4M3)


def scales(*shape: int, seed: int = 0) -> Tensor:
    """Of one size on the whole, but no two alike."""
    return random(*shape, seed=seed).exp() / 64


# --- quantise ---


@GROUPS
@pytest.mark.parametrize("columns", [1, 63, 64, 128, 129, 1088, 2880])
@DTYPES
def test_quantise_is_the_formula(group: int, columns: int, dtype: torch.dtype):
    x = random(5, columns, dtype=dtype) * random(5, columns, seed=1).exp().to(dtype)
    values, scale = reference.quantise(x, group)
    assert (values.dtype, scale.dtype) == (E4M3, torch.float32)
    assert values.is_contiguous()
    amax = torch.stack([part.abs().amax(1) for part in x.float().split(group, 1)], 1)
    assert torch.equal(scale, amax * torch.tensor(1 / 448))
    factor = by_group(torch.tensor(448.0) / amax, columns, group).float()
    assert same_bytes(values, nearest((x.float() * factor).clamp(-448, 448)))
    # Half of the last of four bits, or of the least number; a group's largest becomes 448.
    spread = by_group(scale, columns, group)
    error = (values.double() * spread - x.double()).abs()
    assert (error <= x.double().abs() / 16 + spread * 2.0**-10).all()
    largest = [part.float().abs().amax(1) for part in values.float().split(group, 1)]
    assert all((part == 448).all() for part in largest)


def test_quantise_breaks_ties_to_even():
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    x = torch.cat((middles, torch.tensor([448.0, 0.0])))[None].float()  # 128 wide: factor 1
    values, scale = reference.quantise(torch.cat((x, -x)))
    even = [byte + byte % 2 for byte in range(126)]
    assert values.view(torch.uint8)[0].tolist() == [*even, 126, 0]
    assert values.view(torch.uint8)[1].tolist() == [128 + byte for byte in (*even, 126, 0)]
    assert scale.tolist() == [[1.0], [1.0]]


@DTYPES
def test_quantise_saturates_nothing(dtype: torch.dtype):
    """Every exponent and 2048 mantissas (bf16: all) of a group's largest, and its neighbours."""
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(0, 2**23, (2048,), generator=generator, dtype=torch.int32)
    mantissas[:2] = torch.tensor([0, 2**23 - 1])
    exponents = torch.arange(94, 255, dtype=torch.int32)  # from 2^-33, below LEAST_AMAX
    amax = (exponents[:, None] * 2**23 + mantissas).view(torch.float32).flatten()
    amax = amax.to(dtype).float()
    amax = amax[(amax >= 1e-10) & amax.isfinite()]
    below = (amax.view(torch.int32) - 1).view(torch.float32)
    x = torch.stack((amax, -amax, below, -below), 1).to(dtype)
    values, scale = reference.quantise(x)
    assert values.float().abs().eq(448).all()  # a NaN is what lies beyond
    assert scale.isfinite().all()
    assert (scale >= 2.0**-126).all()
    assert ((values.double() * scale - x.double()).abs() <= x.double().abs() * 1e-2).all()
    # Before it is rounded nothing comes near 464, from where it would be NaN.
    assert (x.float() * (448 / amax)[:, None]).abs().max() < 448.001


def test_quantise_of_zeros_and_tiny_numbers():
    x = torch.zeros(1, 128 * 6)
    x[0, 129], x[0, 130] = reference.LEAST_AMAX / 448, -1e-44  # one, and nothing
    x[0, 300] = reference.LEAST_AMAX  # the largest there is
    x[0, 400] = -0.0
    x[0, 600], x[0, 700] = 1e-44, 2.0**-126
    values, scale = reference.quantise(x)
    assert scale.tolist() == [[pytest.approx(reference.LEAST_AMAX / 448)] * 6]
    assert (scale >= 2.0**-126).all()
    assert values.float().nonzero()[:, 1].tolist() == [129, 300]
    assert values.float()[0, [129, 300]].tolist() == [1, 448]
    assert values.view(torch.uint8)[0, [130, 400]].tolist() == [128, 128]


@DTYPES
@GROUPS
def test_quantise_of_huge_numbers(dtype: torch.dtype, group: int):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest / 2, largest / 448, 1.0]], dtype=dtype)
    values, scale = reference.quantise(x, group)
    assert values.float().tolist() == [[448, -224, 1, 0]]
    assert scale.tolist() == [[pytest.approx(largest / 448)]]


@GROUPS
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_quantise_of_what_is_not_finite(group: int, bad: float):
    """Its whole group dequantises to NaN, and nothing else does."""
    x = random(3, 5 * group)
    clean = reference.quantise(x, group)
    x[1, group + 7] = bad
    values, scale = reference.quantise(x, group)
    dequantised = values.float() * by_group(scale, 5 * group, group)
    is_bad = torch.zeros(3, 5 * group, dtype=torch.bool)
    is_bad[1, group : 2 * group] = True
    assert torch.equal(dequantised.isnan(), is_bad)
    assert same_bytes(values[~is_bad], clean[0][~is_bad])
    assert torch.equal(scale[~is_bad[:, ::group]], clean[1][~is_bad[:, ::group]])


@GROUPS
@DTYPES
def test_quantise_of_a_row_depends_on_no_other(group: int, dtype: torch.dtype):
    x = random(33, 1088, dtype=dtype)
    values, scale = reference.quantise(x, group)
    for row in range(33):
        alone = reference.quantise(x[row : row + 1], group)
        assert same_bytes(alone[0], values[row : row + 1])
        assert torch.equal(alone[1], scale[row : row + 1])


@GROUPS
def test_quantise_of_no_tokens(group: int):
    values, scale = reference.quantise(torch.empty(0, 320), group)
    assert (values.shape, scale.shape) == ((0, 320), (0, -(-320 // group)))
    assert values.dtype == E4M3


# --- linear_fp8 ---


@dataclass(frozen=True)
class Linear:
    """Inputs of one product, and the formula over them."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor

    @classmethod
    def random(cls, tokens: int, rows: int, columns: int, group: int = 128) -> "Linear":
        return cls(
            e4m3(tokens, columns),
            scales(tokens, -(-columns // group), seed=1),
            e4m3(rows, columns, seed=2),
            scales(num_blocks(rows), num_blocks(columns), seed=3),
            random(rows, seed=4, std=10.0),
        )

    def operator(self, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs = (self.x, self.x_scale, self.weight, self.weight_scale, self.bias)
        return reference.linear_fp8(*inputs, dtype=dtype)

    def formula(self, group: int = 128) -> Tensor:
        x = self.x.double() * by_group(self.x_scale, self.x.shape[1], group)
        weight = self.weight.double() * by_block(self.weight_scale, tuple(self.weight.shape))
        return x @ weight.T + self.bias.double()


SHAPES = [(1, 1, 1), (3, 136, 192), (2, 320, 320), (5, 129, 1088), (2, 4100, 64)]


@GROUPS
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES)
def test_linear_fp8(group: int, tokens: int, rows: int, columns: int):
    case = Linear.random(tokens, rows, columns, group)
    out = case.operator()
    assert out.dtype == torch.float32
    assert rel_error(out, case.formula(group)) < BOUND
    assert torch.equal(case.operator(torch.bfloat16), out.bfloat16())


@GROUPS
def test_linear_fp8_at_the_model_size(group: int):
    case = Linear.random(2, 2880, 2880, group)
    assert rel_error(case.operator(), case.formula(group)) < BOUND


def test_wrong_arithmetic_exceeds_the_bound():
    """Ragged both ways, 2.06 x 2.5 blocks: where a last half block tempts to a mistake."""
    case = Linear.random(3, 264, 320, 128)
    exact = case.formula()
    ragged_rows, ragged_columns = case.weight_scale.clone(), case.weight_scale.clone()
    ragged_rows[2], ragged_columns[:, 2] = case.weight_scale[1], case.weight_scale[:, 1]
    one_block, one_group, one_bias = (
        tensor.clone() for tensor in (case.weight_scale, case.x_scale, case.bias)
    )
    one_block[1, 0], one_group[0, 2], one_bias[7] = case.weight_scale[1, 1], case.x_scale[0, 1], 0
    for wrong in (
        replace(case, bias=torch.zeros_like(case.bias)),
        replace(case, bias=one_bias),
        replace(case, weight_scale=ragged_rows),
        replace(case, weight_scale=ragged_columns),
        replace(case, weight_scale=one_block),
        replace(case, x_scale=one_group),
        replace(case, x_scale=case.x_scale.flip(0)),
    ):
        assert rel_error(wrong.formula(), exact) > 0.01
        assert rel_error(wrong.operator(), exact) > 0.01


def test_groups_of_64_read_as_128_exceed_the_bound():
    case = Linear.random(3, 136, 320, 64)
    as_128 = replace(case, x_scale=case.x_scale[:, ::2])
    assert rel_error(as_128.operator(), case.formula(64)) > 0.01


@GROUPS
def test_the_sum_of_a_group_is_exact(group: int):
    """Bit for bit what integers of 2^-18 give, whatever the order of a sum."""
    case = Linear.random(7, 2200, 320, group)
    x, weight = ((tensor.double() * 512).long() for tensor in (case.x, case.weight))
    assert torch.equal(x.double() / 512, case.x.double())
    weight_scale = by_block(case.weight_scale, tuple(case.weight.shape)).float()
    expected = case.bias.expand(7, 2200).clone()
    for index, first in enumerate(range(0, 320, group)):
        columns = slice(first, first + group)
        total = (x[:, None, columns] * weight[:, columns]).sum(-1).double() / 2**18
        expected += total.float() * (case.x_scale[:, index, None] * weight_scale[:, first])
    assert torch.equal(case.operator(), expected)


@GROUPS
@DTYPES
def test_linear_fp8_of_a_row_depends_on_no_other(group: int, dtype: torch.dtype):
    case = Linear.random(33, 136, 320, group)
    batch = case.operator(dtype)
    for row in range(33):
        part = slice(row, row + 1)
        alone = replace(case, x=case.x[part], x_scale=case.x_scale[part]).operator(dtype)
        assert torch.equal(alone, batch[part])
    few = replace(case, x=case.x[5:14], x_scale=case.x_scale[5:14]).operator(dtype)
    assert torch.equal(few, batch[5:14])


def test_linear_fp8_of_no_tokens_and_without_a_bias():
    case = Linear.random(3, 136, 192)
    empty = replace(case, x=case.x[:0], x_scale=case.x_scale[:0])
    assert empty.operator().shape == (0, 136)
    inputs = (case.x, case.x_scale, case.weight, case.weight_scale)
    without = replace(case, bias=torch.zeros(136)).operator(torch.bfloat16)
    assert torch.equal(reference.linear_fp8(*inputs), without)  # bf16 unless told otherwise


def test_a_group_that_is_not_a_number_spoils_its_row_alone():
    case = Linear.random(3, 136, 320)
    x = random(3, 320)
    clean = replace(case, x=reference.quantise(x)[0], x_scale=reference.quantise(x)[1]).operator()
    x[1, 300] = torch.inf
    values, scale = reference.quantise(x)
    out = replace(case, x=values, x_scale=scale).operator()
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@DTYPES
def test_linear_takes_an_fp8_weight(dtype: torch.dtype):
    case, x = Linear.random(3, 136, 320), random(3, 320, dtype=dtype)
    out = reference.linear(x, Fp8Weight(case.weight, case.weight_scale), case.bias)
    values, scale = reference.quantise(x)
    assert torch.equal(out, replace(case, x=values, x_scale=scale).operator(dtype))
    weight = case.weight.double() * by_block(case.weight_scale, (136, 320))
    exact = x.double() @ weight.T + case.bias.double()
    # What quantising the activations costs: half of the last of four bits, on average a quarter.
    error = (out.double() - exact).norm() / exact.norm()
    assert 1e-3 < error < 4e-2


@pytest.mark.gpu
@GROUPS
@DTYPES
def test_a_gpu_gives_the_same_bits(group: int, dtype: torch.dtype):
    case = Linear.random(7, 2200, 2880, group)
    x = random(7, 2880, dtype=dtype)
    x[1, 5], x[2, 700], x[3] = torch.inf, torch.nan, 0.0
    values, scale = reference.quantise(x, group)
    on_gpu = reference.quantise(x.cuda(), group)
    assert torch.equal(on_gpu[1].cpu().nan_to_num(-1), scale.nan_to_num(-1))
    is_number = ~values.float().isnan()
    assert torch.equal(on_gpu[0].cpu().float().isnan(), ~is_number)
    assert same_bytes(on_gpu[0].cpu()[is_number], values[is_number])
    inputs = (case.x, case.x_scale, case.weight, case.weight_scale, case.bias)
    out = reference.linear_fp8(*(tensor.cuda() for tensor in inputs), dtype=dtype)
    assert torch.equal(out.cpu(), case.operator(dtype))


# --- one group of rows an expert ---

# Rows of each of four experts: uneven, an expert without a row at either end, all for one, none.
COUNTS = {
    "uneven": [3, 1, 0, 5],
    "none at the ends": [0, 2, 1, 0],
    "one": [0, 0, 9, 0],
    "nothing": [0] * 4,
}
EVERY_COUNT = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class Grouped:
    """Four experts' products over rows that lie together, and the formula over them."""

    counts: list[int]
    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    group: int

    @classmethod
    def random(cls, counts: list[int], rows: int, columns: int, group: int) -> "Grouped":
        tokens = sum(counts)
        # Products of a size that SwiGLU's clamps and its curve both meet.
        return cls(
            counts,
            e4m3(tokens, columns),
            scales(tokens, -(-columns // group), seed=1) / 64,
            e4m3(4, rows, columns, seed=2),
            scales(4, num_blocks(rows), num_blocks(columns), seed=3) / 4,
            random(4, rows, seed=4, std=2.0),
            group,
        )

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        start = torch.tensor([sum(self.counts[:expert]) for expert in range(5)])
        return self.x, self.x_scale, start, self.weight, self.weight_scale, self.bias

    def formula(self) -> Tensor:
        out = torch.empty(len(self.x), self.weight.shape[1], dtype=torch.float64)
        for expert, (first, end) in enumerate(pairwise(self.inputs[2].tolist())):
            rows, case = slice(first, end), (self.weight, self.weight_scale, self.bias)
            case = Linear(self.x[rows], self.x_scale[rows], *(part[expert] for part in case))
            out[rows] = case.formula(self.group)
        return out

    def mistakes(self) -> list["Grouped"]:
        """The next expert's weight, scale or bias; one row for the wrong expert."""
        moved = list(self.counts)
        giver = next(expert for expert, count in enumerate(moved) if count)
        moved[giver] -= 1
        moved[(giver + 1) % 4] += 1
        return [
            replace(self, weight=self.weight.roll(1, 0)),
            replace(self, weight_scale=self.weight_scale.roll(1, 0)),
            replace(self, bias=self.bias.roll(1, 0)),
            replace(self, counts=moved),
        ]


def swiglu_formula(x: Tensor) -> Tensor:
    gate, up = x.double()[:, 0::2].clamp(max=LIMIT), x.double()[:, 1::2].clamp(-LIMIT, LIMIT)
    return gate / (1 + (-ALPHA * gate).exp()) * (up + 1)


@GROUPS
@EVERY_COUNT
def test_grouped_linear_fp8(counts: list[int], group: int):
    case = Grouped.random(counts, 136, 192, group)
    out = reference.grouped_linear_fp8(*case.inputs, dtype=torch.float32)
    assert rel_error(out, case.formula()) < BOUND
    assert torch.equal(reference.grouped_linear_fp8(*case.inputs), out.bfloat16())
    for wrong in case.mistakes() if counts != COUNTS["nothing"] else []:
        assert rel_error(wrong.formula(), case.formula()) > 0.01


@GROUPS
@EVERY_COUNT
def test_grouped_swiglu_fp8(counts: list[int], group: int):
    """Within what quantising costs: half of the last of four bits, or of the least number."""
    case = Grouped.random(counts, 2 * 136, 192, group=128)
    values, scale = reference.grouped_swiglu_fp8(
        *case.inputs, alpha=ALPHA, limit=LIMIT, group=group
    )
    assert (values.dtype, values.shape) == (E4M3, (sum(counts), 136))
    assert (scale.dtype, scale.shape) == (torch.float32, (sum(counts), -(-136 // group)))
    exact = swiglu_formula(case.formula())
    for index, of_group in enumerate(exact.split(group, dim=1)):
        assert torch.allclose(scale[:, index].double() * 448, of_group.abs().amax(1), rtol=1e-5)
    spread = by_group(scale, 136, group)

    def exceeds(out: Tensor) -> bool:
        allowed = out.abs() * (1 / 16 + 1e-5) + spread * 2.0**-10
        return bool(((values.double() * spread - out).abs() > allowed).any())

    assert not exceeds(exact)
    for wrong in case.mistakes() if counts != COUNTS["nothing"] else []:
        assert exceeds(swiglu_formula(wrong.formula()))


def test_what_grouped_swiglu_fp8_is_made_of():
    """Quantised is what fp32 holds, never rounded to bf16 before; in groups of 128 unless told."""
    case = Grouped.random([9, 0, 0, 0], 2 * 136, 192, group=128)
    expected = reference.grouped_swiglu_fp8(*case.inputs, alpha=ALPHA, limit=LIMIT)
    inner = Linear(case.x, case.x_scale, case.weight[0], case.weight_scale[0], case.bias[0])
    for dtype in (torch.float32, torch.bfloat16):
        product = reference.swiglu(inner.operator(dtype), ALPHA, LIMIT)
        values, scale = reference.quantise(product, 128)
        is_equal = torch.equal(scale, expected[1])
        assert is_equal == (dtype == torch.float32)
        assert same_bytes(values, expected[0]) == is_equal


# --- experts ---


class Mixture:
    """Five MXFP4 experts of width 160 over 288 columns (ragged blocks), three chosen a token."""

    def __init__(self, num_tokens: int, dtype: torch.dtype = torch.float32) -> None:
        self.x = random(num_tokens, 288, dtype=dtype)
        self.chosen = torch.stack([(torch.arange(3) * (t % 2 + 1) + t) % 5 for t in range(9)])
        self.chosen = self.chosen[:num_tokens]
        self.chosen_weights = random(num_tokens, 3, seed=1).softmax(-1).to(dtype)
        self.w13 = self._mxfp4(320, 288, 2)
        self.w2 = self._mxfp4(288, 160, 3)
        self.w13_bias = random(5, 320, seed=4, dtype=dtype)
        self.w2_bias = random(5, 288, seed=5, std=0.3, dtype=dtype)

    def _mxfp4(self, rows: int, columns: int, seed: int) -> Mxfp4Weight:
        generator = torch.Generator().manual_seed(seed)
        shape = (5, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        groups = torch.randint(117, 123, shape, generator=generator, dtype=torch.uint8)
        groups -= (torch.arange(columns // 32) // 4 % 2 * 2).to(torch.uint8)  # no two blocks alike
        block = [block_scale(*expert) for expert in zip(blocks, groups, strict=True)]
        return Mxfp4Weight(blocks, groups, torch.stack(block))

    def operator(
        self, form: Callable[[Mxfp4Weight], AnyWeight], rows: slice = slice(None)
    ) -> Tensor:
        mixture = reference.experts(
            *(self.x[rows], self.chosen[rows], self.chosen_weights[rows]),
            *(form(self.w13), self.w13_bias, form(self.w2), self.w2_bias),
            swiglu_alpha=ALPHA,
            swiglu_limit=LIMIT,
        )
        return reference.combine(*mixture)


def as_it_is(weight: Mxfp4Weight) -> Mxfp4Weight:
    return weight


def in_fp8(weight: Mxfp4Weight) -> Fp8Weight:
    experts = [weight[expert].widen() for expert in range(5)]
    values = torch.stack([expert.values for expert in experts])
    return Fp8Weight(values, torch.stack([expert.scale for expert in experts]))


def with_the_neighbours_scale(weight: Mxfp4Weight) -> Fp8Weight:
    return replace(in_fp8(weight), scale=weight.block_scale.roll(1, -1))


FORMS = pytest.mark.parametrize("form", [as_it_is, in_fp8])


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_experts_in_fp8_and_in_mxfp4_are_identical(dtype: torch.dtype, num_tokens: int):
    mixture = Mixture(num_tokens, dtype)
    out = mixture.operator(as_it_is)
    assert out.dtype == dtype
    assert torch.equal(out, mixture.operator(in_fp8))


@DTYPES
def test_experts_lose_what_quantised_activations_lose(dtype: torch.dtype):
    """Twice a relative 2.6 %: e4m3's rounding before each product. The weights lose nothing."""
    mixture = Mixture(9, dtype)
    exact = mixture.operator(lambda weight: dequantise(weight.blocks, weight.scales, dtype))

    def error(out: Tensor) -> float:
        return float((out.double() - exact.double()).norm() / exact.double().norm())

    assert 0.01 < error(mixture.operator(in_fp8)) < 0.04
    assert error(mixture.operator(with_the_neighbours_scale)) > 0.08


@DTYPES
@FORMS
def test_experts_of_a_token_depend_on_no_other(form, dtype: torch.dtype):
    mixture = Mixture(9, dtype)
    batch = mixture.operator(form)
    for token in range(9):
        rows = slice(token, token + 1)
        assert torch.equal(mixture.operator(form, rows), batch[rows])
    assert torch.equal(mixture.operator(form, slice(2, 7)), batch[2:7])


def test_experts_are_the_grouped_operators():
    """What the CPU computes expert by expert is what the GPU computes in one launch."""
    mixture = Mixture(9)
    order = mixture.chosen.flatten().argsort(stable=True)
    start = torch.searchsorted(mixture.chosen.flatten()[order], torch.arange(6))
    w13, w2 = in_fp8(mixture.w13), in_fp8(mixture.w2)
    values, scale = reference.quantise(mixture.x)
    inner = reference.grouped_swiglu_fp8(
        *(values[order // 3], scale[order // 3], start),
        *(w13.values, w13.scale, mixture.w13_bias),
        alpha=ALPHA,
        limit=LIMIT,
    )
    parts = reference.grouped_linear_fp8(
        *inner, start, w2.values, w2.scale, mixture.w2_bias, dtype=torch.float32
    )
    outputs = torch.empty_like(parts)
    outputs[order] = parts
    out = (outputs.view(9, 3, 288) * mixture.chosen_weights[..., None]).sum(1)
    assert torch.equal(out, mixture.operator(in_fp8))
