"""Who gives both legs of a request the same id at the same time, a new one for each attempt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.sim.catalogue import TOKENS_MAX
from baton.sim.request import Attempt, Ends, Prompt, Request

if TYPE_CHECKING:
    from baton.sim.world import World

LEG_S = 0.001


@dataclass(slots=True)
class Router:
    """All requests of a world."""

    world: World
    chance: random.Random
    requests: list[Request] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    attempts_max: int = 1
    retry_s: float = 0.0
    mismatch: tuple[float, bool] = (0.0, False)
    """How often the two sides tokenise differently, and whether to another length."""
    on_attempt: list[Callable[[Attempt], None]] = field(default_factory=list)
    num_waiting: int = 0
    """Attempts and legs that are still to come."""

    def draw(self) -> None:
        """Lays out the requests of a seed."""
        options = self.world.options
        for _ in range(options.num_requests):
            self.num_waiting += 1
            self.world.schedule.at(options.spread_s * self.chance.random(), self._ask)

    def _ask(self) -> None:
        self.num_waiting -= 1
        self.begin(self._drawn_ends(), self._drawn_prompts())

    def begin(self, ends: Ends, prompts: tuple[Prompt, Prompt]) -> Attempt:
        """A request comes in."""
        request = Request(len(self.requests) + 1, prompts, ends)
        self.requests.append(request)
        return self._attempt(request)

    def _attempt(self, request: Request) -> Attempt:
        number = len(request.attempts) + 1
        attempt = Attempt(
            tag=len(self.attempts) + 1,
            transfer=f"r{request.number}.{number}",
            request=request.number,
            number=number,
            ends=request.ends,
            source_prompt=request.prompts[0],
            target_prompt=request.prompts[1],
        )
        request.attempts.append(attempt)
        self.attempts.append(attempt)
        self.world.note(
            "router",
            "request",
            attempt.transfer,
            f"{_where(request.ends)}, {request.prompts[0].num_tokens} tokens",
        )
        for call in self.on_attempt:
            call(attempt)
        for name in (request.ends.source, request.ends.target):
            self.num_waiting += 1
            self.world.schedule.after(LEG_S * self.chance.random(), self._arrive, name, attempt)
        return attempt

    def _arrive(self, name: str, attempt: Attempt) -> None:
        self.num_waiting -= 1
        self.world.instances[name].arrive(attempt)

    def abort(self, attempt: Attempt, sides: Sequence[str]) -> None:
        """The client is gone, or one side wants its pages back."""
        self.world.note("router", "abort", attempt.transfer, ",".join(sides))
        self.world.facts.aborted.setdefault(attempt.transfer, set()).update(sides)
        for side in sides:
            name = attempt.ends.source if side == "source" else attempt.ends.target
            engine = self.world.instances[name].engine
            if engine is not None and engine.is_alive:
                engine.abort(attempt.transfer, "the client is gone")

    def leg_ended(self, attempt: Attempt, text: str) -> None:
        """A leg failed: the request is tried again, or given up; the other leg is told."""
        request = self.requests[attempt.request - 1]
        if request.attempts[-1] is not attempt or request.is_done:
            return
        if len(request.attempts) >= self.attempts_max:
            request.is_done = True
            return
        self.world.note("router", "retry", attempt.transfer, text)
        self.num_waiting += 1
        request.is_done = True
        self.world.schedule.after(self.retry_s, self._again, request)

    def _again(self, request: Request) -> None:
        self.num_waiting -= 1
        request.is_done = False
        self._attempt(request)

    def _drawn_ends(self) -> Ends:
        if self.world.options.has_same_ends and self.requests:
            return self.requests[0].ends
        sources = [name for name, found in sorted(self.world.instances.items()) if found.is_source]
        targets = [name for name, found in sorted(self.world.instances.items()) if not found.is_source]
        source, target = self.chance.choice(sources), self.chance.choice(targets)
        groups = [self.world.instances[name].spec.layout.size("dp") for name in (source, target)]
        return Ends(source, target, self.chance.randrange(groups[0]), self.chance.randrange(groups[1]))

    def _drawn_prompts(self) -> tuple[Prompt, Prompt]:
        chance = self.chance
        num_tokens = chance.choice((1, 2, 3, 4, 6, 8, 12, 16, chance.randint(1, TOKENS_MAX), TOKENS_MAX))
        prompt = Prompt(chance.getrandbits(63), num_tokens)
        probability, has_other_length = self.mismatch
        if chance.random() >= probability:
            return prompt, prompt
        length = num_tokens % TOKENS_MAX + 1 if has_other_length else num_tokens
        return prompt, Prompt(chance.getrandbits(63), length)


def _where(ends: Ends) -> str:
    return f"{ends.source}.{ends.source_dp} to {ends.target}.{ends.target_dp}"
