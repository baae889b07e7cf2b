"""What `baton bench handoff` is made of, without a process."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import numpy as np
import pytest

from baton.bench.handoff.records import (
    BatchTiming,
    Handoff,
    Received,
    RecordingTransport,
    Sent,
    SerialTransfer,
    bound,
    figures,
    serial_of,
    timeline_of,
)
from baton.bench.handoff.run import CaseRuns, HandoffOptions, bound_notes
from baton.bench.handoff.workload import (
    PrefillStep,
    PrefillTiming,
    SideSpec,
    Workload,
    fitted,
    own_layers,
    pages_of,
    pool_bytes,
    sampler_rank,
    schedule,
    spec_of,
)
from baton.errors import ConfigError
from baton.plan import Chunk, Tables, bind, execute
from baton.plan.content import RankPools, compare, fill
from baton.plan.overlap import LayerTimes
from baton.plan.overlap import bound as ideal
from baton.plan.ownership import buffers
from baton.plan.steps import Spans
from baton.transport import NOW, Batch, Ranges, open_transport, wait_for_events
from baton.units import parse_speed

MIXED = (
    "paged:layers=3,heads=4,dim=8+paged:layers=2,heads=4,dim=8,window=40"
    "+recurrent:layers=2,heads=4,state=24+latent:layers=1,dim=12"
)


def pools(workload: Workload, side: str) -> dict[tuple[int, str], np.ndarray]:
    spec = spec_of(workload, side)
    return {
        (rank, name): np.zeros(size, dtype=np.uint8)
        for rank in range(spec.layout.num_ranks)
        for name, size in buffers(spec, rank, side).items()
    }


def own(memory: dict[tuple[int, str], np.ndarray], rank: int) -> dict[str, np.ndarray]:
    return {name: pool for (holder, name), pool in memory.items() if holder == rank}


def handed_over(workload: Workload, salt: int, slot: int = 0) -> tuple[dict, dict]:
    """Both sides' pools after a hand-over by the reference."""
    given, taken = pools(workload, "source"), pools(workload, "target")
    spec = spec_of(workload, "source")
    tables = {}
    for side in ("source", "target"):
        ranks = range(spec_of(workload, side).layout.num_ranks)
        tables[side] = {rank: pages_of(workload, side, rank, slot) for rank in ranks}
    for rank in range(spec.layout.num_ranks):
        holder = RankPools(spec, rank, own(given, rank))
        fill(holder, workload.prompt, tables["source"][rank], salt, is_finite=workload.is_converted)
    whole = Chunk((0, 1 << 20), (0, workload.num_tokens))
    execute(
        bind(workload.plan, workload.prompt, Tables(tables["source"], tables["target"]), whole), given, taken
    )
    return given, taken


def wrong_bytes(workload: Workload, taken: dict, salt: int, slot: int = 0) -> tuple[int, int]:
    """Bytes that were compared at all target ranks, and how many of them are not right."""
    spec, total, right = spec_of(workload, "target"), 0, 0
    for rank in range(spec.layout.num_ranks):
        holder = RankPools(spec, rank, own(taken, rank))
        pages = pages_of(workload, "target", rank, slot)
        verdict = compare(holder, spec_of(workload, "source"), workload.prompt, pages, salt)
        total, right = total + verdict.num_bytes, right + verdict.num_right
    return total, total - right


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SideSpec("pp2.tp2", 16), SideSpec("tp4", 16)),
        (SideSpec("tp2", 8, "nhd.fused.page"), SideSpec("cp2:stripe4.tp2", 16, "hnd")),
        (SideSpec("tp2", 16), SideSpec("tp1", 16, "hnd", "fp32")),
    ],
)
def test_content_is_right_after_a_handoff_and_only_then(source: SideSpec, target: SideSpec) -> None:
    workload = Workload(MIXED, source, target, num_tokens=75, num_slots=3)
    _, taken = handed_over(workload, salt=5, slot=1)
    total, wrong = wrong_bytes(workload, taken, salt=5, slot=1)
    assert (total > 10_000, wrong) == (True, 0)
    assert wrong_bytes(workload, taken, salt=6, slot=1)[1] > total / 3, "another request's content"
    assert wrong_bytes(workload, taken, salt=5, slot=0)[1] > total / 3, "another request's pages"
    written = next(pool for key, pool in taken.items() if key[0] == 0 and pool.any())
    place = int(np.flatnonzero(written)[0])
    written[place] ^= 1
    assert wrong_bytes(workload, taken, salt=5, slot=1)[1] == 1, "one byte differs"


def test_slots_share_no_page() -> None:
    workload = Workload(MIXED, SideSpec("tp2", 16), SideSpec("tp2", 16), num_tokens=75, num_slots=7)
    spec = spec_of(workload, "target")
    for group in spec.cache.groups:
        used = np.concatenate([pages_of(workload, "target", 1, slot)[group] for slot in range(7)])
        assert sorted(used.tolist()) == list(range(spec.storage.pages_of(group)))
        lent = np.concatenate([pages_of(workload, "source", 1, slot)[group] for slot in range(7)])
        assert len(set(lent.tolist())) == len(lent) == len(used)


def test_layers_are_dropped_until_pools_fit() -> None:
    workload = Workload("paged:layers=8,heads=2,dim=8", SideSpec("pp2.tp1"), SideSpec("tp2"), num_tokens=64)
    whole = pool_bytes(workload)
    assert whole == 3 * 8 * 2 * 2 * 64 * 8 * 2, "the source has twice the room"
    assert fitted(workload, whole) == workload
    assert fitted(workload, whole - 1).num_layers == 7
    assert fitted(workload, whole // 2).num_layers == 4
    with pytest.raises(ConfigError, match="--tokens"):
        fitted(workload, whole // 8)


def test_speeds() -> None:
    assert parse_speed("12.5GB/s") == parse_speed("100Gb/s") == 12.5e9
    assert parse_speed("160MB/s") == 160e6
    for text in ("", "12.5", "fast", "0GB/s", "-1GB/s", "1GiB/s"):
        with pytest.raises(ConfigError, match=r"12\.5GB/s"):
            parse_speed(text)


def test_workload_crosses_a_pipe() -> None:
    workload = Workload(MIXED, SideSpec("tp2"), SideSpec("tp1", 16, "nhd", "fp32"), 9, link_bytes_per_s=1e9)
    text = json.dumps(dataclasses.asdict(workload))
    assert msgspec.convert(json.loads(text), Workload) == workload


FLAT = Workload("paged:layers=8,heads=4,dim=8", SideSpec("pp2.tp2"), SideSpec("tp4"), num_tokens=128)


def test_stages_compute_one_after_another() -> None:
    steps = schedule(FLAT, PrefillTiming(layer_s=0.01, policy="fixed:2"))
    assert set(steps) == {0, 1, 2, 3}
    assert [step.at_s for step in steps[0]] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert [step.at_s for step in steps[3]] == pytest.approx([0.05, 0.06, 0.07, 0.08])
    assert [step.sends for step in steps[3]] == [(0, 0), (4, 6), (0, 0), (6, 8)]
    sent = sum(step.num_bytes for each in steps.values() for step in each)
    assert sent == 8 * 128 * 4 * 8 * 2 * 2


def test_prefill_chunks_fill_the_pipeline() -> None:
    steps = schedule(FLAT, PrefillTiming(layer_s=0.04, policy="off", chunk_tokens=32))
    assert [step.at_s for step in steps[0]][3::4] == pytest.approx([0.04, 0.08, 0.12, 0.16])
    assert [step.at_s for step in steps[2]][3::4] == pytest.approx([0.08, 0.12, 0.16, 0.20])
    assert [step.tokens for step in steps[2]][3::4] == [(0, 32), (32, 64), (64, 96), (96, 128)]
    assert [step.sends for step in steps[2]][3::4] == [(4, 8)] * 4


def test_windows_states_and_drafts_go_with_their_chunk() -> None:
    body = "paged:layers=2,heads=2,dim=8,window=32+recurrent:layers=2,heads=2,state=8"
    workload = Workload(
        body + "+draft.paged:layers=1,heads=2,dim=8", SideSpec("tp2"), SideSpec("tp2"), num_tokens=128
    )
    assert own_layers(workload, 0) == (0, 5)
    steps = schedule(workload, PrefillTiming(layer_s=0.01, policy="fixed:1", chunk_tokens=64))[0]
    first, last = steps[:4], steps[4:]
    assert [step.num_bytes for step in first[:3]] == [0, 0, 0], "outside of the window, and no state yet"
    assert last[0].num_bytes == 32 * 8 * 2 * 2
    assert last[2].num_bytes > 0
    assert last[3].sends == (3, 5), "the draft goes out with the last layer"
    assert last[3].num_bytes > last[2].num_bytes


def test_the_sampler_is_on_the_last_stage() -> None:
    assert sampler_rank(FLAT) == 2
    assert sampler_rank(dataclasses.replace(FLAT, source=SideSpec("tp2.pp2"))) == 1


def observed(layers_s: list[float], copies: list[tuple[float, float]], settled_s: float) -> Handoff:
    """A hand-over of one source rank whose layers ended and whose copies ran at these times from 100 on."""
    steps = tuple(PrefillStep(at, i, (0, 8), 10, (i, i + 1)) for i, at in enumerate(layers_s))
    sent = Sent(
        rank=0,
        called_s=100.0,
        layer_ends_s=tuple(100 + at for at in layers_s),
        committed_s=100.0,
        settled_s=100 + settled_s,
        outcome="ready",
        copies=tuple(BatchTiming("t", 100 + a, 100 + b, 10, 2, True) for a, b in copies),
    )
    received = Received(0, 100.0, 100 + settled_s, "ready")
    return Handoff("x", 100.0, {0: steps}, {0: sent}, received, {"t": 3})


def test_figures_by_hand() -> None:
    found = observed([1, 2, 3, 4], [(1, 3), (2, 5), (3.5, 6), (4.25, 8)], settled_s=8.5)
    got = figures(found, SerialTransfer({0: 8.0}))
    assert (got.tth_s, got.compute_s, got.exposed_s, got.transfer_s) == (8.5, 4, 4, 8)
    assert got.efficiency == 0.5
    # R = 1 2 3 4, t = 2: F = 3 5 7 9, exposed 5 of 8.
    assert got.bound == pytest.approx(3 / 8)
    assert got.control_s == pytest.approx(0.5)
    assert (got.num_copies, got.num_spans, got.num_bytes, got.num_groups) == (4, 8, 40, 4)
    late = figures(observed([0, 0], [(2, 3), (4, 5)], settled_s=7), SerialTransfer({}))
    assert late.control_s == pytest.approx(5), "what is neither compute nor copy"
    assert late.late_s == 0


@pytest.mark.parametrize(("last_s", "is_noted"), [(9.0, False), (8.0, True)])
def test_an_efficiency_above_its_bound_is_noted(last_s: float, is_noted: bool) -> None:
    """By the bound the last byte comes at 9, as in the test above."""
    observation = observed([1, 2, 3, 4], [(1, 3), (2, 5), (3.5, 6), (4.25, last_s)], settled_s=9.5)
    runs = [figures(observation, SerialTransfer({0: 8.0}))]
    notes = bound_notes([CaseRuns(HandoffOptions(), PrefillTiming(), [observation], runs)])
    assert bool(notes) == is_noted
    assert all("efficiency 0.500 is above its bound 0.375" in note for note in notes)


@pytest.mark.parametrize("layer_s", [0.25, 1.0, 4.0])
def test_bound_is_that_of_the_planner(layer_s: float) -> None:
    ends = [layer_s * (index + 1) for index in range(32)]
    times = LayerTimes((layer_s,) * 32, (1.0,) * 32, 0.0)
    found = observed(ends, [(ends[-1], ends[-1] + 32)], settled_s=1000)
    assert bound(found, SerialTransfer({0: 32.0})) == pytest.approx(ideal(times))


def test_serial_time_and_what_a_group_costs() -> None:
    whole = [observed([0] * 4, [(0.5, 1.5)], 9), observed([0] * 4, [(0.5, 2.5)], 9)]
    layered = [observed([0] * 4, [(0, 1), (0, 2), (0, 3), (0, 4.5)], 9)]
    found = serial_of(whole, layered)
    assert found.busiest_s == 1.5
    assert found.overhead_s == pytest.approx(1.0)


def test_story_of_a_handoff() -> None:
    timeline = timeline_of(observed([1, 2], [(1, 3), (2, 4)], settled_s=5))
    names = {track.name: timeline.on(track) for track in timeline.tracks}
    assert [(i.name, i.start_s, i.stop_s) for i in names["compute"]] == [
        ("layers 0-1", 0, 1),
        ("layers 1-2", 1, 2),
    ]
    assert [(i.start_s, i.stop_s) for i in names["copy to 3"]] == [(1, 3), (2, 4)]
    assert [(i.start_s, i.stop_s) for i in names["exposed transfer"]] == [(2, 4)]
    assert [(i.start_s, i.stop_s) for i in names["admission"]] == [(4, 5)]
    assert set(names) == {"queue", "prefill", "compute", "copy to 3", "exposed transfer", "admission"}


def test_a_recorded_transport_moves_the_same_bytes() -> None:
    target, source = open_transport("memory"), RecordingTransport(open_transport("memory"))
    region = target.register(target.allocate(64))
    invitation = target.invite()
    target.grant(invitation.peer, region, Ranges.whole(region))
    mine = source.register(np.arange(64, dtype=np.uint8))
    peer = source.connect(invitation.description)
    at = np.array([0, 32], dtype=np.int64)
    spans = Spans(at, at, np.array([16, 8], dtype=np.int64))
    source.submit(peer, Batch(mine, region.remote, spans), NOW)
    while not (copies := source.take()):
        wait_for_events(source, 1.0)
    assert [(copy.num_bytes, copy.num_spans, copy.is_done) for copy in copies] == [(24, 2, True)]
    assert copies[0].target == target.incarnation
    assert copies[0].submitted_s <= copies[0].ended_s
    assert source.take() == []
    source.close()
    target.close()
