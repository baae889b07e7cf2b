"""The classes and hooks that SGLang calls.

Every data-parallel group is an instance of its own; its first rank hosts the coordinator, and the others
learn its address over SGLang's own groups. SGLang's bootstrap server, unchanged, is where decode finds it:
the coordinator is registered there as the one rank of its group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import requests
import sglang
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVReceiver, BaseKVSender, StateType
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg, get_exec, get_model, get_parallel, get_serving

from baton.adapters.common import (
    ConnectorConfig,
    WorkerMesh,
    fences,
    gather_stages,
    model_fingerprint,
    open_endpoint,
)
from baton.adapters.sglang import check_version
from baton.adapters.sglang.cache import (
    GROUP,
    MAMBA2,
    STATES,
    WINDOWS,
    check_heads,
    describe_pool,
    make_pools,
    make_spec,
)
from baton.adapters.sglang.transfers import MetadataRows, Receiver, Sender, Transfers
from baton.errors import ConfigError
from baton.settings import sglang_options

NAME = "baton"
ROUTE_S = 5.0
"""How long an answer of a bootstrap server is used: a prefill server takes longer to start again."""
ANSWER_S_MAX = 5.0
REGISTER_AGAIN_S = 0.5

logger = logging.getLogger("sglang.baton")


class BatonSender(Sender, BaseKVSender):
    """A prompt that this rank sends."""


class BatonReceiver(Receiver, BaseKVReceiver):
    """A prompt that this rank receives."""


@dataclass(slots=True)
class BootstrapAnswer:
    """What a bootstrap server has answered."""

    source: str
    until_s: float


class BatonManager(BaseKVManager):
    """The interface of SGLang's queues to a backend; the queue's hook opens `transfers`."""

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.transfers: Transfers
        self.prefill_info_table: dict[str, Any] = {}
        self._routes: dict[tuple[str, int], BootstrapAnswer] = {}

    def open(self, queue: Any, role: str) -> None:
        """Opens this rank's endpoint over the memory of SGLang's pool."""
        check_version(sglang.__version__)
        check_hooks()
        self.transfers = open_transfers(queue, self.kv_args, role)
        if role == "prefill" and self.transfers.endpoint.coordinator is not None:
            threading.Thread(target=self.register_to_bootstrap, daemon=True).start()

    def register_to_bootstrap(self) -> None:
        """Registers the coordinator's address at the bootstrap server of this prefill server."""
        parallel, disagg, serving = get_parallel(), get_disagg(), get_serving()
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(serving.host, serving.host)
        if parallel.dist_init_addr:
            host = parallel.dist_init_addr.rpartition(":")[0]
        rank_ip, _, rank_port = self.transfers.endpoint.address.rpartition(":")
        row = {
            **dict.fromkeys(("attn_tp_size", "attn_cp_size", "pp_size"), 1),
            **dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "pp_rank"), 0),
            "attn_dp_size": parallel.attn_dp_size,
            "attn_dp_rank": parallel.attn_dp_rank,
            "system_dp_size": parallel.dp_size,
            "system_dp_rank": self.kv_args.system_dp_rank or 0,
            "rank_ip": rank_ip,
            "rank_port": int(rank_port),
            "page_size": self.kv_args.page_size,
            "kv_cache_dtype": self.kv_args.kv_cache_dtype_str,
            "prefill_http_port": serving.port,
        }
        url = f"http://{host}:{disagg.disaggregation_bootstrap_port}/route"
        while True:
            try:
                requests.put(url, json=row, timeout=ANSWER_S_MAX).raise_for_status()
                return
            except requests.RequestException as error:
                logger.warning(
                    "baton: cannot register at the bootstrap server %s, trying again: %s", url, error
                )
                time.sleep(REGISTER_AGAIN_S)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server is known; it is asked if not."""
        if bootstrap_addr not in self.prefill_info_table:
            try:
                info = _get_route(bootstrap_addr, -1, -1)
            except ConfigError as error:
                logger.warning("baton: %s", error)
                return False
            self.prefill_info_table[bootstrap_addr] = SimpleNamespace(
                dp_size=int(info["dp_size"]), follow_bootstrap_room=True
            )
        return True

    def find_source(self, bootstrap_addr: str, prefill_dp_rank: int) -> str:
        """The coordinator of a data-parallel group of a prefill server."""
        key, now = (bootstrap_addr, prefill_dp_rank), time.monotonic()
        if key not in self._routes or self._routes[key].until_s < now:
            route = _get_route(bootstrap_addr, prefill_dp_rank, 0)
            self._routes[key] = BootstrapAnswer(f"{route['rank_ip']}:{route['rank_port']}", now + ROUTE_S)
        return self._routes[key].source

    def forget(self, bootstrap_addr: str) -> None:
        """Asks a prefill server anew next time: it may have started again."""
        self.prefill_info_table.pop(bootstrap_addr, None)
        for key in [key for key in self._routes if key[0] == bootstrap_addr]:
            del self._routes[key]

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        """A retracted request asks prefill again under an id that has been used."""
        receiver.abort()


def _get_route(bootstrap_addr: str, dp: int, rank: int) -> Any:
    """A row of a bootstrap server's table, or with -1 what it says of the whole server."""
    ranks = {"prefill_cp_rank": rank, "target_tp_rank": rank, "target_pp_rank": rank}
    try:
        answer = requests.get(
            f"http://{bootstrap_addr}/route", {"prefill_dp_rank": dp, **ranks}, timeout=ANSWER_S_MAX
        )
        answer.raise_for_status()
        return answer.json()
    except requests.RequestException as error:
        raise ConfigError(f"cannot reach the prefill server at {bootstrap_addr}: {error}") from None


def open_transfers(queue: Any, kv_args: Any, role: str) -> Transfers:
    """The endpoint of this rank, over the pool of a queue."""
    scheduler, pool, parallel = queue.scheduler, queue.token_to_kv_pool, get_parallel()
    config = ConnectorConfig.parse(sglang_options(), "BATON_SGLANG")
    _check_supported(queue, kv_args)
    pp, cp, tp = parallel.pp_group, parallel.attn_cp_group, parallel.attn_tp_group
    mesh = WorkerMesh.of(pp, tp, scheduler.model_config.get_total_num_kv_heads(), cp)
    model = scheduler.model_config.hf_text_config
    num_groups = getattr(model, MAMBA2.get(model.model_type, ""), 0)
    caches = describe_pool(pool, scheduler.sliding_window_size or 0, mesh.tp_size, num_groups)
    dp = (kv_args.system_dp_rank or 0) if parallel.dp_size > 1 else parallel.attn_dp_rank
    transport = config.open_transport()
    if transport.capabilities.needs_allocate:
        raise ConfigError(f"transport {transport.name!r} needs memory of its own; use tcp with SGLang")
    spec = make_spec(gather_stages(caches, pp), mesh)
    endpoint = open_endpoint(
        *(config, spec, make_pools(pool), transport, (pp, cp, tp)),
        instance=config.instance or f"sglang-{role}-{get_serving().port}-dp{dp}",
        role=role,
        url=config.url,
        fingerprint=_fingerprint(scheduler.model_config, config.fingerprint),
        sockets=config.sockets("kv_consumer", 0, dp),
    )
    logger.info("baton: rank %d of %s is at %s, %s", mesh.rank, spec.layout, endpoint.address, transport.name)

    return Transfers(
        endpoint=endpoint,
        caches={(cache.layer, cache.is_state): cache.layer for cache in caches},
        metadata=MetadataRows(kv_args.aux_data_ptrs, kv_args.aux_item_lens),
        has_aux=mesh.tp == mesh.cp == 0 and mesh.pp == mesh.pp_size - 1,
        pages=partial(page_tables, scheduler, spec.cache.groups),
        fence=fences(torch.device(pool.device).type == "cuda", lambda: scheduler.forward_stream),
        policy=config.overlap,
        is_verified=config.verify,
        trace=config.trace_file(endpoint.config.instance, mesh.rank),
    )


def page_tables(scheduler: Any, groups: Collection[str], request: Any, num_tokens: int) -> dict[str, Any]:
    """The page ids of a request's first so many tokens, by group; before a window they are 0."""
    requests, allocator = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    row, page = request.kv.req_pool_idx, allocator.page_size
    slots = requests.req_to_token[row, :num_tokens:page]
    tables = {}
    if GROUP in groups:
        tables[GROUP] = allocator.translate_kv_indices_for_transfer(slots) // page
    if WINDOWS in groups:
        tables[WINDOWS] = allocator.translate_swa_indices_for_transfer(slots) // page
    if STATES in groups:
        states = requests.req_index_to_mamba_index_mapping[row].view(1)
        tables[STATES] = requests.translate_mamba_indices(states)
    return {group: ids.cpu().numpy() for group, ids in tables.items()}


def _check_supported(queue: Any, kv_args: Any) -> None:
    """Raises ConfigError on what cannot be handed over."""
    parallel, disagg, scheduler = get_parallel(), get_disagg(), queue.scheduler
    follow = "follow_bootstrap_room"
    known = (StateType.DSA, StateType.SWA, StateType.MAMBA)
    states = [str(state.value) for state in kv_args.state_types if state not in known]
    if StateType.SWA in kv_args.state_types:
        model = scheduler.model_config
        heads = model.get_total_num_kv_heads(), model.get_swa_num_kv_heads(1)
        check_heads(*heads, parallel.attn_tp_size)
    is_hierarchical = getattr(scheduler, "enable_decode_hicache", False)
    query = envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK
    refused = {
        # Its queues agree on polls within attention TP only.
        f"context parallelism of size {parallel.attn_cp_size} at decode": parallel.attn_cp_size > 1
        and disagg.disaggregation_mode == "decode",
        "context parallelism that shares its group with TP": parallel.enable_cp_tp_group_sharing,
        f"decode context parallelism of size {parallel.attn_dcp_size}": parallel.attn_dcp_size > 1,
        "speculative decoding with a draft cache": queue.draft_token_to_kv_pool is not None,
        f"state of kind {', '.join(states)}": bool(states),
        "--enable-lora": scheduler.enable_lora,
        # A layer would leave after the first half of the batch.
        "--enable-two-batch-overlap": get_exec().overlap.enable_two_batch_overlap
        and disagg.disaggregation_mode == "prefill",
        "--enable-pd-role-switch": disagg.enable_pd_role_switch,
        # Decode's ranks get the metadata of one prefill rank, with the sum of its pages from token 0 on.
        "--disaggregation-enable-kv-checksum (set verify in BATON_SGLANG)": (
            disagg.disaggregation_enable_kv_checksum
        ),
        "a hierarchical cache at decode": is_hierarchical,
        # SGLang asks its own manager for the data-parallel rank; decode cannot know yet if there are several.
        f"{query.name}=1 (unset it: decode finds the data-parallel rank by the room)": query.get(),
        f"several data-parallel groups with --load-balance-method {parallel.load_balance_method} (use "
        f"{follow})": max(parallel.dp_size, parallel.attn_dp_size) > 1
        and parallel.load_balance_method != follow
        and disagg.disaggregation_mode == "prefill",
    }
    for text, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"transfer backend baton does not support {text} yet")


def _fingerprint(model: Any, weights: str) -> str:
    load_format = get_model().load_format
    changes = {
        "config": model.model_override_args,
        "quantization": model.quantization,
        "revision": model.revision,
        "weights": weights or (load_format if load_format == "dummy" else ""),
    }
    return model_fingerprint(model.model_path, model.hf_text_config.to_dict(), changes)


# Hooks. SGLang logs one that it cannot apply and goes on; `check_hooks` does not.

_transfers: Transfers | None = None
"""Those of this process, where it prefills."""


def _get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    kinds = utils.KVClassType
    mine = {
        kinds.MANAGER: BatonManager,
        kinds.SENDER: BatonSender,
        kinds.RECEIVER: BatonReceiver,
        kinds.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }
    if transfer_backend.value == NAME and class_type in mine:
        return mine[class_type]
    return original(transfer_backend, class_type)


def _prefill_manager(manager: Any, queue: Any) -> None:
    global _transfers  # noqa: PLW0603
    if isinstance(manager, BatonManager):
        manager.open(queue, "prefill")
        _transfers = manager.transfers


def _decode_manager(manager: Any, queue: Any) -> None:
    if isinstance(manager, BatonManager):
        manager.open(queue, "decode")


def _bind_sender(is_created: bool, queue: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if is_created and isinstance(req.disagg_kv_sender, BatonSender):
        req.disagg_kv_sender.bind(req)


def _bind_receiver(decode_req: Any, queue: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(decode_req.kv_receiver, BatonReceiver):
        decode_req.kv_receiver.bind(req)


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if _transfers is None or not batch.forward_mode.is_extend():
        return original(scheduler, batch, *args, **kwargs)
    _transfers.begin_step(batch.reqs)
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        _transfers.end_step()


def _checkpoint(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if _transfers is not None:
        _transfers.follow(req)


def _attention(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(layer, *args, **kwargs)
    if _transfers is not None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[3]
        _transfers.layer_done(layer.layer_id, batch=batch)
    return result


def _linear_attention(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(layer, *args, **kwargs)
    if _transfers is not None:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[0]
        _transfers.layer_done(layer.layer_id, is_state=True, batch=batch)
    return result


HOOKS = (
    ("sglang.srt.disaggregation.utils.get_kv_class", _get_kv_class, HookType.AROUND),
    (
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
        _prefill_manager,
        HookType.AFTER,
    ),
    ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender", _bind_sender, HookType.AFTER),
    (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
        _decode_manager,
        HookType.AFTER,
    ),
    (
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        _bind_receiver,
        HookType.AFTER,
    ),
    ("sglang.srt.managers.scheduler.Scheduler.run_batch", _run_batch, HookType.AROUND),
    (
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill",
        _checkpoint,
        HookType.AFTER,
    ),
    ("sglang.srt.layers.radix_attention.RadixAttention.forward", _attention, HookType.AROUND),
    (
        "sglang.srt.layers.radix_linear_attention.RadixLinearAttention.forward",
        _linear_attention,
        HookType.AROUND,
    ),
)


def register() -> None:
    """Adds the backend's name and hooks to this process."""
    backends = utils.TransferBackend
    if NAME not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        choices.add_disagg_transfer_backend_choices([NAME])
        member: Any = object.__new__(backends)
        member._name_, member._value_ = NAME.upper(), NAME
        backends._member_map_[NAME.upper()] = backends._value2member_map_[NAME] = member
    for target, hook, kind in HOOKS:
        HookRegistry.register(target, hook, kind)


def check_hooks() -> None:
    """Raises ConfigError with the name of a hook that SGLang did not apply."""
    for target, _, _ in HOOKS:
        # Not by what is there: SGLang's own decorators leave the same traces as a hook.
        if target not in HookRegistry._patched:
            raise ConfigError(
                f"SGLang {sglang.__version__} did not apply the hook on {target}, which transfer backend "
                "baton needs; its log says why"
            )
