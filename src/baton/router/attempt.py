"""One attempt: a leg to the instance that answers and, where the cache is handed over, one that prefills.

The two are sent at the same time. The prefill leg is never read by a task: when it settles, a callback looks
at how. If it failed while decode does not have the cache yet, the other leg is ended with that failure.
"""

from __future__ import annotations

import re
import secrets
from functools import lru_cache
from time import monotonic

import msgspec

from baton.errors import BatonError
from baton.router.asked import Asked
from baton.router.failures import Failed, lost_leg, refused_leg
from baton.router.instances import Instance
from baton.router.progress import Cutter
from baton.router.routes import Route
from baton.router.wire.leg import Leg, Lost
from baton.router.wire.pool import Call, Pool
from baton.router.wire.reading import Head
from baton.web import Private

ROOM_BITS = 63
_encoder = msgspec.json.Encoder()
KEPT_BYTES_MAX = 64 << 10
LINGER_S = 10.0
"""How long a prefill leg may still take once decode has answered."""
PROMPT_TOKENS_HEADER = "x-prompt-tokens"
"""How a prefill instance says what it counted, whatever the form of its answer."""
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')


class Jobs(msgspec.Struct, frozen=True):
    """What both legs are sent: the request, what only the two of us know, and how many rooms it takes."""

    asked: Asked
    private: Private
    num_rooms: int
    is_list: bool

    def body(self, route: Route) -> bytes:
        """The client's body with rooms that were never used before."""
        private = b'"baton":' + _encoder.encode(self.private)
        if route.prefill is None or not self.num_rooms:
            return self.asked.spliced(private)
        host, port = _place(route.prefill.coordinator)
        rooms = [secrets.randbits(ROOM_BITS) for _ in range(self.num_rooms)]
        if self.is_list:
            many = {"bootstrap_host": [host] * len(rooms), "bootstrap_port": [port] * len(rooms)}
            fields = _encoder.encode({**many, "bootstrap_room": rooms})
        else:
            fields = _encoder.encode(_Rooms(host, port, rooms[0]))
        return self.asked.spliced(fields[1:-1] + b"," + private)


class _Rooms(msgspec.Struct, frozen=True):
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int


@lru_cache(maxsize=1024)
def _place(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise BatonError(f"an instance has coordinator {coordinator!a}; it has to be host:port")
    return host.strip("[]"), int(port)


class Attempt:
    """The legs of one attempt, each counted until it is over."""

    def __init__(self, pool: Pool, route: Route, cutter: Cutter, num_jobs: int) -> None:
        self.cutter = cutter
        self.prompt_tokens = 0
        """As the prefill instance counted them; 0 while it has not said."""
        self._pool = pool
        self._route = route
        self._num_jobs = num_jobs
        self._server: Leg | None = None
        self._prefill: Leg | None = None
        self._failure: Failed | None = None
        self._is_over = False
        self._is_prefilled = False
        self._is_stream = True

    async def begin(self, jobs: Jobs) -> None:
        """Sends both legs."""
        route, body = self._route, jobs.body(self._route)
        self._is_stream = jobs.asked.is_stream
        if route.prefill is not None and jobs.num_rooms:
            self._prefill = await self._sent(route.prefill, Call(jobs.asked.path, body, KEPT_BYTES_MAX))
            self._prefill.on_settled = self._prefill_settled  # nothing can come before the next await
        self._server = await self._sent(route.server, Call(jobs.asked.path, body))

    async def answered(self) -> Head:
        """The head of the answer; raises Failed where it is no success."""
        leg = self._leg()
        try:
            head = await leg.answered()
            if head.status == 200:
                self._prefilled()
                return head
            body = await leg.whole(KEPT_BYTES_MAX)
        except Lost as lost:
            raise self._failure or lost_leg(self._route.server, lost) from None
        raise refused_leg(self._route, self._route.server, head, body)

    async def read(self) -> bytes:
        """More of the answer, or nothing at its end; raises Failed where it broke off."""
        try:
            return await self._leg().read()
        except Lost as lost:
            raise self._failure or lost_leg(self._route.server, lost) from None

    async def whole(self) -> bytes:
        """All of the answer."""
        try:
            body = await self._leg().whole()
        except Lost as lost:
            raise self._failure or lost_leg(self._route.server, lost) from None
        self.prompt_tokens = self.prompt_tokens or _usage(body[-1024:])
        return body

    def end(self, *, is_answered: bool) -> None:
        """Ends what is left; a prefill leg whose cache has arrived may finish by itself."""
        self._is_over = True
        self._prefilled()
        if self._server is not None:
            self._server.close()
            self._route.server.legs.discard(self._server)
        self._route.release_server()
        if self._prefill is None:
            self._route.release_prefill()
        elif is_answered:
            self._prefill.expires_s = monotonic() + LINGER_S
        else:
            self._prefill.close()

    def _leg(self) -> Leg:
        if self._failure is not None:
            raise self._failure
        assert self._server is not None
        return self._server

    async def _sent(self, instance: Instance, call: Call) -> Leg:
        try:
            leg = await self._pool.send(instance.origin, call)
        except Lost as lost:
            raise lost_leg(instance, lost) from None
        instance.legs.add(leg)
        return leg

    def _prefilled(self) -> None:
        if not self._is_prefilled:
            self._is_prefilled = True
            self._route.prefilled()

    def _prefill_settled(self, leg: Leg) -> None:
        route, instance = self._route, self._route.prefill
        assert instance is not None
        instance.legs.discard(leg)
        route.release_prefill()
        if self._is_over:
            return
        if leg.error is not None:
            self._failure = lost_leg(instance, leg.error)
        elif leg.head is not None and leg.head.status != 200:
            self._failure = refused_leg(route, instance, leg.head, leg.kept())
        else:
            self.prompt_tokens = _prompt_tokens(leg)
            return
        if self._is_admitted():
            self._failure = None
        elif self._server is not None:
            self._server.fail(Lost("the prefill leg failed"))

    def _is_admitted(self) -> bool:
        """Whether decode has all it needs, so that a failure of prefill is nobody's business."""
        if self._is_stream:
            return self.cutter.are_admitted(self._num_jobs)
        return self._server is not None and self._server.head is not None


def _prompt_tokens(leg: Leg) -> int:
    told = leg.head.headers.get(PROMPT_TOKENS_HEADER, "") if leg.head is not None else ""
    return int(told) if told.isascii() and told.isdigit() and len(told) < 10 else _usage(leg.kept())


def _usage(body: bytes) -> int:
    """What an answer's usage says of its prompt; in text quotes are escaped, so none looks like it."""
    found = _PROMPT_TOKENS.findall(body)
    return int(found[-1]) if found else 0
