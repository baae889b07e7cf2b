"""From growing answers to bytes on a connection.

Headers go out with the first token, so that a failure before it has a status of its own. After that each
wake-up is one write, whatever has come by then. A client that does not read is dropped once a write has
waited for WRITE_S_MAX: the connection then holds its 64 KiB of unread bytes, and at most the rest of one
answer waits behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from baton.server.answering import Answering, Growth
from baton.server.dialects import Dialect
from baton.web.events import DONE, Note, data_event, note_line
from baton.web.problems import NO_STORE, Problem

WRITE_S_MAX = 30.0
ID_HEADER = "X-Request-Id"
PROMPT_TOKENS_HEADER = "X-Prompt-Tokens"
"""So that a router learns what a prompt's text is in tokens, whatever the form of the answer."""

_encoder = msgspec.json.Encoder()


async def reply(request: web.Request, answering: Answering, dialect: Dialect) -> web.StreamResponse:
    """Answers a request whose jobs are under way."""
    inquiry = answering.inquiry
    if inquiry.is_leg or not inquiry.is_stream:
        return await _whole(answering, dialect)
    growths = answering.growths()
    first = await anext(growths)
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", ID_HEADER: inquiry.id, **NO_STORE}
    )
    await response.prepare(request)
    try:
        await _stream(_Writer(request, response), _again(first, growths), answering, dialect)
    except Problem as problem:
        # The status is out: what is left is to say it in the stream, which then ends without its last word.
        await _Writer(request, response).write(data_event(problem.body()))
    await response.write_eof()
    return response


async def _stream(
    writer: _Writer, growths: AsyncIterator[list[Growth]], answering: Answering, dialect: Dialect
) -> None:
    inquiry, held = answering.inquiry, dict[int, Growth]()
    async for grown in growths:
        blocks = [_block(each, dialect, inquiry.private.tokens) for each in _heard(grown, held, dialect)]
        if blocks:
            await writer.write(b"".join(blocks))
    end = DONE
    if inquiry.has_usage:
        event = dialect.usage_event(await answering.usage())
        end = (data_event(_encoder.encode(event)) if event is not None else b"") + DONE
    await writer.write(end)
    answering.end()


def _heard(grown: list[Growth], held: dict[int, Growth], dialect: Dialect) -> list[Growth]:
    """What is worth an event now; tokens without text, as parts of a character, wait for the next one."""
    found = []
    for growth in grown:
        earlier = held.pop(growth.index, None)
        if earlier is not None:
            growth.tokens[:0] = earlier.tokens
        if dialect.is_silent(growth):
            held[growth.index] = growth
        else:
            found.append(growth)
    return found


def _block(growth: Growth, dialect: Dialect, has_note: bool) -> bytes:
    event = data_event(_encoder.encode(dialect.event(growth)))
    if not has_note:
        return event
    tokens = tuple(sampled.token for sampled in growth.tokens)
    return note_line(Note(growth.index, tokens, growth.finish)) + event


async def _whole(answering: Answering, dialect: Dialect) -> web.Response:
    inquiry = answering.inquiry
    whole: dict[int, Growth] = {}
    async for grown in answering.growths():
        for growth in grown:
            known = whole.setdefault(growth.index, growth)
            if known is not growth:
                known.text += growth.text
                known.tokens += growth.tokens
                known.finish = growth.finish
    if inquiry.is_leg:
        await answering.settled()
    usage = await answering.usage()
    answering.end()
    ordered = [whole[index] for index in sorted(whole)]
    headers = {"Content-Type": "application/json", ID_HEADER: inquiry.id, **NO_STORE}
    headers[PROMPT_TOKENS_HEADER] = str(usage.prompt_tokens)
    if not inquiry.is_stream:
        return web.Response(body=_encoder.encode(dialect.whole(ordered, usage)), headers=headers)
    blocks = [_block(growth, dialect, inquiry.private.tokens) for growth in ordered]
    headers["Content-Type"] = "text/event-stream"
    return web.Response(body=b"".join(blocks) + DONE, headers=headers)


async def _again(first: list[Growth], rest: AsyncIterator[list[Growth]]) -> AsyncIterator[list[Growth]]:
    yield first
    async for each in rest:
        yield each


class _Writer:
    """Writes with a bound on how long the reader may take."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response

    async def write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                await self._response.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"a client did not read for {WRITE_S_MAX:g} s") from None
