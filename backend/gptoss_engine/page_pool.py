"""The pages of one page group, and the page tables that they stand in.

A page table lists pages by position // page_size; GONE stands for a page that was given back.
"""

GONE = -1


class PagePool:
    """`num_pages` pages of `page_size` tokens, each free or owned by one generation."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))
        self._owners: list[str | None] = [None] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def num_tokens(self) -> int:
        """What the whole pool holds, in tokens."""
        return self.num_pages * self.page_size

    def owner(self, page: int) -> str | None:
        """Whose page it is, or None for a free one."""
        return self._owners[page]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, owner: str) -> int:
        page = self._free.pop()
        self._owners[page] = owner
        return page

    def free(self, page: int, owner: str) -> None:
        assert self._owners[page] == owner, f"page {page} is not {owner}'s: {self._owners[page]}"
        self._owners[page] = None
        self._free.append(page)

    def reach(self, page_table: list[int]) -> int:
        """The position before which all would have a page if the table got every free one."""
        return (len(page_table) + len(self._free)) * self.page_size

    def extend(self, page_table: list[int], num_tokens: int, owner: str) -> None:
        """Append pages until the table has one for every position below `num_tokens`."""
        while len(page_table) * self.page_size < num_tokens:
            page_table.append(self.allocate(owner))

    def give_back_below(self, page_table: list[int], position: int, owner: str) -> None:
        """Free the pages that lie wholly below `position`."""
        # Downwards: what lies below a page that is gone went earlier.
        index = min(position // self.page_size, len(page_table)) - 1
        while index >= 0 and page_table[index] != GONE:
            self.free(page_table[index], owner)
            page_table[index] = GONE
            index -= 1

    def give_back_all(self, page_table: list[int], owner: str) -> None:
        """Free every page of the table and leave it empty."""
        self.give_back_below(page_table, len(page_table) * self.page_size, owner)
        page_table.clear()
