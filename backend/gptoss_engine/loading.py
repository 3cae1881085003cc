"""A source's tensors into memory: a rank's part, in the forms that the weight mode says."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.filesize import decimal
from torch import Tensor

from gptoss_engine import shards
from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.file_loader import FileLoader, file_loader
from gptoss_engine.checkpoints.generated import GeneratedCheckpoint
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import (
    EXPERTS,
    Form,
    LmHead,
    Mxfp4Blocks,
    Stored,
    TensorSource,
    WeightMode,
    expert_to_fp8,
    expert_to_mxfp4,
    reading,
    to_dense,
    to_fp8,
)
from gptoss_engine.checkpoints.workers import in_order, workers
from gptoss_engine.config import InvalidConfig
from gptoss_engine.memory import free_memory
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.progress import progress_bar
from gptoss_engine.shards import Part, Rank
from gptoss_engine.weights import LayerWeights, Weight, Weights, num_bytes, tensors
from gptoss_kernels import mxfp4
from gptoss_kernels.fp8 import BLOCK, E4M3, num_blocks
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight

log = logging.getLogger(__name__)

KEPT_IN_FP32 = ("norm", "attention_norm", "mlp_norm", "sinks")  # small, and used in fp32
ROWS_AT_ONCE = 16 * BLOCK  # of a tensor that is no expert: an embedding is never copied whole
MAX_NAMED = 4  # blocks that the warning names
EXACT_SPREAD = 14  # powers of two that an FP8 block holds exactly: MODEL.md has the sum


def load_weights(
    source: TensorSource,
    mode: WeightMode,
    dtype: torch.dtype,
    device: torch.device,
    rank: Rank = Rank(),  # noqa: B008
    beside: Mapping[str, int] = MappingProxyType({}),
    lm_head: LmHead = "auto",
) -> Weights:
    """Reads the rank's part of every tensor into its place: no second copy of the model.

    What the files hold as it will lie in memory is read there and no more is done to it. Random
    weights for a GPU are made on it, and are other ones than a CPU's: see generated.py.

    dtype: of dense weights and their biases. beside: what else has to fit into the memory, in
    bytes by what it is. lm_head: the unembedding's form. Raises InvalidConfig where the source has
    no such weights, the memory is too small or the ranks do not divide the model; blocks that FP8
    cannot hold exactly are counted in a warning. Raises InvalidCheckpoint at a damaged tensor.
    """
    plan = _Plan(source, mode, dtype, rank, lm_head)
    plan.check_memory(device, beside)
    started = time.monotonic()
    weights = plan.allocate(device)
    made = source
    if isinstance(source, RandomCheckpoint) and device.type != "cpu":
        made = GeneratedCheckpoint(source, mode, device)
    inexact = _fill(made, [*plan.jobs(weights)], device)
    if isinstance(source, Checkpoint):
        source.check_fp8(dict(weights.named()))
    if inexact:
        more = f" and {len(inexact) - MAX_NAMED} more" if len(inexact) > MAX_NAMED else ""
        log.warning(
            "%s: %d blocks of 128 x 128 are rounded, FP8 cannot hold them exactly: %s%s",
            *(source.label, len(inexact), ", ".join(inexact[:MAX_NAMED]), more),
        )
    seconds = time.monotonic() - started
    log.info(
        "weights of %s in mode %s: experts %s, %s in all, in %.1f s: %s a second",
        *(source.label, mode, decimal(weights.expert_bytes), decimal(weights.num_bytes)),
        *(seconds, decimal(int(weights.num_bytes / seconds))),
    )
    return weights


@dataclass(frozen=True, slots=True)
class _Job:
    """Rows and columns of one matrix or vector, of the whole, and where they go."""

    name: str
    expert: int | None
    rows: slice
    columns: slice | None
    destination: Weight


class _Plan:
    """Which tensors a rank will hold, in which form, and what has to be read for them."""

    def __init__(
        self,
        source: TensorSource,
        mode: WeightMode,
        dtype: torch.dtype,
        rank: Rank,
        lm_head: LmHead,
    ) -> None:
        self._source = source
        self._mode: WeightMode = mode
        self._dtype = dtype
        self._rank = rank
        self._lm_head: LmHead = lm_head
        self._forms = {name: _form(source, mode, lm_head, name) for name in source.shapes}
        self._parts = {name: shards.part(source.config, name, rank) for name in source.shapes}
        for name, part in self._parts.items():
            if self._forms[name] == "fp8":
                *_, rows, columns = source.shapes[name]
                for piece in part.rows:
                    shards.check_blocks(name, piece, rows)
                assert part.columns is not None
                shards.check_blocks(name, part.columns, columns)

    def allocate(self, device: torch.device) -> Weights:
        made: dict[str, Any] = {name: self._empty(name, device) for name in self._parts}
        names = [field.name for field in fields(LayerWeights)]
        layers = [
            LayerWeights(**{name: made[f"layers.{index}.{name}"] for name in names})
            for index in range(self._source.config.num_layers)
        ]
        return Weights(made["embedding"], tuple(layers), made["norm"], made["unembedding"])

    def check_memory(self, device: torch.device, beside: Mapping[str, int]) -> None:
        needed = self.allocate(torch.device("meta")).num_bytes
        free = free_memory(device)
        if free is None or needed + sum(beside.values()) <= free:
            return
        others = []
        for mode in ("fp8", "mxfp4"):
            is_stored = mode != "mxfp4" or self._source.form("layers.0.w13") == "mxfp4"
            if mode != self._mode and is_stored:
                plan = _Plan(self._source, mode, self._dtype, self._rank, self._lm_head)
                size = plan.allocate(torch.device("meta")).num_bytes
                others.append(f"{decimal(size)} with weights {mode}")
        others_take = "".join(f", {name} {decimal(size)}" for name, size in beside.items())
        instead = f"; they would take {' and '.join(others)}" if others else ""
        raise InvalidConfig(
            f"the weights of {self._source.label} take {decimal(needed)} with weights "
            f"{self._mode}{others_take}{',' if beside else ''} and {decimal(free)} of memory are "
            f"free on {device}{instead}"
        )

    def jobs(self, weights: Weights) -> Iterator[_Job]:
        """All that has to be read; what is another rank's to add is zeroed at once."""
        for name, weight in weights.named():
            part = self._parts[name]
            if part.is_zero or self._is_padded(name):
                for tensor in tensors(weight):
                    tensor.zero_()
            if part.is_zero:
                continue
            if part.experts is None:
                yield from self._pieces(name, None, part, weight)
            elif part.columns is None:
                experts = slice(part.experts.start, part.experts.stop)
                yield _Job(name, None, experts, part.rows[0], weight)
            else:
                for index, expert in enumerate(part.experts):
                    yield from self._pieces(name, expert, part, weight[index])

    def _pieces(
        self, name: str, expert: int | None, part: Part, destination: Weight
    ) -> Iterator[_Job]:
        for start, piece in zip(part.starts(self._is_padded(name)), part.rows, strict=False):
            step = ROWS_AT_ONCE if expert is None else shards.size(piece)
            for first in range(piece.start, piece.stop, step):
                rows = slice(first, min(first + step, piece.stop))
                begin = start + first - piece.start
                into = _rows(destination, slice(begin, begin + shards.size(rows)))
                yield _Job(name, expert, rows, part.columns, into)

    def _is_padded(self, name: str) -> bool:
        """In FP8 each piece of qkv starts a block; its bias follows it."""
        weight = name.removesuffix("_bias")
        return len(self._parts[name].rows) > 1 and self._forms[weight] == "fp8"

    def _is_added_in_fp32(self, name: str) -> bool:
        """A bias to an FP8 product's sums; a dense product wants it in its own dtype."""
        weight = name.removesuffix("_bias")
        return weight != name and self._forms[weight] != "dense"

    def _empty(self, name: str, device: torch.device) -> Weight:
        shape = self._parts[name].shape(self._is_padded(name))
        empty = partial(torch.empty, device=device)
        match self._forms[name]:
            case "fp8":
                return Fp8Weight(empty(shape, dtype=E4M3), empty(_blocks(shape)))
            case "mxfp4":
                groups = (*shape[:-1], shape[-1] // mxfp4.GROUP)
                blocks = empty((*groups, mxfp4.GROUP // 2), dtype=torch.uint8)
                scales = empty(groups, dtype=torch.uint8)
                return Mxfp4Weight(blocks, scales, empty(_blocks(shape)))
        field = name.split(".")[-1]
        if field in KEPT_IN_FP32 or self._is_added_in_fp32(name):
            return empty(shape, dtype=torch.float32)
        if field == "unembedding" and device.type == "cpu":
            # Stored by columns: a CPU multiplies one row with it three times as fast (5 against
            # 15 ms for [1, 128] x [128, 201088] in fp32), and 32 rows no slower.
            return empty(shape[::-1], dtype=self._dtype).T
        return empty(shape, dtype=self._dtype)


def check_mode(source: TensorSource, mode: WeightMode, lm_head: LmHead = "auto") -> None:
    """Raises InvalidConfig where the source has no weights of this mode."""
    for name in source.shapes:
        _form(source, mode, lm_head, name)


def check_ranks(
    source: TensorSource, mode: WeightMode, dtype: torch.dtype, lm_head: LmHead, tp: int, ep: int
) -> None:
    """Raises InvalidConfig, with the numbers, where a rank's part cannot be cut."""
    for index in range(tp):
        _Plan(source, mode, dtype, Rank(index, tp, ep), lm_head)


def unembedding_form(source: TensorSource, mode: WeightMode, lm_head: LmHead) -> Form:
    """How the engine holds it. Raises InvalidConfig where it is to be FP8 beside wide weights."""
    if lm_head == "fp8":
        if mode == "bf16":
            raise InvalidConfig(
                "lm_head fp8 needs weights fp8 or mxfp4, and those are bf16, which widens all: "
                "choose weights, or leave lm_head auto"
            )
        return "fp8"
    return source.form("unembedding") if lm_head == "auto" and mode != "bf16" else "dense"


def _form(source: TensorSource, mode: WeightMode, lm_head: LmHead, name: str) -> Form:
    """How the engine holds a tensor."""
    field, stored = name.split(".")[-1], source.form(name)
    if field in EXPERTS and mode == "mxfp4" and stored != "mxfp4":
        layout = "converted, FP8" if stored == "fp8" else "dequantised"
        raise InvalidConfig(
            f"weights mxfp4 needs a checkpoint whose experts are stored in MXFP4, and those of "
            f"{source.label} are {layout}: take the published folder, or weights fp8"
        )
    if field == "unembedding":
        return unembedding_form(source, mode, lm_head)
    if mode == "bf16" or field not in (*EXPERTS, "qkv", "out"):
        return "dense"
    if field in EXPERTS:
        return mode
    if source.form(name.replace(field, "w13")) == "fp8":
        return stored  # as `gptoss convert` was told
    return "fp8"


def _fill(source: TensorSource, jobs: list[_Job], device: torch.device) -> list[str]:
    """Runs the jobs; the blocks of 128 x 128 that FP8 cannot hold exactly, by name."""
    inexact = []
    with progress_bar() as progress, file_loader(device) as files, workers() as executor:
        total = sum(num_bytes(job.destination) for job in jobs)
        bar = progress.add_task(f"loading {Path(source.label).name}", total=total)
        load = partial(_load, source, files)
        if isinstance(source, GeneratedCheckpoint):
            loaded = map(load, jobs)  # a GPU's work: threads would only wait for each other
        else:
            loaded = in_order(executor, load, [(job,) for job in jobs])
        for job, found in zip(jobs, loaded, strict=True):
            if found is not None:
                inexact.append((job, found))
            progress.advance(bar, num_bytes(job.destination))
    return _names(source, inexact)


def _load(source: TensorSource, files: FileLoader, job: _Job) -> Tensor | None:
    """One job, from the source into its place; which of the blocks it read are not exact."""
    if _is_read_as_it_lies(source, files, job):
        return None
    cuts, covers = _cuts(job), _covers(source, job)
    kept = tuple(
        slice(cut.start - cover.start, cut.stop - cover.start)
        for cut, cover in zip(cuts, covers, strict=True)
    )
    stored = _on(_device(job.destination), source.read(job.name, job.expert, *covers))
    try:
        weight, inexact = _converted(stored, job)
    except ValueError as error:  # a number that is none
        raise InvalidCheckpoint(f"{source.label}: {job.name}: {error}") from None
    match weight:
        case Tensor():
            weight = weight[kept]
        case Fp8Weight(values, scale):
            weight = Fp8Weight(values[kept], scale)
    for tensor, place in zip(tensors(weight), tensors(job.destination), strict=True):
        assert tensor.shape == place.shape
        place.copy_(tensor)
    return inexact


def _is_read_as_it_lies(source: TensorSource, files: FileLoader, job: _Job) -> bool:
    """Whether the files hold the job's elements as its place does; then they are read into it."""
    if not isinstance(source, Checkpoint):
        return False
    extents = source.extents(job.name, job.expert, *_cuts(job))
    places = tensors(job.destination)
    if len(extents) != len(places):
        return False
    pairs = [
        (piece, place)
        for pieces, tensor in zip(extents, places, strict=True)
        for piece, place in zip(pieces, tensor.split([p.shape[0] for p in pieces]), strict=True)
    ]
    if any(
        (place.dtype, place.shape) != (extent.dtype, extent.shape) or not place.is_contiguous()
        for extent, place in pairs
    ):
        return False
    with reading(source):
        for extent, place in pairs:
            files.load(extent, place)
    return True


def _cuts(job: _Job) -> tuple[slice, ...]:
    return (job.rows,) if job.columns is None else (job.rows, job.columns)


def _covers(source: TensorSource, job: _Job) -> list[slice]:
    """Blocks are read whole, so that a part has the scales of the whole, and then cut."""
    cuts = _cuts(job)
    whole = source.shapes[job.name][-len(cuts) :]
    return [shards.covering(cut, size) for cut, size in zip(cuts, whole, strict=True)]


def _names(source: TensorSource, inexact: list[tuple[_Job, Tensor]]) -> list[str]:
    """Of the blocks, counted in the whole tensor. Asks a GPU once, when all is loaded."""
    if not inexact:
        return []
    flat = torch.cat([blocks.flatten() for _, blocks in inexact]).cpu()
    names = []
    for (job, blocks), here in zip(
        inexact, flat.split([blocks.numel() for _, blocks in inexact]), strict=True
    ):
        first = [cover.start // BLOCK for cover in _covers(source, job)]
        names += [
            f"{job.name} of expert {job.expert} ({first[0] + row}, {first[1] + column})"
            for row, column in here.view(blocks.shape).nonzero().tolist()
        ]
    return names


def _converted(stored: Stored, job: _Job) -> tuple[Weight, Tensor | None]:
    """In the destination's form, and of an expert the blocks that are then not exact (bool)."""
    match job.destination:
        case Fp8Weight() if job.expert is None or isinstance(stored, Fp8Weight):
            return to_fp8(stored), None
        case Fp8Weight():
            return expert_to_fp8(stored)
        case Mxfp4Weight():
            assert isinstance(stored, Mxfp4Blocks)
            weight = expert_to_mxfp4(stored)
            least, largest = stored.scales.aminmax()
            if int(largest) - int(least) <= EXACT_SPREAD:
                return weight, None
            _, inexact = mxfp4.widen(weight.blocks, weight.scales, weight.block_scale)
            return weight, inexact
    return to_dense(stored, job.destination.dtype), None


def _on(device: torch.device, stored: Stored) -> Stored:
    match stored:
        case Mxfp4Blocks(blocks, scales):
            return Mxfp4Blocks(blocks.to(device), scales.to(device))
        case Fp8Weight(values, scale):
            return Fp8Weight(values.to(device), scale.to(device))
    return stored.to(device)


def _rows(weight: Weight, rows: slice) -> Weight:
    """A view of some rows; blocks that share scales are not divided."""
    match weight:
        case Fp8Weight(values, scale):
            blocks = slice(rows.start // BLOCK, num_blocks(rows.stop))
            return Fp8Weight(values[rows], scale[blocks])
        case Mxfp4Weight():
            assert shards.size(rows) == weight.shape[0]
            return weight
    return weight[rows]


def _device(weight: Weight) -> torch.device:
    return tensors(weight)[0].device


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], num_blocks(shape[-2]), num_blocks(shape[-1]))
