"""The connector in vLLM's scheduler: which prompts are sent and loaded, decided from requests alone.

A request belongs to a hand-over by its `kv_transfer_params`:

    prefill    {"do_remote_decode": true, "transfer_id": "t1"}
    decode     {"do_remote_prefill": true, "transfer_id": "t1", "source": "host:port"}

Both may be sent at once, in either order. A prefill without a transfer id gets one, and its response has the
parameters for decode, as with connectors that pull.

What is handed over is the prompt without its last token. Decode computes that one, as it does after a hit in
its prefix cache, and so has the logits of the first output token. Prefill's own output is not used.

Engines of other kinds hand over all of the prompt, and so does vLLM with `split_kv`: its scheduler then
computes the last token again. With sliding windows it cannot: the block that this token needs may be gone.

A recurrent state has to be the one before the last token. So prefill computes a prompt without it, and ends.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.adapters.vllm.metadata import (
    BlockIds,
    CachedChunk,
    Cancel,
    DeclinePrompt,
    Load,
    Queue,
    StepMetadata,
    Transfer,
)
from baton.session import prompt_digest

TRANSFER_CHARS_MAX = 128

logger = logging.getLogger("vllm.baton")


@dataclass(slots=True)
class PromptTransfer:
    """A prompt that this engine prefills for another, or another for this one."""

    transfer: Transfer
    source: str = ""
    """At decode."""
    is_begun: bool = False
    """Whether it has left vLLM's queue. What decode lacks from then on, it computes itself."""
    is_announced: bool = False
    """Whether the other side was told that it is in the queue."""
    num_sent: int = 0
    """Tokens that prefill's workers were given to send."""


@dataclass(slots=True)
class WindowPins:
    """Keeps blocks of sliding windows that are being sent.

    When a request goes on or ends, vLLM frees blocks that have left its window. The first of them may still
    be read: decode needs the window of the prompt's last token.
    """

    manager: Any
    """vLLM's KVCacheManager."""
    windows: Mapping[int, int]
    """By KV cache group: its window in tokens."""
    block_tokens: int
    _pinned: dict[str, list[Any]] = field(default_factory=dict)

    def pin(self, request: str, num_tokens: int) -> None:
        """Keeps the windows at the end of `num_tokens`, with the last block, which need not be full."""
        groups = self.manager.get_blocks(request).blocks
        pinned = self._pinned.setdefault(request, [])
        for group, window in self.windows.items():
            first, end = max(0, num_tokens - window) // self.block_tokens, -(-num_tokens // self.block_tokens)
            kept = [block for block in groups[group][first:end] if not block.is_null]
            self.manager.block_pool.touch(kept)
            pinned += kept

    def release(self, request: str) -> None:
        """The request was sent; without pins this does nothing."""
        self.manager.block_pool.free_blocks(reversed(self._pinned.pop(request, [])))


class SchedulerSide:
    """Every request of one engine that is part of a hand-over."""

    def __init__(
        self,
        groups: Sequence[int],
        address: str,
        renew_s: float,
        num_left: int = 1,
        *,
        has_states: bool = False,
    ) -> None:
        self.pins: WindowPins | None = None
        """Where there are windows."""
        self._groups = tuple(groups)
        """The KV cache groups that are handed over."""
        self._address = address
        """Of this engine's coordinator, for responses; empty where it is not known beforehand."""
        self._renew_s = renew_s
        """How often peers of queued prompts are told that the queue moves."""
        self._num_left = num_left
        """Tokens at the end of a prompt that are not handed over."""
        self._has_states = has_states
        """Whether layers are recurrent."""
        self._renewed_s = 0.0
        self._has_moved = False
        """Whether anything was computed since."""
        self._outgoing: dict[str, PromptTransfer] = {}
        self._incoming: dict[str, PromptTransfer] = {}
        self._step = StepMetadata()

    def add_request(self, request: Any) -> None:
        """Notes a new request; one whose parameters cannot be used is served without a hand-over."""
        params = request.kv_transfer_params or {}
        is_outgoing, is_incoming = params.get("do_remote_decode"), params.get("do_remote_prefill")
        num_tokens = request.num_prompt_tokens - self._num_left
        # The only token of a prompt may be computed by decode.
        if not (is_outgoing or is_incoming) or not num_tokens:
            return
        name = request.request_id
        problem = _problem(params, request)
        if problem:
            logger.warning("baton: request %s is served without a hand-over: %s", name, problem)
            return
        # A client's X-Request-Id may be longer than a transfer id.
        own_id = name if len(name) <= TRANSFER_CHARS_MAX else uuid.uuid4().hex
        transfer = Transfer(params.get("transfer_id") or own_id, num_tokens, _digest(request))
        if is_incoming:
            self._incoming[name] = PromptTransfer(transfer, params["source"])
        else:
            self._outgoing[name] = PromptTransfer(transfer)
            if self._has_states:
                _leave_last_token(request)

    # Decode.

    def num_to_load(self, request: Any, num_held: int) -> int:
        """How many tokens after the first `num_held` another engine gives; without side effects."""
        prompt = self._incoming.get(request.request_id)
        if prompt is None or prompt.is_begun:
            return 0
        return max(0, prompt.transfer.num_tokens - num_held)

    def allocated(self, request: Any, blocks: BlockIds, num_external: int) -> None:
        """vLLM gave blocks to a request; it waits for `num_external` tokens."""
        prompt = self._incoming.get(request.request_id)
        if prompt is None or prompt.is_begun:
            return
        prompt.is_begun = True
        if not num_external:
            self._decline(prompt, "decode has all of the prompt")
            return
        num_held = prompt.transfer.num_tokens - num_external
        load = Load(request.request_id, prompt.transfer, prompt.source, num_held, blocks)
        self._step.loads.append(load)

    def _decline(self, prompt: PromptTransfer, text: str) -> None:
        self._step.declines.append(DeclinePrompt(prompt.transfer.id, prompt.source, text))

    # Prefill.

    def build_step(self, scheduled: Any) -> StepMetadata:
        """The metadata of a step, from vLLM's SchedulerOutput."""
        step, self._step = self._step, StepMetadata()
        step.has_forward = scheduled.total_num_scheduled_tokens > 0
        for request in scheduled.preempted_req_ids or ():
            if (prompt := self._outgoing.get(request)) is not None and prompt.is_begun:
                step.preempted.append(request)
                # All of it is computed again, into other blocks; what has landed is passed over.
                prompt.num_sent = 0
        for request, num_computed, new_blocks in _scheduled_requests(scheduled):
            prompt = self._outgoing.get(request)
            if prompt is None:
                continue
            stop = num_computed + scheduled.num_scheduled_tokens[request]
            stop = min(stop, prompt.transfer.num_tokens)
            if stop <= prompt.num_sent:
                continue
            # Tokens of a prefix hit are sent with the first chunk: another request may compute them now.
            blocks = tuple(new_blocks[group] for group in self._groups) if new_blocks else ()
            step.chunks.append(CachedChunk(request, prompt.transfer, (prompt.num_sent, stop), blocks))
            prompt.num_sent, prompt.is_begun = stop, True
            if self.pins is not None and stop == prompt.transfer.num_tokens:
                self.pins.pin(request, stop)
        step.queued = self._queued(time.monotonic())
        self._has_moved = self._has_moved or step.has_forward
        return step

    def _queued(self, now_s: float) -> list[Queue]:
        """Prompts in the queue: the new ones and, now and then while it moves, all of them."""
        is_due = self._has_moved and now_s >= self._renewed_s + self._renew_s
        if is_due:
            self._has_moved, self._renewed_s = False, now_s
        queued = []
        for name, prompt in (*self._outgoing.items(), *self._incoming.items()):
            if not prompt.is_begun and (is_due or not prompt.is_announced):
                prompt.is_announced = True
                queued.append(Queue(name, prompt.transfer, prompt.source))
        return queued

    def sent(self, requests: Iterable[str]) -> None:
        """All workers have sent these prompts, or given them up."""
        if self.pins is not None:
            for request in requests:
                self.pins.release(request)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request ended: whether its blocks are still in use, and the parameters for decode."""
        name = request.request_id
        incoming = self._incoming.pop(name, None)
        if incoming is not None and not incoming.is_begun:
            self._decline(incoming, "the request ended before it had blocks")
        outgoing = self._outgoing.pop(name, None)
        if outgoing is None:
            return False, None
        if not outgoing.is_begun:
            text = "the request ended before it was computed"
            self._step.cancels.append(Cancel(name, outgoing.transfer, text))
            return False, None
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": outgoing.transfer.id}
        return True, params | ({"source": self._address} if self._address else {})

    @property
    def has_messages(self) -> bool:
        """Whether there is something to tell the workers, for which an idle engine has to step."""
        return bool(self._step.loads or self._step.declines or self._step.cancels)


def _scheduled_requests(scheduled: Any) -> Iterator[tuple[str, int, BlockIds | None]]:
    """By request of a step: its computed tokens and its new blocks, all of them where it is new."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids
    cached = scheduled.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)


def _problem(params: dict[str, Any], request: Any) -> str:
    """Why a request cannot be part of a hand-over; empty if it can."""
    if params.get("do_remote_decode") and params.get("do_remote_prefill"):
        return "do_remote_decode and do_remote_prefill are both set; set one"
    transfer = params.get("transfer_id")
    if params.get("do_remote_prefill"):
        source = params.get("source")
        if not isinstance(source, str) or not source:
            return f"source is {source!r}; give the prefill engine's host:port, or its name in the registry"
        if transfer is None:
            return "there is no transfer_id; give the one of the prefill request"
    if transfer is not None and not (isinstance(transfer, str) and 0 < len(transfer) <= TRANSFER_CHARS_MAX):
        return f"transfer_id is {transfer!r:.60}; use a string of 1 to {TRANSFER_CHARS_MAX} characters"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "the prompt has embeddings, which the two sides cannot compare; send token ids or text alone"
    return ""


def _leave_last_token(request: Any) -> None:
    """Has prefill compute a prompt without its last token, as vLLM's NixlConnector does."""
    del request.prompt_token_ids[-1], request._all_token_ids[-1]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def _digest(request: Any) -> bytes:
    """What shaped the cache: the whole prompt, adapter, salt and what was embedded in it."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    embedded = hashlib.blake2b()
    for feature in request.mm_features or ():
        position = feature.mm_position
        embedded.update(f"{feature.identifier}:{position.offset}:{position.length};".encode())
    salt = request.cache_salt or ""
    embeddings = embedded.digest() if request.mm_features else b""
    return prompt_digest(request.prompt_token_ids, adapter=adapter, salt=salt, embeddings=embeddings).value
