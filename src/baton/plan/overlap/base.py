"""What a grouping of layers costs.

Two resources work one behind the other: the engine computes layers in order, the link carries groups in
order. A group starts on the link when its last layer is computed (at R) and the group before it is done
(at F), and then holds the link for the overhead plus the transfer times of its layers:

    F_g = max(F_{g-1}, R_stop(g)) + overhead + sum of t over g,    with F = 0 before the first group

Completion is F of the last group. Exposed is the part of it that lies after the end of compute; efficiency is
the share of the serial transfer time T that compute hid. Overhead adds to exposed and not to T, so a grouping
that pays much of it has an efficiency below 0. Where T is 0 there was nothing to hide: efficiency is 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from baton.errors import ConfigError

Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Compute and link time of every layer, and what the link pays once per group."""

    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    overhead_s: float

    def __post_init__(self) -> None:
        """Refuse times that no schedule can be computed from."""
        if len(self.compute_s) != len(self.transfer_s):
            raise ConfigError(
                f"layer times: {len(self.compute_s)} compute times and {len(self.transfer_s)} transfer "
                "times; give one of each per layer"
            )
        if not self.compute_s:
            raise ConfigError("layer times: no layers; give the times of at least one layer")
        for name, values in (
            ("compute_s", self.compute_s),
            ("transfer_s", self.transfer_s),
            ("overhead_s", (self.overhead_s,)),
        ):
            _check_seconds(name, values)
        # Each number may be finite while their sum is not, and then every grouping would look alike.
        total_s = sum(self.compute_s) + sum(self.transfer_s) + self.overhead_s * self.num_layers
        if not math.isfinite(total_s):
            raise ConfigError(f"layer times: they add up to {total_s}; give times in seconds")

    @property
    def num_layers(self) -> int:
        """How many layers there are to group."""
        return len(self.compute_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one grouping leads to, with the bound it is to be read against."""

    groups: Groups
    compute_s: float
    transfer_s: float
    completion_s: float
    exposed_s: float
    efficiency: float
    bound: float


@dataclass(frozen=True, slots=True)
class Policy:
    """How a policy is written, and how it cuts layers by their times, the prompt length and its option."""

    spelling: str
    groups: Callable[[LayerTimes, int, str | None], Groups]


def completion_s(times: LayerTimes, groups: Groups) -> float:
    """Time from the start of compute to the last byte of the last group."""
    check_groups(groups, times.num_layers)
    compute_done_s = tuple(accumulate(times.compute_s))
    finish_s = 0.0
    for start, stop in groups:
        link_s = times.overhead_s + sum(times.transfer_s[start:stop])
        finish_s = max(finish_s, compute_done_s[stop - 1]) + link_s
    return finish_s


def exposed_s(times: LayerTimes, groups: Groups) -> float:
    """Time from the end of compute to the last byte of the last group."""
    return completion_s(times, groups) - _total(times.compute_s)


def efficiency(times: LayerTimes, groups: Groups) -> float:
    """Share of the serial transfer time that compute hid, 1.0 where there is nothing to transfer."""
    exposed = exposed_s(times, groups)
    serial_s = _total(times.transfer_s)
    return 1.0 - exposed / serial_s if serial_s > 0.0 else 1.0


def bound(times: LayerTimes) -> float:
    """Efficiency of one-layer groups without overhead, which no grouping exceeds."""
    return efficiency(replace(times, overhead_s=0.0), equal_groups(times.num_layers, 1))


def measure(times: LayerTimes, groups: Groups) -> Outcome:
    """All the figures of one grouping together."""
    return Outcome(
        groups=groups,
        compute_s=_total(times.compute_s),
        transfer_s=_total(times.transfer_s),
        completion_s=completion_s(times, groups),
        exposed_s=exposed_s(times, groups),
        efficiency=efficiency(times, groups),
        bound=bound(times),
    )


def check_groups(groups: Groups, num_layers: int) -> None:
    """Raise unless the groups are non-empty, in order, and cover each layer once."""
    expected_start = 0
    for start, stop in groups:
        if start != expected_start:
            fault = "leaves a hole" if start > expected_start else "overlaps the group before it"
            raise ConfigError(f"layer groups: ({start}, {stop}) {fault}; it has to start at {expected_start}")
        if stop <= start:
            raise ConfigError(f"layer groups: ({start}, {stop}) is empty; it has to stop after {start}")
        expected_start = stop
    if expected_start != num_layers:
        raise ConfigError(
            f"layer groups: they end at layer {expected_start}; they have to cover {num_layers} layers"
        )


def equal_groups(num_layers: int, group_size: int) -> Groups:
    """Groups of `group_size` layers in order, the last one with what is left."""
    return tuple((start, min(start + group_size, num_layers)) for start in range(0, num_layers, group_size))


def refuse_option(policy: str, option: str | None) -> None:
    """Raise when a policy that takes no option was given one."""
    if option is not None:
        raise ConfigError(f"overlap policy '{policy}:{option}': {policy} takes no option; write '{policy}'")


def _total(seconds: tuple[float, ...]) -> float:
    # The running sum of completion_s, so that exposed is never negative by a rounding error.
    return tuple(accumulate(seconds))[-1]


def _check_seconds(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not (math.isfinite(value) and value >= 0.0):
            raise ConfigError(f"layer times: {name} holds {value}; give finite seconds, 0 or more")
