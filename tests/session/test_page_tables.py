"""A chunk's work at either end, as a rank driver does it: leases, packs, copies, unpacks and checksums."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from tests.plan.scene import FILL, GQA, HYBRID, Scene, chunks_of, gathered, made, pages
from tests.plan.world import World, worlds

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.plan.binding import (
    ChunkSend,
    TransferTerms,
    bind,
    bind_source,
    bind_target,
    expected_bytes,
    modes,
    place_in_staging,
    writable,
)
from baton.plan.chunks import bound_plan
from baton.plan.content import Memory, execute
from baton.plan.routes import Chunk, Prompt
from baton.plan.steps import ALWAYS_PACK, CONVERT, DIRECT, NEVER_PACK, PACK, STAGING, Copy, Spans
from baton.session.page_tables import check_terms, decode_pages, decode_tables, encode_pages
from baton.session.tensors import checksums, run_packs, run_unpacks

FEWER = settings(max_examples=max(1, settings().max_examples // 4))
FINITE = 0xFB  # no byte with this bit off begins or ends a NaN or an infinity of any dtype
GUARD = 96


def of_rank(memory: Memory, rank: int) -> dict[str, np.ndarray]:
    return {name: buffer for (owner, name), buffer in memory.items() if owner == rank}


@dataclass
class Rig:
    """Two instances with real buffers, and what a grant between them would say."""

    scene: Scene
    terms: TransferTerms
    source: Memory
    target: Memory

    @staticmethod
    def of(world: World) -> Rig:
        scene = Scene(world)
        cost = ALWAYS_PACK if world.seed % 2 else NEVER_PACK
        chosen = {pair: mode.mode for pair, mode in modes(scene.plan, scene.prompt, cost).items()}
        terms = TransferTerms(scene.plan, scene.prompt, scene.tables.target, chosen, is_verified=True)
        source = {key: buffer & FINITE for key, buffer in scene.source.items()}
        return Rig(scene, terms, source, scene.target())

    def move(self, chunk: Chunk, rng: random.Random) -> None:
        """One chunk from every source rank to every target rank, each with its own staging."""
        for rank in self.scene.world.source.layout.group(self.scene.world.source_dp):
            for send in bind_source(self.terms, rank, self.scene.tables.source[rank], chunk):
                self.move_to(rank, send, chunk, rng)

    def move_to(self, rank: int, send: ChunkSend, chunk: Chunk, rng: random.Random) -> None:
        mine, theirs = of_rank(self.source, rank), of_rank(self.target, send.target_rank)
        receive = bind_target(self.terms, rank, send.target_rank, chunk)
        assert (receive.source_rank, receive.num_bytes) == (rank, send.num_bytes)
        assert receive.staging_bytes == send.staging_bytes
        at = (rng.randrange(GUARD), rng.randrange(GUARD))
        packed, landed = (np.full(send.staging_bytes + 2 * GUARD, FILL, dtype=np.uint8) for _ in range(2))
        places = [memory[a : a + send.staging_bytes] for memory, a in zip((packed, landed), at, strict=True)]
        run_packs(send.packs, mine, places[0])
        num_copied = 0
        for copy in send.copies:
            spans = place_in_staging(copy, *at)
            reads = packed if copy.source_buffer == STAGING else mine[copy.source_buffer]
            writes = landed if copy.target_buffer == STAGING else theirs[copy.target_buffer]
            for read, write, length in zip(spans.source, spans.target, spans.length, strict=True):
                writes[write : write + length] = reads[read : read + length]
            num_copied += spans.num_bytes
        assert num_copied == sum(send.num_bytes.values())
        sums = checksums(receive.sums, theirs, places[1])
        assert sums == checksums(send.sums, mine)
        assert set(sums) == set(send.num_bytes)
        run_unpacks(receive.unpacks, places[1], theirs)
        for memory, a in zip((packed, landed), at, strict=True):
            assert (memory[:a] == FILL).all()
            assert (memory[a + send.staging_bytes :] == FILL).all()
        if not send.packs:
            assert (packed == FILL).all()


@FEWER
@given(worlds())
def test_every_rank_alone_moves_what_bind_and_the_reference_move(world: World) -> None:
    rig = Rig.of(world)
    wanted = rig.scene.target()
    rng = random.Random(world.seed)
    cost = ALWAYS_PACK if world.seed % 2 else NEVER_PACK
    for chunk in chunks_of(world, rng):
        rig.move(chunk, rng)
        execute(bind(rig.scene.plan, rig.scene.prompt, rig.scene.tables, chunk, cost), rig.source, wanted)
    for key, buffer in wanted.items():
        np.testing.assert_array_equal(rig.target[key], buffer, err_msg=str(key))


@FEWER
@given(worlds())
def test_sends_of_all_chunks_are_what_is_expected(world: World) -> None:
    rig = Rig.of(world)
    terms = replace(rig.terms, is_verified=False)
    totals: dict[tuple[int, int], dict[str, int]] = {}
    staged: dict[tuple[int, int], int] = {}
    for chunk in chunks_of(world, random.Random(world.seed)):
        for rank in world.source.layout.group(world.source_dp):
            for send in bind_source(terms, rank, rig.scene.tables.source[rank], chunk):
                assert send.sums == {}
                pair = (rank, send.target_rank)
                staged[pair] = staged.get(pair, 0) + send.staging_bytes
                for name, num_bytes in send.num_bytes.items():
                    sizes = totals.setdefault(pair, {})
                    sizes[name] = sizes.get(name, 0) + num_bytes
                landed = bind_target(terms, *pair, chunk)
                assert landed.sums == {}
    assert totals == expected_bytes(rig.scene.plan, rig.scene.prompt)
    for rank in {pair[0] for pair in totals}:
        leased = {target: num_bytes for (source, target), num_bytes in staged.items() if source == rank}
        check_terms(terms, rank, leased)
        for target, num_bytes in leased.items():
            if num_bytes:
                with pytest.raises(RemoteProtocolError, match="staging at target rank"):
                    check_terms(terms, rank, {**leased, target: num_bytes - 1})


@FEWER
@given(worlds())
def test_one_wrong_byte_is_a_wrong_checksum(world: World) -> None:
    rig = Rig.of(world)
    rng = random.Random(world.seed)
    chunk = rng.choice(chunks_of(world, rng))
    for rank, target in rig.scene.some_pairs():
        receive = bind_target(rig.terms, rank, target, chunk)
        theirs = of_rank(rig.target, target)
        staging = np.zeros(receive.staging_bytes, dtype=np.uint8)
        before = checksums(receive.sums, theirs, staging)
        for name, (buffer, spans) in receive.sums.items():
            assert (
                before[name]
                == xxhash.xxh3_128(
                    gathered(spans, staging if buffer == STAGING else theirs[buffer]).tobytes()
                ).digest()
            )
            span = rng.randrange(len(spans))
            at = int(spans.source[span]) + rng.randrange(int(spans.length[span]))
            memory = staging if buffer == STAGING else theirs[buffer]
            memory[at] ^= 1 << rng.randrange(8)
            after = checksums(receive.sums, theirs, staging)
            assert {n for n in before if before[n] != after[n]} == {name}
            before = after


def test_a_verified_convert_lane_is_summed_before_it_is_converted() -> None:
    found = made(HYBRID, dtypes=("bf16", "fp32"))
    terms = TransferTerms(found, Prompt(100), pages(found.target), {(0, 0): CONVERT, (1, 0): CONVERT}, True)
    receive = bind_target(terms, 0, 0, Chunk((0, 4), (0, 100)))
    assert {name: buffer for name, (buffer, _) in receive.sums.items()} == {
        "k": STAGING, "v": STAGING, "ssm": "ssm"
    }  # fmt: skip
    assert receive.staging_bytes == receive.num_bytes["k"] + receive.num_bytes["v"]
    assert list(writable(terms, 0, 0)) == ["ssm"]
    assert writable(replace(terms, modes={(0, 0): PACK}), 0, 0) == {}


def terms_of(**changes) -> TransferTerms:
    found = made(GQA)
    terms = TransferTerms(found, Prompt(100), pages(found.target), {(0, 0): DIRECT, (1, 0): DIRECT})
    return replace(terms, **changes)


def test_a_grant_that_cannot_be_followed_is_refused_before_a_byte_moves() -> None:
    check_terms(terms_of(), 0, {})
    short = {0: {"tokens": np.arange(6, dtype=np.int64)}}
    unequal = made(GQA, dtypes=("bf16", "fp32"))
    for terms, reason in (
        (terms_of(modes={(1, 0): DIRECT}), "no lane from source rank 0 to target rank 0"),
        (terms_of(modes={(0, 0): "zip"}), "unknown mode 'zip'"),
        (terms_of(tables=short), "has 6 pages, 7 are needed"),
        (terms_of(tables={}), "no page table for group 'tokens' of target rank 0"),
        (terms_of(plan=unequal), "cannot go direct"),
        (terms_of(modes={(0, 0): PACK}), "0 bytes of staging at target rank 0, 25600 are needed"),
    ):
        with pytest.raises(RemoteProtocolError, match=reason):
            check_terms(terms, 0, {})
    check_terms(terms_of(modes={(1, 0): DIRECT}), 1, {})


def test_a_chunk_without_a_lane_is_refused() -> None:
    chunk = Chunk((0, 4), (0, 100))
    terms = terms_of(modes={})
    with pytest.raises(ConfigError, match="no lane"):
        bind_source(terms, 0, pages(terms.plan.source)[0], chunk)
    with pytest.raises(ConfigError, match="no lane"):
        bind_target(terms, 0, 0, chunk)
    nothing = bind_target(terms, 7, 0, chunk)
    assert (nothing.unpacks, nothing.num_bytes, nothing.staging_bytes) == ((), {}, 0)


def test_copies_are_placed_in_staging_alone() -> None:
    spans = Spans(*(np.array([value], dtype=np.int64) for value in (10, 20, 5)))
    for buffers, wanted in (
        (("k", "k"), (10, 20)),
        ((STAGING, STAGING), (110, 1020)),
        (("k", STAGING), (10, 1020)),
    ):
        found = place_in_staging(Copy(0, 0, *buffers, spans), 100, 1000)
        assert (found.source.tolist(), found.target.tolist()) == ([wanted[0]], [wanted[1]])
    assert (spans.source.tolist(), spans.target.tolist()) == ([10], [20]), "the copy is as it was"


SPEC = made(HYBRID).target


def test_page_tables_come_back() -> None:
    tables = {"tokens": np.array([3, 0, 19], dtype=np.int64), "state": np.array([], dtype=np.int64)}
    raw = encode_pages(tables)
    assert raw == {"tokens": b"\3\0\0\0\0\0\0\0\x13\0\0\0", "state": b""}
    found = decode_pages(raw, SPEC)
    assert {group: ids.tolist() for group, ids in found.items()} == {"tokens": [3, 0, 19], "state": []}
    assert {ids.dtype for ids in found.values()} == {np.dtype(np.int64)}
    by_rank = decode_tables({0: raw}, SPEC, 0)
    assert by_rank[0]["tokens"].tolist() == [3, 0, 19]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"tokens": b"\0\0\0"}, "3 bytes, not a multiple of 4"),
        ({"tokens": b"\0\0\0\0\xff\xff\xff\xff"}, "names pages -1 to 0 of a pool of 20"),
        ({"tokens": b"\x14\0\0\0"}, "names pages 20 to 20 of a pool of 20"),
        ({"state": b"\4\0\0\0"}, "of a pool of 4"),
        ({"draft": b""}, "group 'draft'; the cache has state, tokens"),
        ({"tokens": bytes(4 << 24) + bytes(4)}, "67108868 bytes"),
    ],
)
def test_page_tables_of_a_peer_are_checked(table: dict[str, bytes], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_pages(table, SPEC)


def test_page_tables_of_other_ranks_are_refused() -> None:
    for ranks, dp in (([1], 0), ([0], 1), ([-1], 0), ([0], -1)):
        with pytest.raises(RemoteProtocolError, match="not in dp group"):
            decode_tables({rank: {} for rank in ranks}, SPEC, dp)


def one_send(mode: str) -> tuple[TransferTerms, ChunkSend]:
    terms = terms_of(modes={(0, 0): mode, (1, 0): mode}, is_verified=True)
    return terms, bind_source(terms, 0, pages(terms.plan.source)[0], Chunk((0, 4), (0, 100)))[0]


def test_tensors_are_moved_like_arrays() -> None:
    terms, send = one_send(PACK)
    rng = np.random.default_rng(1)
    scene = {name: rng.integers(0, 256, 4 * 20 * 16 * 2 * 8 * 2, dtype=np.uint8) for name in ("k", "v")}
    arrays, tensors = (
        np.zeros(send.staging_bytes, dtype=np.uint8),
        torch.zeros(send.staging_bytes, dtype=torch.uint8),
    )
    shaped = {
        name: torch.from_numpy(b.copy()).view(torch.bfloat16).view(4, 20, -1) for name, b in scene.items()
    }
    run_packs(send.packs, scene, arrays)
    run_packs(send.packs, shaped, tensors)
    assert arrays.tobytes() == tensors.numpy().tobytes() != bytes(send.staging_bytes)
    assert checksums(send.sums, scene) == checksums(send.sums, shaped)
    receive = bind_target(terms, 0, 0, Chunk((0, 4), (0, 100)))
    assert checksums(receive.sums, {}, arrays) == checksums(send.sums, scene)
    ends = [{name: np.full(2 * len(b), FILL, dtype=np.uint8) for name, b in scene.items()} for _ in range(2)]
    run_unpacks(receive.unpacks, arrays, ends[0])
    run_unpacks(receive.unpacks, tensors, {name: torch.from_numpy(b) for name, b in ends[1].items()})
    for name in scene:
        np.testing.assert_array_equal(ends[0][name], ends[1][name])


def test_buffers_that_cannot_be_used_are_refused() -> None:
    _, send = one_send(PACK)
    memory = np.zeros((4 * 20 * 16 * 2 * 8 * 2, 2), dtype=np.uint8)
    good = {name: np.zeros(len(memory), dtype=np.uint8) for name in ("k", "v")}
    staging = np.zeros(send.staging_bytes, dtype=np.uint8)
    frozen = good["k"].copy()
    frozen.flags.writeable = False
    for bad in (memory[:, 0], torch.from_numpy(memory)[:, 0], frozen):
        with pytest.raises(TransportError, match="contiguous"):
            run_packs(send.packs, {**good, "k": bad}, staging)
    with pytest.raises(TransportError, match="run a step on the buffers"):
        run_packs(send.packs, good, staging[:-1])
    whole = Spans(*(np.array([value], dtype=np.int64) for value in (0, 0, len(staging) + 1)))
    with pytest.raises(TransportError, match="are not in a buffer"):
        checksums({"k": (STAGING, whole)}, {}, staging)


def test_a_plan_is_bound_to_a_prompt_once() -> None:
    terms = terms_of()
    assert bound_plan(terms.plan, Prompt(100)) is bound_plan(terms.plan, terms.prompt)
    assert bound_plan(terms.plan, Prompt(100, {"tokens": 16})) is not bound_plan(terms.plan, Prompt(100))
