"""The OpenAI gateway on a real server, driven by OpenAI's own client and agents' SDK."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from gptoss_backend import gateway as gateways
from gptoss_backend.gateway import Gateway, bind, load_gateway
from gptoss_backend.installation import ServerError
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig

from .clients import Client, eventually
from .conftest import START_SECONDS
from .test_ensemble import QUESTION, WEATHER_TOOL

MODEL = "gpt-oss-demo"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
ASK: dict[str, Any] = {**GREEDY, "messages": [{"role": "user", "content": QUESTION}]}
WEATHER: Any = {"role": "user", "content": "What is the weather in Paris?"}
SUNNY = '{"temperature": 21, "sky": "sunny"}'
STRICT_TOOL: Any = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}
# The demo calls once a turn. Its grammar lets it call again, and what ends the answer is held back
# until it has said more than one call takes.
TWO_CALLS: dict[str, Any] = {
    "tool_choice": "required",
    "parallel_tool_calls": True,
    "extra_body": {"min_tokens": 50},
}
FLAT_TOOL: Any = {"type": "function", **WEATHER_TOOL["function"]}


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class Sum(BaseModel):
    sum: Annotated[int, Field(ge=0, le=99)]
    is_even: bool


def _joined_calls(choices: Sequence[Any]) -> list[dict[str, Any]]:
    """Calls of a stream, by their indices; what comes first of each has its id, type and name."""
    calls: list[dict[str, Any]] = []
    for delta in (call for each in choices for call in each.delta.tool_calls or ()):
        if delta.index == len(calls):
            calls.append(delta.model_dump(exclude={"index"}))
            continue
        assert (delta.index, delta.id, delta.type) == (len(calls) - 1, None, None)
        calls[-1]["function"]["arguments"] += delta.function.arguments
    return calls


# It never ends by itself within a test.
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 100_000,
    "messages": ASK["messages"],
    "extra_body": {"ignore_eos": True},
}
_DEADLINE_SECONDS = 3.0
_RUNNING = "vllm:num_requests_running"


@pytest.fixture(scope="module")
def gateway(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with _gateway(server, log) as running:
        running.wait_ready(60)
        yield running


def _gateway(server: TritonServer, log: Path, **settings: Any) -> Gateway:
    settings = {"url": server.ports.url("grpc"), "model_name": MODEL, **settings}
    return Gateway("openai", settings, bind("127.0.0.1", 0, "--port"), log)


@pytest.fixture
def openai_client(gateway: Gateway, client: Client) -> Iterator[OpenAI]:
    gateway.check()
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected
    gateway.check()


@pytest.mark.server
def test_what_the_prefix_cache_had_is_told(openai_client: OpenAI, client: Client) -> None:
    """In the usage, and on the metrics' page; a turn finds what the one before has computed."""
    messages: list[Any] = []
    counts: list[tuple[int, int]] = []
    queries, hits = (f"vllm:prefix_cache_{name}_total" for name in ("queries", "hits"))
    eventually(client.is_idle, 5)
    before = client.metrics()
    for turn in range(3):
        messages.append({"role": "user", "content": f"Turn {turn}: " + f"{turn} and " * 100})
        reply = openai_client.chat.completions.create(**GREEDY, messages=messages, max_tokens=2)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached_tokens = reply.usage.prompt_tokens_details.cached_tokens or 0
        counts.append((reply.usage.prompt_tokens, cached_tokens))
        messages.append({"role": "assistant", "content": "Yes."})
    page_size = EngineConfig().page_size
    for (earlier, _), (_, cached_tokens) in pairwise(counts):
        assert cached_tokens == (earlier - 1) // page_size * page_size
    salted: Any = {"extra_body": {"cache_salt": "ours"}, "max_tokens": 1}
    for cached in (0, (counts[0][0] - 1) // page_size * page_size):
        reply = openai_client.chat.completions.create(**GREEDY, **salted, messages=messages[:1])
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == cached
        counts.append((reply.usage.prompt_tokens, cached))
    expected = [sum(tokens for tokens, _ in counts), sum(cached for _, cached in counts)]

    def counted() -> list[float]:
        after = client.metrics()
        return [after[name] - before[name] for name in (queries, hits)]

    eventually(lambda: counted() == expected, 5)


@pytest.mark.server
class TestChat:
    def test_whole(self, openai_client: OpenAI) -> None:
        reply = openai_client.chat.completions.create(**ASK)
        assert reply.model == MODEL
        (choice,) = reply.choices
        assert choice.message.content == "17 + 25 = 42."
        assert "42" in getattr(choice.message, "reasoning_content", "")
        assert choice.finish_reason == "stop"
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        reasoning = reply.usage.completion_tokens_details.reasoning_tokens
        assert 0 < (reasoning or 0) < reply.usage.completion_tokens

    def test_streamed_is_the_whole(self, openai_client: OpenAI) -> None:
        whole = openai_client.chat.completions.create(**ASK)
        options: Any = {"include_usage": True}
        chunks = [
            *openai_client.chat.completions.create(**ASK, stream=True, stream_options=options)
        ]
        deltas = [each.choices[0].delta for each in chunks if each.choices]
        text = "".join(each.content or "" for each in deltas)
        reasoning = "".join(getattr(each, "reasoning_content", None) or "" for each in deltas)
        message = whole.choices[0].message
        assert (text, reasoning) == (message.content, getattr(message, "reasoning_content", ""))
        assert len(chunks) > 10
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_round_trip_of_a_tool(self, openai_client: OpenAI, stream: bool) -> None:
        shared: dict[str, Any] = {**GREEDY, "tools": [WEATHER_TOOL]}
        create: Any = openai_client.chat.completions.create
        if stream:
            with openai_client.chat.completions.stream(**shared, messages=[WEATHER]) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = create(**shared, messages=[WEATHER]).choices[0].message
        assert message.tool_calls
        (call,) = message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": SUNNY}
        told = create(**shared, messages=[WEATHER, message, result])
        assert "21" in (told.choices[0].message.content or "")
        assert told.choices[0].finish_reason == "stop"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_round_trip_of_parallel_calls(self, openai_client: OpenAI, stream: bool) -> None:
        create: Any = openai_client.chat.completions.create
        asked: dict[str, Any] = {**GREEDY, "messages": [WEATHER], **TWO_CALLS}
        asked |= {"tools": [STRICT_TOOL], "max_completion_tokens": 300}
        if stream:
            chunks = [each.choices[0] for each in create(**asked, stream=True)]
            calls = _joined_calls(chunks)
            reason = chunks[-1].finish_reason
        else:
            (choice,) = create(**asked).choices
            calls = [each.model_dump() for each in choice.message.tool_calls]
            reason = choice.finish_reason
        assert reason == "tool_calls"
        assert len(calls) == 2
        assert calls[0]["id"] != calls[1]["id"]
        for call in calls:
            assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        turn = {"role": "assistant", "tool_calls": calls}
        # In another order than they were called in, as they may come.
        results = [{"role": "tool", "tool_call_id": each["id"], "content": SUNNY} for each in calls]
        messages = [WEATHER, turn, *reversed(results)]
        told = create(**GREEDY, messages=messages, tools=[STRICT_TOOL]).choices[0]
        assert "21" in told.message.content
        assert told.finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="earlier tool call") as refusal:
            create(**GREEDY, messages=[WEATHER, results[0]], tools=[STRICT_TOOL])
        assert refusal.value.param == "messages[1].tool_call_id"

    def test_one_call_at_most_where_parallel_ones_are_not_wanted(
        self, openai_client: OpenAI
    ) -> None:
        asked: dict[str, Any] = {**GREEDY, "messages": [WEATHER], **TWO_CALLS}
        asked |= {"tools": [STRICT_TOOL], "parallel_tool_calls": False}
        (choice,) = openai_client.chat.completions.create(**asked).choices
        assert len(choice.message.tool_calls or ()) == 1

    def test_an_answer_follows_its_schema(self, openai_client: OpenAI) -> None:
        reply = openai_client.chat.completions.parse(**ASK, response_format=Sum)
        (choice,) = reply.choices
        assert choice.message.parsed is not None
        assert choice.message.parsed.is_even in (True, False)
        assert getattr(choice.message, "reasoning_content", "").startswith("17")
        assert choice.finish_reason == "stop"

    def test_an_answer_is_an_object(self, openai_client: OpenAI) -> None:
        wanted: Any = {"type": "json_object"}
        reply = openai_client.chat.completions.create(
            **ASK, response_format=wanted, max_completion_tokens=400
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        assert isinstance(json.loads(choice.message.content or ""), dict)

    def test_a_call_is_required_of_one_tool(self, openai_client: OpenAI) -> None:
        tool: Any = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            reply = openai_client.chat.completions.create(
                **ASK, tools=[tool], tool_choice=choice, parallel_tool_calls=False
            )
            assert reply.choices[0].finish_reason == "tool_calls"
            (call,) = reply.choices[0].message.tool_calls or [None]
            assert call is not None
            assert call.type == "function"
            assert call.function.name == "get_weather"
            assert list(json.loads(call.function.arguments)) == ["city"]

    def test_logprobs_are_the_contents(self, openai_client: OpenAI) -> None:
        reply = openai_client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
        (choice,) = reply.choices
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert "".join(each.token for each in entries) == choice.message.content
        assert all(len(each.top_logprobs) == 2 for each in entries)

    def test_limits_stop_words_and_seeds(self, openai_client: OpenAI) -> None:
        create = openai_client.chat.completions.create
        cut = create(**ASK, max_completion_tokens=5).choices[0]
        assert (cut.finish_reason, cut.message.content) == ("length", None)
        assert create(**ASK, stop=" = ").choices[0].message.content == "17 + 25"
        warm: dict[str, Any] = {**ASK, "temperature": 2, "max_tokens": 20, "seed": 9}
        assert create(**warm).choices[0].message == create(**warm).choices[0].message

    def test_several_choices(self, openai_client: OpenAI) -> None:
        """The first is that of one alone; the next has the next seed."""
        create = openai_client.chat.completions.create
        warm: dict[str, Any] = {**ASK, "temperature": 2, "max_tokens": 20}
        several = create(**warm, seed=9, n=2)
        for choice in several.choices:
            (alone,) = create(**warm, seed=9 + choice.index).choices
            assert choice.message == alone.message
        assert [choice.index for choice in several.choices] == [0, 1]
        assert several.usage
        assert several.usage.completion_tokens == 40

    def test_penalties_and_biases(self, openai_client: OpenAI) -> None:
        """The tokens 17 and 18 are 2 and 3."""

        def said(**fields: Any) -> str:
            prompt = "<|start|>assistant<|channel|>final<|message|>"
            limits: dict[str, Any] = {**GREEDY, "prompt": prompt, "max_tokens": 60}
            return openai_client.completions.create(**limits, **fields).choices[0].text

        biases: dict[str, Any] = {"logit_bias": {"17": 100, "18": 70}}
        assert said(**biases) == "2" * 60
        fewer = said(**biases, frequency_penalty=2.0)
        assert fewer.startswith("22")
        assert not fewer.startswith("2" * 40), "by then it has lost 80 of 100"
        assert said(**biases, extra_body={"repetition_penalty": 100})[:2] == "23"

    def test_a_client_that_leaves_frees_its_place_within_a_second(
        self, openai_client: OpenAI, client: Client
    ) -> None:
        eventually(client.is_idle, 5)
        aborted = client.metrics()["gptoss:aborted_generations_total"]
        stream = openai_client.chat.completions.create(**ENDLESS, stream=True)
        next(iter(stream))
        eventually(lambda: client.metrics()[_RUNNING] == 1, 5)
        stream.close()
        # The engine's metrics are a quarter of a second old at most.
        assert eventually(client.is_idle, 5) < 1.25
        assert client.metrics()["gptoss:aborted_generations_total"] == aborted + 1

    def test_who_leaves_before_a_whole_answer_frees_its_place(
        self, openai_client: OpenAI, client: Client
    ) -> None:
        eventually(client.is_idle, 5)

        def ask() -> None:
            with pytest.raises(openai.APITimeoutError):
                openai_client.with_options(timeout=1.5).chat.completions.create(**ENDLESS)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: client.metrics()[_RUNNING] == 1, 5)
        asking.join()
        assert eventually(client.is_idle, 5) < 1.25


@pytest.mark.server
class TestErrors:
    @pytest.mark.parametrize(
        ("fields", "error", "param", "code"),
        [
            ({"temperature": 101}, openai.BadRequestError, "temperature", "invalid_value"),
            (
                {"max_completion_tokens": 0},
                openai.BadRequestError,
                "max_completion_tokens",
                "invalid_value",
            ),
            ({"frequency_penalty": 2.5}, openai.BadRequestError, "frequency_penalty", None),
            (
                {"messages": [{"role": "user", "content": "x " * 200_000}]},
                openai.BadRequestError,
                "messages",
                "context_length_exceeded",
            ),
            ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_kinds(
        self,
        openai_client: OpenAI,
        fields: dict[str, Any],
        error: type[openai.APIStatusError],
        param: str,
        code: str | None,
        stream: bool,
    ) -> None:
        with pytest.raises(error) as refusal:
            openai_client.chat.completions.create(**{**ASK, **fields, "stream": stream})
        assert refusal.value.param == param
        assert code is None or refusal.value.code == code

    def test_a_full_engine_is_503_and_a_deadline_499(self, tmp_path: Path) -> None:
        config = EngineConfig(
            max_num_seqs=1, max_waiting_requests=0, default_timeout_seconds=_DEADLINE_SECONDS
        )
        with (
            TritonServer(config, Ports.free()) as small,
            _gateway(small, tmp_path / "log") as running,
            OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as connected,
        ):
            small.wait_ready(START_SECONDS)
            running.wait_ready(60)
            create = connected.chat.completions.create
            chunks = iter(create(**ENDLESS, stream=True))
            next(chunks)
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="try again later") as refusal:
                    create(**{**ENDLESS, "stream": stream})
                assert refusal.value.status_code == 503
                assert refusal.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.APIError, match="deadline has passed") as cut:
                for _ in chunks:
                    pass
            assert cut.value.code == "cancelled"
            with pytest.raises(openai.APIStatusError) as whole:
                create(**ENDLESS)
            assert (whole.value.status_code, whole.value.code) == (499, "cancelled")

    def test_keys(self, server: TritonServer, client: Client, tmp_path: Path) -> None:
        with _gateway(server, tmp_path / "log", api_keys=["right"]) as running:
            running.wait_ready(60)
            for key, is_known in (("right", True), ("wrong", False)):
                with OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) as connected:
                    if is_known:
                        assert connected.models.list().data[0].id == MODEL
                        continue
                    with pytest.raises(openai.AuthenticationError):
                        connected.models.list()


@pytest.mark.server
class TestResponses:
    def test_whole_and_streamed(self, openai_client: OpenAI) -> None:
        whole = openai_client.responses.create(**GREEDY, input=QUESTION)
        assert whole.output_text == "17 + 25 = 42."
        assert [each.type for each in whole.output] == ["reasoning", "message"]
        assert whole.usage is not None
        with openai_client.responses.stream(**GREEDY, input=QUESTION) as events:
            kinds = [each.type for each in events]
            streamed = events.get_final_response()
        assert streamed.output_text == whole.output_text
        assert streamed.usage == whole.usage
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        for kind in ("output_item", "content_part"):
            added, done = (kinds.count(f"response.{kind}.{each}") for each in ("added", "done"))
            assert added == done == 2
        assert "response.reasoning_text.delta" in kinds

    def test_a_response_follows_its_schema(self, openai_client: OpenAI) -> None:
        reply = openai_client.responses.parse(
            model=MODEL, temperature=0, input=QUESTION, text_format=Sum
        )
        assert reply.status == "completed"
        assert reply.output_parsed is not None

    def test_a_round_trip_of_a_tool_by_the_previous_response(self, openai_client: OpenAI) -> None:
        create = openai_client.responses.create
        asked = create(**GREEDY, input=WEATHER["content"], tools=[FLAT_TOOL])
        call = asked.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Paris"}
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": SUNNY}
        told = create(**GREEDY, input=[output], tools=[FLAT_TOOL], previous_response_id=asked.id)
        assert "21" in told.output_text
        assert openai_client.responses.retrieve(told.id).output_text == told.output_text
        openai_client.responses.delete(told.id)
        with pytest.raises(openai.NotFoundError):
            openai_client.responses.retrieve(told.id)

    def test_a_round_trip_of_a_tool_by_items(self, openai_client: OpenAI) -> None:
        create = openai_client.responses.create
        shared: dict[str, Any] = {**GREEDY, "tools": [FLAT_TOOL], "store": False}
        items: Any = [WEATHER]
        asked = create(**shared, input=items)
        items += [each.model_dump(exclude_none=True) for each in asked.output]
        call = asked.output[-1]
        assert call.type == "function_call"
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": SUNNY})
        assert "21" in create(**shared, input=items).output_text

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_round_trip_of_parallel_calls(self, openai_client: OpenAI, stream: bool) -> None:
        shared: dict[str, Any] = {**GREEDY, "tools": [{**FLAT_TOOL, "strict": True}]}
        asked: Any = {**shared, **TWO_CALLS, "input": WEATHER["content"], "max_output_tokens": 300}
        if stream:
            with openai_client.responses.stream(**asked) as events:
                told = [each.type for each in events]
                response = events.get_final_response()
            assert told.count("response.function_call_arguments.done") == 2
        else:
            response = openai_client.responses.create(**asked)
        # The demo thinks before each of them.
        kinds = [each.type for each in response.output]
        assert kinds == ["reasoning", "function_call"] * 2
        calls = [each for each in response.output if each.type == "function_call"]
        assert len({each.call_id for each in calls}) == 2
        assert [json.loads(each.arguments) for each in calls] == [{"city": "Paris"}] * 2
        outputs: Any = [
            {"type": "function_call_output", "call_id": each.call_id, "output": SUNNY}
            for each in calls
        ]
        create = openai_client.responses.create
        answer = create(**shared, input=outputs, previous_response_id=response.id)
        assert "21" in answer.output_text

    def test_what_the_limit_cuts_is_incomplete(self, openai_client: OpenAI) -> None:
        cut = openai_client.responses.create(**GREEDY, input=QUESTION, max_output_tokens=5)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.server
def test_text_completions_are_raw(openai_client: OpenAI) -> None:
    prompt = (
        f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    shared: dict[str, Any] = {**GREEDY, "prompt": prompt, "max_tokens": 20, "logprobs": 1}
    whole = openai_client.completions.create(**shared)
    chunks = [*openai_client.completions.create(**shared, stream=True)]
    text = whole.choices[0].text
    assert text
    assert "<|" not in text
    assert "".join(each.choices[0].text for each in chunks) == text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == text


@pytest.mark.server
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_asks_its_tool(gateway: Gateway, client: Client, api: str, stream: bool) -> None:
    """The agents' SDK runs the whole loop: a call, its result, the answer."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    cities: list[str] = []

    @function_tool(name_override="get_weather")
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        cities.append(city)
        return SUNNY

    async def run() -> Any:
        connected = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
        agent = Agent(
            name="Weather",
            model=kind(MODEL, connected),
            tools=[get_weather],
            model_settings=ModelSettings(temperature=0),
        )
        async with connected:
            if not stream:
                return await Runner.run(agent, WEATHER["content"], max_turns=3)
            streamed = Runner.run_streamed(agent, WEATHER["content"], max_turns=3)
            async for _ in streamed.stream_events():
                pass
            return streamed

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's own
        done = asyncio.run(run())
    assert cities == ["Paris"]
    assert "21" in done.final_output
    assert "sunny" in done.final_output


@pytest.mark.server
def test_a_gateway_that_dies_is_started_again(
    server: TritonServer, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _gateway(server, tmp_path / "log") as running:
        running.wait_ready(60)
        with pytest.raises(
            ServerError, match=r"ended by itself .* after its start \(signal 9; log"
        ):
            _kill(running)
        monkeypatch.setattr(gateways, "_YOUNG_SECONDS", 0.0)
        running.start()
        running.wait_ready(60)
        before = running.pid
        _kill(running)
        assert running.pid != before
        running.wait_ready(60)
        with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as connected:
            assert connected.chat.completions.create(**ASK).choices[0].finish_reason == "stop"


def _kill(running: Gateway) -> None:
    os.kill(running.pid, signal.SIGKILL)
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    running.check()


@pytest.mark.server
def test_a_gateway_dies_with_its_parent(
    server: TritonServer, client: Client, tmp_path: Path
) -> None:
    program = f"""
import sys
from pathlib import Path
from gptoss_backend.gateway import Gateway, bind
settings = {{"url": {server.ports.url("grpc")!r}}}
log = Path({str(tmp_path / "log")!r})
gateway = Gateway("openai", settings, bind("127.0.0.1", 0, "--port"), log)
gateway.start()
gateway.wait_ready(60)
print(gateway.url, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        host, port = parent.stdout.readline().strip().removeprefix("http://").split(":")
        parent.kill()
    eventually(lambda: not _accepts(host, int(port)), 10)


def _accepts(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@pytest.mark.server
def test_serve_starts_it_and_drains_both(tmp_path: Path) -> None:
    ports = Ports.free()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    command = [
        *(sys.executable, "-c", "from gptoss_backend.cli import main; main()", "serve"),
        *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc)),
        *("--metrics-port", str(ports.metrics), "--openai-port", str(port)),
        *("--openai-key-file", str(keys), "--log-file", str(tmp_path / "log")),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serve:
        try:
            assert serve.stdout is not None
            ready = serve.stdout.readline()
            assert f"OpenAI http://127.0.0.1:{port}/v1" in ready
            url = f"http://127.0.0.1:{port}/v1"
            with OpenAI(base_url=url, api_key="right", max_retries=0) as connected:
                limits: Any = {**ENDLESS, "max_tokens": 150}
                stream = connected.chat.completions.create(**limits, stream=True)
                chunks = iter(stream)
                next(chunks)
                serve.send_signal(signal.SIGTERM)
                assert [*chunks][-1].choices[0].finish_reason == "length"
            assert serve.wait(30) == 0
        finally:
            serve.kill()
    assert not _accepts("127.0.0.1", port)


def test_a_port_in_use_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ServerError, match=f"cannot use port {port} on 127.0.0.1 .* --openai-port"
        ):
            bind("127.0.0.1", port, "--openai-port")


def test_a_gateway_that_is_not_installed_is_a_sentence() -> None:
    with pytest.raises(ServerError, match="no gateway 'other' is installed; known: openai"):
        load_gateway("other")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"modelname": "x"}, "unknown key 'modelname'; did you mean 'model_name'?"),
        ({"model_name": ""}, "model_name must not be empty"),
        ({"max_body_bytes": 0}, "max_body_bytes must be at least 1, got 0"),
        ({"api_keys": [""]}, "api_keys must not hold an empty text"),
        *(
            (
                {"url": url},
                "url must be host:port of the server's gRPC, an IPv6 address in brackets, got "
                f"{url!r}",
            )
            for url in ("http://gpu1:8001", "::1:8001", "gpu1", ":8001", "")
        ),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"must|unknown") as refusal:
        load_gateway("openai").check(settings)
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("url", ["gpu1:8001", "[::1]:8001", "dns:///gpu1:8001", "10.0.0.1:8001"])
def test_urls_of_ensembles(url: str) -> None:
    load_gateway("openai").check({"url": url})


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    ports = Ports(host="::1")
    assert [ports.url("grpc"), ports.address("grpc")] == ["[::1]:8001", "[::1]"]
    assert [ports.url("http"), ports.address("http")] == ["[::1]:8000", "ipv6:::1"]
    assert Ports(host="::").url("grpc") == "[::1]:8001"
    assert Ports(host="0.0.0.0").url("grpc") == "127.0.0.1:8001"
    assert Ports(host="0.0.0.0").address("http") == "0.0.0.0"


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
def test_ports_of_ipv6_are_checked() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot use http port {port} on ::1"):
            Ports(http=port, host="::1").check_free()
        with pytest.raises(ServerError, match=f"cannot use port {port} on ::1"):
            bind("::1", port, "--port")


@pytest.mark.server
@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
def test_serve_on_ipv6(tmp_path: Path) -> None:
    ports = Ports.free()
    with bind("::1", 0, "--openai-port") as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-c", "from gptoss_backend.cli import main; main()", "serve"),
        *("--http-port", str(ports.http), "--grpc-port", str(ports.grpc), "--host", "::1"),
        *("--metrics-port", str(ports.metrics), "--openai-port", str(port)),
        *("--log-file", str(tmp_path / "log")),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as serve:
        try:
            assert serve.stdout is not None
            url = f"http://[::1]:{port}/v1"
            ready = serve.stdout.readline()
            assert f"gRPC [::1]:{ports.grpc}, " in ready
            assert f"OpenAI {url}, " in ready
            with OpenAI(base_url=url, api_key="none", max_retries=0) as connected:
                reply = connected.chat.completions.create(**ASK)
            assert reply.choices[0].message.content == "17 + 25 = 42."
            serve.send_signal(signal.SIGTERM)
            assert serve.wait(30) == 0
        finally:
            serve.kill()


def test_a_gateway_alone_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """Before a server that is not there: it says so, and goes on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-c", "from gptoss_backend.cli import main; main()", "gateway"),
        *("--url", "127.0.0.1:9", "--port", str(port), "--model-name", "mine"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as alone:
        try:
            assert alone.stdout is not None
            assert f"http://127.0.0.1:{port}/v1" in alone.stdout.readline()
            for path, status, said in (
                ("/health", 503, "the model at 127.0.0.1:9 is not ready"),
                ("/v1/models", 200, '"mine"'),
            ):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                connection.request("GET", path)
                response = connection.getresponse()
                assert response.status == status
                assert said in response.read().decode()
                connection.request("GET", path, headers={"Host": "evil.example"})
                assert connection.getresponse().status == 403
                connection.close()
            alone.send_signal(signal.SIGTERM)
            assert alone.wait(20) == 0
            assert alone.stderr is not None
            assert "Traceback" not in alone.stderr.read()
        finally:
            alone.kill()
