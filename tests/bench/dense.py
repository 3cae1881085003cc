"""linear_fp8 beside its peers."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from arithmetic import CHECKED_ROWS, LINEAR_BOUND, dequantised, norm_error
from candidates import Quantised
from humming_peer import HummingProduct, compile_all, paddings
from measuring import Call, capture, fastest, floor_ms, is_heavy, print_ranked
from running import OURS, ROTATED_BYTES, Bench, named, tried
from served import gaussian_weight, quantised_rows
from torch import Tensor

from gptoss_kernels import deepgemm
from gptoss_kernels.cuda.compiler import KernelSpec
from gptoss_kernels.cuda.linear_fp8 import LinearTile, linear_fp8
from gptoss_kernels.fp8 import Fp8Weight

SHAPES = ((5120, 2880), (2880, 4096))
TOKENS = (1, 8, 64, 128, 512, 1024, 2048, 8192, 32768)
# By the largest number of tokens that they are tried for.
SWEPT_TILES = {
    64: tuple(
        LinearTile(columns, m_groups=1, k_groups=k_groups)
        for k_groups in (2, 3)
        for columns in (24, 32, 40, 48, 64, 80)
    ),
    1024: (
        *(LinearTile(columns, m_groups=1, k_groups=2) for columns in (32, 48, 64, 80, 184, 192)),
        *(LinearTile(columns) for columns in (24, 32, 40, 48, 64, 88, 96, 128, 160, 192)),
    ),
    1 << 30: (
        *(LinearTile(columns) for columns in (96, 128, 160, 192)),
        *(LinearTile(columns, cluster_m=2) for columns in (160, 192)),
        *(
            LinearTile(
                128, waves=2, cluster_m=rows, cluster_n=3 - rows, stores_boxes=True, unroll=4
            )
            for rows in (1, 2)
        ),
        *(LinearTile(128, m_groups=3, cluster_m=rows, cluster_n=3 - rows) for rows in (1, 2)),
    ),
}


class Dense:
    """One set of inputs of a dense product."""

    def __init__(self, x: Quantised, weight: Fp8Weight) -> None:
        (self.x, self.x_scale), self.weight = x, weight
        m, n = len(self.x), weight.shape[0]
        self.bias = torch.randn(n, device="cuda") / 4
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.row_scale = torch.rand(m, 1, device="cuda") / 64
        self.column_scale = torch.rand(1, n, device="cuda") / 64


def tile_name(tile: LinearTile) -> str:
    name = f"{tile.rows}x{tile.columns}"
    name += f" k{tile.k_groups}" if tile.k_groups > 1 else ""
    name += f" m{tile.cluster_m}" if tile.cluster_m > 1 else ""
    name += f" n{tile.cluster_n}" if tile.cluster_n > 1 else ""
    return name


def dense_peers(inputs: list[Dense]) -> dict[str, Call]:
    """Those that can be loaded and compute what they should, by name and version."""
    found: dict[str, Call] = {}
    for peer, (distribution, make, has_bias, is_checked) in PEERS.items():

        def checked(
            make: Maker = make, has_bias: bool = has_bias, is_checked: bool = is_checked
        ) -> Call:
            call = make(inputs)
            capture(call, len(inputs))
            if is_checked:
                check(inputs[0], call, has_bias)
            return call

        call = tried(peer, checked)
        if call is not None:
            found[named(peer, distribution)] = call
    return found


def bench_dense(bench: Bench) -> None:
    is_sweep = bench.arguments.sweep
    if is_sweep:
        with concurrent.futures.ProcessPoolExecutor() as pool:
            swept_specs = (tile.spec for tile in itertools.chain(*SWEPT_TILES.values()))
            list(pool.map(KernelSpec.compile, swept_specs))
    tokens = bench.arguments.tokens or TOKENS
    tried("Humming's kernels", partial(compile_humming, tokens))
    for n, k in SHAPES:
        for m in tokens:
            num_bytes = m * k + n * k + 2 * m * n
            count = min(16, max(2, -(-ROTATED_BYTES // num_bytes)))
            inputs = [Dense(quantised_rows(m, k), gaussian_weight(n, k)) for _ in range(count)]
            swept = next(tiles for limit, tiles in SWEPT_TILES.items() if m <= limit)
            calls = {OURS: dense_ours(inputs, None)}
            calls |= {tile_name(tile): dense_ours(inputs, tile) for tile in swept if is_sweep}
            print(f"{m} x {n} x {k}: burst | sustained")
            operations = 2 * m * n * k
            heavy = is_heavy(operations, num_bytes)
            times = bench.time(calls | dense_peers(inputs), count, is_heavy=heavy)
            print_ranked(times, operations)
            bench.record(
                *("linear", times, OURS),
                tokens=m,
                n=n,
                k=k,
                floor_ms=round(floor_ms(operations, num_bytes), 6),
                tflops=round(operations / times[OURS].burst.median / 1e9, 1),
            )


def dense_ours(inputs: list[Dense], tile: LinearTile | None) -> Call:
    def call(index: int) -> object:
        one = inputs[index]
        product = (one.x, one.x_scale, one.weight.values, one.weight.scale, one.bias)
        return linear_fp8(*product, out=one.out, tile=tile)

    return call


def dense_deepgemm(inputs: list[Dense]) -> Call:
    module: Any = deepgemm.library()

    def call(index: int) -> None:
        one = inputs[index]
        weight = (one.weight.values, one.weight.scale)
        module.fp8_gemm_nt((one.x, one.x_scale), weight, one.out)

    return call


def compile_humming(tokens: Sequence[int]) -> None:
    """All at once, before any is timed."""
    products = []
    for n, k in SHAPES:
        weight, bias = gaussian_weight(n, k), torch.zeros(n, device="cuda")
        products += [
            HummingProduct(weight.values, weight.scale, bias, n, k, padding)
            for padding in paddings(n)
        ]
    compile_all(products, tokens)


def dense_humming(inputs: list[Dense]) -> Call:
    """Of the paddings of N that compute what they should, the fastest."""
    n, k = inputs[0].weight.shape
    products = {
        padding: [
            HummingProduct(one.weight.values, one.weight.scale, one.bias, n, k, padding)
            for one in inputs
        ]
        for padding in paddings(n)
    }
    compile_all([some[0] for some in products.values()], [len(inputs[0].x)])

    def checked(padding: int) -> Call:
        def call(index: int) -> None:
            one = inputs[index]
            products[padding][index](one.x, one.x_scale, one.out)

        check(inputs[0], call, True)
        return call

    calls = [
        tried(f"Humming with N + {padding}", partial(checked, padding)) for padding in products
    ]
    return fastest([call for call in calls if call is not None], len(inputs))


def dense_cublaslt_by_row(inputs: list[Dense]) -> Call:
    """Scales by row and column, which is less work: a ceiling, not a peer."""

    def call(index: int) -> Tensor:
        one = inputs[index]
        return scaled_product(one, one.row_scale, one.column_scale, True)

    return call


def dense_cublaslt_by_block(inputs: list[Dense]) -> Call:
    """The same scales as ours, where K is a multiple of 128."""

    def call(index: int) -> Tensor:
        one = inputs[index]
        return scaled_product(one, one.x_scale, one.weight.scale.t(), False)

    return call


def scaled_product(one: Dense, scale: Tensor, weight_scale: Tensor, is_fast: bool) -> Tensor:
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        one.x,
        one.weight.values.t(),
        scale_a=scale,
        scale_b=weight_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


def check(one: Dense, call: Call, has_bias: bool) -> None:
    """Refuse a call that computes something else for the first inputs."""
    one.out.fill_(torch.nan)
    returned = call(0)
    actual = returned if isinstance(returned, Tensor) else one.out
    x = dequantised(one.x[:CHECKED_ROWS], one.x_scale[:CHECKED_ROWS])
    expected = x @ one.weight.dequantise(torch.float32).T
    if has_bias:
        expected += one.bias
    error = norm_error(actual[:CHECKED_ROWS], expected)
    if not error < LINEAR_BOUND:
        raise ArithmeticError(f"the product is wrong by {error:.1e}")


Maker = Callable[[list[Dense]], Call]
# By what they are called: distribution, calls, whether they add the bias, whether they are checked.
PEERS: dict[str, tuple[str, Maker, bool, bool]] = {
    "DeepGEMM (no bias)": ("sgl-deep-gemm", dense_deepgemm, False, True),
    "Humming": ("humming-kernels", dense_humming, True, True),
    "cuBLASLt 128x128 (no bias)": ("torch", dense_cublaslt_by_block, False, True),
    "cuBLASLt row-wise (no bias)": ("torch", dense_cublaslt_by_row, False, False),
}
