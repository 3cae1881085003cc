"""The experts' products in float64, and wrong ones: what their tests hold kernels against."""

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import empty_scale

SWIGLU = {"alpha": 1.702, "limit": 7.0}


def starts_of(rows: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(rows)], device="cuda", dtype=torch.int32)


def spread(scale: Tensor, columns: int) -> Tensor:
    """The scale of each column, whichever width the groups have."""
    group = 128 if scale.shape[1] == -(-columns // 128) else 64
    return scale.double().repeat_interleave(group, dim=1)[:, :columns]


def exact(
    x: Tensor,
    x_scale: Tensor,
    starts: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
) -> Tensor:
    """The products of all experts in float64."""
    n, k = weight.shape[1:]
    wide_x = x.double() * spread(x_scale, k)
    out = torch.empty(len(x), n, device=x.device, dtype=torch.float64)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        if first == end:
            continue
        scale = weight_scale[expert].double().repeat_interleave(128, dim=0)[:n]
        scale = scale.repeat_interleave(128, dim=1)[:, :k]
        product = wide_x[first:end] @ (weight[expert].double() * scale).t()
        out[first:end] = product + bias[expert].double()
    return out


def expected_swiglu(inputs: list[Tensor], group: int) -> tuple[Tensor, Tensor]:
    return reference.quantise(reference.swiglu(exact(*inputs).float(), **SWIGLU), group)


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    return values.double() * spread(scale, values.shape[1])


def poisoned_fp8(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), 0x7F, device="cuda", dtype=torch.uint8)
    scale = empty_scale(rows, columns, "cuda", group)
    return values.view(torch.float8_e4m3fn), scale.fill_(torch.nan)


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many e4m3 values lie between, in int32."""

    def order(values: Tensor) -> Tensor:
        code = values.view(torch.uint8).int()
        return torch.where(code < 128, code, 128 - code)

    return (order(a) - order(b)).abs()


def wrong_products(inputs: list[Tensor]) -> Iterator[Tensor]:
    """What kernels that read something else would give, of three experts, the second without rows.

    Each pair of groups with one scale; the last half block with its neighbour's; one row with the
    next expert; no bias; one column's bias; one block's scale; another expert's scales.
    """
    x, x_scale, starts, weight, weight_scale, bias = inputs
    coarse, shifted = x_scale.clone(), x_scale.clone()
    coarse[:, 1::2] = x_scale[:, :-1:2]
    shifted[:, -1] = x_scale[:, -2]
    moved = starts.clone()
    moved[1:3] -= 1
    one_bias = bias.clone()
    one_bias[2, 7] = 100
    one_scale = weight_scale.clone()
    one_scale[2, 3, 5] = weight_scale[2, 3, 6] * 2
    for wrong in (
        (x, coarse, starts, weight, weight_scale, bias),
        (x, shifted, starts, weight, weight_scale, bias),
        (x, x_scale, moved, weight, weight_scale, bias),
        (x, x_scale, starts, weight, weight_scale, torch.zeros_like(bias)),
        (x, x_scale, starts, weight, weight_scale, one_bias),
        (x, x_scale, starts, weight, one_scale, bias),
        (x, x_scale, starts, weight, weight_scale.roll(1, 0), bias),
    ):
        yield exact(*wrong)


def wrong_swiglus(inner: Tensor) -> Iterator[Tensor]:
    """Dequantised: other formulas of exact products [R, 2 I], and groups of 64 instead of 128."""
    gate, up = inner[:, 0::2], inner[:, 1::2]
    low, high = gate.clamp(max=7), up.clamp(-7, 7)
    for y in (
        high * torch.sigmoid(1.702 * high) * (low + 1),  # gate and up exchanged
        gate * torch.sigmoid(1.702 * gate) * (high + 1),  # no limit on the gate
        low * torch.sigmoid(1.702 * low) * (up.clamp(max=7) + 1),  # half a limit on up
        low * torch.sigmoid(low) * (high + 1),  # SiLU
        low * torch.sigmoid(1.702 * low) * high,
    ):
        yield dequantised(*reference.quantise(y.float(), 128))
    yield dequantised(*reference.quantise(reference.swiglu(inner.float(), **SWIGLU), 64))
