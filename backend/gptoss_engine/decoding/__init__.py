"""Decoders: how many tokens a sequence may gain in one step, and which of them count.

A decoder guesses what follows; the model computes its own choice at every guessed position in the
same forward pass; the decoder then says which choices stand. Sampling is a function of seed and
position alone, so a guess that the model would have chosen itself is exact at any temperature.
"""

from typing import Protocol

from gptoss_engine.sequence import Sequence


class Decoder(Protocol):
    @property
    def guesses(self) -> bool:
        """Whether `propose` may return anything. It must know all tokens before: so a step is not
        scheduled while the one before runs."""
        ...

    def propose(self, sequence: Sequence) -> tuple[int, ...]:
        """A guess at what follows the sequence's tokens, any length; the scheduler may cut it."""
        ...

    def accept(self, draft: tuple[int, ...], sampled: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens to append: at least one, a prefix of `sampled`.

        sampled[k] is the model's choice after the sequence and draft[:k], k = 0 … len(draft).
        """
        ...
