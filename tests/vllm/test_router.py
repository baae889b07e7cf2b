"""`baton route --engine vllm` before real vLLM servers: right tokens, retries, and nothing left behind."""

import asyncio
import json
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest
from tests.serve.parts import until
from tests.vllm.conftest import LENGTHS, NUM_TOKENS
from tests.vllm.servers import NAME, Server, client

from baton.supervisor import ChildProcess

pytestmark = pytest.mark.vllm
FREE_S_MAX = 240.0
LIMIT_S = 600.0
NUM_LONG = 200
"""Tokens of a stream that is still running when its server is killed."""


class Router:
    """The command as a process, and a client's requests to it."""

    def __init__(self, process: ChildProcess, url: str) -> None:
        self.process, self.url = process, url

    async def ask(self, session: aiohttp.ClientSession, prompt: list[int], **more: Any) -> tuple[int, Any]:
        """The status, and the tokens or the error."""
        async with posted(session, f"{self.url}/v1/completions", body(prompt, **more)) as response:
            answer = await response.json()
            ids = answer["choices"][0]["token_ids"] if response.status == 200 else answer
            return response.status, ids

    async def stream(
        self, session: aiohttp.ClientSession, prompt: list[int], on_event: Any = None, **more: Any
    ) -> list[dict[str, Any]]:
        """All events but the last, which is the proper end."""
        events, is_done = [], False
        asked = body(prompt, stream=True, **more)
        async with posted(session, f"{self.url}/v1/completions", asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                assert not is_done or not line.strip(), "something came after the end"
                if line.strip() == b"data: [DONE]":
                    is_done = True
                elif line.startswith(b"data: "):
                    events.append(json.loads(line[6:]))
                    if on_event is not None:
                        on_event(len(events))
        assert is_done or "error" in events[-1], events[-1]
        return events

    async def info(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        async with session.get(f"{self.url}/server_info") as response:
            return {each["name"]: each for each in (await response.json())["instances"]}

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        async with session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"baton_router_{name}"))


def body(prompt: list[int], num_tokens: int = NUM_TOKENS, **more: Any) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True, "cache_salt": uuid.uuid4().hex} | more


@asynccontextmanager
async def posted(
    session: aiohttp.ClientSession, where: str, asked: dict[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A response; a client asks again where the router has no server at the moment."""
    while True:
        async with session.post(where, json=asked) as response:
            if response.status != 503:
                yield response
                return
        await asyncio.sleep(0.5)


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextmanager
def routing(prefills: Sequence[Server], decodes: Sequence[Server], *words: str) -> Iterator[Router]:
    sides = [word for each in prefills for word in ("--prefill", f"{url(each)},source={each.source}")]
    sides += [word for each in decodes for word in ("--decode", url(each))]
    command = [sys.executable, "-m", "baton", "route", "--engine", "vllm", "--port", "0", *sides, *words]
    environment = {name: value for name, value in os.environ.items() if name != "BATON_SECRET"}
    with ChildProcess("router", command, env=environment) as process:
        where = process.wait_line("routing at ")
        process.wait_healthy(where)
        yield Router(process, where)


def run(call: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with client() as session:
            return await asyncio.wait_for(call(session), LIMIT_S)

    return asyncio.run(main())


async def wait_free(session: aiohttp.ClientSession, *servers: Server) -> None:
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
    limit_s = asyncio.get_running_loop().time() + FREE_S_MAX
    while used := [
        (server.layout, name) for server in servers for name in names if await server.metric(session, name)
    ]:
        assert asyncio.get_running_loop().time() < limit_s, f"in use although nothing runs: {used}"
        await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def router(servers: dict[str, Server]) -> Iterator[Router]:
    # Where a server answers a poll late, its requests wait; none is computed on the other side.
    with routing([servers["tp2"]], [servers["tp1"]], "--local", "never") as found:
        yield found


def test_the_tokens_are_those_of_plain_vllm(
    servers: dict[str, Server], router: Router, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Concurrent, streamed and not; decode computes one token of each prompt, and prefill the rest."""
    prefill, decode = servers["tp2"], servers["tp1"]
    some, right = prompts[: len(LENGTHS)], answers[: len(LENGTHS)]
    num_computed = 2 * sum(len(prompt) - 1 for prompt in some)

    async def streamed(session: aiohttp.ClientSession, prompt: list[int]) -> tuple[int, list[int]]:
        events = await router.stream(session, prompt, stream_options={"include_usage": True})
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert len({event["id"] for event in events}) == 1
        return 200, [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]

    async def computed(session: aiohttp.ClientSession, server: Server) -> float:
        return await server.metric(session, "prompt_tokens_by_source_total", source="local_compute")

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        before = [await computed(session, each) for each in (prefill, decode)]
        got = await asyncio.gather(*(router.ask(session, prompt) for prompt in some))
        got += await asyncio.gather(*(streamed(session, prompt) for prompt in some))
        # Decode's answer does not wait for prefill's, and so not for prefill's count.
        limit_s = asyncio.get_running_loop().time() + FREE_S_MAX
        while (num_prefill := await computed(session, prefill) - before[0]) < num_computed:
            if asyncio.get_running_loop().time() > limit_s:
                break
            await asyncio.sleep(0.2)
        return got, num_prefill, await computed(session, decode) - before[1]

    got, num_prefill, num_decode = run(ask_all)
    assert got == [(200, tokens) for tokens in right] * 2
    assert num_decode <= 2 * len(some)
    assert num_prefill >= num_computed


def test_a_chat_and_a_text_are_those_of_the_server_alone(servers: dict[str, Server], router: Router) -> None:
    """Without ids asked for, a client gets the server's events as they are."""
    decode = servers["tp1"]
    words = " ".join(f"w{number}" for number in range(3, 200))
    chat = {"messages": [{"role": "user", "content": words}]}
    limits = {"model": NAME, "temperature": 0, "ignore_eos": True, "max_tokens": 9}

    async def ask(session: aiohttp.ClientSession, where: str, path: str, asked: dict[str, Any]) -> Any:
        async with posted(session, where + path, limits | asked) as response:
            text = await response.text()
            assert response.status == 200, text
            return text

    def shape(text: str) -> Any:
        """Without what differs from one request to the next: ids, times, and how many tokens an event has."""
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        keys = {(tuple(event), tuple(choice)) for event, choice in zip(events, choices, strict=True)}
        return "".join(texts), keys, choices[-1]["finish_reason"], text.splitlines()[-2:]

    async def compare(session: aiohttp.ClientSession) -> None:
        before = await router.metric(session, "handoffs_total")
        for path, asked in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": words})):
            for is_stream in (False, True):
                more = asked | {"stream": is_stream, "cache_salt": uuid.uuid4().hex}
                routed, alone = [await ask(session, where, path, more) for where in (router.url, url(decode))]
                if is_stream:
                    assert shape(routed) == shape(alone)
                    assert len(shape(routed)[0].split()) == 9
                else:
                    assert json.loads(routed)["choices"] == json.loads(alone)["choices"]
        assert await router.metric(session, "handoffs_total") - before >= 4

    run(compare)


def test_what_cannot_be_handed_over_is_answered_by_decode(
    router: Router, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    place = LENGTHS.index(130)

    async def ask(session: aiohttp.ClientSession) -> Any:
        before = await router.metric(session, "handoffs_total")
        both = body([prompts[place], prompts[place + 1]])
        async with posted(session, f"{router.url}/v1/completions", both) as response:
            choices = (await response.json())["choices"]
        assert await router.metric(session, "handoffs_total") == before
        return [choice["token_ids"] for choice in choices]

    assert run(ask) == answers[place : place + 2]


def test_a_client_that_leaves_frees_the_blocks_of_both(servers: dict[str, Server], router: Router) -> None:
    prefill, decode = servers["tp2"], servers["tp1"]
    chance = random.Random(5)
    prompts = [[chance.randrange(3, 1000) for _ in range(900)] for _ in range(8)]

    async def leave(session: aiohttp.ClientSession) -> None:
        tasks = [asyncio.ensure_future(router.ask(session, prompt, num_tokens=1100)) for prompt in prompts]
        while not await decode.metric(session, "num_requests_running"):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.02)
        before = await router.metric(session, "disconnects_total")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait_free(session, prefill, decode)
        async with asyncio.timeout(FREE_S_MAX):
            while await router.metric(session, "disconnects_total") - before < len(prompts):
                await asyncio.sleep(0.05)
            while any(each["num_in_flight"] for each in (await router.info(session)).values()):
                await asyncio.sleep(0.05)
        assert await router.metric(session, "disconnects_total") - before == len(prompts)

    run(leave)


def test_requests_survive_a_killed_server_on_either_side(
    servers: dict[str, Server], prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """It stands still first, so that what it was given cannot have begun when it is killed.

    The stream of a request that runs on it already goes on elsewhere.
    """
    killed, others = servers["tp1"], [servers["tp2"], servers["pp2"]]
    place = LENGTHS.index(640)
    prompt, right = prompts[place], answers[place]
    words = ("--policy", "round_robin")

    async def ask_with_kill(session: aiohttp.ClientSession, as_prefill: Router, as_decode: Router) -> Any:
        assert killed.process is not None
        begun = asyncio.Event()
        running = asyncio.ensure_future(
            as_decode.stream(session, prompt, lambda number: begun.set(), num_tokens=NUM_LONG)
        )
        await begun.wait()
        # Round robin: of two more one goes to it, wherever the first one is.
        os.killpg(killed.process.pid, signal.SIGSTOP)
        tasks = [asyncio.ensure_future(each.ask(session, prompt)) for each in (as_prefill, as_decode) * 2]
        for router in (as_prefill, as_decode):
            while not any(
                each["num_in_flight"]
                for each in (await router.info(session)).values()
                if each["url"] == url(killed)
            ):
                await asyncio.sleep(0.02)
        await asyncio.to_thread(killed.kill)
        got = await asyncio.gather(*tasks)
        retries = [await each.metric(session, "retries_total") for each in (as_prefill, as_decode)]
        return got, retries, await running

    with (
        routing([killed, servers["pp2"]], [servers["tp2"]], *words) as as_prefill,
        routing([servers["pp2"]], [killed, servers["tp2"]], *words) as as_decode,
    ):
        _, long = run(lambda session: servers["tp2"].ask(session, prompt, NUM_LONG, salt="alone"))
        got, retries, events = run(lambda session: ask_with_kill(session, as_prefill, as_decode))
        killed.start()  # other tests need it, whatever came of this one
        killed.wait_ready()
        assert got == [(200, right)] * 4
        # A killed prefill server was retried in slow runs, and not in a quick one; why is not known.
        assert retries[1] >= 1
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == long
        assert long[:NUM_TOKENS] == right
        for router in (as_prefill, as_decode):
            until(
                lambda router=router: all(each["state"] == "able" for each in run(router.info).values()),
                "the restarted server is used again",
            )
        again = run(lambda session: asyncio.gather(*(as_decode.ask(session, prompt) for _ in range(2))))
        assert again == [(200, right)] * 2
    run(lambda session: wait_free(session, *others))
