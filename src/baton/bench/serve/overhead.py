"""What the client itself costs, which its figures need beside them on a machine that it shares."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from types import TracebackType
from typing import Any, Self

from baton.bench.serve.summary import Spread, spread

BEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class Overhead:
    """The client while it measured."""

    wall_s: float
    cpu_s: float
    lag: Spread | None
    """How much later than asked for the event loop woke a sleeper."""

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {**asdict(self), "share_of_a_core": self.share}

    def __str__(self) -> str:
        lag = self.lag
        late = f"; event loop lag p50 {lag.p50_s * 1e3:.1f} ms, p99 {lag.p99_s * 1e3:.1f} ms" if lag else ""
        return f"the client itself took {self.share:.0%} of a core{late}"


class Watch:
    """Measures the client from entry to exit."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._begun = (0.0, 0.0)
        self.found = Overhead(0.0, 0.0, None)

    async def __aenter__(self) -> Self:
        self._begun = (perf_counter(), process_time())
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        wall_s, cpu_s = self._begun
        self.found = Overhead(perf_counter() - wall_s, process_time() - cpu_s, spread(self._lags_s))

    async def _beat(self) -> None:
        while True:
            asked_s = perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self._lags_s.append(max(0.0, perf_counter() - asked_s))
