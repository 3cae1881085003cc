"""sample in CUDA C++, emulated and on a GPU, against the reference: every token; bad input."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import MAXIMUM_VOCABULARY, SamplingRows
from gptoss_kernels.cuda.sample import sample
from gptoss_kernels.cuda.sampling import Cluster

from .emulator import EmulationError, emulated, guarded, replacing
from .sampling_cases import KINDS, border_rows, mixed_rows, sampling_rows, spread_logits
from .wrong_tensors import every_second, other_device, shifted

POISON = -7
VOCABULARY = 201088
BF16, FP32 = torch.bfloat16, torch.float32


def moved(rows: SamplingRows, move: Callable[[Tensor], Tensor]) -> SamplingRows:
    return SamplingRows(*map(move, rows))


def on_gpu(logits: Tensor, rows: SamplingRows, cluster: Cluster | None = None) -> Tensor:
    out = torch.full((len(logits),), POISON, device="cuda")
    return sample(logits.cuda(), moved(rows, Tensor.cuda), out=out, cluster=cluster).cpu()


def on_emulator(
    logits: Tensor,
    rows: SamplingRows,
    seed: int = 0,
    cluster: Cluster | None = None,
    **options: Any,
) -> Tensor:
    with emulated(seed, **options):
        return sample(logits, rows, out=torch.full((len(logits),), POISON), cluster=cluster)


def run_anywhere(machine: str, logits: Tensor, rows: SamplingRows) -> Tensor:
    return on_gpu(logits, rows) if machine == "gpu" else on_emulator(logits, rows)


MACHINES = pytest.mark.parametrize(
    "machine", ["emulator", pytest.param("gpu", marks=pytest.mark.gpu)]
)


def case(
    kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[Tensor, SamplingRows]:
    logits = spread_logits(kind, num_rows, vocab_size, dtype, seed)
    return logits, mixed_rows(logits, seed)


def at_borders(
    kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype = BF16
) -> tuple[Tensor, SamplingRows]:
    logits = spread_logits(kind, num_rows // 4, vocab_size, dtype, seed=3)
    logits = logits.repeat_interleave(4, dim=0)
    return logits, border_rows(logits, 0.4)


# Of one vector, of fewer than there are blocks, of a whole cell in each block and a vector more, of
# several cells a warp.
@pytest.mark.parametrize(
    ("vocab_size", "cluster"),
    [(8, 8), (40, 8), (2048, 8), (2056, 8), (40_000, 8), (40, 16), (4104, 16), (40_000, 16)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_references(kind: str, vocab_size: int, cluster: Cluster) -> None:
    num_rows = 10 if vocab_size < 40_000 else 6
    logits, rows = case(kind, num_rows, vocab_size, seed=vocab_size)
    assert torch.equal(on_emulator(logits, rows, cluster=cluster), reference.sample(logits, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_references_in_fp32(kind: str) -> None:
    logits, rows = case(kind, 20, 4104, FP32)
    assert torch.equal(on_emulator(logits, rows), reference.sample(logits, rows))


def test_the_largest_sums_have_room() -> None:
    """All weights are the largest, and all of one digit."""
    logits = spread_logits("flat", 1, MAXIMUM_VOCABULARY, BF16, seed=0)
    rows = sampling_rows(1, top_p=0.5, uniforms=0.9)
    assert on_emulator(logits, rows).tolist() == [int(0.9 * MAXIMUM_VOCABULARY)]


@MACHINES
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["near", "peaked"])
def test_a_unit_decides_at_borders(machine: str, dtype: torch.dtype, kind: str) -> None:
    logits, rows = at_borders(kind, 40, VOCABULARY if machine == "gpu" else 2056, dtype)
    expected = reference.sample(logits, rows)
    assert (expected[::4] != expected[1::4]).all()
    assert torch.equal(run_anywhere(machine, logits, rows), expected)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_depends_on_which_thread_is_first(seed: int) -> None:
    logits, rows = case("tied", 10, 5000, seed=seed)
    found = on_emulator(logits, rows, seed=100 + seed, resident=1 + seed % 3, cluster=16)
    assert torch.equal(found, reference.sample(logits, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_references_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for num_rows, vocab_size in ((20, VOCABULARY), (20, 8), (60, 2056), (20, MAXIMUM_VOCABULARY)):
        logits, rows = case(kind, num_rows, vocab_size, dtype, seed=vocab_size)
        expected = reference.sample(logits, rows)
        for cluster in (8, 16):
            assert torch.equal(on_gpu(logits, rows, cluster), expected), (vocab_size, cluster)


@pytest.mark.gpu
def test_the_reference_on_a_gpu_draws_the_same() -> None:
    logits, rows = case("peaked", 20, VOCABULARY)
    found = reference.sample(logits.cuda(), moved(rows, Tensor.cuda))
    assert torch.equal(found.cpu(), reference.sample(logits, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 33, 128, 512])
def test_a_row_knows_nothing_of_the_others(num_rows: int) -> None:
    logits, rows = case("peaked", num_rows, VOCABULARY, seed=num_rows)
    together = on_gpu(logits, rows)
    # The rows of a batch of 512 would take the reference half a minute.
    for row in range(0, num_rows, 7):
        one = slice(row, row + 1)
        first = rows.masked_start[row]
        own = moved(rows, lambda column, one=one: column[one])._replace(
            masked_start=rows.masked_start[row : row + 2] - first,
            masked_ids=rows.masked_ids[int(first) :],
        )
        assert torch.equal(on_gpu(logits[one], own), together[one])
        assert torch.equal(reference.sample(logits[one], own), together[one])


@pytest.mark.gpu
def test_frequencies_are_those_of_the_softmax() -> None:
    """Beside a plain softmax in fp64: of 20,000 rows each token as often as it is likely."""
    logits = (torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    rows = sampling_rows(20_000, temperature=0.8, uniforms=uniforms)
    token_ids = on_gpu(logits.expand(20_000, -1).contiguous(), rows)
    shares = torch.bincount(token_ids, minlength=1000) / 20_000
    expected = torch.softmax(logits[0].double() / 0.8, -1)
    assert (shares - expected).abs().max() < 1.1 / 20_000


@MACHINES
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_numbers_give_no_token(machine: str, value: float) -> None:
    for temperature in (0.0, 1.0):
        logits = torch.zeros(4, 2056, dtype=BF16)
        logits[1, 2050] = logits[2, 3] = logits[3] = value
        rows = sampling_rows(4, temperature=temperature, uniforms=0.0)
        expected = reference.sample(logits, rows)
        assert expected[3] == -1
        assert torch.equal(run_anywhere(machine, logits, rows), expected)


@MACHINES
def test_ids_that_the_vocabulary_does_not_have_are_not_masked(machine: str) -> None:
    logits = torch.zeros(2, 2056, dtype=BF16)
    logits[:, 5] = 1
    strange = [-1, 2056, 2**31 - 1, -(2**31)]
    rows = sampling_rows(2, temperature=0.0, masked=[strange, [*strange, 5, 0]])
    assert run_anywhere(machine, logits, rows).tolist() == [5, 1]


@MACHINES
@pytest.mark.parametrize("num_rows", [3, 20])
def test_tokens_are_kept_by_seat(machine: str, num_rows: int) -> None:
    """Greedy, drawn and missing ones; what has no seat is kept nowhere."""
    logits, rows = case("peaked", num_rows, 2056)
    logits[1] = torch.nan
    seats = torch.randperm(num_rows + 4)[:num_rows]
    seats[2] = -1
    seats[0] = num_rows + 4
    device = "cuda" if machine == "gpu" else "cpu"
    kept = torch.full((num_rows + 4,), POISON, device=device)
    inputs = logits.to(device), moved(rows, lambda column: column.to(device)), seats.to(device)
    with contextlib.nullcontext() if machine == "gpu" else emulated():
        found = sample(*inputs, kept).cpu()
    expected = torch.full((num_rows + 4,), POISON)
    assert torch.equal(found, reference.sample(logits, rows))
    has_seat = (seats >= 0) & (seats < num_rows + 4)
    expected[seats[has_seat]] = found[has_seat]
    assert torch.equal(kept.cpu(), expected)


@MACHINES
def test_all_but_one_can_be_masked(machine: str) -> None:
    logits = torch.zeros(3, 2056, dtype=BF16)
    everything = list(range(2056))
    masked = [[i for i in everything if i != 2049], everything, []]
    rows = sampling_rows(3, uniforms=0.999, masked=masked)
    found = run_anywhere(machine, logits, rows)
    assert found.tolist() == [2049, -1, int(0.999 * 2056)]
    assert not logits.any()  # what is masked is masked in a copy


def test_nothing_beside_rows_and_parameters_is_read() -> None:
    logits, rows = case("peaked", 10, 2056)
    expected = reference.sample(logits, rows)
    assert torch.equal(on_emulator(guarded(logits.contiguous()), moved(rows, guarded)), expected)


def test_it_begins_before_the_kernels_that_it_reads_from_have_ended() -> None:
    logits, rows = case("peaked", 10, 2056)
    expected = reference.sample(logits, rows)
    late = [logits.contiguous(), *rows]
    for seed in range(3):
        assert torch.equal(on_emulator(late[0], rows, seed, late=late), expected)
    fetch = "part.fetch(arguments.rows.at(row));"
    wait = "wait_for_previous_kernels();"
    first = f"{fetch} copy_wait<0>(); {wait}"
    careless = replacing(f"{wait}\n    allow_next_kernel();\n\n    {fetch}", first)
    assert not torch.equal(on_emulator(late[0], rows, late=late, change=careless), expected)


WAITS = "    cluster_sync();\n"
WRONG_LINES = {
    "a later id wins a tie": ("<< 32 | ~token", "<< 32 | token"),
    "an id too far": ("place = i - 1", "place = i"),
    "the blocks before are not counted": ("totals - total, int(rank)", "0 * totals, int(rank)"),
    "the cells before are not counted": ("target - before, owner", "target, owner"),
    "the sum of a cell loses its upper half": ("low + (high << 24)", "low"),
    "a product of 64 bits": ("high << 11 | low >> 53", "low >> 53"),
    "a share is rounded down": ("sum = low + ((uint64_t(1) << 53) - 1)", "sum = low"),
    "a digit loses its lower half": ("if (low != 0)", "if (false)"),
    "a copy of the digits is not added": (
        "int i = 0; i < COPIES; ++i",
        "int i = 1; i < COPIES; ++i",
    ),
    "the digits of the last cut are added": ("i < DIGITS * COPIES; i +=", "i < 0; i +="),
    "the digit below": ("shared.found[0] = digit", "shared.found[0] = digit - (digit > 0)"),
    "larger digits are not counted": ("wanted - before", "wanted"),
    "the digits above do not matter": ("!= above) continue", "!= above && false) continue"),
    "0 and -0 differ": ("value + 0.f", "value"),
    "min_p is rounded down": ("ceil(min_p", "floor(min_p"),
    "what is least is not kept": ("value < least) return", "value <= least) return"),
    "all temperatures are 1": ("LOG2_E / temperature", "LOG2_E"),
    "weights are rounded once more": (
        "fmaf(power, x, 1.f)",
        "__fadd_rn(__fmul_rn(power, x), 1.f)",
    ),
    "the last weights are lost": ("rate), -48.f)", "rate), -30.f)"),
    "nothing is masked": ("[place] = NONE >> 16", "[place] += 0"),
    "one turn for all digits": ("shift / DIGIT_BITS % 2", "0"),
    "nobody waits for the digits": (WAITS + "    if (digit < DIG", "    if (digit < DIG"),
    "nobody waits for the largest": (WAITS + "    const uint64_t b", "    const uint64_t b"),
    "nobody waits for the totals": (WAITS + "    if (!is_first", "    if (!is_first"),
}
# What sees the most in the least time comes first.
CASES = (
    lambda: case("peaked", 10, 6000, BF16),
    lambda: case("zeros", 10, 6000, BF16),
    lambda: at_borders("peaked", 12, 2056, BF16),
    lambda: case("tied", 10, 6000, BF16),
    lambda: case("near", 10, 6000, FP32),
    lambda: at_borders("near", 40, 2056, FP32),
)


@functools.cache
def wrong_case(number: int) -> tuple[Tensor, SamplingRows, Tensor]:
    logits, rows = CASES[number]()
    return logits, rows, reference.sample(logits, rows)


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    change = replacing(*WRONG_LINES[name])

    def is_right(number: int) -> bool:
        logits, rows, expected = wrong_case(number)
        try:
            return torch.equal(on_emulator(logits, rows, number, change=change), expected)
        except EmulationError:
            return False

    assert not all(map(is_right, range(len(CASES))))


@pytest.mark.gpu
def test_captured_graph_is_eager() -> None:
    """With rows, masked tokens and their number changed in place."""
    logits, rows = case("peaked", 33, VOCABULARY, seed=1)
    others, other_rows = case("tied", 33, VOCABULARY, seed=2)
    size = max(len(each.masked_ids) for each in (rows, other_rows))
    held = moved(rows, Tensor.cuda)._replace(
        masked_ids=torch.zeros(size, dtype=torch.int32, device="cuda")
    )
    held.masked_ids[: len(rows.masked_ids)] = rows.masked_ids.cuda()
    held_logits, out = logits.cuda(), torch.full((33,), POISON, device="cuda")
    sample(held_logits, held, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(held_logits, held, out=out)
    for source, these in ((others, other_rows), (logits, rows)):
        held_logits.copy_(source)
        for own, new in zip(held, these, strict=True):
            own[: len(new)].copy_(new)
        out.fill_(POISON)
        graph.replay()
        assert torch.equal(out.cpu(), reference.sample(source, these))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing() -> None:
    logits, rows = case("peaked", 10, VOCABULARY)
    logits, rows = logits.cuda(), moved(rows, Tensor.cuda)
    sample(logits, rows)
    try:
        torch.cuda.set_sync_debug_mode("error")
        sample(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_rows() -> None:
    with emulated():
        found = sample(torch.zeros(0, 64, dtype=BF16), sampling_rows(0))
    assert (found.shape, found.dtype) == ((0,), torch.int64)


def good() -> dict[str, Tensor]:
    rows = sampling_rows(2, masked=[[1], [2]])
    return {"logits": torch.zeros(2, 64, dtype=BF16), **rows._asdict()}


REFUSED: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("logits", Tensor.half, "logits must be torch.bfloat16 or torch.float32, got torch.float16"),
    ("logits", lambda x: x[:, :60], r"V a multiple of 8, got \[2, 60\]"),
    ("logits", lambda x: x[:, :0], r"V a multiple of 8, got \[2, 0\]"),
    ("logits", lambda x: x.new_zeros(2, 261_640), "V must be at most 261632, got 261640"),
    ("logits", lambda x: x[0], r"logits must be \[S, V\].*, got \[64\]"),
    ("logits", every_second, "logits must have adjacent columns"),
    ("logits", shifted, "logits must start at a multiple of 16 bytes"),
    ("temperature", Tensor.float, "temperature must be torch.float64, got torch.float32"),
    ("top_k", Tensor.long, "top_k must be torch.int32, got torch.int64"),
    ("masked_start", lambda x: x[:2], r"masked_start must be \[3\], got \[2\]"),
    ("masked_ids", lambda x: x[None], r"masked_ids must be \[M\], got \[1, 2\]"),
    ("uniforms", lambda x: x[:1], r"uniforms must be \[2\], got \[1\]"),
    ("top_p", every_second, "top_p must be contiguous"),
    ("min_p", other_device, "min_p must be on the device of logits, got meta and cpu"),
    ("num_top", Tensor.long, "num_top must be torch.int32"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_bad_input_is_refused(name: str, change: Callable[[Tensor], Tensor], sentence: str) -> None:
    tensors = good()
    tensors[name] = change(tensors[name])
    logits = tensors.pop("logits")
    with emulated(), pytest.raises(ValueError, match=sentence):
        sample(logits, SamplingRows(**tensors))


def test_a_cpu_and_a_wrong_output_are_refused() -> None:
    tensors = good()
    logits = tensors.pop("logits")
    rows = SamplingRows(**tensors)
    with pytest.raises(ValueError, match="logits must be on a GPU, got cpu"):
        sample(logits, rows)
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulated())
        stack.enter_context(pytest.raises(ValueError, match=r"out must be \[2\], got \[3\]"))
        sample(logits, rows, out=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("seats", "last", "sentence"),
    [
        (torch.zeros(2).long(), None, "must be given together"),
        (None, torch.zeros(2).long(), "must be given together"),
        (torch.zeros(3).long(), torch.zeros(9).long(), r"seats must be \[2\], got \[3\]"),
        (torch.zeros(2).int(), torch.zeros(9).long(), "seats must be torch.int64"),
        (torch.zeros(2).long(), torch.zeros(9), "last_token_ids must be torch.int64"),
        (torch.zeros(2).long(), torch.zeros(3, 3).long(), r"last_token_ids must be \[9\]"),
    ],
)
def test_bad_seats_are_refused(seats: Tensor | None, last: Tensor | None, sentence: str) -> None:
    tensors = good()
    logits = tensors.pop("logits")
    with emulated(), pytest.raises(ValueError, match=sentence):
        sample(logits, SamplingRows(**tensors), seats, last)
