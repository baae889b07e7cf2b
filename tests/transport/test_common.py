"""What transports share, against plain loops."""

import subprocess
import sys
import threading
import time
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.transport.contract import apply, spans_of

import baton.transport.common.spans as span_module
from baton.errors import ConfigError, TransportError
from baton.plan.steps import Spans
from baton.transport import NOW, Batch, Description, Ranges, RemoteRegion, open_transport, transport_names
from baton.transport.common.regions import Grants, do_ranges_overlap, memory_of
from baton.transport.common.spans import are_inside, coalesce, copy_spans, cut, split
from baton.transport.common.threads import BlockingPool

SIZE = 200


@st.composite
def spans_and_content(draw: st.DrawFn) -> tuple[Spans, np.ndarray]:
    """Spans that are disjoint at the target, often adjoining, often of equal length."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=0, max_size=12))
    if draw(st.booleans()):
        lengths = [lengths[0]] * len(lengths) if lengths else []
    gaps = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    target = np.cumsum(np.array(gaps, dtype=np.int64)) + np.cumsum([0, *lengths[:-1]])[: len(lengths)]
    shift = draw(st.integers(0, 10))
    is_shifted = draw(st.booleans())
    source = target + shift if is_shifted else [draw(st.integers(0, SIZE - length)) for length in lengths]
    return spans_of(source, target, lengths), np.arange(SIZE, dtype=np.uint8)


def outcome(spans: Spans, content: np.ndarray) -> bytes:
    target = np.zeros(SIZE, dtype=np.uint8)
    apply(spans, content, target)
    return target.tobytes()


@given(spans_and_content(), st.integers(1, 20), st.integers(1, 5))
def test_joining_and_cutting_change_nothing(drawn: tuple[Spans, np.ndarray], bytes_max: int, spans_max: int):
    spans, content = drawn
    joined, pieces = coalesce(spans), cut(spans, bytes_max)
    assert outcome(joined, content) == outcome(pieces, content) == outcome(spans, content)
    assert len(joined) <= len(spans)
    parts = list(split(pieces, bytes_max, spans_max))
    assert sum(part.num_bytes for part in split(spans, bytes_max, spans_max)) == spans.num_bytes
    assert all(part.num_bytes <= bytes_max for part in split(spans, bytes_max, spans_max))
    assert all(part.num_bytes <= bytes_max and 1 <= len(part) <= spans_max for part in parts)
    for name in ("source", "target", "length"):
        whole = [value for part in parts for value in getattr(part, name).tolist()]
        assert whole == getattr(pieces, name).tolist()


@given(spans_and_content(), st.sampled_from([1, 4, 1000]), st.integers(1, 40))
def test_copy_is_the_plain_loop(drawn: tuple[Spans, np.ndarray], spans_min: int, burst_bytes: int):
    spans, content = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_module, "WINDOWED_SPANS_MIN", spans_min)
        patch.setattr(span_module, "WINDOW_BYTES", 10)
        patch.setattr(span_module, "BURST_BYTES", burst_bytes)
        patch.setattr(span_module, "RELEASED_LENGTH_MIN", 6)
        target = np.zeros(SIZE, dtype=np.uint8)
        assert copy_spans(spans, content, target, lambda: False)
    assert target.tobytes() == outcome(spans, content)


def test_copy_stops_between_bursts():
    content, target = np.ones(40 << 20, dtype=np.uint8), np.zeros(40 << 20, dtype=np.uint8)
    spans = spans_of(np.arange(40) << 20, np.arange(40)[::-1] << 20, np.full(40, 1 << 20))
    answers = iter([False, True])
    assert not copy_spans(spans, content, target, lambda: next(answers))
    assert target.sum() == span_module.BURST_BYTES


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=3),
    st.integers(0, 7),
)
def test_grants_allow_what_they_cover(granted: list, wanted: list, taken_back: int):
    transport = open_memory()
    region = transport.register(np.zeros(60, dtype=np.uint8))
    grants = Grants()
    numbers = [grants.add(region, ranges([pair])) for pair in granted]
    if taken_back < len(numbers):
        grants.remove(numbers[taken_back])
        granted = [pair for index, pair in enumerate(granted) if index != taken_back]
    allowed = {byte for start, length in granted for byte in range(start, start + length)}
    asked = {byte for start, length in wanted for byte in range(start, start + length)}
    write = ranges(wanted)
    assert grants.allow(region.number, write.start, write.length) == (asked <= allowed)
    if granted:
        assert do_ranges_overlap(ranges(granted), write) == bool(asked & allowed)


TRANSPORTS: list = []


def open_memory():
    if not TRANSPORTS:
        TRANSPORTS.append(open_transport("memory"))
    return TRANSPORTS[0]


def ranges(pairs: list) -> Ranges:
    start, length = zip(*pairs, strict=True)
    return Ranges(np.array(start, dtype=np.int64), np.array(length, dtype=np.int64))


def test_ranges_do_not_overflow():
    largest = np.array([2**63 - 1])
    assert not are_inside(largest, np.array([2]), 100)
    assert not are_inside(np.array([2]), largest, 100)
    assert not are_inside(np.array([-1]), np.array([1]), 100)
    assert not are_inside(np.array([1]), np.array([0]), 100)
    assert are_inside(np.array([99, 0]), np.array([1, 100]), 100)


def test_only_contiguous_arrays_are_registered():
    assert memory_of(np.zeros((3, 5), dtype=np.float32)).bytes.shape == (60,)
    with pytest.raises(TransportError, match="contiguous"):
        memory_of(np.zeros((4, 4))[:, :2])
    with pytest.raises(TransportError, match="numpy array or a torch tensor"):
        memory_of([1, 2, 3])
    with pytest.raises(TransportError, match="empty"):
        open_memory().register(np.zeros(0))


def test_tensors_are_registered_without_a_copy():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(6, dtype=torch.bfloat16)
    memory_of(tensor).bytes[:] = 255
    assert tensor.isnan().all()
    with pytest.raises(TransportError, match="contiguous"):
        memory_of(torch.zeros(4, 4).t())


def test_read_only_memory_is_not_granted():
    transport = open_memory()
    buffer = np.zeros(10, dtype=np.uint8)
    buffer.flags.writeable = False
    region = transport.register(buffer)
    with pytest.raises(TransportError, match="read-only"):
        transport.grant(transport.invite().peer, region, Ranges.whole(region))
    transport.unregister(region)


def test_numbers_that_no_wire_can_carry_are_refused():
    transport = open_memory()
    with pytest.raises(TransportError, match="number"):
        transport.connect(Description("memory", "ab" * 8, "", -1, "11"))
    region = transport.register(np.zeros(10, dtype=np.uint8))
    peer = transport.connect(transport.invite().description)
    for change in ({"number": -1}, {"number": 2**64}, {"num_bytes": -1}):
        batch = Batch(region, replace(region.remote, **change), spans_of([0], [0], [1]))
        with pytest.raises(TransportError):
            transport.submit(peer, batch, NOW)
    with pytest.raises(TransportError):
        transport.submit(peer, Batch(region, region.remote, spans_of([0], [0], [1])), NOW, 0.0)
    transport.disconnect(peer)
    transport.unregister(region)


def test_descriptions_travel_as_bytes():
    description = Description("tcp", "ab12", "127.0.0.1:5", 3, "secret")
    assert Description.from_bytes(description.to_bytes()) == description
    region = RemoteRegion("ab12", 4, 2**40)
    assert RemoteRegion.from_bytes(region.to_bytes()) == region


@pytest.mark.parametrize(
    "raw", [b"\xff", b"[]", b"{}", b'{"incarnation": "a", "number": true, "num_bytes": 1, "access": ""}']
)
def test_malformed_descriptions_are_refused(raw: bytes):
    with pytest.raises(TransportError):
        RemoteRegion.from_bytes(raw)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ConfigError, match=r"pigeon.*memory"):
        open_transport("pigeon")
    with pytest.raises(ConfigError, match="no option 'speed'"):
        open_transport("memory", speed=3)
    assert "memory" in transport_names()


def test_idle_threads_are_used_again() -> None:
    pool, done = BlockingPool("waiter"), SimpleQueue[int]()
    for _ in range(5):
        pool.put(lambda: done.put(threading.get_ident()))
        first = done.get(timeout=60)
        # It is idle a moment after it is done.
        limit_s = time.monotonic() + 60
        while not pool.num_idle and time.monotonic() < limit_s:
            time.sleep(0.001)
    assert done.empty()
    gate = threading.Event()

    def wait() -> None:
        gate.wait(60)
        done.put(threading.get_ident())

    for _ in range(3):
        pool.put(wait)
    gate.set()
    found = {done.get(timeout=60) for _ in range(3)}
    assert len(found) == 3, "actions that block run at the same time"
    assert first in found


def test_a_thread_whose_action_raises_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleQueue[object]()
    monkeypatch.setattr(threading, "excepthook", failed.put)
    pool, done = BlockingPool("waiter"), SimpleQueue[bool]()
    for _ in range(3):
        pool.put(lambda: 1 // 0)
        failed.get(timeout=60)
        pool.put(lambda: done.put(True))
        assert done.get(timeout=60)


FORKING = """
import os, threading, time
from baton.transport.fences import CudaFence

class Event:
    def query(self):
        return False
    def synchronize(self):
        pass

def is_called_back():
    called = threading.Event()
    CudaFence(Event()).call_when_ready(called.set)
    return called.wait(60)

assert is_called_back()
time.sleep(0.5)  # until its thread is idle, and kept
if (pid := os.fork()) == 0:
    os._exit(0 if is_called_back() else 1)
assert os.waitpid(pid, 0)[1] == 0, "the child gave its wait to a thread that it does not have"
"""


def test_a_forked_child_waits_with_threads_of_its_own() -> None:
    found = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
