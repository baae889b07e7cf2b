"""What a rank measures of its link, and what `cost` makes of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from time import thread_time

import pytest

from baton.engine.rank.cutting import Cuts
from baton.engine.rank.pace import Pace, Took
from baton.engine.rank.pipeline import Forward
from baton.engine.steps import CopyRecord
from baton.plan.overlap import Groups, LayerTimes, bound, choose, completion_s

NUM_LAYERS = 32


def cut(policy: str, times: LayerTimes, avg_tokens: int, spread: float = 0.0) -> Groups:
    """The groups of one step, of which no more is known than how far compute may be off."""
    return Cuts().of(policy, times, avg_tokens, Took(times.compute_s[-1], 0.0, spread))


def hand_over(pace: Pace, sizes: list[int], *, overhead_s: float, byte_s: float, layer_s: float) -> None:
    """Groups of so many layers of 1 MB each over a link; a group is submitted early and begins when ready."""
    copies, ready, free_s, at = [], {}, 0.0, 0
    for chunk, size in enumerate(sizes):
        at += size
        ready[chunk] = 100.0 + at * layer_s
        start_s = max(free_s, ready[chunk])
        free_s = start_s + overhead_s + size * 1e6 * byte_s
        copies.append(CopyRecord(0, chunk, size * 10**6, ready[chunk], free_s))
    pace.sent(1, copies, ready)
    pace.computed(4096, Took(layer_s, 0.6 * layer_s))


@pytest.mark.parametrize("overhead_s", [1e-4, 2e-3])
@pytest.mark.parametrize("byte_s", [4e-11, 2e-10, 1e-9])
def test_overhead_and_speed_are_found_where_groups_differ(overhead_s: float, byte_s: float) -> None:
    pace = Pace()
    for sizes in ([16, 8, 4, 2, 1, 1], [20, 10, 2], [12, 12, 6, 2]):
        hand_over(pace, sizes, overhead_s=overhead_s, byte_s=byte_s, layer_s=1e-3)
    found_overhead_s, found_byte_s = pace.link(1)
    assert found_overhead_s == pytest.approx(overhead_s, rel=0.15)
    assert found_byte_s == pytest.approx(byte_s, rel=0.1)


def test_groups_of_one_size_leave_the_overhead_to_a_guess_that_is_small() -> None:
    pace = Pace()
    hand_over(pace, [1] * NUM_LAYERS, overhead_s=0.0, byte_s=1e-9, layer_s=1e-3)
    overhead_s, byte_s = pace.link(1)
    assert 0 < overhead_s <= 1e-4 + 1e-9
    assert overhead_s + 1e6 * byte_s == pytest.approx(1e-3)


def test_a_slower_link_is_believed() -> None:
    pace = Pace()
    for _ in range(20):
        hand_over(pace, [20, 8, 4], overhead_s=1e-4, byte_s=1e-10, layer_s=1e-3)
    for _ in range(8):
        hand_over(pace, [20, 8, 4], overhead_s=1e-4, byte_s=1e-9, layer_s=1e-3)
    assert pace.link(1)[1] == pytest.approx(1e-9, rel=0.1)


def test_a_machine_that_stood_still_once_is_no_slow_link() -> None:
    pace = Pace()
    for _ in range(6):
        hand_over(pace, [4, 2, 8, 8, 6, 4], overhead_s=1e-4, byte_s=1e-9, layer_s=1e-3)
    before_s, byte_s = pace.link(1)
    sizes = [4, 2, 8, 8, 6, 4]
    at, copies, ready = 100.0, [], {}
    for chunk, size in enumerate(sizes):
        ready[chunk] = 100.0
        at += 1e-4 + size * 1e6 * byte_s + (0.2 if chunk == 2 else 0.0)
        copies.append(CopyRecord(0, chunk, size * 10**6, 100.0, at))
    pace.sent(1, copies, ready)
    assert pace.link(1)[0] < before_s + 1e-3
    assert pace.link(1)[1] < 2 * byte_s


def test_a_slow_first_time_is_forgotten() -> None:
    """The first step loads kernels, the first copy maps memory."""
    pace = Pace()
    pace.computed(4096, Took(1.0, 0.0))
    hand_over(pace, [32], overhead_s=0.2, byte_s=1e-7, layer_s=1e-3)
    for _ in range(4):
        hand_over(pace, [20, 8, 4], overhead_s=1e-4, byte_s=1e-9, layer_s=1e-3)
    assert pace.compute(4096).layer_s == pytest.approx(1e-3, rel=0.4)
    assert pace.link(1)[1] == pytest.approx(1e-9, rel=0.1)


def test_the_least_time_of_a_layer_is_that_of_steps_which_nothing_held_up() -> None:
    pace = Pace()
    for layer_s in (3e-3, 1e-3, 2e-3, 1.5e-3, 4e-3):
        pace.computed(1024, Took(layer_s, 0.0))
    assert 1e-3 <= pace.compute(1024).least_s < 1.3e-3
    for _ in range(100):
        pace.computed(1024, Took(2e-3, 0.0))
    assert pace.compute(1024).least_s == pytest.approx(2e-3, rel=0.02), (
        "a machine that got slower is believed"
    )


def test_nothing_is_cut_that_could_not_leave_sooner() -> None:
    layer_s, lead = 1e-3, 12
    times = LayerTimes((layer_s,) * NUM_LAYERS, (0.42 * layer_s,) * NUM_LAYERS, 0.1 * layer_s)
    groups = Cuts().of("cost", times, 0, Took(layer_s, 0.0, group_s=0.0, lead_s=lead * layer_s))
    assert groups[0][1] >= lead - 1
    assert groups[-1][1] - groups[-1][0] == 1
    assert Cuts().of("cost", times, 0, Took(layer_s, 0.0, group_s=0.0))[0][1] < lead


def test_what_waited_for_a_grant_says_nothing_of_the_link() -> None:
    pace = Pace()
    copies = [
        CopyRecord(0, chunk, 10**6 * (4 - chunk), 105.0, 105.0 + 0.1 * (chunk + 1)) for chunk in range(3)
    ]
    pace.sent(1, copies, {0: 100.0, 1: 101.0, 2: 102.0})
    overhead_s, byte_s = pace.link(1)
    assert overhead_s + 3e6 * byte_s == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("latency_s", [0.0, 3e-3])
def test_what_groups_take_to_set_out_is_no_overhead_where_others_queue(latency_s: float) -> None:
    """Groups that find the link idle take a latency longer, which others hide behind the one before."""
    pace, overhead_s, byte_s = Pace(), 2e-4, 1e-9
    for sizes in ([8, 1, 1, 4, 2, 1, 1, 10, 4], [1, 2, 3, 4, 5, 6, 7], [4] * 8):
        copies, ready, free_s, at = [], {}, 0.0, 0
        for chunk, size in enumerate(sizes):
            at += size
            ready[chunk] = 100.0 + at * 1e-3
            start_s = max(free_s, ready[chunk] + latency_s)
            free_s = start_s + overhead_s + size * 1e6 * byte_s
            copies.append(CopyRecord(0, chunk, size * 10**6, ready[chunk] + latency_s, free_s))
        pace.sent(1, copies, ready)
    assert pace.link(1)[0] < 4e-4
    assert pace.link(1)[1] == pytest.approx(byte_s, rel=0.15)


def test_a_new_session_is_taken_for_the_one_before() -> None:
    pace = Pace()
    hand_over(pace, [20, 8, 4], overhead_s=1e-4, byte_s=1e-9, layer_s=1e-3)
    assert pace.link(7) == pace.link(1)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0])
def test_cost_comes_close_to_the_best_cut_after_a_few_hand_overs(ratio: float) -> None:
    """Measured with noise, judged without: what the cut would really take."""
    rng, layer_s, overhead_s = random.Random(3), 1e-3, 4e-4
    byte_s = ratio * layer_s / 1e6
    truth = Pace()
    for sizes in ([16, 8, 4, 2, 1, 1], [20, 10, 2]):
        hand_over(truth, sizes, overhead_s=overhead_s, byte_s=byte_s, layer_s=layer_s)
    best = completion_s(real := truth.times(NUM_LAYERS, 4096, {1: 10**6}), choose("cost", real, 4096))
    pace = Pace()
    for _ in range(4):
        groups = cut("cost", pace.times(NUM_LAYERS, 4096, {1: 10**6}), 4096)
        sizes = [stop - start for start, stop in groups]
        noise = 1 + 0.1 * rng.random()
        hand_over(pace, sizes, overhead_s=overhead_s * noise, byte_s=byte_s * noise, layer_s=layer_s / noise)
    chosen = cut("cost", pace.times(NUM_LAYERS, 4096, {1: 10**6}), 4096)
    assert completion_s(real, chosen) <= best * 1.06
    assert all(a[1] == b[0] for a, b in pairwise(chosen))


def test_a_layer_can_leave_before_its_rest_is_computed() -> None:
    pace = Pace()
    pace.computed(512, Took(2e-3, 1.2e-3))
    times = pace.times(4, 512, {})
    assert times.compute_s == pytest.approx((0.8e-3, 2e-3, 2e-3, 2e-3))


@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.2, 2.0])
@pytest.mark.parametrize(
    ("speed", "spread"), [(0.93, 0.07), (1.0, 0.07), (1.07, 0.07), (0.5, 0.5), (1.0, 0.5), (1.5, 0.5)]
)
def test_cuts_hold_where_compute_is_not_as_predicted(ratio: float, speed: float, spread: float) -> None:
    overhead_s = 0.02

    def world(layer_s: float) -> LayerTimes:
        return LayerTimes((layer_s,) * NUM_LAYERS, (ratio,) * NUM_LAYERS, overhead_s)

    chosen, real = cut("cost", world(1.0), 4096, spread), world(speed)
    exposed = completion_s(real, chosen) - speed * NUM_LAYERS
    assert 1 - exposed / (ratio * NUM_LAYERS) >= (0.95 if spread < 0.1 else 0.85) * bound(real)


TOOK = Took(1.0, 0.0, 0.0)


def layer_times(ratio: float, overhead: float = 0.1) -> LayerTimes:
    return LayerTimes((0.5, *(1.0,) * (NUM_LAYERS - 1)), (ratio,) * NUM_LAYERS, overhead)


def test_steps_nearly_alike_share_a_cut_and_others_do_not() -> None:
    cuts, rng = Cuts(), random.Random(0)
    first = cuts.of("cost", layer_times(1.0), 0, TOOK)
    for _ in range(50):
        near = layer_times(rng.uniform(0.97, 1.03), rng.uniform(0.08, 0.12))
        assert cuts.of("cost", near, 0, TOOK) is first
        # Good enough for them too: within a few percent of the best there is.
        assert completion_s(near, first) <= 1.03 * completion_s(near, choose("cost", near, 0))
    for ratio in (0.25, 0.5, 2.0, 4.0):
        far = layer_times(ratio)
        assert cuts.of("cost", far, 0, TOOK) == cut("cost", far, 0) != first
    assert cuts.of("cost", layer_times(1.0), 0, TOOK) is first
    assert cuts.of("fixed:4", layer_times(1.0), 0, TOOK) == choose("fixed:4", layer_times(1.0), 0)


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.65])
def test_groups_that_hold_the_forward_up_are_few(ratio: float) -> None:
    times = layer_times(ratio, 0.5)

    def done_s(groups: Groups, group: float) -> float:
        lasts = {stop - 1 for _, stop in groups}
        slowed = tuple(each + group * (layer in lasts) for layer, each in enumerate(times.compute_s))
        return completion_s(replace(times, compute_s=slowed), groups)

    free = Cuts().of("cost", times, 0, replace(TOOK, group_s=0.0))
    dear = Cuts().of("cost", times, 0, replace(TOOK, group_s=1.0))
    assert len(dear) < len(free)
    # Each is the better one where its price holds.
    assert done_s(dear, 1.0) < done_s(free, 1.0)
    assert done_s(free, 0.0) <= done_s(dear, 0.0)


def test_groups_take_from_a_forward_that_the_host_holds_up_what_other_threads_took() -> None:
    ended = Forward(1024, launched_s=10.0, others_s=0.032)
    assert ended.group_s(late_s=10.5, num_groups=32) == 0.0, "the device was behind: nothing was held up"
    assert ended.group_s(late_s=9.5, num_groups=32) == pytest.approx(1e-3)


def test_a_forward_counts_the_processor_time_of_other_threads_alone() -> None:
    def burn(seconds: float) -> None:
        limit_s = thread_time() + seconds
        while thread_time() < limit_s:
            pass

    forward = Forward.of(8)
    other = Thread(target=burn, args=(0.2,))
    other.start()
    burn(1.0)
    other.join()
    forward.end()
    assert forward.launched_s > forward.begun_s
    assert 0.2 <= forward.others_s < 0.7, "not what this thread took"


def test_what_groups_take_from_the_forward_is_remembered_by_the_length_of_a_step() -> None:
    pace = Pace()
    assert pace.compute(1024).group_s is None
    for _ in range(8):
        pace.computed(1024, Took(1e-3, 0.0, group_s=7e-4))
        pace.computed(1024, Took(1e-3, 0.0))  # nothing left in it: nothing to learn
        pace.computed(4096, Took(3e-3, 0.0, group_s=0.0))
    assert pace.compute(1024).group_s == pytest.approx(7e-4)
    assert pace.compute(4096).group_s == 0.0


def test_other_policies_are_cut_as_they_say() -> None:
    times = LayerTimes((1.0,) * NUM_LAYERS, (1.0,) * NUM_LAYERS, 0.1)
    for policy in ("fixed:5", "adaptive", "off"):
        assert cut(policy, times, 8192) == choose(policy, times, 8192)


def test_steps_that_differ_from_one_another_spread_what_is_expected() -> None:
    pace = Pace()
    for _ in range(12):
        pace.computed(512, Took(2e-3, 1e-3))
    assert pace.compute(512).spread < 0.02
    for index in range(12):
        pace.computed(512, Took(4e-3 if index % 2 else 2e-3, 1e-3))
    assert pace.compute(512).spread > 0.2
