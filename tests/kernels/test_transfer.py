"""transfer, emulated and on a GPU: each word, nothing beside them, and when; bad input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda import transfer as module
from gptoss_kernels.cuda.transfer import transfer

from .emulator import EmulationError, emulated, guarded, replacing
from .wrong_tensors import every_second, other_device

SIZES = [1, 2, 3, 255, 256, 1023, 1024, 1025, 5000]  # words; a block has 1024
POISON = -7
DIRECTIONS = pytest.mark.parametrize("from_host", [True, False], ids=["from_host", "to_host"])


@contextmanager
def on_gpu(*tensors: Tensor) -> Iterator[None]:
    """They are taken for such, and all others for pinned memory."""
    addresses = {tensor.data_ptr() for tensor in tensors}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "is_on_gpu", lambda tensor: tensor.data_ptr() in addresses)
        patch.setattr(Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu")
        yield


def words(count: int) -> tuple[Tensor, Tensor]:
    source = torch.randint(-(2**31), 2**31, (count,)).int()
    return guarded(source), guarded(torch.full_like(source, POISON))


@DIRECTIONS
@pytest.mark.parametrize("count", SIZES)
def test_each_word_is_there(count: int, from_host: bool) -> None:
    source, target = words(count)
    with emulated(count), on_gpu(target if from_host else source):
        transfer(source, target)
    assert torch.equal(source, target)


@DIRECTIONS
def test_what_lies_beside_is_left_alone(from_host: bool) -> None:
    source = torch.arange(20, dtype=torch.int64)
    around = torch.full((24,), POISON)
    target = around[2:22]
    with emulated(), on_gpu(target if from_host else source):
        transfer(source, target)
    assert around.tolist() == [POISON] * 2 + list(range(20)) + [POISON] * 2


def test_what_a_kernel_wrote_is_sent_when_it_is_there() -> None:
    source, target = words(1500)
    with emulated(late=[source]), on_gpu(source):
        transfer(source, target)
    assert torch.equal(source, target)
    target.fill_(POISON)
    careless = replacing("if (!FROM_HOST) wait", "if (FROM_HOST) wait")
    with emulated(late=[source], change=careless), on_gpu(source), pytest.raises(EmulationError):
        transfer(source, target)


def test_nothing_is_overwritten_that_is_still_read() -> None:
    source, target = words(1500)
    careless = replacing("if (FROM_HOST) wait", "if (!FROM_HOST) wait")
    with emulated(change=careless), on_gpu(target), pytest.raises(EmulationError):
        transfer(source, target)


@pytest.mark.gpu
@pytest.mark.parametrize("count", SIZES)
def test_there_and_back_again(count: int) -> None:
    source = torch.randint(-(2**31), 2**31, (count,)).int().pin_memory()
    back = torch.full((count,), POISON, dtype=torch.int32).pin_memory()
    there = torch.full((count + 2,), POISON, dtype=torch.int32, device="cuda")
    middle = there[1:-1]
    for _ in range(3):
        transfer(source, middle)
        middle.add_(1)
        transfer(middle, back)
        torch.cuda.synchronize()
        assert torch.equal(back, source + 1)
        source.copy_(torch.randint(-(2**31), 2**31 - 1, (count,)))  # at the same address
    assert there[[0, -1]].tolist() == [POISON] * 2


@pytest.mark.gpu
def test_the_reference_does_the_same() -> None:
    source, there = torch.arange(70).pin_memory(), torch.zeros(70, device="cuda").long()
    back = torch.zeros(70).long().pin_memory()
    reference.transfer(source, there)
    reference.transfer(there, back)
    torch.cuda.synchronize()
    assert torch.equal(source, back)


def test_nothing() -> None:
    with emulated():
        transfer(torch.zeros(0), torch.zeros(0))
        with pytest.raises(ValueError, match=r"got torch.float32 \[0\] and torch.float32 \[1\]"):
            transfer(torch.zeros(0), torch.zeros(1))


@pytest.mark.gpu
def test_nothing_on_a_gpu() -> None:
    transfer(torch.zeros(0, device="cuda"), torch.zeros(0, pin_memory=True))


REFUSED: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], str]] = [
    (
        Tensor.float,
        Tensor.clone,
        r"got torch.float32 \[8\] and torch.int32",
    ),
    (lambda x: x[:7], Tensor.clone, r"got torch.int32 \[7\] and torch.int32 \[8\]"),
    (lambda x: x[:6].byte(), lambda x: x[:6].byte(), "a multiple of 4 bytes .*, got 6 bytes"),
    (every_second, Tensor.clone, "source must be contiguous"),
    (Tensor.clone, every_second, "target must be contiguous"),
    (
        lambda x: x.view(torch.uint8)[1:29],
        lambda x: x.view(torch.uint8)[:28],
        "start at a multiple",
    ),
    (Tensor.clone, other_device, "target must be on a GPU or in pinned memory, got meta"),
    (Tensor.clone, Tensor.clone, "one of source and target must be on a GPU"),
]


@pytest.mark.parametrize(("source", "target", "sentence"), REFUSED)
def test_bad_input_is_refused(
    source: Callable[[Tensor], Tensor], target: Callable[[Tensor], Tensor], sentence: str
) -> None:
    tensor = torch.arange(8, dtype=torch.int32)
    with emulated(), on_gpu(), pytest.raises(ValueError, match=sentence):
        transfer(source(tensor), target(tensor))


def test_memory_that_is_not_pinned_is_refused() -> None:
    tensor = torch.arange(8)
    with emulated(), pytest.raises(ValueError, match="in pinned memory, got cpu"):
        transfer(tensor, tensor.clone())
