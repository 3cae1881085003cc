"""The operators of the model by name. The engine asks `load` for a set and imports nothing else.

Every implementation has the names, signatures, shapes and dtypes of reference.py, which is the
executable specification. Words for shapes: T tokens, B sequences, S sampled rows, H hidden, N query
heads, KV key-value heads, D head_dim, E experts, K experts per token, I expert intermediate,
P pages, V vocabulary.
"""

from typing import Literal, Protocol

from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Dispatched
from gptoss_kernels.fp8 import BLOCK, SWIGLU_GROUP, Fp8Weight
from gptoss_kernels.mxfp4 import Mxfp4Weight

__all__ = ["Fp8Operators", "Fp8Weight", "Mxfp4Weight", "Operators", "load", "load_fp8"]


class Operators(Protocol):
    """What a forward pass and a sampling step are made of. reference.py has the formulas."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor: ...

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | None = None
    ) -> Tensor: ...

    def linear(
        self, x: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None
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

    def rope_and_cache_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        rope_table: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
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
    ) -> Tensor: ...

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor, num_chosen: int
    ) -> tuple[Tensor, Tensor]: ...

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
    ) -> Tensor: ...

    def select_rows(self, hidden: Tensor, rows: Tensor) -> Tensor: ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        uniforms: Tensor,
    ) -> Tensor: ...

    def greedy(self, logits: Tensor) -> Tensor: ...

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Fp8Operators(Protocol):
    """The FP8 products and what feeds them: one protocol, several implementations.

    Scales of activations are laid out as contracts.empty_scale does. Every implementation refuses
    a wrong dtype, shape, layout, alignment or device in words, before anything is launched.
    """

    def quantise(self, x: Tensor, group: int = BLOCK) -> tuple[Tensor, Tensor]: ...

    def rms_norm_fp8(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | None = None
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

    def combine(self, outputs: Tensor, rows: Tensor, chosen_weights: Tensor) -> Tensor: ...


def load_fp8(gemm: str) -> Fp8Operators:
    """The FP8 operators of one implementation; only "reference" runs without a Hopper GPU."""
    match gemm:
        case "reference":
            return reference
    raise ValueError(f"gemm must be reference, got {gemm!r}")


def load(implementation: Literal["reference"]) -> Operators:
    """The operators of one implementation; "reference" runs anywhere that torch runs."""
    match implementation:
        case "reference":
            return reference
    raise ValueError(f"unknown operator implementation {implementation!r}")
