"""What is handed over and between whom: everything that the rank processes have to agree on."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from baton.errors import ConfigError
from baton.plan.cache import Cache
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec, buffers
from baton.plan.planner import plan
from baton.plan.ranges import Range, intersection
from baton.plan.routes import Plan, Prompt
from baton.plan.storage import parse_storage
from baton.plan.tokens import Ints

SHARE_OF_MEMORY = 0.6
"""Of what the machine has free; the rest is for the processes themselves and for staging."""
SIDES = ("source", "target")
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)(k|M|G|T)?(B|b)(?:/s|ps)")
_SCALES = {None: 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Side:
    """How one instance is laid out and keeps its cache."""

    layout: str
    page: int = 64
    storage: str = "hnd.apart.layer"
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class Scene:
    """Two instances, a model, a prompt's length, and room for several requests in each pool."""

    model: str
    source: Side
    target: Side
    num_tokens: int
    num_layers: int = 0
    """Layers that are kept of the model; 0 keeps all."""
    num_slots: int = 1
    """Requests that have pages of their own at the same time."""
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    """How fast the link of a source rank is; 0 is as fast as the transport."""

    @property
    def prompt(self) -> Prompt:
        """The prompt, of which the target holds nothing."""
        return Prompt(self.num_tokens)

    @property
    def plan(self) -> Plan:
        """Who sends what to whom."""
        return plan(spec_of(self, "source"), spec_of(self, "target"))

    @property
    def is_converted(self) -> bool:
        """Whether elements change their type on the way."""
        return self.source.dtype != self.target.dtype


@lru_cache(maxsize=64)
def cache_of(scene: Scene) -> Cache:
    """The model's cache, cut to the layers that are kept."""
    cache = load_cache(scene.model)
    if not scene.num_layers or scene.num_layers >= cache.num_layers:
        return cache
    kept = []
    for component in cache.components:
        layers = intersection(component.layers, ((0, scene.num_layers),))
        if layers:
            kept.append(replace(component, layers=layers))
    return Cache(scene.num_layers, tuple(kept))


@lru_cache(maxsize=64)
def spec_of(scene: Scene, side: str) -> Spec:
    """One side's layout, cache and storage, with pools for every slot."""
    found = scene.source if side == "source" else scene.target
    cache = cache_of(scene)
    storage = parse_storage(found.storage, found.page, found.dtype)
    # A source refuses more when requests without a grant hold half of its pool.
    room = scene.num_slots * (2 if side == "source" else 1)
    pages = {group: room * count for group, count in _pages_per_slot(scene, side).items()}
    return Spec(parse_layout(found.layout), cache, storage.with_pages(pages))


def _pages_per_slot(scene: Scene, side: str) -> dict[str, int]:
    page = scene.source.page if side == "source" else scene.target.page
    cache = cache_of(scene)
    with_tokens = {part.group for part in cache.components if part.extent.has_tokens}
    return {group: -(-scene.num_tokens // page) if group in with_tokens else 1 for group in cache.groups}


@lru_cache(maxsize=64)
def _shuffled(num_pages: int, seed: tuple[int, ...]) -> Ints:
    return np.random.default_rng(seed).permutation(num_pages).astype(np.int64)


def pages_of(scene: Scene, side: str, rank: int, slot: int) -> dict[str, Ints]:
    """A request's page table on one rank: pages from all over the pool, and no other slot's."""
    found = {}
    for index, (group, count) in enumerate(_pages_per_slot(scene, side).items()):
        seed = (SIDES.index(side), rank, index)
        num_pages = spec_of(scene, side).storage.pages_of(group)
        found[group] = _shuffled(num_pages, seed)[slot * count : (slot + 1) * count]
    return found


def pool_bytes(scene: Scene) -> int:
    """The pools of every rank of both sides together."""
    total = 0
    for side in SIDES:
        spec = spec_of(scene, side)
        for rank in range(spec.layout.num_ranks):
            total += sum(buffers(spec, rank, side).values())
    return total


def fitted(scene: Scene, room_bytes: int) -> Scene:
    """The scene with as many layers as have room; unchanged where all of them do."""
    if pool_bytes(scene) <= room_bytes:
        return scene
    num_layers = cache_of(scene).num_layers
    least = max(parse_layout(side.layout).size("pp") for side in (scene.source, scene.target))
    for count in range(num_layers - 1, least - 1, -1):
        smaller = replace(scene, num_layers=count)
        if pool_bytes(smaller) <= room_bytes:
            return smaller
    raise ConfigError(
        f"{scene.num_tokens} tokens of {scene.model} need {pool_bytes(scene) >> 20} MiB of pools, and there "
        f"is room for {room_bytes >> 20} MiB; use fewer tokens with --tokens"
    )


def room_bytes() -> int:
    """How much memory pools may take on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * SHARE_OF_MEMORY)
    raise ConfigError("/proc/meminfo says nothing of available memory; this needs Linux 3.14 or later")


def parse_speed(text: str) -> float:
    """Bytes per second of `12.5GB/s` or `100Gb/s`."""
    match = _SPEED.fullmatch(text.strip())
    speed = float(match[1]) * _SCALES[match[2]] / (8 if match[3] == "b" else 1) if match else 0.0
    if not speed > 0:
        raise ConfigError(f"link speed {text!r} cannot be read; write it like 12.5GB/s or 100Gb/s")
    return speed


def num_ranks(scene: Scene, side: str) -> int:
    """Ranks of one side, all dp groups together."""
    return spec_of(scene, side).layout.num_ranks


def own_layers(scene: Scene, rank: int) -> Range:
    """The layers of a source rank's stage; drafts come after the last stage's own."""
    spec = spec_of(scene, "source")
    num_layers = spec.cache.num_layers
    start, stop = spec.layout.stages(num_layers, "source")[spec.layout.coordinates(rank)["pp"]]
    if stop < num_layers:
        return (start, stop)
    return (start, max(stop, *(bound for part in spec.cache.components for _, bound in part.layers)))


def sampler(scene: Scene) -> int:
    """The source rank that samples: the first of the last stage."""
    layout = spec_of(scene, "source").layout
    last = layout.size("pp") - 1
    return next(rank for rank in layout.group(0) if layout.coordinates(rank)["pp"] == last)
