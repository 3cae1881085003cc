"""FP8 linear against float64 arithmetic on the same quantised inputs; bad input; the tiles."""

import pytest
import torch

from gptoss_kernels import reference
from gptoss_kernels.contracts import check_rows, empty_scale
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.linear_fp8 import BY_MANY_TILE, LinearTile, choose_tile, linear_fp8
from gptoss_kernels.testing import norm_error

# Rounding to bf16 alone costs 1.7e-3.
BOUND = 2e-3

SERVED_SHAPES = ((5120, 2880), (2880, 4096))
# Of 520 tokens, the one tile of three warpgroups.
SERVED_TOKENS = (1, 2, 8, 16, 32, 64, 65, 128, 256, 512, 520, 1024, 2048, 4096, 8192, 32768, 131072)
H200_BLOCKS = 132
SERVED_TILES = sorted(
    {choose_tile(m, n, k, H200_BLOCKS) for n, k in SERVED_SHAPES for m in SERVED_TOKENS}, key=repr
)
# Beyond those, one for each way through the kernel that they leave out.
OTHER_TILES = (
    BY_MANY_TILE,
    LinearTile(24),
    LinearTile(96),
    LinearTile(160, cluster_m=2),
    LinearTile(120, waves=2, cluster_n=2),
    LinearTile(128, m_groups=1, stores_boxes=True, unroll=3),
    LinearTile(192, m_groups=1, k_groups=2, stores_boxes=True),
    LinearTile(64, m_groups=1, k_groups=3, hastens=True),
)
RAGGED = (130, 360, 1040)
SEVERAL_TILES = (2500, 2560, 256)  # for each block: the deferred store
EDGES = (
    (1, 8, 144),  # less than a tile in every direction
    (3, 136, 272),  # one column unit and one K unit into the second block
    (64, 512, 512),
    RAGGED,
    (300, 2880, 384),  # more tiles than fit the device at once for small tiles
    SEVERAL_TILES,
    (130, 360, 4224),  # one block of K more than lanes hold scales
    (130, 360, 8320),  # the same twice
)


def float64(x, x_scale, weight, weight_scale, bias):
    """The formula in float64."""
    n, k = weight.shape
    x_scale = x_scale.double().repeat_interleave(128, dim=1)[:, :k]
    weight_scale = weight_scale.double().repeat_interleave(128, dim=0)[:n]
    weight_scale = weight_scale.repeat_interleave(128, dim=1)[:, :k]
    return (x.double() * x_scale) @ (weight.double() * weight_scale).t() + bias.double()


def random_inputs(
    m: int, n: int, k: int, seed: int = 0, device: str = "cuda"
) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x_scale = empty_scale(m, k, device)
    x_scale.copy_(normal(*x_scale.shape).exp() / 64)
    weight_scale = normal(-(-n // 128), -(-k // 128)).exp() / 64
    x = (normal(m, k) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = (normal(n, k) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    # As large as the product, so that a missing bias cannot hide.
    bias = normal(n) * 8 * k**0.5
    # Weight, its scale and bias must not come from the kernel just before an operator.
    if device == "cuda":
        torch.cuda.synchronize()
    return [x, x_scale, weight, weight_scale, bias]


def poisoned(m: int, n: int, device: str = "cuda") -> torch.Tensor:
    return torch.full((m, n), torch.nan, device=device, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SERVED_SHAPES)
@pytest.mark.parametrize("m", [1, 8, 63, 64, 65, 127, 128, 129, 257, 1000, 2048, 8200])
def test_error_is_that_of_rounding(m: int, n: int, k: int) -> None:
    inputs = random_inputs(m, n, k, seed=m)
    out = linear_fp8(*inputs, out=poisoned(m, n))
    assert norm_error(out, float64(*inputs)) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tile", "m", "n", "k"),
    [
        *((tile, *edge) for tile in SERVED_TILES for edge in EDGES),
        *((tile, *edge) for tile in OTHER_TILES for edge in (RAGGED, SEVERAL_TILES)),
    ],
    ids=str,
)
def test_every_tile_at_every_edge(tile: LinearTile, m: int, n: int, k: int) -> None:
    inputs = random_inputs(m, n, max(k, 128 * tile.k_groups), seed=n)
    out = linear_fp8(*inputs, out=poisoned(m, n), tile=tile)
    assert norm_error(out, float64(*inputs)) < BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*SERVED_TILES, *OTHER_TILES], ids=str)
@pytest.mark.parametrize(
    ("has_bias", "m", "n", "k"),
    [
        (False, 3, 136, 272),
        (True, *RAGGED),  # enough blocks of K for one box between each few of them
        (False, 2500, 2560, 656),  # and too few: the others after the last
    ],
)
def test_residual_is_added_in_place_or_elsewhere(
    tile: LinearTile, has_bias: bool, m: int, n: int, k: int
) -> None:
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, max(k, 128 * tile.k_groups), m)
    inputs = (x, x_scale, weight, weight_scale, bias if has_bias else None)
    plain = reference.linear_fp8(*inputs, dtype=torch.float32)
    # Rows of their own pitch, and as large as the product, so that a missing one cannot hide.
    around = (torch.randn(m, n + 64, device="cuda") * plain.std()).bfloat16()
    residual = around[:, 32 : 32 + n]
    expected = reference.linear_fp8(*inputs, residual=residual, dtype=torch.float32)

    out = linear_fp8(*inputs, residual=residual, out=poisoned(m, n), tile=tile)
    assert norm_error(out, expected.double()) < BOUND
    assert norm_error(out, plain.double()) > BOUND
    # The wrong kernel reads a row's neighbour.
    assert m == 1 or norm_error(out, (plain + residual.roll(1, 0)).double()) > BOUND

    in_place = around.clone()
    inner = in_place[:, 32 : 32 + n]
    assert linear_fp8(*inputs, residual=inner, out=inner, tile=tile) is inner
    assert torch.equal(inner, out)
    assert torch.equal(in_place[:, :32], around[:, :32])
    assert torch.equal(in_place[:, 32 + n :], around[:, 32 + n :])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [None, LinearTile(128), LinearTile(128, stores_boxes=True)], ids=str
)
def test_residual_is_added_before_the_sum_is_rounded(tile: LinearTile | None) -> None:
    m, n, k = 200, 640, 512
    x = torch.randint(-8, 9, (m, k), device="cuda").to(torch.float8_e4m3fn)
    weight = torch.zeros(n, k, device="cuda")
    weight[torch.arange(n), torch.randint(0, k, (n,), device="cuda")] = 1
    x_scale = empty_scale(m, k, "cuda").fill_(1)
    weight_scale = torch.ones(5, 4, device="cuda")
    bias = torch.randint(-64, 65, (n,), device="cuda") / 1024
    residual = torch.randint(-8, 9, (m, n), device="cuda").bfloat16() / 256
    inputs = (x, x_scale, weight.to(torch.float8_e4m3fn), weight_scale, bias)
    out = linear_fp8(*inputs, residual=residual, out=poisoned(m, n), tile=tile)
    assert torch.equal(out, reference.linear_fp8(*inputs, residual=residual))
    assert not torch.equal(out, reference.linear_fp8(*inputs) + residual)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda residual: residual.float(), "residual must be torch.bfloat16, got torch.float32"),
        (lambda residual: residual[:, :248], r"residual must be \[32, 256\], got \[32, 248\]"),
        (lambda residual: residual[:1].expand(32, 256), "residual must have adjacent columns"),
        (lambda residual: residual.cpu(), "residual must be on the device of x"),
    ],
)
def test_bad_residual_is_refused(change, sentence) -> None:
    inputs = random_inputs(32, 256, 512)
    with pytest.raises(ValueError, match=sentence):
        linear_fp8(*inputs, residual=change(torch.zeros_like(poisoned(32, 256))))


@pytest.mark.gpu
def test_a_residual_written_by_the_kernel_before_is_read_after_it() -> None:
    m, n, k = 8192, 2880, 512
    inputs = random_inputs(m, n, k)
    stream = poisoned(m, n)
    start = torch.randn(m, n, device="cuda").mul_(1000).bfloat16()
    expected = linear_fp8(*inputs, residual=linear_fp8(*inputs, residual=start))
    for _ in range(20):
        stream.copy_(start)
        linear_fp8(*inputs, residual=stream, out=stream)
        linear_fp8(*inputs, residual=stream, out=stream)
        assert torch.equal(stream, expected)


@pytest.mark.gpu
def test_wrong_arithmetic_exceeds_the_bound() -> None:
    m, n, k = 200, 2880, 2880
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, k)
    out = linear_fp8(x, x_scale, weight, weight_scale, bias, out=poisoned(m, n))
    # The last, half block of K with its neighbour's scale; one column's bias; one tile's scale.
    shifted = x_scale.clone()
    shifted[:, -1] = x_scale[:, -2]
    one_bias = bias.clone()
    one_bias[7] = 0
    one_scale = weight_scale.clone()
    one_scale[3, 5] = weight_scale[3, 6]
    for wrong in (
        (x, x_scale, weight, weight_scale, torch.zeros_like(bias)),
        (x, shifted, weight, weight_scale, bias),
        (x, x_scale, weight, weight_scale, one_bias),
        (x, x_scale, weight, one_scale, bias),
    ):
        assert norm_error(out, float64(*wrong)) > BOUND


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5, 200])
def test_exact_where_the_mathematics_is(m: int) -> None:
    n, k = 640, 512
    x = torch.randint(-8, 9, (m, k), device="cuda").to(torch.float8_e4m3fn)
    weight = torch.zeros(n, k, device="cuda")
    columns = torch.randint(0, k, (n,), device="cuda")
    weight[torch.arange(n), columns] = 1
    x_scale = empty_scale(m, k, "cuda")
    x_scale.copy_(torch.exp2(torch.randint(-4, 5, (m, 4), device="cuda").float()))
    weight_scale = torch.exp2(torch.randint(-4, 5, (5, 4), device="cuda").float())
    inputs = (
        x,
        x_scale,
        weight.to(torch.float8_e4m3fn),
        weight_scale,
        torch.zeros_like(weight[:, 0]),
    )
    torch.cuda.synchronize()  # bias was written by the kernel just before
    assert torch.equal(linear_fp8(*inputs, out=poisoned(m, n)).double(), float64(*inputs))


@pytest.mark.gpu
def test_nothing_beside_the_output_is_written() -> None:
    m, n, k = 67, 2880, 512
    inputs = random_inputs(m, n, k)
    around = torch.full((m + 128, n + 256), 7.0, device="cuda", dtype=torch.bfloat16)
    linear_fp8(*inputs, out=around[:m, 128 : 128 + n])
    around[:m, 128 : 128 + n] = 7.0
    assert bool((around == 7.0).all())


@pytest.mark.gpu
def test_no_tokens() -> None:
    inputs = random_inputs(0, 2880, 512)
    assert linear_fp8(*inputs).shape == (0, 2880)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 500])
def test_captured_graph_is_eager(m: int) -> None:
    n, k = 2880, 4096
    inputs, others = random_inputs(m, n, k, seed=1), random_inputs(m, n, k, seed=2)
    out = poisoned(m, n)
    linear_fp8(*inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear_fp8(*inputs, out=out)
        linear_fp8(*inputs, out=out)
    expected = linear_fp8(*others)
    for mine, other in zip(inputs, others, strict=True):
        mine.copy_(other)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_first_use_under_capture_is_refused_and_does_not_end_it() -> None:
    inputs = random_inputs(8, 256, 512)
    out = poisoned(8, 256)
    tile = LinearTile(56)  # of no other test
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(runtime.CudaError, match="before the capture"):
            linear_fp8(*inputs, out=out, tile=tile)
        out.fill_(1)
    graph.replay()
    assert bool((out == 1).all())
    linear_fp8(*inputs, out=out, tile=tile)
    assert norm_error(out, float64(*inputs)) < BOUND


@pytest.mark.gpu2
def test_the_tensors_gpu_need_not_be_the_current_one() -> None:
    inputs = random_inputs(8, 256, 512)
    others = [tensor.to("cuda:1") for tensor in inputs]
    others[1] = empty_scale(8, 512, "cuda:1").copy_(inputs[1])
    expected = linear_fp8(*inputs)
    out = linear_fp8(*others)
    assert out.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), expected)
    with pytest.raises(ValueError, match="bias must be on the device of x, got cuda:0 and cuda:1"):
        linear_fp8(others[0], others[1], others[2], others[3], inputs[4])


@pytest.mark.gpu
def test_reads_x_after_the_kernel_before_it_wrote_it() -> None:
    # The launch overlaps the end of its predecessor, here a slow producer of x and x_scale.
    m, n, k = 64, 2880, 2880
    x, x_scale, weight, weight_scale, bias = random_inputs(m, n, k)
    expected = linear_fp8(x, x_scale, weight, weight_scale, bias)
    slow = torch.randn(4096, 4096, device="cuda")
    late_x, late_scale = torch.zeros_like(x), torch.zeros_like(x_scale)
    for _ in range(20):
        late_x.zero_()
        late_scale.zero_()
        slow = slow @ slow / 64
        late_x.copy_(x)
        late_scale.copy_(x_scale)
        out = linear_fp8(late_x, late_scale, weight, weight_scale, bias)
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda x: x.float(), "x must be torch.float8_e4m3fn, got torch.float32"),
        (0, lambda x: x[:, :496], r"must agree in K, got \[32, 496\] and \[256, 512\]"),
        (0, lambda x: x.t().contiguous().t(), "x must have adjacent columns"),
        (1, lambda scale: scale.contiguous(), "x_scale must be stored by column"),
        (1, lambda scale: scale[:, :3], r"x_scale must be \[32, 4\], got \[32, 3\]"),
        (0, lambda x: x[:1].expand(32, 512), "x must have adjacent columns, and rows of their own"),
        (2, lambda weight: weight[0], r"weight \[N, K\] must agree in K"),
        (2, lambda weight: weight[:252], "N must be a multiple of 8 and K of 16, got N=252"),
        (3, lambda scale: scale.t().contiguous().t(), "weight_scale must be contiguous"),
        (4, lambda bias: bias.bfloat16(), "bias must be torch.float32, got torch.bfloat16"),
        (4, lambda bias: bias.cpu(), "bias must be on the device of x"),
    ],
)
def test_bad_input_is_refused(position, change, sentence) -> None:
    inputs = random_inputs(32, 256, 512)
    inputs[position] = change(inputs[position])
    with pytest.raises(ValueError, match=sentence):
        linear_fp8(*inputs)


def test_without_a_gpu_the_sentence_says_so() -> None:
    x = torch.zeros(1, 128, dtype=torch.float8_e4m3fn)
    scale = torch.ones(1, 1)
    with pytest.raises(ValueError, match="x must be on a GPU, got cpu"):
        linear_fp8(x, scale, x.expand(8, 128), scale, torch.zeros(8))


@pytest.mark.parametrize(("n", "k"), [*SERVED_SHAPES, (8, 16)])
def test_chosen_tile_fits(n: int, k: int) -> None:
    for m in (*SERVED_TOKENS, 3, 63, 100, 5000):
        tile = choose_tile(m, n, k, H200_BLOCKS)
        assert tile.stages >= 3
        assert k > 128 * (tile.k_groups - 1)


def test_a_weight_that_is_no_matrix_is_refused() -> None:
    x = torch.zeros(1, 128, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"weight \[N, K\] must agree in K"):
        linear_fp8(x, torch.ones(1, 1), x[0], torch.ones(1, 1), torch.zeros(8))


def test_rows_on_top_of_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of their own.*got strides \(0, 1\)"):
        check_rows("out", torch.zeros(1, 128).expand(4, 128))
    check_rows("out", torch.zeros(4, 256)[:, :128])
