"""The engine that prefills: chunks of tokens, groups of layers, in any order, with fences that come later."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from baton.plan.routes import Chunk
from baton.protocol.outcomes import Waiting
from baton.session.handles import Sending
from baton.sim.content import pages_needed, parts
from baton.sim.engines.job import Job
from baton.sim.engines.parts import Engine
from baton.sim.request import Attempt, Prompt
from baton.transport import HostFence
from baton.transport.fences import NOW

if TYPE_CHECKING:
    from baton.sim.incarnation import Incarnation

COMPUTE_S = 0.002
UNGRANTED_SHARE_MAX = 0.5
"""Of a source's pool, what requests without a grant may hold, unless there is just one."""


@dataclass(frozen=True, slots=True)
class Script:
    """How one prompt is computed, the same on every rank but for jitter."""

    chunks: tuple[Chunk, ...]
    compute_s: tuple[float, ...]
    sampler: int
    ends_here: bool
    fenced: tuple[bool, ...] = field(default=())


class SourceEngine(Engine):
    """Prefills and offers."""

    def __init__(self, incarnation: Incarnation, chance: random.Random) -> None:
        super().__init__(incarnation, chance)
        self.at_work: Counter[tuple[int, int]] = Counter()
        """By tag and rank: chunks that the device has not come to the end of."""

    def prompt_of(self, attempt: Attempt) -> Prompt:
        """As the source tokenised it."""
        return attempt.source_prompt

    def dp_of(self, attempt: Attempt) -> int:
        """The group that prefills."""
        return attempt.ends.source_dp

    def arrive(self, attempt: Attempt) -> None:
        """The router sent the prefill leg."""
        self.queue.append(attempt)
        self.try_next()

    def try_next(self) -> None:
        """Begins what waits and has room now."""
        while self.is_alive and self.queue and self._may_begin(self.queue[0]):
            self._begin(self.queue.popleft())

    def _may_begin(self, attempt: Attempt) -> bool:
        if not self.room_for(attempt):
            return False
        spec = self.incarnation.spec
        ungranted = [job for job in self.jobs.values() if self.incarnation.is_ungranted(job)]
        for rank in spec.layout.group(attempt.ends.source_dp):
            for group, count in pages_needed(spec, rank, attempt.source_prompt.num_tokens).items():
                held = sum(len(job.books[rank].tables[group]) for job in ungranted if rank in job.books)
                if ungranted and held + count > UNGRANTED_SHARE_MAX * spec.storage.pages_of(group):
                    return False
        return True

    def _begin(self, attempt: Attempt) -> None:
        if "source" in self.world.facts.aborted.get(attempt.transfer, ()):
            return
        job = self.take_pages(attempt, is_source=True)
        script = self._script(job)
        self.world.note(self.incarnation.name, "prefill", job.transfer, f"{len(script.chunks)} chunks")
        for rank in job.ranks:
            self.later(rank, 0.0003 * self.chance.random(), self._send, job, rank, script)

    def _send(self, job: Job, rank: int, script: Script) -> None:
        job.handles[rank] = self.incarnation.send(rank, job.attempt)
        job.begun_s[rank] = self.world.schedule.now
        due_s = ready_s = 0.0
        for index in range(len(script.chunks)):
            due_s += script.compute_s[index]
            # Ranks are a little apart, but each computes in order.
            ready_s = max(ready_s, due_s + 0.0003 * self.chance.random())
            self.later(rank, ready_s, self._ready, job, rank, (script, index))
        self.later(rank, due_s + 0.0006, self._seal, job, rank, script)

    def _ready(self, job: Job, rank: int, at: tuple[Script, int]) -> None:
        script, index = at
        sending, chunk = self._sending(job, rank), script.chunks[index]
        if job.is_aborted or rank in job.done or not isinstance(sending.state, Waiting):
            return
        layers = self._clipped(rank, chunk)
        if layers is None:
            return
        mine = Chunk(layers, chunk.tokens)
        if script.fenced[index]:
            fence = HostFence()
            self.at_work[job.attempt.tag, rank] += 1
            sending.ready(layers, chunk.tokens, self._pages(job, rank, chunk), fence)
            self.later(rank, COMPUTE_S * self.chance.random(), self._computed, job, rank, (mine, fence))
        else:
            job.books[rank].write(mine, self.incarnation.pools[rank].memory)
            sending.ready(layers, chunk.tokens, self._pages(job, rank, chunk), NOW)

    def _computed(self, job: Job, rank: int, at: tuple[Chunk, HostFence]) -> None:
        """The device has come to the end of a chunk."""
        chunk, fence = at
        job.books[rank].write(chunk, self.incarnation.pools[rank].memory)
        self.at_work[job.attempt.tag, rank] -= 1
        fence.set()
        self.look(rank)

    def _seal(self, job: Job, rank: int, script: Script) -> None:
        sending = self._sending(job, rank)
        if job.is_aborted or not isinstance(sending.state, Waiting):
            job.done.add(rank)
            self.look(rank)
            return
        is_sampler = rank == script.sampler
        if is_sampler and script.ends_here:
            sending.finish(job.attempt.aux)
        else:
            sending.commit(job.attempt.aux if is_sampler else None)
        job.done.add(rank)

    def abort(self, transfer: str, text: str) -> None:
        """The client is gone, or the request is preempted."""
        self.queue = type(self.queue)(found for found in self.queue if found.transfer != transfer)
        job = self.job_of(transfer)
        if job is None or job.is_aborted or not job.handles:
            return
        job.is_aborted = True
        self.world.note(self.incarnation.name, "abort", transfer, text)
        # All ranks give up, or one does and the others hear of it.
        gone = [self.chance.choice(sorted(job.handles))] if self.chance.random() < 0.4 else job.handles
        job.done.update(job.handles)
        for rank in gone:
            self._sending(job, rank).abort(text)

    def heard(self, job: Job, rank: int) -> None:
        """A rank has its outcome: computing more would be in vain."""
        job.done.add(rank)

    def tidy(self, job: Job, rank: int) -> None:
        """Gives back what no copy reads, once the engine and its device are done with it."""
        if rank in job.done and rank in job.pages and not self.at_work[job.attempt.tag, rank]:
            handle = job.handles[rank]
            self.give_back(job, rank, {} if handle.is_released else self._of(handle).reading())

    def _script(self, job: Job) -> Script:
        chance, spec = self.chance, self.incarnation.spec
        num_tokens = job.attempt.source_prompt.num_tokens
        num_layers = max(stop for component in spec.cache.components for _, stop in component.layers)
        # Tokens that only move together go with the chunk that ends them: all have to be there by then.
        is_loose = spec.storage.granule == 1 or chance.random() < 0.5
        unit = 1 if spec.storage.granule == 1 or not is_loose else spec.storage.granule
        token_cuts = cut(num_tokens, chance.choice((1, 1, 2, 3)), chance, unit)
        chunks = []
        for tokens in token_cuts:
            groups = cut(num_layers, chance.choice((1, 2, 2, 3)), chance)
            if chance.random() < 0.3:
                chance.shuffle(groups)
            chunks += [Chunk(layers, tokens) for layers in groups]
        if is_loose and chance.random() < 0.2:
            chance.shuffle(chunks)
        # A prefix that the source had cached is ready at once.
        is_hit = chance.random() < 0.3
        speed = self.world.options.habits.slowness
        times = [
            0.0 if is_hit and chunk.tokens == token_cuts[0] else speed * COMPUTE_S * chance.random()
            for chunk in chunks
        ]
        return Script(
            chunks=tuple(chunks),
            compute_s=tuple(times),
            sampler=chance.choice(job.ranks),
            ends_here=chance.random() < self.world.options.habits.finish_share,
            fenced=tuple(is_loose and chance.random() < 0.5 for _ in chunks),
        )

    def _clipped(self, rank: int, chunk: Chunk) -> tuple[int, int] | None:
        """The chunk's layers that this rank computes, as one range."""
        held = [part.layers for part in parts(self.incarnation.spec, rank, 1)]
        layers = np.unique(np.concatenate(held)) if held else np.zeros(0, dtype=np.int64)
        mine = layers[(layers >= chunk.layers[0]) & (layers < chunk.layers[1])]
        return (int(mine[0]), int(mine[-1]) + 1) if len(mine) else None

    def _pages(self, job: Job, rank: int, chunk: Chunk) -> dict[str, list[int]]:
        """The page table up to the chunk: what lies behind it may not even be allocated yet."""
        found = {}
        for group, ids in job.books[rank].tables.items():
            found[group] = ids.tolist()
        return found

    def _sending(self, job: Job, rank: int) -> Sending:
        return self._of(job.handles[rank])

    def _of(self, handle: object) -> Sending:
        assert isinstance(handle, Sending)
        return handle


def cut(total: int, num_parts: int, chance: random.Random, unit: int = 1) -> list[tuple[int, int]]:
    """So many ranges or fewer that make up [0, total), cut at multiples of a unit."""
    inner = (int(chance.random() * total) // unit * unit for _ in range(num_parts - 1))
    return list(pairwise(sorted({0, total, *inner})))
