"""The chunked forms of recurrences are their steps one after the other, only sooner."""

from collections.abc import Callable
from time import thread_time

import pytest
import torch
from tests.engine.model.test_broken import SEEN
from torch import Tensor
from torch.nn.functional import normalize

from baton.engine.models import delta_rule, recurrence, selective_scan
from baton.engine.models.recurrence import Convolution

NUM_TIMES = 5
"""What a chunked form has to be faster by, at 512 tokens."""


class Delta:
    """A gated delta rule on random tokens; decays reach from none to almost all."""

    def __init__(self, n: int, num_tokens: int, num_heads: int, dim: int) -> None:
        drawn = torch.Generator().manual_seed(num_tokens)
        shape = (n, num_tokens, num_heads)
        q, k = (normalize(torch.randn(*shape, dim, generator=drawn), dim=-1) for _ in "qk")
        v = torch.randn(*shape, dim + 1, generator=drawn)
        log_decay = -(5 ** (3 * torch.randn(*shape, 1, generator=drawn)))
        strength = torch.rand(*shape, 1, generator=drawn)
        self.tokens = delta_rule.DeltaTokens(q, k, v, log_decay, strength)
        self.state = torch.randn(n, num_heads, dim, dim + 1, generator=drawn)

    def advance(self, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule.advance(delta_rule.DeltaTokens(*tokens), state)


class Selective:
    """The same for a selective state space of two groups."""

    def __init__(self, n: int, num_tokens: int, num_heads: int, dim: int) -> None:
        drawn = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(n, num_tokens, num_heads, dim, generator=drawn)
        into, out_of = (torch.randn(n, num_tokens, 2, dim + 1, generator=drawn) for _ in "BC")
        log_decay = -(5 ** (3 * torch.randn(n, num_tokens, num_heads, 1, generator=drawn)))
        self.tokens = selective_scan.ScanTokens(x, log_decay, into, out_of)
        self.state = torch.randn(n, num_heads, dim, dim + 1, generator=drawn)
        self.of_head = torch.arange(num_heads) * 2 // num_heads

    def advance(self, tokens: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan.advance(selective_scan.ScanTokens(*tokens), self.of_head, state)


KINDS = (Delta, Selective)


def by_token(case: Delta | Selective) -> tuple[Tensor, Tensor]:
    """One token after the other."""
    outs, state = [], case.state
    for i in range(case.tokens[0].shape[1]):
        out, state = case.advance(tuple(each[:, i : i + 1] for each in case.tokens), state)
        outs.append(out)
    return torch.cat(outs, dim=1), state


def off(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The largest difference, as a share of the largest number."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "num_tokens", [1, 2, recurrence.CHUNK - 1, recurrence.CHUNK, recurrence.CHUNK + 1, 200]
)
def test_chunked_is_token_by_token(kind: type[Delta] | type[Selective], num_tokens: int) -> None:
    case = kind(2, num_tokens, 4, 9)
    found = case.advance(case.tokens, case.state)
    assert found[0].shape[:3] == (2, num_tokens, 4)
    assert off(found, by_token(case)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_sequence_follow_each_other(kind: type[Delta] | type[Selective]) -> None:
    case = kind(1, 150, 4, 9)
    outs, state = [], case.state
    for part in (slice(0, 1), slice(1, 3), slice(3, 149), slice(149, 150)):
        out, state = case.advance(tuple(each[:, part] for each in case.tokens), state)
        outs.append(out)
    assert off((torch.cat(outs, 1), state), by_token(case)) < 1e-5


def test_a_chunk_that_forgets_its_own_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, kind in ((delta_rule, Delta), (selective_scan, Selective)):
        case = kind(1, 30, 4, 9)
        monkeypatch.setattr(module, "fading", lambda reach: recurrence.fading(reach).tril(-1))
        assert off(case.advance(case.tokens, case.state), by_token(case)) > SEEN


def test_a_convolution_reaches_back_over_chunks() -> None:
    weight, x = torch.randn(5, 4), torch.randn(2, 20, 5)
    convolution = Convolution(weight, torch.randn(5), "silu")
    wide = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.mT, (3, 0)), weight.unsqueeze(1), convolution.bias, groups=5
    )
    outs, state = [], torch.zeros(2, 5, 3)
    for part in (slice(0, 1), slice(1, 3), slice(3, 9), slice(9, 20)):
        out, state = convolution.advance(x[:, part], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), torch.nn.functional.silu(wide).mT)
    torch.testing.assert_close(state, x[:, -3:].mT)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_chunked_is_faster(kind: type[Delta] | type[Selective]) -> None:
    """The best of several runs of each, in turn, in time of this thread, whatever else the machine does."""
    case = kind(1, 512, 8, 128)
    loop_s, chunked_s = [], []
    with torch.inference_mode():
        for _ in range(2):
            loop_s.append(timed_s(lambda: by_token(case)))
            chunked_s += [timed_s(lambda: case.advance(case.tokens, case.state)) for _ in range(4)]
    assert min(chunked_s) * NUM_TIMES < min(loop_s), f"{min(chunked_s):.4f} s, token loop {min(loop_s):.4f} s"


def timed_s(run: Callable[[], object]) -> float:
    start_s = thread_time()
    run()
    return thread_time() - start_s
