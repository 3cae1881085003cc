"""Checkpoint folders: all tensors are checked before any is read, then each goes to its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gptoss_engine import demo
from gptoss_engine.layouts import Layout, count_parameters, detect, sources
from gptoss_engine.model_config import InvalidCheckpoint, ModelConfig, read_json
from gptoss_kernels.mxfp4 import GROUP, NAN_SCALE, dequantise

__all__ = ["Checkpoint", "InvalidCheckpoint", "Summary", "describe"]

INDEX_FILE = "model.safetensors.index.json"
MAX_NAMED = 8  # tensors that an error names of each fault


class Checkpoint:
    """An open checkpoint, in any layout: `config`, and tensors by the engine's names."""

    def __init__(self, folder: str | Path) -> None:
        """Reads the configuration and every file's header, no tensor.

        Raises InvalidCheckpoint, naming missing, unknown and unfitting tensors all at once.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InvalidCheckpoint(f"checkpoint folder {folder} does not exist")
        self.config = ModelConfig.from_folder(self.folder)
        self._files = _open_files(self.folder)
        self.layout: Layout = detect(self._files)
        self._sources = sources(self.config, self.layout)
        self._check_sizes()
        self._check_tensors()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The engine's tensors (see layouts.py), whatever the files look like."""
        return {name: source.shape for name, source in self._sources.items()}

    def read_into(self, name: str, destination: Tensor) -> None:
        """Fills destination, of shapes[name] and of any dtype and device, with the tensor `name`.

        At most one tensor of the files, of experts one expert's share, is in memory besides.
        """
        source = self._sources[name]
        assert destination.shape == source.shape
        names = list(source.parts)
        match source.kind:
            case "rows":
                rows = destination.split([shape[0] for shape in source.parts.values()])
                for part, into in zip(names, rows, strict=True):
                    into.copy_(self._files[part].get_tensor(part))
            case "transposed":
                experts = self._files[names[0]].get_slice(names[0])
                for expert, into in enumerate(destination):
                    into.copy_(experts[expert].transpose(0, 1))
            case "mxfp4":
                blocks = self._files[names[0]].get_slice(names[0])
                scales = self._files[names[1]].get_tensor(names[1])
                if (scales == NAN_SCALE).any():
                    raise InvalidCheckpoint(
                        f"{self.folder}: {names[1]} holds a scale byte of {NAN_SCALE}, which is "
                        "not a number: the file is damaged"
                    )
                for expert, into in enumerate(destination):
                    block, scale = blocks[expert].to(into.device), scales[expert].to(into.device)
                    into.copy_(dequantise(block, scale, into.dtype))

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self.config, name)
            if self.layout != "dequantised" and size % GROUP:
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
                header = self._files[name].get_slice(name)
                if (found := tuple(header.get_shape())) != shape:
                    unfitting.append(f"{name} has shape {[*found]}, not {[*shape]}")
                elif (dtype := header.get_dtype()) not in source.dtypes:
                    unfitting.append(f"{name} is {dtype}, not {' or '.join(source.dtypes)}")
        faults = {"missing": missing, "unknown": sorted(unknown), "unfitting": unfitting}
        if sentence := "; ".join(_named(fault, names) for fault, names in faults.items() if names):
            raise InvalidCheckpoint(f"{self.folder} ({self.layout} layout): {sentence}")


def checkpoint_folder(model: str) -> Path:
    """Where a configuration's `model` lies; "demo" is expanded from the package on first use."""
    return demo.checkpoint_folder() if model == "demo" else Path(model)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint folder holds. num_bytes: of its tensor files, on disk."""

    folder: Path
    layout: Layout
    config: ModelConfig
    num_parameters: int
    num_active_parameters: int
    num_bytes: int
    has_tokenizer: bool


def describe(folder: str | Path) -> Summary:
    """Checks a folder's configuration and tensor headers, and counts. Loads no tensor."""
    checkpoint = Checkpoint(folder)
    total, active = count_parameters(checkpoint.config)
    return Summary(
        folder=checkpoint.folder,
        layout=checkpoint.layout,
        config=checkpoint.config,
        num_parameters=total,
        num_active_parameters=active,
        num_bytes=sum(path.stat().st_size for path in _tensor_files(checkpoint.folder)),
        has_tokenizer=(checkpoint.folder / "tokenizer.json").is_file(),
    )


def _open_files(folder: Path) -> dict[str, Any]:
    """Tensor name -> the open, memory-mapped file that holds it."""
    found: dict[str, Any] = {}
    for path in _tensor_files(folder):
        try:
            file = safe_open(path, framework="pt")
            found |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise InvalidCheckpoint(f"cannot read {path}: {error}") from None
    return found


def _tensor_files(folder: Path) -> list[Path]:
    """Those that the index names, or else all in the folder."""
    if not (folder / INDEX_FILE).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidCheckpoint(f"{folder} holds no .safetensors file")
        return files
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidCheckpoint(f"{folder / INDEX_FILE} has no weight_map")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _named(fault: str, names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    plural = "s" if len(names) > 1 else ""
    return f"{len(names)} {fault} tensor{plural}: {', '.join(names[:MAX_NAMED])}{more}"
