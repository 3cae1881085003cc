"""What dashboards scrape, under the names that vLLM's dashboards already know.

Every change of a metric crosses from the model's process to the server. So the engine's side only
adds up numbers here, and `flush` carries them over a few times a second.
"""

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

from gptoss_engine.types import EngineStats, FinishReason

_SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0]
_SECONDS_A_TOKEN = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5]

_FINISHED = "vllm:request_success_total"
_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
_BETWEEN_TOKENS = "vllm:request_time_per_output_token_seconds"
_END_TO_END = "vllm:e2e_request_latency_seconds"
_COUNTERS = {
    "vllm:prompt_tokens_total": "Prompt tokens, computed or found in the prefix cache",
    "vllm:prefix_cache_queries_total": "Prompt tokens that the prefix cache was asked for",
    "vllm:prefix_cache_hits_total": "Prompt tokens that the prefix cache had",
    "vllm:generation_tokens_total": "Tokens generated",
    "vllm:num_preemptions_total": "Times that a sequence lost its pages and was computed again",
    "gptoss:aborted_generations_total": "Generations ended by their client, or by their deadline",
}
_GAUGES = {
    "vllm:num_requests_running": "Sequences that the engine computes now",
    "vllm:num_requests_waiting": "Sequences admitted and not yet started",
    "vllm:kv_cache_usage_perc": "Used share of the fuller page group, 0 to 1",
}
_HISTOGRAMS = {
    _FIRST_TOKEN: ("From admission to the first token", _SECONDS),
    _BETWEEN_TOKENS: (
        "Mean time between the tokens of a generation",
        _SECONDS_A_TOKEN,
    ),
    _END_TO_END: ("From admission to the last token", _SECONDS),
}


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished generation; seconds since admission, first_token None where none came."""

    num_tokens: int
    first_token: float | None
    last_token: float


class EngineMetrics:
    """The metrics of one engine model, told from another's by its name and version.

    `server` is the module triton_python_backend_utils, which only adapters import. Metrics of the
    same name and labels are one metric of the server's, whoever makes them: two engine models
    without labels would overwrite each other. `model` and `version` are the server's own words,
    `model_name` is what vLLM's dashboards select by.
    """

    def __init__(self, server: ModuleType, model_name: str, version: str) -> None:
        labels = {"model": model_name, "version": version, "model_name": model_name}
        family = server.MetricFamily
        self._families = []

        def make(kind: Any, name: str, description: str) -> Any:
            made = family(name=name, description=description, kind=kind)
            self._families.append(made)  # a metric dies with its family
            return made

        self._counters = {
            name: make(family.COUNTER, name, text).Metric(labels=labels)
            for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: make(family.GAUGE, name, text).Metric(labels=labels)
            for name, text in _GAUGES.items()
        }
        self._histograms = {
            name: make(family.HISTOGRAM, name, text).Metric(labels=labels, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        finished = make(family.COUNTER, _FINISHED, "Finished generations by finish reason")
        for reason in get_args(FinishReason):
            metric = finished.Metric(labels=labels | {"finished_reason": reason})
            self._counters[f"{_FINISHED} {reason}"] = metric
        self._lock = threading.Lock()
        self._news: list[Finished] = []
        self._told: dict[str, float] = {}

    def finished(self, generation: Finished) -> None:
        with self._lock:
            self._news.append(generation)

    def flush(self, stats: EngineStats) -> None:
        with self._lock:
            news, self._news = self._news, []
        for generation in news:
            self._observe(generation)
        usage = max(
            stats.num_used_pages / stats.num_pages,
            stats.num_used_window_pages / stats.num_window_pages,
        )
        aborted = stats.num_finished.get("abort", 0)
        self._raise("vllm:prompt_tokens_total", stats.num_prompt_tokens)
        self._raise("vllm:prefix_cache_queries_total", stats.num_queried_tokens)
        self._raise("vllm:prefix_cache_hits_total", stats.num_hit_tokens)
        self._raise("vllm:generation_tokens_total", stats.num_generated_tokens)
        self._raise("vllm:num_preemptions_total", stats.num_preemptions)
        self._raise("gptoss:aborted_generations_total", aborted)
        for reason, total in stats.num_finished.items():
            self._raise(f"{_FINISHED} {reason}", total)
        # Last, so that whoever sees the engine idle sees what it has counted.
        self._set("vllm:num_requests_running", stats.num_running)
        self._set("vllm:num_requests_waiting", stats.num_waiting)
        self._set("vllm:kv_cache_usage_perc", usage)

    def _set(self, name: str, value: float) -> None:
        if self._told.get(name) != value:
            self._gauges[name].set(value)
            self._told[name] = value

    def _raise(self, name: str, total: float) -> None:
        """Bring a counter to `total`; the engine's and the server's both start at 0."""
        if more := total - self._told.get(name, 0):
            self._counters[name].increment(more)
            self._told[name] = total

    def _observe(self, generation: Finished) -> None:
        self._histograms[_END_TO_END].observe(generation.last_token)
        if generation.first_token is None:
            return
        self._histograms[_FIRST_TOKEN].observe(generation.first_token)
        if generation.num_tokens > 1:
            seconds = generation.last_token - generation.first_token
            self._histograms[_BETWEEN_TOKENS].observe(seconds / (generation.num_tokens - 1))
