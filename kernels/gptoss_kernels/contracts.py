"""What every implementation of the FP8 operators demands of its tensors, refused in words.

And room for what they give: scales are laid out as the copy engine reads them. All checks raise
ValueError with what was wanted and what was got; an implementation adds its own limits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptoss_kernels.fp8 import BLOCK

GROUPS = (64, 128)  # columns of an activation that may share a scale
MAXIMUM_EXPERTS = 512
MAXIMUM_CHOICES = 2**30  # kernels count them, and some beyond the last, with 31 bits


HEAD_DIM = 64  # of attention's kernels
PAGE_SIZES = (16, 32, 64, 128, 256)
FLASHINFER_PAGE_SIZES = PAGE_SIZES[:-1]  # which its XQA has
GROUPS_OF_HEADS = (1, 2, 4, 8, 16)  # query heads that share a key-value head
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
MAXIMUM_SEQUENCES = 4096
MAXIMUM_DECODE_QUERIES = 8  # of one sequence; with more it is a prefill
LEAST_TEMPERATURE = 1e-5  # below it logits / temperature overflows, and the largest wins anyway
MAXIMUM_TOP = 20  # tokens whose log-probabilities are told beside the chosen one's
LOGITS_DTYPES = (torch.bfloat16, torch.float32)
MAXIMUM_VOCABULARY = 261_632  # kernels add up the weights of 1/64 of it, of 21 bits, with 32


class LibraryError(RuntimeError):
    """A library behind an implementation is not there, or cannot do what was asked of it."""


class Decodes(NamedTuple):
    """What the host knows of a batch's first sequences, which have few queries each.

    num_sequences; num_queries: their rows together; max_queries: the most of one. Kernels of their
    own attend for them, with as many blocks as the lengths of their contexts ask for. All other
    sequences are prefills, and a prefill may have any number of queries, so it is never wrong to
    name none.
    """

    num_sequences: int = 0
    num_queries: int = 0
    max_queries: int = 0


NO_DECODES = Decodes()


class Dispatched(NamedTuple):
    """Tokens quantised and in the order of their experts: R = T K rows.

    values e4m3 [R, H]; scale fp32 [R, ceil(H / 128)], laid out as empty_scale does; expert_start
    int32 [E + 1]; rows int32 [T, K]: where each token's rows lie.
    """

    values: Tensor
    scale: Tensor
    expert_start: Tensor
    rows: Tensor


class SamplingRows(NamedTuple):
    """How each of the S rows of logits becomes a token, and what is told of it.

    temperature fp64 [S], greedy below LEAST_TEMPERATURE; top_p, min_p fp64 [S], 1 and 0 cut
    nothing; uniforms fp64 [S], in [0, 1); top_k int32 [S], cuts nothing if it is below 1, or not
    below V; masked_start int32 [S + 1] and masked_ids int32 [M]: row r must not become one of
    masked_ids[masked_start[r] : masked_start[r + 1]]; num_top int32 [S]: how many of the most
    likely tokens are told with their log-probabilities, up to MAXIMUM_TOP, or -1 for none and not
    the chosen one's either.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor
    top_k: Tensor
    masked_start: Tensor
    masked_ids: Tensor
    num_top: Tensor

    def of_rows(self, first: int, last: int) -> SamplingRows:
        """Of some of the rows."""
        columns = SamplingRows(*(column[first:last] for column in self))
        start = self.masked_start[first : last + 1]
        return columns._replace(masked_start=start, masked_ids=self.masked_ids)


class Penalties(NamedTuple):
    """What is changed of G rows of logits before tokens are chosen of them.

    rows int32 [G]: which of the logits', 0 to S - 1. newest int32 [G]: which of the step's input
    ids is the answer's newest token, where the entries do not count it yet; else -1. repetition,
    frequency, presence fp32 [G]: of the penalties 1, 0 and 0 change nothing. start int32 [G + 1],
    token_ids, counts int32 [N], biases fp32 [N]: row g has the entries from start[g] up to
    start[g + 1], each of another token: how often it is in the answer, 0 where it is in the prompt
    alone, -1 where it is in neither, and what is added to its logit.
    """

    rows: Tensor
    newest: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    start: Tensor
    token_ids: Tensor
    counts: Tensor
    biases: Tensor

    def of_rows(self, first: int, last: int) -> Penalties:
        """Of some of the rows."""
        names = ("rows", "newest", "repetition", "frequency", "presence")
        columns = {name: getattr(self, name)[first:last] for name in names}
        return self._replace(**columns, start=self.start[first : last + 1])


class Mixture(NamedTuple):
    """What each token's experts gave: sum_k weights[t, k] * outputs[rows[t, k]], not yet added up.

    outputs [R, H]; rows int32 [T, K]; weights [T, K] in outputs' dtype. Summed in fp32 in the order
    of k, then added to what it is an update of, and rounded once. A weight of 0 adds nothing,
    whatever lies in its row, or where it is none.
    """

    outputs: Tensor
    rows: Tensor
    weights: Tensor


class Routed(NamedTuple):
    """Where each token goes: normed [T, H]; chosen [T, K] int64, -1 for none; weights [T, K]."""

    normed: Tensor
    chosen: Tensor
    weights: Tensor


def empty_scale(rows: int, columns: int, device: torch.device | str, group: int = BLOCK) -> Tensor:
    """Room for the scales [rows, ceil(columns / group)] fp32 of an `x` [rows, columns].

    Stored by column, each column padded to 16 bytes: as the copy engine reads them.
    """
    padded = -(-rows // 4) * 4
    # One call of PyTorch's, or two: an allocation, t() and [:rows] cost the host three times that.
    shape = (padded, -(-columns // group))
    scale = torch.empty_strided(shape, (1, padded), dtype=torch.float32, device=device)
    return scale if rows == padded else scale[:rows]


def empty_quantised(
    rows: int, columns: int, device: torch.device | str, group: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Room for values e4m3 [rows, columns] and their scales."""
    values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
    return values, empty_scale(rows, columns, device, group)


def empty_dispatched(x: Tensor, chosen: Tensor, num_experts: int) -> Dispatched:
    """Room for what dispatch_fp8 gives of checked tensors."""
    return Dispatched(
        *empty_quantised(chosen.numel(), x.shape[1], x.device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=x.device),
        torch.empty(chosen.shape, dtype=torch.int32, device=x.device),
    )


def x_group(x: Tensor, x_scale: Tensor) -> int:
    """How many columns of x share a scale, by the shapes; 64 if neither fits."""
    is_coarse = x.dim() == 2 and x_scale.shape[-1:] == (-(-x.shape[1] // BLOCK),)
    return BLOCK if is_coarse else 64


def sizes(x: Tensor, weight: Tensor, dimensions: int) -> tuple[int, int, int]:
    """M, N and K of `x` [M, K] and `weight` [N, K], or with 3 dimensions [E, N, K]."""
    if x.dim() != 2 or weight.dim() != dimensions or x.shape[1] != weight.shape[-1]:
        named = "[N, K]" if dimensions == 2 else "[E, N, K]"
        raise ValueError(
            f"x [M, K] and weight {named} must agree in K, got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    return x.shape[0], weight.shape[-2], x.shape[1]


def check_inputs(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    dimensions: int = 2,
    x_group: int = BLOCK,
) -> None:
    """Of a product: `x` [M, K] and `weight` [N, K], or with 3 dimensions [E, N, K].

    Without `x_scale` x is bf16, and quantised on the way.
    """
    check_type("x", x, torch.bfloat16 if x_scale is None else torch.float8_e4m3fn, x)
    if x_scale is not None:
        check_type("x_scale", x_scale, torch.float32, x)
    check_type("weight", weight, torch.float8_e4m3fn, x)
    check_type("weight_scale", weight_scale, torch.float32, x)
    m, n, k = sizes(x, weight, dimensions)
    if n % 8 or k % 16 or n == 0 or k == 0:
        raise ValueError(f"N must be a multiple of 8 and K of 16, got N={n}, K={k}")
    experts = weight.shape[:-2]
    check_shape("weight_scale", weight_scale, (*experts, -(-n // BLOCK), -(-k // BLOCK)))
    check_contiguous("weight_scale", weight_scale)
    if bias is not None:
        check_type("bias", bias, torch.float32, x)
        check_shape("bias", bias, (*experts, n))
        check_contiguous("bias", bias)
    if experts:
        check_contiguous("weight", weight)
        check_start("weight", weight)
    else:
        check_rows("weight", weight)
    check_rows("x", x)
    if x_scale is not None:
        check_shape("x_scale", x_scale, (m, -(-k // x_group)))
        check_scale("x_scale", x_scale)


def check_output(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    x: Tensor,
    x_name: str = "x",
) -> None:
    """A matrix by rows, or fp32 scales by columns."""
    check_type(name, tensor, dtype, x, x_name)
    check_shape(name, tensor, shape)
    if dtype == torch.float32:
        check_scale(name, tensor)
    else:
        check_rows(name, tensor)


def check_gpu(x: Tensor, name: str = "x") -> None:
    if not x.is_cuda:
        raise ValueError(f"{name} must be on a GPU, got {x.device}")


def check_type(name: str, tensor: Tensor, dtype: torch.dtype, x: Tensor, x_name: str = "x") -> None:
    """Of a tensor beside `x`, which is called `x_name`."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ValueError(
            f"{name} must be on the device of {x_name}, got {tensor.device} and {x.device}"
        )


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_rows(name: str, matrix: Tensor) -> None:
    """As the copy engine and wide stores want a matrix."""
    rows, columns = matrix.shape
    if rows == 0:
        return
    pitch = matrix.stride(0)
    if matrix.stride(1) != 1 or pitch < columns or pitch * matrix.element_size() % 16:
        raise ValueError(
            f"{name} must have adjacent columns, and rows of their own at multiples of 16 bytes, "
            f"got strides {matrix.stride()}"
        )
    check_pitch(name, pitch)
    check_start(name, matrix)


def check_scale(name: str, scale: Tensor) -> None:
    rows = scale.shape[0]
    if rows == 0:
        return
    if (rows > 1 and scale.stride(0) != 1) or scale.stride(1) % 4 or scale.stride(1) < rows:
        raise ValueError(
            f"{name} must be stored by column, columns at multiples of 4 elements "
            f"(see empty_scale), got strides {scale.stride()} for {rows} rows"
        )
    check_pitch(name, scale.stride(1))
    check_start(name, scale)


def check_pitch(name: str, pitch: int) -> None:
    """Kernels are told it in 32 bits."""
    if pitch >= 2**31:
        raise ValueError(f"{name} must have a stride below 2^31 elements, got {pitch}")


def check_start(name: str, tensor: Tensor) -> None:
    if beyond := tensor.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes, got {beyond} beyond one")


def check_grouped_inputs(
    x: Tensor,
    x_scale: Tensor,
    expert_start: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    x_group: int,
) -> None:
    """Of the grouped products, but for the values of `expert_start`, which stay on the device."""
    check_inputs(*(x, x_scale, weight, weight_scale, bias), dimensions=3, x_group=x_group)
    check_num_experts(len(weight))
    check_type("expert_start", expert_start, torch.int32, x)
    check_shape("expert_start", expert_start, (len(weight) + 1,))
    check_contiguous("expert_start", expert_start)


def check_swiglu_sizes(weight: Tensor, group: int) -> None:
    """Of grouped_swiglu_fp8: `weight` is [E, 2 I, H], what it gives has groups of `group`."""
    check_group(group)
    inner = weight.shape[1] // 2
    if inner % 16:
        raise ValueError(f"I must be a multiple of 16, got {inner}")


def check_group(group: int) -> None:
    if group not in GROUPS:
        raise ValueError(f"group must be 64 or 128, got {group}")


def check_row_matrix(name: str, matrix: Tensor, x: Tensor, x_name: str = "x") -> None:
    """bf16, in rows of a multiple of 16 columns, as 16-byte accesses want them."""
    check_type(name, matrix, torch.bfloat16, x, x_name)
    if matrix.dim() != 2 or matrix.shape[1] % 16 or not matrix.shape[1]:
        raise ValueError(
            f"{name} must be a matrix with a multiple of 16 columns, got {list(matrix.shape)}"
        )
    check_rows(name, matrix)


def check_quantised(
    out: tuple[Tensor, Tensor], shape: tuple[int, int], x: Tensor, group: int = BLOCK
) -> None:
    """Room for values of `shape` and their scales."""
    values, scale = out
    check_output("values", values, torch.float8_e4m3fn, shape, x)
    check_output("scale", scale, torch.float32, (shape[0], -(-shape[1] // group)), x)


def check_rms_norm_inputs(hidden: Tensor, weight: Tensor, update: Tensor | Mixture | None) -> None:
    """Of rms_norm and rms_norm_fp8."""
    check_row_matrix("hidden", hidden, hidden)
    check_type("weight", weight, torch.float32, hidden, "hidden")
    check_shape("weight", weight, (hidden.shape[1],))
    check_contiguous("weight", weight)
    check_start("weight", weight)
    if update is not None:
        _check_update(hidden, update)


def check_reduction_inputs(hidden: Tensor, update: Tensor | Mixture) -> None:
    """Of a reduction, beside those of its norm."""
    check_row_matrix("hidden", hidden, hidden)
    _check_update(hidden, update)


def _check_update(hidden: Tensor, update: Tensor | Mixture) -> None:
    if isinstance(update, Mixture):
        check_combine_inputs(*update)
        check_type("outputs", update.outputs, torch.bfloat16, hidden, "hidden")
        check_shape("outputs", update.outputs, (len(update.outputs), hidden.shape[1]))
        check_shape("rows", update.rows, (len(hidden), update.rows.shape[1]))
    else:
        check_shape("update", update, tuple(hidden.shape))
        check_row_matrix("update", update, hidden, "hidden")


def check_own_experts(experts: range, num_experts: int) -> None:
    """Those of all that a rank has."""
    if experts.step != 1 or not 0 <= experts.start < experts.stop <= num_experts:
        raise ValueError(f"experts must be some of range(0, {num_experts}), got {experts}")


def check_select_inputs(
    rows: Tensor, table: Tensor, rows_name: str = "rows", table_name: str = "hidden"
) -> None:
    """Of select_rows and embedding, but for the values of `rows`, which stay on the device."""
    check_row_matrix(table_name, table, table)
    if rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{rows_name} must be torch.int64 or torch.int32, got {rows.dtype}")
    check_type(rows_name, rows, rows.dtype, table, table_name)
    if rows.dim() != 1:
        raise ValueError(f"{rows_name} must have one dimension, got {list(rows.shape)}")
    check_contiguous(rows_name, rows)


def check_route_inputs(
    hidden: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor, num_chosen: int
) -> None:
    """Of norm_route."""
    check_rms_norm_inputs(hidden, norm_weight, None)
    check_type("weight", weight, torch.bfloat16, hidden, "hidden")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight must be [E, {hidden.shape[1]}], got {list(weight.shape)}")
    check_num_experts(len(weight))
    check_contiguous("weight", weight)
    check_start("weight", weight)
    check_type("bias", bias, torch.bfloat16, hidden, "hidden")
    check_shape("bias", bias, (len(weight),))
    check_contiguous("bias", bias)
    if not 1 <= num_chosen <= len(weight):
        raise ValueError(f"K must be 1 to {len(weight)}, the experts, got {num_chosen}")


def check_routed(out: Routed, hidden: Tensor, num_chosen: int) -> None:
    """Room for what norm_route gives of checked inputs."""
    normed, chosen, chosen_weights = out
    check_output("normed", normed, torch.bfloat16, tuple(hidden.shape), hidden, "hidden")
    for name, tensor, dtype in (
        ("chosen", chosen, torch.int64),
        ("chosen_weights", chosen_weights, torch.bfloat16),
    ):
        check_type(name, tensor, dtype, hidden, "hidden")
        check_shape(name, tensor, (len(hidden), num_chosen))
        check_contiguous(name, tensor)


def check_dispatch_inputs(x: Tensor, chosen: Tensor, num_experts: int) -> None:
    """Of dispatch_fp8, but for the values of `chosen`, which stay on the device."""
    if x.dim() != 2 or chosen.dim() != 2 or x.shape[0] != chosen.shape[0]:
        raise ValueError(
            f"x [T, H] and chosen [T, K] must agree in T, got {list(x.shape)} and "
            f"{list(chosen.shape)}"
        )
    check_row_matrix("x", x, x)
    if chosen.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"chosen must be torch.int64 or torch.int32, got {chosen.dtype}")
    check_type("chosen", chosen, chosen.dtype, x)
    check_contiguous("chosen", chosen)
    if not chosen.shape[1]:
        raise ValueError("K must be at least 1, got 0")
    check_num_experts(num_experts)
    if chosen.numel() > MAXIMUM_CHOICES:
        raise ValueError(f"T K must be at most {MAXIMUM_CHOICES}, got {chosen.numel()}")


def check_dispatched(out: Dispatched, x: Tensor, chosen: Tensor, num_experts: int) -> None:
    """Room for what dispatch_fp8 gives of checked inputs."""
    check_quantised((out.values, out.scale), (chosen.numel(), x.shape[1]), x)
    shapes = {"expert_start": (num_experts + 1,), "rows": tuple(chosen.shape)}
    for name, shape in shapes.items():
        tensor = getattr(out, name)
        check_type(name, tensor, torch.int32, x)
        check_shape(name, tensor, shape)
        check_contiguous(name, tensor)


def check_combine_inputs(
    outputs: Tensor, rows: Tensor, chosen_weights: Tensor, residual: Tensor | None = None
) -> None:
    """Of combine, but for the values of `rows`, which stay on the device."""
    check_row_matrix("outputs", outputs, outputs)
    check_type("rows", rows, torch.int32, outputs, "outputs")
    if rows.dim() != 2 or not rows.shape[1]:
        raise ValueError(f"rows must be [T, K], K at least 1, got {list(rows.shape)}")
    check_contiguous("rows", rows)
    check_type("chosen_weights", chosen_weights, torch.bfloat16, outputs, "outputs")
    check_shape("chosen_weights", chosen_weights, tuple(rows.shape))
    check_contiguous("chosen_weights", chosen_weights)
    if residual is not None:
        shape = (rows.shape[0], outputs.shape[1])
        check_output("residual", residual, torch.bfloat16, shape, outputs, "outputs")


def check_attention_inputs(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    sinks: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    window: int | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Of attention, but for the values of what says where things lie, which stay on the device."""
    if query.dim() != 3 or query.shape[2] != HEAD_DIM:
        raise ValueError(f"query must be [T, N, {HEAD_DIM}], got {list(query.shape)}")
    num_heads = query.shape[1]
    check_type("query", query, torch.bfloat16, query)
    check_contiguous("query", query)
    check_start("query", query)
    if query.shape[0] * num_heads >= 2**31:
        raise ValueError(f"query must have T N below 2^31, got {list(query.shape)}")
    check_caches(key_cache, value_cache, key_scale, value_scale, query, "query")
    num_kv_heads = key_cache.shape[1]
    if num_heads % num_kv_heads or num_heads // num_kv_heads not in GROUPS_OF_HEADS:
        raise ValueError(
            f"N / KV must be one of {', '.join(map(str, GROUPS_OF_HEADS))}, got {num_heads} query "
            f"and {num_kv_heads} key-value heads"
        )
    check_type("sinks", sinks, torch.float32, query, "query")
    check_shape("sinks", sinks, (num_heads,))
    check_contiguous("sinks", sinks)
    check_page_tables(page_tables)
    num_sequences = len(page_tables)
    for name, tensor, shape in (
        ("query_start", query_start, (num_sequences + 1,)),
        ("seq_lens", seq_lens, (num_sequences,)),
        ("page_tables", page_tables, tuple(page_tables.shape)),
    ):
        check_type(name, tensor, torch.int32, query, "query")
        check_shape(name, tensor, shape)
        check_contiguous(name, tensor)
    if window is not None and not 1 <= window < 2**31:
        raise ValueError(f"window must be 1 to 2^31 - 1, got {window}")


def check_page_tables(page_tables: Tensor) -> None:
    if page_tables.dim() != 2 or len(page_tables) > MAXIMUM_SEQUENCES:
        raise ValueError(
            f"page_tables must be [B, P], B at most {MAXIMUM_SEQUENCES}, got "
            f"{list(page_tables.shape)}"
        )


def check_score_scale(scale: float) -> None:
    """Of attention's kernels: the largest score is then that of the largest product."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")


def check_caches(
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    x: Tensor,
    x_name: str,
) -> None:
    """The paged cache of a layer, [P, KV, page_size, D], and what e4m3 is scaled by."""
    if key_cache.dtype not in CACHE_DTYPES:
        names = " or ".join(map(str, CACHE_DTYPES))
        raise ValueError(f"key_cache must be {names}, got {key_cache.dtype}")
    if key_cache.dim() != 4 or key_cache.shape[3] != HEAD_DIM:
        raise ValueError(
            f"key_cache must be [P, KV, page_size, {HEAD_DIM}], got {list(key_cache.shape)}"
        )
    num_pages, num_kv_heads, page_size, _ = key_cache.shape
    if not num_kv_heads:
        raise ValueError(f"key_cache must have at least 1 head, got {list(key_cache.shape)}")
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        raise ValueError(f"page_size must be one of {sizes}, got {page_size}")
    if num_pages * num_kv_heads * page_size >= 2**31:
        raise ValueError(
            f"key_cache must have P KV page_size below 2^31, got {list(key_cache.shape)}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_type(name, cache, key_cache.dtype, x, x_name)
        check_shape(name, cache, tuple(key_cache.shape))
        check_contiguous(name, cache)
        check_start(name, cache)
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is None:
            continue
        if key_cache.dtype == torch.bfloat16:
            raise ValueError(f"{name} must be None for caches of torch.bfloat16")
        check_type(name, scale, torch.float32, x, x_name)
        check_shape(name, scale, (num_kv_heads,))
        check_contiguous(name, scale)


def check_rope_inputs(
    qkv: Tensor,
    positions: Tensor,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    out: Tensor | None,
) -> None:
    """Of rope_and_cache_write, but for the values of positions and slots, which stay on the device.

    `out` is room for the queries, if there is any.
    """
    check_type("qkv", qkv, torch.bfloat16, qkv)
    check_caches(key_cache, value_cache, key_scale, value_scale, qkv, "qkv")
    num_kv_heads = key_cache.shape[1]
    least = (2 * num_kv_heads + 1) * HEAD_DIM
    if qkv.dim() != 2 or qkv.shape[1] % HEAD_DIM or qkv.shape[1] < least:
        raise ValueError(
            f"qkv must be [T, (N + 2 KV) * {HEAD_DIM}], N at least 1, got {list(qkv.shape)} for "
            f"{num_kv_heads} key-value heads"
        )
    if qkv.numel() >= 2**30 * HEAD_DIM:  # kernels number the heads of all tokens
        raise ValueError(f"qkv must have T (N + 2 KV) below 2^30, got {list(qkv.shape)}")
    check_contiguous("qkv", qkv)
    check_start("qkv", qkv)
    num_tokens, width = qkv.shape
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_type(name, tensor, torch.int64, qkv, "qkv")
        check_shape(name, tensor, (num_tokens,))
        check_contiguous(name, tensor)
    check_type("rope_table", rope_table, torch.float32, qkv, "qkv")
    if rope_table.dim() != 2 or rope_table.shape[1] != HEAD_DIM:
        raise ValueError(
            f"rope_table must be [positions, {HEAD_DIM}], got {list(rope_table.shape)}"
        )
    check_contiguous("rope_table", rope_table)
    check_start("rope_table", rope_table)
    if out is not None:
        check_type("out", out, torch.bfloat16, qkv, "qkv")
        check_shape("out", out, (num_tokens, width // HEAD_DIM - 2 * num_kv_heads, HEAD_DIM))
        check_contiguous("out", out)
        check_start("out", out)


def check_decodes(decodes: Decodes, num_tokens: int, num_sequences: int) -> None:
    """Of attention, in a batch of so many query rows and sequences."""
    for name, most in (
        ("num_sequences", num_sequences),
        ("num_queries", min(num_tokens, decodes.num_sequences * decodes.max_queries)),
        ("max_queries", MAXIMUM_DECODE_QUERIES),
    ):
        if not 0 <= getattr(decodes, name) <= most:
            raise ValueError(f"decodes.{name} must be 0 to {most}, got {getattr(decodes, name)}")


def check_num_experts(count: int) -> None:
    if not 0 < count <= MAXIMUM_EXPERTS:
        raise ValueError(f"there must be 1 to {MAXIMUM_EXPERTS} experts, got {count}")


def check_logits(logits: Tensor) -> None:
    """Of sampling's kernels."""
    if logits.dtype not in LOGITS_DTYPES:
        names = " or ".join(map(str, LOGITS_DTYPES))
        raise ValueError(f"logits must be {names}, got {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] % 8 or not logits.shape[1]:
        raise ValueError(f"logits must be [S, V], V a multiple of 8, got {list(logits.shape)}")
    if logits.shape[1] > MAXIMUM_VOCABULARY:
        raise ValueError(f"V must be at most {MAXIMUM_VOCABULARY}, got {logits.shape[1]}")
    check_rows("logits", logits)


def check_mask(mask: Tensor, rows: Tensor, logits: Tensor) -> None:
    """Of mask_logits beside checked logits, but for the values, which stay on the device."""
    for name, tensor in (("mask", mask), ("rows", rows)):
        check_type(name, tensor, torch.int32, logits, "logits")
    if rows.dim() != 1:
        raise ValueError(f"rows must be [G], got {list(rows.shape)}")
    check_shape("mask", mask, (len(rows), -(-logits.shape[1] // 32)))
    for name, tensor in (("mask", mask), ("rows", rows)):
        check_contiguous(name, tensor)


def check_penalties(logits: Tensor, input_ids: Tensor, penalties: Penalties, out: Tensor) -> None:
    """Beside checked logits [S, V], but for the values, which stay on the device."""
    num_rows, num_entries = penalties.rows.numel(), penalties.token_ids.numel()
    shapes = {"start": (num_rows + 1,), "token_ids": (num_entries,)}
    shapes |= dict.fromkeys(("counts", "biases"), (num_entries,))
    for name, tensor in penalties._asdict().items():
        is_real = name in ("repetition", "frequency", "presence", "biases")
        check_type(name, tensor, torch.float32 if is_real else torch.int32, logits, "logits")
        check_shape(name, tensor, shapes.get(name, (num_rows,)))
        check_contiguous(name, tensor)
    check_type("input_ids", input_ids, torch.int64, logits, "logits")
    check_shape("input_ids", input_ids, (input_ids.numel(),))
    check_contiguous("input_ids", input_ids)
    check_type("out", out, torch.float32, logits, "logits")
    check_shape("out", out, (num_rows, logits.shape[1]))
    check_rows("out", out)


def check_sampling_rows(rows: SamplingRows, logits: Tensor) -> None:
    """Beside checked logits [S, V], but for the values, which stay on the device."""
    num_rows = len(logits)
    for name, tensor in rows._asdict().items():
        is_real = name in ("temperature", "top_p", "min_p", "uniforms")
        check_type(name, tensor, torch.float64 if is_real else torch.int32, logits, "logits")
        if name == "masked_ids":
            if tensor.dim() != 1:
                raise ValueError(f"masked_ids must be [M], got {list(tensor.shape)}")
        else:
            check_shape(name, tensor, (num_rows + (name == "masked_start"),))
        check_contiguous(name, tensor)
