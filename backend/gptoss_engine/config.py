"""What is configured: read once at the edge, frozen, unknown keys refused by name.

The same keys serve the configuration file (TOML or JSON), the command line's --flags and the
engine model's `parameters` in config.pbtxt. Words are vLLM's where it has them.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from gptoss_engine.types import nearest, shown


class InvalidConfig(ValueError):
    """A configuration that cannot work: names the key, the value and the limit."""


DEFAULT_MODEL = "demo"
_DEVICES = Path("/dev")
MAX_RANKS = 64  # of one machine
# A GPU reads its weights once for all rows of a step, so a step should have many.
GPU_MAX_NUM_SEQS = 512
GPU_MAX_NUM_BATCHED_TOKENS = 8192
# The first token of the next request comes 0.1 ms earlier than on a core that has slept.
GPU_IDLE_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    model: a checkpoint folder, or "demo" for the built-in demo model.
    random_weights: instead of a model, random weights in the shapes of a published one.
    weights: of the experts. "fp8" makes them from MXFP4 without loss, "mxfp4" keeps them as they
        are and computes the same; both hold the attention's weights in FP8. "bf16" widens all to
        dtype. "auto" is fp8 for a converted checkpoint and bf16 for any other.
    lm_head: the unembedding where weights are not bf16: "fp8" makes it FP8, "bf16" keeps it in, or
        widens it to, dtype; "auto" is as the checkpoint holds it.
    gemm: whose kernels multiply FP8 weights: "cuda" (ours, for Hopper), "triton" (ours, in
        Triton-lang), "deepgemm" (that library's) or "reference" (plain PyTorch, anywhere). "auto"
        is cuda on a Hopper GPU and reference elsewhere.
    attention: whose kernels attend: "cuda" (ours, for Hopper), "triton" (ours, in Triton-lang),
        "flashinfer" (that library's) or "reference" (plain PyTorch, anywhere). "auto" is cuda on a
        Hopper GPU, for models whose heads it takes, and reference elsewhere.
    kv_cache: "bf16" keeps keys and values in dtype, "fp8" in e4m3, which is half of bf16's bytes.
    tp: GPUs, or processes of a CPU, that share one model: ranks, each with its heads of attention.
    reduction: whose kernels add up what ranks have: "cuda" (ours, over peer memory of Hopper GPUs)
        or "reference" (NCCL on GPUs, gloo on a CPU). "auto" is cuda on Hopper GPUs.
    ep: tp gives each rank whole experts, 1 a part of every expert.
    dp: such engines beside each other, each with a whole model; each request goes to one of them.
    dtype: of activations and dense weights; "auto" is float32 on a CPU and bfloat16 on a GPU.
    num_pages, num_window_pages: KV pages of page_size tokens in each page group; 0 derives them:
        enough for max_num_seqs sequences within kv_cache_gigabytes on a CPU, and on a GPU within
        what is left of its memory.
    gpu_memory_utilization: the share of a GPU's memory that may be used, weights and steps counted.
    max_model_len: tokens of prompt and answer together; 0 means the checkpoint's own limit.
    max_num_seqs: sequences that run at once: 64, on a GPU 512.
    max_num_batched_tokens: the token budget that prefill chunks and decodes of one step share:
        2048, on a GPU 8192.
    overlap: "on" schedules each step while the one before runs, "off" when it has run; the tokens
        are the same. "auto" is on on a GPU.
    cuda_graphs: "on" captures steps of decodes, and of a short prompt alone, as CUDA graphs at the
        start, which needs gemm and attention "cuda", FP8 weights and, where tp is more than 1,
        reduction "cuda"; "auto" does so wherever it can.
    max_waiting_requests, max_waiting_tokens: admission limits; beyond them UNAVAILABLE. A request
        that finds a free place among max_num_seqs is not waiting.
    default_max_tokens: the answer's limit when a request names none; 0 is what the context leaves.
    stream_interval: tokens a stream gathers before a response is sent, after its first token.
    idle_poll_seconds: so long an engine in a process of its own looks for the next request without
        sleep when it has nothing to do, which takes a core: 0, on a GPU 0.05.
    engine_process: "on" gives the server's engine a process of its own, so that sending responses
        costs it no step; "off" has it in the process that sends. "auto" is on on a GPU.
    enable_prefix_caching: whether a request begins with the pages that earlier ones have computed
        of the same prompt.
    """

    model: str = DEFAULT_MODEL
    random_weights: Literal["", "20b", "120b", "tiny"] = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: Literal["auto", "fp8", "mxfp4", "bf16"] = "auto"
    lm_head: Literal["auto", "bf16", "fp8"] = "auto"
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    attention: Literal["auto", "cuda", "triton", "flashinfer", "reference"] = "auto"
    gemm: Literal["auto", "cuda", "triton", "deepgemm", "reference"] = "auto"
    reduction: Literal["auto", "cuda", "reference"] = "auto"
    tp: int = 1
    ep: int = 1
    dp: int = 1
    page_size: int = 64
    num_pages: int = 0
    num_window_pages: int = 0
    kv_cache_gigabytes: float = 1.0
    gpu_memory_utilization: float = 0.98
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 0
    overlap: Literal["auto", "on", "off"] = "auto"
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_000_000
    default_max_tokens: int = 0
    default_timeout_seconds: float = 600.0
    stream_interval: int = 1
    idle_poll_seconds: float = 0.0
    engine_process: Literal["auto", "on", "off"] = "auto"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.random_weights and self.model != DEFAULT_MODEL:
            raise InvalidConfig(
                f"random_weights ({self.random_weights}) and model ({shown(self.model)}) exclude "
                "each other"
            )
        for name, low, high in (
            ("tp", 1, MAX_RANKS),
            ("dp", 1, MAX_RANKS),
            ("page_size", 1, 1024),
            ("num_pages", 0, 2**31 - 1),
            ("num_window_pages", 0, 2**31 - 1),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 1, 2**20),
            ("max_model_len", 0, 2**20),
            ("max_waiting_requests", 0, 2**31 - 1),
            ("max_waiting_tokens", 0, 2**31 - 1),
            ("default_max_tokens", 0, 2**31 - 1),
            ("stream_interval", 1, 1024),
            ("kv_cache_gigabytes", 0.001, 100_000),
            ("gpu_memory_utilization", 0.01, 1),
            ("default_timeout_seconds", 0.001, 1e9),
            ("idle_poll_seconds", 0, 1e6),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidConfig(f"{name} must be in [{low}, {high}], got {value}")
        if self.ep not in (1, self.tp):
            raise InvalidConfig(f"ep must be 1 or tp ({self.tp}), got {self.ep}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence decodes each step"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "EngineConfig":
        """From names and values, strings (as config.pbtxt has them) or already typed.

        On a machine with a GPU, unless `device` is cpu, the GPU's defaults hold.
        """
        types = {field.name: field.type for field in fields(cls)}
        for name in values:
            if name not in types:
                near = nearest(name, [*types])
                raise InvalidConfig(f"unknown configuration key {shown(name)}{near}")
        given = {name: _convert(name, value, types[name]) for name, value in values.items()}
        if given.get("device") != "cpu" and has_gpu():
            budget = given.setdefault("max_num_batched_tokens", GPU_MAX_NUM_BATCHED_TOKENS)
            given.setdefault("max_num_seqs", max(1, min(GPU_MAX_NUM_SEQS, budget)))
            given.setdefault("idle_poll_seconds", GPU_IDLE_POLL_SECONDS)
        return cls(**given)


def has_gpu() -> bool:
    """Whether NVIDIA's driver shows one here. Neither torch nor the driver is loaded for it."""
    return bool(gpu_names())


def gpu_names() -> list[str]:
    """Of those that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    found = [*_DEVICES.glob("nvidia[0-9]*")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found and visible is not None:
        names = (name.strip() for name in visible.split(","))
        # The first that is none ends the list, as it does for the driver.
        return [*takewhile(lambda name: name not in ("", "-1"), names)]
    return [str(index) for index in range(len(found))]


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The keys of a .toml or .json configuration file, as a flat table."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read configuration file {path}: {error}") from error
    if not isinstance(values, dict):
        raise InvalidConfig(f"configuration file {path} must hold one table of keys and values")
    return values


def _convert(name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(filter(None, get_args(kind)))
            raise InvalidConfig(f"{name} must be one of {choices}, got {shown(value)}")
        return value
    try:
        if kind is bool:
            if isinstance(value, str) and value.lower() in ("true", "false"):
                return value.lower() == "true"
            if isinstance(value, bool):
                return value
        elif kind is int:
            if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
                return int(value)
        elif kind is float:
            if not isinstance(value, bool):
                return float(value)
        elif kind is str and isinstance(value, str):
            return value
    except (TypeError, ValueError):
        pass
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    raise InvalidConfig(f"{name} must be {words[kind]}, got {shown(value)}")
