"""Pages of the KV cache: how many a sequence needs, how they are stored, and which are free.

A page id means the same page on every rank of a dp group. With context parallelism a rank keeps only its
share of the tokens, densely, so ranks fill an entry of the page table at different times. Three questions
therefore have three answers:

- how long is the table: the fullest rank decides (`num_pages`);
- which leading entries will no later token be written to: the emptiest of the ranks that still get tokens
  decides (`num_settled`). Only these entries may be shared by sequences that continue differently;
- which leading entries lie before an attention window: the rank with the fewest tokens before the window
  decides (`num_out_of_window`).

The split scheme distributes the prompt only; generated tokens belong to the last rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from baton.errors import ConfigError
from baton.plan.cache import Cache, Extent, Full, State, Window
from baton.plan.layout import Layout, Mirror, Split, Stripe
from baton.plan.storage import FUSED, HND, Order, Storage

KV_LAYOUTS: dict[str, Order] = {"hnd.fused": FUSED, "hnd.apart": HND}
"""The storage orders that the engine can compute on, as `baton plan` writes them."""


class PageGeometry:
    """How tokens map to pages in each page-table group of one dp group."""

    def __init__(self, layout: Layout, cache: Cache, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._num_ranks = layout.size("cp")
        self._scheme = layout.scheme if self._num_ranks > 1 else Mirror()
        self._extents: dict[str, Extent] = {}
        for component in cache.components:
            known = self._extents.setdefault(component.group, component.extent)
            self._extents[component.group] = _wider(known, component.extent)
        self.groups = tuple(sorted(self._extents))
        self.why_no_prefix = self._why_no_prefix()
        """Why prefixes cannot be cached; empty where they can."""
        is_striped = isinstance(self._scheme, Stripe)
        self._block = (self._scheme.block or page_tokens) if isinstance(self._scheme, Stripe) else page_tokens
        unit = lcm(self._block, page_tokens)
        num_dealt = self._num_ranks if is_striped else 1
        self.prefix_unit_tokens = None if self.why_no_prefix else unit * num_dealt
        """Prefixes of multiples of this length are whole pages on every rank; None: they are not cached."""
        self.prefix_unit_pages = 0 if self.why_no_prefix else unit // page_tokens
        """Pages of each group that hold one unit."""
        stacks = [component.layers for component in cache.components if component.layers]
        self.num_lookahead = int(any(layers[-1][1] > cache.num_layers for layers in stacks))
        """Tokens beyond a prefix that its entries depend on: a draft layer reads one token ahead."""

    def is_windowed(self, group: str) -> bool:
        """Whether pages of a group are freed before the sequence ends."""
        return isinstance(self._extents[group], Window)

    def has_tokens(self, group: str) -> bool:
        """Whether pages of a group hold tokens rather than one state per sequence."""
        return self._extents[group].has_tokens

    def num_pages(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Entries of a table that holds the first `num_tokens` of a sequence."""
        if not self.has_tokens(group):
            return 1
        num_owned_max = max(self._num_owned(rank, num_tokens, prompt_tokens) for rank in self._extremes())
        return -(-num_owned_max // self.page_tokens)

    def num_settled(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Leading entries that no rank writes to when it stores tokens from `num_tokens` on."""
        if not self.has_tokens(group):
            return 0
        return self._num_settled_slots(num_tokens, prompt_tokens) // self.page_tokens

    def num_out_of_window(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Leading entries that no token from `num_tokens` on attends to."""
        window = self._extents[group].window
        if window is None or num_tokens <= window:
            return 0
        before = num_tokens - window
        num_owned_min = min(self._num_owned(rank, before, prompt_tokens) for rank in self._extremes())
        return num_owned_min // self.page_tokens

    def num_pages_max(self, group: str, num_tokens: int, prompt_tokens: int, step_tokens: int) -> int:
        """The most pages in use at once while a sequence grows to `num_tokens` by steps of this size."""
        whole = self.num_pages(group, num_tokens, prompt_tokens)
        window = self._extents[group].window
        if window is None or isinstance(self._scheme, Split):
            return whole
        # The token counts of two ranks differ by at most a block, and both ends may lie inside a page.
        num_dealt, slack = (self._num_ranks, 2 * self._block) if isinstance(self._scheme, Stripe) else (1, 0)
        num_slots = -(-(window + step_tokens) // num_dealt) + slack
        return min(whole, -(-num_slots // self.page_tokens) + 2)

    def _extremes(self) -> range | tuple[int, int]:
        """Ranks among which the fullest and the emptiest are; stripes are dealt from the first rank on."""
        match self._scheme:
            case Mirror():
                return range(1)
            case Stripe():
                return (0, self._num_ranks - 1)
            case Split():
                return range(self._num_ranks)

    def _num_owned(self, rank: int, num_tokens: int, prompt_tokens: int) -> int:
        """How many of the first `num_tokens` a rank keeps."""
        match self._scheme:
            case Mirror():
                return num_tokens
            case Stripe():
                rounds, rest = divmod(num_tokens, self._block * self._num_ranks)
                return rounds * self._block + min(max(rest - rank * self._block, 0), self._block)
            case Split():
                first, last = _split_run(rank, self._num_ranks, prompt_tokens, self.page_tokens)
                num_prompt = min(max(num_tokens - first, 0), last - first)
                is_last = rank == self._num_ranks - 1
                return num_prompt + (max(0, num_tokens - prompt_tokens) if is_last else 0)

    def _num_settled_slots(self, num_tokens: int, prompt_tokens: int) -> int:
        """Leading slots that are written on every rank, or never will be."""
        last = self._num_ranks - 1
        if not isinstance(self._scheme, Split):
            return self._num_owned(last if isinstance(self._scheme, Stripe) else 0, num_tokens, prompt_tokens)
        num_slots = self._num_owned(last, num_tokens, prompt_tokens)
        for rank in range(last):
            num_owned = self._num_owned(rank, num_tokens, prompt_tokens)
            if num_owned < self._num_owned(rank, prompt_tokens, prompt_tokens):
                num_slots = min(num_slots, num_owned)
        return num_slots

    def _why_no_prefix(self) -> str:
        if isinstance(self._scheme, Split):
            return "a split layout divides a prompt by its length, so equal prefixes lie on different ranks"
        if any(not extent.has_tokens for extent in self._extents.values()):
            return "recurrent state is kept for the end of a sequence only, not for its prefixes"
        if any(extent.window is not None for extent in self._extents.values()):
            return "pages before a window are freed, so no whole prefix remains"
        return ""


@lru_cache(maxsize=65_536)
def _split_run(rank: int, num_ranks: int, prompt_tokens: int, page_tokens: int) -> tuple[int, int]:
    """The run of a prompt's tokens that a rank keeps under the split scheme."""
    share = Split().share(rank, num_ranks, prompt_tokens, page_tokens)
    return share.start, share.stop


def _wider(left: Extent, right: Extent) -> Extent:
    """The extent that keeps what both components of a group need."""
    for extent in (left, right):
        if isinstance(extent, Full | State):
            return extent
    return max(left, right, key=lambda extent: extent.window or 0)


def engine_storage(cache: Cache, page_tokens: int, dtype: str, kv_layout: str = "") -> Storage:
    """How the engine stores its KV cache: by default K and V of a page side by side, heads before tokens.

    A group of layers is then one copy to each target rank instead of two, and a whole page is one span for
    both. Components with rows of different sizes are stored apart. `kv_layout` chooses one of KV_LAYOUTS.
    """
    widths: dict[str, set[int]] = {}
    for component in cache.components:
        if component.extent.has_tokens:
            widths.setdefault(component.bundle, set()).add(component.num_elements)
    is_even = all(len(sizes) == 1 for sizes in widths.values())
    order = KV_LAYOUTS[kv_layout] if kv_layout else FUSED if is_even else HND
    if order == FUSED and not is_even:
        raise ConfigError(
            f"kv_layout {kv_layout!r}: this model caches rows of different sizes, which cannot be fused; "
            "use hnd.apart"
        )
    return Storage(page_tokens=page_tokens, dtype=dtype, order=order)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a pool by use; the three sum to the pool."""

    num_free: int
    num_used: int
    """Held by a sequence or a page copy."""
    num_cached: int
    """Held by the prefix cache alone."""


class PagePool:
    """The pages of one group with a reference count each; a page with none is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_refs = [0] * num_pages
        self._cached: set[int] = set()
        self._num_cache_only = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def counts(self) -> PageCounts:
        num_used = self.num_pages - self.num_free - self._num_cache_only
        return PageCounts(self.num_free, num_used, self._num_cache_only)

    def num_refs(self, page: int) -> int:
        """References to a page, the prefix cache's included."""
        return self._num_refs[page]

    def is_cached(self, page: int) -> bool:
        """Whether the prefix cache holds a page."""
        return page in self._cached

    def allocate(self, count: int) -> list[int]:
        """Takes free pages, each with one reference; there have to be enough."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} are free"
        # Sorted, so that adjacent pages are copied as one span.
        pages = sorted(self._free.pop() for _ in range(count))
        for page in pages:
            assert not self._num_refs[page], f"free page {page} has {self._num_refs[page]} references"
            self._num_refs[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            assert self._num_refs[page], f"page {page} is free and cannot be shared"
            self._num_cache_only -= self._is_cache_only(page)
            self._num_refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drops a reference to each page."""
        for page in pages:
            assert self._num_refs[page], f"page {page} is freed, but it is free already"
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                assert page not in self._cached, f"page {page} is free while the prefix cache has it"
                self._free.append(page)
            self._num_cache_only += self._is_cache_only(page)

    def cache(self, pages: Iterable[int]) -> None:
        """Adds the prefix cache's reference to pages that are in use."""
        for page in pages:
            assert page not in self._cached, f"page {page} is cached twice"
            self.hold((page,))
            self._cached.add(page)

    def uncache(self, pages: Iterable[int]) -> None:
        """Drops the prefix cache's reference."""
        for page in pages:
            assert page in self._cached, f"page {page} is not cached"
            self._num_cache_only -= self._is_cache_only(page)
            self._cached.discard(page)
            self.free((page,))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is either free or referenced."""
        free = set(self._free)
        assert len(free) == len(self._free), f"pages are free twice: {sorted(self._free)}"
        for page, count in enumerate(self._num_refs):
            assert count >= 0, f"page {page} has {count} references"
            is_free = page in free
            assert is_free == (count == 0), f"page {page} with {count} references is free: {is_free}"
        lost = sorted(page for page in self._cached if not self._num_refs[page])
        assert not lost, f"cached pages without a reference: {lost}"
        num_cache_only = sum(1 for page in self._cached if self._num_refs[page] == 1)
        assert num_cache_only == self._num_cache_only, (
            f"{num_cache_only} pages are held by the cache alone, {self._num_cache_only} are counted"
        )

    def _is_cache_only(self, page: int) -> bool:
        return self._num_refs[page] == 1 and page in self._cached
