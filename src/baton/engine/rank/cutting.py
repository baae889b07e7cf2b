"""Where the layers of a step are cut, given what is predicted and that predictions miss.

The cuts of `cost` are the best for the times that it is given: its groups leave no slack, so that a prefill
which runs a few percent faster or slower than predicted may end with many layers still to go. Here its cuts
for several speeds of compute are held against all of these speeds, and the one that exposes least over all of
them is taken. Only the times' proportions matter; they are rounded, so that steps alike share their cuts.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, log

from baton.plan.overlap import Groups, LayerTimes, choose, completion_s

COST = "cost"
SPEEDS = (0.93, 1.0, 1.07)
"""What compute may take, by the prediction."""
TRANSFER_STEP = 0.03
OVERHEAD_STEP = 0.15
REST_STEP = 0.1
LEAST = 1e-4
"""Of a layer's compute; less is nothing."""


def cut(policy: str, times: LayerTimes, avg_tokens: int) -> Groups:
    """The groups of a policy; for `cost` those that also hold if compute is somewhat faster or slower."""
    layer_s = times.compute_s[-1]
    if policy != COST or times.num_layers == 1 or layer_s <= 0.0:
        return choose(policy, times, avg_tokens)
    rest = 1 - times.compute_s[0] / layer_s
    return _tolerant(
        times.num_layers,
        _rounded(times.transfer_s[0] / layer_s, TRANSFER_STEP),
        _rounded(times.overhead_s / layer_s, OVERHEAD_STEP),
        min(1.0, max(0.0, round(rest / REST_STEP) * REST_STEP)),
    )


@lru_cache(maxsize=4096)
def _tolerant(num_layers: int, transfer: float, overhead: float, rest: float) -> Groups:
    worlds = [
        LayerTimes((speed * (1 - rest), *(speed,) * (num_layers - 1)), (transfer,) * num_layers, overhead)
        for speed in SPEEDS
    ]
    candidates = dict.fromkeys(choose(COST, times, 0) for times in worlds)

    def exposed(groups: Groups) -> float:
        ends = zip(SPEEDS, worlds, strict=True)
        return sum(max(0.0, completion_s(times, groups) - speed * num_layers) for speed, times in ends)

    return min(candidates, key=lambda groups: (exposed(groups), len(groups)))


def _rounded(value: float, step: float) -> float:
    """To a power of 1 + step."""
    if value < LEAST:
        return 0.0
    base = log(1 + step)
    return exp(round(log(value) / base) * base)
