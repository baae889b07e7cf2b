"""The engine that decodes: it reserves pages, waits for the verdict, decodes for a while, and frees."""

from __future__ import annotations

from baton.protocol.outcomes import Failed, Ready
from baton.session.handles import Receiving
from baton.sim.content import prefixes
from baton.sim.engines.job import Job, Wish
from baton.sim.engines.parts import Engine
from baton.sim.pool import JUNK
from baton.sim.request import Attempt, Prompt
from baton.transport import NOW, HostFence

DECODE_S = 0.01
LAST_WORK_S = 0.01


class TargetEngine(Engine):
    """Receives and decodes."""

    def prompt_of(self, attempt: Attempt) -> Prompt:
        """As the target tokenised it."""
        return attempt.target_prompt

    def dp_of(self, attempt: Attempt) -> int:
        """The group that decodes."""
        return attempt.ends.target_dp

    def arrive(self, attempt: Attempt) -> None:
        """The router sent the decode leg."""
        self.queue.append(attempt)
        self.try_next()
        if attempt in self.queue:
            ranks = self.incarnation.spec.layout.group(self.dp_of(attempt))
            self.later(ranks[0], self.world.options.habits.pages_s_max, self._decline, attempt)

    def try_next(self) -> None:
        """Begins what waits and has room now."""
        while self.is_alive and self.queue and self.room_for(self.queue[0]):
            self._begin(self.queue.popleft())

    def _begin(self, attempt: Attempt) -> None:
        if "target" in self.world.facts.aborted.get(attempt.transfer, ()):
            return
        job = self.take_pages(attempt, is_source=False)
        held = self._held(attempt.target_prompt)
        job.wish = self._wish(attempt, held)
        if job.wish.fence is not NOW:
            self._finish_late(job)
        for rank in job.ranks:
            job.books[rank].write_held(held, self.incarnation.pools[rank].memory)
        self.world.note(
            self.incarnation.name, "reserve", job.transfer, f"held {max(held.values(), default=0)}"
        )
        # Each rank names its own pages, or one rank those of all: then it has the only handle.
        calls: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in job.ranks}
        if self.chance.random() < self.world.options.habits.one_call_share:
            calls = {self.chance.choice(job.ranks): job.ranks}
        for rank, named in calls.items():
            self.later(rank, 0.0003 * self.chance.random(), self._receive, job, rank, named)

    def _wish(self, attempt: Attempt, held: dict[str, int]) -> Wish:
        chance, ends, habits = self.chance, attempt.ends, self.world.options.habits
        return Wish(
            held=held,
            source_dp=ends.source_dp if chance.random() < 0.5 else None,
            source=self.incarnation.known_as(ends.source),
            is_verified=chance.random() < habits.verified_share,
            fence=HostFence() if chance.random() < habits.fence_share else NOW,
        )

    def _finish_late(self, job: Job) -> None:
        """The device still works for the pages' last owners, and writes to them once more."""
        fence = job.wish.fence
        assert isinstance(fence, HostFence)
        rank = job.ranks[0]
        self.later(rank, LAST_WORK_S * self.chance.random(), self._finish_last_work, job, fence)

    def _finish_last_work(self, job: Job, fence: HostFence) -> None:
        for rank in job.ranks:
            if rank in job.pages:
                for buffer, index in job.books[rank].sent(job.wish.held):
                    self.incarnation.pools[rank].memory[buffer][index] = JUNK
        fence.set()

    def _receive(self, job: Job, rank: int, named: tuple[int, ...]) -> None:
        tables = {found: job.books[found].tables for found in named}
        handle = self.incarnation.receive(rank, job, tables)
        for one in named:
            job.handles[one] = handle
            job.begun_s[one] = self.world.schedule.now

    def _decline(self, attempt: Attempt) -> None:
        if attempt not in self.queue:
            return
        self.queue.remove(attempt)
        self.world.note(self.incarnation.name, "decline", attempt.transfer)
        self.incarnation.decline(attempt)
        self.world.router.leg_ended(attempt, "out of pages")

    def _held(self, prompt: Prompt) -> dict[str, int]:
        """A prefix that is held whole by every rank, of every group that has tokens; none, part or all."""
        spec = self.incarnation.spec
        groups = sorted({found.group for found in spec.cache.components if found.extent.has_tokens})
        if self.chance.random() >= self.world.options.habits.held_share:
            return {}
        fine = prefixes(spec, prompt.num_tokens)
        num_held = fine[-1] if self.chance.random() < 0.3 else self.chance.choice(fine)
        return dict.fromkeys(groups, num_held) if num_held else {}

    def abort(self, transfer: str, text: str) -> None:
        """The client is gone."""
        for attempt in [found for found in self.queue if found.transfer == transfer]:
            self.queue.remove(attempt)
            self.incarnation.decline(attempt)
        job = self.job_of(transfer)
        if job is None or job.is_aborted or not job.handles or job.outcomes:
            return
        job.is_aborted = True
        self.world.note(self.incarnation.name, "abort", transfer, text)
        handle = job.handles[self.chance.choice(sorted(job.handles))]
        assert isinstance(handle, Receiving)
        handle.abort(text)

    def heard(self, job: Job, rank: int) -> None:
        """A rank has its outcome: the cache may be used, or is not needed."""
        outcome = job.outcomes[rank]
        if not isinstance(outcome, Ready):
            job.done.add(rank)
        if len(job.outcomes) == len(job.ranks) and all(
            isinstance(found, Ready) for found in job.outcomes.values()
        ):
            for one in job.ranks:
                self.later(one, DECODE_S * self.chance.random(), self._decoded, job, one)
        elif isinstance(outcome, Failed):
            self.world.router.leg_ended(job.attempt, str(outcome.cause))

    def _decoded(self, job: Job, rank: int) -> None:
        self.world.checkers.tell("decoded", job, rank)
        job.done.add(rank)
        self.look(rank)

    def tidy(self, job: Job, rank: int) -> None:
        """Gives the pages back once they are this engine's again and it does not need them."""
        if rank in job.done and rank in job.pages and job.handles[rank].is_released:
            self.give_back(job, rank, {})
