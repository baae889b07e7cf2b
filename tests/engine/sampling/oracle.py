"""Sampling written down naively, one token at a time, with deliberate mistakes to choose from."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from baton.engine.commands import StartSequence
from baton.engine.sampling_params import SamplingParams

MISTAKES = (
    "bias is left out",
    "eos is open before min_tokens",
    "an ignored eos is barred",
    "stop ids are open before min_tokens",
    "min_tokens counts the prompt",
    "repetition over the answer only",
    "repetition divides always",
    "presence over the prompt too",
    "frequency does not count",
    "temperature after the filters",
    "one more than k",
    "top-p stops short",
    "top-p over all",
    "min-p is absolute",
)


@dataclass(frozen=True)
class Case:
    """One row: logits, what the sampler was told, and the tokens that end answers."""

    logits: tuple[float, ...]
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    eos_ids: tuple[int, ...] = (0,)

    def begin(self, sequence: int = 1) -> StartSequence:
        return StartSequence(sequence, 0, list(self.tokens), self.num_prompt, self.params)


def shaped(case: Case, mistake: str = "") -> list[np.float32]:
    params = case.params
    logits = [np.float32(logit) for logit in case.logits]
    for token, bias in params.logit_bias.items():
        if mistake != "bias is left out":
            logits[token] += np.float32(bias)
    generated = Counter(case.tokens[case.num_prompt :])
    num_generated = len(case.tokens) - (0 if mistake == "min_tokens counts the prompt" else case.num_prompt)
    if num_generated < params.min_tokens:
        barred = set() if mistake == "stop ids are open before min_tokens" else set(params.stop_ids)
        if mistake == "an ignored eos is barred" or not params.ignore_eos:
            barred |= set() if mistake == "eos is open before min_tokens" else set(case.eos_ids)
        for token in barred:
            logits[token] = np.float32(-math.inf)
    repetition = np.float32(params.repetition_penalty)
    repeated = generated if mistake == "repetition over the answer only" else set(case.tokens)
    for token in repeated:
        is_divided = logits[token] > 0 or mistake == "repetition divides always"
        logits[token] = logits[token] / repetition if is_divided else logits[token] * repetition
    counted = Counter(case.tokens) if mistake == "presence over the prompt too" else generated
    for token, count in counted.items():
        times = 1 if mistake == "frequency does not count" else count
        logits[token] -= np.float32(times) * np.float32(params.frequency_penalty)
        logits[token] -= np.float32(params.presence_penalty)
    return logits


def distribution(case: Case, mistake: str = "") -> list[float]:
    """Probability of each token at the temperature and after the filters of the case."""
    params = case.params
    logits = [float(logit) for logit in shaped(case, mistake)]
    temperature = 1.0 if mistake == "temperature after the filters" else params.temperature
    weights = softmax([logit / temperature for logit in logits])
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k + (mistake == "one more than k")]
    total = sum(weights if mistake == "top-p over all" else (weights[token] for token in ranked))
    kept, reached = [], 0.0
    for token in ranked:
        if reached >= params.top_p * total and params.top_p < 1:
            break
        kept.append(token)
        reached += weights[token]
    if mistake == "top-p stops short" and params.top_p < 1:
        kept = kept[:-1] or kept
    bound = params.min_p * (1 if mistake == "min-p is absolute" else weights[ranked[0]])
    kept = [token for token in kept if weights[token] >= bound] or kept[:1]
    if mistake == "temperature after the filters":
        weights = softmax([logit / params.temperature for logit in logits])
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def pick(probabilities: list[float], uniform: float) -> int:
    """The token at which the sum over ids passes the uniform number."""
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if reached > uniform:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)
