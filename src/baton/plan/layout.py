"""Layout strings: `pp2.cp2:stripe1.tp4` is a mesh of ranks and how it cuts a cache.

Axes are written outermost first and ranks are numbered row-major in that order. An axis that is not written
has size one.

Context parallelism deals tokens by a scheme. A share is a part of the tokens; `num_shares` of them partition
any prompt. Where there is one share, every rank of the axis holds all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias

from baton.errors import LayoutError
from baton.plan.ranges import Range, Ranges, Stride, even_cuts, from_sizes

AXIS_NAMES = ("dp", "pp", "cp", "tp")
NUM_RANKS_MAX = 16_384
BLOCK_MAX = 1 << 24

_AXIS = re.compile(r"(?P<name>[a-z]+)(?P<size>[0-9]+)(?::(?P<option>.+))?")
_NUMBER = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class Mirror:
    """Every rank holds every token."""

    def num_shares(self, num_ranks: int) -> int:
        """One: all ranks hold the same."""
        return 1

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """All tokens."""
        return Stride(0, num_tokens)


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous runs of whole pages, sizes a page apart at most, earlier ranks getting the extra."""

    def num_shares(self, num_ranks: int) -> int:
        """One run per rank."""
        return num_ranks

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """The run of one rank; empty where there are fewer pages than ranks."""
        num_pages = -(-num_tokens // page_tokens)
        base, extra = divmod(num_pages, num_ranks)
        first = index * base + min(index, extra)
        last = first + base + (index < extra)
        return Stride(min(first * page_tokens, num_tokens), min(last * page_tokens, num_tokens))


@dataclass(frozen=True, slots=True)
class Stripe:
    """Tokens dealt round robin in blocks; a block of 0 stands for the side's page."""

    block: int

    def num_shares(self, num_ranks: int) -> int:
        """One stripe per rank."""
        return num_ranks

    def share(self, index: int, num_ranks: int, num_tokens: int, page_tokens: int) -> Stride:
        """The stripe of one rank: owner(t) = (t // block) mod ranks."""
        block = self.block or page_tokens
        return Stride(0, num_tokens, index * block, block, num_ranks * block)


Scheme: TypeAlias = Mirror | Split | Stripe


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A parsed layout string: equal strings are equal layouts."""

    text: str
    axes: tuple[Axis, ...]
    scheme: Scheme
    stage_sizes: tuple[int, ...] | None

    def __str__(self) -> str:
        return self.text

    @property
    def num_ranks(self) -> int:
        """Ranks in the whole mesh, all dp groups together."""
        return prod(axis.size for axis in self.axes)

    def size(self, name: str) -> int:
        """The size of an axis, one where it is not written."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits on every axis."""
        position = dict.fromkeys(AXIS_NAMES, 0)
        for axis in reversed(self.axes):
            rank, position[axis.name] = divmod(rank, axis.size)
        return position

    def strides(self) -> dict[str, int]:
        """By how much the rank number grows along each axis."""
        steps = dict.fromkeys(AXIS_NAMES, 0)
        step = 1
        for axis in reversed(self.axes):
            steps[axis.name] = step
            step *= axis.size
        return steps

    def group(self, dp: int) -> tuple[int, ...]:
        """The ranks of one dp group, ascending."""
        steps = self.strides()
        ranks = [dp * steps["dp"]]
        for axis in self.axes:
            if axis.name != "dp":
                ranks = [rank + i * steps[axis.name] for rank in ranks for i in range(axis.size)]
        return tuple(sorted(ranks))

    def stages(self, num_layers: int, side: str) -> Ranges:
        """The layers of each pipeline stage; the later stages get the extra layer."""
        num_stages = self.size("pp")
        if num_stages > num_layers:
            raise LayoutError(
                f"{num_stages} pipeline stages for {num_layers} layers; use at most pp{num_layers}",
                sides=f"{side} {self.text}",
            )
        if self.stage_sizes is None:
            return even_cuts(num_layers, num_stages, extra_first=False)
        if sum(self.stage_sizes) != num_layers:
            raise LayoutError(
                f"stage sizes {'-'.join(map(str, self.stage_sizes))} sum to {sum(self.stage_sizes)}, "
                f"the model has {num_layers} layers",
                sides=f"{side} {self.text}",
            )
        return from_sizes(self.stage_sizes)

    def unit_blocks(self, num_units: int, *, component: str, unit: str, side: str) -> tuple[Range, ...]:
        """The block of units of each tp coordinate; mirrors share a block."""
        num_ranks = self.size("tp")
        if num_ranks <= num_units:
            return even_cuts(num_units, num_ranks, extra_first=True)
        if num_ranks % num_units:
            raise LayoutError(
                f"the model has {num_units} {unit}s; use tp up to {num_units}, or a multiple of {num_units}",
                component=component,
                sides=f"{side} {self.text}",
            )
        copies = num_ranks // num_units
        return tuple((rank // copies, rank // copies + 1) for rank in range(num_ranks))


@lru_cache(maxsize=1024)
def parse_layout(text: str) -> Layout:
    """Reads a layout string; raises LayoutError with the offending part and the remedy."""
    axes: list[Axis] = []
    scheme: Scheme = Mirror()
    stage_sizes: tuple[int, ...] | None = None
    for part in text.split("."):
        axis, option = _parse_axis(text, part)
        if axis.name in {known.name for known in axes}:
            raise _malformed(text, f"axis {axis.name} is written twice")
        axes.append(axis)
        if axis.name == "cp":
            scheme = _parse_scheme(text, axis, option)
        elif axis.name == "pp" and option is not None:
            stage_sizes = _parse_stages(text, axis, option)
        elif option is not None:
            raise _malformed(text, f"{axis.name} takes no option, found ':{option}'")
    if prod(axis.size for axis in axes) > NUM_RANKS_MAX:
        raise _malformed(text, f"more than {NUM_RANKS_MAX} ranks")
    return Layout(text, tuple(axes), scheme, stage_sizes)


def _malformed(text: str, reason: str) -> LayoutError:
    return LayoutError(
        f"{reason}; write axes like tp8, pp2:12-20, cp2:mirror|split|stripe64, dp4 joined by dots",
        sides=f"layout {text!r}",
    )


def _parse_axis(text: str, part: str) -> tuple[Axis, str | None]:
    match = _AXIS.fullmatch(part)
    if match is None:
        raise _malformed(text, f"cannot read {part!r}" if part else "an empty part")
    name, size, option = match["name"], match["size"], match["option"]
    if name not in AXIS_NAMES:
        raise _malformed(text, f"unknown axis {name!r}")
    return Axis(name, _number(text, size, f"size of {name}", NUM_RANKS_MAX)), option


def _number(text: str, digits: str, part: str, most: int) -> int:
    if not _NUMBER.fullmatch(digits) or int(digits) > most:
        raise _malformed(text, f"{part} must be 1 to {most} without leading zeros, found {digits!r}")
    return int(digits)


def _parse_scheme(text: str, axis: Axis, option: str | None) -> Scheme:
    if option is None:
        return Stripe(0)
    if option == "mirror":
        return Mirror()
    if option == "split":
        return Split()
    if option.startswith("stripe"):
        return Stripe(_number(text, option.removeprefix("stripe"), "stripe block", BLOCK_MAX))
    raise _malformed(text, f"unknown scheme {option!r} for {axis.name}{axis.size}")


def _parse_stages(text: str, axis: Axis, option: str) -> tuple[int, ...]:
    sizes = tuple(_number(text, digits, "stage size", BLOCK_MAX) for digits in option.split("-"))
    if len(sizes) != axis.size:
        raise _malformed(text, f"pp{axis.size} needs {axis.size} stage sizes, found {len(sizes)}")
    return sizes
