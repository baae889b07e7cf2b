"""Loads weights: a checkpoint's tensors by name, of which a rank reads only its slices.

The same code that loads a model also checks it: with a dry loader, shapes are compared and nothing is read,
so that the parent refuses a checkpoint before any worker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from baton.checkpoint.base import Checkpoint
from baton.engine.models.base import Cut, Share
from baton.engine.models.rope import Rope, RopeSpec
from baton.errors import ConfigError, EngineError
from baton.plan.layout import parse_layout
from baton.plan.ranges import Range, even_cuts


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Part of a tensor: its name, the shape that the whole must have, and the slices wanted of it."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the part."""
        whole = self.shape[len(self.index) :]
        return (
            *(len(range(*cut.indices(n))) for cut, n in zip(self.index, self.shape, strict=False)),
            *whole,
        )


def rows(name: str, shape: tuple[int, ...], span: Range) -> TensorSlice:
    """The rows [span) of a tensor."""
    return TensorSlice(name, shape, (slice(*span),))


def columns(name: str, shape: tuple[int, int], span: Range) -> TensorSlice:
    """The columns [span) of a matrix."""
    return TensorSlice(name, shape, (slice(0, shape[0]), slice(*span)))


_ELEMENTWISE = {"add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "exp", "neg", "cos", "sin"}


class Loader:
    """Reads pieces for one rank, in its dtype and on its device."""

    def __init__(self, checkpoint: Checkpoint, cut: Cut, max_context: int | None = None) -> None:
        self.cut = cut
        self.max_context = max_context
        self._checkpoint = checkpoint
        self._ropes: dict[RopeSpec, Rope] = {}

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return self._checkpoint.shape(name) is not None

    def take(self, piece: TensorSlice, dtype: torch.dtype | None = None) -> Tensor:
        """One piece; its dtype is the rank's unless told."""
        problem = shape_problem(self._checkpoint, piece)
        if problem:
            raise EngineError(problem)
        dtype = dtype or self.cut.dtype
        if 0 in piece.sizes:
            return torch.empty(piece.sizes, dtype=dtype, device=self.cut.device)
        tensor = self._checkpoint.read(piece.name, piece.index, device=self.cut.device)
        if tuple(tensor.shape) != piece.sizes:
            raise EngineError(
                f"{piece.name}: read {tuple(tensor.shape)} where the slice is {piece.sizes}; "
                "the file does not match its header, fetch it again"
            )
        return tensor.to(device=self.cut.device, dtype=dtype).contiguous()

    def join(self, pieces: Sequence[TensorSlice]) -> Tensor:
        """Pieces one under the other."""
        taken = [self.take(piece) for piece in pieces]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def stack(self, pieces: Sequence[TensorSlice], sizes: tuple[int, ...]) -> Tensor:
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
    """Reads nothing, and collects the problems that a real loader would meet."""

    def __init__(self, checkpoint: Checkpoint, cut: Cut) -> None:
        super().__init__(checkpoint, Cut(cut.layers, cut.heads, cut.width, cut.dtype, torch.device("meta")))
        self.problems: dict[str, None] = {}
        """Each once: several pieces may be of one tensor."""
        self.num_bytes = 0
        """Of all that was taken."""

    def take(self, piece: TensorSlice, dtype: torch.dtype | None = None) -> Tensor:
        """An empty stand-in."""
        problem = shape_problem(self._checkpoint, piece)
        if problem:
            self.problems[problem] = None
        taken = torch.empty(piece.sizes, dtype=dtype or self.cut.dtype, device=self.cut.device)
        self.num_bytes += taken.nbytes
        return taken

    def rope(self, spec: RopeSpec) -> Rope:
        """The rotation of one position: it depends on no tensor."""
        return Rope(replace(spec, num_positions=1), self.cut.dtype, torch.device("cpu"))


class ShapesOnly(TorchFunctionMode):
    """While layers load stand-ins, gives what they compute of them as a stand-in of the right shape.

    PyTorch does the same, and imports its compiler for that: 2 s of a core at every start. Ops that are not
    known here are left to it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and len(args) == 1 and not kwargs and all(tensor.is_meta for tensor in args[0]):
            first = args[0][0]
            num_rows = sum(len(tensor) for tensor in args[0])
            return torch.empty((num_rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
        tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
        is_elementwise = func.__name__.strip("_") in _ELEMENTWISE and not kwargs
        if is_elementwise and tensors and all(tensor.is_meta for tensor in tensors):
            shape = np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
            return torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
        return func(*args, **kwargs)


def shape_problem(checkpoint: Checkpoint, piece: TensorSlice) -> str:
    """What is wrong with a piece's tensor, empty where nothing is."""
    shape = checkpoint.shape(piece.name)
    if shape is None:
        return f"{piece.name} is missing from the checkpoint, {piece.shape} is wanted"
    if tuple(shape) != piece.shape:
        return f"{piece.name} is {tuple(shape)} in the checkpoint, {piece.shape} is wanted"
    return ""


# Matrices, and how cut ones are loaded: inputs side by side in one, biases of a sum on one rank only.


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def laid_out(weight: Tensor) -> Tensor:
    """Matrices (..., outputs, inputs) in the memory order that this device multiplies quickest.

    On CPU in float32 that is inputs first: for 4 to 32 rows, a batch of decodes, it takes a tenth to a half
    less time, and for one row or hundreds as long.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.mT.contiguous().mT
    return weight


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """The outputs [span) of a matrix module with `size` of them."""

    name: str
    size: int
    span: Range
    has_bias: bool = False


def load_fused(loader: Loader, num_inputs: int, parts: Sequence[OutputSlice]) -> Linear:
    """One matrix that gives the outputs of all parts side by side."""
    pieces = [rows(f"{part.name}.weight", (part.size, num_inputs), part.span) for part in parts]
    weight = laid_out(loader.join(pieces))
    if not any(part.has_bias for part in parts):
        return Linear(weight)
    return Linear(weight, torch.cat([_bias(loader, part) for part in parts]))


def _bias(loader: Loader, part: OutputSlice) -> Tensor:
    """The bias of a part, zero where it has none beside parts that have one."""
    if not part.has_bias:
        size = part.span[1] - part.span[0]
        return torch.zeros(size, dtype=loader.cut.dtype, device=loader.cut.device)
    return loader.take(rows(f"{part.name}.bias", (part.size,), part.span))


@dataclass(frozen=True, slots=True)
class InputSlice:
    """The inputs [span) of a matrix module of `shape`, a term of a sum over the shares of `share`."""

    name: str
    shape: tuple[int, int]
    span: Range
    share: Share
    has_bias: bool = False


def load_partial(loader: Loader, part: InputSlice) -> Linear:
    """A matrix over some of the inputs; the first share adds the bias, so that it is added once."""
    weight = laid_out(loader.take(columns(f"{part.name}.weight", part.shape, part.span)))
    if not part.has_bias or part.share.index:
        return Linear(weight)
    return Linear(weight, loader.take(TensorSlice(f"{part.name}.bias", part.shape[:1])))


# Which part of a model's heads, vocabulary, width and experts a rank computes.


def cut_evenly(total: int, share: Share) -> Range:
    """A share of `total` things; sizes differ by at most one, earlier shares have the extra."""
    return even_cuts(total, share.count, extra_first=True)[share.index]


def cut_heads(num_heads: int, num_kv_heads: int, share: Share) -> tuple[Range, Range]:
    """The query heads and the kv heads of a share.

    Query heads follow their kv head. With more shares than kv heads, each kv head is on several consecutive
    shares and its query heads are dealt over these, which may leave some with none.
    """
    group = num_heads // num_kv_heads
    if share.count <= num_kv_heads:
        first, last = cut_evenly(num_kv_heads, share)
        return (first * group, last * group), (first, last)
    if share.count % num_kv_heads:
        raise ConfigError(
            f"tp{share.count} is more than the model's {num_kv_heads} kv heads and not a multiple of them; "
            f"use tp up to {num_kv_heads}, or a multiple of {num_kv_heads}"
        )
    num_copies = share.count // num_kv_heads
    head, copy = divmod(share.index, num_copies)
    first, last = cut_evenly(group, Share(copy, num_copies))
    return (head * group + first, head * group + last), (head, head + 1)


def cut_units(num_units: int, unit: str, share: Share) -> tuple[Range, ...]:
    """The units that each share keeps of a recurrent state, as the plan cuts it."""
    layout = parse_layout(f"tp{share.count}")
    return layout.unit_blocks(num_units, component="recurrent state", unit=unit, side="engine")


def covering(heads: Sequence[Range], kept: Sequence[Range], num_heads_each: int) -> tuple[Range, ...]:
    """The units that each share computes with: those that its heads belong to, and those that it keeps."""
    return tuple(
        (min(first // num_heads_each, own[0]), max(-(-last // num_heads_each), own[1]))
        for (first, last), own in zip(heads, kept, strict=True)
    )


def cut_mirrored(blocks: Sequence[Range], size: int, share: Share) -> Range:
    """The elements of a share's heads, `size` each, that it adds to a sum; mirrors add a part each."""
    block = blocks[share.index]
    mirrors = [i for i, other in enumerate(blocks) if other == block]
    first, last = cut_evenly((block[1] - block[0]) * size, Share(mirrors.index(share.index), len(mirrors)))
    return block[0] * size + first, block[0] * size + last


def scaled(span: Range, size: int) -> Range:
    """The span of elements that a span of things of `size` elements each covers."""
    return span[0] * size, span[1] * size
