"""How long planning and binding take, and how many copies come out, beside what others would need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.record import seconds, side_by_side
from baton.plan import alike, compatibility, elements, layout, mirrors, ownership, planner
from baton.plan.binding import Tables, bind
from baton.plan.layout import parse_layout
from baton.plan.models import load_cache
from baton.plan.ownership import Spec
from baton.plan.packing import NEVER_PACK, PackCost
from baton.plan.planner import plan
from baton.plan.prompt import Chunk, Prompt
from baton.plan.report import Report, pages_needed
from baton.plan.storage import parse_storage

COLD_S_MAX = 0.5
CACHED_S_MAX = 20e-6
JSON_BYTES_MAX = 5_000_000
BIND_RATIO_MAX = 5.0
LARGE = ("pp16.tp64", "pp8.cp2.tp64")
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
    yield _binding(repeats)
    for case in UNLIKE:
        yield from _copies(*case)


def _forget() -> None:
    """Empties every cache that a first plan fills."""
    for module in (alike, compatibility, elements, layout, mirrors, ownership, planner):
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
    each = {key: value / 1000 for key, value in cached.items()}
    met = each["median_s"] <= CACHED_S_MAX
    yield Row(f"cached plan, {model}", each, f"{each['median_s'] * 1e6:.1f} us", met)
    size = len(json.dumps(Report(model, plan(source, target), prompt, PackCost()).as_json()))
    yield Row(f"JSON of the plan, {model}", {"bytes": size}, f"{size / 1e6:.2f} MB", size < JSON_BYTES_MAX)


def _binding(repeats: int) -> Row:
    """A long latent prompt over scattered pages, against numpy writing arrays of the same size."""
    num_tokens, page, num_layers = 131_072, 64, 61
    num_pages = num_tokens // page
    prompt, chunk = Prompt(num_tokens), Chunk((0, num_layers), (0, num_tokens))
    side = spec("latent:layers=61,dim=576", "tp1", "hnd", prompt)
    made, rng = plan(side, side), np.random.default_rng(1)
    tables = Tables(*({0: {"tokens": 2 * rng.permutation(num_pages).astype(np.int64)}} for _ in range(2)))
    layers, pages = np.arange(num_layers, dtype=np.int64), np.arange(num_pages, dtype=np.int64)
    steps = bind(made, prompt, tables, chunk)
    num_spans = sum(len(step.spans) for step in steps)
    assert num_spans == num_layers * num_pages, "scattered pages must not merge"
    ours, peer = side_by_side(
        [
            lambda: bind(made, prompt, tables, chunk),
            lambda: [np.add.outer(layers * page, pages) for _ in range(3)],
        ],
        20 * repeats,
    )
    ratio = ours["median_s"] / peer["median_s"]
    figures = {"spans": num_spans, "bind": ours, "add_outer": peer, "ratio": ratio}
    text = f"{ours['median_s'] * 1e3:.2f} ms, {ratio:.1f} x np.add.outer of the same size"
    return Row("bind 131,072 tokens x 61 layers, latent", figures, text, ratio <= BIND_RATIO_MAX)


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
