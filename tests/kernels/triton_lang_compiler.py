"""Compiles what an operator of Triton-lang would launch, without a GPU: for test_triton_lang.py."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from gptoss_kernels.triton_lang import device

_SHARED_BYTES = {89: 101_376, 90: 232_448, 100: 232_448}


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code, by the compiler's own report."""

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    warps: int
    ptx: str


class _NoDriver:
    """What the just-in-time compiler asks of a driver before it launches."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Compiled]]:
    """Operators called inside with tensors on the CPU compile, launch nothing, and are listed."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(
        self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs
    ) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(_report(kernel))

    old_driver = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver(capability))  # pyright: ignore
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(device, "check_device", return_value=None),
            mock.patch.object(device, "has_copy_engine", return_value=capability >= 90),
            mock.patch.object(device, "shared_bytes", return_value=_SHARED_BYTES[capability]),
        ):
            yield compiled
    finally:
        triton.runtime.driver._active = old_driver


def unset_registers(code: str) -> list[str]:
    """The uniform registers that machine code reads and no instruction before sets.

    ptxas 12.8 has been seen to forget one that addresses of shared memory are computed from.
    """
    was_set: set[int] = set()
    unset: list[str] = []
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?(.*?);", code):
        name, _, operands = instruction.partition(" ")
        result = re.match(r"\s*UR(\d+),", operands)
        if name.startswith(("ST", "RED.", "UTMA")):
            result = None
        for use in re.finditer(r"(gdesc\[|desc\[)?\bUR(\d+)", operands):
            if result and use.start(2) == result.start(1):
                continue
            number = int(use[2])
            # Of the four of a wgmma's two operands, the first may be in other registers.
            used = {"gdesc[": (2, 3), "desc[": (0, 1)}.get(use[1], (0,))
            unset += [f"UR{number + i}" for i in used if number + i not in was_set]
        if result:
            number = int(result[1])
            was_set.update((number, number + 1) if re.search(r"\.64|WIDE", name) else (number,))
    return unset


def _report(kernel) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])

        def shown(*command: str) -> str:
            command = (*command, str(cubin))
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = shown(knobs.nvidia.cuobjdump.path, "-res-usage")
        unset = unset_registers(shown(knobs.nvidia.nvdisasm.path, "-c"))
        assert not unset, (kernel.metadata.name, unset)

    def number(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        assert found, usage
        return int(found[1])

    return Compiled(
        kernel.metadata.name,
        number("REG"),
        number("STACK"),
        number("LOCAL"),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        kernel.asm["ptx"],
    )
