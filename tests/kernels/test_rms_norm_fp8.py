"""rms_norm and rms_norm_fp8 in CUDA C++ against float64 and the reference; bad input.

The order of a sum of squares is free, so a norm may be rounded to the neighbouring bf16 where it
lies between two; all else is exact.
"""

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Mixture, empty_scale
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm, rms_norm_fp8
from gptoss_kernels.cuda.rows import RowLayout

EPS = 1e-5
# Of the values, those rounded the other way: fp32's error of some 2^-22 over half a step of 2^-9.
SHARE = 1e-3
LAYOUTS = tuple(
    RowLayout.of(2880, vectors, threads)
    for vectors, threads in ((1, 0), (2, 0), (3, 128), (4, 256), (6, 256), (12, 128), (12, 512))
)


def random_inputs(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, update; rows and columns of many sizes."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    # First: a norm reads its weight while the last kernel before it may still run.
    weight = normal(columns).exp()
    hidden = (normal(rows, columns) * normal(rows, 1).mul(3).exp() * 10).bfloat16()
    update = (normal(rows, columns) * normal(rows, 1).exp() * 10).bfloat16()
    return hidden, weight, update


def poisoned(rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, device="cuda", dtype=torch.bfloat16)


def poisoned_fp8(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), 0x7F, device="cuda", dtype=torch.uint8)
    return values.view(torch.float8_e4m3fn), empty_scale(rows, columns, "cuda").fill_(torch.nan)


def exact_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    x = hidden.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def order(values: Tensor) -> Tensor:
    """Integers in the order of the bf16, neighbours one apart."""
    bits = values.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def share_of_other_rounding(out: Tensor, exact: Tensor) -> float:
    """inf if a value is missing, or more than one bf16 away."""
    steps = (order(out) - order(exact.to(torch.bfloat16))).abs()
    if not out.isfinite().all() or int(steps.max()) > 1:
        return float("inf")
    return float((steps > 0).double().mean())


def same_fp8(out: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(out[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(
        out[1], expected[1]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("has_update", [False, True])
@pytest.mark.parametrize("columns", [16, 64, 320, 1088, 2880, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 127, 300, 2051])
def test_norm_of_the_updated_residual(rows: int, columns: int, has_update: bool) -> None:
    hidden, weight, update = random_inputs(rows, columns, seed=rows + columns)
    residual = hidden + update if has_update else hidden.clone()
    fp8_hidden = hidden.clone()
    given = update if has_update else None
    out = rms_norm(hidden, weight, EPS, given, out=poisoned(rows, columns))
    assert torch.equal(hidden, residual)
    assert share_of_other_rounding(out, exact_norm(residual, weight)) <= max(SHARE, 3 / out.numel())
    quantised = rms_norm_fp8(fp8_hidden, weight, EPS, given, out=poisoned_fp8(rows, columns))
    assert torch.equal(fp8_hidden, residual)
    assert same_fp8(quantised, reference.quantise(out))


def random_mixture(tokens: int, columns: int, num_chosen: int) -> Mixture:
    generator = torch.Generator(device="cuda").manual_seed(tokens + num_chosen)
    outputs = torch.empty(tokens * num_chosen, columns, device="cuda", dtype=torch.bfloat16)
    outputs.normal_(generator=generator)
    rows = torch.randperm(len(outputs), device="cuda", generator=generator).int()
    weights = torch.rand(tokens, num_chosen, device="cuda", generator=generator).bfloat16()
    return Mixture(outputs, rows.view(tokens, num_chosen), weights)


@pytest.mark.gpu
@pytest.mark.parametrize("num_chosen", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [16, 320, 2880, 8192])
@pytest.mark.parametrize("rows", [1, 3, 127, 300, 2051])
def test_norm_of_what_experts_gave(rows: int, columns: int, num_chosen: int) -> None:
    hidden, weight, _ = random_inputs(rows, columns, seed=rows)
    mixture = random_mixture(rows, columns, num_chosen)
    total = combine(*mixture, residual=hidden)
    assert torch.equal(
        total.cpu(),
        reference.combine(*(x.cpu() for x in mixture), residual=hidden.cpu()),
    )
    expected = rms_norm(total, weight, EPS)
    fp8_hidden = hidden.clone()
    torch.cuda.synchronize()  # a norm reads all but the outputs early
    out = rms_norm(hidden, weight, EPS, mixture, out=poisoned(rows, columns))
    assert torch.equal(hidden, total)
    assert torch.equal(out, expected)
    quantised = rms_norm_fp8(fp8_hidden, weight, EPS, mixture, out=poisoned_fp8(rows, columns))
    assert torch.equal(fp8_hidden, total)
    assert same_fp8(quantised, reference.quantise(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 2000])
def test_a_row_of_a_mixture_that_is_none_makes_its_token_nan(rows: int) -> None:
    hidden, weight, _ = random_inputs(rows, 2880)
    expected_hidden = hidden.clone()
    mixture = random_mixture(rows, 2880, 4)
    torch.cuda.synchronize()  # a norm reads all but the outputs early
    expected = rms_norm(expected_hidden, weight, EPS, mixture)
    mixture.rows[1, 2] = len(mixture.outputs)
    torch.cuda.synchronize()
    out = rms_norm(hidden, weight, EPS, mixture, out=poisoned(rows, 2880))
    others = torch.arange(rows, device="cuda") != 1
    assert torch.equal(out[others], expected[others])
    assert torch.equal(hidden[others], expected_hidden[others])
    assert bool(out[1].isnan().all())
    assert bool(hidden[1].isnan().all())


@pytest.mark.gpu
def test_wrong_arithmetic_exceeds_the_bound() -> None:
    hidden, weight, update = random_inputs(64, 2880)
    residual = hidden + update
    wide = hidden.double() + update.double()
    mean = residual.double().square().mean(-1, keepdim=True)
    for wrong in (
        wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight,  # not rounded before
        residual * (mean * 2880 / 3072 + EPS).rsqrt() * weight,  # of columns that are not there
        residual * (mean + EPS).rsqrt() * weight.roll(8),
        (residual * (mean + EPS).rsqrt()).bfloat16() * weight.double(),  # rounded twice
        exact_norm(hidden, weight),
    ):
        assert share_of_other_rounding(wrong.bfloat16(), exact_norm(residual, weight)) > SHARE


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_layout_changes_a_bit(layout: RowLayout) -> None:
    hidden, weight, update = random_inputs(133, 2880)
    one, other = hidden.clone(), hidden.clone()
    expected = rms_norm(one, weight, EPS, update)
    out = rms_norm(other, weight, EPS, update, out=poisoned(133, 2880), layout=layout)
    assert torch.equal(out, expected)
    assert torch.equal(other, one)
    quantised = rms_norm_fp8(
        hidden, weight, EPS, update, out=poisoned_fp8(133, 2880), layout=layout
    )
    assert same_fp8(quantised, reference.quantise(expected))


@pytest.mark.gpu
def test_a_row_alone_is_the_row_among_many() -> None:
    hidden, weight, _ = random_inputs(3000, 2880)
    out = rms_norm(hidden, weight, EPS)
    for few in (1, 300):
        assert torch.equal(rms_norm(hidden[:few], weight, EPS), out[:few])


@pytest.mark.gpu
def test_zeros_and_rows_that_are_no_numbers() -> None:
    hidden, weight, _ = random_inputs(40, 2880)
    hidden[3] = 0
    hidden[5, 7] = torch.nan
    hidden[8, 2879] = torch.inf
    out = rms_norm(hidden, weight, EPS)
    expected = reference.rms_norm(hidden, weight, EPS)
    assert torch.equal(out.isnan(), expected.isnan())
    assert bool(out[5].isnan().all())
    assert bool((out[3] == 0).all())
    values, scale = rms_norm_fp8(hidden, weight, EPS)
    spread = scale.repeat_interleave(128, 1)[:, :2880]
    # A group with a NaN is NaN as a whole.
    is_nan = torch.nn.functional.pad(out.isnan(), (0, 64)).unflatten(1, (-1, 128)).any(-1)
    is_nan = is_nan.repeat_interleave(128, 1)[:, :2880]
    assert torch.equal((values.float() * spread).isnan(), is_nan)


@pytest.mark.gpu
def test_131072_tokens() -> None:
    hidden, weight, update = random_inputs(131072, 2880)
    residual = hidden + update
    quantised = rms_norm_fp8(hidden, weight, EPS, update, out=poisoned_fp8(131072, 2880))
    assert torch.equal(hidden, residual)
    out = rms_norm(hidden, weight, EPS, out=poisoned(131072, 2880))
    for first in range(0, len(out), 16384):
        rows = slice(first, first + 16384)
        assert share_of_other_rounding(out[rows], exact_norm(hidden[rows], weight)) < SHARE
        assert same_fp8((quantised[0][rows], quantised[1][rows]), reference.quantise(out[rows]))


@pytest.mark.gpu
def test_rows_apart_and_nothing_beside_them_is_written() -> None:
    rows, columns = 67, 2880
    wide, weight, wide_update = random_inputs(rows, columns + 64)
    weight = weight[:columns].clone()
    around_hidden = wide.clone()
    hidden, update = around_hidden[:, 32 : 32 + columns], wide_update[:, :columns]
    around = torch.full((rows + 2, columns + 32), 7.0, device="cuda", dtype=torch.bfloat16)
    out = rms_norm(hidden, weight, EPS, update, out=around[1:-1, 16 : 16 + columns])
    wide[:, 32 : 32 + columns] += update
    assert torch.equal(around_hidden, wide)
    assert torch.equal(out, rms_norm(hidden.contiguous(), weight, EPS))
    out.fill_(7)
    assert bool((around == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 500, 4000])
def test_captured_graph_is_eager(rows: int) -> None:
    hidden, weight, update = random_inputs(rows, 2880, seed=1)
    other, _, other_update = random_inputs(rows, 2880, seed=2)
    out = poisoned_fp8(rows, 2880)
    rms_norm_fp8(hidden, weight, EPS, update, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rms_norm_fp8(hidden, weight, EPS, update, out=out)
    hidden.copy_(other)
    update.copy_(other_update)
    graph.replay()
    assert same_fp8(out, rms_norm_fp8(other, weight, EPS, other_update))
    assert torch.equal(hidden, other)


@pytest.mark.gpu
def test_a_chain_of_layers_waits_for_each_other() -> None:
    hidden, weight, update = random_inputs(200, 2880)
    expected = hidden.clone()
    for _ in range(50):
        expected += update
    for _ in range(50):
        rms_norm_fp8(hidden, weight, EPS, update)
    assert torch.equal(hidden, expected)


@pytest.mark.gpu
def test_no_tokens() -> None:
    hidden, weight, update = random_inputs(0, 320)
    assert rms_norm(hidden, weight, EPS, update).shape == (0, 320)
    values, scale = rms_norm_fp8(hidden, weight, EPS)
    assert (values.shape, scale.shape) == ((0, 320), (0, 3))


def mixture(tokens: int, num_chosen: int = 4) -> Mixture:
    rows = torch.zeros(tokens, num_chosen, dtype=torch.int32)
    return Mixture(torch.zeros(16, 320).bfloat16(), rows, torch.zeros_like(rows).bfloat16())


@pytest.mark.parametrize("operator", [rms_norm, rms_norm_fp8])
@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda hidden: hidden.float(), "hidden must be torch.bfloat16, got torch.float32"),
        (0, lambda hidden: hidden[0], r"hidden must be a matrix with .*, got \[320\]"),
        (0, lambda hidden: hidden[:, :312], r"a multiple of 16 columns, got \[4, 312\]"),
        (0, lambda hidden: hidden.t().contiguous().t(), "hidden must have adjacent columns"),
        (1, lambda weight: weight.bfloat16(), "weight must be torch.float32, got torch.bfloat16"),
        (1, lambda weight: weight[:304], r"weight must be \[320\], got \[304\]"),
        (1, lambda weight: weight.repeat(2)[::2], "weight must be contiguous"),
        (1, lambda weight: weight.repeat(2)[1:321], "weight must start at a multiple of 16 bytes"),
        (2, lambda update: update.float(), "update must be torch.bfloat16, got torch.float32"),
        (2, lambda update: update[:3], r"update must be \[4, 320\], got \[3, 320\]"),
        (
            2,
            lambda update: mixture(4)._replace(rows=mixture(4).rows.long()),
            "rows must be torch.i",
        ),
        (2, lambda update: mixture(3), r"rows must be \[4, 4\], got \[3, 4\]"),
        (2, lambda update: mixture(4)._replace(weights=update), "chosen_weights must be"),
        (2, lambda update: mixture(4, 9), "K must be at most 8, got 9"),
        (0, lambda hidden: hidden, "hidden must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(operator, position: int, change, sentence: str) -> None:
    inputs = [torch.zeros(4, 320).bfloat16(), torch.ones(320), torch.zeros(4, 320).bfloat16()]
    inputs[position] = change(inputs[position])
    hidden, weight, update = inputs
    with pytest.raises(ValueError, match=sentence):
        operator(hidden, weight, EPS, update)
