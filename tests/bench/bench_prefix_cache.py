"""How many prompt tokens the prefix cache has, under chats that are made up, as JSON lines.

    python tests/bench/bench_prefix_cache.py

The real scheduler and pools in the sizes of an H200 beside the 120b in bf16, without a model: an
answer is random tokens, and time is counted in steps. Chats of ten turns share one of twenty system
prompts of 1500 tokens; a turn adds 100 tokens and an answer of 350, of which the next prompt has
150 (Harmony drops the reasoning). Beside them come long prompts that nobody asks again: 8,192
tokens each, one for every four turns. `lru` keeps no page of window layers behind the others, and
`every window` has as many pages of window layers as of full ones: the most that there is to gain.
"""

import argparse
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.page_pool import PagePool
from gptoss_engine.scheduler import Scheduler
from gptoss_engine.sequence import Sequence, StepOutput
from gptoss_engine.types import GenerationRequest, SamplingParams

PAGE_SIZE, SLIDING_WINDOW, FULL_PAGES, WINDOW_PAGES = 64, 128, 9500, 1666
SYSTEM, ASKED, ANSWER, REPLY, LONG, TURNS = 1500, 100, 350, 150, 8192, 10
THINKING = 2000  # steps between an answer and the next question, on average


class PlainOrder(PagePool):
    """In which no page is kept behind others."""

    def keep(self, key: bytes) -> None:
        pass


@dataclass(order=True)
class Turn:
    """due: the step it comes in."""

    due: int
    number: int
    prompt: list[int] = field(compare=False)
    is_chat: bool = field(compare=False)
    turn: int = field(compare=False, default=0)


class Traffic:
    def __init__(self, num_chats: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.systems = [self.tokens(SYSTEM) for _ in range(20)]
        self.number = 0
        self.due: list[Turn] = []
        for _ in range(num_chats):
            self.begin(self.random.randrange(THINKING))

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(200_000), k=count)

    def push(self, due: int, prompt: list[int], *, is_chat: bool, turn: int = 0) -> None:
        self.number += 1
        heapq.heappush(self.due, Turn(due, self.number, prompt, is_chat, turn))

    def begin(self, due: int) -> None:
        self.push(due, self.random.choice(self.systems) + self.tokens(ASKED), is_chat=True)

    def take(self, step: int) -> Iterator[Turn]:
        while self.due and self.due[0].due <= step:
            turn = heapq.heappop(self.due)
            yield turn
            if turn.is_chat and self.random.random() < 0.25:
                self.push(step + self.random.randrange(100), self.tokens(LONG), is_chat=False)

    def answered(self, turn: Turn, step: int) -> None:
        if not turn.is_chat:
            return
        due = step + int(self.random.expovariate(1 / THINKING))
        if turn.turn + 1 == TURNS:
            self.begin(due)
        else:
            prompt = turn.prompt + self.tokens(REPLY) + self.tokens(ASKED)
            self.push(due, prompt, is_chat=True, turn=turn.turn + 1)


def measure(policy: str, num_chats: int, num_steps: int, window_pages: int) -> dict[str, Any]:
    window = (PlainOrder if policy == "lru" else PagePool)(window_pages, PAGE_SIZE)
    full = PagePool(FULL_PAGES, PAGE_SIZE)
    scheduler = Scheduler(
        max_num_seqs=512,
        max_num_batched_tokens=8192,
        full=full,
        window=window,
        sliding_window=SLIDING_WINDOW,
        max_num_tokens=131_072,
        decoder=PlainDecoder(),
        has_prefix_cache=True,
    )
    traffic = Traffic(num_chats, seed=0)
    open_: dict[str, Turn] = {}
    prompt_tokens = cached_tokens = turns = 0
    for number in range(num_steps):
        for turn in traffic.take(number):
            request = GenerationRequest(str(turn.number), tuple(turn.prompt), SamplingParams())
            open_[request.generation_id] = turn
            scheduler.add(
                Sequence.from_request(request, seed=0, max_tokens=ANSWER, eos_token_ids=frozenset())
            )
        step = scheduler.schedule()
        chosen = tuple((traffic.random.randrange(200_000),) * item.num_due for item in step.items)
        for chunk in scheduler.update(step, StepOutput(chosen, ((),) * len(chosen))):
            if chunk.finish_reason:
                turn = open_.pop(chunk.generation_id)
                traffic.answered(turn, number)
                if turn.is_chat and number > num_steps // 3:  # Once the caches are full.
                    turns += 1
                    prompt_tokens += chunk.num_prompt_tokens
                    cached_tokens += chunk.num_cached_tokens
    return {
        "benchmark": "prefix_cache",
        "policy": policy,
        "chats": num_chats,
        "window_pages": window_pages,
        "turns": turns,
        "hit": round(cached_tokens / prompt_tokens, 3),
        "preemptions": scheduler.num_preemptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chats", type=int, nargs="+", default=[75, 150, 300])
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--window-pages", type=int, nargs="+", default=[833, WINDOW_PAGES, 3332])
    options = parser.parse_args()
    for num_chats in options.chats:
        kept = (("kept", pages) for pages in options.window_pages)
        for policy, pages in (("lru", WINDOW_PAGES), *kept, ("every window", FULL_PAGES)):
            print(json.dumps(measure(policy, num_chats, options.steps, pages)), flush=True)


if __name__ == "__main__":
    main()
