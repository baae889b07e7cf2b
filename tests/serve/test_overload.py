"""More than a pair can hold: requests wait and are answered, a client that leaves frees its place, and what
exceeds the queue is refused at once."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.serve.deployment import Answer, Deployment, Part, ask, deployment, oracle_text, until
from tests.serve.parts import ANSWER_S_MAX
from tests.serve.resources import lost_pages, server_pages

pytestmark = pytest.mark.serve

ROUTE = {"local": "never"}
NUM_PROMPT, NUM_TOKENS = 80, 24
WAIT_S_MAX = 10 * ANSWER_S_MAX


def prompt(number: int, num_prompt: int = NUM_PROMPT) -> list[int]:
    return [1 + (7 * number + 3 * position) % 300 for position in range(num_prompt)]


def question(
    number: int, num_prompt: int = NUM_PROMPT, num_tokens: int = NUM_TOKENS, **more: Any
) -> dict[str, Any]:
    ids = prompt(number, num_prompt)
    return {"prompt": ids, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}


def post(world: Deployment, body: dict[str, Any]) -> Answer:
    return ask(world.url, "/v1/completions", body, wait_s=WAIT_S_MAX)


@contextmanager
def streaming(world: Deployment, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """A client that leaves at the end of the block."""
    where = urlsplit(world.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=WAIT_S_MAX)
    try:
        raw = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
        yield connection
    finally:
        connection.close()


def num_waiting(part: Part) -> int:
    return int(ask(part.url, "/server_info").json["load"]["num_waiting"])


def expect_free_pages(world: Deployment) -> None:
    def lost() -> list[str]:
        return lost_pages({part.name: server_pages(world, part.name) for part in world.instances})

    until(lambda: not lost(), lambda: f"pages return: {lost()}", WAIT_S_MAX)


def test_four_times_the_capacity_is_answered_and_nothing_is_retried() -> None:
    """A pool of 512 tokens has room for 4 requests of 80 and 24 tokens."""
    num_requests = 20
    serve = {"pool-tokens": "512", "context": "256", "chunk-tokens": "64"}
    with deployment(["tp1"], ["tp1"], serve=serve, route=ROUTE) as world:
        with ThreadPoolExecutor(num_requests) as pool:
            answers = list(pool.map(lambda number: post(world, question(number)), range(num_requests)))
        assert [answer.status for answer in answers] == [200] * num_requests
        for number, answer in enumerate(answers):
            expected = oracle_text(prompt(number), NUM_TOKENS, ignore_eos=True)
            if expected.is_certain:
                assert answer.json["choices"][0]["text"] == expected.text
        assert world.router is not None
        assert world.router.metric("baton_router_handoffs_total") == num_requests
        assert world.router.metric("baton_router_retries_total") == 0
        expect_free_pages(world)


def test_a_client_that_leaves_frees_its_place_and_more_than_may_wait_is_refused_at_once() -> None:
    """Beside the first request, with its long answer, there is no room for a long prompt."""
    serve = {"pool-tokens": "4096", "context": "4096", "queue": "2"}
    num_prompt = 3300
    with deployment(["tp1"], ["tp1"], serve=serve, route=ROUTE) as world:
        decode = world.decode[0]
        with ThreadPoolExecutor(1) as pool:
            with streaming(world, question(0, 400, 3600)) as first:
                assert first.getresponse().status == 200, "it has begun"
                with streaming(world, question(1, num_prompt)):
                    until(lambda: num_waiting(decode) == 1, "the second waits", WAIT_S_MAX)
                    third = pool.submit(post, world, question(2, num_prompt))
                    until(lambda: num_waiting(decode) == 2, "the third waits", WAIT_S_MAX)
                    refused = post(world, question(3, num_prompt))
                    assert refused.status == 429
                    assert int(refused.headers["Retry-After"]) >= 1
                until(lambda: num_waiting(decode) == 1, "the second has left the queue", WAIT_S_MAX)
            answer = third.result(WAIT_S_MAX)
        assert answer.status == 200
        expected = oracle_text(prompt(2, num_prompt), NUM_TOKENS, ignore_eos=True)
        assert not expected.is_certain or answer.json["choices"][0]["text"] == expected.text
        expect_free_pages(world)
