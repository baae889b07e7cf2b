"""vLLM's cache as a spec: stages, heads, windows, latents and groups that overlay each other."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.adapters import common
from baton.adapters.common import StepLayers, WorkerMesh
from baton.adapters.vllm.cache import (
    CacheLayer,
    describe_layers,
    layer_index,
    make_pools,
    make_spec,
    split_layer,
)
from baton.errors import ConfigError
from baton.plan import plan
from baton.plan.ownership import buffers, placements
from baton.transport import open_transport

HEADS, TOKENS, CHANNELS, BLOCKS = 4, 16, 8, 12


class FullAttentionSpec:
    """Named as vLLM's classes are."""


class MLAAttentionSpec:
    pass


class SlidingWindowSpec:
    sliding_window = 64


class ChunkedLocalAttentionSpec:
    attention_chunk_size = 32


class CrossAttentionSpec:
    pass


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def flash_attention(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As vLLM's FlashAttention, FlashInfer and Triton kernels store them: V behind K in each token's row."""
    block, token = slots // cache.shape[2], slots % cache.shape[2]
    cache[block, :, token] = torch.cat([key, value], dim=-1)


def cpu_attention(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As vLLM's CPU kernel does in float32: K by channel, behind it V by token."""
    block, token = slots // cache.shape[2], slots % cache.shape[2]
    keys, values = cache.view(*cache.shape[:2], 2, -1).unbind(2)
    keys.view(*cache.shape[:2], -1, cache.shape[2])[block, :, :, token] = key
    values.view(*cache.shape[:3], -1)[block, :, token] = value


def packed(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As in bfloat16: the channels of K by twos, and the tokens inside of these."""
    cpu_attention(key, value, cache, slots)
    rows = cache.view(*cache.shape[:2], 2, -1)[:, :, 0].unflatten(-1, (-1, 2, cache.shape[2]))
    rows.copy_(rows.transpose(-1, -2).reshape(rows.shape))


def test_a_kernel_that_packs_keys_cannot_be_split() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, CHANNELS)
    group = SimpleNamespace(layer_names=[name(0)], kv_cache_spec=FullAttentionSpec())
    (layer,) = describe_layers({name(0): cache}, [group], BLOCKS)
    key, value = split_layer(layer, cache, cpu_attention)
    assert (key.view.strides[2:], value.view.strides[2:]) == ((1, TOKENS), (CHANNELS // 2, 1))
    with pytest.raises(ConfigError, match=r"packs k of fp32 .*float32 on a CPU"):
        split_layer(layer, cache, packed)
    with pytest.raises(ConfigError, match="sliding window"):
        split_layer(replace(layer, window=64), cache, cpu_attention)
    assert not cache.any(), "the kernel has stored in the cache itself"


def stage(layers: range, heads: int = HEADS, spec: object = None) -> tuple[CacheLayer, ...]:
    raw = torch.zeros(len(layers), BLOCKS, heads, TOKENS, CHANNELS)
    caches = dict(zip(map(name, layers), raw.unbind(0), strict=True))
    group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=spec or FullAttentionSpec())
    return describe_layers(caches, [group], BLOCKS)


def test_stage_sizes_are_those_of_the_registered_layers() -> None:
    """vLLM gives the extra layer to an earlier stage, where Baton's default would not."""
    spec = make_spec([stage(range(3)), stage(range(3, 5))], WorkerMesh(1, 0, 2, 1, HEADS))
    assert str(spec.layout) == "pp2:3-2.tp1"
    (component,) = spec.cache.components
    assert component.layers == ((0, 5),)
    assert buffers(spec, 0, "pool") == {"cache.0": 3 * BLOCKS * HEADS * TOKENS * CHANNELS * 4}


@pytest.mark.parametrize(("tp", "local", "units"), [(1, 4, 4), (2, 2, 4), (4, 1, 4), (8, 1, 4)])
def test_heads_are_cut_and_mirrored_as_vllm_does(tp: int, local: int, units: int) -> None:
    spec = make_spec([stage(range(2), local)], WorkerMesh(0, 0, 1, tp, HEADS))
    assert spec.cache.components[0].num_units == units
    one = make_spec([stage(range(2))], WorkerMesh(0, 0, 1, 1, HEADS))
    assert plan(spec, one).routes
    assert plan(one, spec).routes


def test_a_latent_is_the_same_on_all_ranks() -> None:
    spec = make_spec([stage(range(2), 1, MLAAttentionSpec())], WorkerMesh(0, 0, 1, 2, 1))
    assert spec.cache.components[0].units is None


def test_a_window_is_that_of_the_last_token() -> None:
    """Decode computes the last token itself; before it, one token less is in its window."""
    spec = make_spec([stage(range(2), spec=SlidingWindowSpec())], WorkerMesh(0, 0, 1, 1, HEADS))
    assert spec.cache.components[0].extent.window == 63


def test_groups_may_overlay_each_other() -> None:
    """As for Gemma 3: layer i of one group lies where layer i of the other does."""
    raw = torch.zeros(2, BLOCKS, HEADS, TOKENS, CHANNELS)
    caches = {name(0): raw[0], name(1): raw[1], name(2): raw[0], name(3): raw[1]}
    groups = [
        SimpleNamespace(layer_names=[name(0), name(1)], kv_cache_spec=SlidingWindowSpec()),
        SimpleNamespace(layer_names=[name(2), name(3)], kv_cache_spec=FullAttentionSpec()),
    ]
    layers = describe_layers(caches, groups, BLOCKS)
    spec = make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS))
    assert spec.cache.groups == ("blocks.0", "blocks.1")
    first, second = placements(spec, 0, "pool").values()
    assert (first.buffer, first.offset) == (second.buffer, second.offset) == ("cache.0", 0)
    assert {key: pool.nbytes for key, pool in make_pools(caches).items()} == {"cache.0": raw.nbytes}


@pytest.mark.parametrize("is_in_group", [False, True])
def test_a_layer_that_reads_the_cache_of_another_is_passed_over(is_in_group: bool) -> None:
    """As in Gemma 3n. vLLM registers it with the tensor of the layer that writes, and names it in no group
    that a connector gets, or behind the others. Groups overlay each other as ever."""
    raw = torch.zeros(2, BLOCKS, HEADS, TOKENS, CHANNELS)
    caches = {name(0): raw[0], name(1): raw[1], name(2): raw[0], name(3): raw[0], name(4): raw[1]}
    windows = SimpleNamespace(layer_names=[name(2)], kv_cache_spec=SlidingWindowSpec())
    full = SimpleNamespace(layer_names=[name(0), name(1)], kv_cache_spec=FullAttentionSpec())
    if is_in_group:
        full.layer_names += [name(3), name(4)]
    layers = describe_layers(caches, [windows, full], BLOCKS)
    assert [(layer.name, layer.group) for layer in layers] == [(name(0), 1), (name(1), 1), (name(2), 0)]
    step = StepLayers("fixed:1", {layer.name: layer.index for layer in layers}, [40])
    offered = [step.done(layer) for layer in caches]
    assert offered == [(0, 1), (1, 2), (2, 3), None, None]
    assert not step.repeated


def test_a_layer_with_a_cache_of_its_own_in_no_group_is_refused() -> None:
    raw = torch.zeros(2, BLOCKS, HEADS, TOKENS, CHANNELS)
    group = SimpleNamespace(layer_names=[name(0)], kv_cache_spec=FullAttentionSpec())
    with pytest.raises(ConfigError, match=f"{name(1)}' is in no KV cache group"):
        describe_layers({name(0): raw[0], name(1): raw[1]}, [group], BLOCKS)


def test_layers_of_a_kind_in_several_allocations_are_refused() -> None:
    caches = {name(layer): torch.zeros(BLOCKS, HEADS, TOKENS, CHANNELS) for layer in range(2)}
    group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=FullAttentionSpec())
    layers = describe_layers(caches, [group], BLOCKS)
    remedy = rf"{name(0)} in cache.0, {name(1)} in cache.1; .*dtype"
    with pytest.raises(ConfigError, match=remedy):
        make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS))


def test_layers_of_unlike_windows_in_one_group_are_named() -> None:
    first, second = stage(range(2))
    layers = [first, replace(second, window=64)]
    problem = rf"{name(0)} has 4 heads of 8 channels, fp32, window 0; {name(1)} has .* window 64"
    with pytest.raises(ConfigError, match=problem):
        make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS))


def test_ranks_that_do_not_attach_are_said_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec([stage(range(2), 2)], WorkerMesh(0, 0, 1, 2, HEADS))
    monkeypatch.setenv("BATON_SECRET", "a secret of the tests")
    never_ready = SimpleNamespace(
        address="10.0.0.1:9001", config=SimpleNamespace(epoch=1), wait_ready=lambda timeout_s: False
    )
    monkeypatch.setattr(common, "Endpoint", lambda *_: never_ready)
    group = SimpleNamespace(world_size=2, rank_in_group=0, broadcast_object=lambda known, src: known)
    options, transport = common.ConnectorConfig.parse({"host": "10.0.0.1"}), open_transport("tcp")
    problem = r"2 ranks of pp1:2.tp2 .* 10.0.0.1:9001 within 120 s; .* host .*'10.0.0.1'"
    with pytest.raises(ConfigError, match=problem):
        common.open_endpoint(options, spec, {}, transport, (group,), instance="p")


def test_groups_with_unlike_blocks_are_refused() -> None:
    raw, small = torch.zeros(BLOCKS, HEADS, TOKENS, CHANNELS), torch.zeros(BLOCKS, HEADS, 8, CHANNELS)
    groups = [
        SimpleNamespace(layer_names=[name(0)], kv_cache_spec=FullAttentionSpec()),
        SimpleNamespace(layer_names=[name(1)], kv_cache_spec=SlidingWindowSpec()),
    ]
    layers = describe_layers({name(0): raw, name(1): small}, groups, BLOCKS)
    with pytest.raises(ConfigError, match="blocks of 8, 16 tokens"):
        make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS))


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        (ChunkedLocalAttentionSpec(), "--disable-hybrid-kv-cache-manager"),
        (CrossAttentionSpec(), "FullAttentionSpec"),
    ],
)
def test_caches_of_other_kinds_are_refused_by_name(spec: object, remedy: str) -> None:
    """Of chunked attention, decode has null blocks before the chunk of its last token."""
    with pytest.raises(ConfigError, match=rf"{name(0)}: .*{type(spec).__name__}.*{remedy}"):
        stage(range(2), spec=spec)


def test_a_layer_without_a_number_is_refused() -> None:
    assert layer_index("language_model.model.layers.17.self_attn.attn") == 17
    with pytest.raises(ConfigError, match="no number"):
        layer_index("model.attn")
