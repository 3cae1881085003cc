"""What the benchmarks of operators share: timing several candidates in turn, and result lines."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import itertools
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch

PEAK_FLOPS, PEAK_BYTES = 1430e12, 4.5e12  # measured on an H200, see the performance notes
TURNS = 3
Inputs = TypeVar("Inputs")


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


def deep_gemm() -> tuple[ModuleType, str] | None:
    """The library and its name with its version, where it can be imported."""
    try:
        module = importlib.import_module("deep_gemm")
    except ImportError:
        return None
    module.set_pdl(True)
    return module, f"sgl-deep-gemm {importlib.metadata.version('sgl-deep-gemm')}"


def command_output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def floor_ms(operations: float, num_bytes: float) -> float:
    return max(operations / PEAK_FLOPS, num_bytes / PEAK_BYTES) * 1e3


def result_line(
    benchmark: str, times: dict[str, list[float]], ours: str, command: str, commit: str
) -> dict[str, object]:
    """The fields that each line of a result file has; the benchmark adds its own."""
    low, median, high = times[ours]
    return {
        "benchmark": benchmark,
        "model": None,
        "weights": "fp8",
        "kv": None,
        "tp": 1,
        "ep": 1,
        "dp": 1,
        "ms": round(median, 6),
        "spread_ms": [round(low, 6), round(high, 6)],
        "peers": {name: round(values[1], 6) for name, values in times.items() if name != ours},
        "device": torch.cuda.get_device_name(),
        "driver": command_output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
    }


def print_ranked(times: dict[str, list[float]], operations: float) -> None:
    for name, (low, median, high) in sorted(times.items(), key=lambda item: item[1][1]):
        print(
            f"  {name[:30]:30} {median * 1e3:9.2f} us  [{low * 1e3:9.2f} {high * 1e3:9.2f}]"
            f" {operations / median / 1e9:7.0f} TFLOP/s",
            flush=True,
        )
