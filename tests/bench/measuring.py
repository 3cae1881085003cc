"""How the benchmarks of operators measure: several candidates in turn, in two regimes.

burst: the board rested, then the calls of 50 ms with the first 10 of them left out, as a library's
own benchmark or a single prefill has it. sustained: turns of 0.8 s, of which the second half
counts. Large products draw more than the 700 W that an H200 allows. It notices after some 50 to
100 ms, and its clock then falls from 1980 MHz to between 1300 and 1600
(results/board_clock-2026-11-30.jsonl): a burst ends before that, and the regimes differ by up to a
fifth. Where a call is short or arithmetic a small part of its work, the clock stays, and there are
no turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
from rich.console import Console
from rich.progress import track

# Measured on an H200, see the performance notes: tensor cores, reading, and a copy's both ways.
PEAK_FLOPS, PEAK_BYTES, COPIED_BYTES = 1430e12, 4.5e12, 4.24e12
WARM_UP_MS, BURST_MS, TURN_MS = 10.0, 40.0, 800.0
SUSTAINED_FROM_MS = 0.1  # a call
CHOOSING_MS = 5.0
# A replay begins some 5 us after the one before it has ended, which are no call's. So a graph has
# many, as a model's step does, but no more than take so long.
GRAPH_CALLS, GRAPH_MS = 16, 8.0
SAMPLE_SECONDS = 0.005

Call = Callable[[int], object]  # of the input with this index


@dataclass(frozen=True)
class Plan:
    """Of each candidate: bursts, seconds of rest before each, sustained turns (0 for none).

    `is_forced`: turns of what leaves the clock as it is, too, to show that it does.
    """

    bursts: int = 3
    rest: float = 1.0
    turns: int = 3
    is_forced: bool = False


@dataclass(frozen=True)
class Spread:
    """Milliseconds a call over the replays of a graph; clock and power meanwhile, if known."""

    low: float  # p10
    median: float
    high: float  # p90
    sm_mhz: int | None
    watts: int | None


@dataclass(frozen=True)
class Timing:
    burst: Spread
    sustained: Spread | None


@dataclass
class Samples:
    """What several stretches of replays gave."""

    times: list[float] = field(default_factory=list)
    sm_mhz: list[int] = field(default_factory=list)
    watts: list[int] = field(default_factory=list)

    def spread(self) -> Spread:
        ordered = sorted(self.times)
        low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
        clock, power = (
            int(median(values)) if values else None for values in (self.sm_mhz, self.watts)
        )
        return Spread(low, middle, high, clock, power)


class Board:
    """Clock and power of the current GPU through NVML; no samples where that cannot be loaded."""

    _SM_CLOCK = 1

    def __init__(self) -> None:
        self._device: ctypes.c_void_p | None = None
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        identity = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
        device = ctypes.c_void_p()
        is_ready = self._nvml.nvmlInit_v2() == 0
        if is_ready and not self._nvml.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(device)):
            self._device = device

    @contextlib.contextmanager
    def sampled(self, samples: Samples) -> Iterator[None]:
        """Adds a sample each 5 ms, from a thread of its own, while the block runs."""
        if self._device is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(samples, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sample(self, samples: Samples, ended: threading.Event) -> None:
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        while not ended.wait(SAMPLE_SECONDS):
            if not self._nvml.nvmlDeviceGetClockInfo(
                self._device, self._SM_CLOCK, ctypes.byref(clock)
            ):
                samples.sm_mhz.append(clock.value)
            if not self._nvml.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(power)):
                samples.watts.append(power.value // 1000)


def tracked(names: Sequence[str], what: str) -> Iterable[str]:
    """A bar on the terminal, which leaves with the last; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    return track(names, what, console=console, transient=True, disable=not console.is_terminal)


def capture(call: Call, count: int, rounds: int = 1) -> torch.cuda.CUDAGraph:
    """One call of each of `count` inputs, and that `rounds` times, after a first of each, which
    compiles and allocates."""
    for index in range(count):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for index in range(count):
                call(index)
    return graph


def time_calls(
    calls: dict[str, Call],
    count: int,
    plan: Plan,
    board: Board,
    is_heavy: bool,
    only_burst: Sequence[str] = (),
) -> dict[str, Timing]:
    """The time of a call, by name: bursts in rotation, then sustained turns in rotation.

    Each call is captured over the `count` inputs, which together are larger than the L2 cache, and
    that as often as `_rounds` says. Turns are of what `is_heavy` and not short. What is in
    `only_burst` has one burst and no more.
    """
    rounds = min(_rounds(call, count) for call in calls.values())
    graphs = {name: capture(call, count, rounds) for name, call in calls.items()}
    captured = count * rounds
    bursts = {name: Samples() for name in calls}
    whole = [name for name in calls if name not in only_burst]
    for name in tracked([*_rotating(whole, plan.bursts), *only_burst], "bursts"):
        _burst(graphs[name], captured, plan.rest, bursts[name], board)
    is_long = any(bursts[name].spread().median > SUSTAINED_FROM_MS for name in whole)
    turns = plan.turns if plan.is_forced or (is_heavy and is_long) else 0
    sustained = {name: Samples() for name in whole if turns}
    for name in tracked([*_rotating(list(sustained), turns)], "turns"):
        _turn(graphs[name], captured, sustained[name], board)
    return {
        name: Timing(
            bursts[name].spread(),
            sustained[name].spread() if name in sustained else None,
        )
        for name in calls
    }


def fastest(calls: Sequence[Call], count: int) -> Call:
    """Of calls that do the same, by a few milliseconds of each."""
    if len(calls) == 1:
        return calls[0]

    def duration(call: Call) -> float:
        graph = capture(call, count)
        number = max(5, int(CHOOSING_MS / _one_replay(graph)))
        events = _replays(graph, number)
        events[-1].synchronize()
        return median(_times(events, count))

    return min(calls, key=duration)


def _rounds(call: Call, count: int) -> int:
    """How often a graph has each input."""
    events = _replays(capture(call, count), 3)
    events[-1].synchronize()
    return max(1, min(-(-GRAPH_CALLS // count), int(GRAPH_MS / median(_times(events, 1)))))


def _rotating(names: list[str], rounds: int) -> Iterator[str]:
    """All names in each round, the first of them another each time."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from names[first:] + names[:first]


def _burst(
    graph: torch.cuda.CUDAGraph, count: int, rest: float, samples: Samples, board: Board
) -> None:
    replay = _one_replay(graph)
    time.sleep(rest)
    for _ in range(max(1, int(WARM_UP_MS / replay))):
        graph.replay()
    events = _replays(graph, max(3, int(BURST_MS / replay)))
    events[0].synchronize()
    with board.sampled(samples):
        events[-1].synchronize()
    samples.times += _times(events, count)


def _turn(graph: torch.cuda.CUDAGraph, count: int, samples: Samples, board: Board) -> None:
    replay = _one_replay(graph)
    events = _replays(graph, max(4, int(TURN_MS / replay)))
    second_half = events[len(events) // 2 :]
    second_half[0].synchronize()
    with board.sampled(samples):
        events[-1].synchronize()
    samples.times += _times(second_half, count)


def _one_replay(graph: torch.cuda.CUDAGraph) -> float:
    events = _replays(graph, 1)
    events[-1].synchronize()
    return max(1e-3, events[0].elapsed_time(events[1]))


def _replays(graph: torch.cuda.CUDAGraph, number: int) -> list[torch.cuda.Event]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    return events


def _times(events: list[torch.cuda.Event], count: int) -> list[float]:
    return [start.elapsed_time(end) / count for start, end in pairwise(events)]


def command_output(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def floor_ms(operations: float, num_bytes: float) -> float:
    return max(operations / PEAK_FLOPS, num_bytes / PEAK_BYTES) * 1e3


def is_heavy(operations: float, num_bytes: float) -> bool:
    """Whether arithmetic would take a third of the time that memory takes, or more."""
    return operations / PEAK_FLOPS > num_bytes / PEAK_BYTES / 3


def result_line(
    benchmark: str, times: dict[str, Timing], ours: str, command: str, commit: str
) -> dict[str, object]:
    """The fields that each line of a result file has; the benchmark adds its own.

    `ms` and what has no other word before it is of the burst.
    """
    own = times[ours]
    peers = {name: one for name, one in times.items() if name != ours}
    held = {name: one.sustained for name, one in peers.items() if one.sustained}
    return {
        "benchmark": benchmark,
        "model": None,
        "weights": "fp8",
        "kv": None,
        "tp": 1,
        "ep": 1,
        "dp": 1,
        **_fields("", own.burst),
        **(_fields("sustained_", own.sustained) if own.sustained else {}),
        "peers": {name: round(one.burst.median, 6) for name, one in peers.items()},
        "peers_sm_mhz": {name: one.burst.sm_mhz for name, one in peers.items()},
        "peers_sustained": {name: round(one.median, 6) for name, one in held.items()},
        "peers_sustained_sm_mhz": {name: one.sm_mhz for name, one in held.items()},
        "device": torch.cuda.get_device_name(),
        "driver": command_output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command,
    }


def _fields(before: str, spread: Spread) -> dict[str, object]:
    return {
        f"{before}ms": round(spread.median, 6),
        f"{before}spread_ms": [round(spread.low, 6), round(spread.high, 6)],
        f"{before}sm_mhz": spread.sm_mhz,
        f"{before}watts": spread.watts,
    }


def print_ranked(times: dict[str, Timing], operations: float) -> None:
    """One line a candidate, the fastest burst first."""
    for name, one in sorted(times.items(), key=lambda item: item[1].burst.median):
        print(f"  {name[:30]:30}{_text(one.burst, operations)}", end="")
        print(f" |{_text(one.sustained, operations)}" if one.sustained else "", flush=True)


def print_short(what: str, times: dict[str, Timing]) -> None:
    """The bursts in one line, the fastest first, names without what is in brackets and versions."""
    ordered = sorted(times.items(), key=lambda item: item[1].burst.median)
    short = {name: name.split(",")[0].split(" (")[0] for name in times}
    print(
        f"  {what}:",
        ", ".join(f"{short[name]} {one.burst.median * 1e3:.1f}" for name, one in ordered),
        flush=True,
    )


def _text(spread: Spread, operations: float) -> str:
    rate = f"{operations / spread.median / 1e9:5.0f} T" if operations else ""
    return f"{spread.median * 1e3:8.1f} us{rate} {spread.sm_mhz or 0:4} MHz {spread.watts or 0:3} W"
