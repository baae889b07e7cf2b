"""The comparison with attention's definition sees what is wrong with windows, sinks and choices."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.attention.world import World
from tests.engine.parallel.ranks import on_mesh
from torch import Tensor

from baton.engine.attention import prefill, slots, softmax
from baton.engine.attention.passes import Pass
from baton.engine.attention.slots import Reads
from baton.engine.attention.sparse import Best, Chooser
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.models.base import HeadOptions
from baton.engine.parallel import Mesh
from baton.errors import EngineError
from baton.plan import parse_layout

Apply = Callable[[pytest.MonkeyPatch], None]


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The control."""


def keys_cut_short(patch: pytest.MonkeyPatch) -> None:
    """The first key of a window is not read."""
    lowest = slots._lowest
    patch.setattr(
        slots,
        "_lowest",
        lambda segment, window: lowest(segment, window) + (window is not None and segment.start > 8),
    )


def window_too_long(patch: pytest.MonkeyPatch) -> None:
    """Chunks see one key too many."""
    seen = prefill.seen

    def wider(rows: object, keys: object, window: int | None, dtype: object) -> object:
        return seen(rows, keys, None if window is None else window + 1, dtype)  # type: ignore[arg-type]

    patch.setattr(prefill, "seen", wider)
    patch.setattr(prefill, "seen", wider)


def no_window(patch: pytest.MonkeyPatch) -> None:
    """Windows are not heeded where keys are read."""
    patch.setattr(slots, "_lowest", lambda segment, window: 0)


def no_sinks(patch: pytest.MonkeyPatch) -> None:
    """Sinks take no part."""
    patch.setattr(softmax, "with_sinks", lambda part, sinks: part.out)


def all_attended(patch: pytest.MonkeyPatch) -> None:
    """Nothing is chosen."""
    patch.setattr(Chooser, "choose", lambda self, reads, num_seen: reads)


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    """A token more is chosen than asked for."""

    def more(self: Chooser, scores: object) -> Best:
        found = scores.topk(min(self.query.num_chosen + 1, scores.shape[-1]), dim=-1)  # type: ignore[attr-defined]
        return Best(found.values, found.indices, scores.shape[-1])  # type: ignore[attr-defined]

    patch.setattr(Chooser, "_best", more)


def not_causal(patch: pytest.MonkeyPatch) -> None:
    """Later tokens may be chosen."""
    patch.setattr(
        "baton.engine.attention.sparse.seen",
        lambda rows, keys, window, dtype: torch.zeros(len(rows), len(keys), dtype=dtype),
    )


def each_its_own(patch: pytest.MonkeyPatch) -> None:
    """Every cp rank keeps the best of its own tokens, whatever the others have."""

    def alone(self: Chooser, reads: Reads, chunks: list[Best], buckets: list[Best]) -> None:
        """Nothing is agreed on."""

    patch.setattr(Chooser, "_agree", alone)


ON_ONE = (keys_cut_short, window_too_long, no_sinks, all_attended, one_too_many, not_causal)
ON_TWO = (keys_cut_short, window_too_long, no_sinks, all_attended, each_its_own)


class Noting(World):
    """Goes on after a difference: a rank that stopped would leave the others waiting."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, 41)
        self.differences: list[str] = []

    def _same(self, out: Tensor, expected: Tensor) -> None:
        try:
            super()._same(out, expected)
        except AssertionError as error:
            self.differences.append(str(error))


def differences(mesh: Mesh, apply: Apply) -> list[str]:
    """What the comparison finds."""
    world = Noting(mesh)
    with pytest.MonkeyPatch.context() as patch:
        apply(patch)
        world.step({0: 17, 1: 3}, {0: 28, 1: 3})
        world.step({0: 11, 1: 1})
        for _ in range(3):
            world.step({0: 1, 1: 1})
    return world.differences


@pytest.mark.parametrize("apply", [nothing, *ON_ONE], ids=lambda apply: apply.__name__)
def test_one_rank(apply: Apply) -> None:
    assert bool(differences(Mesh(parse_layout("tp1"), 0), apply)) == (apply is not nothing)


def test_a_page_before_the_window_is_not_read() -> None:
    with pytest.raises(EngineError, match=r"reads a page of 'tokens\.w5' that was given up"):
        differences(Mesh(parse_layout("tp1"), 0), no_window)


def all_differences(mesh: Mesh) -> dict[str, int]:
    """How many the comparison finds, by what is broken."""
    return {apply.__name__: len(differences(mesh, apply)) for apply in (nothing, *ON_TWO)}


@pytest.mark.long
def test_ranks_that_share_a_context(tmp_path: Path) -> None:
    for found in on_mesh("cp2:stripe1", tmp_path / "meeting", all_differences):
        assert {name for name, count in found.items() if not count} == {"nothing"}, found


def test_a_window_that_the_cache_does_not_keep_is_an_error() -> None:
    mesh = Mesh(parse_layout("tp1"), 0)
    work = ScheduledSequence(0, 0, [1, 2], {"tokens": [0], "tokens.w5": [0]}, 2)
    found = Pass(ScheduledBatch([work]), mesh, World(mesh, 3).pools)
    q, k, v = torch.zeros(2, 6, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 6)
    for layer, window, words in ((0, 5, "a window of 5, its cache keeps all"), (3, 6, "keeps a window of 5")):
        with pytest.raises(EngineError, match=words):
            found.heads(layer, q, k, v, HeadOptions(1.0, window))
