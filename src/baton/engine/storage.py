"""How the engine keeps its cache: K and V of a page side by side, units before tokens.

A group of layers is then one copy to each target rank and not two, and a whole page is one span for both.
What a copy costs beside its bytes is what layers cost to hand over one by one.
"""

from __future__ import annotations

from baton.plan.cache import Cache
from baton.plan.storage import FUSED, HND, Storage


def engine_storage(cache: Cache, page_tokens: int, dtype: str) -> Storage:
    """Of pools whose sizes are not known yet; what has rows of two sizes is kept apart."""
    widths: dict[str, set[int]] = {}
    for component in cache.components:
        if component.extent.has_tokens:
            widths.setdefault(component.bundle, set()).add(component.num_elements)
    is_even = all(len(found) == 1 for found in widths.values())
    return Storage(page_tokens=page_tokens, dtype=dtype, order=FUSED if is_even else HND)
