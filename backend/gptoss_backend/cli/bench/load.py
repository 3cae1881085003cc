"""A load's shape, and what its requests saw: TTFT, TPOT, ITL, goodput, in vLLM's words.

TTFT: from when a request was due to its first response with a token. TPOT: from then to the last
one, by the tokens that came after the first response. ITL: between two responses of one answer,
however many tokens they carry. Goodput: requests a second that kept every limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gptoss_backend.cli.bench.results import percentile, rounded
from gptoss_engine.config import InvalidConfig
from gptoss_engine.types import shown

ALL_AT_ONCE = float("inf")
_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Load:
    """num_requests of them, either `concurrency` at any time, or at random times: `rate` a second
    on average, or ALL_AT_ONCE."""

    num_requests: int
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None)

    def due(self, seed: int) -> list[float]:
        """Seconds after the start at which each request is due: a Poisson process's."""
        if self.rate is None or self.rate == ALL_AT_ONCE:
            return [0.0] * self.num_requests
        gaps = np.random.default_rng(seed).exponential(1 / self.rate, self.num_requests)
        gaps[0] = 0.0
        return np.cumsum(gaps).tolist()


@dataclass(frozen=True, slots=True)
class Request:
    """When it was due, and its responses: when each came, with how many tokens; seconds after the
    run's start."""

    due: float
    responses: tuple[tuple[float, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.responses)

    @property
    def _times(self) -> list[float]:
        return [time for time, count in self.responses if count]

    @property
    def ttft(self) -> float:
        return self._times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """None of an answer that came in one response."""
        times = self._times
        later = self.num_tokens - next(count for _, count in self.responses if count)
        return (times[-1] - times[0]) / later if later else None

    @property
    def itls(self) -> list[float]:
        times = self._times
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def e2el(self) -> float:
        return self.responses[-1][0] - self.due


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load took, from its start to its last response, in seconds."""

    load: Load
    seconds: float
    requests: tuple[Request, ...]

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.requests) / self.seconds

    @property
    def mean_running(self) -> float:
        """Answers under way at once: each from its first token to its last."""
        return sum(sum(each.itls) for each in self.requests) / self.seconds

    @property
    def num_responses(self) -> int:
        """Of those that carried tokens."""
        return sum(count > 0 for each in self.requests for _, count in each.responses)

    def figures(self) -> dict[str, Any]:
        """The medians by the names of a result's line, and p50, p90 and p99 of each."""
        seconds = {
            "ttft": [each.ttft for each in self.requests],
            "tpot": [each.tpot for each in self.requests if each.tpot is not None],
            "itl": [itl for each in self.requests for itl in each.itls],
        }
        shares = {
            name: [rounded(1e3 * percentile(values, share)) for share in _SHARES]
            for name, values in seconds.items()
            if values
        }
        medians = {f"{name}_ms": values[0] for name, values in shares.items()}
        return {**dict.fromkeys(("tpot_ms", "itl_ms")), **medians, "percentiles_ms": shares}

    def goodput(self, limits: Mapping[str, float]) -> float:
        """Requests a second within all limits, in ms."""
        good = sum(
            all(1e3 * (getattr(each, name) or 0.0) <= limit for name, limit in limits.items())
            for each in self.requests
        )
        return good / self.seconds


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` in ms, as vLLM's users write them. InvalidConfig names the flag."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise InvalidConfig(
                f"goodput must be ttft, tpot or e2el with milliseconds, such as ttft:500, "
                f"got {shown(word)}"
            )
    return limits


def parse_rates(text: str) -> list[float]:
    """`1,4,inf` requests a second. InvalidConfig names the flag."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise InvalidConfig(
            f"rates must be requests a second above 0, such as 1,4,inf, got {shown(text)}"
        )
    return rates
