"""Files of tensors, planned before any tensor is made: safetensors' format, written by ourselves.

Its own writer wants all tensors of a file in memory at once. And where tensors lie in such files,
for who reads them into memory of his own.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"

# safetensors' names, and its order of tensors: each then lies on a multiple of its element's size.
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_ORDER = list(_DTYPES)
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements in a file, from byte `offset` on, as they lie in memory."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def cut(self, rows: slice) -> "Extent":
        width = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (rows.stop - rows.start, *self.shape[1:])
        return Extent(self.path, self.offset + rows.start * width, self.dtype, shape)

    def __getitem__(self, index: int) -> "Extent":
        one = self.cut(slice(index, index + 1))
        return Extent(one.path, one.offset, one.dtype, one.shape[1:])


def read_extents(path: Path) -> dict[str, Extent]:
    """Of the tensors of a file that safetensors can open, by name; of the dtypes that we know."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Extent(
            path, 8 + length + each["data_offsets"][0], _BY_NAME[each["dtype"]], (*each["shape"],)
        )
        for name, each in header.items()
        if each["dtype"] in _BY_NAME
    }


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that lie in one file and are made together.

    tensors: name -> (dtype, shape). produce yields their elements, one tensor after another in
    that order, in pieces: tensors of the same dtype and of any shape, each of one tensor alone.
    What it puts into the dictionary that it is given (of what JSON holds) are the group's notes.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    produce: Callable[[dict[str, Any]], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One file of tensors. header: with its length in front; offsets: of each tensor's bytes."""

    name: str
    groups: tuple[TensorGroup, ...]
    header: bytes
    offsets: dict[str, int]
    tensor_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.tensor_bytes


def plan_files(groups: Sequence[TensorGroup], shard_bytes: int) -> list[TensorFile]:
    """Groups in their order, in each file as many as fit into shard_bytes, at least one."""
    files: list[list[TensorGroup]] = []
    room = 0
    for group in groups:
        if not files or group.num_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(group)
        room -= group.num_bytes
    if len(files) == 1:
        return [_file("model.safetensors", files[0])]
    return [
        _file(f"model-{number:05}-of-{len(files):05}.safetensors", each)
        for number, each in enumerate(files, start=1)
    ]


def _file(name: str, groups: list[TensorGroup]) -> TensorFile:
    tensors = [each for group in groups for each in group.tensors.items()]
    if not _are_aligned(tensors):
        tensors.sort(key=lambda each: (_ORDER.index(each[1][0]), each[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor, (dtype, shape) in tensors:
        assert tensor not in begins, f"{tensor} is in two groups"
        begins[tensor], end = end, end + prod(shape) * dtype.itemsize
        header[tensor] = {
            "dtype": _DTYPES[dtype],
            "shape": [*shape],
            "data_offsets": [begins[tensor], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    offsets = {tensor: len(text) + begin for tensor, begin in begins.items()}
    return TensorFile(name, tuple(groups), text, offsets, end)


def _are_aligned(tensors: list[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]) -> bool:
    """Whether each lies on a multiple of its element's size, all in the order of their making.

    Then a file grows without gaps, and its checksum is computed meanwhile.
    """
    end = 0
    for _, (dtype, shape) in tensors:
        if end % dtype.itemsize:
            return False
        end += prod(shape) * dtype.itemsize
    return True


def digest(plan: list[TensorFile]) -> str:
    found = hashlib.sha256()
    for file in plan:
        found.update(file.name.encode() + file.header)
    return found.hexdigest()


def index(plan: list[TensorFile]) -> dict[str, Any]:
    """What INDEX_FILE holds of several files."""
    return {
        "metadata": {"total_size": sum(file.tensor_bytes for file in plan)},
        "weight_map": {name: file.name for file in plan for name in file.offsets},
    }


def placed(
    pieces: Iterable[Tensor], group: TensorGroup, offsets: Mapping[str, int]
) -> Iterator[tuple[int, Any]]:
    """The position and the bytes of each piece."""
    places = iter(group.tensors.items())
    name, left, position = "", 0, 0
    for piece in pieces:
        if not piece.nbytes:
            continue
        while not left:
            name, (dtype, shape) = next(places)
            left, position = prod(shape) * dtype.itemsize, offsets[name]
        assert piece.dtype == group.tensors[name][0], f"{name}: a piece of {piece.dtype}"
        assert piece.nbytes <= left, f"{name}: more than its shape holds"
        yield position, piece.cpu().contiguous().flatten().view(torch.uint8).numpy()
        left, position = left - piece.nbytes, position + piece.nbytes
    assert not left, f"{name}: {left} bytes were not produced"
    assert not any(prod(shape) for _, (_, shape) in places), f"{name}: and no tensor after it"
