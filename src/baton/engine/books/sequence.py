"""One answer on its way: what was asked, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.engine.books.prefix import Node
from baton.engine.commands import PageTables
from baton.engine.sampling.params import SamplingParams


class Role(Enum):
    """Where a sequence is prefilled and where decoded."""

    LOCAL = "local"
    """Both here."""
    SOURCE = "source"
    """Prefilled here, decoded elsewhere."""
    TARGET = "target"
    """Prefilled elsewhere, decoded here."""


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """It has no pages: not begun, or preempted."""
    PREFILLING = "prefilling"
    """Its known tokens are being computed."""
    RUNNING = "running"
    """All known tokens but the last are computed; it grows by one token a step."""
    RECEIVING = "receiving"
    """Pages are reserved, the hand-over is awaited."""
    SENT = "sent"
    """Its prompt is computed; pages are held until the hand-over lets them go."""
    ENDED = "ended"
    """Nothing more is computed; pages are held while a batch or a hand-over has them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a sequence is to be; the number is unique in its instance."""

    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    role: Role = Role.LOCAL
    arrival_s: float = 0.0
    dp: int = 0
    index: int = 0
    """Which of the request's n answers it is."""
    salt: str = ""
    """Sequences with another salt never share a prefix."""
    embeddings: bytes | None = None
    """Input embeddings (float32, tokens x hidden) in place of the prompt's ids."""


@dataclass(slots=True)
class Holding:
    """The pages of a sequence: tables by group, and how many leading entries are given back already."""

    pages: PageTables = field(default_factory=dict)
    num_passed: dict[str, int] = field(default_factory=dict)
    """By group: entries before a window; they stand in the table, their pages may be anybody's."""
    pin: Node | None = None
    """The last unit of the sequence's prefix that is cached."""

    def held(self, group: str) -> list[int]:
        """The pages of a group that are this sequence's."""
        return self.pages.get(group, [])[self.num_passed.get(group, 0) :]


@dataclass(slots=True)
class Ahead:
    """What a draft needs of a sequence, or says of it."""

    proposal: int | None = None
    """What it guesses to follow the known tokens."""
    hidden: bytes | None = None
    """The model's row that a fork's first token was sampled from, until the draft has seen that token."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The mutable record of one answer; the scheduler alone writes it."""

    asked: Asked
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    holding: Holding = field(default_factory=Holding)
    num_computed: int = 0
    """Tokens whose cache entries are there."""
    num_scheduled: int = 0
    """Tokens that are computed or in a batch in flight."""
    num_cached: int = 0
    """Tokens that were found in the prefix cache when it last began."""
    num_flights: int = 0
    """Batches in flight that it is part of."""
    ahead: Ahead = field(default_factory=Ahead)
    is_leased: bool = False
    """A hand-over may read or write its pages."""
    is_granted: bool = False
    """Its hand-over has pages at the target."""
    is_begun: bool = False
    """The caller was told that it began."""

    @property
    def number(self) -> int:
        """Its number in the instance."""
        return self.asked.number

    @property
    def role(self) -> Role:
        """Where it is prefilled and decoded."""
        return self.asked.role

    @property
    def params(self) -> SamplingParams:
        """How it is sampled."""
        return self.asked.params

    @property
    def pages(self) -> PageTables:
        """Its page tables."""
        return self.holding.pages

    @property
    def age(self) -> tuple[float, int]:
        """Ordered oldest first."""
        return (self.asked.arrival_s, self.asked.number)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.asked.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and what was generated."""
        return len(self.asked.prompt) + len(self.generated)

    @property
    def num_tokens_max(self) -> int:
        """Tokens that may ever be computed here; the last that is sampled is not."""
        if self.role is Role.SOURCE:
            return self.num_prompt
        return self.num_prompt + max(1, self.params.max_tokens) - 1

    @property
    def has_room_to_grow(self) -> bool:
        """Whether another token may be generated."""
        return len(self.generated) < self.params.max_tokens

    @property
    def num_samples_last(self) -> int:
        """Tokens to sample once all known ones are computed: all first tokens where the answers fork."""
        is_first = not self.generated and self.asked.index == 0 and self.role is not Role.TARGET
        return self.params.n if is_first else 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens [start, stop)."""
        num_prompt = self.num_prompt
        found = list(self.asked.prompt[start:stop])
        if stop > num_prompt:
            found += self.generated[max(0, start - num_prompt) : stop - num_prompt]
        return found

    def embeddings(self, start: int, stop: int) -> bytes | None:
        """Input embeddings of tokens [start, stop), where the prompt has them."""
        raw = self.asked.embeddings
        if raw is None or start >= self.num_prompt:
            return None
        row = len(raw) // self.num_prompt
        return raw[start * row : stop * row]
