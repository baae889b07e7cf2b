"""Page counts by closed forms against tokens dealt one by one; references to pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.scheduler.memory import WINDOW, make_cache, spots

from baton.engine.pages import PageCounts, PageGeometry, PagePool
from baton.plan.cache import Cache
from baton.plan.kinds import Index, Latent, Paged
from baton.plan.layout import parse_layout

LATER = 80
LAYOUTS = st.one_of(
    st.sampled_from(["tp1", "pp2.tp2", "cp2:mirror", "cp1:split", "cp1:stripe3"]),
    st.builds("cp{}".format, st.integers(2, 4)),
    st.builds("cp{}:split".format, st.integers(2, 4)),
    st.builds("cp{}:stripe{}".format, st.integers(2, 4), st.integers(1, 7)),
)
PAGES = st.integers(1, 6)
LENGTHS = st.integers(0, 60)


def dealt(layout: str, page: int, num_tokens: int, prompt: int) -> list[tuple[int, int]]:
    """Rank and table entry of each token."""
    return [(rank, slot // page) for rank, slot in spots(parse_layout(layout), page, num_tokens, prompt)]


def geometry_of(layout: str, page: int, cache: str = "full") -> PageGeometry:
    return PageGeometry(parse_layout(layout), make_cache(cache), page)


@given(LAYOUTS, PAGES, LENGTHS, st.integers(1, 40))
def test_tables_are_as_long_as_the_fullest_rank_needs(
    layout: str, page: int, length: int, prompt: int
) -> None:
    wanted = max((entry + 1 for _, entry in dealt(layout, page, length, prompt)), default=0)
    assert geometry_of(layout, page).num_pages("tokens", length, prompt) == wanted


@given(LAYOUTS, PAGES, LENGTHS, st.integers(1, 40))
def test_settled_entries_are_those_that_nothing_is_written_to(
    layout: str, page: int, length: int, prompt: int
) -> None:
    later = dealt(layout, page, max(length, prompt) + LATER, prompt)[length:]
    wanted = min(entry for _, entry in later)
    assert geometry_of(layout, page).num_settled("tokens", length, prompt) == wanted


@given(LAYOUTS, PAGES, LENGTHS, st.integers(1, 40))
def test_passed_entries_lie_before_the_window(layout: str, page: int, length: int, prompt: int) -> None:
    num_passed = geometry_of(layout, page, "window").num_out_of_window("tokens.w5", length, prompt)
    first = max(0, length - WINDOW)
    seen = dealt(layout, page, max(length, prompt) + LATER, prompt)[first:]
    assert num_passed <= min(entry for _, entry in seen)
    if not layout.endswith("split"):
        assert num_passed == min(entry for _, entry in seen)
    assert geometry_of(layout, page, "window").num_out_of_window("tokens", length, prompt) == 0


@given(LAYOUTS, PAGES, st.integers(1, 60), st.integers(1, 40), st.integers(1, 9))
def test_no_more_pages_at_once_than_said(layout: str, page: int, length: int, prompt: int, step: int) -> None:
    geometry = geometry_of(layout, page, "window")
    most = geometry.num_pages_max("tokens.w5", length, prompt, step)
    for start in range(length):
        stop = min(length, start + step)
        in_use = geometry.num_pages("tokens.w5", stop, prompt) - geometry.num_out_of_window(
            "tokens.w5", start, prompt
        )
        assert in_use <= most


@given(LAYOUTS, PAGES)
def test_the_unit_is_the_smallest_prefix_of_whole_pages(layout: str, page: int) -> None:
    geometry = geometry_of(layout, page)
    if "split" in layout and "cp1" not in layout:
        assert geometry.prefix_unit_tokens is None
        assert "split" in geometry.why_no_prefix
        return
    scheme = parse_layout(layout)
    num_shares = scheme.scheme.num_shares(scheme.size("cp"))

    def is_unit(num_tokens: int) -> bool:
        slots = spots(scheme, page, num_tokens, num_tokens)
        sizes = [sum(1 for rank, _ in slots if rank == share) for share in range(num_shares)]
        return len(set(sizes)) == 1 and sizes[0] % page == 0

    wanted = next(num_tokens for num_tokens in range(1, 1000) if is_unit(num_tokens))
    assert geometry.prefix_unit_tokens == wanted
    assert geometry.prefix_unit_pages == geometry.num_pages("tokens", wanted, wanted)
    assert geometry.prefix_unit_pages == geometry.num_settled("tokens", wanted, wanted)


@pytest.mark.parametrize(("cache", "why"), [("window", "window"), ("hybrid", "recurrent")])
def test_caches_without_whole_prefixes(cache: str, why: str) -> None:
    geometry = geometry_of("tp2", 4, cache)
    assert geometry.prefix_unit_tokens is None
    assert geometry.prefix_unit_pages == 0
    assert why in geometry.why_no_prefix


def test_a_state_takes_one_page_whatever_the_length() -> None:
    geometry = geometry_of("cp2", 4, "hybrid")
    assert geometry.groups == ("state", "tokens")
    assert [geometry.num_pages("state", n, 9) for n in (0, 1, 100)] == [1, 1, 1]
    assert geometry.num_settled("state", 100, 9) == 0


def test_components_of_one_group_share_their_table() -> None:
    parts = [
        *Latent(8).components(((0, 2),)),
        *Index(4).components(((0, 1),)),
        *Paged(1, 2).components(((2, 3),)),
    ]
    geometry = PageGeometry(
        parse_layout("cp2"), Cache(3, tuple(sorted(parts, key=lambda part: part.name))), 16
    )
    assert geometry.groups == ("tokens",)
    assert geometry.prefix_unit_tokens == 32
    assert geometry.prefix_unit_pages == 1


def test_no_page_is_handed_out_twice() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert all(map(pool.num_refs, first))
    with pytest.raises(AssertionError, match="1 pages asked for, 0 are free"):
        pool.allocate(1)
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)
    pool.check_integrity()


def test_a_page_is_free_when_its_last_holder_leaves() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.hold(pages)
    pool.free(pages)
    assert pool.num_refs(pages[0])
    pool.free(pages)
    assert not pool.num_refs(pages[0])
    with pytest.raises(AssertionError, match="freed, but it is free already"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.hold(pages)


def test_cached_pages_stay_without_a_user() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.cache(pages)
    assert pool.counts() == PageCounts(2, 2, 0)
    pool.free(pages)
    assert pool.counts() == PageCounts(2, 0, 2)
    pool.hold(pages[:1])
    assert pool.counts() == PageCounts(2, 1, 1)
    pool.uncache(pages)
    assert pool.counts() == PageCounts(3, 1, 0)
    pool.check_integrity()
    with pytest.raises(AssertionError, match="not cached"):
        pool.uncache(pages)


def test_the_cache_takes_a_page_once() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.cache(pages)
    with pytest.raises(AssertionError, match="cached twice"):
        pool.cache(pages)
    pool.free(pages)
    with pytest.raises(AssertionError, match="free while the prefix cache has it"):
        pool.free(pages)
