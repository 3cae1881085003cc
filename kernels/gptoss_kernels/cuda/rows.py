"""What the kernels bound by memory share: how warps share a row, and their sources.

The kernels are those of rows.cuh: quantise, rms_norm_fp8, reduction, dispatch_fp8 and combine.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gptoss_kernels.cuda.compiler import KernelSpec

MAXIMUM_COLUMNS = 8192
MAXIMUM_CHOSEN = 8  # experts of a token

_CHUNK = 256  # columns that one access of a warp covers
_MAXIMUM_WARPS = 16
# Up to so many rows, for which all have a block at once, a warp takes as few columns as it can.
# Beyond, two accesses of one warp under way at once are cheaper than two warps, and more of them no
# better: of the sizes timed on an H200 the last of the one kind and the first of the other are 512
# and 2048 (see docs/LOG.md).
_FEW_ROWS = 512


@dataclass(frozen=True)
class RowLayout:
    """`warps` warps share a row, each with `vectors` times 256 columns; a block has `rows` rows.

    No kernel's result depends on it.
    """

    vectors: int
    warps: int
    rows: int

    @classmethod
    def of(cls, columns: int, vectors: int, threads: int = 0) -> RowLayout:
        """With `vectors` vectors a lane or less, and as many rows as fit `threads`, or one."""
        chunks = -(-columns // _CHUNK)
        warps = min(-(-chunks // vectors), _MAXIMUM_WARPS)
        return cls(-(-chunks // warps), warps, max(1, threads // (32 * warps)))

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.rows

    @property
    def defines(self) -> dict[str, int]:
        return {"VECTORS": self.vectors, "WARPS": self.warps, "ROWS": self.rows}


def choose_layout(num_rows: int, columns: int) -> RowLayout:
    """For kernels that hold a row in registers."""
    return RowLayout.of(columns, vectors=1 if num_rows <= _FEW_ROWS else 2)


def check_layout(layout: RowLayout, columns: int) -> None:
    """Refuse a layout of narrower rows, with which the rest of a row would not be written."""
    if layout.vectors * layout.warps * _CHUNK < columns:
        raise ValueError(f"{layout} covers fewer than {columns} columns")


def check_columns(name: str, matrix: Tensor) -> None:
    """As many as the warps of a block hold in registers."""
    if matrix.shape[1] > MAXIMUM_COLUMNS:
        raise ValueError(f"{name} must have up to {MAXIMUM_COLUMNS} columns, got {matrix.shape[1]}")


def check_num_chosen(count: int) -> None:
    """Each is written out: a lane holds something of all of them."""
    if count > MAXIMUM_CHOSEN:
        raise ValueError(f"K must be at most {MAXIMUM_CHOSEN}, got {count}")


def row_spec(name: str, layout: RowLayout, **defines: int) -> KernelSpec:
    """<name>.cu below rows.cuh, and below what others of its kind share."""
    shared = ["rows.cuh"]
    if name.startswith("dispatch_"):
        shared.append("dispatch.cuh")
    elif defines.get("CHOSEN"):
        shared.append("mixture.cuh")
    if name in ("rms_norm_fp8", "reduction"):
        shared.append("norm.cuh")
    variant = f"{layout.rows}x{layout.warps}x{layout.vectors}"
    return KernelSpec(
        name,
        files=(*shared, f"{name}.cu"),
        defines=(*layout.defines.items(), *defines.items()),
        variant=" ".join([variant, *(f"{key}={value}" for key, value in defines.items())]),
    )
