"""Where one attempt goes, and what it counts as while it is under way."""

from __future__ import annotations

import msgspec

from baton.router.instances import Instance


class Route(msgspec.Struct, frozen=True):
    """Who answers, and who prefills for it; alone where nobody does."""

    server: Instance
    prefill: Instance | None
    why_local: str
    """Why it is not handed over; empty where it is."""
    server_tokens: int
    prefill_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the instances."""
        return (self.server.name,) if self.prefill is None else (self.server.name, self.prefill.name)

    def take(self) -> None:
        """It begins."""
        _count(self.server, 1, self.server_tokens)
        self.server.num_local_tokens += self._local_tokens
        if self.prefill is not None:
            _count(self.prefill, 1, self.prefill_tokens)

    def release_server(self) -> None:
        """The leg that answers is over."""
        _count(self.server, -1, -self.server_tokens)

    def prefilled(self) -> None:
        """The first token is there, or will not come: a local prefill stalls nobody any more."""
        self.server.num_local_tokens -= self._local_tokens

    def release_prefill(self) -> None:
        """The leg that prefills is over."""
        if self.prefill is not None:
            _count(self.prefill, -1, -self.prefill_tokens)

    @property
    def _local_tokens(self) -> int:
        return self.prefill_tokens if self.why_local in ("short", "cached") else 0


def _count(instance: Instance, num_requests: int, num_tokens: int) -> None:
    instance.num_in_flight += num_requests
    instance.num_tokens += num_tokens
