"""How a router chooses among instances, as functions of what it knows of them.

A load-balancing policy is a cost, by name; the instance with the lowest one is chosen. Among equal costs the
instance that was chosen longest ago is next.

Conditional disaggregation: some prompts are answered sooner when the decode instance prefills them itself. A
hand-over takes the prefill instance's queue, its compute and the transfer; prefilling on decode takes
decode's compute. Both grow with the tokens to compute, so there is a number of tokens up to which decode is
sooner:

    t / rate_decode = (t + queued) / rate_prefill + handoff_s

where t is what an instance does not have cached, which may differ between the two. Running streams wait while
decode prefills. So it is never more than one of decode's chunks, and beside running streams no more than what
decode computes in STALL_S, all such prompts on that instance together. `local_prefill_max` bounds it further.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from baton.errors import ConfigError
from baton.serving.fleet import FleetInstance

CHUNK_TOKENS = 256
"""Where an instance does not report its prefill chunk."""
STALL_S = 0.1
"""How long streams may wait for another request's prefill. Not derived from the measured decode step, which
contains these waits: the bound would grow with them."""
BYTES_PER_TOKEN = 4.0
BLOCK_BYTES = 256
NUM_BLOCKS_MAX = 4096
"""Of one prompt; the rest is not looked at."""
NUM_HASHES_MAX = 32_768
"""Of one instance."""
_WEIGHT = 0.1


# ---- load balancing


Cost = tuple[int, ...]
NewTokens = Callable[[FleetInstance], int]
"""How many tokens of a request's prompt an instance would have to compute, by the prefix index."""


def _round_robin(instance: FleetInstance, new_tokens: NewTokens) -> Cost:
    return ()


def _least_loaded(instance: FleetInstance, new_tokens: NewTokens) -> Cost:
    return instance.load_tokens, instance.num_in_flight


def _prefix_aware(instance: FleetInstance, new_tokens: NewTokens) -> Cost:
    # Both are tokens: a popular prefix fills one instance only until computing it elsewhere costs the same.
    return instance.load_tokens + new_tokens(instance), instance.num_in_flight


COSTS: dict[str, Callable[[FleetInstance, NewTokens], Cost]] = {
    "least_loaded": _least_loaded,
    "prefix_aware": _prefix_aware,
    "round_robin": _round_robin,
}


def policy_names() -> tuple[str, ...]:
    return tuple(sorted(COSTS))


class Policy:
    """A policy with a bounded memory of its choices, which survives instances that come and go."""

    def __init__(self, name: str) -> None:
        if name not in COSTS:
            raise ConfigError(f"policy {name!r} is not known; use one of {', '.join(policy_names())}")
        self._cost = COSTS[name]
        self._chosen_at: dict[str, int] = {}
        self._num_chosen = 0

    def choose(self, instances: Sequence[FleetInstance], new_tokens: NewTokens) -> FleetInstance:
        """One of the instances, of which there is at least one."""
        chosen = min(
            instances,
            key=lambda instance: (
                self._cost(instance, new_tokens),
                self._chosen_at.get(instance.name, 0),
            ),
        )
        self._num_chosen += 1
        self._chosen_at[chosen.name] = self._num_chosen
        if len(self._chosen_at) > 2 * len(instances) + 64:
            names = {instance.name for instance in instances}
            self._chosen_at = {name: at for name, at in self._chosen_at.items() if name in names}
        return chosen


# ---- what is known of prompts


class RawPrompt(msgspec.Struct, frozen=True):
    """The text or the ids that are prefilled, as they stand in the body: equal prefixes stay equal."""

    raw: bytes
    is_ids: bool = False
    seed: bytes = b""
    """What the model sees before it."""
    num_rows: int = 0
    """Of input embeddings; `raw` is empty then, for no cache is shared with them."""

    def num_tokens(self, bytes_per_token: float) -> int:
        """Counted where it is ids or embeddings, else estimated."""
        if self.num_rows:
            return self.num_rows
        if self.is_ids:
            return self.raw.count(b",") + 1
        return max(1, round(len(self.raw) / bytes_per_token))


class PrefixIndex:
    """Which prompt prefixes each instance has seen lately.

    A prompt is cut into blocks of bytes; the hash of a block includes that of the block before it, so two
    prompts share a hash exactly where they are equal up to there. A collision costs a poor choice and nothing
    else, and the seed is random, so none can be made on purpose. The least recently used hashes go first.
    """

    def __init__(self, num_hashes_max: int = NUM_HASHES_MAX, block_bytes: int = BLOCK_BYTES) -> None:
        self._num_hashes_max = num_hashes_max
        self._block_bytes = block_bytes
        self._seed = secrets.randbits(64)
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def hashes(self, prompt: RawPrompt) -> tuple[int, ...]:
        """The hashes of a prompt's whole blocks, first to last."""
        value = xxhash.xxh3_64_intdigest(prompt.seed, self._seed) if prompt.seed else self._seed
        raw, size = prompt.raw, self._block_bytes
        num_blocks = min(len(raw) // size, NUM_BLOCKS_MAX)
        hashes = []
        for start in range(0, num_blocks * size, size):
            value = xxhash.xxh3_64_intdigest(raw[start : start + size], value)
            hashes.append(value)
        return tuple(hashes)

    def matched_bytes(self, instance: str, hashes: Sequence[int]) -> int:
        """How much of a prompt's prefix the instance has seen."""
        seen = self._seen.get(instance)
        if not seen:
            return 0
        for index, value in enumerate(hashes):
            if value not in seen:
                return index * self._block_bytes
        return len(hashes) * self._block_bytes

    def add(self, instance: str, hashes: Sequence[int]) -> None:
        """The instance is given a prompt; its first block is the last to be forgotten."""
        seen = self._seen.setdefault(instance, OrderedDict())
        for value in reversed(hashes[: self._num_hashes_max]):
            seen[value] = None
            seen.move_to_end(value)
        while len(seen) > self._num_hashes_max:
            seen.popitem(last=False)

    def drop(self, instance: str) -> None:
        """The instance has gone, or restarted with an empty cache."""
        self._seen.pop(instance, None)


class TokenSize:
    """How many bytes of a body a token takes, from what instances counted; recent prompts weigh more."""

    def __init__(self) -> None:
        self.bytes_per_token = BYTES_PER_TOKEN

    def add(self, num_bytes: int, num_tokens: int) -> None:
        if num_bytes > 0 and num_tokens > 0:
            measured = min(max(num_bytes / num_tokens, 0.5), 32.0)
            self.bytes_per_token += _WEIGHT * (measured - self.bytes_per_token)


# ---- conditional disaggregation


class PairCosts(msgspec.Struct, frozen=True):
    """The time of a token on either side and of a hand-over between them, as measured."""

    prefill_s: float
    decode_s: float
    fixed_s: float
    """The prefill instance's queue, and the hand-over."""
    num_local_max: int
    """The most prompt tokens that decode may be computing at a time."""

    @property
    def threshold(self) -> int:
        """Up to how many tokens, uncached on both sides, decode prefills sooner itself."""
        if self.decode_s <= self.prefill_s:
            return self.num_local_max
        return min(self.num_local_max, int(self.fixed_s / (self.decode_s - self.prefill_s)))


def pair_costs(
    prefill: FleetInstance, decode: FleetInstance, local_prefill_max: int | None = None
) -> PairCosts | None:
    """None where nothing was measured yet; `local_prefill_max` is the operator's bound."""
    rates, decode_rates = prefill.health.info.rates, decode.health.info.rates
    prefill_rate = rates.prefill_tokens_per_s or 0.0
    handoff_s = rates.handoff_s or decode_rates.handoff_s or 0.0
    if prefill_rate <= 0 or handoff_s <= 0:
        return None
    # A decode instance that never prefilled counts as fast as its peer.
    decode_s = 1 / (decode_rates.prefill_tokens_per_s or prefill_rate)
    chunk = decode.health.info.chunk_tokens or CHUNK_TOKENS
    num_local_max = min(chunk, int(STALL_S / decode_s)) if decode.load_tokens else chunk
    if local_prefill_max is not None:
        num_local_max = min(num_local_max, local_prefill_max)
    fixed_s = handoff_s + prefill.load_tokens / prefill_rate
    return PairCosts(1 / prefill_rate, decode_s, fixed_s, num_local_max)


def local_threshold(
    prefill: FleetInstance, decode: FleetInstance, local_prefill_max: int | None = None
) -> int:
    """The threshold of a pair; 0 where nothing was measured yet."""
    costs = pair_costs(prefill, decode, local_prefill_max)
    return 0 if costs is None else costs.threshold


def local_reason(
    prefill: FleetInstance,
    decode: FleetInstance,
    num_tokens: int,
    prefill_new: int,
    decode_new: int,
    local_prefill_max: int | None = None,
) -> str:
    """Why a prompt is not handed over; empty where it is. Each side has `*_new` tokens to compute."""
    costs = pair_costs(prefill, decode, local_prefill_max)
    if costs is None or decode_new + decode.num_local_tokens > costs.num_local_max:
        return ""
    if decode_new * costs.decode_s > prefill_new * costs.prefill_s + costs.fixed_s:
        return ""
    return "short" if num_tokens <= costs.threshold else "cached"
