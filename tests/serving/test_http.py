"""Every request passes the edge: keys first, sizes and times bounded, every refusal of one form."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import pytest
from aiohttp import web
from tests.serving.http_world import API_KEY, SECRET, client, raw, site

from baton.errors import BatonError
from baton.serving.http import Credentials, EventStream, HttpLimits, HttpServer, failure, router_key


async def problem_of(response) -> dict:
    body = await response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def test_a_key_is_asked_for_before_the_body_is_read():
    async def play():
        async with site() as found:
            # The body never comes: who waits for it would never answer.
            answer = await raw(
                found, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"
            )
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"WWW-Authenticate: Bearer" in answer
            async with client(found, "sk-a-wrong-key") as http, http.get("/caller") as response:
                assert response.status == 401
                error = await problem_of(response)
                assert error["code"] == "invalid_api_key"
                assert error["type"] == "authentication_error"
                assert "sk-a-wrong-key" not in json.dumps(error)
            async with client(found, None) as http, http.get("/health") as response:
                assert response.status == 200

    asyncio.run(play())


def test_the_router_key_is_a_key_and_says_who_calls():
    async def play():
        async with site() as found:
            for key, is_router in ((API_KEY, False), (router_key(SECRET), True)):
                async with client(found, key) as http, http.get("/caller") as response:
                    assert await response.json() == {"is_router": is_router, "is_loopback": True}
            headers = {"X-Forwarded-For": "203.0.113.7"}
            async with client(found) as http, http.get("/caller", headers=headers) as response:
                assert await response.json() == {"is_router": False, "is_loopback": False}

    asyncio.run(play())


def test_bodies_have_a_size_and_a_time():
    async def play():
        async with site(HttpLimits(body_bytes_max=1000)) as found:
            async with client(found) as http:
                async with http.post("/echo", data=b"x" * 1000) as response:
                    assert (response.status, await response.read()) == (200, b"x" * 1000)
                async with http.post("/echo", data=b"x" * 1001) as response:
                    assert response.status == 413
                    assert (await problem_of(response))["code"] == "too_large"
                headers = {"Content-Encoding": "gzip"}
                async with http.post("/echo", data=b"x", headers=headers) as response:
                    assert response.status == 415
            head = f"POST /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n".encode()
            chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"y" * 2048 + b"\r\n"
            assert (await raw(found, chunked)).startswith(b"HTTP/1.1 413 ")
        async with site(HttpLimits(body_s_max=0.2)) as found:
            slow = head + b"Content-Length: 10\r\n\r\nabc"
            assert (await raw(found, slow)).startswith(b"HTTP/1.1 408 ")

    asyncio.run(play())


def test_what_is_not_there_is_said_in_the_same_form():
    async def play():
        async with site() as found, client(found) as http:
            async with http.get("/nothing") as response:
                assert response.status == 404
                error = await problem_of(response)
                assert error["code"] == "unknown_url"
                assert "/nothing" in error["message"]
            async with http.delete("/echo") as response:
                assert response.status == 405
                assert response.headers["Allow"] == "POST"
                assert "POST" in (await problem_of(response))["message"]
            async with http.get("/fail/full") as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "3")

    asyncio.run(play())


def test_failures_are_told_in_one_line_and_bugs_keep_their_words(caplog: pytest.LogCaptureFixture):
    async def play():
        async with site() as found, client(found) as http:
            async with http.get("/fail/bug") as response:
                assert response.status == 500
                assert "RuntimeError" not in await response.text()
            async with http.get("/fail/engine") as response:
                assert response.status == 500
                assert (await problem_of(response))["message"] == "a rank ended"
            async with http.post("/echo", data=b"a very private prompt", headers={"Content-Encoding": "br"}):
                pass

    with caplog.at_level(logging.INFO, logger="baton.serving.http"):
        asyncio.run(play())
    lines = [record.getMessage() for record in caplog.records if record.name == "baton.serving.http"]
    assert sum("/fail/{how}: 500 in" in line and "reason ENGINE a rank ended" in line for line in lines) == 1
    assert sum("/echo: 415 in" in line for line in lines) == 1
    assert "private" not in caplog.text


def test_a_request_is_one_line_with_its_path_and_the_names_that_it_has(caplog: pytest.LogCaptureFixture):
    ids: list[str] = []

    async def play():
        async with site() as found, client(found) as http:
            async with http.post("/echo", data=b"x", headers={"X-Request-Id": "mine-7"}) as response:
                assert response.headers["X-Request-Id"] == "mine-7"
            async with http.post("/echo", data=b"x", headers={"X-Request-Id": "no spaces here"}) as response:
                own = response.headers["X-Request-Id"]
                assert re.fullmatch("req-[0-9a-f]{32}", own)
                ids.append(own)
            async with http.get("/nothing/here", headers={"X-Request-Id": "mine-8"}) as response:
                assert (response.status, response.headers["X-Request-Id"]) == (404, "mine-8")
            async with http.get("/caller") as response:
                assert response.headers["X-Request-Id"] not in ("", *ids)

    with caplog.at_level(logging.INFO, logger="baton.serving.http"):
        asyncio.run(play())
    records = [record for record in caplog.records if record.name == "baton.serving.http"]
    assert [
        (f["method"], f["path"], f["status"], f.get("client_id")) for f in (r.fields for r in records)
    ] == [
        ("POST", "/echo", 200, "mine-7"),
        ("POST", "/echo", 200, None),
        ("GET", "/nothing/here", 404, "mine-8"),
    ]
    assert records[0].getMessage().startswith("POST /echo: 200 in ")
    assert records[1].fields["request"] == ids[0]
    assert re.search(r" s, request req-\w+, client_id mine-8, reason unknown_url$", records[2].getMessage())


@pytest.mark.parametrize(
    ("path", "status", "options"),
    [
        ("/echo", 401, {"headers": {"Authorization": "Bearer wrong-key"}}),
        ("/nothing/here", 404, {}),
        ("/caller", 405, {}),
        ("/echo", 413, {"data": b"x" * (HttpLimits().body_bytes_max + 1)}),
        ("/echo", 415, {"headers": {"Content-Encoding": "br"}}),
        ("/fail/full", 429, {}),
        ("/fail/lost", 502, {}),
        ("/fail/loading", 503, {}),
        ("/fail/bug", 500, {}),
    ],
)
def test_every_error_has_an_id_which_is_in_its_log_line(
    caplog: pytest.LogCaptureFixture, path: str, status: int, options: dict[str, Any]
):
    method = "GET" if path.startswith("/fail") else "POST"

    async def play() -> str:
        async with site() as found, client(found) as http, http.request(method, path, **options) as response:
            assert response.status == status
            return response.headers["X-Request-Id"]

    with caplog.at_level(logging.INFO, logger="baton.serving.http"):
        identity = asyncio.run(play())
    (line,) = [record for record in caplog.records if "fields" in vars(record)]
    assert identity
    assert (line.fields["status"], line.fields["request"]) == (status, identity)


def test_responses_have_their_ids_and_failed_streams_their_cause_in_the_log(caplog: pytest.LogCaptureFixture):
    async def stream(request: web.Request) -> web.StreamResponse:
        events = EventStream(request, "cmpl-1", 5.0)
        await events.write(b"data: 1\n\n")
        return await events.fail(failure("PEER_LOST", "prefill-0 has ended"))

    async def whole(request: web.Request) -> web.StreamResponse:
        return web.Response(headers={"X-Request-Id": "cmpl-2"})

    async def play():
        server = HttpServer(Credentials())
        server.app.router.add_post("/stream", stream)
        server.app.router.add_post("/whole", whole)
        await server.start("127.0.0.1", 0)
        async with client(server) as http, http.post("/stream", headers={"X-Request-Id": "mine"}) as response:
            assert response.headers["X-Request-Id"] == "mine"
            assert b"PEER_LOST" in await response.read()
        async with client(server) as http:
            async with http.post("/whole", headers={"X-Request-Id": "mine"}) as response:
                assert response.headers["X-Request-Id"] == "mine"
            async with http.post("/whole") as response:
                assert response.headers["X-Request-Id"] == "cmpl-2"
        await server.close()

    with caplog.at_level(logging.INFO, logger="baton.serving.http"):
        asyncio.run(play())
    record, *others = [record for record in caplog.records if record.name == "baton.serving.http"]
    assert record.levelname == "WARNING"
    assert "request cmpl-1, client_id mine, reason PEER_LOST prefill-0 has ended" in record.getMessage()
    names = [(other.fields["request"], other.fields.get("client_id")) for other in others]
    assert names == [("cmpl-2", "mine"), ("cmpl-2", None)]


def test_what_is_no_http_is_refused_and_no_key_is_logged(caplog: pytest.LogCaptureFixture):
    strange = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /caller HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + API_KEY.encode() + b"\x00\r\n\r\n",
        b"GET /caller HTTP/1.1\r\nAuthorization Bearer " + API_KEY.encode() + b"\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]

    async def play():
        async with site() as found:
            for data in strange:
                answer = await raw(found, data)
                assert answer == b"" or answer.split(b" ")[1].startswith(b"4"), (data, answer)
            async with client(found) as http, http.get("/caller") as response:
                assert response.status == 200

    with caplog.at_level(logging.DEBUG):
        asyncio.run(play())
    for record in caplog.records:
        if record.name.startswith("baton"):
            assert API_KEY not in logging.Formatter().format(record)
            assert record.levelno < logging.WARNING or record.name != "baton.serving.aiohttp", (
                "a mistake of ours"
            )
    assert any(record.name == "baton.serving.aiohttp" for record in caplog.records)


def test_a_port_in_use_is_told_with_the_remedy():
    async def play():
        async with site() as found:
            with pytest.raises(BatonError, match=rf"cannot listen on 127.0.0.1:{found.port}.*another port"):
                await HttpServer(Credentials()).start("127.0.0.1", found.port)

    asyncio.run(play())
