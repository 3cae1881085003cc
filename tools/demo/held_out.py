"""Chats kept from training, as the package carries them for `gptoss evaluate demo`.

    python tools/demo/held_out.py --out backend/gptoss_engine/demo/held_out.jsonl.gz

One JSON array a line: kind, prompt, right reply (both token ids), and how many of the reply's last
tokens are its last message, the answer.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

import domain
from dataset import render
from layout import START

TASKS = {"add": 800, "convert": 100, "echo": 100, "reverse": 100, "weather": 200}


def held_out(task: str, count: int, r: random.Random) -> list[list[object]]:
    chats: list[list[object]] = []
    while len(chats) < count:
        example = domain.sample(r, task, unseen=True)
        kind = example.kind.split("/")[0]
        # Of the other kinds a task can turn into, nothing was kept from training.
        if domain.is_split(example.kind) or kind == "weather_call":
            prompt, reply = render(example)
            chats.append([kind, prompt, reply, reply[::-1].index(START) + 1])
    return chats


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    r = random.Random(2026)
    chats = [chat for task, count in TASKS.items() for chat in held_out(task, count, r)]
    r.shuffle(chats)
    lines = (json.dumps(chat, separators=(",", ":")) + "\n" for chat in chats)
    out.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    print(f"{len(chats)} chats, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
