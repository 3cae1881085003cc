"""The adapter on the way in, without a server."""

import importlib
import json
from typing import Any

import pytest

from gptoss_harmony.vocabulary import STOP_TOKEN_IDS, Vocabulary


@pytest.fixture
def model(triton: Any, loaded: Vocabulary) -> Any:
    model = importlib.import_module("gptoss_harmony.preprocess_model").TritonPythonModel()
    model.initialize({"model_config": "{}"})
    return model


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_engine_gets_the_users_stop_ids_and_the_formats(
    model: Any, request_type: Any, ignore_eos: bool
) -> None:
    own = [*range(125)]
    parameters = {"stop_token_ids": own, "ignore_eos": ignore_eos}
    request = request_type(text_input="Hi", sampling_parameters=json.dumps(parameters))
    [response] = model.execute([request])
    sampling = json.loads(response.outputs["sampling"])
    assert sampling["stop_token_ids"] == [*own, *(() if ignore_eos else STOP_TOKEN_IDS)]
    assert len(sampling["stop_token_ids"]) <= 128


def test_a_guide_is_among_what_the_engine_gets(model: Any, request_type: Any) -> None:
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "yes|no"}
    requests = [
        request_type(text_input="Hi", response_format='{"type": "json_object"}'),
        request_type(text_input="Hi", **guided),
        request_type(text_input="Hi", raw_prompt=True, **guided),
        request_type(text_input="Hi", response_format='{"type": "text"}'),
    ]
    *held, free = (json.loads(each.outputs["sampling"]) for each in model.execute(requests))
    for sampling in held:
        assert sampling["guide"]["type"] == "grammars"
        assert len(json.loads(sampling["guide"]["value"])) == 2
    assert "guide" not in free


def test_a_refusal_has_its_code_and_harms_no_other(
    model: Any, request_type: Any, triton: Any
) -> None:
    requests = [
        request_type(text_input="Hi", sampling_parameters='{"best_of": 2}'),
        request_type(text_input="Hi", parameters={"temprature": 1}),
        request_type(text_input="Hi"),
    ]
    unsupported, invalid, sound = model.execute(requests)
    assert unsupported.error().code() == triton.TritonError.UNSUPPORTED
    assert invalid.error().code() == triton.TritonError.INVALID_ARG
    assert not sound.has_error()
    assert sound.arrays["input_ids"][0] == 200_006
