"""Elements of files into tensors: into a CPU's memory at once, into a GPU's through pinned memory.

Whoever reads from several threads keeps disk, memory and bus busy at once: one buffer is filled
while another one's bytes are on their way. Nothing is mapped, so a file that is cut meanwhile is an
error and not the end of the process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor

from gptoss_engine.checkpoints.tensor_files import Extent
from gptoss_engine.checkpoints.workers import num_workers
from gptoss_engine.model_config import InvalidCheckpoint

_BUFFER_BYTES = 2**24  # an expert's larger matrix in FP8, of the published sizes
_BUFFERS_A_WORKER = 2


class FileLoader:
    """Reads for one device; any thread may call `load`. Made by `file_loader`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: dict[Path, int] = {}
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # Memory that the tensors had been given before may still be used there.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            shape = (_BUFFERS_A_WORKER * num_workers(), _BUFFER_BYTES)
            self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event]] = SimpleQueue()
            for buffer in torch.empty(shape, dtype=torch.uint8, pin_memory=True):
                self._free.put((buffer, torch.cuda.Event()))

    def load(self, extent: Extent, tensor: Tensor) -> None:
        """All of the extent into a contiguous tensor of its shape and dtype: there when closed.

        Raises InvalidCheckpoint where the file ends too early, or OSError.
        """
        assert (tensor.dtype, tensor.shape) == (extent.dtype, extent.shape)
        place = tensor.view(-1).view(torch.uint8)
        if self._stream is None:
            self._read(extent.path, extent.offset, place)
            return
        for first in range(0, len(place), _BUFFER_BYTES):
            piece = place[first : first + _BUFFER_BYTES]
            buffer, was_copied = self._free.get()
            try:
                was_copied.synchronize()
                self._read(extent.path, extent.offset + first, buffer[: len(piece)])
                with torch.cuda.stream(self._stream):
                    piece.copy_(buffer[: len(piece)], non_blocking=True)
                    was_copied.record()
            finally:
                self._free.put((buffer, was_copied))

    def close(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        for file in self._files.values():
            os.close(file)

    def _read(self, path: Path, offset: int, memory: Tensor) -> None:
        left = memoryview(cast(Any, memory.numpy()))
        file = self._open(path)
        while left:
            count = os.preadv(file, [left], offset)
            if not count:
                raise InvalidCheckpoint(f"{path} is damaged: it ends {len(left)} bytes too early")
            left, offset = left[count:], offset + count

    def _open(self, path: Path) -> int:
        if path not in self._files:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._files.setdefault(path, file) != file:  # another thread was faster
                os.close(file)
        return self._files[path]


@contextmanager
def file_loader(device: torch.device) -> Iterator[FileLoader]:
    """All that was loaded is where it belongs when the context ends."""
    made = FileLoader(device)
    try:
        yield made
    finally:
        made.close()
