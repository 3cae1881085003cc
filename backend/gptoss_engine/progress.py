"""Bars that show how work goes: on stderr, on a terminal alone, and gone when it is done."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

HIDDEN = "GPTOSS_HIDDEN_PROGRESS"  # A variable of processes that show none.

Item = TypeVar("Item")


def progress_bar() -> Progress:
    """Of bytes, with their rate and the time left."""
    return _bar(DownloadColumn(), TransferSpeedColumn())


def count_bar() -> Progress:
    """Of what is counted, with the time left."""
    return _bar(MofNCompleteColumn())


def tracked(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """The items, with a bar that counts them."""
    with count_bar() as progress:
        yield from progress.track(items, total=total, description=label)


def _bar(*columns: ProgressColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=HIDDEN in os.environ or not sys.stderr.isatty(),
        transient=True,
    )
