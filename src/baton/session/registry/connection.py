"""Signed calls to one registry, and the notice that it is not the run it was."""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from yarl import URL

from baton.errors import ConfigError
from baton.session.registry.authentication import sign
from baton.session.registry.messages import BOOT_HEADER, Problem, Refusal, RegistryError, Topology

CALL_S_MAX = 5.0

Value = TypeVar("Value", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Call:
    """One request; the target is path and query as they stand in the request line."""

    method: str
    target: str
    body: bytes = b""
    call_s_max: float = CALL_S_MAX


def check_registry(url: str) -> None:
    """Raises ConfigError on what is not the address of a registry."""
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.raw_path not in ("", "/"):
        raise ConfigError(f"registry {url!r} is not an address; write http://host:port or https://host:port")


class Connection:
    """Calls to a registry; `on_restart` is called when another run of it answers than before."""

    def __init__(
        self,
        url: str,
        secret: bytes | None,
        ssl_context: ssl.SSLContext | None,
        on_restart: Callable[[], None],
    ) -> None:
        check_registry(url)
        self.url = url.rstrip("/")
        self._secret = secret
        self._ssl = ssl_context
        self._on_restart = on_restart
        self._boot: str | None = None
        self._session: aiohttp.ClientSession | None = None

    async def call(self, call: Call, kind: type[Value]) -> Value:
        """What the registry answers; raises RegistryError when it refuses or cannot be reached."""
        try:
            return await self._call(call, kind)
        except RegistryError as error:
            if error.refusal is not Refusal.UNAUTHENTICATED:
                raise
        # A signature grows old while a connection or a registry is replaced; the second is fresh.
        return await self._call(call, kind)

    async def _call(self, call: Call, kind: type[Value]) -> Value:
        timeout = aiohttp.ClientTimeout(total=call.call_s_max)
        async with self.opened(call, timeout) as response:
            body = await response.read()
            # An incomplete topology is an answer like any other.
            if response.status == 200 or (response.status == 503 and kind is Topology):
                return self._decoded(body, kind, response.status)
            raise self._refused(body, response.status)

    @asynccontextmanager
    async def opened(
        self, call: Call, timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A signed request under way; what goes wrong on the wire becomes RegistryError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        headers = {"Content-Type": "application/json"} if call.body else {}
        if self._secret is not None:
            sent = (call.method, call.target, call.body)
            headers["Authorization"] = sign(self._secret, sent, time.time(), secrets.token_hex(16))
        url = URL(self.url + call.target, encoded=True)
        try:
            async with self._session.request(
                call.method,
                url,
                data=call.body or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
                ssl=True if self._ssl is None else self._ssl,
            ) as response:
                self._notice(response.headers.get(BOOT_HEADER))
                yield response
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            text = str(error) or type(error).__name__
            raise RegistryError(
                Refusal.UNREACHABLE, f"registry {self.url} does not answer: {text}; see that it runs"
            ) from error

    async def read_problem(self, response: aiohttp.ClientResponse) -> RegistryError:
        """Why the registry did not open what was asked for."""
        return self._refused(await response.read(), response.status)

    async def close(self) -> None:
        """Ends all calls."""
        if self._session is not None:
            await self._session.close()

    def _notice(self, boot: str | None) -> None:
        if boot is None or boot == self._boot:
            return
        is_restart, self._boot = self._boot is not None, boot
        if is_restart:
            self._on_restart()

    def _refused(self, body: bytes, status: int) -> RegistryError:
        try:
            problem = self._decoded(body, Problem, status)
        except RegistryError as error:
            return error
        return RegistryError(problem.refusal, problem.error)

    def _decoded(self, body: bytes, kind: type[Value], status: int) -> Value:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RegistryError(
                Refusal.UNREACHABLE,
                f"{self.url} answers with status {status} and {body[:60]!r}, which no registry says; "
                f"look for a proxy, or another program on that port",
            ) from None
