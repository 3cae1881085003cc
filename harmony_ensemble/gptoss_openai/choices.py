"""Several answers to one request, as OpenAI's `n` has them: as many requests to the ensemble.

An ensemble's response has no room for several answers, and the engine's chunks are of one
generation; beside each other they share a prompt by the prefix cache alone. One that fails, or a
client who leaves, ends them all.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from gptoss_openai.ensemble import Reply
from gptoss_openai.parameters import Inputs


def inputs_of_choices(inputs: Inputs, num_choices: int) -> list[Inputs]:
    """As of one answer; where there is a seed, each has its own: seed + index, as vLLM's."""
    seed = inputs.get("seed")
    if not isinstance(seed, int):
        return [inputs] * num_choices
    return [{**inputs, "seed": (seed + index) % 2**64} for index in range(num_choices)]


async def together(
    answers: Sequence[AsyncGenerator[Reply, None]],
) -> AsyncGenerator[Reply, None]:
    """The replies of all as they come, each with the index of its answer.

    No answer is read further ahead than by one reply. What one raises is raised, and all are
    closed then, and when this is.
    """
    replies: asyncio.Queue[Reply | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(index: int, answer: AsyncGenerator[Reply, None]) -> None:
        try:
            async with aclosing(answer):
                async for reply in answer:
                    await replies.put(replace(reply, index=index))
        except Exception as error:  # noqa: BLE001  whoever reads them gets it
            await replies.put(error)
        else:
            await replies.put(None)

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(answers)]
    num_open = len(tasks)
    try:
        while num_open:
            reply = await replies.get()
            if isinstance(reply, Exception):
                raise reply
            if reply is None:
                num_open -= 1
            else:
                yield reply
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
