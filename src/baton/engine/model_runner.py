"""Runs a rank's layers for one step, with every collective that they need, and samples tokens.

Every rank of an instance takes part in every step, with an empty batch too, so that collectives match. A
layer gives a share of a sum; the runner sums it over tp or, for the MLPs of dp groups, over the rows of all
groups and the ranks of dp x tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.attention.passes import Pass
from baton.engine.attention.pools import CachePools, stem
from baton.engine.attention.slots import RankRows, deal_rows
from baton.engine.commands import SampledToken, ScheduledBatch, ScheduledSequence
from baton.engine.drafting import (
    DraftTokens,
    NextTokens,
    guess_batch,
    logits_rows,
    num_guesses_max,
    with_forks,
    with_given_rows,
)
from baton.engine.models.base import Attention
from baton.engine.models.layers import Decoder, DraftLayer, ModelStage, VocabularyHead
from baton.engine.parallel import Mesh
from baton.engine.sampler import ROWS_AT_ONCE, Sampler, Want, with_logprobs
from baton.errors import EngineError

if TYPE_CHECKING:
    # Imports a compiler for GPUs, which a host has no use for.
    from baton.engine.attention.paged_pass import PagedPass
    from baton.engine.decode_graphs import DecodeGraphs

_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The types of rows between stages, which send them as an index."""
_PAGED_PARTS = ("k", "v", "latent")
"""What layers may cache where their decode steps run on paged kernels."""


class ForwardHooks(Protocol):
    """Called as a forward proceeds."""

    def before_forward(self, batch: ScheduledBatch) -> None:
        """The batch of this rank's dp group is about to be computed."""

    def layer_done(self, layer: int) -> None:
        """The cache entries of the layer are in the pools, or queued on the device to be."""

    def after_forward(self) -> None:
        """The last layer of this rank is computed, or queued."""


class ModelRunner:
    """Runs the stage of one rank."""

    def __init__(
        self, stage: ModelStage, mesh: Mesh, pools: CachePools, decoding: DecodeGraphs | None = None
    ) -> None:
        if mesh.is_first != (stage.embedding is not None) or mesh.is_last != (stage.head is not None):
            raise EngineError(
                "the first stage has the embedding and the last the head; this one does not fit"
            )
        self._stage = stage
        self._mesh = mesh
        self._pools = pools
        self._decoding = decoding
        """For decode steps on a GPU, where its kernels can run them."""
        self._row_format: tuple[int, torch.dtype] | None = None
        """Width and type of the rows from the previous stage, which sends them once."""
        self._has_sent_format = False
        self._vocab_shares: list[int] | None = None
        """How many tokens of the vocabulary each tp rank has."""
        self._draft_input: _DraftInput | None = None
        """The step that the draft still has to follow."""
        self.prompt_logprobs: dict[int, list[SampledToken]] = {}
        """Of the last step: the `scored_tokens` by sequence, on the rank that samples."""

    @property
    def has_draft(self) -> bool:
        """Whether `propose` has to follow every step."""
        return self._stage.draft is not None

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures decode steps as CUDA graphs; see `why_not_captured`."""
        assert self._decoding is not None, "decode steps do not run on the paged kernels"
        self._decoding.capture(self._decode)

    @torch.inference_mode()
    def run(self, batches: Sequence[ScheduledBatch], hooks: ForwardHooks) -> Tensor | None:
        """Runs one step, batches by dp group; returns logits (rows to sample from, vocabulary).

        Log-probabilities of prompts are in `prompt_logprobs` then.

        They are in float32, on the last stage's cp 0, on all of its tp ranks; elsewhere, and where nothing is
        to be sampled, None is returned.
        """
        if len(batches) != self._mesh.dp.size:
            raise EngineError(f"a step of {len(batches)} batches for {self._mesh.dp.size} dp groups")
        batch = batches[self._mesh.at["dp"]]
        self.prompt_logprobs = {}
        self._pools.copy_pages(batch.copies)
        decoding = self._decoding if self._decoding is not None and self._decoding.fits(batch) else None
        *_, last = self._stage.layers
        if decoding is not None and decoding.has_graph(batch):
            hooks.before_forward(batch)
            logits = decoding.replay(batch)
            hooks.layer_done(last.index)
            hooks.after_forward()
            return logits
        step = _StepRows(batches, self._mesh, self._pools.device)
        x = self._input_rows(batch, step)
        # Not before: a later stage waits here for the one before it.
        hooks.before_forward(batch)
        attention = Pass(batch, self._mesh, self._pools) if decoding is None else decoding.begin(batch)
        for layer in self._stage.layers:
            x = self._mix(layer, x, attention, hooks)
            if layer is last and self._mesh.is_last and self._stage.draft is None:
                x = step.narrow(x)
            x = self._feed(layer, x, step)
        hooks.after_forward()
        if not self._mesh.is_last:
            self._send_rows(x)
            return None
        if self._stage.draft is not None and isinstance(attention, Pass):
            self._draft_input = _DraftInput(batches, attention, x)
        return self._logits(x, step, self._stage.head, batch)

    @torch.inference_mode()
    def propose(self, sampled: Sequence[Sequence[int]] | None, hooks: ForwardHooks) -> list[DraftTokens]:
        """Runs the draft layer after a step: stores its cache entries and predicts draft tokens.

        `sampled` has the accepted and sampled tokens of each sequence that was sampled from. The rank that
        sampled knows them; the others of the last stage take part with None. There are draft tokens for each
        of these sequences."""
        previous, draft, head = self._draft_input, self._stage.draft, self._stage.head
        if previous is None or draft is None or head is None:
            raise EngineError("a draft follows a step on the last stage; there was none")
        self._draft_input = None
        dp = self._mesh.at["dp"]
        batches = [with_forks(batch) for batch in previous.batches]
        following = NextTokens(batches[dp], self._share_sampled(batches[dp], sampled))
        step = _StepRows(batches, self._mesh, self._pools.device, following.last_rows)
        attention, hidden = previous.attention, head.normed(previous.rows)
        if batches[dp] is not previous.batches[dp]:
            attention = Pass(batches[dp], self._mesh, self._pools)
            hidden = self._with_given(hidden, previous.batches[dp], step)
        predicted_from = self._wanted_rows(hidden, step)
        rows = self._run_draft(draft, following.tokens, hidden, attention, step, hooks)
        members = [scheduled for scheduled in batches[dp].sequences if scheduled.num_samples]
        guesses = {
            scheduled.sequence: [token]
            for scheduled, token in zip(members, self._likeliest(rows, draft.head), strict=True)
        }
        for depth in range(1, num_guesses_max(batches)):
            further = [guess_batch(batch, depth, following.positions, guesses) for batch in batches]
            own, kept = further[dp], [i for i, member in enumerate(members) if member.num_guesses > depth]
            members, rows = [members[i] for i in kept], draft.head.normed(rows[kept])
            step = _StepRows(further, self._mesh, self._pools.device, np.arange(own.num_rows))
            tokens = np.array([scheduled.tokens[0] for scheduled in own.sequences], dtype=np.int64)
            attention = Pass(own, self._mesh, self._pools)
            rows = self._run_draft(draft, tokens, rows[step.own[0] : step.own[1]], attention, step)
            for scheduled, token in zip(members, self._likeliest(rows, draft.head), strict=True):
                guesses[scheduled.sequence].append(token)
        return [
            DraftTokens(guessed, row) for guessed, row in zip(guesses.values(), predicted_from, strict=True)
        ]

    def _run_draft(
        self,
        draft: DraftLayer,
        tokens: NDArray[np.int64],
        hidden: Tensor,
        attention: Attention,
        step: _StepRows,
        hooks: ForwardHooks | None = None,
    ) -> Tensor:
        """The draft's rows that guesses are predicted from, of this rank's rows and the tokens after all."""
        ids = torch.from_numpy(tokens[step.own[0] : step.own[1]]).to(self._pools.device, non_blocking=True)
        embedded = draft.embedding.scale(self._mesh.tp.sum(draft.embedding.embed(ids)))
        x = self._mix(draft.layer, draft.join(embedded, hidden), attention, hooks)
        return self._wanted_rows(self._feed(draft.layer, step.narrow(x), step), step)

    def _likeliest(self, rows: Tensor, head: VocabularyHead) -> list[int]:
        """The token with the largest logit of each row, on all ranks of the last stage."""
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        if len(rows) and not self._mesh.cp.index:
            tokens = self._gathered_logits(rows, head).argmax(dim=-1)
        likeliest: list[int] = self._mesh.cp.sum(tokens).tolist() if len(rows) else []
        return likeliest

    def _with_given(self, hidden: Tensor, batch: ScheduledBatch, step: _StepRows) -> Tensor:
        """This rank's rows for the draft, of its rows of a batch and the given ones."""
        rows = deal_rows(batch.num_rows, self._mesh.cp.size)
        all_rows = self._mesh.cp.gather(hidden, rows.sizes) if rows.is_dealt else hidden
        return with_given_rows(all_rows, batch)[step.own[0] : step.own[1]]

    def _share_sampled(
        self, batch: ScheduledBatch, sampled: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        """The sampled tokens, on all ranks of the last stage."""
        num_sequences = sum(1 for scheduled in batch.sequences if scheduled.num_samples)
        if self._mesh.tp.size * self._mesh.cp.size == 1 or not num_sequences:
            return [list(tokens) for tokens in sampled or ()]
        width = 1 + max(scheduled.num_drafted for scheduled in batch.sequences)
        # Each row holds the number of tokens and the tokens; all ranks but one add zeros.
        table = torch.zeros((num_sequences, 1 + width), dtype=torch.int64, device=self._pools.device)
        for row, tokens in enumerate(sampled or ()):
            table[row, : len(tokens) + 1] = torch.tensor([len(tokens), *tokens])
        shared = self._mesh.cp.sum(self._mesh.tp.sum(table)).tolist()
        return [row[1 : 1 + row[0]] for row in shared]

    def _decode(self, attention: PagedPass) -> Tensor:
        """A decode step of a rank that has the whole model: the logits of every row."""
        embedding, head = self._stage.embedding, self._stage.head
        assert embedding is not None, "the only rank has both ends"
        assert head is not None, "the only rank has both ends"
        x = embedding.scale(embedding.embed(attention.tokens))
        for layer in self._stage.layers:
            x = layer.join_mix(x, layer.mix(x, attention))
            x = layer.join_feed(x, layer.feed(x))
        return head.logits(x)

    def _mix(self, layer: Decoder, x: Tensor, attention: Attention, hooks: ForwardHooks | None) -> Tensor:
        if len(x):
            x = layer.join_mix(x, self._mesh.tp.sum(layer.mix(x, attention)))
        if hooks is not None:
            # The layer's cache entries are stored: they can leave while the rest of the layer is computed.
            hooks.layer_done(layer.index)
        return x

    def _feed(self, layer: Decoder, x: Tensor, step: _StepRows) -> Tensor:
        if self._mesh.dp.size == 1:
            return layer.join_feed(x, self._mesh.width.sum(layer.feed(x))) if len(x) else x
        all_rows = self._mesh.dp.gather(x, step.sizes)
        if len(all_rows) == 0:
            return x
        fed = self._mesh.width.sum(layer.feed(all_rows))
        return layer.join_feed(x, fed[step.first : step.first + step.num_own])

    def _input_rows(self, batch: ScheduledBatch, step: _StepRows) -> Tensor:
        """The rows before this rank's first layer: embedded, or from the previous stage."""
        first, last = step.own
        device, embedding = self._pools.device, self._stage.embedding
        if embedding is None:
            if self._row_format is None:
                sent = self._mesh.pipe.receive(torch.zeros(2, dtype=torch.int64, device=device)).tolist()
                self._row_format = (sent[0], _ROW_DTYPES[sent[1]])
            num_hidden, dtype = self._row_format
            return self._mesh.pipe.receive(
                torch.empty((last - first, num_hidden), dtype=dtype, device=device)
            )
        ids = np.fromiter(
            (token for scheduled in batch.sequences for token in scheduled.tokens), np.int64, batch.num_rows
        )
        tokens = torch.from_numpy(ids[first:last]).to(device, non_blocking=True)
        x = embedding.scale(self._mesh.tp.sum(embedding.embed(tokens)))
        return _with_embeddings(x, batch, step)

    def _send_rows(self, x: Tensor) -> None:
        if not self._has_sent_format:
            self._has_sent_format = True
            row_format = [x.shape[1], _ROW_DTYPES.index(x.dtype)]
            self._mesh.pipe.send(torch.tensor(row_format, device=x.device))
        self._mesh.pipe.send(x)

    def _wanted_rows(self, x: Tensor, step: _StepRows) -> Tensor:
        """The rows whose logits are computed, on every cp rank, of this rank's rows."""
        wanted = step.wanted
        rows = x if step.is_narrowed else x.index_select(0, step.own_wanted)
        if not step.rows.is_dealt:
            return rows
        sizes = [int(((wanted >= a) & (wanted < b)).sum()) for a, b in step.rows.cuts]
        return self._mesh.cp.gather(rows, sizes)

    def _logits(
        self, x: Tensor, step: _StepRows, head: VocabularyHead | None, batch: ScheduledBatch | None = None
    ) -> Tensor | None:
        """Logits of the rows to sample from; prompts of `batch` are scored by the others."""
        if len(step.wanted) == 0 or head is None:
            return None
        rows = self._wanted_rows(x, step)
        if self._mesh.cp.index:
            return None
        if batch is not None and any(scheduled.scored_tokens for scheduled in batch.sequences):
            rows = self._score_prompts(rows, batch, head)
        return self._gathered_logits(rows, head) if len(rows) else None

    def _score_prompts(self, rows: Tensor, batch: ScheduledBatch, head: VocabularyHead) -> Tensor:
        """Scores prompts, a few rows at a time since logits are large; returns the rows to sample from."""
        sampled: list[Tensor] = []
        for scheduled in batch.sequences:
            scored: list[SampledToken] = []
            tokens, count = scheduled.scored_tokens, scheduled.prompt_logprobs
            for first in range(0, len(tokens), ROWS_AT_ONCE):
                part = [[token] for token in tokens[first : first + ROWS_AT_ONCE]]
                logits = self._gathered_logits(rows[: len(part)], head)
                rows = rows[len(part) :]
                if self._mesh.tp.index == 0:
                    scored += [token for (token,) in with_logprobs(logits, part, [count] * len(part))]
            if tokens:
                self.prompt_logprobs[scheduled.sequence] = scored
            num_sampled = 1 + scheduled.num_drafted if scheduled.num_samples else 0
            sampled.append(rows[:num_sampled])
            rows = rows[num_sampled:]
        return torch.cat(sampled)

    def _gathered_logits(self, rows: Tensor, head: VocabularyHead) -> Tensor:
        """Over the whole vocabulary, on all tp ranks."""
        share = head.logits(rows)
        if self._vocab_shares is None:
            sizes = self._mesh.tp.stack(torch.tensor([share.shape[1]], device=share.device))
            self._vocab_shares = sizes.flatten().tolist()
        return self._mesh.tp.gather(share.mT, self._vocab_shares).mT.contiguous()


@dataclass(frozen=True, slots=True)
class _DraftInput:
    """A step after its last layer."""

    batches: Sequence[ScheduledBatch]
    attention: Pass
    rows: Tensor


class _StepRows:
    """Which rows of a step lie on which rank, and of which logits are computed."""

    def __init__(
        self,
        batches: Sequence[ScheduledBatch],
        mesh: Mesh,
        device: torch.device,
        wanted: NDArray[np.int64] | None = None,
    ) -> None:
        dealt = [deal_rows(batch.num_rows, mesh.cp.size) for batch in batches]
        self.rows: RankRows = dealt[mesh.at["dp"]]
        self.own = self.rows.cuts[mesh.cp.index]
        self.num_own = self.own[1] - self.own[0]
        self.sizes = [rows.sizes[mesh.cp.index] for rows in dealt]
        """Rows of each dp group at this rank's cp coordinate."""
        self.first = sum(self.sizes[: mesh.at["dp"]])
        self.wanted = logits_rows(batches[mesh.at["dp"]]) if wanted is None else wanted
        """Rows of the batch whose logits are computed."""
        self.is_narrowed = False
        own = self.wanted[(self.wanted >= self.own[0]) & (self.wanted < self.own[1])] - self.own[0]
        # Now and without waiting: late in a forward it would queue behind copies of a hand-over.
        self.own_wanted = torch.from_numpy(own).to(device, non_blocking=True)
        """Which of this rank's rows they are."""

    def narrow(self, x: Tensor) -> Tensor:
        """Keeps only the rows whose logits are computed, once the last layer has stored its tokens.

        Rows that several ranks or dp groups share stay as they are dealt.
        """
        if len(self.sizes) > 1 or self.rows.is_dealt or len(self.wanted) == len(x):
            return x
        self.is_narrowed = True
        return x.index_select(0, self.own_wanted)


def _with_embeddings(x: Tensor, batch: ScheduledBatch, step: _StepRows) -> Tensor:
    """Given input embeddings in place of those of tokens; the family's scaling is applied to them already."""
    row = 0
    for scheduled in batch.sequences:
        num_tokens, num_hidden = len(scheduled.tokens), x.shape[1]
        first, last = max(row, step.own[0]), min(row + num_tokens, step.own[1])
        if scheduled.embeddings is not None and first < last:
            if len(scheduled.embeddings) != 4 * num_tokens * num_hidden:
                raise EngineError(
                    f"{len(scheduled.embeddings)} bytes of input embeddings for {num_tokens} tokens; "
                    f"give {4 * num_hidden} bytes (float32) for each"
                )
            flat = torch.frombuffer(bytearray(scheduled.embeddings), dtype=torch.float32)
            given = flat.view(num_tokens, num_hidden)[first - row : last - row]
            x[first - step.own[0] : last - step.own[0]] = given.to(x.device, x.dtype)
        row += num_tokens
    return x


def why_not_paged(stage: ModelStage, mesh: Mesh, pools: CachePools) -> str:
    """Why decode steps of a rank do not run on the paged kernels; empty where they do."""
    if pools.device.type != "cuda":
        return "the device is not a GPU"
    if pools.spec.storage.dtype == "fp8":
        return "no kernel reads an fp8 KV cache"
    if find_spec("triton") is None:
        return "triton is not installed"
    if mesh.cp.size > 1:
        return "context parallel ranks share the tokens"
    if stage.draft is not None:
        return "draft tokens are verified several rows at a time"
    parts = sorted({stem(component.name) for component in pools.spec.cache.components} - set(_PAGED_PARTS))
    return f"no kernel reads {', '.join(parts)}" if parts else ""


def why_not_captured(mesh: Mesh, num_experts: int) -> str:
    """Why decode steps on the paged kernels are launched one by one; empty where they are CUDA graphs."""
    if mesh.layout.num_ranks > 1:
        return f"the ranks of {mesh.layout} exchange rows"
    return "the host has to know which experts are chosen" if num_experts else ""


def open_decoding(pools: CachePools, rows_max: int, context_max: int) -> DecodeGraphs:
    """What runs decode steps on a GPU; see `why_not_paged`."""
    # By name: it brings a compiler for GPUs with it.
    opened: DecodeGraphs = import_module("baton.engine.decode_graphs").DecodeGraphs(
        pools, rows_max, context_max
    )
    return opened


def sample_tokens(
    sampler: Sampler, logits: Tensor, sequences: Sequence[ScheduledSequence]
) -> dict[int, list[SampledToken]]:
    """By sequence: the tokens asked for or, after draft tokens, the accepted ones and one more.

    A draft token is accepted if it is the very token that is sampled for its position, whatever the sampling
    parameters are. Sampling is a function of the logits, the seed and the position, so an answer is the same
    with draft tokens and without. `logits` has the rows of `sequences` in order, for each the row of its last
    known token and of its draft tokens.
    """
    samples: dict[int, list[SampledToken]] = {}
    first_rows: dict[int, int] = {}
    num_rows = 0
    for scheduled in sequences:
        first_rows[scheduled.sequence] = num_rows
        num_rows += 1 + scheduled.num_drafted
        num_known = len(scheduled.tokens) - scheduled.num_drafted
        sampler.extend(scheduled.sequence, scheduled.tokens[:num_known], scheduled.start)
    accepted = list(sequences)
    for depth in range(1 + max((scheduled.num_drafted for scheduled in sequences), default=0)):
        wants = [
            Want(
                scheduled.sequence,
                scheduled.num_samples,
                scheduled.start + len(scheduled.tokens) - scheduled.num_drafted + depth,
            )
            for scheduled in accepted
        ]
        rows = [first_rows[scheduled.sequence] + depth for scheduled in accepted]
        step_logits = logits if rows == list(range(len(logits))) else logits[rows]
        for scheduled, tokens in zip(accepted, sampler.sample(step_logits, wants), strict=True):
            samples.setdefault(scheduled.sequence, []).extend(tokens)
        accepted = [
            scheduled
            for scheduled in accepted
            if depth < scheduled.num_drafted
            and samples[scheduled.sequence][depth].token == scheduled.tokens[depth - scheduled.num_drafted]
        ]
        for scheduled in accepted:
            sampler.extend(scheduled.sequence, [samples[scheduled.sequence][depth].token])
        if not accepted:
            break
    return samples
