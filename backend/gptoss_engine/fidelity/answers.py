"""Problems that a model answers: whether the replies are right."""

from collections.abc import Iterator, Sequence

from gptoss_engine.demo import HeldOutChat
from gptoss_engine.engine import Engine
from gptoss_engine.types import GenerationRequest, SamplingParams

SPARE_TOKENS = 64  # a wrong reply may be longer than the right one, and end right all the same


class EngineFailed(RuntimeError):
    """A reply that never came to its end."""


def answer(engine: Engine, chats: Sequence[HeldOutChat]) -> Iterator[tuple[HeldOutChat, bool]]:
    """Each chat with whether its greedy reply ends in the right answer, as they finish."""
    replies: dict[str, list[int]] = {}
    for index, chat in enumerate(chats):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(chat.reply) + SPARE_TOKENS)
        engine.add(GenerationRequest(str(index), chat.prompt, sampling))
        replies[str(index)] = []
    while engine.has_work:
        for chunk in engine.step():
            reply = replies[chunk.generation_id]
            reply += chunk.token_ids
            if chunk.error:
                raise EngineFailed(chunk.error)
            if chunk.finish_reason:
                chat = chats[int(chunk.generation_id)]
                yield chat, tuple(reply[-chat.num_answer :]) == chat.answer
