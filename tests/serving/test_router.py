"""Members come and go, clients leave, instances fill up: what a router does then, and says of itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.ports import free_port
from tests.serving.peers import Fault, expected
from tests.serving.router_world import Clock, run, until, world
from tests.session.registry_world import SECRET, registry

from baton import __version__
from baton.serving import router as routing
from baton.serving.http import Credentials, router_key
from baton.serving.router import LocalMode, Router, RouterConfig, RouterLimits
from baton.session.registry import Role

PROMPT = {"prompt": "the fox"}
RIGHT = {0: expected("the fox")}


def test_instances_join_and_leave_without_a_restart():
    async def body() -> None:
        async with world(1, 0, RouterLimits(recover_s_max=0.1)) as w:
            assert (await w.get("/health"))[0] == 503
            assert (await w.post(PROMPT))[0] == 503
            await w.join("d0", Role.DECODE)
            assert (await w.get("/health"))[0] == 200
            assert (await w.stream(PROMPT)).texts == RIGHT
            await w.join("d1", Role.DECODE)
            for _ in range(4):
                await w.stream(PROMPT)
            assert len(w.d1.seen) == 2
            await w.leave("d0")
            await until(lambda: not w.is_able("d0"))
            num_seen = len(w.d0.seen)
            for _ in range(3):
                assert (await w.stream(PROMPT)).texts == RIGHT
            assert len(w.d0.seen) == num_seen

    run(body)


def test_request_waits_for_an_instance_that_is_about_to_come():
    async def body() -> None:
        async with world(1, 0, RouterLimits(recover_s_max=60.0)) as w:
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.router.queue.num_waiting)
            await w.join("d0", Role.DECODE)
            assert (await asking).texts == RIGHT

    run(body)


def test_draining_instance_finishes_what_it_has_and_gets_nothing_new():
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.pace_s = 0.05
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.d0.num_sent)
            async with w.session.post(f"{w.router.url}/drain?instance=d0") as response:
                assert (response.status, await response.json()) == (200, {"is_draining": True})
            await until(lambda: not w.is_able("d0"))
            for _ in range(3):
                assert (await w.stream(PROMPT)).texts == RIGHT
            assert (await asking).texts == RIGHT
            assert len(w.d0.seen) == 1
            assert await w.metric("baton_router_resumes_total") == 0
            async with w.session.post(f"{w.router.url}/drain?instance=nobody") as response:
                assert response.status == 404

    run(body)


def test_draining_router_finishes_what_it_has_and_takes_nothing_new():
    async def story() -> None:
        async with world() as w:
            w.d0.gate.clear()
            under_way = asyncio.create_task(w.stream({"prompt": "a stream under way", "max_tokens": 6}))
            await until(lambda: len(w.d0.seen) == 1)
            draining = asyncio.create_task(w.router.drain(60))
            await asyncio.sleep(0)
            status, raw, _ = await w.post({"prompt": "a new one"})
            assert (status, json.loads(raw)["error"]["code"]) == (503, "DRAINING")
            assert (await w.get("/health"))[0] == 503
            assert not draining.done()
            w.d0.gate.set()
            assert (await under_way).num_done == 1
            await draining

    run(story)


def test_registry_that_is_away_or_has_forgotten_everybody_changes_nothing():
    async def body() -> None:
        port = free_port()
        async with world(registry_port=port) as w:
            await w.registry.close()
            assert (await w.stream(PROMPT)).texts == RIGHT
            async with registry(port=port):  # a new one, that nobody has told anything yet
                fleet = w.router.fleet
                await until(lambda: any(each.absent_s for each in fleet.instances.values()) or _seen(fleet))
                assert (await w.stream(PROMPT)).texts == RIGHT

    run(body)


def _seen(fleet: Any) -> bool:
    """The members were quicker than the router's watch, which is as well."""
    return all(each.absent_s is None for each in fleet.instances.values())


def test_router_that_starts_before_the_registry_waits_for_it():
    async def body() -> None:
        port = free_port()
        router = Router(RouterConfig(f"http://127.0.0.1:{port}"), SECRET, Credentials((), SECRET))
        await router.start("127.0.0.1", 0)
        assert "registry has not answered" in router.fleet.missing()
        async with registry(port=port):
            await until(lambda: router.fleet.is_registry_known)
        await router.close()

    run(body)


def test_instances_of_another_model_are_not_mixed_in():
    async def body() -> None:
        async with world() as w:
            await w.join("other", Role.BOTH, "large", fingerprint="beef")
            for _ in range(3):
                assert (await w.stream(PROMPT)).texts == RIGHT
                assert (await w.stream({**PROMPT, "model": "large"})).texts == RIGHT
            assert len(w.other.seen) == 3
            assert "bootstrap_room" not in w.other.seen[0].body
            status, models = await w.get("/v1/models")
            assert (status, [each["id"] for each in models["data"]]) == (200, ["tiny", "large"])
            assert (await w.get("/v1/models/large"))[1]["id"] == "large"
            assert (await w.get("/v1/models/unheard"))[0] == 404
            status, raw, _ = await w.post({**PROMPT, "model": "unheard of"})
            assert status == 404
            assert json.loads(raw)["error"]["code"] == "model_not_found"

    run(body)


def test_client_that_leaves_ends_both_legs():
    async def body() -> None:
        async with world() as w:
            w.p0.faults, w.d0.faults = [Fault(is_hung=True)], [Fault(is_hung=True)]
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.p0.seen and w.d0.seen)
            asking.cancel()
            await until(lambda: w.p0.seen[0].is_disconnected and w.d0.seen[0].is_disconnected)
            await until(lambda: not any(each.num_in_flight for each in w.instances))
            assert not any(each.upstreams or each.num_tokens for each in w.instances)
            assert await w.metric("baton_router_disconnects_total") == 1

    run(body)


def test_client_that_leaves_in_the_middle_of_a_stream_ends_it_there():
    async def body() -> None:
        async with world() as w:
            w.d0.pace_s = 0.02
            asking = asyncio.create_task(w.stream({**PROMPT, "max_tokens": 10_000}))
            await until(lambda: w.d0.num_sent > 3)
            asking.cancel()
            await until(lambda: w.d0.seen[0].is_disconnected)
            assert w.d0.num_sent < 10_000

    run(body)


def test_slow_client_is_felt_by_the_instance():
    async def body() -> None:
        async with world() as w:
            big = {**PROMPT, "model": "tiny", "stream": True, "max_tokens": 5_000, "pad": "x" * 20_000}
            async with w.session.post(w.router.url + "/v1/completions", data=json.dumps(big)) as response:
                await response.content.readany()
                num_sent = -1
                while num_sent != w.d0.num_sent:  # until nothing moves any more
                    num_sent = w.d0.num_sent
                    await asyncio.sleep(0.5)
                assert num_sent < 4_000  # of 100 MB

    run(body)


def test_client_that_does_not_read_at_all_is_dropped(monkeypatch):
    monkeypatch.setattr(routing, "WRITE_S_MAX", 0.5)

    async def body() -> None:
        async with world() as w:
            big = {**PROMPT, "model": "tiny", "stream": True, "max_tokens": 5_000, "pad": "x" * 20_000}
            async with w.session.post(w.router.url + "/v1/completions", data=json.dumps(big)) as response:
                await until(lambda: w.d0.seen[0].is_disconnected)
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            assert not any(each.upstreams for each in w.instances)

    run(body)


def test_too_many_in_flight_wait_and_too_many_waiting_are_refused():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_in_flight_max=2, num_waiting_max=3)) as w:
            w.d0.gate.clear()
            asking = [asyncio.create_task(w.post(PROMPT)) for _ in range(5)]
            await until(lambda: w.router.queue.num_waiting == 3)
            status, raw, headers = await w.post(PROMPT)
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(raw)["error"]["code"] == "QUEUE_FULL"
            assert len(w.d0.seen) == 2
            w.d0.gate.set()
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 5
            assert w.router.queue.num_waiting == 0

    run(body)


def test_who_waited_longest_is_next_and_who_leaves_is_forgotten():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_in_flight_max=1)) as w:
            w.d0.gate.clear()
            asking = [asyncio.create_task(w.post({"prompt": "0"}))]
            await until(lambda: len(w.d0.seen) == 1)
            for number in range(1, 4):
                asking.append(asyncio.create_task(w.post({"prompt": str(number)})))
                await until(lambda number=number: w.router.queue.num_waiting == number)
            asking[2].cancel()
            await until(lambda: w.router.queue.num_waiting == 2)
            w.d0.gate.set()
            await asyncio.gather(*asking, return_exceptions=True)
            assert [seen.body["prompt"] for seen in w.d0.seen] == ["0", "1", "3"]

    run(body)


def test_what_waits_for_longer_than_the_queue_timeout_is_503_and_frees_its_place():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_in_flight_max=1, queue_s_max=0.05)) as w:
            w.d0.gate.clear()
            first = asyncio.create_task(w.post(PROMPT))
            await until(lambda: w.d0.seen)
            status, raw, headers = await w.post(PROMPT)
            error = json.loads(raw)["error"]
            assert (status, error["code"], headers["Retry-After"]) == (503, "QUEUE_TIMEOUT", "1")
            assert "within 0.05 s (--queue-timeout)" in error["message"]
            assert w.router.queue.num_waiting == 0
            w.d0.gate.set()
            assert (await first)[0] == 200, "one that was begun is not in the queue"
            w.d0.faults = [Fault(status=503, code="QUEUE_TIMEOUT")]
            num_seen = len(w.d0.seen)
            status, raw, _ = await w.post(PROMPT)
            assert (status, json.loads(raw)["error"]["code"]) == (503, "QUEUE_TIMEOUT")
            assert len(w.d0.seen) == num_seen + 1, "an instance's verdict is not tried again"

    run(body)


def test_more_than_may_wait_is_429_at_once():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_in_flight_max=1, num_waiting_max=1)) as w:
            w.d0.gate.clear()
            asking = [asyncio.create_task(w.post(PROMPT))]
            await until(lambda: w.d0.seen)
            asking.append(asyncio.create_task(w.post(PROMPT)))
            await until(lambda: w.router.queue.num_waiting == 1)
            status, raw, headers = await w.post(PROMPT)
            assert (status, json.loads(raw)["error"]["code"]) == (429, "QUEUE_FULL")
            assert int(headers["Retry-After"]) >= 1
            w.d0.gate.set()
            assert [(await answer)[0] for answer in asking] == [200, 200]

    run(body)


def test_requests_in_the_queue_hear_at_once_that_no_instance_is_left():
    async def body() -> None:
        async with world(1, 1, RouterLimits(num_in_flight_max=1, recover_s_max=0.2)) as w:
            w.d0.gate.clear()
            asking = [asyncio.create_task(w.post(PROMPT))]
            await until(lambda: w.d0.seen)
            for number in range(1, 4):
                asking.append(asyncio.create_task(w.post(PROMPT)))
                await until(lambda number=number: w.router.queue.num_waiting == number)
            queue = next(iter(w.router.queue._queues.values()))
            await w.d0.stop()
            statuses = [(await answer)[0] for answer in asking[1:]]
            assert statuses == [503] * 3
            assert not w.router.queue._queues
            assert queue.absent_s is not None, "one wait for all of them"

    run(body)


def test_a_request_in_the_queue_of_an_instance_that_computes_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = Clock(monkeypatch)

    async def body() -> None:
        async with world(1, 1, RouterLimits(first_s_max=600.0)) as w:
            w.d0.gate.clear()
            asking = asyncio.create_task(w.post(PROMPT))
            await until(lambda: w.d0.seen)
            health = w.router.fleet.instances["p0"].health
            for number in range(1, 6):
                before_s = health.moved_s
                w.p0.told = {"load": {"num_steps": number}}
                await until(lambda before_s=before_s: health.moved_s > before_s)
                clock.advance(400.0)
                for each in w.router.fleet.instances.values():  # two polls: the first looks at deadlines
                    for _ in range(2):
                        heard_s = each.health.heard_s
                        await until(lambda each=each, heard_s=heard_s: each.health.heard_s > heard_s)
                assert not asking.done()
            w.d0.gate.set()
            assert (await asking)[0] == 200
            assert len(w.d0.seen) == 1

    run(body)


def test_short_prompts_are_prefilled_on_decode_by_measured_rates():
    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO) as w:
            w.p0.told = {"rates": {"prefill_tokens_per_s": 1000.0, "handoff_s": 0.02}}
            w.d0.told = {"rates": {"prefill_tokens_per_s": 500.0}}
            fleet = w.router.fleet
            await until(lambda: all(each.health.info.rates.prefill_tokens_per_s for each in w.instances))
            assert len(fleet.instances) == 2
            long = {"prompt": "long " * 200}
            for ask in (PROMPT, long, PROMPT):
                assert (await w.stream(ask)).texts == {0: expected(ask["prompt"])}
            assert ["bootstrap_room" in seen.body for seen in w.d0.seen] == [False, True, False]
            assert len(w.p0.seen) == 1
            assert await w.metric('baton_router_local_prefills_total{reason="short"}') == 2
            assert await w.metric('baton_router_local_threshold_tokens{instance="d0",role="decode"}') == 20
            assert await w.metric("baton_router_handoffs_total") == 1

    run(body)


def test_decode_goes_on_alone_while_nobody_prefills():
    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO) as w:
            w.p0.faults = [Fault(is_hung=True)]
            w.d0.pace_s = 0.05
            asking = asyncio.create_task(w.stream(PROMPT))
            await until(lambda: w.p0.seen)
            await w.p0.stop()
            assert (await asking).texts == RIGHT
            assert await w.metric('baton_router_local_prefills_total{reason="no_prefill"}') == 1

    run(body)


@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_health_follows_what_is_served(lost: str):
    async def body() -> None:
        for mode, status in ((LocalMode.AUTO, 200), (LocalMode.NEVER, 503)):
            async with world(1, 1, RouterLimits(recover_s_max=0.1), local=mode) as w:
                assert await w.get("/health") == (200, {"status": "ok"})
                await w.peers[lost].stop()
                await until(lambda w=w: not w.is_able(lost))
                assert (await w.get("/health"))[0] == status
                assert (await w.post(PROMPT))[0] == status
                if status == 200:
                    _, told = await w.get("/health")
                    assert told["status"] == "degraded"
                    assert f"{lost} is " in told["message"]

    run(body)


def test_copies_of_a_model_under_other_names_hand_off():
    async def body() -> None:
        async with world(1, 0) as w:
            await w.join("d0", Role.DECODE, "copy")
            for name in ("copy", "tiny", None):
                assert (await w.stream({**PROMPT, "model": name})).texts == RIGHT
            assert await w.metric("baton_router_handoffs_total") == 3
            assert await w.metric("baton_router_unpaired") == 0
            assert [card["id"] for card in (await w.get("/v1/models"))[1]["data"]] == ["copy"]
            assert await w.get("/health") == (200, {"status": "ok"})

    run(body)


def test_metrics_have_the_listed_name_of_the_model():
    def counted(text: str, name: str, **labels: str) -> dict[str, float]:
        """By model: the sum of the samples with these labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"baton_router_{name}" and labels.items() <= sample.labels.items():
                    model = sample.labels["model_name"]
                    found[model] = found.get(model, 0) + sample.value
        return found

    async def body() -> None:
        async with world(1, 0) as w:
            await w.join("d0", Role.DECODE, "/models/copy")  # of p0, which calls it tiny
            await w.join("p1", Role.PREFILL, "other", fingerprint="beef")
            await w.join("d1", Role.DECODE, "other", fingerprint="beef")
            names = {"/models/copy", "other"}
            _, text = await w.get("/metrics")
            for name in ("handoffs_total", "retries_total", "wait_seconds_count", "added_seconds_count"):
                assert counted(text, name) == dict.fromkeys(names, 0), name
            for model in ("tiny", "copy", "/models/copy", "other"):
                assert (await w.stream({**PROMPT, "model": model})).texts == RIGHT
            # Neither what does not exist nor what is not named makes a label.
            for wrong, status in (("x", 404), ("y", 404), (None, 400)):
                answer = await w.post({**PROMPT, "model": wrong})
                assert (answer[0], b"one of /models/copy, other" in answer[1]) == (status, True)
            await w.d1.stop()
            await w.p1.stop()
            await until(lambda: not w.is_able("d1") and not w.is_able("p1"))
            assert (await w.post({**PROMPT, "model": "other"}))[0] == 503
            await w.post({"model": "tiny", "tokens": [5]}, "/detokenize")
            _, text = await w.get("/metrics")
            path = "/v1/completions"
            for name in ("handoffs_total", "wait_seconds_count", "added_seconds_count"):
                assert counted(text, name) == {"/models/copy": 3, "other": 1}, name
            assert counted(text, "requests_total", path=path, status="200") == {"/models/copy": 3, "other": 1}
            assert counted(text, "requests_total", path=path, status="404") == {"": 2}
            assert counted(text, "requests_total", path=path, status="400") == {"": 1}
            assert counted(text, "requests_total", path=path, status="503") == {"other": 1}
            assert counted(text, "requests_total", path="/detokenize") == {"/models/copy": 1}
            assert counted(text, "requests_total", path="/metrics") == {"": 1}
            assert counted(text, "given_up_total", cause="NO_INSTANCE") == {"other": 1}

    run(body)


def test_two_models_that_never_hand_off_say_so(caplog: pytest.LogCaptureFixture):
    async def body() -> None:
        async with world(1, 0, local=LocalMode.AUTO) as w:
            await w.join("d0", Role.DECODE, "other", fingerprint="beef")
            assert (await w.stream({**PROMPT, "model": "other"})).texts == RIGHT
            status, told = await w.get("/health")
            assert (status, told["status"]) == (200, "degraded")
            assert "no hand-over for p0 (tiny), d0 (other)" in told["message"]
            assert await w.metric("baton_router_unpaired") == 2
            await until(lambda: told["message"] in caplog.text)
            await w.join("d1", Role.DECODE)
            status, told = await w.get("/health")
            assert (status, told["status"]) == (200, "ok")
            assert "no hand-over for d0 (other)" in told["message"]

    run(body)


def test_decode_with_drafts_is_paired_only_with_prefill_that_has_them(caplog: pytest.LogCaptureFixture):
    """The other way round is a pair: what decode has no use for stays at prefill."""

    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO) as w:
            w.d0.told = {"has_draft": True}
            await until(w.router.fleet.unpaired)
            assert (await w.stream(PROMPT)).texts == RIGHT, "decode prefills by itself"
            assert not w.p0.seen
            status, told = await w.get("/health")
            assert (status, told["status"]) == (200, "degraded")
            assert (
                "no hand-over for p0 (tiny), d0 (tiny): decode with --draft needs prefill" in told["message"]
            )
            await until(lambda: told["message"] in caplog.text)
            w.p0.told = {"has_draft": True}
            await until(lambda: not w.router.fleet.missing())
            w.d0.told = {}
            await until(lambda: not w.router.fleet.instances["d0"].health.info.has_draft)
            assert await w.get("/health") == (200, {"status": "ok"})
            assert (await w.stream(PROMPT)).texts == RIGHT
            assert w.p0.seen

    run(body)


def test_instances_with_unlike_sampling_defaults_are_not_paired():
    """Prefill samples the first token of a stream, decode the rest."""

    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO) as w:
            w.d0.told = {"sampling_defaults": {"temperature": 0.6, "top_k": 20}}
            w.p0.told = {"sampling_defaults": None}
            infos = [w.router.fleet.instances[name].health for name in ("p0", "d0")]
            await until(lambda: infos[0].info.sampling_defaults is None and infos[1].info.sampling_defaults)
            assert not w.router.fleet.unpaired_text(), "prefill has not read its checkpoint yet"
            w.p0.told = {"sampling_defaults": {"temperature": 1.0, "top_k": 0}}
            await until(w.router.fleet.unpaired)
            assert (await w.stream(PROMPT)).texts == RIGHT
            assert not w.p0.seen
            _, told = await w.get("/health")
            assert "different sampling defaults; give both the same --generation-config" in told["message"]
            w.p0.told = {"sampling_defaults": {"top_k": 20, "temperature": 0.6}}
            await until(lambda: not w.router.fleet.missing())
            assert (await w.stream(PROMPT)).texts == RIGHT
            assert w.p0.seen

    run(body)


def test_one_token_goes_to_prefill_alone():
    async def body() -> None:
        async with world() as w:
            found = await w.stream({**PROMPT, "max_tokens": 1})
            assert found.texts == {0: expected("the fox", 0, 1)}
            assert (len(w.p0.seen), len(w.d0.seen)) == (1, 0)

    run(body)


def test_clients_need_a_key_and_it_goes_no_further():
    async def body() -> None:
        async with world() as w:
            router = Router(RouterConfig(w.registry.url), SECRET, Credentials(("client key",), SECRET))
            await router.start("127.0.0.1", 0)
            await until(lambda: not router.fleet.missing())
            url, data = router.url + "/v1/completions", json.dumps({**PROMPT, "model": "tiny"})
            for key, status in (("", 401), ("wrong", 401), ("client key", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with w.session.post(url, data=data, headers=headers) as response:
                    assert response.status == status
            for peer in (w.p0, w.d0):
                keys = {seen.headers["Authorization"] for seen in peer.seen}
                assert keys == {f"Bearer {router_key(SECRET)}"}
            async with w.session.get(router.url + "/health") as response:
                assert response.status == 200
            async with w.session.get(router.url + "/metrics") as response:
                assert response.status == 401
            await router.close()

    run(body)


@pytest.mark.parametrize("form", ["", "?format=perfetto"])
def test_timeline_is_one_story_of_all_who_took_part(form: str):
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(is_cut=True, after=2)]
            found = await w.stream(PROMPT)
            status, told = await w.get(f"/v1/timelines/{found.ids.pop()}{form}")
            assert status == 200
            if form:
                names = {event["args"]["name"] for event in told["traceEvents"] if event["ph"] == "M"
                         and event["name"] == "process_name"}  # fmt: skip
                assert names == {"router: router", "p0", "d0", "d1"}
                assert len({event["pid"] for event in told["traceEvents"]}) == 4
            else:
                assert [each["name"] for each in told["instances"]] == ["p0", "d0", "d1"]
                assert [bool(tried["failure"]) for tried in told["attempts"]] == [True, False]
            assert (await w.get("/v1/timelines/unknown"))[0] == 404
            assert (await w.get("/v1/timelines/unknown?format=x"))[0] == 400

    run(body)


def test_router_tells_of_itself():
    async def body() -> None:
        async with world() as w:
            await w.stream(PROMPT)
            _, told = await w.get("/server_info")
            assert {each["name"]: each["state"] for each in told["instances"]} == {"p0": "able", "d0": "able"}
            assert told["is_ready"] is True
            path = "/v1/completions"
            assert await w.metric(f'baton_router_requests_total{{path="{path}",status="200"}}') == 1
            assert await w.metric("baton_router_added_seconds_count") == 1
            labels = 'instance="d0",role="decode",state="able"'
            assert await w.metric(f"baton_router_instance_state{{{labels}}}") == 1
            status, raw, _ = await w.post(b"no json")
            assert (status, json.loads(raw)["error"]["code"]) == (400, "no_json")
            status, _, _ = await w.post({**PROMPT, "bootstrap_room": 5})
            assert status == 403
            assert (await w.get("/nowhere"))[0] == 404

    run(body)


def test_usage_that_was_lost_with_the_instance_is_made_up_for():
    async def body() -> None:
        async with world(1, 2) as w:
            w.d0.faults = [Fault(is_cut=True, after=8)]
            ask = {"prompt": "x" * 80, "stream_options": {"include_usage": True}}
            found = await w.stream(ask)
            assert (found.texts, found.num_done) == ({0: expected("x" * 80)}, 1)
            assert found.usage == [{"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28}]
            assert len(w.d1.seen) == 0

    run(body)


def test_a_dp_rank_goes_to_its_side_and_one_that_no_instance_has_is_refused():
    ranks = {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}

    async def body() -> None:
        async with world(1, 1, local=LocalMode.AUTO, local_prefill_max=4096) as w:
            # Short, and of one token: it is handed over all the same.
            await w.stream({**PROMPT, **ranks, "max_tokens": 1})
            (prefill,), (decode,) = w.p0.seen, w.d0.seen
            assert ranks.items() <= decode.body.items()
            assert "routed_dp_rank" not in prefill.body
            assert prefill.body["disagg_prefill_dp_rank"] == 0
            assert prefill.body["bootstrap_room"] == decode.body["bootstrap_room"]
            for name in ("data_parallel_rank", "disagg_prefill_dp_rank"):
                status, raw, _ = await w.post({**PROMPT, name: 1})
                error = json.loads(raw)["error"]
                assert (status, error["param"]) == (400, name)
                assert error["message"] == f"{name} is 1: give a DP group from 0 to 0"
            assert len(w.d0.seen) == 1

    run(body)


def test_tokenizing_is_for_any_instance_of_the_model():
    async def body() -> None:
        async with world(0, 0, RouterLimits(recover_s_max=0.1)) as w:
            assert (await w.post(PROMPT, "/tokenize"))[0] == 503
            await w.join("d0", Role.DECODE)
            await w.join("b0", Role.BOTH, model="other", fingerprint="another")
            for model in ("tiny", "other"):
                status, raw, _ = await w.post({**PROMPT, "model": model}, "/tokenize")
                assert (status, json.loads(raw)) == (200, {"count": 7, "model": model})
            assert (await w.post({"model": "third"}, "/tokenize"))[0] == 404
            assert (await w.post({}, "/tokenize"))[0] == 400
            assert (await w.get("/version")) == (200, {"version": __version__})

    run(body)
