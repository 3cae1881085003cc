"""Log-probabilities of each row's token, and of its likeliest tokens, by reference.logprobs

One launch, in which a row of which nothing is told costs nothing. As in sample.py a cluster of 8
blocks holds a row in its shared memory. Each block lists its own likeliest tokens, one after the
other, and one merges the lists. The kernel is logprobs.cu.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import MAXIMUM_TOP
from gptoss_kernels.cuda import runtime, sampling

_CLUSTER: sampling.Cluster = 8


def logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_top: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen tokens' fp32 [S], and the likeliest ones' ids int32 and values fp32 [S, 20].

    Written to `out` if it is given: of a row with num_top = n all of the first and n of the other
    two, and nothing of one with a negative n. `logits` [S, V] bf16 or fp32, V a multiple of 8 up to
    261,632, rows at multiples of 16 bytes; `token_ids` int64 [S]; `num_top` int32 [S], up to 20 and
    V. A token that is none has NaN. Values stay on the device. Raises ValueError on anything else,
    and runtime.CudaError where there is no Hopper GPU.
    """
    if out is None:
        shape = (*logits.shape[:1], MAXIMUM_TOP)
        out = (
            torch.empty(shape[:1], dtype=torch.float32, device=logits.device),
            torch.empty(shape, dtype=torch.int32, device=logits.device),
            torch.empty(shape, dtype=torch.float32, device=logits.device),
        )
    tensors = (logits, token_ids, num_top, *out)
    if logits.shape[:1] == (0,):
        _check(*tensors)
    else:
        runtime.launch(("logprobs",), tensors, lambda: _prepare(*tensors))
    return out


def spec(vocab_size: int, dtype: torch.dtype = torch.bfloat16) -> runtime.KernelSpec:
    return sampling.cluster_spec("logprobs", vocab_size, dtype, _CLUSTER, MOST=MAXIMUM_TOP)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("rows", sampling.Rows),
        *((name, ctypes.c_void_p) for name in ("token_ids", "num_top", "chosen", "top_ids", "top")),
    )


def _check(
    logits: Tensor, token_ids: Tensor, num_top: Tensor, chosen: Tensor, top_ids: Tensor, top: Tensor
) -> None:
    contracts.check_logits(logits)
    num_rows = len(logits)
    for name, tensor, dtype, shape in (
        ("token_ids", token_ids, torch.int64, (num_rows,)),
        ("num_top", num_top, torch.int32, (num_rows,)),
        ("chosen", chosen, torch.float32, (num_rows,)),
        ("top_ids", top_ids, torch.int32, (num_rows, MAXIMUM_TOP)),
        ("top", top, torch.float32, (num_rows, MAXIMUM_TOP)),
    ):
        contracts.check_type(name, tensor, dtype, logits, "logits")
        contracts.check_shape(name, tensor, shape)
        contracts.check_contiguous(name, tensor)
    contracts.check_gpu(logits, "logits")


def _prepare(logits: Tensor, *others: Tensor) -> runtime.Launch:
    _check(logits, *others)
    num_rows, vocab_size = logits.shape
    return runtime.Launch(
        runtime.load(spec(vocab_size, logits.dtype), logits.device.index),
        grid=num_rows * _CLUSTER,
        threads=sampling.THREADS,
        arguments=(
            _Arguments(
                sampling.Rows.of(logits, _CLUSTER), *(tensor.data_ptr() for tensor in others)
            ),
        ),
    )
