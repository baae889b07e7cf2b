"""A deployment over TLS: HTTPS for clients and between router and instances, mutual TLS on control links."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.serve.deployment import Deployment, ask, deployment, oracle_text
from tests.session.test_link_tls import make_authority, make_certificate

from baton import settings
from baton.errors import ConfigError
from baton.settings import Tls

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl command to make certificates with"
)

FOX = "the quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("ours", "theirs"):
        make_authority(folder, name)
    return folder


@pytest.fixture(scope="module")
def tls(folder: Path) -> Tls:
    return make_certificate(folder, "here", "ours", "127.0.0.1")


def test_the_three_files_come_together(tls: Tls, tmp_path: Path):
    files = [Path(tls.certificate), Path(tls.key), Path(tls.authority)]
    assert settings.tls_files(*files) == tls
    assert settings.tls_files(None, None, None) is None
    for index in range(3):
        some = [None if at == index else file for at, file in enumerate(files)]
        with pytest.raises(ConfigError, match="--tls-cert, --tls-key and --tls-ca together"):
            settings.tls_files(*some)
    with pytest.raises(ConfigError, match="PEM"):
        settings.trusting(str(tmp_path / "absent"))


@pytest.fixture(scope="module")
def world(tls: Tls) -> Iterator[Deployment]:
    with deployment(prefill=["tp1"], decode=["tp2"], tls=tls, route={"local": "never"}) as found:
        yield found


@pytest.mark.serve
def test_a_deployment_over_tls_answers_as_the_oracle(world: Deployment):
    assert world.url.startswith("https://")
    body = {"prompt": FOX, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = world.ask("/v1/completions", body)
    assert answer.status == 200, answer.text
    assert answer.json["choices"][0]["text"] == oracle_text(FOX, 8, ignore_eos=True).text
    assert world.router is not None
    assert world.router.metric("baton_router_handoffs_total") == 1  # over control links with TLS


@pytest.mark.serve
def test_without_the_authority_a_client_refuses_the_server(world: Deployment, folder: Path, tls: Tls):
    assert world.router is not None
    for part in (world.router, *world.instances):
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(part.url, "/health")  # trusts the system's authorities alone
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(part.url, "/health", tls=replace(tls, authority=str(folder / "theirs.pem")))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(part.url.replace("https", "http"), "/health")


@pytest.mark.serve
def test_the_registry_refuses_a_client_without_a_certificate(world: Deployment, folder: Path):
    assert world.registry is not None
    stranger = make_certificate(folder, "stranger", "theirs", "127.0.0.1")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(world.registry.url, "/health", tls=replace(stranger, authority=str(folder / "ours.pem")))


@pytest.mark.serve
def test_chat_and_drain_verify_the_server(world: Deployment, tls: Tls):
    environment = {**os.environ, "BATON_SECRET": world.secret}

    def baton(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "baton", *words]
        return subprocess.run(
            command, env=environment, input=given, capture_output=True, text=True, check=False, timeout=300
        )

    asked = ("--url", world.url, "--temperature", "0", "--max-tokens", "16", "--tls-ca", tls.authority)
    chatted = baton("chat", *asked, given=FOX)
    assert chatted.returncode == 0, chatted.stderr
    assert chatted.stdout.rstrip("\n")  # random weights: it may be anything
    refused = baton("drain", world.decode[0].url)
    assert refused.returncode == 1
    assert "certificate verify failed" in refused.stderr.lower()
    drained = baton("drain", world.decode[0].url, "--tls-ca", tls.authority)
    assert drained.returncode == 0, drained.stderr
    assert "takes no new requests" in drained.stdout
