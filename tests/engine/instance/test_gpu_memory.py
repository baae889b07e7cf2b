"""The KV cache on a GPU fills its memory, and what does not fit is refused with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.drafts import drafted, drafted_hybrid
from tests.engine.tiny import tiny

from baton.checkpoint.opening import open_checkpoint
from baton.engine import sizes
from baton.engine.config import EngineConfig
from baton.engine.gpu_memory import GpuMemory, deal_gpus
from baton.engine.models.build import check_weights
from baton.engine.parallel import cut_of
from baton.engine.sizes import PoolSizes, derive_sizes, place_on_gpus
from baton.errors import ConfigError
from baton.plan import parse_layout

GIB = 1 << 30
CARD = GpuMemory("0", 24 * GIB, 23 * GIB)
MANY = {"sequences_max": 1 << 18}
"""So many that they do not limit the KV cache of a tiny model."""


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "dealt"),
    [
        ([1], 1, [(0, 1.0)]),
        ([1, 1], 1, [(0, 0.5), (0, 0.5)]),
        ([1, 1], 2, [(0, 1.0), (1, 1.0)]),
        ([4, 4], 8, [(0, 1.0), (4, 1.0)]),
        ([2, 2], 3, [(0, 0.5), (2, 0.5)]),
        ([1, 3], 2, [(0, 0.5), (1, 0.5)]),
        ([2, 1], 1, [(0, 2 / 3), (0, 1 / 3)]),
    ],
)
def test_instances_are_dealt_over_the_gpus(
    num_ranks: list[int], num_gpus: int, dealt: list[tuple[int, float]]
) -> None:
    assert deal_gpus(num_ranks, num_gpus) == dealt


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "pp2.tp2"])
def test_the_weights_of_all_ranks_are_the_checkpoint(layout: str) -> None:
    checkpoint = open_checkpoint(str(tiny("llama")))
    parsed = parse_layout(layout)
    num_layers = int(checkpoint.config["num_hidden_layers"])
    ranks = [
        check_weights(checkpoint, cut_of(parsed, rank, num_layers, torch.float32, torch.device("meta")))
        for rank in range(parsed.num_ranks)
    ]
    tensors = {name: 4 * torch.Size(checkpoint.shape(name) or ()).numel() for name in checkpoint.names()}
    # Every tp rank has the norms.
    norms = sum(size for name, size in tensors.items() if "norm" in name)
    assert sum(ranks) == sum(tensors.values()) + (parsed.size("tp") - 1) * norms


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch):
    """Sizes of an instance on invented cards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def derive(*cards: GpuMemory, model: str = "", **options: Any) -> sizes.EngineSizes:
        monkeypatch.setattr(sizes, "read_gpus", lambda: list(cards))
        return derive_sizes(EngineConfig(model or str(tiny("llama")), device="cuda", **options))

    return derive


def _rooms(found: sizes.EngineSizes, card: GpuMemory, config: EngineConfig) -> tuple[PoolSizes, list[Any]]:
    pool = PoolSizes(config, found.spec)
    return pool, sizes.gpu_rooms(config, found.checkpoint, found.architecture, pool, [card])


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
@pytest.mark.parametrize("utilization", [0.5, 0.9])
def test_the_pool_takes_the_room_that_there_is(on_card, layout: str, utilization: float) -> None:
    options: dict[str, Any] = {
        "layout": layout,
        "gpu_memory_utilization": utilization,
        "sequences_max": 1 << 20,
    }
    found = on_card(CARD, **options)
    config = EngineConfig(str(tiny("llama")), device="cuda", **options)
    pool, rooms = _rooms(found, CARD, config)
    taken = [pool.num_bytes(found.pool_tokens, rank) for rank in range(found.layout.num_ranks)]
    more = [pool.num_bytes(found.pool_tokens + pool.page_tokens, rank) for rank in range(len(rooms))]
    assert all(one <= room.cache_bytes for one, room in zip(taken, rooms, strict=True))
    assert any(one > room.cache_bytes for one, room in zip(more, rooms, strict=True)), "a page more fits"
    whole = sum(one + room.weights + room.other for one, room in zip(taken, rooms, strict=True))
    assert whole <= min(utilization * CARD.total, CARD.free), "the ranks share one card"


def test_a_small_model_does_not_take_the_whole_card(on_card) -> None:
    found = on_card(CARD)
    assert found.pool_tokens == sizes.CONTEXTS_MAX * 64 * found.architecture.max_positions


def test_what_is_asked_for_is_given_or_refused(on_card) -> None:
    found = on_card(CARD, pool_tokens=4096, context_max=200)
    assert (found.pool_tokens, found.context_max) == (4096, 200)
    with pytest.raises(ConfigError, match=r"KV cache of 100000000 tokens .* GPU 0: it has 24 GiB, 23 GiB of"):
        on_card(CARD, pool_tokens=100_000_000)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0.05 leaves 0 B for it beside"):
        on_card(CARD, gpu_memory_utilization=0.05)
    with pytest.raises(ConfigError, match="shows no GPU"):
        on_card()


@pytest.mark.parametrize(
    ("checkpoint", "family", "layout", "guess_bytes"),
    [
        # 100 sequences: 4 copies of 131 logits and 16 rows of 48 numbers, of 4 bytes each.
        (drafted, "deepseek_v3", "tp1", 100 * (4 * 131 + 16 * 48) * 4),
        # 103 logits, rows of 48. 3 recurrent layers keep, for 100 slots, 3 heads of 10 for q and for k, 6 of
        # 6 for v, and 2 numbers for each of the 6.
        (
            drafted_hybrid,
            "qwen3_next",
            "tp1",
            100 * (4 * 103 + 16 * 48) * 4 + 100 * 3 * (2 * 30 + 36 + 12) * 4,
        ),
        # Half of the layers on each stage: the first one has two recurrent layers.
        (
            drafted_hybrid,
            "qwen3_next",
            "pp2",
            100 * (4 * 103 + 16 * 48) * 4 + 100 * 2 * (2 * 30 + 36 + 12) * 4,
        ),
    ],
)
def test_every_guess_of_drafts_is_counted(
    on_card, checkpoint: Callable[[str], Path], family: str, layout: str, guess_bytes: int
) -> None:
    model, others = checkpoint(family), {}
    for num_guesses in (1, 4):
        options: dict[str, Any] = {"layout": layout, "sequences_max": 100, "draft_tokens": num_guesses}
        config = EngineConfig(str(model), device="cuda", **options)
        found = on_card(CARD, model=str(model), **options)
        others[num_guesses] = _rooms(found, CARD, config)[1][0].other
    assert others[4] - others[1] == 3 * guess_bytes


def test_guesses_leave_less_for_the_pool(on_card) -> None:
    model = str(drafted("deepseek_v3"))
    # Of 2 ** 19 sequences each guess takes 2.8 GB more.
    one, two = (on_card(CARD, model=model, sequences_max=1 << 19, draft_tokens=num) for num in (1, 2))
    assert one.pool_tokens > two.pool_tokens


def test_memory_that_others_hold_is_not_counted_on(on_card) -> None:
    busy = on_card(replace(CARD, free=12 * GIB), **MANY).pool_tokens
    assert busy < 0.6 * on_card(CARD, **MANY).pool_tokens


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_share_that_cannot_be(on_card, value: float) -> None:
    with pytest.raises(ConfigError, match=f"gpu_memory_utilization is {value}; give a share in"):
        on_card(CARD, gpu_memory_utilization=value)


def test_a_pair_on_one_card_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sizes, "read_gpus", lambda: [CARD])
    pair = [EngineConfig(str(tiny("llama")), device="auto")] * 2
    assert [(config.base_gpu_id, config.gpu_memory_utilization) for config in place_on_gpus(pair)] == [
        (0, 0.45),
        (0, 0.45),
    ]
    monkeypatch.setattr(sizes, "read_gpus", lambda: [CARD, CARD])
    assert [(config.base_gpu_id, config.gpu_memory_utilization) for config in place_on_gpus(pair)] == [
        (0, 0.9),
        (1, 0.9),
    ]
