"""A checkpoint to FP8: the layout "fp8" of layouts.py. verify.py proves the result.

Experts become FP8 without loss: their scales are powers of two, and where a block of 128 x 128
cannot be exact the conversion is refused, or the block is counted and listed. The matrices of the
attention, and the unembedding if asked, get the scales that minimise their error. All else is
copied. Matrices are converted a band of rows at a time by all cores, and written in order.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gptoss_engine.checkpoint import INDEX_FILE, Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoint_writer import CHECKSUMS_FILE, TensorGroup, write_checkpoint
from gptoss_engine.layouts import Source, may_be_fp8, sources
from gptoss_engine.model_config import FP8_QUANTISATION, read_json
from gptoss_engine.tensor_source import EXPERTS, TensorSource, expert_to_fp8, to_fp8
from gptoss_engine.workers import bands, expert_bands, in_order, workers
from gptoss_kernels.fp8 import BLOCK, E4M3
from gptoss_kernels.mxfp4 import GROUP
from gptoss_kernels.ops import Fp8Weight

Precision = Literal["fp8", "bf16"]

REPORT_FILE = "conversion.json"
MAX_LISTED = 1000  # inexact blocks in the report; their counts are complete
MAX_NAMED = 4  # of them in a sentence

_COPIED_AT_ONCE = 2**26  # bytes
_MAX_FILE_BYTES = 2**26  # of what else lies in the source's folder
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")
# What the target has of its own, and what describes the original layout's tensors.
_NOT_COPIED = ("config.json", INDEX_FILE, CHECKSUMS_FILE, REPORT_FILE, "dtypes.json")


@dataclass(frozen=True, slots=True)
class Options:
    """What becomes FP8 besides the experts."""

    attention_weights: Precision = "fp8"
    lm_head: Precision = "bf16"


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True)
class Report:
    """What was converted. Bytes are of tensors; num_kept_bytes: those of an interrupted run.

    inexact: tensor -> number of its blocks that are not exact; inexact_blocks: the first of them as
    (tensor, expert, block row, block column). relative_error: of matrices that were rounded, by
    kind, the mean over the layers of |converted - original| / |original|, in Frobenius norms.
    """

    num_tensors: int
    num_files: int
    source_bytes: int
    num_bytes: int
    num_kept_bytes: int
    num_expert_blocks: int
    inexact: dict[str, int]
    inexact_blocks: list[tuple[str, int, int, int]]
    relative_error: dict[str, float]


def convert(
    source: TensorSource,
    target: Path,
    options: Options = DEFAULT_OPTIONS,
    *,
    shard_bytes: int = 5 * 10**9,
    allow_inexact: bool = False,
) -> Report:
    """Writes the folder `target`; write_checkpoint says what is left when that ends early.

    Raises InvalidCheckpoint where the source is converted already, where a matrix holds what is no
    number, and, without allow_inexact, at the first tensor that FP8 cannot hold exactly.
    """
    if any(source.form(name) == "fp8" for name in source.shapes):
        raise InvalidCheckpoint(f"{source.label} is already converted: its weights are FP8")
    targets = target_tensors(source, options)
    said: dict[str, Any] = {}

    def summarise(notes: list[Any]) -> dict[str, bytes]:
        said.update(_summary(targets, notes))
        about = {"version": _version(), "source": _short_label(source)}
        return {REPORT_FILE: _json(about | origin(source, options) | said)}

    with workers() as executor:
        written = write_checkpoint(
            target,
            [
                _group(source, name, tensor, executor, allow_inexact)
                for name, tensor in targets.items()
            ],
            files=_small_files(source),
            identity=_identity(source, options),
            shard_bytes=shard_bytes,
            description=f"converting {_short_label(source)}",
            summarise=summarise,
        )
    return Report(
        num_tensors=sum(len(each.parts) for each in targets.values()),
        num_files=written.num_files,
        source_bytes=sum(stored_bytes(source, name) for name in source.shapes),
        num_bytes=written.num_bytes,
        num_kept_bytes=written.num_kept_bytes,
        num_expert_blocks=said["expert_blocks"],
        inexact=said["inexact"],
        inexact_blocks=said["inexact_blocks"],
        relative_error=said["relative_error"],
    )


def target_tensors(source: TensorSource, options: Options) -> dict[str, Source]:
    """The converted tensors by the engine's names; the first part of each is the weight."""
    dense = {
        name
        for name in may_be_fp8(source.config)
        if (options.lm_head if name == "unembedding" else options.attention_weights) == "bf16"
    }
    found = sources(source.config, "fp8", dense=dense)
    last = {name: found.pop(name) for name in ("norm", "unembedding")}
    return found | last  # in the order in which a model uses them


def origin(source: TensorSource, options: Options) -> dict[str, str]:
    """What a conversion is made from, and how, without paths and dates."""
    return {
        "fingerprint": _fingerprint(source),
        "attention_weights": options.attention_weights,
        "lm_head": options.lm_head,
    }


def stored_bytes(source: TensorSource, name: str) -> int:
    size = prod(source.shapes[name])
    if source.form(name) == "mxfp4":
        return size // 2 + size // GROUP
    return size * dense_rows(source, name, slice(0, 1)).dtype.itemsize


def dense_rows(source: TensorSource, name: str, rows: slice) -> Tensor:
    expert = 0 if name.endswith(EXPERTS) else None
    stored = source.read(name, expert, rows)
    assert isinstance(stored, Tensor)
    return stored


def reopened(source: TensorSource) -> TensorSource:
    """With nothing of it in memory: a mapped file stays there for as long as it is open."""
    return Checkpoint(source.folder) if isinstance(source, Checkpoint) else source


def _group(
    source: TensorSource,
    name: str,
    target: Source,
    executor: ThreadPoolExecutor,
    allow_inexact: bool,
) -> TensorGroup:
    if target.kind != "fp8":
        dtypes = [dense_rows(source, name, slice(0, 1)).dtype]
        produce = partial(_copied, source, name)
    else:
        dtypes = [E4M3, torch.float32]
        weight = next(iter(target.parts))
        if name.endswith(EXPERTS):
            produce = partial(_experts, source, name, weight, executor, allow_inexact)
        else:
            produce = partial(_quantised, source, name, weight, executor)
    shapes = target.parts.items()
    return TensorGroup(
        {part: (dtype, shape) for (part, shape), dtype in zip(shapes, dtypes, strict=True)}, produce
    )


def _copied(source: TensorSource, name: str) -> Iterator[Tensor]:
    source = reopened(source)
    num_rows, *columns = source.shapes[name]
    at_once = max(1, _COPIED_AT_ONCE // (4 * prod(columns)))
    for rows in bands(num_rows, at_once):
        yield dense_rows(source, name, rows)


def _quantised(
    source: TensorSource, name: str, weight: str, executor: ThreadPoolExecutor
) -> Generator[Tensor, None, Any]:
    """Notes: the relative error."""
    source = reopened(source)

    def quantise(rows: slice) -> tuple[Fp8Weight, float, float]:
        original = dense_rows(source, name, rows)
        with named(source, weight):
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
    return {"error": sqrt(errors / originals) if originals else 0.0}


def _experts(
    source: TensorSource,
    name: str,
    weight: str,
    executor: ThreadPoolExecutor,
    allow_inexact: bool,
) -> Generator[Tensor, None, Any]:
    """Notes: the number of blocks, that of the inexact ones, and where the first of those are."""
    source = reopened(source)

    def widen(expert: int, rows: slice) -> tuple[Fp8Weight, Tensor]:
        stored = source.read(name, expert, rows)
        with named(source, weight):
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
    return {"blocks": num_blocks, "inexact": num_inexact, "listed": listed}


@contextmanager
def named(source: TensorSource, weight: str) -> Iterator[None]:
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
        "--allow-inexact rounds such blocks to the nearest, and lists them"
    )


def _summary(targets: dict[str, Source], notes: list[Any]) -> dict[str, Any]:
    """What the report says of the tensors, from the notes of their groups."""
    inexact: dict[str, int] = {}
    listed: list[tuple[Any, ...]] = []
    errors: dict[str, list[float]] = {}
    for (name, target), note in zip(targets.items(), notes, strict=True):
        weight = next(iter(target.parts))
        if name.endswith(EXPERTS):
            if note["inexact"]:
                inexact[weight] = note["inexact"]
            listed += [(weight, *block) for block in note["listed"]]
        elif target.kind == "fp8":
            errors.setdefault(name.split(".")[-1], []).append(note["error"])
    return {
        "expert_blocks": sum(note["blocks"] for note in notes if note and "blocks" in note),
        "inexact": inexact,
        "inexact_blocks": listed[:MAX_LISTED],
        "relative_error": {kind: round(sum(each) / len(each), 6) for kind, each in errors.items()},
    }


def _small_files(source: TensorSource) -> dict[str, bytes]:
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
    config["quantization_config"] = FP8_QUANTISATION
    return files | {"config.json": _json(config)}


def _copies(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in _NOT_COPIED
        and path.suffix not in _WEIGHT_SUFFIXES
        and path.stat().st_size <= _MAX_FILE_BYTES
    }


def _identity(source: TensorSource, options: Options) -> dict[str, Any]:
    """What an interrupted run must have in common with the one that goes on.

    Not allow_inexact: up to the first inexact tensor it changes nothing.
    """
    identity = origin(source, options) | {"version": _version()}
    if isinstance(source, Checkpoint):
        folder = source.folder.resolve()
        times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
        identity |= {"folder": str(folder), "modified": times}
    return identity


def _fingerprint(source: TensorSource) -> str:
    """Of the configuration and of all tensors' headers; their values are verify's matter."""
    digest = hashlib.sha256(_json(source.config.to_huggingface()))
    for name, shape in source.shapes.items():
        digest.update(f"{name} {shape} {source.form(name)}".encode())
    if not isinstance(source, Checkpoint):
        digest.update(source.label.encode())
    else:
        for path in sorted(source.folder.glob("*.safetensors")):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
    return digest.hexdigest()


def _short_label(source: TensorSource) -> str:
    if not isinstance(source, Checkpoint):
        return source.label
    folder = source.folder.resolve()
    return f"{folder.parent.name}/original" if folder.name == "original" else folder.name


def _version() -> str:
    return importlib.metadata.version("gptoss-backend")


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
