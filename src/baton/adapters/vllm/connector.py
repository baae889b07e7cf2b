"""The class that vLLM calls, in its scheduler and in every worker.

Worker 0 of an engine hosts the coordinator. The others learn its address and epoch over vLLM's own groups.
Data-parallel engines share no group: each is an instance of its own, with a port of its own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from baton.adapters.common import (
    ConnectorConfig,
    WorkerMesh,
    fences,
    gather_stages,
    model_fingerprint,
    open_endpoint,
)
from baton.adapters.vllm.cache import (
    StateForm,
    Store,
    describe_layers,
    is_state,
    layer_spec,
    make_pools,
    make_spec,
    split_layer,
    window_of,
)
from baton.adapters.vllm.scheduler import SchedulerSide, WindowPins
from baton.adapters.vllm.worker import WorkerSide
from baton.errors import ConfigError
from baton.session.allocation import CacheAllocation

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 has no such label
    CacheHitSource = None

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
logger = logging.getLogger("vllm.baton")


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """Baton's hand-overs as a vLLM KV connector."""

    _cache_hit_source = CacheHitSource and CacheHitSource.P2P
    """The label of what was handed over in vLLM's metrics."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = ConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        _check_supported(vllm_config)
        drafts = vllm_config.speculative_config
        self._has_hooks = drafts is None or drafts.num_speculative_tokens == 1
        """Whether layers leave when they are computed. With more guesses draft layers run several times in a
        step, so all leave at its end."""
        self._groups: tuple[int, ...] = kv_cache_config.transfer_group_ids
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            sockets = self._sockets()
            address = f"{sockets.host}:{sockets.port}" if sockets.port else ""
            num_left = 0 if self._config.split_kv else 1
            self._scheduler = SchedulerSide(
                self._groups,
                address,
                self._config.offer_s / 4,
                num_left,
                has_states=_has_states(kv_cache_config),
            )
        else:
            self._transport = self._config.open_transport()
            self._allocation: CacheAllocation | None = None

    def _sockets(self) -> Any:
        transfer, parallel = self._kv_transfer_config, self._vllm_config.parallel_config
        return self._config.sockets(transfer.kv_role, transfer.kv_port, parallel.data_parallel_index)

    def _url(self) -> str:
        """Where routers reach this engine: the server's URL, and which of its data-parallel engines."""
        parallel, url = self._vllm_config.parallel_config, self._config.url.rstrip("/")
        return f"{url}/dp{parallel.data_parallel_index}" if url and parallel.data_parallel_size > 1 else url

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outside of tokens, so that tensor parallelism may differ between the sides."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A layer's hook is Python, which a full graph would skip."""
        return True

    # The scheduler's side.

    @property
    def scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker was asked what the scheduler decides"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        windows, block_tokens = {}, 0
        for group in self._groups:
            spec = self._kv_cache_config.kv_cache_groups[group].kv_cache_spec
            if window := window_of(spec):
                windows[group], block_tokens = window, spec.block_size
        if windows:
            self.scheduler_side.pins = WindowPins(kv_cache_manager, windows, block_tokens)

    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.add_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self.scheduler_side.num_to_load(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All of them; vLLM would zero the blocks of the others after they were written (not 0.31)."""
        return self._groups

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        ids = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())
        self.scheduler_side.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return self.scheduler_side.build_step(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.finished(request)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler_side.sent(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_messages

    # The worker's side.

    @property
    def worker_side(self) -> WorkerSide:
        assert self._worker is not None, "a KV cache is registered before the first step"
        return self._worker

    def get_mem_pool_context(self) -> CacheAllocation | None:
        """Where the transport copies only between its own memory, vLLM's cache is allocated there."""
        if self._transport.capabilities.needs_allocate and not torch.cuda.is_available():
            self._allocation = CacheAllocation(self._transport)
        return self._allocation

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens this worker's endpoint over vLLM's memory."""
        cache, pp, tp = self._kv_cache_config, get_pp_group(), get_tp_group()
        form = _state_form(self._vllm_config) if _has_states(cache) else StateForm()
        layers = describe_layers(kv_caches, cache.kv_cache_groups, cache.num_blocks, form)
        if self._config.split_kv:
            layers = tuple(
                part
                for layer in layers
                for part in split_layer(layer, kv_caches[layer.name], self._kernel(layer.name))
            )
        mesh = WorkerMesh.of(pp, tp, self._vllm_config.model_config.get_total_num_kv_heads())
        spec = make_spec(gather_stages(layers, pp), mesh)
        transport, options = self._transport, self._config
        if self._allocation is not None and not self._allocation.num_bytes:
            raise ConfigError(
                f"transport '{transport.name}' copies only between memory that it allocated, and vLLM has "
                "allocated its cache in another way; use tcp"
            )
        endpoint = open_endpoint(
            *(options, spec, make_pools(kv_caches), transport, (pp, tp)),
            instance=options.instance or str(self._kv_transfer_config.engine_id),
            role=ROLES[self._kv_transfer_config.kv_role],
            url=self._url(),
            fingerprint=_fingerprint(self._vllm_config, options.fingerprint),
            sockets=self._sockets(),
        )
        logger.info(
            "baton: rank %d of %s is at %s, %s", mesh.rank, spec.layout, endpoint.address, transport.name
        )
        self._worker = WorkerSide(
            endpoint,
            layers,
            self._groups,
            policy=options.overlap,
            is_verified=options.verify,
            trace=options.trace_file(endpoint.config.instance, mesh.rank),
            fence=fences(next(iter(kv_caches.values())).is_cuda),
        )

    def _kernel(self, layer_name: str) -> Store:
        """What stores the keys and values of a layer."""
        attention = self._vllm_config.compilation_config.static_forward_context[layer_name]
        store = getattr(attention.impl, "do_kv_cache_update", None)
        if store is None:
            backend = attention.get_attn_backend().get_name()
            raise ConfigError(
                f"split_kv: attention backend {backend} does not say where it stores K and V; use another "
                "one (--attention-backend), or leave split_kv out"
            )
        return partial(store, attention)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker_side.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Loads begin here: vLLM calls `start_load_kv` after the forward."""
        super().bind_connector_metadata(connector_metadata)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._has_hooks:
            self.worker_side.layer_done(layer_name)

    def wait_for_save(self) -> None:
        self.worker_side.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        step = self._connector_metadata
        is_idle = step is not None and not step.has_forward
        results = self.worker_side.take_results(finished_req_ids, is_idle=is_idle)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Nothing: the workers have found each other."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _check_supported(vllm_config: VllmConfig) -> None:
    """Raises ConfigError on parallelism that the connector does not know."""
    parallel = vllm_config.parallel_config
    sizes: Iterable[tuple[str, int]] = (
        ("decode context parallel", parallel.decode_context_parallel_size),
        ("prefill context parallel", parallel.prefill_context_parallel_size),
    )
    for name, size in sizes:
        if size > 1:
            raise ConfigError(f"{name} of size {size}: the KV cache cannot be handed over yet; use size 1")
    if parallel.use_ubatching:
        option = "--enable-dbo" if parallel.enable_dbo else f"--ubatch-size {parallel.ubatch_size}"
        raise ConfigError(
            f"{option}: each layer runs once for every part of a batch, and would be sent after the first "
            f"one; start without {option}"
        )


def _has_states(cache: KVCacheConfig) -> bool:
    """Whether some layers are recurrent."""
    return any(
        is_state(layer_spec(name, group.kv_cache_spec))
        for group in cache.kv_cache_groups
        for name in group.layer_names
    )


def _state_form(vllm_config: VllmConfig) -> StateForm:
    mamba = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    config = vllm_config.model_config.hf_text_config
    # The names that models give it.
    known = (getattr(config, name, 0) for name in ("mamba_n_groups", "n_groups", "mamba_ngroups"))
    return StateForm(next(filter(None, known), 1), mamba.is_conv_state_dim_first())


def _fingerprint(vllm_config: VllmConfig, weights: str) -> str:
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    changes = {
        "config": model.hf_overrides,
        "quantization": model.quantization,
        "revision": model.revision,
        "weights": weights or (load_format if load_format == "dummy" else ""),
    }
    return model_fingerprint(model.model, model.hf_text_config.to_dict(), changes)
