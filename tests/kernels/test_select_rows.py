"""select_rows and embedding in CUDA C++ against the reference, bit for bit; bad input."""

import math

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.cuda.rows import RowLayout
from gptoss_kernels.cuda.select_rows import embedding, select_rows

from .emulator import EmulationError, emulated, replacing

TYPES = pytest.mark.parametrize("row_type", [torch.int32, torch.int64])


def random_inputs(
    num_rows: int, columns: int, row_type: torch.dtype, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """A table of 50 rows, and rows of it, among them such as are none."""
    generator = torch.Generator(device=device).manual_seed(num_rows + columns)
    table = torch.randn(50, columns, device=device, generator=generator).bfloat16()
    rows = torch.randint(50, (num_rows,), device=device, generator=generator)
    rows[3::7], rows[4::7], rows[5::7] = -1, 50, 2**31 - 1
    return table, rows.to(row_type)


def poisoned(num_rows: int, columns: int, device: str = "cuda") -> Tensor:
    return torch.full((num_rows, columns), 7.0, device=device, dtype=torch.bfloat16)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.cpu().nan_to_num(9), expected.cpu().nan_to_num(9))


@TYPES
@pytest.mark.parametrize("columns", [16, 320, 2880])
def test_emulated(columns: int, row_type: torch.dtype) -> None:
    table, rows = random_inputs(9, columns, row_type, "cpu")
    expected = reference.select_rows(table, rows)
    for seed, layout in enumerate((None, RowLayout.of(columns, 2, threads=256))):
        with emulated(seed, late=(table, rows)):
            out = poisoned(9, columns, "cpu")
            assert same(select_rows(table, rows, out=out, layout=layout), expected)
            assert same(embedding(rows, table, layout=layout), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0 <= row && ", ""),
        ("row < arguments.table_rows", "row <= arguments.table_rows"),
        ("wait_for_previous_kernels();", "if (false) wait_for_previous_kernels();"),
    ],
)
def test_a_wrong_kernel_is_seen(old: str, new: str) -> None:
    table, rows = random_inputs(9, 320, torch.int64, "cpu")
    expected = reference.select_rows(table, rows)
    try:
        with emulated(late=(table, rows), change=replacing(old, new)):
            assert not same(select_rows(table, rows), expected)
    except EmulationError:
        pass


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize("columns", [16, 320, 2880, 8192])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 127, 3000])
def test_every_row_is_the_references(num_rows: int, columns: int, row_type: torch.dtype) -> None:
    table, rows = random_inputs(num_rows, columns, row_type)
    expected = reference.select_rows(table, rows)
    assert same(select_rows(table, rows, out=poisoned(num_rows, columns)), expected)
    assert same(embedding(rows, table, out=poisoned(num_rows, columns)), expected)
    if num_rows:
        assert not same(expected.roll(1, 1), expected)


@pytest.mark.gpu
def test_rows_apart_and_nothing_beside_them_is_written() -> None:
    table, rows = random_inputs(67, 2880 + 64, torch.int64)
    around = poisoned(67 + 2, 2880 + 32)
    out = select_rows(table[:, 32:-32], rows, out=around[1:-1, 16:-16])
    assert same(out, reference.select_rows(table[:, 32:-32], rows))
    out.fill_(7)
    assert bool((around == 7).all())


@pytest.mark.gpu
def test_a_table_of_more_than_2_to_the_31_values() -> None:
    table = torch.zeros(800_000, 2880, device="cuda", dtype=torch.bfloat16)
    table[-1] = 3
    assert bool((embedding(torch.tensor([799_999], device="cuda"), table) == 3).all())


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    table, rows = random_inputs(20, 2880, torch.int64)
    out = embedding(rows, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embedding(rows, table, out=out)
    rows.copy_(rows.roll(1))
    out.fill_(math.inf)
    graph.replay()
    assert same(out, reference.embedding(rows, table))


@pytest.mark.parametrize(
    ("position", "change", "sentence"),
    [
        (0, lambda table: table.float(), "hidden must be torch.bfloat16, got torch.float32"),
        (0, lambda table: table[:, :312], r"a multiple of 16 columns, got \[50, 312\]"),
        (0, lambda table: table[0], r"hidden must be a matrix with .*, got \[320\]"),
        (1, lambda rows: rows.short(), "rows must be torch.int64 or torch.int32, got torch.int16"),
        (1, lambda rows: rows[None], r"rows must have one dimension, got \[1, 5\]"),
        (1, lambda rows: rows.repeat(2)[::2], "rows must be contiguous"),
        (0, lambda table: table, "hidden must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(position: int, change, sentence: str) -> None:
    inputs = [*random_inputs(5, 320, torch.int64, "cpu")]
    inputs[position] = change(inputs[position])
    table, rows = inputs
    with pytest.raises(ValueError, match=sentence):
        select_rows(table, rows)
    named = sentence.replace("hidden", "weight").replace("rows must", "token_ids must")
    with pytest.raises(ValueError, match=named):
        embedding(rows, table)
