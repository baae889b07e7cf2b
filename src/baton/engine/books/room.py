"""Pages for sequences: pools and cached prefixes of one dp group behind one door.

Every way in and out of a pool goes through here, so that tables, holders and pins change together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.engine.books.pages import PageCounts, PagePool
from baton.engine.books.prefix import Match, Node, Prefix, Unit
from baton.engine.books.sequence import Holding, Sequence
from baton.engine.books.shares import Shares
from baton.engine.commands import PageCopy
from baton.errors import ConfigError

PLACEHOLDER = 0
"""Stands in a table where no page is needed any more: any id that exists will do."""


class Room:
    """The pages of one dp group."""

    def __init__(self, shares: Shares, num_pages: Mapping[str, int]) -> None:
        if set(num_pages) != set(shares.groups) or any(count < 1 for count in num_pages.values()):
            raise ConfigError(
                f"pools of {dict(num_pages)} pages; give each of {', '.join(shares.groups)} at least one"
            )
        self.shares = shares
        self.pools = {group: PagePool(num_pages[group]) for group in shares.groups}
        unit = shares.prefix_unit_tokens
        self.prefix = None
        if unit is not None:
            self.prefix = Prefix(Unit(unit, shares.unit_pages, shares.num_ahead), self.pools)

    def start(self, sequence: Sequence, *, num_reused_max: int, is_windowed_whole: bool) -> bool:
        """Gives a sequence the pages of all its known tokens, cached ones first; False: there is no room.

        Windowed groups get theirs chunk by chunk unless they are asked for whole.
        """
        match = self._match(sequence, num_reused_max)
        num_tokens, prompt = sequence.num_tokens, sequence.num_prompt
        wanted: dict[str, int] = {}
        for group in self.shares.groups:
            is_later = self.shares.is_windowed(group) and not is_windowed_whole
            total = 0 if is_later else self.shares.num_pages(group, num_tokens, prompt)
            wanted[group] = total - len(match.pages[group])
        self._join(match)
        found = self._take(wanted)
        if found is None:
            self._part(match)
            return False
        pages = {group: match.pages[group] + found[group] for group in found}
        sequence.holding = Holding(pages, dict.fromkeys(pages, 0), match.pin)
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached = match.num_tokens
        return True

    def receive(self, sequence: Sequence) -> bool:
        """Gives a sequence the pages that its prompt is to arrive in; False: there is no room."""
        match = self._match(sequence, sequence.num_prompt)
        num_prompt = sequence.num_prompt
        passed = {group: self.shares.num_passed(group, num_prompt, num_prompt) for group in self.pools}
        wanted = {
            group: self.shares.num_pages(group, num_prompt, num_prompt)
            - max(passed[group], len(match.pages[group]))
            for group in self.pools
        }
        self._join(match)
        found = self._take(wanted)
        if found is None:
            self._part(match)
            return False
        pages = {
            group: [PLACEHOLDER] * passed[group] + match.pages[group] + found[group] for group in self.pools
        }
        sequence.holding = Holding(pages, passed, match.pin)
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached = match.num_tokens
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes a sequence's tables long enough for so many tokens; False: there is no room."""
        pages = sequence.pages
        wanted = {
            group: max(0, self.shares.num_pages(group, num_tokens, sequence.num_prompt) - len(pages[group]))
            for group in self.pools
        }
        if not any(wanted.values()):
            return True
        found = self._take(wanted)
        if found is None:
            return False
        for group, ids in found.items():
            pages[group].extend(ids)
        return True

    def trim(self, sequence: Sequence) -> None:
        """Gives back the pages that lie before a sequence's windows."""
        holding = sequence.holding
        for group in self.pools:
            passed = self.shares.num_passed(group, sequence.num_computed, sequence.num_prompt)
            before = holding.num_passed[group]
            if passed > before:
                self.pools[group].free(holding.pages[group][before:passed])
                holding.num_passed[group] = passed

    def remember(self, sequence: Sequence) -> None:
        """Caches the whole units of a sequence that are computed; the sequence keeps them pinned."""
        if self.prefix is None or sequence.asked.embeddings is not None or not sequence.pages:
            return
        # The last entry of a fork that was not computed yet is its parent's.
        num_computed = sequence.num_computed - (sequence.ahead.hidden is not None)
        tokens = sequence.tokens(0, num_computed + self.shares.num_ahead)
        node = self.prefix.pin(self.prefix.insert(tokens, sequence.pages, sequence.asked.salt))
        self.prefix.unpin(sequence.holding.pin)
        sequence.holding.pin = node

    def give_back(self, sequence: Sequence) -> None:
        """Takes a sequence's pages from it."""
        holding = sequence.holding
        for group in holding.pages:
            self.pools[group].free(holding.held(group))
        if self.prefix is not None:
            self.prefix.unpin(holding.pin)
        sequence.holding = Holding()
        sequence.num_computed = sequence.num_scheduled = 0

    def fork(self, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        """Gives a child its parent's computed tokens: settled pages are shared, others copied; None: no room.

        Both ends of a copy are held until `end_copies`, whatever becomes of the two.
        """
        num_computed, prompt = parent.num_computed, parent.num_prompt
        held = parent.holding
        cuts: dict[str, tuple[int, int]] = {}
        for group in self.pools:
            # A draft saw the parent's first token at the last place: there the child has an entry of its own.
            settled = self.shares.num_settled(group, num_computed - self.shares.num_ahead, prompt)
            cuts[group] = (settled, self.shares.num_pages(group, num_computed, prompt))
        found = self._take({group: last - first for group, (first, last) in cuts.items()})
        if found is None:
            return None
        copies: list[PageCopy] = []
        pages: dict[str, list[int]] = {}
        for group, (settled, last) in cuts.items():
            self.pools[group].hold(held.pages[group][held.num_passed[group] : settled])
            pages[group] = held.pages[group][:settled] + found[group]
            pairs = zip(held.pages[group][settled:last], found[group], strict=True)
            copies += [PageCopy(group, source, target) for source, target in pairs]
        for copy in copies:
            self.pools[copy.group].hold((copy.source, copy.target))
        num_shared = min(settled for settled, _ in cuts.values())
        child.holding = Holding(pages, dict(held.num_passed), self._pinned(held.pin, num_shared))
        child.num_computed = child.num_scheduled = num_computed
        child.num_cached = num_computed
        return copies

    def end_copies(self, copies: Iterable[PageCopy]) -> None:
        """Lets go of both ends of copies that are through, or will not be made."""
        for copy in copies:
            self.pools[copy.group].free((copy.source, copy.target))

    def num_available(self, group: str) -> int:
        """Pages that are free or could be, at most."""
        num_idle = self.prefix.num_idle * self.prefix.unit.num_pages if self.prefix else 0
        return self.pools[group].num_free + num_idle

    def counts(self) -> dict[str, PageCounts]:
        """How the pages of each group are used."""
        return {group: pool.counts() for group, pool in self.pools.items()}

    def _pinned(self, node: Node | None, num_pages: int) -> Node | None:
        """Pins what lies in the first pages of a table; the rest of a chain is not its holder's."""
        if self.prefix is None:
            return None
        while node is not None and node.depth * self.prefix.unit.num_pages > num_pages:
            node = node.parent
        return self.prefix.pin(node)

    def _match(self, sequence: Sequence, num_reused_max: int) -> Match:
        if self.prefix is None or sequence.asked.embeddings is not None:
            return Match(0, {group: [] for group in self.pools}, None)
        tokens = sequence.tokens(0, num_reused_max + self.shares.num_ahead)
        return self.prefix.lookup(tokens, sequence.asked.salt)

    def _join(self, match: Match) -> None:
        if self.prefix is not None:
            self.prefix.pin(match.pin)
        for group, ids in match.pages.items():
            self.pools[group].hold(ids)

    def _part(self, match: Match) -> None:
        for group, ids in match.pages.items():
            self.pools[group].free(ids)
        if self.prefix is not None:
            self.prefix.unpin(match.pin)

    def _take(self, wanted: Mapping[str, int]) -> dict[str, list[int]] | None:
        """So many pages of every group, or of none; cached prefixes give way."""
        if any(count > self.num_available(group) for group, count in wanted.items()):
            return None
        for group, count in wanted.items():
            while self.pools[group].num_free < count:
                # Idle units may share pages with a sequence, so that giving them up frees fewer.
                if self.prefix is None or not self.prefix.evict():
                    return None
        return {group: self.pools[group].allocate(count) for group, count in wanted.items()}
