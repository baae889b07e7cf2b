"""Which instances a request goes to."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import msgspec

from baton.router import local
from baton.router.asked import Asked
from baton.router.config import LocalMode, RouterConfig
from baton.router.fleet import Fleet
from baton.router.instances import Instance
from baton.router.policies import Candidate, Policy, make_policy
from baton.router.prefixes import Prefixes
from baton.router.routes import Route
from baton.session.registry import Role
from baton.web import Problem

ROLES = tuple(Role)

ANSWER_TOKENS = 128
"""What an answer is taken to need where the request does not bound it lower."""


class Absent(Exception):  # noqa: N818  (a state of the fleet)
    """No instance is able to answer; the text says what is missing."""


class Full(Exception):  # noqa: N818  (a state of the fleet)
    """Those that could answer have as much as they may be given."""


class Wish(msgspec.Struct, frozen=True):
    """What an attempt asks for beyond the request itself."""

    avoid: frozenset[str] = frozenset()
    """Instances that failed this request; used again only where there is no other."""
    is_strict: bool = False
    """Not even then."""
    num_streamed: int = 0
    """Tokens that are prefilled besides the prompt."""


class Choosing:
    """Policies over a fleet."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self.prefixes = Prefixes()
        self.sizes = local.TokenSize()
        self._fleet = fleet
        self._mode = config.local
        self._prefill_policy = make_policy(config.prefill_policy)
        self._decode_policy = make_policy(config.decode_policy)
        self._num_in_flight_max = config.limits.num_in_flight_max

    def choose(self, asked: Asked, wish: Wish) -> Route:
        """A route; raises Absent or Full where there is none now, a Problem where there cannot be one."""
        able = self._of_model(asked)
        pick = _Pick(self, asked, wish)
        prefills: list[Instance] = []
        servers: list[Instance] = []
        for each in able:
            (prefills if each.card.role is Role.PREFILL else servers).append(each)
        if asked.num_tokens_max == 1 and prefills and self._mode is not LocalMode.ALWAYS:
            return pick.alone(prefills, "one_token", self._prefill_policy)
        paired = self._paired(servers, pick.wanted(prefills))
        if paired and (pick.wanted(paired) or not self._can_fall_back):
            return self._pair(pick, paired, prefills)
        if self._can_fall_back and pick.wanted(servers):
            return pick.alone(servers, "no_prefill", self._decode_policy)
        if self._can_fall_back and pick.wanted(prefills):
            return pick.alone(prefills, "no_decode", self._prefill_policy)
        paired = [] if wish.is_strict else self._paired(servers, prefills)
        if paired:
            return self._pair(pick, paired, prefills)
        if wish.is_strict and able:
            raise Full
        raise Absent(self._fleet.missing() or "every instance that is able has just failed")

    @property
    def _can_fall_back(self) -> bool:
        return self._mode is not LocalMode.NEVER

    def _of_model(self, asked: Asked) -> list[Instance]:
        able, wanted = self._fleet.able(*ROLES), asked.model
        if wanted is not None:
            found = [each for each in able if each.is_called(wanted)]
            if found:
                return found
        known = [each for each in self._fleet.instances.values() if each.model]
        names = {each.model for each in known}
        if wanted is not None and any(each.is_called(wanted) for each in known):
            return []
        if asked.model is None and len(names) < 2:
            return able
        if not names:
            raise Absent(self._fleet.missing())
        listed = ", ".join(sorted(names))
        if asked.model is None:
            raise Problem(400, f"model is missing; name one of {listed}", param="model")
        raise Problem(
            404, f"model {asked.model!a} is not served here; use one of {listed}",
            param="model", code="model_not_found",
        )  # fmt: skip

    def _paired(self, servers: Sequence[Instance], prefills: Sequence[Instance]) -> list[Instance]:
        """Those that can answer alone by their role, or have somebody to prefill for them."""
        if self._mode is LocalMode.ALWAYS:
            return list(servers)
        fingerprints = {each.card.fingerprint for each in prefills}
        return [
            each for each in servers if each.card.role is Role.BOTH or each.card.fingerprint in fingerprints
        ]

    def _pair(self, pick: _Pick, servers: Sequence[Instance], prefills: Sequence[Instance]) -> Route:
        server = pick.one(servers, self._decode_policy)
        if server.card.role is Role.BOTH:
            return pick.route(server, None, "")
        if self._mode is LocalMode.ALWAYS:
            return pick.route(server, None, "always")
        same = [each for each in prefills if each.card.fingerprint == server.card.fingerprint]
        prefill = pick.one(same, self._prefill_policy)
        is_asked = self._mode is LocalMode.AUTO
        why_local = local.reason(pick.need(prefill, server), prefill, server) if is_asked else ""
        return pick.route(server, None if why_local else prefill, why_local)

    def roomy(self, instances: Sequence[Instance]) -> list[Instance]:
        """Those that one more request may be given to; the silent ones only where there are no others."""
        now_s, num_max = monotonic(), self._num_in_flight_max
        fresh = [each for each in instances if each.is_fresh(now_s)] or instances
        return [each for each in fresh if each.has_room(num_max, now_s)]


class _Pick:
    """One choice: the request's estimates, and who is preferred for it."""

    def __init__(self, choosing: Choosing, asked: Asked, wish: Wish) -> None:
        self._choosing = choosing
        self._wish = wish
        prompt = asked.prompt
        self._num_bytes = max(1, len(prompt.raw))
        self.num_tokens = prompt.num_tokens(choosing.sizes.bytes_per_token) + wish.num_streamed
        answer = min(asked.num_tokens_max or ANSWER_TOKENS, ANSWER_TOKENS)
        self._num_answer_tokens = answer * asked.num_choices
        self.names = choosing.prefixes.names(prompt) if asked.num_prompts == 1 else ()

    def wanted(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        """Those that have not failed this request."""
        avoid = self._wish.avoid
        return [each for each in instances if each.name not in avoid] if avoid else instances

    def new_tokens(self, instance: Instance) -> int:
        """Of the prompt, what this instance would have to compute."""
        if not self.names:
            return self.num_tokens
        matched = self._choosing.prefixes.matched_bytes(instance.name, self.names)
        return max(1, round(self.num_tokens * (1 - min(matched, self._num_bytes) / self._num_bytes)))

    def need(self, prefill: Instance, server: Instance) -> local.Need:
        """What has to be computed on either side."""
        return local.Need(self.num_tokens, self.new_tokens(prefill), self.new_tokens(server))

    def one(self, instances: Sequence[Instance], policy: Policy) -> Instance:
        """The policy's choice among the preferred ones that have room."""
        roomy = self._choosing.roomy(self.wanted(instances) or (() if self._wish.is_strict else instances))
        if not roomy:
            raise Full
        if len(roomy) == 1:
            return roomy[0]
        chosen = policy.choose([self._candidate(each) for each in roomy]).name
        return next(each for each in roomy if each.name == chosen)

    def alone(self, instances: Sequence[Instance], why_local: str, policy: Policy) -> Route:
        """A route to one instance that does everything."""
        return self.route(self.one(instances, policy), None, why_local)

    def route(self, server: Instance, prefill: Instance | None, why_local: str) -> Route:
        """The route, and a note that its instances will have this prompt's prefix."""
        prefixes = self._choosing.prefixes
        prefill_tokens = self.new_tokens(prefill or server)
        for instance in (server, prefill):
            if instance is not None and self.names:
                prefixes.add(instance.name, self.names)
        return Route(server, prefill, why_local, self.num_tokens + self._num_answer_tokens, prefill_tokens)

    def _candidate(self, instance: Instance) -> Candidate:
        return Candidate(
            instance.name, instance.load_tokens, instance.num_in_flight, self.new_tokens(instance)
        )
