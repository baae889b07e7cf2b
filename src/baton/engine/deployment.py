"""A model to ask: a prefill and a decode instance on this machine, or one instance that does both.

prefill, decode = InstanceConfig("demo", "pp2"), InstanceConfig("demo", "tp3")
with Deployment(prefill, decode) as model:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    answer, pieces = model.ask(Ask(Generate(model.prompt("What is a relay race?"), params)))
    for piece in pieces:
        print(piece.text, end="", flush=True)
print(told(answer).figures())
"""

from __future__ import annotations

import queue
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Self

from baton.engine.instance.config import InstanceConfig, Sizes
from baton.engine.instance.instance import Instance
from baton.engine.pair import Answer, Ask, Pair
from baton.engine.requests import Event, Generate, Piece, Trouble
from baton.engine.requests import Told as Ended
from baton.engine.storage import engine_storage
from baton.engine.stories import Told
from baton.engine.tokenizer import Tokenizer
from baton.errors import ConfigError, EngineError
from baton.plan import Spec
from baton.plan.planner import plan

LOOK_S = 0.5


class Deployment:
    """Instances that answer prompts together; what cannot work is refused before a process is started."""

    def __init__(self, prefill: InstanceConfig, decode: InstanceConfig | None = None) -> None:
        secret = prefill.secret or secrets.token_bytes(32)
        if decode is None:
            self.prefill = Instance(replace(prefill, role="both", secret=secret))
            self.decode = None
        else:
            self.prefill = Instance(replace(prefill, name="prefill", role="prefill", secret=secret))
            self.decode = Instance(replace(decode, name="decode", role="decode", secret=secret))
        source = _spec(self.prefill)
        plan(source, _spec(self.decode) if self.decode else source)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The prefill instance, and the decode instance where there is one."""
        return (self.prefill, self.decode) if self.decode else (self.prefill,)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What makes text of tokens; None: prompts and answers are token ids."""
        return self.prefill.tokenizer

    @property
    def sizes(self) -> Sizes:
        """What was derived for the prefill instance."""
        return self.prefill.sizes

    def start(self, progress: Callable[[str], None] = lambda text: None) -> Self:
        """Starts every instance; call it from a thread that lives as long."""
        is_up = False
        try:
            for instance in self.instances:
                instance.start(progress)
            is_up = True
        finally:
            if not is_up:
                self.close()
        return self

    def throttle(self, bytes_per_s: float, progress: Callable[[str], None] = lambda text: None) -> None:
        """Starts the prefill instance anew, its ranks behind links of this speed; decode goes on."""
        former = self.prefill
        former.close()
        self.prefill = Instance(replace(former.config, link_bytes_per_s=bytes_per_s), former.sizes)
        self.prefill.start(progress)

    def prompt(self, text: str, *, is_raw: bool = False) -> tuple[int, ...]:
        """Token ids of a user's message by the model's chat template, if it has one, or of the bare text.

        Without a tokenizer the text has to be token ids.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return _token_ids(text)
        if is_raw or not tokenizer.has_chat_template:
            return tuple(tokenizer.encode(text))
        return tuple(tokenizer.chat([{"role": "user", "content": text}]))

    def check(self, request: Generate) -> None:
        """Raises ConfigError on a request that could never be served, also before the start."""
        for instance in self.instances:
            instance.desk.check(request)

    def ask(self, ask: Ask) -> tuple[Answer, Iterator[Piece]]:
        """The answer's pieces as they come; a failure raises EngineError with its cause."""
        if self.decode is not None:
            return Pair(self.prefill, self.decode).ask(ask)
        answer = Answer(monotonic())
        request = replace(ask.request, hand=None)
        number = self.prefill.submit(request, lambda event: answer.put("prefill", event))
        return answer, _alone(self.prefill, number, answer)

    def close(self) -> None:
        """Ends every instance."""
        for instance in self.instances:
            instance.close()

    def __enter__(self) -> Self:
        return self if self.prefill.is_running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def told(answer: Answer) -> Told | None:
    """How an answer's hand-over went, once its pieces are through; None where there was none."""
    prefill, decode = answer.stories.get("prefill"), answer.stories.get("decode")
    if prefill is None or decode is None:
        return None
    return Told(answer.asked_s, answer.first_s, prefill, decode)


def _spec(instance: Instance) -> Spec:
    sizes, config = instance.sizes, instance.config
    storage = engine_storage(sizes.cache, config.page_tokens, config.dtype).with_pages(dict(sizes.num_pages))
    return Spec(sizes.layout, sizes.cache, storage)


def _token_ids(text: str) -> tuple[int, ...]:
    words = re.split(r"[\s,]+", text.strip())
    if not all(re.fullmatch(r"\d+", word, re.ASCII) for word in words):
        raise ConfigError("the model has no tokenizer; give the prompt as token ids, like '1 2 3'")
    return tuple(int(word) for word in words)


def _alone(instance: Instance, number: int, answer: Answer) -> Iterator[Piece]:
    """Waits as long as the instance runs: one that ends says so to every request."""
    try:
        while not answer.stories:
            event = _next(instance, answer)
            match event:
                case Trouble(text=text):
                    raise EngineError(text)
                case Ended(story):
                    answer.stories["prefill"] = story
                case _:
                    answer.first_s = answer.first_s or monotonic()
                    yield event
    finally:
        instance.abort(number)


def _next(instance: Instance, answer: Answer) -> Event:
    while True:
        try:
            return answer.events.get(timeout=LOOK_S)[1]
        except queue.Empty:
            if not instance.is_running and answer.events.empty():
                raise EngineError(f"{instance.config.name} has ended: {instance.failure}") from None
