"""The pages of one page group, and the page tables that they stand in.

A page table lists pages by position // page_size; GONE stands for a page that was given back.
"""

from collections import OrderedDict

GONE = -1


class PagePool:
    """`num_pages` pages of `page_size` tokens: each free, cached, or owned by some generations.

    A page may have a key, which says what it holds for good: nobody writes to it any more, and who
    needs the same takes it by its key. When its last owner gives it back it is cached: free for
    whoever asks, but what it holds is there until then. Pages without a key go first, then cached
    ones in the order in which they were given back; those that are kept behind all others.
    All of it takes constant time a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages  # cached ones, too
        self._blank = list(reversed(range(num_pages)))
        self._num_owners = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}
        self._are_kept = bytearray(num_pages)
        # Cached pages, the next to go first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Owned by somebody."""
        return self.num_pages - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self._kept)

    @property
    def num_tokens(self) -> int:
        """What the whole pool holds, in tokens."""
        return self.num_pages * self.page_size

    def num_owners(self, page: int) -> int:
        return self._num_owners[page]

    def key(self, page: int) -> bytes | None:
        return self._keys[page]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """A page for its first owner, who writes to it. What was cached there is forgotten."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = (self._cached or self._kept).popitem(last=False)
            self._lose_key(page)
        self.num_free -= 1
        self._num_owners[page] = 1
        return page

    def free(self, page: int) -> None:
        """One of its owners needs it no more."""
        assert self._num_owners[page] > 0, f"page {page} is nobody's"
        self._num_owners[page] -= 1
        if self._num_owners[page]:
            return
        self.num_free += 1
        if self._keys[page] is None:
            self._blank.append(page)
        else:
            self._queue(page)[page] = None

    def reach(self, page_table: list[int]) -> int:
        """The position before which all would have a page if the table got every free one."""
        return (len(page_table) + self.num_free) * self.page_size

    def extend(self, page_table: list[int], num_tokens: int) -> None:
        """Append pages until the table has one for every position below `num_tokens`."""
        while len(page_table) * self.page_size < num_tokens:
            page_table.append(self.allocate())

    def give_back_below(self, page_table: list[int], position: int) -> None:
        """Free the pages that lie wholly below `position`, the last one first."""
        # Downwards: what lies below a page that is gone went earlier.
        index = min(position // self.page_size, len(page_table)) - 1
        while index >= 0 and page_table[index] != GONE:
            self.free(page_table[index])
            page_table[index] = GONE
            index -= 1

    def give_back_all(self, page_table: list[int]) -> None:
        """Free every page of the table and leave it empty."""
        self.give_back_below(page_table, len(page_table) * self.page_size)
        page_table.clear()

    # ---- by what they hold ---------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The page that holds this, owned or cached."""
        return self._pages.get(key)

    def share(self, page: int) -> None:
        """One more owner of a page with a key."""
        assert self._keys[page] is not None, f"page {page} may still be written to"
        if not self._num_owners[page]:
            del self._queue(page)[page]
            self.num_free -= 1
        self._num_owners[page] += 1

    def register(self, page: int, key: bytes) -> None:
        """From now on an owned page holds this for good.

        Where another one does already, that one keeps the key while somebody owns it. A cached one
        goes: what is in use stays longer.
        """
        assert self._num_owners[page] > 0, f"page {page} is nobody's"
        assert self._keys[page] is None, f"page {page} has a key"
        twin = self._pages.get(key)
        if twin is not None:
            if self._num_owners[twin]:
                return
            self._are_kept[page] = self._are_kept[twin]
            self._make_blank(twin)
        self._keys[page] = key
        self._pages[key] = page

    def keep(self, key: bytes) -> None:
        """Whatever holds this goes behind all that is not kept."""
        page = self._pages.get(key)
        if page is None or self._are_kept[page]:
            return
        self._are_kept[page] = True
        if not self._num_owners[page]:
            del self._cached[page]
            self._kept[page] = None

    def forget(self, key: bytes) -> None:
        """Nobody finds this any more; its owners keep it."""
        page = self._pages.get(key)
        if page is None:
            return
        if self._num_owners[page]:
            self._lose_key(page)
        else:
            self._make_blank(page)

    def _queue(self, page: int) -> "OrderedDict[int, None]":
        return self._kept if self._are_kept[page] else self._cached

    def _make_blank(self, page: int) -> None:
        """Of a cached page."""
        del self._queue(page)[page]
        self._lose_key(page)
        self._blank.append(page)

    def _lose_key(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._pages[key]
        self._keys[page] = None
        self._are_kept[page] = False
