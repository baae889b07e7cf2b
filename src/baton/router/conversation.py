"""One client's request from its arrival to the last byte of its answer.

Before anything was streamed, an attempt that fails is made again from the start, on another pair if there is
one, in rooms of its own. Once events have gone to the client, every further attempt is told the tokens that
it has and streams what comes after them. Events go on whole or not at all, and their tokens are noted before
they are written: what a new attempt is told is what the client has, or is about to get.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from time import monotonic

import msgspec

from baton.router.asked import CHAT_PATH, Asked
from baton.router.attempt import Attempt, Jobs
from baton.router.choosing import Wish
from baton.router.failures import Failed, Trials, cause_of, ended_stream
from baton.router.parts import Parts
from baton.router.progress import Cut, Cutter, Progress
from baton.router.routes import Route
from baton.router.timelines import Tried
from baton.router.wire.reading import Head
from baton.web import DONE, ID_HEADER, Outlet, Private, Problem, Reply, data_event

_EVENT_STREAM = "text/event-stream"


class Conversation:
    """Attempts one after the other, until one has answered or there is no sense in another."""

    def __init__(self, parts: Parts, outlet: Outlet, asked: Asked) -> None:
        self._parts = parts
        self._outlet = outlet
        self._asked = asked
        self._progress = Progress(asked.num_choices)
        self._trials = Trials(parts.config.limits)
        prefix = "chatcmpl-" if asked.path == CHAT_PATH else "cmpl-"
        self._id = prefix + secrets.token_hex(16)
        self._created = int(time.time())
        self._began_s = monotonic()
        self._added_s = 0.0
        self._prompt_tokens = 0

    async def answer(self) -> int:
        """Answers, and says with which status; a Problem where nothing has gone to the client."""
        try:
            return await self._answer()
        except Problem as problem:
            if self._is_failure(problem):
                self._parts.metrics.given_up.labels(cause_of(problem)).inc()
            if not self._outlet.has_begun:
                raise
            await self._end(data_event(problem.body()))
            return 200
        except (ConnectionError, asyncio.CancelledError):
            self._parts.metrics.disconnects.inc()
            raise

    def _is_failure(self, problem: Problem) -> bool:
        """Whether the request came to nothing; what is refused, as wrong or for want of room, did not."""
        return problem.status >= 500 or self._outlet.has_begun

    async def _answer(self) -> int:
        while True:
            asked_s = monotonic()
            route = await self._parts.waiting.route(self._asked, self._wish())
            self._parts.metrics.waits.observe(monotonic() - asked_s)
            self._began_s += monotonic() - asked_s
            try:
                return await self._attempt(route)
            except Failed as failed:
                self._blame(failed)
                is_resume = self._outlet.has_begun
                if is_resume and self._progress.is_finished:
                    await self._end(self._last_words(failed))
                    return 200
                if not self._trials.can_retry(failed):
                    return await self._given_up(failed)
            metrics = self._parts.metrics
            (metrics.resumes if is_resume else metrics.retries).inc()
            await asyncio.sleep(self._trials.wait_s(is_resume=is_resume))

    def _blame(self, failed: Failed) -> None:
        self._parts.metrics.failures.labels(failed.cause).inc()
        instances = self._parts.fleet.instances
        for instance in [instances[name] for name in failed.blamed if name in instances]:
            if failed.is_end:
                instance.doubt(failed.problem.message)
            else:
                instance.wake()

    def _wish(self) -> Wish:
        last = self._trials.last
        is_full = last is not None and last.problem.status == 429
        # Who has an answer in hand would rather wait than lose it.
        is_strict = is_full and not self._outlet.has_begun
        return Wish(self._trials.avoid, is_strict, self._progress.num_tokens)

    async def _given_up(self, failed: Failed) -> int:
        """What the client is told: what the instance said, as it said it, or a Problem in its place."""
        problem = failed.problem
        if failed.raw is None or self._outlet.has_begun or problem.retry_after_s is not None:
            raise problem
        if self._is_failure(problem):
            self._parts.metrics.given_up.labels(failed.cause).inc()
        await self._outlet.send(Reply(problem.status, failed.raw))
        return problem.status

    async def _attempt(self, route: Route) -> int:
        parts, jobs = self._parts, self._jobs()
        cutter = Cutter(self._progress, 1 if jobs.private.resume else self._asked.num_answers)
        attempt = Attempt(parts.pool, route, cutter, jobs.num_rooms)
        tried = Tried(route.names, route.why_local)
        parts.served.add(self._id, tried)
        if route.prefill is not None:
            parts.metrics.num_hand_overs += 1
        elif route.why_local:
            parts.metrics.local_prefills.labels(route.why_local).inc()
        is_answered = False
        try:
            await attempt.begin(jobs)
            self._added_s = monotonic() - self._began_s
            head = await attempt.answered()
            tried.answered_s = time.time()
            await (self._stream if self._asked.is_stream else self._whole)(attempt, head, route)
            is_answered = True
            if not self._asked.prompt.is_ids:
                parts.choosing.sizes.saw(len(self._asked.prompt.raw), attempt.prompt_tokens)
            return 200
        except Failed as failed:
            tried.failure = f"{failed.cause}: {failed.problem.message}"
            raise
        finally:
            self._prompt_tokens = self._prompt_tokens or attempt.prompt_tokens
            tried.ended_s = time.time()
            attempt.end(is_answered=is_answered)
            parts.waiting.wake()

    def _jobs(self) -> Jobs:
        asked, is_resume = self._asked, self._outlet.has_begun
        private = Private(
            id=self._id,
            created=self._created,
            tokens=asked.is_stream,
            resume=self._progress.resume if is_resume else (),
            done=self._progress.done if is_resume else {},
            first_token=self._parts.config.first_token,
        )
        num_rooms = len(private.resume) if is_resume else asked.num_prompts
        return Jobs(asked, private, num_rooms, asked.is_list or num_rooms > 1)

    async def _whole(self, attempt: Attempt, head: Head, route: Route) -> None:
        answered_s = monotonic()
        body = await attempt.whole()
        self._parts.metrics.added.observe(self._added_s + monotonic() - answered_s)
        await self._outlet.send(Reply(200, body, head.content_type, ((ID_HEADER, self._id),)))

    async def _stream(self, attempt: Attempt, head: Head, route: Route) -> None:
        answered_s = monotonic()
        if not head.content_type.startswith(_EVENT_STREAM):
            problem = Problem(502, f"instance {route.server.name} answered {head.content_type!a}, no stream")
            raise Failed(problem, frozenset({route.server.name}))
        while data := await attempt.read():
            cut = attempt.cutter.feed(data)
            if cut.out:
                await self._write(cut, answered_s)
                self._trials.progressed()
            if cut.error is not None:
                raise ended_stream(route, cut.error)
            if cut.is_done:
                return
        problem = Problem(502, f"instance {route.server.name} ended its stream too early", code="ENDED")
        raise Failed(problem, frozenset({route.server.name}))

    async def _write(self, cut: Cut, answered_s: float) -> None:
        is_first = not self._outlet.has_begun
        await self._outlet.write(cut.out, self._id, is_last=cut.is_done)
        if is_first:
            self._parts.metrics.added.observe(self._added_s + monotonic() - answered_s)

    def _last_words(self, failed: Failed) -> bytes:
        """What is missing of a stream whose choices are all finished."""
        if not self._asked.wants_usage or self._progress.has_usage:
            return DONE
        if not self._prompt_tokens:
            raise failed.problem
        num_answer = sum(self._progress.done.values())
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": num_answer,
            "total_tokens": self._prompt_tokens + num_answer,
        }
        kind = "chat.completion.chunk" if self._asked.path == CHAT_PATH else "text_completion"
        event = {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}
        return data_event(msgspec.json.encode({**event, "choices": [], "usage": usage})) + DONE

    async def _end(self, last: bytes) -> None:
        await self._outlet.write(last, self._id, is_last=True)
