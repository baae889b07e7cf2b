"""Pack and Unpack by torch, held against the numpy reference byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.plan.test_property import chunks_of
from tests.plan.world import World, page_tables, worlds

from baton.errors import TransportError
from baton.plan.binding import bind
from baton.plan.chunks import Tables
from baton.plan.content import Memory, allocate, execute
from baton.plan.dtypes import ITEM_BYTES
from baton.plan.planner import plan
from baton.plan.steps import ALWAYS_PACK, STAGING, Copy, Pack, Spans, Step, Unpack

torch = pytest.importorskip("torch", reason="packing is done by torch, which is not installed")

from baton.transport import packing  # noqa: E402
from baton.transport.packing import moves  # noqa: E402

FILL = 0xA5
FINITE = 0xFB  # no byte with this bit off begins or ends a NaN or an infinity of any dtype
PAIRS = [(source, target) for source in ITEM_BYTES for target in ITEM_BYTES if source != target]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
    ),
]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def random_bytes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def whole(count: int) -> Spans:
    return Spans(ints(0), ints(0), ints(count))


def an_unpack(spans: Spans, dtypes: tuple[str, str] = ("bf16", "bf16")) -> Unpack:
    return Unpack(0, 0, "k", "t", spans, dtypes)


@dataclass(frozen=True)
class Case:
    """A step and the buffers it runs on, each beginning so many bytes into its memory."""

    step: Pack | Unpack
    source: np.ndarray
    target_bytes: int
    shifts: tuple[int, int] = (0, 0)

    def expected(self) -> np.ndarray:
        """The target after the step, by the reference."""
        target = np.full(self.target_bytes, FILL, dtype=np.uint8)
        if isinstance(self.step, Unpack):
            landing = Copy(0, 0, "s", STAGING, whole(len(self.source)))
            execute([landing, self.step], {(0, "s"): self.source}, {(0, "t"): target})
            return target
        # The reference owns its staging: what lies between the spans is compared only where they write.
        ends = self.step.spans.target + self.step.spans.length
        sending = Copy(0, 0, STAGING, "t", whole(int(ends.max(initial=0))))
        if self.step.spans.num_bytes:
            execute([self.step, sending], {(0, "s"): self.source}, {(0, "t"): target})
        written = np.zeros(self.target_bytes, dtype=bool)
        for at, length in zip(self.step.spans.target, self.step.spans.length, strict=True):
            written[at : at + length] = True
        return np.where(written, target, FILL)

    def found(self, device: str = "cpu") -> np.ndarray:
        """The target after the step, by torch."""
        source = on_device(self.source, self.shifts[0], device)
        target = on_device(np.full(self.target_bytes, FILL, dtype=np.uint8), self.shifts[1], device)
        if isinstance(self.step, Pack):
            packing.pack(self.step, source, target)
        else:
            packing.unpack(self.step, source, target)
        return target.cpu().numpy()


def on_device(values: np.ndarray, shift: int, device: str) -> torch.Tensor:
    memory = torch.zeros(len(values) + shift, dtype=torch.uint8, device=device)
    memory[shift:] = torch.from_numpy(values).to(device)
    return memory[shift:]


@st.composite
def offsets(draw, lengths: list[int]) -> np.ndarray:
    """Places for spans: in nested loops where they are of one length, or dealt with gaps in any order."""
    start, gap = (
        draw(st.integers(0, 3)) * draw(st.sampled_from([1, 2, 16])),
        draw(st.sampled_from([0, 1, 6, 16])),
    )
    if len(set(lengths)) == 1 and draw(st.booleans()):
        inner = draw(st.sampled_from([n for n in range(1, len(lengths) + 1) if len(lengths) % n == 0]))
        step = lengths[0] + gap
        outer = inner * step + draw(st.sampled_from([0, 5, 32]))
        loops = np.add.outer(np.arange(len(lengths) // inner) * outer, np.arange(inner) * step)
        return start + loops.ravel().astype(np.int64)
    order = draw(st.permutations(range(len(lengths))))
    found, at = np.zeros(len(lengths), dtype=np.int64), start
    for span in order:
        found[span] = at
        at += lengths[span] + draw(st.sampled_from([0, 0, gap]))
    return found


@st.composite
def cases(draw) -> Case:
    """Steps of any span lengths, dtypes and alignment."""
    source_dtype, target_dtype = draw(st.sampled_from([*PAIRS, ("bf16", "bf16"), ("fp8", "fp8")]))
    is_pack = source_dtype == target_dtype and draw(st.booleans())
    item, target_item = (1, 1) if is_pack else (ITEM_BYTES[source_dtype], ITEM_BYTES[target_dtype])
    num_spans = draw(st.integers(0, 24))
    if draw(st.booleans()):
        counts = [draw(st.sampled_from([0, 1, 3, 8, 16, 300]))] * num_spans
    else:
        counts = draw(st.lists(st.integers(0, 40), min_size=num_spans, max_size=num_spans))
    source_at = draw(offsets([count * item for count in counts]))
    target_at = draw(offsets([count * target_item for count in counts]))
    length = ints(*counts) * item
    order = np.argsort(source_at, kind="stable")
    spans = Spans(source_at[order], target_at[order], length[order])
    sizes = [
        int((source_at + length).max(initial=0)),
        int((target_at + length // item * target_item).max(initial=0)),
    ]
    source = random_bytes(draw(st.integers(0, 99)), sizes[0] + draw(st.integers(1, 4))) & FINITE
    step = Pack(0, 0, "k", "s", spans) if is_pack else an_unpack(spans, (source_dtype, target_dtype))
    shifts = draw(st.tuples(st.sampled_from([0, 0, 1, 2, 8]), st.sampled_from([0, 0, 1, 4, 8])))
    return Case(step, source, sizes[1] + draw(st.integers(0, 3)), shifts)


@pytest.mark.parametrize("device", DEVICES)
@given(case=cases())
def test_any_step_matches_the_reference(device: str, case: Case) -> None:
    np.testing.assert_array_equal(case.found(device), case.expected())


def carry_out(steps: list[Step], source: Memory, target: Memory) -> None:
    """What `execute` does, with Pack and Unpack done by torch."""
    tensors = {key: torch.from_numpy(buffer) for key, buffer in (source | target).items()}
    staging: dict[tuple[int, int], torch.Tensor] = {}
    for step in steps:
        ends = (step.source, step.target)
        if ends not in staging:
            pair = [other for other in steps if (other.source, other.target) == ends]
            room = max(int((other.spans.source + other.spans.length).max()) for other in pair)
            room = max(room, *(int((other.spans.target + other.spans.length).max()) for other in pair))
            staging[ends] = torch.zeros(room, dtype=torch.uint8)
        match step:
            case Pack():
                packing.pack(step, tensors[step.source, step.buffer], staging[ends])
            case Unpack():
                packing.unpack(step, staging[ends], tensors[step.target, step.buffer])
            case Copy(source_buffer=giver, target_buffer=taker):
                given_to = staging[ends] if taker == STAGING else tensors[step.target, taker]
                read_from = staging[ends] if giver == STAGING else tensors[step.source, giver]
                plain = Pack(0, 0, "", "", step.spans)
                if giver != taker:  # from staging to staging the bytes are already there
                    packing.pack(plain, read_from, given_to)


def hand_off(world: World, run: Callable[[list[Step], Memory, Memory], None]) -> None:
    """Runs a world chunk by chunk, by the reference and by `run`, and compares every buffer."""
    rng = np.random.default_rng(world.seed)
    tables = Tables(
        page_tables(world.source, world.source_dp, rng), page_tables(world.target, world.target_dp, rng)
    )
    source = {
        (rank, f"source {name}"): rng.integers(0, 256, len(buffer), dtype=np.uint8) & FINITE
        for (rank, name), buffer in allocate(world.source, world.source_dp, "source").items()
    }
    expected = allocate(world.target, world.target_dp, "target", FILL)
    found = {key: buffer.copy() for key, buffer in expected.items()}
    routes = plan(world.source, world.target, world.source_dp, world.target_dp)
    for chunk in chunks_of(world, random.Random(world.seed)):
        steps = [_renamed(step) for step in bind(routes, world.prompt, tables, chunk, ALWAYS_PACK)]
        execute(steps, source, expected)
        run(steps, source, found)
    for key, buffer in found.items():
        np.testing.assert_array_equal(buffer, expected[key], err_msg=str(key))


def _renamed(step: Step) -> Step:
    """Buffers of the source under names of their own, so that both sides fit into one table."""
    match step:
        case Pack():
            return replace(step, buffer=f"source {step.buffer}")
        case Copy(source_buffer=giver) if giver != STAGING:
            return replace(step, source_buffer=f"source {giver}")
        case _:
            return step


@settings(max_examples=max(1, settings().max_examples // 2))
@given(world=worlds())
def test_every_hand_off_matches_the_reference(world: World) -> None:
    hand_off(world, carry_out)


def test_spans_outside_of_a_buffer_are_refused() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    step = an_unpack(Spans(ints(0, 8), ints(0, 30), ints(8, 8)))
    for source, target in ((memory[:15], memory), (memory, memory[16:53])):
        with pytest.raises(TransportError, match=r"reach from byte 0 to (16|38) of a (source|target) buffer"):
            packing.unpack(step, source, target)
    with pytest.raises(TransportError, match="from byte -1"):
        packing.unpack(an_unpack(Spans(ints(-1), ints(0), ints(8))), memory[8:], memory)
    assert not memory.any()


def test_a_prepared_step_runs_on_many_buffers() -> None:
    case = next(iter(SHAPES.values()))
    prepared = packing.prepare(case.step, torch.device("cpu"))
    for seed in range(3):
        other = replace(case, source=random_bytes(seed, len(case.source)) & FINITE)
        target = torch.full((case.target_bytes,), FILL, dtype=torch.uint8)
        prepared.run(torch.from_numpy(other.source), target)
        np.testing.assert_array_equal(target.numpy(), other.expected())


def test_pools_made_under_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        target = torch.zeros(8, dtype=torch.uint8)
    packing.unpack(an_unpack(whole(4), ("fp16", "fp32")), torch.full((8,), 1, dtype=torch.uint8), target)
    assert target.any()


def _shape(source: np.ndarray, target: np.ndarray, row_bytes: int) -> Case:
    order = np.argsort(source, kind="stable")
    length = np.full(len(source), row_bytes, dtype=np.int64)
    step = an_unpack(Spans(source[order], target[order], length), ("bf16", "bf16"))
    raw = random_bytes(5, int(source.max()) + row_bytes) & FINITE
    return Case(step, raw, int(target.max()) + row_bytes)


def _shapes() -> dict[type, Case]:
    """Eight of sixteen pages: every second in order, any of them out of order, or at places without rule."""
    rows = np.arange(16) * 64
    in_order = np.add.outer(np.arange(0, 16, 2) * 1024, rows).ravel()
    pages = np.add.outer(np.random.default_rng(0).permutation(16)[:8] * 1024, rows).ravel()
    crooked = pages + (pages // 1024) ** 2 * 64
    dense = np.arange(128, dtype=np.int64) * 32
    return {
        moves.Nested: _shape(in_order, dense, 32),
        moves.Gather: _shape(pages, dense, 32),
        moves.Scatter: _shape(dense, pages, 32),
        moves.Both: _shape(crooked, np.roll(crooked, 16), 32),
    }


SHAPES = _shapes()


@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_each_pattern_has_its_move(kind: type) -> None:
    case = SHAPES[kind]
    spans = case.step.spans
    found = moves.make_move(spans.source, spans.target, 32, moves.Uploads(torch.device("cpu")))
    assert type(found) is kind
    np.testing.assert_array_equal(case.found(), case.expected())


def one_row_on(change: pytest.MonkeyPatch) -> None:
    """Every index picks the row after the right one."""
    whole_index = moves._picked

    def picked(offsets: np.ndarray, uploads: moves.Uploads):
        line, index = whole_index(offsets, uploads)
        return line, index.roll(1)

    change.setattr(moves, "_picked", picked)


def one_level_less(change: pytest.MonkeyPatch) -> None:
    """The strided copy is as long as it should be, with the step of a row where that of a page belongs."""
    right = moves.nested

    def nested(source: np.ndarray, target: np.ndarray):
        levels = right(source, target)
        wrong = [replace(level, source_step=levels[-1].source_step) for level in levels or ()]
        return None if levels is None else tuple(wrong)

    change.setattr(moves, "nested", nested)


def narrow_at_the_end(change: pytest.MonkeyPatch) -> None:
    """Rows lose their last element."""
    right = moves.Line.view
    change.setattr(moves.Line, "view", lambda line, buffer, count: right(line, buffer, count)[:, :-1])


@pytest.mark.parametrize(
    ("breakage", "kind"),
    [
        (one_row_on, moves.Gather),
        (one_row_on, moves.Scatter),
        (one_level_less, moves.Nested),
        (narrow_at_the_end, moves.Scatter),
    ],
    ids=lambda value: value.__name__,
)
def test_a_broken_move_is_caught(breakage: Callable, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SHAPES[kind]
    breakage(monkeypatch)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        np.testing.assert_array_equal(case.found(), case.expected())


def test_a_broken_handoff_is_caught() -> None:
    """The comparison of whole worlds sees a step left out."""

    def forgetful(steps: list[Step], source: Memory, target: Memory) -> None:
        carry_out([step for step in steps if not isinstance(step, Pack)], source, target)

    @settings(database=None, phases=[Phase.generate])
    @given(world=worlds())
    def search(world: World) -> None:
        hand_off(world, forgetful)

    with pytest.raises(AssertionError, match="Mismatched elements"):
        search()
