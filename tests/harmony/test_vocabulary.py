import base64
import gzip
import hashlib
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import openai_harmony
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_harmony import vocabulary
from gptoss_harmony.types import InvalidChat
from gptoss_harmony.vocabulary import (
    MAX_RUN,
    NUM_TOKENS,
    VOCABULARY_FILE,
    VOCABULARY_SHA256,
    Vocabulary,
    VocabularyMissing,
)

CONTROL = {
    "<|endoftext|>": 199_999,
    "<|return|>": 200_002,
    "<|constrain|>": 200_003,
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|call|>": 200_012,
}
TRICKY = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(" ", "\n", "\r", "\t", "/", "'s", "'LL", "!", "-", "\x1c", "\x85", "\u2028"),
                *("Word", "中文", "😀", "123", "ǅ", "\u0301", "\u200d", "\u3000", "\x00", "ก"),
                *(*CONTROL, "<|nothing|>", "<|reserved_200013|>", "<|", "|>"),
            ]
        ),
        st.text(max_size=8).filter(lambda text: text.isprintable()),
    ),
    max_size=30,
).map("".join)


@pytest.fixture(scope="module")
def content() -> bytes:
    return vocabulary._from_bpe_openai()


@pytest.fixture
def no_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing set, nothing cached, no package, no network; returns the cache folder."""
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.delenv("GPTOSS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load = openai_harmony.load_harmony_encoding

    def load_from_file_alone(name: str) -> openai_harmony.HarmonyEncoding:
        if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
            raise openai_harmony.HarmonyError("no network here")
        return load(name)

    monkeypatch.setattr(openai_harmony, "load_harmony_encoding", load_from_file_alone)
    return tmp_path / "cache" / "gptoss"


@pytest.fixture(scope="module")
def tokenizer_json(content: bytes) -> str:
    """A byte-level tokenizer.json with the vocabulary's tokens and one control token."""
    characters = vocabulary._byte_characters()
    ranks = dict(line.split(b" ") for line in content.splitlines())
    tokens = {
        "".join(characters[byte] for byte in base64.b64decode(token)): int(rank)
        for token, rank in ranks.items()
    }
    tokens["<|call|>"] = 200_012
    return json.dumps({"model": {"type": "BPE", "vocab": tokens}}, ensure_ascii=False)


def test_control_tokens_stand_where_the_model_has_them(loaded: Vocabulary) -> None:
    for text, token_id in CONTROL.items():
        assert loaded.token_bytes[token_id] == text.encode()
        assert loaded.encode_raw(text) == [token_id]
    assert len(loaded.token_bytes) == NUM_TOKENS


def test_every_token_has_its_exact_bytes(loaded: Vocabulary, content: bytes) -> None:
    for line in content.splitlines():
        token, rank = line.split(b" ")
        assert loaded.token_bytes[int(rank)] == base64.b64decode(token)


@given(text=TRICKY)
@settings(max_examples=300, deadline=None)
def test_encode_is_openai_harmonys(loaded: Vocabulary, text: str) -> None:
    token_ids = loaded.encode(text)
    assert token_ids == loaded.encoding.encode(text, disallowed_special=())
    assert max(token_ids, default=0) < 199_998
    assert loaded.decode(token_ids) == text


@given(text=TRICKY)
@settings(max_examples=200, deadline=None)
def test_encode_raw_is_openai_harmonys(loaded: Vocabulary, text: str) -> None:
    assert loaded.encode_raw(text) == loaded.encoding.encode(text, allowed_special="all")


@pytest.mark.parametrize("text", ["a", " ", "中", "\n", "!\n/", "<|end|>"])
def test_a_megabyte_without_a_break_is_encoded_within_a_second(
    loaded: Vocabulary, text: str
) -> None:
    text *= 2**20 // len(text)
    start = time.process_time()
    token_ids = loaded.encode(text)
    assert time.process_time() - start < 1.0
    assert loaded.decode(token_ids) == text


@pytest.mark.parametrize("text", ["<|end|>", "<|", "<|reserved_2000", "<|a", "<|nothing|>"])
def test_a_megabyte_of_raw_text_is_encoded_within_a_second(loaded: Vocabulary, text: str) -> None:
    text *= 2**20 // len(text)
    start = time.process_time()
    token_ids = loaded.encode_raw(text)
    assert time.process_time() - start < 1.0
    assert loaded.decode(token_ids) == text


@pytest.mark.parametrize("run", ["a", "中", "\n", " ", "\x1c!", "/\n"])
def test_without_bpe_openai_long_runs_are_refused(
    loaded: Vocabulary, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "_linear_encoder", lambda: None)
    slow = Vocabulary(loaded.encoding)
    rest = "x and more" if run.isspace() else " and more"
    longest = run * (MAX_RUN // len(run)) + rest
    assert slow.encode(longest) == loaded.encode(longest)
    with pytest.raises(InvalidChat, match=rf"1002 characters without a break, more than {MAX_RUN}"):
        slow.encode(run * (1002 // len(run)) + rest)


def test_a_hugging_face_tokenizer_converts_exactly(
    content: bytes, tokenizer_json: str, no_source: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    encoding = vocabulary._load_encoding(tmp_path)
    assert encoding.encode("Hello") == [13225]
    cached = (no_source / VOCABULARY_FILE).read_bytes()
    assert hashlib.sha256(cached).hexdigest() == VOCABULARY_SHA256
    assert cached == content
    # From now on the cache is enough.
    (tmp_path / "tokenizer.json").unlink()
    assert vocabulary._load_encoding(None).encode("Hello") == [13225]
    assert [path.name for path in no_source.iterdir()] == [VOCABULARY_FILE]


def test_the_users_folder_comes_first(
    content: bytes, no_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / VOCABULARY_FILE).write_bytes(content)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    assert vocabulary._load_encoding(None).encode("Hello") == [13225]
    # openai-harmony reads the variable too: it is as the user left it.
    assert os.environ["TIKTOKEN_ENCODINGS_BASE"] == str(tmp_path)


def test_a_corrupt_cache_is_mended(
    content: bytes, tokenizer_json: str, no_source: Path, tmp_path: Path
) -> None:
    no_source.mkdir(parents=True)
    (no_source / VOCABULARY_FILE).write_bytes(content[:1000])
    (tmp_path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    vocabulary._load_encoding(tmp_path)
    assert (no_source / VOCABULARY_FILE).read_bytes() == content


def test_a_cache_that_cannot_be_written_is_done_without(
    content: bytes, no_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_source.parent.parent.mkdir(exist_ok=True)
    no_source.parent.write_text("a file where the cache's folder should be")
    monkeypatch.setattr(vocabulary, "_from_bpe_openai", lambda: content)
    assert vocabulary._load_encoding(None).encode("Hello") == [13225]


def test_a_failed_write_leaves_nothing_behind(
    content: bytes, no_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(vocabulary, "_from_bpe_openai", lambda: content)
    monkeypatch.setattr(os, "replace", full)
    assert vocabulary._load_encoding(None).encode("Hello") == [13225]
    assert list(no_source.iterdir()) == []


def test_what_fails_in_the_folder_is_told_as_it_is(content: bytes, no_source: Path) -> None:
    with pytest.raises(OSError, match="of the caller"), vocabulary._folder_holding(content):
        raise OSError("of the caller")


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"GPTOSS_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/gptoss"),
        ({"GPTOSS_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/gptoss"),
    ],
)
def test_the_cache_lies_where_the_engine_has_its_own(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    monkeypatch.delenv("GPTOSS_CACHE")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert vocabulary.cache_folder() == Path(folder)


def test_without_a_home_there_is_no_cache(
    content: bytes, no_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GPTOSS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(VocabularyMissing, match=r"the cache \(there is no home folder"):
        vocabulary._load_encoding(None)
    monkeypatch.setattr(vocabulary, "_from_bpe_openai", lambda: content)
    assert vocabulary._load_encoding(None).encode("Hello") == [13225]


def test_the_package_bpe_openai_carries_the_file(content: bytes) -> None:
    assert hashlib.sha256(content).hexdigest() == VOCABULARY_SHA256


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: None, "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (
            lambda folder: (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}'),
            "its sha256 differs",
        ),
    ],
)
def test_failure_is_one_sentence_with_all_that_was_tried(
    no_source: Path, tmp_path: Path, prepare: Callable[[Path], object], words: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(VocabularyMissing) as refused:
        vocabulary._load_encoding(tmp_path)
    sentence = str(refused.value)
    for source in ("TIKTOKEN_ENCODINGS_BASE (not set)", "cache", "bpe-openai (not installed)"):
        assert source in sentence
    assert words in sentence
    assert "own download (no network here)" in sentence
    assert "\n" not in sentence


def test_threads_share_one_vocabulary(loaded: Vocabulary) -> None:
    found: list[Vocabulary] = []
    threads = [threading.Thread(target=lambda: found.append(vocabulary.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is loaded for one in found)
    assert len(found) == 8


def test_gzip_of_another_vocabulary_is_refused(
    no_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "_from_bpe_openai", lambda: gzip.decompress(gzip.compress(b"")))
    with pytest.raises(VocabularyMissing, match="bpe-openai \\(another vocabulary"):
        vocabulary._load_encoding(None)
