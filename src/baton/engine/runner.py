"""The loop over a rank's layers, with every collective that they need.

Every rank of an instance takes part in every step, with an empty batch too, so that collectives match. What a
layer gives is a share of a sum; the runner sums it over tp, or, for MLPs of dp groups, over the rows of all
groups and the ranks of dp x tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.attention.passes import Pass
from baton.engine.attention.pools import CachePools
from baton.engine.attention.slots import Rows, deal_rows
from baton.engine.drafting import Following, Proposed, sampled_rows, with_forks, with_given
from baton.engine.models.base import Head, Layer, Stage
from baton.engine.parallel.mesh import Mesh
from baton.engine.steps import Batch
from baton.errors import EngineError


class Hooks(Protocol):
    """Who watches a forward, or acts on layers as they are done."""

    def before_forward(self, batch: Batch) -> None:
        """The batch of this rank's dp group is about to be computed."""

    def layer_done(self, layer: int) -> None:
        """What the layer stores is in the pools, or queued on the device to be."""

    def after_forward(self) -> None:
        """The last layer of this rank is through."""


class Quiet:
    """Hooks that do nothing."""

    def before_forward(self, batch: Batch) -> None:
        """Nothing."""

    def layer_done(self, layer: int) -> None:
        """Nothing."""

    def after_forward(self) -> None:
        """Nothing."""


class Runner:
    """Runs the stage of one rank."""

    def __init__(self, stage: Stage, mesh: Mesh, pools: CachePools) -> None:
        if mesh.is_first != (stage.embedding is not None) or mesh.is_last != (stage.head is not None):
            raise EngineError(
                "the first stage has the embedding and the last the head; this one does not fit"
            )
        self._stage = stage
        self._mesh = mesh
        self._pools = pools
        self._expected: tuple[int, torch.dtype] | None = None
        self._has_said = False
        self._vocabulary: list[int] | None = None
        self._ended: _Ended | None = None
        """The step that its draft is still to follow."""

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch], hooks: Hooks) -> Tensor | None:
        """One step, batches by dp group: logits (works to sample from, vocabulary) where they are whole.

        They are whole, in float32, on the last stage's cp 0, on all of its tp ranks; elsewhere, and where
        nothing is to be sampled, there is None.
        """
        if len(batches) != self._mesh.dp.size:
            raise EngineError(f"a step of {len(batches)} batches for {self._mesh.dp.size} dp groups")
        batch = batches[self._mesh.at["dp"]]
        step = _Step(batches, self._mesh)
        self._pools.copy_pages(batch.copies)
        x = self._begin(batch, step)
        # Not before: a later stage waits here for the one before it.
        hooks.before_forward(batch)
        attention = Pass(batch, self._mesh, self._pools)
        *_, last = self._stage.layers
        for layer in self._stage.layers:
            x = self._mixed(layer, x, attention, hooks)
            if layer is last and self._mesh.is_last and self._stage.draft is None:
                x = step.narrowed(x)
            x = self._fed(layer, x, step)
        hooks.after_forward()
        if not self._mesh.is_last:
            self._hand_on(x)
            return None
        self._ended = _Ended(batches, attention, x) if self._stage.draft else None
        return self._logits(x, step, self._stage.head)

    @property
    def has_draft(self) -> bool:
        """Whether `propose` is to follow every step."""
        return self._stage.draft is not None

    @torch.inference_mode()
    def propose(self, said: Sequence[Sequence[int]] | None, hooks: Hooks) -> Proposed:
        """The draft's part of the step that was run last: stores its cache entries and guesses on.

        `said` has, by work that was sampled from, the tokens that stand behind its known ones; the rank that
        sampled knows them and the others of its last stage take part with None.
        """
        ended, draft, head = self._ended, self._stage.draft, self._stage.head
        if ended is None or draft is None or head is None:
            raise EngineError("a draft follows a step on the last stage; there was none")
        self._ended = None
        at = self._mesh.at["dp"]
        batches = [with_forks(each) for each in ended.batches]
        follow = Following(batches[at], self._agree(batches[at], said))
        step = _Step(batches, self._mesh, follow.lasts)
        attention, hidden = ended.attention, head.normed(ended.rows)
        if batches[at] is not ended.batches[at]:
            attention = Pass(batches[at], self._mesh, self._pools)
            hidden = self._between(hidden, ended.batches[at], step)
        own = follow.tokens[step.own[0] : step.own[1]]
        ids = torch.from_numpy(own).to(self._pools.device, non_blocking=True)
        embedded = draft.embedding.scale(self._mesh.tp.sum(draft.embedding.embed(ids)))
        guessed_from = self._rows(hidden, step)
        x = self._mixed(draft.layer, draft.join(embedded, hidden), attention, hooks)
        x = self._fed(draft.layer, step.narrowed(x), step)
        logits = self._logits(x, step, draft.head)
        return Proposed([] if logits is None else logits.argmax(dim=-1).tolist(), guessed_from)

    def _between(self, hidden: Tensor, batch: Batch, step: _Step) -> Tensor:
        """This rank's rows for the draft, the given ones among them, of its rows of a batch."""
        rows = deal_rows(batch.num_rows, self._mesh.cp.size)
        every = self._mesh.cp.gather(hidden, rows.sizes) if rows.is_dealt else hidden
        return with_given(every, batch)[step.own[0] : step.own[1]]

    def _agree(self, batch: Batch, said: Sequence[Sequence[int]] | None) -> list[list[int]]:
        """What was sampled, on all ranks of the last stage."""
        num_works = sum(1 for work in batch.works if work.num_samples)
        if self._mesh.tp.size * self._mesh.cp.size == 1 or not num_works:
            return [list(tokens) for tokens in said or ()]
        width = 1 + max(work.num_drafted for work in batch.works)
        room = torch.zeros((num_works, 1 + width), dtype=torch.int64, device=self._pools.device)
        for row, tokens in enumerate(said or ()):
            room[row, : len(tokens) + 1] = torch.tensor([len(tokens), *tokens])
        return [each[1 : 1 + each[0]] for each in self._mesh.cp.sum(self._mesh.tp.sum(room)).tolist()]

    def _mixed(self, layer: Layer, x: Tensor, attention: Pass, hooks: Hooks) -> Tensor:
        if len(x):
            x = layer.join_mix(x, self._mesh.tp.sum(layer.mix(x, attention)))
        # What the layer stores is stored: it can leave while the rest of the layer is computed.
        hooks.layer_done(layer.index)
        return x

    def _fed(self, layer: Layer, x: Tensor, step: _Step) -> Tensor:
        if self._mesh.dp.size == 1:
            return layer.join_feed(x, self._mesh.width.sum(layer.feed(x))) if len(x) else x
        every = self._mesh.dp.gather(x, step.sizes)
        if len(every) == 0:
            return x
        fed = self._mesh.width.sum(layer.feed(every))
        return layer.join_feed(x, fed[step.first : step.first + step.num_own])

    def _begin(self, batch: Batch, step: _Step) -> Tensor:
        """The rows before this rank's first layer."""
        first, last = step.own
        if self._stage.embedding is None:
            num_hidden, dtype = self._agreed()
            return self._mesh.pipe.receive(
                torch.empty((last - first, num_hidden), dtype=dtype, device=self._pools.device)
            )
        ids = np.fromiter((i for work in batch.works for i in work.tokens), np.int64, batch.num_rows)
        tokens = torch.from_numpy(ids[first:last]).to(self._pools.device, non_blocking=True)
        embedding = self._stage.embedding
        x = embedding.scale(self._mesh.tp.sum(embedding.embed(tokens)))
        return _with_given(x, batch, step)

    def _agreed(self) -> tuple[int, torch.dtype]:
        """Width and type of the rows that come from the previous stage, which says them once."""
        if self._expected is None:
            room = torch.zeros(2, dtype=torch.int64, device=self._pools.device)
            said = self._mesh.pipe.receive(room).tolist()
            self._expected = (said[0], _SENT[said[1]])
        return self._expected

    def _hand_on(self, x: Tensor) -> None:
        if not self._has_said:
            self._has_said = True
            said = [x.shape[1], _SENT.index(x.dtype)]
            self._mesh.pipe.send(torch.tensor(said, device=x.device))
        self._mesh.pipe.send(x)

    def _rows(self, x: Tensor, step: _Step) -> Tensor:
        """The wanted ones of this rank's rows, on every cp rank."""
        wanted = step.wanted
        rows = x if step.is_narrowed else x.index_select(0, step.wanted_here(x.device))
        if not step.rows.is_dealt:
            return rows
        return self._mesh.cp.gather(
            rows, [int(((wanted >= a) & (wanted < b)).sum()) for a, b in step.rows.cuts]
        )

    def _logits(self, x: Tensor, step: _Step, head: Head | None) -> Tensor | None:
        """Of the rows to sample from."""
        if len(step.wanted) == 0 or head is None:
            return None
        rows = self._rows(x, step)
        if self._mesh.cp.index:
            return None
        part = head.logits(rows)
        if self._vocabulary is None:
            sizes = self._mesh.tp.stack(torch.tensor([part.shape[1]], device=part.device))
            self._vocabulary = sizes.flatten().tolist()
        return self._mesh.tp.gather(part.mT, self._vocabulary).mT.contiguous()


_SENT = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step as the last layer left it."""

    batches: Sequence[Batch]
    attention: Pass
    rows: Tensor


class _Step:
    """Which rows of a step lie where."""

    def __init__(self, batches: Sequence[Batch], mesh: Mesh, wanted: NDArray[np.int64] | None = None) -> None:
        every = [deal_rows(batch.num_rows, mesh.cp.size) for batch in batches]
        self.rows: Rows = every[mesh.at["dp"]]
        self.own = self.rows.cuts[mesh.cp.index]
        self.num_own = self.own[1] - self.own[0]
        self.sizes = [rows.sizes[mesh.cp.index] for rows in every]
        """Rows of each dp group at this rank's cp coordinate."""
        self.first = sum(self.sizes[: mesh.at["dp"]])
        self.wanted = sampled_rows(batches[mesh.at["dp"]]) if wanted is None else wanted
        """Rows of the batch that are sampled from."""
        self.is_narrowed = False

    def wanted_here(self, device: torch.device) -> Tensor:
        """Which of this rank's rows are sampled from."""
        here = self.wanted[(self.wanted >= self.own[0]) & (self.wanted < self.own[1])] - self.own[0]
        # Without waiting: the host would be no further than the device at the end of every forward.
        return torch.from_numpy(here).to(device, non_blocking=True)

    def narrowed(self, x: Tensor) -> Tensor:
        """What goes on when the last layer has stored its tokens: only rows that are sampled from.

        Rows that several ranks or dp groups share out stay as they are dealt.
        """
        if len(self.sizes) > 1 or self.rows.is_dealt or len(self.wanted) == len(x):
            return x
        self.is_narrowed = True
        return x.index_select(0, self.wanted_here(x.device))


def _with_given(x: Tensor, batch: Batch, step: _Step) -> Tensor:
    """Input embeddings in place of those of tokens; they are what the family's scaling would have given."""
    row = 0
    for work in batch.works:
        first, last = max(row, step.own[0]), min(row + len(work.tokens), step.own[1])
        if work.embeddings is not None and first < last:
            given = _given(work.embeddings, len(work.tokens), x.shape[1])
            x[first - step.own[0] : last - step.own[0]] = given[first - row : last - row].to(
                x.device, x.dtype
            )
        row += len(work.tokens)
    return x


def _given(content: bytes, num_rows: int, num_hidden: int) -> Tensor:
    if len(content) != 4 * num_rows * num_hidden:
        raise EngineError(
            f"{len(content)} bytes of input embeddings for {num_rows} tokens; "
            f"give {4 * num_hidden} bytes (float32) for each"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.float32).view(num_rows, num_hidden)
