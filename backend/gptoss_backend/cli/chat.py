"""`gptoss chat`: an interactive chat in the terminal, or one answer to a prompt."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.options import with_engine_config
from gptoss_backend.server import Ports, TritonServer
from gptoss_engine.config import EngineConfig, InvalidConfig

_EFFORTS = ("low", "medium", "high")
_HELP = "/reset forgets the chat, /effort low|medium|high, /quit ends; Ctrl-C stops an answer"


@with_engine_config
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this one message and exit.", show_default=False)
    ] = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(
            help="gRPC host:port of a running server; without it one is started.",
            show_default=False,
        ),
    ] = None,
    effort: Annotated[str, typer.Option(metavar="|".join(_EFFORTS))] = "medium",
    tools: Annotated[
        Path | None,
        typer.Option(help="A JSON file with OpenAI function tools to offer.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=2**31 - 1, help="Limit of one answer.", show_default=False),
    ] = None,
    temperature: Annotated[float | None, typer.Option(show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, show_default=False)] = None,
    start_seconds: Annotated[
        float, typer.Option(min=1, help="How long the server may take to be ready.")
    ] = 600.0,
    config: EngineConfig,
) -> None:
    """Chat with the model: reasoning dimmed, the answer plain, tool calls shown."""
    if effort not in _EFFORTS:
        raise InvalidConfig(f"effort must be one of {', '.join(_EFFORTS)}, got {effort!r}")
    if url and config != EngineConfig():
        raise InvalidConfig("--url names a running server, which has its own configuration")
    signal.signal(signal.SIGTERM, _leave)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if tools is not None:
        fields["tools"] = _read_tools(tools)
    given = {name: value for name, value in fields.items() if value is not None}
    with _server(url, config, start_seconds) as address:
        conversation = _Conversation(address, effort, given)
        if prompt is None:
            conversation.talk()
        else:
            conversation.answer(prompt)


def _leave(signal_number: int, _frame: object) -> None:
    """An exception, so that the server of our own is stopped on the way out."""
    sys.exit(128 + signal_number)


@contextmanager
def _server(url: str | None, config: EngineConfig, start_seconds: float) -> Iterator[str]:
    if url:
        yield url
        return
    with TritonServer(config, Ports.free()) as server:
        with Console(stderr=True).status("starting tritonserver") as status:
            server.wait_ready(
                start_seconds,
                lambda seconds: status.update(f"starting tritonserver, {seconds:.0f} s"),
            )
        yield server.ports.url("grpc")


def _read_tools(path: Path) -> str:
    try:
        return json.dumps(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read tools from {path}: {error}") from error


@dataclass(slots=True)
class _Answer:
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""

    def as_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class _Conversation:
    """What was said, and how it is shown. Off a terminal, stdout gets the answer alone."""

    def __init__(self, address: str, effort: str, fields: dict[str, Any]) -> None:
        self._address = address
        self._effort = effort
        self._fields = fields
        self._messages: list[dict[str, Any]] = []
        self._out = Console(highlight=False, soft_wrap=True)
        self._aside = (
            self._out
            if self._out.is_terminal
            else Console(stderr=True, highlight=False, soft_wrap=True)
        )

    def talk(self) -> None:
        self._aside.print(_HELP, style="dim")
        while True:
            try:
                line = self._read("> ")
            except (EOFError, KeyboardInterrupt):
                self._aside.print()
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._say(line)

    def answer(self, prompt: str) -> None:
        answer = _Answer()
        self._messages.append({"role": "user", "content": prompt})
        self._stream(answer)
        if answer.finish_reason not in ("stop", "length", "tool_calls"):
            raise CommandFailed(f"the answer is not whole: it ended by {answer.finish_reason}")

    def _read(self, mark: str) -> str:
        if self._out.is_terminal:
            import readline  # noqa: F401  (gives input() its line editing)

            return input(mark).strip()
        return input().strip()

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._messages.clear()
            self._aside.print("forgotten", style="dim")
        elif word == "/effort" and rest.strip() in _EFFORTS:
            self._effort = rest.strip()
            self._aside.print(f"reasoning effort {self._effort}", style="dim")
        else:
            self._aside.print(_HELP, style="dim")

    def _say(self, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        kept = len(self._messages) - 1
        try:
            while self._turn():
                pass
        except CommandFailed as error:
            if not sys.stdin.isatty():
                raise  # the lines of a script belong together
            self._aside.print(str(error), style="red", markup=False)
            del self._messages[kept:]
        except (KeyboardInterrupt, EOFError):
            self._aside.print("\n(stopped)", style="dim")
            del self._messages[kept:]

    def _turn(self) -> bool:
        """One answer; whether the model called tools and now waits to hear their results."""
        answer = _Answer()
        self._stream(answer)
        self._messages.append(answer.as_message())
        for call in answer.tool_calls:
            result = self._read(f"result of {call['function']['name']}: ")
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return bool(answer.tool_calls)

    def _stream(self, answer: _Answer) -> None:
        """Fill `answer` while showing it as it comes."""
        from gptoss_backend.client import ChatClient, RequestFailed

        request = {
            "messages": json.dumps(self._messages),
            "reasoning_effort": self._effort,
            **self._fields,
        }
        try:
            with (
                ChatClient(self._address) as client,
                closing(client.ask(**request)) as responses,
            ):
                for response in responses:
                    self._show(answer, response)
        except RequestFailed as error:
            raise CommandFailed(f"no answer: {error}") from error
        finally:
            if answer.text or answer.reasoning or answer.tool_calls:
                self._out.print()
        if answer.finish_reason not in ("stop", "tool_calls"):
            self._aside.print(f"(ended early: {answer.finish_reason})", style="dim")

    def _show(self, answer: _Answer, response: Any) -> None:
        if response.reasoning:
            self._aside.print(response.reasoning, style="dim", end="", markup=False)
        if response.text:
            if answer.reasoning and not answer.text:
                self._aside.print()
            self._out.print(response.text, end="", markup=False)
        for delta in response.tool_calls:
            if delta.index == len(answer.tool_calls):
                function = {"name": delta.name, "arguments": ""}
                answer.tool_calls.append(
                    {"id": delta.call_id, "type": "function", "function": function}
                )
                self._out.print(f"\n{delta.name} ", style="cyan", end="", markup=False)
            answer.tool_calls[delta.index]["function"]["arguments"] += delta.arguments
            self._out.print(delta.arguments, style="cyan", end="", markup=False)
        answer.text += response.text
        answer.reasoning += response.reasoning
        answer.finish_reason = response.finish_reason or answer.finish_reason
        self._out.file.flush()
        sys.stderr.flush()
