"""What the OpenAI gateway adds to the first token, over the ensemble by gRPC, on the demo model.

    python tests/bench/bench_gateway.py [--requests 300] [--output lines.jsonl]
        [--url host:port --openai http://host:port]

The same prompt goes both ways in turns, one token each, so that a busy machine slows both, and each
way is the first in half of the pairs: what follows at once meets the end of what was before. Over a
gRPC stream that stays open (`ChatClient`), and as a streamed chat completion over a kept HTTP
connection, until its first event: a plain socket, since http.client's reading of a head, 0.3 ms
beside a busy engine, is no gateway's cost. Medians, and the median of the differences; then a JSON
line, which --output appends to a file.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptoss_backend.cli.provenance import provenance
from gptoss_backend.client import ChatClient
from gptoss_backend.gateway import Gateway, bind
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

_WARM_UP = 10
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--url", help="gRPC host:port of a running server")
    parser.add_argument("--openai", help="http://host:port of the gateway before it")
    parser.add_argument("--output", type=Path, help="a file to append the line to")
    arguments = parser.parse_args()
    if arguments.url:
        figures = _measure(arguments.url, arguments.openai, arguments.requests)
    else:
        with _stack() as (url, openai):
            figures = _measure(url, openai, arguments.requests)
    print(f"| {' | '.join(figures)} |\n|{'-|' * len(figures)}")
    print(f"| {' | '.join(map(str, figures.values()))} |")
    words = [word for word in sys.argv[1:] if word not in ("--output", str(arguments.output))]
    command = " ".join(["python tests/bench/bench_gateway.py", *words])
    line = json.dumps(figures | provenance(EngineConfig()) | {"command": command})
    print(line)
    if arguments.output is not None:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@contextmanager
def _stack() -> Iterator[tuple[str, str]]:
    with TritonServer(EngineConfig(), Ports.free()) as server, tempfile.TemporaryDirectory() as log:
        server.wait_ready(600)
        settings = {"url": server.ports.url("grpc")}
        listener = bind("127.0.0.1", 0, "--port")
        with Gateway("openai", settings, listener, Path(log) / "log") as gateway:
            gateway.wait_ready(60)
            yield server.ports.url("grpc"), gateway.url


def _measure(url: str, openai: str, num_requests: int) -> dict[str, str | float]:
    host, port = openai.removeprefix("http://").rsplit(":", 1)
    with urllib.request.urlopen(f"{openai}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    connection = socket.create_connection((host.strip("[]"), int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def by_http(text: str) -> None:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": 1,
            "temperature": 0,
            "messages": [{"role": "user", "content": text}],
        }
        content = json.dumps(body).encode()
        connection.sendall(_HEAD % len(content) + content)
        received = connection.recv(2**16)
        while b"\r\ndata: {" not in received:
            received += connection.recv(2**16)
        ended.append(time.perf_counter())
        assert received.startswith(b"HTTP/1.1 200 "), received
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += connection.recv(2**16)

    def by_grpc(text: str) -> None:
        for number, _ in enumerate(client.ask(text_input=text, max_tokens=1, temperature=0.0)):
            if number == 0:
                ended.append(time.perf_counter())

    ended: list[float] = []

    def seconds(ask: Callable[[str], None], text: str) -> float:
        began = time.perf_counter()
        ask(text)
        return ended.pop() - began

    with ChatClient(url) as client:
        pairs: list[tuple[float, float]] = []
        for number in range(num_requests):
            text = f"What is {number % 90 + 10} + 25?"
            ways = [by_grpc, by_http]
            if number % 2:
                ways.reverse()
            took = {way: seconds(way, text) for way in ways}
            pairs.append((took[by_grpc], took[by_http]))
        del pairs[:_WARM_UP]
    return {
        "benchmark": "gateway",
        "requests": len(pairs),
        "grpc_ttft_ms": _ms([grpc for grpc, _ in pairs]),
        "gateway_ttft_ms": _ms([http for _, http in pairs]),
        "added_ms": _ms([http - grpc for grpc, http in pairs]),
    }


def _ms(values: list[float]) -> float:
    return round(1e3 * statistics.median(values), 2)


if __name__ == "__main__":
    main()
