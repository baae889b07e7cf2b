"""The pools of one rank as tensors, by component and global layer id."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.commands import PageCopy
from baton.errors import ConfigError, EngineError
from baton.plan.cache import Component
from baton.plan.ownership import Spec, box, placements
from baton.plan.ranges import to_ids
from baton.plan.storage import FUSED, HND, Placement

FP8 = torch.float8_e4m3fn
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
_SIDE = "engine"


class CachePools:
    """The pools' buffers, which the transport allocated, as tensor views."""

    def __init__(
        self, spec: Spec, rank: int, buffers: Mapping[str, NDArray[Any] | Tensor], device: torch.device
    ) -> None:
        if spec.storage.order not in (HND, FUSED):
            raise ConfigError(
                f"the engine keeps pages in the order {', '.join(FUSED)}, or without component; found "
                f"{', '.join(spec.storage.order)}"
            )
        self.spec = spec
        self.device = device
        self.scratch = Scratch()
        self.guessed: dict[int, Tensor] = {}
        """By recurrent layer: its rows of the draft tokens of each slot's last step; see `states`."""
        self._whole: dict[str, Tensor] = {}
        self._layers: dict[tuple[str, int], tuple[Component, Tensor]] = {}
        self._rows: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._both: dict[int, Tensor | None] = {}
        for name, placed in placements(spec, rank, _SIDE).items():
            component = spec.cache.by_name[name]
            held = box(spec, component, rank, _SIDE)
            ids = to_ids(held.layers)
            whole = _view(spec, component, placed, buffers[placed.buffer], (len(ids), _length(held.units)))
            self._whole[name] = movable(whole)
            for i, layer in enumerate(ids):
                self._layers[stem(name), layer] = (component, whole[i])

    def component(self, part: str, layer: int) -> Component:
        """The component that keeps `part` (k, v, latent, ssm, conv.q, ...) of a layer."""
        return self._entry(part, layer)[0]

    def view(self, part: str, layer: int) -> Tensor:
        """(pages, units, tokens of a page, channels), without units for a latent; (slots, units, ...)."""
        return self._entry(part, layer)[1]

    def rows(self, part: str, layer: int) -> tuple[Tensor, int]:
        """The same as rows of channels, and how many rows a page begins after the one before.

        Rows of other components may lie between the rows of two pages.
        """
        rows = self._rows.get((part, layer))
        if rows is None:
            rows = self._rows[part, layer] = _as_rows(*self._entry(part, layer))
        return rows

    def side_by_side(self, layer: int) -> Tensor | None:
        """The rows of k and v as one, v's as further units of a page; None where they lie apart."""
        if layer not in self._both:
            k, v = self.view("k", layer), self.view("v", layer)
            self._both[layer] = _joined(k, v)
        return self._both[layer]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages on every layer of this rank."""
        for group in sorted({copy.group for copy in copies}):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            is_chained = bool({a for a, _ in pairs} & {b for _, b in pairs})
            for batch in [[pair] for pair in pairs] if is_chained else [pairs]:
                self._copy(group, batch)

    def _copy(self, group: str, pairs: list[tuple[int, int]]) -> None:
        sources, targets = torch.tensor(pairs, device=self.device).T.contiguous()
        for name, whole in self._whole.items():
            if self.spec.cache.by_name[name].group == group:
                whole.index_copy_(1, targets, whole.index_select(1, sources))

    def _entry(self, part: str, layer: int) -> tuple[Component, Tensor]:
        try:
            return self._layers[part, layer]
        except KeyError:
            raise EngineError(f"layer {layer} keeps no {part} on this rank") from None


def movable(pool: Tensor) -> Tensor:
    """A pool for operations that move its numbers, which torch does not have for fp8 on CPU."""
    return pool.view(torch.uint8) if pool.dtype == FP8 else pool


def stem(name: str) -> str:
    """The part of a layer that a component is: `k` for k, k.w128 and draft.0.k, `conv.q` for conv.q."""
    parts = name.split(".")
    if parts[0] == "draft":
        parts = parts[2:]
    is_window = len(parts) > 1 and parts[-1][:1] == "w" and parts[-1][1:].isdigit()
    return ".".join(parts[:-1] if is_window else parts)


def _as_rows(component: Component, view: Tensor) -> tuple[Tensor, int]:
    num_channels = view.shape[-1]
    page_rows, rest = divmod(view.stride(0), num_channels)
    if rest:
        raise ConfigError(
            f"{component.name} has rows of {num_channels} channels in pages {view.stride(0)} apart; "
            "what is stored side by side has to have rows of one size"
        )
    inside = math.prod(view.shape[1:-1])
    num_rows = (len(view) - 1) * page_rows + inside if inside else 0
    return view.as_strided((num_rows, num_channels), (num_channels, 1)), page_rows


def _joined(k: Tensor, v: Tensor) -> Tensor | None:
    """Rows of both where a page has v's behind k's and nothing between them."""
    num_inside, num_channels = math.prod(k.shape[1:-1]), k.shape[-1]
    is_beside = v.storage_offset() - k.storage_offset() == num_inside * num_channels
    if v.shape != k.shape or v.stride() != k.stride() or not is_beside or not num_inside:
        return None
    if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        return None
    num_rows = (len(k) - 1) * (k.stride(0) // num_channels) + 2 * num_inside
    return k.as_strided((num_rows, num_channels), (num_channels, 1))


def _length(units: tuple[int, int]) -> int:
    return units[1] - units[0]


def _view(
    spec: Spec,
    component: Component,
    placed: Placement,
    buffer: NDArray[Any] | Tensor,
    counts: tuple[int, int],
) -> Tensor:
    """(layers, pages, units, tokens, ...) over a buffer, by the strides that the plan copies by."""
    name = spec.storage.dtype_of(component)
    if name not in DTYPES:
        raise ConfigError(f"the engine cannot compute on a cache of {name}; use one of {', '.join(DTYPES)}")
    flat = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    items = flat.reshape(-1).view(torch.uint8)[: placed.buffer_bytes].view(DTYPES[name])
    num_layers, num_units = counts
    sizes = [("layer", num_layers), ("page", spec.storage.pages_of(component.group))]
    if component.units is not None:
        sizes.append(("unit", num_units))
    if component.extent.has_tokens:
        sizes.append(("token", spec.storage.page_tokens))
    sizes.extend((dim.name, dim.size) for dim in component.dims)
    strides = [placed.stride(axis) // placed.item_bytes for axis, _ in sizes]
    return items.as_strided([count for _, count in sizes], strides, placed.offset // placed.item_bytes)


# Room for what a layer reads out of the pools, used again by every layer and step.
#
# Fresh memory would be touched for the first time at every layer, which costs more than the reading itself.


class Scratch:
    """Growing buffers by name; a new read under a name overwrites the one before."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def read(self, name: str, pool: Tensor, slots: Tensor) -> Tensor:
        """The pool's rows at `slots`."""
        count = slots.numel() * pool.shape[-1]
        room = self._rooms.get(name)
        if room is None or room.numel() < count or room.dtype != pool.dtype:
            # Half as much again: contexts grow by a token per step.
            room = torch.empty(count + count // 2, dtype=pool.dtype, device=pool.device)
            self._rooms[name] = room
        out = room[:count].view(-1, pool.shape[-1])
        torch.index_select(movable(pool), 0, slots, out=movable(out))
        return out
