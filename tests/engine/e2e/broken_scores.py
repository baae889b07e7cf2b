"""A worker process in which log-probabilities of prompts go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from torch import Tensor

from baton.engine import worker
from baton.engine.commands import ScheduledBatch, ScheduledSequence
from baton.engine.model_runner import ModelRunner
from baton.engine.models.layers import VocabularyHead


def nothing() -> None:
    """The control: as it is."""


def late() -> None:
    """Each token is scored by the row of its own position, which has seen it."""
    ScheduledSequence.scored_tokens = property(  # type: ignore[assignment,method-assign]
        lambda self: [] if self.prompt_logprobs is None else self.tokens
    )


def own_share() -> None:
    """Every tp rank takes its part of the vocabulary for that of all."""
    gathered, score = ModelRunner._gathered_logits, ModelRunner._score_prompts

    def scoring(self: ModelRunner, rows: Tensor, batch: ScheduledBatch, head: VocabularyHead) -> Tensor:
        ModelRunner._gathered_logits = lambda self, rows, head: (  # type: ignore[method-assign]
            head.logits(rows).repeat(1, self._mesh.tp.size)
        )
        try:
            return score(self, rows, batch, head)
        finally:
            ModelRunner._gathered_logits = gathered  # type: ignore[method-assign]

    ModelRunner._score_prompts = scoring  # type: ignore[method-assign]


BROKEN: Mapping[str, Callable[[], None]] = {each.__name__: each for each in (nothing, late, own_share)}


def main(connection: Connection, name: str) -> None:
    """Runs a worker that is broken by name."""
    BROKEN[name]()
    worker.main(connection)
