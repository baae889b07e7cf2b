"""Models by name: which cache a model has, from a built-in card, a Hugging Face config or a spec.

MODEL is a path to a folder with a config.json or to such a file, a card (`deepseek-v3`), or a spec
(`paged:layers=80,heads=8,dim=128`). Several joined by `+` stack their layers. A spec whose kind begins with
`draft.` adds draft layers; without one there are none, even where the model has them, because they are
cached only where a draft runs.
"""

from __future__ import annotations

from baton.plan.cache import Cache
from baton.plan.models.config import card_names, read_card, read_parts
from baton.plan.models.parts import stack

__all__ = ["active_parameters", "card_names", "load_cache", "read_card"]


def load_cache(text: str) -> Cache:
    """The cache of the model that `text` names."""
    return stack(read_parts(text))


def active_parameters(text: str) -> float | None:
    """The parameters that one token uses, drafts not counted, or None where a part does not say."""
    counts = [part.active_parameters for part in read_parts(text) if not part.is_draft]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
