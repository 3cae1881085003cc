"""FP8 linear beside DeepGEMM and cuBLASLt, in one run: a table, then one JSON line a shape.

    python tests/bench/bench_linear.py --output results.jsonl

Weights and inputs rotate through more memory than the L2 cache holds; times are medians of CUDA
graph replays. DeepGEMM (no bias) is measured where `deep_gemm` can be imported; cuBLASLt scales by
row instead of by 128 x 128, which is less work, and is the ceiling rather than a peer.
`--sweep` times every tile of a list instead of the chosen one: that is how choose_tile was made.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import (
    Timing,
    command_output,
    deep_gemm,
    floor_ms,
    print_ranked,
    result_line,
    time_calls,
)

from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda.gemm_fp8 import Tile
from gptoss_kernels.cuda.linear_fp8 import choose_tile, linear_fp8

SHAPES = ((5120, 2880), (2880, 4096))
TOKENS = (1, 8, 64, 128, 512, 2048, 8192, 32768)
ROTATED_BYTES = 256 << 20

# By the largest number of tokens that they are tried for.
SWEPT_TILES = {
    64: tuple(Tile(columns, m_groups=1, k_groups=2) for columns in (24, 32, 40, 48, 64, 80)),
    1024: (
        *(Tile(columns, m_groups=1, k_groups=2) for columns in (32, 48, 64, 80, 184, 192)),
        *(Tile(columns) for columns in (24, 32, 40, 48, 64, 88, 96, 128, 160, 192)),
    ),
    1 << 30: (
        *(Tile(columns) for columns in (96, 128, 160, 192)),
        *(Tile(columns, cluster_m=2) for columns in (160, 192)),
        *(Tile(128, waves=2, cluster_m=rows, cluster_n=3 - rows) for rows in (1, 2)),
        *(Tile(128, m_groups=3, cluster_m=rows, cluster_n=3 - rows) for rows in (1, 2)),
    ),
}


def swept_tiles(m: int) -> tuple[Tile, ...]:
    return next(tiles for limit, tiles in SWEPT_TILES.items() if m <= limit)


def tile_name(tile: Tile) -> str:
    name = f"{tile.rows}x{tile.columns}"
    name += f" k{tile.k_groups}" if tile.k_groups > 1 else ""
    name += f" m{tile.cluster_m}" if tile.cluster_m > 1 else ""
    name += f" n{tile.cluster_n}" if tile.cluster_n > 1 else ""
    return name


class Inputs:
    """One set of random quantised inputs; the values don't matter, that they are random does."""

    def __init__(self, m: int, n: int, k: int) -> None:
        def quantised(rows: int) -> torch.Tensor:
            values = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) * 64
            return values.clamp(-448, 448).to(torch.float8_e4m3fn)

        k_blocks, n_blocks = -(-k // 128), -(-n // 128)
        self.x, self.weight = quantised(m), quantised(n)
        self.x_scale = empty_scale(m, k, "cuda")
        self.x_scale.copy_(torch.rand(m, k_blocks, device="cuda") / 64)
        self.weight_scale = torch.rand(n_blocks, k_blocks, device="cuda") / 64
        self.bias = torch.randn(n, device="cuda")
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.row_scale = torch.rand(m, 1, device="cuda")
        self.column_scale = torch.rand(1, n, device="cuda")


def peers() -> dict[str, Callable[[Inputs], object]]:
    def cublaslt(one: Inputs) -> object:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            one.x,
            one.weight.t(),
            scale_a=one.row_scale,
            scale_b=one.column_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    found: dict[str, Callable[[Inputs], object]] = {
        f"cuBLASLt row-wise, torch {torch.__version__}": cublaslt
    }
    library = deep_gemm()
    if library is not None:
        module, name = library

        def deepgemm(one: Inputs) -> None:
            module.fp8_gemm_nt((one.x, one.x_scale), (one.weight, one.weight_scale), one.out)

        found[f"DeepGEMM (no bias), {name}"] = deepgemm
    return found


def measure(m: int, n: int, k: int, tiles: list[Tile]) -> dict[str, Timing]:
    size = m * k + n * k + 2 * m * n
    inputs = [Inputs(m, n, k) for _ in range(min(16, max(2, -(-ROTATED_BYTES // size))))]

    def ours(tile: Tile) -> Callable[[Inputs], object]:
        return lambda one: linear_fp8(
            one.x, one.x_scale, one.weight, one.weight_scale, one.bias, out=one.out, tile=tile
        )

    return time_calls({**{tile_name(tile): ours(tile) for tile in tiles}, **peers()}, inputs)


def record(
    m: int, n: int, k: int, tile: Tile, times: dict[str, Timing], command: str, commit: str
) -> dict[str, object]:
    operations = 2 * m * n * k
    name = tile_name(tile)
    return {
        **result_line("linear", times, name, command, commit),
        "tokens": m,
        "n": n,
        "k": k,
        "tile": name,
        "floor_ms": round(floor_ms(operations, m * k + n * k + 2 * m * n), 6),
        "tflops": round(operations / times[name].median / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--commit", default=command_output("git", "rev-parse", "--short", "HEAD"))
    arguments = parser.parse_args()

    if arguments.sweep:
        with concurrent.futures.ProcessPoolExecutor() as pool:
            list(pool.map(Tile.compile, itertools.chain(*SWEPT_TILES.values())))
    command = "python tests/bench/bench_linear.py" + (" --sweep" if arguments.sweep else "")
    num_blocks = torch.cuda.get_device_properties(0).multi_processor_count
    lines = []
    for n, k in SHAPES:
        for m in arguments.tokens:
            tile = choose_tile(m, n, k, num_blocks)
            tiles = [tile, *(swept_tiles(m) if arguments.sweep else ())]
            times = measure(m, n, k, list(dict.fromkeys(tiles)))
            print(f"{m} x {n} x {k}, chosen {tile_name(tile)}")
            print_ranked(times, 2 * m * n * k)
            lines.append(json.dumps(record(m, n, k, tile, times, command, arguments.commit)))
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(lines[-1] + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
