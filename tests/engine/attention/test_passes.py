"""Paged attention against its definition, on one rank and on several."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.attention.world import (
    LATENT_LAYER,
    NUM_PAGES,
    PAGE,
    POISON,
    SPARSE_LAYER,
    World,
    check_rank,
)
from tests.engine.parallel.ranks import on_mesh

from baton.engine.attention import pools, prefill, softmax
from baton.engine.attention.passes import Pass, _store
from baton.engine.attention.pools import FP8, CachePools
from baton.engine.attention.slots import Writes
from baton.engine.commands import PageCopy, ScheduledBatch, ScheduledSequence
from baton.engine.parallel import Mesh
from baton.errors import ConfigError, EngineError
from baton.plan import Cache, Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.plan.ownership import buffers
from baton.plan.storage import FUSED

ALONE = parse_layout("tp1")


@pytest.mark.parametrize("seed", range(3))
def test_one_rank(seed: int) -> None:
    check_rank(Mesh(ALONE, 0), seed)


@pytest.mark.parametrize(
    "layout",
    ["cp2", "cp2:mirror"]
    + [
        pytest.param(layout, marks=pytest.mark.long)
        for layout in ("cp2:stripe1", "cp2:split", "cp3:stripe3", "cp3:split")
    ],
)
def test_ranks_that_share_a_context(layout: str, tmp_path: Path) -> None:
    on_mesh(layout, tmp_path / "meeting", check_rank, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_floats(dtype: torch.dtype) -> None:
    world = World(Mesh(ALONE, 0), 7, dtype)
    world.step({0: 9, 1: 1, 2: 17})
    world.step({0: 1, 1: 1, 2: 8})
    world.step({0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize("seed", [7, 8])
def test_fp8(seed: int) -> None:
    world = World(Mesh(ALONE, 0), seed, stored=FP8)
    world.step({0: 9, 1: 1, 2: 17})
    world.step({0: 1, 1: 1, 2: 8})
    world.step({0: 1, 1: 1, 2: 1})
    assert world.pools.view("k", 0).element_size() == 1


def test_fp8_saturates() -> None:
    pool = torch.zeros(3, 2, dtype=FP8)
    _store(pool, Writes(None, torch.tensor([2, 0])), torch.tensor([[1e3, -1e9], [1.0, 0.3]]))
    assert pool.float().tolist() == [[1.0, 0.3125], [0.0, 0.0], [448.0, -448.0]]


@pytest.mark.long
def test_another_fp8_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "FP8", torch.float8_e5m2)
    monkeypatch.setitem(pools.DTYPES, "fp8", torch.float8_e5m2)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_fp8(7)


def test_rows_of_two_sizes_are_not_kept_side_by_side() -> None:
    kept = Cache(1, tuple(Paged(2, 8, 6).components(((0, 1),))))
    spec = Spec(ALONE, kept, Storage(page_tokens=PAGE, dtype="fp32", order=FUSED))
    content = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "t").items()}
    assert list(content) == ["kv"]
    pools = CachePools(spec, 0, content, torch.device("cpu"))
    with pytest.raises(ConfigError, match="rows of one size"):
        pools.rows("v", 0)


def test_blocks_of_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "BLOCK_ROWS", 7)
    monkeypatch.setattr(softmax, "SCORES_MAX", 100)
    check_rank(Mesh(ALONE, 0), 11)


def test_short_chunks_attend_to_the_latent_itself() -> None:
    world = World(Mesh(ALONE, 0), 13)
    world.step({0: 40, 1: 3})
    world.step({0: 3, 1: 9})
    world.step({0: 2, 1: 1})


def test_lengths_far_apart_decode_together() -> None:
    world = World(Mesh(ALONE, 0), 17)
    world.step({0: 300, 1: 2, 2: 70})
    world.step({0: 1, 1: 1, 2: 1})
    world.step({2: 1, 0: 1, 1: 1})


def test_nothing_else_is_written() -> None:
    world = World(Mesh(ALONE, 0), 19)
    world.step({0: PAGE + 1, 1: 2 * PAGE})
    world.step({0: 1, 1: 1})
    k = world.pools.view("k", 1)
    is_written = ~torch.isnan(k).all(-1).all(1)
    assert set(is_written.any(-1).nonzero().flatten().tolist()) == world.used_pages()
    assert int(is_written.sum()) == (PAGE + 2) + (2 * PAGE + 1)
    untouched = sorted(set(range(NUM_PAGES)) - world.used_pages())
    for layer, part in ((1, "k"), (1, "v"), (4, "k"), (LATENT_LAYER, "latent"), (SPARSE_LAYER, "index_k")):
        content = world.pools.view(part, layer)[untouched].numpy().view(np.uint8)
        assert (content == POISON).all()


def test_pages_are_copied_on_every_layer() -> None:
    world = World(Mesh(ALONE, 0), 23)
    world.step({0: PAGE})
    (page,) = world.used_pages()
    a, b = [other for other in range(NUM_PAGES) if other != page][:2]
    world.pools.copy_pages([PageCopy("tokens", page, a), PageCopy("tokens", a, b)])
    for layer, part in ((0, "k"), (2, "v"), (LATENT_LAYER, "latent"), (SPARSE_LAYER, "index_k")):
        view = world.pools.view(part, layer)
        assert not torch.isnan(view[page]).any()
        assert torch.equal(view[a], view[page])
        assert torch.equal(view[b], view[page])
    windowed = world.pools.view("k", 4)
    assert torch.isnan(windowed[a]).all()
    assert torch.isnan(windowed[b]).all()


def test_a_table_too_short_is_an_error() -> None:
    world = World(Mesh(ALONE, 0), 29)
    work = ScheduledSequence(3, 0, [0] * (PAGE + 1), {"tokens": [5]}, PAGE + 1)
    found = Pass(ScheduledBatch([work]), Mesh(ALONE, 0), world.pools)
    rows = torch.zeros(PAGE + 1, 16)
    with pytest.raises(EngineError, match="sequence 3 needs 2 pages of 'tokens', its table has 1"):
        found.latent(LATENT_LAYER, None, rows, 1.0)  # type: ignore[arg-type]


def test_a_layer_of_another_rank_is_an_error() -> None:
    world = World(Mesh(ALONE, 0), 31)
    with pytest.raises(EngineError, match="layer 6 keeps no k"):
        world.pools.view("k", LATENT_LAYER)
