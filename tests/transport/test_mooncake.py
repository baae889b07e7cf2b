"""What is particular to Mooncake: facts about the library that the transport rests on, and its successors."""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ports import free_port
from tests.transport.contract import completions, one_span, spans_of
from tests.transport.ends import End, device_tensor

from baton.errors import ConfigError, TransportError
from baton.transport import (
    Description,
    Done,
    FailedUnknown,
    HostFence,
    Ranges,
    RemoteRegion,
    open_transport,
)
from baton.transport.common.regions import memory_of
from baton.transport.mooncake import (
    EngineReceiver,
    EngineSender,
    Mooncake,
    MooncakeConfig,
    MooncakeTransport,
    is_built_for_cuda,
)

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
FIXED_ADDRESS, FIXED_BYTES = 0x6000_0000_0000, 256 * MIB

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def library() -> Mooncake:
    try:
        return Mooncake(MooncakeConfig())
    except ConfigError as error:
        pytest.skip(f"mooncake: {error}")


class Pair:
    """Two engines of this process, one written to by the other, without the transport."""

    def __init__(self, library: Mooncake, num_bytes: int) -> None:
        self.receiver: EngineReceiver = library.open_receiver("target")
        self.sender: EngineSender = library.open_sender("source")
        self.source = np.full(num_bytes, 7, dtype=np.uint8)
        self.target = np.zeros(num_bytes, dtype=np.uint8)
        self.access = self.receiver.expose(1, memory_of(self.target))
        self.sender.register(1, memory_of(self.source))
        self.wait(self.sender.open_region(1, self.access))

    def wait(self, token: object) -> None:
        while not self.sender.is_done(token):
            time.sleep(1e-3)

    def begin(self) -> object:
        """A write of everything in one piece, of which something has arrived when this returns."""
        length = len(self.source)
        token = self.sender.post(1, 1, one_span(length))
        limit = time.monotonic() + 60.0
        while not self.target[0] and time.monotonic() < limit:
            time.sleep(1e-4)
        assert self.target[0]
        assert not self.target[-1]
        return token

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def make_pair(library: Mooncake) -> Iterator[Callable[[int], Pair]]:
    pairs: list[Pair] = []

    def make(num_bytes: int) -> Pair:
        pairs.append(Pair(library, num_bytes))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def test_a_write_that_begins_after_unregistering_is_refused(make_pair: Callable[[int], Pair]):
    pair = make_pair(MIB)
    pair.wait(pair.sender.post(1, 1, one_span(1)))
    pair.receiver.withdraw(1)
    with pytest.raises(TransportError):
        pair.wait(pair.sender.post(1, 1, one_span(MIB)))
    assert not pair.target[1:].any()


def test_a_write_under_way_outlives_unregistering(make_pair: Callable[[int], Pair]):
    """Why revoking is more than unregistering."""
    pair = make_pair(256 * MIB)
    token = pair.begin()
    pair.receiver.withdraw(1)
    pair.wait(token)
    assert pair.target.all()


def test_a_write_under_way_ends_with_the_targets_engine(make_pair: Callable[[int], Pair]):
    pair = make_pair(256 * MIB)
    token = pair.begin()
    pair.receiver.close()
    before = pair.target.copy()
    with pytest.raises(TransportError):
        pair.wait(token)
    time.sleep(0.1)
    assert np.array_equal(before, pair.target)
    assert not pair.target[-1]


def test_a_write_under_way_ends_with_the_sources_engine(make_pair: Callable[[int], Pair]):
    pair = make_pair(256 * MIB)
    pair.begin()
    pair.sender.close()
    pair.source[:] = 9
    time.sleep(0.2)
    assert not (pair.target == 9).any()
    assert not pair.target[-1]


def test_engines_end_without_holding_the_interpreter_up(library: Mooncake):
    """The library's own way takes up to a second with the lock held, half a second on average."""
    started_s = time.monotonic()
    for _ in range(20):
        library.open_receiver("target").close()
    assert time.monotonic() - started_s < 5.0


def test_thousands_of_spans_stay_within_the_librarys_queue(library: Mooncake):
    """More than 2,052 at once fail when they are given to the library as they come."""
    with open_ends() as (source, target):
        region, invitation = target.expose(5000 * 64), target.invite()
        target.grant(invitation.peer, region.number)
        held = source.load(5000 * 64, 1)
        offsets = np.random.default_rng(1).permutation(5000) * 64
        spans = spans_of(offsets, offsets, np.full(5000, 50))
        ticket = source.send(source.connect(invitation.description), held, region, spans)
        assert isinstance(completions(source, [ticket])[ticket], Done)


def test_unregistered_memory_that_a_peer_knows_lives_until_the_peer_is_gone(library: Mooncake):
    with open_ends() as (source, target):
        region, invitation = target.expose(MIB), target.invite()
        grant = target.grant(invitation.peer, region.number)
        held = source.load(MIB, 1)
        peer = source.connect(invitation.description)
        ticket = source.send(peer, held, region, one_span(MIB))
        assert isinstance(completions(source, [ticket])[ticket], Done)
        writer = target.transport.writers[invitation.peer]
        target.ungrant(invitation.peer, grant)
        target.forget(region.number)
        assert writer.exposed
        ticket = source.send(peer, held, region, one_span(MIB))
        assert isinstance(completions(source, [ticket])[ticket], FailedUnknown)
        target.revoke(invitation.peer)
        assert not writer.exposed


@contextmanager
def open_ends() -> Iterator[tuple[End, End]]:
    source, target = End(open_transport("mooncake")), End(open_transport("mooncake"))
    yield source, target
    source.close()
    target.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "carrier pigeon"}, "carrier pigeon"),
        ({"devices": "mlx5_0"}, "mlx5_0"),
        ({"host": "::1"}, "::1"),
        ({"host": "0.0.0.0"}, "0.0.0.0"),
        ({"port": 65536}, "65536"),
    ],
)
def test_options_that_cannot_be_used_are_refused(library: Mooncake, options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        open_transport("mooncake", **options)


def test_it_says_what_it_cannot_do():
    assert not MooncakeTransport.capabilities.can_refuse_strangers
    assert not MooncakeTransport.capabilities.can_enforce_grants


class Child:
    """A process of this module: a target, or the engine that comes after it with its ports and addresses."""

    def __init__(self, role: str, **arguments: Any) -> None:
        first, last = arguments.pop("ports")
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
        ports = {"MC_MIN_RPC_PORT": str(first), "MC_MAX_RPC_PORT": str(last)}
        command = [sys.executable, "-m", "tests.transport.test_mooncake", role, json.dumps(arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ports, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )

    def hear(self, timeout_s: float = 60.0) -> Any:
        assert self.process.stdout
        is_ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        return json.loads(self.process.stdout.readline()) if is_ready else None

    def say(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        if self.process.poll() is None:
            self.process.wait()
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdout.close()
        with suppress(OSError):
            self.process.stdin.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def make(role: str, **arguments: Any) -> Child:
        children.append(Child(role, **arguments))
        return children[-1]

    yield make
    for child in children:
        child.end()


@pytest.mark.parametrize("is_under_way", [True, False], ids=["under way", "queued"])
def test_successor_with_the_same_addresses_gets_nothing(
    library: Mooncake, start: Callable[..., Child], is_under_way: bool
):
    """One that comes while the batch is under way has the same ports too."""

    def send(told: dict[str, Any]) -> Callable[[], None]:
        source = End(open_transport("mooncake"))
        held = source.load(FIXED_BYTES, 3)
        region = RemoteRegion.from_bytes(told["region"].encode())
        peer = source.connect(Description.from_bytes(told["description"].encode()))
        ticket = source.send(peer, held, region, one_span(1))
        assert isinstance(completions(source, [ticket])[ticket], Done)
        fence = HostFence()
        tickets = [source.send(peer, held, region, one_span(FIXED_BYTES), fence=fence) for _ in range(3)]
        if is_under_way:
            fence.set()

        def finish() -> None:
            fence.set()
            for completion in completions(source, tickets).values():
                assert not isinstance(completion, Done)
            source.close()

        return finish

    found = (replace_target(start, send, has_same_port=is_under_way) for _ in range(5))
    num_bytes = next((number for number in found if number is not None), None)
    if num_bytes is None:
        pytest.skip("the kernel kept the dead target's port from its successor 5 times")
    assert num_bytes == 0


def test_the_library_alone_writes_to_a_successor(library: Mooncake, start: Callable[..., Child]):
    """What the test above would see, did the source not let its engine go; it happens every second time."""
    source = np.ones(FIXED_BYTES, dtype=np.uint8)
    offsets = np.arange(256) * MIB

    def send(told: dict[str, Any]) -> Callable[[], None]:
        sender = library.open_sender("source")
        sender.register(1, memory_of(source))
        first_transfer = sender.open_region(
            1, FIXED_ADDRESS.to_bytes(8, "little") + told["endpoint"].encode()
        )
        while not sender.is_done(first_transfer):
            time.sleep(1e-3)
        sender.post(1, 1, spans_of(offsets, offsets, np.full(256, MIB)))

        def finish() -> None:
            time.sleep(1.5)
            sender.close()

        return finish

    if not any(replace_target(start, send, has_same_port=True) for _ in range(10)):
        pytest.skip("the library did not reach a successor in 10 attempts")


def replace_target(
    start: Callable[..., Child], send: Callable[[dict[str, Any]], Callable[[], None]], *, has_same_port: bool
) -> int | None:
    """Kills a target while something is sent to it; answers what its successor got, if there could be one."""
    first = free_port(4)
    ports = first, first + 3  # the library has its choice of them
    target = start("target", ports=ports)
    told = target.hear()
    successor = start("successor", ports=ports, port=told["data_port"] if has_same_port else 0)
    assert successor.hear() == "waiting"
    finish = send(told)
    time.sleep(0.05)
    target.end()
    # Connections that were idle when the target died keep its port from everybody for a minute.
    is_open = successor.hear(1.0) == "open"
    finish()
    if not is_open:
        return None
    time.sleep(1.5)  # the library tries again after a second
    successor.say("count")
    found = successor.hear()
    successor.end()
    assert isinstance(found, int)
    return found


def fixed_buffer() -> np.ndarray:
    """Zeroed memory at the address at which every child has it."""
    call = ctypes.CDLL(None).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    private_anonymous_fixed = 0x02 | 0x20 | 0x100000
    found = call(FIXED_ADDRESS, FIXED_BYTES, 3, private_anonymous_fixed, -1, 0)
    assert found == FIXED_ADDRESS, f"{found:x}"
    return np.frombuffer((ctypes.c_uint8 * FIXED_BYTES).from_address(found), dtype=np.uint8)


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def listening_ports() -> set[int]:
    """Ports of this network namespace on which this process listens."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def run_target() -> None:
    """A target with a raw engine beside it: in the second the library's ports are taken, as in the first."""
    transport = MooncakeTransport(MooncakeConfig())
    buffer = fixed_buffer()
    region = transport.register(buffer)
    invitation = transport.invite()
    transport.grant(invitation.peer, region, Ranges.whole(region))
    writer = transport.writers[invitation.peer]
    before = listening_ports()
    writer.receiver = transport.library.open_receiver(
        "target"
    )  # before anybody asks, so that its ports are known
    writer.receiver.expose(region.number, memory_of(buffer))
    endpoint = writer.receiver.endpoint.decode()
    (data_port,) = listening_ports() - before - {int(endpoint.rpartition(":")[2])}
    say(
        {
            "description": invitation.description.to_bytes().decode(),
            "region": region.remote.to_bytes().decode(),
            "data_port": data_port,
            "endpoint": endpoint,
        }
    )
    sys.stdin.read()


def open_on(library: Mooncake, port: int) -> EngineReceiver:
    """An engine for which the library happened to choose this port, if it matters."""
    while True:
        with suppress(TransportError):
            receiver = library.open_receiver("successor")
            if not port or port in listening_ports():
                return receiver
            receiver.close()


def run_successor(port: int) -> None:
    """An engine that takes the dead target's data port and addresses as soon as it can."""
    library = Mooncake(MooncakeConfig())
    buffer = fixed_buffer()
    buffer[:] = 0
    say("waiting")
    receiver = open_on(library, port)
    receiver.expose(1, memory_of(buffer))
    say("open")
    for _ in sys.stdin:
        say(int(np.count_nonzero(buffer)))


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    run_target() if sys.argv[1] == "target" else run_successor(**given)


@pytest.mark.skipif(is_built_for_cuda(), reason="this Mooncake is built for CUDA")
def test_a_build_without_cuda_refuses_device_memory(library: Mooncake):
    """It would read the address as if it were the host's."""
    transport = open_transport("mooncake")
    with pytest.raises(TransportError, match="install mooncake-transfer-engine in its place"):
        transport.register(device_tensor(0))
    transport.close()
