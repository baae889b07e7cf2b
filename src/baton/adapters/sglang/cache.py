"""SGLang's KV pools as Baton sees them: components, storage, layout and pools.

SGLang allocates a tensor for each layer, one for K and one for V, or one of latents with MLA. So every one of
them is a component of its own. A tensor has a row for each token slot; a page is a run of rows, heads lie
inside of a token. Tokens are therefore moved one by one (granule 1), and the page sizes of the two sides may
differ.

A sparse index (DSA) has a row for each page, whose inside is the business of SGLang's kernels. With one,
pages move whole (granule = page), and both sides need the same page size.

Sliding windows and recurrent states lie in pools of their own, with page ids of their own. Of a window only
the last tokens of the prompt are handed over. A request has one slot of states, handed over with its last
token. A convolution's state is its last inputs, three parts behind one another. TP cuts each of them: q, k
and v by channels; of Mamba-2 x by channels, B and C by groups, of which ranks may share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from baton.adapters.common import DTYPES, WorkerMesh, memory_of
from baton.errors import ConfigError
from baton.plan import Cache, Component, Spec, Storage, TensorView, declare, parse_layout
from baton.plan.cache import Dim, Extent, Full, State, Units, Window

GROUP, WINDOWS, STATES = "pages", "windows", "states"
"""The page tables: of the KV pool, of the one of sliding windows, and of recurrent states."""
INDEX = "index_k_with_scale"
BUFFERS = {
    "MHATokenToKVPool": ("k_buffer", "v_buffer"),
    "MLATokenToKVPool": ("kv_buffer",),
    "DSATokenToKVPool": ("kv_buffer", f"{INDEX}_buffer"),
}
"""By class of the pool: the lists of its tensors. Classes derived from these lay their memory out in other
ways."""
WITH_WINDOWS, WITH_STATES = "SWAKVPool", "HybridLinearKVPool"
"""Classes of pools that have one of the others inside."""
MAMBA2 = {
    "falcon_h1": "mamba_n_groups",
    "granitemoehybrid": "mamba_n_groups",
    "mamba2": "n_groups",
    "nemotron_h": "mamba_n_groups",
}
"""By type of the model, where SGLang computes it with a Mamba-2 mixer: the name of the number of groups."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One tensor of a layer, or a part of one, as a rank has it."""

    name: str
    layer: int
    """In the model."""
    group: str
    extent: Extent
    page_tokens: int
    num_pages: int
    axes: tuple[str, ...]
    """Of the view."""
    num_heads: int
    """KV heads on this rank; 0 if every rank has all of it, or if it is a state."""
    units: Units | None
    """What TP cuts a state by."""
    dims: tuple[Dim, ...]
    dtype: str
    view: TensorView
    buffer: str
    buffer_bytes: int

    @property
    def is_index(self) -> bool:
        return self.name.startswith(INDEX)

    @property
    def is_state(self) -> bool:
        return self.group == STATES


def describe_pool(
    pool: Any, window: int = 0, tp_size: int = 1, num_groups: int = 0
) -> tuple[LayerCache, ...]:
    """The caches of a pool; ConfigError on a pool that cannot be handed over.

    `window`: how many tokens before its own a layer with a sliding window reads. `num_groups`: of Mamba-2, or
    0 if the states are of another kind.
    """
    caches = tuple(cache for cache, _ in _caches(pool, window, tp_size, num_groups))
    if window < 1 and any(cache.group == WINDOWS for cache in caches):
        raise ConfigError(
            f"a pool of sliding windows, and windows of {window} tokens; start SGLang with "
            "--disable-hybrid-swa-memory"
        )
    return caches


def check_heads(num_heads: int, num_window_heads: int, tp_size: int) -> None:
    """Raises ConfigError where ranks share heads, and layers with windows have another number of them."""
    fewest = min(num_heads, num_window_heads)
    if num_heads != num_window_heads and tp_size > fewest:
        raise ConfigError(
            f"transfer backend baton does not support TP {tp_size} with {num_window_heads} KV heads in "
            f"layers with windows and {num_heads} in others yet; use TP {fewest} or less"
        )


def make_pools(pool: Any) -> dict[str, Any]:
    """The pools of a rank, by buffer: SGLang's own memory as bytes."""
    return {cache.buffer: memory_of(tensor) for cache, tensor in _caches(pool, 0, 1, 0)}


def _caches(
    pool: Any, window: int, tp_size: int, num_groups: int
) -> Iterator[tuple[LayerCache, torch.Tensor]]:
    kind = type(pool).__name__
    if kind == WITH_WINDOWS:
        layers = pool.layers_mapping
        for part, is_window in ((pool.full_kv_pool, False), (pool.swa_kv_pool, True)):
            held = [layer for layer, (_, is_of_window) in layers.items() if is_of_window == is_window]
            group, extent = (WINDOWS, Window(max(1, window))) if is_window else (GROUP, Full())
            yield from _token_caches(part, held, group, extent)
    elif kind == WITH_STATES:
        yield from _token_caches(pool.full_kv_pool, [*pool.full_attention_layer_id_mapping], GROUP, Full())
        yield from _state_caches(pool.mamba_pool, pool.page_size, tp_size, num_groups)
    else:
        yield from _token_caches(pool, None, GROUP, Full())


def _token_caches(
    pool: Any, layers: Sequence[int] | None, group: str, extent: Extent
) -> Iterator[tuple[LayerCache, torch.Tensor]]:
    """Those with an entry for each token; `layers` are by turn, None: all from the first one on."""
    kind = type(pool).__name__
    if kind not in BUFFERS:
        known = ", ".join([*BUFFERS, WITH_WINDOWS, WITH_STATES])
        raise ConfigError(f"caches of kind {kind} cannot be handed over yet; Baton knows {known}")
    if layers is None:
        layers = range(pool.start_layer, pool.start_layer + len(getattr(pool, BUFFERS[kind][0])))
    tensors = [
        (f"{buffers.removesuffix('_buffer')}.{layer}", layer, tensor)
        for buffers in BUFFERS[kind]
        for layer, tensor in zip(layers, getattr(pool, buffers), strict=True)
        if len(tensor)  # a layer may take the index of the one before
    ]
    rows = {name: 1 if name.startswith(INDEX) else pool.page_size for name, _, _ in tensors}
    num_pages = min((len(tensor) // rows[name] for name, _, tensor in tensors), default=0)
    for name, layer, tensor in tensors:
        is_index = name.startswith(INDEX)
        if tensor.dim() != (2 if is_index else 3) or not tensor.is_contiguous():
            raise ConfigError(f"{name}: a cache of shape {tuple(tensor.shape)} cannot be handed over yet")
        num_heads = tensor.shape[1] if name.startswith(("k.", "v.")) else 0
        paged = tensor[: num_pages * rows[name]]
        axes: tuple[str, ...] = ("page",)
        if not is_index:
            heads = (num_heads,) if num_heads else ()
            paged = paged.view(num_pages, pool.page_size, *heads, tensor.shape[-1])
            axes = ("page", "token", *("unit" for _ in heads), "channel")
        cache = LayerCache(
            name=name,
            layer=layer,
            group=group,
            extent=extent,
            page_tokens=pool.page_size,
            num_pages=num_pages,
            axes=axes,
            num_heads=num_heads,
            units=None,
            dims=(Dim("channel", tensor.shape[-1] // (pool.page_size if is_index else 1)),),
            dtype=_dtype(name, tensor),
            view=TensorView.of(paged),
            buffer=name,
            buffer_bytes=tensor.untyped_storage().nbytes(),
        )
        yield cache, tensor


def _state_caches(
    pool: Any, page_tokens: int, tp_size: int, num_groups: int
) -> Iterator[tuple[LayerCache, torch.Tensor]]:
    """Those with an entry for each request: layers x slots x heads x ..., and the inputs of convolutions.
    Linear attention may have only one of them."""
    if pool._slot_siblings:
        kinds = ", ".join(type(state).__name__ for state in pool._slot_siblings)
        raise ConfigError(f"states of kind {kinds} beside those of Mamba cannot be handed over yet")
    temporal = pool.mamba_cache.temporal
    parts = {"temporal": StatePart(temporal, ("unit", "row", "column"), "head", tp_size)}
    for number, conv in enumerate(pool.mamba_cache.conv):
        for index, part in enumerate(_conv_parts(pool, conv, tp_size, num_groups)):
            parts[f"conv.{number}.{index}"] = part
    buffers: dict[int, str] = {}
    for prefix, part in parts.items():
        if not part.tensor.numel():
            continue
        storage = part.tensor.untyped_storage()
        sizes = dict(zip(part.axes, part.tensor.shape[2:], strict=True))
        for index, layer in enumerate(pool.mamba_layer_ids):
            cache = LayerCache(
                name=f"{prefix}.{layer}",
                layer=layer,
                group=STATES,
                extent=State(),
                page_tokens=page_tokens,
                num_pages=part.tensor.shape[1],
                axes=("page", *part.axes),
                num_heads=0,
                units=Units(sizes["unit"] * part.num_shards, part.unit),
                dims=tuple(Dim(axis, size) for axis, size in sizes.items() if axis != "unit"),
                dtype=_dtype(prefix, part.tensor),
                view=TensorView.of(part.tensor[index]),
                buffer=buffers.setdefault(storage.data_ptr(), f"{STATES}.{len(buffers)}"),
                buffer_bytes=storage.nbytes(),
            )
            yield cache, part.tensor


@dataclass(frozen=True, slots=True)
class StatePart:
    """What one rank has of a state: layers x slots x axes."""

    tensor: torch.Tensor
    axes: tuple[str, ...]
    unit: str
    num_shards: int
    """Ranks whose units are others."""


def _conv_parts(pool: Any, conv: torch.Tensor, tp_size: int, num_groups: int) -> list[StatePart]:
    """The parts of a convolution's state; as it is where SGLang does not say what they are."""
    axis, order = (3, ("tap", "unit")) if pool.conv_slice_axis else (2, ("unit", "tap"))
    num_channels, known = conv.shape[axis], pool.conv_shard_groups
    heads, rows, columns = pool.mamba_cache.temporal.shape[2:]
    local_groups = max(1, num_groups // tp_size)
    if known is not None:
        # With fewer heads than ranks there are more channels, some of them on several ranks.
        if sum(known) == num_channels * tp_size and not any(size % tp_size for size in known):
            parts = torch.split(conv, [size // tp_size for size in known], axis)
            return [StatePart(part, order, "channel", tp_size) for part in parts]
    elif num_channels == heads * rows:
        return [StatePart(conv, order, "channel", tp_size)]
    elif num_groups and num_channels == heads * rows + 2 * local_groups * columns:
        sizes = [heads * rows, local_groups * columns, local_groups * columns]
        x, b, c = torch.split(conv, sizes, axis)
        shared = [part.view(*part.shape[:2], local_groups, columns, -1) for part in (b, c)]
        num_shards = num_groups // local_groups
        axes = ("unit", "channel", "tap")
        return [
            StatePart(x, order, "channel", tp_size),
            *(StatePart(part, axes, "group", num_shards) for part in shared),
        ]
    # Only ranks that are cut alike have the same channels.
    return [StatePart(conv.unsqueeze(2), ("unit", "row", "column"), "TP rank", tp_size)]


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"{name}: caches of {tensor.dtype} cannot be handed over")
    return DTYPES[tensor.dtype]


def make_spec(stages: Sequence[Sequence[LayerCache]], mesh: WorkerMesh) -> Spec:
    """The spec of an instance, from the caches of each of its pipeline stages."""
    caches = [cache for stage in stages for cache in stage]
    # A layer may have no cache.
    starts = [0, *(min(cache.layer for cache in stage) for stage in stages[1:])]
    ends = [*starts[1:], max(cache.layer for cache in caches) + 1]
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    cp = f".cp{mesh.cp_size}:mirror" if mesh.cp_size > 1 else ""
    layout = parse_layout(f"pp{mesh.pp_size}:{'-'.join(map(str, sizes))}{cp}.tp{mesh.tp_size}")
    components = tuple(_component(cache, mesh) for cache in sorted(caches, key=lambda cache: cache.name))
    num_pages: dict[str, int] = {}
    for cache in caches:
        num_pages[cache.group] = min(cache.num_pages, num_pages.get(cache.group, cache.num_pages))
    storage = Storage(
        page_tokens=caches[0].page_tokens,
        dtype=caches[0].dtype,
        granule=caches[0].page_tokens if any(cache.is_index for cache in caches) else 1,
    ).with_pages(num_pages)
    spec = Spec(layout, Cache(sum(sizes), components), storage)
    placements = [
        declare(
            spec,
            cache.name,
            cache.axes,
            [cache.view],
            buffer=cache.buffer,
            buffer_bytes=cache.buffer_bytes,
            stage=number,
        )
        for number, stage in enumerate(stages)
        for cache in stage
    ]
    return replace(spec, storage=storage.with_placements(placements))


def _component(cache: LayerCache, mesh: WorkerMesh) -> Component:
    return Component(
        name=cache.name,
        layers=((cache.layer, cache.layer + 1),),
        units=cache.units or mesh.units(cache.num_heads),
        dims=cache.dims,
        extent=cache.extent,
        group=cache.group,
        bundle=cache.name,
        dtype=cache.dtype,
    )
