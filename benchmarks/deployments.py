"""Deployments of any shape on this machine, for suites; `baton up` starts those that users have."""

from __future__ import annotations

import secrets
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from baton.supervisor import DRAIN_S_MAX, ChildProcess, baton_command

START_S_MAX = 300.0


class BenchProcesses:
    """The processes of one measurement, which share a secret; closing ends them, the last one first."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-bench-")
        self.folder = Path(self._folder.name)
        self.children: list[ChildProcess] = []
        self.secret_file = self.folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(32))

    def start(self, name: str, argv: Sequence[str]) -> ChildProcess:
        """Starts one more process."""
        child = ChildProcess(f"{name}-{len(self.children)}", argv, death_signal=signal.SIGINT)
        self.children.append(child)
        return child

    def start_registry(self) -> str:
        """Starts a registry; returns its URL."""
        argv = baton_command("registry", "--port", "0", "--secret-file", str(self.secret_file))
        return self.start("registry", argv).wait_line("registry at ", START_S_MAX)

    def start_router(self, registry: str, options: Sequence[str] = ()) -> tuple[str, ChildProcess]:
        """Starts a router for the instances of a registry; returns its URL once it can hand over."""
        own = ("--registry", registry, "--port", "0", "--secret-file", str(self.secret_file))
        router = self.start("router", baton_command("route", *own, *options))
        url = router.wait_line("routing at ", START_S_MAX)
        router.wait_healthy(url, START_S_MAX)
        return url, router

    def close(self) -> None:
        """Ends all processes."""
        for child in reversed(self.children):
            child.close(DRAIN_S_MAX)
        self.children.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class DeploymentShape:
    """A deployment; the options are those of `baton serve` and `baton route`, as typed."""

    model: str
    prefill: tuple[str, ...] = ("tp1",)
    decode: tuple[str, ...] = ("tp1",)
    """One layout per instance; empty: the prefill instances do both, and clients use the first."""
    instance_options: tuple[str, ...] = ()
    prefill_options: tuple[str, ...] = ()
    route_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchDeployment:
    """A deployment that is ready."""

    url: str
    """For clients: the router's, or the first instance's."""
    registry: str = ""


def start_deployment(processes: BenchProcesses, shape: DeploymentShape) -> BenchDeployment:
    """Starts a deployment and waits until it can hand over."""
    registry = processes.start_registry() if shape.decode else ""
    roles = [("prefill" if shape.decode else "both", layout) for layout in shape.prefill]
    roles += [("decode", layout) for layout in shape.decode]
    children = []
    for role, layout in roles:
        options = ["--role", role, "--model", shape.model, "--layout", layout, "--port", "0"]
        options += ["--name", f"{role}-{len(processes.children)}"]
        options += ["--secret-file", str(processes.secret_file), *shape.instance_options]
        if registry:
            options += ["--registry", registry]
        if role == "prefill":
            options += shape.prefill_options
        children.append(processes.start(role, baton_command("serve", *options)))
    urls = []
    for child in children:
        urls.append(child.wait_line("serving at ", START_S_MAX))
        child.wait_healthy(urls[-1], START_S_MAX)
    if not registry:
        return BenchDeployment(urls[0])
    url, _ = processes.start_router(registry, shape.route_options)
    return BenchDeployment(url, registry)
