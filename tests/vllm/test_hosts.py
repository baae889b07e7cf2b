"""vLLM servers on two hosts that a slow cable joins, and which is cut in the middle of a transfer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.serve.hosts import Host, NoHosts, two_hosts
from tests.vllm.servers import (
    FREE_S_MAX,
    Server,
    check_free,
    check_right,
    environment,
    hand_off,
    new_transfer,
    random_prompts,
    run_client,
    running,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long]
NUM_TOKENS = 8
MBIT = 0.4
"""So slow that the prompt below takes two minutes: longer than any step of a test."""
SENT_BYTES = 300_000
"""Of a prompt of 6 MB; from then on the transfer is under way."""


@dataclass
class PlacedServer(Server):
    """A server on one of the hosts; its clients are there too."""

    host: Host | None = None

    def spawn(self, command: Sequence[str], **output: Any) -> subprocess.Popen[bytes]:
        assert self.host is not None
        return subprocess.Popen(
            command,
            env=environment(),
            start_new_session=True,
            preexec_fn=self.host.enter,  # noqa: PLW1509 - a few system calls, no lock taken
            **output,
        )

    async def post(
        self, session: aiohttp.ClientSession, asked: dict[str, Any], headers: dict[str, str]
    ) -> tuple[int, Any]:
        status, text = await self._ask("/v1/completions", asked)
        return status, json.loads(text)

    async def get(self, session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        return await self._ask(path)

    async def _ask(self, path: str, asked: Any = None) -> tuple[int, str]:
        assert self.host is not None
        answer = await asyncio.to_thread(self.host.ask, self.url, path, asked)
        if not answer.status:
            raise OSError(answer.text)
        return answer.status, answer.text

    def sent_bytes(self) -> int:
        """All that has left its host."""
        assert self.host is not None
        return int(self.host.tool("cat", "/proc/net/dev").partition("eth:")[2].split()[8])


@pytest.fixture(scope="module")
def servers(folder: Path, llama: Path) -> Iterator[dict[str, PlacedServer]]:
    try:
        hosts = two_hosts()
        places = dict(zip(("tp1", "tp2"), hosts.__enter__(), strict=True))
    except NoHosts as reason:
        pytest.skip(f"two hosts need network namespaces, which are not allowed here: {reason}")
    try:
        started = {
            layout: PlacedServer(layout, llama, folder, address=host.address, host=host)
            for layout, host in places.items()
        }
        started["tp2"].transfer["kv_load_failure_policy"] = "recompute"
        with running(*started.values()):
            yield started
    finally:
        hosts.__exit__(None, None, None)


@pytest.fixture(params=["tp1 to tp2", "tp2 to tp1"])
def pair(
    request: pytest.FixtureRequest, servers: dict[str, PlacedServer]
) -> tuple[PlacedServer, PlacedServer]:
    source, _, target = request.param.split()
    return servers[source], servers[target]


def test_the_answers_are_right_over_the_cable(pair: tuple[PlacedServer, PlacedServer]) -> None:
    prefill, decode = pair
    some = random_prompts(4, 700)

    async def ask_all(session: aiohttp.ClientSession) -> Any:
        right = await asyncio.gather(
            *(decode.ask(session, prompt, NUM_TOKENS, salt="alone") for prompt in some)
        )
        before, salt = prefill.sent_bytes(), uuid.uuid4().hex
        got = await asyncio.gather(
            *(hand_off(session, prefill, decode, prompt, NUM_TOKENS, salt=salt) for prompt in some)
        )
        return right, got, prefill.sent_bytes() - before

    right, got, num_bytes = run_client(ask_all)
    assert [status for status, _ in right] == [200] * len(some)
    assert got == right
    assert num_bytes > sum(map(len, some)) * 4096, "the cache went another way"


def test_a_cut_in_the_middle_of_a_transfer_is_survived(pair: tuple[PlacedServer, PlacedServer]) -> None:
    """Decode ends the request as vLLM's policy says, while the cable is still out."""
    prefill, decode = pair
    assert prefill.host is not None
    (prompt,) = random_prompts(1, 1500)

    async def cut_within(session: aiohttp.ClientSession) -> None:
        await check_right(session, prefill, decode)
        right = await decode.ask(session, prompt, NUM_TOKENS, salt="alone")
        sent, wanted = new_transfer(prefill.source)
        salt = uuid.uuid4().hex
        prefill.host.limit(MBIT)
        is_cut = False
        try:
            before = prefill.sent_bytes()
            halves = [
                asyncio.ensure_future(prefill.ask(session, prompt, 1, sent, salt)),
                asyncio.ensure_future(decode.ask(session, prompt, NUM_TOKENS, wanted, salt)),
            ]
            async with asyncio.timeout(FREE_S_MAX):
                while prefill.sent_bytes() - before < SENT_BYTES:
                    await asyncio.sleep(0.1)
            assert not halves[1].done(), "decode has answered before the prompt was there"
            prefill.host.cut()
            is_cut = True
            (prefilled, _), (status, answer) = await asyncio.gather(*halves)
        finally:
            if is_cut:
                prefill.host.mend()
            prefill.host.limit(0)
        assert prefilled == 200
        if decode.transfer.get("kv_load_failure_policy") == "recompute":
            assert (status, answer) == right
        else:
            assert status >= 500, answer
        await check_free(session, prefill, decode)
        await check_right(session, prefill, decode)
        await check_free(session, prefill, decode)

    run_client(cut_within)
