"""Stories with a known end, under several timings."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from baton.sim.scenarios import play, scenario, scenario_names

NUM_TIMINGS = 5


@pytest.mark.parametrize("name", scenario_names())
def test_the_story_ends_as_it_should(name: str) -> None:
    for seed in range(NUM_TIMINGS):
        _, found = play(scenario(name), seed)
        assert found is None, f"timing {seed}: {found}"


def test_a_story_that_ends_otherwise_is_noticed() -> None:
    ready, lost = scenario("verdict-lost"), scenario("source-dies-copying")
    story = type(ready)(ready.name, ready.text, ready.script, lost.expect)
    _, found = play(story)
    assert found is not None
    assert found.checker == "verdict-lost"


def test_an_unknown_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--list"):
        scenario("no-such-story")
