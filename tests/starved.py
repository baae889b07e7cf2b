"""A test that failed while others had much of this machine is tried again, and the summary says so.

Tests of real processes have to give up at some time, and no time is long enough for a machine that gets a
tenth of its processors. A test that fails on a machine of its own is not tried again: it has failed. What
is wrong without regard to time (tokens, bytes, a seed, an example that was found) fails every turn.

pytest-rerunfailures tries again whatever the machine was like; its conditions are known before a test, not
after it.
"""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.stolen import Watch

NUM_TURNS = 3
SHARE_MIN = 0.15
"""Of the processors, from which a machine counts as starved."""
PROPERTY = "tried again"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Every report of the last turn, and none of those before it."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for turn in range(1, NUM_TURNS + 1):
        watch = Watch()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        taken = watch.share()
        if turn == NUM_TURNS or taken < SHARE_MIN or not any(report.failed for report in reports):
            break
        item.user_properties.append((PROPERTY, f"others had {taken:.0%} of the machine"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names what was tried again, whatever came of it."""
    found = {
        report.nodeid: [text for name, text in report.user_properties if name == PROPERTY]
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    }
    for nodeid, turns in found.items():
        if turns:
            terminalreporter.write_line(f"TRIED AGAIN {nodeid}: {', then '.join(turns)}")
