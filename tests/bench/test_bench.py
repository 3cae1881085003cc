"""That the benchmark's modules fit together without a GPU: from times to the tables."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts, which import what runs, as scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("bench_gemm", "bench_attention", "measuring", "table")
    others = ("attended", "attention", "attention_peers", "rope", "running")
    return {name: importlib.import_module(name) for name in (*names, *others)}


def test_times_become_lines_and_lines_a_table(modules, monkeypatch, tmp_path, capsys) -> None:
    measuring, table = modules["measuring"], modules["table"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(measuring, "command_output", lambda *command: "580.159.04")

    def timing(burst: float, sustained: float | None = None):
        spreads = [
            measuring.Spread(0.9 * ms, ms, 1.1 * ms, 1980, 600) if ms else None
            for ms in (burst, sustained)
        ]
        return measuring.Timing(*spreads)

    def line(benchmark: str, times, **own: object) -> str:
        made = measuring.result_line(benchmark, times, "ours", "command", "abc1234")
        return json.dumps({**made, "date": "2026-11-30", **own})

    grouped = {
        "ours": timing(0.8, 1.0),
        "DeepGEMM contiguous 128 (no bias), sgl-deep-gemm 0.1.5": timing(0.9, 1.05),
        "Humming, humming-kernels 0.1.20": timing(0.85, 1.2),
        "Humming MXFP4 x FP8, humming-kernels 0.1.20": timing(0.1, 0.1),
        "Triton-lang": timing(1.5, 1.6),
    }
    lines = [
        line(
            *("moe_gemm", grouped),
            model="120b",
            tokens=2048,
            floor_ms=0.4,
            tflops=715.0,
            swiglu_group=128,
            weight_values="mxfp4",
        ),
        line("linear", grouped, n=5120, k=2880, tokens=8, floor_ms=0.4, tflops=34.0),
        line("quantise", {"ours": timing(0.01)}, tokens=8, floor_ms=0.008, tb_per_s=3.4),
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    assert capsys.readouterr().out.splitlines() == [
        "| operator | bound by | tokens | burst, us | sustained, us | rate | share of floor "
        "| best peer, us |",
        "|-|-|-|-|-|-|-|-|",
        "| `linear_fp8`, N = 5120, K = 2880 | memory | 8 | 800.0 | 1000.0 | 2.25 TB/s | 50% "
        "| Humming: 850.0, sustained DeepGEMM contiguous 128 (no bias): 1050.0 |",
        "| both grouped products, 120b | tensor cores | 2048 | 800.0 | 1000.0 | 715 TFLOP/s | 50% "
        "| Humming: 850.0, sustained DeepGEMM contiguous 128 (no bias): 1050.0 |",
        "| `quantise` | memory | 8 | 10.0 |  | 3.40 TB/s | 80% |  |",
        "",
        "Measured: 2026-11-30, abc1234, NVIDIA H200 (3 rows)",
        "",
        "| operator | tokens | CUDA C++, us | Triton-lang | deepgemm operators |",
        "|-|-|-|-|-|",
        "| `linear_fp8`, N = 5120, K = 2880 | 8 | 800.0 | 1500.0 |  |",
        "| both grouped products, 120b | 2048 | 800.0 | 1500.0 |  |",
    ]


def test_attention_has_rows_and_errors(modules, monkeypatch, tmp_path, capsys) -> None:
    common = {"model": None, "weights": None, "date": "2026-11-30", "commit": "abc1234"}
    common |= {"device": "NVIDIA H200", "batch": 1, "queries": 8192, "context": 8192}
    fa3 = "FA3, tokenspeed-fa3 3.0.0.post20260810"
    prefill = common | {"benchmark": "attention_prefill", "kv": "fp8", "tokens": 8192, "window": 0}
    prefill |= {"ms": 0.8, "sustained_ms": 0.9, "floor_ms": 0.6, "bound_by": "exponentials"}
    prefill |= {"tflops": 700.0, "tb_per_s": 0.2, "errors": {"ours": 0.02, fa3: 0.023}}
    prefill |= {"peers": {fa3: 0.9, "cuDNN (no sinks or pages), torch 2.11": 0.1}}
    decode = common | {"benchmark": "attention_decode", "kv": "bf16", "tokens": None}
    decode |= {"queries": 1, "batch": 8, "window": 128, "ms": 0.008, "floor_ms": 0.002}
    decode |= {"bound_by": "memory", "tflops": 1.0, "tb_per_s": 1.25, "errors": {"ours": 0.002}}
    decode |= {"peers": {"FlashInfer XQA, flashinfer-python 0.6.18.post1": 0.0073}}
    rope = common | {"benchmark": "rope_and_cache_write", "kv": "fp8", "tokens": 8, "ms": 0.002}
    rope |= {"floor_ms": 0.001, "tb_per_s": 2.12, "peers": {"Triton-lang": 0.003}}
    older = decode | {"ms": 5.0}
    longer = decode | {"context": 32768}
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in (older, longer, decode, prefill, rope)))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    modules["table"].main()
    window = "`attention`, decode of 1 queries, bf16 KV, window 128"
    assert capsys.readouterr().out.splitlines() == [
        "| operator | bound by | tokens | burst, us | sustained, us | rate | share of floor "
        "| best peer, us |",
        "|-|-|-|-|-|-|-|-|",
        "| `rope_and_cache_write`, fp8 KV | memory | 8 | 2.0 |  | 2.12 TB/s | 50% |  |",
        "| `attention`, prefill, fp8 KV | exponentials | 8192 | 800.0 | 900.0 | 700 TFLOP/s | 75% "
        "| FA3: 900.0 |",
        f"| {window} | memory | 8 at 8192 | 8.0 |  | 1.25 TB/s | 25% | FlashInfer XQA: 7.3 |",
        f"| {window} | memory | 8 at 32768 | 8.0 |  | 1.25 TB/s | 25% | FlashInfer XQA: 7.3 |",
        "",
        "Measured: 2026-11-30, abc1234, NVIDIA H200 (4 rows)",
        "",
        "| operator | tokens | CUDA C++, us | Triton-lang | deepgemm operators |",
        "|-|-|-|-|-|",
        "| `rope_and_cache_write`, fp8 KV | 8 | 2.0 | 3.0 |  |",
        "",
        "| operator | tokens | error | others |",
        "|-|-|-|-|",
        "| `attention`, prefill, fp8 KV | 8192 | 2.00e-02 | FA3 2.30e-02 |",
        f"| {window} | 8 at 8192 | 2.00e-03 |  |",
        f"| {window} | 8 at 32768 | 2.00e-03 |  |",
    ]


@pytest.mark.parametrize("window", [0, 1, 3, 8, 20])
@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_a_shape_counts_what_is_seen(modules, queries: int, context: int, window: int) -> None:
    shape = modules["attended"].Shape(3, queries, context, window, "bf16")
    seen = [
        {key for key in range(position + 1) if not window or key > position - window}
        for position in range(context - queries, context)
    ]
    assert shape.pairs == sum(map(len, seen))
    assert shape.first_key == min(set().union(*seen))
    keys = len(set().union(*seen))
    assert shape.num_bytes == 3 * 2 * (2 * keys * 8 * 64 + 2 * queries * 64 * 64)


def test_floors_are_those_of_the_performance_notes(modules) -> None:
    shape = modules["attended"].Shape
    prefill = shape(1, 8192, 8192, 0, "bf16")
    assert prefill.bound_by == "tensor cores"
    assert prefill.floor_ms == pytest.approx(549.8e9 / 779e12 * 1e3, rel=1e-3)
    assert shape(1, 8192, 8192, 0, "fp8").bound_by == "exponentials"
    assert shape(1, 8192, 8192, 0, "fp8").floor_ms == pytest.approx(0.5794, rel=1e-3)
    # A window of 128 reads 8 and writes 8 KB a token, and multiplies for 2 MFLOP.
    assert shape(1, 32768, 32768, 128, "bf16").bound_by == "memory"
    decode = shape(128, 1, 8192, 0, "bf16")
    assert decode.bound_by == "memory"
    assert decode.floor_ms == pytest.approx(0.4777, rel=1e-3)
    assert decode.sets == 1
    assert shape(1, 1, 8192, 0, "bf16").sets == 16
    assert shape(1, 1, 8192, 128, "fp8").sets == 512
    assert decode.decodes == (128, 128, 1)
    assert prefill.decodes == (0, 0, 0)


SMALL = [(2, 3, 200, 0), (2, 3, 200, 70), (1, 150, 150, 0), (1, 150, 150, 33)]


@pytest.fixture
def inputs_of(modules, monkeypatch):
    """Of a small shape, on the CPU."""
    for module in ("attended", "attention_peers"):
        monkeypatch.setattr(modules[module], "HEADS", 4)
        monkeypatch.setattr(modules[module], "KV_HEADS", 2)

    def make(batch: int, queries: int, context: int, window: int, kv: str = "bf16"):
        shape = modules["attended"].Shape(batch, queries, context, window, kv)
        return modules["attended"].Inputs(shape, sets=2, device="cpu")

    return make


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("sizes", SMALL)
def test_a_result_is_judged_before_it_is_timed(modules, inputs_of, sizes, kv: str) -> None:
    inputs = inputs_of(*sizes, kv)
    right = modules["attention_peers"].operators("reference", inputs)
    assert inputs.error(right) < 3e-3
    wrong = {
        "the other set": lambda index: right(1),
        "a row missing": lambda index: right(0).index_fill(0, torch.tensor([1]), torch.nan),
    }
    for call in wrong.values():
        with pytest.raises(ArithmeticError):
            inputs.error(call)
    with pytest.raises(ArithmeticError, match="wrong by"):
        inputs.error(right, has_sinks=False)


class FlashAttention:
    """Its two functions as documented, for a prefix that ends with the queries."""

    @staticmethod
    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, sinks, **descale):
        assert causal
        assert sinks.dtype == torch.bfloat16
        assert all(bool((scale == 1).all()) for scale in descale.values())
        window = window_size[0] + 1
        groups = q.shape[2] // k.shape[2]
        q, k, v = (x.double() for x in (q, k.repeat_interleave(groups, 2), v))
        v = v.repeat_interleave(groups, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
        position = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        where = torch.arange(k.shape[1])
        visible = (where <= position) & ((where > position - window) | (window == 0))
        scores = scores.masked_fill(~visible, -torch.inf)
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).bfloat16()

    @classmethod
    def flash_attn_with_kvcache(
        cls, q, keys, values, *, page_table, cache_seqlens, num_splits, **options
    ):
        length = int(cache_seqlens[0])
        assert bool((cache_seqlens == length).all())
        k, v = (
            cache.view(torch.uint8)[page_table.long()].view(cache.dtype).flatten(1, 2)[:, :length]
            for cache in (keys, values)
        )
        return cls.flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("name", ["fa3", "fa3-dense"])
def test_flash_attention_3_gets_what_it_wants(
    modules, monkeypatch, inputs_of, name: str, sizes, kv: str
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", FlashAttention)
    inputs = inputs_of(*sizes, kv)
    call = modules["attention_peers"].ATTENDERS[name].make(inputs)
    # In FP8 the queries are rounded, too.
    assert inputs.error(call) < {"bf16": 3e-3, "fp8": 5e-2}[kv]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_rope_is_judged_before_it_is_timed(modules, monkeypatch, kv: str) -> None:
    rope = modules["rope"]
    rotated = rope.Rotated(70, kv, 2, device="cpu")
    rotated.checked("reference")
    right = rope.load_attention("reference").rope_and_cache_write

    def wrong(qkv, positions, *others):
        return right(qkv, positions + 1, *others)

    monkeypatch.setattr(
        rope, "load_attention", lambda _: SimpleNamespace(rope_and_cache_write=wrong)
    )
    rotated = rope.Rotated(70, kv, 2, device="cpu")
    rotated.positions.clamp_(max=1000)
    with pytest.raises(ArithmeticError, match="wrong by"):
        rotated.checked("reference")


def test_bytes_of_rope(modules) -> None:
    # 80 heads read and 80 written, in bf16; in FP8 16 of them in half as many bytes.
    assert modules["rope"].num_bytes(1, "bf16") == 2 * 80 * 128 + 256 + 16
    assert modules["rope"].num_bytes(10, "fp8") == 10 * (2 * 80 * 128 - 16 * 64 + 256 + 16)


def test_a_shape_becomes_a_line_and_a_peer_that_fails_is_left_out(
    modules, monkeypatch, inputs_of, capsys
) -> None:
    attention, peers, measuring = (
        modules[name] for name in ("attention", "attention_peers", "measuring")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    reference = partial(peers.operators, "reference")

    def missing(inputs):
        raise ImportError("no such library")

    attenders = {
        "cuda": peers.Attender("ours", reference),
        "fa3": peers.Attender("FA3", missing, "tokenspeed-fa3"),
        "triton": peers.Attender("Triton-lang", reference),
        "wrong": peers.Attender("wrong", lambda inputs: lambda index: inputs.queries[index]),
    }
    monkeypatch.setattr(attention, "ATTENDERS", attenders)
    inputs = inputs_of(2, 1, 200, 0)
    monkeypatch.setattr(attention, "Inputs", lambda shape: inputs)
    recorded: list[dict[str, Any]] = []

    class Bench:
        arguments = SimpleNamespace(only=None)

        def time(self, calls, count, is_heavy):
            assert list(calls) == ["ours", "Triton-lang"]
            spread = measuring.Spread(0.9, 1.0, 1.1, None, None)
            return {name: measuring.Timing(spread, None) for name in calls}

        def record(self, benchmark, times, ours, **own):
            recorded.append({"benchmark": benchmark, **own})

    attention.bench_shape(Bench(), "attention_decode", inputs.shape)
    printed = capsys.readouterr().out
    assert "without FA3: ImportError: no such library" in printed
    assert "without wrong: ArithmeticError: the result is wrong by" in printed
    (line,) = recorded
    assert line["benchmark"] == "attention_decode"
    assert (line["tokens"], line["batch"], line["context"]) == (None, 2, 200)
    assert set(line["errors"]) == {"ours", "Triton-lang"}
    assert line["tb_per_s"] == round(inputs.shape.num_bytes / 1e9, 3)


def test_the_usual_shapes_are_those_of_the_bars(modules, monkeypatch) -> None:
    shapes: list[tuple[str, Any]] = []
    attention, running = modules["attention"], modules["running"]
    monkeypatch.setattr(attention, "bench_shape", lambda _, *of: shapes.append(of))
    script = modules["bench_attention"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running, "Board", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", "prefill", "decode"])
    script.main()
    assert len({*shapes}) == len(shapes)
    for kv in ("bf16", "fp8"):
        for window in (0, 128):
            own = [(name, s) for name, s in shapes if (s.kv, s.window) == (kv, window)]
            prefills = [s.context for name, s in own if name == "attention_prefill"]
            assert prefills == [8192, 32768, 131072]
            decodes = [(s.context, s.batch) for name, s in own if name == "attention_decode"]
            contexts = (8192,) if window else (8192, 32768)
            assert decodes == [(c, b) for c in contexts for b in (1, 8, 32, 128)]
    monkeypatch.setattr(
        *(sys, "argv"),
        ["bench_attention.py", "decode", "--batches", "3", "--contexts", "9", "--queries", "4"],
    )
    shapes.clear()
    script.main()
    assert {(s.batch, s.queries, s.context) for _, s in shapes} == {(3, 4, 9)}


def test_what_was_recorded_still_makes_a_table(modules, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["table.py"])
    modules["table"].main()
    assert "| `linear_fp8`, N = 5120, K = 2880 |" in capsys.readouterr().out


SCRIPTS = pytest.mark.parametrize("script", ["bench_gemm", "bench_attention"])


@SCRIPTS
def test_the_command_explains_itself(modules, monkeypatch, capsys, script: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        modules[script].main()
    assert ended.value.code == 0
    assert "sustained" in capsys.readouterr().out


@SCRIPTS
def test_without_a_gpu_it_is_a_sentence(modules, monkeypatch, script: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit, match=rf"{script}.py: .* no CUDA device was found"):
        modules[script].main()


@SCRIPTS
def test_an_unknown_run_names_those_that_there_are(
    modules, monkeypatch, capsys, script: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "prefil"])
    with pytest.raises(SystemExit) as ended:
        modules[script].main()
    assert ended.value.code == 2
    runs = ", ".join(modules[script].RUNS)
    assert f"there are {runs}, got prefil" in capsys.readouterr().err


@SCRIPTS
def test_an_output_that_cannot_be_written_is_said_before(
    modules, monkeypatch, tmp_path, capsys, script: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        modules[script].main()
    assert ended.value.code == 2
    assert f"cannot write {tmp_path}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "no figures of linear, "),
        (b'{"benchmark": "serve"}\n', "no figures of linear, "),
        (b'{"benchmark": "serve"}\ngarbage', ":2 is no JSON line: "),
        (b"[1]", ":1 is no line of a benchmark's results"),
        (b'{"benchmark": "linear", "model": null}', ":1 has no tokens, ms, "),
        (b"\xd0\x00", "is no text"),
        (None, "No such file"),
    ],
)
def test_a_file_without_figures_is_a_sentence(
    modules, monkeypatch, tmp_path, content: bytes | None, sentence: str
) -> None:
    path = tmp_path / "lines.jsonl"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    with pytest.raises(SystemExit) as ended:
        modules["table"].main()
    assert str(ended.value.code).startswith("table.py: ")
    assert sentence in str(ended.value.code)


def test_what_scheduling_costs_is_a_table_and_lines(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    arguments = ["--sequences", "1", "70", "--steps", "200"]  # over page and window borders
    monkeypatch.setattr(sys, "argv", ["bench_scheduler.py", *arguments])
    importlib.import_module("bench_scheduler").main()
    head, _, *rows, first, second = capsys.readouterr().out.splitlines()
    assert head.count("|") == rows[0].count("|") == rows[1].count("|")
    for row, line, batch in zip(rows, (first, second), (1, 70), strict=True):
        found = json.loads(line)
        assert (found["benchmark"], found["batch"]) == ("scheduler", batch)
        assert row.startswith(f"| {batch} | {found['schedule_us']} | {found['update_us']} |")
        assert 0 < found["schedule_us"] < 1e6


def test_what_harmony_costs_is_tables_and_lines(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    output = tmp_path / "lines.jsonl"
    arguments = ["--tokens", "400", "--runs", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench_harmony.py", *arguments])
    importlib.import_module("bench_harmony").main()
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert printed[-len(lines) :] == output.read_text().splitlines()
    streams = [line for line in lines if line["benchmark"] == "harmony_stream"]
    for line in streams:
        cell = f"| {line['case']} | {line['tokens_per_push']} | {line['us_per_token']} |"
        assert any(row.startswith(cell) for row in printed)
        assert 0 < line["us_per_token"] < 1000
    renders = [line for line in lines if line["benchmark"] == "harmony_render"]
    assert [line["case"] for line in renders] == ["one message", "20 messages"]
    assert all(300 < line["tokens"] < 600 and 0 < line["seconds"] < 1 for line in renders)
    assert {line["case"] for line in streams} > {"an answer", "reasoning", "raw"}
