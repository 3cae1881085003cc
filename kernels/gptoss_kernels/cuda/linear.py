"""out = x @ weight^T + bias + residual, in bf16

2MNK operations over MK + NK + MN values. Few rows without bias and residual (lm_head) are bound by
reading the weight: linear.cu multiplies them, which sends for it before it waits for the kernel
before. All others are PyTorch's library's. Here are the contract and the choice.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.runtime import launch
from gptoss_kernels.cuda.streaming_tile import StreamingTile

MAXIMUM_ROWS = 32
_UNIT = 8  # rows of x, and of the weight
_CHUNK = 32  # of K, for each of a warp's steps


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product in bf16 [M, N], written to `out` if it is given.

    `x` [M, K], `weight` [N, K], `bias` [N] or None, `residual` [M, N] or None: all bf16. Rows of x
    and out that linear.cu takes lie at multiples of 16 bytes. The weight must not be written by the
    kernel launched just before on the same stream: it is read while that one may still run. Raises
    ValueError on anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    contracts.check_gpu(x)
    m, n, k = contracts.sizes(x, weight, 2)
    is_plain = bias is None and residual is None and weight.is_contiguous()
    tile = choose_tile(m, n, k) if is_plain else None
    if tile is None:
        _check(x, weight, bias, residual, out)
        product = torch.nn.functional.linear(x, weight, bias)
        product = product if residual is None else product + residual
        return product if out is None else out.copy_(product)
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    launch("linear", (x, weight, out), lambda: _prepare(tile, x, weight, out))
    return out


@dataclass(frozen=True)
class RowsTile(StreamingTile):
    """What linear.cu is compiled for."""

    kernel = "linear"
    rows = _UNIT
    value_bytes = 2

    @property
    def warps(self) -> int:
        """Fewer of more rows of x."""
        chunks = -(-self.k // _CHUNK)
        return -(-chunks // -(-chunks // (16 if self.tokens <= 16 else 8)))


def choose_tile(m: int, n: int, k: int) -> RowsTile | None:
    """None where PyTorch's library multiplies: no rows, many, or sizes that copies do not take."""
    if not (0 < m <= MAXIMUM_ROWS and n and k and n % _UNIT == 0):
        return None
    tile = RowsTile(k, tokens=-(-m // _UNIT) * _UNIT)
    return tile if tile.is_possible else None


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int) for name in ("m", "n")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "out_stride")),
    )


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> None:
    contracts.check_type("x", x, torch.bfloat16, x)
    contracts.check_type("weight", weight, torch.bfloat16, x)
    shape = (x.shape[0], weight.shape[0])
    others = (("bias", bias, shape[1:]), ("residual", residual, shape), ("out", out, shape))
    for name, tensor, its_shape in others:
        if tensor is not None:
            contracts.check_type(name, tensor, torch.bfloat16, x)
            contracts.check_shape(name, tensor, its_shape)


def _prepare(tile: RowsTile, x: Tensor, weight: Tensor, out: Tensor) -> runtime.Launch:
    _check(x, weight, None, None, out)
    contracts.check_rows("x", x)
    contracts.check_rows("out", out)
    contracts.check_start("weight", weight)
    device = x.device.index
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    (m, _), n = x.shape, weight.shape[0]
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=min(blocks, n // _UNIT),
        threads=tile.threads,
        arguments=(
            _Arguments(
                *(x.data_ptr(), weight.data_ptr(), out.data_ptr(), m, n),
                *(x.stride(0), out.stride(0)),
            ),
        ),
    )
