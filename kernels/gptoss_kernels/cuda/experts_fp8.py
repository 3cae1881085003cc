"""y = swiglu(quantise(x) @ w13[e]^T + b13[e]);  out = quantise(y) @ w2[e]^T + b2[e]

The experts of each token, one after the other what dispatch_fp8, grouped_swiglu_fp8 and
grouped_linear_fp8 compute, with groups of 128 columns behind SwiGLU. Up to 8 tokens with 32 choices
take one launch (experts_fp8_few.cu), bound by reading the weights of the experts that they chose.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.gemm_fp8 import launch
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.rows import check_num_chosen
from gptoss_kernels.fp8 import BLOCK

MAXIMUM_TOKENS = 8  # of one launch: as many columns has an instruction of the tensor cores
MAXIMUM_CHOICES = 32  # likewise: as many lanes has a warp
# One launch for few tokens, two, or those of dispatch_fp8 and both products: until it was timed.
FEW_LAUNCHES = 0
_MAXIMUM_WARPS = 12  # that multiply
_MAXIMUM_GROUPS = 2  # of 128 columns in the registers of a warp
_STAGES = 4


def experts_fp8(
    x: Tensor,
    chosen: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor,
    *,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """What each choice's expert gives, bf16 [R, H], and the row of each choice, int32 [T, K].

    `x` [T, H] bf16 is quantised in groups of 128; `chosen` [T, K] int64 or int32, K up to 8;
    `w13` [E, 2 I, H] e4m3, gate and up rows in turn, `w2` [E, H, I]; their scales fp32 for blocks
    of 128 x 128, biases fp32; H and I multiples of 16. R = T K. Values of `chosen` stay on the
    device: a token that chose what is no expert becomes NaN where `combine` or a norm adds it up
    with weights that are. Raises ValueError on anything else, and runtime.CudaError where there is
    no Hopper GPU.

    Weights, scales and biases must not be written by the launch just before on the stream. Two of
    these must not be under way at once on one GPU, on two streams or in two graphs. The rows may be
    read while this still runs, and must not be written.
    """
    operands = (x, chosen, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias)
    tile = choose_tile(x, chosen, w2) if FEW_LAUNCHES else None
    if tile is None:
        values, scale, expert_start, rows = dispatch_fp8(x, chosen, len(w13))
        first = (expert_start, w13, w13_scale, w13_bias)
        inner = grouped_swiglu_fp8(values, scale, *first, alpha=alpha, limit=limit)
        return grouped_linear_fp8(*inner, expert_start, w2, w2_scale, w2_bias), rows
    return experts_fp8_few(tile, *operands, alpha=alpha, limit=limit)


def experts_fp8_few(
    tile: ExpertsTile,
    *operands: Tensor,
    alpha: float,
    limit: float,
    launches: int | None = None,
) -> tuple[Tensor, Tensor]:
    """experts_fp8 of few tokens, by the kernel of `tile`; operands as there.

    `launches`: 1, or 2 of one product each; FEW_LAUNCHES if it is not given.
    """
    x, chosen, *_ = operands
    num_choices = chosen.numel()
    out = torch.empty((num_choices, tile.hidden), dtype=torch.bfloat16, device=x.device)
    y = torch.empty((num_choices, tile.inner), dtype=torch.float32, device=x.device)
    launches = launches or FEW_LAUNCHES
    launch(
        ("experts_fp8_few", alpha, limit, launches),
        (*operands, y, out),
        lambda: _prepare(tile, launches, alpha, limit, *operands, y, out),
    )
    return out, _numbers(x.device)[:num_choices].view(chosen.shape)


@functools.cache
def _numbers(device: torch.device) -> Tensor:
    """Older than any launch that is captured: whoever adds rows up reads them early."""
    return torch.arange(MAXIMUM_CHOICES, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class ExpertsTile:
    """H, I and K, for which the kernel is compiled. products: 1 or 2, or 3 for both."""

    hidden: int
    inner: int
    chosen: int
    products: int = 3

    @property
    def _k_blocks(self) -> int:
        return -(-max(self.hidden, self.inner) // BLOCK)

    @property
    def groups(self) -> int:
        """Of 128 columns, for each warp."""
        return -(-self._k_blocks // _MAXIMUM_WARPS)

    @property
    def warps(self) -> int:
        return -(-self._k_blocks // self.groups)

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def shared_bytes(self) -> int:
        """Slots for 16 rows and their biases, the warps' sums, barriers, the table of entries."""
        slot = 16 * (max(self.hidden, self.inner) + 4) + self.warps * 8 * 20 * 4 + 16
        return _STAGES * slot + 16 + 16 * MAXIMUM_CHOICES

    @property
    def spec(self) -> runtime.KernelSpec:
        defines = {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "CHOSEN": self.chosen,
            "PRODUCTS": self.products,
            "WARPS": self.warps,
            "STAGES": _STAGES,
            "SHARED_BYTES": self.shared_bytes,
            "MAXIMUM_CHOICES": MAXIMUM_CHOICES,
            "COUNTERS": runtime.COUNTERS,
        }
        return runtime.KernelSpec(
            "experts_fp8_few",
            files=("mma.cuh", "experts_fp8_few.cu"),
            defines=tuple(defines.items()),
            shared_bytes=self.shared_bytes,
            variant=runtime.variant_of(
                self, f"H={self.hidden} I={self.inner} K={self.chosen}", "hidden", "inner", "chosen"
            ),
        )

    @property
    def is_possible(self) -> bool:
        return self.groups <= _MAXIMUM_GROUPS and self.shared_bytes <= runtime.MAXIMUM_SHARED_BYTES


def choose_tile(x: Tensor, chosen: Tensor, w2: Tensor) -> ExpertsTile | None:
    """None where this kernel has no room; operands as of experts_fp8, not yet checked."""
    if x.dim() != 2 or chosen.dim() != 2 or w2.dim() != 3 or chosen.dtype != torch.int64:
        return None
    fits = 0 < len(x) <= MAXIMUM_TOKENS and 0 < chosen.numel() <= MAXIMUM_CHOICES
    tile = ExpertsTile(x.shape[1], w2.shape[2], chosen.shape[1])
    return tile if fits and tile.is_possible else None


class _Weight(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("values", "scale", "bias"))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "chosen")),
        *((name, _Weight) for name in ("w13", "w2")),
        *((name, ctypes.c_void_p) for name in ("y", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_experts")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("exponent_scale", "limit")),
        ("counter", ctypes.c_int),
    )


def _check(
    x: Tensor,
    chosen: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor,
) -> None:
    contracts.check_dispatch_inputs(x, chosen, len(w13))
    check_num_chosen(chosen.shape[1])
    contracts.check_inputs(x, None, w13, w13_scale, w13_bias, dimensions=3)
    contracts.check_swiglu_sizes(w13, BLOCK)
    y = x.new_empty(len(x), w13.shape[1] // 2)
    contracts.check_inputs(y, None, w2, w2_scale, w2_bias, dimensions=3)
    contracts.check_shape("w2", w2, (len(w13), x.shape[1], y.shape[1]))
    for name, bias in (("w13_bias", w13_bias), ("w2_bias", w2_bias)):
        contracts.check_start(name, bias)
    contracts.check_gpu(x)


def _prepare(
    tile: ExpertsTile, launches: int, alpha: float, limit: float, *tensors: Tensor
) -> Callable[[int], None]:
    *operands, y, out = tensors
    _check(*operands)
    x, chosen, *weights = operands
    device = x.device.index
    pointers = [tensor.data_ptr() for tensor in weights]
    arguments = _Arguments(
        *(x.data_ptr(), chosen.data_ptr()),
        *(_Weight(*pointers[:3]), _Weight(*pointers[3:])),
        *(y.data_ptr(), out.data_ptr()),
        *(len(x), len(weights[0]), x.stride(0), -alpha / math.log(2), limit),
        runtime.next_counter(),
    )
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    both = [
        runtime.Launch(
            runtime.load(each.spec, device),
            grid=num_blocks,
            threads=each.threads,
            arguments=(arguments,),
            is_cooperative=each.products == 3,
        )
        for each in ([tile] if launches == 1 else [replace(tile, products=i) for i in (1, 2)])
    ]
    if len(both) == 1:
        return both[0]

    def one_after_the_other(stream: int) -> None:
        for each in both:
            each(stream)

    return one_after_the_other
