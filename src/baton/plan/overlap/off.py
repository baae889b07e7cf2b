"""One group: compute every layer, then transfer."""

from baton.plan.overlap.base import Groups, LayerTimes, equal_groups, refuse_option

SPELLING = "off"


def groups(times: LayerTimes, avg_tokens: int, option: str | None) -> Groups:
    """All layers in one group."""
    refuse_option(SPELLING, option)
    return equal_groups(times.num_layers, times.num_layers)
