import math
from typing import Any

import numpy as np
import pytest
import torch

from gptoss_engine.sampler import Sampler, Sampling, uniforms
from gptoss_engine.sequence import NO_TOKEN, Sequence
from gptoss_engine.types import SamplingParams, TokenLogprob
from gptoss_kernels import ops

from .stepping import GREEDY, sequence, uniforms_of

V = 100


def asking(
    sampling: SamplingParams = GREEDY, seed: int = 0, stop: tuple[int, ...] = ()
) -> Sequence:
    return sequence([1, 2], sampling, seed, stop_token_ids=frozenset(stop))


def test_each_row_keeps_its_own_parameters():
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5, logprobs=3),
        SamplingParams(temperature=1.5, top_k=-1, top_p=0.9, min_p=0.1, logprobs=0),
    )
    seeds = (0, 1, 2**64 - 1)
    due = [(asking(each, seed), 2) for each, seed in zip(params, seeds, strict=True)]
    sampling = Sampling.build(due, V)
    assert sampling.temperature.tolist() == [0.0, 0.7, 1.5]
    assert sampling.top_k.tolist() == [0, 5, -1]
    assert sampling.top_p.tolist() == [1.0, 1.0, 0.9]
    assert sampling.min_p.tolist() == [0.0, 0.0, 0.1]
    assert sampling.num_top.tolist() == [-1, 3, 0]
    assert sampling.uniforms.tolist() == [uniforms_of(seed, 2)[0] for seed in seeds]
    assert (sampling.num_rows, sampling.is_told) == (3, True)
    assert not Sampling.build(due[:1], V).is_told
    assert Sampling.build([(asking(SamplingParams(logprobs=9)), 0)], 4).num_top.tolist() == [4]


def test_as_tensors_they_are_what_the_operator_takes():
    rows = Sampling.build([(asking(stop=(7,)), 0)], V).to(torch.device("cpu"))
    for name, column in rows._asdict().items():
        is_real = name in ("temperature", "top_p", "min_p", "uniforms")
        assert column.dtype == (torch.float64 if is_real else torch.int32)
    assert Sampling.build([], V).num_rows == 0


def test_stop_tokens_are_masked_until_min_tokens():
    early = asking(SamplingParams(min_tokens=3), stop=(7, 300))  # 300: not in this vocabulary
    sampling = Sampling.build([(early, 3), (early, 2), (early, 0), (asking(stop=(7,)), 0)], V)
    assert sampling.masked_start.tolist() == [0, 0, 1, 2, 2]
    assert sampling.masked_ids.tolist() == [7, 7]


def test_uniforms_are_a_published_stream():
    # SplitMix64 of state 0 begins with these three outputs (Java's SplittableRandom has the same).
    stream = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert uniforms_of(0, 0, 1, 2) == [(x >> 11) / 2**53 for x in stream]


def test_uniforms_are_even_and_uncorrelated_over_indices_and_seeds():
    seeds, indices = np.meshgrid(*[np.arange(200, dtype=np.uint64)] * 2, indexing="ij")
    values = uniforms(seeds, indices)
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    # 40,000 draws in 20 bins: chi-squared with 19 degrees of freedom, 43.8 at p = 0.001.
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8
    flat = values - 0.5
    for neighbour in (flat[:, 1:] * flat[:, :-1], flat[1:] * flat[:-1]):
        # The mean of n products has a standard deviation of 1 / (12 sqrt(n)).
        assert abs(neighbour.mean()) < 4 / (12 * neighbour.size**0.5)


def results(
    logits: torch.Tensor, *params: SamplingParams, **fields: Any
) -> tuple[list[int], list[TokenLogprob | None]]:
    """Of rows that stand before others, which fill a batch."""
    sampler = Sampler(ops.load())
    sampling = Sampling.build([(asking(each, **fields), 0) for each in params], logits.shape[1])
    rows = sampling.to(logits.device)
    filler = torch.full((2, logits.shape[1]), math.nan)
    token_ids = torch.cat([sampler.sample(logits, rows), torch.tensor([-1, -1])])
    return sampler.fetch(token_ids, torch.cat([logits, filler]), rows, sampling).result()


def test_tokens_come_with_what_was_asked_to_be_told():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).expand(3, -1)
    told = (SamplingParams(temperature=0, logprobs=count) for count in (2, None, 0))
    token_ids, entries = results(logits, *told)
    assert token_ids == [1, 1, 1]
    assert entries[0] is not None
    assert entries[0].logprob == pytest.approx(math.log(0.4), abs=1e-6)
    assert [token_id for token_id, _ in entries[0].top] == [1, 3]
    assert entries[0].top[0][1] == entries[0].logprob
    assert entries[1] is None
    assert entries[2] == TokenLogprob(entries[0].logprob)


def test_log_probabilities_are_of_what_was_not_masked():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    asked = SamplingParams(temperature=0, min_tokens=1, logprobs=1)
    (token_id,), (entry,) = results(logits, asked, stop=(1,))
    assert entry is not None
    assert token_id == 3
    assert entry.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert entry.top[0][0] == 1


def test_nothing_is_told_where_nobody_asks():
    logits = torch.zeros(2, 8)
    assert results(logits, GREEDY, GREEDY) == ([0, 0], [None, None])
    assert results(logits[:0]) == ([], [])


def test_logits_that_are_not_numbers_give_no_token():
    logits = torch.tensor([[0.0] * 8, [math.nan] * 8])
    assert results(logits, GREEDY, GREEDY)[0] == [0, NO_TOKEN]


@pytest.mark.gpu
def test_results_of_several_steps_under_way_are_kept_apart():
    sampler, device = Sampler(ops.load("cuda", "cuda")), torch.device("cuda")
    params = [SamplingParams(temperature=0, logprobs=2), GREEDY]
    sampling = Sampling.build([(asking(each), 0) for each in params], 64)
    rows = sampling.to(device)
    logits = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    under_way = []
    for step in range(5):
        logits.zero_()
        logits[:, 10 + step] = 1 + step
        token_ids = sampler.sample(logits, rows)
        under_way.append(sampler.fetch(token_ids, logits, rows, sampling))
    for step, sampled in enumerate(under_way):
        token_ids, (entry, nothing) = sampled.result()
        assert token_ids == [10 + step] * 2
        assert entry is not None
        assert [token_id for token_id, _ in entry.top] == [10 + step, 0]
        assert entry.logprob == pytest.approx(
            (1 + step) - math.log(math.exp(1 + step) + 63), abs=1e-5
        )
        assert nothing is None
