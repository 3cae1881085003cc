"""Where the kernels run: a GPU that multiplies e4m3, or Triton-lang's interpreter on the CPU."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor
from triton import knobs

from gptoss_kernels import contracts

# Read where kernels are decorated, so it is fixed for the process.
INTERPRETED: bool = knobs.runtime.interpret

_LEAST_CAPABILITY = (8, 9)  # multiplies e4m3
_COPY_ENGINE_CAPABILITY = (9, 0)
_LEAST_SHARED_BYTES = 101_376  # of compute capability 8.9


def check_device(x: Tensor, name: str = "x") -> None:
    """Raise ValueError, in words, where the kernels would not run on the device of `x`."""
    if INTERPRETED:
        return
    contracts.check_gpu(x, name)
    capability = _capability(x.device.index)
    if capability < _LEAST_CAPABILITY:
        wanted, got = (f"{major}.{minor}" for major, minor in (_LEAST_CAPABILITY, capability))
        raise ValueError(f"e4m3 needs a GPU of compute capability {wanted}, got {got}")


def has_copy_engine(x: Tensor) -> bool:
    """Whether tiles are better brought by tensor descriptors than by pointers: 5 to 25 %."""
    return x.is_cuda and _capability(x.device.index) >= _COPY_ENGINE_CAPABILITY


def shared_bytes(x: Tensor) -> int:
    """What one program may have of a multiprocessor's shared memory."""
    return _shared_bytes(x.device.index) if x.is_cuda else _LEAST_SHARED_BYTES


def num_multiprocessors(x: Tensor) -> int:
    return _num_multiprocessors(x.device.index) if x.is_cuda else 1


def current(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """The device of `x` made the current one: kernels are launched there."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def lanes_for(count: int) -> int:
    """The least power of two that is not below `count`.

    triton.next_power_of_2 is a function for kernels as well, which costs the host 3 us.
    """
    return 1 << (count - 1).bit_length()


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def _shared_bytes(device: int) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def _num_multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
