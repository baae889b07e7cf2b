"""A first request of an instance's own, so that no caller pays for what the first step sets up."""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING

from baton.engine.requests import Event, Generate, Told, Trouble
from baton.engine.sampling_params import SamplingParams
from baton.errors import EngineError

if TYPE_CHECKING:
    from baton.engine.instance.instance import Instance

NUM_TOKENS = 64
WARM_S_MAX = 120.0


def warm(instance: Instance) -> None:
    """Prefills and decodes some tokens on every dp group; raises EngineError if that fails."""
    num_tokens = max(1, min(NUM_TOKENS, instance.sizes.context_max - 3))
    tokens = tuple(index % instance.sizes.architecture.vocab_size for index in range(num_tokens))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    over = threading.Semaphore(0)
    troubles: list[str] = []

    def sink(event: Event) -> None:
        if isinstance(event, Trouble):
            troubles.append(event.text)
        if isinstance(event, Trouble | Told):
            over.release()

    num_groups = instance.sizes.layout.size("dp")
    for _ in range(num_groups):
        # A salt that nobody will use: these tokens are no prefix of a caller's prompt.
        instance.submit(Generate(tokens, params, salt=secrets.token_hex(8)), sink)
    for _ in range(num_groups):
        if not over.acquire(timeout=WARM_S_MAX):
            raise EngineError(
                f"{instance.config.name} did not compute {num_tokens} tokens in {WARM_S_MAX:.0f} s"
            )
    if troubles:
        raise EngineError(f"{instance.config.name}: {troubles[0]}")
