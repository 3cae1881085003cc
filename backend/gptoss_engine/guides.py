"""Which tokens an answer may be made of: grammars compiled by llguidance, over the vocabulary.

A request's `Guide` is compiled before it is admitted, so that a bad one is the caller's fault and
refused in words. From then on its `Matcher` stands where the answer stands, whatever becomes of the
sequence's pages: it is told each token once, and says by a mask which ones may come next.

The vocabulary is found by its entry point (group `gptoss.vocabularies`): what the tokens spell is
known to whoever made the prompt. It is loaded once, by `begin` beside a server's start, or else at
the first guide.
"""

import importlib.metadata
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from gptoss_engine.config import EngineConfig
from gptoss_engine.types import Guide, InvalidRequest, Unsupported
from gptoss_grammars import RefusedGrammar, bounded, one_line

log = logging.getLogger(__name__)

_GROUP = "gptoss.vocabularies"
# Of a parse, in one step: an ambiguous grammar's take the loop, and all streams, 0.3 s. By
# llguidance's own limit it is more than twice as long; 300 alternatives of objects are 10,000.
_MOST_ITEMS = 20_000
# The worst of MAX_GUIDE_LENGTH that ended took 19 s. Meanwhile other guided requests wait.
_COMPILE_SECONDS = 20.0


class Vocabulary(NamedTuple):
    """token_bytes by id; control_ids: of tokens that spell nothing; encode: text to tokens.

    By `encode` what a grammar leaves no choice in is made of the tokens that a prompt would have.
    """

    token_bytes: Sequence[bytes]
    control_ids: Collection[int]
    encode: Callable[[str], list[int]]


LoadVocabulary = Callable[[], Vocabulary]


class Matcher:
    """Where one answer stands in its grammar.

    error: why it cannot go on, in words; empty as long as it can.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.error = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow but the end."""
        return not self.error and self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """The answer's next token."""
        if not self.error and not self._matcher.consume_token(token_id):
            self._fail()

    def _fail(self) -> None:
        said = one_line(self._matcher.get_error())
        self.error = f"the guide cannot be followed any further: {said or 'no token may come'}"


class Guides:
    """Compiles guides for one model. Any thread may call it.

    load: gives the vocabulary, called once; RuntimeError says why there is none.
    vocab_size: rows of the model's logits. eos_token_ids: may come where a grammar is satisfied.
    """

    def __init__(
        self, load: LoadVocabulary, *, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(id_ for id_ in eos_token_ids if id_ < vocab_size)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._absence = ""  # why there is none
        self._limits = LLParserLimits(verbose_errors=False, step_max_items=_MOST_ITEMS)

    def begin(self) -> None:
        """Load the vocabulary meanwhile, so that no request waits for it."""
        threading.Thread(target=self._loaded, name="guides", daemon=True).start()

    def matcher(self, guide: Guide) -> Matcher:
        """The guide compiled, at its beginning. InvalidRequest if it cannot be, or if no text fits.

        Its first mask is made here too, off the engine's loop. Where a later one asks for more than
        llguidance's limits allow, or nothing fits any more, it is the matcher's error.
        """
        tokenizer = self._loaded()
        if tokenizer is None:
            raise Unsupported(f"guide cannot be given here: {self._absence}")
        grammar = _grammar(guide)
        try:
            matcher = bounded(lambda: self._compiled(tokenizer, grammar), _COMPILE_SECONDS)
        except RefusedGrammar as error:
            raise InvalidRequest(f"guide cannot be compiled: {error}") from None
        if matcher.error:
            raise InvalidRequest(f"guide cannot begin an answer: {matcher.error}")
        return matcher

    def _compiled(self, tokenizer: LLTokenizer, grammar: str) -> Matcher:
        compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise RefusedGrammar(one_line(compiled.get_error()))
        matcher = Matcher(compiled)
        fill_masks([matcher], np.zeros((1, -(-self._vocab_size // 32)), dtype=np.int32))
        return matcher

    def _loaded(self) -> LLTokenizer | None:
        with self._lock:
            if self._tokenizer is None and not self._absence:
                started = time.monotonic()
                try:
                    self._tokenizer = self._made(self._load())
                    log.info("loaded the vocabulary in %.1f s", time.monotonic() - started)
                except RuntimeError as error:
                    self._absence = str(error)
                    log.warning("there are no guides: %s", error)
            return self._tokenizer

    def _made(self, vocabulary: Vocabulary) -> LLTokenizer:
        if not self._eos_token_ids:
            raise RuntimeError("the checkpoint names no token that ends an answer")
        wrapped = TokenizerWrapper(_Tokens(vocabulary, self._vocab_size, self._eos_token_ids[0]))
        return LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)


class _Tokens:
    """As llguidance wants to be told of a vocabulary. What the model has beyond spells nothing."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        known = [*vocabulary.token_bytes[:vocab_size]]
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = [id_ for id_ in vocabulary.control_ids if id_ < vocab_size]
        self.eos_token_id = eos_token_id
        self._encode = vocabulary.encode
        self._is_whole = len(vocabulary.token_bytes) <= vocab_size

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # It asks with bytes first.
            raise TypeError("text is encoded, not bytes")
        token_ids = self._encode(text)
        if self._is_whole or max(token_ids, default=0) < len(self.tokens):
            return token_ids
        return [id_ for byte in text.encode() for id_ in self._of_byte(byte)]

    def _of_byte(self, byte: int) -> list[int]:
        """In a model of fewer tokens than the vocabulary has."""
        one = bytes([byte])
        return [self.tokens.index(one)] if one in self.tokens else []


_executor: LLExecutor | None = None


def fill_masks(matchers: Sequence[Matcher], masks: np.ndarray) -> None:
    """masks [G, ceil(V / 32)] int32 of what may come next: token v's bit is v % 32 of word v // 32.

    Of a matcher that cannot say it `error` tells why, and everything may come: whoever drops the
    answer is told by that, and logits without any number would say something else.
    """
    global _executor
    waiting = [(matcher, row) for row, matcher in enumerate(matchers) if not matcher.error]
    if len(waiting) == 1:
        ((matcher, row),) = waiting
        matcher._matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
    elif waiting:
        if _executor is None:
            _executor = LLExecutor()
        pairs = [(matcher._matcher, row) for matcher, row in waiting]
        _executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks[0].nbytes, len(masks))
    for matcher, row in waiting:
        if matcher._matcher.is_error() or not masks[row].any():
            matcher._fail()
    for row, matcher in enumerate(matchers):
        if matcher.error:
            masks[row] = -1


def guides_of(config: EngineConfig, *, vocab_size: int, eos_token_ids: Collection[int]) -> Guides:
    """By the vocabulary of the configured checkpoint, which is not loaded yet."""
    folder = None if config.model == "demo" else Path(config.model)
    sizes = {"vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
    return Guides(lambda: load_vocabulary(folder), **sizes)


def load_vocabulary(folder: Path | None) -> Vocabulary:
    """What is installed under `gptoss.vocabularies`, of the checkpoint's folder, if it is one's.

    RuntimeError says in words why there is none.
    """
    found = [*importlib.metadata.entry_points(group=_GROUP)]
    if not found:
        raise RuntimeError(f"no package that is installed has a vocabulary ({_GROUP})")
    return Vocabulary(*found[0].load()(folder))


def _grammar(guide: Guide) -> str:
    """As llguidance takes it: Lark, or a JSON object of grammars."""
    match guide.type:
        case "json_schema":
            return json.dumps({"grammars": [{"json_schema": _json(guide.value)}]})
        case "regex":
            return LLMatcher.grammar_from_regex(guide.value)
        case "lark":
            return LLMatcher.grammar_from_lark(guide.value)
        case "grammars":
            return json.dumps({"grammars": _parts(guide.value)})


def _parts(text: str) -> list[dict[str, Any]]:
    grammars = _json(text)
    is_list = isinstance(grammars, list) and bool(grammars)
    if not is_list or not all(isinstance(part, dict) for part in grammars):
        raise InvalidRequest("guide of type grammars must be a JSON list of objects")
    return grammars


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"guide must be JSON: {error}") from None
