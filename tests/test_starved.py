"""Only a starved machine's failures are tried again, and only so often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.starved import pytest_runtest_protocol, pytest_terminal_summary
from tests.stolen import Watch

Watch.share = lambda self: {share}
"""
TEST = """
from pathlib import Path

def test_some(tmp_path_factory):
    with open({log!r}, "a") as log:
        log.write("x")
    assert len(Path({log!r}).read_text()) >= {passes_at}
"""


@pytest.mark.parametrize(
    ("share", "passes_at", "expected"),
    [
        (0.0, 1, (1, "1 passed")),
        (0.5, 1, (1, "1 passed")),
        (0.0, 2, (1, "1 failed")),
        (0.5, 2, (2, "1 passed")),
        (0.5, 3, (3, "1 passed")),
        (0.5, 9, (3, "1 failed")),
    ],
)
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["here", "in a worker"])
def test_turns(
    tmp_path: Path, share: float, passes_at: int, expected: tuple[int, str], workers: list[str]
) -> None:
    num_turns, outcome = expected
    log = tmp_path / "log"
    (tmp_path / "conftest.py").write_text(CONFTEST.format(share=share))
    (tmp_path / "test_it.py").write_text(TEST.format(log=str(log), passes_at=passes_at))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    words += ["--rootdir", str(tmp_path), *workers, str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert len(log.read_text()) == num_turns
    assert done.stdout.count("others had 50% of the machine") == num_turns - 1
