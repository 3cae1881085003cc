"""Steps of few rows as CUDA graphs: one for each shape that a step is filled up to."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gptoss_engine.progress import tracked

Replay = Callable[[], None]


class Outputs(NamedTuple):
    """What a step leaves on the device: token_ids [S] int64, and the logits [S, V] they are of."""

    token_ids: Tensor
    logits: Tensor


class Capture(Protocol):
    """Makes of what `run` enqueues something that enqueues the same, and writes the same memory."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]: ...


class GraphShape(NamedTuple):
    """So many decodes, of a row each, and rows for so many prefills or fewer, which lie behind."""

    num_decodes: int
    num_prefill_rows: int = 0
    num_prefills: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_decodes + self.num_prefill_rows

    @property
    def num_sampled(self) -> int:
        """After so many rows a token is due."""
        return self.num_decodes + self.num_prefills

    @property
    def num_sequences(self) -> int:
        """One more where there are prefills: it has the rows that are missing."""
        return self.num_sampled + (self.num_prefills > 0)

    @property
    def kind(self) -> tuple[bool, bool]:
        """Decodes alone, one prefill alone, or several of anything."""
        return self.num_prefills > 0, self.num_sampled > 1 and self.num_prefills > 0


# Prompts of so many tokens that find nobody else there are graphs. Launched one by one, 20b's 220
# kernels take the host 6.3 ms, and the device 6.0.
MAXIMUM_PREFILL_ROWS = 256
PREFILL_ROWS_APART = 16
# Of prompts beside decodes, or several: up to so many rows are graphs, and so many on average have
# a prompt each. One by one the host takes 10 to 17 ms for such a step's launches, which no other
# step has prepared, and as long nobody hears of anything.
MIXED_ROWS = (128, 256, 512, 1024)
# In all. Larger steps take the device about as long as the host.
_MOST_MIXED_ROWS = 1152
_ROWS_A_PREFILL = 32
_LEAST_MIXED_DECODES = 8


def prefill_shapes(most: int) -> tuple[GraphShape, ...]:
    """Graphs of one prefill of up to `most` rows."""
    rows = range(PREFILL_ROWS_APART, most + 1, PREFILL_ROWS_APART)
    return tuple(GraphShape(0, each, 1) for each in rows)


def mixed_shapes(
    most_seqs: int, most_rows: int, sizes: Sequence[int] = MIXED_ROWS
) -> tuple[GraphShape, ...]:
    """Graphs of up to most_seqs decodes and most_rows rows in all, of prefills one of `sizes`.

    One prefill alone has its own.
    """
    decodes, size = [0], _LEAST_MIXED_DECODES
    while size < most_seqs:
        decodes.append(size)
        size *= 2
    decodes.append(most_seqs)
    shapes = (
        GraphShape(count, rows, min(rows // _ROWS_A_PREFILL, most_seqs))
        for count in decodes
        for rows in sizes
    )
    most_rows = min(most_rows, _MOST_MIXED_ROWS)
    return tuple(shape for shape in shapes if shape.num_rows <= most_rows and shape.num_sampled > 1)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of decodes that graphs are captured for, up to `most`, which is one of them.

    All up to 8, where each row reads experts of its own; then 8 and from 64 on 16 apart.
    """
    sizes = {*range(1, 9), *range(16, 65, 8), *range(80, most, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


def ordered(shapes: Iterable[GraphShape]) -> list[GraphShape]:
    """Those of the most rows first."""
    return sorted(shapes, key=lambda shape: (shape.num_rows, shape), reverse=True)


class StepGraphs:
    """What `step(shape)` enqueues, captured for each shape, in one pool of memory.

    `step` reads and writes the same memory whenever it is called; what it returns is there until
    another graph is replayed. It is called once before its capture: kernels are loaded then.
    """

    def __init__(
        self,
        step: Callable[[GraphShape], Outputs],
        shapes: Sequence[GraphShape],
        capture: Capture,
    ) -> None:
        self._graphs: dict[GraphShape, tuple[Replay, Outputs]] = {}
        # The largest first: what it gives back to the pool has room for all others.
        for shape in tracked(ordered(shapes), "CUDA graphs", len(shapes)):
            step(shape)
            self._graphs[shape] = capture(lambda shape=shape: step(shape))

    def __contains__(self, shape: GraphShape) -> bool:
        return shape in self._graphs

    def replay(self, shape: GraphShape) -> Outputs:
        """Enqueue the graph on the current stream."""
        replay, outputs = self._graphs[shape]
        replay()
        return outputs


class CudaCapture:
    """Captures into graphs that share their memory: they take turns on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, as a server's do.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = run()
        # Held by the pool alone, so that the next graph has its own in the same place.
        return graph.replay, Outputs(*map(_alias, outputs))


class _Memory:
    """So that PyTorch finds a tensor's memory without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, which the allocator may give to others."""
    assert tensor.is_contiguous()
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
