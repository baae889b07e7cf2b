"""How a transfer ends, and why: the words that reach both sides and the caller."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec


class Why(Enum):
    """What a failure was; the set is closed, the detail is in the cause's text."""

    PEER_LOST = "peer lost"
    COPY_FAILED = "copy failed"
    DEADLINE = "deadline passed"
    ABORTED = "aborted"
    REFUSED_LAYOUT = "refused (layout)"
    REFUSED_VERSION = "refused (version)"
    REFUSED_AUTHENTICATION = "refused (authentication)"
    REFUSED_PROMPT = "refused (prompt)"
    REFUSED_LIVE_ID = "refused (live id)"
    CORRUPTED = "corrupted"
    OUT_OF_PAGES = "out of pages"


class Stage(Enum):
    """How far a transfer had come."""

    HANDSHAKE = "handshake"
    OFFER = "offer"
    GRANT = "grant"
    COPY = "copy"
    COMMIT = "commit"


class Cause(msgspec.Struct, frozen=True):
    """One failure: what, at which stage, on which instance and rank (-1: its coordinator), in words."""

    why: Why
    stage: Stage
    instance: str = ""
    rank: int = -1
    text: str = ""

    def __str__(self) -> str:
        who = self.instance or "this instance"
        place = f"{who} rank {self.rank}" if self.rank >= 0 else who
        tail = f": {self.text}" if self.text else ""
        return f"{self.why.value} at {self.stage.value} on {place}{tail}"


class Aux(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decoding needs beside the cache, by name; goes once, from the rank that sampled."""

    tokens: tuple[int, ...] = ()
    """The first token, or those that speculation accepted."""
    logprobs: tuple[dict[int, float], ...] = ()
    """By token of `tokens`: the log-probabilities that were asked for, its own among them."""
    cached_tokens: int = 0
    tensors: dict[str, bytes] = {}
    """Speculative hidden states and the like, in the form that the two engines agree on."""
    fields: dict[str, str | int | float | bool] = {}


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Every rank's ledger is full and the aux record is there: the cache may be used."""

    aux: Aux


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The answer ended at the source; there is nothing to decode."""

    aux: Aux


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The hand-over did not happen."""

    cause: Cause


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """Nothing is decided yet."""


Outcome: TypeAlias = Ready | Finished | Failed
State: TypeAlias = Waiting | Outcome
WAITING = Waiting()
