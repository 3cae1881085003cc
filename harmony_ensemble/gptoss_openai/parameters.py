"""OpenAI's fields to the ensemble's inputs: names, types and ranges; nothing is ignored in silence.

A field is one of four: the ensemble has an input for it; it is harmless (it changes no answer) and
accepted; it is known and not built, and takes its neutral value alone; or it is unknown. Then
`gptoss_harmony` looks at the whole request as its preprocess model will, so that what is wrong
with a chat is refused with its code, before anything is sent.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from gptoss_harmony.chat import check_stop_words
from gptoss_harmony.request import MAX_TOP_LOGPROBS, read_request
from gptoss_harmony.types import InvalidChat, UnsupportedChat, nearest, shown
from gptoss_openai.errors import ApiError, Names, invalid, unsupported

Value = bytes | list[bytes] | bool | int | float
Inputs = dict[str, Value]

MAX_CHOICES = 128  # as OpenAI's
_FP32_MAX = 3.4028234663852886e38


class Field(NamedTuple):
    """The ensemble's input, and how its value is made of the client's."""

    input: str
    convert: Callable[[str, Any], Value]


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def convert(name: str, value: Any) -> int:
        if type(value) is not int:
            raise invalid(name, f"must be an integer in [{low}, {high}], got {shown(value)}")
        if not low <= value <= high:
            raise invalid(name, f"must be in [{low}, {high}], got {shown(value)}")
        return value

    return convert


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _FP32_MAX:
        raise invalid(name, f"must be a number, got {shown(value)}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, f"must be true or false, got {shown(value)}")
    return value


def text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise invalid(name, f"must be a string, got {shown(value)}")
    return value.encode()


def _texts(name: str, value: Any) -> list[bytes]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise invalid(name, f"must be a string or a list of strings, got {shown(value)}")
    return [each.encode() for each in texts]


def as_json(_name: str, value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def tool_choice(name: str, value: Any) -> bytes:
    """As a chat has it."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.get("type") != "function":
        raise unsupported(f"{name}.type", f"must be function, got {shown(value.get('type'))}")
    return as_json(name, value)


def _seed(name: str, value: Any) -> int:
    """Also the negative ones that 64 bits hold, which OpenAI's clients may draw."""
    return _integer(-(2**63), 2**64 - 1)(name, value) % 2**64


def _bias(name: str, value: Any) -> bytes:
    if not isinstance(value, dict):
        raise invalid(name, f"must be an object of token ids and numbers, got {shown(value)}")
    return as_json(name, value)


count = _integer(1, 2**31 - 1)
_num_choices = _integer(1, MAX_CHOICES)
num_top = _integer(0, MAX_TOP_LOGPROBS)
_int32 = _integer(-(2**31), 2**31 - 1)

# By OpenAI's names, which all three APIs share; then those of vLLM's clients (`extra_body`).
SAMPLING: Mapping[str, Field] = {
    "temperature": Field("temperature", _number),
    "top_p": Field("top_p", _number),
    "top_k": Field("top_k", _int32),
    "min_p": Field("min_p", _number),
    "min_tokens": Field("min_tokens", _integer(0, 2**31 - 1)),
    "ignore_eos": Field("ignore_eos", flag),
    "repetition_penalty": Field("repetition_penalty", _number),
    "priority": Field("priority", _int32),
    "seed": Field("seed", _seed),
}
# What chat and text completions share beside them.
COMPLETION: Mapping[str, Field] = {
    **SAMPLING,
    "stop": Field("stop_words", _texts),
    "presence_penalty": Field("presence_penalty", _number),
    "frequency_penalty": Field("frequency_penalty", _number),
    "logit_bias": Field("logit_bias", _bias),
    "cache_salt": Field("cache_salt", text),
}
# Of the inputs above those that the ensemble takes as a request's parameters, as text.
PARAMETERS = ("cache_salt",)
TOOLS: Mapping[str, Field] = {
    "tools": Field("tools", as_json),
    "tool_choice": Field("tool_choice", tool_choice),
    "parallel_tool_calls": Field("parallel_tool_calls", flag),
    "reasoning_effort": Field("reasoning_effort", text),
    "response_format": Field("response_format", as_json),
}
# What clients of vLLM send beside, known and not built, with the values that ask for nothing.
VLLM: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "prompt_logprobs": (0,),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
# They say who asks, what to remember of it, or how to bill it.
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)


def read_fields(
    body: Mapping[str, Any],
    fields: Mapping[str, Field],
    *,
    own: Collection[str],
    unbuilt: Mapping[str, tuple[Any, ...]],
) -> Inputs:
    """The inputs that `fields` make of the body, where null, or no text, is not given.

    own: fields that the caller reads. unbuilt: by name, the values that ask for nothing.
    """
    inputs: Inputs = {}
    for name, value in body.items():
        if name in own or name in HARMLESS:
            continue
        if name in fields:
            converted = None if value is None else fields[name].convert(name, value)
            if converted is not None and converted != []:
                inputs[fields[name].input] = converted
        elif name in unbuilt:
            refuse_unbuilt(name, value, unbuilt[name])
        else:
            hint = nearest(name, (*fields, *own, *unbuilt, *HARMLESS))
            raise ApiError(
                400, f"unknown field {shown(name)}{hint}", param=name, code="unknown_parameter"
            )
    return inputs


def num_choices(body: Mapping[str, Any]) -> int:
    """Of both completions."""
    return 1 if body.get("n") is None else _num_choices("n", body["n"])


def refuse_unbuilt(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value is not None and value not in neutral:
        but = f" but {shown(neutral[0])}" if neutral else ""
        raise unsupported(
            name, f"is not built in this version and takes nothing{but}, got {shown(value)}"
        )


def read_object(name: str, value: Any, known: Collection[str]) -> Mapping[str, Any]:
    """A JSON object with known keys alone; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid(name, f"must be an object, got {shown(value)}")
    for key in value:
        if key not in known:
            raise ApiError(
                400,
                f"{name} has an unknown field {shown(key)}{nearest(key, tuple(known))}",
                param=f"{name}.{key}",
                code="unknown_parameter",
            )
    return value


def includes_usage(body: Mapping[str, Any], *, stream: bool) -> bool:
    """Whether a last chunk with the usage is asked for."""
    options = read_object(
        "stream_options", body.get("stream_options"), ("include_usage", "include_obfuscation")
    )
    if options and not stream:
        raise invalid("stream_options", "can only be given with stream true")
    return flag("stream_options.include_usage", options.get("include_usage") or False)


def check(inputs: Inputs, names: Names) -> None:
    """Refuse what the ensemble's first step would."""
    parameters: dict[str, str] = {}
    tensors: Inputs = {}
    for name, value in inputs.items():
        if name in PARAMETERS and isinstance(value, bytes):
            parameters[name] = value.decode()
        else:
            tensors[name] = value
    try:
        check_stop_words(read_request(tensors, parameters).stop_words)
    except UnsupportedChat as error:
        raise names.refusal(str(error), code="unsupported_parameter") from None
    except InvalidChat as error:
        raise names.refusal(str(error)) from None


def parse_body(raw: bytes) -> dict[str, Any]:
    """A request's JSON object."""
    try:
        # Bytes would be guessed to be UTF-16, or to hold halves of characters.
        text_of_body = raw.decode("utf-8-sig")
        body = _decode(text_of_body)
        if b"\\u" in raw:
            as_json("", body)  # A half of a character could not be sent back.
    except UnicodeDecodeError as error:
        raise ApiError(
            400,
            f"the body is not JSON: it must be UTF-8, got byte 0x{raw[error.start]:02x} at "
            f"{error.start}",
            code="invalid_json",
        ) from None
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body holds half a character (a lone surrogate)", code="invalid_json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(body)}")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{shown(digits)} is larger than any number")
    return value


_decode = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).decode
