"""The router's HTTP client: requests to instances over pooled connections, which can be ended at once."""

from __future__ import annotations

import asyncio
import io
import ssl
from time import monotonic
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from baton.errors import ConfigError

IDLE_S_MAX = 30.0
"""Below the time for which servers keep an idle connection, so that none is used while it is closed."""
BODY_BYTES_MAX = 256 << 20
_LARGE_BYTES = 1 << 20
"""aiohttp warns of larger bodies that are sent from one bytes object."""
_HEADERS = {"Content-Type": "application/json"}


class UpstreamError(Exception):
    """No response came, or not all of it; `code` is a key of baton.serving.http.STATUSES, or REFUSED."""

    def __init__(self, text: str, code: str = "PEER_LOST") -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def instance_base(url: str) -> str:
    """An instance's URL without a trailing slash; a ConfigError where it cannot be used."""
    try:
        parts = urlsplit(url)
        is_good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good or parts.scheme not in ("http", "https") or parts.path.strip("/"):
        raise ConfigError(f"instance URL {url!r} cannot be used; it has to be http://host:port or https")
    return url.rstrip("/")


class UpstreamClient:
    """One session for all instances."""

    def __init__(self, key: str, connect_s_max: float, ssl_context: ssl.SSLContext | None = None) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_S_MAX, ssl=True if ssl_context is None else ssl_context
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s_max),
            headers={"Authorization": f"Bearer {key}"},
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def open(self, url: URL, body: bytes | None) -> aiohttp.ClientResponse:
        """Sends a POST, or a GET without a body; returns when the response's headers are there."""
        if body is None:
            return await self._session.get(url, allow_redirects=False)
        data = body if len(body) <= _LARGE_BYTES else io.BytesIO(body)
        return await self._session.post(url, data=data, headers=_HEADERS, allow_redirects=False)

    async def fetch(self, url: str, timeout_s: float, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of a small response; raises UpstreamError where none comes in time."""
        request = UpstreamRequest(self)
        try:
            async with asyncio.timeout(timeout_s):
                response = await request.send(URL(url, encoded=True), body)
                return response.status, await request.read_all()
        except TimeoutError:
            raise UpstreamError(f"no response to {url} within {timeout_s:g} s", "DEADLINE") from None
        finally:
            request.close()

    async def close(self) -> None:
        await self._session.close()


class UpstreamRequest:
    """One request to one instance, read by one task; `fail` wakes that task with a cause."""

    def __init__(self, client: UpstreamClient) -> None:
        self.response: aiohttp.ClientResponse | None = None
        """Once its headers are there."""
        self.is_waiting = False
        """Whether the instance is to blame for silence: more is wanted, and nothing has come."""
        self.progress_s = monotonic()
        """Since when the current wait lasts."""
        self.expires_s = float("inf")
        """When it is ended, whatever its progress."""
        self._client = client
        self._error: UpstreamError | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def is_over(self) -> bool:
        """Whether the body was read to its end."""
        return self.response is not None and self.response.content.at_eof()

    async def send(self, url: URL, body: bytes | None) -> aiohttp.ClientResponse:
        if self._error is not None:
            raise self._error
        self.is_waiting, self.progress_s = True, monotonic()
        try:
            async with asyncio.timeout(None) as self._scope:
                self.response = await self._client.open(url, body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._error or _upstream_error(error) from None
        finally:
            self.is_waiting, self._scope = False, None
        return self.response

    async def read(self) -> bytes:
        """The next part of the body; empty at its end."""
        if self._error is not None:
            raise self._error
        assert self.response is not None, "it was not sent"
        content = self.response.content
        if content.at_eof():
            return b""
        self.is_waiting, self.progress_s = True, monotonic()
        try:
            return await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self._error or _upstream_error(error) from None
        finally:
            self.is_waiting = False

    async def read_all(self, bytes_max: int = BODY_BYTES_MAX, *, drops_rest: bool = False) -> bytes:
        """The whole body; one that is longer is an error, or is cut off."""
        parts, num_bytes = [], 0
        while part := await self.read():
            if num_bytes < bytes_max or not drops_rest:
                parts.append(part)
            num_bytes += len(part)
            if num_bytes > bytes_max and not drops_rest:
                raise UpstreamError(f"the response is longer than {bytes_max} bytes")
        return b"".join(parts)

    def fail(self, error: UpstreamError) -> None:
        """Ends it at once; the task that reads it gets this error."""
        if self._error is None:
            self._error = error
        if self.response is not None:
            self.response.close()  # wakes a reader; does nothing where the body was read to its end
        elif self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Ends it if it is not over; the instance notices and aborts the request."""
        self.fail(UpstreamError("the router ended the request", "ABORTED"))


def _upstream_error(error: Exception) -> UpstreamError:
    match error:
        case aiohttp.ClientSSLError():
            return UpstreamError(f"TLS failed: {error}", "REFUSED_AUTHENTICATION")
        case aiohttp.ClientConnectorError():
            reason = error.os_error.strerror or str(error.os_error)
            return UpstreamError(f"{error.host}:{error.port} cannot be reached: {reason}", "REFUSED")
        case TimeoutError():
            return UpstreamError("it did not accept a connection in time")
        case _:
            return UpstreamError(f"the connection was lost: {str(error) or type(error).__name__}")
