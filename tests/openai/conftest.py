"""One gateway before one fake ensemble, for the tests that want no other configuration."""

from collections.abc import Iterator

import pytest

from .fakes import FakeEnsemble, Stack, running


@pytest.fixture(scope="module")
def _stack() -> Iterator[Stack]:
    with running() as stack:
        yield stack


@pytest.fixture
def stack(_stack: Stack) -> Stack:
    _stack.fake.script = FakeEnsemble().script
    _stack.fake.requests.clear()
    return _stack
