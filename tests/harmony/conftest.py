"""The vocabulary, loaded once for the area's tests into a cache of their own; a stand-in for what
tritonserver gives to the adapters."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from gptoss_harmony import vocabulary
from gptoss_harmony.vocabulary import Vocabulary


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPTOSS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def loaded(own_cache: None) -> Vocabulary:
    assert "GPTOSS_CACHE" in os.environ
    return vocabulary.load()


@pytest.fixture(scope="session")
def tokens(loaded: Vocabulary) -> LLTokenizer:
    """The vocabulary as the engine has it for grammars."""
    known = SimpleNamespace(tokens=loaded.token_bytes, bos_token_id=None)
    known.special_token_ids = range(vocabulary.FIRST_CONTROL, vocabulary.NUM_TOKENS)
    known.eos_token_id = vocabulary.RETURN

    class Tokens:
        def __getattr__(self, name: str) -> Any:
            return getattr(known, name)

        def __call__(self, text: str) -> list[int]:
            return loaded.encode(text)

    ends: list[int] = [*vocabulary.STOP_TOKEN_IDS]
    return LLTokenizer(TokenizerWrapper(Tokens()), n_vocab=vocabulary.NUM_TOKENS, eos_token=ends)


class FakeTensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name = lambda: name
        self.as_numpy = lambda: array


class FakeRequest:
    """A request and its response sender: what was sent is in `sent`, None for nothing."""

    def __init__(self, parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self._inputs = [FakeTensor(name, _array(value)) for name, value in inputs.items()]
        self.parameters = lambda: json.dumps(parameters or {})
        self.has_left = False
        self.sent: list[Any] = []

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def is_cancelled(self) -> bool:
        return self.has_left

    def get_response_sender(self) -> "FakeRequest":
        return self

    def send(self, response: Any = None, *, flags: int) -> None:
        assert flags == 1, "every request gets one response or none"
        self.sent.append(response)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    return np.atleast_1d(np.asarray(value, dtype=np.int32))


class FakeTriton(ModuleType):
    """`triton_python_backend_utils`. execute_elsewhere answers requests to other models."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = FakeTensor

    def __init__(self) -> None:
        super().__init__("triton_python_backend_utils")
        self.execute_elsewhere: Callable[[SimpleNamespace], list[Any]] = lambda _: []

    class TritonError(Exception):
        INTERNAL, INVALID_ARG, UNSUPPORTED, CANCELLED = range(4)

        def __init__(self, message: str, code: int) -> None:
            super().__init__(message, code)
            self.message = lambda: message
            self.code = lambda: code

    class InferenceResponse:
        def __init__(self, outputs: list[Any] | None = None, error: Any = None) -> None:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in outputs or ()}
            self.outputs = {name: array.reshape(-1)[0] for name, array in tensors.items()}
            self.arrays = tensors
            self.error = lambda: error
            self.has_error = lambda: error is not None

    class MetricFamily:
        COUNTER = 0
        families: ClassVar[dict[str, "FakeTriton.MetricFamily"]] = {}

        def __init__(self, name: str, **_: Any) -> None:
            self.values: dict[str, int] = {}
            self.families[name] = self

        def _metric(self, labels: dict[str, str]) -> Any:
            (label,) = labels.values()

            def increment(number: int) -> None:
                self.values[label] = self.values.get(label, 0) + number

            return SimpleNamespace(increment=increment)

        Metric = _metric

    def _request(self, **fields: Any) -> Any:
        request = SimpleNamespace(**fields)
        request.exec = lambda decoupled: self.execute_elsewhere(request)
        return request

    InferenceRequest = _request


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTriton]:
    fake = FakeTriton()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    yield fake
    for name in ("preprocess_model", "postprocess_model"):
        sys.modules.pop(f"gptoss_harmony.{name}", None)


@pytest.fixture
def request_type() -> type[FakeRequest]:
    return FakeRequest
