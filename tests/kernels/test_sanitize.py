"""What of sanitize.py needs no GPU: that no served kernel is left out, and how reports are read."""

import functools
import importlib
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from gptoss_kernels.cuda import build, transfer

from .emulator import Emulation, emulated

MEMCHECK = "========= COMPUTE-SANITIZER\n{answer}\n========= ERROR SUMMARY: {errors} errors\n"
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between {write} access at {kernel}+0xeb0
=========     and Read access at {kernel}+0x3860 [16368 hazards]
=========     and Read access at {kernel}+0x3880 [1 hazard]
=========\x20
{answer}
========= RACECHECK SUMMARY: 1 hazard displayed (2 errors, 0 warnings)
"""
CLEAN = """========= COMPUTE-SANITIZER
{answer}
========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
"""


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It imports what it runs as a script does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("sanitize")


@pytest.fixture
def sanitized(sanitize: ModuleType) -> ModuleType:
    return importlib.import_module("sanitized")


def test_every_served_kernel_is_reached(sanitize: ModuleType) -> None:
    reached = {
        kernel
        for operator in sanitize.OPERATORS
        if sanitize.TWIN not in operator
        for call in sanitize.calls_of(operator)
        for kernel in call.kernels
    }
    assert set(build.served_kernels()) - reached == set()


def test_slots_are_used_again(sanitized: ModuleType) -> None:
    (_, _, k) = sanitized.LONG_SUMS
    assert max(tile.stages for tile in sanitized.LINEAR_TILES) < k // 128
    longest = max(k for _, _, k in sanitized.GROUPED_SHAPES)
    for group in (64, 128):
        for tile in (*sanitized.swiglu_tiles(group), *sanitized.grouped_linear_tiles(group)):
            assert tile.stages < longest // 128


def test_the_parts_are_all_calls_once(sanitize: ModuleType) -> None:
    for operator in sanitize.OPERATORS:
        parts = sanitize.parts_of(operator)
        calls = [sanitize.calls_of(operator, part, parts) for part in range(parts)]
        assert sorted(map(len, calls))[0] > 0
        found = sorted(str(call.kernels) for part in calls for call in part)
        assert found == sorted(str(call.kernels) for call in sanitize.calls_of(operator))


def test_every_call_is_taken(
    sanitize: ModuleType, sanitized: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the launch: operators check what they get, and describe it for the copy engine."""
    launched = []
    monkeypatch.setattr(Emulation, "launch", lambda _, spec, *__: launched.append(spec))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    addresses = set[int]()

    def on_gpu(*tensors: torch.Tensor, original=sanitized.on_gpu) -> list[torch.Tensor]:
        copies = original(*tensors)
        addresses.clear()  # of others, which host's memory may have now
        addresses.update(copy.data_ptr() for copy in copies)
        return copies

    monkeypatch.setattr(sanitized, "on_gpu", on_gpu)
    monkeypatch.setattr(sanitized, "pinned", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(transfer, "is_on_gpu", lambda tensor: tensor.data_ptr() in addresses)
    # Values are dear, and what would be expected of them: no check depends on either.
    zeros = functools.partial(torch.zeros, dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(sanitized, "e4m3", lambda *shape: zeros(shape))
    monkeypatch.setattr(sanitized, "reference", MagicMock())
    for name in ("exact", "norm_error", "fp8_error"):
        monkeypatch.setattr(sanitized, name, lambda *_: 0.0)
    with emulated(num_multiprocessors=sanitized.NUM_BLOCKS):
        for operator in sanitize.OPERATORS:
            for call in sanitize.calls_of(operator):
                call.error()
                assert set(launched) == set(call.kernels), operator
                launched.clear()


@pytest.mark.parametrize(
    ("operator", "changed_lines"),
    [
        ("linear_fp8", 3),
        ("experts_fp8_few", 4),
        ("attention_decode", 4),
        ("attention_prefill", 9),
    ],
)
def test_a_twin_is_the_served_kernel_but_for_who_arrives_or_waits(
    sanitize: ModuleType, tmp_path: Path, operator: str, changed_lines: int
) -> None:
    calls = zip(
        *(sanitize.calls_of(name) for name in (operator, operator + sanitize.TWIN)), strict=True
    )
    pairs = dict.fromkeys(
        pair for served, twin in calls for pair in zip(served.kernels, twin.kernels, strict=True)
    )
    for served, twin in pairs:
        lines = zip(served.source.splitlines(), twin.source.splitlines(), strict=True)
        assert sum(a != b for a, b in lines) == changed_lines
        assert twin.defines == served.defines
    for each in build.build([twin for _, twin in list(pairs)[:2]], jobs=2, cache=tmp_path):
        assert each.faults == ()


def test_what_does_nothing_is_wrong(sanitized: ModuleType) -> None:
    expected = torch.randn(3, 128)
    assert sanitized.norm_error(expected, expected) == 0
    assert (
        not sanitized.norm_error(torch.full_like(expected, torch.nan), expected) < sanitized.BOUND
    )
    assert not sanitized.norm_error(torch.zeros_like(expected), expected) < sanitized.BOUND
    assert sanitized.norm_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


@pytest.mark.parametrize("seed", range(2))
def test_linears_twin_gives_what_it_should(
    sanitized: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of two tiles in each block: it has more to wait for than the served kernel."""
    monkeypatch.setattr(sanitized, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = sanitized.linear_calls(sanitized.LinearWhereBothWait)
    call = next(
        call
        for call in calls
        if ("K_GROUPS", 2) in call.kernels[0].defines and call.error.args[1:4] == (130, 360, 400)
    )
    with emulated(seed, num_multiprocessors=23):
        assert call.error() < sanitized.BOUND


def test_reports(sanitize: ModuleType) -> None:
    def report(log: str, operator: str = "combine", tool: str = "memcheck", missing: int = 0):
        right = len(sanitize.calls_of(operator, 0, sanitize.parts_of(operator))) - missing
        text = log.replace("{answer}", json.dumps({"right": right}))
        return sanitize.report_of(operator, tool, 0, text, 1.0)

    def is_fine(*reports) -> bool:
        return sanitize.is_fine(reports[0], reports)

    clean = MEMCHECK.replace("{errors}", "0")
    assert is_fine(report(clean))
    assert not is_fine(report(clean, missing=1))
    assert not is_fine(report(clean.replace("{answer}", "Error: illegal memory access")))
    assert not is_fine(report(MEMCHECK.replace("{errors}", "3")))
    assert not is_fine(report("{answer}\n"))
    assert is_fine(report(CLEAN, tool="racecheck"))

    race = RACECHECK.replace("{kernel}", "experts_fp8_few").replace("{write}", "Write")
    known = report(race, "experts_fp8_few", "racecheck")
    its_twin = "experts_fp8_few" + sanitize.TWIN
    twin = report(CLEAN, its_twin, "racecheck")
    assert known.errors == 2
    assert is_fine(known, twin)
    assert is_fine(sanitize.merged([known, known]), twin)
    stopped = RACECHECK.replace(
        "{answer}", "========= Warning: Maximum number of hazards reached. So it says.\n{answer}"
    )
    stopped = stopped.replace("{kernel}", "experts_fp8_few").replace("{write}", "Write")
    assert is_fine(report(stopped, "experts_fp8_few", "racecheck"), twin)
    assert not is_fine(report(stopped, "experts_fp8_few", "racecheck"))
    loads_first = race.replace("Read", "Then").replace("Write", "Read").replace("Then", "Write")
    assert is_fine(report(loads_first, "experts_fp8_few", "racecheck"), twin)
    assert not is_fine(known)
    assert not is_fine(known, report(race, its_twin, "racecheck"))
    of_another = report(CLEAN, "attention_decode" + sanitize.TWIN, "racecheck")
    assert not is_fine(known, of_another)
    assert not is_fine(report(race, "combine", "racecheck"), twin)
    for other in (
        RACECHECK.replace("{kernel}", "experts_fp8_few").replace("{write}", "Read"),
        race.replace("and Read", "and Write"),
        RACECHECK.replace("{kernel}", "grouped_fp8").replace("{write}", "Write"),
        race + "========= Invalid __shared__ write of size 4 bytes\n",
    ):
        assert not is_fine(report(other, "experts_fp8_few", "racecheck"), twin)
        mixed = sanitize.merged([known, report(other, "experts_fp8_few", "racecheck")])
        assert not is_fine(mixed, twin)

    # Each kernel of an operator; and what is not known is told whole, apart from what is.
    prefill = race.replace("experts_fp8_few", "attention_prefill_fp8")
    known = report(prefill, "attention_prefill", "racecheck")
    assert is_fine(known, report(CLEAN, "attention_prefill" + sanitize.TWIN, "racecheck"))
    other = "========= Error: Race reported between Write access at attention_prefill+0x10\n" + (
        "=========     and Read access at attention_prefill+0x20 [1 hazard]\n"
        "=========     and Write access at attention_prefill+0x30 [1 hazard]\n"
    )
    assert report(other + prefill, "attention_prefill", "racecheck").others == other


def test_races_of_a_library_are_no_errors(sanitize: ModuleType) -> None:
    first, last = "nvjet_sm90_tst_64x8_64x16_1x1_h_bz_splitK_bias_TNT", "cutlass_80_wmma_tensorop"

    def report(write: str, *reads: str, errors: int = 1, more: str = "", operator="norm_route"):
        ends = [
            f"=========     and Read access at {kernel}+0x2ec0 [8 hazards]\n" for kernel in reads
        ]
        calls = len(sanitize.calls_of(operator, 0, sanitize.parts_of(operator)))
        log = (
            "========= COMPUTE-SANITIZER\n"
            f"========= Error: Race reported between Write access at {write}+0xaf0\n"
            f"{''.join(ends)}=========\x20\n{more}{json.dumps({'right': calls})}\n"
            f"========= RACECHECK SUMMARY: 1 hazards displayed ({errors} errors, 0 warnings)\n"
        )
        return sanitize.report_of(operator, "racecheck", 0, log, 1.0)

    for kernels in ((first, first), (first, first, last), (last, last)):
        found = report(*kernels)
        assert (found.errors, found.of_library) == (0, 1)
        assert sanitize.is_fine(found, [found])
    assert sanitize.merged([found, found]).of_library == 2
    invalid = (
        f"========= Invalid __shared__ write of size 4 bytes\n=========     at {first}+0x31e0\n"
    )
    for found in (
        report("norm_route", first),
        report(first, "norm_route"),
        report(first, first, "norm_route"),
        report("norm_route", "norm_route"),
        report(first, first, errors=2),
        report(first, first, errors=2, more=invalid),
    ):
        assert found.errors
        assert not sanitize.is_fine(found, [found])
    # Beside known ones, which still need their twin.
    own = (
        "========= Error: Race reported between Write access at experts_fp8_few+0x10\n"
        "=========     and Read access at experts_fp8_few+0x20 [1 hazard]\n"
    )
    found = report(first, first, errors=2, more=own, operator="experts_fp8_few")
    assert (found.errors, found.of_library) == (1, 1)
    assert not sanitize.is_fine(found, [found])
    twin = report(first, first, operator="experts_fp8_few" + sanitize.TWIN)
    assert sanitize.is_fine(found, [found, twin])


def test_no_kernel_of_ours_is_taken_for_a_librarys(sanitize: ModuleType) -> None:
    for operator in sanitize.OPERATORS:
        for call in sanitize.calls_of(operator):
            for kernel in call.kernels:
                assert not re.match(sanitize._LIBRARY, kernel.name)
