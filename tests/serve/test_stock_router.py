"""A stock PD router before `baton serve`, without Baton's own: two prefill and two decode instances.

What it needs of an instance was observed, not read: /health, /server_info and /model_info at the start, then
both legs of every request at once, with bootstrap fields.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from tests.ports import free_port
from tests.serve.clients import Load
from tests.serve.deployment import Answer, Deployment, Part, ask, deployment, oracle_text, until
from tests.serve.judging import Fate, form_of_error
from tests.serve.parts import START_S_MAX
from tests.serve.questions import Catalogue
from tests.serve.resources import lost_pages, server_pages
from tests.serve.speaking import chat_ids, encode

MODULE = "sglang_router"
PREFILL, DECODE = ("tp2", "pp2"), ("tp1", "cp2:stripe32")
FOX = "the quick brown fox jumps"

pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason=f"{MODULE} is not installed"),
]


def stock_router(world: Deployment) -> Part:
    """The router's command, for these instances."""
    words = ["--pd-disaggregation", "--host", "127.0.0.1"]
    # In step with each other two round robins would never make the other two pairs.
    words += ["--prefill-policy", "random", "--decode-policy", "round_robin"]
    for part in world.prefill:
        words += ["--prefill", part.url, part.option("bootstrap-port")]
    for part in world.decode:
        words += ["--decode", part.url]
    words += ["--prometheus-port", str(free_port()), "--log-level", "warn", "--disable-retries"]
    return Part("stock-router", words, free_port(), world.folder, f"{MODULE}.launch_router")


class Front:
    """The stock router and what is behind it."""

    def __init__(self, world: Deployment, router: Part) -> None:
        self.world = world
        self.router = router
        self.model = str(world.instances[0].ask("/v1/models").json["data"][0]["id"])

    def ask(self, path: str, **body: Any) -> Answer:
        """One request through the router."""
        return ask(self.router.url, path, {"model": self.model, "temperature": 0, **body})


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with (
        deployment(PREFILL, DECODE, router=False, has_registry=False) as world,
        stock_router(world) as router,
    ):
        until(lambda: _has_workers(router, len(PREFILL) + len(DECODE)), "the router knows all", START_S_MAX)
        yield Front(world, router)
        print(router.told())


def _has_workers(router: Part, num_workers: int) -> bool:
    assert router.is_alive, router.told()
    if not router.is_healthy:
        return False
    found = router.ask("/workers").json
    return len([each for each in found["workers"] if each["is_healthy"]]) == num_workers


def test_it_finds_every_instance_by_what_they_tell(front: Front) -> None:
    workers = front.router.ask("/workers").json["workers"]
    by_role: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for worker in workers:
        by_role[worker["worker_type"]].add(worker["url"])
    assert by_role["prefill"] == {part.url for part in front.world.prefill}
    assert by_role["decode"] == {part.url for part in front.world.decode}


def test_completions(front: Front) -> None:
    for number in range(16):
        prompt = f"{FOX} {number}"
        expected = oracle_text(prompt, 12)
        answer = front.ask("/v1/completions", prompt=prompt, max_tokens=12)
        assert answer.status == 200, answer.text
        (choice,) = answer.json["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish)
        usage = answer.json["usage"]
        assert usage["prompt_tokens"] == len(encode(prompt))
        assert usage["completion_tokens"] == len(expected.tokens)
    for part in front.world.prefill:
        assert part.metric("baton_route_bytes_total") > 0, f"{part.name} handed nothing over"
    for part in front.world.decode:
        assert part.metric("baton_handoff_seconds_count") > 0, f"{part.name} was handed nothing"


def test_chat(front: Front) -> None:
    messages = [{"role": "user", "content": FOX}]
    expected = oracle_text(chat_ids(messages), 10)
    answer = front.ask("/v1/chat/completions", messages=messages, max_tokens=10)
    assert answer.status == 200, answer.text
    (choice,) = answer.json["choices"]
    assert choice["message"] == {**choice["message"], "role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == expected.finish


def test_generate(front: Front) -> None:
    expected = oracle_text(FOX, 9)
    sampling = {"temperature": 0, "max_new_tokens": 9}
    answer = ask(front.router.url, "/generate", {"text": FOX, "sampling_params": sampling})
    assert answer.status == 200, answer.text
    assert answer.json["text"] == expected.text
    finish = answer.json["meta_info"]["finish_reason"]
    assert finish["type"] == expected.finish


def test_log_probabilities(front: Front) -> None:
    answer = front.ask("/v1/completions", prompt=FOX, max_tokens=6, logprobs=3)
    assert answer.status == 200, answer.text
    (choice,) = answer.json["choices"]
    expected = oracle_text(FOX, 6)
    assert choice["text"] == expected.text
    told = choice["logprobs"]
    assert len(told["token_logprobs"]) == len(expected.tokens)
    assert all(value <= 0 for value in told["token_logprobs"])
    for value, others in zip(told["token_logprobs"], told["top_logprobs"], strict=True):
        assert value == pytest.approx(max(others.values()))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_errors_reach_the_client(front: Front, path: str) -> None:
    asked_for = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    answer = front.ask(path, **asked_for, max_tokens=4, temperature=-3)
    assert 400 <= answer.status < 500, answer.text
    assert "temperature" in answer.text


def test_a_prompt_over_the_limit_is_refused(front: Front) -> None:
    limit = front.world.decode[0].ask("/server_info").json["context_max"]
    answer = front.ask("/v1/completions", prompt="\x01" * (limit + 1), max_tokens=4)
    assert 400 <= answer.status < 500, answer.text


def test_a_room_is_honoured_from_loopback_only_with_a_peer_that_exists(front: Front) -> None:
    """What the router sends, sent by hand to one leg alone: the other never comes, which is an error."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": free_port(), "bootstrap_room": 7}
    body = {"model": front.model, "prompt": FOX, "max_tokens": 4, "temperature": 0, **room}
    answer = front.world.decode[0].ask("/v1/completions", body)
    assert answer.status in (502, 503, 504), answer.text
    assert form_of_error(answer.body) == ""


def test_mixed_questions_in_parallel(front: Front) -> None:
    """Streams, batches, several answers, chats, seeds and clients that leave, on every pair at once."""
    catalogue = Catalogue(seed=5, model=front.model, bad_share=0.0, leave_share=0.1, num_long_tokens=300)
    # It reads bodies into types of its own, in which a prompt is text.
    catalogue.short = [each for each in catalogue.short if isinstance(each.said, str)]
    load = Load(front.router.url, catalogue.question, num_clients=6)
    asyncio.run(load.run_all([catalogue.question(Random(number)) for number in range(60)]))
    print(load.tally())
    assert not load.of(Fate.WRONG, Fate.BROKEN, Fate.FAILED, Fate.BUSY), [str(each) for each in load.outcomes]
    assert len(load.of(Fate.RIGHT)) >= 40
    until(lambda: not _lost(front.world), lambda: f"pages return: {_lost(front.world)}", 60)


def _lost(world: Deployment) -> list[str]:
    return lost_pages({part.name: server_pages(world, part.name) for part in world.instances})
