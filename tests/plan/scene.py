"""A random hand-over with its plan, page tables and filled buffers, and what tests ask of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tests.plan.world import World, holdings, make_cache, page_tables, put, raw_values

from baton.plan.binding import ChunkReceive, ChunkSend, TransferTerms, bind, bind_source, bind_target
from baton.plan.chunks import PairChunk, Tables, bound_plan
from baton.plan.content import Memory, allocate
from baton.plan.kinds import Paged, Recurrent
from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.routes import Chunk, Plan, Prompt
from baton.plan.steps import CONVERT, DIRECT, PACK, STAGING, Copy, PackCost, Spans, Step, Unpack
from baton.plan.storage import parse_storage

FILL = 0xA5


def chunks_of(world: World, rng: random.Random) -> list[Chunk]:
    """The prompt cut into layers x tokens at random places, in random order."""
    num_layers = 1 + max(layers[-1][1] for layers in (c.layers for c in world.target.cache.components))
    layer_cuts = sorted({0, num_layers, *(rng.randrange(num_layers) for _ in range(rng.randrange(3)))})
    total = world.prompt.num_tokens
    token_cuts = sorted({0, total, *(rng.randrange(total) for _ in range(rng.randrange(3)))})
    found = [
        Chunk(layers, tokens)
        for layers in itertools.pairwise(layer_cuts)
        for tokens in itertools.pairwise(token_cuts)
    ]
    rng.shuffle(found)
    return found


def padded(prompt: Prompt, granule: int) -> int:
    return -(-prompt.num_tokens // granule) * granule


def count_writes(steps: list[Step], target: Memory) -> Memory:
    found = {key: np.zeros(len(buffer), dtype=np.int64) for key, buffer in target.items()}
    for step in steps:
        if isinstance(step, Copy) and step.target_buffer != STAGING:
            key, grow = (step.target, step.target_buffer), (1, 1)
        elif isinstance(step, Unpack):
            sizes = {"fp32": 4, "fp8": 1, "bf16": 2, "fp16": 2}
            key, grow = (step.target, step.buffer), (sizes[step.dtypes[1]], sizes[step.dtypes[0]])
        else:
            continue
        for at, length in zip(step.spans.target.tolist(), step.spans.length.tolist(), strict=True):
            found[key][at : at + length * grow[0] // grow[1]] += 1
    return found


@dataclass(frozen=True)
class Scene:
    """A world with its plan, its page tables and filled source buffers."""

    world: World

    @cached_property
    def plan(self) -> Plan:
        world = self.world
        return plan(world.source, world.target, world.source_dp, world.target_dp)

    @cached_property
    def tables(self) -> Tables:
        rng = np.random.default_rng(self.world.seed)
        sides = ((self.world.source, self.world.source_dp), (self.world.target, self.world.target_dp))
        return Tables(*(page_tables(spec, dp, rng) for spec, dp in sides))

    @property
    def prompt(self) -> Prompt:
        return self.world.prompt

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return sorted({(route.source, route.target) for route in self.plan.routes})

    @property
    def whole(self) -> Chunk:
        return Chunk((0, 1000), (0, self.prompt.num_tokens))

    @cached_property
    def source(self) -> Memory:
        world = self.world
        found = allocate(world.source, world.source_dp, "source", 0x5A)
        for held in self.held_by_source:
            put(
                found[held.rank, held.buffer],
                held.offsets,
                raw_values(held.identities, held.item_bytes, world.seed),
            )
        return found

    @property
    def held_by_source(self):
        world = self.world
        entries = padded(world.prompt, world.source.storage.granule)
        return holdings(world.source, world.source_dp, entries, self.tables.source, "source")

    def target(self) -> Memory:
        return allocate(self.world.target, self.world.target_dp, "target", FILL)

    def is_converted(self, name: str) -> bool:
        sides = (self.world.source, self.world.target)
        return len({spec.storage.dtype_of(spec.cache.by_name[name]) for spec in sides}) > 1

    def plain(self, pair: tuple[int, int]) -> str:
        """The mode without packing."""
        names = {route.component for route in self.plan.routes if (route.source, route.target) == pair}
        return CONVERT if any(map(self.is_converted, names)) else DIRECT

    def mode(self, pair: tuple[int, int], *, is_packed: bool) -> str:
        """The mode that a pair is forced into; granules are never packed."""
        return PACK if is_packed and self.world.source.storage.granule == 1 else self.plain(pair)

    def moved(self, chunk: Chunk, pair: tuple[int, int]) -> PairChunk:
        return bound_plan(self.plan, self.prompt).chunk(pair, chunk)

    def terms(self, *, is_packed: bool = False, is_verified: bool = False) -> TransferTerms:
        modes = {pair: self.mode(pair, is_packed=is_packed) for pair in self.pairs}
        return TransferTerms(self.plan, self.prompt, self.tables.target, modes, is_verified)

    def send(self, terms: TransferTerms, chunk: Chunk, pair: tuple[int, int]) -> ChunkSend | None:
        """What a source rank works out for one of its targets."""
        sends = bind_source(terms, pair[0], self.tables.source[pair[0]], chunk)
        return next((send for send in sends if send.target_rank == pair[1]), None)

    def receive(self, terms: TransferTerms, chunk: Chunk, pair: tuple[int, int]) -> ChunkReceive:
        """What a target rank works out with its own tables."""
        own = {pair[1]: self.tables.target[pair[1]]}
        alone = TransferTerms(terms.plan, terms.prompt, own, terms.modes, terms.is_verified)
        return bind_target(alone, *pair, chunk)

    def bound(self, chunk: Chunk, cost: PackCost) -> dict[tuple[int, int], list[Step]]:
        """What `bind` gives, by pair."""
        found: dict[tuple[int, int], list[Step]] = {pair: [] for pair in self.pairs}
        for step in bind(self.plan, self.prompt, self.tables, chunk, cost):
            found[step.source, step.target].append(step)
        return found

    def some_pairs(self) -> list[tuple[int, int]]:
        """Up to three pairs: many hypothesis examples look at more than all pairs of few would."""
        return random.Random(self.world.seed).sample(self.pairs, min(3, len(self.pairs)))


def plain(step: Step) -> tuple:
    """A step as values that can be compared."""
    spans = tuple(part.tolist() for part in (step.spans.source, step.spans.target, step.spans.length))
    names = [getattr(step, name) for name in step.__slots__ if name != "spans"]
    return (type(step).__name__, *names, spans)


def bytes_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Every byte of some ranges, in their order."""
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return first + np.arange(lengths.sum())


def gathered(spans: Spans, buffer: np.ndarray) -> np.ndarray:
    found = np.full(spans.num_bytes, FILL, dtype=np.uint8)
    found[bytes_of(spans.target, spans.length)] = buffer[bytes_of(spans.source, spans.length)]
    return found


def made(cache, ends=("tp2", "tp1"), words=("hnd", "hnd"), dtypes=("bf16", "bf16"), page: int = 16) -> Plan:
    specs = []
    for layout, storage, dtype in zip(ends, words, dtypes, strict=True):
        kept = parse_storage(storage, page, dtype).with_pages({"tokens": 20, "state": 4})
        specs.append(Spec(parse_layout(layout), cache, kept))
    return plan(*specs)


GQA = make_cache(4, (Paged(4, 8), ((0, 4),)))
HYBRID = make_cache(4, (Paged(4, 8), ((0, 2),)), (Recurrent(4, 8, dtype="fp32"), ((1, 4),)))


def pages(spec: Spec, num_pages: int = 10) -> dict[int, dict[str, np.ndarray]]:
    tables = {"tokens": np.arange(num_pages, dtype=np.int64), "state": np.arange(1, dtype=np.int64)}
    return dict.fromkeys(range(spec.layout.num_ranks), tables)
