"""A child process that offers memory to a baseline: it prints where, and ends with its parent's pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from baton.errors import TransportError


class Child:
    """The parent's side."""

    def __init__(self, module: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def tell(self, words: Any) -> None:
        """One line to the child."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def told(self) -> Any:
        """What the child said about its memory; libraries may print before it does."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"baton "):
                return json.loads(line[6:])
        raise TransportError(f"the far process of a baseline ended: exit code {self.process.wait(10)}")

    def close(self) -> None:
        """Lets the child end, and makes it if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Baseline:
    """A context manager around a child."""

    child: Child

    def close(self) -> None:
        """Lets the child end."""
        self.child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def offer(describe: Callable[[int], dict[str, Any]]) -> None:
    """The child's side: describes memory of the size asked for, and waits for the parent to go."""
    print("baton " + json.dumps(describe(int(sys.argv[1]))), flush=True)
    sys.stdin.read()
    os._exit(0)  # a library's threads must not keep a measured machine busy
