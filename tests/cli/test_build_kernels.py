"""`gptoss build-kernels`, run in this process, with kernels that compile at once."""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gptoss_engine.checkpoints.checkpoint import checkpoint_folder, describe
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.model_config import ModelConfig
from gptoss_kernels.cuda import build, compiler
from gptoss_kernels.cuda.compiler import KernelSpec

from .conftest import Run

DOUBLE = KernelSpec(
    "twice",
    (),
    generated="""
    extern "C" __global__ void twice(float* x) {
        float copy[32];
        for (int i = 0; i < 32; ++i) copy[i] = x[i];
        __syncthreads();
        for (int i = 0; i < 32; ++i) x[32 * i + threadIdx.x] = 2 * copy[i] * copy[31 - i];
    }
    """,
    shared_bytes=1000,
    variant="one",
)


@pytest.fixture
def serve_only(monkeypatch: pytest.MonkeyPatch):
    def choose(*specs: KernelSpec) -> None:
        monkeypatch.setattr(build, "served_kernels", lambda: specs)

    return choose


def test_a_table_of_what_was_compiled(gptoss: Run, serve_only, tmp_path: Path) -> None:
    serve_only(DOUBLE, replace(DOUBLE, variant="two", defines=(("OTHER", 1),)))
    done = gptoss("build-kernels", "--output", tmp_path / "image", "--jobs", 2)
    assert done.code == 0, done.err
    one, two = (line for line in done.out.splitlines() if "twice" in line)
    assert [cell.strip() for cell in one.split("│")[3:7]] == ["1,000", "0", "0", "0"]
    assert "twice two" in two
    assert "2 kernels for sm_90a" in done.out
    assert len(list((tmp_path / "image" / "kernels").iterdir())) == 2


def test_json_in_the_users_cache(
    gptoss: Run, serve_only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTOSS_CACHE", str(tmp_path))
    serve_only(DOUBLE)
    report = json.loads(gptoss("build-kernels", "--json").out)
    assert report["cache"] == str(tmp_path)
    assert report["architecture"] == "sm_90a"
    (kernel,) = report["kernels"]
    assert kernel.pop("registers") > 16
    assert kernel == {
        "kernel": "twice one",
        "shared_bytes": 1000,
        "spill_bytes": 0,
        "stack_bytes": 0,
        "warnings": [],
        "hot": True,
        "faults": [],
    }
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".cubin"]


def test_a_kernel_that_spills_fails_the_command(gptoss: Run, serve_only, tmp_path: Path) -> None:
    serve_only(DOUBLE, replace(DOUBLE, variant="capped", flags=("--maxrregcount=16",)))
    done = gptoss("build-kernels", "--output", tmp_path)
    assert done.code == 1
    assert "1 kernel is not fit to be served:\n  twice capped: spills " in done.err
    assert "twice one" in done.out


def test_a_kernel_that_does_not_compile_fails_the_command(
    gptoss: Run, serve_only, tmp_path: Path
) -> None:
    serve_only(DOUBLE, replace(DOUBLE, variant="broken", generated="int x = missing;"))
    done = gptoss("build-kernels", "--output", tmp_path)
    assert done.code == 1
    assert 'identifier "missing" is undefined' in done.err
    broken, sound = (line for line in done.out.splitlines() if "twice" in line)
    assert broken.split("│")[2].strip() == "none"
    assert sound.split("│")[2].strip() != "none"


def test_what_a_rank_takes_is_compiled_too(
    gptoss: Run, serve_only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_only(DOUBLE)
    rank_kernels, asked = build.rank_kernels, []

    def of_a_rank(ranks: int) -> tuple[KernelSpec, ...]:
        asked.append(ranks)
        return (replace(DOUBLE, variant="of a rank", defines=(("OTHER", 1),)),)

    monkeypatch.setattr(build, "rank_kernels", of_a_rank)
    done = gptoss("build-kernels", "--output", tmp_path, "--ranks", 4)
    assert (done.code, asked) == (0, [4])
    assert "twice of a rank" in done.out
    assert gptoss("build-kernels", "--output", tmp_path).code == 0
    assert asked == [4]
    monkeypatch.setattr(build, "rank_kernels", rank_kernels)
    done = gptoss("build-kernels", "--output", tmp_path, "--ranks", 3)
    assert done.code == 1
    assert done.err == ("gptoss: ranks must divide 8 key-value heads and 32 experts, got 3\n")


def test_a_folder_that_cannot_be_written_is_said_before(gptoss: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = gptoss("build-kernels", "--output", tmp_path / "file")
    assert done.code == 1
    assert done.err.startswith(f"gptoss: cannot write to {tmp_path}/file/kernels: ")
    (tmp_path / "kernels").write_text("")
    done = gptoss("build-kernels", "--output", tmp_path)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"gptoss: cannot write to {tmp_path}/kernels: File exists\n"


def test_a_reason_that_kernels_share_is_said_once(
    gptoss: Run, serve_only, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = DOUBLE, replace(DOUBLE, variant="two"), replace(DOUBLE, variant="three")
    serve_only(*twins)

    def full_disk(specs: Iterable[KernelSpec], **_options: object) -> Iterator[build.Built]:
        for spec in specs:
            yield build.Built(spec, None, "own" if spec == twins[2] else "no space left")

    monkeypatch.setattr(build, "build", full_disk)
    done = gptoss("build-kernels", "--output", tmp_path)
    assert done.code == 1
    assert done.err == (
        "gptoss: 3 kernels are not fit to be served:\n"
        "  twice one and 1 more: no space left\n"
        "  twice three: own\n"
    )


def test_a_row_of_the_table_is_a_line_where_no_terminal_shows_it(
    gptoss: Run, serve_only, tmp_path: Path
) -> None:
    serve_only(replace(DOUBLE, variant=" ".join(["LONG=1"] * 20)))
    done = gptoss("build-kernels", "--output", tmp_path)
    (row,) = (line for line in done.out.splitlines() if "LONG" in line)
    assert row.count("LONG=1") == 20


def test_without_a_compiler_the_command_says_how_to_get_one(
    gptoss: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    for cached in (compiler._nvrtc, compiler.nvrtc_version):
        cached.cache_clear()
    done = gptoss("build-kernels", "--output", tmp_path)
    assert done.code == 1
    assert "pip install 'gptoss-backend[gpu]'" in done.err


def sizes_of(config: ModelConfig) -> build.ModelSizes:
    queries = config.num_heads * config.head_dim
    return build.ModelSizes(
        hidden=config.hidden_size,
        qkv=queries + 2 * config.num_kv_heads * config.head_dim,
        attention=queries,
        group=config.num_heads // config.num_kv_heads,
        window=config.sliding_window,
        intermediate=config.intermediate_size,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token,
    )


def test_the_kernels_are_those_of_the_models_that_are_served() -> None:
    configs = {like: RandomCheckpoint(like).config for like in ("20b", "120b", "tiny")}
    configs["demo"] = describe(checkpoint_folder("demo")).config
    assert {name: sizes_of(config) for name, config in configs.items()} == build.SERVED_MODELS
