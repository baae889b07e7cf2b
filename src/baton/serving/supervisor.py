"""Keeps an engine instance running: starts it, and restarts it when it ends.

When one rank dies, the whole instance ends and nothing is repaired in place. The supervisor then starts
another instance of the same name, on the same coordinator port, in a new epoch. An instance that ends again
and again is given up, and the server with it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from baton.engine.config import EngineConfig, EngineSizes
from baton.engine.instance import Instance
from baton.errors import BatonError, ConfigError, EngineError, LayoutError, for_clients
from baton.serving.http import failure

FAILURES_MAX = 5
FAILURES_S = 60.0
BACK_OFF_S = 0.5
BACK_OFF_S_MAX = 8.0

_log = logging.getLogger("baton.serving.server")


class InstanceSupervisor:
    """One thread that lives as long as the server, and the instance that it runs."""

    def __init__(self, config: EngineConfig, on_change: Callable[[], None]) -> None:
        self.config = config
        self.stage = "reading the checkpoint"
        """The progress of the instance, for people."""
        self.num_starts = 0
        self.failure: BatonError | None = None
        """Why the supervisor gave up, once it has."""
        self.instance: Instance | None = None
        """The instance, while there is one."""
        self._sizes: EngineSizes | None = None
        self._on_change = on_change
        self._woken = threading.Event()
        self._is_closing = False
        self._ran_s = 0.0
        """How long instances were running, all together: loading is no sign of health, however slow."""
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._thread = threading.Thread(target=self._run, name="baton supervisor", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served and handed over."""
        instance = self.instance
        return instance is not None and instance.is_running

    def running(self) -> Instance:
        """The running instance; raises an ApiError with the stage while there is none."""
        instance = self.instance
        if instance is None or not instance.is_running:
            text = f"{self.config.name} is not ready: {for_clients(self.stage)}; ask again soon"
            raise failure("LOADING", text)
        return instance

    def start(self) -> None:
        """Starts the instance in the background."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the instance; one that is still loading after this time ends with the process."""
        self._is_closing = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                cause = self._run_instance()
                if not self._is_closing:
                    self._back_off(cause)
        except BatonError as error:
            self.failure = error
            self._set_stage(f"given up: {error}")

    def _run_instance(self) -> str:
        """Starts an instance and waits for its end; returns why it ended."""
        self._woken.clear()
        try:
            instance = Instance(self.config, self._sizes)
        except (OSError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        # A wrong configuration has raised by now; a restart would not mend it.
        self._sizes = instance.sizes
        self._set_stage("loading weights")
        try:
            instance.start(lambda text: self._set_stage(f"loading weights: {text}"))
        except (ConfigError, LayoutError):
            raise
        except (BatonError, OSError, MemoryError) as error:
            return str(error) or type(error).__name__
        self.num_starts += 1
        self.config = replace(self.config, port=int(instance.address.rpartition(":")[2]))
        self.instance = instance
        instance.on_end(self._woken.set)
        self._set_stage("running")
        began_s = monotonic()
        self._woken.wait()
        self._ran_s += monotonic() - began_s
        self.instance = None
        self._set_stage("closing" if self._is_closing else f"ended: {instance.failure}")
        instance.close()
        return instance.failure

    def _back_off(self, cause: str) -> None:
        now_s = self._ran_s
        self._failures.append(now_s)
        if len(self._failures) == FAILURES_MAX and now_s - self._failures[0] < FAILURES_S:
            raise EngineError(
                f"{self.config.name} ended {FAILURES_MAX} times within {FAILURES_S:.0f} s of running, "
                f"at last: {cause}"
            )
        num_recent = sum(1 for failed_s in self._failures if now_s - failed_s < FAILURES_S)
        self._set_stage(f"restarting: {cause}")
        self._woken.wait(min(BACK_OFF_S_MAX, BACK_OFF_S * 2 ** (num_recent - 1)))

    def _set_stage(self, stage: str) -> None:
        self.stage = stage
        _log.info("%s: %s", self.config.name, stage)
        self._on_change()
