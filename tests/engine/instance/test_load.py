"""What an instance says of how busy it is, held against books that were put into a known state."""

from __future__ import annotations

import pytest

from baton.engine.load import (
    HALF_LIFE_S,
    RETRY_S_MIN,
    SNAPSHOT_S,
    EngineLoad,
    LoadMonitor,
    PageUse,
    QueueSnapshot,
    Rate,
)
from baton.engine.pages import PageGeometry
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequence import Sequence, SequenceRole
from baton.errors import FullError
from baton.plan import parse_layout
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack

PAGE = 4
NUM_PAGES = 24
CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


def make_scheduler() -> Scheduler:
    cache = stack((read_config(CONFIG, "a test"),))
    config = SchedulerConfig(chunk_tokens=64, sequences_max=4)
    return Scheduler(
        config, PageGeometry(parse_layout("tp1"), cache, PAGE), dict.fromkeys(cache.groups, NUM_PAGES)
    )


def sequence(number: int, role: SequenceRole, num_tokens: int, salt: str = "") -> Sequence:
    prompt = tuple(range(3, 3 + num_tokens))
    params = SamplingParams(max_tokens=8)
    return Sequence(number, prompt, params, role=role, arrival_s=float(number), salt=salt)


def pages(*schedulers: Scheduler) -> PageUse:
    monitor = LoadMonitor()
    monitor.update(schedulers, [], 0, 1.0)
    use = monitor.load.pages
    assert use.free + use.used + use.leased + use.quarantined == use.total
    assert use.total == NUM_PAGES * len(schedulers)
    assert use.cached <= use.free
    return use


def test_pages_by_what_they_are_for() -> None:
    scheduler = make_scheduler()
    assert pages(scheduler) == PageUse(free=NUM_PAGES, total=NUM_PAGES)
    scheduler.add(sequence(1, SequenceRole.LOCAL, 2 * PAGE, "local"))
    batch = scheduler.schedule()
    assert batch is not None
    assert pages(scheduler).used == 2
    scheduler.complete(batch, {1: [5]})
    scheduler.finish(1)
    assert pages(scheduler) == PageUse(free=NUM_PAGES, cached=2, total=NUM_PAGES)
    assert scheduler.reserve(sequence(2, SequenceRole.TARGET, 3 * PAGE)) is not None
    assert (pages(scheduler).leased, pages(scheduler).quarantined) == (3, 0)
    scheduler.abort(2)
    assert (pages(scheduler).leased, pages(scheduler).quarantined) == (0, 3), (
        "the hand-over may still write them"
    )
    scheduler.release(2)
    assert pages(scheduler) == PageUse(free=NUM_PAGES, cached=2, total=NUM_PAGES)


def test_pages_that_sequences_share_count_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence(1, SequenceRole.LOCAL, 4 * PAGE))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.complete(batch, {1: [5]})
    for number in (2, 3):
        assert scheduler.reserve(sequence(number, SequenceRole.TARGET, 4 * PAGE)) is not None
    assert (pages(scheduler).used, pages(scheduler).leased) == (0, 4), "all four are in a hand-over too"
    scheduler.abort(2)
    assert (pages(scheduler).leased, pages(scheduler).quarantined) == (4, 0), "another hand-over goes on"
    scheduler.abort(3)
    assert (pages(scheduler).leased, pages(scheduler).quarantined) == (0, 4)
    scheduler.release(2)
    scheduler.release(3)
    assert pages(scheduler).used == 4
    assert pages(scheduler, make_scheduler()).total == 2 * NUM_PAGES


def test_who_runs_and_who_waits() -> None:
    scheduler, monitor = make_scheduler(), LoadMonitor()
    for number in range(6):
        scheduler.add(sequence(number, SequenceRole.LOCAL, PAGE, f"{number}"))
    assert scheduler.schedule() is not None
    monitor.update([scheduler], [30, 40], 8, 1.0)
    assert (monitor.load.num_running, monitor.load.num_waiting) == (4, 4)
    assert monitor.load.num_tokens == 6 * PAGE + 70
    assert scheduler.num_slots == 0


def test_a_snapshot_is_taken_now_and_then() -> None:
    scheduler, monitor = make_scheduler(), LoadMonitor()
    monitor.update([scheduler], [], 0, 1.0)
    assert monitor.is_fresh
    monitor.update([scheduler], [], 5, 1.0 + SNAPSHOT_S / 2)
    assert not monitor.is_fresh, "somebody has to look again"
    assert monitor.load.num_running == 0
    monitor.update([scheduler], [], 5, 1.0 + SNAPSHOT_S)
    assert monitor.is_fresh
    assert monitor.load.num_running == 5


def test_rates_follow_the_latest_work() -> None:
    rate = Rate()
    assert rate.value == 0.0
    rate.add(100, 1.0)
    assert rate.value == pytest.approx(100)
    for _ in range(100):
        rate.add(10 * HALF_LIFE_S / 10, HALF_LIFE_S / 10)
    assert rate.value == pytest.approx(10, rel=0.01)
    rate.add(5, 0.0)
    assert rate.value == pytest.approx(10, rel=0.01), "what took no time says nothing"


def test_overlapping_steps_take_their_time_once() -> None:
    monitor = LoadMonitor()
    monitor.record_step(100, 0.0, 1.0)
    monitor.record_step(100, 0.5, 1.5)
    monitor.record_step(0, 1.5, 9.0)
    monitor.record_decode(0.25)
    for handoff_s in (0.3, 0.1, 5.0):
        monitor.record_handoff(handoff_s)
    monitor.update([make_scheduler()], [], 0, 1.0)
    assert monitor.load.prefill_tokens_per_s == pytest.approx(200 / 1.5, rel=0.1)
    assert monitor.load.decode_tokens_per_s == pytest.approx(4)
    assert monitor.load.handoff_s == 0.3


def test_how_long_one_more_would_wait() -> None:
    scheduler, monitor = make_scheduler(), LoadMonitor()
    monitor.record_step(40, 0.0, 1.0)
    monitor.update([scheduler], [], 0, 1.0)
    assert monitor.load.wait_s == 0.0, "nobody waits"
    for number in range(6):
        scheduler.add(sequence(number, SequenceRole.LOCAL, PAGE, f"{number}"))
    batch = scheduler.schedule()
    assert batch is not None
    monitor.update([scheduler], [], 6, 2.0)
    assert monitor.load.wait_s == pytest.approx(2 * PAGE / 40), "two prompts wait to be computed"
    scheduler.complete(batch, {number: [5] for number in range(4)})
    monitor.record_decode(0.1)
    monitor.update([scheduler], [], 6, 3.0)
    assert monitor.load.wait_s == pytest.approx(2 * PAGE / 40 + 3 * 7 * 0.1 / 4), "and for answers to end"


@pytest.mark.parametrize(
    ("queue", "num_come", "wanted"),
    [
        (QueueSnapshot(num_taken=3, num_waiting=0, num_slots=4), 3, 0),
        (QueueSnapshot(num_taken=3, num_waiting=0, num_slots=4), 7, 0),
        (QueueSnapshot(num_taken=3, num_waiting=0, num_slots=4), 9, 2),
        (QueueSnapshot(num_taken=3, num_waiting=2, num_slots=4), 3, 2),
        (QueueSnapshot(num_taken=3, num_waiting=2, num_slots=4), 5, 4),
    ],
    ids=["idle", "a burst that fits", "a larger one", "some wait", "some wait and more come"],
)
def test_who_is_ahead(queue: QueueSnapshot, num_come: int, wanted: int) -> None:
    assert queue.num_ahead(num_come) == wanted


def test_too_many_waiting_requests_are_refused_with_a_time() -> None:
    monitor = LoadMonitor()
    monitor.queue, monitor.load = (
        QueueSnapshot(num_taken=0, num_waiting=1, num_slots=0),
        EngineLoad(wait_s=7.5),
    )
    monitor.check_admission("one", 0, queue_max=2)
    with pytest.raises(
        FullError, match=r"one is full: 2 requests wait, at most 2 may; ask again in 8 s"
    ) as caught:
        monitor.check_admission("one", 1, queue_max=2)
    assert caught.value.retry_after_s == 7.5
    monitor.queue, monitor.load = QueueSnapshot(num_taken=1, num_waiting=0, num_slots=1), EngineLoad()
    for num_submitted in (1, 2, 3):
        monitor.check_admission("one", num_submitted, queue_max=2)
    with pytest.raises(FullError) as caught:
        monitor.check_admission("one", 4, queue_max=2)
    assert caught.value.retry_after_s == RETRY_S_MIN


def test_without_a_limit_every_request_is_admitted() -> None:
    monitor = LoadMonitor()
    monitor.queue = QueueSnapshot(num_taken=0, num_waiting=1000, num_slots=0)
    monitor.check_admission("one", 5000, queue_max=0)
