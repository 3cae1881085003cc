"""Where a step's time goes: a PyTorch profiler's trace, and its time by operator.

On a GPU kernels count, by the operator that launches them, graphs' kernels, too; on a CPU PyTorch's
own operators do. Kernels may overlap (programmatic dependent launch), so that rows can add up to
more than the GPU was busy; what is left of the step is when it had nothing to do.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gptoss_backend.cli.bench.floors import Floor
from gptoss_backend.cli.bench.tables import print_table
from gptoss_backend.cli.errors import CommandFailed

_MOST_ROWS = 20
# A kernel belongs to the first operator whose expression its name has.
_OPERATORS = tuple(
    (re.compile(expression), operator)
    for expression, operator in (
        (r"memcpy|memset|transfer", "copies"),
        (r"attention", "attention"),
        (r"rope", "RoPE and cache write"),
        (r"grouped|experts_fp8", "experts"),
        (r"dispatch", "dispatch"),
        (r"reduction", "sums of ranks"),
        (r"combine", "combine"),
        (r"route|choose_experts", "router"),
        (r"rms_norm", "norms"),
        (r"quantise", "quantisation"),
        (r"unpack_step|select_rows", "step's inputs and rows"),
        (r"sampl|logprob|(mask|penalize)_logits|softmax|topk|top_k|sort|argmax", "sampling"),
        (r"embedding", "embedding"),
        (r"linear_fp8|deepgemm|deep_gemm|fp8_gemm", "qkv and output"),
        (r"gemm|gemv|nvjet|cutlass|splitk|cublas|^linear$", "products in bf16"),
    )
)
# The floors of a row.
_FLOOR_ROWS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention, full", "attention, window"),
    "experts": ("experts",),
    "qkv and output": ("qkv and output",),
    "router": ("router",),
    "products in bf16": ("unembedding",),
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds of one step: of each operator, with how often it ran; of all; at work."""

    step_ms: float
    busy_ms: float
    by_operator: Mapping[str, tuple[float, float]]


def profiled(run: Callable[[], None], path: Path, num_steps: int = 1) -> Profile:
    """What `run`, of num_steps like steps, spends. Writes the trace to `path` for Chrome."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        raise CommandFailed(f"cannot write {path}: {error}") from error
    return summarised(profiler.events() or [], num_steps)


def summarised(events: Iterable[Any], num_steps: int) -> Profile:
    """Of a profiler's events: of the GPU's if there are any, else of the CPU's."""
    events = [*events]
    kernels = [each for each in events if each.device_type.name == "CUDA"]
    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for each in kernels or events:
        name = operator_of(each.name) if kernels else each.name
        spent = each.time_range.elapsed_us() if kernels else each.self_cpu_time_total
        totals[name] += spent
        counts[name] += 1
    ranges = sorted((each.time_range.start, each.time_range.end) for each in kernels or events)
    first = ranges[0][0] if ranges else 0
    scale = 1e-3 / num_steps
    return Profile(
        step_ms=(max((end for _, end in ranges), default=0) - first) * scale,
        busy_ms=_covered(ranges) * scale,
        by_operator={name: (totals[name] * scale, counts[name] / num_steps) for name in totals},
    )


def operator_of(kernel: str) -> str:
    """The operator that launches a kernel of that name; of PyTorch's own, the name's beginning."""
    lowered = kernel.lower()
    for expression, operator in _OPERATORS:
        if expression.search(lowered):
            return operator
    return f"PyTorch: {kernel.removeprefix('void ').removeprefix('at::native::')[:40]}"


def print_profile(title: str, profile: Profile, floors: Mapping[str, Floor]) -> None:
    print_table(profile_table(title, profile, floors))


def profile_table(title: str, profile: Profile, floors: Mapping[str, Floor]) -> Table:
    """A row an operator, the longest first; shares are of the step, and of its floor."""
    table = Table(title=f"{title}: {profile.step_ms:.3f} ms a step while profiled")
    table.add_column("")
    for heading in ("ms", "of step", "calls", "floor, ms", "of floor", "beyond, ms"):
        table.add_column(heading, justify="right")
    left = dict(floors)
    rows = sorted(profile.by_operator.items(), key=lambda row: -row[1][0])
    if len(rows) > _MOST_ROWS:
        rest = [row[1] for row in rows[_MOST_ROWS:]]
        name = f"{len(rest)} others"
        rows = [*rows[:_MOST_ROWS], (name, (sum(ms for ms, _ in rest), sum(n for _, n in rest)))]
    for name, (ms, calls) in rows:
        floor = sum(left.pop(each).ms for each in _FLOOR_ROWS.get(name, ()) if each in left)
        table.add_row(
            name,
            f"{ms:.3f}",
            f"{ms / profile.step_ms:.1%}",
            f"{calls:g}",
            *((f"{floor:.3f}", f"{floor / ms:.0%}") if floor else ("", "")),
            f"{ms - floor:.3f}",
        )
    idle = profile.step_ms - profile.busy_ms
    table.add_row("nothing at work", f"{idle:.3f}", f"{idle / profile.step_ms:.1%}")
    for name, floor in left.items():
        table.add_row(f"floor of {name}", "", "", "", f"{floor.ms:.3f}")
    total = sum(each.ms for each in floors.values())
    table.add_section()
    table.add_row(
        *("step", f"{profile.step_ms:.3f}", "100.0%", "", f"{total:.3f}"),
        *(f"{total / profile.step_ms:.0%}", f"{profile.step_ms - total:.3f}"),
    )
    return table


def _covered(ranges: list[tuple[float, float]]) -> float:
    """The length of the union of sorted ranges."""
    covered, reached = 0.0, float("-inf")
    for start, end in ranges:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
