"""`gptoss build-kernels`: every Hopper kernel that can be served, compiled ahead of time."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from gptoss_backend.cli.errors import CommandFailed
from gptoss_engine.progress import tracked

if TYPE_CHECKING:
    from gptoss_kernels.cuda.build import Built


def build_kernels(
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Compile into this folder, for an image: with GPTOSS_CACHE=OUTPUT it is found.",
            show_default="the user's cache",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many at a time.", show_default="one a core")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, help="Those of a rank of so many, too (--tp N --ep N).")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compile all Hopper kernels ahead of their first use; needs no GPU and no driver.

    What was compiled before is not compiled again. Fails if a kernel does not compile, or if a hot
    one spills registers, has a stack frame or loses speed by the compiler's own words.
    """
    from gptoss_kernels.cuda import compiler
    from gptoss_kernels.cuda.build import build, rank_kernels, served_kernels

    try:
        version = compiler.nvrtc_version()
    except compiler.CudaError as error:
        raise CommandFailed(str(error)) from error
    try:
        cache = compiler.cache_folder().parent if output is None else output.absolute()
    except OSError as error:
        raise CommandFailed(f"{error}: name a folder with --output") from error
    _make_writable(cache / "kernels")
    try:
        specs = served_kernels() + (rank_kernels(ranks) if ranks > 1 else ())
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    jobs = jobs or len(os.sched_getaffinity(0))
    started = time.monotonic()
    done = tracked(build(specs, jobs=jobs, cache=cache), "compiling", len(specs))
    kernels = sorted(done, key=lambda built: str(built.spec))
    report = {
        "architecture": compiler.ARCHITECTURE,
        "nvrtc": version,
        "cache": str(cache),
        "seconds": round(time.monotonic() - started, 1),
        "bytes": sum(len(built.cubin.image) for built in kernels if built.cubin),
        "kernels": [_figures(built) for built in kernels],
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    _refuse_faults(kernels)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandFailed(f"cannot write to {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise CommandFailed(f"cannot write to {folder}: no permission")


def _figures(built: "Built") -> dict[str, Any]:
    found = built.cubin
    shared = built.spec.shared_bytes + (found.static_shared_bytes if found else 0)
    return {
        "kernel": str(built.spec),
        "registers": found and found.registers,
        "shared_bytes": shared,
        "spill_bytes": found and found.spill_bytes,
        "stack_bytes": found and found.stack_bytes,
        "warnings": list(found.warnings) if found else [],
        "hot": built.spec.is_hot,
        "faults": list(built.faults),
    }


def _show(report: dict[str, Any]) -> None:
    table = Table("kernel")
    for heading in ("registers", "shared memory", "spills", "stack", "warnings"):
        table.add_column(heading, justify="right")
    for kernel in report["kernels"]:
        figures = (kernel[f"{name}_bytes"] for name in ("shared", "spill", "stack"))
        counts = (kernel["registers"], *figures, len(kernel["warnings"]))
        shown = ("none" if count is None else f"{count:,}" for count in counts)
        table.add_row(kernel["kernel"], *shown)
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = 1000  # a file or a pipe gets one line for each kernel
    console.print(table)
    console.print(
        f"{report['cache']}: {len(report['kernels'])} kernels for {report['architecture']}, "
        f"{decimal(report['bytes'])}, NVRTC {report['nvrtc']}, {report['seconds']} s",
        markup=False,
    )


def _refuse_faults(kernels: Iterable["Built"]) -> None:
    """A full disk is the reason of many: each reason is said once. The table names all."""
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for built in kernels:
        if built.faults:
            failed["; ".join(built.faults)].append(str(built.spec))
    if failed:
        count = sum(map(len, failed.values()))
        subject = "1 kernel is" if count == 1 else f"{count} kernels are"
        reasons = (f"  {_first_of(names)}: {reason}" for reason, names in failed.items())
        raise CommandFailed("\n".join([f"{subject} not fit to be served:", *reasons]))


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
