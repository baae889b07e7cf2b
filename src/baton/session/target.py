"""The target half of a rank: it lets peers write, unpacks what landed, and takes the permissions back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from baton.errors import BatonError, ConfigError
from baton.plan import Chunk, Prompt
from baton.plan.binding import TransferTerms, bind_target, check_pages, writable
from baton.plan.steps import STAGING
from baton.protocol.landing import (
    LANDING,
    CloseAsked,
    FreeStaging,
    JobEnded,
    Landing,
    StartUnpack,
    TakeBack,
    TakenBack,
    Tell,
    UnpackAsked,
)
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
    Open,
    Opened,
    Path,
    Receive,
    Released,
    Settled,
    Unpack,
)
from baton.protocol.outcomes import Cause, Stage, Waiting, Why
from baton.session.claims import Claims
from baton.session.guests import Bay, Guest, Incoming, PathGoneError, StagingFullError
from baton.session.handles import Receiving
from baton.session.moving import checksums, run_unpacks
from baton.session.page_tables import decode_tables, encode_pages
from baton.session.requests import Request
from baton.transport import Bytes, Quiet, Ranges, RevokeResult, Unknown

if TYPE_CHECKING:
    from baton.session.rank import RankDriver


class TargetHalf:
    """Every transfer that this rank receives."""

    def __init__(self, rank: RankDriver) -> None:
        self.rank = rank
        self.receiving: dict[str, Receiving] = {}
        self.incoming: dict[bytes, Incoming] = {}
        self.guests: dict[int, Guest] = {}
        self.claims = Claims(rank.config.spec)
        self._num_guests = 0

    # Calls of the engine.

    def unclaim(self, receiving: Receiving) -> None:
        """The pages of a request may be named again."""
        if receiving.claim is not None:
            self.claims.give_back(receiving.claim)

    def begin(self, receiving: Receiving, request: Request) -> None:
        """A transfer is asked for; its pages are named once the device work of their last owner is done."""
        if receiving.transfer in self.receiving:
            text = f"transfer {receiving.transfer} is live on this rank; take a new id for each attempt"
            self.rank.refuse(receiving, self.rank.cause(Why.REFUSED_LIVE_ID, Stage.GRANT, text))
            return
        self.receiving[receiving.transfer] = receiving
        receiving.source = request.source
        if receiving.claim is None and not self._claim_late(receiving, request):
            return
        call = partial(self._ask, receiving, request)
        request.fence.call_when_ready(lambda: self.rank.ports.post(call))

    def _claim_late(self, receiving: Receiving, request: Request) -> bool:
        """The id was live when the engine called, and no longer is: its pages are claimed now if possible."""
        try:
            receiving.claim = self.claims.take(request)
        except ConfigError as error:
            del self.receiving[receiving.transfer]
            self.rank.refuse(receiving, self.rank.cause(Why.OUT_OF_PAGES, Stage.GRANT, str(error)))
            return False
        return True

    def _ask(self, receiving: Receiving, request: Request) -> None:
        if self.receiving.get(receiving.transfer) is not receiving:
            return
        message = Receive(
            transfer=request.transfer,
            source=request.source,
            num_tokens=request.digest.num_tokens,
            digest=request.digest.value,
            tables={rank: encode_pages(table) for rank, table in request.pages.items()},
            held=dict(request.held),
            source_dp=-1 if request.source_dp is None else request.source_dp,
            is_verified=request.is_verified,
        )
        receiving.is_asked = True
        self.rank.tell(message)

    def abort(self, receiving: Receiving, text: str) -> None:
        """The engine gave up."""
        if self.receiving.get(receiving.transfer) is not receiving:
            return
        cause = self.rank.cause(Why.ABORTED, Stage.GRANT, text or "given up at the target")
        self.rank.tell(Abort(transfer=receiving.transfer, grant=b"", cause=cause))
        if not receiving.is_asked:
            # Nobody has heard of its pages yet, nor of the source that may be waiting for them.
            self.rank.tell(Decline(transfer=receiving.transfer, source=receiving.source, cause=cause))
            del self.receiving[receiving.transfer]
            self.rank.refuse(receiving, cause)

    def aux_came(self, message: AuxRecord) -> None:
        """The aux record is there, the pages may not be."""
        receiving = self.receiving.get(message.transfer)
        if receiving is not None and isinstance(receiving.state, Waiting):
            receiving.early = message.aux
            self.rank.on_change(receiving)

    def settled(self, message: Settled) -> None:
        """The verdict."""
        if receiving := self.receiving.get(message.transfer):
            self.rank.conclude(receiving, message.outcome)

    def released(self, message: Released) -> None:
        """The pages are the engine's."""
        receiving = self.receiving.get(message.transfer)
        # One that asked too late for this word gets the verdict first, and the word again.
        if receiving is not None and not isinstance(receiving.state, Waiting):
            del self.receiving[message.transfer]
            self.rank.release(receiving)

    # Words of the coordinator.

    def invite(self, message: Invite) -> None:
        """Admits source ranks; older paths of theirs are retired."""
        regions = {name: region.remote.to_bytes() for name, region in self.rank.pools.regions.items()}
        paths = []
        for source_rank in message.source_ranks:
            for guest in self.guests.values():
                if (guest.session, guest.source_rank) == (message.session, source_rank):
                    guest.is_retired = True
            invitation = self.rank.transport.invite()
            self._num_guests += 1
            guest = Guest(message.session, source_rank, self._num_guests, invitation)
            self.guests[guest.number] = guest
            described = invitation.description.to_bytes()
            paths.append(Path(guest.number, source_rank, self.rank.config.rank, described, regions))
        self.rank.tell(Invited(session=message.session, paths=tuple(paths)))
        self._see_out()

    def part(self, session: int) -> None:
        """A session ended: nobody of it may write any more."""
        for guest in self.guests.values():
            if guest.session == session:
                guest.is_retired = True
                self._revoke(guest)
        self._see_out()

    def _see_out(self) -> None:
        """Retired guests without grants are revoked; those that are quiet are forgotten."""
        for guest in list(self.guests.values()):
            if guest.is_retired and not guest.grants:
                self._revoke(guest)
                if guest.is_gone:
                    del self.guests[guest.number]

    def _revoke(self, guest: Guest) -> RevokeResult:
        if guest.is_gone:
            return Quiet()
        guest.is_revoked = True
        found = self.rank.transport.revoke(guest.invitation.peer)
        guest.is_gone = isinstance(found, Quiet)
        return found

    def open(self, message: Open) -> None:
        """Lets the lanes of a grant write."""
        grant, rank = message.grant, self.rank.config.rank
        mine = [lane for lane in grant.lanes if lane.target_rank == rank]
        # Known first, with everybody whom the grant may have let in ahead of this: whatever fails from here
        # on, closing turns them out. Who is no guest any more was quiet when it was forgotten.
        incoming = self.incoming[grant.grant] = self._expect(grant.grant, mine)
        try:
            incoming.terms = self.agree(grant, mine)
            lanes = tuple(self._open_lane(incoming, incoming.terms, lane) for lane in mine)
        except BatonError as error:
            why = Why.OUT_OF_PAGES if isinstance(error, StagingFullError) else Why.REFUSED_LAYOUT
            cause = self.rank.cause(why, Stage.GRANT, str(error))
            self.rank.tell(Opened(grant=grant.grant, rank=rank, cause=cause))
            return
        self.rank.tell(Opened(grant=grant.grant, rank=rank, lanes=lanes))

    def _expect(self, grant: bytes, lanes: list[Lane]) -> Incoming:
        guests = {lane.source_rank: self.guests.get(lane.path) for lane in lanes}
        bays = {source_rank: Bay(guest) for source_rank, guest in guests.items() if guest is not None}
        for bay in bays.values():
            bay.guest.grants.add(grant)
        return Incoming(Landing(grant, self.rank.config.rank), bays)

    def agree(self, grant: Grant, lanes: list[Lane]) -> TransferTerms:
        """The terms of a grant; raises where this rank's pages are not what its plan needs."""
        rank, prompt = self.rank.config.rank, Prompt(grant.num_tokens, dict(grant.held), grant.offset)
        plan = self.rank.plan_of(grant, is_source=False)
        tables = decode_tables({rank: grant.tables[rank]}, plan.target, grant.target_dp)
        check_pages(plan, prompt, tables[rank], rank)
        modes = {(lane.source_rank, lane.target_rank): lane.mode for lane in lanes}
        return TransferTerms(plan, prompt, tables, modes, grant.is_verified)

    def _open_lane(self, incoming: Incoming, terms: TransferTerms, lane: Lane) -> Lane:
        bay = incoming.bays.get(lane.source_rank)
        if bay is None or bay.guest.is_gone:
            raise PathGoneError(f"path {lane.path} of rank {lane.source_rank} is gone")
        guest = bay.guest
        if guest.is_unchecked and not lane.staging_bytes:
            return lane
        pools, transport = self.rank.pools, self.rank.transport
        allowed = writable(terms, lane.source_rank, lane.target_rank)
        for buffer, (starts, lengths) in allowed.items():
            permission = transport.grant(
                guest.invitation.peer, pools.regions[buffer], Ranges(starts, lengths)
            )
            bay.permissions.append(permission)
        if not lane.staging_bytes:
            return lane
        bay.lease = pools.staging.lease(lane.staging_bytes)
        if bay.lease is None:
            raise StagingFullError(f"no room for {lane.staging_bytes} bytes of staging")
        start, length = np.array([bay.lease.offset]), np.array([bay.lease.num_bytes])
        where = Ranges(start, length)
        bay.permissions.append(transport.grant(guest.invitation.peer, pools.regions[STAGING], where))
        return msgspec.structs.replace(lane, staging_offset=bay.lease.offset)

    def unpack(self, message: Unpack) -> None:
        """A chunk is complete, and has to be brought home or checked."""
        if incoming := self.incoming.get(message.grant):
            self._feed(incoming, UnpackAsked(message.landed))

    def close(self, message: Close) -> None:
        """A grant is over."""
        incoming = self.incoming.get(message.grant)
        if incoming is None:
            # Closed before, or never opened: nothing can be written under it.
            rank = self.rank.config.rank
            self.rank.tell(Closed(grant=message.grant, rank=rank, is_still=True))
            return
        self._feed(incoming, CloseAsked(message.must_still))

    # Machine and effects.

    def _feed(self, incoming: Incoming, event: object) -> None:
        incoming.record, effects = LANDING.step(incoming.record, event, self.rank.ports.now())
        for effect in effects:
            self._perform(incoming, effect)

    def _perform(self, incoming: Incoming, effect: object) -> None:
        match effect:
            case StartUnpack(landed):
                self._start(incoming, landed)
            case TakeBack(must_still):
                self._feed(incoming, self._take_back(incoming, must_still))
            case Tell(message):
                self.rank.tell(message)
            case FreeStaging():
                self._forget(incoming)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _start(self, incoming: Incoming, landed: Landed) -> None:
        job = partial(self._bring_home, incoming, landed)
        self.rank.ports.run(job, partial(self._unpacked, incoming, landed))

    def _bring_home(self, incoming: Incoming, landed: Landed) -> str:
        """Checks and unpacks a chunk, on a worker; answers what is wrong with it, or nothing."""
        rank, pools = self.rank.config.rank, self.rank.pools
        chunk = Chunk(landed.layers, landed.tokens)
        assert incoming.terms is not None, "nothing is unpacked under a grant that was not opened"
        found = bind_target(incoming.terms, landed.source_rank, rank, chunk)
        place: Bytes | None = None
        if found.staging_bytes:
            lease, start = incoming.bays[landed.source_rank].lease, landed.staged.get(rank, -1)
            if lease is None or not 0 <= start <= lease.num_bytes - found.staging_bytes:
                return f"{found.staging_bytes} bytes to unpack are said to lie at {start} of the lease"
            place = pools.view(lease.offset + start, found.staging_bytes)
        if found.sums:
            said, sums = landed.checksums.get(rank, {}), checksums(found.sums, pools.buffers, place)
            wrong = [name for name, value in sums.items() if said.get(name) != value]
            if wrong:
                return f"checksum of {', '.join(wrong)} differs from the source's"
        if place is not None:
            run_unpacks(found.unpacks, place, pools.buffers)
        return ""

    def _unpacked(self, incoming: Incoming, landed: Landed, result: object) -> None:
        cause: Cause | None = None
        if isinstance(result, Exception):
            cause = self.rank.cause(Why.CORRUPTED, Stage.COPY, str(result))
        elif isinstance(result, str) and result:
            cause = self.rank.cause(Why.CORRUPTED, Stage.COPY, result)
        self._feed(incoming, JobEnded(landed.source_rank, landed.chunk, cause))

    def _take_back(self, incoming: Incoming, must_still: bool) -> TakenBack:
        """Every permission is taken back; where that does not prove stillness, the peer is turned out."""
        doubts = []
        for bay in incoming.bays.values():
            found = self._ungrant(bay)
            if must_still and (bay.guest.is_unchecked or isinstance(found, Unknown)):
                found = self._revoke(bay.guest)
            if isinstance(found, Unknown):
                doubts.append(f"rank {bay.guest.source_rank}: {found.cause}")
        return TakenBack(not doubts, "; ".join(doubts), self._look(incoming))

    def _look(self, incoming: Incoming) -> tuple[int, ...]:
        """The paths of guests that have come to reach every pool by themselves."""
        pools = [region for name, region in self.rank.pools.regions.items() if name != STAGING]
        found = []
        for guest in [bay.guest for bay in incoming.bays.values() if not bay.guest.is_unchecked]:
            peer = guest.invitation.peer
            guest.is_unchecked = all(self.rank.transport.is_unchecked(peer, region) for region in pools)
            found += [guest.number] if guest.is_unchecked else []
        return tuple(found)

    def _ungrant(self, bay: Bay) -> RevokeResult:
        """Takes a lane's permissions back, once; a revoked peer has none left."""
        if bay.guest.is_revoked:
            return self._revoke(bay.guest)
        for permission in bay.permissions:
            found = self.rank.transport.ungrant(bay.guest.invitation.peer, permission)
            bay.stillness = found if isinstance(found, Unknown) else bay.stillness
        bay.permissions.clear()
        return bay.stillness

    def _forget(self, incoming: Incoming) -> None:
        del self.incoming[incoming.record.grant]
        for bay in incoming.bays.values():
            bay.guest.grants.discard(incoming.record.grant)
            if bay.lease is not None:
                self.rank.pools.staging.give_back(bay.lease)
        self._see_out()

    def handles(self) -> list[Receiving]:
        """What engines hold."""
        return list(self.receiving.values())

    def counts(self) -> dict[str, int]:
        """Transfers and grants under way."""
        return {
            "receiving": len(self.receiving),
            "grants": len(self.incoming),
            "guests": len(self.guests),
        }
