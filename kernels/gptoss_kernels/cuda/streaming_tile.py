"""What linear.cu and linear_fp8_rows.cu are compiled for: the weight streams past few rows of x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gptoss_kernels.cuda import runtime

_MAXIMUM_STAGES = 8


@dataclass(frozen=True)
class StreamingTile(ABC):
    """Of a product by `kernel`: K, and the most rows of x, all of which lie in registers.

    rows: of the weight, which are copied at once, of `value_bytes` for each of K.
    """

    kernel: ClassVar[str]
    rows: ClassVar[int]
    value_bytes: ClassVar[int]

    k: int
    tokens: int = 8

    @property
    @abstractmethod
    def warps(self) -> int:
        """Each has its columns of K."""

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stages(self) -> int:
        """Slots, each for a tile of the weight, with a barrier."""
        free = runtime.MAXIMUM_SHARED_BYTES - self._partial_bytes
        return min(_MAXIMUM_STAGES, free // self._slot_bytes)

    @property
    def shared_bytes(self) -> int:
        return self._partial_bytes + self.stages * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        return self.rows * self.value_bytes * self.k + 8

    @property
    def _partial_bytes(self) -> int:
        """What each warp leaves of two tiles, in fp32."""
        return 2 * self.warps * self.rows * self.tokens * 4

    @property
    def is_possible(self) -> bool:
        """Rows in pieces of 16 bytes; two slots at least: one is filled, another multiplied."""
        return self.k * self.value_bytes % 16 == 0 and self.stages > 1

    @property
    def spec(self) -> runtime.KernelSpec:
        defines = {
            "K": self.k,
            "TOKENS": self.tokens,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "SHARED_BYTES": self.shared_bytes,
        }
        return runtime.KernelSpec(
            self.kernel,
            files=("mma.cuh", f"{self.kernel}.cu"),
            defines=tuple(defines.items()),
            shared_bytes=self.shared_bytes,
            variant=runtime.variant_of(self, f"K={self.k}", "k"),
        )
