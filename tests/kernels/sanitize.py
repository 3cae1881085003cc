"""compute-sanitizer over all served CUDA kernels, on small shapes.

    python tests/kernels/sanitize.py                                # both tools, all operators
    python tests/kernels/sanitize.py linear_fp8 --tool racecheck

Needs a Hopper GPU and CUDA's compute-sanitizer. Compiles what the calls of sanitized.py reach, then
starts this file under the sanitizer for some of an operator's calls at a time, as many side by side
as there are processors. memcheck sees what lies beyond a tensor, as each is an allocation of its
own; racecheck sees shared memory alone. Every result is compared with reference.py, so that what
does nothing fails. The bound is wide: precision is for the tests beside this file.

racecheck does not follow two ways in which kernels as they are served say that memory is free, or
filled: one lane of a warp speaks for all (experts_fp8_few, attention), or threads arrive at a named
barrier and do not wait there (linear_fp8). The same kernels where each lane speaks for itself, or
all wait (sanitized.twin_of), have rows of their own. A report of a served one that has nothing but
races of stores with loads is known if its twin's is empty in the same run: what else there may be,
that one would show, but for a thread that speaks too early (test_emulator.py and
test_experts_fp8.py are there for that). So it does not matter that racecheck stops counting at ten
million hazards of a served one.

Races within the kernels of a library that an operator calls (cuBLAS) are counted apart: no errors.
Exit status 1 if anything else is reported, or a result is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from sanitized import OPERATORS, TWIN, Call

from gptoss_kernels.cuda import build

TOOLS = ("memcheck", "racecheck")
_CALLS_A_PROCESS = 30
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|displayed \((\d+) errors?, (\d+) warning")
# What the sanitizer prints of races of a store with loads, or of a load with stores, and around it.
# That it stopped counting comes with no race of its own: of the twin there must be none at all.
_STORES_AND_LOADS = (
    r"^=+(?: *| COMPUTE-SANITIZER| RACECHECK SUMMARY: .*)\n"
    r"|^=+ Warning: Maximum number of hazards reached\..*\n"
    r"|^=+ (?:Error|Warning): Race reported between (Write|Read) access at (?:{kernels})\+.*\n"
    r"(?:=+ +and (?!\1)(?:Write|Read) access at (?:{kernels})\+.*\n)++(?!=+ +and )"
)
_LIBRARY = r"(?:nvjet_|cutlass)\S*"  # cuBLAS's kernels
_RACES_OF_A_LIBRARY = re.compile(
    rf"^=+ (?:Error|Warning): Race reported between \w+ access at {_LIBRARY}\+.*\n"
    rf"(?:=+ +and \w+ access at {_LIBRARY}\+.*\n)++(?!=+ +and )",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Report:
    """Of one operator under one tool. errors: what the sanitizer counted but for `of_library`, its
    reports of races between accesses of a library's kernels; None: it did not end."""

    operator: str
    tool: str
    calls: int
    right: int
    errors: int | None
    of_library: int
    others: str  # what the sanitizer said but for races of stores with loads
    seconds: float
    log: str


def calls_of(operator: str, part: int = 0, parts: int = 1) -> list[Call]:
    return list(OPERATORS[operator]())[part::parts]


def parts_of(operator: str) -> int:
    return -(-len(calls_of(operator)) // _CALLS_A_PROCESS)


def run_calls(operator: str, part: int, parts: int, limit: float) -> None:
    """In a process under the sanitizer: how many calls were right, as the last line."""
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    right = 0
    for index, call in enumerate(calls_of(operator, part, parts)):
        torch.manual_seed(index)
        error = call.error()
        right += error < call.bound
        if not error < call.bound:
            print(f"wrong by {error:.1e}: {', '.join(map(str, call.kernels))}")
    torch.cuda.synchronize()
    print(json.dumps({"right": right}))


def report_of(operator: str, tool: str, part: int, log: str, seconds: float) -> Report:
    """What one process printed, in which nothing but the sanitizer's lines begins with =."""
    calls = calls_of(operator, part, parts_of(operator))
    kernels = "|".join({kernel.name for call in calls for kernel in call.kernels})
    answers = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    summary = _SUMMARY.search(log)
    lines = "".join(f"{line}\n" for line in log.splitlines() if line.startswith("="))
    lines, of_library = _RACES_OF_A_LIBRARY.subn("", lines)
    return Report(
        operator,
        tool,
        len(calls),
        answers[-1]["right"] if answers else 0,
        sum(int(count or 0) for count in summary.groups()) - of_library if summary else None,
        of_library,
        re.sub(_STORES_AND_LOADS.format(kernels=kernels), "", lines, flags=re.MULTILINE),
        seconds,
        log,
    )


def sanitize(operator: str, tool: str, part: int, limit: float) -> Report:
    child = (__file__, operator, "--part", str(part), "--limit", str(limit))
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "100000"]
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, *child],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | alone,
        check=False,
    )
    return report_of(operator, tool, part, done.stdout, time.monotonic() - start)


def merged(reports: Iterable[Report]) -> Report:
    """The parts of an operator's calls under one tool."""
    reports = list(reports)
    counts = [report.errors for report in reports if report.errors is not None]
    return Report(
        reports[0].operator,
        reports[0].tool,
        sum(report.calls for report in reports),
        sum(report.right for report in reports),
        sum(counts) if len(counts) == len(reports) else None,
        sum(report.of_library for report in reports),
        "".join(report.others for report in reports),
        max(report.seconds for report in reports),
        "\n".join(
            report.log for report in reports if report.errors or report.right != report.calls
        ),
    )


def is_fine(report: Report, all_reports: Iterable[Report]) -> bool:
    if report.right != report.calls or report.errors is None:
        return False
    twin = report.operator + TWIN
    twins = [
        each.errors for each in all_reports if (each.operator, each.tool) == (twin, report.tool)
    ]
    return report.errors == 0 or (not report.others and twins == [0])


def compile_all(operators: Iterable[str]) -> None:
    """Side by side, so that no call waits for it. What a twin spills is of no consequence here, and
    what cannot be compiled its call says."""
    specs = {spec for name in operators for call in calls_of(name) for spec in call.kernels}
    for _ in build.build(specs, jobs=os.cpu_count() or 1):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operators", nargs="*", help=f"of {', '.join(OPERATORS)}; all if none")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--limit", type=float, default=80, help="seconds of one process")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    operators = arguments.operators or list(OPERATORS)
    if unknown := set(operators) - set(OPERATORS):
        parser.error(f"no operator is called {', '.join(unknown)}")
    if arguments.part is not None:
        (operator,) = operators
        run_calls(operator, arguments.part, parts_of(operator), arguments.limit)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH; CUDA's toolkit has it in bin")
    compile_all(operators)
    pairs = [(operator, tool) for operator in operators for tool in arguments.tool]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        under_way = {
            (operator, tool): pool.map(
                partial(sanitize, operator, tool, limit=arguments.limit), range(parts_of(operator))
            )
            for operator, tool in pairs
        }
        reports = [merged(parts) for parts in under_way.values()]

    print("operator | tool | calls | errors | right | seconds")
    for report in reports:
        errors = "did not end" if report.errors is None else report.errors
        known = " (known)" if report.errors and is_fine(report, reports) else ""
        library = f" (and {report.of_library} of a library)" if report.of_library else ""
        numbers = (
            f"{report.calls} | {errors}{known}{library} | {report.right} | {report.seconds:.0f}"
        )
        print(f"{report.operator} | {report.tool} | {numbers}")
    bad = [report for report in reports if not is_fine(report, reports)]
    for report in bad:
        # First what is not in most of these lines.
        lines = dict.fromkeys((*report.others.splitlines(), *report.log.splitlines()))
        print(f"\n{report.operator}, {report.tool}:", *list(lines)[:60], sep="\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
