"""The copies of a source rank: from a chunk and a grant to tickets, and back to one word at the end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from baton.errors import BatonError
from baton.plan import Chunk as Box
from baton.plan import Copy, Plan, Prompt
from baton.plan.binding import ChunkSend, TransferTerms, bind_source, pages_read, place_in_staging
from baton.plan.tokens import Ints
from baton.protocol.messages import Grant, Lane, SessionPaths
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.sender import Sender
from baton.session.handles import Copied, Offered, Sending
from baton.session.moving import checksums, run_packs
from baton.session.staging import Lease
from baton.transport import (
    NOW,
    Batch,
    Description,
    Done,
    Event,
    FailedUnknown,
    Fence,
    Landed,
    Peer,
    Region,
    RemoteRegion,
    Ticket,
)

if TYPE_CHECKING:
    from baton.session.rank import RankDriver


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Way:
    """A connection to a target rank, and the regions at its end."""

    peer: Peer
    regions: dict[str, RemoteRegion]
    num_tickets: int = 0
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class Leg:
    """One submitted copy: by which way, to whom, how much, since when."""

    way: Way
    target_rank: int
    num_bytes: int
    submitted_s: float


@dataclass(slots=True)
class Flight:
    """The copies of one chunk. It ends when no ticket, no job and no wait is left."""

    index: int
    tickets: dict[int, Leg] = field(default_factory=dict)
    num_jobs: int = 0
    num_waits: int = 0
    """Things to be begun when a fence is ready; they can be called off."""
    is_off: bool = False
    is_told: bool = False
    """Whether its failure is known although something of it is left."""
    cause: Cause | None = None
    doubt: str = ""
    num_bytes: dict[int, Mapping[str, int]] = field(default_factory=dict)
    staged: dict[int, int] = field(default_factory=dict)
    checksums: dict[int, dict[str, bytes]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        return not self.tickets and not self.num_jobs and not self.num_waits


@dataclass(slots=True)
class Outgoing:
    """One transfer at this rank: its machine's record and what the driver keeps beside it."""

    record: Sender
    handle: Sending
    offered: dict[int, Offered] = field(default_factory=dict)
    num_pages: dict[str, int] = field(default_factory=dict)
    grant: Grant | None = None
    terms: TransferTerms | None = None
    lanes: dict[int, Lane] = field(default_factory=dict)
    staging_used: dict[int, int] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)


class Flights:
    """Every copy of a source rank that is under way, and the connections they use."""

    def __init__(
        self,
        rank: RankDriver,
        ended: Callable[[Outgoing, Flight], None],
        failing: Callable[[Outgoing, Cause], None],
    ) -> None:
        self.rank = rank
        self.ended = ended
        self.failing = failing
        """Called when a chunk will fail, which may be long before the last of its copies has ended."""
        self.ways: dict[tuple[int, int, int], Way] = {}
        """By session, target rank and path number."""
        self.tickets: dict[int, tuple[Outgoing, Flight]] = {}
        self.starved: deque[tuple[Outgoing, Flight, ChunkSend, Fence]] = deque()
        """Loads that wait for staging."""

    def take_paths(self, message: SessionPaths) -> None:
        """Connects to target ranks."""
        for path in message.paths:
            try:
                regions = {name: RemoteRegion.from_bytes(raw) for name, raw in path.regions.items()}
                peer = self.rank.transport.connect(Description.from_bytes(path.description))
            except BatonError as error:
                # What is to be copied by it will fail, and say so.
                log.warning("path %d to rank %d: %s", path.number, path.target_rank, error)
                continue
            for (session, target, _), way in self.ways.items():
                if (session, target) == (message.session, path.target_rank):
                    way.is_replaced = True
            self.ways[message.session, path.target_rank, path.number] = Way(peer, regions)
        self._drop_ways()

    def part(self, session: int) -> None:
        """A session ended: its connections are of no use."""
        for key, way in self.ways.items():
            if key[0] == session:
                way.is_replaced = True
        self._drop_ways()

    def _drop_ways(self) -> None:
        for key, way in list(self.ways.items()):
            if way.is_replaced and not way.num_tickets:
                del self.ways[key]
                self.rank.transport.disconnect(way.peer)

    def launch(self, found: Outgoing, offered: Offered) -> None:
        """Begins the copies of a chunk."""
        flight = found.flights[offered.index] = Flight(offered.index)
        assert found.terms is not None
        box = Box(offered.layers, offered.tokens)
        rank = self.rank.config.rank
        try:
            table = offered.pages
            loads = bind_source(found.terms, rank, table, box)
            plan, prompt = found.terms.plan, found.terms.prompt
            found.handle.narrow(offered.index, partial(_pages_read, plan, prompt, table, (box, rank)))
            for load in loads:
                self._dispatch(found, flight, load, offered.fence)
            if found.terms.is_verified and loads:
                self._when(flight, offered.fence, partial(self._sum, found, flight, loads))
        except BatonError as error:
            self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, str(error)))
        self._end_if_over(found, flight)

    def _dispatch(self, found: Outgoing, flight: Flight, load: ChunkSend, fence: Fence) -> None:
        if flight.is_off:
            return
        flight.num_bytes[load.target_rank] = load.num_bytes
        if load.staging_bytes:
            lane, used = found.lanes[load.target_rank], found.staging_used.get(load.target_rank, 0)
            if used + load.staging_bytes > lane.staging_bytes:
                text = f"{lane.staging_bytes} bytes of staging at rank {load.target_rank} are not enough"
                self._spoil(flight, self.rank.cause(Why.OUT_OF_PAGES, Stage.COPY, text))
                return
            found.staging_used[load.target_rank] = used + load.staging_bytes
            flight.staged[load.target_rank] = used
        if not load.packs:
            self._submit(found, flight, load, 0, fence)
            return
        flight.num_waits += 1
        self.starved.append((found, flight, load, fence))
        self._feed_starved()

    def _feed_starved(self) -> None:
        """Gives staging to loads in the order they came."""
        while self.starved:
            found, flight, load, fence = self.starved[0]
            if flight.is_off:
                self.starved.popleft()
                continue
            lease = self.rank.pools.staging.lease(load.staging_bytes)
            if lease is None and load.staging_bytes > self.rank.pools.staging.num_bytes:
                self.starved.popleft()
                text = f"a chunk needs {load.staging_bytes} bytes of staging, the whole has fewer"
                self._spoil(flight, self.rank.cause(Why.OUT_OF_PAGES, Stage.COPY, text))
                self.rank.ports.post(partial(self._end_if_over, found, flight))
                continue
            if lease is None:
                return
            self.starved.popleft()
            flight.leases.append(lease)
            flight.num_waits -= 1
            self._when(flight, fence, partial(self._pack, found, flight, load, lease))

    def _when(self, flight: Flight, fence: Fence, call: partial[None]) -> None:
        """Begins something once the fence is ready, unless the flight is called off before."""
        if flight.is_off:
            return
        flight.num_waits += 1

        def begin() -> None:
            if not flight.is_off:
                flight.num_waits -= 1
                flight.num_jobs += 1
                call()

        fence.call_when_ready(lambda: self.rank.ports.post(begin))

    def _pack(self, found: Outgoing, flight: Flight, load: ChunkSend, lease: Lease) -> None:
        view = self.rank.pools.view(lease.offset, load.staging_bytes)
        job = partial(run_packs, load.packs, self.rank.pools.buffers, view)
        self.rank.ports.run(job, partial(self._packed, found, flight, load, lease))

    def _packed(self, found: Outgoing, flight: Flight, load: ChunkSend, lease: Lease, result: object) -> None:
        flight.num_jobs -= 1
        if isinstance(result, Exception):
            self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, f"packing failed: {result}"))
        elif not flight.is_off:
            self._submit(found, flight, load, lease.offset, NOW)
        self._end_if_over(found, flight)

    def _sum(self, found: Outgoing, flight: Flight, loads: list[ChunkSend]) -> None:
        buffers = self.rank.pools.buffers
        self.rank.ports.run(
            lambda: {load.target_rank: checksums(load.sums, buffers) for load in loads},
            partial(self._summed, found, flight),
        )

    def _summed(self, found: Outgoing, flight: Flight, result: object) -> None:
        flight.num_jobs -= 1
        if isinstance(result, dict):
            flight.checksums = result
        else:
            self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, f"checksum failed: {result}"))
        self._end_if_over(found, flight)

    def _submit(self, found: Outgoing, flight: Flight, load: ChunkSend, staged_at: int, fence: Fence) -> None:
        lane = found.lanes[load.target_rank]
        assert found.grant is not None
        way = self.ways.get((found.grant.session, load.target_rank, lane.path))
        if way is None:
            text = f"no path {lane.path} to rank {load.target_rank}"
            self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, text))
            return
        landed_at = lane.staging_offset + flight.staged.get(load.target_rank, 0)
        for copy in load.copies:
            if flight.is_off:
                return
            batch = self._batch(way, copy, staged_at, landed_at)
            submitted_s = self.rank.ports.now()
            try:
                ticket = self.rank.transport.submit(
                    way.peer, batch, fence, deadline_s=self.rank.config.timings.copy_s
                )
            except BatonError as error:
                self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, str(error)))
                return
            way.num_tickets += 1
            leg = Leg(way, load.target_rank, batch.spans.num_bytes, submitted_s)
            flight.tickets[ticket.number] = leg
            self.tickets[ticket.number] = (found, flight)

    def _batch(self, way: Way, copy: Copy, staged_at: int, landed_at: int) -> Batch:
        region: Region = self.rank.pools.regions[copy.source_buffer]
        # The coordinators tell the target when a chunk is complete: announcing every batch wakes it in vain.
        spans = place_in_staging(copy, staged_at, landed_at)
        return Batch(region, way.regions[copy.target_buffer], spans, is_announced=False)

    def moved(self, event: Event) -> None:
        """A copy is terminal."""
        if isinstance(event, Landed) or event.ticket.number not in self.tickets:
            return
        found, flight = self.tickets.pop(event.ticket.number)
        leg = flight.tickets.pop(event.ticket.number)
        way = leg.way
        way.num_tickets -= 1
        at_s = event.at_s if isinstance(event, Done) else 0.0
        found.handle.copies.append(
            Copied(
                leg.target_rank,
                flight.index,
                leg.num_bytes,
                leg.submitted_s,
                at_s or self.rank.ports.now(),
                isinstance(event, Done),
            )
        )
        if not isinstance(event, Done):
            if isinstance(event, FailedUnknown):
                flight.doubt = event.cause
            self._spoil(flight, self.rank.cause(Why.COPY_FAILED, Stage.COPY, event.cause))
        self._end_if_over(found, flight)
        if way.is_replaced:
            self._drop_ways()

    def cancel(self, found: Outgoing) -> None:
        """Calls every flight of a transfer off."""
        for flight in list(found.flights.values()):
            self._call_off(flight)
            self._end_if_over(found, flight)

    def _spoil(self, flight: Flight, cause: Cause) -> None:
        flight.cause = flight.cause or cause
        self._call_off(flight)

    def _call_off(self, flight: Flight) -> None:
        """What was not begun will not be; what was is asked to stop, and ends when it ends."""
        if not flight.is_off:
            flight.is_off = True
            flight.num_waits = 0
            for number in list(flight.tickets):
                self.rank.transport.cancel(Ticket(number))

    def _end_if_over(self, found: Outgoing, flight: Flight) -> None:
        if flight.cause is not None and not flight.is_over and not flight.is_told:
            flight.is_told = True
            self.failing(found, flight.cause)
        if not flight.is_over or found.flights.get(flight.index) is not flight:
            return
        del found.flights[flight.index]
        for lease in flight.leases:
            self.rank.pools.staging.give_back(lease)
        self.ended(found, flight)
        self._feed_starved()


def _pages_read(
    plan: Plan, prompt: Prompt, table: Mapping[str, Ints], what: tuple[Box, int]
) -> dict[str, list[int]]:
    return {group: ids.tolist() for group, ids in pages_read(plan, prompt, table, *what).items()}
