"""Instances that speak the routers' protocol and do nothing else, so that the router before them is measured.

All listen in one process, on a bare asyncio protocol, so that they take little of the cores which the routers
need. Prints a line per instance with its role, URL and bootstrap port.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec

from baton import settings
from baton.session.registry import Member, RegistryClient, Role

HEAD_END = b"\r\n\r\n"
NUM_EVENTS = 8
EPOCH = 1
MODEL = "dummy"


class BatonFields(msgspec.Struct):
    """Fields of a Baton router: whether it wants notes on tokens."""

    tokens: bool = False
    id: str = ""


class DummyRequest(msgspec.Struct):
    """The fields of a request that matter here."""

    stream: bool = False
    baton: BatonFields | None = None


_REQUEST = msgspec.json.Decoder(DummyRequest)


@dataclass(frozen=True, slots=True)
class DummyInstance:
    """One pretended instance."""

    name: str
    role: str
    port: int
    bootstrap_port: int

    @property
    def url(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def pages(self) -> dict[bytes, bytes]:
        """The responses to GET, by path."""
        server = {
            "name": self.name,
            "role": self.role,
            "layout": "tp1",
            "model": MODEL,
            "model_path": MODEL,
            "served_model_name": MODEL,
            "epoch": EPOCH,
            "coordinator": f"127.0.0.1:{self.bootstrap_port}",
            "url": self.url,
            "transport": "shm",
            "page_tokens": 16,
            "context_max": 1 << 20,
            "is_ready": True,
            "is_draining": False,
            "load": {"num_running": 0, "num_waiting": 0, "num_tokens": 0, "num_queue_max": 1 << 16},
            "pages": {"free": 1 << 20, "used": 0, "leased": 0, "quarantined": 0, "total": 1 << 20},
            "rates": {"prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0, "handoff_s": 0.0},
        }
        model = {"model_path": MODEL, "is_generation": True, "vocab_size": 1000}
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]}
        return {
            b"/health": _answer(b'{"status":"ok"}'),
            b"/server_info": _answer(msgspec.json.encode(server)),
            b"/get_server_info": _answer(msgspec.json.encode(server)),
            b"/model_info": _answer(msgspec.json.encode(model)),
            b"/get_model_info": _answer(msgspec.json.encode(model)),
            b"/v1/models": _answer(msgspec.json.encode(listed)),
        }


def _answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _completion(text: str, finish: str | None, usage: dict[str, int] | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "cmpl-dummy",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
    }
    return {**body, "usage": usage} if usage else body


def whole_answer() -> bytes:
    """The response to a request that does not stream."""
    usage = {"prompt_tokens": 16, "completion_tokens": NUM_EVENTS, "total_tokens": 16 + NUM_EVENTS}
    return _answer(msgspec.json.encode(_completion(" word" * NUM_EVENTS, "length", usage)))


def streamed_answer(*, has_notes: bool) -> bytes:
    """The response to one that does: all events at once, so that the router is measured."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    blocks = []
    for number in range(NUM_EVENTS):
        finish = "length" if number == NUM_EVENTS - 1 else None
        note = {"index": 0, "tokens": [number], "finish": finish}
        line = b": baton " + msgspec.json.encode(note) + b"\n" if has_notes else b""
        blocks.append(line + b"data: " + msgspec.json.encode(_completion(" word", finish)) + b"\n\n")
    blocks.append(b"data: [DONE]\n\n")
    chunks = [b"%x\r\n%s\r\n" % (len(block), block) for block in blocks]
    return head + b"".join(chunks) + b"0\r\n\r\n"


class DummyProtocol(asyncio.Protocol):
    """One connection: requests one after another, each answered as soon as it is complete."""

    def __init__(self, pages: dict[bytes, bytes], answers: tuple[bytes, bytes, bytes]) -> None:
        self._pages = pages
        self._whole, self._streamed, self._noted = answers
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._rest += data
        while (end := self._rest.find(HEAD_END)) >= 0:
            head, start = self._rest[:end], end + len(HEAD_END)
            length = _length(head)
            if len(self._rest) < start + length:
                return
            body = self._rest[start : start + length]
            self._rest = self._rest[start + length :]
            if head.startswith(b"PRI "):  # HTTP/2 is not supported
                self._transport.close()
                return
            self._transport.write(self._respond(head, body))

    def _respond(self, head: bytes, body: bytes) -> bytes:
        method, path, _ = head.split(b" ", 2)
        if method != b"POST":
            return self._pages.get(path, _NOT_FOUND)
        try:
            request = _REQUEST.decode(body)
        except msgspec.DecodeError:
            return _BAD
        if not request.stream:
            return self._whole
        return self._noted if request.baton is not None and request.baton.tokens else self._streamed


_NOT_FOUND = _answer(b'{"error":{"message":"not here"}}', b"404 Not Found")
_BAD = _answer(b'{"error":{"message":"no JSON"}}', b"400 Bad Request")


def _length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(b"\r\ncontent-length:")
    return int(lowered[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def listen(role: str, number: int) -> tuple[DummyInstance, asyncio.Server]:
    """Starts an instance on a free port."""
    loop = asyncio.get_running_loop()
    answers = (whole_answer(), streamed_answer(has_notes=False), streamed_answer(has_notes=True))
    pages: dict[bytes, bytes] = {}
    server = await loop.create_server(lambda: DummyProtocol(pages, answers), "127.0.0.1", 0, backlog=1024)
    port = int(server.sockets[0].getsockname()[1])
    # The bootstrap port is only passed on; nothing connects to it.
    instance = DummyInstance(f"{role}-{number}", role, port, 1 + (port + 1) % 65_000)
    pages.update(instance.pages())
    return instance, server


def member_of(instance: DummyInstance) -> Member:
    """The registration of an instance."""
    return Member(
        instance=instance.name,
        role=Role(instance.role),
        rank=0,
        epoch=EPOCH,
        layout="tp1",
        coordinator=f"127.0.0.1:{instance.bootstrap_port}",
        fingerprint=MODEL,
        transport="shm",
        url=instance.url,
    )


async def _serve(num_prefill: int, num_decode: int, registry: str, secret: bytes) -> None:
    roles = ["prefill"] * num_prefill + ["decode"] * num_decode
    instances = [await listen(role, number) for number, role in enumerate(roles)]
    async with RegistryClient(registry, secret) as client:
        for instance, _ in instances:
            await client.register(member_of(instance)).wait()
            print(f"{instance.role} at {instance.url} {instance.bootstrap_port}", flush=True)
        print(f"dummies at {registry}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prefill", type=int, default=2)
    parser.add_argument("--num-decode", type=int, default=2)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--secret-file", required=True)
    given = parser.parse_args()
    secret = settings.secret(given.secret_file)
    asyncio.run(_serve(given.num_prefill, given.num_decode, given.registry, secret))


if __name__ == "__main__":
    main()
