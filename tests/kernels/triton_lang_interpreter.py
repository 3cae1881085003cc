"""Triton-lang's interpreter, which runs kernels on the CPU: in a process of its own, and exactly.

Its switch is read where kernels are decorated, so tests that are to be interpreted run once more,
in a process that has it set.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

# NumPy, in which the interpreter computes, remarks on what is not finite or overflows, and on how
# the interpreter makes a scalar.
REMARKS = (
    "ignore:.*encountered in:RuntimeWarning",
    "ignore:Conversion of an array with ndim:DeprecationWarning",
)
_TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_INTEGERS = {8: np.uint8, 16: np.int16, 32: np.int32}


def interpret(path: str) -> None:
    """Run the tests of the file `path` that aren't for a GPU where kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def round_as_hardware_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own conversions truncate and lose carries: torch's in their place.

    And its product of bf16 is one of their bits as integers: here all are multiplied in fp32.
    """

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object):
        integer = _INTEGERS[source.primitive_bitwidth]
        tensor = torch.from_numpy(np.ascontiguousarray(data).view(integer)).view(_TYPES[source])
        bits = tensor.float().to(_TYPES[target]).view(torch.uint8).numpy()
        unsigned = getattr(np, f"uint{target.primitive_bitwidth}")
        return bits.view(unsigned).reshape(data.shape)

    def wide(operand: TensorHandle) -> np.ndarray:
        data = operand.data
        if operand.dtype.scalar in (tl.bfloat16, tl.float8e4nv):
            data = convert(data, operand.dtype.scalar, tl.float32, None).view(np.float32)
        return data.astype(np.float32)

    def dot(builder: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object):
        return TensorHandle(wide(a) @ wide(b) + d.data, d.dtype.scalar)

    monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert)
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", dot)
