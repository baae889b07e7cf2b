"""Holders of pages."""

from __future__ import annotations

import pytest

from baton.engine.books.pages import PageCounts, PagePool


def test_no_page_is_handed_out_twice() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert all(map(pool.is_owned, first))
    with pytest.raises(AssertionError, match="1 pages asked of 0"):
        pool.allocate(1)
    pool.free(first)
    assert sorted(pool.allocate(2)) == sorted(first)
    pool.check()


def test_a_page_is_free_when_its_last_holder_leaves() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.hold(pages)
    pool.free(pages)
    assert pool.is_owned(pages[0])
    pool.free(pages)
    assert not pool.is_owned(pages[0])
    with pytest.raises(AssertionError, match="given back, but it is free"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="nobody can join"):
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
    pool.check()
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
