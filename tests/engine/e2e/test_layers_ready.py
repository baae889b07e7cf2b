"""What each layer of a hybrid had to send, as its ranks tell it: what the bound is computed from."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.engine.e2e.instances import InstancePool, Side, greedy
from tests.engine.e2e.prompts import prompt
from tests.engine.hybrids import hybrid

from baton.engine.deployment import PairRequest
from baton.engine.trace import HandoffTrace, serial_s

pytestmark = pytest.mark.engine

CHUNK, NUM_TOKENS = 64, 150
KEY_BYTES = 2 * 8 * 2 * 4
"""Of a token in a layer that attends: 2 heads of 8 channels, keys and values."""
STATE_BYTES = 6 * 16 * 10 * 4 + 3 * (6 * 16 + 2 * 2 * 10) * 4
"""Of a layer that recurs: 6 heads of 16 x 10, and 3 inputs of each of a convolution's channels."""


@pytest.mark.parametrize("policy", ["fixed:1", "off"])
def test_states_leave_with_the_last_chunk(pool: InstancePool, policy: str) -> None:
    plain = Side(str(hybrid("bamba"))).but(chunk_tokens=CHUNK)
    pair = pool.pair(plain, Side(plain.model, name="two", options=plain.options))
    answer, pieces = pair.ask(PairRequest(greedy(prompt(NUM_TOKENS), 2), policy=policy))
    list(pieces)
    story = answer.traces["prefill"]
    layers = [layer for copy in story.copies[0] for layer in copy.layers_ready]
    assert sum(copy.num_bytes for copy in story.copies[0]) == sum(layer.num_bytes for layer in layers)
    # Layers 1 and 4 of 5 attend. They send every chunk, the others in the last one.
    keys, rest = KEY_BYTES * CHUNK, KEY_BYTES * (NUM_TOKENS - 2 * CHUNK)
    sent = [(layer.num_bytes, layer.state_bytes) for layer in layers]
    state = (STATE_BYTES, STATE_BYTES)
    assert sent == [*[(keys, 0)] * 4, state, (rest, 0), state, state, (rest, 0)]
    assert all(before.ready_s < after.ready_s for before, after in pairwise(layers))
    *_, last = (group.start_s for group in story.groups[0] if group.layers[0] == 0)
    assert all(layer.ready_s > last for layer in layers if layer.state_bytes)
    assert layers[-1].ready_s == pytest.approx(story.prompt_s)
    told = HandoffTrace(answer.asked_s, answer.first_s, story, answer.traces["decode"])
    assert 0 <= told.bound(serial_s(story)) <= 1
    assert told.state_share() == pytest.approx(
        3 * STATE_BYTES / (3 * STATE_BYTES + 2 * NUM_TOKENS * KEY_BYTES)
    )
