"""The registry over real sockets: its answers, who is let in, and what hostile requests get."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from tests.session.registry_world import SECRET, ask, member, put, registry, run

from baton.errors import BatonError, ConfigError
from baton.session.registry import RegistryClient, RegistryConfig, RegistryError, RegistryServer
from baton.session.registry.messages import BODY_BYTES_MAX, sign


def test_registration_is_idempotent_and_topology_says_what_is_missing() -> None:
    async def body() -> None:
        async with registry() as server:
            empty = await ask(server, "GET", "/v1/topology")
            assert (empty.status, empty.json["missing"][0]["reason"]) == (503, "no instance is registered")
            first, again = await put(server, member(rank=1)), await put(server, member(rank=1))
            assert (first.status, first.json) == (200, {"is_new": True})
            assert (again.status, again.json) == (200, {"is_new": False})
            partial = await ask(server, "GET", "/v1/topology?instance=p0")
            assert partial.status == 503
            assert partial.json["missing"] == [
                {"instance": "p0", "ranks": [0], "reason": "1 of 2 ranks not registered"}
            ]
            assert partial.json["instances"][0]["ranks"] == [1]
            await put(server, member(rank=0))
            whole = await ask(server, "GET", "/v1/topology")
            assert (whole.status, whole.json["missing"]) == (200, [])
            assert whole.json["instances"][0]["coordinator"] == "10.0.0.1:7000"
            await put(server, member("d0", rank=0))
            assert (await ask(server, "GET", "/v1/topology")).status == 503
            assert (await ask(server, "GET", "/v1/topology?instance=p0")).status == 200
            assert (await ask(server, "GET", "/v1/topology?instance=p0&instance=x")).status == 503

    run(body)


def test_unregistering_needs_the_epoch_and_removes_that_one_only() -> None:
    async def body() -> None:
        async with registry() as server:
            await put(server, member(epoch=5, layout="tp1"))
            for epoch, is_removed in ((4, False), (5, True), (5, False)):
                done = await ask(server, "DELETE", f"/v1/members/p0/0?epoch={epoch}")
                assert (done.status, done.json) == (200, {"is_removed": is_removed})
            bare = await ask(server, "DELETE", "/v1/members/p0/0")
            assert bare.status == 400
            assert bare.json["error"].startswith("epoch must be a whole number")

    run(body)


def test_an_older_epoch_and_a_conflict_are_both_409_and_told_apart() -> None:
    async def body() -> None:
        async with registry() as server:
            await put(server, member(epoch=5))
            older = await put(server, member(epoch=4))
            assert (older.status, older.json["refusal"]) == (409, "displaced")
            other = await put(server, member(rank=1, epoch=5, layout="tp4"))
            assert (other.status, other.json["refusal"]) == (409, "conflict")

    run(body)


def signed(request: tuple[str, str, bytes], *, secret: bytes = SECRET, at: float = 0.0) -> str:
    return sign(secret, request, time.time() + at, secrets.token_hex(16))


def flipped(header: str) -> str:
    return header[:-1] + ("1" if header[-1] == "0" else "0")


LOOK = ("GET", "/v1/topology", b"")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (lambda: None, "no Authorization header"),
        (lambda: "Bearer abc", "send 'Baton time:nonce:mac'"),
        (lambda: signed(LOOK) + "\t0", "send 'Baton time:nonce:mac'"),
        (lambda: signed(LOOK, secret=b"another secret"), "MAC does not match"),
        (lambda: flipped(signed(LOOK)), "MAC does not match"),
        (lambda: signed(("PUT", *LOOK[1:])), "MAC does not match"),
        (lambda: signed(("GET", "/v1/topology?instance=p0", b"")), "MAC does not match"),
        (lambda: signed((*LOOK[:2], b"x")), "MAC does not match"),
        (lambda: signed(LOOK, at=-31), r"s off the registry's and may be 30 s off"),
        (lambda: signed(LOOK, at=31), r"s off the registry's and may be 30 s off"),
        (lambda: signed(LOOK, at=-20), "signed before this registry started"),
    ],
)
def test_a_stranger_gets_a_reason_and_nothing_else(header, reason: str) -> None:
    async def body() -> None:
        async with registry() as server:
            await put(server, member())
            refused = await ask(server, *LOOK, header=header())
            assert refused.status == 401
            assert set(refused.json) == {"refusal", "error"}
            assert reason in refused.json["error"]
            assert "p0" not in refused.body.decode()
            assert "Baton-Registry" not in refused.headers

    run(body)


@pytest.mark.parametrize(
    "path", ["/v1/topology", "/v1/watch", "/v1/members/p0/0", "/nothing", "/", "/health/x"]
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST", "OPTIONS", "HEAD"])
def test_no_path_and_no_method_is_open_to_strangers(method: str, path: str) -> None:
    async def body() -> None:
        async with registry() as server:
            assert (await ask(server, method, path, header=None)).status == 401

    run(body)


def test_a_request_is_taken_once() -> None:
    async def body() -> None:
        async with registry() as server:
            value = member(layout="tp1")
            request = ("PUT", "/v1/members/p0/0", msgspec.json.encode(value))
            header = signed(request)
            assert (await ask(server, *request, header=header)).status == 200
            await ask(server, "DELETE", "/v1/members/p0/0?epoch=1")
            replayed = await ask(server, *request, header=header)
            assert (replayed.status, "nonce was used before" in replayed.json["error"]) == (401, True)
            assert (await ask(server, "GET", "/v1/topology")).status == 503

    run(body)


def test_health_is_for_everybody_and_says_nothing_else() -> None:
    async def body() -> None:
        async with registry() as server:
            found = await ask(server, "GET", "/health", header=None)
            assert (found.status, found.json) == (200, {"status": "ok"})
            assert (await ask(server, "POST", "/health", header=None)).status == 405

    run(body)


GOOD = msgspec.to_builtins(member(layout="tp1"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "role is missing from the body"),
        (b"{", "the body must be JSON"),
        (b"nonsense", "the body must be JSON"),
        (b"\xff\xfe", "the body must be JSON"),
        (b'{"role": "\xff"}', "the body must be JSON"),
        (b"[" * 16_000, "the body must be JSON"),
        (b'{"a":' * 3000, "the body must be JSON"),
        (b"[]", "the body must be a JSON object, found list"),
        (b"null", "the body must be a JSON object"),
        (b'{"instance": "p1"}', "instance is 'p0' in the path and 'p1' in the body"),
        (b'{"rank": 1}', "rank is 0 in the path and '1' in the body"),
        (b'{"ttl_s": 1e999}', "the body must be JSON"),
        ({"rank": "0"}, "rank is 0 in the path and '0' in the body"),
        ({"role": "router"}, "role must be prefill, decode or both; found 'router'"),
        ({"epoch": 1.5}, "epoch must be .*; found 1.5"),
        ({"epoch": True}, "epoch must be"),
        ({"epoch": 10**400}, "epoch must be .* characters"),
        ({"layout": ["tp1"]}, "layout must be"),
        ({"layout": "x" * 300}, "layout must be"),
        ({"layout": "tp2.tp2"}, "layout cannot be used"),
        ({"layout": "tp" + "9" * 200}, "layout cannot be used"),
        ({"coordinator": None}, "coordinator must be"),
        ({"coordinator": "a b:1"}, "coordinator must be"),
        ({"fingerprint": "\u0000"}, "fingerprint must be"),
        ({"transport": {}}, "transport must be"),
        ({"ttl_s": -1}, "ttl_s must be"),
        ({"ttl_s": "10"}, "ttl_s must be"),
    ],
)
def test_a_body_that_cannot_be_used_is_400_with_field_value_and_remedy(body, reason: str) -> None:
    async def main() -> None:
        async with registry() as server:
            raw = body if isinstance(body, bytes) else msgspec.json.encode({**GOOD, **body})
            refused = await ask(server, "PUT", "/v1/members/p0/0", raw)
            assert refused.status == 400, refused.body
            assert re.search(reason, refused.json["error"])
            assert (await ask(server, "GET", "/v1/topology")).json["instances"] == []

    run(main)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("PUT", "/v1/members/p0/x", 400),
        ("PUT", "/v1/members/p0/-1", 400),
        ("PUT", "/v1/members/p0/00", 400),
        ("PUT", "/v1/members/p0/99999999999999999999", 400),
        ("PUT", "/v1/members/p0/%D9%A0", 400),
        ("PUT", "/v1/members/%2E%2E/0", 400),
        ("PUT", "/v1/members/a%2Fb/0", 400),
        ("PUT", "/v1/members/%FF/0", 400),
        ("PUT", "/v1/members//0", 404),
        ("PUT", "/v1/members/p0", 404),
        ("PUT", "/v1/members/p0/0/0", 404),
        ("PUT", "/v1/members/{instance}/{rank}", 400),
        ("DELETE", "/v1/members/p0/0?epoch=x", 400),
        ("DELETE", "/v1/members/p0/0?epoch=", 400),
        ("GET", "/v1/topology?instance=a%20b", 400),
        ("GET", "/v1/topology?instance=%FF%00", 400),
        ("GET", "/v1/topology/", 404),
        ("GET", "/v1/../v1/topology", 404),
        ("GET", "/" + "y" * 8000, 404),
        ("GET", "/" + "y" * 9000, 400),
        ("GET", "//v1//watch", 404),
        ("HEAD", "/v1/watch", 405),
        ("POST", "/v1/topology", 405),
        ("TRACE", "/v1/topology", 405),
    ],
)
def test_odd_paths_are_4xx(method: str, target: str, status: int) -> None:
    async def body() -> None:
        async with registry() as server:
            content = msgspec.json.encode({**GOOD, "instance": "p0"}) if method == "PUT" else b""
            if "members" in target:
                content = msgspec.json.encode(
                    {k: v for k, v in GOOD.items() if k not in ("instance", "rank")}
                )
            found = await raw(server, method, target, content)
            assert found == status

    run(body)


async def raw(server: RegistryServer, method: str, target: str, body: bytes) -> int:
    """The status of a request whose target goes out exactly as written."""
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: {signed((method, target, body))}\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    return await sent(server, whole)


async def sent(server: RegistryServer, data: bytes) -> int:
    """The status that some bytes get; 0 where the connection ends without one."""
    host, port = server.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        line = await reader.readline()
    except ConnectionError:
        return 0
    finally:
        writer.close()
    return int(line.split()[1]) if line else 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/topology HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\xfe\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
        b"GET /v1/watch HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nExpect: tea\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=range(14),
)
def test_bytes_that_are_no_request_of_ours_are_4xx_or_the_end(data: bytes) -> None:
    async def body() -> None:
        async with registry(config=RegistryConfig(body_s_max=0.2)) as server:
            assert await sent(server, data) in (0, *range(400, 500))
            assert (await ask(server, "GET", "/health", header=None)).status == 200

    run(body)


def test_a_huge_body_is_413_and_not_kept() -> None:
    async def body() -> None:
        async with registry() as server:
            for size in (BODY_BYTES_MAX + 1, 50 << 20):
                head = f"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
                assert await sent(server, head.encode() + b" " * (BODY_BYTES_MAX + 1)) == 413
            assert (await ask(server, "PUT", "/v1/members/p0/0", b" " * BODY_BYTES_MAX)).status == 400

    run(body)


def test_a_body_that_never_comes_is_408() -> None:
    async def body() -> None:
        async with registry(config=RegistryConfig(body_s_max=0.1)) as server:
            head = b"PUT /v1/members/p0/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
            assert await sent(server, head) == 408

    run(body)


def test_a_small_body_cannot_unfold_into_a_large_one() -> None:
    async def body() -> None:
        async with registry() as server:
            content = b"\x1f\x8b" + b"0" * 100
            target = "/v1/members/p0/0"
            head = (
                f"PUT {target} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
                f"Authorization: {signed(('PUT', target, content))}\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            assert await sent(server, head.encode() + content) == 400

    run(body)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_only_loopback_does_without_a_secret(host: str) -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"can be reached from outside and there is no secret"):
            await RegistryServer(None).start(host, 0)
        with pytest.raises(ConfigError, match="empty"):
            RegistryServer(b"")
        async with registry(secret=None) as server:
            assert server.address.startswith("127.0.0.1:")
            assert (await ask(server, "GET", "/v1/topology", header=None)).status == 503
        if host == "::" and not socket.has_ipv6:
            return
        guarded = RegistryServer(SECRET)
        await guarded.start(host, 0)
        await guarded.close()

    run(body)


def test_a_port_in_use_and_a_host_that_is_not_here() -> None:
    async def body() -> None:
        async with registry() as server:
            port = int(server.address.rsplit(":", 1)[1])
            with pytest.raises(
                BatonError, match=rf"cannot listen on 127.0.0.1:{port}: .*; name another port"
            ):
                await RegistryServer(SECRET).start(port=port)
        with pytest.raises(ConfigError, match="has no address"):
            await RegistryServer(SECRET).start("no.such.host.invalid", 0)

    run(body)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=registry"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *words.split(), *names], check=True, capture_output=True, timeout=300)
    return certificate, key


def test_tls_by_a_context(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=certificate[0])

    async def body() -> None:
        server = RegistryServer(SECRET, ssl_context=context)
        await server.start(port=0)
        async with RegistryClient(server.url, SECRET, ssl_context=trusting) as client:
            await client.register(member(layout="tp1")).wait()
            assert await client.coordinator("p0") == "10.0.0.1:7000"
        async with RegistryClient(server.url, SECRET) as doubting:
            with pytest.raises(RegistryError, match="certificate verify failed"):
                await doubting.topology()
        assert await sent(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") == 0
        await server.close()

    run(body)
