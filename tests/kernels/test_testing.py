import math

import pytest
import torch

from gptoss_kernels.testing import norm_error, rel_error


def test_rel_error_is_the_largest_difference_over_the_mean_size():
    expected = torch.tensor([3.0, -3.0, 3.0])
    assert rel_error(expected, expected) == 0
    assert rel_error(torch.tensor([3.0, -3.0, 3.3]), expected) == pytest.approx(0.1, rel=1e-5)


def test_rel_error_shows_what_was_never_written():
    assert rel_error(torch.tensor([1.0, math.nan]), torch.ones(2)) == math.inf


def test_rel_error_of_nothing_is_zero():
    assert rel_error(torch.empty(0, 3), torch.empty(0, 3)) == 0


def test_norm_error_is_of_the_whole_and_accepts_nothing_that_is_missing():
    expected = torch.tensor([3.0, -4.0])
    assert norm_error(expected, expected) == 0
    assert norm_error(torch.tensor([3.0, -3.5]), expected) == pytest.approx(0.1)
    assert not norm_error(torch.tensor([3.0, math.nan]), expected) < 1
