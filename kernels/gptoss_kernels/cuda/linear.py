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

MAXIMUM_ROWS = 32
_UNIT = 8  # rows of x, and of the weight
_CHUNK = 32  # of K, for each of a warp's steps
_MAXIMUM_STAGES = 8


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: RowsTile | None = None,
) -> Tensor:
    """The product in bf16 [M, N], written to `out` if it is given.

    `x` [M, K], `weight` [N, K], `bias` [N] or None, `residual` [M, N] or None: all bf16. The weight
    must not be written by the kernel launched just before on the same stream: it is read while that
    one may still run. Raises ValueError on anything else, also if a `tile` is given that is not for
    this product, and runtime.CudaError where there is no Hopper GPU.
    """
    contracts.check_gpu(x)
    m, n, k = contracts.sizes(x, weight, 2)
    is_plain = bias is None and residual is None
    tile = tile or (choose_tile(m, n, k) if is_plain else None)
    if tile is None:
        _check(x, weight, bias, residual, out)
        product = torch.nn.functional.linear(x, weight, bias)
        product = product if residual is None else product + residual
        return product if out is None else out.copy_(product)
    if not (is_plain and tile.is_for(m, n, k)):
        raise ValueError(f"{tile} is not for {m} x {n} x {k}, nor for a bias or a residual")
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    launch(("linear", tile), (x, weight, out), lambda: _prepare(tile, x, weight, out))
    return out


@dataclass(frozen=True)
class RowsTile:
    """What linear.cu is compiled for: K, the most rows of x, a tile's rows of the weight."""

    k: int
    tokens: int = 8
    rows: int = 8

    @property
    def warps(self) -> int:
        """Fewer of more rows of x, all of which lie in their registers."""
        chunks = -(-self.k // _CHUNK)
        return -(-chunks // -(-chunks // (16 if self.tokens <= 16 else 8)))

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stages(self) -> int:
        return min(_MAXIMUM_STAGES, self._free_bytes // self._slot_bytes)

    @property
    def shared_bytes(self) -> int:
        return runtime.MAXIMUM_SHARED_BYTES - self._free_bytes + self.stages * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        """A tile of the weight, whose rows begin at odd multiples of 64 bytes, and a barrier."""
        row = 2 * self.k
        return self.rows * (row + (192 - row % 128) % 128) + 8

    @property
    def _free_bytes(self) -> int:
        """Beside what each warp leaves of two tiles, in fp32."""
        return runtime.MAXIMUM_SHARED_BYTES - 2 * self.warps * self.rows * self.tokens * 4

    def is_for(self, m: int, n: int, k: int) -> bool:
        """Two slots at least: one comes while another is multiplied."""
        fits = k == self.k and 0 < m <= self.tokens and self.stages > 1
        return fits and n > 0 and n % _UNIT == 0 and k % _UNIT == 0

    @property
    def spec(self) -> runtime.KernelSpec:
        defines = {
            "K": self.k,
            "TOKENS": self.tokens,
            "WARPS": self.warps,
            "ROWS": self.rows,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes,
        }
        return runtime.KernelSpec(
            "linear",
            files=("mma.cuh", "linear.cu"),
            defines=tuple(defines.items()),
            shared_bytes=self.shared_bytes,
            variant=runtime.variant_of(self, f"K={self.k}", "k"),
        )


def choose_tile(m: int, n: int, k: int) -> RowsTile | None:
    """None where PyTorch's library multiplies: no rows, many, or sizes that copies do not take."""
    tile = RowsTile(k, tokens=-(-m // _UNIT) * _UNIT)
    return tile if m <= MAXIMUM_ROWS and tile.is_for(m, n, k) else None


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int) for name in ("m", "n")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "weight_stride", "out_stride")),
    )


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None,
) -> None:
    contracts.check_gpu(x)
    contracts.check_type("x", x, torch.bfloat16, x)
    contracts.check_type("weight", weight, torch.bfloat16, x)
    shape = (x.shape[0], weight.shape[0])
    if bias is not None:
        contracts.check_type("bias", bias, torch.bfloat16, x)
        contracts.check_shape("bias", bias, shape[1:])
    for name, tensor in (("residual", residual), ("out", out)):
        if tensor is not None:
            contracts.check_output(name, tensor, torch.bfloat16, shape, x)


def _prepare(tile: RowsTile, x: Tensor, weight: Tensor, out: Tensor) -> runtime.Launch:
    _check(x, weight, None, None, out)
    contracts.check_rows("x", x)
    contracts.check_rows("weight", weight)
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
                *(x.stride(0), weight.stride(0), out.stride(0)),
            ),
        ),
    )
