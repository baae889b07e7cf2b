"""A model as a library: a prefill and a decode instance on this machine, or one instance that does both.

prefill, decode = EngineConfig("demo", "pp2"), EngineConfig("demo", "tp3")
with Deployment(prefill, decode) as model:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    response, chunks = model.ask(PairRequest(EngineRequest(model.prompt("What is a relay race?"), params)))
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
print(response.handoff().figures())
"""

from __future__ import annotations

import queue
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Self

from baton.engine.config import EngineConfig, EngineSizes
from baton.engine.instance import Instance
from baton.engine.requests import (
    EngineRequest,
    InboundHandoff,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestEvent,
    RequestFinished,
)
from baton.engine.sizes import place_on_gpus
from baton.engine.tokenizer import Tokenizer
from baton.engine.trace import HandoffTrace, RequestTrace
from baton.errors import BatonError, ConfigError, EngineError
from baton.plan.planner import plan

FIRST_TOKEN = ("prefill", "decode")
ANSWER_S_MAX = 600.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class PairRequest:
    """A request and how it passes through a pair."""

    request: EngineRequest
    is_pipelined: bool = True
    policy: str | None = None
    """The overlap policy; None: the prefill instance's."""
    first_token: str = "prefill"
    """Which instance outputs the first token: prefill at once, or decode after the hand-over."""

    def __post_init__(self) -> None:
        if self.first_token not in FIRST_TOKEN:
            raise ConfigError(
                f"first token {self.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
            )


class PairResponse:
    """The events of a request, and each instance's trace once its pages are free."""

    def __init__(self) -> None:
        self.asked_s = monotonic()
        self.first_s = 0.0
        """When the caller got the first token."""
        self.events: queue.SimpleQueue[tuple[str, RequestEvent]] = queue.SimpleQueue()
        self.traces: dict[str, RequestTrace] = {}
        """By role: prefill, and decode if it took part."""

    def put(self, role: str, event: RequestEvent) -> None:
        """The event sink of the instance with this role."""
        self.events.put((role, event))

    def handoff(self) -> HandoffTrace | None:
        """How the hand-over went, once all chunks were read; None if there was none."""
        prefill, decode = self.traces.get("prefill"), self.traces.get("decode")
        if prefill is None or decode is None:
            return None
        return HandoffTrace(self.asked_s, self.first_s, prefill, decode)


class Pair:
    """A prefill and a decode instance with the same secret; without the latter, prefill does both."""

    def __init__(self, prefill: Instance, decode: Instance | None = None) -> None:
        if decode is not None and prefill.secret != decode.secret:
            raise ConfigError("the two instances have different secrets; give both the same one")
        self.prefill = prefill
        self.decode = decode

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The prefill instance, and the decode instance if there is one."""
        return (self.prefill, self.decode) if self.decode else (self.prefill,)

    def ask(self, ask: PairRequest) -> tuple[PairResponse, Iterator[OutputChunk]]:
        """The answer's chunks as they come; a failure of either side raises EngineError with its cause."""
        response, request = PairResponse(), ask.request
        parts: list[tuple[str, Instance, EngineRequest]]
        # A request that ends with the next token has nothing to hand over.
        if self.decode is None or request.params.max_tokens == len(request.generated) + 1:
            parts = [("prefill", self.prefill, replace(request, handoff=None))]
        else:
            transfer = secrets.token_hex(16)
            is_early = ask.first_token == "prefill"
            inbound = InboundHandoff(transfer, self.prefill.address, is_early=is_early)
            outbound = OutboundHandoff(transfer, ask.is_pipelined, ask.policy)
            # Prefill first: it computes while decode reserves pages.
            parts = [
                ("prefill", self.prefill, replace(request, handoff=outbound)),
                ("decode", self.decode, replace(request, handoff=inbound)),
            ]
        submitted: list[tuple[Instance, int]] = []
        try:
            for role, instance, part in parts:
                submitted.append((instance, instance.core.submit(part, partial(response.put, role))))
        except BatonError:
            _abort(submitted)
            raise
        return response, self._chunks(response, parts[-1][0], submitted)

    def tokens(self, ask: PairRequest) -> list[list[int]]:
        """The whole answers, as token ids by index."""
        answers: list[list[int]] = [[] for _ in range(ask.request.params.n)]
        for chunk in self.ask(ask)[1]:
            answers[chunk.index - ask.request.index].extend(sampled.token for sampled in chunk.tokens)
        return answers

    def _chunks(
        self, response: PairResponse, answering: str, submitted: list[tuple[Instance, int]]
    ) -> Iterator[OutputChunk]:
        """Chunks of the instance that answers, until every instance is done."""
        try:
            while len(response.traces) < len(submitted):
                role, event = self._next_event(response)
                match event:
                    case RequestError(text=text):
                        raise EngineError(f"{role}: {text}" if self.decode is not None else text)
                    case RequestFinished(trace):
                        response.traces[role] = trace
                    case OutputChunk() if role == answering:
                        response.first_s = response.first_s or monotonic()
                        yield event
        finally:
            # Whatever ends it, a failure or a caller that stops reading, ends the request on every side.
            _abort(submitted)

    def _next_event(self, response: PairResponse) -> tuple[str, RequestEvent]:
        limit_s = monotonic() + ANSWER_S_MAX
        while True:
            try:
                return response.events.get(timeout=LOOK_S)
            except queue.Empty:
                for instance in self.instances:
                    if not instance.is_running and response.events.empty():
                        text = f"{instance.config.name} has ended: {instance.failure}"
                        raise EngineError(text) from None
                if self.decode is not None and monotonic() > limit_s:
                    raise EngineError(f"no answer for {ANSWER_S_MAX:.0f} s") from None


def _abort(submitted: list[tuple[Instance, int]]) -> None:
    for instance, number in submitted:
        instance.core.abort(number)


class Deployment(Pair):
    """Instances that it starts and ends; what cannot work is refused before a process is started."""

    def __init__(self, prefill: EngineConfig, decode: EngineConfig | None = None) -> None:
        secret = prefill.secret or secrets.token_bytes(32)
        if decode is None:
            super().__init__(Instance(replace(prefill, role="both", secret=secret)))
        else:
            prefill, decode = place_on_gpus(
                [
                    replace(prefill, name="prefill", role="prefill", secret=secret),
                    replace(decode, name="decode", role="decode", secret=secret),
                ]
            )
            super().__init__(Instance(prefill), Instance(decode))
        plan(self.instances[0].sizes.spec, self.instances[-1].sizes.spec)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: prompts and answers are token ids."""
        return self.prefill.tokenizer

    @property
    def sizes(self) -> EngineSizes:
        """The prefill instance's."""
        return self.prefill.sizes

    def start(self, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Starts every instance; call it from a thread that lives as long as they."""
        with ExitStack() as unless_up:
            unless_up.callback(self.close)
            for instance in self.instances:
                instance.start(progress)
            unless_up.pop_all()
        return self

    def prompt(self, text: str, *, is_raw: bool = False) -> tuple[int, ...]:
        """Token ids of a user's message by the model's chat template, if it has one, or of the bare text.

        Without a tokenizer the text has to be token ids.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            words = re.split(r"[\s,]+", text.strip())
            if not all(re.fullmatch(r"\d+", word, re.ASCII) for word in words):
                raise ConfigError("the model has no tokenizer; give the prompt as token ids, like '1 2 3'")
            return tuple(int(word) for word in words)
        if is_raw or not tokenizer.has_chat_template:
            return tuple(tokenizer.encode(text))
        return tuple(tokenizer.chat([{"role": "user", "content": text}]))

    def check(self, request: EngineRequest) -> None:
        """Raises ConfigError on a request that could never be served, also before the start."""
        for instance in self.instances:
            instance.core.check(request)

    def close(self) -> None:
        """Ends every instance."""
        for instance in self.instances:
            instance.close()

    def __enter__(self) -> Self:
        return self if self.prefill.is_running else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
