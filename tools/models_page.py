"""Prints the built-in cards as Markdown: `.venv/bin/python tools/models_page.py > docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.plan.cache import Cache, Component
from baton.plan.dtypes import item_bytes
from baton.plan.models import active_parameters, card_names, load_cache
from baton.plan.ranges import size, text

_RANGES_SHOWN = 4
_TITLE = """# Built-in models

Written by `make docs`; change the cards, not this page. Sizes are for a cache in bf16;
parts whose type the model fixes keep theirs. Draft layers are not included: add them as in
`deepseek-v3+draft.latent:layers=1,dim=576`.
"""
_MODEL_TITLES = (
    "model",
    "layers",
    "bytes per token",
    "of these in windows",
    "state bytes per request",
    "active parameters",
)
_COMPONENT_TITLES = ("model", "component", "on layers", "units", "one unit", "window", "bytes")


def document() -> str:
    """The page about all cards."""
    caches = {name: load_cache(name) for name in card_names()}
    models = [_model_row(name, cache) for name, cache in caches.items()]
    components = [
        _component_row(name, component) for name, cache in caches.items() for component in cache.components
    ]
    return "\n".join(
        (_TITLE, _table(_MODEL_TITLES, models), "## Components\n", _table(_COMPONENT_TITLES, components))
    )


def _model_row(name: str, cache: Cache) -> tuple[str, ...]:
    tokens = [component for component in cache.components if component.extent.has_tokens]
    states = [component for component in cache.components if not component.extent.has_tokens]
    windows = [component for component in tokens if component.extent.window]
    counts = [_number(sum(map(_num_bytes, group))) for group in (tokens, windows, states)]
    active = active_parameters(name)
    return (name, str(cache.num_layers), *counts, f"{active / 1e9:.3g} B" if active else "")


def _component_row(name: str, component: Component) -> tuple[str, ...]:
    units = f"{component.units.count} {component.units.name}s" if component.units else ""
    dims = " x ".join(f"{dim.name} {dim.size}" for dim in component.dims)
    window = str(component.extent.window or "")
    unit = "per token" if component.extent.has_tokens else "per request"
    more = ", ..." if len(component.layers) > _RANGES_SHOWN else ""
    on = f"{size(component.layers)}: {text(component.layers[:_RANGES_SHOWN])}{more}"
    return (name, component.name, on, units, dims, window, f"{_number(_num_bytes(component))} {unit}")


def _num_bytes(component: Component) -> int:
    """Bytes of one entry over all layers and units."""
    num_elements = size(component.layers) * component.num_units * component.num_elements
    return num_elements * item_bytes(component.dtype or "bf16")


def _number(count: int) -> str:
    return f"{count:,}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(document(), end="")
