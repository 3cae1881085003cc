"""Where this package keeps what it can make again: the expanded demo, assembled backend folders."""

import os
from pathlib import Path


class CacheError(RuntimeError):
    """There is no place for the cache: a sentence that says how to name one."""


def cache_folder() -> Path:
    """$GPTOSS_CACHE, else $XDG_CACHE_HOME/gptoss, else ~/.cache/gptoss; it may not exist yet."""
    if chosen := os.environ.get("GPTOSS_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "gptoss"
    try:
        return Path.home() / ".cache" / "gptoss"
    except RuntimeError:
        raise CacheError(
            "a cache folder is needed and there is no home folder: set GPTOSS_CACHE"
        ) from None
