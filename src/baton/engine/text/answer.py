"""The text of an answer as its caller sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from baton.engine.sampling.ending import ends_with
from baton.engine.sampling.params import SamplingParams
from baton.engine.text.detokenizer import Detokenizer
from baton.engine.text.stops import StopStrings
from baton.engine.text.tokenizer import Tokenizer


class AnswerText:
    """Text of one answer, up to its stop string or the token that ended it, neither of which it shows.

    The text of the first min_tokens tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        eos_ids: Collection[int],
        context: Sequence[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, context)
        self._stops = StopStrings(params.stop)
        self._params = params
        self._eos_ids = eos_ids
        self._num_tokens = 0

    @property
    def has_stop_string(self) -> bool:
        """Whether a stop string was found: the answer is over."""
        return self._stops.is_found

    def push(self, token: int) -> str:
        """The text that is certain after this token."""
        self._num_tokens += 1
        if ends_with(token, self._num_tokens, self._params, self._eos_ids):
            return ""
        piece = self._detokenizer.push(token)
        if self._num_tokens <= self._params.min_tokens:
            return piece
        return self._stops.push(piece)

    def finish(self) -> str:
        """The rest of the text, when the answer is over."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
