"""When the layers of a step were computed, from the few moments that are marked, and what each had to send.

A group's end is marked, and its layers share its time: evenly where they are alike, and by what a layer of
their kind takes where they are not. That is the time from the moment at which the layer before has stored its
tokens to the one at which this layer has: the rest of the layer before, which is a part that all layers have,
and this layer's own mixer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from msgspec.structs import replace

from baton.engine.steps import CopyRecord, Due, Group


def shares_of(stored_s: Sequence[float], kinds: Sequence[int]) -> tuple[float, ...]:
    """By layer: what its kind takes, by what a layer takes on average; `stored_s` has a moment for each."""
    spans: dict[int, list[float]] = {}
    # What the first layer took is not known: nothing is before it.
    for (before_s, after_s), kind in zip(pairwise(stored_s), kinds[1:], strict=True):
        spans.setdefault(kind, []).append(after_s - before_s)
    total_s = stored_s[-1] - stored_s[0]
    if total_s <= 0.0:
        return (1.0,) * len(kinds)
    average_s = total_s / (len(kinds) - 1)
    by_kind = {kind: sum(found) / len(found) for kind, found in spans.items()}
    each_s = [by_kind.get(kind, average_s) for kind in kinds]
    return tuple(seconds * len(kinds) / sum(each_s) for seconds in each_s)


def ends_of(groups: Sequence[Group], shares: Sequence[float] | None) -> list[float]:
    """By layer: when it was computed; without shares layers are alike."""
    found, first = [], groups[0].layers[0]
    shares = shares or (1.0,) * (groups[-1].layers[1] - first)
    for group in groups:
        mine = shares[group.layers[0] - first : group.layers[1] - first]
        whole_s, through = group.stop_s - group.start_s, 0.0
        for share in mine:
            through += share
            found.append(group.start_s + whole_s * through / sum(mine))
    return found


def with_dues(
    copies: Sequence[CopyRecord], dues: Mapping[int, Sequence[Due]], ready_s: Mapping[int, float]
) -> list[CopyRecord]:
    """The copies of a hand-over, the first of each chunk with what the chunk consisted of.

    What was copied is dealt to layers in proportion to `dues`. A chunk that has none there is one piece,
    ready at its `ready_s`; tokens that were cached always were.
    """
    sent: dict[int, int] = {}
    for copy in copies:
        sent[copy.chunk] = sent.get(copy.chunk, 0) + copy.num_bytes
    found = []
    for copy in copies:
        if (num_bytes := sent.pop(copy.chunk, 0)) > 0:
            mine = dues.get(copy.chunk) or [Due(ready_s.get(copy.chunk, 0.0), num_bytes)]
            found.append(replace(copy, dues=_dealt(num_bytes, mine)))
        else:
            found.append(copy)
    return found


def _dealt(num_bytes: int, dues: Sequence[Due]) -> list[Due]:
    part = num_bytes / sum(due.num_bytes for due in dues)
    return [Due(due.ready_s, round(due.num_bytes * part), round(due.state_bytes * part)) for due in dues]
