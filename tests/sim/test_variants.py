"""Every deliberate defect is caught by a checker that watches what it breaks."""

from __future__ import annotations

import pytest
from tests.sim.variants import VARIANTS, Variant

from baton.protocol.machine import Table
from baton.protocol.source_coordinator import SOURCE_COORDINATOR
from baton.protocol.source_rank import SOURCE_RANK
from baton.protocol.target_coordinator import TARGET_COORDINATOR
from baton.sim.checkers import BUILT_IN, CHECKERS
from baton.sim.scenarios import SCENARIOS


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))
def test_the_defect_is_caught(variant: Variant) -> None:
    assert variant.catch() is not None, f"not noticed in {variant.num_tries} tries: {variant.text}"


def test_the_defects_name_checkers_and_scenarios_that_exist() -> None:
    for variant in VARIANTS.values():
        assert set(variant.checkers) <= {*CHECKERS, *SCENARIOS, *BUILT_IN}
        assert not variant.scenario or variant.scenario in SCENARIOS


@pytest.mark.parametrize("name", ["count_duplicates", "ignore_digest", "commit_while_copying"])
def test_a_defect_is_gone_afterwards(name: str) -> None:
    tables: tuple[Table, ...] = (SOURCE_RANK, SOURCE_COORDINATOR, TARGET_COORDINATOR)
    before = [dict(table.cells) for table in tables]
    with VARIANTS[name].broken():
        pass
    assert [dict(table.cells) for table in tables] == before
    assert VARIANTS[name].run(1) is None
