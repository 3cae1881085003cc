"""The Triton model `harmony_preprocess`: a chat's tensors in, the engine's prompt out."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # pyright: ignore[reportMissingImports]

from gptoss_harmony.answer import AnswerContext
from gptoss_harmony.format import ChatFormat, load_format
from gptoss_harmony.request import EnsembleRequest, read_request
from gptoss_harmony.types import InvalidChat, UnsupportedChat

logger = logging.getLogger(__name__)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._format = configured_format(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            inputs = {tensor.name(): _value(tensor) for tensor in request.inputs()}
            parameters = json.loads(request.parameters() or "{}")
            return pb_utils.InferenceResponse(
                self._prompt(read_request(inputs, parameters, self._format))
            )
        except UnsupportedChat as error:
            return _refusal(error, pb_utils.TritonError.UNSUPPORTED)
        except InvalidChat as error:
            return _refusal(error, pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            logger.exception("a request could not be rendered")
            return _refusal(error, pb_utils.TritonError.INTERNAL)

    def _prompt(self, request: EnsembleRequest) -> list[Any]:
        if request.chat is not None:
            prompt = self._format.render_chat(request.chat)
        else:
            assert request.raw_prompt is not None
            prompt = self._format.render_raw(request.raw_prompt)
        sampling = dict(request.sampling)
        if not sampling.get("ignore_eos"):
            own = sampling.get("stop_token_ids", [])
            sampling["stop_token_ids"] = [*own, *prompt.stop_token_ids]
        guide = self._format.guide(prompt, request.chat, request.text_format)
        if guide is not None:
            sampling["guide"] = guide
        context = AnswerContext(
            format=self._format.stream_context(prompt, request.chat, request.stop_words),
            stream=request.stream,
            echo=request.echo,
            return_logprobs=request.return_logprobs,
        )
        return [
            pb_utils.Tensor("input_ids", np.array(prompt.token_ids, dtype=np.int32)),
            _bytes("sampling", json.dumps(sampling)),
            _bytes("context", context.to_json()),
        ]


def configured_format(args: dict[str, str]) -> ChatFormat:
    """The format that the parameter `format` names, with the vocabulary of the parameter `model`:
    that checkpoint's tokenizer.json has it."""
    values = {
        name: value["string_value"]
        for name, value in json.loads(args["model_config"]).get("parameters", {}).items()
    }
    model = values.get("model", "demo")
    return load_format(values.get("format", "harmony"), None if model == "demo" else Path(model))


def _value(tensor: Any) -> Any:
    """A tensor of shape [1] as its element, `stop_words` as a list; FP32 0.7 is 0.7 again."""
    array = tensor.as_numpy()
    if tensor.name() == "stop_words":
        return array.reshape(-1).tolist()
    element = array.reshape(-1)[0]
    if array.dtype == np.float32:
        return float(str(element))
    return element if isinstance(element, bytes) else element.item()


def _bytes(name: str, value: str) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode("utf-8")], dtype=np.object_))


def _refusal(error: Exception, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
