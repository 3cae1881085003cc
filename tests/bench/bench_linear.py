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
import datetime
import importlib
import importlib.metadata
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from gptoss_kernels.linear_fp8 import Tile, choose_tile, empty_scale, linear_fp8

SHAPES = ((5120, 2880), (2880, 4096))
TOKENS = (1, 8, 64, 128, 512, 2048, 8192, 32768)
ROTATED_BYTES = 256 << 20
TURNS = 3
PEAK_FLOPS, PEAK_BYTES = 1430e12, 4.5e12  # measured on an H200, see the performance notes

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


def capture(call: Callable[[Inputs], object], inputs: list[Inputs]) -> torch.cuda.CUDAGraph:
    for one in inputs[:2]:
        call(one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in inputs:
            call(one)
    return graph


def time_calls(
    calls: dict[str, Callable[[Inputs], object]], inputs: list[Inputs]
) -> dict[str, list[float]]:
    """Milliseconds a call, by name: [p10, median, p90] over the replays of a graph.

    Large products draw all the power that the board allows, and its clock follows: so all take
    turns, each long enough to settle, and only the second half of a turn counts.
    """
    graphs = {name: capture(call, inputs) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, graph in graphs.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            replay = events[0].elapsed_time(events[1])
            turn_ms = 60.0 if replay / len(inputs) > 0.03 else 10.0
            count = max(4, int(turn_ms / replay))
            events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            if turn > 0:
                times[name] += [
                    start.elapsed_time(end) / len(inputs)
                    for start, end in itertools.pairwise(events[count // 2 :])
                ]
    return {name: quantiles(values) for name, values in times.items()}


def quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)]


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
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return found
    deep_gemm.set_pdl(True)

    def deepgemm(one: Inputs) -> None:
        deep_gemm.fp8_gemm_nt((one.x, one.x_scale), (one.weight, one.weight_scale), one.out)

    found[f"DeepGEMM (no bias), sgl-deep-gemm {importlib.metadata.version('sgl-deep-gemm')}"] = (
        deepgemm
    )
    return found


def command_output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def measure(m: int, n: int, k: int, tiles: list[Tile]) -> dict[str, list[float]]:
    size = m * k + n * k + 2 * m * n
    inputs = [Inputs(m, n, k) for _ in range(min(16, max(2, -(-ROTATED_BYTES // size))))]

    def ours(tile: Tile) -> Callable[[Inputs], object]:
        return lambda one: linear_fp8(
            one.x, one.x_scale, one.weight, one.weight_scale, one.bias, out=one.out, tile=tile
        )

    return time_calls({**{tile_name(tile): ours(tile) for tile in tiles}, **peers()}, inputs)


def record(
    m: int, n: int, k: int, tile: Tile, times: dict[str, list[float]], commit: str
) -> dict[str, object]:
    low, median, high = times[tile_name(tile)]
    floor = max(2 * m * n * k / PEAK_FLOPS, (m * k + n * k + 2 * m * n) / PEAK_BYTES) * 1e3
    return {
        "benchmark": "linear",
        "model": None,
        "weights": "fp8",
        "kv": None,
        "tokens": m,
        "n": n,
        "k": k,
        "tile": tile_name(tile),
        "tp": 1,
        "ep": 1,
        "dp": 1,
        "ms": round(median, 6),
        "spread_ms": [round(low, 6), round(high, 6)],
        "peers": {
            name: round(values[1], 6) for name, values in times.items() if name != tile_name(tile)
        },
        "floor_ms": round(floor, 6),
        "tflops": round(2 * m * n * k / median / 1e9, 1),
        "device": torch.cuda.get_device_name(),
        "driver": command_output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python tests/bench/bench_linear.py",
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
    num_blocks = torch.cuda.get_device_properties(0).multi_processor_count
    lines = []
    for n, k in SHAPES:
        for m in arguments.tokens:
            tile = choose_tile(m, n, k, num_blocks)
            tiles = [tile, *(swept_tiles(m) if arguments.sweep else ())]
            times = measure(m, n, k, list(dict.fromkeys(tiles)))
            ranked = sorted(times.items(), key=lambda item: item[1][1])
            print(f"{m} x {n} x {k}, chosen {tile_name(tile)}")
            for name, (low, median, high) in ranked:
                print(
                    f"  {name[:30]:30} {median * 1e3:9.2f} us"
                    f"  [{low * 1e3:9.2f} {high * 1e3:9.2f}]"
                    f" {2 * m * n * k / median / 1e9:7.0f} TFLOP/s"
                )
            lines.append(json.dumps(record(m, n, k, tile, times, arguments.commit)))
            sys.stdout.flush()
            if arguments.output:
                with arguments.output.open("a") as file:
                    file.write(lines[-1] + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
