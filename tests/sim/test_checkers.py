"""Each checker notices what it watches for, in a world that is otherwise sound."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from baton.protocol.messages import Commit, Opened
from baton.protocol.outcomes import Cause, Failed, Finished, Ready, Stage, Why
from baton.sim.checkers import CHECKERS
from baton.sim.engines import SourceEngine
from baton.sim.runner import make_world, options_of, run_world
from baton.sim.transport import SimTransport
from baton.sim.world import World

PLAIN = {
    "faults": {},
    "withdraw_share": 0.0,
    "finish_share": 0.0,
    "is_packing": False,
    "verified_share": 0.0,
    "held_share": 0.0,
}
LATE = Failed(Cause(Why.DEADLINE, Stage.COPY, "D0", -1, "no progress for 0.6 s"))


def world(**changes) -> World:
    return make_world(4, options_of(4, **{**PLAIN, "family": 28, "num_requests": 1, **changes}))


def checker_of(found: World) -> str:
    violation = run_world(found)
    assert violation is not None
    return violation.checker


def test_the_world_itself_is_sound() -> None:
    assert run_world(world()) is None


def test_a_byte_written_twice(monkeypatch) -> None:
    write = SimTransport.write
    monkeypatch.setattr(SimTransport, "write", lambda *args: write(*args) or write(*args))
    assert checker_of(world()) == "written_once"


def test_a_source_page_that_is_given_back_too_early(monkeypatch) -> None:
    def free_pages(self, job, rank) -> None:
        if rank in job.done and rank in job.pages:
            self.give_back(job, rank, {})

    monkeypatch.setattr(SourceEngine, "free_pages", free_pages)
    found = {checker_of(world(family=family, slowness=0.3)) for family in (28, 37, 46, 55)}
    assert found <= {"source_pages", "bytes_right", "full_ledger"}
    assert "source_pages" in found


def test_a_page_that_is_never_given_back() -> None:
    found = world()

    def keep_one() -> None:
        pool = found.instances["D0"].incarnation.pools[0]
        pool.take({"tokens": 1}, 99, found.rng("test"))

    found.schedule.at(0.001, keep_one)
    assert checker_of(found) == "pages"


def test_a_transfer_that_never_ends(monkeypatch) -> None:
    monkeypatch.setattr(SourceEngine, "_seal", lambda *args: None)
    monkeypatch.setattr("baton.protocol.timings.Deadlines.passed", lambda self, now: "")
    assert checker_of(world()) == "settles"


class Said:
    """A checker that gets made-up outcomes of a job that really ran."""

    def __init__(self, name: str) -> None:
        found = world()
        jobs = {}
        found.listen("on_outcome", lambda job, rank, outcome: jobs.setdefault(job.side, job))
        assert run_world(found) is None
        self.world, self.jobs, self.checker = found, jobs, CHECKERS[name](found)

    def tell(self, side: str, outcome, rank: int = 0) -> None:
        self.checker.on_outcome(self.jobs[side], rank, outcome)

    @property
    def aux(self):
        return self.jobs["source"].attempt.aux


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("ready", "failed"),
        ("finished", "ready"),
        ("ready", "finished"),
        ("failed", "finished"),
        ("aborted", "ready"),
    ],
)
def test_ends_that_disagree(source: str, target: str) -> None:
    said = Said("agreement")
    aborted = Failed(Cause(Why.ABORTED, Stage.COPY))
    words = {"ready": Ready(said.aux), "finished": Finished(said.aux), "failed": LATE, "aborted": aborted}
    said.tell("source", words[source])
    with pytest.raises(Exception, match="the source says"):
        said.tell("target", words[target])


def test_ends_that_may_differ() -> None:
    said = Said("agreement")
    said.tell("source", LATE)
    said.tell("target", Ready(said.aux))


def test_ranks_that_disagree() -> None:
    said = Said("agreement")
    said.tell("target", Ready(said.aux))
    with pytest.raises(Exception, match="ranks of D0"):
        said.tell("target", LATE, rank=1)


def test_another_aux_record() -> None:
    said = Said("agreement")
    with pytest.raises(Exception, match="aux record"):
        said.tell("target", Ready(type(said.aux)(tokens=(1, 2))))


def test_a_failure_that_is_heard_of_late_unless_the_network_is_to_blame() -> None:
    said = Said("prompt_failure")
    said.tell("source", LATE)
    said.world.schedule.now += 5.0
    with pytest.raises(Exception, match="later"):
        said.tell("target", LATE)
    said.world.network.note_loss("P0", "D0")
    said.tell("target", LATE)


def test_a_deadline_in_the_midst_of_progress() -> None:
    said = Said("patience")
    transfer = said.jobs["target"].transfer
    said.checker._moved["D0", transfer] = said.world.schedule.now - 0.1
    with pytest.raises(Exception, match="although it moved"):
        said.tell("target", LATE)
    said.checker._moved["D0", transfer] = said.world.schedule.now - 0.6
    said.tell("target", LATE)


def test_a_failure_where_nothing_goes_wrong() -> None:
    said = Said("clean")
    with pytest.raises(Exception, match="nothing went wrong"):
        said.tell("target", LATE)
    said.world.options = replace(said.world.options, faults={"loss": None})
    said.tell("target", LATE)


def test_an_admission_before_a_rank_has_opened() -> None:
    found = world()
    said = []
    found.listen("on_member_sent", lambda host, message: said.append((host, message)))
    assert run_world(found) is None
    left_out = next(at for at, (_, message) in enumerate(said) if isinstance(message, Opened))
    for words, is_sound in ((said, True), (said[:left_out] + said[left_out + 1 :], False)):
        checker = CHECKERS["all_opened"](found)
        with nullcontext() if is_sound else pytest.raises(Exception, match="ranks have opened"):
            for host, message in words:
                checker.on_member_sent(host, message)


def test_an_admission_with_bytes_missing() -> None:
    said = Said("full_ledger")
    job = said.jobs["target"]
    job.outcomes.clear()
    job.outcomes[0] = Ready(said.aux)
    with pytest.raises(Exception, match="with 0 of"):
        said.tell("target", Ready(said.aux))


def test_a_success_where_prompts_differ() -> None:
    said = Said("same_prompt")
    said.tell("source", Finished(said.aux))
    said.tell("target", Ready(said.aux))
    job = said.jobs["target"]
    job.attempt = replace(job.attempt, odd_rank=("source", 1))
    said.tell("target", LATE)
    with pytest.raises(Exception, match="prompts differ"):
        said.tell("target", Finished(said.aux))
    said.jobs["source"].attempt = job.attempt
    with pytest.raises(Exception, match="prompts differ"):
        said.tell("source", Finished(said.aux))


def test_a_free_page_that_is_written() -> None:
    found = world()

    def write() -> None:
        pool = found.instances["D0"].incarnation.pools[0]
        next(iter(pool.memory.values()))[:] = 1

    found.schedule.at(found.options.faults_s, write)
    assert checker_of(found) == "pages"


def test_a_rank_that_ends_twice() -> None:
    found = world()
    said = []
    found.listen("on_member_sent", lambda host, message: said.append((host, message)))
    assert run_world(found) is None
    checker = CHECKERS["rank_quiet"](found)
    for host, message in said:
        checker.on_member_sent(host, message)
    commits = [(host, message) for host, message in said if isinstance(message, Commit)]
    with pytest.raises(Exception, match="after it had ended"):
        checker.on_member_sent(*commits[0])


def test_an_admission_without_a_commit() -> None:
    found = world()
    events = []
    for event in ("on_sent", "on_received", "on_member_sent"):
        found.listen(event, lambda *args, event=event: events.append((event, args)))
    assert run_world(found) is None
    checker = CHECKERS["all_committed"](found)

    def replay() -> None:
        for event, args in events:
            if not isinstance(args[1], Commit):
                getattr(checker, event)(*args)

    with pytest.raises(Exception, match="without the commits"):
        replay()
