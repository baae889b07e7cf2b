"""Two hosts on this machine: network namespaces joined by a cable of a given speed, made without root.

A namespace lives as long as the process that holds it. Everything on a host is started by a child that enters
the namespaces right after its fork, so the tests themselves stay where they are.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.serve.parts import ANSWER_S_MAX, Answer

from baton.fork_server import die_with

NETWORK = "10.77.0"
TOOL_S_MAX = 60.0
_libc = ctypes.CDLL(None, use_errno=True)
_ASKER = Path(__file__).with_name("asker.py")
_RELAY = Path(__file__).with_name("relay.py")


class NoHosts(Exception):  # noqa: N818  (a property of the machine, not a failure)
    """Namespaces cannot be made here, and why."""


class Host:
    """A network namespace with one cable, `eth`, and an address on it."""

    def __init__(self, name: str, holder: subprocess.Popen[bytes], address: str) -> None:
        self.name = name
        self.address = address
        self.holder = holder
        self._handles = [os.open(f"/proc/{holder.pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "net")]

    def enter(self) -> None:
        """For a child right after its fork."""
        for handle in self._handles:
            if _libc.setns(handle, 0):
                os._exit(111)
        die_with(os.getppid())

    def tool(self, *words: str) -> str:
        """Runs a command here."""
        done = subprocess.run(
            words, preexec_fn=self.enter, capture_output=True, text=True, timeout=TOOL_S_MAX, check=False
        )
        if done.returncode:
            raise NoHosts(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
        return done.stdout

    def limit(self, mbit: float) -> None:
        """What leaves this host is as fast as that; 0: as fast as it can be."""
        if mbit:
            rate = ("rate", f"{mbit}mbit", "burst", "16kb", "latency", "2s")
            self.tool("tc", "qdisc", "replace", "dev", "eth", "root", "tbf", *rate)
        else:
            self.tool("tc", "qdisc", "del", "dev", "eth", "root")

    def cut(self) -> None:
        """Pulls the cable out."""
        self.tool("ip", "link", "set", "eth", "down")

    def mend(self) -> None:
        """Puts it back."""
        self.tool("ip", "link", "set", "eth", "up")

    def reset(self, other: Host) -> list[str]:
        """Resets every connection to the other host; those that it ended, none on a kernel that cannot."""
        return self.tool("ss", "-HK", "dst", other.address).splitlines()

    @contextmanager
    def relay(self, path: Path, url: str) -> Iterator[Path]:
        """A socket in the file system by which clients that are not on this host reach a server on it."""
        where = urlsplit(url)
        words = [sys.executable, "-I", str(_RELAY), str(path), str(where.hostname), str(where.port)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=self.enter)  # noqa: PLW1509
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield path
        finally:
            process.kill()
            process.wait(TOOL_S_MAX)
            process.stdout.close()

    def ask(self, url: str, path: str, body: Any = None, key: str | None = None) -> Answer:
        """One request from a client on this host."""
        with self.stream(url, path, body, key) as lines:
            status = int(lines.line())
            return Answer(status, lines.rest(), {})

    def stream(self, url: str, path: str, body: Any = None, key: str | None = None) -> Lines:
        """The same, line by line as it comes; the first line is the status."""
        asked = json.dumps({"url": url, "path": path, "body": body, "key": key, "timeout_s": ANSWER_S_MAX})
        process = subprocess.Popen(
            [sys.executable, "-I", str(_ASKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=self.enter,  # noqa: PLW1509 - a few system calls, no lock taken
        )
        assert process.stdin is not None
        process.stdin.write(asked.encode())
        process.stdin.close()
        return Lines(process)

    def close(self) -> None:
        """Ends the namespace, once nothing runs in it any more."""
        for handle in self._handles:
            os.close(handle)
        self.holder.kill()
        self.holder.wait(TOOL_S_MAX)


class Lines:
    """What a client reads."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(TOOL_S_MAX)
        self._process.stdout.close()

    def line(self) -> str:
        """The next one; empty at the end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode()

    def rest(self) -> bytes:
        """All that is left."""
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def events(self) -> Iterator[Any]:
        """What is left, as events of a stream of JSON; [DONE] is the last."""
        while line := self.line():
            if line.startswith("data:"):
                data = line.removeprefix("data:").strip()
                yield data if data == "[DONE]" else json.loads(data)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; raises NoHosts where the machine does not allow it."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoHosts(f"there is no {', '.join(missing)}")
    found: list[Host] = []
    try:
        found.append(Host("a", _held("-Urn"), f"{NETWORK}.1"))
        found.append(Host("b", _held("-n", found[0]), f"{NETWORK}.2"))
        _cable(*found)
        yield found[0], found[1]
    finally:
        for host in reversed(found):
            host.close()


def _held(flags: str, inside: Host | None = None) -> subprocess.Popen[bytes]:
    """A process that does nothing, in namespaces of its own."""
    script = "echo ready; exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", flags, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=partial(die_with, os.getpid()) if inside is None else inside.enter,  # noqa: PLW1509
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder.stdout as output, holder.stderr as errors:
        if output.readline() != b"ready\n":
            said = errors.read().decode().strip()
            holder.wait(TOOL_S_MAX)
            raise NoHosts(f"unshare {flags}: {said or holder.returncode}")
    return holder


def _cable(one: Host, other: Host) -> None:
    one.tool("ip", "link", "add", "eth", "type", "veth", "peer", "name", "far")
    one.tool("ip", "link", "set", "far", "netns", str(other.holder.pid))
    other.tool("ip", "link", "set", "far", "name", "eth")
    for host in (one, other):
        host.tool("ip", "address", "add", f"{host.address}/24", "dev", "eth")
        host.tool("ip", "link", "set", "lo", "up")
        host.tool("ip", "link", "set", "eth", "up")
        host.limit(100)
        host.limit(0)
