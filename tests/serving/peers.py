"""Instances as a router meets them: real HTTP servers that speak the wire and fail when they are told to.

A peer computes nothing. Token number i of answer k to a prompt is a function of the three, so a test knows
the one right answer; what a peer streams when it goes on for another follows from the tokens it is given.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from baton.engine.commands import CopyRecord, LayerGroupTiming
from baton.engine.trace import RequestTrace
from baton.observe import Interval, Timeline, Track, trace
from baton.serving.http import DONE, TokenNote, data_event, note_line
from baton.session.registry import Member, Role

FINGERPRINT = "f00d"
NUM_TOKENS = 8


def token(prompt: Any, answer: int, position: int) -> int:
    return zlib.crc32(f"{prompt}/{answer}/{position}".encode()) % 100_000


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{each}>" for each in tokens)


def expected(prompt: Any, answer: int = 0, num_tokens: int = NUM_TOKENS) -> str:
    return text_of([token(prompt, answer, position) for position in range(num_tokens)])


@dataclass
class Fault:
    """What goes wrong with one request: a status before anything, or an end after some events."""

    status: int = 0
    code: str | None = None
    is_cut: bool = False
    """The connection is cut, after `after` events."""
    is_torn: bool = False
    """In the middle of an event."""
    error_code: str | None = None
    """An error event ends the stream, after `after` events."""
    is_hung: bool = False
    """Nothing more comes, after `after` events."""
    after: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request that came to a peer."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    is_disconnected: bool = False
    is_over: bool = False


def story(num_sources: int, num_targets: int) -> RequestTrace:
    """0.2 s of prefill in four groups of layers; each is copied as soon as it is computed."""
    times_s = [10.01 + 0.05 * group for group in range(5)]
    groups = [LayerGroupTiming((4 * g, 4 * g + 4), times_s[g], times_s[g + 1]) for g in range(4)]
    copies = [
        CopyRecord(target, g, 65536 * (1 + target), times_s[g + 1], times_s[g + 1] + 0.01 + 0.01 * g)
        for g in range(4)
        for target in range(num_targets)
    ]
    return RequestTrace(
        arrived_s=10.0,
        begun_s=10.01,
        prompt_s=10.21,
        token_s=10.22,
        settled_s=10.26,
        stepped_s=10.28,
        ended_s=10.4,
        groups=dict.fromkeys(range(num_sources), groups),
        copies=dict.fromkeys(range(num_sources), copies),
    )


class Rooms:
    """Where the two legs of a job meet; a room is used once."""

    def __init__(self) -> None:
        self._events: dict[int, asyncio.Event] = {}
        self.prefilled: list[int] = []
        self.taken: list[int] = []

    def event(self, room: int) -> asyncio.Event:
        return self._events.setdefault(room, asyncio.Event())


class Peer:
    """One instance; `faults` are used up in order, one by each request."""

    def __init__(self, name: str, role: Role, rooms: Rooms, model: str = "tiny") -> None:
        self.name, self.role, self.model = name, role, model
        self.faults: list[Fault | None] = []
        self.seen: list[Seen] = []
        self.epoch = 1
        self.told: dict[str, Any] = {}
        self.health = (200, b"{}")
        self.pace_s = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.on_event: Callable[[int], None] = lambda count: None
        self.num_sent = 0
        self.ranks = (2, 3)
        """Of the two sides of a hand-over, in its timelines."""
        self.unpipelined: list[str] = []
        self.num_listings = 0
        """How often it was asked for its latest requests."""
        self._rooms = rooms
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/timelines", self._timelines)
        app.router.add_get("/v1/timelines/{id}", self._timeline)
        app.router.add_post("/drain", self._drain)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def member(self, **more: Any) -> Member:
        fields: dict[str, Any] = {
            "instance": self.name,
            "role": self.role,
            "rank": 0,
            "epoch": self.epoch,
            "layout": "tp1",
            "coordinator": f"127.0.0.1:{7000 + len(self.name)}",
            "fingerprint": FINGERPRINT,
            "transport": "tcp",
            "url": self.url,
        }
        return Member(**{**fields, **more})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health[0], body=self.health[1])

    async def _server_info(self, request: web.Request) -> web.Response:
        told = {
            "name": self.name, "model": self.model, "epoch": self.epoch, "role": self.role.value,
            "is_ready": True, "is_draining": False, "coordinator": "", "chunk_tokens": 64,
        }  # fmt: skip
        return web.json_response({**told, **self.told})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        prompt = (await request.json()).get("prompt")
        if prompt is None:
            return web.json_response({"error": {"message": "no prompt", "param": "prompt"}}, status=400)
        return web.json_response({"count": len(prompt), "model": self.model})

    async def _timeline(self, request: web.Request) -> web.Response:
        if request.query.get("format") == "perfetto":
            return web.json_response(trace([Timeline("", (Interval(Track(self.name, "x"), "y", 0.0, 1.0),))]))
        of_id = [seen for seen in self.seen if seen.body["baton"]["id"] == request.match_info["id"]]
        return web.json_response({"name": self.name, **(self._recorded(of_id[-1]) if of_id else {"id": ""})})

    async def _timelines(self, request: web.Request) -> web.Response:
        self.num_listings += 1
        told = [self._recorded(seen) for seen in reversed(self.seen) if "bootstrap_room" in seen.body]
        for each in told:
            del each["clock"], each["jobs"][0]["trace"]
        return web.json_response({"data": told})

    def _recorded(self, seen: Seen) -> dict[str, Any]:
        is_source = self.role is Role.PREFILL
        trace = replace(story(*self.ranks), unpipelined=self.unpipelined)
        job = {
            "side": "source" if is_source else "target",
            "transfer": str(seen.body.get("bootstrap_room")),
            "figures": {"exposed_s": 0.01, "efficiency": 0.9} if is_source else {"tth_s": 0.23},
            "unpipelined": self.unpipelined,
            "trace": msgspec.to_builtins(trace, str_keys=True) if seen.is_over else None,
        }
        clock = {"monotonic_s": 50.0, "unix_s": time.time()}
        told = {"created": int(time.time()), "num_prompt_tokens": 40, "clock": clock, "jobs": [job]}
        return {"id": seen.body["baton"]["id"], **told}

    async def _drain(self, request: web.Request) -> web.Response:
        self.told["is_draining"] = True
        return web.json_response({"is_draining": True})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, await request.json(), dict(request.headers))
        self.seen.append(seen)
        fault = self.faults.pop(0) if self.faults else None
        try:
            return await self._answered(request, seen.body, fault or Fault())
        except asyncio.CancelledError:
            seen.is_disconnected = True
            raise
        finally:
            seen.is_over = True

    async def _answered(self, request: web.Request, body: dict[str, Any], fault: Fault) -> web.StreamResponse:
        if fault.status:
            error = {"message": f"told to fail with {fault.status}", "type": "x", "code": fault.code}
            return web.json_response({"error": error}, status=fault.status, headers=fault.headers)
        if (fault.is_hung or fault.is_cut) and fault.after == 0 and self.role is not Role.DECODE:
            await self._hang_or_cut(request, fault)
        jobs = jobs_of(body)
        await self._meet(body, len(jobs))
        await self.gate.wait()
        if self.role is Role.PREFILL and body.get("bootstrap_room") is not None:
            return web.json_response(
                {"choices": [], "usage": {"prompt_tokens": len(prompts_of(body)[0]) // 4}}
            )
        if not body.get("stream"):
            if fault.is_hung or fault.is_cut:
                await self._hang_or_cut(request, fault)
            return web.json_response(whole(body, jobs))
        return await self._streamed(request, body, jobs, fault)

    async def _meet(self, body: dict[str, Any], num_jobs: int) -> None:
        rooms = body.get("bootstrap_room")
        if rooms is None:
            return
        rooms = rooms if isinstance(rooms, list) else [rooms]
        assert len(rooms) == num_jobs if self.role is Role.DECODE else True
        known = self._rooms.prefilled if self.role is Role.PREFILL else self._rooms.taken
        assert not set(rooms) & set(known), "a room was used twice"
        known.extend(rooms)
        for room in rooms:
            if self.role is Role.PREFILL:
                self._rooms.event(room).set()
            else:
                await self._rooms.event(room).wait()

    async def _streamed(
        self, request: web.Request, body: dict[str, Any], jobs: list[Job], fault: Fault
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        num_sent = 0
        for note, payload in events(request.path, body, jobs):
            if not response.prepared and (num_sent < fault.after or not _is_early(fault)):
                await response.prepare(request)
            if num_sent == fault.after and fault.error_code:
                error = {"error": {"message": "told to fail", "type": "x", "code": fault.error_code}}
                await response.write(data_event(json.dumps(error).encode()))
                return response
            block = (note_line(note) if note else b"") + data_event(json.dumps(payload).encode())
            if num_sent == fault.after and (fault.is_hung or fault.is_cut):
                if fault.is_torn:
                    await response.write(block[: len(block) - 9])
                await self._hang_or_cut(request, fault)
            await response.write(block)
            num_sent += 1
            self.num_sent += 1
            self.on_event(num_sent)
            await asyncio.sleep(self.pace_s)
        if num_sent == fault.after and fault.is_cut:
            await self._hang_or_cut(request, fault)
        await response.write(DONE)
        return response

    async def _hang_or_cut(self, request: web.Request, fault: Fault) -> None:
        if fault.is_hung:
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.close()
        await asyncio.sleep(60)


def _is_early(fault: Fault) -> bool:
    """Whether it comes before the head of the answer."""
    return fault.after == 0 and not fault.is_torn and (fault.is_cut or fault.is_hung)


@dataclass(frozen=True)
class Job:
    """One choice to stream: its index, its prompt, which answer, and the tokens there are already."""

    index: int
    prompt: Any
    answer: int
    tokens: tuple[int, ...] = ()


def prompts_of(body: dict[str, Any]) -> list[Any]:
    if "messages" in body:
        return [body["messages"][-1]["content"]]
    prompt = body["prompt"]
    is_batch = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return prompt if is_batch else [prompt]


def jobs_of(body: dict[str, Any]) -> list[Any]:
    """As many as there are rooms: prompts, or choices that go on."""
    resume = body.get("baton", {}).get("resume")
    return resume or prompts_of(body)


def choices_of(body: dict[str, Any]) -> list[Job]:
    prompts, n = prompts_of(body), body.get("n") or 1
    resume = body.get("baton", {}).get("resume")
    if resume:
        return [
            Job(each["index"], prompts[each["index"] // n], each["index"] % n, tuple(each["tokens"]))
            for each in resume
        ]
    return [
        Job(place * n + answer, prompt, answer) for place, prompt in enumerate(prompts) for answer in range(n)
    ]


def whole(body: dict[str, Any], jobs: list[Any]) -> dict[str, Any]:
    num_tokens = body.get("max_tokens") or NUM_TOKENS
    choices = [
        {"index": job.index, "text": expected(job.prompt, job.answer, num_tokens), "finish_reason": "length"}
        for job in choices_of(body)
    ]
    return {"id": body.get("baton", {}).get("id"), "choices": choices, "usage": {"prompt_tokens": 7}}


def events(path: str, body: dict[str, Any], jobs: list[Any]) -> list[tuple[TokenNote | None, dict[str, Any]]]:
    """All events in order: the choices take turns, token by token."""
    private, num_tokens = body.get("baton", {}), body.get("max_tokens") or NUM_TOKENS
    has_notes, is_chat = private.get("tokens", False), path.endswith("chat/completions")
    common = {"id": private.get("id"), "created": private.get("created"), "model": "tiny"}
    if "pad" in body:
        common["pad"] = body["pad"]
    found: list[tuple[TokenNote | None, dict[str, Any]]] = []
    choices = choices_of(body)
    for job in choices:
        if is_chat and not job.tokens:
            choice: dict[str, Any] = {"index": job.index, "delta": {"role": "assistant"}}
            found.append((TokenNote(job.index), {**common, "choices": [choice]}))
    for position in range(num_tokens):
        for job in choices:
            if position < len(job.tokens):
                known = job.tokens[position]
                assert known == token(job.prompt, job.answer, position), "told tokens that nobody sampled"
                continue
            sampled = token(job.prompt, job.answer, position)
            finish = "length" if position == num_tokens - 1 else None
            words = {"delta": {"content": text_of([sampled])}} if is_chat else {"text": text_of([sampled])}
            choice = {"index": job.index, **words, "finish_reason": finish}
            found.append((TokenNote(job.index, (sampled,), finish), {**common, "choices": [choice]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        done = sum(private.get("done", {}).values())
        usage = {"prompt_tokens": 7, "completion_tokens": len(choices) * num_tokens + done}
        found.append((None, {**common, "choices": [], "usage": usage}))
    return found if has_notes else [(None, payload) for _, payload in found]
