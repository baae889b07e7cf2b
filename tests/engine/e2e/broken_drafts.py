"""A rank process in which something of the draft is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import torch

from baton.engine import runner
from baton.engine.drafting import Following
from baton.engine.rank import process
from baton.engine.rank.drawing import draw
from baton.engine.sampler import Sampler
from baton.engine.steps import Batch, Sampled, Work


def nothing() -> None:
    """The control: as it is."""


def unchecked() -> None:
    """A guess is taken for what was sampled."""

    def trusting(sampler: Sampler, logits: torch.Tensor, works: Sequence[Work]) -> dict[int, list[Sampled]]:
        found = draw(sampler, logits, works)
        for work in works:
            if work.num_drafted and len(found[work.sequence]) == 1:
                sampler.extend(work.sequence, work.tokens[-1:])
                found[work.sequence] = [Sampled(work.tokens[-1]), *found[work.sequence]]
        return found

    process.draw = trusting


def late() -> None:
    """The draft sees each token itself, not the one that follows."""

    class Late(Following):
        def __init__(self, batch: Batch, sampled: Sequence[Sequence[int]]) -> None:
            super().__init__(batch, sampled)
            self.tokens[1:] = self.tokens[:-1].copy()

    runner.Following = Late  # type: ignore[misc]


def not_stored() -> None:
    """What the draft stored is gone once it has guessed, so that nothing of it is handed over."""
    propose = runner.Runner.propose

    def forgetful(self: runner.Runner, said: object, hooks: runner.Hooks) -> object:
        pools = self._pools

        class Wiping(runner.Quiet):
            def layer_done(self, layer: int) -> None:
                pools.rows("latent", layer)[0].zero_()
                hooks.layer_done(layer)

        return propose(self, said, Wiping())  # type: ignore[arg-type]

    runner.Runner.propose = forgetful  # type: ignore[method-assign, assignment]


BROKEN: Mapping[str, Callable[[], None]] = {
    each.__name__: each for each in (nothing, unchecked, late, not_stored)
}


def main(connection: Connection, name: str) -> None:
    """The whole life of a rank, broken by name."""
    BROKEN[name]()
    process.main(connection)
