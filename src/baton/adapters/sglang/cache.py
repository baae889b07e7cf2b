"""SGLang's KV pools as Baton sees them: components, storage, layout and pools.

SGLang allocates a tensor for each layer, one for K and one for V, or one of latents with MLA. So every one of
them is a component of its own. A tensor has a row for each token slot; a page is a run of rows, heads lie
inside of a token. Tokens are therefore moved one by one (granule 1), and the page sizes of the two sides may
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.adapters.common import DTYPES, Mesh
from baton.errors import ConfigError
from baton.plan import Cache, Component, Spec, Storage, TensorView, declare, parse_layout
from baton.plan.cache import Dim, Full, Units

GROUP = "pages"
"""The page table; SGLang has one."""
BUFFERS = {"MHATokenToKVPool": ("k_buffer", "v_buffer"), "MLATokenToKVPool": ("kv_buffer",)}
"""By class of the pool: the lists of its tensors. Classes derived from these lay their memory out in other
ways."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One tensor of a layer, as a rank has it."""

    name: str
    layer: int
    """In the model."""
    page_tokens: int
    num_pages: int
    num_heads: int
    """On this rank; 0 if every rank has all of it."""
    channels: int
    dtype: str
    view: TensorView
    """Pages, tokens, heads (unless there are none) and channels."""
    buffer_bytes: int


def describe_pool(pool: Any) -> tuple[LayerCache, ...]:
    """The tensors of a pool, by layer; ConfigError on a pool that cannot be handed over."""
    described = []
    for name, layer, tensor in _tensors(pool):
        if tensor.dim() != 3 or not tensor.is_contiguous():
            raise ConfigError(f"{name}: a cache of shape {tuple(tensor.shape)} cannot be handed over yet")
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"{name}: caches of {tensor.dtype} cannot be handed over")
        num_slots, num_heads, channels = tensor.shape
        num_pages, has_heads = num_slots // pool.page_size, "kv." not in name
        shape = (num_heads, channels) if has_heads else (channels,)
        paged = tensor[: num_pages * pool.page_size].view(num_pages, pool.page_size, *shape)
        described.append(
            LayerCache(
                name=name,
                layer=layer,
                page_tokens=pool.page_size,
                num_pages=num_pages,
                num_heads=num_heads if has_heads else 0,
                channels=channels,
                dtype=DTYPES[tensor.dtype],
                view=TensorView.of(paged),
                buffer_bytes=tensor.untyped_storage().nbytes(),
            )
        )
    return tuple(described)


def make_pools(pool: Any) -> dict[str, Any]:
    """The pools of a rank, by component: SGLang's own memory as bytes."""
    pools = dict[str, Any]()
    for name, _, tensor in _tensors(pool):
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        pools[name] = memory if memory.is_cuda else memory.numpy()
    return pools


def _tensors(pool: Any) -> list[tuple[str, int, torch.Tensor]]:
    """Name, layer and tensor of all that a pool holds."""
    kind = type(pool).__name__
    if kind not in BUFFERS:
        raise ConfigError(
            f"caches of kind {kind} cannot be handed over yet; Baton knows {' and '.join(BUFFERS)}"
        )
    return [
        (f"{buffers.removesuffix('_buffer')}.{layer}", layer, tensor)
        for buffers in BUFFERS[kind]
        for layer, tensor in enumerate(getattr(pool, buffers), pool.start_layer)
    ]


def make_spec(stages: Sequence[Sequence[LayerCache]], mesh: Mesh) -> Spec:
    """The spec of an instance, from the caches of each of its pipeline stages."""
    caches = [cache for stage in stages for cache in stage]
    sizes = [len({cache.layer for cache in stage}) for stage in stages]
    layout = parse_layout(f"pp{mesh.pp_size}:{'-'.join(map(str, sizes))}.tp{mesh.tp_size}")
    components = tuple(_component(cache, mesh) for cache in sorted(caches, key=lambda cache: cache.name))
    storage = Storage(
        page_tokens=caches[0].page_tokens,
        dtype=caches[0].dtype,
        num_pages_default=min(cache.num_pages for cache in caches),
    )
    spec = Spec(layout, Cache(sum(sizes), components), storage)
    placements = [
        declare(
            spec,
            cache.name,
            ("page", "token", "unit", "channel") if cache.num_heads else ("page", "token", "channel"),
            [cache.view],
            buffer=cache.name,
            buffer_bytes=cache.buffer_bytes,
            stage=number,
        )
        for number, stage in enumerate(stages)
        for cache in stage
    ]
    return replace(spec, storage=storage.with_placements(placements))


def _component(cache: LayerCache, mesh: Mesh) -> Component:
    units = None
    if cache.num_heads:
        is_mirrored = mesh.num_kv_heads < mesh.tp_size
        units = Units(mesh.num_kv_heads if is_mirrored else cache.num_heads * mesh.tp_size)
    return Component(
        name=cache.name,
        layers=((cache.layer, cache.layer + 1),),
        units=units,
        dims=(Dim("channel", cache.channels),),
        extent=Full(),
        group=GROUP,
        bundle=cache.name,
        dtype=cache.dtype,
    )
