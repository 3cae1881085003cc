"""Where the cache lies, by environment."""

from pathlib import Path

import pytest

from gptoss_engine.cache import CacheError, cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"GPTOSS_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/gptoss"),
        ({"HOME": "/c"}, "/c/.cache/gptoss"),
    ],
)
def test_the_nearest_wish_wins(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    for name in ("GPTOSS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_no_home_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GPTOSS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CacheError, match="set GPTOSS_CACHE"):
        cache_folder()
