"""Checkpoint folders: every tensor's header is checked, then what is asked for is read in place."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptoss_engine import demo
from gptoss_engine.checkpoints.layouts import (
    Layout,
    StoredTensor,
    count_parameters,
    detect,
    may_be_fp8,
    scale_name,
    stored_tensors,
)
from gptoss_engine.checkpoints.tensor_files import INDEX_FILE, Extent, read_extents
from gptoss_engine.checkpoints.tensor_source import EXPERTS, Form, Mxfp4Blocks, Stored
from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig, quant_method, read_json
from gptoss_kernels.fp8 import BLOCK
from gptoss_kernels.mxfp4 import GROUP, NAN_SCALE
from gptoss_kernels.ops import Fp8Weight

__all__ = ["Checkpoint", "InvalidCheckpoint", "Summary", "checkpoint_folder", "describe"]

MAX_NAMED = 8  # tensors that an error names of each fault
ALL = slice(None)
_FP8_FAULTS = ("an FP8 value that is not a number", "a scale that is not a positive number")
ITEM_SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


class Checkpoint:
    """An open checkpoint folder, in any layout: an IdentifiedSource.

    Only what is read is in memory.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the configuration and every file's header, no tensor.

        Raises InvalidCheckpoint, naming missing, unknown and unfitting tensors all at once.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InvalidCheckpoint(f"checkpoint folder {folder} does not exist")
        self.config = ModelConfig.from_folder(self.folder)
        self._files = _open_files(self.folder)
        self._extents: dict[str, Extent] = {}
        for path in _tensor_files(self.folder):
            self._extents |= read_extents(path)
        self.layout: Layout = self._detect_layout()
        self._sources = stored_tensors(self.config, self.layout, self._dense())
        self._check_sizes()
        self._check_tensors()

    @property
    def label(self) -> str:
        return str(self.folder)

    @property
    def name(self) -> str:
        folder = self.folder.resolve()
        return f"{folder.parent.name}/original" if folder.name == "original" else folder.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The engine's tensors (see layouts.py), whatever the files look like."""
        return {name: source.shape for name, source in self._sources.items()}

    def form(self, name: str) -> Form:
        kind = self._sources[name].kind
        return kind if kind in ("fp8", "mxfp4") else "dense"

    def num_bytes(self, name: str) -> int:
        """Of the tensor in the files."""
        return sum(
            prod(shape) * ITEM_SIZES[self._files[part].get_slice(part).get_dtype()]
            for part, shape in self._sources[name].parts.items()
        )

    def fingerprint(self) -> str:
        """Of the configuration and the files' headers: the tensors' names, shapes and places."""
        digest = hashlib.sha256(json.dumps(self.config.to_huggingface()).encode())
        for path in _tensor_files(self.folder):
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
        return digest.hexdigest()

    def identity(self) -> dict[str, Any]:
        times = {path.name: path.stat().st_mtime_ns for path in _tensor_files(self.folder)}
        return {
            "fingerprint": self.fingerprint(),
            "folder": str(self.folder.resolve()),
            "file times": times,
        }

    def reopened(self) -> "Checkpoint":
        return Checkpoint(self.folder)

    def read(
        self,
        name: str,
        expert: int | None = None,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> Stored:
        """See TensorSource. What comes back may be a view of the file: it is not to be written to.

        Raises InvalidCheckpoint where a scale, or an FP8 value, is not a number.
        """
        source = self._sources[name]
        assert (expert is None) != name.endswith(EXPERTS)
        matrix = source.shape if expert is None else source.shape[1:]
        rows = _bounded(rows, matrix[0])
        columns = _bounded(columns, matrix[-1])  # a vector has none
        names = list(source.parts)
        match source.kind:
            case "rows":
                return self._read_rows(source, rows, columns)
            case "transposed":
                return self._slice(names[0])[expert, columns, rows].transpose(0, 1)
            case "mxfp4":
                groups = _in_units(columns, GROUP, matrix[1])
                blocks = self._slice(names[0])[expert, rows, groups]
                scales = self._slice(names[1])[expert, rows, groups]
                self._check_mxfp4(names[1], scales)
                return Mxfp4Blocks(blocks, scales)
            case "fp8":
                return self._read_fp8(names, matrix, expert, rows, columns)

    def extents(
        self,
        name: str,
        expert: int | None = None,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> tuple[tuple[Extent, ...], ...]:
        """Where the files hold what `read` returns, if as it then lies in memory; else ().

        Of an FP8 weight its values and its scales, of any other tensor itself; each in pieces that
        follow each other by rows.
        """
        source = self._sources[name]
        matrix = source.shape if expert is None else source.shape[1:]
        rows = _bounded(rows, matrix[0])
        is_whole = _bounded(columns, matrix[-1]) == slice(0, matrix[-1]) or len(matrix) == 1
        if source.kind == "rows" and is_whole:
            return (tuple(self._extents[part].cut(cut) for part, cut in _cuts(source.parts, rows)),)
        is_in_blocks = not rows.start % BLOCK and (not rows.stop % BLOCK or rows.stop == matrix[0])
        if source.kind != "fp8" or not is_whole or not is_in_blocks:
            return ()
        values, scale = (self._extents[part] for part in source.parts)
        if expert is not None:
            values, scale = values[expert], scale[expert]
        return (values.cut(rows),), (scale.cut(_in_units(rows, BLOCK, matrix[0])),)

    def check_fp8(self, weights: Mapping[str, object]) -> None:
        """Of the engine's tensors those that are FP8 in the files, on any device, all at once.

        Raises InvalidCheckpoint where a scale, or a value, is not a number.
        """
        read = {
            name: weight
            for name, weight in weights.items()
            if isinstance(weight, Fp8Weight) and self.form(name) == "fp8"
        }
        if not read:
            return
        faults = torch.stack([_fp8_faults(weight) for weight in read.values()]).tolist()
        for name, found in zip(read, faults, strict=True):
            self._check(self._sources[name].parts, found)

    def _check(self, names: Iterable[str], faults: Iterable[object]) -> None:
        for name, fault, is_there in zip(names, _FP8_FAULTS, faults, strict=True):
            if is_there:
                raise self._damaged(name, fault)

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def _read_rows(self, source: StoredTensor, rows: slice, columns: slice) -> Tensor:
        pieces = []
        for name, cut in _cuts(source.parts, rows):
            part = self._slice(name)
            pieces.append(part[cut] if len(source.shape) == 1 else part[cut, columns])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _read_fp8(
        self,
        names: list[str],
        matrix: tuple[int, ...],
        expert: int | None,
        rows: slice,
        columns: slice,
    ) -> Fp8Weight:
        cuts = (rows, columns)
        blocks = tuple(_in_units(cut, BLOCK, size) for cut, size in zip(cuts, matrix, strict=True))
        first = () if expert is None else (expert,)
        values, scale = self._slice(names[0])[*first, *cuts], self._slice(names[1])[*first, *blocks]
        weight = Fp8Weight(values, scale)
        self._check(names, _fp8_faults(weight))
        return weight

    def _check_mxfp4(self, name: str, scales: Tensor) -> None:
        if bool((scales == NAN_SCALE).any()):
            raise self._damaged(name, f"a scale byte of {NAN_SCALE}, which is not a number")

    def _damaged(self, name: str, fault: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{self.folder}: {name} holds {fault}: the file is damaged")

    def _detect_layout(self) -> Layout:
        """By the tensors' names, which config.json must not contradict."""
        layout, method = detect(self._files), quant_method(self.folder)
        if (layout == "fp8") == (method == "fp8"):
            return layout
        says = "no quantization_config" if method is None else f"quant_method {method!r}"
        raise InvalidCheckpoint(
            f"{self.folder}: config.json has {says}, but the tensors have the names of the "
            f"{layout} layout"
        )

    def _dense(self) -> set[str]:
        """What the fp8 layout may hold in FP8 and here does not: it has no scales."""
        if self.layout != "fp8":
            return set()
        return {
            name
            for name, weight in may_be_fp8(self.config).items()
            if scale_name(weight) not in self._files and not self._is_fp8(weight)
        }

    def _is_fp8(self, name: str) -> bool:
        return name in self._files and self._slice(name).get_dtype() == "F8_E4M3"

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self.config, name)
            if self.layout in ("huggingface", "original") and size % GROUP:
                raise InvalidCheckpoint(
                    f"{self.folder}: {name} must be a multiple of {GROUP} where experts are "
                    f"MXFP4, got {size}"
                )

    def _check_tensors(self) -> None:
        missing, unfitting = [], []
        unknown = set(self._files)
        for source in self._sources.values():
            for name, shape in source.parts.items():
                if name not in unknown:
                    missing.append(name)
                    continue
                unknown.remove(name)
                header, dtypes = self._slice(name), source.dtypes[name]
                if (found := tuple(header.get_shape())) != shape:
                    unfitting.append(f"{name} has shape {[*found]}, not {[*shape]}")
                elif (dtype := header.get_dtype()) not in dtypes:
                    unfitting.append(f"{name} is {dtype}, not {' or '.join(dtypes)}")
        faults = {"missing": missing, "unknown": sorted(unknown), "unfitting": unfitting}
        if sentence := "; ".join(_named(fault, names) for fault, names in faults.items() if names):
            raise InvalidCheckpoint(f"{self.folder} ({self.layout} layout): {sentence}")


def _fp8_faults(weight: Fp8Weight) -> Tensor:
    """Which of _FP8_FAULTS it has: bool [2], on its device.

    e4m3 has two NaNs, 0x7f and 0xff. They are looked for by two passes that copy nothing.
    """
    values, scale = weight.values, weight.scale
    has_nan = values.view(torch.int8).amax() == 0x7F
    has_nan |= values.view(torch.uint8).amax() == 0xFF
    return torch.stack((has_nan, ~((scale > 0) & scale.isfinite()).all()))


def _bounded(cut: slice, size: int) -> slice:
    start, stop, step = cut.indices(size)
    assert step == 1
    return slice(start, stop)


def _cuts(parts: Mapping[str, tuple[int, ...]], rows: slice) -> list[tuple[str, slice]]:
    """Of parts that follow each other by rows: which hold some of `rows`, and which of theirs."""
    found, first = [], 0
    for name, (num_rows, *_) in parts.items():
        start, stop = max(rows.start - first, 0), min(rows.stop - first, num_rows)
        if start < stop:
            found.append((name, slice(start, stop)))
        first += num_rows
    return found


def _in_units(cut: slice, unit: int, size: int) -> slice:
    """Elements to blocks or groups; the cut lies on their borders or at the end."""
    assert cut.start % unit == 0
    assert cut.stop % unit == 0 or cut.stop == size
    return slice(cut.start // unit, -(-cut.stop // unit))


def checkpoint_folder(model: str) -> Path:
    """Where a configuration's `model` lies; "demo" is expanded from the package on first use."""
    return demo.checkpoint_folder() if model == "demo" else Path(model)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint folder holds.

    num_bytes: of its tensor files, on disk. bytes_by_form: of its tensors, by how they are stored.
    weights: the forms of the matrices that have a choice; more than one where layers differ.
    """

    folder: Path
    layout: Layout
    config: ModelConfig
    num_parameters: int
    num_active_parameters: int
    num_bytes: int
    bytes_by_form: Mapping[Form, int]
    weights: Mapping[str, tuple[Form, ...]]
    has_tokenizer: bool


def describe(folder: str | Path) -> Summary:
    """Checks a folder's configuration and tensor headers, and counts. Loads no tensor."""
    checkpoint = Checkpoint(folder)
    total, active = count_parameters(checkpoint.config)
    num_bytes: Counter[Form] = Counter()
    forms: dict[str, set[Form]] = {name: set() for name in (*EXPERTS, "qkv", "out", "unembedding")}
    for name in checkpoint.shapes:
        num_bytes[checkpoint.form(name)] += checkpoint.num_bytes(name)
        if (field := name.split(".")[-1]) in forms:
            forms[field].add(checkpoint.form(name))
    return Summary(
        folder=checkpoint.folder,
        layout=checkpoint.layout,
        config=checkpoint.config,
        num_parameters=total,
        num_active_parameters=active,
        num_bytes=sum(path.stat().st_size for path in _tensor_files(checkpoint.folder)),
        bytes_by_form=dict(num_bytes),
        weights={name: tuple(sorted(found)) for name, found in forms.items()},
        has_tokenizer=(checkpoint.folder / "tokenizer.json").is_file(),
    )


def _open_files(folder: Path) -> dict[str, Any]:
    """Tensor name -> the open, memory-mapped file that holds it."""
    found: dict[str, Any] = {}
    for path in _tensor_files(folder):
        try:
            with path.open("rb"):  # says why it cannot be opened
                file = safe_open(path, framework="pt")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise InvalidCheckpoint(f"cannot read {path}: {error}") from None
        if twice := next((name for name in names if name in found), None):
            raise InvalidCheckpoint(f"{folder}: {twice} lies in {path.name} and in another file")
        found |= dict.fromkeys(names, file)
    return found


def _tensor_files(folder: Path) -> list[Path]:
    """Those that the index names, or else all in the folder."""
    index = folder / INDEX_FILE
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidCheckpoint(f"{folder} holds no .safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidCheckpoint(f"{index} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidCheckpoint(f"{index}: weight_map must name files beside it, got {file!r}")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _named(fault: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {fault} tensor{plural}: {', '.join(names[:MAX_NAMED])}{more}"
