"""Holders of pages."""

from __future__ import annotations

import pytest

from baton.engine.pages import PageCounts, PagePool


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
