"""Conditional disaggregation: which prompts a decode instance prefills sooner by itself.

Handing over takes the prefill instance's queue, its computing and the hand-over; prefilling on decode takes
decode's computing. Both grow with the tokens to compute, so there is a number of tokens up to which decode is
sooner:

    t / rate_decode = (t + queued) / rate_prefill + handoff_s

where t is what an instance does not have cached, which may differ between the two.

Answers under way wait while decode prefills. So it is never more than one of decode's chunks, and beside
answers no more than what decode computes in STALL_S, all such prompts under way there together.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.instances import Instance

CHUNK_TOKENS = 256
"""Where an instance does not say how much it prefills at a time."""
STALL_S = 0.1
"""How long answers may wait for a prompt that is not theirs. Not by the time of a decode step as measured:
that has these waits in it, and the bound would grow with them."""
BYTES_PER_TOKEN = 4.0
_WEIGHT = 0.1


class TokenSize:
    """How many bytes of a body a token takes, by what instances counted; recent prompts weigh more."""

    def __init__(self) -> None:
        self.bytes_per_token = BYTES_PER_TOKEN

    def saw(self, num_bytes: int, num_tokens: int) -> None:
        """A prompt of so many bytes had so many tokens."""
        if num_bytes > 0 and num_tokens > 0:
            seen = min(max(num_bytes / num_tokens, 0.5), 32.0)
            self.bytes_per_token += _WEIGHT * (seen - self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Need:
    """How many tokens of a prompt have to be computed on either side; decode may hold a beginning of it."""

    num_tokens: int
    prefill_new: int
    decode_new: int


@dataclass(frozen=True, slots=True)
class Pace:
    """What a token and a hand-over take, in seconds, between two instances."""

    prefill_s: float
    decode_s: float
    given_s: float
    """Before the first token of a prompt is computed, and after the last: the queue and the hand-over."""


def pace(prefill: Instance, decode: Instance) -> Pace | None:
    """As measured; None where nothing was yet."""
    rates = prefill.vitals.told.rates
    prefill_rate = rates.prefill_tokens_per_s or 0.0
    handoff_s = rates.handoff_s or decode.vitals.told.rates.handoff_s or 0.0
    if prefill_rate <= 0 or handoff_s <= 0:
        return None
    # One that never prefilled is as fast as its peer, until it has shown otherwise.
    decode_rate = decode.vitals.told.rates.prefill_tokens_per_s or prefill_rate
    return Pace(1 / prefill_rate, 1 / decode_rate, handoff_s + prefill.load_tokens / prefill_rate)


def threshold(prefill: Instance, decode: Instance) -> int:
    """Up to how many tokens that neither has cached decode prefills sooner itself."""
    found = pace(prefill, decode)
    if found is None:
        return 0
    most = _most(decode, found)
    if found.decode_s <= found.prefill_s:
        return most
    return min(most, int(found.given_s / (found.decode_s - found.prefill_s)))


def reason(need: Need, prefill: Instance, decode: Instance) -> str:
    """Why a prompt is not handed over; empty where it is."""
    found = pace(prefill, decode)
    if found is None or need.decode_new + decode.num_local_tokens > _most(decode, found):
        return ""
    if need.decode_new * found.decode_s > need.prefill_new * found.prefill_s + found.given_s:
        return ""
    return "short" if need.num_tokens <= threshold(prefill, decode) else "cached"


def _most(decode: Instance, found: Pace) -> int:
    """How many tokens decode may be computing of prompts at a time."""
    chunk = decode.vitals.told.chunk_tokens or CHUNK_TOKENS
    return min(chunk, int(STALL_S / found.decode_s)) if decode.load_tokens else chunk
