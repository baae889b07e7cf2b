"""The overlap schedule: figures against closed forms, policies against brute force and golden rows."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.errors import ConfigError
from baton.plan.overlap import (
    Groups,
    LayerTimes,
    bound,
    choose,
    completion_s,
    efficiency,
    exposed_s,
    measure,
    policy_names,
    why_whole,
)

Seconds = tuple[float, ...]


def whole_seconds(value: int) -> float:
    """Small whole numbers: they tie often and add up without rounding, so comparisons can be exact."""
    return float(value % 10)


def real_seconds(value: int) -> float:
    """Numbers with no short binary form, so that sums round."""
    return value / 255.0


def layers_of(values: list[float]) -> LayerTimes:
    """Compute times, as many transfer times, and the overhead last."""
    num_layers = len(values) // 2
    return LayerTimes(tuple(values[:num_layers]), tuple(values[num_layers:-1]), values[-1])


@st.composite
def layer_times(
    draw: st.DrawFn, num_layers_max: int, seconds: Callable[[int], float] = whole_seconds
) -> LayerTimes:
    num_values = 2 * draw(st.integers(1, num_layers_max)) + 1
    # One string of bytes is a single draw, far cheaper than a list of numbers.
    return layers_of([seconds(value) for value in draw(st.binary(min_size=num_values, max_size=num_values))])


@st.composite
def grouped_times(draw: st.DrawFn) -> tuple[LayerTimes, Groups]:
    times = draw(layer_times(24))
    cuts = draw(st.sets(st.integers(1, times.num_layers)))
    return times, cut_at(times.num_layers, tuple(sorted(cuts - {times.num_layers})))


def cut_at(num_layers: int, cuts: tuple[int, ...]) -> Groups:
    return tuple(zip((0, *cuts), (*cuts, num_layers), strict=True))


def every_grouping(num_layers: int) -> Iterator[Groups]:
    for num_cuts in range(num_layers):
        for cuts in combinations(range(1, num_layers), num_cuts):
            yield cut_at(num_layers, cuts)


def completion_by_events(times: LayerTimes, groups: Groups) -> float:
    """Said another way: from some group on, ready when its compute is, the link works without a pause."""
    return max(
        sum(times.compute_s[:stop]) + sum(times.transfer_s[start:]) + times.overhead_s * (len(groups) - index)
        for index, (start, stop) in enumerate(groups)
    )


def is_optimal(policy: Callable[[LayerTimes], Groups], times: LayerTimes) -> bool:
    """The checker: least completion of all cuts, and no smaller number of groups reaches it."""

    def rank(groups: Groups) -> tuple[float, int]:
        return completion_by_events(times, groups), len(groups)

    return rank(policy(times)) == min(map(rank, every_grouping(times.num_layers)))


def cost(times: LayerTimes) -> Groups:
    return choose("cost", times, 0)


def one_layer_groups(num_layers: int) -> Groups:
    return tuple((layer, layer + 1) for layer in range(num_layers))


def equal_layers(num_layers: int, compute_s: float, transfer_s: float, overhead_s: float) -> LayerTimes:
    return LayerTimes((compute_s,) * num_layers, (transfer_s,) * num_layers, overhead_s)


def test_figures_of_a_case_worked_by_hand() -> None:
    times = LayerTimes((2.0, 2.0, 2.0), (1.0, 4.0, 1.0), 0.5)
    # [0,2): ready at 4, 0.5 + 5 -> 9.5; [2,3): ready at 6, waits for 9.5, 0.5 + 1 -> 11.
    outcome = measure(times, ((0, 2), (2, 3)))
    assert (outcome.completion_s, outcome.exposed_s) == (11.0, 5.0)
    assert (outcome.compute_s, outcome.transfer_s) == (6.0, 6.0)
    assert outcome.efficiency == 1.0 - 5.0 / 6.0
    # One-layer groups, no overhead: 2 -> 3, 4 -> 8, 8 -> 9: exposed 3 of 6.
    assert outcome.bound == 0.5
    assert outcome.groups == ((0, 2), (2, 3))


@given(grouped_times())
def test_recursion_agrees_with_the_other_form_and_never_passes_the_bound(
    case: tuple[LayerTimes, Groups],
) -> None:
    times, groups = case
    assert completion_s(times, groups) == completion_by_events(times, groups)
    assert exposed_s(times, groups) == completion_s(times, groups) - sum(times.compute_s)
    assert bound(times) >= efficiency(times, groups)
    assert measure(times, groups).bound == bound(times)


@pytest.mark.parametrize("num_groups", [1, 2, 4, 8, 16])
def test_equal_groups_follow_the_closed_forms(num_groups: int) -> None:
    policy = f"fixed:{16 // num_groups}"
    short = equal_layers(16, 4.0, 1.0, 0.0)  # C = 64, T = 16
    assert completion_s(short, choose(policy, short, 0)) == 64.0 + 16.0 / num_groups
    long = equal_layers(16, 1.0, 4.0, 0.0)  # C = 16, T = 64
    assert completion_s(long, choose(policy, long, 0)) == 16.0 / num_groups + 64.0


@given(layer_times(24))
def test_bound_stays_below_one_where_transfer_exceeds_compute(times: LayerTimes) -> None:
    compute, transfer = sum(times.compute_s), sum(times.transfer_s)
    assume(transfer > compute)
    assert bound(times) <= compute / transfer + 1e-12 < 1.0


def test_bound_of_equal_layers_is_known_and_free_of_overhead() -> None:
    assert bound(equal_layers(16, 1.0, 4.0, 0.5)) == 1.0 - (64.0 + 1.0 - 16.0) / 64.0
    assert bound(equal_layers(8, 2.0, 1.0, 7.0)) == bound(equal_layers(8, 2.0, 1.0, 0.0)) == 1.0 - 1.0 / 8.0


def test_nothing_to_transfer_is_full_efficiency() -> None:
    outcome = measure(equal_layers(3, 1.0, 0.0, 0.25), one_layer_groups(3))
    assert (outcome.exposed_s, outcome.efficiency, outcome.bound) == (0.25, 1.0, 1.0)


def test_overhead_can_bring_efficiency_below_zero() -> None:
    assert efficiency(equal_layers(4, 0.0, 1.0, 1.0), one_layer_groups(4)) == -1.0


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        (((0, 1), (2, 4)), "hole"),
        (((1, 4),), "hole"),
        (((0, 2), (1, 4)), "overlaps"),
        (((0, 2), (2, 2), (2, 4)), "empty"),
        (((0, 2), (2, 1)), "empty"),
        (((0, 2), (2, 3)), "cover 4 layers"),
        (((0, 5),), "cover 4 layers"),
        ((), "cover 4 layers"),
    ],
)
@pytest.mark.parametrize("figure", [completion_s, exposed_s, efficiency, measure])
def test_bad_groups_raise(figure: Callable[[LayerTimes, Groups], object], groups: Groups, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        figure(equal_layers(4, 1.0, 1.0, 0.0), groups)


@pytest.mark.parametrize(
    ("compute", "transfer", "overhead", "fault"),
    [
        ((), (), 0.0, "no layers"),
        ((1.0,), (1.0, 1.0), 0.0, "1 compute times and 2 transfer times"),
        ((-1.0,), (1.0,), 0.0, "compute_s holds -1.0"),
        ((1.0,), (math.nan,), 0.0, "transfer_s holds nan"),
        ((math.inf,), (1.0,), 0.0, "compute_s holds inf"),
        ((1.0,), (1.0,), -0.5, "overhead_s holds -0.5"),
        ((1.0,), (1.0,), math.nan, "overhead_s holds nan"),
        ((1e308, 1e308), (1.0, 1.0), 0.0, "add up to inf"),
    ],
)
def test_bad_times_raise(compute: Seconds, transfer: Seconds, overhead: float, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        LayerTimes(compute, transfer, overhead)


@given(layer_times(7))
def test_cost_is_the_best_of_all_cuts(times: LayerTimes) -> None:
    assert is_optimal(cost, times)


@given(layer_times(6, real_seconds))
def test_cost_is_the_best_of_all_cuts_up_to_rounding(times: LayerTimes) -> None:
    least = min(completion_s(times, groups) for groups in every_grouping(times.num_layers))
    assert completion_s(times, cost(times)) <= least * (1.0 + 1e-11)


def greedy(times: LayerTimes) -> Groups:
    """Broken: sends whatever is ready whenever the link is free, blind to overhead and to the tail."""
    cuts: list[int] = []
    start, finish = 0, 0.0
    for stop in range(1, times.num_layers + 1):
        ready = sum(times.compute_s[:stop])
        if ready >= finish and stop < times.num_layers:
            finish = ready + times.overhead_s + sum(times.transfer_s[start:stop])
            cuts.append(stop)
            start = stop
    return cut_at(times.num_layers, tuple(cuts))


def best_equal(times: LayerTimes) -> Groups:
    """Broken: the best of the equal sizes only."""
    sizes = [choose(f"fixed:{size}", times, 0) for size in range(1, times.num_layers + 1)]
    return min(sizes, key=lambda groups: (completion_s(times, groups), len(groups)))


def ties_by_boundary(times: LayerTimes) -> Groups:
    """Broken: settles ties at each boundary, so an early finish that nobody needs costs a group."""
    best: list[tuple[float, int, Groups]] = [(0.0, 0, ())]
    for stop in range(1, times.num_layers + 1):
        beginning = LayerTimes(times.compute_s[:stop], times.transfer_s[:stop], times.overhead_s)
        options = [(*groups, (start, stop)) for start, (_, _, groups) in enumerate(best)]
        best.append(min((completion_s(beginning, groups), len(groups), groups) for groups in options))
    return best[-1][2]


@pytest.mark.parametrize("broken", [greedy, best_equal, ties_by_boundary])
def test_checker_catches_a_broken_cost(broken: Callable[[LayerTimes], Groups]) -> None:
    values = random.Random(0).choices(range(10), k=300 * 13)
    cases = [layers_of(list(map(float, values[at : at + 13]))) for at in range(0, len(values), 13)]
    assert all(is_optimal(cost, times) for times in cases)
    assert not all(is_optimal(broken, times) for times in cases)


@pytest.mark.parametrize(
    ("transfer_s", "overhead_s", "sizes"),
    [
        (0.25, 2.0, [6, 4, 3, 3]),  # compute hides most: a short last group leaves a short tail
        (2.0, 0.125, [1, 1, 2, 4, 8]),  # the link is the limit: a short first group starts it early
    ],
)
def test_unequal_groups_beat_every_equal_size(transfer_s: float, overhead_s: float, sizes: list[int]) -> None:
    times = equal_layers(16, 1.0, transfer_s, overhead_s)
    assert [stop - start for start, stop in cost(times)] == sizes
    assert completion_s(times, cost(times)) < completion_s(times, best_equal(times))


@given(layer_times(24), st.integers(0, 20_000), st.integers(1, 50))
def test_cost_is_never_worse_than_another_policy(times: LayerTimes, num_tokens: int, size: int) -> None:
    least = completion_s(times, cost(times))
    for policy in ("adaptive", f"fixed:{size}", "off"):
        assert least <= completion_s(times, choose(policy, times, num_tokens))


@given(layer_times(24, real_seconds))
def test_huge_overhead_leaves_one_group(times: LayerTimes) -> None:
    dear = LayerTimes(times.compute_s, times.transfer_s, 1e6)
    assert cost(dear) == ((0, times.num_layers),)


@given(layer_times(24))
def test_no_overhead_is_as_good_as_one_layer_groups(times: LayerTimes) -> None:
    free = LayerTimes(times.compute_s, times.transfer_s, 0.0)
    assert completion_s(free, cost(free)) == completion_s(free, one_layer_groups(times.num_layers))
    assert efficiency(free, cost(free)) == bound(free)


def test_rounding_does_not_buy_groups() -> None:
    # No compute: every grouping without overhead takes T, up to the order in which tenths are added.
    assert cost(equal_layers(100, 0.0, 0.1, 0.0)) == ((0, 100),)


def test_cost_stops_where_more_groups_cannot_be_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes about a millisecond because it does not try every number of groups."""
    num_tried = 0
    maximum = np.maximum

    def counted(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        nonlocal num_tried
        num_tried += 1
        return maximum(left, right)

    monkeypatch.setattr(np, "maximum", counted)
    assert len(cost(equal_layers(128, 1.0, 0.5, 8.0))) == 8
    assert num_tried == 9


@pytest.mark.parametrize(
    ("num_layers", "num_tokens", "size"),
    [
        (80, 3072, 8),
        (80, 6144, 11),  # n = 7
        (80, 9216, 20),
        (80, 1_000_000, 20),
        (90, 3686, 9),  # n = 9.4..; rounded or cut to 9 it would give 10
        (80, 6000, 11),  # n = 7.1..; raised to 8 it would give 10
        (32, 3072, 3),
        (5, 3072, 1),  # floor gives 0
        (80, 3071, 80),
        (80, 0, 80),
        (4, 9216, 4),
        (1, 9216, 1),
    ],
)
def test_adaptive_golden_rows(num_layers: int, num_tokens: int, size: int) -> None:
    groups = choose("adaptive", equal_layers(num_layers, 1.0, 1.0, 0.0), num_tokens)
    assert groups[0] == (0, size)


def test_adaptive_makes_more_groups_than_n_where_it_does_not_divide() -> None:
    groups = choose("adaptive", equal_layers(32, 1.0, 1.0, 0.0), 3072)
    assert len(groups) == 11
    assert groups[0] == (0, 3)
    assert groups[-1] == (30, 32)


def test_adaptive_below_its_threshold_is_off() -> None:
    times = equal_layers(80, 1.0, 1.0, 0.0)
    assert choose("adaptive", times, 3071) == choose("off", times, 3071) == ((0, 80),)


@pytest.mark.parametrize(
    ("option", "num_tokens", "size"),
    [
        ("min_tokens=1024", 1024, 8),
        ("min_tokens=1024", 3072, 20),
        ("min_tokens=1024,saturation=5", 3072, 11),  # half way: n = 7
        ("max_iters=20", 3072, 4),
        ("max_iters=20,min_iters=2", 9216, 40),
        ("min_iters=1", 9216, 80),
        ("min_tokens=3072,max_iters=10,min_iters=4,saturation=3", 6144, 11),
    ],
)
def test_adaptive_settings(option: str, num_tokens: int, size: int) -> None:
    groups = choose(f"adaptive:{option}", equal_layers(80, 1.0, 1.0, 0.0), num_tokens)
    assert groups[0] == (0, size)


@pytest.mark.parametrize(
    ("policy", "num_layers", "num_tokens", "reason"),
    [
        ("adaptive", 80, 3071, "a prompt of 3071 tokens is shorter than min_tokens, 3072"),
        ("adaptive:min_tokens=64", 80, 63, "a prompt of 63 tokens is shorter than min_tokens, 64"),
        ("adaptive", 4, 9216, "4 layers are not split"),
        ("adaptive:min_iters=1", 80, 9216, "ask for one group"),
        ("fixed:8", 6, 64, "a group has 8 layers, and there are 6"),
        ("cost", 6, 64, "one group finishes first"),
        ("off", 6, 64, "layers are not grouped"),
        ("cost", 1, 64, "there is one layer"),
    ],
)
def test_why_layers_are_left_in_one_group(policy: str, num_layers: int, num_tokens: int, reason: str) -> None:
    assert len(choose(policy, equal_layers(num_layers, 0.0, 0.0, 1.0), num_tokens)) == 1
    assert reason in why_whole(policy, num_layers, num_tokens)


def test_adaptive_refuses_a_negative_length() -> None:
    with pytest.raises(ConfigError, match="give no negative token count"):
        choose("adaptive", equal_layers(80, 1.0, 1.0, 0.0), -1)


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ("fixed:1", one_layer_groups(5)),
        ("fixed:2", ((0, 2), (2, 4), (4, 5))),
        ("fixed:5", ((0, 5),)),
        ("fixed:10", ((0, 5),)),
        ("off", ((0, 5),)),
    ],
)
def test_fixed_and_off(policy: str, groups: Groups) -> None:
    assert choose(policy, equal_layers(5, 1.0, 1.0, 0.0), 4096) == groups


def test_policies_are_found_by_module_name() -> None:
    assert policy_names() == ("adaptive", "cost", "fixed", "off")


BAD_SIZES = ("0", "02", "", "-1", "+1", " 1", "1\n", "1.5", "N", "\u0663", "9" * 5000, "2:3")
BAD_NAMES = ("fast", "", ":3", "Cost", " cost", "cost ", "base", "__init__", "os.path")


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [
        ("fixed", "write for example 'fixed:8'"),
        *((f"fixed:{size}", "write for example 'fixed:8'") for size in BAD_SIZES),
        *((name, "write one of adaptive, cost, fixed:N, off") for name in BAD_NAMES),
        ("cost:3", "write 'cost'"),
        ("cost:", "write 'cost'"),
        ("adaptive:8", "set min_tokens, max_iters, min_iters, saturation once each"),
        ("adaptive:", "set min_tokens"),
        ("adaptive:min_tokens=8,min_tokens=9", "'min_tokens' is given twice"),
        ("adaptive:min_tokens", "min_tokens is ''; give a whole number"),
        ("adaptive:max_iters=0", "max_iters is '0'; give a whole number"),
        ("adaptive:saturation=1", "saturation is 1; give at least 1.01"),
        ("adaptive:saturation=nan", "saturation is 'nan'; give a number"),
        ("adaptive:max_iters=2,min_iters=3", "min_iters is 3; give at most max_iters, 2"),
        ("off:1", "write 'off'"),
    ],
)
def test_bad_policy_text_names_the_value_and_the_remedy(policy: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(policy, equal_layers(5, 1.0, 1.0, 0.0), 4096)
    assert f"'{policy}'" in str(caught.value)
    assert remedy in str(caught.value)
