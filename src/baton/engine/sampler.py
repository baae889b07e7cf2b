"""Turns logits into tokens.

Order: bias, min_tokens, penalties, grammar (`shape`); temperature, top-k, top-p, min-p (`weigh`); `draw`.
Temperature 0 takes the largest logit after shaping, the lowest id among equals. Randomness is a function of
seed, answer and position, and every row is computed by itself: neither the batch a row is in nor the instance
it is on can change its token.

Log-probabilities are those of the model itself, the log-softmax of the logits as they came, whatever the
request changes about them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.commands import SampledToken, StartSequence
from baton.engine.grammar import Grammars
from baton.engine.sampling_params import Progress, SamplingParams, ending
from baton.errors import EngineError

NO_TOKEN = -1
"""In place of the likeliest token of a row that has no finite maximum."""
ROWS_AT_ONCE = 64
"""Rows that are weighed together: bounds the float64 copies of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class Want:
    """One row of logits: whose it is, how many tokens to take from it and where in the sequence they go."""

    sequence: int
    num_samples: int
    position: int


class Sampler:
    """Samples for the sequences of one dp group."""

    def __init__(self, vocab_size: int, eos_ids: Collection[int], grammars: Grammars | None = None) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._histories: dict[int, History] = {}
        self._grammars = grammars

    def begin(self, order: StartSequence) -> None:
        """Takes a sequence in; one that is known already (it was preempted, say) is replaced."""
        self._histories[order.sequence] = History(order, self._vocab_size, self._eos_ids, self._grammars)

    def failures(self, sequences: Iterable[int]) -> dict[int, str]:
        """Why some of these sequences cannot continue; what was sampled for them is void."""
        matchers = {sequence: self._history(sequence).matcher for sequence in sequences}
        return {sequence: m.failure for sequence, m in matchers.items() if m is not None and m.failure}

    def is_ending(self, sequence: int, token: int, context_max: int) -> bool:
        """Whether a token right behind what is known ends an answer, as far as tokens decide that."""
        history = self._history(sequence)
        num_tokens = history.num_tokens + 1
        progress = Progress(token, num_tokens - history.num_prompt, num_tokens, context_max)
        return ending(progress, history.params, self._eos_ids) is not None

    def extend(self, sequence: int, tokens: Sequence[int], start: int | None = None) -> None:
        """Takes in tokens from position `start` on (None: at the end), passing over those known already."""
        self._history(sequence).extend(tokens, start)

    def end(self, sequence: int) -> None:
        """Forgets a sequence, if it is known."""
        self._histories.pop(sequence, None)

    def sample(self, logits: Tensor, wants: Sequence[Want]) -> list[list[SampledToken]]:
        """Tokens for each row of logits (rows, vocabulary), as many as it wants.

        Where several are wanted, token i belongs to the i-th answer from the sequence's own on. Where
        `logprobs` is set a token has its own log-probability and, in `top`, those of the likeliest tokens,
        largest first, equal ones by the lower id, and its own last if it is not among them.
        """
        if logits.shape != (len(wants), self._vocab_size):
            raise EngineError(
                f"logits of shape {tuple(logits.shape)} for {len(wants)} rows and a vocabulary of "
                f"{self._vocab_size}; give one row per sequence, whole"
            )
        if not wants:
            return []
        histories = [self._placed(want) for want in wants]
        shaped = shape(logits, histories)
        best = shaped.max(dim=-1)
        # One answer from the device for both: a step waits for it.
        likeliest_ids = torch.where(best.values.isfinite(), best.indices, NO_TOKEN).cpu().tolist()
        _check_finite(likeliest_ids, wants)
        tokens = [[token] * want.num_samples for token, want in zip(likeliest_ids, wants, strict=True)]
        is_drawn = [
            history.params.temperature > 0 and bool(row_tokens)
            for history, row_tokens in zip(histories, tokens, strict=True)
        ]
        for rows in _batches(is_drawn):
            drawn = _draw_rows(shaped[rows], [histories[row] for row in rows], [wants[row] for row in rows])
            for row, row_tokens in zip(rows, drawn, strict=True):
                tokens[row] = row_tokens
        return with_logprobs(logits, tokens, [history.params.logprobs for history in histories])

    def _history(self, sequence: int) -> History:
        history = self._histories.get(sequence)
        if history is None:
            raise EngineError(f"sequence {sequence} is unknown to the sampler; begin it first")
        return history

    def _placed(self, want: Want) -> History:
        """The history, which has to reach right up to the wanted token: else penalties would be wrong."""
        history = self._history(want.sequence)
        if history.num_tokens != want.position:
            raise EngineError(
                f"sequence {want.sequence}: a token for position {want.position} is wanted, but "
                f"{history.num_tokens} tokens are known; extend the sequence by what was computed"
            )
        return history


def _draw_rows(shaped: Tensor, histories: Sequence[History], wants: Sequence[Want]) -> list[list[int]]:
    num_draws = max(want.num_samples for want in wants)
    uniforms = torch.zeros(len(wants), num_draws, dtype=torch.float64)
    for row, (history, want) in enumerate(zip(histories, wants, strict=True)):
        for answer in range(want.num_samples):
            uniforms[row, answer] = uniform(history.params.seed, history.index + answer, want.position)
    weights = weigh(shaped, [history.params for history in histories])
    drawn: list[list[int]] = draw(weights, uniforms.to(shaped.device)).tolist()
    return [row_tokens[: want.num_samples] for row_tokens, want in zip(drawn, wants, strict=True)]


def with_logprobs(
    logits: Tensor, tokens: Sequence[Sequence[int]], num_logprobs: Sequence[int | None]
) -> list[list[SampledToken]]:
    """The tokens of each row with the log-probabilities that were asked for."""
    samples = [[SampledToken(token) for token in row_tokens] for row_tokens in tokens]
    counts = [-1 if count is None else count for count in num_logprobs]
    is_asked = [count >= 0 and bool(row_tokens) for count, row_tokens in zip(counts, tokens, strict=True)]
    for rows in _batches(is_asked):
        logprobs = torch.log_softmax(logits[rows], dim=-1)
        values, ids = likeliest(logprobs, min(max(1, *(counts[row] for row in rows)), logprobs.shape[-1]))
        width = max(len(tokens[row]) for row in rows)
        padded = [[*tokens[row], *[0] * (width - len(tokens[row]))] for row in rows]
        own = logprobs.gather(-1, torch.tensor(padded, device=logits.device)).tolist()
        for row, its_ids, its_values, its_own in zip(rows, ids.tolist(), values.tolist(), own, strict=True):
            top = dict(zip(its_ids[: counts[row]], its_values[: counts[row]], strict=True))
            samples[row] = [
                SampledToken(token, value, {**top, token: value})
                for token, value in zip(tokens[row], its_own[: len(tokens[row])], strict=True)
            ]
    return samples


def _check_finite(best: Sequence[int], wants: Sequence[Want]) -> None:
    """The maximum of a row is NaN if anything in it is, so it shows what no token can be chosen from."""
    if NO_TOKEN in best:
        sequences = sorted(
            want.sequence for token, want in zip(best, wants, strict=True) if token == NO_TOKEN
        )
        raise EngineError(
            f"logits of sequences {sequences} have no finite maximum; check the weights and the dtype"
        )


def _batches(is_chosen: Sequence[bool]) -> Iterator[list[int]]:
    rows = [row for row, is_row_chosen in enumerate(is_chosen) if is_row_chosen]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[first : first + ROWS_AT_ONCE]


# Randomness without state, so that any instance can go on with any answer.


_MASK = 2**64 - 1
_MANTISSA_BITS = 53


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) for the token at `position` of answer `index`; the same on any machine."""
    mixed = hashlib.blake2b(struct.pack("<QQQ", seed & _MASK, index, position), digest_size=8)
    bits = int.from_bytes(mixed.digest(), "little")
    # The 53 bits that a float64 holds exactly: rounding up to 1 is ruled out.
    return float((bits >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS)


# What the sampler remembers of a sequence.


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

    def __init__(
        self,
        order: StartSequence,
        vocab_size: int,
        eos_ids: Collection[int],
        grammars: Grammars | None = None,
    ) -> None:
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
        self.matcher = None
        if params.grammar:
            if grammars is None:
                raise EngineError(
                    f"sequence {order.sequence} has a grammar, and the model no tokenizer for it"
                )
            self.matcher = grammars.matcher(params.grammar)
            self.matcher.extend(order.tokens[order.num_prompt :])

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
        if self.matcher is not None:
            self.matcher.extend(new)


# What a request changes about the logits before a token is chosen.
#
# In the order in which it is done: the bias is added; tokens that would end the answer are ruled out until
# min_tokens are there; the repetition penalty divides positive and multiplies negative logits of tokens in
# prompt or answer; presence and frequency penalties are subtracted for tokens of the answer; tokens that the
# grammar does not allow are ruled out.
#
# Each change is one gather and one scatter for all rows of the batch.


def shape(logits: Tensor, histories: Sequence[History]) -> Tensor:
    """The logits as each row's request wants them; the same tensor where none wants anything."""
    biased = [(row, history) for row, history in enumerate(histories) if len(history.bias_ids)]
    barred = [
        (row, history)
        for row, history in enumerate(histories)
        if history.is_too_short_to_end and len(history.ending_ids)
    ]
    counted = [
        (row, history, history.counts) for row, history in enumerate(histories) if history.counts is not None
    ]
    matchers = [(row, history.matcher) for row, history in enumerate(histories) if history.matcher]
    if not (biased or barred or counted or matchers):
        return logits
    shaped = logits.clone()
    if biased:
        at = _places(shaped, [(row, history.bias_ids) for row, history in biased])
        values = np.concatenate([history.bias_values for _, history in biased])
        shaped[at] = shaped[at] + _tensor(values, shaped)
    if barred:
        shaped[_places(shaped, [(row, history.ending_ids) for row, history in barred])] = -math.inf
    if counted:
        _penalise(shaped, counted)
    if matchers:
        allowed = _tensor(np.stack([matcher.allowed() for _, matcher in matchers]), shaped)
        rows = _tensor(np.array([row for row, _ in matchers]), shaped)
        shaped[rows] = shaped[rows].masked_fill(~allowed, -math.inf)
    return shaped


def _penalise(shaped: Tensor, counted: list[tuple[int, History, TokenCounts]]) -> None:
    sizes = [len(counts.ids) for _, _, counts in counted]

    def spread(field: str) -> Tensor:
        values = np.array([getattr(history.params, field) for _, history, _ in counted], dtype=np.float32)
        return _tensor(np.repeat(values, sizes), shaped)

    at = _places(shaped, [(row, counts.ids) for row, _, counts in counted])
    times = _tensor(np.concatenate([counts.counts for _, _, counts in counted]), shaped)
    old = shaped[at]
    repetition = spread("repetition_penalty")
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - times * spread("frequency_penalty") - (times > 0) * spread("presence_penalty")
    shaped[at] = new


def _places(logits: Tensor, wanted: list[tuple[int, npt.NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """Rows and ids as one flat index; no place comes twice."""
    rows = np.repeat([row for row, _ in wanted], [len(ids) for _, ids in wanted])
    ids = np.concatenate([ids for _, ids in wanted])
    return _tensor(rows, logits), _tensor(ids, logits)


def _tensor(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


# Weights of tokens, which of them stay, and the draw.
#
# A weight is a probability that is not divided by the sum: exp((logit - max) / temperature), in float64, so
# that the likeliest token weighs 1. Filters set weights to 0. A draw is by inverse distribution function
# over the weights in the order of token ids, so it needs no sorting and one uniform number decides it on any
# device.
#
# Top-k and top-p rank tokens by weight, equal weights by the lower id; exactly k stay. Top-p is over what
# top-k left: the fewest likeliest tokens whose weights reach the share p of the sum. Min-p is relative to
# the likeliest token, hence a plain bound. Nearly always the first `HEAD` tokens settle top-p, which spares
# sorting the vocabulary; rows for which they do not are sorted whole.


HEAD = 1024


def weigh(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(rows, vocabulary) float64: what each token weighs after temperature, top-k, top-p and min-p."""
    weights = logits.to(torch.float64, copy=True)
    # The maximum goes first: a tiny temperature then gives 0 and -inf, never inf - inf.
    weights -= weights.amax(dim=-1, keepdim=True)
    weights /= _column([own.temperature for own in params], weights)
    weights.exp_()
    vocab_size = weights.shape[-1]
    ranked = [row for row, own in enumerate(params) if 0 < own.top_k < vocab_size or own.top_p < 1]
    if ranked:
        at = torch.tensor(ranked, device=weights.device)
        weights[at] = _keep_ranked(weights[at], [params[row] for row in ranked])
    if any(own.min_p > 0 for own in params):
        weights.masked_fill_(weights < _column([own.min_p for own in params], weights), 0)
    return weights


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """(rows, draws) token ids for uniform numbers in [0, 1) of that shape."""
    cumulative = weights.cumsum(dim=-1)
    # A uniform number is at most 1 - 2**-53, whose product with a float64 never rounds up to that itself: the
    # sum over all tokens exceeds it, and the first sum to do so is that of a token with a weight.
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row and their ids, largest first, equal ones by the lower id."""
    if count >= values.shape[-1]:
        whole = torch.sort(values, dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    ids = torch.topk(values, count, dim=-1).indices.sort(dim=-1).values
    order = torch.sort(values.gather(-1, ids), dim=-1, descending=True, stable=True)
    best, ids = order.values, ids.gather(-1, order.indices)
    # Where equal values lie on both sides of the border, it is open which of them topk took.
    is_open = (values >= best[:, -1:]).sum(dim=-1) > count
    if is_open.any():
        whole = torch.sort(values[is_open], dim=-1, descending=True, stable=True)
        best[is_open], ids[is_open] = whole.values[:, :count], whole.indices[:, :count]
    return best, ids


def _keep_ranked(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size = weights.shape[-1]
    top_k = torch.tensor(
        [[min(own.top_k or vocab_size, vocab_size)] for own in params], device=weights.device
    )
    top_p = _column([own.top_p for own in params], weights)
    kept, is_settled = _keep_first(weights, top_k, top_p, min(HEAD, vocab_size))
    if not is_settled.all():
        is_open = ~is_settled
        kept[is_open], _ = _keep_first(weights[is_open], top_k[is_open], top_p[is_open], vocab_size)
    return kept


def _keep_first(weights: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What stays if nothing after the `width` likeliest does, and for which rows that is so."""
    vocab_size = weights.shape[-1]
    best, ids = likeliest(weights, width)
    best = best.masked_fill(torch.arange(width, device=weights.device) >= top_k, 0)
    reached = best.cumsum(dim=-1)
    has_all = top_k <= width
    totals = torch.where(has_all, reached[:, -1:], weights.cumsum(dim=-1)[:, -1:])
    before = torch.cat([torch.zeros_like(totals), reached[:, :-1]], dim=-1)
    best = best.masked_fill((before >= top_p * totals) & (top_p < 1), 0)
    # The sum over everything is what top-p refers to only where top-k leaves everything.
    is_settled = has_all | ((top_k >= vocab_size) & (top_p < 1) & (reached[:, -1:] >= top_p * totals))
    return torch.zeros_like(weights).scatter_(-1, ids, best), is_settled[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor([[value] for value in values], dtype=torch.float64, device=like.device)
