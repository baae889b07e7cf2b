"""A transfer target in another process: `baton doctor` and `baton bench transport` write into it.

The parent asks it for a region and the region's digest. These calls are JSON lines on the child's stdin and
stdout; the transport's own traffic does not use them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from typing import Any

import numpy as np

from baton.supervisor import ChildProcess, serve_calls
from baton.transport import (
    Invitation,
    Place,
    Ranges,
    Region,
    Transport,
    open_transport,
)


class TransferTarget:
    """A transport with one region that invited peers may write."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        self.transport = transport
        is_on_host = Place.HOST in transport.capabilities.places
        self.buffer: Any = (
            transport.allocate(num_bytes) if is_on_host else on_gpu(np.zeros(num_bytes, dtype=np.uint8))
        )
        self.region = transport.register(self.buffer)

    def invite(self) -> dict[str, Any]:
        """Admits a peer and grants it the whole region."""
        invitation: Invitation = self.transport.invite()
        self.transport.grant(invitation.peer, self.region, Ranges.whole(self.region))
        return {
            "description": invitation.description.to_bytes().decode(),
            "region": self.region.remote.to_bytes().decode(),
        }

    def digest(self) -> str:
        """A hash of the region's bytes."""
        return digest(self.buffer if isinstance(self.buffer, np.ndarray) else self.buffer.cpu().numpy())


class TargetProcess(ChildProcess):
    """A `TransferTarget` in a child process."""

    def __init__(self, name: str, options: dict[str, Any], num_bytes: int) -> None:
        arguments = [name, json.dumps(options), str(num_bytes)]
        super().__init__("the target process", [sys.executable, "-m", __name__, *arguments], has_stdin=True)

    def invite(self) -> Any:
        return self.ask("invite")

    def digest(self) -> Any:
        return self.ask("digest")


def on_gpu(content: np.ndarray) -> Any:
    """A CUDA tensor with this content."""
    torch = importlib.import_module("torch")  # takes seconds, and only CUDA memory needs it
    tensor = torch.from_numpy(content).cuda()
    torch.cuda.synchronize()
    return tensor


def registered(transport: Transport, content: np.ndarray) -> Region:
    """A region with this content, on the GPU if the transport moves no host memory."""
    is_on_host = Place.HOST in transport.capabilities.places
    return transport.register(content if is_on_host else on_gpu(content))


def digest(content: np.ndarray) -> str:
    """A hash of some bytes."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def random_bytes(num_bytes: int, seed: int) -> np.ndarray:
    """Random content, so that a digest detects any change."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


if __name__ == "__main__":
    target = TransferTarget(open_transport(sys.argv[1], **json.loads(sys.argv[2])), int(sys.argv[3]))
    serve_calls(target, sys.stdin)
    target.transport.close()
