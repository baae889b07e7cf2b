"""What is handed over, between which instances, and when: all that the rank processes have to agree on.

`schedule` is a stand-in for compute: when each layer of each prefill chunk ends, and what is sent then.
Pipeline stages take prefill chunks one after another; a stage starts a chunk when it has finished the one
before it and the stage before it has finished this one. Layers of a stage take the same time each, in
proportion to the tokens of the chunk. An overlap policy cuts the layers of a chunk into groups; it sees one
stage's layers, the bytes that this rank sends of each, and the link speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from baton.errors import ConfigError
from baton.plan.cache import Cache, Component
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.overlap import LayerTimes, choose
from baton.plan.ownership import END, Spec, buffers
from baton.plan.planner import plan
from baton.plan.ranges import Range, intersection, to_ids
from baton.plan.routes import Chunk, Plan, Prompt, entries_in, resolve, wanted
from baton.plan.storage import parse_storage
from baton.plan.tokens import Ints

SHARE_OF_MEMORY = 0.6
"""Of free memory, for pools; the rest is for the processes themselves and for staging."""
SIDES = ("source", "target")


@dataclass(frozen=True, slots=True)
class SideSpec:
    """Layout and KV cache storage of one instance."""

    layout: str
    page: int = 64
    storage: str = "hnd.apart.layer"
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class Workload:
    """Two instances, a model, a prompt length, and room for several requests in each pool."""

    model: str
    source: SideSpec
    target: SideSpec
    num_tokens: int
    num_layers: int = 0
    """Layers that are kept of the model; 0 keeps all."""
    num_slots: int = 1
    """Requests that have pages at the same time."""
    transport: str = "shm"
    link_bytes_per_s: float = 0.0
    """Link speed of a source rank; 0: no limit."""

    @property
    def prompt(self) -> Prompt:
        """The prompt; the target holds no prefix of it."""
        return Prompt(self.num_tokens)

    @property
    def plan(self) -> Plan:
        """The plan between the two instances."""
        return plan(spec_of(self, "source"), spec_of(self, "target"))

    @property
    def is_converted(self) -> bool:
        """Whether the dtype changes on the way."""
        return self.source.dtype != self.target.dtype


@lru_cache(maxsize=64)
def cache_of(workload: Workload) -> Cache:
    """The model's cache, cut to the layers that are kept."""
    cache = load_cache(workload.model)
    if not workload.num_layers or workload.num_layers >= cache.num_layers:
        return cache
    kept = []
    for component in cache.components:
        layers = intersection(component.layers, ((0, workload.num_layers),))
        if layers:
            kept.append(replace(component, layers=layers))
    return Cache(workload.num_layers, tuple(kept))


@lru_cache(maxsize=64)
def spec_of(workload: Workload, side: str) -> Spec:
    """One side's layout, cache and storage, with pools for every slot."""
    spec = workload.source if side == "source" else workload.target
    cache = cache_of(workload)
    storage = parse_storage(spec.storage, spec.page, spec.dtype)
    # A source refuses requests when those without a grant hold half of its pool.
    room = workload.num_slots * (2 if side == "source" else 1)
    pages = {group: room * count for group, count in _pages_per_slot(workload, side).items()}
    return Spec(parse_layout(spec.layout), cache, storage.with_pages(pages))


def _pages_per_slot(workload: Workload, side: str) -> dict[str, int]:
    page = workload.source.page if side == "source" else workload.target.page
    cache = cache_of(workload)
    with_tokens = {part.group for part in cache.components if part.extent.has_tokens}
    return {group: -(-workload.num_tokens // page) if group in with_tokens else 1 for group in cache.groups}


@lru_cache(maxsize=64)
def _shuffled(num_pages: int, seed: tuple[int, ...]) -> Ints:
    return np.random.default_rng(seed).permutation(num_pages).astype(np.int64)


def pages_of(workload: Workload, side: str, rank: int, slot: int) -> dict[str, Ints]:
    """A request's page table on one rank: pages from all over the pool, none shared with another slot."""
    tables = {}
    for index, (group, count) in enumerate(_pages_per_slot(workload, side).items()):
        seed = (SIDES.index(side), rank, index)
        num_pages = spec_of(workload, side).storage.pages_of(group)
        tables[group] = _shuffled(num_pages, seed)[slot * count : (slot + 1) * count]
    return tables


def pool_bytes(workload: Workload) -> int:
    """The pools of every rank of both sides together."""
    total = 0
    for side in SIDES:
        spec = spec_of(workload, side)
        for rank in range(spec.layout.num_ranks):
            total += sum(buffers(spec, rank, side).values())
    return total


def fitted(workload: Workload, room_bytes: int) -> Workload:
    """The workload with as many layers as fit; unchanged if all of them do."""
    if pool_bytes(workload) <= room_bytes:
        return workload
    num_layers = cache_of(workload).num_layers
    least = max(parse_layout(side.layout).size("pp") for side in (workload.source, workload.target))
    for count in range(num_layers - 1, least - 1, -1):
        smaller = replace(workload, num_layers=count)
        if pool_bytes(smaller) <= room_bytes:
            return smaller
    raise ConfigError(
        f"{workload.num_tokens} tokens of {workload.model} need {pool_bytes(workload) >> 20} MiB of pools, "
        f"and there is room for {room_bytes >> 20} MiB; use fewer tokens with --tokens"
    )


def room_bytes() -> int:
    """How much memory the pools may take on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * SHARE_OF_MEMORY)
    raise ConfigError("/proc/meminfo says nothing of available memory; this needs Linux 3.14 or later")


def num_ranks(workload: Workload, side: str) -> int:
    """Ranks of one side, all dp groups together."""
    return spec_of(workload, side).layout.num_ranks


def own_layers(workload: Workload, rank: int) -> Range:
    """The layers of a source rank's stage; draft layers come after those of the last stage."""
    spec = spec_of(workload, "source")
    num_layers = spec.cache.num_layers
    start, stop = spec.layout.stages(num_layers, "source")[spec.layout.coordinates(rank)["pp"]]
    if stop < num_layers:
        return (start, stop)
    return (start, max(stop, *(bound for part in spec.cache.components for _, bound in part.layers)))


def sampler_rank(workload: Workload) -> int:
    """The source rank that samples: the first of the last stage."""
    layout = spec_of(workload, "source").layout
    last = layout.size("pp") - 1
    return next(rank for rank in layout.group(0) if layout.coordinates(rank)["pp"] == last)


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """How fast layers are computed, and how they are grouped."""

    layer_s: float = 0.0
    """Compute time of one layer of the whole prompt."""
    policy: str = "off"
    chunk_tokens: int = 0
    """Tokens of a prefill chunk; 0 takes the prompt at once."""
    bytes_per_s: float = 1e9
    """The link speed that the policy is given."""
    overhead_s: float = 0.0
    """The link's time per group that the policy is given."""


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The end of one layer of one chunk; `sends` are the layers sent with it, empty inside a group."""

    at_s: float
    layer: int
    tokens: Range
    num_bytes: int
    sends: Range


def schedule(workload: Workload, pace: PrefillTiming) -> dict[int, list[PrefillStep]]:
    """The steps of every source rank of dp group 0, in seconds from the start of the request."""
    layout = spec_of(workload, "source").layout
    stages = layout.stages(spec_of(workload, "source").cache.num_layers, "source")
    chunks = _chunks(workload.num_tokens, pace.chunk_tokens)
    begins = _begins(pace.layer_s, workload.num_tokens, chunks, [stop - start for start, stop in stages])
    by_rank = {}
    for rank in layout.group(0):
        stage = layout.coordinates(rank)["pp"]
        steps: list[PrefillStep] = []
        for chunk, tokens in enumerate(chunks):
            layer_s = pace.layer_s * (tokens[1] - tokens[0]) / workload.num_tokens
            loads = chunk_loads(workload, rank, tokens)
            steps += _stage_steps(pace, (begins[chunk, stage], layer_s), (stages[stage], tokens), loads)
        by_rank[rank] = steps
    return by_rank


def _chunks(num_tokens: int, chunk_tokens: int) -> list[Range]:
    if chunk_tokens < 0:
        raise ConfigError(f"tokens of a prefill chunk must be 0 or more, found {chunk_tokens}")
    size = chunk_tokens or num_tokens
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _begins(
    layer_s: float, num_tokens: int, chunks: list[Range], depths: list[int]
) -> dict[tuple[int, int], float]:
    """When each stage starts each chunk."""
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for chunk, (first, last) in enumerate(chunks):
        for stage, depth in enumerate(depths):
            at = begins[chunk, stage] = max(ends.get((chunk - 1, stage), 0), ends.get((chunk, stage - 1), 0))
            ends[chunk, stage] = at + layer_s * depth * (last - first) / num_tokens
    return begins


def _stage_steps(
    pace: PrefillTiming, times: tuple[float, float], ranges: tuple[Range, Range], loads: list[int]
) -> list[PrefillStep]:
    """One chunk on one stage: `times` is its begin and a layer's time, `ranges` its layers and tokens."""
    (begin_s, layer_s), ((first, last), tokens) = times, ranges
    num_layers = last - first
    transfer_s = tuple(load / pace.bytes_per_s for load in loads[:num_layers])
    layers = LayerTimes((layer_s,) * num_layers, transfer_s, pace.overhead_s)
    ends = {stop - 1: start for start, stop in choose(pace.policy, layers, tokens[1] - tokens[0])}
    steps = []
    for index, load in enumerate(loads[:num_layers]):
        is_last = index == num_layers - 1
        # Draft layers have ids above all others and go out with the last layer of the last stage.
        above = len(loads) - num_layers if is_last else 0
        sends = (first + ends[index], first + index + 1 + above) if index in ends else (0, 0)
        num_bytes = load + (sum(loads[num_layers:]) if is_last else 0)
        steps.append(PrefillStep(begin_s + (index + 1) * layer_s, first + index, tokens, num_bytes, sends))
    return steps


def chunk_loads(workload: Workload, rank: int, tokens: Range) -> list[int]:
    """Bytes that a source rank sends of each of its layers with a chunk of tokens; draft layers last."""
    plan, prompt = workload.plan, workload.prompt
    first, last = own_layers(workload, rank)
    loads = [0.0] * (last - first)
    for route in resolve(plan.narrowed(source=rank), prompt):
        share = _share(workload, plan.target.cache.by_name[route.component], tokens)
        ids = to_ids(route.layers)
        for layer in ids:
            loads[layer - first] += route.num_bytes / len(ids) * share
    return [round(load) for load in loads]


def _share(workload: Workload, component: Component, tokens: Range) -> float:
    """The share of a component that is sent with a chunk of tokens."""
    start, stop = wanted(workload.plan, component, workload.prompt)
    first, last = entries_in(workload.plan, component, workload.prompt, Chunk((0, END), tokens))
    return max(0, last - first) / (stop - start) if stop > start else 0.0
