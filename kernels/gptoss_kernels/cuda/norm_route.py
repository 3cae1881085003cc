"""normed = rms_norm(hidden);  the K experts with the largest logits normed @ weight^T + bias

And a softmax over those K logits, which are rounded to bf16 before; all between is in fp32. For few
tokens (some 200 of 128 experts, 1000 of 32) it is one launch (norm_route.cu): clusters of blocks
that hold the router in registers, 16 experts each. Bound by latency: 2 EH bytes of router are read
while the kernel before still runs. For more it is rms_norm, the product by cuBLAS, and a choice
(choose_experts.cu): 8TH bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Routed
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm
from gptoss_kernels.cuda.rows import check_columns, check_num_chosen
from gptoss_kernels.cuda.runtime import launch

# Of tiles one after the other, for which one launch was faster than three: see docs/LOG.md.
_MOST_TURNS = 2
_EXPERTS_A_BLOCK = 16
_CHUNK = 32  # columns
# Of a block, whose registers hold all columns of 16 experts and of 8 tokens. More spill.
_MAXIMUM_WARPS, _MAXIMUM_CHUNKS = 15, 6
MAXIMUM_EXPERTS = 8 * _EXPERTS_A_BLOCK  # of one launch, as a cluster has up to 8 blocks
MAXIMUM_COLUMNS = _MAXIMUM_WARPS * _MAXIMUM_CHUNKS * _CHUNK  # likewise
_TILE = 8  # tokens of a cluster at a time
_CHOOSING_WARPS = 4


def norm_route(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor,
    num_chosen: int,
    *,
    experts: range | None = None,
    out: Routed | None = None,
    together: bool | None = None,
) -> Routed:
    """normed bf16 [T, H], chosen int64 [T, K], weights bf16 [T, K], written to `out` if given.

    `hidden` [T, H] bf16, H a multiple of 16; `norm_weight` [H] fp32; `weight` [E, H] and `bias` [E]
    bf16, E up to 512; K up to 8 and E. Of equal logits the lowest expert is chosen first; a token
    with a NaN among them chooses -1, with weights of NaN. `experts`: those that this rank has;
    numbers are counted from its first one, and another's is -1 with a weight of 0. Weights and bias
    must not be written by the kernel launched just before on the same stream: they are read while
    that one may still run. `together`: whether one launch does it, which takes E up to 128 and H up
    to 2880; as is faster if it is not given. Raises ValueError on anything else, and
    runtime.CudaError where there is no Hopper GPU.
    """
    if hidden.dim() != 2:  # all else is checked later, once for many calls
        contracts.check_row_matrix("hidden", hidden, hidden)
    inputs = (hidden, norm_weight, weight, bias)
    own = range(weight.shape[0]) if experts is None else experts
    if together is None:
        fits = weight.shape[0] <= MAXIMUM_EXPERTS and hidden.shape[1] <= MAXIMUM_COLUMNS
        together = fits and len(hidden) <= most_together(weight.shape[0])
    if out is None:
        out = _room(hidden, num_chosen)
    if together and len(hidden):
        launch(
            ("norm_route", eps, num_chosen, own),
            (*inputs, *out),
            lambda: _prepare(num_chosen, eps, inputs, out, own),
        )
        return out
    # Each time: what PyTorch multiplies is refused in its own words.
    _check(num_chosen, inputs, out, own)
    normed, chosen, chosen_weights = out
    if len(hidden):
        rms_norm(hidden, norm_weight, eps, out=normed)
        logits = torch.nn.functional.linear(normed, weight, bias)
        launch(
            ("choose_experts", own),
            (logits, chosen, chosen_weights),
            lambda: _prepare_choice(logits, chosen, chosen_weights, own),
        )
    return out


def _room(hidden: Tensor, num_chosen: int) -> Routed:
    num_tokens, device = len(hidden), hidden.device
    normed = torch.empty(hidden.shape, dtype=torch.bfloat16, device=device)
    chosen = torch.empty((num_tokens, num_chosen), dtype=torch.int64, device=device)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.bfloat16, device=device)
    return Routed(normed, chosen, weights)


def most_together(num_experts: int) -> int:
    """Tokens up to which one launch is chosen: as on an H200, which has 132 multiprocessors."""
    return RouteTile(0, num_experts, 0).clusters(132) * _TILE * _MOST_TURNS


@dataclass(frozen=True)
class RouteTile:
    """A cluster of `blocks` blocks for E experts, and H columns in parts of 32: `chunks` a warp."""

    columns: int
    num_experts: int
    num_chosen: int

    @property
    def blocks(self) -> int:
        """A power of two, as a tile's tokens are divided among them."""
        return 1 << (-(-self.num_experts // _EXPERTS_A_BLOCK) - 1).bit_length()

    def clusters(self, num_blocks: int) -> int:
        """As many as are at work at once: those of 8 do not fill every part of the GPU."""
        return max(1, num_blocks // (self.blocks * 11 // 8))

    @property
    def chunks(self) -> int:
        return -(-self.columns // (_CHUNK * _MAXIMUM_WARPS))

    @property
    def warps(self) -> int:
        """At least one for each token that a block chooses for, and for 32 of its 128 logits."""
        least = max(_TILE // self.blocks, _TILE * _EXPERTS_A_BLOCK // 32)
        return max(least, -(-self.columns // (_CHUNK * self.chunks)))

    @property
    def spec(self) -> runtime.KernelSpec:
        defines = {
            "COLUMNS": self.columns,
            "EXPERTS": self.num_experts,
            "CHOSEN": self.num_chosen,
            "BLOCKS": self.blocks,
            "WARPS": self.warps,
            "CHUNKS": self.chunks,
        }
        return runtime.KernelSpec(
            "norm_route",
            files=("mma.cuh", "choice.cuh", "norm_route.cu"),
            defines=tuple(defines.items()),
            variant=f"H={self.columns} E={self.num_experts} K={self.num_chosen}",
        )


def choice_spec(num_experts: int, num_chosen: int) -> runtime.KernelSpec:
    """Of the choice by logits in memory."""
    defines = {"EXPERTS": num_experts, "CHOSEN": num_chosen, "WARPS": _CHOOSING_WARPS}
    return runtime.KernelSpec(
        "choose_experts",
        files=("mma.cuh", "choice.cuh", "choose_experts.cu"),
        defines=tuple(defines.items()),
        variant=f"E={num_experts} K={num_chosen}",
    )


class _OwnExperts(ctypes.Structure):
    """As choice.cuh has it."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("first", "count"))

    @classmethod
    def of(cls, experts: range) -> _OwnExperts:
        return cls(experts.start, len(experts))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("hidden", "norm_weight", "weight", "bias"),
                *("normed", "chosen", "chosen_weights"),
            )
        ),
        ("num_tokens", ctypes.c_int),
        ("own", _OwnExperts),
        *((name, ctypes.c_longlong) for name in ("hidden_stride", "normed_stride")),
        ("eps", ctypes.c_float),
    )


class _ChoiceArguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "chosen", "chosen_weights")),
        ("num_tokens", ctypes.c_int),
        ("own", _OwnExperts),
    )


def _check(
    num_chosen: int, inputs: tuple[Tensor, Tensor, Tensor, Tensor], out: Routed, own: range
) -> None:
    hidden, norm_weight, weight, bias = inputs
    contracts.check_route_inputs(hidden, norm_weight, weight, bias, num_chosen)
    check_columns("hidden", hidden)
    check_num_chosen(num_chosen)
    contracts.check_routed(out, hidden, num_chosen)
    contracts.check_own_experts(own, len(weight))
    contracts.check_gpu(hidden, "hidden")


def _prepare(
    num_chosen: int,
    eps: float,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Routed,
    own: range,
) -> runtime.Launch:
    _check(num_chosen, inputs, out, own)
    hidden, _, weight, _ = inputs
    if len(weight) > MAXIMUM_EXPERTS or hidden.shape[1] > MAXIMUM_COLUMNS:
        raise ValueError(
            f"one launch routes to up to {MAXIMUM_EXPERTS} experts by up to {MAXIMUM_COLUMNS} "
            f"columns, got {list(weight.shape)}"
        )
    tile = RouteTile(hidden.shape[1], len(weight), num_chosen)
    device = hidden.device.index
    num_blocks = torch.cuda.get_device_properties(device).multi_processor_count
    return runtime.Launch(
        runtime.load(tile.spec, device),
        grid=min(-(-len(hidden) // _TILE), tile.clusters(num_blocks)) * tile.blocks,
        threads=32 * tile.warps,
        arguments=(
            _Arguments(
                *(tensor.data_ptr() for tensor in (*inputs, *out)),
                *(len(hidden), _OwnExperts.of(own), hidden.stride(0), out.normed.stride(0), eps),
            ),
        ),
    )


def _prepare_choice(
    logits: Tensor, chosen: Tensor, chosen_weights: Tensor, own: range
) -> runtime.Launch:
    num_tokens, num_experts = logits.shape
    return runtime.Launch(
        runtime.load(choice_spec(num_experts, chosen.shape[1]), logits.device.index),
        grid=-(-num_tokens // _CHOOSING_WARPS),
        threads=32 * _CHOOSING_WARPS,
        arguments=(
            _ChoiceArguments(
                *(logits.data_ptr(), chosen.data_ptr(), chosen_weights.data_ptr(), num_tokens),
                _OwnExperts.of(own),
            ),
        ),
    )
