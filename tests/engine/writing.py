"""A small checkpoint to write, and to be stopped at."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint_writer import TensorGroup, Written, write_checkpoint

# Odd sizes: without an order of its own, b would lie at an odd address.
TENSORS = {
    "a.weight": torch.arange(15.0).view(3, 5).to(torch.float8_e4m3fn),
    "a.weight_scale": torch.tensor([[0.5, 0.25]]),
    "b": torch.arange(7.0).bfloat16(),
    "c": torch.arange(11, dtype=torch.uint8).view(11, 1),
    "d": torch.arange(40.0).view(2, 4, 5),
    "nothing": torch.empty(0, 3),
}


GROUPS = (("a.weight", "a.weight_scale"), ("b", "c", "nothing"), ("d",))


def group(names: tuple[str, ...], produced: list[str] | None = None) -> TensorGroup:
    """Its tensors in pieces of three elements; `produced` learns which groups were asked for."""

    def produce(notes: dict[str, Any]) -> Iterator[Tensor]:
        if produced is not None:
            produced.append(names[0])
        for name in names:
            yield from TENSORS[name].flatten().split(3)
        notes["made"] = names[0]

    return TensorGroup(
        {name: (TENSORS[name].dtype, (*TENSORS[name].shape,)) for name in names}, produce
    )


GROUPS_OF_TENSORS = [group(names) for names in GROUPS]


def write(target: Path, **changes: Any) -> Written:
    arguments: dict[str, Any] = {
        "groups": GROUPS_OF_TENSORS,
        "files": {"config.json": b"{}"},
        "identity": lambda: {"source": "s", "options": [1, 2]},
        "shard_bytes": 40,
        "description": "writing numbers",
        **changes,
    }
    return write_checkpoint(target, **arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: both change when a file is written anew."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def work_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


class Stopped(Exception):
    pass


def stopping_groups(at: int, produced: list[str]) -> list[TensorGroup]:
    """The groups, of which number `at` fails after its first piece."""

    def produce(notes: dict[str, Any]) -> Iterator[Tensor]:
        yield next(iter(GROUPS_OF_TENSORS[at].produce(notes)))
        raise Stopped

    return [
        TensorGroup(each.tensors, produce) if number == at else group(names, produced)
        for number, (names, each) in enumerate(zip(GROUPS, GROUPS_OF_TENSORS, strict=True))
    ]
