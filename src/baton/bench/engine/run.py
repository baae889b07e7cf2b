"""The engine and `transformers`, taking turns."""

from __future__ import annotations

import queue
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from baton.bench.engine.options import Options
from baton.bench.engine.peer import Peer
from baton.engine.config import EngineConfig, derive_sizes
from baton.engine.instance import Instance
from baton.engine.requests import EngineRequest, OutputChunk, RequestError, RequestEvent, RequestFinished
from baton.engine.sampling_params import SamplingParams
from baton.errors import EngineError

PREFILL_TARGET = 1.0
DECODE_TARGET = 3.0
NUM_SHORT = 16
"""Tokens of the prompts whose answers are decoded."""
ANSWER_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of both for the same tokens, turn by turn."""

    engine_s: list[float]
    peer_s: list[float]
    engine_tokens: int
    peer_tokens: int

    @property
    def engine_per_s(self) -> float:
        """Tokens per second of the engine, the median."""
        return self.engine_tokens / median(self.engine_s)

    @property
    def peer_per_s(self) -> float:
        """Tokens per second of `transformers`, the median."""
        return self.peer_tokens / median(self.peer_s)

    @property
    def ratio(self) -> float:
        """Engine by `transformers`, the median over turns."""
        scale = self.engine_tokens / self.peer_tokens
        return scale * median(b / a for a, b in zip(self.engine_s, self.peer_s, strict=True))

    def as_json(self, target: float) -> dict[str, Any]:
        """Everything measured."""
        return {
            "engine_tokens_per_s": self.engine_per_s,
            "transformers_tokens_per_s": self.peer_per_s,
            "ratio": self.ratio,
            "target": target,
            "is_met": self.ratio >= target,
            "engine_s": self.engine_s,
            "transformers_s": self.peer_s,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """Both measurements, and whether both sides said the same."""

    prefill: Turn
    decode: Turn
    num_tokens: int
    num_identical: int

    def as_json(self) -> dict[str, Any]:
        """With the targets."""
        return {
            "prefill": self.prefill.as_json(PREFILL_TARGET),
            "decode": self.decode.as_json(DECODE_TARGET),
            "tokens_compared": self.num_tokens,
            "tokens_identical": self.num_identical,
        }


def check(options: Options) -> None:
    """Raises on what would be refused, before anything is started."""
    derive_sizes(_config(options))


def num_steps(options: Options) -> int:
    """How often `run` tells of progress."""
    return 2 + 2 * (options.repeats + 1)


def run(options: Options, tell: Callable[[str], None]) -> Measured:
    """Both sides on the same prompts; the first turn of each kind warms up and does not count."""
    tell("loading the model into transformers")
    peer = Peer(options.model, options.dtype, options.device, options.num_threads)
    tell("starting the engine")
    rng = random.Random(0)
    with Instance(_config(options)) as instance:
        vocab_size = instance.sizes.architecture.vocab_size
        prompt = [rng.randrange(vocab_size) for _ in range(options.num_prompt)]
        shorts = [[rng.randrange(vocab_size) for _ in range(NUM_SHORT)] for _ in range(options.num_requests)]
        prefill, decode = Turn([], [], len(prompt), len(prompt)), _decode_turn(options)
        same: list[bool] = []
        for index in range(options.repeats + 1):
            tell(f"prefill, {index} of {options.repeats}")
            (ours,), engine_s = _timed(lambda: _answers(instance, [prompt], 1))
            theirs, peer_s = _timed(lambda: peer.prefill(prompt))
            same.append(ours == [theirs])
            _note(prefill, engine_s, peer_s, index)
        for index in range(options.repeats + 1):
            tell(f"decode, {index} of {options.repeats}")
            found, engine_s = _timed(lambda: _answers(instance, shorts, options.num_decoded))
            at = index % len(shorts)
            wanted, peer_s = _timed(partial(peer.generate, shorts[at], options.num_decoded))
            same += [a == b for a, b in zip(found[at], wanted, strict=True)]
            _note(decode, engine_s, peer_s, index)
    return Measured(prefill, decode, len(same), sum(same))


def _note(turn: Turn, engine_s: float, peer_s: float, index: int) -> None:
    if index:
        turn.engine_s.append(engine_s)
        turn.peer_s.append(peer_s)


def _decode_turn(options: Options) -> Turn:
    return Turn([], [], options.num_decoded * options.num_requests, options.num_decoded)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start_s = perf_counter()
    found = work()
    return found, perf_counter() - start_s


def _config(options: Options) -> EngineConfig:
    context_max = max(options.num_prompt, NUM_SHORT + options.num_decoded) + 16
    return EngineConfig(
        model=options.model,
        name="bench",
        dtype=options.dtype,
        device=options.device,
        num_threads=options.num_threads,
        context_max=context_max,
        pool_tokens=2 * max(context_max, (NUM_SHORT + options.num_decoded + 16) * options.num_requests),
        chunk_tokens=context_max,
    )


def _put(events: queue.SimpleQueue[tuple[int, RequestEvent]], index: int, event: RequestEvent) -> None:
    events.put((index, event))


def _answers(instance: Instance, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """All prompts at once, with a salt of this call's own: nothing is cached."""
    events: queue.SimpleQueue[tuple[int, RequestEvent]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    salt, found = secrets.token_hex(8), [list[int]() for _ in prompts]
    for index, prompt in enumerate(prompts):
        request = EngineRequest(tuple(prompt), params, salt=f"{salt} {index}")
        instance.submit(request, partial(_put, events, index))
    num_open = len(prompts)
    while num_open:
        index, event = events.get(timeout=ANSWER_S_MAX)
        match event:
            case OutputChunk():
                found[index].extend(sampled.token for sampled in event.tokens)
            case RequestError():
                raise EngineError(event.text)
            case RequestFinished():
                num_open -= 1
    return found
