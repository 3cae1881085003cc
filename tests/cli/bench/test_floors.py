"""Floors against the performance notes' own figures, and against counting by hand."""

import pytest

from gptoss_backend.cli.bench.floors import Work, floor_ms, floors
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint

from ..conftest import Run

LARGE = RandomCheckpoint("120b").config


@pytest.mark.parametrize(
    ("length", "ms"), [(8192, 65), (32768, 413), (65536, 1233), (128000, 3923)]
)
def test_prefills_are_those_of_the_notes(length: int, ms: float) -> None:
    assert floor_ms(LARGE, Work(1, length, length, "mxfp4", "bf16")) == pytest.approx(ms, rel=0.01)


@pytest.mark.parametrize(("batch", "ms"), [(1, 0.97), (8, 4.1), (32, 11.3), (128, 22.5)])
def test_decodes_are_those_of_the_notes(batch: int, ms: float) -> None:
    assert floor_ms(LARGE, Work(batch, 1, 8192, "mxfp4", "bf16")) == pytest.approx(ms, rel=0.02)


def test_fp8_reads_more_of_the_experts_and_less_of_the_cache() -> None:
    def parts(weights: str, kv: str) -> dict[str, float]:
        work = Work(128, 1, 8192, weights, kv)
        return {name: each.ms for name, each in floors(LARGE, work).items()}

    mxfp4, fp8 = parts("mxfp4", "bf16"), parts("fp8", "fp8")
    assert fp8["experts"] == pytest.approx(mxfp4["experts"] * 32 / 17)
    assert fp8["qkv and output"] == mxfp4["qkv and output"]
    for name in ("attention, full", "attention, window"):
        assert fp8[name] == pytest.approx(mxfp4[name] / 2)


def test_an_unembedding_in_fp8_takes_half_the_time() -> None:
    for batch in (1, 100_000):  # to read, and to multiply
        bf16, fp8 = (
            floors(LARGE, Work(batch, 1, 8192, "fp8", "bf16", lm_head))["unembedding"].ms
            for lm_head in ("bf16", "fp8")
        )
        assert fp8 == pytest.approx(bf16 / 2, rel=0.1)


def test_what_bounds_an_operator() -> None:
    decode = floors(LARGE, Work(32, 1, 8192, "fp8", "bf16"))
    prefill = floors(LARGE, Work(1, 32768, 32768, "fp8", "bf16"))
    assert {each.bound_by for each in decode.values()} == {"memory"}
    assert {name for name, each in prefill.items() if each.bound_by == "memory"} == {"unembedding"}


@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_seen_keys_are_counted(new: int, context: int, window: int | None) -> None:
    work = Work(1, new, context, "fp8", "bf16")
    seen = [
        {key for key in range(position + 1) if window is None or key > position - window}
        for position in range(context - new, context)
    ]
    assert work.seen(window) == sum(map(len, seen))
    assert work.held(window) == len(set().union(*seen))


@pytest.mark.parametrize("lm_head", ["bf16", "fp8"])
def test_a_table_from_shapes_alone(gptoss: Run, lm_head: str) -> None:
    flags = ("--weights", "mxfp4", "--lm-head", lm_head, "--batches", "32", "--lengths", "8192")
    done = gptoss("bench", "floors", "120b", *flags)
    assert done.code == 0, done.err
    rows = [
        [cell.strip() for cell in row.strip("│").split("│")]
        for row in done.out.splitlines()
        if row.startswith("│")
    ]
    assert [row[0] for row in rows] == [*floors(LARGE, Work(1, 1, 1, "fp8", "bf16")), "all"]
    forms = ("mxfp4", "bf16", lm_head)
    works = (Work(32, 1, 8192, *forms), Work(1, 8192, 8192, *forms))
    assert rows[-1][1:] == [f"{floor_ms(LARGE, work):.3f}" for work in works]
    assert rows[0][1].endswith("m")
    assert rows[0][2].endswith("a")


def test_bad_input_is_a_sentence(gptoss: Run) -> None:
    assert gptoss("bench", "floors", "70b").err == (
        "gptoss: size must be one of 20b, 120b, tiny, got '70b'\n"
    )
    assert gptoss("bench", "floors", "--weights", "int4").code == 2
