"""The messages between registry and clients, as JSON; a field that the reader does not know is ignored.

A request proves that it comes from someone who has the secret, and has not come before:

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
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from baton.errors import BatonError, LayoutError
from baton.plan.layout import parse_layout

BODY_BYTES_MAX = 16 << 10
TTL_S = 10.0
TTL_S_MAX = 3600.0
BEAT_S = 5.0
"""A watch is never silent for longer."""
BOOT_HEADER = "Baton-Registry"
"""In every answer to someone who proved the secret: which run of the registry it came from."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")
_HOST = r"\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9._-]{1,253}"
_ADDRESS = re.compile(rf"(?P<host>{_HOST}):(?P<port>[1-9][0-9]{{0,4}})")
_URL = re.compile(rf"https?://(?P<host>{_HOST})(?::(?P<port>[1-9][0-9]{{0,4}}))?(?:/[A-Za-z0-9._~/-]*)?")
_FIELD = re.compile(r"(?:at `\$\.|missing required field `)(?P<field>\w+)")

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._:@-]{0,127}\Z"

Name = Annotated[str, Meta(pattern=_NAME)]
Label = Annotated[str, Meta(pattern=r"^[ -~]{1,256}\Z")]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

WANTED = {
    "instance": "1 to 128 of A-Z a-z 0-9 . _ : @ - and begin with a letter, a digit or _",
    "role": "prefill, decode or both",
    "rank": "a whole number from 0, below the number of ranks of the layout",
    "epoch": "a whole number from 0 that grows with each start of the instance",
    "layout": "a layout such as pp2.tp4, of at most 256 characters",
    "coordinator": 'the address of the instance\'s coordinator, as "host:port"',
    "fingerprint": "1 to 256 printable ASCII characters",
    "transport": "1 to 256 printable ASCII characters",
    "url": "empty, or http(s)://host, perhaps with a port and a path, of at most 256 characters",
    "ttl_s": "a number of seconds above 0 and at most 3600",
}


class Refusal(Enum):
    """Why a call came to nothing; the set is closed, the rest is in the error's text."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    UNKNOWN = "unknown"
    DISPLACED = "displaced"
    """A newer epoch of the instance is registered; this one is over."""
    CONFLICT = "conflict"
    TOO_LARGE = "too large"
    TOO_SLOW = "too slow"
    FULL = "full"
    INCOMPLETE = "incomplete"
    UNREACHABLE = "unreachable"
    """Said by clients alone: no answer came, or none that a registry gives."""


class RegistryError(BatonError):
    """A call to the registry came to nothing."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class Role(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of one incarnation of an instance; all but rank and ttl_s is equal on all of its ranks."""

    instance: Name
    role: Role
    rank: Annotated[int, Meta(ge=0)]
    epoch: Number
    layout: Annotated[str, Meta(min_length=1, max_length=256)]
    coordinator: str
    fingerprint: Label
    transport: Label
    url: str = ""
    """Where the instance answers HTTP; empty: nowhere."""
    ttl_s: Annotated[float, Meta(gt=0, le=TTL_S_MAX)] = TTL_S

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that are equal for all members of one epoch."""
        names = ("role", "layout", "coordinator", "fingerprint", "transport", "url")
        return {name: getattr(self, name) for name in names}


class Roster(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as far as it has registered."""

    instance: str
    role: Role
    epoch: int
    layout: str
    coordinator: str
    fingerprint: str
    transport: str
    url: str = ""
    """Where it answers HTTP; empty: nowhere."""
    ranks: tuple[int, ...]
    is_complete: bool


class Missing(msgspec.Struct, frozen=True):
    """Something without which a topology is not complete; no ranks are listed where none registered."""

    instance: str
    ranks: tuple[int, ...]
    reason: str


class Topology(msgspec.Struct, frozen=True):
    """All that is registered, and what is missing; `id` grows with every change and is new with every run."""

    id: str
    instances: tuple[Roster, ...]
    missing: tuple[Missing, ...]

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for is there."""
        return not self.missing


class ChangeKind(Enum):
    """What happened to a member."""

    REGISTERED = "registered"
    UNREGISTERED = "unregistered"
    EXPIRED = "expired"
    DISPLACED = "displaced"


class Change(msgspec.Struct, frozen=True):
    """One step of the topology; `is_complete` is about the member's instance after it."""

    id: str
    what: ChangeKind
    member: Member
    is_complete: bool


class Registered(msgspec.Struct, frozen=True):
    """Answer to a registration; it is new where the registry had not known the member."""

    is_new: bool


class Removed(msgspec.Struct, frozen=True):
    """Answer to a removal; false where there was nothing to remove."""

    is_removed: bool


class Problem(msgspec.Struct, frozen=True):
    """Body of every refusal."""

    refusal: Refusal
    error: str


class Health(msgspec.Struct, frozen=True):
    """Answer of the health check."""

    status: Literal["ok"] = "ok"


def invalid(field: str, value: object) -> RegistryError:
    """The error for a field whose value cannot be used."""
    shown = repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}... ({len(shown)} characters)"
    return RegistryError(Refusal.INVALID, f"{field} must be {WANTED[field]}; found {shown}")


def read_member(body: bytes, **known: Any) -> Member:
    """A member from JSON; `known` are fields that the path gives, which the body may repeat, not change."""
    try:
        raw = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(Refusal.INVALID, f"the body must be JSON in UTF-8: {error}") from None
    if not isinstance(raw, dict):
        raise RegistryError(Refusal.INVALID, f"the body must be a JSON object, found {type(raw).__name__}")
    for field, value in known.items():
        if raw.setdefault(field, value) != value:
            raise RegistryError(
                Refusal.INVALID,
                f"{field} is {value!r} in the path and {str(raw[field])[:100]!r} in the body; "
                f"leave it out of the body, or make them equal",
            )
    return _convert(raw)


def _convert(raw: dict[str, Any]) -> Member:
    try:
        return msgspec.convert(raw, Member)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        if match is None or match["field"] not in WANTED:
            raise RegistryError(Refusal.INVALID, f"the body cannot be read: {error}") from None
        field = match["field"]
    if field not in raw:
        raise RegistryError(
            Refusal.INVALID, f"{field} is missing from the body; it must be {WANTED[field]}"
        ) from None
    raise invalid(field, raw[field]) from None


def read_number(field: str, text: str | None) -> int:
    """A number from a path or a query."""
    if text is None or _NUMBER.fullmatch(text) is None:
        raise invalid(field, text)
    return int(text)


def check_member(member: Member) -> int:
    """Refuses a member whose fields do not fit each other; answers how many ranks its instance has."""
    _convert(msgspec.to_builtins(member))  # a Struct made in Python is not checked on its own
    try:
        num_ranks = parse_layout(member.layout).num_ranks
    except LayoutError as error:
        raise RegistryError(Refusal.INVALID, f"layout cannot be used: {error}") from None
    if member.rank >= num_ranks:
        raise RegistryError(
            Refusal.INVALID,
            f"rank must be 0 to {num_ranks - 1}, the ranks of layout {member.layout}; found {member.rank}",
        )
    address = _ADDRESS.fullmatch(member.coordinator)
    if address is None or int(address["port"]) > 65_535:
        raise invalid("coordinator", member.coordinator)
    check_url(member.url)
    return num_ranks


def check_url(url: str) -> None:
    """Refuses what is neither empty nor where an instance could answer HTTP."""
    match = _URL.fullmatch(url)
    if url and (match is None or len(url) > 256 or int(match["port"] or 0) > 65_535):
        raise invalid("url", url)


def check_instance(instance: str) -> None:
    """Refuses a name that no instance can have."""
    if re.search(_NAME, instance) is None:
        raise invalid("instance", instance)


WINDOW_S = 30.0
NUM_NONCES_MAX = 1_000_000

_HEADER = re.compile(
    r"Baton (?P<time>[0-9]{1,12}(?:\.[0-9]{1,6})?):(?P<nonce>[0-9a-f]{32}):(?P<mac>[0-9a-f]{64})"
)

_SIGN = (
    "send 'Baton time:nonce:mac': seconds since 1970, 32 new hex digits, and the HMAC-SHA256 under the "
    "registry's secret of the lines 'baton-registry-1', method, path with query, SHA-256 of the body, time "
    "and nonce"
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
            return f"no Authorization header; {_SIGN}"
        match = _HEADER.fullmatch(header)
        if match is None:
            return f"the Authorization header is not of its form; {_SIGN}"
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
