"""norm_linear_fp8 beside rms_norm_fp8 and linear_fp8, of which it is the same, bit for bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda import norm_linear_fp8 as operator
from gptoss_kernels.cuda.linear_fp8 import linear_fp8
from gptoss_kernels.cuda.linear_fp8_few import FewTile
from gptoss_kernels.cuda.norm_linear_fp8 import (
    MAXIMUM_ROWS,
    NormTile,
    choose_norm_tile,
    norm_linear_fp8,
    prepare,
)
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.testing import norm_error

from .emulator import EmulationError, emulated, replacing

EPS = 1e-5
BOUND = 2e-3  # rounding to bf16 alone costs 1.7e-3
QKV = (5120, 2880)
CLUSTERS = (1, 2, 4, 8)

Inputs = tuple[Tensor, Tensor, Mixture, Tensor, Tensor, Tensor]


def random_inputs(
    m: int, n: int, k: int, num_chosen: int = 4, *, device: str = "cuda", seed: int = 0
) -> Inputs:
    """hidden, the norm's weight, what experts gave, the product's weight, its scale, its bias."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    hidden = (normal(m, k) * normal(m, 1).exp() * 3).bfloat16()
    count = m * num_chosen + 3
    rows = torch.randperm(count, device=device, generator=generator)[: m * num_chosen]
    rows = rows.view(m, num_chosen).int().contiguous()
    update = Mixture(normal(count, k).bfloat16(), rows, normal(m, num_chosen).abs().bfloat16())
    weight = (normal(n, k) * 32).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight_scale = normal(-(-n // 128), -(-k // 128)).exp() / 1000
    if device == "cuda":
        torch.cuda.synchronize()  # all but the outputs is read early
    return hidden, normal(k).exp(), update, weight, weight_scale, normal(n)


def together(tile: NormTile, inputs: Inputs, *, has_bias: bool = True) -> tuple[Tensor, Tensor]:
    """In one launch, to rooms of NaN."""
    hidden, norm_weight, update, weight, weight_scale, bias = inputs
    out, total = (
        torch.full((len(hidden), columns), torch.nan, dtype=torch.bfloat16, device=hidden.device)
        for columns in (len(weight), hidden.shape[1])
    )
    launch = prepare(
        *(tile, hidden, norm_weight, EPS, weight, weight_scale, bias if has_bias else None),
        *(update, out, total),
    )
    launch(torch.cuda.current_stream().cuda_stream if hidden.is_cuda else 0)
    return out, total


def apart(tile: NormTile, inputs: Inputs, *, has_bias: bool = True) -> tuple[Tensor, Tensor]:
    """With the same rows of the weight a block."""
    hidden, norm_weight, update, weight, weight_scale, bias = inputs
    total = hidden.clone()
    if hidden.is_cuda:
        torch.cuda.synchronize()
    normed = rms_norm_fp8(total, norm_weight, EPS, update)
    few = FewTile(tile.k, tile.rows)
    return linear_fp8(*normed, weight, weight_scale, bias if has_bias else None, tile=few), total


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("n", "k"), [QKV, (2888, 2880), (5120, 320), (512, 128), (136, 4096)])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 8])
def test_one_launch_is_two_bit_for_bit(m: int, n: int, k: int, cluster: int) -> None:
    for num_chosen in (1, 4):
        tile = NormTile(k, 8 if k == 128 else 16, num_chosen=num_chosen, cluster=cluster)
        inputs = random_inputs(m, n, k, num_chosen, seed=m)
        for has_bias in (True, False):
            found = together(tile, inputs, has_bias=has_bias)
            assert same(found, apart(tile, inputs, has_bias=has_bias))
            assert bool(found[0].isfinite().all())


@pytest.mark.gpu
def test_a_row_that_is_none_makes_its_token_nan_and_no_other() -> None:
    tile = NormTile(2880, 16, num_chosen=4, cluster=4)
    inputs = random_inputs(5, *QKV)
    expected = together(tile, inputs)
    inputs[2].rows[3, 1] = -1
    torch.cuda.synchronize()
    found = together(tile, inputs)
    others = [0, 1, 2, 4]
    assert same((found[0][others], found[1][others]), (expected[0][others], expected[1][others]))
    assert bool(found[0][3].isnan().all())
    assert bool(found[1][3].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_reads_what_the_kernel_before_it_wrote(cluster: int) -> None:
    tile = NormTile(2880, 16, num_chosen=4, cluster=cluster)
    inputs = random_inputs(8, *QKV)
    expected = together(tile, inputs)
    outputs = inputs[2].outputs
    late = torch.empty_like(outputs)
    inputs = (*inputs[:2], inputs[2]._replace(outputs=late), *inputs[3:])
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        late.zero_()
        slow = slow @ slow / 64
        late.copy_(outputs)
        assert same(together(tile, inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8])
def test_captured_layers_are_eager(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of them, each adding to what the one before gave, in memory that comes back."""
    monkeypatch.setattr(operator, "_MAXIMUM_SERVED_ROWS", MAXIMUM_ROWS)
    hidden, norm_weight, update, *weights = random_inputs(m, *QKV)

    def chain() -> list[Tensor]:
        total, products = hidden, []
        for _ in range(6):
            product, total = norm_linear_fp8(total, norm_weight, EPS, *weights, update=update)
            products.append(product[:, :2880].contiguous())
            # Between two of them there is another kernel, as the sum is read early.
            products[-1] += 1
        return [*products, total.clone()]

    eager = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
    exact = hidden
    for _ in range(6):
        exact = reference.combine(*update, residual=exact)
    assert torch.equal(eager[-1], exact)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        (1, 136, NormTile(656, 16, num_chosen=4, cluster=1)),
        (3, 136, NormTile(656, 16, num_chosen=2, cluster=4)),
        (8, 264, NormTile(656, 16, num_chosen=1, cluster=8)),
        (5, 136, NormTile(2128, 16, num_chosen=1, cluster=2)),  # two groups a warp, rows in turn
        (3, 80, NormTile(128, 8, num_chosen=2, cluster=1)),  # one warp
        (2, 136, NormTile(320, 40, num_chosen=2, cluster=2)),  # tiles of a block, two scales' rows
    ],
    ids=str,
)
def test_emulated_one_launch_is_two_bit_for_bit(m: int, n: int, tile: NormTile, seed: int) -> None:
    inputs = random_inputs(m, n, tile.k, tile.num_chosen, device="cpu", seed=seed)
    with emulated(seed, late=[inputs[2].outputs]):
        found = together(tile, inputs)
    with emulated(seed):
        assert same(found, apart(tile, inputs))
    hidden, norm_weight, update, *weights = inputs
    product, total = reference.norm_linear_fp8(hidden, norm_weight, EPS, *weights, update=update)
    assert torch.equal(found[1], total)
    assert norm_error(found[0], product) < BOUND


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    x.load(norm.hidden + row", "    x.load(norm.hidden + rank"),
        ("if (blockIdx.x < CLUSTER) x.store", "if (blockIdx.x == 0) x.store"),
        ("            __syncthreads();  // squares were read\n", ""),
        ("barrier_wait(shared + X_FULL_OFFSET, 0);", ""),
        ("    wait_for_previous_kernels();\n    allow_next_kernel();\n\n", ""),
        ("CLUSTER > 1) cluster_has_begun()", "CLUSTER > 1) cluster_begin()"),
        ("arguments.M * ROW_BYTES", "(arguments.M - 1) * ROW_BYTES"),
        ("if (column_of(group, chunk) < K)", "if (true)"),
        ("column_of(group, chunk)));\n            }", "column_of(group, 0)));\n            }"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_seen(old: str, new: str) -> None:
    tile = NormTile(656, 16, num_chosen=2, cluster=2)
    inputs = random_inputs(3, 136, 656, 2, device="cpu")
    with emulated():
        expected = apart(tile, inputs)

    def is_right(seed: int, change: Callable[[str], str] | None = None) -> bool:
        try:
            with emulated(seed, change=change, late=[inputs[2].outputs]):
                return same(together(tile, inputs), expected)
        except EmulationError:
            return False

    assert all(is_right(seed) for seed in range(8))
    assert not all(is_right(seed, replacing(old, new)) for seed in range(8))


@pytest.mark.parametrize(("m", "launches"), [(0, 0), (1, 1), (MAXIMUM_ROWS, 1), (9, 2)])
def test_few_rows_take_one_launch_and_leave_hidden_alone(
    m: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "_MAXIMUM_SERVED_ROWS", MAXIMUM_ROWS)
    hidden, norm_weight, update, *weights = random_inputs(m, 136, 272, device="cpu")
    given = hidden.clone()
    with emulated() as emulation:
        product, total = norm_linear_fp8(given, norm_weight, EPS, *weights, update=update)
    assert emulation.seed == launches
    assert torch.equal(given, hidden if launches == 1 else total)
    assert (total is given) == (launches != 1)
    expected = reference.norm_linear_fp8(hidden, norm_weight, EPS, *weights, update=update)
    assert torch.equal(total, expected[1])
    assert product.shape == (m, 136)
    assert m == 0 or norm_error(product, expected[0]) < BOUND


def test_without_an_update_there_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "_MAXIMUM_SERVED_ROWS", MAXIMUM_ROWS)
    hidden, norm_weight, _, *weights = random_inputs(2, 136, 272, device="cpu")
    with emulated() as emulation:
        product, total = norm_linear_fp8(hidden, norm_weight, EPS, *weights)
    assert emulation.seed == 2
    assert total is hidden
    expected, _ = reference.norm_linear_fp8(hidden, norm_weight, EPS, *weights)
    assert norm_error(product, expected) < BOUND


def test_until_it_was_timed_none_is_served() -> None:
    hidden, norm_weight, update, *weights = random_inputs(1, 136, 272, device="cpu")
    with emulated() as emulation:
        norm_linear_fp8(hidden, norm_weight, EPS, *weights, update=update)
    assert emulation.seed == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden": lambda x: x.float()}, "hidden must be torch.bfloat16"),
        ({"weight": lambda x: x[:, :256]}, "must agree in K"),
        ({"weight": lambda x: x.float()}, "weight must be torch.float8_e4m3fn"),
        ({"update": lambda x: x._replace(rows=x.rows[:1])}, "chosen_weights must be"),
        (
            {"update": lambda x: Mixture(x[0], x[1][:1], x[2][:1])},
            r"rows must be \[2, 4\], got \[1",
        ),
        ({"total": lambda x: x[:1]}, r"total must be \[2, 272\], got \[1, 272\]"),
        ({"tile": lambda x: replace(x, num_chosen=2)}, r"is not for \[2, 4\] experts and K=272"),
        ({"tile": lambda x: replace(x, k=288)}, r"is not for \[2, 4\] experts and K=272"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Callable], sentence: str) -> None:
    hidden, norm_weight, update, weight, weight_scale, bias = random_inputs(
        2, 136, 272, device="cpu"
    )
    given = {
        "tile": NormTile(272, 16, num_chosen=4),
        "hidden": hidden,
        "norm_weight": norm_weight,
        "eps": EPS,
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": bias,
        "update": update,
        "out": torch.empty(2, 136).bfloat16(),
        "total": hidden.clone(),
    }
    for name, changed in change.items():
        given[name] = changed(given[name])
    with emulated(), pytest.raises(ValueError, match=sentence):
        prepare(**given)


def test_a_cluster_has_a_block_for_each_row() -> None:
    for m, cluster in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
        tile = choose_norm_tile(m, *QKV, 132, 4)
        assert tile == NormTile(2880, 16, num_chosen=4, cluster=cluster)
    assert choose_norm_tile(9, *QKV, 132, 4) is None
    assert choose_norm_tile(1, 5120, 8192, 132, 4) is None
    # Three share a multiprocessor.
    assert 3 * (NormTile(2880, 16).shared_bytes + 12 * 128 + 1024) <= 228 * 1024
