"""t = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e], e the expert of each row
gate = min(t[0::2], limit);  up = clamp(t[1::2], -limit, limit)
y = gate * sigmoid(alpha * gate) * (up + 1);  scale = max |y| / 448 of a group;  out = y / scale

FP8 (e4m3) in and out, all between in fp32: the first product of a mixture of experts. What it costs
is in grouped_fp8.py; SwiGLU and the quantisation run beside the next tile's multiplications.
"""

from __future__ import annotations

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import grouped_fp8, runtime
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.grouped_fp8 import GroupedTile
from gptoss_kernels.fp8 import BLOCK, SWIGLU_GROUP


def grouped_swiglu_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    alpha: float,
    limit: float,
    group: int = SWIGLU_GROUP,
    out: tuple[Tensor, Tensor] | None = None,
    tile: GroupedTile | None = None,
) -> tuple[Tensor, Tensor]:
    """Values e4m3 [R, I], scale fp32 [R, ceil(I / group)], written to `out` if it is given.

    Expert e owns the rows expert_start[e] : expert_start[e + 1]; rows behind all experts' are not
    written. `x` [R, H] e4m3; `x_scale` fp32 [R, ceil(H / 128)]; `expert_start` int32 [E + 1], from
    0 to R at most, never falling; `weight` [E, 2 I, H] e4m3, gate and up rows in turn;
    `weight_scale` fp32 [E, ceil(2 I / 128), ceil(H / 128)]; `bias` [E, 2 I] fp32. Both scales of
    activations are laid out as contracts.empty_scale does. `group` is 64 or 128; I and H are
    multiples of 16. A group counts max |y| as at least 1e-10; one with an inf or a NaN dequantises
    to NaN. Raises ValueError on anything else but the values of `expert_start`, which stay on the
    device, and runtime.CudaError where there is no Hopper GPU.

    Whatever the launches before this one on the stream wrote may be read. Where the next launch is
    grouped_linear_fp8, it reads all but its `x` and `x_scale` while this one may still run: none of
    that may lie in `out`.
    """
    if out is None:
        rows, n, _ = contracts.sizes(x, weight, 3)
        contracts.check_group(group)
        out = contracts.empty_quantised(rows, n // 2, x.device, group)
    inputs = (x, x_scale, expert_start, weight, weight_scale, bias)
    if x.shape[0] == 0:
        _check(group, *inputs, *out)
    else:
        launch(
            ("grouped_swiglu_fp8", alpha, limit, group, tile),
            (*inputs, *out),
            lambda: _prepare(tile, alpha, limit, group, *inputs, *out),
        )
    return out


def _check(
    group: int,
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    values: Tensor,
    scale: Tensor,
) -> None:
    contracts.check_gpu(x)
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, BLOCK)
    contracts.check_swiglu_sizes(weight, group)
    contracts.check_quantised((values, scale), (x.shape[0], weight.shape[1] // 2), x, group)


def _prepare(
    tile: GroupedTile | None, alpha: float, limit: float, group: int, *tensors: Tensor
) -> runtime.Launch:
    _check(group, *tensors)
    return grouped_fp8.prepare(
        *(tile, *tensors), x_group=BLOCK, swiglu=True, out_group=group, alpha=alpha, limit=limit
    )
