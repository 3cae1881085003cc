"""hidden <- hidden + sum over ranks of update, and the norm of that, by kernels in peer memory

One launch: the update's rows (or what experts gave, added up) go straight into the other ranks'
inboxes, and the sum, the norm and its quantisation follow as they arrive (reduction.cu). Bound by
the link: each rank sends 2TH (R - 1) bytes with one shot, 4TH (R - 1) / R with two. With two ranks
these are the same, and one shot waits once. No multicast: only loads of a rank's own memory, and
stores to the others'.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gptoss_kernels import contracts
from gptoss_kernels.contracts import LibraryError, Mixture
from gptoss_kernels.cuda import runtime
from gptoss_kernels.cuda.combine import MixtureArguments
from gptoss_kernels.cuda.rows import (
    RowLayout,
    check_columns,
    check_layout,
    check_num_chosen,
    row_spec,
)

MAXIMUM_RANKS = 8
MAXIMUM_BLOCKS = 528  # four for each multiprocessor of an H100 or H200
ONE_SHOT_BYTES = 256 << 10  # of an update, with more than two ranks
_FEW_ROWS = 512  # up to which a warp takes as few columns as it can
_EMPTY = 0xFF  # each byte of an inbox in which nothing is
_identities = itertools.count()


@dataclass(frozen=True)
class Room:
    """How much a rank's inboxes hold: rows of up to `one_shot` tokens, and slots of up to `tokens`.

    All ranks have the same. A launch is for `tokens` at most.
    """

    ranks: int
    columns: int
    tokens: int
    one_shot: int

    @classmethod
    def of(cls, ranks: int, columns: int, tokens: int, one_shot: int | None = None) -> Room:
        """Where `one_shot` is not given, up to so many tokens as one shot is faster for."""
        if not 2 <= ranks <= MAXIMUM_RANKS:
            raise ValueError(f"a reduction is of 2 to {MAXIMUM_RANKS} ranks, got {ranks}")
        if columns % 16 or columns < 1 or tokens < 1:
            raise ValueError(
                "columns must be a multiple of 16, and tokens at least 1, got "
                f"{columns} and {tokens}"
            )
        tokens = -(-tokens // 64) * 64  # so that the scales of each piece start at 16 bytes
        if one_shot is None:
            one_shot = tokens if ranks == 2 else ONE_SHOT_BYTES // (2 * columns)
        return cls(ranks, columns, tokens, min(one_shot, tokens))

    @property
    def slots(self) -> tuple[int, int]:
        """Of one shot, and of two."""
        return self.one_shot, 0 if self.one_shot == self.tokens else -(-self.tokens // self.ranks)

    @property
    def offsets(self) -> tuple[int, int, int]:
        """In bytes: where those of one shot begin, of two, and where they end."""
        turn = 2 * 2 * self.columns * (self.ranks - 1)
        first, second = self.slots
        return 0, first * turn, (first + 2 * second) * turn


def spec(
    layout: RowLayout,
    ranks: int,
    *,
    two_shot: bool,
    num_chosen: int = 0,
    has_norm: bool = False,
    is_fp8: bool = False,
) -> runtime.KernelSpec:
    """num_chosen: of an update that is a mixture. is_fp8: of the norm."""
    return row_spec(
        "reduction",
        layout,
        RANKS=ranks,
        TWO_SHOT=int(two_shot),
        CHOSEN=num_chosen,
        NORM=int(has_norm),
        FP8=int(is_fp8),
    )


def choose_layout(num_tokens: int, columns: int, ranks: int) -> RowLayout:
    """With more than two ranks a lane has a vector of each of them at once."""
    return RowLayout.of(columns, vectors=2 if ranks == 2 and num_tokens > _FEW_ROWS else 1)


class Reduction:
    """ops.Reduction of one rank. `inboxes`: where each rank's memory is, as this one sees it.

    memory: of this rank, Room.offsets[-1] bytes, with nothing in any inbox (`empty_memory`).
    num_blocks: at most, the same on all ranks. Where ranks of one process share a GPU, all blocks
    of all of them must find room on it at once, beside those of each one's next launch, which may
    begin early. mapping: what keeps the others' memory where it is.
    """

    def __init__(
        self,
        rank: int,
        room: Room,
        inboxes: Sequence[int],
        memory: Tensor,
        *,
        limit: float,
        num_blocks: int = MAXIMUM_BLOCKS,
        layout: RowLayout | None = None,
        mapping: object = None,
    ) -> None:
        self.rank, self.size, self.room = rank, room.ranks, room
        self.limit = limit
        self._inboxes = tuple(inboxes)
        self._memory, self._mapping = memory, mapping
        self._num_blocks = num_blocks
        self._layout = layout
        self._identity = next(_identities)
        device = memory.device
        self._turns = torch.zeros(2, num_blocks, dtype=torch.int32, device=device)
        self._waited = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")

    @classmethod
    def of_group(
        cls,
        group: ProcessGroup,
        device: torch.device,
        *,
        columns: int,
        max_tokens: int,
        limit: float,
        one_shot: int | None = None,
        num_blocks: int = MAXIMUM_BLOCKS,
        layout: RowLayout | None = None,
    ) -> Reduction:
        """All ranks of the group call this together, each with a GPU of its own.

        LibraryError where they cannot see each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric

        # It would be set up for all memory here, and is not used.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        room = Room.of(group.size(), columns, max_tokens, one_shot)
        try:
            with torch.cuda.device(device):
                memory = symmetric.empty(room.offsets[-1], dtype=torch.uint8, device=device)
                # Before any rank knows where it is.
                memory.fill_(_EMPTY)
                torch.cuda.synchronize()
                mapping = symmetric.rendezvous(memory, group)
        except RuntimeError as error:
            raise LibraryError(
                f"rank {group.rank()} of {group.size()} on {device} cannot share its memory with "
                f"the others: {error}"
            ) from error
        # Of allocations, in which ours have the same place on all ranks.
        offset = memory.data_ptr() - mapping.buffer_ptrs[group.rank()]
        inboxes = [address + offset for address in mapping.buffer_ptrs]
        options = {"limit": limit, "num_blocks": num_blocks, "layout": layout, "mapping": mapping}
        return cls(group.rank(), room, inboxes, memory, **options)

    def add(self, hidden: Tensor, update: Tensor | Mixture) -> Tensor:
        """hidden bf16 [T, H], the sum in place, returned; update bf16 [T, H] or a Mixture of bf16.

        H a multiple of 16, the one that there is room for. What a mixture has beside its outputs
        must not be written by the kernel launched just before. Raises ValueError on anything else,
        and runtime.CudaError where there is no Hopper GPU.
        """
        self._run(hidden, update, None, 0.0, ())
        return hidden

    def rms_norm(
        self,
        hidden: Tensor,
        weight: Tensor,
        eps: float,
        update: Tensor | Mixture,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """That, and the norm of the sum in bf16 [T, H]; the same bits as rms_norm's."""
        if out is None:
            out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._run(hidden, update, weight, eps, (out,))
        return out

    def rms_norm_fp8(
        self,
        hidden: Tensor,
        weight: Tensor,
        eps: float,
        update: Tensor | Mixture,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """That, and the norm of the sum quantised; the same bits as rms_norm_fp8's."""
        if out is None:
            if hidden.dim() != 2:  # all else is checked later, once for many calls
                contracts.check_row_matrix("hidden", hidden, hidden)
            out = contracts.empty_quantised(len(hidden), hidden.shape[1], hidden.device)
        self._run(hidden, update, weight, eps, out)
        return out

    def failure(self) -> str | None:
        rank, row = self._waited.tolist()
        if not rank:
            return None
        return (
            f"rank {self.rank} of {self.size} waited {self.limit:g} s for row {row} of rank "
            f"{rank - 1}"
        )

    def _run(
        self,
        hidden: Tensor,
        update: Tensor | Mixture,
        weight: Tensor | None,
        eps: float,
        out: tuple[Tensor, ...],
    ) -> None:
        tokens = self.room.tokens
        if hidden.dim() == 2 and len(hidden) > tokens:
            self._check(hidden, update, weight, out)
            for first in range(0, len(hidden), tokens):
                piece = slice(first, first + tokens)
                if isinstance(update, Mixture):
                    part = update._replace(rows=update.rows[piece], weights=update.weights[piece])
                else:
                    part = update[piece]
                self._run(hidden[piece], part, weight, eps, tuple(tensor[piece] for tensor in out))
            return
        if hidden.dim() == 2 and len(hidden) == 0:
            self._check(hidden, update, weight, out)
            return
        tensors = (hidden, *(update if isinstance(update, Mixture) else (update,)))
        if weight is not None:
            tensors = (*tensors, weight)
        runtime.launch(
            ("reduction", self._identity, eps, len(out), isinstance(update, Mixture)),
            (*tensors, *out),
            lambda: self._prepare(hidden, update, weight, eps, out),
        )

    def _check(
        self,
        hidden: Tensor,
        update: Tensor | Mixture,
        weight: Tensor | None,
        out: tuple[Tensor, ...],
    ) -> None:
        contracts.check_reduction_inputs(hidden, update)
        if weight is not None:
            contracts.check_rms_norm_inputs(hidden, weight, None)
        check_columns("hidden", hidden)
        if hidden.shape[1] != self.room.columns:
            raise ValueError(
                f"hidden must have the {self.room.columns} columns that there is room for, got "
                f"{hidden.shape[1]}"
            )
        if isinstance(update, Mixture):
            check_num_chosen(update.rows.shape[1])
        shape = (hidden.shape[0], hidden.shape[1])
        if len(out) == 1:
            contracts.check_output("out", out[0], torch.bfloat16, shape, hidden, "hidden")
        elif out:
            contracts.check_quantised((out[0], out[1]), shape, hidden)
        if hidden.device != self._memory.device:
            raise ValueError(
                f"hidden must be on the device of the reduction, got {hidden.device} and "
                f"{self._memory.device}"
            )
        contracts.check_gpu(hidden, "hidden")

    def _prepare(
        self,
        hidden: Tensor,
        update: Tensor | Mixture,
        weight: Tensor | None,
        eps: float,
        out: tuple[Tensor, ...],
    ) -> runtime.Launch:
        self._check(hidden, update, weight, out)
        (rows, columns), room = hidden.shape, self.room
        layout = self._layout or choose_layout(rows, columns, self.size)
        check_layout(layout, columns)
        two_shot = rows > room.one_shot
        offset, slots = room.offsets[two_shot], room.slots[two_shot]
        inboxes = [address + offset for address in self._inboxes]
        own = inboxes.pop(self.rank)
        is_fp8, has_norm = len(out) == 2, len(out) > 0
        pointers = [tensor.data_ptr() for tensor in out]
        pointers = [None, *pointers] if is_fp8 else [*pointers, None, None, None][:3]
        if isinstance(update, Mixture):
            num_chosen = update.rows.shape[1]
            given = (MixtureArguments.of(*update),)
        else:
            num_chosen = 0
            given = (update.data_ptr(), update.stride(0))
        arguments = _arguments_of(self.size - 1, num_chosen > 0)(
            *(hidden.data_ptr(), *given, weight.data_ptr() if weight is not None else None),
            *(*pointers, own, (ctypes.c_void_p * len(inboxes))(*inboxes)),
            *(self._turns[int(two_shot)].data_ptr(), self._waited.data_ptr()),
            *(int(self.limit * 1e9), self.rank, slots, rows, columns),
            *(hidden.stride(0), out[0].stride(0) if out else 0),
            *(out[-1].stride(1) if is_fp8 else 0, eps),
        )
        kernel = spec(
            *(layout, self.size),
            two_shot=two_shot,
            num_chosen=num_chosen,
            has_norm=has_norm,
            is_fp8=is_fp8,
        )
        used = -(-rows // self.size) if two_shot else rows
        return runtime.Launch(
            runtime.load(kernel, hidden.get_device()),
            grid=min(used, self._num_blocks),
            threads=layout.threads,
            arguments=(arguments,),
        )


def empty_memory(room: Room, device: torch.device | str) -> Tensor:
    """Inboxes with nothing in them, for ranks of one process."""
    return torch.full((room.offsets[-1],), _EMPTY, dtype=torch.uint8, device=device)


@functools.cache
def _arguments_of(num_peers: int, is_mixture: bool) -> Any:
    """As reduction.cu has them."""
    update: tuple[tuple[str, Any], ...] = (("update", MixtureArguments),)
    if not is_mixture:
        update = (("update", ctypes.c_void_p), ("update_stride", ctypes.c_longlong))

    class Arguments(ctypes.Structure):
        _fields_ = (
            ("hidden", ctypes.c_void_p),
            *update,
            *((name, ctypes.c_void_p) for name in ("weight", "out", "values", "scale", "inbox")),
            ("peers", ctypes.c_void_p * num_peers),
            *((name, ctypes.c_void_p) for name in ("turns", "waited")),
            ("limit", ctypes.c_ulonglong),
            *((name, ctypes.c_int) for name in ("rank", "slots", "rows", "columns")),
            *(
                (name, ctypes.c_longlong)
                for name in ("hidden_stride", "out_stride", "scale_stride")
            ),
            ("eps", ctypes.c_float),
        )

    return Arguments
