"""Caches between real endpoints of one process: every pair of layouts, mode and order comes out right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.plan.world import make_cache
from tests.session.handoff_world import (
    AUX,
    CACHE,
    NHD,
    PATIENCE_S,
    Job,
    Side,
    Transfer,
    World,
    until,
    without_leaks,
    worlds,
)

from baton.errors import ConfigError
from baton.plan.cache import Units
from baton.plan.kinds import Conv, Draft, Index, Latent, Paged, Recurrent
from baton.protocol.outcomes import Aux, Finished, Ready, Waiting
from baton.transport import HostFence, open_transport

TRANSPORTS = ("memory", "shm", "tcp")
PAIRS = [
    ("tp2", "tp1"),
    ("tp1", "tp4"),
    ("tp3", "tp2"),
    ("tp2", "tp8"),
    ("pp2.tp2", "tp4"),
    ("pp2:3-1", "tp2.pp3"),
    ("cp2", "tp2"),
    ("tp2", "cp2:stripe1"),
    ("cp3:split", "cp2"),
    ("cp2:mirror", "pp2"),
]
"""Of 4 layers and 4 heads: cut evenly, unevenly and not at all, mirrored, and both ways."""
CONVS = tuple(
    Conv(part, Units(count, unit), 2, 3)
    for part, count, unit in (("q", 2, "key head"), ("k", 2, "key head"), ("v", 4, "value head"))
)
STATE = Recurrent(4, 5, CONVS, "value head")
CACHES = {
    "latent": make_cache(3, (Latent(5), ((0, 3),)), (Index(3, 1), ((1, 2),))),
    "window": make_cache(4, (Paged(4, 2), ((0, 1), (2, 3))), (Paged(4, 2, 0, 6), ((1, 2), (3, 4)))),
    "state": make_cache(3, (STATE, ((0, 3),))),
    "hybrid": make_cache(4, (STATE, ((0, 3),)), (Paged(4, 2), ((3, 4),))),
    "draft": make_cache(2, (Paged(4, 2), ((0, 2),)), (Draft(Latent(3)), ((2, 4),))),
}


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    # What other libraries leave open for the rest of the process is theirs.
    is_ours = request.function is not test_transports_of_other_libraries
    yield from without_leaks() if is_ours else (None,)


def modes(transfer: Transfer) -> set[str]:
    """How the pairs of a transfer moved, as its grant says."""
    coordinator = transfer.world.target.first.coordinator
    assert coordinator is not None
    grant = coordinator.inbound.transfers[transfer.id].record.grant
    assert grant is not None
    return {lane.mode for lane in grant.lanes}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cache", ["gqa", "window", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_an_engine_declares(seed: int, cache: str, transport: str) -> None:
    """Several components in one buffer, with gaps, groups over one another, layers in any order."""
    ends = (("tp2", "pp2"), ("pp2", "tp4"), ("tp1", "tp2.pp2"))[seed]
    source, target = (Side(end, memory_seed=seed + i) for i, end in enumerate(ends))
    if not seed:
        source = Side(ends[0])
    held = CACHES.get(cache, CACHE)
    with worlds(source, replace(target, page_tokens=3), transport=transport, cache=held) as world:
        world.hand_off(Job(21))
        world.packs(seed == 1)
        transfers = [world.transfer(Job(num_tokens, is_verified=True)) for num_tokens in (9, 1, 30)]
        for transfer in transfers:
            transfer.receive()
            transfer.send()
            transfer.offer_all()
            transfer.commit()
        for transfer in transfers:
            transfer.check_ready()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_layout_to_any_other(source: str, target: str, transport: str) -> None:
    with worlds(Side(source), Side(target, page_tokens=3), transport=transport) as world:
        world.hand_off(Job(21))
        world.hand_off(Job(8))


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_transports_of_other_libraries(name: str) -> None:
    try:
        open_transport(name).close()
    except ConfigError as error:
        pytest.skip(f"{name}: {error}")
    with worlds(Side("tp2"), Side("pp2"), transport=name) as world:
        world.hand_off()
        world.hand_off(Job(is_verified=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("is_verified", [False, True], ids=["plain", "verified"])
def test_any_kind_of_cache(cache: str, is_verified: bool) -> None:
    with worlds(Side("tp2"), Side("pp2.tp4"), cache=CACHES[cache]) as world:
        world.hand_off(Job(21, is_verified=is_verified))
        world.hand_off(Job(4, is_verified=is_verified))


@pytest.mark.parametrize("is_verified", [False, True], ids=["plain", "verified"])
@pytest.mark.parametrize(
    ("mode", "source", "target"),
    [
        ("direct", Side("tp2"), Side("tp1")),
        ("convert", Side("tp2", dtype="fp16"), Side("tp1", dtype="fp32")),
        ("convert", Side("tp1", dtype="fp32"), Side("tp2", dtype="bf16")),
        ("pack", Side("tp2", order=NHD), Side("tp1", order=NHD)),
        ("pack", Side("tp1", dtype="fp16", order=NHD), Side("tp2", dtype="bf16")),
    ],
    ids=["direct", "widen", "narrow", "pack", "pack-convert"],
)
def test_any_mode(mode: str, source: Side, target: Side, is_verified: bool) -> None:
    with worlds(source, target) as world:
        world.packs(mode == "pack")
        found = world.hand_off(Job(is_verified=is_verified))
        assert modes(found) == {mode}
        world.hand_off(Job(5, is_verified=is_verified))


def test_one_grant_may_mix_what_is_converted_with_what_is_not() -> None:
    cache = make_cache(2, (Latent(4), ((0, 2),)), (Index(3, 1), ((0, 2),)))
    with worlds(Side("tp2", dtype="fp16"), Side("tp1", dtype="fp32"), cache=cache) as world:
        found = world.hand_off(Job(is_verified=True))
        assert modes(found) == {"convert"}


def test_a_granule_moves_whole() -> None:
    with worlds(Side("tp2", granule=4), Side("tp1", granule=4)) as world:
        world.hand_off(Job(21))
        world.hand_off(Job(3))


def test_a_prompt_shorter_than_a_page() -> None:
    with worlds(Side("tp2", page_tokens=8), Side("tp1", page_tokens=16)) as world:
        world.hand_off(Job(1))
        world.hand_off(Job(7))


def test_a_chunk_may_end_inside_a_page() -> None:
    with worlds(Side("tp2"), Side("tp1", page_tokens=8)) as world:
        found = world.transfer(Job(11))
        found.receive()
        found.send()
        for tokens in ((0, 3), (3, 6), (6, 7), (7, 11)):
            found.offer((0, 4), tokens)
        found.commit()
        found.check_ready()


def test_a_rank_may_offer_its_own_layers_alone() -> None:
    with worlds(Side("pp2"), Side("tp2")) as world:
        found = world.transfer()
        found.receive()
        found.send()
        for rank, layers in ((0, (0, 2)), (1, (2, 4))):
            found.sendings[rank].ready(layers, (0, 21), found.source_tables[rank])
        found.commit()
        found.check_ready()


@pytest.mark.parametrize("num_held", [4, 20])
def test_what_the_target_holds_is_not_sent(num_held: int) -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.hand_off(Job(21, held={"tokens": num_held}))
        per_token = 4 * 4 * (3 + 2) * 2
        assert found.compare()[0] == (21 - num_held) * per_token


def test_a_target_that_holds_everything_is_sent_the_aux_record_alone() -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.hand_off(Job(20, held={"tokens": 20}))
        assert found.compare()[0] == 0
        assert modes(found) == set()


def test_everything_held_but_a_state() -> None:
    with worlds(Side("tp2"), Side("tp1"), cache=CACHES["hybrid"]) as world:
        found = world.hand_off(Job(20, held={"tokens": 20}, is_verified=True))
        assert found.compare()[0] > 0


@pytest.mark.parametrize("is_each", [False, True], ids=["one rank asks for all", "each rank for itself"])
def test_who_asks(is_each: bool) -> None:
    with worlds(Side("tp2"), Side("pp2")) as world:
        found = world.transfer()
        found.receive(is_each=is_each)
        found.send()
        found.offer_all()
        found.commit()
        found.check_ready()


def grant_first(found: Transfer) -> None:
    found.receive()
    until(lambda: found.world.source.counts()["outbound"] == 1, "a grant")
    found.send()
    found.offer_all()
    found.commit()


def send_first(found: Transfer) -> None:
    found.send()
    found.offer((0, 4), (0, 8))
    until(lambda: found.world.source.counts()["outbound"] == 1, "an offer")
    found.receive()
    found.offer((0, 4), (8, 21))
    found.commit()


def commit_first(found: Transfer) -> None:
    found.send()
    found.offer_all()
    found.commit()
    until(lambda: found.world.source.counts()["outbound"] == 1, "an offer")
    assert all(isinstance(sending.state, Waiting) for sending in found.sendings.values())
    found.receive()


def one_rank_late(found: Transfer) -> None:
    found.receive()
    found.send()
    last = found.sendings.pop(1)
    found.offer_all()
    found.sendings[0].commit()
    until(lambda: not found.sendings[0].reading(), "the copies of rank 0")
    last.ready((0, 4), (0, 21), found.source_tables[1])
    last.commit(AUX)
    found.sendings[1] = last


@pytest.mark.parametrize("order", [grant_first, send_first, commit_first, one_rank_late])
def test_either_side_may_be_first(order) -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        order(found)
        found.check_ready()


def test_many_transfers_at_once() -> None:
    with worlds(Side("tp2", num_pages=128), Side("pp2", num_pages=128)) as world:
        transfers = [world.transfer(Job(3 + 2 * i, is_verified=i % 2 == 0)) for i in range(10)]
        order = world.rng.permutation(len(transfers))
        for i in order:
            transfers[i].receive()
        for found in transfers:
            found.send()
            found.offer_all()
        for i in reversed(order):
            transfers[i].commit()
        for found in transfers:
            found.check_ready()


@pytest.mark.parametrize("named", [1, None], ids=["named by the caller", "found by inquiry"])
@pytest.mark.parametrize(
    ("source", "target", "dps"), [("dp2.tp2", "tp1", (1, 0)), ("tp2.dp2", "dp3", (1, 2))]
)
def test_dp_groups(source: str, target: str, dps: tuple[int, int], named: int | None) -> None:
    with worlds(Side(source), Side(target)) as world:
        world.hand_off(Job(dps=dps, named_dp=named))
        late = world.transfer(Job(dps=dps, named_dp=named))
        late.send()
        late.offer_all()
        late.commit()
        late.receive()
        late.check_ready()


def scribble(world: World, transfer: Transfer, pages: set[int]) -> None:
    """Writes over pages of source rank 0, in every buffer and layer."""
    rank, spec = 0, world.source.spec
    for name in ("k", "v"):
        buffer = world.source.memory[rank, name]
        by_page = buffer.reshape(spec.cache.num_layers, world.source.side.num_pages, -1)
        by_page[:, sorted(pages)] = 0xEE


@pytest.mark.parametrize("mode", ["direct", "pack"])
@pytest.mark.parametrize("is_verified", [False, True], ids=["plain", "verified"])
def test_pages_that_are_not_read_any_more_may_be_used_anew(mode: str, is_verified: bool) -> None:
    with worlds(Side(), Side()) as world:
        world.packs(mode == "pack")
        found = world.transfer(Job(16, held={"tokens": 4}, is_verified=is_verified))
        pages = found.source_tables[0]["tokens"].tolist()
        found.send()
        sending, fence = found.sendings[0], HostFence()
        sending.ready((0, 4), (0, 8), {"tokens": pages})
        assert sending.reading() == {"tokens": frozenset(pages)}
        sending.ready((0, 2), (8, 16), {"tokens": pages}, fence)
        sending.ready((2, 4), (8, 16), {"tokens": pages})
        found.receive()
        until(lambda: sending.reading() == {"tokens": frozenset(pages[2:])}, lambda: f"{sending.reading()}")
        until(lambda: len(sending._reading) == 1, "two of three chunks to land")
        scribble(world, found, set(pages[:2]))
        fence.set()
        until(lambda: not sending.reading(), "the last chunk to land")
        assert isinstance(sending.state, Waiting)
        scribble(world, found, set(pages))
        found.commit()
        found.check_ready()


def test_pages_that_the_target_holds_are_never_read() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer(Job(16, held={"tokens": 8}))
        pages = found.source_tables[0]["tokens"].tolist()
        found.receive()
        found.send()
        fence = HostFence()
        found.offer((0, 4), (0, 16), fence=fence)
        sending = found.sendings[0]
        until(lambda: sending.reading() == {"tokens": frozenset(pages[2:])}, lambda: f"{sending.reading()}")
        scribble(world, found, set(pages[:2]))
        fence.set()
        found.commit()
        found.check_ready()


def test_an_answer_that_ends_at_the_source_before_a_grant() -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        found.send()
        found.offer((0, 4), (0, 21))
        found.sendings[1].finish(AUX)
        assert found.sendings[0].wait(PATIENCE_S) == Finished(AUX)
        found.receive()
        assert found.outcome() == Finished(AUX)


def test_an_answer_that_ends_at_the_source_while_it_is_copied() -> None:
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        found.receive()
        found.send()
        found.offer((0, 4), (0, 8))
        until(lambda: not any(s.reading() for s in found.sendings.values()), "the first chunk to land")
        found.offer((0, 4), (8, 21), fence=HostFence())
        found.sendings[0].finish(AUX)
        assert found.outcome() == Finished(AUX)
        world.hand_off()


def test_the_aux_record_comes_whole() -> None:
    aux = Aux(
        tokens=(5, 6),
        logprobs=({5: -0.25, 9: -2.0}, {6: 0.0}),
        cached_tokens=16,
        tensors={"hidden": bytes(range(256))},
        fields={"text": "a", "count": 3, "share": 0.5, "is_last": True},
    )
    with worlds(Side("tp2"), Side("tp1")) as world:
        found = world.transfer()
        found.receive()
        found.send()
        found.offer_all()
        found.commit(aux)
        assert found.outcome() == Ready(aux)


def test_prompts_of_equal_length_are_told_apart_by_their_pages() -> None:
    """The comparison itself: a cache in the pages of another transfer is no match."""
    with worlds(Side(), Side()) as world:
        one, other = world.hand_off(Job(12)), world.hand_off(Job(12))
        one.target_tables, other.target_tables = other.target_tables, one.target_tables
        for found in (one, other):
            num_bytes, num_right = found.compare()
            assert num_right < num_bytes / 10


def test_the_world_notices_a_byte_out_of_place() -> None:
    with worlds(Side(), Side()) as world:
        found = world.hand_off(Job(12))
        (buffer, page) = world.target.memory[0, "k"], int(found.target_tables[0]["tokens"][-1])
        free = next(p for p in range(world.target.side.num_pages) if p in world.target.free[0, "tokens"])
        by_page = buffer.reshape(CACHE.num_layers, world.target.side.num_pages, -1)
        by_page[0, free, 0] ^= 1
        with pytest.raises(AssertionError, match="1 bytes"):
            world.check_untouched()
        by_page[0, free, 0] ^= 1
        by_page[0, page, 0] ^= 1
        num_bytes, num_right = found.compare()
        assert num_right == num_bytes - 1
        assert np.count_nonzero(found.source_tables[0]["tokens"] < 0) == 0
