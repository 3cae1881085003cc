"""Hopper kernels on a GPU: loaded once, described to the copy engine, launched cheaply.

The driver is called through ctypes: that costs a launch less time than any binding, and lets a
tensor map lie on the 64-byte boundary that the driver demands. compiler.py makes the machine code.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from gptoss_kernels.cuda.compiler import (
    MAXIMUM_SHARED_BYTES,
    Cubin,
    CudaError,
    KernelSpec,
    compile_source,
    kernel_source,
    variant_of,
    wgmma_source,
)

__all__ = [
    "MAXIMUM_SHARED_BYTES",
    "Cubin",
    "CudaError",
    "Kernel",
    "KernelSpec",
    "Launch",
    "TensorMap",
    "capture_id",
    "compile_source",
    "kernel_source",
    "launch",
    "load",
    "require_hopper",
    "tensor_map",
    "variant_of",
    "wgmma_source",
]

MINIMUM_DRIVER = (13, 0)

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WIDE_CLUSTERS_ATTRIBUTE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_TYPES = {torch.float8_e4m3fn: 0, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes
_PROMOTE_256_BYTES = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(
            f"Hopper kernels need an NVIDIA GPU, and no driver is installed here: {error}"
        ) from error
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    found = (version.value // 1000, version.value % 1000 // 10)
    if found < MINIMUM_DRIVER:
        raise CudaError(
            f"the NVIDIA driver supports CUDA {found[0]}.{found[1]}, Hopper kernels need "
            f"{MINIMUM_DRIVER[0]}.{MINIMUM_DRIVER[1]}: update the driver"
        )
    return library


def _check(status: int, action: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise CudaError(f"the driver could not {action}: {reason} ({status})")


@functools.cache
def require_hopper(device: int) -> None:
    """Refuse, in words, a machine or a device that cannot run these kernels."""
    _driver()
    if not torch.cuda.is_available():
        why = "PyTorch finds none" if torch.version.cuda else "this PyTorch was built without CUDA"
        raise CudaError(f"Hopper kernels need an NVIDIA GPU, and {why}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise CudaError(
            f"Hopper kernels need compute capability 9.0 (H100, H200), "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


class TensorMap(ctypes.Structure):
    """What the copy engine knows of a tensor: 128 opaque bytes."""

    _fields_ = (("opaque", ctypes.c_uint64 * 16),)


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle_bytes: int) -> TensorMap:
    """For boxes of the size `box` of a matrix, or of three dimensions; the last one's are adjacent.

    What a box covers beyond the tensor reads as zero and is not written. A box whose rows do not
    begin at a multiple of 16 bytes is an illegal instruction.
    """
    size = tensor.element_size()
    pitches = tuple(stride * size for stride in tensor.stride()[:-1])
    return _encode(tensor.data_ptr(), tensor.shape, pitches, tensor.dtype, box, swizzle_bytes)


_MapMemory = ctypes.c_char * 192


# A map depends on these numbers alone, so weights have theirs when an activation's buffer is new.
@functools.lru_cache(maxsize=4096)
def _encode(
    address: int,
    shape: tuple[int, ...],
    pitches: tuple[int, ...],
    dtype: torch.dtype,
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> TensorMap:
    rank = len(shape)
    memory = _MapMemory()
    aligned = (ctypes.addressof(memory) + 63) & ~63
    # The driver counts dimensions from the innermost one.
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        _TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * (rank - 1))(*reversed(pitches)),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLES[swizzle_bytes],
        _PROMOTE_256_BYTES,
        0,
    )
    sizes, boxes = (" x ".join(map(str, numbers)) for numbers in (shape, box))
    _check(status, f"describe a tensor of {sizes} in boxes of {boxes}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, 128))


class Kernel:
    """One compiled kernel on one device.

    Loading waits for the device, which ends a stream's capture into a CUDA graph. So whoever
    captures calls the operator once before, with the same sizes: that loads its kernel for good.
    """

    def __init__(
        self,
        cubin: Cubin,
        name: str,
        shared_bytes: int,
        device: int,
        *,
        has_wide_clusters: bool = False,
    ) -> None:
        require_hopper(device)
        if torch.cuda.is_current_stream_capturing():
            raise CudaError(
                f"the kernel {name} cannot be loaded while its stream is captured into a CUDA "
                "graph: call the operator once with the same sizes before the capture"
            )
        torch.cuda.init()
        self._library = _driver()
        module = ctypes.c_void_p()
        self.function = ctypes.c_void_p()
        self.context = ctypes.c_void_p()
        self.shared_bytes = shared_bytes
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the context
            _check(self._library.cuCtxGetCurrent(ctypes.byref(self.context)), "tell its context")
            _check(
                self._library.cuModuleLoadData(ctypes.byref(module), cubin.image),
                f"load the kernel {name}",
            )
            _check(
                self._library.cuModuleGetFunction(
                    ctypes.byref(self.function), module, name.encode()
                ),
                f"find the kernel {name}",
            )
            _check(
                self._library.cuFuncSetAttribute(
                    self.function, _SHARED_BYTES_ATTRIBUTE, shared_bytes
                ),
                f"give the kernel {name} {shared_bytes} bytes of shared memory",
            )
            if has_wide_clusters:
                _check(
                    self._library.cuFuncSetAttribute(self.function, _WIDE_CLUSTERS_ATTRIBUTE, 1),
                    f"allow the kernel {name} clusters of more than 8 blocks",
                )


@functools.cache
def load(spec: KernelSpec, device: int) -> Kernel:
    """The kernel on that GPU; compiled, or read from the disk cache, and loaded at the first use.

    So its first use is not under capture: see Kernel.
    """
    return Kernel(
        *(spec.compile(), spec.name, spec.shared_bytes, device),
        has_wide_clusters=spec.has_wide_clusters,
    )


class Launch:
    """A kernel with its arguments, packed once, launched as often as they hold.

    The kernel may start before the one ahead of it on the stream has ended, and waits for it
    inside (programmatic dependent launch); a CUDA graph captures that as well.
    """

    def __init__(
        self, kernel: Kernel, grid: int, threads: int, arguments: Sequence[ctypes.Structure]
    ) -> None:
        self._arguments = tuple(arguments)  # alive as long as their addresses are used
        self._addresses = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in self._arguments)
        )
        self._attribute = _LaunchAttribute(id=_DEPENDENT_LAUNCH)
        self._attribute.value[0] = 1
        self._config = _LaunchConfig(
            grid=(grid, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=1,
        )
        self._config_reference = ctypes.byref(self._config)
        self._kernel = kernel
        self._launch = kernel._library.cuLaunchKernelEx
        self._function = kernel.function

    def __call__(self, stream: int) -> None:
        """Enqueue on `stream` (a CUstream as torch.cuda.Stream.cuda_stream gives it).

        Not by two threads at once, which would have the kernel write the same output anyway.
        """
        self._config.stream = stream
        status = self._launch(self._config_reference, self._function, self._addresses, None)
        if status == _NO_CONTEXT:  # of a thread that has asked nothing of this GPU yet
            _check(self._kernel._library.cuCtxSetCurrent(self._kernel.context), "enter its context")
            status = self._launch(self._config_reference, self._function, self._addresses, None)
        if status != 0:
            _check(status, "launch a kernel")


# Of tiles that a launch hands out to whichever block is free. Each prepared launch counts its tiles
# apart, until this many later ones were prepared: two that share a counter must not be under way at
# once, on two streams. A graph keeps its launches' for its life, however often it is replayed, so
# none can be given back; 8 bytes each, in each such kernel.
COUNTERS = 65_536
_prepared_counters = itertools.count()


def next_counter() -> int:
    return next(_prepared_counters) % COUNTERS


def launch(
    options: Hashable,
    tensors: Sequence[torch.Tensor],
    prepare: Callable[[], Callable[[int], None]],
) -> None:
    """Launch on the current stream of the first tensor's GPU, which need not be the current one.

    `prepare` checks and packs: a Launch, or several as one function of the stream. What it gave is
    called again where the options are equal, and address, shape, strides and dtype of all tensors,
    and the GPU: no matter whose memory it was then, nothing else is in what was packed. So
    `options` name the operator, hold each of its other arguments, and say which tensors are there
    if some may be missing.
    """
    address, layout = _identify(len(tensors))(*tensors)
    found = _launches.get((options, address))
    if found is None or found.layout != layout:
        found = _prepare(options, tensors, prepare)
    device = found.device
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            found.launch(torch._C._cuda_getCurrentRawStream(device))
        return
    # As torch.cuda.current_stream does, without the 3 us that its stream object costs.
    found.launch(torch._C._cuda_getCurrentRawStream(device))


class _Prepared(NamedTuple):
    layout: tuple[object, ...]
    device: int
    launch: Callable[[int], None]


# Buffers of a serving engine come back at the same addresses; others would fill the memory, with
# some 5 KB each. The 120b has 430 for each number of rows, of which steps and graphs have hundreds:
# a step that has to prepare its launches again takes tens of ms longer.
_MAXIMUM_LAUNCHES = 131_072
_launches: dict[tuple[object, ...], _Prepared] = {}


def _prepare(
    options: Hashable,
    tensors: Sequence[torch.Tensor],
    prepare: Callable[[], Callable[[int], None]],
) -> _Prepared:
    device = tensors[0].get_device()
    if device < 0 or device == torch._C._cuda_getDevice():
        ready = prepare()
    else:
        with torch.cuda.device(device):
            ready = prepare()
    if len(_launches) >= _MAXIMUM_LAUNCHES:
        _launches.clear()
    address, layout = _identify(len(tensors))(*tensors)
    prepared = _launches[options, address] = _Prepared(layout, device, ready)
    return prepared


@functools.cache
def _identify(count: int) -> Callable[..., tuple[tuple[object, ...], tuple[object, ...]]]:
    """A function of `count` tensors: where they are, with the first one's shape, and all else.

    Written out for each count: a loop over them takes twice the time, as hashing all of it would.
    The first shape, the rows of a batch, is what changes at the same addresses.
    """
    names = [f"t{i}" for i in range(count)]
    address = ", ".join(f"{name}.data_ptr()" for name in names)
    layout = ", ".join(f"{name}.shape, {name}.stride(), {name}.dtype" for name in names[1:])
    first = f"shape, t0.get_device(), t0.stride(), t0.dtype, {layout}"
    return eval(f"lambda {', '.join(names)}: (({address}, (shape := t0.shape)), ({first}))")


def capture_id(device: int) -> int:
    """Which capture into a CUDA graph that GPU's current stream is in; 0 if it is in none."""
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return capture_id(device)
    if not torch.cuda.is_current_stream_capturing():
        return 0
    status, identity = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
    _check(
        _driver().cuStreamGetCaptureInfo_v2(
            stream, ctypes.byref(status), ctypes.byref(identity), None, None, None
        ),
        "tell a stream's capture",
    )
    return identity.value
