"""Proof that a request comes from someone who has the secret, and has not come before.

    Authorization: Baton <time>:<nonce>:<mac>

`time` is seconds since 1970 in decimal, `nonce` 32 hexadecimal digits that are never used twice, and `mac`
the HMAC-SHA256 under the secret, in hexadecimal, of six lines joined by line feeds: the word
baton-registry-1, the method, the request target as it stands in the request line (path and query), the
SHA-256 of the body in hexadecimal, the time and the nonce.

A request is taken within a window of time around the registry's clock, and its nonce is remembered for as
long as its time could be taken again. A registry that starts anew remembers none, so it takes nothing that
was signed before it started.
"""

from __future__ import annotations

import hashlib
import hmac
import re

WINDOW_S = 30.0
NUM_NONCES_MAX = 1_000_000

_HEADER = re.compile(
    r"Baton (?P<time>[0-9]{1,12}(?:\.[0-9]{1,6})?):(?P<nonce>[0-9a-f]{32}):(?P<mac>[0-9a-f]{64})"
)


def sign(secret: bytes, request: tuple[str, str, bytes], now: float, nonce: str) -> str:
    """The Authorization header of a request: method, target and body, at this time."""
    time = f"{now:.6f}"
    return f"Baton {time}:{nonce}:{_mac(secret, request, time, nonce)}"


def _mac(secret: bytes, request: tuple[str, str, bytes], time: str, nonce: str) -> str:
    method, target, body = request
    lines = ("baton-registry-1", method, target, hashlib.sha256(body).hexdigest(), time, nonce)
    # Targets are raw bytes of the wire, which the HTTP parser hands on with surrogates.
    text = "\n".join(lines).encode("utf-8", "surrogateescape")
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


class Verifier:
    """Accepts requests that were signed with the secret, each once."""

    def __init__(self, secret: bytes, started: float, window_s: float = WINDOW_S) -> None:
        self._secret = secret
        self._started = started
        self._window_s = window_s
        # A time can be taken for two windows: a nonce is in one of two sets that take turns of that length.
        self._nonces: tuple[set[str], set[str]] = (set(), set())
        self._turned = started

    def refusal(self, request: tuple[str, str, bytes], header: str | None, now: float) -> str | None:
        """Why a request is not taken, or None; what is taken once is not taken again."""
        if header is None:
            return "no Authorization header; sign the request as docs/registry.md says"
        match = _HEADER.fullmatch(header)
        if match is None:
            return "the Authorization header is not 'Baton time:nonce:mac'; see docs/registry.md"
        wanted = _mac(self._secret, request, match["time"], match["nonce"])
        if not hmac.compare_digest(wanted, match["mac"]):
            return "the MAC does not match; use the registry's secret, and sign the request as it is sent"
        return self._stale(float(match["time"]), now) or self._replayed(match["nonce"], now)

    def _stale(self, time: float, now: float) -> str | None:
        if abs(now - time) > self._window_s:
            return (
                f"the time is {time - now:+.1f} s off the registry's and may be {self._window_s:g} s off; "
                f"set the clocks"
            )
        if time < self._started:
            return "signed before this registry started; sign it again"
        return None

    def _replayed(self, nonce: str, now: float) -> str | None:
        if now - self._turned >= 2 * self._window_s:
            self._nonces = (self._nonces[1], set())
            self._turned = now
        older, newer = self._nonces
        if nonce in older or nonce in newer:
            return "the nonce was used before; make a new one for each request"
        if len(newer) >= NUM_NONCES_MAX:
            return "too many requests within the window of time; send fewer"
        newer.add(nonce)
        return None
