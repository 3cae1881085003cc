"""The operators of the model by name. The engine asks `load` for a set and imports nothing else.

Every implementation has the names, signatures, shapes and dtypes of reference.py, which is the
executable specification. Words for shapes: T tokens, B sequences, S sampled rows, H hidden, N query
heads, KV key-value heads, D head_dim, E experts, K experts per token, I expert intermediate,
P pages, V vocabulary.
"""

import importlib
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gptoss_kernels import contracts, reference
from gptoss_kernels.contracts import (
    MAXIMUM_DECODE_QUERIES,
    MAXIMUM_SEQUENCES,
    NO_DECODES,
    Decodes,
    Dispatched,
    LibraryError,
    Mixture,
    Penalties,
    Routed,
    SamplingRows,
)
from gptoss_kernels.fp8 import BLOCK, SWIGLU_GROUP, Fp8Weight
from gptoss_kernels.mxfp4 import Mxfp4Weight
from gptoss_kernels.steps import NO_SEAT, PENDING, StepItem, StepTensors

Gemm = Literal["cuda", "triton", "deepgemm", "reference"]
GEMMS = get_args(Gemm)
Attention = Literal["cuda", "triton", "flashinfer", "reference"]
ATTENTIONS = get_args(Attention)
# Of caches, as kernels take them. The reference takes any.
PAGE_SIZES: dict[Attention, tuple[int, ...]] = {
    "cuda": contracts.PAGE_SIZES,
    "triton": contracts.PAGE_SIZES,
    "flashinfer": contracts.FLASHINFER_PAGE_SIZES,
}
HEAD_DIM = contracts.HEAD_DIM  # which all kernels of attention want; the reference takes any
GROUPS_OF_HEADS = contracts.GROUPS_OF_HEADS  # likewise
REDUCTION_LIMIT = 10.0  # seconds
_MODULES = {
    "cuda": "gptoss_kernels.cuda.operators",
    "triton": "gptoss_kernels.triton_lang.operators",
    "deepgemm": "gptoss_kernels.deepgemm",
    "flashinfer": "gptoss_kernels.flashinfer",
}

__all__ = [
    "ATTENTIONS",
    "GEMMS",
    "GROUPS_OF_HEADS",
    "HEAD_DIM",
    "MAXIMUM_DECODE_QUERIES",
    "MAXIMUM_SEQUENCES",
    "NO_SEAT",
    "PAGE_SIZES",
    "PENDING",
    "REDUCTION_LIMIT",
    "Attention",
    "AttentionOperators",
    "CommonOperators",
    "Decodes",
    "Fp8Operators",
    "Fp8Weight",
    "Gemm",
    "LibraryError",
    "Mixture",
    "Mxfp4Weight",
    "Operators",
    "Penalties",
    "Reduction",
    "Routed",
    "SamplingRows",
    "StepItem",
    "StepTensors",
    "load",
    "load_attention",
    "load_common",
    "load_fp8",
    "load_rank",
    "load_reduction",
]


class AttentionOperators(Protocol):
    """Attention over the paged cache, and what fills it: one protocol, several implementations.

    Each refuses a wrong dtype, shape, layout, alignment or device in words, before anything is
    launched, and tells the host nothing: lengths and pages stay on the device, so that a CUDA graph
    with these operators serves any lengths that its page tables have room for. FlashInfer alone
    plans its prefills on the host.

    All run on the current stream, one after the other, but a launch may begin while the one just
    before it still runs (programmatic dependent launch), and behind rope_and_cache_write while the
    two before it do. Those must not write what is read at once, though one before them may: by
    attention `query_start`, `seq_lens`, `page_tables` and `sinks`, by rope_and_cache_write all but
    `qkv`.
    """

    def rope_and_cache_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope_table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor: ...

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        sinks: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        page_tables: Tensor,
        *,
        scale: float,
        window: int | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        decodes: Decodes = NO_DECODES,
    ) -> Tensor: ...


class CommonOperators(Protocol):
    """What neither multiplies FP8 nor attends: one protocol, the reference's and ours for Hopper.

    All run on the current stream and tell the host nothing. What norm_route, rms_norm and linear
    are given as weights and bias, the launch just before must not write. `sample` gives the same
    tokens, whoever implements it.
    """

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture | None = None
    ) -> Tensor: ...

    def norm_route(
        self,
        hidden: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        bias: Tensor,
        num_chosen: int,
        *,
        experts: range | None = None,
    ) -> Routed: ...

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def select_rows(self, hidden: Tensor, rows: Tensor) -> Tensor: ...

    def mask_logits(self, logits: Tensor, mask: Tensor, rows: Tensor) -> None: ...

    def penalize_logits(
        self, logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor
    ) -> None: ...

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        seats: Tensor | None = None,
        last_token_ids: Tensor | None = None,
    ) -> Tensor: ...

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def transfer(self, source: Tensor, target: Tensor) -> None: ...

    def unpack_step(
        self,
        items: Tensor,
        words: Tensor,
        last_token_ids: Tensor,
        full_by_seat: Tensor,
        window_by_seat: Tensor,
        out: StepTensors,
        *,
        page_size: int,
        window: int,
    ) -> None: ...


class Operators(CommonOperators, AttentionOperators, Protocol):
    """What a forward pass and a sampling step are made of. reference.py has the formulas."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor | Fp8Weight,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def norm_linear(
        self,
        hidden: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor | Fp8Weight,
        bias: Tensor | None = None,
        *,
        update: Mixture | None = None,
    ) -> Tensor: ...

    def rope_table(
        self,
        num_positions: int,
        head_dim: int,
        *,
        theta: float,
        factor: float,
        beta_fast: float,
        beta_slow: float,
        original_context: int,
    ) -> Tensor: ...

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        chosen_weights: Tensor,
        w13: Tensor | Fp8Weight | Mxfp4Weight,
        w13_bias: Tensor,
        w2: Tensor | Fp8Weight | Mxfp4Weight,
        w2_bias: Tensor,
        *,
        swiglu_alpha: float,
        swiglu_limit: float,
    ) -> Mixture: ...

    def combine(
        self,
        outputs: Tensor,
        rows: Tensor,
        chosen_weights: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...


class Fp8Operators(Protocol):
    """The FP8 products and what feeds them: one protocol, several implementations.

    Scales of activations are laid out as contracts.empty_scale does. Every implementation refuses
    a wrong dtype, shape, layout, alignment or device in words, before anything is launched.

    All run on the current stream, one after the other, but a launch may begin while the one just
    before it still runs (programmatic dependent launch), and behind quantise or a norm while the
    two before it do; and some tensors are read at once. So those must write none of these, though
    one before them may:

    - weights, their scales and biases, of the products and of the norm;
    - `hidden` of rms_norm and rms_norm_fp8 with a mixture, and that but for its outputs;
    - `expert_start` of grouped_linear_fp8. Called right behind grouped_swiglu_fp8, as experts_fp8
      does, it finds what dispatch_fp8 gave.

    Nothing is differentiated: gradients neither flow nor are refused.
    """

    def quantise(self, x: Tensor, group: int = BLOCK) -> tuple[Tensor, Tensor]: ...

    def rms_norm_fp8(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def linear_fp8(
        self,
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def quantised_linear_fp8(
        self,
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    def dispatch_fp8(self, x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched: ...

    def grouped_swiglu_fp8(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...

    def grouped_linear_fp8(
        self,
        x: Tensor,
        x_scale: Tensor,
        expert_start: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor,
    ) -> Tensor: ...

    def experts_fp8(
        self,
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
    ) -> tuple[Tensor, Tensor]: ...

    def combine(
        self,
        outputs: Tensor,
        rows: Tensor,
        chosen_weights: Tensor,
        *,
        residual: Tensor | None = None,
    ) -> Tensor: ...


class Reduction(Protocol):
    """Sums over the ranks that share a model, each with its part of a product or of the experts.

    Each method is hidden <- hidden + sum over ranks of update, in fp32 in the order of ranks,
    rounded once: the same bits on every rank, run after run. What a rank's experts gave is added up
    and rounded before. Then the norm of that, as CommonOperators.rms_norm and
    Fp8Operators.rms_norm_fp8 give it. All ranks call the same methods in the same order with the
    same sizes; `hidden` [T, H] is the same on all of them.

    On a GPU each is one launch for up to max_tokens tokens, on the current stream, and can be
    captured into a CUDA graph. The norm's weight, and what a mixture has beside its outputs, may be
    read early, see Fp8Operators. A kernel waits for another rank no longer than its limit: then it
    ends this rank's CUDA context, so that the next call of CUDA raises, and `failure` says what it
    waited for; None as long as it has not.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, hidden: Tensor, update: Tensor | Mixture) -> Tensor: ...

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> Tensor: ...

    def rms_norm_fp8(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> tuple[Tensor, Tensor]: ...

    def failure(self) -> str | None: ...


def load_reduction(
    name: Literal["cuda", "reference"],
    group: ProcessGroup,
    device: torch.device,
    *,
    columns: int,
    max_tokens: int,
    limit: float = REDUCTION_LIMIT,
) -> Reduction:
    """The reduction of this rank of the group; all its ranks call this together.

    "cuda": in bf16 over peer memory, with room for `max_tokens` rows of `columns` (more go in
    pieces) and waits of up to `limit` seconds; ranks whose GPUs cannot see each other are a
    LibraryError. "reference": any device and dtype, by what the group gathers with.
    """
    if name == "reference":
        return reference.Reduction(group)
    from gptoss_kernels.cuda.reduction import Reduction as PeerReduction

    return PeerReduction.of_group(
        group, device, columns=columns, max_tokens=max_tokens, limit=limit
    )


def load_fp8(gemm: Gemm) -> Fp8Operators:
    """The FP8 operators of one implementation; only "reference" runs without a GPU.

    "cuda" needs Hopper and NVRTC, "triton" a GPU that multiplies e4m3, "deepgemm" Hopper and that
    library. Nothing is imported, and nothing compiled, for the others.
    """
    if gemm == "reference":
        return reference
    if gemm not in GEMMS:
        raise ValueError(f"gemm must be one of {', '.join(GEMMS)}, got {gemm!r}")
    return importlib.import_module(_MODULES[gemm])  # pyright: ignore[reportReturnType]


def load_attention(attention: Attention) -> AttentionOperators:
    """The attention operators of one implementation; only "reference" runs without a GPU.

    "cuda" needs Hopper and NVRTC, "triton" a GPU, "flashinfer" that library. Nothing is imported,
    and nothing compiled, for the others.
    """
    if attention == "reference":
        return reference
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}, got {attention!r}")
    return importlib.import_module(_MODULES[attention])  # pyright: ignore[reportReturnType]


def load_common(name: Literal["cuda", "reference"]) -> CommonOperators:
    """The operators beside those; only "reference" runs without a Hopper GPU."""
    if name == "reference":
        return reference
    return importlib.import_module(_MODULES[name])  # pyright: ignore[reportReturnType]


def load(gemm: Gemm = "reference", attention: Attention = "reference") -> Operators:
    """The operators of the model: products of FP8 weights and what feeds them by `gemm`.

    All others are ours for Hopper where either is, and else the reference's. LibraryError, in
    words, if a library that they need is not there.
    """
    if gemm == attention == "reference":
        return reference
    from gptoss_kernels.composed import ComposedOperators

    implementations = load_fp8(gemm), load_attention(attention)
    for implementation in implementations:
        library = getattr(implementation, "library", None)
        if library is not None:
            library()
    common = load_common("cuda" if "cuda" in (gemm, attention) else "reference")
    return ComposedOperators(*implementations, common)


def load_rank(
    operators: Operators, reduction: Reduction, experts: range | None, gemm: Gemm
) -> Operators:
    """Those of one of several ranks, over its own: what is added to the residual stream is summed.

    experts: the rank's, where each has whole ones. gemm: whose products take what the reduction's
    norm quantises, as `operators` multiply; reference: theirs are normed by themselves.
    """
    from gptoss_kernels.ranks import RankOperators

    fp8 = None if gemm == "reference" else load_fp8(gemm)
    return RankOperators(operators, reduction, experts, fp8)
