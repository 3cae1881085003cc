"""Rows of logits and what is asked of them, for the reference and for kernels."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Penalties, SamplingRows


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


def spread_logits(
    kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int
) -> Tensor:
    """[S, V] of one of KINDS, in rows that lie further apart than they are long."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, vocab_size, generator=generator)
    values = {
        "peaked": lambda: values * 6,
        "flat": lambda: torch.full_like(values, -3.5),
        "tied": lambda: (values * 2).round(),
        "apart": lambda: values * 1e30,  # of which all but a few weigh nothing
        "near": lambda: values * 2e-2 + 1,
        "zeros": lambda: torch.copysign(torch.zeros_like(values), values),
        "few": lambda: values.where(values > 1.5, -torch.inf),
    }[kind]()
    values[:, -1] = values[:, -1].clamp(min=-100)  # a number in each row
    apart = torch.full((num_rows, vocab_size + 16), torch.nan, dtype=dtype)
    apart[:, :vocab_size] = values.to(dtype)
    return apart[:, :vocab_size]


KINDS = ("peaked", "flat", "tied", "apart", "near", "zeros", "few")


def mixed_rows(logits: Tensor, seed: int) -> SamplingRows:
    """Every sort of row, each with uniforms of its own, some with tokens that must not come."""
    num_rows, vocab_size = logits.shape
    generator = torch.Generator().manual_seed(seed)
    settings = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": min(50, vocab_size - 1)},
        {"temperature": 3.0, "top_p": 0.9},
        {"min_p": 0.05},
        {"temperature": 0.6, "top_k": vocab_size - 1, "top_p": 0.95, "min_p": 1e-4},
        {"temperature": 1e-5, "top_p": 1e-9},
        {"temperature": 100.0, "top_k": 1, "min_p": 1.0},
        {"temperature": 9e-6, "top_k": 3},
        {"top_p": 0.999999, "top_k": vocab_size + 1},
    ]
    chosen = [settings[row % len(settings)] for row in range(num_rows)]
    uniforms = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    uniforms[2::7], uniforms[3::7] = 0, 1 - 2.0**-53
    masked = [
        torch.randint(vocab_size, (row % 4 * 50,), generator=generator).tolist()
        for row in range(num_rows)
    ]
    for row in range(0, num_rows, 3):
        masked[row].append(int(logits[row].argmax()))
    return sampling_rows(
        num_rows,
        temperature=[each.get("temperature", 1.0) for each in chosen],
        top_k=[int(each.get("top_k", 0)) for each in chosen],
        top_p=[each.get("top_p", 1.0) for each in chosen],
        min_p=[each.get("min_p", 0.0) for each in chosen],
        uniforms=uniforms,
        masked=masked,
    )


def border_rows(logits: Tensor, temperature: float, seed: int = 0) -> SamplingRows:
    """Rows of which a unit more or less decides, in fours, for equal rows of logits.

    A uniform that is just enough for a token, and the one below it, which gives the token before.
    A top_p of half a unit more than what the likeliest tokens hold, so that another is kept, and a
    min_p of half a unit more than the last token's weight, which is not: the largest uniform shows.
    """
    chance = random.Random(seed)
    uniforms, top_p, min_p = [], [], []
    for values in logits[::4].float():
        weights = reference.token_weights(values, temperature)
        sums = weights.cumsum(0).tolist()
        possible = weights.nonzero()[1:-1].flatten().tolist()
        before = sums[chance.choice(possible) - 1]
        enough = -(-(before << 53) // sums[-1])
        held = _held_before_a_later_id(values, weights)
        last = int(weights[weights > 0][-1])
        uniforms += [enough / 2**53, (enough - 1) / 2**53, 1 - 2.0**-53, 1 - 2.0**-53]
        top_p += [1.0, 1.0, (held + 0.5) / sums[-1], 1.0]
        min_p += [0.0, 0.0, 0.0, (last + 0.5) / 2**reference.WEIGHT_BITS]
    return sampling_rows(
        len(logits), temperature=temperature, uniforms=uniforms, top_p=top_p, min_p=min_p
    )


def _held_before_a_later_id(values: Tensor, weights: Tensor) -> int:
    """By the fewest of the largest logits behind all of whose ids the next one has another."""
    largest = values.unique(sorted=True).flip(0)
    kept = values >= largest[0]
    for following in largest[1:]:
        last = kept.nonzero()[-1]
        if (values == following).nonzero()[-1] > last:
            return int(weights[kept].sum())
        kept = values >= following
    raise AssertionError("the last id has the largest logit")


def penalties_of(
    rows: list[int],
    newest: list[int],
    settings: list[tuple[float, float, float]],
    entries: list[dict[int, tuple[int, float]]],
) -> Penalties:
    """settings: repetition, frequency and presence; entries: count and bias by token."""
    flat = [(token_id, *entry) for row in entries for token_id, entry in row.items()]
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    ends = torch.tensor([0, *map(len, entries)]).cumsum(0)
    token_ids, counts, biases = (
        torch.tensor(column) for column in (zip(*flat, strict=True) if flat else ((), (), ()))
    )
    return Penalties(
        rows=torch.tensor(rows, dtype=torch.int32),
        newest=torch.tensor(newest, dtype=torch.int32),
        repetition=columns[0].float(),
        frequency=columns[1].float(),
        presence=columns[2].float(),
        start=ends.int(),
        token_ids=token_ids.int(),
        counts=counts.int(),
        biases=biases.float(),
    )


def penalized_case(
    vocab_size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Tensor, Tensor, Penalties]:
    """Logits, input ids, and what is penalised of them: rows in any order and one twice, with no
    entry, some, more than a block has threads; whose newest token is one of them, not, and none."""
    generator = torch.Generator().manual_seed(seed + vocab_size)
    logits = spread_logits("peaked", 6, vocab_size, dtype, seed)
    input_ids = torch.randint(vocab_size, (9,), generator=generator)
    input_ids[3], input_ids[5] = vocab_size - 1, 0
    numbers = [0, 1, min(5, vocab_size), min(600, vocab_size), vocab_size // 2]
    entries = [
        {
            int(token_id): (
                int(torch.randint(-1, 4, (1,), generator=generator)),
                float(200 * torch.rand((), generator=generator) - 100) * (index % 3 == 0),
            )
            for index, token_id in enumerate(
                torch.randperm(vocab_size, generator=generator)[:count]
            )
        }
        for count in numbers
    ]
    entries[3][vocab_size - 1] = (-1, 0.5)
    entries[4].pop(0, None)
    settings = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.7, -0.3), (0.6, -1.1, 2.0), (1.1, 0.1, 0)]
    penalties = penalties_of([4, 0, 5, 2, 5], [1, -1, 8, 3, 5], settings, entries)
    return logits, input_ids, penalties
