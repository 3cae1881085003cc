"""No served kernel gives shared memory back to the copy engine while it may still read there.

An arrival at a barrier does not wait for reads that its own warp has under way, nor does a copy
that it begins: the assembler lets them overlap. What came next was seen in a result that was read
from the same place (docs/LOG.md). The machine code shows it: each read has a scoreboard, and
nothing has waited for that, and no fence stands, where the arrival or the copy begins.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from triton import knobs

from gptoss_kernels.cuda import attention_prefill
from gptoss_kernels.cuda.compiler import KernelSpec, compile_source
from gptoss_kernels.cuda.grouped_fp8 import choose_tile as choose_grouped_tile
from gptoss_kernels.cuda.linear_fp8 import choose_tile

# A scoreboard's number in an instruction's upper half, and which it waits for.
WRITTEN_BIT, WAITED_BIT, NO_SCOREBOARD = 110 - 64, 116 - 64, 7
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\S+)[^;]*;\s*/\* 0x[0-9a-f]{16} \*/"
)
UPPER_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
# Arrivals that say nothing of bytes, and copies into shared memory.
GIVING_BACK = re.compile(r"SYNCS\.ARRIVE\S*\.A1T0|UTMALDG|UBLKCP\.S")


def unread(code: str) -> Iterator[str]:
    """Instructions that give memory back while reads are under way, of `cuobjdump -sass`.

    In the order in which they lie: a branch may lead elsewhere, and is taken for a straight line.
    """
    under_way: set[int] = set()
    name = ""
    for line in code.splitlines():
        if found := INSTRUCTION.search(line):
            name = found[1]
        elif name and (found := UPPER_HALF.match(line)):
            bits = int(found[1], 16)
            written, waited = bits >> WRITTEN_BIT & 7, bits >> WAITED_BIT & 63
            under_way = {each for each in under_way if not waited >> each & 1}
            if name.startswith(("MEMBAR", "EXIT")):
                under_way.clear()
            elif name.startswith("LDS") and written != NO_SCOREBOARD:
                under_way.add(written)
            elif GIVING_BACK.match(name) and under_way:
                yield name
            name = ""


def machine_code(spec: KernelSpec, folder: Path, change: Callable[[str], str] = str) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(compile_source(change(spec.source), dict(spec.defines)).image)
    command = (knobs.nvidia.cuobjdump.path, "-sass", str(path))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def served() -> list[KernelSpec]:
    """Of kernels that the copy engine feeds: attention's tiles, and those of larger products."""
    linear = (
        replace(choose_tile(rows, n, k, 132), has_residual=n == 2880)
        for rows in (64, 640, 1152, 8192)
        for n, k in ((5120, 2880), (2880, 4096))
    )
    grouped = (
        choose_grouped_tile(rows, 32, x_group=group, swiglu=swiglu, out_group=128 if swiglu else 64)
        for rows in (256, 1152 * 4, 8192 * 4)
        for swiglu, group in ((True, 128), (False, 128))
    )
    tiles = (*attention_prefill.served_tiles(), *linear, *grouped)
    return [*dict.fromkeys(tile.spec for tile in tiles)]


@pytest.mark.parametrize("spec", served(), ids=lambda spec: f"{spec.name} {spec.variant}")
def test_nothing_is_given_back_unread(spec: KernelSpec, tmp_path: Path) -> None:
    code = machine_code(spec, tmp_path)
    assert GIVING_BACK.search(code)
    assert not [*unread(code)]


def test_a_missing_fence_shows(tmp_path: Path) -> None:
    fence = "shared_fence();  // the copy engine writes here next"

    def without_fence(source: str) -> str:
        assert source.count(fence) == 1
        return source.replace(fence, "")

    spec = attention_prefill.PrefillTile().spec
    assert [*unread(machine_code(spec, tmp_path, without_fence))]
