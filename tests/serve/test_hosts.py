"""Two hosts, joined by a slow cable: registry and prefill on one, decode, router and client on the other."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from tests.ports import free_port
from tests.serve.deployment import Deployment, Part, deployment, model, oracle_text, until
from tests.serve.hosts import Host, NoHosts, two_hosts

from baton.engine.trace import RequestTrace
from baton.observe import covered_s

pytestmark = pytest.mark.serve

LIMIT_S = 240.0
MBIT = 4.0
"""Half a megabyte a second."""
WORDS = "the quick brown fox jumps over the lazy dog and runs on to the next one who waits for it "
NUM_TOKENS = 24
CHUNK_TOKENS = 64
"""Prompts longer than this are handed over whatever the router measures."""


@dataclass(frozen=True)
class World:
    """Both hosts and what runs on them."""

    one: Host
    other: Host
    deployment: Deployment
    key: str

    @property
    def parts(self) -> dict[str, Part]:
        return {part.name: part for part in self.deployment.parts}

    def ask(self, path: str, body: Any = None, key: str | None = None) -> Any:
        """A client beside the router."""
        return self.deployment.ask(path, body, key)

    def states(self) -> dict[str, str]:
        """How the router sees its instances."""
        return {each["name"]: each["state"] for each in self.ask("/server_info").json["instances"]}

    def until_able(self) -> None:
        wanted = {"prefill-0": "able", "decode-0": "able"}
        until(lambda: self.states() == wanted, "the router sees both instances", LIMIT_S)

    def source(self, identity: str) -> RequestTrace:
        """The prefill side of a request, once its trace is complete."""

        def told() -> Any:
            answer = self.ask(f"/v1/timelines/{identity}")
            instances = answer.json["instances"] if answer.status == 200 else []
            jobs = [job for each in instances for job in each["jobs"] if job["side"] == "source"]
            return jobs[0]["trace"] if jobs else None

        found = until(told, f"the trace of {identity}", LIMIT_S)
        return msgspec.convert(found, RequestTrace, str_keys=True)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    key = secrets.token_hex(16)
    serve = {"transport": "tcp", "pool-tokens": "8192", "chunk-tokens": str(CHUNK_TOKENS)}
    with ExitStack() as stack:
        try:
            one, other = stack.enter_context(two_hosts())
        except NoHosts as reason:
            pytest.skip(f"two hosts need network namespaces, which are not allowed here: {reason}")
        hosts = {"registry": one, "prefill": one, "decode": other, "router": other}
        placed = deployment(["pp2"], ["tp2"], serve=serve, api_key=key, hosts=hosts)
        found = World(one, other, stack.enter_context(placed), key)
        found.until_able()
        yield found


def long(name: str) -> str:
    """A long prompt that shares no beginning with another."""
    return f"{name}, {WORDS * 24}"


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}


def expected(prompt: str) -> str:
    found = oracle_text(prompt, NUM_TOKENS, ignore_eos=True)
    assert found.is_certain, "another prompt is needed"
    return found.text


def test_a_key_is_needed_away_from_loopback(world) -> None:
    answer = world.ask("/v1/completions", body("hello"), key="the wrong one")
    assert answer.status == 401
    for name in ("prefill-0", "decode-0"):
        assert world.parts[name].ask("/v1/models").status == 401
        room = body("hello", bootstrap_host="10.9.9.9", bootstrap_port=1, bootstrap_room=7)
        refused = world.parts[name].ask("/v1/completions", room, world.key)
        assert refused.status == 403, "an API key is not the router's credential"


@pytest.mark.skipif(importlib.util.find_spec("sglang_router") is None, reason="there is no sglang-router")
def test_a_stock_router_has_the_key_of_a_router(world, tmp_path) -> None:
    """The launch line of docs/deploy.md."""
    prefill, decode = world.parts["prefill-0"], world.parts["decode-0"]
    words = ["route", "--print-key", "--secret-file", prefill.option("secret-file")]
    command = [sys.executable, "-m", "baton", *words]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    words = ["--pd-disaggregation", "--prefill", prefill.url, prefill.option("bootstrap-port")]
    words += ["--decode", decode.url, "--api-key", key]
    words += ["--prometheus-port", str(free_port()), "--disable-retries"]
    module = "sglang_router.launch_router"
    router = Part("stock-router", words, free_port(), tmp_path, module, host=world.other).start()
    try:
        until(lambda: router.is_healthy, "the stock router is up", LIMIT_S)
        prompt = long("by a stock router")
        asked = body(prompt, model=str(model()))
        # It knows its workers a moment after it listens.
        answer = until(
            lambda: (found := router.ask("/v1/completions", asked, key)).status == 200 and found,
            "the stock router has its workers",
            LIMIT_S,
        )
        assert answer.json["choices"][0]["text"] == expected(prompt)
        assert 'stage="exposed"' in prefill.ask("/metrics", key=world.key).text, "the cache was handed over"
        assert router.ask("/v1/completions", asked, world.key).status == 401, "clients have its key too"
    finally:
        router.end()
        print(router.told(20))


def test_the_answer_is_that_of_one_machine_and_the_cable_can_be_seen(world) -> None:
    speeds = {}
    for mbit in (0.0, MBIT):
        if mbit:
            world.one.limit(mbit)
        try:
            prompt = long(f"at {mbit}")
            answer = world.ask("/v1/completions", body(prompt))
            assert answer.status == 200, answer.text
            assert answer.json["choices"][0]["text"] == expected(prompt)
            story = world.source(answer.json["id"])
        finally:
            if mbit:
                world.one.limit(0)
        copies = [copy for of_rank in story.copies.values() for copy in of_rank]
        num_bytes = sum(copy.num_bytes for copy in copies)
        # While the next piece is computed the cable may be idle, which is not its fault.
        speeds[mbit] = num_bytes / covered_s((copy.submitted_s, copy.ended_s) for copy in copies)
        assert num_bytes > 500_000, "too little to see a cable by"
    cable = MBIT * 1e6 / 8
    print(f"speeds in bytes/s by the limit in Mbit/s: {speeds}")
    assert 0.3 * cable < speeds[MBIT] < 1.1 * cable
    assert speeds[0.0] > 1.3 * cable  # twice as fast and more where nothing else runs


def test_a_stream_goes_on_when_the_cable_is_cut_after_the_handoff(world) -> None:
    prompt = long("a stream that goes on")
    asked = body(prompt, stream=True, max_tokens=400)
    text, is_cut = "", False
    try:
        with world.other.stream(world.parts["router"].url, "/v1/completions", asked, world.key) as lines:
            assert lines.line() == "200\n"
            for event in lines.events():
                if event == "[DONE]":
                    break
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                if not is_cut and len(text) > 20:
                    world.one.cut()
                    is_cut = True
            else:
                raise AssertionError("the stream broke off")
    finally:
        world.one.mend()
    assert is_cut
    wanted = oracle_text(prompt, 400, ignore_eos=True)
    if wanted.is_certain:
        assert text == wanted.text
    world.until_able()


def test_a_cable_cut_in_a_handoff_is_an_answer_all_the_same_or_a_clean_error(world) -> None:
    world.one.limit(MBIT / 4)  # the cache takes some seconds now
    text, end = "", None
    prompt, healed = long("during"), long("healed")
    asked = body(prompt, stream=True)
    try:
        with world.other.stream(world.parts["router"].url, "/v1/completions", asked, world.key) as lines:
            until(
                lambda: (
                    world.parts["prefill-0"].ask("/server_info", key=world.key).json["load"]["num_running"]
                ),
                "the prompt is being prefilled",
                LIMIT_S,
            )
            world.one.cut()
            status = int(lines.line())
            if status == 200:
                for event in lines.events():
                    end = event
                    if event == "[DONE]":
                        break
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
            else:
                end = lines.rest().decode()
    finally:
        world.one.mend()
        world.one.limit(0)
    print(f"after the cut: status {status}, {len(text)} characters, end {str(end)[:300]}")
    if end == "[DONE]":
        assert text == expected(prompt)
    else:
        assert status in (200, 502, 503, 504)
        assert "error" in str(end)
        assert expected(prompt).startswith(text)
    world.until_able()
    answer = world.ask("/v1/completions", body(healed))
    assert answer.json["choices"][0]["text"] == expected(healed)
    assert world.source(answer.json["id"]).copies, "it is handed over again"
    until(lambda: _are_settled(world), "all pages are back", LIMIT_S)


def _are_settled(world: World) -> bool:
    """Whether no page of either instance is leased or in quarantine."""
    names = ("prefill-0", "decode-0")
    found = [world.parts[name].ask("/server_info", key=world.key).json["pages"] for name in names]
    return not any(each["leased"] or each["quarantined"] for each in found)
