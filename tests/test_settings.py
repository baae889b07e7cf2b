"""The secret and the certificates: what is taken, and what is refused with which remedy."""

import os
import ssl
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.settings import SECRET_VARIABLE, Tls, secret

GOOD = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("content", [GOOD, GOOD + b"\n", b"  " + GOOD + b"\r\n"])
def test_secret_of_a_file_is_without_the_space_around_it(tmp_path: Path, content: bytes):
    assert secret(write(tmp_path / "s", content)) == GOOD


def test_secret_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    raw = bytes(range(128, 160))
    assert secret(write(tmp_path / "s", raw)) == raw
    monkeypatch.setitem(os.environb, SECRET_VARIABLE.encode(), raw)
    assert secret(None) == raw


def test_secret_of_the_variable_and_the_file_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SECRET_VARIABLE, "of the variable, long")
    assert secret(None) == b"of the variable, long"
    assert secret(write(tmp_path / "s", GOOD)) == GOOD


def test_no_secret_names_both_ways_to_give_one():
    with pytest.raises(ConfigError, match=rf"--secret.*{SECRET_VARIABLE}"):
        secret(None)


@pytest.mark.parametrize("content", [b"", b" \n", b"short-and-private"[:15]])
def test_empty_and_short_secrets_are_refused_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
):
    path = write(tmp_path / "s", content)
    monkeypatch.setenv(SECRET_VARIABLE, content.decode())
    for given, where in ((path, path), (None, SECRET_VARIABLE)):
        with pytest.raises(ConfigError, match=r"is empty|has 15 bytes, at least 16") as caught:
            secret(given)
        assert where in str(caught.value)
        assert "openssl rand" in str(caught.value)
        assert "private" not in str(caught.value).replace(path, "")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_secret_that_others_can_use_is_refused_with_the_command_that_mends_it(tmp_path: Path, mode: int):
    path = write(tmp_path / "s", GOOD, mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o}.*chmod 600 {path}"):
        secret(path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_file_that_cannot_be_read_is_named(tmp_path: Path, name: str):
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=f"secret file {tmp_path / name}: "):
        secret(str(tmp_path / name))


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path):
    junk = write(tmp_path / "junk.pem", b"not a certificate")
    for tls in (Tls("missing.pem", junk, junk), Tls(junk, junk, junk)):
        for build in (tls.accepting, tls.dialling):
            with pytest.raises(ConfigError, match=f"TLS certificate {tls.certificate} with key {junk}"):
                build()


def test_default_contexts_would_not_ask_for_a_certificate():
    """Why `Tls` has to: a listening context is lenient unless told."""
    assert ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).verify_mode is ssl.CERT_NONE
