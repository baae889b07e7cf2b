"""The router: it gives both legs of a request the same transfer id at the same time, a new id per attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.plan.ownership import Spec
from baton.protocol.outcomes import Aux
from baton.sim.core import Context
from baton.sim.families import TOKENS_MAX

LEG_S = 0.001


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """A prompt as one side tokenised it."""

    salt: int
    num_tokens: int

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(f"{self.salt}/{self.num_tokens}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Ends:
    """The instances of a request, and their dp groups."""

    source: str
    target: str
    source_dp: int = 0
    target_dp: int = 0


@dataclass(frozen=True, slots=True)
class SimAttempt:
    """One transfer: both legs of one try."""

    tag: int
    """A positive number of its own; it marks the pages that the attempt owns."""
    transfer: str
    request: int
    ends: Ends
    source_prompt: SimPrompt
    target_prompt: SimPrompt
    odd_rank: tuple[str, int] | None = None
    """A side, and the position in its group of the one rank that has another prompt than the others."""
    progress_s: Mapping[str, float] = field(default_factory=dict)
    """By side: the progress deadline that its engine names."""

    def prompt_at(self, side: str, position: int) -> SimPrompt:
        """The prompt that one rank of a side's group has."""
        prompt = self.source_prompt if side == "source" else self.target_prompt
        return SimPrompt(prompt.salt ^ 1, prompt.num_tokens) if (side, position) == self.odd_rank else prompt

    @property
    def aux(self) -> Aux:
        """What the rank that samples sends."""
        salt = self.source_prompt.salt
        return Aux(tokens=(salt % 50_000,))


@dataclass(slots=True)
class ClientRequest:
    number: int
    prompts: tuple[SimPrompt, SimPrompt]
    """As the source and as the target tokenise it; the same unless a fault changes that."""
    ends: Ends
    progress_s: Mapping[str, float] = field(default_factory=dict)
    attempts: list[SimAttempt] = field(default_factory=list)
    is_done: bool = False


class RoutedInstance(Protocol):
    """An instance as the router sees it."""

    spec: Spec
    is_source: bool

    def arrive(self, attempt: SimAttempt) -> None:
        """Takes a leg."""

    def abort(self, transfer: str, text: str) -> None:
        """Gives a leg up."""


class SimRouter:
    """All requests of a seed."""

    def __init__(self, context: Context, instances: Mapping[str, RoutedInstance]) -> None:
        self.context = context
        self.rng = context.rng("router")
        self.instances = instances
        self.requests: list[ClientRequest] = []
        self.attempts: list[SimAttempt] = []
        self.attempts_max = 1
        self.retry_s = 0.0
        self.mismatch: tuple[float, bool] = (0.0, False)
        """How often the two sides tokenise differently, and whether to another length."""
        self.draw_odd_rank: Callable[[Ends], tuple[str, int] | None] = lambda ends: None
        """Picks a rank that gets another prompt than the other ranks of its group."""
        self.on_attempt: list[Callable[[SimAttempt], None]] = []
        self.aborted: dict[str, set[str]] = {}
        """By transfer: the sides at which it was aborted."""
        self.num_waiting = 0
        """Attempts and legs that are still to come."""

    def draw_requests(self) -> None:
        """Schedules the requests of a seed."""
        options = self.context.options
        for _ in range(options.num_requests):
            self.num_waiting += 1
            self.context.schedule.at(options.spread_s * self.rng.random(), self._draw_request)

    def _draw_request(self) -> None:
        self.num_waiting -= 1
        self.begin(self._draw_ends(), self._draw_prompts())

    def begin(
        self, ends: Ends, prompts: tuple[SimPrompt, SimPrompt], progress_s: Mapping[str, float] | None = None
    ) -> SimAttempt:
        """Takes a request."""
        request = ClientRequest(len(self.requests) + 1, prompts, ends, progress_s or {})
        self.requests.append(request)
        return self._attempt(request)

    def _attempt(self, request: ClientRequest) -> SimAttempt:
        ends = request.ends
        attempt = SimAttempt(
            tag=len(self.attempts) + 1,
            transfer=f"r{request.number}.{len(request.attempts) + 1}",
            request=request.number,
            ends=ends,
            source_prompt=request.prompts[0],
            target_prompt=request.prompts[1],
            odd_rank=self.draw_odd_rank(ends),
            progress_s=request.progress_s,
        )
        request.attempts.append(attempt)
        self.attempts.append(attempt)
        route = f"{ends.source}.{ends.source_dp} to {ends.target}.{ends.target_dp}"
        self.context.note(
            "router", "request", attempt.transfer, f"{route}, {request.prompts[0].num_tokens} tokens"
        )
        for hook in self.on_attempt:
            hook(attempt)
        for name in (ends.source, ends.target):
            self.num_waiting += 1
            self.context.schedule.after(LEG_S * self.rng.random(), self._arrive, name, attempt)
        return attempt

    def _arrive(self, name: str, attempt: SimAttempt) -> None:
        self.num_waiting -= 1
        self.instances[name].arrive(attempt)

    def abort(self, attempt: SimAttempt, sides: Sequence[str]) -> None:
        """The client is gone, or one side preempts the request."""
        self.context.note("router", "abort", attempt.transfer, ",".join(sides))
        self.aborted.setdefault(attempt.transfer, set()).update(sides)
        for side in sides:
            name = attempt.ends.source if side == "source" else attempt.ends.target
            self.instances[name].abort(attempt.transfer, "the client is gone")

    def leg_ended(self, attempt: SimAttempt, text: str) -> None:
        """A leg failed: retries the request, or gives it up."""
        request = self.requests[attempt.request - 1]
        if request.attempts[-1] is not attempt or request.is_done:
            return
        request.is_done = True
        if len(request.attempts) >= self.attempts_max:
            return
        self.context.note("router", "retry", attempt.transfer, text)
        self.num_waiting += 1
        self.context.schedule.after(self.retry_s, self._retry, request)

    def _retry(self, request: ClientRequest) -> None:
        self.num_waiting -= 1
        request.is_done = False
        self._attempt(request)

    def _draw_ends(self) -> Ends:
        if self.context.options.has_same_ends and self.requests:
            return self.requests[0].ends
        instances = sorted(self.instances.items())
        source = self.rng.choice([name for name, instance in instances if instance.is_source])
        target = self.rng.choice([name for name, instance in instances if not instance.is_source])
        groups = [self.instances[name].spec.layout.size("dp") for name in (source, target)]
        return Ends(source, target, self.rng.randrange(groups[0]), self.rng.randrange(groups[1]))

    def _draw_prompts(self) -> tuple[SimPrompt, SimPrompt]:
        rng = self.rng
        num_tokens = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, rng.randint(1, TOKENS_MAX), TOKENS_MAX))
        prompt = SimPrompt(rng.getrandbits(63), num_tokens)
        probability, has_other_length = self.mismatch
        if rng.random() >= probability:
            return prompt, prompt
        length = num_tokens % TOKENS_MAX + 1 if has_other_length else num_tokens
        return prompt, SimPrompt(rng.getrandbits(63), length)
