"""CUDA C++ for g++: what differs in the language, and inline PTX as calls of ptx.hpp.

Each asm statement becomes a block: its operands as references of the width that their constraints
name, and then each instruction as a call. So what a GPU would execute is what is read here, down to
the order of operands. An instruction that is unknown is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

_REGISTERS = {"r": "unsigned", "l": "unsigned long long", "f": "float", "h": "unsigned short"}
_LOCALS = {
    "pred": "bool",
    **dict.fromkeys(("b16", "u16", "s16", "f16"), "unsigned short"),
    **dict.fromkeys(("b32", "u32", "s32", "f16x2", "bf16x2"), "unsigned"),
    **dict.fromkeys(("b64", "u64", "s64"), "unsigned long long"),
    "f32": "float",
}
_TYPES = {
    **{f"{kind}8": "unsigned char" for kind in "bu"},
    **{f"{kind}16": "unsigned short" for kind in "bu"},
    **{f"{kind}32": "unsigned" for kind in "bu"},
    **{f"{kind}64": "unsigned long long" for kind in "bu"},
    "s8": "signed char",
    "s16": "short",
    "s32": "int",
    "s64": "long long",
    "f32": "float",
    "f64": "double",
}
_MULTIPLIED = {"e4m3": "E4M3", "e5m2": "E5M2", "bf16": "BF16", "f16": "F16"}
_OF_THE_CTA = r"(\.shared(::cta|::cluster)?)?"
_ORDER = r"(\.(release|acquire|relaxed))?(\.(cta|cluster|gpu|sys))?"
_CACHE = r"(\.(ca|cg|cs|lu|cv|wb|wt|nc))*(\.L1::\w+)?(\.L2::\w+)*"
_VECTOR = r"(\.v[248])?\.(?P<type>[busf]\d+)"


class CompilationError(Exception):
    """There is no way to run this text here: what is unknown, and to whom."""


# ---- instructions ------------------------------------------------------------------------------

# Families of instructions whose modifiers make no difference here: by a pattern of their name, the
# function that gets their operands. None: they do nothing. All others are called by their name.
_FAMILIES: tuple[tuple[str, str | None], ...] = (
    (rf"ld(\.volatile|\.relaxed\.\w+|\.acquire\.\w+)\.global{_CACHE}{_VECTOR}", "poll_global"),
    (rf"ld(\.weak)?\.global{_CACHE}{_VECTOR}", "load_global"),
    (rf"st(\.weak)?\.global{_CACHE}{_VECTOR}", "store_global"),
    (
        rf"st(\.volatile|\.relaxed\.\w+|\.release\.\w+)\.global{_CACHE}{_VECTOR}",
        "store_global_apart",
    ),
    (rf"ld(\.volatile|\.weak)?\.shared(::cta|::cluster)?{_VECTOR}", "load_shared"),
    (rf"st(\.volatile|\.weak)?\.shared(::cta|::cluster)?{_VECTOR}", "store_shared"),
    (rf"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes{_VECTOR}", "store_async"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.shared(::cta)?\.b16", "load_matrices<false>"),
    (r"ldmatrix\.sync\.aligned\.m8n8\.x[124]\.trans\.shared(::cta)?\.b16", "load_matrices<true>"),
    (r"stmatrix\.sync\.aligned\.m8n8\.x[124]\.shared(::cta)?\.b16", "store_matrices<false>"),
    (rf"mbarrier\.init{_OF_THE_CTA}\.b64", "emulator::barrier_init"),
    (rf"mbarrier\.arrive\.expect_tx{_ORDER}{_OF_THE_CTA}\.b64", "barrier_arrive_expect"),
    (rf"mbarrier\.arrive{_ORDER}{_OF_THE_CTA}\.b64", "barrier_arrive"),
    (rf"mbarrier\.try_wait\.parity{_ORDER}{_OF_THE_CTA}\.b64", "barrier_try_wait"),
    (r"mapa\.shared::cluster\.u32", "map_shared"),
    (
        r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes"
        r"(\.L2::cache_hint)?",
        "load_bulk",
    ),
    (r"cp\.async\.bulk\.prefetch\.L2\.global", "prefetch_bulk"),
    (r"cp\.async\.cg\.shared(::cta)?\.global\.L2::cache_hint", "copy_async"),
    (r"cp\.async\.commit_group", "emulator::copy_commit"),
    (r"cp\.async\.wait_group", "emulator::copy_wait"),
    (r"cp\.async\.bulk\.commit_group", "emulator::bulk_commit"),
    (r"cp\.async\.bulk\.wait_group\.read", "emulator::bulk_wait_read"),
    (r"wgmma\.fence\.sync\.aligned", "emulator::multiply_fence"),
    (r"wgmma\.commit_group\.sync\.aligned", "emulator::multiply_commit"),
    (r"wgmma\.wait_group\.sync\.aligned", "emulator::multiply_wait"),
    (r"(bar|barrier)(\.cta)?\.sync(\.aligned)?", "named_sync"),
    (r"(bar|barrier)(\.cta)?\.arrive(\.aligned)?", "named_arrive"),
    (rf"barrier\.cluster\.arrive{_ORDER}(\.aligned)?", "emulator::cluster_arrive"),
    (rf"barrier\.cluster\.wait{_ORDER}(\.aligned)?", "emulator::cluster_wait"),
    (r"fence\.proxy\.async(\.shared::cta|\.global)?", "emulator::proxy_fence"),
    (r"griddepcontrol\.wait", "emulator::wait_for_previous"),
    (r"fence(\.mbarrier_init|\.acq_rel|\.sc)[\w.]*|membar\.\w+", None),
    (r"prefetch[\w.:]*|setmaxnreg[\w.]*|griddepcontrol\.launch_dependents|discard[\w.:]*", None),
)
_BOX_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor\.(?P<rank>\d)d\.shared::(cluster|cta)\.global(\.tile)?"
    r"\.mbarrier::complete_tx::bytes(?P<multicast>\.multicast::cluster)?(\.L2::cache_hint)?"
)
_BOX_STORE = re.compile(
    r"cp\.async\.bulk\.tensor\.(?P<rank>\d)d\.global\.shared::cta(\.tile)?\.bulk_group"
    r"(\.L2::cache_hint)?"
)
_WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k(?P<k>\d+)\.f32\.(?P<type>\w+)\.\w+"
)
_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col\.f32\.(?P<type>\w+)\.\w+\.f32")
_KNOWN = set(re.findall(r"\b(\w+)\(", (FOLDER / "ptx.hpp").read_text()))


def _split(text: str, separator: str) -> list[str]:
    """Where no bracket or string is open; the separator is one character."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == '"':
            i = _string_end(text, i)
            continue
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
        elif text[i] == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def _flat(operand: str) -> str:
    return re.sub(r"[\[\]{}]", "", operand)


def _call(name: str, operands: list[str]) -> str:
    """One instruction as a statement."""
    flat = [each.strip() for operand in operands for each in _split(_flat(operand), ",")]
    if found := _BOX_LOAD.fullmatch(name):
        rank = int(found["rank"])
        target, source, *place = flat[: 2 + rank]
        mask = flat[3 + rank] if found["multicast"] else "0"
        coordinates = ", ".join(f"int({each})" for each in place)
        return (
            f"{{ const int place_[] = {{{coordinates}}}; emulator::load_box({rank}, {target}, "
            f"reinterpret_cast<const void*>({source}), place_, {flat[2 + rank]}, {mask}); }}"
        )
    if found := _BOX_STORE.fullmatch(name):
        rank = int(found["rank"])
        target, *place, source = flat[: 2 + rank]
        coordinates = ", ".join(f"int({each})" for each in place)
        return (
            f"{{ const int place_[] = {{{coordinates}}}; emulator::store_box({rank}, "
            f"reinterpret_cast<const void*>({target}), place_, {source}); }}"
        )
    if found := _WGMMA.fullmatch(name):
        return _wgmma(found, operands)
    if found := _MMA.fullmatch(name):
        return _mma(found, operands)
    for pattern, function in _FAMILIES:
        if found := re.fullmatch(pattern, name):
            if function is None:
                return ";"
            kind = found.groupdict().get("type")
            template = f"<{_TYPES[kind]}>" if kind else ""
            prefix = "" if "::" in function.split("<")[0] else "ptx::"
            if function in ("load_shared", "load_global", "poll_global"):
                flat = [flat[-1], *flat[:-1]]  # the address first
            if function == "store_async":
                flat = [flat[0], flat[-1], *flat[1:-1]]
            return f"{prefix}{function}{template}({', '.join(flat)});"
    function = re.sub(r"\W+", "_", name)
    if function not in _KNOWN:
        raise CompilationError(f"the emulator does not know the PTX instruction {name}")
    return f"ptx::{function}({', '.join(flat)});"


def _wgmma(found: re.Match[str], operands: list[str]) -> str:
    kind = _MULTIPLIED[found["type"]]
    if int(found["k"]) * (1 if kind.startswith("E") else 2) != 32:
        raise CompilationError(f"no such shape: {found.group()}")
    sums, a, b, accumulates, a_sign, b_sign, *transposed = (each.strip() for each in operands)
    in_registers = a.startswith("{")
    names = [each.strip() for each in _flat(sums).split(",")]
    places = f"const void* const places_[] = {a.replace('operand', 'place')}; "
    if len(names) != int(found["columns"]) // 2:
        raise CompilationError(f"{found.group()} with {len(names)} accumulators")
    a_transposed, b_transposed = ("0", "0")
    if in_registers and transposed:
        (b_transposed,) = transposed
    elif transposed:
        a_transposed, b_transposed = transposed
    return (
        f"{{ float* const sums_[] = {{{', '.join(f'&{each}' for each in names)}}}; "
        + (f"const unsigned a_[] = {a}; {places}" if in_registers else "")
        + f"const emulator::Product product_{{emulator::Type::{kind}, {found['columns']}, "
        f"bool({a_transposed}), bool({b_transposed}), int({a_sign}), int({b_sign})}}; "
        f"emulator::multiply_async(product_, sums_, "
        f"{'a_, places_, 0' if in_registers else f'nullptr, nullptr, {a}'}, "
        f"{b}, {accumulates}); }}"
    )


def _mma(found: re.Match[str], operands: list[str]) -> str:
    d, a, b, c = (operand.strip() for operand in operands)
    targets = ", ".join(f"&{each.strip()}" for each in _flat(d).split(","))
    words = (len(a.split(",")), len(b.split(",")))
    return (
        f"{{ float* const d_[4] = {{{targets}}}; const unsigned a_[] = {a}, b_[] = "
        f"{b if b.startswith('{') else '{' + b + '}'}; const float c_[4] = {c}; "
        f"ptx::multiply(emulator::Type::{_MULTIPLIED[found['type']]}, {found['k']}, d_, "
        f"a_, {words[0]}, b_, {words[1]}, c_); }}"
    )


# ---- asm statements ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    constraint: str
    expression: str


def _string_end(text: str, start: int) -> int:
    i = start + 1
    while text[i] != '"':
        i += 2 if text[i] == "\\" else 1
    return i + 1


def _operands(section: str) -> list[_Operand]:
    found = []
    for part in _split(section, ","):
        if not part.strip():
            continue
        match = re.fullmatch(r'\s*"([^"]*)"\s*(?:\((.*)\))?\s*', part, re.DOTALL)
        assert match, f"an operand of an asm statement: {part}"
        found.append(_Operand(match[1], match[2] or ""))
    return found


def _instructions(template: str) -> Iterator[str]:
    """Statements of PTX in C++, with names for operands."""
    registers: dict[str, str] = {}

    def named(text: str) -> str:
        text = re.sub(r"%(\d+)", r"operand_\1_", text)
        text = re.sub(r"%+([a-z_]\w*)", r"ptx::special_\1()", text)
        text = re.sub(r"\b0[fF]([0-9a-fA-F]{8})\b", r"emulator::bits<float>(0x\1u)", text)
        text = re.sub(r"(?<![\w:])_(?!\w)", "ptx::sink", text)
        return re.sub(
            r"(?<![\w:])[A-Za-z]\w*(?!\w)", lambda name: registers.get(name[0], name[0]), text
        )

    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", template, flags=re.DOTALL)
    while text := text.lstrip():
        if text[0] in "{}":  # no statement begins with one
            yield text[0]
            text = text[1:]
            continue
        statement, _, text = text.partition(";")
        if declared := re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.DOTALL):
            names = [name.strip() for name in declared[2].split(",")]
            registers.update({name: f"register_{name}" for name in names})
            yield " ".join(f"{_LOCALS[declared[1]]} register_{name}{{}};" for name in names)
            continue
        guard = ""
        if guarded := re.match(r"@(!?)(\w+)\s+", statement):
            guard = f"if ({guarded[1]}{named(guarded[2])}) "
            statement = statement[guarded.end() :]
        name, _, rest = statement.strip().partition(" ")
        operands = _split(named(rest), ",") if rest else []
        yield guard + "{ " + _call(name, operands) + " }"


def _statement(arguments: str) -> str:
    template, *sections = _split(arguments, ":")
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', template, re.DOTALL)
    text = "".join(literals).replace("\\n", "\n").replace("\\t", " ").replace('\\"', '"')
    text = text.replace("%%", "%")
    sections += [""] * (3 - len(sections))
    outputs, inputs = _operands(sections[0]), _operands(sections[1])
    if not text.strip():
        return "do { } while (0)"
    lines = []
    for i, operand in enumerate(inputs, len(outputs)):
        if operand.constraint == "n":
            lines.append(f"constexpr auto operand_{i}_ = ({operand.expression});")
            continue
        register = _REGISTERS[operand.constraint]
        lines.append(
            f"const {register} operand_{i}_ = ptx::input<{register}>({operand.expression});"
        )
        if "wgmma" in text and operand.constraint == "r":
            lines.append(f"const void* const place_{i}_ = ptx::place({operand.expression});")
    for i, operand in enumerate(outputs):
        register = _REGISTERS[operand.constraint.strip("=+&")]
        lines.append(f"{register}& operand_{i}_ = ptx::output<{register}>({operand.expression});")
    return "do { " + " ".join([*lines, *_instructions(text)]) + " } while (0)"


def _without_asm(source: str) -> str:
    """Each asm statement replaced; lines keep their numbers."""
    result, position = [], 0
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|"(?:[^"\\]|\\.)*"|\basm\b(?:\s+volatile)?\s*\(', re.DOTALL
    )
    for found in pattern.finditer(source):
        if found.start() < position or not found[0].startswith("asm"):
            continue
        depth, i = 1, found.end()
        while depth:
            if source[i] == '"':
                i = _string_end(source, i)
                continue
            depth += {"(": 1, ")": -1}.get(source[i], 0)
            i += 1
        result.append(source[position : found.start()])
        result.append(_statement(source[found.end() : i - 1]))
        result.append("\n" * source.count("\n", found.start(), i))
        position = i
    return "".join([*result, source[position:]])


# ---- the language ------------------------------------------------------------------------------

_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\(\w+\)\s+)?"
    r"([\w\s]+?)\s*(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(r"__shared__\s+(?:(?:__align__|alignas)\((\w+)\)\s+)?([\w:<>]+)\s+([^;]*);")
_PARAMETERS = r"__global__[^;{]*?\b%s\s*\("


def _dynamic(found: re.Match[str]) -> str:
    return f"{found[1]}* const {found[2]} = ({found[1]}*)emulator::dynamic_shared();"


def _static(found: re.Match[str]) -> str:
    alignment, kind, declared = found[1] or "16", found[2], found[3]
    lines = []
    for variable in _split(declared, ","):
        match = re.fullmatch(r"\s*(\w+)\s*((?:\[[^\]]*\]\s*)*)", variable)
        assert match, f"a shared variable: {found[0]}"
        of = f"{match[1]}_type_"
        lines.append(
            f"using {of} = {kind}{match[2].strip()}; static const char {match[1]}_place_ = 0; "
            f"{of}& {match[1]} = *({of}*)emulator::static_shared("
            f"&{match[1]}_place_, sizeof({of}), {alignment});"
        )
    return " ".join(lines)


def translate(source: str, kernel: str) -> str:
    """The text of a kernel, and below it what launches `kernel`."""
    text = _without_asm(source)
    text = _DYNAMIC.sub(_dynamic, text)
    text = _STATIC.sub(_static, text)
    signature = re.search(_PARAMETERS % re.escape(kernel), text)
    cluster = signature and re.search(r"__cluster_dims__\(([^()]*)\)", signature[0])
    size = " * ".join(f"({each})" for each in _split(cluster[1], ",")) if cluster else "1"
    return (
        '#include "ptx.hpp"\n'
        + text
        + f"""
#line 1 "launch"
extern "C" const char* emulated_launch(const void* setting, void** arguments) {{
    return emulator::launch(
        setting, {size}, [](void** packed) {{ emulator::call({kernel}, packed); }}, arguments);
}}
"""
    )
