"""A request that is refused is not counted as failed."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.serving.peers import Fault
from tests.serving.router_world import World, run, until, world

from baton.serving.router import ProxiedRequest, RouterLimits

PROMPT = {"prompt": "the fox"}


def test_a_client_that_leaves_is_counted_as_499():
    async def play() -> None:
        async with world() as w:
            w.p0.faults, w.d0.faults = [Fault(is_hung=True)], [Fault(is_hung=True)]
            asking = asyncio.create_task(w.post(PROMPT))
            await until(lambda: w.p0.seen and w.d0.seen)
            asking.cancel()
            await until(lambda: w.p0.seen[0].is_disconnected and w.d0.seen[0].is_disconnected)
            assert await w.metric('baton_router_requests_total{path="/v1/completions",status="499"}') == 1

    run(play)


async def refused_and_failed(w: World) -> tuple[float, float, float]:
    """After six refusals: requests given up, and attempts that failed; requests given up after a failure."""
    for fault in (Fault(400), Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"})):
        w.d0.faults = [fault] * 9
        assert (await w.post(PROMPT))[0] == fault.status
    w.d0.faults = []
    for body in ({"model": "unheard of"}, {"bootstrap_room": 5}, {"prompt": ["x"] * 5000}):
        assert (await w.post({**PROMPT, **body}))[0] in (400, 403, 404)
    assert (await w.post(b"no json"))[0] == 400
    num_refused = await w.metric("baton_router_given_up_total")
    num_failed = await w.metric("baton_router_failures_total")
    await until(lambda: w.instances[1].full_until_s < asyncio.get_running_loop().time())
    w.d0.faults = [Fault(502, "CORRUPTED")] * 9
    assert (await w.post(PROMPT))[0] == 502
    return num_refused, num_failed, await w.metric("baton_router_given_up_total")


def test_only_what_failed_for_good_was_given_up():
    async def play() -> None:
        async with world(1, 1, RouterLimits(num_attempts_max=3)) as w:
            assert await refused_and_failed(w) == (0, 0, 1)
            assert await w.metric('baton_router_given_up_total{cause="CORRUPTED"}') == 1

    run(play)


def test_an_error_has_the_id_under_which_the_log_has_its_reason(caplog: pytest.LogCaptureFixture):
    async def play() -> None:
        async with world(1, 1, RouterLimits(num_attempts_max=2)) as w:
            for fault in (Fault(400, "wrong_type"), Fault(502, "CORRUPTED")):
                w.d0.faults = [fault] * 3
                status, _, headers = await w.post(PROMPT)
                (record,) = (each for each in caplog.records if each.name == "baton.serving.http")
                caplog.clear()
                assert status == record.fields["status"] == fault.status
                assert headers["X-Request-Id"] == record.fields["request"]
                assert record.fields["reason"].startswith(fault.code)
                assert record.levelname == ("INFO" if status == 400 else "WARNING")
                status, told = await w.get(f"/v1/timelines/{headers['X-Request-Id']}")
                assert (status, bool(told["attempts"][0]["failure"])) == (200, True)

    with caplog.at_level(logging.INFO, logger="baton.serving.http"):
        run(play)


@pytest.mark.long
def test_a_router_that_counts_refusals_too_is_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ProxiedRequest, "_is_failure", lambda self, problem: True)

    async def play() -> None:
        async with world(1, 1, RouterLimits(num_attempts_max=3)) as w:
            assert await refused_and_failed(w) != (0, 0, 1)

    run(play)
