"""norm_route in CUDA C++ against float64 and the reference, emulated and on a GPU; bad input.

Sums of logits come in any order, so one may be rounded to the neighbouring bf16, and then another
of two experts that nearly tie is chosen. Inputs whose sums are exact have no such choice.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Routed
from gptoss_kernels.cuda.norm_route import most_together, norm_route

from .emulator import EmulationError, emulated, replacing

EPS = 1e-5
SHARE = 1e-2  # of tokens that may choose otherwise; seen on the CPU, in fp32: below 1e-3
# Hidden size, experts, chosen: the served ones, and some whose ends lie within what a block has.
MODELS = ((2880, 128, 4), (2880, 32, 4), (320, 16, 4), (128, 8, 2), (336, 100, 3), (16, 3, 3))

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Change = Callable[[str], str] | None


def random_inputs(
    num_tokens: int, columns: int, num_experts: int, device: str = "cuda", seed: int = 0
) -> Inputs:
    """hidden, norm_weight, weight, bias"""
    generator = torch.Generator(device=device).manual_seed(seed + num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    norm_weight, bias = normal(columns).exp(), normal(num_experts).bfloat16()
    weight = (normal(num_experts, columns) * columns**-0.5).bfloat16()
    hidden = normal(num_tokens, columns) * normal(num_tokens, 1).exp() * 10
    return hidden.bfloat16(), norm_weight, weight, bias


def tying_inputs(num_tokens: int, columns: int, num_experts: int, device: str = "cuda") -> Inputs:
    """Norms of 1 and -1 and some 40 weights of -2 to 2: logits are whole numbers that tie often."""
    hidden, norm_weight, weight, bias = random_inputs(num_tokens, columns, num_experts, device)
    hidden = torch.where(hidden < 0, -5.0, 5.0).bfloat16()
    weight = (weight * columns**0.5).round().clamp(-2, 2)
    weight *= torch.arange(columns, device=device) % (columns // 40 | 1) == 0
    return hidden, torch.ones_like(norm_weight), weight, bias.round()


def poisoned(num_tokens: int, columns: int, num_chosen: int, device: str = "cuda") -> Routed:
    bf16 = {"dtype": torch.bfloat16, "device": device}
    return Routed(
        torch.full((num_tokens, columns), math.nan, **bf16),
        torch.full((num_tokens, num_chosen), 2**40, device=device),
        torch.full((num_tokens, num_chosen), math.nan, **bf16),
    )


def agrees(found: Routed, expected: Routed) -> bool:
    """But for the last bit of a weight, whose powers are approximations."""
    off = (found[2].double() - expected[2].double()).abs() > 2**-7 * expected[2].abs()
    return all(map(torch.equal, found[:2], expected[:2])) and not bool(off.any())


def share_that_is_wrong(found: Routed, inputs: Inputs) -> float:
    """Of the tokens; inf if a norm is more than a rounding off, or a choice than a near tie."""
    hidden, norm_weight, weight, bias = inputs
    normed, chosen, weights = found
    x = hidden.double()
    exact = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm_weight.double()
    if not bool(((normed.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-30).all()):
        return math.inf
    logits = normed.double() @ weight.double().T + bias.double()
    expected, expected_weights = reference.route(normed, weight, bias, chosen.shape[1])
    behind = logits.gather(1, expected) - logits.gather(1, chosen)
    if not bool((behind.abs() <= logits.abs().amax() * 2**-7).all()):
        return math.inf
    is_wrong = (chosen != expected).any(1)
    # A weight is a rounding off, of bf16, or of a logit.
    off = ((weights.double() - expected_weights.double()).abs() > 2**-7 * expected_weights).any(1)
    return float((is_wrong | off).double().mean())


# ---- on the emulator ---------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("columns", "num_experts", "num_chosen"), MODELS)
def test_emulated(columns: int, num_experts: int, num_chosen: int, together: bool) -> None:
    for seed, num_tokens in enumerate((1, 21)):
        inputs = tying_inputs(num_tokens, columns, num_experts, "cpu")
        out = poisoned(num_tokens, columns, num_chosen, "cpu")
        with emulated(seed, num_multiprocessors=16):
            norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen, out=out, together=together)
        expected = reference.norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen)
        assert agrees(out, expected)
    inputs = random_inputs(9, columns, num_experts, "cpu")
    with emulated(2, num_multiprocessors=8):
        found = norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen, together=together)
    assert share_that_is_wrong(found, inputs) == 0


def wrong_emulated(old: str, new: str = "") -> bool:
    """Of the one launch, which then loses a tie, or a token, or a number."""
    inputs = tying_inputs(60, 336, 32, "cpu")
    expected = reference.norm_route(*inputs[:2], EPS, *inputs[2:], 4)
    found = []
    for seed in range(4):
        options = {"num_multiprocessors": 4, "late": inputs[:1], "change": replacing(old, new)}
        with emulated(seed, **options):
            found.append(norm_route(*inputs[:2], EPS, *inputs[2:], 4, together=True))
    return not all(agrees(each, expected) for each in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(0xFFFF - expert)", "expert"),  # the last of equal experts
        ("if (keys[i] == best)", "if (false)"),  # the first one, again and again
        ("wait_for_previous_kernels();", "if (false) wait_for_previous_kernels();"),
        ("cluster_sync();\n    else", ";\n    else"),  # keys that have not come
        (", turn ^= 1", ""),  # keys of the next tile among this one's
        ("sum / COLUMNS + eps", "sum / PADDED_COLUMNS + eps"),
        ("logit_of(own) - logit_of(largest)", "logit_of(largest) - logit_of(own)"),
        ("own_expert < EXPERTS ? key_of", "own_expert < EXPERTS - 1 ? key_of"),
    ],
)
def test_a_wrong_kernel_is_seen(old: str, new: str) -> None:
    with suppress(EmulationError):
        assert wrong_emulated(old, new)


def test_zeros_of_both_signs_tie_and_a_nan_chooses_nothing() -> None:
    hidden, norm_weight, weight, _ = tying_inputs(3, 320, 16, "cpu")
    weight[:] = 0
    bias = torch.tensor([-1.0, -0.0, 0.0, -0.0] + [-2.0] * 12).bfloat16()
    hidden[1, 7] = math.nan
    for together in (True, False):
        with emulated():
            _, chosen, weights = norm_route(
                hidden, norm_weight, EPS, weight, bias, 4, together=together
            )
        assert chosen.tolist() == [[1, 2, 3, 0], [-1] * 4, [1, 2, 3, 0]]
        assert bool(weights[1].isnan().all())
        assert bool(weights[::2].isfinite().all())


RANKS = [range(16), range(16, 32), range(5, 6)]  # of 32 experts


def rank_agrees(inputs: Inputs, experts: range, together: bool, change: Change = None) -> bool:
    """With its own experts alone, of a token without any, too, which no rank has."""
    device = str(inputs[0].device)
    out = poisoned(len(inputs[0]), inputs[0].shape[1], 4, device)
    with emulated(change=change, late=inputs[:1]) if device == "cpu" else nullcontext():
        norm_route(*inputs[:2], EPS, *inputs[2:], 4, out=out, experts=experts, together=together)
    expected = reference.norm_route(*inputs[:2], EPS, *inputs[2:], 4, experts=experts)
    # NaN equal nothing.
    is_nan = torch.equal(out.weights.isnan(), expected.weights.isnan())
    out, expected = (each._replace(weights=each.weights.nan_to_num()) for each in (out, expected))
    known = inputs[0].isfinite().all(1)
    out, expected = (each._replace(normed=each.normed[known]) for each in (out, expected))
    return is_nan and agrees(out, expected)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("experts", RANKS)
def test_another_ranks_experts_cost_and_add_nothing(experts: range, together: bool) -> None:
    inputs = tying_inputs(21, 336, 32, "cpu")
    inputs[0][4, 3] = math.nan
    assert rank_agrees(inputs, experts, together)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("expert - arguments.own.first", "expert"),
        ("share = 0", "share = weight"),
        ("if (expert >= 0) share", "share"),
        ("number) >= uint32_t", "number) > uint32_t"),
    ],
)
def test_another_ranks_expert_taken_for_ones_own_is_seen(old: str, new: str) -> None:
    inputs = tying_inputs(21, 336, 32, "cpu")
    inputs[0][4, 3] = math.nan
    assert not all(rank_agrees(inputs, own, True, replacing(old, new)) for own in RANKS)


def test_tokens_that_are_read_before_the_kernel_before_has_ended_are_seen() -> None:
    wait, load = "    wait_for_previous_kernels();\n", "tokens.load(arguments, first, place);\n"

    def change(text: str) -> str:
        return text.replace(wait, "").replace(load, load + wait)

    inputs = tying_inputs(3, 336, 32, "cpu")
    assert rank_agrees(inputs, RANKS[0], True)
    assert not all(rank_agrees(inputs, experts, True, change) for experts in RANKS)


# ---- on a GPU ----------------------------------------------------------------------------------

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("num_tokens", [3, 300])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("experts", RANKS)
def test_a_rank_on_a_gpu(experts: range, together: bool, num_tokens: int) -> None:
    inputs = tying_inputs(num_tokens, 336, 32)
    inputs[0][1, 3] = math.nan
    torch.cuda.synchronize()
    assert rank_agrees(inputs, experts, together)


@gpu
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("columns", "num_experts", "num_chosen"), MODELS)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 127, 128, 137, 1000, 3000])
def test_routing(
    num_tokens: int, columns: int, num_experts: int, num_chosen: int, together: bool
) -> None:
    inputs = tying_inputs(num_tokens, columns, num_experts)
    out = poisoned(num_tokens, columns, num_chosen)
    norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen, out=out, together=together)
    assert agrees(out, reference.norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen))
    inputs = random_inputs(num_tokens, columns, num_experts)
    found = norm_route(*inputs[:2], EPS, *inputs[2:], num_chosen, together=together)
    # One near tie may lie among any number of tokens.
    assert share_that_is_wrong(found, inputs) <= max(SHARE, 1 / num_tokens)


@gpu
def test_wrong_routing_exceeds_the_bound() -> None:
    inputs = random_inputs(500, 2880, 128)
    hidden, norm_weight, weight, bias = inputs
    for wrong in (
        (hidden, norm_weight, weight.roll(1, 1), bias),
        (hidden, norm_weight, weight, bias.roll(1)),
        (hidden, norm_weight.roll(1), weight, bias),
    ):
        found = norm_route(*wrong[:2], EPS, *wrong[2:], 4)
        assert share_that_is_wrong(found, inputs) > 10 * SHARE


@gpu
def test_what_is_chosen_without_a_number_of_launches() -> None:
    for num_experts in (128, 32):
        most = most_together(num_experts)
        for num_tokens in (most, most + 1):
            inputs = tying_inputs(num_tokens, 2880, num_experts)
            expected = reference.norm_route(*inputs[:2], EPS, *inputs[2:], 4)
            found = norm_route(*inputs[:2], EPS, *inputs[2:], 4)
            assert torch.equal(found[1], expected[1])
    wide = tying_inputs(5, 4096, 200)
    expected = reference.norm_route(*wide[:2], EPS, *wide[2:], 8)
    assert torch.equal(norm_route(*wide[:2], EPS, *wide[2:], 8)[1], expected[1])


@gpu
@pytest.mark.parametrize("num_tokens", [1, 30, 2000])
def test_captured_graph_is_eager(num_tokens: int) -> None:
    inputs = random_inputs(num_tokens, 2880, 128, seed=1)
    others = random_inputs(num_tokens, 2880, 128, seed=2)
    out = poisoned(num_tokens, 2880, 4)
    norm_route(*inputs[:2], EPS, *inputs[2:], 4, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm_route(*inputs[:2], EPS, *inputs[2:], 4, out=out)
    for mine, other in zip(inputs, others, strict=True):
        mine.copy_(other)
    graph.replay()
    assert agrees(out, norm_route(*others[:2], EPS, *others[2:], 4))


@gpu
@pytest.mark.parametrize("num_tokens", [3, 2000])
def test_rows_apart_a_token_with_a_nan_and_nothing_beside_is_written(num_tokens: int) -> None:
    inputs = random_inputs(num_tokens, 2880 + 32, 128)
    hidden, weights = inputs[0][:, 16:-16], (inputs[1][:2880], inputs[2][:, :2880].contiguous())
    expected = norm_route(hidden.contiguous(), weights[0], EPS, weights[1], inputs[3], 4)
    hidden[1, 5] = math.nan
    around = torch.full((num_tokens + 2, 2880 + 32), 7.0, device="cuda", dtype=torch.bfloat16)
    out = poisoned(num_tokens, 2880, 4)._replace(normed=around[1:-1, 16:-16])
    norm_route(hidden, weights[0], EPS, weights[1], inputs[3], 4, out=out)
    others = torch.arange(num_tokens, device="cuda") != 1
    for found, right in zip(out, expected, strict=True):
        assert torch.equal(found[others], right[others])
    assert bool(out[0][1].isnan().all())
    assert out[1][1].tolist() == [-1] * 4
    assert bool(out[2][1].isnan().all())
    out[0].fill_(7)
    assert bool((around == 7).all())


@gpu
def test_no_tokens() -> None:
    inputs = random_inputs(0, 320, 16)
    shapes = [each.shape for each in norm_route(*inputs[:2], EPS, *inputs[2:], 4)]
    assert shapes == [(0, 320), (0, 4), (0, 4)]


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [4, 2000])
@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda hidden: hidden.float(), "hidden must be torch.bfloat16, got torch.float32"),
        (0, lambda hidden: hidden[0], r"hidden must be a matrix with .*, got \[320\]"),
        (1, lambda weight: weight.bfloat16(), "weight must be torch.float32, got torch.bfloat16"),
        (2, lambda weight: weight.float(), "weight must be torch.bfloat16, got torch.float32"),
        (2, lambda weight: weight[:, :304], r"weight must be \[E, 320\], got \[16, 304\]"),
        (2, lambda weight: weight.t().contiguous().t(), "weight must be contiguous"),
        (3, lambda bias: bias.float(), "bias must be torch.bfloat16, got torch.float32"),
        (3, lambda bias: bias[:8], r"bias must be \[16\], got \[8\]"),
        (4, lambda count: 0, "K must be 1 to 16, the experts, got 0"),
        (4, lambda count: 17, "K must be 1 to 16, the experts, got 17"),
        (4, lambda count: 9, "K must be at most 8, got 9"),
        (0, lambda hidden: hidden, "hidden must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(num_tokens: int, position: int, change, sentence: str) -> None:
    inputs = [*random_inputs(num_tokens, 320, 16, "cpu"), 4]
    inputs[position] = change(inputs[position])
    hidden, norm_weight, weight, bias, num_chosen = inputs
    with pytest.raises(ValueError, match=sentence):
        norm_route(hidden, norm_weight, EPS, weight, bias, num_chosen)


@pytest.mark.parametrize("experts", [range(0), range(8, 17), range(-1, 3), range(0, 16, 2)])
@pytest.mark.parametrize("num_tokens", [4, 2000])
def test_experts_that_are_none_are_refused(num_tokens: int, experts: range) -> None:
    inputs = random_inputs(num_tokens, 320, 16, "cpu")
    sentence = rf"experts must be some of range\(0, 16\), got range\({experts.start}, "
    with pytest.raises(ValueError, match=sentence):
        norm_route(*inputs[:2], EPS, *inputs[2:], 4, experts=experts)


def test_one_launch_for_more_than_a_cluster_has_is_refused() -> None:
    inputs = random_inputs(4, 320, 129, "cpu")
    sentence = r"one launch routes to up to 128 experts by up to 2880 columns, got \[129, 320\]"
    with emulated(), pytest.raises(ValueError, match=sentence):
        norm_route(*inputs[:2], EPS, *inputs[2:], 4, together=True)
