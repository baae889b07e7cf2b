"""Mamba2: a selective state space, a matrix of state per head, whose B and C are shared by groups of heads.

With more tp ranks than groups, groups are mirrored. The norm of some families reaches over all heads of a
group, or of the layer: where these lie on several ranks, their squares are summed over tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models import selective_scan
from baton.engine.models.base import Attention, States
from baton.engine.models.recurrence import RecurrentUnits
from baton.engine.models.weights import Linear, Loader, OutputSlice, load_fused, rows, scaled
from baton.plan.kinds import Recurrent
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class GroupNormSpec:
    """A norm over the channels of each of `num_groups` groups, before or after they are gated."""

    num_groups: int
    eps: float
    is_before_gate: bool = False


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """The sizes and options of one layer's state space."""

    hidden_size: int
    kind: Recurrent
    """What it caches: a state for each head, the convolution's over x by heads, B and C by groups."""
    activation: str
    has_input_bias: bool = False
    has_conv_bias: bool = True
    has_output_bias: bool = False
    norm: GroupNormSpec | None = None
    factors: tuple[float, ...] = (1.0,) * 5
    """What the outputs of the first projection are multiplied with: gates, x, B, C and steps."""

    @property
    def head_dim(self) -> int:
        return self.kind.convs[0].channels

    @property
    def state_dim(self) -> int:
        return self.kind.convs[1].channels

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.kind.heads * self.head_dim

    def load(self, loader: Loader, index: int, prefix: str) -> Mamba2:
        """This rank's heads and the groups that it needs; `prefix` names the module."""
        name, bias = f"{prefix}.conv1d", self.has_conv_bias
        units = RecurrentUnits.load(loader, self.kind, name, self.activation, bias)
        parts = self._parts(units, f"{prefix}.in_proj")
        sizes = (self.hidden_size, self.head_dim)
        added, output = units.load_output(loader, f"{prefix}.out_proj", sizes, self.has_output_bias)
        return Mamba2(
            index=index,
            rule=SelectiveRule(
                spec=self,
                units=units,
                group_of_head=units.group_of_head("conv.B", loader.cut.device),
                log_rate=units.by_head(loader, f"{prefix}.A_log"),
                step_bias=units.by_head(loader, f"{prefix}.dt_bias"),
                skip=units.by_head(loader, f"{prefix}.D"),
            ),
            project=load_fused(loader, self.hidden_size, parts),
            factors=self._factors(loader, parts),
            norm=self._norm(loader, f"{prefix}.norm.weight", added, units) if self.norm else None,
            added=added,
            output=output,
        )

    def _parts(self, units: RecurrentUnits, name: str) -> list[OutputSlice]:
        """Where the first projection has this rank's gates, x, B, C and steps."""
        channels = scaled(units.heads, self.head_dim)
        states = scaled(units.own("conv.B"), self.state_dim)
        num_states = self.kind.convs[1].units.count * self.state_dim
        sizes = (self.width, self.width, num_states, num_states, self.kind.heads)
        parts, before = [], 0
        for (first, last), size in zip((channels, channels, states, states, units.heads), sizes, strict=True):
            parts.append(OutputSlice(name, sum(sizes), (before + first, before + last), self.has_input_bias))
            before += size
        return parts

    def _factors(self, loader: Loader, parts: Sequence[OutputSlice]) -> Tensor | None:
        if set(self.factors) == {1.0}:
            return None
        factors = torch.tensor(self.factors, dtype=loader.cut.dtype, device=loader.cut.device)
        return torch.cat([factors[i].expand(part.span[1] - part.span[0]) for i, part in enumerate(parts)])

    def _norm(self, loader: Loader, name: str, added: slice, units: RecurrentUnits) -> GroupNorm:
        assert self.norm is not None
        size, heads = self.width // self.norm.num_groups, units.parts["ssm"]
        first = units.heads[0] * self.head_dim
        span = (first + added.start, first + added.stop)
        channels = torch.arange(*span, device=loader.cut.device)
        is_whole = all(scaled(head, self.head_dim)[0] % size == 0 for head in heads)
        has_mirrors = len(set(heads)) < len(heads)
        weight = loader.take(rows(name, (self.width,), span))
        return GroupNorm(self.norm, weight, channels // size, size, not is_whole or has_mirrors)


@dataclass(frozen=True, slots=True)
class SelectiveRule:
    """The recurrence of one layer on one rank; rows are [x | B | C | steps]."""

    spec: Mamba2Spec
    units: RecurrentUnits
    group_of_head: Tensor
    log_rate: Tensor
    step_bias: Tensor
    skip: Tensor

    @property
    def parts(self) -> Mapping[str, Sequence[Range]]:
        """By component: the units that each tp rank computes with."""
        return self.units.parts

    def advance(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """(n, tokens, channels of all heads), and the states after."""
        mixed, steps = rows.tensor_split((-self.units.num_heads,), dim=-1)
        (x, into, out_of), convs = self.units.convolve(mixed, states)
        step = functional.softplus(steps.float() + self.step_bias).unsqueeze(-1)
        log_decay = -self.log_rate.exp().unsqueeze(-1) * step
        state = torch.unflatten(states["ssm"].float(), -1, (self.spec.head_dim, self.spec.state_dim))
        tokens = selective_scan.ScanTokens(x * step, log_decay, into, out_of)
        out, state = selective_scan.advance(tokens, self.group_of_head, state)
        out = (out + x * self.skip.unsqueeze(-1)).flatten(2)
        return out.to(rows.dtype), {"ssm": state.flatten(-2), **convs}


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """The norm of a layer on one rank, over the channels that it adds."""

    spec: GroupNormSpec
    weight: Tensor
    group_of_channel: Tensor
    size: int
    is_shared: bool
    """Whether groups lie on several ranks."""

    def __call__(self, x: Tensor, gates: Tensor, attention: Attention) -> Tensor:
        """Rows normed and gated, in float32."""
        x = x if self.spec.is_before_gate else x * functional.silu(gates)
        squares = x.new_zeros(len(x), self.spec.num_groups).index_add_(1, self.group_of_channel, x * x)
        if self.is_shared:
            squares = attention.total(squares)
        scales = torch.rsqrt(squares / self.size + self.spec.eps)
        x = x * scales[:, self.group_of_channel] * self.weight.float()
        return x * functional.silu(gates) if self.spec.is_before_gate else x


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One layer's state space on one rank."""

    index: int
    rule: SelectiveRule
    project: Linear
    factors: Tensor | None
    norm: GroupNorm | None
    added: slice
    """The channels of this rank's heads that it adds to the output."""
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        projected = self.project(x)
        if self.factors is not None:
            projected = projected * self.factors
        num_gates = self.rule.units.num_heads * self.rule.spec.head_dim
        mixed = attention.recur(self.index, projected[:, num_gates:], self.rule)[:, self.added].float()
        gates = projected[:, :num_gates][:, self.added].float()
        if self.norm is not None:
            mixed = self.norm(mixed, gates, attention)
        else:
            mixed = mixed * functional.silu(gates)
        return self.output(mixed.to(x.dtype))
