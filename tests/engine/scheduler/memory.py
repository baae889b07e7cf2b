"""What the ranks of a dp group would have in their pages: every token's cache entry as a number.

An entry stands for the token and all before it, as keys and values do, so an entry of another prompt, of
another place, or of a page that was given away and written over is another number. Where a token sits is
worked out here token by token, from the definition and not from `PageGeometry`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from baton.engine.commands import PageTables, ScheduledBatch, ScheduledSequence
from baton.engine.pages import PageGeometry
from baton.plan.cache import Cache, Window
from baton.plan.kinds import Draft, Paged, Recurrent
from baton.plan.layout import Layout, Mirror, Split, Stripe, parse_layout

LAYERS = ((0, 2),)
WINDOW = 5
JUNK = -1
CACHES = {
    "full": (Paged(2, 4),),
    "window": (Paged(2, 4), Paged(2, 4, window=WINDOW)),
    "hybrid": (Paged(2, 4), Recurrent(2, 8)),
    "draft": (Paged(2, 4),),
}


def make_cache(name: str) -> Cache:
    parts = [part for kind in CACHES[name] for part in kind.components(LAYERS)]
    if name == "draft":
        parts += Draft(Paged(2, 4)).components(((2, 3),))
    return Cache(2, tuple(sorted(parts, key=lambda part: part.name)))


def with_next(plain: Iterable[int], following: Iterable[int]) -> list[int]:
    """Entries of a model and its draft, which sees the token that follows each."""
    return [hash((entry, token)) for entry, token in zip(plain, following, strict=True)]


def entries(salt: str, tokens: Iterable[int]) -> list[int]:
    """The cache entry of every token."""
    cells: list[int] = []
    last = hash(("salt", salt))
    for token in tokens:
        last = hash((last, token))
        cells.append(last)
    return cells


@lru_cache(maxsize=4096)
def spots(
    layout: Layout, page_tokens: int, num_tokens: int, prompt_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Rank and slot of each token; mirrors count as one rank."""
    num_ranks = layout.size("cp")
    counts = [0] * num_ranks
    places: list[tuple[int, int]] = []
    for token in range(num_tokens):
        owner = 0
        if num_ranks > 1:
            owner = _owner(layout, page_tokens, token, prompt_tokens)
        places.append((owner, counts[owner]))
        counts[owner] += 1
    return tuple(places)


def _owner(layout: Layout, page_tokens: int, token: int, prompt_tokens: int) -> int:
    num_ranks = layout.size("cp")
    match layout.scheme:
        case Mirror():
            return 0
        case Stripe(block=block):
            return token // (block or page_tokens) % num_ranks
        case Split():
            if token >= prompt_tokens:
                return num_ranks - 1
            num_pages = -(-prompt_tokens // page_tokens)
            sizes = [num_pages // num_ranks + (rank < num_pages % num_ranks) for rank in range(num_ranks)]
            page = token // page_tokens
            return next(rank for rank in range(num_ranks) if page < sum(sizes[: rank + 1]))


class Memory:
    """Pages of all groups on all cp ranks."""

    def __init__(self, layout: str, cache: str, page_tokens: int) -> None:
        self.layout = parse_layout(layout)
        self.cache = make_cache(cache)
        self.page_tokens = page_tokens
        self.geometry = PageGeometry(self.layout, self.cache, page_tokens)
        self.extents = {part.group: part.extent for part in self.cache.components}
        self.cells: dict[tuple[str, int, int, int], int] = {}
        """By group, rank, page and offset."""

    def run(self, batch: ScheduledBatch, known: dict[int, list[int]]) -> None:
        """Copies pages, then checks each work's context and writes its tokens; entries by sequence."""
        for copy in batch.copies:
            for rank, offset in product(range(self.layout.size("cp")), range(self.page_tokens)):
                entry = self.cells.get((copy.group, rank, copy.source, offset), JUNK)
                self.cells[copy.group, rank, copy.target, offset] = entry
        for work in batch.sequences:
            # Where an answer forked, the draft's entry before is written again.
            start = work.start - (work.hidden is not None)
            self.check(work.pages, known[work.sequence][:start], work.prompt_tokens, str(work.sequence))
        for work in batch.sequences:
            self._write_work(work, known[work.sequence])

    def check(self, pages: PageTables, wanted: list[int], prompt_tokens: int, name: str) -> None:
        """Asserts that the pages hold these entries, from token 0 on, as far as anything looks at them."""
        for group, extent in self.extents.items():
            if not extent.has_tokens:
                stored = self.cells.get((group, 0, pages[group][0], 0))
                assert not wanted or stored == wanted[-1], (
                    f"{name}: state of {len(wanted)} tokens is not there"
                )
                continue
            first = max(0, len(wanted) - extent.window) if isinstance(extent, Window) else 0
            for token in range(first, len(wanted)):
                stored = self.cells.get(self._cell(group, pages, token, prompt_tokens))
                assert stored == wanted[token], (
                    f"{name}: {group} of token {token} of {len(wanted)} is not there"
                )

    def write(self, pages: PageTables, start: int, new: list[int], prompt_tokens: int) -> None:
        """Puts entries of tokens from `start` on into pages; only the last window of windowed groups."""
        for group, extent in self.extents.items():
            if not extent.has_tokens:
                self.cells[group, 0, pages[group][0], 0] = new[-1] if new else JUNK
                continue
            stop = start + len(new)
            first = max(start, stop - extent.window) if isinstance(extent, Window) else start
            for token in range(first, stop):
                self.cells[self._cell(group, pages, token, prompt_tokens)] = new[token - start]

    def _write_work(self, work: ScheduledSequence, wanted: list[int]) -> None:
        stop = work.start + len(work.tokens)
        for group, extent in self.extents.items():
            if not extent.has_tokens:
                self.cells[group, 0, work.pages[group][0], 0] = wanted[stop - 1]
                continue
            for token in range(work.start - (work.hidden is not None), stop):
                self.cells[self._cell(group, work.pages, token, work.prompt_tokens)] = wanted[token]
            # A draft that guesses on stores what nobody may read.
            for token in range(stop, stop + work.num_guesses - 1 if work.num_samples else stop):
                self.cells[self._cell(group, work.pages, token, work.prompt_tokens)] = JUNK

    def _cell(
        self, group: str, pages: PageTables, token: int, prompt_tokens: int
    ) -> tuple[str, int, int, int]:
        # Rounded up, so that few lists are worked out.
        num_tokens = max(64, -(-(token + 1) // 64) * 64)
        rank, slot = spots(self.layout, self.page_tokens, num_tokens, prompt_tokens)[token]
        return group, rank, pages[group][slot // self.page_tokens], slot % self.page_tokens
