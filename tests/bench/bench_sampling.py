"""Choosing tokens, beside FlashInfer and PyTorch, in one run: tables, then JSON lines.

    python tests/bench/bench_sampling.py --output results.jsonl
    python tests/bench/bench_sampling.py sample --tokens 1 128 --kinds greedy top_p

Logits are gpt-oss's 201,088 in bf16, normal with a deviation of 3, of --tokens rows; all rows of a
call are of one kind. They rotate through more memory than the L2 cache holds ("cold"), or are the
same in each call ("warm"), as the product before it leaves them. Times are medians of replays of
CUDA graphs (measuring.py); the floor is the reading of the logits at 4.5 TB/s. Peers get the
logits, so their softmax is within their times; each token is looked at before a peer is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from measuring import PEAK_BYTES, Call, print_ranked
from running import OURS, ROTATED_BYTES, Bench, named, parser_of, run, tried
from torch import Tensor

from gptoss_kernels.contracts import MAXIMUM_TOP, Penalties, SamplingRows
from gptoss_kernels.ops import load_common

VOCABULARY = 201_088
ROWS = (1, 8, 32, 128)
TOP_K, TOP_P = 50, 0.95
KINDS = ("greedy", "temperature", "top_k", "top_p")
MOST_SETS = 64

Draw = Callable[[Tensor], Tensor]


def logits_of(num_rows: int, sets: int, device: str = "cuda") -> Tensor:
    shape = (sets, num_rows, VOCABULARY)
    return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(3)


def rows_of(kind: str, num_rows: int, device: str = "cuda") -> SamplingRows:
    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return SamplingRows(
        temperature=column(0.0 if kind == "greedy" else 1.0),
        top_p=column(TOP_P if kind == "top_p" else 1.0),
        min_p=column(0.0),
        uniforms=torch.rand(num_rows, dtype=torch.float64, device=device),
        top_k=column(TOP_K if kind == "top_k" else 0, torch.int32),
        masked_start=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
        masked_ids=torch.zeros(0, dtype=torch.int32, device=device),
        num_top=column(-1, torch.int32),
    )


def by_torch(kind: str) -> Draw:
    """What is drawn is the least of as many exponential numbers, each over its probability."""

    def draw(logits: Tensor) -> Tensor:
        probabilities = logits.float().softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    def draw_top_k(logits: Tensor) -> Tensor:
        values, ids = logits.topk(TOP_K)
        return ids.gather(1, draw(values)[:, None])[:, 0]

    def draw_top_p(logits: Tensor) -> Tensor:
        values, ids = logits.sort(descending=True)
        probabilities = values.float().softmax(-1)
        is_left_out = probabilities.cumsum(-1) - probabilities >= TOP_P
        return ids.gather(1, draw(values.masked_fill(is_left_out, -torch.inf))[:, None])[:, 0]

    greedy = partial(torch.argmax, dim=-1)
    return {"greedy": greedy, "temperature": draw, "top_k": draw_top_k, "top_p": draw_top_p}[kind]


def by_flashinfer(kind: str) -> Draw:
    from flashinfer import sampling  # pyright: ignore[reportMissingImports]

    def draw(logits: Tensor) -> Tensor:
        probabilities = sampling.softmax(logits.float())
        if kind == "temperature":
            return sampling.sampling_from_probs(probabilities)
        if kind == "top_k":
            return sampling.top_k_sampling_from_probs(probabilities, TOP_K)
        return sampling.top_p_sampling_from_probs(probabilities, TOP_P)

    return draw


def check(kind: str, logits: Tensor, token_ids: Tensor) -> None:
    """ArithmeticError if a token is not among those that may be drawn."""
    own = logits.gather(1, token_ids.long()[:, None])
    if kind == "greedy":
        is_kept = own == logits.amax(-1, keepdim=True)
    elif kind == "top_k":
        is_kept = (logits > own).sum(-1) < TOP_K
    else:
        above = logits.double().softmax(-1).where(logits > own, 0).sum(-1)
        is_kept = above < (TOP_P + 1e-4 if kind == "top_p" else 1)
    if not is_kept.all():
        raise ArithmeticError("a token was chosen that must not be")


def checked(kind: str, make: Callable[[], Draw], logits: Tensor) -> Call:
    draw = make()

    def call(index: int) -> Tensor:
        return draw(logits[index])

    check(kind, logits[0], call(0))
    return call


def makers(kind: str, num_rows: int) -> dict[str, Callable[[], Draw]]:
    def ours() -> Draw:
        return partial(load_common("cuda").sample, rows=rows_of(kind, num_rows))

    found = {OURS: ours, "PyTorch": lambda: by_torch(kind)}
    if kind != "greedy" and find_spec("flashinfer"):
        found[named("FlashInfer", "flashinfer-python")] = lambda: by_flashinfer(kind)
    return found


def bench_sample(bench: Bench) -> None:
    for num_rows in bench.arguments.tokens or ROWS:
        num_bytes = num_rows * VOCABULARY * 2
        logits = logits_of(num_rows, min(MOST_SETS, max(2, ROTATED_BYTES // num_bytes)))
        for kind in bench.arguments.kinds:
            calls = {}
            for name, make in makers(kind, num_rows).items():
                call = tried(name, partial(checked, kind, make, logits))
                if call is not None:
                    calls[name] = call
            _time(bench, "sample", calls, len(logits), num_rows, kind=kind)


def bench_logprobs(bench: Bench) -> None:
    """Of every row the chosen token's and all that can be asked for."""
    operator = load_common("cuda").logprobs

    def by_peer(row: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        values = row.float().log_softmax(-1)
        return values.gather(1, token_ids[:, None]), values.topk(MAXIMUM_TOP).values

    for num_rows in bench.arguments.tokens or ROWS:
        num_bytes = num_rows * VOCABULARY * 2
        logits = logits_of(num_rows, min(MOST_SETS, max(2, ROTATED_BYTES // num_bytes)))
        token_ids = logits[0].argmax(-1)
        counts = torch.full((num_rows,), MAXIMUM_TOP, dtype=torch.int32, device="cuda")
        calls: dict[str, Call] = {
            OURS: lambda index, logits=logits, ids=token_ids, n=counts: operator(
                logits[index], ids, n
            ),
            "PyTorch": lambda index, logits=logits, ids=token_ids: by_peer(logits[index], ids),
        }
        _time(bench, "logprobs", calls, len(logits), num_rows)


def bench_mask_logits(bench: Bench) -> None:
    """All rows, in each of which an eighth of the tokens may come, and lie beside each other."""
    operator = load_common("cuda").mask_logits

    def by_peer(row: Tensor, allowed: Tensor) -> Tensor:
        return row.masked_fill_(~allowed, -torch.inf)

    for num_rows in bench.arguments.tokens or ROWS:
        num_bytes = num_rows * VOCABULARY * 2
        logits = logits_of(num_rows, min(MOST_SETS, max(2, ROTATED_BYTES // num_bytes)))
        mask = torch.zeros(num_rows, VOCABULARY // 32, dtype=torch.int32, device="cuda")
        mask[:, : VOCABULARY // 256] = -1
        allowed = torch.arange(VOCABULARY, device="cuda") < VOCABULARY // 256 * 32
        rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        calls: dict[str, Call] = {
            OURS: lambda index, logits=logits, mask=mask, rows=rows: operator(
                logits[index], mask, rows
            ),
            "PyTorch": lambda index, logits=logits, allowed=allowed: by_peer(
                logits[index], allowed
            ),
        }
        _time(bench, "mask_logits", calls, len(logits), num_rows)


def bench_penalize_logits(bench: Bench) -> None:
    """All rows, each with 2,048 other tokens in its answer; PyTorch as vLLM does it, from a dense
    count of tokens by row. The floor leaves out that fp32 is written, twice what is read."""
    operator = load_common("cuda").penalize_logits
    num_said = 2048

    def by_peer(row: Tensor, counts: Tensor) -> Tensor:
        return row.float() - 0.5 * counts - 0.25 * (counts > 0)

    for num_rows in bench.arguments.tokens or ROWS:
        num_bytes = num_rows * VOCABULARY * 2
        logits = logits_of(num_rows, min(MOST_SETS, max(2, ROTATED_BYTES // num_bytes)))
        said = torch.rand(num_rows, VOCABULARY, device="cuda").topk(num_said).indices
        counts = torch.zeros(num_rows, VOCABULARY, device="cuda").scatter_(1, said, 1.0)
        number = partial(torch.full, (num_rows,), device="cuda")
        penalties = Penalties(
            rows=torch.arange(num_rows, dtype=torch.int32, device="cuda"),
            newest=number(0, dtype=torch.int32),
            repetition=number(1.0),
            frequency=number(0.5),
            presence=number(0.25),
            start=num_said * torch.arange(num_rows + 1, dtype=torch.int32, device="cuda"),
            token_ids=said.int().flatten(),
            counts=torch.ones(num_rows * num_said, dtype=torch.int32, device="cuda"),
            biases=torch.zeros(num_rows * num_said, device="cuda"),
        )
        given = (said[0].contiguous(), penalties, torch.empty(counts.shape, device="cuda"))
        calls: dict[str, Call] = {
            OURS: lambda index, logits=logits, given=given: operator(logits[index], *given),
            "PyTorch": lambda index, logits=logits, counts=counts: by_peer(logits[index], counts),
        }
        _time(bench, "penalize_logits", calls, len(logits), num_rows)


def _time(
    bench: Bench, name: str, calls: dict[str, Call], sets: int, num_rows: int, **own: object
) -> None:
    floor = num_rows * VOCABULARY * 2 / PEAK_BYTES * 1e3
    for inputs, count in (("cold", sets), ("warm", 16)):
        used = calls
        if inputs == "warm":
            used = {key: lambda index, call=call: call(0) for key, call in calls.items()}
        times = bench.time(used, count, is_heavy=False)
        what = " ".join(map(str, (name, *own.values())))
        print(f"{what}, {num_rows} rows, {inputs}: the floor is {floor * 1e3:.2f} us")
        print_ranked(times, 0)
        bench.record(
            *(name, times, OURS),
            weights=None,
            tokens=num_rows,
            inputs=inputs,
            floor_ms=round(floor, 6),
            **own,
        )


RUNS = {
    "sample": bench_sample,
    "logprobs": bench_logprobs,
    "mask_logits": bench_mask_logits,
    "penalize_logits": bench_penalize_logits,
}


def main() -> None:
    parser = parser_of(__doc__, RUNS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="of rows")
    run(parser, RUNS)


if __name__ == "__main__":
    main()
