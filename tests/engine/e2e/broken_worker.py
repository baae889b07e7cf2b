"""A worker process in which something of the hand-over is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import msgspec

from baton.engine import connector, worker
from baton.engine.commands import ReceiveKV, SampledToken, ScheduledBatch, ScheduledSequence
from baton.engine.connector import KVConnector, OutgoingTransfer, PromptSlice
from baton.engine.drafting import DraftTokens
from baton.engine.layer_pipeline import LayerPipeline
from baton.engine.worker import Worker
from baton.plan.chunks import Gathers
from baton.plan.steps import STAGING
from baton.protocol.outcomes import Aux
from baton.session import tensors
from baton.transport import NOW

COPIED_S_MAX = 30.0


def nothing() -> None:
    """The control: as it is."""


def wait_copied(part: PromptSlice) -> None:
    """Until what was offered is across, so that what is computed afterwards is not."""
    sending, limit_s = part.transfer.sending, monotonic() + COPIED_S_MAX
    assert sending is not None
    while len({copy.index for copy in sending.copies}) < part.transfer.num_chunks:
        assert monotonic() < limit_s
        time.sleep(0.001)


def early_layers() -> None:
    """Every layer is offered before it is computed."""
    begin = LayerPipeline.before_forward

    def before_forward(self: LayerPipeline, batch: ScheduledBatch) -> None:
        begin(self, batch)
        for part in self.slices:
            self._connector.offer(part, self._layers, NOW)
            wait_copied(part)

    LayerPipeline.before_forward = before_forward
    LayerPipeline._offer = lambda self, *, is_last=False: None


def skipped_group() -> None:
    """One group of layers is never offered."""
    offer = KVConnector.offer

    def offer_but_one(
        self: KVConnector, part: PromptSlice, layers: tuple[int, int], fence: object
    ) -> int | None:
        return None if layers[0] <= 2 < layers[1] else offer(self, part, layers, fence)

    KVConnector.offer = offer_but_one


def source_pages() -> None:
    """The source's page table is read backwards."""
    slice_prompt = connector._slice

    def slice_backwards(scheduled: ScheduledSequence, transfer: OutgoingTransfer) -> PromptSlice:
        right = slice_prompt(scheduled, transfer)
        return replace(right, pages={group: ids[::-1].copy() for group, ids in right.pages.items()})

    connector._slice = slice_backwards


def target_pages() -> None:
    """The target's page table is read backwards."""
    receive = KVConnector.receive

    def receive_backwards(self: KVConnector, command: ReceiveKV) -> None:
        pages = {group: ids[::-1] for group, ids in command.pages.items()}
        receive(self, msgspec.structs.replace(command, pages=pages))

    KVConnector.receive = receive_backwards


def first_token() -> None:
    """The target gets another first token."""
    make_aux = Worker._aux

    def wrong_aux(
        self: Worker, part: PromptSlice, samples: dict[int, list[SampledToken]], draft: DraftTokens | None
    ) -> tuple[Aux | None, bool]:
        aux, is_ended = make_aux(self, part, samples, draft)
        if aux is None:
            return aux, is_ended
        tokens = tuple((token + 1) % self.sizes.architecture.vocab_size for token in aux.tokens)
        return msgspec.structs.replace(aux, tokens=tokens, logprobs=()), is_ended

    Worker._aux = wrong_aux


def turned_bit() -> None:
    """A bit of what arrived is wrong; with checksums the target sees it."""
    compute = tensors.checksums

    def checksums(sums: Gathers, buffers: Mapping[str, Any], staging: Any = None) -> dict[str, bytes]:
        buffer, spans = next(iter(sums.values()))
        (staging if buffer == STAGING else buffers[buffer])[int(spans.source[0])] ^= 0x10
        return compute(sums, buffers, staging)

    tensors.checksums = checksums


BROKEN: Mapping[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        nothing,
        early_layers,
        skipped_group,
        source_pages,
        target_pages,
        first_token,
        turned_bit,
    )
}


def main(connection: Connection, name: str) -> None:
    """Runs a worker that is broken by name."""
    BROKEN[name]()
    worker.main(connection)
