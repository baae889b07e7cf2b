"""The source side of a rank: chunks become copies, and the completions of copies become messages.

A chunk that the engine offers (`chunk_ready`) waits until its transfer is granted. It is then bound to page
tables and lanes, and its copies are submitted to the transport, by way of staging where they are packed. A
`ChunkCopy` ends when no copy, no job and no wait of it is left.

A withdrawal cancels the copies under way, so a chunk may end with some of its copies done and others dropped.
It has then not landed. Its place in the target's staging is kept for the same cells, to be used when they are
offered again: the target leased as much as the prompt needs once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from baton.errors import BatonError
from baton.plan import Chunk, Spec
from baton.plan.binding import ChunkSend, TransferTerms, bind_source, pages_read, place_in_staging
from baton.protocol.ledger import Rectangle
from baton.protocol.machine import Conclude, Forget
from baton.protocol.messages import Grant, Lane, Message, Offer, Queued, SessionPaths, Settled
from baton.protocol.outcomes import Aux, Cause, Stage, Why
from baton.protocol.source_rank import (
    SOURCE_RANK,
    Aborted,
    AnswerEnded,
    CancelCopies,
    ChunkCopied,
    ChunkDropped,
    ChunkFailed,
    ChunkReady,
    EndWithdrawal,
    ReleaseChunks,
    Sealed,
    SourceRank,
    SourceRankState,
    StartCopies,
    Withdrawn,
)
from baton.session.config import DriverConfig
from baton.session.dispatcher import Dispatcher
from baton.session.handles import CheckedPages, CopyTiming, Digest, OfferedChunk, Pages, Sending, read_pages
from baton.session.memory import Pools, StagingLease, UngrantedPages, tensors
from baton.session.page_tables import check_terms, terms_of
from baton.session.ports import Ports
from baton.transport import (
    NOW,
    Batch,
    Completion,
    Description,
    Done,
    FailedUnknown,
    Fence,
    Peer,
    RemoteRegion,
    Ticket,
    Transport,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connection:
    """A data connection to a target rank, and the regions at its end."""

    peer: Peer
    regions: dict[str, RemoteRegion]
    num_copies: int = 0
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class SubmittedCopy:
    """One submitted copy: over which connection, to which rank, how much, since when."""

    connection: Connection
    target_rank: int
    num_bytes: int
    submitted_s: float


@dataclass(slots=True)
class DroppedChunk:
    """A withdrawn chunk that had places in the staging of target ranks."""

    box: Rectangle
    staged: dict[int, int]
    """By target rank: where the next of its cells goes."""


@dataclass(slots=True)
class SourceTransfer:
    """One transfer at this rank: its machine's record and the driver's own state."""

    record: SourceRank
    handle: Sending
    is_forgotten: bool = False
    chunks: dict[int, OfferedChunk] = field(default_factory=dict)
    grant: Grant | None = None
    terms: TransferTerms | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)
    staging_used: dict[int, int] = field(default_factory=dict)
    copying: dict[int, ChunkCopy] = field(default_factory=dict)
    dropped: list[DroppedChunk] = field(default_factory=list)
    """The latest come first."""


@dataclass(slots=True)
class ChunkCopy:
    """The copies of one chunk."""

    transfer: SourceTransfer
    index: int
    box: Rectangle
    copies: dict[int, SubmittedCopy] = field(default_factory=dict)
    """By the number of their ticket."""
    num_jobs: int = 0
    num_waits: int = 0
    """Steps that wait for a fence or for staging; they can be cancelled."""
    num_unfinished: int = 0
    """Copies, and the checksums, that are not done."""
    is_cancelled: bool = False
    is_withdrawn: bool = False
    is_reported: bool = False
    """Whether its failure was reported although something of it is left."""
    cause: Cause | None = None
    doubt: str = ""
    num_bytes: dict[int, Mapping[str, int]] = field(default_factory=dict)
    staged: dict[int, int] = field(default_factory=dict)
    checksums: dict[int, dict[str, bytes]] = field(default_factory=dict)
    leases: list[StagingLease] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return not self.copies and not self.num_jobs and not self.num_waits


class SourceCopies:
    """Every transfer that this rank sends, its copies, and the connections they use."""

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
        """The specs of target instances, by session."""
        self.send = send
        """Sends to the coordinator."""
        self.transfers: dict[str, SourceTransfer] = {}
        self.connections: dict[tuple[int, int, int], Connection] = {}
        """By session, target rank and path number."""
        self.tickets: dict[int, ChunkCopy] = {}
        self.ungranted = UngrantedPages(config.spec, config.rank, config.ungranted_share_max)
        self.waiting_for_staging: deque[tuple[ChunkCopy, ChunkSend, Fence]] = deque()
        self._dispatcher: Dispatcher[SourceTransfer] = Dispatcher(
            SOURCE_RANK,
            ports.now,
            self._perform,
            lambda text: Aborted(config.cause(Why.ABORTED, Stage.COPY, text)),
        )

    # Calls of the engine, through its handle.

    def begin(
        self, sending: Sending, digest: Digest, progress_s: float = 0.0, *, is_queued: bool = False
    ) -> None:
        """Offers a transfer to the coordinator."""
        config = self.config
        if sending.transfer in self.transfers:
            text = f"transfer {sending.transfer} is live on this rank; take a new id for each attempt"
            sending.refuse(config.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text))
            return
        self.transfers[sending.transfer] = SourceTransfer(SourceRank(sending.transfer, config.rank), sending)
        self.send(
            Offer(
                transfer=sending.transfer,
                num_tokens=digest.num_tokens,
                digest=digest.value,
                source_dp=config.spec.layout.coordinates(config.rank)["dp"],
                source_rank=config.rank,
                progress_s=progress_s,
                is_queued=is_queued,
            )
        )

    def queued(self, sending: Sending) -> None:
        """The engine's queue moves."""
        if self._of(sending) is not None:
            self.send(Queued(transfer=sending.transfer))

    def read_pages(self, pages: Pages) -> CheckedPages:
        """From any thread: a copy of a page table; raises ConfigError on one that the pools cannot have."""
        return read_pages(pages, self.config.spec)

    def chunk_ready(self, sending: Sending, chunk: OfferedChunk) -> None:
        """A chunk may be copied once its transfer is granted."""
        transfer = self._of(sending)
        if transfer is None:
            sending.release_chunk(chunk.index)
            return
        transfer.chunks[chunk.index] = chunk
        if transfer.record.state is SourceRankState.WAITING and (
            text := self.ungranted.hold(sending.transfer, chunk.pages)
        ):
            cause = self.config.cause(Why.OUT_OF_PAGES, Stage.OFFER, text)
            self._dispatcher.feed(transfer, Aborted(cause))
        self._dispatcher.feed(transfer, ChunkReady(chunk.index, Rectangle(chunk.layers, chunk.tokens)))

    def seal(self, sending: Sending, aux: Aux | None) -> None:
        """The engine committed."""
        if transfer := self._of(sending):
            self._dispatcher.feed(transfer, Sealed(aux))

    def answer_ended(self, sending: Sending, aux: Aux) -> None:
        """The engine finished the answer."""
        if transfer := self._of(sending):
            self._dispatcher.feed(transfer, AnswerEnded(aux))

    def abort_sending(self, sending: Sending, text: str) -> None:
        """The engine gave up."""
        if transfer := self._of(sending):
            stage = Stage.OFFER if transfer.grant is None else Stage.COPY
            cause = self.config.cause(Why.ABORTED, stage, text or "given up at the source")
            self._dispatcher.feed(transfer, Aborted(cause))

    def withdraw(self, sending: Sending) -> None:
        """The engine preempted the request; drop chunks not copied yet."""
        transfer = self._of(sending)
        if transfer is None:
            sending.end_withdrawal_if_settled()
            return
        self._dispatcher.feed(transfer, Withdrawn())

    def _of(self, sending: Sending) -> SourceTransfer | None:
        transfer = self.transfers.get(sending.transfer)
        return transfer if transfer is not None and transfer.handle is sending else None

    # Messages of the coordinator.

    def granted(self, grant: Grant) -> None:
        """The transfer may be copied."""
        transfer = self.transfers.get(grant.transfer)
        if transfer is None:
            return
        try:
            terms = terms_of(grant, self.config.spec, self.peers.get(grant.session))
            staging = {lane.target_rank: lane.staging_bytes for lane in grant.lanes}
            check_terms(terms, self.config.rank, staging)
        except BatonError as error:
            cause = self.config.cause(Why.REFUSED_LAYOUT, Stage.GRANT, str(error))
            self._dispatcher.feed(transfer, Aborted(cause))
            return
        transfer.grant, transfer.terms = grant, terms
        transfer.lanes = {lane.target_rank: lane for lane in grant.lanes}
        transfer.handle.session, transfer.handle.is_granted = grant.session, True
        transfer.handle.is_target_full = False
        self._dispatcher.feed(transfer, grant)
        transfer.handle.on_change(transfer.handle)

    def target_queued(self, message: Queued) -> None:
        """The target has no room yet."""
        transfer = self.transfers.get(message.transfer)
        if transfer is not None and transfer.grant is None:
            transfer.handle.is_target_full = True
            transfer.handle.on_change(transfer.handle)

    def settled(self, message: Settled) -> None:
        """The transfer ended."""
        if transfer := self.transfers.get(message.transfer):
            self._dispatcher.feed(transfer, message)

    def connect(self, message: SessionPaths) -> None:
        """Connects to target ranks."""
        for path in message.paths:
            try:
                regions = {name: RemoteRegion.from_bytes(raw) for name, raw in path.regions.items()}
                peer = self.transport.connect(Description.from_bytes(path.description))
            except BatonError as error:
                # Copies over it will fail, and say so.
                log.warning(
                    "cannot connect to target rank %d (path %d): %s", path.target_rank, path.number, error
                )
                continue
            for (session, target, _), connection in self.connections.items():
                if (session, target) == (message.session, path.target_rank):
                    connection.is_replaced = True
            self.connections[message.session, path.target_rank, path.number] = Connection(peer, regions)
        self._drop_connections()

    def session_closed(self, session: int) -> None:
        """The connections of a session are of no more use."""
        for key, connection in self.connections.items():
            if key[0] == session:
                connection.is_replaced = True
        self._drop_connections()

    def _drop_connections(self) -> None:
        for key, connection in list(self.connections.items()):
            if connection.is_replaced and not connection.num_copies:
                del self.connections[key]
                self.transport.disconnect(connection.peer)

    # Effects of the machine.

    def _perform(self, transfer: SourceTransfer, effect: object) -> None:
        match effect:
            case StartCopies(index):
                self.ungranted.let_go(transfer.record.transfer)
                self._start_copies(transfer, transfer.chunks[index])
            case CancelCopies(is_withdrawal):
                for chunk in list(transfer.copying.values()):
                    chunk.is_withdrawn = chunk.is_withdrawn or is_withdrawal
                    self._cancel(chunk)
                    self._end_if_over(chunk)
            case EndWithdrawal(landed, is_committed):
                boxes = tuple(dropped.box for dropped in transfer.dropped)
                transfer.handle.end_withdrawal(landed, boxes, is_committed)
            case ReleaseChunks(indices):
                self.ungranted.let_go(transfer.record.transfer)
                for index in indices:
                    transfer.chunks.pop(index, None)
                    transfer.handle.release_chunk(index)
                transfer.handle.on_change(transfer.handle)
            case Conclude(outcome):
                transfer.handle.conclude(outcome)
            case Forget():
                transfer.is_forgotten = True
                del self.transfers[transfer.record.transfer]
                transfer.handle.release()
            case Message():
                self.send(effect)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    # From a chunk to its copies.

    def _start_copies(self, transfer: SourceTransfer, offered: OfferedChunk) -> None:
        chunk = ChunkCopy(transfer, offered.index, Rectangle(offered.layers, offered.tokens))
        transfer.copying[offered.index] = chunk
        terms = transfer.terms
        assert terms is not None
        rank, table, box = self.config.rank, offered.pages, Chunk(offered.layers, offered.tokens)
        try:
            loads = bind_source(terms, rank, table, box)
            chunk.num_unfinished = sum(len(load.copies) for load in loads) + bool(terms.is_verified and loads)
            transfer.handle.narrow(
                offered.index,
                lambda: {
                    group: ids.tolist()
                    for group, ids in pages_read(terms.plan, terms.prompt, table, box, rank).items()
                },
            )
            for load in loads:
                if chunk.is_cancelled or not self._reserve_staging(chunk, load):
                    continue
                if not load.packs:
                    self._submit(chunk, load, 0, offered.fence)
                    continue
                chunk.num_waits += 1
                self.waiting_for_staging.append((chunk, load, offered.fence))
                self._lease_staging()
            if terms.is_verified and loads:
                self._when_ready(chunk, offered.fence, partial(self._sum, chunk, loads))
        except BatonError as error:
            self._fail(chunk, Why.COPY_FAILED, str(error))
        self._end_if_over(chunk)

    def _reserve_staging(self, chunk: ChunkCopy, load: ChunkSend) -> bool:
        """Takes a range of the target's staging lease; false if it is used up."""
        target = load.target_rank
        chunk.num_bytes[target] = load.num_bytes
        if load.staging_bytes:
            for dropped in chunk.transfer.dropped:
                # The handle cuts what is offered along the chunks that were dropped.
                if target in dropped.staged and dropped.box.common(chunk.box) == chunk.box:
                    chunk.staged[target] = dropped.staged[target]
                    dropped.staged[target] += load.staging_bytes
                    return True
            lane, used = chunk.transfer.lanes[target], chunk.transfer.staging_used.get(target, 0)
            if used + load.staging_bytes > lane.staging_bytes:
                text = f"{lane.staging_bytes} bytes of staging at rank {target} are not enough"
                self._fail(chunk, Why.OUT_OF_PAGES, text)
                return False
            chunk.transfer.staging_used[target] = used + load.staging_bytes
            chunk.staged[target] = used
        return True

    def _lease_staging(self) -> None:
        """Gives this rank's staging to waiting loads, first come first served."""
        staging = self.pools.staging
        while self.waiting_for_staging:
            chunk, load, fence = self.waiting_for_staging[0]
            if chunk.is_cancelled:
                self.waiting_for_staging.popleft()
                continue
            lease = staging.lease(load.staging_bytes)
            if lease is None and load.staging_bytes <= staging.num_bytes:
                return
            self.waiting_for_staging.popleft()
            if lease is None:
                text = (
                    f"a chunk needs {load.staging_bytes} bytes of staging, there are {staging.num_bytes}; "
                    "give the source more (staging_bytes, or --staging-mb of baton serve)"
                )
                self._fail(chunk, Why.OUT_OF_PAGES, text)
                self.ports.post(partial(self._end_if_over, chunk))
                continue
            chunk.leases.append(lease)
            chunk.num_waits -= 1
            self._when_ready(chunk, fence, partial(self._pack, chunk, load, lease))

    def _when_ready(self, chunk: ChunkCopy, fence: Fence, start_job: Callable[[], None]) -> None:
        """Starts a job once the fence is ready, unless the chunk is cancelled before."""
        if chunk.is_cancelled:
            return
        chunk.num_waits += 1

        def begin() -> None:
            if not chunk.is_cancelled:
                chunk.num_waits -= 1
                chunk.num_jobs += 1
                start_job()

        fence.call_when_ready(lambda: self.ports.post(begin))

    def _pack(self, chunk: ChunkCopy, load: ChunkSend, lease: StagingLease) -> None:
        view = self.pools.view(lease.offset, load.staging_bytes)
        self.ports.run(
            lambda: tensors().run_packs(load.packs, self.pools.buffers, view),
            partial(self._packed, chunk, load, lease),
        )

    def _packed(self, chunk: ChunkCopy, load: ChunkSend, lease: StagingLease, result: object) -> None:
        chunk.num_jobs -= 1
        if isinstance(result, Exception):
            self._fail(chunk, Why.COPY_FAILED, f"packing failed: {result}")
        elif not chunk.is_cancelled:
            self._submit(chunk, load, lease.offset, NOW)
        self._end_if_over(chunk)

    def _sum(self, chunk: ChunkCopy, loads: list[ChunkSend]) -> None:
        self.ports.run(
            lambda: {load.target_rank: tensors().checksums(load.sums, self.pools.buffers) for load in loads},
            partial(self._summed, chunk),
        )

    def _summed(self, chunk: ChunkCopy, result: object) -> None:
        chunk.num_jobs -= 1
        if isinstance(result, dict):
            chunk.checksums = result
            chunk.num_unfinished -= 1
        else:
            self._fail(chunk, Why.COPY_FAILED, f"checksum failed: {result}")
        self._end_if_over(chunk)

    def _submit(self, chunk: ChunkCopy, load: ChunkSend, staged_at: int, fence: Fence) -> None:
        grant, lane = chunk.transfer.grant, chunk.transfer.lanes[load.target_rank]
        assert grant is not None
        connection = self.connections.get((grant.session, load.target_rank, lane.path))
        if connection is None:
            self._fail(chunk, Why.COPY_FAILED, f"no path {lane.path} to rank {load.target_rank}")
            return
        landed_at = lane.staging_offset + chunk.staged.get(load.target_rank, 0)
        for copy in load.copies:
            if chunk.is_cancelled:
                return
            region, remote = self.pools.regions[copy.source_buffer], connection.regions[copy.target_buffer]
            # The coordinators tell the target when a chunk is complete: an announcement of every batch would
            # wake it for nothing.
            batch = Batch(region, remote, place_in_staging(copy, staged_at, landed_at))
            submitted_s = self.ports.now()
            try:
                ticket = self.transport.submit(
                    connection.peer, batch, fence, deadline_s=self.config.timings.copy_s
                )
            except BatonError as error:
                self._fail(chunk, Why.COPY_FAILED, str(error))
                return
            connection.num_copies += 1
            chunk.copies[ticket.number] = SubmittedCopy(
                connection, load.target_rank, batch.spans.num_bytes, submitted_s
            )
            self.tickets[ticket.number] = chunk

    # From completions to the end of a chunk.

    def on_completion(self, event: Completion) -> None:
        """A copy is terminal."""
        if event.ticket.number not in self.tickets:
            return
        chunk = self.tickets.pop(event.ticket.number)
        copy = chunk.copies.pop(event.ticket.number)
        copy.connection.num_copies -= 1
        is_done = isinstance(event, Done)
        ended_s = (event.at_s if isinstance(event, Done) else 0.0) or self.ports.now()
        chunk.transfer.handle.copies.append(
            CopyTiming(copy.target_rank, chunk.index, copy.num_bytes, copy.submitted_s, ended_s, is_done)
        )
        if isinstance(event, Done):
            chunk.num_unfinished -= 1
        elif isinstance(event, FailedUnknown) or not chunk.is_withdrawn:
            if isinstance(event, FailedUnknown):
                chunk.doubt = event.cause
            self._fail(chunk, Why.COPY_FAILED, event.cause)
        self._end_if_over(chunk)
        if copy.connection.is_replaced:
            self._drop_connections()

    def _fail(self, chunk: ChunkCopy, why: Why, text: str) -> None:
        chunk.cause = chunk.cause or self.config.cause(why, Stage.COPY, text)
        self._cancel(chunk)

    def _cancel(self, chunk: ChunkCopy) -> None:
        """Steps that wait are dropped; copies under way are asked to stop, and end when they end."""
        if not chunk.is_cancelled:
            chunk.is_cancelled = True
            chunk.num_waits = 0
            for number in list(chunk.copies):
                self.transport.cancel(Ticket(number))

    def _end_if_over(self, chunk: ChunkCopy) -> None:
        transfer = chunk.transfer
        if chunk.cause is not None and not chunk.is_over and not chunk.is_reported:
            # The last of its copies may end much later.
            chunk.is_reported = True
            self._dispatcher.feed(transfer, Aborted(chunk.cause))
        if not chunk.is_over or transfer.copying.get(chunk.index) is not chunk:
            return
        del transfer.copying[chunk.index]
        for lease in chunk.leases:
            self.pools.staging.give_back(lease)
        is_stopped = chunk.is_cancelled and not (chunk.is_withdrawn and chunk.cause is None)
        if is_stopped:
            cause = chunk.cause or self.config.cause(Why.ABORTED, Stage.COPY, "cancelled")
            self._dispatcher.feed(transfer, ChunkFailed(chunk.index, cause, chunk.doubt))
        elif chunk.is_withdrawn and chunk.num_unfinished:
            if chunk.staged:
                transfer.dropped.insert(0, DroppedChunk(chunk.box, dict(chunk.staged)))
            self._dispatcher.feed(transfer, ChunkDropped(chunk.index))
        else:
            copied = ChunkCopied(chunk.index, chunk.num_bytes, chunk.staged, chunk.checksums)
            self._dispatcher.feed(transfer, copied)
        self._lease_staging()

    def counts(self) -> dict[str, int]:
        """Transfers, copies under way, and connections."""
        return {
            "sending": len(self.transfers),
            "copies": len(self.tickets),
            "connections": len(self.connections),
        }
