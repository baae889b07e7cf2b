"""A server that listens."""

from __future__ import annotations

import logging
import ssl

from aiohttp import web

from baton.errors import BatonError

_SHUTDOWN_S = 2.0
_LINGER_S = 2.0
_KEEPALIVE_S = 75.0


class _Terse(logging.Filter):
    """Input that is no HTTP is quoted by the parser's errors, keys and all: only that it came is logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return True


_log = logging.getLogger("baton.web.http")
_log.addFilter(_Terse())


class Site:
    """An application on a port, in the running loop."""

    def __init__(self, app: web.Application, ssl_context: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._ssl = ssl_context
        self._runner: web.AppRunner | None = None
        self._address = ("", 0)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._address[1]

    @property
    def address(self) -> str:
        """Where it listens, as "host:port"."""
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def url(self) -> str:
        """What a client is given."""
        return f"{'http' if self._ssl is None else 'https'}://{self.address}"

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 takes a free one. Whether it may is for `check_binding` to say, before."""
        self._runner = web.AppRunner(
            self._app,
            access_log=None,
            auto_decompress=False,  # what was signed is what was sent, and no small body becomes a large one
            handler_cancellation=True,  # a client that leaves is noticed at once
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=_LINGER_S,
            logger=_log,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024, ssl_context=self._ssl)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise BatonError(
                f"cannot listen on {host}:{port}: {reason}; name another port, or 0 for a free one"
            ) from None
        self._address = self._runner.addresses[0][:2]

    async def close(self) -> None:
        """Stops listening and ends what is still being answered."""
        if self._runner is not None:
            await self._runner.cleanup()
