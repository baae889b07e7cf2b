"""Hand-overs between servers of a model with a second pool, that of its sliding windows."""

from pathlib import Path

import pytest
from tests.sglang.conftest import ask_plain, make_model
from tests.sglang.servers import SglangServer
from tests.sglang.test_handoff import check_answers
from tests.vllm.servers import running

pytestmark = [pytest.mark.sglang, pytest.mark.long]


def test_windows_arrive(folder: Path, prompts: list[list[int]]) -> None:
    """Prefill with TP2, decode with TP1, and one server without a hand-over."""
    model = make_model("mellum", folder)
    prefill, decode, plain = (
        SglangServer(layout, model, folder, mode=mode, module="tests.sglang.engine")
        for mode, layout in (("prefill", "tp2"), ("decode", "tp1"), ("null", "tp1"))
    )
    with running(prefill, decode, plain):
        for server in (prefill, decode, plain):
            assert "SWAKVPool mem usage" in server.log.read_text()
        check_answers(prefill, decode, prompts, ask_plain(plain, prompts))
