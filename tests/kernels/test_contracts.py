"""What the FP8 operators refuse, whoever implements them: each mistake by its sentence; the layout.

Checks look at no values, so they are tested on a CPU; `meta` is another device.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gptoss_kernels import contracts
from gptoss_kernels.contracts import empty_dispatched, empty_quantised, empty_scale
from gptoss_kernels.fp8 import E4M3

from .wrong_tensors import every_second, other_device, shifted

T, H, N, E, K = 5, 272, 264, 3, 2


def grouped() -> dict[str, Tensor]:
    x, x_scale = empty_quantised(T, H, "cpu")
    return {
        "x": x,
        "x_scale": x_scale,
        "expert_start": torch.zeros(E + 1, dtype=torch.int32),
        "weight": torch.empty(E, N, H, dtype=E4M3),
        "weight_scale": torch.empty(E, 3, 3),
        "bias": torch.empty(E, N),
    }


def dense() -> dict[str, Tensor]:
    tensors = grouped()
    del tensors["expert_start"]
    return tensors | {name: tensors[name][0] for name in ("weight", "weight_scale", "bias")}


def norm() -> dict[str, Tensor]:
    hidden = torch.empty(T, H, dtype=torch.bfloat16)
    return {"hidden": hidden, "weight": torch.empty(H), "update": torch.empty_like(hidden)}


def dispatch() -> dict[str, Tensor]:
    return {"x": torch.empty(T, H, dtype=torch.bfloat16), "chosen": torch.zeros(T, K).long()}


def combine() -> dict[str, Tensor]:
    return {
        "outputs": torch.empty(T * K, H, dtype=torch.bfloat16),
        "rows": torch.zeros(T, K, dtype=torch.int32),
        "chosen_weights": torch.empty(T, K, dtype=torch.bfloat16),
    }


CHECKS: dict[Callable[[], dict[str, Tensor]], Callable[..., None]] = {
    dense: contracts.check_inputs,
    grouped: lambda **tensors: contracts.check_grouped_inputs(**tensors, x_group=128),
    norm: contracts.check_rms_norm_inputs,
    dispatch: lambda **tensors: contracts.check_dispatch_inputs(**tensors, num_experts=E),
    combine: contracts.check_combine_inputs,
}


def odd_pitch(matrix: Tensor) -> Tensor:
    """Rows at a distance that is no multiple of 16 bytes."""
    rows, columns = matrix.shape
    return matrix.new_empty(rows, columns + 4)[:, :columns]


def one_row(matrix: Tensor) -> Tensor:
    """All rows the same memory."""
    return matrix[:1].expand(matrix.shape)


REFUSED = [
    *(
        (make, name, other_device, f"{name} must be on the device of {first}, got meta and cpu")
        for make, first in ((dense, "x"), (grouped, "x"), (norm, "hidden"), (combine, "outputs"))
        for name in make()
        if name != first
    ),
    (dispatch, "chosen", other_device, "chosen must be on the device of x, got meta and cpu"),
    *(
        (make, name, Tensor.half, f"{name} must be torch.* got torch.float16")
        for make in CHECKS
        for name in make()
    ),
    *(
        (make, name, every_second, f"{name} must (be contiguous|have adjacent|be stored by col)")
        for make in CHECKS
        for name in make()
    ),
    *(
        (make, name, shifted, f"{name} must start at a multiple of 16 bytes, got 8 beyond one")
        for make, names in (
            (dense, ("x", "x_scale", "weight")),
            (grouped, ("x", "x_scale", "weight")),
            (norm, ("hidden", "weight", "update")),
            (dispatch, ("x",)),
            (combine, ("outputs",)),
        )
        for name in names
    ),
    *(
        (make, name, change, f"{name} must have adjacent columns, and rows of their own at mult")
        for make, name in (
            *((dense, "x"), (dense, "weight"), (grouped, "x")),
            *((norm, "hidden"), (norm, "update"), (dispatch, "x"), (combine, "outputs")),
        )
        for change in (odd_pitch, one_row, lambda matrix: matrix.t().contiguous().t())
    ),
    (grouped, "x_scale", Tensor.contiguous, r"x_scale must be stored by column.*\(3, 1\) for 5"),
    (grouped, "x_scale", lambda scale: scale[:, :2], r"x_scale must be \[5, 3\], got \[5, 2\]"),
    (grouped, "x", lambda x: x[:, :256], r"agree in K, got \[5, 256\] and \[3, 264, 272\]"),
    (dense, "weight", lambda weight: weight[None], r"weight \[N, K\] must agree in K, got"),
    (grouped, "weight", lambda weight: weight[0], r"weight \[E, N, K\] must agree in K, got"),
    (grouped, "weight", lambda weight: weight[:, :260], "multiple of 8 and K of 16, got N=260"),
    (grouped, "weight", lambda weight: weight[:, :0], "multiple of 8 and K of 16, got N=0, K=272"),
    (grouped, "weight", lambda weight: weight[:, 8:], r"must be \[3, 2, 3\], got \[3, 3, 3\]"),
    (grouped, "weight_scale", lambda scale: scale[:, :2], r"must be \[3, 3, 3\], got \[3, 2, 3\]"),
    (grouped, "bias", lambda bias: bias[:2], r"bias must be \[3, 264\], got \[2, 264\]"),
    (grouped, "expert_start", Tensor.long, "expert_start must be torch.int32, got torch.int64"),
    (grouped, "expert_start", lambda start: start[1:], r"expert_start must be \[4\], got \[3\]"),
    (norm, "hidden", lambda hidden: hidden[:, :264], r"multiple of 16 columns, got \[5, 264\]"),
    (norm, "hidden", lambda hidden: hidden[0], r"multiple of 16 columns, got \[272\]"),
    (norm, "weight", lambda weight: weight[:256], r"weight must be \[272\], got \[256\]"),
    (norm, "update", lambda update: update[:4], r"update must be \[5, 272\], got \[4, 272\]"),
    (dispatch, "x", lambda x: x[:4], r"must agree in T, got \[4, 272\] and \[5, 2\]"),
    (dispatch, "x", lambda x: x[:, :0], r"multiple of 16 columns, got \[5, 0\]"),
    (dispatch, "chosen", lambda chosen: chosen[:, 0], r"got \[5, 272\] and \[5\]"),
    (dispatch, "chosen", lambda chosen: chosen[:, :0], "K must be at least 1, got 0"),
    (
        dispatch,
        "chosen",
        Tensor.short,
        "chosen must be torch.int64 or torch.int32, got torch.int16",
    ),
    (combine, "rows", Tensor.long, "rows must be torch.int32, got torch.int64"),
    (combine, "rows", lambda rows: rows[:, :0], r"K at least 1, got \[5, 0\]"),
    (combine, "chosen_weights", Tensor.float, "must be torch.bfloat16, got torch.float32"),
    (combine, "chosen_weights", lambda weights: weights[:4], r"must be \[5, 2\], got \[4, 2\]"),
]


@pytest.mark.parametrize("make", CHECKS, ids=lambda make: make.__name__)
def test_what_is_right_passes(make) -> None:
    CHECKS[make](**make())


@pytest.mark.parametrize("make", CHECKS, ids=lambda make: make.__name__)
def test_views_with_room_around_them_pass(make) -> None:
    """Rows further apart than their columns need, from the middle of a larger matrix."""
    tensors = make()
    for name in tensors.keys() & {"x", "hidden", "update", "outputs"}:
        rows, columns = tensors[name].shape
        room = tensors[name].new_empty(rows + 2, columns + 32)
        tensors[name] = room[1:-1, 16:-16]
    if "x_scale" in tensors:
        tensors["x_scale"] = empty_scale(T + 7, H, "cpu")[4 : 4 + T]
    CHECKS[make](**tensors)


@pytest.mark.parametrize(("make", "name", "change", "sentence"), REFUSED)
def test_a_mistake_is_refused_by_its_sentence(make, name: str, change, sentence: str) -> None:
    tensors = make()
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=sentence):
        CHECKS[make](**tensors)


def test_choices_may_have_32_bits() -> None:
    contracts.check_dispatch_inputs(dispatch()["x"], dispatch()["chosen"].int(), E)


def test_what_may_be_missing_passes() -> None:
    contracts.check_inputs(**{**dense(), "bias": None})
    contracts.check_rms_norm_inputs(**{**norm(), "update": None})
    contracts.check_dispatch_inputs(
        **{**dispatch(), "chosen": torch.zeros(T, K).int()}, num_experts=E
    )


@pytest.mark.parametrize("make", CHECKS, ids=lambda make: make.__name__)
def test_no_rows_pass(make) -> None:
    tensors = make()
    for name in tensors.keys() & {"x", "x_scale", "hidden", "update", "chosen", "outputs", "rows"}:
        tensors[name] = tensors[name][:0]
    if make is combine:
        tensors["chosen_weights"] = tensors["chosen_weights"][:0]
    CHECKS[make](**tensors)


@pytest.mark.parametrize("num_experts", [0, 513])
def test_the_number_of_experts_is_limited(num_experts: int) -> None:
    sentence = f"there must be 1 to 512 experts, got {num_experts}"
    with pytest.raises(ValueError, match=sentence):
        contracts.check_dispatch_inputs(**dispatch(), num_experts=num_experts)
    x, x_scale = empty_quantised(T, 16, "cpu")
    weight = torch.empty(num_experts, 8, 16, dtype=E4M3)
    scale, bias = torch.empty(num_experts, 1, 1), torch.empty(num_experts, 8)
    start = torch.zeros(num_experts + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=sentence):
        contracts.check_grouped_inputs(x, x_scale, start, weight, scale, bias, 128)


def test_too_many_choices_are_refused() -> None:
    tokens = contracts.MAXIMUM_CHOICES // 8 + 1
    x = torch.empty(tokens, 16, dtype=torch.bfloat16, device="meta")
    chosen = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="T K must be at most 1073741824, got 1073741832"):
        contracts.check_dispatch_inputs(x, chosen, E)
    contracts.check_dispatch_inputs(x[1:], chosen[1:], E)


@pytest.mark.parametrize(
    ("n", "group", "sentence"),
    [
        (32, 32, "group must be 64 or 128, got 32"),
        (48, 64, "I must be a multiple of 16, got 24"),
    ],
)
def test_sizes_of_swiglu(n: int, group: int, sentence: str) -> None:
    contracts.check_swiglu_sizes(torch.empty(E, 32, H), 64)
    with pytest.raises(ValueError, match=sentence):
        contracts.check_swiglu_sizes(torch.empty(E, n, H), group)


def test_a_gpu_is_demanded_by_the_tensors_name() -> None:
    with pytest.raises(ValueError, match="outputs must be on a GPU, got cpu"):
        contracts.check_gpu(torch.empty(1), "outputs")


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize(("columns", "group"), [(16, 128), (272, 128), (272, 64)])
def test_room_is_as_the_contract_wants_it(rows: int, columns: int, group: int) -> None:
    x = torch.empty(rows, columns)
    out = empty_quantised(rows, columns, "cpu", group)
    contracts.check_quantised(out, (rows, columns), x, group)
    assert out[1].dtype == torch.float32
    assert out[1].stride(1) == -(-rows // 4) * 4
    with pytest.raises(ValueError, match="values must be"):
        contracts.check_quantised(out, (rows + 1, columns), x, group)
    with pytest.raises(ValueError, match="scale must be"):
        contracts.check_quantised((out[0], out[1][:, 1:]), (rows, columns), x, group)


def test_scales_are_fp32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert empty_scale(5, H, "cpu").dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_room_of_a_dispatch() -> None:
    tensors = dispatch()
    out = empty_dispatched(**tensors, num_experts=E)
    contracts.check_dispatched(out, **tensors, num_experts=E)
    for name, wrong in (
        ("values", out.values[1:]),
        ("scale", out.scale.contiguous()),
        ("expert_start", out.expert_start.long()),
        ("rows", out.rows.t().contiguous().t()),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            contracts.check_dispatched(out._replace(**{name: wrong}), **tensors, num_experts=E)


@pytest.mark.parametrize(
    ("columns", "group"), [(16, 128), (64, 128), (144, 128), (144, 64), (2880, 64)]
)
def test_the_group_is_told_by_the_shapes(columns: int, group: int) -> None:
    x, x_scale = empty_quantised(T, columns, "cpu", group)
    assert contracts.x_group(x, x_scale) == group
    # What fits neither is refused as 64 would want it.
    assert contracts.x_group(x, x_scale[:, :0]) == 64


def test_strides_that_32_bits_do_not_hold_are_refused() -> None:
    def rows(pitch: int) -> Tensor:
        return torch.empty_strided((2, H), (pitch, 1), dtype=E4M3, device="meta")

    def scale(pitch: int) -> Tensor:
        return torch.empty_strided((2, 3), (1, pitch), device="meta")

    for check, make in ((contracts.check_rows, rows), (contracts.check_scale, scale)):
        check("x", make(2**31 - 16))
        with pytest.raises(ValueError, match=r"x must have a stride below 2\^31 elements, got"):
            check("x", make(2**31))
