"""Transfers that cannot succeed: both ends hear the same cause, pages come back, and the next one works."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.plan.world import make_cache
from tests.ports import free_port
from tests.session.handoff_world import (
    AUX,
    CACHE,
    NHD,
    PATIENCE_S,
    PATIENT,
    SECRET,
    TIMINGS,
    Clock,
    Instance,
    Job,
    Side,
    Transfer,
    World,
    until,
    without_leaks,
    worlds,
)
from tests.transport.faulty import Faults, Faulty, FaultyConfig

from baton.errors import ConfigError, LayoutError
from baton.plan import plan
from baton.plan.kinds import Paged
from baton.protocol.outcomes import Cause, Failed, Ready, Stage, Waiting, Why
from baton.session.handles import Digest, prompt_digest
from baton.session.links import SocketConfig
from baton.session.registry import RegistryClient, RegistryError
from baton.transport import Batch, Completion, Done, HostFence, Region, Ticket, Transport


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


# Aborts, by either side and at every stage.


def asked(found: Transfer) -> None:
    """The target alone has spoken."""
    found.receive()
    until(lambda: found.world.target.counts()["inbound"] == 1, "a request")


def offered(found: Transfer) -> None:
    """The source alone has spoken."""
    found.send()
    found.offer((0, 4), (0, 21))
    until(lambda: found.world.source.counts()["outbound"] == 1, "an offer")


def granted(found: Transfer) -> None:
    found.receive()
    found.send()
    halves = [endpoint._rank.source for endpoint in found.world.source.endpoints]

    def is_granted() -> bool:
        return all(found.id in half.transfers and half.transfers[found.id].grant for half in halves)

    until(is_granted, "a grant at every rank")


def copying(found: Transfer) -> None:
    granted(found)
    found.offer((0, 2), (0, 21))
    until(lambda: not any(one.reading() for one in found.sendings.values()), "the first chunk to land")
    found.offer((2, 4), (0, 21), fence=HostFence())
    sources = [found.world.source.endpoints[rank] for rank in found.sendings]
    until(lambda: all(source.counts()["copies"] for source in sources), "copies under way")


def copied(found: Transfer) -> None:
    granted(found)
    found.offer_all()
    until(lambda: not any(one.reading() for one in found.sendings.values()), "all chunks to land")


def one_committed(found: Transfer) -> None:
    copied(found)
    found.sendings[0].commit()


def all_committed(found: Transfer) -> None:
    """The aux record is missing."""
    copied(found)
    for sending in found.sendings.values():
        sending.commit()


STAGES = [granted, copying, copied, one_committed, all_committed]


@pytest.mark.parametrize("reach", [offered, *STAGES])
def test_a_source_gives_up(reach: Callable[[Transfer], None]) -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        found = world.transfer()
        reach(found)
        found.sendings[1].abort("the client left")
        if not found.receivings:
            found.sendings[1].wait(PATIENCE_S)
            found.receive()
        stage = Stage.OFFER if reach is offered else Stage.COPY
        assert found.cause() == Cause(Why.ABORTED, stage, "p0", 1, "the client left")
        world.hand_off()


@pytest.mark.parametrize("reach", [asked, *STAGES])
def test_a_target_gives_up(reach: Callable[[Transfer], None]) -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        found = world.transfer()
        reach(found)
        found.receiving.abort("the client left")
        if not found.sendings:
            found.receiving.wait(PATIENCE_S)
            found.send()
            found.offer((0, 4), (0, 21))
        # One that was only asked for may have been granted before the abort was heard.
        stages = (Stage.GRANT, Stage.COPY) if reach is asked else (Stage.COPY,)
        assert found.cause() in [Cause(Why.ABORTED, stage, "d0", 0, "the client left") for stage in stages]
        world.hand_off()


def test_an_abort_of_much_of_a_pool_does_not_end_the_instance() -> None:
    with worlds(Side("tp2"), Side()) as world:
        free = {key: list(pages) for key, pages in world.target.free.items()}
        for _ in range(10):
            found = world.transfer(Job(48))
            copying(found)
            found.receiving.abort("the client left")
            assert found.cause().why is Why.ABORTED
            world.target.free = {key: list(pages) for key, pages in free.items()}
            world.source.free = {key: list(range(world.source.side.num_pages)) for key in world.source.free}
        world.hand_off()


def test_a_target_gives_up_before_its_pages_are_its_own() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        found.receive(fence=HostFence())
        found.receiving.abort("changed its mind")
        assert found.cause() == Cause(Why.ABORTED, Stage.GRANT, "d0", 0, "changed its mind")


def test_pages_are_granted_when_the_device_work_of_their_last_owner_is_done() -> None:
    with worlds(Side(), Side()) as world:
        found, fence = world.transfer(), HostFence()
        found.receive(fence=fence)
        found.send()
        found.offer_all()
        found.commit()
        world.hand_off()
        assert isinstance(found.receiving.state, Waiting)
        assert found.compare()[1] < found.compare()[0] / 10
        fence.set()
        found.check_ready()


def test_what_is_called_after_the_end_changes_nothing() -> None:
    with worlds(Side(), Side()) as world:
        found = world.hand_off()
        found.sendings[0].abort()
        found.receiving.abort()
        world.hand_off()
        assert found.outcome() == Ready(AUX)


def test_an_engine_that_has_not_heard_of_the_end_is_not_punished() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        granted(found)
        found.receiving.abort("no")
        found.sendings[0].wait(PATIENCE_S)
        found.offer((0, 4), (0, 21))
        found.commit()
        assert found.cause().text == "no"


# Refusals.


def test_prompts_that_differ_are_refused() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        found.send()
        found.offer_all()
        found.receive(digest=prompt_digest(range(1, 22)))
        cause = found.cause()
        assert (cause.why, cause.stage) == (Why.REFUSED_PROMPT, Stage.GRANT)
        assert found.digest.value.hex() in cause.text
        assert found.compare()[1] < found.compare()[0] / 10


def test_prompts_that_differ_in_length_are_refused() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        found.receive(digest=Digest(20, found.digest.value))
        found.send()
        assert found.cause().why is Why.REFUSED_PROMPT


def test_ranks_of_a_source_have_to_agree_on_the_prompt() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        found.receive()
        found.sendings[0] = world.source.endpoints[0].send(found.id, found.digest)
        found.sendings[1] = world.source.endpoints[1].send(found.id, prompt_digest(range(1, 22)))
        cause = found.cause()
        assert cause.why is Why.REFUSED_PROMPT, cause
        assert cause.stage in (Stage.OFFER, Stage.GRANT), "found when the second rank came, or with the grant"


@pytest.mark.parametrize("changes", [{"digest": prompt_digest(range(1, 22))}, {"held": {"tokens": 4}}])
def test_ranks_of_a_target_have_to_agree_on_the_request(changes: dict[str, Any]) -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        found = world.transfer()
        offered(found)
        for rank, own in ((0, {}), (1, changes)):
            request = found.request([rank], **own)
            found.receivings[rank] = world.target.endpoints[rank].receive(request)
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance) == (Why.REFUSED_PROMPT, Stage.GRANT, "d0")
        assert "give every rank of the group the same request" in cause.text
        world.hand_off()


def test_ranks_of_a_target_have_to_agree_on_the_source() -> None:
    with worlds(Side(), Side("tp2")) as world, closing(Instance("p1", CACHE, Side(), "memory")) as other:
        found = world.transfer()
        found.send()
        found.receivings[0] = world.target.first.receive(found.request([0]))
        request = found.request([1], source=other.first.address)
        found.receivings[1] = world.target.endpoints[1].receive(request)
        found.sendings[1] = other.first.send(found.id, found.digest)
        cause = found.cause()
        assert cause.why is Why.REFUSED_PROMPT
        assert other.first.address in cause.text


def test_a_live_id_is_refused_at_the_source() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        granted(found)
        again = world.source.endpoints[1].send(found.id, found.digest)
        refused = again.wait(PATIENCE_S)
        assert isinstance(refused, Failed)
        assert refused.cause.why is Why.REFUSED_LIVE_ID
        assert (refused.cause.instance, refused.cause.rank) == ("p0", 1)
        assert again.is_released
        found.offer_all()
        found.commit()
        found.check_ready()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_live_id_is_refused_at_the_target(rank: int) -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        found = world.transfer()
        granted(found)
        again = world.target.endpoints[rank].receive(found.request([0, 1]))
        refused = again.wait(PATIENCE_S)
        assert isinstance(refused, Failed)
        assert refused.cause.why is Why.REFUSED_LIVE_ID
        assert again.wait_released(PATIENCE_S)
        found.offer_all()
        found.commit()
        found.check_ready()


def test_an_id_that_ended_a_moment_ago_is_refused() -> None:
    with worlds(Side("tp2"), Side()) as world:
        done = world.hand_off()
        again = world.transfer(transfer_id=done.id)
        again.receive()
        assert again.cause().why is Why.REFUSED_LIVE_ID
        again.receivings.clear()
        again.send()
        assert again.cause().why is Why.REFUSED_LIVE_ID


@pytest.mark.parametrize("source", ["nobody", "closed"])
def test_a_source_that_is_not_there(source: str) -> None:
    closed = f"127.0.0.1:{free_port()}"
    with worlds(Side(), Side("tp2")) as world:
        alone = world.transfer()
        alone.receive(source=closed if source == "closed" else source)
        cause = alone.cause()
        assert (cause.why, cause.stage) == (Why.PEER_LOST, Stage.HANDSHAKE)
        assert "registry" in cause.text or closed in cause.text
        world.hand_off()


OTHER_CACHE = make_cache(4, (Paged(2, 3, 2), ((0, 4),)))
STRANGERS: dict[str, tuple[dict[str, Any], Why, str]] = {
    "secret": ({"side": Side(options={"secret": bytes(32)})}, Why.REFUSED_AUTHENTICATION, "secret"),
    "model": ({"side": Side(options={"fingerprint": "other"})}, Why.REFUSED_LAYOUT, "other"),
    "transport": ({"transport": "tcp"}, Why.REFUSED_LAYOUT, "tcp"),
    "granule": ({"side": Side(granule=4)}, Why.REFUSED_LAYOUT, ""),
    "cache": ({"cache": OTHER_CACHE}, Why.REFUSED_LAYOUT, ""),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_source_that_does_not_fit_is_refused(stranger: str) -> None:
    options, why, text = STRANGERS[stranger]
    options = {"cache": CACHE, "side": Side(), "transport": "memory", **options}
    with worlds(Side(), Side()) as world:
        other = Instance("p1", options["cache"], options["side"], options["transport"])
        try:
            found = world.transfer()
            found.receive(source=other.first.address)
            cause = found.cause()
            assert (cause.why, cause.stage) == (why, Stage.HANDSHAKE), cause
            if not text:
                with pytest.raises(LayoutError) as raised:
                    plan(other.spec, world.target.spec, 0, 0)
                text = str(raised.value)
            assert text in cause.text
            world.hand_off()
        finally:
            other.close()


def test_a_request_without_room_is_declined() -> None:
    with worlds(Side("tp2"), Side()) as world:
        found = world.transfer()
        offered(found)
        world.target.first.decline(found.id, world.source.first.address, "no free pages")
        cause = found.cause()
        assert cause == Cause(Why.OUT_OF_PAGES, Stage.GRANT, "d0", 0, "no free pages")
        world.hand_off()


def test_requests_without_a_grant_hold_half_of_the_pool_at_most() -> None:
    with worlds(Side(num_pages=16), Side(num_pages=16)) as world:
        first, second = world.transfer(Job(32)), world.transfer(Job(4))
        first.send()
        first.offer((0, 4), (0, 32))
        second.send()
        second.offer((0, 4), (0, 4))
        cause = second.cause()
        assert (cause.why, cause.stage, cause.rank) == (Why.OUT_OF_PAGES, Stage.OFFER, 0)
        first.receive()
        first.commit()
        first.check_ready()


# Staging.


def test_a_target_without_room_to_unpack_in() -> None:
    with worlds(Side("tp2", dtype="fp16"), Side(dtype="fp32", staging_bytes=2048)) as world:
        found = world.transfer(Job(21))
        found.receive()
        found.send()
        found.offer_all()
        cause = found.cause()
        assert (cause.why, cause.instance, cause.rank) == (Why.OUT_OF_PAGES, "d0", 0)
        world.hand_off(Job(5))


def test_a_source_without_room_to_pack_in() -> None:
    with worlds(Side(order=NHD, staging_bytes=1024), Side("tp2", order=NHD)) as world:
        world.packs()
        found = world.transfer(Job(21))
        found.receive()
        found.send()
        found.offer((0, 4), (0, 21))
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance) == (Why.OUT_OF_PAGES, Stage.COPY, "p0")
        world.hand_off(Job(3))


def test_chunks_take_turns_where_there_is_little_room_to_pack_in() -> None:
    with worlds(Side(order=NHD, staging_bytes=1024), Side("tp2", order=NHD)) as world:
        world.packs()
        found = world.transfer(Job(21))
        found.receive()
        found.send()
        for layer in range(4):
            for start in range(0, 21, 7):
                found.offer((layer, layer + 1), (start, start + 7))
        found.commit()
        found.check_ready()


# Bytes that come out wrong, and copies that fail.


class Meddling:
    """A transport that turns one bit of the first batch before it says that the batch is done."""

    def __init__(self, inner: Transport, registered: dict[tuple[str, int], np.ndarray]) -> None:
        self.inner = inner
        self.registered = registered
        self.batches: dict[Ticket, Batch] = {}
        self.num_turned = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def register(self, buffer: np.ndarray) -> Region:
        region = self.inner.register(buffer)
        self.registered[region.remote.incarnation, region.number] = buffer
        return region

    def submit(self, peer: Any, batch: Batch, *rest: Any, **options: Any) -> Ticket:
        ticket = self.inner.submit(peer, batch, *rest, **options)
        self.batches[ticket] = batch
        return ticket

    def poll(self) -> list[Completion]:
        events = self.inner.poll()
        for event in events:
            if isinstance(event, Done) and not self.num_turned:
                batch = self.batches[event.ticket]
                buffer = self.registered[batch.target.incarnation, batch.target.number]
                buffer[batch.spans.target[0]] ^= 0x10
                self.num_turned += 1
        return events


@pytest.mark.parametrize("mode", ["direct", "convert", "pack"])
@pytest.mark.parametrize("is_verified", [True, False], ids=["verified", "plain"])
def test_one_wrong_bit(mode: str, is_verified: bool) -> None:
    registered: dict[tuple[str, int], np.ndarray] = {}

    def meddle(rank: int, transport: Transport) -> Any:
        return Meddling(transport, registered)

    dtypes = ("fp16", "fp32") if mode == "convert" else ("bf16", "bf16")
    sides = Side("tp1", dtype=dtypes[0], wrap=meddle), Side("pp2", dtype=dtypes[1], wrap=meddle)
    with worlds(*sides) as world:
        world.packs(mode == "pack")
        found = world.transfer(Job(is_verified=is_verified))
        found.receive()
        found.send()
        found.offer((0, 4), (0, 21))
        found.commit()
        if not is_verified:
            assert found.outcome() == Ready(AUX)
            num_bytes, num_right = found.compare()
            assert 0 < num_bytes - num_right <= 4
            return
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance) == (Why.CORRUPTED, Stage.COPY, "d0")
        assert re.search(r"checksum.* of k differ", cause.text)
        assert found.compare()[1] < found.compare()[0]
        world.hand_off(Job(is_verified=True))


class Sabotage:
    """Faulty transports at one rank of a source, until they are mended."""

    def __init__(self, rank: int, **faults: float) -> None:
        self.rank = rank
        self.faults = faults
        self.made: list[Faulty] = []

    def __call__(self, rank: int, transport: Transport) -> Transport:
        if rank != self.rank:
            return transport
        found = Faulty(transport, FaultyConfig(**self.faults))
        assert isinstance(found, Faulty)
        self.made.append(found)
        return found

    def mend(self) -> None:
        for transport in self.made:
            transport.faults = Faults(FaultyConfig())


FAULTS = {
    "error": {"error_probability": 1.0},
    "partial": {"partial_probability": 1.0},
    "hang": {"hang_probability": 1.0},
    "late": {"late_probability": 1.0, "late_s": 0.05},
}


@pytest.mark.parametrize("transport", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_fails(fault: str, transport: str) -> None:
    sabotage = Sabotage(1, **FAULTS[fault])
    timings = {"timings": replace(TIMINGS, copy_s=3.0)}
    with worlds(Side("tp2", wrap=sabotage, options=timings), Side("pp2"), transport=transport) as world:
        found = world.transfer()
        found.receive()
        found.send()
        found.offer_all()
        found.commit()
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance, cause.rank) == (
            Why.COPY_FAILED,
            Stage.COPY,
            "p0",
            1,
        )
        assert "purpose" in cause.text
        # The pages are the engine's: not even a late write may reach them now.
        released = {key: buffer.copy() for key, buffer in world.target.memory.items()}
        until(lambda: not any(made.parts for made in sabotage.made), "late writes to come and go")
        for key, buffer in world.target.memory.items():
            assert np.array_equal(buffer, released[key])
        sabotage.mend()
        world.hand_off()
        world.hand_off()


# Deadlines.


def test_a_transfer_that_the_other_side_never_speaks_of() -> None:
    timings = {"timings": replace(TIMINGS, offer_s=0.2)}
    with worlds(Side(options=timings), Side(options=timings)) as world:
        for begin in (Transfer.receive, Transfer.send):
            found = world.transfer()
            begin(found)
            assert found.cause().why is Why.DEADLINE


def test_a_transfer_that_stops_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = {"timings": replace(PATIENT, progress_s=PATIENCE_S)}
    with worlds(Side("tp2", options={"timings": PATIENT}), Side(options=timings)) as world:
        found = world.transfer()
        copying(found)
        clock.end_by_deadline(found.receiving, PATIENCE_S)
        cause = found.cause()
        assert (cause.why, cause.stage, cause.instance) == (Why.DEADLINE, Stage.COPY, "d0")
        world.hand_off()


@pytest.mark.parametrize(("source_s", "target_s"), [(80.0, None), (None, 80.0), (80.0, 5.0)])
def test_a_progress_deadline_of_one_request_holds_on_both_sides(
    source_s: float | None, target_s: float | None
) -> None:
    with worlds(Side("tp2"), Side("pp2")) as world:
        found = world.transfer()
        for rank in found.source_tables:
            endpoint = world.source.endpoints[rank]
            found.sendings[rank] = endpoint.send(found.id, found.digest, progress_s=source_s)
        found.receive(progress_s=target_s)
        found.offer((0, 2), (0, 21))
        outbound, inbound = coordinators(world)
        until(lambda: is_begun(outbound, found.id) and is_begun(inbound, found.id), "no offer and grant")
        for transfers in (outbound, inbound):
            assert transfers[found.id].record.deadlines.progress_s == 80.0
        found.offer((2, 4), (0, 21))
        found.commit()
        found.check_ready()


def coordinators(world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    source, target = world.source.first.coordinator, world.target.first.coordinator
    assert source is not None
    assert target is not None
    return source.outbound.transfers, target.inbound.transfers


def is_begun(transfers: dict[str, Any], name: str) -> bool:
    return name in transfers and transfers[name].record.deadlines.has_begun


@pytest.mark.parametrize("wrong", [0.0, -3.0, float("inf"), float("nan")])
def test_what_is_no_deadline_is_refused_at_the_call(wrong: float) -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        with pytest.raises(ConfigError, match="give a finite number of seconds above 0"):
            world.source.first.send(found.id, found.digest, progress_s=wrong)
        with pytest.raises(ConfigError, match="give a finite number of seconds above 0"):
            found.receive(progress_s=wrong)


# Instances that go away.


@pytest.mark.parametrize("rank", [0, 1], ids=["coordinator", "other rank"])
@pytest.mark.parametrize("reach", [granted, copying, all_committed])
def test_a_source_rank_that_is_closed(reach: Callable[[Transfer], None], rank: int) -> None:
    world = World(Side("tp2"), Side("tp2"))
    try:
        found = world.transfer()
        reach(found)
        world.source.endpoints[rank].close()
        outcome = found.receiving.wait(PATIENCE_S)  # long before its silence would tell
        assert isinstance(outcome, Failed)
        assert outcome.cause.why is Why.PEER_LOST
        assert outcome.cause.instance == "p0"
        assert found.receiving.wait_released(PATIENCE_S)
        for sending in found.sendings.values():
            assert isinstance(sending.wait(PATIENCE_S), Failed)
        world.check_untouched()
    finally:
        world.close()
    assert not world.target.ended


@pytest.mark.parametrize("rank", [0, 1], ids=["coordinator", "other rank"])
@pytest.mark.parametrize("reach", [granted, copying, all_committed])
def test_a_target_rank_that_is_closed(reach: Callable[[Transfer], None], rank: int) -> None:
    world = World(Side("tp2"), Side("tp2"))
    try:
        found = world.transfer()
        reach(found)
        world.target.endpoints[rank].close()
        for sending in found.sendings.values():
            outcome = sending.wait(PATIENCE_S)
            assert isinstance(outcome, Failed)
            assert outcome.cause.why is Why.PEER_LOST
            assert outcome.cause.instance == "d0"
            assert sending.wait_released(PATIENCE_S)
            assert not sending.reading()
        assert isinstance(found.receiving.wait(PATIENCE_S), Failed)
    finally:
        world.close()
    assert not world.source.ended


@pytest.mark.parametrize("way", ["address", "name"])
def test_a_source_that_was_restarted(way: str) -> None:
    source = Side("tp2", options={"sockets": SocketConfig(port=free_port())})
    with worlds(source, Side(options={"embed_registry": 0})) as world:
        for attempt in range(2):
            found = world.transfer()
            named = "p0" if way == "name" else world.source.first.address
            until(lambda: way == "address" or knows(world, "p0"), "the registration")
            found.receive(source=named)
            found.send()
            found.offer_all()
            found.commit()
            found.check_ready()
            if attempt == 0:
                world.restart_source()


def knows(world: World, instance: str) -> bool:
    """Whether all ranks of an instance have registered."""

    async def look_up() -> bool:
        async with RegistryClient(world.target.first.registry or "", SECRET) as client:
            try:
                return await client.coordinator(instance) == world.source.first.address
            except RegistryError:
                return False

    return asyncio.run(look_up())
