"""The router before vLLM servers: what each leg is sent, and what a client gets when a server fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from tests.serving.router_world import run, until
from tests.serving.vllm_peers import (
    CONTEXT,
    Fault,
    VllmPeer,
    VllmWorld,
    expected,
    ids_of,
    next_tokens,
    vllm_world,
)
from tests.session.registry_world import SECRET, registry

from baton.errors import ConfigError
from baton.serving.http import Credentials
from baton.serving.router import LocalMode, Router, RouterConfig, RouterLimits
from baton.serving.vllm import VllmWire, parse_instance
from baton.session.registry import Member, RegistryClient, Role

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def legs(world: VllmWorld) -> tuple[dict[str, Any], dict[str, Any]]:
    return world.prefills[0].seen[-1].body, world.decodes[0].seen[-1].body


def test_both_legs_of_a_completion():
    async def body() -> None:
        async with vllm_world() as world:
            ask = {"prompt": "hello", "max_tokens": 5, "min_tokens": 3, "temperature": 0.5, "logprobs": 2}
            status, answer = await world.post(ask)
            assert (status, answer["choices"][0]["text"]) == (200, expected("hello", 5))
            prefill, decode = legs(world)
            transfer = decode["kv_transfer_params"]["transfer_id"]
            assert prefill.pop("kv_transfer_params") == {"do_remote_decode": True, "transfer_id": transfer}
            source = world.prefills[0].source
            assert decode.pop("kv_transfer_params") == {
                **{"do_remote_prefill": True, "transfer_id": transfer, "source": source},
            }
            identity = answer["id"].removeprefix("cmpl-")
            common = {"model": "tiny", "prompt": "hello", "temperature": 0.5, "request_id": identity}
            assert prefill == {**common, "stream": False, "max_tokens": 1}
            assert decode == {**common, "max_tokens": 5, "min_tokens": 3, "logprobs": 2}
            assert await world.metric("baton_router_handoffs_total") == 1

    run(body)


def test_both_legs_of_a_chat_that_is_streamed():
    async def body() -> None:
        async with vllm_world() as world:
            ask = {**HELLO, "max_completion_tokens": 4, "stream_options": {"include_usage": True}}
            found = await world.stream(ask, CHAT)
            assert found.texts == {0: expected("hello", 4)}
            assert (found.num_done, found.roles[0], found.errors) == (1, 1, [])
            assert found.usage == [{"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}]
            assert b'token_ids":[' not in found.raw, "the client did not ask for them"
            prefill, decode = legs(world)
            assert prefill["max_tokens"] == prefill["max_completion_tokens"] == 1
            assert prefill["stream"] is False
            assert "stream_options" not in prefill
            assert decode["return_token_ids"] is True
            assert decode["max_completion_tokens"] == 4

    run(body)


def test_a_client_that_asks_for_token_ids_gets_them():
    async def body() -> None:
        async with vllm_world() as world:
            found = await world.stream({"prompt": "hi", "max_tokens": 3, "return_token_ids": True})
            assert found.raw.count(b'"token_ids": [') == 3
            assert found.raw.count(b'"prompt_token_ids": [') == 1

    run(body)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"prompt": ["a", "b"]},
        {"echo": True},
        {"prompt_logprobs": 1},
        {"best_of": 3},
        {"use_beam_search": True},
    ],
)
def test_forms_without_a_handoff_go_to_decode_alone(more: dict[str, Any]):
    async def body() -> None:
        async with vllm_world() as world:
            status, _ = await world.post({"prompt": "hello", "max_tokens": 2, **more})
            assert status == 200
            assert world.prefills[0].seen == []
            assert "kv_transfer_params" not in world.decodes[0].seen[-1].body
            assert await world.metric('baton_router_local_prefills_total{reason="form"}') == 1

    run(body)


def test_values_that_change_nothing_are_handed_over():
    async def body() -> None:
        async with vllm_world() as world:
            ask = {"prompt": ["hello"], "n": 1, "echo": False, "prompt_logprobs": None, "max_tokens": 2}
            assert (await world.post(ask))[0] == 200
            assert len(world.prefills[0].seen) == 1

    run(body)


def test_several_choices_are_streamed():
    async def body() -> None:
        async with vllm_world() as world:
            found = await world.stream({"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
            assert found.texts == {place: expected("aabb"[place], 3) for place in range(4)}
            assert found.num_done == 1

    run(body)


def test_clients_may_not_name_transfers():
    async def body() -> None:
        async with vllm_world() as world:
            status, answer = await world.post({"prompt": "x", "kv_transfer_params": {}})
            assert (status, answer["error"]["param"]) == (403, "kv_transfer_params")
            status, answer = await world.post({"prompt": "x", "n": 5000})
            assert (status, answer["error"]["param"]) == (400, "n")

    run(body)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [500, 503])
def test_a_failed_leg_is_tried_again_under_a_new_id(side: str, is_stream: bool, status: int):
    async def body() -> None:
        async with vllm_world(2, 2, prefill_policy="round_robin") as world:
            failing = (world.prefills if side == "prefill" else world.decodes)[0]
            failing.faults = [Fault(status=status)]
            ask = {"prompt": "hello", "max_tokens": 4}
            if is_stream:
                found = await world.stream(ask)
                assert (found.texts, found.num_done) == ({0: expected("hello", 4)}, 1)
            else:
                _, answer = await world.post(ask)
                assert answer["choices"][0]["text"] == expected("hello", 4)
            peers = (*world.prefills, *world.decodes)
            params = [seen.body["kv_transfer_params"] for peer in peers for seen in peer.seen]
            assert len({each["transfer_id"] for each in params}) == 2
            assert await world.metric("baton_router_retries_total") == 1

    run(body)


def test_the_only_pair_is_tried_again():
    async def body() -> None:
        async with vllm_world() as world:
            world.decodes[0].faults = [Fault(status=500)] * 2
            status, answer = await world.post({"prompt": "hello", "max_tokens": 4})
            assert (status, answer["choices"][0]["text"]) == (200, expected("hello", 4))

    run(body)


def test_an_error_of_the_request_goes_to_the_client():
    async def body() -> None:
        async with vllm_world() as world:
            world.decodes[0].faults = [Fault(status=400)]
            status, answer = await world.post({"prompt": "hello", "max_tokens": 4})
            assert (status, answer["error"]["code"]) == (400, 400)
            assert len(world.decodes[0].seen) == 1

    run(body)


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_a_completion_goes_on_elsewhere(after: int, is_error: bool):
    async def body() -> None:
        async with vllm_world(1, 2) as world:
            world.decodes[0].faults = [Fault(after=after, is_error=is_error)]
            ask = {
                "prompt": "hello",
                "max_tokens": 6,
                "min_tokens": 5,
                "temperature": 0,
                "presence_penalty": 0,
            }
            found = await world.stream({**ask, "stream_options": {"include_usage": True}})
            assert found.texts == {0: expected("hello", 6)}
            assert (found.num_done, found.errors, len(found.ids)) == (1, [], 1)
            assert found.usage == [{"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}]
            assert b'token_ids":[' not in found.raw
            last = world.decodes[1].seen
            if 0 < after < 6:
                tokens = next_tokens(ids_of("hello"), after)
                assert last[0].body["prompt"] == [*ids_of("hello"), *tokens]
                assert last[0].body["max_tokens"] == 6 - after
                assert last[0].body.get("min_tokens", 0) == max(0, 5 - after)
                assert world.prefills[0].seen[-1].body["prompt"] == last[0].body["prompt"]
                assert await world.metric("baton_router_resumes_total") == 1

    run(body)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_chat_goes_on_elsewhere(after: int):
    async def body() -> None:
        async with vllm_world(1, 2) as world:
            world.decodes[0].faults = [Fault(after=after)]
            found = await world.stream(HELLO, CHAT)
            assert found.texts == {0: expected("hello", CONTEXT - 5)}
            assert (found.num_done, found.errors, len(found.ids), found.roles[0]) == (1, [], 1, 1)
            events = [json.loads(line[6:]) for line in found.raw.split(b"\n\n")[:-2]]
            assert {(event["object"], event["created"]) for event in events} == {
                ("chat.completion.chunk", events[0]["created"])
            }
            again = world.decodes[1].seen[0]
            assert again.path == ("/v1/completions" if after > 1 else CHAT)

    run(body)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"stop": "x"}, "stop"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"n": 2}, "choices"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_what_cannot_go_on_ends_with_an_error(more: dict[str, Any], named: str):
    async def body() -> None:
        async with vllm_world(1, 2) as world:
            world.decodes[0].faults = [Fault(after=2)]
            found = await world.stream({"prompt": "hello", "max_tokens": 6, **more})
            assert found.texts == {0: expected("hello", 2)}
            assert found.num_done == 0
            assert named in found.errors[0]["message"]
            assert world.decodes[1].seen == []

    run(body)


def test_hidden_token_ids_are_no_obstacle_until_the_stream_breaks():
    async def body() -> None:
        async with vllm_world(1, 2) as world:
            world.decodes[0].hides_ids = world.decodes[1].hides_ids = True
            ask = {**HELLO, "max_tokens": 4, "include_reasoning": False}
            assert (await world.stream(ask, CHAT)).texts == {0: expected("hello", 4)}
            world.decodes[1].faults = [Fault(after=3)]
            found = await world.stream(ask, CHAT)
            assert (found.num_done, len(found.errors)) == (0, 1)

    run(body)


def test_a_client_that_leaves_ends_both_legs():
    async def body() -> None:
        async with vllm_world() as world:
            prefill, decode = world.prefills[0], world.decodes[0]
            prefill.faults, decode.faults = [Fault(is_held=True)], [Fault(is_held=True)]
            asking = asyncio.create_task(world.post({"prompt": "hello"}))
            await until(lambda: prefill.seen and decode.seen)
            asking.cancel()
            await until(lambda: prefill.seen[0].is_gone and decode.seen[0].is_gone)

    run(body)


IMPATIENT = {"first_s_max": 0.2, "stall_s_max": 0.2, "silence_s_max": 0.6}


async def polled(world: VllmWorld, times: int) -> None:
    """Waits until each instance has answered as many more polls, after each of which requests are checked."""
    for instance in world.router.fleet.instances.values():
        for _ in range(times):
            heard_s = instance.health.heard_s
            await until(lambda instance=instance, heard_s=heard_s: instance.health.heard_s > heard_s)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_in_vllms_own_queue_waits_for_its_first_token(side: str, is_stream: bool):
    async def body() -> None:
        async with vllm_world(limits=RouterLimits(**IMPATIENT)) as world:
            peer = (world.prefills if side == "prefill" else world.decodes)[0]
            peer.faults = [Fault(is_silent=True) if is_stream and side == "decode" else Fault(is_held=True)]
            ask = {"prompt": "hello", "max_tokens": 4}
            asking = asyncio.create_task(world.stream(ask) if is_stream else world.post(ask))
            await until(lambda: peer.seen)
            await polled(world, 8)
            assert not asking.done()
            peer.gate.set()
            answer = await asking
            text = answer.texts[0] if is_stream else answer[1]["choices"][0]["text"]
            assert text == expected("hello", 4)
            assert len(peer.seen) == 1, "it was not sent again"
            assert await world.metric("baton_router_failures_total") == 0

    run(body)


def test_after_the_first_token_a_stream_that_stalls_goes_on_elsewhere():
    async def body() -> None:
        async with vllm_world(1, 2, limits=RouterLimits(**IMPATIENT)) as world:
            world.decodes[0].faults = [Fault(is_silent=True, after=2)]
            found = await world.stream({"prompt": "hello", "max_tokens": 4})
            assert (found.texts, found.num_done) == ({0: expected("hello", 4)}, 1)
            assert await world.metric('baton_router_failures_total{cause="DEADLINE"}') == 1
            assert len(world.decodes[1].seen) == 1

    run(body)


def test_what_waits_at_a_server_that_is_not_healthy_any_more_goes_elsewhere():
    async def body() -> None:
        async with vllm_world(1, 2, limits=RouterLimits(**IMPATIENT)) as world:
            broken = world.decodes[0]
            broken.faults = [Fault(is_silent=True)]
            asking = asyncio.create_task(world.stream({"prompt": "hello", "max_tokens": 4}))
            await until(lambda: broken.seen)
            broken.health = 503
            found = await asking
            assert (found.texts, found.num_done) == ({0: expected("hello", 4)}, 1)
            assert len(world.decodes[1].seen) == 1

    run(body)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_queue_timeout_bounds_the_wait_for_the_first_token(side: str, is_stream: bool):
    async def body() -> None:
        limits = RouterLimits(queue_s_max=0.3)
        async with vllm_world(1, 2, limits=limits, prefill_policy="round_robin") as world:
            peer = (world.prefills if side == "prefill" else world.decodes)[0]
            peer.faults = [Fault(is_held=True)]
            asking = asyncio.create_task(
                world.post({"prompt": "hello", "max_tokens": 4, "stream": is_stream})
            )
            await until(lambda: peer.seen)
            if side == "decode" and not is_stream:
                # Its first token cannot be told from its last: this one may be decoding.
                await polled(world, 6)
                assert not asking.done()
                peer.gate.set()
                assert (await asking)[0] == 200
                return
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (503, "QUEUE_TIMEOUT")
            assert "(--queue-timeout)" in answer["error"]["message"]
            await until(lambda: peer.seen[0].is_gone)
            assert sum(len(each.seen) for each in world.decodes) == 1, "it is not tried again"

    run(body)


def test_data_parallel_engines_are_named_by_header_and_port():
    async def body() -> None:
        async with vllm_world(dp=3, prefill_policy="round_robin") as world:
            peer = world.prefills[0]
            # The pairing that the peer checks is with its first engine; here only what was sent counts.
            world.decodes[0].faults = [Fault(status=400, is_late=True)] * 6
            for _ in range(6):
                await world.post({"prompt": "hello", "max_tokens": 2})
            ranks = [int(seen.headers["X-data-parallel-rank"]) for seen in peer.seen]
            assert sorted(ranks) == [0, 0, 1, 1, 2, 2]
            ids = {
                seen.body["kv_transfer_params"]["transfer_id"]: rank
                for seen, rank in zip(peer.seen, ranks, strict=True)
            }
            for seen in world.decodes[0].seen:
                params = seen.body["kv_transfer_params"]
                assert params["source"] == f"10.9.9.9:{7000 + ids[params['transfer_id']]}"
                assert "X-data-parallel-rank" not in seen.headers

    run(body)


def test_the_servers_key_is_sent_and_a_wrong_one_is_named():
    async def body() -> None:
        async with vllm_world(key="k" * 20, local=LocalMode.NEVER) as world:
            assert (await world.post({"prompt": "hello", "max_tokens": 2}))[0] == 200
            world.decodes[0].key = "another"
            status, answer = await world.post({"prompt": "hello", "max_tokens": 2})
            assert status in (502, 503)
            assert "VLLM_API_KEY" in answer["error"]["message"]

    run(body)


def test_a_server_that_has_gone_is_not_asked():
    async def body() -> None:
        async with vllm_world(1, 2, limits=RouterLimits(recover_s_max=30.0)) as world:
            await world.decodes[0].stop()
            for _ in range(4):
                _, answer = await world.post({"prompt": "hello", "max_tokens": 4})
                assert answer["choices"][0]["text"] == expected("hello", 4)
            await until(lambda: len(world.router.fleet.able(Role.DECODE)) == 1)

    run(body)


def test_servers_are_found_in_the_registry():
    """A data-parallel engine registers with its rank in the URL, and is reached by the header."""

    async def body() -> None:
        transfers: dict[str, Any] = {}
        peers = {Role.PREFILL: VllmPeer(transfers, "127.0.0.1:7001"), Role.DECODE: VllmPeer(transfers)}
        async with registry() as server:
            config = RouterConfig(server.url, "vllm", instance_key="", poll_s=0.1)
            router = Router(config, SECRET, Credentials())
            await router.start("127.0.0.1", 0)
            members = RegistryClient(server.url, SECRET)
            try:
                for role, peer in peers.items():
                    await peer.start()
                    member = Member(
                        instance=f"{role.value}-engine",
                        role=role,
                        rank=0,
                        epoch=7,
                        layout="tp1",
                        coordinator=peer.source or "127.0.0.1:7009",
                        fingerprint="f",
                        transport="tcp",
                        url=f"{peer.url}/dp1" if role is Role.PREFILL else peer.url,
                    )
                    await members.register(member).wait()
                await until(lambda: len(router.fleet.able()) == 2)
                async with aiohttp.ClientSession() as session:
                    ask = {"prompt": "hello", "max_tokens": 3}
                    async with session.post(f"{router.url}/v1/completions", json=ask) as response:
                        answer = await response.json()
                assert answer["choices"][0]["text"] == expected("hello", 3)
                assert peers[Role.PREFILL].seen[0].headers["X-data-parallel-rank"] == "1"
                assert "X-data-parallel-rank" not in peers[Role.DECODE].seen[0].headers
            finally:
                await members.close()
                await router.close()
                for peer in peers.values():
                    await peer.stop()

    run(body)


def test_resume_problem_of_messages_with_images():
    wire = VllmWire()
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    for content, is_text in ((parts, False), (parts[:1], True), ("x", True)):
        raw = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 9}).encode()
        request = wire.read(CHAT, raw)
        progress = wire.progress(request, "cmpl-1", 0)
        progress.prompt = [1]
        assert (wire.resume_problem(request, progress) == "") is is_text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://h:1", "source=HOST:KV_PORT"),
        ("h:1,source=h:2", "http://host:port"),
        ("http://h:1,source=h", "'h' has to be HOST:KV_PORT"),
        ("http://h:1,source=h:70000", "70000"),
        ("http://h:1,source=h:65000,dp=900", "lower kv_port"),
        ("http://h:1,source=h:2,dp=0", "dp '0'"),
        ("http://h:1,port=3", "'port' is not known"),
    ],
)
def test_an_instance_that_cannot_be_used_is_refused(text: str, told: str):
    with pytest.raises(ConfigError) as refused:
        parse_instance(Role.PREFILL, text)
    assert told in str(refused.value)


def test_engines_of_an_instance():
    one = parse_instance(Role.PREFILL, "http://h:1/,source=k:9")
    assert [(each.instance, each.url, each.coordinator) for each in one] == [
        ("prefill-h:1", "http://h:1", "k:9")
    ]
    two = parse_instance(Role.DECODE, "http://h:1,dp=2")
    assert [(each.instance, each.url) for each in two] == [
        ("decode-h:1-dp0", "http://h:1/dp0"),
        ("decode-h:1-dp1", "http://h:1/dp1"),
    ]
