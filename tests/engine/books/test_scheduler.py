"""The scheduler's rules, one by one."""

from __future__ import annotations

import pytest
from tests.engine.books.memory import Memory

from baton.engine.books import Asked, Role, Scheduler, SchedulerConfig, Sequence, State
from baton.engine.commands import Batch
from baton.engine.sampling.params import SamplingParams
from baton.errors import ConfigError, EngineError

PAGE = 4
FULL = {"tokens": 32}


def make(
    number: int, num_prompt: int, role: Role = Role.LOCAL, *, max_tokens: int = 8, n: int = 1
) -> Sequence:
    """Prompts of other numbers have nothing in common."""
    params = SamplingParams(max_tokens=max_tokens, n=n)
    prompt = tuple(range(100 * number, 100 * number + num_prompt))
    return Sequence(Asked(number, prompt, params, role=role, arrival_s=float(number)))


def books(
    config: SchedulerConfig | None = None, *, layout: str = "tp1", cache: str = "full", **pages: int
) -> Scheduler:
    config = config or SchedulerConfig(chunk_tokens=8, batch_tokens_max=16, sequences_max=8)
    shares = Memory(layout, cache, PAGE).shares
    return Scheduler(config, shares, pages or FULL)


def step(scheduler: Scheduler, token: int = 1, limit: int | None = None) -> Batch | None:
    """Schedules and completes one batch; every sample is `token`."""
    batch = scheduler.schedule(limit)
    if batch is not None:
        done(scheduler, batch, token)
    return batch


def done(scheduler: Scheduler, batch: Batch, token: int = 1) -> None:
    samples = {work.sequence: [token] * work.num_samples for work in batch.sequences if work.num_samples}
    scheduler.complete(batch, samples)
    scheduler.check_integrity()


def spans(batch: Batch | None) -> list[tuple[int, int, int, int]]:
    """Sequence, start, stop and samples of each work."""
    works = batch.sequences if batch else []
    return [(work.sequence, work.start, work.start + len(work.tokens), work.num_samples) for work in works]


def num_free(scheduler: Scheduler) -> int:
    counts = scheduler.counts().pages["tokens"]
    return counts.num_free + counts.num_cached


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    scheduler = books()
    for number, length in ((1, 3), (2, 20), (3, 5)):
        scheduler.add(make(number, length))
    assert spans(step(scheduler)) == [(1, 0, 3, 1), (2, 0, 8, 0), (3, 0, 5, 1)]
    assert spans(step(scheduler)) == [(1, 3, 4, 1), (3, 5, 6, 1), (2, 8, 16, 0)]
    assert spans(step(scheduler)) == [(1, 4, 5, 1), (3, 6, 7, 1), (2, 16, 20, 1)]
    assert spans(step(scheduler)) == [(1, 5, 6, 1), (2, 20, 21, 1), (3, 7, 8, 1)]


def test_a_step_is_no_larger_than_asked() -> None:
    scheduler = books(SchedulerConfig(chunk_tokens=8, batch_tokens_max=10, sequences_max=2))
    for number in (1, 2, 3):
        scheduler.add(make(number, 9))
    assert spans(step(scheduler)) == [(1, 0, 8, 0), (2, 0, 2, 0)]
    assert spans(step(scheduler)) == [(1, 8, 9, 1), (2, 2, 10 - 1, 1)]
    assert {one.number for one in scheduler.waiting} == {3}, "two sequences at once"
    scheduler.finish(1)
    assert spans(step(scheduler)) == [(2, 9, 10, 1), (3, 0, 8, 0)]


def test_who_began_is_told_once() -> None:
    scheduler = books()
    scheduler.add(make(1, 20))
    assert scheduler.take_changes().started == []
    step(scheduler)
    assert [one.number for one in scheduler.take_changes().started] == [1]
    step(scheduler)
    assert scheduler.take_changes().started == []


def test_all_first_tokens_are_sampled_where_the_prompt_ends() -> None:
    scheduler = books()
    scheduler.add(make(1, 9, n=3))
    scheduler.add(make(2, 3, Role.SOURCE, n=2))
    assert spans(step(scheduler)) == [(1, 0, 8, 0), (2, 0, 3, 2)]
    assert spans(step(scheduler)) == [(1, 8, 9, 3)]
    assert spans(step(scheduler)) == [(1, 9, 10, 1)]


def test_nothing_is_generated_beyond_what_was_asked() -> None:
    scheduler = books()
    scheduler.add(make(1, 3, max_tokens=2))
    assert [bool(step(scheduler)) for _ in range(3)] == [True, True, False]


def test_the_next_prompt_finds_what_was_computed_and_no_more() -> None:
    scheduler = books()
    first = make(1, 6, max_tokens=4)
    scheduler.add(first)
    for _ in range(4):
        step(scheduler, token=7)
    assert first.generated == [7, 7, 7, 7]
    scheduler.finish(1)
    scheduler.check_integrity()
    # Nine tokens were computed: the tenth was only sampled. Two units of four are whole.
    again = Sequence(Asked(2, (*first.asked.prompt, 7, 7, 7, 7, 5), SamplingParams()))
    scheduler.add(again)
    assert spans(scheduler.schedule()) == [(2, 8, 11, 1)]
    assert again.num_cached == 8


def test_the_last_token_is_computed_though_it_is_cached() -> None:
    scheduler = books()
    scheduler.add(make(1, 8))
    step(scheduler)
    scheduler.finish(1)
    again = Sequence(Asked(2, tuple(range(100, 108)), SamplingParams()))
    scheduler.add(again)
    assert spans(scheduler.schedule()) == [(2, 4, 8, 1)]


def test_forks_share_whole_pages_and_copy_the_last() -> None:
    scheduler = books()
    scheduler.add(make(1, 6, n=3))
    step(scheduler)
    children = scheduler.fork(1, [2, 3], [11, 12])
    scheduler.check_integrity()
    parent = scheduler.sequences[1]
    assert [(one.asked.index, one.generated, one.state) for one in children] == [
        (1, [2], State.RUNNING),
        (2, [3], State.RUNNING),
    ]
    whole, partial = parent.pages["tokens"]
    batch = scheduler.schedule()
    assert batch is not None
    assert [(copy.source, copy.target) for copy in batch.copies] == [
        (partial, child.pages["tokens"][1]) for child in children
    ]
    assert all(child.pages["tokens"][0] == whole for child in children)
    assert len({one.pages["tokens"][1] for one in (parent, *children)}) == 3
    assert spans(batch) == [(1, 6, 7, 1), (11, 6, 7, 1), (12, 6, 7, 1)]
    done(scheduler, batch)
    assert scheduler.schedule().copies == []


def test_a_fork_without_room_computes_its_prompt_again() -> None:
    scheduler = books(tokens=3)
    scheduler.add(make(1, 10, max_tokens=2, n=2))
    step(scheduler)
    step(scheduler)
    (child,) = scheduler.fork(1, [5], [11])
    assert child.state is State.WAITING
    step(scheduler)
    scheduler.finish(1)
    assert spans(step(scheduler)) == [(11, 8, 11, 1)]
    assert child.generated == [5, 1]


def test_state_slots_are_copied_before_the_parent_goes_on() -> None:
    scheduler = books(cache="hybrid", tokens=8, state=2)
    scheduler.add(make(1, 4, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    batch = scheduler.schedule(limit=1)
    assert batch is not None
    assert spans(batch) == [(1, 4, 5, 1)]
    assert [copy.group for copy in batch.copies] == ["state"]
    scheduler.add(make(3, 4))
    done(scheduler, batch)
    step(scheduler)
    assert scheduler.sequences[3].state is State.WAITING, "there are two slots"


def test_a_pending_copy_goes_with_its_child() -> None:
    scheduler = books()
    scheduler.add(make(1, 6, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    scheduler.abort(11)
    scheduler.check_integrity()
    assert scheduler.schedule().copies == []


def test_what_is_copied_outlives_its_parent() -> None:
    scheduler = books()
    scheduler.add(make(1, 6, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    source = scheduler.sequences[1].pages["tokens"][1]
    scheduler.finish(1)
    batch = scheduler.schedule()
    assert [copy.source for copy in batch.copies] == [source]
    assert scheduler.room.pools["tokens"].is_owned(source)
    done(scheduler, batch)
    assert not scheduler.room.pools["tokens"].is_owned(source)


def test_the_youngest_gives_its_pages_to_the_oldest() -> None:
    scheduler = books(tokens=4)
    for number in (1, 2):
        scheduler.add(make(number, 7, max_tokens=7))
    step(scheduler)
    step(scheduler)
    assert num_free(scheduler) == 0
    assert spans(step(scheduler)) == [(1, 8, 9, 1)]
    young = scheduler.sequences[2]
    assert young.state is State.WAITING
    assert [one.number for one in scheduler.take_changes().preempted] == [2]
    while len(scheduler.sequences[1].generated) < 7:
        assert all(work.sequence == 1 for work in step(scheduler).sequences)
    scheduler.finish(1)
    # What it had generated is computed again, and it goes on with one more token.
    assert spans(step(scheduler)) == [(2, 0, 8, 0)]
    assert spans(step(scheduler)) == [(2, 8, 9, 1)]
    while len(young.generated) < 7:
        step(scheduler)
    scheduler.finish(2)
    assert num_free(scheduler) == 4


def test_what_a_hand_over_has_is_not_preempted() -> None:
    scheduler = books(tokens=4)
    scheduler.add(make(1, 7, max_tokens=7))
    step(scheduler)
    young = make(2, 8, Role.TARGET, max_tokens=4)
    assert scheduler.reserve(young) is not None
    scheduler.admit(2, [1])
    step(scheduler)
    assert step(scheduler) is None, "the page that it needs is leased"
    scheduler.release(2)
    assert spans(step(scheduler)) == [(1, 8, 9, 1)]
    assert young.state is State.WAITING
    assert not scheduler.is_idle


def test_equal_prompts_at_once_do_not_keep_both_copies() -> None:
    scheduler = books(tokens=5)
    for number in (1, 2):
        scheduler.add(Sequence(Asked(number, tuple(range(8)), SamplingParams(max_tokens=12))))
    for _ in range(60):
        step(scheduler, token=9)
        for sequence in list(scheduler.sequences.values()):
            if len(sequence.generated) == 12:
                scheduler.finish(sequence.number)
    assert scheduler.is_idle


def test_aborted_in_flight_keeps_its_pages_until_the_batch_is_through() -> None:
    scheduler = books()
    scheduler.add(make(1, 6))
    batch = scheduler.schedule()
    scheduler.abort(1)
    scheduler.abort(1)
    scheduler.check_integrity()
    assert num_free(scheduler) == 30
    done(scheduler, batch)
    assert num_free(scheduler) == 32
    assert scheduler.is_idle
    scheduler.abort(1)
    with pytest.raises(EngineError, match="no sequence 1"):
        scheduler.finish(1)


def test_a_source_holds_its_pages_until_released() -> None:
    scheduler = books()
    source = make(1, 6, Role.SOURCE)
    scheduler.add(source)
    batch = scheduler.schedule()
    (begun,) = scheduler.take_changes().started
    assert len(begun.pages["tokens"]) == 2, "its hand-over is told all pages at the start"
    done(scheduler, batch)
    assert source.state is State.SENT
    assert source.generated == [1]
    assert scheduler.schedule() is None
    scheduler.finish(1)
    assert num_free(scheduler) == 30
    assert scheduler.counts().num_leased == {"tokens": 2}
    scheduler.release(1)
    scheduler.check_integrity()
    assert scheduler.is_idle


@pytest.mark.parametrize("is_released_first", [True, False])
def test_a_source_that_fails_in_flight(is_released_first: bool) -> None:
    scheduler = books()
    scheduler.add(make(1, 20, Role.SOURCE))
    step(scheduler)
    batch = scheduler.schedule()
    calls = (
        [scheduler.release, scheduler.abort] if is_released_first else [scheduler.abort, scheduler.release]
    )
    for call in calls:
        call(1)
        scheduler.check_integrity()
    assert num_free(scheduler) == 27
    done(scheduler, batch)
    assert scheduler.is_idle
    assert num_free(scheduler) == 32


def test_sources_without_a_grant_hold_half_of_the_pool() -> None:
    scheduler = books(tokens=8)
    for number, length in ((1, 8), (2, 12), (3, 4)):
        scheduler.add(make(number, length, Role.SOURCE))
    scheduler.add(make(4, 4))
    assert [span[0] for span in spans(step(scheduler))] == [1, 4], "the third does not take the second's turn"
    step(scheduler)
    assert scheduler.sequences[2].state is State.WAITING
    scheduler.granted(1)
    assert [span[0] for span in spans(step(scheduler))] == [4, 2, 3]


def test_a_prompt_of_more_than_half_goes_alone() -> None:
    scheduler = books(tokens=8)
    scheduler.add(make(1, 24, Role.SOURCE))
    scheduler.add(make(2, 4, Role.SOURCE))
    assert [span[0] for span in spans(step(scheduler))] == [1]
    scheduler.granted(2)
    assert [span[0] for span in spans(step(scheduler))] == [1, 2]


def test_a_reservation_says_what_is_held() -> None:
    scheduler = books(layout="cp2", tokens=8)
    scheduler.add(make(1, 21))
    while not scheduler.sequences[1].generated:
        step(scheduler)
    scheduler.finish(1)
    target = Sequence(Asked(2, (*range(100, 120), 5), SamplingParams(), role=Role.TARGET))
    found = scheduler.reserve(target)
    scheduler.check_integrity()
    assert found.held == {"tokens": 16}, "whole pages on both ranks"
    assert len(found.pages["tokens"]) == 3
    assert target.state is State.RECEIVING
    scheduler.admit(2, [4])
    scheduler.check_integrity()
    assert spans(step(scheduler)) == [(2, 21, 22, 1)]


def test_a_reservation_given_up_keeps_its_pages_until_released() -> None:
    scheduler = books(tokens=4)
    assert scheduler.reserve(make(1, 12, Role.TARGET, max_tokens=2)) is not None
    late = make(2, 8, Role.TARGET)
    assert scheduler.reserve(late) is None
    scheduler.abort(1)
    scheduler.check_integrity()
    assert scheduler.reserve(late) is None
    assert scheduler.counts().num_ended == 1
    scheduler.release(1)
    assert scheduler.reserve(late) is not None


def test_reservations_do_not_starve_an_older_sequence() -> None:
    scheduler = books(tokens=4)
    scheduler.add(make(1, 8, max_tokens=2))
    step(scheduler)
    scheduler.add(make(2, 12, max_tokens=2))
    assert step(scheduler) is not None
    assert scheduler.reserve(make(3, 4, Role.TARGET)) is None, "the older one needs what is free"
    older = Sequence(Asked(4, (1, 2), SamplingParams(max_tokens=2), role=Role.TARGET, arrival_s=0.5))
    assert scheduler.reserve(older) is not None


def test_what_never_fits_is_refused_by_its_limit() -> None:
    scheduler = books(tokens=4)
    assert scheduler.num_tokens_max(5) == 17
    scheduler.add(make(1, 5, max_tokens=12))
    with pytest.raises(ConfigError, match="5 pages of group 'tokens', the pool has 4; at most 17 tokens fit"):
        scheduler.add(make(2, 5, max_tokens=13))
    with pytest.raises(ConfigError, match="at most 17 tokens fit"):
        scheduler.reserve(make(2, 17, Role.TARGET))
    scheduler.add(make(2, 16, Role.SOURCE, max_tokens=99))
    with pytest.raises(ConfigError, match="shorten the prompt"):
        scheduler.add(make(3, 17, Role.SOURCE))
    with pytest.raises(ConfigError, match="no tokens"):
        scheduler.add(make(3, 0))
    short = books(SchedulerConfig(context_tokens_max=10))
    assert short.num_tokens_max(3) == 10
    with pytest.raises(ConfigError, match="11 tokens, the context has 10"):
        short.add(make(1, 3, max_tokens=8))


@pytest.mark.parametrize("layout", ["cp2", "cp3:stripe1", "cp2:split", "cp2:mirror"])
def test_the_longest_that_is_taken_ends(layout: str) -> None:
    scheduler = books(layout=layout, tokens=3)
    most = scheduler.num_tokens_max(6)
    scheduler.add(make(1, 6, max_tokens=most - 6))
    with pytest.raises(ConfigError):
        scheduler.add(make(2, 6, max_tokens=most - 5))
    while len(scheduler.sequences[1].generated) < most - 6:
        assert step(scheduler) is not None


def test_running_sequences_are_dealt_over_batches_in_flight() -> None:
    scheduler = books()
    for number in range(1, 6):
        scheduler.add(make(number, 2))
    step(scheduler)
    limit = scheduler.limit_for(2)
    first, second = scheduler.schedule(limit), scheduler.schedule(limit)
    assert [span[0] for span in spans(first)] == [1, 2, 3]
    assert [span[0] for span in spans(second)] == [4, 5]
    assert scheduler.schedule(limit) is None
    with pytest.raises(AssertionError, match="in the order they were made"):
        scheduler.complete(second, {})
    done(scheduler, first)
    assert [span[0] for span in spans(scheduler.schedule(limit))] == [1, 2, 3]


def test_chunks_of_one_prompt_may_follow_each_other() -> None:
    config = SchedulerConfig(chunk_tokens=4, batch_tokens_max=4, sequences_max=2, chunks_in_flight=2)
    scheduler = books(config)
    scheduler.add(make(1, 9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert spans(first) + spans(second) == [(1, 0, 4, 0), (1, 4, 8, 0)]
    assert scheduler.schedule() is None
    done(scheduler, first)
    assert scheduler.sequences[1].num_computed == 4
    third = scheduler.schedule()
    assert spans(third) == [(1, 8, 9, 1)]
    scheduler.abort(1)
    done(scheduler, second)
    assert not scheduler.is_idle
    done(scheduler, third)
    assert scheduler.is_idle


def test_embeddings_go_with_their_tokens_and_are_not_cached() -> None:
    scheduler = books(tokens=4)
    rows = [bytes([row]) * 8 for row in range(9)]
    asked = Asked(1, (0,) * 9, SamplingParams(max_tokens=3), embeddings=b"".join(rows))
    sequence = Sequence(asked)
    scheduler.add(sequence)
    assert step(scheduler).sequences[0].embeddings == b"".join(rows[:8])
    assert step(scheduler).sequences[0].embeddings == rows[8]
    assert step(scheduler).sequences[0].embeddings is None
    scheduler._preempt(sequence)
    step(scheduler)
    assert spans(step(scheduler)) == [(1, 8, 9, 0)], "a work has rows of one sort"
    assert spans(step(scheduler)) == [(1, 9, 11, 1)]
    scheduler.finish(1)
    assert scheduler.counts().pages["tokens"].num_cached == 0
    with pytest.raises(ConfigError, match="embeddings"):
        scheduler.add(Sequence(Asked(2, (0,) * 9, SamplingParams(), embeddings=b"abc")))


def test_pages_before_the_window_come_back() -> None:
    config = SchedulerConfig(chunk_tokens=4, batch_tokens_max=8, sequences_max=2)
    scheduler = books(config, cache="window", **{"tokens": 16, "tokens.w5": 5})
    scheduler.add(make(1, 30, max_tokens=30))
    most = 0
    while scheduler.sequences[1].num_tokens < 60:
        step(scheduler)
        most = max(most, scheduler.counts().pages["tokens.w5"].num_used)
    assert most <= 4
    assert len(scheduler.sequences[1].pages["tokens.w5"]) == 15
    scheduler.finish(1)
    assert scheduler.counts().pages["tokens.w5"].num_free == 5


def test_a_target_reserves_only_the_last_window() -> None:
    scheduler = books(cache="window", **{"tokens": 16, "tokens.w5": 8})
    found = scheduler.reserve(make(1, 30, Role.TARGET))
    assert found.held == {}
    assert len(found.pages["tokens.w5"]) == len(found.pages["tokens"]) == 8
    assert scheduler.counts().pages["tokens.w5"].num_used == 2
    scheduler.check_integrity()


def test_counts() -> None:
    scheduler = books()
    scheduler.add(make(1, 20))
    scheduler.add(make(2, 2))
    scheduler.add(make(3, 2, Role.SOURCE))
    scheduler.reserve(make(4, 4, Role.TARGET))
    step(scheduler)
    scheduler.add(make(5, 2))
    counts = scheduler.counts()
    assert (counts.num_waiting, counts.num_prefilling, counts.num_running) == (1, 1, 1)
    assert (counts.num_receiving, counts.num_sent, counts.num_ended) == (1, 1, 0)
    assert counts.num_leased == {"tokens": 2}
    assert (counts.pages["tokens"].num_used, counts.pages["tokens"].num_free) == (8, 24)


@pytest.mark.parametrize("name", ["chunk_tokens", "batch_tokens_max", "sequences_max", "chunks_in_flight"])
def test_limits_that_allow_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        SchedulerConfig(**{name: 0})


def test_pools_have_to_match_the_cache() -> None:
    with pytest.raises(ConfigError, match="state, tokens"):
        books(cache="hybrid", tokens=4)
