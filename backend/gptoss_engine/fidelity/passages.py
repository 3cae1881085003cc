"""What the models read: tokens that belong together, and the forward passes that take them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep
from gptoss_engine.sequence import Sequence as EngineSequence
from gptoss_engine.types import GenerationRequest, InvalidRequest, SamplingParams

PAGE_SIZE = 64
STEP_TOKENS = 1024  # of one forward pass


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that belong together. The first num_given, at least one, are a prompt: they are read
    as the others are, but what the models expected in their place is not asked."""

    token_ids: tuple[int, ...]
    num_given: int = 1


def cut(passages: Sequence[Passage], max_tokens: int) -> list[Passage]:
    """The first max_tokens tokens; a passage that has nothing left to be asked is dropped."""
    kept = []
    for passage in passages:
        token_ids = passage.token_ids[:max_tokens]
        max_tokens -= len(token_ids)
        if len(token_ids) > passage.num_given:
            kept.append(Passage(token_ids, passage.num_given))
    if not kept:
        raise InvalidRequest("max_tokens ends within the first prompt: nothing is left to judge")
    return kept


def random_passage(vocab_size: int, num_tokens: int, seed: int) -> Passage:
    """Each token as likely as any other: for models whose weights are random too."""
    generator = torch.Generator().manual_seed(seed)
    return Passage(tuple(torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()))


def num_tokens(passages: Sequence[Passage]) -> int:
    return sum(len(passage.token_ids) for passage in passages)


def asked(passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
    """The rows, among all tokens, after which a token is asked for, and those tokens: [P], [P]."""
    positions: list[int] = []
    next_ids: list[int] = []
    first = 0
    for passage in passages:
        assert 0 < passage.num_given < len(passage.token_ids)
        positions += range(first + passage.num_given - 1, first + len(passage.token_ids) - 1)
        next_ids += passage.token_ids[passage.num_given :]
        first += len(passage.token_ids)
    return torch.tensor(positions), torch.tensor(next_ids)


def sequences_of(passages: Sequence[Passage]) -> tuple[list[EngineSequence], int]:
    """As the engine holds them, each with pages of its own, and the number of pages."""
    sequences, num_pages = [], 0
    for index, passage in enumerate(passages):
        request = GenerationRequest(str(index), passage.token_ids, SamplingParams(temperature=0.0))
        made = EngineSequence.from_request(request, seed=0, max_tokens=1, eos_token_ids=frozenset())
        first, num_pages = num_pages, num_pages + -(-len(passage.token_ids) // PAGE_SIZE)
        pages = list(range(first, num_pages))
        made.page_tables = PageTables(full=pages, window=pages)
        sequences.append(made)
    return sequences, num_pages


def num_steps(passages: Sequence[Passage]) -> int:
    return -(-num_tokens(passages) // STEP_TOKENS)


def steps_of(sequences: Sequence[EngineSequence]) -> Iterator[ScheduledStep]:
    """All tokens in order, STEP_TOKENS a step but for the last."""
    items: list[ScheduledItem] = []
    room = STEP_TOKENS
    for sequence in sequences:
        left = len(sequence.token_ids)
        while left:
            items.append(ScheduledItem.of(sequence, min(left, room)))
            left -= items[-1].num_tokens
            room -= items[-1].num_tokens
            if room == 0 or (left == 0 and sequence is sequences[-1]):
                yield ScheduledStep(tuple(items))
                for item in items:
                    item.sequence.num_computed_tokens += item.num_tokens
                items, room = [], STEP_TOKENS
