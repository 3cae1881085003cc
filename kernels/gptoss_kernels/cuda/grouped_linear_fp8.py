"""out = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e], e the expert of each row

FP8 (e4m3) in, bf16 out, sums in fp32: the second product of a mixture of experts, on what
grouped_swiglu_fp8.py gives. What it costs is in grouped_fp8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import grouped_fp8, runtime
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.grouped_fp8 import GroupedTile


def grouped_linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    out: Tensor | None = None,
    tile: GroupedTile | None = None,
) -> Tensor:
    """The product in bf16 [R, N], written to `out` if it is given.

    Expert e owns the rows expert_start[e] : expert_start[e + 1]; rows behind all experts' are not
    written. `x` [R, K] e4m3; `x_scale` fp32 [R, ceil(K / 64)] or [R, ceil(K / 128)], laid out as
    contracts.empty_scale does; `expert_start` int32 [E + 1], from 0 to R at most, never falling;
    `weight` [E, N, K] e4m3; `weight_scale` fp32 [E, ceil(N / 128), ceil(K / 128)]; `bias` [E, N]
    fp32. N a multiple of 8, K of 16. Raises ValueError on anything else but the values of
    `expert_start`, which stay on the device, and runtime.CudaError where there is no Hopper GPU.

    All but `x` and `x_scale` is read while the operator called just before this one on the stream
    may still run, so that one must write none of it: `expert_start` is not dispatch_fp8's of the
    call before (of its launches, even the last but one may still run) but comes from further back,
    as where grouped_swiglu_fp8 lies between. That one lets this one start only after all before it
    have ended.
    """
    if out is None:
        rows, n, _ = contracts.sizes(x, weight, 3)
        out = torch.empty((rows, n), dtype=torch.bfloat16, device=x.device)
    inputs = (x, x_scale, expert_start, weight, weight_scale, bias)
    if x.shape[0] == 0:
        _check(*inputs, out)
    else:
        launch(
            ("grouped_linear_fp8", tile),
            (*inputs, out),
            lambda: _prepare(tile, *inputs, out),
        )
    return out


def _check(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    out: Tensor,
) -> None:
    group = contracts.x_group(x, x_scale)
    contracts.check_gpu(x)
    contracts.check_grouped_inputs(x, x_scale, expert_start, weight, weight_scale, bias, group)
    contracts.check_output("out", out, torch.bfloat16, (x.shape[0], weight.shape[1]), x)


def _prepare(tile: GroupedTile | None, *tensors: Tensor) -> runtime.Launch:
    _check(*tensors)
    return grouped_fp8.prepare(tile, *tensors, x_group=contracts.x_group(*tensors[:2]))
