"""`baton sim` on the command line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from baton.cli.sim import sim
from baton.errors import ConfigError
from baton.protocol.outcomes import Outcome, Ready
from baton.sim.checkers import BUILT_IN, CHECKERS, BytesRight
from baton.sim.engines import EngineTransfer
from baton.sim.faults import FAULTS
from baton.sim.scenarios import SCENARIOS


def run(*words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(sim, list(words), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return int(done.return_value or 0), done.output.splitlines()


def test_the_last_line_is_the_summary() -> None:
    code, lines = run("--seed", "1", "--seeds", "3")
    assert code == 0
    assert lines[-1].startswith("no violation in 3 seeds from 1: ")
    assert lines[-1].endswith("ms a seed")


def test_a_violation_exits_1_with_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: BytesRight, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        if isinstance(outcome, Ready):
            self.fail(f"{job.transfer}: rank {rank} is ready")

    monkeypatch.setattr(BytesRight, "on_outcome", refuse)
    code, lines = run("--seed", "1", "--seeds", "4")
    assert code == 1
    assert "violations in 4 seeds" in lines[-1]
    violation, replay = lines[0], lines[1]
    seed = violation.removeprefix("seed ").partition(":")[0]
    assert replay == f"replay: baton sim --seed {seed} --trace"
    code, traced = run(*replay.split()[3:])
    assert code == 1
    assert traced[-1] == violation


def test_a_trace_replays_byte_for_byte_and_has_a_row_per_event() -> None:
    code, lines = run("--seed", "7", "--trace")
    assert (code, lines) == run("--seed", "7", "--trace")
    assert code == 0
    assert lines[-1] == f"seed 7: {len(lines) - 1} events, no violation"


def test_a_scenario_can_be_named_and_traced() -> None:
    assert run("--scenario", "two-attempts")[0] == 0
    code, lines = run("--scenario", "two-attempts", "--trace")
    assert code == 0
    assert len(lines) > 50


def test_all_names_are_listed_with_a_text() -> None:
    _, lines = run("--list")
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == sorted([*SCENARIOS, *FAULTS, *CHECKERS, *BUILT_IN])
    assert all(len(line.split()) > 2 for line in lines if line.startswith("  "))


@pytest.mark.parametrize("words", [("--seeds", "0"), ("--scenario", "nothing")])
def test_misuse_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        run(*words)
