"""Random weights made on a device: distributed as the CPU's, and the same on every device."""

import hashlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gptoss_engine.checkpoints.generated import GeneratedCheckpoint
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import (
    EXPERTS,
    Mxfp4Blocks,
    Stored,
    WeightMode,
    expert_to_fp8,
    to_dense,
)
from gptoss_engine.loading import load_weights
from gptoss_engine.shards import Rank
from gptoss_engine.weights import Weight, tensors
from gptoss_kernels.ops import Fp8Weight
from gptoss_kernels.testing import norm_error

from .test_random_checkpoint import LARGEST_SHARE, TINY, Measured, largest_share, logits_of

CPU = torch.device("cpu")
REAL = RandomCheckpoint("20b", num_layers=1)
MODES: tuple[WeightMode, ...] = ("fp8", "mxfp4", "bf16")


def made(mode: WeightMode, source: RandomCheckpoint = TINY) -> GeneratedCheckpoint:
    return GeneratedCheckpoint(source, mode, CPU)


def parts(stored: Stored) -> tuple[Tensor, ...]:
    if isinstance(stored, Fp8Weight):
        return stored.values.view(torch.uint8), stored.scale
    return (stored,) if isinstance(stored, Tensor) else tuple(stored)


def equal(one: Stored, other: Stored) -> bool:
    return all(torch.equal(a, b) for a, b in zip(parts(one), parts(other), strict=True))


def digest(stored: Stored) -> str:
    pieces = (part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts(stored))
    return hashlib.sha256(b"".join(pieces)).hexdigest()[:16]


def test_the_numbers_are_those_of_every_other_machine():
    """Whoever changes the generator changes what published figures stand for."""
    assert digest(made("fp8").read("norm")) == "5b24df982cea3042"
    assert digest(made("fp8").read("layers.3.qkv")) == "7fe336f87ab46888"
    assert digest(made("fp8").read("layers.1.w13", 5)) == "b15e0fe150ca4cde"
    assert digest(made("mxfp4", REAL).read("layers.0.w2", 31)) == "bff7b22470b36061"
    large = RandomCheckpoint("120b", seed=2**70)
    assert digest(made("bf16", large).read("layers.35.router")) == "b5d6c507bcb9fde9"


def test_words_are_those_of_splitmix64():
    """Its first five outputs for the state 1234567, as its authors' code gives them."""
    expected = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    streams = ("one", "another")
    drawn = made("bf16")._draw([*streams], slice(None), (5, 4))
    for stream, words in zip(streams, drawn.tolist(), strict=True):
        key = int.from_bytes(hashlib.sha256(f"0/{stream}".encode()).digest()[:8], "little")
        numbers = [sum(word << 16 * place for place, word in enumerate(row)) for row in words]
        assert numbers == [_splitmix64(key, index) for index in range(1, 6)]
    assert tuple(_splitmix64(1234567, n) for n in range(1, 6)) == expected


def _splitmix64(state: int, index: int) -> int:
    mask = 2**64 - 1
    state = (state + index * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("name", ["layers.0.w13", "layers.0.w2"])
def test_an_expert_is_the_same_numbers_in_every_form(name: str):
    for source in (TINY, REAL):
        fp8, mxfp4, dense = (made(mode, source).read(name, 3) for mode in MODES)
        assert isinstance(fp8, Fp8Weight)
        numbers = fp8.dequantise(torch.float32)
        assert torch.equal(numbers, to_dense(mxfp4, torch.float32))
        assert torch.equal(numbers, to_dense(dense, torch.float32))
        # And blocks have the scales that widening gives them: not all the same.
        widened, inexact = expert_to_fp8(mxfp4)
        assert not inexact.any()
        assert (widened.scale == fp8.scale).float().mean() > 0.98
        assert len(fp8.scale.unique()) > 1


@pytest.mark.parametrize("name", ["layers.0.qkv", "layers.0.out"])
def test_attention_in_fp8_is_the_dense_one_rounded(name: str):
    fp8, dense = made("fp8", REAL).read(name), made("bf16", REAL).read(name)
    assert isinstance(fp8, Fp8Weight)
    assert 0.01 < norm_error(fp8.dequantise(torch.float32), to_dense(dense, torch.float32)) < 0.03
    for row in (0, 22):  # of blocks
        block = fp8.values[128 * row : 128 * (row + 1), -64:]
        assert block.float().abs().amax() == 448
    assert len(fp8.scale.unique()) >= 16
    assert len(fp8.values.view(torch.uint8).unique()) > 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["layers.0.w13", "layers.0.w2", "layers.0.qkv", "layers.0.w13_bias", "embedding"]
)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_a_cut_is_a_piece_of_the_whole(mode: WeightMode, name: str, data: st.DataObject):
    """On the borders of blocks of 128, or at the end."""
    expert = 7 if name.endswith(EXPERTS) else None
    source, shape = made(mode), TINY.shapes[name][-2:] if expert else TINY.shapes[name]

    def cut(size: int) -> slice:
        first = data.draw(st.integers(0, size // 128))
        return slice(128 * first, min(size, 128 * data.draw(st.integers(first + 1, size))))

    cuts = [cut(size) for size in shape]
    whole, piece = source.read(name, expert), source.read(name, expert, *cuts)
    dense = to_dense(whole, torch.float32)
    assert torch.equal(to_dense(piece, torch.float32), dense[tuple(cuts)])
    assert type(piece) is type(whole)


@pytest.mark.parametrize("mode", MODES)
def test_experts_made_together_are_those_made_alone(mode: WeightMode):
    together, alone = made(mode), made(mode)
    together._at_once = 5
    for name in ("layers.0.w13", "layers.0.w2", "layers.1.w2"):
        for expert in (*range(16), 3, 9):
            assert equal(together.read(name, expert), alone.read(name, expert)), (name, expert)
    cut = slice(128, 256)
    assert equal(together.read("layers.1.w2", 9, rows=cut), alone.read("layers.1.w2", 9, rows=cut))


def test_all_streams_differ():
    """Of tensors, experts, seeds, and an expert's values and scales."""
    source, other = made("mxfp4"), made("mxfp4", RandomCheckpoint("tiny", 1, vocab_size=4096))
    found = [
        digest(each.read(name, expert, rows=slice(128)))
        for each in (source, other)
        for name in TINY.shapes
        for expert in ((0, 15) if name.endswith(EXPERTS) else (None,))
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "name", ["embedding", "layers.0.attention_norm", "layers.0.sinks", "layers.0.qkv"]
)
def test_numbers_have_the_cpus_mean_and_deviation(name: str):
    mean, deviation = REAL.normal(name)
    numbers = to_dense(made("fp8", REAL).read(name, rows=slice(1024)), torch.float32)
    noise = 4 / math.sqrt(numbers.numel())
    assert numbers.mean().item() == pytest.approx(mean, abs=(noise + 1e-3) * deviation)
    assert numbers.std().item() == pytest.approx(deviation, rel=2 * noise + 3e-3)


@pytest.mark.parametrize("name", ["layers.0.w13", "layers.0.w2"])
def test_mxfp4_values_and_scales_occur_as_often_as_the_cpus(name: str):
    drawn, expected = made("mxfp4", REAL).read(name, 1), REAL.read(name, 1)
    assert isinstance(drawn, Mxfp4Blocks)
    assert isinstance(expected, Mxfp4Blocks)
    for one, other in zip(drawn, expected, strict=True):
        one_shares, other_shares = (
            torch.bincount(each.flatten().int(), minlength=256) / each.numel()
            for each in (one, other)
        )
        assert torch.allclose(one_shares, other_shares, atol=4 / math.sqrt(one.numel()))
    neighbours = torch.stack((drawn.blocks[:, :, :-1].flatten(), drawn.blocks[:, :, 1:].flatten()))
    assert abs(torch.corrcoef(neighbours.float())[0, 1].item()) < 0.003


@pytest.mark.parametrize("mode", ["fp8", "bf16"])
def test_a_model_of_them_behaves_like_one(mode: WeightMode):
    measured = Measured()
    logits = logits_of(load_weights(made(mode), mode, torch.float32, CPU), measured.ops)
    for share in measured.shares:
        assert share.min() > 0
        assert torch.special.entr(share).sum().item() / math.log(len(share)) > 0.95
    assert largest_share(measured) < LARGEST_SHARE
    assert all(0.5 < size < 2 for size in measured.sizes)
    for share in measured.sink_shares:
        assert 0.03 < share[128:].mean() < 0.5
    assert 0.1 < logits.softmax(-1).amax(-1).mean() < 0.6


def same(one: Weight, other: Weight) -> bool:
    return all(
        torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(tensors(one), tensors(other), strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_ranks_hold_parts_of_the_whole(mode: WeightMode):
    whole = dict(load_weights(made(mode), mode, torch.bfloat16, CPU).named())
    part = dict(load_weights(made(mode), mode, torch.bfloat16, CPU, Rank(1, 2, 2)).named())
    for name in ("layers.1.w13", "layers.1.w2"):
        for index in range(8):
            assert same(_expert(part[name], index), _expert(whole[name], 8 + index))
    assert same(part["layers.0.sinks"], _expert(whole["layers.0.sinks"], slice(32, 64)))


def _expert(weight: Any, index: Any) -> Weight:
    return weight[index]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_makes_what_a_cpu_makes(mode: WeightMode):
    on_cpu = dict(load_weights(made(mode), mode, torch.bfloat16, CPU).named())
    on_gpu = load_weights(TINY, mode, torch.bfloat16, torch.device("cuda"))
    for name, weight in on_gpu.named():
        assert all(tensor.is_cuda for tensor in tensors(weight))
        assert same(weight, on_cpu[name]), name
