"""Who calls: a client with an API key, or a router that knows the instances' secret."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.web.binding import is_loopback
from baton.web.problems import Problem

_ROUTER = b"baton router key 1"
_ELSEWHERE = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Origin")
"""Headers of a request that a proxy or a browser on this machine passes on for somebody else."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from, as far as it was proved."""

    is_router: bool = False
    is_loopback: bool = False

    @property
    def is_trusted(self) -> bool:
        """Whether it may name bootstrap rooms and drain an instance."""
        return self.is_router or self.is_loopback


def router_key(secret: bytes) -> str:
    """The key that a router shows to instances: only who has the control-plane secret can make it."""
    return hmac.new(secret, _ROUTER, hashlib.sha256).hexdigest()


class Credentials:
    """The keys that a server accepts; without API keys anybody may ask, and nobody is trusted for it."""

    def __init__(self, api_keys: Sequence[str] = (), secret: bytes | None = None) -> None:
        self._keys = tuple(_digest(key) for key in api_keys)
        self._router = None if secret is None else _digest(router_key(secret))

    @property
    def has_api_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str], address: str | None) -> Caller:
        """Who this is; a Problem with status 401 where a key is needed and none, or a wrong one, came."""
        is_near = is_loopback(address) and not any(name in headers for name in _ELSEWHERE)
        return Caller(self.check(headers.get("Authorization", "")), is_near)

    def check(self, authorization: str) -> bool:
        """Whether a router calls; a Problem where a key is needed and this header has no good one."""
        if not authorization and not self._keys:
            return False
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip() if scheme.lower() == "bearer" else "")
        is_router = self._router is not None and hmac.compare_digest(shown, self._router)
        # Every key is compared, so that the time says nothing of which one was nearly right.
        matches = [hmac.compare_digest(shown, known) for known in self._keys]
        if self._keys and not is_router and not any(matches):
            what = "is not a known API key" if key else "is missing"
            raise Problem(
                401,
                f"the key in the Authorization header {what}; send 'Authorization: Bearer KEY'",
                param="Authorization",
                code="invalid_api_key",
            )
        return is_router


def _digest(key: str) -> bytes:
    # Digests have one length, so that comparing them does not tell the length of a key.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
