"""A worker process in which something of the draft is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from tests.engine.hooks import NoHooks

from baton.engine import model_runner, worker
from baton.engine.attention import states
from baton.engine.commands import SampledToken, ScheduledBatch, ScheduledSequence
from baton.engine.drafting import NextTokens
from baton.engine.model_runner import ForwardHooks, ModelRunner, sample_tokens
from baton.engine.sampler import Sampler


def nothing() -> None:
    """The control: as it is."""


def unchecked() -> None:
    """A draft token is accepted unchecked."""

    def trusting(
        sampler: Sampler, logits: torch.Tensor, sequences: Sequence[ScheduledSequence]
    ) -> dict[int, list[SampledToken]]:
        samples = sample_tokens(sampler, logits, sequences)
        for scheduled in sequences:
            tokens = samples[scheduled.sequence]
            if scheduled.num_drafted and len(tokens) == 1:
                sampler.extend(scheduled.sequence, scheduled.tokens[-1:])
                samples[scheduled.sequence] = [SampledToken(scheduled.tokens[-1]), *tokens]
        return samples

    worker.sample_tokens = trusting


def late() -> None:
    """The draft sees each token itself, not the one that follows."""

    class Late(NextTokens):
        def __init__(self, batch: ScheduledBatch, sampled: Sequence[Sequence[int]]) -> None:
            super().__init__(batch, sampled)
            self.tokens[1:] = self.tokens[:-1].copy()

    model_runner.NextTokens = Late  # type: ignore[misc]


def not_stored() -> None:
    """What the draft stored is gone once it has guessed, so that nothing of it is handed over."""
    propose = ModelRunner.propose

    def forgetful(self: ModelRunner, sampled: object, hooks: ForwardHooks) -> object:
        pools = self._pools

        class Wiping(NoHooks):
            def layer_done(self, layer: int) -> None:
                pools.rows("latent", layer)[0].zero_()
                hooks.layer_done(layer)

        return propose(self, sampled, Wiping())  # type: ignore[arg-type]

    ModelRunner.propose = forgetful  # type: ignore[method-assign, assignment]


def guessed_state() -> None:
    """A state takes in every guess, right or wrong."""
    _change_states(num_drafted=0, num_accepted=0)


def forgotten_guesses() -> None:
    """A state never takes in the guesses that were accepted."""
    _change_states(num_accepted=0)


def _change_states(**changes: int) -> None:
    find = states._alike
    states._alike = lambda *args: [replace(each, **changes) for each in find(*args)]


BROKEN: Mapping[str, Callable[[], None]] = {
    each.__name__: each for each in (nothing, unchecked, late, not_stored)
}
STATES: Mapping[str, Callable[[], None]] = {
    each.__name__: each for each in (guessed_state, forgotten_guesses)
}
"""For models with recurrent state."""


def main(connection: Connection, name: str) -> None:
    """Runs a worker that is broken by name."""
    {**BROKEN, **STATES}[name]()
    worker.main(connection)
