"""Ports that tests name in advance: nobody else's, and free."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path

from baton.supervisor import PORTS
from tests import ports
from tests.ports import NUM_PORTS, are_free, free_port, ports_of


def test_workers_share_no_port() -> None:
    ranges = [ports_of(name) for name in ("", *(f"gw{number}" for number in range(15)))]
    assert all(one.stop <= other.start for one, other in pairwise(ranges))
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert ranges[-1].stop <= min(PORTS.start, int(ephemeral[0]))


def test_a_port_is_named_once_and_one_in_use_never() -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 2)):
        assert not are_free(range(first + 1, first + 3))
        named = {free_port() for _ in range(NUM_PORTS // 2)}
        neighbours = free_port(3)
    assert len(named) == NUM_PORTS // 2
    assert not named & {first, first + 2}
    assert {first, *named, neighbours, neighbours + 2} <= set(ports._ports)
