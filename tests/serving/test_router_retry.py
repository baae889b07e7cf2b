"""A request that fails before its first token is made again elsewhere, and a client sees nothing of it."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.serving.peers import Fault, expected
from tests.serving.router_world import LIMIT_S, Clock, read_stream, run, until, world

from baton.serving.router import LocalMode, RouterLimits

PROMPT = {"prompt": "the fox"}
RIGHT = expected("the fox")


def text_of(raw: bytes) -> str:
    return str(json.loads(raw)["choices"][0]["text"])


def test_both_legs_get_the_request_and_the_same_room():
    async def body() -> None:
        async with world() as w:
            status, raw, _ = await w.post({**PROMPT, "seed": 7, "unknown": {"a": [1]}})
            assert (status, text_of(raw)) == (200, RIGHT)
            prefill, decode = w.p0.seen[0], w.d0.seen[0]
            assert prefill.body == decode.body
            assert prefill.body["unknown"] == {"a": [1]}
            assert 0 <= prefill.body["bootstrap_room"] < 2**63
            assert prefill.body["bootstrap_host"] == "127.0.0.1"
            assert prefill.body["bootstrap_port"] == 7002
            assert decode.headers["Authorization"].startswith("Bearer ")
            await until(lambda: not w.router.fleet.instances["p0"].num_in_flight)
            assert w.router.fleet.instances["d0"].num_in_flight == 0

    run(body)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("leg", ["p0", "d0"])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(502, "COPY_FAILED"),
        Fault(503, "OUT_OF_PAGES"),
        Fault(504, "DEADLINE"),
        Fault(429, "QUEUE_FULL"),
        Fault(is_cut=True),
    ],
    ids=lambda fault: fault.code or "cut",
)
def test_failed_leg_is_tried_elsewhere_in_another_room(fault: Fault, leg: str, is_stream: bool):
    async def body() -> None:
        async with world(2, 2) as w:
            w.peers[leg].faults = [fault]
            if is_stream:
                found = await w.stream(PROMPT)
                assert (found.texts, found.num_done) == ({0: RIGHT}, 1)
            else:
                status, raw, _ = await w.post(PROMPT)
                assert (status, text_of(raw)) == (200, RIGHT)
            assert await w.metric("baton_router_retries_total") == 1
            other = leg[0] + "1"
            assert len(w.peers[leg].seen) == 1
            assert len(w.peers[other].seen) == 1
            first, second = w.peers[leg].seen[0].body, w.peers[other].seen[0].body
            assert first["bootstrap_room"] != second["bootstrap_room"]

    run(body)


def test_prefill_failure_ends_the_decode_leg_that_waits():
    async def body() -> None:
        async with world(2, 2) as w:
            w.p0.faults = [Fault(502, "COPY_FAILED")]
            w.d0.gate.clear()  # it would wait for ever
            status, raw, _ = await w.post(PROMPT)
            assert (status, text_of(raw)) == (200, RIGHT)
            await until(lambda: w.d0.seen[0].is_disconnected)

    run(body)


def test_decode_failure_ends_the_prefill_leg():
    async def body() -> None:
        async with world(2, 2) as w:
            w.d0.faults = [Fault(503, "OUT_OF_PAGES")]
            w.p0.gate.clear()
            status, raw, _ = await w.post(PROMPT)
            assert (status, text_of(raw)) == (200, RIGHT)
            await until(lambda: w.p0.seen[0].is_disconnected)

    run(body)


@pytest.mark.parametrize("leg", ["p0", "d0"])
@pytest.mark.parametrize("status", [400, 404, 413, 500])
def test_what_is_wrong_with_the_request_goes_to_the_client_as_it_is(leg: str, status: int):
    async def body() -> None:
        async with world() as w:
            w.peers[leg].faults = [Fault(status, "some_code")]
            found, raw, _ = await w.post(PROMPT)
            assert found == status
            assert json.loads(raw)["error"] == {
                "message": f"told to fail with {status}", "type": "x", "code": "some_code",
            }  # fmt: skip
            assert await w.metric("baton_router_retries_total") == 0

    run(body)


def test_instance_with_another_secret_is_no_fault_of_the_client():
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(401, "invalid_api_key")]
            assert (await w.post(PROMPT))[0] == 200
            w.d0.faults, w.d1.faults = [Fault(403, "room_not_allowed")] * 9, [Fault(401)] * 9
            status, raw, _ = await w.post(PROMPT)
            assert (status, json.loads(raw)["error"]["code"]) == (502, "REFUSED_AUTHENTICATION")

    run(body)


def test_attempts_are_bounded_and_the_last_cause_is_told():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_attempts_max=3)) as w:
            w.d0.faults = [Fault(502, "CORRUPTED")] * 9
            status, raw, _ = await w.post(PROMPT)
            assert status == 502
            assert json.loads(raw)["error"]["code"] == "CORRUPTED"
            assert len(w.d0.seen) == 3
            assert await w.metric('baton_router_failures_total{cause="CORRUPTED"}') == 3

    run(body)


@pytest.mark.parametrize(("full", "other"), [("d0", "p0"), ("p0", "d0")])
def test_a_full_side_is_not_done_by_the_other(full: str, other: str):
    """Its requests would pass those that wait there, and slow down what the other side is for."""

    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO, local_prefill_max=0) as w:
            w.peers[full].faults = [Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"})] * 9
            status, raw, headers = await w.post(PROMPT)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(raw)["error"]["code"] == "QUEUE_FULL"
            assert all("bootstrap_room" in seen.body for seen in w.peers[other].seen), "it answered alone"
            assert await w.metric("baton_router_local_prefills_total") == 0

    run(body)


def test_a_side_that_fails_is_done_by_the_other():
    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO, local_prefill_max=0) as w:
            w.d0.faults = [Fault(is_cut=True)] * 9
            status, raw, _ = await w.post(PROMPT)
            assert (status, text_of(raw)) == (200, RIGHT)
            assert await w.metric('baton_router_local_prefills_total{reason="no_decode"}') == 1

    run(body)


def test_full_everywhere_is_429_with_retry_after():
    async def body() -> None:
        async with world(1, 2) as w:
            full = Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"})
            w.d0.faults, w.d1.faults = [full] * 9, [full] * 9
            status, raw, headers = await w.post(PROMPT)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(raw)["error"]["code"] == "QUEUE_FULL"
            assert len(w.d0.seen) == len(w.d1.seen) == 1  # each was asked once, and not pestered

    run(body)


def test_instance_that_has_ended_is_given_up_at_once():
    async def body() -> None:
        async with world(2, 2) as w:
            w.d0.faults = [Fault(is_hung=True)]
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.d0.seen)
            await w.d0.stop()
            found = await asyncio.wait_for(asking, LIMIT_S / 2)  # and not by its deadline
            assert (found.texts, found.num_done) == ({0: RIGHT}, 1)

    run(body)


def test_new_epoch_ends_what_the_former_one_was_given():
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(is_hung=True)]
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.d0.seen)
            w.d0.epoch += 1
            found = await asyncio.wait_for(asking, LIMIT_S / 2)
            assert found.texts == {0: RIGHT}
            assert await w.metric('baton_router_failures_total{cause="PEER_LOST"}') == 1

    run(body)


def test_silent_instance_is_given_up_by_the_deadline(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)

    async def body() -> None:
        async with world(1, 2, RouterLimits(first_s_max=600.0)) as w:
            w.d0.faults = [Fault(is_hung=True)]
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.d0.seen)
            clock.advance(601.0)
            found = await asking
            assert found.texts == {0: RIGHT}
            assert await w.metric('baton_router_failures_total{cause="DEADLINE"}') == 1

    run(body)


def test_stalled_stream_goes_on_elsewhere_by_the_deadline(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)

    async def body() -> None:
        async with world(1, 2, RouterLimits(stall_s_max=600.0)) as w:
            w.d0.faults = [Fault(is_hung=True, after=3)]
            asked = json.dumps({"model": "tiny", "stream": True, **PROMPT})
            async with w.session.post(w.router.url + "/v1/completions", data=asked) as response:
                raw = b""
                while raw.count(b"data: ") < 3:  # the router has passed on all that comes
                    raw += await response.content.readany()
                clock.advance(601.0)
                found = read_stream(raw + await response.read())
            assert (found.texts, found.num_done) == ({0: RIGHT}, 1)
            assert await w.metric('baton_router_failures_total{cause="DEADLINE"}') == 1

    run(body)


def test_nobody_there_is_503_within_a_moment():
    async def body() -> None:
        async with world(0, 1, RouterLimits(recover_s_max=0.2)) as w:
            status, raw, headers = await w.post(PROMPT)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "no prefill instance is able" in json.loads(raw)["error"]["message"]

    run(body)
