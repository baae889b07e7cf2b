"""Both sides of a transfer over lists: every interleaving that the choices say, and what must hold in all.

A run goes in two parts. In the first, choices pick what happens next: an engine's call, a message, the end of
a copy or an unpack, a fault. In the second nothing new goes wrong, everything under way is let through, and
the clock moves when nothing else does. After that every record has to be over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.protocol.choices import Choices
from tests.protocol.paired_setup import BrokenError, Machines, Setup
from tests.protocol.paired_source import Attempt, SourceSide
from tests.protocol.paired_target import TargetSide
from tests.protocol.paired_wire import NUM_SESSIONS_MAX, Flight, Link, Memory
from tests.protocol.values import AUX

from baton.protocol.departure import TargetAborted
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Ready, Stage, Why
from baton.protocol.sender import SenderState

Act = Callable[[], None]
NUM_STEPS_MAX = 150
"""Steps of the first part, in which faults happen."""
NUM_STEPS_ALL = 4000
TICK_S = 5.0
UNPACK_S = 12.0
NUM_TICKS_MAX = 100
KINDS = (
    "engine",
    "to source rank",
    "from source rank",
    "copy",
    "session",
    "target rank",
    "unpack",
)
WEIGHTS = (4, 1, 4, 16)
"""How often something of a kind happens, beside the others."""
SOUND = Machines()
JUMPS_S = (0.5, 4.0, 17.0, 21.0, 51.0, 61.0, 301.0)


class World:
    """One run."""

    def __init__(self, setup: Setup, choices: Choices, machines: Machines = SOUND) -> None:
        self.setup = setup
        self.choices = choices
        self.machines = machines
        self.now = 1000.0
        self.ready = Ready(AUX)
        self.initiatives: list[str] = sorted(setup.faulty - {"finish", "abort"})
        """What went wrong, each time that something did."""
        self.strays: list[Flight] = []
        self.source = SourceSide(self)
        self.targets = [TargetSide(self, number) for number in range(2 if setup.faults.has_rival else 1)]
        self.due = self._planned()
        self.weights = {kind: choices.pick(WEIGHTS) for kind in KINDS}
        self.is_rough = True

    def _planned(self) -> list[tuple[int, Act]]:
        """The faults that happen once, and after how many steps."""
        faults, main, planned = self.setup.faults, self.targets[0], []
        if faults.loses_session:
            planned.append((self.choices.below(80), partial(self.lose, main.link)))
        if faults.target_aborts:
            planned.append((self.choices.below(80), partial(self._if_begun, main.abort)))
        if faults.declines:
            planned.append((self.choices.below(20), self._decline))
        if faults.jumps:
            planned += [(self.choices.below(80), self._jump) for _ in range(3)]
        return planned

    # What a run consists of.

    def run(self) -> None:
        """Plays both parts, and looks at what came of it."""
        self.play(NUM_STEPS_MAX)
        self.settle()
        self.check_over()

    def play(self, num_steps: int) -> None:
        """The first part."""
        for step in range(num_steps):
            act = self._pick()
            for planned in [one for one in self.due if one[0] <= step or act is None]:
                self.due.remove(planned)
                planned[1]()
                act = self._pick()
            if act is None:
                break
            act()

    def settle(self) -> None:
        """The second part."""
        self.is_rough = False
        num_steps = 0
        for _ in range(NUM_TICKS_MAX):
            while act := self._pick():
                act()
                num_steps += 1
                if num_steps > NUM_STEPS_ALL:
                    raise BrokenError("it never comes to rest")
            if self.is_over:
                return
            self._check_told()
            self.tick(TICK_S)
        raise BrokenError(f"stuck: {self.describe()}")

    def _pick(self) -> Act | None:
        """What happens next; each kind of thing is as slow or fast as this run has it."""
        kinds = {kind: found for kind, found in self._acts().items() if found}
        if not kinds:
            return None
        mark = self.choices.below(sum(self.weights[kind] for kind in kinds))
        for kind, found in kinds.items():
            mark -= self.weights[kind]
            if mark < 0:
                return self.choices.pick(found)
        raise AssertionError

    def _acts(self) -> dict[str, list[Act]]:
        acts: dict[str, list[Act]] = {kind: [] for kind in KINDS}
        for rank in self.source.ranks.values():
            if rank.script:
                acts["engine"].append(rank.call)
            if rank.inbox:
                acts["to source rank"].append(rank.hear)
            if rank.outbox:
                acts["from source rank"].append(partial(self.source.hear, rank.rank))
            for flight in rank.flights():
                acts["copy"].append(partial(self._end_flight, rank.rank, flight.chunk.index))
        for side in self.targets:
            self._add_target_acts(acts, side)
        if self.is_rough and self.strays:
            acts["copy"].append(self.land_stray)
        return acts

    def _add_target_acts(self, acts: dict[str, list[Act]], side: TargetSide) -> None:
        link = side.link
        if side.record is None and not self.setup.faults.declines:
            acts["engine"].append(side.begin)
        if side.record is not None and side.has_offer and not side.has_prepared:
            acts["engine"].append(side.prepare)
        if link.to_source:
            acts["session"].append(lambda: self.source.receive(link, link.take(link.to_source, self.choices)))
        if link.to_target:
            acts["session"].append(lambda: side.receive(link.take(link.to_target, self.choices)))
        acts["session"] += [partial(self._notice, side, who) for who in sorted(link.unaware)]
        if not link.is_up and not link.unaware and link.incarnation == 1 and self.choices.one_in(2):
            acts["session"].append(link.heal)
        for rank in side.ranks.values():
            if rank.inbox:
                acts["target rank"].append(rank.hear)
            if rank.outbox:
                acts["target rank"].append(partial(side.hear, rank.rank))
            if rank.take_backs:
                acts["target rank"].append(partial(self._take_back, side, rank.rank))
            acts["unpack"] += [
                partial(self._end_job, side, rank.rank, index) for index in range(len(rank.jobs))
            ]

    # What happens, and what goes wrong.

    def _end_flight(self, rank: int, index: int) -> None:
        faults, flight, how = self.setup.faults, self.source.ranks[rank].last.flights[index], "done"
        if self.is_rough and faults.copies_fail and self.choices.one_in(4):
            how = "failed"
        if self.is_rough and faults.copies_doubt and self.choices.one_in(4):
            how = "doubt"
        if flight.is_off and self.choices.one_in(2):
            how = "failed"
        self.source.ranks[rank].end_flight(index, how)

    def _end_job(self, side: TargetSide, rank: int, index: int) -> None:
        faults = self.setup.faults
        is_bad = self.is_rough and faults.unpacks_fail and self.choices.one_in(4)
        if self.is_rough and faults.unpacks_slow:
            self.tick_if_idle(UNPACK_S)
        side.ranks[rank].end_job(index, not is_bad)

    def _take_back(self, side: TargetSide, rank: int) -> None:
        side.ranks[rank].take_back(is_still=not self.is_rough or not self.choices.one_in(3))

    def land_stray(self) -> None:
        """Something that a failed copy left under way arrives, perhaps not for the first time."""
        stray = self.strays[self.choices.below(len(self.strays))]
        self.memory_of(stray.grant).land(stray)

    def lose(self, link: Link) -> None:
        """A session is gone; neither side knows yet."""
        self.initiatives.append("session")
        link.lose()

    def _notice(self, side: TargetSide, who: str) -> None:
        side.link.unaware.discard(who)
        if who == "source":
            self.source.lost(side.link)
        else:
            side.lost()

    def _decline(self) -> None:
        self.initiatives.append("decline")
        cause = Cause(Why.OUT_OF_PAGES, Stage.GRANT, "decode", -1, "full")
        self.source.feed(TargetAborted(cause))

    def _if_begun(self, act: Act) -> None:
        if self.targets[0].record is not None:
            act()

    def _jump(self) -> None:
        self.tick_if_idle(self.choices.pick(JUMPS_S))

    def tick_if_idle(self, seconds: float) -> None:
        """Time passes; a session is never so slow that a deadline passes meanwhile."""
        if all(side.link.is_empty for side in self.targets):
            self.tick(seconds)

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.source.tick()
        for side in self.targets:
            side.tick()

    # What the two sides look up.

    def link_of(self, session: int) -> Link | None:
        """The link of a session that stands."""
        if session < 0:
            return None
        link = self.targets[session // NUM_SESSIONS_MAX].link
        return link if link.is_up and link.number == session else None

    def memory_of(self, grant: bytes) -> Memory:
        """What a grant lets write."""
        return next(side.memory for side in self.targets if side.memory.grant == grant)

    def live_strays(self, memory: Memory) -> list[Flight]:
        """What is left of failed copies and may still write somewhere."""
        return [
            stray
            for stray in self.strays
            if stray.grant == memory.grant
            and any(
                stray.reaches(self.setup, target)
                for target in self.setup.targets(stray.source)
                if target not in memory.barred
            )
        ]

    # What must hold in the end.

    @property
    def is_over(self) -> bool:
        """Whether every record has come to its end."""
        is_sent = all(one.record.state is SenderState.ENDED for one in self.attempts)
        return self.source.record is None and is_sent and all(side.is_over for side in self.targets)

    @property
    def attempts(self) -> list[Attempt]:
        """Every attempt of every source rank."""
        return [one for rank in self.source.ranks.values() for one in rank.attempts]

    def _check_told(self) -> None:
        """Pages and records may wait for the clock; who asked how it ended never does."""
        sides = [side for side in self.targets if side.record is not None]
        if not self.setup.faults.withholds and not all(one.conclusions for one in [*self.attempts, *sides]):
            raise BrokenError(f"somebody waits to be told: {self.describe()}")

    def check_over(self) -> None:
        """Everything ended, once, and both sides agree."""
        for rank in self.source.ranks.values():
            rank.check_over()
        for side in self.targets:
            if side.record is None:
                continue
            if len(side.conclusions) != 1 or side.num_releases != 1:
                raise BrokenError(
                    f"target: {len(side.conclusions)} conclusions, {side.num_releases} releases"
                )
            for rank in side.ranks.values():
                if rank.record is not None and rank.num_freed != 1:
                    raise BrokenError(f"target rank {rank.rank}: staging freed {rank.num_freed} times")
        self._check_agreement()

    def outcomes(self) -> tuple[list[Outcome], Outcome | None]:
        """What the source's ranks were told, and what the target was whose grant the source took."""
        told = [one.conclusions[0] for one in self.attempts]
        sides = [side for side in self.targets if side.record is not None]
        if self.source.taken:
            sides = [side for side in sides if side.memory.grant == self.source.taken]
        return told, sides[0].conclusions[0] if sides else None

    def _check_agreement(self) -> None:
        told, verdict = self.outcomes()
        for side in self.targets:
            is_taken = side.memory.grant == self.source.taken
            if side.conclusions and not is_taken and isinstance(side.conclusions[0], Ready):
                raise BrokenError("a target is ready whose grant was never taken")
        is_ready = isinstance(verdict, Ready)
        if any(isinstance(one, Ready) for one in told) and not is_ready:
            raise BrokenError(f"the source was told that it is ready, the target {verdict}")
        if "session" in self.initiatives:
            return
        if is_ready and not all(isinstance(one, Ready) for one in told):
            raise BrokenError(f"the target is ready, the source was told {told}")
        self._check_same(told, verdict)

    def _check_same(self, told: list[Outcome], verdict: Outcome | None) -> None:
        """Where one thing alone decided, all say the same."""
        faults = self.setup.faults
        if len(self.initiatives) > 1 or not faults.is_plain or verdict is None:
            return
        wanted: tuple[type, ...] = (Failed,) if self.initiatives else (Ready,)
        if self.initiatives == ["AnswerEnded"]:
            wanted = (Finished,)
            if faults.jumps:
                return  # the end of an answer is kept for a while only
        if self.initiatives in (["gap"], ["overlap"], ["Aborted"]):
            # Nobody may need the cells, and who has committed can only ask.
            wanted = (Failed, Ready)
        found = [verdict, *told]
        is_same = all(one == verdict for one in told)
        if self.initiatives in (["prompt"], ["ranks differ"]):
            # Each side may see that for itself, and say it in its own words.
            is_same = {one.cause.why for one in found if isinstance(one, Failed)} == {Why.REFUSED_PROMPT}
        if not isinstance(verdict, wanted) or not is_same:
            raise BrokenError(f"{self.initiatives or 'nothing went wrong'}: {found}")

    def describe(self) -> str:
        """Where everybody stands."""
        ranks = [one.record.state.value for one in self.attempts]
        sides = [side.record.state.value for side in self.targets if side.record is not None]
        offer = self.source.record.state.value if self.source.record else "forgotten"
        return f"senders {ranks}, offer {offer}, receivers {sides}, {self.setup.faults}, {self.initiatives}"
