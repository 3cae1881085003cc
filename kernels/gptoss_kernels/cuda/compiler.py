"""CUDA C++ from this folder, compiled by NVRTC for sm_90a, cached on disk.

Needs `cuda-bindings` and `nvidia-cuda-nvrtc` (both come with PyTorch for CUDA), and neither a GPU,
nor a driver, nor torch: what is compiled ahead of time is compiled by many short processes.

The cache holds one file a kernel, some 100 KB, and never removes any: all kernels that the served
models take are a few MB, and so is each later version of the sources, flags or compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import struct
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Literal

ARCHITECTURE = "sm_90a"
MAXIMUM_SHARED_BYTES = 232_448
NVRTC_MAJOR = 13

_FOLDER = Path(__file__).parent
_FLAGS = (
    f"--gpu-architecture={ARCHITECTURE}",
    "--std=c++17",
    "--ptxas-options=-v",
    "--no-cache",  # NVRTC's own: what comes from there has no log
    "--diag-suppress=177",  # unused: no kernel uses all of hopper.cuh
)
_INSTALL = "pip install 'gptoss-backend[gpu]'"


class CudaError(RuntimeError):
    """The compiler or the driver refused; the message says what and why."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel, and what the assembler said about it."""

    image: bytes
    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel before it is compiled: all that its machine code depends on, and its launch needs.

    name: of the `extern "C"` function. files: of this folder, in this order below hopper.cuh and
    `generated`. defines: (name, value), in any order. shared_bytes: dynamic shared memory of a
    launch. variant: what tells it from others of its name, for people. is_hot: it is a fault if it
    spills, has a stack frame or is warned about. flags: of NVRTC, beside those of all kernels.
    has_wide_clusters: of more than 8 blocks, which a kernel has to be allowed.

    An operator has a pure function from sizes to its KernelSpec. The operator calls it and loads
    what it gives (`runtime.load(spec, device)`); build.py calls it for all sizes that are served,
    so that `gptoss build-kernels` and the tests compile the same kernels.
    """

    name: str
    files: tuple[str, ...]
    defines: tuple[tuple[str, int], ...] = ()
    generated: str = ""
    shared_bytes: int = 0
    variant: str = ""
    is_hot: bool = True
    flags: tuple[str, ...] = ()
    has_wide_clusters: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.variant}".rstrip()

    @property
    def source(self) -> str:
        return kernel_source(*self.files, generated=self.generated)

    def compile(self) -> Cubin:
        """From the disk cache if this source was compiled before. CudaError says what is wrong."""
        return compile_source(self.source, dict(self.defines), self.flags)


def variant_of(tile: Any, title: str, *named: str) -> str:
    """For people: `title`, and what fields, but those `named` in it, are not as by default."""
    others = [
        f"{field.name}={getattr(tile, field.name)}"
        for field in fields(tile)
        if field.name not in named and getattr(tile, field.name) != field.default
    ]
    return " ".join([title, *others])


def cache_folder() -> Path:
    """Compiled kernels: in $GPTOSS_CACHE, else $XDG_CACHE_HOME/gptoss, else ~/.cache/gptoss.

    OSError if there is no home folder.
    """
    if folder := os.environ.get("GPTOSS_CACHE"):
        return Path(folder) / "kernels"
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "gptoss" / "kernels"
    try:
        return Path.home() / ".cache" / "gptoss" / "kernels"
    except RuntimeError as error:
        raise OSError("there is no home folder") from error


@functools.cache
def nvrtc_version() -> str:
    """Of the NVRTC that compiles here, such as "13.0.88". CudaError says why none does."""
    major, minor = _answer(_nvrtc().nvrtcVersion())
    with suppress(PackageNotFoundError):
        package = importlib.metadata.version("nvidia-cuda-nvrtc")
        if package.startswith(f"{major}.{minor}."):
            return package
    return f"{major}.{minor}"  # of a CUDA toolkit


def wgmma_source(
    columns: int,
    values: Literal["e4m3", "bf16"] = "e4m3",
    *,
    a_in_registers: bool = False,
    transposes_b: bool = False,
    narrow_b: bool = False,
) -> str:
    """`wgmma_<values><columns>`: 64 x columns x 32 bytes, sums in fp32.

    Both matrices are K-major in shared memory. `_registers`: a is in four registers instead, as
    each lane's part of `mma`'s is. `_transposed`: the columns of b are adjacent (not of e4m3).
    `_narrow`: rows of b have 64 bytes, and are swizzled by as many. The instruction names each of
    its accumulators, which no template can do.
    """
    name = (
        f"wgmma_{values}{'_registers' * a_in_registers}{'_transposed' * transposes_b}"
        f"{'_narrow' * narrow_b}"
    )
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    num_words = 4 if a_in_registers else 1
    after = count + num_words
    words = ", ".join(f"%{i}" for i in range(count, after))
    transposed = ""
    if values != "e4m3":
        transposed = f", {int(transposes_b)}" if a_in_registers else f", 0, {int(transposes_b)}"
    if a_in_registers:
        a, words = "const uint32_t (&a)[4]", f"{{{words}}}"
        a_operands = ", ".join(f'"r"(a[{i}])' for i in range(4))
    else:
        a, a_operands = "uint32_t a", '"l"(MATRIX_DESCRIPTOR_HIGH | a)'
    return f"""
template <int COLUMNS>
__device__ __forceinline__ void {name}(float (&sums)[COLUMNS / 2], {a}, uint32_t b,
                                           int accumulate);
template <>
__device__ __forceinline__ void {name}<{columns}>(float (&sums)[{count}], {a},
                                                      uint32_t b, int accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{32 if values == "e4m3" else 16}\
.f32.{values}.{values} {{{registers}}}, "
        "{words}, %{after}, p, 1, 1{transposed};\\n}}"
        : {operands}
        : {a_operands}, "l"({"NARROW_" * narrow_b}MATRIX_DESCRIPTOR_HIGH | b), "r"(accumulate));
}}
"""


def kernel_source(*names: str, generated: str = "") -> str:
    """The text of these files below what every kernel here shares and what Python generated.

    All of it, so that the cache's key covers it: NVRTC finds no file to include beside its own.
    """
    return "".join(
        [
            (_FOLDER / "hopper.cuh").read_text(),
            generated,
            *((_FOLDER / name).read_text() for name in names),
        ]
    )


def compile_source(
    source: str, defines: Mapping[str, int], extra_flags: Sequence[str] = ()
) -> Cubin:
    """Compile `source` for Hopper, from the disk cache if it was compiled before."""
    nvrtc, version = _nvrtc(), nvrtc_version()
    definitions = (f"-D{name}={value}" for name, value in sorted(defines.items()))
    flags = (*_FLAGS, *extra_flags, *definitions)
    key = hashlib.sha256(repr((source, flags, version)).encode()).hexdigest()[:32]
    if (cached := _read_cached(key)) is not None:
        return cached

    (program,) = _answer(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = _content(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = log.rstrip(b"\0")
        if status[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CudaError(f"NVRTC refused a kernel ({status[0].name}):\n{log.decode()}")
        image = _content(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    _write_cached(key, image, log)
    return _cubin(image, log.decode())


# ---- the compiler ------------------------------------------------------------------------------


@functools.cache
def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        major, minor = _answer(nvrtc.nvrtcVersion())  # loads the library, a package of its own
    except (ImportError, RuntimeError) as error:
        raise CudaError(
            f"Hopper kernels are compiled by NVRTC {NVRTC_MAJOR}, which cannot be loaded "
            f"({_first_line(error)}): {_INSTALL}"
        ) from error
    if major != NVRTC_MAJOR:
        raise CudaError(
            f"Hopper kernels are compiled by NVRTC {NVRTC_MAJOR}, found NVRTC {major}.{minor}: "
            f"{_INSTALL}"
        )
    return nvrtc


def _answer(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0].value != 0:
        raise CudaError(f"NVRTC failed with {answer[0].name}")
    return answer[1:]


def _content(size: Any, content: Any, program: Any) -> bytes:
    (length,) = _answer(size(program))
    buffer = bytes(bytearray(length + 1))  # NVRTC writes into it: never a bytes object in use
    _answer(content(program, buffer))
    return buffer[:length]


def _cubin(image: bytes, log: str) -> Cubin:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    return Cubin(
        image=image,
        registers=number(r"Used (\d+) registers"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        warnings=tuple(
            line
            for line in log.splitlines()
            if "warning" in line.lower() or "Performance Loss" in line
        ),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- the cache on disk -------------------------------------------------------------------------

# Image, log, then this: the image's length, and the SHA-256 of both. What follows an image bothers
# no tool that reads one.
_FOOTER = struct.Struct("<Q32s")


def _read_cached(key: str) -> Cubin | None:
    """None if there is no such file, or none that a whole write made."""
    try:
        content = (cache_folder() / f"{key}.cubin").read_bytes()
    except OSError:
        return None
    body, footer = content[: -_FOOTER.size], content[-_FOOTER.size :]
    if len(footer) < _FOOTER.size:
        return None
    length, digest = _FOOTER.unpack(footer)
    if digest != hashlib.sha256(body).digest():
        return None
    return _cubin(body[:length], body[length:].decode())


def _write_cached(key: str, image: bytes, log: bytes) -> None:
    """In one step, since several ranks may compile the same kernel at the same time."""
    body = image + log
    footer = _FOOTER.pack(len(image), hashlib.sha256(body).digest())
    folder = None
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                file.write(body + footer)
                file.flush()
                os.chmod(file.name, 0o644)  # an image's cache is read by other users
                os.replace(file.name, folder / f"{key}.cubin")
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        _warn_unwritable(folder, error.strerror or str(error))


@functools.cache
def _warn_unwritable(folder: Path | None, reason: str) -> None:
    """Once for each: a kernel takes about a second, again in every process."""
    where = f" in {folder}" if folder else ""
    warnings.warn(
        f"compiled kernels cannot be kept{where} ({reason}), so every process compiles its own: "
        "set GPTOSS_CACHE to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )
