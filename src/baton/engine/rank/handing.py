"""This rank's hand-overs: chunks out as they are computed, prompts in as they are promised.

Orders come on the listening thread, chunks from the computing one, changes from the endpoint's; each touches
its own part of a record, and a record is there before anything can happen to it. Where a step is launched on
a device, the endpoint hears of a prompt when the step's first layers are: its thread would hold them up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from baton.engine.rank.pace import Pace
from baton.engine.rank.readiness import with_dues
from baton.engine.steps import (
    Abort,
    Answer,
    Changed,
    Copied,
    CopyRecord,
    Decline,
    Due,
    Receive,
    Send,
    Work,
)
from baton.errors import BatonError
from baton.plan.tokens import Ints
from baton.protocol.outcomes import Aux, Cause, Failed, Stage, Waiting, Why
from baton.session import Digest, Endpoint, Receiving, Request, Sending
from baton.session.handles import Handle
from baton.transport import Fence


@dataclass(slots=True)
class Outgoing:
    """A prompt that leaves."""

    order: Send
    is_begun: bool = False
    sending: Sending | None = None
    """None before it is begun, and where it could not be."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Set when it is granted, or over."""
    num_offered: int = 0
    ready_s: dict[int, float] = field(default_factory=dict)
    """By chunk: when it was computed, which on a GPU is long after it was offered."""
    dues: dict[int, Callable[[], list[Due]]] = field(default_factory=dict)
    """By chunk: what its layers had to send, in proportion to each other; worked out when all is over."""
    told: Changed | None = None


@dataclass(slots=True)
class Incoming:
    """A prompt that is to come."""

    order: Receive
    receiving: Receiving | None = None
    told: Changed | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of a prompt that leaves."""

    work: Work
    outgoing: Outgoing
    tokens: tuple[int, int]
    pages: Mapping[str, Ints]
    """The page table, as arrays: it is offered once for each group of layers."""


class Handing:
    """Every hand-over that this rank takes part in."""

    def __init__(
        self,
        endpoint: Endpoint,
        layers: tuple[int, int],
        tell: Callable[[Answer], None],
        *,
        num_drafts: int = 0,
        is_begun_later: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.layers = layers
        """Of the model; draft layers, on the last stage, follow them."""
        self._every_layer = (layers[0], layers[1] + num_drafts)
        self.pace = Pace()
        self._is_begun_later = is_begun_later
        """Whether who computes a prompt begins its hand-over."""
        self._begin_lock = threading.Lock()
        layout = endpoint.config.spec.layout
        self._dp = layout.coordinates(self._rank)["dp"]
        self._group = layout.group(self._dp)
        self._tell = tell
        self._out: dict[int, Outgoing] = {}
        self._in: dict[int, Incoming] = {}
        self._numbers: dict[str, int] = {}
        endpoint.on_change(self._changed)

    @property
    def _rank(self) -> int:
        return self.endpoint.config.rank

    def send(self, order: Send) -> None:
        """A prompt of this rank's dp group is to leave."""
        if order.dp != self._dp:
            return
        found = self._out[order.sequence] = Outgoing(order)
        self._numbers[order.transfer] = order.sequence
        if not self._is_begun_later:
            self.begin(found)

    def begin(self, found: Outgoing) -> None:
        """Tells the endpoint of a prompt, once; what is cached of it is ready at once."""
        order = found.order
        with self._begin_lock:
            if found.is_begun:
                return
            found.is_begun = True
            try:
                sending = self.endpoint.send(order.transfer, Digest(order.num_tokens, order.digest))
                if order.num_cached:
                    sending.ready(self._every_layer, (0, order.num_cached), order.pages)
                    found.num_offered = 1
                found.sending = sending
            except BatonError as error:
                found.answered.set()
                self._refuse(order.sequence, order.transfer, str(error))

    def receive(self, order: Receive) -> None:
        """A prompt is to come into pages of this dp group; the group's first rank asks for all of them."""
        if order.dp != self._dp or self._rank != self._group[0]:
            return
        found = self._in[order.sequence] = Incoming(order)
        self._numbers[order.transfer] = order.sequence
        request = Request(
            transfer=order.transfer,
            source=order.source,
            digest=Digest(order.num_tokens, order.digest),
            pages=dict.fromkeys(self._group, order.pages),
            held=order.held,
            source_dp=order.source_dp,
        )
        try:
            found.receiving = self.endpoint.receive(request)
        except BatonError as error:
            self._refuse(order.sequence, order.transfer, str(error))

    def decline(self, order: Decline) -> None:
        """Tells a source that there is no room."""
        if order.dp == self._dp and self._rank == self._group[0]:
            self.endpoint.decline(order.transfer, order.source, order.text)

    def abort(self, order: Abort) -> None:
        """Gives a hand-over up; the verdict follows."""
        if outgoing := self._out.get(order.sequence):
            self.begin(outgoing)  # or nobody would hear how it ended
            if outgoing.sending:
                outgoing.sending.abort(order.text)
        if (incoming := self._in.get(order.sequence)) and incoming.receiving:
            incoming.receiving.abort(order.text)

    def leaving(self, works: Iterable[Work]) -> list[Part]:
        """The works of a step whose prompts leave, in the step's order."""
        pairs = ((work, self._out.get(work.sequence)) for work in works)
        return [_part(work, found) for work, found in pairs if found is not None]

    def offer(self, part: Part, layers: tuple[int, int], fence: Fence) -> int | None:
        """These layers of a step's tokens are computed, or will be when the fence is ready: which chunk."""
        found = part.outgoing
        if found.sending is None or not isinstance(found.sending.state, Waiting):
            return None
        if part.tokens[0] == part.tokens[1]:
            return None
        found.sending.ready(layers, part.tokens, part.pages, fence)
        found.num_offered += 1
        return found.num_offered - 1

    def commit(self, part: Part, aux: Aux | None, *, is_ended: bool) -> None:
        """The prompt is through this rank; the one that sampled has the aux record, or the whole answer."""
        sending = part.outgoing.sending
        if sending is None or not isinstance(sending.state, Waiting):
            return
        if part.tokens[1] < part.outgoing.order.num_tokens:
            return
        if is_ended and aux is not None:
            sending.finish(aux)
        else:
            sending.commit(aux)

    def session_of(self, found: Outgoing) -> int:
        """Whose link a prompt leaves by; 0 before it is granted."""
        return found.sending.session if found.sending else 0

    def close(self) -> None:
        """Leaves the instance."""
        self.endpoint.close()

    def _changed(self, handle: Handle) -> None:
        number = self._numbers.get(handle.transfer)
        if number is None:
            return
        found = self._out.get(number) or self._in.get(number)
        assert found is not None
        is_granted = isinstance(handle, Sending) and handle.is_granted
        outcome = None if isinstance(handle.state, Waiting) else handle.state
        early = handle.early if isinstance(handle, Receiving) else None
        if isinstance(found, Outgoing) and (is_granted or outcome is not None):
            found.answered.set()
        message = Changed(self._rank, number, is_granted, outcome, early, handle.is_released)
        if message == found.told:
            return
        found.told = message
        if handle.is_released:
            del self._numbers[handle.transfer]
            self._close(number, handle)
        self._tell(message)

    def _close(self, number: int, handle: Handle) -> None:
        """Nothing more will happen to a hand-over: what it took is learned from and told."""
        self._in.pop(number, None)
        if isinstance(handle, Sending):
            found = self._out.pop(number, None)
            ready_s = found.ready_s if found else {}
            dues = {chunk: due() for chunk, due in found.dues.items()} if found else {}
            copies = [
                CopyRecord(
                    copy.target_rank,
                    copy.index,
                    copy.num_bytes,
                    max(copy.submitted_s, ready_s.get(copy.index, 0.0)),
                    copy.ended_s,
                )
                for copy in handle.copies
                if copy.is_done
            ]
            self.pace.sent(handle.session, copies, ready_s)
            self._tell(Copied(self._rank, number, with_dues(copies, dues, ready_s)))

    def _refuse(self, number: int, transfer: str, text: str) -> None:
        """A hand-over that could not begin here: nothing of it is held."""
        self._numbers.pop(transfer, None)
        self._in.pop(number, None)
        self._out.pop(number, None)
        cause = Cause(Why.ABORTED, Stage.OFFER, self.endpoint.config.instance, self._rank, text)
        self._tell(Changed(self._rank, number, outcome=Failed(cause), is_released=True))


def _part(work: Work, found: Outgoing) -> Part:
    stop = max(work.start, min(work.start + len(work.tokens), found.order.num_tokens))
    pages = {group: np.asarray(ids, dtype=np.int64) for group, ids in work.pages.items()}
    return Part(work, found, (work.start, stop), pages)
