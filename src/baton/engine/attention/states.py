"""The recurrent states of one pass: the slot of each sequence, and the ranks that keep its units.

Theory. A state's page is a slot, one per sequence. Before a sequence's first token its state is read as zero,
whatever the slot held before, so a slot needs no clearing when it is reused. Sequences with equally many rows
are computed together, among them all that decode.

A state cannot forget a token, so it never takes in a draft token before that is accepted. What is stored is
the state after the last known token; the rows of the draft tokens behind it are computed from there and kept
beside the pool. The next step says how many of them were accepted, and computes these once more before its
own: rows are small, and a state for each of them would not be.

Units are cut over tp component by component. A rank may compute with units that another keeps (a value head
whose key head lies elsewhere, where sizes do not divide); then the kept ones are gathered over tp first.
Whether that is needed follows from the cut, so all ranks of a group agree. Over cp, states are mirrored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.pools import CachePools
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.models.base import Recurrence
from baton.engine.parallel import RankGroup
from baton.errors import EngineError
from baton.plan.cache import Component
from baton.plan.ownership import cuts
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class Alike:
    """Sequences with equally many rows in a pass."""

    num_tokens: int
    num_drafted: int
    """How many of the last tokens are draft tokens."""
    num_accepted: int
    """Draft tokens of their last step that come before these tokens."""
    rows: Tensor | None
    """Of all of them, one sequence after the other; None: these are all rows, in their order."""
    slots: Tensor
    begun: Tensor | None
    """Which of the sequences begin here; None: none does."""


class PassStates:
    """The states of a batch's sequences; every rank of a tp group has the same batch."""

    def __init__(self, batch: ScheduledBatch, pools: CachePools, tp: RankGroup) -> None:
        self._batch = batch
        self._pools = pools
        self._tp = tp
        self._alike: dict[str, list[Alike]] = {}

    def recur(self, layer: int, rows: Tensor, rule: Recurrence) -> Tensor:
        """Returns the results for all rows of the batch, and stores the states after them."""
        group = self._pools.component(next(iter(rule.parts)), layer).group
        results: Tensor | None = None
        for alike in self._of_group(group):
            taken = rows if alike.rows is None else rows.index_select(0, alike.rows)
            before = {part: self._read(part, layer, units, alike) for part, units in rule.parts.items()}
            own = torch.unflatten(taken, 0, (-1, alike.num_tokens))
            known, guessed = own.tensor_split((alike.num_tokens - alike.num_drafted,), dim=1)
            if alike.num_accepted:
                accepted = self._pools.guessed[layer].index_select(0, alike.slots)[:, : alike.num_accepted]
                known = torch.cat((accepted, known), dim=1)
            out, after = rule.advance(known, before)
            for part, state in after.items():
                self._write(part, layer, state, (rule.parts[part], alike.slots))
            out = out[:, alike.num_accepted :]
            if alike.num_drafted:
                self._keep_guessed(layer, guessed, alike.slots)
                out = torch.cat((out, rule.advance(guessed, after)[0]), dim=1)
            flat = out.flatten(0, 1)
            if alike.rows is None:
                return flat
            if results is None:
                results = flat.new_empty((len(rows), *flat.shape[1:]))
            results.index_copy_(0, alike.rows, flat)
        assert results is not None, "a pass without rows has nothing to recur over"
        return results

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over tp."""
        return self._tp.sum(x)

    def _of_group(self, group: str) -> list[Alike]:
        if group not in self._alike:
            self._alike[group] = list(_alike(self._batch, group, self._pools.device))
        return self._alike[group]

    def _read(self, part: str, layer: int, units: Sequence[Range], alike: Alike) -> Tensor:
        """(sequences, units that this rank computes with, ...)."""
        kept = self._pools.view(part, layer).index_select(0, alike.slots)
        if alike.begun is not None:
            # Not a product: what an earlier owner left need not be finite.
            kept.index_fill_(0, alike.begun, 0.0)
        blocks = self._blocks(part, layer)
        if tuple(units) == blocks:
            return kept
        every = self._tp.gather(kept.transpose(0, 1).contiguous(), [last - first for first, last in blocks])
        places = {unit: i for i, unit in reversed(list(enumerate(_spelt_out(blocks))))}
        wanted = [places[unit] for unit in range(*units[self._tp.index])]
        return every[wanted].transpose(0, 1)

    def _write(self, part: str, layer: int, state: Tensor, where: tuple[Sequence[Range], Tensor]) -> None:
        units, slots = where
        pool = self._pools.view(part, layer)
        first, last = self._blocks(part, layer)[self._tp.index]
        start = units[self._tp.index][0]
        pool.index_copy_(0, slots, state[:, first - start : last - start].to(pool.dtype))

    def _keep_guessed(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        kept, num_drafted = self._pools.guessed.get(layer), rows.shape[1]
        if kept is None or kept.shape[1] < num_drafted:
            num_slots = self._pools.view("ssm", layer).shape[0]
            wider = rows.new_zeros((num_slots, *rows.shape[1:]))
            if kept is not None:
                wider[:, : kept.shape[1]] = kept
            kept = self._pools.guessed[layer] = wider
        kept[:, :num_drafted].index_copy_(0, slots, rows)

    def _blocks(self, part: str, layer: int) -> tuple[Range, ...]:
        """The units that each tp rank keeps."""
        component: Component = self._pools.component(part, layer)
        return cuts(self._pools.spec, component, "engine").units


def _spelt_out(blocks: Sequence[Range]) -> list[int]:
    return [unit for block in blocks for unit in range(*block)]


def _alike(batch: ScheduledBatch, group: str, device: torch.device) -> list[Alike]:
    works: dict[tuple[int, int, int], list[tuple[ScheduledSequence, int]]] = {}
    row = 0
    for work in batch.sequences:
        if work.tokens:
            key = (len(work.tokens), work.num_drafted, work.num_accepted)
            works.setdefault(key, []).append((work, row))
        row += len(work.tokens)
    batches = []
    for (num_tokens, num_drafted, num_accepted), members in sorted(works.items()):
        slots = torch.tensor([_slot(work, group) for work, _ in members])
        begun = [i for i, (work, _) in enumerate(members) if work.start == 0]
        rows = None
        if len(works) > 1:
            firsts = np.array([first for _, first in members], dtype=np.int64)
            places = (firsts[:, None] + np.arange(num_tokens)).reshape(-1)
            rows = torch.from_numpy(places).to(device, non_blocking=True)
        batches.append(
            Alike(
                num_tokens,
                num_drafted,
                num_accepted,
                rows,
                slots.to(device, non_blocking=True),
                torch.tensor(begun).to(device, non_blocking=True) if begun else None,
            )
        )
    return batches


def _slot(work: ScheduledSequence, group: str) -> int:
    table = work.pages.get(group)
    if not table:
        raise EngineError(f"sequence {work.sequence} has no slot of {group!r} for its recurrent state")
    return table[0]
