"""Attention's inputs, its formula in float64, and wrong twins: what every implementation is held
against.

A case is a batch as the engine gives it: sequences that begin anywhere, in pages in random order,
decodes first. Slots that no query sees hold NaN: the rest of a last page, pages of nobody, pages
that a window gave back, and keys that a window left behind in a page which is still held.

Random keys alone hide what goes wrong at an edge: one of 8192 keys is a hundredth of a result. So
the keys on either side of the diagonal and of the window's border are drawn towards the query whose
edge they are, for about every other query and key-value head, and weigh more than the others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gptoss_kernels.contracts import HEAD_DIM, MAXIMUM_DECODE_QUERIES, NO_DECODES, Decodes
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.testing import norm_error

# plain: scores of standard deviation 1. ordinary: the same, with edges that weigh more. wide and
# narrow: that again, of queries beyond fp16 and of tiny ones. sharp: a few keys weigh more than all
# others. equal: all keys of a head are the same. large and huge: up to 3e4 and 4e6. deep: around
# -8192 for even heads and 8192 for odd ones, and the sinks there, too.
Scores = Literal["plain", "ordinary", "wide", "narrow", "sharp", "equal", "large", "huge", "deep"]
WITHOUT_EDGES = ("plain", "equal", "large", "huge", "deep")
QUERY_SIZES = {"wide": 2.0**17, "narrow": 2.0**-20, "sharp": 4.0, "large": 128.0, "huge": 1024.0}
KEY_SIZES = {"wide": 2.0**-17, "narrow": 2.0**20, "large": 64.0, "huge": 1024.0}
EDGE_WEIGHT = 1.0  # of a query's direction in a key at its edge; adds 5.7 to the score
DEPTH = 8192
QUERY_SCALE = 2.0**-6  # of compared_cases in e4m3
# At a time: queries, and scores as float64.
QUERIES = 512
MAX_SCORES = {"cpu": 2**22, "cuda": 2**27}
# A kernel may flush what is too small for fp32, of all keys of a row.
SMALLEST_ROW = 1e-30


@dataclass(frozen=True)
class Case:
    """The operator's arguments: see reference.attention."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    sinks: Tensor
    query_start: Tensor
    seq_lens: Tensor
    page_tables: Tensor
    scale: float
    window: int | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    decodes: Decodes

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def run(self, attention: Callable[..., Tensor]) -> Tensor:
        return attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.sinks,
            self.query_start,
            self.seq_lens,
            self.page_tables,
            scale=self.scale,
            window=self.window,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            decodes=self.decodes,
        )


class Errors(NamedTuple):
    """whole: norm_error. worst_row: the same of the worst 64 values of one query head of one token,
    among thousands of which a wrong one would hide."""

    whole: float
    worst_row: float

    def within(self, bounds: "Errors") -> bool:
        return self.whole <= bounds.whole and self.worst_row <= bounds.worst_row

    def far_beyond(self, bounds: "Errors") -> bool:
        return self.whole > 5 * bounds.whole or self.worst_row > 5 * bounds.worst_row


# Weights and results rounded to bf16 cost 2.4e-3 at most in the whole. In a row of few keys, or of
# equal values, either rounding may cost all values the same 2^-8 at most.
BF16_BOUNDS = Errors(3e-3, 8e-3)
# Weights rounded to e4m3 cost up to 2^-4 of each, and 2.65e-2 of them all.
E4M3_WEIGHT_BOUNDS = Errors(3e-2, 8e-2)


def errors(actual: Tensor, expected: Tensor) -> Errors:
    if not expected.numel():
        assert actual.shape == expected.shape
        return Errors(0.0, 0.0)
    rows = expected.double().view(-1, HEAD_DIM)
    apart = (actual.double().view(-1, HEAD_DIM) - rows).norm(dim=1)
    of_rows = apart / rows.norm(dim=1).clamp(min=SMALLEST_ROW)
    return Errors(norm_error(actual, expected), float(of_rows.max()))


def make_case(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (64, 8),
    page_size: int = 64,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scores: Scores = "ordinary",
    sinks: Sequence[float] = (),
    constant_value: float | None = None,
    garbage: float = math.nan,
    spare_pages: int = 3,
    scale: float = 0.125,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """sequences: (tokens in all, queries among them, the last ones), in any order.

    heads: query heads, and key-value heads. dtype of the caches: bf16, or e4m3 with a random scale
    for each head, other ones for values. sinks: logits, repeated for all heads; of every size from
    1 to more than all keys together where none are given.
    """
    sequences = sorted(sequences, key=lambda s: s[1] > MAXIMUM_DECODE_QUERIES)
    num_heads, num_kv_heads = heads
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def uniform(count: int, low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator, device=device) * (high - low) + low

    pages = _Pages.of(sequences, page_size, window, spare_pages, generator)
    # What the heads of a group have in common, towards which keys at edges are drawn.
    shared = normal(pages.num_queries, num_kv_heads, HEAD_DIM)
    own = normal(pages.num_queries, num_kv_heads, num_heads // num_kv_heads, HEAD_DIM)
    query = ((shared[:, :, None] + own) * 0.5**0.5).flatten(1, 2)
    shape = (pages.seen.shape[0], num_kv_heads, page_size, HEAD_DIM)
    key, value = (normal(*shape, dtype=torch.bfloat16) for _ in range(2))
    if scores not in WITHOUT_EDGES:
        pages.draw_edges(key, shared, window, generator)
    if scores == "equal":
        key.copy_(key[:1, :, :1].clone())
    query *= QUERY_SIZES.get(scores, 1.0)
    key *= KEY_SIZES.get(scores, 1.0)
    if constant_value is not None:
        value.fill_(constant_value)
    longest = max((length for length, _ in sequences), default=1)
    sink_logits = uniform(num_heads, 0, math.log(max(longest, 1)) + 2)
    sink_logits *= QUERY_SIZES.get(scores, 1.0) * KEY_SIZES.get(scores, 1.0)
    if sinks:
        sink_logits = torch.tensor(sinks, device=device).repeat(num_heads)[:num_heads]
    if scores == "deep":
        assert dtype != E4M3
        _lower(query, key)
        sink_logits += DEPTH * torch.tensor([-1, 1], device=device).repeat(num_heads)[:num_heads]

    key_scale = value_scale = None
    if dtype == E4M3:
        # No two alike.
        steps = [torch.randperm(num_kv_heads, generator=generator, device=device) for _ in "kv"]
        key_scale, value_scale = (0.25 ** (step / num_kv_heads) for step in steps)
        key_scale *= 0.06 * KEY_SIZES.get(scores, 1.0)
        value_scale *= 0.012
        key, value = _quantised(key, key_scale), _quantised(value, value_scale)
    is_garbage = ~pages.seen[:, None, :, None]
    for cache in (key, value):
        if dtype == E4M3:  # which PyTorch does not fill everywhere
            byte = torch.tensor(garbage).clamp(-448, 448).to(E4M3).view(torch.uint8)
            cache.view(torch.uint8).masked_fill_(is_garbage, int(byte))
        else:
            cache.masked_fill_(is_garbage, garbage)
    return Case(
        query=query.bfloat16(),
        key_cache=key,
        value_cache=value,
        sinks=sink_logits,
        query_start=pages.query_start,
        seq_lens=pages.seq_lens,
        page_tables=pages.tables,
        scale=scale,
        window=window,
        key_scale=key_scale,
        value_scale=value_scale,
        decodes=decodes_of(sequences),
    )


def decodes_of(sequences: Sequence[tuple[int, int]]) -> Decodes:
    """Of sequences with decodes first."""
    counts = [count for _, count in sequences if count <= MAXIMUM_DECODE_QUERIES]
    return Decodes(len(counts), sum(counts), max(counts, default=0))


class _Pages(NamedTuple):
    """Where the tokens of sequences lie: in pages in random order, some of nobody between them.

    tables, query_start, seq_lens: as the operator takes them; held [B, P]: the tables before pages
    were given back; seen [pages, page_size]: whether a query sees the slot; sequence, position [T]
    of each query.
    """

    tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    held: Tensor
    seen: Tensor
    sequence: Tensor
    position: Tensor

    @property
    def num_queries(self) -> int:
        return self.position.shape[0]

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[int, int]],
        page_size: int,
        window: int | None,
        spare_pages: int,
        generator: torch.Generator,
    ) -> "_Pages":
        device = generator.device
        counts = [-(-length // page_size) for length, _ in sequences]
        order = torch.randperm(sum(counts) + spare_pages, generator=generator, device=device)
        # Wider than any sequence needs, as a batch's table is.
        held = torch.full((len(counts), max(counts, default=0) + 3), -1, device=device)
        tables = held.clone()
        seen = torch.zeros(len(order), page_size, dtype=torch.bool, device=device)
        positions = [torch.zeros(0, dtype=torch.long, device=device)]
        next_page = 0
        for b, ((length, num_queries), count) in enumerate(zip(sequences, counts, strict=True)):
            assert num_queries <= length
            taken = order[next_page : next_page + count]
            next_page += count
            held[b, :count] = tables[b, :count] = taken
            positions.append(torch.arange(length - num_queries, length, device=device))
            if num_queries == 0:
                continue
            first = 0 if window is None else max(0, length - num_queries - window + 1)
            tables[b, : first // page_size] = -1
            position = torch.arange(count * page_size, device=device)
            seen[taken] = ((position >= first) & (position < length)).view(count, page_size)
        lengths, queries = torch.tensor(sequences, dtype=torch.int32).view(-1, 2).to(device).T
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
        return cls(
            tables=tables.int(),
            query_start=starts,
            seq_lens=lengths.contiguous(),
            held=held,
            seen=seen,
            sequence=torch.arange(len(counts), device=device).repeat_interleave(queries),
            position=torch.cat(positions),
        )

    def draw_edges(
        self, key: Tensor, shared: Tensor, window: int | None, generator: torch.Generator
    ) -> None:
        """Adds queries' directions [T, KV, D] to the keys at their edges."""
        page_size, ends = self.seen.shape[1], self.seq_lens.long()[self.sequence]
        for shift in (0, 1) if window is None else (0, 1, 1 - window, -window):
            position = self.position + shift
            is_key = (position >= 0) & (position < ends)
            position, sequence = position[is_key], self.sequence[is_key]
            drawn = torch.rand(shared.shape[:2], generator=generator, device=key.device) < 0.5
            directions = (EDGE_WEIGHT * drawn[..., None] * shared)[is_key]
            page, offset = self.held[sequence, position // page_size], position % page_size
            key[page, :, offset] += directions.to(key.dtype)


def _lower(query: Tensor, key: Tensor) -> None:
    """Scores of a few units around -DEPTH or DEPTH, which fp32 has exactly: products of integers.

    An implementation that masks with a number instead of -inf is wrong there.
    """
    query.copy_(query.round().clamp(-2, 2))
    key.copy_(key.round().clamp(-2, 2))
    query[..., 0::2, 0], query[..., 1::2, 0], key[..., 0] = -1024, 1024, 64


def _quantised(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale[:, None, None]).clamp(-448, 448).to(E4M3)


def exact(case: Case, *, later: int = 0, rounded: bool = False) -> Tensor:
    """The formula in float64: [T, N * D]. `later` keys behind each query's own are seen, too.

    A sequence at a time and its keys side by side. What is read but holds NaN, as it may by a wrong
    twin, counts as not there. rounded: weights and results to bf16, and nothing else.
    """
    num_heads = case.query.shape[1]
    num_kv_heads, page_size = case.key_cache.shape[1:3]
    device = case.query.device
    out = torch.zeros(case.query.shape, dtype=torch.float64, device=device)
    sinks = case.sinks.double().view(num_kv_heads, -1, 1)
    starts, lengths = case.query_start.tolist(), case.seq_lens.tolist()
    for b, length in enumerate(lengths):
        num_queries = starts[b + 1] - starts[b]
        if num_queries == 0:
            continue
        most_seen = length if case.window is None else min(length, case.window + QUERIES)
        size = min(QUERIES, max(1, MAX_SCORES[device.type] // (num_heads * most_seen)))
        for first_row in range(starts[b], starts[b + 1], size):
            rows = slice(first_row, min(first_row + size, starts[b + 1]))
            positions = torch.arange(rows.start, rows.stop, device=device) + length - starts[b + 1]
            first = 0
            if case.window is not None:
                first = max(0, length - starts[b + 1] + rows.start - case.window + 1)
            end = min(length, length - starts[b + 1] + rows.stop + max(later, 0))
            columns = slice(first // page_size, -(-end // page_size))
            pages = case.page_tables[b, columns].clamp(min=0)
            keys = _read(case.key_cache, case.key_scale, pages)
            values = _read(case.value_cache, case.value_scale, pages)
            where = torch.arange(keys.shape[1], device=device) + columns.start * page_size
            visible = (where <= positions[:, None] + later) & (where < length)
            if case.window is not None:
                visible &= where > positions[:, None] - case.window
            is_there = keys.isfinite().all(-1) & values.isfinite().all(-1)
            keys.masked_fill_(~is_there[..., None], 0)
            values.masked_fill_(~is_there[..., None], 0)
            query = case.query[rows].double().unflatten(1, (num_kv_heads, -1))
            scores = torch.einsum("qkgd,kjd->kgqj", query, keys) * case.scale
            scores.masked_fill_(~(visible & is_there[:, None, None]), -math.inf)
            # A row that sees nothing, of a wrong twin, has no largest score.
            largest = torch.maximum(scores.amax(-1), sinks).clamp(min=-1e300)
            weights = scores.sub_(largest[..., None]).exp_()
            total = weights.sum(-1) + (sinks - largest).exp()
            if rounded:
                weights = weights.bfloat16().double()
            total = total.clamp(min=1e-300).permute(2, 0, 1)[..., None]
            of_rows = torch.einsum("kgqj,kjd->qkgd", weights, values) / total
            out[rows] = of_rows.flatten(1, 2)
    return (out.bfloat16() if rounded else out).flatten(1)


def _read(cache: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """[KV, P' * page_size, D] of one sequence, dequantised."""
    if cache.dtype == E4M3:  # which PyTorch does not gather everywhere
        read = cache.view(torch.uint8)[pages].view(E4M3).double()
    else:
        read = cache[pages].double()
    read = read.transpose(0, 1).flatten(1, 2)
    return read if scale is None else read * scale.double()[:, None, None]


def wrong_twins(case: Case) -> Iterator[tuple[str, Tensor]]:
    """By name, what kernels would give that are wrong in one thing, where it makes a difference."""
    num_heads, num_kv_heads = case.query.shape[1], case.key_cache.shape[1]
    group = num_heads // num_kv_heads
    yield "no sink", exact(replace(case, sinks=torch.full_like(case.sinks, -math.inf)))
    yield "a scaled sink", exact(replace(case, sinks=case.sinks * case.scale))
    if num_heads > 1:
        yield "the next head's sink", exact(replace(case, sinks=case.sinks.roll(-1)))
    queries = case.query_start.diff()
    if bool((queries > 1).any()):
        yield "the next key seen", exact(case, later=1)
    yield "its own key not seen", exact(case, later=-1)
    if case.window is not None and bool((case.seq_lens >= case.window).any()):
        yield "a window one key narrower", exact(replace(case, window=case.window - 1))
        if bool(((case.seq_lens > case.window) & (queries > 1)).any()):
            yield "a window one key wider", exact(replace(case, window=case.window + 1))
    if (tables := _wrong_page(case)) is not None:
        yield "another page", exact(replace(case, page_tables=tables))
    if case.key_scale is not None:
        yield (
            "the scales of keys and values exchanged",
            exact(replace(case, key_scale=case.value_scale, value_scale=case.key_scale)),
        )
        if num_kv_heads > 1:
            assert case.value_scale is not None
            for name in ("key_scale", "value_scale"):
                rolled = {name: getattr(case, name).roll(1)}
                yield f"the next head's {name}", exact(replace(case, **rolled))
    if group > 1 and num_kv_heads > 1:
        # Head h reads key-value head h % KV instead of h // G.
        order = torch.arange(num_heads, device=case.query.device).view(group, num_kv_heads)
        order = order.T.flatten()
        moved = exact(replace(case, query=case.query[:, order], sinks=case.sinks[order]))
        wrong = torch.empty_like(moved).unflatten(1, (num_heads, HEAD_DIM))
        wrong[:, order] = moved.unflatten(1, (num_heads, HEAD_DIM))
        yield "heads grouped otherwise", wrong.flatten(1)


def _wrong_page(case: Case) -> Tensor | None:
    """Tables in which a sequence has its last whole page twice, as its first whole one, too: the
    shortest sequence with two of those; None where there is none.

    Two whole pages exchanged would change nothing: keys have no order.
    """
    page_size = case.key_cache.shape[2]
    found: tuple[range, int] | None = None
    lengths, counts = case.seq_lens.tolist(), case.query_start.diff().tolist()
    for b, (length, num_queries) in enumerate(zip(lengths, counts, strict=True)):
        first = 0 if case.window is None else max(0, length - num_queries - case.window + 1)
        whole = range(-(-first // page_size), length // page_size)
        if num_queries and len(whole) >= 2 and (found is None or len(whole) < len(found[0])):
            found = whole, b
    if found is None:
        return None
    whole, b = found
    tables = case.page_tables.clone()
    tables[b, whole[0]] = tables[b, whole[-1]]
    return tables


def without_decodes(case: Case) -> Case:
    """The same, with every sequence a prefill."""
    return replace(case, decodes=NO_DECODES)


def rounded_queries(case: Case) -> Case:
    """The same, of prefills' queries as kernels round them that multiply in e4m3: a row's largest
    becomes 256, by an inverse rounded to fp32, whose last bit tells where a query between two e4m3
    values goes. In float64, as what they stand for is more than bf16 holds."""
    query = case.query[case.decodes.num_queries :].float()
    scale = query.abs().amax(-1, keepdim=True).clamp(min=2.0**-100) / 256
    rounded = case.query.double()
    e4m3 = (query * (1 / scale)).to(E4M3)
    rounded[case.decodes.num_queries :] = e4m3.double() * scale.double()
    return replace(case, query=rounded)


def compared_cases(
    dtype: torch.dtype, device: str = "cuda", *, seed: int = 0
) -> Iterator[tuple[str, Case]]:
    """By name, gpt-oss's shapes with plain random inputs: where implementations' errors, the
    libraries' too, are compared.

    Beside a cache of e4m3 the queries are e4m3 values times QUERY_SCALE, since some libraries take
    no others. Of FlashAttention 3 on such data, 2.1e-3 with bf16 and 2.3e-2 in e4m3 were seen.
    """
    for window in (None, 128):
        for name, sequences in (
            ("prefill of 8192", [(8192, 8192)]),
            ("512 queries behind 32256", [(32768, 512)]),
            ("8 decodes behind 8191", [(8192, 1)] * 8),
        ):
            case = make_case(
                sequences, window=window, dtype=dtype, scores="plain", device=device, seed=seed
            )
            if dtype == E4M3:
                query = (case.query.float() / QUERY_SCALE).clamp(-448, 448).to(E4M3)
                case = replace(case, query=query.bfloat16() * QUERY_SCALE)
            yield name if window is None else f"{name}, window {window}", case
