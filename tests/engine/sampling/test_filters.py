"""The distribution a token is drawn from, against a naive account of it."""

from dataclasses import replace
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.sampling import oracle
from tests.engine.sampling.oracle import Case

from baton.engine import sampler
from baton.engine.sampler import History, shape
from baton.engine.sampling_params import SamplingParams

VOCAB_SIZE = 23
# Shares that no sum of a few equal weights meets exactly: at a tie of sums rounding would decide.
SHARES = [0.0317, 0.2139, 0.5171, 0.7713, 0.9517, 0.9991, 1.0]


def probabilities(cases: list[Case]) -> list[list[float]]:
    histories = [History(case.begin(), len(case.logits), case.eos_ids) for case in cases]
    logits = torch.tensor([case.logits for case in cases], dtype=torch.float32)
    weights = sampler.weigh(shape(logits, histories), [case.params for case in cases])
    return (weights / weights.sum(dim=-1, keepdim=True)).tolist()


def assert_same(found: list[float], expected: list[float]) -> None:
    assert [value > 0 for value in found] == [value > 0 for value in expected]
    assert found == pytest.approx(expected, abs=1e-12)


def wishes(random: Random) -> SamplingParams:
    """Mostly wishes that meet: a filter at a time finds little."""

    def quarter() -> float:
        return random.randint(-24, 24) / 4

    def tokens(num_max: int) -> list[int]:
        return random.choices(range(VOCAB_SIZE), k=random.randint(0, num_max))

    return SamplingParams(
        temperature=random.choice([0.31, 0.7, 1.0, 1.9]),
        top_k=random.choice([0, random.randint(1, VOCAB_SIZE + 2)]),
        top_p=random.choice(SHARES),
        min_p=random.choice([0.0, 0.0, 0.0137, 0.2719, 1.0]),
        repetition_penalty=random.choice([1.0, 0.5, 1.25, 3.0]),
        presence_penalty=random.choice([0.0, quarter() / 3]),
        frequency_penalty=random.choice([0.0, quarter() / 3]),
        logit_bias={token: quarter() for token in tokens(4)},
        stop_ids=tuple(tokens(3)),
        min_tokens=random.randint(0, 6),
        ignore_eos=random.random() < 0.5,
    )


def any_case(random: Random) -> Case:
    """Logits in quarters, so that many are equal."""
    logits = tuple(random.randint(-24, 24) / 4 for _ in range(VOCAB_SIZE))
    known = tuple(random.choices(range(VOCAB_SIZE), k=random.randint(1, 12)))
    eos_ids = tuple(random.choices(range(VOCAB_SIZE), k=random.randint(0, 2)))
    return Case(logits, known, random.randint(1, len(known)), wishes(random), eos_ids)


# One number stands for a batch: building it from its parts would take most of the search's time.
@given(st.integers(0, 2**64 - 1))
def test_rows_of_a_batch_are_as_the_oracle_says(seed: int):
    random = Random(seed)
    batch = [any_case(random) for _ in range(random.randint(1, 4))]
    for found, case in zip(probabilities(batch), batch, strict=True):
        assert_same(found, oracle.distribution(case))


@pytest.mark.parametrize("spread", [3, 40])
@pytest.mark.parametrize("seed", range(10))
def test_filters_beyond_the_head_are_as_the_oracle_says(seed: int, spread: int):
    """More tokens than the head holds, and logits so flat for the small spread that some rows need them."""
    random = Random(seed)
    batch = []
    for _ in range(3):
        params = wishes(random)
        params = msgspec.structs.replace(params, top_k=params.top_k * 60)
        logits = tuple(random.randint(-spread, spread) / 4 for _ in range(sampler.HEAD + 300))
        batch.append(Case(logits, (1,), 1, params))
    for found, case in zip(probabilities(batch), batch, strict=True):
        assert_same(found, oracle.distribution(case))


PLAIN = Case((3.0, 2.5, 2.5, 1.0, 0.5, 0.25, -1.0, -2.0), (1, 2, 2, 4, 6, 6), 3, SamplingParams())
TELLING = [
    replace(PLAIN, params=params)
    for params in (
        SamplingParams(logit_bias={3: 1.5, 6: -2.0}),
        SamplingParams(min_tokens=4, stop_ids=(2,)),
        SamplingParams(min_tokens=4, ignore_eos=True, stop_ids=(2,)),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.75),
        SamplingParams(temperature=0.3, top_p=0.8),
        SamplingParams(top_k=2),
        SamplingParams(top_k=3, top_p=0.7),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=0.5),
    )
]


def test_telling_cases_are_as_the_oracle_says():
    for found, case in zip(probabilities(TELLING), TELLING, strict=True):
        assert_same(found, oracle.distribution(case))


@pytest.mark.parametrize("mistake", oracle.MISTAKES)
def test_each_mistake_would_show(mistake: str):
    found = probabilities(TELLING)
    wrong = [oracle.distribution(case, mistake) for case in TELLING]
    assert any(one != pytest.approx(other, abs=1e-6) for one, other in zip(found, wrong, strict=True))


def test_equal_weights_go_by_the_lower_id():
    logits = (1.0,) * 6
    top_k, top_p, head = probabilities(
        [
            Case(logits, (), 0, SamplingParams(top_k=2)),
            Case(logits, (), 0, SamplingParams(top_p=0.5)),
            Case(logits, (), 0, SamplingParams(top_p=1e-9)),
        ]
    )
    assert top_k == [0.5, 0.5, 0, 0, 0, 0]
    assert top_p == pytest.approx([1 / 3] * 3 + [0] * 3)
    assert head == [1, 0, 0, 0, 0, 0]


def test_equal_values_across_the_border_of_the_likeliest():
    values = torch.zeros(3, 5000)
    values[0, 4999] = 1
    values[1] = torch.arange(5000) // 1000
    values[2, ::2] = 1
    best, ids = sampler.likeliest(values, 4)
    assert ids.tolist() == [[4999, 0, 1, 2], [4000, 4001, 4002, 4003], [0, 2, 4, 6]]
    assert best.tolist() == [[1, 0, 0, 0], [4] * 4, [1] * 4]


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
def test_extreme_temperatures_stay_finite(temperature: float):
    (found,) = probabilities([Case((-4.0, 7.0, 3.0), (), 0, SamplingParams(temperature=temperature))])
    expected = [1 / 3] * 3 if temperature > 1 else [0, 1, 0]
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_draw_never_takes_what_was_filtered():
    weights = torch.tensor([[0.0, 1.0, 0.0, 0.7, 0.0]], dtype=torch.float64)
    edges = [0.0, 1 / 1.7 - 1e-12, 1 / 1.7 + 1e-12, 1 - 2**-53]
    assert sampler.draw(weights, torch.tensor([edges], dtype=torch.float64)).tolist() == [[1, 1, 3, 3]]


def test_the_largest_uniform_number_stays_inside():
    random = Random(1)
    weights = [[1.0, random.random() * 10 ** random.randint(-9, 3), 0.0] for _ in range(5000)]
    uniforms = torch.full((len(weights), 1), 1 - 2**-53, dtype=torch.float64)
    found = sampler.draw(torch.tensor(weights, dtype=torch.float64), uniforms)
    assert found.unique().tolist() == [1]
