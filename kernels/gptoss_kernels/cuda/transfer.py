"""target <- source, one of them on the GPU and the other in pinned memory of the host

For a few KB, as a step sends and brings: pinned memory has an address on the GPU, and a kernel that
reads or writes it begins when the one before has ended. The copy engine begins 9 us later (H200).
From the host a kernel begins to read before that. The kernel is transfer.cu.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime

_THREADS = 256
_WORDS = 4  # of 4 bytes, of a thread


def transfer(source: Tensor, target: Tensor) -> None:
    """Enqueue the copy on the current stream of the GPU.

    Contiguous tensors of one dtype and shape, a multiple of 4 bytes below 2^31. The host's memory
    is to be left alone until the copy was made, or behind an event that tells so. Raises ValueError
    on anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    if source.numel() == target.numel() == 0:  # whose memory is nowhere
        return
    from_host = not is_on_gpu(source)
    pair = (target, source) if from_host else (source, target)
    runtime.launch(("transfer", from_host), pair, lambda: _prepare(source, target, from_host))


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def spec(*, from_host: bool) -> runtime.KernelSpec:
    return runtime.KernelSpec(
        "transfer",
        files=("transfer.cu",),
        defines=(("THREADS", _THREADS), ("FROM_HOST", int(from_host))),
        variant="from the host" if from_host else "to the host",
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("num_words", ctypes.c_int),
    )


def _check(source: Tensor, target: Tensor) -> None:
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise ValueError(
            f"source and target must be of one dtype and shape, got {source.dtype} "
            f"{list(source.shape)} and {target.dtype} {list(target.shape)}"
        )
    if source.nbytes % 4 or source.nbytes >= 2**31:
        raise ValueError(
            f"source must have a multiple of 4 bytes below 2^31, got {source.nbytes} bytes"
        )
    for name, tensor in (("source", source), ("target", target)):
        contracts.check_contiguous(name, tensor)
        if tensor.data_ptr() % 4:
            raise ValueError(f"{name} must start at a multiple of 4 bytes")
        if not (is_on_gpu(tensor) or tensor.is_pinned()):
            raise ValueError(f"{name} must be on a GPU or in pinned memory, got {tensor.device}")
    if is_on_gpu(source) == is_on_gpu(target):
        raise ValueError("one of source and target must be on a GPU, and the other on the host")


def _prepare(source: Tensor, target: Tensor, from_host: bool) -> runtime.Launch:
    _check(source, target)
    num_words = source.nbytes // 4
    return runtime.Launch(
        runtime.load(spec(from_host=from_host), (target if from_host else source).device.index),
        grid=-(-num_words // (_THREADS * _WORDS)),
        threads=_THREADS,
        arguments=(_Arguments(source.data_ptr(), target.data_ptr(), num_words),),
    )
