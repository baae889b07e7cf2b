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

OPTIONS_SCRIPT = """
from types import SimpleNamespace
from baton.adapters.sglang import backend
from baton.errors import ConfigError

parallel = SimpleNamespace(
    **dict.fromkeys(("attn_cp_size", "attn_dcp_size", "attn_tp_size", "dp_size", "attn_dp_size"), 1),
    enable_cp_tp_group_sharing=False,
    load_balance_method="round_robin",
)
disagg = SimpleNamespace(
    disaggregation_mode="prefill", enable_pd_role_switch=False, disaggregation_enable_kv_checksum=False
)
overlap = SimpleNamespace(enable_two_batch_overlap=False)
backend.get_parallel, backend.get_disagg = lambda: parallel, lambda: disagg
backend.get_exec = lambda: SimpleNamespace(overlap=overlap)
queue = SimpleNamespace(scheduler=SimpleNamespace(enable_lora=False), draft_token_to_kv_pool=None)

def check():
    try:
        backend._check_supported(queue, SimpleNamespace(state_types=[]))
        print("supported")
    except ConfigError as error:
        print(error)

check()
for options, name, value in (
    (overlap, "enable_two_batch_overlap", True),
    (disagg, "disaggregation_enable_kv_checksum", True),
    (disagg, "enable_pd_role_switch", True),
    (queue.scheduler, "enable_lora", True),
    (parallel, "dp_size", 2),
):
    before = getattr(options, name)
    setattr(options, name, value)
    check()
    setattr(options, name, before)
disagg.disaggregation_mode = "decode"
overlap.enable_two_batch_overlap = True
check()
parallel.attn_cp_size = 2
check()
"""


def run_script(script: str) -> str:
    """What a script prints in SGLang's environment."""
    command = [str(VENV / "bin/python"), "-W", "ignore", "-c", script]
    ended = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=IMPORT_S_MAX, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_options_that_would_send_what_is_not_computed_yet_are_refused() -> None:
    refused = "transfer backend baton does not support "
    plain, *lines, decode, context = run_script(OPTIONS_SCRIPT).splitlines()[-8:]
    assert (plain, decode) == ("supported", "supported"), "a batch in halves matters to prefill alone"
    assert [line.removeprefix(refused).split(" ")[0] for line in lines] == [
        "--enable-two-batch-overlap",
        "--disaggregation-enable-kv-checksum",
        "--enable-pd-role-switch",
        "--enable-lora",
        "several",
    ]
    assert "(set verify in BATON_SGLANG)" in lines[1]
    assert context == f"{refused}context parallelism of size 2 at decode yet"


def test_a_hook_that_is_gone_is_named() -> None:
    assert "did not apply the hook on sglang.srt.managers.scheduler.Scheduler.run_batch" in run_script(SCRIPT)


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
