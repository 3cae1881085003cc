"""Chats as token rows: training data and held-out problems in one compressed file.

    python tools/demo/dataset.py --examples 600000 --out .demo_data/demo.npz

rows: uint16 [R, ROW_LENGTH] as layout.py says, whole chats packed side by side.
token_ids: int32 [n], ascending: the tokens in use.
test_<kind>: uint16 [K, …], one held-out chat a row, right-aligned behind IGNORED; GENERATED marks
    the tokens of the right reply.
"""

import argparse
import json
import multiprocessing
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from itertools import chain, islice
from pathlib import Path

import numpy as np

import domain
from gptoss_harmony.chat import parse_chat
from gptoss_harmony.render import render_chat, system_text
from layout import (
    CALL,
    END,
    GENERATED,
    IGNORED,
    MESSAGE,
    RETURN,
    ROW_LENGTH,
    START,
    START_OF_CHAT,
    VOCAB_SIZE,
)

Tokens = list[int]


# ------------------------------------------------------------------------------------- rendering


def render(example: domain.Example) -> tuple[Tokens, Tokens]:
    """The prompt, up to `<|start|>assistant`, and the reply that must follow.

    The prompt is what gptoss_harmony renders, or what other renderers of Harmony might have:
    without a date, with commentary among the channels of a chat without tools, with finished
    calls that end in <|end|>.
    """
    vocabulary = domain.vocabulary()
    request = parse_chat(
        messages=json.dumps(example.messages),
        tools=json.dumps(example.tools) if example.tools else None,
        reasoning_effort=example.effort,
    )
    today = date.fromisoformat(example.date or "2024-01-01")
    prompt = list(render_chat(vocabulary, request, today).token_ids)
    system = system_text(request, today)
    if example.date is None:
        system = re.sub(r"Current date: .*\n", "", system)
    if example.names_commentary:
        system = system.replace(
            "channels: analysis, final", "channels: analysis, commentary, final"
        )
    opening = [START, *vocabulary.encode("system"), MESSAGE, *vocabulary.encode(system)]
    prompt = opening + prompt[prompt.index(END) :]
    if not example.ends_calls:
        prompt = [END if token == CALL else token for token in prompt]
    reply = example.reply
    text = f"<|channel|>analysis<|message|>{reply.reasoning}<|end|><|start|>assistant"
    if reply.tool:
        text += f" to=functions.{reply.tool}<|channel|>commentary <|constrain|>json<|message|>"
        text += f"{reply.text}<|call|>"
    else:
        text += f"<|channel|>final<|message|>{reply.text}<|return|>"
    return prompt, vocabulary.encode_raw(text)


# ------------------------------------------------------------------------------------ vocabulary


def tokens_in_use(examples: int = 30_000) -> Tokens:
    """Ascending: what replies consist of, every short number, and what prompts say often."""
    encode = domain.vocabulary().encode
    replied: set[int] = {CALL, RETURN}
    seen: Counter[int] = Counter()
    r = random.Random(7)
    for _ in range(examples):
        prompt, reply = render(domain.sample(r))
        seen.update(prompt)
        replied.update(reply)
    for word in chain(domain.WORDS, domain.CITIES):
        replied.update(encode(word))
        replied.update(encode(f" {word}"))
    for number in range(1000):
        for text in (f"{number}", f"{number:02d}", f"{number:03d}"):
            replied.update(encode(text))
    return sorted(replied | {token for token, count in seen.items() if count >= 25})


def indices(token_ids: Tokens) -> np.ndarray:
    """uint16 [VOCAB_SIZE]: a token's index in `token_ids`, or their number."""
    table = np.full(VOCAB_SIZE, len(token_ids), np.uint16)
    table[token_ids] = np.arange(len(token_ids))
    return table


# ---------------------------------------------------------------------------------------- packing


def encode(example: domain.Example, table: np.ndarray) -> np.ndarray:
    """uint16 [length]: indices of the whole chat, with both flags."""
    prompt, reply = render(example)
    row = table[prompt + reply]
    row[0] |= START_OF_CHAT
    row[len(prompt) :] |= GENERATED
    return row


def generate(work: tuple[int, int, Tokens]) -> list[np.ndarray]:
    seed, count, token_ids = work
    r, table = random.Random(seed), indices(token_ids)
    chats = (encode(domain.sample(r), table) for _ in range(count))
    return list(pack([chat for chat in chats if len(chat) <= ROW_LENGTH]))


def pack(chats: list[np.ndarray], num_open: int = 64) -> Iterator[np.ndarray]:
    """Rows [ROW_LENGTH]: each chat into the fullest of the open rows that still has room."""
    rows: list[list[np.ndarray]] = [[] for _ in range(num_open)]
    filled = [0] * num_open
    for tokens in chats:
        fitting = [i for i in range(num_open) if filled[i] + len(tokens) <= ROW_LENGTH]
        if fitting:
            best = max(fitting, key=filled.__getitem__)
        else:
            best = max(range(num_open), key=filled.__getitem__)
            yield padded(rows[best])
            rows[best], filled[best] = [], 0
        rows[best].append(tokens)
        filled[best] += len(tokens)
    yield from (padded(row) for row in rows if row)


def padded(chats: list[np.ndarray]) -> np.ndarray:
    row = np.concatenate(chats)
    return np.pad(row, (0, ROW_LENGTH - len(row)))


def held_out_examples(count: int) -> dict[str, list[domain.Example]]:
    """`count` examples of each kind; of the kinds that are split, problems kept from training."""
    found: dict[str, list[domain.Example]] = {}
    r = random.Random(999)
    for task in domain.TASKS:
        for example in islice(
            iter(lambda t=task: domain.sample(r, t, unseen=True), None), 12 * count
        ):
            kind = example.kind
            if kind == "add":
                digits = max(len(n) for n in example.reply.text.split(" = ")[0].split(" + "))
                kind = f"add/{digits}"
            examples = found.setdefault(kind, [])
            if len(examples) < count:
                examples.append(example)
    return {kind: found[kind] for kind in sorted(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--examples", type=int, default=600_000)
    parser.add_argument("--tests", type=int, default=300, help="held-out chats of each kind")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(".demo_data/demo.npz"))
    arguments = parser.parse_args()
    started = time.monotonic()

    token_ids = tokens_in_use()
    table = indices(token_ids)
    arrays = {"token_ids": np.array(token_ids, np.int32)}
    for kind, examples in held_out_examples(arguments.tests).items():
        chats = [encode(example, table) for example in examples]
        chats = [chat for chat in chats if len(chat) <= ROW_LENGTH]
        length = max(map(len, chats))
        arrays[f"test_{kind}"] = np.stack(
            [np.pad(chat, (length - len(chat), 0), constant_values=IGNORED) for chat in chats]
        )
    chunk = 5000
    work = [(seed, chunk, token_ids) for seed in range(arguments.examples // chunk)]
    with multiprocessing.Pool(arguments.processes) as pool:
        arrays["rows"] = np.array([row for rows in pool.imap(generate, work) for row in rows])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **arrays)
    used = np.count_nonzero(arrays["rows"] & GENERATED)
    print(
        f"{len(token_ids)} tokens in use, {len(arrays['rows'])} rows, {used} generated tokens, "
        f"{arguments.out.stat().st_size / 2**20:.1f} MiB, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
