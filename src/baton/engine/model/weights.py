"""Where weights come from: a checkpoint's tensors by name, of which a rank reads only its slices.

The same code that loads a model also checks it: with a dry loader, shapes are compared and nothing is read,
so that the parent refuses a checkpoint before any worker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from baton.engine.model.rope import Rope, RopeSpec
from baton.engine.model.seam import Cut
from baton.errors import EngineError
from baton.plan.ranges import Range


class Checkpoint(Protocol):
    """A model on disk, under Hugging Face parameter names."""

    @property
    def config(self) -> Mapping[str, Any]:
        """What config.json holds."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, None where there is no such tensor."""

    def read(self, name: str, index: tuple[slice, ...] = (), *, device: torch.device | None = None) -> Tensor:
        """That part of a tensor, in whatever float dtype it is stored; nothing else is read."""


ExpertsHook = Callable[[int, Tensor], None]
"""Is called with a layer's index and the expert ids (rows, experts per token) chosen there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor: its name, the shape that the whole must have, and the slices wanted of it."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        whole = self.shape[len(self.index) :]
        return (
            *(len(range(*each.indices(n))) for each, n in zip(self.index, self.shape, strict=False)),
            *whole,
        )


def rows(name: str, shape: tuple[int, ...], span: Range) -> Piece:
    """The rows [span) of a tensor."""
    return Piece(name, shape, (slice(*span),))


def columns(name: str, shape: tuple[int, int], span: Range) -> Piece:
    """The columns [span) of a matrix."""
    return Piece(name, shape, (slice(0, shape[0]), slice(*span)))


class Loader:
    """Reads pieces for one rank, in its dtype and on its device."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        cut: Cut,
        max_context: int | None = None,
        on_experts: ExpertsHook | None = None,
    ) -> None:
        self.cut = cut
        self.max_context = max_context
        self.on_experts = on_experts
        self._checkpoint = checkpoint
        self._ropes: dict[RopeSpec, Rope] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return self._checkpoint.shape(name) is not None

    def take(self, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """One piece; its dtype is the rank's unless told."""
        problem = shape_problem(self._checkpoint, piece)
        if problem:
            raise EngineError(problem)
        dtype = dtype or self.cut.dtype
        if 0 in piece.sizes:
            return torch.empty(piece.sizes, dtype=dtype, device=self.cut.device)
        found = self._checkpoint.read(piece.name, piece.index, device=self.cut.device)
        if tuple(found.shape) != piece.sizes:
            raise EngineError(
                f"{piece.name}: read {tuple(found.shape)} where the slice is {piece.sizes}; "
                "the file does not match its header, fetch it again"
            )
        return found.to(device=self.cut.device, dtype=dtype).contiguous()

    def join(self, pieces: Sequence[Piece]) -> Tensor:
        """Pieces one under the other."""
        taken = [self.take(piece) for piece in pieces]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def stack(self, pieces: Sequence[Piece], sizes: tuple[int, ...]) -> Tensor:
        """Pieces of these sizes along a new first dim, read one by one into place."""
        stacked = torch.empty((len(pieces), *sizes), dtype=self.cut.dtype, device=self.cut.device)
        for i, piece in enumerate(pieces):
            stacked[i] = self.take(piece)
        return stacked

    def rope(self, spec: RopeSpec) -> Rope:
        """The rotation of a spec up to the maximum context, made once for all layers that share it."""
        if self.max_context is not None:
            spec = replace(spec, num_positions=min(spec.num_positions, self.max_context))
        if spec not in self._ropes:
            self._ropes[spec] = Rope(spec, self.cut.dtype, self.cut.device)
        return self._ropes[spec]


class DryLoader(Loader):
    """Reads nothing and notes what a real loader would trip over."""

    def __init__(self, checkpoint: Checkpoint, cut: Cut) -> None:
        super().__init__(checkpoint, Cut(cut.layers, cut.heads, cut.width, cut.dtype, torch.device("meta")))
        self.problems: list[str] = []

    def take(self, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """An empty stand-in."""
        problem = shape_problem(self._checkpoint, piece)
        if problem:
            self.problems.append(problem)
        return torch.empty(piece.sizes, dtype=dtype or self.cut.dtype, device=self.cut.device)


def shape_problem(checkpoint: Checkpoint, piece: Piece) -> str:
    """What is wrong with a piece's tensor, empty where nothing is."""
    found = checkpoint.shape(piece.name)
    if found is None:
        return f"{piece.name} is missing from the checkpoint, {piece.shape} is wanted"
    if tuple(found) != piece.shape:
        return f"{piece.name} is {tuple(found)} in the checkpoint, {piece.shape} is wanted"
    return ""
