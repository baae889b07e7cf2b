"""`baton serve` refuses what cannot be before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.engine.tiny import tiny


@pytest.mark.slow
def test_a_silence_of_less_than_some_beats_is_refused() -> None:
    words = [sys.executable, "-m", "baton", "serve", "--model", str(tiny("llama")), "--port", "0"]
    done = subprocess.run(
        [*words, "--silence-s", "0.5"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done
    assert "silence_s is 0.5; give at least 1 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
