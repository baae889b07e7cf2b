"""Ranks that attach with an address and a secret alone, and coordinators that come late or come back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.ports import free_port
from tests.session.handoff_world import (
    CACHE,
    PATIENCE_S,
    SECRET,
    Instance,
    Side,
    until,
    without_leaks,
    worlds,
)

from baton.errors import LocalProtocolError, TransportError
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Failed
from baton.session import Endpoint, EndpointConfig, SocketConfig, prompt_digest
from baton.transport import open_transport

SPEC = Side("tp2").spec(CACHE)
DIGEST = prompt_digest(range(8))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


class Rank:
    """An endpoint of a two-rank instance, with what it was told at its end."""

    def __init__(self, rank: int, **changes: Any) -> None:
        transport = open_transport("memory")
        self.pools = {name: transport.allocate(size) for name, size in buffers(SPEC, rank, "pool").items()}
        self.ended: queue.Queue[str] = queue.Queue()
        config = EndpointConfig(instance="p0", spec=SPEC, rank=rank, secret=SECRET)
        self.endpoint = Endpoint(replace(config, **changes), self.pools, transport, on_end=self.ended.put)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.close()


def test_a_rank_attaches_with_the_address_alone() -> None:
    with Rank(0) as first, Rank(1, coordinator=first.endpoint.address) as second:
        assert second.endpoint.wait_ready(PATIENCE_S)
        assert first.endpoint.wait_ready(PATIENCE_S)
        assert second.endpoint.epoch == first.endpoint.epoch > 0


def test_a_cache_is_handed_over_by_ranks_that_learned_their_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Instance._endpoint

    def without_epoch(self: Instance, rank: int, transport: Any) -> Endpoint:
        if not rank:
            return make(self, rank, transport)
        first = self.first
        with monkeypatch.context() as patch:
            patch.setattr(first, "config", replace(first.config, epoch=0))
            return make(self, rank, transport)

    monkeypatch.setattr(Instance, "_endpoint", without_epoch)
    registry = {"options": {"embed_registry": 0}}
    with worlds(Side("tp2"), Side("pp2", **registry)) as world:
        for instance in (world.source, world.target):
            assert len({endpoint.epoch for endpoint in instance.endpoints}) == 1
        world.hand_off()


def test_a_coordinator_may_come_after_its_ranks() -> None:
    port = free_port()
    with Rank(1, coordinator=f"127.0.0.1:{port}") as second:
        assert not second.endpoint.wait_ready(0.05)
        assert second.endpoint.epoch == 0
        with Rank(0, sockets=SocketConfig(port=port)) as first:
            assert first.endpoint.wait_ready(PATIENCE_S)
            assert second.endpoint.wait_ready(PATIENCE_S)
            assert second.endpoint.epoch == first.endpoint.epoch


@pytest.mark.parametrize("changes", [{"attach_s": 0.1}, {"epoch": 7}], ids=["in time", "it has to be there"])
def test_a_coordinator_that_does_not_come(changes: dict[str, Any]) -> None:
    with Rank(1, coordinator=f"127.0.0.1:{free_port()}", **changes) as second:
        assert "lost its coordinator" in second.ended.get(timeout=PATIENCE_S)
        assert not second.endpoint.wait_ready(PATIENCE_S)


def test_another_secret_or_instance_is_refused_at_once() -> None:
    with Rank(0) as first:
        for changes, text in (
            ({"secret": b"another secret of 32 bytes, no more"}, "proof does not hold"),
            ({"instance": "p1"}, "instance 'p1' was expected"),
        ):
            with Rank(1, coordinator=first.endpoint.address, **changes) as stranger:
                assert text in stranger.ended.get(timeout=PATIENCE_S)
                assert not stranger.endpoint.wait_ready(PATIENCE_S)
        with Rank(1, coordinator=first.endpoint.address) as second:
            assert second.endpoint.wait_ready(PATIENCE_S)


def test_a_second_rank_of_the_same_number_is_never_ready() -> None:
    with Rank(0) as first, Rank(1, coordinator=first.endpoint.address) as second:
        assert first.endpoint.wait_ready(PATIENCE_S)
        with Rank(1, coordinator=first.endpoint.address) as third:
            assert "a new rank needs a new incarnation" in third.ended.get(timeout=PATIENCE_S)
            assert not third.endpoint.wait_ready(PATIENCE_S)
        assert second.ended.empty()


def test_a_rank_learns_that_its_coordinator_came_back_and_attaches_anew() -> None:
    port = free_port()
    sockets = SocketConfig(port=port)
    first = Rank(0, sockets=sockets)
    with Rank(1, coordinator=f"127.0.0.1:{port}") as old:
        assert old.endpoint.wait_ready(PATIENCE_S)
        epoch, sending = old.endpoint.epoch, old.endpoint.send("t0", DIGEST)
        crash(first)
        assert "lost its coordinator" in old.ended.get(timeout=PATIENCE_S)
        assert isinstance(sending.wait(PATIENCE_S), Failed)
        with Rank(0, sockets=sockets) as renewed:
            # The old endpoint keeps to its end: it does not attach to the new incarnation.
            with pytest.raises(LocalProtocolError, match="is closed; make a new endpoint"):
                old.endpoint.send("t1", DIGEST)
            assert not renewed.endpoint.wait_ready(0.05)
            with Rank(1, coordinator=f"127.0.0.1:{port}", epoch=epoch) as stale:
                assert "another instance's coordinator" in stale.ended.get(timeout=PATIENCE_S)
            with Rank(1, coordinator=f"127.0.0.1:{port}") as again:
                assert again.endpoint.wait_ready(PATIENCE_S)
                assert renewed.endpoint.wait_ready(PATIENCE_S)
                assert again.endpoint.epoch == renewed.endpoint.epoch > epoch


def test_a_transport_ends_with_its_endpoint() -> None:
    """What an earlier incarnation granted cannot land in the pools of a later one."""
    with Rank(0) as first:
        pass
    config = replace(first.endpoint.config, epoch=0)
    with pytest.raises(TransportError, match="the transport was closed"):
        Endpoint(config, first.pools, first.endpoint.transport)


def crash(rank: Rank) -> None:
    """Its loop ends without a goodbye."""
    for link in list(rank.endpoint._loop._sockets._links):
        rank.endpoint._loop.post(lambda link=link: link._socket.abort())
    until(lambda: not rank.endpoint._loop._sockets._links, "the links to break")
    rank.endpoint.close()
