"""Random models, layouts, storages and prompts, and buffers whose every element says what it is."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from baton.plan.cache import Cache, Component, Units
from baton.plan.kinds import Conv, Draft, Index, Latent, Paged, Recurrent
from baton.plan.layout import Layout, parse_layout
from baton.plan.ownership import Spec, page_spaces, placements
from baton.plan.ranges import from_ids
from baton.plan.routes import Prompt
from baton.plan.storage import Storage
from baton.sim.families import draw_placements

ORDERS = [
    ("layer", "page", "unit", "token"),
    ("layer", "page", "token", "unit"),
    ("page", "layer", "unit", "token"),
    ("layer", "page", "component", "unit", "token"),
    ("page", "layer", "component", "token", "unit"),
    ("page", "component", "layer", "unit", "token"),
    ("component", "layer", "page", "token", "unit"),
    ("layer", "page", "token", "unit", "component"),
    ("unit", "layer", "page", "token"),
    ("layer", "token", "page", "unit"),
    ("channel", "layer", "page", "unit", "token"),
]
STATE_ORDERS = [
    ("layer", "page", "component", "unit"),
    ("page", "layer", "component", "unit"),
    ("layer", "page", "unit"),
    ("page", "layer", "unit", "tap"),
    ("layer", "page", "component", "tap", "unit"),
]


def make_cache(num_layers: int, *parts) -> Cache:
    """A cache from (kind, layers) pairs."""
    found = [component for kind, layers in parts for component in kind.components(layers)]
    return Cache(num_layers, tuple(sorted(found, key=lambda component: component.name)))


@dataclass(frozen=True)
class World:
    """One random hand-over."""

    source: Spec
    target: Spec
    source_dp: int
    target_dp: int
    prompt: Prompt
    seed: int


@st.composite
def caches(draw) -> Cache:
    num_layers = draw(st.integers(1, 5))
    every = list(range(num_layers))
    chosen = draw(st.lists(st.sampled_from(range(7)), min_size=1, max_size=3, unique=True))
    parts = []
    for kind in chosen:
        ids = draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
        layers = from_ids(ids)
        heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
        window = draw(st.sampled_from([1, 3, 5, 16]))
        match kind:
            case 0:
                parts.append((Paged(heads, 2, draw(st.sampled_from([0, 1, 3]))), layers))
            case 1:
                parts.append((Latent(3), layers))
            case 2:
                parts.append((Paged(heads, 1, 2, window), layers))
            case 3:
                parts.append((Index(2, draw(st.sampled_from([0, 1]))), layers))
            case 4:
                groups = draw(st.sampled_from([1, 2, 3]))
                convs = (
                    Conv("q", Units(groups, "key head"), 2, 3),
                    Conv("k", Units(groups, "key head"), 2, 3),
                    Conv("v", Units(heads, "value head"), 1, 3),
                )
                parts.append((Recurrent(heads, 3, convs, "value head"), layers))
            case 5:
                parts.append((Draft(Paged(heads, 2)), ((num_layers, num_layers + draw(st.integers(1, 2))),)))
            case 6:
                parts.append((Latent(2, window), layers))
    return make_cache(num_layers, *parts)


@st.composite
def layouts(draw, cache: Cache, granule: int, page: int) -> Layout:
    parts = []
    units = [component.num_units for component in cache.components if component.units]
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12) if all(n <= u or n % u == 0 for u in units)]
    if draw(st.booleans()):
        parts.append(f"tp{draw(st.sampled_from(sizes))}")
    if draw(st.booleans()):
        stages = draw(st.integers(1, min(3, cache.num_layers)))
        option = ""
        if draw(st.booleans()):
            bounds = draw(
                st.lists(
                    st.integers(1, cache.num_layers - 1),
                    min_size=stages - 1,
                    max_size=stages - 1,
                    unique=True,
                )
                if cache.num_layers > 1
                else st.just([])
            )
            cuts = [0, *sorted(bounds), cache.num_layers]
            option = ":" + "-".join(str(b - a) for a, b in itertools.pairwise(cuts))
        parts.append(f"pp{stages}{option}")
    if draw(st.booleans()):
        stripe = draw(st.sampled_from([1, 2, 3, 5])) * granule
        option = draw(st.sampled_from(["", ":mirror", ":split", f":stripe{stripe}"]))
        parts.append(f"cp{draw(st.integers(1, 4))}{option}")
    if draw(st.booleans()):
        parts.append(f"dp{draw(st.integers(1, 3))}")
    return parse_layout(".".join(draw(st.permutations(parts))) if parts else "tp1")


@st.composite
def worlds(draw) -> World:
    cache = draw(caches())
    num_tokens = draw(st.integers(1, 40))
    granule = draw(st.sampled_from([1, 1, 1, 1, 2, 4]))
    pages = [granule * n for n in (1, 2, 3, 4, 8)]
    source_page = draw(st.sampled_from(pages))
    target_page = source_page if granule > 1 else draw(st.sampled_from(pages))
    orders = draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)))
    if granule > 1:
        orders = (ORDERS[0], ORDERS[0])
    dtypes = draw(
        st.sampled_from(
            [("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "fp32"), ("fp8", "fp8")]
        )
    )
    if granule > 1:
        dtypes = ("fp16", "fp16")
    specs = []
    for page, order, dtype in zip((source_page, target_page), orders, dtypes, strict=True):
        layout = draw(layouts(cache, granule, page))
        spare = draw(st.integers(0, 3))
        pages_needed = dict.fromkeys(cache.groups, -(-num_tokens // page) + spare)
        storage = Storage(page, dtype, order, draw(st.sampled_from(STATE_ORDERS)), granule).with_pages(
            pages_needed
        )
        specs.append(Spec(layout, cache, storage))
    is_declared = draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
    specs = [
        draw_placements(random.Random(draw(st.integers(0, 1 << 30))), spec) if is_own else spec
        for spec, is_own in zip(specs, is_declared, strict=True)
    ]
    source, target = specs
    prompt = Prompt(num_tokens, draw(held_prefixes(target, num_tokens)), draw(st.integers(0, 7)))
    groups = [draw(st.integers(0, spec.layout.size("dp") - 1)) for spec in specs]
    return World(source, target, *groups, prompt, draw(st.integers(0, 1 << 30)))


@st.composite
def held_prefixes(draw, target: Spec, num_tokens: int) -> dict[str, int]:
    """Prefixes that leave every target rank with whole pages, counted token by token."""
    page, num_ranks = target.storage.page_tokens, target.layout.size("cp")
    counts, fine = [0] * num_ranks, [0]
    for token in range(num_tokens):
        for owner in token_owners(target, token, num_tokens):
            counts[owner] += 1
        if all(count % page == 0 for count in counts):
            fine.append(token + 1)
    groups = {c.group for c in target.cache.components if c.extent.has_tokens}
    return {group: draw(st.sampled_from(fine)) for group in sorted(groups)}


def token_owners(spec: Spec, token: int, num_tokens: int) -> list[int]:
    """The cp coordinates that hold a token, straight from the words of the design."""
    num_ranks, page = spec.layout.size("cp"), spec.storage.page_tokens
    option = next(
        (part.partition(":")[2] for part in spec.layout.text.split(".") if part.startswith("cp")), "mirror"
    )
    if option == "mirror":
        return list(range(num_ranks))
    if option == "split":
        pages = -(-num_tokens // page)
        sizes = [pages // num_ranks + (i < pages % num_ranks) for i in range(num_ranks)]
        bounds = np.cumsum(sizes)
        return [int(np.searchsorted(bounds, token // page, side="right"))]
    block = int(option.removeprefix("stripe")) if option else page
    return [token // block % num_ranks]


def unit_owners(units: int, num_ranks: int) -> list[list[int]]:
    """The units of every tp coordinate."""
    if num_ranks > units:
        return [[rank // (num_ranks // units)] for rank in range(num_ranks)]
    sizes = [units // num_ranks + (i < units % num_ranks) for i in range(num_ranks)]
    cuts = [0, *np.cumsum(sizes).tolist()]
    return [list(range(a, b)) for a, b in itertools.pairwise(cuts)]


def layer_stage(spec: Spec, layer: int) -> int:
    """The pp coordinate that runs a layer."""
    num_stages, num_layers = spec.layout.size("pp"), spec.cache.num_layers
    sizes = spec.layout.stage_sizes or [
        num_layers // num_stages + (i >= num_stages - num_layers % num_stages) for i in range(num_stages)
    ]
    return int(np.searchsorted(np.cumsum(sizes), min(layer, num_layers - 1), side="right"))


def page_tables(spec: Spec, dp: int, rng: np.random.Generator) -> dict[int, dict[str, np.ndarray]]:
    """Page ids for every rank, sometimes in order (so that neighbours merge), sometimes scattered.

    Groups that overlay each other share the pages out.
    """
    found = {}
    for rank in spec.layout.group(dp):
        spaces = page_spaces(spec, rank)
        found[rank] = {}
        for space in sorted(set(spaces.values())):
            groups = [group for group in spec.cache.groups if spaces[group] == space]
            pages = np.arange(min(map(spec.storage.pages_of, groups)), dtype=np.int64)
            if rng.random() < 0.7:
                rng.shuffle(pages)
            found[rank] |= zip(groups, np.array_split(pages, len(groups)), strict=True)
    return found


@dataclass(frozen=True)
class Held:
    """All elements that one rank keeps of one component: where they are and what they are."""

    rank: int
    component: Component
    buffer: str
    item_bytes: int
    offsets: np.ndarray
    identities: np.ndarray
    tokens: np.ndarray


def holdings(spec: Spec, dp: int, num_tokens: int, tables, side: str):
    """What the ranks of a group hold, from the words of the design and the strides of the pools alone."""
    for rank in spec.layout.group(dp):
        at = spec.layout.coordinates(rank)
        for number, component in enumerate(spec.cache.components):
            layers = [
                layer
                for a, b in component.layers
                for layer in range(a, b)
                if layer_stage(spec, layer) == at["pp"]
            ]
            if layers:
                yield _held(spec, (rank, number, side), layers, num_tokens, tables)


def _held(spec: Spec, which: tuple[int, int, str], layers: list[int], num_tokens: int, tables) -> Held:
    rank, number, side = which
    at, component = spec.layout.coordinates(rank), spec.cache.components[number]
    place = placements(spec, rank, side)[component.name]
    layer_offsets = place.layer_offsets or [i * place.stride("layer") for i in range(len(layers))]
    units = [0]
    if component.units:
        units = unit_owners(component.num_units, spec.layout.size("tp"))[at["tp"]]
    tokens = [0]
    if component.extent.has_tokens:
        tokens = [t for t in range(num_tokens) if at["cp"] in token_owners(spec, t, num_tokens)]
    table, page = tables[rank][component.group], place.page_entries
    slots = np.arange(len(tokens))
    along = [
        np.array(layer_offsets),
        table[slots // page] * place.stride("page") + slots % page * place.strides.get("token", 0),
        np.arange(len(units)) * place.stride("unit"),
        *(np.arange(dim.size) * place.stride(dim.name) for dim in component.dims),
    ]
    inner = [dim.size for dim in component.dims]
    labels = [np.array(layers), np.array(tokens, dtype=np.int64), np.array(units), *map(np.arange, inner)]
    bases = [64, 256, 16, *inner]
    offsets, identities = np.asarray(place.offset), np.asarray(number)
    for steps, names, base in zip(along, labels, bases, strict=True):
        offsets = np.add.outer(offsets, steps)
        identities = np.add.outer(identities * base, names)
    shape = offsets.shape
    of_token = np.broadcast_to(labels[1].reshape(1, -1, *[1] * (len(shape) - 2)), shape)
    flat = (offsets.ravel(), identities.ravel(), of_token.ravel())
    return Held(rank, component, place.buffer, place.item_bytes, *flat)


def raw_values(identities: np.ndarray, item_bytes: int, seed: int) -> np.ndarray:
    """Bytes that tell elements apart: (elements, item_bytes)."""
    mixed = (identities.astype(np.uint64) + np.uint64(seed + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.ascontiguousarray(mixed[:, None]).view(np.uint8)[:, 8 - item_bytes :]


def put(buffer: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    """Writes elements at byte offsets."""
    buffer[offsets[:, None] + np.arange(values.shape[1])] = values


def needed(component: Component, prompt: Prompt, granule: int, tokens: np.ndarray) -> np.ndarray:
    """Which tokens of a component a target without its held prefix has to be sent."""
    if not component.extent.has_tokens:
        return np.ones(len(tokens), dtype=bool)
    first = prompt.held.get(component.group, 0)
    if component.extent.window is not None:
        first = max(first, prompt.num_tokens - component.extent.window)
    return tokens // granule >= first // granule
