"""q and k rotated by their positions; k and v stored at their slots of the paged caches

One pass over qkv, computed in fp32 and rounded to bf16; from there k and v, over their scales, to
e4m3. Memory-bound: of a token with N query and KV key-value heads of 64, 128 (N + 2 KV) bytes are
read and 128 N written, and 256 KV or, in e4m3, 128 KV; its angles are 256 more. Of gpt-oss that is
20,736 or 19,712 bytes: at 4.24 TB/s, 8192 tokens take 40.1 or 38.1 us. The kernel is rope.cu.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import E4M3

_LANES = 4  # of a head
# Up to so many tokens each head has lanes of its own. Beyond, four lanes have several heads' loads
# under way at once, and load the angles for all of them.
_FEW_TOKENS = 512


@dataclass(frozen=True)
class RopeLayout:
    """Four lanes do `heads` heads of a token, one after the other; a block has `threads` threads.

    No result depends on it.
    """

    heads: int
    threads: int = 128


_FOR_FEW, _FOR_MANY = RopeLayout(heads=1), RopeLayout(heads=5)


def rope_and_cache_write(
    qkv: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    out: Tensor | None = None,
    layout: RopeLayout | None = None,
) -> Tensor:
    """The rotated queries in bf16 [T, N, 64], written to `out` if it is given.

    `qkv` bf16 [T, (N + 2 KV) * 64], in the order q, k, v; `positions` int64 [T]; `rope_table` fp32
    [positions, 64], cosines and then sines; the caches [P, KV, page_size, 64], both bf16 or both
    e4m3; `slot_mapping` int64 [T], page * page_size + offset, no slot twice; `key_scale` and
    `value_scale` fp32 [KV], normal numbers that e4m3 caches are divided by, 1 if None. All
    contiguous. A token whose slot is negative, or beyond the caches, is not stored; one whose
    position the table does not have becomes NaN but for v. e4m3 saturates at 448, and NaN stays
    NaN. Raises ValueError on anything else but values, which stay on the device, and
    runtime.CudaError where there is no Hopper GPU.
    """
    given = (qkv, positions, rope_table, key_cache, value_cache, slot_mapping)
    if out is None:
        if qkv.dim() != 2 or key_cache.dim() != 4:  # all else is checked later
            contracts.check_rope_inputs(*given, key_scale, value_scale, None)
        num_heads = qkv.shape[1] // HEAD_DIM - 2 * key_cache.shape[1]
        out = qkv.new_empty(qkv.shape[0], max(num_heads, 0), HEAD_DIM)
    if qkv.shape[0] == 0:
        contracts.check_rope_inputs(*given, key_scale, value_scale, out)
        contracts.check_gpu(qkv, "qkv")
        return out
    scales = [scale for scale in (key_scale, value_scale) if scale is not None]
    runtime.launch(
        ("rope_and_cache_write", layout, key_scale is None, value_scale is None),
        (*given, *scales, out),
        lambda: _prepare(*given, key_scale, value_scale, out, layout),
    )
    return out


def spec(layout: RopeLayout, *, is_fp8: bool) -> runtime.KernelSpec:
    return runtime.KernelSpec(
        "rope_and_cache_write",
        files=("rope.cu",),
        defines=(("HEADS", layout.heads), ("THREADS", layout.threads), ("FP8", int(is_fp8))),
        variant=f"{layout.heads} {'e4m3' if is_fp8 else 'bf16'}",
    )


def served_specs() -> Iterator[runtime.KernelSpec]:
    """For any model and number of tokens."""
    for layout, is_fp8 in product((_FOR_FEW, _FOR_MANY), (False, True)):
        yield spec(layout, is_fp8=is_fp8)


def choose_layout(num_tokens: int) -> RopeLayout:
    return _FOR_FEW if num_tokens <= _FEW_TOKENS else _FOR_MANY


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("qkv", "positions", "rope_table", "key_cache", "value_cache", "slots"),
                *("key_scale", "value_scale", "query"),
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in ("num_tokens", "num_heads", "num_kv_heads", "page_shift")
        ),
        *((name, ctypes.c_longlong) for name in ("num_positions", "num_slots")),
    )


def _prepare(
    qkv: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor,
    layout: RopeLayout | None,
) -> runtime.Launch:
    given = (qkv, positions, rope_table, key_cache, value_cache, slot_mapping)
    contracts.check_rope_inputs(*given, key_scale, value_scale, out)
    contracts.check_gpu(qkv, "qkv")
    num_tokens, num_heads, _ = out.shape
    num_pages, num_kv_heads, page_size, _ = key_cache.shape
    layout = layout or choose_layout(num_tokens)
    num_parts = -(-(num_heads + 2 * num_kv_heads) // layout.heads)
    return runtime.Launch(
        runtime.load(spec(layout, is_fp8=key_cache.dtype == E4M3), qkv.device.index),
        grid=-(-num_tokens * num_parts * _LANES // layout.threads),
        threads=layout.threads,
        arguments=(
            _Arguments(
                *(tensor.data_ptr() for tensor in given),
                *(
                    None if scale is None else scale.data_ptr()
                    for scale in (key_scale, value_scale)
                ),
                out.data_ptr(),
                *(num_tokens, num_heads, num_kv_heads, page_size.bit_length() - 1),
                *(rope_table.shape[0], num_pages * page_size),
            ),
        ),
    )
