"""Score a compact checkpoint on dataset.py's held-out chats, greedily and at temperature 1.

    python tools/demo/evaluate.py --model backend/gptoss_engine/demo --data .demo_data/demo.npz

Prints a table and writes one JSON object. A reply counts as well-formed when it is Harmony's
analysis message and then either a final message or a tool call, and as right when its last
message is the expected one, token for token.
"""

import argparse
import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export import load_compact
from layout import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FIRST_SPECIAL,
    GENERATED,
    IGNORED,
    INDEX_MASK,
    MESSAGE,
    RETURN,
    START,
)
from model import Cache, DemoModel

ANALYSIS = [CHANNEL, MESSAGE, END, START, CHANNEL]
SHAPES = [[*ANALYSIS, MESSAGE, RETURN], [*ANALYSIS, CONSTRAIN, MESSAGE, CALL]]
MAX_TOKENS = 140


@torch.inference_mode()
def generate(
    model: DemoModel, prompts: list[list[int]], temperature: float, stops: set[int]
) -> list[list[int]]:
    """Indices to indices. Prompts are right-aligned; what stands before them is another chat."""
    device = model.norm.device
    length = max(map(len, prompts))
    padding = torch.tensor([length - len(prompt) for prompt in prompts], device=device)
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
    chats = (torch.arange(length, device=device) >= padding[:, None]).int()
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stop = torch.tensor(sorted(stops), device=device)
    past: Cache | None = None
    steps = []
    for _ in range(MAX_TOKENS):
        hidden, past, _ = model(ids, chats, past)
        logits = model.logits(hidden[:, -1])
        if temperature:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            ids = logits.argmax(-1, keepdim=True)
        steps.append(ids)
        done |= torch.isin(ids[:, 0], stop)
        if done.all():
            break
        chats = torch.cat((chats, chats.new_ones(len(prompts), 1)), 1)
    replies = torch.cat(steps, 1).tolist()
    return [cut(reply, stops) for reply in replies]


def cut(reply: list[int], stops: set[int]) -> list[int]:
    """Up to and with its first stop."""
    ends = [i for i, index in enumerate(reply) if index in stops]
    return reply[: ends[0] + 1] if ends else reply


def scores(
    model: DemoModel,
    token_ids: list[int],
    problems: list[tuple[list[int], list[int]]],
    temperature: float,
) -> dict[str, float]:
    """problems: prompts and right replies, as the model's indices."""
    stops = {token_ids.index(RETURN), token_ids.index(CALL)}
    replies = generate(model, [prompt for prompt, _ in problems], temperature, stops)

    def names(indices: list[int]) -> list[int]:
        return [token_ids[i] if i < len(token_ids) else -1 for i in indices]

    def shape(tokens: list[int]) -> list[int]:
        return [token for token in tokens if token >= FIRST_SPECIAL or token < 0]

    def last_message(tokens: list[int]) -> list[int]:
        starts = [i for i, token in enumerate(tokens) if token == START]
        return tokens[starts[-1] :] if starts else []

    expected = [right for _, right in problems]
    pairs = [(names(reply), names(right)) for reply, right in zip(replies, expected, strict=True)]
    return {
        "chats": len(pairs),
        "well_formed": mean(shape(reply) in SHAPES for reply, _ in pairs),
        "right": mean(last_message(reply) == last_message(right) for reply, right in pairs),
    }


def mean(values: Any) -> float:
    return float(np.mean(list(values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("backend/gptoss_engine/demo"))
    parser.add_argument("--data", type=Path, default=Path(".demo_data/demo.npz"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chats", type=int, default=300, help="of each kind, at most")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    model, token_ids = load_compact(arguments.model)
    model = model.to(arguments.device).eval()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'kind':18s} {'chats':>5s}  {'well-formed, right':>20s}  at temperature 1")
    with np.load(arguments.data) as data:
        index = {token: i for i, token in enumerate(token_ids)}
        to_model = np.array([index.get(t, len(index)) for t in [*data["token_ids"].tolist(), -1]])
        for name in sorted(n for n in data.files if n.startswith("test_")):
            chats = [row[row != IGNORED] for row in data[name][: arguments.chats]]
            problems = [
                (
                    to_model[chat[asked] & INDEX_MASK].tolist(),
                    to_model[chat[~asked] & INDEX_MASK].tolist(),
                )
                for chat in chats
                for asked in [(chat & GENERATED) == 0]
            ]
            greedy, sampled = (scores(model, token_ids, problems, t) for t in (0.0, 1.0))
            kind = name.removeprefix("test_")
            results[kind] = {"greedy": greedy, "temperature_1": sampled}
            shown = [
                f"{100 * s[n]:10.1f}" for s in (greedy, sampled) for n in ("well_formed", "right")
            ]
            print(f"{kind:18s} {len(problems):5d} {''.join(shown)}", flush=True)
    on_gpu = arguments.device == "cuda"
    report = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "kinds": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
