"""What Baton's router and its instances say to each other in a request's body, in the field `baton`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Resumed(msgspec.Struct, frozen=True):
    """An answer that goes on: which choice, and the tokens that were streamed already."""

    index: Annotated[int, Meta(ge=0)]
    tokens: tuple[int, ...]


class Private(msgspec.Struct, frozen=True, omit_defaults=True):
    """Honoured from whoever may name a bootstrap room, ignored from anybody else."""

    id: Annotated[str, Meta(pattern=r"^[\w.:-]{0,128}$")] = ""
    """Of the response, the same on every attempt."""
    created: Annotated[int, Meta(ge=0, le=2**53)] = 0
    tokens: bool = False
    """Whether a note (baton.web.events) goes before each data event."""
    resume: tuple[Resumed, ...] = ()
    """One job each, at their choice's index; all other choices are done."""
    done: dict[Annotated[int, Meta(ge=0, le=2**31)], Annotated[int, Meta(ge=0, le=2**31)]] = {}
    """By choice that was finished before: how many tokens it had, for the usage."""
    first_token: Literal["", "prefill", "decode"] = ""
    """Whose first token is streamed; empty: as the instance was started."""
