"""Many requests at once while peers fail at random and clients leave: every answer is right or a clean error.

And when all is over nothing is left: no leg, no count, no room used twice.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from tests.serving.peers import NUM_TOKENS, Fault, Peer, expected
from tests.serving.router_world import World, read_stream, run, until, world

from baton.serving.router import LocalMode, RouterLimits
from baton.session.registry import Role

CHAT = "/v1/chat/completions"
NUM_REQUESTS = 120
CODES = ("PEER_LOST", "COPY_FAILED", "OUT_OF_PAGES", "DEADLINE", "ENDED", "LOADING")
STATUSES = {429, 500, 502, 503, 504}
MODES = {1: LocalMode.NEVER, 2: LocalMode.AUTO, 3: LocalMode.NEVER}


def fault(chance: random.Random) -> Fault | None:
    """One request in three goes wrong."""
    after = chance.randrange(2 * NUM_TOKENS)
    return chance.choice(
        [
            Fault(chance.choice([502, 503, 504]), chance.choice(CODES)),
            Fault(429, "QUEUE_FULL", headers={"Retry-After": "1"}),
            Fault(is_cut=True, after=after),
            Fault(is_cut=True, is_torn=True, after=after),
            Fault(error_code=chance.choice(CODES), after=after),
            *[None] * 10,
        ]
    )


class Faults(list[Fault | None]):
    """An endless list, as a peer uses it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__([None])
        self._chance = chance

    def pop(self, index: Any = 0) -> Fault | None:
        return fault(self._chance)


@dataclass(frozen=True)
class Question:
    """A request, and the one right answer by choice."""

    path: str
    body: dict[str, Any]
    texts: dict[int, str]


def question(chance: random.Random, number: int) -> Question:
    n, is_stream = chance.choice([1, 1, 2]), chance.random() < 0.7
    body: dict[str, Any] = {"model": "tiny", "n": n, "stream": is_stream}
    if is_stream and chance.random() < 0.4:
        body["stream_options"] = {"include_usage": True}
    prompts = [
        f"{number} {place} " + "x" * chance.randrange(600) for place in range(chance.choice([1, 1, 3]))
    ]
    texts = {place * n + k: expected(prompt, k) for place, prompt in enumerate(prompts) for k in range(n)}
    if is_stream and len(prompts) == 1 and chance.random() < 0.5:
        body["messages"] = [{"role": "user", "content": prompts[0]}]
        return Question(CHAT, body, texts)
    body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    return Question("/v1/completions", body, texts)


async def ask(w: World, question: Question, leaves_s: float | None) -> str:
    """How it went; anything but a right answer or a clean error is an AssertionError."""
    try:
        async with asyncio.timeout(leaves_s):
            status, raw, headers = await w.post(json.dumps(question.body).encode(), question.path)
    except TimeoutError:
        return "left"
    if status != 200:
        assert status in STATUSES, (status, raw)
        assert json.loads(raw)["error"]["message"]
        assert status not in (429, 503) or "Retry-After" in headers or b"told to fail" in raw
        return f"refused {status}"
    if not question.body["stream"]:
        choices = json.loads(raw)["choices"]
        assert {each["index"]: each["text"] for each in choices} == question.texts
        return "answered"
    return judge(question, raw)


def judge(question: Question, raw: bytes) -> str:
    found = read_stream(raw)
    for index, text in found.texts.items():
        assert question.texts[index].startswith(text), "wrong, doubled or missing tokens"
    assert all(count <= 1 for count in found.roles.values())
    assert len(found.ids) <= 1
    if found.errors:
        assert (found.num_done, len(found.errors)) == (0, 1)
        return "broken off"
    assert (found.texts, found.num_done) == (question.texts, 1)
    if question.path == CHAT:
        assert found.roles == dict.fromkeys(question.texts, 1)
    if "stream_options" in question.body:
        assert [each["completion_tokens"] for each in found.usage] == [len(question.texts) * NUM_TOKENS]
    return "streamed"


def is_empty(w: World) -> bool:
    return not any(
        (each.upstreams, each.num_in_flight, each.num_tokens, each.num_local_tokens) != (set(), 0, 0, 0)
        for each in w.instances
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed > 1 else []) for seed in MODES]
)
def test_storm_leaves_right_answers_and_nothing_else(seed: int):
    async def body() -> None:
        chance = random.Random(seed)
        limits = RouterLimits(num_in_flight_max=16, first_s_max=20.0)
        async with world(2, 3, limits, local=MODES[seed], prefill_policy="prefix_aware") as w:
            await w.join("b0", Role.BOTH)
            peers: list[Peer] = list(w.peers.values())
            for peer in peers:
                peer.faults = Faults(chance)
                peer.told["rates"] = {"prefill_tokens_per_s": 1000.0, "handoff_s": 0.05}
            asks = []
            for number in range(NUM_REQUESTS):
                leaves_s = chance.uniform(0.001, 0.3) if chance.random() < 0.15 else None
                asks.append(asyncio.create_task(ask(w, question(chance, number), leaves_s)))
                await asyncio.sleep(chance.uniform(0, 0.01))
            fates = Counter(await asyncio.gather(*asks))
            assert fates["streamed"] + fates["answered"] > NUM_REQUESTS / 2, fates
            await until(lambda: is_empty(w))
            assert w.router.queue.num_waiting == 0
            assert await w.metric("baton_router_resumes_total") > 0
            assert await w.metric("baton_router_retries_total") > 0

    run(body)


@pytest.mark.long
def test_judge_of_the_storm_sees_what_is_wrong():
    asked = Question("/v1/completions", {"stream": True}, {0: "<1><2>"})

    def event(text: str, **more: Any) -> bytes:
        choice = {"index": 0, "text": text, **more}
        return b"data: %s\n\n" % json.dumps({"id": "a", "choices": [choice]}).encode()

    done = b"data: [DONE]\n\n"
    assert judge(asked, event("<1>") + event("<2>", finish_reason="length") + done) == "streamed"
    assert judge(asked, event("<1>") + b'data: {"error": {}}\n\n') == "broken off"
    for raw in (
        event("<1>") + done,
        event("<2>") + done,
        event("<1>") + event("<1>") + done,
        event("<1>") + event("<2>"),
        event("<1>") + b'data: {"error": {}}\n\n' + done,
    ):
        with pytest.raises(AssertionError):
            judge(asked, raw)
