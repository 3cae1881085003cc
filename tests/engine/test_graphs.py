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
    prefill_sizes,
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
    assert prefill_sizes(0) == prefill_sizes(15) == ()
    assert prefill_sizes(50) == (16, 32, 48)


def test_the_largest_is_captured_first_and_each_is_run_before() -> None:
    events: list[object] = []
    one, two, five = (GraphShape(size, is_decode=True) for size in (1, 2, 5))
    prefill = GraphShape(2, is_decode=False)

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
    assert GraphShape(1, is_decode=False) not in graphs
    assert graphs.replay(two).token_ids.tolist() == [2, 2]
    assert events[-1] == "replayed 2"
