"""Which part of a model's heads, vocabulary, width and experts a rank computes."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.model.seam import Share
from baton.errors import ConfigError
from baton.plan.layout import parse_layout
from baton.plan.ranges import Range, even_cuts


def cut_evenly(total: int, share: Share) -> Range:
    """A share of `total` things; sizes differ by at most one, earlier shares have the extra."""
    return even_cuts(total, share.count, extra_first=True)[share.index]


def cut_heads(num_heads: int, num_kv_heads: int, share: Share) -> tuple[Range, Range]:
    """The query heads and the kv heads of a share.

    Query heads follow their kv head. With more shares than kv heads, each kv head is on several consecutive
    shares and its query heads are dealt over these, which may leave some with none.
    """
    group = num_heads // num_kv_heads
    if share.count <= num_kv_heads:
        first, last = cut_evenly(num_kv_heads, share)
        return (first * group, last * group), (first, last)
    if share.count % num_kv_heads:
        raise ConfigError(
            f"tp{share.count} is more than the model's {num_kv_heads} kv heads and not a multiple of them; "
            f"use tp up to {num_kv_heads}, or a multiple of {num_kv_heads}"
        )
    num_copies = share.count // num_kv_heads
    head, copy = divmod(share.index, num_copies)
    first, last = cut_evenly(group, Share(copy, num_copies))
    return (head * group + first, head * group + last), (head, head + 1)


def cut_units(num_units: int, unit: str, share: Share) -> tuple[Range, ...]:
    """The units that each share keeps of a recurrent state, as the plan cuts it."""
    layout = parse_layout(f"tp{share.count}")
    return layout.unit_blocks(num_units, component="recurrent state", unit=unit, side="engine")


def covering(heads: Sequence[Range], kept: Sequence[Range], num_heads_each: int) -> tuple[Range, ...]:
    """The units that each share computes with: those that its heads belong to, and those that it keeps."""
    return tuple(
        (min(first // num_heads_each, own[0]), max(-(-last // num_heads_each), own[1]))
        for (first, last), own in zip(heads, kept, strict=True)
    )


def cut_mirrored(blocks: Sequence[Range], size: int, share: Share) -> Range:
    """The elements of a share's heads, `size` each, that it adds to a sum; mirrors add a part each."""
    block = blocks[share.index]
    mirrors = [i for i, each in enumerate(blocks) if each == block]
    first, last = cut_evenly((block[1] - block[0]) * size, Share(mirrors.index(share.index), len(mirrors)))
    return block[0] * size + first, block[0] * size + last


def scaled(span: Range, size: int) -> Range:
    """The span of elements that a span of things of `size` elements each covers."""
    return span[0] * size, span[1] * size
