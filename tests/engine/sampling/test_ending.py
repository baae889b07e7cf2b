"""When an answer is over, and why."""

import pytest

from baton.engine.sampling_params import Progress, SamplingParams, ending, ends_with

EOS_IDS = (2, 3)


def after(
    token: int, num_generated: int = 5, has_stop_string: bool = False, num_tokens: int = 20
) -> Progress:
    return Progress(token, num_generated, num_tokens, context_max=64, has_stop_string=has_stop_string)


CASES = [
    (after(9), {}, None),
    (after(2), {}, "stop"),
    (after(3), {}, "stop"),
    (after(3), {"ignore_eos": True}, None),
    (after(3), {"ignore_eos": True, "stop_ids": (3,)}, "stop"),
    (after(9), {"stop_ids": (8, 9)}, "stop"),
    (after(9, has_stop_string=True), {}, "stop"),
    (after(9, has_stop_string=True), {"min_tokens": 5}, None),
    (after(9, 15), {}, None),
    (after(9, 16), {}, "length"),
    (after(2, 16), {}, "stop"),
    (after(2, 16), {"ignore_eos": True}, "length"),
    (after(9, num_tokens=63), {}, None),
    (after(9, num_tokens=64), {}, "length"),
    (after(2, num_tokens=64), {}, "stop"),
    (after(2), {"min_tokens": 5}, None),
    (after(2), {"min_tokens": 4}, "stop"),
    (after(9, 1), {"max_tokens": 1}, "length"),
]


@pytest.mark.parametrize(("progress", "fields", "expected"), CASES, ids=str)
def test_ending(progress: Progress, fields: dict[str, object], expected: str | None):
    assert ending(progress, SamplingParams(**fields), EOS_IDS) == expected


def test_a_token_may_end_from_the_one_after_min_tokens_on():
    """As the sampler does: with min_tokens tokens there, the next may be an end."""
    params = SamplingParams(min_tokens=3)
    assert [ends_with(2, count, params, EOS_IDS) for count in (1, 2, 3, 4)] == [False, False, False, True]
