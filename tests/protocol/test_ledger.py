"""The ledger beside a naive one that keeps a set of cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, find, given, settings
from tests.protocol.choices import Choices, choices

from baton.errors import RemoteProtocolError
from baton.protocol.ledger import Ledger, Need, Pair, Rectangle
from baton.protocol.machine import replace

NUM_LAYERS = 5
TOKENS_MAX = 7
PAIRS: tuple[Pair, ...] = ((0, 0), (0, 1), (2, 0))
Enter = Callable[[Ledger, Pair, Rectangle], Ledger]


@dataclass
class Cells:
    """What landed, cell by cell."""

    num_tokens: int
    needed: dict[Pair, set[tuple[int, int]]]
    landed: dict[Pair, set[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def empty(num_tokens: int, needs: dict[Pair, tuple[Need, ...]]) -> Cells:
        needed = {
            pair: {
                (layer, token)
                for need in found
                for layer in range(*need.layers)
                for token in range(need.start, num_tokens)
            }
            for pair, found in needs.items()
        }
        return Cells(num_tokens, needed)

    def enter(self, pair: Pair, chunk: Rectangle) -> bool:
        """Whether the chunk is welcome; entered if so."""
        cells = {(layer, token) for layer in range(*chunk.layers) for token in range(*chunk.tokens)}
        before = self.landed.setdefault(pair, set())
        wanted = cells & self.needed.get(pair, set())
        if not cells or chunk.tokens[0] < 0 or chunk.tokens[1] > self.num_tokens or wanted & before:
            return False
        before |= wanted
        return True

    def missing(self) -> dict[Pair, int]:
        found = {pair: len(cells - self.landed.get(pair, set())) for pair, cells in self.needed.items()}
        return {pair: count for pair, count in found.items() if count}


@dataclass(frozen=True)
class Scenario:
    """A prompt, what is needed of it, and the chunks that come, in order."""

    num_tokens: int
    needs: dict[Pair, tuple[Need, ...]]
    entries: tuple[tuple[Pair, Rectangle], ...]


def needs(choices: Choices, num_tokens: int) -> tuple[Need, ...]:
    """Runs of layers, each with a start of its own; it may lie at or behind the prompt's end."""
    cuts = sorted({choices.between(0, NUM_LAYERS) for _ in range(4)})
    found = [Need(layers, choices.between(0, num_tokens + 2)) for layers in itertools.pairwise(cuts)]
    return tuple(choices.some(found))


def cutting(choices: Choices, box: Rectangle) -> list[Rectangle]:
    """A rectangle cut into rectangles, again and again."""
    found = [box]
    for _ in range(choices.between(0, 5)):
        one = found.pop(choices.below(len(found)))
        if choices.one_in(2):
            at = choices.between(*one.layers)
            halves = (replace(one, layers=(one.layers[0], at)), replace(one, layers=(at, one.layers[1])))
        else:
            at = choices.between(*one.tokens)
            halves = (replace(one, tokens=(one.tokens[0], at)), replace(one, tokens=(at, one.tokens[1])))
        found += [half for half in halves if half.area]
    return found


def strange(choices: Choices, num_tokens: int) -> Rectangle:
    """Perhaps empty, perhaps outside of the prompt."""
    layers = sorted(choices.between(-2, NUM_LAYERS + 2) for _ in range(2))
    tokens = sorted(choices.between(-2, num_tokens + 2) for _ in range(2))
    return Rectangle((layers[0], layers[1]), (tokens[0], tokens[1]))


def scenario_of(choices: Choices) -> Scenario:
    """The whole prompt cut up for every pair, in any order, with what does not belong strewn in."""
    num_tokens = choices.between(1, TOKENS_MAX)
    whole = Rectangle((0, NUM_LAYERS), (0, num_tokens))
    wanted = {pair: needs(choices, num_tokens) for pair in choices.some(PAIRS)}
    entries = [(pair, chunk) for pair in PAIRS for chunk in cutting(choices, whole)]
    for _ in range(choices.pick((0, 0, 1, 3))):
        other = (choices.pick(PAIRS), strange(choices, num_tokens))
        entries.append(choices.pick((choices.pick(entries), other)))
    entries = choices.shuffled(entries)
    return Scenario(num_tokens, wanted, tuple(entries[choices.pick((0, 0, 1, 2)) :]))


SCENARIOS = choices(100).map(scenario_of)


def disagreement(scenario: Scenario, enter: Enter = Ledger.entered) -> str:
    """Where the ledger and the cells say different things, in words; empty if nowhere."""
    ledger = Ledger.empty(scenario.num_tokens, scenario.needs)
    cells = Cells.empty(scenario.num_tokens, scenario.needs)
    for pair, chunk in scenario.entries:
        before, kept = ledger, dict(ledger.missing)
        is_welcome = cells.enter(pair, chunk)
        try:
            ledger = enter(ledger, pair, chunk)
        except RemoteProtocolError:
            if is_welcome:
                return f"{chunk} was turned away"
        else:
            if not is_welcome:
                return f"{chunk} was let in"
        if dict(before.missing) != kept:
            return "the ledger before was altered"
        if dict(ledger.missing) != cells.missing():
            return f"missing: {ledger.missing}, cells {cells.missing()}"
        if ledger.is_full != (not cells.missing()):
            return "fullness"
        lacks = tuple(sorted(one for one in cells.missing() if one[0] == 0))
        if ledger.lacks(0) != lacks:
            return f"lacks {ledger.lacks(0)}, cells {lacks}"
    return ""


@given(SCENARIOS)
def test_the_ledger_knows_what_the_cells_know(scenario: Scenario):
    assert disagreement(scenario) == ""


@given(choices(40))
def test_a_prompt_cut_up_and_sent_once_fills_the_ledger_with_its_last_chunk(found: Choices):
    num_tokens = found.between(1, TOKENS_MAX)
    chunks = found.shuffled(cutting(found, Rectangle((0, NUM_LAYERS), (0, num_tokens))))
    ledger = Ledger.empty(num_tokens, {(0, 0): (Need((0, NUM_LAYERS), 0),)})
    for chunk in chunks:
        assert not ledger.is_full
        ledger = ledger.entered((0, 0), chunk)
    assert ledger.is_full


def _count_alone(ledger: Ledger, pair: Pair, chunk: Rectangle) -> Ledger:
    """Admits by the number of cells: what comes twice makes up for what is missing."""
    whole = Ledger.empty(ledger.num_tokens, ledger.needs)
    num_cells = whole.missing.get(pair, 0) - whole.entered(pair, chunk).missing.get(pair, 0)
    missing = {**ledger.missing, pair: max(0, ledger.missing.get(pair, 0) - num_cells)}
    return replace(ledger, missing={one: count for one, count in missing.items() if count})


def _trust_the_bounds(ledger: Ledger, pair: Pair, chunk: Rectangle) -> Ledger:
    inside = chunk.common(Rectangle((0, NUM_LAYERS), (0, ledger.num_tokens)))
    return ledger if inside is None else ledger.entered(pair, inside)


def _forget_the_pair(ledger: Ledger, pair: Pair, chunk: Rectangle) -> Ledger:
    return ledger.entered((0, 0), chunk)


def _ignore_repeats(ledger: Ledger, pair: Pair, chunk: Rectangle) -> Ledger:
    try:
        return ledger.entered(pair, chunk)
    except RemoteProtocolError:
        return ledger


@pytest.mark.parametrize("broken", [_count_alone, _trust_the_bounds, _forget_the_pair, _ignore_repeats])
def test_a_ledger_that_is_wrong_is_caught(broken: Enter):
    search = settings(max_examples=3000, database=None, phases=[Phase.generate])
    find(SCENARIOS, lambda scenario: disagreement(scenario, broken) != "", settings=search)


@pytest.mark.parametrize("is_by_layer", [True, False])
def test_chunks_in_order_leave_few_rectangles(is_by_layer: bool):
    """Prefill by prefill chunk, layer by layer; or layer by layer over the whole prompt."""
    places = [(layer, token) for token in range(20) for layer in range(30)]
    if not is_by_layer:
        places.sort()
    ledger = Ledger.empty(20, {(0, 0): (Need((0, 30), 0),)})
    for layer, token in places:
        ledger = ledger.entered((0, 0), Rectangle((layer, layer + 1), (token, token + 1)))
        assert len(ledger.landed[0, 0]) <= 2
        assert ledger.missing.get((0, 0), 0) == 600 - sum(box.area for box in ledger.landed[0, 0])
    assert ledger.is_full
    assert ledger.landed == {(0, 0): (Rectangle((0, 30), (0, 20)),)}


def test_a_ledger_that_needs_nothing_is_full_from_the_start():
    for wanted in ({}, {(0, 0): ()}, {(0, 0): (Need((0, 4), 8), Need((4, 5), 8))}):
        assert Ledger.empty(8, wanted).is_full
        assert Ledger.empty(8, wanted).entered((0, 0), Rectangle((0, 5), (0, 8))).is_full


def test_a_need_behind_the_end_does_not_make_up_for_another():
    ledger = Ledger.empty(4, {(0, 0): (Need((0, 1), 0), Need((1, 2), 8))})
    assert not ledger.is_full
    assert ledger.entered((0, 0), Rectangle((0, 2), (0, 4))).is_full


def test_state_alone_is_the_last_token_of_its_layers():
    ledger = Ledger.empty(8, {(0, 0): (Need((1, 3), 7),)})
    ledger = ledger.entered((0, 0), Rectangle((0, 4), (0, 7)))
    assert dict(ledger.missing) == {(0, 0): 2}
    ledger = ledger.entered((0, 0), Rectangle((0, 2), (7, 8)))
    assert dict(ledger.missing) == {(0, 0): 1}
    assert ledger.entered((0, 0), Rectangle((2, 4), (7, 8))).is_full


def test_a_refusal_names_the_place():
    ledger = Ledger.empty(8, {(0, 1): (Need((0, 4), 0),)}).entered((0, 1), Rectangle((0, 4), (0, 4)))
    with pytest.raises(
        RemoteProtocolError, match=r"ranks \(0, 1\): layers \(1, 2\) x tokens \(3, 5\) came twice"
    ):
        ledger.entered((0, 1), Rectangle((1, 2), (3, 5)))
    with pytest.raises(RemoteProtocolError, match=r"chunk \(0, 4\) x \(4, 9\) is not of this prompt"):
        ledger.entered((0, 1), Rectangle((0, 4), (4, 9)))
