"""Cached prefixes: found by content, given up oldest first, kept while in use."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.pages import PagePool
from baton.engine.prefix_cache import NUM_STALE_MAX, PrefixCache, PrefixNode

UNIT = 2


class Cached:
    """A prefix cache over one pool, with pages of one unit each."""

    def __init__(self, num_pages: int = 16, digest: Callable[[bytes], bytes] | None = None) -> None:
        self.pool = PagePool(num_pages)
        pools = {"tokens": self.pool}
        options = {"digest": digest} if digest else {}
        self.prefix = PrefixCache(pools, unit_tokens=UNIT, unit_pages=1, **options)

    def put(self, tokens: list[int], salt: str = "") -> PrefixNode | None:
        """As a sequence that computes these tokens, and ends."""
        pages = self.pool.allocate(len(tokens) // UNIT)
        pin = self.prefix.pin(self.prefix.insert(tokens, {"tokens": pages}, salt))
        self.pool.free(pages)
        self.prefix.unpin(pin)
        self.prefix.check_integrity()
        self.pool.check_integrity()
        return pin

    def num_found(self, tokens: list[int], salt: str = "") -> int:
        return self.prefix.lookup(tokens, salt).num_tokens


def test_the_longest_prefix_in_whole_units() -> None:
    cached = Cached()
    cached.put([1, 2, 3, 4, 5, 6])
    assert cached.num_found([1, 2, 3, 4, 5, 6]) == 6
    assert cached.num_found([1, 2, 3, 4, 5]) == 4
    assert cached.num_found([1, 2, 3, 9, 5, 6]) == 2
    assert cached.num_found([3, 4, 5, 6]) == 0, "a unit belongs to what is before it"
    assert cached.num_found([]) == 0
    match = cached.prefix.lookup([1, 2, 3, 4])
    assert match.pages == {"tokens": cached.prefix.lookup([1, 2, 3, 4, 5, 6]).pages["tokens"][:2]}


def test_salts_are_worlds_apart() -> None:
    cached = Cached()
    cached.put([1, 2], salt="a")
    assert cached.num_found([1, 2], salt="a") == 2
    assert cached.num_found([1, 2]) == 0
    assert cached.num_found([1, 2], salt="b") == 0


def test_a_collision_is_a_miss() -> None:
    cached = Cached(digest=lambda raw: b"same")
    cached.put([1, 2, 3, 4])
    assert cached.num_found([1, 2]) == 2
    assert cached.num_found([1, 2, 3, 4]) == 2, "its second unit has the key of its first"
    assert cached.num_found([5, 6]) == 0
    cached.put([5, 6])
    assert cached.num_found([5, 6]) == 0
    assert cached.num_found([1, 2]) == 2
    assert cached.pool.counts().num_used == 0


def test_equal_prompts_are_cached_once() -> None:
    cached = Cached()
    first = cached.put([1, 2, 3, 4])
    assert first is not None
    before = cached.prefix.lookup([1, 2, 3, 4]).pages
    assert cached.put([1, 2, 3, 4, 5, 6]) is None, "the pages of a twin are not pinned"
    assert cached.num_found([1, 2, 3, 4, 5, 6]) == 6
    assert cached.prefix.lookup([1, 2, 3, 4]).pages == before
    assert cached.pool.counts().num_cached == 3


def test_the_least_recently_used_leaf_goes_first() -> None:
    cached = Cached()
    cached.put([1, 1, 2, 2])
    cached.put([1, 1, 3, 3])
    cached.put([5, 5])
    cached.prefix.unpin(cached.prefix.pin(cached.prefix.lookup([1, 1, 2, 2]).node))
    after_each = []
    while cached.prefix.evict():
        cached.prefix.check_integrity()
        known = ([1, 1, 2, 2], [1, 1, 3, 3], [5, 5])
        after_each.append([cached.num_found(tokens) for tokens in known])
    assert after_each == [[4, 2, 2], [4, 2, 0], [2, 2, 0], [0, 0, 0]]
    assert cached.pool.num_free == cached.pool.num_pages


def test_what_is_pinned_stays_with_all_before_it() -> None:
    cached = Cached()
    cached.put([1, 2, 3, 4, 5, 6])
    pin = cached.prefix.pin(cached.prefix.lookup([1, 2, 3, 4]).node)
    assert cached.prefix.num_idle == 1
    assert cached.prefix.evict()
    assert not cached.prefix.evict()
    assert cached.num_found([1, 2, 3, 4, 5, 6]) == 4
    cached.prefix.unpin(pin)
    assert cached.prefix.num_idle == 2
    assert cached.prefix.evict()
    assert cached.num_found([1, 2, 3, 4, 5, 6]) == 2


def test_a_unit_whose_pages_are_in_another_is_not_cached() -> None:
    cached = Cached()
    pages = cached.pool.allocate(1)
    cached.prefix.insert([1, 2], {"tokens": pages})
    assert cached.prefix.insert([1, 3], {"tokens": pages}) is None
    assert cached.num_found([1, 3]) == 0
    cached.prefix.check_integrity()


def test_a_prefix_in_constant_use_costs_no_memory() -> None:
    cached = Cached()
    cached.put([1, 2])
    for _ in range(10 * NUM_STALE_MAX):
        cached.prefix.unpin(cached.prefix.pin(cached.prefix.lookup([1, 2]).node))
    assert len(cached.prefix._evictable) <= 2 + NUM_STALE_MAX + 1
    assert cached.prefix.evict()
    assert cached.pool.num_free == cached.pool.num_pages
