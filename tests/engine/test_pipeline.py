"""What leaves when, where the host launches layers long before a device computes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep

import pytest

from baton.engine.rank import pipeline as module
from baton.engine.rank.clock import HostClock, Mark
from baton.engine.rank.handing import Outgoing, Part
from baton.engine.rank.layer_bytes import LayerBytes
from baton.engine.rank.pace import Pace, Took
from baton.engine.rank.pipeline import HEAD_LAYERS, SPARE_S, Pipeline
from baton.engine.steps import Batch, CopyRecord, Send, Work
from baton.plan import Cache, Spec, Storage, parse_layout
from baton.plan.kinds import Paged
from baton.transport import Fence, HostFence

NUM_LAYERS = 9
NUM_TOKENS = 64
LAYER_S = 1e-3


@dataclass(eq=False)
class DeviceMark:
    """A place in the order of a device that has not come there yet."""

    at_s: float
    fence: HostFence = field(default_factory=HostFence)


class DeviceClock:
    """A device that is as far as a test says; its marks lie a layer apart."""

    is_late = True

    def __init__(self) -> None:
        self.marks: list[DeviceMark] = []
        self.layer = 0.0

    def mark(self) -> DeviceMark:
        """After what was launched so far."""
        self.marks.append(DeviceMark(self.layer * LAYER_S))
        return self.marks[-1]

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """As launched."""
        return [mark.at_s for mark in marks if isinstance(mark, DeviceMark)]

    def compute(self, layer: int) -> None:
        """The device has stored everything before and in a layer."""
        for mark in self.marks:
            if mark.at_s <= layer * LAYER_S:
                mark.fence.set()


class Hands:
    """Takes what is offered and remembers when."""

    def __init__(self, *, is_pipelined: bool = True, layer_s: float = 1e-6) -> None:
        self.layers = (0, NUM_LAYERS)
        self.pace = Pace()
        self.pace.computed(NUM_TOKENS, Took(layer_s, 0.0))
        order = Send(1, 0, "t", b"", NUM_TOKENS, 0, {}, is_pipelined, "fixed:1")
        self.outgoing = Outgoing(order)
        self.num_begun = 0
        self.offers: list[tuple[tuple[int, int], Fence]] = []

    def leaving(self, works: Iterable[Work]) -> list[Part]:
        """Every work does."""
        return [Part(work, self.outgoing, (0, NUM_TOKENS), {}) for work in works]

    def begin(self, found: Outgoing) -> None:
        """Counts."""
        self.num_begun += 1

    def session_of(self, found: Outgoing) -> int:
        """There is one."""
        return 1

    def offer(self, part: Part, layers: tuple[int, int], fence: Fence) -> int:
        """Takes it."""
        assert self.num_begun, "offered before it was begun"
        self.offers.append((layers, fence))
        return len(self.offers) - 1

    @property
    def layers_offered(self) -> list[tuple[int, int]]:
        """In their order."""
        return [layers for layers, _ in self.offers]


BATCH = Batch([Work(1, 0, list(range(NUM_TOKENS)), {}, NUM_TOKENS)])


def make(hands: Hands, clock: object) -> Pipeline:
    cache = Cache(NUM_LAYERS, tuple(Paged(1, 8, 8).components(((0, NUM_LAYERS),))))
    spec = Spec(parse_layout("tp1"), cache, Storage(page_tokens=16, dtype="fp32"))
    return Pipeline(hands, clock, "cost", LayerBytes.of_rank(spec, 0, (0, NUM_LAYERS)))


def launch(pipeline: Pipeline, clock: DeviceClock, first: int, last: int) -> None:
    for layer in range(first, last):
        clock.layer = layer + 0.5
        pipeline.layer_done(layer)
        clock.layer = layer + 1.0


def test_nothing_is_done_before_the_first_layers_are_launched() -> None:
    hands, clock = Hands(), DeviceClock()
    pipeline = make(hands, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    clock.compute(HEAD_LAYERS)
    assert hands.num_begun == 0
    assert not hands.offers
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert hands.num_begun == 1
    assert hands.layers_offered == [(layer, layer + 1) for layer in range(HEAD_LAYERS)]


def test_a_group_is_offered_when_it_is_computed_or_when_all_are_launched() -> None:
    hands, clock = Hands(), DeviceClock()
    pipeline = make(hands, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, 6)
    assert hands.num_begun == 1
    assert not hands.offers
    clock.compute(3)
    launch(pipeline, clock, 6, 7)
    assert hands.layers_offered == [(0, 1), (1, 2), (2, 3)]
    assert all(fence.is_ready() for _, fence in hands.offers)
    launch(pipeline, clock, 7, NUM_LAYERS)
    assert len(hands.offers) == 3
    pipeline.after_forward()
    assert hands.layers_offered == [(layer, layer + 1) for layer in range(NUM_LAYERS)]
    assert not any(fence.is_ready() for _, fence in hands.offers[3:])
    # What was launched before the cut was known is marked where it was stored, not where it was cut.
    clock.layer = NUM_LAYERS
    groups = pipeline.groups()
    assert [group.stop_s for group in groups[:-1]] == [
        (layer + 0.5) * LAYER_S for layer in range(NUM_LAYERS - 1)
    ]
    ready_s = hands.outgoing.ready_s
    assert [ready_s[chunk] for chunk in range(NUM_LAYERS)] == [
        pytest.approx((layer + 0.5) * LAYER_S) for layer in range(NUM_LAYERS)
    ]


def test_what_is_not_pipelined_leaves_as_a_whole() -> None:
    hands, clock = Hands(is_pipelined=False), DeviceClock()
    pipeline = make(hands, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS)
    pipeline.after_forward()
    assert hands.layers_offered == [(0, NUM_LAYERS)]
    assert pipeline.unpipelined


def test_on_a_host_every_layer_leaves_at_once() -> None:
    hands = Hands()
    pipeline = make(hands, HostClock())
    pipeline.before_forward(BATCH)
    for layer in range(NUM_LAYERS):
        pipeline.layer_done(layer)
        assert hands.layers_offered[-1] == (layer, layer + 1)


def waited_s(hands: Hands) -> float:
    """How long setting out takes."""
    clock = DeviceClock()
    pipeline = make(hands, clock)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    start_s = monotonic()
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    return monotonic() - start_s


def test_grants_are_waited_for_while_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRANT_S_MAX", 1.0)
    assert waited_s(Hands(layer_s=10.0)) > 0.5
    assert waited_s(Hands(layer_s=SPARE_S / HEAD_LAYERS)) < 0.5


def test_who_is_granted_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRANT_S_MAX", 10.0)
    hands = Hands(layer_s=100.0)
    threading.Timer(0.05, hands.outgoing.answered.set).start()
    assert waited_s(hands) < 5.0


def granted(layer_s: float) -> tuple[Hands, DeviceClock, Pipeline]:
    """A step whose transfer takes next to nothing beside its layers."""
    hands, clock = Hands(layer_s=layer_s), DeviceClock()
    hands.outgoing.answered.set()
    return hands, clock, make(hands, clock)


def test_while_the_link_can_wait_nothing_is_offered() -> None:
    hands, clock, pipeline = granted(10.0)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS - 1)
    clock.compute(NUM_LAYERS - 3)
    launch(pipeline, clock, NUM_LAYERS - 1, NUM_LAYERS)
    assert hands.num_begun == 1
    assert not hands.offers
    pipeline.after_forward()
    assert hands.layers_offered == [(layer, layer + 1) for layer in range(NUM_LAYERS)]
    assert [group.stop_s for group in pipeline.groups()[:-1]] == [
        (layer + 0.5) * LAYER_S for layer in range(NUM_LAYERS - 1)
    ]


def test_a_slow_host_does_not_wait_until_it_is_too_late() -> None:
    """At the speed of the first layers, launching will take twice as long as computing."""
    layer_s = 0.05
    hands, clock, pipeline = granted(layer_s)
    pipeline.before_forward(BATCH)
    for layer in range(HEAD_LAYERS):
        launch(pipeline, clock, layer, layer + 1)
        sleep(layer_s * 2)
    clock.compute(HEAD_LAYERS)
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert len(hands.offers) == HEAD_LAYERS


def test_a_host_that_gets_slow_stops_waiting() -> None:
    layer_s = 0.05
    hands, clock, pipeline = granted(layer_s)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS + 1)
    clock.compute(HEAD_LAYERS + 1)
    launch(pipeline, clock, HEAD_LAYERS + 1, HEAD_LAYERS + 2)
    assert not hands.offers
    sleep(layer_s * NUM_LAYERS)
    launch(pipeline, clock, HEAD_LAYERS + 2, HEAD_LAYERS + 3)
    assert len(hands.offers) == HEAD_LAYERS + 1
    launch(pipeline, clock, HEAD_LAYERS + 3, NUM_LAYERS)
    pipeline.after_forward()
    assert hands.layers_offered == [(layer, layer + 1) for layer in range(NUM_LAYERS)]


def test_a_transfer_that_takes_as_long_as_compute_is_not_kept_waiting() -> None:
    hands, clock, pipeline = granted(10.0)
    num_bytes = NUM_LAYERS * NUM_TOKENS * 8 * 2 * 4
    hands.pace.sent(1, [CopyRecord(0, 0, num_bytes, 0.0, 10.0 * NUM_LAYERS)], {0: 0.0})
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, HEAD_LAYERS)
    clock.compute(HEAD_LAYERS)
    launch(pipeline, clock, HEAD_LAYERS, HEAD_LAYERS + 1)
    assert len(hands.offers) == HEAD_LAYERS


def test_what_is_due_is_worked_out_when_it_is_asked_for() -> None:
    hands, clock, pipeline = granted(10.0)
    pipeline.before_forward(BATCH)
    launch(pipeline, clock, 0, NUM_LAYERS)
    pipeline.after_forward()
    pipeline.groups()
    dues = [due for chunk in range(NUM_LAYERS) for due in hands.outgoing.dues[chunk]()]
    assert [due.num_bytes for due in dues] == [NUM_TOKENS * 8 * 2 * 4] * NUM_LAYERS
    assert [due.ready_s for due in dues[:-1]] == [
        pytest.approx((layer + 0.5) * LAYER_S) for layer in range(NUM_LAYERS - 1)
    ]
