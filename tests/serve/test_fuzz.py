"""Malformed and hostile input on every port: nobody ends, hangs, grows, answers wrongly or tells a secret.

BATON_FUZZ_SEED picks another series; a failure prints what was sent.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from tests.serve.deployment import Deployment, Part, ask, deployment, oracle_text, until
from tests.serve.judging import form_of_error
from tests.serve.questions import CHAT, COMPLETIONS
from tests.serve.resources import Bounds, Snapshot, growth, lost_pages, processes, server_pages, snapshot
from tests.serve.strangers import (
    Heard,
    crowd,
    frames,
    greets,
    listening_ports,
    mutated,
    recorder,
    request,
    strange,
    throw,
)

from baton.serving.http import router_key

SEED = int(os.environ.get("BATON_FUZZ_SEED", "0"))
KEY = "a-key-for-the-tests-of-strangers"
FOX = "the quick brown fox jumps"
BODY: dict[str, Any] = {"prompt": FOX, "max_tokens": 6, "temperature": 0}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": FOX}], "max_tokens": 6, "temperature": 0}
AUTHORIZED = f"Authorization: Bearer {KEY}"
SERVE = {"transport": "tcp", "context": "512", "pool-tokens": "2048"}
CLEAN = {200, 400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 429, 431, 501, 503, 505}
"""Statuses that a hostile request may get; 500 and 502 are failures of ours."""

pytestmark = pytest.mark.serve


@dataclass(frozen=True)
class World:
    """A deployment and what it was before strangers came."""

    deployment: Deployment
    before: Snapshot

    @property
    def fronts(self) -> list[Part]:
        """Those that speak HTTP to clients."""
        assert self.deployment.router is not None
        return [self.deployment.router, self.deployment.prefill[0], self.deployment.decode[0]]

    def check(self) -> None:
        """Everybody is there and well, and answers are right."""
        assert processes(self.deployment) == self.before.pids, self.deployment.told()
        expected = oracle_text(FOX, 6)
        for part in self.fronts:
            answer = ask(part.url, COMPLETIONS, BODY, KEY)
            assert answer.status == 200, f"{part.name}: {answer.text}"
            assert answer.json["choices"][0]["text"] == expected.text, part.name


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with deployment(["tp2"], ["pp2"], serve=SERVE, api_key=KEY) as found:
        for part in (*found.instances, found.router):
            assert part is not None
            assert ask(part.url, COMPLETIONS, BODY, KEY).status == 200
        looked = World(found, snapshot(found))
        yield looked
        looked.check()
        check_left(looked)
        check_logs(found)


def check_left(world: World) -> None:
    """No pages, descriptors or memory went to strangers."""
    found = world.deployment
    until(lambda: not _lost(found), lambda: f"pages return: {_lost(found)}", 60)
    # Sockets of strangers are closed when their time is over, but for those that gloo was thrown.
    bounds = Bounds(process_bytes=96 << 20, num_fds=48, num_segments=0, num_threads=12)
    until(lambda: not _grown(world, bounds), lambda: f"no growth, but {_grown(world, bounds)}", 90, 1.0)


def _grown(world: World, bounds: Bounds) -> list[str]:
    return growth([world.before, snapshot(world.deployment)], bounds)


def _lost(found: Deployment) -> list[str]:
    return lost_pages({part.name: server_pages(found, part.name) for part in found.instances})


def check_logs(found: Deployment) -> None:
    """No key is in what the parts wrote, nor a trace of something that nobody expected."""
    secrets = {"secret": found.secret, "API key": KEY, "router key": router_key(found.secret.encode())}
    for part in found.parts:
        leaked = [name for name, value in secrets.items() if value in part.output]
        assert not leaked, f"{part.name} wrote the {leaked}"
        assert FOX not in part.output, f"{part.name} wrote a client's prompt"
        assert "Traceback" not in part.output, part.told(200)


def assert_clean(heard: Heard, what: object) -> None:
    """Every answer is a refusal in OpenAI's form, or an answer."""
    assert set(heard.statuses) <= CLEAN, f"{what!r:.600}: {heard.raw[:600]!r}"


def http_cases(chance: Random) -> Iterator[tuple[str, tuple[bytes, ...], set[int]]]:
    """A name, what is sent, and the statuses that are right; an empty set: closed, or anything clean."""
    whole = request(COMPLETIONS, BODY, AUTHORIZED)
    head = whole.partition(b"\r\n\r\n")[0]
    yield "nothing", (b"\r\n\r\n",), set()
    yield "random bytes", (chance.randbytes(3000),), {400}
    yield "no HTTP", (b"\x16\x03\x01\x02\x00\x01" + chance.randbytes(200),), {400}
    yield "HTTP/2", (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), {400, 405, 501, 505}
    yield "two lengths", (request(COMPLETIONS, BODY, AUTHORIZED, "Content-Length: 3"),), {400}
    yield "length and chunks", (request(COMPLETIONS, BODY, AUTHORIZED, "Transfer-Encoding: chunked"),), {400}
    yield "negative length", (request(COMPLETIONS, b"", AUTHORIZED, length=-5),), {400}
    yield (
        "length that is a word",
        (head.replace(b"Content-Length: ", b"Content-Length: x") + b"\r\n\r\n",),
        {400},
    )
    yield "huge length", (request(COMPLETIONS, BODY, AUTHORIZED, length=1 << 40),), {413}
    yield "huge header", (request(COMPLETIONS, BODY, AUTHORIZED, "X-Big: " + "a" * 200_000),), {400, 431}
    many = [f"X-{number}: {number}" for number in range(20_000)]
    yield "many headers", (request(COMPLETIONS, BODY, AUTHORIZED, *many),), set()
    yield "huge target", (request("/" + "a" * 100_000, BODY, AUTHORIZED),), {400, 404, 414}
    yield "header that is folded", (request(COMPLETIONS, BODY, AUTHORIZED, "X: a\r\n b"),), set()
    yield "header with a null", (request(COMPLETIONS, BODY, AUTHORIZED, "X: a\0b"),), {400}
    yield "space before the colon", (request(COMPLETIONS, BODY, AUTHORIZED, "Content-Length : 2"),), {400}
    chunked = head.replace(b"Content-Length: %d" % len(json.dumps(BODY)), b"Transfer-Encoding: chunked")
    yield "bad chunk", (chunked + b"\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",), {400}
    yield "huge chunk", (chunked + b"\r\n\r\nffffffffffffffffff\r\n{}",), {400, 413}
    yield "invalid UTF-8", (request(COMPLETIONS, b'{"prompt": "\xff\xc0"}', AUTHORIZED),), {400}
    yield "deep nesting", (request(COMPLETIONS, b'{"prompt":' + b"[" * 90_000, AUTHORIZED),), {400}
    deep = b"[" * 50_000 + b"]" * 50_000
    yield "deep unknown field", (request(COMPLETIONS, b'{"prompt":"x","z":%s}' % deep, AUTHORIZED),), {400}
    yield "a number without end", (request(COMPLETIONS, b'{"seed": ' + b"9" * 50_000, AUTHORIZED),), {400}
    surrogate = b'{"prompt": "\\ud800 x", "max_tokens": 1}'
    yield "lone surrogate", (request(COMPLETIONS, surrogate, AUTHORIZED),), {200, 400}
    yield "NaN", (request(COMPLETIONS, b'{"prompt": "x", "temperature": NaN}', AUTHORIZED),), {400}
    bomb = zlib.compress(b" " * (64 << 20))
    yield "bomb", (request(COMPLETIONS, bomb, AUTHORIZED, "Content-Encoding: deflate"),), {400, 415}
    yield "expectation", (request(COMPLETIONS, BODY, AUTHORIZED, "Expect: 200-fail"),), {200, 400, 417}
    yield (
        "upgrade",
        (request(COMPLETIONS, BODY, AUTHORIZED, "Connection: Upgrade", "Upgrade: websocket"),),
        set(),
    )
    yield "no key", (request(COMPLETIONS, BODY),), {401}
    yield "wrong key", (request(COMPLETIONS, BODY, f"Authorization: Bearer {KEY[:-1]}"),), {401}
    yield "odd key", (request(COMPLETIONS, BODY, "Authorization: Bearer \xff\xfe"),), {400, 401}
    yield "no key, bad body", (request(COMPLETIONS, b"{{{{"),), {401}
    yield "path that climbs", (request("/v1/../../etc/passwd", BODY, AUTHORIZED),), {400, 404, 405}
    yield (
        "timeline that climbs",
        (
            b"GET /v1/timelines/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n"
            + AUTHORIZED.encode()
            + b"\r\n\r\n",
        ),
        {400, 404},
    )


@pytest.mark.parametrize("which", [0, 1, 2], ids=["router", "prefill", "decode"])
def test_malformed_http(world: World, which: int) -> None:
    part = world.fronts[which]
    for name, pieces, statuses in http_cases(Random(SEED)):
        heard = throw(part.port, *pieces, hear_s=3.0, is_half_closed=name.endswith("end"))
        assert_clean(heard, (part.name, name))
        if statuses and heard.statuses:
            assert set(heard.statuses[:1]) <= statuses, f"{part.name}, {name}: {heard.raw[:300]!r}"
        assert heard.statuses or heard.is_closed or name in _SILENT, f"{part.name}, {name}: hangs"
    world.check()


_SILENT = {"nothing", "HTTP/2"}


@pytest.mark.parametrize("which", [0, 1, 2], ids=["router", "prefill", "decode"])
def test_mutated_requests(world: World, which: int) -> None:
    part, chance = world.fronts[which], Random(SEED + which)
    bodies = ((COMPLETIONS, BODY), (CHAT, TALK), (COMPLETIONS, {**BODY, "stream": True}))
    for _ in range(120):
        raw = mutated(request(*chance.choice(bodies), AUTHORIZED), chance)
        heard = throw(part.port, raw, hear_s=3.0, is_half_closed=True)
        assert_clean(heard, raw)
    world.check()


def test_mutated_requests_to_the_registry(world: World) -> None:
    registry, chance = world.deployment.registry, Random(SEED + 5)
    assert registry is not None
    for _ in range(120):
        path = chance.choice(["/v1/members/prefill-0/0", "/v1/topology", "/v1/watch"])
        raw = mutated(request(path, {"role": "prefill", "epoch": 1}).replace(b"POST", b"PUT"), chance)
        heard = throw(registry.port, raw, hear_s=3.0, is_half_closed=True)
        assert set(heard.statuses) <= CLEAN - {200}, f"{raw!r:.600}: {heard.raw[:300]!r}"
    world.check()


FIELDS = [
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "stream",
    "stream_options", "logprobs", "echo", "suffix", "best_of", "user", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos", "response_format", "tools",
    "tool_choice", "messages", "max_completion_tokens", "top_logprobs", "stop_token_ids", "lora_path",
    "return_token_ids", "text", "input_ids", "sampling_params", "z",
]  # fmt: skip
PRIVATE = ["bootstrap_host", "bootstrap_port", "bootstrap_room", "baton"]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["router", "prefill", "decode"])
def test_strange_values_in_known_fields(world: World, which: int) -> None:
    part, chance = world.fronts[which], Random(SEED + 10 + which)
    sorts = (
        (COMPLETIONS, BODY),
        (CHAT, TALK),
        ("/generate", {"text": FOX, "sampling_params": {"max_new_tokens": 3}}),
    )
    for _ in range(120):
        path, plain = chance.choice(sorts)
        body = strange(plain, FIELDS, chance)
        answer = ask(part.url, path, json.dumps(body).encode(), KEY)
        assert answer.status in CLEAN, f"{part.name} {path} {body!r:.600}: {answer.status} {answer.text:.600}"
        if answer.status != 200:
            assert form_of_error(answer.body) == "", f"{body!r:.300}: {answer.text:.300}"
    world.check()


@pytest.mark.parametrize("which", [0, 1, 2], ids=["router", "prefill", "decode"])
def test_strange_rooms(world: World, which: int) -> None:
    """What only a router sends: from loopback it is honoured, so that it has to be understood or refused."""
    part, chance = world.fronts[which], Random(SEED + 20 + which)
    port = int(world.deployment.prefill[0].option("bootstrap-port"))
    plain = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5}
    for _ in range(40):
        body = strange(plain, PRIVATE, chance)
        try:
            answer = ask(part.url, COMPLETIONS, json.dumps(body).encode(), KEY, wait_s=3.0)
        except TimeoutError:
            # A room that nobody else enters is waited for, and left.
            continue
        assert answer.status in CLEAN | {502, 504}, f"{part.name} {body!r:.600}: {answer.text:.600}"
        if answer.status != 200:
            assert form_of_error(answer.body) == "", f"{body!r:.300}: {answer.text:.300}"
    world.check()


def test_pipelined_requests_are_answered_in_order(world: World) -> None:
    other = {**BODY, "prompt": "hello"}
    for part in world.fronts:
        last = request(COMPLETIONS, other, AUTHORIZED, "Connection: close")
        heard = throw(
            part.port, request(COMPLETIONS, BODY, AUTHORIZED, "Connection: keep-alive") + last, hear_s=60
        )
        assert heard.statuses == [200, 200], heard.raw[:600]
        texts = [oracle_text(prompt, 6).text for prompt in (FOX, "hello")]
        places = [heard.raw.find(json.dumps(text)[1:-1].encode()) for text in texts]
        raw_places = [heard.raw.find(text.encode()) for text in texts]
        found = [max(pair) for pair in zip(places, raw_places, strict=True)]
        assert 0 <= found[0] < found[1], heard.raw[:900]


def test_smuggled_requests_are_not_answered(world: World) -> None:
    """The second request is inside the first one's body for one reader and after it for another."""
    hidden = request("/drain", b"{}", AUTHORIZED)
    for part in world.fronts:
        for headers in (
            ("Transfer-Encoding: chunked",),
            ("Transfer-Encoding: xchunked",),
            ("Content-Length: 0",),
        ):
            raw = request(COMPLETIONS, b"0\r\n\r\n" + hidden, AUTHORIZED, *headers)
            heard = throw(part.port, raw, hear_s=3.0)
            assert 200 not in heard.statuses, f"{part.name} {headers}: {heard.raw[:300]!r}"
    world.check()


def test_slow_and_silent_clients_hold_up_nobody(world: World) -> None:
    half = request(COMPLETIONS, BODY, AUTHORIZED)[:-10]
    for part in world.fronts:
        with crowd(part.port, 60), crowd(part.port, 60, half), crowd(part.port, 20, half[:40]):
            world.check()


def control_ports(world: World) -> list[int]:
    """Where instances speak to each other: coordinators, and the transport of each rank that has one open."""
    told = [part.ask("/server_info", key=KEY).json["coordinator"] for part in world.deployment.instances]
    coordinators = {int(address.rpartition(":")[2]) for address in told}
    return sorted(coordinators | {port for port in other_ports(world) if greets(port)})


def other_ports(world: World) -> list[int]:
    """Every port of the deployment that does not speak HTTP."""
    found: set[int] = set()
    for pid in processes(world.deployment).values():
        found |= set(listening_ports(pid))
    return sorted(found - {part.port for part in world.deployment.parts})


def test_nothing_listens_beyond_loopback(world: World) -> None:
    assert int(world.deployment.prefill[0].option("bootstrap-port")) in other_ports(world)
    # Two coordinators, and the transport of both decode ranks.
    assert len(control_ports(world)) >= 4
    for pid in processes(world.deployment).values():
        assert _beyond(pid) == [], pid


def _beyond(pid: int) -> list[str]:
    """Listening addresses of a process that other machines could reach."""
    ports = set(listening_ports(pid))
    with open(f"/proc/{pid}/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    mine = [row[1] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) in ports]
    return [address for address in mine if not address.startswith("0100007F")]


def test_noise_on_the_control_channel_and_the_transport(world: World) -> None:
    for port in control_ports(world):
        for words in frames(Random(SEED + port)):
            throw(port, words, hear_s=0.05)
    world.check()


def test_noise_on_the_collectives(world: World) -> None:
    """Ranks of an instance meet over gloo, which keeps the descriptor of whoever connects: a few only."""
    for port in set(other_ports(world)) - set(control_ports(world)):
        for words in list(frames(Random(SEED + port)))[:6]:
            throw(port, words, hear_s=0.05)
    world.check()


def test_silence_on_the_control_channel_and_the_transport(world: World) -> None:
    for port in control_ports(world):
        with crowd(port, 80), crowd(port, 80, b"\x00\x00"):
            world.check()


def test_a_recorded_link_is_worth_nothing(world: World) -> None:
    """What a decode instance said to a prefill coordinator, said again: whole, in part, and mutated."""
    prefill, decode = world.deployment.prefill[0], world.deployment.decode[0]
    port = int(prefill.option("bootstrap-port"))
    with recorder(port) as relay:
        said = _handed_over(world, relay.port, 77)
        assert said is None or said.status in (200, 502, 503), said.text
        assert relay.said, "the decode instance did not dial the address it was told"
        words = bytes(max(relay.said, key=len))
    assert len(words) > 40
    chance = Random(SEED)
    for replay in (words, words[: len(words) // 2], words[:40], *(mutated(words, chance) for _ in range(40))):
        throw(port, replay, hear_s=0.3)
        heard = throw(port, replay, hear_s=0.3, is_half_closed=True)
        # A reason and no introduction: what a peer is told first of an instance is how its cache lies.
        assert b"layout" not in heard.raw, replay
    assert decode.is_alive
    world.check()


def _handed_over(world: World, port: int, room: int) -> Any:
    """Both legs by hand, with the decode one sent through another port than the coordinator's own."""
    prefill, decode = world.deployment.prefill[0], world.deployment.decode[0]
    body = {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_room": room}
    own = {**body, "bootstrap_port": int(prefill.option("bootstrap-port"))}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, prefill.url, COMPLETIONS, own, KEY)
        second = ask(decode.url, COMPLETIONS, {**body, "bootstrap_port": port}, KEY)
        first.result()
    return second


def test_the_checks_see_a_leak(world: World, tmp_path: Any) -> None:
    """A part that writes its secret, and one that has another process, are found."""
    part = world.deployment.registry
    assert part is not None
    log, part.log = part.log, tmp_path / "leak.log"
    try:
        part.log.write_text(f"here: {world.deployment.secret}\n")
        with pytest.raises(AssertionError, match="wrote the"):
            check_logs(world.deployment)
    finally:
        part.log = log
    first = next(iter(world.before.pids))
    spoiled = World(world.deployment, Snapshot(0.0, {}, {**world.before.pids, first: 1}, {}, frozenset()))
    with pytest.raises(AssertionError):
        spoiled.check()
