"""Hand-overs by endpoints in processes of their own: the tokens of `transformers`, and one fate."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.e2e.instances import Side, ask_all, check_idle, greedy, opened
from tests.engine.e2e.prompts import LENGTHS, check_tokens, prompt
from tests.engine.tiny import tiny
from tests.session.handoff_world import until

from baton.engine.instance import Instance

pytestmark = pytest.mark.engine

NUM_TOKENS = 16


@pytest.mark.parametrize(
    ("family", "prefill", "decode", "transport"),
    [("llama", "pp2", "tp2", "shm"), ("deepseek_v3", "tp2", "tp1", "tcp")],
)
def test_tokens_are_those_of_transformers(family: str, prefill: str, decode: str, transport: str) -> None:
    side = Side(str(tiny(family))).but(chunk_tokens=100, transport=transport, has_endpoint_process=True)
    asked = [prompt(length) for length in LENGTHS]
    with opened() as pool:
        pair = pool.pair(replace(side, layout=prefill), replace(side, layout=decode))
        check_tokens(
            tiny(family), asked, ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked]), NUM_TOKENS
        )
        check_idle(pair.prefill)
        check_idle(pair.decode)


def endpoint_processes(instance: Instance) -> list[int]:
    """The children of an instance's workers."""
    found = []
    for worker in instance._executor.workers:
        folder = Path(f"/proc/{worker.process.pid}/task")
        for task in folder.iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def test_an_instance_ends_with_the_process_of_an_endpoint() -> None:
    side = Side(str(tiny("llama"))).but(has_endpoint_process=True)
    with opened() as pool:
        pair = pool.pair(side, replace(side, name="two"))
        ask_all(pair, [greedy(prompt(40), 2)])
        [pid] = endpoint_processes(pair.prefill)
        os.kill(pid, signal.SIGKILL)
        until(lambda: pair.prefill._executor.workers[0].process.poll() is not None, "the worker goes on")
