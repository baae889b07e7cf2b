"""When groups of layers are offered, where the host launches layers long before a device computes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import pytest

from baton.engine import layer_pipeline
from baton.engine.commands import CopyRecord, LayerGroupTiming, ScheduledBatch, ScheduledSequence, SendKV
from baton.engine.connector import OutgoingTransfer, PromptSlice
from baton.engine.cost_model import CostModel, LayerBytes, StepTiming
from baton.engine.layer_pipeline import (
    HEAD_LAYERS,
    SPARE_S,
    Forward,
    GroupOffer,
    HostClock,
    LayerPipeline,
    Mark,
    layer_ends_s,
    layer_weights,
)
from baton.plan import Cache, Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.transport import Fence, HostFence

NUM_LAYERS = 9
NUM_TOKENS = 64
LAYER_S = 1e-3
KINDS = (0, 0, 1, 0)


@dataclass(eq=False)
class DeviceMark:
    """A position that the device has not reached yet."""

    at_s: float
    fence: HostFence = field(default_factory=HostFence)


class DeviceClock:
    """A device that is as far as a test says; its marks lie a layer apart."""

    is_async = True

    def __init__(self) -> None:
        self.marks: list[DeviceMark] = []
        self.layer = 0.0

    def mark(self) -> DeviceMark:
        self.marks.append(DeviceMark(self.layer * LAYER_S))
        return self.marks[-1]

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        return [mark.at_s for mark in marks if isinstance(mark, DeviceMark)]

    def compute(self, layer: int) -> None:
        """The device has stored everything up to and with a layer."""
        for mark in self.marks:
            if mark.at_s <= layer * LAYER_S:
                mark.fence.set()


class StubConnector:
    """Records what is offered."""

    def __init__(
        self,
        *,
        is_pipelined: bool = True,
        layer_s: float = 1e-6,
        policy: str = "fixed:1",
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        self.costs = CostModel()
        self.costs.add_step(NUM_TOKENS, StepTiming(layer_s))
        command = SendKV(1, 0, "t", b"", num_tokens, 0, {}, is_pipelined, policy)
        self.transfer = OutgoingTransfer(command)
        self.num_begun = 0
        self.offers: list[tuple[tuple[int, int], Fence]] = []
        self.late_s: float | None = None
        """By how much the oldest prompt on the link is late."""

    def behind_s(self, now_s: float) -> float | None:
        return self.late_s

    def slices(self, sequences: Iterable[ScheduledSequence]) -> list[PromptSlice]:
        return [PromptSlice(scheduled, self.transfer, (0, NUM_TOKENS), {}) for scheduled in sequences]

    def begin(self, transfer: OutgoingTransfer) -> None:
        self.num_begun += 1

    def offer(self, part: PromptSlice, layers: tuple[int, int], fence: Fence) -> int:
        assert self.num_begun, "offered before it was begun"
        self.offers.append((layers, fence))
        return len(self.offers) - 1

    @property
    def layers_offered(self) -> list[tuple[int, int]]:
        return [layers for layers, _ in self.offers]


BATCH = ScheduledBatch([ScheduledSequence(1, 0, list(range(NUM_TOKENS)), {}, NUM_TOKENS)])
EVERY_LAYER = [(layer, layer + 1) for layer in range(NUM_LAYERS)]


def make(connector: StubConnector, clock: object) -> LayerPipeline:
    cache = Cache(NUM_LAYERS, tuple(Paged(1, 8, 8).components(((0, NUM_LAYERS),))))
    spec = Spec(parse_layout("tp1"), cache, Storage(page_tokens=16, dtype="fp32"))
    layers = (0, NUM_LAYERS)
    layer_bytes = LayerBytes.of_rank(spec, 0, layers)
    return LayerPipeline(connector, connector.costs, clock, layers, layer_bytes, policy="cost")


def launch(pipeline: LayerPipeline, clock: DeviceClock, first: int, last: int) -> None:
    for layer in range(first, last):
        clock.layer = layer + 0.5
        pipeline.layer_done(layer)
        clock.layer = layer + 1.0


def test_nothing_is_done_before_the_first_layers_are_launched() -> None:
    connector, clock = StubConnector(), DeviceClock()
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    clock.compute(HEAD_LAYERS)
    assert connector.num_begun == 0
    assert not connector.offers
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert connector.num_begun == 1
    assert connector.layers_offered == EVERY_LAYER[:HEAD_LAYERS]


def test_a_group_is_offered_when_it_is_computed_or_when_all_are_launched() -> None:
    connector, clock = StubConnector(), DeviceClock()
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, 6)
    assert connector.num_begun == 1
    assert not connector.offers
    clock.compute(3)
    launch(pipeline, clock, 6, 7)
    assert connector.layers_offered == EVERY_LAYER[:3]
    assert all(fence.is_ready() for _, fence in connector.offers)
    launch(pipeline, clock, 7, NUM_LAYERS)
    assert len(connector.offers) == 3
    pipeline.after_forward()
    assert connector.layers_offered == EVERY_LAYER
    assert not any(fence.is_ready() for _, fence in connector.offers[3:])
    # A layer that was launched before the plan is marked where it was stored, not where the plan was made.
    clock.layer = NUM_LAYERS
    groups = pipeline.finish()
    assert [group.stop_s for group in groups[:-1]] == [
        (layer + 0.5) * LAYER_S for layer in range(NUM_LAYERS - 1)
    ]
    ready_s = connector.transfer.ready_s
    assert [ready_s[chunk] for chunk in range(NUM_LAYERS)] == [
        pytest.approx((layer + 0.5) * LAYER_S) for layer in range(NUM_LAYERS)
    ]


def test_what_is_not_pipelined_leaves_as_a_whole() -> None:
    connector, clock = StubConnector(is_pipelined=False), DeviceClock()
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS)
    pipeline.after_forward()
    assert connector.layers_offered == [(0, NUM_LAYERS)]
    assert pipeline.unpipelined


def test_on_a_host_every_layer_leaves_at_once() -> None:
    connector = StubConnector()
    pipeline = make(connector, HostClock())
    pipeline.before_forward(BATCH)
    for layer in range(NUM_LAYERS):
        pipeline.layer_done(layer)
        assert connector.layers_offered[-1] == (layer, layer + 1)


@pytest.mark.parametrize(
    ("num_tokens", "layers_offered", "reason"),
    [
        (3072, EVERY_LAYER, ""),
        (3071, [(0, NUM_LAYERS)], "adaptive: a prompt of 3071 tokens is shorter than min_tokens, 3072"),
    ],
)
def test_a_policy_judges_the_whole_prompt_not_the_chunk(
    num_tokens: int, layers_offered: list[tuple[int, int]], reason: str
) -> None:
    """The step computes 64 of its tokens."""
    connector = StubConnector(policy="adaptive", num_tokens=num_tokens)
    pipeline = make(connector, HostClock())
    pipeline.before_forward(BATCH)
    for layer in range(NUM_LAYERS):
        pipeline.layer_done(layer)
    pipeline.after_forward()
    assert connector.layers_offered == layers_offered
    assert pipeline.unpipelined == reason


class StubEvent:
    """Records for how long it is waited for."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        return True


def waits_s(layer_s: float) -> list[float]:
    """For how long a step waits for its grant."""
    connector, clock = StubConnector(layer_s=layer_s), DeviceClock()
    event: Any = StubEvent()
    connector.transfer.answered = event
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    assert not event.waits_s
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    return event.waits_s


def test_grants_are_waited_for_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pipeline, "GRANT_S_MAX", 1000.0)
    (wait_s,) = waits_s(layer_s=1e4)
    assert 0.0 < wait_s <= 1000.0
    (wait_s,) = waits_s(layer_s=20.0)
    assert 0.0 < wait_s <= HEAD_LAYERS * 20.0 - SPARE_S
    assert not waits_s(layer_s=SPARE_S / HEAD_LAYERS)


def test_a_grant_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pipeline, "GRANT_S_MAX", 1e6)
    connector, clock = StubConnector(layer_s=1e6), DeviceClock()
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    threading.Timer(0.05, connector.transfer.answered.set).start()
    launch(pipeline, clock, 0, HEAD_LAYERS + 1)
    assert connector.transfer.answered.is_set()


def granted(layer_s: float) -> tuple[StubConnector, DeviceClock, LayerPipeline]:
    """A step whose transfer takes next to nothing beside its layers."""
    connector, clock = StubConnector(layer_s=layer_s), DeviceClock()
    connector.transfer.answered.set()
    return connector, clock, make(connector, clock)


def test_while_the_link_can_wait_nothing_is_offered() -> None:
    connector, clock, pipeline = granted(10.0)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS - 1)
    clock.compute(NUM_LAYERS - 3)
    launch(pipeline, clock, NUM_LAYERS - 1, NUM_LAYERS)
    assert connector.num_begun == 1
    assert not connector.offers
    pipeline.after_forward()
    assert connector.layers_offered == EVERY_LAYER
    assert [group.stop_s for group in pipeline.finish()[:-1]] == [
        (layer + 0.5) * LAYER_S for layer in range(NUM_LAYERS - 1)
    ]


class HostTime:
    """The host's clock, as fast as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = monotonic()
        monkeypatch.setattr(layer_pipeline, "monotonic", lambda: self.now_s)

    def begin(self, pipeline: LayerPipeline) -> None:
        pipeline.before_forward(BATCH)
        pipeline._forward.begun_s = self.now_s


def test_a_slow_host_does_not_wait_until_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the speed of the first layers, launching will take twice as long as computing."""
    host = HostTime(monkeypatch)
    layer_s = 0.05
    connector, clock, pipeline = granted(layer_s)
    host.begin(pipeline)
    for layer in range(HEAD_LAYERS):
        launch(pipeline, clock, layer, layer + 1)
        host.now_s += layer_s * 2
    clock.compute(HEAD_LAYERS)
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert len(connector.offers) == HEAD_LAYERS


def test_a_host_that_gets_slow_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostTime(monkeypatch)
    layer_s = 0.05
    connector, clock, pipeline = granted(layer_s)
    host.begin(pipeline)
    launch(pipeline, clock, 0, HEAD_LAYERS + 1)
    clock.compute(HEAD_LAYERS + 1)
    launch(pipeline, clock, HEAD_LAYERS + 1, HEAD_LAYERS + 2)
    assert not connector.offers
    host.now_s += layer_s * NUM_LAYERS
    launch(pipeline, clock, HEAD_LAYERS + 2, HEAD_LAYERS + 3)
    assert len(connector.offers) == HEAD_LAYERS + 1
    launch(pipeline, clock, HEAD_LAYERS + 3, NUM_LAYERS)
    pipeline.after_forward()
    assert connector.layers_offered == EVERY_LAYER


def test_a_transfer_that_takes_as_long_as_compute_is_not_kept_waiting() -> None:
    connector, clock, pipeline = granted(10.0)
    num_bytes = NUM_LAYERS * NUM_TOKENS * 8 * 2 * 4
    connector.costs.add_copies(1, [CopyRecord(0, 0, num_bytes, 0.0, 10.0 * NUM_LAYERS)], {0: 0.0})
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    clock.compute(HEAD_LAYERS)
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert len(connector.offers) == HEAD_LAYERS


@pytest.mark.parametrize("late_s", [None, 0.0, 1000.0])
def test_a_link_that_is_behind_gets_one_group(late_s: float | None) -> None:
    """Groups arrive no sooner while the link is busy with the steps before, and each has its overhead."""
    connector, clock = StubConnector(layer_s=10.0, policy="cost"), DeviceClock()
    connector.transfer.answered.set()
    connector.late_s = late_s
    num_bytes = NUM_LAYERS * NUM_TOKENS * 8 * 2 * 4
    connector.costs.add_copies(1, [CopyRecord(0, 0, num_bytes, 0.0, 5.0 * NUM_LAYERS)], {0: 0.0})
    pipeline = make(connector, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS)
    pipeline.after_forward()
    assert (len(connector.offers) == 1) == (late_s == 1000.0)


def test_the_layers_of_a_chunk_have_bytes_and_times() -> None:
    connector, clock, pipeline = granted(10.0)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS)
    pipeline.after_forward()
    pipeline.finish()
    chunks = [connector.transfer.layers_ready[chunk] for chunk in range(NUM_LAYERS)]
    layers = [layer for chunk in chunks for layer in chunk()]
    assert [layer.num_bytes for layer in layers] == [NUM_TOKENS * 8 * 2 * 4] * NUM_LAYERS
    assert [layer.ready_s for layer in layers[:-1]] == [
        pytest.approx((layer + 0.5) * LAYER_S) for layer in range(NUM_LAYERS - 1)
    ]


def test_groups_take_from_a_forward_what_other_threads_took_while_the_device_waited_for_the_host() -> None:
    forward = Forward(1024, launched_s=10.0, other_threads_s=0.032, num_early=32)
    assert forward.group_s(10.5, is_offloaded=False) == 0.0, "the device was behind: nothing was held up"
    assert forward.group_s(9.5, is_offloaded=False) == pytest.approx(1e-3)
    forward.offering_s = 0.064
    both_s = forward.group_s(9.5, is_offloaded=False)
    assert both_s == pytest.approx(3e-3), "and what the offers took the launching thread"
    alone_s = forward.group_s(9.5, is_offloaded=True)
    assert alone_s == pytest.approx(2e-3), "another process binds and copies"
    idle = Forward(1024, launched_s=10.0, other_threads_s=0.032)
    assert idle.group_s(9.5, is_offloaded=False) is None


def test_a_forward_counts_the_processor_time_of_other_threads_and_the_groups_offered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_s, thread_s = iter([5.0, 9.0]), iter([2.0, 3.0])
    monkeypatch.setattr(layer_pipeline, "process_time", lambda: next(process_s))
    monkeypatch.setattr(layer_pipeline, "thread_time", lambda: next(thread_s))
    forward = Forward(8)
    offers: list[Any] = [GroupOffer(None, (0, 1), index) for index in (1, 1, 2)]  # type: ignore[arg-type]
    forward.offered = [(offer, chunk) for chunk, offer in enumerate(offers)]
    forward.end()
    assert forward.other_threads_s == pytest.approx(3.0)
    assert forward.num_early == 3, "each prompt's offer of a group counts"


def test_layers_of_a_kind_share_what_the_kind_takes() -> None:
    # 1 s for kind 0, 4 s for kind 1; what the first layer took does not show.
    assert layer_weights([10.5, 11.5, 15.5, 16.5], KINDS) == pytest.approx([4 / 7, 4 / 7, 16 / 7, 4 / 7])


def test_a_kind_that_only_the_first_layer_has_is_taken_for_average() -> None:
    assert layer_weights([10.0, 11.0, 14.0], (0, 1, 2)) == pytest.approx([1.0, 0.5, 1.5])
    assert layer_weights([10.0], (0,)) == (1.0,)


def test_the_time_of_a_group_is_shared_by_its_own_layers() -> None:
    groups = [LayerGroupTiming((4, 6), 10.0, 12.0), LayerGroupTiming((6, 8), 12.0, 17.0)]
    assert layer_ends_s(groups, (1.0, 1.0, 4.0, 1.0)) == pytest.approx([11.0, 12.0, 16.0, 17.0])
    assert layer_ends_s(groups, None) == pytest.approx([11.0, 12.0, 14.5, 17.0])
