"""What one table of shared page ids has to hold.

Theory. A page id means the same page on every rank of a dp group, but with context parallelism a rank keeps
only its share of the tokens, densely. A table is therefore as long as the fullest rank needs, an entry may
be partly empty on other ranks, and three questions have three answers:

- how long is the table: the fullest rank counts (`num_pages`);
- which leading entries will no later token be written to: the emptiest of the ranks that are still to get
  tokens counts (`num_settled`); only these may be shared by sequences that go on differently;
- which leading entries lie before a window: the rank that has the fewest tokens before it counts
  (`num_passed`).

The split scheme deals the prompt; what is generated after it belongs to the last rank.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from baton.plan.cache import Cache, Extent, Full, State, Window
from baton.plan.layout import Layout, Mirror, Split, Stripe
from baton.plan.ranges import Ranges


class Shares:
    """How many pages a sequence needs in each page-table group, and which prefixes are whole pages."""

    def __init__(self, layout: Layout, cache: Cache, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._num_ranks = layout.size("cp")
        self._scheme = layout.scheme if self._num_ranks > 1 else Mirror()
        self._extents: dict[str, Extent] = {}
        for component in cache.components:
            known = self._extents.setdefault(component.group, component.extent)
            self._extents[component.group] = _wider(known, component.extent)
        self.why_no_prefix = self._why_no_prefix()
        """Why there is no prefix cache; empty where there is one."""
        block = (self._scheme.block or page_tokens) if isinstance(self._scheme, Stripe) else page_tokens
        self._block = block
        unit = lcm(block, page_tokens)
        num_dealt = self._num_ranks if isinstance(self._scheme, Stripe) else 1
        self.prefix_unit_tokens = None if self.why_no_prefix else unit * num_dealt
        """Prefixes of whole multiples of it are whole pages on every rank; None: prefixes are not cached."""
        self.num_ahead = int(any(layers[-1][1] > cache.num_layers for layers in _layers(cache)))
        """Tokens that the entries of a prefix were computed with beyond its own: a draft sees one further."""
        self.unit_pages = 0 if self.why_no_prefix else unit // page_tokens
        """Pages of each group that hold a unit."""

    @property
    def groups(self) -> tuple[str, ...]:
        """The page tables of a sequence, sorted."""
        return tuple(sorted(self._extents))

    def is_windowed(self, group: str) -> bool:
        """Whether entries of a group pass out of use before the sequence ends."""
        return isinstance(self._extents[group], Window)

    def has_tokens(self, group: str) -> bool:
        """Whether the pages of a group hold tokens, not one state per sequence."""
        return self._extents[group].has_tokens

    def num_pages(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Entries of a table that holds the first `num_tokens` of a sequence."""
        if not self.has_tokens(group):
            return 1
        most = max(self._owned(rank, num_tokens, prompt_tokens) for rank in self._extremes())
        return -(-most // self.page_tokens)

    def num_settled(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Leading entries that no token from `num_tokens` on is written to, on any rank."""
        if not self.has_tokens(group):
            return 0
        return self._settled(num_tokens, prompt_tokens) // self.page_tokens

    def num_passed(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        """Leading entries that no token from `num_tokens` on looks at: they lie before its window."""
        window = self._extents[group].window
        if window is None or num_tokens <= window:
            return 0
        before = num_tokens - window
        fewest = min(self._owned(rank, before, prompt_tokens) for rank in self._extremes())
        return fewest // self.page_tokens

    def num_pages_most(self, group: str, num_tokens: int, prompt_tokens: int, step_tokens: int) -> int:
        """Pages in use at once, at most, while a sequence grows to `num_tokens` by steps of this size."""
        whole = self.num_pages(group, num_tokens, prompt_tokens)
        window = self._extents[group].window
        if window is None or isinstance(self._scheme, Split):
            return whole
        # The counts of two ranks differ by a block at most, and both ends may lie inside of a page.
        num_dealt, slack = (self._num_ranks, 2 * self._block) if isinstance(self._scheme, Stripe) else (1, 0)
        most = -(-(window + step_tokens) // num_dealt) + slack
        return min(whole, -(-most // self.page_tokens) + 2)

    def _extremes(self) -> range | tuple[int, int]:
        """Ranks of which one is the fullest and one the emptiest; stripes are dealt from the first on."""
        match self._scheme:
            case Mirror():
                return range(1)
            case Stripe():
                return (0, self._num_ranks - 1)
            case Split():
                return range(self._num_ranks)

    def _owned(self, rank: int, num_tokens: int, prompt_tokens: int) -> int:
        """How many of the first `num_tokens` a rank keeps."""
        match self._scheme:
            case Mirror():
                return num_tokens
            case Stripe():
                rounds, rest = divmod(num_tokens, self._block * self._num_ranks)
                return rounds * self._block + min(max(rest - rank * self._block, 0), self._block)
            case Split():
                first, last = _split(rank, self._num_ranks, prompt_tokens, self.page_tokens)
                own = min(max(num_tokens - first, 0), last - first)
                is_last = rank == self._num_ranks - 1
                return own + (max(0, num_tokens - prompt_tokens) if is_last else 0)

    def _settled(self, num_tokens: int, prompt_tokens: int) -> int:
        """Leading slots that are written on every rank, or never will be."""
        last = self._num_ranks - 1
        if not isinstance(self._scheme, Split):
            return self._owned(last if isinstance(self._scheme, Stripe) else 0, num_tokens, prompt_tokens)
        found = self._owned(last, num_tokens, prompt_tokens)
        for rank in range(last):
            own = self._owned(rank, num_tokens, prompt_tokens)
            if own < self._owned(rank, prompt_tokens, prompt_tokens):
                found = min(found, own)
        return found

    def _why_no_prefix(self) -> str:
        if isinstance(self._scheme, Split):
            return "a split layout deals a prompt by its length, so that equal prefixes lie differently"
        if any(not extent.has_tokens for extent in self._extents.values()):
            return "recurrent state is kept for the end of a sequence only, not for its prefixes"
        if any(extent.window is not None for extent in self._extents.values()):
            return "pages before a window are given back, so that no whole prefix stays"
        return ""


@lru_cache(maxsize=65_536)
def _split(rank: int, num_ranks: int, prompt_tokens: int, page_tokens: int) -> tuple[int, int]:
    """The run of a prompt's tokens that a rank keeps."""
    share = Split().share(rank, num_ranks, prompt_tokens, page_tokens)
    return share.start, share.stop


def _layers(cache: Cache) -> list[Ranges]:
    return [component.layers for component in cache.components if component.layers]


def _wider(left: Extent, right: Extent) -> Extent:
    """The extent that keeps what both of a group need."""
    for extent in (left, right):
        if isinstance(extent, Full | State):
            return extent
    return max(left, right, key=lambda extent: extent.window or 0)
