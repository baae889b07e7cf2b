"""Which instances a request goes to, and the queue of requests that wait for one.

Conditional disaggregation: some prompts are answered sooner when the decode instance prefills them itself. A
hand-off takes the prefill instance's queue, its compute and the transfer; prefilling on decode takes decode's
compute. Both grow with the tokens to compute, so there is a number of tokens up to which decode is sooner:

    t / rate_decode = (t + queued) / rate_prefill + handoff_s

where t is what an instance does not have cached, which may differ between the two. Running streams wait while
decode prefills. So it is never more than one of decode's chunks, and beside running streams no more than what
decode computes in STALL_S, all such prompts on that instance together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from collections.abc import Sequence
from time import monotonic

import msgspec
import xxhash

from baton.serving.fleet import Fleet, FleetInstance
from baton.serving.http import ApiError, failure
from baton.serving.policies import Candidate, Policy
from baton.serving.routable import RawPrompt, RoutableRequest
from baton.serving.router_config import LocalMode, RouterConfig, RouterLimits
from baton.session.registry import Role

COMPLETION_TOKENS = 128
"""The expected length of a completion where the request does not bound it lower."""
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
RETRY_S = 1.0
_WEIGHT = 0.1


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

    def num_hashes(self, instance: str) -> int:
        return len(self._seen.get(instance, ()))


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
    """The time of a token on either side and of a hand-off between them, as measured."""

    prefill_s: float
    decode_s: float
    fixed_s: float
    """The prefill instance's queue, and the hand-off."""
    num_local_max: int
    """The most prompt tokens that decode may be computing at a time."""


def pair_costs(prefill: FleetInstance, decode: FleetInstance) -> PairCosts | None:
    """None where nothing was measured yet."""
    rates, decode_rates = prefill.health.info.rates, decode.health.info.rates
    prefill_rate = rates.prefill_tokens_per_s or 0.0
    handoff_s = rates.handoff_s or decode_rates.handoff_s or 0.0
    if prefill_rate <= 0 or handoff_s <= 0:
        return None
    # A decode instance that never prefilled counts as fast as its peer.
    decode_s = 1 / (decode_rates.prefill_tokens_per_s or prefill_rate)
    chunk = decode.health.info.chunk_tokens or CHUNK_TOKENS
    num_local_max = min(chunk, int(STALL_S / decode_s)) if decode.load_tokens else chunk
    fixed_s = handoff_s + prefill.load_tokens / prefill_rate
    return PairCosts(1 / prefill_rate, decode_s, fixed_s, num_local_max)


def local_threshold(prefill: FleetInstance, decode: FleetInstance) -> int:
    """Up to how many tokens, uncached on both sides, decode prefills sooner itself."""
    costs = pair_costs(prefill, decode)
    if costs is None:
        return 0
    if costs.decode_s <= costs.prefill_s:
        return costs.num_local_max
    return min(costs.num_local_max, int(costs.fixed_s / (costs.decode_s - costs.prefill_s)))


def local_reason(
    prefill: FleetInstance, decode: FleetInstance, num_tokens: int, prefill_new: int, decode_new: int
) -> str:
    """Why a prompt is not handed off; empty where it is. Each side has `*_new` tokens to compute."""
    costs = pair_costs(prefill, decode)
    if costs is None or decode_new + decode.num_local_tokens > costs.num_local_max:
        return ""
    if decode_new * costs.decode_s > prefill_new * costs.prefill_s + costs.fixed_s:
        return ""
    return "short" if num_tokens <= local_threshold(prefill, decode) else "cached"


# ---- choosing


class Route(msgspec.Struct, frozen=True):
    """The instance that answers, the one that prefills for it if any, and what they are charged meanwhile."""

    server: FleetInstance
    prefill: FleetInstance | None
    local_reason: str
    """Why it is not handed off; empty where it is."""
    server_tokens: int
    prefill_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.server.name,) if self.prefill is None else (self.server.name, self.prefill.name)

    def take(self) -> None:
        """The attempt begins."""
        _charge(self.server, 1, self.server_tokens)
        self.server.num_local_tokens += self._local_tokens
        if self.prefill is not None:
            _charge(self.prefill, 1, self.prefill_tokens)

    def release_server(self) -> None:
        _charge(self.server, -1, -self.server_tokens)

    def release_prefill(self) -> None:
        if self.prefill is not None:
            _charge(self.prefill, -1, -self.prefill_tokens)

    def release_local(self) -> None:
        """The first token is there, or will not come: a local prefill delays no stream any more."""
        self.server.num_local_tokens -= self._local_tokens

    @property
    def _local_tokens(self) -> int:
        return self.prefill_tokens if self.local_reason in ("short", "cached") else 0


def _charge(instance: FleetInstance, num_requests: int, num_tokens: int) -> None:
    instance.num_in_flight += num_requests
    instance.num_tokens += num_tokens


class NoInstance(Exception):  # noqa: N818  (a state of the fleet, not an error)
    """No instance is able to answer; the text says what is missing."""


class AllFull(Exception):  # noqa: N818  (a state of the fleet, not an error)
    """The instances that could answer have as much as they may be given."""


class RouteConstraints(msgspec.Struct, frozen=True):
    """What an attempt needs beyond the request itself."""

    avoid: frozenset[str] = frozenset()
    """Instances that failed this request; used again only where there is no other."""
    is_strict: bool = False
    """Not even then."""
    num_streamed: int = 0
    """Tokens that are prefilled besides the prompt."""


class RouteChooser:
    """Applies policies to the able instances of a fleet."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self.prefixes = PrefixIndex()
        self.token_size = TokenSize()
        self._fleet = fleet
        self._mode = config.local
        self._prefill_policy = Policy(config.prefill_policy)
        self._decode_policy = Policy(config.decode_policy)
        self._num_in_flight_max = config.limits.num_in_flight_max

    def choose(self, request: RoutableRequest, constraints: RouteConstraints) -> Route:
        """Raises NoInstance or AllFull where there is no route now, an ApiError where there cannot be one."""
        able = self._of_model(request)
        choice = _Choice(self, request, constraints)
        prefills: list[FleetInstance] = []
        servers: list[FleetInstance] = []
        for instance in able:
            (prefills if instance.role is Role.PREFILL else servers).append(instance)
        if request.num_tokens_max == 1 and prefills and self._mode is not LocalMode.ALWAYS:
            return choice.alone(prefills, "one_token", self._prefill_policy)
        paired = self._with_prefill(servers, choice.preferred(prefills))
        can_fall_back = self._mode is not LocalMode.NEVER
        if paired and (choice.preferred(paired) or not can_fall_back):
            return self._pair(choice, paired, prefills)
        if can_fall_back and choice.preferred(servers):
            return choice.alone(servers, "no_prefill", self._decode_policy)
        if can_fall_back and choice.preferred(prefills):
            return choice.alone(prefills, "no_decode", self._prefill_policy)
        paired = [] if constraints.is_strict else self._with_prefill(servers, prefills)
        if paired:
            return self._pair(choice, paired, prefills)
        if constraints.is_strict and able:
            raise AllFull
        raise NoInstance(self._fleet.missing() or "every able instance has just failed")

    def with_room(self, instances: Sequence[FleetInstance]) -> list[FleetInstance]:
        """Those that may get one more request; silent ones only where there are no others."""
        now_s, num_max = monotonic(), self._num_in_flight_max
        fresh = [instance for instance in instances if instance.is_fresh(now_s)] or instances
        return [instance for instance in fresh if instance.has_room(num_max, now_s)]

    def _of_model(self, request: RoutableRequest) -> list[FleetInstance]:
        able, wanted = self._fleet.able(*Role), request.model
        if wanted is not None:
            serving = [instance for instance in able if instance.serves(wanted)]
            if serving:
                return serving
        known = [instance for instance in self._fleet.instances.values() if instance.model]
        names = {instance.model for instance in known}
        if wanted is not None and any(instance.serves(wanted) for instance in known):
            return []
        if wanted is None and len(names) < 2:
            return able
        if not names:
            raise NoInstance(self._fleet.missing())
        listed = ", ".join(sorted(names))
        if wanted is None:
            raise ApiError(400, f"model is missing; name one of {listed}", param="model")
        text = f"model {wanted!a} is not served here; use one of {listed}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def _with_prefill(
        self, servers: Sequence[FleetInstance], prefills: Sequence[FleetInstance]
    ) -> list[FleetInstance]:
        """The servers that answer alone by their role, or have a prefill instance of their model."""
        if self._mode is LocalMode.ALWAYS:
            return list(servers)
        fingerprints = {instance.fingerprint for instance in prefills}
        return [
            server for server in servers if server.role is Role.BOTH or server.fingerprint in fingerprints
        ]

    def _pair(
        self, choice: _Choice, servers: Sequence[FleetInstance], prefills: Sequence[FleetInstance]
    ) -> Route:
        server = choice.choose(servers, self._decode_policy)
        if server.role is Role.BOTH:
            return choice.route(server, None, "")
        if self._mode is LocalMode.ALWAYS:
            return choice.route(server, None, "always")
        same = [instance for instance in prefills if instance.fingerprint == server.fingerprint]
        prefill = choice.choose(same, self._prefill_policy)
        reason = choice.local_reason(prefill, server) if self._mode is LocalMode.AUTO else ""
        return choice.route(server, None if reason else prefill, reason)


class _Choice:
    """One choice: the request's estimates, and which instances are preferred for it."""

    def __init__(
        self, chooser: RouteChooser, request: RoutableRequest, constraints: RouteConstraints
    ) -> None:
        self._chooser = chooser
        self._constraints = constraints
        prompt = request.prompt
        self._num_bytes = max(1, len(prompt.raw))
        self._num_tokens = prompt.num_tokens(chooser.token_size.bytes_per_token) + constraints.num_streamed
        completion = min(request.num_tokens_max or COMPLETION_TOKENS, COMPLETION_TOKENS)
        self._num_completion_tokens = completion * request.num_choices
        self._hashes = chooser.prefixes.hashes(prompt) if request.num_prompts == 1 else ()

    def preferred(self, instances: Sequence[FleetInstance]) -> Sequence[FleetInstance]:
        """Those that have not failed this request."""
        avoid = self._constraints.avoid
        return [instance for instance in instances if instance.name not in avoid] if avoid else instances

    def choose(self, instances: Sequence[FleetInstance], policy: Policy) -> FleetInstance:
        """The policy's choice among the preferred instances that have room."""
        candidates = self.preferred(instances) or (() if self._constraints.is_strict else instances)
        roomy = self._chooser.with_room(candidates)
        if not roomy:
            raise AllFull
        if len(roomy) == 1:
            return roomy[0]
        chosen = policy.choose(
            [
                Candidate(
                    instance.name, instance.load_tokens, instance.num_in_flight, self._new_tokens(instance)
                )
                for instance in roomy
            ]
        ).name
        return next(instance for instance in roomy if instance.name == chosen)

    def alone(self, instances: Sequence[FleetInstance], reason: str, policy: Policy) -> Route:
        """A route to one instance that does everything."""
        return self.route(self.choose(instances, policy), None, reason)

    def local_reason(self, prefill: FleetInstance, server: FleetInstance) -> str:
        new = self._new_tokens
        return local_reason(prefill, server, self._num_tokens, new(prefill), new(server))

    def route(self, server: FleetInstance, prefill: FleetInstance | None, reason: str) -> Route:
        """The route; its instances will have this prompt's prefix."""
        prefill_tokens = self._new_tokens(prefill or server)
        for instance in (server, prefill):
            if instance is not None and self._hashes:
                self._chooser.prefixes.add(instance.name, self._hashes)
        server_tokens = self._num_tokens + self._num_completion_tokens
        return Route(server, prefill, reason, server_tokens, prefill_tokens)

    def _new_tokens(self, instance: FleetInstance) -> int:
        """Of the prompt, what this instance would have to compute."""
        if not self._hashes:
            return self._num_tokens
        matched = self._chooser.prefixes.matched_bytes(instance.name, self._hashes)
        return max(1, round(self._num_tokens * (1 - min(matched, self._num_bytes) / self._num_bytes)))


# ---- waiting


class RouteQueue:
    """Requests that wait for an instance with room: one queue per model, served first come, first served."""

    def __init__(self, chooser: RouteChooser, limits: RouterLimits) -> None:
        self.num_waiting = 0
        self._chooser = chooser
        self._limits = limits
        self._queues: dict[str | None, deque[asyncio.Event]] = {}

    async def route(self, request: RoutableRequest, constraints: RouteConstraints) -> Route:
        """A route, taken; an ApiError with status 429 or 503 where there is none in time."""
        if not self._queues.get(request.model):
            try:
                return self._take(request, constraints)
            except (NoInstance, AllFull) as reason:
                _check_strict(constraints, reason)
        return await self._wait(request, constraints)

    def wake(self) -> None:
        """An instance has room, or has changed."""
        for queue in self._queues.values():
            if queue:
                queue[0].set()

    def _take(self, request: RoutableRequest, constraints: RouteConstraints) -> Route:
        route = self._chooser.choose(request, constraints)
        route.take()
        return route

    async def _wait(self, request: RoutableRequest, constraints: RouteConstraints) -> Route:
        if self.num_waiting >= self._limits.num_waiting_max:
            raise _queue_full(f"{self.num_waiting} requests wait already")
        queue = self._queues.setdefault(request.model, deque())
        turn = asyncio.Event()
        queue.append(turn)
        self.num_waiting += 1
        try:
            return await self._wait_turn(queue, turn, request, constraints)
        finally:
            self.num_waiting -= 1
            queue.remove(turn)
            if queue:
                queue[0].set()
            else:
                self._queues.pop(request.model, None)

    async def _wait_turn(
        self,
        queue: deque[asyncio.Event],
        turn: asyncio.Event,
        request: RoutableRequest,
        constraints: RouteConstraints,
    ) -> Route:
        began_s = monotonic()
        reason: NoInstance | AllFull = AllFull()
        while True:
            is_first = queue[0] is turn
            try:
                if is_first:
                    return self._take(request, constraints)
            except (NoInstance, AllFull) as cause:
                reason = cause
                _check_strict(constraints, reason)
            is_absent = isinstance(reason, NoInstance)
            wait_s = self._limits.recover_s_max if is_absent else self._limits.wait_s_max
            left_s = began_s + wait_s - monotonic()
            if left_s <= 0:
                if is_absent:
                    raise failure("NO_INSTANCE", f"{reason}; try again")
                raise _queue_full(f"no instance had room for {wait_s:g} s")
            turn.clear()
            try:
                # An instance that reported it was full is tried again after a while without a wake-up.
                async with asyncio.timeout(min(left_s, RETRY_S / 4 if is_first else left_s)):
                    await turn.wait()
            except TimeoutError:
                pass


def _check_strict(constraints: RouteConstraints, reason: NoInstance | AllFull) -> None:
    if isinstance(reason, AllFull) and constraints.is_strict:
        raise _queue_full("every instance has as many requests as it takes")


def _queue_full(text: str) -> ApiError:
    return ApiError(429, f"{text}; try again later", code="QUEUE_FULL", retry_after_s=RETRY_S)
