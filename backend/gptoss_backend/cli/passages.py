"""What `gptoss evaluate` lets the models read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptoss_backend.cli.formats import load_format
from gptoss_backend.cli.provenance import model_name
from gptoss_engine import demo
from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.types import InvalidRequest, shown

if TYPE_CHECKING:
    from gptoss_engine.fidelity.passages import Passage
    from gptoss_engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class PassageOptions:
    """At most one of text, tokens and random_tokens is given; without one, the demo's own chats."""

    text: Path | None
    tokens: Path | None
    random_tokens: int | None
    seed: int
    max_tokens: int
    format_name: str

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.text, self.tokens, self.random_tokens)) > 1:
            raise InvalidConfig("text, tokens and random_tokens exclude each other: name one")

    def passages(self, config: EngineConfig, model: "ModelConfig") -> "list[Passage]":
        """Raises InvalidRequest where the model cannot read them."""
        from gptoss_engine.fidelity.passages import Passage, cut, random_passage

        if self.text is not None:
            chat_format = load_format(self.format_name, config)
            passages = [Passage(_encode(self.text, chat_format))]
        elif self.tokens is not None:
            passages = [Passage(token_ids) for token_ids in read_tokens(self.tokens)]
        elif self.random_tokens is not None:
            count = min(self.random_tokens, self.max_tokens)
            passages = [random_passage(model.vocab_size, count, self.seed)]
        elif config.model == "demo" and not config.random_weights:
            chats = demo.held_out_chats()
            passages = [Passage(chat.prompt + chat.reply, len(chat.prompt)) for chat in chats]
        else:
            raise InvalidConfig(
                "only the demo has chats of its own to be judged on: for "
                f"{model_name(config)} give --text FILE or --tokens FILE, or --random-tokens N "
                "for random weights"
            )
        passages = cut(passages, self.max_tokens)
        _check(passages, model)
        return passages


def _check(passages: "Sequence[Passage]", model: "ModelConfig") -> None:
    last = model.vocab_size - 1
    for index, passage in enumerate(passages):
        length = len(passage.token_ids)
        if length > model.max_model_len:
            raise InvalidRequest(
                f"a passage must hold at most {model.max_model_len} tokens, as the checkpoint's "
                f"context, got {length} in passage {index}: lower --max-tokens"
            )
        for at, token_id in enumerate(passage.token_ids):
            if not 0 <= token_id <= last:
                raise InvalidRequest(
                    f"token ids must be in [0, {last}], the checkpoint's vocabulary, got "
                    f"{token_id} at index {at} of passage {index}"
                )


def _encode(path: Path, chat_format: Any) -> tuple[int, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot read text from {path}: {error}") from error
    try:
        token_ids = chat_format.render_raw(text).token_ids
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    if len(token_ids) < 2:
        raise InvalidRequest(f"text must hold at least 2 tokens, {path} holds {len(token_ids)}")
    return token_ids


def read_tokens(path: Path) -> list[tuple[int, ...]]:
    """One list of ids, or several."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidConfig(f"cannot read tokens from {path}: {error}") from error
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"tokens must be a list of ids or of such lists, {path} holds none")
    lists = content if any(isinstance(each, list) for each in content) else [content]
    for index, token_ids in enumerate(lists):
        if not isinstance(token_ids, list) or len(token_ids) < 2:
            raise InvalidRequest(
                f"tokens must be lists of at least 2 ids, got {shown(token_ids)} as passage {index}"
            )
        for at, token_id in enumerate(token_ids):
            if type(token_id) is not int:
                raise InvalidRequest(
                    f"token ids must be integers, got {shown(token_id)} at index {at} of passage "
                    f"{index}"
                )
    return [tuple(token_ids) for token_ids in lists]
