"""The experts of few tokens against float64 arithmetic, emulated and on a GPU; bad input."""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.compiler import KernelSpec
from gptoss_kernels.cuda.experts_fp8 import (
    FewExpertsTiles,
    choose_tiles,
    experts_fp8,
    experts_fp8_few,
    few_tiles,
)
from gptoss_kernels.testing import norm_error

from .emulator import Emulation, emulated, guarded, replacing
from .expert_products import SWIGLU, exact, expected_swiglu

# Rounding to bf16 costs 1.7e-3. Behind SwiGLU a value may be rounded to the next one of e4m3 (1e-3
# of them), which is 6 % off: 2e-3 together.
BOUND = 4e-3
UNWRITTEN = 400
ROOM = 2**16  # a choice's number has 16 bits
# Experts, hidden and inner size: the demo model's, ragged ends of groups, chunks and lanes.
SHAPES = ((8, 128, 128), (6, 336, 208), (5, 144, 272))
# One token and several, their experts shared or not; an expert twice, and numbers of no expert; as
# many choices as there may be of one slot a token, of one expert, and of few tokens and many.
CHOICES = (
    ((0, 3),),
    ((1, 3), (3, 4), (4, 1)),
    ((2, 2), (0, 2), (-1, 4), (100, 100)),
    ((3,) * 8,) * 4,
    tuple((i % 5, (i * i + 1) % 5, 4, (i + 3) % 5) for i in range(8)),
    ((-1, 5 << 33),),
)
# What entries gather: experts with up to 8 choices and with more, of which one is of every token; a
# last entry that is full, and one of one choice; of few tokens; of many, and as many as there may
# be, of one expert or with as many tokens; and none.
GATHERED = (
    tuple((4, (i * i + 1) % 4, 100 - i, i % 3) for i in range(9)),
    tuple((i // 8 % 3,) for i in range(25)),
    ((0, 1, 2, 3, 4, 4, 4, 4),) * 5,
    tuple((i % 5, (i * i + 1) % 5, 4, (i + 3) % 7 - 1) for i in range(64)),
    ((3, 3, 3, 3),) * 128,
    tuple((i % 5,) for i in range(512)),
    ((-1, 5 << 33),) * 17,
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
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All memory that operators take, full of what is no result, and no NaN."""
    empty, found = torch.empty, []

    def full(*arguments: Any, **options: Any) -> Tensor:
        found.append(empty(*arguments, **options).fill_(UNWRITTEN))
        return found[-1]

    monkeypatch.setattr(torch, "empty", full)
    return found


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch, made: list[Tensor]) -> None:
    """Behind what operators take is memory for what a wrong kernel may take for a choice."""
    empty = torch.empty

    def taken(*shape: Any, **options: Any) -> Tensor:
        (rows, columns) = shape if len(shape) == 2 else shape[0]
        return empty((ROOM, columns), **options)[:rows]

    monkeypatch.setattr(torch, "empty", taken)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch, made: list[Tensor]) -> Callable[[Operands], None]:
    """What the launch just before may still be writing of `operands`, and of y, is late."""

    def launch_early(operands: Operands) -> None:
        launch = Emulation.launch

        def launched(self: Emulation, spec: KernelSpec, *arguments: Any) -> None:
            is_first = dict(spec.defines)["SWIGLU"]
            y = next(each for each in reversed(made) if each.dtype == torch.float32)
            self.late = operands[:2] if is_first else [y]
            launch(self, spec, *arguments)

        monkeypatch.setattr(Emulation, "launch", launched)

    return launch_early


def tiles_of(operands: Operands) -> FewExpertsTiles:
    x, chosen, w13, *_ = operands
    # As if more experts had been there to choose from: no expert's rows are too many.
    num_experts = max(len(w13), -(-chosen.numel() // 4))
    tiles = choose_tiles(len(x), num_experts, x.shape[1], w13.shape[1] // 2, chosen.shape[1])
    assert tiles is not None
    return tiles


def named(choices: tuple[tuple[int, ...], ...]) -> str:
    return f"{len(choices)}x{len(choices[0])}-{choices[-1]}"


def few(operands: Operands, ahead: int = 0) -> Tensor:
    """A row for each choice, NaN of what is no expert."""
    first, second = tiles_of(operands)
    first = replace(first, ahead=max(first.ahead, ahead))
    out, rows = experts_fp8_few((first, second), *operands, **SWIGLU)
    is_none = are_no_experts(operands)
    numbers = torch.arange(len(out), device=out.device)
    assert torch.equal(rows.flatten(), numbers.masked_fill(is_none, -1).int())
    assert bool((out[is_none] == UNWRITTEN).all())
    return out.masked_fill(is_none[:, None], torch.nan)


def are_no_experts(operands: Operands) -> Tensor:
    chosen = operands[1].flatten()
    return (chosen < 0) | (chosen >= len(operands[2]))


# ---- on the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "num_experts", "hidden", "inner"),
    [
        pytest.param(
            *(choices, *shape),
            id=f"{named(choices)}-{shape[1]}x{shape[2]}",
            # Choices that are gathered meet ragged ends of one kind.
            marks=pytest.mark.long if choices in GATHERED and shape == SHAPES[-1] else (),
        )
        for choices in (*CHOICES, *GATHERED)
        for shape in SHAPES
    ],
)
def test_emulated(choices, num_experts: int, hidden: int, inner: int, early) -> None:
    operands = random_operands(choices, num_experts, hidden, inner)
    expected = expected_rows(operands)
    operands = [guarded(operand) for operand in operands]
    early(operands)
    # Blocks that go round their rings of slots, and blocks with nothing to do.
    for seed, num_blocks in enumerate((3, 132 if inner == 128 else 7)):
        with emulated(seed, num_multiprocessors=num_blocks):
            out = few(operands)
        assert error_of(out, expected) < BOUND


@pytest.mark.parametrize(("num_experts", "hidden", "inner"), SHAPES)
def test_nothing_beyond_the_weights_is_fetched(
    num_experts: int, hidden: int, inner: int, early
) -> None:
    operands = random_operands(((0, num_experts - 1),), num_experts, hidden, inner)
    expected = expected_rows(operands)
    operands = [guarded(operand) for operand in operands]
    early(operands)
    for num_blocks in (1, 132):
        with emulated(num_multiprocessors=num_blocks):
            assert error_of(few(operands, ahead=5), expected) < BOUND


def test_a_token_is_the_same_alone_and_an_expert_chosen_twice_is_the_same_twice() -> None:
    choices = ((1, 3), (3, 3), (4, 1))
    operands = random_operands(choices, 6, 336, 208)
    with emulated(1):
        out = few(operands)
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


WRONG = (
    ("fetch_likely();\n            wait_for_previous_kernels();", "fetch_likely();"),
    ("wait_for_previous_kernels();\n            if constexpr (!G", "if constexpr (!G"),
    ("if constexpr (!SWIGLU) wait_for_previous_kernels();\n        const", "const"),
    ("if (has_others) load_scales(scales, after);", ""),
    ("walk.entry != entry", "entry < 0"),  # the first expert's y for all
    (
        "(is_again || earlier == 0)",
        "earlier == 0",
    ),  # nobody has a token's second choice of one expert
    ("choice] = is_expert ? choice : -1", "choice] = choice"),
    ("barrier_wait(shared + SUMMED_OFFSET + ring.slot * 8, ring.phase);", ";"),
    # Sums are announced before all lanes wrote theirs, and a bias is taken before it came.
    (
        "__syncwarp();\n            if (lane == 0) barrier_arrive(shared + SUMMED",
        "if (lane == 0) barrier_arrive(shared + SUMMED",
    ),
    (
        "barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);\n            const float4",
        "const float4",
    ),
    ("(lane % 4 * 2 + i) * 4", "(lane % 4 * 2) * 4"),  # the scale of the token before
    ("BIAS_OFFSET + ring.slot * BIAS_BYTES", "BIAS_OFFSET"),
    ("min(UNITS - inside, BLOCK_UNITS - inside % BLOCK_UNITS)", "UNITS - inside"),
    ("if (ALL || column < K)", ""),
    ("ring.advance(), walk.next()", "walk.next()"),
)


# Of what entries gather. Numbers of choices may be any, then.
WRONG_GATHERED = (
    ("rank[i] = earlier + ", "rank[i] = "),
    ("store_shared(counts + (i * 32 + lane) * 4, 0);", ";"),
    ("left[i] << 16", "(left[i] - 1) << 16"),
    (
        "        __syncwarp();\n        if (expert[i] >= 0 && lane",
        "        if (expert[i] >= 0 && lane",
    ),
    ("        __syncwarp();\n        const uint32_t count", "        const uint32_t count"),
    ("(i * 32 + lane));", "(lane));"),
    ("+ rank[i] / SLOTS);", ");"),
    ("if ((GATHERS || !SWIGLU) && walk", "if (!SWIGLU && walk"),
    ("load_and_quantise_x(choice / CHOSEN,", "load_and_quantise_x(choice % 8,"),
    ("if (i * 32 >= num_choices) break;", "if (i * 32 + 32 >= num_choices) break;"),
    ("    __syncwarp();\n#pragma unroll\n    for (int i = 0; i < R", "    for (int i = 0; i < R"),
)


@pytest.mark.parametrize(
    ("choices", "old", "new"),
    [
        *((((2, 2), (0, 2), (-1, 4), (1, 0)), *each) for each in WRONG),
        *((GATHERED[3], *each) for each in WRONG_GATHERED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_kernel_is_seen(choices, old: str, new: str, early, roomy) -> None:
    operands = random_operands(choices, 6, 336, 208)
    expected = expected_rows(operands)
    x = operands[0]
    operands[0] = torch.cat((x, x.new_zeros(ROOM, 336)))[: len(x)]
    early(operands)
    change = replacing(old, new)
    for seed in range(4):
        # EmulationError is one, and so is what few finds.
        with suppress(AssertionError), emulated(seed, change=change, num_multiprocessors=3):
            if error_of(few(operands), expected) < BOUND:
                continue
        return
    pytest.fail("all seeds were right")


def test_tiles_are_for_what_the_kernel_has_room_for() -> None:
    def gathers(num_tokens: int, chosen: int, *sizes: int) -> bool | None:
        tiles = choose_tiles(num_tokens, 128, *(sizes or (2880, 2880)), chosen)
        return tiles and tiles[0].experts > 0

    for sizes in ((1, 4), (8, 4), (4, 8, 128, 256)):
        assert gathers(*sizes) is False
    for sizes in ((9, 1), (5, 8), (128, 4)):
        assert gathers(*sizes) is True
    for sizes in ((0, 4), (129, 4), (65, 8), (1, 4, 4096, 2880), (1, 4, 2880, 4096)):
        assert gathers(*sizes) is None
    assert choose_tiles(9, 513, 128, 128, 4) is None
    assert choose_tiles(32, 32, 2880, 2880, 4) is not None
    assert choose_tiles(33, 32, 2880, 2880, 4) is None
    assert choose_tiles(8, 1, 2880, 2880, 4) is not None
    x, chosen, *_, w2, _, _ = random_operands(CHOICES[0], *SHAPES[1])
    assert few_tiles(x, chosen, w2) == choose_tiles(1, 6, 336, 208, 2)
    assert few_tiles(x, chosen.int(), w2) is None


@pytest.mark.parametrize(("num_tokens", "is_few"), [(1, True), (8, True), (12, True), (13, False)])
def test_operator_of_any_number_of_tokens(num_tokens: int, is_few: bool) -> None:
    choices = tuple((i % 6, (i + 2) % 6) for i in range(num_tokens))
    operands = random_operands(choices, *SHAPES[1])
    with emulated(1) as emulation:
        out, rows = experts_fp8(*operands, **SWIGLU)
    assert error_of(out[rows.flatten()], expected_rows(operands)) < BOUND
    # Two launches, or dispatch's and two, each of which takes a seed.
    assert emulation.seed == 1 + (2 if is_few else 3)


# ---- on a GPU ----------------------------------------------------------------------------------

gpu = pytest.mark.gpu
SERVED = ((32, 2880, 2880), (128, 2880, 2880), (16, 320, 1088), (8, 128, 128))


def token_choices(num_tokens: int, num_experts: int) -> tuple[tuple[int, ...], ...]:
    """Four experts each at random; the last token's are those of the one before."""
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(4).indices
    chosen[-1] = chosen[max(num_tokens - 2, 0)]
    return tuple(map(tuple, chosen.tolist()))


@gpu
@pytest.mark.parametrize(("num_experts", "hidden", "inner"), SERVED)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 9, 16, 32, 64, 128])
def test_experts(num_tokens: int, num_experts: int, hidden: int, inner: int) -> None:
    choices = token_choices(num_tokens, num_experts)
    operands = random_operands(choices, num_experts, hidden, inner, "cuda")
    torch.cuda.synchronize()  # the second product's choices are read at once
    assert error_of(few(operands), expected_rows(operands)) < BOUND


@gpu
@pytest.mark.parametrize("choices", [*CHOICES, *GATHERED], ids=named)
def test_choices_of_any_kind(choices) -> None:
    operands = random_operands(choices, 6, 2880, 2880, "cuda")
    torch.cuda.synchronize()
    assert error_of(few(operands), expected_rows(operands)) < BOUND


@gpu
def test_a_token_is_the_same_alone() -> None:
    operands = random_operands(token_choices(4, 32), 32, 2880, 2880, "cuda")
    out = few(operands)
    for token in range(4):
        alone = [each[token : token + 1].clone() for each in operands[:2]] + operands[2:]
        torch.cuda.synchronize()
        assert torch.equal(few(alone), out[4 * token : 4 * token + 4])


@gpu
def test_wrong_operands_exceed_the_bound() -> None:
    operands = random_operands(((0, 1, 2, 3), (1, 2, 3, 4)), 5, 2880, 2880, "cuda")
    out = few(operands)
    for place in (0, *range(2, 8)):
        wrong = list(operands)
        # There is no roll of e4m3.
        as_bytes = wrong[place].view(torch.uint8).roll(1, 0)
        wrong[place] = as_bytes.view(wrong[place].dtype)
        assert error_of(out, expected_rows(wrong)) > 5 * BOUND


@gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 32])
def test_replays_follow_the_choices(num_tokens: int) -> None:
    num_experts = 12
    # Weights of all of them.
    choices = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    _, _, *weights = random_operands(choices, num_experts, 2880, 2880, "cuda")
    x = torch.zeros((num_tokens, 2880), dtype=torch.bfloat16, device="cuda")
    operands = [x, torch.zeros((num_tokens, 4), dtype=torch.int64, device="cuda"), *weights]
    tiles = tiles_of(operands)
    experts_fp8_few(tiles, *operands, **SWIGLU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [experts_fp8_few(tiles, *operands, **SWIGLU)[0] for _ in range(3)]
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(30):
        scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
        operands[1].copy_(scores.topk(4).indices)
        operands[0].copy_(normal(generator, num_tokens, 2880) * 2)
        graph.replay()
        expected = expected_rows(operands)
        for out in outs:
            assert error_of(out, expected) < BOUND
        assert torch.equal(outs[0], outs[2])


@gpu
def test_on_two_streams_at_once() -> None:
    both = [random_operands(token_choices(2, n), 32, 2880, 2880, "cuda") for n in (31, 32)]
    expected = [few(operands) for operands in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for stream, operands, outs in zip(streams, both, found, strict=True):
            with torch.cuda.stream(stream):
                outs.append(experts_fp8_few(tiles_of(operands), *operands, **SWIGLU)[0])
    torch.cuda.synchronize()
    for outs, right in zip(found, expected, strict=True):
        assert all(torch.equal(out, right) for out in outs)


def test_of_many_tokens_the_output_is_not_made_beside_what_was_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three such tensors at once would be a third more than a large step needs."""
    operands = random_operands(((0, 1),) * 13, 6, 336, 208)
    x, chosen, *_ = operands
    dispatched: list[weakref.ref[Tensor]] = []

    def dispatch_fp8(*_: object, **__: object) -> tuple[Tensor, ...]:
        parts = tuple(torch.zeros(1) for _ in range(4))
        dispatched.extend(map(weakref.ref, parts[:2]))
        return parts

    def grouped_swiglu_fp8(*_: object, **__: object) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros(1)

    def grouped_linear_fp8(*_: object) -> Tensor:
        assert [each() for each in dispatched] == [None, None]
        return torch.zeros(len(x) * chosen.shape[1])

    for each in (dispatch_fp8, grouped_swiglu_fp8, grouped_linear_fp8):
        monkeypatch.setattr(f"gptoss_kernels.cuda.experts_fp8.{each.__name__}", each)
    out, _ = experts_fp8(*operands, **SWIGLU)
    assert len(out) == 26


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
    place: int, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    operands = random_operands(CHOICES[1], 6, 336, 208)
    operands[place] = change(operands[place])
    with emulated(), pytest.raises(ValueError, match=sentence):
        experts_fp8(*operands, **SWIGLU)


def beside(tensor: Tensor) -> Tensor:
    room = torch.zeros(tensor.numel() + 4)
    skipped = (-room.data_ptr() // 4) % 4 + 1
    return room[skipped:][: tensor.numel()].view(tensor.shape).copy_(tensor)
