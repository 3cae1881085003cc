"""What sanitize.py runs: for each operator calls that reach each of its served kernels.

Sizes are small, with a remainder wherever a kernel has one: rows and columns beyond a tile, a lone
tile for two blocks of a cluster, an odd last one, experts without rows, more tiles than an H200 has
multiprocessors. Data is made, and the reference computed, on the CPU: its kernels are not tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Literal

import torch
from attention_cases import (
    E4M3_WEIGHT_BOUNDS,
    Case,
    exact,
    make_case,
    rounded_queries,
    without_decodes,
)
from reduction_cases import added
from sampling_cases import mixed_rows, penalized_case, spread_logits
from torch import Tensor

from gptoss_kernels import reference, steps
from gptoss_kernels.contracts import (
    GROUPS,
    HEAD_DIM,
    MAXIMUM_DECODE_QUERIES,
    MAXIMUM_TOP,
    Dispatched,
    Mixture,
    Penalties,
    Routed,
    SamplingRows,
    empty_scale,
)
from gptoss_kernels.cuda import attention_decode as decode
from gptoss_kernels.cuda import attention_prefill as prefill
from gptoss_kernels.cuda import (
    grouped_fp8,
    linear_fp8_few,
    logprobs,
    mask_logits,
    penalize_logits,
    rope,
    sample,
    transfer,
    unpack_step,
)
from gptoss_kernels.cuda import linear_fp8 as dense
from gptoss_kernels.cuda.build import SERVED_MODELS, ModelSizes
from gptoss_kernels.cuda.combine import choose_combine_layout, combine
from gptoss_kernels.cuda.combine import spec as combine_spec
from gptoss_kernels.cuda.compiler import KernelSpec
from gptoss_kernels.cuda.dispatch_fp8 import dispatch_fp8
from gptoss_kernels.cuda.dispatch_fp8 import specs as dispatch_specs
from gptoss_kernels.cuda.experts_fp8 import MAXIMUM_TOKENS, FewExpertsTile, experts_fp8_few
from gptoss_kernels.cuda.experts_fp8 import choose_tiles as choose_few_tiles
from gptoss_kernels.cuda.grouped_fp8 import GroupedTile
from gptoss_kernels.cuda.grouped_linear_fp8 import grouped_linear_fp8
from gptoss_kernels.cuda.grouped_swiglu_fp8 import grouped_swiglu_fp8
from gptoss_kernels.cuda.linear import MAXIMUM_ROWS, RowsTile, linear
from gptoss_kernels.cuda.linear_fp8 import LinearTile, linear_fp8
from gptoss_kernels.cuda.linear_fp8_few import FewTile, choose_few_tile
from gptoss_kernels.cuda.linear_fp8_rows import ManyRowsTile
from gptoss_kernels.cuda.norm_route import RouteTile, choice_spec, norm_route
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.quantise import spec as quantise_spec
from gptoss_kernels.cuda.reduction import Reduction, Room, empty_memory
from gptoss_kernels.cuda.reduction import choose_layout as choose_reduction_layout
from gptoss_kernels.cuda.reduction import spec as reduction_spec
from gptoss_kernels.cuda.rms_norm_fp8 import rms_norm, rms_norm_fp8
from gptoss_kernels.cuda.rms_norm_fp8 import spec as rms_norm_spec
from gptoss_kernels.cuda.rows import RowLayout, choose_layout
from gptoss_kernels.cuda.sampling import Cluster
from gptoss_kernels.cuda.select_rows import ROW_BYTES, select_rows
from gptoss_kernels.cuda.select_rows import spec as select_rows_spec
from gptoss_kernels.fp8 import BLOCK, E4M3
from gptoss_kernels.steps import NO_SEAT, PENDING, StepItem, StepTensors

TWIN = ":twin"  # behind the name of an operator
DEVICE = "cuda"
BOUND = 1e-2


@dataclass(frozen=True)
class Call:
    """The kernels that it launches, and the error of what they give: 0, or in norm of the whole.

    Right is what is below `bound`.
    """

    kernels: tuple[KernelSpec, ...]
    error: Callable[[], float]
    bound: float = BOUND


def norm_error(out: Tensor, expected: Tensor) -> float:
    """NaN where anything is missing; of whole numbers 0, or inf if any differs."""
    out = out.cpu()
    if not expected.is_floating_point():
        return 0.0 if torch.equal(out, expected) else float("inf")
    expected = expected.double()
    return ((out.double() - expected).norm() / expected.norm()).item()


def dequantised(values: Tensor, scale: Tensor) -> Tensor:
    columns = values.shape[1]
    group = BLOCK if scale.shape[1] == -(-columns // BLOCK) else 64
    return values.cpu().double() * scale.cpu().double().repeat_interleave(group, 1)[:, :columns]


def fp8_error(out: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return norm_error(dequantised(*out), dequantised(*expected))


def empty_bf16(rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=torch.bfloat16, device=DEVICE)


def empty_fp8(rows: int, columns: int, group: int = BLOCK) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), 0x7F, dtype=torch.uint8, device=DEVICE)
    scale = empty_scale(rows, columns, DEVICE, group).fill_(torch.nan)
    return values.view(torch.float8_e4m3fn), scale


def on_gpu(*tensors: Tensor) -> list[Tensor]:
    """Written before any kernel: some inputs are read while the one before still runs.

    Strides are kept, which Tensor.cuda() does only for those without gaps: scales have gaps.
    """
    copies = []
    for tensor in tensors:
        room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        copies.append(room.copy_(tensor))
    torch.cuda.synchronize()
    return copies


# ---- bound by memory --------------------------------------------------------------------------

FEW_AND_MANY = (1, 2000)  # rows, on both sides of what the layouts depend on
ROWS = (1, 37)
WIDTHS = sorted(
    {w for m in SERVED_MODELS.values() for w in (m.hidden, m.attention, m.intermediate)}
)


def layouts_of(columns: int) -> Iterable[RowLayout]:
    return dict.fromkeys(choose_layout(rows, columns) for rows in FEW_AND_MANY)


def quantise_calls() -> Iterator[Call]:
    def error(rows: int, columns: int, layout: RowLayout, group: int) -> float:
        x = torch.randn(rows, columns).bfloat16()
        out = quantise(*on_gpu(x), group=group, layout=layout, out=empty_fp8(rows, columns, group))
        return fp8_error(out, reference.quantise(x, group))

    for columns, group in product(WIDTHS, GROUPS):
        for layout, rows in product(layouts_of(columns), ROWS):
            spec = quantise_spec(layout, group)
            yield Call((spec,), partial(error, rows, columns, layout, group))


# Of a token: what experts give the models, and one, of sums of pieces.
MIXTURES = sorted({(m.hidden, k) for m in SERVED_MODELS.values() for k in (1, m.experts_per_token)})


def mixture_of(tokens: int, columns: int, num_chosen: int) -> Mixture:
    outputs = torch.randn(tokens * num_chosen, columns).bfloat16()
    rows = torch.randperm(len(outputs)).int().view(tokens, num_chosen)
    return Mixture(outputs, rows, torch.rand(tokens, num_chosen).bfloat16())


def rms_norm_calls(*, is_fp8: bool) -> Iterator[Call]:
    """num_chosen: of an update that is a mixture; 0 for one that is rows, None for none."""

    def error(rows: int, columns: int, layout: RowLayout, num_chosen: int | None) -> float:
        hidden, weight = torch.randn(rows, columns).bfloat16(), torch.rand(columns) + 0.5
        gpu_hidden, gpu_weight = on_gpu(hidden, weight)
        update = gpu_update = None
        if num_chosen:
            update = mixture_of(rows, columns, num_chosen)
            gpu_update = Mixture(*on_gpu(*update))
        elif num_chosen == 0:
            update = torch.randn(rows, columns).bfloat16()
            (gpu_update,) = on_gpu(update)
        given, expected = (gpu_hidden, gpu_weight, 1e-5, gpu_update), (hidden, weight, 1e-5, update)
        if is_fp8:
            out = rms_norm_fp8(*given, layout=layout, out=empty_fp8(rows, columns))
            found = fp8_error(out, reference.rms_norm_fp8(*expected))
        else:
            out = rms_norm(*given, layout=layout, out=empty_bf16(rows, columns))
            found = norm_error(out, reference.rms_norm(*expected))
        return max(found, norm_error(gpu_hidden, hidden))

    updates = [(columns, k) for columns in {c for c, _ in MIXTURES} for k in (None, 0)]
    for columns, num_chosen in (*updates, *MIXTURES):
        for layout, rows in product(layouts_of(columns), ROWS):
            spec = rms_norm_spec(layout, is_fp8=is_fp8, num_chosen=num_chosen or 0)
            yield Call((spec,), partial(error, rows, columns, layout, num_chosen))


def reduction_calls() -> Iterator[Call]:
    """One rank by itself: what the others would send lies in its inbox before.

    A sanitizer may let no two kernels run at once, so none may wait for another.
    """

    def error(
        columns: int, layout: RowLayout, ranks: int, two_shot: bool, num_chosen: int, is_fp8: bool
    ) -> float:
        rank, tokens, blocks = 1, 37, 3
        room = Room.of(ranks, columns, 64, one_shot=0 if two_shot else 64)
        memory = [empty_memory(room, DEVICE) for _ in range(ranks)]
        others = [torch.randn(tokens, columns).bfloat16() for _ in range(ranks - 1)]
        if num_chosen:
            own = mixture_of(tokens, columns, num_chosen)
            update = Mixture(*on_gpu(*own))
        else:
            own = torch.randn(tokens, columns).bfloat16()
            (update,) = on_gpu(own)
        hidden, weight = torch.randn(tokens, columns).bfloat16(), torch.rand(columns) + 0.5
        expected = added(hidden, [*others[:rank], own, *others[rank:]])

        shape = (2, room.slots[two_shot], 1 + two_shot, ranks - 1, columns)
        inbox = torch.full(shape, -1, dtype=torch.int16).view(torch.bfloat16)
        for part, (sender, sent) in enumerate(
            zip((r for r in range(ranks) if r != rank), others, strict=True)
        ):
            for row in range(tokens):
                slot, adds_up = divmod(row, ranks) if two_shot else (row, rank)
                if adds_up == rank:
                    inbox[0, slot, 0, part] = sent[row]
                elif adds_up == sender:
                    inbox[0, slot, 1, part] = expected[row]
        memory[rank].view(torch.bfloat16)[: inbox.numel()] = on_gpu(inbox.flatten())[0]
        addresses = [each.data_ptr() for each in memory]
        reduction = Reduction(
            *(rank, room, addresses, memory[rank]), limit=10.0, num_blocks=blocks, layout=layout
        )
        gpu_hidden, gpu_weight = on_gpu(hidden, weight)
        if not is_fp8:
            return norm_error(reduction.add(gpu_hidden, update), expected)
        out = empty_fp8(tokens, columns)
        reduction.rms_norm_fp8(gpu_hidden, gpu_weight, 1e-5, update, out=out)
        wanted = reference.rms_norm_fp8(expected, weight, 1e-5)
        return max(norm_error(gpu_hidden, expected), fp8_error(out, wanted))

    forms = {(m.hidden, k, False) for m in SERVED_MODELS.values() for k in (0, 1)}
    forms |= {(m.hidden, m.experts_per_token, False) for m in SERVED_MODELS.values()}
    forms |= {(columns, k, True) for columns, k in MIXTURES}
    for (columns, num_chosen, is_fp8), ranks in product(sorted(forms), (2, 4, 8)):
        layouts = dict.fromkeys(choose_reduction_layout(n, columns, ranks) for n in FEW_AND_MANY)
        for layout, two_shot in product(layouts, (False,) if ranks == 2 else (False, True)):
            kind = {"num_chosen": num_chosen, "has_norm": is_fp8, "is_fp8": is_fp8}
            kernel = reduction_spec(layout, ranks, two_shot=two_shot, **kind)
            given = (columns, layout, ranks, two_shot, num_chosen, is_fp8)
            yield Call((kernel,), partial(error, *given))


def dispatch_calls() -> Iterator[Call]:
    def error(tokens: int, model: ModelSizes, launches: Literal[1, 3, 4]) -> float:
        x = torch.randn(tokens, model.hidden).bfloat16()
        shape = (tokens, model.experts_per_token)
        chosen = torch.randint(0, model.num_experts, shape)
        starts, rows = (
            torch.full(size, -7, dtype=torch.int32, device=DEVICE)
            for size in ((model.num_experts + 1,), shape)
        )
        room = Dispatched(*empty_fp8(chosen.numel(), model.hidden), starts, rows)
        out = dispatch_fp8(
            *on_gpu(x, chosen), num_experts=model.num_experts, out=room, launches=launches
        )
        expected = reference.dispatch_fp8(x, chosen, model.num_experts)
        return max(
            norm_error(out.expert_start, expected.expert_start),
            norm_error(out.rows, expected.rows),
            fp8_error(out[:2], expected[:2]),
        )

    for model in SERVED_MODELS.values():
        specs = dispatch_specs(model.hidden, model.num_experts, model.experts_per_token)
        few, *many = specs.values()
        ways: tuple[tuple[Literal[1, 3, 4], list[KernelSpec]], ...]
        ways = ((1, [few]), (3, many[:3]), (4, many))
        for (launches, kernels), tokens in product(ways, (1, 150)):
            yield Call(tuple(kernels), partial(error, tokens, model, launches))


def combine_calls() -> Iterator[Call]:
    def error(tokens: int, columns: int, num_chosen: int, layout: RowLayout) -> float:
        inputs = mixture_of(tokens, columns, num_chosen)
        residual = torch.randn(tokens, columns).bfloat16()
        *given, gpu_residual = on_gpu(*inputs, residual)
        options = {"layout": layout, "out": empty_bf16(tokens, columns)}
        out = combine(*given, residual=gpu_residual, **options)
        return norm_error(out, reference.combine(*inputs, residual=residual))

    for columns, chosen in MIXTURES:
        layouts = (choose_combine_layout(tokens, columns, chosen) for tokens in FEW_AND_MANY)
        for layout, tokens in product(dict.fromkeys(layouts), ROWS):
            spec = combine_spec(layout, chosen)
            yield Call((spec,), partial(error, tokens, columns, chosen, layout))


def select_calls() -> Iterator[Call]:
    def error(rows: int, columns: int, row_type: torch.dtype, layout: RowLayout) -> float:
        table, chosen = torch.randn(9, columns).bfloat16(), torch.arange(rows).to(row_type) - 1
        gpu_table, gpu_chosen = on_gpu(table, chosen)
        out = select_rows(gpu_table, gpu_chosen, layout=layout, out=empty_bf16(rows, columns))
        expected = reference.select_rows(table, chosen)
        return norm_error(out.nan_to_num(9), expected.nan_to_num(9))

    for columns in sorted({model.hidden for model in SERVED_MODELS.values()}):
        for layout, rows, row_type in product(layouts_of(columns), ROWS, ROW_BYTES):
            spec = select_rows_spec(layout, row_type)
            yield Call((spec,), partial(error, rows, columns, row_type, layout))


def route_calls() -> Iterator[Call]:
    """Whole tiles and parts of one, and more tiles than there are clusters."""

    def error(tokens: int, model: ModelSizes, together: bool) -> float:
        signs = torch.randint(2, (tokens, model.hidden)) * 2 - 1
        # Norms of 1 and -1, small whole numbers as weights: exact logits, many of them equal.
        weight = torch.randint(-2, 3, (model.num_experts, model.hidden))
        weight[:, torch.arange(model.hidden) % 73 > 0] = 0
        inputs = (signs.bfloat16(), torch.ones(model.hidden), weight.bfloat16())
        bias = torch.randint(-2, 3, (model.num_experts,)).bfloat16()
        chosen = model.experts_per_token
        hidden, norm_weight, router, router_bias = on_gpu(*inputs, bias)
        out = Routed(
            empty_bf16(tokens, model.hidden),
            torch.full((tokens, chosen), -7, device=DEVICE),
            empty_bf16(tokens, chosen),
        )
        norm_route(
            *(hidden, norm_weight, 1e-5, router, router_bias, chosen), out=out, together=together
        )
        expected = reference.norm_route(*inputs[:2], 1e-5, inputs[2], bias, chosen)
        return max(
            norm_error(out.normed, expected.normed),
            norm_error(out.chosen, expected.chosen),
            norm_error(out.weights, expected.weights),
        )

    for model in SERVED_MODELS.values():
        experts, chosen = model.num_experts, model.experts_per_token
        tile = RouteTile(model.hidden, experts, chosen)
        layouts = {choose_layout(tokens, model.hidden) for tokens in ROWS}
        norms = tuple(rms_norm_spec(layout, is_fp8=False) for layout in layouts)
        for tokens in (*ROWS, 1100):
            yield Call((tile.spec,), partial(error, tokens, model, True))
        for tokens in ROWS:
            kernels = (*norms, choice_spec(experts, chosen))
            yield Call(kernels, partial(error, tokens, model, False))


# ---- products ---------------------------------------------------------------------------------

# Of an H200, for each tile that any of the served models takes.
NUM_BLOCKS = 132
LINEAR_TOKENS = (1, 30, 65, 193, 257, 520, 577, 1024, 32768)
LINEAR_TILES = dict.fromkeys(
    dense.choose_tile(tokens, n, k, NUM_BLOCKS)
    for tokens in LINEAR_TOKENS
    for model in SERVED_MODELS.values()
    for n, k in ((model.qkv, model.hidden), (model.hidden, model.attention))
) | {dense.BY_MANY_TILE: None}
# Of each Hopper board.
FEW_TILES = dict.fromkeys(
    tile
    for model, tokens, num_blocks in product(SERVED_MODELS.values(), (8, 16), (132, 114, 78))
    for n, k in ((model.qkv, model.hidden), (model.hidden, model.attention))
    if (tile := choose_few_tile(tokens, n, k, num_blocks))
)
LONG_SUMS = (67, 136, 4096)  # one tile goes round any ring of slots
# Of two experts, between any two of choose_tile's limits.
GROUPED_ROWS = (1, 12, 50, 120, 200, 1000)
SWIGLU = {"alpha": 1.702, "limit": 7.0}


def e4m3(*shape: int) -> Tensor:
    return (torch.randn(shape) * 32).clamp(-448, 448).to(torch.float8_e4m3fn)


def product_inputs(rows: int, n: int, k: int, group: int, experts: tuple[int, ...]) -> list[Tensor]:
    """x, x_scale, weight, weight_scale, bias; products of about 1, biases of about 2."""
    x_scale = empty_scale(rows, k, "cpu", group)
    x_scale.copy_((torch.rand(x_scale.shape) + 0.5) / 64)
    weight_scale = (torch.rand(*experts, -(-n // 128), -(-k // 128)) + 0.5) / (16 * k**0.5)
    bias = torch.randn(*experts, n) * 2
    return [e4m3(rows, k), x_scale, e4m3(*experts, n, k), weight_scale, bias]


def twin_of(served: KernelSpec, difference: str, changes: Iterable[tuple[str, str]]) -> KernelSpec:
    """The same kernel but for `changes`, each of a place that is there once."""
    folder = Path(grouped_fp8.__file__).parent
    text = "".join((folder / name).read_text() for name in served.files)
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} is not once in {', '.join(served.files)}")
        text = text.replace(old, new)
    variant = f"{served.variant} {difference}"
    return replace(served, files=(), generated=served.generated + text, variant=variant)


def where_all_lanes_arrive(served: KernelSpec, changes: Iterable[tuple[str, str]]) -> KernelSpec:
    """Each lane of a warp says for itself that it has stored or loaded.

    As served, one lane says so for those that __syncwarp() ordered before it, which racecheck does
    not follow: it reports each of the stores with each of the loads that wait for them.
    """
    return twin_of(served, "all lanes arrive", changes)


@dataclass(frozen=True)
class LinearWhereBothWait(LinearTile):
    """Who took another warpgroup's sums waits, twice, with the one that puts the next ones there.

    As served it arrives at the named barrier and goes on. PTX orders what a thread has read before
    its arrival; racecheck reports each of the loads with the next tile's store. Where both wait it
    still reports those stores that come first: as it seems, a thread's loads are done for it when
    that thread has left a barrier, and both leave at once. Behind the second barrier all have left
    the first. The number of the one who waits is a constant here, too, in case it is that which
    racecheck does not follow.
    It would wait for ever of sums longer than the ring, of which a block here has one tile.
    """

    @property
    def spec(self) -> KernelSpec:
        both = (
            "{ named_sync(SUM_FREE_BARRIER + group, 256); "
            "named_sync(SUM_FREE_BARRIER + MATH_GROUPS + group, 256); }"
        )
        return twin_of(
            super().spec,
            "both wait",
            (
                (
                    "if (!is_last) named_arrive(SUM_FREE_BARRIER + group, 256);",
                    f"if (!is_last) {both}",
                ),
                (
                    "if (!is_first) named_sync(SUM_FREE_BARRIER + group, 256);",
                    f"if (!is_first) {both}",
                ),
                (
                    "const int group = k_group * M_GROUPS + m_group;",
                    "const int group = M_GROUPS == 1 && K_GROUPS == 2 ? 1 "
                    ": k_group * M_GROUPS + m_group;",
                ),
            ),
        )


def linear_calls(tile_class: type[LinearTile]) -> Iterator[Call]:
    def error(tile: LinearTile, m: int, n: int, k: int, residual: str, has_bias: bool) -> float:
        *inputs, bias = product_inputs(m, n, k, BLOCK, ())
        added = torch.randn(m, n).mul(2).bfloat16() if residual else None
        optional = bias if has_bias else None
        expected = reference.linear_fp8(*inputs, bias=optional, residual=added)
        gpu_inputs = on_gpu(*inputs)
        gpu_bias = on_gpu(bias)[0] if has_bias else None
        gpu_added = None if added is None else on_gpu(added)[0]
        room = gpu_added if residual == "in place" else empty_bf16(m, n)
        out = linear_fp8(*gpu_inputs, bias=gpu_bias, residual=gpu_added, out=room, tile=tile)
        return norm_error(out, expected)

    for served in LINEAR_TILES:
        tile = tile_class(**vars(served))
        # 13 tiles each way: more than blocks, and an odd last one in either direction of a cluster.
        several = (12 * tile.rows + 3, 12 * tile.columns + 8, 272)
        for shape, options in (
            ((1, 8, 16 + 128 * max(1, tile.k_groups - 1)), (("", True), ("in place", False))),
            ((130, 360, 400), (("", False), ("in place", True), ("elsewhere", True))),
            (several, (("", True), ("in place", False))),
            (LONG_SUMS, (("", True),)),
        ):
            for residual, has_bias in options:
                spec = replace(tile, has_residual=bool(residual)).spec
                yield Call((spec,), partial(error, tile, *shape, residual, has_bias))


def linear_rows_calls() -> Iterator[Call]:
    """Blocks go round their rings of slots, some once more than the others."""

    def error(m: int, n: int, k: int) -> float:
        x, weight = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        gpu_x, gpu_weight = on_gpu(x, weight)
        out = linear(gpu_x, gpu_weight, out=empty_bf16(m, n))
        return norm_error(out, reference.linear(x, weight))

    for k in sorted({model.hidden for model in SERVED_MODELS.values()}):
        for tokens in range(8, MAXIMUM_ROWS + 1, 8):
            tile = RowsTile(k, tokens)
            n = 8 * (NUM_BLOCKS * (tile.stages + 2) - 9)
            for m in (tokens - 7, tokens - 1):
                yield Call((tile.spec,), partial(error, m, n, k))


def linear_many_rows_calls() -> Iterator[Call]:
    """Likewise."""

    def error(tile: ManyRowsTile, m: int, n: int) -> float:
        *inputs, _ = product_inputs(m, n, tile.k, BLOCK, ())
        out = linear_fp8(*on_gpu(*inputs), out=empty_bf16(m, n), tile=tile)
        return norm_error(out, reference.linear_fp8(*inputs))

    for k in sorted({model.hidden for model in SERVED_MODELS.values()}):
        for tokens in (8, 16):
            tile = ManyRowsTile(k, tokens)
            n = 16 * (NUM_BLOCKS * (tile.stages + 2) - 9)
            for m in (tokens - 7, tokens - 1):
                yield Call((tile.spec,), partial(error, tile, m, n))


def linear_few_calls() -> Iterator[Call]:
    """The last block of threads has fewer rows, and one has rows of two of the weight's scales."""

    def error(tile: FewTile, m: int, residual: str, has_bias: bool) -> float:
        n = 136 // tile.rows * tile.rows + tile.rows + 8
        x, x_scale, weight, weight_scale, bias = product_inputs(m, n, tile.k, BLOCK, ())
        weights = (weight, weight_scale, bias if has_bias else None)
        added = torch.randn(m, n).mul(2).bfloat16() if residual else None
        if tile.quantises:
            x = x.float().div(64).bfloat16()
            expected = reference.quantised_linear_fp8(x, *weights, residual=added)
            (gpu_x,), gpu_scale = on_gpu(x), None
        else:
            expected = reference.linear_fp8(x, x_scale, *weights, residual=added)
            gpu_x, gpu_scale = on_gpu(x, x_scale)
        gpu_weight, gpu_weight_scale, gpu_bias = on_gpu(weight, weight_scale, bias)
        gpu_added = None if added is None else on_gpu(added)[0]
        room = empty_bf16(m, n)
        if gpu_added is not None and residual == "in place":
            room = gpu_added
        launch = linear_fp8_few.prepare(
            *(tile, gpu_x, gpu_scale, gpu_weight, gpu_weight_scale),
            *(gpu_bias if has_bias else None, gpu_added, room),
        )
        launch(torch.cuda.current_stream().cuda_stream)
        return norm_error(room, expected)

    quantising = (replace(tile, quantises=True) for tile in FEW_TILES if tile.tokens == 8)
    for served in (*FEW_TILES, *quantising):
        for residual, has_bias in (("", True), ("in place", False), ("elsewhere", True)):
            tile = replace(served, has_residual=bool(residual))
            for m in {1, tile.tokens - 1}:
                yield Call((tile.spec,), partial(error, tile, m, residual, has_bias))


def grouped_inputs(rows: tuple[int, ...], n: int, k: int, group: int) -> list[Tensor]:
    starts = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    x, x_scale, *weights = product_inputs(sum(rows), n, k, group, (len(rows),))
    return [x, x_scale, starts, *weights]


GROUPED_SHAPES = (  # rows of each expert, inner size, K
    ((1, 0, 63, 130, 0, 20), 176, 272),
    ((0, 257, 0, 65), 48, 2880),  # a tile's sums go round the ring of slots
    ((33,) * 40, 400, 144),
)


def swiglu_error(rows: tuple[int, ...], inner: int, k: int, group: int, tile: GroupedTile) -> float:
    inputs = grouped_inputs(rows, 2 * inner, k, BLOCK)
    out = empty_fp8(sum(rows), inner, group)
    grouped_swiglu_fp8(*on_gpu(*inputs), **SWIGLU, group=group, out=out, tile=tile)
    return fp8_error(out, reference.grouped_swiglu_fp8(*inputs, **SWIGLU, group=group))


def linear_error(rows: tuple[int, ...], n: int, k: int, group: int, tile: GroupedTile) -> float:
    inputs = grouped_inputs(rows, n, k, group)
    out = empty_bf16(sum(rows), n)
    grouped_linear_fp8(*on_gpu(*inputs), out=out, tile=tile)
    return norm_error(out, reference.grouped_linear_fp8(*inputs))


def swiglu_tiles(group: int) -> Iterable[GroupedTile]:
    options = {"x_group": BLOCK, "swiglu": True, "out_group": group}
    return dict.fromkeys(grouped_fp8.choose_tile(rows, 2, **options) for rows in GROUPED_ROWS)


def grouped_linear_tiles(group: int) -> Iterable[GroupedTile]:
    return dict.fromkeys(grouped_fp8.choose_tile(rows, 2, x_group=group) for rows in GROUPED_ROWS)


def swiglu_calls() -> Iterator[Call]:
    for group in GROUPS:
        for tile, shape in product(swiglu_tiles(group), GROUPED_SHAPES):
            yield Call((tile.spec,), partial(swiglu_error, *shape, group, tile))


def grouped_linear_calls() -> Iterator[Call]:
    for group in GROUPS:
        for tile, shape in product(grouped_linear_tiles(group), GROUPED_SHAPES):
            yield Call((tile.spec,), partial(linear_error, *shape, group, tile))


# Partial sums, and that they are read.
SUMS_ARRIVE = (
    ("SUMMED_OFFSET + slot * 8, WARPS);", "SUMMED_OFFSET + slot * 8, 32 * WARPS);"),
    ("if (lane == 0) barrier_arrive(shared + SUMMED", "barrier_arrive(shared + SUMMED"),
    ("FULL_OFFSET + slot * 8, 1);", "FULL_OFFSET + slot * 8, 32);"),
    (
        "} else if (lane < 3) {",
        "} else barrier_arrive(shared + FULL_OFFSET + slot * 8); if (lane == 1 || lane == 2) {",
    ),
)


# Of which the last one's choices are one expert's, and others' may be none's. Of the served sizes a
# block goes round its ring of slots. Of the most tokens experts have several entries.
FEW_TOKENS = (1, 3, MAXIMUM_TOKENS, 12, 16, 64)


def experts_error(tokens: int, tiles: tuple[FewExpertsTile, FewExpertsTile]) -> float:
    num_experts = 3
    num_chosen, hidden, inner = tiles[0].chosen, tiles[0].k, tiles[1].k
    x = torch.randn(tokens, hidden).bfloat16()
    chosen = torch.randint(-1, num_experts + 1, (tokens, num_chosen))
    chosen[-1] = 1
    shapes = ((2 * inner, hidden), (hidden, inner))
    weights = [
        each for n, k in shapes for each in product_inputs(1, n, k, BLOCK, (num_experts,))[2:]
    ]
    out, _ = experts_fp8_few(tiles, *on_gpu(x, chosen, *weights), **SWIGLU)
    right = reference.experts_fp8(x, chosen, *weights, **SWIGLU)
    is_expert = ((chosen >= 0) & (chosen < num_experts)).flatten()
    return norm_error(out.cpu()[is_expert], right[0][right[1].flatten()[is_expert]])


@dataclass(frozen=True)
class FewExpertsWhereAllArrive(FewExpertsTile):
    """Who has stored partial sums, and who has read them."""

    @property
    def spec(self) -> KernelSpec:
        return where_all_lanes_arrive(
            super().spec,
            (
                ("SUMMED_OFFSET + slot * 8, WARPS);", "SUMMED_OFFSET + slot * 8, 32 * WARPS);"),
                ("if (lane == 0) barrier_arrive(shared + SUMMED", "barrier_arrive(shared + SUMMED"),
                ("FULL_OFFSET + slot * 8, 1);", "FULL_OFFSET + slot * 8, 32);"),
                (
                    "} else if (lane < 3) {",
                    "} else barrier_arrive(shared + FULL_OFFSET + slot * 8); "
                    "if (lane == 1 || lane == 2) {",
                ),
            ),
        )


def few_sizes(model: ModelSizes) -> tuple[int, int, int, int]:
    return model.num_experts, model.hidden, model.intermediate, model.experts_per_token


def experts_calls(tile_class: type[FewExpertsTile]) -> Iterator[Call]:
    every = dict.fromkeys(
        (tokens, choose_few_tiles(tokens, *few_sizes(model)))
        for model, tokens in product(SERVED_MODELS.values(), FEW_TOKENS)
    )
    for tokens, served in every:
        if served is None:
            continue
        first, second = (tile_class(**vars(tile)) for tile in served)
        yield Call((first.spec, second.spec), partial(experts_error, tokens, (first, second)))


# ---- attention --------------------------------------------------------------------------------


def attention_error(
    attend: Callable[..., None], case: Case, compared_case: Case | None = None
) -> float:
    """compared_case: what is computed exactly, where it is not `case` itself."""
    tensors = dict(zip(case.tensors, on_gpu(*case.tensors.values()), strict=True))
    out = empty_bf16(len(case.query), case.query.shape[1] * HEAD_DIM)

    def attention(*inputs: Tensor, decodes: object, **options: object) -> Tensor:
        attend(*inputs, out, **options)
        return out

    return norm_error(replace(case, **tensors).run(attention), exact(compared_case or case))


# Some four tiles of 192 rows for each block of an H200, of up to eight blocks of keys: each ring of
# slots goes round. Then heads that are alone or many, small pages, and little else.
PREFILLS = (
    ([(900, 300), (700, 700), (130, 130), (260, 260), (1, 1), (70, 0)], (64, 8), 64),
    ([(300, 70), (0, 0), (65, 65), (16, 9)], (3, 3), 16),
    ([(200, 40), (33, 33)], (16, 1), 256),
)


# Who have read queries, tiles and values, and cleared or transposed values.
PREFILL_ARRIVALS = (
    ("if (lane == 0) barrier_arrive(empty);", "barrier_arrive(empty);"),
    (
        "if (lane == 0) barrier_arrive(shared + barrier + slot * 8);",
        "barrier_arrive(shared + barrier + slot * 8);",
    ),
    ("i * 8, MATH_WARPS + HELPERS);", "i * 8, (MATH_WARPS + HELPERS) * 32);"),
    ("END_CLEARED + i * 8, 1);", "END_CLEARED + i * 8, 32);"),
    ("START_CLEARED + i * 8, 1);", "START_CLEARED + i * 8, 32);"),
    ("KEY_EMPTY + i * 8, MATH_WARPS);", "KEY_EMPTY + i * 8, MATH_WARPS * 32);"),
    (
        "FP8 ? HELPERS : MATH_WARPS + HELPERS);",
        "32 * (FP8 ? HELPERS : MATH_WARPS + HELPERS));",
    ),
    ("TRANSPOSED_FULL + i * 8, HELPERS);", "TRANSPOSED_FULL + i * 8, HELPERS * 32);"),
    ("TRANSPOSED_EMPTY + i * 8, MATH_WARPS);", "TRANSPOSED_EMPTY + i * 8, MATH_WARPS * 32);"),
)


@dataclass(frozen=True)
class PrefillWhereAllArrive(prefill.PrefillTile):
    @property
    def spec(self) -> KernelSpec:
        return where_all_lanes_arrive(super().spec, PREFILL_ARRIVALS)


@dataclass(frozen=True)
class PrefillFp8WhereAllArrive(prefill.PrefillFp8Tile):
    @property
    def spec(self) -> KernelSpec:
        return where_all_lanes_arrive(super().spec, PREFILL_ARRIVALS)


PREFILL_TWINS = {
    prefill.PrefillTile: PrefillWhereAllArrive,
    prefill.PrefillFp8Tile: PrefillFp8WhereAllArrive,
}


def prefill_calls(*, are_twins: bool) -> Iterator[Call]:
    def error(tile: prefill.PrefillTile, shape: int, window: int | None) -> float:
        sequences, heads, page_size = PREFILLS[shape]
        case = make_case(
            sequences, heads=heads, page_size=page_size, window=window, dtype=tile.dtype
        )
        # What has queries is computed, decodes or not, over e4m3 with rounded queries and weights.
        rounded = rounded_queries(without_decodes(case)) if tile.dtype == E4M3 else case
        return attention_error(partial(prefill.attention_prefill, tile=tile), case, rounded)

    for served in prefill.served_tiles():
        tile = PREFILL_TWINS[type(served)](**vars(served)) if are_twins else served
        bound = E4M3_WEIGHT_BOUNDS.whole if tile.dtype == E4M3 else BOUND
        for shape, window in product(
            range(len(PREFILLS)), (20, 128) if tile.has_window else (None,)
        ):
            yield Call((tile.spec,), partial(error, tile, shape, window), bound)


@dataclass(frozen=True)
class DecodeWhereAllArrive(decode.DecodeTile):
    """Who left their sums to another warp, and who took them."""

    @property
    def spec(self) -> KernelSpec:
        return where_all_lanes_arrive(
            super().spec,
            (
                ("if (lane == 0) barrier_arrive(left(", "barrier_arrive(left("),
                (
                    "if (lane == 0 && i < count) barrier_arrive(taken",
                    "if (i < count) barrier_arrive(taken",
                ),
                ("barrier_init(left(warp, other), 1);", "barrier_init(left(warp, other), 32);"),
                ("barrier_init(taken(warp, other), 1);", "barrier_init(taken(warp, other), 32);"),
            ),
        )


def decodes_of(tile: decode.DecodeTile, queries: int) -> list[tuple[int, int]]:
    """Over 8 key-value heads: each warp of an H200 goes round its ring of slots."""
    keys = 0
    if tile.is_split:
        keys = NUM_BLOCKS * tile.blocks * tile.warps * (tile.slots + 1) * 64 // 8
    edges = [(queries, queries), (64, 1), (65, 1), (129, queries), (9, 0)]
    return [*edges, *((100 + keys // 2 * part // 3, queries) for part in (1, 2, 3))]


def decode_calls(tile_class: type[decode.DecodeTile]) -> Iterator[Call]:
    def error(tile: decode.DecodeTile, group: int, queries: int, window: int | None) -> float:
        dtype = E4M3 if tile.is_fp8 else torch.bfloat16
        sequences = decodes_of(tile, queries)
        case = make_case(sequences, heads=(8 * group, 8), window=window, dtype=dtype)
        return attention_error(
            partial(decode.attention_decode, tile=tile, max_queries=queries), case
        )

    shapes = {(model.group, model.window) for model in SERVED_MODELS.values()}
    reached: dict[decode.DecodeTile, tuple[int, int, int | None]] = {}
    for (group, window), queries, is_fp8, are_few in product(
        sorted(shapes), range(1, MAXIMUM_DECODE_QUERIES + 1), (False, True), (False, True)
    ):
        for seen in (None, window):
            served = decode.choose_tile(group, queries, window=seen, is_fp8=is_fp8, are_few=are_few)
            reached.setdefault(tile_class(**vars(served)), (group, queries, seen))
    for tile, options in reached.items():
        yield Call((tile.spec,), partial(error, tile, *options))


def rope_calls() -> Iterator[Call]:
    """Tokens of no slot, and of one beyond the caches, are not stored."""
    num_pages, page_size, num_positions = 5, 16, 50

    def error(dtype: torch.dtype, tokens: int, heads: int, kv_heads: int) -> float:
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * HEAD_DIM).bfloat16()
        table = torch.randn(num_positions, HEAD_DIM)
        positions = torch.randint(0, num_positions, (tokens,))
        slots = torch.randperm(num_pages * page_size)[:tokens]
        slots[5::7] = -1
        slots[3:4] = num_pages * page_size
        shape = (num_pages, kv_heads, page_size, HEAD_DIM)
        caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
        scales = torch.rand(2, kv_heads) / 64 + 0.01 if dtype == E4M3 else torch.ones(2, kv_heads)
        key_scale, value_scale = on_gpu(*scales) if dtype == E4M3 else (None, None)
        keys, values = on_gpu(*caches)
        gpu_qkv, gpu_positions, gpu_table, gpu_slots = on_gpu(qkv, positions, table, slots)
        query = rope.rope_and_cache_write(
            *(gpu_qkv, gpu_positions, gpu_table, keys, values, gpu_slots),
            *(key_scale, value_scale),
        )
        slots[3:4] = -1
        # Rounded to bf16 first, as the kernel does: else other values of e4m3 may be nearest.
        plain_keys, plain_values = (cache.float() for cache in caches)
        expected = reference.rope_and_cache_write(
            *(qkv.float(), positions, table, plain_keys, plain_values, slots)
        )
        found = [norm_error(query, expected)]
        for filled, cache, scale in zip(
            (keys, values), (plain_keys, plain_values), scales, strict=True
        ):
            stored = (cache.bfloat16() / scale[:, None, None]).clamp(-448, 448).to(dtype)
            found.append(norm_error(filled.float(), stored.float()))
        return max(found)

    for dtype, tokens, heads in product((torch.bfloat16, E4M3), ROWS, ((64, 8), (5, 2))):
        spec = rope.spec(is_fp8=dtype == E4M3)
        yield Call((spec,), partial(error, dtype, tokens, *heads))


def unpack_calls() -> Iterator[Call]:
    """A decode, a chunk that several blocks share, and what fills the batch."""
    page_size, width, seats = 16, 256, 3
    rows, new = (1, 2500, 1), (1, 5, 0)

    def error() -> float:
        items, first_row, first_word = [], 0, 0
        for seat, (num_rows, count) in enumerate(zip(rows, new, strict=True)):
            end = (100 + num_rows - 1) // page_size + 1
            seat, position = (seat, 100) if count else (NO_SEAT, 0)
            pages = (end - count, count) * 2
            items.append(StepItem(seat, position, first_row, num_rows, first_word, *pages))
            first_row, first_word = first_row + num_rows, first_word + num_rows + 2 * count
        words = torch.randint(1000, (first_word,), dtype=torch.int32)
        words[0] = PENDING
        full, window = torch.randint(1000, (2, seats, width), dtype=torch.int32)
        out = StepTensors.empty(first_row, len(items), width, "cpu")
        for each in out:
            each.fill_(-7)
        given = (torch.tensor(items, dtype=torch.int32), words, torch.arange(seats), full, window)
        found = on_gpu(*given, *out)
        unpack_step.unpack_step(
            *(found[0], found[1], found[2], found[3], found[4], StepTensors(*found[5:])),
            page_size=page_size,
            window=128,
        )
        steps.unpack_step(*given, out, page_size=page_size, window=128)
        expected = (*given, *out)
        return sum(not torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))

    yield Call((unpack_step.spec(),), error)


def sampling_calls() -> Iterator[Call]:
    """Rows of every sort, with and without tokens that must not come."""
    vocabulary = SERVED_MODELS["120b"].vocabulary

    def sampled(cluster: Cluster, dtype: torch.dtype) -> float:
        logits = spread_logits("peaked", 6, vocabulary, dtype, seed=0)
        rows = mixed_rows(logits, seed=0)
        gpu_logits, *gpu_rows = on_gpu(logits, *rows)
        found = sample.sample(gpu_logits, SamplingRows(*gpu_rows), cluster=cluster)
        return norm_error(found, reference.sample(logits, rows))

    def told() -> float:
        logits = spread_logits("tied", 3, vocabulary, torch.bfloat16, seed=0)
        given = logits, torch.tensor([7, 8, 9]), torch.full((3,), MAXIMUM_TOP, dtype=torch.int32)
        gpu_logits, gpu_ids, gpu_counts = on_gpu(*given)
        found = logprobs.logprobs(gpu_logits, gpu_ids, gpu_counts)
        expected = reference.logprobs(*given)
        return max(norm_error(found[i], expected[i]) for i in range(3))

    def masked() -> float:
        logits = spread_logits("peaked", 6, vocabulary, torch.bfloat16, seed=0)
        mask = torch.randint(-(2**31), 2**31, (4, -(-vocabulary // 32))).int()
        mask[0], mask[1] = -1, 0
        rows = torch.tensor([5, 0, 6, 3], dtype=torch.int32)
        gpu_logits, gpu_mask, gpu_rows = on_gpu(logits, mask, rows)
        mask_logits.mask_logits(gpu_logits, gpu_mask, gpu_rows)
        reference.mask_logits(logits, mask, rows)
        return float(not torch.equal(gpu_logits.cpu().view(torch.int16), logits.view(torch.int16)))

    def penalized() -> float:
        logits, input_ids, penalties = penalized_case(vocabulary)
        expected = torch.empty(len(penalties.rows), vocabulary)
        reference.penalize_logits(logits, input_ids, penalties, expected)
        gpu_logits, gpu_ids, *gpu_penalties = on_gpu(logits, input_ids, *penalties)
        found = torch.empty(expected.shape, device=DEVICE)
        penalize_logits.penalize_logits(gpu_logits, gpu_ids, Penalties(*gpu_penalties), found)
        return float(not torch.equal(found.cpu(), expected))

    yield Call((mask_logits.spec(),), masked)
    yield Call((penalize_logits.spec(),), penalized)
    for cluster, dtype in product((8, 16), (torch.bfloat16, torch.float32)):
        kernels = (sample.spec(vocabulary, dtype, cluster=cluster),)
        yield Call(kernels, partial(sampled, cluster, dtype))
    yield Call((logprobs.spec(vocabulary),), told)


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory()


def transfer_calls() -> Iterator[Call]:
    def error(from_host: bool) -> float:
        host = pinned(torch.randn(2500))
        (there,) = on_gpu(torch.randn(2500))
        source, target = (host, there) if from_host else (there, host)
        transfer.transfer(source, target)
        torch.cuda.synchronize()
        return norm_error(target, source.cpu())

    for from_host in (True, False):
        yield Call((transfer.spec(from_host=from_host),), partial(error, from_host))


# The longest first, so that none of them is the last to start.
OPERATORS: dict[str, Callable[[], Iterable[Call]]] = {
    "linear_fp8": partial(linear_calls, LinearTile),
    f"linear_fp8{TWIN}": partial(linear_calls, LinearWhereBothWait),
    "linear_fp8_few": linear_few_calls,
    "linear_fp8_rows": linear_many_rows_calls,
    "linear": linear_rows_calls,
    "grouped_swiglu_fp8": swiglu_calls,
    "grouped_linear_fp8": grouped_linear_calls,
    "attention_decode": partial(decode_calls, decode.DecodeTile),
    f"attention_decode{TWIN}": partial(decode_calls, DecodeWhereAllArrive),
    "attention_prefill": partial(prefill_calls, are_twins=False),
    f"attention_prefill{TWIN}": partial(prefill_calls, are_twins=True),
    "experts_fp8_few": partial(experts_calls, FewExpertsTile),
    f"experts_fp8_few{TWIN}": partial(experts_calls, FewExpertsWhereAllArrive),
    "dispatch_fp8": dispatch_calls,
    "quantise": quantise_calls,
    "rms_norm": partial(rms_norm_calls, is_fp8=False),
    "rms_norm_fp8": partial(rms_norm_calls, is_fp8=True),
    "reduction": reduction_calls,
    "combine": combine_calls,
    "select_rows": select_calls,
    "norm_route": route_calls,
    "rope_and_cache_write": rope_calls,
    "unpack_step": unpack_calls,
    "sample": sampling_calls,
    "transfer": transfer_calls,
}
