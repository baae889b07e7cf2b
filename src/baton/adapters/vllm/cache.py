"""vLLM's KV cache as Baton sees it: components, storage, layout and pools.

vLLM has its cache in one allocation, or few: layer l's page for block b begins at an offset of its own plus
b times a stride. A component is what layers of one shape and one cache group keep; it declares where its
layers lie. Cache groups may overlay each other: a block id belongs to one group at a time.

A page is a block of one head and is never taken apart (granule = block): what is inside is the business of
vLLM's kernel. So both sides need the same block size and the same kernel.

A recurrent layer keeps one block for each request: the state of a convolution, whose channels are parts that
tensor parallelism cuts by themselves (like x, B and C of Mamba 2), and behind it the state of each head.

With `split_kv` K and V are components of their own and tokens move one by one, as in engines of other kinds.
vLLM does not say where a kernel puts a token inside of a block, so the kernel is asked: it stores numbers in
a block beside the cache. Most keep them at fixed strides; one that packs them in another way is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch

from baton.adapters.common import DTYPES, WorkerMesh, memory_of
from baton.errors import ConfigError
from baton.plan import Cache, Component, Spec, Storage, TensorView, declare, parse_layout
from baton.plan.cache import Dim, Extent, Full, State, Units, Window
from baton.plan.ranges import merged

Store: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""How a layer's kernel stores keys and values (tokens, heads, channels) in a cache, at slots."""

BASE, NUM_DIGITS = 255, 3
"""Of the numbers that a kernel is asked to store: every dtype has the integers up to 256."""
ATTENTION_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""vLLM's classes of attention caches that are understood: others keep or free blocks in ways of their own."""
_OTHER_REMEDY = f"run a model whose layers have a {', '.join(ATTENTION_SPECS)} or MambaSpec"
_REMEDIES = {
    "ChunkedLocalAttentionSpec": "start both sides with --disable-hybrid-kv-cache-manager, so that vLLM "
    "keeps all blocks of these layers"
}
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The cache of one attention layer, or a part of one or of a state, as a worker has registered it."""

    name: str
    """vLLM's name of the layer."""
    index: int
    """The number of the layer in the model."""
    group: int
    num_blocks: int
    num_heads: int
    """On this rank; 0 if every rank has all of it."""
    block_tokens: int
    """0: it is a state, one for each request."""
    channels: int
    dtype: str
    window: int
    """In tokens; 0 if there is none."""
    view: TensorView
    """Where it lies in its buffer."""
    buffer: str
    buffer_bytes: int
    part: str = ""
    """k or v where they are split, or the part of a state."""
    num_taps: int = 0
    """How many inputs of each channel a convolution keeps."""
    num_units: int = 0
    """Of all ranks, where some have the same ones; 0: each has its own."""

    @property
    def is_state(self) -> bool:
        return not self.block_tokens

    @property
    def component(self) -> str:
        """The name of its component: layers of one kind, shape and cache group have one together."""
        if self.part and not self.is_state:
            return self.part
        kind = _LAYER_NUMBER.sub(".*.", self.name, count=1).strip(".")
        return f"{kind}/{self.group}/{self.part or self.channels}"


def group_name(group: int) -> str:
    """The page table of a KV cache group."""
    return f"blocks.{group}"


def layer_index(name: str) -> int:
    """The number of a layer, from its name."""
    match = _LAYER_NUMBER.search(name)
    if match is None:
        raise ConfigError(f"layer {name!r} has no number in its name, so its place in the model is not known")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class StateForm:
    """What vLLM does not say of a recurrent state in its spec."""

    num_groups: int = 1
    """Of B and C of Mamba 2, in the whole model."""
    has_channels_first: bool = False
    """Whether the state of a convolution is channels by taps, and not taps by channels."""


STATE_FORM = StateForm()


def describe_layers(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Any],
    num_blocks: int,
    state_form: StateForm = STATE_FORM,
) -> tuple[CacheLayer, ...]:
    """The layers that vLLM has registered, by number; ConfigError on a cache that cannot be handed over.

    `groups` are the `kv_cache_groups` of vLLM's KVCacheConfig. A layer that reads the cache of another is
    left out: vLLM registers it with the tensor of the one that writes, and names it in no group or behind it.
    """
    buffers, layers = buffer_names(kv_caches), []
    places: set[tuple[int, TensorView]] = set()
    unknown = set(kv_caches)
    for number, group in enumerate(groups):
        own_places: set[tuple[int, TensorView]] = set()
        for name in group.layer_names:
            if name not in kv_caches:
                continue
            cache = kv_caches[name]
            unknown.discard(name)
            if _place(cache) in own_places:
                continue
            own_places.add(_place(cache))
            spec = layer_spec(name, group.kv_cache_spec)
            if is_state(spec):
                described = _describe_state(name, cache, number, spec, state_form)
            else:
                described = (_describe(name, cache, number, spec, num_blocks),)
            storage = cache.untyped_storage()
            layers += [
                replace(layer, buffer=buffers[storage.data_ptr()], buffer_bytes=storage.nbytes())
                for layer in described
            ]
        places |= own_places
    for name in sorted(unknown):
        if _place(kv_caches[name]) not in places:
            raise ConfigError(
                f"layer {name!r} is in no KV cache group and has a cache of its own, which cannot be handed "
                "over; run a model without such layers"
            )
    if not layers:
        raise ConfigError("this worker has no KV cache to hand over")
    return tuple(sorted(layers, key=lambda layer: (layer.index, layer.name, layer.part)))


def _place(cache: torch.Tensor) -> tuple[int, TensorView]:
    """Where a cache lies: the address of its allocation, and its view of it."""
    return cache.untyped_storage().data_ptr(), TensorView.of(cache)


def layer_spec(name: str, group_spec: Any) -> Any:
    """The KV cache spec of a layer, from that of its group."""
    return getattr(group_spec, "kv_cache_specs", {}).get(name, group_spec)


def is_state(spec: Any) -> bool:
    """Whether a KV cache spec is that of a recurrent layer."""
    return type(spec).__name__ == "MambaSpec"


def buffer_names(kv_caches: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """By address: the name of every allocation, in the order in which their layers are registered."""
    addresses = dict.fromkeys(cache.untyped_storage().data_ptr() for cache in kv_caches.values())
    return {address: f"cache.{number}" for number, address in enumerate(addresses)}


def _describe(name: str, cache: torch.Tensor, group: int, spec: Any, num_blocks: int) -> CacheLayer:
    kind = type(spec).__name__
    if kind not in ATTENTION_SPECS:
        raise ConfigError(
            f"layer {name}: caches of kind {kind} cannot be handed over; {_REMEDIES.get(kind, _OTHER_REMEDY)}"
        )
    if cache.dim() not in (3, 4):
        raise ConfigError(
            f"layer {name}: its cache has the shape {tuple(cache.shape)}, not one of blocks, heads, tokens "
            "and channels; use another --attention-backend"
        )
    if cache.dtype not in DTYPES:
        raise ConfigError(f"layer {name}: caches of {cache.dtype} cannot be handed over")
    if cache.stride()[-2:] != (cache.shape[-1], 1):
        raise ConfigError(
            f"layer {name}: the tokens of a head lie apart (strides {tuple(cache.stride())}); "
            "start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    if cache.shape[0] != num_blocks:
        raise ConfigError(
            f"layer {name}: {cache.shape[0]} kernel blocks for {num_blocks} blocks; start vLLM with "
            f"--block-size {cache.shape[-2]}"
        )
    return CacheLayer(
        name=name,
        index=layer_index(name),
        group=group,
        num_blocks=num_blocks,
        num_heads=0 if "MLA" in kind else cache.shape[1],
        block_tokens=cache.shape[-2],
        channels=cache.shape[-1],
        dtype=DTYPES[cache.dtype],
        window=window_of(spec),
        view=TensorView.of(cache),
        buffer="",
        buffer_bytes=0,
    )


def _describe_state(
    name: str, cache: torch.Tensor, group: int, spec: Any, form: StateForm
) -> tuple[CacheLayer, ...]:
    """The parts of a recurrent layer's state; `cache` is its blocks as bytes."""
    if spec.mamba_cache_mode != "none":
        raise ConfigError(
            f"layer {name}: a recurrent state cannot be handed over with a prefix cache; start vLLM with "
            "--no-enable-prefix-caching"
        )
    convs = _conv_parts(name, spec, form)
    if spec.num_speculative_blocks or spec.tp_replicated or len(spec.shapes) > 2:
        raise ConfigError(
            f"layer {name}: states of drafts, of the whole model on each rank, and with a replay buffer "
            "cannot be handed over yet"
        )
    layers: list[CacheLayer] = []
    start = int(cache.storage_offset()) * cache.element_size()
    page_bytes = cache.stride(0) * cache.element_size()
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        item, parts = dtype.itemsize, convs
        if dtype not in DTYPES or start % item or page_bytes % item:
            raise ConfigError(f"layer {name}: a state of {dtype} in blocks of {page_bytes} bytes")
        if layers or not convs:
            parts = [("state", shape[0], prod(shape[1:]), 0)]
            num_taps, tap, channel = 0, 0, 1
        else:
            num_channels = sum(units * channels for _, units, channels, _ in convs)
            num_taps = prod(shape) // num_channels
            tap, channel = (1, num_taps) if form.has_channels_first else (num_channels, 1)
        first = start
        for part, units, channels, num_units in parts:
            sizes = (cache.shape[0], units, channels, *([num_taps] if num_taps else []))
            strides = (page_bytes // item, channels * channel, channel, *([tap] if num_taps else []))
            layers.append(
                CacheLayer(
                    name=name,
                    index=layer_index(name),
                    group=group,
                    num_blocks=cache.shape[0],
                    num_heads=units,
                    block_tokens=0,
                    channels=channels,
                    dtype=DTYPES[dtype],
                    window=0,
                    view=TensorView(first, sizes, strides, item),
                    buffer="",
                    buffer_bytes=0,
                    part=part,
                    num_taps=num_taps,
                    num_units=num_units,
                )
            )
            first += units * channels * channel * item
        start += prod(shape) * item
    return tuple(layers)


def _conv_parts(name: str, spec: Any, form: StateForm) -> list[tuple[str, int, int, int]]:
    """What the channels of a convolution are: parts of units of channels, and units of the whole model."""
    kind, shapes = spec.mamba_type.name, spec.shapes
    # vLLM keeps taps by channels, or the other way round.
    num_channels = shapes[0][0 if form.has_channels_first else 1]
    match kind:
        case "LINEAR":
            return []
        case "SHORT_CONV" | "MAMBA1":
            return [("conv", num_channels, 1, 0)]
        case "MAMBA2":
            heads, channels, size = shapes[1]
            groups = (num_channels - heads * channels) // 2 // size
            return [
                ("conv.x", heads, channels, 0),
                ("conv.B", groups, size, form.num_groups),
                ("conv.C", groups, size, form.num_groups),
            ]
        case "GDN_ATTN":
            heads, channels, size = shapes[1]
            keys = (num_channels - heads * channels) // 2 // size
            return [("conv.q", keys, size, 0), ("conv.k", keys, size, 0), ("conv.v", heads, channels, 0)]
        case _:
            raise ConfigError(f"layer {name}: states of kind {kind} cannot be handed over yet")


def split_layer(layer: CacheLayer, cache: torch.Tensor, store: Store) -> tuple[CacheLayer, CacheLayer]:
    """K and V of a layer by themselves; ConfigError where other engines cannot have them so."""
    if layer.is_state or layer.window or layer.group or not layer.num_heads or layer.dtype == "fp8":
        raise ConfigError(
            f"split_kv: layer {layer.name} has a state, a sliding window, several cache groups, latents or "
            "an fp8 cache, which other engines store differently; leave split_kv out"
        )
    key, value = (_split(layer, part, _stored_places(cache, store, part)) for part in ("k", "v"))
    return key, value


def _split(layer: CacheLayer, part: str, places: torch.Tensor | None) -> CacheLayer:
    if places is None:
        raise ConfigError(
            f"split_kv: the kernel of layer {layer.name} packs {part} of {layer.dtype} inside of a block and "
            "has no fixed strides there; use another attention backend or dtype (float32 on a CPU), or leave "
            "split_kv out"
        )
    view, first = layer.view, int(places[0, 0])
    strides = (*view.strides[:2], int(places[1, 0]) - first, int(places[0, 1]) - first)
    shape = (*view.shape[:2], *places.shape)
    inside = TensorView(view.offset + first * view.item_bytes, shape, strides, view.item_bytes)
    return replace(layer, part=part, channels=places.shape[1], view=inside)


def _stored_places(cache: torch.Tensor, store: Store, part: str) -> torch.Tensor | None:
    """By token and channel: its place in a head's block, in elements; None without fixed strides."""
    _, num_heads, num_tokens, channels = cache.shape
    shape = (num_tokens, channels // 2)
    numbers = torch.arange(shape[0] * shape[1])
    slots = torch.arange(num_tokens, 2 * num_tokens, device=cache.device)
    cells = torch.zeros(num_heads, num_tokens * channels, dtype=torch.int64)
    for digit in range(NUM_DIGITS):
        block = cache.new_zeros(2, *cache.shape[1:])
        # Zeros are where nothing is stored.
        digits = (numbers // BASE**digit % BASE + 1).to(cache)
        marks = digits.view(shape[0], 1, shape[1]).expand(-1, num_heads, -1).contiguous()
        blank = torch.zeros_like(marks)
        key, value = (marks, blank) if part == "k" else (blank, marks)
        store(key, value, block, slots)
        cells += (block[1].reshape(num_heads, -1).cpu().long() - 1) * BASE**digit
    order = cells[0].argsort()[-len(numbers) :]
    if not (cells == cells[0]).all() or not torch.equal(cells[0][order], numbers):
        return None
    places = order.view(shape)
    token, channel = places[1, 0] - places[0, 0], places[0, 1] - places[0, 0]
    expected = places[0, 0] + torch.arange(shape[0])[:, None] * token + torch.arange(shape[1]) * channel
    return places if torch.equal(places, expected) and min(token, channel) > 0 else None


def window_of(spec: Any) -> int:
    """The sliding window of a KV cache spec in tokens; 0 if its blocks are kept for the whole request."""
    return int(spec.sliding_window or 0) if "SlidingWindow" in type(spec).__name__ else 0


def reach(window: int) -> int:
    """How far a window reaches back from the end of a prompt without its last token: one token less."""
    return max(1, window - 1)


def make_spec(stages: Sequence[Sequence[CacheLayer]], mesh: WorkerMesh) -> Spec:
    """The spec of an engine, from the layers of each of its pipeline stages."""
    starts = [min(layer.index for layer in stage) for stage in stages]
    layers = [layer for stage in stages for layer in stage]
    num_layers = max(layer.index for layer in layers) + 1
    ends = [*starts[1:], num_layers]
    sizes = [end - start for start, end in zip([0, *starts[1:]], ends, strict=True)]
    layout = parse_layout(f"pp{mesh.pp_size}:{'-'.join(map(str, sizes))}.tp{mesh.tp_size}")
    parts: dict[str, list[CacheLayer]] = {}
    for layer in layers:
        parts.setdefault(layer.component, []).append(layer)
    components = [_component(name, parts[name], mesh) for name in sorted(parts)]
    blocks = {layer.block_tokens for layer in layers if not layer.is_state}
    if len(blocks) > 1:
        sizes_text = ", ".join(map(str, sorted(blocks)))
        raise ConfigError(f"KV cache groups with blocks of {sizes_text} tokens cannot be handed over yet")
    block_tokens = max(blocks, default=1)
    is_split = any(layer.part and not layer.is_state for layer in layers)
    storage = Storage(
        page_tokens=block_tokens,
        dtype=layers[0].dtype,
        granule=1 if is_split else block_tokens,
        num_pages_default=layers[0].num_blocks,
    )
    spec = Spec(layout, Cache(num_layers, tuple(components)), storage)
    placements = []
    for stage, stage_layers in enumerate(stages):
        for name in sorted(parts):
            held = [layer for layer in stage_layers if layer.component == name]
            other = next((layer for layer in held if layer.buffer != held[0].buffer), None)
            if other is not None:
                raise ConfigError(
                    f"{name}: vLLM has these layers in several allocations ({held[0].name} in "
                    f"{held[0].buffer}, {other.name} in {other.buffer}; {len(held)} layers in all), which "
                    "cannot be handed over; give all layers one KV cache dtype (--kv-cache-dtype), or use "
                    "another model"
                )
            if held:
                view = held[0].view
                if held[0].is_state:
                    axes = ("page", "unit", "channel", "tap")[: len(view.shape)]
                else:
                    num_named = len(view.shape) if held[0].part else len(view.shape) - 2
                    axes = ("page", "unit", "token", "channel")[:num_named]
                placements.append(
                    declare(
                        spec,
                        name,
                        axes,
                        [layer.view for layer in held],
                        buffer=held[0].buffer,
                        buffer_bytes=held[0].buffer_bytes,
                        stage=stage,
                    )
                )
    return replace(spec, storage=storage.with_placements(placements))


def _shape(layer: CacheLayer) -> str:
    """What layers of a component have in common."""
    return f"{layer.num_heads} heads of {layer.channels} channels, {layer.dtype}, window {layer.window}"


def _component(name: str, layers: Sequence[CacheLayer], mesh: WorkerMesh) -> Component:
    layer = layers[0]
    other = next((other for other in layers if _shape(other) != _shape(layer)), None)
    if other is not None:
        raise ConfigError(
            f"{name}: layers of one cache group differ: {layer.name} has {_shape(layer)}; {other.name} has "
            f"{_shape(other)}; such a model cannot be handed over, unless the dtypes alone differ: then give "
            "all layers one (--kv-cache-dtype)"
        )
    extent: Extent = Window(reach(layer.window)) if layer.window else Full()
    units, dims = mesh.units(layer.num_heads), [Dim("channel", layer.channels)]
    if layer.is_state:
        extent, units = State(), Units(layer.num_units or layer.num_heads * mesh.tp_size)
        dims += [Dim("tap", layer.num_taps)] if layer.num_taps else []
    return Component(
        name=name,
        layers=merged([(layer.index, layer.index + 1) for layer in layers]),
        units=units,
        dims=tuple(dims),
        extent=extent,
        group=group_name(layer.group),
        bundle=name,
        dtype=layer.dtype,
    )


def make_pools(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The pools of a rank, by name: vLLM's own memory as bytes."""
    names = buffer_names(kv_caches)
    return {names[cache.untyped_storage().data_ptr()]: memory_of(cache) for cache in kv_caches.values()}
