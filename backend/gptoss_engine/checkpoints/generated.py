"""Random weights made where they will lie, in the form that they will have: a TensorSource.

RandomCheckpoint's shapes and distributions, so a model that behaves the same, but other numbers:
its PCG64 is a CPU's. Here a tensor's random words are the stream of SplitMix64 (Steele, Lea, Flood
2014) keyed by seed, name and expert, whose n-th draw is integer arithmetic on n alone. So a GPU
makes all of them at once, and a tensor is the same on any device, however it is cut.

Experts are the same numbers in every form: FP8 holds the MXFP4 values exactly. Attention in FP8 is
the dense one rounded.
"""

import hashlib
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gptoss_engine.checkpoints.random_checkpoint import (
    NUM_WORDS,
    RandomCheckpoint,
    bfloat16_table,
    scale_table,
    value_table,
)
from gptoss_engine.checkpoints.tensor_source import EXPERTS, Form, Mxfp4Blocks, Stored, WeightMode
from gptoss_kernels.fp8 import BLOCK, E4M3, E4M3_MAX, num_blocks, power_of_two
from gptoss_kernels.mxfp4 import GROUP, dequantise, widen
from gptoss_kernels.ops import Fp8Weight

_WORDS_A_DRAW = 4  # of 16 bits; as a word chooses four MXFP4 values, so many words are a draw
_VALUES_A_WORD = 4
_EXPERTS_AT_ONCE = 8  # half a gigabyte of temporaries
_MAXIMUM_SHIFT = 7  # between the scales of a tensor's groups, in powers of two
_STEP, _FIRST_FACTOR, _SECOND_FACTOR = (
    number - 2**64  # as torch's integers have them
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class GeneratedCheckpoint:
    """`source`'s model on `device`: experts and attention as `mode` holds them, all else bf16.

    For one thread, which reads experts in order: a GPU makes several of them at once and keeps
    them for the next calls, since an expert's launches take longer to enqueue than to run.
    """

    def __init__(self, source: RandomCheckpoint, mode: WeightMode, device: torch.device) -> None:
        self.config = source.config
        self.label = source.label
        self.shapes = source.shapes
        self._source = source
        self._mode: WeightMode = mode
        self._device = device
        self._at_once = 1 if device.type == "cpu" else _EXPERTS_AT_ONCE
        self._made: tuple[str, range, Stored] | None = None

    def form(self, name: str) -> Form:
        field = name.split(".")[-1]
        if self._mode != "bf16" and field in EXPERTS:
            return self._mode
        return "fp8" if self._mode != "bf16" and field in ("qkv", "out") else "dense"

    def read(
        self,
        name: str,
        expert: int | None = None,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Stored:
        """See TensorSource. Rows that are cut away cost nothing, columns are drawn and dropped."""
        shape = self.shapes[name]
        assert (expert is None) == (name.split(".")[-1] not in EXPERTS)
        if expert is not None:
            return self._read_expert(name, expert, rows, columns)
        mean, deviation = self._source.normal(name)
        words = self._draw([name], rows, (shape[0], prod(shape[1:])))[0]
        numbers = _look_up(_bfloat16_table(mean, deviation, self._device), words)
        if len(shape) == 1:
            return numbers[:, 0]
        return (_to_fp8 if self.form(name) == "fp8" else Tensor.contiguous)(numbers[:, columns])

    def _read_expert(self, name: str, expert: int, rows: slice, columns: slice) -> Stored:
        num_experts, *matrix = self.shapes[name]
        is_whole = all(
            cut.indices(size) == (0, size, 1)
            for cut, size in zip((rows, columns), matrix, strict=True)
        )
        if not is_whole or self._at_once == 1:
            return _one_of(self._make(name, range(expert, expert + 1), rows, columns), 0)
        made = self._made
        if made is None or made[0] != name or expert not in made[1]:
            experts = range(expert, min(expert + self._at_once, num_experts))
            made = self._made = (name, experts, self._make(name, experts, rows, columns))
        return _one_of(made[2], expert - made[1].start)

    def _make(self, name: str, experts: range, rows: slice, columns: slice) -> Stored:
        """Of several experts, one behind the other."""
        _, num_rows, width = self.shapes[name]
        _, deviation = self._source.normal(name)
        first, end, _ = columns.indices(width)
        groups = slice(first // GROUP, -(-end // GROUP))
        streams = [f"{name}/{expert}" for expert in experts]
        words = self._draw(
            [f"{stream}/blocks" for stream in streams], rows, (num_rows, width // _VALUES_A_WORD)
        )
        words = words.unflatten(2, (-1, GROUP // _VALUES_A_WORD))[:, :, groups]
        scales = self._draw(
            [f"{stream}/scales" for stream in streams], rows, (num_rows, width // GROUP)
        )
        scales = _look_up(_scale_table(deviation, self._device), scales[:, :, groups])
        form = self.form(name)
        if form == "fp8":
            largest = _largest_of_blocks(scales, BLOCK // GROUP)
            shift = scales + _MAXIMUM_SHIFT - _of_blocks(largest, scales, BLOCK // GROUP)
            index = shift.int()[..., None] * NUM_WORDS + words
            values = _look_up(_e4m3_table(self._device), index).view(E4M3)
            return Fp8Weight(values.flatten(2), _block_scale(largest))
        blocks = _look_up(_value_table(self._device), words).view(torch.uint8)
        if form == "mxfp4":
            return Mxfp4Blocks(blocks, scales)
        return dequantise(blocks, scales, torch.bfloat16)

    def _draw(self, streams: list[str], rows: slice, shape: tuple[int, int]) -> Tensor:
        """int32 in [0, 2^16): of each stream the rows of its words [shape]."""
        first, end, _ = rows.indices(shape[0])
        draws, skipped = divmod(first * shape[1], _WORDS_A_DRAW)
        count = max(0, end - first) * shape[1]
        last = draws + -(-(skipped + count) // _WORDS_A_DRAW)
        keys = [
            hashlib.sha256(f"{self._source.seed}/{stream}".encode()).digest() for stream in streams
        ]
        keys = [int.from_bytes(key[:8], "little", signed=True) for key in keys]
        state = torch.arange(draws + 1, last + 1, device=self._device).mul_(_STEP)
        state = state + torch.tensor(keys, device=self._device)[:, None]
        _fold(state, 30).mul_(_FIRST_FACTOR)
        _fold(state, 27).mul_(_SECOND_FACTOR)
        words = _fold(state, 31).view(torch.int16)[:, skipped : skipped + count]
        return words.int().bitwise_and_(NUM_WORDS - 1).view(len(streams), -1, shape[1])


def _one_of(stored: Stored, index: int) -> Stored:
    if isinstance(stored, Mxfp4Blocks):
        return Mxfp4Blocks(stored.blocks[index], stored.scales[index])
    return stored[index]


def _fold(state: Tensor, shift: int) -> Tensor:
    """state ^= state >> shift. Torch's shift brings copies of the sign from above: not wanted."""
    return state.bitwise_xor_((state >> shift).bitwise_and_(2 ** (64 - shift) - 1))


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten()).view(index.shape)


def _to_fp8(numbers: Tensor) -> Fp8Weight:
    """Rounded, with the scales that bring each block's largest to 448."""
    numbers = numbers.float()
    # By a tensor: a GPU multiplies with a number's reciprocal instead, which rounds twice.
    scale = _largest_of_blocks(numbers.abs(), BLOCK) / numbers.new_tensor(E4M3_MAX)
    return Fp8Weight((numbers / _of_blocks(scale, numbers, BLOCK)).to(E4M3), scale)


def _largest_of_blocks(matrix: Tensor, width: int) -> Tensor:
    """[..., N, K] by blocks of 128 rows and `width` columns; there is nothing below 0."""
    rows, columns = matrix.shape[-2:]
    filled = torch.nn.functional.pad(matrix, (0, -columns % width, 0, -rows % BLOCK))
    return filled.unflatten(-1, (-1, width)).unflatten(-3, (-1, BLOCK)).amax((-3, -1))


def _of_blocks(values: Tensor, matrix: Tensor, width: int) -> Tensor:
    """For each element of the matrix that of its block."""
    rows, columns = matrix.shape[-2:]
    values = values.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return values.repeat_interleave(width, dim=-1)[..., :columns]


def _block_scale(largest: Tensor) -> Tensor:
    """mxfp4.block_scale of blocks where a 4 or a 6 has that scale byte, and none a larger one."""
    return power_of_two(largest.int() + 2 - 127 - 8)


@lru_cache
def _value_table(device: torch.device) -> Tensor:
    """int16 [NUM_WORDS]: four MXFP4 values each."""
    return torch.from_numpy(value_table()).view(torch.int16).to(device)


@lru_cache
def _e4m3_table(device: torch.device) -> Tensor:
    """int32 [shifts * NUM_WORDS]: the same four values in e4m3, at a group's scale that is
    _MAXIMUM_SHIFT powers of two below the largest, …, at the largest."""
    byte = torch.arange(256, dtype=torch.uint8)
    blocks = torch.nn.functional.pad(byte.view(256, 1, 1), (0, GROUP // 2 - 1))  # a group each
    largest = torch.full((num_blocks(256), 1), _MAXIMUM_SHIFT)
    pairs = torch.from_numpy(value_table()).view(torch.uint8).view(NUM_WORDS, 2).int()
    tables = []
    for scale in range(_MAXIMUM_SHIFT + 1):
        scales = torch.full((256, 1), scale, dtype=torch.uint8)
        weight, inexact = widen(blocks, scales, _block_scale(largest))
        assert not inexact.any()
        of_a_byte = weight.values[:, :2].contiguous().view(torch.int16).flatten()
        tables.append(_look_up(of_a_byte, pairs).view(torch.int32).flatten())
    return torch.cat(tables).to(device)


@lru_cache
def _scale_table(deviation: float, device: torch.device) -> Tensor:
    return torch.from_numpy(scale_table(deviation)).to(device)


@lru_cache
def _bfloat16_table(mean: float, deviation: float, device: torch.device) -> Tensor:
    return torch.from_numpy(bfloat16_table(mean, deviation)).view(torch.bfloat16).to(device)
