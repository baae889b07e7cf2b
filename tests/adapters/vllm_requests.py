"""Requests and scheduler outputs with the fields of vLLM's own that the connector reads."""

from types import SimpleNamespace
from typing import Any

from baton.adapters.vllm.metadata import StepMetadata
from baton.adapters.vllm.scheduler import SchedulerSide


def request(name: str, tokens: list[int], params: dict[str, Any] | None, **fields: Any) -> SimpleNamespace:
    defaults = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        kv_transfer_params=params,
        **defaults | fields,
    )


def prefill_params(transfer: str) -> dict[str, Any]:
    return {"do_remote_decode": True, "transfer_id": transfer}


def decode_params(transfer: str, source: str = "127.0.0.1:1") -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": transfer, "source": source}


def step(
    side: SchedulerSide,
    new: dict[str, tuple[int, int, list[int]]] | None = None,
    cached: dict[str, tuple[int, int, list[int] | None]] | None = None,
    preempted: tuple[str, ...] = (),
) -> StepMetadata:
    """A step of these requests: by name, computed and scheduled tokens and new blocks of the one group."""
    new, cached = new or {}, cached or {}
    num_scheduled = {name: values[1] for name, values in (*new.items(), *cached.items())}
    return side.build_step(
        SimpleNamespace(
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            num_scheduled_tokens=num_scheduled,
            preempted_req_ids=set(preempted),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, num_computed_tokens=values[0], block_ids=(values[2],))
                for name, values in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached),
                num_computed_tokens=[values[0] for values in cached.values()],
                new_block_ids=[None if values[2] is None else (values[2],) for values in cached.values()],
            ),
        )
    )
