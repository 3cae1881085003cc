"""`gptoss make-checkpoint`: random weights in the shapes of a real model, as a folder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from gptoss_backend.cli.choices import choice
from gptoss_backend.cli.errors import interruptible
from gptoss_backend.cli.sizes import parse_size

if TYPE_CHECKING:
    from gptoss_engine.checkpoints.layouts import Layout
    from gptoss_engine.checkpoints.random_checkpoint import Like, RandomCheckpoint

_LIKE: "tuple[Like, ...]" = ("20b", "120b", "tiny")
_LAYOUTS: "tuple[Layout, ...]" = ("huggingface", "original", "dequantised", "fp8")


def make_checkpoint(
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    *,
    like: Annotated[str, typer.Option(metavar="|".join(_LIKE), help="Whose shapes it has.")],
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another model.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Default: all of the model.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="|".join(_LAYOUTS),
            help="fp8 is what `gptoss convert` makes of the others.",
        ),
    ] = "huggingface",
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest file, such as 5GB, 500MB, 2GiB.")
    ] = "5GB",
) -> None:
    """Write a checkpoint of random weights that behave like a model's, for benchmarks and tests.

    The same options give the same bytes everywhere; `--random-weights` of the other commands has
    the same weights (of seed 0) without a folder. An interrupted run goes on where it was.
    """
    shapes: Like = choice("like", like, _LIKE)
    chosen: Layout = choice("layout", layout, _LAYOUTS)
    shard_bytes = parse_size("shard_size", shard_size)

    from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint

    source = RandomCheckpoint(shapes, seed, num_layers=layers)
    started = time.monotonic()
    with interruptible():
        num_files, num_bytes = _write(source, target, chosen, shard_bytes)
    files = "1 file" if num_files == 1 else f"{num_files} files"
    Console(soft_wrap=True, highlight=False).print(
        f"{target}: {source.label}, {layout} layout, {decimal(num_bytes)} in {files}, "
        f"{time.monotonic() - started:.1f} s",
        markup=False,
    )


def _write(
    source: "RandomCheckpoint", target: Path, layout: "Layout", shard_bytes: int
) -> tuple[int, int]:
    """Returns the number of files and of bytes."""
    if layout == "fp8":
        from gptoss_engine.checkpoints.convert import convert

        report = convert(source, target, shard_bytes=shard_bytes)
        return report.num_files, report.num_bytes

    from gptoss_engine.checkpoints.published import write_published

    written = write_published(source, target, layout, shard_bytes=shard_bytes)
    return written.num_files, written.num_bytes
