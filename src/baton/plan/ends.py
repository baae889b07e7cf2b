"""Where a route begins and ends: what holds for every prompt, and is found once for a plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.lowering import Face
from baton.plan.ownership import Spec, box, placements
from baton.plan.ranges import to_ids
from baton.plan.routes import Plan, Route
from baton.plan.storage import Placement
from baton.plan.tokens import Ints, Runs, Stride

PageTables: TypeAlias = Mapping[int, Mapping[str, Ints]]
"""Page ids by rank and group."""

ONE_LAYER: Ints = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Tables:
    """The page tables of both sides, for every rank that takes part."""

    source: PageTables
    target: PageTables


@dataclass(frozen=True)
class End:
    """One rank's end of a route."""

    side: str
    rank: int
    group: str
    at: Placement
    axes: tuple[int, ...]
    layer_offsets: Ints
    """Where the first unit of each of the route's layers begins."""

    @cached_property
    def geometry(self) -> Hashable:
        """Equal where one layer lies alike, whatever the tokens and the pages."""
        at = self.at
        return (at.item_bytes, at.strides.get("token", 0), at.page_entries, at.stride("page"), self.axes)

    def face(self, tables: PageTables, owned: Stride, runs: Runs) -> Face:
        """One layer's end of a chunk's copies, as if the layer began at byte 0."""
        return Face(
            item_bytes=self.at.item_bytes,
            layer_offsets=ONE_LAYER,
            slots=owned.count(runs.starts),
            token_stride=self.at.strides.get("token", 0),
            axes=self.axes,
            page_entries=self.at.page_entries,
            page_stride=self.at.stride("page"),
            table=self._table(tables),
        )

    def pages(self, tables: PageTables, owned: Stride, runs: Runs) -> Ints:
        """The part of the page table that runs lie in; raises ConfigError where it is too short."""
        first = owned.num_below(int(runs.starts[0])) // self.at.page_entries
        last = self.num_pages(owned, runs)
        return self.table(tables, last)[first:last]

    def num_pages(self, owned: Stride, runs: Runs) -> int:
        """How long the page table has to be for runs."""
        return -(-owned.num_below(int(runs.stops[-1])) // self.at.page_entries)

    def table(self, tables: PageTables, num_pages: int) -> Ints:
        """The page table; raises ConfigError where it is too short."""
        table = self._table(tables)
        if num_pages > len(table):
            raise ConfigError(
                f"the page table for group {self.group!r} of {self.side} rank {self.rank} has {len(table)} "
                f"pages, {num_pages} are needed"
            )
        return table

    def _table(self, tables: PageTables) -> Ints:
        try:
            return tables[self.rank][self.group]
        except KeyError:
            raise ConfigError(
                f"no page table for group {self.group!r} of {self.side} rank {self.rank}"
            ) from None


@dataclass(frozen=True)
class PlanRoute:
    """A route with its two ends."""

    plan: Plan
    route: Route

    @cached_property
    def component(self) -> Component:
        """The component that the route carries."""
        return self.plan.target.cache.by_name[self.route.component]

    @cached_property
    def token_class(self) -> Hashable:
        """Equal for routes that carry the same tokens of any prompt."""
        route = self.route
        return (
            self.component.group,
            self.component.extent,
            route.source_share,
            route.target_share,
            route.turns,
        )

    @cached_property
    def layer_ids(self) -> list[int]:
        """The route's layers one by one."""
        return to_ids(self.route.layers)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Units, then the dims inside one."""
        units = self.route.units[1] - self.route.units[0]
        return (units, *(dim.size for dim in self.component.dims))

    @cached_property
    def dtypes(self) -> tuple[str, str]:
        """Element types at the source and at the target."""
        name, source, target = self.component.name, self.plan.source, self.plan.target
        return (
            source.storage.dtype_of(source.cache.by_name[name]),
            target.storage.dtype_of(target.cache.by_name[name]),
        )

    @cached_property
    def is_converted(self) -> bool:
        """Whether the element type changes on the way."""
        return self.dtypes[0] != self.dtypes[1]

    @cached_property
    def wire_item_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return item_bytes(self.dtypes[0])

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one entry of one layer on the wire."""
        return prod(self.extents) * self.wire_item_bytes

    @cached_property
    def source(self) -> End:
        """The source rank's end."""
        return self._end(self.plan.source, "source", self.route.source)

    @cached_property
    def target(self) -> End:
        """The target rank's end."""
        return self._end(self.plan.target, "target", self.route.target)

    def _end(self, spec: Spec, side: str, rank: int) -> End:
        component = spec.cache.by_name[self.component.name]
        held, at = box(spec, component, rank, side), placements(spec, rank, side)[component.name]
        first = at.offset + (self.route.units[0] - held.units[0]) * at.stride("unit")
        local = np.searchsorted(to_ids(held.layers), self.layer_ids)
        return End(
            side=side,
            rank=rank,
            group=component.group,
            at=at,
            axes=(at.stride("unit"), *(at.stride(dim.name) for dim in component.dims)),
            layer_offsets=np.asarray(first + local * at.stride("layer"), dtype=np.int64),
        )
