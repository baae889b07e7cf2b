"""A request is answered alike whether it is plain or comes by aiohttp; refusals are not failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.router.peers import Fault, expected
from tests.router.world import World, read_stream, run, until, world

from baton.router.config import Limits
from baton.router.conversation import Conversation
from baton.router.router import Router
from baton.web import WebOutlet

PROMPT = {"prompt": "the fox"}
WAYS = {"plain": {}, "aiohttp": {"Connection": "close"}}
DIFFERING = {"date", "x-request-id", "connection"}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By which way each request has come."""
    found: list[str] = []
    converse = Router._converse

    async def noted(router: Router, path: str, body: bytes, outlet: Any) -> int:
        found.append("aiohttp" if isinstance(outlet, WebOutlet) else "plain")
        return await converse(router, path, body, outlet)

    monkeypatch.setattr(Router, "_converse", noted)
    return found


@pytest.mark.parametrize(
    ("body", "faults", "status"),
    [
        (PROMPT, [], 200),
        ({**PROMPT, "stream": True}, [], 200),
        ({**PROMPT, "stream": True}, [Fault(is_cut=True, after=3)], 200),
        (PROMPT, [Fault(503, "OUT_OF_PAGES")], 200),
        (PROMPT, [Fault(413, "too_large")], 413),
        ({**PROMPT, "model": "unheard of"}, [], 404),
        ({**PROMPT, "bootstrap_room": 5}, [], 403),
    ],
)
def test_both_ways_answer_alike(body: dict[str, Any], faults: list[Fault], status: int, ways: list[str]):
    async def play() -> None:
        async with world() as w:
            answers = []
            for way in WAYS.values():
                w.d0.faults = list(faults)
                found, raw, headers = await w.post(body, headers=way)
                told = {name.lower(): headers[name] for name in headers if name.lower() not in DIFFERING}
                if body.get("stream"):
                    read = read_stream(raw)
                    assert (read.texts, read.num_done) == ({0: expected("the fox")}, 1)
                    raw = b""
                else:
                    raw = json.dumps({**json.loads(raw), "id": ""}).encode()
                answers.append((found, told, raw))
            assert answers[0] == answers[1]
            assert answers[0][0] == status
            assert ways == list(WAYS)
            label = f'{{path="/v1/completions",status="{status}"}}'
            assert await w.metric(f"baton_router_requests_total{label}") == 2

    run(play)


@pytest.mark.parametrize("way", WAYS)
def test_client_that_leaves_is_noticed_on_either_way(way: str):
    async def play() -> None:
        async with world() as w:
            w.p0.faults, w.d0.faults = [Fault(is_hung=True)], [Fault(is_hung=True)]
            asking = asyncio.create_task(w.post(PROMPT, headers=WAYS[way]))
            await until(lambda: w.p0.seen and w.d0.seen)
            asking.cancel()
            await until(lambda: w.p0.seen[0].is_disconnected and w.d0.seen[0].is_disconnected)
            assert await w.metric('baton_router_requests_total{path="/v1/completions",status="499"}') == 1

    run(play)


async def refused_and_failed(w: World) -> tuple[float, float]:
    """How many requests were given up after six refusals, and after one that failed besides."""
    for fault in (Fault(400), Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"})):
        w.d0.faults = [fault] * 9
        assert (await w.post(PROMPT))[0] == fault.status
    w.d0.faults = []
    for body in ({"model": "unheard of"}, {"bootstrap_room": 5}, {"prompt": ["x"] * 5000}):
        assert (await w.post({**PROMPT, **body}))[0] in (400, 403, 404)
    assert (await w.post(b"no json"))[0] == 400
    num_refused = await w.metric("baton_router_given_up_total")
    await until(lambda: w.instances[1].full_until_s < asyncio.get_running_loop().time())
    w.d0.faults = [Fault(502, "CORRUPTED")] * 9
    assert (await w.post(PROMPT))[0] == 502
    return num_refused, await w.metric("baton_router_given_up_total")


def test_only_what_failed_for_good_was_given_up():
    async def play() -> None:
        async with world(1, 1, Limits(num_attempts_max=3)) as w:
            assert await refused_and_failed(w) == (0, 1)
            assert await w.metric('baton_router_given_up_total{cause="CORRUPTED"}') == 1

    run(play)


def test_a_router_that_counts_refusals_too_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Conversation, "_is_failure", lambda self, problem: True)

    async def play() -> None:
        async with world(1, 1, Limits(num_attempts_max=3)) as w:
            assert await refused_and_failed(w) != (0, 1)

    run(play)
