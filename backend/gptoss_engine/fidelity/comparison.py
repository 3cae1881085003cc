"""One model beside the record of its reference."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gptoss_engine.checkpoints.tensor_source import TensorSource, WeightMode
from gptoss_engine.fidelity.figures import Fidelity
from gptoss_engine.fidelity.passages import Passage, asked, num_tokens
from gptoss_engine.fidelity.record import Probe, Record, check_size, read
from gptoss_engine.loading import load_weights
from gptoss_engine.progress import tracked
from gptoss_engine.weights import Weights
from gptoss_kernels.ops import Fp8Weight, Operators

ROWS_AT_ONCE = 64  # positions whose logits are compared together: some 100 MB a copy in fp64


def compare(
    source: TensorSource,
    passages: Sequence[Passage],
    *,
    weights: WeightMode,
    against: WeightMode,
    dtype: torch.dtype,
    device: torch.device,
    ops: Operators,
) -> Fidelity:
    """The checkpoint in mode `weights`, measured against itself in mode `against`.

    Raises InvalidConfig where the record of all tokens would be too large, InvalidCheckpoint where
    the numbers are not finite.
    """
    config = source.config
    check_size(config, num_tokens(passages), dtype)
    record = Record.make(
        config, load_weights(source, against, dtype, device), passages, ops, against
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()  # or the reference's memory counts as taken
    return measure(record, load_weights(source, weights, dtype, device), passages, ops, weights)


def measure(
    record: Record, weights: Weights, passages: Sequence[Passage], ops: Operators, label: str
) -> Fidelity:
    """What `weights` make of the passages, beside the record of a reference."""
    config = record.config
    hidden = torch.empty_like(record.hidden)
    free = _Comparer(ops, record, is_put_back=False)
    read(config, weights, passages, free, hidden, label)
    put_back = _Comparer(ops, record, is_put_back=True)
    read(config, weights, passages, put_back, None, f"{label}, layer by layer")
    positions, next_ids = asked(passages)
    columns = zip(
        *tracked(
            _compare_logits(record, hidden, weights, positions, next_ids, ops),
            "comparing logits",
            -(-len(positions) // ROWS_AT_ONCE),
        ),
        strict=True,
    )
    kl, same_top, logit_error, logprobs, reference_logprobs = map(torch.cat, columns)
    return Fidelity(
        positions=positions,
        kl=kl,
        same_top=same_top,
        logit_error=logit_error,
        logprobs=logprobs,
        reference_logprobs=reference_logprobs,
        residual_error=free.error,
        added_error=put_back.error,
        changed_experts=free.changed_experts,
        experts_per_token=config.experts_per_token,
    )


class _Comparer(Probe):
    """is_put_back: after each comparison, hidden becomes what it was in the reference."""

    def __init__(self, ops: Operators, record: Record, *, is_put_back: bool) -> None:
        super().__init__(ops)
        self._record = record
        self._is_put_back = is_put_back
        # NaN, so that a figure which was never measured shows.
        self.error = torch.full(record.residuals.shape[:2], math.nan)
        self.changed_experts = torch.full(record.chosen.shape[:2], -1, dtype=torch.int32)

    def see_residual(self, update: int, rows: slice, hidden: Tensor) -> None:
        expected = self._record.residuals[update, rows].to(hidden.device)
        self.error[update, rows] = _relative_error(hidden.float(), expected.float()).cpu()
        if self._is_put_back:
            hidden.copy_(expected)

    def see_choice(self, layer: int, rows: slice, chosen: Tensor) -> None:
        expected = self._record.chosen[layer, rows]
        is_shared = (chosen.cpu()[:, :, None] == expected[:, None, :]).any(-1)
        self.changed_experts[layer, rows] = (~is_shared).sum(-1).int()


def _compare_logits(
    record: Record,
    hidden: Tensor,
    weights: Weights,
    positions: Tensor,
    next_ids: Tensor,
    ops: Operators,
) -> Iterator[tuple[Tensor, ...]]:
    """kl, same_top, logit_error, logprobs, reference_logprobs of ROWS_AT_ONCE positions each."""
    device = weights.embedding.device

    def logits(states: Tensor, rows: Tensor, unembedding: Tensor | Fp8Weight) -> Tensor:
        return ops.linear(states[rows].to(device), unembedding).double()

    pieces = zip(positions.split(ROWS_AT_ONCE), next_ids.split(ROWS_AT_ONCE), strict=True)
    for rows, token_ids in pieces:
        with torch.inference_mode():
            expected = logits(record.hidden, rows, record.unembedding)
            found = logits(hidden, rows, weights.unembedding)
            same_top = found.argmax(-1) == expected.argmax(-1)
            error = _relative_error(
                found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)
            )
            found, expected = found.log_softmax(-1), expected.log_softmax(-1)
            own = token_ids.to(device)[:, None]
            # The sum of terms of both signs is never below zero, but its rounding may be.
            kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0)
            columns = (kl, same_top, error, found.gather(1, own)[:, 0])
            yield tuple(each.cpu() for each in (*columns, expected.gather(1, own)[:, 0]))


def _relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """|found - expected| / |expected| over the last dimension; 0 where they are equal."""
    difference = (found - expected).norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / expected.norm(dim=-1))
