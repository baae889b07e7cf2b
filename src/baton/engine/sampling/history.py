"""What the sampler remembers of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.commands import StartSequence
from baton.errors import EngineError

Ids = npt.NDArray[np.int64]


class TokenCounts:
    """The tokens of a sequence, each once, with how often each was generated (0: in the prompt only)."""

    def __init__(self, tokens: Sequence[int], num_prompt: int, vocab_size: int) -> None:
        known = np.asarray(tokens, dtype=np.int64)
        generated = np.arange(len(known)) >= num_prompt
        # Where a prompt came as embeddings its ids are placeholders; one outside the vocabulary has no logit.
        has_logit = (known >= 0) & (known < vocab_size)
        ids, slots = np.unique(known[has_logit], return_inverse=True)
        self._ids = ids
        self._counts = np.bincount(slots, weights=generated[has_logit], minlength=len(ids)).astype(np.int64)
        self._size = len(ids)
        self._slots = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    @property
    def ids(self) -> Ids:
        """Every token once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Ids:
        """How often the token at the same place in `ids` was generated."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Counts one more generated token."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._new_slot(token)
        self._counts[slot] += 1

    def _new_slot(self, token: int) -> int:
        if self._size == len(self._ids):
            spare = np.zeros(max(16, self._size), dtype=np.int64)
            self._ids = np.concatenate([self._ids, spare])
            self._counts = np.concatenate([self._counts, spare])
        slot = self._size
        self._ids[slot] = token
        self._slots[token] = slot
        self._size += 1
        return slot


class History:
    """One sequence as the sampler sees it: its wishes, its length, and its tokens where a penalty asks."""

    def __init__(self, order: StartSequence, vocab_size: int, eos_ids: Collection[int]) -> None:
        params = order.params
        self.params = params
        self.index = order.index
        self.sequence = order.sequence
        self.num_prompt = order.num_prompt
        self.num_tokens = len(order.tokens)
        self.bias_ids: Ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self.bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        # An eos that is ignored ends nothing, so it may come at any time.
        ending_ids = {*params.stop_ids, *(() if params.ignore_eos else eos_ids)}
        self.ending_ids: Ids = np.array(sorted(ending_ids), dtype=np.int64)
        penalties = (params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty)
        has_penalty = any(penalties)
        self.counts = TokenCounts(order.tokens, order.num_prompt, vocab_size) if has_penalty else None

    @property
    def is_too_short_to_end(self) -> bool:
        """Whether the next token may not end the answer."""
        return self.num_tokens - self.num_prompt < self.params.min_tokens

    def extend(self, tokens: Sequence[int], start: int | None) -> None:
        """Takes in tokens from position `start` on, or at the end; those known already are passed over."""
        at = self.num_tokens if start is None else start
        if at > self.num_tokens:
            raise EngineError(
                f"sequence {self.sequence}: tokens from position {at} on, but only {self.num_tokens} are "
                "known; tell the tokens in between first"
            )
        new = tokens[self.num_tokens - at :]
        self.num_tokens += len(new)
        if self.counts is not None:
            for token in new:
                self.counts.add(token)
