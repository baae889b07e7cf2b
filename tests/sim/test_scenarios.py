"""Scenarios with a known end, under several timings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.errors import ConfigError
from baton.protocol.outcomes import Finished, Why
from baton.sim.scenarios import SCENARIOS, run_scenario
from baton.sim.scenarios.run import ScenarioRun


def check(name: str, seeds: range) -> None:
    for seed in seeds:
        _, violation = run_scenario(name, seed)
        assert violation is None, f"timing {seed}: {violation}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenario_ends_as_expected(name: str) -> None:
    check(name, range(2))


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenario_ends_as_expected_under_many_timings(name: str) -> None:
    check(name, range(2, 12))


def test_a_scenario_that_ends_otherwise_is_noticed() -> None:
    for ends in ({1: {"target": Why.PEER_LOST}}, {1: Finished}, {1: {"source": Why.PEER_LOST}}):
        violation = ScenarioRun(replace(SCENARIOS["verdict-lost"], ends=ends)).run()
        assert violation is not None
        assert violation.checker == "verdict-lost"
        assert "1 is not" in violation.text


def test_a_script_that_sees_something_else_is_noticed() -> None:
    def script(run: ScenarioRun) -> Iterator[None]:
        yield
        run.check(run.num_writes == 0, "something was written")

    violation = ScenarioRun(replace(SCENARIOS["verdict-lost"], script=script)).run()
    assert violation is not None
    assert violation.text == "something was written"


def test_an_unknown_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--list"):
        run_scenario("no-such-scenario")
