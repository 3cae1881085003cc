"""The operators in plain PyTorch: the shortest correct form of each, on any device.

Arithmetic is that of OpenAI's published model: tensors in the model's dtype (fp32 or bf16), inner
sums, softmax, norms and SwiGLU in fp32, rounded once where a tensor is stored. Words for shapes are
in ops.py. A cache is [pages, KV, page_size, D], so that one head's page is one piece of memory;
slot = page * page_size + offset.

Weights are tensors of the model's dtype, or FP8 with block scales, or MXFP4, which is widened to
that FP8 on its way: the same numbers. With either the operators compute the FP8 function:
activations are quantised in groups along K, sums are fp32. An activation's last bit may then decide
to which of two e4m3 numbers it is rounded, 6 % apart; so what a token's activations are made of is
summed in fp64 and rounded to fp32, where no batch, chunk or thread shows.
"""

import functools
import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from gptoss_kernels.contracts import (
    LEAST_TEMPERATURE,
    MAXIMUM_TOP,
    NO_DECODES,
    Decodes,
    Dispatched,
    Mixture,
    Penalties,
    Routed,
    SamplingRows,
    check_decodes,
)
from gptoss_kernels.fp8 import (
    BLOCK,
    E4M3,
    E4M3_MAX,
    SWIGLU_GROUP,
    Fp8Weight,
    num_blocks,
    widen_values,
)
from gptoss_kernels.mxfp4 import Mxfp4Weight
from gptoss_kernels.steps import unpack_step as unpack_step

VALUES_WIDENED = 2**19  # of an FP8 weight at a time: 4 MiB in fp64 stay in a CPU's cache
QUERY_TILE = 256  # a tile of a window layer sees 127 keys more than it has queries
MAX_SCORES = 2**24  # 64 MiB, weights in fp64 128 more: a long context gets fewer queries a tile
WEIGHT_BITS = 40  # of the likeliest token's weight
# Of 2^x = 1 + x (0.693... + x (...)) to 3e-6 for x in [0, 1), times 2^24, the last one first.
EXP2 = (225_262, 876_483, 4_048_010, 11_627_363, 2**24)
NUM_CANDIDATES = 1024  # most top_p sets are smaller; a larger one costs a full sort of its row
LEAST_AMAX = 1e-10  # a group of smaller values still has a scale that is a normal number


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """weight[token_ids]: [T] int32 or int64 of [V, H] -> [T, H]; NaN for an id that is none"""
    return select_rows(weight, token_ids)


def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture | None = None
) -> Tensor:
    """hidden <- hidden + update, in place;  out = hidden * rsqrt(mean(hidden^2) + eps) * weight

    hidden, update, out [T, H]; weight [H] fp32. Without an update, hidden stays as it is; a mixture
    is added as combine adds it to a residual.
    """
    assert hidden.ndim == 2
    assert weight.shape == hidden.shape[1:]
    if isinstance(update, Mixture):
        hidden.copy_(combine(*update, residual=hidden))
    elif update is not None:
        assert update.shape == hidden.shape
        assert update.dtype == hidden.dtype
        hidden += update
    # The rounded sum is normalised, not the exact one: the next layer adds to what was stored.
    x = hidden.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(hidden.dtype)


def linear(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """x @ weight^T + bias + residual: [T, in], [out, in], [out], [T, out] -> [T, out]

    Before a residual is added, the product of a plain weight is rounded to x.dtype, and that of an
    FP8 weight is not.
    """
    assert x.ndim == 2
    assert len(weight.shape) == 2
    assert x.shape[1] == weight.shape[1]
    assert bias is None or bias.shape == weight.shape[:1]
    if isinstance(weight, Fp8Weight):
        operands = (*quantise(x), weight.values, weight.scale, bias)
        return linear_fp8(*operands, residual=residual, dtype=x.dtype)
    product = torch.nn.functional.linear(x, weight, bias)
    return product if residual is None else product + residual


def norm_linear(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Fp8Weight,
    bias: Tensor | None = None,
    *,
    update: Mixture | None = None,
) -> Tensor:
    """linear(rms_norm(hidden, norm_weight, eps, update), weight, bias), hidden updated in place"""
    return linear(rms_norm(hidden, norm_weight, eps, update), weight, bias)


def quantise(x: Tensor, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """scale = amax * (1 / 448) of each row and group along K;  values = x * (448 / amax)

    [T, K] -> values e4m3 [T, K], scale fp32 [T, ceil(K / group)]; the last group may be short.
    In fp32: each quotient is rounded, then each product; ties of values go to even. amax counts as
    at least LEAST_AMAX, so that a group of zeros has zeros and a scale. Nothing saturates: the
    largest of a group becomes 448. A group with an inf or a NaN dequantises to NaN.
    """
    assert x.ndim == 2
    width = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -width % group)).unflatten(1, (-1, group))
    amax = groups.abs().amax(-1).clamp(min=LEAST_AMAX)
    # One division a group and not one a value; the product exceeds 448 by a rounding at most.
    # A quotient of a number and a tensor would be the reciprocal's product, and rounded twice.
    factor = torch.full_like(amax, E4M3_MAX) / amax
    values = (groups * factor[..., None]).to(E4M3)
    return values.flatten(1)[:, :width].contiguous(), amax * (1 / E4M3_MAX)


def rms_norm_fp8(
    hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture | None = None
) -> tuple[Tensor, Tensor]:
    """quantise(rms_norm(hidden, weight, eps, update)), hidden updated in place as there

    The norm is rounded to hidden.dtype before it is quantised, as if it had been stored.
    """
    return quantise(rms_norm(hidden, weight, eps, update))


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(x * x_scale) @ (weight * weight_scale)^T + bias + residual

    x e4m3 [T, K]; x_scale fp32 [T, ceil(K / group)], group 128 or 64; weight e4m3 [N, K];
    weight_scale fp32 [ceil(N / 128), ceil(K / 128)]; bias [N], residual [T, N] -> dtype [T, N]. The
    sum of each group is exact, rounded to fp32, and scaled as it is added to the bias and the
    groups before it, in fp32: a row's result depends on no other row, and not on the machine. The
    residual is added last, before the sum is rounded to dtype.
    """
    (num_tokens, width), num_rows = x.shape, weight.shape[0]
    group = BLOCK if x_scale.shape[1] == num_blocks(width) else 64
    assert weight.shape[1] == width
    assert x_scale.shape == (num_tokens, -(-width // group))
    assert weight_scale.shape == (num_blocks(num_rows), num_blocks(width))
    assert bias is None or bias.shape == (num_rows,)
    num_groups = x_scale.shape[1]
    row_scale = weight_scale[:, torch.arange(num_groups, device=x.device) * group // BLOCK]
    row_scale = row_scale.repeat_interleave(BLOCK, dim=0)[:num_rows].T
    x_groups = _widened_groups(x, group)
    out = x.new_zeros(num_tokens, num_rows, dtype=torch.float32)
    if bias is not None:
        out += bias
    tile = max(BLOCK, VALUES_WIDENED // width)
    for first in range(0, num_rows, tile):
        rows = slice(first, first + tile)
        # Products of e4m3 are multiples of 2^-18 up to 2^18: fp64 adds 128 of them exactly.
        sums = (x_groups @ _widened_groups(weight[rows], group).transpose(1, 2)).float()
        sums *= x_scale.T[:, :, None] * row_scale[:, None, rows]
        for of_group in sums:
            out[:, rows] += of_group
    if residual is not None:
        out += residual
    return out.to(dtype)


def quantised_linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """linear_fp8 of what quantise gives of x: [T, K] -> bf16 [T, N]"""
    return linear_fp8(*quantise(x), weight, weight_scale, bias, residual=residual)


def _widened_groups(values: Tensor, group: int) -> Tensor:
    """e4m3 [N, K] -> fp64 [ceil(K / group), N, group], filled up with zeros."""
    padding = (0, -values.shape[1] % group)
    filled = torch.nn.functional.pad(values.view(torch.uint8), padding).view(E4M3)
    return widen_values(filled, torch.float64).unflatten(1, (-1, group)).transpose(0, 1)


def rope_table(
    num_positions: int,
    head_dim: int,
    *,
    theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_context: int,
) -> Tensor:
    """cos and sin of every position's angles, times YaRN's concentration: [positions, D] fp32.

    The first D/2 columns are cosines, the others sines. Frequencies that turn fewer than beta_slow
    times within the original context are divided by factor, those above beta_fast are kept, and a
    linear ramp, whose ends are not rounded, lies between. concentration = 0.1 ln(factor) + 1.
    """
    half = head_dim // 2
    # In fp32 and in this order, as the published implementations have it, and so bit for bit what
    # they have: far out, the last bit of a frequency is a hundredth of a radian.
    tokens_per_radian = theta ** (torch.arange(half, dtype=torch.float32) / half)
    frequency = 1 / tokens_per_radian
    concentration = 1.0
    if factor > 1:
        concentration = 0.1 * math.log(factor) + 1
        low, high = (
            half * math.log(original_context / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (beta_fast, beta_slow)
        )
        kept = 1 - ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
        frequency = frequency * kept + 1 / (factor * tokens_per_radian) * (1 - kept)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * concentration


def rope_and_cache_write(
    qkv: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotates q and k by their positions, stores k and v at their slots; returns q [T, N, D].

    qkv [T, (N + 2 KV) * D] in the order q, k, v; positions [T]; key_cache, value_cache
    [P, KV, page_size, D]; slot_mapping [T], page * page_size + offset, negative for a token that is
    not stored. Half-split rotation: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves of
    a head. A cache of e4m3 holds x / scale, saturated at 448; key_scale, value_scale fp32 [KV], 1
    where there are none.
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, page_size, head_dim = key_cache.shape[1:]
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert value_cache.shape == key_cache.shape
    assert rope_table.shape[1] == head_dim
    heads = qkv.view(num_tokens, -1, head_dim)
    rotated, value = heads.split([heads.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    cos, sin = rope_table.index_select(0, positions).to(qkv.dtype)[:, None].chunk(2, dim=-1)
    a, b = rotated.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    query, key = rotated.split([rotated.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        stored = _as_cached(new[is_stored], cache.dtype, scale)
        if cache.dtype == E4M3:  # which PyTorch does not scatter on a CPU
            cache, stored = cache.view(torch.uint8), stored.view(torch.uint8)
        cache[slots // page_size, :, slots % page_size] = stored
    return query.contiguous()


def _as_cached(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """[T, KV, D] in a cache's dtype."""
    if dtype != E4M3:
        return x.to(dtype)
    scaled = x.float() if scale is None else x.float() / scale[:, None]
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    *,
    scale: float,
    window: int | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    decodes: Decodes = NO_DECODES,
) -> Tensor:
    """out_i = sum_j exp(s_ij - m) v_j / (sum_j exp(s_ij - m) + exp(sink - m)),  s = scale * q.k

    Over the keys j <= i, and j > i - window where there is one; the sink, one logit a query head,
    is not scaled and has no value. query [T, N, D] -> [T, N * D]; sinks [N].
    Sequence b owns the query rows query_start[b] : query_start[b + 1], the last of its seq_lens[b]
    tokens. key_cache, value_cache [P, KV, page_size, D], in e4m3 times key_scale and value_scale,
    fp32 [KV], 1 where there are none. page_tables [B, P] holds a sequence's pages by
    position // page_size; -1 is a page that was given back, and is never read. Whatever lies in
    slots that no query sees, a NaN too, has no effect. `decodes` is for kernels: see Decodes.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_sequences = seq_lens.shape[0]
    assert key_cache.shape == value_cache.shape
    assert key_cache.shape[3] == head_dim
    assert num_heads % key_cache.shape[1] == 0
    assert sinks.shape == (num_heads,)
    assert query_start.shape == (num_sequences + 1,)
    assert page_tables.ndim == 2
    assert page_tables.shape[0] == num_sequences
    assert window is None or window > 0
    check_decodes(decodes, num_tokens, num_sequences)

    out = query.new_empty(num_tokens, num_heads, head_dim)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for tile in _tiles(starts, lengths, num_heads):
        rows = torch.tensor(tile.rows, device=query.device)[:, None]
        rows = rows + torch.arange(tile.num_queries, device=query.device)
        attended = _attention_tile(
            query[rows],
            _Cached(key_cache, key_scale),
            _Cached(value_cache, value_scale),
            sinks,
            torch.tensor(tile.lengths, device=query.device),
            page_tables[tile.sequences],
            scale,
            window,
        )
        out[rows] = attended.to(out.dtype)
    return out.view(num_tokens, num_heads * head_dim)


class _Cached(NamedTuple):
    """The keys or the values of a layer: [P, KV, page_size, D], and what e4m3 is scaled by."""

    pages: Tensor
    scale: Tensor | None

    def read(self, page_ids: Tensor) -> Tensor:
        """[B, P'] -> [B, KV, P' * page_size, D] fp64"""
        pages = self.pages
        if pages.dtype == E4M3:  # which PyTorch does not gather on a CPU
            pages = pages.view(torch.uint8)
        read = pages[page_ids].transpose(1, 2).flatten(2, 3)
        if self.pages.dtype != E4M3:
            return read.double()
        widened = widen_values(read.view(E4M3), torch.float64)
        return widened if self.scale is None else widened * self.scale.double()[:, None, None]


class _Tile(NamedTuple):
    """Sequences that share one padded pass: for each its first query row, and its tokens up to the
    last of its num_queries queries."""

    num_queries: int
    sequences: list[int]
    rows: list[int]
    lengths: list[int]


def _tiles(starts: list[int], lengths: list[int], num_heads: int) -> list[_Tile]:
    """Decodes together, where padding to the longest at most doubles them; prefills in pieces."""
    decodes: dict[int, _Tile] = {}
    pieces = []
    for b, length in enumerate(lengths):
        num_queries = starts[b + 1] - starts[b]
        if num_queries == 0:
            continue
        if num_queries == 1:
            tile = decodes.setdefault(length.bit_length(), _Tile(1, [], [], []))
            tile.sequences.append(b)
            tile.rows.append(starts[b])
            tile.lengths.append(length)
            continue
        size = max(1, min(QUERY_TILE, MAX_SCORES // (num_heads * length)))
        for first in range(0, num_queries, size):
            last = min(first + size, num_queries)
            seen = length - num_queries + last
            pieces.append(_Tile(last - first, [b], [starts[b] + first], [seen]))
    return [*decodes.values(), *pieces]


def _attention_tile(
    query: Tensor,
    keys: _Cached,
    values: _Cached,
    sinks: Tensor,
    lengths: Tensor,
    page_tables: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """query [B, Q, N, D], the last Q of lengths[b] tokens each -> [B, Q, N, D] fp32."""
    num_sequences, num_queries, num_heads, head_dim = query.shape
    num_kv_heads, page_size = keys.pages.shape[1:3]
    first_query = lengths - num_queries
    first_key = (
        torch.zeros_like(lengths) if window is None else (first_query - window + 1).clamp(min=0)
    )
    first_page = first_key // page_size
    num_pages = int(((lengths - 1) // page_size - first_page).max()) + 1
    columns = first_page[:, None] + torch.arange(num_pages, device=query.device)
    pages = page_tables.gather(1, columns.clamp(max=page_tables.shape[1] - 1).long())
    positions = (first_page * page_size)[:, None] + torch.arange(
        num_pages * page_size, device=query.device
    )
    held = (positions >= first_key[:, None]) & (positions < lengths[:, None])
    assert bool((pages.repeat_interleave(page_size, 1)[held] >= 0).all()), "a page was given back"

    key, value = keys.read(pages.clamp(min=0)), values.read(pages.clamp(min=0))
    # What is not held may be anything, NaN too, and 0 * NaN is NaN.
    value = value.masked_fill_(~held[:, None, :, None], 0)

    queries = first_query[:, None] + torch.arange(num_queries, device=query.device)
    visible = held[:, None] & (positions[:, None] <= queries[:, :, None])
    if window is not None:
        visible &= positions[:, None] > queries[:, :, None] - window
    # Rows of a key-value head: its G query heads times Q queries.
    grouped = query.double().view(num_sequences, num_queries, num_kv_heads, -1, head_dim) * scale
    grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ key.transpose(2, 3)).float().unflatten(2, (-1, num_queries))
    scores = scores.masked_fill_(~visible[:, None, None], -math.inf)
    sink = sinks.float().view(1, num_kv_heads, -1, 1, 1)
    largest = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = scores.sub_(largest).exp_().double()
    total = weights.sum(dim=-1, keepdim=True) + (sink - largest).exp()
    out = weights.flatten(2, 3) @ value / total.flatten(2, 3)
    out = out.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4)
    return out.reshape(num_sequences, num_queries, num_heads, head_dim)


def route(x: Tensor, weight: Tensor, bias: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits x @ weight^T + bias, and a softmax over those alone.

    Logits are in x.dtype, where they tie often: the lowest index wins. A token with a NaN among
    them chooses no expert: -1 each, with weights of NaN.
    x [T, H], weight [E, H], bias [E] -> chosen [T, K] int64, weights [T, K] in x.dtype, both
    contiguous.
    """
    logits = (x.double() @ weight.double().T + bias).to(x.dtype)
    # torch.topk does not say which of equal values it takes; a stable sort does.
    values, chosen = logits.sort(dim=-1, descending=True, stable=True)  # NaN first
    chosen = chosen[:, :num_chosen].masked_fill(values[:, :1].isnan(), -1)
    return chosen, torch.softmax(values[:, :num_chosen].float(), dim=-1).to(x.dtype)


def norm_route(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor,
    num_chosen: int,
    *,
    experts: range | None = None,
) -> Routed:
    """normed = rms_norm(hidden, norm_weight, eps), and route(normed, weight, bias, num_chosen)

    -> normed [T, H], chosen [T, K] int64, weights [T, K] in hidden.dtype.

    experts: those that a rank has. Numbers are counted from its first one; another rank's is -1, as
    one that is none, so that it costs nothing, and has a weight of 0, so that it adds nothing.
    """
    normed = rms_norm(hidden, norm_weight, eps)
    chosen, weights = route(normed, weight, bias, num_chosen)
    if experts is not None:
        is_own = (chosen >= experts.start) & (chosen < experts.stop)
        weights = weights.masked_fill((chosen >= 0) & ~is_own, 0)
        chosen = torch.where(is_own, chosen - experts.start, -1)
    return Routed(normed, chosen, weights)


def swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), gate and up interleaved and clamped

    gate = min(x[0::2], limit); up = clamp(x[1::2], -limit, limit). [T, 2 I] -> [T, I]
    """
    gate, up = x.float()[..., 0::2].clamp(max=limit), x.float()[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(x.dtype)


def grouped_swiglu_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    alpha: float,
    limit: float,
    group: int = SWIGLU_GROUP,
) -> tuple[Tensor, Tensor]:
    """quantise(swiglu(linear_fp8(x, weight[e], bias[e])), group), nothing rounded in between

    Expert e owns the rows expert_start[e] : expert_start[e + 1]. x e4m3 [R, H], x_scale fp32
    [R, ceil(H / 128)]; weight e4m3 [E, 2 I, H], gate and up rows interleaved, weight_scale fp32
    [E, ceil(2 I / 128), ceil(H / 128)]; bias [E, 2 I]; group 128 or 64
    -> values e4m3 [R, I], scale fp32 [R, ceil(I / group)].
    """
    inner = _grouped(x, x_scale, expert_start, weight, weight_scale, bias, torch.float32)
    return quantise(swiglu(inner, alpha, limit), group)


def grouped_linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """linear_fp8(x, weight[e], bias[e]) for the rows expert_start[e] : expert_start[e + 1]

    x e4m3 [R, I], x_scale fp32 [R, ceil(I / group)]; weight e4m3 [E, H, I], weight_scale fp32
    [E, ceil(H / 128), ceil(I / 128)]; bias [E, H] -> dtype [R, H].
    """
    return _grouped(x, x_scale, expert_start, weight, weight_scale, bias, dtype)


def dispatch_fp8(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
    """Each token quantised, once for each of its experts, in the experts' order

    x [T, H]; chosen [T, K], integers in 0 .. num_experts - 1 -> R = T K rows of quantise(x): values
    e4m3 [R, H], scale fp32 [R, ceil(H / 128)]. Expert e owns the rows expert_start[e] :
    expert_start[e + 1], int32 [E + 1], in the order of their tokens; token t's row for chosen[t, k]
    is rows[t, k], int32 [T, K]. What is no expert's number has its row behind all experts'.
    """
    values, scale = quantise(x)
    is_expert = (chosen >= 0) & (chosen < num_experts)
    owners = chosen.where(is_expert, num_experts).flatten()
    order = owners.argsort(stable=True)
    tokens = order // chosen.shape[1]
    counts = torch.bincount(owners, minlength=num_experts + 1)[:-1]
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    rows = torch.empty_like(order, dtype=torch.int32)
    rows[order] = torch.arange(len(order), dtype=torch.int32, device=x.device)
    return Dispatched(values[tokens], scale[tokens], start, rows.view(chosen.shape))


def experts_fp8(
    x: Tensor,
    chosen: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_bias: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_bias: Tensor,
    *,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """dispatch_fp8, grouped_swiglu_fp8 and grouped_linear_fp8, one after the other

    x [T, H]; chosen [T, K] -> bf16 [R, H], and rows [T, K]: which of those are a token's. Weights,
    scales and biases as there.
    """
    values, scale, expert_start, rows = dispatch_fp8(x, chosen, len(w13))
    first = (expert_start, w13, w13_scale, w13_bias)
    inner = grouped_swiglu_fp8(values, scale, *first, alpha=alpha, limit=limit)
    return grouped_linear_fp8(*inner, expert_start, w2, w2_scale, w2_bias), rows


def combine(
    outputs: Tensor, rows: Tensor, chosen_weights: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """sum_k chosen_weights[t, k] * outputs[rows[t, k]] + residual[t], in fp32 in this order

    outputs [R, H]; rows int32, chosen_weights [T, K]; residual [T, H] -> [T, H] in outputs.dtype.
    A weight of 0 adds nothing, whatever lies in its row, or where it is none: see norm_route.
    """
    total = outputs.new_zeros(len(rows), outputs.shape[1], dtype=torch.float32)
    for row, weight in zip(rows.T, chosen_weights.T, strict=True):
        weight = weight[:, None].float()
        total += (outputs[row].float() * weight).masked_fill_(weight == 0, 0)
    if residual is not None:
        total += residual
    return total.to(outputs.dtype)


class Reduction:
    """hidden <- hidden + sum over the group's ranks of update, in fp32 in their order, rounded once

    hidden, update [T, H]; a mixture is first added up, and rounded, as combine does. Each rank adds
    to its own hidden, which all have alike. Over any backend that gathers bytes.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def add(self, hidden: Tensor, update: Tensor | Mixture) -> Tensor:
        own = combine(*update) if isinstance(update, Mixture) else update
        assert own.shape == hidden.shape
        assert own.dtype == hidden.dtype
        parts = own.new_empty((self.size, *own.shape))
        if own.numel():
            sent = own.contiguous().view(torch.uint8)
            received = list(parts.view(torch.uint8).unbind())
            self._group.allgather([received], [sent]).wait()
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for part in parts:
            total += part
        return hidden.copy_(total + hidden)

    def rms_norm(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> Tensor:
        return rms_norm(self.add(hidden, update), weight, eps)

    def rms_norm_fp8(
        self, hidden: Tensor, weight: Tensor, eps: float, update: Tensor | Mixture
    ) -> tuple[Tensor, Tensor]:
        return rms_norm_fp8(self.add(hidden, update), weight, eps)

    def failure(self) -> None:
        """The group raises."""


def _grouped(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    starts = expert_start.tolist()
    assert len(starts) == len(weight) + 1
    assert starts[0] == 0
    assert starts[-1] <= len(x)
    out = x.new_full((len(x), weight.shape[1]), math.nan, dtype=dtype)
    for expert, (first, end) in enumerate(pairwise(starts)):
        if end > first:
            rows = slice(first, end)
            part = (weight[expert], weight_scale[expert], bias[expert])
            out[rows] = linear_fp8(x[rows], x_scale[rows], *part, dtype=dtype)
    return out


def experts(
    x: Tensor,
    chosen: Tensor,
    chosen_weights: Tensor,
    w13: Tensor | Fp8Weight | Mxfp4Weight,
    w13_bias: Tensor,
    w2: Tensor | Fp8Weight | Mxfp4Weight,
    w2_bias: Tensor,
    *,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Mixture:
    """sum_k weight_k * (w2 swiglu(w13 x + w13_bias) + w2_bias) of a token's experts, not yet added

    x [T, H]; chosen, chosen_weights [T, K]; w13 [E, 2 I, H], gate and up rows interleaved;
    w2 [E, H, I] -> a mixture for [T, H]. Tokens are grouped by expert: each expert hit is read
    once. An expert of -1 makes its token NaN.
    """
    num_tokens, num_chosen = chosen.shape
    num_experts, hidden_size, _ = w2.shape
    assert x.shape == (num_tokens, hidden_size)
    assert chosen_weights.shape == chosen.shape
    assert w13.shape == (num_experts, 2 * w2.shape[2], hidden_size)
    assert w13_bias.shape == w13.shape[:2]
    assert w2_bias.shape == w2.shape[:2]
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten() + 1, minlength=num_experts + 1).tolist()
    # Before any output: a kernel that adds these up reads the rows early, see ops.Fp8Operators.
    rows_of_tokens = torch.arange(num_tokens * num_chosen, dtype=torch.int32, device=x.device)
    outputs = x.new_full((num_tokens * num_chosen, hidden_size), math.nan)
    for expert, rows in enumerate(order.split(counts)[1:]):
        if len(rows):
            outputs[rows] = _expert(
                x[rows // num_chosen],
                *(w13[expert], w13_bias[expert], w2[expert], w2_bias[expert]),
                *(swiglu_alpha, swiglu_limit),
            )
    return Mixture(outputs, rows_of_tokens.view(num_tokens, num_chosen), chosen_weights)


def _expert(
    x: Tensor,
    w13: Tensor | Fp8Weight | Mxfp4Weight,
    w13_bias: Tensor,
    w2: Tensor | Fp8Weight | Mxfp4Weight,
    w2_bias: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """One expert's rows: [R, H] -> [R, H], in x.dtype."""
    if isinstance(w13, Tensor):
        assert isinstance(w2, Tensor)
        return linear(swiglu(linear(x, w13, w13_bias), alpha, limit), w2, w2_bias)
    w13 = w13.widen() if isinstance(w13, Mxfp4Weight) else w13
    w2 = w2.widen() if isinstance(w2, Mxfp4Weight) else w2
    assert isinstance(w2, Fp8Weight)
    inner = linear_fp8(*quantise(x), w13.values, w13.scale, w13_bias, dtype=torch.float32)
    inner = quantise(swiglu(inner, alpha, limit), SWIGLU_GROUP)
    return linear_fp8(*inner, w2.values, w2.scale, w2_bias, dtype=x.dtype)


def select_rows(hidden: Tensor, rows: Tensor) -> Tensor:
    """hidden[rows]: [T, H], [S] int32 or int64 -> [S, H]; NaN for a row that is none"""
    assert hidden.ndim == 2
    assert rows.ndim == 1
    is_row = (rows >= 0) & (rows < len(hidden))
    selected = hidden.index_select(0, rows.where(is_row, 0))
    return selected.masked_fill_(~is_row[:, None], math.nan)


def mask_logits(logits: Tensor, mask: Tensor, rows: Tensor) -> None:
    """logits[rows[i], v] <- -inf where bit v % 32 of mask[i, v // 32] is 0, in place

    logits [S, V]; mask int32 [G, ceil(V / 32)]; rows int32 [G]: one outside 0 .. S - 1 is nobody's.
    """
    bits = mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    for row, allowed in zip(rows.tolist(), is_allowed, strict=True):
        if 0 <= row < len(logits):
            logits[row].masked_fill_(~allowed, -math.inf)


def penalize_logits(logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor) -> None:
    """out[g] <- logits[rows[g]] as fp32, biased and penalised as vLLM does it, in this order

    y = x + bias;  of a token that was there, y / repetition if y > 0, else y * repetition;  of one
    of the answer, y - (frequency * count + presence).  Each line in fp64, rounded to fp32. The
    newest token counts once more. logits [S, V]; input_ids int64 [T]; out fp32 [G, V].
    """
    columns = (penalties.rows, penalties.newest, penalties.start, penalties.start[1:])
    settings = (penalties.repetition, penalties.frequency, penalties.presence)
    for target, row, newest, start, end, repetition, frequency, presence in zip(
        out, *(column.tolist() for column in (*columns, *settings)), strict=False
    ):
        target.copy_(logits[row])
        token_ids = penalties.token_ids[start:end].long()
        counts, biases = penalties.counts[start:end].double(), penalties.biases[start:end].double()
        token = int(input_ids[newest]) if newest >= 0 else -1
        if token >= 0:
            if token not in token_ids:
                token_ids = torch.cat((token_ids, token_ids.new_tensor([token])))
                counts = torch.cat((counts, counts.new_tensor([-1])))
                biases = torch.cat((biases, biases.new_zeros(1)))
            counts = torch.where(token_ids == token, counts.clamp(min=0) + 1, counts)
        y = (target[token_ids].double() + biases).float().double()
        repeated = torch.where(y > 0, y / repetition, y * repetition).float().double()
        y = torch.where(counts >= 0, repeated, y)
        penalised = (y - (frequency * counts + presence)).float()
        target[token_ids] = torch.where(counts > 0, penalised, y.float())


def sample(
    logits: Tensor,
    rows: SamplingRows,
    seats: Tensor | None = None,
    last_token_ids: Tensor | None = None,
) -> Tensor:
    """A token of each row: [S, V] -> [S] int64; -1 where the largest logit is no finite number

    Below LEAST_TEMPERATURE the largest logit's, the lowest id where several are. Else tokens have
    token_weights: integers, so that no order of their sums matters. They are cut to the top_k
    largest logits, then to the fewest of those that hold top_p of what is left, then to those of at
    least min_p of the largest; a logit as large as the last one kept is kept too. The token is the
    first, in the order of ids, at which the sum exceeds uniform * all, rounded down. A row's
    masked_ids have logits of -inf. The tokens are kept as last_token_ids[seats], too,
    where there is such a seat.
    """
    assert len(logits) == len(rows.temperature)
    starts = rows.masked_start.tolist()
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniforms)
    settings = zip(*(column.tolist() for column in columns), strict=True)
    token_ids = []
    # Row by row: one row's temporaries stay in a CPU's cache, those of a batch do not.
    for row, (temperature, top_k, top_p, min_p, uniform) in enumerate(settings):
        values = logits[row].float()
        masked = rows.masked_ids[starts[row] : starts[row + 1]]
        if len(masked):
            values = values.index_fill(0, masked.long(), -math.inf)
        if not values.max().isfinite():
            token_ids.append(-1)
        elif temperature < LEAST_TEMPERATURE:
            token_ids.append(int(values.argmax()))
        else:
            weights = token_weights(values, temperature)
            sums = _cut(weights, values, top_k, top_p, min_p).cumsum(0)
            target = _product(uniform, int(sums[-1]))
            token_ids.append(int(torch.searchsorted(sums, target, right=True)))
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    if seats is not None and last_token_ids is not None:
        is_kept = (seats >= 0) & (seats < len(last_token_ids))
        last_token_ids[seats[is_kept]] = tokens[is_kept]
    return tokens


def token_weights(values: Tensor, temperature: float) -> Tensor:
    """2^40 exp((values - max) / temperature) to 1e-5 of itself, rounded down: fp32 [V] -> int64 [V]

    By operations that all devices round alike. Nothing is ever drawn that is less likely than the
    likeliest by 2^-40, and a larger value never weighs less.
    """
    rate = torch.tensor(math.log2(math.e) / temperature, dtype=torch.float32)
    exponent = ((values - values.max()) * rate).clamp_(min=-48)  # where the weight is 0
    # From 144 to 192 a number of fp32 has 16 bits behind the point.
    bits = exponent.add_(192).view(torch.int32)
    mantissa = _powers_of_two().to(bits.device).index_select(0, bits & 0xFFFF)
    return mantissa << WEIGHT_BITS - 23 >> 64 - (bits >> 16 & 0x7F)


@functools.cache
def _powers_of_two() -> Tensor:
    """2^(23 + x) for the 2^16 numbers x in [0, 1) with 16 bits: int64 [65536]"""
    x = torch.arange(2**16, dtype=torch.float64) / 2**16
    power = torch.zeros_like(x)
    for coefficient in EXP2:
        # As fused instructions: fp64 has all bits of the sum, and it is rounded once.
        power = (power * x + coefficient / 2**24).float().double()
    return (power * 2**23).long()


def _cut(weights: Tensor, values: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Weights of one row [V], 0 for what top_k, then top_p, then min_p do not keep."""
    if 0 < top_k < len(values):
        weights = weights.where(values >= values.topk(top_k).values[-1], 0)
    if top_p < 1:
        weights = weights.where(values >= _smallest_kept(weights, values, top_p), 0)
    if min_p > 0:
        weights = weights.where(weights >= math.ceil(min_p * 2**WEIGHT_BITS), 0)
    return weights


def _smallest_kept(weights: Tensor, values: Tensor, top_p: float) -> Tensor:
    """The least of the largest values that hold top_p of the weights."""
    wanted = -_product(-top_p, int(weights.sum()))  # rounded up
    ids = values.topk(min(NUM_CANDIDATES, len(values))).indices
    if weights[ids].sum() < wanted:
        ids = values.argsort(descending=True)
    return values[ids[torch.searchsorted(weights[ids].cumsum(0), wanted)]]


def _product(share: float, total: int) -> int:
    """share * total, rounded down; of the share's fraction 53 bits count."""
    return int(share * 2**53) * total >> 53


def logprobs(logits: Tensor, token_ids: Tensor, num_top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax(logits) of the given tokens, and ids and values of each row's num_top likeliest

    The most likely come first; the lower id first where they tie. logits [S, V], token_ids [S];
    num_top int32 [S], from 0 to MAXIMUM_TOP, or -1 for a row of which nothing is told -> fp32 [S],
    int32 [S, MAXIMUM_TOP], fp32 [S, MAXIMUM_TOP]. What is not told is anything, and NaN that of
    token -1.
    """
    num_rows = len(logits)
    assert token_ids.shape == num_top.shape == (num_rows,)
    chosen = logits.new_empty(num_rows, dtype=torch.float32)
    top_ids = logits.new_empty(num_rows, MAXIMUM_TOP, dtype=torch.int32)
    top = logits.new_empty(num_rows, MAXIMUM_TOP, dtype=torch.float32)
    for row, (token_id, count) in enumerate(zip(token_ids.tolist(), num_top.tolist(), strict=True)):
        if count < 0:
            continue
        values = logits[row].float()
        normaliser = values.logsumexp(0)
        chosen[row] = values[token_id] - normaliser if token_id >= 0 else math.nan
        if count:
            # topk does not say which of equal values it takes: ask for all that tie with the last.
            candidates = (values >= values.topk(count).values[-1]).nonzero().squeeze(1)
            order = values[candidates].argsort(descending=True, stable=True)
            ids = candidates[order[:count]]
            top_ids[row, :count] = ids
            top[row, :count] = values[ids] - normaliser
    return chosen, top_ids, top


def transfer(source: Tensor, target: Tensor) -> None:
    """target <- source, of one dtype and shape, one of them on a GPU and the other in pinned memory

    Enqueued on the current stream. Where there is no GPU it is done at once.
    """
    target.copy_(source, non_blocking=True)
