"""Which graphs there are, and in which order they are captured. That they are right: see
test_device_steps.py and, of a GPU's, test_runner.py."""

from itertools import pairwise

import pytest
import torch

from gptoss_engine.graphs import (
    GraphShape,
    Outputs,
    Replay,
    StepGraphs,
    graph_sizes,
    mixed_shapes,
    prefill_shapes,
)


def test_sizes_are_close_where_rows_are_few() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(6) == (1, 2, 3, 4, 5, 6)
    assert graph_sizes(20) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
    assert graph_sizes(64)[8:] == (16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(128)[15:] == (80, 96, 112, 128)
    assert graph_sizes(250)[-3:] == (224, 240, 250)


@pytest.mark.parametrize("most", [1, 8, 9, 64, 65, 80, 128, 1000])
def test_every_number_of_rows_has_a_size_and_none_is_beyond(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most
    assert [*sizes] == sorted({*sizes})
    assert max(later - one for one, later in pairwise((0, *sizes))) <= 16


def test_prefills_are_filled_up_to_sixteen_rows_more() -> None:
    assert prefill_shapes(0) == prefill_shapes(15) == ()
    assert prefill_shapes(50) == tuple(GraphShape(0, rows, 1) for rows in (16, 32, 48))


def test_prefills_beside_others_have_graphs_of_few_shapes() -> None:
    assert mixed_shapes(12, 140, (64, 128)) == (
        *(GraphShape(0, 64, 2), GraphShape(0, 128, 4)),
        *(GraphShape(8, 64, 2), GraphShape(8, 128, 4)),
        *(GraphShape(12, 64, 2), GraphShape(12, 128, 4)),
    )
    assert mixed_shapes(12, 139, (64, 128))[-1] == GraphShape(12, 64, 2)
    assert mixed_shapes(1, 1000, (128,)) == (GraphShape(1, 128, 1),)
    sizes = mixed_shapes(256, 8192)
    assert {shape.num_decodes for shape in sizes} == {0, 8, 16, 32, 64, 128, 256}
    assert len(sizes) == 27
    assert max(shape.num_rows for shape in sizes) == 1152
    one = GraphShape(8, 64, 2)
    assert (one.num_rows, one.num_sampled, one.num_sequences) == (72, 10, 11)
    assert GraphShape(8).num_sequences == 8
    assert len({shape.kind for shape in (one, GraphShape(8), GraphShape(0, 64, 1))}) == 3


def test_the_largest_is_captured_first_and_each_is_run_before() -> None:
    events: list[object] = []
    one, two, five = (GraphShape(size) for size in (1, 2, 5))
    prefill = GraphShape(0, 2, 1)

    def step(shape: GraphShape) -> Outputs:
        events.append(shape)
        return Outputs(torch.full((shape.num_rows,), shape.num_rows), torch.zeros(2, 3))

    def capture(run) -> tuple[Replay, Outputs]:
        events.append("captured")
        found = run()
        return lambda: events.append(f"replayed {len(found.token_ids)}"), found

    graphs = StepGraphs(step, (one, two, five, prefill), capture)
    order = (five, two, prefill, one)
    assert events == [each for shape in order for each in (shape, "captured", shape)]
    assert two in graphs
    assert GraphShape(0, 1, 1) not in graphs
    assert graphs.replay(two).token_ids.tolist() == [2, 2]
    assert events[-1] == "replayed 2"
