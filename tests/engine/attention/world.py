"""Random batches through a pass of one rank, against the reference, with the pools' content watched."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from tests.engine.attention.reference import History, RandomLatent, attend, chosen
from torch import Tensor

from baton.engine.attention.passes import Pass
from baton.engine.attention.pools import FP8, CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.models.base import HeadOptions, IndexQuery
from baton.engine.pages import engine_storage
from baton.engine.parallel import Mesh
from baton.plan import Cache, Spec
from baton.plan.kinds import Index, Latent, Paged
from baton.plan.ownership import buffers
from baton.plan.storage import FUSED, HND

PAGE = 4
NUM_PAGES = 128
UNITS, DIM, VALUE_DIM, WINDOW = 2, 8, 6, 5
LATENT, ROTARY, LATENT_HEADS = 12, 4, 3
CPU = torch.device("cpu")
POISON = 0xFF
"""Not a number in every float type."""
LATENT_LAYER, SPARSE_LAYER = 6, 7
INDEX_DIM, INDEX_HEADS, NUM_CHOSEN = 6, 5, 11
GROUPS = {0: 3, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2}
"""Query heads per kv head, by layer."""


def options(layer: int, device: torch.device = CPU) -> HeadOptions:
    """Layers 3 on keep a window; sinks on some of both."""
    num_heads = UNITS * GROUPS[layer]
    sinks = torch.linspace(-1, 2, num_heads, device=device) if layer in (2, 4) else None
    return HeadOptions(0.3, WINDOW if layer >= 3 else None, sinks)


def cache(value_dim: int) -> Cache:
    """Full layers, windowed layers, a latent one and a sparse one."""
    kinds = [
        (Paged(UNITS, DIM, value_dim), ((0, 3),)),
        (Paged(UNITS, DIM, value_dim, WINDOW), ((3, 6),)),
        (Latent(LATENT + ROTARY), ((LATENT_LAYER, SPARSE_LAYER + 1),)),
        (Index(INDEX_DIM), ((SPARSE_LAYER, SPARSE_LAYER + 1),)),
    ]
    parts = [part for kind, layers in kinds for part in kind.components(layers)]
    return Cache(8, tuple(sorted(parts, key=lambda part: part.name)))


class World:
    """Sequences of one rank, step by step; every rank of a mesh makes the same ones.

    With an odd seed v has fewer channels than k, so that they are kept apart. A cache of another dtype holds
    all numbers of the world exactly.
    """

    def __init__(
        self,
        mesh: Mesh,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        stored: torch.dtype | None = None,
    ) -> None:
        self._mesh = mesh
        self._chance = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._dtype = dtype
        self._device = device
        self._stored = stored or dtype
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8"}
        name = names[self._stored]
        self._value_dim = VALUE_DIM if seed % 2 else DIM
        kept = cache(self._value_dim)
        storage = engine_storage(kept, PAGE, name)
        assert storage.order == (HND if seed % 2 else FUSED)
        spec = Spec(mesh.layout, kept, replace(storage, num_pages_default=NUM_PAGES))
        sizes = buffers(spec, mesh.rank, "t")
        self.buffers = {part: np.full(size, POISON, dtype=np.uint8) for part, size in sizes.items()}
        content = {part: torch.from_numpy(found).to(device) for part, found in self.buffers.items()}
        self.pools = CachePools(spec, mesh.rank, content, device)
        self._history = {layer: (History(), History()) for layer in range(SPARSE_LAYER + 1)}
        self._pages = self._chance.sample(range(NUM_PAGES), NUM_PAGES)
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._prompts: dict[int, int] = {}

    def step(self, lengths: dict[int, int], prompts: dict[int, int] | None = None) -> None:
        """Computes so many tokens more of each sequence, on every layer, and compares."""
        works = [self._work(sequence, length, prompts or {}) for sequence, length in lengths.items()]
        batch = ScheduledBatch(works)
        found = Pass(batch, self._mesh, self.pools)
        own = slice(*found.rows.cuts[self._mesh.cp.index])
        positions = [t for work in works for t in range(work.start, work.start + len(work.tokens))]
        assert found.positions.tolist() == positions[own]
        for layer in GROUPS:
            self._heads(found, batch, layer, own)
        self._latent(found, batch, own, LATENT_LAYER)
        self._latent(found, batch, own, SPARSE_LAYER)

    def used_pages(self) -> set[int]:
        """Pages of any sequence so far."""
        return {page for table in self._tables.values() for page in table}

    def _work(self, sequence: int, length: int, prompts: dict[int, int]) -> ScheduledSequence:
        start = self._lengths.get(sequence, 0)
        self._lengths[sequence] = start + length
        prompt = self._prompts.setdefault(sequence, prompts.get(sequence, start + length))
        table = self._tables.setdefault(sequence, [])
        while len(table) * PAGE < start + length:
            table.append(self._pages.pop())
        # What lies before the window of the first row is given up where slots count every token.
        num_left = max(0, start - WINDOW + 1) // PAGE if self.pools.spec.layout.size("cp") == 1 else 0
        windowed = [-1] * num_left + table[num_left:]
        tables = {"tokens": table, f"tokens.w{WINDOW}": windowed}
        return ScheduledSequence(sequence, start, [0] * length, tables, prompt)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._numbers).to(self._device, self._stored).to(self._dtype)

    def _heads(self, found: Pass, batch: ScheduledBatch, layer: int, own: slice) -> None:
        how = options(layer, self._device)
        num_rows = batch.num_rows
        q = self._random(num_rows, UNITS * GROUPS[layer], DIM)
        k, v = self._random(num_rows, UNITS, DIM), self._random(num_rows, UNITS, self._value_dim)
        out = found.heads(layer, q[own], k[own], v[own], how)
        expected, row = [], 0
        for work in batch.sequences:
            rows = slice(row, row + len(work.tokens))
            keys = self._history[layer][0].add(work.sequence, k[rows])
            values = self._history[layer][1].add(work.sequence, v[rows])
            for i in range(len(work.tokens)):
                expected.append(attend(q[row + i], keys, values, work.start + i, how))
            row += len(work.tokens)
        self._same(out, torch.stack(expected)[own])

    def _latent(self, found: Pass, batch: ScheduledBatch, own: slice, layer: int) -> None:
        num_rows = batch.num_rows
        q, rotary = self._random(num_rows, LATENT_HEADS, 7), self._random(num_rows, LATENT_HEADS, ROTARY)
        keys, values = self._random(LATENT_HEADS, LATENT, 7), self._random(LATENT_HEADS, LATENT, 5)
        latent = self._random(num_rows, LATENT + ROTARY)
        query = RandomLatent(q[own], rotary[own], keys / 3, values / 3)
        index = self._index(num_rows) if layer == SPARSE_LAYER else None
        out = found.latent(layer, query, latent[own], 0.3, index and _rows(index, own))
        exact = RandomLatent(*(part.double() for part in (q, rotary, keys / 3, values / 3)))
        expected, row, plain = [], 0, exact.plain()
        for work in batch.sequences:
            rows = slice(row, row + len(work.tokens))
            every = self._history[layer][0].add(work.sequence, latent[rows])
            keys = self._history[layer][1].add(work.sequence, index.keys[rows]) if index else every
            expanded = exact.expand(every.double())
            for i in range(len(work.tokens)):
                at = work.start + i
                seen = chosen(_rows(index, slice(row + i, row + i + 1)), keys[: at + 1]) if index else None
                parts = [part if seen is None else part[seen] for part in expanded]
                at = at if seen is None else len(seen) - 1
                expected.append(attend(plain[row + i], *parts, at, HeadOptions(0.3)))
            row += len(work.tokens)
        self._same(out, torch.stack(expected)[own])

    def _index(self, num_rows: int) -> IndexQuery:
        return IndexQuery(
            keys=self._random(num_rows, INDEX_DIM),
            queries=self._random(num_rows, INDEX_HEADS, INDEX_DIM),
            weights=self._random(num_rows, INDEX_HEADS).float() + 1,
            num_chosen=NUM_CHOSEN,
        )

    def _same(self, out: Tensor, expected: Tensor) -> None:
        assert out.dtype == self._dtype
        tolerance = 2e-5 if self._dtype == torch.float32 else 6e-2
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def _rows(index: IndexQuery, rows: slice) -> IndexQuery:
    return IndexQuery(index.keys[rows], index.queries[rows], index.weights[rows], index.num_chosen)


def check_rank(mesh: Mesh, seed: int, device: torch.device = CPU) -> None:
    """Prompts of all sorts, in chunks and at once, then decoding, alone and mixed."""
    world = World(mesh, seed, device=device)
    prompts = {0: 1, 1: PAGE - 1, 2: PAGE, 3: PAGE + 1, 4: 24, 5: 33, 6: 60}
    world.step({0: 1, 1: PAGE - 1, 2: PAGE}, prompts)
    world.step({3: PAGE + 1, 0: 1, 4: 9}, prompts)
    world.step({5: 33, 4: 1, 2: 1}, prompts)
    world.step({4: 14}, prompts)
    world.step({0: 1})
    world.step({0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    world.step({6: 40, 5: 1, 0: 1}, prompts)
    world.step({6: 2}, prompts)
    world.step({1: 1, 6: 18, 3: 1}, prompts)
    for _ in range(6):
        world.step({6: 1, 0: 1, 1: 1, 5: 1})
