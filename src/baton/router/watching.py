"""Follows the registry and the instances themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import msgspec

from baton.router.config import RouterConfig
from baton.router.fleet import Fleet
from baton.router.instances import Instance, Told, card_of
from baton.router.wire.leg import Lost
from baton.router.wire.pool import Call, Pool
from baton.session.registry import Change, ChangeKind, RegistryClient, RegistryError, Topology
from baton.web import read_problem

POLL_S_LIMIT = 5.0
AGAIN_S = 0.2

log = logging.getLogger(__name__)


class Watching:
    """Keeps a fleet as it is: the registry says who is there, polls say how they are."""

    def __init__(self, fleet: Fleet, pool: Pool, config: RouterConfig) -> None:
        self._fleet = fleet
        self._pool = pool
        self._poll_s = config.poll_s
        self._limits = config.limits
        self._poll_s_max = min(POLL_S_LIMIT, config.limits.silence_s_max / 2)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        """Called where the fleet is no longer watched, which is a bug."""

    def start(self, client: RegistryClient) -> None:
        """Begins; `close` ends it."""
        self._spawn("", self._follow_registry(client))

    def join(self, instance: Instance) -> None:
        """Polls a new instance from now on."""
        self._spawn(instance.name, self._follow(instance))

    def leave(self, instance: Instance) -> None:
        """Polls it no more."""
        task = self._tasks.pop(instance.name, None)
        if task is not None:
            task.cancel()
        self._pool.forget(instance.origin)

    async def close(self) -> None:
        """Ends everything."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[name] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("instances are no longer watched", exc_info=error)
            self.on_failure(error)

    async def _follow_registry(self, client: RegistryClient) -> None:
        async for event in client.watch():
            if isinstance(event, Topology):
                self._apply(event)
            else:
                await self._changed(client, event)

    async def _changed(self, client: RegistryClient, change: Change) -> None:
        if change.what is ChangeKind.UNREGISTERED:
            self._fleet.depart(change.member.instance, change.member.epoch)
        if change.what is ChangeKind.REGISTERED and not change.is_complete:
            return
        try:
            self._apply(await client.topology())
        except RegistryError as error:  # the watch ends too and begins with a whole view
            log.info("the registry's view stays as it was: %s", error)

    def _apply(self, topology: Topology) -> None:
        self._fleet.apply(card_of(each) for each in topology.instances if each.is_complete and each.url)

    async def _follow(self, instance: Instance) -> None:
        while True:
            was = instance.state
            await self._poll(instance)
            self._end_silent(instance)
            if instance.state != was:
                log.info("%s is %s %s", instance.name, instance.state, instance.vitals.trouble)
                self._fleet.on_change()
            self._fleet.sweep()
            await instance.pause(self._poll_s if instance.is_able else AGAIN_S)

    async def _poll(self, instance: Instance) -> None:
        vitals = instance.vitals
        try:
            health, told = await asyncio.gather(
                self._get(instance, "/health"), self._get(instance, "/server_info")
            )
        except Lost as lost:
            self._unheard(instance, lost)
            return
        vitals.heard_s = monotonic()
        status, body = health
        vitals.trouble = "" if status == 200 else read_problem(status, body).message
        try:
            if told[0] != 200:
                status, vitals.trouble = 0, f"/server_info: {read_problem(*told).message}"
            elif instance.heard(msgspec.json.decode(told[1], type=Told)):
                self._fleet.on_anew(instance)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            status, vitals.trouble = 0, f"its /server_info cannot be read: {error}"
        vitals.is_healthy = status == 200

    async def _get(self, instance: Instance, path: str) -> tuple[int, bytes]:
        return await self._pool.fetch(instance.origin, Call(path), self._poll_s_max)

    def _unheard(self, instance: Instance, lost: Lost) -> None:
        instance.vitals.is_healthy = False
        instance.vitals.trouble = lost.text
        instance.vitals.told = msgspec.structs.replace(instance.vitals.told, is_draining=False)
        if lost.code == "REFUSED":  # nobody listens there any more: the process has ended
            instance.lose(f"{instance.name} has ended: {lost.text}")

    def _end_silent(self, instance: Instance) -> None:
        now_s = monotonic()
        unheard_s = now_s - instance.vitals.heard_s
        for leg in list(instance.legs):
            silent_s = now_s - leg.progress_s
            limit_s = self._limits.first_s_max if leg.head is None else self._limits.stall_s_max
            if now_s > leg.expires_s:
                leg.close()
            elif leg.is_waiting and min(silent_s, unheard_s) > self._limits.silence_s_max:
                leg.fail(Lost(f"{instance.name} has not answered anything for {unheard_s:.0f} s", "DEADLINE"))
            elif leg.is_waiting and silent_s > limit_s:
                leg.fail(Lost(f"{instance.name} has made no progress for {silent_s:.0f} s", "DEADLINE"))
