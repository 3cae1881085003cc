"""A checkpoint to FP8: the layout "fp8" of layouts.py. verify.py proves the result.

Experts become FP8 without loss: their scales are powers of two, and where a block of 128 x 128
cannot be exact the conversion is refused, or the block is counted and listed. The matrices of the
attention, and the unembedding if asked, get the scales that minimise their error. All else is
copied. Matrices are converted a band of rows at a time by all cores, and written in order.
"""

import importlib.metadata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.checkpoint_writer import CHECKSUMS_FILE, write_checkpoint
from gptoss_engine.checkpoints.layouts import StoredTensor, may_be_fp8, stored_tensors
from gptoss_engine.checkpoints.tensor_files import TensorGroup
from gptoss_engine.checkpoints.tensor_source import (
    EXPERTS,
    IdentifiedSource,
    TensorSource,
    expert_to_fp8,
    read_pieces,
    reading,
    to_fp8,
)
from gptoss_engine.checkpoints.work_folder import as_json
from gptoss_engine.checkpoints.workers import bands, expert_bands, in_order, workers
from gptoss_engine.model_config import FP8_QUANTISATION, read_json
from gptoss_kernels.fp8 import BLOCK, E4M3
from gptoss_kernels.ops import Fp8Weight

Precision = Literal["fp8", "bf16"]

REPORT_FILE = "conversion.json"
MAX_LISTED = 1000  # inexact blocks in the report; their counts are complete
MAX_NAMED = 4  # of them in a sentence

_COPIED_AT_ONCE = 2**26  # bytes
_MAX_FILE_BYTES = 2**26  # of what else lies in the source's folder; larger files are not copied
_MAX_FILES_BYTES = 2**28  # of all such files: they are in memory together
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")
# What the target has of its own, and what describes the source's files of tensors.
_NOT_COPIED = ("config.json", CHECKSUMS_FILE, REPORT_FILE, "dtypes.json")
_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class Options:
    """What becomes FP8 besides the experts."""

    attention_weights: Precision = "fp8"
    lm_head: Precision = "bf16"


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True)
class Conversion:
    """What conversion.json says: what the folder was made from and how, without paths and dates.

    inexact: tensor -> number of its blocks that are not exact; inexact_blocks: the first of them as
    (tensor, expert, block row, block column). relative_error: of matrices that were rounded, by
    kind, the mean over the layers of |converted - original| / |original|, in Frobenius norms.
    """

    version: str
    source: str
    fingerprint: str
    attention_weights: Precision
    lm_head: Precision
    expert_blocks: int
    inexact: dict[str, int]
    inexact_blocks: list[tuple[str, int, int, int]]
    relative_error: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> "Conversion":
        path = folder / REPORT_FILE
        says = read_json(path)
        try:
            inexact = {name: int(count) for name, count in says.pop("inexact").items()}
            blocks = [tuple(block) for block in says.pop("inexact_blocks")]
            return cls(**says, inexact=inexact, inexact_blocks=blocks)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidCheckpoint(f"{path} is not as gptoss convert writes it") from None

    @property
    def num_inexact(self) -> int:
        return sum(self.inexact.values())


@dataclass(frozen=True, slots=True)
class Report:
    """What was converted. Bytes are of tensors; num_kept_bytes: those of an interrupted run."""

    num_tensors: int
    num_files: int
    source_bytes: int
    num_bytes: int
    num_kept_bytes: int
    conversion: Conversion


def convert(
    source: IdentifiedSource,
    target: Path,
    options: Options = DEFAULT_OPTIONS,
    *,
    shard_bytes: int = 5 * 10**9,
    allow_inexact: bool = False,
) -> Report:
    """Writes the folder `target`; write_checkpoint says what is left when that ends early.

    Raises InvalidCheckpoint where the source is converted already or cannot be read, where a tensor
    holds what is no number, and, without allow_inexact, at the first tensor that FP8 cannot hold
    exactly; CannotWrite as write_checkpoint does.
    """
    if any(source.form(name) == "fp8" for name in source.shapes):
        raise InvalidCheckpoint(f"{source.label} is already converted: its weights are FP8")
    targets = target_tensors(source, options)
    groups = partial(_group, source, allow_inexact=allow_inexact)
    with reading(source), workers() as executor:
        about = partial(_conversion_file, source.name, source.fingerprint(), options, targets)
        written = write_checkpoint(
            target,
            [groups(name, tensor, executor) for name, tensor in targets.items()],
            files=_small_files(source),
            identity=partial(_identity, source, options),
            shard_bytes=shard_bytes,
            description=f"converting {source.name}",
            summarise=about,
        )
    return Report(
        num_tensors=sum(len(each.parts) for each in targets.values()),
        num_files=written.num_files,
        source_bytes=sum(source.num_bytes(name) for name in source.shapes),
        num_bytes=written.num_bytes,
        num_kept_bytes=written.num_kept_bytes,
        conversion=Conversion.read(target),
    )


def target_tensors(source: TensorSource, options: Options) -> dict[str, StoredTensor]:
    """The converted tensors by the engine's names; the first part of each is the weight."""
    dense = {
        name
        for name in may_be_fp8(source.config)
        if (options.lm_head if name == "unembedding" else options.attention_weights) == "bf16"
    }
    found = stored_tensors(source.config, "fp8", dense=dense)
    last = {name: found.pop(name) for name in ("norm", "unembedding")}
    return found | last  # in the order in which a model uses them


def dense_rows(source: TensorSource, name: str, rows: slice) -> Tensor:
    expert = 0 if name.endswith(EXPERTS) else None
    stored = source.read(name, expert, rows)
    assert isinstance(stored, Tensor)
    return stored


def _group(
    source: IdentifiedSource,
    name: str,
    target: StoredTensor,
    executor: ThreadPoolExecutor,
    *,
    allow_inexact: bool,
) -> TensorGroup:
    weight = next(iter(target.parts))
    if target.kind != "fp8":
        dtypes = [dense_rows(source, name, slice(0, 1)).dtype]
        make = partial(_copied, source, name, weight)
    else:
        dtypes = [E4M3, torch.float32]
        if name.endswith(EXPERTS):
            make = partial(_experts, source, name, weight, executor, allow_inexact)
        else:
            make = partial(_quantised, source, name, weight, executor)
    shapes = target.parts.items()
    return TensorGroup(
        {part: (dtype, shape) for (part, shape), dtype in zip(shapes, dtypes, strict=True)},
        lambda notes: read_pieces(source, make(notes)),
    )


def _copied(
    source: IdentifiedSource, name: str, weight: str, _: dict[str, Any]
) -> Iterator[Tensor]:
    source = source.reopened()
    num_rows, *columns = source.shapes[name]
    at_once = max(1, _COPIED_AT_ONCE // (4 * prod(columns)))
    for rows in bands(num_rows, at_once):
        piece = dense_rows(source, name, rows)
        # NaN if any is, and forty times as fast as isfinite.
        if not all(extreme.isfinite() for extreme in torch.aminmax(piece)):
            raise InvalidCheckpoint(f"{source.label}: {weight} holds what is not a finite number")
        yield piece


def _quantised(
    source: IdentifiedSource,
    name: str,
    weight: str,
    executor: ThreadPoolExecutor,
    notes: dict[str, Any],
) -> Iterator[Tensor]:
    """Notes: the relative error."""
    source = source.reopened()

    def quantise(rows: slice) -> tuple[Fp8Weight, float, float]:
        original = dense_rows(source, name, rows)
        with naming(source, weight):
            quantised = to_fp8(original)
        error = quantised.dequantise(torch.float32) - original.float()
        return quantised, _sum_of_squares(error), _sum_of_squares(original.float())

    scales, errors, originals = [], 0.0, 0.0
    all_rows = [(rows,) for rows in bands(source.shapes[name][0])]
    for quantised, error, original in in_order(executor, quantise, all_rows):
        errors, originals = errors + error, originals + original
        scales.append(quantised.scale)
        yield quantised.values
    yield from scales
    notes["error"] = sqrt(errors / originals) if originals else 0.0


def _experts(
    source: IdentifiedSource,
    name: str,
    weight: str,
    executor: ThreadPoolExecutor,
    allow_inexact: bool,
    notes: dict[str, Any],
) -> Iterator[Tensor]:
    """Notes: the number of blocks, that of the inexact ones, and where the first of those are."""
    source = source.reopened()

    def widen(expert: int, rows: slice) -> tuple[Fp8Weight, Tensor]:
        stored = source.read(name, expert, rows)
        with naming(source, weight):
            return expert_to_fp8(stored)

    scales, num_blocks, num_inexact = [], 0, 0
    listed: list[tuple[int, int, int]] = []
    pieces = expert_bands(source.shapes[name])
    results = in_order(executor, widen, pieces)
    for (expert, rows), (widened, inexact) in zip(pieces, results, strict=True):
        scales.append(widened.scale)
        num_blocks += inexact.numel()
        if inexact.any():
            num_inexact += int(inexact.sum())
            first = rows.start // BLOCK
            listed += [(expert, first + row, column) for row, column in inexact.nonzero().tolist()]
            del listed[MAX_LISTED:]
        yield widened.values
    if num_inexact and not allow_inexact:
        raise InvalidCheckpoint(_inexact_sentence(source, weight, num_inexact, listed))
    yield from scales
    notes.update(blocks=num_blocks, inexact=num_inexact, listed=listed)


@contextmanager
def naming(source: TensorSource, weight: str) -> Iterator[None]:
    """What is no number is refused by name."""
    try:
        yield
    except ValueError as error:
        raise InvalidCheckpoint(f"{source.label}: {weight} cannot be made: {error}") from error


def _sum_of_squares(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64))


def _inexact_sentence(
    source: TensorSource, weight: str, num_inexact: int, listed: list[tuple[int, int, int]]
) -> str:
    first = "; ".join(
        f"expert {expert}, block row {row}, block column {column}"
        for expert, row, column in listed[:MAX_NAMED]
    )
    more = "; …" if num_inexact > MAX_NAMED else ""
    return (
        f"{source.label}: FP8 cannot hold {num_inexact} of the 128 x 128 blocks of {weight} "
        f"exactly ({first}{more}): their exponents spread too far, or they never were MXFP4; "
        "with --allow-inexact such blocks are rounded to the nearest, and listed"
    )


def _conversion_file(
    source: str,
    fingerprint: str,
    options: Options,
    targets: dict[str, StoredTensor],
    notes: list[dict[str, Any]],
) -> dict[str, bytes]:
    """conversion.json, from the notes of the tensors' groups."""
    inexact: dict[str, int] = {}
    listed: list[tuple[str, int, int, int]] = []
    errors: dict[str, list[float]] = {}
    for (name, target), note in zip(targets.items(), notes, strict=True):
        weight = next(iter(target.parts))
        if name.endswith(EXPERTS):
            if note["inexact"]:
                inexact[weight] = note["inexact"]
            listed += [(weight, expert, row, column) for expert, row, column in note["listed"]]
        elif target.kind == "fp8":
            errors.setdefault(name.split(".")[-1], []).append(note["error"])
    conversion = Conversion(
        version=_version(),
        source=source,
        fingerprint=fingerprint,
        attention_weights=options.attention_weights,
        lm_head=options.lm_head,
        expert_blocks=sum(note.get("blocks", 0) for note in notes),
        inexact=inexact,
        inexact_blocks=listed[:MAX_LISTED],
        relative_error={kind: round(sum(each) / len(each), 6) for kind, each in errors.items()},
    )
    return {REPORT_FILE: as_json(asdict(conversion))}


def _small_files(source: IdentifiedSource) -> dict[str, bytes]:
    """config.json, which names the quantisation, and copies of the tokenizer's files and the like.

    original/ lies inside the Hugging Face folder, whose files then count too.
    """
    files: dict[str, bytes] = {}
    config = source.config.to_huggingface()
    if isinstance(source, Checkpoint):
        folder = source.folder.resolve()
        if source.layout != "original":
            config = read_json(folder / "config.json")
        elif folder.name == "original" and (folder.parent / "config.json").is_file():
            files |= _copies(folder.parent)
        files |= _copies(folder)
    else:
        end_tokens = {"eos_token_id": sorted(source.config.eos_token_ids)}
        files["generation_config.json"] = as_json(end_tokens)
    config["quantization_config"] = FP8_QUANTISATION
    return files | {"config.json": as_json(config)}


def _copies(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        if not _is_copied(path):
            continue
        try:
            files[path.name] = path.read_bytes()
        except OSError as error:
            raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
        if sum(map(len, files.values())) > _MAX_FILES_BYTES:
            raise InvalidCheckpoint(
                f"{folder} holds more than {_MAX_FILES_BYTES >> 20} MiB of small files beside its "
                "tensors, which would be copied: move out what is not the model's"
            )
    return files


def _is_copied(path: Path) -> bool:
    return (
        path.is_file()
        and not path.name.startswith(".")
        and path.name.isprintable()  # a line of SHA256SUMS, in UTF-8
        and path.name not in _NOT_COPIED
        and not path.name.endswith((_INDEX_SUFFIX, *_WEIGHT_SUFFIXES))
        and path.stat().st_size <= _MAX_FILE_BYTES
    )


def _identity(source: IdentifiedSource, options: Options) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that goes on.

    Not allow_inexact: up to the first inexact tensor it changes nothing.
    """
    with reading(source):
        return source.identity() | asdict(options) | {"version": _version()}


def _version() -> str:
    return importlib.metadata.version("gptoss-backend")
