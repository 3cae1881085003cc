"""The ensemble's inputs, as clients of vLLM, TensorRT-LLM and OpenAI name them, to one request.

Every field is checked here or by the engine (the ranges of sampling parameters), always before
anything is admitted. A parameter that is known and not built is refused by name unless its value
is the neutral one: nothing is ignored.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gptoss_harmony import chat
from gptoss_harmony.structured import GUIDED, guided_decoding
from gptoss_harmony.types import (
    ChatRequest,
    InvalidChat,
    TextFormat,
    UnsupportedChat,
    nearest,
    shown,
)

MAX_TEXT_BYTES = 4 * 2**20
"""Of each text in a request."""
MAX_STOP_TOKEN_IDS = 125
"""The engine takes 128, and Harmony's three come on top."""
MAX_TOP_LOGPROBS = 20
MAX_CACHE_SALT = 256  # characters; as the engine has it

# What goes to the engine as it is; the engine checks type and range.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stop_token_ids"),
)
_CHAT = (
    *("messages", "tools", "tool_choice", "reasoning_effort", "response_format"),
    "parallel_tool_calls",
)
# Known and not built: by name, the values that ask for nothing. None always does.
_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "prompt_logprobs": (0,),
    "priority": (0,),
}
_INPUTS = (
    *("text_input", "raw_prompt", "stream", "stop_words", "top_logprobs", "return_logprobs"),
    *("return_cumulative_logprob", "return_finish_reason"),
    *("return_num_input_tokens", "return_num_output_tokens", "exclude_input_in_output"),
    *("sampling_parameters", *_CHAT, *GUIDED, *_SAMPLING[:-1], *_UNBUILT),
)
# vLLM's names inside sampling_parameters, and which of our inputs they are.
_RENAMED = {"stop": "stop_words", "logprobs": "top_logprobs"}
_VLLM_SHARED = (
    *_SAMPLING,
    *_RENAMED,
    *("n", "prompt_logprobs"),
)
_VLLM_UNBUILT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "guided_decoding": ({},),
    "structured_outputs": ({},),
    "extra_args": ({},),
    "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}


class ChatParser(Protocol):
    """A format, as far as a request is read by it; the module `chat` is OpenAI's."""

    @property
    def parse_chat(self) -> Callable[..., ChatRequest]: ...

    @property
    def parse_text(self) -> Callable[..., ChatRequest]: ...


@dataclass(frozen=True, slots=True)
class EnsembleRequest:
    """A checked request: a chat, or a raw prompt that its author wrote in Harmony.

    text_format: what the answer to a raw prompt must be. echo: text to repeat before the answer.
    return_logprobs: whether the client wants them token by token; sampling has what the engine
    needs either way.
    """

    chat: ChatRequest | None
    raw_prompt: str | None
    text_format: TextFormat | None
    sampling: Mapping[str, Any]
    stream: bool
    stop_words: tuple[str, ...]
    echo: str
    return_logprobs: bool


def read_request(
    inputs: Mapping[str, bytes | list[bytes] | bool | int | float],
    parameters: Mapping[str, Any],
    parser: ChatParser = chat,
) -> EnsembleRequest:
    """`inputs` are the tensors' values by name; `parameters` what else the request carried, as
    misspelt fields of `generate` do; `parser` is the format. Raises InvalidChat or
    UnsupportedChat."""
    for name, value in parameters.items():
        if name == "timeout":
            # The engine reads it, too.
            if type(value) is not int or value < 0:
                raise InvalidChat(f"timeout must be microseconds, got {shown(value)}")
        elif name == "cache_salt":  # The engine's, too.
            if not isinstance(value, str) or len(value) > MAX_CACHE_SALT:
                raise InvalidChat(
                    f"cache_salt must be text of at most {MAX_CACHE_SALT} characters, "
                    f"got {shown(value)}"
                )
        elif not name.startswith("triton_"):  # the server's own
            raise InvalidChat(f"unknown field {name!r}{nearest(name, _INPUTS)}")
    fields = {name: _text(name, value) for name, value in inputs.items()}
    if "logit_bias" in fields:
        fields["logit_bias"] = _biases(fields["logit_bias"])
    fields = _with_sampling_parameters(fields)
    _refuse_unbuilt(fields, _UNBUILT)
    return _request(fields, parser)


def _request(fields: dict[str, Any], parser: ChatParser) -> EnsembleRequest:
    stream = fields.get("stream", False)
    sampling = {name: fields[name] for name in _SAMPLING if fields.get(name) not in (None, {})}
    stop_ids = sampling.get("stop_token_ids", [])
    if not isinstance(stop_ids, list):
        raise InvalidChat(f"stop_token_ids must be a list of token ids, got {shown(stop_ids)}")
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidChat(
            f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} entries, got {len(stop_ids)}"
        )
    num_top = fields.get("top_logprobs", 0)
    if type(num_top) is not int or not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise InvalidChat(
            f"top_logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}], got {shown(num_top)}"
        )
    return_logprobs = fields.get("return_logprobs", False) or num_top > 0
    if return_logprobs or fields.get("return_cumulative_logprob"):
        sampling["logprobs"] = num_top
    is_raw = fields.get("raw_prompt", False)
    return EnsembleRequest(
        chat=None if is_raw else _chat(fields, parser),
        raw_prompt=_raw_prompt(fields) if is_raw else None,
        text_format=guided_decoding(*map(fields.get, GUIDED)) if is_raw else None,
        sampling=sampling,
        stream=stream,
        stop_words=_stop_words(fields.get("stop_words")),
        echo=_echo(fields, stream=stream),
        return_logprobs=return_logprobs,
    )


def _chat(fields: Mapping[str, Any], parser: ChatParser) -> ChatRequest:
    if ("messages" in fields) == ("text_input" in fields):
        both = "both" if "messages" in fields else "neither"
        raise InvalidChat(f"one of messages and text_input must be given, got {both}")
    given: dict[str, Any] = {name: fields.get(name) for name in (*_CHAT, *GUIDED)}
    if "messages" in fields:
        return parser.parse_chat(**given)
    del given["messages"]
    return parser.parse_text(fields["text_input"], **given)


def _raw_prompt(fields: Mapping[str, Any]) -> str:
    for name in _CHAT:
        if fields.get(name):
            raise InvalidChat(f"{name} cannot be given with raw_prompt: the text holds all of it")
    if not fields.get("text_input"):
        raise InvalidChat("text_input must be given with raw_prompt, and not be empty")
    return fields["text_input"]


def _stop_words(value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidChat(f"stop_words must be strings, got {shown(value)}")
    # Clients of TensorRT-LLM send one empty word for none.
    return tuple(word for word in words if word)


def _echo(fields: Mapping[str, Any], *, stream: bool) -> str:
    """vLLM's backend repeats the prompt when asked to, and never while streaming; so do we."""
    if fields.get("exclude_input_in_output", True):
        return ""
    if stream:
        raise InvalidChat("exclude_input_in_output must be true when stream is true, got false")
    if "text_input" not in fields:
        raise InvalidChat("exclude_input_in_output can only be false with text_input")
    return fields["text_input"]


def _with_sampling_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` joined with vLLM's JSON; a field given both ways must agree."""
    values = _json_object("sampling_parameters", fields.pop("sampling_parameters", "") or "{}")
    for name in values:
        if name not in _VLLM_SHARED and name not in _VLLM_UNBUILT:
            hint = nearest(name, (*_VLLM_SHARED, *_VLLM_UNBUILT))
            raise InvalidChat(f"unknown field {shown(name)} in sampling_parameters{hint}")
    _refuse_unbuilt(values, _VLLM_UNBUILT)
    for name in _VLLM_SHARED:
        value = values.get(name)
        if value is None:
            continue
        field = _RENAMED.get(name, name)
        if field == "stop_words" and isinstance(value, str):
            value = [value]
        if field in fields and not _agree(fields[field], value):
            raise InvalidChat(
                f"{field} and {name} in sampling_parameters must agree, "
                f"got {shown(fields[field])} and {shown(value)}"
            )
        fields[field] = value
    if values.get("logprobs") is not None:
        fields["return_logprobs"] = True  # vLLM's 0 asks for the chosen token's alone
    return fields


def _biases(text: str) -> dict[str, Any]:
    return _json_object("logit_bias", text) if text not in ("", "null") else {}


def _refuse_unbuilt(fields: Mapping[str, Any], unbuilt: Mapping[str, tuple[Any, ...]]) -> None:
    for name, neutral in unbuilt.items():
        value = fields.get(name)
        # True is 1 to Python, and not to those who send it.
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        ):
            but = f" but {neutral[0]!r}" if neutral else ""
            raise UnsupportedChat(
                f"{name} is not built in this version and takes nothing{but}, got {shown(value)}"
            )


def _text(name: str, value: Any) -> Any:
    """Bytes as text; everything else as it is."""
    if isinstance(value, list):
        return [_text(name, item) for item in value]
    if not isinstance(value, bytes):
        return value
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidChat(
            f"{name} must be UTF-8, got byte 0x{value[error.start]:02x} at {error.start}: "
            f"{error.reason}"
        ) from None
    if len(value) > MAX_TEXT_BYTES:
        raise InvalidChat(f"{name} must be at most {MAX_TEXT_BYTES} bytes, got {len(value)}")
    return text


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidChat(f"{name} must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidChat(f"{name} must be a JSON object, got {shown(value)}")
    return value


def _agree(one: Any, other: Any) -> bool:
    numbers = (int, float)
    if isinstance(one, float) and isinstance(other, numbers) and not isinstance(other, bool):
        try:
            return math.isclose(one, other, rel_tol=1e-6)  # one of them went through FP32
        except OverflowError:  # an integer larger than any float
            return False
    return type(one) is type(other) and one == other
