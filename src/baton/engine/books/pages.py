"""The pages of one group: who is free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a pool by what they are used for; the three sum to the pool."""

    num_free: int
    num_used: int
    """Held by a sequence or a copy."""
    num_cached: int
    """Held by the prefix cache alone."""


class PagePool:
    """Pages with a count of holders each; a page without any is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._cached: set[int] = set()
        self._num_cache_only = 0

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def counts(self) -> PageCounts:
        """How the pages are used."""
        num_used = self.num_pages - self.num_free - self._num_cache_only
        return PageCounts(self.num_free, num_used, self._num_cache_only)

    def num_holders(self, page: int) -> int:
        """How many hold a page, the prefix cache included."""
        return self._holders[page]

    def is_owned(self, page: int) -> bool:
        """Whether somebody holds a page."""
        return self._holders[page] > 0

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache is among a page's holders."""
        return page in self._cached

    def allocate(self, count: int) -> list[int]:
        """Free pages, now held once; there have to be enough."""
        assert count <= self.num_free, f"{count} pages asked of {self.num_free} that are free"
        # In order, so that pages that lie side by side are copied as one span.
        found = sorted(self._free.pop() for _ in range(count))
        for page in found:
            assert not self._holders[page], f"free page {page} has {self._holders[page]} holders"
            self._holders[page] = 1
        return found

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is free; nobody can join in holding it"
            self._num_cache_only -= self._is_cache_only(page)
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder fewer for each page."""
        for page in pages:
            assert self._holders[page], f"page {page} is given back, but it is free"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                assert page not in self._cached, f"page {page} is free while the prefix cache has it"
                self._free.append(page)
            self._num_cache_only += self._is_cache_only(page)

    def cache(self, pages: Iterable[int]) -> None:
        """The prefix cache becomes a holder of pages that somebody holds."""
        for page in pages:
            assert page not in self._cached, f"page {page} is cached twice"
            self.hold((page,))
            self._cached.add(page)

    def uncache(self, pages: Iterable[int]) -> None:
        """The prefix cache lets pages go."""
        for page in pages:
            assert page in self._cached, f"page {page} is not cached"
            self._num_cache_only -= self._is_cache_only(page)
            self._cached.discard(page)
            self.free((page,))

    def check(self) -> None:
        """Raises AssertionError unless every page is free or held, and not both."""
        free = set(self._free)
        assert len(free) == len(self._free), f"pages are free twice: {sorted(self._free)}"
        for page, count in enumerate(self._holders):
            assert count >= 0, f"page {page} has {count} holders"
            is_free = page in free
            assert is_free == (count == 0), f"page {page} with {count} holders is free: {is_free}"
        lost = sorted(page for page in self._cached if not self._holders[page])
        assert not lost, f"cached pages without a holder: {lost}"
        num_cache_only = sum(1 for page in self._cached if self._holders[page] == 1)
        assert num_cache_only == self._num_cache_only, (
            f"{num_cache_only} pages are held by the cache alone, {self._num_cache_only} are counted"
        )

    def _is_cache_only(self, page: int) -> bool:
        return self._holders[page] == 1 and page in self._cached
