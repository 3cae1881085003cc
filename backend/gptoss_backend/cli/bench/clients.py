"""Clients of a running server, in processes of their own: a load of streams costs their own time.

One process reads some thousand responses a second over gRPC, and a GPU sends more than that; so
requests are dealt out to several processes, which start on one clock (time.monotonic() is the
machine's, not the process's).
"""

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gptoss_backend.cli.bench.load import Load, Outcome, Request
from gptoss_backend.cli.bench.workloads import Ask
from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.client import ChatClient, RequestFailed, as_request

_MOST_PROCESSES = 8
_STREAMS_A_PROCESS = 4
_LOOK_SECONDS = 1.0
_LEAD_SECONDS = 0.2  # from the word to begin to the beginning


@dataclass(frozen=True, slots=True)
class _Share:
    """One process's requests, with when each is due; streams: how many at a time, None for all."""

    url: str
    asks: tuple[tuple[float, Ask], ...]
    warm_up: tuple[Ask, ...]
    streams: int | None


def num_processes(load: Load, cores: int | None = None) -> int:
    """One for few streams, and at most half of the cores: the server needs the others.

    A process reads some 5,000 responses a second, and long before that they wait for each other.
    """
    cores = os.cpu_count() or 1 if cores is None else cores
    streams = load.num_requests if load.concurrency is None else load.concurrency
    return max(1, min(_MOST_PROCESSES, cores // 2, streams // _STREAMS_A_PROCESS))


def run_clients(
    url: str,
    load: Load,
    ask: Callable[[int], Ask],
    *,
    output_len: int,
    seed: int,
    processes: int,
    on_answer: Callable[[], None],
) -> Outcome:
    """The load's requests to the server at `url`, after as many others as run at once.

    CommandFailed when a request fails, or an answer has not output_len tokens.
    """
    streams = load.concurrency or min(load.num_requests, 16 * processes)
    asks = [*zip(load.due(seed), map(ask, range(load.num_requests)), strict=True)]
    # With numbers that the measured load does not use.
    warm_up = [ask(load.num_requests + number) for number in range(streams)]
    shares = [
        _Share(
            url,
            tuple(asks[index::processes]),
            tuple(warm_up[index::processes]),
            None if load.concurrency is None else len(range(index, streams, processes)),
        )
        for index in range(processes)
    ]
    with _started(shares) as (starts, next_result):
        for _ in shares:
            assert next_result() is None
        began = time.monotonic() + _LEAD_SECONDS
        for start in starts:
            start.send(began)
        requests: list[Request] = []
        for _ in range(load.num_requests):
            request = next_result()
            if request.num_tokens != output_len:
                raise CommandFailed(
                    f"an answer had {request.num_tokens} tokens instead of {output_len}"
                )
            requests.append(request)
            on_answer()
    return Outcome(load, max(each.responses[-1][0] for each in requests), tuple(requests))


@contextmanager
def _started(shares: Sequence[_Share]) -> Iterator[tuple[list[Connection], Callable[[], Any]]]:
    """A process a share: where each waits for the beginning, and what gives their next result."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    starts: list[Connection] = []
    processes: list[Any] = []

    def next_result() -> Any:
        while True:
            try:
                result = results.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise CommandFailed("a client's process died") from None
                continue
            if isinstance(result, str):
                raise CommandFailed(result)
            return result

    with ExitStack() as stack:
        for share in shares:
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(share, theirs, results), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            processes.append(process)
            starts.append(ours)
        yield starts, next_result


def _work(share: _Share, start: Connection, results: Any) -> None:
    """A process: warm up, say so, wait for the beginning, and send each request's record."""
    with ExitStack() as stack:
        _answer(share, start, results, stack)


def _answer(share: _Share, start: Connection, results: Any, stack: ExitStack) -> None:
    clients: queue.SimpleQueue[ChatClient] = queue.SimpleQueue()

    def answered(ask: Ask, request: Any, due: float, began: float) -> Request:
        try:
            client = clients.get_nowait()
        except queue.Empty:
            client = stack.enter_context(ChatClient(share.url))
        responses: list[tuple[float, int]] = []
        for outputs in client.responses(request):
            count = outputs[ask.counted]
            number = len(count) if isinstance(count, list) else count
            responses.append((time.monotonic() - began, number))
            if outputs.get("error"):
                raise RequestFailed(outputs["error"])
        clients.put(client)
        return Request(due, tuple(responses))

    def warm_up(ask: Ask) -> None:
        answered(ask, as_request(ask.model, ask.inputs), 0.0, 0.0)

    def put(due: float, ask: Ask, began: float) -> None:
        try:
            request = as_request(ask.model, ask.inputs)
            # In a closed loop a request is due when its stream is free. The engine alone has its
            # requests made before its time begins, too.
            sent = due if share.streams is None else time.monotonic() - began
            results.put(answered(ask, request, sent, began))
        except Exception as error:  # noqa: BLE001  whatever it is, nobody else would hear of it
            results.put(f"a request failed: {error}")

    try:
        if share.warm_up:
            with ThreadPoolExecutor(len(share.warm_up)) as pool:
                for _ in pool.map(warm_up, share.warm_up):
                    pass
    except RequestFailed as error:
        results.put(f"a request failed: {error}")
        return
    results.put(None)
    began = start.recv()
    with ThreadPoolExecutor(share.streams or len(share.asks) or 1) as pool:
        for due, ask in share.asks:
            time.sleep(max(0.0, began + due - time.monotonic()))
            pool.submit(put, due, ask, began)
