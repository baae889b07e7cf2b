"""Where to cut the layers of a prefill, so that a group is transferred while later ones are computed.

A policy, one module each, chooses the groups; this is what a grouping costs.

Two resources work one behind the other: the engine computes layers in order, the link carries groups in
order. A group starts on the link when its last layer is computed (at R) and the group before it is done
(at F), and then holds the link for the overhead plus the transfer times of its layers:

    F_g = max(F_{g-1}, R_stop(g) + (g - 1) group_s) + overhead + sum of t over g,    with F_0 = busy_s

The link may be taken by other hand-overs until `busy_s`.

A group takes `group_s` from the forward itself, where the threads that send it compete with the one that
computes; the last group is offered after the last layer and takes nothing. Compute ends `rest_s` after the
last layer can leave. Completion is F of the last group, or the end of compute if that is later:

    completion(g groups) = max(compute + rest + (g - 1) group_s, F_g)

Exposed is the part of it after the end of compute without groups; efficiency is the share of the serial
transfer time T that compute hid. Overhead adds to exposed and not to T, so a grouping that pays much of it
has an efficiency below 0. Where T is 0 there was nothing to hide: efficiency is 1.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

from baton.errors import ConfigError

Groups = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayerTimes:
    """Compute and link time of every layer, and what each group costs."""

    compute_s: tuple[float, ...]
    """From one layer that can leave to the next."""
    transfer_s: tuple[float, ...]
    overhead_s: float
    """On the link, for each group."""
    group_s: float = 0.0
    """Taken from the forward by each group but the last."""
    rest_s: float = 0.0
    """Compute after the last layer can leave."""
    busy_s: float = 0.0
    """Until when other hand-overs have the link."""

    def __post_init__(self) -> None:
        """Refuse times that no schedule can be computed from."""
        if len(self.compute_s) != len(self.transfer_s):
            raise ConfigError(
                f"layer times: {len(self.compute_s)} compute times and {len(self.transfer_s)} transfer "
                "times; give one of each per layer"
            )
        if not self.compute_s:
            raise ConfigError("layer times: no layers; give the times of at least one layer")
        named = {
            "compute_s": self.compute_s,
            "transfer_s": self.transfer_s,
            "overhead_s": (self.overhead_s,),
            "group_s": (self.group_s,),
            "rest_s": (self.rest_s,),
            "busy_s": (self.busy_s,),
        }
        for name, values in named.items():
            # Not a number makes the sum one too.
            if not (math.isfinite(sum(values)) and min(values) >= 0.0):
                for value in values:
                    if not (math.isfinite(value) and value >= 0.0):
                        raise ConfigError(
                            f"layer times: {name} holds {value}; give finite seconds, 0 or more"
                        )
        # Each number may be finite while their sum is not, and then every grouping would look alike.
        per_group_s = (self.overhead_s + self.group_s) * self.num_layers
        total_s = self.compute_end_s + self.sent_s[-1] + per_group_s + self.busy_s
        if not math.isfinite(total_s):
            raise ConfigError(f"layer times: they add up to {total_s}; give times in seconds")

    @property
    def num_layers(self) -> int:
        """How many layers there are to group."""
        return len(self.compute_s)

    @cached_property
    def ready_s(self) -> tuple[float, ...]:
        """By number of layers: when the first ones can leave."""
        return (0.0, *accumulate(self.compute_s))

    @cached_property
    def sent_s(self) -> tuple[float, ...]:
        """By number of layers: the transfer time of the first ones."""
        return (0.0, *accumulate(self.transfer_s))

    @property
    def compute_end_s(self) -> float:
        """The end of compute without groups."""
        return self.ready_s[-1] + self.rest_s


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
class GroupPolicy:
    """How a policy is written, and how it cuts layers by their times, the prompt length and its option."""

    spelling: str
    groups: Callable[[LayerTimes, int, str | None], Groups]
    why_whole: Callable[[int, int, str | None], str]
    """Why it left several layers in one group, by their number, the prompt length and its option."""


def completion_s(times: LayerTimes, groups: Groups) -> float:
    """Time from the start of compute to the last byte of the last group, or to the end of compute."""
    check_groups(groups, times.num_layers)
    finish_s = times.busy_s
    for index, (start, stop) in enumerate(groups):
        link_s = times.overhead_s + times.sent_s[stop] - times.sent_s[start]
        finish_s = max(finish_s, times.ready_s[stop] + index * times.group_s) + link_s
    return max(finish_s, times.compute_end_s + (len(groups) - 1) * times.group_s)


def exposed_s(times: LayerTimes, groups: Groups) -> float:
    """Time from the end of compute, had there been no groups, to completion."""
    return completion_s(times, groups) - times.compute_end_s


def efficiency(times: LayerTimes, groups: Groups) -> float:
    """Share of the serial transfer time that compute hid, 1.0 where there is nothing to transfer."""
    exposed = exposed_s(times, groups)
    serial_s = times.sent_s[-1]
    return 1.0 - exposed / serial_s if serial_s > 0.0 else 1.0


def bound(times: LayerTimes) -> float:
    """Efficiency of one-layer groups without overhead, which no grouping exceeds."""
    return efficiency(replace(times, overhead_s=0.0, group_s=0.0), equal_groups(times.num_layers, 1))


def measure(times: LayerTimes, groups: Groups) -> Outcome:
    """All the figures of one grouping together."""
    return Outcome(
        groups=groups,
        compute_s=times.compute_end_s,
        transfer_s=times.sent_s[-1],
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


def choose(policy: str, times: LayerTimes, num_tokens: int) -> Groups:
    """The groups that a policy, like `cost` or `fixed:8`, makes of these layers of a prompt."""
    known, option = _parse(policy)
    groups = known.groups(times, num_tokens, option)
    check_groups(groups, times.num_layers)
    return groups


def why_whole(policy: str, num_layers: int, num_tokens: int) -> str:
    """Why a policy left these layers in one group."""
    if num_layers == 1:
        return "there is one layer"
    known, option = _parse(policy)
    return known.why_whole(num_layers, num_tokens, option)


def _parse(policy: str) -> tuple[GroupPolicy, str | None]:
    name, separator, option = policy.partition(":")
    if name not in _policies():
        spellings = ", ".join(known.spelling for known in _policies().values())
        raise ConfigError(f"overlap policy '{policy}' is not known; write one of {spellings}")
    return _policies()[name], option if separator else None


def policy_names() -> tuple[str, ...]:
    """The policies that the modules of this folder list."""
    return tuple(_policies())


@cache
def _policies() -> dict[str, GroupPolicy]:
    policies: dict[str, GroupPolicy] = {}
    for module in pkgutil.iter_modules(__path__):
        policies |= importlib.import_module(f"{__name__}.{module.name}").POLICIES
    return dict(sorted(policies.items()))
