"""One token a step: nothing guessed, the model's choice stands."""

from gptoss_engine.sequence import Sequence


class PlainDecoder:
    guesses = False

    def propose(self, sequence: Sequence) -> tuple[int, ...]:  # noqa: ARG002
        return ()

    def accept(self, draft: tuple[int, ...], sampled: tuple[int, ...]) -> tuple[int, ...]:
        assert not draft, "nothing was proposed"
        assert len(sampled) == 1, f"one token is due, got {len(sampled)}"
        return sampled
