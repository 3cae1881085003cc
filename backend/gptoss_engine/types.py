"""What flows through the engine: one frozen type for each stage of a request's life.

`GenerationRequest` -> `Sequence` (sequence.py) -> `ScheduledStep` (scheduler.py) -> `StepOutput`
-> `TokenChunk`. Every type is complete at birth and refuses bad values in words.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from gptoss_grammars import MAX_GUIDE_LENGTH

FinishReason = Literal["stop", "length", "abort", "error"]
GuideType = Literal["json_schema", "regex", "lark", "grammars"]
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_BIASED_TOKENS = 300


class InvalidRequest(ValueError):
    """The caller's fault, found before admission: names the field, the value and the limit."""


class Unsupported(InvalidRequest):
    """A known parameter with a value that this build does not implement: named, never ignored."""


class Unavailable(RuntimeError):
    """The engine is full, draining or broken: the same request may succeed later."""


def duplicate(generation_id: str) -> InvalidRequest:
    return InvalidRequest(
        f"generation_id must be unique, got {generation_id!r}, which is still open"
    )


@dataclass(frozen=True, slots=True)
class Guide:
    """A grammar that the whole answer follows, from its first token on, in llguidance's words.

    json_schema: the schema, as JSON. regex, lark: as it is. grammars: a JSON list of objects, each
    with `lark_grammar` or `json_schema`, and a `name` by which the first one refers to it (@name).
    Where the grammar is satisfied the model may end the answer; where nothing else may follow, it
    is ended. In Lark, <[200007]> is a token by its id.
    """

    type: GuideType
    value: str

    def __post_init__(self) -> None:
        if self.type not in get_args(GuideType):
            names = ", ".join(get_args(GuideType))
            raise InvalidRequest(f"guide.type must be one of {names}, got {shown(self.type)}")
        if not isinstance(self.value, str) or not self.value:
            raise InvalidRequest(f"guide.value must be a text, got {shown(self.value)}")
        if len(self.value) > MAX_GUIDE_LENGTH:
            raise InvalidRequest(
                f"guide.value must have at most {MAX_GUIDE_LENGTH} characters, "
                f"got {len(self.value)}"
            )

    @classmethod
    def from_mapping(cls, values: object) -> "Guide":
        """From parsed JSON."""
        if not isinstance(values, Mapping) or set(values) != {"type", "value"}:
            raise InvalidRequest(f"guide must have a type and a value alone, got {shown(values)}")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a generation ends. Names and ranges are vLLM's.

    temperature: 0 is greedy (lowest id wins a tie); at most 100.
    top_k: 0 or -1 means every token. top_p in (0, 1]. min_p in [0, 1].
    seed: in [0, 2**64); None draws one when the request is admitted.
    max_tokens: None means what the model's context leaves.
    stop_token_ids: end the generation (with reason "stop") and are part of its tokens.
    ignore_eos: the checkpoint's own end tokens no longer stop; stop_token_ids still do.
    logprobs: None for none, n for the chosen token's and the n most likely tokens' (n <= 20).
    repetition_penalty: in [0.001, 100]; the logit of each token of prompt and answer is divided by
        it where it is above 0, else multiplied. 1 is none.
    presence_penalty, frequency_penalty: in [-2, 2], taken from the logit of each token of the
        answer: once, and as often as it is there. 0 is none.
    logit_bias: (token id, bias in [-100, 100]) by ascending id, at most 300; added before all
        penalties. Log-probabilities know neither.
    guide: what the answer may be. A token that it does not allow has no probability, and is not
        told; min_tokens gives way where only the end may come.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    guide: Guide | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}"
                )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _number("repetition_penalty", self.repetition_penalty, 0.001, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_bias(self.logit_bias)
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise InvalidRequest(f"guide must be a Guide, got {shown(self.guide)}")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {shown(self.ignore_eos)}")
        if not isinstance(self.stop_token_ids, tuple):
            raise InvalidRequest("stop_token_ids must be a list of token ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} entries, "
                f"got {len(self.stop_token_ids)}"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def is_penalized(self) -> bool:
        """Whether what was said before changes what is chosen."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """From parsed JSON. An unknown name is refused with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = nearest(name, known)
                raise InvalidRequest(f"unknown sampling parameter {shown(name)}{near}")
        given = {name: value for name, value in values.items() if value is not None}
        if isinstance(given.get("stop_token_ids"), list):
            given["stop_token_ids"] = tuple(given["stop_token_ids"])
        if "logit_bias" in given:
            given["logit_bias"] = _read_bias(given["logit_bias"])
        if "guide" in given:
            given["guide"] = Guide.from_mapping(given["guide"])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to be generated.

    deadline: a time.monotonic() value in seconds, or None. cache_salt: what the prefix cache keeps
    of it only requests with the same salt find; the empty one is everybody's.
    """

    generation_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities after temperature 1: the chosen token's, and the top n's.

    Fewer than n where a guide allows no more.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some tokens of one generation, in order. Exactly one chunk a generation has a finish_reason.

    logprobs: one entry a token, or empty when none were asked for.
    error: a sentence, with finish_reason "error" or "abort" (deadline), else "".
    num_prompt_tokens, num_cached_tokens: counts of the whole request, on every chunk.
    """

    generation_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges at one moment, and counters since the start.

    Pages that are cached and nobody's are not used. num_queried_tokens, num_hit_tokens: of prompts,
    that the prefix cache was asked for, and that it had.
    """

    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    num_pages: int
    num_used_pages: int
    num_window_pages: int
    num_used_window_pages: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_finished: Mapping[FinishReason, int]


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60


def shown(value: object) -> str:
    """A caller's value in a sentence: as Python writes it, cut where it is long."""
    return _SHORT.repr(value)


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` for an unknown key, or nothing when no known key is near."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _read_bias(values: object) -> tuple[tuple[int, float], ...]:
    """From a JSON object, whose keys are token ids as text."""
    if not isinstance(values, Mapping):
        raise InvalidRequest(
            f"logit_bias must be an object of token ids and biases, got {shown(values)}"
        )
    biases: dict[int, Any] = {}
    for key, bias in values.items():
        if not isinstance(key, str) or not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise InvalidRequest(f"logit_bias must have token ids as keys, got {shown(key)}")
        if int(key) in biases:
            raise InvalidRequest(f"logit_bias must have each token once, got {int(key)} twice")
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _check_bias(biases: object) -> None:
    if not isinstance(biases, tuple):
        raise InvalidRequest("logit_bias must be pairs of a token id and a bias")
    if len(biases) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            f"logit_bias must have at most {MAX_BIASED_TOKENS} entries, got {len(biases)}"
        )
    for token_id, bias in biases:
        _integer("logit_bias", token_id, 0, 2**31 - 1)
        _number(f"logit_bias of token {token_id}", bias, -100.0, 100.0)


def _number(
    name: str, value: object, low: float, high: float, *, low_is_open: bool = False
) -> None:
    bounds = f"in {'(' if low_is_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number {bounds}, got {shown(value)}")
    inside = low < value <= high if low_is_open else low <= value <= high
    if not inside:
        raise InvalidRequest(f"{name} must be {bounds}, got {shown(value)}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer in [{low}, {high}], got {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {shown(value)}")
