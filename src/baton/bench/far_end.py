"""A target in a process of its own: what `baton doctor` and `baton bench transport` write into.

The parent speaks JSON lines over the child's standard input and output: it asks for a region, for its digest
and for the moment a batch landed. Nothing of a transport's own traffic crosses these pipes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self

import numpy as np

from baton.errors import TransportError
from baton.transport import (
    Description,
    Invitation,
    Landed,
    Ranges,
    RemoteRegion,
    Transport,
    open_transport,
    wait_for_events,
)

ANSWER_S_MAX = 60.0


class Target:
    """The far end's side: a transport, one region and its invited peers."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        self.transport = transport
        self.buffer = transport.allocate(num_bytes)
        self.region = transport.register(self.buffer)

    def invite(self) -> dict[str, Any]:
        """Admits a peer and lets it write everything."""
        invitation: Invitation = self.transport.invite()
        self.transport.grant(invitation.peer, self.region, Ranges.whole(self.region))
        return {"description": invitation.description.to_json(), "region": self.region.remote.to_json()}

    def digest(self) -> str:
        """A hash of the region as it is now."""
        return hashlib.blake2b(self.buffer, digest_size=16).hexdigest()

    def landed_at(self, tag: int) -> int:
        """When the batch of this tag was announced, by the clock that all processes of a host share."""
        say("waiting")
        while events := wait_for_events(self.transport, ANSWER_S_MAX):
            if any(isinstance(event, Landed) and event.tag == tag for event in events):
                return monotonic_ns()
        raise TransportError(f"batch {tag} was not announced within {ANSWER_S_MAX:.0f} s")


def say(answer: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(name: str, options: dict[str, Any], num_bytes: int) -> None:
    """The child's loop; ends when the parent's pipe does."""
    target = Target(open_transport(name, **options), num_bytes)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        say(getattr(target, method)(*arguments))
    target.transport.close()


class FarEnd:
    """A target in a child process, as its parent sees it."""

    def __init__(self, name: str, options: dict[str, Any], num_bytes: int) -> None:
        words = [sys.executable, "-m", "baton.bench.far_end", name, json.dumps(options), str(num_bytes)]
        self.child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the far Target and waits for its answer."""
        self.begin(method, *arguments)
        return self.answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Calls a method whose answer is fetched later."""
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps([method, *arguments]) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def answer(self) -> Any:
        """The answer to the oldest call without one."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise self._lost()
        return json.loads(line)

    def invite(self) -> tuple[Description, RemoteRegion]:
        """What a source needs to write into the far region."""
        found = self.ask("invite")
        return Description.from_json(found["description"]), RemoteRegion.from_json(found["region"])

    def _lost(self) -> TransportError:
        self.child.wait(ANSWER_S_MAX)
        assert self.child.stderr is not None
        last = (self.child.stderr.read().strip().splitlines() or ["it said nothing"])[-1]
        return TransportError(f"the process at the far end ended: {last}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        for pipe in (self.child.stdout, self.child.stderr):
            assert pipe is not None
            pipe.close()


def random_bytes(num_bytes: int, seed: int) -> np.ndarray:
    """Content that a digest can tell apart."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
