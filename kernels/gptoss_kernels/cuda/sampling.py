"""What sample.cu and logprobs.cu share: how a cluster of blocks holds a row of logits."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from torch import Tensor

from gptoss_kernels.cuda import runtime

Cluster = Literal[8, 16]  # blocks of a row
THREADS = 512
_WIDTH = 8  # logits of a vector
_CELL = 32  # vectors
# So many rows leave most multiprocessors idle in clusters of 8.
_FEW_ROWS = 8


def choose_cluster(num_rows: int) -> Cluster:
    return 16 if num_rows <= _FEW_ROWS else 8


def cluster_spec(
    name: str, vocab_size: int, dtype: torch.dtype, cluster: Cluster, **defines: int
) -> runtime.KernelSpec:
    """With room for a block's logits, and 8 bytes for each 256 of them."""
    vectors = _block_vectors(vocab_size, cluster)
    return runtime.KernelSpec(
        name,
        files=("sampling.cuh", f"{name}.cu"),
        defines=(
            *(("CLUSTER", cluster), ("THREADS", THREADS), ("LOGIT_BYTES", dtype.itemsize)),
            *defines.items(),
        ),
        shared_bytes=vectors * _WIDTH * dtype.itemsize + -(-vectors // _CELL) * 8,
        variant=f"{vocab_size} {str(dtype).removeprefix('torch.')} by {cluster}",
        has_wide_clusters=cluster > 8,
    )


class Rows(ctypes.Structure):
    """Of logits, and how they are divided."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("row_bytes", ctypes.c_longlong),
        ("vocab_size", ctypes.c_int),
        ("block_vectors", ctypes.c_int),
    )

    @classmethod
    def of(cls, logits: Tensor, cluster: Cluster) -> Rows:
        vocab_size = logits.shape[1]
        pitch = logits.stride(0) * logits.element_size()
        return cls(logits.data_ptr(), pitch, vocab_size, _block_vectors(vocab_size, cluster))


def _block_vectors(vocab_size: int, cluster: Cluster) -> int:
    """Of 8 logits, in each block but the last ones of a row."""
    return -(-vocab_size // (cluster * _WIDTH))
