import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_engine.page_pool import GONE, PagePool


def test_a_page_is_free_or_owned() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pages = [pool.allocate("a"), pool.allocate("b"), pool.allocate("a")]
    assert sorted(pages) == [0, 1, 2]
    assert [pool.owner(page) for page in pages] == ["a", "b", "a"]
    assert (pool.num_free, pool.num_used, pool.num_tokens) == (0, 3, 12)
    pool.free(pages[1], "b")
    assert pool.owner(pages[1]) is None
    assert pool.allocate("c") == pages[1]


def test_freeing_twice_or_for_another_is_our_own_bug() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    page = pool.allocate("a")
    with pytest.raises(AssertionError, match="not b's"):
        pool.free(page, "b")
    pool.free(page, "a")
    with pytest.raises(AssertionError, match="not a's"):
        pool.free(page, "a")
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_extend_covers_every_position_and_no_page_more(num_tokens: int, num_pages: int) -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, num_tokens, "a")
    assert len(table) == pool.num_used == pool.pages_for(num_tokens) == num_pages
    assert pool.reach(table) == 12


@pytest.mark.parametrize(
    ("position", "num_gone"), [(-5, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (12, 3), (99, 3)]
)
def test_only_pages_wholly_below_a_position_are_given_back(position: int, num_gone: int) -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, 12, "a")
    kept = table[num_gone:]
    pool.give_back_below(table, position, "a")
    assert table == [GONE] * num_gone + kept
    assert pool.num_free == num_gone


def test_reach_counts_what_is_gone_as_passed() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    table: list[int] = []
    pool.extend(table, 12, "a")
    pool.give_back_below(table, 8, "a")
    assert pool.reach(table) == 20
    pool.extend(table, 20, "a")
    assert pool.num_free == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["extend", "below", "all"]), st.integers(0, 40)
        )
    )
)
def test_random_traffic_keeps_every_page_free_or_with_one_owner(
    moves: list[tuple[str, str, int]],
) -> None:
    pool = PagePool(num_pages=8, page_size=3)
    tables: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for owner, move, position in moves:
        table = tables[owner]
        if move == "extend":
            pool.extend(table, min(position, pool.reach(table)), owner)
        elif move == "below":
            pool.give_back_below(table, position, owner)
        else:
            pool.give_back_all(table, owner)
        owned = {page: who for who, pages in tables.items() for page in pages if page != GONE}
        assert {p: pool.owner(p) for p in range(8) if pool.owner(p)} == owned
        assert (
            pool.num_used
            == len(owned)
            == sum(page != GONE for pages in tables.values() for page in pages)
        )
    for owner, table in tables.items():
        pool.give_back_all(table, owner)
        assert table == []
    assert pool.num_free == 8
