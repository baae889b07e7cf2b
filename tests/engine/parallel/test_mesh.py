"""Groups of ranks: what they exchange, and what becomes of a rank whose peer is gone."""

import os
import time
from pathlib import Path

import pytest
import torch
from tests.engine.parallel.ranks import on_mesh

from baton.engine.parallel import Mesh, partition
from baton.errors import EngineError
from baton.plan import parse_layout

GONE_S_MAX = 120.0
"""Less than the limit of a mesh that waits for a peer that hangs."""


def test_groups_follow_the_axes_in_any_order() -> None:
    layout = parse_layout("tp2.pp2.dp2")
    assert partition(layout, ("tp",)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert partition(layout, ("dp", "tp")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert partition(layout, ("cp",)) == [(rank,) for rank in range(8)]


def test_a_cut_says_what_a_rank_holds() -> None:
    mesh = Mesh(parse_layout("tp1"), 0)
    cut = mesh.cut(7, torch.float32, torch.device("cpu"))
    assert (cut.layers, cut.heads.count, cut.width.count) == ((0, 7), 1, 1)
    assert mesh.is_first
    assert mesh.is_last


def test_exchanges(tmp_path: Path) -> None:
    found = on_mesh("pp2.tp3", tmp_path / "meeting", _exchange)
    for rank, (summed, rows, halves, taken) in enumerate(found):
        group = [0, 1, 2] if rank < 3 else [3, 4, 5]
        assert summed == [float(sum(group))] * 2
        assert rows == [float(who) for i, who in enumerate(group) for _ in range(i)]
        assert halves == [group[0] + 0.5, group[1] + 0.5, group[2] + 0.5]
        assert taken == ([] if rank < 3 else [rank - 3, 10 + rank - 3, 20 + rank - 3])


def _exchange(mesh: Mesh) -> tuple[list[float], list[float], list[float], list[int]]:
    at = mesh.at["tp"]
    summed = mesh.tp.sum(torch.full((2,), float(mesh.rank)))
    rows = mesh.tp.gather(torch.full((at, 1), float(mesh.rank)), [0, 1, 2])
    halves = mesh.tp.stack(torch.tensor([mesh.rank + 0.5], dtype=torch.bfloat16))
    assert halves.dtype == torch.bfloat16
    taken: list[int] = []
    for i in range(3):
        if mesh.is_first:
            # Sent before the receiver asks, and overwritten at once.
            x = torch.tensor([10 * i + mesh.rank])
            mesh.pipe.send(x)
            x.fill_(-1)
        else:
            taken += mesh.pipe.receive(torch.zeros(1, dtype=torch.int64)).tolist()
    return summed.tolist(), rows.flatten().tolist(), halves.flatten().tolist(), taken


def test_stages_cut_layers_and_width(tmp_path: Path) -> None:
    cuts = on_mesh("dp2.pp2:3-4.tp2", tmp_path / "meeting", _cut)
    assert [layers for layers, _, _ in cuts] == [(0, 3)] * 2 + [(3, 7)] * 2 + [(0, 3)] * 2 + [(3, 7)] * 2
    assert [width for _, _, width in cuts] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [width for _, width, _ in cuts] == [(0, 1, 4, 5), (0, 1, 4, 5), (2, 3, 6, 7), (2, 3, 6, 7)] * 2


def _cut(mesh: Mesh) -> tuple[tuple[int, int], tuple[int, ...], int]:
    cut = mesh.cut(7, torch.float32, torch.device("cpu"))
    return cut.layers, mesh.width.ranks, cut.width.index


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_dead_peer_is_an_error_and_no_hang(layout: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0: ended without an answer") as failure:
        on_mesh(layout, tmp_path / "meeting", _lose_a_peer, timeout_s=5 * GONE_S_MAX)
    assert "rank 1" not in str(failure.value)


def _lose_a_peer(mesh: Mesh) -> None:
    x = torch.ones(4)
    mesh.tp.sum(x.clone())
    if mesh.is_first:
        mesh.pipe.send(x)
        mesh.pipe.drain()
    else:
        mesh.pipe.receive(x)
    if mesh.rank == 0:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(EngineError, match="a rank has ended or hangs, restart the instance"):
        _exchange_on(mesh, x)
    assert time.monotonic() - began < GONE_S_MAX


def _exchange_on(mesh: Mesh, x: torch.Tensor) -> None:
    for _ in range(10):
        mesh.tp.sum(x.clone())
        mesh.pipe.receive(x)


def test_a_stuck_peer_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "done")
    on_mesh("tp2", tmp_path / "meeting", _get_stuck, tmp_path / "done", timeout_s=15.0)


def _get_stuck(mesh: Mesh, done: Path) -> None:
    mesh.tp.sum(torch.ones(1))
    if mesh.rank == 0:
        done.read_bytes()  # returns when the other rank is through
        return
    with pytest.raises(EngineError, match=r"a sum of ranks 0, 1 failed: .*; a rank has ended or hangs"):
        mesh.tp.sum(torch.ones(1))
    done.write_bytes(b"")
