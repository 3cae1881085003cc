"""The proof that a folder is the conversion of a checkpoint: both are read again, and compared."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.checkpoint_writer import CHECKSUMS_FILE
from gptoss_engine.checkpoints.convert import (
    DEFAULT_OPTIONS,
    REPORT_FILE,
    Conversion,
    Options,
    naming,
    target_tensors,
)
from gptoss_engine.checkpoints.tensor_source import (
    EXPERTS,
    IdentifiedSource,
    Mxfp4Blocks,
    Stored,
    TensorSource,
    expert_to_fp8,
    to_fp8,
)
from gptoss_engine.checkpoints.workers import bands, expert_bands, in_order, workers
from gptoss_engine.progress import progress_bar
from gptoss_kernels import mxfp4
from gptoss_kernels.fp8 import BLOCK, widen_values
from gptoss_kernels.ops import Fp8Weight

# e4m3 rounds to a sixteenth of a value at most (whose quotient by the scale is rounded to fp32
# before), and below its smallest normal number to half of 2^-9.
_RELATIVE_BOUND, _ABSOLUTE_BOUND = 2**-4 * (1 + 2**-20), 2**-10


def is_conversion(
    source: IdentifiedSource, target: Path, options: Options = DEFAULT_OPTIONS
) -> bool:
    """Whether `target` says of itself that it was made from `source` with these options."""
    if not (target / REPORT_FILE).is_file():
        return False
    says = Conversion.read(target)
    made_with = Options(says.attention_weights, says.lm_head)
    return made_with == options and says.fingerprint == source.fingerprint()


def verify(
    source: IdentifiedSource, target: Path, options: Options = DEFAULT_OPTIONS
) -> Conversion:
    """Raises InvalidCheckpoint, naming what differs, unless `target` is the conversion of `source`.

    Returns what the target says of itself, which is then true.

    Every tensor equals, bit for bit, what the source converts to. Experts equal the source's in
    exact arithmetic, but for as many blocks as the report counts; matrices that were rounded are
    within the bounds of e4m3. Every file matches its checksum.
    """
    if not is_conversion(source, target, options):
        raise InvalidCheckpoint(
            f"{target} is no conversion of {source.label} with these options, by its {REPORT_FILE}"
        )
    checksums = _checksums(target)
    tensor_files = {name for name in checksums if name.endswith(".safetensors")}
    _check_files(target, checksums, checksums.keys() - tensor_files)
    converted = Checkpoint(target)
    if converted.config != source.config:
        raise InvalidCheckpoint(f"{target}: config.json differs from {source.label}")
    conversion = Conversion.read(target)
    with progress_bar() as progress, workers() as executor:
        total = sum(source.num_bytes(name) for name in source.shapes)
        task = progress.add_task(f"verifying {target.name}", total=total)
        for name, tensor in target_tensors(source, options).items():
            weight = next(iter(tensor.parts))
            num_inexact = 0
            size = source.num_bytes(name)
            num_reported = conversion.inexact.get(weight, 0)
            for found, share in _compare(source, converted, name, weight, executor):
                num_inexact += found
                progress.advance(task, share * size)
            if num_inexact != num_reported:
                raise InvalidCheckpoint(
                    f"{target}: {weight} has {num_inexact} blocks that are not exact, and "
                    f"{REPORT_FILE} counts {num_reported}"
                )
    _check_files(target, checksums, tensor_files)
    return conversion


def _compare(
    source: IdentifiedSource,
    converted: Checkpoint,
    name: str,
    weight: str,
    executor: ThreadPoolExecutor,
) -> Iterator[tuple[int, float]]:
    """Of each band: how many of its blocks are not exact, and its share of the tensor."""
    source, converted = source.reopened(), converted.reopened()
    shape = source.shapes[name]
    compare = partial(_compare_band, source, converted, name, weight)
    pieces = (
        expert_bands(shape)
        if name.endswith(EXPERTS)
        else [(None, rows) for rows in bands(shape[0])]
    )
    num_rows = prod(shape[:-1]) if name.endswith(EXPERTS) else shape[0]
    results = in_order(executor, compare, pieces)
    for (_, rows), num_inexact in zip(pieces, results, strict=True):
        yield num_inexact, (rows.stop - rows.start) / num_rows


def _compare_band(
    source: TensorSource,
    converted: Checkpoint,
    name: str,
    weight: str,
    expert: int | None,
    rows: slice,
) -> int:
    original, found = source.read(name, expert, rows), converted.read(name, expert, rows)
    inexact, is_right = None, True
    with naming(source, weight):
        if not isinstance(found, Fp8Weight):
            assert isinstance(original, Tensor)
            assert isinstance(found, Tensor)
            is_right = _same_bits(found, original)
        elif expert is None:
            assert isinstance(original, Tensor)
            is_right = _equals(found, to_fp8(original)) and _is_near(found, original)
        else:
            expected, inexact = expert_to_fp8(original)
            is_right = _equals(found, expected) and not _differs(found, original, inexact)
    if not is_right:
        where = "" if expert is None else f"expert {expert}, "
        raise InvalidCheckpoint(
            f"{converted.folder}: {weight} is not what {source.label} converts to, in "
            f"{where}rows {rows.start} to {rows.stop - 1}"
        )
    return 0 if inexact is None else int(inexact.sum())


def _equals(found: Fp8Weight, expected: Fp8Weight) -> bool:
    return _same_bits(found.values, expected.values) and _same_bits(found.scale, expected.scale)


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(
        found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    )


def _is_near(found: Fp8Weight, original: Tensor) -> bool:
    scale = _spread(found.scale, found.shape).double()
    original = original.double()
    error = (_dequantised(found) - original).abs()
    bound = torch.maximum(original.abs() * _RELATIVE_BOUND, scale * _ABSOLUTE_BOUND)
    return bool((error <= bound).all())


def _differs(found: Fp8Weight, original: Stored, except_for: Tensor) -> bool:
    """Whether any number differs, in exact arithmetic, outside of the given blocks (bool)."""
    if isinstance(original, Mxfp4Blocks):
        # Both sides without their block's scale, a power of two: so nothing leaves fp32's range.
        blocks, scales = original
        mantissa, exponent = torch.frexp(found.scale)
        groups = _spread(exponent - 1, found.shape)[:, :: mxfp4.GROUP]
        shifted = (scales.int() - groups).clamp(127 - 100, 127 + 100).to(torch.uint8)
        expected = mxfp4.dequantise(blocks, shifted, torch.float32)
        differs = widen_values(found.values, torch.float32) != expected
        if bool((mantissa != 0.5).any()):
            return True
    else:
        assert isinstance(original, Tensor)
        differs = _dequantised(found) != original.double()
    return bool(differs.any()) and bool((differs & ~_spread(except_for, differs.shape)).any())


def _dequantised(weight: Fp8Weight) -> Tensor:
    """In float64, exactly."""
    return widen_values(weight.values, torch.float64) * _spread(weight.scale, weight.shape)


def _spread(of_blocks: Tensor, shape: torch.Size) -> Tensor:
    """[ceil(N / 128), ceil(K / 128)] -> [N, K]"""
    rows = of_blocks.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]


def _checksums(target: Path) -> dict[str, str]:
    """Of each file by its name; there are no others."""
    path = target / CHECKSUMS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error}") from None
    expected = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
    found = {each.name for each in target.iterdir()} - {CHECKSUMS_FILE}
    for name in sorted(found ^ expected.keys()):
        fault = "is missing" if name in expected else f"is not in {CHECKSUMS_FILE}"
        raise InvalidCheckpoint(f"{target}: {name} {fault}")
    return expected


def _check_files(target: Path, checksums: dict[str, str], names: Iterable[str]) -> None:
    for name in sorted(names):
        try:
            with (target / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidCheckpoint(f"cannot read {target / name}: {error.strerror}") from None
        if found != checksums[name]:
            raise InvalidCheckpoint(f"{target}: {name} does not match {CHECKSUMS_FILE}")
