"""Who attends: our operators and the libraries', each as a call of one set of inputs.

FlashAttention 3 takes sinks in bf16, FP8 queries that were quantised before, which is not timed,
and pages of [page_size, KV, D], which also is how its own kernels like keys best that have no
pages. cuDNN, through PyTorch, has neither sinks nor pages, nor windows: less work, and no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from attended import HEADS, KV_HEADS, PAGE_SIZE, SCALE, Inputs
from running import OURS, named
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gptoss_kernels import flashinfer
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.ops import Attention, load_attention

Attend = Callable[[int], Tensor]  # the set with this index -> [T, N, D] or [T, N * D]


@dataclass(frozen=True)
class Attender:
    """`make` refuses what it cannot do by any exception."""

    title: str
    make: Callable[[Inputs], Attend]
    distribution: str | None = None
    has_sinks: bool = True

    @property
    def name(self) -> str:
        return named(self.title, self.distribution) if self.distribution else self.title


def operators(attention: Attention, inputs: Inputs) -> Attend:
    """Those of ops.load_attention."""
    operator = load_attention(attention).attention
    is_scaled = attention != "flashinfer"  # there, scales cost launches

    def call(index: int) -> Tensor:
        return operator(
            inputs.queries[index],
            inputs.keys[index],
            inputs.values[index],
            inputs.sinks,
            inputs.query_start,
            inputs.seq_lens,
            inputs.page_tables,
            scale=SCALE,
            window=inputs.window,
            key_scale=inputs.scale if is_scaled else None,
            value_scale=inputs.scale if is_scaled else None,
            decodes=inputs.shape.decodes,
        )

    return call


def flashinfer_prefill(template: flashinfer.Template, inputs: Inputs) -> Attend:
    """One of its two templates with sinks, planned once."""
    batch = flashinfer.Batch(inputs.query_start, inputs.seq_lens, inputs.page_tables)
    form = flashinfer.Form(
        inputs.queries.device, HEADS, KV_HEADS, PAGE_SIZE, inputs.keys.dtype, inputs.window
    )
    prefill = flashinfer.Prefill(form, template)

    def call(index: int) -> Tensor:
        query, cache = inputs.queries[index], (inputs.keys[index], inputs.values[index])
        out = torch.empty_like(query)
        prefill.run(query, cache, inputs.sinks, batch, out, SCALE)
        return out

    return call


def flashinfer_decode(inputs: Inputs) -> Attend:
    """XQA, to which our operator of that name gives decodes."""
    if not inputs.shape.decodes.num_sequences:
        raise ValueError("of decodes alone")
    return operators("flashinfer", inputs)


def fa3_paged(inputs: Inputs) -> Attend:
    library, shape = import_module("flash_attn_interface"), inputs.shape
    keys, values = (caches.transpose(2, 3).contiguous() for caches in (inputs.keys, inputs.values))
    queries = _by_sequence(inputs)
    # Its blocks of keys may begin before the window, in pages that are not there.
    options = _fa3_options(inputs) | {
        "page_table": inputs.page_tables.clamp(min=0),
        "cache_seqlens": inputs.seq_lens,
        "num_splits": 1 if shape.queries > 8 else 0,  # 0: as the library chooses
    }

    def call(index: int) -> Tensor:
        return library.flash_attn_with_kvcache(
            queries[index], keys[index], values[index], **options
        )

    return call


def fa3_dense(inputs: Inputs) -> Attend:
    library = import_module("flash_attn_interface")
    keys, values = _dense(inputs)
    queries, options = _by_sequence(inputs), _fa3_options(inputs)

    def call(index: int) -> Tensor:
        return library.flash_attn_func(queries[index], keys[index], values[index], **options)

    return call


def _fa3_options(inputs: Inputs) -> dict[str, object]:
    options: dict[str, object] = {
        "softmax_scale": SCALE,
        "causal": True,
        "window_size": (inputs.window - 1, 0) if inputs.window else (-1, -1),
        "sinks": inputs.sinks.bfloat16(),
    }
    if inputs.keys.dtype == E4M3:
        descale = torch.ones(inputs.shape.batch, KV_HEADS, device=inputs.device)
        options |= {f"{name}_descale": descale for name in "qkv"}
    return options


def cudnn_dense(inputs: Inputs) -> Attend:
    shape = inputs.shape
    if shape.window or shape.kv != "bf16" or shape.queries not in (1, shape.context):
        raise ValueError("no windows, no FP8, and either all queries or one")
    keys, values = ([one.transpose(1, 2).contiguous() for one in many] for many in _dense(inputs))
    queries = [one.transpose(1, 2).contiguous() for one in _by_sequence(inputs)]

    def call(index: int) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(
                queries[index],
                keys[index],
                values[index],
                is_causal=shape.queries > 1,
                scale=SCALE,
                enable_gqa=True,
            )
        return out.transpose(1, 2)

    return call


def _by_sequence(inputs: Inputs) -> list[Tensor]:
    """Queries [B, Q, N, D] in the dtype of the caches."""
    size = (inputs.shape.batch, inputs.shape.queries, HEADS, -1)
    return [query.view(size).to(inputs.keys.dtype) for query in inputs.queries]


def _dense(inputs: Inputs) -> list[list[Tensor]]:
    """Keys and values of each set, [B, C, KV, D]."""
    return [
        [inputs.dense(caches, index) for index in range(len(caches))]
        for caches in (inputs.keys, inputs.values)
    ]


# By their names on the command line.
ATTENDERS = {
    "cuda": Attender(OURS, partial(operators, "cuda")),
    "triton": Attender("Triton-lang", partial(operators, "triton")),
    "fa3": Attender("FA3", fa3_paged, "tokenspeed-fa3"),
    "fa3-dense": Attender("FA3 (no pages)", fa3_dense, "tokenspeed-fa3"),
    "flashinfer-fa2": Attender(
        "FlashInfer FA2", partial(flashinfer_prefill, "fa2"), "flashinfer-python"
    ),
    "flashinfer-fa3": Attender(
        "FlashInfer FA3", partial(flashinfer_prefill, "fa3"), "flashinfer-python"
    ),
    "xqa": Attender("FlashInfer XQA", flashinfer_decode, "flashinfer-python"),
    "cudnn": Attender("cuDNN (no sinks or pages)", cudnn_dense, "torch", has_sinks=False),
}
