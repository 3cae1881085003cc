"""Flags that the benchmarks share, and lists of numbers as users write them."""

from pathlib import Path
from typing import Annotated

import typer

from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

GpuPrice = Annotated[
    float, typer.Option(min=0.0, help="Dollars an hour of one GPU.", show_default=True)
]
Output = Annotated[
    Path | None, typer.Option(help="The JSON lines are added to this file, each as it comes.")
]
Plot = Annotated[Path | None, typer.Option(help="A picture: .svg, .png or .pdf.")]
Profile = Annotated[
    Path | None,
    typer.Option(
        help="A folder for a PyTorch profiler's trace of every cell; prints time by operator."
    ),
]
Budget = Annotated[
    float,
    typer.Option(min=0.0, help="Seconds after loading; then no other cell is begun."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random prompts.")]


def numbers(name: str, text: str) -> list[int]:
    """`1,8,32` as sorted whole numbers of at least 1, each once. InvalidConfig names the flag."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise InvalidConfig(
            f"{name} must be whole numbers of at least 1, such as 1,8,32, got {shown(text)}"
        )
    return sorted({int(word) for word in words})
