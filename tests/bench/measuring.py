"""What the benchmarks of operators share: timing several candidates in turn, and result lines."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import itertools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import TypeVar

import torch

PEAK_FLOPS, PEAK_BYTES = 1430e12, 4.5e12  # measured on an H200, see the performance notes
TURNS = 3
# Of a turn, by the least milliseconds a call: what takes longer draws the board's whole power.
TURN_MS = ((0.1, 800.0), (0.03, 60.0), (0.0, 10.0))
CLOCK_TURN_MS = 800.0
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


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call, over the replays of a graph, and the SM clock meanwhile if it is known.

    The clock is read in long turns alone: reading takes longer than a short one.
    """

    low: float  # p10
    median: float
    high: float  # p90
    sm_mhz: int | None


def time_calls(
    calls: dict[str, Callable[[Inputs], object]], inputs: list[Inputs]
) -> dict[str, Timing]:
    """The time of each call, by name, all in turn.

    Large products draw all the power that the board allows, and its clock follows: in turns of
    60 ms one was 16 % behind another, in turns of 0.8 s 7 %. So a turn of those takes 0.8 s, of
    which the second half counts, and the order rotates.
    """
    graphs = {name: capture(call, inputs) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    clocks: dict[str, list[int]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(TURNS + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            turn_times, clock = time_turn(graphs[name], len(inputs))
            if turn > 0:
                times[name] += turn_times
                clocks[name] += [clock] if clock is not None else []
    return {
        name: Timing(*quantiles(times[name]), int(median(clocks[name])) if clocks[name] else None)
        for name in names
    }


def time_turn(graph: torch.cuda.CUDAGraph, num_calls: int) -> tuple[list[float], int | None]:
    """Milliseconds a call of each replay in the second half of a turn, and the clock in there."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    replay = events[0].elapsed_time(events[1])
    turn_ms = next(ms for least, ms in TURN_MS if replay / num_calls > least)
    count = max(4, int(turn_ms / replay))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    clock = None
    if turn_ms >= CLOCK_TURN_MS:
        events[count // 2].synchronize()
        clock = sm_mhz()
        if events[-1].query():  # read too late: the board may have been at rest
            clock = None
    torch.cuda.synchronize()
    return [
        start.elapsed_time(end) / num_calls
        for start, end in itertools.pairwise(events[count // 2 :])
    ], clock


def sm_mhz() -> int | None:
    identity = f"GPU-{torch.cuda.get_device_properties().uuid}"
    answer = command_output(
        "nvidia-smi", f"--id={identity}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"
    )
    return int(answer) if answer.isdigit() else None


def quantiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    return low, middle, high


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
    benchmark: str, times: dict[str, Timing], ours: str, command: str, commit: str
) -> dict[str, object]:
    """The fields that each line of a result file has; the benchmark adds its own."""
    own = times[ours]
    return {
        "benchmark": benchmark,
        "model": None,
        "weights": "fp8",
        "kv": None,
        "tp": 1,
        "ep": 1,
        "dp": 1,
        "ms": round(own.median, 6),
        "spread_ms": [round(own.low, 6), round(own.high, 6)],
        "sm_mhz": own.sm_mhz,
        "peers": {name: round(one.median, 6) for name, one in times.items() if name != ours},
        "peers_sm_mhz": {name: one.sm_mhz for name, one in times.items() if name != ours},
        "device": torch.cuda.get_device_name(),
        "driver": command_output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
    }


def print_ranked(times: dict[str, Timing], operations: float) -> None:
    for name, one in sorted(times.items(), key=lambda item: item[1].median):
        clock = f" {one.sm_mhz} MHz" if one.sm_mhz is not None else ""
        print(
            f"  {name[:30]:30} {one.median * 1e3:9.2f} us  [{one.low * 1e3:9.2f}"
            f" {one.high * 1e3:9.2f}] {operations / one.median / 1e9:7.0f} TFLOP/s{clock}",
            flush=True,
        )
