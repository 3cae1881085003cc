"""What tests and benchmarks of operators share."""

import torch
from torch import Tensor


def rel_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the root mean square of what was expected; inf if any is not finite.

    The largest, so that one wrong element shows; over the mean size, so that an element that
    happens to be near zero does not.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    if not torch.isfinite(actual).all():
        return float("inf")
    if not actual.numel():
        return 0.0
    expected = expected.double()
    return float((actual.double() - expected).abs().max() / expected.square().mean().sqrt())


def norm_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, as rounding is bounded; NaN, which no bound accepts, if
    anything is missing.
    """
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())
