"""A token of each row of logits, greedy or drawn, by reference.sample: the same in every bit

One launch for any mix of rows; of what is drawn each sum is one of integers, in any order. A
cluster of blocks holds a row in its shared memory, and so reads it once: of gpt-oss's vocabulary
402 KB in bf16, at 4.5 TB/s 0.09 us a row, or 11.4 for 128. Cuts by top_k or top_p each look through
it twice more, by a byte of the logits' bits at a time. The kernel is sample.cu.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import SamplingRows
from gptoss_kernels.cuda import runtime, sampling


def sample(
    logits: Tensor,
    rows: SamplingRows,
    seats: Tensor | None = None,
    last_token_ids: Tensor | None = None,
    *,
    out: Tensor | None = None,
    cluster: sampling.Cluster | None = None,
) -> Tensor:
    """The tokens int64 [S], written to `out` if it is given, and to last_token_ids[seats].

    `logits` [S, V] bf16 or fp32, V a multiple of 8 up to 261,632, rows at multiples of 16 bytes;
    `rows` as contracts.SamplingRows has it. Its values stay on the device: temperatures are 0 or
    more, uniforms in [0, 1), top_p and min_p in [0, 1]. A masked id that the vocabulary does not
    have is ignored. `seats` int64 [S] and `last_token_ids` int64 [seats], both or neither; what has
    a seat that is none is not kept. `cluster`: blocks of a row; choose_cluster's if it is not
    given. Raises ValueError on anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        out = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    if logits.shape[:1] == (0,):
        _check(logits, rows, seats, last_token_ids, out)
    else:
        kept = () if seats is None or last_token_ids is None else (seats, last_token_ids)
        runtime.launch(
            ("sample", cluster, seats is None, last_token_ids is None),
            (logits, *rows, out, *kept),
            lambda: _prepare(logits, rows, seats, last_token_ids, out, cluster),
        )
    return out


def spec(
    vocab_size: int, dtype: torch.dtype = torch.bfloat16, *, cluster: sampling.Cluster
) -> runtime.KernelSpec:
    return sampling.cluster_spec("sample", vocab_size, dtype, cluster)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("rows", sampling.Rows),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("temperature", "top_p", "min_p", "uniforms"),
                *("top_k", "masked_start", "masked_ids", "token_ids"),
                *("seats", "last_token_ids"),
            )
        ),
        ("num_seats", ctypes.c_longlong),
    )


def _check(
    logits: Tensor,
    rows: SamplingRows,
    seats: Tensor | None,
    last_token_ids: Tensor | None,
    out: Tensor,
) -> None:
    contracts.check_logits(logits)
    contracts.check_sampling_rows(rows, logits)
    if (seats is None) != (last_token_ids is None):
        raise ValueError("seats and last_token_ids must be given together")
    given = {"out": out, "seats": seats, "last_token_ids": last_token_ids}
    for name, tensor in given.items():
        if tensor is not None:
            contracts.check_type(name, tensor, torch.int64, logits, "logits")
            shape = (tensor.numel(),) if name == "last_token_ids" else (len(logits),)
            contracts.check_shape(name, tensor, shape)
            contracts.check_contiguous(name, tensor)
    contracts.check_gpu(logits, "logits")


def _prepare(
    logits: Tensor,
    rows: SamplingRows,
    seats: Tensor | None,
    last_token_ids: Tensor | None,
    out: Tensor,
    cluster: sampling.Cluster | None,
) -> runtime.Launch:
    _check(logits, rows, seats, last_token_ids, out)
    num_rows, vocab_size = logits.shape
    cluster = cluster or sampling.choose_cluster(num_rows)
    tensors = (
        *(rows.temperature, rows.top_p, rows.min_p, rows.uniforms),
        *(rows.top_k, rows.masked_start, rows.masked_ids, out),
    )
    return runtime.Launch(
        runtime.load(spec(vocab_size, logits.dtype, cluster=cluster), logits.device.index),
        grid=num_rows * cluster,
        threads=sampling.THREADS,
        arguments=(
            _Arguments(
                sampling.Rows.of(logits, cluster),
                *(tensor.data_ptr() for tensor in tensors),
                *(
                    None if tensor is None else tensor.data_ptr()
                    for tensor in (seats, last_token_ids)
                ),
                0 if last_token_ids is None else last_token_ids.numel(),
            ),
        ),
    )
