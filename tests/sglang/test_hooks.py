"""The plug-in in SGLang's own processes: its name is a choice, and what cannot work ends the start."""

import subprocess
from pathlib import Path

import pytest
from tests.sglang.servers import VENV, SglangServer, environment
from tests.vllm.servers import START_S_MAX

pytestmark = pytest.mark.sglang
IMPORT_S_MAX = 600.0
SCRIPT = """
from sglang.srt.plugins import load_plugins
from baton.adapters.sglang import backend
from baton.errors import ConfigError

load_plugins()
backend.check_hooks()
assert backend.utils.TransferBackend("baton").name == "BATON"
assert "baton" in backend.choices.DISAGG_TRANSFER_BACKEND_CHOICES
backend.HookRegistry._patched.discard("sglang.srt.managers.scheduler.Scheduler.run_batch")
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
    assert "did not apply the hook on sglang.srt.managers.scheduler.Scheduler.run_batch" in ended.stdout


def test_what_would_end_the_scheduler_later_ends_the_start(
    folder: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK"
    monkeypatch.setenv(variable, "1")
    decode = SglangServer("tp1", llama, folder, mode="decode")
    decode.start()
    assert decode.process is not None
    try:
        decode.process.wait(START_S_MAX)
    finally:
        decode.stop()
    assert f"transfer backend baton does not support {variable}=1 (unset it" in decode.log.read_text()
