"""A process per rank of a layout, each running the same function on its mesh."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from baton.engine.parallel import Mesh, connect
from baton.plan import parse_layout

TIMEOUT_S = 60.0
CPU = torch.device("cpu")
Task = Callable[..., Any]


def on_mesh(
    layout: str,
    rendezvous: Path,
    task: Task,
    *args: Any,
    device: torch.device = CPU,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """What `task(mesh, *args)` gives on each rank; a rank that fails fails the test with its traceback."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.engine.parallel.script"])
    ends = []
    for rank in range(parse_layout(layout).num_ranks):
        here, there = context.Pipe()
        child = context.Process(
            target=_child,
            args=(there, (layout, rank, rendezvous, device, timeout_s), (task, args)),
            daemon=True,
        )
        child.start()
        there.close()
        ends.append((child, here))
    answers, failures = [], []
    for rank, (child, here) in enumerate(ends):
        try:
            is_right, answer = here.recv()
        except EOFError:
            is_right, answer = False, "ended without an answer"
        answers.append(answer)
        failures.extend([] if is_right else [f"rank {rank}: {answer}"])
        child.join()
    assert not failures, "\n".join(failures)
    return answers


def _child(
    tell: Connection, where: tuple[str, int, Path, torch.device, float], what: tuple[Task, tuple[Any, ...]]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    layout, rank, rendezvous, device, timeout_s = where
    task, args = what
    try:
        mesh: Mesh = connect(parse_layout(layout), rank, rendezvous, device, timeout_s)
        answer = task(mesh, *args)
        mesh.close()
    except Exception:
        tell.send((False, traceback.format_exc()))
        return
    tell.send((True, answer))
