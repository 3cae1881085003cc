"""Where the engine's tensors come from, files or a generator, and the forms that weights take.

Names are those of layouts.py. A matrix is read as it is stored; what it becomes is decided by who
asks: the loader by the weight mode, the converter by its options.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig
from gptoss_kernels import fp8, mxfp4
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight

WeightMode = Literal["bf16", "fp8", "mxfp4"]
LmHead = Literal["auto", "bf16", "fp8"]  # of the unembedding: EngineConfig.lm_head
Form = Literal["dense", "fp8", "mxfp4"]

EXPERTS = ("w13", "w2")  # one matrix an expert: read one at a time


class Mxfp4Blocks(NamedTuple):
    """As the published checkpoints hold them: u8 [N, K / 32, 16] and u8 [N, K / 32]."""

    blocks: Tensor
    scales: Tensor


Stored = Tensor | Fp8Weight | Mxfp4Blocks


class TensorSource(Protocol):
    """A model's configuration and tensors.

    label: what errors and progress bars call it. shapes: of every tensor, by the engine's name;
    [E, N, K] for w13 and w2.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def label(self) -> str: ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def form(self, name: str) -> Form:
        """How the tensor is stored, and so what `read` returns."""
        ...

    def read(
        self,
        name: str,
        expert: int | None = None,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Stored:
        """A tensor, of w13 and w2 one expert's matrix; rows and columns cut it.

        The cuts have no step, and where blocks or groups share a scale they lie on their borders
        (128 in FP8, 32 along K in MXFP4) or at the end.
        """
        ...


class IdentifiedSource(TensorSource, Protocol):
    """A TensorSource that can be told from others: what folders are written from."""

    @property
    def name(self) -> str:
        """The label without paths."""
        ...

    def num_bytes(self, name: str) -> int:
        """Of the tensor as it is stored."""
        ...

    def fingerprint(self) -> str:
        """Of the configuration and the tensors, not reading them all, wherever they lie."""
        ...

    def identity(self) -> dict[str, Any]:
        """As JSON: with the fingerprint, whatever else tells that nothing was changed meanwhile."""
        ...

    def reopened(self) -> "IdentifiedSource":
        """With nothing of it in memory: a mapped file stays there for as long as it is open."""
        ...


@contextmanager
def reading(source: TensorSource) -> Iterator[None]:
    """The system's refusals in words: InvalidCheckpoint."""
    try:
        yield
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {source.label}: {error.strerror or error}") from error


def read_pieces(source: TensorSource, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """The pieces, which are made of the source while they are taken: see `reading`."""
    with reading(source):
        yield from pieces


def to_dense(stored: Stored, dtype: torch.dtype) -> Tensor:
    """Dequantised, or cast."""
    match stored:
        case Mxfp4Blocks(blocks, scales):
            return mxfp4.dequantise(blocks, scales, dtype)
        case Fp8Weight():
            return stored.dequantise(dtype)
    return stored.to(dtype)


def to_fp8(stored: Stored) -> Fp8Weight:
    """A dense matrix with the scales that minimise its error; FP8 as it is."""
    assert not isinstance(stored, Mxfp4Blocks), "experts go through expert_to_fp8"
    return stored if isinstance(stored, Fp8Weight) else fp8.quantise_weight(stored)


def expert_to_fp8(stored: Stored) -> tuple[Fp8Weight, Tensor]:
    """Without loss, and the blocks [ceil(N / 128), ceil(K / 128)] (bool) where that cannot be."""
    match stored:
        case Mxfp4Blocks(blocks, scales):
            return mxfp4.widen(blocks, scales, mxfp4.block_scale(blocks, scales))
        case Fp8Weight():
            return stored, torch.zeros_like(stored.scale, dtype=torch.bool)
    return fp8.quantise_weight_exactly(stored)


def expert_to_mxfp4(stored: Mxfp4Blocks) -> Mxfp4Weight:
    """With the scales of the blocks that it widens to."""
    return Mxfp4Weight(*stored, mxfp4.block_scale(*stored))
