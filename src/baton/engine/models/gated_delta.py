"""Gated delta net: linear attention whose state, a matrix per value head, decays and is corrected.

Queries, keys and values go through a short convolution; value heads share the query and key of their key
head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models import delta_rule
from baton.engine.models.base import Attention, States
from baton.engine.models.recurrence import RecurrentUnits
from baton.engine.models.weights import Linear, Loader, TensorSlice, laid_out, rows, scaled
from baton.plan.kinds import Recurrent
from baton.plan.ranges import Range

UNIT_EPS = 1e-6
"""In the root that queries and keys are divided by, whatever the config's epsilon."""


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The sizes and options of one layer's gated delta net."""

    hidden_size: int
    kind: Recurrent
    """What it caches: a state for each value head, the convolution's over q, k and v."""
    norm_eps: float
    activation: str
    is_packed: bool
    """Projections are stored by key head, not one after the other."""

    @property
    def num_key_heads(self) -> int:
        return self.kind.convs[0].units.count

    @property
    def key_dim(self) -> int:
        return self.kind.convs[0].channels

    @property
    def value_dim(self) -> int:
        return self.kind.convs[2].channels

    def load(self, loader: Loader, index: int, prefix: str) -> GatedDelta:
        """This rank's value heads and the key heads that it needs; `prefix` names the module."""
        units = RecurrentUnits.load(loader, self.kind, f"{prefix}.conv1d", self.activation)
        key, value = units.own("conv.q"), units.heads
        spans = {"q": key, "k": key, "v": value, "b": value, "a": value, "z": value}
        pieces = [piece for part, span in spans.items() for piece in self._pieces(prefix, part, span)]
        rule = DeltaRule(
            spec=self,
            units=units,
            key_of_value=units.group_of_head("conv.q", loader.cut.device),
            log_rate=units.by_head(loader, f"{prefix}.A_log"),
            step_bias=units.by_head(loader, f"{prefix}.dt_bias"),
        )
        added, output = units.load_output(loader, f"{prefix}.out_proj", (self.hidden_size, self.value_dim))
        return GatedDelta(
            index=index,
            rule=rule,
            project=Linear(laid_out(loader.join(pieces))),
            norm=loader.take(TensorSlice(f"{prefix}.norm.weight", (self.value_dim,))),
            added=added,
            output=output,
        )

    def _pieces(self, prefix: str, part: str, span: Range) -> list[TensorSlice]:
        """The rows of the projections that give a part of these heads."""
        if self.is_packed:
            return [self._packed(prefix, part, head) for head in range(*span)]
        num_keys, num_values = self.num_key_heads * self.key_dim, self.kind.heads * self.value_dim
        firsts = {"q": 0, "k": num_keys, "v": 2 * num_keys}
        size = {"q": self.key_dim, "k": self.key_dim, "b": 1, "a": 1}.get(part, self.value_dim)
        first, last = scaled(span, size)
        if part in firsts:
            shape = (2 * num_keys + num_values, self.hidden_size)
            span = (firsts[part] + first, firsts[part] + last)
            return [rows(f"{prefix}.in_proj_qkv.weight", shape, span)]
        num_outputs = num_values if part == "z" else self.kind.heads
        return [rows(f"{prefix}.in_proj_{part}.weight", (num_outputs, self.hidden_size), (first, last))]

    def _packed(self, prefix: str, part: str, head: int) -> TensorSlice:
        """Of one head: key head by key head there are q, k, all v and all z, and apart from these b and a."""
        heads_per_key = self.kind.heads // self.num_key_heads
        key_dim, value_dim = self.key_dim, self.value_dim
        key, place = (head, 0) if part in "qk" else divmod(head, heads_per_key)
        if part in "ba":
            first = key * 2 * heads_per_key + (0 if part == "b" else heads_per_key) + place
            shape = (2 * self.kind.heads, self.hidden_size)
            return rows(f"{prefix}.in_proj_ba.weight", shape, (first, first + 1))
        block = 2 * (key_dim + heads_per_key * value_dim)
        inside = {"q": 0, "k": key_dim, "v": 2 * key_dim, "z": 2 * key_dim + heads_per_key * value_dim}[part]
        size = key_dim if part in "qk" else value_dim
        first = key * block + inside + place * size
        shape = (self.num_key_heads * block, self.hidden_size)
        return rows(f"{prefix}.in_proj_qkvz.weight", shape, (first, first + size))


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The recurrence of one layer on one rank; rows are [q | k | v | b | a]."""

    spec: GatedDeltaSpec
    units: RecurrentUnits
    key_of_value: Tensor
    log_rate: Tensor
    step_bias: Tensor

    @property
    def parts(self) -> Mapping[str, Sequence[Range]]:
        """By component: the units that each tp rank computes with."""
        return self.units.parts

    def advance(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """(n, tokens, value heads, value channels), and the states after."""
        spec, num_values = self.spec, self.units.num_heads
        mixed, strength, step = rows.tensor_split((-2 * num_values, -num_values), dim=-1)
        (q, k, v), convs = self.units.convolve(mixed, states)
        q, k = (_unit(x)[:, :, self.key_of_value] for x in (q, k))
        log_decay = -self.log_rate.exp() * functional.softplus(step.float() + self.step_bias)
        tokens = delta_rule.DeltaTokens(
            q=q * spec.key_dim**-0.5,
            k=k,
            v=v,
            log_decay=log_decay.unsqueeze(-1),
            strength=strength.float().sigmoid().unsqueeze(-1),
        )
        state = torch.unflatten(states["ssm"].float(), -1, (spec.key_dim, spec.value_dim))
        out, state = delta_rule.advance(tokens, state)
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
    added: slice
    """The channels of this rank's heads that it adds to the output."""
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        spec, num_values = self.rule.spec, self.rule.units.num_heads
        projected = self.project(x)
        num_gates = num_values * spec.value_dim
        gates = torch.unflatten(projected[:, -num_gates:], 1, (num_values, -1))
        mixed = attention.recur(self.index, projected[:, :-num_gates], self.rule).float()
        mixed = functional.rms_norm(mixed, (spec.value_dim,), None, spec.norm_eps).to(x.dtype)
        mixed = ((self.norm * mixed).float() * functional.silu(gates.float())).to(x.dtype)
        return self.output(mixed.flatten(1)[:, self.added])
