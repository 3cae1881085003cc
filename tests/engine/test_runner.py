"""Steps as a scheduler would order them: pages, chunks, batches, and what is sampled."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptoss_engine.checkpoints.checkpoint import Checkpoint
from gptoss_engine.checkpoints.convert import convert
from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint
from gptoss_engine.checkpoints.tensor_source import WeightMode
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.engine import Engine
from gptoss_engine.loading import load_weights
from gptoss_engine.model_config import InvalidCheckpoint
from gptoss_engine.runner import (
    Runner,
    choose_attention,
    choose_gemm,
    choose_graphs,
    choose_weight_mode,
    load_operators,
    load_runner,
)
from gptoss_engine.sequence import ScheduledItem, Sequence
from gptoss_engine.types import GenerationRequest, SamplingParams
from gptoss_kernels.composed import ComposedOperators
from gptoss_kernels.ops import (
    GEMMS,
    Attention,
    AttentionOperators,
    Fp8Weight,
    Gemm,
    Mixture,
    Mxfp4Weight,
    Operators,
    load,
    load_attention,
    load_fp8,
)
from gptoss_kernels.testing import norm_error, rel_error

from ..extras import needs_deep_gemm
from ..tiny_checkpoint import TinyCheckpoint, write_converted
from .forward import logits_of_all
from .sources import model_config
from .stepping import GREEDY, Stepper, outputs, sequence, tiny_runner

PROMPTS = [
    [(11 * i + 7 * j * j) % 512 for j in range(length)]
    for i, length in enumerate((1, 60, 127, 128, 129, 250))
]


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: TinyCheckpoint) -> Runner:
    return tiny_runner(tiny_checkpoint.huggingface)


@pytest.fixture(scope="module")
def any_runner(tiny_checkpoint: TinyCheckpoint, request: pytest.FixtureRequest) -> Runner:
    """Of a weight mode that the test's parameters name."""
    return tiny_runner(tiny_checkpoint.huggingface, weights=request.param)


def alone(
    runner: Runner, prompt: list[int], sampling: SamplingParams, seed: int = 0, num_tokens: int = 40
) -> list[int]:
    made = sequence(prompt, sampling, seed)
    Stepper(runner).generate(made, num_tokens=num_tokens)
    return outputs(made)


@pytest.fixture(scope="module")
def greedy_answer(transformers_model) -> list[int]:
    """transformers' 140 greedy tokens after 60 of prompt: they cross the window's edge, and a page
    of 64 falls behind it."""
    prompt = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        out = transformers_model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=140,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, 60:].tolist()


@pytest.mark.parametrize(
    ("layout", "page_size", "chunk"),
    [("huggingface", 64, 1000), ("original", 16, 25), ("dequantised", 1, 7)],
)
def test_greedy_is_transformers(
    tiny_checkpoint: TinyCheckpoint,
    greedy_answer: list[int],
    layout: str,
    page_size: int,
    chunk: int,
):
    runner = tiny_runner(
        tiny_checkpoint.folders[layout],
        page_size=page_size,
        num_pages=-(-200 // page_size),
        num_window_pages=-(-128 // page_size) + 2 + chunk // page_size,
    )
    made = sequence(PROMPTS[1])
    Stepper(runner, page_size).generate(made, num_tokens=140, chunk=chunk)
    assert outputs(made) == greedy_answer


@pytest.mark.parametrize(
    ("any_runner", "chunk"),
    [("bf16", 1), ("bf16", 5), ("bf16", 16), ("bf16", 100), ("fp8", 5), ("mxfp4", 100)],
    indirect=["any_runner"],
)
def test_chunked_is_whole(any_runner: Runner, chunk: int):
    for prompt in PROMPTS[-2:]:
        made = sequence(prompt)
        Stepper(any_runner).generate(made, num_tokens=5, chunk=chunk)
        assert outputs(made) == alone(any_runner, prompt, GREEDY, num_tokens=5)


@pytest.mark.parametrize(
    ("any_runner", "sampling"),
    [
        ("bf16", GREEDY),
        ("bf16", SamplingParams()),
        ("bf16", SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)),
        ("fp8", GREEDY),
        ("fp8", SamplingParams()),
        ("mxfp4", GREEDY),
    ],
    indirect=["any_runner"],
    ids=["bf16-greedy", "bf16-sampled", "bf16-cut", "fp8-greedy", "fp8-sampled", "mxfp4-greedy"],
)
def test_batched_is_alone(any_runner: Runner, sampling: SamplingParams):
    """Six sequences that start and end at different steps, prefill beside decode."""
    made = [sequence(prompt, sampling, seed) for seed, prompt in enumerate(PROMPTS)]
    stepper = Stepper(any_runner)
    for number in range(1, 6):
        stepper.advance(*made[:number], chunk=50)
    stepper.generate(*made, num_tokens=20, chunk=50)
    for seed, (prompt, one) in enumerate(zip(PROMPTS, made, strict=True)):
        assert outputs(one)[:20] == alone(any_runner, prompt, sampling, seed, num_tokens=20)


@contextmanager
def recorded_logits(runner: Runner) -> Iterator[list[Tensor]]:
    """Of every step that is run within."""
    found: list[Tensor] = []
    model = runner._model

    def recording(hidden: Tensor, ops: Operators) -> Tensor:
        found.append(type(model).logits(model, hidden, ops))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "logits", recording)
        yield found


def greedy_run(runner: Runner) -> tuple[list[Tensor], list[int]]:
    """The logits of all steps of three sequences of 30 tokens, and these tokens."""
    made = [sequence(prompt) for prompt in PROMPTS[3:]]
    with recorded_logits(runner) as logits:
        Stepper(runner).generate(*made, num_tokens=30, chunk=100)
    return logits, [token_id for one in made for token_id in outputs(one)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_and_mxfp4_are_the_same_function_and_bf16_is_another(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, dtype: str
):
    published = tiny_checkpoint.original
    runners = {
        mode: tiny_runner(published, weights=mode, dtype=dtype) for mode in ("bf16", "fp8", "mxfp4")
    }
    bf16, _ = greedy_run(runners["bf16"])
    fp8, tokens = greedy_run(runners["fp8"])
    mxfp4, others = greedy_run(runners["mxfp4"])
    assert tokens == others
    assert len(fp8) == len(mxfp4) > 30
    assert all(map(torch.equal, fp8, mxfp4))
    # The first step that samples has the same tokens in every mode.
    first = next(step for step, logits in enumerate(fp8) if len(logits))
    assert rel_error(fp8[first], bf16[first]) > 0.1
    sizes = {mode: runner._model.weights.expert_bytes for mode, runner in runners.items()}
    assert sizes["mxfp4"] <= 0.55 * sizes["fp8"]
    assert sizes["fp8"] <= 0.51 * sizes["bf16"]

    convert(Checkpoint(published), tmp_path / "converted")
    converted, others = greedy_run(tiny_runner(tmp_path / "converted", dtype=dtype))
    assert tokens == others
    assert all(map(torch.equal, fp8, converted))


LONG = [(3 * j * j + 7 * j + 11) % 512 for j in range(320)]


@pytest.mark.parametrize("mode", ["fp8", "mxfp4"])
def test_fp8_sees_neither_chunks_nor_company(tiny_checkpoint: TinyCheckpoint, mode: str):
    """Bit for bit: a last bit may take an activation over the border between two values of e4m3,
    and then it would be no last bit any more."""
    runner = tiny_runner(tiny_checkpoint.huggingface, weights=mode)

    def logits(token_ids: list[int], chunk: int, *company: Sequence) -> Tensor:
        """Of the last 121 of the tokens, which come as a draft; the company is in the last step."""
        made, stepper = sequence(token_ids[:200]), Stepper(runner)
        with recorded_logits(runner) as found:
            while made.num_uncomputed_tokens > chunk:
                stepper.advance(made, chunk=chunk)
            last = ScheduledItem.of(made, made.num_uncomputed_tokens, tuple(token_ids[200:]))
            stepper.step(
                *(ScheduledItem.of(one, one.num_uncomputed_tokens) for one in company), last
            )
        return found[-1][-121:]

    whole = logits(LONG, 1000)
    for chunk in (1, 7, 64, 100):
        assert torch.equal(logits(LONG, chunk), whole)
    # More rows are sampled here, and the unembedding is no FP8.
    assert rel_error(logits(LONG, 150, *map(sequence, PROMPTS)), whole) < 1e-5
    # One other token, three hundred before the last.
    assert rel_error(logits([5, *LONG[1:]], 1000), whole) > 1


def test_a_sequence_that_lost_its_pages_continues_the_same(runner: Runner):
    sampling = SamplingParams()
    made = sequence(PROMPTS[4], sampling, seed=3)
    Stepper(runner).generate(made, num_tokens=15)
    made.num_computed_tokens = 0
    made.page_tables.full.clear()
    made.page_tables.window.clear()
    Stepper(runner).generate(made, num_tokens=40, chunk=100)
    assert outputs(made) == alone(runner, PROMPTS[4], sampling, seed=3)


def test_pages_that_no_query_can_see_are_not_read(runner: Runner):
    """Everything that the sequence does not own is poisoned before each step."""
    made = sequence(PROMPTS[5])
    stepper = Stepper(runner)
    while made.num_output_tokens < 20:
        stepper.advance(made, chunk=70)
        cache = runner._cache
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            is_window = runner.model_config.is_window(layer)
            free = stepper.window if is_window else stepper.full
            keys[free], values[free] = math.nan, math.nan
    for tensor in (*runner._cache.keys, *runner._cache.values):
        tensor.zero_()
    assert outputs(made) == alone(runner, PROMPTS[5], GREEDY, num_tokens=20)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_tokens_after_right_drafts_are_the_answer_and_wrong_ones_change_nothing(
    runner: Runner, sampling: SamplingParams
):
    answer = alone(runner, PROMPTS[3], sampling, seed=9)
    made = sequence(PROMPTS[3], sampling, seed=9)
    stepper = Stepper(runner)
    stepper.advance(made)
    draft = (answer[1], answer[2], (answer[3] + 1) % 512)
    output = stepper.step(ScheduledItem.of(made, 1, draft))
    assert output.token_ids[0][:3] == tuple(answer[1:4])
    assert len(output.token_ids[0]) == 4
    stepper.generate(made, num_tokens=40)
    assert outputs(made) == answer


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_a_step_can_be_launched_before_the_tokens_of_the_last_one_are_known(
    runner: Runner, sampling: SamplingParams
):
    """No token gets to the sequences while they run; seats are not in the order of rows."""
    made = [sequence(PROMPTS[i], sampling, seed=i, seat=7 - i) for i in range(3)]
    stepper, found = Stepper(runner), [[] for _ in made]
    for number in range(20):
        running = made[: number + 1]
        items = [ScheduledItem.of(each, each.num_uncomputed_tokens) for each in running]
        assert [item.is_pending for item in items] == [item.num_output_tokens > 0 for item in items]
        launched = stepper.launch(*items)
        for each in running:
            each.num_computed_tokens = each.num_tokens
            each.num_pending_tokens += 1
        for tokens, sampled in zip(found, launched.result().token_ids, strict=False):
            tokens += sampled
    for index, tokens in enumerate(found):
        assert tokens == alone(runner, PROMPTS[index], sampling, seed=index, num_tokens=20 - index)


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(runner: Runner):
    stepper = Stepper(runner)
    chunk, other = sequence(PROMPTS[4]), sequence(PROMPTS[0], SamplingParams(logprobs=0))
    output = stepper.step(ScheduledItem.of(chunk, 20), ScheduledItem.of(other, 1))
    assert output.token_ids[0] == ()
    assert output.logprobs[0] == ()
    assert len(output.token_ids[1]) == len(output.logprobs[1]) == 1
    output = stepper.step(ScheduledItem.of(chunk, 20))
    assert output.token_ids == ((),)


def test_seeds_decide_and_nothing_else_does(runner: Runner):
    answers = {tuple(alone(runner, PROMPTS[2], SamplingParams(), seed)) for seed in range(5)}
    assert len(answers) == 5
    again = alone(runner, PROMPTS[2], SamplingParams(), 4)
    assert tuple(again) in answers


def test_logprobs_are_of_the_raw_logits_and_only_where_asked(runner: Runner):
    """Temperature, cuts and masks do not touch them; they sum to one over the vocabulary."""
    plain = sequence(PROMPTS[1])
    hot = sequence(PROMPTS[1], SamplingParams(temperature=3.0, top_k=5, logprobs=20), seed=2)
    few = sequence(PROMPTS[1], SamplingParams(temperature=0.0, logprobs=3))
    output = Stepper(runner).advance(plain, hot, few)
    assert output.logprobs[0] == ()
    ((chosen,), (greedy,)) = output.logprobs[1:]
    assert len(chosen.top) == 20
    assert greedy.top == chosen.top[:3]
    assert greedy.top[0] == (outputs(few)[0], greedy.logprob)
    assert dict(chosen.top)[outputs(hot)[0]] == chosen.logprob
    assert [logprob for _, logprob in chosen.top] == sorted(
        (logprob for _, logprob in chosen.top), reverse=True
    )
    assert 0.3 < sum(math.exp(logprob) for _, logprob in chosen.top) < 1


def test_stop_tokens_are_not_chosen_before_min_tokens(runner: Runner):
    answer = alone(runner, PROMPTS[1], GREEDY, num_tokens=4)
    sampling = SamplingParams(temperature=0.0, min_tokens=2, logprobs=1)
    made = sequence(PROMPTS[1], sampling, stop_token_ids=frozenset(answer))
    stepper = Stepper(runner)
    (((first,),),) = (stepper.advance(made).logprobs,)
    assert outputs(made)[0] not in answer
    assert first.top[0][0] == answer[0]  # what the model said, before the mask
    stepper.advance(made)
    assert outputs(made)[1] not in answer
    # From the third token on nothing is masked any more.
    stepper.advance(made)
    free = sequence(made.token_ids[:-1])
    Stepper(runner).advance(free)
    assert outputs(free) == outputs(made)[2:]


def test_bf16_runs_and_decodes_as_it_prefills(tiny_checkpoint: TinyCheckpoint):
    runner = tiny_runner(tiny_checkpoint.original, dtype="bfloat16")
    answer = alone(runner, PROMPTS[4], GREEDY, num_tokens=10)
    whole = sequence(PROMPTS[4] + answer)
    Stepper(runner).advance(whole)
    assert outputs(whole) == alone(runner, PROMPTS[4], GREEDY, num_tokens=11)[10:]


def test_load_runner_derives_what_is_not_configured(tiny_checkpoint: TinyCheckpoint):
    config = EngineConfig(model=str(tiny_checkpoint.original), device="cpu", max_num_seqs=2)
    config = replace(config, max_num_batched_tokens=64, max_model_len=640)
    runner = load_runner(config)
    assert (runner.num_pages, runner.num_window_pages) == (20, 20)
    assert runner.max_model_len == 640
    assert runner.model_config.vocab_size == 512


def test_the_weight_mode_follows_from_the_checkpoint_unless_chosen(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
):
    converted = write_converted(tmp_path)
    for folder, chosen, mode in (
        (tiny_checkpoint.huggingface, "auto", "bf16"),
        (tiny_checkpoint.dequantised, "auto", "bf16"),
        (converted, "auto", "fp8"),
        (tiny_checkpoint.dequantised, "fp8", "fp8"),
        (converted, "bf16", "bf16"),
        (tiny_checkpoint.original, "mxfp4", "mxfp4"),
    ):
        runner = tiny_runner(folder, weights=chosen)
        assert runner.weight_mode == mode
        kinds = {"bf16": Tensor, "fp8": Fp8Weight, "mxfp4": Mxfp4Weight}
        assert isinstance(runner._model.weights.layers[0].w2, kinds[mode])


@pytest.mark.parametrize(
    ("layout", "mode"),
    [("huggingface", "fp8"), ("dequantised", "bf16"), ("random", "fp8")],
)
def test_mxfp4_serves_as_fp8_where_kernels_multiply_it(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, layout: str, mode: str
):
    source = RandomCheckpoint("tiny")
    if layout != "random":
        source = Checkpoint(tiny_checkpoint.folders[layout])
    monkeypatch.setattr("gptoss_engine.runner.choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for gemm, chosen in (("auto", mode), ("triton", mode), ("reference", "bf16")):
        config = EngineConfig.from_mapping({"gemm": gemm})
        assert choose_weight_mode(config, source) == chosen
    assert choose_weight_mode(EngineConfig(dtype="float32"), source) == "bf16"
    assert choose_weight_mode(EngineConfig(weights="mxfp4"), source) == "mxfp4"


def test_random_weights_take_the_place_of_a_model():
    config = EngineConfig(random_weights="tiny", device="cpu", weights="fp8", dtype="bfloat16")
    config = replace(config, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    runner = load_runner(config)
    assert runner.model_config.num_experts == 16
    assert runner.weight_mode == "fp8"
    made = sequence(PROMPTS[1])
    Stepper(runner, page_size=64).generate(made, num_tokens=2)
    assert len(set(outputs(made))) == 2


def test_the_unembedding_of_random_weights_is_fp8_by_choice():
    config = EngineConfig(random_weights="tiny", device="cpu", weights="fp8", dtype="bfloat16")
    config = replace(config, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    hidden, made = torch.randn(3, 320).bfloat16(), {}
    for lm_head in ("auto", "fp8"):
        runner = load_runner(replace(config, lm_head=lm_head))
        is_fp8 = isinstance(runner._model.weights.unembedding, Fp8Weight)
        assert is_fp8 == (lm_head == "fp8")
        made[lm_head] = runner._model.logits(hidden, runner._ops).double()
    assert 1e-3 < norm_error(made["fp8"], made["auto"]) < 5e-2


def test_an_fp8_unembedding_beside_wide_weights_is_refused_before_they_are_loaded(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr("gptoss_engine.runner.load_weights")
    with pytest.raises(InvalidConfig, match="lm_head fp8 needs weights fp8 or mxfp4, and those"):
        tiny_runner(tiny_checkpoint.original, lm_head="fp8")


def test_what_cannot_be_loaded_is_a_sentence(tiny_checkpoint: TinyCheckpoint, tmp_path: Path):
    with pytest.raises(InvalidCheckpoint, match="nowhere does not exist"):
        load_runner(EngineConfig(model=str(tmp_path / "nowhere")))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="no CUDA device was found"):
            load_runner(EngineConfig(model=str(tiny_checkpoint.original), device="cuda"))


def test_kernels_for_gpus_are_refused_where_they_cannot_run(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    assert choose_gemm(EngineConfig(), torch.device("cpu"), torch.float32) == "reference"
    monkeypatch.delattr("gptoss_engine.runner.load_weights")  # it comes to no weights
    for gemm in ("cuda", "triton", "deepgemm"):
        with pytest.raises(
            InvalidConfig, match=f"gemm must be auto or reference on a cpu, got {gemm}"
        ):
            tiny_runner(tiny_checkpoint.original, gemm=gemm)
    with pytest.raises(InvalidConfig, match="gemm triton needs dtype bfloat16, got float32"):
        choose_gemm(EngineConfig(gemm="triton"), torch.device("cuda"), torch.float32)
    for attention in ("cuda", "triton", "flashinfer"):
        with pytest.raises(
            InvalidConfig, match=f"attention must be auto or reference on a cpu, got {attention}:"
        ):
            tiny_runner(tiny_checkpoint.original, attention=attention)


@pytest.mark.parametrize(
    ("attention", "page_size", "sizes"),
    [
        ("cuda", 8, "16, 32, 64, 128, 256"),
        ("triton", 48, "16, 32, 64, 128, 256"),
        ("flashinfer", 256, "16, 32, 64, 128"),
    ],
)
def test_pages_that_attention_does_not_take_are_refused_at_once(
    attention: str, page_size: int, sizes: str
):
    config = EngineConfig.from_mapping({"attention": attention, "page_size": page_size})
    sentence = f"page_size must be one of {sizes} with attention {attention}, got {page_size}"
    with pytest.raises(InvalidConfig, match=sentence):
        choose_attention(config, torch.device("cuda"), torch.bfloat16)


def test_pages_that_our_kernels_do_not_take_are_refused_whoever_attends():
    config = EngineConfig(gemm="cuda", attention="reference", page_size=8)
    sentence = "page_size must be one of 16, 32, 64, 128, 256 with gemm cuda, got 8"
    with pytest.raises(InvalidConfig, match=sentence):
        load_operators(config, torch.device("cuda"), torch.bfloat16, model_config())


def test_pages_of_any_size_are_for_the_reference():
    config = EngineConfig(page_size=48)
    assert choose_attention(config, torch.device("cpu"), torch.float32) == "reference"


@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "chosen"),
    [
        ((9, 0), torch.bfloat16, {}, "cuda"),
        ((9, 0), torch.bfloat16, {"num_heads": 8}, "cuda"),
        ((9, 0), torch.float32, {}, "reference"),
        ((8, 9), torch.bfloat16, {}, "reference"),
        ((9, 0), torch.bfloat16, {"head_dim": 32}, "reference"),
        ((9, 0), torch.bfloat16, {"num_heads": 24}, "reference"),
    ],
)
def test_attention_is_ours_on_hopper_where_it_takes_the_heads(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    heads: dict[str, int],
    chosen: str,
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = choose_attention(EngineConfig(), torch.device("cuda"), dtype, model_config(**heads))
    assert found == chosen


@pytest.mark.parametrize(
    ("settings", "mode", "has_graphs"),
    [
        ({}, "fp8", True),
        ({"cuda_graphs": "on"}, "fp8", True),
        ({"cuda_graphs": "off"}, "fp8", False),
        ({}, "bf16", False),
        ({"gemm": "triton"}, "fp8", False),
        ({"attention": "flashinfer"}, "fp8", False),
        ({"tp": "2"}, "fp8", True),
        ({"tp": "2", "reduction": "reference"}, "fp8", False),
        ({"reduction": "reference"}, "fp8", True),
    ],
)
def test_decodes_are_captured_where_all_operators_can_be(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], mode: WeightMode, has_graphs: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    where = (torch.device("cuda"), torch.bfloat16)
    assert choose_graphs(EngineConfig.from_mapping(settings), *where, mode) == has_graphs


def test_sums_of_a_library_are_in_no_graph(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    config = EngineConfig(tp=2, reduction="reference", cuda_graphs="on")
    with pytest.raises(InvalidConfig) as refused:
        choose_graphs(config, torch.device("cuda"), torch.bfloat16, "fp8")
    assert str(refused.value) == (
        "cuda_graphs on needs gemm cuda, attention cuda, weights fp8 and reduction cuda, got gemm "
        "cuda, attention cuda, weights fp8 and reduction reference"
    )


def test_graphs_that_cannot_be_captured_are_refused_before_weights_are_loaded(
    tiny_checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr("gptoss_engine.runner.load_weights")
    sentence = (
        "cuda_graphs on needs gemm cuda, attention cuda and weights fp8, got gemm reference, "
        "attention reference and weights bf16"
    )
    with pytest.raises(InvalidConfig, match=sentence):
        tiny_runner(tiny_checkpoint.original, cuda_graphs="on")


def test_heads_that_attention_does_not_take_are_refused_before_weights_are_loaded():
    sentence = (
        "attention must be auto or reference for this model, got triton: its kernels take heads of "
        "64, 1, 2, 4, 8, 16 query heads to a key-value head, and it has 24 and 8 heads of 64"
    )
    model = model_config(num_heads=24)
    with pytest.raises(InvalidConfig, match=sentence):
        load_operators(
            EngineConfig(gemm="reference", attention="triton"),
            *(torch.device("cuda"), torch.bfloat16, model),
        )


def test_operators_whose_packages_are_missing_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gptoss_kernels.triton_lang.operators", None)
    with pytest.raises(
        InvalidConfig,
        match=r"gemm triton with attention reference .* pip install 'gptoss-backend\[gpu\]'",
    ):
        load_operators(
            EngineConfig(gemm="triton", attention="reference"),
            *(torch.device("cuda"), torch.bfloat16, model_config()),
        )


@pytest.mark.parametrize(
    ("key", "name", "module"),
    [("gemm", "deepgemm", "deep_gemm"), ("attention", "flashinfer", "flashinfer")],
)
def test_a_library_that_is_missing_is_said_before_weights_are_loaded(
    key: str, name: str, module: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    config = EngineConfig.from_mapping({"gemm": "reference", "attention": "reference", key: name})
    with pytest.raises(InvalidConfig, match=rf"{key} = {name} needs the library .*\[{name}\]"):
        load_operators(config, torch.device("cuda"), torch.bfloat16, model_config())


class Beside:
    """The reference's operators; those that `kernels` replaces run beside it, on the same inputs.

    Without the residual, which would make errors small. Whole logits would not say which product is
    wrong, and differ more than any of them: in FP8 the last bit of a sum turns roundings in the
    layers behind it. Rows that fill a batch are NaN, and not compared.
    """

    def __init__(self, kernels: Any, *names: str) -> None:
        self._kernels = kernels
        self._reference = load("reference")
        self.errors: dict[str, list[float]] = {name: [] for name in names}

    def __getattr__(self, name: str) -> Any:
        expected = getattr(self._reference, name)
        if name not in self.errors:
            return expected

        def both(
            *arguments: Any,
            residual: Tensor | None = None,
            update: Mixture | None = None,
            **options: Any,
        ) -> Tensor | Mixture:
            if update is not None:
                arguments[0].copy_(self._reference.combine(*update, residual=arguments[0]))
            right = expected(*arguments, **options)
            found = getattr(self._kernels, name)(*arguments, **options)
            rows = ~arguments[0].flatten(1).isnan().any(1)
            pair = (self._added(each)[rows] for each in (found, right))
            self.errors[name].append(norm_error(*pair))
            return right if residual is None else right + residual

        return both

    def _added(self, found: Tensor | Mixture) -> Tensor:
        return self._reference.combine(*found) if isinstance(found, Mixture) else found


class OtherExpertsBias:
    """Wrong: the second product adds the bias of the expert before."""

    def __init__(self, kernels: Operators) -> None:
        self._kernels: Any = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def experts(self, *arguments: Any, **options: Any) -> Mixture:
        *others, bias = arguments
        return self._kernels.experts(*others, bias.roll(1, 0), **options)


GEMM_MARKS = {"reference": (), "deepgemm": (pytest.mark.gpu, needs_deep_gemm)}


@pytest.mark.parametrize(
    "gemm",
    [pytest.param(name, marks=GEMM_MARKS.get(name, pytest.mark.gpu)) for name in GEMMS],
)
def test_each_product_of_a_model_is_that_of_the_reference(gemm: Gemm):
    device = torch.device("cpu" if gemm == "reference" else "cuda")
    kernels = ComposedOperators(load_fp8(gemm), load_attention("reference"))
    made = RandomCheckpoint("tiny")
    weights = load_weights(made, "fp8", torch.bfloat16, device)
    token_ids = [(7 * i * i) % 512 for i in range(40 if gemm == "reference" else 300)]
    beside = Beside(kernels, "norm_linear", "linear", "experts")
    logits_of_all(made.config, weights, token_ids, beside)
    num_layers = made.config.num_layers
    assert len(beside.errors["norm_linear"]) == num_layers + 1
    assert len(beside.errors["linear"]) == len(beside.errors["experts"]) == num_layers
    # Rounding to bf16 costs 1.7e-3; a value behind SwiGLU that is rounded the other way more.
    assert max(beside.errors["norm_linear"] + beside.errors["linear"]) < 5e-3
    assert max(beside.errors["experts"]) < 2e-2

    wrong = Beside(OtherExpertsBias(kernels), "experts")
    logits_of_all(made.config, weights, token_ids, wrong)
    assert min(wrong.errors["experts"]) > 2e-2


# Of ours for Hopper, whose prefills over a cache in fp8 multiply e4m3 by e4m3: queries and the
# weights of keys are rounded, too.
E4M3_WEIGHTS = 6e-2


class OtherHeadsSinks:
    """Wrong: each query head has the sink of the head before."""

    def __init__(self, kernels: AttentionOperators) -> None:
        self._kernels = kernels
        self.rope_and_cache_write = kernels.rope_and_cache_write

    def attention(self, *arguments: Any, **options: Any) -> Tensor:
        query, keys, values, sinks, *others = arguments
        return self._kernels.attention(query, keys, values, sinks.roll(1), *others, **options)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "attention",
    [
        name if name == "reference" else pytest.param(name, marks=pytest.mark.gpu)
        for name in ("cuda", "triton", "reference")  # flashinfer wants pages of its own
    ],
)
def test_attention_of_a_model_is_that_of_the_reference(attention: Attention, cache: torch.dtype):
    device = torch.device("cpu" if attention == "reference" else "cuda")
    kernels = load_attention(attention)
    made = RandomCheckpoint("tiny")
    weights = load_weights(made, "bf16", torch.bfloat16, device)
    token_ids = [(7 * i * i) % 512 for i in range(150)]  # more than a window
    names = ("rope_and_cache_write", "attention")
    beside = Beside(kernels, *names)
    logits_of_all(made.config, weights, token_ids, beside, cache)
    assert all(len(beside.errors[name]) == made.config.num_layers for name in names)
    # The reference rounds cosines, sines and each of their products.
    assert max(beside.errors["rope_and_cache_write"]) < 8e-3
    bound = E4M3_WEIGHTS if attention == "cuda" and cache == torch.float8_e4m3fn else 5e-3
    assert max(beside.errors["attention"]) < bound

    wrong = Beside(OtherHeadsSinks(kernels), "attention")
    logits_of_all(made.config, weights, token_ids, wrong, cache)
    assert min(wrong.errors["attention"]) > 4 * bound


@pytest.mark.parametrize("chunk", [1, 7, 90])
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "attention",
    [
        name if name == "reference" else pytest.param(name, marks=pytest.mark.gpu)
        for name in ("cuda", "triton", "reference")  # flashinfer wants modules of its own
    ],
)
def test_attention_of_each_step_is_that_of_the_reference(
    attention: Attention, kv_cache: str, chunk: int
):
    """Prompts in chunks that are decodes to the kernels, and such as are not; pages given back."""
    config = EngineConfig.from_mapping(
        {
            "random_weights": "tiny",
            "device": "cpu" if attention == "reference" else "cuda",
            "dtype": "bfloat16",
            "weights": "bf16",
            "kv_cache": kv_cache,
            "gemm": "reference",
            "attention": attention,
            "num_pages": 32,
            "num_window_pages": 32,
        }
    )
    runner: Any = load_runner(config)
    beside = Beside(runner._ops, "attention")
    (runner._steps or runner)._ops = beside
    made = [sequence([(7 * i * i) % 512 for i in range(n)]) for n in (3, 64, 150, 290)]
    # The reference is set beside itself, to show that this can be done: in fewer steps.
    longest = {1: 149, 7: 150 if attention == "reference" else 290, 90: 290}[chunk]
    made = [each for each in made if each.num_prompt_tokens <= longest]
    Stepper(runner, page_size=64).generate(*made, num_tokens=4, chunk=chunk)
    num_steps = -(-max(each.num_prompt_tokens for each in made) // chunk) + 3
    assert len(beside.errors["attention"]) >= num_steps
    has_e4m3_weights = attention == "cuda" and kv_cache == "fp8" and chunk > 8
    assert max(beside.errors["attention"]) < (E4M3_WEIGHTS if has_e4m3_weights else 5e-3)


def test_a_cache_in_fp8_has_few_bytes_and_changes_logits_little(tiny_checkpoint: TinyCheckpoint):
    """e4m3 rounds keys and values by up to 6 %, and so are attention's outputs off."""
    for kv_cache, dtype in (("bf16", torch.float32), ("fp8", torch.float8_e4m3fn)):
        runner = tiny_runner(tiny_checkpoint.original, kv_cache=kv_cache)
        assert {each.dtype for each in (*runner._cache.keys, *runner._cache.values)} == {dtype}
    made = RandomCheckpoint("tiny")
    weights = load_weights(made, "bf16", torch.float32, torch.device("cpu"))
    token_ids = [(7 * i * i) % 512 for i in range(100)]
    plain = logits_of_all(made.config, weights, token_ids)
    cached = logits_of_all(made.config, weights, token_ids, cache_dtype=torch.float8_e4m3fn)
    assert 1e-3 < norm_error(cached, plain) < 0.2


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_the_engine_preempts_without_a_trace(tiny_checkpoint: TinyCheckpoint, weights: str):
    """Scheduler, pools and runner together: pages for two of six, so that some start again."""
    config = EngineConfig(model=str(tiny_checkpoint.original), device="cpu", page_size=16)
    config = EngineConfig.from_mapping(asdict(config) | {"weights": weights})
    config = replace(config, max_model_len=256, max_num_seqs=6, max_num_batched_tokens=80)
    roomy = replace(config, num_pages=96, num_window_pages=96)
    tight = replace(config, num_pages=20, num_window_pages=20)
    answers = {}
    for settings in (roomy, tight):
        engine = Engine(settings, load_runner(settings))
        for index in range(6):
            sampling = SamplingParams(seed=index, max_tokens=60, ignore_eos=True)
            prompt = tuple(PROMPTS[2][: 20 + 15 * index])
            engine.add(GenerationRequest(str(index), prompt, sampling))
        tokens: dict[str, list[int]] = {str(index): [] for index in range(6)}
        while engine.has_work:
            for chunk in engine.step():
                tokens[chunk.generation_id] += chunk.token_ids
        answers[settings] = tokens
        assert (engine.stats().num_preemptions > 0) == (settings is tight)
    assert answers[roomy] == answers[tight]
    assert all(len(tokens) == 60 for tokens in answers[tight].values())
