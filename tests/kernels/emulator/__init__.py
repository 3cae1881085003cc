"""Hopper kernels on the CPU: the same .cu files, the same operators, no GPU.

    with emulated(seed=3):
        values, scale = quantise(x)        # any operator of gptoss_kernels.cuda, on CPU tensors

What a launch gets is what the driver would get: `runtime.Launch` and `runtime.tensor_map` run as
they are, above a driver that is made here. g++ compiles the kernel's text; translate.py makes calls
of its inline PTX, which ptx.hpp has; threads are fibers, and all that is asynchronous is late or
early by the seed (machine.cpp). So a seed that is right proves little, and a few of them much.

What is told as an EmulationError, with thread, block and lines of the kernel: deadlocks, mbarriers
and named barriers that are arrived at too often, addresses that are misaligned or beyond shared
memory, lanes that meet in different instructions, what the copy engine or the tensor cores read
before a proxy fence, what is written where they still read or load, registers of a wgmma touched
too early, a block that ends before what it began, writes before the kernels before have ended,
accesses to no memory. All else shows in numbers: whatever is not there yet is NaN.

What is not: the order in which other threads see writes to memory (fences may be missing), plain
C++ stores to shared memory before a proxy fence, caches, how many registers there are, time.
Numbers differ from the GPU's in the order of sums, in fused multiplications, and in the last bits
of approximations. It needs g++ on x86-64 Linux.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptoss_kernels import contracts
from gptoss_kernels.cuda import compiler, runtime
from gptoss_kernels.cuda.compiler import KernelSpec

from .translate import FOLDER, CompilationError, translate

__all__ = [
    "CompilationError",
    "Emulation",
    "EmulationError",
    "emulated",
    "guarded",
    "replacing",
]

_FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-w"),
    *("-g1", "-fno-omit-frame-pointer"),  # to tell where a thread is
    "-fno-strict-aliasing",  # as nvcc
    "-fno-gnu-unique",  # nothing of one kernel is another's
)
# Runs most of the time, is compiled once, and rounds each product and sum as any CPU does.
_MACHINE_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-semantic-interposition")
_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # by CUtensorMapDataType
_SWIZZLE_BYTES = (0, 32, 64, 128)
_MAP = struct.Struct("<QQ3I5I5Q5H3H8x")
_MAP_MARK = 0x50414D524F534E45
_STREAMS = itertools.count(1)


class EmulationError(AssertionError):
    """What a kernel does wrong, and which thread of which block, in which line."""


class _Late(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


class _Setting(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3)),
        *(("shared_bytes", ctypes.c_uint), ("resident", ctypes.c_uint)),
        *((name, ctypes.c_uint) for name in ("ranks", "launches", "arguments_each")),
        *(("seed", ctypes.c_uint64), ("seconds", ctypes.c_uint), ("num_late", ctypes.c_uint)),
        ("late", ctypes.POINTER(_Late)),
    )


_Launched = tuple[KernelSpec, tuple[int, int, int], tuple[int, int, int], int]


@dataclass
class Emulation:
    """How kernels run. Each launch takes the next seed.

    resident: how many blocks, or clusters, are at work at a time. change: of a kernel's text, so
    that a test can show that a wrong one is seen. late: tensors that the kernels before each launch
    wrote, so that there is poison until they have ended: see hopper.cuh on early launch. seconds:
    of the CPU that a launch may take.
    """

    seed: int = 0
    num_multiprocessors: int = 4
    resident: int = 2
    change: Callable[[str], str] | None = None
    late: Sequence[torch.Tensor] = ()
    seconds: int = 60
    _held: list[tuple[_Launched, ctypes.Array[ctypes.c_void_p]]] | None = None

    @contextmanager
    def together(self, ranks: int) -> Iterator[None]:
        """Launches of one kernel and one grid, by `ranks` ranks in turn, that wait for each other.

        At the end of the block, when their arguments must still be there: those of a rank one after
        the other, those of others meanwhile. `resident` counts the blocks of all ranks.
        """
        self._held = held = []
        try:
            yield
        finally:
            self._held = None
        launched = {one for one, _ in held}
        if len(launched) != 1 or len(held) % ranks:
            raise ValueError("ranks must launch one kernel with one grid, all as often")
        self._run(launched.pop(), [arguments for _, arguments in held], ranks)

    def launch(
        self,
        spec: KernelSpec,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        launched = (spec, grid, block, shared_bytes)
        if self._held is None:
            self._run(launched, [arguments], ranks=1)
        else:
            self._held.append((launched, arguments))

    def _run(
        self,
        launched: _Launched,
        arguments: Sequence[ctypes.Array[ctypes.c_void_p]],
        ranks: int,
    ) -> None:
        spec, grid, block, shared_bytes = launched
        source = _with_places(spec)
        if self.change:
            changed = self.change(source)
            if changed == source:  # no AssertionError, for which a test may wait
                raise ValueError("the change of the kernel changed nothing")
            source = changed
        run, library = _compiled(source, spec.name, spec.defines)
        seed, self.seed = self.seed, self.seed + 1
        late = (_Late * len(self.late))(*((x.data_ptr(), _extent(x)) for x in self.late))
        each = len(arguments[0])
        flat = (ctypes.c_void_p * (each * len(arguments)))(*itertools.chain(*arguments))
        setting = _Setting(
            *(grid, block, shared_bytes, self.resident),
            *(ranks, len(arguments) // ranks, each, seed, self.seconds, len(late), late),
        )
        if message := run(ctypes.byref(setting), flat):
            words = _with_lines(message.decode(), library)
            raise EmulationError(f"{spec}, seed {seed}: {words}")


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last one."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy behind which no memory lies: to read or write there ends a launch with an error.

    Up to 15 bytes behind it can be read, as its end lies at a multiple of 16.
    """
    room = -(-tensor.nbytes // 16) * 16
    bytes_before = (room // mmap.PAGESIZE + 1) * mmap.PAGESIZE
    memory = mmap.mmap(-1, bytes_before + mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(first + bytes_before, mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    held = torch.frombuffer(memory, dtype=torch.uint8, count=bytes_before)
    copy = held[bytes_before - room :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def replacing(old: str, new: str = "") -> Callable[[str], str]:
    """A change for `emulated`."""
    return lambda text: text.replace(old, new)


@contextmanager
def emulated(
    seed: int = 0,
    *,
    num_multiprocessors: int = 4,
    resident: int = 2,
    change: Callable[[str], str] | None = None,
    late: Sequence[torch.Tensor] = (),
    seconds: int = 60,
) -> Iterator[Emulation]:
    """Operators in CUDA C++ run here, on tensors of the CPU, until the end of the block."""
    emulation = Emulation(seed, num_multiprocessors, resident, change, late, seconds)
    # Operators keep memory for a stream: of a size for this GPU, and as wrong kernels leave it.
    stream = next(_STREAMS)
    properties = SimpleNamespace(
        multi_processor_count=num_multiprocessors, major=9, minor=0, L2_cache_size=50 * 2**20
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Driver, "emulation", emulation)
        patch.setattr(runtime, "_driver", _Driver)
        patch.setattr(runtime, "_launches", {})
        patch.setattr(runtime, "require_hopper", lambda device: None)
        patch.setattr(runtime, "load", lambda spec, device: _Kernel(spec))
        patch.setattr(contracts, "check_gpu", lambda *arguments: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream, raising=False)
        runtime._encode.cache_clear()
        yield emulation
        runtime._encode.cache_clear()


class _Kernel:
    """As runtime.Kernel."""

    def __init__(self, spec: KernelSpec) -> None:
        self.function = spec
        self.shared_bytes = spec.shared_bytes
        self._library = _Driver()


class _Driver:
    """libcuda.so.1, as far as runtime.py calls it."""

    emulation: Emulation | None = None  # one for all: operators keep their kernels

    def cuLaunchKernelEx(  # noqa: N802
        self, config: Any, function: KernelSpec, arguments: Any, extra: None
    ) -> int:
        launch = config._obj
        grid, block = tuple(launch.grid), tuple(launch.block)
        assert self.emulation, "a kernel that was loaded by the emulator is launched outside of it"
        self.emulation.launch(function, grid, block, launch.shared_bytes, arguments)
        return 0

    def cuTensorMapEncodeTiled(  # noqa: N802
        self,
        target: ctypes.c_void_p,
        kind: int,
        rank: int,
        address: ctypes.c_void_p,
        sizes: ctypes.Array[ctypes.c_uint64],
        pitches: ctypes.Array[ctypes.c_uint64],
        box: ctypes.Array[ctypes.c_uint32],
        steps: ctypes.Array[ctypes.c_uint32],
        interleave: int,
        swizzle: int,
        promotion: int,
        fill: int,
    ) -> int:
        """What the driver refuses is refused: with its number for a value that is invalid."""
        element, span = _ELEMENT_BYTES[kind], _SWIZZLE_BYTES[swizzle]
        row_bytes = box[0] * element
        is_valid = (
            *((address.value or 0) % 16 == 0, interleave == 0, fill == 0),
            all(0 < sizes[i] <= 2**32 for i in range(rank)),
            all(pitches[i] % 16 == 0 and pitches[i] < 2**40 for i in range(rank - 1)),
            all(0 < box[i] <= 256 and steps[i] == 1 for i in range(rank)),
            row_bytes % 16 == 0,
            not span or row_bytes <= span,
        )
        if not all(is_valid):
            return 1
        if span and row_bytes != span:
            raise EmulationError(f"a box of {row_bytes} bytes a row, swizzled by {span}")
        rest = [0] * (5 - rank)
        packed = _MAP.pack(
            *(_MAP_MARK, address.value or 0, rank, element, span),
            *(*(min(sizes[i], 2**32 - 1) for i in range(rank)), *rest),
            *(element, *(pitches[i] for i in range(rank - 1)), *rest),
            *(*(box[i] for i in range(rank)), *rest, 0, 0, 0),
        )
        ctypes.memmove(target.value or 0, packed.ljust(128, b"\0"), 128)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid argument"
        return 0


# ---- compiling ---------------------------------------------------------------------------------


def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"gptoss-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _build(output: Path, arguments: list[str], text: str = "") -> None:
    """Several processes may build the same: under another name first, from no file that one of
    them may be writing. `text` is what `-` among the arguments stands for."""
    compiler = shutil.which("g++")
    if platform.machine() != "x86_64":
        raise CompilationError("the emulator switches between fibers on x86-64 alone")
    if compiler is None:
        raise CompilationError("the emulator compiles Hopper's kernels by g++, and there is none")
    partial = output.with_name(f"{output.stem}.{os.getpid()}{output.suffix}")
    command = [compiler, *_FLAGS, *arguments, "-o", str(partial)]
    found = subprocess.run(command, input=text, capture_output=True, text=True)
    if found.returncode:
        lines = [line for line in found.stderr.splitlines() if "error" in line]
        raise CompilationError("g++ refused a kernel:\n" + "\n".join(lines[:10]))
    partial.replace(output)


@functools.cache
def _machine() -> Path:
    files = sorted(FOLDER.glob("*.cpp"))
    texts = [path.read_text() for path in (*files, FOLDER / "state.hpp", FOLDER / "machine.hpp")]
    output = _cache() / f"machine-{_hash(*texts, *_FLAGS, *_MACHINE_FLAGS)}.so"
    if not output.exists():
        _build(output, [*_MACHINE_FLAGS, *map(str, files)])
    return output


@functools.cache
def _header() -> Path:
    """The folder of ptx.hpp as g++ has read it: once, and not for each of some hundred kernels."""
    texts = [(FOLDER / name).read_text() for name in ("ptx.hpp", "cuda.hpp", "machine.hpp")]
    folder = _cache() / f"header-{_hash(*texts, *_FLAGS)}"
    output = folder / "ptx.hpp.gch"
    if not output.exists():
        folder.mkdir(exist_ok=True)
        _build(output, ["-x", "c++-header", str(FOLDER / "ptx.hpp")])
    return folder


def _hash(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:24]


@functools.cache
def _compiled(source: str, name: str, defines: tuple[tuple[str, int], ...]) -> tuple[Any, Path]:
    """The function that launches a kernel, whose __device__ variables stay, and its library."""
    text = translate(source, name)
    flags = [f"-D{key}={value}" for key, value in sorted(defines)]
    header, machine = _header(), _machine()
    output = _cache() / f"{name}-{_hash(text, *flags, header.name, machine.name)}.so"
    if not output.exists():
        sources = ("-x", "c++", "-", "-x", "none", str(machine))
        _build(output, [f"-I{header}", f"-I{FOLDER}", *flags, *sources], text)
    library = ctypes.CDLL(str(output))
    library.emulated_launch.restype = ctypes.c_char_p
    return library.emulated_launch, output


# ---- where in the code -------------------------------------------------------------------------


def _with_places(spec: KernelSpec) -> str:
    """A kernel's source with the names of the files that it is made of."""
    source = spec.source
    for path in (Path(compiler.__file__).parent).glob("*.cu*"):
        text = path.read_text()
        if text in source:
            source = source.replace(text, f'#line 1 "{path.name}"\n{text}\n#line 1 "generated"\n')
    return source


def _with_lines(message: str, library: Path) -> str:
    """What the machine gave as addresses, as lines of the kernel's files, the innermost first."""

    def lines(found: re.Match[str]) -> str:
        addresses = [f"0x{each}" for each in found[1].split(",") if each]
        tool = shutil.which("addr2line")
        if tool is None:
            return ""
        told = subprocess.run(
            [tool, "-i", "-s", "-e", str(library), *addresses], capture_output=True, text=True
        )
        places = [line.split(" ")[0] for line in told.stdout.splitlines()]
        ours = [place for place in places if re.match(r"[\w.]+\.cuh?:|generated:", place)]
        return " (" + " < ".join(dict.fromkeys(ours[:6])) + ")" if ours else ""

    return re.sub(r" @\{([0-9a-f,]*)\}", lines, message)
