"""Rows of logits and what is asked of them, for the reference and for kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss_kernels.contracts import SamplingRows


def sampling_rows(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    uniforms: float | Sequence[float] | Tensor = 0.5,
    top_k: int | Sequence[int] = 0,
    masked: Sequence[Sequence[int]] | None = None,
    num_top: int | Sequence[int] = -1,
) -> SamplingRows:
    """One value is every row's; each row's masked ids follow those of the row before."""

    def column(values: float | Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(values, Tensor):
            return values.to(dtype)
        values = values if isinstance(values, Sequence) else [values] * num_rows
        assert len(values) == num_rows
        return torch.tensor(values, dtype=dtype)

    masked = masked or [[]] * num_rows
    assert len(masked) == num_rows
    counts = torch.tensor([0, *map(len, masked)])
    return SamplingRows(
        temperature=column(temperature, torch.float64),
        top_p=column(top_p, torch.float64),
        min_p=column(min_p, torch.float64),
        uniforms=column(uniforms, torch.float64),
        top_k=column(top_k, torch.int32),
        masked_start=counts.cumsum(0).int(),
        masked_ids=torch.tensor([each for ids in masked for each in ids], dtype=torch.int32),
        num_top=column(num_top, torch.int32),
    )
