"""Gated delta net: linear attention whose state, a matrix per value head, decays and is corrected.

Queries, keys and values go through a short convolution; value heads share the query and key of their key
head. tp cuts value heads and key heads each by itself, so that where sizes do not divide a rank computes the
key heads of its value heads and those that it keeps the convolution's state of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models import delta_rule
from baton.engine.models.base import Attention, Share, States
from baton.engine.models.recurrence import Convolution
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    TensorSlice,
    covering,
    cut_mirrored,
    cut_units,
    laid_out,
    load_partial,
    rows,
    scaled,
)
from baton.plan.ranges import Range

UNIT_EPS = 1e-6
"""In the root that queries and keys are divided by, whatever the config's epsilon."""


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The sizes and options of one layer's gated delta net."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    norm_eps: float
    activation: str
    is_packed: bool
    """Projections are stored by key head, not one after the other."""

    @property
    def num_each(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    def load(self, loader: Loader, index: int, prefix: str) -> GatedDelta:
        """This rank's value heads and the key heads that it needs; `prefix` names the module."""
        share = loader.cut.heads
        values = cut_units(self.num_value_heads, "value head", share)
        keys = covering(values, cut_units(self.num_key_heads, "key head", share), self.num_each)
        key, value = keys[share.index], values[share.index]
        spans = {"q": key, "k": key, "v": value, "b": value, "a": value, "z": value}
        pieces = [piece for part, span in spans.items() for piece in self._pieces(prefix, part, span)]
        heads = torch.arange(*value, device=loader.cut.device)
        parts = {"ssm": values, "conv.q": keys, "conv.k": keys, "conv.v": values}
        rule = DeltaRule(
            spec=self,
            parts=parts,
            num_heads=(key[1] - key[0], value[1] - value[0]),
            key_of_value=heads // self.num_each - key[0],
            convolution=self._convolution(loader, prefix, key, value),
            log_rate=loader.take(rows(f"{prefix}.A_log", (self.num_value_heads,), value), torch.float32),
            step_bias=loader.take(rows(f"{prefix}.dt_bias", (self.num_value_heads,), value), torch.float32),
        )
        added = cut_mirrored(values, self.value_dim, share)
        shape = (self.hidden_size, self.num_value_heads * self.value_dim)
        return GatedDelta(
            index=index,
            rule=rule,
            project=Linear(laid_out(loader.join(pieces))),
            norm=loader.take(TensorSlice(f"{prefix}.norm.weight", (self.value_dim,))),
            added=(added[0] - value[0] * self.value_dim, added[1] - value[0] * self.value_dim),
            output=load_partial(loader, InputSlice(f"{prefix}.out_proj", shape, added, Share())),
        )

    def _pieces(self, prefix: str, part: str, span: Range) -> list[TensorSlice]:
        """The rows of the projections that give a part of these heads."""
        if self.is_packed:
            return [self._packed(prefix, part, head) for head in range(*span)]
        num_keys, num_values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        firsts = {"q": 0, "k": num_keys, "v": 2 * num_keys}
        size = {"q": self.key_dim, "k": self.key_dim, "b": 1, "a": 1}.get(part, self.value_dim)
        first, last = scaled(span, size)
        if part in firsts:
            shape = (2 * num_keys + num_values, self.hidden_size)
            span = (firsts[part] + first, firsts[part] + last)
            return [rows(f"{prefix}.in_proj_qkv.weight", shape, span)]
        num_outputs = num_values if part == "z" else self.num_value_heads
        return [rows(f"{prefix}.in_proj_{part}.weight", (num_outputs, self.hidden_size), (first, last))]

    def _packed(self, prefix: str, part: str, head: int) -> TensorSlice:
        """Of one head: key head by key head there are q, k, all v and all z, and apart from these b and a."""
        each, key_dim, value_dim = self.num_each, self.key_dim, self.value_dim
        key, place = (head, 0) if part in "qk" else divmod(head, each)
        if part in "ba":
            first = key * 2 * each + (0 if part == "b" else each) + place
            shape = (2 * self.num_value_heads, self.hidden_size)
            return rows(f"{prefix}.in_proj_ba.weight", shape, (first, first + 1))
        block = 2 * (key_dim + each * value_dim)
        inside = {"q": 0, "k": key_dim, "v": 2 * key_dim, "z": 2 * key_dim + each * value_dim}[part]
        size = key_dim if part in "qk" else value_dim
        first = key * block + inside + place * size
        shape = (self.num_key_heads * block, self.hidden_size)
        return rows(f"{prefix}.in_proj_qkvz.weight", shape, (first, first + size))

    def _convolution(self, loader: Loader, prefix: str, key: Range, value: Range) -> Convolution:
        num_keys = self.num_key_heads * self.key_dim
        shape = (2 * num_keys + self.num_value_heads * self.value_dim, 1, self.num_taps + 1)
        q, v = scaled(key, self.key_dim), scaled(value, self.value_dim)
        spans = (q, (num_keys + q[0], num_keys + q[1]), (2 * num_keys + v[0], 2 * num_keys + v[1]))
        weight = loader.join([rows(f"{prefix}.conv1d.weight", shape, span) for span in spans])
        return Convolution(weight.squeeze(1), None, self.activation)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The recurrence of one layer on one rank; rows are [q | k | v | b | a]."""

    spec: GatedDeltaSpec
    parts: Mapping[str, Sequence[Range]]
    num_heads: tuple[int, int]
    """Key and value heads that are computed here."""
    key_of_value: Tensor
    convolution: Convolution
    log_rate: Tensor
    step_bias: Tensor

    def advance(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """(n, tokens, value heads, value channels), and the states after."""
        (num_keys, num_values), spec = self.num_heads, self.spec
        sizes = (num_keys * spec.key_dim, num_keys * spec.key_dim, num_values * spec.value_dim)
        mixed, strength, step = torch.split_with_sizes(rows, (sum(sizes), num_values, num_values), -1)
        before = torch.cat([states[f"conv.{part}"].flatten(1, 2) for part in "qkv"], dim=1)
        mixed, after = self.convolution.advance(mixed, before)
        q, k, v = torch.split_with_sizes(mixed.float(), sizes, -1)
        q, k = (_unit(torch.unflatten(x, -1, (num_keys, -1)))[:, :, self.key_of_value] for x in (q, k))
        log_decay = -self.log_rate.exp() * functional.softplus(step.float() + self.step_bias)
        tokens = delta_rule.DeltaTokens(
            q=q * spec.key_dim**-0.5,
            k=k,
            v=torch.unflatten(v, -1, (num_values, -1)),
            log_decay=log_decay.unsqueeze(-1),
            strength=strength.float().sigmoid().unsqueeze(-1),
        )
        state = torch.unflatten(states["ssm"].float(), -1, (spec.key_dim, spec.value_dim))
        out, state = delta_rule.advance(tokens, state)
        kept = torch.split_with_sizes(after, sizes, 1)
        counts = (num_keys, num_keys, num_values)
        convs = {
            f"conv.{part}": torch.unflatten(each, 1, (count, -1))
            for part, each, count in zip("qkv", kept, counts, strict=True)
        }
        return out.to(rows.dtype), {"ssm": state.flatten(-2), **convs}


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One layer's gated delta net on one rank."""

    index: int
    rule: DeltaRule
    project: Linear
    norm: Tensor
    added: Range
    """The channels of this rank's heads that it adds to the output; other mirrors add the others."""
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        spec, num_values = self.rule.spec, self.rule.num_heads[1]
        projected = self.project(x)
        num_gates = num_values * spec.value_dim
        gates = torch.unflatten(projected[:, -num_gates:], 1, (num_values, -1))
        mixed = attention.recur(self.index, projected[:, :-num_gates], self.rule).float()
        mixed = functional.rms_norm(mixed, (spec.value_dim,), None, spec.norm_eps).to(x.dtype)
        mixed = ((self.norm * mixed).float() * functional.silu(gates.float())).to(x.dtype)
        return self.output(mixed.flatten(1)[:, self.added[0] : self.added[1]])
