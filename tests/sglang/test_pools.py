"""SGLang's own pools, of models that its CPU engine cannot run too."""

import json
import subprocess

import pytest
from tests.sglang.servers import ROOT, VENV, environment

pytestmark = pytest.mark.sglang
POOLS_S_MAX = 600.0


REFUSED = {
    "fp4": "refused: caches of kind MHATokenToKVPoolFP4 cannot be handed over yet",
    "unknown, unlike tp": "refused: refused (layout) at handshake on decode: component conv.0.0",
}


def test_pools_arrive_whole_or_are_refused() -> None:
    """Heads, latents, a sparse index, windows, states cut by other TP sizes, and the row of metadata."""
    command = [str(VENV / "bin/python"), str(ROOT / "tests/sglang/pools.py")]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=POOLS_S_MAX, check=False
    )
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout.splitlines()[-1])
    for name, text in REFUSED.items():
        assert results.pop(name).startswith(text)
    assert len(results) == 18
    assert results == dict.fromkeys(results, "equal")
