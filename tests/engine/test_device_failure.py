"""A device that fails in a step, as PyTorch says it, while another step is out."""

import pytest
import torch

from gptoss_engine.sequence import ScheduledStep
from gptoss_engine.types import Unavailable

from .fakes import FakeRunner, fake_engine
from .test_engine import FOREVER, running, submit

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call."


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{ADVICE}"),
        RuntimeError(f"CUDA error: unspecified launch failure{ADVICE}"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=["accelerator", "runtime", "memory"],
)
@pytest.mark.parametrize("fails_at", ["launch", "result"])
def test_a_cuda_error_ends_all_generations_as_data(error: Exception, fails_at: str) -> None:
    def fail(step: ScheduledStep) -> None:
        if any(item.num_output_tokens == 3 for item in step.items):
            raise error

    runner = FakeRunner(is_asynchronous=True)
    setattr(runner, {"launch": "on_launch", "result": "on_result"}[fails_at], fail)
    with running(fake_engine(runner, max_num_seqs=2)) as loop:
        # Two run, and others wait: the first to fail is the first that has three tokens.
        clients = [submit(loop, name, **FOREVER) for name in "abcd"]
        finals = [client.final() for client in clients]
        assert {final.finish_reason for final in finals} == {"error"}
        (sentence,) = {final.error for final in finals}
        first_line = str(error).splitlines()[0]
        assert sentence == f"the engine failed: {type(error).__name__}: {first_line}"
        assert not any(client.has_more for client in clients)
        assert loop.is_broken
        with pytest.raises(Unavailable, match="the engine failed"):
            submit(loop, "e")
