"""Attention beside FlashAttention 3, FlashInfer and cuDNN, in one run: tables, then JSON lines.

    python tests/bench/bench_attention.py prefill --kv bf16 --output results.jsonl
    python tests/bench/bench_attention.py decode rope
    python tests/bench/bench_attention.py decode --only cuda xqa --batches 8 --contexts 8192

Shapes are those of both models, 64 query and 8 key-value heads of 64, pages of 64 in random order.
Prefills are one sequence from its first token; decodes are sequences of equal length with one query
each (or --queries). A peer's error, in norm against float64 on the same random inputs, stands
beside its time: one that is wrong is not timed. FlashAttention 3 gets FP8 queries that were
quantised before; ours and FlashInfer's get them in bf16. Peers without pages have a sequence's keys
side by side. cuDNN has no sinks, and computes less.

Inputs and caches rotate through more memory than the L2 cache holds, times are medians of CUDA
graph replays in two regimes (measuring.py): "ms" of a burst on a rested board, "sustained_ms" of
long turns of prefills. Floors: reading at 4.5 TB/s, 779 TFLOP/s in bf16 and 1430 in FP8, and as
many exponentials as cap heads of 64 at 949. `tb_per_s` counts each key and value that is seen once.
"""

from __future__ import annotations

from attended import KV_DTYPES
from attention import WINDOW, bench_decode, bench_prefill
from attention_peers import ATTENDERS
from rope import bench_rope
from running import parser_of, run

from gptoss_kernels.contracts import MAXIMUM_DECODE_QUERIES

RUNS = {"prefill": bench_prefill, "decode": bench_decode, "rope": bench_rope}


def main() -> None:
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--kv", nargs="+", choices=KV_DTYPES, default=[*KV_DTYPES])
    parser.add_argument(
        "--window", type=int, nargs="+", default=[0, WINDOW], help="0 for a layer without one"
    )
    parser.add_argument("--contexts", type=int, nargs="+", help="of decodes")
    parser.add_argument("--batches", type=int, nargs="+", help="of decodes")
    parser.add_argument(
        "--queries",
        type=int,
        choices=range(1, MAXIMUM_DECODE_QUERIES + 1),
        default=1,
        help="of each decode",
    )
    parser.add_argument("--only", nargs="+", choices=ATTENDERS, help="of those that attend")
    run(parser, RUNS)


if __name__ == "__main__":
    main()
