"""q and k rotated by their positions; k and v stored at their slots of the paged caches

One pass over qkv, computed in fp32 and rounded to bf16; from there k and v, over their scales, to
e4m3. Memory-bound: of a token with N query and KV key-value heads of 64, 128 (N + 2 KV) bytes are
read and 128 N written, and 256 KV or, in e4m3, 128 KV; its angles are 256 more. Of gpt-oss that is
20,736 or 19,712 bytes: at 4.24 TB/s, 8192 tokens take 40.1 or 38.1 us. The kernel is rope.cu.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.cuda import runtime
from gptoss_kernels.fp8 import E4M3

_LANES = 4  # of a head
_THREADS = 128  # of a block


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
    `value_scale` fp32 [KV], normal numbers that e4m3 caches are divided by, 1 if None. All
    contiguous. A token whose slot is negative, or beyond the caches, is not stored; one whose
    position the table does not have becomes NaN but for v. e4m3 saturates at 448, and NaN stays
    NaN. What is read beside `qkv` must not be written by the kernel launched just before on the
    same stream: it is read while that one may still run. Raises ValueError on anything else but
    values, which stay on the device, and runtime.CudaError where there is no Hopper GPU.
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
        ("rope_and_cache_write", key_scale is None, value_scale is None),
        (*given, *scales, out),
        lambda: _prepare(*given, key_scale, value_scale, out),
    )
    return out


def spec(*, is_fp8: bool) -> runtime.KernelSpec:
    """For any model and number of tokens."""
    return runtime.KernelSpec(
        "rope_and_cache_write",
        files=("rope.cu",),
        defines=(("THREADS", _THREADS), ("FP8", int(is_fp8))),
        variant="e4m3" if is_fp8 else "bf16",
    )


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
) -> runtime.Launch:
    given = (qkv, positions, rope_table, key_cache, value_cache, slot_mapping)
    contracts.check_rope_inputs(*given, key_scale, value_scale, out)
    contracts.check_gpu(qkv, "qkv")
    num_tokens, num_heads, _ = out.shape
    num_pages, num_kv_heads, page_size, _ = key_cache.shape
    num_threads = num_tokens * (num_heads + 2 * num_kv_heads) * _LANES
    return runtime.Launch(
        runtime.load(spec(is_fp8=key_cache.dtype == E4M3), qkv.device.index),
        grid=-(-num_threads // _THREADS),
        threads=_THREADS,
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
