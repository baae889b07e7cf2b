"""Clients of many sorts at once, against one endpoint."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
from tests.serve.judging import Fate, Judge, Reply, Verdict
from tests.serve.questions import Question

REQUEST_S_MAX = 120.0
"""A request that takes longer hangs."""


@dataclass(frozen=True)
class Outcome:
    """A question and what came of it."""

    question: Question
    reply: Reply
    verdict: Verdict

    def __str__(self) -> str:
        said = str(self.question.body)[:300]
        took_s = self.reply.ended_s - self.reply.begun_s
        return f"{self.question.kind} {self.question.path} {said} after {took_s:.2f} s: {self.verdict.why}"


@dataclass
class Load:
    """Clients that ask one question after another until they are told to stop."""

    url: str
    ask: Callable[[Random], Question]
    num_clients: int = 8
    seed: int = 0
    key: str | None = None
    socket: Path | None = None
    """Where the connections are made, if not at the URL's host (see `Host.relay`)."""
    judge: Judge = field(default_factory=Judge)
    outcomes: list[Outcome] = field(default_factory=list)
    is_stopped: bool = False
    pause_s: float = 0.0
    """After a request that failed, so that a router that is away is not asked a thousand times a second."""

    async def run(self) -> None:
        """Until `is_stopped`; requests under way are finished."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        connector: aiohttp.BaseConnector = aiohttp.TCPConnector(limit=0)
        if self.socket is not None:
            connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.num_clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        chance = Random(f"{self.seed} {number}")
        while not self.is_stopped:
            outcome = await self._asked(session, self.ask(chance))
            if outcome.verdict.fate in (Fate.BROKEN, Fate.FAILED, Fate.BUSY):
                await asyncio.sleep(self.pause_s)

    async def run_all(self, questions: Sequence[Question]) -> None:
        """These and no more, at most `num_clients` at a time."""
        gate = asyncio.Semaphore(self.num_clients)

        async def one(session: aiohttp.ClientSession, question: Question) -> None:
            async with gate:
                await self._asked(session, question)

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX)) as session:
            await asyncio.gather(*(one(session, question) for question in questions))

    async def _asked(self, session: aiohttp.ClientSession, question: Question) -> Outcome:
        reply = await asked(session, self.url, question)
        self.outcomes.append(Outcome(question, reply, self.judge.verdict(question, reply)))
        return self.outcomes[-1]

    def tally(self) -> dict[str, int]:
        """How many of each fate."""
        found = Counter(outcome.verdict.fate.value for outcome in self.outcomes)
        return dict(found.most_common())

    def of(self, *fates: Fate) -> list[Outcome]:
        """Those that came to one of these ends."""
        return [outcome for outcome in self.outcomes if outcome.verdict.fate in fates]


async def asked(session: aiohttp.ClientSession, url: str, question: Question) -> Reply:
    """One request, as its client sees it."""
    reply = Reply(monotonic())
    leave = question.leave
    try:
        async with asyncio.timeout(leave.after_s if leave and not leave.num_pieces else None):
            await _exchange(session, url, question, reply)
    except TimeoutError:
        if leave is None or monotonic() - reply.begun_s >= REQUEST_S_MAX:
            reply.trouble = f"no end after {REQUEST_S_MAX:.0f} s"
            reply.status = 0
        else:
            reply.has_left = True
    except (aiohttp.ClientError, OSError) as cause:
        reply.trouble = repr(cause)
    reply.ended_s = monotonic()
    return reply


async def _exchange(session: aiohttp.ClientSession, url: str, question: Question, reply: Reply) -> None:
    raw = question.body if isinstance(question.body, bytes | None) else json.dumps(question.body).encode()
    headers = {"Content-Type": "application/json"}
    async with session.request(question.method, url + question.path, data=raw, headers=headers) as response:
        reply.status = response.status
        reply.headers = dict(response.headers)
        async for piece in response.content.iter_any():
            reply.body += piece
            reply.moments.append(monotonic())
            if question.leave and 0 < question.leave.num_pieces <= reply.body.count(b"data:"):
                reply.has_left = True
                response.close()
                return
