"""quantise in CUDA C++ against the reference, bit for bit; bad input."""

import pytest
import torch
from torch import Tensor

from gptoss_kernels import reference
from gptoss_kernels.contracts import empty_scale
from gptoss_kernels.cuda.quantise import quantise
from gptoss_kernels.cuda.rows import RowLayout, choose_layout

GROUPS = pytest.mark.parametrize("group", [64, 128])
SERVED_TOKENS = (1, 8, 128, 257, 2048, 2049, 131072)
LAYOUTS = tuple(
    RowLayout.of(2880, vectors, threads)
    for vectors, threads in ((1, 0), (2, 0), (3, 128), (4, 128), (6, 256), (12, 128), (12, 512))
)


def random_rows(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Of every size, group by group; zeros, one number alone, and what is no number."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    size = torch.randn(rows, -(-columns // 64), device="cuda", generator=generator) * 8
    size = size.exp().repeat_interleave(64, 1)[:, :columns]
    x = torch.randn(rows, columns, device="cuda", generator=generator) * size
    kind = torch.randint(0, 40, (rows, columns), device="cuda", generator=generator)
    x[kind == 0] = 0.0
    x[kind == 1] = -0.0
    x[::7, : columns // 2] = 0
    x[1::7, 16:] = 0
    x[2::11, columns // 3] = torch.inf
    x[3::11, columns // 2] = -torch.inf
    x[4::11, columns - 1] = torch.nan
    x[5::11, 0] = torch.finfo(torch.bfloat16).max
    x[6::11, :64] *= 1e-30
    return x.bfloat16()


def poisoned(rows: int, columns: int, group: int) -> tuple[Tensor, Tensor]:
    values = torch.full((rows, columns), 0x7F, device="cuda", dtype=torch.uint8)
    scale = empty_scale(rows, columns, "cuda", group)
    return values.view(torch.float8_e4m3fn), scale.fill_(torch.nan)


def same(out: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Bit for bit but for NaN, whose sign and payload no one promises."""
    values, scale = out
    expected_values, expected_scale = (tensor.to(values.device) for tensor in expected)
    is_nan = expected_values.float().isnan()
    return (
        torch.equal(values.float().isnan(), is_nan)
        and torch.equal(
            values.view(torch.uint8)[~is_nan], expected_values.view(torch.uint8)[~is_nan]
        )
        and torch.allclose(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    )


@pytest.mark.gpu
@GROUPS
@pytest.mark.parametrize("columns", [16, 64, 112, 128, 144, 320, 1088, 2880, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 127, 300, 2051])
def test_every_bit_is_the_references(rows: int, columns: int, group: int) -> None:
    x = random_rows(rows, columns, seed=rows + columns)
    out = quantise(x, group, out=poisoned(rows, columns, group))
    assert same(out, reference.quantise(x.cpu(), group))


@pytest.mark.gpu
@GROUPS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_layout_changes_a_bit(layout: RowLayout, group: int) -> None:
    x = random_rows(133, 2880)
    out = quantise(x, group, out=poisoned(133, 2880, group), layout=layout)
    assert same(out, reference.quantise(x.cpu(), group))


@pytest.mark.gpu
def test_every_bf16_as_a_maximum() -> None:
    amax = torch.arange(0x7F80, device="cuda", dtype=torch.int16).view(torch.bfloat16)
    x = amax[:, None] * torch.linspace(-1, 1, 128, device="cuda").bfloat16()
    x[:, -1] = amax
    assert same(quantise(x), reference.quantise(x.cpu()))


@pytest.mark.gpu
@GROUPS
def test_131072_tokens(group: int) -> None:
    x = torch.randn(131072, 2880, device="cuda", dtype=torch.bfloat16)
    values, scale = quantise(x, group, out=poisoned(131072, 2880, group))
    for first in range(0, len(x), 16384):
        part = slice(first, first + 16384)
        assert same((values[part], scale[part]), reference.quantise(x[part], group))


@pytest.mark.gpu
def test_rows_apart_and_nothing_beside_them_is_written() -> None:
    rows, columns = 67, 2880
    x = random_rows(rows, columns + 64)[:, :columns]
    around = torch.full((rows + 2, columns + 32), 7, device="cuda", dtype=torch.uint8)
    scales = torch.full((23 + 2, 72), 7.0, device="cuda")
    values = around[1:-1, 16 : 16 + columns]
    scale = scales[1:-1].t()[:rows]
    out = quantise(x, out=(values.view(torch.float8_e4m3fn), scale))
    assert same(out, reference.quantise(x.cpu()))
    values.fill_(7)
    scale.fill_(7)
    assert bool((around == 7).all())
    assert bool((scales == 7).all())


@pytest.mark.gpu
def test_a_wrong_kernel_is_seen() -> None:
    x = random_rows(9, 2880)
    values, scale = reference.quantise(x.cpu())
    assert same((values, scale), (values, scale))
    shifted = scale.clone()
    shifted[:, -1] = scale[:, -2]
    one_step = values.view(torch.uint8).clone()
    one_step[5, 1234] ^= 1
    finest = (x.cpu()[:, :2816].float().unflatten(1, (-1, 128)) / scale[:, :22, None]).flatten(1)
    divided = values.clone()
    divided[:, :2816] = finest.to(torch.float8_e4m3fn)
    for wrong in ((values, shifted), (one_step.view(values.dtype), scale), (divided, scale)):
        assert not same(wrong, (values, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 500, 4000])
def test_captured_graph_is_eager(rows: int) -> None:
    x, other = random_rows(rows, 2880, seed=1), random_rows(rows, 2880, seed=2)
    out = poisoned(rows, 2880, 128)
    quantise(x, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantise(x, out=out)
    x.copy_(other)
    graph.replay()
    assert same(out, reference.quantise(other.cpu()))


@pytest.mark.gpu
def test_reads_x_after_the_kernel_before_it_wrote_it() -> None:
    x, late = random_rows(64, 2880), torch.zeros(64, 2880, device="cuda", dtype=torch.bfloat16)
    expected = reference.quantise(x.cpu())
    slow = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        late.zero_()
        slow = slow @ slow / 64
        late.copy_(x)
        assert same(quantise(late), expected)


@pytest.mark.gpu
@GROUPS
def test_no_tokens(group: int) -> None:
    values, scale = quantise(torch.empty(0, 320, device="cuda", dtype=torch.bfloat16), group)
    assert (values.shape, scale.shape) == ((0, 320), (0, -(-320 // group)))


@pytest.mark.parametrize(
    ("change", "group", "sentence"),
    [
        (lambda x: x.float(), 128, "x must be torch.bfloat16, got torch.float32"),
        (lambda x: x.half(), 128, "x must be torch.bfloat16, got torch.float16"),
        (lambda x: x, 96, "group must be 64 or 128, got 96"),
        (lambda x: x[0], 128, r"x must be a matrix with .*, got \[320\]"),
        (lambda x: x[:, :312], 128, r"a multiple of 16 columns, got \[4, 312\]"),
        (lambda x: x[:, :0], 128, r"a multiple of 16 columns, got \[4, 0\]"),
        (lambda x: x.repeat(1, 26), 128, "x must have up to 8192 columns, got 8320"),
        (lambda x: x.t().contiguous().t(), 128, "x must have adjacent columns"),
        (lambda x: x[:, 4:308], 128, "x must start at a multiple of 16 bytes"),
        (lambda x: x[:1].expand(4, 320), 128, "rows of their own"),
        (lambda x: x, 128, "x must be on a GPU, got cpu"),
    ],
)
def test_bad_input_is_refused(change, group: int, sentence: str) -> None:
    x = change(torch.zeros(4, 320, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=sentence):
        quantise(x, group)


@pytest.mark.parametrize(
    ("position", "wrong", "sentence"),
    [
        (0, torch.empty(4, 320), "values must be torch.float8_e4m3fn, got torch.float32"),
        (0, torch.empty(4, 304, dtype=torch.float8_e4m3fn), r"values must be \[4, 320\], got"),
        (1, torch.empty(4, 3), "scale must be stored by column"),
        (1, empty_scale(4, 320, "cpu", 64), r"scale must be \[4, 3\], got \[4, 5\]"),
    ],
)
def test_bad_outputs_are_refused(position: int, wrong: Tensor, sentence: str) -> None:
    out = [torch.empty(4, 320, dtype=torch.float8_e4m3fn), empty_scale(4, 320, "cpu")]
    out[position] = wrong
    with pytest.raises(ValueError, match=sentence):
        quantise(torch.zeros(4, 320, dtype=torch.bfloat16), out=(out[0], out[1]))


@pytest.mark.gpu
def test_a_layout_of_narrower_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="covers fewer than 2880 columns"):
        quantise(random_rows(1, 2880), layout=RowLayout(1, 11, 1))


@pytest.mark.parametrize("columns", [16, 320, 1088, 2880, 4096, 8192])
@pytest.mark.parametrize("rows", SERVED_TOKENS)
def test_chosen_layout_covers_a_row(rows: int, columns: int) -> None:
    layout = choose_layout(rows, columns)
    assert layout.vectors * layout.warps * 256 >= columns
    assert layout.threads <= 512
