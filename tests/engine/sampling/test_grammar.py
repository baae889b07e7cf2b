"""Grammars: whatever the logits are, the text has its format, and no cut, draft token or other row shows."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import settings
from tests.engine.text.vocabularies import byte_fallback, byte_level

from baton.engine.commands import ScheduledSequence, StartSequence
from baton.engine.grammar import (
    Grammars,
    call_grammar,
    choice_grammar,
    json_grammar,
    regex_grammar,
    text_grammar,
)
from baton.engine.model_runner import sample_tokens
from baton.engine.sampler import Sampler, Want
from baton.engine.sampling_params import SamplingParams, check_params
from baton.engine.tokenizer import Tokenizer
from baton.errors import ConfigError, EngineError

VOCAB_SIZE = 432
PROMPT = [5, 6, 7]
EOS_IDS = (0, 2)
TOKENS_MAX = 3000
SPELLINGS = ["fox", "<|endoftext|>", "<tool>", 'a "quoted" // }\n', "\u4f60\U0001f600", ""]
"""Texts of an enum; some are spelled like special tokens."""


def random_schema(chance: Random, depth: int = 3) -> dict[str, Any]:
    kinds = ["enum", "integer", "string", "boolean", "null", "number"]
    match chance.choice(kinds + ["object", "array", "anyOf"] * 2 if depth else kinds):
        case "enum":
            return {"enum": chance.sample([*SPELLINGS, 5, None, [1, "x"]], 3)}
        case "integer":
            low = chance.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(100)}
        case "string":
            limits = {"minLength": chance.randrange(3), "maxLength": 3 + chance.randrange(6)}
            return {"type": "string", **chance.choice([limits, {"pattern": "^[a-z]{2,4}-[0-9]$"}])}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 1}
        case "object":
            names = chance.sample(["a", "the fox", "<tool>", "\u00fc"], chance.randrange(1, 4))
            properties = {name: random_schema(chance, depth - 1) for name in names}
            required = chance.sample(names, chance.randrange(len(names) + 1))
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": random_schema(chance, depth - 1), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def logits_at(position: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1000 * seed + position))


def opened(backend: Any = None) -> Sampler:
    serialized = (backend or byte_level()).backend_tokenizer.to_str()
    return Sampler(VOCAB_SIZE, EOS_IDS, Grammars(serialized, VOCAB_SIZE, EOS_IDS))


def generate(
    sampler: Sampler, grammar: str, seed: int, known: list[int] | None = None, num_max: int = TOKENS_MAX
) -> list[int]:
    """An answer of random logits, from what is known of it on."""
    params, tokens = SamplingParams(seed=seed, grammar=grammar), PROMPT + (known or [])
    sampler.begin(StartSequence(1, 0, tokens, len(PROMPT), params))
    tokens = list(tokens)
    while tokens[-1] not in EOS_IDS and len(tokens) - len(PROMPT) < num_max:
        logits = logits_at(len(tokens), seed)[None]
        tokens.append(sampler.sample(logits, [Want(1, 1, len(tokens))])[0][0].token)
        sampler.extend(1, tokens[-1:])
    return tokens[len(PROMPT) :]


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] in EOS_IDS, "it did not end"
    return Tokenizer(byte_level()).decode(tokens)


def test_every_output_is_json_of_its_schema():
    sampler, num_junk = opened(), 0
    grammars = Grammars(byte_level().backend_tokenizer.to_str(), VOCAB_SIZE, EOS_IDS)
    num_seeds = max(10, settings().max_examples // 10)
    for seed in range(num_seeds):
        schema = random_schema(Random(seed))
        grammar = json_grammar(schema)
        grammars.check(grammar)
        text = text_of(generate(sampler, grammar, seed))
        jsonschema_rs.validate(schema, json.loads(text))
        try:  # the broken variant: the same without a mask
            jsonschema_rs.validate(schema, json.loads(text_of(generate(sampler, "", seed, num_max=200))))
        except (AssertionError, ValueError):
            num_junk += 1
    assert num_junk > 0.8 * num_seeds


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex_grammar(r"a/[0-9]{2}\/|[\"x]{3}\n"), r"a/[0-9]{2}/|[\"x]{3}\n"),
        (choice_grammar(SPELLINGS[:-1]), "|".join(map(re.escape, SPELLINGS[:-1]))),
        (text_grammar('root ::= "ab" | "c" root'), "c*ab"),
        (text_grammar('start: "ab" | "c" start'), "c*ab"),
    ],
    ids=["regex", "choice", "gbnf", "lark"],
)
def test_other_formats(grammar: str, pattern: str):
    sampler = opened()
    texts = {text_of(generate(sampler, grammar, seed)) for seed in range(10)}
    assert len(texts) > 1
    for text in texts:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls(is_parallel: bool):
    # A reference counts from the root of the function's own schema.
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"]}
    schema |= {"$defs": {"p": {"enum": [1, "<tool>"]}}, "additionalProperties": False}
    functions = {"f": schema, 'g"\u00fc': {"type": "object", "maxProperties": 0}}
    (tool,) = byte_level().encode("<tool>")
    sampler, nums = opened(), set()
    for seed in range(12):
        grammar = call_grammar(functions, "arguments", "<call>", tool, is_parallel=is_parallel)
        tokens = generate(sampler, grammar, seed)
        calls = text_of(tokens).split("\n<tool>")[:-1]
        nums.add(len(calls))
        assert tokens.count(tool) >= len(calls)
        for call in calls:
            body = json.loads(call.strip().removeprefix("<call>"))
            jsonschema_rs.validate(functions[body["name"]], body["arguments"])
    assert nums > {1} if is_parallel else nums == {1}


@pytest.mark.parametrize("is_parallel", [False, True])
def test_calls_without_tags(is_parallel: bool):
    functions = {
        "f": {"type": "object", "properties": {"p": {"enum": [1, 2]}}, "additionalProperties": False}
    }
    grammar, sampler = call_grammar(functions, "parameters", "", "", is_parallel=is_parallel), opened()
    texts = {text_of(generate(sampler, grammar, seed)) for seed in range(12)}
    calls = [json.loads(f"[{text.replace('; ', ', ')}]") for text in texts]
    assert {call["name"] for listed in calls for call in listed} == {"f"}
    for listed in calls:
        for call in listed:
            jsonschema_rs.validate(functions["f"], call["parameters"])
    nums = {len(listed) for listed in calls}
    assert nums > {1} if is_parallel else nums == {1}


def test_a_tokenizer_that_falls_back_to_bytes():
    tokens = generate(opened(byte_fallback()), choice_grammar([" the fox\u00e9s"]), 1)
    assert bytes.fromhex(
        "".join(re.findall("<0x(..)>", "".join(byte_fallback().convert_ids_to_tokens(tokens))))
    )
    assert Tokenizer(byte_fallback()).decode(tokens).strip() == "the fox\u00e9s"


@pytest.mark.parametrize("seed", range(5))
def test_another_instance_goes_on_at_every_cut(seed: int):
    sampler, grammar = opened(), json_grammar(random_schema(Random(seed)))
    whole = generate(sampler, grammar, seed)
    for cut in range(0, len(whole), 1 + len(whole) // 12):
        assert generate(sampler, grammar, seed, whole[:cut]) == whole


def test_draft_tokens_change_nothing():
    """Right ones, wrong ones, and one behind the end."""
    sampler, chance = opened(), Random(3)
    for seed in range(10):
        grammar = json_grammar(random_schema(Random(seed)))
        whole = generate(sampler, grammar, seed)
        params = SamplingParams(seed=seed, grammar=grammar)
        sampler.begin(StartSequence(1, 0, PROMPT, len(PROMPT), params))
        tokens = list(PROMPT)
        while tokens[-1] not in EOS_IDS:
            at = len(tokens)
            right = [*whole[at - len(PROMPT) :], 9][0]
            draft = right if chance.random() < 0.7 else chance.randrange(VOCAB_SIZE)
            work = ScheduledSequence(1, at - 1, [tokens[-1], draft], {}, len(PROMPT), 1, num_drafted=1)
            logits = torch.stack([logits_at(at, seed), logits_at(at + 1, seed)])
            tokens += [sampled.token for sampled in sample_tokens(sampler, logits, [work])[1]]
        answer = tokens[len(PROMPT) :]
        assert not sampler.failures([1])
        assert answer[: len(whole)] == whole


def test_a_row_with_a_grammar_leaves_the_others_alone():
    sampler = opened()
    for sequence, grammar in enumerate(("", choice_grammar(["fox"]), "")):
        sampler.begin(StartSequence(sequence, 0, PROMPT, 3, SamplingParams(temperature=0, grammar=grammar)))
    logits = torch.stack([logits_at(place, 1) for place in range(3)])
    rows = [some[0].token for some in sampler.sample(logits, [Want(each, 1, 3) for each in range(3)])]
    best = logits.argmax(dim=-1).tolist()
    assert (rows[0], rows[2]) == (best[0], best[2])
    assert byte_level().decode([rows[1]]) in ("f", "fo", "fox")


def test_an_answer_that_left_its_grammar_fails_alone():
    sampler = opened()
    sampler.begin(StartSequence(1, 0, [*PROMPT, 9], 3, SamplingParams(grammar=choice_grammar(["fox"]))))
    sampler.begin(StartSequence(2, 0, [*PROMPT, 9], 3, SamplingParams()))
    assert sampler.sample(torch.stack([logits_at(4, 1)] * 2), [Want(1, 1, 4), Want(2, 1, 4)])
    failures = sampler.failures([1, 2])
    assert list(failures) == [1]
    assert "satisfy the grammar" in failures[1]
    with pytest.raises(EngineError, match="no tokenizer for it"):
        Sampler(VOCAB_SIZE, EOS_IDS).begin(StartSequence(1, 0, PROMPT, 3, SamplingParams(grammar="start:")))


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (json_grammar({"type": "objekt"}), "^Invalid type: objekt$"),
        (json_grammar({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented.*not"),
        (json_grammar({"$ref": "#/$defs/none"}), "does not exist"),
        (json_grammar({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (json_grammar({"type": "string", "pattern": "(a)\\1"}), "backreferences"),
        (regex_grammar("("), "unclosed group$"),
        (text_grammar("start: nothing"), "unknown name"),
    ],
)
def test_bad_grammars_are_refused_with_their_problem(grammar: str, problem: str):
    with pytest.raises(ConfigError, match=problem):
        Grammars(byte_level().backend_tokenizer.to_str(), VOCAB_SIZE, EOS_IDS).check(grammar)


def test_what_a_grammar_does_not_go_with():
    with pytest.raises(ConfigError, match="Lark or GBNF"):
        text_grammar("?")
    with pytest.raises(ConfigError, match="no token that ends"):
        Grammars(byte_level().backend_tokenizer.to_str(), VOCAB_SIZE, ())
    with pytest.raises(ConfigError, match="cannot read the model's tokenizer"):
        Grammars("{}", VOCAB_SIZE, EOS_IDS)
    for more in ({"min_tokens": 3}, {"ignore_eos": True}):
        with pytest.raises(ConfigError, match="ends where its format does"):
            check_params(SamplingParams(grammar="start:", **more), VOCAB_SIZE)
