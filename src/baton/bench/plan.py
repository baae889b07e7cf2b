"""How long planning and binding take, and how many copies come out, beside what others would need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from baton.bench.record import seconds, side_by_side
from baton.plan import checker, chunks, layout, ownership, planner, routes
from baton.plan.binding import TransferTerms, bind, bind_source, bind_target
from baton.plan.cache import Cache, Component, Dim, Full, Units
from baton.plan.chunks import Tables
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.ranges import Range
from baton.plan.report import Report, pages_needed
from baton.plan.routes import Chunk, Prompt
from baton.plan.steps import DIRECT, NEVER_PACK, PackCost
from baton.plan.storage import DeclaredPlacement, Storage, parse_storage

COLD_S_MAX = 0.5
CACHED_S_MAX = 20e-6
JSON_BYTES_MAX = 5_000_000
BIND_RATIO_MAX = 5.0
LARGE = ("pp16.tp64", "pp8.cp2.tp64")
NUM_REQUESTS = 32
MODELS = ("qwen3-235b-a22b", "deepseek-v3")
UNLIKE = (("llama-3-70b", "tp4", "tp2"), ("llama-3-70b", "tp2", "tp8"), ("qwen3-235b-a22b", "tp4", "tp2"))


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line: what, the figures, and whether its target is met (None: no target)."""

    name: str
    figures: dict[str, Any]
    text: str
    is_met: bool | None = None


def spec(model: str, layout_text: str, storage: str, prompt: Prompt) -> Spec:
    """A side with pools in which no two pages of the prompt are neighbours."""
    bare = Spec(parse_layout(layout_text), load_cache(model), parse_storage(storage, 64, "bf16"))
    return Spec(bare.layout, bare.cache, bare.storage.with_pages(pages_needed(bare, prompt)))


def run(repeats: int) -> Iterator[Row]:
    """Every measurement in turn."""
    for model in MODELS:
        yield from _planning(model, repeats)
    yield _one_allocation(repeats)
    yield _large_chunk(repeats)
    yield _small_chunk(repeats)
    for case in UNLIKE:
        yield from _copies(*case)


def _forget() -> None:
    """Empties every cache that a first plan fills."""
    for module in (checker, chunks, layout, ownership, planner, routes):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _planning(model: str, repeats: int) -> Iterator[Row]:
    prompt = Prompt(8192)
    source, target = (spec(model, text, "hnd", prompt) for text in LARGE)

    def cold() -> None:
        _forget()
        plan(source, target)

    took = seconds(cold, repeats)
    name = f"{model} {LARGE[0]} -> {LARGE[1]}"
    yield Row(f"cold plan, {name}", took, f"{took['median_s'] * 1e3:.0f} ms", took["median_s"] <= COLD_S_MAX)
    cached = seconds(lambda: [plan(source, target) for _ in range(1000)], repeats)
    per_plan = {key: value / 1000 for key, value in cached.items()}
    met = per_plan["median_s"] <= CACHED_S_MAX
    yield Row(f"cached plan, {model}", per_plan, f"{per_plan['median_s'] * 1e6:.1f} us", met)
    size = len(json.dumps(Report(model, plan(source, target), prompt, PackCost()).as_json()))
    yield Row(f"JSON of the plan, {model}", {"bytes": size}, f"{size / 1e6:.2f} MB", size < JSON_BYTES_MAX)


def _one_allocation(repeats: int) -> Row:
    """80 layers in memory that an engine declares, beside pools of their own and a component per layer."""
    num_layers, num_pages, num_heads, page, channels = 80, 4096, 8, 16, 256

    def part(name: str, layers: Range) -> Component:
        return Component(
            name, (layers,), Units(num_heads), (Dim("channel", channels),), Full(), "tokens", name
        )

    def sides(cache: Cache, is_declared: bool) -> list[Spec]:
        made = []
        for text, tp in (("tp2", 2), ("tp4", 4)):
            storage = Storage(page, "bf16", granule=page, num_pages_default=num_pages)
            if is_declared:
                head_bytes = page * channels * 2
                page_bytes = num_heads // tp * head_bytes
                layer_bytes = num_pages * page_bytes
                strides = (("layer", layer_bytes), ("page", page_bytes), ("unit", head_bytes))
                at = DeclaredPlacement("kv", "raw", num_layers * layer_bytes, 0, strides)
                storage = storage.with_placements([at])
            made.append(Spec(parse_layout(text), cache, storage))
        return made

    whole = Cache(num_layers, (part("kv", (0, num_layers)),))
    by_layer = Cache(num_layers, tuple(part(f"kv{i:03}", (i, i + 1)) for i in range(num_layers)))
    cases = {
        "dense": sides(whole, False),
        "declared": sides(whole, True),
        "component_per_layer": sides(by_layer, False),
    }

    def cold(specs: list[Spec]) -> None:
        _forget()
        plan(*specs)

    took = side_by_side([partial(cold, specs) for specs in cases.values()], repeats)
    figures = dict(zip(cases, took, strict=True))
    dense, declared, apart = (timing["median_s"] * 1e3 for timing in took)
    text = f"{declared:.2f} ms; pools of their own {dense:.2f} ms; a component per layer {apart:.1f} ms"
    return Row("cold plan, 80 layers in one allocation, tp2 -> tp4", figures, text)


def _tables(num_pages: int, seed: int) -> Tables:
    """Page tables of one request on one rank of either side, pages scattered."""
    rng = np.random.default_rng(seed)
    return Tables(*({0: {"tokens": 2 * rng.permutation(num_pages).astype(np.int64)}} for _ in range(2)))


def _large_chunk(repeats: int) -> Row:
    """A long latent prompt over scattered pages, against numpy writing arrays of the same size."""
    num_tokens, page, num_layers = 131_072, 64, 61
    num_pages = num_tokens // page
    prompt, chunk = Prompt(num_tokens), Chunk((0, num_layers), (0, num_tokens))
    side = spec("latent:layers=61,dim=576", "tp1", "hnd", prompt)
    made = plan(side, side)
    # Every request has pages of its own, so nothing that is kept for a page table is of use to the next.
    requests = cycle([_tables(num_pages, seed) for seed in range(NUM_REQUESTS)])
    layers, pages = np.arange(num_layers, dtype=np.int64), np.arange(num_pages, dtype=np.int64)
    num_spans = sum(len(step.spans) for step in bind(made, prompt, next(requests), chunk))
    assert num_spans == num_layers * num_pages, "scattered pages must not merge"
    ours, peer = side_by_side(
        [
            lambda: bind(made, prompt, next(requests), chunk),
            lambda: [np.add.outer(layers * page, pages) for _ in range(3)],
        ],
        20 * repeats,
    )
    ratio = ours["median_s"] / peer["median_s"]
    figures = {"spans": num_spans, "bind": ours, "add_outer": peer, "ratio": ratio}
    text = f"{ours['median_s'] * 1e3:.2f} ms, {ratio:.1f} x np.add.outer of the same size"
    return Row("bind 131,072 tokens x 61 layers, latent", figures, text, ratio <= BIND_RATIO_MAX)


def _small_chunk(repeats: int) -> Row:
    """One group of layers of a short prompt, at the source rank and at the target rank."""
    num_tokens, page = 1024, 64
    prompt, chunk = Prompt(num_tokens), Chunk((8, 12), (0, num_tokens))
    side = spec("llama-3-8b", "tp1", "hnd", prompt)
    made = plan(side, side)
    requests = cycle([_tables(num_tokens // page, seed) for seed in range(NUM_REQUESTS)])

    def hundred_requests() -> None:
        for tables in islice(requests, 100):
            terms = TransferTerms(made, prompt, tables.target, {(0, 0): DIRECT})
            bind_source(terms, 0, tables.source[0], chunk)
            bind_target(terms, 0, 0, chunk)

    took = seconds(hundred_requests, repeats)
    per_chunk = {key: value / 100 for key, value in took.items()}
    return Row("bind 1,024 tokens x 4 layers, both ranks", per_chunk, f"{per_chunk['median_s'] * 1e6:.0f} us")


def _copies(model: str, source: str, target: str) -> Iterator[Row]:
    """Copies of one hand-over, beside one copy per token, layer, tensor and pair of ranks."""
    prompt = Prompt(8192)
    for storage in ("hnd", "nhd"):
        made = plan(spec(model, source, storage, prompt), spec(model, target, storage, prompt))
        pairs = {(route.source, route.target) for route in made.routes}
        per_token = prompt.num_tokens * made.source.cache.num_layers * 2 * len(pairs)
        direct = Report(model, made, prompt, NEVER_PACK)
        chosen = Report(model, made, prompt, PackCost())
        counts = {
            "per_token": per_token,
            "direct": direct.num_copies,
            "chosen": chosen.num_copies,
            "packed_pairs": len(chosen.packed_pairs),
            "pairs": len(pairs),
        }
        text = (
            f"per token {per_token:,}; direct {counts['direct']:,}; "
            f"packed where it pays {counts['chosen']:,} ({counts['packed_pairs']} of {len(pairs)} pairs)"
        )
        yield Row(f"copies, {model} {source} -> {target}, {storage.upper()}, 8192 tokens", counts, text)
