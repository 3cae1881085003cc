"""FP8 linear of few rows against float64 arithmetic on the same quantised inputs."""

import pytest
import torch

from gptoss_kernels import reference
from gptoss_kernels.cuda.linear_fp8 import MAXIMUM_QUANTISED_ROWS, linear_fp8, quantised_linear_fp8
from gptoss_kernels.cuda.linear_fp8_few import MAXIMUM_ROWS, FewTile, choose_few_tile
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.testing import norm_error

from .emulator import emulated
from .test_linear_fp8 import BOUND, H200_BLOCKS, SERVED_SHAPES, float64, poisoned, random_inputs

# Beyond those that are served: fewer columns than blocks, a last block with fewer rows, ragged K,
# one block of K, less than one, a block of rows in two of the weight's scales.
SHAPES = (
    *SERVED_SHAPES,
    (4096, 2880),
    (2888, 2880),
    (8, 144),
    (136, 272),
    (1048, 128),
    (5112, 80),
    (3000, 4080),
)


def tile_of(m: int, n: int, k: int) -> FewTile:
    """As served, or where linear_fp8.cu is, with the fewest rows of the weight."""
    return choose_few_tile(m, n, k, H200_BLOCKS) or FewTile(k, 8, tokens=-(-m // 8) * 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [*range(1, 10), 15, 16])
def test_error_is_that_of_rounding(m: int, n: int, k: int) -> None:
    inputs = random_inputs(m, n, k, seed=m)
    out = linear_fp8(*inputs, out=poisoned(m, n), tile=tile_of(m, n, k))
    # Of few values, all may be rounded by nearly half a step.
    assert norm_error(out, float64(*inputs)) < (BOUND if m * n > 1000 else 2 * BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2880, 4096), (8, 2880, 4096), (13, 1048, 272)])
def test_residual_is_added_in_place_or_elsewhere(m: int, n: int, k: int, has_bias: bool) -> None:
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, k, m)
    inputs = (x, x_scale, weight, weight_scale, bias if has_bias else None)
    plain = reference.linear_fp8(*inputs, dtype=torch.float32)
    around = (torch.randn(m, n + 64, device="cuda") * plain.std()).bfloat16()
    residual = around[:, 32 : 32 + n]
    tile = tile_of(m, n, k)
    out = linear_fp8(*inputs, residual=residual, out=poisoned(m, n), tile=tile)
    expected = reference.linear_fp8(*inputs, residual=residual, dtype=torch.float32)
    assert norm_error(out, expected.double()) < BOUND
    assert norm_error(out, plain.double()) > BOUND

    in_place = around.clone()
    inner = in_place[:, 32 : 32 + n]
    assert linear_fp8(*inputs, residual=inner, out=inner, tile=tile) is inner
    assert torch.equal(inner, out)
    assert torch.equal(in_place[:, :32], around[:, :32])
    assert torch.equal(in_place[:, 32 + n :], around[:, 32 + n :])


@pytest.mark.gpu
def test_wrong_arithmetic_exceeds_the_bound() -> None:
    m, n, k = 5, 2880, 2880
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, k)
    out = linear_fp8(x, x_scale, weight, weight_scale, bias, tile=tile_of(m, n, k))
    # The last, half block of K with its neighbour's scale; one row's scales; one tile's.
    shifted, other_row, one_scale = x_scale.clone(), x_scale.clone(), weight_scale.clone()
    shifted[:, -1] = x_scale[:, -2]
    other_row[3] = x_scale[2]
    one_scale[3, 5] = weight_scale[3, 6]
    for wrong in (
        (x, x_scale, weight, weight_scale, torch.zeros_like(bias)),
        (x, shifted, weight, weight_scale, bias),
        (x, other_row, weight, weight_scale, bias),
        (x, x_scale, weight, one_scale, bias),
    ):
        assert norm_error(out, float64(*wrong)) > BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 16])
def test_exact_where_the_mathematics_is(m: int) -> None:
    n, k = 640, 512
    x, x_scale, _, _, _ = random_inputs(m, n, k)
    weight = torch.zeros(n, k, device="cuda")
    weight[torch.arange(n), torch.randint(0, k, (n,), device="cuda")] = 1
    x_scale.copy_(torch.exp2(torch.randint(-4, 5, (m, 4), device="cuda").float()))
    weight_scale = torch.exp2(torch.randint(-4, 5, (5, 4), device="cuda").float())
    inputs = (x, x_scale, weight.to(torch.float8_e4m3fn), weight_scale)
    torch.cuda.synchronize()
    out = linear_fp8(*inputs, out=poisoned(m, n), tile=tile_of(m, n, k))
    assert torch.equal(out.double(), float64(*inputs, torch.zeros(n, device="cuda")))


@pytest.mark.gpu
def test_a_row_depends_on_no_other_and_not_on_how_many_there_are() -> None:
    n, k = 5120, 2880
    x, x_scale, *weights = random_inputs(16, n, k)
    together = linear_fp8(x, x_scale, *weights, tile=tile_of(16, n, k))
    for m in (1, 4, 8, 9):
        alone = linear_fp8(x[:m], x_scale[:m], *weights, tile=tile_of(m, n, k))
        assert torch.equal(alone, together[:m])


@pytest.mark.gpu
def test_matrices_in_wider_ones_and_nothing_beside_the_output_is_written() -> None:
    m, n, k = 5, 136, 272
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, k)
    expected = linear_fp8(x, x_scale, weight, weight_scale, bias, tile=tile_of(m, n, k))
    wide_x = torch.full((m, 400), torch.nan, device="cuda").to(torch.float8_e4m3fn)
    wide_weight = torch.full((n, 304), torch.nan, device="cuda").to(torch.float8_e4m3fn)
    wide_x[:, 64:336], wide_weight[:, 16:288] = x, weight
    around = torch.full((m + 20, n + 256), 7.0, device="cuda", dtype=torch.bfloat16)
    out = around[10 : 10 + m, 128 : 128 + n]
    torch.cuda.synchronize()
    given = (wide_x[:, 64:336], x_scale, wide_weight[:, 16:288], weight_scale, bias)
    linear_fp8(*given, out=out, tile=tile_of(m, n, k))
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.gpu
def test_reads_what_the_kernel_before_it_wrote() -> None:
    # The launch overlaps the end of its predecessor, here a slow producer of all that may change.
    m, n, k = 8, 2880, 4096
    x, x_scale, *weights = random_inputs(m, n, k)
    residual = torch.randn(m, n, device="cuda").mul_(1000).bfloat16()
    tile = tile_of(m, n, k)
    expected = linear_fp8(x, x_scale, *weights, residual=residual, tile=tile)
    slow = torch.randn(4096, 4096, device="cuda")
    late = (torch.zeros_like(x), torch.zeros_like(x_scale), torch.zeros_like(residual))
    for _ in range(20):
        for tensor in late:
            tensor.zero_()
        slow = slow @ slow / 64
        for tensor, value in zip(late, (x, x_scale, residual), strict=True):
            tensor.copy_(value)
        out = linear_fp8(*late[:2], *weights, residual=late[2], tile=tile)
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    m, n, k = 4, 2880, 4096
    inputs, others = random_inputs(m, n, k, seed=1), random_inputs(m, n, k, seed=2)
    out, tile = poisoned(m, n), tile_of(m, n, k)
    linear_fp8(*inputs, out=out, tile=tile)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            linear_fp8(*inputs, out=out, tile=tile)
    expected = linear_fp8(*others, tile=tile)
    for mine, other in zip(inputs, others, strict=True):
        mine.copy_(other)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [0, 1, 3, 8, 9, 40])
def test_unquantised_rows_are_quantised_first(m: int, n: int, k: int) -> None:
    _, _, weight, weight_scale, bias = random_inputs(m, n, k)
    x = (torch.randn(m, k, device="cuda").exp() - 2).bfloat16()
    x[:, :64] = 0
    x[1:2, 3:4] = torch.inf
    x[2:3, 70:71] = torch.nan
    residual = torch.randn(m, n, device="cuda").bfloat16()
    torch.cuda.synchronize()
    weights = (weight, weight_scale, bias)
    for added in (None, residual):
        out = quantised_linear_fp8(x, *weights, residual=added, out=poisoned(m, n))
        expected = linear_fp8(*quantise(x), *weights, residual=added)
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert m == 0 or bool(out[0].isfinite().all())
        assert bool(out[1:3].isnan().all())


@pytest.mark.gpu
def test_unquantised_rows_are_read_after_the_kernel_before_wrote_them() -> None:
    m, n, k = 8, 2880, 4096
    _, _, *weights = random_inputs(m, n, k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    expected = quantised_linear_fp8(x, *weights)
    slow, late = torch.randn(4096, 4096, device="cuda"), torch.zeros_like(x)
    for _ in range(20):
        late.zero_()
        slow = slow @ slow / 64
        late.copy_(x)
        assert torch.equal(quantised_linear_fp8(late, *weights), expected)


@pytest.mark.gpu
def test_bad_unquantised_rows_are_refused() -> None:
    x, _, *weights = random_inputs(3, 256, 512)
    bf16 = torch.zeros(3, 512, device="cuda", dtype=torch.bfloat16)
    for bad, sentence in (
        (x, "x must be torch.bfloat16, got torch.float8_e4m3fn"),
        (bf16[:, :496], r"must agree in K, got \[3, 496\] and \[256, 512\]"),
        (bf16.cpu(), "x must be on a GPU"),
        (bf16[:1].expand(3, 512), "rows of their own"),
    ):
        with pytest.raises(ValueError, match=sentence):
            quantised_linear_fp8(bad, *weights)


@pytest.mark.gpu
def test_a_tile_for_others_is_refused() -> None:
    inputs = random_inputs(9, 256, 512)
    for tile in (FewTile(512, 16), FewTile(528, 16, tokens=16), FewTile(512, 136, tokens=16)):
        with pytest.raises(ValueError, match="is not for 9 rows of x and K=512"):
            linear_fp8(*inputs, tile=tile)


@pytest.mark.parametrize(("m", "launches"), [(1, 1), (MAXIMUM_QUANTISED_ROWS, 1), (9, 2)])
def test_few_unquantised_rows_take_one_launch(m: int, launches: int) -> None:
    x, weight = torch.randn(m, 272).bfloat16(), torch.randn(136, 272).to(torch.float8_e4m3fn)
    x[0, :128] = 0
    weight_scale, bias = torch.rand(2, 3), torch.randn(136)
    residual = torch.randn(m, 136).bfloat16()
    for seed in range(3):
        with emulated(seed, late=[x, residual]) as emulation:
            out = quantised_linear_fp8(x, weight, weight_scale, bias, residual=residual)
        assert emulation.seed == seed + launches
        expected = reference.quantised_linear_fp8(x, weight, weight_scale, bias, residual=residual)
        assert norm_error(out, expected) < BOUND


@pytest.mark.parametrize("num_blocks", [132, 114, 78])
def test_up_to_8_rows_blocks_share_a_multiprocessor(num_blocks: int) -> None:
    for m in (1, 8):
        assert choose_few_tile(m, 5120, 2880, num_blocks) == FewTile(2880, 16)
        assert choose_few_tile(m, 2880, 4096, num_blocks) == FewTile(4096, 16)
        assert choose_few_tile(m, 320, 4096, num_blocks) == FewTile(4096, 8)
    assert choose_few_tile(8, 5120, 2880, 1000) == FewTile(2880, 8)


def test_more_rows_take_32_of_the_weight_a_block_where_that_is_one_round() -> None:
    for m in (9, MAXIMUM_ROWS):
        for num_blocks in (132, 114):
            assert choose_few_tile(m, 2880, 4096, num_blocks) == FewTile(4096, 32, tokens=16)
        assert choose_few_tile(m, 2880, 4096, 78) is None
        assert choose_few_tile(m, 5120, 2880, 132) is None


def test_too_many_rows_or_columns_have_no_tile() -> None:
    assert choose_few_tile(MAXIMUM_ROWS + 1, 2880, 4096, 132) is None
    assert choose_few_tile(8, 2880, 4112, 132) is None
    # A thread would store twice.
    assert choose_few_tile(9, 2880, 80, 132) is None
