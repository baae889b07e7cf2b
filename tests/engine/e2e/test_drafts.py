"""Drafts between layouts: answers are those without one, and it guesses as if never handed over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

import pytest
from tests.engine.drafts import Count, counted, drafted, drafted_hybrid, expected
from tests.engine.e2e import broken_drafts
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
from tests.engine.tiny import FAMILIES, oracle, tiny

from baton.engine.config import EngineConfig
from baton.engine.deployment import Pair
from baton.engine.instance import Instance
from baton.engine.pages import PageGeometry
from baton.engine.sizes import derive_sizes
from baton.errors import ConfigError, EngineError

pytestmark = pytest.mark.engine

FAMILY = "deepseek_v3"
CONFIG = FAMILIES[FAMILY]
PAGE, CHUNK = 8, 26
LENGTHS = (1, PAGE, CHUNK, CHUNK + 1, 2 * CHUNK, 150)
NUM_TOKENS = 41
ALIKE = [("cp2:mirror", "tp1"), ("cp2:split", "tp1"), ("tp1", "cp2:split")]
"""Pairs that DeepSeek-V3.2 and the latents of V3 are tested with, and where a draft shows nothing new."""
SAMPLED = {
    "temperature": {"temperature": 0.7, "seed": 11},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "least length": {"temperature": 0.4, "min_tokens": 30, "ignore_eos": False},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3},
    "several": {"temperature": 0.9, "n": 3, "seed": 5},
}


def side(layout: str, name: str, **options: object) -> Side:
    plain = Side(str(drafted(FAMILY)), layout, name)
    sizes = {"chunk_tokens": CHUNK, "page_tokens": PAGE, "pool_tokens": 2048, "draft_tokens": 1}
    return plain.but(**{**sizes, **options})


def pair_of(pool: InstancePool, prefill: str, decode: str) -> Pair:
    return pool.pair(side(prefill, "prefill"), side(decode, "decode"))


def count(instance: Instance) -> Count:
    found = instance.counts()
    return Count(found["drafted"], found["accepted"])


def check_pair(pair: Pair, salt: str, num_tokens: int = NUM_TOKENS) -> None:
    """Tokens are those of `transformers`, and so is how often the draft was right."""
    asked = [prompt(length) for length in LENGTHS]
    before = count(pair.decode)
    found = ask_all(pair, [greedy(each, num_tokens, salt=salt) for each in asked])
    check_tokens(drafted(FAMILY), asked, found, num_tokens)
    check_idle(pair.prefill, pair.decode)
    wanted = reduce(add, (expected(drafted(FAMILY), each, num_tokens) for each in asked))
    assert count(pair.decode) - before == wanted
    assert wanted.drafted // 8 < wanted.accepted < wanted.drafted, "it has to be right and wrong"


def check_each(pair: Pair, salt: str) -> None:
    """The same of many requests one by one, whose counts cannot make up for one another."""
    for length in range(2, 92, 6):
        asked, before = prompt(length, "each"), count(pair.decode)
        found = ask_one(pair, greedy(asked, NUM_TOKENS, salt=salt))
        check_tokens(drafted(FAMILY), [asked], [found], NUM_TOKENS)
        assert count(pair.decode) - before == expected(drafted(FAMILY), asked, NUM_TOKENS)


@pytest.mark.parametrize("crossing", [each for each in CROSSINGS if each not in ALIKE], ids=" to ".join)
def test_tokens_and_guesses(pool: InstancePool, crossing: tuple[str, str]) -> None:
    pair = pair_of(pool, *crossing)
    check_pair(pair, str(crossing))
    longer, before = [*prompt(LENGTHS[-1]), *prompt(7, "tail")], count(pair.decode)
    again = ask_one(pair, greedy(longer, NUM_TOKENS, salt=str(crossing)))
    check_tokens(drafted(FAMILY), [longer], [again], NUM_TOKENS)
    assert count(pair.decode) - before == expected(drafted(FAMILY), longer, NUM_TOKENS)
    if "dp" not in crossing[0] and "split" not in crossing[0]:
        assert again.traces["prefill"].num_cached > 0


@pytest.mark.parametrize("layout", ["pp2", "dp2.tp1"])
def test_one_instance(pool: InstancePool, layout: str) -> None:
    instance = pool.instance(side(layout, "both"))
    asked, before = [prompt(length, "alone") for length in LENGTHS], count(instance)
    found = ask_all(instance, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(drafted(FAMILY), asked, found, NUM_TOKENS)
    check_idle(instance)
    wanted = reduce(add, (expected(drafted(FAMILY), each, NUM_TOKENS) for each in asked))
    assert count(instance) - before == wanted


@pytest.mark.parametrize("crossing", [("tp2", "pp2"), ("cp2", "tp1")], ids=" to ".join)
def test_with_an_index_of_its_own(pool: InstancePool, crossing: tuple[str, str]) -> None:
    """DeepSeek-V3.2: the draft picks tokens by index keys that travel with its latents."""
    folder = drafted("deepseek_v32")
    prefill, decode = (
        replace(side(layout, name), model=str(folder))
        for layout, name in zip(crossing, ("prefill", "decode"), strict=True)
    )
    pair = pool.pair(prefill, decode)
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    assert count(pair.decode) == reduce(add, (expected(folder, each, NUM_TOKENS) for each in asked))
    check_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("crossing", "num_sent", "num_guesses"),
    [
        (("tp2", "pp2"), 3, 3),
        (("cp2:split", "cp2"), 3, 3),
        (("dp2.tp1", "tp1"), 4, 2),
        (("tp1", "dp2.tp1"), 1, 3),
    ],
    ids=str,
)
def test_several_guesses(
    pool: InstancePool, crossing: tuple[str, str], num_sent: int, num_guesses: int
) -> None:
    """The draft goes on from its own rows; a source guesses as far as its pages have room."""
    pair = pool.pair(
        side(crossing[0], "prefill", draft_tokens=num_sent),
        side(crossing[1], "decode", draft_tokens=num_guesses),
    )
    check_several(pool, pair, LENGTHS)


@pytest.mark.parametrize(
    ("family", "crossing", "num_guesses"),
    [
        ("qwen3_next", ("tp2", "pp2"), 1),
        ("qwen3_next", ("tp1", "cp2:stripe1"), 3),
        ("qwen3_5_moe_text", ("pp2", "dp2.tp1"), 2),
        ("qwen3_5_text", ("cp2:split", "tp2"), 3),
    ],
    ids=str,
)
def test_recurrent_models(
    pool: InstancePool, family: str, crossing: tuple[str, str], num_guesses: int
) -> None:
    """Qwen3-Next and Qwen3.5: a wrong guess leaves no trace in a state."""
    prefill, decode = (
        replace(side(layout, name, draft_tokens=num_guesses), model=str(drafted_hybrid(family)))
        for layout, name in zip(crossing, ("prefill", "decode"), strict=True)
    )
    check_several(pool, pool.pair(prefill, decode), (1, PAGE, CHUNK + 1, 90))


@pytest.mark.long
@pytest.mark.parametrize("name", ["nothing", *broken_drafts.STATES])
def test_a_broken_state_is_seen(pool: InstancePool, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    prefill, decode = (
        replace(side("tp1", role, draft_tokens=2), model=str(drafted_hybrid("qwen3_next")))
        for role in ("prefill", name)
    )
    with broken(decode, name, monkeypatch, "broken_drafts") as instance:
        pair = Pair(pool.instance(prefill), instance)
        if name == "nothing":
            check_several(pool, pair, (CHUNK,))
        else:
            with pytest.raises(AssertionError):
                check_several(pool, pair, (CHUNK,))


def check_several(pool: InstancePool, pair: Pair, lengths: Sequence[int]) -> None:
    """Tokens and guesses are those of the oracle; what is drawn is the same as without drafts."""
    (source, target), folder = (pair.prefill, pair.decode), Path(pair.decode.config.model)
    asked, wanted, before = [prompt(length) for length in lengths], Count(0, 0), count(target)
    geometry = PageGeometry(source.sizes.layout, source.sizes.cache, PAGE)
    for each in asked:
        num_pages = geometry.num_pages("tokens", len(each), len(each))
        rooms = [
            room
            for room in range(1, source.config.draft_tokens + 1)
            if geometry.num_pages("tokens", len(each) + room - 1, len(each)) == num_pages
        ]
        num_guesses = target.config.draft_tokens
        num_first = min(max(rooms), num_guesses)
        wanted += expected(folder, each, NUM_TOKENS, num_guesses=num_guesses, num_first=num_first)
    found = ask_all(pair, [greedy(each, NUM_TOKENS, salt="several") for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    check_idle(source, target)
    assert count(target) - before == wanted
    assert 0 < wanted.accepted < wanted.drafted, "it has to be right and wrong"
    drawn = [greedy(each, NUM_TOKENS, temperature=0.7, seed=7, n=2, logprobs=1) for each in asked]
    plain = pool.instance(replace(side("tp1", "plain", draft_tokens=0), model=str(folder)))
    for one, other in zip(ask_all(plain, drawn), ask_all(pair, drawn), strict=True):
        assert other.tokens == one.tokens
        for index, answer in one.answers.items():
            logprobs = [[sampled.logprob for sampled in each] for each in (answer, other.answers[index])]
            assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3)


def test_a_draft_that_knows_nothing_changes_nothing(pool: InstancePool) -> None:
    folder = drafted(FAMILY, is_random=True)
    poor = replace(side("tp1", "prefill"), model=str(folder))
    pair = pool.pair(poor, replace(poor, layout="tp2", name="decode"))
    asked = [prompt(length) for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(folder, asked, found, NUM_TOKENS)
    wanted = reduce(add, (expected(folder, each, NUM_TOKENS) for each in asked))
    assert count(pair.decode) == wanted
    assert wanted.accepted < wanted.drafted // 8


def test_draft_entries_travel_with_the_others(pool: InstancePool) -> None:
    pair = pair_of(pool, "tp1", "tp1")
    for length in LENGTHS:
        heard = ask_one(pair, greedy(prompt(length), 2, salt=f"bytes {length}"))
        copies = [copy for copies in heard.traces["prefill"].copies.values() for copy in copies]
        num_numbers = (CONFIG["kv_lora_rank"] + CONFIG["qk_rope_head_dim"]) * length
        assert sum(copy.num_bytes for copy in copies) == 4 * num_numbers * (CONFIG["num_hidden_layers"] + 1)


@pytest.mark.parametrize("kind", SAMPLED)
def test_other_sampling_is_the_same_with_guesses(pool: InstancePool, kind: str) -> None:
    """Also where nothing is greedy: a guess stands if it is what would have been sampled."""
    plain = pool.instance(side("tp1", "plain", draft_tokens=0))
    pair = pair_of(pool, "tp1", "tp2")
    requests = [greedy(prompt(length, kind), NUM_TOKENS, **SAMPLED[kind]) for length in LENGTHS]
    before = count(pair.decode)
    wanted, found = ask_all(plain, requests), ask_all(pair, requests)
    for one, other in zip(wanted, found, strict=True):
        assert other.tokens == one.tokens
        assert other.finishes == one.finishes
        for index, answer in one.answers.items():
            for a, b in zip(answer, other.answers[index], strict=True):
                assert b.top.keys() == a.top.keys()
                assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
    assert (count(pair.decode) - before).accepted > 0


def test_forks_guess_from_their_own_tokens(pool: InstancePool) -> None:
    for where, decode in (
        (pool.instance(side("tp1", "both")),) * 2,
        (pair_of(pool, "tp1", "tp2"), pool.instance(side("tp2", "decode"))),
    ):
        asked = [prompt(length, "forks") for length in (PAGE, 2 * PAGE, 29)]
        before, total = count(decode), Count(0, 0)
        found = ask_all(where, [greedy(each, NUM_TOKENS, temperature=1.1, n=4, seed=3) for each in asked])
        for each, heard in zip(asked, found, strict=True):
            assert len({answer[0] for answer in heard.tokens}) > 1, "the answers have to part at once"
            for index, answer in enumerate(heard.tokens):
                # The first one's guess comes with its token; the others begin without.
                total += counted(drafted(FAMILY), each, answer, num_first=int(index == 0))
        assert count(decode) - before == total


def test_an_answer_ends_inside_of_what_was_guessed(pool: InstancePool) -> None:
    """At every token of an answer, right ones guessed and others."""
    pair = pair_of(pool, "tp1", "tp1")
    asked = prompt(12, "ends")
    answer = oracle(drafted(FAMILY), [asked], NUM_TOKENS)[0]
    firsts = [at for at, token in enumerate(answer) if token not in answer[:at]]
    requests = [greedy(asked, NUM_TOKENS, stop_ids=(answer[at],), salt="ends") for at in firsts] + [
        greedy(asked, length, salt="ends") for length in range(1, 12)
    ]
    found = [heard.tokens[0] for heard in ask_all(pair, requests)]
    assert found == [answer[: at + 1] for at in firsts] + [answer[:length] for length in range(1, 12)]
    check_idle(pair.prefill, pair.decode)


def test_few_pages(pool: InstancePool) -> None:
    """Preempted sequences begin again, and guess again."""
    tight = side("tp1", "tight").but(pool_tokens=256, context_max=200)
    instance = pool.instance(tight)
    asked = [prompt(40, str(index)) for index in range(8)]
    found = ask_all(instance, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(drafted(FAMILY), asked, found, NUM_TOKENS)
    assert instance.counts()["preempted"] > 0
    check_idle(instance)


def test_a_target_takes_a_draft_or_leaves_it(pool: InstancePool) -> None:
    """It asks for what it runs; a source that has not got that is refused by name."""
    with_it, without = side("tp1", "prefill"), side("tp1", "plain", draft_tokens=0)
    pair = pool.pair(with_it, without)
    asked = [prompt(length, "left") for length in LENGTHS]
    found = ask_all(pair, [greedy(each, NUM_TOKENS) for each in asked])
    check_tokens(drafted(FAMILY), asked, found, NUM_TOKENS)
    assert count(pair.decode) == Count(0, 0)
    check_idle(pair.prefill, pair.decode)
    pair = pool.pair(without, with_it)
    with pytest.raises(EngineError, match=r"draft\.0\.latent.*run drafts on both sides"):
        ask_one(pair, greedy(prompt(20), 4))
    check_idle(pair.prefill, pair.decode)


def test_from_the_command_line() -> None:
    asked, num_tokens = prompt(30, "typed"), 12
    options = ["--draft", "--prefill", "tp1", "--decode", "tp2", "--max-tokens", str(num_tokens)]
    command = ["generate", "--model", str(drafted(FAMILY)), *options, " ".join(map(str, asked))]
    done = subprocess.run(
        [sys.executable, "-m", "baton", *command], capture_output=True, text=True, timeout=300, check=True
    )
    answer = oracle(drafted(FAMILY), [asked], num_tokens)[0]
    stop = next((at + 1 for at, token in enumerate(answer) if token == CONFIG["eos_token_id"]), num_tokens)
    assert list(map(int, done.stdout.split())) == answer[:stop]


def test_refusals(pool: InstancePool) -> None:
    with pytest.raises(ConfigError, match="no draft layer"):
        derive_sizes(EngineConfig(str(tiny("llama")), draft_tokens=1))
    instance = pool.instance(side("tp1", "both"))
    rows = replace(greedy([0] * 4, 4), embeddings=bytes(16 * CONFIG["hidden_size"]))
    with pytest.raises(ConfigError, match="with input embeddings; give token ids"):
        ask_one(instance, rows)


@pytest.mark.long
@pytest.mark.parametrize("name", broken_drafts.BROKEN)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_broken_draft_is_seen(
    pool: InstancePool, monkeypatch: pytest.MonkeyPatch, name: str, role: str
) -> None:
    plain = side("tp1", "decode" if role == "prefill" else "prefill")
    sound = pool.instance(plain)
    with broken(side("tp1", f"{name} {role}"), name, monkeypatch, "broken_drafts") as instance:
        pair = Pair(instance, sound) if role == "prefill" else Pair(sound, instance)
        # A source guesses without anybody checking it: one token is all that it samples.
        if name == "nothing" or (name == "unchecked" and role == "prefill"):
            check_each(pair, f"{name} {role}")
        else:
            with pytest.raises(AssertionError):
                check_each(pair, f"{name} {role}")
