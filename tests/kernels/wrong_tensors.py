"""Tensors with one thing wrong, which an operator has to refuse in words."""

import torch
from torch import Tensor


def other_device(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def every_second(tensor: Tensor) -> Tensor:
    """The same shape and dtype, with twice the step between columns."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def shifted(tensor: Tensor) -> Tensor:
    """The same shape and strides, 8 bytes further than 16 bytes' multiple."""
    size = tensor.element_size()
    room = tensor.new_empty(tensor.untyped_storage().nbytes() // size + 16 // size)
    assert room.data_ptr() % 16 == 0
    return room.as_strided(tensor.shape, tensor.stride(), 8 // size)
