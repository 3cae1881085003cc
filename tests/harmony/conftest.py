"""The vocabulary, loaded once for the area's tests into a cache of their own."""

import os
from collections.abc import Iterator

import pytest

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
