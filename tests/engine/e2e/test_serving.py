"""What a server rests on: how busy an instance is, what it refuses, how it ends and comes back."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import (
    SECRET,
    WAIT_S_MAX,
    BothSides,
    InstancePool,
    Listener,
    Side,
    ask_all,
    ask_one,
    check_idle,
    end_of,
    greedy,
    stopped,
    until,
)
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.ports import free_port

from baton.bench.handoff.fleet import RegistryProcess
from baton.engine.commands import Command, Step
from baton.engine.deployment import Pair
from baton.engine.instance import Instance
from baton.engine.load import EngineLoad
from baton.engine.requests import OutputChunk, RequestError, RequestFinished
from baton.errors import EngineError, FullError
from baton.protocol.outcomes import Why
from baton.session.registry import RegistryClient, Roster, Topology

pytestmark = pytest.mark.engine

LONG = 2000
CHUNK = 20


@pytest.fixture(scope="module")
def pair(pool: InstancePool, folder: Path) -> Pair:
    plain = Side(str(folder)).but(chunk_tokens=CHUNK)
    return pool.pair(replace(plain, layout="pp2"), replace(plain, name="two"))


def check_sum(load: EngineLoad) -> None:
    pages = load.pages
    assert pages.free + pages.used + pages.leased + pages.quarantined == pages.total > 0
    assert min(pages.free, pages.used, pages.leased, pages.quarantined) >= 0


def test_load_of_a_pair_at_work(pair: Pair) -> None:
    handed = [BothSides(pair, greedy(prompt(200, str(index)), 400)) for index in range(4)]
    until(lambda: pair.decode.load().num_running == 4, "all run on the target")
    until(lambda: pair.decode.load().pages.used > 0, "pages are written by the target itself")
    while any(not each.decode.events.qsize() or not is_told(each.decode) for each in handed):
        for instance in (pair.prefill, pair.decode):
            check_sum(instance.load())
    until(lambda: pair.prefill.load().prefill_tokens_per_s > 0, "prompts were computed")
    until(lambda: pair.decode.load().decode_tokens_per_s > 0, "answers were")
    assert pair.prefill.load().decode_tokens_per_s == 0
    for instance in (pair.prefill, pair.decode):
        until(lambda one=instance: one.load().handoff_s > 0, f"hand-overs took time: {instance.load()}")
        until(lambda one=instance: is_free(one.load()), f"it is at rest: {instance.load()}")
    check_idle(pair.prefill, pair.decode)


def is_told(listener: Listener) -> bool:
    event = listener.next()
    assert not isinstance(event, RequestError), event
    if not isinstance(event, RequestFinished):
        return False
    listener.events.put(event)
    return True


def is_free(load: EngineLoad) -> bool:
    check_sum(load)
    return load.pages.free == load.pages.total and not (
        load.num_running or load.num_waiting or load.num_tokens
    )


def test_more_than_may_wait(pool: InstancePool, folder: Path) -> None:
    side = Side(str(folder), name="narrow").but(queue_max=2, sequences_max=3)
    instance = pool.instance(side)
    request = greedy(prompt(20), 300)
    # A burst that can begin at once is nobody's queue.
    running = [Listener(instance, replace(request, salt=str(index))) for index in range(3)]
    for each in running:
        assert isinstance(each.until(OutputChunk), OutputChunk)
    with stopped(instance):
        waiting = [Listener(instance, replace(request, salt=f"w{index}")) for index in range(2)]
        with pytest.raises(FullError, match="at most 2") as found:
            Listener(instance, request)
        assert 1.0 <= found.value.retry_after_s <= 60.0
        until(lambda: instance.load().num_waiting == 2, "two wait")
        assert instance.load().num_running == 3
    instance.core.abort(running[0].number)
    assert isinstance(waiting[0].until(OutputChunk), OutputChunk)
    more = Listener(instance, request)
    for each in (*running, *waiting, more):
        assert isinstance(each.until(RequestFinished), RequestFinished)
    check_idle(instance)


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_the_end_is_told_once(pool: InstancePool, folder: Path, way: str) -> None:
    instance = Instance(Side(str(folder), name="ending").config).start()
    told: list[str] = []
    ended = threading.Event()

    def tell() -> None:
        told.append(threading.current_thread().name)
        ended.set()

    instance.on_end(tell)
    listener = Listener(instance, greedy(prompt(20), 2000))
    assert isinstance(listener.until(OutputChunk), OutputChunk)
    assert not told
    if way == "killed":
        os.kill(instance.pids[0], signal.SIGKILL)
        assert ended.wait(WAIT_S_MAX)
        assert isinstance(listener.until(RequestError), RequestError), "requests hear of it first"
    instance.close()
    assert told == [f"baton {instance.config.name}"]
    instance.on_end(lambda: told.append("late"))
    assert told[1:] == ["late"]
    with pytest.raises(EngineError, match="not running"):
        instance.core.submit(greedy(prompt(4), 1), print)


def roster(url: str, secret: bytes, name: str) -> Roster | None:
    async def ask() -> Topology:
        async with RegistryClient(url, secret) as client:
            return await client.topology()

    found = asyncio.run(ask()).instances
    return next((each for each in found if each.instance == name and each.is_complete), None)


def test_back_on_the_same_port_under_the_same_name(pool: InstancePool, folder: Path, tmp_path: Path) -> None:
    """Its peers find it again, by its address and in the registry."""
    other = pool.instance(Side(str(folder), name="two"))
    registry = RegistryProcess(tmp_path, SECRET)
    try:
        check_phoenix(other, folder, registry.url)
    finally:
        registry.stop()


def check_phoenix(other: Instance, folder: Path, url: str) -> None:
    config = replace(
        Side(str(folder), "pp2").config,
        name="phoenix",
        port=free_port(),
        url="http://127.0.0.1:8000",
        registry=url,
    )
    asked, epochs = prompt(40), []
    for _ in range(3):
        instance = Instance(config).start()
        assert instance.address == f"127.0.0.1:{config.port}"
        epochs.append(instance.epoch)

        def is_known(epoch: int = instance.epoch) -> bool:
            found = roster(url, config.secret, "phoenix")
            return found is not None and found.epoch == epoch and found.url == config.url

        until(is_known, "the registry has it")
        heard = ask_one(Pair(instance, other), greedy(asked, 8))
        check_tokens(folder, [asked], [heard], 8)
        os.kill(instance.pids[0], signal.SIGKILL)
        until(lambda one=instance: bool(one.failure), "it is noticed")
        instance.close()
    assert epochs == sorted(set(epochs))
    check_idle(other)


def test_a_port_that_is_taken(pool: InstancePool, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1 port {port}"):
            Instance(Side(str(folder), name="late").but(port=port).config).start()


class Steps:
    """Which steps a sequence is part of, in order, and where its abort came in between."""

    def __init__(self, instance: Instance, patch: pytest.MonkeyPatch) -> None:
        self.orders: list[Command | str] = []
        tell, drop = instance.core._send, instance.core._drop
        patch.setattr(instance.core, "_send", lambda order: (self.orders.append(order), tell(order)))
        patch.setattr(instance.core, "_drop", lambda *given: (self.orders.append("dropped"), drop(*given)))

    def of(self, number: int) -> list[int]:
        """Places of the steps with a sequence."""
        return [
            place
            for place, order in enumerate(self.orders)
            if isinstance(order, Step)
            and any(work.sequence == number for batch in order.batches for work in batch.sequences)
        ]

    @property
    def dropped_at(self) -> int:
        """Where the request was given up."""
        return self.orders.index("dropped")


@pytest.mark.parametrize("who", ["alone", "source", "target"])
def test_an_abort_stops_a_long_prompt_after_its_chunk(
    pair: Pair, patch: pytest.MonkeyPatch, who: str
) -> None:
    request = greedy(prompt(LONG, who), 8, salt=secrets.token_hex(4))
    steps = Steps(pair.prefill, patch)
    handed = None if who == "alone" else BothSides(pair, request)
    prefill = handed.prefill if handed else Listener(pair.prefill, request)
    until(lambda: len(steps.of(prefill.number)) > 3, "some chunks were begun")
    doomed = handed.decode if handed and who == "target" else prefill
    doomed.instance.core.abort(doomed.number)
    assert isinstance(doomed.until(RequestFinished), RequestFinished)
    if handed:
        other = handed.prefill if who == "target" else handed.decode
        trouble = other.until(RequestError)
        assert isinstance(trouble, RequestError)
        assert trouble.cause is not None
        assert trouble.cause.why is Why.ABORTED
    check_idle(pair.prefill, pair.decode)
    places = steps.of(prefill.number)
    assert max(places) < steps.dropped_at, "it was computed after it was given up"
    assert len(places) < LONG // CHUNK, "it was computed whole"
    for instance in (pair.prefill, pair.decode):
        until(lambda one=instance: is_free(one.load()), f"all pages are back: {instance.load()}")


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    return monkeypatch


def test_trouble_names_the_peer(pool: InstancePool, pair: Pair, folder: Path) -> None:
    """A target whose source is killed hears which one it was."""
    side = Side(str(folder), name="doomed").but(link_bytes_per_s=2e3, chunk_tokens=1000)
    doomed = pool.instance(side)
    handed = BothSides(Pair(doomed, pair.decode), greedy(prompt(500), 8))
    assert isinstance(handed.decode.until(OutputChunk), OutputChunk)
    os.kill(doomed.pids[0], signal.SIGKILL)
    tokens, end = end_of(handed.decode)
    assert tokens == []
    assert isinstance(end, RequestError)
    assert end.cause is not None
    assert end.cause.why is Why.PEER_LOST
    assert doomed.config.name in end.text
    ours = handed.prefill.until(RequestError)
    assert isinstance(ours, RequestError)
    assert ours.cause is not None
    assert doomed.config.name in ours.text
    check_idle(pair.decode)
    check_all_work(pair, folder)


def check_all_work(pair: Pair, folder: Path) -> None:
    asked = [prompt(length) for length in (5, 40)]
    check_tokens(folder, asked, ask_all(pair, [greedy(each, 8) for each in asked]), 8)
