"""What the connector decides in vLLM's scheduler."""

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.adapters.vllm_requests import decode_params, prefill_params, request, step

from baton.adapters.vllm.metadata import Cancel, DeclinePrompt
from baton.adapters.vllm.scheduler import SchedulerSide, WindowPins

PROMPT = list(range(100, 400))


@pytest.fixture
def side() -> SchedulerSide:
    return SchedulerSide((0,), "127.0.0.1:9001", renew_s=0.0)


def test_a_prompt_leaves_in_chunks_without_its_last_token(side: SchedulerSide) -> None:
    side.add_request(request("r", PROMPT, prefill_params("t")))
    (first,) = step(side, new={"r": (0, 128, [4])}).chunks
    (second,) = step(side, cached={"r": (128, 128, [9])}).chunks
    (third,) = step(side, cached={"r": (256, 44, [2])}).chunks
    assert [first.tokens, second.tokens, third.tokens] == [(0, 128), (128, 256), (256, 299)]
    assert [first.new_blocks, second.new_blocks, third.new_blocks] == [([4],), ([9],), ([2],)]
    assert first.transfer.num_tokens == 299
    assert step(side, cached={"r": (300, 1, None)}).chunks == []


def test_prefill_leaves_the_last_token_out_where_layers_are_recurrent() -> None:
    """Otherwise its state would be that of the whole prompt. What is handed over is the same prompt."""
    side, decode = SchedulerSide((0,), "127.0.0.1:1", 30.0, has_states=True), SchedulerSide((0,), "", 30.0)
    tokens = list(range(3, 43))
    sent, loaded = request("r", [*tokens], prefill_params("t")), request("q", [*tokens], decode_params("t"))
    sent.max_tokens, sent._all_token_ids = 100, [*tokens]
    side.add_request(sent)
    assert (sent.prompt_token_ids, sent._all_token_ids) == (tokens[:-1], tokens[:-1])
    assert (sent.num_prompt_tokens, sent.max_tokens) == (39, 1)
    (chunk,) = step(side, {"r": (0, 39, [3, 8, 4])}).chunks
    assert chunk.tokens == (0, 39)
    decode.add_request(loaded)
    decode.allocated(loaded, ([5, 9, 2],), decode.num_to_load(loaded, 0))
    assert step(decode).loads[0].transfer == chunk.transfer
    assert loaded.num_prompt_tokens == len(loaded.prompt_token_ids) == 40


def test_a_prefix_hit_is_sent_with_the_first_chunk_of_the_request(side: SchedulerSide) -> None:
    side.add_request(request("r", PROMPT, prefill_params("t")))
    (chunk,) = step(side, new={"r": (256, 44, [7, 8, 3])}).chunks
    assert (chunk.tokens, chunk.new_blocks) == ((0, 299), ([7, 8, 3],))


def test_a_prompt_that_is_all_hit_but_its_last_token_is_sent_whole(side: SchedulerSide) -> None:
    side.add_request(request("r", PROMPT[:257], prefill_params("t")))
    (chunk,) = step(side, new={"r": (256, 1, [7, 8, 3])}).chunks
    assert chunk.tokens == (0, 256)


def test_decode_asks_once_for_what_its_prefix_cache_lacks(side: SchedulerSide) -> None:
    asking = request("r", PROMPT, decode_params("t", "p:1"))
    side.add_request(asking)
    assert side.num_to_load(asking, 128) == side.num_to_load(asking, 128) == 171
    side.allocated(asking, ([5, 6, 7],), 171)
    assert side.has_messages
    (load,) = step(side).loads
    assert (load.source, load.num_held, load.blocks) == ("p:1", 128, ([5, 6, 7],))
    # After a failure, or a preemption, vLLM asks again: then it computes.
    assert side.num_to_load(asking, 0) == 0
    side.allocated(asking, ([5, 6, 7],), 0)
    assert not side.has_messages
    assert side.finished(asking) == (False, None)
    assert not side.has_messages


@pytest.mark.parametrize("num_held", [299, 299 // 128 * 128])
def test_decode_declines_what_it_does_not_load(side: SchedulerSide, num_held: int) -> None:
    """All of it is held; or vLLM does not load, as for prompt logprobs."""
    asking = request("r", PROMPT, decode_params("t", "p:1"))
    side.add_request(asking)
    assert side.num_to_load(asking, num_held) == 299 - num_held
    side.allocated(asking, ([5, 6, 7],), 0)
    assert [decline.transfer for decline in step(side).declines] == ["t"]


def test_a_decode_request_that_ends_without_blocks_declines(side: SchedulerSide) -> None:
    asking = request("r", PROMPT, decode_params("t", "p:1"))
    side.add_request(asking)
    assert side.finished(asking) == (False, None)
    assert side.has_messages
    assert step(side).declines == [DeclinePrompt("t", "p:1", "the request ended before it had blocks")]
    assert not side.has_messages


def test_a_prefill_request_that_ends_in_the_queue_is_cancelled(side: SchedulerSide) -> None:
    asking = request("r", PROMPT, prefill_params("t"))
    side.add_request(asking)
    assert side.finished(asking) == (False, None)
    (cancel,) = step(side).cancels
    assert isinstance(cancel, Cancel)
    assert cancel.transfer.id == "t"


@pytest.mark.parametrize("params", [prefill_params("t"), decode_params("t", "p:1")])
def test_a_prompt_in_the_queue_is_announced_and_renewed_while_the_queue_moves(
    side: SchedulerSide, params: dict[str, Any]
) -> None:
    asking = request("r", PROMPT, params)
    side.add_request(asking)
    (queued,) = step(side).queued
    assert (queued.request, queued.transfer.id, queued.source) == ("r", "t", params.get("source", ""))
    assert step(side).queued == [], "the queue does not move"
    assert step(side, new={"other": (0, 8, [1])}).queued == [], "nothing was computed before this step"
    assert step(side).queued == [queued]
    assert step(side, new={"other": (0, 8, [1])}).queued == []
    side.allocated(asking, ([5, 6, 7],), 299)
    assert step(side, new={"r": (0, 300, [5, 6, 7])}).queued == [], "it has left the queue"
    assert step(side).queued == []


def test_a_queue_that_moves_is_renewed_only_now_and_then() -> None:
    side = SchedulerSide((0,), "", renew_s=float("inf"))
    side.add_request(request("r", PROMPT, prefill_params("t")))
    assert len(step(side, new={"other": (0, 8, [1])}).queued) == 1
    assert step(side, cached={"other": (8, 1, None)}).queued == []


def test_a_prompt_that_starts_at_once_is_not_announced(side: SchedulerSide) -> None:
    side.add_request(request("r", PROMPT, prefill_params("t")))
    assert step(side, new={"r": (0, 300, [1, 2, 3])}).queued == []


def test_blocks_of_a_sent_prompt_stay_and_the_response_names_the_source(side: SchedulerSide) -> None:
    asking = request("r", PROMPT, {"do_remote_decode": True})
    side.add_request(asking)
    step(side, new={"r": (0, 300, [1, 2, 3])})
    delays_free, params = side.finished(asking)
    assert delays_free
    assert params == decode_params("r", "127.0.0.1:9001") | {"do_remote_decode": False}


def test_a_request_id_that_is_no_transfer_id_is_not_taken_for_one(side: SchedulerSide) -> None:
    """A client may name its request as it likes (X-Request-Id)."""
    decode, name = SchedulerSide((0,), "", renew_s=0.0), "x" * 129
    asking = request(name, PROMPT, {"do_remote_decode": True})
    side.add_request(asking)
    (chunk,) = step(side, new={name: (0, 300, [1, 2, 3])}).chunks
    _, params = side.finished(asking)
    assert params is not None
    assert params["transfer_id"] == chunk.transfer.id
    loaded = request("d", PROMPT, params)
    decode.add_request(loaded)
    assert decode.num_to_load(loaded, 0) == 299


@pytest.mark.parametrize("params", [prefill_params("t"), decode_params("t", "p:1")])
@pytest.mark.parametrize("tokens", [PROMPT, None], ids=["mixed", "embeddings alone"])
def test_a_prompt_with_embeddings_is_served_without_a_hand_over(
    side: SchedulerSide, caplog: Any, params: dict[str, Any], tokens: list[int] | None
) -> None:
    """Where they are, the token ids are placeholders: prompts with other embeddings have the same ones."""
    asking = request("r", PROMPT, params, prompt_embeds=object())
    asking.prompt_token_ids = tokens
    with caplog.at_level(logging.WARNING):
        side.add_request(asking)
    assert "request r is served without a hand-over: the prompt has embeddings" in caplog.text
    assert side.num_to_load(asking, 0) == 0
    assert step(side, new={"r": (0, 300, [1, 2, 3])}).chunks == []


def test_a_preempted_prompt_is_sent_again_from_its_first_token(side: SchedulerSide) -> None:
    side.add_request(request("r", PROMPT, prefill_params("t")))
    step(side, new={"r": (0, 128, [4])})
    assert step(side, preempted=("r", "other")).preempted == ["r"]
    (chunk,) = step(side, cached={"r": (0, 300, [1, 2, 3])}).chunks
    assert (chunk.tokens, chunk.new_blocks) == ((0, 299), ([1, 2, 3],))


@pytest.mark.parametrize(("tokens", "params"), [(PROMPT, None), ([5], prefill_params("t"))])
def test_without_parameters_or_with_one_token_nothing_is_sent(
    side: SchedulerSide, tokens: list[int], params: Any
) -> None:
    plain = request("r", tokens, params)
    side.add_request(plain)
    assert side.num_to_load(plain, 0) == 0
    assert step(side, new={"r": (0, 300, [1, 2, 3])}).chunks == []
    assert side.finished(plain) == (False, None)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (decode_params("t", ""), "source is ''"),
        ({"do_remote_prefill": True, "transfer_id": "t"}, "source is None"),
        ({"do_remote_prefill": True, "source": "p:1"}, "no transfer_id"),
        (prefill_params("x" * 129), "1 to 128 characters"),
        ({"do_remote_decode": True, "transfer_id": 7}, "transfer_id is 7"),
        (prefill_params("t") | decode_params("t"), "both set"),
    ],
)
def test_parameters_that_cannot_be_used_are_said_and_left(
    side: SchedulerSide, caplog: Any, params: dict[str, Any], problem: str
) -> None:
    asking = request("r", PROMPT, params)
    with caplog.at_level(logging.WARNING):
        side.add_request(asking)
    assert problem in caplog.text
    assert side.num_to_load(asking, 0) == 0
    assert step(side, new={"r": (0, 300, [1, 2, 3])}).chunks == []


def test_the_digest_stands_for_all_that_shaped_the_cache(side: SchedulerSide) -> None:
    picture = SimpleNamespace(identifier="a", mm_position=SimpleNamespace(offset=3, length=5))
    requests = [
        request("1", PROMPT, prefill_params("1")),
        request("2", [*PROMPT[:-1], 7], prefill_params("2")),
        request("3", PROMPT, prefill_params("3"), cache_salt="s"),
        request("4", PROMPT, prefill_params("4"), lora_request=SimpleNamespace(lora_name="l")),
        request("5", PROMPT, prefill_params("5"), mm_features=[picture]),
    ]
    for asking in requests:
        side.add_request(asking)
    chunks = step(side, new={asking.request_id: (0, 300, [1, 2, 3]) for asking in requests}).chunks
    assert len({chunk.transfer.digest for chunk in chunks}) == len(requests)


class BlockPool:
    """Counts references as vLLM's does."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def touch(self, blocks: Iterable[SimpleNamespace]) -> None:
        for block in blocks:
            self.counts[block.id] = self.counts.get(block.id, 0) + 1

    def free_blocks(self, blocks: Iterable[SimpleNamespace]) -> None:
        for block in blocks:
            self.counts[block.id] -= 1


def test_the_window_of_a_prompt_is_kept_until_it_was_sent(side: SchedulerSide) -> None:
    """Of 299 tokens with a window of 60, blocks 14 to 18 are in reach of the last token. The last one is not
    full: when prefill has generated a window more, vLLM frees it too."""
    pool = BlockPool()
    blocks = [SimpleNamespace(id=number, is_null=number < 13) for number in range(19)]
    manager = SimpleNamespace(
        block_pool=pool, get_blocks=lambda name: SimpleNamespace(blocks=(blocks, blocks))
    )
    side.pins = WindowPins(manager, {1: 60}, block_tokens=16)
    asking = request("r", PROMPT, prefill_params("t"))
    side.add_request(asking)
    step(side, new={"r": (0, 128, [*range(8)])})
    assert pool.counts == {}
    step(side, cached={"r": (128, 172, [*range(8, 19)])})
    assert pool.counts == {14: 1, 15: 1, 16: 1, 17: 1, 18: 1}
    side.finished(asking)
    side.sent({"r", "another"})
    assert set(pool.counts.values()) == {0}
