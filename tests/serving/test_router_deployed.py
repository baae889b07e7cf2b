"""The router before real instances: killed ranks, drained and joining servers, and the oracle's answers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import pytest
from safetensors.torch import load_file
from tests.engine.tiny import oracle_logprobs
from tests.serve.deployment import Deployment, Part, deployment, oracle_text, router_part, serve_part, until
from tests.serve.speaking import encode, model
from tests.serving.router_world import Streamed, read_stream, without_model

pytestmark = pytest.mark.serve

NUM_TOKENS = 48
LIMIT_S = 120.0
PROMPTS = ("the fox", "a relay race", "hand over", "seven", "under the stars", "baton", "quick brown", "one")


@pytest.fixture(scope="module")
def world() -> Iterator[Deployment]:
    with deployment(
        prefill=["tp1", "pp2"], decode=["tp2", "tp1"], route={"local": "never", "silence-s": "5"}
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def _all_able(request: pytest.FixtureRequest) -> None:
    """Each test begins with every instance there."""
    found: Deployment = request.getfixturevalue("world")
    for each in found.instances:
        each.wait()  # by its own word: the router may not have noticed yet that it was ended
    until(lambda: set(states(found).values()) == {"able"}, f"all able: {states(found)}")


def states(world: Deployment) -> dict[str, str]:
    return {each["name"]: each["state"] for each in world.ask("/server_info").json["instances"]}


def busy(world: Deployment, role: str) -> list[str]:
    """Instances of a role that have a request now."""
    instances = world.ask("/server_info").json["instances"]
    return [each["name"] for each in instances if each["role"] == role and each["num_in_flight"]]


def part(world: Deployment, name: str) -> Part:
    return next(each for each in world.instances if each.name == name)


def prompt() -> str:
    """One whose answer does not hang on the order of a sum."""
    return next(each for each in PROMPTS if oracle_text(each, NUM_TOKENS, ignore_eos=True).is_certain)


def body(text: str, **more: Any) -> dict[str, Any]:
    return {
        "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, **more
    }  # fmt: skip


class Reading(threading.Thread):
    """A client that streams; `lines` grows as events come."""

    def __init__(self, world: Deployment, asked: dict[str, Any], path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self.lines: list[bytes] = []
        self.status = 0
        self.ended_s = 0.0
        self._url = urlsplit(world.url)
        self._asked = asked
        self._path = path
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port, timeout=LIMIT_S)
        connection.request("POST", self._path, json.dumps(self._asked))
        response = connection.getresponse()
        self.status = response.status
        while line := response.readline():
            self.lines.append(line)
        self.ended_s = monotonic()
        connection.close()

    @property
    def num_events(self) -> int:
        return sum(line.startswith(b"data: ") for line in self.lines)

    def read(self) -> bytes:
        self.join(LIMIT_S)
        assert not self.is_alive()
        assert self.status == 200, self.lines
        return b"".join(self.lines)

    def streamed(self) -> Streamed:
        return read_stream(self.read())

    def generated(self) -> list[dict[str, Any]]:
        """The events of a stream of /generate, up to its end."""
        *events, end = self.read().decode().removesuffix("\n\n").split("\n\n")
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def decoding(
    world: Deployment, asked: dict[str, Any], num_events: int, path: str = "/v1/completions"
) -> Iterator[tuple[Reading, str]]:
    """A stream in the middle of its answer, and who decodes it; decode ranks stand still meanwhile."""
    pids = [pid for each in world.decode for pid in each.rank_pids]
    while True:
        reading = Reading(world, asked, path)
        until(lambda: reading.num_events > num_events or not reading.is_alive(), "some events", every_s=0.002)  # noqa: B023
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            # what was sent before they stopped arrives; a stream that is over by then was too quick
            sleep(0.2)
            if reading.is_alive() and (names := busy(world, "decode")):
                yield reading, names[0]
                return
        finally:
            for pid in pids:
                _continue(pid)
        reading.read()


def check(found: Streamed, texts: dict[int, str]) -> None:
    assert found.errors == []
    assert found.texts == texts
    assert (found.num_done, len(found.ids)) == (1, 1)
    assert set(found.finishes.values()) == {"length"}


def right(text: str) -> str:
    return oracle_text(text, NUM_TOKENS, ignore_eos=True).text


def kill_rank(part: Part) -> None:
    os.kill(part.rank_pids[0], signal.SIGKILL)


def end_server(part: Part) -> None:
    """Unlike a rank, which its server restarts only so often."""
    part.kill()
    part.start()


@pytest.mark.parametrize("end", [kill_rank, end_server])
def test_stream_goes_on_when_decode_is_killed_in_the_middle(world: Deployment, end: Callable[[Part], None]):
    with decoding(world, body(prompt()), num_events=3) as (reading, name):
        end(part(world, name))
    check(reading.streamed(), {0: right(prompt())})
    resumes = _metric(world, "baton_router_resumes_total")
    assert resumes >= 1


def test_batch_goes_on_when_decode_is_killed_in_the_middle(world: Deployment):
    texts = [each for each in PROMPTS if oracle_text(each, NUM_TOKENS, ignore_eos=True).is_certain][:3]
    options = {"stream_options": {"include_usage": True}, "n": 2}
    asked = {**body(prompt(), **options), "prompt": texts}
    with decoding(world, asked, num_events=8) as (reading, name):
        kill_rank(part(world, name))
    found = reading.streamed()
    check(found, {place * 2 + k: right(text) for place, text in enumerate(texts) for k in (0, 1)})
    assert [usage["completion_tokens"] for usage in found.usage] == [2 * len(texts) * NUM_TOKENS]


def generate_body(**fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"sampling_params": params, "stream": True, **fields}


def test_stream_of_generate_goes_on_when_decode_is_killed_in_the_middle(world: Deployment):
    with decoding(world, generate_body(text=prompt()), 3, "/generate") as (reading, name):
        num_resumes = _metric(world, "baton_router_resumes_total")
        end_server(part(world, name))
    events = reading.generated()
    texts = [event["text"] for event in events]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == right(prompt())
    assert len(events[-1]["output_ids"]) == NUM_TOKENS
    (identity,) = {event["meta_info"]["id"] for event in events}
    assert identity.startswith("gen-")
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": NUM_TOKENS}
    assert _metric(world, "baton_router_resumes_total") > num_resumes


def test_log_probabilities_of_generate_are_not_resumed(world: Deployment):
    asked = generate_body(text=prompt(), return_logprob=True)
    with decoding(world, asked, 3, "/generate") as (reading, name):
        end_server(part(world, name))
    lines = reading.read().decode()
    assert "cannot be resumed: each event has the log-probabilities of all tokens so far" in lines
    assert "[DONE]" not in lines


@pytest.mark.parametrize("is_stream", [True, False])
def test_input_embeddings_are_handed_over_through_the_router(world: Deployment, is_stream: bool):
    num_handoffs = _metric(world, "baton_router_handoffs_total")
    table = load_file(model() / "model.safetensors")["model.embed_tokens.weight"].float()
    rows = table[encode(prompt())].tolist()
    asked = generate_body(input_embeds=rows, stream=is_stream)
    if is_stream:
        answer = Reading(world, asked, "/generate").generated()[-1]
    else:
        answer = world.ask("/generate", asked).json
    assert answer["text"] == right(prompt())
    assert answer["meta_info"]["prompt_tokens"] == len(rows)
    several = world.ask("/generate", generate_body(input_embeds=[rows, rows], stream=False)).json
    assert [each["text"] for each in several] == [right(prompt())] * 2
    assert _metric(world, "baton_router_handoffs_total") >= num_handoffs + 2


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_log_probabilities_of_a_prompt_are_the_oracles(world: Deployment, max_tokens: int):
    asked = body(prompt(), max_tokens=max_tokens, echo=True, logprobs=1, stream=False)
    expected = oracle_logprobs(model(), ids := encode(prompt()))
    for _ in range(4):  # on more than one instance, the second time with the prefix in its cache
        found = world.ask("/v1/completions", asked).json["choices"][0]["logprobs"]["token_logprobs"]
        assert len(found) == len(ids) + max_tokens
        assert found[0] is None
        values = [expected[row, token].item() for row, token in enumerate(ids[1:])]
        assert found[1 : len(ids)] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_request_is_made_again_when_a_rank_dies_before_the_first_token(
    world: Deployment, role: str, is_stream: bool
):
    stopped = [pid for each in world.prefill for pid in each.rank_pids]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        reading = Reading(world, body(prompt(), stream=is_stream))
        name = until(lambda: busy(world, role), "who has it")[0]
        kill_rank(part(world, name))
    finally:
        for pid in stopped:
            _continue(pid)
    if is_stream:
        check(reading.streamed(), {0: right(prompt())})
    else:
        reading.join(LIMIT_S)
        assert json.loads(b"".join(reading.lines))["choices"][0]["text"] == right(prompt())


def test_drained_instance_finishes_what_it_has_and_another_joins(world: Deployment):
    assert world.router is not None
    with decoding(world, body(prompt()), num_events=1) as (reading, name):
        answer = world.router.ask(f"/drain?instance={name}", {})
        assert answer.status == 200
        until(lambda: states(world)[name] == "draining", "the router hears of it")
    others = [Reading(world, body(text)) for text in PROMPTS[:2]]
    check(reading.streamed(), {0: right(prompt())})
    assert [other.streamed().num_done for other in others] == [1, 1]
    told = world.ask(f"/v1/timelines/{others[0].streamed().ids.pop()}").json
    assert name not in told["attempts"][0]["names"]
    joined = serve_part(world.folder, "decode-9", "decode", "tp1", registry=world.registry.url)
    with joined:
        joined.wait()
        until(lambda: states(world).get("decode-9") == "able", "it joins")
        assert joined.end() == 0
        until(lambda: states(world).get("decode-9") in (None, "leaving", "unhealthy"), "it leaves")
    part(world, name).end()
    part(world, name).start().wait()
    until(lambda: "decode-9" not in states(world), "it is forgotten")


def test_stream_goes_on_when_decode_is_stopped(world: Deployment):
    with decoding(world, body(prompt()), num_events=1) as (reading, name):
        stopped = part(world, name)
        os.kill(stopped.pid, signal.SIGSTOP)
        pids = [stopped.pid, *stopped.rank_pids]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        check(reading.streamed(), {0: right(prompt())})
        check(Reading(world, body(prompt())).streamed(), {0: right(prompt())})
    finally:
        for pid in pids:
            _continue(pid)


def test_registry_may_be_away(world: Deployment):
    assert world.registry is not None
    world.registry.kill()
    check(Reading(world, body(prompt())).streamed(), {0: right(prompt())})
    world.registry.start().wait()
    check(Reading(world, body(prompt())).streamed(), {0: right(prompt())})
    told = world.ask("/server_info").json["instances"]
    assert {each["name"] for each in told} == {each.name for each in world.instances}  # none was dropped
    until(lambda: set(states(world).values()) == {"able"}, f"all able: {told}")


def test_second_router_keeps_short_prompts_on_decode_by_measured_rates(world: Deployment):
    assert world.registry is not None
    for text in PROMPTS[:4]:  # so that there is something measured
        check(Reading(world, body(text)).streamed(), {0: right(text)})
    folder = world.folder / "second"
    folder.mkdir()
    shutil.copy(world.folder / "secret", folder)
    with router_part(folder, world.registry.url, policy="prefix_aware") as second:
        second.wait()
        answer = second.ask("/v1/completions", {**body(prompt()), "stream": False})
        assert answer.json["choices"][0]["text"] == right(prompt())
        lines = [without_model(line) for line in second.ask("/metrics").text.splitlines()]
        told = [line for line in lines if line.startswith("baton_router_local_")]
        assert any("threshold_tokens" in line and float(line.split()[-1]) > 0 for line in told), told
        assert 'baton_router_local_prefills_total{reason="short"} 1.0' in told


def test_no_page_is_lost(world: Deployment):
    def held() -> list[int]:
        told = [each.ask("/server_info").json["pages"] for each in world.instances]
        return [pages["used"] + pages["leased"] + pages["quarantined"] for pages in told]

    until(lambda: not any(held()), f"all pages back: {held()}")


def _continue(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _metric(world: Deployment, name: str) -> float:
    lines = world.ask("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
