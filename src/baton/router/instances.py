"""An instance as a router sees it: by the registry, by its own word, and by what it was given."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import msgspec

from baton.router.wire.leg import Leg, Lost
from baton.router.wire.pool import Origin, read_origin
from baton.session.registry import Role, Roster

FRESH_S = 3.0


class Load(msgspec.Struct, frozen=True):
    """What an instance has to do."""

    num_running: int = 0
    num_waiting: int = 0
    num_tokens: int = 0
    num_queue_max: int = 0


class Rates(msgspec.Struct, frozen=True):
    """How fast an instance is, as measured; 0 where nothing was."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    handoff_s: float | None = None


class Pages(msgspec.Struct, frozen=True):
    """How much cache an instance has."""

    free: int = 0
    total: int = 0


class Told(msgspec.Struct, frozen=True):
    """What /server_info says; fields that are missing there are as if nothing was known."""

    name: str = ""
    model: str = ""
    epoch: int = 0
    coordinator: str = ""
    page_tokens: int = 0
    chunk_tokens: int = 0
    is_ready: bool = False
    is_draining: bool = False
    load: Load = Load()
    pages: Pages = Pages()
    rates: Rates = Rates()


@dataclass(frozen=True, slots=True)
class Card:
    """What the registry says of one incarnation of an instance."""

    name: str
    epoch: int
    role: Role
    url: str
    coordinator: str
    fingerprint: str
    layout: str
    transport: str


def card_of(roster: Roster) -> Card:
    """The card of an instance whose ranks are all there."""
    return Card(
        roster.instance,
        roster.epoch,
        roster.role,
        roster.url,
        roster.coordinator,
        roster.fingerprint,
        roster.layout,
        roster.transport,
    )


@dataclass(slots=True)
class Vitals:
    """What the last polls brought."""

    is_healthy: bool = False
    trouble: str = "not asked yet"
    heard_s: float = field(default_factory=monotonic)
    """When it last answered anything."""
    told: Told = field(default_factory=Told)
    epoch: int = 0
    """The last one that was ready; 0 before any was."""
    num_tokens_given: int = 0
    """What this router had given it when it last told its load."""


class Instance:
    """One instance, through all its incarnations."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.name = card.name
        """Unique among instances."""
        self.origin: Origin = read_origin(card.url)
        self.vitals = Vitals()
        self.legs: set[Leg] = set()
        self.num_in_flight = 0
        self.num_tokens = 0
        """In flight, as far as this router gave them."""
        self.num_local_tokens = 0
        """Of prompts that it prefills itself although it is there to decode."""
        self.full_until_s = 0.0
        self.is_leaving = False
        """It has unregistered."""
        self.absent_s: float | None = None
        """Since when the registry does not know it."""
        self._woken = asyncio.Event()

    @property
    def coordinator(self) -> str:
        """Of the incarnation that runs now."""
        told = self.vitals.told
        return (
            told.coordinator if told.coordinator and told.epoch >= self.card.epoch else self.card.coordinator
        )

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.vitals.told.model

    def is_called(self, model: str) -> bool:
        """Whether a client means this one's model: by its name, or by the last part of a path."""
        own = self.vitals.told.model
        return model == own or model == own.rstrip("/").rpartition("/")[2]

    @property
    def is_able(self) -> bool:
        """Whether it can be given anything new."""
        vitals = self.vitals
        return (
            vitals.is_healthy
            and vitals.told.is_ready
            and not vitals.told.is_draining
            and not self.is_leaving
            and vitals.told.epoch >= self.card.epoch
        )

    def is_fresh(self, now_s: float) -> bool:
        """Whether it has answered lately."""
        return now_s - self.vitals.heard_s < FRESH_S

    @property
    def state(self) -> str:
        """In a word, for people and metrics."""
        if self.is_leaving:
            return "leaving"
        if self.vitals.told.is_draining:
            return "draining"
        if not self.vitals.is_healthy:
            return "unhealthy"
        return "able" if self.is_able else "loading"

    @property
    def load_tokens(self) -> int:
        """Tokens in flight: what this router gave it, and what it had beyond that when it was last asked."""
        beyond = self.vitals.told.load.num_tokens - self.vitals.num_tokens_given
        return self.num_tokens + max(0, beyond)

    def has_room(self, num_in_flight_max: int, now_s: float) -> bool:
        """Whether one more request may be given to it."""
        return self.num_in_flight < num_in_flight_max and now_s >= self.full_until_s

    def renew(self, card: Card) -> bool:
        """The registry's latest word; answers whether it is of an incarnation that is new to us."""
        if card.epoch < self.card.epoch:
            return False
        # What the instance has told itself is no news: what it was given since belongs to the new one.
        is_new = card.epoch > max(self.card.epoch, self.vitals.epoch)
        if is_new:
            self.lose(f"{self.name} has started anew (epoch {card.epoch})")
            self.vitals.is_healthy = False
            self.wake()
        self.card = card
        self.origin = read_origin(card.url)
        self.absent_s = None
        self.is_leaving = False
        return is_new

    def heard(self, told: Told) -> bool:
        """What it said of itself; answers whether it is another incarnation than before."""
        is_new = told.is_ready and 0 < self.vitals.epoch < told.epoch
        if is_new:
            self.lose(f"{self.name} has started anew (epoch {told.epoch})")
        if told.is_ready:
            self.vitals.epoch = told.epoch
        self.vitals.told = told
        self.vitals.num_tokens_given = self.num_tokens
        return is_new

    def lose(self, text: str, code: str = "PEER_LOST") -> None:
        """Ends every leg at once, so that nobody waits for an answer that cannot come."""
        for leg in list(self.legs):
            leg.fail(Lost(text, code))

    def doubt(self, text: str) -> None:
        """Somebody says that it has ended: it is given nothing new until it has answered a poll."""
        self.vitals.is_healthy = False
        self.vitals.trouble = text
        self.wake()

    def wake(self) -> None:
        """Asks it now and not at the next turn."""
        self._woken.set()

    async def pause(self, wait_s: float) -> None:
        """Until the next poll."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        self._woken.clear()
