"""Which graphs there are, and in which order they are captured. That they are right: see
test_device_steps.py and, of a GPU's, test_runner.py."""

from itertools import pairwise

import pytest
import torch

from gptoss_engine.graphs import DecodeGraphs, Outputs, Replay, graph_sizes


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


def test_the_largest_is_captured_first_and_each_is_run_before() -> None:
    events: list[object] = []

    def step(size: int) -> Outputs:
        events.append(size)
        return Outputs(torch.full((size,), size), torch.zeros(size, 3))

    def capture(run) -> tuple[Replay, Outputs]:
        events.append("captured")
        found = run()
        return lambda: events.append(f"replayed {len(found.token_ids)}"), found

    graphs = DecodeGraphs(step, (1, 2, 5), capture)
    assert events == [5, "captured", 5, 2, "captured", 2, 1, "captured", 1]
    assert graphs.replay(2).token_ids.tolist() == [2, 2]
    assert events[-1] == "replayed 2"
