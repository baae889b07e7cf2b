"""What an instance says of how busy it is, held against books that were put into a known state."""

from __future__ import annotations

import pytest

from baton.engine.books import Asked, Role, Scheduler, SchedulerConfig, Sequence
from baton.engine.books.shares import Shares
from baton.engine.instance.load import HALF_S, LOOK_S, Gauge, PageUse, Queue, Rate, num_slots
from baton.engine.sampling_params import SamplingParams
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


def books() -> Scheduler:
    cache = stack((read_config(CONFIG, "a test"),))
    config = SchedulerConfig(chunk_tokens=64, sequences_max=4)
    return Scheduler(config, Shares(parse_layout("tp1"), cache, PAGE), dict.fromkeys(cache.groups, NUM_PAGES))


def sequence(number: int, role: Role, num_tokens: int, salt: str = "") -> Sequence:
    prompt = tuple(range(3, 3 + num_tokens))
    params = SamplingParams(max_tokens=8)
    return Sequence(Asked(number, prompt, params, role=role, arrival_s=float(number), salt=salt))


def pages(*all_books: Scheduler) -> PageUse:
    gauge = Gauge()
    gauge.look(all_books, [], 0, 1.0)
    found = gauge.load.pages
    assert found.free + found.used + found.leased + found.quarantined == found.total
    assert found.total == NUM_PAGES * len(all_books)
    assert found.cached <= found.free
    return found


def test_pages_by_what_they_are_for() -> None:
    found = books()
    assert pages(found) == PageUse(free=NUM_PAGES, total=NUM_PAGES)
    found.add(sequence(1, Role.LOCAL, 2 * PAGE, "local"))
    batch = found.schedule()
    assert batch is not None
    assert pages(found).used == 2
    found.complete(batch, {1: [5]})
    found.finish(1)
    assert pages(found) == PageUse(free=NUM_PAGES, cached=2, total=NUM_PAGES)
    assert found.reserve(sequence(2, Role.TARGET, 3 * PAGE)) is not None
    assert (pages(found).leased, pages(found).quarantined) == (3, 0)
    found.abort(2)
    assert (pages(found).leased, pages(found).quarantined) == (0, 3), "the hand-over may still write them"
    found.release(2)
    assert pages(found) == PageUse(free=NUM_PAGES, cached=2, total=NUM_PAGES)


def test_pages_that_sequences_share_count_once() -> None:
    found = books()
    found.add(sequence(1, Role.LOCAL, 4 * PAGE))
    batch = found.schedule()
    assert batch is not None
    found.complete(batch, {1: [5]})
    for number in (2, 3):
        assert found.reserve(sequence(number, Role.TARGET, 4 * PAGE)) is not None
    assert (pages(found).used, pages(found).leased) == (0, 4), "all four are in a hand-over too"
    found.abort(2)
    assert (pages(found).leased, pages(found).quarantined) == (4, 0), "another hand-over goes on"
    found.abort(3)
    assert (pages(found).leased, pages(found).quarantined) == (0, 4)
    found.release(2)
    found.release(3)
    assert pages(found).used == 4
    assert pages(found, books()).total == 2 * NUM_PAGES


def test_who_runs_and_who_waits() -> None:
    found, gauge = books(), Gauge()
    for number in range(6):
        found.add(sequence(number, Role.LOCAL, PAGE, f"{number}"))
    assert found.schedule() is not None
    gauge.look([found], [30, 40], 8, 1.0)
    assert (gauge.load.num_running, gauge.load.num_waiting) == (4, 4)
    assert gauge.load.num_tokens == 6 * PAGE + 70
    assert num_slots(found) == 0


def test_a_snapshot_is_taken_now_and_then() -> None:
    found, gauge = books(), Gauge()
    gauge.look([found], [], 0, 1.0)
    assert gauge.is_fresh
    gauge.look([found], [], 5, 1.0 + LOOK_S / 2)
    assert not gauge.is_fresh, "somebody has to look again"
    assert gauge.load.num_running == 0
    gauge.look([found], [], 5, 1.0 + LOOK_S)
    assert gauge.is_fresh
    assert gauge.load.num_running == 5


def test_rates_follow_the_latest_work() -> None:
    rate = Rate()
    assert rate.value == 0.0
    rate.add(100, 1.0)
    assert rate.value == pytest.approx(100)
    for _ in range(100):
        rate.add(10 * HALF_S / 10, HALF_S / 10)
    assert rate.value == pytest.approx(10, rel=0.01)
    rate.add(5, 0.0)
    assert rate.value == pytest.approx(10, rel=0.01), "what took no time says nothing"


def test_overlapping_steps_take_their_time_once() -> None:
    gauge = Gauge()
    gauge.stepped(100, 0.0, 1.0)
    gauge.stepped(100, 0.5, 1.5)
    gauge.stepped(0, 1.5, 9.0)
    gauge.decoded(0.25)
    for handoff_s in (0.3, 0.1, 5.0):
        gauge.handed(handoff_s)
    gauge.look([books()], [], 0, 1.0)
    assert gauge.load.prefill_tokens_per_s == pytest.approx(200 / 1.5, rel=0.1)
    assert gauge.load.decode_tokens_per_s == pytest.approx(4)
    assert gauge.load.handoff_s == 0.3


def test_how_long_one_more_would_wait() -> None:
    found, gauge = books(), Gauge()
    gauge.stepped(40, 0.0, 1.0)
    gauge.look([found], [], 0, 1.0)
    assert gauge.load.wait_s == 0.0, "nobody waits"
    for number in range(6):
        found.add(sequence(number, Role.LOCAL, PAGE, f"{number}"))
    batch = found.schedule()
    assert batch is not None
    gauge.look([found], [], 6, 2.0)
    assert gauge.load.wait_s == pytest.approx(2 * PAGE / 40), "two prompts wait to be computed"
    found.complete(batch, {number: [5] for number in range(4)})
    gauge.decoded(0.1)
    gauge.look([found], [], 6, 3.0)
    assert gauge.load.wait_s == pytest.approx(2 * PAGE / 40 + 3 * 7 * 0.1 / 4), "and for answers to end"


@pytest.mark.parametrize(
    ("queue", "num_come", "wanted"),
    [
        (Queue(num_taken=3, num_waiting=0, num_slots=4), 3, 0),
        (Queue(num_taken=3, num_waiting=0, num_slots=4), 7, 0),
        (Queue(num_taken=3, num_waiting=0, num_slots=4), 9, 2),
        (Queue(num_taken=3, num_waiting=2, num_slots=4), 3, 2),
        (Queue(num_taken=3, num_waiting=2, num_slots=4), 5, 4),
    ],
    ids=["idle", "a burst that fits", "a larger one", "some wait", "some wait and more come"],
)
def test_who_is_ahead(queue: Queue, num_come: int, wanted: int) -> None:
    assert queue.num_ahead(num_come) == wanted
