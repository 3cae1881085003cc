import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptoss_kernels import composed as composed_module
from gptoss_kernels import ops, reference
from gptoss_kernels.composed import ComposedOperators
from gptoss_kernels.fp8 import Fp8Weight, quantise_weight


def test_the_reference_has_every_operator_with_the_signature_that_the_engine_calls():
    operators = ops.load("reference")
    for name, declared in inspect.getmembers(ops.Operators, inspect.isfunction):
        if not name.startswith("_"):
            expected = [*inspect.signature(declared).parameters.values()][1:]
            assert [*inspect.signature(getattr(reference, name)).parameters.values()] == expected
            assert getattr(operators, name) is getattr(reference, name)


@pytest.mark.parametrize(
    ("protocol", "load", "name"),
    [
        *((ops.Fp8Operators, ops.load_fp8, name) for name in ops.GEMMS),
        *((ops.AttentionOperators, ops.load_attention, name) for name in ops.ATTENTIONS),
        *((ops.CommonOperators, ops.load_common, name) for name in ("cuda", "reference")),
    ],
)
def test_every_implementation_takes_what_its_protocol_says(
    protocol: type, load: Callable[[str], object], name: str
):
    implementation = load(name)
    for operator, declared in inspect.getmembers(protocol, inspect.isfunction):
        if not operator.startswith("_"):
            own = dict(inspect.signature(getattr(implementation, operator)).parameters)
            for wanted in [*inspect.signature(declared).parameters.values()][1:]:
                found = own.pop(wanted.name)
                assert (found.kind, found.default) == (wanted.kind, wanted.default), operator
            for further in own.values():
                assert further.kind is inspect.Parameter.KEYWORD_ONLY, (operator, further)
                assert further.default is not inspect.Parameter.empty, (operator, further)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("cublas", "reference"), "gemm must be one of cuda, triton, deepgemm, reference, got 'cu"),
        (("reference", "xqa"), "attention must be one of cuda, triton, flashinfer, refer.* 'xqa'"),
    ],
)
def test_an_unknown_implementation_is_refused(names: tuple[Any, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ops.load(*names)


def random_weight(*shape: int) -> Fp8Weight:
    parts = [quantise_weight(torch.randn(shape[-2:])) for _ in range(shape[0])]
    return Fp8Weight(torch.stack([p.values for p in parts]), torch.stack([p.scale for p in parts]))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
def test_composed_operators_compute_what_the_reference_does(num_tokens: int):
    composed = ComposedOperators(reference, reference)
    hidden, inner, num_experts = 192, 144, 6
    x = torch.randn(num_tokens, hidden).bfloat16()
    weight = quantise_weight(torch.randn(136, hidden))
    bias, residual = torch.randn(136), torch.randn(num_tokens, 136).bfloat16()
    for options in ({}, {"residual": residual}):
        expected = reference.linear(x, weight, bias, **options)
        assert torch.equal(composed.linear(x, weight, bias, **options), expected)
    norm_weight = torch.rand(hidden)
    for each in (weight, torch.randn(136, hidden).bfloat16()):
        expected = reference.norm_linear(x, norm_weight, 1e-5, each)
        assert torch.equal(composed.norm_linear(x, norm_weight, 1e-5, each), expected)

    router = torch.randn(num_experts, hidden).bfloat16()
    chosen, chosen_weights = reference.route(x, router, torch.zeros(num_experts), 3)
    assert chosen.is_contiguous()  # as every dispatch_fp8 demands
    assert chosen_weights.is_contiguous()
    arguments = (
        *(x, chosen, chosen_weights),
        *(random_weight(num_experts, 2 * inner, hidden), torch.randn(num_experts, 2 * inner)),
        *(random_weight(num_experts, hidden, inner), torch.randn(num_experts, hidden)),
    )
    options: Any = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    for added in (torch.randn_like(x), None):
        expected = reference.combine(*reference.experts(*arguments, **options), residual=added)
        found = composed.combine(*composed.experts(*arguments, **options), residual=added)
        assert torch.equal(found, expected)
    # With the norm behind it.
    update = composed.experts(*arguments, **options)
    assert torch.equal(
        composed.norm_linear(hidden_states := x.clone(), norm_weight, 1e-5, weight, update=update),
        reference.norm_linear(combined := x.clone(), norm_weight, 1e-5, weight, update=update),
    )
    assert torch.equal(hidden_states, combined)
    # Another expert's bias is no rounding.
    arguments[6].copy_(arguments[6].roll(1, 0))
    if num_tokens:
        found = composed.combine(*composed.experts(*arguments, **options))
        assert not torch.allclose(found, expected)


def test_plain_weights_are_multiplied_by_what_stands_beside_the_fp8_operators():
    def linear(*operands: Any, **options: Any) -> torch.Tensor:
        return reference.linear(*operands, **options) + 1

    common: Any = SimpleNamespace(**{**vars(reference), "linear": linear})
    composed = ComposedOperators(reference, reference, common)
    x, weight, norm_weight = torch.randn(3, 192), torch.randn(136, 192), torch.rand(192)
    options: dict[str, Any] = {"residual": torch.randn(3, 136)}
    expected = reference.linear(x, weight, **options) + 1
    assert torch.equal(composed.linear(x, weight, **options), expected)
    expected = reference.norm_linear(x, norm_weight, 1e-5, weight) + 1
    assert torch.equal(composed.norm_linear(x, norm_weight, 1e-5, weight), expected)


@pytest.mark.parametrize("has_residual", [False, True])
def test_many_tokens_go_to_their_experts_in_pieces(
    has_residual: bool, monkeypatch: pytest.MonkeyPatch
):
    composed = ComposedOperators(reference, reference)
    x, residual = torch.randn(2, 40, 64).bfloat16()
    chosen, chosen_weights = torch.randint(4, (40, 2)), torch.rand(40, 2).bfloat16()
    chosen[17, 1] = -1  # a token without experts
    arguments = (
        *(x, chosen, chosen_weights),
        *(random_weight(4, 32, 64), torch.randn(4, 32)),
        *(random_weight(4, 64, 16), torch.randn(4, 64)),
    )
    options: Any = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    added = residual if has_residual else None
    expected = composed.combine(*composed.experts(*arguments, **options))
    expected = expected if added is None else expected + added
    monkeypatch.setattr(composed_module, "MAXIMUM_TOKENS", 16)
    found = composed.combine(*composed.experts(*arguments, **options), residual=added)
    assert found.isnan().any(1).nonzero().flatten().tolist() == [17]
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
