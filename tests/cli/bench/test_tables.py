"""Tables of lines: the same on the terminal and in Markdown, those measured alike together."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptoss_backend.cli.bench.tables import markdown, show

from ..conftest import Run

COMMON = {
    "model": "120b",
    "random_weights": True,
    "weights": "fp8",
    "kv": "bf16",
    "tp": 1,
    "ep": 1,
    "dp": 1,
    "device": "NVIDIA H200",
    "commit": "abc1234",
    "date": "2026-11-30",
}
TITLE = "120b: random weights in fp8, bf16 KV, TP1 EP1 DP1, NVIDIA H200"
SIDE = {
    "requests_per_s": 2.0,
    "tokens_per_s": 100.0,
    "ttft_ms": 5.0,
    "tpot_ms": 2.0,
    "itl_ms": 2.5,
    "percentiles_ms": {"ttft": [5.0, 6.0, 7.0], "itl": [2.5, 3.0, 4.0]},
}


def line(benchmark: str, **own: Any) -> dict[str, Any]:
    return {"benchmark": benchmark, **COMMON, **own}


def decode(batch: int, context: int, ms: float) -> dict[str, Any]:
    return line(
        "decode",
        batch=batch,
        context=context,
        tokens=None,
        ms=ms,
        floor_ms=ms / 2,
        spread_ms=[ms, ms],
        tokens_per_s=10.4,
        tokens_per_s_user=3.0,
        dollars_per_million=1.234,
        peers={"vLLM 0.26.0": 4.45},
    )


LINES = [
    decode(8, 8192, 4.0),
    decode(1, 32768, 3.0),
    decode(1, 8192, 2.0),
    line("decode", batch=128, context=8192, ms=None, left_out="no room"),
    line(
        "prefill",
        batch=1,
        context=8192,
        tokens=8192,
        ms=98.0,
        floor_ms=None,
        spread_ms=[97.0, 99.5],
        tokens_per_s=83592,
        dollars_per_million=0.00997,
        peers={"ROSE": 364.0, "vLLM 0.26.0": 204.6},
    ),
    line(
        "throughput",
        requests=1000,
        batch=256,
        mean_running=211.5,
        input_len=1024,
        output_len=512,
        seconds=60.0,
        tokens_per_s=8533.0,
        total_tokens_per_s=25600.0,
        dollars_per_million=0.1,
        ttft_ms=5000.0,
        tpot_ms=None,
        peers_tokens_per_s={"TensorRT-LLM": 6868},
    ),
    line(
        "serve",
        batch=16,
        tokens=64,
        rate=None,
        input_len=None,
        responses=70,
        cost_ms_per_response=0.5,
        engine={**SIDE, "tokens_per_s": 125.0},
        **SIDE,
    ),
    line(
        "serve", batch=None, tokens=64, rate="inf", input_len=9, goodput_requests_per_s=1.5, **SIDE
    ),
    line(
        "operator",
        operator="experts",
        batch=2,
        tokens=2,
        context=8192,
        calls=36,
        ms=0.1,
        spread_ms=[0.09, 0.2],
        floor_ms=0.05,
    ),
    line(
        "operator",
        operator="sample",
        batch=2,
        tokens=2,
        context=8192,
        calls=1,
        ms=5.0,
        spread_ms=[4.0, 6.0],
        floor_ms=None,
    ),
    line("moe_gemm"),
    line("serve", batch=16),  # of before
]

MARKDOWN = f"""\
decode, {TITLE} (2026-11-30, commit abc1234):

| context | sequences | ms a step | p10 to p90 | tokens/s a user | tokens/s | $/M output | of floor | others, ms |
|-|-|-|-|-|-|-|-|-|
| 8192 | 1 | 2 | 2 to 2 | 3 | 10 | 1.23 | 50% | vLLM 0.26.0 4.45 |
| 8192 | 8 | 4 | 4 to 4 | 3 | 10 | 1.23 | 50% | vLLM 0.26.0 4.45 |
| 8192 | 128 |  |  |  |  |  |  | no room |
| 32768 | 1 | 3 | 3 to 3 | 3 | 10 | 1.23 | 50% | vLLM 0.26.0 4.45 |

prefill, {TITLE} (2026-11-30, commit abc1234):

| sequences | tokens each | seconds | p10 to p90 | $/M input | tokens/s | of floor | others, s |
|-|-|-|-|-|-|-|-|
| 1 | 8192 | 0.098 | 0.097 to 0.0995 | 0.00997 | 83592 |  | ROSE 0.364, vLLM 0.26.0 0.205 |

throughput, {TITLE} (2026-11-30, commit abc1234):

| requests | seats | of them taken | in | out | seconds | tokens/s out | tokens/s in and out | $/M output | TTFT, ms | TPOT, ms | others, tokens/s |
|-|-|-|-|-|-|-|-|-|-|-|-|
| 1000 | 256 | 211.5 | 1024 | 512 | 60 | 8533 | 25600 | 0.1 | 5000 |  | TensorRT-LLM 6868 |

serve, {TITLE} (2026-11-30, commit abc1234):

|  | streams | requests/s | tokens/s | of engine | TTFT, ms | TPOT, ms | ITL, ms | ITL p99, ms | responses | cost, ms a response |
|-|-|-|-|-|-|-|-|-|-|-|
| engine alone | 16 | 2 | 125 |  | 5 | 2 | 2.5 | 4 |  |  |
| through the server | 16 | 2 | 100 | 80.0% | 5 | 2 | 2.5 | 4 | 70 | 0.5 |

serve, ms at p50, p90, p99, 9 in, 64 out, {TITLE} (2026-11-30, commit abc1234):

| rate | requests/s | tokens/s | TTFT | TPOT | ITL | goodput/s |
|-|-|-|-|-|-|-|
| inf | 2 | 100 | 5, 6, 7 |  | 2.5, 3, 4 | 1.5 |

operators of 2 x 1 at 8192, {TITLE} (2026-11-30, commit abc1234):

|  | calls | us a call | p10 to p90 | ms a step | of floor |
|-|-|-|-|-|-|
| sample | 1 | 5000.0 | 4000.0 to 6000.0 | 5.000 |  |
| experts | 36 | 100.0 | 90.0 to 200.0 | 3.600 | 50% |
"""  # noqa: E501


def test_markdown_for_documents() -> None:
    assert markdown(LINES) == MARKDOWN


def test_prefills_without_a_pause_have_a_table_of_their_own() -> None:
    (rested,) = (each for each in LINES if each["benchmark"] == "prefill")
    tables = markdown([rested | {"pause_s": 0.5}, rested | {"pause_s": 0, "ms": 105.0}])
    assert "prefill, one run after another, 120b: " in tables
    rows = [row for row in tables.splitlines() if row.startswith("| 1 | 8192 |")]
    assert [row.split(" | ")[2] for row in rows] == ["0.098", "0.105"]


def test_files_become_markdown(gptoss: Run, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    done = gptoss("bench", "table", path)
    assert (done.code, done.out) == (0, MARKDOWN)


def test_the_terminal_has_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    show(LINES)
    rows = [
        [cell.strip() for cell in row.strip("│").split("│")]
        for row in capsys.readouterr().out.splitlines()
        if row.startswith("│")
    ]
    expected = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for table in MARKDOWN.split("\n\n")[1::2]
        for row in table.splitlines()[2:]
    ]
    assert rows == expected
