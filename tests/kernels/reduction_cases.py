"""Ranks of one process, on one GPU or in the emulator, and of processes of their own.

Each step is one reduction of all ranks: hidden, and what each rank adds. The steps of a rank follow
each other without a word between the ranks, as in a model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gptoss_kernels import contracts, reference
from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda.reduction import Reduction, Room, empty_memory
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm, rms_norm_fp8
from gptoss_kernels.cuda.rows import RowLayout

EPS = 1e-5
Form = Literal["add", "rms_norm", "rms_norm_fp8"]
FORMS: tuple[Form, ...] = ("add", "rms_norm", "rms_norm_fp8")
PATIENCE = 90.0  # seconds for processes that load torch, compile and meet


@dataclass
class Step:
    """Of all ranks. expected: hidden [T, H] behind it, by plain arithmetic; out: by rank."""

    updates: list[Tensor | Mixture]
    expected: Tensor
    out: list[tuple[Tensor, ...]]


def empty_out(form: Form, tokens: int, columns: int, device: str) -> tuple[Tensor, ...]:
    if form == "add":
        return ()
    if form == "rms_norm":
        out = (torch.empty(tokens, columns, dtype=torch.bfloat16, device=device),)
    else:
        out = contracts.empty_quantised(tokens, columns, device)
    poison(out)
    return out


def poison(out: Sequence[Tensor]) -> None:
    for tensor in out:
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(torch.nan)


def random_update(
    tokens: int, columns: int, num_chosen: int, generator: torch.Generator
) -> Tensor | Mixture:
    rows = tokens * max(1, num_chosen)
    outputs = torch.randn(rows, columns, generator=generator).bfloat16()
    if not num_chosen:
        return outputs
    order = torch.randperm(rows, generator=generator).int().view(tokens, num_chosen)
    weights = torch.rand(tokens, num_chosen, generator=generator).bfloat16()
    return Mixture(outputs, order, weights)


def cancel(updates: Sequence[Tensor], generator: torch.Generator) -> None:
    """Of half of the values two ranks have a large number with both signs: so their order shows."""
    shape = updates[0].shape
    order = torch.rand(len(updates), *shape, generator=generator).argsort(0)
    large = (torch.randn(shape, generator=generator) * 2**16).bfloat16()
    is_changed = torch.rand(shape, generator=generator) < 0.5
    for rank, update in enumerate(updates):
        for place, value in ((0, large), (1, -large)):
            is_own = (order[place] == rank) & is_changed
            update.copy_(torch.where(is_own, value, update))


def on(update: Tensor | Mixture, device: str) -> Tensor | Mixture:
    if isinstance(update, Mixture):
        return Mixture(*(tensor.to(device) for tensor in update))
    return update.to(device)


def added(hidden: Tensor, updates: Sequence[Tensor | Mixture]) -> Tensor:
    """What the operator is to give: [T, H] bf16, on the CPU."""
    total = torch.zeros(hidden.shape)
    for update in updates:
        total += reference.combine(*update) if isinstance(update, Mixture) else update
    return (total + hidden).bfloat16()


def make_steps(
    ranks: int,
    tokens: int,
    columns: int,
    form: Form,
    *,
    num_chosen: int = 0,
    count: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, list[Step]]:
    """hidden, the norm's weight, and steps one after the other."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, columns, generator=generator).bfloat16()
    weight = torch.randn(columns, generator=generator).exp()
    expected, steps = hidden, []
    for _ in range(count):
        updates = [random_update(tokens, columns, num_chosen, generator) for _ in range(ranks)]
        if ranks > 1 and not num_chosen:
            cancel([update for update in updates if isinstance(update, Tensor)], generator)
        expected = added(expected, updates)
        out = [empty_out(form, tokens, columns, device) for _ in range(ranks)]
        steps.append(Step([on(update, device) for update in updates], expected, out))
    return hidden.to(device), weight.to(device), steps


def make_ranks(
    ranks: int,
    columns: int,
    tokens: int,
    device: str,
    *,
    one_shot: int | None = None,
    num_blocks: int = 3,
    limit: float = 1.0,
    layout: RowLayout | None = None,
) -> list[Reduction]:
    room = Room.of(ranks, columns, tokens, one_shot)
    memory = [empty_memory(room, device) for _ in range(ranks)]
    inboxes = [each.data_ptr() for each in memory]
    make = partial(Reduction, limit=limit, num_blocks=num_blocks, layout=layout)
    return [make(rank, room, inboxes, memory[rank]) for rank in range(ranks)]


def reduce(
    reduction: Reduction,
    form: Form,
    hidden: Tensor,
    update: Tensor | Mixture,
    weight: Tensor,
    out: tuple[Tensor, ...],
) -> None:
    if form == "add":
        reduction.add(hidden, update)
    elif form == "rms_norm":
        reduction.rms_norm(hidden, weight, EPS, update, out=out[0])
    else:
        reduction.rms_norm_fp8(hidden, weight, EPS, update, out=(out[0], out[1]))


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals itself."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(kind).cpu()


def fault_of(form: Form, weight: Tensor, hiddens: Sequence[Tensor], steps: Sequence[Step]) -> str:
    """What is not as it is to be after all steps, or nothing.

    hidden has the bits of plain arithmetic, and what follows those of the norm without ranks.
    """
    for rank, hidden in enumerate(hiddens):
        if not torch.equal(bits(hidden), bits(steps[-1].expected)):
            return f"hidden of rank {rank}"
    if form == "add":
        return ""
    norm = rms_norm if form == "rms_norm" else rms_norm_fp8
    for number, step in enumerate(steps):
        sums = step.expected.to(hiddens[0].device)
        wanted = norm(sums, weight, EPS)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for rank, out in enumerate(step.out):
            for one, other in zip(out, wanted, strict=True):
                if not torch.equal(bits(one), bits(other)):
                    return f"what step {number} gave rank {rank}"
    return ""


# ---- processes ---------------------------------------------------------------------------------


def run_processes(ranks: int, work: str, folder: Path, *, one_gpu: bool) -> list[str]:
    """`work` in as many processes, each with a GPU, or all with one: what each had to say.

    Of one that does not come so far, what it wrote; one that is still there after PATIENCE is
    killed, and has said so.
    """
    store = str(folder / "store")
    commands = [
        [sys.executable, __file__, work, str(rank), str(ranks), store, str(int(one_gpu))]
        for rank in range(ranks)
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    end = time.monotonic() + PATIENCE
    said = []
    try:
        for rank, process in enumerate(processes):
            answer = folder / f"store.{rank}"
            try:
                written = process.communicate(timeout=max(0, end - time.monotonic()))[0]
                said.append(answer.read_text() if answer.exists() else written)
            except subprocess.TimeoutExpired:
                said.append("still at work")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return said


def be_a_rank(work: str, rank: int, ranks: int, store: str, one_gpu: bool) -> str:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0 if one_gpu else rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    return {"all_forms": all_forms, "dead_peer": dead_peer}[work](device)


def all_forms(device: torch.device) -> str:
    """Eager and from a graph: one shot, two, and pieces."""
    group = torch.distributed.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    reduction = Reduction.of_group(
        group, device, columns=2880, max_tokens=128, limit=20.0, one_shot=64
    )
    cases: list[tuple[int, Form, int]] = [
        *[(1, "rms_norm_fp8", 4), (64, "rms_norm", 0), (128, "add", 0)],
        *[(127, "rms_norm_fp8", 4), (300, "rms_norm_fp8", 0)],
    ]
    for number, (tokens, form, num_chosen) in enumerate(cases):
        name = f"{form} of {tokens}"
        hidden, weight, steps = make_steps(
            ranks, tokens, 2880, form, num_chosen=num_chosen, seed=number, device=str(device)
        )
        original = hidden.clone()
        run = partial(_run_steps, reduction, form, hidden, weight, steps)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        run()
        torch.cuda.synchronize()
        own = [Step(step.updates, step.expected, [step.out[rank]]) for step in steps]
        if fault := fault_of(form, weight, [hidden], own):
            return f"{name}: {fault}"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            hidden.copy_(original)
            for out in own:
                poison(out.out[0])
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            if fault := fault_of(form, weight, [hidden], own):
                return f"{name}, from a graph: {fault}"
        torch.distributed.barrier()
    return ""


def _run_steps(
    reduction: Reduction, form: Form, hidden: Tensor, weight: Tensor, steps: Sequence[Step]
) -> None:
    rank = reduction.rank
    for step in steps:
        reduce(reduction, form, hidden, step.updates[rank], weight, step.out[rank])


# To free pinned memory is fatal to a process whose context a kernel has ended.
_kept: list[Reduction] = []


def dead_peer(device: torch.device) -> str:
    """The last rank does not come: what the others say of it."""
    group = torch.distributed.group.WORLD
    assert group is not None
    reduction = Reduction.of_group(group, device, columns=2880, max_tokens=64, limit=0.5)
    _kept.append(reduction)
    hidden = torch.ones(4, 2880, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if group.rank() == group.size() - 1:
        return "dead"
    try:
        reduction.add(hidden, hidden.clone())
        torch.cuda.synchronize()
    except (RuntimeError, torch.AcceleratorError) as error:
        return f"{reduction.failure()}; {str(error).splitlines()[0]}"
    return "nothing was waited for"


if __name__ == "__main__":
    work, rank, ranks, store, one_gpu = sys.argv[1:]
    answer = be_a_rank(work, int(rank), int(ranks), store, one_gpu == "1")
    # Libraries write to its output as they like.
    Path(f"{store}.{rank}").write_text(answer)
    os._exit(0)  # a context that a kernel has ended cannot be cleared up
