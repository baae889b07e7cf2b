"""Links over TLS, with certificates of the test's own making."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.session.link_ends import DECODE, FIRST_WORDS, OFFERS, PREFILL, PRIVATE, dialled
from tests.session.loop_world import PATIENCE_S, PATIENT, Loops, converse, hear, opened

from baton.errors import ConfigError
from baton.protocol.messages import Heartbeat
from baton.session.links import SocketConfig
from baton.settings import Tls

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="no openssl command to make certificates with"
    ),
]


def openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def make_authority(folder: Path, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    openssl(folder, "req", "-x509", *key, *authority, "-days", "2")


def make_certificate(folder: Path, name: str, authority: str, address: str) -> Tls:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"subjectAltName=IP:{address}\n")
    signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
    files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
    openssl(folder, "x509", "-req", *files, *signed, "-days", "2")
    paths = [str(folder / file) for file in (f"{name}.pem", f"{name}.key", f"{authority}.pem")]
    return Tls(*paths)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder, "ours")
    make_authority(folder, "theirs")
    return {
        "here": make_certificate(folder, "here", "ours", "127.0.0.1"),
        "elsewhere": make_certificate(folder, "elsewhere", "ours", "10.9.8.7"),
        "foreign": make_certificate(folder, "foreign", "theirs", "127.0.0.1"),
    }


@pytest.fixture
def loops() -> Iterator[Loops]:
    yield from opened()


def over(tls: Tls, **options: float) -> SocketConfig:
    return replace(PATIENT, tls=tls, **options)


def test_messages_pass_both_ways_over_tls(loops: Loops, certificates: dict[str, Tls]):
    near, far, link, far_link = loops.pair(DECODE, config=over(certificates["here"]))
    near.ports.post(lambda: [near.ports.send(link, offer) for offer in OFFERS])
    assert far.messages(4) == OFFERS
    far.ports.post(lambda: far.ports.send(far_link, Heartbeat()))
    assert near.messages(1) == [Heartbeat()]
    near.ports.post(lambda: (near.ports.send(link, OFFERS[0]), near.ports.hang_up(link)))
    assert far.wait("lost") == [(far_link, "the peer closed the connection")]
    assert far.messages(5)[-1] == OFFERS[0]


def test_nothing_is_in_the_clear(loops: Loops, certificates: dict[str, Tls]):
    """Between the two stands somebody who passes everything on and listens."""
    loop, far = loops.make(PREFILL, config=over(certificates["here"]))
    near_loop, near = loops.make(DECODE, config=over(certificates["here"]))
    host, port = loop.address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as tap:
        loops.dial(near_loop, near, f"127.0.0.1:{tap.getsockname()[1]}")
        inner, _ = tap.accept()
        outer = socket.create_connection((host, int(port)))
        heard = b""
        for sock in (inner, outer):
            sock.settimeout(0.01)
        while not (near.told[-1:] and near.told[-1][0] == "linked" and far.told):
            for source, target in ((inner, outer), (outer, inner)):
                try:
                    data = source.recv(65536)
                except TimeoutError:
                    continue
                target.sendall(data)
                heard += data
        inner.close()
        outer.close()
    near.wait("lost")
    far.wait("lost")
    assert len(heard) > 1000
    assert not [word for word in (*PRIVATE, b"decode", b"hello") if word in heard]


@pytest.mark.parametrize("which", ["elsewhere", "foreign"])
def test_acceptor_with_the_wrong_certificate_is_not_dialled(
    loops: Loops, certificates: dict[str, Tls], which: str
):
    loop, far = loops.make(PREFILL, config=over(certificates[which]))
    near_loop, near = loops.make(DECODE, config=over(certificates["here"]))
    loops.dial(near_loop, near, loop.address)
    cause = near.wait("lost")[0][1]
    assert "certificate verify failed" in cause
    assert far.told == []


def test_dialler_with_a_foreign_certificate_is_refused(loops: Loops, certificates: dict[str, Tls]):
    ours, foreign = certificates["here"], certificates["foreign"]
    loop, far = loops.make(PREFILL, config=over(ours))
    near_loop, near = loops.make(DECODE, config=over(replace(foreign, authority=ours.authority)))
    loops.dial(near_loop, near, loop.address)
    near.wait("lost")
    assert far.told == []


def test_dialler_without_a_certificate_is_refused(loops: Loops, certificates: dict[str, Tls]):
    loop, far = loops.make(PREFILL, config=over(certificates["here"]))
    context = ssl.create_default_context(cafile=certificates["here"].authority)
    secured = context.wrap_socket(loops.connect(loop.address), server_hostname="127.0.0.1")
    loops.socks.append(secured)
    with pytest.raises((ssl.SSLError, ConnectionResetError, AssertionError)):
        converse(secured, dialled())
    assert far.told == []


@pytest.mark.parametrize("words", [dialled().begin(0.0), FIRST_WORDS["http"]])
def test_bare_socket_gets_nowhere_with_tls(loops: Loops, certificates: dict[str, Tls], words: bytes):
    loop, far = loops.make(PREFILL, config=over(certificates["here"]))
    sock = loops.connect(loop.address)
    sock.sendall(words)
    heard = hear(sock)
    assert not [word for word in (*PRIVATE, b"prefill") if word in heard]
    assert far.told == []


def test_tls_without_a_word_ends_at_its_deadline(loops: Loops, certificates: dict[str, Tls]):
    loop, far = loops.make(PREFILL, config=over(certificates["here"], handshake_s=2.0))
    assert hear(loops.connect(loop.address)) == b""
    context = certificates["here"].dialling()
    with context.wrap_socket(loops.connect(loop.address), server_hostname="127.0.0.1") as secured:
        secured.settimeout(PATIENCE_S)
        assert b"deadline passed" in hear(secured)
    assert far.told == []


def test_close_leaves_nothing_of_tls_either(loops: Loops, certificates: dict[str, Tls]):
    near, far, link, _ = loops.pair(DECODE, config=over(certificates["here"]))
    far_loop, near_loop = loops.made
    context = certificates["here"].dialling()
    loops.connect(far_loop.address)  # somebody who does not begin
    secured = context.wrap_socket(loops.connect(far_loop.address), server_hostname="127.0.0.1")
    loops.socks.append(secured)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        loops.dial(near_loop, near, f"127.0.0.1:{silent.getsockname()[1]}")
        near.wait("dialled", 2)
        near.ports.post(lambda: near.ports.send(link, OFFERS[0]))
        near_loop.close()
        far.messages(1)
        far_loop.close()


def test_files_that_do_not_belong_together_are_named(certificates: dict[str, Tls]):
    here, foreign = certificates["here"], certificates["foreign"]
    with pytest.raises(ConfigError, match=f"{here.certificate} with key {foreign.key}"):
        replace(here, key=foreign.key).accepting()
    with pytest.raises(ConfigError, match=r"TLS authority missing\.pem"):
        replace(here, authority="missing.pem").dialling()


def test_key_with_a_passphrase_is_an_error_and_no_question(tmp_path: Path, certificates: dict[str, Tls]):
    here = certificates["here"]
    openssl(tmp_path, "ec", "-in", here.key, "-aes128", "-passout", "pass:word", "-out", "locked.key")
    with pytest.raises(ConfigError, match="without a passphrase"):
        replace(here, key=str(tmp_path / "locked.key")).accepting()
