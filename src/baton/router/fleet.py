"""All instances that a router knows.

They come from the registry and stay while it is away. One that the registry no longer knows, without having
said goodbye, stays for as long as it answers and at most for a minute: a registry that has just been started
again knows nobody until they have told it, and one late answer to a poll is no end either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic

from baton.errors import ConfigError
from baton.router.instances import Card, Instance
from baton.session.registry import Role

ABSENT_S_MAX = 60.0
SILENT_S_MAX = 15.0
"""Longer than a member takes to tell a new registry of itself, and than a busy instance takes to answer."""

log = logging.getLogger(__name__)


class Fleet:
    """Instances by name; `on_change` is called when one comes, goes or changes what it can do."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.is_registry_known = False
        """Whether the registry has ever answered."""
        self.on_join: Callable[[Instance], None] = _nothing
        self.on_leave: Callable[[Instance], None] = _nothing
        self.on_anew: Callable[[Instance], None] = _nothing
        """Its former incarnation has ended, and its cache with it."""
        self.on_change: Callable[[], None] = lambda: None
        self._refused: dict[str, str] = {}

    def apply(self, cards: Iterable[Card]) -> None:
        """The registry's whole view."""
        self.is_registry_known = True
        present = {card.name: card for card in cards}
        for card in present.values():
            self._put(card)
        for name, instance in self.instances.items():
            if name not in present and instance.absent_s is None:
                instance.absent_s = monotonic()
        self.sweep()
        self.on_change()

    def depart(self, name: str, epoch: int) -> None:
        """An instance has unregistered: it is given nothing new, what it has it may finish."""
        instance = self.instances.get(name)
        if instance is not None and instance.card.epoch <= epoch:
            instance.is_leaving = True
            instance.absent_s = monotonic()
            instance.wake()

    def sweep(self) -> None:
        """Drops those that have gone."""
        now_s = monotonic()
        for instance in [each for each in self.instances.values() if _has_gone(each, now_s)]:
            del self.instances[instance.name]
            instance.lose(f"{instance.name} has gone")
            self.on_leave(instance)
            self.on_change()

    def able(self, *roles: Role) -> list[Instance]:
        """Those of these roles that can be given something new."""
        return [each for each in self.instances.values() if each.card.role in roles and each.is_able]

    def missing(self) -> str:
        """Why nothing can be answered now; empty where there is a working pair or an instance for both."""
        able = self.able(*Role)
        if any(each.card.role is Role.BOTH for each in able):
            return ""
        fingerprints = {
            role: {each.card.fingerprint for each in able if each.card.role is role} for role in Role
        }
        prefill, decode = fingerprints[Role.PREFILL], fingerprints[Role.DECODE]
        if prefill & decode:
            return ""
        if prefill and decode:
            return "no prefill and decode instance of the same model (their fingerprints differ)"
        absent = [role.value for role, found in ((Role.PREFILL, prefill), (Role.DECODE, decode)) if not found]
        found = f"no {' and no '.join(absent)} instance is able"
        states = ", ".join(f"{each.name} is {_told(each)}" for each in self.instances.values())
        if not self.is_registry_known:
            return f"{found}: the registry has not answered yet"
        return f"{found}: {states or 'none has registered'}"

    def _put(self, card: Card) -> None:
        known = self.instances.get(card.name)
        try:
            if known is not None:
                if known.renew(card):
                    self.on_anew(known)
                return
            instance = Instance(card)
        except ConfigError as error:
            if self._refused.get(card.name) != card.url:
                log.warning("instance %s is not used: %s", card.name, error)
            self._refused = {**dict(list(self._refused.items())[-100:]), card.name: card.url}
            return
        self.instances[card.name] = instance
        self.on_join(instance)


def _told(instance: Instance) -> str:
    trouble = instance.vitals.trouble
    return f"{instance.state} ({trouble})" if trouble else instance.state


def _has_gone(instance: Instance, now_s: float) -> bool:
    if instance.absent_s is None:
        return False
    if instance.is_leaving:
        return not instance.legs and not instance.vitals.is_healthy
    absent_s = now_s - instance.absent_s
    silent_s = 0.0 if instance.vitals.is_healthy else now_s - instance.vitals.heard_s
    return absent_s > ABSENT_S_MAX or min(absent_s, silent_s) > SILENT_S_MAX


def _nothing(instance: Instance) -> None:
    pass
