"""An endpoint of OpenAI's chat API that says what a test wants, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STREAM_S_MAX = 60.0


class Endpoint:
    """Answers with the words of the last message, one event each."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.status = 200
        self.refusal: bytes = b""
        self.tail: bytes = b"data: [DONE]\n\n"
        self.is_endless = False
        self.left = threading.Event()
        """Set when a client leaves while it is being answered."""
        self.url = ""

    def events(self, body: dict[str, Any]) -> Iterator[bytes]:
        """What is streamed."""
        yield b": a comment\n\n"
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for word in body["messages"][-1]["content"].split():
            yield _event({"choices": [{"index": 0, "delta": {"content": f"{word}! "}}]})
        while self.is_endless and not self.left.wait(0.05):
            yield _event({"choices": [{"index": 0, "delta": {"content": "on "}}]})
        yield _event({"choices": [], "usage": {"total_tokens": 1}})
        yield self.tail


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    """One on a free port."""
    found = Endpoint()

    class Answering(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._say(found.status, found.refusal or b'{"data": [{"id": "first"}, {"id": "second"}]}')

        def do_POST(self) -> None:
            found.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append(body)
            if found.status != 200:
                self._say(found.status, found.refusal)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                for raw in found.events(body):
                    self.wfile.write(raw)
                    self.wfile.flush()
            except OSError:
                found.left.set()

        def _say(self, status: int, raw: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield found
        finally:
            found.left.set()
            server.shutdown()
            thread.join()
