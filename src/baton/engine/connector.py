"""The worker's side of KV hand-overs: prompts sent as they are computed, prompts received into pages.

Commands come on the listening thread, chunks from the compute thread, changes from the endpoint's; each
touches its own fields of a record, and a record exists before anything can happen to it. Where a step is
launched on a device, a hand-over is begun by the compute thread once the step's first layers are launched:
the endpoint's thread would hold them up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from baton.engine.commands import (
    AbortTransfer,
    CopiesDone,
    CopyRecord,
    DeclineTransfer,
    LayerReady,
    QueueTransfer,
    ReceiveKV,
    Reply,
    ScheduledSequence,
    SendCached,
    SendKV,
    TransferUpdate,
)
from baton.engine.cost_model import CostModel, PlannedStep
from baton.errors import BatonError
from baton.plan.tokens import Ints
from baton.protocol.outcomes import Aux, Cause, Failed, Stage, Waiting, Why
from baton.session import Digest, Endpoint, Receiving, Request, Sending
from baton.session.handles import Handle
from baton.session.remote import RemoteEndpoint
from baton.transport import Fence


@dataclass(slots=True)
class OutgoingTransfer:
    """A prompt that this rank sends."""

    command: SendKV
    is_begun: bool = False
    sending: Sending | None = None
    """None before it is begun, and where that failed."""
    answered: threading.Event = field(default_factory=threading.Event)
    """Set when the target granted it, or it is over."""
    num_chunks: int = 0
    is_committed: bool = False
    """Everything of it is offered."""
    ready_s: dict[int, float] = field(default_factory=dict)
    """By chunk: when it was computed, which on a GPU is long after it was offered."""
    layers_ready: dict[int, Callable[[], list[LayerReady]]] = field(default_factory=dict)
    """By chunk: what its layers had to send, in proportion; computed when the transfer is over."""
    planned: PlannedStep | None = None
    """What was predicted for the last step that computed some of it."""
    last_update: TransferUpdate | None = None

    @property
    def session(self) -> int:
        """The session whose link it leaves by; 0 before the grant."""
        return self.sending.session if self.sending else 0


@dataclass(slots=True)
class IncomingTransfer:
    """A prompt that this rank receives."""

    receiving: Receiving | None = None
    last_update: TransferUpdate | None = None


@dataclass(frozen=True, slots=True)
class PromptSlice:
    """The part of an outgoing prompt that one step computes."""

    scheduled: ScheduledSequence
    transfer: OutgoingTransfer
    tokens: tuple[int, int]
    pages: Mapping[str, Ints]
    """The page table, as arrays: it is offered once for each group of layers."""


class KVConnector:
    """Every hand-over that this rank takes part in."""

    def __init__(
        self,
        endpoint: Endpoint | RemoteEndpoint,
        layers: tuple[int, int],
        costs: CostModel,
        reply: Callable[[Reply], None],
        *,
        num_drafts: int = 0,
        is_verified: bool = False,
        begins_with_step: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self._layers = (layers[0], layers[1] + num_drafts)
        """Those of the model, and on the last stage the draft layers after them."""
        self._costs = costs
        self._is_verified = is_verified
        """Whether what is received is checked by checksums."""
        self._begins_with_step = begins_with_step
        self._begin_lock = threading.Lock()
        self._rank = endpoint.config.rank
        layout = endpoint.config.spec.layout
        self._dp = layout.coordinates(self._rank)["dp"]
        self._dp_ranks = layout.group(self._dp)
        self._reply = reply
        self._outgoing: dict[int, OutgoingTransfer] = {}
        self._incoming: dict[int, IncomingTransfer] = {}
        self._sequences: dict[str, int] = {}
        """By transfer."""
        endpoint.on_change(self._on_change)

    def send(self, command: SendKV) -> None:
        """Sends a prompt, if it belongs to this rank's dp group."""
        if command.dp != self._dp:
            return
        transfer = self._outgoing[command.sequence] = OutgoingTransfer(command)
        self._sequences[command.transfer] = command.sequence
        if command.is_queued or not self._begins_with_step:
            self.begin(transfer)

    def send_cached(self, command: SendCached) -> None:
        """Offers the cached tokens of a prompt that was queued, unless its hand-over has ended since."""
        transfer = self._outgoing.get(command.sequence)
        if transfer and transfer.sending and isinstance(transfer.sending.state, Waiting):
            transfer.sending.ready(self._layers, (0, command.num_cached), command.pages)
            transfer.num_chunks = 1

    def begin(self, transfer: OutgoingTransfer) -> None:
        """Opens a hand-over at the endpoint, once; cached tokens are ready at once."""
        command = transfer.command
        with self._begin_lock:
            if transfer.is_begun:
                return
            transfer.is_begun = True
            self._costs.begin_copies()  # before the endpoint can report its end
            try:
                digest = Digest(command.num_tokens, command.digest)
                sending = self.endpoint.send(command.transfer, digest, is_queued=command.is_queued)
                if command.num_cached:
                    sending.ready(self._layers, (0, command.num_cached), command.pages)
                    transfer.num_chunks = 1
                transfer.sending = sending
            except BatonError as error:
                self._costs.add_copies(0, (), {})
                transfer.answered.set()
                self._fail(command.sequence, command.transfer, str(error))

    def receive(self, command: ReceiveKV) -> None:
        """Receives a prompt into pages of this dp group; the group's first rank asks for all of them."""
        if command.dp != self._dp or self._rank != self._dp_ranks[0]:
            return
        transfer = self._incoming[command.sequence] = IncomingTransfer()
        self._sequences[command.transfer] = command.sequence
        request = Request(
            transfer=command.transfer,
            source=command.source,
            digest=Digest(command.num_tokens, command.digest),
            pages=dict.fromkeys(self._dp_ranks, command.pages),
            held=command.held,
            source_dp=command.source_dp,
            is_verified=self._is_verified,
        )
        try:
            transfer.receiving = self.endpoint.receive(request)
        except BatonError as error:
            self._fail(command.sequence, command.transfer, str(error))

    def decline(self, command: DeclineTransfer) -> None:
        """Informs a source that this instance has no room."""
        if command.dp == self._dp and self._rank == self._dp_ranks[0]:
            self.endpoint.decline(command.transfer, command.source, command.text)

    def queue(self, command: QueueTransfer) -> None:
        """Notifies the peer that a hand-over waits here and that the queue moves."""
        if command.dp != self._dp or self._rank != self._dp_ranks[0]:
            return
        if command.source:
            self.endpoint.queue(command.transfer, command.source)
        elif (transfer := self._outgoing.get(self._sequences.get(command.transfer, -1))) and transfer.sending:
            transfer.sending.queued()

    def abort(self, command: AbortTransfer) -> None:
        """Gives a hand-over up; the outcome follows."""
        if outgoing := self._outgoing.get(command.sequence):
            self.begin(outgoing)  # or no outcome would follow
            if outgoing.sending:
                outgoing.sending.abort(command.text)
        if (incoming := self._incoming.get(command.sequence)) and incoming.receiving:
            incoming.receiving.abort(command.text)

    def slices(self, sequences: Iterable[ScheduledSequence]) -> list[PromptSlice]:
        """The sequences of a step whose prompts are sent, in the step's order."""
        return [
            _slice(scheduled, transfer)
            for scheduled in sequences
            if (transfer := self._outgoing.get(scheduled.sequence)) is not None
        ]

    def offer(self, part: PromptSlice, layers: tuple[int, int], fence: Fence) -> int | None:
        """These layers of a slice are computed once the fence is ready; returns the index of the chunk."""
        transfer = part.transfer
        if transfer.sending is None or not isinstance(transfer.sending.state, Waiting):
            return None
        if part.tokens[0] == part.tokens[1]:
            return None
        transfer.sending.ready(layers, part.tokens, part.pages, fence)
        transfer.num_chunks += 1
        return transfer.num_chunks - 1

    def commit(self, part: PromptSlice, aux: Aux | None, *, is_ended: bool) -> None:
        """Commits a prompt whose last slice is offered; the rank that sampled adds the aux record.

        Where the answer ended with its first token, the target gets that instead.
        """
        sending = part.transfer.sending
        if sending is None or not isinstance(sending.state, Waiting):
            return
        if part.tokens[1] < part.transfer.command.num_tokens:
            return
        part.transfer.is_committed = True
        if is_ended and aux is not None:
            sending.finish(aux)
        else:
            sending.commit(aux)

    def behind_s(self, now_s: float) -> float | None:
        """For how long a computed prompt has not arrived, at the longest; None: none is on its way."""
        on_their_way = [
            transfer
            for transfer in list(self._outgoing.values())
            if transfer.ready_s and transfer.sending and transfer.sending.is_granted
        ]
        if not on_their_way:
            return None
        computed_s = [max(transfer.ready_s.values()) for transfer in on_their_way if transfer.is_committed]
        return max(0.0, now_s - min(computed_s, default=now_s))

    def close(self) -> None:
        """Leaves the instance."""
        self.endpoint.close()

    def _on_change(self, handle: Handle) -> None:
        sequence = self._sequences.get(handle.transfer)
        if sequence is None:
            return
        transfer = self._outgoing.get(sequence) or self._incoming.get(sequence)
        assert transfer is not None
        is_granted = isinstance(handle, Sending) and handle.is_granted
        is_target_full = isinstance(handle, Sending) and handle.is_target_full
        outcome = None if isinstance(handle.state, Waiting) else handle.state
        early = handle.early if isinstance(handle, Receiving) else None
        if isinstance(transfer, OutgoingTransfer) and (is_granted or outcome is not None):
            transfer.answered.set()
        update = TransferUpdate(
            self._rank, sequence, is_granted, is_target_full, outcome, early, handle.is_released
        )
        if update == transfer.last_update:
            return
        transfer.last_update = update
        if handle.is_released:
            del self._sequences[handle.transfer]
            self._outgoing.pop(sequence, None)
            self._incoming.pop(sequence, None)
            if isinstance(handle, Sending):
                assert isinstance(transfer, OutgoingTransfer)
                self._report_copies(sequence, transfer, handle)
        self._reply(update)

    def _report_copies(self, sequence: int, transfer: OutgoingTransfer, sending: Sending) -> None:
        """Learns from the copies of a finished hand-over, and reports them."""
        copies = [
            CopyRecord(
                copy.target_rank,
                copy.index,
                copy.num_bytes,
                max(copy.submitted_s, transfer.ready_s.get(copy.index, 0.0)),
                copy.ended_s,
            )
            for copy in sending.copies
            if copy.is_done
        ]
        self._costs.add_copies(sending.session, copies, transfer.ready_s)
        if transfer.planned is not None and copies and transfer.is_committed:
            self._costs.add_outcome(transfer.planned, max(copy.ended_s for copy in copies))
        layers_ready = {chunk: layers() for chunk, layers in transfer.layers_ready.items()}
        self._reply(
            CopiesDone(self._rank, sequence, with_layers_ready(copies, layers_ready, transfer.ready_s))
        )

    def _fail(self, sequence: int, transfer: str, text: str) -> None:
        """Reports a hand-over that could not begin; no page of it is held."""
        self._sequences.pop(transfer, None)
        self._incoming.pop(sequence, None)
        self._outgoing.pop(sequence, None)
        cause = Cause(Why.ABORTED, Stage.OFFER, self.endpoint.config.instance, self._rank, text)
        self._reply(TransferUpdate(self._rank, sequence, outcome=Failed(cause), is_released=True))


def _slice(scheduled: ScheduledSequence, transfer: OutgoingTransfer) -> PromptSlice:
    start = scheduled.start
    stop = max(start, min(start + len(scheduled.tokens), transfer.command.num_tokens))
    pages = {group: np.asarray(ids, dtype=np.int64) for group, ids in scheduled.pages.items()}
    return PromptSlice(scheduled, transfer, (start, stop), pages)


def with_layers_ready(
    copies: Sequence[CopyRecord],
    layers_ready: Mapping[int, Sequence[LayerReady]],
    ready_s: Mapping[int, float],
) -> list[CopyRecord]:
    """The copies of a hand-over, the first one of each chunk with the layers of the chunk.

    The bytes that were copied are divided in proportion to `layers_ready`. A chunk without any there counts
    as one layer, ready at its `ready_s`; cached tokens were always ready."""
    left_bytes: dict[int, int] = {}
    for copy in copies:
        left_bytes[copy.chunk] = left_bytes.get(copy.chunk, 0) + copy.num_bytes
    completed = []
    for copy in copies:
        if num_bytes := left_bytes.pop(copy.chunk, 0):
            layers = layers_ready.get(copy.chunk) or [LayerReady(ready_s.get(copy.chunk, 0.0), num_bytes)]
            part = num_bytes / sum(layer.num_bytes for layer in layers)
            divided = [
                LayerReady(layer.ready_s, round(layer.num_bytes * part), round(layer.state_bytes * part))
                for layer in layers
            ]
            completed.append(replace(copy, layers_ready=divided))
        else:
            completed.append(copy)
    return completed
