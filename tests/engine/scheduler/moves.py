"""What may happen to a world, one move at a time; `pick(n)` chooses one of n."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

from tests.engine.scheduler.world import VOCABULARY, Setting, World

from baton.engine.scheduler import SchedulerConfig
from baton.engine.sequence import SequenceRole, SequenceStatus

Pick = Callable[[int], int]
Move = Callable[[World, Pick], None]
T = TypeVar("T")

LAYOUTS = ("tp2", "cp2", "cp2:stripe1", "cp3:stripe3", "cp2:stripe2", "cp2:split", "cp3:split", "cp2:mirror")
TOKENS_MAX = 14
IN_FLIGHT_MAX = 3
STEMS = ((0, 1, 2, 0, 1, 2, 2, 2, 1, 1, 0, 0, 1, 2), (0, 1, 2, 0, 2, 0, 0, 1, 1, 2, 0, 1, 0, 0))
"""Prompts begin alike, so that prefixes are found."""


def one_of(items: list[T], pick: Pick) -> T | None:
    return items[pick(len(items))] if items else None


def make_setting(layout: str, pick: Pick) -> Setting:
    cache = ("full", "full", "full", "window", "hybrid", "draft", "draft")[pick(7)]
    chunk_tokens = 1 + pick(6)
    config = SchedulerConfig(
        chunk_tokens=chunk_tokens,
        batch_tokens_max=2 + pick(9),
        sequences_max=2 + pick(5),
        chunks_in_flight=1 + pick(2),
        growth_tokens=(0, 2, 512)[chunk_tokens % 3],
        num_guesses=1 + pick(3) if cache == "draft" else 0,
    )
    return Setting(layout, cache, 1 + pick(3), 6 + pick(14), 1 + pick(4), config)


def _prompt(pick: Pick) -> list[int]:
    stem = STEMS[pick(len(STEMS))][: 1 + pick(TOKENS_MAX)]
    return [*stem, *(pick(VOCABULARY) for _ in range(pick(3)))]


def add_local(world: World, pick: Pick) -> None:
    salt = ("", "", "pepper")[pick(3)]
    world.add(world.make(SequenceRole.LOCAL, _prompt(pick), 1 + pick(7), 1 + pick(3), salt))


def add_source(world: World, pick: Pick) -> None:
    world.add(world.make(SequenceRole.SOURCE, _prompt(pick), 1 + pick(4), 1 + pick(2)))


def reserve(world: World, pick: Pick) -> None:
    world.reserve(world.make(SequenceRole.TARGET, _prompt(pick), 1 + pick(7), 1 + pick(3)))


def admit(world: World, pick: Pick) -> None:
    sequence = one_of(world.in_state(SequenceStatus.RECEIVING), pick)
    if sequence is not None:
        world.admit(sequence)


def disturb(world: World, pick: Pick) -> None:
    lent = one_of(world.awaited(), pick)
    if lent is not None:
        world.disturb(lent)


def schedule(world: World, pick: Pick) -> None:
    if len(world.in_flight) < IN_FLIGHT_MAX:
        world.schedule((None, None, 1, 2)[pick(4)])


def run(world: World, pick: Pick) -> None:
    del pick
    if world.pending:
        world.run()


def complete(world: World, pick: Pick) -> None:
    del pick
    if world.in_flight:
        world.complete()


def abort(world: World, pick: Pick) -> None:
    sequence = one_of(list(world.scheduler.sequences.values()), pick)
    if sequence is not None and sequence.status is not SequenceStatus.ENDED:
        world.abort(sequence)


def grant(world: World, pick: Pick) -> None:
    sources = [
        sequence for sequence in world.scheduler.sequences.values() if sequence.role is SequenceRole.SOURCE
    ]
    sequence = one_of(sources, pick)
    if sequence is not None:
        world.scheduler.grant(sequence.number)


def hold(world: World, pick: Pick) -> None:
    """The target of a source has no room; it grants later."""
    waiting = [s for s in world.in_state(SequenceStatus.WAITING) if s.role is SequenceRole.SOURCE]
    if (sequence := one_of(waiting, pick)) is not None:
        world.scheduler.hold(sequence.number)


def release(world: World, pick: Pick) -> None:
    releasable = [
        lent for lent in world.lent.values() if lent.sequence.status is not SequenceStatus.RECEIVING
    ]
    lent = one_of(releasable, pick)
    if lent is not None:
        world.release(lent)


MOVES = (
    (3, add_local),
    (1, add_source),
    (2, reserve),
    (2, admit),
    (1, disturb),
    (6, schedule),
    (2, run),
    (6, complete),
    (1, abort),
    (2, grant),
    (1, hold),
    (2, release),
)


def walk(seed: int, num_moves: int, layout: str | None = None) -> World:
    """A world after random moves, checked after each, and then settled."""
    chance = random.Random(seed)
    world = World(make_setting(layout or chance.choice(LAYOUTS), chance.randrange))
    weights = [weight for weight, _ in MOVES]
    for _, move in chance.choices(MOVES, weights, k=num_moves):
        move(world, chance.randrange)
        world.check()
    world.settle()
    return world
