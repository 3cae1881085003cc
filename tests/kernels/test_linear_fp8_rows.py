"""FP8 linear of few rows by very many against float64 arithmetic on the same quantised inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.linear_fp8 import BY_MANY_TILE, choose, choose_plain, linear_fp8
from gptoss_kernels.cuda.linear_fp8_rows import MAXIMUM_ROWS, ManyRowsTile, choose_many_rows_tile
from gptoss_kernels.testing import norm_error

from .emulator import EmulationError, emulated, replacing
from .test_linear_fp8 import BOUND, H200_BLOCKS, float64, poisoned, random_inputs

HEAD = (201_088, 2880)
# One block with work; K ragged, of less than a chunk, of few warps, the longest; as served.
SHAPES = ((16, 2880), (144, 80), (4240, 16), (1040, 336), (5120, 128), (2000, 4096), (40_000, 2880))


def tile_of(m: int, k: int) -> ManyRowsTile:
    return ManyRowsTile(k, tokens=-(-m // 8) * 8)


def exact(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return float64(x, x_scale, weight, weight_scale, torch.zeros(len(weight), device=x.device))


def error_of(
    m: int, n: int, k: int, seed: int, change: Callable[[str], str] | None = None
) -> float:
    """In the emulator; what the kernel before writes comes at the last moment."""
    x, x_scale, weight, weight_scale, _ = random_inputs(m, n, k, seed=m, device="cpu")
    operands = (x, x_scale, weight, weight_scale)
    out = poisoned(m, n, device="cpu")
    with emulated(seed, num_multiprocessors=2, late=[x, x_scale], change=change):
        linear_fp8(*operands, out=out, tile=tile_of(m, k))
    return norm_error(out, exact(*operands))


# Tiles go round the ring, and are fewer than its slots; one block has one more than the other.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 304, 80), (7, 432, 144), (16, 368, 656), (9, 16, 272), (8, 336, 1040)]
)
def test_emulated(m: int, n: int, k: int, seed: int) -> None:
    assert error_of(m, n, k, seed) < BOUND * (1 if m * n > 1000 else 2)


WRONG = {
    "a slot is read before it is full": (
        "        barrier_wait(shared + FULL_OFFSET + slot * 8, phase);\n",
        "",
    ),
    "each turn of the ring is taken for the first": ("            phase ^= 1;\n", ""),
    "a slot is sent for before all have read it": (
        "        __syncthreads();\n        if (threadIdx.x == THREADS - 1",
        "        if (threadIdx.x == THREADS - 1",
    ),
    "sums are left where the tile before's are read": ("index % 2 * WARPS", "0 * WARPS"),
    "barriers are waited for before they are initialised": (
        "    __syncthreads();  // the barriers are initialised\n",
        "",
    ),
    "x is read before the kernel before has ended": ("    wait_for_previous_kernels();\n", ""),
    "a NaN beyond a row survives": ("column_of(chunk) < K;", "true;"),
    "the last tiles are left out": ("int(blockIdx.x) - 1)", "int(gridDim.x))"),
    "the first tile's scales are taken for all": (
        "load_weight_scale(row_of(index))",
        "load_weight_scale(row_of(0))",
    ),
    "the second rows of x have the first ones' scales": (
        "x_scale[set][chunk] * weight",
        "x_scale[0][chunk] * weight",
    ),
    "the second rows of x are the first ones": ("x[(pair * 2 + 1) % SETS]", "x[pair * 2]"),
    "the second unit is the first one": ("(unit * UNIT + lane / 4) * K", "lane / 4 * K"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    def is_seen(seed: int) -> bool:
        try:
            return not error_of(9, 432, 1040, seed, replacing(*WRONG[name])) < BOUND
        except EmulationError:
            return True

    assert any(is_seen(seed) for seed in range(8))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 15, 16])
def test_error_is_that_of_rounding(m: int, n: int, k: int) -> None:
    *operands, _ = random_inputs(m, n, k, seed=m)
    out = linear_fp8(*operands, out=poisoned(m, n), tile=tile_of(m, k))
    # Of few values, all may be rounded by nearly half a step.
    bound = BOUND if m * n > 1000 else 2 * BOUND
    assert norm_error(out, exact(*operands)) < bound
    x, *others = operands
    other = x.view(torch.uint8).clone()
    other[m // 2] = other[m // 2].roll(1)
    assert norm_error(out, exact(other.view(x.dtype), *others)) > bound


@pytest.mark.gpu
def test_as_served() -> None:
    n, k = HEAD
    for m, tile in ((9, tile_of(9, k)), (17, BY_MANY_TILE)):
        *operands, _ = random_inputs(m, n, k)
        out = linear_fp8(*operands, out=poisoned(m, n))
        expected = reference.linear_fp8(*operands, dtype=torch.float32)
        assert norm_error(out, expected.double()) < BOUND
        assert torch.equal(linear_fp8(*operands, tile=tile), out)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 16])
def test_exact_where_the_mathematics_is(m: int) -> None:
    n, k = 10_000, 2880
    x, x_scale, _, _, _ = random_inputs(m, n, k)
    weight = torch.zeros(n, k, device="cuda")
    weight[torch.arange(n), torch.randint(0, k, (n,), device="cuda")] = 1
    x_scale.copy_(torch.exp2(torch.randint(-4, 5, x_scale.shape, device="cuda").float()))
    exponents = torch.randint(-4, 5, (-(-n // 128), -(-k // 128)), device="cuda")
    operands = (x, x_scale, weight.to(x.dtype), torch.exp2(exponents.float()))
    torch.cuda.synchronize()
    out = linear_fp8(*operands, out=poisoned(m, n), tile=tile_of(m, k))
    assert torch.equal(out.double(), exact(*operands))


@pytest.mark.gpu
def test_a_row_depends_on_no_other_and_not_on_how_many_there_are() -> None:
    n, k = 5120, 2880
    x, x_scale, weight, weight_scale, _ = random_inputs(16, n, k)
    together = linear_fp8(x, x_scale, weight, weight_scale, tile=tile_of(16, k))
    for m in (1, 4, 8, 9):
        alone = linear_fp8(x[:m], x_scale[:m], weight, weight_scale, tile=tile_of(m, k))
        assert torch.equal(alone, together[:m])


@pytest.mark.gpu
def test_matrices_in_wider_ones_and_nothing_beside_the_output_is_written() -> None:
    m, n, k = 5, 2016, 336
    x, x_scale, weight, weight_scale, _ = random_inputs(m, n, k)
    expected = linear_fp8(x, x_scale, weight, weight_scale, tile=tile_of(m, k))
    wide_x = torch.full((m, 400), torch.nan, device="cuda").to(x.dtype)
    longer = torch.full((n + 32, k), torch.nan, device="cuda").to(x.dtype)
    wide_x[:, 32:368], longer[16:-16] = x, weight
    around = torch.full((m + 20, n + 256), 7.0, device="cuda", dtype=torch.bfloat16)
    out = around[10 : 10 + m, 128 : 128 + n]
    torch.cuda.synchronize()
    operands = (wide_x[:, 32:368], x_scale, longer[16:-16], weight_scale)
    linear_fp8(*operands, out=out, tile=tile_of(m, k))
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    n, k = 40_000, 2880
    x, x_scale, weight, weight_scale, _ = random_inputs(4, n, k)
    other, other_scale, *_ = random_inputs(4, n, k, seed=1)
    out, tile = poisoned(4, n), tile_of(4, k)
    linear_fp8(x, x_scale, weight, weight_scale, out=out, tile=tile)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            linear_fp8(x, x_scale, weight, weight_scale, out=out, tile=tile)
    expected = linear_fp8(other, other_scale, weight, weight_scale, tile=tile)
    x.copy_(other)
    x_scale.copy_(other_scale)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_is_refused() -> None:
    x, x_scale, weight, weight_scale, bias = random_inputs(9, 256, 320)
    wide = torch.cat([weight.view(torch.uint8)] * 2, 1).view(weight.dtype)
    tile = ManyRowsTile(320, tokens=16)
    for apart in (wide[:, :320], weight):
        added = None if apart is not weight else bias
        with pytest.raises(ValueError, match="neither bias nor residual, and adjacent rows"):
            linear_fp8(x, x_scale, apart, weight_scale, added, tile=tile)
    with pytest.raises(ValueError, match="is not for 9 rows of x and 256 of the weight of K=320"):
        linear_fp8(x, x_scale, weight, weight_scale, tile=ManyRowsTile(320))
    with pytest.raises(ValueError, match="and 248 of the weight of K=320"):
        linear_fp8(x, x_scale, weight[:248], weight_scale, tile=tile)


def test_few_rows_by_very_many_are_its_own() -> None:
    n, k = HEAD
    for m in (1, 8, 9, MAXIMUM_ROWS):
        assert choose_plain(m, n, k, H200_BLOCKS) == tile_of(m, k)
    for sizes in ((17, n, k), (8, n + 8, k), (8, 5120, k), (8, n, 4112)):
        assert choose_many_rows_tile(*sizes, H200_BLOCKS) is None
        assert not isinstance(choose_plain(*sizes, H200_BLOCKS), ManyRowsTile)
    assert choose_many_rows_tile(8, n, 4096, H200_BLOCKS) == ManyRowsTile(4096)


def test_some_more_rows_by_very_many_take_narrow_tiles() -> None:
    n, k = HEAD
    assert {choose_plain(m, n, k, H200_BLOCKS) for m in (17, 32)} == {BY_MANY_TILE}
    assert choose_plain(9, n + 8, k, H200_BLOCKS) == BY_MANY_TILE
    for sizes in ((33, n, k), (17, 5120, k), (17, n, 128)):
        assert choose_plain(*sizes, H200_BLOCKS) == choose(*sizes, H200_BLOCKS) != BY_MANY_TILE
