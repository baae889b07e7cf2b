"""The target side of a rank: it lets source ranks write, unpacks what landed, and revokes the permissions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from baton.errors import BatonError, ConfigError
from baton.plan import Chunk, Spec
from baton.plan.binding import TransferTerms, bind_target, check_pages, writable
from baton.plan.steps import STAGING
from baton.protocol.machine import Forget
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Close,
    Closed,
    Decline,
    Grant,
    Invite,
    Invited,
    Landed,
    Lane,
    Message,
    Open,
    Opened,
    Path,
    Receive,
    Released,
    Settled,
    UnpackChunk,
    Unpacked,
)
from baton.protocol.outcomes import Stage, Waiting, Why
from baton.protocol.target_rank import TARGET_RANK, RevokePermissions, StartUnpack, TargetRank
from baton.session.config import DriverConfig
from baton.session.handles import Receiving, Request
from baton.session.memory import PageClaims, Pools, StagingLease, tensors
from baton.session.page_tables import encode_pages, terms_of
from baton.session.ports import Ports
from baton.transport import Bytes, Invitation, Ranges, RevokedQuiet, RevokedUnknown, RevokeResult, Transport


class PathGoneError(BatonError):
    """The path that a grant names is no longer there."""


class StagingFullError(BatonError):
    """The staging buffer has no room for a lane."""


@dataclass(slots=True)
class Writer:
    """A source rank that was invited to write."""

    session: int
    source_rank: int
    number: int
    invitation: Invitation
    grants: set[bytes] = field(default_factory=set)
    is_retired: bool = False
    """Replaced by a newer path, or its session ended: it is dropped with its last grant."""
    is_revoked: bool = False
    is_gone: bool = False
    """Revoked, and quiet."""
    is_unchecked: bool = False
    """Reaches every pool by itself: permissions would change nothing, and only revoking it stops it."""


@dataclass(slots=True)
class WriterLease:
    """One lane of a grant: its writer, the permissions at the transport, and the staging."""

    writer: Writer
    permissions: list[int] = field(default_factory=list)
    staging: StagingLease | None = None
    quietness: RevokeResult = field(default_factory=RevokedQuiet)
    """The transport's answer when the permissions were revoked."""


@dataclass(slots=True)
class OpenGrant:
    """One grant at this rank: its machine's record and what the driver keeps beside it."""

    record: TargetRank
    leases: dict[int, WriterLease]
    """By source rank."""
    terms: TransferTerms | None = None
    """Set when it is opened."""


class TargetWriters:
    """Every transfer that this rank receives, and the source ranks that may write here."""

    def __init__(
        self,
        config: DriverConfig,
        ports: Ports,
        transport: Transport,
        pools: Pools,
        peers: Mapping[int, Spec],
        send: Callable[[Message], None],
    ) -> None:
        self.config = config
        self.ports = ports
        self.transport = transport
        self.pools = pools
        self.peers = peers
        """The specs of source instances, by session."""
        self.send = send
        """Sends to the coordinator."""
        self.receiving: dict[str, Receiving] = {}
        self.grants: dict[bytes, OpenGrant] = {}
        self.writers: dict[int, Writer] = {}
        self.claims = PageClaims(config.spec)
        self._num_writers = 0

    # Calls of the engine.

    def begin(self, receiving: Receiving, request: Request) -> None:
        """Asks for a transfer; its pages are named once the device work of their last owner is done."""
        if receiving.transfer in self.receiving:
            text = f"transfer {receiving.transfer} is live on this rank; take a new id for each attempt"
            self._refuse(receiving, Why.REFUSED_LIVE_ID, text)
            return
        self.receiving[receiving.transfer] = receiving
        if receiving.claim is None:
            # The id was live when the engine called, and no longer is.
            try:
                receiving.claim = self.claims.take(request)
            except ConfigError as error:
                del self.receiving[receiving.transfer]
                self._refuse(receiving, Why.OUT_OF_PAGES, str(error))
                return
        call = partial(self._ask, receiving, request)
        request.fence.call_when_ready(lambda: self.ports.post(call))

    def _ask(self, receiving: Receiving, request: Request) -> None:
        if self.receiving.get(receiving.transfer) is not receiving:
            return
        receiving.is_asked = True
        self.send(
            Receive(
                transfer=request.transfer,
                source=request.source,
                num_tokens=request.digest.num_tokens,
                digest=request.digest.value,
                tables={rank: encode_pages(table) for rank, table in request.pages.items()},
                held=dict(request.held),
                source_dp=-1 if request.source_dp is None else request.source_dp,
                is_verified=request.is_verified,
                progress_s=request.progress_s or 0.0,
            )
        )

    def abort(self, receiving: Receiving, text: str) -> None:
        """The engine gave up."""
        if self.receiving.get(receiving.transfer) is not receiving:
            return
        cause = self.config.cause(Why.ABORTED, Stage.GRANT, text or "given up at the target")
        self.send(Abort(transfer=receiving.transfer, grant=b"", cause=cause))
        if not receiving.is_asked:
            # The coordinator knows neither its pages nor the source that may be waiting for them.
            self.send(Decline(transfer=receiving.transfer, source=receiving.source, cause=cause))
            del self.receiving[receiving.transfer]
            self._unclaim(receiving)
            receiving.refuse(cause)

    def _refuse(self, receiving: Receiving, why: Why, text: str) -> None:
        self._unclaim(receiving)
        receiving.refuse(self.config.cause(why, Stage.GRANT, text))

    def _unclaim(self, receiving: Receiving) -> None:
        if receiving.claim is not None:
            self.claims.give_back(receiving.claim)

    # The outcome of a transfer, from the coordinator.

    def aux_came(self, message: AuxRecord) -> None:
        """The aux record is there, the pages may not be."""
        receiving = self.receiving.get(message.transfer)
        if receiving is not None and isinstance(receiving.state, Waiting):
            receiving.early = message.aux
            receiving.on_change(receiving)

    def settled(self, message: Settled) -> None:
        """The verdict."""
        if receiving := self.receiving.get(message.transfer):
            receiving.conclude(message.outcome)

    def released(self, message: Released) -> None:
        """The pages are the engine's."""
        receiving = self.receiving.get(message.transfer)
        # A rank that asked too late for this message gets the verdict first, and then this message again.
        if receiving is not None and not isinstance(receiving.state, Waiting):
            del self.receiving[message.transfer]
            self._unclaim(receiving)
            receiving.release()

    # Writers.

    def invite(self, message: Invite) -> None:
        """Admits source ranks; their older paths are retired."""
        regions = {name: region.remote.to_bytes() for name, region in self.pools.regions.items()}
        paths = []
        for source_rank in message.source_ranks:
            for writer in self.writers.values():
                if (writer.session, writer.source_rank) == (message.session, source_rank):
                    writer.is_retired = True
            invitation = self.transport.invite()
            self._num_writers += 1
            writer = Writer(message.session, source_rank, self._num_writers, invitation)
            self.writers[writer.number] = writer
            described = invitation.description.to_bytes()
            paths.append(Path(writer.number, source_rank, self.config.rank, described, regions))
        self.send(Invited(session=message.session, paths=tuple(paths)))
        self._drop_retired()

    def session_closed(self, session: int) -> None:
        """No source rank of a session may write any more."""
        for writer in self.writers.values():
            if writer.session == session:
                writer.is_retired = True
                self._revoke(writer)
        self._drop_retired()

    def _drop_retired(self) -> None:
        """Revokes retired writers without grants, and drops those that are quiet."""
        for writer in list(self.writers.values()):
            if writer.is_retired and not writer.grants:
                self._revoke(writer)
                if writer.is_gone:
                    del self.writers[writer.number]

    def _revoke(self, writer: Writer) -> RevokeResult:
        if writer.is_gone:
            return RevokedQuiet()
        writer.is_revoked = True
        answer = self.transport.revoke(writer.invitation.peer)
        writer.is_gone = isinstance(answer, RevokedQuiet)
        return answer

    # A grant is opened.

    def open(self, message: Open) -> None:
        """Lets the lanes of a grant write."""
        grant, rank = message.grant, self.config.rank
        # Recorded first, with every writer that the grant may have reached ahead of this message: whatever
        # fails from here on, closing revokes them. A writer that was dropped was quiet.
        opened = self.grants[grant.grant] = self._expect(grant)
        try:
            opened.terms = self.agree(grant)
            leased = tuple(self._open_lane(opened, opened.terms, lane) for lane in grant.lanes)
        except BatonError as error:
            why = Why.OUT_OF_PAGES if isinstance(error, StagingFullError) else Why.REFUSED_LAYOUT
            cause = self.config.cause(why, Stage.GRANT, str(error))
            self.send(Opened(grant=grant.grant, rank=rank, cause=cause))
            return
        self.send(Opened(grant=grant.grant, rank=rank, lanes=leased))

    def _expect(self, grant: Grant) -> OpenGrant:
        writers = {lane.source_rank: self.writers.get(lane.path) for lane in grant.lanes}
        leases = {source: WriterLease(writer) for source, writer in writers.items() if writer is not None}
        for lease in leases.values():
            lease.writer.grants.add(grant.grant)
        return OpenGrant(TargetRank(grant.grant, self.config.rank), leases)

    def agree(self, grant: Grant) -> TransferTerms:
        """The terms of a grant; raises where this rank's pages are not what its plan needs."""
        terms = terms_of(grant, self.peers.get(grant.session), self.config.spec)
        check_pages(terms.plan, terms.prompt, terms.tables[self.config.rank], self.config.rank)
        return terms

    def _open_lane(self, opened: OpenGrant, terms: TransferTerms, lane: Lane) -> Lane:
        lease = opened.leases.get(lane.source_rank)
        if lease is None or lease.writer.is_gone:
            raise PathGoneError(f"path {lane.path} of rank {lane.source_rank} is gone")
        if lease.writer.is_unchecked and not lane.staging_bytes:
            return lane
        pools, peer = self.pools, lease.writer.invitation.peer
        for buffer, (starts, lengths) in writable(terms, lane.source_rank, lane.target_rank).items():
            permission = self.transport.grant(peer, pools.regions[buffer], Ranges(starts, lengths))
            lease.permissions.append(permission)
        if not lane.staging_bytes:
            return lane
        lease.staging = pools.staging.lease(lane.staging_bytes)
        if lease.staging is None:
            raise StagingFullError(
                f"converting the KV cache of this prompt needs {lane.staging_bytes} bytes of staging, and "
                f"{pools.staging.free_bytes} of {pools.staging.num_bytes} are free; give the target more "
                "(staging_bytes, or --staging-mb of baton serve)"
            )
        staged = Ranges(np.array([lease.staging.offset]), np.array([lease.staging.num_bytes]))
        lease.permissions.append(self.transport.grant(peer, pools.regions[STAGING], staged))
        return msgspec.structs.replace(lane, staging_offset=lease.staging.offset)

    # Chunks are unpacked, and the grant is closed.

    def unpack(self, message: UnpackChunk) -> None:
        """A chunk is complete, and has to be unpacked or checked."""
        if opened := self.grants.get(message.grant):
            self._feed(opened, message)

    def close(self, message: Close) -> None:
        """A grant is over."""
        opened = self.grants.get(message.grant)
        if opened is None:
            # Closed before, or never opened: nothing can be written under it.
            self.send(Closed(grant=message.grant, rank=self.config.rank, is_quiet=True))
            return
        self._feed(opened, message)

    def _feed(self, opened: OpenGrant, event: Message) -> None:
        opened.record, effects = TARGET_RANK.step(opened.record, event, self.ports.now())
        for effect in effects:
            match effect:
                case StartUnpack(landed):
                    self.ports.run(
                        partial(self._unpack, opened, landed), partial(self._unpacked, opened, landed)
                    )
                case RevokePermissions(must_prove_quiet):
                    self._feed(opened, self._take_back(opened, must_prove_quiet))
                case Forget():
                    self._forget(opened)
                case Message():
                    self.send(effect)
                case _:
                    raise AssertionError(f"no such effect: {effect}")

    def _unpack(self, opened: OpenGrant, landed: Landed) -> str:
        """On a worker: checks and unpacks a chunk; returns what is wrong with it, or an empty text."""
        rank, pools = self.config.rank, self.pools
        assert opened.terms is not None, "nothing is unpacked under a grant that was not opened"
        unload = bind_target(opened.terms, landed.source_rank, rank, Chunk(landed.layers, landed.tokens))
        staged: Bytes | None = None
        if unload.staging_bytes:
            lease, start = opened.leases[landed.source_rank].staging, landed.staged.get(rank, -1)
            if lease is None or not 0 <= start <= lease.num_bytes - unload.staging_bytes:
                return f"{unload.staging_bytes} bytes to unpack do not fit at {start} of the lease"
            staged = pools.view(lease.offset + start, unload.staging_bytes)
        if unload.sums:
            sent = landed.checksums.get(rank, {})
            sums = tensors().checksums(unload.sums, pools.buffers, staged)
            wrong = [name for name, value in sums.items() if sent.get(name) != value]
            if wrong:
                return f"checksum of {', '.join(wrong)} differs from the source's"
        if staged is not None:
            tensors().run_unpacks(unload.unpacks, staged, pools.buffers)
        return ""

    def _unpacked(self, opened: OpenGrant, landed: Landed, result: object) -> None:
        # An exception or a text says what went wrong.
        cause = self.config.cause(Why.CORRUPTED, Stage.COPY, str(result)) if result else None
        unpacked = Unpacked(
            grant=opened.record.grant,
            rank=self.config.rank,
            source_rank=landed.source_rank,
            chunk=landed.chunk,
            cause=cause,
        )
        self._feed(opened, unpacked)

    def _take_back(self, opened: OpenGrant, must_prove_quiet: bool) -> Closed:
        """Takes every permission back; where that does not prove quiet, revokes the writer."""
        doubts = []
        for lease in opened.leases.values():
            answer = self._ungrant(lease)
            if must_prove_quiet and (lease.writer.is_unchecked or isinstance(answer, RevokedUnknown)):
                answer = self._revoke(lease.writer)
            if isinstance(answer, RevokedUnknown):
                doubts.append(f"rank {lease.writer.source_rank}: {answer.cause}")
        return Closed(
            grant=opened.record.grant,
            rank=self.config.rank,
            is_quiet=not doubts,
            text="; ".join(doubts),
            unchecked=self._note_unchecked(opened),
        )

    def _note_unchecked(self, opened: OpenGrant) -> tuple[int, ...]:
        """The paths of writers that have come to reach every pool by themselves."""
        pools = [region for name, region in self.pools.regions.items() if name != STAGING]
        paths = []
        for writer in [lease.writer for lease in opened.leases.values() if not lease.writer.is_unchecked]:
            peer = writer.invitation.peer
            writer.is_unchecked = all(self.transport.is_unchecked(peer, region) for region in pools)
            paths += [writer.number] if writer.is_unchecked else []
        return tuple(paths)

    def _ungrant(self, lease: WriterLease) -> RevokeResult:
        """Takes a lane's permissions back, once; a revoked writer has none left."""
        if lease.writer.is_revoked:
            return self._revoke(lease.writer)
        for permission in lease.permissions:
            answer = self.transport.ungrant(lease.writer.invitation.peer, permission)
            lease.quietness = answer if isinstance(answer, RevokedUnknown) else lease.quietness
        lease.permissions.clear()
        return lease.quietness

    def _forget(self, opened: OpenGrant) -> None:
        del self.grants[opened.record.grant]
        for lease in opened.leases.values():
            lease.writer.grants.discard(opened.record.grant)
            if lease.staging is not None:
                self.pools.staging.give_back(lease.staging)
        self._drop_retired()

    def counts(self) -> dict[str, int]:
        """Transfers, grants and writers."""
        return {
            "receiving": len(self.receiving),
            "grants": len(self.grants),
            "writers": len(self.writers),
        }
