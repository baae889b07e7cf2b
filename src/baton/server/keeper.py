"""Keeps an instance running: starts it, and starts it anew when it ends.

An instance shares one fate: when a rank dies all of it ends, and nothing is mended in place. So the keeper
starts another one of the same name, on the same coordinator port, in a new epoch. What ends again and again
is given up, and the process with it.
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
from baton.errors import BatonError, ConfigError, EngineError, LayoutError
from baton.web.problems import Problem, failure

FAILURES_MAX = 5
FAILURES_S = 60.0
BACK_OFF_S = 0.5
BACK_OFF_S_MAX = 8.0

_log = logging.getLogger("baton.server")


class Keeper:
    """One thread that lives as long as the server, and the instance that it keeps."""

    def __init__(self, config: EngineConfig, on_change: Callable[[], None]) -> None:
        self.config = config
        self.stage = "reading the checkpoint"
        """How far it is, for people."""
        self.num_starts = 0
        self.failure: BatonError | None = None
        """Why the keeper gave up, once it has."""
        self._instance: Instance | None = None
        self._sizes: EngineSizes | None = None
        self._on_change = on_change
        self._woken = threading.Event()
        self._is_closing = False
        self._ran_s = 0.0
        """How long instances were running, all together: what loads is no sign of health, however slowly."""
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self._thread = threading.Thread(target=self._run, name="baton keeper", daemon=True)

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served and handed over."""
        instance = self._instance
        return instance is not None and instance.is_running

    @property
    def instance(self) -> Instance:
        """The running instance; a Problem that says how far it is while there is none."""
        instance = self._instance
        if instance is None or not instance.is_running:
            raise failure("LOADING", f"{self.config.name} is not ready: {self.stage}; ask again soon")
        return instance

    @property
    def latest(self) -> Instance | None:
        """The running instance, if there is one."""
        return self._instance

    def start(self) -> None:
        """Begins, and returns at once."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Ends the instance; whoever is still loading after this time ends with the process."""
        self._is_closing = True
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._live()
        except BatonError as error:
            self.failure = error
            self._say(f"given up: {error}")

    def _live(self) -> None:
        """One life of an instance, and the pause after it."""
        cause = self._until_ended()
        if self._is_closing:
            return
        now_s = self._ran_s
        self._failures.append(now_s)
        if len(self._failures) == FAILURES_MAX and now_s - self._failures[0] < FAILURES_S:
            raise EngineError(
                f"{self.config.name} ended {FAILURES_MAX} times within {FAILURES_S:.0f} s of running, "
                f"at last: {cause}"
            )
        num_recent = sum(1 for each_s in self._failures if now_s - each_s < FAILURES_S)
        pause_s = min(BACK_OFF_S_MAX, BACK_OFF_S * 2 ** (num_recent - 1))
        self._say(f"restarting: {cause}")
        self._woken.wait(pause_s)

    def _until_ended(self) -> str:
        """Starts an instance and waits for its end; why it ended."""
        self._woken.clear()
        try:
            instance = Instance(self.config, self._sizes)
        except (OSError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        # Whatever is wrong with the configuration was raised by now, and no restart would mend it.
        self._sizes = instance.sizes
        self._say("loading weights")
        try:
            instance.start(lambda text: self._say(f"loading weights: {text}"))
        except (ConfigError, LayoutError):
            raise
        except (BatonError, OSError, MemoryError) as error:
            return str(error) or type(error).__name__
        self.num_starts += 1
        self.config = replace(self.config, port=int(instance.address.rpartition(":")[2]))
        self._instance = instance
        instance.on_end(self._woken.set)
        self._say("running")
        begun_s = monotonic()
        self._woken.wait()
        self._ran_s += monotonic() - begun_s
        self._instance = None
        self._say("closing" if self._is_closing else f"ended: {instance.failure}")
        instance.close()
        return instance.failure

    def _say(self, stage: str) -> None:
        self.stage = stage
        _log.info("%s: %s", self.config.name, stage)
        self._on_change()


def draining(name: str) -> Problem:
    """What a request hears that comes while no new ones are taken."""
    return failure("DRAINING", f"{name} is draining and takes no new requests; ask another instance")
