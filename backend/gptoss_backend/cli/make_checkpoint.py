"""`gptoss make-checkpoint`: random weights in the shapes of a real model, as a folder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.sizes import parse_size
from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

if TYPE_CHECKING:
    from gptoss_engine.random_checkpoint import RandomCheckpoint

_CHOICES = {
    "like": ("20b", "120b", "tiny"),
    "layout": ("huggingface", "original", "dequantised", "fp8"),
}


def make_checkpoint(
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.")],
    *,
    like: Annotated[
        str, typer.Option(metavar="|".join(_CHOICES["like"]), help="Whose shapes it has.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another model.")] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Default: all of the model.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="|".join(_CHOICES["layout"]),
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
    for name, value in (("like", like), ("layout", layout)):
        if value not in _CHOICES[name]:
            choices = ", ".join(_CHOICES[name])
            raise InvalidConfig(f"{name} must be one of {choices}, got {shown(value)}")
    shard_bytes = parse_size("shard_size", shard_size)

    from gptoss_engine.checkpoint_writer import CannotWrite
    from gptoss_engine.random_checkpoint import RandomCheckpoint

    source = RandomCheckpoint(like, seed, num_layers=layers)  # pyright: ignore[reportArgumentType]
    started = time.monotonic()
    try:
        num_files, num_bytes = _write(source, target, layout, shard_bytes)
    except CannotWrite as error:
        raise CommandFailed(str(error)) from error
    files = "1 file" if num_files == 1 else f"{num_files} files"
    Console(soft_wrap=True, highlight=False).print(
        f"{target}: {source.label}, {layout} layout, {decimal(num_bytes)} in {files}, "
        f"{time.monotonic() - started:.1f} s",
        markup=False,
    )


def _write(
    source: "RandomCheckpoint", target: Path, layout: str, shard_bytes: int
) -> tuple[int, int]:
    """Returns the number of files and of bytes."""
    if layout == "fp8":
        from gptoss_engine.convert import convert

        report = convert(source, target, shard_bytes=shard_bytes)
        return report.num_files, report.num_bytes

    from gptoss_engine.published import write_published

    written = write_published(source, target, layout, shard_bytes=shard_bytes)  # pyright: ignore[reportArgumentType]
    return written.num_files, written.num_bytes
