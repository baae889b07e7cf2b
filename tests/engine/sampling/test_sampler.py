"""Tokens out of logits: which, how often, and that nothing but seed, answer and position matters."""

import math

import msgspec
import pytest
import torch
from tests.engine.sampling import oracle
from tests.engine.sampling.oracle import Case

from baton.engine import sampler as sampling
from baton.engine.commands import SampledToken, StartSequence
from baton.engine.sampler import Sampler, Want, uniform
from baton.engine.sampling_params import REPETITION_MAX, REPETITION_MIN, SamplingParams, check_params
from baton.errors import EngineError

VOCAB_SIZE = 12
LOGITS = (0.5, 2.0, -1.0, 1.5, 1.5, 0.0, -3.0, 0.25, 1.0, -0.5, 2.0, 0.75)
PROMPT = (3, 1, 4, 1, 5)
# Chi-square of 11 degrees of freedom exceeds this once in a thousand times; our draws are fixed.
CHI_SQUARE_MAX = 31.3

GOLDEN = [0.156742553465558, 0.6269999134633438, 0.4633667468151501, 0.33776134126730917]


def told(params: SamplingParams, sequence: int = 1, index: int = 0) -> Sampler:
    one = Sampler(len(LOGITS), (0,))
    one.begin(StartSequence(sequence, 0, list(PROMPT), len(PROMPT), params, index))
    return one


def draws(params: SamplingParams, num_draws: int) -> list[int]:
    """Tokens of as many requests that differ in nothing but their seeds."""
    one = Sampler(len(LOGITS), (0,))
    for seed in range(num_draws):
        its_params = msgspec.structs.replace(params, seed=seed)
        one.begin(StartSequence(seed, 0, list(PROMPT), len(PROMPT), its_params))
    logits = torch.tensor([LOGITS] * num_draws)
    wants = [Want(seed, 1, len(PROMPT)) for seed in range(num_draws)]
    return [some[0].token for some in one.sample(logits, wants)]


def chi_square(found: list[int], probabilities: list[float]) -> float:
    """Infinite where a token was drawn that has no probability."""
    total = 0.0
    for token, probability in enumerate(probabilities):
        count, expected = found.count(token), probability * len(found)
        if expected == 0:
            total += math.inf if count else 0
        else:
            total += (count - expected) ** 2 / expected
    return total


WISHES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=5),
    SamplingParams(top_p=0.7137),
    SamplingParams(min_p=0.3),
    SamplingParams(logit_bias={6: 5.0}, repetition_penalty=1.7),
]


@pytest.mark.parametrize("params", WISHES)
def test_tokens_come_as_often_as_they_should(params: SamplingParams):
    found = draws(params, 4000)
    assert chi_square(found, oracle.distribution(Case(LOGITS, PROMPT, len(PROMPT), params))) < CHI_SQUARE_MAX


@pytest.mark.parametrize("params", WISHES[1:])
def test_the_test_tells_distributions_apart(params: SamplingParams):
    plain = oracle.distribution(Case(LOGITS, PROMPT, len(PROMPT), SamplingParams()))
    assert chi_square(draws(params, 4000), plain) > 10 * CHI_SQUARE_MAX


def test_every_token_is_the_one_its_uniform_number_picks():
    params = SamplingParams(temperature=0.9, top_p=0.9137)
    probabilities = oracle.distribution(Case(LOGITS, PROMPT, len(PROMPT), params))
    expected = [oracle.pick(probabilities, uniform(seed, 0, len(PROMPT))) for seed in range(300)]
    assert draws(params, 300) == expected


def test_greedy_takes_the_lowest_id_of_the_largest():
    one = told(SamplingParams(temperature=0))
    logits = torch.tensor([LOGITS])
    assert one.sample(logits, [Want(1, 1, 5)]) == [[SampledToken(1)]]
    assert one.sample(logits, [Want(1, 3, 5)]) == [[SampledToken(1)] * 3]
    assert told(SamplingParams(temperature=0, logit_bias={10: 0.25})).sample(logits, [Want(1, 1, 5)]) == [
        [SampledToken(10)]
    ]


def test_greedy_without_wishes_leaves_the_logits_alone(monkeypatch: pytest.MonkeyPatch):
    """One maximum for the batch: nothing is copied, weighed or sorted."""
    one = Sampler(VOCAB_SIZE, (0,))
    for sequence in range(5):
        one.begin(StartSequence(sequence, 0, [1], 1, SamplingParams(temperature=0)))
    for name in ("weigh", "draw", "likeliest"):
        monkeypatch.delattr(sampling, name)
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.profiler.profile() as profile:
        found = one.sample(logits, [Want(sequence, 1, 1) for sequence in range(5)])
    assert [some[0].token for some in found] == logits.argmax(dim=-1).tolist()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::max"] == 1
    assert not {"aten::clone", "aten::softmax", "aten::sort", "aten::topk", "aten::exp"} & set(counts)


def mixed_requests() -> list[SamplingParams]:
    plain = [msgspec.structs.replace(params, seed=seed) for seed, params in enumerate(WISHES)]
    return [
        *plain,
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, frequency_penalty=0.4),
        SamplingParams(seed=77, presence_penalty=0.7, logprobs=2),
        SamplingParams(seed=78, top_k=3, top_p=0.6137, min_p=0.1),
    ]


def generate(requests: list[SamplingParams], chosen: list[int], num_steps: int) -> list[list[SampledToken]]:
    """Some of the requests in one batch, on logits that depend on the last token."""
    one = Sampler(64, (0,))
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * 2
    known = {request: list(PROMPT) for request in chosen}
    answers: dict[int, list[SampledToken]] = {request: [] for request in chosen}
    for request in chosen:
        one.begin(StartSequence(request, 0, known[request], len(PROMPT), requests[request]))
    for _ in range(num_steps):
        logits = table[[known[request][-1] for request in chosen]]
        found = one.sample(logits, [Want(request, 1, len(known[request])) for request in chosen])
        for request, (sampled,) in zip(chosen, found, strict=True):
            answers[request].append(sampled)
            known[request].append(sampled.token)
            one.extend(request, known[request], start=0)
    return [answers[request] for request in chosen]


def test_an_answer_is_the_same_alone_and_in_any_batch():
    requests = mixed_requests()
    everything = list(range(len(requests)))
    together = generate(requests, everything, 20)
    assert generate(requests, everything[::-1], 20) == together[::-1]
    for request in everything:
        assert generate(requests, [request], 20) == [together[request]]
    assert len({tuple(one.token for one in answer) for answer in together}) > 5


def test_rows_beyond_one_weighing_are_the_same(monkeypatch: pytest.MonkeyPatch):
    requests = mixed_requests()
    together = generate(requests, list(range(len(requests))), 3)
    monkeypatch.setattr(sampling, "ROWS_AT_ONCE", 2)
    assert generate(requests, list(range(len(requests))), 3) == together


def test_another_instance_goes_on_with_an_answer():
    """The second sampler is told prompt and answer so far, as after a hand-over or a preemption."""
    params = SamplingParams(seed=9, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=4, top_k=9)
    logits = torch.randn(10, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) + torch.tensor(
        [2.0] + [0.0] * 11
    )
    first = told(params)
    answer: list[int] = []
    for step in range(10):
        ((sampled,),) = first.sample(logits[step : step + 1], [Want(1, 1, 5 + step)])
        second = told(SamplingParams())
        second.begin(StartSequence(1, 0, [*PROMPT, *answer], len(PROMPT), params))
        assert second.sample(logits[step : step + 1], [Want(1, 1, 5 + step)]) == [[sampled]]
        answer.append(sampled.token)
        first.extend(1, [sampled.token])
    assert 0 not in answer[:4]
    assert 0 in answer[4:]


def test_forks_of_a_prompt_are_its_answers():
    """Sample i of the prompt's end is what answer i would have sampled by itself."""
    params = SamplingParams(seed=4, n=8, temperature=1.5)
    logits = torch.tensor([LOGITS])
    (forked,) = told(params).sample(logits, [Want(1, 8, 5)])
    alone = [told(params, index=index).sample(logits, [Want(1, 1, 5)])[0][0] for index in range(8)]
    assert forked == alone
    assert len({one.token for one in forked}) > 3


def test_rows_want_different_numbers_of_tokens():
    one = Sampler(VOCAB_SIZE, (0,))
    for sequence in range(3):
        one.begin(StartSequence(sequence, 0, list(PROMPT), 5, SamplingParams(seed=6, logprobs=1)))
    found = one.sample(torch.tensor([LOGITS] * 3), [Want(0, 4, 5), Want(1, 0, 5), Want(2, 1, 5)])
    assert [len(some) for some in found] == [4, 0, 1]
    assert found[2][0] == found[0][0]


def test_seeds_answers_and_positions_all_matter():
    numbers = [uniform(s, i, p) for s in (0, 1, 2**63, -1) for i in range(8) for p in range(32)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_numbers_are_the_same_in_every_release():
    """An instance of one release may go on with an answer of another."""
    found = [uniform(0, 0, 0), uniform(0, 0, 1), uniform(0, 1, 0), uniform(1, 0, 0)]
    assert found == GOLDEN


@pytest.mark.parametrize("turned", range(3))
def test_neighbours_are_independent(turned: int):
    """Pairs of numbers whose seed, answer or position differs by one, counted on a grid of 4 x 4."""
    pairs = []
    for number in range(3000):
        place = [number * 7 % 1000, number % 11, number]
        beside = [value + (axis == turned) for axis, value in enumerate(place)]
        pairs.append(int(uniform(*place) * 4) * 4 + int(uniform(*beside) * 4))
    assert chi_square(pairs, [1 / 16] * 16) < 37.7


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, VOCAB_SIZE])
def test_log_probabilities_are_the_models_own(num_logprobs: int):
    params = SamplingParams(seed=3, logprobs=num_logprobs, temperature=0.2, logit_bias={6: 90.0}, top_k=2)
    ((sampled,),) = told(params).sample(torch.tensor([LOGITS]), [Want(1, 1, 5)])
    expected = torch.log_softmax(torch.tensor(LOGITS, dtype=torch.float64), dim=-1).tolist()
    assert sampled.token == 6
    assert sampled.logprob == pytest.approx(expected[6], abs=1e-5)
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-expected[token], token))[:num_logprobs]
    assert list(sampled.top) == [*order, *([] if 6 in order else [6])]
    assert sampled.top == pytest.approx({token: expected[token] for token in sampled.top}, abs=1e-5)


def test_log_probabilities_are_told_to_those_who_asked():
    one = Sampler(VOCAB_SIZE, (0,))
    for sequence, count in enumerate([None, 3, 0, None, 1]):
        one.begin(StartSequence(sequence, 0, [1], 1, SamplingParams(temperature=0, logprobs=count)))
    found = one.sample(torch.tensor([LOGITS] * 5), [Want(sequence, 1, 1) for sequence in range(5)])
    assert [list(some[0].top) for some in found] == [[], [1, 10, 3], [1], [], [1]]
    assert found[0] == [SampledToken(1)]


@pytest.mark.parametrize("is_ignored", [False, True])
def test_min_tokens_puts_the_end_off(is_ignored: bool):
    params = SamplingParams(temperature=0, min_tokens=3, stop_ids=(7,), ignore_eos=is_ignored)
    one = told(params)
    ranking = torch.zeros(1, VOCAB_SIZE)
    ranking[0, [7, 0, 2]] = torch.tensor([3.0, 2.0, 1.0])
    found = []
    for step in range(5):
        ((sampled,),) = one.sample(ranking, [Want(1, 1, 5 + step)])
        found.append(sampled.token)
        one.extend(1, [sampled.token])
    assert found == ([0, 0, 0, 7, 7] if is_ignored else [2, 2, 2, 7, 7])


def test_penalties_follow_what_is_generated():
    """Greedy on flat logits under a frequency penalty visits every token before it repeats one."""
    one = told(SamplingParams(temperature=0, frequency_penalty=0.5))
    found = []
    for step in range(2 * VOCAB_SIZE):
        ((sampled,),) = one.sample(torch.zeros(1, VOCAB_SIZE), [Want(1, 1, 5 + step)])
        found.append(sampled.token)
        one.extend(1, [sampled.token], start=5 + step)
        one.extend(1, [sampled.token], start=5 + step)
    assert found == [*range(VOCAB_SIZE)] * 2


def test_placeholders_of_embeddings_have_no_logit():
    one = Sampler(VOCAB_SIZE, (0,))
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    one.begin(StartSequence(1, 0, [-1, VOCAB_SIZE, 1], 3, params))
    assert one.sample(torch.tensor([LOGITS]), [Want(1, 1, 3)]) == [[SampledToken(10)]]


@pytest.mark.parametrize("repetition", [REPETITION_MIN, REPETITION_MAX])
@pytest.mark.parametrize("scale", [-1e9, 0.0, 1e9])
def test_no_penalty_that_is_accepted_leaves_a_row_without_a_token(repetition: float, scale: float):
    extreme = {"frequency_penalty": -2.0, "presence_penalty": -2.0, "logit_bias": {2: 100.0, 3: -100.0}}
    params = SamplingParams(temperature=0.5, repetition_penalty=repetition, **extreme)
    check_params(params, VOCAB_SIZE)
    one = Sampler(VOCAB_SIZE, (0,))
    one.begin(StartSequence(1, 0, [*range(VOCAB_SIZE)] * 2, VOCAB_SIZE, params))
    ((sampled,),) = one.sample(torch.tensor([LOGITS]) * scale, [Want(1, 1, 2 * VOCAB_SIZE)])
    assert 0 <= sampled.token < VOCAB_SIZE


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_refused_with_their_sequence(value: float):
    one = Sampler(VOCAB_SIZE, (0,))
    for sequence in (40, 41):
        one.begin(StartSequence(sequence, 0, [1], 1, SamplingParams(temperature=sequence - 40)))
    logits = torch.tensor([LOGITS] * 2)
    logits[1, 3] = value
    with pytest.raises(EngineError, match=r"\[41\]"):
        one.sample(logits, [Want(40, 1, 1), Want(41, 1, 1)])


def test_a_history_with_a_gap_is_refused():
    one = told(SamplingParams(temperature=0))
    logits = torch.tensor([LOGITS])
    with pytest.raises(EngineError, match="position 6"):
        one.sample(logits, [Want(1, 1, 6)])
    with pytest.raises(EngineError, match="from position 7"):
        one.extend(1, [2], start=7)
    with pytest.raises(EngineError, match="shape"):
        one.sample(logits[:, 1:], [Want(1, 1, 5)])
    one.end(1)
    one.end(1)
    with pytest.raises(EngineError, match="unknown"):
        one.sample(logits, [Want(1, 1, 5)])
    assert one.sample(logits[:0], []) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_takes_the_tokens_the_cpu_takes():
    requests = [
        *mixed_requests(),
        SamplingParams(seed=79, top_p=0.9517),
        SamplingParams(seed=80, top_k=2000, top_p=0.7137, logprobs=5),
        SamplingParams(seed=81, min_tokens=3, stop_ids=(4,)),
    ]
    logits = torch.randn(len(requests), 3000, generator=torch.Generator().manual_seed(8)) * 3
    logits[:, 100:110] = 9.0
    found = []
    for device in ("cpu", "cuda"):
        one = Sampler(3000, (0,))
        for request, params in enumerate(requests):
            one.begin(StartSequence(request, 0, [*PROMPT, 7, 7], len(PROMPT), params))
        wants = [Want(request, 1 + request % 3, 7) for request in range(len(requests))]
        found.append(one.sample(logits.to(device), wants))
    assert [[each.token for each in some] for some in found[0]] == [
        [each.token for each in some] for some in found[1]
    ]
    for here, there in zip(*found, strict=True):
        for one, other in zip(here, there, strict=True):
            assert list(one.top) == list(other.top)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
