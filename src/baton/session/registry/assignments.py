"""The dp groups that a client was given, told again to a registry that has forgotten them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from baton.session.registry.backoff import Backoff
from baton.session.registry.deadlines import Deadlines
from baton.session.registry.messages import Assigned, Refusal, RegistryError, Wish

RETRY_S_FIRST = 0.1
RETRY_S_MAX = 2.0

log = logging.getLogger(__name__)
Key: TypeAlias = tuple[str, str]
"""Instance and transfer."""


class Assignments:
    """What was assigned and neither released nor outlived."""

    def __init__(self) -> None:
        self._wishes: dict[Key, Wish] = {}
        self._deadlines: Deadlines[Key] = Deadlines()

    def add(self, key: Key, assigned: Assigned, ttl_s: float, now: float) -> None:
        """Remembers an answer as the wish that would bring it about again."""
        self._expire(now)
        self._wishes[key] = Wish(assigned.dp, ttl_s, assigned.epoch)
        self._deadlines.set(key, now + ttl_s)

    def drop(self, key: Key) -> None:
        """Forgets it."""
        self._wishes.pop(key, None)
        self._deadlines.drop(key)

    async def tell_again(self, tell: Callable[[Key, Wish], Awaitable[object]]) -> None:
        """Tells the registry all of them; one whose instance is not back yet is tried until it is."""
        backoff = Backoff(RETRY_S_FIRST, RETRY_S_MAX)
        left = set(self._wishes)
        while left:
            for key in sorted(left):
                if await self._is_told(key, tell):
                    left.discard(key)
            if left:
                await asyncio.sleep(backoff.next())

    async def _is_told(self, key: Key, tell: Callable[[Key, Wish], Awaitable[object]]) -> bool:
        self._expire(asyncio.get_running_loop().time())
        wish = self._wishes.get(key)
        if wish is None:
            return True
        try:
            await tell(key, wish)
        except RegistryError as error:
            if error.refusal in (Refusal.UNKNOWN, Refusal.UNREACHABLE, Refusal.UNAUTHENTICATED, Refusal.FULL):
                return False
            log.warning("transfer %r of instance %r was not recorded again: %s", key[1], key[0], error)
            self.drop(key)
        return True

    def _expire(self, now: float) -> None:
        for key in self._deadlines.pop_due(now):
            del self._wishes[key]
