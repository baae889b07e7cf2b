"""Cut where the predicted completion is least.

Let finish[k][e] be the earliest time at which layers [0, e) can all have left the link in k groups. Whatever
the grouping is, its last group is some [b, e), ready after the k - 1 groups before it have taken their time
from the forward:

    finish[k][e] = min over b < e of  max(finish[k-1][b], R_e + (k-1) group_s) + overhead + T[b:e]

Only the finish time of the groups before b enters the cost of what follows, and it enters through a maximum
and a sum, neither of which falls when it rises. So exchanging the groups before b for ones that finish
earlier never makes the whole finish later: an optimal grouping can be made of optimal parts.

Many groupings share the least completion, above all where compute hides nearly everything, and each group is
work for both ends, so the fewest groups win: k is raised while that may bring completion forward. Among
equals in k, this keeps every beginning as early as k allows, which leaves room for layers that run later than
predicted.
"""

import numpy as np
import numpy.typing as npt

from baton.plan.overlap import GroupPolicy, Groups, LayerTimes, refuse_option

TIE_RELATIVE = 1e-12
"""Sums of some hundred floats agree to about 1e-14; a smaller difference is rounding, not a better cut."""


def cost_groups(times: LayerTimes, num_tokens: int, option: str | None) -> Groups:
    """The grouping of least predicted completion, with the fewest groups that reach it."""
    refuse_option("cost", option)
    num_layers = times.num_layers
    ready_s, sent_s = np.array(times.ready_s), np.array(times.sent_s)
    link_s = times.overhead_s + sent_s[None, :] - sent_s[:, None]
    link_s[np.tri(num_layers + 1, dtype=np.bool_)] = np.inf
    finish_s = np.full(num_layers + 1, np.inf)
    finish_s[0] = times.busy_s
    starts: list[npt.NDArray[np.intp]] = []
    best_s, num_best = np.inf, 0
    for num_before in range(num_layers):
        slowed_s = num_before * times.group_s
        compute_s = times.compute_end_s + slowed_s
        tail_s = ready_s[-1] + slowed_s + link_s[-2, -1]
        link_end_s = max(ready_s[1], times.busy_s) + sent_s[-1] + (num_before + 1) * times.overhead_s
        if max(compute_s, tail_s, link_end_s) >= best_s * (1 - TIE_RELATIVE):
            break  # so many groups, or more, cannot be sooner
        finishes_s = np.maximum(finish_s[:, None], ready_s + slowed_s) + link_s
        starts.append(finishes_s.argmin(axis=0))
        finish_s = finishes_s.min(axis=0)
        completion_s = max(compute_s, float(finish_s[-1]))
        if completion_s < best_s * (1 - TIE_RELATIVE):
            best_s, num_best = completion_s, num_before + 1
    groups: list[tuple[int, int]] = []
    stop = num_layers
    for group_starts in reversed(starts[:num_best]):
        groups.append((int(group_starts[stop]), stop))
        stop = groups[-1][0]
    return tuple(reversed(groups))


def _why_cost(num_layers: int, num_tokens: int, option: str | None) -> str:
    return "one group finishes first"


POLICIES = {"cost": GroupPolicy("cost", cost_groups, _why_cost)}
