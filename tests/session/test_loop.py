"""The production loop over real sockets: what drivers hear, what strangers hear, and what is left behind."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from tests.session.link_ends import DECODE, OFFERS, PREFILL, SECRET, dialled, introduction
from tests.session.loop_world import Loops, NoDirectory, converse, fds, hear, opened

from baton.errors import BatonError, ConfigError, LocalProtocolError, RemoteProtocolError
from baton.plan.steps import Spans
from baton.protocol.handshake import MEMBER, Party
from baton.protocol.messages import Heartbeat, Message, Path, Paths
from baton.session import links
from baton.session.links import SocketConfig
from baton.session.loop import LOCAL, DriverLoop
from baton.transport import Done, Ranges, open_transport
from baton.transport.base import Batch
from baton.transport.fences import NOW

# A socket or a task that nobody closed is a warning, and so an error.
pytestmark = pytest.mark.filterwarnings("error")
HASTY = SocketConfig(handshake_s=0.3, connect_s=0.3)
RANK = Party(introduction("prefill", rank=2), SECRET, dials=MEMBER)


@pytest.fixture
def loops() -> Iterator[Loops]:
    yield from opened()


def paths(num_bytes: int) -> Paths:
    """A large message."""
    return Paths(paths=(Path(0, 0, 0, b"x" * num_bytes, {}),))


# Links between loops.


def test_drivers_are_linked_with_the_same_channel_and_each_others_introductions(loops: Loops):
    near, far, link, _ = loops.pair(DECODE)
    ((_, peer, channel),) = near.wait("linked")
    ((_, far_peer, far_channel),) = far.wait("linked")
    assert (peer, far_peer) == (PREFILL.introduction, DECODE.introduction)
    assert channel == far_channel
    assert len(channel) == 16
    assert near.wait("dialled") == [(link,)]


def test_messages_arrive_in_order_on_the_links_number(loops: Loops):
    near, far, link, far_link = loops.pair(DECODE)
    near.ports.post(lambda: [near.ports.send(link, offer) for offer in OFFERS])
    assert far.wait("received", 4) == [(far_link, offer) for offer in OFFERS]
    far.ports.post(lambda: far.ports.send(far_link, Heartbeat()))
    assert near.messages(1) == [Heartbeat()]
    assert len(near.threads) == 1
    assert threading.get_ident() not in near.threads


def test_several_links_of_one_driver_have_their_own_numbers_and_channels(loops: Loops):
    loop, far = loops.make(PREFILL)
    near_loop, near = loops.make(DECODE)
    for _ in range(3):
        loops.dial(near_loop, near, loop.address)
    linked = near.wait("linked", 3)
    assert len({link for link, _, _ in linked}) == len({channel for _, _, channel in linked}) == 3
    assert len({link for link, _, _ in far.wait("linked", 3)}) == 3


def test_hang_up_delivers_what_was_queued_and_only_the_other_end_hears_of_it(loops: Loops):
    near, far, link, far_link = loops.pair(DECODE)

    def leave() -> None:
        for offer in OFFERS:
            near.ports.send(link, offer)
        near.ports.hang_up(link)
        near.ports.send(link, Heartbeat())  # vanishes
        near.ports.hang_up(link)

    near.ports.post(leave)
    assert far.wait("lost") == [(far_link, "the peer closed the connection")]
    assert far.messages(4) == OFFERS
    assert [what[0] for what in near.told] == ["dialled", "linked"]


def test_last_words_are_heard_though_the_other_end_is_still_sending(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(links, "LINGER_S", 20.0)
    loop, far = loops.make(PREFILL)
    sock = loops.connect(loop.address)
    link = converse(sock, dialled())
    last = paths(8 << 20)

    def leave(number: int, message: Message) -> None:
        far.ports.send(number, last)
        far.ports.hang_up(number)

    far.on_message = leave
    sock.sendall(b"".join(link.send(OFFERS[0]) for _ in range(5000)))
    assert link.receive(hear(sock), 0.0) == [last]
    assert len([what for what in far.told if what[0] == "received"]) == 1


def test_writes_of_one_turn_leave_together(loops: Loops):
    loop, far = loops.make(PREFILL)
    sock = loops.connect(loop.address)
    link = converse(sock, dialled())
    ((number, _, _),) = far.wait("linked")
    far.ports.post(lambda: [far.ports.send(number, offer) for offer in OFFERS * 10])
    assert link.receive(sock.recv(1 << 20), 0.0) == OFFERS * 10


def test_a_message_does_not_wait_for_the_one_before(loops: Loops):
    """Without the option a message leaves when the last one is acknowledged, which takes 40 ms."""
    near, far, link, _ = loops.pair(DECODE)
    far.on_message = far.ports.send
    near.ports.post(lambda: near.ports.send(link, OFFERS[0]))
    near.wait("received")
    options = []
    for name in fds() - loops.before:
        place, _, number = name.rpartition("]")
        if place.startswith("socket:"):
            with socket.socket(fileno=os.dup(int(number))) as sock, suppress(OSError):
                sock.getpeername()
                if sock.family == socket.AF_INET:
                    options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
    assert options == [1, 1]


def test_peer_that_does_not_read_loses_its_link(loops: Loops, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(links, "UNREAD_BYTES_MAX", 1 << 20)
    loop, far = loops.make(PREFILL)
    converse(loops.connect(loop.address), dialled())
    ((number, _, _),) = far.wait("linked")
    bulky = paths(1 << 20)
    for _ in range(64):
        far.ports.post(lambda: far.ports.send(number, bulky))
    assert "unread" in far.wait("lost")[0][1]
    assert len([what for what in far.told if what[0] == "lost"]) == 1


# Links that stand and go wrong.


def test_message_that_the_driver_refuses_costs_the_peer_its_link(loops: Loops):
    near, far, link, _ = loops.pair(DECODE)

    def refuse(number: int, message: Message) -> None:
        raise RemoteProtocolError("offer: Beat has no place here")

    far.on_message = refuse
    near.ports.post(lambda: near.ports.send(link, Heartbeat()))
    assert "Beat has no place here" in near.wait("lost")[0][1]
    assert "Beat has no place here" in far.wait("lost")[0][1]
    assert not any(ended.causes for ended in loops.ended.values())


@pytest.mark.parametrize("how", ["received", "tick", "posted", "next_tick"])
def test_driver_that_fails_ends_the_instance_loudly(loops: Loops, how: str, caplog: pytest.LogCaptureFixture):
    near, far, link, _ = loops.pair(DECODE)
    loop = loops.made[0]

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    far.on_message = far.on_tick = fail
    with caplog.at_level(logging.ERROR):
        if how == "received":
            near.ports.post(lambda: near.ports.send(link, Heartbeat()))
        elif how == "tick":
            far.ports.post(lambda: setattr(far, "next_tick_s", 0.0))
        elif how == "next_tick":
            far.ports.post(lambda: setattr(far, "next_tick", fail))
        else:
            far.ports.post(fail)
        assert loops.ended[loop].wait() == "a step of the driver failed: ZeroDivisionError: a bug"
    near.wait("lost")
    loop.close()
    assert len(loops.ended[loop].causes) == 1
    assert "Traceback" in caplog.text


def test_what_is_queued_at_the_end_is_sent_before_the_owner_hears_of_it(loops: Loops):
    far_loop, far = loops.make(PREFILL)
    causes = []

    def on_end(cause: str) -> None:
        assert far.messages(1) == OFFERS[:1]  # as if the process ended here
        causes.append(cause)

    near_loop, near = loops.make(DECODE, on_end=on_end)
    loops.dial(near_loop, near, far_loop.address)
    ((link, _, _),) = near.wait("linked")

    def finish() -> None:
        near.ports.send(link, OFFERS[0])
        near.ports.end("enough")
        near.ports.end("twice")

    near.ports.post(finish)
    far.wait("lost")
    near_loop.close()
    assert causes == ["enough"]
    assert [what[0] for what in near.told] == ["dialled", "linked"]


def test_loop_that_dies_takes_the_instance_down(loops: Loops, monkeypatch: pytest.MonkeyPatch):
    loop, _ = loops.make(DECODE)
    reported: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda report: reported.append(report.exc_type))

    def die() -> None:
        raise KeyboardInterrupt

    loop.post(die)
    assert loops.ended[loop].wait() == "the control loop died"
    loop.close()
    assert reported == [KeyboardInterrupt]


def test_owner_may_close_from_its_end_callback(loops: Loops):
    causes = []

    def on_end(cause: str) -> None:
        causes.append(cause)
        loop.close()

    loop, driver = loops.make(DECODE, on_end=on_end)
    loop.post(lambda: driver.ports.end("over"))
    loops.made[-1].close()
    assert causes == ["over"]


LOUD = """
from tests.session.link_ends import DECODE
from tests.session.loop_world import NoDirectory, Recorder
from baton.session.links import SocketConfig
from baton.session.loop import DriverLoop
loop = DriverLoop(SocketConfig(), directory=NoDirectory())
ports = loop.ports(DECODE)
loop.add(ports, Recorder(ports))
loop.start()
loop.post(lambda: ports.end("rank 3 died"))
loop._thread.join(20)
"""


def test_instance_ends_by_default_with_one_line_and_status_1():
    done = subprocess.run(
        [sys.executable, "-c", LOUD], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "baton: this instance ends: rank 3 died\n"


# What else drivers ask for.


def test_rank_and_coordinator_of_one_loop_are_linked_without_a_socket(loops: Loops):
    loop, coordinator, rank = loops.make(PREFILL, RANK)
    loops.dial(loop, rank, LOCAL)
    ((link, peer, channel),) = rank.wait("linked")
    ((far_link, far_peer, far_channel),) = coordinator.wait("linked")
    assert (peer, far_peer, channel) == (PREFILL.introduction, RANK.introduction, far_channel)

    def talk() -> None:
        for offer in OFFERS:
            rank.ports.send(link, offer)
            assert coordinator.told[-1][0] == "linked"  # nobody is called before `send` returns
        rank.ports.hang_up(link)

    loop.post(talk)
    assert coordinator.wait("lost") == [(far_link, "the peer closed the link")]
    assert coordinator.messages(4) == OFFERS
    loop.post(lambda: coordinator.ports.send(far_link, Heartbeat()))
    loop.close()
    assert [what[0] for what in rank.told] == ["dialled", "linked"]


def test_rank_of_another_process_is_a_member_by_socket(loops: Loops):
    near, far, link, _ = loops.pair(RANK)
    assert far.wait("linked")[0][1].rank == 2
    near.ports.post(lambda: near.ports.send(link, Heartbeat()))
    assert far.messages(1) == [Heartbeat()]


def test_local_link_without_its_coordinator_is_lost(loops: Loops):
    loop, rank = loops.make(RANK)
    loops.dial(loop, rank, LOCAL)
    assert rank.wait("lost")[0][1] == "no coordinator of prefill in this process"


def test_local_peer_that_misbehaves_loses_its_link(loops: Loops):
    loop, coordinator, rank = loops.make(PREFILL, RANK)
    loops.dial(loop, rank, LOCAL)
    ((link, _, _),) = rank.wait("linked")

    def refuse(number: int, message: Message) -> None:
        raise RemoteProtocolError("not now")

    coordinator.on_message = refuse
    loop.post(lambda: rank.ports.send(link, Heartbeat()))
    assert rank.wait("lost") == [(link, "not now")]
    assert coordinator.wait("lost")[0][1] == "not now"


def test_ticks_come_when_they_are_wanted_and_not_before(loops: Loops):
    loop, driver = loops.make(DECODE)
    wanted: list[float] = []

    def again() -> None:
        driver.next_tick_s = None
        if len(wanted) < 5:
            driver.next_tick_s = driver.ports.now() + 0.01
            wanted.append(driver.next_tick_s)

    driver.on_tick = again
    loop.post(again)
    ticked = [moment for (moment,) in driver.wait("tick", 5)]
    assert all(moment >= due for moment, due in zip(ticked, wanted, strict=True))
    loop.post(lambda: driver.note("quiet"))
    driver.wait("quiet")
    assert len([what for what in driver.told if what[0] == "tick"]) == 5


@pytest.mark.parametrize(("first_s", "then_s"), [(3600.0, 0.01), (0.02, 0.1)])
def test_tick_may_be_wanted_at_another_time_than_before(loops: Loops, first_s: float, then_s: float):
    loop, driver = loops.make(DECODE)

    def on_tick() -> None:
        driver.note("late", driver.ports.now() - driver.next_tick_s)
        driver.next_tick_s = None

    def want(after_s: float) -> None:
        driver.next_tick_s = driver.ports.now() + after_s
        # A turn later, so that the first wish is known to the loop before the second.
        driver.ports.run(lambda: None, lambda result: driver.note("wanted"))

    driver.on_tick = on_tick
    for number, after_s in enumerate((first_s, then_s), start=1):
        loop.post(lambda after_s=after_s: want(after_s))
        driver.wait("wanted", number)
    driver.wait("late")
    assert all(what[1] >= 0 for what in driver.told if what[0] == "late")


def test_driver_that_always_wants_a_tick_does_not_stop_the_rest(loops: Loops):
    near, far, link, _ = loops.pair(DECODE)
    far.on_tick = far.told.pop
    far.ports.post(lambda: setattr(far, "next_tick_s", 0.0))
    near.ports.post(lambda: near.ports.send(link, Heartbeat()))
    assert far.messages(1) == [Heartbeat()]


def test_jobs_run_beside_the_loop_and_come_back_to_it(loops: Loops):
    loop, driver = loops.make(DECODE)
    seen: list[int] = []

    def job() -> str:
        seen.append(threading.get_ident())
        return "done"

    def failing() -> None:
        raise OSError("disk")

    def begin() -> None:
        driver.ports.run(job, lambda result: driver.note("ran", result))
        driver.ports.run(failing, lambda result: driver.note("ran", result))
        driver.ports.run(lambda: None, lambda result: driver.note("ran", result))

    loop.post(begin)
    (first,), (second,), (third,) = driver.wait("ran", 3)
    assert (first, third) == ("done", None)
    assert isinstance(second, OSError)
    assert not driver.threads.intersection(seen)
    assert len(driver.threads) == 1


class Book:
    """A directory of one entry."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.is_closed = False

    async def look_up(self, instance: str) -> str:
        await asyncio.sleep(0)
        if instance != "prefill":
            raise BatonError(f"nobody knows {instance}")
        return "10.0.0.1:7000"

    async def serve(self, address: str) -> None:
        if self.served:
            raise BatonError("displaced")
        self.served.append(address)

    async def close(self) -> None:
        self.is_closed = True


def test_directory_is_asked_told_and_closed(loops: Loops):
    book = Book()
    loop, driver = loops.make(PREFILL, directory=book)
    loop.post(lambda: driver.ports.look_up("prefill", lambda *found: driver.note("found", *found)))
    assert driver.wait("found") == [("10.0.0.1:7000", "")]
    loop.post(lambda: driver.ports.look_up("nobody", lambda *found: driver.note("not found", *found)))
    assert driver.wait("not found") == [(None, "nobody knows nobody")]
    loop.post(driver.ports.serving)
    loop.post(driver.ports.serving)
    assert "displaced" in loops.ended[loop].wait()
    loop.close()
    assert book.served == [loop.address]
    assert book.is_closed


def test_posts_of_many_threads_all_arrive_in_their_order(loops: Loops):
    loop, driver = loops.make(DECODE)

    def post_all(name: int) -> None:
        for number in range(500):
            loop.post(lambda number=number: driver.note("post", name, number))  # type: ignore[misc]

    posters = [threading.Thread(target=post_all, args=(name,)) for name in range(4)]
    for thread in posters:
        thread.start()
    for thread in posters:
        thread.join()
    arrived = driver.wait("post", 2000)
    for name in range(4):
        assert [number for of, number in arrived if of == name] == list(range(500))
    assert len(driver.threads) == 1


def test_posts_before_the_start_are_done_and_after_the_end_not():
    loop = DriverLoop(SocketConfig(), directory=NoDirectory())
    done: list[str] = []
    loop.post(lambda: done.append("early"))
    loop.start()
    loop.close()
    loop.post(lambda: done.append("late"))
    assert done == ["early"]


def test_completions_of_a_transport_reach_the_driver(loops: Loops):
    source, target = (open_transport("memory") for _ in range(2))
    buffers = [np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)]
    regions = [source.register(buffers[0]), target.register(buffers[1])]
    invitation = target.invite()
    target.grant(invitation.peer, regions[1], Ranges.whole(regions[1]))
    loop = DriverLoop(SocketConfig(), directory=NoDirectory())
    loops.made.append(loop)
    ports = loop.ports(DECODE)
    driver = type(loops.make(DECODE)[1])(ports)
    loop.add(ports, driver)
    loop.watch(source, driver.on_completion)
    loop.start()
    zero, length = np.zeros(1, dtype=np.int64), np.full(1, 64, dtype=np.int64)
    peer = source.connect(invitation.description)
    ticket = source.submit(peer, Batch(regions[0], regions[1].remote, Spans(zero, zero, length)), NOW)
    assert driver.wait("completion") == [(Done(ticket),)]
    assert buffers[1].tolist() == list(range(64))
    loop.close()
    source.close()
    target.close()


# Beginning and ending.


def test_close_leaves_nothing_whatever_was_going_on(loops: Loops):
    near, far, link, _ = loops.pair(DECODE)
    far_loop, near_loop = loops.made
    loops.connect(far_loop.address)  # a stranger who says nothing
    sock = loops.connect(far_loop.address)
    sock.sendall(dialled().begin(0.0))
    assert sock.recv(4096)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        loops.dial(near_loop, near, f"127.0.0.1:{silent.getsockname()[1]}")
        near_loop.post(lambda: near.ports.run(lambda: time.sleep(0.05), lambda result: None))
        near_loop.post(lambda: near.ports.run(lambda: None, lambda result: near.note("never")))
        near.ports.post(lambda: near.ports.send(link, OFFERS[0]))
        near_loop.close()
        near_loop.close()
    assert far.messages(1) == OFFERS[:1]
    assert ("never",) not in near.told


def test_port_in_use_is_an_error_of_configuration(loops: Loops):
    loop, _ = loops.make(PREFILL)
    port = int(loop.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
        loops.make(PREFILL, config=SocketConfig(port=port))


def test_ipv6(loops: Loops):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as reason:
        pytest.skip(f"no IPv6 here: {reason}")
    loop, _ = loops.make(PREFILL, config=SocketConfig(host="::1"))
    near_loop, near = loops.make(DECODE)
    assert loop.address.startswith("[::1]:")
    loops.dial(near_loop, near, loop.address)
    near.wait("linked")


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"host": ""}, {"port": 70000}, {"port": -1}])
def test_config_that_cannot_be_listened_on(options: dict[str, object]):
    with pytest.raises(ConfigError):
        SocketConfig(**options)  # type: ignore[arg-type]


def test_drivers_are_added_before_the_start_and_one_accepts(loops: Loops):
    loop, _ = loops.make(DECODE)
    with pytest.raises(LocalProtocolError, match="started already"):
        loop.add(loop.ports(RANK), None)
    other = DriverLoop(SocketConfig(), directory=NoDirectory())
    other.add(other.ports(PREFILL), None)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="one driver that accepts"):
        other.add(other.ports(PREFILL), None)  # type: ignore[arg-type]
    other.close()
