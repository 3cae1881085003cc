"""One answer on its way out: the engine's responses in, the ensemble's outputs out.

Streaming gives a reply whenever there is something to show; else everything is kept for the one
reply at the end. Either way the joined replies are the same.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gptoss_harmony.format import ChatFormat
from gptoss_harmony.types import ChatDelta, FinishReason
from gptoss_harmony.vocabulary import FIRST_CONTROL


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What the way out needs from the way in: it travels through the engine as opaque JSON.

    format: what the format's `stream` needs. echo: text that stands before the answer's.
    return_logprobs: whether the client asked for more than their sum.
    """

    format: Mapping[str, Any]
    stream: bool = False
    echo: str = ""
    return_logprobs: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "AnswerContext":
        return cls(**json.loads(text))


TokenLogprob = tuple[float, Sequence[tuple[int, float]]]
"""A token's logprob, and the likeliest tokens with theirs."""


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """The engine's outputs, parsed. logprobs: (logprob, top) a token, or empty."""

    generation_id: str
    sequence_number: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class Reply:
    """The ensemble's outputs of one response; counts and texts are those of this response."""

    text_output: str = ""
    reasoning_output: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_worth_sending(self) -> bool:
        return bool(
            self.text_output
            or self.reasoning_output
            or self.tool_calls
            or self.logprobs
            or self.finish_reason
        )


class Answer:
    """The state of one generation after the engine.

    finish_reason is set once the last reply was given. If the engine had not ended by then (a stop
    word), its generation is to be aborted: nothing that follows is shown.
    """

    def __init__(self, context: AnswerContext, chat_format: ChatFormat) -> None:
        self._context = context
        self._token_bytes = chat_format.vocabulary.token_bytes
        self.stream = chat_format.stream(context.format)
        self._reply = Reply(text_output=context.echo)
        self._cumulative_logprob = 0.0
        self._num_taken = 0
        self._undecided: deque[tuple[int, int, TokenLogprob]] = deque()
        """Of the tokens that may yet become content: number, id, logprobs."""
        self._num_calls = 0
        self._num_reasoning_tokens = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.stream.finish_reason

    def push(self, response: EngineResponse, *, is_due: bool = False) -> Reply | None:
        """What to send now, if anything. After the last reply always None.

        is_due: a stream has been silent for so long that even an empty reply should go out.
        """
        if self.finish_reason is not None:
            return None
        reply = self._reply
        for delta in self.stream.push(response.token_ids, response.finish_reason):
            self._add(reply, delta)
        self._add_logprobs(reply, response)
        reply.num_output_tokens += self.stream.num_taken
        num_reasoning_tokens = self.stream.num_tokens["reasoning"]
        reply.num_reasoning_tokens += num_reasoning_tokens - self._num_reasoning_tokens
        self._num_reasoning_tokens = num_reasoning_tokens
        if self.finish_reason is not None:
            reply.finish_reason = self.finish_reason
            reply.num_input_tokens = response.num_prompt_tokens
            reply.num_cached_tokens = response.num_cached_tokens
        elif not self._context.stream or not (reply.is_worth_sending or is_due):
            return None
        self._reply = Reply()
        return reply

    def _add(self, reply: Reply, delta: ChatDelta) -> None:
        if delta.channel != "tool_call" and delta.text:
            _place_calls(reply)
        if delta.channel == "reasoning":
            reply.reasoning_output += delta.text
        elif delta.channel == "content":
            reply.text_output += delta.text
        else:
            self._add_tool_call(reply.tool_calls, delta)

    def _add_tool_call(self, calls: list[dict[str, Any]], delta: ChatDelta) -> None:
        """OpenAI's shape: id, type and name on a call's first piece alone."""
        index = delta.tool_call_index
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += delta.text
        elif index < self._num_calls:
            calls.append({"index": index, "function": {"arguments": delta.text}})
        else:
            self._num_calls += 1
            function = {"name": delta.recipient, "arguments": delta.text}
            call = {"index": index, "id": delta.tool_call_id, "type": "function"}
            calls.append({**call, "function": function})

    def _add_logprobs(self, reply: Reply, response: EngineResponse) -> None:
        """Entries come with the text of their tokens, however late that is."""
        logprobs = response.logprobs[: self.stream.num_taken]
        self._cumulative_logprob += sum(logprob for logprob, _ in logprobs)
        reply.cumulative_logprob = self._cumulative_logprob
        if not self._context.return_logprobs:
            return
        for place, logprob in enumerate(logprobs):
            self._undecided.append((self._num_taken + place, response.token_ids[place], logprob))
        self._num_taken += self.stream.num_taken
        content = set(self.stream.content_tokens)
        end = max(self.stream.first_undecided, max(content, default=-1) + 1)
        while self._undecided and self._undecided[0][0] < end:
            number, token_id, (logprob, top) = self._undecided.popleft()
            if number in content:
                entry = self._logprob(token_id, logprob)
                entry["top_logprobs"] = [self._logprob(each, value) for each, value in top]
                reply.logprobs.append(entry)

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        """As OpenAI's: `bytes` are exact where a token is a part of a character.

        A control token, which may be among the likeliest, has neither text nor bytes.
        """
        if token_id >= FIRST_CONTROL:
            return {"token": "", "logprob": logprob, "bytes": None}
        text = self._token_bytes[token_id]
        return {
            "token": text.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(text),
        }


def _place_calls(reply: Reply) -> None:
    """Where calls stand among a reply's texts, which follow them from now on."""
    for call in reply.tool_calls:
        if "id" in call:
            call.setdefault("after", [len(reply.reasoning_output), len(reply.text_output)])
