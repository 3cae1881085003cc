"""What a chat's turns cost until the first token, with the prefix cache and without, over gRPC.

    python tests/bench/bench_chat_turns.py [--chats 20] [--output lines.jsonl]

Chats of ten turns through the whole server on the demo model, one behind the other, each with words
of its own: a turn adds a question of 100 words and an answer. Medians over the chats of the time
until the first response; then a JSON line for each server, which --output appends to a file.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gptoss_backend.cli.provenance import provenance
from gptoss_backend.client import ChatClient
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

TURNS, WORDS = 10, 100
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a file to append the lines to")
    arguments = parser.parse_args()
    words = [word for word in sys.argv[1:] if word not in ("--output", str(arguments.output))]
    command = " ".join(["python tests/bench/bench_chat_turns.py", *words])
    for enable_prefix_caching in (True, False):
        config = EngineConfig(enable_prefix_caching=enable_prefix_caching)
        with TritonServer(config, Ports.free()) as server:
            server.wait_ready(120)
            figures = measure(server.ports.url("grpc"), arguments.chats)
        line = json.dumps(
            {"benchmark": "chat_turns", "enable_prefix_caching": enable_prefix_caching}
            | figures
            | provenance(config)
            | {"command": command}
        )
        print(line, flush=True)
        if arguments.output is not None:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def measure(url: str, num_chats: int) -> dict[str, Any]:
    seconds: list[list[float]] = [[] for _ in range(TURNS)]
    prompts: list[list[int]] = [[] for _ in range(TURNS)]
    cached: list[list[int]] = [[] for _ in range(TURNS)]
    with ChatClient(url) as client:
        for number in range(num_chats + 1):
            chance = random.Random(number)
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                question = " ".join(chance.choices(_WORDS, k=WORDS))
                messages.append({"role": "user", "content": question})
                started = time.perf_counter()
                responses = []
                first = 0.0
                for response in client.ask(
                    messages=json.dumps(messages), temperature=0.0, max_tokens=2
                ):
                    first = first or time.perf_counter() - started
                    responses.append(response)
                messages.append({"role": "assistant", "content": "Yes."})
                if number:  # The first chat warms up.
                    outputs = responses[-1].outputs
                    seconds[turn].append(first)
                    prompts[turn].append(int(outputs["num_input_tokens"]))
                    cached[turn].append(int(outputs["num_cached_tokens"]))
    ttft = [round(1e3 * statistics.median(each), 2) for each in seconds]
    return {
        "chats": num_chats,
        "ttft_ms": ttft,
        "tenth_over_second": round(ttft[9] / ttft[1], 3),
        "prompt_tokens": [statistics.median(each) for each in prompts],
        "cached_tokens": [statistics.median(each) for each in cached],
    }


if __name__ == "__main__":
    main()
