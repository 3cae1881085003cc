"""`gptoss generate`: the engine alone in this process, no server."""

import json
import queue
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console

from gptoss_backend.cli.errors import CommandFailed
from gptoss_backend.cli.formats import load_format
from gptoss_backend.cli.options import with_engine_config
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.types import GenerationRequest, InvalidRequest, SamplingParams, TokenChunk


@with_engine_config
def generate(
    prompt: Annotated[
        str, typer.Argument(help="A message; Harmony text with --raw; ids with --token-ids.")
    ],
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="The prompt is Harmony text as it is.")
    ] = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Token ids in and out: a JSON list. No format.")
    ] = False,
    format_name: Annotated[str, typer.Option("--format", help="The chat format.")] = "harmony",
    effort: Annotated[str, typer.Option(metavar="low|medium|high")] = "medium",
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(show_default=False)] = None,
    min_tokens: Annotated[int, typer.Option()] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    config: EngineConfig,
) -> None:
    """Generate one answer with the engine alone, streaming; reasoning goes to stderr."""
    if raw and token_ids:
        raise InvalidConfig("--raw and --token-ids exclude each other: text or token ids")
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
    }
    SamplingParams.from_mapping(sampling)
    if token_ids:
        _generate_token_ids(_parse_token_ids(prompt), sampling, config)
    else:
        _generate_text(prompt, raw, load_format(format_name, config), effort, sampling, config)


def _generate_token_ids(
    token_ids: tuple[int, ...], sampling: dict[str, Any], config: EngineConfig
) -> None:
    answer: list[int] = []
    for chunk in _chunks(token_ids, sampling, config):
        answer += chunk.token_ids
    typer.echo(json.dumps(answer))


def _generate_text(
    text: str,
    raw: bool,
    chat_format: Any,
    effort: str,
    sampling: dict[str, Any],
    config: EngineConfig,
) -> None:
    try:
        chat = None if raw else chat_format.parse_text(text, reasoning_effort=effort)
        prompt = chat_format.render_raw(text) if raw else chat_format.render_chat(chat)
    except ValueError as error:
        # Formats refuse a chat with ValueErrors of their own.
        raise InvalidRequest(str(error)) from error
    if not sampling["ignore_eos"]:
        sampling = {**sampling, "stop_token_ids": prompt.stop_token_ids}
    stream = chat_format.stream(chat_format.stream_context(prompt, chat))
    out = Console(highlight=False, soft_wrap=True)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    for chunk in _chunks(prompt.token_ids, sampling, config):
        for delta in stream.push(chunk.token_ids, chunk.finish_reason):
            if delta.channel == "reasoning":
                aside.print(delta.text, style="dim", end="", markup=False)
            else:
                out.print(delta.text, end="", markup=False)
        out.file.flush()
    out.print()


def _chunks(
    token_ids: tuple[int, ...], sampling: dict[str, Any], config: EngineConfig
) -> Iterator[TokenChunk]:
    """The answer as it comes. CommandFailed when the engine fails or the deadline passes."""
    from gptoss_engine.engine import load_engine_loop

    console = Console(stderr=True)
    with console.status(f"loading {config.random_weights or config.model}"):
        engine = load_engine_loop(config)
    chunks: queue.SimpleQueue[TokenChunk] = queue.SimpleQueue()
    started, num_tokens = time.monotonic(), 0
    try:
        engine.submit(
            GenerationRequest(uuid.uuid4().hex, token_ids, SamplingParams.from_mapping(sampling)),
            chunks.put,
        )
        finish_reason = None
        while finish_reason is None:
            chunk = chunks.get()
            finish_reason = chunk.finish_reason
            num_tokens += len(chunk.token_ids)
            yield chunk
            if chunk.error:
                raise CommandFailed(chunk.error)
    finally:
        engine.stop()
    seconds = time.monotonic() - started
    console.print(
        f"\n{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} a second; "
        f"ended by {finish_reason}",
        style="dim",
    )


def _parse_token_ids(text: str) -> tuple[int, ...]:
    try:
        token_ids = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"token ids must be a JSON list: {error}") from error
    if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
        raise InvalidRequest(f"token ids must be a JSON list of integers, got {text[:60]}")
    return tuple(token_ids)
