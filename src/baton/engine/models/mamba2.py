"""Mamba2: a selective state space, a matrix of state per head, whose B and C are shared by groups of heads.

tp cuts heads and groups each by itself; with more ranks than groups, groups are mirrored. The norm of some
families reaches over all heads of a group, or of the layer: where these lie on several ranks, their squares
are summed over tp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models import selective_scan
from baton.engine.models.base import Attention, States
from baton.engine.models.recurrence import Convolution
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    OutputSlice,
    covering,
    cut_mirrored,
    cut_units,
    laid_out,
    load_partial,
    rows,
    scaled,
)
from baton.plan.ranges import Range

PARTS = ("x", "B", "C")


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
    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    num_taps: int
    activation: str
    has_input_bias: bool = False
    has_conv_bias: bool = True
    has_output_bias: bool = False
    norm: GroupNormSpec | None = None
    factors: tuple[float, ...] = (1.0,) * 5
    """What the outputs of the first projection are multiplied with: gates, x, B, C and steps."""

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_each(self) -> int:
        """Heads of a group."""
        return self.num_heads // self.num_groups

    def load(self, loader: Loader, index: int, prefix: str) -> Mamba2:
        """This rank's heads and the groups that it needs; `prefix` names the module."""
        share = loader.cut.heads
        heads = cut_units(self.num_heads, "head", share)
        groups = covering(heads, cut_units(self.num_groups, "group", share), self.num_each)
        head, group = heads[share.index], groups[share.index]
        spans = self._spans(head, group)
        conv = [(first - self.width, last - self.width) for first, last in (spans[part] for part in PARTS)]
        added = cut_mirrored(heads, self.head_dim, share)
        shape = (self.hidden_size, self.width)
        return Mamba2(
            index=index,
            rule=SelectiveRule(
                spec=self,
                parts={"ssm": heads, "conv.x": heads, "conv.B": groups, "conv.C": groups},
                num_units=(head[1] - head[0], group[1] - group[0]),
                group_of_head=torch.arange(*head, device=loader.cut.device) // self.num_each - group[0],
                convolution=self._convolution(loader, prefix, conv),
                by_head=self._by_head(loader, prefix, head),
            ),
            project=self._project(loader, f"{prefix}.in_proj", spans),
            factors=self._factors(loader, spans),
            norm=self._norm(loader, f"{prefix}.norm.weight", added, heads) if self.norm else None,
            added=(added[0] - head[0] * self.head_dim, added[1] - head[0] * self.head_dim),
            output=load_partial(
                loader, InputSlice(f"{prefix}.out_proj", shape, added, share, self.has_output_bias)
            ),
        )

    def _spans(self, head: Range, group: Range) -> dict[str, Range]:
        """Where the first projection has this rank's gates, x, B, C and steps."""
        channels, states = scaled(head, self.head_dim), scaled(group, self.state_dim)
        num_states = self.num_groups * self.state_dim
        firsts = {
            "z": (channels, 0),
            "x": (channels, self.width),
            "B": (states, 2 * self.width),
            "C": (states, 2 * self.width + num_states),
            "dt": (head, 2 * self.width + 2 * num_states),
        }
        return {part: (first + span[0], first + span[1]) for part, (span, first) in firsts.items()}

    def _project(self, loader: Loader, name: str, spans: Mapping[str, Range]) -> Linear:
        num_outputs = 2 * self.width + 2 * self.num_groups * self.state_dim + self.num_heads
        parts = [OutputSlice(name, num_outputs, span, self.has_input_bias) for span in spans.values()]
        shape = (num_outputs, self.hidden_size)
        weight = loader.join([rows(f"{name}.weight", shape, part.span) for part in parts])
        bias = None
        if self.has_input_bias:
            bias = loader.join([rows(f"{name}.bias", shape[:1], part.span) for part in parts])
        return Linear(laid_out(weight), bias)

    def _factors(self, loader: Loader, spans: Mapping[str, Range]) -> Tensor | None:
        if set(self.factors) == {1.0}:
            return None
        sizes = [last - first for first, last in spans.values()]
        each = torch.tensor(self.factors, dtype=loader.cut.dtype, device=loader.cut.device)
        return torch.cat([each[i].expand(size) for i, size in enumerate(sizes)])

    def _convolution(self, loader: Loader, prefix: str, spans: Sequence[Range]) -> Convolution:
        num_channels = self.width + 2 * self.num_groups * self.state_dim
        shape = (num_channels, 1, self.num_taps + 1)
        weight = loader.join([rows(f"{prefix}.conv1d.weight", shape, span) for span in spans])
        bias = None
        if self.has_conv_bias:
            bias = loader.join([rows(f"{prefix}.conv1d.bias", shape[:1], span) for span in spans])
        return Convolution(weight.squeeze(1), bias, self.activation)

    def _by_head(self, loader: Loader, prefix: str, head: Range) -> ByHead:
        shape = (self.num_heads,)
        names = ("A_log", "dt_bias", "D")
        return ByHead(*(loader.take(rows(f"{prefix}.{name}", shape, head), torch.float32) for name in names))

    def _norm(self, loader: Loader, name: str, added: Range, heads: Sequence[Range]) -> GroupNorm:
        assert self.norm is not None
        size = self.width // self.norm.num_groups
        channels = torch.arange(*added, device=loader.cut.device)
        is_whole = all(scaled(head, self.head_dim)[0] % size == 0 for head in heads)
        has_mirrors = len(set(heads)) < len(heads)
        weight = loader.take(rows(name, (self.width,), added))
        return GroupNorm(self.norm, weight, channels // size, size, not is_whole or has_mirrors)


@dataclass(frozen=True, slots=True)
class ByHead:
    """Numbers of each head, in float32."""

    log_rate: Tensor
    step_bias: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True)
class SelectiveRule:
    """The recurrence of one layer on one rank; rows are [x | B | C | steps]."""

    spec: Mamba2Spec
    parts: Mapping[str, Sequence[Range]]
    num_units: tuple[int, int]
    """Heads and groups that are computed here."""
    group_of_head: Tensor
    convolution: Convolution
    by_head: ByHead

    def advance(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        """(n, tokens, channels of all heads), and the states after."""
        (num_heads, num_groups), spec = self.num_units, self.spec
        counts = (num_heads, num_groups, num_groups)
        sizes = (num_heads * spec.head_dim, *(num_groups * spec.state_dim,) * 2)
        mixed, steps = torch.split_with_sizes(rows, (sum(sizes), num_heads), -1)
        before = torch.cat([states[f"conv.{part}"].flatten(1, 2) for part in PARTS], dim=1)
        mixed, after = self.convolution.advance(mixed, before)
        split = torch.split_with_sizes(mixed.float(), sizes, -1)
        x, into, out_of = (
            torch.unflatten(each, -1, (count, -1)) for each, count in zip(split, counts, strict=True)
        )
        step = functional.softplus(steps.float() + self.by_head.step_bias).unsqueeze(-1)
        log_decay = -self.by_head.log_rate.exp().unsqueeze(-1) * step
        state = torch.unflatten(states["ssm"].float(), -1, (spec.head_dim, spec.state_dim))
        tokens = selective_scan.ScanTokens(x * step, log_decay, into, out_of)
        out, state = selective_scan.advance(tokens, self.group_of_head, state)
        out = (out + x * self.by_head.skip.unsqueeze(-1)).flatten(2)
        kept = torch.split_with_sizes(after, sizes, 1)
        convs = {
            f"conv.{part}": torch.unflatten(each, 1, (count, -1))
            for part, each, count in zip(PARTS, kept, counts, strict=True)
        }
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
    added: Range
    """The channels of this rank's heads that it adds to the output; other mirrors add the others."""
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        projected = self.project(x)
        if self.factors is not None:
            projected = projected * self.factors
        num_gates = self.rule.num_units[0] * self.rule.spec.head_dim
        added = slice(*self.added)
        mixed = attention.recur(self.index, projected[:, num_gates:], self.rule)[:, added].float()
        gates = projected[:, :num_gates][:, added].float()
        if self.norm is not None:
            mixed = self.norm(mixed, gates, attention)
        else:
            mixed = mixed * functional.silu(gates)
        return self.output(mixed.to(x.dtype))
