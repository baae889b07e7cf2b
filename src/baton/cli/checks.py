"""What a command refuses before its slow imports: PyTorch, NumPy and the HTTP server take seconds."""

from __future__ import annotations

from collections.abc import Iterable

from baton.engine.model_names import check_dtype, check_model
from baton.errors import ConfigError
from baton.plan.layout import parse_layout

NUM_INSTANCES_MAX = 64


def check_first(model: str, layouts: Iterable[str], dtype: str | None) -> None:
    """Raises on a model, layout or dtype that is none; others are left to `engine.config`."""
    for layout in layouts:
        parse_layout(layout)
    check_model(model)
    check_dtype(dtype or "auto")


def parse_layouts(option: str, text: str | None) -> tuple[str, ...]:
    """The layouts of `pp2,tp3`, one for each instance."""
    if text is None:
        return ()
    layouts = tuple(part.strip() for part in text.split(","))
    if not all(layouts):
        raise ConfigError(f"{option} {text!r} has an empty layout; write it like pp2 or pp2,tp2")
    if len(layouts) > NUM_INSTANCES_MAX:
        raise ConfigError(f"{option} has {len(layouts)} layouts; at most {NUM_INSTANCES_MAX} are started")
    return layouts
