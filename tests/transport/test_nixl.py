"""What is particular to NIXL: facts about the library that the transport rests on, and who is quiet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.transport.contract import completions, one_span
from tests.transport.ends import End, RemoteEnd, device_tensor

from baton.errors import ConfigError, TransportError
from baton.transport import Done, RevokedQuiet, RevokedUnknown, open_transport
from baton.transport import library as library_module
from baton.transport.common.regions import memory_of
from baton.transport.nixl import Nixl, NixlConfig, NixlTransport, place_of

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
TCP = "TLS=tcp"

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def library() -> Nixl:
    try:
        return Nixl(NixlConfig())
    except ConfigError as error:
        pytest.skip(f"nixl: {error}")


class Child:
    """A process with an agent that is written to, without the transport."""

    def __init__(self, ucx: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.test_nixl", ucx],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        self.access = bytes.fromhex(self.hear())

    def hear(self) -> Any:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def ask(self, word: str) -> Any:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def make(ucx: str) -> Child:
        children.append(Child(ucx))
        return children[-1]

    yield make
    for child in children:
        child.end()


class Writing:
    """An agent of this process that writes one value after the other to a child's memory."""

    def __init__(self, ucx: str, child: Child) -> None:
        self.sender = Nixl(NixlConfig(ucx=ucx)).open_sender("source")
        self.source = np.zeros(MIB, dtype=np.uint8)
        self.sender.register(1, memory_of(self.source))
        self.sender.open_region(1, child.access)

    def write(self, value: int) -> None:
        self.source[:] = value
        token = self.sender.post(1, 1, one_span(MIB))
        limit = time.monotonic() + 60.0
        while not self.sender.is_done(token):
            assert time.monotonic() < limit
            time.sleep(1e-4)


def test_on_one_kernel_a_write_needs_neither_registration_nor_agent(start: Callable[[str], Child]):
    """Why such a source is quiet only when it has hung up."""
    child = start("")
    writing = Writing("", child)
    writing.write(1)
    assert child.ask("value") == 1
    child.ask("withdraw")
    writing.write(2)
    assert child.ask("value") == 2
    child.ask("close")
    # The library notices a closed agent sooner or later; until then a write still lands.
    with suppress(TransportError):
        writing.write(3)
        assert child.ask("value") == 3
    writing.sender.close()


def test_over_tcp_a_write_needs_the_agent_and_no_registration(start: Callable[[str], Child]):
    """Why withdrawing a region is no promise, and closing the receiver is one."""
    child = start(TCP)
    writing = Writing(TCP, child)
    writing.write(1)
    child.ask("withdraw")
    writing.write(2)
    assert child.ask("value") == 2
    child.ask("close")
    with pytest.raises(TransportError):
        writing.write(3)
    assert child.ask("value") == 2
    writing.sender.close()


class Linked:
    """A target here and a source that has written to it once."""

    def __init__(self, source: End | RemoteEnd, ucx: str = "") -> None:
        self.target = End(open_transport("nixl", ucx=ucx))
        self.region = self.target.expose(MIB)
        self.writer = self.target.invite()
        self.target.grant(self.writer.peer, self.region.number)

        def call(method: str, *args: Any) -> Any:
            if isinstance(source, RemoteEnd):
                return source.call(method, *args)
            return getattr(source, method)(*args)

        held = call("load", MIB, 1)
        peer = call("connect", self.writer.description)
        call("send", peer, held, self.region, one_span(MIB))
        assert isinstance(call("events", 1, 60.0)[0], Done)

    def revoke(self) -> Any:
        return self.target.revoke(self.writer.peer)


def test_stopped_source_on_this_kernel_is_not_called_quiet():
    source = RemoteEnd("nixl", None, {})
    linked = Linked(source)
    source.signal(signal.SIGSTOP)
    for _ in range(3):
        assert isinstance(linked.revoke(), RevokedUnknown)
        time.sleep(0.05)
    source.signal(signal.SIGCONT)
    limit = time.monotonic() + 60.0
    while isinstance(linked.revoke(), RevokedUnknown) and time.monotonic() < limit:
        time.sleep(0.01)
    assert isinstance(linked.revoke(), RevokedQuiet)
    linked.target.close()
    source.end()


def test_source_on_another_kernel_is_quiet_without_its_agent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library_module, "is_this_kernel", lambda other: False)
    source = RemoteEnd("nixl", None, {})
    linked = Linked(source)
    source.signal(signal.SIGSTOP)
    assert isinstance(linked.revoke(), RevokedQuiet)
    linked.target.close()
    source.end()


def test_memory_of_a_target_that_closed_on_a_stopped_source_is_never_given_back():
    source = RemoteEnd("nixl", None, {})
    linked = Linked(source)
    source.signal(signal.SIGSTOP)
    num_before = len(library_module._leaked)
    linked.target.close()
    assert len(library_module._leaked) == num_before + 1
    source.end()


def test_ucx_can_be_told_which_way_to_take():
    source = End(open_transport("nixl", ucx=TCP))
    linked = Linked(source, TCP)
    held = source.buffers[1]
    assert np.array_equal(linked.target.buffers[linked.region.number], held)
    source.close()
    assert isinstance(linked.revoke(), RevokedQuiet)
    linked.target.close()


def test_source_region_can_be_forgotten_and_its_memory_registered_anew():
    source, target = End(open_transport("nixl")), End(open_transport("nixl"))
    region, writer = target.expose(MIB), target.invite()
    target.grant(writer.peer, region.number)
    peer = source.connect(writer.description)
    buffer = np.arange(MIB, dtype=np.uint8)
    for shift in range(3):
        buffer += shift
        held = source.transport.register(buffer)
        ticket = source.send(peer, held, region, one_span(MIB))
        assert isinstance(completions(source, [ticket])[ticket], Done)
        assert np.array_equal(target.buffers[region.number], buffer)
        source.transport.unregister(held)
    source.close()
    target.close()


def test_it_says_what_it_cannot_do():
    assert not NixlTransport.capabilities.can_refuse_strangers
    assert not NixlTransport.capabilities.can_enforce_grants
    assert not NixlTransport.capabilities.can_revoke


def run(ucx: str) -> None:
    """The child: exposes a buffer, and does what it is told."""
    receiver = Nixl(NixlConfig(ucx=ucx)).open_receiver("target")
    buffer = np.zeros(MIB, dtype=np.uint8)
    print(json.dumps(receiver.expose(1, memory_of(buffer)).hex()), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "withdraw":
                receiver.withdraw(1)
            case "close":
                receiver.close()
        values = np.unique(buffer).tolist()
        print(json.dumps(values[0] if len(values) == 1 else values), flush=True)


def test_device_memory_is_named_as_such():
    assert place_of(memory_of(device_tensor(3))) == (True, 3)
    assert place_of(memory_of(np.zeros(8, dtype=np.uint8))) == (False, 0)


def test_device_memory_is_refused():
    transport = open_transport("nixl")
    with pytest.raises(TransportError, match="nixl moves host memory; got cuda memory"):
        transport.register(device_tensor(0))
    transport.close()


if __name__ == "__main__":
    run(sys.argv[1])
