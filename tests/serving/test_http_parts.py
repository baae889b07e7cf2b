"""Problems, credentials, binding and events, each by itself."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.engine.config import EngineConfig
from baton.errors import LAST_WORDS, ConfigError
from baton.protocol.outcomes import Why
from baton.serving.fleet import Fleet, FleetInstance
from baton.serving.http import (
    DONE,
    STATUSES,
    ApiError,
    Caller,
    Credentials,
    EventSplitter,
    RouterHints,
    TokenNote,
    bad_field,
    data_event,
    failure,
    is_loopback,
    note_line,
    read_error,
    router_key,
)
from baton.serving.supervisor import InstanceSupervisor
from baton.serving.vllm import parse_instance
from baton.session.registry import Role
from baton.settings import check_binding

SECRET = b"0123456789abcdef"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_cause_of_a_handoff_has_a_status():
    assert {why.name for why in Why} <= set(STATUSES)
    assert {STATUSES[name] for name in ("PEER_LOST", "COPY_FAILED", "CORRUPTED", "REFUSED_PROMPT")} == {502}
    assert failure("OUT_OF_PAGES", "x").response().headers["Retry-After"] == "1"
    assert failure("DEADLINE", "x").status == 504


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 502, 503, 504])
def test_a_problem_survives_the_way_to_another_server(status: int):
    sent = ApiError(status, "words", param="n", code="PEER_LOST", retry_after_s=2)
    response = sent.response()
    read = read_error(status, bytes(response.body), response.headers.get("Retry-After"))
    assert (read.status, read.message, read.param, read.code) == (status, "words", "n", "PEER_LOST")
    assert (read.retry_after_s, read.type) == (2.0, sent.type)


def test_an_answer_of_another_form_is_told_as_it_is():
    problem = read_error(502, b"<html>bad gateway</html>" * 100)
    assert "bad gateway" in problem.message
    assert len(problem.message) < 200


def test_a_refused_value_is_shown_and_cut():
    problem = bad_field("prompt", "x" * 500, "send less")
    assert problem.param == "prompt"
    assert "send less" in problem.message
    assert len(problem.message) < 150


def test_keys_are_told_apart():
    credentials = Credentials(["key-of-one", "key-of-two"], SECRET)
    near = "127.0.0.1"
    assert credentials.caller(bearer("key-of-two"), near) == Caller(is_router=False, is_loopback=True)
    assert credentials.caller(bearer(router_key(SECRET)), "192.0.2.1") == Caller(is_router=True)
    for wrong in ("key-of-three", "", "key-of-on", router_key(SECRET + b"x"), "k\udcffy"):
        with pytest.raises(ApiError) as raised:
            credentials.caller(bearer(wrong), near)
        assert raised.value.status == 401
    with pytest.raises(ApiError):
        credentials.caller({"Authorization": "Basic key-of-one"}, near)


def test_without_keys_anybody_may_ask_and_only_neighbours_are_trusted():
    credentials = Credentials((), None)
    assert not credentials.caller({}, "192.0.2.1").is_trusted
    assert credentials.caller({}, "::1").is_trusted
    assert credentials.caller({}, "::ffff:127.0.0.1").is_trusted
    assert not credentials.caller({}, None).is_trusted
    assert not credentials.caller({"Forwarded": "for=192.0.2.60"}, "127.0.0.1").is_trusted
    assert not credentials.caller({"Origin": "http://a.page"}, "127.0.0.1").is_trusted
    assert not credentials.caller(bearer(router_key(SECRET)), "192.0.2.1").is_trusted


def test_binding_beyond_loopback_needs_key_and_secret():
    for host in ("127.0.0.1", "localhost", "::1"):
        check_binding(host, has_api_key=False, has_secret=False)
    check_binding("0.0.0.0", has_api_key=True, has_secret=True)
    with pytest.raises(ConfigError, match=r"API key.*--api-key-file"):
        check_binding("0.0.0.0", has_api_key=False, has_secret=True)
    with pytest.raises(ConfigError, match=r"secret.*--secret-file"):
        check_binding("0.0.0.0", has_api_key=True, has_secret=False)
    with pytest.raises(ConfigError, match="can be reached from outside"):
        check_binding("", has_api_key=False, has_secret=False)
    with pytest.raises(ConfigError, match="has no address"):
        check_binding("no such host", has_api_key=True, has_secret=True)
    assert not is_loopback("10.0.0.1")


def test_events_and_notes_are_read_however_they_are_cut():
    chance = random.Random(6)
    for _ in range(500):
        texts = [
            chance.choice(["", "a", "\n\n", "\u4f60: baton", "data: x"]) for _ in range(chance.randrange(8))
        ]
        notes = [
            TokenNote(chance.randrange(9), tuple(range(chance.randrange(4))))
            if chance.random() < 0.7
            else None
            for _ in texts
        ]
        plain = [data_event(msgspec.json.encode({"t": text})) for text in texts]
        lines = [b"" if note is None else note_line(note) for note in notes]
        stream = b"".join(line + event for line, event in zip(lines, plain, strict=True)) + DONE
        reader, found = EventSplitter(), []
        while stream:
            cut = chance.choice([1, 2, 7, 40, 1000])
            found += reader.feed(stream[:cut])
            stream = stream[cut:]
        assert found[-1].is_done
        assert [event.note for event in found[:-1]] == notes
        assert [msgspec.json.decode(event.data)["t"] for event in found[:-1]] == texts
        # What is forwarded has no notes in it, and is otherwise the same.
        assert b"".join(event.raw for event in found) == b"".join(plain) + DONE


def test_a_stream_that_is_none_is_refused():
    with pytest.raises(ApiError, match="cannot be read"):
        list(EventSplitter().feed(b": baton {nonsense\ndata: {}\n\n"))
    with pytest.raises(ApiError, match="longer than"):
        list(EventSplitter().feed(b"x" * (17 << 20)))


def test_private_fields_have_a_form():
    found = msgspec.json.decode(
        b'{"id":"cmpl-1","resume":[{"index":1,"tokens":[5]}],"done":{"0":7}}', type=RouterHints
    )
    assert (found.resume[0].tokens, found.done) == ((5,), {0: 7})
    for wrong in (
        b'{"id":"a\\r\\nSet-Cookie: x"}',
        b'{"resume":[{"index":-1,"tokens":[]}]}',
        b'{"first_token":"x"}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(wrong, type=RouterHints)


def test_an_instance_that_is_restarted_does_not_say_what_its_rank_printed():
    supervisor = InstanceSupervisor(EngineConfig("demo", name="decode-0"), lambda: None)
    supervisor.stage = f"restarting: rank 0 ended with exit code 1{LAST_WORDS}OSError: /srv/private"
    with pytest.raises(ApiError) as refused:
        supervisor.running()
    text = "decode-0 is not ready: restarting: rank 0 ended with exit code 1; ask again soon"
    assert (refused.value.status, refused.value.message) == (503, text)


def test_a_router_does_not_pass_on_what_a_rank_printed():
    (roster,) = parse_instance(Role.DECODE, "http://127.0.0.1:9")
    fleet, instance = Fleet(), FleetInstance(roster)
    fleet.instances[instance.name], fleet.is_registry_known = instance, True
    instance.health.problem = f"ended: rank 0 ended with exit code 1{LAST_WORDS}OSError: /srv/private"
    assert "(ended: rank 0 ended with exit code 1)" in fleet.missing()
