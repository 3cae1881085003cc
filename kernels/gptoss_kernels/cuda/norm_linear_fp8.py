"""total = hidden + what experts gave;  out = rms_norm(total) @ (weight * weight_scale)^T + bias

What rms_norm_fp8 and linear_fp8 compute one after the other, bit for bit. Of few rows in one launch
(norm_linear_fp8.cu), bound by reading the weight, in whose time the norm is made.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.combine import MixtureArguments
from gptoss_kernels.cuda.linear_fp8 import linear_fp8
from gptoss_kernels.cuda.linear_fp8_few import Arguments, FewTile, choose_few_tile
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.cuda.rows import check_num_chosen

MAXIMUM_ROWS = 8
_MAXIMUM_SERVED_ROWS = 0  # one launch has not been timed yet


def norm_linear_fp8(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    update: Mixture | None = None,
) -> tuple[Tensor, Tensor]:
    """The product in bf16 [T, N], and hidden + update [T, H], where hidden was or elsewhere.

    `hidden` [T, H] bf16, H a multiple of 16, which afterwards may hold either; `norm_weight` [H]
    fp32; all else is as linear_fp8 and rms_norm_fp8 have it. `hidden`, what the update has beside
    its outputs, weights, scales and biases must not be written by the kernel launched just before
    on the same stream: they are read while that one may still run. Raises ValueError on anything
    else, and runtime.CudaError where there is no Hopper GPU.
    """
    contracts.check_gpu(hidden, "hidden")
    m, n, k = contracts.sizes(hidden, weight, 2)
    tile = None
    if update is not None and 0 < m <= _MAXIMUM_SERVED_ROWS:
        num_blocks = torch.cuda.get_device_properties(hidden.device.index).multi_processor_count
        tile = choose_norm_tile(m, n, k, num_blocks, update.rows.shape[1])
    if tile is None or update is None:
        normed = rms_norm_fp8(hidden, norm_weight, eps, update)
        return linear_fp8(*normed, weight, weight_scale, bias), hidden
    out, total = hidden.new_empty(m, n), torch.empty_like(hidden)
    tensors = (hidden, norm_weight, weight, weight_scale, bias, *update, out, total)
    runtime.launch(
        ("norm_linear_fp8", eps, bias is None),
        [tensor for tensor in tensors if tensor is not None],
        lambda: prepare(
            tile, hidden, norm_weight, eps, weight, weight_scale, bias, update, out, total
        ),
    )
    return out, total


@dataclass(frozen=True)
class NormTile(FewTile):
    """With experts of each token, and blocks that make rows of x for each other."""

    num_chosen: int = 1
    cluster: int = 1

    x_in_shared: ClassVar[bool] = True

    @property
    def spec(self) -> runtime.KernelSpec:
        layout = {"ROWS": 1, "VECTORS": 1}  # of rows.cuh: the warps of a block hold a row of x
        own = {"CHOSEN": self.num_chosen, "CLUSTER": self.cluster}
        shared = ("mma.cuh", "rows.cuh", "mixture.cuh", "norm.cuh", "linear_fp8_few.cuh")
        return runtime.KernelSpec(
            "norm_linear_fp8",
            files=(*shared, "norm_linear_fp8.cu"),
            defines=tuple({**self.defines, **layout, **own}.items()),
            shared_bytes=self.shared_bytes,
            variant=runtime.variant_of(self, f"K={self.k} rows={self.rows}", "k", "rows"),
        )


def choose_norm_tile(m: int, n: int, k: int, num_blocks: int, num_chosen: int) -> NormTile | None:
    """None where the kernel has no room. A cluster has a block for each row."""
    few = choose_few_tile(m, n, k, num_blocks) if m <= MAXIMUM_ROWS else None
    if few is None:
        return None
    cluster = 1 << (m - 1).bit_length()
    tile = NormTile(k, few.rows, num_chosen=num_chosen, cluster=cluster)
    return tile if tile.is_possible else None


class _NormArguments(ctypes.Structure):
    _fields_ = (
        ("update", MixtureArguments),
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "total")),
        *((name, ctypes.c_longlong) for name in ("hidden_stride", "total_stride")),
        ("eps", ctypes.c_float),
    )


def prepare(
    tile: NormTile,
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    update: Mixture,
    out: Tensor,
    total: Tensor,
) -> runtime.Launch:
    """Check and pack a launch. `total` must not overlap `hidden`."""
    contracts.check_rms_norm_inputs(hidden, norm_weight, update)
    check_num_chosen(update.rows.shape[1])
    contracts.check_inputs(hidden, None, weight, weight_scale, bias)
    contracts.check_gpu(hidden, "hidden")
    (m, k), n = hidden.shape, weight.shape[0]
    contracts.check_output("out", out, torch.bfloat16, (m, n), hidden, "hidden")
    contracts.check_output("total", total, torch.bfloat16, (m, k), hidden, "hidden")
    fits = k == tile.k and m <= tile.tokens and update.rows.shape[1] == tile.num_chosen
    if not (fits and tile.is_possible):
        raise ValueError(f"{tile} is not for {list(update.rows.shape)} experts and K={k}")
    return runtime.Launch(
        runtime.load(tile.spec, hidden.device.index),
        grid=-(-n // (tile.rows * tile.cluster)) * tile.cluster,
        threads=tile.threads,
        arguments=(
            Arguments.of(hidden, None, weight, weight_scale, bias, None, out),
            _NormArguments(
                MixtureArguments.of(*update),
                *(tensor.data_ptr() for tensor in (hidden, norm_weight, total)),
                *(hidden.stride(0), total.stride(0), eps),
            ),
        ),
    )
