"""Hand-overs between SGLang servers whose layouts differ in more than TP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sglang.servers import SglangServer
from tests.sglang.test_handover import check_answers
from tests.vllm.servers import running

pytestmark = [pytest.mark.sglang, pytest.mark.long]


@pytest.fixture(scope="module")
def stages(folder: Path, llama: Path, servers: dict[str, SglangServer]) -> Iterator[dict[str, SglangServer]]:
    """Servers with two pipeline stages, beside those that all tests share."""
    started = {f"{mode} pp2": SglangServer("pp2", llama, folder, mode=mode) for mode in ("prefill", "decode")}
    with running(*started.values()):
        yield servers | started


@pytest.mark.parametrize(("source", "target"), [("pp2", "tp1"), ("tp2", "pp2"), ("pp2", "pp2")])
def test_pipeline_stages(
    stages: dict[str, SglangServer], prompts: list[list[int]], answers: list[Any], source: str, target: str
) -> None:
    prefill, decode = stages[f"prefill {source}"], stages[f"decode {target}"]
    check_answers(prefill, decode, prompts, answers)
    assert {trace["rank"] for trace in prefill.traces()} == {0, 1}, "every rank sends its part"
