"""The Harmony vocabulary: found offline, loaded once a process, never at a request.

o200k_base has 199,998 ordinary tokens; above them stand the control tokens of Harmony and ids
that nothing uses, up to the model's 201,088 rows.
"""

import base64
import gzip
import hashlib
import importlib.util
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import openai_harmony

from gptoss_harmony.types import InvalidChat

VOCABULARY_FILE = "o200k_base.tiktoken"
VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"

NUM_TOKENS = 201_088
FIRST_CONTROL = 199_998
END_OF_TEXT = 199_999
RETURN = 200_002
CONSTRAIN = 200_003
CHANNEL = 200_005
START = 200_006
END = 200_007
MESSAGE = 200_008
CALL = 200_012
STOP_TOKEN_IDS = (RETURN, CALL, END_OF_TEXT)

# What a control token looks like; the vocabulary knows which are.
_CONTROL_TEXT = re.compile(r"<\|[a-z]+(?:_[0-9]+)?\|>")
# Without bpe-openai: characters without a break that openai-harmony encodes in a few milliseconds.
MAX_RUN = 1000
# What its pattern can take for one word: ink (to it the four separators are ink) or white space,
# and line ends with slashes among them.
_RUNS = re.compile(r"[\S\x1c-\x1f]+|\s+")
_LINE_ENDS = re.compile(r"[\r\n/]+")


class VocabularyMissing(RuntimeError):
    """No source holds the vocabulary: says which were tried, and what each lacked."""


class Vocabulary:
    """Text to ordinary tokens and back. Safe to share between threads.

    bpe-openai encodes where it is installed: the same tokens as openai-harmony's, eight times
    faster and, above all, linear in the length of a word. openai-harmony takes time quadratic in
    it, so that without bpe-openai long runs are refused.
    """

    def __init__(self, encoding: openai_harmony.HarmonyEncoding) -> None:
        self.encoding = encoding
        self._encode_linear = _linear_encoder()
        # Lone bytes survive as surrogates, so that each token's exact bytes come back.
        self.token_bytes: tuple[bytes, ...] = tuple(
            encoding.decode([token_id], errors="surrogateescape").encode(errors="surrogateescape")
            for token_id in range(NUM_TOKENS)
        )
        self._control_ids = {
            self.token_bytes[token_id].decode(): token_id
            for token_id in range(FIRST_CONTROL, NUM_TOKENS)
        }

    def encode(self, text: str) -> list[int]:
        """Ordinary tokens only: text that spells a control token stays text."""
        if self._encode_linear is not None:
            return self._encode_linear(text)
        if (length := _longest_run(text)) > MAX_RUN:
            raise InvalidChat(
                f"a text has {length} characters without a break, more than {MAX_RUN}: encoding "
                "them takes time quadratic in their number (the package bpe-openai, which is not "
                "installed, lifts this limit)"
            )
        return self.encoding.encode(text, disallowed_special=())

    def encode_raw(self, text: str) -> list[int]:
        """Like `encode`, but text that spells a control token becomes that token."""
        token_ids: list[int] = []
        position = 0
        for match in _CONTROL_TEXT.finditer(text):
            control_id = self._control_ids.get(match[0])
            if control_id is not None:
                token_ids += (*self.encode(text[position : match.start()]), control_id)
                position = match.end()
        return token_ids + self.encode(text[position:])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Every token as text, control tokens spelled out; broken UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes[token_id] for token_id in token_ids).decode(
            errors="replace"
        )


def _linear_encoder() -> Callable[[str], list[int]] | None:
    """bpe-openai's encoder, or None where the package is not installed."""
    # Its extension module alone: the package around it loads two other vocabularies at import
    # (half a second, 70 MB), and its own encoder refuses texts of 1,000,000 characters.
    spec = PathFinder.find_spec("_bindings", _bpe_openai_folders())
    if spec is None or spec.loader is None:
        return None
    bindings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bindings)
    return bindings.tokenizer_for_encoding("o200k_base").encode


def _bpe_openai_folders() -> list[str]:
    """Where the package bpe-openai is installed, without importing it."""
    spec = importlib.util.find_spec("bpe_openai")
    return list(spec.submodule_search_locations or ()) if spec is not None else []


def _longest_run(text: str) -> int:
    return max(map(len, _RUNS.findall(text) + _LINE_ENDS.findall(text)), default=0)


_load_lock = threading.Lock()
_loaded: Vocabulary | None = None


def load(checkpoint_folder: Path | None = None) -> Vocabulary:
    """The process's one vocabulary, loaded at the first call (0.4 s, 84 MB).

    Every source holds the same file, proven by its hash, so later calls may name another folder.
    Raises `VocabularyMissing` with all that was tried.
    """
    global _loaded
    with _load_lock:
        if _loaded is None:
            _loaded = Vocabulary(_load_encoding(checkpoint_folder))
        return _loaded


def load_tokens(
    checkpoint_folder: Path | None = None,
) -> tuple[Sequence[bytes], Sequence[int], Callable[[str], list[int]]]:
    """For whoever knows token ids alone: each token's bytes, the ids of control tokens, and how
    text is encoded.
    """
    loaded = load(checkpoint_folder)
    return loaded.token_bytes, range(FIRST_CONTROL, NUM_TOKENS), loaded.encode


def cache_folder() -> Path:
    """$GPTOSS_CACHE, else $XDG_CACHE_HOME/gptoss, else ~/.cache/gptoss, as the engine has it.

    OSError where there is no home folder.
    """
    if chosen := os.environ.get("GPTOSS_CACHE"):
        return Path(chosen)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "gptoss"
    try:
        return Path.home() / ".cache" / "gptoss"
    except RuntimeError:
        raise OSError("there is no home folder; GPTOSS_CACHE names another place") from None


def _load_encoding(checkpoint_folder: Path | None) -> openai_harmony.HarmonyEncoding:
    tried: list[str] = []
    for content in _contents(checkpoint_folder, tried):
        with _folder_holding(content) as folder:
            return _encoding_from(folder)
    try:
        return _encoding_from(None)
    except openai_harmony.HarmonyError as error:
        tried.append(f"openai-harmony's own download ({error})")
    raise VocabularyMissing(
        f"the Harmony vocabulary ({VOCABULARY_FILE}, sha256 {VOCABULARY_SHA256[:8]}…) was found "
        "nowhere; tried " + "; ".join(tried)
    )


def _contents(checkpoint_folder: Path | None, tried: list[str]) -> Iterator[bytes]:
    """The vocabulary file's bytes from each source that holds exactly them, best source first."""
    sources: list[tuple[str, Callable[[], bytes]]] = []
    folder = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    if folder:
        user_file = Path(folder) / VOCABULARY_FILE
        sources.append((f"$TIKTOKEN_ENCODINGS_BASE ({user_file})", user_file.read_bytes))
    else:
        tried.append("$TIKTOKEN_ENCODINGS_BASE (not set)")
    sources.append(("the cache", lambda: (cache_folder() / VOCABULARY_FILE).read_bytes()))
    if checkpoint_folder is not None:
        tokenizer = Path(checkpoint_folder) / "tokenizer.json"
        sources.append((f"the checkpoint ({tokenizer})", lambda: _from_tokenizer_json(tokenizer)))
    else:
        tried.append("a checkpoint's tokenizer.json (no checkpoint given)")
    sources.append(("the package bpe-openai", _from_bpe_openai))
    for name, read in sources:
        try:
            content = read()
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            tried.append(f"{name} ({error})")
            continue
        if hashlib.sha256(content).hexdigest() == VOCABULARY_SHA256:
            yield content
        tried.append(f"{name} (another vocabulary: its sha256 differs)")


def _from_tokenizer_json(path: Path) -> bytes:
    """Hugging Face's byte-level vocabulary, written as tiktoken writes it."""
    with path.open(encoding="utf-8") as file:
        tokens: dict[str, int] = json.load(file)["model"]["vocab"]
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    lines = [
        base64.b64encode(bytes(byte_of[character] for character in token)) + b" %d\n" % rank
        for token, rank in sorted(tokens.items(), key=lambda item: item[1])
        if rank < FIRST_CONTROL
    ]
    return b"".join(lines)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level tokenizer.json."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(0x100)]


def _from_bpe_openai() -> bytes:
    folders = _bpe_openai_folders()
    if not folders:
        raise LookupError("not installed")
    return gzip.decompress((Path(folders[0]) / "data" / f"{VOCABULARY_FILE}.gz").read_bytes())


@contextmanager
def _folder_holding(content: bytes) -> Iterator[Path]:
    """A folder with the vocabulary file: the cache, or a passing one where it cannot be written."""
    cached_file = _cached(content)
    if cached_file is not None:
        yield cached_file.parent
        return
    with tempfile.TemporaryDirectory(prefix="gptoss-vocabulary-") as folder:
        (Path(folder) / VOCABULARY_FILE).write_bytes(content)
        yield Path(folder)


def _cached(content: bytes) -> Path | None:
    """The cache's file, written if it is not there; None where that cannot be."""
    try:
        target = cache_folder() / VOCABULARY_FILE
        if not (target.is_file() and target.read_bytes() == content):
            target.parent.mkdir(parents=True, exist_ok=True)
            # What a failure leaves behind goes with its folder.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as partial:
                (Path(partial) / VOCABULARY_FILE).write_bytes(content)
                os.replace(Path(partial) / VOCABULARY_FILE, target)
    except OSError:
        return None
    return target


def _encoding_from(folder: Path | None) -> openai_harmony.HarmonyEncoding:
    """openai-harmony's encoding; it learns the file's folder from the environment alone."""
    variable = "TIKTOKEN_ENCODINGS_BASE"
    before: Any = os.environ.pop(variable, None)
    try:
        if folder is not None:
            os.environ[variable] = str(folder)
        return openai_harmony.load_harmony_encoding("HarmonyGptOss")
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before
