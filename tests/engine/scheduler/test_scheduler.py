"""The scheduler's rules, one by one."""

from __future__ import annotations

import pytest
from tests.engine.scheduler.memory import Memory

from baton.engine.commands import ScheduledBatch
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequence import Sequence, SequenceRole, SequenceStatus
from baton.errors import ConfigError, EngineError

PAGE = 4
FULL = {"tokens": 32}


def make(
    number: int, num_prompt: int, role: SequenceRole = SequenceRole.LOCAL, *, max_tokens: int = 8, n: int = 1
) -> Sequence:
    """Prompts of other numbers have nothing in common."""
    params = SamplingParams(max_tokens=max_tokens, n=n)
    prompt = tuple(range(100 * number, 100 * number + num_prompt))
    return Sequence(number, prompt, params, role=role, arrival_s=float(number))


def make_scheduler(
    config: SchedulerConfig | None = None, *, layout: str = "tp1", cache: str = "full", **pages: int
) -> Scheduler:
    config = config or SchedulerConfig(chunk_tokens=8, batch_tokens_max=16, sequences_max=8)
    geometry = Memory(layout, cache, PAGE).geometry
    return Scheduler(config, geometry, pages or FULL)


def step(scheduler: Scheduler, token: int = 1, limit: int | None = None) -> ScheduledBatch | None:
    """Schedules and completes one batch; every sample is `token`."""
    batch = scheduler.schedule(limit)
    if batch is not None:
        done(scheduler, batch, token)
    return batch


def done(scheduler: Scheduler, batch: ScheduledBatch, token: int = 1) -> None:
    samples = {work.sequence: [token] * work.num_samples for work in batch.sequences if work.num_samples}
    scheduler.complete(batch, samples)
    scheduler.check_integrity()


def spans(batch: ScheduledBatch | None) -> list[tuple[int, int, int, int]]:
    """Sequence, start, stop and samples of each work."""
    works = batch.sequences if batch else []
    return [(work.sequence, work.start, work.start + len(work.tokens), work.num_samples) for work in works]


def num_free(scheduler: Scheduler) -> int:
    counts = scheduler.kv_cache.pools["tokens"].counts()
    return counts.num_free + counts.num_cached


def test_decoding_goes_first_and_prompts_share_the_rest() -> None:
    scheduler = make_scheduler()
    for number, length in ((1, 3), (2, 20), (3, 5)):
        scheduler.add(make(number, length))
    assert spans(step(scheduler)) == [(1, 0, 3, 1), (2, 0, 8, 0), (3, 0, 5, 1)]
    assert spans(step(scheduler)) == [(1, 3, 4, 1), (3, 5, 6, 1), (2, 8, 16, 0)]
    assert spans(step(scheduler)) == [(1, 4, 5, 1), (3, 6, 7, 1), (2, 16, 20, 1)]
    assert spans(step(scheduler)) == [(1, 5, 6, 1), (2, 20, 21, 1), (3, 7, 8, 1)]


def test_a_step_is_no_larger_than_asked() -> None:
    scheduler = make_scheduler(SchedulerConfig(chunk_tokens=8, batch_tokens_max=10, sequences_max=2))
    for number in (1, 2, 3):
        scheduler.add(make(number, 9))
    assert spans(step(scheduler)) == [(1, 0, 8, 0), (2, 0, 2, 0)]
    assert spans(step(scheduler)) == [(1, 8, 9, 1), (2, 2, 10 - 1, 1)]
    assert {sequence.number for sequence in scheduler.waiting} == {3}, "two sequences at once"
    scheduler.finish(1)
    assert spans(step(scheduler)) == [(2, 9, 10, 1), (3, 0, 8, 0)]


def test_who_began_is_told_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 20))
    assert scheduler.take_changes() == ([], [])
    step(scheduler)
    assert [sequence.number for sequence in scheduler.take_changes()[0]] == [1]
    step(scheduler)
    assert scheduler.take_changes()[0] == []


def test_all_first_tokens_are_sampled_where_the_prompt_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 9, n=3))
    scheduler.add(make(2, 3, SequenceRole.SOURCE, n=2))
    assert spans(step(scheduler)) == [(1, 0, 8, 0), (2, 0, 3, 2)]
    assert spans(step(scheduler)) == [(1, 8, 9, 3)]
    assert spans(step(scheduler)) == [(1, 9, 10, 1)]


def test_nothing_is_generated_beyond_what_was_asked() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 3, max_tokens=2))
    assert [bool(step(scheduler)) for _ in range(3)] == [True, True, False]


def test_the_next_prompt_finds_what_was_computed_and_no_more() -> None:
    scheduler = make_scheduler()
    first = make(1, 6, max_tokens=4)
    scheduler.add(first)
    for _ in range(4):
        step(scheduler, token=7)
    assert first.generated == [7, 7, 7, 7]
    scheduler.finish(1)
    scheduler.check_integrity()
    # Nine tokens were computed: the tenth was only sampled. Two units of four are whole.
    again = Sequence(2, (*first.prompt, 7, 7, 7, 7, 5), SamplingParams())
    scheduler.add(again)
    assert spans(scheduler.schedule()) == [(2, 8, 11, 1)]
    assert again.num_cached == 8


def test_the_last_token_is_computed_though_it_is_cached() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 8))
    step(scheduler)
    scheduler.finish(1)
    again = Sequence(2, tuple(range(100, 108)), SamplingParams())
    scheduler.add(again)
    assert spans(scheduler.schedule()) == [(2, 4, 8, 1)]


def test_forks_share_whole_pages_and_copy_the_last() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 6, n=3))
    step(scheduler)
    children = scheduler.fork(1, [2, 3], [11, 12])
    scheduler.check_integrity()
    parent = scheduler.sequences[1]
    assert [(sequence.index, sequence.generated, sequence.status) for sequence in children] == [
        (1, [2], SequenceStatus.RUNNING),
        (2, [3], SequenceStatus.RUNNING),
    ]
    whole, partial = parent.pages["tokens"]
    batch = scheduler.schedule()
    assert batch is not None
    assert [(copy.source, copy.target) for copy in batch.copies] == [
        (partial, child.pages["tokens"][1]) for child in children
    ]
    assert all(child.pages["tokens"][0] == whole for child in children)
    assert len({sequence.pages["tokens"][1] for sequence in (parent, *children)}) == 3
    assert spans(batch) == [(1, 6, 7, 1), (11, 6, 7, 1), (12, 6, 7, 1)]
    done(scheduler, batch)
    assert scheduler.schedule().copies == []


def test_a_fork_without_room_computes_its_prompt_again() -> None:
    scheduler = make_scheduler(tokens=3)
    scheduler.add(make(1, 10, max_tokens=2, n=2))
    step(scheduler)
    step(scheduler)
    (child,) = scheduler.fork(1, [5], [11])
    assert child.status is SequenceStatus.WAITING
    step(scheduler)
    scheduler.finish(1)
    assert spans(step(scheduler)) == [(11, 8, 11, 1)]
    assert child.generated == [5, 1]


def test_state_slots_are_copied_before_the_parent_goes_on() -> None:
    scheduler = make_scheduler(cache="hybrid", tokens=8, state=2)
    scheduler.add(make(1, 4, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    batch = scheduler.schedule(decodes_max=1)
    assert batch is not None
    assert spans(batch) == [(1, 4, 5, 1)]
    assert [copy.group for copy in batch.copies] == ["state"]
    scheduler.add(make(3, 4))
    done(scheduler, batch)
    step(scheduler)
    assert scheduler.sequences[3].status is SequenceStatus.WAITING, "there are two slots"


def test_a_pending_copy_goes_with_its_child() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 6, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    scheduler.abort(11)
    scheduler.check_integrity()
    assert scheduler.schedule().copies == []


def test_what_is_copied_outlives_its_parent() -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 6, n=2))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    source = scheduler.sequences[1].pages["tokens"][1]
    scheduler.finish(1)
    batch = scheduler.schedule()
    assert [copy.source for copy in batch.copies] == [source]
    assert scheduler.kv_cache.pools["tokens"].num_refs(source)
    done(scheduler, batch)
    assert not scheduler.kv_cache.pools["tokens"].num_refs(source)


def test_the_youngest_gives_its_pages_to_the_oldest() -> None:
    scheduler = make_scheduler(tokens=4)
    for number in (1, 2):
        scheduler.add(make(number, 7, max_tokens=7))
    step(scheduler)
    step(scheduler)
    assert num_free(scheduler) == 0
    assert spans(step(scheduler)) == [(1, 8, 9, 1)]
    young = scheduler.sequences[2]
    assert young.status is SequenceStatus.WAITING
    assert [sequence.number for sequence in scheduler.take_changes()[1]] == [2]
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


def test_what_a_handoff_has_is_not_preempted() -> None:
    config = SchedulerConfig(chunk_tokens=8, batch_tokens_max=16, sequences_max=8, growth_tokens=0)
    scheduler = make_scheduler(config, tokens=4)
    scheduler.add(make(1, 7, max_tokens=7))
    step(scheduler)
    young = make(2, 8, SequenceRole.TARGET, max_tokens=4)
    assert scheduler.reserve(young) is not None
    scheduler.admit(2, 1)
    step(scheduler)
    assert step(scheduler) is None, "the page that it needs is leased"
    scheduler.release(2)
    assert spans(step(scheduler)) == [(1, 8, 9, 1)]
    assert young.status is SequenceStatus.WAITING
    assert not scheduler.is_idle


def test_equal_prompts_at_once_do_not_keep_both_copies() -> None:
    scheduler = make_scheduler(tokens=5)
    for number in (1, 2):
        scheduler.add(Sequence(number, tuple(range(8)), SamplingParams(max_tokens=12)))
    for _ in range(60):
        step(scheduler, token=9)
        for sequence in list(scheduler.sequences.values()):
            if len(sequence.generated) == 12:
                scheduler.finish(sequence.number)
    assert scheduler.is_idle


def test_aborted_in_flight_keeps_its_pages_until_the_batch_is_through() -> None:
    scheduler = make_scheduler()
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
    scheduler = make_scheduler()
    source = make(1, 6, SequenceRole.SOURCE)
    scheduler.add(source)
    batch = scheduler.schedule()
    (begun,) = scheduler.take_changes()[0]
    assert len(begun.pages["tokens"]) == 2, "its hand-over gets all pages at the start"
    done(scheduler, batch)
    assert source.status is SequenceStatus.SENT
    assert source.generated == [1]
    assert scheduler.schedule() is None
    scheduler.finish(1)
    assert num_free(scheduler) == 30
    assert source.is_leased
    scheduler.release(1)
    scheduler.check_integrity()
    assert scheduler.is_idle


@pytest.mark.parametrize("is_released_first", [True, False])
def test_a_source_that_fails_in_flight(is_released_first: bool) -> None:
    scheduler = make_scheduler()
    scheduler.add(make(1, 20, SequenceRole.SOURCE))
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
    scheduler = make_scheduler(tokens=8)
    for number, length in ((1, 8), (2, 12), (3, 4)):
        scheduler.add(make(number, length, SequenceRole.SOURCE))
    scheduler.add(make(4, 4))
    assert [span[0] for span in spans(step(scheduler))] == [1, 4], "the third does not take the second's turn"
    step(scheduler)
    assert scheduler.sequences[2].status is SequenceStatus.WAITING
    scheduler.grant(1)
    assert [span[0] for span in spans(step(scheduler))] == [4, 2, 3]


@pytest.mark.parametrize(("share", "first"), [(0.25, [1]), (0.5, [1, 2]), (0.75, [1, 2, 3])])
def test_the_share_of_sources_without_a_grant_is_a_setting(share: float, first: list[int]) -> None:
    config = SchedulerConfig(chunk_tokens=8, batch_tokens_max=32, sequences_max=8, ungranted_share_max=share)
    scheduler = make_scheduler(config, tokens=8)
    for number in (1, 2, 3):
        scheduler.add(make(number, 8, SequenceRole.SOURCE))
    assert [span[0] for span in spans(step(scheduler))] == first


def test_sources_that_hit_one_prefix_hold_its_pages_once() -> None:
    """Prompts of 4 pages, 3 of them hits: two sources hold 5 distinct pages of 18, so a third may start."""
    config = SchedulerConfig(chunk_tokens=16, batch_tokens_max=64, sequences_max=8)
    scheduler = make_scheduler(config, tokens=18)
    prompt = tuple(range(16))
    scheduler.add(Sequence(1, prompt, SamplingParams(max_tokens=1)))
    step(scheduler)
    for number in (2, 3, 4):
        tail = range(50 * number, 50 * number + 4)
        source = Sequence(number, (*prompt[:12], *tail), SamplingParams(), role=SequenceRole.SOURCE)
        scheduler.add(source)
        assert step(scheduler) is not None, f"sequence {number} waits"


def test_a_prompt_of_more_than_half_waits_for_its_grant() -> None:
    scheduler = make_scheduler(tokens=8)
    scheduler.add(make(1, 24, SequenceRole.SOURCE))
    scheduler.add(make(2, 4, SequenceRole.SOURCE))
    assert step(scheduler) is None
    scheduler.grant(2)
    assert [span[0] for span in spans(step(scheduler))] == [2]
    scheduler.grant(1)
    assert [span[0] for span in spans(step(scheduler))] == [1]


def test_sources_without_a_grant_leave_room_for_one_that_may_be_granted_first() -> None:
    scheduler = make_scheduler(tokens=8)
    scheduler.add(make(1, 8, SequenceRole.SOURCE))
    scheduler.add(make(2, 28, SequenceRole.SOURCE))
    assert step(scheduler) is None, "beside 2 pages there is no room for 7"
    scheduler.grant(2)
    while scheduler.sequences[2].status is not SequenceStatus.SENT:
        assert [span[0] for span in spans(step(scheduler))] == [2]
    scheduler.release(2)
    assert [span[0] for span in spans(step(scheduler))] == [1]


def test_a_source_whose_target_is_full_waits_for_its_grant_and_no_other_without_one_overtakes_it() -> None:
    scheduler = make_scheduler(tokens=16)
    for number in (1, 2, 3):
        scheduler.add(make(number, 4, SequenceRole.SOURCE))
    scheduler.add(make(4, 4))
    scheduler.hold(1)
    scheduler.grant(3)
    assert [span[0] for span in spans(step(scheduler))] == [3, 4]
    assert not scheduler.sequences[1].pages, "a full target pins no page of its source"
    assert not scheduler.sequences[2].pages
    scheduler.grant(1)
    assert [span[0] for span in spans(step(scheduler))] == [4, 1, 2]


def test_a_received_prompt_leaves_room_for_the_answers_under_way() -> None:
    """8 pages of 4 tokens: the first prompt has 2 and may grow by 2, the second has 2 and may grow by 1."""
    scheduler = make_scheduler(tokens=8)
    assert scheduler.reserve(make(1, 8, SequenceRole.TARGET, max_tokens=9)) is not None
    assert scheduler.reserve(make(2, 8, SequenceRole.TARGET, max_tokens=5)) is not None
    third = make(3, 4, SequenceRole.TARGET, max_tokens=5)
    assert scheduler.reserve(third) is None, "2 of the 4 pages left are for the first two to grow, it wants 2"
    assert scheduler.reserve(make(4, 4, SequenceRole.TARGET, max_tokens=1)) is not None


def test_a_prompt_that_is_alone_is_received_however_long_its_answer_may_be() -> None:
    scheduler = make_scheduler(tokens=8)
    assert scheduler.reserve(make(1, 28, SequenceRole.TARGET, max_tokens=5)) is not None


def test_no_prompt_starts_before_an_older_one_that_waits_to_be_received() -> None:
    scheduler = make_scheduler(tokens=16)
    for number in (1, 3):
        scheduler.add(make(number, 4))
    scheduler.add(make(4, 4, SequenceRole.SOURCE))
    scheduler.grant(4)
    batch = scheduler.schedule(oldest_target=(2.0, 2))
    assert batch is not None
    assert [span[0] for span in spans(batch)] == [1, 4], "pages of a grant are held at its target"
    done(scheduler, batch)
    assert [span[0] for span in spans(step(scheduler))] == [1, 3]


def test_a_reservation_says_what_is_held() -> None:
    scheduler = make_scheduler(layout="cp2", tokens=8)
    scheduler.add(make(1, 21))
    while not scheduler.sequences[1].generated:
        step(scheduler)
    scheduler.finish(1)
    target = Sequence(2, (*range(100, 120), 5), SamplingParams(), role=SequenceRole.TARGET)
    reservation = scheduler.reserve(target)
    scheduler.check_integrity()
    assert reservation.held == {"tokens": 16}, "whole pages on both ranks"
    assert len(reservation.pages["tokens"]) == 3
    assert target.status is SequenceStatus.RECEIVING
    scheduler.admit(2, 4)
    scheduler.check_integrity()
    assert spans(step(scheduler)) == [(2, 21, 22, 1)]


def test_a_reservation_given_up_keeps_its_pages_until_released() -> None:
    scheduler = make_scheduler(tokens=4)
    assert scheduler.reserve(make(1, 12, SequenceRole.TARGET, max_tokens=2)) is not None
    late = make(2, 8, SequenceRole.TARGET)
    assert scheduler.reserve(late) is None
    scheduler.abort(1)
    scheduler.check_integrity()
    assert scheduler.reserve(late) is None
    assert scheduler.sequences[1].status is SequenceStatus.ENDED
    scheduler.release(1)
    assert scheduler.reserve(late) is not None


def test_reservations_do_not_starve_an_older_sequence() -> None:
    scheduler = make_scheduler(tokens=4)
    scheduler.add(make(1, 8, max_tokens=2))
    step(scheduler)
    scheduler.add(make(2, 12, max_tokens=2))
    assert step(scheduler) is not None
    assert scheduler.reserve(make(3, 4, SequenceRole.TARGET)) is None, "the older one needs what is free"
    older = Sequence(4, (1, 2), SamplingParams(max_tokens=2), role=SequenceRole.TARGET, arrival_s=0.5)
    assert scheduler.reserve(older) is not None


def test_what_never_fits_is_refused_by_its_limit() -> None:
    scheduler = make_scheduler(tokens=4)
    assert scheduler.num_tokens_max(5) == 17
    scheduler.add(make(1, 5, max_tokens=12))
    with pytest.raises(ConfigError, match="5 pages of group 'tokens', the pool has 4; at most 17 tokens fit"):
        scheduler.add(make(2, 5, max_tokens=13))
    with pytest.raises(ConfigError, match="at most 17 tokens fit"):
        scheduler.reserve(make(2, 17, SequenceRole.TARGET))
    scheduler.add(make(2, 16, SequenceRole.SOURCE, max_tokens=99))
    with pytest.raises(ConfigError, match="shorten the prompt"):
        scheduler.add(make(3, 17, SequenceRole.SOURCE))
    with pytest.raises(ConfigError, match="no tokens"):
        scheduler.add(make(3, 0))
    short = make_scheduler(SchedulerConfig(context_tokens_max=10))
    assert short.num_tokens_max(3) == 10
    with pytest.raises(ConfigError, match="11 tokens, the context has 10"):
        short.add(make(1, 3, max_tokens=8))


@pytest.mark.parametrize("layout", ["cp2", "cp3:stripe1", "cp2:split", "cp2:mirror"])
def test_the_longest_that_is_taken_ends(layout: str) -> None:
    scheduler = make_scheduler(layout=layout, tokens=3)
    most = scheduler.num_tokens_max(6)
    scheduler.add(make(1, 6, max_tokens=most - 6))
    with pytest.raises(ConfigError):
        scheduler.add(make(2, 6, max_tokens=most - 5))
    while len(scheduler.sequences[1].generated) < most - 6:
        assert step(scheduler) is not None


def test_running_sequences_are_dealt_over_batches_in_flight() -> None:
    scheduler = make_scheduler()
    for number in range(1, 6):
        scheduler.add(make(number, 2))
    step(scheduler)
    limit = scheduler.decodes_max(2)
    first, second = scheduler.schedule(limit), scheduler.schedule(limit)
    assert [span[0] for span in spans(first)] == [1, 2, 3]
    assert [span[0] for span in spans(second)] == [4, 5]
    assert scheduler.schedule(limit) is None
    with pytest.raises(AssertionError, match="in the order they were scheduled"):
        scheduler.complete(second, {})
    done(scheduler, first)
    assert [span[0] for span in spans(scheduler.schedule(limit))] == [1, 2, 3]


def test_chunks_of_one_prompt_may_follow_each_other() -> None:
    config = SchedulerConfig(chunk_tokens=4, batch_tokens_max=4, sequences_max=2, chunks_in_flight=2)
    scheduler = make_scheduler(config)
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
    scheduler = make_scheduler(tokens=4)
    rows = [bytes([row]) * 8 for row in range(9)]
    sequence = Sequence(1, (0,) * 9, SamplingParams(max_tokens=3), prompt_embeddings=b"".join(rows))
    scheduler.add(sequence)
    assert step(scheduler).sequences[0].embeddings == b"".join(rows[:8])
    assert step(scheduler).sequences[0].embeddings == rows[8]
    assert step(scheduler).sequences[0].embeddings is None
    scheduler._preempt(sequence)
    step(scheduler)
    assert spans(step(scheduler)) == [(1, 8, 9, 0)], "a work has rows of one sort"
    assert spans(step(scheduler)) == [(1, 9, 11, 1)]
    scheduler.finish(1)
    assert scheduler.kv_cache.pools["tokens"].counts().num_cached == 0
    with pytest.raises(ConfigError, match="embeddings"):
        scheduler.add(Sequence(2, (0,) * 9, SamplingParams(), prompt_embeddings=b"abc"))


def test_pages_before_the_window_come_back() -> None:
    config = SchedulerConfig(chunk_tokens=4, batch_tokens_max=8, sequences_max=2)
    scheduler = make_scheduler(config, cache="window", **{"tokens": 16, "tokens.w5": 5})
    scheduler.add(make(1, 30, max_tokens=30))
    most = 0
    while scheduler.sequences[1].num_tokens < 60:
        step(scheduler)
        most = max(most, scheduler.kv_cache.pools["tokens.w5"].counts().num_used)
    assert most <= 4
    assert len(scheduler.sequences[1].pages["tokens.w5"]) == 15
    scheduler.finish(1)
    assert scheduler.kv_cache.pools["tokens.w5"].counts().num_free == 5


def test_a_target_reserves_only_the_last_window() -> None:
    scheduler = make_scheduler(cache="window", **{"tokens": 16, "tokens.w5": 8})
    reservation = scheduler.reserve(make(1, 30, SequenceRole.TARGET))
    assert reservation.held == {}
    assert len(reservation.pages["tokens.w5"]) == len(reservation.pages["tokens"]) == 8
    assert scheduler.kv_cache.pools["tokens.w5"].counts().num_used == 2
    scheduler.check_integrity()


def test_pools_have_to_match_the_cache() -> None:
    with pytest.raises(ConfigError, match="state, tokens"):
        make_scheduler(cache="hybrid", tokens=4)
