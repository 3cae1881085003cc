"""Steps of few rows as CUDA graphs: one for each shape that a step is filled up to."""

from collections.abc import Callable, Sequence
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
    """num_rows of decodes, one each, or of one prefill."""

    num_rows: int
    is_decode: bool


# Prompts of so many tokens that find nobody else there are graphs. Launched one by one, 20b's 220
# kernels take the host 6.3 ms, and the device 6.0.
MAXIMUM_PREFILL_ROWS = 256
PREFILL_ROWS_APART = 16


def prefill_sizes(most: int) -> tuple[int, ...]:
    """Rows of one prefill that graphs are captured for, up to `most`."""
    return tuple(range(PREFILL_ROWS_APART, most + 1, PREFILL_ROWS_APART))


def graph_sizes(most: int) -> tuple[int, ...]:
    """Rows of decodes that graphs are captured for, up to `most`, which is one of them.

    All up to 8, where each row reads experts of its own; then 8 and from 64 on 16 apart.
    """
    sizes = {*range(1, 9), *range(16, 65, 8), *range(80, most, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


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
        for shape in tracked(sorted(shapes, reverse=True), "CUDA graphs", len(shapes)):
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
