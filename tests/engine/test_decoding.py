import pytest

from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.sequence import Sequence

from .fakes import request


def test_the_plain_decoder_guesses_nothing_and_takes_the_models_choice() -> None:
    sequence = Sequence.from_request(request("a"), seed=0, max_tokens=1, eos_token_ids=frozenset())
    decoder = PlainDecoder()
    assert decoder.propose(sequence) == ()
    assert decoder.accept((), (7,)) == (7,)


@pytest.mark.parametrize(("draft", "sampled"), [((1,), (1, 2)), ((), ()), ((), (1, 2))])
def test_anything_but_one_token_a_step_is_our_own_bug(
    draft: tuple[int, ...], sampled: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError):
        PlainDecoder().accept(draft, sampled)
