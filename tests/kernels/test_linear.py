"""linear in bf16 of few rows against float64 arithmetic; bad input; what PyTorch multiplies."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.linear import MAXIMUM_ROWS, RowsTile, choose_tile, linear
from gptoss_kernels.testing import norm_error

from .emulator import EmulationError, emulated, replacing

BOUND = 2e-3  # rounding to bf16 alone costs 1.7e-3
# One block with work; K ragged, of less than a chunk, of few warps; the served widths.
SHAPES = ((8, 2880), (136, 80), (3000, 8), (1048, 328), (5112, 128), (2000, 320), (20_104, 2880))
COUNTS = (1, 2, 7, 8, 9, 16, 17, 31, 32)


def random_inputs(m: int, n: int, k: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=device).manual_seed(m + n + k)
    x, weight = (
        torch.randn(rows, k, device=device, generator=generator).bfloat16() for rows in (m, n)
    )
    return x, weight


def poisoned(m: int, n: int, device: str = "cuda") -> Tensor:
    return torch.full((m, n), torch.nan, device=device, dtype=torch.bfloat16)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def bound(out: Tensor) -> float:
    """Of few values, all may be rounded by nearly half a step."""
    return BOUND if out.numel() > 1000 else 2 * BOUND


# Tiles go round the ring, and are fewer than its slots; blocks have one more than others, or one.
EMULATED = (
    (1, 136, 80),
    (7, 216, 88),
    (16, 360, 656),
    (9, 352, 272),
    (31, 104, 1040),
    (17, 8, 640),
    (32, 104, 8),
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("m", "n", "k"), EMULATED)
def test_emulated(m: int, n: int, k: int, seed: int) -> None:
    x, weight = random_inputs(m, n, k, "cpu")
    out = poisoned(m, n, "cpu")
    with emulated(seed, num_multiprocessors=2, late=[x]):
        linear(x, weight, out=out)
    assert norm_error(out, exact(x, weight)) < bound(out)


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
    "a lane has other columns of one matrix": (
        "{weight.x, weight.y}, {weight.z, weight.w}",
        "{weight.x, weight.z}, {weight.y, weight.w}",
    ),
    "the second chain is forgotten": ("both[0][i] + both[1][i],", "both[0][i],"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    x, weight = random_inputs(9, 360, 1048, "cpu")
    expected = exact(x, weight)

    def is_seen(seed: int) -> bool:
        out = poisoned(9, 360, "cpu")
        change = replacing(*WRONG[name])
        try:
            with emulated(seed, num_multiprocessors=2, late=[x], change=change):
                linear(x, weight, out=out)
        except EmulationError:
            return True
        return not norm_error(out, expected) < BOUND

    assert any(is_seen(seed) for seed in range(8))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", COUNTS)
def test_error_is_that_of_rounding(m: int, n: int, k: int) -> None:
    x, weight = random_inputs(m, n, k)
    out = linear(x, weight, out=poisoned(m, n))
    assert norm_error(out, exact(x, weight)) < bound(out)
    other = x.clone()
    other[m // 2] = x[m // 2].roll(1)
    assert norm_error(out, exact(other, weight)) > bound(out)


@pytest.mark.gpu
def test_exact_where_the_mathematics_is() -> None:
    n, k = 10_000, 2880
    x, _ = random_inputs(13, n, k)
    weight = torch.zeros(n, k, device="cuda", dtype=torch.bfloat16)
    columns = torch.randint(0, k, (n,), device="cuda")
    weight[torch.arange(n), columns] = 2
    assert torch.equal(linear(x, weight, out=poisoned(13, n)), 2 * x[:, columns])


@pytest.mark.gpu
def test_a_row_depends_on_no_other() -> None:
    n, k = 5128, 2880
    x, weight = random_inputs(32, n, k)
    together = linear(x, weight)
    for m in (1, 8, 9, 16):  # equal numbers of warps share K
        expected = linear(x[:16], weight)[:m]
        assert torch.equal(linear(x[:m], weight), expected)
    x[5] = torch.nan
    x[6, 7] = torch.inf
    out = linear(x, weight)
    assert bool(out[5].isnan().all())
    assert not bool(out[6].isfinite().any())
    others = [row for row in range(32) if row not in (5, 6)]
    assert torch.equal(out[others], together[others])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 32])
def test_matrices_in_wider_ones_and_nothing_beside_the_output_is_written(m: int) -> None:
    n, k = 2008, 328
    x, weight = random_inputs(m, n, k)
    expected = linear(x, weight)
    wide_x, longer = poisoned(m, 400), poisoned(n + 16, k)
    wide_x[:, 64:392], longer[8:-8] = x, weight
    around = torch.full((m + 20, n + 256), 7.0, device="cuda", dtype=torch.bfloat16)
    out = around[10 : 10 + m, 128 : 128 + n]
    torch.cuda.synchronize()
    linear(wide_x[:, 64:392], longer[8:-8], out=out)
    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.gpu
def test_reads_what_the_kernel_before_it_wrote() -> None:
    x, weight = random_inputs(8, 20_104, 2880)
    expected, late = linear(x, weight), torch.zeros_like(x)
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        late.zero_()
        slow = slow @ slow / 64
        late.copy_(x)
        assert torch.equal(linear(late, weight), expected)


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    (x, weight), (other, _) = random_inputs(4, 20_104, 2880), random_inputs(5, 20_104, 2880)
    out = poisoned(4, 20_104)
    linear(x, weight, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            linear(x, weight, out=out)
    expected = linear(other[:4], weight)
    x.copy_(other[:4])
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 64), (33, 64, 64), (3, 60, 64), (3, 64, 60)])
def test_other_sizes_are_multiplied_by_pytorch(m: int, n: int, k: int) -> None:
    x, weight = random_inputs(m, n, k)
    expected = reference.linear(x, weight)
    assert torch.equal(linear(x, weight), expected)
    assert torch.equal(linear(x, weight, out=poisoned(m, n)), expected)


@pytest.mark.gpu
def test_a_weight_with_gaps_is_multiplied_by_pytorch() -> None:
    x, weight = random_inputs(3, 64, 64)
    wide = torch.cat([weight, weight], 1)
    assert torch.equal(linear(x, wide[:, :64]), reference.linear(x, weight))
    assert norm_error(linear(x, weight.t()), exact(x, weight.t())) < 2 * BOUND


@pytest.mark.gpu
def test_bias_and_residual_are_added_by_pytorch() -> None:
    x, weight = random_inputs(3, 64, 64)
    bias, residual = weight[:, 0].contiguous(), x * 9
    added: list[dict[str, Any]] = [{"bias": bias}, {"residual": residual}]
    for options in (*added, added[0] | added[1]):
        expected = reference.linear(x, weight, **options)
        assert torch.equal(linear(x, weight, **options), expected)
        assert not torch.equal(linear(x, weight), expected)


def test_few_rows_are_ours() -> None:
    assert choose_tile(1, 201_088, 2880) == RowsTile(2880, 8)
    assert choose_tile(MAXIMUM_ROWS, 201_088, 2880) == RowsTile(2880, 32)
    for m, n, k in ((0, 64, 64), (MAXIMUM_ROWS + 1, 64, 64), (3, 60, 64), (3, 64, 60)):
        assert choose_tile(m, n, k) is None
    assert choose_tile(1, 64, 8192) is None  # two slots have no room


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x, w: (x.float(), w), "x must be torch.bfloat16, got torch.float32"),
        (lambda x, w: (x, w.half()), "weight must be torch.bfloat16, got torch.float16"),
        (lambda x, w: (x.cpu(), w), "x must be on a GPU"),
        (lambda x, w: (x, w.cpu()), "weight must be on the device of x"),
        (lambda x, w: (x[:, :8], w), r"must agree in K, got \[3, 8\] and \[64, 64\]"),
        (
            lambda x, w: (x, w.flatten()[1:4033].view(63, 64)[:56]),
            "weight must start at a multiple",
        ),
        (lambda x, w: (x[:1].expand(3, 64), w), "x must have adjacent columns, and rows of their"),
    ],
)
def test_bad_input_is_refused(change, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        linear(*change(*random_inputs(3, 64, 64)))


@pytest.mark.gpu
def test_bad_output_bias_or_residual_is_refused() -> None:
    x, weight = random_inputs(3, 64, 64)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"out": poisoned(3, 72)}, r"out must be \[3, 64\]"),
        ({"bias": torch.ones(64, device="cuda")}, "bias must be torch.bfloat16"),
        ({"residual": poisoned(4, 64)}, r"residual must be \[3, 64\]"),
        ({"out": poisoned(3, 68)[:, :64]}, "out must have adjacent columns, and rows of their own"),
    ]
    for options, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            linear(x, weight, **options)
