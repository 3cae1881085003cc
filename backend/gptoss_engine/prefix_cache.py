"""Which pages a sequence need not compute, since another one has: the prefix cache.

A page is known by its key: a hash of all tokens up to its end. Only whole pages are shared, whose
tokens are all known and computed, or will be by the step that is being scheduled: steps run one
after another, and in a step each layer stores all keys and values before anybody reads them.

A hit of k pages needs all k of the full layers, but of the window layers only those that the next
query sees, in front of the hit's end. So a window layer's page is worth something where hits end:
behind a prompt, since the next turn of a chat begins with this one's prompt; behind an answer,
since a tool's result follows it; and where two prompts part, as behind a system prompt. That is
known when a second prompt comes whose pages of full layers are there and whose window's are not: it
computes them once more and keeps them for the third. Those pages are kept; all others are cached,
too, but are the first to go.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence as Tokens
from typing import NamedTuple

from gptoss_engine.page_pool import GONE, PagePool
from gptoss_engine.sequence import Sequence

_KEY_BYTES = 32


class PageKeys:
    """Hashes of tokens up to a page's end, each over the one before it. Any thread may call it.

    Two different prefixes have the same key if BLAKE2b with 256 bits, keyed by a secret of this
    object, collides: among 2^64 pages, more than any engine ever computes, with a probability of
    2^-129. Nobody can search for one, since the secret never leaves the process; and what another
    checkpoint, another form of its weights or of the cache has computed has other keys, since it is
    another engine's.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._secret = secrets.token_bytes(_KEY_BYTES)

    def extend(self, keys: list[bytes], token_ids: Tokens[int], salt: str = "") -> None:
        """Append those of all pages that these tokens fill and that have none yet.

        salt: with another one, the same tokens have other keys.
        """
        first, end = len(keys), len(token_ids) // self._page_size
        if first == end:
            return
        parent = keys[-1] if keys else self._hash(salt.encode(errors="surrogatepass"), b"salt")
        tokens = memoryview(array("q", token_ids[first * self._page_size : end * self._page_size]))
        for start in range(0, len(tokens), self._page_size):
            parent = self._hash(parent + tokens[start : start + self._page_size], b"page")
            keys.append(parent)

    def _hash(self, data: bytes, kind: bytes) -> bytes:
        # What is hashed of a page has always the same length: no two are cut differently.
        return hashlib.blake2b(data, digest_size=_KEY_BYTES, key=self._secret, person=kind).digest()


class Hit(NamedTuple):
    """What of a sequence is there: pages of full layers from the first on, and those of window
    layers in front of their end. num_matched: so many pages of full layers are there in all."""

    full: list[int]
    window: list[int]
    num_matched: int


class PrefixCache:
    """Finds, shares and registers pages of both page groups.

    sliding_window: a query at position i of a window layer sees keys i - sliding_window + 1 … i.
    num_queried_tokens, num_hit_tokens: of sequences that were started for the first time.
    """

    def __init__(self, full: PagePool, window: PagePool, sliding_window: int) -> None:
        assert full.page_size == window.page_size
        self._full = full
        self._window = window
        self._page_size = full.page_size
        self._sliding_window = sliding_window
        self.keys = PageKeys(full.page_size)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def find(self, sequence: Sequence) -> Hit:
        """The longest hit for a sequence that waits. Its last token is always computed."""
        self.keys.extend(sequence.page_keys, sequence.token_ids, sequence.cache_salt)
        full: list[int] = []
        for key in sequence.page_keys[: (len(sequence.token_ids) - 1) // self._page_size]:
            page = self._full.find(key)
            if page is None:
                break
            full.append(page)
        num_matched = num_pages = len(full)
        window: list[int] = []  # from its last page on
        index = num_pages - 1
        while index >= self._first_seen(num_pages):
            page = self._window.find(sequence.page_keys[index])
            if page is None:
                num_pages, window = index, []
            else:
                window.append(page)
            index -= 1
        return Hit(full[:num_pages], window[::-1], num_matched)

    def share(self, sequence: Sequence, hit: Hit) -> None:
        """The sequence begins with these pages, and owns them, too."""
        tables, num_pages = sequence.page_tables, len(hit.full)
        assert not tables.full
        for page in hit.full:
            self._full.share(page)
        for page in hit.window:
            self._window.share(page)
        tables.full = hit.full
        tables.window = [GONE] * (num_pages - len(hit.window)) + hit.window
        sequence.num_registered_pages = num_pages
        sequence.num_computed_tokens = num_pages * self._page_size
        sequence.num_matched_pages = hit.num_matched
        self._keep(sequence, num_pages)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += len(sequence.token_ids)
            self.num_hit_tokens += sequence.num_computed_tokens

    def register(self, sequence: Sequence) -> None:
        """Let others find the pages that are full by now: whose tokens are known and computed."""
        num_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids))
        first, end = sequence.num_registered_pages, num_tokens // self._page_size
        if end <= first:
            return
        self.keys.extend(sequence.page_keys, sequence.token_ids, sequence.cache_salt)
        tables = sequence.page_tables
        for index in range(first, end):
            key = sequence.page_keys[index]
            self._full.register(tables.full[index], key)
            if tables.window[index] != GONE:  # Of a window that is shorter than a page.
                self._window.register(tables.window[index], key)
        sequence.num_registered_pages = end
        # Where the same prompt, and one that goes on from it, would find the end of its hit.
        end_of_prompt = (sequence.num_prompt_tokens - 1) // self._page_size
        for num_pages in {end_of_prompt, sequence.num_matched_pages}:
            if first < num_pages <= end:
                self._keep(sequence, num_pages)

    def leave(self, sequence: Sequence) -> None:
        """Before the sequence gives back its pages: who goes on from its end finds them."""
        self.register(sequence)
        self._keep(sequence, sequence.num_registered_pages)
        sequence.num_registered_pages = sequence.num_matched_pages = 0

    def forget(self, sequence: Sequence) -> None:
        """What the sequence has computed, or read, is of no use to anybody."""
        for key in sequence.page_keys:
            self._full.forget(key)
            self._window.forget(key)

    def _keep(self, sequence: Sequence, num_pages: int) -> None:
        """The window layers' pages that a hit of so many pages needs."""
        for index in range(self._first_seen(num_pages), num_pages):
            self._window.keep(sequence.page_keys[index])

    def _first_seen(self, num_pages: int) -> int:
        """The page of the first key that the query behind so many pages sees."""
        return max(num_pages * self._page_size - self._sliding_window + 1, 0) // self._page_size
