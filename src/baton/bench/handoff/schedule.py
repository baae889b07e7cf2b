"""A stand-in for compute: when each layer of each prefill chunk ends, and what is sent then.

Pipeline stages take prefill chunks one after another; a stage starts a chunk when it has finished the one
before it and the stage before it has finished this one. Layers of a stage take the same time each, in
proportion to the tokens of the chunk. An overlap policy cuts the layers of a chunk into groups; it sees one
stage's layers, the bytes that this rank sends of each, and the link speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.bench.handoff.workload import Workload, own_layers, spec_of
from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.overlap import LayerTimes, choose
from baton.plan.ownership import END
from baton.plan.ranges import Range, to_ids
from baton.plan.routes import Chunk, entries_in, resolve, wanted


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """How fast layers are computed, and how they are grouped."""

    layer_s: float = 0.0
    """Compute time of one layer of the whole prompt."""
    policy: str = "off"
    chunk_tokens: int = 0
    """Tokens of a prefill chunk; 0 takes the prompt at once."""
    bytes_per_s: float = 1e9
    """The link speed that the policy is given."""
    overhead_s: float = 0.0
    """The link's time per group that the policy is given."""


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """The end of one layer of one chunk; `sends` are the layers sent with it, empty inside a group."""

    at_s: float
    layer: int
    tokens: Range
    num_bytes: int
    sends: Range


def schedule(workload: Workload, pace: PrefillTiming) -> dict[int, list[PrefillStep]]:
    """The steps of every source rank of dp group 0, in seconds from the start of the request."""
    layout = spec_of(workload, "source").layout
    stages = layout.stages(spec_of(workload, "source").cache.num_layers, "source")
    chunks = _chunks(workload.num_tokens, pace.chunk_tokens)
    begins = _begins(pace.layer_s, workload.num_tokens, chunks, [stop - start for start, stop in stages])
    by_rank = {}
    for rank in layout.group(0):
        stage = layout.coordinates(rank)["pp"]
        steps: list[PrefillStep] = []
        for chunk, tokens in enumerate(chunks):
            layer_s = pace.layer_s * (tokens[1] - tokens[0]) / workload.num_tokens
            loads = chunk_loads(workload, rank, tokens)
            steps += _stage_steps(pace, (begins[chunk, stage], layer_s), (stages[stage], tokens), loads)
        by_rank[rank] = steps
    return by_rank


def _chunks(num_tokens: int, chunk_tokens: int) -> list[Range]:
    if chunk_tokens < 0:
        raise ConfigError(f"tokens of a prefill chunk must be 0 or more, found {chunk_tokens}")
    size = chunk_tokens or num_tokens
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _begins(
    layer_s: float, num_tokens: int, chunks: list[Range], depths: list[int]
) -> dict[tuple[int, int], float]:
    """When each stage starts each chunk."""
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for chunk, (first, last) in enumerate(chunks):
        for stage, depth in enumerate(depths):
            at = begins[chunk, stage] = max(ends.get((chunk - 1, stage), 0), ends.get((chunk, stage - 1), 0))
            ends[chunk, stage] = at + layer_s * depth * (last - first) / num_tokens
    return begins


def _stage_steps(
    pace: PrefillTiming, times: tuple[float, float], ranges: tuple[Range, Range], loads: list[int]
) -> list[PrefillStep]:
    """One chunk on one stage: `times` is its begin and a layer's time, `ranges` its layers and tokens."""
    (begin_s, layer_s), ((first, last), tokens) = times, ranges
    num_layers = last - first
    transfer_s = tuple(load / pace.bytes_per_s for load in loads[:num_layers])
    layers = LayerTimes((layer_s,) * num_layers, transfer_s, pace.overhead_s)
    ends = {stop - 1: start for start, stop in choose(pace.policy, layers, tokens[1] - tokens[0])}
    steps = []
    for index, load in enumerate(loads[:num_layers]):
        is_last = index == num_layers - 1
        # Draft layers have ids above all others and go out with the last layer of the last stage.
        above = len(loads) - num_layers if is_last else 0
        sends = (first + ends[index], first + index + 1 + above) if index in ends else (0, 0)
        num_bytes = load + (sum(loads[num_layers:]) if is_last else 0)
        steps.append(PrefillStep(begin_s + (index + 1) * layer_s, first + index, tokens, num_bytes, sends))
    return steps


def chunk_loads(workload: Workload, rank: int, tokens: Range) -> list[int]:
    """Bytes that a source rank sends of each of its layers with a chunk of tokens; draft layers last."""
    plan, prompt = workload.plan, workload.prompt
    first, last = own_layers(workload, rank)
    loads = [0.0] * (last - first)
    for route in resolve(plan.narrowed(source=rank), prompt):
        share = _share(workload, plan.target.cache.by_name[route.component], tokens)
        ids = to_ids(route.layers)
        for layer in ids:
            loads[layer - first] += route.num_bytes / len(ids) * share
    return [round(load) for load in loads]


def _share(workload: Workload, component: Component, tokens: Range) -> float:
    """The share of a component that is sent with a chunk of tokens."""
    start, stop = wanted(workload.plan, component, workload.prompt)
    first, last = entries_in(workload.plan, component, workload.prompt, Chunk((0, END), tokens))
    return max(0, last - first) / (stop - start) if stop > start else 0.0
