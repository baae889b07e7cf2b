"""`baton demo --cache`: hands a synthetic cache over in memory and compares every byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from baton.plan.binding import bind
from baton.plan.cache import Cache
from baton.plan.chunks import Tables
from baton.plan.content import Memory, RankPools, allocate, compare, execute, fill
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.printer import human_bytes, render
from baton.plan.report import Report, estimates
from baton.plan.routes import Chunk, Prompt
from baton.plan.steps import PackCost, copy_lengths
from baton.plan.storage import parse_storage
from baton.plan.tokens import Ints

MODEL = (
    "paged:layers=4,heads=6,dim=32+paged:layers=4,heads=6,dim=32,window=96"
    "+recurrent:layers=4,heads=6,state=256+latent:layers=2,dim=72"
)
SOURCE, TARGET = "pp2:5-9.tp3", "cp2:stripe16.tp4"
NUM_TOKENS, NUM_HELD = 333, 128
SALT = 1


def demo_cache() -> int:
    """Hands a small mixed cache over between two layouts in memory, and compares every byte.

    Returns the exit code.
    """
    cache, rng = load_cache(MODEL), np.random.default_rng(7)
    prompt = Prompt(NUM_TOKENS, {group: NUM_HELD for group in cache.groups if group != "state"})
    source = _side(cache, SOURCE, ("nhd.fused", 16, "bf16"))
    target = _side(cache, TARGET, ("hnd", 32, "fp32"))
    planned = plan(source, target)
    report = Report(
        "a mixed model (full, windowed, recurrent and latent layers)", planned, prompt, PackCost()
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(render(report, estimates(report, None), None), end="", markup=False)
    console.print(_picture(report))

    tables = Tables(_tables(source, rng), _tables(target, rng))
    given, taken = allocate(source, 0, "source"), allocate(target, 0, "target")
    for rank, pools in _by_rank(source, given):
        fill(pools, prompt, tables.source[rank], SALT, is_finite=True)
    chunks = _chunks(cache.num_layers, prompt)
    lengths = []
    for chunk in chunks:
        steps = bind(planned, prompt, tables, chunk)
        execute(steps, given, taken)
        lengths.append(copy_lengths(steps))
    verdicts = [
        compare(pools, source, prompt, tables.target[rank], SALT) for rank, pools in _by_rank(target, taken)
    ]
    num_bytes, num_right = (
        sum(getattr(verdict, name) for verdict in verdicts) for name in ("num_bytes", "num_right")
    )
    copies = np.concatenate(lengths)
    console.print(
        f"carried out in {len(chunks)} chunks (layers x tokens, shuffled), {len(copies)} copies, "
        f"{human_bytes(int(copies.sum()))} moved as bf16 and unpacked as fp32; every element compared:"
    )
    console.print(f"bytes identical: {num_right} of {num_bytes}")
    return 1 if num_right != num_bytes or int(copies.sum()) != sum(report.bytes_by_source) else 0


def _side(cache: Cache, layout: str, storage: tuple[str, int, str]) -> Spec:
    words, page, dtype = storage
    pages = {group: -(-NUM_TOKENS // page) + 3 if group != "state" else 2 for group in cache.groups}
    return Spec(parse_layout(layout), cache, parse_storage(words, page, dtype).with_pages(pages))


def _by_rank(spec: Spec, memory: Memory) -> Iterator[tuple[int, RankPools]]:
    """The ranks of the first dp group with their buffers."""
    for rank in spec.layout.group(0):
        buffers = {name: raw for (owner, name), raw in memory.items() if owner == rank}
        yield rank, RankPools(spec, rank, buffers)


def _tables(spec: Spec, rng: np.random.Generator) -> dict[int, dict[str, Ints]]:
    return {
        rank: {
            group: rng.permutation(spec.storage.pages_of(group)).astype(np.int64)
            for group in spec.cache.groups
        }
        for rank in spec.layout.group(0)
    }


def _chunks(num_layers: int, prompt: Prompt) -> list[Chunk]:
    layers, tokens = [0, 3, 8, 9, num_layers], [0, 150, 151, prompt.num_tokens]
    chunks = [Chunk(a, b) for a in pairwise(layers) for b in pairwise(tokens)]
    random.Random(7).shuffle(chunks)
    return chunks


def _picture(report: Report) -> Text:
    """Bytes by source rank (rows) and target rank (columns)."""
    layouts = report.plan.source.layout, report.plan.target.layout
    sums = np.zeros((layouts[0].num_ranks, layouts[1].num_ranks), dtype=np.int64)
    for route in report.routes:
        sums[route.source, route.target] += route.num_bytes
    picture = Text("\nsource rank down, target rank across\n")
    picture.append("      " + "".join(f"{rank:>10}" for rank in range(layouts[1].num_ranks)) + "\n")
    for rank, row in enumerate(sums):
        picture.append(f"{rank:>5} ")
        for value in row:
            shade = int(235 + 20 * value / max(1, sums.max()))
            cell = human_bytes(int(value)) if value else "."
            picture.append(f"{cell:>10}", style=f"black on color({shade})" if value else "dim")
        picture.append("\n")
    return picture
