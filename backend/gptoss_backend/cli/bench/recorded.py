"""`gptoss bench plot` and `table`: what result files hold, without measuring anything."""

from pathlib import Path
from typing import Annotated

import typer

from gptoss_backend.cli.bench.flags import GpuPrice
from gptoss_backend.cli.bench.money import DEFAULT_GPU_PRICE
from gptoss_backend.cli.bench.results import read_lines
from gptoss_backend.cli.bench.tables import markdown
from gptoss_backend.cli.outputs import check_picture


def plot(
    files: Annotated[list[Path], typer.Argument(help="JSON lines; of one cell the newest counts.")],
    *,
    output: Annotated[Path, typer.Option(help="A picture: .svg, .png or .pdf.")],
    gpu_price: GpuPrice = DEFAULT_GPU_PRICE,
) -> None:
    """Draw prefill, decode and serve results, with what others published beside them."""
    check_picture("output", output)

    from gptoss_backend.cli.bench.plots import draw

    draw(read_lines(files), output, gpu_price)
    typer.echo(str(output))


def table(
    files: Annotated[list[Path], typer.Argument(help="JSON lines; of one cell the newest counts.")],
) -> None:
    """Print Markdown tables of result files, for documents."""
    typer.echo(markdown(read_lines(files)), nl=False)
