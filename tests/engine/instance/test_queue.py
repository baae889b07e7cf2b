"""What an engine core says of the hand-overs in its queue; its commands are read in place of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.tiny import tiny

from baton.engine.commands import (
    AbortTransfer,
    Command,
    DeclineTransfer,
    QueueTransfer,
    ReceiveKV,
    SampledToken,
    SendCached,
    SendKV,
    Step,
    StepDone,
    TransferUpdate,
)
from baton.engine.config import EngineConfig
from baton.engine.core import RENEW_S, EngineCore
from baton.engine.requests import (
    EngineRequest,
    InboundHandoff,
    ModelContext,
    OutboundHandoff,
    RequestError,
    RequestEvent,
)
from baton.engine.sampling_params import SamplingParams
from baton.engine.sizes import derive_sizes
from baton.protocol.outcomes import Cause, Failed, Stage, Why

POOL_TOKENS, PAGE_TOKENS = 256, 16
FOR_EVER_S = 1e6


class Core:
    """A core of 16 pages; its commands, and the calls that its instance would make."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(str(tiny("llama", folder)), pool_tokens=POOL_TOKENS, page_tokens=PAGE_TOKENS)
        sizes = derive_sizes(config)
        model = ModelContext(None, frozenset(), 64, 32, sizes.context_max)
        self.commands: list[Command] = []
        self.in_flight: Step | None = None
        self.events: dict[str, list[RequestEvent]] = {}
        self.core = EngineCore(config, sizes, model, self.commands.append, lambda call: call())
        self.core.set_running()

    def submit(self, transfer: str, num_tokens: int, source: str = "", max_tokens: int = 1) -> int:
        handoff = InboundHandoff(transfer, source) if source else OutboundHandoff(transfer)
        # Prompts have no prefix in common.
        tokens = tuple((3 * len(self.events) + index) % 61 for index in range(num_tokens))
        events = self.events.setdefault(transfer, [])
        request = EngineRequest(tokens, SamplingParams(max_tokens=max_tokens), handoff)
        return self.core.submit(request, events.append)

    def step(self, now_s: float = 1.0) -> list[Command]:
        """Schedules; returns the commands about hand-overs."""
        self.commands.clear()
        self.core.step(now_s)
        for command in self.commands:
            self.in_flight = command if isinstance(command, Step) else self.in_flight
        kinds = SendKV | SendCached | ReceiveKV | QueueTransfer | DeclineTransfer | AbortTransfer
        return [command for command in self.commands if isinstance(command, kinds)]

    def compute(self) -> None:
        """The workers complete the step in flight."""
        step, self.in_flight = self.in_flight, None
        assert step is not None, "nothing was scheduled"
        samples = {
            work.sequence: [SampledToken(1)] * work.num_samples
            for work in step.batches[0].sequences
            if work.num_samples
        }
        self.core.on_reply(StepDone(step.number, 0, [], samples), 0.0)


@pytest.fixture
def world(tmp_path: Path) -> Core:
    return Core(tmp_path)


def test_a_target_without_room_says_so_and_waits(world: Core) -> None:
    world.submit("first", 200, "prefill", max_tokens=20)
    number = world.submit("second", 200, "prefill")
    world.submit("third", 16, "prefill")
    received, *queued = world.step()
    assert isinstance(received, ReceiveKV)
    assert queued == [QueueTransfer(0, "third", "prefill"), QueueTransfer(0, "second", "prefill")]
    assert world.step(FOR_EVER_S) == []
    assert world.events["second"] == [], "it is not refused"
    world.core.abort(number)
    assert DeclineTransfer(0, "second", "prefill", "aborted by the caller") in world.commands
    (received,) = world.step()
    assert isinstance(received, ReceiveKV)
    assert received.transfer == "third", "who leaves frees the place"


@pytest.mark.parametrize("source", ["", "prefill"])
def test_what_waits_for_longer_than_the_limit_fails_and_frees_its_place(world: Core, source: str) -> None:
    world.core.queue_s_max = 5.0
    num_tokens = 200 if source else 100
    first, second = (world.submit(name, num_tokens, source) for name in ("first", "second"))
    world.step()
    arrived_s = world.core.requests[second].trace.arrived_s
    world.step(arrived_s + 4.9)
    assert world.events["second"] == []
    world.step(arrived_s + 5)
    (error, *_) = world.events["second"]
    assert isinstance(error, RequestError)
    assert error.cause is None
    assert "within 5 s (--queue-timeout)" in error.text
    abort = AbortTransfer(second, error.text.partition(";")[0])
    decline = DeclineTransfer(0, "second", "prefill", error.text.partition(";")[0])
    assert (decline if source else abort) in world.commands
    assert not any(isinstance(event, RequestError) for event in world.events["first"]), "it was begun"
    if not source:  # the ranks of a source have heard of it, and release it
        cause = Cause(Why.ABORTED, Stage.OFFER)
        world.core.on_reply(TransferUpdate(0, second, outcome=Failed(cause), is_released=True), 0.0)
    assert set(world.core.requests) == {first}
    world.core.schedulers[0].check_integrity()


def test_a_source_that_cannot_start_offers_the_prompt_as_queued(world: Core) -> None:
    """Half of the pool is for prompts without a grant."""
    world.submit("first", 100)
    number = world.submit("second", 100)
    first, second = world.step()
    assert isinstance(first, SendKV)
    assert isinstance(second, SendKV)
    assert (first.transfer, first.is_queued) == ("first", False)
    assert (second.transfer, second.is_queued, second.pages) == ("second", True, {})
    world.compute()
    world.core.on_reply(TransferUpdate(0, number, is_granted=True), 0.0)
    assert world.step() == [], "nothing more to say: it starts, and nothing of it is cached"
    assert any(isinstance(command, Step) for command in world.commands)


def test_a_source_whose_target_is_full_holds_no_pages(world: Core) -> None:
    world.submit("first", 100)
    number = world.submit("second", 20)
    world.step()
    world.core.on_reply(TransferUpdate(0, number, is_target_full=True), 0.0)
    world.compute()
    world.step()
    scheduler = world.core.schedulers[0]
    assert not scheduler.sequences[number].pages


def test_the_queue_is_announced_again_only_while_something_is_computed(world: Core) -> None:
    world.submit("first", 100)
    world.submit("second", 100)
    world.step()
    assert world.step(RENEW_S + 1) == []
    world.compute()
    assert world.step(RENEW_S + 1) == [QueueTransfer(0, "second")]
    assert world.step(3 * RENEW_S) == [], "nothing was computed since"


def test_a_queued_source_that_is_aborted_or_fails_leaves_the_queue(world: Core) -> None:
    world.submit("first", 100)
    second, third = world.submit("second", 100), world.submit("third", 100)
    world.step()
    world.core.abort(second)
    assert AbortTransfer(second, "aborted by the caller") in world.commands
    cause = Cause(Why.PEER_LOST, Stage.GRANT, "decode")
    for number in (second, third):
        world.core.on_reply(TransferUpdate(0, number, outcome=Failed(cause), is_released=True), 0.0)
    assert set(world.core.requests) == {1}
    assert not world.core.schedulers[0].waiting
    world.core.schedulers[0].check_integrity()
