"""What the server tests ask of a running server, over gRPC and HTTP."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest
from tritonclient.grpc import InferInput
from tritonclient.utils import np_to_triton_dtype

from gptoss_backend.client import ChatClient, ChatResponse, as_arrays
from gptoss_backend.server import TritonServer

_LABELS = re.compile(r'([a-z_]+)="([^"]*)"')
_MODEL_LABELS = ("model", "model_name", "version")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(slots=True)
class Answer:
    """All responses of one request, joined."""

    responses: list[ChatResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(response.text for response in self.responses)

    @property
    def reasoning(self) -> str:
        return "".join(response.reasoning for response in self.responses)

    @property
    def finish_reasons(self) -> list[str]:
        return [each.finish_reason for each in self.responses if each.finish_reason]

    @property
    def tool_calls(self) -> list[dict[str, str]]:
        calls: list[dict[str, str]] = []
        for response in self.responses:
            for delta in response.tool_calls:
                if delta.index == len(calls):
                    calls.append({"id": delta.call_id, "name": delta.name, "arguments": ""})
                calls[delta.index]["arguments"] += delta.arguments
        return calls


@dataclass(frozen=True, slots=True)
class Client:
    server: TritonServer

    def ask(self, **fields: Any) -> Answer:
        with ChatClient(self.server.ports.url("grpc")) as client:
            return Answer(list(client.ask(**fields)))

    def ask_all(self, requests: list[dict[str, Any]], num_at_once: int) -> list[Answer]:
        with ThreadPoolExecutor(num_at_once) as threads:
            return list(threads.map(lambda fields: self.ask(**fields), requests))

    def open(self, **fields: Any) -> Any:
        """The stream of one answer, to be left early: leave with close()."""
        return closing(_open(self.server.ports.url("grpc"), fields))

    def generate(self, **inputs: Any) -> list[dict[str, Any]]:
        """All responses of the engine model, called directly."""
        with ChatClient(self.server.ports.url("grpc")) as client:
            return list(client.stream("gpt_oss_engine", inputs))

    def post(self, model: str, body: dict[str, Any], verb: str = "generate") -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"http://{self.server.ports.url('http')}/v2/models/{model}/{verb}",
            data=json.dumps(body).encode(),
        )
        try:
            with _DIRECT.open(request, timeout=60) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def scrape(self) -> str:
        url = f"http://{self.server.ports.url('metrics')}/metrics"
        with _DIRECT.open(url, timeout=10) as response:
            return response.read().decode()

    def metrics(self, model: str = "gpt_oss_engine") -> dict[str, float]:
        """By name and labels as the server prints them, without the labels that name the model.

        Those of other models are left out.
        """
        found: dict[str, float] = {}
        for line in self.scrape().splitlines():
            if not line or line.startswith("#"):
                continue
            name, value = line.rsplit(" ", 1)
            name, _, rest = name.partition("{")
            labels = dict(_LABELS.findall(rest))
            if labels.get("model", model) == model:
                own = [f'{k}="{v}"' for k, v in labels.items() if k not in _MODEL_LABELS]
                found[name + (f"{{{','.join(own)}}}" if own else "")] = float(value)
        return found

    def is_idle(self) -> bool:
        metrics = self.metrics()
        return not any(
            metrics[name]
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
            )
        )


def _open(url: str, fields: dict[str, Any]) -> Generator[ChatResponse, None, None]:
    with ChatClient(url) as client, closing(client.ask(**fields)) as responses:
        yield from responses


def as_tensors(inputs: dict[str, Any]) -> list[InferInput]:
    """For tritonclient's own calls."""
    tensors = []
    for name, array in as_arrays(inputs).items():
        tensors.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


def eventually(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until `condition` held; fails when it does not hold in time."""
    started = time.monotonic()
    pause = threading.Event()
    while not condition():
        if time.monotonic() - started > seconds:
            pytest.fail(f"not true within {seconds} seconds: {condition}")
        pause.wait(0.02)
    return time.monotonic() - started
