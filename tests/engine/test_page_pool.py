import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_engine.page_pool import GONE, PagePool


def test_a_page_is_free_or_owned() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pages = [pool.allocate(), pool.allocate(), pool.allocate()]
    assert sorted(pages) == [0, 1, 2]
    assert (pool.num_free, pool.num_used, pool.num_tokens) == (0, 3, 12)
    pool.free(pages[1])
    assert (pool.num_owners(pages[0]), pool.num_owners(pages[1])) == (1, 0)
    assert pool.allocate() == pages[1]


def test_freeing_twice_is_our_own_bug() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    page = pool.allocate()
    pool.free(page)
    with pytest.raises(AssertionError, match="is nobody's"):
        pool.free(page)
    assert pool.num_free == 2


def test_a_page_that_may_be_written_to_is_not_shared() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    page = pool.allocate()
    with pytest.raises(AssertionError, match="may still be written to"):
        pool.share(page)
    pool.register(page, b"a")
    with pytest.raises(AssertionError, match="has a key"):
        pool.register(page, b"b")


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_extend_covers_every_position_and_no_page_more(num_tokens: int, num_pages: int) -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, num_tokens)
    assert len(table) == pool.num_used == pool.pages_for(num_tokens) == num_pages
    assert pool.reach(table) == 12


@pytest.mark.parametrize(
    ("position", "num_gone"), [(-5, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (99, 3)]
)
def test_only_pages_wholly_below_a_position_are_given_back(position: int, num_gone: int) -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, 12)
    kept = table[num_gone:]
    pool.give_back_below(table, position)
    assert table == [GONE] * num_gone + kept
    assert pool.num_free == num_gone


def test_reach_counts_what_is_gone_as_passed() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, 12)
    pool.give_back_below(table, 8)
    assert pool.reach(table) == 20
    pool.extend(table, 20)
    assert pool.num_free == 0


def cached(pool: PagePool, *keys: bytes) -> list[int]:
    """Pages that hold these, given back in this order."""
    pages = [pool.allocate() for _ in keys]
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    for page in pages:
        pool.free(page)
    return pages


def test_pages_go_in_the_order_of_their_worth() -> None:
    """Those that hold nothing, then those given back first, and those that are kept last."""
    pool = PagePool(num_pages=5, page_size=4)
    a, b, c, d = cached(pool, b"a", b"b", b"c", b"d")
    assert (pool.num_free, pool.num_used, pool.num_cached) == (5, 0, 4)
    pool.keep(b"a")
    pool.share(b)  # Somebody needs it once more.
    pool.free(b)
    assert [pool.allocate() for _ in range(5)] == [4, c, d, b, a]
    assert [pool.find(key) for key in (b"a", b"b", b"c", b"d")] == [None] * 4


def test_a_shared_page_is_free_when_its_last_owner_goes() -> None:
    pool = PagePool(num_pages=1, page_size=4)
    (page,) = cached(pool, b"a")
    pool.share(page)
    pool.share(page)
    assert (pool.num_owners(page), pool.num_free) == (2, 0)
    pool.free(page)
    assert (pool.num_owners(page), pool.num_free) == (1, 0)
    pool.free(page)
    assert (pool.find(b"a"), pool.num_free) == (page, 1)


def test_of_two_pages_that_hold_the_same_the_one_in_use_is_found() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    (first,) = cached(pool, b"a")
    pool.keep(b"a")
    second = pool.allocate()
    pool.register(second, b"a")
    assert (pool.find(b"a"), pool.key(first), pool.num_cached) == (second, None, 0)
    third = pool.allocate()
    pool.register(third, b"a")
    assert (pool.find(b"a"), pool.key(third)) == (second, None)
    pool.free(third)
    pool.free(second)
    cached(pool, b"b")
    assert [pool.allocate() for _ in range(3)][-1] == second, "it is kept as the first one was"


def test_what_is_forgotten_is_not_found() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    (idle,) = cached(pool, b"a")
    pool.share(idle)
    pool.forget(b"a")
    assert (pool.find(b"a"), pool.num_used) == (None, 1)
    pool.free(idle)
    cached(pool, b"b")
    pool.forget(b"b")
    pool.forget(b"c")
    assert (pool.find(b"b"), pool.num_cached, pool.num_free) == (None, 0, 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["extend", "below", "all", "register", "share", "keep", "forget"]),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_random_traffic_keeps_every_page_free_cached_or_owned(
    moves: list[tuple[str, str, int]],
) -> None:
    pool = PagePool(num_pages=8, page_size=3)
    tables: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for owner, move, number in moves:
        table, key = tables[owner], bytes([number % 6])
        page = pool.find(key)
        if move == "extend":
            pool.extend(table, min(number, pool.reach(table)))
        elif move == "below":
            pool.give_back_below(table, number)
        elif move == "all":
            pool.give_back_all(table)
        elif move == "register":
            for each in [page for page in table if page != GONE and pool.key(page) is None][:1]:
                pool.register(each, key)
        elif move == "share" and page is not None:
            table.append(page)
            pool.share(page)
        elif move == "keep":
            pool.keep(key)
        elif move == "forget":
            pool.forget(key)
        held = [page for pages in tables.values() for page in pages if page != GONE]
        assert [pool.num_owners(page) for page in range(8)] == [held.count(p) for p in range(8)]
        assert pool.num_used == len({*held})
        keys = [pool.key(page) for page in range(8)]
        named = [key for key in keys if key is not None]
        assert len(named) == len({*named}), "no two pages hold the same"
        assert all(pool.find(key) == keys.index(key) for key in named)
        assert pool.num_cached == sum(
            key is not None and page not in held for page, key in enumerate(keys)
        )
    for table in tables.values():
        pool.give_back_all(table)
        assert table == []
    assert pool.num_free == 8
    assert sorted(pool.allocate() for _ in range(8)) == [*range(8)]
