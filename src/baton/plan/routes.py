"""A plan: routes as rules that hold for every prompt, and what they carry of one prompt.

Mirrors share the load where several source ranks hold the same thing. m mirror sources and n targets that
want the same are laid over one line of length m * n / gcd^2: each target covers m' = m / gcd of it, each
source n' = n / gcd. Where a source's stretch meets a target's there is a route. That is at most m' + n' - 1
routes in each of gcd groups, every source has the same stretch, and where one number divides the other it is
one route per target or one per source.

A route's stretch within its target, [lo, hi) of m', says which turns it takes when the target's pages are
dealt round robin in turns of m'. Pages are counted over the prompt from token 0, so that every chunk of a
prefill uses all sources. What has no tokens is dealt by layers in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd

from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import END, Spec, share_stride
from baton.plan.ranges import Range, Ranges, Stride, from_ids, intersection, size, to_ids
from baton.plan.tokens import TokenSet, set_runs, token_set

TOKENS_MAX = 1 << 24
NEAREST_TRIES = 1000


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The turns [lo, hi) of every `period`."""

    lo: int = 0
    hi: int = 1
    period: int = 1

    def stride(self, block: int, offset: int, num_entries: int) -> Stride:
        """The entries dealt to these turns in blocks, the dealing beginning at `offset`."""
        phase = (self.lo - offset) % self.period
        return Stride(0, num_entries, phase * block, (self.hi - self.lo) * block, self.period * block)

    def takes(self, index: int, offset: int) -> bool:
        """Whether the item at `index` falls to these turns."""
        return self.lo <= (index + offset) % self.period < self.hi


@dataclass(frozen=True, slots=True)
class Match:
    """Mirror number `source` serves target number `target` in these turns."""

    source: int
    target: int
    turns: RoundRobin


@lru_cache(maxsize=4096)
def deal(num_sources: int, num_targets: int) -> tuple[Match, ...]:
    """Assigns mirror sources to targets; every target's turns are covered exactly once."""
    num_groups = gcd(num_sources, num_targets)
    sources, targets = num_sources // num_groups, num_targets // num_groups
    matches = []
    for target in range(targets):
        start, stop = target * sources, (target + 1) * sources
        for source in range(start // targets, -(-stop // targets)):
            lo, hi = max(start, source * targets), min(stop, (source + 1) * targets)
            matches.append((source, target, RoundRobin(lo - start, hi - start, sources)))
    return tuple(
        Match(group * sources + source, group * targets + target, turns)
        for group in range(num_groups)
        for source, target, turns in matches
    )


@dataclass(frozen=True, slots=True)
class Route:
    """What one source rank sends to one target rank of one component, as a rule for any prompt."""

    source: int
    target: int
    component: str
    layers: Ranges
    units: Range
    source_share: int
    target_share: int
    turns: RoundRobin


@dataclass(frozen=True, slots=True)
class Plan:
    """Every route between one dp group of the source and one of the target."""

    source: Spec
    target: Spec
    source_dp: int
    target_dp: int
    routes: tuple[Route, ...]

    @property
    def deal_tokens(self) -> int:
        """Tokens that go to one mirror together: the larger page."""
        return max(self.source.storage.page_tokens, self.target.storage.page_tokens)

    def narrowed(self, source: int) -> Plan:
        """The routes of one source rank, for that rank to bind: it has no other rank's page table."""
        return replace(self, routes=tuple(route for route in self.routes if route.source == source))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length, what the target holds of it by page-table group, and where dealing begins."""

    num_tokens: int
    held: Mapping[str, int] = field(default_factory=dict)
    offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens <= TOKENS_MAX:
            raise ConfigError(f"number of tokens must be 1 to {TOKENS_MAX}, found {self.num_tokens}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers and tokens that become ready together."""

    layers: Range
    tokens: Range


@dataclass(frozen=True, slots=True)
class BoundRoute:
    """A route for one prompt: its layers, units and tokens spelt out."""

    source: int
    target: int
    component: str
    layers: Ranges
    units: Range | None
    tokens: TokenSet | None
    num_bytes: int


def check_held(target: Spec, prompt: Prompt) -> None:
    """Raises ConfigError unless every target rank holds whole pages of what is said to be held."""
    by_group = {c.group: c for c in target.cache.components if c.extent.has_tokens}
    for group, num_held in prompt.held.items():
        if group not in by_group:
            known = ", ".join(sorted(by_group)) or "none"
            raise ConfigError(f"nothing can be held of group {group!r}; groups with tokens: {known}")
        if not 0 <= num_held <= prompt.num_tokens:
            raise ConfigError(f"held tokens must be 0 to {prompt.num_tokens}, found {num_held}")
        for share in range(target.layout.scheme.num_shares(target.layout.size("cp"))):
            owned = share_stride(target, by_group[group], share, prompt.num_tokens).num_below(num_held)
            if owned % target.storage.page_tokens:
                nearest = _nearest(target, by_group[group], prompt, num_held)
                raise ConfigError(
                    f"{num_held} held tokens leave a rank of target {target.layout} with {owned} of its own, "
                    f"not whole pages of {target.storage.page_tokens}; {nearest}"
                )


def _nearest(target: Spec, component: Component, prompt: Prompt, num_held: int) -> str:
    """The largest smaller prefix that would do, for the error's remedy."""
    page = target.storage.page_tokens
    num_shares = target.layout.scheme.num_shares(target.layout.size("cp"))
    strides = [share_stride(target, component, share, prompt.num_tokens) for share in range(num_shares)]
    first = num_held - num_held % page
    for candidate in range(first, max(0, first - NEAREST_TRIES * page), -page):
        if all(stride.num_below(candidate) % page == 0 for stride in strides):
            return f"{candidate} would do"
    return "0 always does"


def wanted(plan: Plan, component: Component, prompt: Prompt) -> Range:
    """The entries of a component that the target needs, in whole granules."""
    start, stop = component.extent.wanted(prompt.num_tokens, prompt.held.get(component.group, 0))
    if not component.extent.has_tokens:
        return (start, stop)
    granule = plan.source.storage.granule
    return (start - start % granule, -(-stop // granule) * granule)


def entries_in(plan: Plan, component: Component, prompt: Prompt, chunk: Chunk) -> Range:
    """What of a component travels with a chunk: a state goes with the chunk that ends the prompt."""
    start, stop = wanted(plan, component, prompt)
    is_last = chunk.tokens[1] >= prompt.num_tokens
    if not component.extent.has_tokens:
        return (start, stop) if is_last else (0, 0)
    # A granule goes with the chunk that completes it.
    granule = plan.source.storage.granule
    first = chunk.tokens[0] - chunk.tokens[0] % granule
    last = stop if is_last else chunk.tokens[1] - chunk.tokens[1] % granule
    return (max(start, first), min(stop, last))


def num_entries(plan: Plan, component: Component, prompt: Prompt) -> int:
    """Entries of a component, the last granule counted whole."""
    granule = plan.source.storage.granule if component.extent.has_tokens else 1
    return -(-component.extent.num_entries(prompt.num_tokens) // granule) * granule


def route_strides(plan: Plan, route: Route, prompt: Prompt, entries: Range) -> list[Stride]:
    """The patterns whose common entries a route carries."""
    component = plan.target.cache.by_name[route.component]
    total = num_entries(plan, component, prompt)
    strides = [
        Stride(*entries),
        share_stride(plan.source, component, route.source_share, total),
        share_stride(plan.target, component, route.target_share, total),
    ]
    if component.extent.has_tokens:
        strides.append(route.turns.stride(plan.deal_tokens, prompt.offset, total))
    return strides


def route_layers(plan: Plan, route: Route, prompt: Prompt, layers: Range) -> Ranges:
    """The layers of a route inside `layers`; what has no tokens is dealt over mirrors by layers."""
    component = plan.target.cache.by_name[route.component]
    if component.extent.has_tokens or route.turns.period == 1:
        return intersection(route.layers, (layers,))
    ids = to_ids(route.layers)
    taken = (layer for i, layer in enumerate(ids) if route.turns.takes(i, prompt.offset))
    return intersection(from_ids(taken), (layers,))


def resolve(plan: Plan, prompt: Prompt) -> tuple[BoundRoute, ...]:
    """Every route that carries something, sorted by source, target, component, units and tokens."""
    check_held(plan.target, prompt)
    sets: dict[tuple[Stride, ...], tuple[TokenSet, int]] = {}
    bound: list[BoundRoute] = []
    for route in plan.routes:
        component = plan.target.cache.by_name[route.component]
        strides = tuple(route_strides(plan, route, prompt, wanted(plan, component, prompt)))
        if strides not in sets:
            sets[strides] = _spelt_out(strides)
        tokens, count = sets[strides]
        layers = route_layers(plan, route, prompt, (0, END))
        if count and layers:
            given = plan.source.cache.by_name[route.component]
            per_unit = component.num_elements * item_bytes(plan.source.storage.dtype_of(given))
            num_bytes = size(layers) * (route.units[1] - route.units[0]) * count * per_unit
            units = route.units if component.units else None
            spelt = tokens if component.extent.has_tokens else None
            bound.append(
                BoundRoute(route.source, route.target, component.name, layers, units, spelt, num_bytes)
            )
    return tuple(
        sorted(bound, key=lambda r: (r.source, r.target, r.component, r.units or (), r.tokens or ()))
    )


def _spelt_out(strides: tuple[Stride, ...]) -> tuple[TokenSet, int]:
    tokens = token_set(strides)
    return tokens, set_runs(tokens).num_tokens if tokens else 0
