"""The source half of a rank: chunks become copies, completions become words to the coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import BatonError
from baton.plan import Prompt
from baton.plan.binding import TransferTerms
from baton.plan.tokens import Ints
from baton.protocol.ledger import Rectangle
from baton.protocol.messages import Grant, Offer, Settled
from baton.protocol.outcomes import Aux, Cause, Stage, Why
from baton.protocol.sender import (
    SENDER,
    Aborted,
    AnswerEnded,
    CancelCopies,
    Chunk,
    ChunkCopied,
    ChunkFailed,
    ChunkReady,
    Conclude,
    Granted,
    LetGo,
    Retire,
    Sealed,
    Sender,
    SenderState,
    Submit,
    Tell,
    VerdictHeard,
)
from baton.session.flights import Flight, Flights, Outgoing
from baton.session.handles import Offered, Pages, Sending
from baton.session.page_tables import check_terms, decode_tables
from baton.session.requests import Digest, read_pages
from baton.session.stepping import Stepping

if TYPE_CHECKING:
    from baton.session.rank import RankDriver


class SourceHalf:
    """Every transfer that this rank sends."""

    def __init__(self, rank: RankDriver) -> None:
        self.rank = rank
        self.outgoing: dict[str, Outgoing] = {}
        self.flights = Flights(rank, self._ended, self._failing)
        self.stepping = Stepping(self._step, self._giving_up)

    # Calls of the engine, by way of its handle.

    def begin(self, sending: Sending, digest: Digest) -> None:
        """A transfer begins."""
        rank = self.rank
        if sending.transfer in self.outgoing:
            text = f"transfer {sending.transfer} is live on this rank; take a new id for each attempt"
            rank.refuse(sending, rank.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text))
            return
        record = Sender(sending.transfer, rank.config.rank)
        self.outgoing[sending.transfer] = Outgoing(record, sending)
        offer = Offer(
            transfer=sending.transfer,
            num_tokens=digest.num_tokens,
            digest=digest.value,
            source_dp=rank.config.spec.layout.coordinates(rank.config.rank)["dp"],
        )
        rank.tell(offer)

    def read_pages(self, pages: Pages) -> dict[str, Ints]:
        """A page table of this rank as it is now; raises ConfigError on one that its pools cannot have."""
        return read_pages(pages, self.rank.config.spec)

    def chunk_ready(self, sending: Sending, offered: Offered) -> None:
        """The engine offered a chunk."""
        found = self._of(sending)
        if found is None:
            sending.let_go(offered.index)
            return
        found.offered[offered.index] = offered
        for group, pages in offered.pages.items():
            found.num_pages[group] = max(found.num_pages.get(group, 0), len(pages))
        if text := self._overdrawn(found):
            self.stepping.feed(found, Aborted(self.rank.cause(Why.OUT_OF_PAGES, Stage.OFFER, text)))
        self.stepping.feed(found, ChunkReady(Chunk(offered.index, Rectangle(offered.layers, offered.tokens))))

    def seal(self, sending: Sending, aux: Aux | None) -> None:
        """The engine committed."""
        if found := self._of(sending):
            self.stepping.feed(found, Sealed(aux))

    def answer_ended(self, sending: Sending, aux: Aux) -> None:
        """The engine finished the answer."""
        if found := self._of(sending):
            self.stepping.feed(found, AnswerEnded(aux))

    def abort_sending(self, sending: Sending, text: str) -> None:
        """The engine gave up."""
        if found := self._of(sending):
            stage = Stage.OFFER if found.grant is None else Stage.COPY
            cause = self.rank.cause(Why.ABORTED, stage, text or "given up at the source")
            self.stepping.feed(found, Aborted(cause))

    def _of(self, sending: Sending) -> Outgoing | None:
        found = self.outgoing.get(sending.transfer)
        return found if found is not None and found.handle is sending else None

    def _overdrawn(self, found: Outgoing) -> str:
        """Requests without a grant may hold half of the pool: else two full instances wait for each other."""
        if found.record.state is not SenderState.WAITING:
            return ""
        storage = self.rank.config.spec.storage
        waiting = [one for one in self.outgoing.values() if one.record.state is SenderState.WAITING]
        for group in found.num_pages:
            num_held = sum(one.num_pages.get(group, 0) for one in waiting)
            num_pages = storage.pages_of(group)
            if num_held > max(1, num_pages // 2):
                return f"requests without a grant hold {num_held} of {num_pages} pages of {group!r}"
        return ""

    # Words of the coordinator.

    def granted(self, grant: Grant) -> None:
        """The transfer may be copied."""
        found = self.outgoing.get(grant.transfer)
        if found is None:
            return
        modes = {(lane.source_rank, lane.target_rank): lane.mode for lane in grant.lanes}
        prompt = Prompt(grant.num_tokens, dict(grant.held), grant.offset)
        try:
            plan = self.rank.plan_of(grant, is_source=True)
            tables = decode_tables(grant.tables, plan.target, grant.target_dp)
            found.terms = TransferTerms(plan, prompt, tables, modes, grant.is_verified)
            staging = {lane.target_rank: lane.staging_bytes for lane in grant.lanes}
            check_terms(found.terms, self.rank.config.rank, staging)
        except BatonError as error:
            self.stepping.feed(found, Aborted(self.rank.cause(Why.REFUSED_LAYOUT, Stage.GRANT, str(error))))
            return
        found.grant = grant
        found.handle.session = grant.session
        found.handle.is_granted = True
        found.lanes = {lane.target_rank: lane for lane in grant.lanes}
        self.stepping.feed(found, Granted(grant))
        self.rank.on_change(found.handle)

    def settled(self, message: Settled) -> None:
        """The transfer ended."""
        if found := self.outgoing.get(message.transfer):
            self.stepping.feed(found, VerdictHeard(message.outcome))

    # Machine and effects.

    def _giving_up(self, text: str) -> Aborted:
        return Aborted(self.rank.cause(Why.ABORTED, Stage.COPY, text))

    def _step(self, found: Outgoing, event: object) -> None:
        found.record, effects = SENDER.step(found.record, event, self.rank.ports.now())
        for effect in effects:
            self._perform(found, effect)

    def _perform(self, found: Outgoing, effect: object) -> None:
        match effect:
            case Submit(chunk):
                self.flights.launch(found, found.offered[chunk.index])
            case CancelCopies():
                self.flights.cancel(found)
            case LetGo(indices):
                for index in indices:
                    found.offered.pop(index, None)
                    found.handle.let_go(index)
                self.rank.on_change(found.handle)
            case Tell(message):
                self.rank.tell(message)
            case Conclude(outcome):
                self.rank.conclude(found.handle, outcome)
            case Retire():
                del self.outgoing[found.record.transfer]
                self.rank.release(found.handle)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _failing(self, found: Outgoing, cause: Cause) -> None:
        self.stepping.feed(found, Aborted(cause))

    def _ended(self, found: Outgoing, flight: Flight) -> None:
        if flight.is_off:
            cause = flight.cause or self.rank.cause(Why.ABORTED, Stage.COPY, "called off")
            self.stepping.feed(found, ChunkFailed(flight.index, cause, flight.doubt))
        else:
            done = ChunkCopied(flight.index, flight.num_bytes, flight.staged, flight.checksums)
            self.stepping.feed(found, done)

    def handles(self) -> list[Sending]:
        """What engines hold."""
        return [found.handle for found in self.outgoing.values()]

    def counts(self) -> dict[str, int]:
        """Transfers and copies under way."""
        flights = self.flights
        return {
            "sending": len(self.outgoing),
            "tickets": len(flights.tickets),
            "ways": len(flights.ways),
        }
