"""What scheduling a step and updating with its result cost the host, as a table, then JSON lines.

    python tests/bench/bench_scheduler.py
    python tests/bench/bench_scheduler.py --sequences 64 --steps 1000

All sequences decode, greedy, one step is always out, and nothing ends: what an overlapped loop does
between a step's end and the next one's launch, but for the launch. Pages are of 64 tokens. Times
are the thread's own, so that other processes do not count, and medians over the steps.
"""

import argparse
import json
import platform
import time
from collections import deque
from statistics import median
from typing import Any

from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.page_pool import PagePool
from gptoss_engine.scheduler import Scheduler
from gptoss_engine.sequence import ScheduledStep, Sequence, StepOutput
from gptoss_engine.types import GenerationRequest, SamplingParams

PAGE_SIZE, SLIDING_WINDOW, PROMPT_TOKENS = 64, 128, 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    lines = [measure(count, options.steps) for count in options.sequences]
    print("| sequences | schedule, us | update, us | both, us a sequence |\n|-|-|-|-|")
    for line in lines:
        count, schedule, update = (line[key] for key in ("batch", "schedule_us", "update_us"))
        print(f"| {count} | {schedule} | {update} | {(schedule + update) / count:.1f} |")
    for line in lines:
        print(json.dumps(line))


def measure(num_sequences: int, num_steps: int) -> dict[str, Any]:
    scheduler = decoding(num_sequences, num_steps)
    out: deque[ScheduledStep] = deque()
    schedules: list[float] = []
    updates: list[float] = []
    for _ in range(num_steps):
        started = time.thread_time()
        out.append(scheduler.schedule())
        schedules.append(time.thread_time() - started)
        if len(out) > 1:
            output = StepOutput(((5,),) * num_sequences, ((),) * num_sequences)
            started = time.thread_time()
            chunks = scheduler.update(out.popleft(), output)
            updates.append(time.thread_time() - started)
            assert len(chunks) == num_sequences
    return {
        "benchmark": "scheduler",
        "batch": num_sequences,
        "schedule_us": round(1e6 * median(schedules), 1),
        "update_us": round(1e6 * median(updates), 1),
        "steps": num_steps,
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def decoding(num_sequences: int, num_steps: int) -> Scheduler:
    """With all prompts computed, and room for the steps."""
    max_num_tokens = PROMPT_TOKENS + num_steps + 2
    pages = num_sequences * -(-max_num_tokens // PAGE_SIZE)
    scheduler = Scheduler(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * PROMPT_TOKENS,
        full=PagePool(pages, PAGE_SIZE),
        window=PagePool(pages, PAGE_SIZE),
        sliding_window=SLIDING_WINDOW,
        max_num_tokens=max_num_tokens,
        decoder=PlainDecoder(),
        has_prefix_cache=True,
    )
    for number in range(num_sequences):
        # Page borders are not crossed by all in the same step.
        prompt = (1,) * (PROMPT_TOKENS - number % PAGE_SIZE)
        one = GenerationRequest(str(number), prompt, SamplingParams(temperature=0.0))
        scheduler.add(
            Sequence.from_request(one, seed=0, max_tokens=num_steps + 2, eos_token_ids=frozenset())
        )
    step = scheduler.schedule()
    assert len(step.items) == num_sequences
    scheduler.update(step, StepOutput(((5,),) * num_sequences, ((),) * num_sequences))
    return scheduler


if __name__ == "__main__":
    main()
