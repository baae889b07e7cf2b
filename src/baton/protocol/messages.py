"""Everything that crosses a control link.

Two kinds of link exist. A *session* link joins the coordinators of two instances; a *member* link joins a
rank to its own coordinator. Ranks of different instances never exchange messages: all control goes through
coordinators, so one place orders it and one place decides.

Messages are maps with field names. A receiver ignores fields that it does not know, unless the sender named
them in `needs`: then it refuses the message.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from baton.protocol.outcomes import Aux, Cause, Failed, Finished, Ready

VERSION_MIN = 3
VERSION_MAX = 3

Span: TypeAlias = tuple[int, int]
PageTable: TypeAlias = dict[str, bytes]
"""Page ids by group, as little-endian 32-bit integers."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type"):
    """Base of every message. `needs` names fields that the receiver has to know."""

    needs: tuple[str, ...] = ()


# The handshake, on every link, dialler first. No address, spec or description is in it before `Proof` held.


class Hello(Message, frozen=True, tag="hello"):
    """Dialler: its versions, its name, and the purpose of the link."""

    version_min: int
    version_max: int
    nonce: bytes
    purpose: str
    """`session` or `member`."""
    instance: str
    epoch: int
    rank: int = -1


class Challenge(Message, frozen=True, tag="challenge"):
    """Acceptor: the version taken and a nonce to prove the secret over."""

    version: int
    nonce: bytes
    instance: str
    epoch: int


class Proof(Message, frozen=True, tag="proof"):
    """Dialler: a MAC of both nonces and names under the shared secret."""

    mac: bytes


class Accepted(Message, frozen=True, tag="accepted"):
    """Acceptor: its own MAC, and the id of the channel that both sides now have."""

    mac: bytes
    channel: bytes


class Refused(Message, frozen=True, tag="refused"):
    """Either side: why there will be no session; the link closes after it."""

    cause: Cause


# First message of either side once the channel is established.


class Introduction(Message, frozen=True, tag="introduction"):
    """An instance (or a rank to its coordinator): what it caches and how."""

    instance: str
    epoch: int
    fingerprint: str
    """Of config and weights; unequal fingerprints cannot exchange caches."""
    spec: bytes
    """Layout, cache and storage, as `baton.plan.wire` writes them."""
    transport: str
    rank: int = -1


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The instance ends, or closes this link."""

    cause: Cause


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The sender is alive."""


# Session links, target to source.


class GroupQuery(Message, frozen=True, tag="group?"):
    """Which dp group has this transfer? Answered by an Offer as soon as that is known."""

    transfer: str


class Path(msgspec.Struct, frozen=True):
    """One data connection: with this description a source rank may write to a target rank."""

    number: int
    source_rank: int
    target_rank: int
    description: bytes
    regions: dict[str, bytes]
    """RemoteRegion by buffer name, staging among them."""


class Paths(Message, frozen=True, tag="paths"):
    """Connections that later grants will name; a newer one of a pair replaces the older."""

    paths: tuple[Path, ...]


class Lane(msgspec.Struct, frozen=True):
    """How one pair of ranks moves one transfer: over which path, packed or not, into which staging."""

    source_rank: int
    target_rank: int
    path: int
    mode: str = "direct"
    """`direct`, `convert` (copied into target staging, dtype changed there) or `pack`."""
    staging_offset: int = 0
    staging_bytes: int = 0


class Grant(Message, frozen=True, tag="grant"):
    """Permission to write, for one attempt of one transfer, on one channel."""

    transfer: str
    grant: bytes
    channel: bytes
    num_tokens: int
    digest: bytes
    source_dp: int
    target_dp: int
    held: dict[str, int]
    offset: int
    tables: dict[int, PageTable]
    """By target rank."""
    lanes: tuple[Lane, ...]
    is_verified: bool = False
    progress_s: float = 0.0
    """The progress deadline that a rank of the target named; 0: none did."""
    session: int = -1
    """On member links: which session of the coordinator it came over."""


class QuietQuery(Message, frozen=True, tag="quiet?"):
    """Is this grant quiet? Answered as soon as it is, also for a grant that is not known."""

    grant: bytes


class Settled(Message, frozen=True, tag="settled"):
    """The target's verdict; also coordinator to rank on member links of either side."""

    transfer: str
    grant: bytes
    outcome: Ready | Finished | Failed


# Session links, source to target; the same go from a source rank to its coordinator.


class Offer(Message, frozen=True, tag="offer"):
    """This transfer is being prefilled here."""

    transfer: str
    num_tokens: int
    digest: bytes
    source_dp: int
    source_rank: int = -1
    """On member links: which rank offers it."""
    progress_s: float = 0.0
    """The progress deadline that the rank named, or a rank of the source; 0: none did."""
    is_queued: bool = False
    """Whether the engine has it in its queue, and has not begun to prefill it."""


class Landed(Message, frozen=True, tag="landed"):
    """Every copy of one chunk of one source rank is done."""

    transfer: str
    grant: bytes
    source_rank: int
    chunk: int
    layers: Span
    tokens: Span
    staged: dict[int, int] = {}
    """By target rank: where in its staging lease the chunk lies, if it has to be unpacked."""
    checksums: dict[int, dict[str, bytes]] = {}
    """By target rank and component, in canonical order and the wire's dtype."""


class Commit(Message, frozen=True, tag="commit"):
    """A source rank has sent everything and is quiet."""

    transfer: str
    grant: bytes
    source_rank: int
    num_chunks: int
    num_bytes: dict[int, dict[str, int]]
    """By target rank and component."""


class AuxRecord(Message, frozen=True, tag="aux"):
    """The aux record; `is_final` when the answer ended at the source.

    The target's coordinator forwards one that is not final to the ranks that asked, ahead of the verdict.
    """

    transfer: str
    grant: bytes
    aux: Aux
    is_final: bool = False


class Quiet(Message, frozen=True, tag="quiet"):
    """No copy under this grant is under way and none will begin; final."""

    transfer: str
    grant: bytes
    source_rank: int = -1


class Unquiet(Message, frozen=True, tag="unquiet"):
    """The source cannot say that this grant is quiet; the target has to prove it at its transport."""

    transfer: str
    grant: bytes
    source_rank: int = -1
    text: str = ""


class OutcomeQuery(Message, frozen=True, tag="outcome?"):
    """How did the transfer under this grant end?"""

    grant: bytes


# Either direction.


class Abort(Message, frozen=True, tag="abort"):
    """This transfer failed here (or its caller gave it up); `grant` is empty before there is one."""

    transfer: str
    grant: bytes
    cause: Cause
    source_rank: int = -1


class Queued(Message, frozen=True, tag="queued"):
    """The sender's engine has this transfer in its queue, and the queue moves; repeated while that is so.

    From a target it also means that there is no room yet; the source's coordinator tells its ranks.
    """

    transfer: str
    source: str = ""
    """On member links of a target: whom to tell."""


# Member links, coordinator to rank.


class SessionOpened(Message, frozen=True, tag="session-opened"):
    """A session came up: plans with this peer are made from this spec."""

    session: int
    spec: bytes


class SessionClosed(Message, frozen=True, tag="session-closed"):
    """A session ended: drop its paths; a target rank revokes them."""

    session: int


class SessionPaths(Message, frozen=True, tag="session-paths"):
    """Paths of a session, for a source rank."""

    session: int
    paths: tuple[Path, ...]


class Invite(Message, frozen=True, tag="invite"):
    """Target rank: admit these source ranks of a session."""

    session: int
    source_ranks: tuple[int, ...]


class Open(Message, frozen=True, tag="open"):
    """Target rank: let these lanes write the pages of this grant."""

    grant: Grant


class UnpackChunk(Message, frozen=True, tag="unpack"):
    """Target rank: a staged (or verified) chunk is complete; unpack or check it."""

    grant: bytes
    landed: Landed


class Close(Message, frozen=True, tag="close"):
    """Target rank: revoke the permissions of a grant, after running unpacks; prove quiet if asked."""

    grant: bytes
    must_prove_quiet: bool


class Released(Message, frozen=True, tag="released"):
    """The pages of a transfer are the engine's again."""

    transfer: str


# Member links, rank to coordinator.


class Receive(Message, frozen=True, tag="receive"):
    """An engine asks for a transfer, with the pages of one or more ranks."""

    transfer: str
    source: str
    num_tokens: int
    digest: bytes
    tables: dict[int, PageTable]
    held: dict[str, int]
    source_dp: int = -1
    """-1: the source says."""
    is_verified: bool = False
    progress_s: float = 0.0


class Decline(Message, frozen=True, tag="decline"):
    """An engine cannot take a transfer; the coordinator tells its source."""

    transfer: str
    source: str
    cause: Cause


class Invited(Message, frozen=True, tag="invited"):
    """Answer to Invite: new paths (their numbers count per target rank)."""

    session: int
    paths: tuple[Path, ...]


class Opened(Message, frozen=True, tag="opened"):
    """Answer to Open: the lanes as leased, or why not."""

    grant: bytes
    rank: int
    lanes: tuple[Lane, ...] = ()
    cause: Cause | None = None


class Unpacked(Message, frozen=True, tag="unpacked"):
    """Answer to UnpackChunk: done, or why not."""

    grant: bytes
    rank: int
    source_rank: int
    chunk: int
    cause: Cause | None = None


class Closed(Message, frozen=True, tag="closed"):
    """Answer to Close."""

    grant: bytes
    rank: int
    is_quiet: bool
    text: str = ""
    unchecked: tuple[int, ...] = ()
    """Paths whose source reaches this rank's pools by itself from now on: later grants need not wait."""
