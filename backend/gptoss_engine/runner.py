"""One step: ScheduledStep -> Batch -> forward pass -> sampled tokens on the host."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gptoss_engine.batch import Batch
from gptoss_engine.capacity import beside_weights, fitted
from gptoss_engine.checkpoints.checkpoint import Checkpoint, checkpoint_folder
from gptoss_engine.checkpoints.tensor_source import TensorSource, WeightMode
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.device_steps import DeviceSteps, Launched
from gptoss_engine.devices import choose_device
from gptoss_engine.graphs import CudaCapture
from gptoss_engine.kv_cache import KVCache, PageCounts, max_model_len
from gptoss_engine.loading import check_mode, load_weights
from gptoss_engine.model import GptOss, rope_table
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.sampler import Sampler
from gptoss_engine.sequence import ScheduledStep, StepOutput
from gptoss_engine.weights import Weights
from gptoss_kernels import ops as operators

log = logging.getLogger(__name__)

Instrument = Callable[[operators.Operators], operators.Operators]


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that has run."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class Runner:
    """Owns weights and KV pages; knows no queue and no client.

    num_pages, num_window_pages: what the page pools of the two groups may hand out.
    max_model_len: tokens of prompt and answer together.
    weight_mode: the form of the experts' weights.
    is_asynchronous: whether `launch` returns before the step has run, as it does on a GPU.
    instrument: gives what is called instead of the operators, for measuring.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        weights: Weights,
        config: EngineConfig,
        num_pages: int,
        num_window_pages: int,
        instrument: Instrument | None = None,
    ) -> None:
        self.model_config = model_config
        self.num_pages = num_pages
        self.num_window_pages = num_window_pages
        self.max_model_len = max_model_len(config, model_config)
        self.weight_mode = weights.mode
        self._page_size = config.page_size
        self._device = weights.embedding.device
        self._ops = load_operators(config, self._device, weights.embedding.dtype, model_config)
        if instrument is not None:
            self._ops = instrument(self._ops)
        self._sampler = Sampler(self._ops)
        table = rope_table(model_config, self.max_model_len, self._ops)
        self._model = GptOss(model_config, weights, table.to(self._device))
        self._cache = KVCache.allocate(
            model_config,
            page_size=config.page_size,
            num_pages=num_pages,
            num_window_pages=num_window_pages,
            dtype=choose_cache_dtype(config, weights.embedding.dtype),
            device=self._device,
        )
        # By seat, what the last step that sampled there chose: the next step's pending inputs.
        self._last_token_ids = torch.full(
            (config.max_num_seqs,), -1, dtype=torch.int64, device=self._device
        )
        self.is_asynchronous = self._device.type == "cuda"
        self._steps: DeviceSteps | None = None
        if self.is_asynchronous:
            dtype = weights.embedding.dtype
            has_graphs = choose_graphs(config, self._device, dtype, weights.mode)
            self._steps = DeviceSteps(
                *(self._model, self._cache, self._ops, config),
                num_pages=num_pages,
                num_window_pages=num_window_pages,
                max_model_len=self.max_model_len,
                capture=CudaCapture() if has_graphs else None,
            )

    @property
    def fault(self) -> str:
        """Why no step will run any more; empty as far as is known."""
        return ""

    def close(self) -> None:
        """Nothing was started."""

    def warm_up(self) -> None:
        """Before the first step: on a GPU, load kernels and capture graphs."""
        if self._steps is not None:
            self._steps.warm_up()

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> Computed | Launched:
        """Computes the step's tokens and chooses what follows the last one and each draft.

        On a GPU only enqueued: the next step may be launched before this one's result is asked
        for. Reads the sequences' page tables before it returns, and else of them only what no later
        step changes.
        """
        if self._steps is not None:
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
        rows = batch.sampling.to(self._device)
        kept = (batch.sample_seats, self._last_token_ids)
        token_ids = self._sampler.sample(logits, rows, *kept)
        chosen, logprobs = self._sampler.fetch(token_ids, logits, rows, batch.sampling).result()
        return Computed(StepOutput.of(step, chosen, logprobs))


def load_runner(config: EngineConfig, *, instrument: Instrument | None = None) -> Runner:
    """The model that the configuration names, its weights loaded and its pages allocated.

    Raises InvalidCheckpoint or InvalidConfig, with a sentence, when they do not fit together.
    """
    started = time.monotonic()
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    source = open_source(config)
    # Refused before minutes of loading weights.
    load_operators(config, device, dtype, source.config)
    mode = choose_weight_mode(config, source)
    check_mode(source, mode, config.lm_head)
    choose_graphs(config, device, dtype, mode)
    cache_dtype = choose_cache_dtype(config, dtype)

    def built(weights: Weights, pages: PageCounts) -> Runner:
        runner = Runner(source.config, weights, config, pages.full, pages.window, instrument)
        runner.warm_up()
        return runner

    load = partial(load_weights, source, mode, dtype, device, lm_head=config.lm_head)
    if device.type == "cuda":
        weights = load(beside=beside_weights(config, source.config, cache_dtype, device))
        build = partial(built, weights)
        runner = fitted(build, config, source.config, cache_dtype, device, weights.num_bytes)
    else:
        pages = PageCounts.derive(config, source.config, cache_dtype)
        runner = built(load(), pages)
    log.info(
        "loaded %s on %s, weights %s, KV cache %s, all else %s, in %.1f s: %d pages for full "
        "layers, %d for window layers",
        *(source.label, device, mode),
        *(str(each).removeprefix("torch.") for each in (cache_dtype, dtype)),
        *(time.monotonic() - started, runner.num_pages, runner.num_window_pages),
    )
    return runner


def open_source(config: EngineConfig) -> TensorSource:
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
    """Whether steps of decodes are captured. auto: where all of their operators can be.

    InvalidConfig if they are to be and cannot: the reference and libraries ask the device for
    lengths.
    """
    gemm = choose_gemm(config, device, dtype)
    attention = choose_attention(config, device, dtype)
    is_possible = gemm == attention == "cuda" and mode == "fp8"
    if config.cuda_graphs == "on" and not is_possible:
        raise InvalidConfig(
            "cuda_graphs on needs gemm cuda, attention cuda and weights fp8, got gemm "
            f"{gemm}, attention {attention} and weights {mode}"
        )
    return config.cuda_graphs != "off" and is_possible


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
