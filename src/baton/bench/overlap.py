"""`baton bench overlap`: how much of a hand-over each layer-group policy hides behind prefill.

Requests go through pairs of instances, policies in turns with compute-only. Links are fixed when an instance
starts, so there is a pair for each speed; the policy is chosen by request. Every request has its own tokens
and salt, so that no prefix is cached.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from baton.bench.overlap_report import (
    COST,
    OFF,
    OverlapCase,
    OverlapRound,
    OverlapRow,
    case_text,
    link_text,
    losses,
    paint,
    rows_of,
    summary_lines,
    table_of,
    targets,
)
from baton.bench.record import show_picture, write
from baton.engine.config import EngineConfig
from baton.engine.deployment import Pair, PairRequest
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.sizes import derive_sizes
from baton.engine.trace import HandoffTrace, RequestTrace
from baton.errors import ConfigError, EngineError
from baton.plan.overlap import LayerTimes, choose
from baton.units import parse_speed

AUTO, FULL = "auto", "full"
COMPUTE_ONLY = "compute-only"
NUM_LEARNING = 3
"""Hand-overs of a length before those that count: policies measure the link while they run."""
REST_S = 0.3
"""How long a GPU rests before each request: its clock falls with the power of the requests before."""
NUM_COMPARED = 8
"""Tokens of the answers that are compared."""
WIDTH_MIN = 150


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """One run of the benchmark."""

    model: str
    prefill: str
    decode: str
    tokens: tuple[int, ...]
    links: tuple[str, ...]
    """Link speeds of a source rank; `auto`: the longest prompt is sent in the time it is computed in."""
    policies: tuple[str, ...]
    dtype: str = "fp32"
    device: str = "cpu"
    repeats: int = 5
    chunk_tokens: int = 0
    """Tokens of a prefill chunk; 0: the whole prompt."""
    page_tokens: int = 16
    num_threads: int = 0
    transport: str = "shm"
    has_endpoint_process: bool | None = None

    def __post_init__(self) -> None:
        for policy in self.policies:
            choose(policy, LayerTimes((0.0,), (0.0,), 0.0), 1)
        for link in self.links:
            parse_link(link)
        if not self.tokens or min(self.tokens) < 2:
            raise ConfigError(f"prompts of {self.tokens} tokens; give lengths of at least 2, like 1024,4096")

    @property
    def tokens_max(self) -> int:
        """The longest prompt."""
        return max(self.tokens)

    @property
    def runs(self) -> tuple[str, ...]:
        """The policies that are run; always `off`, whose transfer time the others are compared with."""
        return tuple(dict.fromkeys((OFF, *self.policies)))

    @property
    def num_steps(self) -> int:
        """How often `run` reports progress."""
        return len(self.links) * (1 + len(self.tokens) * (1 + self.repeats))

    def instance(self, role: str, secret: bytes, link_bytes_per_s: float) -> EngineConfig:
        """One side of a pair."""
        context_max = self.tokens_max + 2 * self.page_tokens
        return EngineConfig(
            model=self.model,
            layout=self.prefill if role == "prefill" else self.decode,
            name=role,
            role=role,
            secret=secret,
            dtype=self.dtype,
            device=self.device,
            page_tokens=self.page_tokens,
            # A source may lend half of its pool before it has a grant.
            pool_tokens=2 * context_max + 8 * self.page_tokens,
            context_max=context_max,
            chunk_tokens=self.chunk_tokens or context_max,
            num_threads=self.num_threads,
            transport=self.transport,
            link_bytes_per_s=link_bytes_per_s,
            has_endpoint_process=self.has_endpoint_process,
        )


def parse_link(link: str) -> float | None:
    """Bytes per second; 0 without a limit, None where it is to be measured."""
    if link == AUTO:
        return None
    return 0.0 if link == FULL else parse_speed(link)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Prompt lengths of a comma-separated list."""
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None:
        raise ConfigError(f"prompt length {wrong!r} is not a number of tokens; write lengths like 1024,4096")
    return tuple(dict.fromkeys(int(part) for part in parts))


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """Every row, and how many tokens of the compared answers were the same."""

    rows: list[OverlapRow]
    num_compared: int
    num_identical: int

    @property
    def is_right(self) -> bool:
        """Whether every compared token is the same."""
        return self.num_identical == self.num_compared > 0


@dataclass(slots=True)
class OverlapClient:
    """Sends requests to one pair of instances."""

    pair: Pair
    rng: random.Random

    def hand_off(self, num_tokens: int, policy: str) -> HandoffTrace:
        """The trace of one hand-over under a policy."""
        answer, pieces = self.pair.ask(PairRequest(self._request(num_tokens, 2), policy=policy))
        for _ in pieces:
            pass
        trace = HandoffTrace(
            answer.asked_s, answer.first_s, answer.traces["prefill"], answer.traces["decode"]
        )
        if trace.prefill.num_cached or trace.decode.num_held:
            raise EngineError(f"{trace.prefill.num_cached} tokens of a new prompt were in the prefix cache")
        return trace

    def compute(self, num_tokens: int) -> RequestTrace:
        """The trace of the same prefill without a hand-over."""
        answer, pieces = self.pair.ask(PairRequest(self._request(num_tokens, 1)))
        for _ in pieces:
            pass
        return answer.traces["prefill"]

    def compare(self, num_tokens: int) -> tuple[int, int]:
        """Tokens of the prefill instance alone, and how many of them a layer-wise hand-over gives too."""
        request = self._request(num_tokens, NUM_COMPARED)
        (handed_over,) = self.pair.tokens(PairRequest(request, policy="fixed:1"))
        (alone,) = Pair(self.pair.prefill).tokens(PairRequest(replace(request, salt=secrets.token_hex(8))))
        return len(alone), sum(a == b for a, b in zip(handed_over, alone, strict=False))

    def _request(self, num_tokens: int, max_tokens: int) -> EngineRequest:
        vocab_size = self.pair.prefill.sizes.architecture.vocab_size
        tokens = tuple(self.rng.randrange(vocab_size) for _ in range(num_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(tokens, params, salt=secrets.token_hex(8))


def check(options: OverlapOptions) -> None:
    """Raises on options that cannot work, before anything is started."""
    for role in ("prefill", "decode"):
        derive_sizes(options.instance(role, b"", 0.0))


def run(options: OverlapOptions, progress: Callable[[str], None]) -> OverlapResult:
    """Measures every policy, for every prompt length on every link."""
    rows: list[OverlapRow] = []
    num_compared = num_identical = 0
    for link in options.links:
        speed = parse_link(link)
        if speed is None:
            progress("finding the link speed at which transfer takes as long as compute")
            speed = _balanced_speed(options)
        else:
            progress(f"starting two instances, {link_text(speed)}")
        with ExitStack() as stack:
            client = _start(options, speed, stack)
            for num_tokens in options.tokens:
                rows += _measure(client, OverlapCase(num_tokens, speed), options, progress)
                compared, identical = client.compare(num_tokens)
                num_compared, num_identical = num_compared + compared, num_identical + identical
    return OverlapResult(rows, num_compared, num_identical)


def _measure(
    client: OverlapClient, case: OverlapCase, options: OverlapOptions, progress: Callable[[str], None]
) -> list[OverlapRow]:
    progress(f"{case_text(case)}: warming up")
    client.compute(case.num_tokens)
    client.hand_off(case.num_tokens, OFF)
    for _ in range(NUM_LEARNING):
        client.hand_off(case.num_tokens, COST)
    rounds: dict[str, list[OverlapRound]] = {policy: [] for policy in options.runs}
    for index in range(options.repeats):
        progress(f"{case_text(case)}: {index + 1} of {options.repeats}")
        for policy, one_round in _round(client, case.num_tokens, options, index).items():
            rounds[policy].append(one_round)
    return rows_of(case, rounds)


def _round(
    client: OverlapClient, num_tokens: int, options: OverlapOptions, index: int
) -> dict[str, OverlapRound]:
    """Every policy and compute-only once, in an order that changes by round: a GPU's clock drifts."""
    compute_only_s, traces = 0.0, {}
    order = [COMPUTE_ONLY, *options.runs]
    turn = index % len(order)
    for policy in order[turn:] + order[:turn]:
        time.sleep(REST_S if options.device != "cpu" else 0.0)
        if policy == COMPUTE_ONLY:
            compute_only_s = _compute_s(client.compute(num_tokens))
        else:
            traces[policy] = client.hand_off(num_tokens, policy)
    return {policy: OverlapRound(trace, compute_only_s) for policy, trace in traces.items()}


def _start(options: OverlapOptions, speed: float, stack: ExitStack) -> OverlapClient:
    secret = secrets.token_bytes(32)
    instances = [
        stack.enter_context(Instance(options.instance(role, secret, speed))) for role in ("prefill", "decode")
    ]
    return OverlapClient(Pair(*instances), random.Random(0))


def _balanced_speed(options: OverlapOptions) -> float:
    """The speed at which the busiest rank sends the longest prompt in the time it is computed in."""
    with ExitStack() as stack:
        client = _start(options, 0.0, stack)
        client.compute(options.tokens_max)
        trace = client.hand_off(options.tokens_max, OFF)
        compute_s = min(_compute_s(client.compute(options.tokens_max)) for _ in range(3))
    return max(sum(copy.num_bytes for copy in copies) for copies in trace.prefill.copies.values()) / compute_s


def _compute_s(prefill: RequestTrace) -> float:
    return prefill.prompt_s - prefill.begun_s


def show(result: OverlapResult, options: OverlapOptions, path: Path, picture: Path | None) -> None:
    """Prints and writes everything; the summary comes last."""
    title = f"{options.model}, {options.prefill} to {options.decode}, {options.dtype}, {options.device}"
    # A table that is cut to 80 columns is useless.
    Console(width=max(Console().width, WIDTH_MIN)).print(table_of(result.rows, title))
    write(path, record_of(result, options))
    if picture is not None:
        title = f"{options.model}, {options.prefill} to {options.decode}"
        show_picture(picture, lambda pyplot: paint(pyplot, result.rows, title))
    print(f"tokens identical: {result.num_identical} of {result.num_compared}")
    for line in summary_lines(result.rows):
        print(line)


def record_of(result: OverlapResult, options: OverlapOptions) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "options": asdict(options),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "tokens_compared": result.num_compared,
        "tokens_identical": result.num_identical,
        "rows": [row.as_json() for row in result.rows],
        "slower_than_off": [
            {
                "tokens": row.case.num_tokens,
                "link_bytes_per_s": row.case.link_bytes_per_s,
                "policy": row.policy,
                "tth_s": row.tth_s,
                "off_tth_s": off.tth_s,
            }
            for row, off in losses(result.rows)
        ],
        "targets": targets(result.rows, COST, options.device),
    }
