"""The KV cache manager: page pools and cached prefixes of one dp group.

Every page is allocated and freed here, so that page tables, reference counts and prefix pins change together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from baton.engine.commands import PageCopy
from baton.engine.pages import PageGeometry, PagePool
from baton.engine.prefix_cache import PrefixCache, PrefixMatch
from baton.engine.sequence import Sequence, SequenceRole, SequenceStatus
from baton.errors import ConfigError

PLACEHOLDER = 0
"""Fills a table where no page is needed any more; any valid page id will do."""


class KVCacheManager:
    """The pages of one dp group."""

    def __init__(self, geometry: PageGeometry, num_pages: Mapping[str, int]) -> None:
        if set(num_pages) != set(geometry.groups) or any(count < 1 for count in num_pages.values()):
            raise ConfigError(
                f"pools of {dict(num_pages)} pages; give each of {', '.join(geometry.groups)} at least one"
            )
        self.geometry = geometry
        self.pools = {group: PagePool(num_pages[group]) for group in geometry.groups}
        self.prefixes: PrefixCache | None = None
        if geometry.prefix_unit_tokens is not None:
            self.prefixes = PrefixCache(
                self.pools,
                unit_tokens=geometry.prefix_unit_tokens,
                unit_pages=geometry.prefix_unit_pages,
                num_lookahead=geometry.num_lookahead,
            )

    def allocate(self, sequence: Sequence, *, num_reused_max: int, is_windowed_whole: bool) -> bool:
        """Gives a sequence pages for all known tokens, cached ones first; False: there is no room.

        Windowed groups grow chunk by chunk unless `is_windowed_whole`.
        """
        match = self._match(sequence, num_reused_max)
        num_wanted: dict[str, int] = {}
        for group in self.pools:
            is_later = self.geometry.is_windowed(group) and not is_windowed_whole
            num_pages = self.geometry.num_pages(group, sequence.num_tokens, sequence.num_prompt)
            num_wanted[group] = (0 if is_later else num_pages) - len(match.pages[group])
        return self._assign(sequence, match, num_wanted, dict.fromkeys(self.pools, 0))

    def allocate_for_receive(self, sequence: Sequence) -> bool:
        """Gives a sequence the pages that its prompt is received into; False: there is no room."""
        match = self._match(sequence, sequence.num_prompt)
        num_prompt = sequence.num_prompt
        num_skipped = {
            group: self.geometry.num_out_of_window(group, num_prompt, num_prompt) for group in self.pools
        }
        num_wanted = {
            group: self.geometry.num_pages(group, num_prompt, num_prompt)
            - max(num_skipped[group], len(match.pages[group]))
            for group in self.pools
        }
        return self._assign(sequence, match, num_wanted, num_skipped)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends a sequence's tables to this many tokens; False: there is no room."""
        pages = sequence.pages
        num_wanted = {
            group: max(0, self.geometry.num_pages(group, num_tokens, sequence.num_prompt) - len(pages[group]))
            for group in self.pools
        }
        if not any(num_wanted.values()):
            return True
        taken = self._take(num_wanted)
        if taken is None:
            return False
        for group, ids in taken.items():
            pages[group].extend(ids)
        return True

    def free_out_of_window(self, sequence: Sequence) -> None:
        """Frees the pages that lie before a sequence's windows."""
        for group in self.pools:
            passed = self.geometry.num_out_of_window(group, sequence.num_computed, sequence.num_prompt)
            before = sequence.num_freed[group]
            if passed > before:
                self.pools[group].free(sequence.pages[group][before:passed])
                sequence.num_freed[group] = passed

    def cache_prefix(self, sequence: Sequence) -> None:
        """Caches the computed whole units of a sequence, which keeps them pinned."""
        if self.prefixes is None or sequence.prompt_embeddings is not None or not sequence.pages:
            return
        # The draft entry of a fork's last token is still the parent's.
        num_computed = sequence.num_computed - (sequence.draft_hidden is not None)
        tokens = sequence.tokens(0, num_computed + self.geometry.num_lookahead)
        node = self.prefixes.pin(self.prefixes.insert(tokens, sequence.pages, sequence.salt))
        self.prefixes.unpin(sequence.prefix_node)
        sequence.prefix_node = node

    def free(self, sequence: Sequence) -> None:
        """Takes all pages from a sequence."""
        for group in sequence.pages:
            self.pools[group].free(sequence.held_pages(group))
        if self.prefixes is not None:
            self.prefixes.unpin(sequence.prefix_node)
        sequence.pages, sequence.num_freed, sequence.prefix_node = {}, {}, None
        sequence.num_computed = sequence.num_scheduled = 0

    def fork(self, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        """Gives a child its parent's computed tokens: settled pages are shared, others copied; None: no room.

        Both ends of a copy are held until `finish_copies`, whatever becomes of the two sequences.
        """
        num_computed, prompt = parent.num_computed, parent.num_prompt
        cuts: dict[str, tuple[int, int]] = {}
        for group in self.pools:
            # The last draft entry depends on the parent's first token; the child needs its own.
            num_settled = self.geometry.num_settled(group, num_computed - self.geometry.num_lookahead, prompt)
            cuts[group] = (num_settled, self.geometry.num_pages(group, num_computed, prompt))
        taken = self._take({group: stop - settled for group, (settled, stop) in cuts.items()})
        if taken is None:
            return None
        copies: list[PageCopy] = []
        for group, (settled, stop) in cuts.items():
            table = parent.pages[group]
            self.pools[group].hold(table[parent.num_freed[group] : settled])
            child.pages[group] = table[:settled] + taken[group]
            pairs = zip(table[settled:stop], taken[group], strict=True)
            copies += [PageCopy(group, source, target) for source, target in pairs]
        for copy in copies:
            self.pools[copy.group].hold((copy.source, copy.target))
        child.num_freed = dict(parent.num_freed)
        child.num_computed = child.num_scheduled = child.num_cached = num_computed
        if self.prefixes is not None:
            # The child pins only units that lie entirely in shared pages.
            num_shared, node = min(settled for settled, _ in cuts.values()), parent.prefix_node
            while node is not None and node.depth * self.prefixes.unit_pages > num_shared:
                node = node.parent
            child.prefix_node = self.prefixes.pin(node)
        return copies

    def finish_copies(self, copies: Iterable[PageCopy]) -> None:
        """Drops the references of copies that are done or cancelled."""
        for copy in copies:
            self.pools[copy.group].free((copy.source, copy.target))

    def num_available(self, group: str) -> int:
        """Upper bound of the pages that are free or could be evicted."""
        num_idle = self.prefixes.num_idle * self.prefixes.unit_pages if self.prefixes else 0
        return self.pools[group].num_free + num_idle

    def check_integrity(self, sequences: Iterable[Sequence], copies: Iterable[PageCopy]) -> None:
        """Raises AssertionError unless every page is accounted for by these sequences and page copies."""
        sequences = list(sequences)
        for sequence in sequences:
            if sequence.status is not SequenceStatus.WAITING:
                self._check_tables(sequence)
        self._check_references(sequences, copies)
        self._check_sharing(sequences)

    def _match(self, sequence: Sequence, num_reused_max: int) -> PrefixMatch:
        if self.prefixes is None or sequence.prompt_embeddings is not None:
            return PrefixMatch(0, {group: [] for group in self.pools}, None)
        tokens = sequence.tokens(0, num_reused_max + self.geometry.num_lookahead)
        return self.prefixes.lookup(tokens, sequence.salt)

    def _assign(
        self,
        sequence: Sequence,
        match: PrefixMatch,
        num_wanted: Mapping[str, int],
        num_skipped: dict[str, int],
    ) -> bool:
        """Gives a sequence the matched prefix and new pages behind it; False: there is no room."""
        # The match is held first, so that taking pages cannot evict it.
        if self.prefixes is not None:
            self.prefixes.pin(match.node)
        for group, ids in match.pages.items():
            self.pools[group].hold(ids)
        taken = self._take(num_wanted)
        if taken is None:
            for group, ids in match.pages.items():
                self.pools[group].free(ids)
            if self.prefixes is not None:
                self.prefixes.unpin(match.node)
            return False
        sequence.pages = {
            group: [PLACEHOLDER] * num_skipped[group] + match.pages[group] + ids
            for group, ids in taken.items()
        }
        sequence.num_freed, sequence.prefix_node = num_skipped, match.node
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached = match.num_tokens
        return True

    def _take(self, num_wanted: Mapping[str, int]) -> dict[str, list[int]] | None:
        """This many pages of every group, or none at all; evicts cached prefixes as needed."""
        if any(count > self.num_available(group) for group, count in num_wanted.items()):
            return None
        for group, count in num_wanted.items():
            while self.pools[group].num_free < count:
                # A sequence may hold pages of an idle unit too, so that evicting it frees fewer.
                if self.prefixes is None or not self.prefixes.evict():
                    return None
        return {group: self.pools[group].allocate(count) for group, count in num_wanted.items()}

    def _check_tables(self, sequence: Sequence) -> None:
        name = f"sequence {sequence.number} ({sequence.status.value})"
        computed, num_prompt = sequence.num_computed, sequence.num_prompt
        assert set(sequence.pages) == set(self.pools), f"{name} has tables of {sorted(sequence.pages)}"
        for group, ids in sequence.pages.items():
            wanted = self.geometry.num_pages(group, sequence.num_scheduled, num_prompt)
            assert len(ids) >= wanted, f"{name} has {len(ids)} pages of {group}, its tokens need {wanted}"
            # A prompt that is received gets pages for its last window only.
            is_receiving = sequence.role is SequenceRole.TARGET and sequence.is_leased
            num_seen = max(computed, num_prompt if is_receiving else 0)
            num_freed = sequence.num_freed[group]
            num_freed_max = self.geometry.num_out_of_window(group, num_seen, num_prompt)
            assert num_freed <= num_freed_max, (
                f"{name} freed {num_freed} pages of {group}, its window begins at {num_freed_max}"
            )

    def _check_references(self, sequences: Iterable[Sequence], copies: Iterable[PageCopy]) -> None:
        """Pools count one reference for each table, cached unit and copy that has a page."""
        references, pins = Counter[tuple[str, int]](), Counter[int]()
        for sequence in sequences:
            for group in sequence.pages:
                references.update((group, page) for page in sequence.held_pages(group))
            if sequence.prefix_node is not None:
                pins[id(sequence.prefix_node)] += 1
        for copy in copies:
            references.update(((copy.group, copy.source), (copy.group, copy.target)))
        if self.prefixes is not None:
            self.prefixes.check_integrity()
            for node in self.prefixes.nodes():
                references.update((group, page) for group, ids in node.pages.items() for page in ids)
                num_pins = pins.pop(id(node), 0)
                assert node.num_pins == num_pins, (
                    f"unit {node.depth} has {node.num_pins} pins, {num_pins} sequences pin it"
                )
        assert not pins, "a sequence pins a unit that is no longer cached"
        for group, pool in self.pools.items():
            pool.check_integrity()
            for page in range(pool.num_pages):
                actual, counted = references[group, page], pool.num_refs(page)
                assert actual == counted, (
                    f"page {page} of {group} has {actual} references, {counted} are counted"
                )

    def _check_sharing(self, sequences: Iterable[Sequence]) -> None:
        """A page in several tables is at the same index in each, and none of them writes to it."""
        places: dict[tuple[str, int], tuple[int, int, bool]] = {}
        for sequence in sequences:
            for group in sequence.pages:
                num_settled = self.geometry.num_settled(group, sequence.num_computed, sequence.num_prompt)
                first = sequence.num_freed[group]
                for index, page in enumerate(sequence.held_pages(group), start=first):
                    name = f"page {page} of {group}, entry {index} of sequence {sequence.number},"
                    place = (sequence.number, index, index < num_settled)
                    other = places.setdefault((group, page), place)
                    is_shared = self.pools[group].is_cached(page)
                    if other is not place:
                        is_shared = True
                        assert other[0] != sequence.number, f"{name} is also its entry {other[1]}"
                        assert other[1] == index, f"{name} is entry {other[1]} of sequence {other[0]}"
                    assert not is_shared or (place[2] and other[2]), f"{name} is shared and still written"
