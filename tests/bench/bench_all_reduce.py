"""The reduction over tensor-parallel ranks beside NCCL, a GPU for each rank: tables, JSON lines.

    python tests/bench/bench_all_reduce.py --ranks 2 --output results.jsonl
    python tests/bench/bench_all_reduce.py fused --tokens 1 128 8192

sum: hidden <- hidden + sum over ranks of [T, 2880] bf16; NCCL's sums alone, in place. fused: what
four experts of a token gave, added up, summed over ranks, the residual, the norm, its quantisation:
one launch of ours; combine, NCCL's all-reduce and rms_norm_fp8 beside it. Times are of CUDA graphs
of many calls, replayed by all ranks at once: medians over replays of the slowest rank. What is read
was written by the calls before, as in a model. The floor is what a rank sends, 4TH (R - 1) / R
bytes, at 391 GB/s, which a copy between two H200 reaches. NVLink multicast is off for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
from measuring import Call, Spread, Timing, capture, command_output, print_ranked, result_line
from torch import distributed
from torch.cuda import nccl

from gptoss_kernels.contracts import Mixture
from gptoss_kernels.cuda.combine import combine
from gptoss_kernels.cuda.reduction import Reduction
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm_fp8
from gptoss_kernels.ops import load_reduction

COLUMNS, CHOSEN, EPS = 2880, 4, 1e-5
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 8192, 32768)
ROOM = 8192  # tokens of one launch
LINK_BYTES = 391e9
RUNS = ("sum", "fused")
OURS = "ours"
WARM_UPS, REPLAYS = 3, 20
MOST_CALLS, CALLS_BYTES = 64, 2**30  # of a graph: as many as send so much, or the most
PATIENCE = 300.0  # seconds for all ranks
Calls = dict[str, Call]


class Inputs:
    """Of one rank; small, so that what is added again and again stays a number."""

    def __init__(self, tokens: int, rank: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(tokens)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.hidden = torch.randn(tokens, COLUMNS, generator=generator, **options)
        self.weight = torch.ones(COLUMNS, device="cuda")
        generator.manual_seed(rank + 1)
        shape = (tokens * CHOSEN, COLUMNS)
        outputs = torch.randn(shape, generator=generator, **options).mul_(1e-3)
        rows = torch.randperm(len(outputs), device="cuda", generator=generator).int()
        weights = torch.full((tokens, CHOSEN), 0.25, **options)
        self.mixture = Mixture(outputs, rows.view(tokens, CHOSEN), weights)
        self.update = outputs[:tokens].clone()
        self.sums = torch.zeros_like(self.update)


def calls_of(run: str, inputs: Inputs, reduction: Reduction) -> Calls:
    version = ".".join(map(str, nccl.version()))
    hidden, weight, sums = inputs.hidden, inputs.weight, inputs.sums

    def by_nccl(_: int) -> None:
        distributed.all_reduce(sums)

    def fused_by_nccl(_: int) -> None:
        combine(*inputs.mixture, out=sums)
        distributed.all_reduce(sums)
        rms_norm_fp8(hidden, weight, EPS, sums)

    if run == "sum":
        return {OURS: lambda _: reduction.add(hidden, inputs.update), f"NCCL, {version}": by_nccl}
    return {
        OURS: lambda _: reduction.rms_norm_fp8(hidden, weight, EPS, inputs.mixture),
        f"NCCL between combine and the norm, {version}": fused_by_nccl,
    }


def check(inputs: Inputs, reduction: Reduction) -> None:
    """ArithmeticError if ours is not NCCL's sum, to the rounding of both."""
    inputs.sums.copy_(inputs.update)
    distributed.all_reduce(inputs.sums)
    ours = reduction.add(torch.zeros_like(inputs.hidden), inputs.update)
    error = (ours.float() - inputs.sums.float()).norm() / inputs.sums.float().norm()
    if not error < 1e-2:
        raise ArithmeticError(f"the sums are not NCCL's: {error.item()}")


def timed(call: Call, tokens: int, host: distributed.ProcessGroup) -> Timing:
    """Milliseconds a call over the replays, each of the rank that took longest.

    Replays follow each other without a word between the ranks' hosts, whose calls wait for each
    other: after the first ones all ranks are in step.
    """
    count = max(4, min(MOST_CALLS, CALLS_BYTES // (tokens * COLUMNS * 2)))
    graph = capture(call, 1, count)
    distributed.barrier(group=host)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for _ in range(WARM_UPS):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    own = [start.elapsed_time(end) / count for start, end in pairwise(events)]
    all_ranks: list[list[float]] = [[]] * host.size()
    distributed.all_gather_object(all_ranks, own, group=host)
    slowest = sorted(max(each) for each in zip(*all_ranks, strict=True))
    low, middle, high = (slowest[int(share * (REPLAYS - 1))] for share in (0.1, 0.5, 0.9))
    return Timing(Spread(low, middle, high, None, None), None)


def be_a_rank(arguments: argparse.Namespace) -> None:
    rank, ranks = arguments.rank, arguments.ranks
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    patience = timedelta(seconds=PATIENCE / 2)
    place = {"init_method": f"file://{arguments.store}", "rank": rank, "world_size": ranks}
    distributed.init_process_group("nccl", timeout=patience, device_id=device, **place)
    host = distributed.new_group(backend="gloo", timeout=patience)  # beside NCCL's of the GPUs
    assert isinstance(host, distributed.ProcessGroup)
    reduction = load_reduction("cuda", host, device, columns=COLUMNS, max_tokens=ROOM)
    assert isinstance(reduction, Reduction)
    lines = []
    for tokens in arguments.tokens or TOKENS:
        inputs = Inputs(tokens, rank)
        check(inputs, reduction)
        for run in arguments.runs or RUNS:
            calls = calls_of(run, inputs, reduction)
            times = {name: timed(call, tokens, host) for name, call in calls.items()}
            floor = 2 * tokens * COLUMNS * 2 * (ranks - 1) / ranks / LINK_BYTES * 1e3
            if rank:
                continue
            print(
                f"{run} of {tokens} x {COLUMNS}, {ranks} ranks: the floor is {floor * 1e3:.1f} us"
            )
            print_ranked(times, 0)
            line = result_line("all_reduce", times, OURS, arguments.command, arguments.commit)
            own = {"weights": None, "tp": ranks, "tokens": tokens, "run": run}
            own |= {"bound_by": "the link", "floor_ms": round(floor, 6)}
            own |= {"tb_per_s": round(LINK_BYTES / 1e12 * floor / times[OURS].burst.median, 4)}
            lines.append(json.dumps(line | own))
    if arguments.output and lines:
        with arguments.output.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
    elif lines:
        print("\n".join(lines))
    sys.stdout.flush()
    os._exit(0)  # nothing of it is needed any more, and NCCL waits for all ranks at its end


def start_ranks(arguments: argparse.Namespace) -> int:
    """A process for each; 0 if all ended well. None is left behind."""
    words = sys.argv[1:]
    for option in ("--output", "--commit"):
        if option in words:
            index = words.index(option)
            del words[index : index + 2]
    command = " ".join(["python tests/bench/bench_all_reduce.py", *words])
    environment = os.environ | {
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        given = ["--store", f"{folder}/store", "--command", command, *sys.argv[1:]]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *given], env=environment
            )
            for rank in range(arguments.ranks)
        ]
        try:
            return max(abs(rank.wait(PATIENCE)) for rank in ranks)
        except subprocess.TimeoutExpired:
            print(f"not all ranks had ended after {PATIENCE:g} s", file=sys.stderr)
            return 1
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}; all if none")
    made.add_argument("--ranks", type=int, help="as many as there are GPUs, if not given")
    made.add_argument("--tokens", type=int, nargs="+", help="other sizes than the usual ones")
    made.add_argument("--output", type=Path, help="append the JSON lines to this file")
    made.add_argument("--commit", default=command_output("git", "rev-parse", "--short", "HEAD"))
    for option in ("--rank", "--store", "--command"):  # of a process that is one
        made.add_argument(option, help=argparse.SUPPRESS)
    return made


def main() -> None:
    arguments = parser().parse_args()
    if unknown := set(arguments.runs) - set(RUNS):
        parser().error(f"there are {', '.join(RUNS)}, got {', '.join(sorted(unknown))}")
    found = torch.cuda.device_count()
    arguments.ranks = arguments.ranks or found
    if not 2 <= arguments.ranks <= min(found, 8):
        sys.exit(f"a reduction takes 2 to 8 GPUs, asked for {arguments.ranks}, found {found}")
    if arguments.rank is None:
        sys.exit(start_ranks(arguments))
    arguments.rank = int(arguments.rank)
    be_a_rank(arguments)


if __name__ == "__main__":
    main()
