"""What an answer's penalties count: its tokens, and those of its prompt.

All of it is the host's: a step brings to the device what each penalised row's tokens are, and the
one token that the host may not know yet is found there (`ops.penalize_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import NamedTuple

import numpy as np

from gptoss_engine.types import SamplingParams


class Entries(NamedTuple):
    """By token, each of which is there once: counts and biases as ops.Penalties has them."""

    token_ids: np.ndarray
    counts: np.ndarray
    biases: np.ndarray


class History:
    """The tokens of one sequence that are biased or penalised; grows with its answer.

    Whatever becomes of the sequence's pages, its tokens stay, and so does this.
    """

    def __init__(self, sampling: SamplingParams, prompt: Tokens[int]) -> None:
        self._is_counted = sampling.is_penalized
        self._num_counted = len(prompt)
        biases = dict(sampling.logit_bias)
        # Presence and frequency are of the answer alone.
        seen = np.unique(prompt).tolist() if sampling.repetition_penalty != 1 else []
        others = [token_id for token_id in seen if token_id not in biases]
        self._places = {token_id: place for place, token_id in enumerate([*biases, *others])}
        size = len(self._places)
        room = max(64, 2 * size)
        self._columns = Entries(
            np.zeros(room, np.int32), np.full(room, -1, np.int32), np.zeros(room, np.float32)
        )
        self._columns.token_ids[:size] = [*self._places]
        self._columns.biases[: len(biases)] = [*biases.values()]
        self._columns.counts[[self._places[token_id] for token_id in seen]] = 0

    def entries(self, token_ids: Tokens[int]) -> Entries:
        """Of a sequence of these tokens, prompt and answer; the next call may change them."""
        if self._is_counted:
            for token_id in token_ids[self._num_counted :]:
                self._count(token_id)
            self._num_counted = len(token_ids)
        return Entries(*(column[: len(self._places)] for column in self._columns))

    def _count(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._columns.token_ids):
            self._columns = Entries(*(_doubled(column) for column in self._columns))
        self._columns.token_ids[place] = token_id
        self._columns.counts[place] = max(self._columns.counts[place], 0) + 1


def _doubled(column: np.ndarray) -> np.ndarray:
    """What is new is in neither prompt nor answer, and not biased."""
    fresh = np.full_like(column, -1 if column.dtype == np.int32 else 0)
    return np.concatenate((column, fresh))
