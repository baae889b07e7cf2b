"""Engines without a model: they allocate pages, prefill, hand over, decode, and free.

The source prefills in chunks of tokens and groups of layers, in any order, with fences that become ready
later. It may preempt a prompt at any moment: its pages are overwritten as soon as no copy reads them, and the
prompt is computed again later, in other pages and other chunks. The target reserves pages, waits for the
outcome, decodes for a while, and frees. Attempts without room wait in a queue without a limit; their
peers are notified again and again while the engine makes progress.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from baton.plan.ownership import page_spaces
from baton.plan.routes import Chunk
from baton.protocol.ledger import Rectangle
from baton.protocol.outcomes import Failed, Outcome, Ready, Waiting
from baton.session.handles import Digest, Handle, Receiving, Request, Sending, Withdrawal
from baton.sim.content import JUNK, ExpectedCache, components_of, pages_needed, prefixes
from baton.sim.families import TOKENS_MAX
from baton.sim.instance import Incarnation
from baton.sim.router import SimAttempt, SimPrompt, SimRouter
from baton.transport import NOW, HostFence

CALL_S = 0.0003
"""How far apart the ranks of a group make the same call."""
COMPUTE_S = 0.002
DECODE_S = 0.01
LAST_WORK_S = 0.01
PREEMPTED_S_MAX = 0.03
UNGRANTED_SHARE_MAX = 0.5
"""The share of a source's pool that requests without a grant may hold."""


@dataclass(slots=True, eq=False)
class Preemption:
    """A job that lost its pages, or is about to."""

    resume_s: float
    """It is not resumed earlier."""
    withdrawals: dict[int, Withdrawal] = field(default_factory=dict)
    """By rank."""
    quiet: set[int] = field(default_factory=set)
    """Ranks whose withdrawal is over."""
    freed: set[int] = field(default_factory=set)
    """Ranks whose pages are free."""


@dataclass(slots=True, eq=False)
class EngineTransfer:
    """One transfer in one engine, over all ranks of its dp group."""

    attempt: SimAttempt
    incarnation: Incarnation
    is_source: bool
    ranks: tuple[int, ...]
    expected: dict[int, ExpectedCache] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    """By group: tokens of the prompt that the target holds."""
    handles: dict[int, Handle] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    """By rank: when its driver was called first."""
    pages: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """By rank and group: pages that were not given back."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    """Ranks whose engine does not need the pages any more."""
    is_aborted: bool = False
    is_queued: bool = False
    """At the source: the target knows of it, and it has no pages yet."""
    script: PrefillScript | None = None
    """At the source: how it is computed."""
    num_runs: Counter[int] = field(default_factory=Counter)
    """By rank: how often it was withdrawn; what an earlier run had planned is void."""
    preemption: Preemption | None = None
    resuming: set[int] = field(default_factory=set)
    """Ranks that are about to go on."""

    @property
    def transfer(self) -> str:
        return self.attempt.transfer

    @property
    def side(self) -> str:
        return "source" if self.is_source else "target"

    def prompt_at(self, rank: int) -> SimPrompt:
        return self.attempt.prompt_at(self.side, self.ranks.index(rank))

    @property
    def is_over(self) -> bool:
        """Whether every rank has an outcome and all pages are back."""
        return len(self.outcomes) == len(self.ranks) and not self.pages

    def describe(self) -> str:
        states = {rank: type(handle.state).__name__ for rank, handle in sorted(self.handles.items())}
        left = {rank: sum(map(len, pages.values())) for rank, pages in sorted(self.pages.items())}
        return f"{self.side} states {states}, pages {left}"


class SimEngine:
    """The scheduler of one incarnation, over all its ranks."""

    is_source: bool

    def __init__(self, incarnation: Incarnation, router: SimRouter) -> None:
        self.incarnation = incarnation
        self.router = router
        self.context = incarnation.context
        self.rng = self.context.rng(f"engine/{incarnation.name}/{incarnation.epoch}")
        self.jobs: dict[int, EngineTransfer] = {}
        """By the tag of the attempt."""
        self.queue: deque[SimAttempt] = deque()
        self.moves_s: list[float] = []
        """When something was computed or received: the queue moves."""
        self.is_full = False
        """Whether other work has all pages."""
        self._num_renewed = 0
        self._is_renewing = False
        self.is_alive = True

    def prompt_of(self, attempt: SimAttempt) -> SimPrompt:
        return attempt.source_prompt if self.is_source else attempt.target_prompt

    def ranks_of(self, attempt: SimAttempt) -> tuple[int, ...]:
        dp = attempt.ends.source_dp if self.is_source else attempt.ends.target_dp
        return self.incarnation.spec.layout.group(dp)

    def arrive(self, attempt: SimAttempt) -> None:
        """The router sent this side's leg."""
        self.queue.append(attempt)
        self.try_next()
        if attempt in self.queue:
            self.announce(attempt)
            if not self._is_renewing:
                self._is_renewing = True
                self.context.schedule.after(self._renew_s, self._renew)

    @property
    def _renew_s(self) -> float:
        return self.context.options.timings.offer_s / 4

    def _renew(self) -> None:
        """Tells the peers of queued attempts that the queue moves, if it does."""
        self._is_renewing = self.is_alive and bool(self.queue)
        if not self._is_renewing:
            return
        if len(self.moves_s) > self._num_renewed:
            self._num_renewed = len(self.moves_s)
            for attempt in self.queue:
                self.renew(attempt)
        self.context.schedule.after(self._renew_s, self._renew)

    def moved(self) -> None:
        self.moves_s.append(self.context.schedule.now)

    def announce(self, attempt: SimAttempt) -> None:
        """Tells the peer that there is no room yet."""
        raise NotImplementedError

    def renew(self, attempt: SimAttempt) -> None:
        """Tells the peer that an announced attempt is still in the queue."""
        raise NotImplementedError

    def next_attempt(self) -> SimAttempt | None:
        """The queued attempt that can begin now."""
        return self.queue[0] if self.queue and self.can_begin(self.queue[0]) else None

    def try_next(self) -> None:
        """Begins queued attempts for which there is room."""
        while self.is_alive and (attempt := self.next_attempt()) is not None:
            self.queue.remove(attempt)
            side = "source" if self.is_source else "target"
            if side not in self.router.aborted.get(attempt.transfer, ()):
                self.begin(self._make_job(attempt))

    def can_begin(self, attempt: SimAttempt) -> bool:
        """Whether every rank of the group has the pages."""
        num_tokens = self.prompt_of(attempt).num_tokens
        return not self.is_full and all(
            self.incarnation.pools[rank].can_take(pages_needed(self.incarnation.spec, rank, num_tokens))
            for rank in self.ranks_of(attempt)
        )

    def begin(self, job: EngineTransfer) -> None:
        """Begins a job that has its pages."""
        raise NotImplementedError

    def on_outcome(self, job: EngineTransfer, rank: int) -> None:
        """A rank got its outcome."""
        raise NotImplementedError

    def free_pages(self, job: EngineTransfer, rank: int) -> None:
        """Gives back the pages of a rank that nothing needs any more."""
        raise NotImplementedError

    def call_after(self, rank: int, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Schedules a call in the process of a rank."""
        self.incarnation.hosts[rank].process.call_after(delay_s, act, *args)

    def _make_job(self, attempt: SimAttempt) -> EngineTransfer:
        spec = self.incarnation.spec
        job = self.jobs.get(attempt.tag) or EngineTransfer(
            attempt, self.incarnation, self.is_source, self.ranks_of(attempt)
        )
        job.is_queued = False
        origin = self.router.instances[attempt.ends.source].spec
        for rank in job.ranks:
            prompt = job.prompt_at(rank)
            job.expected[rank] = ExpectedCache(spec, rank, prompt.num_tokens, prompt.salt, origin, {})
            self.take_pages(job, rank, self.rng)
        self.jobs[attempt.tag] = job
        return job

    def take_pages(self, job: EngineTransfer, rank: int, rng: random.Random) -> None:
        """Takes pages for what a rank is to have."""
        expected = job.expected[rank]
        wanted = pages_needed(expected.spec, rank, expected.num_tokens)
        tables = self.incarnation.pools[rank].take(wanted, job.attempt.tag, rng)
        job.expected[rank] = replace(expected, tables=tables)
        job.pages[rank] = {group: set(ids.tolist()) for group, ids in tables.items() if len(ids)}

    def give_back(self, job: EngineTransfer, rank: int, kept: Mapping[str, frozenset[int]]) -> None:
        """Frees a rank's pages, except those to keep."""
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
        self.context.schedule.after(0.0, self.try_next)

    def job_of(self, transfer: str) -> EngineTransfer | None:
        """The latest job of a transfer."""
        return next((job for job in reversed(self.jobs.values()) if job.transfer == transfer), None)

    def look(self, rank: int) -> None:
        """Something may have changed on a rank; a rank with the only handle stands for all."""
        for job in list(self.jobs.values()):
            handle = job.handles.get(rank)
            for sharer in [sharer for sharer, other in job.handles.items() if other is handle]:
                self._look_at(job, sharer)
            if job.is_over and self.jobs.pop(job.attempt.tag, None) is not None:
                self.context.schedule.after(0.0, self.try_next)

    def _look_at(self, job: EngineTransfer, rank: int) -> None:
        state = job.handles[rank].state
        if rank not in job.outcomes and not isinstance(state, Waiting):
            job.outcomes[rank] = state
            if self.context.trace.is_on:
                text = str(state.cause) if isinstance(state, Failed) else str(state.aux.tokens)
                node = self.incarnation.hosts[rank].name
                self.context.note(node, type(state).__name__.lower(), job.transfer, text)
            self.context.notify("on_outcome", job, rank, state)
            self.on_outcome(job, rank)
        self.free_pages(job, rank)


@dataclass(frozen=True, slots=True)
class PrefillScript:
    """How one prompt is computed, the same on every rank except for jitter."""

    chunks: tuple[Chunk, ...]
    compute_s: tuple[float, ...]
    sampler: int
    is_finished: bool
    """Whether the answer ends at the source."""
    fenced: tuple[bool, ...]
    landed: Mapping[int, tuple[Rectangle, ...]] = field(default_factory=dict)
    """By rank: what need not be offered again."""


class SourceEngine(SimEngine):
    """Prefills and sends."""

    is_source = True

    def __init__(self, incarnation: Incarnation, router: SimRouter) -> None:
        super().__init__(incarnation, router)
        self.preemption_rng = self.context.rng(f"preemption/{incarnation.name}/{incarnation.epoch}")
        self.computing: Counter[tuple[int, int]] = Counter()
        """By tag and rank: chunks that the device still computes."""

    def announce(self, attempt: SimAttempt) -> None:
        job = EngineTransfer(attempt, self.incarnation, True, self.ranks_of(attempt), is_queued=True)
        self.jobs[attempt.tag] = job
        for rank in job.ranks:
            self.call_after(rank, CALL_S * self.rng.random(), self._announce, job, rank)

    def _announce(self, job: EngineTransfer, rank: int) -> None:
        is_known = self.jobs.get(job.attempt.tag) is job
        if is_known and rank not in job.handles and (job.is_queued or job.is_aborted):
            self._open(job, rank, is_queued=True)

    def renew(self, attempt: SimAttempt) -> None:
        job = self.jobs.get(attempt.tag)
        if job is not None and job.ranks[0] in job.handles:
            self.call_after(job.ranks[0], 0.0, self._sending(job, job.ranks[0]).queued)

    def next_attempt(self) -> SimAttempt | None:
        """The oldest that can begin; only one that is granted overtakes others."""
        is_blocked = False
        for attempt in self.queue:
            is_granted = self._is_granted(attempt)
            if (is_granted or not is_blocked) and self.can_begin(attempt):
                return attempt
            is_blocked = is_blocked or not is_granted
        return None

    def _is_granted(self, attempt: SimAttempt) -> bool:
        return all(self.incarnation.is_granted(rank, attempt.transfer) for rank in self.ranks_of(attempt))

    def _is_target_full(self, attempt: SimAttempt) -> bool:
        job = self.jobs.get(attempt.tag)
        return job is not None and any(self._sending(job, rank).is_target_full for rank in job.handles)

    def look(self, rank: int) -> None:
        super().look(rank)
        self.try_next()  # one that waits may have been granted

    def can_begin(self, attempt: SimAttempt) -> bool:
        if not super().can_begin(attempt):
            return False
        if self._is_granted(attempt):
            return True
        if self._is_target_full(attempt):
            return False
        ungranted = [job for job in self.jobs.values() if self._is_ungranted(job)]
        spec = self.incarnation.spec
        for rank in self.ranks_of(attempt):
            held, room = Counter[str](), Counter[str]()
            spaces = page_spaces(spec, rank)
            for group, count in pages_needed(spec, rank, attempt.source_prompt.num_tokens).items():
                held[spaces[group]] += count
            # One that is granted has to find room beside those that are not.
            for group, count in pages_needed(spec, rank, TOKENS_MAX).items():
                room[spaces[group]] += count
            for job in ungranted:
                for group, ids in job.expected[rank].tables.items() if rank in job.expected else ():
                    held[spaces[group]] += len(ids)
            for space, num_pages in self.incarnation.pools[rank].num_pages.items():
                if held[space] > min(int(UNGRANTED_SHARE_MAX * num_pages), num_pages - room[space]):
                    return False
        return True

    def _is_ungranted(self, job: EngineTransfer) -> bool:
        """Whether it counts; a preempted job does until the pages of all its ranks are free."""
        if job.is_queued or (job.preemption is not None and len(job.preemption.freed) == len(job.ranks)):
            return False
        return any(
            rank not in job.outcomes and not self.incarnation.is_granted(rank, job.transfer)
            for rank in job.ranks
        )

    def begin(self, job: EngineTransfer) -> None:
        script = job.script = self._draw_script(job)
        self.context.note(self.incarnation.name, "prefill", job.transfer, f"{len(script.chunks)} chunks")
        for rank in job.ranks:
            self.call_after(rank, CALL_S * self.rng.random(), self._send, job, rank, script)
        if self.preemption_rng.random() < self.context.options.withdraw_share:
            self._plan_preemption(job, script)

    def _send(self, job: EngineTransfer, rank: int, script: PrefillScript) -> None:
        if rank not in job.handles:
            self._open(job, rank, is_queued=False)
        if not job.num_runs[rank]:  # else it was preempted before this
            self._compute(job, rank, script)

    def _open(self, job: EngineTransfer, rank: int, *, is_queued: bool) -> None:
        prompt, driver = job.prompt_at(rank), self.incarnation.drivers[rank]
        digest, progress_s = Digest(prompt.num_tokens, prompt.digest), job.attempt.progress_s.get("source")
        job.handles[rank] = driver.send(job.transfer, digest, progress_s, is_queued=is_queued)
        job.begun_s[rank] = self.context.schedule.now

    def _compute(self, job: EngineTransfer, rank: int, script: PrefillScript) -> None:
        """Plans the steps of a rank."""
        run = job.num_runs[rank]
        due_s = ready_s = 0.0
        for index in range(len(script.chunks)):
            due_s += script.compute_s[index]
            # Ranks are a little apart, but each computes in order.
            ready_s = max(ready_s, due_s + CALL_S * self.rng.random())
            self.call_after(rank, ready_s, self._ready, job, rank, script, index, run)
        self.call_after(rank, due_s + 2 * CALL_S, self._seal, job, rank, script, run)

    def _ready(self, job: EngineTransfer, rank: int, script: PrefillScript, index: int, run: int) -> None:
        self.moved()
        sending, chunk = self._sending(job, rank), script.chunks[index]
        if job.is_aborted or rank in job.done or not isinstance(sending.state, Waiting):
            return
        if run != job.num_runs[rank]:
            return
        layers = self._layers_of(rank, chunk)
        if layers is None:
            return
        computed = Chunk(layers, chunk.tokens)
        pages = {group: ids.tolist() for group, ids in job.expected[rank].tables.items()}
        fence = HostFence() if script.fenced[index] else NOW
        if isinstance(fence, HostFence):
            self.computing[job.attempt.tag, rank] += 1
            self.call_after(rank, COMPUTE_S * self.rng.random(), self._computed, job, rank, computed, fence)
        else:
            job.expected[rank].write(computed, self.incarnation.pools[rank].memory)
        for part in without(computed, script.landed.get(rank, ())):
            sending.ready(part.layers, part.tokens, pages, fence)

    def _computed(self, job: EngineTransfer, rank: int, chunk: Chunk, fence: HostFence) -> None:
        """The device has computed a chunk."""
        job.expected[rank].write(chunk, self.incarnation.pools[rank].memory)
        self.computing[job.attempt.tag, rank] -= 1
        fence.set()
        self.look(rank)

    def _seal(self, job: EngineTransfer, rank: int, script: PrefillScript, run: int) -> None:
        """A rank has computed everything."""
        if run != job.num_runs[rank]:
            return
        sending = self._sending(job, rank)
        if job.is_aborted or not isinstance(sending.state, Waiting):
            job.done.add(rank)
            self.look(rank)
            return
        is_sampler = rank == script.sampler
        if is_sampler and script.is_finished:
            sending.finish(job.attempt.aux)
        else:
            sending.commit(job.attempt.aux if is_sampler else None)
        job.done.add(rank)

    # Preemption.

    def _plan_preemption(self, job: EngineTransfer, script: PrefillScript) -> None:
        """Preempts once or more, at any moment from before the first chunk to after the last."""
        rng = self.preemption_rng
        if script.is_finished:
            return
        for _ in range(rng.choice((1, 1, 2, 4))):
            moment_s = rng.random() * (sum(script.compute_s) + 4 * COMPUTE_S)
            self.context.schedule.after(moment_s, self.preempt, job)

    def preempt(self, job: EngineTransfer) -> None:
        """Takes the pages of a job away, on every rank as soon as no copy reads them."""
        is_live = self.is_alive and not job.is_aborted and not job.outcomes
        if not is_live or job.preemption is not None or job.resuming or len(job.handles) < len(job.ranks):
            return
        self.context.note(self.incarnation.name, "preempt", job.transfer)
        rng = self.preemption_rng
        job.preemption = Preemption(self.context.schedule.now + PREEMPTED_S_MAX * rng.random())
        for rank in job.ranks:
            self.call_after(rank, CALL_S * rng.random(), self._withdraw, job, rank)

    def _withdraw(self, job: EngineTransfer, rank: int) -> None:
        sending, preemption = self._sending(job, rank), job.preemption
        assert preemption is not None
        job.num_runs[rank] += 1
        if rank not in job.outcomes and not job.is_aborted:
            job.done.discard(rank)
        preemption.withdrawals[rank] = sending.withdraw()
        assert sending.withdraw() is preemption.withdrawals[rank]
        self.context.notify("on_withdraw", job, rank)

    def _end_withdrawal(self, job: EngineTransfer, rank: int, preemption: Preemption) -> None:
        """Lets a rank's pages be overwritten once no copy reads them and the device does not write them."""
        withdrawal = preemption.withdrawals.get(rank)
        if withdrawal is None or rank in preemption.freed or not withdrawal.is_quiet:
            return
        if rank not in preemption.quiet:
            preemption.quiet.add(rank)
            self.context.notify("on_withdrawn", job, rank, withdrawal)
        if self.computing[job.attempt.tag, rank]:
            return
        preemption.freed.add(rank)
        if rank in job.pages:
            self.give_back(job, rank, {})
        if len(preemption.freed) == len(job.ranks):
            schedule = self.context.schedule
            schedule.at(max(schedule.now, preemption.resume_s), self.try_next)

    def try_next(self) -> None:
        """Preempted jobs come first."""
        for job in list(self.jobs.values()):
            preemption = job.preemption
            is_live = self.is_alive and not job.is_aborted and not job.outcomes
            if preemption is None or not is_live or len(preemption.freed) < len(job.ranks):
                continue
            if preemption.resume_s <= self.context.schedule.now and self.can_begin(job.attempt):
                self._resume_job(job, preemption)
        super().try_next()

    def _resume_job(self, job: EngineTransfer, preemption: Preemption) -> None:
        """Computes a job again in other pages; an engine may know what has landed, or offer everything."""
        self.context.note(self.incarnation.name, "resume", job.transfer)
        rng, before = self.preemption_rng, job.script
        assert before is not None
        landed = {
            rank: tuple(Rectangle(chunk.layers, chunk.tokens) for chunk in withdrawal.landed)
            for rank, withdrawal in preemption.withdrawals.items()
        }
        script = job.script = replace(
            self._draw_script(job),
            sampler=before.sampler,
            is_finished=False,
            landed=landed if rng.random() < 0.3 else {},
        )
        job.preemption = None
        for rank in job.ranks:
            self.take_pages(job, rank, rng)
            job.resuming.add(rank)
            self.call_after(rank, CALL_S * rng.random(), self._resume, job, rank, script)

    def _resume(self, job: EngineTransfer, rank: int, script: PrefillScript) -> None:
        job.resuming.discard(rank)
        self._sending(job, rank).resume()
        self._compute(job, rank, script)

    def abort(self, transfer: str, text: str) -> None:
        """The client is gone, or the request is preempted."""
        self.queue = deque(attempt for attempt in self.queue if attempt.transfer != transfer)
        job = self.job_of(transfer)
        if job is None or job.is_aborted:
            return
        if not job.handles:
            if job.is_queued:
                del self.jobs[job.attempt.tag]
            return
        job.is_aborted = True
        self.context.note(self.incarnation.name, "abort", transfer, text)
        # All ranks abort, or one does and the others learn of it.
        aborting = [self.rng.choice(sorted(job.handles))] if self.rng.random() < 0.4 else job.handles
        job.done.update(job.handles)
        for rank in aborting:
            self._sending(job, rank).abort(text)

    def on_outcome(self, job: EngineTransfer, rank: int) -> None:
        """Stops computing, or waiting."""
        job.done.add(rank)
        if job.attempt in self.queue:
            self.queue.remove(job.attempt)

    def free_pages(self, job: EngineTransfer, rank: int) -> None:
        """Gives back what no copy reads, after the engine and its device are done with it."""
        if job.preemption is not None:
            self._end_withdrawal(job, rank, job.preemption)
        if rank in job.done and rank in job.pages and not self.computing[job.attempt.tag, rank]:
            sending = self._sending(job, rank)
            self.give_back(job, rank, {} if sending.is_released else sending.reading())

    def _draw_script(self, job: EngineTransfer) -> PrefillScript:
        rng, spec = self.rng, self.incarnation.spec
        num_tokens = job.attempt.source_prompt.num_tokens
        num_layers = max(stop for component in spec.cache.components for _, stop in component.layers)
        # A granule moves with the chunk that ends it, so all of it has to be computed by then.
        is_loose = spec.storage.granule == 1 or rng.random() < 0.5
        unit = 1 if spec.storage.granule == 1 or not is_loose else spec.storage.granule
        token_ranges = cut(num_tokens, rng.choice((1, 1, 2, 3)), rng, unit)
        chunks = []
        for tokens in token_ranges:
            groups = cut(num_layers, rng.choice((1, 2, 2, 3)), rng)
            if rng.random() < 0.3:
                rng.shuffle(groups)
            chunks += [Chunk(layers, tokens) for layers in groups]
        if is_loose and rng.random() < 0.2:
            rng.shuffle(chunks)
        # A prefix that the source has cached is ready at once.
        is_hit = rng.random() < 0.3
        compute_s = self.context.options.slowness * COMPUTE_S
        times = [
            0.0 if is_hit and chunk.tokens == token_ranges[0] else compute_s * rng.random()
            for chunk in chunks
        ]
        return PrefillScript(
            chunks=tuple(chunks),
            compute_s=tuple(times),
            sampler=rng.choice(job.ranks),
            is_finished=rng.random() < self.context.options.finish_share,
            fenced=tuple(is_loose and rng.random() < 0.5 for _ in chunks),
        )

    def _layers_of(self, rank: int, chunk: Chunk) -> tuple[int, int] | None:
        """The chunk's layers that this rank computes, as one range."""
        held = [part.layers for part in components_of(self.incarnation.spec, rank, 1)]
        layers = np.unique(np.concatenate(held)) if held else np.zeros(0, dtype=np.int64)
        inside = layers[(layers >= chunk.layers[0]) & (layers < chunk.layers[1])]
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else None

    def _sending(self, job: EngineTransfer, rank: int) -> Sending:
        handle = job.handles[rank]
        assert isinstance(handle, Sending)
        return handle


class TargetEngine(SimEngine):
    """Receives and decodes."""

    is_source = False

    def announce(self, attempt: SimAttempt) -> None:
        rank, source = self.ranks_of(attempt)[0], self.incarnation.known_as(attempt.ends.source)
        self.call_after(rank, 0.0, self.incarnation.drivers[rank].queue, attempt.transfer, source)

    renew = announce

    def begin(self, job: EngineTransfer) -> None:
        job.held = self._draw_held(job.attempt.target_prompt)
        request = self._draw_request(job)
        if isinstance(request.fence, HostFence):
            delay_s = LAST_WORK_S * self.rng.random()
            self.call_after(job.ranks[0], delay_s, self._finish_last_work, job, request.fence)
        for rank in job.ranks:
            job.expected[rank].write_held(job.held, self.incarnation.pools[rank].memory)
        num_held = max(job.held.values(), default=0)
        self.context.note(self.incarnation.name, "reserve", job.transfer, f"held {num_held}")
        # Each rank names its own pages, or one rank those of all and gets the only handle.
        calls: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in job.ranks}
        is_odd = job.attempt.odd_rank is not None
        if self.rng.random() < self.context.options.one_call_share and not is_odd:
            calls = {self.rng.choice(job.ranks): job.ranks}
        for rank, named in calls.items():
            self.call_after(rank, CALL_S * self.rng.random(), self._receive, job, rank, named, request)

    def _draw_held(self, prompt: SimPrompt) -> dict[str, int]:
        """A prefix of which every rank holds whole pages, of all groups with tokens: none, part or all."""
        spec = self.incarnation.spec
        if self.rng.random() >= self.context.options.held_share:
            return {}
        lengths = prefixes(spec, prompt.num_tokens)
        num_held = lengths[-1] if self.rng.random() < 0.3 else self.rng.choice(lengths)
        groups = sorted({part.group for part in spec.cache.components if part.extent.has_tokens})
        return dict.fromkeys(groups, num_held) if num_held else {}

    def _draw_request(self, job: EngineTransfer) -> Request:
        rng, ends, options = self.rng, job.attempt.ends, self.context.options
        prompt = job.attempt.target_prompt
        return Request(
            transfer=job.transfer,
            source=self.incarnation.known_as(ends.source),
            digest=Digest(prompt.num_tokens, prompt.digest),
            pages={},
            held=job.held,
            source_dp=ends.source_dp if rng.random() < 0.5 else None,
            is_verified=rng.random() < options.verified_share,
            fence=HostFence() if rng.random() < options.fence_share else NOW,
            progress_s=job.attempt.progress_s.get("target"),
        )

    def _finish_last_work(self, job: EngineTransfer, fence: HostFence) -> None:
        """The device still worked for the pages' last owner, and writes to them once more."""
        for rank in job.ranks:
            if rank in job.pages:
                for buffer, index in job.expected[rank].transferred(job.held):
                    self.incarnation.pools[rank].memory[buffer][index] = JUNK
        fence.set()

    def _receive(self, job: EngineTransfer, rank: int, named: tuple[int, ...], request: Request) -> None:
        tables = {owner: job.expected[owner].tables for owner in named}
        prompt = job.prompt_at(rank)
        request = replace(request, digest=Digest(prompt.num_tokens, prompt.digest), pages=tables)
        handle = self.incarnation.drivers[rank].receive(request)
        for owner in named:
            job.handles[owner] = handle
            job.begun_s[owner] = self.context.schedule.now

    def _remove(self, attempt: SimAttempt) -> None:
        """Takes an attempt out of the queue, and tells its source."""
        self.queue.remove(attempt)
        source = self.incarnation.known_as(attempt.ends.source)
        rank = self.ranks_of(attempt)[0]
        self.incarnation.drivers[rank].decline(attempt.transfer, source, "the client is gone")

    def abort(self, transfer: str, text: str) -> None:
        """The client is gone."""
        for attempt in [attempt for attempt in self.queue if attempt.transfer == transfer]:
            self._remove(attempt)
        job = self.job_of(transfer)
        if job is None or job.is_aborted or not job.handles or job.outcomes:
            return
        job.is_aborted = True
        self.context.note(self.incarnation.name, "abort", transfer, text)
        handle = job.handles[self.rng.choice(sorted(job.handles))]
        assert isinstance(handle, Receiving)
        handle.abort(text)

    def on_outcome(self, job: EngineTransfer, rank: int) -> None:
        """Decodes once every rank is ready."""
        outcome = job.outcomes[rank]
        if isinstance(outcome, Ready):
            self.moved()
        else:
            job.done.add(rank)
        if isinstance(outcome, Failed):
            self.router.leg_ended(job.attempt, str(outcome.cause))
        elif len(job.outcomes) == len(job.ranks) and all(
            isinstance(known, Ready) for known in job.outcomes.values()
        ):
            decode_s = self.context.options.decode_slowness * DECODE_S
            for decoder in job.ranks:
                self.call_after(decoder, decode_s * self.rng.random(), self._decoded, job, decoder)

    def _decoded(self, job: EngineTransfer, rank: int) -> None:
        self.moved()
        self.context.notify("on_decoded", job, rank)
        job.done.add(rank)
        self.look(rank)

    def free_pages(self, job: EngineTransfer, rank: int) -> None:
        """Gives the pages back after the session has released them, if the engine does not need them."""
        if rank in job.done and rank in job.pages and job.handles[rank].is_released:
            self.give_back(job, rank, {})


def without(chunk: Chunk, landed: Iterable[Rectangle]) -> list[Rectangle]:
    """The parts of a chunk that are not among these."""
    parts = [Rectangle(chunk.layers, chunk.tokens)]
    for box in landed:
        parts = [part for whole in parts for part in whole.without(box)]
    return parts


def cut(total: int, num_parts: int, rng: random.Random, unit: int = 1) -> list[tuple[int, int]]:
    """At most `num_parts` ranges that make up [0, total), cut at multiples of a unit."""
    inner = (int(rng.random() * total) // unit * unit for _ in range(num_parts - 1))
    return list(pairwise(sorted({0, total, *inner})))
