"""The kernels' figures as a Markdown table, from the result files; of two lines the newer counts.

python tests/bench/table.py >> kernels/README.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# cuBLASLt scales by row, which is less work: a ceiling, not a peer.
NOT_PEERS = ("cuBLASLt row-wise",)


def newest_lines() -> list[dict[str, Any]]:
    lines: dict[tuple[object, ...], dict[str, Any]] = {}
    for path in sorted(RESULTS.glob("*.jsonl"), key=lambda path: path.stem[-10:]):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line["benchmark"] in ("linear", "moe_gemm"):
                key = ("benchmark", "model", "n", "k", "tokens", "swiglu_group")
                lines[tuple(line.get(name) for name in key)] = line
    return sorted(
        lines.values(),
        key=lambda line: (line["benchmark"], line["model"] or "", line.get("n", 0), line["tokens"]),
    )


def row(line: dict[str, Any]) -> str:
    if line["benchmark"] == "linear":
        operator = f"`linear_fp8`, N = {line['n']}, K = {line['k']}"
    else:
        operator = f"both grouped products, {line['model']}"
    peers = {
        name.split(",")[0]: ms
        for name, ms in line["peers"].items()
        if not name.startswith(NOT_PEERS)
    }
    best = min(peers, key=lambda name: peers[name])
    return " | ".join(
        [
            f"| {operator}",
            f"{line['tokens']}",
            f"{line['ms'] * 1e3:.1f}",
            f"{line['tflops']:.0f}",
            f"{line['floor_ms'] / line['ms']:.0%}",
            f"{best}: {peers[best] * 1e3:.1f}",
            f"{line['date']}, {line['commit']} |",
        ]
    )


def main() -> None:
    print("| operator | tokens | us | TFLOP/s | share of the floor | best peer, us | measured |")
    print("|-|-|-|-|-|-|-|")
    for line in newest_lines():
        print(row(line))


if __name__ == "__main__":
    main()
