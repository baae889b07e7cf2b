"""A registry inside an endpoint that has certificates: it speaks TLS, to those who have one too."""

from __future__ import annotations

import shutil
import socket
import ssl
from contextlib import suppress

import pytest
from tests.session.handoff_world import PATIENCE_S, Side, World
from tests.session.test_link_tls import make_authority, make_certificate

from baton.session.links import SocketConfig
from baton.settings import Tls

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl command to make certificates with"
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder, "ours")
    return make_certificate(folder, "here", "ours", "127.0.0.1")


def opened(tls: Tls) -> World:
    """Two instances that know each other from a registry in one of them."""
    sockets = {"sockets": SocketConfig(tls=tls)}
    return World(Side(options=sockets), Side(options={**sockets, "embed_registry": 0}))


def ask(url: str, context: ssl.SSLContext) -> bytes:
    """The first bytes of the registry's answer to a question that needs no secret."""
    host, _, port = url.removeprefix("https://").rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        secured.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return secured.recv(8)


def test_instances_find_each_other_in_a_registry_under_tls(tls: Tls) -> None:
    world = opened(tls)
    try:
        url = world.target.first.registry
        assert url is not None
        assert url.startswith("https://")
        world.hand_off()
        assert ask(url, tls.dialling()) == b"HTTP/1.1"
    finally:
        world.source.close()
        world.target.close()


def test_who_has_no_certificate_is_turned_away(tls: Tls) -> None:
    world = opened(tls)
    try:
        url = world.target.first.registry
        assert url is not None
        answer = b""
        with suppress(ssl.SSLError, ConnectionError):  # the connection may just end, without an alert
            answer = ask(url, ssl.create_default_context(cafile=tls.authority))
        assert answer == b""
    finally:
        world.source.close()
        world.target.close()
