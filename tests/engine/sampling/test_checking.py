"""Parameters that cannot be used are refused with field, value and remedy."""

import math

import msgspec
import pytest

from baton.engine.sampling_params import SamplingParams, check_params, sampling_defaults
from baton.errors import ConfigError

VOCAB_SIZE = 50

GOOD = [
    {},
    {"temperature": 0.0},
    {"temperature": 5.0},
    {"top_p": 1e-6},
    {"top_k": 10**9},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.1},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"logit_bias": {0: -100.0, 49: 100.0}},
    {"n": 128},
    {"logprobs": 0},
    {"logprobs": 50},
    {"max_tokens": 3, "min_tokens": 3},
    {"stop": ("x",) * 16},
    {"stop_ids": (0, 49)},
    {"stop_ids": tuple(range(50))},
    {"stop_ids": tuple(range(48)), "min_tokens": 1},
    {"seed": 2**64 - 1},
    {"seed": -(2**63)},
]
BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**64),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 5e-324),
    ("repetition_penalty", 1e300),
    ("repetition_penalty", math.nan),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("logit_bias", {50: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: math.nan}),
    ("n", 0),
    ("n", 129),
    ("logprobs", -1),
    ("logprobs", 51),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 51),
    ("max_tokens", 0),
    ("max_tokens", 2**64),
    ("min_tokens", 17),
    ("min_tokens", -1),
    ("stop", ("x",) * 17),
    ("stop", ("a", "")),
    ("stop_ids", (50,)),
    ("stop_ids", (-1,)),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_good_parameters_pass(fields: dict[str, object]):
    check_params(msgspec.structs.replace(SamplingParams(), **fields), VOCAB_SIZE, (3, 49))


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_bad_parameters_are_named_with_a_remedy(field: str, value: object):
    params = msgspec.structs.replace(SamplingParams(), **{field: value})
    with pytest.raises(ConfigError) as raised:
        check_params(params, VOCAB_SIZE)
    assert str(raised.value).startswith(f"{field} is {value!r}: ")
    assert any(verb in str(raised.value) for verb in ("give ", "ask "))


def test_a_large_vocabulary_does_not_raise_the_limit_of_logprobs():
    check_params(SamplingParams(logprobs=100), 10**5)
    with pytest.raises(ConfigError, match="from 0 to 100"):
        check_params(SamplingParams(logprobs=101), 10**5)


def test_something_must_be_left_until_min_tokens():
    params = SamplingParams(stop_ids=tuple(range(1, 50)), min_tokens=1)
    check_params(params, VOCAB_SIZE)
    with pytest.raises(ConfigError, match="min_tokens to 0"):
        check_params(params, VOCAB_SIZE, eos_ids=(0,))


def test_every_field_is_checked_or_cannot_be_wrong():
    free = {"ignore_eos", "skip_special_tokens", "shown_special_ids", "grammar"}  # which the tokenizer checks
    assert {field for field, _ in BAD} == set(SamplingParams.__struct_fields__) - free


def test_a_checkpoint_states_sampling_defaults() -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "min_p": None}
    others = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 7, "transformers_version": "5"}
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert sampling_defaults(stated | others, VOCAB_SIZE) == expected
    assert sampling_defaults({"temperature": 1, "top_k": -1}, VOCAB_SIZE) == SamplingParams()


@pytest.mark.parametrize("stated", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 2.5}])
def test_sampling_defaults_that_cannot_be(stated: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config.json: .*{next(iter(stated))}.*config none"):
        sampling_defaults(stated, VOCAB_SIZE)
