"""q and k rotated by their positions; k and v stored at their slots of the paged caches

One pass over qkv, computed in fp32 and rounded to bf16; from there k and v, over their scales, to
e4m3. Memory-bound: of a token with N query and KV key-value heads of 64, 128 (N + 2 KV) bytes are
read and 128 N written, and 256 KV or, in e4m3, 128 KV. One program a token.
"""

from __future__ import annotations

# Kernels are typed by what they are compiled for, not by their annotations.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
import triton
import triton.language as tl
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.triton_lang import device

# So that a lane has accesses of 16 bytes to q, and of 8 or more to the few heads of k and v.
_HEADS_OF_A_WARP = 32
_MAXIMUM_WARPS = 8


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
) -> Tensor:
    """The rotated queries in bf16 [T, N, 64], written to `out` if it is given.

    `qkv` bf16 [T, (N + 2 KV) * 64], in the order q, k, v; `positions` int64 [T]; `rope_table` fp32
    [positions, 64], cosines and then sines; the caches [P, KV, page_size, 64], both bf16 or both
    e4m3; `slot_mapping` int64 [T], page * page_size + offset, no slot twice; `key_scale` and
    `value_scale` fp32 [KV], which e4m3 caches are divided by, 1 if None. All contiguous. A token
    whose slot is negative, or beyond the caches, is not stored; one whose position the table does
    not have becomes NaN but for v. e4m3 saturates at 448, and NaN stays NaN. Raises ValueError on
    anything else but values, which stay on the device.
    """
    given = (qkv, positions, rope_table, key_cache, value_cache, slot_mapping)
    contracts.check_rope_inputs(*given, key_scale, value_scale, out)
    num_pages, num_kv_heads, page_size, _ = key_cache.shape
    num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // HEAD_DIM - 2 * num_kv_heads
    if out is None:
        out = qkv.new_empty(num_tokens, num_heads, HEAD_DIM)
    device.check_device(qkv, "qkv")
    head_lanes = device.lanes_for(num_heads)
    if num_tokens:
        with device.current(qkv):
            _rotate_and_store[(num_tokens,)](
                *(*given, key_scale, value_scale, out),
                *(rope_table.shape[0], num_pages * page_size),
                HEADS=num_heads,
                KV_HEADS=num_kv_heads,
                HEAD_LANES=head_lanes,
                KV_LANES=device.lanes_for(num_kv_heads),
                PAGE_SIZE=page_size,
                DIM=HEAD_DIM,
                IS_E4M3=key_cache.dtype == E4M3,
                num_warps=min(max(1, head_lanes // _HEADS_OF_A_WARP), _MAXIMUM_WARPS),
            )
    return out


@triton.jit(
    do_not_specialize=["num_positions", "num_slots"],
    do_not_specialize_on_alignment=["positions", "slots", "key_scale", "value_scale"],
)
def _rotate_and_store(
    qkv,
    positions,
    rope_table,
    key_cache,
    value_cache,
    slots,
    key_scale,
    value_scale,
    query,
    num_positions,
    num_slots,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    KV_LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    IS_E4M3: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    column = tl.arange(0, HALF)[None, :]
    heads = tl.arange(0, HEAD_LANES)[:, None]
    kv_heads = tl.arange(0, KV_LANES)[:, None]
    is_kv_head = kv_heads < KV_HEADS
    # q, k and v of the token.
    first_q = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + column
    first_k = first_q + HEADS * DIM
    first_v = first_k + KV_HEADS * DIM
    q, q_partner = _load_halves(first_q + heads * DIM, heads < HEADS, HALF)
    k, k_partner = _load_halves(first_k + kv_heads * DIM, is_kv_head, HALF)
    v, v_partner = _load_halves(first_v + kv_heads * DIM, is_kv_head, HALF)

    angles = rope_table + position * DIM + column
    is_there = (position >= 0) & (position < num_positions)
    cos = tl.load(angles, mask=is_there, other=float("nan"))
    sin = tl.load(angles + HALF, mask=is_there, other=float("nan"))
    q, q_partner = _rotated(q, q_partner, cos, sin)
    k, k_partner = _rotated(k, k_partner, cos, sin)
    out = query + (token * HEADS + heads) * DIM + column
    tl.store(out, q, mask=heads < HEADS)
    tl.store(out + HALF, q_partner, mask=heads < HEADS)

    is_stored = is_kv_head & (slot >= 0) & (slot < num_slots)
    row = (slot // PAGE_SIZE * KV_HEADS + kv_heads) * PAGE_SIZE + slot % PAGE_SIZE
    place = row * DIM + column
    if IS_E4M3:
        k, k_partner = _quantised(k, k_partner, key_scale, kv_heads, is_kv_head)
        v, v_partner = _quantised(v, v_partner, value_scale, kv_heads, is_kv_head)
    tl.store(key_cache + place, k, mask=is_stored)
    tl.store(key_cache + place + HALF, k_partner, mask=is_stored)
    tl.store(value_cache + place, v, mask=is_stored)
    tl.store(value_cache + place + HALF, v_partner, mask=is_stored)


@triton.jit
def _load_halves(pointers, is_head, HALF: tl.constexpr):
    return tl.load(pointers, mask=is_head), tl.load(pointers + HALF, mask=is_head)


@triton.jit
def _rotated(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return (a * cos - b * sin).to(tl.bfloat16), (b * cos + a * sin).to(tl.bfloat16)


@triton.jit
def _quantised(a, b, scale, heads, is_head):
    a, b = a.to(tl.float32), b.to(tl.float32)
    if scale is not None:
        divisor = tl.load(scale + heads, mask=is_head, other=1.0)
        a, b = tl.div_rn(a, divisor), tl.div_rn(b, divisor)
    return _saturated(a), _saturated(b)


@triton.jit
def _saturated(x):
    E4M3_MAX: tl.constexpr = 448.0
    NAN: tl.constexpr = tl.PropagateNan.ALL
    return tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=NAN).to(tl.float8e4nv)
