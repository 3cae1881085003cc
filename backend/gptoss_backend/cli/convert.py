"""`gptoss convert`: a published checkpoint to FP8, and the proof of the result."""

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from gptoss_backend.cli.choices import choice
from gptoss_backend.cli.errors import interruptible
from gptoss_backend.cli.sizes import parse_size

if TYPE_CHECKING:
    from gptoss_engine.checkpoints.convert import Conversion, Precision, Report

_PRECISIONS: "tuple[Precision, ...]" = ("fp8", "bf16")
MAX_SHOWN = 10  # inexact blocks; conversion.json lists more


def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint folder in any layout, or 'demo'.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    *,
    attention_weights: Annotated[
        str, typer.Option(metavar="|".join(_PRECISIONS), help="The qkv and output projections.")
    ] = "fp8",
    lm_head: Annotated[
        str, typer.Option(metavar="|".join(_PRECISIONS), help="The unembedding.")
    ] = "bf16",
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
    precisions: tuple[Precision, Precision] = (
        choice("attention_weights", attention_weights, _PRECISIONS),
        choice("lm_head", lm_head, _PRECISIONS),
    )
    shard_bytes = parse_size("shard_size", shard_size)

    from gptoss_engine.checkpoints import convert as conversion
    from gptoss_engine.checkpoints.checkpoint import Checkpoint, checkpoint_folder
    from gptoss_engine.checkpoints.verify import verify as prove

    checkpoint = Checkpoint(checkpoint_folder(source))
    options = conversion.Options(*precisions)
    console = Console(soft_wrap=True, highlight=False)
    if not (verify and (target / conversion.REPORT_FILE).is_file()):
        started = time.monotonic()
        with interruptible():
            report = conversion.convert(
                *(checkpoint, target, options), shard_bytes=shard_bytes, allow_inexact=allow_inexact
            )
        console.print(_table(report, time.monotonic() - started))
        for line in _inexact_lines(report.conversion):
            console.print(line, markup=False)
    if verify:
        num_inexact = prove(checkpoint, target, options).num_inexact
        but = f", but for {num_inexact:,} blocks that are not exact" if num_inexact else ""
        console.print(f"{target} is verified: every tensor and every checksum{but}", markup=False)


def _table(report: "Report", seconds: float) -> Table:
    conversion = report.conversion
    num_blocks, num_inexact = conversion.expert_blocks, conversion.num_inexact
    rows = {
        "tensors": f"{report.num_tensors:,}",
        "files": f"{report.num_files:,}",
        "read": decimal(report.source_bytes),
        "written": decimal(report.num_bytes),
        "kept from an earlier run": decimal(report.num_kept_bytes),
        "expert blocks": f"{num_blocks:,}, {num_inexact:,} of them not exact",
    }
    for kind, error in conversion.relative_error.items():
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


def _inexact_lines(conversion: "Conversion") -> list[str]:
    counts = conversion.inexact.items()
    lines = [f"{count:,} blocks of {name} are not exact" for name, count in counts]
    lines += [
        f"  {name}, expert {expert}, block row {row}, block column {column}"
        for name, expert, row, column in conversion.inexact_blocks[:MAX_SHOWN]
    ]
    if len(conversion.inexact_blocks) > MAX_SHOWN:
        lines.append("  … more in conversion.json")
    return lines
