"""What the benchmarks' command lines and runs share, and what happens where a peer fails."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch
from measuring import Board, Call, Plan, Timing, command_output, result_line, time_calls

OURS = "ours"
ROTATED_BYTES = 256 << 20  # of inputs that take turns: more than the L2 cache holds
EXPERTS = {"120b": 128, "20b": 32}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
Made = TypeVar("Made")


class Bench:
    """What all products share: the options, the board, and where the lines go."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.plan = Plan(arguments.bursts, arguments.rest, arguments.turns, arguments.all_sustained)
        self.board = Board()
        self.lines: list[str] = []
        words = sys.argv[1:]
        for option in ("--output", "--commit"):
            if option in words:
                index = words.index(option)
                del words[index : index + 2]
        self.command = " ".join([f"python tests/bench/{Path(sys.argv[0]).name}", *words])

    def time(
        self,
        calls: dict[str, Call],
        count: int,
        *,
        is_heavy: bool,
        only_burst: Iterable[str] = (),
    ) -> dict[str, Timing]:
        return time_calls(calls, count, self.plan, self.board, is_heavy, tuple(only_burst))

    def record(self, benchmark: str, times: dict[str, Timing], ours: str, **own: object) -> None:
        line = result_line(benchmark, times, ours, self.command, self.arguments.commit)
        line |= {"bursts": self.plan.bursts, "turns": self.plan.turns, "rest_s": self.plan.rest}
        line |= own
        self.lines.append(json.dumps(line))
        if self.arguments.output:
            with self.arguments.output.open("a") as file:
                file.write(self.lines[-1] + "\n")


def tried(what: str, make: Callable[[], Made]) -> Made | None:
    """What `make` gives; or nothing, with the reason printed: a peer's failure ends no run."""
    try:
        result = make()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  what a library raises is its own affair
        print(f"  without {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    return result


def named(peer: str, distribution: str) -> str:
    return f"{peer}, {distribution} {version(distribution)}"


Run = Callable[[Bench], None]


def parser_of(description: str | None, runs: Iterable[str]) -> argparse.ArgumentParser:
    """With the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(runs)}; all if none")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--tokens", type=int, nargs="+", help="other sizes than the usual ones")
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before each burst")
    parser.add_argument("--bursts", type=int, default=3, help="bursts of each candidate")
    parser.add_argument("--turns", type=int, default=3, help="sustained turns of each; 0 for none")
    parser.add_argument(
        "--all-sustained", action="store_true", help="turns of what leaves the clock as it is, too"
    )
    parser.add_argument("--commit", default=command_output("git", "rev-parse", "--short", "HEAD"))
    return parser


def run(parser: argparse.ArgumentParser, runs: Mapping[str, Run]) -> None:
    """Those that the command line names, and their lines, which it may name a file for."""
    arguments = parser.parse_args()
    unknown = set(arguments.runs) - set(runs)
    if unknown:
        parser.error(f"there are {', '.join(runs)}, got {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit(f"{parser.prog}: it times GPU kernels, and no CUDA device was found")
    if arguments.output:
        try:
            arguments.output.open("a").close()
        except OSError as error:
            parser.error(f"cannot write {arguments.output}: {error.strerror}")
    bench = Bench(arguments)
    for name in arguments.runs or runs:
        runs[name](bench)
    if not arguments.output:
        print("\n".join(bench.lines))
