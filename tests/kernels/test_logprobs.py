"""logprobs in CUDA C++, emulated and on a GPU, against the reference; bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import MAXIMUM_TOP
from gptoss_kernels.cuda.logprobs import logprobs

from .emulator import EmulationError, emulated, guarded, replacing
from .sampling_cases import KINDS, spread_logits
from .wrong_tensors import every_second, other_device

POISON = 7
VOCABULARY = 201088
BF16, FP32 = torch.bfloat16, torch.float32
Told = tuple[Tensor, Tensor, Tensor]
MACHINES = pytest.mark.parametrize(
    "machine", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
)


def poisoned(num_rows: int, device: str = "cpu") -> Told:
    shape = (num_rows, MAXIMUM_TOP)
    return (
        torch.full((num_rows,), POISON, dtype=FP32, device=device),
        torch.full(shape, POISON, dtype=torch.int32, device=device),
        torch.full(shape, POISON, dtype=FP32, device=device),
    )


def case(
    kind: str, vocab_size: int, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of which nothing, the token alone, one more, some and all are told, of any token."""
    counts = [min(count, vocab_size) for count in (-1, 0, 1, 5, MAXIMUM_TOP, 2, -1, MAXIMUM_TOP)]
    logits = spread_logits(kind, len(counts), vocab_size, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(vocab_size, (len(counts),), generator=generator)
    token_ids[1::2] = logits[1::2].float().argmax(-1)
    token_ids[5] = -1
    return logits, token_ids, torch.tensor(counts, dtype=torch.int32)


def on_emulator(logits: Tensor, token_ids: Tensor, num_top: Tensor, **options: Any) -> Told:
    with emulated(**options):
        return logprobs(logits, token_ids, num_top, out=poisoned(len(logits)))


def run_anywhere(machine: str, logits: Tensor, token_ids: Tensor, num_top: Tensor) -> Told:
    if machine == "emulator":
        return on_emulator(logits, token_ids, num_top)
    inputs = (tensor.cuda() for tensor in (logits, token_ids, num_top))
    chosen, top_ids, top = logprobs(*inputs, out=poisoned(len(logits), "cuda"))
    return chosen.cpu(), top_ids.cpu(), top.cpu()


def is_right(found: Told, logits: Tensor, token_ids: Tensor, num_top: Tensor) -> bool:
    """What is told is the reference's, and nothing else is written."""
    expected = reference.logprobs(logits, token_ids, num_top)
    told = num_top[:, None] > torch.arange(MAXIMUM_TOP)
    is_asked = num_top >= 0
    close = {"rtol": 2e-6, "atol": 4e-6, "equal_nan": True}
    return (
        torch.allclose(found[0][is_asked], expected[0][is_asked], **close)
        and torch.equal(found[1][told], expected[1][told])
        and torch.allclose(found[2][told], expected[2][told], **close)
        and bool((found[0][~is_asked] == POISON).all())
        and all(bool((tensor[~told] == POISON).all()) for tensor in found[1:])
    )


@MACHINES
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_is_the_references(machine: str, kind: str, dtype: torch.dtype) -> None:
    largest = VOCABULARY if machine == "gpu" else 5000
    for vocab_size in (8, 2056, largest):
        inputs = case(kind, vocab_size, dtype, seed=vocab_size)
        assert is_right(run_anywhere(machine, *inputs), *inputs), vocab_size


@pytest.mark.parametrize("seed", range(4))
def test_nothing_depends_on_which_thread_is_first(seed: int) -> None:
    inputs = case("tied", 2056, seed=seed)
    assert is_right(on_emulator(*inputs, seed=50 + seed, resident=1 + seed % 3), *inputs)


def test_nothing_beside_rows_and_parameters_is_read() -> None:
    logits, token_ids, num_top = case("peaked", 2056)
    inputs = guarded(logits.contiguous()), guarded(token_ids), guarded(num_top)
    assert is_right(on_emulator(*inputs), *inputs)


def test_it_begins_before_the_kernels_that_it_reads_from_have_ended() -> None:
    logits, *others = case("peaked", 2056)
    inputs = (logits.contiguous(), *others)
    assert is_right(on_emulator(*inputs, late=inputs), *inputs)
    read = "const int count = min(arguments.num_top[row], MOST);"
    wait = "wait_for_previous_kernels();"
    careless = replacing(f"{wait}\n    allow_next_kernel();\n    {read}", f"{read} {wait}")
    assert not is_right(on_emulator(*inputs, late=inputs, change=careless), *inputs)


WAITS = "    cluster_sync();\n"
WRONG_LINES = {
    "a later id comes first": ("<< 32 | ~token", "<< 32 | token"),
    "a token twice": ("rank < bound", "rank <= bound"),
    "a token is left out": (
        "place += shared.all_top[i] > one",
        "place += shared.all_top[i] >= one",
    ),
    "a block is not counted": ("int block = 0; block < CLUSTER", "int block = 1; block < CLUSTER"),
    "a warp is not counted": ("int warp = 0; warp < WARPS", "int warp = 1; warp < WARPS"),
    "the weights' unit": ("uint64_t(1) << WEIGHT_BITS", "uint64_t(1) << 39"),
    "values instead of logarithms": ("- largest - log_total", "- largest"),
    "one more than asked": ("place < count", "place <= count"),
    "rows of which nothing is told": ("if (count < 0) return;", ""),
    "token -1 is read": ("0 <= token && ", ""),
    "nobody waits for the largest": (WAITS + "    const float largest", "    const float largest"),
    "nobody waits for the totals": (WAITS + "    if (rank == 0)", "    if (rank == 0)"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    change = replacing(*WRONG_LINES[name])

    def seems_right(seed: int) -> bool:
        logits, *others = case(("tied", "peaked", "near")[seed], 5000, seed=seed)
        inputs = (guarded(logits.contiguous()), *others)
        try:
            return is_right(on_emulator(*inputs, seed=seed, change=change), *inputs)
        except EmulationError:
            return False

    assert not all(map(seems_right, range(3)))


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    inputs, others = case("peaked", VOCABULARY, seed=1), case("tied", VOCABULARY, seed=2)
    held, out = [tensor.cuda() for tensor in inputs], poisoned(len(inputs[0]), "cuda")
    logprobs(*held, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logprobs(*held, out=out)
    for mine, other in zip(held, others, strict=True):
        mine.copy_(other)
    for mine, poison in zip(out, poisoned(len(inputs[0])), strict=True):
        mine.copy_(poison)
    graph.replay()
    chosen, top_ids, top = (tensor.cpu() for tensor in out)
    assert is_right((chosen, top_ids, top), *others)


def test_no_rows() -> None:
    with emulated():
        found = logprobs(torch.zeros(0, 64), torch.zeros(0).long(), torch.zeros(0).int())
    assert [tuple(tensor.shape) for tensor in found] == [(0,), (0, 20), (0, 20)]


REFUSED: list[tuple[int, Callable[[Tensor], Tensor], str]] = [
    (0, Tensor.half, "logits must be torch.bfloat16 or torch.float32, got torch.float16"),
    (0, lambda logits: logits[:, :60], r"V a multiple of 8, got \[2, 60\]"),
    (1, Tensor.int, "token_ids must be torch.int64, got torch.int32"),
    (1, lambda token_ids: token_ids[:1], r"token_ids must be \[2\], got \[1\]"),
    (2, Tensor.long, "num_top must be torch.int32, got torch.int64"),
    (2, every_second, "num_top must be contiguous"),
    (2, other_device, "num_top must be on the device of logits, got meta and cpu"),
]


@pytest.mark.parametrize(("position", "change", "sentence"), REFUSED)
def test_bad_input_is_refused(
    position: int, change: Callable[[Tensor], Tensor], sentence: str
) -> None:
    inputs = [torch.zeros(2, 64), torch.zeros(2).long(), torch.zeros(2).int()]
    inputs[position] = change(inputs[position])
    with emulated(), pytest.raises(ValueError, match=sentence):
        logprobs(*inputs)


def test_a_cpu_and_wrong_outputs_are_refused() -> None:
    inputs = torch.zeros(2, 64), torch.zeros(2).long(), torch.zeros(2).int()
    with pytest.raises(ValueError, match="logits must be on a GPU, got cpu"):
        logprobs(*inputs)
    chosen, top_ids, top = poisoned(2)
    with emulated(), pytest.raises(ValueError, match=r"top_ids must be \[2, 20\], got \[2, 5\]"):
        logprobs(*inputs, out=(chosen, top_ids[:, :5], top))
