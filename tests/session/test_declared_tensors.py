"""Endpoints on the raw storages of an engine's tensors, as vLLM has them, cache groups over one another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.session.handoff_world import PATIENCE_S, SECRET, TIMINGS

from baton.plan import Cache, Component, Spec, Storage, TensorView, declare, parse_layout
from baton.plan.cache import Dim, Full, Units, Window
from baton.plan.ownership import page_spaces
from baton.protocol.outcomes import Aux, Ready
from baton.session import Endpoint, EndpointConfig, Request, prompt_digest
from baton.transport import open_transport

LAYERS, HEADS, BLOCKS, TOKENS, CHANNELS = 6, 4, 24, 4, 6
FULL, WINDOW = (0, 2, 4), (1, 3, 5)
"""Layers of the two cache groups, by turns."""


def component(name: str, layers: tuple[int, ...], **changes) -> Component:
    ids = tuple((layer, layer + 1) for layer in layers)
    made = Component(name, ids, Units(HEADS), (Dim("channel", CHANNELS),), Full(), "g0", name)
    return replace(made, **changes)


CACHE = Cache(LAYERS, (component("kv", FULL), component("kv.w9", WINDOW, extent=Window(9), group="g1")))


class Worker:
    """One rank: an allocation in which layer i of both groups has the same blocks."""

    def __init__(self, spec: Spec, rank: int, is_block_major: bool) -> None:
        at = spec.layout.coordinates(rank)
        self.rank, self.stage, self.tp = rank, at["pp"], at["tp"]
        self.heads = HEADS // spec.layout.size("tp")
        first, last = spec.layout.stages(LAYERS, "stage")[self.stage]
        self.layers = {
            "kv": [layer for layer in FULL if first <= layer < last],
            "kv.w9": [layer for layer in WINDOW if first <= layer < last],
        }
        num_slots = max(map(len, self.layers.values()))
        if is_block_major:
            whole = torch.full((BLOCKS, num_slots, self.heads, TOKENS, CHANNELS), -1.0)
            slots = list(whole.unbind(1))
        else:
            slots = list(torch.full((num_slots, BLOCKS, self.heads, TOKENS, CHANNELS), -1.0))
        # Groups take the slots in opposite orders.
        order = {"kv": slots, "kv.w9": slots[::-1]}
        self.tensors = {
            layer: order[name][i] for name, layers in self.layers.items() for i, layer in enumerate(layers)
        }
        self.storage = slots[0].untyped_storage()

    def placements(self, spec: Spec) -> list:
        return [
            declare(
                spec,
                name,
                ("page", "unit"),
                [TensorView.of(self.tensors[layer]) for layer in layers],
                buffer="raw",
                buffer_bytes=self.storage.nbytes(),
                stage=self.stage,
            )
            for name, layers in self.layers.items()
            if layers
        ]

    @property
    def pool(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage)


def start(instance: str, layout: str, transport: str, *, is_block_major: bool):
    storage = Storage(TOKENS, "fp32", granule=TOKENS, num_pages_default=BLOCKS)
    spec = Spec(parse_layout(layout), CACHE, storage)
    workers = [Worker(spec, rank, is_block_major) for rank in range(spec.layout.num_ranks)]
    # As gathered over the pipeline group: the first worker of each stage speaks for it.
    declared = [at for worker in workers if not worker.tp for at in worker.placements(spec)]
    spec = replace(spec, storage=spec.storage.with_placements(declared))
    endpoints: list[Endpoint] = []
    for worker in workers:
        config = EndpointConfig(
            instance=instance, spec=spec, rank=worker.rank, secret=SECRET, timings=TIMINGS
        )
        if endpoints:
            first = endpoints[0]
            config = replace(config, epoch=first.config.epoch, coordinator=first.address)
        endpoints.append(Endpoint(config, {"raw": worker.pool}, open_transport(transport)))
    assert endpoints[0].wait_ready(PATIENCE_S)
    return spec, workers, endpoints


@pytest.mark.parametrize("transport", ["memory", "tcp"])
@pytest.mark.parametrize(
    ("ends", "majors"), [(("pp2.tp2", "tp1"), (False, True)), (("tp1", "pp3:1-3-2.tp4"), (True, False))]
)
def test_blocks_go_from_tensors_to_tensors(ends, majors, transport: str) -> None:
    source_spec, givers, sources = start("p", ends[0], transport, is_block_major=majors[0])
    target_spec, takers, targets = start("d", ends[1], transport, is_block_major=majors[1])
    try:
        assert any(len(set(page_spaces(spec, 0).values())) == 1 for spec in (source_spec, target_spec))
        prompt = list(range(100, 118))
        num_blocks = -(-len(prompt) // TOKENS)
        blocks = {"g0": [7, 2, 9, 4, 1], "g1": [3, 8, 0, 5, 6]}
        taken = {"g0": [11, 20, 13, 10, 12], "g1": [23, 0, 5, 2, 21]}
        truth = torch.rand(LAYERS, num_blocks, HEADS, TOKENS, CHANNELS)
        for worker in givers:
            for layer, tensor in worker.tensors.items():
                heads = slice(worker.tp * worker.heads, (worker.tp + 1) * worker.heads)
                tensor[blocks["g0" if layer in FULL else "g1"]] = truth[layer][:, heads]
        before = [worker.pool.clone() for worker in takers]
        digest = prompt_digest(prompt)
        pages = dict.fromkeys(range(len(takers)), taken)
        receiving = targets[0].receive(Request("t1", sources[0].address, digest, pages))
        sendings = [endpoint.send("t1", digest) for endpoint in sources]
        for layer in range(LAYERS):
            for sending in sendings:
                sending.ready((layer, layer + 1), (0, len(prompt)), blocks)
        for i, sending in enumerate(sendings):
            sending.commit(None if i else Aux(tokens=(42,)))
        assert isinstance(receiving.wait(PATIENCE_S), Ready)
        for worker, untouched in zip(takers, before, strict=True):
            expected = Worker(target_spec, worker.rank, majors[1])
            expected.pool.copy_(untouched)
            heads = slice(worker.tp * worker.heads, (worker.tp + 1) * worker.heads)
            for layer, tensor in expected.tensors.items():
                # Of a window only the blocks that have one of its last tokens.
                first = 0 if layer in FULL else (len(prompt) - 9) // TOKENS
                ids = taken["g0" if layer in FULL else "g1"][first:]
                tensor[ids] = truth[layer, first:, heads]
            assert torch.equal(worker.pool, expected.pool), "right blocks, and nothing else"
    finally:
        for endpoint in reversed([*sources, *targets]):
            endpoint.close()
