"""Every failure as OpenAI's clients know it: a status, and message, type, param and code as JSON.

The ensemble's codes are INVALID_ARG, UNSUPPORTED (both 400), UNAVAILABLE (503, with Retry-After),
CANCELLED (499) and INTERNAL (500). A gRPC stream brings its sentences without them (the header
that would ask for codes makes tritonserver 2.51 crash), so sentences are told apart here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

RETRY_SECONDS = 1

_CODES = {
    400: "invalid_value",
    408: "timeout",
    499: "cancelled",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
_ENSEMBLE = re.compile(r"^in ensemble '[^']*', ")
_NAME = re.compile(r"[a-z_]+")
_MESSAGE = re.compile(r"messages\[(\d+)\]")
# How the engine, and tritonserver itself, say that the same request may succeed later.
_UNAVAILABLE = re.compile(
    r": try again later$|^the engine (is draining|is stopped|failed|loop failed)"
    r"|^Request for unknown model|is not ready|^Server is stopping"
)
_TOO_LONG = re.compile(
    r"^the prompt \(input_ids\) must hold at most (\d+) tokens, .* got (\d+)$", re.DOTALL
)
# How a sentence begins that refuses a field: with the name of the ensemble's input.
_REFUSED = re.compile(
    r"^(messages|text_input|raw_prompt|tools|tool_choice|parallel_tool_calls|response_format"
    r"|reasoning_effort|stop_words|max_tokens|min_tokens|temperature|top_[pk]|min_p|seed|n"
    r"|ignore_eos|return_logprobs|top_logprobs|logit_bias|priority|stop_token_ids"
    r"|(repetition|presence|frequency)_penalty|exclude_input_in_output)[\[. ]"
)
_UNBUILT = re.compile(r"\bis not (built|supported)\b")
# The grammar of a whole answer.
_NO_GUIDE = re.compile(r"^guide (cannot be (compiled|given here)\b.*)", re.DOTALL)
_UNKNOWN = (
    re.compile(r"^(?P<path>\S+) has an unknown field \"(?P<name>[^\"]*)\""),
    re.compile(r"^unknown field \"(?P<name>[^\"]*)\" in (?P<path>[^\s;]+)"),
)


class ApiError(Exception):
    """status: HTTP's. param: the field of the client's request that it is about."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _CODES.get(status)

    @property
    def headers(self) -> dict[str, str]:
        match self.status:
            case 401:
                return {"www-authenticate": "Bearer"}
            case 408 | 413:  # There may be more of the body to come.
                return {"connection": "close"}
            case 503:
                return {"retry-after": str(RETRY_SECONDS)}
        return {}

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 499 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(param: str, rest: str) -> ApiError:
    """`rest` continues the field's name: "must be …, got …"."""
    return ApiError(400, f"{param} {rest}", param=param)


def unsupported(param: str, rest: str) -> ApiError:
    return ApiError(400, f"{param} {rest}", param=param, code="unsupported_parameter")


class Names:
    """What a client calls the ensemble's inputs, so that a refusal names what it sent.

    prompt: its field that holds the prompt. fields: its names by the ensemble's, where they
    differ. messages: where each of the chat's messages came from, by the path in the message, of
    which "" is all of it: {"": "input[2]", ".content": "input[2].output"}. guided: its field that
    most of the answer's grammar is of.
    """

    def __init__(
        self,
        prompt: str,
        fields: Mapping[str, str] | None = None,
        messages: Sequence[Mapping[str, str]] = (),
        guided: str = "tools",
    ) -> None:
        self.prompt = prompt
        self.guided = guided
        self._fields = fields or {}
        self._messages = messages

    def refusal(self, sentence: str, *, code: str | None = None) -> ApiError:
        """400 with a sentence that has an input's name, or a path into it, most often first."""
        for pattern in _UNKNOWN:
            if unknown := pattern.match(sentence):
                path = self._renamed(unknown["path"])
                sentence = sentence.replace(unknown["path"], path, 1)
                param = f"{path}.{unknown['name']}"
                return ApiError(400, sentence, param=param, code="unknown_parameter")
        if not _REFUSED.match(sentence):
            return ApiError(400, sentence, code=code)
        path, _, rest = sentence.partition(" ")
        if path == "min_tokens":
            rest = rest.replace("max_tokens", self._renamed("max_tokens"))
        param = self._renamed(path)
        return ApiError(400, f"{param} {rest}", param=param, code=code)

    def too_long(self, most: int, number: int) -> ApiError:
        """In the words by which clients know that a chat must be made shorter."""
        return ApiError(
            400,
            f"the maximum context length is {most + 1} tokens: {self.prompt} must hold at most "
            f"{most}, so that one is left to generate, got {number}",
            param=self.prompt,
            code="context_length_exceeded",
        )

    def _renamed(self, path: str) -> str:
        if self._messages and (place := _MESSAGE.match(path)):
            return _moved(path[place.end() :], self._messages[int(place[1])])
        name = _NAME.match(path)
        assert name is not None
        path = self._fields.get(name[0], name[0]) + path[name.end() :]
        if self.prompt != "input":
            return path
        # The Responses API has a tool's function in the tool itself, and so a format's schema.
        return path.replace("].function", "]", 1).replace("text.format.json_schema", "text.format")


def _moved(path: str, places: Mapping[str, str]) -> str:
    """A path in a message to where it came from: by the longest that is known of it."""
    known = path
    while known not in places:
        known = known[: max(known.rfind("."), known.rfind("["))]
    return places[known] + path[len(known) :]


def from_sentence(text: str, names: Names) -> ApiError:
    """What the ensemble refused or failed with, by its sentence alone."""
    sentence = _ENSEMBLE.sub("", text)
    if _UNAVAILABLE.search(sentence):
        return ApiError(503, sentence)
    if too_long := _TOO_LONG.match(sentence):
        return names.too_long(int(too_long[1]), int(too_long[2]))
    if _REFUSED.match(sentence):
        code = "unsupported_parameter" if _UNBUILT.search(sentence) else None
        return names.refusal(sentence, code=code)
    if no_guide := _NO_GUIDE.match(sentence):
        code = "unsupported_parameter" if no_guide[2] == "given here" else None
        return ApiError(400, f"{names.guided} {no_guide[1]}", param=names.guided, code=code)
    return ApiError(500, sentence)
