"""An endpoint's relationship with the registry: it may host one, looks sources up, and keeps itself known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.errors import ConfigError
from baton.session.registry import Member, RegistryClient, RegistryServer, Role

if TYPE_CHECKING:
    from baton.session.endpoint import EndpointConfig


class Membership:
    """Used inside the endpoint's loop alone."""

    def __init__(self, config: EndpointConfig, transport: str, on_displaced: Callable[[str], None]) -> None:
        self.config = config
        self.on_displaced = on_displaced
        """Called when a newer incarnation of this instance has registered: this one is over."""
        self.transport = transport
        self.url = config.registry
        self._is_known = False
        self.served = threading.Event()
        """Set when the URL of the registry, if there is one, is known."""
        self._server: RegistryServer | None = None
        self._client: RegistryClient | None = None

    async def serve(self, address: str) -> None:
        """Hosts a registry if that was asked for, and registers this rank; asked again, does nothing."""
        config = self.config
        if self._is_known:
            return
        self._is_known = True
        if config.embed_registry is not None:
            accepting = config.sockets.tls.accepting() if config.sockets.tls else None
            self._server = RegistryServer(config.secret, ssl_context=accepting)
            await self._server.start(config.sockets.host, config.embed_registry)
            self.url = self._server.url
        self.served.set()
        if self.url is None:
            return
        dialling = config.sockets.tls.dialling() if config.sockets.tls else None
        self._client = RegistryClient(
            self.url, config.secret, ssl_context=dialling, on_displaced=self.on_displaced
        )
        self._client.register(
            Member(
                instance=config.instance,
                role=Role(config.role),
                rank=config.rank,
                epoch=config.epoch,
                layout=str(config.spec.layout),
                coordinator=config.coordinator or address,
                fingerprint=config.fingerprint or "none",
                transport=self.transport,
                url=config.url,
            )
        )

    async def look_up(self, instance: str) -> str:
        """The address of an instance's coordinator."""
        if self._client is None:
            raise ConfigError(
                f"source {instance!r}: there is no registry to find it in; give the endpoint one, or name "
                "the source by its coordinator's host:port"
            )
        return await self._client.coordinator(instance)

    async def close(self) -> None:
        """Unregisters, and ends the registry if it was hosted here."""
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()
