"""The experts of few tokens against float64 arithmetic, emulated and on a GPU; bad input."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda import experts_fp8 as module
from gptoss_kernels.cuda.experts_fp8 import ExpertsTile, choose_tile, experts_fp8, experts_fp8_few
from gptoss_kernels.testing import norm_error

from .emulator import EmulationError, emulated, guarded, replacing
from .expert_products import SWIGLU, exact, expected_swiglu

# Rounding to bf16 costs 1.7e-3. Behind SwiGLU a value may be rounded to the next one of e4m3 (1e-3
# of them, see test_few_rows_fp8.py), which is 6 % off: 2e-3 together.
BOUND = 4e-3
# Experts, hidden and inner size: the demo model's, ragged ends of groups, chunks and lanes.
SHAPES = ((8, 128, 128), (6, 336, 208), (5, 144, 272))
# One token and several, their experts shared or not; an expert twice, and numbers of no expert; as
# many choices as there may be, of one expert, and of few tokens and many.
CHOICES = (
    ((0, 3),),
    ((1, 3), (3, 4), (4, 1)),
    ((2, 2), (0, 2), (-1, 4), (100, 100)),
    ((3,) * 8,) * 4,
    tuple((i % 5, (i * i + 1) % 5, 4, (i + 3) % 5) for i in range(8)),
    ((-1, 5 << 33),),
)

Operands = list[Tensor]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator)


def random_operands(
    choices: tuple[tuple[int, ...], ...],
    num_experts: int,
    hidden: int,
    inner: int,
    device: str = "cpu",
) -> Operands:
    """Products and biases are about 2, so that SwiGLU's clamps and curve matter.

    Weights of experts that nobody chose are NaN.
    """
    generator = torch.Generator(device).manual_seed(hidden + inner + len(choices))
    chosen = torch.tensor(choices, device=device)
    x = (normal(generator, len(choices), hidden) * 2).bfloat16()
    weights = []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        values = torch.full((num_experts, n, k), torch.nan, device=device).to(torch.float8_e4m3fn)
        for expert in set(chosen.flatten().tolist()) & set(range(num_experts)):
            values[expert] = (normal(generator, n, k) * 32).clamp(-448, 448).to(values.dtype)
        scale = torch.rand(
            (num_experts, -(-n // 128), -(-k // 128)), device=device, generator=generator
        )
        weights += [values, (scale + 0.5) / 32 * k**-0.5, normal(generator, num_experts, n) * 2]
    return [x, chosen, *weights]


def expected_rows(operands: Operands) -> Tensor:
    """In float64, but for what is quantised; NaN of what is no expert's."""
    x, chosen, w13, w13_scale, w13_bias, w2, w2_scale, w2_bias = operands
    values, scale, starts, rows = reference.dispatch_fp8(x, chosen, len(w13))
    inner = expected_swiglu([values, scale, starts, w13, w13_scale, w13_bias], 128)
    out = exact(*inner, starts, w2, w2_scale, w2_bias)
    out[int(starts[-1]) :] = torch.nan
    return out[rows.flatten()]


def error_of(out: Tensor, expected: Tensor) -> float:
    is_none = expected.isnan().any(1)
    if not torch.equal(out.isnan().any(1), is_none):
        return float("inf")
    return norm_error(out[~is_none], expected[~is_none]) if not bool(is_none.all()) else 0.0


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory that operators take is full of what is no result, and no NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **b: empty(*a, **b).fill_(400))


def few(operands: Operands, launches: int = 1) -> Tensor:
    tile = choose_tile(operands[0], operands[1], operands[5])
    assert tile is not None
    out, rows = experts_fp8_few(tile, *operands, **SWIGLU, launches=launches)
    assert torch.equal(rows.flatten().cpu(), torch.arange(len(out)))
    return out


# ---- on the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(("num_experts", "hidden", "inner"), SHAPES)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_emulated(choices, num_experts: int, hidden: int, inner: int, launches: int) -> None:
    operands = random_operands(choices, num_experts, hidden, inner)
    expected = expected_rows(operands)
    operands = [guarded(operand) for operand in operands]
    # Blocks that go round their rings of slots, and blocks with nothing to do.
    for seed, num_blocks in enumerate((3, 132 if inner == 128 else 7)):
        # A launch of the second product reads at once what it was given.
        late = operands[:2] if launches == 1 else ()
        with emulated(seed, num_multiprocessors=num_blocks, late=late):
            out = few(operands, launches)
        assert error_of(out, expected) < BOUND


def test_a_token_is_the_same_alone_and_an_expert_chosen_twice_is_the_same_twice() -> None:
    choices = ((1, 3), (3, 3), (4, 1))
    operands = random_operands(choices, 6, 336, 208)
    for launches in (1, 2):
        with emulated(1):
            out = few(operands, launches)
            for token in range(len(choices)):
                alone = few([each[token : token + 1] for each in operands[:2]] + operands[2:])
                assert torch.equal(alone, out[2 * token : 2 * token + 2])
        assert torch.equal(out[2], out[3])
    assert not torch.equal(out[1], out[2])


def test_a_nan_in_a_token_is_that_tokens_alone() -> None:
    operands = random_operands(((1, 3), (3, 4)), 6, 336, 208)
    with emulated(2):
        expected = few(operands)
        operands[0][1, 70] = torch.nan
        out = few(operands)
    assert torch.equal(out[:2], expected[:2])
    assert bool(out[2:].isnan().any(1).all())


WRONG: tuple[tuple[str, str], ...] = (
    # y that has not come; it is read while others still write it.
    ("while (waits && ", "while (false && "),
    ("barrier_wait(shared + MET_OFFSET, 0);", ";"),
    ("if constexpr (HAS_FIRST) wait_for_previous_kernels();", ""),
    ("wait_for_previous_kernels();\n        first.load", "first.load"),
    ("if (has_others) load_scales(scales, after);", ""),
    ("walk.entry != entry", "entry < 0"),  # the first expert's y for all
    ("choices &= choices - 1) {\n                const", "choices = 0) {\n                const"),
    ("fill_rows(no_experts);", ";"),
    ("barrier_wait(shared + SUMMED_OFFSET + ring.slot * 8, ring.phase);", ";"),
    ("(lane % 4 * 2 + i) * 4", "(lane % 4 * 2) * 4"),  # the scale of the token before
    ("BIAS_OFFSET + ring.slot * BIAS_BYTES", "BIAS_OFFSET"),
    ("min(units() - inside, BLOCK_UNITS - inside % BLOCK_UNITS)", "units() - inside"),
)


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_kernel_is_seen(old: str, new: str) -> None:
    operands = random_operands(((2, 2), (0, 2), (-1, 4), (1, 0)), 6, 336, 208)
    expected = expected_rows(operands)
    for seed in range(4):
        options = {"num_multiprocessors": 3, "late": operands[:2], "seconds": 10}
        with suppress(EmulationError), emulated(seed, change=replacing(old, new), **options):
            if error_of(few(operands), expected) < BOUND:
                continue
        return
    pytest.fail("all seeds were right")


def test_what_is_chosen_for_how_many_tokens() -> None:
    def tile(num_tokens: int, num_chosen: int, hidden: int = 2880, inner: int = 2880):
        x, w2 = torch.empty(num_tokens, hidden), torch.empty(1, 1, inner)
        return choose_tile(x, torch.zeros(num_tokens, num_chosen, dtype=torch.int64), w2)

    assert tile(8, 4) == ExpertsTile(2880, 2880, 4)
    assert tile(8, 2, 128, 256) == ExpertsTile(128, 256, 2)
    for sizes in ((0, 4), (5, 8), (9, 1), (1, 4, 4096), (1, 4, 2880, 4096)):
        assert tile(*sizes) is None
    x, chosen, *_, w2, _, _ = random_operands(CHOICES[0], *SHAPES[1])
    assert choose_tile(x, chosen.int(), w2) is None


@pytest.mark.parametrize("launches", [0, 1, 2])
def test_operator_by_any_number_of_launches(launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_LAUNCHES", launches)
    for choices in (CHOICES[1], CHOICES[1] * 3):  # of nine tokens it is always dispatch_fp8's way
        operands = random_operands(choices, *SHAPES[1])
        with emulated(1):
            out, rows = experts_fp8(*operands, **SWIGLU)
        assert error_of(out[rows.flatten()], expected_rows(operands)) < BOUND
        assert (rows.flatten().tolist() == list(range(6))) == (launches > 0 and len(choices) == 3)


# ---- on a GPU ----------------------------------------------------------------------------------

gpu = pytest.mark.gpu
SERVED = ((32, 2880, 2880), (128, 2880, 2880), (16, 320, 1088), (8, 128, 128))


def token_choices(num_tokens: int, num_experts: int, num_chosen: int = 4):
    """Random, and the last two tokens', if there are as many, the same."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen].tolist()]
    rows += [torch.randperm(num_experts, generator=generator)[:num_chosen].tolist()] * (
        num_tokens > 1
    )
    for _ in range(num_tokens - 2):
        rows.insert(0, torch.randperm(num_experts, generator=generator)[:num_chosen].tolist())
    if num_tokens > 2:
        rows[-1] = rows[-2]
    return tuple(map(tuple, rows))


@gpu
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(("num_experts", "hidden", "inner"), SERVED)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8])
def test_experts(num_tokens: int, num_experts: int, hidden: int, inner: int, launches: int) -> None:
    choices = token_choices(num_tokens, num_experts)
    operands = random_operands(choices, num_experts, hidden, inner, "cuda")
    torch.cuda.synchronize()  # the second product's choices are read at once
    assert error_of(few(operands, launches), expected_rows(operands)) < BOUND


@gpu
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_choices_of_any_kind(choices, launches: int) -> None:
    operands = random_operands(choices, 6, 2880, 2880, "cuda")
    torch.cuda.synchronize()
    assert error_of(few(operands, launches), expected_rows(operands)) < BOUND


@gpu
@pytest.mark.parametrize("launches", [1, 2])
def test_a_token_is_the_same_alone(launches: int) -> None:
    operands = random_operands(token_choices(4, 32), 32, 2880, 2880, "cuda")
    out = few(operands, launches)
    for token in range(4):
        alone = [each[token : token + 1].clone() for each in operands[:2]] + operands[2:]
        torch.cuda.synchronize()
        assert torch.equal(few(alone, launches), out[4 * token : 4 * token + 4])


@gpu
def test_wrong_operands_exceed_the_bound() -> None:
    operands = random_operands(((0, 1, 2, 3), (1, 2, 3, 4)), 5, 2880, 2880, "cuda")
    out = few(operands)
    for place in range(2, 8):
        wrong = list(operands)
        wrong[place] = wrong[place].roll(1, 0)
        assert error_of(out, expected_rows(wrong)) > 5 * BOUND
    wrong = [operands[0].roll(1, 0), *operands[1:]]
    assert error_of(out, expected_rows(wrong)) > 5 * BOUND


@gpu
@pytest.mark.parametrize("launches", [1, 2])
def test_replays_follow_the_choices(launches: int) -> None:
    # The counter of blocks that have met is as before after each launch; y is this launch's own.
    num_experts = 12
    operands = random_operands(token_choices(4, num_experts), num_experts, 2880, 2880, "cuda")
    every = random_operands(
        tuple((i, i + 1, i + 2, i + 3) for i in (0, 4, 8, 6)), num_experts, 2880, 2880, "cuda"
    )
    operands[2:] = every[2:]
    few(operands, launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [few(operands, launches) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        chosen = torch.rand(4, num_experts, generator=generator).topk(4).indices
        operands[1].copy_(chosen)
        operands[0].copy_(torch.randn(4, 2880, generator=generator).bfloat16() * 2)
        for out in outs:
            out.fill_(1e4)
        graph.replay()
        expected = expected_rows(operands)
        for out in outs:
            assert error_of(out, expected) < BOUND
        assert torch.equal(outs[0], outs[2])


@gpu
def test_two_streams_one_after_the_other() -> None:
    operands = random_operands(token_choices(2, 32), 32, 2880, 2880, "cuda")
    expected = few(operands)
    other = torch.cuda.Stream()
    for _ in range(20):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            out = few(operands)
        torch.cuda.current_stream().wait_stream(other)
        assert torch.equal(out, expected)
        assert torch.equal(few(operands), expected)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "change", "sentence"),
    [
        (0, lambda x: x.float(), "x must be torch.bfloat16, got torch.float32"),
        (1, lambda chosen: chosen[:2], r"must agree in T, got \[3, 336\] and \[2, 2\]"),
        (2, lambda w13: w13[:, :400].contiguous(), r"bias must be \[6, 400\], got \[6, 416\]"),
        (2, lambda w13: w13.transpose(1, 2), r"must agree in K"),
        (4, lambda bias: bias.double(), "bias must be torch.float32, got torch.float64"),
        (4, lambda bias: bias[:, 1:], r"bias must be \[6, 416\], got \[6, 415\]"),
        (5, lambda w2: w2[:5].contiguous(), r"weight_scale must be \[5, 3, 2\], got \[6, 3, 2\]"),
        (7, lambda bias: beside(bias), "w2_bias must start at a multiple of 16 bytes, got 4"),
    ],
)
def test_bad_input_is_refused(
    place: int, change: Callable[[Tensor], Tensor], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_LAUNCHES", 1)
    operands = random_operands(CHOICES[1], 6, 336, 208)
    operands[place] = change(operands[place])
    with emulated(), pytest.raises(ValueError, match=sentence):
        experts_fp8(*operands, **SWIGLU)


def beside(tensor: Tensor) -> Tensor:
    room = torch.zeros(tensor.numel() + 4)
    skipped = (-room.data_ptr() // 4) % 4 + 1
    return room[skipped:][: tensor.numel()].view(tensor.shape).copy_(tensor)
