"""How hard the property tests search.

A property test sets no `max_examples` of its own but a share of the common number, so that BATON_EXAMPLES
moves all of them at once: `make test` runs a tenth of what `make test-all` runs. Tests look at the same
examples every time, so that a commit passes or fails whoever runs it and whenever. BATON_FRESH=1 looks
elsewhere in each run (`make sim` does); a failure prints the line that reproduces it.
"""

import gc
import os
import signal
import warnings
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

NUM_EXAMPLES_DEFAULT = 50
SLOWEST = ("load", "serve", "engine", "slow")

# A run that was started in the background ignores interrupts, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "baton",
    max_examples=int(os.environ.get("BATON_EXAMPLES", NUM_EXAMPLES_DEFAULT)),
    deadline=None,
    derandomize="BATON_FRESH" not in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # a loaded machine is not a failure
)
settings.load_profile("baton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: one that began last would keep the others' processors waiting."""
    items.sort(
        key=lambda item: min(
            (SLOWEST.index(mark.name) for mark in item.iter_markers() if mark.name in SLOWEST),
            default=len(SLOWEST),
        )
    )


def pytest_collection_finish() -> None:
    """Modules and collected tests stay: tests that count leftover objects need not look through them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test for which a socket that nobody closed is an error is not blamed for those of tests before it."""
    if any("error" in mark.args for mark in item.iter_markers("filterwarnings")):
        with warnings.catch_warnings(action="ignore"):
            gc.collect()
    return (yield)
