"""A model without an engine: ranks as objects, sums in place of collectives, attention spelled out.

Nothing is paged and nothing is batched here; each sequence keeps plain tensors, and scores go through a
softmax in full, so that a difference to `transformers` is the model's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from baton.engine.models.base import Cut, HeadOptions, IndexQuery, LatentQuery, Recurrence, Share
from baton.engine.models.build import build
from baton.engine.models.layers import ModelStage
from baton.plan.cache import Cache
from baton.plan.models.config import read_config
from baton.plan.models.parts import stack

CPU = torch.device("cpu")


@dataclass
class DiskCheckpoint:
    """A folder of safetensors, read slice by slice; counts what is read."""

    folder: Path
    changes: Mapping[str, Any] = field(default_factory=dict)
    num_read: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = {**json.loads((self.folder / "config.json").read_text()), **self.changes}
        files = [safe_open(path, "pt") for path in sorted(self.folder.glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        file = self._files.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = (), *, device: torch.device | None = None) -> Tensor:
        part = self._files[name].get_slice(name)[index or (...,)]
        self.num_read[name] = self.num_read.get(name, 0) + part.numel()
        return part.to(device)


@dataclass
class Altered:
    """A checkpoint with some tensors taken away, replaced or added."""

    inner: DiskCheckpoint
    tensors: Mapping[str, Tensor | None]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.inner.config

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self.tensors:
            return self.inner.shape(name)
        tensor = self.tensors[name]
        return None if tensor is None else tuple(tensor.shape)

    def read(self, name: str, index: tuple[slice, ...] = (), *, device: torch.device | None = None) -> Tensor:
        tensor = self.tensors.get(name)
        return self.inner.read(name, index, device=device) if tensor is None else tensor[index or (...,)]


@dataclass(frozen=True)
class Part:
    """A sequence's tokens [start, start + len(tokens)) in a pass."""

    sequence: int
    start: int
    tokens: tuple[int, ...]


Memory = dict[tuple[int, int, str], Tensor]
"""By sequence, layer and component: everything cached so far, (tokens, ...)."""


@dataclass
class Meeting:
    """Where the tp ranks of a pass, a thread each, add up what they have."""

    cache: Cache
    index: int
    barrier: threading.Barrier
    brought: list[Tensor | None]

    def total(self, x: Tensor) -> Tensor:
        self.brought[self.index] = x
        self.barrier.wait()
        found = sum_of(self.brought)
        self.barrier.wait()
        return found


class PlainAttention:
    """One pass on one rank, over whole sequences."""

    meeting: Meeting

    def __init__(self, parts: Sequence[Part], memory: Memory, is_absorbed: bool = False) -> None:
        self.parts = parts
        self.memory = memory
        self.is_absorbed = is_absorbed
        self.positions: Tensor = torch.cat([torch.arange(p.start, p.start + len(p.tokens)) for p in parts])
        self.options: list[HeadOptions] = []
        self.unchosen: dict[int, Tensor] = {}

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: HeadOptions) -> Tensor:
        self.options.append(options)
        outs = []
        for part, rows in self._rows():
            keys = self._remember(part, layer, "k", k[rows])
            values = self._remember(part, layer, "v", v[rows])
            num_times = q.shape[1] // k.shape[1]
            shared = [each.repeat_interleave(num_times, dim=1) for each in (keys, values)]
            outs.append(_attend(q[rows], shared[0], shared[1], options))
        return torch.cat(outs)

    def latent(
        self,
        layer: int,
        query: LatentQuery,
        latent: Tensor,
        scale: float,
        chosen_by: IndexQuery | Literal["shared"] | None = None,
    ) -> Tensor:
        q = query.absorbed() if self.is_absorbed else query.plain()
        outs = []
        for part, rows in self._rows():
            cached = self._remember(part, layer, "latent", latent[rows])
            if isinstance(chosen_by, IndexQuery):
                self.unchosen[part.sequence] = self._unchosen(part, layer, chosen_by, rows)
            unchosen = None if chosen_by is None else self.unchosen[part.sequence]
            if self.is_absorbed:
                keys = cached.unsqueeze(1).expand(-1, q.shape[1], -1)
                values = keys[..., : query.num_value_channels]
                outs.append(_attend(q[rows], keys, values, HeadOptions(scale), unchosen))
            else:
                outs.append(_attend(q[rows], *query.expand(cached), HeadOptions(scale), unchosen))
        mixed = torch.cat(outs)
        return query.project(mixed) if self.is_absorbed else mixed

    def recur(self, layer: int, rows: Tensor, rule: Recurrence) -> Tensor:
        outs = []
        for part, at in self._rows():
            keys = {name: (part.sequence, layer, name) for name in rule.parts}
            if part.start == 0:
                for name, units in rule.parts.items():
                    first, last = units[self.meeting.index]
                    sizes = [dim.size for dim in self.meeting.cache.by_name[name].dims]
                    self.memory[keys[name]] = rows.new_zeros(1, last - first, *sizes)
            out, after = rule.advance(rows[None, at], {name: self.memory[key] for name, key in keys.items()})
            self.memory.update({keys[name]: state for name, state in after.items()})
            outs.append(out[0])
        return torch.cat(outs)

    def total(self, x: Tensor) -> Tensor:
        return self.meeting.total(x)

    def _unchosen(self, part: Part, layer: int, query: IndexQuery, rows: slice) -> Tensor:
        """(rows, tokens): what a row leaves out."""
        keys = self._remember(part, layer, "index_k", query.keys[rows])
        scores = torch.einsum("rhc,tc->rht", query.queries[rows], keys).clamp(min=0)
        scores = torch.einsum("rh,rht->rt", query.weights[rows], scores)
        later = torch.ones_like(scores, dtype=torch.bool).triu(len(keys) - len(scores) + 1)
        best = scores.masked_fill(later, float("-inf")).topk(min(query.num_chosen, len(keys))).indices
        return torch.ones_like(later).scatter(1, best, False)

    def _rows(self) -> list[tuple[Part, slice]]:
        found, first = [], 0
        for part in self.parts:
            found.append((part, slice(first, first + len(part.tokens))))
            first += len(part.tokens)
        return found

    def _remember(self, part: Part, layer: int, component: str, new: Tensor) -> Tensor:
        key = (part.sequence, layer, component)
        before = self.memory.get(key, new[:0])
        assert before.shape[0] == part.start
        self.memory[key] = torch.cat((before, new))
        return self.memory[key]


def _attend(q: Tensor, k: Tensor, v: Tensor, options: HeadOptions, unchosen: Tensor | None = None) -> Tensor:
    scores = torch.einsum("rhc,thc->hrt", q, k) * options.scale
    num_before = k.shape[0] - q.shape[0]
    hidden = q.new_ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(num_before + 1)
    if options.window is not None:
        hidden |= torch.ones_like(hidden).tril(num_before - options.window)
    if unchosen is not None:
        hidden |= unchosen
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hrt,thc->rhc", scores.softmax(-1)[..., : len(k)], v)


@dataclass(frozen=True)
class Plan:
    """How the ranks of a test share a model."""

    tp: int = 1
    dp: int = 1
    stages: tuple[int, ...] = ()
    """Sizes of pipeline stages; none is one stage."""
    is_absorbed: bool = False


@dataclass(frozen=True)
class Place:
    """Where and in what the ranks of a test compute."""

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU


class Ranks:
    """All ranks of a plan, with sums where the engine has collectives."""

    def __init__(
        self, checkpoint: Any, plan: Plan | None = None, place: Place | None = None, **options: Any
    ) -> None:
        self.plan = plan = plan or Plan()
        self.place = place or Place()
        num_layers = checkpoint.config["num_hidden_layers"]
        sizes = plan.stages or (num_layers,)
        assert sum(sizes) == num_layers
        bounds = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        self.stages: list[list[ModelStage]] = [
            [build(checkpoint, cut, **options) for cut in self._cuts(layers)] for layers in bounds
        ]
        self.cache = stack((read_config(checkpoint.config, "tiny"),))
        self.memories: list[Memory] = [{} for _ in range(plan.tp)]
        self.attentions: list[PlainAttention] = []

    def _cuts(self, layers: tuple[int, int]) -> list[Cut]:
        tp, dp = self.plan.tp, self.plan.dp
        places = [(d, t) for d in range(dp) for t in range(tp)]
        place = (self.place.dtype, self.place.device)
        return [Cut(layers, Share(t, tp), Share(d * tp + t, dp * tp), *place) for d, t in places]

    @torch.inference_mode()
    def step(self, parts: Sequence[Part]) -> Tensor:
        """Logits of every row."""
        tokens = torch.tensor([token for part in parts for token in part.tokens], device=self.place.device)
        attentions = [PlainAttention(parts, memory, self.plan.is_absorbed) for memory in self.memories]
        for attention in attentions:
            attention.positions = attention.positions.to(self.place.device)
        self.attentions = attentions
        barrier = threading.Barrier(self.plan.tp, timeout=60)
        brought: list[Tensor | None] = [None] * self.plan.tp
        for i, attention in enumerate(attentions):
            attention.meeting = Meeting(self.cache, i, barrier, brought)
        group = self.stages[0][: self.plan.tp]
        x = sum_of([rank.embedding.embed(tokens) for rank in group])
        x = group[0].embedding.scale(x)
        for stage in self.stages:
            for layers in zip(*(rank.layers for rank in stage), strict=True):
                x = layers[0].join_mix(x, sum_of(self._mixes(layers, x)))
                x = layers[0].join_feed(x, sum_of([layer.feed(x) for layer in layers]))
        return torch.cat([rank.head.logits(x) for rank in self.stages[-1][: self.plan.tp]], dim=-1)

    def _mixes(self, layers: Sequence[Any], x: Tensor) -> list[Tensor]:
        """What the tp ranks give, side by side, since some meet on the way."""

        @torch.inference_mode()
        def mix(i: int) -> Tensor:
            try:
                return layers[i].mix(x, self.attentions[i])
            except BaseException:
                self.attentions[i].meeting.barrier.abort()
                raise

        if self.plan.tp == 1:
            return [mix(0)]
        with ThreadPoolExecutor(self.plan.tp) as pool:
            return list(pool.map(mix, range(self.plan.tp)))


def sum_of(partials: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(partials)).sum(dim=0)


def prompts(vocab_size: int, lengths: Sequence[int] = (1, 19, 6)) -> list[tuple[int, ...]]:
    drawn = torch.Generator().manual_seed(7)
    return [tuple(torch.randint(0, vocab_size, (n,), generator=drawn).tolist()) for n in lengths]


def whole_logits(ranks: Ranks, sequences: Sequence[tuple[int, ...]], num_chunk: int = 8) -> list[Tensor]:
    """Logits of every position: all sequences batched, in chunks, then the last two tokens one by one."""
    rows: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(at < len(tokens) for at, tokens in zip(done, sequences, strict=True)):
        parts = []
        for i, tokens in enumerate(sequences):
            last = max(len(tokens) - 2, 1)
            size = min(num_chunk, last - done[i]) if done[i] < last else 1
            if done[i] < len(tokens):
                parts.append(Part(i, done[i], tokens[done[i] : done[i] + size]))
        logits = ranks.step(parts).split([len(part.tokens) for part in parts])
        for part, each in zip(parts, logits, strict=True):
            rows[part.sequence].append(each)
            done[part.sequence] += len(part.tokens)
    return [torch.cat(each) for each in rows]


@cache
def oracle_model(folder: Path) -> Any:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def oracle_logits(folder: Path, sequences: Sequence[tuple[int, ...]]) -> list[Tensor]:
    model = oracle_model(folder)
    return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


def worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference between logits, as a share of the largest logit."""
    largest = max(float(each.abs().max()) for each in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / largest


def named(variants: Iterable[str]) -> list[Any]:
    """Parameters of a test: each family, and in `make test-all` its variants, called FAMILY-VARIANT."""
    return [pytest.param(name, marks=pytest.mark.long) if "-" in name else name for name in variants]
