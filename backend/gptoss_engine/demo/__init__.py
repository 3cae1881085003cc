"""The built-in demo model: a tiny gpt-oss checkpoint that speaks Harmony, at home in the package.

It is stored compact. Of the 201,088 rows of the embedding and of the unembedding only those of
tokens that its toy domain uses are kept, and one shared row stands for all others. The first use
expands it into an ordinary Hugging Face checkpoint in a cache folder (about 105 MB). How it was
trained and what it can do: tools/demo/README.md.

Beside it lie chats that it never saw in training (tools/demo/held_out.py), as token ids.
"""

import gzip
import hashlib
import json
import os
import random
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptoss_engine.cache import CacheError, cache_folder
from gptoss_engine.config import InvalidConfig

COMPACT_FOLDER = Path(__file__).parent
WEIGHTS, CONFIGS = "model.safetensors", ("config.json", "generation_config.json")
HELD_OUT_CHATS = "held_out.jsonl.gz"
TOKEN_IDS = "token_ids"
ROW_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS_PER_WRITE = 4096


def checkpoint_folder() -> Path:
    """The folder of the demo's expanded checkpoint: config.json, model.safetensors, ….

    It is made when missing and repaired when its bytes are not the expected ones. Each file
    appears whole by one rename, so any number of processes may do this at once. Raises
    InvalidConfig, in one sentence, where the cache folder cannot be used.
    """
    try:
        cache = cache_folder()
    except CacheError as error:
        raise InvalidConfig(f"the demo model cannot be expanded: {error}") from None
    folder = cache / f"demo-{_content_hash(COMPACT_FOLDER)}"
    try:
        for name in (WEIGHTS, *CONFIGS):
            if not _is_intact(folder / name):
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / name)
    except OSError as error:
        raise InvalidConfig(
            f"the demo model needs about 105 MB in {cache}, which cannot be used: "
            f"{error.strerror or error}; set GPTOSS_CACHE to a folder with room that is writable"
        ) from error
    return folder


def held_out(kind: str, key: object) -> bool:
    """Whether training must never see this problem: one in twelve of each kind, by its CRC-32."""
    return zlib.crc32(f"{kind}|{key}".encode()) % 12 == 0


def unseen_sums(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """`count` different pairs (a, b) below 100 whose sums the demo model never saw in training."""
    pairs = [(a, b) for a in range(100) for b in range(100) if held_out("add", (a, b))]
    return random.Random(seed).sample(pairs, count)


@dataclass(frozen=True, slots=True)
class HeldOutChat:
    """A chat with its right reply, whose last `num_answer` tokens are the answer itself.

    kind: the task, such as "add".
    """

    kind: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    num_answer: int

    @property
    def answer(self) -> tuple[int, ...]:
        return self.reply[-self.num_answer :]


def held_out_chats() -> list[HeldOutChat]:
    """1,300 problems that were kept from training, 800 of them sums, all tasks mixed."""
    lines = gzip.decompress((COMPACT_FOLDER / HELD_OUT_CHATS).read_bytes()).splitlines()
    return [
        HeldOutChat(kind, tuple(prompt), tuple(reply), num_answer)
        for kind, prompt, reply, num_answer in map(json.loads, lines)
    ]


def _content_hash(folder: Path) -> str:
    """Of everything that decides the expanded bytes, so that a new demo gets a new folder."""
    digest = hashlib.sha256()
    for name in (WEIGHTS, *CONFIGS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]


def _is_intact(path: Path) -> bool:
    """Whether the file holds exactly the expected bytes; costs one read of it (0.1 s in all)."""
    try:
        with path.open("rb") as file:
            return all(file.read(len(chunk)) == chunk for chunk in _expanded(path.name)) and (
                not file.read(1)
            )
    except FileNotFoundError:
        return False


def _write(path: Path) -> None:
    descriptor, partial = tempfile.mkstemp(suffix=".partial", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(_expanded(path.name))
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _expanded(name: str) -> Iterator[bytes]:
    """The bytes of one file of the expanded checkpoint, in pieces of at most about a megabyte."""
    content = (COMPACT_FOLDER / name).read_bytes()
    if name == WEIGHTS:
        vocab_size = json.loads((COMPACT_FOLDER / "config.json").read_bytes())["vocab_size"]
        yield from expand_safetensors(content, vocab_size)
    else:
        yield content


def expand_safetensors(compact: bytes, vocab_size: int) -> Iterator[bytes]:
    """A safetensors file whose ROW_TABLES are spread to `vocab_size` rows, in pieces.

    In `compact` a table [n + 1, H] holds the rows of the n ids of the int32 tensor TOKEN_IDS
    (ascending) and last the row that every other id shares.
    """
    header_size = struct.unpack("<Q", compact[:8])[0]
    tensors = json.loads(compact[8 : 8 + header_size])
    data = memoryview(compact)[8 + header_size :]
    tensors.pop("__metadata__", None)
    begin, end = tensors.pop(TOKEN_IDS)["data_offsets"]
    token_ids = struct.unpack(f"<{(end - begin) // 4}i", data[begin:end])

    sources, header, offset = [], {}, 0
    for name, tensor in tensors.items():
        begin, end = tensor["data_offsets"]
        rows, *columns = tensor["shape"]
        size = end - begin
        if name in ROW_TABLES:
            size, rows = size // rows * vocab_size, vocab_size
        header[name] = {
            "dtype": tensor["dtype"],
            "shape": [rows, *columns],
            "data_offsets": [offset, offset + size],
        }
        sources.append((name, data[begin:end]))
        offset += size

    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name, source in sources:
        if name in ROW_TABLES:
            yield from _spread_rows(source, token_ids, vocab_size)
        else:
            yield bytes(source)


def _spread_rows(table: memoryview, token_ids: tuple[int, ...], vocab_size: int) -> Iterator[bytes]:
    row_size = len(table) // (len(token_ids) + 1)
    shared = bytes(table[-row_size:])
    used = 0
    for first in range(0, vocab_size, _ROWS_PER_WRITE):
        count = min(_ROWS_PER_WRITE, vocab_size - first)
        rows = bytearray(shared * count)
        while used < len(token_ids) and token_ids[used] < first + count:
            at = (token_ids[used] - first) * row_size
            rows[at : at + row_size] = table[used * row_size : (used + 1) * row_size]
            used += 1
        yield bytes(rows)
