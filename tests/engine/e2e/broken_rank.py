"""A rank process in which something of the hand-over is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from time import monotonic

import msgspec

from baton.engine.rank import handing, pipeline, process
from baton.engine.rank.handing import Handing, Part
from baton.engine.rank.pipeline import Offers, Pipeline
from baton.engine.steps import Batch, Receive, Sampled, Work
from baton.protocol.outcomes import Aux
from baton.transport import NOW

COPIED_S_MAX = 30.0


def nothing() -> None:
    """The control: as it is."""


def wait_copied(part: Part) -> None:
    """Until what was offered is across, so that what is computed afterwards is not."""
    sending, limit_s = part.outgoing.sending, monotonic() + COPIED_S_MAX
    assert sending is not None
    while len({copy.index for copy in sending.copies}) < part.outgoing.num_offered:
        assert monotonic() < limit_s
        time.sleep(0.001)


def early_layers() -> None:
    """Every layer is offered before it is computed."""
    begin = Pipeline.before_forward

    def before_forward(self: Pipeline, batch: Batch) -> None:
        begin(self, batch)
        for part in self.leaving:
            self._handing.offer(part, self._layers, NOW)
            wait_copied(part)

    Pipeline.before_forward = before_forward
    Offers._give = lambda self, offer: None


def skipped_group() -> None:
    """One group of layers is never offered."""
    offer = Handing.offer

    def offer_but_one(self: Handing, part: Part, layers: tuple[int, int], fence: object) -> int | None:
        return None if layers[0] <= 2 < layers[1] else offer(self, part, layers, fence)

    Handing.offer = offer_but_one


def source_pages() -> None:
    """The source's page table is read backwards."""
    part = handing._part

    def part_backwards(work: Work, found: handing.Outgoing) -> Part:
        right = part(work, found)
        return replace(right, pages={group: ids[::-1].copy() for group, ids in right.pages.items()})

    handing._part = part_backwards


def target_pages() -> None:
    """The target's page table is read backwards."""
    receive = Handing.receive

    def receive_backwards(self: Handing, order: Receive) -> None:
        pages = {group: ids[::-1] for group, ids in order.pages.items()}
        receive(self, msgspec.structs.replace(order, pages=pages))

    Handing.receive = receive_backwards


def first_token() -> None:
    """The target is told another first token."""
    told = process.Rank._aux

    def told_wrongly(
        self: process.Rank, work: Work, samples: dict[int, list[Sampled]], num_cached: int
    ) -> tuple[Aux | None, bool]:
        aux, is_ended = told(self, work, samples, num_cached)
        if aux is None:
            return aux, is_ended
        tokens = tuple((token + 1) % self.parts.vocab_size for token in aux.tokens)
        return msgspec.structs.replace(aux, tokens=tokens, logprobs=()), is_ended

    process.Rank._aux = told_wrongly


BROKEN: Mapping[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        nothing,
        early_layers,
        skipped_group,
        source_pages,
        target_pages,
        first_token,
    )
}


def main(connection: Connection, name: str) -> None:
    """The whole life of a rank, broken by name."""
    assert pipeline.Pipeline is process.Pipeline
    BROKEN[name]()
    process.main(connection)
