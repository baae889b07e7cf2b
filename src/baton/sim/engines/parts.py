"""What both engines do alike: waiting for pages, hearing of outcomes, giving pages back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.protocol.outcomes import Waiting
from baton.sim.content import Copybook, pages_needed
from baton.sim.engines.job import Job
from baton.sim.request import Attempt, Prompt

if TYPE_CHECKING:
    from baton.sim.incarnation import Incarnation


class Engine:
    """The scheduler of one incarnation of an instance, over all its ranks."""

    def __init__(self, incarnation: Incarnation, chance: random.Random) -> None:
        self.incarnation = incarnation
        self.world = incarnation.world
        self.chance = chance
        self.jobs: dict[int, Job] = {}
        """By the tag of the attempt."""
        self.queue: deque[Attempt] = deque()
        self.is_alive = True

    def prompt_of(self, attempt: Attempt) -> Prompt:
        """The prompt as this side knows it."""
        raise NotImplementedError

    def dp_of(self, attempt: Attempt) -> int:
        """The group of this side that takes it."""
        raise NotImplementedError

    def later(self, rank: int, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Does something on a rank of this incarnation after a while."""
        self.incarnation.hosts[rank].process.later(delay_s, act, *args)

    def room_for(self, attempt: Attempt) -> bool:
        """Whether every rank of the group has the pages."""
        num_tokens = self.prompt_of(attempt).num_tokens
        return all(
            self.incarnation.pools[rank].can_take(pages_needed(self.incarnation.spec, rank, num_tokens))
            for rank in self.incarnation.spec.layout.group(self.dp_of(attempt))
        )

    def take_pages(self, attempt: Attempt, is_source: bool) -> Job:
        """A job with pages on every rank."""
        prompt, spec = self.prompt_of(attempt), self.incarnation.spec
        ranks = spec.layout.group(self.dp_of(attempt))
        job = Job(attempt, self.incarnation, is_source, ranks, {})
        origin = self.world.instances[attempt.ends.source].spec
        for rank in ranks:
            wanted = pages_needed(spec, rank, prompt.num_tokens)
            tables = self.incarnation.pools[rank].take(wanted, attempt.tag, self.chance)
            job.books[rank] = Copybook(spec, rank, prompt.num_tokens, prompt.salt, origin, tables)
            job.pages[rank] = {group: set(ids.tolist()) for group, ids in tables.items() if len(ids)}
        self.jobs[attempt.tag] = job
        return job

    def give_back(self, job: Job, rank: int, kept: dict[str, frozenset[int]]) -> None:
        """Frees what of a rank's pages is not kept."""
        pages = job.pages[rank]
        for group in sorted(pages):
            free = sorted(pages[group] - kept.get(group, frozenset()))
            if free:
                self.incarnation.pools[rank].give_back(group, free, job.attempt.tag)
                pages[group].difference_update(free)
            if not pages[group]:
                del pages[group]
        if not pages:
            job.pages.pop(rank)
        self.world.schedule.after(0.0, self.try_next)

    def job_of(self, transfer: str) -> Job | None:
        """The latest job of a transfer."""
        return next((job for job in reversed(self.jobs.values()) if job.transfer == transfer), None)

    def try_next(self) -> None:
        """Begins what waits and has room now."""
        raise NotImplementedError

    def look(self, rank: int) -> None:
        """Something may have changed on a rank; where it has the only handle, it speaks for all."""
        for job in list(self.jobs.values()):
            handle = job.handles.get(rank)
            for one in [found for found, other in job.handles.items() if other is handle]:
                self._look_at(job, one)
            if job.is_over and self.jobs.pop(job.attempt.tag, None) is not None:
                self.world.schedule.after(0.0, self.try_next)

    def _look_at(self, job: Job, rank: int) -> None:
        state = job.handles[rank].state
        if rank not in job.outcomes and not isinstance(state, Waiting):
            job.outcomes[rank] = state
            self.world.changed(job, rank, state)
            self.heard(job, rank)
        self.tidy(job, rank)

    def heard(self, job: Job, rank: int) -> None:
        """A rank has its outcome."""
        raise NotImplementedError

    def tidy(self, job: Job, rank: int) -> None:
        """Gives back what may be given back on a rank."""
        raise NotImplementedError
