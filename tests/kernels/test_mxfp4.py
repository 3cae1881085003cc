import pytest
import torch

from gptoss_kernels.mxfp4 import dequantise

from ..tiny_checkpoint import expand_mxfp4, quantise_mxfp4


def test_every_byte_holds_two_values_low_nibble_first():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    values = dequantise(blocks, torch.full((1, 16), 127, dtype=torch.uint8), torch.float32)
    signed = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.view(256, 2).tolist() == [
        [signed[byte % 16], signed[byte // 16]] for byte in range(256)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_are_powers_of_two_and_nothing_is_rounded(dtype: torch.dtype):
    blocks = torch.full((1, 4, 16), 0x75, dtype=torch.uint8)  # 3, then 6
    scales = torch.tensor([[127, 128, 20, 230]], dtype=torch.uint8)
    pairs = dequantise(blocks, scales, dtype).double().view(4, 16, 2)
    for pair, exponent in zip(pairs, (0, 1, -107, 103), strict=True):
        assert pair.tolist() == [[3 * 2.0**exponent, 6 * 2.0**exponent]] * 16


def test_random_weights_survive_a_round_trip():
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    blocks, scales = quantise_mxfp4(weight)
    values = dequantise(blocks, scales, torch.float32)
    assert torch.equal(values, expand_mxfp4(blocks, scales))
    # Half the widest step, 4 to 6, at scales up to the largest value's own size over four.
    assert (values - weight).abs().max() <= weight.abs().max() / 4
