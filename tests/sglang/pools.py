"""Real pools of SGLang in the hands of the adapter, without a server; run by the Python that has SGLang.

It prints, by name: "equal" if all its bytes arrived in other pages and slots, or why it was refused.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from baton.adapters.common import WorkerMesh
from baton.adapters.sglang.backend import page_tables
from baton.adapters.sglang.cache import BUFFERS, describe_pool, make_pools, make_spec
from baton.adapters.sglang.transfers import MetadataRows
from baton.errors import ConfigError
from baton.session import Aux, Endpoint, EndpointConfig, Failed, Ready, Request, Timings, prompt_digest
from baton.transport import open_transport

SIZE, HEADS, CHANNELS, LAYERS, TOKENS, PAGE, WINDOW = 128, 2, 16, 3, 50, 16, 20
WAIT_S = 120.0
COMMON = {"size": SIZE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
LATENT_SIZES = {"kv_lora_rank": CHANNELS, "qk_rope_head_dim": 4, "layer_num": LAYERS}
ROW = 1
STATE_LAYERS = [0, 2]
CONVOLUTION = [16, 16, 32]
"""Channels of q, k and v in a gated delta net of 4 heads."""
MAMBA = {"head_dim": 8, "state_size": 4, "conv_kernel": 4, "num_heads": 4}


class Side:
    """The pools of a server's TP ranks, and the row and slots of one request."""

    def __init__(
        self, name: str, make: Callable[[int, int], Any], page: int, tp: int, groups: int, cp: int = 1
    ) -> None:
        self.num_groups, self.tp = groups, tp
        self.ranks = [make(page, tp) for _ in range(cp * tp)]
        self.endpoints: list[Endpoint] = []
        for rank, (pool, _, _) in enumerate(self.ranks):
            mesh = WorkerMesh(0, rank % tp, 1, tp, HEADS, rank // tp, cp)
            config = EndpointConfig(
                instance=name,
                spec=make_spec([describe_pool(pool, WINDOW, tp, groups)], mesh),
                rank=rank,
                secret=b"a secret of the tests",
                coordinator=self.endpoints[0].address if rank else None,
                epoch=self.endpoints[0].config.epoch if rank else 0,
                timings=Timings(silence_s=WAIT_S),
            )
            self.endpoints.append(Endpoint(config, make_pools(pool), open_transport("tcp")))
        assert self.endpoints[0].wait_ready(WAIT_S)

    def pages(self, rank: int) -> dict[str, Any]:
        _, requests, allocator = self.ranks[rank]
        scheduler = SimpleNamespace(req_to_token_pool=requests, token_to_kv_pool_allocator=allocator)
        request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=ROW))
        return page_tables(scheduler, self.endpoints[rank].config.spec.cache.groups, request, TOKENS)

    def fill(self) -> None:
        """Context-parallel ranks have the same."""
        for rank, (pool, _, _) in enumerate(self.ranks):
            for number, memory in enumerate(make_pools(pool).values()):
                chance = torch.Generator().manual_seed(100 * (rank % self.tp) + number)
                memory[:] = torch.randint(0, 256, (memory.size,), generator=chance).to(torch.uint8).numpy()
        if self.num_groups == 1:
            first, *others = [pool.mamba_pool.mamba_cache.conv[0][:, :, -8:] for pool, _, _ in self.ranks]
            for shared in others:
                shared.copy_(first)

    def content(self) -> list[torch.Tensor]:
        """What the request has, all heads and channels."""
        pool, requests, allocator = self.ranks[0]
        slots = requests.req_to_token[ROW, :TOKENS].long()
        pools = [pool for pool, _, _ in self.ranks[: self.tp]]
        if type(pool).__name__ in BUFFERS:
            return in_slots(pools, slots)
        found = in_slots([pool.full_kv_pool for pool in pools], slots)
        if isinstance(pool, SWAKVPool):
            windows = allocator.translate_loc_from_full_to_swa(slots[-WINDOW:])
            return found + in_slots([pool.swa_kv_pool for pool in pools], windows)
        slot = int(requests.req_index_to_mamba_index_mapping[ROW])
        caches = [pool.mamba_pool.mamba_cache for pool in pools]
        found.append(torch.cat([cache.temporal[:, slot] for cache in caches], dim=1))
        axis, shares = 1 + pool.mamba_pool.conv_slice_axis, pool.mamba_pool.conv_shard_groups
        convs = [cache.conv[0][:, slot] for cache in caches]
        if self.num_groups == 1:
            shared = [convs[rank][:, -8:] for rank in (0, -1)]
            return [*found, torch.cat([conv[:, :-8] for conv in convs], dim=axis), *shared]
        if self.num_groups:
            shares = [32, 4 * self.num_groups, 4 * self.num_groups]
        if shares is None:
            return [*found, torch.cat(convs, dim=axis)]
        parts = [conv.split([share // len(pools) for share in shares], axis) for conv in convs]
        return found + [torch.cat(part, dim=axis) for part in zip(*parts, strict=True)]

    def close(self) -> None:
        for endpoint in reversed(self.endpoints):
            endpoint.close()


def in_slots(pools: list[Any], slots: torch.Tensor) -> list[torch.Tensor]:
    """By kind and layer; of an index all pages that the slots lie in."""
    found = []
    for buffers in BUFFERS[type(pools[0]).__name__]:
        for tensors in zip(*(getattr(pool, buffers) for pool in pools), strict=True):
            rows = (slots // pools[0].page_size).unique() if tensors[0].dim() == 2 else slots
            found.append(torch.cat([tensor[rows] for tensor in tensors], dim=1))
    return found


def requests_with(slots: torch.Tensor, pool: Any = None) -> Any:
    pool = pool or ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    pool.write((ROW, slice(0, len(slots))), slots.to(torch.int32))
    return pool


def plain(make: Callable[[int], Any]) -> Callable[[int, int], Any]:
    """Slots in a row, or pages that are in no order; a pool with an index has pages of one size."""

    def make_rank(page: int, tp: int) -> Any:
        pool = make(page)
        pages = {1: torch.arange(9, 9 + TOKENS), 64: torch.tensor([1]), PAGE: torch.tensor([5, 2, 7, 1])}
        slots = pages[pool.page_size][:, None] * pool.page_size + torch.arange(pool.page_size)
        allocator = PagedTokenToKVPoolAllocator(
            SIZE, pool.page_size, torch.float32, "cpu", pool, need_sort=False
        )
        return pool, requests_with(slots.flatten()[:TOKENS]), allocator

    return make_rank


def windows(page: int, tp: int) -> Any:
    """Slots of windows are not those of the tokens; those before the window are free again."""
    pool = SWAKVPool(
        size_swa=SIZE,
        page_size=1,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        enable_alt_stream=False,
        head_num=HEADS // tp,
        head_dim=CHANNELS,
        **COMMON,
    )
    allocator = SWATokenToKVPoolAllocator(SIZE, SIZE, 1, torch.float32, "cpu", pool, need_sort=False)
    allocator.swa_attn_allocator.alloc(10 * tp)
    slots = allocator.alloc(TOKENS)
    allocator.free_swa(slots[:-WINDOW])
    return pool, requests_with(slots), allocator


def states(params: Any) -> Callable[[int, int], Any]:
    def make_rank(page: int, tp: int) -> Any:
        requests = HybridReqToTokenPool(
            size=4,
            mamba_size=8,
            mamba_spec_state_size=0,
            max_context_len=64,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params(tp),
            mamba_layer_ids=STATE_LAYERS,
            enable_mamba_extra_buffer=False,
        )
        requests.req_index_to_mamba_index_mapping[ROW] = 3 * tp
        pool = HybridLinearKVPool(
            page_size=1,
            full_attention_layer_ids=[1],
            mamba_pool=requests.mamba_pool,
            head_num=HEADS // tp,
            head_dim=CHANNELS,
            **COMMON,
        )
        slots = torch.arange(9, 9 + TOKENS)
        allocator = PagedTokenToKVPoolAllocator(SIZE, 1, torch.float32, "cpu", pool, need_sort=False)
        return pool, requests_with(slots, requests), allocator

    return make_rank


def mamba2(tp: int, n_groups: int = 4, **more: Any) -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=tp, intermediate_size=32, n_groups=n_groups, **MAMBA, **more
    )
    return Mamba2CacheParams(shape=shape, layers=STATE_LAYERS)


def gated_delta_net(tp: int) -> Any:
    return mamba2(tp, conv_shard_groups=CONVOLUTION)


def mamba1(tp: int, taps: int = 3) -> Any:
    shape = Mamba2StateShape.create_full_rank(
        tp_world_size=tp, intermediate_size=32, state_size=4, conv_kernel=taps + 1
    )
    return Mamba2CacheParams(shape=shape, layers=STATE_LAYERS)


def kimi(tp: int) -> Any:
    shape = KimiLinearStateShape.create(tp_world_size=tp, num_heads=4, head_dim=8)
    return KimiLinearCacheParams(shape=shape, layers=STATE_LAYERS)


def heads(kind: Any) -> Callable[[int], Any]:
    return lambda page: kind(
        page_size=page,
        layer_num=LAYERS,
        enable_alt_stream=False,
        head_num=HEADS,
        head_dim=CHANNELS,
        **COMMON,
    )


CASES: dict[str, tuple[Callable[[int, int], Any], int, int]] = {
    "heads": (plain(heads(MHATokenToKVPool)), 1, 1),
    "latents": (plain(lambda page: MLATokenToKVPool(page_size=page, **LATENT_SIZES, **COMMON)), 1, 1),
    "index": (
        plain(
            lambda page: DSATokenToKVPool(
                page_size=64, index_head_dim=128, kv_cache_dim=CHANNELS + 4, **LATENT_SIZES, **COMMON
            )
        ),
        1,
        1,
    ),
    "windows": (windows, 2, 1),
    "gated delta net": (states(gated_delta_net), 2, 1),
    "gated delta net, scattered": (states(gated_delta_net), 1, 2),
    "kimi": (states(kimi), 2, 1),
    "mamba 1": (states(mamba1), 1, 2),
    "no convolution": (states(lambda tp: mamba1(tp, taps=0)), 2, 1),
    "mamba 2, 4 groups": (states(mamba2), 2, 1),
    "mamba 2, 1 group": (states(lambda tp: mamba2(tp, 1)), 2, 1),
    "mamba 2, 1 group, scattered": (states(lambda tp: mamba2(tp, 1)), 1, 2),
    "heads, context parallel": (plain(heads(MHATokenToKVPool)), 1, 1),
    "latents, context parallel": (
        plain(lambda page: MLATokenToKVPool(page_size=page, **LATENT_SIZES, **COMMON)),
        1,
        1,
    ),
    "windows, context parallel": (windows, 1, 2),
    "gated delta net, context parallel": (states(gated_delta_net), 2, 1),
    "unknown": (states(mamba2), 2, 2),
    "unknown, unlike tp": (states(mamba2), 2, 1),
    "fp4": (plain(heads(MHATokenToKVPoolFP4)), 1, 1),
}
"""How to make a rank, and the TP sizes of the two sides."""
GROUPS = {"mamba 2, 4 groups": 4, "mamba 2, 1 group": 1, "mamba 2, 1 group, scattered": 1}
PREFILL_CP = 2
"""The context-parallel ranks of prefill, where the name has them."""


def hand_off(make: Callable[[int, int], Any], source_tp: int, target_tp: int, groups: int, cp: int) -> str:
    source = Side("prefill", make, 1, source_tp, groups, cp)
    try:
        target = Side("decode", make, PAGE, target_tp, groups)
        try:
            source.fill()
            digest = prompt_digest(range(TOKENS))
            pages = {rank: target.pages(rank) for rank in range(target_tp)}
            receiving = target.endpoints[0].receive(Request("1", source.endpoints[0].address, digest, pages))
            for rank, endpoint in enumerate(source.endpoints):
                sending = endpoint.send("1", digest)
                for layer in range(LAYERS):
                    sending.ready((layer, layer + 1), (0, TOKENS), source.pages(rank))
                sending.commit(None if rank else Aux(tokens=(1,)))
            assert receiving.wait_released(WAIT_S)
            if isinstance(receiving.state, Failed):
                return f"refused: {receiving.state.cause}"
            assert isinstance(receiving.state, Ready), receiving.state
            # As bytes: some of them are not a number.
            sent, got = (
                [part.contiguous().view(torch.uint8) for part in side.content()] for side in (source, target)
            )
            return "equal" if all(map(torch.equal, sent, got)) else "differs"
        finally:
            target.close()
    finally:
        source.close()


def hand_row_over() -> str:
    """A row of metadata with all that speculative decoding gives: as decode reads what prefill wrote."""
    source, target = (MetadataBuffers(4, 24, torch.bfloat16, 8) for _ in range(2))
    request = SimpleNamespace(
        metadata_buffer_index=1,
        output_ids=[42],
        cached_tokens=5,
        cached_tokens_device=4,
        cached_tokens_host=1,
        cached_tokens_storage=0,
        get_mm_token_counts=lambda: (1, 2, 3),
        return_logprob=True,
        logprob=SimpleNamespace(
            output_token_logprobs_val=[-0.5],
            output_token_logprobs_idx=[42],
            output_top_logprobs_val=[[-0.5, -1.5]],
            output_top_logprobs_idx=[[42, 7]],
        ),
        return_sampling_mask=False,
        hidden_states_tensor=torch.randn(24),
        output_topk_p=torch.rand(4),
        output_topk_index=torch.arange(4),
        bootstrap_room=1 << 62,
    )
    source.set_buf(request)
    rows = [MetadataRows(*(infos[0], infos[2])) for infos in (source.get_buf_infos(), target.get_buf_infos())]
    rows[1].write(2, rows[0].read(1))
    parts = zip(source.get_buf(1), target.get_buf(2), strict=True)
    assert source.get_buf(1)[11].any(), "hidden states"
    return (
        "equal" if all(one is other is None or torch.equal(one, other) for one, other in parts) else "differs"
    )


def main() -> None:
    results = {"metadata": hand_row_over()}
    for name, (make, source_tp, target_tp) in CASES.items():
        try:
            with get_parallel().override(attn_dcp_size=1):
                cp = PREFILL_CP if name.endswith("context parallel") else 1
                results[name] = hand_off(make, source_tp, target_tp, GROUPS.get(name, 0), cp)
        except ConfigError as error:
            results[name] = f"refused: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
