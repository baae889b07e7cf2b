"""Processes that are killed, sides that do not match, and models that cannot be run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from tests.engine.e2e.instances import (
    BothSides,
    InstancePool,
    Listener,
    Side,
    ask_one,
    check_idle,
    greedy,
    until,
)
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.engine.tiny import tiny

from baton.engine.deployment import Pair, PairRequest
from baton.engine.instance import Instance
from baton.engine.requests import OutputChunk, RequestError, RequestFinished
from baton.errors import ConfigError, EngineError
from baton.protocol.outcomes import Why

pytestmark = pytest.mark.engine

TOLD_S_MAX = 60.0
SILENT_S_MAX = 60.0
"""A stopped process is known by its silence alone, and after the two minutes of the others too late."""
ROOT = Path(__file__).parents[3]
NUM_TOKENS = 2000
"""So many that a request is under way for as long as a test looks."""


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def heard_within(listener: Listener, start_s: float) -> RequestError:
    while True:
        event = listener.next(max(0.01, start_s + TOLD_S_MAX - monotonic()))
        if isinstance(event, RequestError):
            return event
        assert not isinstance(event, RequestFinished), "the request ended well"


@pytest.mark.parametrize("layout", ["tp1", "pp2.tp2"])
@pytest.mark.parametrize("rank", [0, -1], ids=["first rank", "last rank"])
def test_a_killed_decode_rank(pool: InstancePool, folder: Path, layout: str, rank: int) -> None:
    pair = pool.pair(Side(str(folder), name="first"), Side(str(folder), layout, name="second"))
    handed = BothSides(pair, greedy(prompt(40), NUM_TOKENS))
    # The first token comes early; with the second one the hand-over is through.
    assert all(isinstance(handed.decode.until(OutputChunk), OutputChunk) for _ in range(2))
    pids = pair.decode.pids
    victim = sorted(pids)[rank]
    start_s = monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    trouble = heard_within(handed.decode, start_s)
    assert f"rank {victim} of" in trouble.text
    assert not pair.decode.is_running
    with pytest.raises(EngineError, match=r"not running.*rank"):
        pair.decode.core.submit(greedy(prompt(4), 1), print)
    pair.decode.close()
    assert all(is_gone(pid) for pid in pids.values())
    check_other_lives(pair.prefill, folder)


@pytest.mark.parametrize("layout", ["tp1", "pp2.tp2"])
@pytest.mark.parametrize("rank", [0, -1], ids=["first rank", "last rank"])
def test_a_killed_prefill_rank(pool: InstancePool, folder: Path, layout: str, rank: int) -> None:
    # A slow link: the hand-over is under way when its source is lost.
    first = Side(str(folder), layout, name="slow").but(link_bytes_per_s=2e4, chunk_tokens=64)
    pair = pool.pair(first, Side(str(folder), name="third"))
    handed = BothSides(pair, greedy(prompt(1000), 8))
    until(lambda: any(not books.is_idle for books in pair.prefill.core.schedulers), "the prompt is begun")
    pids, address = pair.prefill.pids, pair.prefill.address
    victim = sorted(pids)[rank]
    start_s = monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    # A rank that lost its coordinator may say so before the coordinator's end is seen.
    assert "slow" in heard_within(handed.prefill, start_s).text
    trouble = heard_within(handed.decode, start_s)
    assert trouble.cause is not None
    assert trouble.cause.why is Why.PEER_LOST
    # Before their handshake is through the target knows its source by the address alone.
    assert pair.prefill.config.name in trouble.text or address in trouble.text
    until(lambda: bool(pair.prefill.failure), "the instance says why it ended")
    assert f"rank {victim} of" in pair.prefill.failure or "lost its coordinator" in pair.prefill.failure
    pair.prefill.close()
    assert all(is_gone(pid) for pid in pids.values())
    check_other_lives(pair.decode, folder)


def test_a_stopped_rank(pool: InstancePool, folder: Path) -> None:
    instance = pool.instance(Side(str(folder), "pp2", name="halting").but(silence_s=5.0))
    listener = Listener(instance, greedy(prompt(40), NUM_TOKENS))
    assert isinstance(listener.until(OutputChunk), OutputChunk)
    pids = instance.pids
    os.kill(pids[1], signal.SIGSTOP)
    trouble = listener.until(RequestError, SILENT_S_MAX)
    assert isinstance(trouble, RequestError)
    assert "rank 1" in trouble.text
    os.kill(pids[1], signal.SIGCONT)
    instance.close()
    assert all(is_gone(pid) for pid in pids.values())


SCRIPT = """
import sys
from tests.engine.e2e.instances import Side
from baton.engine.instance import Instance
instance = Instance(Side(sys.argv[1], "pp2").config).start()
print(*instance.pids.values(), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_their_parent(folder: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(is_gone(pid) for pid in pids)
        parent.kill()
        until(lambda: all(is_gone(pid) for pid in pids), "the ranks are gone")


def check_other_lives(instance: Instance, folder: Path) -> None:
    check_idle(instance)
    asked = prompt(40)
    check_tokens(folder, [asked], [ask_one(instance, greedy(asked, 16))], 16)


def test_a_pair_says_why_it_fails(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(Side(str(folder), name="first"), Side(str(folder), name="second"))
    _, pieces = pair.ask(PairRequest(greedy(prompt(40), NUM_TOKENS)))
    # The first token comes early; with the second one the hand-over is through.
    next(pieces), next(pieces)
    os.kill(pair.decode.pids[0], signal.SIGKILL)
    start_s = monotonic()
    with pytest.raises(EngineError, match=r"decode: rank 0 of second.* was ended by signal 9"):
        list(pieces)
    assert monotonic() - start_s < TOLD_S_MAX


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"seed": 5}), ("qwen2", {})],
    ids=["other weights", "other family"],
)
def test_unlike_models_are_refused(
    pool: InstancePool, folder: Path, family: str, changes: dict[str, int]
) -> None:
    other = Side(str(tiny(family, **changes)), name="other")
    pair = pool.pair(Side(str(folder), name="first"), other)
    with pytest.raises(EngineError, match=r"decode: .*(model|fingerprint)"):
        ask_one(pair, greedy(prompt(40), 8))
    check_idle(pair.prefill, pair.decode)


def test_what_one_side_refuses_is_not_left_at_the_other(pool: InstancePool, folder: Path) -> None:
    first = Side(str(folder), name="short").but(context_max=100)
    pair = pool.pair(first, Side(str(folder), name="second"))
    with pytest.raises(ConfigError, match="120"):
        ask_one(pair, greedy(prompt(120), 8))
    check_idle(pair.prefill, pair.decode)


def test_an_answer_that_nobody_wants_any_more(pool: InstancePool, folder: Path) -> None:
    pair = pool.pair(Side(str(folder), name="first"), Side(str(folder), name="second"))
    _, pieces = pair.ask(PairRequest(greedy(prompt(40), NUM_TOKENS)))
    next(pieces)
    pieces.close()
    check_idle(pair.prefill, pair.decode)


def test_another_secret_is_refused(folder: Path, pool: InstancePool) -> None:
    one = pool.instance(Side(str(folder), name="first"))
    other = Instance(replace(Side(str(folder)).config, secret=b"another secret of thirty-two by."))
    with pytest.raises(ConfigError, match="secret"):
        Pair(one, other)
    other.close()


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        ([], {}, "0 tokens"),
        ([5] * 5000, {}, "5000"),
        ([101], {}, "101"),
        ([5], {"temperature": -1.0}, "temperature"),
    ],
    ids=["empty", "too long", "no such token", "no such temperature"],
)
def test_a_request_that_cannot_be(
    pool: InstancePool, folder: Path, tokens: list[int], params: dict[str, float], words: str
) -> None:
    instance = pool.instance(Side(str(folder), name="first"))
    with pytest.raises(ConfigError, match=words):
        instance.core.submit(greedy(tokens, 8, **params), print)
    check_idle(instance)
