"""`gptoss convert`: a published checkpoint to FP8, and the proof of the result."""

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.sizes import parse_size
from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

if TYPE_CHECKING:
    from gptoss_engine.convert import Report

MAX_SHOWN = 10  # inexact blocks; conversion.json lists more


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder in any layout, or 'demo'.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    *,
    attention_weights: Annotated[
        str, typer.Option(metavar="fp8|bf16", help="The qkv and output projections.")
    ] = "fp8",
    lm_head: Annotated[str, typer.Option(metavar="fp8|bf16", help="The unembedding.")] = "bf16",
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest file, such as 5GB, 500MB, 2GiB.")
    ] = "5GB",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read both again and prove that they are equal; also a conversion made earlier.",
        ),
    ] = False,
    allow_inexact: Annotated[
        bool,
        typer.Option(
            "--allow-inexact", help="Round blocks that FP8 cannot hold exactly, and list them."
        ),
    ] = False,
) -> None:
    """Convert a checkpoint to FP8: experts exactly, attention with the least error.

    An interrupted conversion goes on where it was when the command is repeated.
    """
    for name, value in (("attention_weights", attention_weights), ("lm_head", lm_head)):
        if value not in ("fp8", "bf16"):
            raise InvalidConfig(f"{name} must be one of fp8, bf16, got {shown(value)}")
    shard_bytes = parse_size("shard_size", shard_size)

    from gptoss_engine import convert as conversion
    from gptoss_engine.checkpoint import Checkpoint, checkpoint_folder
    from gptoss_engine.checkpoint_writer import CannotWrite
    from gptoss_engine.verify import is_conversion
    from gptoss_engine.verify import verify as prove

    checkpoint = Checkpoint(checkpoint_folder(source))
    options = conversion.Options(attention_weights=attention_weights, lm_head=lm_head)  # pyright: ignore[reportArgumentType]
    console = Console(soft_wrap=True, highlight=False)
    if not (verify and is_conversion(checkpoint, target, options)):
        started = time.monotonic()
        try:
            report = conversion.convert(
                *(checkpoint, target, options),
                shard_bytes=shard_bytes,
                allow_inexact=allow_inexact,
            )
        except CannotWrite as error:
            raise CommandFailed(str(error)) from error
        console.print(_table(report, time.monotonic() - started))
        for line in _inexact_lines(report):
            console.print(line, markup=False)
    if verify:
        prove(checkpoint, target, options)
        console.print(f"{target} is verified: every tensor and every checksum", markup=False)


def _table(report: "Report", seconds: float) -> Table:
    num_inexact = sum(report.inexact.values())
    rows = {
        "tensors": f"{report.num_tensors:,}",
        "files": f"{report.num_files:,}",
        "read": decimal(report.source_bytes),
        "written": decimal(report.num_bytes),
        "kept from an earlier run": decimal(report.num_kept_bytes),
        "expert blocks": f"{report.num_expert_blocks:,}, {num_inexact:,} of them not exact",
    }
    for kind, error in report.relative_error.items():
        rows[f"relative error of {kind}"] = f"{error:.2%}"
    # What was kept was read by another run.
    share = 1 - report.num_kept_bytes / report.num_bytes
    rows["time"] = f"{seconds:.1f} s"
    rows["rate"] = f"{decimal(int(report.source_bytes * share / seconds))} of source a second"
    rows["peak memory"] = decimal(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _inexact_lines(report: "Report") -> list[str]:
    lines = [f"{count:,} blocks of {name} are not exact" for name, count in report.inexact.items()]
    lines += [
        f"  {name}, expert {expert}, block row {row}, block column {column}"
        for name, expert, row, column in report.inexact_blocks[:MAX_SHOWN]
    ]
    if len(report.inexact_blocks) > MAX_SHOWN:
        lines.append("  … more in conversion.json")
    return lines
