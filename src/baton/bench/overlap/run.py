"""Requests through pairs of instances, policies taking turns with compute-only.

Links are fixed when an instance starts, so there is a pair for each speed; policies are chosen by request.
Every request has tokens and a salt of its own, so that no prefix is cached.
"""

from __future__ import annotations

import queue
import random
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from baton.bench.overlap.figures import Case, Round, Row, case_text, link_text, rows_of
from baton.bench.overlap.options import COST, OFF, Options, speed_of
from baton.engine.config import derive_sizes
from baton.engine.deployment import ANSWER_S_MAX, Pair, PairRequest
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest, RequestError, RequestEvent
from baton.engine.requests import RequestFinished as Ended
from baton.engine.sampling_params import SamplingParams
from baton.engine.trace import HandoffTrace, RequestTrace
from baton.errors import EngineError

NUM_LEARNING = 3
"""Hand-overs of a length before those that count: what policies measure on line has to be measured."""


FLOOR = "compute-only"
REST_S = 0.3
"""How long a GPU rests before each request: its clock falls with the power that the requests before took."""
NUM_COMPARED = 8
"""Tokens of the answers that show whether what is timed is also right."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens, and how many of them are right."""

    num_tokens: int = 0
    num_identical: int = 0

    def __add__(self, other: Compared) -> Compared:
        return Compared(self.num_tokens + other.num_tokens, self.num_identical + other.num_identical)


@dataclass(frozen=True, slots=True)
class Measured:
    """Every row, and whether the answers were right."""

    rows: list[Row]
    compared: Compared

    @property
    def is_right(self) -> bool:
        """Whether every token is."""
        return self.compared.num_identical == self.compared.num_tokens > 0


@dataclass(slots=True)
class Meter:
    """Requests of one pair."""

    pair: Pair
    rng: random.Random

    def hand_over(self, num_tokens: int, policy: str) -> HandoffTrace:
        """One hand-over under a policy."""
        answer, pieces = self.pair.ask(PairRequest(self._request(num_tokens, 2), policy=policy))
        for _ in pieces:
            pass
        told = HandoffTrace(answer.asked_s, answer.first_s, answer.traces["prefill"], answer.traces["decode"])
        if told.prefill.num_cached or told.decode.num_held:
            raise EngineError(f"{told.prefill.num_cached} tokens of a prompt that nobody had were cached")
        return told

    def compare(self, num_tokens: int) -> Compared:
        """An answer that was handed over layer by layer, beside that of the prefill instance alone."""
        request = self._request(num_tokens, NUM_COMPARED)
        (handed,) = self.pair.tokens(PairRequest(request, policy="fixed:1"))
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self.pair.prefill.submit(replace(request, salt=secrets.token_hex(8)), events.put)
        alone: list[int] = []
        while not isinstance(event := events.get(timeout=ANSWER_S_MAX), Ended):
            if isinstance(event, RequestError):
                raise EngineError(event.text)
            alone.extend(sampled.token for sampled in event.tokens)
        return Compared(len(alone), sum(a == b for a, b in zip(handed, alone, strict=False)))

    def compute(self, num_tokens: int) -> RequestTrace:
        """The same without handing anything over."""
        answer, pieces = self.pair.ask(PairRequest(self._request(num_tokens, 1)))
        for _ in pieces:
            pass
        return answer.traces["prefill"]

    def _request(self, num_tokens: int, max_tokens: int) -> EngineRequest:
        vocab_size = self.pair.prefill.sizes.architecture.vocab_size
        tokens = tuple(self.rng.randrange(vocab_size) for _ in range(num_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(tokens, params, salt=secrets.token_hex(8))


def check(options: Options) -> None:
    """Raises on what would be refused, before anything is started."""
    for role in ("prefill", "decode"):
        derive_sizes(options.instance(role, b"", 0.0))


def num_steps(options: Options) -> int:
    """How often `run` tells of progress."""
    return len(options.links) * (1 + len(options.tokens) * (1 + options.repeats))


def run(options: Options, tell: Callable[[str], None]) -> Measured:
    """Every policy, for every prompt length on every link."""
    rows: list[Row] = []
    compared = Compared()
    for link in options.links:
        speed = speed_of(link)
        if speed is None:
            tell("finding the link speed at which transfer takes as long as compute")
            speed = _even_speed(options)
        else:
            tell(f"starting two instances, {link_text(speed)}")
        with ExitStack() as stack:
            meter = _start(options, speed, stack)
            for num_tokens in options.tokens:
                rows += _measure(meter, Case(num_tokens, speed), options, tell)
                compared += meter.compare(num_tokens)
    return Measured(rows, compared)


def _measure(meter: Meter, case: Case, options: Options, tell: Callable[[str], None]) -> list[Row]:
    tell(f"{case_text(case)}: warming up")
    meter.compute(case.num_tokens)
    meter.hand_over(case.num_tokens, OFF)
    for _ in range(NUM_LEARNING):
        meter.hand_over(case.num_tokens, COST)
    rounds: dict[str, list[Round]] = {policy: [] for policy in options.runs}
    for index in range(options.repeats):
        tell(
            f"{case.num_tokens} tokens, {link_text(case.link_bytes_per_s)}: {index + 1} of {options.repeats}"
        )
        for policy, each in _round(meter, case.num_tokens, options, index).items():
            rounds[policy].append(each)
    return rows_of(case, rounds, OFF)


def _round(meter: Meter, num_tokens: int, options: Options, index: int) -> dict[str, Round]:
    """Every policy and compute-only once, in an order that is another one each time: a GPU's clock drifts."""
    floor_s, told = 0.0, {}
    each = [FLOOR, *options.runs]
    turn = index % len(each)
    for policy in each[turn:] + each[:turn]:
        time.sleep(REST_S if options.device != "cpu" else 0.0)
        if policy == FLOOR:
            floor_s = _compute_s(meter.compute(num_tokens))
        else:
            told[policy] = meter.hand_over(num_tokens, policy)
    return {policy: Round(found, floor_s) for policy, found in told.items()}


def _start(options: Options, speed: float, stack: ExitStack) -> Meter:
    secret = secrets.token_bytes(32)
    sides = [
        stack.enter_context(Instance(options.instance(role, secret, speed))) for role in ("prefill", "decode")
    ]
    return Meter(Pair(*sides), random.Random(0))


def _even_speed(options: Options) -> float:
    """The speed at which the busiest rank of the longest prompt sends for as long as it is computed."""
    with ExitStack() as stack:
        meter = _start(options, 0.0, stack)
        meter.compute(options.tokens_max)
        told = meter.hand_over(options.tokens_max, OFF)
        story = min((meter.compute(options.tokens_max) for _ in range(3)), key=_compute_s)
    num_bytes = max(sum(copy.num_bytes for copy in copies) for copies in told.prefill.copies.values())
    return num_bytes / _compute_s(story)


def _compute_s(story: RequestTrace) -> float:
    return story.prompt_s - story.begun_s
