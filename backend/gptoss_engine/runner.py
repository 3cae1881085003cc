"""One step: ScheduledStep -> Batch -> forward pass -> sampled tokens on the host."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from gptoss_engine import shards
from gptoss_engine.batch import Batch
from gptoss_engine.capacity import beside_weights, fitted
from gptoss_engine.checkpoints.checkpoint import Checkpoint, checkpoint_folder
from gptoss_engine.checkpoints.tensor_source import IdentifiedSource, TensorSource, WeightMode
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.device_steps import FILLERS, DeviceSteps, Launched, StepPlan
from gptoss_engine.devices import choose_device
from gptoss_engine.graphs import CudaCapture
from gptoss_engine.kv_cache import KVCache, PageCounts, max_model_len
from gptoss_engine.loading import check_mode, check_ranks, load_weights
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.parallel import Peers, Ranks
from gptoss_engine.sampler import Guided, Penalized, Sampler
from gptoss_engine.sequence import ScheduledStep, StepOutput
from gptoss_engine.shards import Rank
from gptoss_engine.weights import Weights
from gptoss_kernels import ops as operators

log = logging.getLogger(__name__)

Instrument = Callable[[operators.Operators], operators.Operators]


class Computed:
    """A step that has run. choose: gives its tokens; called at once, but of a guided step."""

    def __init__(self, step: ScheduledStep, choose: Callable[[], StepOutput]) -> None:
        self._output = choose if step.is_guided else choose()

    def guide(self) -> None:
        assert callable(self._output)
        self._output = self._output()

    def result(self) -> StepOutput:
        assert isinstance(self._output, StepOutput), "a step that is guided is told so"
        return self._output


class Runner:
    """Owns weights and KV pages; knows no queue and no client.

    num_pages, num_window_pages: what the page pools of the two groups may hand out.
    max_model_len: tokens of prompt and answer together.
    weight_mode: the form of the experts' weights.
    is_asynchronous: whether `launch` returns before the step has run, as it does on a GPU.
    instrument: gives what is called instead of the operators, for measuring.
    peers: the other ranks, where several share the model; weights are then this rank's part.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        weights: Weights,
        config: EngineConfig,
        num_pages: int,
        num_window_pages: int,
        instrument: Instrument | None = None,
        peers: Peers | None = None,
    ) -> None:
        rank = Rank() if peers is None else peers.rank
        own = shards.of_rank(model_config, rank)
        self.model_config = model_config
        self.pages = PageCounts(num_pages, num_window_pages)
        self.max_model_len = max_model_len(config, model_config)
        self.weight_mode = weights.mode
        self._page_size = config.page_size
        self._device = weights.embedding.device
        self._ranks: Ranks | None = None
        dtype = weights.embedding.dtype
        self._ops = load_operators(config, self._device, dtype, own)
        if peers is not None:
            is_fused = choose_reduction(config, self._device, dtype) == "cuda"
            gemm = choose_gemm(config, self._device, dtype) if is_fused else "reference"
            experts = shards.experts(model_config, rank)
            self._ops = operators.load_rank(self._ops, peers.reduction, experts, gemm)
        if instrument is not None:
            self._ops = instrument(self._ops)
        self._sampler = Sampler(self._ops)
        table = rope_table(model_config, self.max_model_len, self._ops)
        self._model = GptOss(own, weights, table.to(self._device))
        self._cache = KVCache.allocate(
            own,
            page_size=config.page_size,
            num_pages=num_pages,
            num_window_pages=num_window_pages,
            dtype=choose_cache_dtype(config, dtype),
            device=self._device,
        )
        # By seat, what the last step that sampled there chose: the next step's pending inputs.
        self._last_token_ids = torch.full(
            (config.max_num_seqs,), -1, dtype=torch.int64, device=self._device
        )
        self.is_asynchronous = self._device.type == "cuda"
        self._steps: DeviceSteps | None = None
        if self.is_asynchronous or peers is not None:
            has_graphs = choose_graphs(config, self._device, dtype, weights.mode)
            self._steps = DeviceSteps(
                *(self._model, self._cache, self._ops, config),
                num_pages=num_pages,
                num_window_pages=num_window_pages,
                max_model_len=self.max_model_len,
                capture=CudaCapture() if has_graphs else None,
                wait=torch.cuda.Event.synchronize if peers is None else peers.wait,
            )

    @property
    def num_pages(self) -> int:
        return self.pages.full

    @property
    def num_window_pages(self) -> int:
        return self.pages.window

    @property
    def fault(self) -> str:
        """What became of another rank; empty as long as all are there."""
        return "" if self._ranks is None else self._ranks.fault

    def close(self) -> None:
        """End the other ranks' processes."""
        if self._ranks is not None:
            self._ranks.close()

    def warm_up(self, *, is_trial: bool = False) -> None:
        """Before the first step: on a GPU, load kernels and capture graphs.

        is_trial: no step follows; it is for what these take of memory.
        """
        if self._steps is not None and self.is_asynchronous:
            self._steps.warm_up(is_trial=is_trial)

    def lead(self, ranks: Ranks) -> None:
        """From now on tell these ranks each step."""
        assert self._steps is not None
        self._ranks = ranks
        self._steps.tell = ranks.tell

    def follow(self, word: StepPlan | Guided) -> None:
        """Do the step of the rank that leads, or choose its tokens once more."""
        assert self._steps is not None
        self._steps.follow(word)

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> Computed | Launched:
        """Computes the step's tokens and chooses what follows the last one and each draft.

        On a GPU only enqueued: the next step may be launched before this one's result is asked
        for. Reads the sequences' page tables before it returns, and else of them only what no later
        step changes.
        """
        if self._steps is not None:
            with nullcontext() if self._ranks is None else self._ranks.explained():
                return self._steps.launch(step)
        batch = Batch.build(
            step,
            page_size=self._page_size,
            vocab_size=self.model_config.vocab_size,
            device=self._device,
        )
        batch.input_ids[batch.pending_rows] = self._last_token_ids[batch.pending_seats]
        hidden = self._model.forward(batch, self._cache, self._ops, batch.due)
        logits = self._model.logits(hidden, self._ops)

        penalized = self._penalized(step, batch)

        @torch.inference_mode()
        def choose() -> StepOutput:
            if step.is_guided:
                guided = Guided.build(step.due, self.model_config.vocab_size)
                guided_rows, masks = map(torch.from_numpy, guided)
                self._ops.mask_logits(logits, masks, guided_rows)
            rows = batch.sampling.to(self._device)
            kept = (batch.sample_seats, self._last_token_ids)
            token_ids = self._sampler.sample(logits, rows, *kept)
            self._choose_penalized(penalized, logits, batch, token_ids)
            chosen, told = self._sampler.fetch(token_ids, logits, rows, batch.sampling).result()
            return StepOutput.of(step, chosen, told)

        return Computed(step, choose)

    def _penalized(self, step: ScheduledStep, batch: Batch) -> tuple[Penalized, ...]:
        if not step.is_penalized:
            return ()
        vocab_size = self.model_config.vocab_size
        return Penalized.build(step, batch.due.rows.tolist(), vocab_size, sys.maxsize)

    def _choose_penalized(
        self,
        penalized: tuple[Penalized, ...],
        logits: Tensor,
        batch: Batch,
        token_ids: Tensor,
    ) -> None:
        for part in penalized:
            arrays = [torch.from_numpy(array).to(self._device) for array in part.arrays]
            room = logits.new_empty((len(part.kept), logits.shape[1]), dtype=torch.float32)
            self._sampler.choose_penalized(logits, batch.input_ids, token_ids, arrays, room)
        if penalized:
            self._last_token_ids[batch.sample_seats] = token_ids


def load_runner(config: EngineConfig, *, instrument: Instrument | None = None) -> Runner:
    """The model that the configuration names, its weights loaded and its pages allocated.

    Raises InvalidCheckpoint or InvalidConfig, with a sentence, when they do not fit together.
    """
    if config.dp > 1:
        raise InvalidConfig(f"dp must be 1 where one engine is asked for, got {config.dp}")
    if config.tp == 1:
        return load_rank(config, instrument=instrument)
    _check_layout(config)
    ranks = Ranks(config)
    try:
        runner = load_rank(config, ranks, instrument=instrument)
        ranks.wait_until_built(runner.pages)
    except BaseException:
        ranks.close()
        raise
    runner.lead(ranks)
    return runner


def _check_layout(config: EngineConfig) -> None:
    """What would be refused while the ranks load, before their processes are started."""
    device = choose_device(config)
    source = open_source(config)
    mode = choose_weight_mode(config, source)
    dtype = choose_dtype(config, device)
    check_ranks(source, mode, dtype, config.lm_head, config.tp, config.ep)
    choose_graphs(config, device, dtype, mode)
    if device.type == "cuda":
        check_gpus(config, choose_reduction(config, device, dtype))


def load_rank(
    config: EngineConfig, peers: Peers | None = None, *, instrument: Instrument | None = None
) -> Runner:
    """The part of one rank, or the whole; what load_runner does in each rank's process."""
    started = time.monotonic()
    rank = Rank() if peers is None else peers.rank
    device = choose_device(config)
    if peers is not None and device.type == "cuda":
        device = torch.device("cuda", rank.index)
        torch.cuda.set_device(device)
    dtype = choose_dtype(config, device)
    source = open_source(config)
    own = shards.of_rank(source.config, rank)
    # Refused before minutes of loading weights.
    load_operators(config, device, dtype, own)
    mode = choose_weight_mode(config, source)
    check_mode(source, mode, config.lm_head)
    choose_graphs(config, device, dtype, mode)
    cache_dtype = choose_cache_dtype(config, dtype)

    def built(weights: Weights, pages: PageCounts, is_trial: bool = False) -> Runner:
        sizes = (pages.full, pages.window)
        runner = Runner(source.config, weights, config, *sizes, instrument, peers)
        runner.warm_up(is_trial=is_trial)
        return runner

    def join() -> None:
        if peers is not None:
            peers.join(
                source.fingerprint(),
                device,
                choose_reduction(config, device, dtype),
                columns=own.hidden_size,
                max_tokens=config.max_num_batched_tokens + FILLERS,
            )

    load = partial(load_weights, source, mode, dtype, device, rank, lm_head=config.lm_head)
    if device.type == "cuda":
        weights = load(beside=beside_weights(config, own, cache_dtype, device))
        join()
        build = partial(built, weights)
        agreed = {} if peers is None else {"agreed": peers.agreed}
        runner = fitted(build, config, own, cache_dtype, device, weights.num_bytes, **agreed)
    else:
        pages = PageCounts.derive(config, own, cache_dtype)
        weights = load()
        join()
        runner = built(weights, pages)
    log.info(
        "loaded %s on %s, weights %s, KV cache %s, all else %s, in %.1f s: %d pages for full "
        "layers, %d for window layers",
        *(source.label, device if rank.tp == 1 else f"{device}, rank {rank.index} of {rank.tp}"),
        mode,
        *(str(each).removeprefix("torch.") for each in (cache_dtype, dtype)),
        *(time.monotonic() - started, runner.num_pages, runner.num_window_pages),
    )
    return runner


def open_source(config: EngineConfig) -> IdentifiedSource:
    """The checkpoint, or the random weights, that the configuration names."""
    if config.random_weights:
        from gptoss_engine.checkpoints.random_checkpoint import RandomCheckpoint

        return RandomCheckpoint(config.random_weights)
    return Checkpoint(checkpoint_folder(config.model))


def choose_weight_mode(config: EngineConfig, source: TensorSource) -> WeightMode:
    """auto: as the experts are stored; MXFP4 as fp8 where kernels multiply that, else as bf16."""
    if config.weights != "auto":
        return config.weights
    stored = source.form("layers.0.w13")
    device = choose_device(config)
    has_kernels = choose_gemm(config, device, choose_dtype(config, device)) != "reference"
    return "fp8" if stored == "fp8" or (stored == "mxfp4" and has_kernels) else "bf16"


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of activations and dense weights; auto: float32 on a CPU, bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def choose_gemm(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> operators.Gemm:
    """auto: cuda on a Hopper GPU in bfloat16, else reference."""
    if config.gemm == "auto":
        return "cuda" if _serves_hopper(device, dtype) else "reference"
    _check_kernels("gemm", config.gemm, device, dtype)
    return config.gemm


def choose_reduction(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> Literal["cuda", "reference"]:
    """auto: cuda on Hopper GPUs in bfloat16, else reference."""
    if config.reduction == "auto":
        return "cuda" if _serves_hopper(device, dtype) else "reference"
    _check_kernels("reduction", config.reduction, device, dtype)
    return config.reduction


def check_gpus(config: EngineConfig, reduction: Literal["cuda", "reference"]) -> None:
    """InvalidConfig where there are fewer GPUs than ranks, or some cannot reach each other."""
    found = torch.cuda.device_count()
    if found < config.tp:
        raise InvalidConfig(f"tp must be at most the number of GPUs here, {found}, got {config.tp}")
    if reduction == "cuda":
        for one, other in permutations(range(config.tp), 2):
            if not torch.cuda.can_device_access_peer(one, other):
                raise InvalidConfig(
                    f"GPU {one} cannot reach the memory of GPU {other} (no peer access): choose "
                    "reduction reference, which is slower, or tp 1"
                )


def choose_attention(
    config: EngineConfig,
    device: torch.device,
    dtype: torch.dtype,
    model: ModelConfig | None = None,
) -> operators.Attention:
    """auto: cuda on a Hopper GPU in bfloat16, if it takes the model's heads, else reference.

    InvalidConfig if kernels do not run there, or do not take pages of that size, or such heads: of
    a model, where it is known.
    """
    name = config.attention
    takes_heads = model is None or (
        model.head_dim == operators.HEAD_DIM
        and model.num_heads % model.num_kv_heads == 0
        and model.num_heads // model.num_kv_heads in operators.GROUPS_OF_HEADS
    )
    if name == "auto":
        name = "cuda" if _serves_hopper(device, dtype) and takes_heads else "reference"
    else:
        _check_kernels("attention", name, device, dtype)
    _check_page_size(config, "attention", name)
    if name != "reference" and model and not takes_heads:
        raise InvalidConfig(
            f"attention must be auto or reference for this model, got {name}: its kernels take "
            f"heads of {operators.HEAD_DIM}, {', '.join(map(str, operators.GROUPS_OF_HEADS))} "
            f"query heads to a key-value head, and it has {model.num_heads} and "
            f"{model.num_kv_heads} heads of {model.head_dim}"
        )
    return name


def choose_graphs(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, mode: WeightMode
) -> bool:
    """Whether steps are captured. auto: where all of their operators can be.

    InvalidConfig if they are to be and cannot: the reference and libraries ask the device for
    lengths, and NCCL's sums have run in no graph.
    """
    needed = {"gemm": "cuda", "attention": "cuda", "weights": "fp8"}
    found = {
        "gemm": choose_gemm(config, device, dtype),
        "attention": choose_attention(config, device, dtype),
        "weights": mode,
    }
    if config.tp > 1:
        needed["reduction"] = "cuda"
        found["reduction"] = choose_reduction(config, device, dtype)
    if config.cuda_graphs == "on" and found != needed:
        raise InvalidConfig(f"cuda_graphs on needs {_listed(needed)}, got {_listed(found)}")
    return config.cuda_graphs != "off" and found == needed


def _listed(values: Mapping[str, str]) -> str:
    *names, last = (f"{name} {value}" for name, value in values.items())
    return f"{', '.join(names)} and {last}"


def choose_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values, where activations have `dtype`."""
    return torch.float8_e4m3fn if config.kv_cache == "fp8" else dtype


def _serves_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and dtype == torch.bfloat16


def _check_kernels(key: str, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """InvalidConfig where a GPU or bf16 is missing that all but the reference need."""
    if name != "reference":
        if device.type != "cuda":
            raise InvalidConfig(
                f"{key} must be auto or reference on a {device.type}, got {name}: its kernels need "
                "a GPU"
            )
        if dtype != torch.bfloat16:
            found = str(dtype).removeprefix("torch.")
            raise InvalidConfig(f"{key} {name} needs dtype bfloat16, got {found}")


def _check_page_size(config: EngineConfig, key: str, name: operators.Attention) -> None:
    sizes = operators.PAGE_SIZES.get(name)
    if sizes and config.page_size not in sizes:
        raise InvalidConfig(
            f"page_size must be one of {', '.join(map(str, sizes))} with {key} {name}, "
            f"got {config.page_size}"
        )


def load_operators(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, model: ModelConfig
) -> operators.Operators:
    """As chosen; InvalidConfig if what they need is not there."""
    gemm = choose_gemm(config, device, dtype)
    attention = choose_attention(config, device, dtype, model)
    if gemm == "cuda":  # Beside them stands our kernel that finds a step's slots, whoever attends.
        _check_page_size(config, "gemm", gemm)
    try:
        return operators.load(gemm, attention)
    except operators.LibraryError as error:
        raise InvalidConfig(str(error)) from error
    except ImportError as error:
        raise InvalidConfig(
            f"gemm {gemm} with attention {attention} cannot be imported ({error}): "
            "pip install 'gptoss-backend[gpu]'"
        ) from error
