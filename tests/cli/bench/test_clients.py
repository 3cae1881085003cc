"""How many processes clients get. The clients themselves are tested with a server."""

import pytest

from gptoss_backend.cli.bench.clients import num_processes
from gptoss_backend.cli.bench.load import ALL_AT_ONCE, Load


@pytest.mark.parametrize(
    ("load", "cores", "processes"),
    [
        (Load(1000, concurrency=1), 64, 1),
        (Load(1000, concurrency=16), 64, 4),
        (Load(1000, concurrency=64), 64, 8),
        (Load(1000, concurrency=64), 4, 2),
        (Load(1000, concurrency=64), 1, 1),
        (Load(1000, rate=ALL_AT_ONCE), 64, 8),
        (Load(10, rate=2.0), 64, 2),
    ],
)
def test_few_streams_need_one_and_the_server_keeps_half_of_the_cores(
    load: Load, cores: int, processes: int
) -> None:
    assert num_processes(load, cores) == processes
