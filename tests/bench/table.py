"""The kernels' figures as Markdown tables, from the result files; of two lines the newer counts.

python tests/bench/table.py results/operators-2026-11-30.jsonl   # of these files alone
python tests/bench/table.py                                      # of all

Times are in us: of a burst, and of long turns where the board's clock falls in them (measuring.py).
Rate, floor and its share are of the burst; a peer has both times, too. A second table has our other
implementations of the operators, where they ran, a third the errors of attention against float64.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import PEAK_BYTES, PEAK_FLOPS

RESULTS = Path(__file__).parent / "results"
ACTIVATIONS = (
    *("quantise", "rms_norm_fp8", "norm_route", "dispatch_fp8", "combine", "embedding"),
    "lm_head",
)
ATTENTION = ("attention_prefill", "attention_decode")
SAMPLING = ("sample", "logprobs")
BENCHMARKS = (
    "linear",
    "moe_gemm",
    "experts_fp8",
    *ACTIVATIONS,
    "rope_and_cache_write",
    *ATTENTION,
    *SAMPLING,
    "all_reduce",
)
OTHERS = ("Triton-lang", "deepgemm operators")  # of ours
# cuBLASLt by row scales by row, and cuDNN has no sinks, which is less work, and MXFP4 is half the
# bytes: no peers.
NOT_PEERS = ("cuBLASLt row-wise", "cuDNN", "Humming MXFP4", *OTHERS)
KEY = (
    *("benchmark", "model", "n", "k", "tokens", "swiglu_group", "weight_values"),
    *("kv", "window", "queries", "context", "batch", "kind", "inputs", "tp", "run"),
)
NEEDED = ("model", "tokens", "ms", "floor_ms", "peers", "date", "commit", "device")


class NoResult(ValueError):
    """A file or a line that holds no figures: a sentence."""


def newest_lines(paths: list[Path]) -> list[dict[str, Any]]:
    lines: dict[tuple[object, ...], dict[str, Any]] = {}
    for path in paths:
        for number, text in enumerate(text_of(path).splitlines(), 1):
            line = parsed(text, f"{path}:{number}")
            if line["benchmark"] in BENCHMARKS:
                lines[tuple(line.get(name) for name in KEY)] = line
    return sorted(
        lines.values(),
        key=lambda line: (
            BENCHMARKS.index(line["benchmark"]),
            line["model"] or "",
            line.get("n", 0),
            line.get("kv") or "",
            line.get("window", 0),
            line.get("context", 0),
            line.get("inputs", ""),
            line.get("kind", ""),
            line.get("tp", 1),
            line.get("run", ""),
            line["tokens"] or 0,
            line.get("batch") or 0,
            line["date"],
        ),
    )


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise NoResult(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NoResult(f"{path} is no text: {error}") from error


def parsed(text: str, place: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise NoResult(f"{place} is no JSON line: {error}") from error
    if not isinstance(line, dict) or "benchmark" not in line:
        raise NoResult(f"{place} is no line of a benchmark's results")
    missing = [name for name in NEEDED if name not in line]
    if line["benchmark"] in BENCHMARKS and missing:
        raise NoResult(f"{place} has no {', '.join(missing)}")
    return line


def operator(line: dict[str, Any]) -> str:
    match line["benchmark"]:
        case "linear":
            return f"`linear_fp8`, N = {line['n']}, K = {line['k']}"
        case "moe_gemm":
            values = "" if line.get("weight_values") == "mxfp4" else ", Gaussian weights"
            group = f", groups of {line['swiglu_group']}" if line.get("swiglu_group") != 128 else ""
            return f"both grouped products, {line['model']}{group}{values}"
        case "attention_prefill" | "attention_decode" as name:
            window = f", window {line['window']}" if line["window"] else ""
            queries = f" of {line['queries']} queries" if name.endswith("decode") else ""
            kind = name.removeprefix("attention_")
            return f"`attention`, {kind}{queries}, {line['kv']} KV{window}"
        case "rope_and_cache_write" as name:
            return f"`{name}`, {line['kv']} KV"
        case "sample" | "logprobs" as name:
            kind = f", {line['kind']}" if "kind" in line else ""
            return f"`{name}`{kind}{', logits beyond L2' if line['inputs'] == 'cold' else ''}"
        case "all_reduce":
            form = "and the norm" if line["run"] == "fused" else "alone"
            return f"`reduction` {form}, {line['tp']} ranks"
    return f"`{line['benchmark']}`" + (f", {line['model']}" if line["model"] else "")


def size(line: dict[str, Any]) -> str:
    """In tokens; of decodes, how many at what context."""
    return str(line["tokens"] or f"{line['batch']} at {line['context']}")


def bound_by(line: dict[str, Any]) -> str:
    if "bound_by" in line:
        return line["bound_by"]
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
    burst, sustained = best(line["peers"]), best(line.get("peers_sustained", {}))
    if burst is None:
        return ""
    text = f"{burst[0]}: {microseconds(burst[1])}"
    if sustained is None:
        return text
    name = f"{sustained[0]}: " if sustained[0] != burst[0] else ""
    return f"{text}, sustained {name}{microseconds(sustained[1])}"


def microseconds(ms: float) -> str:
    return f"{ms * 1e3:.1f}"


def row(line: dict[str, Any]) -> str:
    return cells(
        operator(line),
        bound_by(line),
        size(line),
        microseconds(line["ms"]),
        microseconds(line["sustained_ms"]) if "sustained_ms" in line else "",
        rate(line),
        f"{line['floor_ms'] / line['ms']:.0%}",
        best_text(line),
    )


def rate(line: dict[str, Any]) -> str:
    """Of what bounds it. A product's bytes are those of its floor."""
    if bound_by(line) not in ("memory", "the link"):
        return f"{line['tflops']:.0f} TFLOP/s"
    moved = line.get("tb_per_s", line["floor_ms"] / line["ms"] * PEAK_BYTES / 1e12)
    return f"{moved:.2f} TB/s"


def others_row(line: dict[str, Any]) -> str:
    times = [microseconds(line["peers"][name]) if name in line["peers"] else "" for name in OTHERS]
    return cells(operator(line), size(line), microseconds(line["ms"]), *times)


def errors_row(line: dict[str, Any]) -> str:
    """Ours, and each peer's, the smallest first."""
    errors = {name.split(",")[0]: error for name, error in line["errors"].items()}
    own = errors.pop("ours")
    peers = sorted(errors.items(), key=lambda item: item[1])
    texts = [f"{name} {error:.2e}" for name, error in peers]
    return cells(operator(line), size(line), f"{own:.2e}", ", ".join(texts))


def cells(*texts: object) -> str:
    return f"| {' | '.join(map(str, texts))} |"


def header(*names: str) -> str:
    return f"{cells(*names)}\n|{'-|' * len(names)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files
    try:
        lines = newest_lines(
            files or sorted(RESULTS.glob("*.jsonl"), key=lambda path: path.stem[-10:])
        )
    except NoResult as error:
        sys.exit(f"table.py: {error}")
    if not lines:
        sys.exit(f"table.py: no figures of {', '.join(BENCHMARKS)} in these files")
    times = ("burst, us", "sustained, us", "rate", "share of floor", "best peer, us")
    print(header("operator", "bound by", "tokens", *times))
    for line in lines:
        print(row(line))
    origins = Counter(f"{line['date']}, {line['commit']}, {line['device']}" for line in lines)
    print("\nMeasured:", "; ".join(f"{origin} ({count} rows)" for origin, count in origins.items()))
    others = [line for line in lines if any(name in line["peers"] for name in OTHERS)]
    if others:
        print("\n" + header("operator", "tokens", "CUDA C++, us", *OTHERS))
        for line in others:
            print(others_row(line))
    judged = [line for line in lines if "errors" in line]
    if judged:
        print("\n" + header("operator", "tokens", "error", "others"))
        for line in judged:
            print(errors_row(line))


if __name__ == "__main__":
    main()
