"""mask_logits in CUDA C++, emulated and on a GPU, against the reference, bit for bit; bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.mask_logits import mask_logits

from .emulator import EmulationError, emulated, guarded, replacing
from .sampling_cases import spread_logits
from .wrong_tensors import every_second, other_device, shifted

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY = 201088
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
MACHINES = pytest.mark.parametrize(
    "machine", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
)
# One vector; a word's edges; a block of 256 vectors and one more; not a multiple of 32.
SIZES = (8, 32, 40, 2048, 2056, 5000)


def case(vocab_size: int, dtype: torch.dtype = BF16, seed: int = 0) -> tuple[Tensor, ...]:
    """Logits; masks of all, of none, of few, of most and of random tokens; their rows, two none."""
    generator = torch.Generator().manual_seed(seed + vocab_size)
    logits = spread_logits("peaked", 9, vocab_size, dtype, seed)
    columns = -(-vocab_size // 32)
    random = torch.randint(-(2**31), 2**31, (7, columns), generator=generator)
    random[0], random[1] = -1, 0
    random[2] &= random[3] & random[4] & random[5]
    random[3] |= random[4] | random[5] | random[6]
    rows = torch.tensor([4, 8, 0, 7, -1, 9, 2], dtype=torch.int32)
    return logits, random.int(), rows


def expected_of(logits: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    expected = logits.clone()
    reference.mask_logits(expected, mask, rows)
    return expected


def same(found: Tensor, expected: Tensor) -> bool:
    kind = torch.int16 if found.dtype == BF16 else torch.int32
    return torch.equal(found.cpu().contiguous().view(kind), expected.contiguous().view(kind))


def run_anywhere(machine: str, logits: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    if machine == "gpu":
        apart = torch.empty(len(logits), logits.shape[1] + 16, dtype=logits.dtype, device="cuda")
        found = apart[:, : logits.shape[1]]
        found.copy_(logits)
        mask_logits(found, mask.cuda(), rows.cuda())
        return found
    return on_emulator(logits, mask, rows)


def on_emulator(logits: Tensor, mask: Tensor, rows: Tensor, **options: Any) -> Tensor:
    """All 7 where more than the rows was written."""
    num_rows, vocab_size = logits.shape
    around = torch.full((num_rows + 2, vocab_size + 16), 7.0, dtype=logits.dtype)
    found = around[1:-1, :vocab_size]
    found.copy_(logits)
    with emulated(**options):
        mask_logits(found, mask, rows)
    is_left_alone = bool((around[[0, -1]] == 7).all() and (around[:, vocab_size:] == 7).all())
    return found if is_left_alone else torch.full_like(logits, 7.0)


@MACHINES
@DTYPES
def test_each_row_is_the_references(machine: str, dtype: torch.dtype) -> None:
    for vocab_size in (*SIZES, VOCABULARY) if machine == "gpu" else SIZES:
        inputs = case(vocab_size, dtype)
        expected = expected_of(*inputs)
        assert not same(expected, inputs[0])
        assert same(run_anywhere(machine, *inputs), expected), vocab_size


def test_nothing_beside_masks_and_rows_is_read() -> None:
    logits, mask, rows = case(2056)
    found = guarded(logits.contiguous())
    with emulated(3):
        mask_logits(found, guarded(mask), guarded(rows))
    assert same(found, expected_of(logits, mask, rows))


def test_it_begins_before_the_kernels_that_it_reads_from_have_ended() -> None:
    logits, mask, rows = case(2056)
    found = logits.contiguous()
    with emulated(late=(found, mask, rows)):
        mask_logits(found, mask, rows)
    assert same(found, expected_of(logits, mask, rows))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row < 0 || ", ""),
        ("row >= arguments.num_rows", "row > arguments.num_rows"),
        ("vector >= arguments.num_vectors", "vector > arguments.num_vectors"),
        ("if (allowed == 0xFF) return;", "if (allowed == 0) return;"),
        ("& 1 ? 0xFFFF : 0", "& 2 ? 0xFFFF : 0"),
        ("i * arguments.mask_bytes", "row * arguments.mask_bytes"),
        ("row * arguments.row_bytes", "i * arguments.row_bytes"),
        ("? 0xFF80FF80", "? 0xFF7FFF7F"),
        ("wait_for_previous_kernels();", "if (false) wait_for_previous_kernels();"),
    ],
)
def test_a_wrong_kernel_is_seen(old: str, new: str) -> None:
    logits, mask, rows = case(2056)
    mask, rows = guarded(mask), guarded(rows)
    expected = expected_of(logits, mask, rows)
    change = replacing(old, new)
    with contextlib.suppress(EmulationError):
        assert not same(on_emulator(logits, mask, rows, late=(mask, rows), change=change), expected)


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    logits, mask, rows = (tensor.cuda() for tensor in case(VOCABULARY))
    logits = logits.contiguous()
    before = logits.clone()
    mask_logits(logits, mask, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask_logits(logits, mask, rows)
    logits.copy_(before)
    mask.copy_(mask.roll(1, 0))
    graph.replay()
    assert same(logits, expected_of(before.cpu(), mask.cpu(), rows.cpu()))


def test_no_rows() -> None:
    logits, mask, rows = case(40)
    found = logits.contiguous()
    with emulated():
        mask_logits(found, mask[:0], rows[:0])
        mask_logits(found[:0], mask, rows)
    assert same(found, logits)


REFUSED: list[tuple[int, Callable[[Tensor], Tensor], str]] = [
    (0, Tensor.half, "logits must be torch.bfloat16 or torch.float32, got torch.float16"),
    (0, lambda logits: logits[:, :36], r"V a multiple of 8, got \[9, 36\]"),
    (0, shifted, "logits must start at a multiple of 16 bytes"),
    (1, Tensor.long, "mask must be torch.int32, got torch.int64"),
    (1, lambda mask: mask[:, :1], r"mask must be \[7, 2\], got \[7, 1\]"),
    (1, lambda mask: mask[:6], r"mask must be \[7, 2\], got \[6, 2\]"),
    (1, every_second, "mask must be contiguous"),
    (1, other_device, "mask must be on the device of logits, got meta and cpu"),
    (2, Tensor.long, "rows must be torch.int32, got torch.int64"),
    (2, lambda rows: rows[None], r"rows must be \[G\], got \[1, 7\]"),
    (2, every_second, "rows must be contiguous"),
]


@pytest.mark.parametrize(("position", "change", "sentence"), REFUSED)
def test_bad_input_is_refused(
    position: int, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    inputs = [*case(40)]
    inputs[position] = change(inputs[position])
    logits, mask, rows = inputs
    with emulated(), pytest.raises(ValueError, match=sentence):
        mask_logits(logits, mask, rows)


def test_a_cpu_is_refused() -> None:
    logits, mask, rows = case(40)
    with pytest.raises(ValueError, match="logits must be on a GPU, got cpu"):
        mask_logits(logits, mask, rows)
