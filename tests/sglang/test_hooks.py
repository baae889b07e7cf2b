"""The plug-in in SGLang's own process: its name is a choice, and a hook that is gone is named."""

import subprocess

import pytest
from tests.sglang.servers import VENV, environment

pytestmark = pytest.mark.sglang
IMPORT_S_MAX = 600.0
SCRIPT = """
from sglang.srt.plugins import load_plugins
from sglang.srt.managers import scheduler
from baton.adapters.sglang import backend
from baton.errors import ConfigError

load_plugins()
backend.check_hooks()
assert backend.utils.TransferBackend("baton").name == "BATON"
assert "baton" in backend.choices.DISAGG_TRANSFER_BACKEND_CHOICES
del scheduler.Scheduler.run_batch
try:
    backend.check_hooks()
except ConfigError as error:
    print(error)
"""


def test_a_hook_that_is_gone_is_named() -> None:
    command = [str(VENV / "bin/python"), "-W", "ignore", "-c", SCRIPT]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=IMPORT_S_MAX, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "has no sglang.srt.managers.scheduler.Scheduler.run_batch" in ended.stdout
