"""Each reference operator against its formula, written out in float64, and against wrong twins.

A bound is worth something only if a wrong operator exceeds it: each test computes plausible
mistakes with the same formula and shows that they are further away than the bound allows.
"""

import math

import pytest
import torch
from torch import Tensor

from gptoss_kernels import ops, reference
from gptoss_kernels.contracts import Penalties
from gptoss_kernels.fp8 import E4M3, quantise_weight
from gptoss_kernels.testing import rel_error

# fp32: scores up to 50 are rounded at 2^-24 before they are exponentiated. bf16: results are
# rounded to 2^-9 of values that may be a few times the mean size.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])


def random(*shape: int, seed: int = 0, std: float = 1.0, dtype=torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(dtype)


def test_embedding_reads_rows():
    weight = random(5, 3)
    out = reference.embedding(torch.tensor([4, 0, 4]), weight)
    assert torch.equal(out, torch.stack((weight[4], weight[0], weight[4])))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_or_row_that_is_none_gives_nan(dtype: torch.dtype):
    table = random(5, 3)
    expected = torch.stack((table[4], *random(3, 3) * math.nan, table[0]))
    for operator in (
        lambda ids: reference.embedding(ids, table),
        lambda rows: reference.select_rows(table, rows),
    ):
        out = operator(torch.tensor([4, -1, 5, 2**31 - 1, 0], dtype=dtype))
        assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))


@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_rms_norm(dtype: torch.dtype, num_tokens: int):
    # Small values, so that eps counts.
    hidden = random(num_tokens, 90, std=3e-3, dtype=dtype)
    update = random(num_tokens, 90, seed=1, std=3e-3, dtype=dtype)
    weight = random(90, seed=2)
    total = (hidden.double() + update.double()).to(dtype)

    def formula(x: Tensor, eps: float = 1e-5) -> Tensor:
        x = x.double()
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    stored = hidden.clone()
    out = reference.rms_norm(stored, weight, 1e-5, update)
    assert out.dtype == dtype
    assert torch.equal(stored, total)
    assert rel_error(out, formula(total)) < BOUNDS[dtype]
    plain = reference.rms_norm(hidden, weight, 1e-5)
    assert rel_error(plain, formula(hidden)) < BOUNDS[dtype]
    if num_tokens:
        for wrong in (formula(total, eps=0.0), formula(hidden), formula(total) / weight):
            assert rel_error(wrong, formula(total)) > 3 * BOUNDS[dtype]


@DTYPES
def test_rms_norm_adds_what_experts_gave_as_combine_does(dtype: torch.dtype):
    mixture = Mixture(ROUTINGS["uneven"], dtype)
    hidden, weight = random(4, 32, seed=7, dtype=dtype), random(32, seed=8)
    update = mixture.mixture()
    total = reference.combine(*update, residual=hidden)
    stored = hidden.clone()
    out = reference.rms_norm(stored, weight, 1e-5, update)
    assert torch.equal(stored, total)
    assert torch.equal(out, reference.rms_norm(total, weight, 1e-5))
    product = reference.norm_linear(hidden, weight, 1e-5, random(7, 32, dtype=dtype), update=update)
    assert torch.equal(hidden, total)
    assert torch.equal(product, reference.linear(out, random(7, 32, dtype=dtype)))


@DTYPES
def test_linear(dtype: torch.dtype):
    x, weight, bias = (
        random(4, 96, dtype=dtype),
        random(7, 96, seed=1, std=0.1, dtype=dtype),
        random(7, seed=2, dtype=dtype),
    )
    exact = x.double() @ weight.double().T
    assert rel_error(reference.linear(x, weight), exact) < BOUNDS[dtype]
    assert rel_error(reference.linear(x, weight, bias), exact + bias.double()) < BOUNDS[dtype]
    assert rel_error(exact, exact + bias.double()) > 3 * BOUNDS[dtype]
    residual = random(4, 7, seed=3, dtype=dtype)
    out = reference.linear(x, weight, bias, residual=residual)
    assert torch.equal(out, reference.linear(x, weight, bias) + residual)


def test_a_residual_is_added_to_fp8_products_before_they_are_rounded():
    x, residual = random(4, 128, dtype=torch.bfloat16), random(4, 8, seed=1, dtype=torch.bfloat16)
    weight = quantise_weight(random(8, 128, seed=2, std=0.1))
    out = reference.linear(x, weight, residual=residual)
    wide = reference.linear(x.float(), weight)
    assert torch.equal(out, (wide + residual).bfloat16())
    assert not torch.equal(out, wide.bfloat16() + residual)


@DTYPES
def test_a_norm_with_what_it_feeds_is_one_after_the_other(dtype: torch.dtype):
    hidden, norm_weight = random(4, 32, dtype=dtype), random(32, seed=1)
    weight, bias = random(7, 32, seed=2, dtype=dtype), random(7, seed=3, dtype=dtype)
    normed = reference.rms_norm(hidden, norm_weight, 1e-5)
    out = reference.norm_linear(hidden, norm_weight, 1e-5, weight, bias)
    assert torch.equal(out, reference.linear(normed, weight, bias))
    routed = reference.norm_route(hidden, norm_weight, 1e-5, weight, bias, 3)
    chosen, weights = reference.route(normed, weight, bias, 3)
    assert torch.equal(routed.normed, normed)
    assert torch.equal(routed.chosen, chosen)
    assert torch.equal(routed.weights, weights)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_choice_is_one_ranks(ranks: int):
    hidden, norm_weight = random(9, 32), torch.ones(32)
    hidden[2, 0] = torch.nan
    router = (random(8, 32, seed=2), random(8, seed=3), 3)
    whole = reference.norm_route(hidden, norm_weight, 1e-5, *router)
    each = 8 // ranks
    counts = torch.zeros_like(whole.chosen)
    for first in range(0, 8, each):
        experts = range(first, first + each)
        part = reference.norm_route(hidden, norm_weight, 1e-5, *router, experts=experts)
        assert part.chosen.is_contiguous()
        assert part.weights.is_contiguous()
        is_own = part.chosen >= 0
        counts += is_own
        assert torch.equal(part.chosen[is_own] + first, whole.chosen[is_own])
        assert torch.equal(part.weights[is_own], whole.weights[is_own])
        assert not part.weights[~is_own & (whole.chosen >= 0)].any()
        assert part.weights[2].isnan().all()
        assert (part.chosen[2] == -1).all()
    assert torch.equal(counts, (whole.chosen >= 0).long())


def gpt_oss_table(num_positions: int, head_dim: int, factor: float = 32.0) -> Tensor:
    return reference.rope_table(
        num_positions,
        head_dim,
        theta=150000.0,
        factor=factor,
        beta_fast=32.0,
        beta_slow=1.0,
        original_context=4096,
    )


def yarn_table(num_positions: int, *, floor: bool = False, concentration: bool = True) -> Tensor:
    """MODEL.md's numbers for head_dim 64, written out pair by pair: [positions, 64] float64."""
    low, high = 8.0928, 17.3980  # 32 ln(4096 / (turns 2 pi)) / ln(150000) for 32 turns and for 1
    if floor:
        low, high = math.floor(low), math.ceil(high)
    table = torch.empty(num_positions, 64, dtype=torch.float64)
    for pair in range(32):
        plain = 150000.0 ** (-2 * pair / 64)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        frequency = plain / 32 * ramp + plain * (1 - ramp)
        for position in range(num_positions):
            table[position, pair] = math.cos(position * frequency)
            table[position, 32 + pair] = math.sin(position * frequency)
    return table * (1.3466 if concentration else 1.0)


def test_rope_table_is_yarn():
    table = gpt_oss_table(300, 64)
    # fp32 angles up to 300 are off by up to 300 * 2^-24, the literals by 5e-5.
    assert rel_error(table, yarn_table(300)) < 2e-4
    assert rel_error(yarn_table(300, floor=True), yarn_table(300)) > 1e-2
    assert rel_error(yarn_table(300, concentration=False), yarn_table(300)) > 1e-2


def test_rope_table_without_scaling_is_plain():
    table = gpt_oss_table(50, 8, factor=1.0)
    angles = torch.arange(50)[:, None] * 150000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    assert rel_error(table, torch.cat((angles.cos(), angles.sin()), dim=1)) < 1e-5


@DTYPES
def test_rope_and_cache_write(dtype: torch.dtype):
    num_heads, num_kv_heads, head_dim, page_size = 4, 2, 64, 3
    qkv = random(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    positions, slots = torch.tensor([0, 129, 41]), torch.tensor([5, 0, 10])
    table = gpt_oss_table(130, head_dim)
    keys = torch.full((4, num_kv_heads, page_size, head_dim), math.nan, dtype=dtype)
    values = keys.clone()
    query = reference.rope_and_cache_write(qkv, positions, table, keys, values, slots)

    def rotate(x: Tensor, *, interleaved: bool = False) -> Tensor:
        out = torch.empty_like(x, dtype=torch.float64)
        for token, position in enumerate(positions.tolist()):
            for pair in range(32):
                i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, 32 + pair)
                cos, sin = table[position, pair].double(), table[position, 32 + pair].double()
                a, b = x[token, :, i].double(), x[token, :, j].double()
                out[token, :, i], out[token, :, j] = a * cos - b * sin, b * cos + a * sin
        return out

    heads = qkv.view(3, -1, head_dim)
    assert rel_error(query, rotate(heads[:, :4])) < BOUNDS[dtype]
    assert rel_error(rotate(heads[:, :4], interleaved=True), rotate(heads[:, :4])) > 0.5
    stored_keys, stored_values = (c.transpose(1, 2).flatten(0, 1) for c in (keys, values))
    assert rel_error(stored_keys[slots], rotate(heads[:, 4:6])) < BOUNDS[dtype]
    assert torch.equal(stored_values[slots], heads[:, 6:])
    others = [slot for slot in range(12) if slot not in (5, 0, 10)]
    assert stored_keys[others].isnan().all()
    assert stored_values[others].isnan().all()


def test_a_negative_slot_stores_nothing():
    qkv, table = random(3, 4 * 8), gpt_oss_table(10, 8)
    positions = torch.tensor([1, 2, 3])
    found, caches = [], []
    for slots in (torch.arange(3), torch.tensor([0, -1, 2])):
        keys, values = (torch.full((2, 1, 4, 8), math.nan) for _ in range(2))
        found.append(reference.rope_and_cache_write(qkv, positions, table, keys, values, slots))
        caches.append((keys, values))
    assert torch.equal(*found)
    for cache, other in zip(*caches, strict=True):
        assert torch.equal(cache[0, 0, [0, 2]], other[0, 0, [0, 2]])
        assert other[0, 0, 1].isnan().all()


def test_a_cache_of_e4m3_holds_scaled_keys_and_values():
    """Each head by its own scale; what is beyond e4m3 saturates, and does not become a NaN."""
    qkv, table = random(5, 6 * 64, std=100.0), gpt_oss_table(10, 64)
    positions, slots = torch.arange(5), torch.tensor([7, 0, 3, 2, 5])
    scales = torch.tensor([0.25, 3.0]), torch.tensor([1.0, 0.5])

    def caches_in(dtype: torch.dtype, *scales: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (torch.zeros(2, 2, 4, 64, dtype=dtype) for _ in range(2))
        reference.rope_and_cache_write(qkv, positions, table, keys, values, slots, *scales)
        return keys, values

    plain, caches = caches_in(torch.float32), caches_in(E4M3, *scales)
    for cache, exact, scale in zip(caches, plain, scales, strict=True):
        stored, scaled = cache.float(), exact / scale[:, None, None]
        is_beyond = scaled.abs() > 448
        assert is_beyond.any()
        assert (stored[is_beyond].abs() == 448).all()
        assert ((stored - scaled).abs() <= 2.0**-4 * scaled.abs() + 2.0**-10)[~is_beyond].all()
        swapped = exact / scale.flip(0)[:, None, None]
        assert ((stored - swapped).abs() > 2.0**-4 * swapped.abs() + 2.0**-10)[~is_beyond].any()


class Paged:
    """Sequences in a poisoned paged cache: (tokens in all, queries among them, the last ones)."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        page_size: int,
        window: int | None,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int, int] = (4, 2, 16),
    ) -> None:
        self.sequences = sequences
        self.window = window
        num_heads, num_kv_heads, head_dim = heads
        self.query = random(sum(n for _, n in sequences), num_heads, head_dim, dtype=dtype)
        # Sharp scores and one sink that dominates, so that every detail of the softmax shows.
        self.scale = 8 * head_dim**-0.5
        self.sinks = random(num_heads, seed=3, std=4.0)
        self.dense = [
            tuple(random(n, num_kv_heads, head_dim, seed=s, dtype=dtype) for s in (10 + b, 50 + b))
            for b, (n, _) in enumerate(sequences)
        ]
        counts = [-(-n // page_size) for n, _ in sequences]
        order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(5))
        shape = (len(order), num_kv_heads, page_size, head_dim)
        self.keys = torch.full(shape, math.nan, dtype=dtype)
        self.values = torch.full(shape, math.nan, dtype=dtype)
        # Wider than any sequence needs, as a batch's table is.
        self.page_tables = torch.full((len(sequences), max(counts) + 1), -1, dtype=torch.int32)
        pages = iter(order.tolist())
        for b, (length, num_queries) in enumerate(sequences):
            first_visible = 0 if window is None else max(0, length - num_queries - window + 1)
            for column in range(counts[b]):
                page, first = next(pages), column * page_size
                if first + page_size <= first_visible:
                    continue  # given back: the table says -1, the page stays poisoned
                self.page_tables[b, column] = page
                piece = slice(first, min(first + page_size, length))
                for cache, dense in zip((self.keys, self.values), self.dense[b], strict=True):
                    cache[page, :, : piece.stop - first] = dense[piece].transpose(0, 1)
        starts = [0]
        for _, num_queries in sequences:
            starts.append(starts[-1] + num_queries)
        self.query_start = torch.tensor(starts, dtype=torch.int32)
        self.seq_lens = torch.tensor([n for n, _ in sequences], dtype=torch.int32)

    def operator(self) -> Tensor:
        return reference.attention(
            self.query,
            self.keys,
            self.values,
            self.sinks,
            self.query_start,
            self.seq_lens,
            self.page_tables,
            scale=self.scale,
            window=self.window,
        )

    def formula(self, *, sink_scale: float = 1.0, has_sink: bool = True, wider: int = 0) -> Tensor:
        """One query head of one query at a time, over the dense keys."""
        rows = []
        for b, (length, num_queries) in enumerate(self.sequences):
            keys, values = (tensor.double() for tensor in self.dense[b])
            for i in range(length - num_queries, length):
                first = 0 if self.window is None else max(0, i - self.window + 1 - wider)
                query = self.query[len(rows)].double()
                heads = []
                for head in range(query.shape[0]):
                    kv_head = head // (query.shape[0] // keys.shape[1])
                    scores = keys[first : i + 1, kv_head] @ query[head] * self.scale
                    weights = scores.exp()
                    sink = (self.sinks[head].double() * sink_scale).exp() if has_sink else 0.0
                    heads.append(weights @ values[first : i + 1, kv_head] / (weights.sum() + sink))
                rows.append(torch.cat(heads))
        return torch.stack(rows)


@DTYPES
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 128, 5])
def test_attention(dtype: torch.dtype, page_size: int, window: int | None):
    """Decodes at page and window edges and prefill chunks, in one batch, in no special order."""
    decodes = [(n, 1) for n in (1, 2, 5, 6, 63, 64, 65, 127, 128, 129, 130, 200)]
    chunks = [(3, 3), (140, 12), (130, 2), (64, 64), (129, 129)]
    paged = Paged([*decodes[:5], *chunks, *decodes[5:]], page_size, window, dtype)
    exact = paged.formula()
    assert rel_error(paged.operator(), exact) < BOUNDS[dtype]
    assert rel_error(paged.formula(sink_scale=0.125), exact) > 0.1
    assert rel_error(paged.formula(has_sink=False), exact) > 0.1
    if window:
        assert rel_error(paged.formula(wider=1), exact) > 0.1
        assert rel_error(paged.formula(wider=-1), exact) > 0.1


@pytest.mark.parametrize("window", [None, 128])
def test_attention_of_a_prefill_longer_than_a_tile(window: int | None):
    paged = Paged([(reference.QUERY_TILE * 2 + 1, reference.QUERY_TILE * 2 + 1)], 64, window)
    assert rel_error(paged.operator(), paged.formula()) < BOUNDS[torch.float32]


def test_attention_of_a_long_context_takes_fewer_queries_at_once(monkeypatch: pytest.MonkeyPatch):
    for num_scores in (1, 4 * 70 * 3):
        monkeypatch.setattr(reference, "MAX_SCORES", num_scores)
        paged = Paged([(70, 8), (33, 1)], 16, None)
        assert rel_error(paged.operator(), paged.formula()) < BOUNDS[torch.float32]


@pytest.mark.parametrize("window", [None, 128])
def test_attention_of_a_sequence_is_the_same_bits_alone_and_in_chunks(window: int | None):
    """Padded to nothing or to the longest of a batch, 1 query at a time or 40."""
    lengths = (40, 300, 131)
    prefills = Paged([(length, min(length, 40)) for length in lengths], 16, window)
    whole, row = prefills.operator(), 0
    for sequence, length in enumerate(lengths):
        num_queries = min(length, 40)
        for back in range(num_queries):
            page_table = prefills.page_tables[sequence : sequence + 1]
            out = reference.attention(
                *(prefills.query[row + back, None], prefills.keys, prefills.values),
                *(prefills.sinks, torch.tensor([0, 1])),
                *(torch.tensor([length - num_queries + back + 1]), page_table),
                scale=prefills.scale,
                window=window,
            )
            assert torch.equal(out, whole[row + back, None])
        row += num_queries


@pytest.mark.parametrize("heads", [(8, 1, 8), (3, 3, 4)], ids=["one-kv-head", "no-groups"])
def test_attention_with_any_grouping(heads: tuple[int, int, int]):
    paged = Paged([(7, 1), (9, 4)], 4, None, heads=heads)
    assert rel_error(paged.operator(), paged.formula()) < BOUNDS[torch.float32]


def test_attention_over_a_cache_of_e4m3_is_that_over_what_it_stands_for():
    paged = Paged([(70, 1), (9, 4)], 16, None, dtype=torch.bfloat16)
    plain = paged.keys, paged.values
    scales = torch.tensor([0.25, 3.0]), torch.tensor([0.75, 0.5])
    cached = [(c.float() / s[:, None, None]).to(E4M3) for c, s in zip(plain, scales, strict=True)]

    def attend(
        keys: Tensor,
        values: Tensor,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        return reference.attention(
            *(paged.query.float(), keys, values, paged.sinks),
            *(paged.query_start, paged.seq_lens, paged.page_tables),
            scale=paged.scale,
            window=None,
            key_scale=key_scale,
            value_scale=value_scale,
        )

    exact = attend(*(c.double() * s[:, None, None] for c, s in zip(cached, scales, strict=True)))
    of_keys, of_values = scales
    scaled = attend(*cached, key_scale=of_keys, value_scale=of_values)
    assert rel_error(scaled, exact) < 1e-5
    assert rel_error(attend(*cached, key_scale=of_values, value_scale=of_keys), exact) > 0.1
    ones = torch.ones(2)
    assert torch.equal(attend(*cached), attend(*cached, key_scale=ones, value_scale=ones))


def test_attention_of_sequences_without_queries():
    paged = Paged([(5, 0), (7, 1), (3, 0), (9, 2)], 4, None)
    assert rel_error(paged.operator(), paged.formula()) < BOUNDS[torch.float32]
    paged.seq_lens[2] = 0
    assert rel_error(paged.operator(), paged.formula()) < BOUNDS[torch.float32]


def test_attention_refuses_a_page_that_a_query_sees_but_that_was_given_back():
    paged = Paged([(12, 1)], 4, None)
    paged.page_tables[0, 1] = -1
    with pytest.raises(AssertionError, match="given back"):
        paged.operator()


@DTYPES
def test_route(dtype: torch.dtype):
    x, weight, bias = (
        random(6, 32, dtype=dtype),
        random(10, 32, seed=1, std=0.3, dtype=dtype),
        random(10, seed=2, dtype=dtype),
    )
    chosen, weights = reference.route(x, weight, bias, 3)
    logits = reference.linear(x, weight, bias).double()
    for token in range(6):
        ranked = sorted(range(10), key=lambda expert: (-logits[token, expert], expert))[:3]
        assert chosen[token].tolist() == ranked
    of_chosen = logits.gather(1, chosen).exp()
    assert rel_error(weights, of_chosen / of_chosen.sum(1, keepdim=True)) < BOUNDS[dtype]
    over_all = of_chosen / logits.exp().sum(1, keepdim=True)
    assert rel_error(over_all, of_chosen / of_chosen.sum(1, keepdim=True)) > 3 * BOUNDS[dtype]


@DTYPES
def test_route_of_a_token_depends_on_no_other(dtype: torch.dtype):
    x, weight = random(33, 320, dtype=dtype), random(16, 320, seed=1, std=0.1, dtype=dtype)
    bias = random(16, seed=2, dtype=dtype)
    chosen, weights = reference.route(x, weight, bias, 4)
    for token in range(33):
        alone = reference.route(x[token, None], weight, bias, 4)
        assert torch.equal(alone[0], chosen[token, None])
        assert torch.equal(alone[1], weights[token, None])


@DTYPES
def test_rms_norm_of_a_token_depends_on_no_other(dtype: torch.dtype):
    hidden, weight = random(33, 320, dtype=dtype), random(320, seed=1)
    out = reference.rms_norm(hidden, weight, 1e-5)
    for token in range(33):
        assert torch.equal(reference.rms_norm(hidden[token, None], weight, 1e-5), out[token, None])


def test_route_lets_the_lowest_index_win_a_tie():
    # 128 experts whose bf16 logits take four values only.
    bias = torch.tensor([0.0, 2.0, 1.0, 2.0] * 32, dtype=torch.bfloat16)
    nothing = torch.zeros(128, 8, dtype=torch.bfloat16)
    chosen, weights = reference.route(nothing[:2], nothing, bias, 4)
    assert chosen.tolist() == [[1, 3, 5, 7]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def test_route_compares_in_the_dtype_of_the_model():
    # 1 and 1 + 2^-9 are one value in bf16: the lower index wins, and the weights are equal.
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]], dtype=torch.bfloat16)
    x, bias = torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
    chosen, weights = reference.route(x, weight, bias, 2)
    assert (chosen.tolist(), weights.tolist()) == ([[0, 1]], [[0.5, 0.5]])


def test_a_token_with_a_nan_chooses_no_expert():
    x, weight, bias = random(3, 32), random(10, 32, seed=1), random(10, seed=2)
    expected = reference.route(x, weight, bias, 3)
    x[1, 5] = math.nan
    chosen, weights = reference.route(x, weight, bias, 3)
    assert chosen[1].tolist() == [-1, -1, -1]
    assert bool(weights[1].isnan().all())
    for found, right in zip((chosen, weights), expected, strict=True):
        assert torch.equal(found[[0, 2]], right[[0, 2]])


class Mixture:
    """Five experts of width 24, three chosen a token, with values on both sides of the clamps."""

    def __init__(self, chosen: list[list[int]], dtype: torch.dtype = torch.float32) -> None:
        self.chosen = torch.tensor(chosen, dtype=torch.int64).view(-1, 3)
        num_tokens = len(self.chosen)
        self.x = random(num_tokens, 32, dtype=dtype)
        self.weights = random(num_tokens, 3, seed=1).softmax(-1).to(dtype)
        self.w13 = random(5, 48, 32, seed=2, std=1.0, dtype=dtype)
        self.w13_bias = random(5, 48, seed=3, dtype=dtype)
        self.w2 = random(5, 32, 24, seed=4, std=0.2, dtype=dtype)
        self.w2_bias = random(5, 32, seed=5, dtype=dtype)

    def operator(self, residual: Tensor | None = None) -> Tensor:
        return reference.combine(*self.mixture(), residual=residual)

    def mixture(self) -> ops.Mixture:
        return reference.experts(
            self.x,
            self.chosen,
            self.weights,
            self.w13,
            self.w13_bias,
            self.w2,
            self.w2_bias,
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
        )

    def formula(
        self,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        offset: float = 1.0,
        gate_floor: float = -math.inf,
        interleaved: bool = True,
        weighted_bias: bool = True,
    ) -> Tensor:
        out = torch.zeros(len(self.x), 32, dtype=torch.float64)
        for token in range(len(self.x)):
            for k, expert in enumerate(self.chosen[token].tolist()):
                inner = self.w13[expert].double() @ self.x[token].double()
                inner += self.w13_bias[expert].double()
                gate, up = (inner[0::2], inner[1::2]) if interleaved else inner.chunk(2)
                gate, up = gate.clamp(gate_floor, limit), up.clamp(-limit, limit)
                y = gate / (1 + (-alpha * gate).exp()) * (up + offset)
                y, bias = self.w2[expert].double() @ y, self.w2_bias[expert].double()
                weight = self.weights[token, k].double()
                out[token] += weight * (y + bias) if weighted_bias else weight * y + bias
        return out


# An expert with no token, all tokens to the same experts, one token, none.
ROUTINGS = {
    "uneven": [[0, 1, 2], [4, 1, 0], [1, 0, 2], [2, 4, 1]],
    "same": [[3, 0, 4]] * 7,
    "one": [[2, 1, 0]],
    "none": [],
}


@DTYPES
@pytest.mark.parametrize("chosen", ROUTINGS.values(), ids=ROUTINGS)
def test_experts(dtype: torch.dtype, chosen: list[list[int]]):
    mixture = Mixture(chosen, dtype)
    exact = mixture.formula()
    assert rel_error(mixture.operator(), exact) < BOUNDS[dtype]
    if chosen:
        for wrong in (
            mixture.formula(alpha=1.0),
            mixture.formula(limit=math.inf),
            mixture.formula(offset=0.0),
            mixture.formula(interleaved=False),
            mixture.formula(weighted_bias=False),
        ):
            assert rel_error(wrong, exact) > 3 * BOUNDS[dtype]


def test_experts_add_a_residual_before_they_round():
    mixture = Mixture(ROUTINGS["uneven"], torch.bfloat16)
    residual = random(4, 32, seed=6, std=9.0, dtype=torch.bfloat16)
    exact = mixture.formula() + residual
    assert rel_error(mixture.operator(residual), exact) < BOUNDS[torch.bfloat16]
    assert rel_error(mixture.operator(), exact) > 0.1


def test_a_token_without_experts_is_nan_and_no_other_is():
    mixture = Mixture(ROUTINGS["uneven"])
    expected = mixture.operator()
    mixture.chosen[2] = -1
    out = mixture.operator()
    assert bool(out[2].isnan().all())
    assert rel_error(out[[0, 1, 3]], expected[[0, 1, 3]]) < BOUNDS[torch.float32]


def test_swiglu_clamps_the_gate_from_above_only():
    mixture = Mixture(ROUTINGS["uneven"])
    # gate * sigmoid(alpha gate) is small below -7: -0.5 shows what a floor would do.
    assert rel_error(mixture.operator(), mixture.formula(gate_floor=-0.5)) > 1e-3
    gate_up = torch.tensor([[-8.0, 9.0, 9.0, -9.0]])
    expected = [-8 / (1 + math.exp(1.702 * 8)) * 8, 7 / (1 + math.exp(-1.702 * 7)) * -6]
    assert reference.swiglu(gate_up, 1.702, 7.0).tolist() == [pytest.approx(expected, rel=1e-5)]


def test_mask_logits():
    """40 tokens, so two words; of the rows one is left out, and one is none."""
    logits = random(3, 40)
    before = logits.clone()
    allowed = {0: {0, 31, 32}, 2: set(range(1, 40)) - {33}}
    words = [
        [sum(1 << v - first for v in range(first, first + 32) if v in ids) for first in (0, 32)]
        for ids in (allowed[2], allowed[0], set())
    ]
    mask = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    reference.mask_logits(logits, mask, torch.tensor([2, 0, -1], dtype=torch.int32))
    for row in range(3):
        for v in range(40):
            stays = v in allowed.get(row, range(40))
            assert logits[row, v] == (before[row, v] if stays else -math.inf)


def test_penalize_logits():
    """By hand: biased, in the prompt, in the answer once and twice, the newest known and new."""
    logits = torch.tensor([[0.0] * 6, [2.0, -2.0, 1.0, 3.0, -1.0, 4.0]])
    penalties = Penalties(
        *(torch.tensor(each, dtype=torch.int32) for each in ([1, 1, 0], [0, 1, -1])),
        *(torch.tensor([each] * 3) for each in (2.0, 0.25, 0.5)),
        start=torch.tensor([0, 4, 5, 5], dtype=torch.int32),
        token_ids=torch.tensor([0, 1, 2, 3, 1], dtype=torch.int32),
        counts=torch.tensor([-1, 0, 1, 2, -1], dtype=torch.int32),
        biases=torch.tensor([7.0, 0.0, 0.0, -4.0, 1.5]),
    )
    out = torch.full((3, 6), math.nan)
    reference.penalize_logits(logits, torch.tensor([3, 4]), penalties, out)
    first = [9.0, -4.0, 0.5 - 0.75, -2.0 - 1.25, -1.0, 4.0]
    second = [2.0, -0.5, 1.0, 3.0, -2.0 - 0.75, 4.0]
    assert out.tolist() == [first, second, [0.0] * 6]


def test_select_rows():
    hidden = random(5, 3)
    assert torch.equal(reference.select_rows(hidden, torch.tensor([3, 1])), hidden[[3, 1]])
    assert reference.select_rows(hidden, torch.tensor([], dtype=torch.int64)).shape == (0, 3)
