"""Cut where the predicted completion is least.

Let best[e] be the earliest time at which layers [0, e) can all have left the link. Whatever the grouping is,
its last group is some [b, e), and the groups before it cover [0, b):

    best[e] = min over b < e of  max(best[b], R_e) + overhead + T[b:e],    best[0] = 0

Only the finish time of the groups before b enters the cost of what follows, and it enters through a maximum
and a sum, neither of which falls when it rises. So exchanging the groups before b for ones that finish
earlier never makes the whole finish later: an optimal grouping can be made of optimal parts, and one minimum
per boundary finds it.

Many groupings share the least completion, above all where compute hides nearly everything, and each group is
work for both ends, so the fewest groups win. The recursion above cannot tell: its best[b] may have spent
groups on a finish that R_e makes irrelevant. The same argument holds for groupings of exactly k groups,

    finish[k][e] = min over b < e of  max(finish[k-1][b], R_e) + overhead + T[b:e],

so k is raised until finish[k][last] reaches the least completion. Among equals in k, this keeps every
beginning as early as k allows, which leaves room for layers that run later than predicted.
"""

import numpy as np
import numpy.typing as npt

from baton.plan.overlap.base import Groups, LayerTimes, Policy, refuse_option

# Sums of some hundred floats agree to about 1e-14; a difference below this is rounding, not a better cut.
TIE_RELATIVE = 1e-12

Seconds = npt.NDArray[np.float64]


def cost_groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """The grouping of least predicted completion, with the fewest groups that reach it."""
    refuse_option("cost", option)
    ready_s = np.concatenate(([0.0], np.cumsum(times.compute_s)))
    link_s = _link_s(times)
    deadline_s = _least_completion_s(ready_s, link_s) * (1.0 + TIE_RELATIVE)
    return _walk_back(_finishes_s(ready_s, link_s, deadline_s), ready_s, link_s)


def _link_s(times: LayerTimes) -> Seconds:
    """Time that group [b, e) holds the link, at [b, e], infinite where b >= e."""
    sent_s = np.concatenate(([0.0], np.cumsum(times.transfer_s)))
    link_s: Seconds = times.overhead_s + sent_s[None, :] - sent_s[:, None]
    link_s[np.tri(len(sent_s), dtype=np.bool_)] = np.inf
    return link_s


def _least_completion_s(ready_s: Seconds, link_s: Seconds) -> float:
    best_s = np.zeros_like(ready_s)
    for stop in range(1, len(ready_s)):
        best_s[stop] = (np.maximum(best_s[:stop], ready_s[stop]) + link_s[:stop, stop]).min()
    return float(best_s[-1])


def _finishes_s(ready_s: Seconds, link_s: Seconds, deadline_s: float) -> list[Seconds]:
    """finish[k] of every boundary, for k from 0 to the first that meets the deadline."""
    finish_s = np.full_like(ready_s, np.inf)
    finish_s[0] = 0.0
    finishes_s = [finish_s]
    while finishes_s[-1][-1] > deadline_s:
        # A beginning that is late even with the rest as one group behind it can be left out.
        starts = np.flatnonzero(finishes_s[-1] + link_s[:, -1] <= deadline_s)
        candidates = np.maximum(finishes_s[-1][starts, None], ready_s) + link_s[starts]
        finishes_s.append(candidates.min(axis=0))
    return finishes_s


def _walk_back(finishes_s: list[Seconds], ready_s: Seconds, link_s: Seconds) -> Groups:
    stop = len(ready_s) - 1
    backwards: list[tuple[int, int]] = []
    for finish_s in reversed(finishes_s[:-1]):
        start = int((np.maximum(finish_s, ready_s[stop]) + link_s[:, stop]).argmin())
        backwards.append((start, stop))
        stop = start
    return tuple(reversed(backwards))


POLICIES = {"cost": Policy("cost", cost_groups)}
