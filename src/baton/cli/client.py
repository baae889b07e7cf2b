"""A small client of the OpenAI API, for `baton chat`, `baton drain` and `baton demo`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton import settings
from baton.errors import BatonError, ConfigError

CONNECT_S_MAX = 10.0
SILENCE_S_MAX = 600.0
LINE_BYTES_MAX = 16 << 20
ERROR_BYTES_MAX = 1 << 16


class ChatError(BatonError):
    """An endpoint could not be reached, or its answer could not be used."""


class ApiClient:
    """An OpenAI endpoint and the API key for it."""

    def __init__(self, url: str, key: str = "", authority: Path | None = None) -> None:
        where = urlsplit(url if "://" in url else f"http://{url}")
        if where.scheme not in ("http", "https") or not where.hostname:
            raise ConfigError(
                f"--url {url!r} is not the URL of an endpoint; write it like http://127.0.0.1:8000"
            )
        try:
            self._port = where.port
        except ValueError as error:
            raise ConfigError(f"--url {url!r}: {error}; write it like http://127.0.0.1:8000") from None
        self.url = f"{where.scheme}://{where.netloc}{where.path.rstrip('/').removesuffix('/v1')}"
        self._where = where
        self._key = key
        self._authority = authority

    def get(self, path: str) -> Any:
        """GET a path; returns its JSON."""
        with closing(self._connection()) as connection:
            return _decoded(self._response(connection, "GET", path, None).read(), self.url)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST a JSON body; returns the JSON answer."""
        with closing(self._connection()) as connection:
            return _decoded(self._response(connection, "POST", path, body).read(), self.url)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """The events of a streamed answer; closing the iterator ends the request."""
        with closing(self._connection()) as connection:
            response = self._response(connection, "POST", path, body)
            yield from _events(response, self.url)

    def _connection(self) -> http.client.HTTPConnection:
        host = str(self._where.hostname)
        if self._where.scheme == "https":
            context = settings.trusting(None if self._authority is None else str(self._authority))
            return http.client.HTTPSConnection(host, self._port, timeout=CONNECT_S_MAX, context=context)
        return http.client.HTTPConnection(host, self._port, timeout=CONNECT_S_MAX)

    def _response(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "text/event-stream, application/json"}
        raw = None if body is None else json.dumps(body).encode()
        headers |= {} if raw is None else {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        prefix = urlsplit(self.url).path
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S_MAX)
            connection.request(method, prefix + path, raw, headers)
            response = connection.getresponse()
        except ConnectionRefusedError:
            raise ChatError(
                f"nothing listens at {self.url}; start a deployment with baton up, or name another --url"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url} cannot be reached: {_reason(error)}") from None
        if response.status != 200:
            message = _message(response.read(ERROR_BYTES_MAX))
            raise ChatError(f"{self.url} answers {response.status}: {message}")
        return response


class ChatSession:
    """A chat: every question is sent with all messages before it."""

    def __init__(
        self, client: ApiClient, model: str | None, system: str | None, params: Mapping[str, float | None]
    ) -> None:
        self.client = client
        self.model = model or _first_model(client)
        self._params = {name: value for name, value in params.items() if value is not None}
        self._messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Iterator[str]:
        """Streams the text of the answer; an answer that is stopped stays in the chat as far as it came."""
        messages = [*self._messages, {"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "stream": True, **self._params}
        parts: list[str] = []
        try:
            for event in self.client.stream("/v1/chat/completions", body):
                text = _text(event)
                if text:
                    parts.append(text)
                    yield text
        finally:
            if parts:
                self._messages = [*messages, {"role": "assistant", "content": "".join(parts)}]


def _first_model(client: ApiClient) -> str:
    listed = client.get("/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ChatError(f"{client.url} lists no model; name one with --model") from None


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[Any]:
    is_done = False
    try:
        while line := response.readline(LINE_BYTES_MAX):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            is_done = is_done or data == b"[DONE]"
            if not is_done and data:
                yield _decoded(data, url)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"{url} broke off: {_reason(error)}") from None
    if not is_done:
        raise ChatError(f"{url} broke off before the end of the answer")


def _text(event: Any) -> str:
    """The text of an event; raises if the event is an error."""
    if isinstance(event, dict) and event.get("error"):
        raise ChatError(f"the answer broke off: {_message(json.dumps(event).encode())}")
    try:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except (KeyError, TypeError, AttributeError):
        raise ChatError(f"an event cannot be read: {str(event)[:80]}; is this an OpenAI endpoint?") from None


def _decoded(raw: bytes, url: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        raise ChatError(f"{url} answers with {raw[:40]!r}; is this an OpenAI endpoint?") from None


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:80].decode("ascii", "replace") or "no message"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
