"""Hand-overs between SGLang servers whose layouts differ in more than TP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sglang.servers import SglangServer
from tests.sglang.test_handoff import check_answers
from tests.vllm.servers import running

pytestmark = [pytest.mark.sglang, pytest.mark.long]


@pytest.fixture(scope="module", params=["pp2", "dp2"])
def pair(folder: Path, llama: Path, request: pytest.FixtureRequest) -> Iterator[tuple[SglangServer, ...]]:
    """A prefill and a decode server of one layout: pipeline stages, or data-parallel groups."""
    started = [SglangServer(request.param, llama, folder, mode=mode) for mode in ("prefill", "decode")]
    with running(*started):
        yield tuple(started)


def test_other_layouts_on_either_side(
    servers: dict[str, SglangServer],
    pair: tuple[SglangServer, SglangServer],
    prompts: list[list[int]],
    answers: list[Any],
) -> None:
    prefill, decode = pair
    check_answers(prefill, servers["decode tp1"], prompts, answers)
    traces = [file for file in prefill.trace.iterdir() if file.stat().st_size]
    assert len(traces) == 2, "each stage sends its layers, and each group some of the prompts"
    check_answers(servers["prefill tp2"], decode, prompts, answers)
