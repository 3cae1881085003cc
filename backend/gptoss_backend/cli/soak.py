"""`gptoss soak`: many clients at a server for a long time, some of whom leave, err or ask too much.

Every request must have exactly one end: an answer its finish reason, a refusal a sentence before
any response. In the end nobody runs or waits, no page is used, the server has counted as many ends
as were admitted, and no process has grown.
"""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer

from gptoss_backend.cli.bench.flags import Output, Seed
from gptoss_backend.cli.bench.results import Report, rounded
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.options import engine_config
from gptoss_backend.client import ChatClient, RequestFailed
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig
from gptoss_engine.progress import count_bar

_READY_SECONDS = 600
_SETTLE_SECONDS = 30
_SETTLED_SECONDS = 2  # without news of an end
_SAMPLE_SECONDS = 0.5
_WARM_UP = 0.3  # of all requests, before memory is looked at
_PARTS = 8  # of the rest: what memory was in each
_MOST_GROWTH = 0.05
_LEAST_REQUESTS = 1000  # of which growth is judged: fewer are all warm-up
_MOST_PROBLEMS = 5  # that are told
_SHARES = {"cancelled": 0.10, "malformed": 0.05, "beyond limits": 0.05}

# As every chat of one application begins.
_SYSTEM = "You are a careful assistant. " + " ".join(
    f"Rule {number}: answer in few words, and never say what rule {number} is."
    for number in range(8)
)
_MALFORMED: tuple[dict[str, Any], ...] = (
    {"messages": "not JSON"},
    {"messages": "[]"},
    {"messages": '[{"role": "wizard", "content": "a"}]'},
    {"messages": '[{"role": "user", "content": 7}]'},
    {"text_input": "a", "messages": '[{"role": "user", "content": "b"}]'},
    {"text_input": "a", "tools": "{"},
    {"text_input": "a", "reasoning_effort": "extreme"},
    {"text_input": "a", "response_format": '{"type": "poem"}'},
    {"text_input": "a", "guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
)
_BEYOND_LIMITS: tuple[dict[str, Any], ...] = (
    {"text_input": "a", "temperature": -1.0},
    {"text_input": "a", "top_p": 1.5},
    {"text_input": "a", "top_logprobs": 21, "return_logprobs": True},
    {"text_input": "a", "max_tokens": 0},
    {"text_input": "word " * 200_000},
)


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    fields: dict[str, Any]


def asks(count: int, seed: int) -> list[Ask]:
    """In random order; of each kind its share."""
    drawn = random.Random(seed)
    kinds = [kind for kind, share in _SHARES.items() for _ in range(round(share * count))]
    kinds += ["answered"] * (count - len(kinds))
    drawn.shuffle(kinds)
    return [Ask(kind, _fields(kind, drawn)) for kind in kinds]


def _fields(kind: str, drawn: random.Random) -> dict[str, Any]:
    if kind == "malformed":
        return drawn.choice(_MALFORMED)
    if kind == "beyond limits":
        return drawn.choice(_BEYOND_LIMITS)
    question = f"What is {drawn.randrange(100)} + {drawn.randrange(100)}?"
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    return {
        "messages": json.dumps(messages),
        "max_tokens": 400 if kind == "cancelled" else drawn.choice((1, 8, 24, 64)),
        "stream": kind == "cancelled" or drawn.random() < 0.8,
        "seed": drawn.randrange(2**32),
        "ignore_eos": kind == "cancelled",
    }


@dataclass
class Ends:
    """How requests ended, of all threads together. problems: what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ask: Ask, end: str, first_token: float | None, problem: str = "") -> None:
        with self._lock:
            self.counts[f"{ask.kind}: {end}"] += 1
            if first_token is not None:
                self.first_tokens.append(first_token)
            if problem:
                self.problems.append(f"{ask.kind}, {str(ask.fields)[:200]}: {problem}")


def _one(client: ChatClient, ask: Ask, ends: Ends) -> None:
    is_refused = ask.kind in ("malformed", "beyond limits")
    reasons: list[str] = []
    sentence, first = "", None
    started = time.monotonic()
    fields = {"stream": True, **ask.fields}
    with closing(client.stream("gpt_oss", fields)) as responses:
        try:
            for outputs in responses:
                first = first or time.monotonic() - started
                if reasons:
                    ends.add(ask, "went on", first, "a response came behind the end")
                    return
                if outputs["finish_reason"]:
                    reasons.append(outputs["finish_reason"])
                elif ask.kind == "cancelled":
                    ends.add(ask, "left", first)
                    return
        except RequestFailed as error:
            sentence = str(error)
    if is_refused:
        is_right = bool(sentence) and first is None
        ends.add(ask, "refused", None, "" if is_right else f"ended {reasons}, {sentence!r}")
    elif sentence or len(reasons) != 1:
        ends.add(ask, "failed", first, sentence or f"{len(reasons)} ends")
    else:
        ends.add(ask, reasons[0], first)


class Memory:
    """Resident bytes of a server's processes, sampled while it is entered."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.samples: list[tuple[float, dict[int, int]]] = []

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            now = {pid: size for pid in _tree(self._root) if (size := _resident(pid))}
            self.samples.append((time.monotonic(), now))

    def of_parts(self, since: float) -> dict[int, list[float]]:
        """Of each process the mean MB in each part of the time since then."""
        samples = [each for at, each in self.samples if at >= since]
        if len(samples) < _PARTS:
            return {}
        cuts = [len(samples) * part // _PARTS for part in range(_PARTS + 1)]
        return {
            pid: [
                mean(each.get(pid, 0) for each in samples[first:end]) / 1e6
                for first, end in pairwise(cuts)
            ]
            for pid in sorted(set(samples[0]) & set(samples[-1]))
        }


def _tree(root: int) -> Iterator[int]:
    yield root
    try:
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))
    except OSError:
        return  # it has just ended


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmRSS:")), "0")
    return 1024 * int(kilobytes)


# Pages that are all used within the warm-up: a CPU's memory grows as they are first written to.
@engine_config(max_waiting_requests=2**31 - 1, default_timeout_seconds=600, kv_cache_gigabytes=0.1)
def soak(
    *,
    num_requests: Annotated[int, typer.Option(min=100)] = 10_000,
    connections: Annotated[int, typer.Option(min=1)] = 64,
    output: Output = None,
    seed: Seed = 0,
    config: EngineConfig,
) -> None:
    """Ask a server of our own for a long time: 10 % leave, 5 % err, 5 % ask too much.

    Ends in one JSON line; fails if a request had no end or two, a page is lost, or memory grows.
    """
    report = Report(config, output)
    ends = Ends()
    server = TritonServer(config, Ports.free())
    with server:
        server.wait_ready(_READY_SECONDS)
        before = _settled_count(server)
        with Memory(server.pid) as memory:
            started = time.monotonic()
            warm = _ask_all(server, asks(num_requests, seed), connections, ends)
            seconds = time.monotonic() - started
            problems = [*ends.problems[:_MOST_PROBLEMS], *_unsettled(server)]
        sizes = memory.of_parts(warm)
        after = _settled_count(server)
    admitted = num_requests - sum(n for end, n in ends.counts.items() if end.endswith("refused"))
    if (finished := after - before) != admitted:
        problems.append(
            f"{admitted} requests were admitted, and the server counted {finished:g} ends"
        )
    for pid, (first, *_, last) in sizes.items():
        if last > first * (1 + _MOST_GROWTH) and num_requests >= _LEAST_REQUESTS:
            problems.append(f"process {pid} grew from {first:.0f} to {last:.0f} MB")
    first_tokens = sorted(ends.first_tokens)
    line = report.add(
        "soak",
        requests=num_requests,
        connections=connections,
        seconds=rounded(seconds),
        requests_per_s=rounded(num_requests / seconds),
        ends=dict(sorted(ends.counts.items())),
        ttft_ms=[rounded(1e3 * _at(first_tokens, share)) for share in (0.5, 0.9, 0.99)],
        memory_mb=[[*map(rounded, parts)] for parts in sizes.values()],
        problems=problems,
    )
    report.close()
    if line["problems"]:
        raise CommandFailed("; ".join(problems))


def _ask_all(server: TritonServer, requests: list[Ask], connections: int, ends: Ends) -> float:
    """When the warm-up was over."""
    left, lock = iter(requests), threading.Lock()
    num_warm = int(_WARM_UP * len(requests))
    warm = [time.monotonic()]
    with count_bar() as progress:
        task = progress.add_task("soak", total=len(requests))

        def work() -> None:
            with ChatClient(server.ports.url("grpc")) as client:
                while True:
                    with lock:
                        ask = next(left, None)
                    if ask is None:
                        return
                    _one(client, ask, ends)
                    progress.advance(task)
                    if progress.tasks[task].completed == num_warm:
                        warm[0] = time.monotonic()

        with ThreadPoolExecutor(connections) as threads:
            for each in [threads.submit(work) for _ in range(connections)]:
                each.result()
    server.check()
    return warm[0]


def _settled_count(server: TritonServer) -> float:
    """Generations that have ended, once the server tells of no more: it does so a little later."""
    count = -1.0
    while (now := _sum(server, "vllm:request_success_total")) != count:
        count = now
        time.sleep(_SETTLED_SECONDS)
    return count


def _sum(server: TritonServer, name: str) -> float:
    found = re.findall(rf"^{name}{{[^}}]*}} (\S+)$", server.metrics(_SETTLE_SECONDS), re.MULTILINE)
    return sum(map(float, found))


def _unsettled(server: TritonServer) -> list[str]:
    """What is not over a while after the last request."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while left := {name: value for name in names if (value := _sum(server, name))}:
        if time.monotonic() > deadline:
            return [f"{name} is {value:g} in the end" for name, value in left.items()]
        time.sleep(_SAMPLE_SECONDS)
    return []


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
