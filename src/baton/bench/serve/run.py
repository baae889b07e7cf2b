"""One measurement of an endpoint: somebody else's, or a deployment that is started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from baton.bench.serve.children import Nursery
from baton.bench.serve.deployment import Shape, start
from baton.bench.serve.endpoint import Endpoint, find_model, find_vocabulary, make_session
from baton.bench.serve.load import Run, drive
from baton.bench.serve.options import Load
from baton.errors import ConfigError, EngineError

PROMPTS = ("auto", "tokens", "text")
Progress = Callable[[int | None, int, str], None]
"""Is told how many steps there are, where that is known, how many are done, and what is going on."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is measured, and where."""

    load: Load
    endpoint: Endpoint | None
    """None: a deployment of `shape` is started."""
    shape: Shape
    kind: str = "completions"
    prompts: str = "auto"

    def __post_init__(self) -> None:
        if self.prompts not in PROMPTS:
            raise ConfigError(f"prompts {self.prompts!r} are not known; use {', '.join(PROMPTS)}")
        if self.prompts == "tokens" and self.kind == "chat":
            raise ConfigError("the chat endpoint takes no token ids; use --prompts text")


def measure(wish: Wish, progress: Progress) -> Run:
    """Runs the load once."""
    with Nursery() if wish.endpoint is None else nullcontext() as nursery:
        endpoint = wish.endpoint
        if endpoint is None:
            assert nursery is not None
            progress(None, 0, "starting a deployment")
            endpoint = Endpoint(start(nursery, wish.shape).url, kind=wish.kind)
        return asyncio.run(_measure(wish, endpoint, progress))


async def _measure(wish: Wish, endpoint: Endpoint, progress: Progress) -> Run:
    async with make_session(endpoint) as session:
        if not endpoint.model:
            endpoint = replace(endpoint, model=await find_model(session, endpoint))
        vocabulary = 0
        if wish.kind != "chat" and wish.prompts != "text":
            vocabulary = await find_vocabulary(session, endpoint)
            if wish.prompts == "tokens" and not vocabulary:
                raise EngineError(f"{endpoint.target} takes no token ids; use --prompts text")
    return await drive(endpoint, wish.load, vocabulary, lambda done, total: progress(total, done, "requests"))
