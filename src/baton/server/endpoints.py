"""The endpoints that generate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from baton.engine.instance import Instance
from baton.server.answering import Answering
from baton.server.bodies.asked import Body, ChatRequest, CompletionRequest, GenerateRequest
from baton.server.bodies.reading import reader_of
from baton.server.bridge import Bridge
from baton.server.dialects import dialect_of
from baton.server.inquiries import Place, inquire
from baton.server.keeper import Keeper, draining
from baton.server.model import Model
from baton.server.naming import TokenNames
from baton.server.observing import Observer
from baton.server.replies import reply
from baton.web.edge import caller_of

Read = Callable[[bytes], Body]


class Endpoints:
    """What clients come for; one instance answers them all."""

    def __init__(self, keeper: Keeper, observer: Observer, name: str, first_token: str) -> None:
        self._keeper = keeper
        self._observer = observer
        self._name = name
        self._first_token = first_token
        self._bridge: Bridge | None = None
        self._known: tuple[Instance, Model, TokenNames] | None = None
        self._open: dict[Answering, Instance] = {}
        """Requests that hold something of an instance."""
        self.is_draining = False
        self.emptied = asyncio.Event()
        """Set whenever no request is open."""
        self.emptied.set()

    @property
    def num_open(self) -> int:
        """Requests that hold something of the instance."""
        return len(self._open)

    def routes(self) -> list[web.RouteDef]:
        """Where they are."""
        kinds: dict[str, Read] = {
            "/v1/completions": reader_of(CompletionRequest),
            "/v1/chat/completions": reader_of(ChatRequest),
            "/generate": reader_of(GenerateRequest),
        }
        return [web.post(path, self._answer_with(read)) for path, read in kinds.items()]

    def drain(self) -> None:
        """Takes no new requests."""
        self.is_draining = True

    def look(self) -> None:
        """The instance may have ended: whoever still waits for it hears so, should it not have said it."""
        for answering, instance in list(self._open.items()):
            if not instance.is_running:
                answering.lost(f"{instance.config.name} has ended: {instance.failure}")

    def _answer_with(self, read: Read) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, read)

        return answer

    async def _answer(self, request: web.Request, read: Read) -> web.StreamResponse:
        if self.is_draining:
            raise draining(self._keeper.config.name)
        instance = self._keeper.instance
        model, names = self._model(instance)
        place = Place(instance.config.role, instance.address, self._first_token, self._name)
        inquiry = await inquire(read(await request.read()), caller_of(request), model, place)
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        answering = Answering(inquiry, self._observer, lambda: self._closed(answering))
        self._open[answering] = instance
        self.emptied.clear()
        answering.start(instance, self._bridge)
        try:
            return await reply(request, answering, dialect_of(inquiry, self._name, names))
        finally:
            answering.close(instance)

    def _model(self, instance: Instance) -> tuple[Model, TokenNames]:
        if self._known is None or self._known[0] is not instance:
            self._known = (instance, Model.of(instance), TokenNames(instance.tokenizer))
        return self._known[1:]

    def _closed(self, answering: Answering) -> None:
        self._open.pop(answering, None)
        if not self._open:
            self.emptied.set()
