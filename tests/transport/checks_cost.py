"""What a transport may cost the caller, and what it may cost when nothing happens."""

from __future__ import annotations

import time

import numpy as np
from tests.transport.contract import Lie, World, check, expect_done, one_span, spans_of

from baton.transport import HostFence

MIB = 1 << 20
SUBMIT_S_MAX = 1e-3
IDLE_CPU_S_MAX = 0.02


@check(Lie("BlocksInSubmit"))
def submit_is_cheap(world: World) -> None:
    """10,000 spans cost the caller at most a millisecond, whether the fence is ready or not."""
    count = 10_000
    source = world.source.load(MIB, 1)
    link = world.link(world.target(), MIB)
    offsets = np.arange(count) * 100
    spans = spans_of(offsets, np.random.default_rng(1).permutation(offsets), np.full(count, 100))
    for fence in (None, HostFence()):
        best_s = 1.0
        for _ in range(10):
            how = {"fence": fence} if fence else {}
            started_s = time.perf_counter()
            ticket = link.send(source, spans, deadline_s=30.0, **how)
            best_s = min(best_s, time.perf_counter() - started_s)
            if fence is None:
                expect_done(world.source, [ticket])
        assert best_s <= SUBMIT_S_MAX, f"{best_s * 1e3:.2f} ms"


@check(Lie("Spins"))
def idle_costs_nothing(world: World) -> None:
    """A connection with nothing in flight uses no processor at either end."""
    source = world.source.load(MIB, 2)
    link = world.link(world.target(), MIB)
    expect_done(world.source, [link.send(source, one_span(MIB))])
    before = [world.source.usage(), link.target.call("usage")]
    time.sleep(1.0)
    after = [world.source.usage(), link.target.call("usage")]
    for old, new in zip(before, after, strict=True):
        assert new.cpu_s - old.cpu_s < IDLE_CPU_S_MAX, f"{new.cpu_s - old.cpu_s:.3f} s of CPU in 1 s idle"
