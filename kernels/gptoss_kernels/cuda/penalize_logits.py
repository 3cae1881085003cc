"""out[g] <- logits[rows[g]] as fp32, biased and penalised: reference.penalize_logits, bit for bit

Logits stay as they are, of which log-probabilities are told; in bf16 a penalty would be rounded
away. A block copies its part of a row, then looks through all of the row's entries for tokens of
that part. Memory-bound: of gpt-oss's vocabulary a row reads 402 KB in bf16 and writes 804, 0.27 us
at 4.5 TB/s, beside 12 bytes an entry. The kernel is penalize_logits.cu.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import Penalties
from gptoss_kernels.cuda import runtime

_THREADS = 256
_WIDTH = 8  # logits of a vector
_VECTORS = 4  # of a thread


def penalize_logits(logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor) -> None:
    """Writes `out` fp32 [G, V].

    `logits` [S, V] bf16 or fp32, V a multiple of 8 up to 261,632, rows at multiples of 16 bytes, as
    those of `out`; `input_ids` int64 [T], `penalties` as contracts.Penalties has it. Their values
    stay on the device: no token comes twice in a row's entries; tokens that the vocabulary does not
    have are ignored, and a row that the logits do not have is not written. Raises ValueError on
    anything else, and runtime.CudaError where there is no Hopper GPU.
    """
    if len(logits) == 0 or penalties.rows.shape == (0,):
        _check(logits, input_ids, penalties, out)
    else:
        runtime.launch(
            ("penalize_logits",),
            (logits, input_ids, *penalties, out),
            lambda: _prepare(logits, input_ids, penalties, out),
        )


def spec(dtype: torch.dtype = torch.bfloat16) -> runtime.KernelSpec:
    return runtime.KernelSpec(
        "penalize_logits",
        files=("penalize_logits.cu",),
        defines=(("THREADS", _THREADS), ("VECTORS", _VECTORS), ("LOGIT_BYTES", dtype.itemsize)),
        variant=str(dtype).removeprefix("torch."),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "input_ids", *Penalties._fields, "out")),
        *((name, ctypes.c_longlong) for name in ("row_bytes", "out_pitch")),
        *(
            (name, ctypes.c_int)
            for name in ("num_rows", "num_inputs", "vocab_size", "blocks_per_row")
        ),
    )


def _check(logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor) -> None:
    contracts.check_logits(logits)
    contracts.check_penalties(logits, input_ids, penalties, out)
    contracts.check_gpu(logits, "logits")


def _prepare(
    logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor
) -> runtime.Launch:
    _check(logits, input_ids, penalties, out)
    num_rows, vocab_size = logits.shape
    blocks_per_row = -(-vocab_size // (_THREADS * _WIDTH * _VECTORS))
    return runtime.Launch(
        runtime.load(spec(logits.dtype), logits.device.index),
        grid=len(penalties.rows) * blocks_per_row,
        threads=_THREADS,
        arguments=(
            _Arguments(
                *(tensor.data_ptr() for tensor in (logits, input_ids, *penalties, out)),
                *(logits.stride(0) * logits.element_size(), out.stride(0)),
                *(num_rows, len(input_ids), vocab_size, blocks_per_row),
            ),
        ),
    )
