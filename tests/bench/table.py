"""The kernels' figures as a Markdown table, from the result files; of two lines the newer counts.

python tests/bench/table.py >> kernels/README.md
python tests/bench/table.py results.jsonl   # of these files alone

A figure is in us of a burst / sustained, see measuring.py; lines from before 2026-11-30's
bench_gemm.py have one figure. The share is that of the floor, of a burst.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measuring import PEAK_FLOPS

RESULTS = Path(__file__).parent / "results"
ACTIVATIONS = ("quantise", "rms_norm_fp8", "dispatch_fp8", "combine")
BENCHMARKS = ("linear", "moe_gemm", *ACTIVATIONS)
# cuBLASLt by row scales by row, which is less work, and MXFP4 is half the bytes: no peers.
NOT_PEERS = ("cuBLASLt row-wise", "Humming MXFP4", "Triton-lang", "deepgemm operators")
KEY = ("benchmark", "model", "n", "k", "tokens", "swiglu_group", "weight_values")


def newest_lines(paths: list[Path]) -> list[dict[str, Any]]:
    lines: dict[tuple[object, ...], dict[str, Any]] = {}
    for path in paths:
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line["benchmark"] in BENCHMARKS:
                lines[tuple(line.get(name) for name in KEY)] = line
    return sorted(
        lines.values(),
        key=lambda line: (
            BENCHMARKS.index(line["benchmark"]),
            line["model"] or "",
            line.get("n", 0),
            line["tokens"],
            line["date"],
        ),
    )


def operator(line: dict[str, Any]) -> str:
    match line["benchmark"]:
        case "linear":
            return f"`linear_fp8`, N = {line['n']}, K = {line['k']}"
        case "moe_gemm":
            values = "" if line.get("weight_values") == "mxfp4" else ", Gaussian weights"
            group = f", groups of {line['swiglu_group']}" if line.get("swiglu_group") != 128 else ""
            return f"both grouped products, {line['model']}{group}{values}"
    return f"`{line['benchmark']}`" + (f", {line['model']}" if line["model"] else "")


def bound_by(line: dict[str, Any]) -> str:
    if "tflops" not in line:
        return "memory"
    arithmetic_ms = line["tflops"] * 1e12 * line["ms"] / PEAK_FLOPS
    return "memory" if line["floor_ms"] > 1.05 * arithmetic_ms else "tensor cores"


def best(peers: dict[str, float]) -> tuple[str, float] | None:
    """The fastest peer, without its version."""
    real = {name: ms for name, ms in peers.items() if not name.startswith(NOT_PEERS)}
    if not real:
        return None
    name = min(real, key=lambda name: real[name])
    return name.split(",")[0], real[name]


def best_text(line: dict[str, Any]) -> str:
    peers = [best(line["peers"]), best(line.get("peers_sustained", {}))]
    found = [peer for peer in peers if peer is not None]
    if not found:
        return ""
    times = " / ".join(f"{ms * 1e3:.1f}" for _, ms in found)
    return f"{' / '.join(dict.fromkeys(name for name, _ in found))}: {times}"


def row(line: dict[str, Any]) -> str:
    times = [line["ms"], *([line["sustained_ms"]] if "sustained_ms" in line else [])]
    rate = f"{line['tflops']:.0f} TFLOP/s" if "tflops" in line else f"{line['tb_per_s']:.2f} TB/s"
    cells = (
        operator(line),
        str(line["tokens"]),
        bound_by(line),
        " / ".join(f"{ms * 1e3:.1f}" for ms in times),
        rate,
        f"{line['floor_ms'] / line['ms']:.0%}",
        best_text(line),
        f"{line['date']}, {line['commit']}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files
    lines = newest_lines(files or sorted(RESULTS.glob("*.jsonl"), key=lambda path: path.stem[-10:]))
    print(
        "| operator | tokens | bound by | us | rate | share of floor | best peer, us | measured |"
    )
    print("|-|-|-|-|-|-|-|-|")
    for line in lines:
        print(row(line))


if __name__ == "__main__":
    main()
