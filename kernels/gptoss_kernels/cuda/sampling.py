"""What sample.cu and logprobs.cu share: how a cluster of blocks holds a row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime

CLUSTER = 8  # blocks of a row
THREADS = 512
_WIDTH = 8  # logits of a vector
_CELL = 32  # vectors


def block_vectors(vocab_size: int) -> int:
    """Of 8 logits, in each block but the last ones of a row."""
    return -(-vocab_size // (CLUSTER * _WIDTH))


def cluster_spec(
    name: str, vocab_size: int, dtype: torch.dtype, **defines: int
) -> runtime.KernelSpec:
    """With room for a block's logits, and 8 bytes for each 256 of them."""
    vectors = block_vectors(vocab_size)
    shared_bytes = vectors * _WIDTH * dtype.itemsize + -(-vectors // _CELL) * 8
    return runtime.KernelSpec(
        name,
        files=("sampling.cuh", f"{name}.cu"),
        defines=(("THREADS", THREADS), ("LOGIT_BYTES", dtype.itemsize), *defines.items()),
        shared_bytes=shared_bytes,
        variant=f"{vocab_size} {str(dtype).removeprefix('torch.')}",
    )


def row_bytes(logits: Tensor) -> int:
    return logits.stride(0) * logits.element_size()
