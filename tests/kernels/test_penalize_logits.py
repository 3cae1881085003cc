"""penalize_logits in CUDA C++, emulated and on a GPU, is the reference, bit for bit; bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import Penalties
from gptoss_kernels.cuda.penalize_logits import penalize_logits

from .emulator import EmulationError, emulated, guarded, replacing
from .sampling_cases import penalized_case, penalties_of
from .wrong_tensors import every_second, other_device, shifted

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY = 201088
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
MACHINES = pytest.mark.parametrize(
    "machine", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
)
# One vector; a block's part, one vector less and more; three parts.
SIZES = (8, 40, 8184, 8192, 8200, 24576)


def expected_of(logits: Tensor, input_ids: Tensor, penalties: Penalties) -> Tensor:
    out = torch.full((len(penalties.rows), logits.shape[1]), torch.nan)
    reference.penalize_logits(logits, input_ids, penalties, out)
    assert not out.isnan().any()
    return out


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().contiguous().view(torch.int32), expected.view(torch.int32))


def run_anywhere(machine: str, *inputs: Any) -> Tensor:
    if machine == "emulator":
        return on_emulator(*inputs)
    logits, input_ids, penalties = inputs
    found = torch.full((len(penalties.rows), logits.shape[1] + 16), torch.nan, device="cuda")
    found = found[:, : logits.shape[1]]
    on_gpu = Penalties(*(tensor.cuda() for tensor in penalties))
    penalize_logits(logits.cuda(), input_ids.cuda(), on_gpu, found)
    return found


def on_emulator(logits: Tensor, input_ids: Tensor, penalties: Penalties, **options: Any) -> Tensor:
    """All 7 where more than the rows was written."""
    num_rows, vocab_size = len(penalties.rows), logits.shape[1]
    around = torch.full((num_rows + 2, vocab_size + 16), 7.0)
    found = around[1:-1, :vocab_size]
    found.fill_(torch.nan)
    with emulated(**options):
        penalize_logits(logits, input_ids, penalties, found)
    is_left_alone = bool((around[[0, -1]] == 7).all() and (around[:, vocab_size:] == 7).all())
    return found if is_left_alone else torch.full_like(found, 7.0)


def guarded_case(vocab_size: int) -> Iterator[Any]:
    logits, input_ids, penalties = penalized_case(vocab_size)
    yield guarded(logits.contiguous())
    yield guarded(input_ids)
    yield Penalties(*map(guarded, penalties))


@MACHINES
@DTYPES
def test_each_row_is_the_references(machine: str, dtype: torch.dtype) -> None:
    for vocab_size in (*SIZES, VOCABULARY) if machine == "gpu" else SIZES:
        inputs = penalized_case(vocab_size, dtype)
        before = [tensor.clone() for tensor in inputs[:2]]
        expected = expected_of(*inputs)
        assert not same(expected, inputs[0].float()[inputs[2].rows.long()])
        assert same(run_anywhere(machine, *inputs), expected), vocab_size
        assert all(map(torch.equal, before, inputs[:2])), "logits stay what the model said"


def test_nothing_beside_what_is_given_is_read() -> None:
    inputs = guarded_case(8200)
    assert same(on_emulator(*inputs), expected_of(*penalized_case(8200)))


def test_it_begins_before_the_kernels_that_it_reads_from_have_ended() -> None:
    logits, input_ids, penalties = guarded_case(8200)
    late = (logits, input_ids, *penalties)
    assert same(
        on_emulator(logits, input_ids, penalties, late=late), expected_of(*penalized_case(8200))
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y > 0 ?", "y < 0 ?"),
        ("if (count >= 0)", "if (count > 0)"),
        ("if (count > 0)", "if (count >= 0)"),
        ("double(logit) + double(bias)", "double(logit)"),
        ("double(frequency) * count", "double(frequency)"),
        ("max(count, 0) + 1", "count + 1"),
        ("is_counted = 1;", ""),
        ("&& newest < size", ""),
        ("token < 0 || ", ""),
        ("arguments.start[i + 1]", "arguments.start[i + 1] - 1"),
        ("low_bf16(four.y)", "high_bf16(four.y)"),
        ("out[newest], 0, 1", "out[newest], 0, 0"),
        ("wait_for_previous_kernels();", "if (false) wait_for_previous_kernels();"),
    ],
)
def test_a_wrong_kernel_is_seen(old: str, new: str) -> None:
    logits, input_ids, penalties = guarded_case(8200)
    change, late = replacing(old, new), (logits, input_ids, *penalties)
    with contextlib.suppress(EmulationError):
        found = on_emulator(logits, input_ids, penalties, late=late, change=change)
        assert not same(found, expected_of(*penalized_case(8200)))


def test_what_is_nowhere_is_left_alone() -> None:
    """A row that there is not, tokens that there are not."""
    logits, _, _ = penalized_case(40)
    settings = [(2.0, 1.0, 1.0)] * 3
    entries = [{3: (1, 0.0)}, {-1: (1, 0.0), 40: (2, 0.0), 5: (0, 0.0)}, {}]
    given = penalties_of([-1, 1, 6], [-1, 1, -1], settings, entries)
    found = on_emulator(logits, torch.tensor([7, -1]), given)
    assert found[[0, 2]].isnan().all()
    expected = logits[1].float()
    expected[5] *= 0.5 if expected[5] > 0 else 2
    assert same(found[1], expected)


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    inputs = penalized_case(VOCABULARY)
    logits, input_ids = (tensor.cuda().contiguous() for tensor in inputs[:2])
    penalties = Penalties(*(tensor.cuda() for tensor in inputs[2]))
    out = torch.empty(len(penalties.rows), VOCABULARY, device="cuda")
    penalize_logits(logits, input_ids, penalties, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        penalize_logits(logits, input_ids, penalties, out)
    penalties.frequency.add_(0.25)
    out.fill_(torch.nan)
    graph.replay()
    changed = inputs[2]._replace(frequency=inputs[2].frequency + 0.25)
    assert same(out, expected_of(*inputs[:2], changed))


def test_no_rows() -> None:
    logits, input_ids, penalties = penalized_case(40)
    none = penalties_of([], [], [(1.0, 0.0, 0.0)], [])
    none = none._replace(**{name: getattr(none, name)[:0] for name in none._fields[2:5]})
    with emulated():
        penalize_logits(logits, input_ids, none, torch.empty(0, 40))
        penalize_logits(logits[:0], input_ids, penalties, torch.empty(5, 40))


REFUSED: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("logits", Tensor.half, "logits must be torch.bfloat16 or torch.float32, got torch.float16"),
    ("logits", lambda logits: logits[:, :36], r"V a multiple of 8, got \[6, 36\]"),
    ("logits", shifted, "logits must start at a multiple of 16 bytes"),
    ("input_ids", Tensor.int, "input_ids must be torch.int64, got torch.int32"),
    ("rows", Tensor.long, "rows must be torch.int32, got torch.int64"),
    ("newest", lambda newest: newest[:4], r"newest must be \[5\], got \[4\]"),
    ("presence", Tensor.double, "presence must be torch.float32, got torch.float64"),
    ("start", lambda start: start[:5], r"start must be \[6\], got \[5\]"),
    ("counts", lambda counts: counts[1:], r"counts must be \[66\], got \[65\]"),
    ("token_ids", every_second, "token_ids must be contiguous"),
    ("biases", other_device, "biases must be on the device of logits, got meta and cpu"),
    ("out", Tensor.bfloat16, "out must be torch.float32, got torch.bfloat16"),
    ("out", lambda out: out[:4], r"out must be \[5, 40\], got \[4, 40\]"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_bad_input_is_refused(name: str, change: Callable[[Tensor], Tensor], sentence: str) -> None:
    logits, input_ids, penalties = penalized_case(40)
    given = {"logits": logits, "input_ids": input_ids, "out": torch.empty(5, 40)}
    given |= penalties._asdict()
    given[name] = change(given[name])
    fields = Penalties(*map(given.__getitem__, Penalties._fields))
    with emulated(), pytest.raises(ValueError, match=sentence):
        penalize_logits(given["logits"], given["input_ids"], fields, given["out"])


def test_a_cpu_is_refused() -> None:
    logits, input_ids, penalties = penalized_case(40)
    with pytest.raises(ValueError, match="logits must be on a GPU, got cpu"):
        penalize_logits(logits, input_ids, penalties, torch.empty(5, 40))
