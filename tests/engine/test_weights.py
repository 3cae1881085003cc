"""What is loaded, from every layout in every weight mode, against the numbers in the files."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_engine import loading
from gptoss_engine.checkpoints.checkpoint import Checkpoint, InvalidCheckpoint
from gptoss_engine.checkpoints.convert import Options, convert
from gptoss_engine.checkpoints.tensor_source import EXPERTS, Form, LmHead, Mxfp4Blocks, WeightMode
from gptoss_engine.config import InvalidConfig
from gptoss_engine.loading import load_weights
from gptoss_engine.shards import Rank
from gptoss_engine.weights import Weight, tensors
from gptoss_kernels.fp8 import quantise_weight
from gptoss_kernels.ops import Fp8Weight, Mxfp4Weight

from ..numbers import expand_mxfp4, in_float64
from ..tiny_checkpoint import (
    TinyCheckpoint,
    TinySize,
    original_tensors,
    write_converted,
    write_tiny_checkpoint,
)
from .sources import MemorySource, model_config

CPU = torch.device("cpu")
SMALL = model_config(hidden_size=320, intermediate_size=192, num_experts=4, num_heads=8)
# Blocks with odd edges in both directions, and more than one.
SIZE = TinySize(layers=2, hidden=160, intermediate=96, experts=3, experts_per_token=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    written = write_tiny_checkpoint(folder, SIZE)
    return {**written.folders, "fp8": write_converted(folder / "fp8", SIZE)}


def load(folder: Path, mode: WeightMode, dtype: torch.dtype = torch.float32) -> dict[str, Weight]:
    return dict(load_weights(Checkpoint(folder), mode, dtype, CPU).named())


def is_equal(one: Weight, other: Weight) -> bool:
    def parts(weight: Weight) -> list[Tensor]:
        if isinstance(weight, Fp8Weight):
            return [weight.values.view(torch.uint8), weight.scale]
        if isinstance(weight, Mxfp4Weight):
            return [weight.blocks, weight.scales, weight.block_scale]
        return [weight]

    return type(one) is type(other) and all(map(torch.equal, parts(one), parts(other)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layouts_load_to_the_same_weights(tiny_checkpoint: TinyCheckpoint, dtype: torch.dtype):
    loaded = {
        layout: load(folder, "bf16", dtype) for layout, folder in tiny_checkpoint.folders.items()
    }
    first = loaded["original"]
    assert len(first) == 3 + 4 * 13
    for layout, others in loaded.items():
        for name, tensor in others.items():
            assert is_equal(tensor, first[name]), (layout, name)
            assert isinstance(tensor, Tensor)
            is_fp32 = name.endswith(("norm", "sinks"))
            assert tensor.dtype == (torch.float32 if is_fp32 else dtype), name


@pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised", "fp8"])
def test_experts_in_fp8_are_the_published_numbers(folders: dict[str, Path], layout: str):
    loaded, original = load(folders[layout], "fp8"), original_tensors(SIZE, seed=0)
    for name, published in (("w13", "mlp1_weight"), ("w2", "mlp2_weight")):
        for layer in range(SIZE.layers):
            prefix = f"block.{layer}.mlp.{published}"
            weight = loaded[f"layers.{layer}.{name}"]
            assert isinstance(weight, Fp8Weight)
            expected = expand_mxfp4(original[f"{prefix}.blocks"], original[f"{prefix}.scales"])
            assert torch.equal(in_float64(weight), expected)
            mantissa, _ = torch.frexp(weight.scale)
            assert (mantissa == 0.5).all()


@pytest.mark.parametrize("layout", ["huggingface", "original", "dequantised"])
def test_attention_in_fp8_is_quantised_where_the_folder_holds_bf16(
    folders: dict[str, Path], layout: str
):
    loaded, original = load(folders[layout], "fp8"), original_tensors(SIZE, seed=0)
    for name in ("qkv", "out"):
        expected = quantise_weight(original[f"block.1.attn.{name}.weight"])
        assert is_equal(loaded[f"layers.1.{name}"], expected)
    for name, weight in loaded.items():
        is_fp8 = name.endswith((*EXPERTS, ".qkv", ".out"))
        assert isinstance(weight, Fp8Weight if is_fp8 else Tensor), name


@pytest.mark.parametrize("fp8", [(), ("out",), ("qkv", "out", "lm_head")], ids=" ".join)
def test_a_converted_folder_is_loaded_as_it_is(tmp_path: Path, fp8: tuple[str, ...]):
    checkpoint = Checkpoint(write_converted(tmp_path, SIZE, fp8=fp8))
    loaded = dict(load_weights(checkpoint, "fp8", torch.float32, CPU).named())
    for name, weight in loaded.items():
        assert isinstance(weight, Fp8Weight) == (checkpoint.form(name) == "fp8"), name
        if not name.endswith(EXPERTS):
            stored = checkpoint.read(name)
            assert isinstance(stored, Tensor | Fp8Weight)
            expected = stored.float() if isinstance(stored, Tensor) else stored
            assert is_equal(weight, expected), name
    widened = dict(load_weights(checkpoint, "bf16", torch.float32, CPU).named())
    for name, weight in widened.items():
        assert isinstance(weight, Tensor)
        stored = loaded[name]
        if isinstance(stored, Fp8Weight):
            stored = in_float64(stored).float()
        assert isinstance(stored, Tensor)
        assert torch.equal(weight, stored), name


def test_fp8_made_while_loading_is_what_convert_makes(folders: dict[str, Path], tmp_path: Path):
    for layout in ("huggingface", "original", "dequantised"):
        convert(Checkpoint(folders[layout]), tmp_path / layout)
        converted, made = load(tmp_path / layout, "fp8"), load(folders[layout], "fp8")
        assert [name for name in made if not is_equal(made[name], converted[name])] == []


@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_the_unembedding_is_fp8_by_choice(
    folders: dict[str, Path], tmp_path: Path, mode: WeightMode
):
    published = Checkpoint(folders["huggingface"])
    chosen, wide = (
        dict(load_weights(published, mode, torch.float32, CPU, lm_head=lm_head).named())
        for lm_head in ("fp8", "bf16")
    )
    assert is_equal(chosen["unembedding"], quantise_weight(published_unembedding()))
    others = load(folders["huggingface"], mode)
    assert [name for name in others if not is_equal(wide[name], others[name])] == []
    differing = [name for name in others if not is_equal(chosen[name], others[name])]
    assert differing == ["unembedding"]
    # As `gptoss convert --lm-head fp8` makes it; from there it can be widened.
    convert(published, tmp_path / "fp8", Options(lm_head="fp8"))
    assert is_equal(load(tmp_path / "fp8", "fp8")["unembedding"], chosen["unembedding"])
    converted = Checkpoint(tmp_path / "fp8")
    widened = load_weights(converted, "fp8", torch.float32, CPU, lm_head="bf16").unembedding
    assert isinstance(widened, Tensor)
    assert isinstance(chosen["unembedding"], Fp8Weight)
    assert torch.equal(widened, in_float64(chosen["unembedding"]).float())
    assert not torch.equal(widened, published_unembedding())


def published_unembedding() -> Tensor:
    return original_tensors(SIZE, seed=0)["unembedding.weight"].float()


def test_an_fp8_unembedding_beside_wide_weights_is_refused(folders: dict[str, Path]):
    sentence = "lm_head fp8 needs weights fp8 or mxfp4, and those are bf16, which widens all"
    for layout in ("huggingface", "fp8"):
        source = Checkpoint(folders[layout])
        with pytest.raises(InvalidConfig, match=sentence):
            load_weights(source, "bf16", torch.float32, CPU, lm_head="fp8")
        with pytest.raises(InvalidConfig, match=sentence):
            loading.check_mode(source, "bf16", "fp8")
        loading.check_mode(source, "bf16", "bf16")


@pytest.mark.parametrize("layout", ["huggingface", "original"])
def test_mxfp4_stays_as_it_is_and_widens_to_the_same_fp8(folders: dict[str, Path], layout: str):
    loaded, fp8 = load(folders[layout], "mxfp4"), load(folders[layout], "fp8")
    original = original_tensors(SIZE, seed=0)
    for name, weight in loaded.items():
        if not name.endswith(EXPERTS):
            assert is_equal(weight, fp8[name]), name
            continue
        assert isinstance(weight, Mxfp4Weight)
        for expert in range(SIZE.experts):
            assert is_equal(weight[expert].widen(), fp8[name][expert])
    weight = loaded["layers.1.w2"]
    assert isinstance(weight, Mxfp4Weight)
    assert torch.equal(weight.blocks, original["block.1.mlp.mlp2_weight.blocks"])
    assert torch.equal(weight.scales, original["block.1.mlp.mlp2_weight.scales"])


@pytest.mark.parametrize(("layout", "says"), [("dequantised", "dequantised"), ("fp8", "FP8")])
def test_mxfp4_needs_a_folder_that_holds_it(folders: dict[str, Path], layout: str, says: str):
    with pytest.raises(InvalidConfig, match=rf"{folders[layout]} .*{says}.* or weights fp8"):
        load(folders[layout], "mxfp4")


BIASES = ("qkv_bias", "out_bias", "w13_bias", "w2_bias")


@pytest.mark.parametrize(
    ("layout", "mode", "in_fp32"),
    [
        ("huggingface", "bf16", ()),
        ("huggingface", "fp8", BIASES),
        ("huggingface", "mxfp4", BIASES),
        ("fp8", "fp8", BIASES),
        ("fp8 but for the attention", "fp8", BIASES[2:]),
    ],
)
def test_a_bias_to_an_fp8_product_is_widened_to_fp32(
    folders: dict[str, Path], tmp_path: Path, layout: str, mode: WeightMode, in_fp32: tuple
):
    converted = write_converted(tmp_path, SIZE, fp8=())
    loaded = load(folders.get(layout, converted), mode, torch.bfloat16)
    published = load(folders["original"], "bf16", torch.bfloat16)
    for name in (*BIASES, "router_bias"):
        bias, expected = loaded[f"layers.1.{name}"], published[f"layers.1.{name}"]
        assert isinstance(bias, Tensor)
        assert isinstance(expected, Tensor)
        assert bias.dtype == (torch.float32 if name in in_fp32 else torch.bfloat16)
        assert torch.equal(bias.double(), expected.double())


@pytest.mark.parametrize(
    ("mode", "experts", "bytes_an_element"),
    [("mxfp4", "mxfp4", 17 / 32), ("fp8", "mxfp4", 1), ("bf16", "mxfp4", 2)],
)
def test_resident_bytes_are_those_of_the_mode(
    mode: WeightMode, experts: Form, bytes_an_element: float
):
    config = model_config(num_experts=2, hidden_size=1024, intermediate_size=512)
    weights = load_weights(MemorySource(config, experts), mode, torch.bfloat16, CPU)
    elements = 2 * 3 * 1024 * 512
    scales = 0 if mode == "bf16" else 4 * elements // 128**2
    assert weights.expert_bytes == elements * bytes_an_element + scales
    biases = (2 if mode == "bf16" else 4) * (5120 + 1024 + 2 * (2 * 512 + 1024))
    vectors = 3 * 4 * 1024 + 64 * 4
    attention = (5120 + 4096) * 1024
    attention = attention * 2 if mode == "bf16" else attention + attention // 128**2 * 4
    others = 2 * (2 * 1024 + 2 + 2 * 16 * 1024)
    assert weights.num_bytes == weights.expert_bytes + biases + vectors + attention + others


def spread(source: MemorySource, name: str, *groups: tuple[int, int]) -> None:
    """Groups (row, column / 32) of expert 0 so small that their blocks need more than one scale."""
    stored = source.read(name, 0)
    assert isinstance(stored, Mxfp4Blocks)
    scales, blocks = stored.scales.clone(), stored.blocks.clone()
    for group in groups:
        scales[group], blocks[group] = 90, 0x11
    source.tensors[name] = Mxfp4Blocks(blocks, scales)


@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_blocks_that_are_not_exact_are_counted_and_named(
    caplog: pytest.LogCaptureFixture, mode: WeightMode
):
    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]

    exact = MemorySource(SMALL)
    load_weights(exact, mode, torch.float32, CPU)
    assert warnings() == []
    spread(exact, "layers.0.w2", (3, 0), (200, 5))
    load_weights(exact, mode, torch.float32, CPU)
    (sentence,) = warnings()
    # All four experts, each turned by as many rows as its number.
    assert sentence == (
        "memory: 8 blocks of 128 x 128 are rounded, FP8 cannot hold them exactly: "
        "layers.0.w2 of expert 0 (0, 0), layers.0.w2 of expert 0 (1, 1), "
        "layers.0.w2 of expert 1 (0, 0), layers.0.w2 of expert 1 (1, 1) and 4 more"
    )


def test_a_rank_names_blocks_of_the_whole(caplog: pytest.LogCaptureFixture):
    made = MemorySource(SMALL)
    spread(made, "layers.0.w13", (300, 9))
    spread(made, "layers.0.w2", (3, 0), (200, 5))
    load_weights(made, "fp8", torch.float32, CPU, Rank(1, 2))
    assert (
        "are rounded, FP8 cannot hold them exactly: layers.0.w13 of expert 0 (2, 2)" in caplog.text
    )
    caplog.clear()
    del made.tensors["layers.0.w13"]
    load_weights(made, "fp8", torch.float32, CPU, Rank(1, 2))
    assert ": 4 blocks of 128 x 128 are rounded" in caplog.text
    assert "exactly: layers.0.w2 of expert 0 (1, 1), layers.0.w2 of expert 1 (1, 1)," in caplog.text


def test_dense_experts_that_never_were_mxfp4_are_counted_too(caplog: pytest.LogCaptureFixture):
    load_weights(MemorySource(SMALL, "dense"), "fp8", torch.float32, CPU)
    blocks = 4 * (3 * 3 + 3 * 2)
    assert f"memory: {blocks} blocks of 128 x 128 are rounded" in caplog.text


def test_a_weight_that_is_no_number_is_refused_by_name():
    made = MemorySource(SMALL)
    stored = made.read("layers.0.qkv")
    assert isinstance(stored, Tensor)
    stored[5, 7] = math.inf
    with pytest.raises(InvalidCheckpoint, match=r"^memory: layers\.0\.qkv: 1 of the .* not finite"):
        load_weights(made, "fp8", torch.float32, CPU)


def test_what_does_not_fit_is_refused_with_figures(monkeypatch: pytest.MonkeyPatch):
    made = MemorySource(model_config())
    monkeypatch.setattr(loading, "free_memory", lambda device: 200_000_000)
    with pytest.raises(InvalidConfig) as refused:
        load_weights(made, "bf16", torch.bfloat16, CPU)
    assert str(refused.value) == (
        "the weights of memory take 451.6 MB with weights bf16 and 200.0 MB of memory are free on "
        "cpu; they would take 226.2 MB with weights fp8 and 132.9 MB with weights mxfp4"
    )
    assert made.tensors == {}
    with pytest.raises(
        InvalidConfig, match=r"free on cpu; they would take \S+ MB with weights fp8$"
    ):
        load_weights(MemorySource(model_config(), "dense"), "bf16", torch.bfloat16, CPU)
    monkeypatch.setattr(loading, "free_memory", lambda device: None)
    load_weights(MemorySource(SMALL), "bf16", torch.bfloat16, CPU)


def test_experts_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """No second copy of the model: no more than one expert, or a few rows, is ever asked for."""
    asked = []

    def recording(name: str, expert: int | None = None, *cuts: slice) -> Any:
        asked.append((name, expert))
        return read(name, expert, *cuts)

    made = MemorySource(SMALL)
    read = made.read
    monkeypatch.setattr(made, "read", recording)
    load_weights(made, "fp8", torch.float32, CPU)
    experts = [(f"layers.0.{name}", expert) for name in EXPERTS for expert in range(4)]
    assert sorted(pair for pair in asked if pair[1] is not None) == experts


def test_rows_read_a_few_at_a_time_are_the_same(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    converted = write_converted(tmp_path, SIZE, fp8=("out", "lm_head"))
    for folder in (folders["huggingface"], folders["dequantised"], converted):
        whole = load(folder, "fp8")
        with monkeypatch.context() as patch:
            patch.setattr(loading, "ROWS_AT_ONCE", 128)
            pieces = load(folder, "fp8")
        assert [name for name in whole if not is_equal(whole[name], pieces[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "lm_head"), [("bf16", "auto"), ("fp8", "auto"), ("fp8", "fp8"), ("mxfp4", "auto")]
)
def test_a_gpu_holds_what_a_cpu_does(mode: WeightMode, lm_head: LmHead):
    """Converted on the device: several threads, one stream."""
    made = MemorySource(model_config(num_experts=4))
    for rank in (Rank(), Rank(3, 8)):
        load = partial(load_weights, made, mode, torch.bfloat16, rank=rank, lm_head=lm_head)
        on_cpu, on_gpu = dict(load(device=CPU).named()), load(device=torch.device("cuda"))
        for name, weight in on_gpu.named():
            parts = tensors(weight)
            assert all(tensor.is_cuda for tensor in parts)
            back = [tensor.cpu() for tensor in parts]
            same = back[0] if isinstance(weight, Tensor) else type(weight)(*back)
            assert is_equal(same, on_cpu[name]), name


def test_an_expert_of_many_rows_is_read_whole():
    made = MemorySource(model_config(num_experts=1, hidden_size=32, intermediate_size=4608))
    layer = load_weights(made, "mxfp4", torch.float32, CPU).layers[0]
    stored = made.tensors["layers.0.w13"]
    assert isinstance(layer.w13, Mxfp4Weight)
    assert isinstance(stored, Mxfp4Blocks)
    assert torch.equal(layer.w13.blocks[0], stored.blocks)


def test_a_fault_ends_the_load_at_once(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def failing(name: str, expert: int | None = None, *cuts: slice) -> Any:
        asked.append(name)
        raise InvalidCheckpoint("the file is damaged")

    made = MemorySource(model_config(num_experts=128, hidden_size=32, intermediate_size=32))
    monkeypatch.setattr(made, "read", failing)
    with pytest.raises(InvalidCheckpoint, match=r"^the file is damaged$"):
        load_weights(made, "fp8", torch.float32, CPU)
    assert len(asked) < 128
