"""Invariants that hold in every seed, one small class each.

A method with the name of an event (see `baton.sim.core.Context`) is called when that event happens.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import ClassVar, NoReturn

import numpy as np

from baton.plan.planner import plan
from baton.plan.routes import Chunk, Prompt, resolve
from baton.protocol.ledger import Rectangle
from baton.protocol.messages import (
    Commit,
    Grant,
    Landed,
    Message,
    Offer,
    Open,
    Opened,
    Quiet,
    Settled,
    Unquiet,
)
from baton.protocol.outcomes import Failed, Finished, Outcome, Ready, Waiting, Why
from baton.session.coordinator import CoordinatorDriver
from baton.session.handles import Withdrawal
from baton.session.rank import RankDriver
from baton.sim.content import SimPagePool
from baton.sim.core import Violation, snake_case
from baton.sim.engines import EngineTransfer, without
from baton.sim.instance import Incarnation
from baton.sim.network import Host, MemberEnd, SessionEnd
from baton.sim.transport import SimCopy
from baton.sim.world import CopyWrite, World


class Checker:
    """Watches one promise in one world."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = snake_case(cls.__name__)

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def now(self) -> float:
        return self.world.schedule.now

    def fail(self, text: str) -> NoReturn:
        raise Violation(self.world.seed, self.name, f"at {self.now:.4f} s: {text}")


# The bytes.


class BytesRight(Checker):
    """A cache that is ready has the right bytes on every rank, and keeps them while it is used."""

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        # Ready on one rank means ready on all.
        if not job.is_source and isinstance(outcome, Ready) and len(job.outcomes) == 1:
            for member in job.ranks:
                self._compare(job, member, f"when rank {rank} was told ready")

    def on_decoded(self, job: EngineTransfer, rank: int) -> None:
        self._compare(job, rank, "after decoding")

    def _compare(self, job: EngineTransfer, rank: int, when: str) -> None:
        num_wrong = job.expected[rank].num_wrong(job.incarnation.pools[rank].memory)
        if num_wrong:
            self.fail(f"{job.transfer}: {num_wrong} bytes of {job.incarnation.name}/{rank} are wrong {when}")


class FullLedger(Checker):
    """No transfer is ready before every byte that the plan names was copied."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._num_bytes: Counter[int] = Counter()
        """By attempt; copies out of staging cannot be told apart, so sources that pack are left out."""
        self._packers: set[str] = set()
        self._buffers: dict[SimCopy, str] = {}
        """Copies under way: the buffer that each reads."""
        self._done: dict[tuple[int, str], list[tuple[str, SimCopy]]] = {}
        """By attempt and source node, since the last withdrawal."""

    def on_submit(self, copy: SimCopy, pool: SimPagePool, buffer: str) -> None:
        self._buffers[copy] = buffer
        if not buffer:
            self._packers.add(copy.sender.node.partition("/")[0])

    def on_copy_end(self, copy: SimCopy, how: str) -> None:
        buffer = self._buffers.pop(copy, "")
        if how == "Done":
            self._num_bytes[copy.mark] += len(copy.written)
            self._done.setdefault((copy.mark, copy.sender.node), []).append((buffer, copy))

    def on_withdrawn(self, job: EngineTransfer, rank: int, withdrawal: Withdrawal) -> None:
        """Copies of chunks that did not land in whole do not count."""
        landed = job.expected[rank].carried(withdrawal.landed)
        for buffer, copy in self._done.pop((job.attempt.tag, job.incarnation.hosts[rank].name), ()):
            if buffer:
                is_dropped = ~np.isin(copy.read, landed.get(buffer, ()))
                self._num_bytes[copy.mark] -= int(np.count_nonzero(is_dropped))

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if job.is_source or not isinstance(outcome, Ready) or len(job.outcomes) > 1:
            return
        ends = job.attempt.ends
        if ends.source in self._packers:
            return
        source = self.world.instances[ends.source].spec
        planned = plan(source, job.incarnation.spec, ends.source_dp, ends.target_dp)
        routes = resolve(planned, Prompt(job.attempt.target_prompt.num_tokens, job.held))
        due, done = sum(route.num_bytes for route in routes), self._num_bytes[job.attempt.tag]
        if due != done:
            self.fail(f"{job.transfer}: ready on rank {rank} with {done} of {due} bytes copied")


class WrittenOnce(Checker):
    """No byte of a transfer is written twice, and without staging each is written once.

    What was written for a chunk that the source dropped when it withdrew does not count.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._staged: set[str] = set()
        """Nodes that unpack: those writes are not seen."""
        self._writes: dict[tuple[int, str], list[CopyWrite]] = {}
        """By attempt and source node, since the last withdrawal."""

    def on_write(self, write: CopyWrite) -> None:
        if not write.buffer:
            assert write.copy.receiver is not None
            self._staged.add(write.copy.receiver[0].node)
        else:
            self._writes.setdefault((write.copy.mark, write.copy.sender.node), []).append(write)

    def on_withdrawn(self, job: EngineTransfer, rank: int, withdrawal: Withdrawal) -> None:
        landed = job.expected[rank].carried(withdrawal.landed)
        for write in self._writes.pop((job.attempt.tag, job.incarnation.hosts[rank].name), ()):
            is_dropped = ~np.isin(write.read, landed.get(write.source_buffer, ()))
            np.subtract.at(write.pool.num_writes[write.buffer], write.index[is_dropped], 1)

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if job.is_source or not isinstance(outcome, Ready) or len(job.outcomes) > 1:
            return
        for member in job.ranks:
            pool, node = job.incarnation.pools[member], job.incarnation.hosts[member].name
            for buffer, index in job.expected[member].transferred(job.held):
                counts = pool.num_writes[buffer][index]
                if counts.max(initial=0) > 1:
                    text = f"a byte of {buffer} on {node} was written {counts.max()} times"
                    self.fail(f"{job.transfer}: {text}")
                if node not in self._staged and counts.min(initial=1) < 1:
                    self.fail(f"{job.transfer}: a byte of {buffer} on {node} was never written")


# The pages.


class NoLateWrite(Checker):
    """A copy writes only to pages that its own transfer owns at that moment."""

    def on_write(self, write: CopyWrite) -> None:
        if not write.buffer:
            return
        owners = write.pool.owners_of(write.buffer, write.index)
        mark = write.copy.mark
        if (owners <= 0).any() or (mark > 0 and (owners != mark).any()):
            node = write.copy.receiver[0].node if write.copy.receiver else "?"
            self.fail(
                f"a copy of attempt {mark} writes {write.buffer} on {node}, where pages belong to "
                f"{sorted(set(owners.tolist()))} (0: nobody, -1: other work, -2: no page)"
            )


class SourcePages(Checker):
    """A page of a source is not reused while a copy that has not ended reads it."""

    def on_submit(self, copy: SimCopy, pool: SimPagePool, buffer: str) -> None:
        owners = set(map(int, pool.owners_of(buffer, copy.read))) if buffer else set()
        if any(owner != copy.mark or owner <= 0 for owner in owners):
            self.fail(f"a copy on {copy.sender.node} is to read pages of {sorted(owners)}")

    def on_write(self, write: CopyWrite) -> None:
        # Nobody believes a copy that has failed, so it may read anything.
        if write.copy.is_ended or not write.source_buffer:
            return
        owners = write.source.owners_of(write.source_buffer, write.read)
        if (owners != write.copy.mark).any():
            self.fail(
                f"a copy of attempt {write.copy.mark} reads {write.source_buffer} on "
                f"{write.copy.sender.node}, where pages belong to {sorted(set(owners.tolist()))}"
            )


class Withdrawals(Checker):
    """After a withdrawal is quiet, no copy from before it moves; what has landed is what was reported.

    A copy that its transport could not vouch for may still move, but then the transfer fails.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._copies: dict[tuple[int, str], list[SimCopy]] = {}
        """By attempt and source node, since the last withdrawal."""
        self._withdrawn: set[SimCopy] = set()
        self._doubtful: set[int] = set()
        """Attempts under which a withdrawn copy wrote after all."""
        self._ready: set[int] = set()
        self._reported: dict[tuple[str, str, str], list[Rectangle]] = {}
        """By incarnation, node and transfer: chunks that were said to have landed."""

    def on_submit(self, copy: SimCopy, pool: SimPagePool, buffer: str) -> None:
        if buffer:
            self._copies.setdefault((copy.mark, copy.sender.node), []).append(copy)

    def on_member_sent(self, host: Host, message: Message) -> None:
        if isinstance(message, Offer | Landed):
            key = (host.process.incarnation, host.name, message.transfer)
            reported = self._reported.setdefault(key, [])
            if isinstance(message, Landed):
                reported.append(Rectangle(message.layers, message.tokens))
            else:
                reported.clear()

    def on_withdrawn(self, job: EngineTransfer, rank: int, withdrawal: Withdrawal) -> None:
        host, tag = job.incarnation.hosts[rank], job.attempt.tag
        copies = self._copies.pop((tag, host.name), [])
        if moving := [copy for copy in copies if not copy.is_ended]:
            self.fail(f"{job.transfer}: {host.name} says quiet with {len(moving)} copies under way")
        self._withdrawn.update(copies)
        if not isinstance(job.handles[rank].state, Waiting):
            return
        reported = self._reported.get((host.process.incarnation, host.name, job.transfer), [])
        landed = [Rectangle(chunk.layers, chunk.tokens) for chunk in withdrawal.landed]
        for boxes, others, text in (
            (landed, reported, "were not reported"),
            (reported, landed, "landed, but not by its withdrawal"),
        ):
            if parts := [part for box in boxes for part in without(Chunk(box.layers, box.tokens), others)]:
                self.fail(f"{job.transfer}: of {host.name}, {parts} {text}")

    def on_write(self, write: CopyWrite) -> None:
        if write.copy in self._withdrawn:
            self._doubtful.add(write.copy.mark)
            self._compare(write.copy.mark)

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if isinstance(outcome, Ready):
            self._ready.add(job.attempt.tag)
            self._compare(job.attempt.tag)

    def _compare(self, tag: int) -> None:
        if tag in self._ready & self._doubtful:
            transfer = self.world.router.attempts[tag - 1].transfer
            self.fail(f"{transfer}: ready, although a withdrawn copy wrote after it had said quiet")


class Pages(Checker):
    """When everything is settled every page is free, and nothing was written to it since it was freed.

    The pools themselves check that no page has two owners.
    """

    def on_settled(self) -> None:
        for name, instance in sorted(self.world.instances.items()):
            incarnation = instance.incarnation
            for rank, pool in sorted(incarnation.pools.items()) if incarnation else ():
                if owners := pool.owners():
                    self.fail(f"{name}/{rank} has lost pages of attempts {owners}")
                if num_bytes := pool.num_dirty_bytes():
                    self.fail(f"{num_bytes} bytes of free pages of {name}/{rank} were written")


class FinalQuiet(Checker):
    """After a source sent Quiet for a grant, nothing is written under it and no rank is given it.

    Also, no rank is given a grant of another channel than the one by which it arrived.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._foreign: set[tuple[str, bytes]] = set()
        """By incarnation of the source, grants that arrived by another channel."""
        self._quiet: set[tuple[str, bytes]] = set()
        self._given: dict[tuple[str, str], bytes] = {}
        """By incarnation of the source and transfer: the grant that ranks were given."""

    def on_received(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Grant) and message.channel != end.link.handshake.channel:
            self._foreign.add((end.host.process.incarnation, message.grant))

    def on_sent(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Quiet):
            self._quiet.add((end.host.process.incarnation, message.grant))

    def on_member_sent(self, host: Host, message: Message) -> None:
        if not isinstance(message, Grant):
            return
        key = (host.process.incarnation, message.grant)
        if key in self._foreign:
            self.fail(f"{message.transfer}: {host.name} passes on a grant of another channel")
        if key in self._quiet:
            self.fail(f"{message.transfer}: {host.name} passes on a grant of which it had said quiet")
        self._given[key[0], message.transfer] = message.grant

    def on_write(self, write: CopyWrite) -> None:
        if write.copy.mark <= 0:
            return
        incarnation = write.copy.sender.instance
        transfer = self.world.router.attempts[write.copy.mark - 1].transfer
        grant = self._given.get((incarnation, transfer))
        if grant is not None and (incarnation, grant) in self._quiet:
            self.fail(f"{transfer}: {write.copy.sender.node} writes after quiet was said")


# The outcomes.


class Agreement(Checker):
    """Both ends of a transfer, and all ranks of an end, get outcomes that agree."""

    EXCUSES = frozenset({Why.PEER_LOST, Why.DEADLINE})
    """Why a source may fail a transfer that its target has: the outcome never reached it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._known: dict[int, dict[str, Outcome]] = {}

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        known = self._known.setdefault(job.attempt.tag, {})
        before = known.setdefault(job.side, outcome)
        if type(before) is not type(outcome):
            texts = f"{_text(before)} and {_text(outcome)}"
            self.fail(f"{job.transfer}: ranks of {job.incarnation.name} were told {texts}")
        if not isinstance(outcome, Failed) and outcome.aux != job.attempt.aux:
            self.fail(f"{job.transfer}: {job.incarnation.name}/{rank} got the aux record {outcome.aux}")
        if len(known) == 2:
            self._compare(job.transfer, known["source"], known["target"])

    def _compare(self, transfer: str, source: Outcome, target: Outcome) -> None:
        match source, target:
            case (Ready(), Ready()) | (Finished(), Finished() | Failed()) | (Failed(), Failed()):
                return
            case Failed(cause), Ready() if cause.why in self.EXCUSES:
                return
        self.fail(f"{transfer}: the source says {_text(source)}, the target {_text(target)}")


def _text(outcome: Outcome) -> str:
    return str(outcome.cause) if isinstance(outcome, Failed) else type(outcome).__name__.lower()


class SamePrompt(Checker):
    """A transfer succeeds only if all ranks of both sides have the same prompt.

    An answer that ended at the source is the source's own, even if its target has another prompt.
    """

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            return
        attempt = job.attempt
        odd_side = attempt.odd_rank[0] if attempt.odd_rank else ""
        differs = bool(odd_side) or attempt.source_prompt.digest != attempt.target_prompt.digest
        if isinstance(outcome, Finished) and job.is_source:
            differs = odd_side == "source"
        if differs:
            node = f"{job.incarnation.name}/{rank}"
            self.fail(f"{job.transfer}: {node} was told {_text(outcome)}, although the prompts differ")


class AllCommitted(Checker):
    """No transfer is ready before the target has the commit of every source rank."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._committed: dict[bytes, set[int]] = {}
        """Source ranks by grant."""
        self._sources: dict[bytes, set[int]] = {}

    def on_sent(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Grant):
            layout = self.world.instances[end.names[1]].spec.layout
            self._sources[message.grant] = set(layout.group(message.source_dp))

    def on_received(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Commit):
            self._committed.setdefault(message.grant, set()).add(message.source_rank)

    def on_member_sent(self, host: Host, message: Message) -> None:
        if not isinstance(message, Settled) or not isinstance(message.outcome, Ready):
            return
        missing = self._sources.get(message.grant, set()) - self._committed.get(message.grant, set())
        if missing:
            text = f"{host.name} says that it is ready without the commits of ranks {sorted(missing)}"
            self.fail(f"{message.transfer}: {text}")


class RankQuiet(Checker):
    """A source rank sends Commit, Quiet or Unquiet once, the first two after its copies have ended."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._moving: Counter[tuple[str, str, str]] = Counter()
        """By incarnation, node and transfer: copies that have not ended."""
        self._ended: set[tuple[str, str, str]] = set()

    def on_submit(self, copy: SimCopy, pool: SimPagePool, buffer: str) -> None:
        if buffer and copy.mark > 0:
            self._moving[self._key(copy)] += 1

    def on_copy_end(self, copy: SimCopy, how: str) -> None:
        if copy.mark > 0:
            self._moving[self._key(copy)] -= 1

    def _key(self, copy: SimCopy) -> tuple[str, str, str]:
        transfer = self.world.router.attempts[copy.mark - 1].transfer
        return copy.sender.instance, copy.sender.node, transfer

    def on_member_sent(self, host: Host, message: Message) -> None:
        if not isinstance(message, Offer | Commit | Quiet | Unquiet):
            return
        key = (host.process.incarnation, host.name, message.transfer)
        text = f"{message.transfer}: {host.name} says {type(message).__name__}"
        if isinstance(message, Offer):
            self._ended.discard(key)
            return
        if key in self._ended:
            self.fail(f"{text} after it had ended")
        self._ended.add(key)
        if self._moving[key] and not isinstance(message, Unquiet):
            self.fail(f"{text} with {self._moving[key]} copies under way")


class AllOpened(Checker):
    """No transfer is ready before every target rank has opened its grant."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.num_ahead = 0
        """Grants that were sent to the source before any rank had opened."""
        self._asked: Counter[bytes] = Counter()
        self._opened: Counter[bytes] = Counter()

    def on_sent(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Grant) and not self._opened[message.grant]:
            self.num_ahead += 1

    def on_member_sent(self, host: Host, message: Message) -> None:
        match message:
            case Open(grant=grant):
                self._asked[grant.grant] += 1
            case Opened(grant=grant_id, cause=None):
                self._opened[grant_id] += 1
            case Settled(grant=grant_id, outcome=Ready()) if self._opened[grant_id] < self._asked[grant_id]:
                text = f"{self._opened[grant_id]} of {self._asked[grant_id]} ranks have opened"
                self.fail(f"{message.transfer}: {host.name} says that it is ready, but {text}")


class Clean(Checker):
    """Every transfer succeeds in a seed without faults, or with faults that a transfer must survive."""

    HARMLESS = frozenset({"delay", "duplication", "pressure", "retries", "skew"})

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        is_expected = self.world.is_scripted or not self.HARMLESS.issuperset(self.world.options.faults)
        if isinstance(outcome, Failed) and not is_expected:
            node = f"{job.incarnation.name}/{rank}"
            self.fail(f"{job.transfer} failed on {node}, where nothing went wrong: {outcome.cause}")


# The times.


class Patience(Checker):
    """No transfer fails for lack of progress while it makes progress."""

    SLACK = 0.85
    """Clocks run up to a twentieth fast, and messages inside an instance take time."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._moved: dict[tuple[str, str], float] = {}
        """By instance and transfer: when it last sent or received progress."""

    def on_sent(self, end: SessionEnd, message: Message) -> None:
        if isinstance(message, Landed | Commit):
            self._moved[end.host.process.instance, message.transfer] = self.now

    on_received = on_sent

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if not isinstance(outcome, Failed) or outcome.cause.why is not Why.DEADLINE:
            return
        cause = outcome.cause
        if "no progress" not in cause.text or cause.instance != job.incarnation.name:
            return
        moved = self._moved.get((cause.instance, job.transfer))
        patience_s = max(job.attempt.progress_s.values(), default=self.world.options.timings.progress_s)
        if moved is not None and self.now - moved < self.SLACK * patience_s:
            self.fail(
                f"{job.transfer}: {cause} on rank {rank}, although it moved {self.now - moved:.3f} s ago"
            )


class QueueWaits(Checker):
    """No transfer fails for the time that it spent in the queue of an engine, while that queue moves."""

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if not isinstance(outcome, Failed) or outcome.cause.why is not Why.DEADLINE:
            return
        offer_s = self.world.options.timings.offer_s
        # Moves since then were announced, and the announcements have arrived.
        since_s, until_s = (
            self.now - 0.8 * offer_s,
            self.now - 0.3 * offer_s - 3 * self.world.network.slowest_s,
        )
        if _excuse_s(self.world, job) > self.now - 2 * offer_s:
            return
        for name in (job.attempt.ends.source, job.attempt.ends.target):
            engine = self.world.instances[name].engine
            if engine is None or job.attempt not in engine.queue:
                continue
            if any(since_s < move_s < until_s for move_s in engine.moves_s):
                self.fail(
                    f"{job.transfer} failed on {job.incarnation.name}/{rank} in the queue of {name}, which "
                    f"moves: {outcome.cause}"
                )


def _excuse_s(world: World, job: EngineTransfer) -> float:
    """When something last kept messages from the two sides of a transfer or their ranks."""
    names = (job.attempt.ends.source, job.attempt.ends.target)
    times = [world.network.loss_s.get(frozenset(names), -inf)]
    for name in names:
        instance = world.instances[name]
        times += [instance.died_s, *(process.halted_until_s for process in instance.processes)]
    return max(times)


class PromptFailure(Checker):
    """After one end knows of a failure, all ranks of both ends know soon, unless the network lost it."""

    KNOWN_S_MAX = 0.45
    """A second of real time: the timings of a simulation are shortened to less than half."""
    EXCUSE_S = 1.2
    """For how long a loss may have effects: until a handshake times out."""
    FORGOTTEN = 0.9
    """A rank that asks later than this share of the time for which outcomes are kept may get none."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._first: dict[int, float] = {}
        self._withdrawing: set[tuple[int, str]] = set()
        """Attempts and source nodes that cancel their copies and go on."""

    def on_withdraw(self, job: EngineTransfer, rank: int) -> None:
        self._withdrawing.add((job.attempt.tag, job.incarnation.hosts[rank].name))

    def on_withdrawn(self, job: EngineTransfer, rank: int, withdrawal: Withdrawal) -> None:
        self._withdrawing.discard((job.attempt.tag, job.incarnation.hosts[rank].name))

    def on_copy_end(self, copy: SimCopy, how: str) -> None:
        is_cancelled = how == "FailedQuiet" and (copy.mark, copy.sender.node) in self._withdrawing
        if how != "Done" and copy.mark > 0 and not is_cancelled:
            self._first.setdefault(copy.mark, self.now)

    def on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if not isinstance(outcome, Failed):
            return
        first = self._first.setdefault(job.attempt.tag, self.now)
        since = max(first, job.begun_s.get(rank, 0.0))
        if self.now - since <= self.KNOWN_S_MAX + 3 * self.world.network.slowest_s:
            return
        if since - first > self.FORGOTTEN * self.world.options.timings.linger_s:
            return
        if _excuse_s(self.world, job) < first - self.EXCUSE_S:
            self.fail(
                f"{job.transfer}: failed at {since:.4f} s, but {job.incarnation.name}/{rank} heard of it "
                f"{self.now - since:.3f} s later: {outcome.cause}"
            )


class EndsTogether(Checker):
    """When a process of an instance dies, the others end soon."""

    @property
    def _end_s_max(self) -> float:
        return self.world.options.timings.silence_s + 1.0

    def on_death(self, incarnation: Incarnation) -> None:
        self.world.schedule.after(self._end_s_max, self._look, incarnation)

    def _look(self, incarnation: Incarnation) -> None:
        left = [process for process in incarnation.processes if process.is_alive]
        if any(process.is_halted for process in left):
            self.world.schedule.after(self._end_s_max, self._look, incarnation)
        elif left:
            names = ", ".join(process.name for process in left)
            self.fail(
                f"{names} lived on for {self._end_s_max:.1f} s after another process of the instance died"
            )


class OneIncarnation(Checker):
    """The ranks that a coordinator counts as its own are of its incarnation, and know its epoch."""

    def on_member_sent(self, host: Host, message: Message) -> None:
        coordinator = host.driver
        if not isinstance(coordinator, CoordinatorDriver):
            return
        for rank, link in coordinator.members.items():
            end = host.links.get(link)
            if not isinstance(end, MemberEnd) or end.peer is None:
                continue
            member = end.peer.host
            if member.process.incarnation != host.process.incarnation:
                self.fail(
                    f"{host.name} of {host.process.incarnation} takes {member.name} of "
                    f"{member.process.incarnation} for its rank {rank}"
                )
            driver = member.driver
            if isinstance(driver, RankDriver) and driver.config.epoch not in (0, host.process.epoch):
                self.fail(f"{member.name} has epoch {driver.config.epoch}, {host.name} {host.process.epoch}")


CHECKERS: dict[str, type[Checker]] = {
    checker.name: checker for checker in sorted(Checker.__subclasses__(), key=lambda checker: checker.name)
}
BUILT_IN = {
    "settles": "Every transfer ends, and every instance comes back.",
    "escape": "No exception escapes a driver, and no peer breaks the protocol.",
}
"""What the world itself checks."""


def attach_checkers(world: World) -> dict[str, Checker]:
    """Has all checkers watch a world."""
    checkers = {name: checker(world) for name, checker in CHECKERS.items()}
    for checker in checkers.values():
        for event in dir(checker):
            if event.startswith("on_"):
                world.listen(event, getattr(checker, event))
    return checkers
