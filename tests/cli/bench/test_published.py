"""What others published: whole, sourced, and in their own dollars."""

import pytest
from rich.console import Console

from gptoss_backend.cli.bench import published
from gptoss_backend.cli.bench.money import dollars_per_million


def test_every_figure_has_a_source_a_layout_and_grows() -> None:
    for model in published.SIZES:
        figures = published.prefills(model)
        assert {each.engine for each in figures} >= {"ROSE", "vLLM 0.26.0"}
        for each in figures:
            assert each.model == model
            assert each.source
            assert [*each.values] == [8192, 32768, 65536, 128000]
            assert [*each.values.values()] == sorted(each.values.values())
        assert len({each.label for each in figures}) == len(figures)
        for each in published.decodes(model):
            assert [*each.values.values()] == sorted(each.values.values())


def test_dollars_are_those_of_the_price() -> None:
    # As the notes have it: 0.364 s at 8192 tokens are $0.037 a million.
    assert dollars_per_million(0.364, 8192, 1, 3.0) == pytest.approx(0.037, abs=5e-4)
    assert dollars_per_million(0.364, 8192, 4, 1.5) == pytest.approx(2 * 0.037, abs=1e-3)


def test_peers_are_those_of_one_gpu_and_this_cell() -> None:
    figures = published.prefills("120b")
    assert published.peers(figures, 8192) == {"ROSE": 0.364, "vLLM 0.26.0": 0.2046}
    assert published.peers(figures, 4096) == {}
    steps = published.decodes("120b")
    assert published.peers(steps, 8, context=32768) == {"vLLM 0.26.0": 10.9}
    assert published.peers(steps, 128, context=32768) == {}
    assert published.peers(published.throughputs("20b"), (8192, 1024)) == {"TensorRT-LLM": 4015}


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("120b", "120b"),
        ("gpt-oss-20b", "20b"),
        ("gpt-oss-120b-fp8", "120b"),
        ("demo", ""),
        ("my-220b", ""),
    ],
)
def test_the_size_is_in_the_name(model: str, size: str) -> None:
    assert published.size_of(model) == size


def test_a_table_has_seconds_dollars_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    (table,) = published.prefill_tables("gpt-oss-120b", 3.0)
    Console(width=200).print(table)
    printed = capsys.readouterr().out
    assert "ROSE EP8 DP1 TP8" in printed
    # Eight GPUs for 5.119 s.
    assert "5.119 │ 0.267" in printed
    assert "Perplexity" in printed
    assert len(published.prefill_tables("demo", 3.0)) == 2
