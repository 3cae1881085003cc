"""y = swiglu(quantise(x) @ w13[e]^T + b13[e]);  out = quantise(y) @ w2[e]^T + b2[e]

The experts e of each token: what dispatch_fp8, grouped_swiglu_fp8 and grouped_linear_fp8 compute
one after the other, with groups of 128 columns behind SwiGLU. Few tokens take two launches of
experts_fp8_few.cu, bound by reading the weights of the experts that were chosen: w13 finds what was
chosen and quantises tokens by itself, y stays in fp32 until w2 multiplies it.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import MAXIMUM_EXPERTS
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.rows import check_num_chosen
from gptoss_kernels.fp8 import BLOCK

# Of the kernel with a slot for each token, as an instruction has 8 columns and a warp 32 lanes; and
# where an expert's choices are gathered, a round of 32 lanes for each 32.
MAXIMUM_TOKENS, MAXIMUM_CHOICES = 8, 32
MAXIMUM_GATHERED = 512
# Of an expert, in the mean: of more, many experts would have more entries than one.
_MOST_GATHERED_ROWS = 4
_SLOTS = 8  # of an entry
_MAXIMUM_WARPS = 12  # that multiply
_MAXIMUM_GROUPS = 2  # of 128 columns in the registers of a warp


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
    """A row for each choice, bf16 [R, H], and which one is whose: int32 [T, K].

    `x` [T, H] bf16; `chosen` [T, K] int64 or int32, K up to 8; `w13` [E, 2 I, H] e4m3, gate and up
    rows in turn, and `w2` [E, H, I]; their scales fp32 for blocks of 128 x 128, biases fp32, at
    multiples of 16 bytes; H and I multiples of 16. R = T K. Values of `chosen` stay on the device:
    what is no expert's number has a row that is not written, or none (-1). Raises ValueError on
    anything else, and runtime.CudaError where there is no Hopper GPU.

    Weights, scales and biases must not be written by the launch just before on the stream.
    """
    operands = (x, chosen, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias)
    if tiles := few_tiles(x, chosen, w2):
        return experts_fp8_few(tiles, *operands, alpha=alpha, limit=limit)
    values, scale, expert_start, rows = dispatch_fp8(x, chosen, len(w13))
    first = (expert_start, w13, w13_scale, w13_bias)
    inner = grouped_swiglu_fp8(values, scale, *first, alpha=alpha, limit=limit)
    del values, scale  # The output needs the memory.
    return grouped_linear_fp8(*inner, expert_start, w2, w2_scale, w2_bias), rows


def experts_fp8_few(
    tiles: FewExpertsTiles, *operands: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor]:
    """experts_fp8 by two launches of experts_fp8_few.cu; operands as there.

    `tiles`: what choose_tiles gives for their sizes, or others of these.
    """
    x, chosen, w13, *_ = operands
    num_choices, inner = chosen.numel(), w13.shape[1] // 2
    y = torch.empty((num_choices, inner), dtype=torch.float32, device=x.device)
    out = torch.empty((num_choices, x.shape[1]), dtype=torch.bfloat16, device=x.device)
    rows = torch.empty(chosen.shape, dtype=torch.int32, device=x.device)
    runtime.launch(
        ("experts_fp8_few", alpha, limit, tiles),
        (*operands, y, out, rows),
        lambda: _prepare(tiles, alpha, limit, *operands, y, out, rows),
    )
    return out, rows


def few_tiles(x: Tensor, chosen: Tensor, w2: Tensor) -> FewExpertsTiles | None:
    """Of the operands of experts_fp8_few, which need not have been checked; None: not for these."""
    if x.dim() != 2 or chosen.dim() != 2 or w2.dim() != 3 or chosen.dtype != torch.int64:
        return None
    return choose_tiles(len(x), len(w2), x.shape[1], w2.shape[2], chosen.shape[1])


@dataclass(frozen=True)
class FewExpertsTile:
    """For which the kernel is compiled: K, N, and the experts of a token.

    stages: slots of a block's ring, for 16 rows each. ahead: so many times 16 rows a block has come
    into L2 while tokens are routed, with swiglu. experts: at least as many as there are where an
    entry's slots are for the next choices of its expert; 0: for one of each token.
    """

    k: int
    n: int
    chosen: int
    swiglu: bool
    stages: int
    experts: int = 0
    ahead: int = 0

    @property
    def groups(self) -> int:
        """Of 128 columns, for each warp."""
        return -(-self._k_blocks // _MAXIMUM_WARPS)

    @property
    def warps(self) -> int:
        return -(-self._k_blocks // self.groups)

    @property
    def _k_blocks(self) -> int:
        return -(-self.k // BLOCK)

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)

    @property
    def shared_bytes(self) -> int:
        """Of each stage rows and biases, the warps' sums and barriers; the tables of entries."""
        stage = 16 * (self.k + 4) + self.warps * _SLOTS * 20 * 4 + 16
        entries = 8 * MAXIMUM_CHOICES + 8
        if self.experts:
            most = self.experts + MAXIMUM_GATHERED // _SLOTS
            entries = (4 + 2 * _SLOTS) * most + 16 + 4 * self.experts
        return self.stages * stage + entries

    @property
    def spec(self) -> runtime.KernelSpec:
        defines = {
            "K": self.k,
            "N": self.n,
            "SWIGLU": int(self.swiglu),
            "CHOSEN": self.chosen,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes,
            "MAXIMUM_CHOICES": MAXIMUM_GATHERED if self.experts else MAXIMUM_CHOICES,
            "EXPERTS": self.experts,
            "AHEAD": self.ahead,
        }
        sizes = f"K={self.k} N={self.n} chosen={self.chosen} stages={self.stages}"
        for name in ("experts", "ahead"):
            sizes += f" {name}={getattr(self, name)}" if getattr(self, name) else ""
        return runtime.KernelSpec(
            "experts_fp8_few",
            files=("mma.cuh", "experts_fp8_few.cu"),
            defines=tuple(defines.items()),
            shared_bytes=self.shared_bytes,
            variant=sizes + " swiglu" * self.swiglu,
        )

    @property
    def is_possible(self) -> bool:
        fits = self.shared_bytes <= runtime.MAXIMUM_SHARED_BYTES
        return fits and self.groups <= _MAXIMUM_GROUPS


FewExpertsTiles = tuple[FewExpertsTile, FewExpertsTile]  # of both products


@functools.lru_cache(maxsize=1024)
def choose_tiles(
    num_tokens: int, num_experts: int, hidden: int, inner: int, chosen: int
) -> FewExpertsTiles | None:
    """As they were fastest (see docs/LOG.md).

    None: dispatch and grouped products are faster, or the kernel has no room.
    """
    num_choices = num_tokens * chosen
    if not (0 < num_choices <= MAXIMUM_GATHERED and num_experts <= MAXIMUM_EXPERTS):
        return None
    experts = 0
    if num_tokens > MAXIMUM_TOKENS or num_choices > MAXIMUM_CHOICES:
        if num_choices > _MOST_GATHERED_ROWS * num_experts:
            return None
        experts = -(-num_experts // 32) * 32
    ahead = 0
    if num_tokens >= MAXIMUM_TOKENS:
        # From two choices an expert on, nearly all of what is fetched is needed.
        ahead = 2 if num_choices < 2 * num_experts else 4
    stages = 4 if num_tokens == 1 else 3
    first = FewExpertsTile(hidden, 2 * inner, chosen, True, stages, experts, ahead)
    second = FewExpertsTile(inner, hidden, chosen, False, stages, experts)
    return (first, second) if first.is_possible and second.is_possible else None


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "chosen", "weight", "weight_scale", "bias")),
        *((name, ctypes.c_void_p) for name in ("out", "rows")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_experts")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("exponent_scale", "limit")),
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
    tiles: FewExpertsTiles,
    alpha: float,
    limit: float,
    *tensors: Tensor,
) -> Callable[[int], None]:
    *operands, y, out, rows = tensors
    _check(*operands)
    x, chosen, *weights = operands
    device = x.device.index
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    launches = [
        runtime.Launch(
            runtime.load(tile.spec, device),
            grid=num_blocks,
            threads=tile.threads,
            arguments=(
                _Arguments(
                    *(tensor.data_ptr() for tensor in (source, chosen, *weight, target, rows)),
                    *(len(x), len(weight[0]), source.stride(0), -alpha / math.log(2), limit),
                ),
            ),
        )
        for tile, source, weight, target in zip(
            tiles,
            (x, y),
            (weights[:3], weights[3:]),
            (y, out),
            strict=True,
        )
    ]

    def both(stream: int) -> None:
        for launch in launches:
            launch(stream)

    return both
