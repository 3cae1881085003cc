"""All kernels that the served models can take, compiled ahead of time: for images, and for tests.

Processes of their own compile them, one kernel after another: NVRTC ends its process on some
malformed sources, and then we know whose. Those processes import neither torch nor an operator.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import IO

from gptoss_kernels.cuda.compiler import Cubin, CudaError, KernelSpec


@dataclass(frozen=True)
class ModelSizes:
    """What of a model decides which kernels it takes.

    group: query heads a key-value head.
    """

    hidden: int
    qkv: int
    attention: int
    group: int
    window: int
    intermediate: int
    num_experts: int
    experts_per_token: int
    vocabulary: int = 201_088


SERVED_MODELS = {
    "20b": ModelSizes(2880, 5120, 4096, 8, 128, 2880, 32, 4),
    "120b": ModelSizes(2880, 5120, 4096, 8, 128, 2880, 128, 4),
    "tiny": ModelSizes(320, 5120, 4096, 8, 128, 1088, 16, 4),
    "demo": ModelSizes(128, 512, 256, 2, 128, 128, 8, 2),
}
# Multiprocessors of the Hopper boards: H100 and H200 (SXM), H100 NVL, H100 PCIe, H20.
_NUM_BLOCKS = (132, 114, 78)
_SWIGLU_GROUPS = (64, 128)
_RANKS = (2, 4, 8)
# No choice of a kernel changes within 64 rows, from 128 on.
_NUM_TOKENS = (*range(1, 129), *range(129, 131_073, 64))


@dataclass(frozen=True)
class Built:
    """A kernel's machine code, or why there is none."""

    spec: KernelSpec
    cubin: Cubin | None
    error: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """Why this kernel must not be served, in words; empty if it may."""
        if self.cubin is None:
            return (self.error,)
        if not self.spec.is_hot:
            return ()
        found = self.cubin
        return (
            *([f"spills {found.spill_bytes} bytes"] if found.spill_bytes else []),
            *([f"has a stack frame of {found.stack_bytes} bytes"] if found.stack_bytes else []),
            *found.warnings,
        )


def served_kernels() -> tuple[KernelSpec, ...]:
    """Each once, for any number of tokens of any served model on any Hopper GPU."""
    models = SERVED_MODELS.values()
    kinds = (_dense, _grouped, _attention, _bound_by_memory, _reduction, _sampling)
    kernels = {spec for model in models for kind in kinds for spec in kind(model)}
    return tuple(sorted(kernels, key=str))


def rank_kernels(ranks: int) -> tuple[KernelSpec, ...]:
    """What ranks that share a model, each with whole experts, take beside served_kernels.

    ValueError where a served model cannot be shared by so many.
    """
    from gptoss_kernels.cuda.dispatch_fp8 import specs as dispatch_specs
    from gptoss_kernels.cuda.quantise import spec as quantise_spec
    from gptoss_kernels.cuda.rows import choose_layout
    from gptoss_kernels.fp8 import BLOCK

    kernels = set()
    for name in ("20b", "120b"):
        rank = _of_rank(SERVED_MODELS[name], ranks)
        kernels.update(_dense(rank), _grouped(rank))
        sizes = (rank.hidden, rank.num_experts, rank.experts_per_token)
        kernels.update(dispatch_specs(*sizes).values())
        layouts = {choose_layout(tokens, rank.attention) for tokens in _NUM_TOKENS}
        kernels.update(quantise_spec(layout, BLOCK) for layout in layouts)
    return tuple(sorted(kernels - set(served_kernels()), key=str))


def _of_rank(model: ModelSizes, ranks: int) -> ModelSizes:
    """Its heads and its experts; each piece of qkv's rows filled up to whole blocks."""
    from gptoss_kernels.contracts import HEAD_DIM
    from gptoss_kernels.fp8 import BLOCK, num_blocks

    keys = (model.qkv - model.attention) // 2
    heads = keys // HEAD_DIM
    if ranks < 1 or heads % ranks or model.num_experts % ranks:
        raise ValueError(
            f"ranks must divide {heads} key-value heads and {model.num_experts} experts, got "
            f"{ranks}"
        )
    pieces = (model.attention // ranks, keys // ranks, keys // ranks)
    return replace(
        model,
        qkv=sum(num_blocks(size) for size in pieces) * BLOCK,
        attention=pieces[0],
        num_experts=model.num_experts // ranks,
    )


def _dense(model: ModelSizes) -> Iterator[KernelSpec]:
    from gptoss_kernels.cuda import linear
    from gptoss_kernels.cuda.linear_fp8 import MAXIMUM_QUANTISED_ROWS, choose, choose_plain
    from gptoss_kernels.cuda.linear_fp8_few import FewTile

    shapes = ((model.qkv, model.hidden), (model.hidden, model.attention))
    choices = product(_NUM_TOKENS, shapes, _NUM_BLOCKS)
    tiles = {choose(m, n, k, num_blocks) for m, (n, k), num_blocks in choices}
    few = {t for t in tiles if isinstance(t, FewTile) and t.tokens <= MAXIMUM_QUANTISED_ROWS}
    # What attention gives comes unquantised.
    quantising = {replace(tile, quantises=True) for tile in few if tile.k == model.attention}
    for tile, has_residual in product(tiles | quantising, (False, True)):
        yield replace(tile, has_residual=has_residual).spec
    head = (model.vocabulary, model.hidden)
    for tokens in range(1, linear.MAXIMUM_ROWS + 1):
        rows_tile = linear.choose_tile(tokens, *head)
        assert rows_tile is not None
        yield rows_tile.spec
    for tokens, num_blocks in product(_NUM_TOKENS, _NUM_BLOCKS):  # in FP8
        yield choose_plain(tokens, *head, num_blocks).spec


def _grouped(model: ModelSizes) -> Iterator[KernelSpec]:
    from gptoss_kernels.cuda import grouped_fp8
    from gptoss_kernels.cuda.experts_fp8 import MAXIMUM_GATHERED
    from gptoss_kernels.cuda.experts_fp8 import choose_tiles as choose_few_tiles
    from gptoss_kernels.fp8 import BLOCK

    tiles = set()
    for tokens, group in product(_NUM_TOKENS, _SWIGLU_GROUPS):
        rows, experts = tokens * model.experts_per_token, model.num_experts
        first = {"x_group": BLOCK, "out_group": group}
        tiles.add(grouped_fp8.choose_tile(rows, experts, swiglu=True, **first))
        tiles.add(grouped_fp8.choose_tile(rows, experts, x_group=group))
    sizes = (model.num_experts, model.hidden, model.intermediate, model.experts_per_token)
    for tokens in range(1, MAXIMUM_GATHERED // model.experts_per_token + 1):
        tiles.update(choose_few_tiles(tokens, *sizes) or ())
    yield from (tile.spec for tile in tiles)


def _attention(model: ModelSizes) -> Iterator[KernelSpec]:
    from gptoss_kernels.cuda import attention_decode, attention_prefill, rope, unpack_step

    decode = attention_decode.served_tiles((model.group,), (None, model.window))
    for tile in (*attention_prefill.served_tiles(), *decode):
        yield tile.spec
    yield from (rope.spec(is_fp8=is_fp8) for is_fp8 in (False, True))
    yield unpack_step.spec()


def _bound_by_memory(model: ModelSizes) -> Iterator[KernelSpec]:
    from gptoss_kernels.cuda.combine import choose_combine_layout
    from gptoss_kernels.cuda.combine import spec as combine_spec
    from gptoss_kernels.cuda.dispatch_fp8 import specs as dispatch_specs
    from gptoss_kernels.cuda.norm_route import RouteTile, choice_spec
    from gptoss_kernels.cuda.quantise import spec as quantise_spec
    from gptoss_kernels.cuda.rms_norm_fp8 import spec as rms_norm_spec
    from gptoss_kernels.cuda.rows import choose_layout
    from gptoss_kernels.cuda.select_rows import ROW_BYTES
    from gptoss_kernels.cuda.select_rows import spec as select_rows_spec
    from gptoss_kernels.fp8 import BLOCK

    chosen = model.experts_per_token
    # One of a token: the sums of pieces of a very long step.
    for layout in {choose_layout(tokens, model.hidden) for tokens in _NUM_TOKENS}:
        for is_fp8, num_chosen in product((True, False), (0, 1, chosen)):
            yield rms_norm_spec(layout, is_fp8=is_fp8, num_chosen=num_chosen)
        yield from (select_rows_spec(layout, row_type) for row_type in ROW_BYTES)
    yield RouteTile(model.hidden, model.num_experts, chosen).spec
    yield choice_spec(model.num_experts, chosen)
    # The inputs of qkv and of attention's output product, and of w2 where SwiGLU is not fused.
    quantised = ((model.hidden, BLOCK), (model.attention, BLOCK))
    quantised += tuple((model.intermediate, group) for group in _SWIGLU_GROUPS)
    for columns, group in quantised:
        for layout in {choose_layout(tokens, columns) for tokens in _NUM_TOKENS}:
            yield quantise_spec(layout, group)
    for tokens in _NUM_TOKENS:
        for num_chosen in (1, chosen):
            layout = choose_combine_layout(tokens, model.hidden, num_chosen)
            yield combine_spec(layout, num_chosen)
    yield from dispatch_specs(model.hidden, model.num_experts, chosen).values()


def _reduction(model: ModelSizes) -> Iterator[KernelSpec]:
    from gptoss_kernels.cuda.reduction import choose_layout, spec

    # What attention gives and what experts do, and of a very long step their sums; before qkv the
    # experts' alone.
    chosen = model.experts_per_token
    forms = [(num_chosen, False) for num_chosen in (0, 1, chosen)]
    forms += [(num_chosen, True) for num_chosen in (1, chosen)]
    for ranks in _RANKS:
        layouts = {choose_layout(tokens, model.hidden, ranks) for tokens in _NUM_TOKENS}
        shots = (False,) if ranks == 2 else (False, True)
        for layout, two_shot, (num_chosen, is_fp8) in product(layouts, shots, forms):
            kind = {"num_chosen": num_chosen, "has_norm": is_fp8, "is_fp8": is_fp8}
            yield spec(layout, ranks, two_shot=two_shot, **kind)


def _sampling(model: ModelSizes) -> Iterator[KernelSpec]:
    import torch

    from gptoss_kernels.cuda import logprobs, mask_logits, penalize_logits, sample, transfer
    from gptoss_kernels.cuda.sampling import choose_cluster

    for num_rows in _NUM_TOKENS:
        for dtype in (torch.bfloat16, torch.float32):  # which penalize_logits gives
            yield sample.spec(model.vocabulary, dtype, cluster=choose_cluster(num_rows))
    yield logprobs.spec(model.vocabulary)
    yield mask_logits.spec()
    yield penalize_logits.spec()
    yield from (transfer.spec(from_host=from_host) for from_host in (True, False))


def build(specs: Iterable[KernelSpec], *, jobs: int, cache: Path | None = None) -> Iterator[Built]:
    """Compile into `cache` (as GPTOSS_CACHE names it; None: the usual one), `jobs` at a time.

    Yields each as it is done. Whoever stops early waits for those under way, no more.
    """
    environment = dict(os.environ)
    if cache is not None:
        environment["GPTOSS_CACHE"] = str(cache)
    with contextlib.ExitStack() as stack:
        idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
        for _ in range(jobs):
            log = stack.enter_context(tempfile.TemporaryFile())
            idle.put(stack.enter_context(contextlib.closing(_Compiler(environment, log))))

        def compile_one(spec: KernelSpec) -> Built:
            compiler = idle.get()
            try:
                return compiler.compile(spec)
            finally:
                idle.put(compiler)

        pool = concurrent.futures.ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        under_way = [pool.submit(compile_one, spec) for spec in specs]
        for done in concurrent.futures.as_completed(under_way):
            yield done.result()


class _Compiler:
    """A process that compiles one kernel after another, and a fresh one where it has died.

    log: a file that is open, for what a process says at its end.
    """

    def __init__(self, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self._environment = environment
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, spec: KernelSpec) -> Built:
        is_fresh = self._process is None
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(spec, process.stdin)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            status = self._end()
            # One that has compiled others may have died of them.
            return Built(spec, None, self._last_words(status)) if is_fresh else self.compile(spec)
        return Built(spec, None, answer) if isinstance(answer, str) else Built(spec, answer)

    def _start(self) -> subprocess.Popen[bytes]:
        # A kernel that cannot be kept is an error here. No import from the current folder (-P).
        command = [sys.executable, "-P", "-W", "error::RuntimeWarning", "-m", __spec__.name]
        self._log.seek(0)
        self._log.truncate()
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environment,
        )

    def _end(self) -> int:
        assert self._process is not None
        with self._process as process, contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()
        self._process = None
        return process.returncode

    def _last_words(self, status: int) -> str:
        self._log.seek(0)
        log = self._log.read().decode().strip()
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return f"its compiler's process ended with {ending}" + (f": {log}" if log else "")

    def close(self) -> None:
        if self._process is not None:
            self._end()


def _answer_parent() -> None:
    """Compile each KernelSpec of standard input; a Cubin, or a sentence, to standard output."""
    while True:
        try:
            spec = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = spec.compile()
        except (CudaError, RuntimeWarning) as error:
            answer = str(error)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _answer_parent()
