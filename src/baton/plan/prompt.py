"""One prompt under a plan: which tokens every route carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import END, Spec, share_stride
from baton.plan.ranges import Range, Ranges, from_ids, intersection, size, to_ids
from baton.plan.routes import Plan, Route
from baton.plan.tokens import Stride, TokenSet, set_runs, token_set

TOKENS_MAX = 1 << 24
NEAREST_TRIES = 1000


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
    found: list[BoundRoute] = []
    for route in plan.routes:
        component = plan.target.cache.by_name[route.component]
        strides = tuple(route_strides(plan, route, prompt, wanted(plan, component, prompt)))
        if strides not in sets:
            sets[strides] = _spelt_out(strides)
        tokens, count = sets[strides]
        layers = route_layers(plan, route, prompt, (0, END))
        if count and layers:
            per_unit = component.num_elements * item_bytes(plan.source.storage.dtype_of(component))
            num_bytes = size(layers) * (route.units[1] - route.units[0]) * count * per_unit
            units = route.units if component.units else None
            spelt = tokens if component.extent.has_tokens else None
            found.append(
                BoundRoute(route.source, route.target, component.name, layers, units, spelt, num_bytes)
            )
    return tuple(
        sorted(found, key=lambda r: (r.source, r.target, r.component, r.units or (), r.tokens or ()))
    )


def _spelt_out(strides: tuple[Stride, ...]) -> tuple[TokenSet, int]:
    tokens = token_set(strides)
    return tokens, set_runs(tokens).num_tokens if tokens else 0
