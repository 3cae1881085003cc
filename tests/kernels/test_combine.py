"""combine in CUDA C++ against the reference, bit for bit; bad input."""

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.rows import RowLayout


def random_inputs(
    tokens: int, columns: int, num_chosen: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """outputs, rows, chosen_weights: every row once, in any order."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    num_rows = tokens * num_chosen
    outputs = torch.empty(num_rows, columns, device="cuda", dtype=torch.bfloat16)
    outputs.normal_(generator=generator)
    rows = torch.randperm(num_rows, device="cuda", generator=generator).int()
    weights = torch.rand(tokens, num_chosen, device="cuda", generator=generator).softmax(-1)
    return outputs, rows.view(tokens, num_chosen), weights.bfloat16()


def poisoned(tokens: int, columns: int) -> Tensor:
    return torch.full((tokens, columns), torch.nan, device="cuda", dtype=torch.bfloat16)


def on_cpu(*tensors: Tensor) -> Tensor:
    return reference.combine(*(tensor.cpu() for tensor in tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("num_chosen", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("columns", [16, 320, 1088, 2880, 8192])
@pytest.mark.parametrize("tokens", [1, 2, 5, 127, 300])
def test_every_bit_is_the_references(tokens: int, columns: int, num_chosen: int) -> None:
    inputs = random_inputs(tokens, columns, num_chosen, seed=tokens + columns)
    out = combine(*inputs, out=poisoned(tokens, columns))
    assert torch.equal(out.cpu(), on_cpu(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 2880])
@pytest.mark.parametrize("tokens", [1, 127, 300])
def test_a_residual_is_added_last_and_may_be_where_the_sums_go(tokens: int, columns: int) -> None:
    inputs = random_inputs(tokens, columns, 4)
    around = random_inputs(tokens, columns + 32, 1, seed=1)[0]
    residual = around[:, 16:-16]
    expected = reference.combine(*(x.cpu() for x in inputs), residual=residual.cpu())
    out = combine(*inputs, residual=residual, out=poisoned(tokens, columns))
    assert torch.equal(out.cpu(), expected)
    beside = around[:, :16].clone(), around[:, -16:].clone()
    assert combine(*inputs, residual=residual, out=residual).data_ptr() == residual.data_ptr()
    assert torch.equal(residual.cpu(), expected)
    assert torch.equal(around[:, :16], beside[0])
    assert torch.equal(around[:, -16:], beside[1])
    if tokens > 1:
        assert not torch.equal(on_cpu(*inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
def test_no_layout_changes_a_bit(vectors: int) -> None:
    inputs = random_inputs(133, 2880, 4)
    layout = RowLayout.of(2880, vectors, threads=128 * vectors)
    out = combine(*inputs, out=poisoned(133, 2880), layout=layout)
    assert torch.equal(out.cpu(), on_cpu(*inputs))


@pytest.mark.gpu
def test_products_below_the_normal_numbers_and_zeros() -> None:
    outputs, rows, weights = random_inputs(40, 320, 4)
    outputs[::3] *= 1e-30
    outputs[::5] = -0.0
    weights[:20] = 1e-12
    out = combine(outputs, rows, weights, out=poisoned(40, 320))
    assert torch.equal(
        out.cpu().view(torch.int16), on_cpu(outputs, rows, weights).view(torch.int16)
    )


@pytest.mark.gpu
def test_a_wrong_kernel_is_seen() -> None:
    outputs, rows, weights = (tensor.cpu() for tensor in random_inputs(64, 2880, 4))
    # What is left where large summands cancel shows their order.
    outputs[rows[:, 2].long()] = -outputs[rows[:, 0].long()]
    outputs[rows[:, 1::2].long()] *= 1e-6
    weights[:, 2] = weights[:, 0]
    right = reference.combine(outputs, rows, weights)
    assert torch.equal(combine(outputs.cuda(), rows.cuda(), weights.cuda()).cpu(), right)
    swapped = rows.clone()
    swapped[9, 1], swapped[9, 2] = rows[9, 2], rows[9, 1]
    rounded = torch.zeros_like(right)
    for k in range(4):
        rounded += outputs[rows[:, k].long()] * weights[:, k, None]
    for wrong in (
        reference.combine(outputs, rows.flip(1), weights.flip(1)),  # the order of k
        reference.combine(outputs, swapped, weights),
        rounded,
    ):
        assert not torch.equal(wrong, right)


def with_another_ranks(
    outputs: Tensor, rows: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some choices the weight is 0 and the row none, or one in which nothing was written."""
    outputs, rows, weights = outputs.clone(), rows.clone(), weights.clone()
    outputs[rows[3, 1]] = torch.nan
    weights[3, 1] = weights[5, 0] = weights[5, 2] = 0
    rows[5, 0] = rows[5, 2] = -1
    return outputs, rows, weights


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 700])
def test_a_weight_of_zero_adds_nothing(tokens: int) -> None:
    given = with_another_ranks(*random_inputs(tokens, 320, 4))
    expected = on_cpu(*given)
    assert not bool(expected.isnan().any())
    assert torch.equal(combine(*given, out=poisoned(tokens, 320)).cpu(), expected)
    given[1][5, 2] = len(given[0])
    assert torch.equal(combine(*given, out=poisoned(tokens, 320)).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [-1, 160, 2**31 - 1])
def test_a_row_that_is_none_makes_its_token_nan(row: int) -> None:
    outputs, rows, weights = random_inputs(40, 320, 4)
    expected = combine(outputs, rows, weights)
    rows[7, 2] = row
    out = combine(outputs, rows, weights, out=torch.zeros_like(expected))
    assert bool(out[7].isnan().all())
    others = torch.arange(40) != 7
    assert torch.equal(out[others], expected[others])


@pytest.mark.gpu
def test_131072_tokens() -> None:
    outputs, rows, weights = random_inputs(131072, 2880, 6)  # more than 2^31 values
    out = combine(outputs, rows, weights, out=poisoned(131072, 2880))
    for first in range(0, 131072, 16384):
        part = slice(first, first + 16384)
        assert torch.equal(out[part], reference.combine(outputs, rows[part], weights[part]))


@pytest.mark.gpu
def test_rows_apart_and_nothing_beside_them_is_written() -> None:
    outputs, rows, weights = random_inputs(67, 2880 + 64, 4)
    outputs = outputs[:, :2880]
    around = torch.full((67 + 2, 2880 + 32), 7.0, device="cuda", dtype=torch.bfloat16)
    out = combine(outputs, rows, weights, out=around[1:-1, 16 : 16 + 2880])
    assert torch.equal(out.cpu(), on_cpu(outputs, rows, weights))
    out.fill_(7)
    assert bool((around == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 1000])
def test_captured_graph_is_eager(tokens: int) -> None:
    inputs, others = random_inputs(tokens, 2880, 4, seed=1), random_inputs(tokens, 2880, 4, seed=2)
    out = poisoned(tokens, 2880)
    combine(*inputs, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        combine(*inputs, out=out)
    for mine, other in zip(inputs, others, strict=True):
        mine.copy_(other)
    graph.replay()
    assert torch.equal(out.cpu(), on_cpu(*others))


@pytest.mark.gpu
def test_no_tokens() -> None:
    assert combine(*random_inputs(0, 320, 4)).shape == (0, 320)


@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda outputs: outputs.float(), "outputs must be torch.bfloat16, got torch.float32"),
        (0, lambda outputs: outputs[:, :312], r"a multiple of 16 columns, got \[16, 312\]"),
        (0, lambda outputs: outputs[0], r"outputs must be a matrix with .*, got \[320\]"),
        (0, lambda outputs: outputs[:0], "outputs must have rows where there are tokens"),
        (1, lambda rows: rows.long(), "rows must be torch.int32, got torch.int64"),
        (1, lambda rows: rows.t().contiguous().t(), "rows must be contiguous"),
        (2, lambda weights: weights.float(), "chosen_weights must be torch.bfloat16"),
        (2, lambda weights: weights[:3], r"chosen_weights must be \[4, 4\], got \[3, 4\]"),
        (0, lambda outputs: outputs, "outputs must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(position: int, change, sentence: str) -> None:
    inputs = [
        torch.zeros(16, 320).bfloat16(),
        torch.zeros(4, 4, dtype=torch.int32),
        torch.zeros(4, 4).bfloat16(),
    ]
    inputs[position] = change(inputs[position])
    with pytest.raises(ValueError, match=sentence):
        combine(*inputs)


@pytest.mark.parametrize(
    ("residual", "sentence"),
    [
        (torch.zeros(4, 320), "residual must be torch.bfloat16, got torch.float32"),
        (torch.zeros(3, 320).bfloat16(), r"residual must be \[4, 320\], got \[3, 320\]"),
        (torch.zeros(4, 324).bfloat16()[:, :320], "residual must have adjacent columns, and rows"),
    ],
)
def test_a_bad_residual_is_refused(residual: Tensor, sentence: str) -> None:
    inputs = (torch.zeros(16, 320).bfloat16(), torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=sentence):
        combine(*inputs, torch.zeros(4, 4).bfloat16(), residual=residual)


def test_more_experts_of_a_token_than_are_held_are_refused() -> None:
    rows = torch.zeros(4, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="K must be at most 8, got 9"):
        combine(torch.zeros(16, 320).bfloat16(), rows, torch.zeros(4, 9).bfloat16())
