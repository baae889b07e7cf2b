"""Cached prefixes: a tree of token units, found by chained hashes.

A unit is the smallest number of tokens that is whole pages on every rank. A node stands for one unit after
one particular prefix, which is its parent's. Its key is a hash of the parent's key, the tokens and the salt.
Lookup compares tokens, parent and salt too, so a hash collision costs a miss and nothing else.

The entries of a unit may depend on tokens beyond it: a draft layer reads one token ahead. These tokens are
part of the unit's content, so a hit always returns what would have been computed.

A sequence pins the last node of the chain that its pages form. A node is in use if it is pinned or has a
child in use. Other nodes can be evicted: leaves first, least recently used first.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import xxhash

from baton.engine.commands import PageTables
from baton.engine.pages import PagePool

TOKEN_BYTES = 8
NUM_STALE_MAX = 64
"""Entries that the eviction heap may have beyond twice the number of nodes before it is rebuilt."""


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One unit of tokens after one prefix, and the pages that hold it."""

    key: bytes
    parent: PrefixNode | None
    tokens: bytes
    salt: str
    pages: PageTables
    depth: int
    """Units up to and including this one."""
    num_pins: int = 0
    num_children: int = 0
    num_users: int = 0
    """Pins, and children in use."""
    used_at: int = 0
    """Tick at which it was last inserted or released."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A cached prefix: its length, its pages and the node to pin."""

    num_tokens: int
    pages: PageTables
    node: PrefixNode | None


class PrefixCache:
    """The cached prefixes of one dp group; their pages are referenced in its pools."""

    def __init__(
        self,
        pools: Mapping[str, PagePool],
        *,
        unit_tokens: int,
        unit_pages: int,
        num_lookahead: int = 0,
        digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
    ) -> None:
        self.unit_tokens = unit_tokens
        self.unit_pages = unit_pages
        """Pages of each group that hold a unit."""
        self._num_lookahead = num_lookahead
        self._pools = pools
        self._digest = digest
        self._nodes: dict[bytes, PrefixNode] = {}
        self._evictable: list[tuple[int, int, PrefixNode]] = []
        """A heap of nodes that were unused leaves when they were pushed, least recently used first."""
        self._ticks = count(1)
        self.num_idle = 0
        """Nodes that are not in use."""

    def lookup(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """The longest cached prefix of these tokens, in whole units."""
        pages: PageTables = {group: [] for group in self._pools}
        last: PrefixNode | None = None
        for key, unit in self._units(tokens, salt):
            node = self._find(key, last, unit, salt)
            if node is None:
                break
            last = node
            for group, ids in node.pages.items():
                pages[group].extend(ids)
        return PrefixMatch(last.depth * self.unit_tokens if last else 0, pages, last)

    def insert(
        self, tokens: Sequence[int], pages: Mapping[str, Sequence[int]], salt: str = ""
    ) -> PrefixNode | None:
        """Caches the whole units of tokens that lie in these pages; returns the node for their holder to pin.

        A unit that is already cached keeps its own pages. From there on the holder pins nothing, because
        otherwise both copies would have to stay.
        """
        last: PrefixNode | None = None
        own: PrefixNode | None = None
        for index, (key, unit) in enumerate(self._units(tokens, salt)):
            first, stop = index * self.unit_pages, (index + 1) * self.unit_pages
            table = {group: list(ids[first:stop]) for group, ids in pages.items()}
            node = self._find(key, last, unit, salt)
            if node is None:
                # Answers that forked inside a unit share its first pages; only one of them can cache it.
                is_taken = any(self._pools[group].is_cached(page) for group in table for page in table[group])
                if is_taken or key in self._nodes:
                    break
                node = self._add(PrefixNode(key, last, unit, salt, table, index + 1))
            if own is last and node.pages == table:
                own = node
            last = node
        return own

    def pin(self, node: PrefixNode | None) -> PrefixNode | None:
        """Keeps a node and its ancestors; returns what to unpin."""
        if node is not None:
            node.num_pins += 1
            self._add_user(node)
        return node

    def unpin(self, node: PrefixNode | None) -> None:
        """Undoes one pin and marks the chain as just used."""
        if node is None:
            return
        assert node.num_pins, f"unit {node.depth} is unpinned, but it has no pin"
        node.num_pins -= 1
        self._drop_user(node)

    def evict(self) -> bool:
        """Evicts the least recently used unit that is not in use; False if there is none."""
        while self._evictable:
            used_at, _, node = heapq.heappop(self._evictable)
            is_current = self._nodes.get(node.key) is node and node.used_at == used_at
            if not is_current or node.num_users or node.num_children:
                continue
            del self._nodes[node.key]
            self.num_idle -= 1
            for group, ids in node.pages.items():
                self._pools[group].uncache(ids)
            if node.parent is not None:
                node.parent.num_children -= 1
                self._push_evictable(node.parent)
            return True
        return False

    def nodes(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tree is whole and its counts are right."""
        children: dict[bytes, int] = {}
        users = {node.key: node.num_pins for node in self.nodes()}
        seen: set[tuple[str, int]] = set()
        for node in sorted(self.nodes(), key=lambda node: -node.depth):
            assert self._nodes[node.key] is node, f"unit {node.depth} is filed under another key"
            num_tokens = self.unit_tokens + self._num_lookahead
            assert len(node.tokens) == num_tokens * TOKEN_BYTES, f"unit {node.depth} is not whole"
            parent = node.parent
            assert node.depth == (parent.depth if parent else 0) + 1, f"unit {node.depth} has a wrong depth"
            assert users[node.key] == node.num_users, (
                f"unit {node.depth} has {users[node.key]} users, {node.num_users} are counted"
            )
            if parent is not None:
                assert self._nodes.get(parent.key) is parent, f"unit {node.depth} lost its parent"
                children[parent.key] = children.get(parent.key, 0) + 1
                users[parent.key] += bool(node.num_users)
            for group, ids in node.pages.items():
                assert len(ids) == self.unit_pages, f"unit {node.depth} has {len(ids)} pages of {group}"
                for page in ids:
                    assert (group, page) not in seen, f"page {page} of {group} is in two units"
                    assert self._pools[group].is_cached(page), f"page {page} of {group} is not marked cached"
                    seen.add((group, page))
        for node in self.nodes():
            num_children = children.get(node.key, 0)
            assert num_children == node.num_children, f"unit {node.depth} has {num_children} children"
        num_idle = sum(1 for node in self.nodes() if not node.num_users)
        assert num_idle == self.num_idle, f"{num_idle} units are idle, {self.num_idle} are counted"

    def _units(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, bytes]]:
        """Key and content of each whole unit of tokens."""
        raw, tail = array("q", tokens).tobytes(), salt.encode()
        step, lookahead = self.unit_tokens * TOKEN_BYTES, self._num_lookahead * TOKEN_BYTES
        key = b""
        for start, stop in pairwise(range(0, len(raw) + 1 - lookahead, step)):
            unit = raw[start : stop + lookahead]
            key = self._digest(key + unit + tail)
            yield key, unit

    def _find(self, key: bytes, parent: PrefixNode | None, unit: bytes, salt: str) -> PrefixNode | None:
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or (node.tokens, node.salt) != (unit, salt):
            return None
        return node

    def _add(self, node: PrefixNode) -> PrefixNode:
        self._nodes[node.key] = node
        node.used_at = next(self._ticks)
        self.num_idle += 1
        if node.parent is not None:
            node.parent.num_children += 1
        for group, ids in node.pages.items():
            self._pools[group].cache(ids)
        self._push_evictable(node)
        return node

    def _add_user(self, node: PrefixNode) -> None:
        at: PrefixNode | None = node
        while at is not None:
            at.num_users += 1
            if at.num_users > 1:
                return
            self.num_idle -= 1
            at = at.parent

    def _drop_user(self, node: PrefixNode) -> None:
        at: PrefixNode | None = node
        while at is not None:
            at.num_users -= 1
            if at.num_users:
                return
            self.num_idle += 1
            at.used_at = next(self._ticks)
            self._push_evictable(at)
            at = at.parent

    def _push_evictable(self, node: PrefixNode) -> None:
        if node.num_users or node.num_children:
            return
        if len(self._evictable) > 2 * len(self._nodes) + NUM_STALE_MAX:
            leaves = [leaf for leaf in self.nodes() if not leaf.num_users and not leaf.num_children]
            self._evictable = [(leaf.used_at, next(self._ticks), leaf) for leaf in leaves]
            heapq.heapify(self._evictable)
            return
        heapq.heappush(self._evictable, (node.used_at, next(self._ticks), node))
