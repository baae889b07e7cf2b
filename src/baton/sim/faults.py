"""What can go wrong in a seed, one class each.

The fields of a class say how strong the fault is, and from what each is drawn. `install` puts a fault into a
world that is about to start. A fault stops by itself when `world.are_faults_over()`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from baton.sim.core import snake_case
from baton.sim.network import SimFrame
from baton.sim.router import Ends, SimAttempt
from baton.sim.transport import CopyCourse, CopyEnd
from baton.sim.world import VERSIONS, SimInstance, World

NONE_SHARE = 0.12
"""The share of seeds without faults: everything has to succeed there."""
BAD_ENDS = [end.value for end in CopyEnd if end is not CopyEnd.DONE]


def drawn(draw: Callable[[random.Random], Any]) -> Any:
    """A field that `Fault.draw` fills with what this returns."""
    return field(metadata={"draw": draw})


def one_of(*values: Any) -> Any:
    """A field drawn from these values."""
    return drawn(lambda rng: rng.choice(values))


def chance(probability: float) -> Any:
    """A field that is true with this probability."""
    return drawn(lambda rng: rng.random() < probability)


class Fault:
    """Base of all faults."""

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = snake_case(cls.__name__)

    @classmethod
    def draw(cls, rng: random.Random) -> Self:
        """A fault of random strength."""
        return cls(**{strength.name: strength.metadata["draw"](rng) for strength in fields(cls)})

    def install(self, world: World) -> None:
        raise NotImplementedError

    def rng(self, world: World) -> random.Random:
        return world.rng(f"fault/{self.name}")


class FrameFault(Fault):
    """A fault that changes frames, or when they arrive."""

    def change(self, frame: SimFrame, rng: random.Random) -> None:
        raise NotImplementedError

    def install(self, world: World) -> None:
        rng = self.rng(world)
        world.network.faults.append(
            lambda frame: None if world.are_faults_over() else self.change(frame, rng)
        )


class CopyFault(Fault):
    """A fault that changes the course of copies."""

    def change(self, course: CopyCourse, rng: random.Random) -> None:
        raise NotImplementedError

    def install(self, world: World) -> None:
        rng = self.rng(world)
        world.fabric.faults.append(
            lambda copy, course: None if world.are_faults_over() else self.change(course, rng)
        )


# Frames.


@dataclass(frozen=True)
class Delay(FrameFault):
    """Frames take longer, and hold up the frames behind them."""

    strength: tuple[float, float] = one_of((0.05, 0.2), (0.3, 0.02), (0.9, 0.004))
    """The probability, and the longest delay in seconds."""

    def change(self, frame: SimFrame, rng: random.Random) -> None:
        probability, delay_s_max = self.strength
        if rng.random() < probability:
            late_s = delay_s_max * rng.random()
            frame.arrivals = [arrival + late_s for arrival in frame.arrivals]


@dataclass(frozen=True)
class Duplication(FrameFault):
    """Frames arrive twice, except those of a handshake, which framing would keep out."""

    probability: float = one_of(0.05, 0.3)
    delay_s_max: float = one_of(0.001, 0.1)

    def change(self, frame: SimFrame, rng: random.Random) -> None:
        if rng.random() < self.probability and frame.arrivals and frame.message is not None:
            frame.arrivals.append(frame.arrivals[0] + self.delay_s_max * rng.random())


@dataclass(frozen=True)
class Loss(FrameFault):
    """Frames are lost while their link stands."""

    probability: float = one_of(0.01, 0.05, 0.2)

    def change(self, frame: SimFrame, rng: random.Random) -> None:
        if rng.random() < self.probability:
            frame.arrivals = []


@dataclass(frozen=True)
class Reordering(FrameFault):
    """Frames overtake each other, except those of a handshake, which would never end."""

    probability: float = one_of(0.1, 0.5)
    delay_s_max: float = one_of(0.002, 0.05)

    def change(self, frame: SimFrame, rng: random.Random) -> None:
        if frame.message is None or not frame.receiver.is_linked:
            return
        if rng.random() < self.probability:
            late_s = self.delay_s_max * rng.random()
            frame.arrivals = [arrival + late_s for arrival in frame.arrivals]
            frame.is_ordered = False


# Links.


@dataclass(frozen=True)
class Breakage(Fault):
    """Connections break; both ends live on and dial again."""

    count: int = one_of(1, 2, 5)

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def break_link() -> None:
            standing = world.network.standing()
            if standing:
                end = rng.choice(standing)
                world.note("network", "break", detail=end.host.name)
                world.network.sever(end)

        for _ in range(self.count):
            world.schedule.at(rng.random() * world.options.faults_s * 0.5, break_link)


@dataclass(frozen=True)
class Echo(Fault):
    """Messages of a broken link arrive on the link that took its place.

    Framing keeps such messages out; here they get in, because the drivers have to bear them.
    """

    count: int = one_of(3, 10, 30)

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def echo() -> None:
            if not world.network.past:
                return
            sender, receiver, message = rng.choice(world.network.past)
            for dialler in world.network.standing():
                for end in (dialler, dialler.peer):
                    assert end is not None
                    if end.names == (receiver, sender) and end.is_linked:
                        transfer = getattr(message, "transfer", "")
                        world.note(end.host.name, "echo", transfer, type(message).__name__)
                        end.host.process.call(end.deliver, message)
                        return

        for _ in range(self.count):
            world.schedule.at(rng.random() * world.options.faults_s, echo)


@dataclass(frozen=True)
class Partition(Fault):
    """Instances cannot reach each other for a while, in one direction or both; copies stall too."""

    count: int = one_of(1, 1, 3)
    duration_s_max: float = one_of(0.05, 0.4, 1.5)
    is_one_way: bool = chance(0.5)

    def install(self, world: World) -> None:
        rng = self.rng(world)
        network = world.network

        def cut(pairs: set[tuple[str, str]]) -> None:
            world.note("network", "cut", detail=str(sorted(pairs)))
            network.cuts |= pairs

        def heal(pairs: set[tuple[str, str]]) -> None:
            world.note("network", "heal", detail=str(sorted(pairs)))
            network.cuts -= pairs

        names = sorted(world.instances)
        for _ in range(self.count):
            start_s = rng.random() * world.options.faults_s
            name, other = rng.sample(names, 2)
            pairs = {(name, other)} if self.is_one_way else {(name, other), (other, name)}
            world.schedule.at(start_s, cut, pairs)
            stop_s = min(start_s + self.duration_s_max * rng.random(), world.options.faults_s)
            world.schedule.at(stop_s, heal, pairs)


@dataclass(frozen=True)
class RegistryLoss(Fault):
    """The registry does not answer for a while."""

    start: float = one_of(0.0, 0.0, 0.3)
    """A share of the time of faults."""
    duration_s: float = one_of(0.05, 0.5)

    def install(self, world: World) -> None:
        def switch(is_up: bool) -> None:
            world.note("registry", "up" if is_up else "down")
            world.network.registry.is_up = is_up

        start_s = self.start * world.options.faults_s
        world.schedule.at(start_s, switch, False)
        world.schedule.at(min(start_s + self.duration_s, world.options.faults_s), switch, True)


# Processes.


@dataclass(frozen=True)
class Crash(Fault):
    """Processes die, and their instance comes back under the same name and address."""

    count: int = one_of(1, 1, 2)
    restart_s_max: float = one_of(0.01, 0.3)
    linger_share: float = one_of(0.0, 0.5, 1.0)
    """How often copies outlive the process that began them."""

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def crash() -> None:
            instance = world.instances[rng.choice(sorted(world.instances))]
            living = [process for process in instance.processes if process.is_alive]
            if living:
                instance.restart_s = self.restart_s_max * rng.random()
                instance.lingers = rng.random() < self.linger_share
                process = rng.choice(living)
                world.note(process.name, "crash")
                process.kill()

        for _ in range(self.count):
            # Early on, when there is most to break.
            world.schedule.at(rng.random() ** 2 * world.options.faults_s, crash)


@dataclass(frozen=True)
class Drain(Fault):
    """An instance is told to drain; it ends by itself and starts anew."""

    moment: float = one_of(0.03, 0.1, 0.5)
    """A share of the time of faults."""
    instance: float = drawn(random.Random.random)
    """A share of the number of instances."""

    def install(self, world: World) -> None:
        instance = _instance(world, self.instance)

        def drain() -> None:
            incarnation = instance.incarnation
            if incarnation is not None and incarnation.is_alive:
                world.note(instance.name, "drain")
                incarnation.drain()

        world.schedule.at(self.moment * world.options.faults_s, drain)


@dataclass(frozen=True)
class Halt(Fault):
    """Processes stop for a while, and go on as if nothing had happened."""

    count: int = one_of(1, 2)
    duration_s_max: float = one_of(0.05, 0.5, 1.2)

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def halt() -> None:
            instance = world.instances[rng.choice(sorted(world.instances))]
            living = [process for process in instance.processes if process.is_alive]
            if living:
                process = rng.choice(living)
                world.note(process.name, "halt")
                process.halt()
                until_s = world.schedule.now + self.duration_s_max * rng.random()
                world.schedule.at(min(until_s, world.options.faults_s), process.resume)

        for _ in range(self.count):
            world.schedule.at(rng.random() * world.options.faults_s * 0.5, halt)


@dataclass(frozen=True)
class Skew(Fault):
    """Clocks disagree, and run fast or slow."""

    offset_s_max: float = one_of(5.0, 1e5)
    drift_max: float = one_of(0.0, 0.001, 0.05)

    def install(self, world: World) -> None:
        rng = self.rng(world)
        world.draw_clock = lambda: (
            self.offset_s_max * rng.random(),
            1.0 + self.drift_max * (2 * rng.random() - 1),
        )


@dataclass(frozen=True)
class Version(Fault):
    """An instance speaks another protocol version until it is restarted: every peer refuses it."""

    instance: float = drawn(random.Random.random)
    """A share of the number of instances."""

    def install(self, world: World) -> None:
        instance = _instance(world, self.instance)
        instance.versions = (7, 9)

        def upgrade() -> None:
            instance.versions = VERSIONS
            world.note(instance.name, "upgrade")
            for process in instance.processes:
                process.kill()

        world.schedule.at(world.options.faults_s, upgrade)


# Copies.


@dataclass(frozen=True)
class Copies(CopyFault):
    """Copies are slow, fail, hang, or land after they failed."""

    probability: float = one_of(0.0, 0.05, 0.2)
    ends: Sequence[str] = drawn(lambda rng: rng.sample(BAD_ENDS, rng.randint(1, len(BAD_ENDS))))
    late_s: float = one_of(0.01, 0.1, 0.5)
    slowness: float = one_of(1.0, 1.0, 5.0, 40.0)

    def change(self, course: CopyCourse, rng: random.Random) -> None:
        course.duration_s *= self.slowness
        if rng.random() < self.probability:
            course.end = CopyEnd(rng.choice(self.ends))
            course.share = rng.random()
            course.late_s = self.late_s
            course.num_pieces += 1


@dataclass(frozen=True)
class Drip(CopyFault):
    """Copies make a little progress all the time, and do not end in time."""

    probability: float = one_of(0.1, 0.5)
    duration_s: float = one_of(0.9, 4.0)
    """Longer than the progress deadline, or than the total one."""

    def change(self, course: CopyCourse, rng: random.Random) -> None:
        if rng.random() < self.probability:
            course.num_pieces = 40
            course.duration_s = self.duration_s


# Requests.


@dataclass(frozen=True)
class Aborts(Fault):
    """Clients go away, and sources preempt requests, at any stage."""

    probability: float = one_of(0.3, 0.9)
    delay_s_max: float = one_of(0.002, 0.01, 0.2)
    is_preemption: bool = chance(0.3)

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def on_attempt(attempt: SimAttempt) -> None:
            if world.are_faults_over() or rng.random() >= self.probability:
                return
            delay_s = self.delay_s_max * rng.random()
            by_client: tuple[tuple[str, ...], ...] = (("source", "target"), ("target",))
            sides = ("source",) if self.is_preemption else rng.choice(by_client)
            world.schedule.after(delay_s, world.router.abort, attempt, sides)

        world.router.on_attempt.append(on_attempt)


@dataclass(frozen=True)
class Pressure(Fault):
    """Other work has filled the page pools; there is always room for one prompt."""

    source_share: float = one_of(0.0, 0.5, 0.8)
    target_share: float = one_of(0.0, 0.5, 0.8)

    def install(self, world: World) -> None:
        for instance in world.instances.values():
            instance.taken_share = self.source_share if instance.is_source else self.target_share


@dataclass(frozen=True)
class Retries(Fault):
    """The router retries a request under a new transfer id when a leg fails."""

    attempts_max: int = one_of(2, 3)
    delay_s: float = one_of(0.0, 0.05)

    def install(self, world: World) -> None:
        world.router.attempts_max = self.attempts_max
        world.router.retry_s = self.delay_s


@dataclass(frozen=True)
class RankMismatch(Fault):
    """One rank of a group has another prompt than the others, so its digest and bytes differ."""

    probability: float = one_of(0.3, 1.0)
    source_share: float = one_of(0.0, 0.5, 1.0)
    """How often the rank is one of the source's."""

    def install(self, world: World) -> None:
        rng = self.rng(world)

        def draw_odd_rank(ends: Ends) -> tuple[str, int] | None:
            is_hit = not world.are_faults_over() and rng.random() < self.probability
            side, name = ("target", ends.target)
            if rng.random() < self.source_share:
                side, name = ("source", ends.source)
            num_ranks = len(world.instances[name].spec.layout.group(0))
            return (side, rng.randrange(num_ranks)) if is_hit and num_ranks > 1 else None

        world.router.draw_odd_rank = draw_odd_rank


@dataclass(frozen=True)
class Tokeniser(Fault):
    """The two sides tokenise a prompt differently."""

    probability: float = one_of(0.3, 1.0)
    has_other_length: bool = chance(0.5)

    def install(self, world: World) -> None:
        world.router.mismatch = (self.probability, self.has_other_length)


def _instance(world: World, share: float) -> SimInstance:
    names = sorted(world.instances)
    return world.instances[names[int(share * len(names))]]


_BASES = (FrameFault, CopyFault)
FAULTS: dict[str, type[Fault]] = {
    fault.name: fault for base in (Fault, *_BASES) for fault in base.__subclasses__() if fault not in _BASES
}
FAULTS = dict(sorted(FAULTS.items()))


def draw_faults(rng: random.Random) -> dict[str, Fault]:
    """A random choice of faults, each of random strength."""
    draws = {name: (rng.random(), rng.getrandbits(64)) for name in FAULTS}
    if rng.random() < NONE_SHARE:
        return {}
    share = rng.choice((0.08, 0.2, 0.4))
    return {
        name: FAULTS[name].draw(random.Random(seed)) for name, (roll, seed) in draws.items() if roll < share
    }
