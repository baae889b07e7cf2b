"""Cached prefixes: a tree of units of tokens, found by chained hashes.

Theory. A unit is the smallest number of tokens that is whole pages on every rank. A node stands for one unit
after one particular prefix, its parent's. Its key is a hash of the parent's key, the tokens and the salt; the
tokens, the parent and the salt are compared too, so a collision costs a miss and nothing else.

The entries of a unit may have been computed with tokens beyond it: those of a draft see one further. These
tokens count as part of it, so that what is found is what would be computed.

A sequence whose pages a chain consists of pins its last node. A node is in use if it is pinned or has a child
that is; the others can be given up, leaves first, the least recently used of them before the rest.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import xxhash

from baton.engine.books.pages import PagePool
from baton.engine.commands import PageTables

TOKEN_BYTES = 8
NUM_STALE = 64
"""Entries that the heap of idle nodes may have beyond twice the nodes before it is made anew."""


@dataclass(eq=False, slots=True)
class Node:
    """One unit of tokens after one prefix, and the pages that hold it."""

    key: bytes
    parent: Node | None
    tokens: bytes
    salt: str
    pages: PageTables
    depth: int
    """Units up to and with this one."""
    num_pins: int = 0
    num_children: int = 0
    num_users: int = 0
    """Pins, and children in use."""
    used_at: int = 0
    """Turn at which it was last made or let go."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What is cached or not as a whole."""

    num_tokens: int
    num_pages: int
    """Of each group."""
    num_ahead: int = 0
    """Tokens after it that its entries were computed with."""


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: its length, its pages and the node to pin."""

    num_tokens: int
    pages: PageTables
    pin: Node | None


class Prefix:
    """The cached prefixes of one dp group; pages are held in its pools."""

    def __init__(
        self,
        unit: Unit,
        pools: Mapping[str, PagePool],
        digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
    ) -> None:
        self.unit = unit
        self._pools = pools
        self._digest = digest
        self._nodes: dict[bytes, Node] = {}
        self._idle: list[tuple[int, int, Node]] = []
        """A heap of nodes that were leaves out of use when they came here, least recently used first."""
        self._ticks = count(1)
        self.num_idle = 0
        """Nodes that are not in use."""

    @property
    def num_nodes(self) -> int:
        """Units that are cached."""
        return len(self._nodes)

    def lookup(self, tokens: Sequence[int], salt: str = "") -> Match:
        """The longest cached prefix of these tokens, in whole units."""
        pages: PageTables = {group: [] for group in self._pools}
        last: Node | None = None
        for key, unit in self._units(tokens, salt):
            node = self._found(key, last, unit, salt)
            if node is None:
                break
            last = node
            for group, ids in node.pages.items():
                pages[group].extend(ids)
        return Match(last.depth * self.unit.num_tokens if last else 0, pages, last)

    def insert(
        self, tokens: Sequence[int], pages: Mapping[str, Sequence[int]], salt: str = ""
    ) -> Node | None:
        """Caches the whole units of tokens that lie in these pages; the answer is what their holder pins.

        A unit that is cached already stays where it is: its twin's pages are not taken, and from there on
        the holder pins nothing, or both would have to stay.
        """
        last: Node | None = None
        own: Node | None = None
        for index, (key, unit) in enumerate(self._units(tokens, salt)):
            first, last_page = index * self.unit.num_pages, (index + 1) * self.unit.num_pages
            table = {group: list(ids[first:last_page]) for group, ids in pages.items()}
            node = self._found(key, last, unit, salt)
            if node is None:
                # Answers that forked inside of a unit share its first pages; only one of them can cache it.
                is_taken = any(self._pools[group].is_cached(page) for group in table for page in table[group])
                if is_taken or key in self._nodes:
                    break
                node = self._added(Node(key, last, unit, salt, table, index + 1))
            if own is last and node.pages == table:
                own = node
            last = node
        return own

    def pin(self, node: Node | None) -> Node | None:
        """Keeps a node and what it builds on; the answer is what to unpin."""
        if node is not None:
            node.num_pins += 1
            self._use(node)
        return node

    def unpin(self, node: Node | None) -> None:
        """Undoes one pin: the chain counts as used now."""
        if node is None:
            return
        assert node.num_pins, f"unit {node.depth} is unpinned, but nobody pins it"
        node.num_pins -= 1
        self._leave(node)

    def evict(self) -> bool:
        """Gives up the least recently used unit that nobody uses; False if there is none."""
        while self._idle:
            used_at, _, node = heapq.heappop(self._idle)
            is_current = self._nodes.get(node.key) is node and node.used_at == used_at
            if not is_current or node.num_users or node.num_children:
                continue
            del self._nodes[node.key]
            self.num_idle -= 1
            for group, ids in node.pages.items():
                self._pools[group].uncache(ids)
            if node.parent is not None:
                node.parent.num_children -= 1
                self._offer(node.parent)
            return True
        return False

    def nodes(self) -> Iterator[Node]:
        """Every cached unit."""
        return iter(self._nodes.values())

    def check(self) -> None:
        """Raises AssertionError unless the tree is whole and its counts are right."""
        children: dict[bytes, int] = {}
        users = {node.key: node.num_pins for node in self.nodes()}
        seen: set[tuple[str, int]] = set()
        for node in sorted(self.nodes(), key=lambda node: -node.depth):
            assert self._nodes[node.key] is node, f"unit {node.depth} is filed under another key"
            num_tokens = self.unit.num_tokens + self.unit.num_ahead
            assert len(node.tokens) == num_tokens * TOKEN_BYTES, f"unit {node.depth} is not whole"
            parent = node.parent
            assert node.depth == (parent.depth if parent else 0) + 1, f"unit {node.depth} hangs wrong"
            assert users[node.key] == node.num_users, (
                f"unit {node.depth} has {users[node.key]} users, {node.num_users} are counted"
            )
            if parent is not None:
                assert self._nodes.get(parent.key) is parent, f"unit {node.depth} lost its parent"
                children[parent.key] = children.get(parent.key, 0) + 1
                users[parent.key] += bool(node.num_users)
            for group, ids in node.pages.items():
                assert len(ids) == self.unit.num_pages, f"unit {node.depth} has {len(ids)} pages of {group}"
                for page in ids:
                    assert (group, page) not in seen, f"page {page} of {group} is in two units"
                    assert self._pools[group].is_cached(page), f"page {page} of {group} is not marked cached"
                    seen.add((group, page))
        for node in self.nodes():
            found = children.get(node.key, 0)
            assert found == node.num_children, f"unit {node.depth} has {found} children"
        num_idle = sum(1 for node in self.nodes() if not node.num_users)
        assert num_idle == self.num_idle, f"{num_idle} units are idle, {self.num_idle} are counted"

    def _units(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, bytes]]:
        """Key and content of each whole unit of tokens."""
        raw, tail = array("q", tokens).tobytes(), salt.encode()
        step, ahead = self.unit.num_tokens * TOKEN_BYTES, self.unit.num_ahead * TOKEN_BYTES
        key = b""
        for start, stop in pairwise(range(0, len(raw) + 1 - ahead, step)):
            unit = raw[start : stop + ahead]
            key = self._digest(key + unit + tail)
            yield key, unit

    def _found(self, key: bytes, parent: Node | None, unit: bytes, salt: str) -> Node | None:
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or (node.tokens, node.salt) != (unit, salt):
            return None
        return node

    def _added(self, node: Node) -> Node:
        self._nodes[node.key] = node
        node.used_at = next(self._ticks)
        self.num_idle += 1
        if node.parent is not None:
            node.parent.num_children += 1
        for group, ids in node.pages.items():
            self._pools[group].cache(ids)
        self._offer(node)
        return node

    def _use(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.num_users += 1
            if at.num_users > 1:
                return
            self.num_idle -= 1
            at = at.parent

    def _leave(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            at.num_users -= 1
            if at.num_users:
                return
            self.num_idle += 1
            at.used_at = next(self._ticks)
            self._offer(at)
            at = at.parent

    def _offer(self, node: Node) -> None:
        """A node that may be a leaf out of use waits for its turn."""
        if node.num_users or node.num_children:
            return
        if len(self._idle) > 2 * len(self._nodes) + NUM_STALE:
            leaves = [leaf for leaf in self.nodes() if not leaf.num_users and not leaf.num_children]
            self._idle = [(leaf.used_at, next(self._ticks), leaf) for leaf in leaves]
            heapq.heapify(self._idle)
            return
        heapq.heappush(self._idle, (node.used_at, next(self._ticks), node))
