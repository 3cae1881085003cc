import inspect

import pytest

from gptoss_kernels import ops, reference


def test_the_reference_has_every_operator_with_the_signature_that_the_engine_calls():
    operators = ops.load("reference")
    for name, declared in inspect.getmembers(ops.Operators, inspect.isfunction):
        if not name.startswith("_"):
            expected = [*inspect.signature(declared).parameters.values()][1:]
            assert [*inspect.signature(getattr(reference, name)).parameters.values()] == expected
            assert getattr(operators, name) is getattr(reference, name)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'cuda_graphs'"):
        ops.load("cuda_graphs")  # type: ignore[arg-type]
