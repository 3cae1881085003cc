"""The FP8 operators beside DeepGEMM, Humming and cuBLASLt, in one run: tables, then JSON lines.

    python tests/bench/bench_gemm.py grouped --model 120b --parts --output results.jsonl
    python tests/bench/bench_gemm.py dense activations

Ours add the bias, and between the experts' products SwiGLU and its quantisation; Humming adds the
bias, DeepGEMM neither. Humming wants whole blocks of 128 x 128, so its weights are filled up with
zeros, 2944 columns for 2880, and its N to the faster of the multiples of 128 and 256. cuBLASLt by
row scales by row instead of by 128 x 128, which is less work: a ceiling, not a peer.

Inputs are as a served model has them (served.py), weights and inputs rotate through more memory
than the L2 cache holds, times are medians of CUDA graph replays in two regimes (measuring.py): "ms"
of a burst on a rested board, "sustained_ms" of long turns, where the board's clock falls in them.
The floor of few tokens is the mean over the routings, each of which hits another number of experts.

--parts times each grouped product alone too, in one burst. --sweep times every tile of a list
instead of the chosen one: that is how linear_fp8.choose_tile was made.
"""

from __future__ import annotations

from activations import bench_activations
from dense import bench_dense
from experts import bench_experts
from grouped import ALSO, bench_grouped
from running import EXPERTS, parser_of, run

from gptoss_kernels.fp8 import SWIGLU_GROUP

RUNS = {
    "dense": bench_dense,
    "grouped": bench_grouped,
    "experts": bench_experts,
    "activations": bench_activations,
}


def main() -> None:
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--model", choices=EXPERTS, default="120b", help="whose experts")
    parser.add_argument("--parts", action="store_true", help="each grouped product alone, too")
    parser.add_argument(
        "--group", type=int, choices=(64, 128), default=SWIGLU_GROUP, help="behind SwiGLU"
    )
    parser.add_argument(
        "--weights", choices=("mxfp4", "gaussian"), default="mxfp4", help="the experts' values"
    )
    parser.add_argument("--sweep", action="store_true", help="all tiles of linear_fp8")
    parser.add_argument(
        "--also", nargs="*", choices=ALSO, default=[], help="other operators of ours, grouped"
    )
    run(parser, RUNS)


if __name__ == "__main__":
    main()
