"""`gptoss inspect`, in this process."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gptoss_backend.cli import app

from ..tiny_checkpoint import TinySize, write_converted, write_tiny_checkpoint


def inspect(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize(
    ("fp8", "qkv", "unembedding"),
    [(("qkv", "out"), "fp8", "dense"), (("lm_head",), "dense", "fp8")],
)
def test_a_converted_folder_says_what_is_fp8(
    tmp_path: Path, fp8: tuple[str, ...], qkv: str, unembedding: str
) -> None:
    folder = write_converted(tmp_path, fp8=fp8)
    figures = json.loads(inspect(str(folder), "--json"))
    assert figures["layout"] == "fp8"
    expected = {"w13": "fp8", "w2": "fp8", "qkv": qkv, "out": qkv, "unembedding": unembedding}
    assert figures["weights"] == expected
    assert figures["bytes_by_form"].keys() == {"fp8", "dense"}
    assert 0 < figures["bytes"] - sum(figures["bytes_by_form"].values()) < 50_000  # the header
    shown = inspect(str(folder))
    assert f"w13 fp8, w2 fp8, qkv {qkv}, out {qkv}, unembedding {unembedding}" in shown
    assert f"fp8 {figures['bytes_by_form']['fp8']:,}" in shown


def test_a_published_folder_says_so_too(tmp_path: Path) -> None:
    written = write_tiny_checkpoint(tmp_path, TinySize(layers=2))
    for folder, experts in ((written.original, "mxfp4"), (written.dequantised, "dense")):
        figures = json.loads(inspect(str(folder), "--json"))
        assert figures["weights"]["w2"] == experts
        assert figures["weights"]["out"] == "dense"
        assert figures["bytes_by_form"].keys() == {"dense", experts}
