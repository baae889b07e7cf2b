"""The connector in vLLM's workers, with real endpoints over tensors that stand for vLLM's caches."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
from tests.serve.parts import until

from baton.adapters.common import WorkerMesh
from baton.adapters.vllm.cache import describe_layers, make_pools, make_spec
from baton.adapters.vllm.metadata import (
    CachedChunk,
    Cancel,
    DeclinePrompt,
    Load,
    Queue,
    StepMetadata,
    Transfer,
)
from baton.adapters.vllm.worker import TransferResults, WorkerSide
from baton.errors import ConfigError
from baton.session import Endpoint, EndpointConfig, Failed, Timings, Waiting, prompt_digest
from baton.transport import NOW, open_transport

LAYERS, HEADS, TOKENS, CHANNELS, BLOCKS = 4, 4, 16, 8, 24
WAIT_S = 180.0


class FullAttentionSpec:
    """Named as vLLM's class is."""


class SlidingWindowSpec:
    sliding_window = 20


def allocate(names: list[str], shape: tuple[int, ...], *, is_block_major: bool) -> dict[str, torch.Tensor]:
    """All layers in one allocation, as vLLM has them: one after another, or block by block."""
    blocks, *inside = shape
    if is_block_major:
        return dict(zip(names, torch.randn(blocks, len(names), *inside).unbind(1), strict=True))
    return dict(zip(names, torch.randn(len(names), *shape).unbind(0), strict=True))


class Engine:
    """The workers of one engine, in this process."""

    def __init__(self, name: str, pp: int, tp: int, **options: object) -> None:
        self.workers: list[WorkerSide] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        stages = []
        for stage in range(pp):
            names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)][stage * LAYERS // pp :]
            shape = (BLOCKS, HEADS // tp, TOKENS, CHANNELS)
            for _ in range(tp):
                self.caches.append(allocate(names[: LAYERS // pp], shape, is_block_major=tp == 1))
            group = SimpleNamespace(layer_names=list(self.caches[-1]), kv_cache_spec=FullAttentionSpec())
            stages.append(describe_layers(self.caches[-1], [group], BLOCKS))
        first: Endpoint | None = None
        for rank, caches in enumerate(self.caches):
            mesh = WorkerMesh(rank // tp, rank % tp, pp, tp, HEADS)
            config = EndpointConfig(
                instance=name,
                spec=make_spec(stages, mesh),
                rank=rank,
                secret=b"a secret of the tests",
                coordinator=first.address if first else None,
                epoch=first.config.epoch if first else 0,
                timings=Timings(silence_s=WAIT_S),
            )
            layers = stages[mesh.pp]
            endpoint = Endpoint(config, make_pools(caches), open_transport("tcp"))
            first = first or endpoint
            self.workers.append(WorkerSide(endpoint, layers, (0,), fence=lambda: NOW, **options))  # type: ignore[arg-type]
        assert first is not None
        assert first.wait_ready(WAIT_S)
        self.address = first.address

    def compute(
        self,
        step: StepMetadata,
        on_layer: Callable[[], None] = lambda: None,
        *,
        hooks: bool = True,
        writes: bool = True,
    ) -> None:
        """Runs a step: the tokens of a layer are written just before its hook."""
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.preempt(step)
            worker.begin_step(step)
            for name, cache in caches.items():
                on_layer()
                for chunk in step.chunks if writes else ():
                    cache[chunk.new_blocks[0]] = torch.randn_like(cache[chunk.new_blocks[0]])
                if hooks:
                    worker.layer_done(name)
            worker.end_step()

    def results(self, finished: set[str], until: Callable[[TransferResults], bool]) -> TransferResults:
        """What all workers report, once each does."""
        limit_s, every = monotonic() + WAIT_S, TransferResults()
        for worker in self.workers:
            own = TransferResults()
            ended = finished
            while not until(own):
                assert monotonic() < limit_s, "a worker did not report in time"
                got = worker.take_results(ended, is_idle=True)
                ended = set()
                for known, new in (
                    (own.sent, got.sent),
                    (own.received, got.received),
                    (own.failed, got.failed),
                ):
                    assert not known & new, "reported twice"
                    known.update(new)
            every.sent.update(own.sent)
            every.received.update(own.received)
            every.failed.update(own.failed)
        return every

    def blocks(self, layer: int, ids: list[int]) -> torch.Tensor:
        """These blocks of a layer, all heads."""
        name = f"model.layers.{layer}.self_attn.attn"
        return torch.cat([caches[name][ids] for caches in self.caches if name in caches], dim=1)

    def close(self) -> None:
        for worker in reversed(self.workers):
            worker.close()


class WindowEngine(Engine):
    """One worker with a layer that keeps everything and one with a window, over one another."""

    def __init__(self, name: str) -> None:
        cache = torch.randn(BLOCKS, HEADS, TOKENS, CHANNELS)
        self.caches = [{"layers.0": cache, "layers.1": cache}]
        groups = [
            SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=FullAttentionSpec()),
            SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=SlidingWindowSpec()),
        ]
        layers = describe_layers(self.caches[0], groups, BLOCKS)
        config = EndpointConfig(
            instance=name,
            spec=make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS)),
            rank=0,
            secret=b"a secret of the tests",
            timings=Timings(silence_s=WAIT_S),
        )
        endpoint = Endpoint(config, make_pools(self.caches[0]), open_transport("tcp"))
        assert endpoint.wait_ready(WAIT_S)
        self.address = endpoint.address
        self.workers = [WorkerSide(endpoint, layers, (0, 1), fence=lambda: NOW)]


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(*args: object, **options: object) -> Engine:
        started.append(Engine(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def transfer(name: str, num_tokens: int = 40) -> Transfer:
    return Transfer(name, num_tokens, prompt_digest(range(num_tokens)).value)


def load(engine: Engine, source: Engine, name: str, blocks: list[int], num_held: int = 0) -> None:
    step = StepMetadata(loads=[Load(name, transfer(name), source.address, num_held, (blocks,))])
    engine.compute(step)


def test_every_layout_gets_the_bytes_that_prefill_computed(engines: Callable[..., Engine]) -> None:
    for (source_pp, source_tp), (target_pp, target_tp) in (
        ((1, 2), (1, 1)),
        ((2, 1), (1, 2)),
        ((1, 1), (2, 2)),
    ):
        prefill = engines(f"p{source_pp}{source_tp}", source_pp, source_tp)
        decode = engines(f"d{target_pp}{target_tp}", target_pp, target_tp)
        load(decode, prefill, "t", [5, 9, 2])
        prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 16), ([3],))]))
        prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (16, 40), ([8, 4],))]))
        assert decode.results(set(), lambda got: bool(got.received)).failed == set()
        for layer in range(LAYERS):
            assert torch.equal(prefill.blocks(layer, [3, 8, 4]), decode.blocks(layer, [5, 9, 2]))
        assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}


class EagerWorker(WorkerSide):
    """Broken: offers the step's tokens before they are computed, as one may do with prefix hits."""

    def begin_step(self, step: StepMetadata) -> None:
        super().begin_step(step)
        if step.chunks and self._step is not None and self._step.layers is not None:
            for group in self._step.layers.left:
                self._offer(self._step, group)
            self._step.layers = None


@pytest.mark.parametrize("worker", [WorkerSide, EagerWorker])
def test_a_prefix_that_another_request_computes_in_the_same_step_is_sent_after_it(
    engines: Callable[..., Engine], worker: type[WorkerSide]
) -> None:
    """Request b hits the block that request a computes in this step; before its layer, the block is stale."""
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    prefill.workers[0].__class__ = worker
    load(decode, prefill, "b", [5, 9, 2])
    chunks = [
        CachedChunk("b", transfer("b"), (0, 40), ([3, 8, 4],)),
        CachedChunk("a", transfer("a"), (0, 40), ([3, 10, 11],)),
    ]
    # While a layer is computed, there is time to copy what was offered too early.
    prefill.compute(StepMetadata(chunks=chunks), lambda: sleep(0.05))
    decode.results(set(), lambda got: bool(got.received))
    is_equal = all(
        torch.equal(prefill.blocks(layer, [3, 8, 4]), decode.blocks(layer, [5, 9, 2]))
        for layer in range(LAYERS)
    )
    assert is_equal == (worker is WorkerSide)


def test_layers_without_a_hook_leave_at_the_end_of_the_step(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    load(decode, prefill, "t", [5, 9, 2])
    prefill.compute(
        StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]), hooks=False
    )
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()
    assert torch.equal(prefill.blocks(3, [3, 8, 4]), decode.blocks(3, [5, 9, 2]))


def test_a_layer_that_runs_twice_in_a_step_ends_the_transfer(engines: Callable[..., Engine]) -> None:
    """Its first run stored a part of the step's tokens; by then the layer was sent."""
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    load(decode, prefill, "t", [5, 9, 2])
    (worker,) = prefill.workers
    worker.begin_step(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    for name in 2 * [*prefill.caches[0]]:
        worker.layer_done(name)
    sending = worker._outgoing["t"].sending
    worker.end_step()
    assert decode.results(set(), lambda got: bool(got.received)).failed == {"t"}
    assert sending is not None
    assert isinstance(sending.state, Failed)
    assert "model.layers.0.self_attn.attn ran twice" in sending.state.cause.text
    assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}


def test_blocks_that_decode_has_are_not_written(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    before = decode.blocks(0, [5]).clone()
    load(decode, prefill, "t", [5, 9, 2], num_held=16)
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    decode.results(set(), lambda got: bool(got.received))
    assert torch.equal(decode.blocks(0, [5]), before)
    assert torch.equal(prefill.blocks(0, [8, 4]), decode.blocks(0, [9, 2]))


def test_groups_of_layers_leave_when_their_last_layer_is_there(
    engines: Callable[..., Engine], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    prefill, decode = engines("p", 1, 1, policy="fixed:2", trace=trace), engines("d", 1, 1)
    load(decode, prefill, "t", [5, 9, 2])
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    decode.results(set(), lambda got: bool(got.received))
    prefill.results({"t"}, lambda got: bool(got.sent))
    line = json.loads(trace.read_text())
    (step,) = line["steps"].values()
    assert line["outcome"] == "ready"
    assert [layers for layers, _, _ in step["offered"]] == [[0, 2], [2, 4]]


@pytest.mark.parametrize(
    "ending", ["cancel", "cancel in the queue", "abort at prefill", "preempt and end", "abort at decode"]
)
def test_a_transfer_that_ends_early_fails_once_at_decode_and_frees_blocks(
    engines: Callable[..., Engine], ending: str
) -> None:
    prefill, decode = engines("p", 1, 2), engines("d", 1, 2)
    load(decode, prefill, "t", [5, 9, 2])
    ended: set[str] = set()
    if ending == "cancel in the queue":
        prefill.compute(StepMetadata(queued=[Queue("t", transfer("t"))]))
    if ending.startswith("cancel"):
        prefill.compute(StepMetadata(cancels=[Cancel("t", transfer("t"), "it ended")]))
    else:
        prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 16), ([3],))]))
    if ending == "preempt and end":
        prefill.compute(StepMetadata(preempted=["t"]))
    if ending == "abort at decode":
        ended = {"t"}
    if not ending.startswith("cancel"):
        assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}
    results = decode.results(ended, lambda got: bool(got.received))
    assert (results.received, results.failed) == ({"t"}, {"t"})
    # The same blocks can be loaded again.
    again = Load("u", transfer("u"), prefill.address, 0, ([5, 9, 2],))
    decode.compute(StepMetadata(loads=[again]))
    prefill.compute(StepMetadata(chunks=[CachedChunk("u", transfer("u"), (0, 40), ([3, 8, 4],))]))
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()


def test_a_prompt_in_prefills_queue_is_granted_and_sent_later(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 2), engines("d", 1, 1)
    queue = StepMetadata(queued=[Queue("t", transfer("t"))])
    prefill.compute(queue)
    load(decode, prefill, "t", [5, 9, 2])
    sendings = [worker._outgoing["t"].sending for worker in prefill.workers]
    until(lambda: all(sending and sending.is_granted for sending in sendings), "it is granted", WAIT_S, 0.01)
    prefill.compute(queue)
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()
    assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}
    assert torch.equal(prefill.blocks(3, [3, 8, 4]), decode.blocks(3, [5, 9, 2]))


def test_prefill_learns_that_a_prompt_is_in_decodes_queue(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    decode.compute(StepMetadata(queued=[Queue("t", transfer("t"), prefill.address)]))
    sending = prefill.workers[0]._outgoing["t"].sending
    assert sending is not None
    until(lambda: sending.is_target_full, "prefill learns of it", WAIT_S, 0.01)
    load(decode, prefill, "t", [5, 9, 2])
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()


@pytest.mark.parametrize("num_sent", [16, 40], ids=["half sent", "committed"])
def test_a_preempted_prompt_is_handed_over_from_other_blocks(
    engines: Callable[..., Engine], num_sent: int
) -> None:
    """The old blocks belong to others from then on; the same values are computed again elsewhere."""
    prefill, decode = engines("p", 1, 2), engines("d", 1, 1)
    old, new = [3, 8, 4], [13, 18, 14]
    load(decode, prefill, "t", [5, 9, 2])
    blocks = old[: -(-num_sent // TOKENS)]
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, num_sent), (blocks,))]))
    computed = [prefill.blocks(layer, old) for layer in range(LAYERS)]
    prefill.compute(StepMetadata(preempted=["t"]))
    for caches in prefill.caches:
        for cache in caches.values():
            cache[new], cache[old] = cache[old].clone(), 0.0
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), (new,))]), writes=False)
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()
    assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}
    for layer in range(LAYERS):
        assert torch.equal(computed[layer], decode.blocks(layer, [5, 9, 2]))


def test_blocks_that_leave_the_window_do_not_count_as_held() -> None:
    """Without a grant a prompt may hold 12 of 24 blocks. It holds 7 and the 2 in the window of its last
    token; the 5 others are free again, with the null block in their place."""
    num_tokens = 7 * TOKENS
    prefill, decode = WindowEngine("p"), WindowEngine("d")
    for index in range(7):
        tokens = (index * TOKENS, (index + 1) * TOKENS)
        chunk = CachedChunk("t", transfer("t", num_tokens), tokens, ([1 + index], [9 + index]))
        prefill.compute(StepMetadata(chunks=[chunk]), writes=False)
    handled = threading.Event()
    prefill.workers[0].endpoint._loop.post(handled.set)
    assert handled.wait(WAIT_S)
    sending = prefill.workers[0]._outgoing["t"].sending
    assert sending is not None
    assert sending.state == Waiting()
    blocks = ([*range(1, 8)], [0, 0, 0, 0, 0, 10, 11])
    decode.compute(StepMetadata(loads=[Load("t", transfer("t", num_tokens), prefill.address, 0, blocks)]))
    assert decode.results(set(), lambda got: bool(got.received)).failed == set()
    source, target = prefill.caches[0]["layers.0"], decode.caches[0]["layers.0"]
    assert torch.equal(source[[*range(1, 8), 14, 15]], target[[*range(1, 8), 10, 11]])
    for engine in (prefill, decode):
        engine.close()


def test_a_page_table_that_is_refused_ends_that_prompt_alone(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    for name, blocks in (("t", [5, 9, 2]), ("u", [6, 10, 3])):
        load(decode, prefill, name, blocks)
    chunks = [
        CachedChunk("t", transfer("t"), (0, 40), ([3, 8, BLOCKS],)),
        CachedChunk("u", transfer("u"), (0, 40), ([13, 18, 14],)),
    ]
    prefill.compute(StepMetadata(chunks=chunks), writes=False)
    assert decode.results(set(), lambda got: len(got.received) == 2).failed == {"t"}
    assert torch.equal(prefill.blocks(3, [13, 18, 14]), decode.blocks(3, [6, 10, 3]))


def test_a_decline_ends_the_transfer_at_prefill(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    prefill.compute(StepMetadata(chunks=[CachedChunk("t", transfer("t"), (0, 40), ([3, 8, 4],))]))
    sending = prefill.workers[0]._outgoing["t"].sending
    decode.compute(StepMetadata(declines=[DeclinePrompt("t", prefill.address, "decode has it")]))
    assert prefill.results({"t"}, lambda got: bool(got.sent)).sent == {"t"}
    assert sending is not None
    assert isinstance(sending.state, Failed)
    assert "decode has it" in sending.state.cause.text


def test_a_load_that_cannot_begin_is_reported_as_failed(engines: Callable[..., Engine]) -> None:
    prefill, decode = engines("p", 1, 1), engines("d", 1, 1)
    load(decode, prefill, "t", [5, 9, BLOCKS])
    results = decode.workers[0].take_results(set(), is_idle=False)
    assert (results.received, results.failed) == ({"t"}, {"t"})


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (torch.zeros(BLOCKS * 2, HEADS, TOKENS, CHANNELS), "--block-size 16"),
        (torch.zeros(BLOCKS, TOKENS, HEADS, CHANNELS).transpose(1, 2), "VLLM_KV_CACHE_LAYOUT"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, CHANNELS, dtype=torch.int16), "torch.int16"),
        (torch.zeros(2, BLOCKS, HEADS, TOKENS, CHANNELS), r"\(2, 24, 4, 16, 8\).*--attention-backend"),
    ],
)
def test_a_cache_that_cannot_be_handed_over_is_refused(cache: torch.Tensor, problem: str) -> None:
    group = SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=FullAttentionSpec())
    with pytest.raises(ConfigError, match=problem):
        describe_layers({"layers.0": cache}, [group], BLOCKS)
