"""What two instances are to hand over in a paired run, and what is to go wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tests.protocol.choices import Choices
from tests.protocol.values import AUX

from baton.protocol.arrival import Terms
from baton.protocol.departure import Prefill
from baton.protocol.landing import LANDING
from baton.protocol.ledger import Ledger, Need, Pair, Rectangle
from baton.protocol.machine import Table
from baton.protocol.offer import OFFER
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.receiver import RECEIVER
from baton.protocol.sender import SENDER, Aborted, AnswerEnded, Chunk, ChunkReady, Sealed

TRANSFER = "room-7"
DIGEST, OTHER_DIGEST = b"\xd1" * 16, b"\xd2" * 16
Cells = frozenset[tuple[int, int]]


class BrokenError(AssertionError):
    """Something happened that must not."""


@dataclass(frozen=True)
class Machines:
    """The tables of a run; a broken variant replaces one."""

    sender: Table = SENDER  # type: ignore[type-arg]
    offer: Table = OFFER  # type: ignore[type-arg]
    receiver: Table = RECEIVER  # type: ignore[type-arg]
    landing: Table = LANDING  # type: ignore[type-arg]


@dataclass(frozen=True)
class Faults:
    """What may happen in a run, at any point of it."""

    reorders: bool = False
    repeats: bool = False
    loses_session: bool = False
    target_aborts: bool = False
    rank_aborts: bool = False
    finishes: bool = False
    copies_fail: bool = False
    copies_doubt: bool = False
    unpacks_fail: bool = False
    unpacks_slow: bool = False
    opens_fail: bool = False
    leaves_gap: bool = False
    overlaps: bool = False
    ranks_differ: bool = False
    prompts_differ: bool = False
    never_offers: bool = False
    never_seals: bool = False
    declines: bool = False
    has_rival: bool = False
    retries: bool = False
    jumps: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing keeps both sides from hearing the same story."""
        is_muddled = self.reorders or self.repeats
        return not (is_muddled or self.has_rival or self.retries or self.declines)

    @property
    def withholds(self) -> bool:
        """Whether somebody may wait for what never comes."""
        is_slow = self.jumps or self.unpacks_slow
        return self.never_offers or self.never_seals or self.loses_session or is_slow

    def __repr__(self) -> str:
        return f"Faults({', '.join(one.name for one in fields(self) if getattr(self, one.name))})"


@dataclass(frozen=True)
class Setup:
    """One hand-over: who needs what of whom, what each engine will say, and what may go wrong."""

    num_tokens: int
    num_targets: int
    needs: Mapping[Pair, Need]
    worked: frozenset[Pair]
    scripts: Mapping[int, tuple[object, ...]]
    knows_group: bool
    """Whether the target need not ask for the dp group."""
    faults: Faults
    faulty: frozenset[str] = frozenset()
    """What the engines' scripts do wrong already."""
    digest: bytes = DIGEST
    """As the target has it."""
    is_ahead: bool = False
    """Whether the target grants before its ranks have opened, as it may where they have nothing to unpack."""

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(self.scripts)

    def terms(self) -> Terms:
        pairs = sorted(self.needs)
        return Terms(
            sources=frozenset(self.sources),
            expected={pair: {"k": self.area(pair)} for pair in pairs},
            worked=self.worked,
            targets={source: tuple(to for at, to in pairs if at == source) for source in self.sources},
        )

    def ledger(self) -> Ledger:
        return Ledger.empty(self.num_tokens, {pair: (need,) for pair, need in self.needs.items()})

    def area(self, pair: Pair) -> int:
        return self.needs[pair].box(self.num_tokens).area

    def cells(self, pair: Pair, box: Rectangle | None = None) -> Cells:
        """The cells of a chunk that a pair moves; of everything without one."""
        need = self.needs[pair].box(self.num_tokens)
        part = need if box is None else need.common(box)
        if part is None:
            return frozenset()
        return frozenset((layer, token) for layer in range(*part.layers) for token in range(*part.tokens))

    def targets(self, source: int) -> tuple[int, ...]:
        return tuple(sorted(to for at, to in self.needs if at == source))


@dataclass
class Script:
    """What the engine of one source rank will call, in order."""

    calls: list[object] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)


def setup_of(choices: Choices, faults: Faults) -> Setup:
    """A hand-over; some move nothing at all, some only the state after the last token."""
    num_tokens, num_layers = choices.between(1, 5), choices.between(1, 4)
    sources, targets = range(choices.between(1, 3)), range(choices.between(1, 2))
    needs: dict[Pair, Need] = {}
    starts = choices.pick(((0, num_tokens - 1), (0,), (num_tokens - 1,), ()))
    for pair in [(source, target) for source in sources for target in targets] if starts else []:
        if not choices.one_in(4):
            first = choices.below(num_layers)
            needs[pair] = Need((first, choices.between(first + 1, num_layers)), choices.pick(starts))
    whole = Rectangle((0, num_layers), (0, num_tokens))
    sampler = choices.pick(sources)
    scripts = {rank: _script(choices, faults, whole, rank == sampler) for rank in sources}
    if faults.ranks_differ and len(sources) > 1:
        last = scripts[sources[-1]]
        last.calls[0] = Prefill(num_tokens, OTHER_DIGEST, 0)
        last.faulty.add("ranks differ")
    if faults.never_offers:
        lazy = scripts[choices.pick(sources)]
        lazy.calls.clear()
        lazy.faulty.add("never offers")
    differs = faults.prompts_differ
    worked = frozenset(choices.some(sorted(needs)))
    return Setup(
        num_tokens=num_tokens,
        num_targets=len(targets),
        needs=needs,
        worked=worked,
        scripts={rank: tuple(script.calls) for rank, script in scripts.items()},
        knows_group=choices.one_in(2),
        faults=faults,
        faulty=frozenset(
            {word for script in scripts.values() for word in script.faulty}
            | ({"prompt"} if differs else set())
        ),
        digest=OTHER_DIGEST if differs else DIGEST,
        is_ahead=not worked and choices.one_in(2),
    )


def _script(choices: Choices, faults: Faults, whole: Rectangle, is_sampler: bool) -> Script:
    script = Script([Prefill(whole.tokens[1], DIGEST, 0)])
    boxes = _cut(choices, whole)
    if faults.overlaps and choices.one_in(2):
        boxes.insert(0, choices.pick((whole, *boxes)))
        script.faulty.add("overlap")
    if faults.leaves_gap and choices.one_in(2):
        boxes.pop()
        script.faulty.add("gap")
    script.calls += [ChunkReady(Chunk(index, box)) for index, box in enumerate(boxes)]
    if is_sampler and faults.finishes:
        del script.calls[1 + choices.below(len(script.calls)) :]
        script.calls.append(AnswerEnded(AUX))
        script.faulty.add("finish")
    elif faults.never_seals and choices.one_in(2):
        script.faulty.add("never seals")
    else:
        script.calls.append(Sealed(AUX if is_sampler else None))
    again = list(script.calls)
    if (faults.rank_aborts or faults.retries) and choices.one_in(2):
        cause = Cause(Why.ABORTED, Stage.COPY, "prefill", 0, "given up")
        script.calls.insert(choices.between(1, len(script.calls)), Aborted(cause))
        script.faulty.add("abort")
    if faults.retries:
        script.calls += again
    return script


def _cut(choices: Choices, whole: Rectangle) -> list[Rectangle]:
    """Layers x tokens, in any order; now and then a chunk that nobody needs among them."""
    layers = sorted(
        {0, whole.layers[1], *(choices.below(whole.layers[1] + 1) for _ in range(choices.below(3)))}
    )
    tokens = sorted(
        {0, whole.tokens[1], *(choices.below(whole.tokens[1] + 1) for _ in range(choices.below(3)))}
    )
    return choices.shuffled(
        [
            Rectangle(rows, columns)
            for rows in itertools.pairwise(layers)
            for columns in itertools.pairwise(tokens)
        ]
    )


NONE = Faults()
NAMES = tuple(one.name for one in fields(Faults))


def faults_of(choices: Choices) -> Faults:
    """Nothing, one thing, or several that may go wrong."""
    num_faults = choices.pick((0, 1, 1, 2, 2, 4))
    return Faults(**{choices.pick(NAMES): True for _ in range(num_faults)})
