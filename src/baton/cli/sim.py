"""`baton sim`: a random search for counter-examples, or one named scenario."""

from __future__ import annotations

from baton.cli.parser import command, flag, option
from baton.errors import ConfigError


@command
def sim(
    *,
    seed: int = option(1, "S", "the first seed"),
    seeds: int = option(1, "N", "how many seeds"),
    jobs: int = option(1, "J", "processes; 0: one per core"),
    trace: bool = flag("print every event of one seed"),
    scenario: str | None = option(None, "NAME", "run a named scenario"),
    list_: bool = flag("list scenarios, faults and checkers"),
) -> int:
    """Run instances of random layouts under random faults, and check every transfer.

    Exits with 1 if a checker finds a violation, and prints the command that replays it.
    """
    if seeds < 1 or jobs < 0:
        raise ConfigError(f"--seeds must be at least 1 and --jobs at least 0, got {seeds} and {jobs}")
    # It takes longer to import than --help may take.
    from baton.cli.sim_run import run

    return run(seed, seeds, jobs, scenario, has_trace=trace, is_list=list_)
