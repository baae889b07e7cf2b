"""Recurrent layers of vLLM: states beside attention in one allocation, in whatever layout a side has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.serve.parts import until

from baton.adapters.common import WorkerMesh
from baton.adapters.vllm.cache import StateForm, describe_layers, make_pools, make_spec, split_layer
from baton.adapters.vllm.metadata import CachedChunk, Load, StepMetadata, Transfer
from baton.adapters.vllm.worker import WorkerSide
from baton.errors import ConfigError
from baton.session import Endpoint, EndpointConfig, Timings, prompt_digest
from baton.transport import NOW, open_transport

BLOCKS, HEADS, TOKENS, CHANNELS = 12, 4, 16, 8
PAGE_BYTES = HEADS * TOKENS * CHANNELS * 4
TAPS = 3
NUM_TOKENS = 40
STATE, ATTENTION = "model.layers.0.mixer", "model.layers.1.self_attn.attn"
WAIT_S = 180.0


class MambaSpec:
    """Named as vLLM's class is."""

    def __init__(self, kind: str, shapes: tuple[tuple[int, ...], ...], **fields: Any) -> None:
        self.mamba_type, self.shapes = SimpleNamespace(name=kind), shapes
        self.dtypes = tuple(torch.bfloat16 if len(shape) == 2 else torch.float32 for shape in shapes)
        self.mamba_cache_mode, self.num_speculative_blocks, self.tp_replicated = "none", 0, False
        self.__dict__.update(fields)


class FullAttentionSpec:
    pass


@dataclass(frozen=True)
class Kind:
    """A kind of recurrent layer: the parts of its convolution, and the state of each head."""

    name: str
    parts: tuple[tuple[int, int], ...]
    """Units and channels of each."""
    state: tuple[int, ...] = ()
    num_groups: int = 1

    def on_rank(self, values: "Values", rank: int, tp: int, channels_first: bool) -> list[torch.Tensor]:
        """What one rank keeps, as vLLM lays it out."""
        states = []
        if self.parts:
            shares = [cut(part, rank, tp).flatten(0, 1) for part in values.parts]
            conv = torch.cat(shares)
            states.append(conv if channels_first else conv.T.contiguous())
        return states + ([cut(values.state, rank, tp)] if self.state else [])


@dataclass
class Values:
    """Of the whole model."""

    parts: list[torch.Tensor]
    state: torch.Tensor

    @staticmethod
    def random(kind: Kind) -> "Values":
        parts = [torch.randn(units, channels, TAPS).bfloat16() for units, channels in kind.parts]
        state = torch.randn(kind.state or (1,))
        return Values(parts, state.bfloat16() if state.dim() == 2 else state)


def cut(whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A rank's units; where there are fewer than ranks, several have the same one."""
    return whole[[rank * len(whole) // tp]] if len(whole) < tp else whole.chunk(tp)[rank]


KINDS = [
    Kind("MAMBA2", ((4, 2), (1, 6), (1, 6)), (4, 2, 6)),
    Kind("MAMBA2", ((4, 2), (2, 6), (2, 6)), (4, 2, 6), num_groups=2),
    Kind("MAMBA1", ((8, 1),), (8, 6)),
    Kind("GDN_ATTN", ((2, 6), (2, 6), (4, 2)), (4, 2, 6)),
    Kind("SHORT_CONV", ((8, 1),)),
    Kind("LINEAR", (), (4, 6, 6)),
]


class Engine:
    """The workers of one engine with a recurrent layer and one of attention, which overlay each other."""

    def __init__(self, name: str, kind: Kind, tp: int, channels_first: bool) -> None:
        self.kind, self.tp, self.channels_first = kind, tp, channels_first
        self.workers: list[WorkerSide] = []
        self.raw: list[torch.Tensor] = []
        first: Endpoint | None = None
        for rank in range(tp):
            raw = torch.randint(-128, 127, (BLOCKS, PAGE_BYTES), dtype=torch.int8)
            attention = raw.view(torch.float32)[:, : PAGE_BYTES // 4 // tp]
            caches = {
                STATE: raw.view(BLOCKS, 1, 1, PAGE_BYTES),
                ATTENTION: attention.unflatten(1, (HEADS // tp, TOKENS, CHANNELS)),
            }
            shapes = tuple(tuple(state.shape) for state in self.states(Values.random(kind), rank))
            groups = [
                SimpleNamespace(layer_names=[ATTENTION], kv_cache_spec=FullAttentionSpec()),
                SimpleNamespace(layer_names=[STATE], kv_cache_spec=MambaSpec(kind.name, shapes)),
            ]
            layers = describe_layers(caches, groups, BLOCKS, StateForm(kind.num_groups, channels_first))
            config = EndpointConfig(
                instance=name,
                spec=make_spec([layers], WorkerMesh(0, rank, 1, tp, HEADS)),
                rank=rank,
                secret=b"a secret of the tests",
                coordinator=first.address if first else None,
                epoch=first.config.epoch if first else 0,
                timings=Timings(silence_s=WAIT_S),
            )
            endpoint = Endpoint(config, make_pools(caches), open_transport("tcp"))
            first = first or endpoint
            self.raw.append(raw)
            self.workers.append(WorkerSide(endpoint, layers, (0, 1), fence=lambda: NOW))
        assert first is not None
        assert first.wait_ready(WAIT_S)
        self.address = first.address

    def states(self, values: Values, rank: int) -> list[torch.Tensor]:
        return self.kind.on_rank(values, rank, self.tp, self.channels_first)

    def packed(self, values: Values, rank: int) -> torch.Tensor:
        """The first bytes of a block."""
        return torch.cat(
            [state.contiguous().flatten().view(torch.int8) for state in self.states(values, rank)]
        )

    def store(self, values: Values, block: int) -> None:
        for rank, raw in enumerate(self.raw):
            packed = self.packed(values, rank)
            raw[block, : len(packed)] = packed

    def step(self, step: StepMetadata) -> None:
        """A forward; only attention has a hook."""
        for worker in self.workers:
            worker.begin_step(step)
            worker.layer_done(ATTENTION)
            worker.end_step()

    def received(self) -> set[str]:
        """Requests that every worker has; none may have failed."""
        every = []
        for worker in self.workers:
            own: set[str] = set()

            def is_there(worker: WorkerSide = worker, own: set[str] = own) -> bool:
                results = worker.take_results(set(), is_idle=True)
                assert not results.failed
                own |= results.received
                return bool(own)

            until(is_there, "the prompt is there", WAIT_S, 0.0)
            every.append(own)
        return set.intersection(*every)

    def close(self) -> None:
        for worker in reversed(self.workers):
            worker.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(*args: Any) -> Engine:
        started.append(Engine(*args))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.mark.parametrize(("source_tp", "target_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{kind.num_groups}")
def test_decode_gets_the_state_at_the_end_of_the_prompt(
    engines: Callable[..., Engine], kind: Kind, source_tp: int, target_tp: int
) -> None:
    """The state of a chunk before the last one is never sent: its block is written again."""
    prefill, decode = engines("p", kind, source_tp, False), engines("d", kind, target_tp, True)
    transfer = Transfer("t", NUM_TOKENS, prompt_digest(range(NUM_TOKENS)).value)
    decode.step(StepMetadata(loads=[Load("t", transfer, prefill.address, 0, ([5, 9, 2], [7]))]))
    before = [raw.clone() for raw in decode.raw]
    early, last = Values.random(kind), Values.random(kind)
    prefill.store(early, 6)
    prefill.step(StepMetadata(chunks=[CachedChunk("t", transfer, (0, 16), ([3], [6]))]))
    prefill.store(last, 6)
    prefill.step(StepMetadata(chunks=[CachedChunk("t", transfer, (16, NUM_TOKENS), ([8, 4], []))]))
    assert decode.received() == {"t"}
    for rank, raw in enumerate(decode.raw):
        packed = decode.packed(last, rank)
        assert torch.equal(raw[7, : len(packed)], packed)
        assert torch.equal(raw[7, len(packed) :], before[rank][7, len(packed) :]), "behind the state"
        untouched = [block for block in range(BLOCKS) if block not in (5, 9, 2, 7)]
        assert torch.equal(raw[untouched], before[rank][untouched])
    share = PAGE_BYTES // prefill.tp
    sent = torch.cat(
        [raw[[3, 8, 4], :share].view(torch.int32).unflatten(1, (-1, 128)) for raw in prefill.raw], 1
    )
    share = PAGE_BYTES // decode.tp
    got = torch.cat(
        [raw[[5, 9, 2], :share].view(torch.int32).unflatten(1, (-1, 128)) for raw in decode.raw], 1
    )
    assert torch.equal(sent, got), "attention"


SHAPES = ((TAPS, 8), (4, 2, 6))


def describe(spec: MambaSpec, page_bytes: int = PAGE_BYTES) -> Any:
    assert page_bytes >= prod(SHAPES[0]) * 2 + prod(SHAPES[1]) * 4
    cache = torch.zeros(BLOCKS, 1, 1, page_bytes, dtype=torch.int8)
    return describe_layers({STATE: cache}, [SimpleNamespace(layer_names=[STATE], kv_cache_spec=spec)], BLOCKS)


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("MAMBA2", {"mamba_cache_mode": "align"}, "--no-enable-prefix-caching"),
        ("MAMBA2", {"num_speculative_blocks": 1}, "drafts"),
        ("MAMBA2", {"tp_replicated": True}, "whole model"),
        ("KDA", {}, "kind KDA"),
    ],
)
def test_states_that_cannot_be_handed_over_are_refused(
    kind: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        describe(MambaSpec(kind, SHAPES, **fields))


def test_states_are_not_split_for_other_engines() -> None:
    (layer, *_) = describe(MambaSpec("MAMBA1", ((TAPS, 8), (8, 6))))
    with pytest.raises(ConfigError, match="split_kv"):
        split_layer(layer, torch.zeros(1), lambda *_: None)


def test_a_model_without_attention_has_a_spec() -> None:
    spec = make_spec([describe(MambaSpec("MAMBA1", ((TAPS, 8), (8, 6))))], WorkerMesh(0, 0, 1, 1, 1))
    assert {name: component.num_units for name, component in spec.cache.by_name.items()} == {
        "model.layers.*.mixer/0/conv": 8,
        "model.layers.*.mixer/0/state": 8,
    }
