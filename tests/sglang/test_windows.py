"""Hand-overs between servers of a model with a second pool, that of its sliding windows.

Its attention is cut by attention TP, where that of Llama is cut by all of TP: so it can be context-parallel.
"""

import json
from pathlib import Path

import pytest
from tests.sglang.conftest import ask_plain, make_model
from tests.sglang.servers import SglangServer
from tests.sglang.test_handoff import check_answers
from tests.vllm.servers import running

pytestmark = [pytest.mark.sglang, pytest.mark.long]


def test_windows_arrive(folder: Path, prompts: list[list[int]]) -> None:
    """From prefill with TP2, then from context-parallel ranks, each of which sends a share."""
    model = make_model("mellum", folder)
    layouts = (("prefill", "tp2"), ("prefill", "cp2"), ("decode", "tp1"), ("null", "tp1"))
    started = [
        SglangServer(layout, model, folder, mode=mode, module="tests.sglang.engine")
        for mode, layout in layouts
    ]
    with running(*started):
        assert all("SWAKVPool mem usage" in server.log.read_text() for server in started)
        *prefills, decode, plain = started
        answers = ask_plain(plain, prompts)
        for prefill in prefills:
            check_answers(prefill, decode, prompts, answers)
        traces = [file.read_text().splitlines() for file in prefills[1].trace.iterdir()]
        assert [any(json.loads(line)["copies"] for line in lines) for lines in traces] == [True, True]
