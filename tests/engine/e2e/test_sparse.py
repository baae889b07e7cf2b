"""Sparse attention between layouts: latents and index keys travel, tokens are those of `transformers`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.e2e import broken_index
from tests.engine.e2e.breaking import broken
from tests.engine.e2e.instances import (
    CROSSINGS,
    InstancePool,
    Side,
    ask_all,
    ask_one,
    check_idle,
    greedy,
)
from tests.engine.e2e.prompts import check_tokens, prompt
from tests.engine.tiny import FAMILIES, GLM, tiny

from baton.engine.deployment import Pair
from baton.engine.sizes import derive_sizes
from baton.errors import ConfigError

pytestmark = pytest.mark.engine

FAMILY = "deepseek_v32"
CONFIG = FAMILIES[FAMILY]
NUM_CHOSEN = CONFIG["index_topk"]
PAGE, CHUNK = 8, 26
LENGTHS = (1, NUM_CHOSEN - 1, NUM_CHOSEN, NUM_CHOSEN + 1, 2 * CHUNK, 150)
NUM_TOKENS = 40


def sides(prefill: str, decode: str) -> tuple[Side, Side]:
    plain = Side(str(tiny(FAMILY))).but(chunk_tokens=CHUNK, page_tokens=PAGE, pool_tokens=2048)
    return replace(plain, layout=prefill, name="prefill"), replace(plain, layout=decode, name="decode")


def check_pair(pair: Pair, salt: str) -> None:
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS, salt=salt) for each in asked])
    check_tokens(tiny(FAMILY), asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize("crossing", CROSSINGS, ids=" to ".join)
def test_tokens(pool: InstancePool, crossing: tuple[str, str]) -> None:
    pair = pool.pair(*sides(*crossing))
    check_pair(pair, str(crossing))
    longer = [*prompt(LENGTHS[-1]), *prompt(7, "tail")]
    again = ask_one(pair, greedy(longer, NUM_TOKENS, salt=str(crossing)))
    check_tokens(tiny(FAMILY), [longer], [again], NUM_TOKENS)
    if "dp" not in crossing[0] and "split" not in crossing[0]:
        assert again.traces["prefill"].num_cached > 0


@pytest.mark.parametrize("crossing", [("tp2", "tp1"), ("pp2", "cp2"), ("cp2:split", "pp2")], ids=" to ".join)
def test_layers_share_an_indexer(pool: InstancePool, crossing: tuple[str, str]) -> None:
    folder = tiny("glm_moe_dsa", **GLM)
    prefill, decode = (replace(side, model=str(folder)) for side in sides(*crossing))
    pair = pool.pair(prefill, decode)
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    check_idle(pair.prefill, pair.decode)


def test_a_stage_does_not_begin_with_a_shared_indexer() -> None:
    side = Side(str(tiny("glm_moe_dsa", **GLM)), "pp2:1-3")
    with pytest.raises(ConfigError, match=r"begins with layer 1, which needs what layer 0 has computed"):
        derive_sizes(side.config)


def test_index_keys_travel_with_the_latent(pool: InstancePool) -> None:
    pair = pool.pair(*sides("tp1", "tp1"))
    for length in LENGTHS:
        heard = ask_one(pair, greedy(prompt(length), 2, salt=f"bytes {length}"))
        copies = [copy for copies in heard.traces["prefill"].copies.values() for copy in copies]
        num_channels = CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"] + CONFIG["index_head_dim"]
        num_numbers = num_channels * length * CONFIG["num_hidden_layers"]
        assert sum(copy.num_bytes for copy in copies) == 4 * num_numbers


@pytest.mark.long
@pytest.mark.parametrize("name", broken_index.BROKEN)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_broken_index_is_seen(
    pool: InstancePool, monkeypatch: pytest.MonkeyPatch, name: str, role: str
) -> None:
    prefill, decode = sides("tp1", "tp1")
    sound = pool.instance(decode if role == "prefill" else prefill)
    # A chunk as long as the prompts: the source chooses by what it has just computed.
    side = replace(prefill, name=f"{name} {role}").but(chunk_tokens=256)
    with broken(side, name, monkeypatch, "broken_index") as instance:
        pair = Pair(instance, sound) if role == "prefill" else Pair(sound, instance)
        if name == "nothing":
            check_pair(pair, f"{name} {role}")
        else:
            with pytest.raises(AssertionError, match="answer 0: token"):
                check_pair(pair, f"{name} {role}")
