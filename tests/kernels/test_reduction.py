"""The reduction over ranks: by the reference, in CUDA C++ on the emulator and on GPUs; bad input.

Sums have the bits of plain arithmetic in the order of ranks, on every rank.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric

from gptoss_kernels import ops, reference
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda.reduction import (
    Reduction,
    Room,
    _arguments_of,
    choose_layout,
    empty_memory,
)
from gptoss_kernels.cuda.rows import RowLayout

from .emulator import Emulation, EmulationError, emulated, replacing
from .reduction_cases import (
    EPS,
    FORMS,
    Form,
    added,
    bits,
    fault_of,
    make_ranks,
    make_steps,
    poison,
    random_update,
    reduce,
    run_processes,
)

Given = TypeVar("Given")
Change = Callable[[str], str] | None

# ---- the reference -----------------------------------------------------------------------------


def of_all_ranks(ranks: int, call: Callable[[ops.Reduction], Given]) -> list[Given]:
    """What `call` gives for each rank's reduction, in a thread for each."""
    store, given = HashStore(), {}

    def run(rank: int) -> None:
        group = torch.distributed.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=20))
        where = (cast(ProcessGroup, group), torch.device("cpu"))
        given[rank] = call(ops.load_reduction("reference", *where, columns=64, max_tokens=8))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [given[rank] for rank in range(ranks)]


@pytest.mark.parametrize("num_chosen", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_reference_adds_in_the_order_of_ranks(ranks: int, num_chosen: int) -> None:
    hidden, weight, (step,) = make_steps(ranks, 7, 64, "add", num_chosen=num_chosen, count=1)

    def run(reduction: ops.Reduction) -> tuple[Tensor, ...]:
        assert reduction.size == ranks
        own = [hidden.clone() for _ in range(3)]
        update = step.updates[reduction.rank]
        given = reduction.add(own[0], update)
        assert given is own[0]
        normed = reduction.rms_norm(own[1], weight, EPS, update)
        return *own, normed, *reduction.rms_norm_fp8(own[2], weight, EPS, update)

    wanted = reference.rms_norm(step.expected, weight, EPS)
    expected = (*[step.expected] * 3, wanted, *reference.quantise(wanted))
    for given in of_all_ranks(ranks, run):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(given, expected, strict=True))


def test_the_order_of_ranks_and_one_rounding_show() -> None:
    """What the sums of other tests would not be if they were added up otherwise."""
    hidden, _, (step,) = make_steps(3, 7, 64, "add", count=1)
    a, b, c = (update for update in step.updates if isinstance(update, Tensor))
    for wrong in (
        added(hidden, [c, b, a]),
        added(hidden + a, [b, c]),
        ((hidden + a) + b) + c,
        (hidden.double() + a + b + c).bfloat16(),
    ):
        assert not torch.equal(bits(wrong), bits(step.expected))


def test_the_reference_in_fp32_and_without_tokens() -> None:
    hidden = torch.randn(3, 64)

    def run(reduction: ops.Reduction) -> Tensor:
        assert reduction.add(hidden[:0].clone(), hidden[:0]).shape == (0, 64)
        assert reduction.failure() is None
        return reduction.add(hidden.clone(), torch.full((3, 64), 2.0**reduction.rank))

    for given in of_all_ranks(3, run):
        assert torch.equal(given, hidden + 7)


# ---- on the emulator ---------------------------------------------------------------------------


def emulate(
    ranks: int,
    tokens: int,
    form: Form,
    seed: int,
    *,
    num_chosen: int = 0,
    one_shot: int | None = None,
    room: int = 64,
    count: int = 4,
    change: Change = None,
    columns: int = 320,
    layout: RowLayout | None = None,
) -> str:
    """What is wrong after `count` launches of each rank, of which none waits for another's."""
    hidden, weight, steps = make_steps(
        ranks, tokens, columns, form, num_chosen=num_chosen, count=count, seed=seed
    )
    reductions = make_ranks(
        ranks, columns, room, "cpu", one_shot=one_shot, limit=0.2, layout=layout
    )
    hiddens = [hidden.clone() for _ in range(ranks)]
    at_once = emulated(seed, resident=3 * ranks, change=change)
    with at_once as emulation, emulation.together(ranks):
        for step in steps:
            for rank, reduction in enumerate(reductions):
                update = step.updates[rank]
                reduce(reduction, form, hiddens[rank], update, weight, step.out[rank])
    with emulated():
        return fault_of(form, weight, hiddens, steps)


@pytest.mark.parametrize(
    ("ranks", "tokens", "form", "options"),
    [
        (2, 1, "rms_norm_fp8", {}),
        (2, 8, "rms_norm_fp8", {}),
        (2, 5, "rms_norm", {"num_chosen": 2}),
        (3, 4, "add", {}),
        (2, 7, "rms_norm", {"one_shot": 0}),
        (3, 14, "rms_norm_fp8", {"one_shot": 0}),
        (4, 11, "add", {"one_shot": 0, "num_chosen": 2}),
        (8, 9, "rms_norm", {"one_shot": 0, "columns": 48}),
        (8, 2, "rms_norm", {"columns": 48}),
        (2, 7, "rms_norm_fp8", {"layout": RowLayout(3, 1, 1), "columns": 592}),
        (3, 7, "add", {"layout": RowLayout(1, 3, 1), "columns": 592, "one_shot": 0}),
    ],
    ids=str,
)
def test_sums_and_norms_have_the_same_bits_on_all_ranks(
    ranks: int, tokens: int, form: Form, options: dict
) -> None:
    for seed in range(4):
        assert not emulate(ranks, tokens, form, seed, **options)


MUTANTS = {
    "reads what is not there yet": ("if (!is_there(words))", "if (false)"),
    "looks at the first word alone": (
        "words[0] != NOT_YET && words[1] != NOT_YET && words[2] != NOT_YET &&\n"
        "           words[3] != NOT_YET",
        "words[0] != NOT_YET",
    ),
    "leaves letters in the inbox": ("send_vector(letter, nothing);", ";"),
    "has one inbox": ("= turn ^ 1;", "= turn;"),
    "turns at once": ("__syncthreads();\n    if (threadIdx.x == 0)", "if (threadIdx.x == 64)"),
    "adds its own first": ("if (peer == rank) {", "if (peer == 0) {"),
    "sends to the wrong part": ("sender - (sender > receiver)", "sender - (sender >= 1)"),
    "rounds before it adds the residual": (
        "pack_bf16(low + low_bf16(pair), high + high_bf16(pair))",
        "pack_bf16(low_bf16(pack_bf16(low, high)) + low_bf16(pair),"
        " high_bf16(pack_bf16(low, high)) + high_bf16(pair))",
    ),
    "begins with the second row": (
        "    begin_slot(own, known, blockIdx.x, exchange);\n",
        "    begin_slot(own, known, blockIdx.x + gridDim.x, exchange);\n",
    ),
    "keeps the first row": ("        own = next;\n", ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_seen(name: str) -> None:
    change = replacing(*MUTANTS[name])
    for seed in range(12):
        with suppress(EmulationError):
            if not emulate(3, 5, "add", seed, change=change):
                continue
        return
    pytest.fail(f"no seed sees it: {name}")


TWO_SHOT_MUTANTS = {
    "sends no sums": ("exchange.send(x, slot, 1, peer)", "exchange.send(x, slot, 0, peer)"),
    "waits for rows that are none": ("- (mine < rows);", ";"),
    "has one `shared`": ("shared[count++ % 2]", "shared[0]"),
}


@pytest.mark.parametrize("name", TWO_SHOT_MUTANTS)
def test_a_wrong_kernel_of_two_shots_is_seen(name: str) -> None:
    change = replacing(*TWO_SHOT_MUTANTS[name])
    for seed in range(12):
        with suppress(EmulationError):
            if not emulate(3, 13, "rms_norm", seed, change=change, one_shot=0):
                continue
        return
    pytest.fail(f"no seed sees it: {name}")


def test_launches_of_other_sizes_share_the_inboxes() -> None:
    """One shot, two, and more tokens than there is room for, in pieces."""
    reductions = make_ranks(2, 48, 64, "cpu", one_shot=20, limit=0.2)
    for seed, tokens in enumerate((1, 33, 2, 20, 64, 150, 3, 21)):
        hidden, weight, (step,) = make_steps(2, tokens, 48, "rms_norm_fp8", count=1, seed=seed)
        hiddens = [hidden.clone() for _ in range(2)]
        pieces = -(-tokens // 64)
        with emulated(seed, resident=6) as emulation:
            for piece in range(pieces):
                rows = slice(piece * 64, piece * 64 + 64)
                with emulation.together(2):
                    for rank, reduction in enumerate(reductions):
                        out = tuple(each[rows] for each in step.out[rank])
                        update = step.updates[rank]
                        assert isinstance(update, Tensor)
                        given = (hiddens[rank][rows], update[rows], weight, out)
                        reduce(reduction, "rms_norm_fp8", *given)
        with emulated():
            assert not fault_of("rms_norm_fp8", weight, hiddens, [step])


@pytest.mark.parametrize("num_chosen", [0, 2])
def test_more_tokens_than_there_is_room_for_go_in_pieces(num_chosen: int) -> None:
    launches: list[tuple[int, int]] = []
    (reduction, _) = make_ranks(2, 48, 64, "cpu")
    hidden, weight, (step,) = make_steps(2, 150, 48, "rms_norm_fp8", num_chosen=num_chosen, count=1)

    def prepare(hidden, update, weight, eps, out):
        rows = update.rows if isinstance(update, Mixture) else update
        assert len(rows) == len(hidden) == len(out[0]) == len(out[1])
        first = (hidden.data_ptr() - start) // (2 * 48)
        launches.append((first, len(hidden)))
        return lambda stream: None

    start = hidden.data_ptr()
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_prepare", prepare)
        reduction.rms_norm_fp8(hidden, weight, EPS, step.updates[0])
    assert launches == [(0, 64), (64, 64), (128, 22)]


def test_nan_that_look_like_nothing_arrive() -> None:
    reductions = make_ranks(2, 48, 64, "cpu", limit=0.2)
    update = torch.ones(2, 48).bfloat16()
    update[1].view(torch.int16)[:] = -1
    hiddens = [torch.ones(2, 48).bfloat16() for _ in range(2)]
    with emulated(resident=6) as emulation, emulation.together(2):
        for reduction, hidden in zip(reductions, hiddens, strict=True):
            reduction.add(hidden, update)
    for hidden in hiddens:
        assert bool((hidden[0] == 3).all())
        assert bool(hidden[1].isnan().all())
    assert torch.equal(bits(hiddens[0]), bits(hiddens[1]))


def test_who_waits_in_vain_says_for_whom() -> None:
    _, last = make_ranks(2, 48, 64, "cpu", limit=0.01)
    hidden = torch.ones(5, 48).bfloat16()
    assert last.failure() is None
    with emulated(), pytest.raises(EmulationError, match="__trap"):
        last.add(hidden, hidden.clone())
    said = last.failure()
    assert said in [f"rank 1 of 2 waited 0.01 s for row {row} of rank 0" for row in range(5)]


@pytest.mark.parametrize("num_chosen", [0, 2])
def test_what_the_kernel_before_wrote_is_read_after_the_wait(num_chosen: int) -> None:
    for seed in range(4):
        hidden, weight, (step,) = make_steps(2, 5, 320, "add", num_chosen=num_chosen, count=1)
        reductions = make_ranks(2, 320, 64, "cpu", limit=0.2)
        hiddens = [hidden.clone() for _ in range(2)]
        late = [
            update.outputs if isinstance(update, Mixture) else update for update in step.updates
        ]
        at_once = emulated(seed, resident=6, late=[*late, *hiddens])
        with at_once as emulation, emulation.together(2):
            for rank, reduction in enumerate(reductions):
                reduction.add(hiddens[rank], step.updates[rank])
        assert not fault_of("add", weight, hiddens, [step])


# ---- how ranks meet ----------------------------------------------------------------------------


def of_group(monkeypatch: pytest.MonkeyPatch, rendezvous: Callable[..., object]) -> ops.Reduction:
    """Of rank 1 of 3, where PyTorch's symmetric memory is plain memory of the CPU."""
    monkeypatch.setattr(symmetric, "empty", lambda size, **_: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    group = cast(ProcessGroup, SimpleNamespace(rank=lambda: 1, size=lambda: 3))
    return ops.load_reduction("cuda", group, torch.device("cpu"), columns=48, max_tokens=64)


def test_a_rank_knows_the_others_memory_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    def rendezvous(memory: Tensor, group: ProcessGroup) -> object:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        assert bool((memory == 0xFF).all())
        known.append(memory)
        # Ours lies 512 bytes within what was shared, as on all ranks.
        return SimpleNamespace(buffer_ptrs=[1 << 40, memory.data_ptr() - 512, 3 << 40])

    reduction = of_group(monkeypatch, rendezvous)
    hidden = torch.ones(2, 48).bfloat16()
    kind, launched = _arguments_of(2, is_mixture=False), []

    def launch(*given: Any) -> None:
        launched.append(kind.from_buffer_copy(ctypes.string_at(given[-1][0], ctypes.sizeof(kind))))

    monkeypatch.setattr(Emulation, "launch", launch)
    with emulated():
        reduction.add(hidden, hidden.clone())
    (arguments,) = launched
    assert arguments.inbox == known[0].data_ptr()
    assert list(arguments.peers) == [(1 << 40) + 512, (3 << 40) + 512]
    assert (arguments.rank, arguments.limit) == (1, int(ops.REDUCTION_LIMIT * 1e9))


def test_ranks_that_cannot_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(*_: object) -> object:
        raise RuntimeError("no peer access")

    sentence = "rank 1 of 3 on cpu cannot share its memory with the others: no peer access"
    with pytest.raises(ops.LibraryError, match=sentence):
        of_group(monkeypatch, rendezvous)


# ---- on a GPU ----------------------------------------------------------------------------------

# Ranks of one process share a GPU. All blocks of all of them must find room at once, beside those
# of each rank's next launch, which may begin early: of four ranks on 132 multiprocessors, where a
# block of theirs may have one to itself. 24 were too many.
SHARED_BLOCKS = 16


def run_on_streams(reductions: list[Reduction], run: Callable[[int], None]) -> None:
    """`run` of each rank on a stream of its own; nothing is compiled or allocated meanwhile.

    Whoever waited in vain is told.
    """
    streams = [torch.cuda.Stream() for _ in reductions]
    torch.cuda.synchronize()
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            run(rank)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        failures = [reduction.failure() for reduction in reductions]
        raise RuntimeError(f"{error}\n{failures}") from error


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_chosen", [0, 4])
@pytest.mark.parametrize("one_shot", [None, 0])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (2, 100), (2, 700), (4, 3), (4, 203)])
def test_ranks_of_one_gpu(
    ranks: int, tokens: int, one_shot: int | None, num_chosen: int, form: Form
) -> None:
    hidden, weight, steps = make_steps(
        ranks, tokens, 2880, form, num_chosen=num_chosen, seed=tokens, device="cuda"
    )
    reductions = make_ranks(
        *(ranks, 2880, 1024, "cuda"), one_shot=one_shot, num_blocks=SHARED_BLOCKS, limit=5.0
    )
    hiddens = [hidden.clone() for _ in range(ranks)]

    def run(rank: int) -> None:
        for step in steps:
            given = (hiddens[rank], step.updates[rank], weight, step.out[rank])
            reduce(reductions[rank], form, *given)

    run_on_streams(reductions, run)
    assert not fault_of(form, weight, hiddens, steps)


@pytest.mark.gpu
def test_ranks_of_one_gpu_that_are_at_different_sizes() -> None:
    """One shot, two, and pieces, of which no rank waits for another's host."""
    # By each of the first ones one more kernel is loaded, which waits for the stream.
    sizes = (1, 100, 700, 33, 1500, 2, 64, 65, 3, 1024, 1, 33)
    cases = [
        make_steps(2, tokens, 2880, "rms_norm_fp8", count=1, seed=seed, device="cuda")
        for seed, tokens in enumerate(sizes)
    ]
    reductions = make_ranks(2, 2880, 1024, "cuda", one_shot=64, num_blocks=SHARED_BLOCKS, limit=5.0)
    hiddens = [[hidden.clone() for hidden, _, _ in cases] for _ in range(2)]

    def run(rank: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            _, weight, (step,) = cases[number]
            given = (hiddens[rank][number], step.updates[rank], weight, step.out[rank])
            reduce(reductions[rank], "rms_norm_fp8", *given)

    for number in range(len(cases)):
        run_on_streams(reductions, partial(run, numbers=[number]))
    for rank in range(2):
        for own, (hidden, _, (step,)) in zip(hiddens[rank], cases, strict=True):
            own.copy_(hidden)
            poison(step.out[rank])
    run_on_streams(reductions, partial(run, numbers=range(len(cases))))
    for number, (_, weight, steps) in enumerate(cases):
        found = [hiddens[rank][number] for rank in range(2)]
        assert not fault_of("rms_norm_fp8", weight, found, steps)


@pytest.mark.gpu
def test_graphs_of_ranks_of_one_gpu() -> None:
    """A thousand reductions in a row, of which no rank waits for another's host."""
    ranks, count, replays = 2, 50, 20
    hidden, weight, steps = make_steps(ranks, 16, 2880, "rms_norm_fp8", count=count, device="cuda")
    reductions = make_ranks(ranks, 2880, 64, "cuda", num_blocks=SHARED_BLOCKS, limit=5.0)
    hiddens = [hidden.clone() for _ in range(ranks)]

    def run(rank: int) -> None:
        hiddens[rank].copy_(hidden)
        for step in steps:
            given = (hiddens[rank], step.updates[rank], weight, step.out[rank])
            reduce(reductions[rank], "rms_norm_fp8", *given)

    run_on_streams(reductions, run)
    graphs = [torch.cuda.CUDAGraph() for _ in range(ranks)]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            run(rank)
    for rank in range(ranks):
        hiddens[rank].fill_(torch.nan)
        for step in steps:
            poison(step.out[rank])
    for _ in range(replays):
        run_on_streams(reductions, lambda rank: graphs[rank].replay())
    assert not fault_of("rms_norm_fp8", weight, hiddens, steps)


@pytest.mark.gpu
def test_processes_on_one_gpu(tmp_path: Path) -> None:
    assert run_processes(2, "all_forms", tmp_path, one_gpu=True) == ["", ""]


@pytest.mark.parametrize(
    "one_gpu",
    [pytest.param(True, marks=pytest.mark.gpu), pytest.param(False, marks=pytest.mark.gpu2)],
)
def test_a_dead_process_is_waited_for_no_longer_than_the_limit(
    one_gpu: bool, tmp_path: Path
) -> None:
    said, last = run_processes(2, "dead_peer", tmp_path, one_gpu=one_gpu)
    assert last == "dead"
    assert "rank 0 of 2 waited 0.5 s for row" in said
    assert "of rank 1" in said


@pytest.mark.gpu2
def test_a_process_for_each_gpu(tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 8)
    assert run_processes(ranks, "all_forms", tmp_path, one_gpu=False) == [""] * ranks


# ---- bad input ---------------------------------------------------------------------------------


def a_reduction() -> Reduction:
    room = Room.of(2, 320, 64)
    return Reduction(0, room, [0, 0], empty_memory(room, "cpu"), limit=1.0)


@pytest.mark.parametrize(
    ("hidden", "update", "sentence"),
    [
        (torch.zeros(4, 320), torch.zeros(4, 320), "hidden must be torch.bfloat16"),
        (torch.zeros(4, 320).bfloat16(), torch.zeros(4, 320), "update must be torch.bfloat16"),
        (
            torch.zeros(4, 320).bfloat16(),
            torch.zeros(3, 320).bfloat16(),
            r"update must be \[4, 320\], got \[3, 320\]",
        ),
        (
            torch.zeros(4, 48).bfloat16(),
            torch.zeros(4, 48).bfloat16(),
            "hidden must have the 320 columns that there is room for, got 48",
        ),
        (
            torch.zeros(4, 320).bfloat16(),
            random_update(4, 320, 9, torch.Generator()),
            "K must be at most 8, got 9",
        ),
        (
            torch.zeros(4, 320).bfloat16(),
            torch.zeros(4, 320).bfloat16(),
            "hidden must be on a GPU, got cpu",
        ),
    ],
)
def test_bad_input_is_refused(hidden: Tensor, update: Tensor | Mixture, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        a_reduction().add(hidden, update)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 320, 64), "of 2 to 8 ranks, got 1"),
        ((9, 320, 64), "of 2 to 8 ranks, got 9"),
        ((2, 312, 64), "a multiple of 16, and tokens at least 1, got 312 and 64"),
        ((2, 320, 0), "a multiple of 16, and tokens at least 1, got 320 and 0"),
    ],
)
def test_no_such_room(arguments: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Room.of(*arguments)


def test_how_much_room_there_is() -> None:
    two = Room.of(2, 2880, 8100)
    assert (two.tokens, two.slots) == (8128, (8128, 0))
    assert two.offsets == (0, 2 * 8128 * 5760, 2 * 8128 * 5760)
    eight = Room.of(8, 2880, 8192)
    assert eight.slots == (45, 1024)
    assert eight.offsets[1] == 2 * 45 * 7 * 5760
    assert eight.offsets[2] == eight.offsets[1] + 2 * 1024 * 2 * 7 * 5760
    assert Room.of(4, 2880, 16).slots == (45, 16)


def test_many_tokens_take_fewer_warps_with_two_ranks() -> None:
    assert choose_layout(512, 2880, 2) == RowLayout(1, 12, 1)
    assert choose_layout(513, 2880, 2) == RowLayout(2, 6, 1)
    assert choose_layout(513, 2880, 4) == RowLayout(1, 12, 1)
