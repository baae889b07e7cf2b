"""SGLang's senders and receivers, with real endpoints over tensors that stand for SGLang's pools."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.test_vllm_cache import FullAttentionSpec, cpu_attention, flash_attention

from baton.adapters.common import WorkerMesh
from baton.adapters.sglang import check_version
from baton.adapters.sglang.cache import (
    BUFFERS,
    GROUP,
    STATES,
    WINDOWS,
    check_heads,
    describe_pool,
    make_pools,
    make_spec,
)
from baton.adapters.sglang.transfers import (
    BOOTSTRAPPING,
    FAILED,
    SUCCESS,
    TRANSFERRING,
    WAITING_FOR_INPUT,
    MetadataRows,
    Receiver,
    Sender,
    TransferFailedError,
    Transfers,
    is_moved,
    request_digest,
    wait_until_quiet,
)
from baton.adapters.vllm import cache as vllm_cache
from baton.adapters.vllm.cache import Store, describe_layers, split_layer
from baton.engine.pages import engine_storage
from baton.errors import BatonError, ConfigError
from baton.plan import Spec, load_cache, parse_layout
from baton.plan.content import allocate
from baton.session import Aux, CheckedPages, Endpoint, EndpointConfig, Ready, Request, Timings, prompt_digest
from baton.transport import NOW, HostFence, open_transport

LAYERS, HEADS, CHANNELS, SLOTS = 3, 12, 8, 256
WHOLE, UNEVEN = [range(LAYERS)], [range(2), range(2, LAYERS)]
LAYOUTS = {
    "tp1": (WHOLE, 1, 1),
    "tp2": (WHOLE, 1, 2),
    "tp3": (WHOLE, 1, 3),
    "tp4": (WHOLE, 1, 4),
    "cp2": (WHOLE, 2, 1),
    "cp2.tp2": (WHOLE, 2, 2),
    "pp2": (UNEVEN, 1, 1),
    "pp2.tp2": (UNEVEN, 1, 2),
    "pp2.cp3": (UNEVEN, 3, 1),
}
"""The layers of each pipeline stage, and the CP and TP sizes."""
WINDOW = 33
CONVOLUTION = (12, 12, 24)
"""Channels of q, k and v."""
ROW, ROWS = 5, 4
CACHED = 7
"""Tokens of every prompt that prefill has already."""
WAIT_S = 180.0


class MHATokenToKVPool:
    """Named and laid out as SGLang's class is: a tensor for each layer, a row for each token slot."""

    def __init__(self, page_size: int, num_heads: int, layers: range) -> None:
        self.page_size, self.start_layer = page_size, layers.start
        shape = (SLOTS + page_size, num_heads, CHANNELS)
        self.k_buffer = [torch.randn(shape) for _ in layers]
        self.v_buffer = [torch.randn(shape) for _ in layers]


class MLATokenToKVPool:
    """The same with latents, which every rank has."""

    def __init__(self, page_size: int, num_heads: int, layers: range) -> None:
        self.page_size, self.start_layer = page_size, layers.start
        self.kv_buffer = [torch.randn(SLOTS + page_size, 1, CHANNELS) for _ in layers]


class DSATokenToKVPool(MLATokenToKVPool):
    """Beside the latents a sparse index: a row for each page, none where a layer has no index."""

    def __init__(self, page_size: int, num_heads: int, layers: range) -> None:
        super().__init__(page_size, num_heads, layers)
        rows = [0 if layer == 1 else SLOTS // page_size + 1 for layer in layers]
        self.index_k_with_scale_buffer = [
            torch.randint(0, 256, (count, page_size * 12), dtype=torch.uint8) for count in rows
        ]


class SWAKVPool:
    """Two pools: layer 1 has full attention, the others have windows."""

    def __init__(self, page_size: int, num_heads: int, layers: range) -> None:
        self.page_size = page_size
        full, windows = ([layer for layer in layers if (layer == 1) is is_full] for is_full in (True, False))
        self.full_kv_pool = MHATokenToKVPool(page_size, num_heads, range(len(full)))
        self.swa_kv_pool = MHATokenToKVPool(page_size, num_heads, range(len(windows)))
        self.layers_mapping = {layer: (index, False) for index, layer in enumerate(full)}
        self.layers_mapping |= {layer: (index, True) for index, layer in enumerate(windows)}


class HybridLinearKVPool:
    """Layers 1 and 2 have attention, layers 0 and 1 a state."""

    def __init__(self, page_size: int, num_heads: int, layers: range) -> None:
        self.page_size = page_size
        full = [layer for layer in layers if layer in (1, 2)]
        self.full_kv_pool = MHATokenToKVPool(page_size, num_heads, range(len(full)))
        self.full_attention_layer_id_mapping = {layer: index for index, layer in enumerate(full)}
        states = [layer for layer in layers if layer in (0, 1)]
        channels = sum(CONVOLUTION) * num_heads // HEADS
        self.mamba_pool = SimpleNamespace(
            mamba_layer_ids=states,
            mamba_cache=SimpleNamespace(
                temporal=torch.randn(len(states), ROWS, num_heads, 4, 6),
                conv=[torch.randn(len(states), ROWS, channels, 3).to(torch.bfloat16)],
            ),
            conv_shard_groups=list(CONVOLUTION),
            conv_slice_axis=0,
            _slot_siblings=(),
        )


class Side:
    """The ranks of one server, in this process."""

    def __init__(
        self,
        name: str,
        stages: list[range],
        cp: int,
        tp: int,
        page_size: int,
        kind: Any,
        trace: Path | None = None,
        timings: Timings = Timings(silence_s=WAIT_S),  # noqa: B008
    ) -> None:
        self.page_size, self.address = page_size, ""
        self.managers: list[Any] = []
        ranks = [[kind(page_size, HEADS // tp, layers) for _ in range(cp * tp)] for layers in stages]
        self.stages = [pools[:tp] for pools in ranks]
        """Of the first CP rank; what the others have is the same."""
        self.rows = [np.zeros((ROWS, ROW), np.uint8) for _ in range(cp * tp * len(stages))]
        num_unlike = 1 if issubclass(kind, MLATokenToKVPool) else tp
        for pools in ranks:
            for index, pool in enumerate(pools):
                given = make_pools(pools[index % num_unlike])
                for buffer, memory in make_pools(pool).items():
                    memory[:] = given[buffer]
        first: Endpoint | None = None
        for rank, pool in enumerate(pool for pools in ranks for pool in pools):
            stage, index = divmod(rank, cp * tp)
            mesh = WorkerMesh(stage, index % tp, len(stages), tp, HEADS, index // tp, cp)
            config = EndpointConfig(
                instance=name,
                spec=make_spec([describe_pool(pools[index], WINDOW, tp) for pools in ranks], mesh),
                rank=mesh.rank,
                secret=b"a secret of the tests",
                coordinator=first.address if first else None,
                epoch=first.config.epoch if first else 0,
                timings=timings,
            )
            endpoint = Endpoint(config, make_pools(pool), open_transport("tcp"))
            first = first or endpoint
            transfers = Transfers(
                endpoint=endpoint,
                caches={(cache.layer, cache.is_state): cache.layer for cache in describe_pool(pool, 1)},
                metadata=MetadataRows([self.rows[rank].ctypes.data], [ROW]),
                has_aux=index == 0 and stage == len(stages) - 1,
                pages=self.pages,
                fence=lambda: NOW,
                trace=trace,
            )
            self.managers.append(SimpleNamespace(transfers=transfers, find_source=self.find, forget=len))
        assert first is not None
        assert first.wait_ready(WAIT_S)
        self.address = first.address
        self.source = ""

    def find(self, bootstrap_addr: str, dp: int) -> str:
        return self.source

    def pages(self, request: Any, num_tokens: int) -> dict[str, Any]:
        """A token has another slot in the pool of windows, and none before the window."""
        pages = request.slots[: num_tokens : self.page_size] // self.page_size
        num_left = (len(request.slots) - WINDOW) // self.page_size
        is_left = np.arange(len(pages)) < num_left
        tables = {GROUP: pages, WINDOWS: np.where(is_left, 0, pages + 2), STATES: np.array([request.state])}
        groups = self.managers[0].transfers.endpoint.config.spec.cache.groups
        return {group: tables[group] for group in groups}

    def request(self, tokens: list[int], first_slot: int) -> Any:
        slots = np.arange(first_slot, first_slot + len(tokens))
        return SimpleNamespace(
            origin_input_ids=tokens,
            extra_key=None,
            input_embeds=None,
            positional_embed_overrides=None,
            pending_bootstrap=False,
            output_ids=[42],
            return_logprob=False,
            slots=slots,
            state=1 + first_slot // 32,
        )

    def content(self, request: Any) -> list[torch.Tensor]:
        """What lies in the request's slots, by kind and layer, all heads."""
        kind = type(self.stages[0][0])
        if kind not in (SWAKVPool, HybridLinearKVPool):
            return self._tokens(self.stages, request.slots)
        found = self._tokens([[pool.full_kv_pool for pool in pools] for pools in self.stages], request.slots)
        if kind is SWAKVPool:
            slots = request.slots[-WINDOW:] + 2 * self.page_size
            return found + self._tokens(
                [[pool.swa_kv_pool for pool in pools] for pools in self.stages], slots
            )
        for pools in self.stages:
            states = [pool.mamba_pool.mamba_cache for pool in pools]
            found += torch.cat([state.temporal[:, request.state] for state in states], dim=1)
            sizes = [size // len(pools) for size in CONVOLUTION]
            parts = [state.conv[0][:, request.state].split(sizes, dim=1) for state in states]
            found += torch.cat([torch.cat(part, dim=1) for part in zip(*parts, strict=True)], dim=1)
        return found

    def _tokens(self, stages: list[list[Any]], slots: Any) -> list[torch.Tensor]:
        found = []
        for buffers in BUFFERS[type(stages[0][0]).__name__]:
            for pools in stages:
                for tensors in zip(*(getattr(pool, buffers) for pool in pools), strict=True):
                    if buffers.startswith("index"):
                        pages = slots[:: self.page_size] // self.page_size
                        found += [tensor[pages] for tensor in tensors[:1] if len(tensor)]
                        continue
                    parts = [tensor[slots] for tensor in tensors]
                    found.append(parts[0] if buffers == "kv_buffer" else torch.cat(parts, dim=1))
        return found

    def load(self, slots: Any) -> list[torch.Tensor]:
        """What lies in these slots, on every rank of the first CP rank."""
        return [tensor[rows].clone() for tensor, rows in self._rows(slots)]

    def store(self, slots: Any, parts: list[torch.Tensor]) -> None:
        for (tensor, rows), part in zip(self._rows(slots), parts, strict=True):
            tensor[rows] = part

    def _rows(self, slots: Any) -> list[tuple[torch.Tensor, Any]]:
        rows = []
        for pool in (pool for pools in self.stages for pool in pools):
            parts = [(pool, slots)]
            if isinstance(pool, SWAKVPool):
                parts = [(pool.full_kv_pool, slots), (pool.swa_kv_pool, slots + 2 * self.page_size)]
            for part, part_rows in parts:
                for buffers in BUFFERS[type(part).__name__]:
                    rows += [(tensor, part_rows) for tensor in getattr(part, buffers)]
        return rows

    def close(self) -> None:
        for manager in reversed(self.managers):
            manager.transfers.endpoint.close()


Pair = Callable[..., tuple[Side, Side]]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    started: list[Side] = []

    def start(source: str, target: str, kind: Any = MHATokenToKVPool, page: int = 1) -> tuple[Side, Side]:
        source_page = page if kind is DSATokenToKVPool else 1
        started.append(Side("prefill", *LAYOUTS[source], source_page, kind, tmp_path / "trace"))
        started.append(Side("decode", *LAYOUTS[target], page, kind))
        started[1].source = started[0].address
        return started[0], started[1]

    yield start
    for side in started:
        side.close()


def poll_until(handles: list[Any], state: int) -> None:
    """Polls as SGLang's schedulers do: the lowest of all ranks counts."""
    limit_s = monotonic() + WAIT_S
    while (found := min(handle.poll() for handle in handles)) != state:
        assert monotonic() < limit_s, f"still {found}"
        sleep(0.01)


def begin(
    source: Side, target: Side, room: int, num_tokens: int = 50, num_held: int = 0
) -> tuple[Any, Any, Any, Any]:
    """A prompt whose target has room: requests, senders and receivers."""
    tokens = [room * 1000 + number for number in range(num_tokens)]
    sent, wanted = source.request(tokens, 16), target.request(tokens, 64)
    senders = [Sender(manager, "", room) for manager in source.managers]
    for sender in senders:
        sender.bind(sent)
    receivers = [Receiver(manager, "", room) for manager in target.managers]
    for receiver in receivers:
        receiver.bind(wanted)
        receiver.init(0)
        assert receiver.poll() == WAITING_FOR_INPUT
        pages = wanted.slots[num_held :: target.page_size] // target.page_size
        receiver.send_metadata(pages, 2, [], num_held)
    poll_until(senders, WAITING_FOR_INPUT)
    return sent, wanted, senders, receivers


def prefill(
    source: Side, request: Any, senders: list[Sender], cuts: list[int], *, hooks: bool = True
) -> None:
    """Computes the prompt in chunks, as SGLang's scheduler does."""
    start = 0
    for end in cuts:
        request.extend_end = end
        for manager, sender in zip(source.managers, senders, strict=True):
            request.disagg_kv_sender = sender
            manager.transfers.begin_step([request])
            if start == 0 and end > CACHED:
                # SGLang sends prefix hits from within the step.
                sender.send([], None, num_kv_tokens=CACHED)
            for layer, is_state in manager.transfers.caches if hooks else ():
                manager.transfers.layer_done(layer, is_state=is_state)
            manager.transfers.end_step()
            is_last = end == len(request.origin_input_ids)
            sender.init(0, 1)
            num_sent = CACHED if start == 0 and end > CACHED else start
            sender.send([], [] if is_last else None, num_kv_tokens=end - num_sent)
        start = end


@pytest.mark.parametrize(
    ("source_layout", "target_layout", "kind", "page"),
    [
        ("tp1", "tp1", MHATokenToKVPool, 1),
        ("tp2", "tp1", MHATokenToKVPool, 1),
        ("tp1", "tp2", MHATokenToKVPool, 16),
        ("tp2", "tp4", MHATokenToKVPool, 1),
        ("tp3", "tp2", MHATokenToKVPool, 1),
        ("tp2", "tp3", MHATokenToKVPool, 1),
        ("tp2", "tp1", MLATokenToKVPool, 16),
        ("pp2", "tp2", MHATokenToKVPool, 1),
        ("tp1", "pp2.tp2", MHATokenToKVPool, 1),
        ("pp2.tp2", "tp1", MLATokenToKVPool, 1),
        ("pp2", "tp2", DSATokenToKVPool, 16),
        ("tp2", "tp3", SWAKVPool, 16),
        ("pp2.tp2", "tp1", SWAKVPool, 1),
        ("tp1", "pp2.tp2", HybridLinearKVPool, 1),
        ("tp3", "tp2", HybridLinearKVPool, 16),
        ("pp2", "tp4", HybridLinearKVPool, 1),
        ("cp2", "tp1", MHATokenToKVPool, 1),
        ("cp2.tp2", "tp3", MHATokenToKVPool, 16),
        ("pp2.cp3", "pp2.tp2", MHATokenToKVPool, 1),
        ("cp2.tp2", "tp1", MLATokenToKVPool, 16),
        ("pp2.cp3", "tp2", DSATokenToKVPool, 16),
        ("cp2", "tp2", SWAKVPool, 16),
        ("cp2.tp2", "pp2", HybridLinearKVPool, 1),
    ],
)
def test_every_byte_arrives(pair: Pair, source_layout: str, target_layout: str, kind: Any, page: int) -> None:
    """The row of metadata is that of the last stage's first rank."""
    source, target = pair(source_layout, target_layout, kind, page)
    stages, cp, tp = LAYOUTS[source_layout]
    source.rows[(len(stages) - 1) * cp * tp][1] = [1, 2, 3, 4, 5]
    for room, hooks in ((1, True), (2, False)):
        sent, wanted, senders, receivers = begin(source, target, room)
        prefill(source, sent, senders, [20, 50], hooks=hooks)
        poll_until(senders, SUCCESS)
        poll_until(receivers, SUCCESS)
        for one, other in zip(source.content(sent), target.content(wanted), strict=True):
            assert torch.equal(one, other)
        assert all(rows[2].tolist() == [1, 2, 3, 4, 5] for rows in target.rows)


def test_context_parallel_ranks_share_the_work(pair: Pair) -> None:
    """All of them have every token; each sends some, and the aux record comes from one."""
    source, target = pair("cp2.tp2", "tp1")
    sent, wanted, senders, receivers = begin(source, target, 1)
    prefill(source, sent, senders, [50])
    poll_until(senders, SUCCESS)
    poll_until(receivers, SUCCESS)
    assert all(sender._sending.copies for sender in senders)
    num_bytes = sum(copy.num_bytes for sender in senders for copy in sender._sending.copies)
    assert num_bytes == sum(part.nbytes for part in target.content(wanted))


def test_a_window_is_written_and_nothing_before_it(pair: Pair) -> None:
    source, target = pair("tp2", "tp1", SWAKVPool, 16)
    (before,) = [pool.swa_kv_pool.k_buffer[0].clone() for pool in target.stages[0]]
    sent, wanted, senders, receivers = begin(source, target, 1)
    prefill(source, sent, senders, [20, 50])
    poll_until(receivers, SUCCESS)
    changed = (target.stages[0][0].swa_kv_pool.k_buffer[0] != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [*(wanted.slots[-WINDOW:] + 2 * target.page_size)]


@pytest.mark.parametrize("kind", [MHATokenToKVPool, SWAKVPool, HybridLinearKVPool])
def test_what_decode_has_is_not_sent(pair: Pair, kind: Any) -> None:
    """A prefix of the tokens, also of those in a window; a state is always sent."""
    source, target = pair("tp1", "tp2", kind, 16)
    held = 32
    before = target.content(target.request([*range(50)], 64))
    sent, wanted, senders, receivers = begin(source, target, 1, num_held=held)
    prefill(source, sent, senders, [50])
    poll_until(receivers, SUCCESS)
    for old, given, got in zip(before, source.content(sent), target.content(wanted), strict=True):
        num_held = {50: held, WINDOW: held - (50 - WINDOW)}.get(len(got), 0)
        assert torch.equal(got, torch.cat([old[:num_held], given[num_held:]]))


@pytest.mark.parametrize(
    ("layout", "kind", "cuts"),
    [
        ("tp1", MHATokenToKVPool, [50]),
        ("tp1", MHATokenToKVPool, [20, 50]),
        ("tp2", SWAKVPool, [20, 50]),
        ("pp2.tp2", MLATokenToKVPool, [50]),
    ],
)
def test_pages_that_sglang_frees_as_duplicates_are_not_read(
    pair: Pair, layout: str, kind: Any, cuts: list[int]
) -> None:
    """Another request has inserted the first 37 tokens into SGLang's tree while this one was computed."""
    source, target = pair(layout, "tp1", kind)
    sent, wanted, senders, receivers = begin(source, target, 1)
    # As on a GPU: the layers are launched, not computed, when they are offered.
    fence = HostFence()
    for manager in source.managers:
        manager.transfers.fence = lambda: fence
    num_shared, start = 37, 0
    for end in cuts:
        sent.extend_end = end
        for manager, sender in zip(source.managers, senders, strict=True):
            sent.disagg_kv_sender = sender
            manager.transfers.begin_step([sent])
            for layer, is_state in manager.transfers.caches:
                manager.transfers.layer_done(layer, is_state=is_state)
            manager.transfers.end_step()
        # SGLang's checkpoint: the tree's slots in the row, and the request's own ones freed.
        own = sent.slots[start : min(end, num_shared)].copy()
        tree = np.arange(150 + start, 150 + start + len(own))
        source.store(tree, source.load(own))
        sent.slots[start : start + len(own)] = tree
        for manager, sender in zip(source.managers, senders, strict=True):
            sent.disagg_kv_sender = sender
            manager.transfers.follow(sent)
            assert not sender._sending.reading().get(GROUP, frozenset()) & {*own}
        # The next batch writes them.
        source.store(own, [torch.full_like(part, -1.0) for part in source.load(own)])
        for sender in senders:
            sender.init(0, 1)
            sender.send([], [] if end == 50 else None, num_kv_tokens=end - start)
        start = end
    fence.set()
    poll_until(senders, SUCCESS)
    poll_until(receivers, SUCCESS)
    for one, other in zip(source.content(sent), target.content(wanted), strict=True):
        assert torch.equal(one, other)


def test_a_batch_that_is_computed_in_parts_is_not_handed_over(pair: Pair) -> None:
    """As with --enable-two-batch-overlap: a layer is computed for one half after the other."""
    source, target = pair("tp1", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    transfers = source.managers[0].transfers
    sent.extend_end, sent.disagg_kv_sender = 50, senders[0]
    transfers.begin_step([sent])
    halves = object(), object()
    transfers.layer_done(0, batch=halves[0])
    transfers.layer_done(0, batch=halves[0])
    assert senders[0].is_open, "attention to a prefix in pieces"
    transfers.layer_done(0, batch=halves[1])
    transfers.end_step()
    senders[0].init(0, 1)
    senders[0].send([], [], num_kv_tokens=50)
    poll_until(senders, FAILED)
    poll_until(receivers, FAILED)
    with pytest.raises(TransferFailedError, match="layer 0 for several parts of a batch"):
        senders[0].failure_exception()


@pytest.mark.parametrize("hooks", [True, False])
def test_pages_that_the_pool_does_not_have_fail_their_prompt_alone(pair: Pair, hooks: bool) -> None:
    source, target = pair("tp1", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    sent.slots += 10 * SLOTS
    if hooks:
        sent.extend_end, sent.disagg_kv_sender = 50, senders[0]
        source.managers[0].transfers.begin_step([sent])
        assert source.managers[0].transfers.step is None
    senders[0].init(0, 1)
    senders[0].send([], [], num_kv_tokens=50)
    poll_until(senders, FAILED)
    poll_until(receivers, FAILED)
    with pytest.raises(TransferFailedError, match="its pools have"):
        senders[0].failure_exception()


def test_pages_that_stay_are_read_on(pair: Pair) -> None:
    """Nothing is withdrawn: what is copied while SGLang inserts the prompt goes on."""
    source, target = pair("tp1", "tp1", SWAKVPool)
    sent, wanted, senders, receivers = begin(source, target, 1)
    transfers, fence = source.managers[0].transfers, HostFence()
    transfers.fence = lambda: fence
    sent.extend_end, sent.disagg_kv_sender = 50, senders[0]
    transfers.begin_step([sent])
    transfers.end_step()
    offered = senders[0]._sending.chunks_read()
    transfers.follow(sent)
    assert senders[0]._sending.chunks_read() == offered
    fence.set()
    senders[0].init(0, 1)
    senders[0].send([], [], num_kv_tokens=50)
    poll_until(receivers, SUCCESS)
    assert all(map(torch.equal, source.content(sent), target.content(wanted)))


def test_a_layer_leaves_when_its_state_is_there_too(pair: Pair) -> None:
    source, target = pair("tp1", "tp1", HybridLinearKVPool)
    sent, _, senders, receivers = begin(source, target, 1)
    transfers = source.managers[0].transfers
    sent.extend_end, sent.disagg_kv_sender = 50, senders[0]
    transfers.begin_step([sent])
    done = [(2, False), (1, False), (0, True), (1, True)]
    seen = []
    for layer, is_state in done:
        transfers.layer_done(layer, is_state=is_state)
        seen.append([layers for layers, _, _ in senders[0].steps[-1].offered])
    assert seen == [[(2, 3)], [(2, 3)], [(2, 3), (0, 1)], [(2, 3), (0, 1), (1, 2)]]
    transfers.end_step()
    senders[0].init(0, 1)
    senders[0].send([], [], num_kv_tokens=50)
    poll_until(receivers, SUCCESS)


def receive(config: EndpointConfig, pools: Any, table: dict[str, Any]) -> tuple[Aux, list[torch.Tensor]]:
    """What another engine gets of 50 tokens from SGLang's pp2.tp2, and what was in SGLang's slots."""
    source = Side("prefill", *LAYOUTS["pp2.tp2"], 1, MHATokenToKVPool)
    endpoint = Endpoint(config, pools, open_transport("tcp"))
    tokens = list(range(50))
    sent = source.request(tokens, 16)
    sent.return_logprob = True
    sent.logprob = SimpleNamespace(
        output_token_logprobs_val=[-0.5],
        output_top_logprobs_idx=[[42, 7]],
        output_top_logprobs_val=[[-0.5, -1.5]],
    )
    senders = [Sender(manager, "", 3) for manager in source.managers]
    for sender in senders:
        sender.bind(sent)
    receiving = endpoint.receive(Request("3", source.address, prompt_digest(tokens), {0: table}))
    try:
        poll_until(senders, WAITING_FOR_INPUT)
        prefill(source, sent, senders, [20, 50])
        poll_until(senders, SUCCESS)
        assert receiving.wait_released(WAIT_S)
        assert isinstance(receiving.state, Ready)
        return receiving.state.aux, source.content(sent)
    finally:
        endpoint.close()
        source.close()


def test_the_storage_of_our_engine_receives_it() -> None:
    """One component for all layers, K and V fused, heads before tokens, pages of 16."""
    cache = load_cache(f"paged:layers={LAYERS},heads={HEADS},dim={CHANNELS}")
    spec = Spec(parse_layout("tp1"), cache, engine_storage(cache, 16, "fp32").with_pages({"tokens": 8}))
    pools = {name: memory for (_, name), memory in allocate(spec, 0, "target").items()}
    pages = np.array([5, 2, 7, 1])
    config = EndpointConfig("decode", spec, 0, b"a secret of the tests")
    aux, content = receive(config, pools, {"tokens": pages})
    assert (aux.tokens, aux.logprobs) == ((42,), ({42: -0.5, 7: -1.5},))
    stored = pools["kv"].view(np.float32).reshape(LAYERS, 8, 2, HEADS, 16, CHANNELS)[:, pages]
    found = stored.transpose(2, 0, 1, 4, 3, 5).reshape(2 * LAYERS, 64, HEADS, CHANNELS)[:, :50]
    for one, other in zip(content, found, strict=True):
        assert np.array_equal(one.numpy(), other)


@pytest.mark.parametrize("kernel", [flash_attention, cpu_attention])
def test_the_blocks_of_vllm_receive_it(kernel: Store) -> None:
    """They are what a kernel of vLLM would have stored there; kernels lay blocks out in unlike ways."""
    raw = torch.zeros(LAYERS, 8, HEADS, 16, 2 * CHANNELS)
    caches = {f"layers.{layer}.attn": cache for layer, cache in enumerate(raw)}
    group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=FullAttentionSpec())
    layers = [
        part
        for layer in describe_layers(caches, [group], 8)
        for part in split_layer(layer, caches[layer.name], kernel)
    ]
    spec = vllm_cache.make_spec([layers], WorkerMesh(0, 0, 1, 1, HEADS))
    config = EndpointConfig("decode", spec, 0, b"a secret of the tests")
    blocks = torch.tensor([5, 2, 7, 1])
    _, content = receive(config, vllm_cache.make_pools(caches), {"blocks.0": blocks.numpy()})
    slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()[:50]
    for layer in range(LAYERS):
        wanted = torch.zeros_like(raw[layer])
        kernel(content[layer], content[LAYERS + layer], wanted, slots)
        assert torch.equal(raw[layer], wanted)


def test_nothing_is_offered_before_decode_has_room(pair: Pair) -> None:
    source, target = pair("tp1", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    sent.pending_bootstrap = True
    sent.extend_end, sent.disagg_kv_sender = 50, senders[0]
    source.managers[0].transfers.begin_step([sent])
    assert source.managers[0].transfers.step is None
    senders[0].init(0, 1)
    senders[0].send([], [], num_kv_tokens=50)
    poll_until(receivers, SUCCESS)


def test_a_stage_may_compute_before_it_is_granted(pair: Pair) -> None:
    """SGLang takes the first stage's state for all of them, and ends on a state that goes back."""
    source, target = pair("pp2", "tp1")
    tokens = list(range(50))
    sent, wanted = source.request(tokens, 16), target.request(tokens, 64)
    senders = [Sender(manager, "", 1) for manager in source.managers]
    for sender in senders:
        sender.bind(sent)
        assert sender.poll() == BOOTSTRAPPING
        sender.init(0, 1)
        assert sender.poll() == WAITING_FOR_INPUT
    prefill(source, sent, senders, [50])
    receiver = Receiver(target.managers[0], "", 1)
    receiver.bind(wanted)
    receiver.init(0)
    receiver.send_metadata(wanted.slots, 2, [], 0)
    poll_until([receiver], SUCCESS)
    assert all(map(torch.equal, source.content(sent), target.content(wanted)))


def test_an_abort_fails_both_sides_when_pages_are_quiet(pair: Pair) -> None:
    source, target = pair("tp2", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    prefill(source, sent, senders, [20])
    for sender in senders:
        sender.abort()
        assert not sender._sending.reading()
    poll_until(receivers, FAILED)
    assert receivers[0]._receiving.is_released
    with pytest.raises(TransferFailedError, match="aborted at prefill"):
        receivers[0].failure_exception()
    # The id of a failed transfer is not used again; another one is served.
    sent, wanted, senders, receivers = begin(source, target, 2)
    prefill(source, sent, senders, [50])
    poll_until(receivers, SUCCESS)
    receivers[0].kv_mgr.transfers.endpoint.counts()
    assert all(map(torch.equal, source.content(sent), target.content(wanted)))


def test_pages_are_not_written_before_decodes_last_forward_has_ended(pair: Pair) -> None:
    """With overlap a finished request may have one more forward in flight, and its slots are free."""
    source, target = pair("tp1", "tp1")
    fence = HostFence()
    target.managers[0].transfers.fence = lambda: fence
    tokens = list(range(50))
    sent, wanted = source.request(tokens, 16), target.request(tokens, 64)
    sender, receiver = Sender(source.managers[0], "", 1), Receiver(target.managers[0], "", 1)
    sender.bind(sent)
    receiver.bind(wanted)
    receiver.init(0)
    receiver.send_metadata(wanted.slots, 2, [], 0)
    for _ in range(2):
        # Behind the request, and behind what it brought about.
        is_done = Event()
        target.managers[0].transfers.endpoint._loop.post(is_done.set)
        assert is_done.wait(WAIT_S)
    assert not receiver._receiving.is_asked
    fence.set()
    poll_until([sender], WAITING_FOR_INPUT)
    prefill(source, sent, [sender], [50])
    poll_until([receiver], SUCCESS)
    assert all(map(torch.equal, source.content(sent), target.content(wanted)))


def test_a_request_that_decode_gives_up_ends_at_prefill(pair: Pair) -> None:
    source, target = pair("tp1", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    receivers[0].abort()
    assert receivers[0].poll() in (TRANSFERRING, FAILED)
    poll_until(senders, FAILED)
    with pytest.raises(TransferFailedError, match="aborted at decode"):
        senders[0].failure_exception()
    prefill(source, sent, senders, [50])
    poll_until(receivers, FAILED)


def test_an_abort_after_the_last_byte_is_not_lost(pair: Pair) -> None:
    """Also after one rank has shown Success: SGLang may wait for the others."""
    source, target = pair("tp1", "tp1")
    sent, _, senders, receivers = begin(source, target, 1)
    prefill(source, sent, senders, [50])
    poll_until(senders, SUCCESS)
    poll_until(receivers, SUCCESS)
    receivers[0].abort()
    assert receivers[0].poll() == FAILED
    with pytest.raises(TransferFailedError, match="aborted at decode"):
        receivers[0].failure_exception()


def test_prompts_end_when_the_first_rank_has_left(pair: Pair) -> None:
    """It was closed, and no verdict comes; copies that wait for the forward are cancelled."""
    source, target = pair("tp2", "tp1")
    sent, _, senders, _ = begin(source, target, 1)
    fence = HostFence()
    sent.extend_end = 20
    for manager, sender in zip(source.managers, senders, strict=True):
        manager.transfers.fence = lambda: fence
        sent.disagg_kv_sender = sender
        manager.transfers.begin_step([sent])
        manager.transfers.end_step()
    source.managers[0].transfers.endpoint.close()
    poll_until(senders[1:], FAILED)
    senders[1].abort()
    assert not senders[1]._sending.reading()
    late = Sender(source.managers[1], "", 2)
    late.bind(source.request([1, 2, 3], 80))
    poll_until([late], FAILED)
    with pytest.raises(TransferFailedError, match="was closed"):
        late.failure_exception()


def test_pages_that_do_not_become_quiet_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs an Exception, and uses the pages."""
    monkeypatch.setattr("baton.adapters.sglang.transfers.QUIET_S_MAX", 0.01)
    with pytest.raises(SystemExit, match=r"transfer 5: its pages are still read after 0\.01 s"):
        wait_until_quiet(Event().wait, 5, "read")


def test_a_prompt_that_decode_never_asks_for_ends() -> None:
    """Its half was lost, or decode was refused; polls alone do not keep it."""
    source = Side("prefill", *LAYOUTS["tp1"], 1, MHATokenToKVPool, timings=Timings(offer_s=1.0))
    sender = Sender(source.managers[0], "", 7)
    sender.bind(source.request([1, 2, 3], 16))
    try:
        assert sender.poll() == BOOTSTRAPPING
        poll_until([sender], FAILED)
        with pytest.raises(TransferFailedError, match="deadline passed at offer"):
            sender.failure_exception()
    finally:
        source.close()


def test_other_prompts_are_refused(pair: Pair) -> None:
    source, target = pair("tp1", "tp1")
    sender, receiver = Sender(source.managers[0], "", 1), Receiver(target.managers[0], "", 1)
    sender.bind(source.request([1, 2, 3], 16))
    wanted = target.request([1, 2, 4], 64)
    receiver.bind(wanted)
    receiver.init(0)
    receiver.send_metadata(wanted.slots, 2, [], 0)
    poll_until([receiver], FAILED)
    with pytest.raises(TransferFailedError, match="prompt"):
        receiver.failure_exception()


def test_pages_have_moved_if_a_token_that_was_offered_has_another() -> None:
    """A window may have left tokens behind, and tokens may have come that were not offered."""
    offered = CheckedPages(pages=np.array([4, 5]), windows=np.array([6, 7]))
    assert not is_moved(offered, CheckedPages(pages=np.array([4, 5, 9]), windows=np.array([0, 7, 8])))
    assert is_moved(offered, CheckedPages(pages=np.array([4, 9, 5]), windows=np.array([6, 7, 8])))
    assert is_moved(offered, CheckedPages(pages=np.array([4, 5]), windows=np.array([6, 9])))


def test_embeddings_are_part_of_the_prompt(pair: Pair) -> None:
    """SGLang puts 1 in the place of each token."""
    source, _ = pair("tp1", "tp1")
    prompts = [source.request([1, 1], 16) for _ in range(3)]
    for prompt, value in zip(prompts[1:], (0.25, 0.5), strict=True):
        prompt.input_embeds = [[value] * 4] * 2
    assert len({request_digest(prompt) for prompt in prompts}) == 3
    prompts[0].positional_embed_overrides = object()
    sender = Sender(source.managers[0], "", 1)
    sender.bind(prompts[0])
    assert sender.poll() == FAILED
    with pytest.raises(TransferFailedError, match="positional_embed_overrides cannot be handed over"):
        sender.failure_exception()


def test_unlike_metadata_and_unknown_versions_are_refused() -> None:
    row = np.zeros((1, ROW), np.uint8)
    with pytest.raises(BatonError, match="6 bytes and ours 5"):
        MetadataRows([row.ctypes.data], [ROW]).write(0, b"123456")
    with pytest.raises(ConfigError, match=r"SGLang 0\.4\.1: this Baton knows"):
        check_version("0.4.1")
    with pytest.raises(ConfigError, match="kind SimpleNamespace"):
        describe_pool(SimpleNamespace())


def test_windows_and_states_that_cannot_be_handed_over_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"windows of 0 tokens; .* --disable-hybrid-swa-memory"):
        describe_pool(SWAKVPool(1, HEADS, WHOLE[0]))
    check_heads(4, 8, 4)
    check_heads(4, 4, 8)
    with pytest.raises(ConfigError, match=r"TP 8 with 8 KV heads .* and 4 .* TP 4 or less"):
        check_heads(4, 8, 8)
    pool = HybridLinearKVPool(1, HEADS, WHOLE[0])
    pool.mamba_pool._slot_siblings = (SimpleNamespace(),)
    with pytest.raises(ConfigError, match="kind SimpleNamespace beside those of Mamba"):
        describe_pool(pool)
