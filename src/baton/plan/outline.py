"""A plan under one prompt: its routes by pair of ranks, each made when first asked for and then kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from baton.errors import ConfigError
from baton.plan.ends import PageTables, PlanRoute, Tables
from baton.plan.ownership import END, Spec
from baton.plan.parts import Known, Part, PromptRoute
from baton.plan.prompt import Chunk, Prompt, check_held
from baton.plan.routes import Plan
from baton.plan.stencils import Cutting, Sheet

Pair: TypeAlias = tuple[int, int]
"""A source rank and a target rank."""

OUTLINES_MAX = 256
PLANS_MAX = 64
KEPT_SPANS_MAX = 1 << 14
"""Of all stencils of a prompt's length together."""
KEPT_MAX = 1 << 10


class Same:
    """A plan as the key of a cache, by identity: comparing two plans walks over all their routes."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.plan is self.plan


@dataclass(frozen=True, slots=True)
class _Index:
    """The routes of a plan by pair, and the pairs of every rank, all in the plan's order."""

    routes: dict[Pair, list[PlanRoute]]
    of_source: dict[int, list[Pair]]
    of_target: dict[int, list[Pair]]


@lru_cache(maxsize=PLANS_MAX)
def _index(same: Same) -> _Index:
    found = _Index({}, {}, {})
    for route in same.plan.routes:
        pair = (route.source, route.target)
        if pair not in found.routes:
            found.routes[pair] = []
            found.of_source.setdefault(route.source, []).append(pair)
            found.of_target.setdefault(route.target, []).append(pair)
        found.routes[pair].append(PlanRoute(same.plan, route))
    return found


class Outline:
    """A plan under one prompt; made by `outline`, which keeps the latest."""

    def __init__(self, plan: Plan, prompt: Prompt) -> None:
        check_held(plan.target, prompt)
        self.plan = plan
        self.prompt = prompt
        self._index = _index(Same(plan))
        self._carried: dict[Pair, tuple[PromptRoute, ...]] = {}
        self._known = Known()
        self._kept: dict[Hashable, Any] = {}
        self._num_spans = 0

    @property
    def whole(self) -> Chunk:
        """The whole prompt as one chunk."""
        return Chunk((0, END), (0, self.prompt.num_tokens))

    @property
    def pairs(self) -> list[Pair]:
        """Every pair that the plan names."""
        return list(self._index.routes)

    def pairs_of_source(self, rank: int) -> list[Pair]:
        """The pairs in which a rank is the source."""
        return self._index.of_source.get(rank, [])

    def pairs_of_target(self, rank: int) -> list[Pair]:
        """The pairs in which a rank is the target."""
        return self._index.of_target.get(rank, [])

    def routes(self, pair: Pair) -> tuple[PromptRoute, ...]:
        """The routes of a pair; none where the plan does not name it."""
        found = self._carried.get(pair)
        if found is None:
            routes = self._index.routes.get(pair, [])
            found = tuple(PromptRoute(route, self.prompt, self._known) for route in routes)
            self._carried[pair] = found
        return found

    def parts(self, tables: Tables, chunk: Chunk, pair: Pair) -> list[Part]:
        """What a pair moves of a chunk; raises ConfigError where that is no chunk of this prompt."""
        self._check(chunk)
        found = (carried.part(tables, chunk) for carried in self.routes(pair))
        return [part for part in found if part is not None]

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `key` stands for, made if it is not there; it must depend on neither tables nor callers."""
        if key not in self._kept:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def cutting(self, chunk: Chunk, pair: Pair, ends: tuple[str, str]) -> Cutting | None:
        """What a pair moves of a chunk from one of `source` and `target` to another, page ids left open.

        None where something changes its element type, or where there is too much of it to be kept.
        """
        key = (pair, chunk.layers, chunk.tokens, ends)
        found: Cutting | None = self.kept(key, lambda: self._cut(chunk, pair, ends))
        return found

    def _cut(self, chunk: Chunk, pair: Pair, ends: tuple[str, str]) -> Cutting | None:
        self._check(chunk)
        if any(carried.fixed.is_converted for carried in self.routes(pair)):
            return None
        sheet: Sheet | None = self.kept((pair, chunk.tokens, ends), lambda: self._sheet(chunk, pair, ends))
        found = None if sheet is None else sheet.cut(chunk.layers)
        if found is not None:
            self._count(sum(len(each) for _, each in found.stencils))
        return found

    def _sheet(self, chunk: Chunk, pair: Pair, ends: tuple[str, str]) -> Sheet | None:
        """All layers of a chunk's tokens."""
        found = Sheet.of(self.parts(self.no_pages, Chunk((0, END), chunk.tokens), pair), *ends)
        if found is not None:
            self._count(found.num_spans)
        return found

    def _count(self, num_spans: int) -> None:
        """So many more are kept; where that is too much, nothing is that was before."""
        self._num_spans += num_spans
        if self._num_spans > KEPT_SPANS_MAX:
            self._kept.clear()
            self._num_spans = 0

    @cached_property
    def no_pages(self) -> Tables:
        """Page tables long enough for any rank, for questions whose answers do not depend on the pages."""
        return Tables(*(_no_pages(spec, self.prompt) for spec in (self.plan.source, self.plan.target)))

    def _check(self, chunk: Chunk) -> None:
        (first, last), (start, stop) = chunk.layers, chunk.tokens
        if not (0 <= first < last and 0 <= start < stop <= self.prompt.num_tokens):
            raise ConfigError(
                f"layers {first} to {last}, tokens {start} to {stop} are no chunk of a prompt of "
                f"{self.prompt.num_tokens} tokens; both ranges have to hold something"
            )


def _no_pages(spec: Spec, prompt: Prompt) -> PageTables:
    zero = np.zeros(1, dtype=np.int64)
    # The last granule counts whole, and is no longer than a page.
    num_pages = prompt.num_tokens // spec.storage.page_tokens + 1
    tables = dict.fromkeys(spec.cache.groups, np.broadcast_to(zero, num_pages))
    return dict.fromkeys(range(spec.layout.num_ranks), tables)


def outline(plan: Plan, prompt: Prompt) -> Outline:
    """A plan under a prompt; asked again for the same two, the same one."""
    return _outline(Same(plan), prompt.num_tokens, tuple(sorted(prompt.held.items())), prompt.offset)


@lru_cache(maxsize=OUTLINES_MAX)
def _outline(same: Same, num_tokens: int, held: tuple[tuple[str, int], ...], offset: int) -> Outline:
    return Outline(same.plan, Prompt(num_tokens, dict(held), offset))
