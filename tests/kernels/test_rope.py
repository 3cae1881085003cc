"""rope_and_cache_write in CUDA C++ and in Triton-lang: one rounding from float64, and every slot.

A rotated value may be half a step of bf16 from exact arithmetic on the same inputs, and what fp32
loses; v is copied bit for bit; a cache of e4m3 holds what the reference makes of the bf16 values,
bit for bit. The reference itself, in bf16, rounds cosines, sines and products, and is beyond that
bound. Without a GPU the kernels run on the CPU, emulated and, in a process of its own, interpreted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from gptoss_kernels import contracts, reference
from gptoss_kernels.contracts import HEAD_DIM
from gptoss_kernels.cuda import rope as cuda
from gptoss_kernels.cuda.build import build
from gptoss_kernels.fp8 import E4M3
from gptoss_kernels.triton_lang import device
from gptoss_kernels.triton_lang import rope as triton_lang

from .emulator import EmulationError, emulated, guarded, replacing
from .triton_lang_compiler import compiling_for
from .triton_lang_interpreter import REMARKS, interpret, round_as_hardware_does
from .wrong_tensors import every_second, other_device, shifted

INTERPRETED = device.INTERPRETED
NUM_POSITIONS = 1000
POISON = 0x7F  # NaN as e4m3, and twice as bf16
_YARN = {  # gpt-oss's
    "theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_context": 4096,
}

pytestmark = pytest.mark.filterwarnings(*REMARKS)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="has no part in what is interpreted")


@dataclass(frozen=True)
class Way:
    """One implementation, and where it runs."""

    name: str
    rope: Callable[..., Tensor]
    device: str
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def __call__(self, case: Case, **options) -> Tensor:
        with self.context():
            return self.rope(*case.given, **options)


INTERPRETER = Way("interpreted", triton_lang.rope_and_cache_write, "cpu")
EMULATOR = Way("emulated", cuda.rope_and_cache_write, "cpu", emulated)
ON_GPU = [
    Way("cuda", cuda.rope_and_cache_write, "cuda"),
    Way("triton", triton_lang.rope_and_cache_write, "cuda"),
]
WAYS = [INTERPRETER]
if not INTERPRETED:
    WAYS = [EMULATOR, *(pytest.param(way, marks=pytest.mark.gpu) for way in ON_GPU)]

ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])


@pytest.fixture(autouse=True)
def _exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        round_as_hardware_does(monkeypatch)


@dataclass(frozen=True)
class Case:
    """What the operator gets."""

    qkv: Tensor
    positions: Tensor
    rope_table: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def given(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[1]

    @property
    def stored(self) -> Tensor:
        """Which tokens are."""
        pages, _, page_size, _ = self.key_cache.shape
        return (self.slot_mapping >= 0) & (self.slot_mapping < pages * page_size)

    def poisoned(self, dtype: torch.dtype) -> Case:
        """With fresh caches of that dtype, all NaN, and without scales if it has none."""
        caches = [poison(self.key_cache.shape, dtype, self.qkv.device) for _ in range(2)]
        case = replace(self, key_cache=caches[0], value_cache=caches[1])
        return case if dtype == E4M3 else replace(case, key_scale=None, value_scale=None)

    def rows(self, cache: Tensor) -> Tensor:
        """What `cache` has of the tokens that are stored: [S, KV, D]."""
        slots, page_size = self.slot_mapping[self.stored], cache.shape[2]
        return as_bytes(cache)[slots // page_size, :, slots % page_size].view(cache.dtype)

    def nothing_else_is_written(self, cache: Tensor) -> bool:
        rest, slots, page_size = as_bytes(cache).clone(), self.slot_mapping, cache.shape[2]
        slots = slots[self.stored]
        rest[slots // page_size, :, slots % page_size] = POISON
        return bool((rest == POISON).all())


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def poison(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device | str) -> Tensor:
    rows = torch.empty(shape, dtype=dtype, device=where)
    as_bytes(rows).fill_(POISON)
    return rows


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, but for the sign and the payload of NaN."""
    both_nan = left.float().isnan() & right.float().isnan()
    is_same = (as_bytes(left) == as_bytes(right)).unflatten(-1, (-1, left.element_size())).all(-1)
    return bool((is_same | both_nan).all())


def yarn_table(where: str) -> Tensor:
    table = reference.rope_table(
        *(NUM_POSITIONS, HEAD_DIM),
        **_YARN,
    )
    return table.to(where)


def random_case(
    way: Way,
    num_tokens: int,
    heads: tuple[int, int] = (8, 1),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    """Slots without order, among them both ends of pages and of the cache; every fifth token but
    the first has none. Positions without order, among them the first and the last."""
    generator = torch.Generator().manual_seed(seed + num_tokens)
    num_heads, num_kv_heads = heads
    num_pages = -(-num_tokens // page_size) + 2
    num_slots = num_pages * page_size
    first = torch.tensor([num_slots - 1, 0, page_size - 1, page_size])
    others = torch.arange(num_slots)
    others = others[~torch.isin(others, first)]
    slots = torch.cat((first, others[torch.randperm(len(others), generator=generator)]))
    slots = slots[:num_tokens].clone()
    slots[5::5] = torch.tensor([-1, -(2**40), num_slots, 2**40]).repeat(len(slots))[
        : len(slots[5::5])
    ]
    positions = torch.randint(NUM_POSITIONS, (num_tokens,), generator=generator)
    positions[1::7], positions[2::7] = 0, NUM_POSITIONS - 1
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, HEAD_DIM, generator=generator)
    qkv *= torch.randn(qkv.shape[:2], generator=generator).mul(2).exp()[..., None]
    scales = torch.rand(2, num_kv_heads, generator=generator) / 8 + 0.01
    case = Case(
        qkv.flatten(1).bfloat16().to(way.device),
        positions.to(way.device),
        yarn_table(way.device),
        torch.empty(num_pages, num_kv_heads, page_size, HEAD_DIM, device=way.device),
        torch.empty(0),
        slots.to(way.device),
        *scales.to(way.device),
    )
    return case.poisoned(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula, written once more: heads [..., D], cos and sin [..., D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def roundings(out: Tensor, x: Tensor, case: Case) -> float:
    """The largest error of `out`, which is x [T, heads, D] rotated, over what one rounding may be.

    That is half a step of bf16, and some 2^-22 of what is added for fp32. inf for NaN.
    """
    table = case.rope_table.double()[case.positions][:, None]
    cos, sin = table.chunk(2, dim=-1)
    exact = rotated(x.double(), cos, sin)
    a, b = x.double().abs().chunk(2, dim=-1)
    summands = torch.cat((a * cos.abs() + b * sin.abs(), b * cos.abs() + a * sin.abs()), dim=-1)
    _, exponent = exact.frexp()
    allowed = torch.ldexp(torch.ones_like(exact), exponent - 9) + summands * 2.0**-22
    if not out.numel():
        return 0.0
    ratio = ((out.double() - exact).abs() / allowed).nan_to_num(torch.inf)
    return float(ratio.max())


def parts(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, heads, D]"""
    heads = case.qkv.unflatten(1, (-1, HEAD_DIM))
    kv = case.num_kv_heads
    return heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]


def check_bf16(case: Case, query: Tensor) -> None:
    q, k, v = parts(case)
    assert roundings(query, q, case) <= 1
    tokens = replace(case, positions=case.positions[case.stored])
    assert roundings(case.rows(case.key_cache), k[case.stored], tokens) <= 1
    assert torch.equal(case.rows(case.value_cache), v[case.stored])
    assert case.nothing_else_is_written(case.key_cache)
    assert case.nothing_else_is_written(case.value_cache)


def check(way: Way, case: Case, **options) -> None:
    """With caches of bf16, and if the case's are e4m3, that those are the same quantised."""
    wide = case.poisoned(torch.bfloat16)
    out = poison(parts(case)[0].shape, torch.bfloat16, way.device)
    assert way(wide, out=out, **options) is out
    check_bf16(wide, out)
    if case.key_cache.dtype != E4M3:
        return
    again = way(case, **options)
    assert torch.equal(again, out)
    for name in ("key", "value"):
        cache, scale = (getattr(case, f"{name}_{part}") for part in ("cache", "scale"))
        widened = wide.rows(getattr(wide, f"{name}_cache"))
        assert same(case.rows(cache), reference._as_cached(widened, E4M3, scale))
        assert case.nothing_else_is_written(cache)


@ways
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
def test_tokens_and_pages(way: Way, num_tokens: int, page_size: int) -> None:
    check(way, random_case(way, num_tokens, page_size=page_size, dtype=E4M3))


@ways
@pytest.mark.parametrize("heads", [(64, 8), (1, 1), (4, 4), (12, 3), (16, 1), (5, 2)], ids=str)
def test_heads(way: Way, heads: tuple[int, int]) -> None:
    check(way, random_case(way, 6, heads, dtype=E4M3))


@ways
@dtypes
def test_no_tokens(way: Way, dtype: torch.dtype) -> None:
    case = random_case(way, 0, (12, 3), dtype=dtype)
    assert way(case).shape == (0, 12, HEAD_DIM)
    assert case.nothing_else_is_written(case.key_cache)
    assert case.nothing_else_is_written(case.value_cache)


@ways
@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)], ids=str)
def test_a_scale_may_be_missing(way: Way, given: tuple[bool, bool]) -> None:
    case = random_case(way, 7, (12, 3), dtype=E4M3)
    scales = (case.key_scale if given[0] else None, case.value_scale if given[1] else None)
    check(way, replace(case, key_scale=scales[0], value_scale=scales[1]))


@ways
@pytest.mark.parametrize("scale", [1.0, 0.125, 1 / 3, 1e-20, 3e25])
def test_every_bf16_is_divided_as_the_reference_does(way: Way, scale: float) -> None:
    """inf and what saturates, NaN, ties, subnormal numbers of e4m3 and of bf16."""
    every = torch.arange(2**16, dtype=torch.int32, device=way.device).to(torch.int16)
    num_kv_heads = 32
    values = every.view(torch.bfloat16).view(-1, num_kv_heads * HEAD_DIM)  # 32 tokens
    case = random_case(way, len(values), (1, num_kv_heads), dtype=E4M3)
    qkv = torch.cat((case.qkv[:, : (1 + num_kv_heads) * HEAD_DIM], values), dim=1)
    scales = torch.full((num_kv_heads,), scale, device=way.device)
    slots = torch.arange(len(values), device=way.device)
    case = replace(case, qkv=qkv, slot_mapping=slots, value_scale=scales)
    way(case)
    rows = values.unflatten(1, (num_kv_heads, HEAD_DIM))
    assert same(case.rows(case.value_cache), reference._as_cached(rows, E4M3, scales))


@ways
@dtypes
def test_a_position_that_the_table_does_not_have(way: Way, dtype: torch.dtype) -> None:
    case = random_case(way, 4, (12, 3), dtype=dtype)
    case.positions[1], case.positions[3] = -1, NUM_POSITIONS
    query = way(case)
    keys = case.rows(case.key_cache).float()
    for found in (query, keys):
        assert bool(found[1::2].isnan().all())
        assert bool(found[::2].isfinite().all())
    assert bool(case.rows(case.value_cache).float().isfinite().all())


@ways
def test_what_is_no_number_stays_so(way: Way) -> None:
    case = random_case(way, 3, (2, 1))
    case.qkv[:, 3], case.qkv[:, HEAD_DIM * 2 + 40] = torch.nan, torch.inf
    query, keys = way(case), case.rows(case.key_cache)
    exact = reference.rope_and_cache_write(
        *(case.qkv.double(), case.positions, case.rope_table),
        *(case.key_cache.double(), case.value_cache.double(), case.slot_mapping),
    )
    assert torch.equal(query.isnan(), exact.isnan())
    assert int(query.isnan().sum()) == 6
    assert bool((~keys[..., [8, 40]].isfinite()).all())
    assert int(keys.isfinite().sum()) == keys.numel() - 6


@ways
def test_a_wrong_kernel_exceeds_the_bound(way: Way) -> None:
    case = random_case(way, 40, (8, 2))
    q, k, _ = parts(case)
    query = way(case)
    assert roundings(query, q, case) <= 1
    table = case.rope_table.double()[case.positions][:, None]
    cos, sin = table.chunk(2, dim=-1)
    wide = q.double()
    a, b = wide[..., 0::2], wide[..., 1::2]
    interleaved = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    narrow = case.rope_table.bfloat16()[case.positions][:, None]
    later = case.rope_table.double()[(case.positions + 1) % NUM_POSITIONS][:, None]
    wrong = {
        "interleaved pairs": interleaved,
        "halves swapped": rotated(wide.roll(HEAD_DIM // 2, -1), cos, sin),
        "turned backwards": rotated(wide, cos, -sin),
        "cosines for sines": rotated(wide, sin, cos),
        "the next position": rotated(wide, *later.chunk(2, dim=-1)),
        "a table of bf16": rotated(wide, *narrow.double().chunk(2, dim=-1)),
        "the reference's roundings": rotated(q, *narrow.chunk(2, dim=-1)),
        "not concentrated": rotated(wide, cos, sin) / (0.1 * torch.tensor(32.0).log() + 1),
        "of the next head": rotated(wide.roll(1, 1), cos, sin),
    }
    for name, other in wrong.items():
        assert roundings(other.bfloat16(), q, case) > 2, name
    truncated = rotated(wide, cos, sin).float().view(torch.int32) & -65536
    assert roundings(truncated.view(torch.float32), q, case) > 1.5, "truncated"
    moved = replace(case, slot_mapping=case.slot_mapping + 1)
    assert not moved.nothing_else_is_written(case.key_cache), "a slot off by one"
    tokens = replace(case, positions=case.positions[case.stored])
    rows = case.rows(case.key_cache)
    assert roundings(rows, k[case.stored], tokens) <= 1
    assert roundings(rows.roll(1, 0), k[case.stored], tokens) > 2, "another token's slot"
    assert roundings(rows.flip(1), k[case.stored], tokens) > 2, "another head"


@ways
def test_wrong_scales_are_seen(way: Way) -> None:
    case = random_case(way, 20, (4, 2), dtype=E4M3)
    way(case)
    rows = parts(case)[2][case.stored]
    stored = case.rows(case.value_cache)
    assert case.key_scale is not None
    assert case.value_scale is not None
    assert same(stored, reference._as_cached(rows, E4M3, case.value_scale))
    for wrong in (case.key_scale, case.value_scale.flip(0), 1 / case.value_scale, None):
        assert not same(stored, reference._as_cached(rows, E4M3, wrong))


WRONG_LINES = {
    "turned backwards": ("fmaf(-b, sin, a * cos)", "fmaf(b, sin, a * cos)"),
    "cosines for sines": ("row + HALF + i", "row + i"),
    "the position before": ("position * DIM", "(position ? position - 1 : 0) * DIM"),
    "k's scale for v": ("is_key ? arguments.key_scale", "true ? arguments.key_scale"),
    "the neighbouring slot": (") + offset;", ") + (offset ^ 1);"),
    "the page before": ("page * num_kv_heads", "(page ? page - 1 : 0) * num_kv_heads"),
    "k over v": ("is_key ? arguments.key_cache", "true ? arguments.key_cache"),
    "half a head": ("*reinterpret_cast<Vector*>(pointer + HALF) = b;", ""),
    "the last query missing": ("head < num_heads) {", "head + 1 < num_heads) {"),
}


@not_interpreted
@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_of_the_kernel_is_seen(name: str) -> None:
    def changed() -> contextlib.AbstractContextManager[object]:
        return emulated(change=replacing(*WRONG_LINES[name]))

    case = random_case(EMULATOR, 7, (12, 3), dtype=E4M3)
    with pytest.raises(AssertionError):
        check(replace(EMULATOR, context=changed), case)


def in_guarded_memory(case: Case) -> Case:
    return replace(
        case, **{name: guarded(value) for name, value in vars(case).items() if value is not None}
    )


@not_interpreted
@dtypes
def test_nothing_beyond_a_tensor_is_touched(dtype: torch.dtype) -> None:
    """Nor for the slots beyond the caches, and the positions beyond the table."""
    case = random_case(EMULATOR, 23, (5, 2), dtype=dtype)
    case.positions[3::4] = torch.tensor([-1, NUM_POSITIONS, -(2**50), 2**50, NUM_POSITIONS + 1])
    case = in_guarded_memory(case)
    out = guarded(poison((23, 5, HEAD_DIM), torch.bfloat16, "cpu"))
    EMULATOR(case, out=out)
    is_there = (case.positions >= 0) & (case.positions < NUM_POSITIONS)
    assert torch.equal(out.isfinite().flatten(1).all(1), is_there)
    assert case.nothing_else_is_written(case.key_cache)


CARELESS = {
    "any slot": ("if (uint64_t(slot) >= uint64_t(arguments.num_slots)) return;", ""),
    "any position": ("uint64_t(position) < uint64_t(arguments.num_positions)", "true"),
    "any token": ("is_token = token < arguments.num_tokens;", "is_token = true;"),
}


@not_interpreted
@pytest.mark.parametrize("name", CARELESS)
def test_a_careless_kernel_is_seen(name: str) -> None:
    case = random_case(EMULATOR, 23, (4, 1))
    case.positions[3] = 2**50
    case.slot_mapping[[5, -1]] = torch.tensor([2**40, 5])
    with (
        emulated(change=replacing(*CARELESS[name])),
        pytest.raises(EmulationError, match="which is no memory"),
    ):
        cuda.rope_and_cache_write(*in_guarded_memory(case).given)


WAIT = "    wait_for_previous_kernels();\n"
AFTER_ALL_READS = "    if (head < num_rotated) values.rotate"


@not_interpreted
def test_what_the_kernel_before_wrote_is_read_after_the_wait() -> None:
    def waits_late(source: str) -> str:
        return source.replace(WAIT, "").replace(AFTER_ALL_READS, WAIT + AFTER_ALL_READS)

    def is_right(seed: int, **options) -> bool:
        case, expected = (random_case(EMULATOR, 7, (12, 3), dtype=E4M3) for _ in range(2))
        query = EMULATOR(expected)
        caches = ("key_cache", "value_cache")
        with emulated(seed, late=[case.qkv], **options):
            is_same = torch.equal(cuda.rope_and_cache_write(*case.given), query)
        return is_same and all(
            torch.equal(as_bytes(getattr(case, name)), as_bytes(getattr(expected, name)))
            for name in caches
        )

    assert all(is_right(seed) for seed in range(3))
    assert not all(is_right(seed, change=waits_late) for seed in range(3))


# --- on a GPU alone ---

on_gpu = pytest.mark.parametrize("way", ON_GPU, ids=lambda way: way.name)


@pytest.mark.gpu
@on_gpu
@dtypes
@pytest.mark.parametrize("num_tokens", [1, 8, 128, 512, 513, 3001])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_the_served_shape(way: Way, page_size: int, num_tokens: int, dtype: torch.dtype) -> None:
    check(way, random_case(way, num_tokens, (64, 8), page_size, dtype))


@pytest.mark.gpu
@on_gpu
@dtypes
def test_131072_tokens_and_a_large_cache(way: Way, dtype: torch.dtype) -> None:
    """In both, an element's number needs more than 32 bits."""
    num_tokens, pages = 131_072, 2**17 // 16 + 2**16
    torch.manual_seed(0)
    qkv = torch.randn(num_tokens, 80 * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape = (pages, 8, 64, HEAD_DIM)
    slots = torch.randperm(pages * 64, device="cuda")[:num_tokens]
    positions = torch.randint(NUM_POSITIONS, (num_tokens,), device="cuda")
    scales = torch.rand(2, 8, device="cuda") + 0.1
    caches = [poison(shape, dtype, "cuda") for _ in range(2)]
    assert caches[0].numel() > 2**31
    case = Case(qkv, positions, yarn_table("cuda"), caches[0], caches[1], slots)
    if dtype == E4M3:
        case = replace(case, key_scale=scales[0], value_scale=scales[1])
    query = way(case)
    for some in torch.arange(num_tokens, device="cuda").split(1 << 13):
        part = replace(case, qkv=qkv[some], positions=positions[some], slot_mapping=slots[some])
        q, k, v = parts(part)
        assert roundings(query[some], q, part) <= 1
        if dtype == E4M3:
            assert same(part.rows(caches[1]), reference._as_cached(v, E4M3, scales[1]))
        else:
            assert roundings(part.rows(caches[0]), k, part) <= 1
            assert torch.equal(part.rows(caches[1]), v)
    for cache in caches:
        written = (as_bytes(cache) != POISON).flatten(3).any(-1).sum()
        assert int(written) == num_tokens * 8


@pytest.mark.gpu
@on_gpu
@dtypes
@pytest.mark.parametrize("num_tokens", [4, 700])
def test_a_captured_graph_is_eager(way: Way, num_tokens: int, dtype: torch.dtype) -> None:
    case, other = (random_case(way, num_tokens, (64, 8), 64, dtype, seed=seed) for seed in (1, 2))
    out = poison((num_tokens, 64, HEAD_DIM), torch.bfloat16, "cuda")
    way(case, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(case, out=out)
    for mine, new in zip(vars(case).values(), vars(other).values(), strict=True):
        if mine is not None:
            mine.copy_(new)  # the caches are NaN once more
    graph.replay()
    assert torch.equal(out, way(other))
    for name in ("key_cache", "value_cache"):
        assert torch.equal(as_bytes(getattr(case, name)), as_bytes(getattr(other, name)))


# --- without a GPU: refusals, the compilers, the interpreter's process ---


BF16, FP8 = torch.bfloat16, E4M3
CACHES = ("key_cache", "value_cache")
SCALES = ("key_scale", "value_scale")
REFUSED = [
    *(
        (name, other_device, f"{name} must be on the device of qkv, got meta and cpu")
        for name in ("positions", "rope_table", *CACHES, "slot_mapping", *SCALES, "out")
    ),
    *(
        (name, Tensor.half, f"{name} must be torch.* got torch.float16")
        for name in ("qkv", "positions", "rope_table", *CACHES, "slot_mapping", *SCALES, "out")
    ),
    *(
        (name, every_second, f"{name} must be contiguous, got strides")
        for name in ("qkv", "positions", "rope_table", *CACHES, "slot_mapping", *SCALES, "out")
    ),
    *(
        (name, shifted, f"{name} must start at a multiple of 16 bytes, got 8 beyond one")
        for name in ("qkv", "rope_table", *CACHES, "out")
    ),
    ("qkv", lambda qkv: qkv[0], r"qkv must be \[T, \(N \+ 2 KV\) \* 64\], .* got \[1152\] for 3"),
    ("qkv", lambda qkv: qkv[:, :1150], r"qkv must be .* got \[7, 1150\] for 3 key-value heads"),
    ("qkv", lambda qkv: qkv[:, :384], r"N at least 1, got \[7, 384\] for 3 key-value heads"),
    ("qkv", lambda qkv: qkv[:, 64:].contiguous(), r"out must be \[7, 11, 64\], got \[7, 12, 64\]"),
    ("qkv", lambda qkv: qkv[:6], r"positions must be \[6\], got \[7\]"),
    ("positions", Tensor.int, "positions must be torch.int64, got torch.int32"),
    ("positions", lambda positions: positions[:, None], r"positions must be \[7\], got \[7, 1\]"),
    ("slot_mapping", Tensor.int, "slot_mapping must be torch.int64, got torch.int32"),
    ("slot_mapping", lambda slots: slots[:6], r"slot_mapping must be \[7\], got \[6\]"),
    ("rope_table", Tensor.double, "rope_table must be torch.float32, got torch.float64"),
    ("rope_table", lambda table: table[:, :32], r"must be \[positions, 64\], got \[1000, 32\]"),
    ("rope_table", lambda table: table[0], r"rope_table must be \[positions, 64\], got \[64\]"),
    ("key_cache", Tensor.float, "key_cache must be torch.bfloat16 or torch.float8_e4m3fn, got"),
    ("key_cache", lambda cache: cache[0], r"must be \[P, KV, page_size, 64\], got \[3, 16, 64\]"),
    ("key_cache", lambda cache: cache[:, :0], r"key_cache must have at least 1 head, got \[3, 0"),
    ("key_cache", lambda cache: cache[:, :, :8], "page_size must be one of .*, got 8"),
    ("value_cache", Tensor.bfloat16, "value_cache must be torch.float8_e4m3fn, got torch.bfloat16"),
    ("value_cache", lambda cache: cache[:2], r"value_cache must be \[3, 3, 16, 64\], got \[2, 3"),
    ("key_scale", lambda scale: scale[:2], r"key_scale must be \[3\], got \[2\]"),
    ("value_scale", Tensor.double, "value_scale must be torch.float32, got torch.float64"),
    ("out", lambda out: out.flatten(1), r"out must be \[7, 12, 64\], got \[7, 768\]"),
]


def tensors_for_a_check(dtype: torch.dtype = E4M3) -> dict[str, Any]:
    case = random_case(INTERPRETER, 7, (12, 3), dtype=dtype)
    return vars(case) | {"out": torch.empty(7, 12, HEAD_DIM, dtype=torch.bfloat16)}


def check_inputs(tensors: dict[str, Any], **others: Tensor | None) -> None:
    contracts.check_rope_inputs(**{**tensors, **others})


@not_interpreted
@dtypes
def test_what_is_right_passes(dtype: torch.dtype) -> None:
    tensors = tensors_for_a_check(dtype)
    check_inputs(tensors)
    check_inputs(tensors, out=None)
    check_inputs(tensors, **dict.fromkeys(SCALES))
    per_token = ("qkv", "positions", "slot_mapping", "out")
    check_inputs(tensors, **{name: tensors[name][:0] for name in per_token})


@not_interpreted
@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_a_mistake_is_refused_by_its_sentence(name: str, change, sentence: str) -> None:
    tensors = tensors_for_a_check()
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=sentence):
        check_inputs(tensors)


@not_interpreted
def test_a_scale_of_bf16_caches_is_refused() -> None:
    tensors = tensors_for_a_check(torch.bfloat16)
    for name in SCALES:
        with pytest.raises(ValueError, match=f"{name} must be None for caches of torch.bfloat16"):
            check_inputs(tensors, **{name: torch.ones(3)})


@not_interpreted
def test_more_heads_than_kernels_number_are_refused() -> None:
    on_meta = {
        name: None if tensor is None else tensor.to("meta")
        for name, tensor in tensors_for_a_check().items()
    }

    def check_tokens(count: int) -> None:
        numbers = torch.empty(count, dtype=torch.int64, device="meta")
        qkv = torch.empty(count, 18 * HEAD_DIM, dtype=torch.bfloat16, device="meta")
        check_inputs(on_meta, qkv=qkv, positions=numbers, slot_mapping=numbers, out=None)

    check_tokens(2**30 // 18)
    with pytest.raises(ValueError, match=r"qkv must have T \(N \+ 2 KV\) below 2\^30, got"):
        check_tokens(2**30 // 18 + 1)


@not_interpreted
@pytest.mark.parametrize("module", [cuda, triton_lang], ids=["cuda", "triton"])
def test_an_operator_refuses_what_its_contract_does(module) -> None:
    tensors = tensors_for_a_check(torch.bfloat16)
    rope = module.rope_and_cache_write
    with pytest.raises(ValueError, match="qkv must be on a GPU, got cpu"):
        rope(**tensors)
    with pytest.raises(ValueError, match=r"qkv must be \[T, \(N \+ 2 KV\) \* 64\]"):
        rope(**tensors | {"qkv": tensors["qkv"][0], "out": None})
    with pytest.raises(ValueError, match=r"N at least 1, got \[7, 64\]"):
        rope(**tensors | {"qkv": tensors["qkv"][:, :64], "out": None})
    none = {name: tensors[name][:0] for name in ("qkv", "positions", "slot_mapping")}
    with pytest.raises(ValueError, match=r"out must be \[0, 12, 64\]"):
        rope(**tensors | none)


@not_interpreted
def test_served_kernels_compile_without_spills(tmp_path) -> None:
    specs = [cuda.spec(is_fp8=is_fp8) for is_fp8 in (False, True)]
    for each in build(specs, jobs=1, cache=tmp_path):
        assert each.faults == ()
        assert each.cubin is not None
        assert each.cubin.registers <= 40  # 12 blocks of a multiprocessor


@not_interpreted
@pytest.mark.parametrize("capability", [89, 90])
def test_triton_lang_compiles_without_spills(
    capability: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with compiling_for(capability) as compiled:
        for heads in ((64, 8), (8, 1)):
            for dtype in (torch.bfloat16, E4M3):
                triton_lang.rope_and_cache_write(
                    *random_case(INTERPRETER, 3, heads, 64, dtype).given
                )
    assert len(compiled) == 4
    for kernel in compiled:
        assert (kernel.stack_bytes, kernel.local_bytes) == (0, 0)
        assert "ld.global.v4.b32" in kernel.ptx
        assert "st.global.v4.b32" in kernel.ptx


@not_interpreted
def test_the_interpreter_agrees() -> None:
    """All tests above that are not CUDA C++'s, in a process that interprets what they launch."""
    interpret(__file__)
