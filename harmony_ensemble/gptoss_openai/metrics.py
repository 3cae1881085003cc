"""What the gateway counts, beside tritonserver's own metrics."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from gptoss_openai.store import ResponseStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)


class GatewayMetrics:
    def __init__(self, store: ResponseStore) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "gptoss:gateway_requests",
            "Answered HTTP requests",
            ("route", "status"),
            registry=self._registry,
        )
        self.open_requests = Gauge(
            "gptoss:gateway_open_requests", "HTTP requests under way", registry=self._registry
        )
        self.first_byte = Histogram(
            "gptoss:gateway_time_to_first_byte_seconds",
            "From a request's body to the first byte of its answer",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.cut = Counter(
            "gptoss:gateway_cut_answers",
            "Answers that ended early: the client left or did not read, the model's server failed "
            "in a stream, or the gateway stopped",
            ("reason",),
            registry=self._registry,
        )
        for name, meaning, value in (
            ("responses", "Responses that previous_response_id may name", lambda: len(store)),
            ("bytes", "Their size", lambda: store.num_bytes),
        ):
            gauge = Gauge(f"gptoss:gateway_stored_{name}", meaning, registry=self._registry)
            gauge.set_function(value)

    def as_text(self) -> bytes:
        return generate_latest(self._registry)
