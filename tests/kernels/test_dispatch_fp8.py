"""dispatch_fp8 in CUDA C++ against the reference, bit for bit; bad input."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import MAXIMUM_CHOICES, Dispatched, empty_scale
from gptoss_kernels.cuda.dispatch_fp8 import choose_launches, dispatch_fp8
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm

Launches = Literal[1, 3, 4]
LAUNCHES = pytest.mark.parametrize("launches", [1, 3, 4])
MODELS = ((16, 4), (8, 2), (32, 4), (128, 4), (512, 8), (1, 1), (5, 3))  # experts, chosen
TOKENS = (1, 2, 7, 9, 31, 33, 132, 133, 1025)


def random_inputs(
    tokens: int, columns: int, num_experts: int, num_chosen: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Every token's experts differ, and some experts are chosen far more often."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(tokens, columns, device="cuda", generator=generator).bfloat16()
    liking = torch.randn(num_experts, device="cuda", generator=generator)
    logits = torch.randn(tokens, num_experts, device="cuda", generator=generator) + liking
    return x, logits.topk(num_chosen, dim=-1).indices


def poisoned(tokens: int, columns: int, num_experts: int, num_chosen: int) -> Dispatched:
    rows = tokens * num_chosen
    values = torch.full((rows, columns), 0x7F, device="cuda", dtype=torch.uint8)
    return Dispatched(
        values.view(torch.float8_e4m3fn),
        empty_scale(rows, columns, "cuda").fill_(torch.nan),
        torch.full((num_experts + 1,), -7, device="cuda", dtype=torch.int32),
        torch.full((tokens, num_chosen), -7, device="cuda", dtype=torch.int32),
    )


def expected_order(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The choice of each row, expert_start, and rows."""
    flat = chosen.flatten().long()
    choices = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)[:num_experts]
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.empty_like(choices, dtype=torch.int32)
    rows[choices] = torch.arange(len(choices), device=rows.device, dtype=torch.int32)
    return choices, start, rows.view(chosen.shape)


def is_right(out: Dispatched, x: Tensor, chosen: Tensor, num_experts: int) -> bool:
    """What lies behind all experts is not looked at."""
    choices, start, rows = expected_order(chosen, num_experts)
    end = int(start[-1])
    tokens = (choices // chosen.shape[1])[:end]
    values, scale = reference.quantise(x)
    return (
        torch.equal(out.expert_start, start)
        and torch.equal(out.rows, rows)
        and torch.equal(out.values.view(torch.uint8)[:end], values.view(torch.uint8)[tokens])
        and torch.equal(out.scale[:end], scale[tokens])
    )


def test_the_expectation_is_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 320, generator=generator).bfloat16()
    chosen = torch.rand(50, 16, generator=generator).topk(4).indices
    assert is_right(reference.dispatch_fp8(x, chosen, 16), x, chosen, 16)


@pytest.mark.gpu
@LAUNCHES
@pytest.mark.parametrize(("num_experts", "num_chosen"), MODELS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_bit_is_the_references(
    tokens: int, num_experts: int, num_chosen: int, launches: Launches
) -> None:
    x, chosen = random_inputs(tokens, 320, num_experts, num_chosen, seed=tokens)
    out = poisoned(tokens, 320, num_experts, num_chosen)
    assert is_right(
        dispatch_fp8(x, chosen, num_experts, out=out, launches=launches), x, chosen, num_experts
    )


@pytest.mark.gpu
@LAUNCHES
@pytest.mark.parametrize("columns", [16, 144, 1088, 2880, 4096, 8192])
def test_every_width(columns: int, launches: Launches) -> None:
    x, chosen = random_inputs(300, columns, 128, 4)
    out = poisoned(300, columns, 128, 4)
    assert is_right(dispatch_fp8(x, chosen, 128, out=out, launches=launches), x, chosen, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("tokens", [1, 8, 512, 768, 769, 2048, 8192, 8193, 32768])
def test_as_served(tokens: int, num_experts: int) -> None:
    x, chosen = random_inputs(tokens, 2880, num_experts, 4)
    out = poisoned(tokens, 2880, num_experts, 4)
    assert is_right(dispatch_fp8(x, chosen, num_experts, out=out), x, chosen, num_experts)


@pytest.mark.gpu
@LAUNCHES
@pytest.mark.parametrize("experts", [(0,), (127,), (3, 126)])
def test_all_tokens_to_few_experts(experts: tuple[int, ...], launches: Launches) -> None:
    x, _ = random_inputs(1000, 320, 128, 4)
    chosen = torch.tensor(experts, device="cuda").expand(1000, len(experts)).contiguous()
    out = poisoned(1000, 320, 128, len(experts))
    assert is_right(dispatch_fp8(x, chosen, 128, out=out, launches=launches), x, chosen, 128)


@pytest.mark.gpu
@LAUNCHES
def test_one_expert_twice_for_a_token(launches: Launches) -> None:
    x, _ = random_inputs(777, 320, 128, 4)
    chosen = torch.randint(0, 5, (777, 4), device="cuda")
    out = poisoned(777, 320, 128, 4)
    assert is_right(dispatch_fp8(x, chosen, 128, out=out, launches=launches), x, chosen, 128)


@pytest.mark.gpu
@LAUNCHES
def test_int32_choices(launches: Launches) -> None:
    x, chosen = random_inputs(200, 320, 32, 4)
    out = poisoned(200, 320, 32, 4)
    chosen = chosen.int()
    assert is_right(dispatch_fp8(x, chosen, 32, out=out, launches=launches), x, chosen, 32)


@pytest.mark.gpu
@LAUNCHES
@pytest.mark.parametrize("chosen_type", [torch.int32, torch.int64])
def test_what_is_no_expert_lies_behind_all_and_is_not_written(
    chosen_type: torch.dtype, launches: Launches
) -> None:
    x, chosen = random_inputs(500, 320, 32, 4)
    chosen = chosen.to(chosen_type)
    chosen[7, 1], chosen[300, 0], chosen[301, 3] = -1, 32, torch.iinfo(chosen_type).max
    out = poisoned(500, 320, 32, 4)
    dispatch_fp8(x, chosen, 32, out=out, launches=launches)
    as_last = torch.where((chosen < 0) | (chosen > 32), 32, chosen)
    assert is_right(out, x, as_last, 32)
    assert int(out.expert_start[-1]) == 2000 - 3
    assert bool((out.values[-3:].view(torch.uint8) == 0x7F).all())
    assert bool(out.scale[-3:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_chosen", [4, 8])
def test_131072_tokens(num_chosen: int) -> None:
    # With 8, more than 2^31 values.
    x, chosen = random_inputs(131072, 2880, 128, num_chosen)
    out = dispatch_fp8(x, chosen, 128, out=poisoned(131072, 2880, 128, num_chosen))
    choices, start, rows = expected_order(chosen, 128)
    assert torch.equal(out.expert_start, start)
    assert torch.equal(out.rows, rows)
    values, scale = reference.quantise(x[:1])
    for first in range(0, len(choices), 32768):
        part = slice(first, first + 32768)
        values, scale = reference.quantise(x[choices[part] // num_chosen])
        assert torch.equal(out.values[part].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(out.scale[part], scale)


@pytest.mark.gpu
@LAUNCHES
def test_rows_apart_and_nothing_beside_them_is_written(launches: Launches) -> None:
    x, chosen = random_inputs(67, 2880 + 64, 32, 4)
    x = x[:, :2880]
    around = torch.full((4 * 67 + 2, 2880 + 32), 7, device="cuda", dtype=torch.uint8)
    scales = torch.full((23 + 2, 4 * 68), 7.0, device="cuda")
    starts = torch.full((4 + 33 + 4,), 7, device="cuda", dtype=torch.int32)
    out = Dispatched(
        around[1:-1, 16 : 16 + 2880].view(torch.float8_e4m3fn),
        scales[1:-1].t()[: 4 * 67],
        starts[4:-4],
        torch.empty(67, 4, device="cuda", dtype=torch.int32),
    )
    assert is_right(dispatch_fp8(x, chosen, 32, out=out, launches=launches), x, chosen, 32)
    around[1:-1, 16 : 16 + 2880] = 7
    out.scale.fill_(7)
    out.expert_start.fill_(7)
    assert all(bool((all_of_it == 7).all()) for all_of_it in (around, scales, starts))


def test_a_wrong_kernel_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 320, generator=generator).bfloat16()
    chosen = torch.rand(50, 16, generator=generator).topk(4).indices
    right = reference.dispatch_fp8(x, chosen, 16)
    # Two rows of one expert in the wrong order, with all that belongs to them.
    first = int(right.expert_start[3])
    swapped = torch.arange(200)
    swapped[[first, first + 1]] = swapped[[first + 1, first]]
    unstable = Dispatched(
        right.values.view(torch.uint8)[swapped].view(right.values.dtype),
        right.scale[swapped],
        right.expert_start,
        swapped.int()[right.rows.long()],
    )
    neighbours = right._replace(scale=right.scale.roll(1, dims=1))
    start = right.expert_start.clone()
    start[4] += 1
    for wrong in (unstable, neighbours, right._replace(expert_start=start)):
        assert not is_right(wrong, x, chosen, 16)


@pytest.mark.gpu
@LAUNCHES
def test_captured_graph_is_eager(launches: Launches) -> None:
    x, chosen = random_inputs(1000, 2880, 128, 4, seed=1)
    other, other_chosen = random_inputs(1000, 2880, 128, 4, seed=2)
    out = poisoned(1000, 2880, 128, 4)
    dispatch_fp8(x, chosen, 128, out=out, launches=launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dispatch_fp8(x, chosen, 128, out=out, launches=launches)
    for _ in range(3):
        graph.replay()
    x.copy_(other)
    chosen.copy_(other_chosen)
    graph.replay()
    assert is_right(out, other, other_chosen, 128)


@pytest.mark.gpu
@LAUNCHES
def test_reads_choices_after_the_kernel_before_it_wrote_them(launches: Launches) -> None:
    x, chosen = random_inputs(1000, 320, 128, 4)
    late_x, late = torch.zeros_like(x), torch.zeros_like(chosen)
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        late_x.zero_()
        late.zero_()
        slow = slow @ slow / 64
        late_x.copy_(x)
        late.copy_(chosen)
        assert is_right(dispatch_fp8(late_x, late, 128, launches=launches), x, chosen, 128)


@pytest.mark.gpu
@LAUNCHES
def test_reads_tokens_of_a_kernel_that_lets_it_start_early(launches: Launches) -> None:
    # One call follows the other at once, at the same addresses but for what it writes.
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (4096, 2880)
    inputs = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    choices = [random_inputs(4096, 16, 128, 4, seed=seed)[1] for seed in range(4)]
    weight = torch.ones(2880, device="cuda")  # not written by the last kernel before the norm
    outputs = [poisoned(4096, 2880, 128, 4) for _ in range(4)]
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    for hidden, chosen, out in zip(inputs, choices, outputs, strict=True):
        rms_norm(hidden, weight, 1e-5, out=x)
        dispatch_fp8(x, chosen, 128, out=out, launches=launches)
    for hidden, chosen, out in zip(inputs, choices, outputs, strict=True):
        assert is_right(out, rms_norm(hidden, weight, 1e-5), chosen, 128)


@pytest.mark.gpu
@LAUNCHES
def test_no_tokens(launches: Launches) -> None:
    x, chosen = random_inputs(0, 320, 16, 4)
    out = dispatch_fp8(x, chosen, 16, out=poisoned(0, 320, 16, 4), launches=launches)
    assert out.values.shape == (0, 320)
    assert out.expert_start.tolist() == [0] * 17


@LAUNCHES
@pytest.mark.parametrize(
    ("x", "chosen", "num_experts", "sentence"),
    [
        (torch.zeros(4, 320), (4, 2), 8, "x must be torch.bfloat16, got torch.float32"),
        (torch.zeros(4, 312).bfloat16(), (4, 2), 8, r"a multiple of 16 columns, got \[4, 312\]"),
        (torch.zeros(5, 320).bfloat16(), (4, 2), 8, r"must agree in T, got \[5, 320\] and \[4, 2"),
        (torch.zeros(4, 320).bfloat16(), (4, 9), 16, "K must be at most 8, got 9"),
        (torch.zeros(4, 320).bfloat16(), (4, 0), 16, "K must be at least 1, got 0"),
        (torch.zeros(4, 320).bfloat16(), (4, 2), 0, "there must be 1 to 512 experts, got 0"),
        (torch.zeros(4, 320).bfloat16(), (4, 2), 513, "there must be 1 to 512 experts, got 513"),
        (torch.zeros(4, 320).bfloat16(), (4, 2), 8, "x must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(
    x, chosen, num_experts: int, sentence: str, launches: Launches
) -> None:
    with pytest.raises(ValueError, match=sentence):
        dispatch_fp8(x, torch.zeros(chosen, dtype=torch.int64), num_experts, launches=launches)


def test_bad_choices_and_outputs_are_refused() -> None:
    x, chosen = torch.zeros(4, 320).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"chosen must be torch.int64 or torch.int32, got .*int16"):
        dispatch_fp8(x, chosen.short(), 8)
    with pytest.raises(ValueError, match="chosen must be contiguous"):
        dispatch_fp8(x, chosen.t().contiguous().t(), 8)
    out = Dispatched(
        torch.empty(8, 320, dtype=torch.float8_e4m3fn),
        empty_scale(8, 320, "cpu"),
        torch.empty(9, dtype=torch.int32),
        torch.empty(4, 2, dtype=torch.int32),
    )
    for wrong, sentence in (
        (out._replace(values=out.values[:7]), r"values must be \[8, 320\], got \[7, 320\]"),
        (out._replace(scale=torch.empty(8, 3)), "scale must be stored by column"),
        (out._replace(expert_start=out.expert_start[1:]), r"expert_start must be \[9\], got \[8\]"),
        (out._replace(rows=out.rows.long()), "rows must be torch.int32, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dispatch_fp8(x, chosen, 8, out=wrong)


def test_as_many_launches_as_are_fastest() -> None:
    choices = (0, 1, 3072, 3073, 32768, 32769, MAXIMUM_CHOICES)
    assert [choose_launches(each) for each in choices] == [1, 1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize(("launches", "most"), [(1, 2**20), (3, 2**30), (4, 2**30), (None, 2**30)])
def test_more_choices_than_are_counted_are_refused(launches: Launches | None, most: int) -> None:
    def dispatch(num_tokens: int) -> None:
        x = torch.empty(num_tokens, 16, dtype=torch.bfloat16, device="meta")
        chosen = torch.empty(num_tokens, 8, dtype=torch.int32, device="meta")
        dispatch_fp8(x, chosen, 32, launches=launches)

    with pytest.raises(ValueError, match=f"{most}.*, got {most + 8}"):
        dispatch(most // 8 + 1)
    with pytest.raises(ValueError, match="x must be on a GPU, got meta"):
        dispatch(most // 8)
