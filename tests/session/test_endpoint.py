"""What engines see of an endpoint: its calls, its three ways to hear of an end, and what misuse is told."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.session.handoff_world import (
    AUX,
    CACHE,
    PATIENCE_S,
    SECRET,
    Instance,
    Job,
    Side,
    Transfer,
    World,
    until,
    without_leaks,
    worlds,
)

from baton.errors import BatonError, ConfigError, LocalProtocolError
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Aux, Failed, Ready, Stage, Waiting, Why
from baton.session import Digest, Endpoint, EndpointConfig, Handle, prompt_digest
from baton.session.links import SocketConfig
from baton.transport import HostFence, open_transport

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "library.py"


NUM_PAGES = 1024


@pytest.fixture(autouse=True, scope="module")
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """A world with pages enough for every test that leaves it working."""
    side = Side("dp2.tp2", num_pages=NUM_PAGES)
    with worlds(side, side) as world:
        yield world


# Three ways to hear of an end.


def begin(world: World) -> Transfer:
    found = world.transfer()
    found.receive()
    found.send()
    found.offer_all()
    return found


def test_a_scheduler_that_polls(shared: World) -> None:
    found = begin(shared)
    num_polls = 0
    assert isinstance(found.receiving.state, Waiting)
    found.commit()
    while isinstance(found.receiving.state, Waiting):
        num_polls += 1
        found.receiving.wait(0.001)
    assert found.receiving.state == Ready(AUX)
    # The verdict of a success gives the pages of the target back in the same breath.
    until(lambda: found.receiving.is_released, "the pages of the target")
    found.check_ready()


def test_a_scheduler_that_awaits(shared: World) -> None:
    found = begin(shared)

    async def scheduler() -> list[Any]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(found.receiving.settled(), 0.01)
        found.commit()
        return await asyncio.gather(*(handle.settled() for handle in found.handles))

    outcomes = asyncio.run(asyncio.wait_for(scheduler(), PATIENCE_S))
    assert outcomes == [Ready(AUX)] * len(found.handles)
    # One that comes late hears it too.
    assert asyncio.run(found.receiving.settled()) == Ready(AUX)
    found.check_ready()


def test_a_scheduler_that_was_gone_before_the_end(shared: World) -> None:
    found = begin(shared)

    async def impatient() -> None:
        await asyncio.wait_for(found.receiving.settled(), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    found.commit()
    found.check_ready()


def test_a_scheduler_that_is_called_back() -> None:
    with worlds(Side("tp2"), Side()) as world:
        told: queue.Queue[tuple[Handle, object, bool, int]] = queue.Queue()

        def note(handle: Handle) -> None:
            told.put((handle, handle.state, handle.is_released, threading.get_ident()))

        for endpoint in (world.source.first, world.target.first):
            endpoint.on_change(note)
        found = begin(world)
        found.commit()
        seen: dict[Handle, list[tuple[object, bool]]] = {found.receiving: [], found.sendings[0]: []}
        while not all(states and states[-1][1] for states in seen.values()):
            handle, state, is_released, thread = told.get(timeout=PATIENCE_S)
            assert thread != threading.get_ident()
            seen[handle].append((state, is_released))
        # The target hears of the aux record, unless that is the last thing to come, then of the end.
        *early_aux, verdict, release = seen[found.receiving]
        assert early_aux in ([], [(Waiting(), False)])
        assert (verdict, release) == ((Ready(AUX), False), (Ready(AUX), True))
        # The source hears of pages that are not read any more, then of the end.
        *landed, (state, _), last = seen[found.sendings[0]]
        assert landed
        assert all(isinstance(early, Waiting) for early, _ in landed)
        assert (state, last) == (Ready(AUX), (Ready(AUX), True))
        found.check_ready()


# Misuse.


def config(**changes: Any) -> EndpointConfig:
    found = EndpointConfig(instance="p0", spec=Side("tp2").spec(CACHE), rank=0, secret=SECRET)
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 2}, "rank 2: tp2 has 2 ranks"),
        ({"rank": -1}, "rank -1: tp2 has 2 ranks"),
        ({"role": "both ways"}, "use prefill, decode, both"),
        ({"epoch": -1}, "epoch -1: give 1 or more"),
        ({"attach_s": float("inf")}, "attach_s is inf"),
    ],
)
def test_a_config_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**changes)


def test_a_secret_is_not_shown() -> None:
    assert repr(SECRET) not in repr(config())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda pools: pools.pop("v"), "needs the buffers k, v; got k"),
        (lambda pools: pools.update(extra=pools["k"]), "got extra, k, v"),
        (lambda pools: pools.update(k=pools["k"][1:]), "buffer 'k' of rank 0 has to have"),
    ],
)
def test_buffers_that_are_not_the_ranks(change: Callable[[dict[str, Any]], None], text: str) -> None:
    transport = open_transport("memory")
    pools = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(config().spec, 0, "pool").items()}
    change(pools)
    try:
        with pytest.raises(ConfigError, match=text):
            Endpoint(config(), pools, transport)
    finally:
        transport.close()


def test_a_port_that_is_taken() -> None:
    first = Instance("p0", CACHE, Side(), "memory")
    port = int(first.first.address.rpartition(":")[2])
    spec = Side().spec(CACHE)
    transport = open_transport("memory")
    pools = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "pool").items()}
    try:
        with pytest.raises(ConfigError, match=f"port {port}"):
            Endpoint(config(spec=spec, sockets=SocketConfig(port=port)), pools, transport)
    finally:
        transport.close()
        first.close()


REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"transfer": ""}, "1 to 128 characters"),
    ({"transfer": "x" * 129}, "1 to 128 characters"),
    ({"transfer": 7}, "1 to 128 characters"),
    ({"held": {"tokens": 3}}, "whole pages of 4; 0 would do|0 always does"),
    ({"held": {"tokens": 24}}, "held tokens must be 0 to 21, found 24"),
    ({"held": {"state": 4}}, "nothing can be held of group 'state'"),
    ({"pages": {}}, "at least one rank"),
    ({"pages": {9: {"tokens": [0]}}}, "pages for rank 9, but dp2.tp2 has 4 ranks"),
    ({"pages": {0: {"tokens": [0, NUM_PAGES]}}}, "pages 0 to 1024 of group 'tokens': its pools have"),
    ({"pages": {0: {"tokens": [-1, 2]}}}, "pages -1 to 2"),
    ({"pages": {0: {"tokens": [0.5]}}}, "list of integers"),
    ({"pages": {0: {"tokens": [[1], [2]]}}}, "list of integers"),
    ({"pages": {0: {"other": [1]}}}, "no component is in group 'other'; the cache has tokens"),
    ({"pages": {1: {"tokens": [1]}, 2: {"tokens": [1]}}}, "ranks 1, 2 of dp2.tp2 are of several dp groups"),
]


@pytest.mark.parametrize(("changes", "text"), REQUESTS)
def test_a_request_that_cannot_be(shared: World, changes: dict[str, Any], text: str) -> None:
    found = shared.transfer()
    with pytest.raises(ConfigError, match=text):
        found.receive(**changes)


@pytest.mark.parametrize(
    ("table", "text"),
    [([4, 5], "has 2 pages, 6 are needed"), ([0, 1, 2, 3, 1, 5], "gives page 1 to two places")],
)
def test_pages_that_cannot_hold_the_prompt(shared: World, table: list[int], text: str) -> None:
    found = shared.transfer()
    found.receive(pages={0: {"tokens": table}, 1: found.target_tables[1]})
    found.send()
    cause = found.cause()
    assert (cause.instance, cause.rank) == ("d0", 0)
    assert text in cause.text


CHUNKS: list[tuple[Any, Any, Any, str]] = [
    ((0, 4), (0, 22), None, "outside of 21 tokens"),
    ((0, 4), (-1, 4), None, "outside of 21 tokens"),
    ((0, 4), (5, 5), None, "is empty"),
    ((2, 2), (0, 4), None, "is empty"),
    ((-1, 2), (0, 4), None, "outside"),
    ((0, 4), (0, 4), {"tokens": [NUM_PAGES]}, "its pools have 1024 pages"),
    ((0, 4), (0, 4), {"other": [1]}, "no component is in group 'other'"),
]


@pytest.mark.parametrize(("layers", "tokens", "pages", "text"), CHUNKS)
def test_a_chunk_that_cannot_be(shared: World, layers: Any, tokens: Any, pages: Any, text: str) -> None:
    found = begin(shared)
    with pytest.raises(BatonError, match=text):
        found.sendings[0].ready(layers, tokens, found.source_tables[0] if pages is None else pages)
    # It was not begun, so that the transfer can still be completed.
    found.commit()
    found.check_ready()


def test_a_chunk_without_enough_pages(shared: World) -> None:
    found = shared.transfer()
    found.receive()
    found.send()
    found.sendings[1].ready((0, 4), (0, 21), {"tokens": found.source_tables[1]["tokens"][:2]})
    cause = found.cause()
    assert (cause.why, cause.instance, cause.rank) == (Why.COPY_FAILED, "p0", 1)
    assert "has 2 pages, 6 are needed" in cause.text


@pytest.mark.parametrize("is_finished", [False, True], ids=["commit", "finish"])
def test_nothing_can_be_added_after_the_last_word(shared: World, is_finished: bool) -> None:
    found = shared.transfer()
    found.receive()
    found.send()
    sending = found.sendings[0]
    if is_finished:
        sending.finish(AUX)
    else:
        found.offer((0, 4), (0, 21))
        found.commit()
    for call in (
        lambda: sending.ready((0, 4), (0, 21), found.source_tables[0]),
        sending.commit,
        lambda: sending.finish(AUX),
    ):
        with pytest.raises(LocalProtocolError, match="after commit or finish"):
            call()
    found.outcome()


@pytest.mark.parametrize(
    "aux",
    [
        Aux(tokens=(np.int64(3),)),  # type: ignore[arg-type]
        Aux(tensors={"hidden": np.zeros(3)}),  # type: ignore[dict-item]
        Aux(fields={"a": None}),  # type: ignore[dict-item]
        "text",
        Aux(tensors={"hidden": bytes(33 << 20)}),
    ],
    ids=["numpy number", "array", "none", "no record", "too large"],
)
def test_an_aux_record_that_cannot_be_sent(shared: World, aux: Any) -> None:
    found = begin(shared)
    with pytest.raises(ConfigError, match="aux record"):
        found.sendings[0].commit(aux)
    found.commit()
    found.check_ready()


def test_digests() -> None:
    plain = prompt_digest([1, 2, 3])
    others = [
        prompt_digest([1, 2, 4]),
        prompt_digest([1, 2]),
        prompt_digest([1, 2, 3], adapter="a"),
        prompt_digest([1, 2, 3], salt="a"),
        prompt_digest([1, 2, 3], embeddings=b"a"),
    ]
    assert plain == prompt_digest(np.array([1, 2, 3], dtype=np.int32))
    assert plain.num_tokens == 3
    assert len({plain, *others}) == 6
    for value in (b"short", "x" * 16):
        with pytest.raises(ConfigError, match="16 bytes"):
            Digest(3, value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="number of tokens"):
        prompt_digest([])


# Beginning and end.


def test_an_instance_is_ready_when_all_its_ranks_are_there() -> None:
    spec = Side("tp2").spec(CACHE)
    made: list[Endpoint] = []
    try:
        for rank in range(2):
            transport = open_transport("memory")
            pools = {name: transport.allocate(size) for name, size in buffers(spec, rank, "pool").items()}
            one = EndpointConfig(instance="p0", spec=spec, rank=rank, secret=SECRET)
            if made:
                assert not made[0].wait_ready(0.05)
                one = replace(one, epoch=made[0].config.epoch, coordinator=made[0].address)
            made.append(Endpoint(one, pools, transport))
        assert made[0].wait_ready(PATIENCE_S)
        assert made[1].address == made[0].address
    finally:
        for endpoint in made:
            endpoint.close()


def test_a_rank_of_another_incarnation_is_turned_away() -> None:
    with worlds(Side("tp2"), Side()) as world:
        spec, first, told = world.source.spec, world.source.first, queue.Queue[str]()
        transport = open_transport("memory")
        pools = {name: transport.allocate(size) for name, size in buffers(spec, 1, "pool").items()}
        late = replace(first.config, rank=1, coordinator=first.address, epoch=first.config.epoch - 1)
        with Endpoint(late, pools, transport, on_end=told.put):
            assert "another instance" in told.get(timeout=PATIENCE_S)
        world.hand_off()


def test_calls_after_the_end() -> None:
    with worlds(Side(), Side()) as world:
        found = world.hand_off()
        other = Instance("p1", CACHE, Side(), "memory")
        other.close()
        for call in (
            lambda: other.first.send("t", found.digest),
            lambda: other.first.receive(found.request([0])),
        ):
            with pytest.raises(LocalProtocolError, match="rank 0 of p1 is closed"):
                call()
        other.close()


def test_no_handle_waits_for_an_instance_that_ended_loudly() -> None:
    world = World(Side("tp2"), Side())
    try:
        found = world.transfer()
        found.send()
        found.offer((0, 4), (0, 21), fence=HostFence())
        until(lambda: world.source.counts()["outbound"] == 1, "an offer")
        coordinator = world.source.first.coordinator
        assert coordinator is not None
        gone = coordinator.config.cause(Why.PEER_LOST, Stage.COPY, "gone")
        coordinator.ports.post(lambda: coordinator.lost(coordinator.members[1], gone))
        for sending in found.sendings.values():
            assert isinstance(sending.wait(PATIENCE_S), Failed)
        until(lambda: len(world.source.ended) == 2, "both ranks to end")
        with pytest.raises(LocalProtocolError, match="is closed"):
            world.source.first.send("t", found.digest)
    finally:
        world.close()


def test_the_counts_may_be_asked_for_at_any_time() -> None:
    with worlds(Side("tp2", num_pages=256), Side("tp2", num_pages=256)) as world:
        transfers = [world.transfer(Job(4)) for _ in range(12)]
        for found in transfers:
            found.receive()
            world.target.counts()
            found.send()
            found.offer((0, 4), (0, 4))
            found.commit()
            world.source.counts()
        for found in transfers:
            found.check_ready()


# The example of the documents.


def test_the_example_runs() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("target: Ready(aux=Aux(tokens=(42,)")
    assert lines[-1] == "every byte is equal"


def test_a_dp_group_is_the_one_named_or_the_least_loaded() -> None:
    with worlds(Side("dp2.tp1"), Side("tp1")) as world:
        first, second = world.source.endpoints
        assert first.assign("a", 1) == 1
        assert first.assign("b") == 0, "group 1 has one more"
        assert first.assign("c", 1) == 1
        assert [first.assign(transfer) for transfer in "de"] == [0, 0]
        assert first.assign("a") == 1, "asked again, the same"
        with pytest.raises(ConfigError, match=r"was given to dp group 1, not 0"):
            first.assign("a", 0)
        with pytest.raises(ConfigError, match=r"dp group 2: dp2\.tp1 has 2"):
            first.assign("f", 2)
        with pytest.raises(LocalProtocolError, match="where the coordinator is hosted"):
            second.assign("g")


def test_page_tables_are_taken_as_they_are_when_given() -> None:
    """Engines write on in one array per request: a copy or a grant that waits must not see that."""
    with worlds(Side("tp1"), Side("tp1")) as world:
        found = world.transfer()
        tables = (found.source_tables[0], found.target_tables[0])
        fences = (HostFence(), HostFence())
        pages = {group: np.array(ids) for group, ids in tables[1].items()}
        request = replace(found.request([0], fence=fences[1]), pages={0: pages})
        found.receivings[0] = world.target.endpoints[0].receive(request)
        found.send()
        own = {group: np.array(ids) for group, ids in tables[0].items()}
        found.sendings[0].ready((0, 4), (0, 21), own, fences[0])
        for table in (pages, own):
            for ids in table.values():
                ids[:] = ids[::-1].copy()
        for fence in fences:
            fence.set()
        found.commit()
        found.check_ready()


def test_it_closes_while_its_peers_stay_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on `wait_closed` of asyncio waits until no peer is connected; here it always does."""

    async def wait_closed(server: asyncio.Server) -> None:
        while server._active_count:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    monkeypatch.setattr(asyncio.Server, "wait_closed", wait_closed)
    world = World(Side("tp2"), Side("tp1"))
    world.hand_off()
    closing = threading.Thread(target=world.source.first.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    world.close()
